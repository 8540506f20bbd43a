// The network against torch: gradients by autograd in double, optimizers, and operators whose
// backward is autograd itself.
#include <sys/types.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/base/thread.h"
#include "terrace/model/dense_optimizer.h"
#include "terrace/model/graph.h"
#include "terrace/model/graph_network.h"
#include "terrace/model/operators.h"
#include "terrace/model/torch_operator.h"

namespace terrace {
namespace {

float Signed(std::uint64_t seed, std::uint64_t index) {
  return 2 * UnitFloat(HashCombine(seed, index)) - 1;
}

at::Tensor Copy(const float* data, std::vector<std::int64_t> shape) {
  return at::from_blob(const_cast<float*>(data), shape, at::kFloat).to(at::kDouble).clone();
}

at::Tensor Lines(const float* data, std::int64_t lines, std::int64_t width, std::int64_t stride) {
  return at::from_blob(const_cast<float*>(data), {lines, width}, {stride, 1}, at::kFloat)
      .to(at::kDouble)
      .clone();
}

double RelativeDistance(const at::Tensor& expected, const at::Tensor& actual) {
  return ((expected - actual).norm() / expected.norm()).item<double>();
}

void Fill(const NetworkInputSpec& spec, std::uint32_t examples, const NetworkInput& input) {
  for (std::uint32_t e = 0; e < examples; ++e) {
    for (std::uint32_t j = 0; j < spec.width(); ++j) {
      input.block[e * input.stride + j] = Signed(e, j);
    }
    if (spec.wide) input.wide[e] = Signed(e, 100000);
    input.label[e] = e % 3 == 0 ? 1.0f : 0.0f;
    input.weight[e] = 0.5f + UnitFloat(HashCombine(e, 100001));
  }
}

TEST(Torch, GradientsAreThoseOfAutogradInDouble) {
  NetworkSpec spec;
  spec.hidden = {256, 128, 40};
  spec.wide = true;
  spec.optimizer.type = "sgd";
  const NetworkInputSpec inputs{416, 13, true};
  constexpr std::uint32_t kExamples = 700;  // Blocks of unequal size.
  auto network = CreateNetwork(spec, inputs, 5);
  ASSERT_TRUE(network.ok());
  auto context = (*network)->NewContext(kExamples);
  ASSERT_TRUE(context.ok());
  const NetworkInput input = (*context)->input();
  Fill(inputs, kExamples, input);
  const DenseState before = (*network)->Save();
  const auto loss = (*network)->Forward(context->get(), kExamples);
  ASSERT_TRUE(loss.ok());
  ASSERT_TRUE((*network)->Backward(context->get(), kExamples, 1.0f, false).ok());
  // With SGD from zero parameters, the new value is minus the gradient.
  DenseState zero = before;
  std::fill(zero.buffers[0].begin(), zero.buffers[0].end(), 0.0f);
  ASSERT_TRUE((*network)->Load(zero).ok());
  NetworkContext* contexts[] = {context->get()};
  (*network)->ReduceGradients(contexts, 0, 1);
  (*network)->ApplyGradients({1.0f}, 0, 1);
  const DenseState after = (*network)->Save();

  std::vector<at::Tensor> leaves;
  leaves.push_back(
      Lines(input.block, kExamples, inputs.width(), static_cast<std::int64_t>(input.stride)));
  leaves.push_back(Lines(input.wide, kExamples, 1, 1));
  for (const ParameterInfo& parameter : (*network)->parameters()) {
    leaves.push_back(Copy(before.buffers[0].data() + parameter.offset, parameter.shape));
  }
  for (at::Tensor& leaf : leaves) leaf.requires_grad_(true);
  at::Tensor x = leaves[0];
  for (std::size_t layer = 0; layer <= spec.hidden.size(); ++layer) {
    x = at::addmm(leaves[3 + 2 * layer], x, leaves[2 + 2 * layer]);
    if (layer < spec.hidden.size()) x = at::relu(x);
  }
  x = x + leaves[1];
  const at::Tensor label = Lines(input.label, kExamples, 1, 1);
  const at::Tensor weight = Lines(input.weight, kExamples, 1, 1);
  const at::Tensor expected =
      at::binary_cross_entropy_with_logits(x, label, weight, {}, at::Reduction::Sum);
  EXPECT_NEAR(*loss, expected.item<double>(), 1e-5 * expected.item<double>());
  const std::vector<at::Tensor> gradients = torch::autograd::grad({expected}, leaves);
  const auto width = static_cast<std::int64_t>(inputs.embedding_width);
  EXPECT_LT(RelativeDistance(gradients[0].narrow(1, 0, width),
                             Lines((*context)->block_gradient(), kExamples, width,
                                   static_cast<std::int64_t>((*context)->block_gradient_stride()))),
            1e-4);
  EXPECT_LT(RelativeDistance(gradients[1], Lines((*context)->wide_gradient(), kExamples, 1, 1)),
            1e-4);
  EXPECT_LT(RelativeDistance(at::sigmoid(x), Lines((*context)->probability(), kExamples, 1, 1)),
            1e-5);
  EXPECT_LT(RelativeDistance(x, Lines((*context)->logit(), kExamples, 1, 1)), 1e-5);
  for (std::size_t p = 0; p < (*network)->parameters().size(); ++p) {
    const ParameterInfo& parameter = (*network)->parameters()[p];
    EXPECT_LT(RelativeDistance(gradients[2 + p],
                               -Copy(after.buffers[0].data() + parameter.offset, parameter.shape)),
              1e-4)
        << parameter.name;
  }
}

// 50 steps of both on the same gradients, in float.
void CompareOptimizers(
    const DenseOptimizerSpec& spec, float learning_rate,
    const std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>&
        create) {
  constexpr std::size_t kCount = 1003;
  const auto optimizer = DenseOptimizer::Create(spec);
  ASSERT_TRUE(optimizer.ok());
  std::vector<float> value(kCount), gradient(kCount), moment1(kCount, optimizer->initial_moment()),
      moment2(kCount);
  for (std::size_t i = 0; i < kCount; ++i) value[i] = Signed(1, i);
  at::Tensor parameter =
      at::from_blob(value.data(), {static_cast<std::int64_t>(kCount)}, at::kFloat).clone();
  parameter.requires_grad_(true);
  const auto torch_optimizer = create({parameter});
  for (std::uint64_t step = 1; step <= 50; ++step) {
    for (std::size_t i = 0; i < kCount; ++i) gradient[i] = 0.1f * Signed(step + 7, i);
    parameter.mutable_grad() =
        at::from_blob(gradient.data(), {static_cast<std::int64_t>(kCount)}, at::kFloat).clone();
    torch_optimizer->step();
    float* first = optimizer->moments() > 0 ? moment1.data() : nullptr;
    float* second = optimizer->moments() > 1 ? moment2.data() : nullptr;
    optimizer->PrepareGradient(kCount, 1.0f, value.data(), gradient.data());
    optimizer->AccumulateMoments(kCount, gradient.data(), first, second);
    optimizer->Apply(kCount, learning_rate, step, gradient.data(), first, second, value.data());
  }
  const at::Tensor ours =
      at::from_blob(value.data(), {static_cast<std::int64_t>(kCount)}, at::kFloat);
  EXPECT_LT((ours - parameter.detach()).abs().max().item<double>(), 2e-6) << spec.type;
  EXPECT_GT((ours - ours.sign()).abs().max().item<double>(), 0.0);
}

TEST(Torch, OptimizersFollowItsFormulas) {
  for (const float l2 : {0.0f, 0.01f}) {
    DenseOptimizerSpec spec;
    spec.l2 = l2;
    spec.type = "adam";
    CompareOptimizers(spec, 0.01f, [&](std::vector<at::Tensor> parameters) {
      return std::make_unique<torch::optim::Adam>(
          parameters, torch::optim::AdamOptions(0.01).eps(1e-8).weight_decay(l2));
    });
    spec.type = "adagrad";
    spec.initial_accumulator = 0.1f;
    CompareOptimizers(spec, 0.05f, [&](std::vector<at::Tensor> parameters) {
      return std::make_unique<torch::optim::Adagrad>(
          parameters,
          torch::optim::AdagradOptions(0.05).eps(1e-8).initial_accumulator_value(0.1f).weight_decay(
              l2));
    });
    spec.type = "sgd";
    for (const float momentum : {0.0f, 0.9f}) {
      spec.momentum = momentum;
      CompareOptimizers(spec, 0.05f, [&](std::vector<at::Tensor> parameters) {
        return std::make_unique<torch::optim::SGD>(
            parameters, torch::optim::SGDOptions(0.05).momentum(momentum).weight_decay(l2));
      });
    }
    ASSERT_FALSE(HasFailure());
  }
}

// Factorisation machine with its own backward by autograd, beside a linear layer on the same input:
// gradients of both are summed.
struct Machine {
  std::unique_ptr<Graph> graph;
  ValueId block, loss;
};

Machine BuildMachine() {
  Machine machine;
  machine.graph = std::make_unique<Graph>();
  const auto values = AddNetworkInputs({24, 3, false}, machine.graph.get());
  const auto embedding = machine.graph->Find("embedding");
  const ValueId fields[] = {*embedding};
  const auto pairs =
      machine.graph->AddOperator(std::make_unique<FactorisationOperator>("pairs", 4), fields);
  const ValueId block[] = {values->block};
  const auto linear =
      machine.graph->AddOperator(std::make_unique<LinearOperator>("linear", 1), block);
  const ValueId both[] = {*pairs, *linear};
  const auto sum = machine.graph->AddOperator(std::make_unique<AddOperator>("sum"), both);
  const ValueId all[] = {*sum, values->label, values->weight};
  const auto loss = machine.graph->AddOperator(std::make_unique<LogLossOperator>("loss"), all);
  EXPECT_TRUE(loss.ok());
  machine.graph->MarkOutput(*loss);
  machine.block = values->block;
  machine.loss = *loss;
  return machine;
}

TEST(Torch, AnOperatorWithoutBackwardGetsAutograds) {
  const NetworkInputSpec inputs{24, 3, false};
  constexpr std::uint32_t kExamples = 11;
  auto network = GraphNetwork::Create(BuildMachine().graph, inputs, {}, "machine", 9);
  ASSERT_TRUE(network.ok()) << network.status().ToString();
  auto context = (*network)->NewContext(16);
  ASSERT_TRUE(context.ok());
  const NetworkInput input = (*context)->input();
  const DenseState state = (*network)->Save();
  for (int repeat = 0; repeat < 2; ++repeat) {
    Fill(inputs, kExamples, input);
    const auto loss = (*network)->Forward(context->get(), kExamples);
    ASSERT_TRUE(loss.ok()) << loss.status().ToString();
    const Status back = (*network)->Backward(context->get(), kExamples, 0.5f, false);
    ASSERT_TRUE(back.ok()) << back.ToString();

    at::Tensor block = Lines(input.block, kExamples, 27, static_cast<std::int64_t>(input.stride));
    block.requires_grad_(true);
    at::Tensor logit = at::matmul(block, Copy(state.buffers[0].data(), {27, 1}));
    for (std::int64_t i = 0; i < 6; ++i) {
      for (std::int64_t j = 0; j < i; ++j) {
        logit = logit + (block.narrow(1, 4 * i, 4) * block.narrow(1, 4 * j, 4)).sum(1, true);
      }
    }
    const at::Tensor expected = at::binary_cross_entropy_with_logits(
        logit, Lines(input.label, kExamples, 1, 1), Lines(input.weight, kExamples, 1, 1), {},
        at::Reduction::Sum);
    EXPECT_NEAR(*loss, expected.item<double>(), 1e-5 * expected.item<double>());
    const at::Tensor gradient = torch::autograd::grad({0.5 * expected}, {block})[0];
    EXPECT_LT(
        RelativeDistance(gradient.narrow(1, 0, 24),
                         Lines((*context)->block_gradient(), kExamples, 24,
                               static_cast<std::int64_t>((*context)->block_gradient_stride()))),
        1e-4);
  }
}

TEST(Torch, ErrorsOfTorchAreStatuses) {
  class Broken : public TorchOperator {
   public:
    using TorchOperator::TorchOperator;
    std::string_view type() const override { return "broken"; }
    Result<std::size_t> OutputWidth(std::span<const std::size_t>) const override {
      return std::size_t{1};
    }
    OperatorCost Cost(std::span<const std::size_t>) const override { return {}; }
    at::Tensor Compute(std::span<const at::Tensor> inputs,
                       std::span<const at::Tensor>) const override {
      return at::matmul(inputs[0], inputs[0]);
    }
  };
  Graph graph;
  const ValueId input[] = {*graph.AddInput("x", 5, true)};
  ASSERT_TRUE(graph.AddOperator(std::make_unique<Broken>("it"), input).ok());
  const auto subgraph = Subgraph::Whole(&graph);
  ASSERT_TRUE(subgraph.ok());
  const auto context = subgraph->NewContext(4, nullptr);
  ASSERT_TRUE(context.ok());
  const Status status = subgraph->Forward(context->get(), 4);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("broken \"it\""), std::string::npos) << status.ToString();
}

TEST(Torch, NoThreadIsStarted) {
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  const auto before = threads();
  const NetworkInputSpec inputs{416, 16, false};
  NetworkSpec spec;
  auto network = CreateNetwork(spec, inputs, 1);
  auto machine = GraphNetwork::Create(BuildMachine().graph, {24, 3, false}, {}, "machine", 9);
  ASSERT_TRUE(network.ok() && machine.ok());
  WorkerGroup workers("compute", 3, PrepareComputeThread);
  PrepareComputeThread();
  workers.Run(3, [&](int) {
    for (Network* each : {network->get(), machine->get()}) {
      auto context = each->NewContext(2048);
      TERRACE_CHECK(context.ok());
      Fill(each->input_spec(), 2048, (*context)->input());
      TERRACE_CHECK(each->Forward(context->get(), 2048).ok());
      TERRACE_CHECK(each->Backward(context->get(), 2048, 1.0f, false).ok());
    }
  });
  EXPECT_EQ(threads(), before + 2);
}

}  // namespace
}  // namespace terrace
