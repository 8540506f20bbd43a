#include "terrace/pipeline/train_step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/pipeline/key_plan.h"
#include "terrace/pipeline/testing/linear_network.h"

namespace terrace {
namespace {

constexpr std::uint32_t kDim = 4;
constexpr std::uint32_t kSlots = 3;
constexpr std::uint32_t kMinibatch = 32;

// A planned mini-batch whose rows lie in a vector instead of a cache.
class StepTest : public testing::Test {
 protected:
  StepTest() : schema_(MakeSchema()) {
    inputs_.embedding_width = kDim * kSlots;
    inputs_.dense_width = 2;
    inputs_.wide = true;
  }

  static RowSchema MakeSchema() {
    SegmentSpec embedding;
    embedding.name = "embedding";
    embedding.dim = kDim;
    SegmentSpec wide;
    wide.name = "wide";
    wide.dim = 1;
    wide.initializer.type = InitializerSpec::Type::kZeros;
    return RowSchema::Create("default", {embedding, wide}).value();
  }

  std::shared_ptr<const Batch> MakeBatch(std::uint32_t examples = kMinibatch) {
    Rng rng(5);
    auto batch = std::make_shared<Batch>();
    batch->examples = examples;
    batch->slots = kSlots;
    batch->first_example = 1000;
    batch->key_begin.push_back(0);
    for (std::uint32_t e = 0; e < examples; ++e) {
      batch->label.push_back(rng.Unit() < 0.3 ? 1.0f : 0.0f);
      batch->dense.push_back(static_cast<float>(rng.Unit()));
      batch->dense.push_back(static_cast<float>(rng.Unit()));
      batch->origin_file.push_back(0);
      batch->origin_line.push_back(e + 7);
      for (std::uint32_t s = 0; s < kSlots; ++s) {
        batch->keys.push_back((std::uint64_t{s} << 48) + rng.Below(10));
        batch->key_begin.push_back(static_cast<std::uint32_t>(batch->keys.size()));
      }
    }
    return batch;
  }

  // Plans the batch and lays its rows out anew, as they start.
  std::unique_ptr<WorkItem> Plan(const std::shared_ptr<const Batch>& batch) {
    std::vector<PlannedSlot> slots;
    for (std::uint32_t s = 0; s < kSlots; ++s) slots.push_back({0, s * kDim, false});
    KeyPlanner planner(slots, 1, batch->examples);
    const std::size_t limit[1] = {100000};
    std::unique_ptr<WorkItem> item = planner.Plan(batch, 0, 0, limit).value();
    TableWork& work = item->tables[0];
    rows_.assign(work.keys.size() * schema_.row_bytes(), std::byte{0});
    for (std::size_t w = 0; w < work.keys.size(); ++w) {
      schema_.InitializeRow(3, work.keys[w], rows_.data() + w * schema_.row_bytes());
    }
    for (std::uint32_t w : work.rows) work.places.push_back(rows_.data() + w * schema_.row_bytes());
    return item;
  }

  std::unique_ptr<StepExecutor> MakeExecutor(Network* network, WorkerGroup* workers,
                                             std::uint32_t minibatch = kMinibatch) {
    StepTable table;
    table.schema = &schema_;
    for (std::uint32_t s = 0; s < kSlots; ++s) table.slots.push_back({s, s * kDim, false});
    return StepExecutor::Create({table}, minibatch, network, workers).value();
  }

  static std::string FileName(std::uint32_t /*file*/) { return "clicks.tsv"; }

