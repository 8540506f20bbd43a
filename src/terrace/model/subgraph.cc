#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/rng.h"
#include "terrace/model/graph.h"

namespace terrace {
namespace {

constexpr std::size_t kAlignFloats = 16;  // 64 bytes: a cache line and the widest register.

std::size_t AlignFloats(std::size_t floats) {
  return (floats + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
}

void PushNew(std::vector<ValueId>* list, ValueId value) {
  if (std::find(list->begin(), list->end(), value) == list->end()) list->push_back(value);
}

}  // namespace

Result<Subgraph> Subgraph::Whole(const Graph* graph) {
  std::vector<OperatorId> all(graph->nodes().size());
  std::iota(all.begin(), all.end(), OperatorId{0});
  return Create(graph, all);
}

Result<Subgraph> Subgraph::Create(const Graph* graph, std::span<const OperatorId> operators) {
  Subgraph subgraph;
  subgraph.graph_ = graph;
  subgraph.member_.assign(graph->nodes().size(), false);
  for (const OperatorId op : operators) {
    if (op >= graph->nodes().size() || subgraph.member_[op] ||
        (!subgraph.steps_.empty() && subgraph.steps_.back().op > op)) {
      return InvalidArgumentError(
          fmt::format("network: operator {} of a part is unknown, repeated or out of order", op));
    }
    subgraph.member_[op] = true;
    Step step;
    step.op = op;
    subgraph.steps_.push_back(std::move(step));
  }
  TERRACE_RETURN_IF_ERROR(subgraph.PlaceValues());
  subgraph.PlanParameters();
  subgraph.PlanGradients();
  return subgraph;
}

bool Subgraph::Inside(ValueId id) const {
  const GraphValue& value = graph_->values()[id];
  if (value.kind == GraphValue::Kind::kOutput) return member_[value.producer];
  return std::any_of(value.parts.begin(), value.parts.end(),
                     [this](ValueId part) { return Inside(part); });
}

// The values that must come from outside for `id` to be there. A concat is always asked for part by
// part, since its parts may come from different places.
void Subgraph::Need(ValueId id, std::vector<ValueId>* needed) const {
  const GraphValue& value = graph_->values()[id];
  switch (value.kind) {
    case GraphValue::Kind::kInput:
      PushNew(needed, id);
      return;
    case GraphValue::Kind::kOutput:
      if (!member_[value.producer]) PushNew(needed, id);
      return;
    case GraphValue::Kind::kConcat:
      for (const ValueId part : value.parts) Need(part, needed);
      return;
    case GraphValue::Kind::kColumns: {
      const ValueId whole = value.parts[0];
      if (Inside(whole) || graph_->values()[whole].kind != GraphValue::Kind::kOutput) {
        Need(whole, needed);
      } else {
        PushNew(needed, id);
      }
      return;
    }
  }
}

Status Subgraph::PlaceValues() {
  const auto& values = graph_->values();
  const auto& nodes = graph_->nodes();
  places_.assign(values.size(), Place{});
  Subgraph rest;  // Of the operators that are not members: what it needs of us are our outputs.
  rest.graph_ = graph_;
  rest.member_ = member_;
  rest.member_.flip();
  std::vector<ValueId> wanted;
  for (OperatorId op = 0; op < nodes.size(); ++op) {
    for (const ValueId input : nodes[op].inputs) {
      if (member_[op]) {
        Need(input, &inputs_);
      } else {
        rest.Need(input, &wanted);
      }
    }
  }
  for (const ValueId output : graph_->outputs()) PushNew(&wanted, output);
  for (const ValueId value : wanted) {
    if (Inside(value)) outputs_.push_back(value);
  }

  const auto new_storage = [&](ValueId id) {
    Storage storage;
    storage.width = values[id].width;
    storage.stride = storage.width;  // The matrix products are fastest without gaps.
    storages_.push_back(std::move(storage));
    places_[id] = Place{storages_.size() - 1, 0};
  };
  // From the last value to the first, so that a concat has its place before its parts, and the
  // output of an operator that works in place before its input.
  for (ValueId id = values.size(); id-- > 0;) {
    const GraphValue& value = values[id];
    if (value.kind == GraphValue::Kind::kConcat) {
      const bool taken = std::all_of(value.parts.begin(), value.parts.end(), [&](ValueId part) {
        std::vector<ValueId> needed;
        Need(part, &needed);
        return std::all_of(needed.begin(), needed.end(), [&](ValueId v) {
          return std::find(inputs_.begin(), inputs_.end(), v) != inputs_.end();
        });
      });
      if (!taken) continue;
      if (!places_[id]) new_storage(id);
      std::size_t column = places_[id].column;
      for (const ValueId part : value.parts) {
        places_[part] = Place{places_[id].storage, column};
        column += values[part].width;
      }
    } else if (value.kind == GraphValue::Kind::kOutput && member_[value.producer]) {
      if (!places_[id]) new_storage(id);
      PlanInPlace(value.producer);
    }
  }
  for (const ValueId id : inputs_) {
    if (!places_[id]) new_storage(id);
  }
  for (ValueId id = 0; id < values.size(); ++id) {
    if (values[id].kind != GraphValue::Kind::kColumns || places_[id]) continue;
    const Place whole = places_[values[id].parts[0]];
    if (whole) places_[id] = Place{whole.storage, whole.column + values[id].first_column};
  }
  return OkStatus();
}

// REQUIRES: the operator's output has its place.
void Subgraph::PlanInPlace(OperatorId op) {
  const GraphNode& node = graph_->nodes()[op];
  if (!node.op->in_place()) return;
  const ValueId input = node.inputs[0];
  const GraphValue& value = graph_->values()[input];
  if (value.kind != GraphValue::Kind::kOutput || !member_[value.producer] || places_[input]) return;
  // Nobody else may see the input, which is overwritten.
  std::size_t uses = 0;
  for (const GraphNode& other : graph_->nodes()) {
    uses += static_cast<std::size_t>(std::count(other.inputs.begin(), other.inputs.end(), input));
  }
  for (const GraphValue& other : graph_->values()) {
    uses += static_cast<std::size_t>(std::count(other.parts.begin(), other.parts.end(), input));
  }
  const auto& outputs = graph_->outputs();
  uses += static_cast<std::size_t>(std::count(outputs.begin(), outputs.end(), input));
  if (uses != 1) return;
  places_[input] = places_[node.output];
  const auto step_of = [this](OperatorId id) {
    return std::find_if(steps_.begin(), steps_.end(), [id](const Step& s) { return s.op == id; });
  };
  Step& step = *step_of(op);
  step.in_place = true;
  if (node.op->is_relu() && graph_->nodes()[value.producer].op->absorbs_relu()) {
    step.absorbed = true;
    step_of(value.producer)->relu_follows = true;
  }
}

void Subgraph::PlanParameters() {
  for (Step& step : steps_) {
    for (const ParameterSpec& spec : graph_->nodes()[step.op].parameters) {
      const auto same = [&spec](const ParameterSpec& known) { return known.name == spec.name; };
      const auto known = std::find_if(parameter_specs_.begin(), parameter_specs_.end(), same);
      step.parameters.push_back(static_cast<std::size_t>(known - parameter_specs_.begin()));
      if (known != parameter_specs_.end()) continue;
      ParameterInfo info;
      info.name = spec.name;
      info.shape = spec.shape;
      info.offset = parameter_floats_;
      info.size = spec.size();
      parameter_floats_ += AlignFloats(info.size);
      parameter_specs_.push_back(spec);
      parameters_.push_back(std::move(info));
    }
  }
  std::vector<bool> written(parameters_.size(), false);
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    for (const std::size_t parameter : step->parameters) {
      step->parameter_add.push_back(written[parameter]);
      written[parameter] = true;
    }
  }
}

std::size_t Subgraph::GradientWidth(ValueId id) const {
  const GraphValue& value = graph_->values()[id];
  if (!value.needs_gradient) return 0;
  if (value.kind == GraphValue::Kind::kColumns) {
    const std::size_t whole = GradientWidth(value.parts[0]);
    return whole <= value.first_column ? 0 : std::min(value.width, whole - value.first_column);
  }
  if (value.kind != GraphValue::Kind::kConcat) return value.width;
  std::size_t column = 0, needed = 0;
  for (const ValueId part : value.parts) {
    const std::size_t width = GradientWidth(part);
    if (width > 0) needed = column + width;
    column += graph_->values()[part].width;
  }
  // A gradient without gaps is worth some columns that nobody asked for.
  return needed * 4 >= value.width * 3 ? value.width : needed;
}

void Subgraph::PlanGradients() {
  std::vector<std::vector<int>> writers(storages_.size()), given(storages_.size());
  for (std::size_t s = 0; s < storages_.size(); ++s) {
    writers[s].assign(storages_[s].width, 0);
    given[s].assign(storages_[s].width, 0);
  }
  const auto count = [&](ValueId id, std::size_t width, std::vector<std::vector<int>>* counts) {
    const Place place = places_[id];
    if (width > 0) storages_[place.storage].gradient = true;
    for (std::size_t j = 0; j < width; ++j) ++(*counts)[place.storage][place.column + j];
  };
  for (Step& step : steps_) {
    const GraphNode& node = graph_->nodes()[step.op];
    for (std::size_t i = 0; i < node.inputs.size(); ++i) {
      step.gradient_width.push_back(GradientWidth(node.inputs[i]));
      if (step.in_place && i == 0) continue;  // It changes what the output's takers have written.
      count(node.inputs[i], step.gradient_width.back(), &writers);
    }
    if (graph_->values()[node.output].needs_gradient) {
      storages_[places_[node.output].storage].gradient = true;
    }
  }
  for (const ValueId output : outputs_) count(output, GradientWidth(output), &given);
  for (std::size_t s = 0; s < storages_.size(); ++s) {
    Storage& storage = storages_[s];
    for (std::size_t j = 0; j < storage.width; ++j) {
      storage.add |= writers[s][j] + given[s][j] > 1;
    }
    if (!storage.add) continue;
    for (std::size_t j = 0; j < storage.width; ++j) {
      if (given[s][j] > 0) continue;
      if (!storage.zero.empty() && storage.zero.back().second == j) {
        storage.zero.back().second = j + 1;
      } else {
        storage.zero.emplace_back(j, j + 1);
      }
    }
  }
}

void Subgraph::Initialize(std::uint64_t seed, float* values) const {
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    const ParameterSpec& spec = parameter_specs_[p];
    if (spec.initial == InitialValue::kZero) continue;
    const double bound = std::sqrt(6.0 / spec.fan_in);
    const std::uint64_t stream = HashCombine(seed, HashName(spec.name));
    float* to = values + parameters_[p].offset;
    for (std::size_t i = 0; i < parameters_[p].size; ++i) {
      const double unit = UnitDouble(HashCombine(stream, i));
      to[i] = static_cast<float>((2.0 * unit - 1.0) * bound);
    }
  }
}

