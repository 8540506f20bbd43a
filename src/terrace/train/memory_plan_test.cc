#include "terrace/train/memory_plan.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/data/example_source.h"
#include "terrace/pipeline/key_plan.h"
#include "terrace/train/index_plan.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

MemoryPlanInput RandomInput(Rng* rng) {
  MemoryPlanInput input;
  input.resident_bytes = (20 + rng->Below(200)) * kMiB;
  input.stores = 1 + static_cast<std::uint32_t>(rng->Below(16));
  input.slots = 1 + static_cast<std::uint32_t>(rng->Below(64));
  input.tables = 1 + static_cast<std::uint32_t>(rng->Below(input.slots));
  input.dense_width = static_cast<std::uint32_t>(rng->Below(64));
  input.minibatch = 1U << rng->Below(12);
  input.batch = input.minibatch << rng->Below(8);
  input.sets = 1 + static_cast<std::uint32_t>(rng->Below(5));
  if (input.sets > 1) input.batches_ahead = 2 + static_cast<std::uint32_t>(rng->Below(3));
  if (rng->Below(2) == 1) input.file_rows = input.stores * (1000 + rng->Below(400'000));
  const std::uint64_t row_bytes = 24 + 8 * rng->Below(200);
  input.least_cache_bytes =
      2 * std::uint64_t{input.minibatch} * input.slots * (row_bytes + 96) + 8 * kMiB;
  input.dense_state_bytes = rng->Below(64) * kMiB;
  input.index_bytes = rng->Below(512) * kMiB;
  input.source_bytes = rng->Below(32) * kMiB;
  if (rng->Below(2) == 1) {
    // As a job has it that was tried with a small budget.
    input.most_read_ahead_bytes = (1 + rng->Below(64)) * kMiB;
    input.read_ahead_bytes = kMiB;
    input.source_bytes += input.read_ahead_bytes;
  }
  if (rng->Below(2) == 1) {
    input.validates = true;
    input.validation_rows_bytes = rng->Below(200 * kMiB);
    input.validation_source_bytes = input.source_bytes;
  }
  input.index_room_bytes = rng->Below(32) * kMiB;
  if (rng->Below(2) == 1) input.filter_bytes = (1 + rng->Below(256)) * kMiB;
  return input;
}

TEST(MemoryPlan, TheLeastThatWouldDoDoes) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Rng rng(seed);
    MemoryPlanInput input = RandomInput(&rng);
    const std::uint64_t least = LeastBudgetBytes(input);
    input.budget_bytes = least;
    const Result<MemoryPlan> plan = PlanMemory(input);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_GE(plan->rows_bytes,
              input.least_cache_bytes + input.index_bytes + input.index_room_bytes);
    // As the program finds itself when it is started with that.
    if (input.most_read_ahead_bytes > 0) {
      MemoryPlanInput again = input;
      again.read_ahead_bytes = ReadAheadBytes(input.most_read_ahead_bytes, least);
      again.source_bytes += again.read_ahead_bytes - input.read_ahead_bytes;
      if (again.validates) {
        again.validation_source_bytes += again.read_ahead_bytes - input.read_ahead_bytes;
      }
      EXPECT_EQ(LeastBudgetBytes(again), least);
      EXPECT_TRUE(PlanMemory(again).ok());
    }
    input.budget_bytes = least - 4 * kMiB;
    const Result<MemoryPlan> refused = PlanMemory(input);
    ASSERT_FALSE(refused.ok()) << "not the least";
    EXPECT_NE(refused.status().message().find("at least " + WholeMiB(least) + " "),
              std::string::npos)
        << refused.status().message();
  }
}

