#include "terrace/model/graph.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/model/graph_network.h"
#include "terrace/model/kernels.h"
#include "terrace/model/operators.h"

namespace terrace {
namespace {

constexpr std::uint64_t kSeed = 17;

float Signed(std::uint64_t seed, std::uint64_t index) {
  return 2 * UnitFloat(HashCombine(seed, index)) - 1;
}

// A part of a graph with its parameters and the memory of one mini-batch.
struct Part {
  std::unique_ptr<Subgraph> subgraph;
  HugeBuffer parameters;
  std::unique_ptr<SubgraphContext> context;
};

Part MakePart(const Graph& graph, const std::vector<OperatorId>& operators,
              std::size_t max_examples) {
  Part part;
  auto subgraph = Subgraph::Create(&graph, operators);
  EXPECT_TRUE(subgraph.ok()) << subgraph.status().ToString();
  part.subgraph = std::make_unique<Subgraph>(std::move(subgraph).value());
  auto memory = HugeBuffer::Allocate(part.subgraph->parameter_floats() * sizeof(float));
  EXPECT_TRUE(memory.ok());
  part.parameters = std::move(memory).value();
  auto* values = reinterpret_cast<float*>(part.parameters.data());
  part.subgraph->Initialize(kSeed, values);
  auto context = part.subgraph->NewContext(max_examples, values);
  EXPECT_TRUE(context.ok());
  part.context = std::move(context).value();
  return part;
}

std::vector<float> Read(const Matrix& matrix, std::size_t examples) {
  std::vector<float> values;
  for (std::size_t e = 0; e < examples; ++e) {
    values.insert(values.end(), matrix.line(e), matrix.line(e) + matrix.width);
  }
  return values;
}

void Write(const std::vector<float>& values, const Matrix& matrix) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    matrix.line(i / matrix.width)[i % matrix.width] = values[i];
  }
}

struct Results {
  std::map<std::string, std::vector<float>> values;               // Of outputs, by name.
  std::map<std::string, std::vector<float>> input_gradients;      // Of graph inputs.
  std::map<std::string, std::vector<float>> parameter_gradients;  // By name.
};

std::vector<float> InputOf(const GraphValue& value, std::size_t examples) {
  std::vector<float> values(examples * value.width);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = Signed(HashName(value.name), i);
    if (value.name == "label") values[i] = values[i] > 0 ? 1.0f : 0.0f;
    if (value.name == "weight") values[i] = 1.5f + values[i];
  }
  return values;
}

// Runs the graph as parts, which exchange values forward and gradients backward through memory of
// their own, as parts on different machines would.
Results RunParts(const Graph& graph, const std::vector<std::vector<OperatorId>>& cut,
                 std::size_t examples, int repeats = 1) {
  std::vector<Part> parts;
  for (const auto& operators : cut) parts.push_back(MakePart(graph, operators, examples + 3));
  Results results;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::map<ValueId, std::vector<float>> wire;
    for (ValueId id = 0; id < graph.values().size(); ++id) {
      if (graph.values()[id].kind == GraphValue::Kind::kInput) {
        wire[id] = InputOf(graph.values()[id], examples);
      }
    }
    for (Part& part : parts) {
      for (const ValueId id : part.subgraph->inputs()) {
        EXPECT_TRUE(wire.contains(id)) << graph.values()[id].name;
        Write(wire[id], part.context->value(id));
      }
      EXPECT_TRUE(part.subgraph->Forward(part.context.get(), examples).ok());
      for (const ValueId id : part.subgraph->outputs()) {
        wire[id] = Read(part.context->value(id), examples);
      }
    }
    std::map<ValueId, std::vector<float>> gradients;
    for (const ValueId id : graph.outputs()) {
      results.values[graph.values()[id].name] = wire[id];
      gradients[id].assign(examples * graph.values()[id].width, 0.25f);
    }
    for (std::size_t p = parts.size(); p-- > 0;) {
      Part& part = parts[p];
      for (const ValueId id : part.subgraph->outputs()) {
        if (part.context->gradient(id)) Write(gradients.at(id), part.context->gradient(id));
      }
      EXPECT_TRUE(part.subgraph->Backward(part.context.get(), examples).ok());
      for (const ValueId id : part.subgraph->inputs()) {
        if (!graph.values()[id].needs_gradient) continue;
        const std::vector<float> gradient = Read(part.context->gradient(id), examples);
        std::vector<float>& sum = gradients[id];
        if (sum.empty()) sum.assign(gradient.size(), 0.0f);
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
      }
    }
    for (const auto& [id, gradient] : gradients) {
      if (graph.values()[id].kind == GraphValue::Kind::kInput) {
        results.input_gradients[graph.values()[id].name] = gradient;
      }
    }
    for (Part& part : parts) {
      for (const ParameterInfo& info : part.subgraph->parameters()) {
        const float* gradient = part.context->parameter_gradient() + info.offset;
        results.parameter_gradients[info.name].assign(gradient, gradient + info.size);
      }
    }
  }
  return results;
}

