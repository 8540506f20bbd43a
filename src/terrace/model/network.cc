#include "terrace/model/network.h"

#include <fmt/format.h>

#include "terrace/model/graph_network.h"
#include "terrace/model/operators.h"

namespace terrace {

Result<NetworkInputValues> AddNetworkInputs(const NetworkInputSpec& spec, Graph* graph) {
  NetworkInputValues values;
  std::vector<ValueId> parts;
  if (spec.embedding_width > 0) {
    TERRACE_ASSIGN_OR_RETURN(const ValueId embedding,
                             graph->AddInput("embedding", spec.embedding_width, true));
    parts.push_back(embedding);
  }
  if (spec.dense_width > 0) {
    TERRACE_ASSIGN_OR_RETURN(const ValueId dense,
                             graph->AddInput("dense", spec.dense_width, false));
    parts.push_back(dense);
  }
  if (parts.empty()) {
    return InvalidArgumentError(
        "network: the data has neither slots nor dense features; name some in the job file");
  }
  TERRACE_ASSIGN_OR_RETURN(values.block, graph->AddConcat("block", parts));
  if (spec.wide) {
    TERRACE_ASSIGN_OR_RETURN(values.wide, graph->AddInput("wide", 1, true));
  }
  TERRACE_ASSIGN_OR_RETURN(values.label, graph->AddInput("label", 1, false));
  TERRACE_ASSIGN_OR_RETURN(values.weight, graph->AddInput("weight", 1, false));
  return values;
}

Result<std::unique_ptr<Graph>> BuildDnn(const NetworkSpec& spec, const NetworkInputSpec& inputs) {
  if (spec.wide != inputs.wide) {
    return InvalidArgumentError(
        fmt::format("network: wide is {}, but the inputs say {}", spec.wide, inputs.wide));
  }
  auto graph = std::make_unique<Graph>();
  TERRACE_ASSIGN_OR_RETURN(const NetworkInputValues values, AddNetworkInputs(inputs, graph.get()));
  ValueId last = values.block;
  const auto add = [&](std::unique_ptr<Operator> op, std::vector<ValueId> from) -> Status {
    TERRACE_ASSIGN_OR_RETURN(last, graph->AddOperator(std::move(op), from));
    return OkStatus();
  };
  for (std::size_t i = 0; i < spec.hidden.size(); ++i) {
    TERRACE_RETURN_IF_ERROR(
        add(std::make_unique<LinearOperator>(fmt::format("linear{}", i), spec.hidden[i]), {last}));
    TERRACE_RETURN_IF_ERROR(add(std::make_unique<ReluOperator>(fmt::format("relu{}", i)), {last}));
  }
  TERRACE_RETURN_IF_ERROR(add(
      std::make_unique<LinearOperator>(fmt::format("linear{}", spec.hidden.size()), 1), {last}));
  if (spec.wide) {
    TERRACE_RETURN_IF_ERROR(add(std::make_unique<AddOperator>("wide_sum"), {last, values.wide}));
  }
  TERRACE_RETURN_IF_ERROR(
      add(std::make_unique<LogLossOperator>("loss"), {last, values.label, values.weight}));
  graph->MarkOutput(last);
  return graph;
}

namespace {

std::string Describe(const NetworkSpec& spec, const NetworkInputSpec& inputs) {
  const DenseOptimizerSpec& optimizer = spec.optimizer;
  std::string text = fmt::format("{}(embedding={}, dense={}, hidden=[{}], wide={}) {}(", spec.type,
                                 inputs.embedding_width, inputs.dense_width,
                                 fmt::join(spec.hidden, ", "), spec.wide, optimizer.type);
  if (optimizer.type == "sgd") {
    text += fmt::format("momentum={}", optimizer.momentum);
  } else if (optimizer.type == "adagrad") {
    text += fmt::format("epsilon={}, initial_accumulator={}", optimizer.epsilon,
                        optimizer.initial_accumulator);
  } else {
    text += fmt::format("epsilon={}, beta1={}, beta2={}", optimizer.epsilon, optimizer.beta1,
                        optimizer.beta2);
  }
  return text + fmt::format(", l2={}, clip_norm={})", optimizer.l2, optimizer.clip_norm);
}

}  // namespace

Result<std::unique_ptr<Network>> CreateNetwork(const NetworkSpec& spec,
                                               const NetworkInputSpec& inputs, std::uint64_t seed,
                                               std::uint64_t most_bytes) {
  if (spec.type != "dnn") {
    return InvalidArgumentError(
        fmt::format("network.type is \"{}\"; the known type is dnn", spec.type));
  }
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<Graph> graph, BuildDnn(spec, inputs));
  return GraphNetwork::Create(std::move(graph), inputs, spec.optimizer, Describe(spec, inputs),
                              seed, most_bytes);
}

}  // namespace terrace
