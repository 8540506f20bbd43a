#include "terrace/pipeline/row_products.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/base/thread.h"
#include "terrace/pipeline/key_plan.h"
#include "terrace/pipeline/train_step.h"

namespace terrace {
namespace {

// The same network, which must be given its examples as a block.
class BlockOnly final : public Network {
 public:
  explicit BlockOnly(std::unique_ptr<Network> network) : network_(std::move(network)) {}
  const NetworkInputSpec& input_spec() const override { return network_->input_spec(); }
  std::uint32_t NextBlock(std::uint32_t left) const override { return network_->NextBlock(left); }
  Result<std::unique_ptr<NetworkContext>> NewContext(std::uint32_t max_examples) override {
    return network_->NewContext(max_examples);
  }
  Result<double> Forward(NetworkContext* context, std::uint32_t examples) override {
    return network_->Forward(context, examples);
  }
  Status Backward(NetworkContext* context, std::uint32_t examples, float loss_scale,
                  bool add) override {
    return network_->Backward(context, examples, loss_scale, add);
  }
  void ReduceGradients(std::span<NetworkContext* const> contexts, int part, int parts) override {
    network_->ReduceGradients(contexts, part, parts);
  }
  double GradientSquareSum() override { return network_->GradientSquareSum(); }
  void ApplyGradients(const DenseStep& step, int part, int parts) override {
    network_->ApplyGradients(step, part, parts);
  }
  void Advance() override { network_->Advance(); }
  std::span<const ParameterInfo> parameters() const override { return network_->parameters(); }
  std::size_t parameter_floats() const override { return network_->parameter_floats(); }
  DenseState Save() const override { return network_->Save(); }
  Status Load(const DenseState& state) override { return network_->Load(state); }
  std::uint64_t ContextBytes(std::uint32_t max_examples) const override {
    return network_->ContextBytes(max_examples);
  }
  std::uint64_t ParameterBytes() const override { return network_->ParameterBytes(); }
  std::string ToText() const override { return network_->ToText(); }

 private:
  const std::unique_ptr<Network> network_;
};

struct Settings {
  std::uint64_t keys = 20;         // Of a slot; few make them repeat.
  bool shared = false;             // Slots 0 and 2, which have one table, take the same keys.
  bool values = false;             // By key.
  bool mean = false;               // Slot 1.
  std::uint32_t most_in_cell = 1;  // Keys that a slot of an example holds.
  bool wide = false;
  std::uint32_t unadmitted = 0;  // Every so manieth row has no place.
  std::uint32_t hidden = 48;
};

constexpr std::uint32_t kSlots = 4, kDense = 3, kMinibatch = 96;
// Tables of slots: two tables of dimensions 8 and 5.
constexpr std::uint32_t kTable[kSlots] = {0, 1, 0, 1};
constexpr std::uint32_t kOffset[kSlots] = {0, 8, 13, 21};
constexpr std::uint32_t kWidth = 26;

// Rows in a vector instead of a cache.
class RowProductsTest : public testing::Test {
 protected:
  void Make(const Settings& settings) {
    settings_ = settings;
    inputs_ = {kWidth, kDense, settings.wide};
    schemas_.clear();
    for (const std::uint32_t dim : {8u, 5u}) {
      SegmentSpec embedding;
      embedding.name = "embedding";
      embedding.dim = dim;
      embedding.initializer.scale = 0.5f;
      // Of AdaGrad and Adam first steps go by signs, which the order of sums may change.
      embedding.optimizer.type = SparseOptimizerSpec::Type::kSgd;
      std::vector<SegmentSpec> segments = {embedding};
      if (settings.wide) {
        SegmentSpec wide;
        wide.name = "wide";
        wide.dim = 1;
        wide.optimizer = embedding.optimizer;
        segments.push_back(wide);
      }
      schemas_.push_back(RowSchema::Create("table", segments).value());
    }
    tables_.clear();
    for (std::uint32_t t = 0; t < 2; ++t) {
      StepTable table;
      table.schema = &schemas_[t];
      table.admits = settings.unadmitted > 0;
      for (std::uint32_t s = 0; s < kSlots; ++s) {
        if (kTable[s] == t) table.slots.push_back({s, kOffset[s], settings.mean && s == 1});
      }
      tables_.push_back(table);
    }
  }

