// StoreTiers: a cache over real stores in a file system in memory, small enough that rows are
// evicted and files compacted all the time. Threads: one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/cache/testing/cache_fixture.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/store/store.h"

namespace terrace::cache_testing {

class StoreTiers {
 public:
  // Borrows `expiry`, if there is one.
  explicit StoreTiers(bool background,
                      const std::function<void(Key, std::byte*)>& create_row = FillRow,
                      const RowExpiry* expiry = nullptr) {
    cache_options_.row_bytes = kRowBytes;
    cache_options_.capacity_bytes = 96 << 10;  // Some hundreds of rows.
    cache_options_.chunk_bytes = 4096;
    cache_options_.background = background;
    cache_options_.create_row = create_row;
    cache_options_.expiry = expiry;
    store_options_.table = "ads";
    store_options_.row_bytes = kRowBytes;
    store_options_.file_bytes = 16 << 10;
    store_options_.io_buffer_bytes = 64 << 10;
    store_options_.background_compaction = background;
    store_options_.expiry = expiry;
  }

  // Of what Open makes next.
  RowCacheOptions* cache_options() { return &cache_options_; }
  StoreOptions* store_options() { return &store_options_; }

  // As the last checkpoint left them; what came after it is lost.
  Status Open() {
    cache_.reset();
    stores_.clear();
    std::vector<Store*> borrowed;
    for (std::uint32_t shard = 0; shard < kShards; ++shard) {
      StoreOptions options = store_options_;
      options.directory = "/rows/shard-" + std::to_string(shard);
      options.shard = shard;
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
    TERRACE_ASSIGN_OR_RETURN(cache_, RowCache::Create(cache_options_, borrowed));
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

  Status Compact() {
    for (auto& store : stores_) TERRACE_RETURN_IF_ERROR(store->CompactNow());
    return OkStatus();
  }
  void WantSweep() {
    for (auto& store : stores_) store->WantSweep();
  }

  void CloseCache() { cache_.reset(); }
  RowCache& cache() { return *cache_; }
  Store& StoreOf(Key key) { return *stores_[ShardOfHash(MixKey(key), kShards)]; }
  // Of all stores since Open().
  StoreStats store_stats() const {
    StoreStats stats;
    for (const auto& store : stores_) stats += store->stats();
    return stats;
  }

 private:
  static constexpr std::uint32_t kShards = 2;

  RowCacheOptions cache_options_;
  StoreOptions store_options_;
  MemoryFileSystem fs_;  // Before the stores, whose threads use them to their end.
  DiskQuota quota_{std::uint64_t{1} << 30};
  std::vector<std::unique_ptr<Store>> stores_;
  std::unique_ptr<RowCache> cache_;
  std::uint64_t committed_ = 0;
  std::vector<ManifestReference> manifests_;  // (shards) Of the last checkpoint.
};

}  // namespace terrace::cache_testing
