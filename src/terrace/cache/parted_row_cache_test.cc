// A cache in parts: what RowCache promises, of all parts together.
#include "terrace/cache/parted_row_cache.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/clock.h"
#include "terrace/base/testing/sweep.h"
#include "terrace/base/thread.h"
#include "terrace/cache/row_cache.h"
#include "terrace/cache/testing/cache_fixture.h"

namespace terrace::cache_testing {
namespace {

constexpr std::uint64_t kCapacity = 512 << 10;

struct PartedFixture : Fixture {
  explicit PartedFixture(std::uint32_t parts, int shards = 4,
                         EvictionType eviction = EvictionType::kS3Fifo)
      : Fixture(eviction, kCapacity, /*background=*/true, shards) {
    options.parts = parts;
  }
};

// Distinct ones out of [0, range).
std::vector<Key> RandomKeys(Rng* rng, std::size_t count, Key range) {
  std::set<Key> keys;
  while (keys.size() < count) keys.insert(rng->Below(range));
  std::vector<Key> list(keys.begin(), keys.end());
  for (std::size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[rng->Below(i)]);
  return list;
}

TEST(PartsOfACache, AreAsManyAsTheShardsDivideBy) {
  RowCacheOptions options;
  const auto parts = [&](std::uint32_t asked, std::size_t shards) {
    options.parts = asked;
    return PartedRowCache::PartsFor(options, shards);
  };
  EXPECT_EQ(parts(1, 8), 1u);
  EXPECT_EQ(parts(4, 8), 4u);
  EXPECT_EQ(parts(5, 8), 4u);
  EXPECT_EQ(parts(4, 6), 3u);
  EXPECT_EQ(parts(4, 5), 1u);
  EXPECT_EQ(parts(8, 5), 5u);
  EXPECT_EQ(parts(8, 1), 1u);
  options.background = false;  // Nothing runs side by side.
  EXPECT_EQ(parts(4, 8), 1u);
}

// Threads that share the sorting get the order that one would; and a part of some shards has what
// these have.
TEST(PartsOfACache, AreSortedByAllThreadsAsByOne) {
  Rng rng(3);
  for (const std::size_t count : {0, 1, 254, 255, 256, 1000, 5000}) {
    std::vector<Key> keys(count);
    for (Key& key : keys) key = rng.Next();
    for (const std::uint32_t parts : {1u, 2u, 3u, 8u, 256u}) {
      SCOPED_TRACE(std::to_string(count) + " keys, " + std::to_string(parts) + " parts");
      ShardOrder one, shared;
      SortByShard(keys, ShardRange::All(parts), &one);
      std::vector<std::uint8_t> numbers(count);
      NumberShards(keys, ShardRange::All(parts), numbers.data());
      shared.begins.resize(parts + 1);
      shared.origin.resize(count);
      for (std::uint32_t part = parts; part-- > 0;) {
        const auto origin = SortShard(numbers, part, &shared);
        EXPECT_EQ(origin.size(), one.count(part));
      }
      EXPECT_EQ(shared.begins, one.begins);
      EXPECT_EQ(shared.origin, one.origin);
      for (const std::uint32_t shards_of_part : {1u, 2u, 5u}) {
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(ShardOfHash(MixKey(keys[i]), parts * shards_of_part) / shards_of_part,
                    numbers[i]);
        }
      }
    }
  }
}

class PartedCache : public OverPolicies {};
INSTANTIATE_TEST_SUITE_P(Policies, PartedCache, kPolicies);

// Sets that overlap, trained in their order as the pipeline does, or cut; flushes, looks and other
// capacities between them.
TEST_P(PartedCache, HasEachRowAsItWasTrained) {
  for (const auto& [parts, shards] : {std::pair{2u, 2}, {2u, 6}, {4u, 4}}) {
    SCOPED_TRACE(std::to_string(parts) + " of " + std::to_string(shards));
    PartedFixture fixture(parts, shards, GetParam());
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    Rng rng(7 * parts + static_cast<unsigned>(shards));
    TrainedTimes trained;
    constexpr Key kRange = 20'000;
    std::deque<std::pair<std::vector<Key>, PinnedRows>> sets;
    const auto finish_sets = [&](std::size_t left) {
      for (; sets.size() > left; sets.pop_front()) {
        auto& [keys, pinned] = sets.front();
        ASSERT_TRUE(pinned.Wait().ok());
        trained.Train(keys, /*cut=*/rng.Below(8) == 0, &pinned);
        if (HasFatalFailure()) return;
      }
    };
    for (int step = 0; step < StepsOfWalk(300); ++step) {
      const std::size_t most = cache.MaxPinnedRows() / 3;
      std::vector<Key> keys = RandomKeys(&rng, 1 + rng.Below(most), kRange);
      auto pinned = cache.StartPin(keys);
      ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
      ASSERT_EQ(pinned->size(), keys.size());
      sets.emplace_back(std::move(keys), std::move(pinned).value());
      finish_sets(1);
      if (HasFatalFailure()) return;
      if (step % 40 == 10) {
        ASSERT_TRUE(cache.WriteAhead(500).ok());
      }
      if (step % 40 == 20) {
        trained.ExpectPeeked(RandomKeys(&rng, 400, kRange), &cache);
        if (HasFatalFailure()) return;
      }
      if (step % 50 == 30) {
        const std::uint64_t half = std::max(cache.LeastCapacity(most), kCapacity / 2);
        const Status set = cache.SetCapacity(step % 100 == 30 ? half : kCapacity);
        ASSERT_TRUE(set.ok() || set.code() == StatusCode::kOutOfMemory) << set.ToString();
        if (!set.ok()) finish_sets(0);  // The next set waits until no other is pinned.
        if (HasFatalFailure()) return;
      }
    }
    sets.clear();
    ASSERT_TRUE(cache.FlushDirty().ok());
    EXPECT_EQ(cache.stats().dirty_rows, 0u);
    EXPECT_EQ(cache.stats().pinned_rows, 0u);
    EXPECT_LE(cache.stats().used_bytes, kCapacity);
    for (const auto& [key, times] : trained.times) {
      if (times == 0) continue;
      ASSERT_EQ(fixture.Stored(key), TrainedRow(key, times)) << key;
    }
  }
}

// Whatever the keys: their hashes share them out evenly enough.
TEST(PartedCacheLimits, TheLargestWorkingSetFitsWhenNothingElseIsPinned) {
  for (const std::uint32_t parts : {2u, 4u}) {
    PartedFixture fixture(parts);
    ASSERT_TRUE(fixture.Open().ok());
    const std::size_t most = fixture.cache->MaxPinnedRows();
    ASSERT_GT(most, 1000u);
    Rng rng(parts);
    for (int i = 0; i < 100; ++i) {
      const std::vector<Key> keys = RandomKeys(&rng, most, Key{1} << 40);
      auto pinned = fixture.cache->Pin(keys);
      ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
      for (std::size_t w = 0; w < most; ++w) ASSERT_EQ(RowAt(*pinned, w), InitialRow(keys[w])) << w;
    }
    const auto larger = fixture.cache->Pin(RandomKeys(&rng, 2 * most, Key{1} << 40));
    EXPECT_EQ(larger.status().code(), StatusCode::kOutOfMemory);
    EXPECT_EQ(fixture.cache->stats().pinned_rows, 0u);
    // So few that their spread is most of them.
    ASSERT_TRUE(fixture.cache->SetCapacity(fixture.cache->LeastCapacity(3)).ok());
    ASSERT_GE(fixture.cache->MaxPinnedRows(), 3u);
    for (int i = 0; i < 100; ++i) {
      auto pinned = fixture.cache->Pin(RandomKeys(&rng, 3, Key{1} << 40));
      ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
    }
  }
}

TEST(PartedCacheLimits, ATooSmallCapacityChangesNothing) {
  PartedFixture fixture(4);
  ASSERT_TRUE(fixture.Open().ok());
  const std::size_t most = fixture.cache->MaxPinnedRows();
  EXPECT_EQ(fixture.cache->SetCapacity(4096).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(fixture.cache->MaxPinnedRows(), most);
  fixture.options.capacity_bytes = 8192;
  EXPECT_EQ(fixture.Open().code(), StatusCode::kInvalidArgument);
}

TEST(PartedCacheWriteAhead, OfAllRowsThatNobodyPins) {
  PartedFixture fixture(4);
  ASSERT_TRUE(fixture.Open().ok());
  TrainRange(fixture.cache.get(), 0, 400);
  ASSERT_TRUE(fixture.cache->WriteAhead(~std::uint64_t{0}).ok());
  const double last = Clock::Real()->MonotonicSeconds() + 60;  // Of a test that fails.
  // Buffers that are not full wait for more.
  while (fixture.cache->stats().dirty_rows >= 200 && Clock::Real()->MonotonicSeconds() < last) {
    std::this_thread::yield();
  }
  ASSERT_LT(fixture.cache->stats().dirty_rows, 200u);
  ASSERT_TRUE(fixture.cache->FlushDirty().ok());
  for (Key key = 0; key < 400; ++key) ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 1)) << key;
}