void ExpectSameBits(const Results& expected, const Results& actual, const std::string& what) {
  EXPECT_EQ(expected.values, actual.values) << what;
  EXPECT_EQ(expected.input_gradients, actual.input_gradients) << what;
  EXPECT_EQ(expected.parameter_gradients, actual.parameter_gradients) << what;
}

std::vector<OperatorId> Range(OperatorId first, OperatorId last) {
  std::vector<OperatorId> operators(last - first);
  std::iota(operators.begin(), operators.end(), first);
  return operators;
}

std::unique_ptr<Graph> MustBuildDnn(bool wide) {
  NetworkSpec spec;
  spec.hidden = {64, 48, 17};
  spec.wide = wide;
  auto graph = BuildDnn(spec, {40, 13, wide});
  EXPECT_TRUE(graph.ok());
  return std::move(graph).value();
}

class Cut : public testing::TestWithParam<std::tuple<bool, std::size_t>> {};

TEST_P(Cut, DnnAtEveryEdgeGivesTheSameBits) {
  const auto [wide, examples] = GetParam();
  const auto graph = MustBuildDnn(wide);
  const std::size_t operators = graph->nodes().size();
  const Results whole = RunParts(*graph, {Range(0, operators)}, examples);
  ASSERT_EQ(whole.parameter_gradients.size(), 8u);
  ASSERT_EQ(whole.input_gradients.count("embedding"), 1u);
  ASSERT_EQ(whole.input_gradients.count("wide"), wide ? 1u : 0u);
  ASSERT_EQ(whole.input_gradients.count("dense"), 0u);
  for (OperatorId edge = 1; edge < operators; ++edge) {
    ExpectSameBits(whole, RunParts(*graph, {Range(0, edge), Range(edge, operators)}, examples),
                   "before " + graph->nodes()[edge].op->name());
  }
  std::vector<std::vector<OperatorId>> each;
  for (OperatorId op = 0; op < operators; ++op) each.push_back({op});
  ExpectSameBits(whole, RunParts(*graph, each, examples), "every operator apart");
  ExpectSameBits(whole, RunParts(*graph, {Range(0, operators)}, examples, 3), "repeated");
}

INSTANTIATE_TEST_SUITE_P(Networks, Cut,
                         testing::Combine(testing::Bool(), testing::Values(1, 50, 700)));

