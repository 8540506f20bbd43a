#include "terrace/model/graph_network.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/units.h"
#include "terrace/model/gemm.h"

namespace terrace {
namespace {

// Parameters that stay in a second cache of 1 or 2 MiB beside the values of one block.
constexpr std::size_t kMostBlockedParameterBytes = 768 << 10;
constexpr std::size_t kBlockFloats = 2048;  // 8 KiB of each buffer: a block stays in the L1 cache.

class GraphContext : public NetworkContext {
 public:
  GraphContext(std::unique_ptr<SubgraphContext> subgraph, OperatorId first_layer,
               NetworkInput input, const float* logit, const float* probability, const float* loss,
               float* loss_gradient, Matrix block_gradient, const float* wide_gradient,
               const float* product_gradient)
      : subgraph_(std::move(subgraph)),
        first_layer_(first_layer),
        input_(input),
        logit_(logit),
        probability_(probability),
        loss_(loss),
        loss_gradient_(loss_gradient),
        block_gradient_(block_gradient),
        wide_gradient_(wide_gradient),
        product_gradient_(product_gradient) {}

  NetworkInput input() override { return input_; }
  void set_input_form(InputForm form) override {
    input_form_ = form;
    if (first_layer_ == kNoOperator) {
      TERRACE_CHECK(form == InputForm::kBlock);
    } else {
      subgraph_->set_product_given(first_layer_, form == InputForm::kProduct);
    }
  }
  InputForm input_form() const { return input_form_; }
  const float* probability() const override { return probability_; }
  const float* logit() const override { return logit_; }
  const float* block_gradient() const override { return block_gradient_.data; }
  std::size_t block_gradient_stride() const override { return block_gradient_.stride; }
  const float* wide_gradient() const override { return wide_gradient_; }
  const float* product_gradient() const override { return product_gradient_; }

  SubgraphContext* subgraph() const { return subgraph_.get(); }
  const float* loss() const { return loss_; }
  float* loss_gradient() const { return loss_gradient_; }

 private:
  const std::unique_ptr<SubgraphContext> subgraph_;
  const OperatorId first_layer_;
  const NetworkInput input_;
  const float* const logit_;
  const float* const probability_;
  const float* const loss_;
  float* const loss_gradient_;
  const Matrix block_gradient_;
  const float* const wide_gradient_;
  const float* const product_gradient_;
  InputForm input_form_ = InputForm::kBlock;
};

std::pair<std::size_t, std::size_t> PartOfBlocks(std::size_t blocks, int part, int parts) {
  const auto p = static_cast<std::size_t>(part), n = static_cast<std::size_t>(parts);
  return {blocks * p / n, blocks * (p + 1) / n};
}

double SquareSum(std::size_t count, const float* values) {
  constexpr std::size_t kLanes = 8;  // Sums of their own, so that the order is fixed and parallel.
  double sums[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      sums[lane] += value * value;
    }
  }
  for (; i < count; ++i) sums[0] += static_cast<double>(values[i]) * values[i];
  double sum = 0;
  for (const double lane : sums) sum += lane;
  return sum;
}

std::size_t AlignToBlock(std::size_t floats) { return AlignUp(floats, kBlockFloats); }

}  // namespace

GraphNetwork::GraphNetwork(std::unique_ptr<Graph> graph, Subgraph subgraph,
                           DenseOptimizer optimizer)
    : graph_(std::move(graph)), subgraph_(std::move(subgraph)), optimizer_(std::move(optimizer)) {}