TEST(MemoryPlan, NamesTheSettingsThatTakeMost) {
  MemoryPlanInput input;
  input.resident_bytes = 60 * kMiB;
  input.slots = 26;
  input.minibatch = 1;
  input.batch = 4096;
  input.least_cache_bytes = 8 * kMiB;
  const auto advice = [](const MemoryPlanInput& job) {
    const std::string message = PlanMemory(job).status().message();
    const std::size_t raise = message.find("Raise memory.budget");
    return raise == std::string::npos ? message : message.substr(raise);
  };
  EXPECT_EQ(advice(input), "Raise memory.budget.");
  MemoryPlanInput job = input;
  job.filter_bytes = 50 * kMiB;
  job.minibatch = 4096;
  job.least_cache_bytes += 400 * kMiB;
  EXPECT_EQ(advice(job), "Raise memory.budget, or lower training.minibatch.");
  job.filter_bytes = 200 * kMiB;
  EXPECT_EQ(advice(job), "Raise memory.budget, or lower training.minibatch or table.admit_filter.");
  job.filter_bytes = 1000 * kMiB;
  EXPECT_EQ(advice(job), "Raise memory.budget, or lower table.admit_filter or training.minibatch.");
  job.of_a_run = true;
  EXPECT_EQ(advice(job), "Raise memory.budget.");
  job = input;
  job.stores = 256;
  job.least_io_buffer_bytes = kMiB;
  EXPECT_EQ(advice(job), "Raise memory.budget, or lower ssd.shards.");
  job = input;
  job.dense_state_bytes = 100 * kMiB;
  job.resident_bytes += job.dense_state_bytes;
  EXPECT_EQ(advice(job), "Raise memory.budget, or lower network.hidden.");
}

TEST(MemoryPlan, TheBudgetForSoManyRowsHasRoomForThemAndLittleMore) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Rng rng(seed);
    MemoryPlanInput input = RandomInput(&rng);
    input.looks_ahead = rng.Below(2) == 0;
    input.row_bytes = 50 + rng.Below(500);
    const std::uint64_t rows = rng.Below(8192) * kMiB + rng.Below(kMiB);
    const std::uint64_t least = LeastBudgetBytes(input), budget = BudgetForRows(input, rows);
    EXPECT_GE(budget, least);
    input.budget_bytes = budget;
    const Result<MemoryPlan> plan = PlanMemory(input);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_GE(plan->rows_bytes, rows);
    // A step of the batch makes a difference of an eighth at most.
    EXPECT_TRUE(budget <= least + 2 * kMiB ||
                plan->rows_bytes <= rows + plan->rows_bytes / 8 + 4 * kMiB);
  }
}

TEST(MemoryPlan, AValidationsBatchTakesOnlyWhatCanBeSpared) {
  int small = 0, large = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Rng rng(seed);
    MemoryPlanInput input = RandomInput(&rng);
    input.validates = true;
    const std::uint64_t least = LeastBudgetBytes(input);
    std::uint32_t before = 0;
    // No budget above the least is refused for what validation takes more with it.
    for (std::uint64_t budget = least; budget < 64 * least; budget += budget / 16) {
      input.budget_bytes = budget;
      const Result<MemoryPlan> plan = PlanMemory(input);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      EXPECT_GE(plan->rows_bytes,
                input.least_cache_bytes + input.index_bytes + input.index_room_bytes);
      EXPECT_EQ(plan->validation_batch % input.minibatch, 0u);
      EXPECT_GE(plan->validation_batch, std::max(before, input.minibatch));
      EXPECT_LE(plan->validation_batch, std::max(4096U, input.minibatch));
      before = plan->validation_batch;
      small += plan->validation_batch <= 1024 ? 1 : 0;
      large += plan->validation_batch > 2048 && input.minibatch < 1024 ? 1 : 0;
    }
  }
  EXPECT_GT(small, 100);
  EXPECT_GT(large, 100);
}

TEST(MemoryPlan, TheLeastIsToldSoThatItIsEnough) {
  EXPECT_EQ(WholeMiB(628 * kMiB), "628 MiB");
  EXPECT_EQ(WholeMiB(628 * kMiB + 1), "629 MiB");
  EXPECT_EQ(WholeMiB(1189 * kMiB), "1189 MiB") << "not 1.16 GiB, which is less";
}