  std::shared_ptr<const Batch> MakeBatch(std::uint64_t seed, std::uint32_t examples = kMinibatch) {
    Rng rng(seed);
    auto batch = std::make_shared<Batch>();
    batch->examples = examples;
    batch->slots = kSlots;
    batch->key_begin.push_back(0);
    for (std::uint32_t e = 0; e < examples; ++e) {
      batch->label.push_back(rng.Unit() < 0.3 ? 1.0f : 0.0f);
      for (std::uint32_t d = 0; d < kDense; ++d) {
        batch->dense.push_back(static_cast<float>(rng.Unit()));
      }
      batch->origin_file.push_back(0);
      batch->origin_line.push_back(e + 1);
      for (std::uint32_t s = 0; s < kSlots; ++s) {
        const std::uint64_t slot = settings_.shared && s == 2 ? 0 : s;
        const std::uint64_t keys =
            settings_.most_in_cell == 1 ? 1 : rng.Below(settings_.most_in_cell + 1);
        for (std::uint64_t k = 0; k < keys; ++k) {
          batch->keys.push_back((slot << 48) + rng.Below(settings_.keys));
          if (settings_.values) batch->values.push_back(static_cast<float>(rng.Unit() + 0.5));
        }
        batch->key_begin.push_back(static_cast<std::uint32_t>(batch->keys.size()));
      }
    }
    return batch;
  }

  std::unique_ptr<WorkItem> Plan(const std::shared_ptr<const Batch>& batch) {
    std::vector<PlannedSlot> slots;
    for (std::uint32_t s = 0; s < kSlots; ++s) {
      slots.push_back({kTable[s], kOffset[s], settings_.mean && s == 1});
    }
    KeyPlanner planner(slots, 2, kMinibatch);
    const std::size_t limit[2] = {100000, 100000};
    std::unique_ptr<WorkItem> item = planner.Plan(batch, 0, 0, limit).value();
    rows_.assign(2, {});
    for (std::uint32_t t = 0; t < 2; ++t) {
      TableWork& work = item->tables[t];
      const std::size_t row_bytes = schemas_[t].row_bytes();
      rows_[t].assign(work.keys.size() * row_bytes, std::byte{0});
      for (std::size_t w = 0; w < work.keys.size(); ++w) {
        schemas_[t].InitializeRow(3, work.keys[w], rows_[t].data() + w * row_bytes);
      }
      for (const std::uint32_t w : work.rows) {
        const bool placed = settings_.unadmitted == 0 || w % settings_.unadmitted != 1;
        work.places.push_back(placed ? rows_[t].data() + w * row_bytes : nullptr);
      }
    }
    return item;
  }

  std::unique_ptr<Network> MakeNetwork(bool block_only = false) {
    NetworkSpec spec;
    spec.hidden = {settings_.hidden, 16};
    spec.wide = settings_.wide;
    spec.optimizer.type = "sgd";
    std::unique_ptr<Network> network = CreateNetwork(spec, inputs_, 7).value();
    if (!block_only) return network;
    return std::make_unique<BlockOnly>(std::move(network));
  }

  struct Trained {
    std::vector<float> logits;
    std::vector<std::vector<std::byte>> rows;
    DenseState dense;
  };