TEST(PartedCacheMarks, ARangeIsThatOfTheWorkingSet) {
  PartedFixture fixture(4);
  ASSERT_TRUE(fixture.Open().ok());
  std::vector<Key> keys = KeyRange(0, 200);
  {
    PinnedRows pinned = PinOrDie(fixture.cache.get(), keys);
    for (std::size_t w = 50; w < 120; ++w) Train(pinned.row(w));
    pinned.MarkDirty(50, 90);
    EXPECT_EQ(fixture.cache->stats().dirty_rows, 40u);
    pinned.MarkDirty(90, 90);
    EXPECT_EQ(fixture.cache->stats().dirty_rows, 40u);
    pinned.MarkDirty(90, 120);
    EXPECT_EQ(fixture.cache->stats().dirty_rows, 70u);
  }
  ASSERT_TRUE(fixture.cache->FlushDirty().ok());
  for (Key key = 0; key < 200; ++key) {
    const bool stored = key >= 50 && key < 120;
    ASSERT_EQ(fixture.StoreOf(key).Contains(key), stored) << key;
    if (stored) {
      ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 1));
    }
  }
}

TEST(PartedCacheFailures, APartsReadFailsThePinAndNoOther) {
  for (std::size_t failing = 0; failing < 4; ++failing) {
    PartedFixture fixture(4);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    for (const Key first : {Key{0}, Key{1'000'000}}) {
      TrainRange(&cache, first, first == 0 ? 60 : cache.MaxPinnedRows());
    }
    for (int i = 0; i < 4; ++i)
      TrainRange(&cache, Key{2'000'000} + i * 10'000, cache.MaxPinnedRows());
    ASSERT_TRUE(cache.FlushDirty().ok());
    fixture.stores[failing]->FailAt(0);
    {
      auto pinned = cache.StartPin(KeyRange(0, 60));
      ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
      const Status status = pinned->Wait();
      EXPECT_EQ(status.code(), StatusCode::kIo);
      EXPECT_NE(status.message().find("shard " + std::to_string(failing)), std::string::npos)
          << status.ToString();
    }
    const PinnedRows pinned = PinOrDie(&cache, KeyRange(0, 60));
    for (std::size_t w = 0; w < 60; ++w) ASSERT_EQ(RowAt(pinned, w), TrainedRow(w, 1)) << w;
  }
}

TEST(PartedCacheFailures, AbortEndsAWaitForRoomAndNothingStaysPinned) {
  PartedFixture fixture(2);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  const std::size_t most = cache.MaxPinnedRows();
  PinnedRows first = PinOrDie(&cache, KeyRange(0, most));
  TrainAll(&first);
  std::atomic<bool> ended{false};
  Status status;
  Thread waiter("waiter", ThreadPriority::kNormal, [&] {
    status = cache.StartPin(KeyRange(1'000'000, most)).status();
    ended = true;
  });
  while (cache.stats().reserve_waits == 0) std::this_thread::yield();
  EXPECT_FALSE(ended);
  cache.Abort(AbortedError("the test ends it"));
  waiter.Join();
  EXPECT_EQ(status.message(), "the test ends it");
  EXPECT_EQ(cache.stats().pinned_rows, most);
  first.Release();
  EXPECT_EQ(cache.stats().pinned_rows, 0u);
  ASSERT_TRUE(cache.FlushDirty().ok());  // A checkpoint is still to be had.
  for (Key key = 0; key < most; ++key) ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 1)) << key;
}

}  // namespace
}  // namespace terrace::cache_testing
