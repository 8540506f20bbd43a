#include "terrace/pipeline/key_plan.h"

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/base/thread.h"

namespace terrace {
namespace {

std::shared_ptr<const Batch> RandomBatch(std::uint64_t seed, std::uint32_t examples,
                                         std::uint32_t slots, std::uint64_t keys, bool values) {
  Rng rng(seed);
  auto batch = std::make_shared<Batch>();
  batch->examples = examples;
  batch->slots = slots;
  batch->key_begin.push_back(0);
  for (std::uint32_t cell = 0; cell < examples * slots; ++cell) {
    for (std::uint64_t n = rng.Below(4); n > 0; --n) {
      // Repeats within a slot occur, and key 0 and the largest key too.
      const std::uint64_t r = rng.Below(keys);
      batch->keys.push_back(r == 0 ? 0 : r == 1 ? ~Key{0} : MixKey(r));
      if (values) batch->values.push_back(static_cast<float>(rng.Unit()));
    }
    batch->key_begin.push_back(static_cast<std::uint32_t>(batch->keys.size()));
  }
  return batch;
}

// Checks every statement of WorkItem about one item against the batch itself.
void CheckItem(const WorkItem& item, const std::vector<PlannedSlot>& slots) {
  const Batch& batch = *item.batch;
  const std::uint32_t base = batch.key_begin[std::size_t{item.first_example} * batch.slots];
  for (std::size_t t = 0; t < item.tables.size(); ++t) {
    const TableWork& table = item.tables[t];
    ASSERT_EQ(std::set<Key>(table.keys.begin(), table.keys.end()).size(), table.keys.size());
    std::size_t occurrences = 0;
    for (std::uint32_t m = 0; m < item.minibatches; ++m) {
      const std::uint32_t rows = table.row_begin[m + 1] - table.row_begin[m];
      const std::uint32_t* begin = table.inverse_begin.data() + table.row_begin[m] + m;
      std::vector<std::vector<std::tuple<std::uint32_t, std::uint32_t, float>>> expected(rows);
      std::set<Key> distinct;
      for (std::uint32_t e = item.MinibatchBegin(m); e < item.MinibatchEnd(m); ++e) {
        for (std::uint32_t s = 0; s < batch.slots; ++s) {
          if (slots[s].table != t) continue;
          const std::size_t cell = std::size_t{e} * batch.slots + s;
          const std::uint32_t count = batch.key_begin[cell + 1] - batch.key_begin[cell];
          for (std::uint32_t k = batch.key_begin[cell]; k < batch.key_begin[cell + 1]; ++k) {
            const std::uint32_t local = item.local_row[k - base];
            ASSERT_LT(local, rows);
            ASSERT_EQ(table.keys[table.rows[table.row_begin[m] + local]], batch.keys[k]);
            distinct.insert(batch.keys[k]);
            const float value = (batch.values.empty() ? 1.0f : batch.values[k]) /
                                (slots[s].mean ? static_cast<float>(count) : 1.0f);
            expected[local].emplace_back(e - item.MinibatchBegin(m), slots[s].input_offset, value);
          }
        }
      }
      ASSERT_EQ(distinct.size(), rows);
      for (std::uint32_t r = 0; r < rows; ++r) {
        ASSERT_EQ(begin[r + 1] - begin[r], expected[r].size());
        for (std::uint32_t i = 0; i < expected[r].size(); ++i, ++occurrences) {
          const std::size_t at = table.occurrence_begin[m] + begin[r] + i;
          ASSERT_EQ(table.example[at], std::get<0>(expected[r][i]));
          ASSERT_EQ(table.input_offset[at], std::get<1>(expected[r][i]));
          if (!table.value.empty()) {
            ASSERT_EQ(table.value[at], std::get<2>(expected[r][i]));
          } else {
            ASSERT_EQ(std::get<2>(expected[r][i]), 1.0f);
          }
        }
      }
    }
    ASSERT_EQ(table.example.size(), occurrences);
  }
}

TEST(KeyPlanner, PlansWhatTheBatchSays) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const bool mean = seed % 3 == 0;
    const std::vector<PlannedSlot> slots = {
        {0, 0, false}, {seed % 2 == 0 ? 1u : 0u, 8, mean}, {0, 16, false}};
    KeyPlanner planner(slots, 2, 16);
    for (int round = 0; round < 5; ++round) {
      const auto batch =
          RandomBatch(seed * 100 + static_cast<std::uint64_t>(round), 100, 3, 200, seed % 5 == 0);
      const std::size_t limits[2] = {100000, 100000};
      auto item = planner.Plan(batch, 0, 0, limits);
      ASSERT_TRUE(item.ok());
      EXPECT_EQ((*item)->minibatches, 7u);  // 6 of 16 and one of 4.
      EXPECT_TRUE((*item)->last_of_batch);
      CheckItem(**item, slots);
    }
  }
}

