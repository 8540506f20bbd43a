#include "terrace/model/network.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/base/testing/denormals.h"
#include "terrace/base/thread.h"
#include "terrace/model/graph.h"
#include "terrace/model/graph_network.h"

namespace terrace {
namespace {

std::unique_ptr<Network> MustCreate(const NetworkSpec& spec, const NetworkInputSpec& inputs,
                                    std::uint64_t seed) {
  auto network = CreateNetwork(spec, inputs, seed);
  EXPECT_TRUE(network.ok()) << network.status().ToString();
  return std::move(network).value();
}

std::unique_ptr<NetworkContext> MustContext(Network* network, std::uint32_t max_examples) {
  auto context = network->NewContext(max_examples);
  EXPECT_TRUE(context.ok()) << context.status().ToString();
  return std::move(context).value();
}

float Signed(std::uint64_t seed, std::uint64_t index) {
  return 2 * UnitFloat(HashCombine(seed, index)) - 1;
}

// Examples [first, first + examples) of a stream that `seed` names.
void FillInput(const NetworkInputSpec& spec, std::uint64_t seed, std::uint32_t first,
               std::uint32_t examples, NetworkContext* context) {
  const NetworkInput input = context->input();
  for (std::uint32_t e = 0; e < examples; ++e) {
    const std::uint64_t stream = HashCombine(seed, first + e);
    for (std::uint32_t j = 0; j < spec.width(); ++j) {
      input.block[e * input.stride + j] = Signed(stream, j);
    }
    if (spec.wide) input.wide[e] = Signed(stream, 1000001);
    input.label[e] = HashCombine(stream, 1000002) % 3 == 0 ? 1.0f : 0.0f;
    input.weight[e] = 0.5f + UnitFloat(HashCombine(stream, 1000003));
  }
}

void ReduceAndApply(Network* network, std::vector<NetworkContext*> contexts, float learning_rate,
                    int parts = 1) {
  for (int part = parts; part-- > 0;) network->ReduceGradients(contexts, part, parts);
  for (int part = 0; part < parts; ++part) network->ApplyGradients({learning_rate}, part, parts);
  network->Advance();
}

// The same network in double, written from its definition, for finite differences.
class DoubleDnn {
 public:
  DoubleDnn(const NetworkSpec& spec, const NetworkInputSpec& inputs, const Network& network)
      : spec_(spec), inputs_(inputs) {
    const DenseState state = network.Save();
    for (const ParameterInfo& parameter : network.parameters()) {
      const auto begin = state.buffers[0].begin() + static_cast<std::ptrdiff_t>(parameter.offset);
      values[parameter.name].assign(begin, begin + static_cast<std::ptrdiff_t>(parameter.size));
    }
  }

  // block (examples, width), wide (examples).
  double Loss(const std::vector<double>& block, const std::vector<double>& wide,
              const NetworkInput& input) const {
    const std::size_t width = inputs_.width();
    double loss = 0;
    for (std::size_t e = 0; e < block.size() / width; ++e) {
      std::vector<double> x(block.begin() + static_cast<std::ptrdiff_t>(e * width),
                            block.begin() + static_cast<std::ptrdiff_t>((e + 1) * width));
      for (std::size_t layer = 0; layer <= spec_.hidden.size(); ++layer) {
        const std::string name = "linear" + std::to_string(layer);
        std::vector<double> y = values.at(name + ".bias");
        const std::vector<double>& weight = values.at(name + ".weight");
        for (std::size_t i = 0; i < x.size(); ++i) {
          for (std::size_t j = 0; j < y.size(); ++j) y[j] += x[i] * weight[i * y.size() + j];
        }
        if (layer < spec_.hidden.size()) {
          for (double& value : y) value = std::max(value, 0.0);
        }
        x = y;
      }
      const double logit = x[0] + (inputs_.wide ? wide[e] : 0);
      loss += input.weight[e] * (std::log1p(std::exp(-logit)) + (1 - input.label[e]) * logit);
    }
    return loss;
  }