  // A pass over a batch of several mini-batches, the last one not whole. predicts: others in
  // between, as a validation does.
  Trained Train(bool block_only, int threads, bool predicts = false) {
    PrepareComputeThread();
    WorkerGroup workers("compute", threads, [] { PrepareComputeThread(); });
    const std::unique_ptr<Network> network = MakeNetwork(block_only);
    auto executor = StepExecutor::Create(tables_, kMinibatch, network.get(), &workers).value();
    const auto item = Plan(MakeBatch(11, 4 * kMinibatch + 60));
    StepRates rates;
    for (const RowSchema& schema : schemas_) {
      rates.sparse.emplace_back(schema.segments().size(), 2.0f);
    }
    rates.dense = 0.1f;
    Trained trained;
    for (std::uint32_t m = 0; m < item->minibatches; ++m) {
      auto predictions = executor->Train(item.get(), m, rates, m * kMinibatch,
                                         [](std::uint32_t) { return std::string("clicks.tsv"); });
      TERRACE_CHECK(predictions.ok());
      for (const SlicePrediction& slice : *predictions) {
        trained.logits.insert(trained.logits.end(), slice.logit, slice.logit + slice.examples);
      }
      if (!predicts) continue;
      TERRACE_CHECK(executor->Predict(*item, (m + 1 + m % 2) % item->minibatches).ok());
    }
    trained.rows = rows_;
    trained.dense = network->Save();
    return trained;
  }

  void ExpectAlike(const Trained& a, const Trained& b) {
    ASSERT_EQ(a.logits.size(), b.logits.size());
    for (std::size_t i = 0; i < a.logits.size(); ++i) {
      ASSERT_NEAR(a.logits[i], b.logits[i], 2e-4) << "example " << i;
    }
    for (std::size_t t = 0; t < 2; ++t) {
      const RowSchema& schema = schemas_[t];
      for (std::size_t at = 0; at < a.rows[t].size(); at += schema.row_bytes()) {
        float x[16], y[16];
        std::memcpy(x, a.rows[t].data() + at, schema.weight_floats() * sizeof(float));
        std::memcpy(y, b.rows[t].data() + at, schema.weight_floats() * sizeof(float));
        for (std::size_t i = 0; i < schema.weight_floats(); ++i) {
          ASSERT_NEAR(x[i], y[i], 2e-4) << "table " << t << ", row " << at / schema.row_bytes();
        }
        ASSERT_EQ(std::memcmp(a.rows[t].data() + at + schema.statistics_offset(),
                              b.rows[t].data() + at + schema.statistics_offset(),
                              schema.row_bytes() - schema.statistics_offset()),
                  0);
      }
    }
    const std::vector<float>& x = a.dense.buffers[0];
    const std::vector<float>& y = b.dense.buffers[0];
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], 2e-4) << "parameter " << i;
  }

  Settings settings_;
  NetworkInputSpec inputs_;
  std::vector<RowSchema> schemas_;
  std::vector<StepTable> tables_;
  std::vector<std::vector<std::byte>> rows_;
};

Settings Case(int number) {
  Settings settings;
  switch (number) {
    case 1:
      settings.shared = true;
      break;
    case 2:
      settings.most_in_cell = 2;
      settings.keys = 8;
      settings.mean = true;
      break;
    case 3:
      settings.values = true;
      settings.shared = true;
      settings.hidden = 100;
      break;
    case 4:
      settings.wide = true;
      settings.shared = true;
      break;
    case 5:
      settings.unadmitted = 3;
      break;
    default:
      break;
  }
  return settings;
}

TEST_F(RowProductsTest, TeachWhatExamplesDo) {
  for (int number = 0; number < 6; ++number) {
    SCOPED_TRACE(number);
    Make(Case(number));
    const auto network = MakeNetwork();
    auto products = RowProducts::Create(&tables_, network.get(), kMinibatch, 1);
    ASSERT_TRUE(products->Allocate().ok());
    ASSERT_NE(products, nullptr);
    std::vector<float> lines(products->line_floats());
    products->UseLines(lines.data());
    EXPECT_TRUE(products->Plan(*Plan(MakeBatch(11)), 0));  // Or this compares nothing.
    for (const int threads : {1, 2}) ExpectAlike(Train(false, threads), Train(true, threads));
  }
}