TEST(MemoryPlan, PartsMakeTheBudget) {
  int looking = 0, shared = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Rng rng(seed);
    MemoryPlanInput input = RandomInput(&rng);
    input.budget_bytes = LeastBudgetBytes(input) + rng.Below(4096) * kMiB;
    input.looks_ahead = rng.Below(2) == 0;
    input.row_bytes = 50 + rng.Below(500);
    const Result<MemoryPlan> plan = PlanMemory(input);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(plan->resident_bytes + plan->slack_bytes + plan->transient_bytes +
                  plan->filter_bytes + plan->io_bytes + plan->batches_bytes +
                  plan->look_ahead_bytes + plan->rows_bytes,
              input.budget_bytes);
    EXPECT_EQ(plan->look_ahead_bytes > 0, plan->future_bytes > 0);
    EXPECT_LE(plan->look_ahead_bytes, (plan->look_ahead_bytes + plan->rows_bytes) / 8);
    EXPECT_TRUE(input.looks_ahead || plan->look_ahead_bytes == 0);
    looking += plan->look_ahead_bytes > 0 ? 1 : 0;
    EXPECT_GE(plan->rows_bytes,
              input.least_cache_bytes + input.index_bytes + input.index_room_bytes);
    EXPECT_EQ(plan->batch % input.minibatch, 0);
    EXPECT_LE(plan->batch, input.batch);
    const std::uint64_t rest = plan->batches_bytes + plan->look_ahead_bytes + plan->rows_bytes;
    EXPECT_TRUE(plan->batch == input.minibatch || plan->batches_bytes <= rest / 8);
    if (plan->batch > input.minibatch && plan->batch < input.batch) ++shared;
  }
  EXPECT_GT(looking, 500);
  EXPECT_GT(shared, 100) << "whose batch the share decides";
}

// Where they are of one example and one slot, most of a batch is what each of them has of its own.
TEST(MemoryPlan, WhatAMiniBatchTakesItselfIsCounted) {
  DataOptions data;
  data.format = "synthetic";
  data.rows = 100'000;
  data.categorical_slots = 1;
  auto source = OpenSource(FileSystem::Posix(), data);
  ASSERT_TRUE(source.ok()) << source.status().message();
  MemoryPlanInput input;
  input.budget_bytes = 4096 * kMiB;
  input.slots = static_cast<std::uint32_t>((*source)->schema().slots.size());
  input.dense_width = (*source)->schema().dense_width();
  input.minibatch = 1;
  input.batch = 50'000;
  input.sets = 2;
  input.batches_ahead = 3;
  const Result<MemoryPlan> plan = PlanMemory(input);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  ASSERT_EQ(plan->batch, input.batch);
  auto batch = (*source)->Next(plan->batch, 1);
  ASSERT_TRUE(batch.ok() && batch->has_value());
  const auto shared = std::make_shared<const Batch>(std::move(**batch));
  KeyPlanner planner(std::vector<PlannedSlot>(input.slots), 1, 1, plan->set_bytes);
  const std::size_t most_rows[1] = {input.batch};
  const auto set = planner.Plan(shared, 0, 0, most_rows);
  ASSERT_TRUE(set.ok()) << set.status().message();
  EXPECT_TRUE((*set)->last_of_batch) << "a click log's set is not cut";
  const std::uint64_t one = shared->MemoryBytes() + (*set)->UsedBytes();
  EXPECT_GE(plan->batches_bytes,
            input.sets * one + input.batches_ahead * shared->MemoryBytes() + planner.MemoryBytes());
}

// A model of tables with rows of one length, expecting so many keys each.
ModelPlan PlanOf(std::vector<std::uint64_t> expected_keys, IndexChoice index) {
  ModelPlan plan;
  for (const std::uint64_t keys : expected_keys) {
    SegmentSpec segment;
    segment.name = "embedding";
    segment.dim = 8;
    TablePlan table{
        "tables.t", RowSchema::Create("t", {segment}, {}, {}).value(), {}, {}, index, keys, {}};
    plan.tables.push_back(std::move(table));
  }
  return plan;
}

