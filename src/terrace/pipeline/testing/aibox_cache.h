// AiboxCache: the structure that AIBox describes, over numbers in place of rows, for
// eviction_bench. Threads: one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/pipeline/testing/eviction_trace.h"

namespace terrace {

// AIBox 4.2 as it is told: cache slots, in each of them buckets, in each bucket an LRU list of what
// the current pass uses and an LFU list in the order of frequency; a look-up goes through both. A
// bucket whose LFU list is longer than MAX_LFU drops its last FLUSH_STEP nodes. Slots and buckets
// are one number here, because a slot's file plays no part in what is evicted. What the paper
// leaves open: the moves from the LRU to the LFU list are made when the batch is released, and a
// list is sorted by insertion from its end.
class AiboxCache {
 public:
  AiboxCache(std::uint64_t rows, std::uint64_t held_rows)
      : buckets_(std::max<std::uint64_t>(1, rows / kRowsPerBucket)),
        max_lfu_(std::max<std::uint64_t>(1, (rows - held_rows) / buckets_.size())) {}

  Score Run(const Trace& trace, std::uint64_t sets);
  std::uint64_t most_rows() const { return most_rows_; }

 private:
  static constexpr std::uint64_t kRowsPerBucket = 8;
  static constexpr std::uint64_t kFlushStep = 2;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  struct Node {
    std::uint32_t key, frequency, pins, next;
  };
  struct Bucket {
    std::uint32_t lru = kNone, lfu = kNone;
    std::uint64_t lfu_nodes = 0;
  };

  Bucket& BucketOf(std::uint32_t key) { return buckets_[MixKey(key) % buckets_.size()]; }
  // Takes the key's node out of a list; kNone: it is not there.
  std::uint32_t Unlink(std::uint32_t* link, std::uint32_t key);
  bool Pull(std::uint32_t key);
  void Release(std::uint32_t key);
  void Flush(Bucket* bucket);

  std::vector<Bucket> buckets_;
  const std::uint64_t max_lfu_;
  std::vector<Node> nodes_;  // A pool, in place of slabs.
  std::vector<std::uint32_t> free_;
  std::uint64_t rows_ = 0, most_rows_ = 0;
};

}  // namespace terrace
