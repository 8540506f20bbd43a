// The cache over real stores in a file system in memory: what was flushed and committed comes back,
// through eviction, compaction and a cache that is thrown away.
#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/cache/testing/store_tiers.h"

namespace terrace::cache_testing {
namespace {

// hot_apart: files are small enough for the write buffers to have hot rows apart.
void RunRounds(bool background, bool hot_apart, IndexKind index) {
  StoreTiers tiers(background);
  if (hot_apart) tiers.store_options()->file_bytes = 4 << 10;
  tiers.store_options()->index = index;
  tiers.store_options()->expected_rows = 1500;
  ASSERT_TRUE(tiers.Open().ok());
  Rng rng(background ? 21 : 22);
  TrainedTimes trained, committed;
  std::uint64_t compactions = 0;
  for (int round = 0; round < 150; ++round) {
    RowCache& cache = tiers.cache();
    std::set<Key> distinct;
    while (distinct.size() < 200) distinct.insert(rng.Below(rng.Below(2) == 0 ? 300 : 3000));
    const std::vector<Key> keys(distinct.begin(), distinct.end());
    auto pinned = cache.Pin(keys);
    ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
    ASSERT_NO_FATAL_FAILURE(trained.Train(keys, /*cut=*/rng.Below(5) == 0, &*pinned));
    pinned->Release();
    if (round % 9 == 5) {
      const Status status = tiers.Checkpoint();
      ASSERT_TRUE(status.ok()) << status.ToString();
      committed = trained;
    } else if (round % 31 == 30) {
      // The cache goes with its dirty rows; the run is that of the last checkpoint again.
      compactions += tiers.store_stats().compactions;
      const Status status = tiers.Open();
      ASSERT_TRUE(status.ok()) << status.ToString();
      trained = committed;
    }
  }
  EXPECT_GT(compactions + tiers.store_stats().compactions, 0u)
      << "the test is to run over compaction too";
  EXPECT_GT(tiers.cache().stats().evictions, 0u);
}

TEST(RowCacheOverStores, WhatWasCommittedComesBack) {
  for (const bool background : {false, true}) {
    for (const bool hot_apart : {false, true}) {
      ASSERT_NO_FATAL_FAILURE(RunRounds(background, hot_apart, IndexKind::kKey));
    }
    ASSERT_NO_FATAL_FAILURE(RunRounds(background, /*hot_apart=*/false, IndexKind::kGroup));
  }
}

// Rows that are trained in each round lie beside such as are trained in one only, in memory too,
// where the latter make room for others. Each round ends with a checkpoint. Returns the rows that
// compaction copied.
std::uint64_t CopiedRows(EvictionType policy, bool hot_apart) {
  constexpr Key kHotKeys = 1000;
  StoreTiers tiers(/*background=*/false);
  tiers.cache_options()->eviction.type = policy;
  tiers.cache_options()->capacity_bytes = 240 << 10;
  tiers.cache_options()->flush_bytes = 16 << 10;
  tiers.cache_options()->hot_apart = hot_apart;
  EXPECT_TRUE(tiers.Open().ok());
  for (Key round = 0; round < 12; ++round) {
    std::vector<Key> keys;
    for (Key key = 0; key < kHotKeys; ++key) {
      keys.push_back(key);
      keys.push_back(kHotKeys * (round + 1) + key);
    }
    auto pinned = tiers.cache().Pin(keys);
    EXPECT_TRUE(pinned.ok()) << pinned.status().ToString();
    TrainAll(&*pinned);
    pinned->Release();
    EXPECT_TRUE(tiers.Checkpoint().ok());
  }
  EXPECT_GT(tiers.cache().stats().evictions, 5 * kHotKeys);
  for (Key key = 0; key < 13 * kHotKeys; ++key) {
    Row row(kRowBytes);
    std::byte* const place = row.data();
    std::uint8_t found = 0;
    EXPECT_TRUE(tiers.StoreOf(key).Read({&key, 1}, {&place, 1}, {&found, 1}, nullptr).ok());
    EXPECT_EQ(row, TrainedRow(key, key < kHotKeys ? 12 : 1)) << "key " << key;
  }
  return tiers.store_stats().rows_compacted;
}

TEST(RowCacheOverStores, FilesOfHotRowsDieWhole) {
  for (const EvictionType policy :
       {EvictionType::kS3Fifo, EvictionType::kLruLfu, EvictionType::kPassLfu}) {
    const std::uint64_t together = CopiedRows(policy, /*hot_apart=*/false);
    const std::uint64_t apart = CopiedRows(policy, /*hot_apart=*/true);
    EXPECT_LT(4 * apart, together) << static_cast<int>(policy) << ": " << apart << ", " << together;
  }
}

// hot: one of so many rows is.
void BoundFlushes(std::uint64_t file_bytes, Key hot, IndexKind index) {
  StoreTiers tiers(/*background=*/false);
  tiers.store_options()->file_bytes = file_bytes;
  tiers.store_options()->index = index;
  tiers.store_options()->expected_rows = 2000;
  ASSERT_TRUE(tiers.Open().ok());
  RowCache& cache = tiers.cache();
  Key first = 0;  // Each row is written once: nothing gets stale, so nothing is compacted.
  for (const std::size_t rows : {std::size_t{1}, std::size_t{40}, cache.MaxPinnedRows()}) {
    const std::vector<Key> keys = KeyRange(std::exchange(first, first + rows), rows);
    auto pinned = cache.Pin(keys);
    ASSERT_TRUE(pinned.ok());
    TrainAll(&*pinned);
    std::vector<Key> again;
    std::copy_if(keys.begin(), keys.end(), std::back_inserter(again),
                 [&](Key key) { return key % hot == 0; });
    ASSERT_TRUE(cache.Pin(again).ok());
    pinned->Release();
    const std::uint64_t bound = cache.dirty_bytes();
    const std::uint64_t before = tiers.store_stats().write_bytes;
    ASSERT_TRUE(cache.FlushDirty().ok());
    EXPECT_LE(tiers.store_stats().write_bytes - before, bound) << rows << " rows";
    EXPECT_EQ(cache.dirty_bytes(), 0u);
  }
}

TEST(RowCacheOverStores, DirtyBytesBoundWhatAFlushWrites) {
  for (const std::uint64_t file_bytes : {16 << 10, 4 << 10}) {  // Hot rows together, apart.
    for (const Key hot : {1, 2, 10, 1'000'000}) {
      SCOPED_TRACE(testing::Message() << "files of " << file_bytes << ", one hot of " << hot);
      ASSERT_NO_FATAL_FAILURE(BoundFlushes(file_bytes, hot, IndexKind::kKey));
      ASSERT_NO_FATAL_FAILURE(BoundFlushes(file_bytes, hot, IndexKind::kGroup));
    }
  }
}

// Its rows are many to a block, and many writes of few rows bring them: a block is written by one
// of these, or by two that share it.
TEST(RowCacheOverStores, AFlushWritesEachBlockOnce) {
  for (const bool background : {false, true}) {
    StoreTiers tiers(background);
    tiers.store_options()->index = IndexKind::kGroup;
    tiers.store_options()->expected_rows = 4000;
    tiers.cache_options()->flush_bytes = 2 << 10;  // Some fifty rows.
    tiers.cache_options()->capacity_bytes = 256 << 10;
    ASSERT_TRUE(tiers.Open().ok());
    RowCache& cache = tiers.cache();
    const std::size_t rows = cache.MaxPinnedRows();
    ASSERT_GT(rows, 1000u);
    {
      auto pinned = cache.Pin(KeyRange(0, rows));
      ASSERT_TRUE(pinned.ok());
      TrainAll(&*pinned);
    }
    const std::uint64_t likely = cache.likely_dirty_bytes();
    EXPECT_LE(likely, cache.dirty_bytes());
    ASSERT_TRUE(cache.WriteAhead(rows / 3).ok());
    ASSERT_TRUE(cache.FlushDirty().ok());
    EXPECT_EQ(tiers.store_stats().rows_written, rows);
    // Fifteen of a row's kind would be carried if rows came in any other order.
    EXPECT_LT(tiers.store_stats().rows_carried, rows);
  }
}

class BesideTraining
    : public testing::TestWithParam<std::tuple<EvictionType, IndexKind, std::uint32_t>> {
 protected:
  BesideTraining() {
    tiers_.cache_options()->eviction.type = std::get<0>(GetParam());
    tiers_.store_options()->index = std::get<1>(GetParam());
    tiers_.store_options()->expected_rows = 1500;
    tiers_.cache_options()->parts = std::get<2>(GetParam());
    tiers_.cache_options()->capacity_bytes *= std::get<2>(GetParam());
  }
  StoreTiers tiers_{/*background=*/true};
};

// Sets are pinned ahead while others are trained, rows leave, files are compacted and checkpoints
// are taken; what is pinned is always what was trained last, and the last checkpoint has all of it.
TEST_P(BesideTraining, PinsAheadAndCheckpoints) {
  ASSERT_TRUE(tiers_.Open().ok());
  RowCache& cache = tiers_.cache();
  const std::size_t rows = cache.MaxPinnedRows() / 8;
  TrainedTimes trained;
  Rng rng(32);
  const auto next = [&](int /*batch*/) {
    std::set<Key> keys;
    while (keys.size() < rows) keys.insert(rng.Below(rng.Below(2) == 0 ? 300 : 3000));
    return std::vector<Key>(keys.begin(), keys.end());
  };
  const auto after = [&](int batch) {
    if (batch % 7 != 6) return;
    const Status status = tiers_.Checkpoint();
    ASSERT_TRUE(status.ok()) << status.ToString();
  };
  ASSERT_NO_FATAL_FAILURE(TrainPinnedAhead(&cache, 150, /*seed=*/31, next, after, &trained));
  EXPECT_GT(cache.stats().evictions, 0u);
  EXPECT_GT(tiers_.store_stats().compactions, 0u);
  ASSERT_TRUE(tiers_.Checkpoint().ok());
  ASSERT_TRUE(tiers_.Open().ok());
  std::vector<Key> keys;
  for (const auto& [key, times] : trained.times) keys.push_back(key);
  ASSERT_NO_FATAL_FAILURE(trained.ExpectPeeked(keys, &tiers_.cache()));
}

INSTANTIATE_TEST_SUITE_P(Tiers, BesideTraining,
                         testing::Combine(testing::Values(EvictionType::kS3Fifo,
                                                          EvictionType::kLruLfu,
                                                          EvictionType::kPassLfu),
                                          testing::Values(IndexKind::kKey, IndexKind::kGroup),
                                          testing::Values(1, 2)));

}  // namespace
}  // namespace terrace::cache_testing
