// ShardOrder: the keys of a batch by the shards that have them, each shard's in the order of the
// batch. Threads: a value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "terrace/base/ids.h"

namespace terrace {

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

inline void SortByShard(std::span<const Key> keys, std::size_t shards, ShardOrder* order) {
  const auto count = static_cast<std::uint32_t>(shards);
  std::vector<std::size_t> next(shards + 1, 0);
  for (const Key key : keys) ++next[ShardOfHash(MixKey(key), count) + 1];
  for (std::size_t shard = 0; shard < shards; ++shard) next[shard + 1] += next[shard];
  order->begins = next;
  order->origin.resize(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    order->origin[next[ShardOfHash(MixKey(keys[i]), count)]++] = static_cast<std::uint32_t>(i);
  }
}

}  // namespace terrace
