// ShardOrder: the keys of a batch by the shards that have them, each shard's in the order of the
// batch. Threads: a value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/status.h"

namespace terrace {

class WorkerGroup;

// Shards one after another of those of a table.
struct ShardRange {
  std::uint32_t first = 0, count = 1;
  std::uint32_t of = 1;  // Of the table.

  static ShardRange All(std::size_t shards) {
    const auto count = static_cast<std::uint32_t>(shards);
    return {0, count, count};
  }
  // Counted from `first`. REQUIRES: the hash of a key of these shards.
  std::uint32_t Number(std::uint64_t hash) const { return ShardOfHash(hash, of) - first; }
};

struct ShardOrder {
  std::vector<std::size_t> begins;    // (shards + 1) Those of shard s: begins[s] to begins[s + 1].
  std::vector<std::uint32_t> origin;  // (keys) Their numbers in the batch.

  std::size_t shards() const { return begins.size() - 1; }
  std::size_t count(std::size_t shard) const { return begins[shard + 1] - begins[shard]; }
  // The part of a list in this order that is the shard's.
  template <typename List>
  auto PartOf(List& list, std::size_t shard) const {
    return std::span(list).subspan(begins[shard], count(shard));
  }
};

void SortByShard(std::span<const Key> keys, const ShardRange& shards, ShardOrder* order);

// The same order for threads that share the work: each numbers the shards of some keys, and, when
// all have done that, each sorts some shards. REQUIRES: shards.count <= 256.
void NumberShards(std::span<const Key> keys, const ShardRange& shards, std::uint8_t* numbers);
// Makes the shard's part of `order`, whose lists have their sizes, and returns it. What the order
// says of other shards is theirs to write.
std::span<const std::uint32_t> SortShard(std::span<const std::uint8_t> numbers, std::size_t shard,
                                         ShardOrder* order);

// Calls read(shard, keys, rows, found) with the part of each shard that has any, on the threads of
// `workers`; null: one after another. The failure of a shard keeps others from beginning; the first
// one's is returned. On success `found` is by the order of `keys`.
using ReadShard =
    std::function<Status(std::size_t shard, std::span<const Key> keys,
                         std::span<std::byte* const> rows, std::span<std::uint8_t> found)>;
Status ReadByShard(const ShardOrder& order, std::span<const Key> keys,
                   std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                   WorkerGroup* workers, const ReadShard& read);

}  // namespace terrace