TEST(Subgraph, HasTheParametersOfItsOperatorsAlone) {
  const auto graph = MustBuildDnn(false);
  const auto part = Subgraph::Create(graph.get(), std::vector<OperatorId>{2, 3});
  ASSERT_TRUE(part.ok());
  ASSERT_EQ(part->parameters().size(), 2u);
  EXPECT_EQ(part->parameters()[0].name, "linear1.weight");
  EXPECT_EQ(part->parameters()[0].offset, 0u);
  EXPECT_EQ(part->parameters()[0].shape, (std::vector<std::int64_t>{64, 48}));
  EXPECT_EQ(part->parameter_floats(), 64u * 48 + 48);
  EXPECT_FALSE(Subgraph::Create(graph.get(), std::vector<OperatorId>{3, 2}).ok());
  EXPECT_FALSE(Subgraph::Create(graph.get(), std::vector<OperatorId>{2, 2}).ok());
  EXPECT_FALSE(Subgraph::Create(graph.get(), std::vector<OperatorId>{99}).ok());
}

// A value with several takers, columns of it, a concat of results, shared parameters and a ReLU
// whose input somebody else reads: y = sum of the log losses' logit below.
std::unique_ptr<Graph> BuildTangle() {
  auto graph = std::make_unique<Graph>();
  const auto add = [&](std::unique_ptr<Operator> op, std::vector<ValueId> inputs) {
    const auto value = graph->AddOperator(std::move(op), inputs);
    EXPECT_TRUE(value.ok()) << value.status().ToString();
    return *value;
  };
  const ValueId x = *graph->AddInput("x", 6, true);
  const ValueId label = *graph->AddInput("label", 1, false);
  const ValueId weight = *graph->AddInput("weight", 1, false);
  const ValueId head = *graph->AddColumns("head", x, 0, 4);
  const ValueId tail = *graph->AddColumns("tail", x, 2, 4);
  const ValueId a = add(std::make_unique<LinearOperator>("a", 5), {head});
  const ValueId clamped = add(std::make_unique<ReluOperator>("clamped"), {a});
  const ValueId b = add(std::make_unique<LinearOperator>("b", 3), {tail});
  const ValueId b_clamped = add(std::make_unique<ReluOperator>("b_clamped"), {b});
  const ValueId both = *graph->AddConcat("both", std::vector<ValueId>{clamped, b_clamped});
  const ValueId c = add(std::make_unique<LinearOperator>("c", 1), {both});
  const ValueId d = add(std::make_unique<LinearOperator>("d", 1), {a});
  const ValueId sum = add(std::make_unique<AddOperator>("sum"), {c, d, c});
  const ValueId loss = add(std::make_unique<LogLossOperator>("loss"), {sum, label, weight});
  graph->MarkOutput(loss);
  return graph;
}

double TangleLoss(const std::map<std::string, std::vector<double>>& p, const double* x,
                  double label, double weight) {
  const auto linear = [&](const std::string& name, const std::vector<double>& in) {
    std::vector<double> out = p.at(name + ".bias");
    for (std::size_t i = 0; i < in.size(); ++i) {
      for (std::size_t j = 0; j < out.size(); ++j) {
        out[j] += in[i] * p.at(name + ".weight")[i * out.size() + j];
      }
    }
    return out;
  };
  const std::vector<double> a = linear("a", {x, x + 4});
  std::vector<double> both = a, b = linear("b", {x + 2, x + 6});
  both.insert(both.end(), b.begin(), b.end());
  for (double& value : both) value = std::max(value, 0.0);
  const double logit = 2 * linear("c", both)[0] + linear("d", a)[0];
  return weight * (std::log1p(std::exp(-logit)) + (1 - label) * logit);
}