Result<std::unique_ptr<Network>> GraphNetwork::Create(std::unique_ptr<Graph> graph,
                                                      const NetworkInputSpec& inputs,
                                                      const DenseOptimizerSpec& optimizer_spec,
                                                      std::string text, std::uint64_t seed,
                                                      std::uint64_t most_bytes) {
  TERRACE_ASSIGN_OR_RETURN(DenseOptimizer optimizer, DenseOptimizer::Create(optimizer_spec));
  TERRACE_ASSIGN_OR_RETURN(Subgraph subgraph, Subgraph::Whole(graph.get()));
  std::unique_ptr<GraphNetwork> network(
      new GraphNetwork(std::move(graph), std::move(subgraph), std::move(optimizer)));
  network->inputs_ = inputs;
  network->text_ = std::move(text);
  const Graph& built = network->graph();
  TERRACE_ASSIGN_OR_RETURN(network->block_, built.Find("block"));
  if (inputs.wide) {
    TERRACE_ASSIGN_OR_RETURN(network->wide_, built.Find("wide"));
  }
  TERRACE_ASSIGN_OR_RETURN(network->label_, built.Find("label"));
  TERRACE_ASSIGN_OR_RETURN(network->weight_, built.Find("weight"));
  TERRACE_ASSIGN_OR_RETURN(network->loss_, built.Find("loss"));
  network->logit_ = built.nodes()[built.values()[network->loss_].producer].inputs[0];
  network->FindFirstLayer();
  const auto buffers = 2 + static_cast<std::uint64_t>(network->optimizer_.moments());
  const std::uint64_t floats = AlignToBlock(network->parameter_floats());
  if (buffers * floats > most_bytes / sizeof(float)) {
    return InvalidArgumentError(
        fmt::format("network.hidden: {} parameters take {} with gradients and optimizer state, "
                    "more than the memory.budget of {}: raise that beyond it, or choose smaller "
                    "layers",
                    FormatCount(network->parameter_floats()),
                    FormatBytes(buffers * floats * sizeof(float)), FormatBytes(most_bytes)));
  }
  TERRACE_ASSIGN_OR_RETURN(network->memory_,
                           HugeBuffer::Allocate(buffers * floats * sizeof(float)));
  network->block_square_sums_.assign(network->blocks(), 0.0);
  network->subgraph_.Initialize(seed, network->buffer(0));
  if (const float initial = network->optimizer_.initial_moment(); initial != 0) {
    // The floats between parameters stay zero.
    for (const ParameterInfo& parameter : network->parameters()) {
      std::fill_n(network->buffer(2) + parameter.offset, parameter.size, initial);
    }
  }
  return std::unique_ptr<Network>(std::move(network));
}

void GraphNetwork::FindFirstLayer() {
  // Whatever else takes a part of the block needs it as a block.
  const std::vector<GraphValue>& values = graph_->values();
  const auto of_block = [&](ValueId id) {
    if (id == block_) return true;
    const std::vector<ValueId>& parts = values[block_].parts;
    const bool columns = values[id].kind == GraphValue::Kind::kColumns;
    return std::find(parts.begin(), parts.end(), columns ? values[id].parts[0] : id) !=
               parts.end() ||
           (columns && values[id].parts[0] == block_);
  };
  OperatorId taker = kNoOperator;
  for (OperatorId op = 0; op < graph_->nodes().size(); ++op) {
    const std::vector<ValueId>& inputs = graph_->nodes()[op].inputs;
    if (std::none_of(inputs.begin(), inputs.end(), of_block)) continue;
    if (taker != kNoOperator || inputs.size() != 1 || inputs[0] != block_) return;
    taker = op;
  }
  if (taker == kNoOperator || !graph_->nodes()[taker].op->takes_product()) return;
  const std::string& name = graph_->nodes()[taker].parameters[0].name;
  for (OperatorId op = 0; op < graph_->nodes().size(); ++op) {
    for (const ParameterSpec& parameter : graph_->nodes()[op].parameters) {
      if (op != taker && parameter.name == name) return;  // Its gradient is not ours alone.
    }
  }
  for (const ParameterInfo& parameter : parameters()) {
    if (parameter.name == name) first_weight_ = parameter;
  }
  first_layer_ = taker;
}