TEST(KeyPlanner, CutsAtAMinibatchWhatDoesNotFit) {
  const std::vector<PlannedSlot> slots = {{0, 0, false}, {1, 8, false}};
  KeyPlanner planner(slots, 2, 8);
  const auto batch = RandomBatch(7, 200, 2, 5000, false);
  const std::size_t limits[2] = {40, 45};
  std::uint32_t example = 0;
  std::uint32_t minibatch = 0;
  int items = 0;
  while (example < batch->examples) {
    auto item = planner.Plan(batch, example, minibatch, limits);
    ASSERT_TRUE(item.ok()) << item.status().ToString();
    EXPECT_EQ((*item)->first_example, example);
    EXPECT_LE((*item)->tables[0].keys.size(), limits[0]);
    EXPECT_LE((*item)->tables[1].keys.size(), limits[1]);
    CheckItem(**item, slots);
    example = (*item)->end_example;
    minibatch += (*item)->minibatches;
    EXPECT_EQ((*item)->last_of_batch, example == batch->examples);
    ++items;
  }
  EXPECT_EQ(minibatch, 25u);
  EXPECT_GT(items, 5);
}

// What each set is, up to the end of the batch.
std::vector<std::unique_ptr<WorkItem>> PlanAll(KeyPlanner* planner,
                                               const std::shared_ptr<const Batch>& batch,
                                               std::span<const std::size_t> limits,
                                               std::uint32_t max_minibatches) {
  std::vector<std::unique_ptr<WorkItem>> items;
  std::uint32_t example = 0, minibatch = 0;
  while (example < batch->examples) {
    auto item = planner->Plan(batch, example, minibatch, limits, max_minibatches);
    EXPECT_TRUE(item.ok()) << item.status().ToString();
    if (!item.ok()) break;
    example = (*item)->end_example;
    minibatch += (*item)->minibatches;
    items.push_back(std::move(item).value());
  }
  return items;
}