std::uint64_t Subgraph::ContextBytes(std::size_t max_examples) const {
  std::size_t floats = AlignFloats(parameter_floats_);
  for (const Storage& storage : storages_) {
    floats += AlignFloats(max_examples * storage.stride) * (storage.gradient ? 2 : 1);
  }
  for (const Step& step : steps_) {
    const GraphNode& node = graph_->nodes()[step.op];
    const std::size_t saved = node.op->SavedWidth(node.input_widths);
    floats += AlignFloats(max_examples * saved);
  }
  return floats * sizeof(float);
}

Result<std::unique_ptr<SubgraphContext>> Subgraph::NewContext(std::size_t max_examples,
                                                              const float* parameters) const {
  auto context = std::make_unique<SubgraphContext>();
  context->subgraph_ = this;
  context->max_examples_ = max_examples;
  TERRACE_ASSIGN_OR_RETURN(context->memory_, HugeBuffer::Allocate(ContextBytes(max_examples)));
  auto* next = reinterpret_cast<float*>(context->memory_.data());
  const auto take = [&next](std::size_t floats) {
    return std::exchange(next, next + AlignFloats(floats));
  };
  context->parameter_gradient_ = take(parameter_floats_);
  for (const Storage& storage : storages_) {
    const std::size_t floats = max_examples * storage.stride;
    context->storage_values_.push_back(Matrix{take(floats), storage.stride, storage.width});
    float* gradient = storage.gradient ? take(floats) : nullptr;
    context->storage_gradients_.push_back(Matrix{gradient, storage.stride, storage.width});
  }
  for (const Step& step : steps_) {
    const GraphNode& node = graph_->nodes()[step.op];
    OperatorContext op;
    op.output = context->value(node.output);
    op.relu_follows = step.relu_follows;
    const std::size_t saved = node.op->SavedWidth(node.input_widths);
    if (saved > 0) op.saved = Matrix{take(max_examples * saved), saved, saved};
    for (std::size_t i = 0; i < node.inputs.size(); ++i) {
      op.inputs.push_back(context->value(node.inputs[i]));
      GradientTarget target;
      if (step.gradient_width[i] > 0) {
        target.matrix = context->gradient(node.inputs[i]);
        target.matrix.width = step.gradient_width[i];
        target.add = !(step.in_place && i == 0) && storages_[places_[node.inputs[i]].storage].add;
      }
      op.input_gradients.push_back(target);
    }
    for (std::size_t p = 0; p < step.parameters.size(); ++p) {
      const std::size_t offset = parameters_[step.parameters[p]].offset;
      op.parameters.push_back(parameters + offset);
      op.parameter_gradients.push_back(
          ParameterTarget{context->parameter_gradient_ + offset, false});
    }
    context->output_gradients_.push_back(context->gradient(node.output));
    context->operators_.push_back(std::move(op));
  }
  return context;
}

