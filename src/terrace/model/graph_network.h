// GraphNetwork: a Network over an operator graph, whole, on this machine's CPU. Threads: see
// network.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/model/dense_optimizer.h"
#include "terrace/model/graph.h"
#include "terrace/model/network.h"

namespace terrace {

class GraphNetwork : public Network {
 public:
  // The graph names its inputs as AddNetworkInputs does, and ends in a
  // LogLossOperator called "loss". `text` describes it, for ToText().
  static Result<std::unique_ptr<Network>> Create(std::unique_ptr<Graph> graph,
                                                 const NetworkInputSpec& inputs,
                                                 const DenseOptimizerSpec& optimizer,
                                                 std::string text, std::uint64_t seed,
                                                 std::uint64_t most_bytes = ~std::uint64_t{0});

  const NetworkInputSpec& input_spec() const override { return inputs_; }
  std::uint32_t NextBlock(std::uint32_t left) const override;
  Result<std::unique_ptr<NetworkContext>> NewContext(std::uint32_t max_examples) override;
  FirstLayer first_layer() override;
  Result<double> Forward(NetworkContext* context, std::uint32_t examples) override;
  Status Backward(NetworkContext* context, std::uint32_t examples, float loss_scale,
                  bool add) override;
  void ReduceGradients(std::span<NetworkContext* const> contexts, int part, int parts) override;
  double GradientSquareSum() override;
  double ClippedSquareSum() override;
  void ApplyGradients(const DenseStep& step, int part, int parts) override;
  void Advance() override { ++steps_; }
  std::span<const ParameterInfo> parameters() const override { return subgraph_.parameters(); }
  std::size_t parameter_floats() const override { return subgraph_.parameter_floats(); }
  DenseState Save() const override;
  Status Load(const DenseState& state) override;
  std::uint64_t ContextBytes(std::uint32_t max_examples) const override;
  std::uint64_t ParameterBytes() const override;
  std::string ToText() const override { return text_; }

  const Graph& graph() const { return *graph_; }

 private:
  GraphNetwork(std::unique_ptr<Graph> graph, Subgraph subgraph, DenseOptimizer optimizer);
  // Gradients are reduced and applied by blocks, so that a block's sum of squares does not depend
  // on the split.
  std::size_t blocks() const;
  float* buffer(std::size_t index) const;  // Values, gradients, moments.
  void FindFirstLayer();
  // Of the contexts' gradients, floats [begin, end) of the flat buffer.
  void SumGradients(std::span<NetworkContext* const> contexts, std::size_t begin, std::size_t end);

  const std::unique_ptr<Graph> graph_;
  const Subgraph subgraph_;
  const DenseOptimizer optimizer_;
  NetworkInputSpec inputs_;
  std::string text_;
  ValueId block_ = 0, wide_ = 0, label_ = 0, weight_ = 0, logit_ = 0, loss_ = 0;
  OperatorId first_layer_ = kNoOperator;  // The one FirstLayer is about.
  ParameterInfo first_weight_;            // Its weight.
  HugeBuffer memory_;
  std::vector<double> block_square_sums_;  // (blocks), each written by the thread of its part.
  std::uint64_t steps_ = 0;
};

struct NetworkInputValues {
  ValueId block = 0;  // Embeddings and dense features side by side.
  ValueId wide = 0;   // Where the spec has it.
  ValueId label = 0;
  ValueId weight = 0;
};
// Adds the inputs "embedding", "dense", "wide", "label", "weight" that `spec` has, and "block".
Result<NetworkInputValues> AddNetworkInputs(const NetworkInputSpec& spec, Graph* graph);

// The graph of `dnn`: block -> (linear -> relu) per hidden layer -> linear (+ wide) -> log loss.
Result<std::unique_ptr<Graph>> BuildDnn(const NetworkSpec& spec, const NetworkInputSpec& inputs);

}  // namespace terrace
