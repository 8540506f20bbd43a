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
            const float value = (slots[s].mean ? 1.0f / static_cast<float>(count) : 1.0f) *
                                (batch.values.empty() ? 1.0f : batch.values[k]);
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