Status Subgraph::Forward(SubgraphContext* context, std::size_t examples) const {
  TERRACE_CHECK(examples <= context->max_examples_);
  if (examples == 0) return OkStatus();
  for (std::size_t s = 0; s < steps_.size(); ++s) {
    OperatorContext* op = &context->operators_[s];
    op->examples = examples;
    if (steps_[s].absorbed) continue;
    TERRACE_RETURN_IF_ERROR(graph_->nodes()[steps_[s].op].op->Forward(op, op->inputs));
  }
  return OkStatus();
}

Status Subgraph::Backward(SubgraphContext* context, std::size_t examples, bool add) const {
  TERRACE_CHECK(examples <= context->max_examples_);
  if (examples == 0) {
    if (!add) std::memset(context->parameter_gradient_, 0, parameter_floats_ * sizeof(float));
    return OkStatus();
  }
  for (std::size_t s = 0; s < storages_.size(); ++s) {
    for (const auto& [first, last] : storages_[s].zero) {
      if (!storages_[s].gradient) break;
      for (std::size_t e = 0; e < examples; ++e) {
        float* line = context->storage_gradients_[s].line(e);
        std::memset(line + first, 0, (last - first) * sizeof(float));
      }
    }
  }
  for (std::size_t s = steps_.size(); s-- > 0;) {
    if (steps_[s].absorbed || !context->output_gradients_[s]) continue;  // Or nothing learns here.
    OperatorContext* op = &context->operators_[s];
    for (std::size_t p = 0; p < op->parameter_gradients.size(); ++p) {
      op->parameter_gradients[p].add = add || steps_[s].parameter_add[p];
    }
    TERRACE_RETURN_IF_ERROR(
        graph_->nodes()[steps_[s].op].op->Backward(op, context->output_gradients_[s]));
  }
  return OkStatus();
}