  std::map<std::string, std::vector<double>> values;

 private:
  const NetworkSpec spec_;
  const NetworkInputSpec inputs_;
};

void ExpectClose(double expected, double actual, double scale, const std::string& what) {
  EXPECT_NEAR(expected, actual, 1e-4 * std::fabs(expected) + 1e-5 * scale) << what;
}

class FiniteDifferences : public testing::TestWithParam<std::tuple<bool, bool, int>> {};

TEST_P(FiniteDifferences, MatchBackward) {
  const auto [wide, dense, layers] = GetParam();
  NetworkSpec spec;
  spec.hidden = {8, 5};
  spec.hidden.resize(static_cast<std::size_t>(layers));
  spec.wide = wide;
  const NetworkInputSpec inputs{6, dense ? 3u : 0u, wide};
  constexpr std::uint32_t kExamples = 9;
  const auto network = MustCreate(spec, inputs, 3);
  const auto context = MustContext(network.get(), 16);
  FillInput(inputs, 5, 0, kExamples, context.get());
  const auto loss = network->Forward(context.get(), kExamples);
  ASSERT_TRUE(loss.ok());
  constexpr float kScale = 0.125f;
  ASSERT_TRUE(network->Backward(context.get(), kExamples, kScale, false).ok());

  DoubleDnn reference(spec, inputs, *network);
  const NetworkInput input = context->input();
  std::vector<double> block, wide_values;
  for (std::uint32_t e = 0; e < kExamples; ++e) {
    for (std::uint32_t j = 0; j < inputs.width(); ++j) {
      block.push_back(input.block[e * input.stride + j]);
    }
    wide_values.push_back(wide ? input.wide[e] : 0);
  }
  ExpectClose(reference.Loss(block, wide_values, input), *loss, 1, "loss");
  const auto difference = [&](double* value) {
    constexpr double kStep = 1e-6;
    const double kept = *value;
    *value = kept + kStep;
    const double above = reference.Loss(block, wide_values, input);
    *value = kept - kStep;
    const double below = reference.Loss(block, wide_values, input);
    *value = kept;
    return kScale * (above - below) / (2 * kStep);
  };
  for (std::uint32_t e = 0; e < kExamples; ++e) {
    for (std::uint32_t j = 0; j < inputs.embedding_width; ++j) {
      ExpectClose(difference(&block[e * inputs.width() + j]),
                  context->block_gradient()[e * context->block_gradient_stride() + j], 1, "block");
    }
    if (wide) ExpectClose(difference(&wide_values[e]), context->wide_gradient()[e], 1, "wide");
  }
  // With plain SGD and a rate of 1 the change of a parameter is its gradient.
  NetworkSpec sgd = spec;
  sgd.optimizer.type = "sgd";
  const auto stepped = MustCreate(sgd, inputs, 3);
  const auto other = MustContext(stepped.get(), 16);
  FillInput(inputs, 5, 0, kExamples, other.get());
  ASSERT_TRUE(stepped->Forward(other.get(), kExamples).ok());
  ASSERT_TRUE(stepped->Backward(other.get(), kExamples, kScale, false).ok());
  const DenseState before = stepped->Save();
  ReduceAndApply(stepped.get(), {other.get()}, 1.0f);
  const DenseState after = stepped->Save();
  for (const ParameterInfo& parameter : stepped->parameters()) {
    for (std::size_t i = 0; i < parameter.size; ++i) {
      const std::size_t at = parameter.offset + i;
      ExpectClose(difference(&reference.values[parameter.name][i]),
                  static_cast<double>(before.buffers[0][at]) - after.buffers[0][at], 0.1,
                  parameter.name);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Networks, FiniteDifferences,
                         testing::Combine(testing::Bool(), testing::Bool(),
                                          testing::Values(0, 1, 2)));

std::vector<float> Train(const NetworkSpec& spec, const NetworkInputSpec& inputs, int slices,
                         int parts, int steps, double* loss) {
  constexpr std::uint32_t kExamples = 60;
  const auto network = MustCreate(spec, inputs, 11);
  std::vector<std::unique_ptr<NetworkContext>> contexts;
  std::vector<NetworkContext*> pointers;
  for (int slice = 0; slice < slices; ++slice) {
    contexts.push_back(MustContext(network.get(), kExamples));
    pointers.push_back(contexts.back().get());
  }
  *loss = 0;
  WorkerGroup workers("slice", slices, PrepareComputeThread);
  PrepareComputeThread();
  for (int step = 0; step < steps; ++step) {
    std::vector<double> losses(static_cast<std::size_t>(slices));
    workers.Run(slices, [&](int slice) {
      const std::uint32_t each = kExamples / static_cast<std::uint32_t>(slices);
      NetworkContext* context = pointers[static_cast<std::size_t>(slice)];
      FillInput(inputs, 100 + static_cast<std::uint64_t>(step),
                static_cast<std::uint32_t>(slice) * each, each, context);
      const auto sum = network->Forward(context, each);
      TERRACE_CHECK(sum.ok());
      losses[static_cast<std::size_t>(slice)] = *sum;
      TERRACE_CHECK(network->Backward(context, each, 1.0f / kExamples, false).ok());
    });
    for (const double part : losses) *loss += part;
    ReduceAndApply(network.get(), pointers, 0.01f, parts);
  }
  return network->Save().buffers[0];
}

TEST(ComputeThread, FlushesDenormals) {
  int before = 0, after = 0;
  Thread thread("compute", ThreadPriority::kNormal, [&] {
    KeepDenormals();
    before = FlushedDenormals();
    PrepareComputeThread();
    after = FlushedDenormals();
  });
  thread.Join();
  EXPECT_EQ(before, 0);
  EXPECT_EQ(after, 2);
}

TEST(Network, SameBitsAgainAndForAnySplitIntoParts) {
  NetworkSpec spec;
  spec.hidden = {96, 40};
  spec.wide = true;
  spec.optimizer.clip_norm = 0.1;
  spec.optimizer.l2 = 1e-4f;
  const NetworkInputSpec inputs{50, 7, true};
  for (const int slices : {1, 2, 3}) {
    double first_loss = 0, loss = 0;
    const std::vector<float> first = Train(spec, inputs, slices, 1, 10, &first_loss);
    for (const int parts : {1, 2, 3, 7}) {
      EXPECT_EQ(first, Train(spec, inputs, slices, parts, 10, &loss));
      EXPECT_EQ(first_loss, loss);
    }
  }
}

TEST(Network, SlicesGiveTheWholeMiniBatch) {
  NetworkSpec spec;
  spec.hidden = {32};
  spec.optimizer.type = "sgd";
  const NetworkInputSpec inputs{20, 4, false};
  double one_loss = 0, two_loss = 0;
  const std::vector<float> one = Train(spec, inputs, 1, 1, 5, &one_loss);
  const std::vector<float> two = Train(spec, inputs, 2, 1, 5, &two_loss);
  EXPECT_NEAR(one_loss, two_loss, 1e-6 * one_loss);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], two[i], 1e-6);
}

// The parameters after one step over 700 examples, all at once or in the blocks the network asks
// for.
DenseState TrainSlice(bool blocks, std::vector<float>* logits, int* count) {
  constexpr std::uint32_t kSlice = 700;
  NetworkSpec spec;
  spec.hidden = {48, 16};
  spec.wide = true;
  const NetworkInputSpec inputs{50, 7, true};
  const auto network = MustCreate(spec, inputs, 7);
  const auto context = MustContext(network.get(), kSlice);
  for (std::uint32_t first = 0; first < kSlice; ++*count) {
    const std::uint32_t examples = blocks ? network->NextBlock(kSlice - first) : kSlice;
    FillInput(inputs, 3, first, examples, context.get());
    EXPECT_TRUE(network->Forward(context.get(), examples).ok());
    EXPECT_TRUE(network->Backward(context.get(), examples, 1.0f / kSlice, first > 0).ok());
    logits->insert(logits->end(), context->logit(), context->logit() + examples);
    first += examples;
  }
  ReduceAndApply(network.get(), {context.get()}, 0.1f);
  return network->Save();
}

TEST(Network, BlocksGiveTheBitsOfTheirSlice) {
  std::vector<float> whole_logits, logits;
  int once = 0, blocks = 0;
  const DenseState whole = TrainSlice(false, &whole_logits, &once);
  const DenseState state = TrainSlice(true, &logits, &blocks);
  EXPECT_EQ(once, 1);
  EXPECT_GT(blocks, 1);
  EXPECT_EQ(whole_logits, logits);
  EXPECT_EQ(whole.buffers, state.buffers);
}

TEST(Network, ManyParametersAreReadOnceASlice) {
  NetworkSpec spec;
  spec.hidden = {1024, 512};
  const auto network = MustCreate(spec, {50, 7, false}, 7);
  EXPECT_EQ(network->NextBlock(2048), 2048u);
}

TEST(Network, InitialValuesDependOnSeedNameAndIndexAlone) {
  NetworkSpec spec;
  spec.hidden = {16, 8};
  const NetworkInputSpec inputs{12, 3, false};
  const auto network = MustCreate(spec, inputs, 7);
  NetworkSpec longer = spec;
  longer.hidden = {16, 8, 24};
  longer.optimizer.type = "sgd";
  const auto other = MustCreate(longer, inputs, 7);
  const DenseState a = network->Save(), b = other->Save();
  double square_sum = 0;
  for (int p = 0; p < 4; ++p) {  // The two layers that both have.
    const ParameterInfo& x = network->parameters()[static_cast<std::size_t>(p)];
    const ParameterInfo& y = other->parameters()[static_cast<std::size_t>(p)];
    ASSERT_EQ(x.name, y.name);
    ASSERT_EQ(x.size, y.size);
    for (std::size_t i = 0; i < x.size; ++i) {
      ASSERT_EQ(a.buffers[0][x.offset + i], b.buffers[0][y.offset + i]) << x.name;
      if (x.name == "linear0.weight") {
        square_sum += std::pow(a.buffers[0][x.offset + i], 2);
        ASSERT_LE(std::fabs(a.buffers[0][x.offset + i]), std::sqrt(6.0 / 15));
      }
      if (x.name == "linear0.bias") {
        ASSERT_EQ(a.buffers[0][x.offset + i], 0.0f);
      }
    }
  }
  EXPECT_NEAR(square_sum / (15 * 16), 2.0 / 15, 0.2 * 2.0 / 15);  // He: variance 2 / fan-in.
  EXPECT_NE(a.buffers[0], MustCreate(spec, inputs, 8)->Save().buffers[0]);
}

TEST(Network, NaNReachesTheGradientSquareSum) {
  NetworkSpec spec;
  spec.hidden = {16, 8};
  const NetworkInputSpec inputs{12, 3, false};
  const auto network = MustCreate(spec, inputs, 7);
  const auto context = MustContext(network.get(), 8);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    FillInput(inputs, 1, 0, 8, context.get());
    ASSERT_TRUE(network->Forward(context.get(), 8).ok());
    ASSERT_TRUE(network->Backward(context.get(), 8, 1, false).ok());
    NetworkContext* contexts[] = {context.get()};
    network->ReduceGradients(contexts, 0, 1);
    EXPECT_TRUE(std::isfinite(network->GradientSquareSum()));
    context->input().block[3 * context->input().stride + 2] = bad;
    const auto loss = network->Forward(context.get(), 8);
    ASSERT_TRUE(loss.ok());
    ASSERT_TRUE(network->Backward(context.get(), 8, 1, false).ok());
    network->ReduceGradients(contexts, 0, 1);
    EXPECT_FALSE(std::isfinite(network->GradientSquareSum()));
    if (std::isnan(bad)) {
      EXPECT_TRUE(std::isnan(*loss));
    }
  }
}

TEST(Network, SaveAndLoadContinueWithTheSameBits) {
  for (const char* type : {"sgd", "adagrad", "adam"}) {
    NetworkSpec spec;
    spec.hidden = {16};
    spec.optimizer.type = type;
    spec.optimizer.momentum = 0.9f;
    const NetworkInputSpec inputs{12, 0, false};
    const auto network = MustCreate(spec, inputs, 7), resumed = MustCreate(spec, inputs, 8);
    const auto context = MustContext(network.get(), 8), other = MustContext(resumed.get(), 8);
    const auto step = [&](Network* n, NetworkContext* c, std::uint64_t seed) {
      FillInput(inputs, seed, 0, 8, c);
      ASSERT_TRUE(n->Forward(c, 8).ok());
      ASSERT_TRUE(n->Backward(c, 8, 0.125f, false).ok());
      ReduceAndApply(n, {c}, 0.1f);
    };
    for (std::uint64_t i = 0; i < 3; ++i) step(network.get(), context.get(), i);
    ASSERT_TRUE(resumed->Load(network->Save()).ok());
    EXPECT_EQ(resumed->Save().steps, 3u);
    for (std::uint64_t i = 3; i < 6; ++i) {
      step(network.get(), context.get(), i);
      step(resumed.get(), other.get(), i);
    }
    EXPECT_EQ(network->Save().buffers, resumed->Save().buffers);

    DenseState bad = network->Save();
    bad.buffers[0].pop_back();
    EXPECT_EQ(resumed->Load(bad).code(), StatusCode::kInvalidArgument);
    bad = network->Save();
    bad.names[0] = "other";
    EXPECT_EQ(resumed->Load(bad).code(), StatusCode::kInvalidArgument);
    bad = network->Save();
    bad.buffers.pop_back();
    EXPECT_EQ(resumed->Load(bad).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(network->Save().buffers, resumed->Save().buffers);
  }
}

TEST(Network, AnEmptySliceAddsNothing) {
  NetworkSpec spec;
  spec.hidden = {16};
  const NetworkInputSpec inputs{12, 2, true};
  spec.wide = true;
  const auto network = MustCreate(spec, inputs, 7);
  const auto full = MustContext(network.get(), 8), empty = MustContext(network.get(), 8);
  for (NetworkContext* context : {full.get(), empty.get()}) {
    FillInput(inputs, 1, 0, 8, context);
    ASSERT_TRUE(network->Forward(context, 8).ok());
    ASSERT_TRUE(network->Backward(context, 8, 1, false).ok());
  }
  NetworkContext* both[] = {full.get(), empty.get()};
  network->ReduceGradients({both, 1}, 0, 1);
  const double alone = network->GradientSquareSum();
  const auto loss = network->Forward(empty.get(), 0);
  ASSERT_TRUE(loss.ok());
  EXPECT_EQ(*loss, 0);
  ASSERT_TRUE(network->Backward(empty.get(), 0, 1, false).ok());
  network->ReduceGradients(both, 0, 1);
  EXPECT_EQ(network->GradientSquareSum(), alone);
}

TEST(Network, RefusesWhatCannotBe) {
  const NetworkInputSpec inputs{12, 2, false};
  NetworkSpec spec;
  spec.type = "transformer";
  EXPECT_EQ(CreateNetwork(spec, inputs, 1).status().code(), StatusCode::kInvalidArgument);
  spec = {};
  spec.hidden = {4, 0};
  EXPECT_EQ(CreateNetwork(spec, inputs, 1).status().code(), StatusCode::kInvalidArgument);
  spec = {};
  EXPECT_EQ(CreateNetwork(spec, {0, 0, false}, 1).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateNetwork(spec, {4, 0, true}, 1).status().code(), StatusCode::kInvalidArgument);
  spec.optimizer.type = "lion";
  EXPECT_EQ(CreateNetwork(spec, inputs, 1).status().code(), StatusCode::kInvalidArgument);
}

// Given the product, forward and backward are those of the block; the caller's part of the gradient
// is applied like the rest.
TEST(Network, TakesTheProductOfItsFirstLayer) {
  NetworkSpec spec;
  spec.hidden = {};
  const NetworkInputSpec inputs{6, 3, false};
  EXPECT_EQ(MustCreate(spec, inputs, 3)->first_layer().width, 0u);
  spec.hidden = {40, 8};
  spec.optimizer.type = "sgd";
  constexpr std::uint32_t kExamples = 9;
  const auto by_block = MustCreate(spec, inputs, 3), by_product = MustCreate(spec, inputs, 3);
  const auto block = MustContext(by_block.get(), 16), product = MustContext(by_product.get(), 16);
  const FirstLayer layer = by_product->first_layer();
  ASSERT_EQ(layer.width, 40u);
  for (int step = 0; step < 3; ++step) {
    FillInput(inputs, 5, 0, kExamples, block.get());
    FillInput(inputs, 5, 0, kExamples, product.get());
    const NetworkInput input = product->input();
    const auto x = [&](std::uint32_t e, std::uint32_t k) {
      return input.block[e * input.stride + k];
    };
    product->set_input_form(InputForm::kProduct);
    for (std::uint32_t e = 0; e < kExamples; ++e) {
      for (std::uint32_t j = 0; j < layer.width; ++j) {
        double sum = 0;
        for (std::uint32_t k = 0; k < inputs.width(); ++k) {
          sum += static_cast<double>(x(e, k)) * layer.weight[k * layer.width + j];
        }
        input.product[e * layer.width + j] = static_cast<float>(sum);
      }
    }
    EXPECT_NEAR(*by_block->Forward(block.get(), kExamples),
                *by_product->Forward(product.get(), kExamples), 1e-5);
    ASSERT_TRUE(by_block->Backward(block.get(), kExamples, 0.125f, false).ok());
    ASSERT_TRUE(by_product->Backward(product.get(), kExamples, 0.125f, false).ok());
    for (std::uint32_t k = 0; k < inputs.width(); ++k) {
      for (std::uint32_t j = 0; j < layer.width; ++j) {
        double sum = 0;
        for (std::uint32_t e = 0; e < kExamples; ++e) {
          sum += static_cast<double>(x(e, k)) * product->product_gradient()[e * layer.width + j];
        }
        layer.gradient[k * layer.width + j] = static_cast<float>(sum);
      }
    }
    ReduceAndApply(by_block.get(), {block.get()}, 0.5f);
    ReduceAndApply(by_product.get(), {product.get()}, 0.5f, 3);
    const DenseState a = by_block->Save(), b = by_product->Save();
    for (std::size_t i = 0; i < a.buffers[0].size(); ++i) {
      EXPECT_NEAR(a.buffers[0][i], b.buffers[0][i], 1e-5) << "parameter " << i;
    }
  }
}

TEST(Network, ContextBytesAreWhatAContextTakes) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer's shadow memory counts as the process's";
#endif
  NetworkSpec spec;
  const NetworkInputSpec inputs{416, 13, false};
  const auto network = MustCreate(spec, inputs, 1);
  // The library makes its programs, by whose size processors differ.
  const auto small = MustContext(network.get(), 16);
  FillInput(inputs, 1, 0, 16, small.get());
  ASSERT_TRUE(network->Forward(small.get(), 16).ok());
  ASSERT_TRUE(network->Backward(small.get(), 16, 1, false).ok());
  const ProcessMemory before = ReadProcessMemory();
  const auto context = MustContext(network.get(), 4096);
  FillInput(inputs, 1, 0, 4096, context.get());
  ASSERT_TRUE(network->Forward(context.get(), 4096).ok());
  ASSERT_TRUE(network->Backward(context.get(), 4096, 1, false).ok());
  const double grown = static_cast<double>(ReadProcessMemory().resident_bytes) -
                       static_cast<double>(before.resident_bytes);
  const auto said = static_cast<double>(network->ContextBytes(4096));
  EXPECT_LE(grown, said + (8 << 20));  // The library's own working memory is apart.
  EXPECT_GE(grown, 0.7 * said);
}

}  // namespace
}  // namespace terrace