TEST(KeyPlanner, SeveralThreadsPlanTheSameSets) {
  const std::vector<PlannedSlot> slots = {{0, 0, false}, {1, 8, true}, {0, 16, false}};
  for (const std::size_t most :
       {std::size_t{100'000}, std::size_t{6000}}) {  // The second one cuts.
    // Maps for all threads, or for one beside the first.
    for (const std::uint64_t lane_bytes : {std::uint64_t{10} << 20, std::uint64_t{400} << 10}) {
      KeyPlanner one(slots, 2, 1024);
      KeyPlanner three(slots, 2, 1024, ~std::uint64_t{0}, {.count = 3, .max_bytes = lane_bytes});
      for (std::uint64_t seed = 0; seed < 4; ++seed) {
        const auto batch = RandomBatch(seed, 10'330, 3, 20'000, seed % 2 == 0);
        const std::uint32_t max_minibatches = seed < 2 ? ~0u : 5u;
        const std::size_t limits[2] = {most, most};
        const auto expected = PlanAll(&one, batch, limits, max_minibatches);
        const auto planned = PlanAll(&three, batch, limits, max_minibatches);
        ASSERT_EQ(planned.size(), expected.size());
        if (most == 6000) {
          EXPECT_GT(planned.size(), 2u);
        }
        for (std::size_t i = 0; i < planned.size(); ++i) {
          EXPECT_EQ(planned[i]->end_example, expected[i]->end_example);
          EXPECT_EQ(planned[i]->last_of_batch, expected[i]->last_of_batch);
          EXPECT_EQ(planned[i]->local_row, expected[i]->local_row);
          for (std::size_t t = 0; t < 2; ++t) {
            EXPECT_EQ(planned[i]->tables[t].keys, expected[i]->tables[t].keys);
            EXPECT_EQ(planned[i]->tables[t].rows, expected[i]->tables[t].rows);
          }
          CheckItem(*planned[i], slots);
          if (HasFatalFailure()) return;
        }
      }
      EXPECT_GT(three.cpu_seconds(), 0.0);
      EXPECT_LE(three.MemoryBytes(), one.MemoryBytes() + lane_bytes);
    }
  }
}

TEST(KeyPlanner, CutsAtAMinibatchWhatTakesTooMuchMemory) {
  constexpr std::uint64_t kScratchBytes = 8 << 10;  // Of MemoryBytes, at most: not maps.
  const std::vector<PlannedSlot> slots = {{0, 0, false}, {1, 8, false}};
  const auto batch = RandomBatch(9, 4096, 2, 100'000, false);
  const std::size_t limits[2] = {100'000, 100'000};
  int items_before = 0;
  // Less than a mini-batch takes, and twice as much again and again until all fits.
  for (std::uint64_t max_bytes = 1 << 10; items_before != 1; max_bytes *= 2) {
    SCOPED_TRACE(max_bytes);
    KeyPlanner planner(slots, 2, 64, max_bytes);
    std::uint32_t example = 0;
    std::uint32_t minibatch = 0;
    int items = 0;
    for (; example < batch->examples; ++items) {
      auto item = planner.Plan(batch, example, minibatch, limits);
      ASSERT_TRUE(item.ok()) << item.status().ToString();
      if ((*item)->minibatches > 1) {
        ASSERT_LE((*item)->UsedBytes() + planner.MemoryBytes() - kScratchBytes, max_bytes);
      }
      CheckItem(**item, slots);
      example = (*item)->end_example;
      minibatch += (*item)->minibatches;
      planner.Recycle(std::move(*item));
    }
    EXPECT_EQ(minibatch, 64u);
    if (items_before > 0) {
      EXPECT_LE(items, items_before);
    } else {
      EXPECT_EQ(items, 64);
    }
    items_before = items;
  }
}

// Of mini-batches of one example, whose own parts are most of the lists.
TEST(KeyPlanner, UsedBytesCountsEveryList) {
  const std::vector<PlannedSlot> slots = {{0, 0, false}, {1, 8, false}};
  KeyPlanner planner(slots, 2, 1);
  const auto batch = RandomBatch(3, 500, 2, 2, false);
  const std::size_t limits[2] = {1000, 1000};
  const auto item = planner.Plan(batch, 0, 0, limits);
  ASSERT_TRUE(item.ok()) << item.status().ToString();
  ASSERT_EQ((*item)->minibatches, 500u);
  std::uint64_t bytes = (*item)->local_row.size() * sizeof(std::uint32_t);
  for (const TableWork& table : (*item)->tables) {
    const std::size_t numbers = table.key_end.size() + table.row_begin.size() - 1 +
                                table.rows.size() + table.inverse_begin.size() +
                                table.occurrence_begin.size() - 1 + table.example.size() +
                                table.input_offset.size();
    bytes += table.keys.size() * sizeof(Key) + numbers * sizeof(std::uint32_t) +
             table.rows.size() * sizeof(std::byte*);  // The places.
  }
  EXPECT_GE((*item)->UsedBytes(), bytes);
}

TEST(SetLimiter, ATokenIsGivenBackWithItsSet) {
  SetLimiter limiter(2);
  auto first = std::make_unique<WorkItem>();
  first->token = std::move(limiter.Take()).value();
  SetLimiter::Token second = std::move(limiter.Take()).value();
  std::atomic<bool> taken{false};
  Thread third("third", ThreadPriority::kNormal, [&] {
    EXPECT_TRUE(limiter.Take().ok());
    taken = true;
  });
  EXPECT_FALSE(taken);
  first.reset();
  third.Join();
  const SetLimiter::Token kept = std::move(limiter.Take()).value();
  Thread fourth("fourth", ThreadPriority::kNormal,
                [&] { EXPECT_EQ(limiter.Take().status().message(), "the test ends it"); });
  limiter.Cancel(AbortedError("the test ends it"));
  fourth.Join();
}

TEST(SetLimiter, SaysWhenFewerAreAlive) {
  SetLimiter limiter(2);
  EXPECT_EQ(limiter.alive(), 0u);
  SetLimiter::Token first = std::move(limiter.Take()).value();
  SetLimiter::Token second = std::move(limiter.Take()).value();
  EXPECT_EQ(limiter.alive(), 2u);
  EXPECT_EQ(limiter.AwaitFewer(3).value(), 2u);
  Thread waits("waits", ThreadPriority::kNormal,
               [&] { EXPECT_EQ(limiter.AwaitFewer(2).value(), 1u); });
  first.GiveBack();
  waits.Join();
  limiter.Cancel(AbortedError("the test ends it"));
  EXPECT_EQ(limiter.AwaitFewer(1).status().message(), "the test ends it");
}

TEST(KeyPlanner, OneMinibatchThatCannotFitIsAnError) {
  KeyPlanner planner({{0, 0, false}}, 1, 64);
  const std::size_t limits[1] = {10};
  auto item = planner.Plan(RandomBatch(3, 64, 1, 5000, false), 0, 0, limits);
  ASSERT_FALSE(item.ok());
  EXPECT_EQ(item.status().code(), StatusCode::kOutOfMemory);
  // The planner goes on with the next batch.
  const std::size_t enough[1] = {1000};
  auto next = planner.Plan(RandomBatch(4, 64, 1, 5000, false), 0, 0, enough);
  ASSERT_TRUE(next.ok());
  CheckItem(**next, {{0, 0, false}});
}

}  // namespace
}  // namespace terrace
