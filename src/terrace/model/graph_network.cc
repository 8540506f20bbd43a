#include "terrace/model/graph_network.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "terrace/model/gemm.h"

namespace terrace {
namespace {

// Parameters that stay in a second cache of 1 or 2 MiB beside the values of one block.
constexpr std::size_t kMostBlockedParameterBytes = 768 << 10;
constexpr std::size_t kBlockFloats = 2048;  // 8 KiB of each buffer: a block stays in the L1 cache.

class GraphContext : public NetworkContext {
 public:
  GraphContext(std::unique_ptr<SubgraphContext> subgraph, NetworkInput input, const float* logit,
               const float* probability, const float* loss, float* loss_gradient,
               Matrix block_gradient, const float* wide_gradient)
      : subgraph_(std::move(subgraph)),
        input_(input),
        logit_(logit),
        probability_(probability),
        loss_(loss),
        loss_gradient_(loss_gradient),
        block_gradient_(block_gradient),
        wide_gradient_(wide_gradient) {}

  NetworkInput input() override { return input_; }
  const float* probability() const override { return probability_; }
  const float* logit() const override { return logit_; }
  const float* block_gradient() const override { return block_gradient_.data; }
  std::size_t block_gradient_stride() const override { return block_gradient_.stride; }
  const float* wide_gradient() const override { return wide_gradient_; }

  SubgraphContext* subgraph() const { return subgraph_.get(); }
  const float* loss() const { return loss_; }
  float* loss_gradient() const { return loss_gradient_; }

 private:
  const std::unique_ptr<SubgraphContext> subgraph_;
  const NetworkInput input_;
  const float* const logit_;
  const float* const probability_;
  const float* const loss_;
  float* const loss_gradient_;
  const Matrix block_gradient_;
  const float* const wide_gradient_;
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

std::size_t AlignToBlock(std::size_t floats) {
  return (floats + kBlockFloats - 1) / kBlockFloats * kBlockFloats;
}

}  // namespace

GraphNetwork::GraphNetwork(std::unique_ptr<Graph> graph, Subgraph subgraph,
                           DenseOptimizer optimizer)
    : graph_(std::move(graph)), subgraph_(std::move(subgraph)), optimizer_(std::move(optimizer)) {}

Result<std::unique_ptr<Network>> GraphNetwork::Create(std::unique_ptr<Graph> graph,
                                                      const NetworkInputSpec& inputs,
                                                      const DenseOptimizerSpec& optimizer_spec,
                                                      std::string text, std::uint64_t seed) {
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
  const auto buffers = 2 + static_cast<std::uint64_t>(network->optimizer_.moments());
  const std::uint64_t floats = AlignToBlock(network->parameter_floats());
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
  const OperatorId loss_operator = graph_->values()[loss_].producer;
  const float* logit = context->value(logit_).data;
  const float* probability = context->saved(loss_operator).data;
  const float* loss = context->value(loss_).data;
  float* loss_gradient = context->gradient(loss_).data;
  return std::unique_ptr<NetworkContext>(
      std::make_unique<GraphContext>(std::move(context), input, logit, probability, loss,
                                     loss_gradient, block_gradient, wide_gradient));
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
  const auto [first, last] = PartOfBlocks(blocks(), part, parts);
  for (std::size_t block = first; block < last; ++block) {
    const std::size_t begin = block * kBlockFloats;
    const std::size_t count = std::min(kBlockFloats, parameter_floats() - begin);
    float* __restrict sum = buffer(1) + begin;
    for (std::size_t c = 0; c < contexts.size(); ++c) {
      const float* gradient =
          static_cast<GraphContext*>(contexts[c])->subgraph()->parameter_gradient() + begin;
      if (c == 0) {
        std::memcpy(sum, gradient, count * sizeof(float));
      } else {
        for (std::size_t i = 0; i < count; ++i) sum[i] += gradient[i];
      }
    }
    block_square_sums_[block] = SquareSum(count, sum);
  }
}

double GraphNetwork::GradientSquareSum() {
  double sum = 0;
  for (const double block : block_square_sums_) sum += block;
  return sum;
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
  const std::uint64_t bytes = subgraph_.ContextBytes(max_examples);
  const std::uint64_t unit = bytes >= kHugePageBytes ? kHugePageBytes : 4096;
  return (bytes + unit - 1) / unit * unit;
}

std::uint64_t GraphNetwork::ParameterBytes() const { return memory_.size(); }

}  // namespace terrace
