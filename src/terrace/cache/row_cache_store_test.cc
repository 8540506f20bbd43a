// The cache over real stores in a file system in memory: what was flushed and committed comes back,
// through eviction, compaction and a cache that is thrown away.
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/cache/row_cache.h"
#include "terrace/cache/testing/cache_fixture.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/store/store.h"

namespace terrace::cache_testing {
namespace {

constexpr std::uint32_t kShards = 2;
constexpr std::uint64_t kCapacity = 96 << 10;  // Bytes; some hundreds of rows.

class Tiers {
 public:
  explicit Tiers(bool background) : background_(background), quota_(std::uint64_t{1} << 30) {}

  Status Open() {
    cache_.reset();
    stores_.clear();
    std::vector<Store*> borrowed;
    for (std::uint32_t shard = 0; shard < kShards; ++shard) {
      StoreOptions options;
      options.directory = "/rows/shard-" + std::to_string(shard);
      options.table = "ads";
      options.shard = shard;
      options.row_bytes = kRowBytes;
      options.file_bytes = 16 << 10;
      options.io_buffer_bytes = 64 << 10;
      options.background_compaction = background_;
      if (committed_ == 0) {
        TERRACE_ASSIGN_OR_RETURN(auto store, Store::Create(&fs_, Clock::Real(), &quota_, options));
        stores_.push_back(std::move(store));
      } else {
        const ManifestReference& manifest = manifests_[shard];
        TERRACE_ASSIGN_OR_RETURN(auto store, Store::Open(&fs_, Clock::Real(), &quota_, options,
                                                         manifest, {&manifest, 1}));
        stores_.push_back(std::move(store));
      }
      borrowed.push_back(stores_.back().get());
    }
    RowCacheOptions options;
    options.row_bytes = kRowBytes;
    options.capacity_bytes = kCapacity;
    options.chunk_bytes = 4096;
    options.background = background_;
    options.create_row = FillRow;
    TERRACE_ASSIGN_OR_RETURN(cache_, RowCache::Create(options, Clock::Real(), borrowed));
    return OkStatus();
  }

  Status Checkpoint() {
    TERRACE_RETURN_IF_ERROR(cache_->FlushDirty());
    std::vector<ManifestReference> made;
    for (auto& store : stores_) {
      TERRACE_ASSIGN_OR_RETURN(ManifestReference manifest, store->Commit(committed_ + 1));
      made.push_back(std::move(manifest));
    }
    if (committed_ > 0) {
      for (auto& store : stores_) TERRACE_RETURN_IF_ERROR(store->Drop(committed_));
    }
    manifests_ = std::move(made);
    ++committed_;
    return OkStatus();
  }

  RowCache& cache() { return *cache_; }
  std::uint64_t compactions() const {
    std::uint64_t count = 0;
    for (const auto& store : stores_) count += store->stats().compactions;
    return count;
  }
  std::uint64_t written_bytes() const {
    std::uint64_t bytes = 0;
    for (const auto& store : stores_) bytes += store->stats().write_bytes;
    return bytes;
  }

 private:
  const bool background_;
  MemoryFileSystem fs_;
  DiskQuota quota_;
  std::vector<std::unique_ptr<Store>> stores_;
  std::unique_ptr<RowCache> cache_;
  std::uint64_t committed_ = 0;
  std::vector<ManifestReference> manifests_;  // (shards) of the last checkpoint
};

void RunRounds(bool background) {
  Tiers tiers(background);
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
      compactions += tiers.compactions();
      const Status status = tiers.Open();
      ASSERT_TRUE(status.ok()) << status.ToString();
      trained = committed;
    }
  }
  EXPECT_GT(compactions + tiers.compactions(), 0u) << "the test is to run over compaction too";
  EXPECT_GT(tiers.cache().stats().evictions, 0u);
}

TEST(RowCacheOverStores, WhatWasCommittedComesBack) {
  RunRounds(/*background=*/false);
  if (HasFatalFailure()) return;
  RunRounds(/*background=*/true);
}

TEST(RowCacheOverStores, DirtyBytesBoundWhatAFlushWrites) {
  Tiers tiers(/*background=*/false);
  ASSERT_TRUE(tiers.Open().ok());
  RowCache& cache = tiers.cache();
  Key first = 0;  // Each row is written once: nothing gets stale, so nothing is compacted.
  for (const std::size_t rows : {std::size_t{1}, std::size_t{40}, cache.MaxPinnedRows()}) {
    auto pinned = cache.Pin(KeyRange(std::exchange(first, first + rows), rows));
    ASSERT_TRUE(pinned.ok());
    TrainAll(&*pinned);
    pinned->Release();
    const std::uint64_t bound = cache.dirty_bytes();
    const std::uint64_t before = tiers.written_bytes();
    ASSERT_TRUE(cache.FlushDirty().ok());
    EXPECT_LE(tiers.written_bytes() - before, bound) << rows << " rows";
    EXPECT_EQ(cache.dirty_bytes(), 0u);
  }
}

}  // namespace
}  // namespace terrace::cache_testing