  RowSchema schema_;
  NetworkInputSpec inputs_;
  std::vector<std::byte> rows_;
  const StepRates rates_ = {{{0.1f, 0.1f}}, 0.1f};
};

TEST_F(StepTest, TrainsRowsParametersAndStatistics) {
  LinearNetwork network(inputs_);
  WorkerGroup workers("compute", 2);
  auto executor = MakeExecutor(&network, &workers);
  const auto batch = MakeBatch();
  auto item = Plan(batch);
  const std::vector<std::byte> before = rows_;
  const std::vector<float> dense_before = network.Save().buffers[0];
  auto predictions = executor->Train(item.get(), 0, rates_, 1000, FileName);
  ASSERT_TRUE(predictions.ok()) << predictions.status().ToString();
  EXPECT_NE(rows_, before);
  EXPECT_NE(network.Save().buffers[0], dense_before);
  double show = 0;
  for (std::size_t w = 0; w < item->tables[0].keys.size(); ++w) {
    float one = 0;
    std::uint64_t last_seen = 0;
    std::memcpy(&one, rows_.data() + w * schema_.row_bytes() + schema_.show_offset(), sizeof one);
    std::memcpy(&last_seen, rows_.data() + w * schema_.row_bytes() + schema_.last_seen_offset(),
                sizeof last_seen);
    show += one;
    EXPECT_EQ(last_seen, 1000u + kMinibatch);
  }
  EXPECT_EQ(show, kMinibatch * kSlots);
}

// Mini-batches of slices in two equal levels, in two, and, with two threads, in three; of the last
// a part only, as at the end of an epoch. One step's rows depend on no sum over slices.
TEST_F(StepTest, SlicesPredictAndTeachRowsWhatOneSliceDoes) {
  for (const std::uint32_t minibatch : {kMinibatch, 1100u, 2100u, 4000u}) {
    const auto batch = MakeBatch(std::min(minibatch, 3001u));
    std::vector<float> reference;
    std::vector<std::byte> reference_rows;
    for (int threads : {1, 2, 3, 5}) {
      LinearNetwork network(inputs_);
      WorkerGroup workers("compute", threads);
      auto executor = MakeExecutor(&network, &workers, minibatch);
      auto item = Plan(batch);
      auto predictions = executor->Predict(*item, 0);
      ASSERT_TRUE(predictions.ok());
      std::vector<float> logits;
      for (const SlicePrediction& slice : *predictions) {
        logits.insert(logits.end(), slice.logit, slice.logit + slice.examples);
      }
      ASSERT_TRUE(executor->Train(item.get(), 0, rates_, 1000, FileName).ok());
      if (threads == 1) {
        EXPECT_EQ(logits.size(), batch->examples);
        reference = logits;
        reference_rows = rows_;
      }
      EXPECT_EQ(logits, reference) << minibatch << " examples, " << threads << " threads";
      EXPECT_EQ(rows_, reference_rows) << minibatch << " examples, " << threads << " threads";
    }
  }
}

TEST_F(StepTest, ANaNStopsBeforeAnythingIsAppliedAndSaysWhere) {
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e30f}) {
    LinearNetwork network(inputs_);
    DenseState state = network.Save();
    state.buffers[0][1] = poison;
    ASSERT_TRUE(network.Load(state).ok());
    WorkerGroup workers("compute", 2);
    auto executor = MakeExecutor(&network, &workers);
    const auto batch = MakeBatch();
    auto item = Plan(batch);
    const std::vector<std::byte> before = rows_;
    auto predictions = executor->Train(item.get(), 0, rates_, 1000, FileName);
    ASSERT_FALSE(predictions.ok());
    EXPECT_EQ(predictions.status().code(), StatusCode::kInternal);
    const std::string& message = predictions.status().message();
    EXPECT_NE(message.find("examples 1000 to 1031"), std::string::npos) << message;
    EXPECT_NE(message.find("clicks.tsv"), std::string::npos) << message;
    EXPECT_NE(message.find("keys 0x"), std::string::npos) << message;
    EXPECT_EQ(rows_, before);
    EXPECT_EQ(network.Save().steps, 0u);
  }
}

// Every gradient of a row is small, and one of the network is not: its square would be infinite.
TEST_F(StepTest, AHugeGradientOfTheNetworkStopsBeforeAnythingIsApplied) {
  for (const float dense : {1e14f, 1e17f, 1e20f}) {
    NetworkSpec spec;
    spec.hidden = {};
    spec.wide = inputs_.wide;
    spec.optimizer.type = "adagrad";
    for (const float clip_norm : {0.0f, 1.0f}) {
      SCOPED_TRACE(testing::Message() << dense << ", clipped to " << clip_norm);
      spec.optimizer.clip_norm = clip_norm;
      const auto network = CreateNetwork(spec, inputs_, 7).value();
      WorkerGroup workers("compute", 2);
      auto executor = MakeExecutor(network.get(), &workers);
      auto batch = std::make_shared<Batch>(*MakeBatch());
      batch->dense[9] = dense;
      auto item = Plan(batch);
      const std::vector<std::byte> rows_before = rows_;
      // From zero no logit is certain, whatever its features.
      DenseState before = network->Save();
      std::ranges::fill(before.buffers[0], 0.0f);
      ASSERT_TRUE(network->Load(before).ok());
      const auto predictions = executor->Train(item.get(), 0, rates_, 1000, FileName);
      const DenseState after = network->Save();
      if (clip_norm > 0 || dense < 1e15f) {
        ASSERT_TRUE(predictions.ok()) << predictions.status().ToString();
        for (const float accumulator : after.buffers[1]) EXPECT_TRUE(std::isfinite(accumulator));
        continue;
      }
      EXPECT_EQ(predictions.status().code(), StatusCode::kInternal);
      const std::string& message = predictions.status().message();
      EXPECT_NE(message.find("norm beyond 1e15"), std::string::npos) << message;
      EXPECT_NE(message.find("examples 1000 to 1031"), std::string::npos) << message;
      EXPECT_NE(message.find("clip_norm"), std::string::npos) << message;
      EXPECT_EQ(rows_, rows_before);
      EXPECT_EQ(after.buffers, before.buffers);
    }
  }
}