TEST(IndexPlan, AutoGoesByTheTablesPartOfTheBudget) {
  Job job;
  job.memory.budget_bytes = 1024 * kMiB;
  // Half of it is 512 MiB, of which each of two tables has half: 32 Mi keys.
  const std::uint64_t most = std::uint64_t{32} << 20;
  for (const IndexChoice index : {IndexChoice::kAuto, IndexChoice::kKey, IndexChoice::kGroup}) {
    const ModelPlan plan = PlanOf({most, most + 1}, index);
    const IndexKind first = IndexOf(job, plan, plan.tables[0]);
    const IndexKind second = IndexOf(job, plan, plan.tables[1]);
    EXPECT_EQ(first, index == IndexChoice::kGroup ? IndexKind::kGroup : IndexKind::kKey);
    EXPECT_EQ(second, index == IndexChoice::kKey ? IndexKind::kKey : IndexKind::kGroup);
  }
  const ModelPlan unknown = PlanOf({0}, IndexChoice::kAuto);
  EXPECT_EQ(IndexOf(job, unknown, unknown.tables[0]), IndexKind::kKey);
}

TEST(IndexPlan, ExpectedKeysHavePlaces) {
  Job job;
  job.memory.budget_bytes = std::uint64_t{1} << 50;
  job.ssd.shards = 2;
  const std::uint64_t rest = ~std::uint64_t{0};
  const auto most_of = [&](IndexKind kind) {
    return 2 * Store::MostRows(kind, PlanOf({1}, IndexChoice::kKey).tables[0].schema.row_bytes(),
                               {}, job.ssd.file_bytes, rest);
  };
  const std::uint64_t by_key = most_of(IndexKind::kKey), by_group = most_of(IndexKind::kGroup);
  EXPECT_GT(by_key, std::uint64_t{1} << 32) << "half of the places in each shard";
  EXPECT_LT(by_key, std::uint64_t{1} << 33);
  EXPECT_GT(by_group, 4 * by_key);
  const auto check = [&](std::uint64_t keys, IndexChoice index, std::uint64_t file_rows) {
    return CheckExpectedKeys(job, PlanOf({keys}, index), file_rows);
  };
  for (const IndexChoice index : {IndexChoice::kAuto, IndexChoice::kKey}) {
    EXPECT_TRUE(check(by_key, index, rest).ok());
  }
  EXPECT_TRUE(check(0, IndexChoice::kKey, rest).ok());
  // More than by key: auto chooses the other index.
  const ModelPlan more = PlanOf({by_key, by_key + 1}, IndexChoice::kAuto);
  EXPECT_EQ(IndexOf(job, more, more.tables[0]), IndexKind::kKey);
  EXPECT_EQ(IndexOf(job, more, more.tables[1]), IndexKind::kGroup);
  EXPECT_TRUE(CheckExpectedKeys(job, more, rest).ok());
  const Status refused = check(by_key + 1, IndexChoice::kKey, rest);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("choose ssd.shards: 3 or more, or tables.t.index: group"),
            std::string::npos)
      << refused.message();
  job.ssd.shards = 3;
  EXPECT_TRUE(check(by_key + 1, IndexChoice::kKey, rest).ok());
  job.ssd.shards = 2;
  EXPECT_TRUE(check(by_group, IndexChoice::kGroup, rest).ok());
  const Status beyond = check(by_group + 1, IndexChoice::kAuto, rest);
  EXPECT_EQ(beyond.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(beyond.message().find("table.index"), std::string::npos) << beyond.message();
  // Of files of few rows, of which there are no more than have a number.
  EXPECT_FALSE(check(std::uint64_t{1} << 24, IndexChoice::kKey, 1).ok());
  EXPECT_TRUE(check(std::uint64_t{1} << 22, IndexChoice::kKey, 1).ok());
}