FirstLayer GraphNetwork::first_layer() {
  if (first_layer_ == kNoOperator) return {};
  const GraphNode& node = graph_->nodes()[first_layer_];
  return {static_cast<std::uint32_t>(graph_->values()[node.output].width),
          buffer(0) + first_weight_.offset, buffer(1) + first_weight_.offset};
}

std::size_t GraphNetwork::blocks() const { return AlignToBlock(parameter_floats()) / kBlockFloats; }

float* GraphNetwork::buffer(std::size_t index) const {
  return reinterpret_cast<float*>(memory_.data()) + index * AlignToBlock(parameter_floats());
}

std::uint32_t GraphNetwork::NextBlock(std::uint32_t left) const {
  if (parameter_floats() * sizeof(float) > kMostBlockedParameterBytes) return left;
  return static_cast<std::uint32_t>(GemmBlock(left));
}

Result<std::unique_ptr<NetworkContext>> GraphNetwork::NewContext(std::uint32_t max_examples) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<SubgraphContext> context,
                           subgraph_.NewContext(max_examples, buffer(0)));
  NetworkInput input;
  const Matrix block = context->value(block_);
  input.block = block.data;
  input.stride = block.stride;
  if (inputs_.wide) input.wide = context->value(wide_).data;
  input.label = context->value(label_).data;
  input.weight = context->value(weight_).data;
  const float* wide_gradient = inputs_.wide ? context->gradient(wide_).data : nullptr;
  const Matrix block_gradient = context->gradient(block_);
  const float* product_gradient = nullptr;
  if (first_layer_ != kNoOperator) {
    const ValueId output = graph_->nodes()[first_layer_].output;
    const Matrix product = context->value(output), gradient = context->gradient(output);
    TERRACE_CHECK(product.stride == product.width && gradient.stride == gradient.width);
    input.product = product.data;
    product_gradient = gradient.data;
  }
  const OperatorId loss_operator = graph_->values()[loss_].producer;
  const float* logit = context->value(logit_).data;
  const float* probability = context->saved(loss_operator).data;
  const float* loss = context->value(loss_).data;
  float* loss_gradient = context->gradient(loss_).data;
  return std::unique_ptr<NetworkContext>(std::make_unique<GraphContext>(
      std::move(context), first_layer_, input, logit, probability, loss, loss_gradient,
      block_gradient, wide_gradient, product_gradient));
}

Result<double> GraphNetwork::Forward(NetworkContext* context, std::uint32_t examples) {
  auto* graph_context = static_cast<GraphContext*>(context);
  TERRACE_RETURN_IF_ERROR(subgraph_.Forward(graph_context->subgraph(), examples));
  double sum = 0;
  for (std::uint32_t e = 0; e < examples; ++e) sum += graph_context->loss()[e];
  return sum;
}

Status GraphNetwork::Backward(NetworkContext* context, std::uint32_t examples, float loss_scale,
                              bool add) {
  auto* graph_context = static_cast<GraphContext*>(context);
  std::fill_n(graph_context->loss_gradient(), examples, loss_scale);
  return subgraph_.Backward(graph_context->subgraph(), examples, add);
}

void GraphNetwork::ReduceGradients(std::span<NetworkContext* const> contexts, int part, int parts) {
  std::size_t given_begin = 0, given_end = 0;  // What the caller has written.
  if (static_cast<const GraphContext*>(contexts[0])->input_form() == InputForm::kProduct) {
    given_begin = first_weight_.offset;
    given_end = given_begin + first_weight_.size;
  }
  const auto [first, last] = PartOfBlocks(blocks(), part, parts);
  for (std::size_t block = first; block < last; ++block) {
    const std::size_t begin = block * kBlockFloats;
    const std::size_t count = std::min(kBlockFloats, parameter_floats() - begin);
    const std::size_t end = begin + count;
    SumGradients(contexts, begin, std::min(end, std::max(begin, given_begin)));
    SumGradients(contexts, std::max(begin, std::min(end, given_end)), end);
    block_square_sums_[block] = SquareSum(count, buffer(1) + begin);
  }
}