// The gradient that each occurrence of a key has is within the limit.
TEST_F(StepTest, AHugeSumOfARowsGradientsStopsBeforeAnythingIsApplied) {
  for (const float weight : {1e13f, 1e16f}) {
    SCOPED_TRACE(weight);
    NetworkSpec spec;
    spec.hidden = {};
    spec.wide = inputs_.wide;
    const auto network = CreateNetwork(spec, inputs_, 7).value();
    WorkerGroup workers("compute", 2);
    auto executor = MakeExecutor(network.get(), &workers);
    auto batch = std::make_shared<Batch>(*MakeBatch());
    std::ranges::fill(batch->dense, 0.0f);
    std::ranges::fill(batch->label, 0.0f);
    auto item = Plan(batch);
    std::ranges::fill(rows_, std::byte{0});
    // The bias makes each logit certain and wrong, so that each occurrence's gradient is weight /
    // kMinibatch.
    DenseState state = network->Save();
    std::ranges::fill(state.buffers[0], weight);
    ASSERT_TRUE(network->Load(state).ok());
    const std::vector<std::byte> rows_before = rows_;
    const auto predictions = executor->Train(item.get(), 0, rates_, 1000, FileName);
    if (weight < 1e15f) {
      ASSERT_TRUE(predictions.ok()) << predictions.status().ToString();
      EXPECT_NE(rows_, rows_before);
      continue;
    }
    EXPECT_EQ(predictions.status().code(), StatusCode::kInternal);
    const std::string& message = predictions.status().message();
    EXPECT_NE(message.find("a row sum to more than 1e15"), std::string::npos) << message;
    EXPECT_NE(message.find("clicks.tsv', keys 0x"), std::string::npos) << message;
    EXPECT_EQ(rows_, rows_before);
    EXPECT_EQ(network->Save().buffers, state.buffers);
  }
}

TEST_F(StepTest, MoreMemoryThanThereMayBeIsNotTaken) {
  NetworkSpec spec;
  spec.wide = inputs_.wide;
  const auto network = CreateNetwork(spec, inputs_, 7).value();
  WorkerGroup workers("compute", 2);
  const auto create = [&](std::uint64_t most_bytes) {
    StepTable table;
    table.schema = &schema_;
    for (std::uint32_t s = 0; s < kSlots; ++s) table.slots.push_back({s, s * kDim, false});
    return StepExecutor::Create({table}, 4096, network.get(), &workers, most_bytes).status();
  };
  EXPECT_TRUE(create(64 << 20).ok());
  EXPECT_EQ(create(64 << 10).code(), StatusCode::kInvalidArgument);
}

TEST_F(StepTest, RowsThatAreNowhereReadAsZeros) {
  LinearNetwork network(inputs_);
  WorkerGroup workers("compute", 1);
  auto executor = MakeExecutor(&network, &workers);
  const auto batch = MakeBatch();
  auto item = Plan(batch);
  for (std::byte*& place : item->tables[0].places) place = nullptr;
  auto predictions = executor->Predict(*item, 0);
  ASSERT_TRUE(predictions.ok());
  for (std::uint32_t e = 0; e < kMinibatch; ++e) {
    // Columns 12 and 13 are the dense features; LinearNetwork starts with 0.5 and -0.25 in turn.
    const float expected = 0.5f * batch->dense[2 * e] - 0.25f * batch->dense[2 * e + 1];
    EXPECT_FLOAT_EQ((*predictions)[0].logit[e], expected);
  }
}

}  // namespace
}  // namespace terrace
