#include "terrace/model/graph.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace terrace {

Status Graph::CheckNewName(const std::string& name) const {
  for (const GraphValue& value : values_) {
    if (value.name == name) {
      return InvalidArgumentError(fmt::format("network: the name \"{}\" is given twice", name));
    }
  }
  return OkStatus();
}

Result<ValueId> Graph::AddInput(const std::string& name, std::size_t width, bool needs_gradient) {
  TERRACE_RETURN_IF_ERROR(CheckNewName(name));
  if (width == 0) {
    return InvalidArgumentError(fmt::format("network: input \"{}\" has width 0", name));
  }
  GraphValue value;
  value.name = name;
  value.width = width;
  value.needs_gradient = needs_gradient;
  values_.push_back(std::move(value));
  placed_.push_back(false);
  return values_.size() - 1;
}

Result<ValueId> Graph::AddColumns(const std::string& name, ValueId of, std::size_t first,
                                  std::size_t width) {
  TERRACE_RETURN_IF_ERROR(CheckNewName(name));
  const GraphValue& whole = values_[of];
  if (width == 0 || first > whole.width || width > whole.width - first) {
    return InvalidArgumentError(
        fmt::format("network: \"{}\" takes columns [{}, {}) of \"{}\", which has {}", name, first,
                    first + width, whole.name, whole.width));
  }
  GraphValue value;
  value.name = name;
  value.width = width;
  value.kind = GraphValue::Kind::kColumns;
  value.needs_gradient = whole.needs_gradient;
  value.parts = {of};
  value.first_column = first;
  values_.push_back(std::move(value));
  placed_.push_back(true);  // Where its whole lies.
  return values_.size() - 1;
}

Result<ValueId> Graph::AddConcat(const std::string& name, std::span<const ValueId> parts) {
  TERRACE_RETURN_IF_ERROR(CheckNewName(name));
  GraphValue value;
  value.name = name;
  value.kind = GraphValue::Kind::kConcat;
  for (const ValueId part : parts) {
    if (placed_[part] || std::count(parts.begin(), parts.end(), part) > 1) {
      return InvalidArgumentError(fmt::format(
          "network: \"{}\" cannot take \"{}\", which already lies in another value; copy it first",
          name, values_[part].name));
    }
    value.width += values_[part].width;
    value.needs_gradient |= values_[part].needs_gradient;
    value.parts.push_back(part);
  }
  if (parts.empty()) {
    return InvalidArgumentError(fmt::format("network: \"{}\" has no parts", name));
  }
  for (const ValueId part : parts) placed_[part] = true;
  values_.push_back(std::move(value));
  placed_.push_back(false);
  return values_.size() - 1;
}

Result<ValueId> Graph::AddOperator(std::unique_ptr<Operator> op, std::span<const ValueId> inputs) {
  TERRACE_RETURN_IF_ERROR(CheckNewName(op->name()));
  GraphNode node;
  bool needs_gradient = false;
  for (const ValueId input : inputs) {
    node.inputs.push_back(input);
    node.input_widths.push_back(values_[input].width);
    needs_gradient |= values_[input].needs_gradient;
  }
  GraphValue value;
  TERRACE_ASSIGN_OR_RETURN(value.width, op->OutputWidth(node.input_widths));
  node.parameters = op->Parameters(node.input_widths);
  for (const ParameterSpec& wanted : node.parameters) {
    for (const GraphNode& other : nodes_) {
      for (const ParameterSpec& known : other.parameters) {
        if (known.name == wanted.name && known.shape != wanted.shape) {
          return InvalidArgumentError(
              fmt::format("network: \"{}\" and \"{}\" share \"{}\" with different shapes",
                          other.op->name(), op->name(), wanted.name));
        }
      }
    }
  }
  value.name = op->name();
  value.kind = GraphValue::Kind::kOutput;
  value.needs_gradient = needs_gradient || !node.parameters.empty();
  value.producer = nodes_.size();
  node.output = values_.size();
  node.op = std::move(op);
  nodes_.push_back(std::move(node));
  values_.push_back(std::move(value));
  placed_.push_back(false);
  return values_.size() - 1;
}

void Graph::MarkOutput(ValueId value) { outputs_.push_back(value); }

Result<ValueId> Graph::Find(const std::string& name) const {
  for (ValueId id = 0; id < values_.size(); ++id) {
    if (values_[id].name == name) return id;
  }
  return NotFoundError(fmt::format("network: no value is called \"{}\"", name));
}

OperatorCost Graph::Cost() const {
  OperatorCost sum;
  for (const GraphNode& node : nodes_) {
    const OperatorCost cost = node.op->Cost(node.input_widths);
    sum.forward_flops_per_example += cost.forward_flops_per_example;
    sum.backward_flops_per_example += cost.backward_flops_per_example;
    sum.activation_bytes_per_example += cost.activation_bytes_per_example;
    sum.parameter_bytes += cost.parameter_bytes;
  }
  return sum;
}

}  // namespace terrace
