// The cache over real stores in a file system in memory: what was flushed and committed comes back,
// through eviction, compaction and a cache that is thrown away.
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/cache/testing/store_tiers.h"

namespace terrace::cache_testing {
namespace {

void RunRounds(bool background) {
  StoreTiers tiers(background);
  ASSERT_TRUE(tiers.Open().ok());
  Rng rng(background ? 21 : 22);
  std::map<Key, int> trained, committed;
  std::uint64_t compactions = 0;
  for (int round = 0; round < 150; ++round) {
    RowCache& cache = tiers.cache();
    std::set<Key> distinct;
    while (distinct.size() < 200) distinct.insert(rng.Below(rng.Below(2) == 0 ? 300 : 3000));
    const std::vector<Key> keys(distinct.begin(), distinct.end());
    auto pinned = cache.Pin(keys);
    ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
    for (std::size_t w = 0; w < keys.size(); ++w) {
      ASSERT_EQ(RowAt(*pinned, w), TrainedRow(keys[w], trained[keys[w]])) << "key " << keys[w];
    }
    if (rng.Below(5) > 0) {
      TrainAll(&*pinned);
      for (const Key key : keys) ++trained[key];
    }
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
  RunRounds(/*background=*/false);
  if (HasFatalFailure()) return;
  RunRounds(/*background=*/true);
}

TEST(RowCacheOverStores, DirtyBytesBoundWhatAFlushWrites) {
  StoreTiers tiers(/*background=*/false);
  ASSERT_TRUE(tiers.Open().ok());
  RowCache& cache = tiers.cache();
  Key first = 0;  // Each row is written once: nothing gets stale, so nothing is compacted.
  for (const std::size_t rows : {std::size_t{1}, std::size_t{40}, cache.MaxPinnedRows()}) {
    auto pinned = cache.Pin(KeyRange(std::exchange(first, first + rows), rows));
    ASSERT_TRUE(pinned.ok());
    TrainAll(&*pinned);
    pinned->Release();
    const std::uint64_t bound = cache.dirty_bytes();
    const std::uint64_t before = tiers.store_stats().write_bytes;
    ASSERT_TRUE(cache.FlushDirty().ok());
    EXPECT_LE(tiers.store_stats().write_bytes - before, bound) << rows << " rows";
    EXPECT_EQ(cache.dirty_bytes(), 0u);
  }
}

}  // namespace
}  // namespace terrace::cache_testing