void GraphNetwork::SumGradients(std::span<NetworkContext* const> contexts, std::size_t begin,
                                std::size_t end) {
  if (begin >= end) return;
  float* __restrict sum = buffer(1) + begin;
  for (std::size_t c = 0; c < contexts.size(); ++c) {
    const float* gradient =
        static_cast<GraphContext*>(contexts[c])->subgraph()->parameter_gradient() + begin;
    if (c == 0) {
      std::memcpy(sum, gradient, (end - begin) * sizeof(float));
    } else {
      for (std::size_t i = 0; i < end - begin; ++i) sum[i] += gradient[i];
    }
  }
}

double GraphNetwork::GradientSquareSum() {
  double sum = 0;
  for (const double block : block_square_sums_) sum += block;
  return sum;
}

double GraphNetwork::ClippedSquareSum() {
  const double sum = GradientSquareSum(), scale = optimizer_.ClipScale(sum);
  return scale == 1 ? sum : sum * scale * scale;
}

void GraphNetwork::ApplyGradients(const DenseStep& step, int part, int parts) {
  const float clip_scale = optimizer_.ClipScale(GradientSquareSum());
  const auto [first, last] = PartOfBlocks(blocks(), part, parts);
  for (std::size_t block = first; block < last; ++block) {
    const std::size_t begin = block * kBlockFloats;
    const std::size_t count = std::min(kBlockFloats, parameter_floats() - begin);
    float* value = buffer(0) + begin;
    float* gradient = buffer(1) + begin;
    float* moment1 = optimizer_.moments() >= 1 ? buffer(2) + begin : nullptr;
    float* moment2 = optimizer_.moments() >= 2 ? buffer(3) + begin : nullptr;
    optimizer_.PrepareGradient(count, clip_scale, value, gradient);
    optimizer_.AccumulateMoments(count, gradient, moment1, moment2);
    optimizer_.Apply(count, step.learning_rate, steps_ + 1, gradient, moment1, moment2, value);
  }
}

DenseState GraphNetwork::Save() const {
  DenseState state;
  state.steps = steps_;
  const auto save = [&](std::string name, std::size_t index) {
    state.names.push_back(std::move(name));
    state.buffers.emplace_back(buffer(index), buffer(index) + parameter_floats());
  };
  save("value", 0);
  for (int moment = 1; moment <= optimizer_.moments(); ++moment) {
    save(fmt::format("moment{}", moment), static_cast<std::size_t>(moment) + 1);
  }
  return state;
}

Status GraphNetwork::Load(const DenseState& state) {
  const DenseState mine = Save();
  if (state.names != mine.names || state.buffers.size() != state.names.size()) {
    return InvalidArgumentError(
        fmt::format("network: saved state has the buffers [{}], this network needs [{}]; its "
                    "optimizer is another one",
                    fmt::join(state.names, ", "), fmt::join(mine.names, ", ")));
  }
  for (std::size_t i = 0; i < state.buffers.size(); ++i) {
    if (state.buffers[i].size() != parameter_floats()) {
      return InvalidArgumentError(fmt::format(
          "network: saved state has {} parameters in \"{}\", this network has {}; its layers or "
          "inputs are others",
          state.buffers[i].size(), state.names[i], parameter_floats()));
    }
  }
  for (std::size_t i = 0; i < state.buffers.size(); ++i) {
    std::copy(state.buffers[i].begin(), state.buffers[i].end(), buffer(i == 0 ? 0 : i + 1));
  }
  steps_ = state.steps;
  return OkStatus();
}

std::uint64_t GraphNetwork::ContextBytes(std::uint32_t max_examples) const {
  return HugeBuffer::SizeFor(subgraph_.ContextBytes(max_examples));
}

std::uint64_t GraphNetwork::ParameterBytes() const { return memory_.size(); }

}  // namespace terrace