Matrix SubgraphContext::value(ValueId id) const {
  const Subgraph::Place place = subgraph_->places_[id];
  TERRACE_CHECK(static_cast<bool>(place));
  Matrix matrix = storage_values_[place.storage];
  matrix.data += place.column;
  matrix.width = subgraph_->graph_->values()[id].width;
  return matrix;
}

Matrix SubgraphContext::gradient(ValueId id) const {
  const Subgraph::Place place = subgraph_->places_[id];
  TERRACE_CHECK(static_cast<bool>(place));
  Matrix matrix = storage_gradients_[place.storage];
  if (!matrix) return matrix;
  matrix.data += place.column;
  matrix.width = subgraph_->graph_->values()[id].width;
  return matrix;
}

void SubgraphContext::set_product_given(OperatorId id, bool given) {
  for (std::size_t s = 0; s < operators_.size(); ++s) {
    if (subgraph_->steps_[s].op != id) continue;
    TERRACE_CHECK(subgraph_->graph_->nodes()[id].op->takes_product());
    operators_[s].product_given = given;
    return;
  }
  TERRACE_CHECK(false);
}

Matrix SubgraphContext::saved(OperatorId id) const {
  for (std::size_t s = 0; s < operators_.size(); ++s) {
    if (subgraph_->steps_[s].op == id) return operators_[s].saved;
  }
  TERRACE_CHECK(false);
}

}  // namespace terrace