TEST(Graph, GradientsOfSharedValuesAreSummed) {
  constexpr std::size_t kExamples = 7;
  const auto graph = BuildTangle();
  const std::size_t operators = graph->nodes().size();
  const Results whole = RunParts(*graph, {Range(0, operators)}, kExamples);
  ExpectSameBits(whole, RunParts(*graph, {Range(0, operators)}, kExamples, 3), "repeated");

  const Part part = MakePart(*graph, Range(0, operators), kExamples);
  std::map<std::string, std::vector<double>> parameters;
  for (const ParameterInfo& info : part.subgraph->parameters()) {
    const auto* values = reinterpret_cast<const float*>(part.parameters.data()) + info.offset;
    parameters[info.name].assign(values, values + info.size);
  }
  const auto input = [&](const char* name) {
    const std::vector<float> values = InputOf(graph->values()[*graph->Find(name)], kExamples);
    return std::vector<double>(values.begin(), values.end());
  };
  std::vector<double> x = input("x"), label = input("label"), weight = input("weight");
  const auto difference = [&](double* value) {
    const auto total = [&] {
      double sum = 0;
      for (std::size_t e = 0; e < kExamples; ++e) {
        sum += TangleLoss(parameters, &x[6 * e], label[e], weight[e]);
      }
      return 0.25 * sum;
    };
    const double kept = *value;
    *value = kept + 1e-6;
    const double above = total();
    *value = kept - 1e-6;
    const double below = total();
    *value = kept;
    return (above - below) / 2e-6;
  };
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_NEAR(difference(&x[i]), whole.input_gradients.at("x")[i], 1e-5) << "x " << i;
  }
  for (auto& [name, values] : parameters) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_NEAR(difference(&values[i]), whole.parameter_gradients.at(name)[i], 1e-5)
          << name << " " << i;
    }
  }
  // Parts sum in another order, so only to rounding.
  for (OperatorId edge = 1; edge < operators; ++edge) {
    const Results apart = RunParts(*graph, {Range(0, edge), Range(edge, operators)}, kExamples);
    EXPECT_EQ(whole.values, apart.values);
    for (const auto& [name, gradient] : whole.parameter_gradients) {
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        EXPECT_NEAR(gradient[i], apart.parameter_gradients.at(name)[i], 1e-6) << name;
      }
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(whole.input_gradients.at("x")[i], apart.input_gradients.at("x")[i], 1e-6);
    }
  }
}

// y = x W with a W that two operators name.
class SharedScale : public Operator {
 public:
  using Operator::Operator;
  std::string_view type() const override { return "shared_scale"; }
  Result<std::size_t> OutputWidth(std::span<const std::size_t> widths) const override {
    return widths[0];
  }
  std::vector<ParameterSpec> Parameters(std::span<const std::size_t> widths) const override {
    return {{"scale", {static_cast<std::int64_t>(widths[0])}, InitialValue::kHeUniform, 1}};
  }
  OperatorCost Cost(std::span<const std::size_t>) const override { return {}; }
  Status Forward(OperatorContext* context, std::span<const Matrix> inputs) const override {
    for (std::size_t e = 0; e < context->examples; ++e) {
      for (std::size_t j = 0; j < inputs[0].width; ++j) {
        context->output.line(e)[j] = inputs[0].line(e)[j] * context->parameters[0][j];
      }
    }
    return OkStatus();
  }
  Status Backward(OperatorContext* context, const Matrix& output_gradient) const override {
    const ParameterTarget& target = context->parameter_gradients[0];
    for (std::size_t j = 0; j < output_gradient.width; ++j) {
      if (!target.add) target.data[j] = 0;
      for (std::size_t e = 0; e < context->examples; ++e) {
        target.data[j] += output_gradient.line(e)[j] * context->inputs[0].line(e)[j];
        const GradientTarget& dx = context->input_gradients[0];
        const float gradient = output_gradient.line(e)[j] * context->parameters[0][j];
        dx.matrix.line(e)[j] = dx.add ? dx.matrix.line(e)[j] + gradient : gradient;
      }
    }
    return OkStatus();
  }
};