TEST_F(RowProductsTest, RepeatToTheBitWhoeverDoesWhat) {
  Make(Case(3));
  const Trained first = Train(false, 2);
  for (int repeat = 0; repeat < 6; ++repeat) {
    const Trained again = Train(false, 2, /*predicts=*/repeat % 2 == 1);
    EXPECT_EQ(again.logits, first.logits);
    EXPECT_EQ(again.rows, first.rows);
    EXPECT_EQ(again.dense.buffers, first.dense.buffers);
  }
}

TEST_F(RowProductsTest, LeaveKeysThatDoNotRepeatToTheExamples) {
  Settings settings;
  settings.keys = 1'000'000;
  Make(settings);
  const auto network = MakeNetwork();
  auto products = RowProducts::Create(&tables_, network.get(), kMinibatch, 1);
  ASSERT_TRUE(products->Allocate().ok());
  std::vector<float> lines(products->line_floats());
  products->UseLines(lines.data());
  EXPECT_FALSE(products->Plan(*Plan(MakeBatch(11)), 0));
  // Nor more occurrences than one a slot and example.
  settings.keys = 3;
  settings.most_in_cell = 5;
  Make(settings);
  EXPECT_FALSE(products->Plan(*Plan(MakeBatch(11)), 0));
}

TEST_F(RowProductsTest, NeedALayerThatThreadsCanShare) {
  Settings settings;
  Make(settings);
  EXPECT_EQ(RowProducts::Create(&tables_, MakeNetwork(true).get(), kMinibatch, 1), nullptr);
  const int most = static_cast<int>((settings_.hidden + kProductColumns - 1) / kProductColumns);
  EXPECT_NE(RowProducts::Create(&tables_, MakeNetwork().get(), kMinibatch, most), nullptr);
  EXPECT_EQ(RowProducts::Create(&tables_, MakeNetwork().get(), kMinibatch, most + 1), nullptr);
}

// Rows that one slot has, and such that two have.
class GradientBeyondTheLimit : public RowProductsTest, public testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Cases, GradientBeyondTheLimit, testing::Values(0, 1));

TEST_P(GradientBeyondTheLimit, NamesAnExampleThatHoldsItsRow) {
  Make(Case(GetParam()));
  const std::unique_ptr<Network> network = MakeNetwork();
  // Small embeddings and large weights: the logits are fine, what an embedding would learn is not.
  DenseState state = network->Save();
  for (const ParameterInfo& parameter : network->parameters()) {
    const float value = parameter.shape.size() == 1 ? 0.0f : parameter.shape[1] == 1 ? 1.0f : 1e9f;
    std::fill_n(state.buffers[0].data() + parameter.offset, parameter.size, value);
  }
  ASSERT_TRUE(network->Load(state).ok());
  PrepareComputeThread();
  WorkerGroup workers("compute", 1);
  auto executor = StepExecutor::Create(tables_, kMinibatch, network.get(), &workers).value();
  auto batch = std::make_shared<Batch>(*MakeBatch(11));
  for (float& dense : batch->dense) dense = 0;
  const auto item = Plan(batch);
  for (std::size_t t = 0; t < 2; ++t) {
    for (std::size_t at = 0; at < rows_[t].size(); at += schemas_[t].row_bytes()) {
      auto* weights = reinterpret_cast<float*>(rows_[t].data() + at);
      std::fill_n(weights, schemas_[t].weight_floats(), 1e-21f);
    }
  }
  const auto before = rows_;
  const StepRates rates = {{{0.1f}, {0.1f}}, 0.01f};
  auto predictions = executor->Train(item.get(), 0, rates, 0,
                                     [](std::uint32_t) { return std::string("clicks.tsv"); });
  ASSERT_FALSE(predictions.ok());
  const std::string& message = predictions.status().message();
  EXPECT_NE(message.find("gradient of an embedding"), std::string::npos) << message;
  EXPECT_NE(message.find("of 'clicks.tsv', keys 0x"), std::string::npos) << message;
  EXPECT_EQ(rows_, before);
}

}  // namespace
}  // namespace terrace