TEST(IndexPlan, RoomForRowsBeyondThoseOfAMiniBatch) {
  Job job;
  job.ssd.shards = 3;
  EXPECT_GE(IndexRoomBytes(job, PlanOf({0, 0}, IndexChoice::kKey)),
            kIndexRoomRows * kKeyIndexBytes + 6 * kMiB);
}

// Records that are longer than the budget's buffers get the room that they take.
TEST(PlanMemory, LongRecordsHaveTheirBuffers) {
  for (const std::uint32_t block : {0u, 64u << 10, 256u << 10}) {
    MemoryPlanInput input;
    input.budget_bytes = 1024 * kMiB;
    input.stores = 16;
    input.slots = 26;
    input.batch = input.minibatch = 256;
    input.row_bytes = 200;
    const GroupShape shape{block, 10};
    input.least_io_buffer_bytes = Store::LeastBufferBytes(IndexKind::kGroup, 100, shape);
    const Result<MemoryPlan> plan = PlanMemory(input);
    ASSERT_TRUE(plan.ok()) << plan.status().ToString();
    EXPECT_GE(plan->io_buffer_bytes, input.least_io_buffer_bytes);
    EXPECT_GE(plan->io_bytes, 3 * 16 * plan->io_buffer_bytes);
    // Eight records and four.
    EXPECT_GE(plan->io_buffer_bytes, std::uint64_t{12} * block);
  }
}

// From 2 MiB on a buffer takes whole huge pages.
TEST(PlanMemory, BuffersTakeNoMoreThanIsPlanned) {
  Rng rng(11);
  for (int i = 0; i < 500; ++i) {
    MemoryPlanInput input;
    input.budget_bytes = (300 + rng.Below(4000)) * kMiB;
    input.stores = 1 + static_cast<std::uint32_t>(rng.Below(20));
    input.slots = 26;
    input.batch = input.minibatch = 256;
    input.row_bytes = 200;
    input.least_io_buffer_bytes = rng.Below(5) == 0 ? rng.Below(5 * kMiB) : 0;
    const Result<MemoryPlan> plan = PlanMemory(input);
    if (!plan.ok()) continue;
    EXPECT_EQ(HugeBuffer::SizeFor(plan->io_buffer_bytes), plan->io_buffer_bytes);
    EXPECT_GE(plan->io_buffer_bytes, input.least_io_buffer_bytes);
    EXPECT_GE(plan->io_bytes, 3 * input.stores * plan->io_buffer_bytes);
  }
}

TEST(IndexPlan, BytesOfAKey) {
  constexpr std::uint64_t kKeys = 1'000'000'000;
  EXPECT_EQ(IndexBytes(IndexKind::kKey, 128, {}, kKeys), 8 * kKeys);
  for (const std::uint32_t row_bytes : {16u, 56u, 128u, 300u}) {
    const std::uint64_t bytes = IndexBytes(IndexKind::kGroup, row_bytes, {}, kKeys);
    EXPECT_GT(bytes, kKeys);
    EXPECT_LT(bytes, kKeys * 3) << row_bytes;
    // Blocks of four sectors, and filters of fewer bits or none.
    const GroupShape few{16 << 10, 4}, none{16 << 10, 0};
    EXPECT_LT(IndexBytes(IndexKind::kGroup, row_bytes, few, kKeys), kKeys * 9 / 10) << row_bytes;
    EXPECT_LT(IndexBytes(IndexKind::kGroup, row_bytes, none, kKeys), kKeys / 3) << row_bytes;
  }
  const ModelPlan plan = PlanOf({kKeys, kKeys}, IndexChoice::kGroup);
  EXPECT_EQ(FirstIndexBytes(Job(), plan),
            2 * Store::GroupIndexBytes(plan.tables[0].schema.row_bytes(), {}, kKeys));
  EXPECT_EQ(FirstIndexBytes(Job(), PlanOf({kKeys}, IndexChoice::kKey)), 0u);
}

}  // namespace
}  // namespace terrace