TEST(Graph, OperatorsMayShareAParameter) {
  Graph graph;
  const ValueId x = *graph.AddInput("x", 2, true);
  const ValueId once = *graph.AddOperator(std::make_unique<SharedScale>("once"), {&x, 1});
  const ValueId twice = *graph.AddOperator(std::make_unique<SharedScale>("twice"), {&once, 1});
  graph.MarkOutput(twice);
  const Results results = RunParts(graph, {{0, 1}}, 1, 2);
  const Part part = MakePart(graph, {0, 1}, 1);
  ASSERT_EQ(part.subgraph->parameters().size(), 1u);
  const auto* scale = reinterpret_cast<const float*>(part.parameters.data());
  const std::vector<float> input = InputOf(graph.values()[x], 1);
  for (std::size_t j = 0; j < 2; ++j) {  // d(x s^2)/ds = 2 x s
    EXPECT_NEAR(results.values.at("twice")[j], input[j] * scale[j] * scale[j], 1e-6);
    EXPECT_NEAR(results.parameter_gradients.at("scale")[j], 0.25f * 2 * input[j] * scale[j], 1e-6);
  }
}

TEST(Graph, RefusesWhatDoesNotFit) {
  Graph graph;
  const ValueId x = *graph.AddInput("x", 4, true);
  EXPECT_FALSE(graph.AddInput("x", 4, true).ok());
  EXPECT_FALSE(graph.AddInput("y", 0, true).ok());
  EXPECT_FALSE(graph.AddColumns("z", x, 2, 3).ok());
  EXPECT_FALSE(graph.AddColumns("z", x, 5, 1).ok());
  const ValueId columns = *graph.AddColumns("columns", x, 2, 2);
  const ValueId whole[] = {x}, view[] = {columns}, twice[] = {x, x};
  EXPECT_FALSE(graph.AddConcat("concat", view).ok());
  EXPECT_FALSE(graph.AddConcat("concat", twice).ok());
  EXPECT_FALSE(graph.AddConcat("concat", {}).ok());
  EXPECT_TRUE(graph.AddConcat("concat", whole).ok());
  EXPECT_FALSE(graph.AddConcat("another", whole).ok());
  const ValueId unequal[] = {x, columns};
  EXPECT_FALSE(graph.AddOperator(std::make_unique<AddOperator>("add"), unequal).ok());
  EXPECT_FALSE(graph.AddOperator(std::make_unique<LogLossOperator>("loss"), whole).ok());
  EXPECT_FALSE(graph.AddOperator(std::make_unique<LinearOperator>("linear", 0), whole).ok());
  EXPECT_EQ(graph.Find("nothing").status().code(), StatusCode::kNotFound);
}

TEST(Graph, CostsAreThoseOfTheProducts) {
  NetworkSpec spec;
  spec.hidden = {1024, 512, 256};
  const auto graph = BuildDnn(spec, {416, 13, false});
  ASSERT_TRUE(graph.ok());
  const OperatorCost cost = (*graph)->Cost();
  const double products = 2.0 * (429 * 1024 + 1024 * 512 + 512 * 256 + 256);
  EXPECT_NEAR(cost.forward_flops_per_example, products, 0.01 * products);
  EXPECT_NEAR(cost.backward_flops_per_example, 2 * products, 0.01 * products);
  EXPECT_EQ(cost.parameter_bytes, 4u * (430 * 1024 + 1025 * 512 + 513 * 256 + 257));
}

// All gradients begin with these: no C library decides them.
TEST(LogLoss, ProbabilitiesHaveTheSameBitsEverywhere) {
  constexpr std::size_t kExamples = 100'000;
  std::vector<float> logit(kExamples), ones(kExamples, 1.0f), loss(kExamples), p(kExamples);
  for (std::size_t e = 0; e < kExamples; ++e) logit[e] = 20.0f * Signed(kSeed, e);
  LogLossForward(kExamples, {logit.data(), 1}, {ones.data(), 1}, {ones.data(), 1}, {loss.data(), 1},
                 {p.data(), 1});
  std::uint64_t bits = 0;
  for (const float x : p) bits = HashCombine(bits, std::bit_cast<std::uint32_t>(x));
  EXPECT_EQ(bits, 0xee9ca6656029b30cu);
}

}  // namespace
}  // namespace terrace
