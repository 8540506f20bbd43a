#include "terrace/cache/shard_order.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "terrace/base/check.h"
#include "terrace/base/thread.h"

namespace terrace {

void SortByShard(std::span<const Key> keys, const ShardRange& shards, ShardOrder* order) {
  std::vector<std::size_t> next(shards.count + 1, 0);
  for (const Key key : keys) ++next[shards.Number(MixKey(key)) + 1];
  for (std::size_t part = 1; part < next.size(); ++part) next[part] += next[part - 1];
  order->begins = next;
  order->origin.resize(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    order->origin[next[shards.Number(MixKey(keys[i]))]++] = static_cast<std::uint32_t>(i);
  }
}

void NumberShards(std::span<const Key> keys, const ShardRange& shards, std::uint8_t* numbers) {
  TERRACE_CHECK(shards.count <= 256);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    numbers[i] = static_cast<std::uint8_t>(shards.Number(MixKey(keys[i])));
  }
}

std::span<const std::uint32_t> SortShard(std::span<const std::uint8_t> numbers, std::size_t shard,
                                         ShardOrder* order) {
  const auto sought = static_cast<std::uint8_t>(shard);
  // To be told would be to wait for all others; the counts are a tenth of the work.
  std::size_t begin = 0, count = 0;
  for (std::size_t i = 0; i < numbers.size();) {
    // Of so few that bytes hold the counts: compilers make vectors of that.
    const std::size_t end = std::min<std::size_t>(i + 255, numbers.size());
    std::uint8_t below = 0, equal = 0;
    for (; i < end; ++i) {
      below = static_cast<std::uint8_t>(below + (numbers[i] < sought ? 1 : 0));
      equal = static_cast<std::uint8_t>(equal + (numbers[i] == sought ? 1 : 0));
    }
    begin += below;
    count += equal;
  }
  order->begins[shard] = begin;
  if (shard + 1 == order->shards()) order->begins[shard + 1] = numbers.size();
  // Without a branch, which would go either way at random: what is no key of the shard's is written
  // over by the next.
  std::uint32_t* const origin = order->origin.data() + begin;
  std::size_t next = 0;
  for (std::size_t i = 0; next < count; ++i) {
    origin[next] = static_cast<std::uint32_t>(i);
    next += numbers[i] == sought ? 1 : 0;
  }
  return {origin, count};
}

Status ReadByShard(const ShardOrder& order, std::span<const Key> keys,
                   std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                   WorkerGroup* workers, const ReadShard& read) {
  std::vector<Key> sorted_keys(keys.size());
  std::vector<std::byte*> sorted_rows(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    sorted_keys[i] = keys[order.origin[i]];
    sorted_rows[i] = rows[order.origin[i]];
  }
  std::vector<std::uint8_t> sorted_found(keys.size(), 0);
  std::vector<Status> statuses(order.shards());
  // Relaxed: a shard more that is read in vain does no harm.
  std::atomic<bool> failed{false};
  const auto read_shard = [&](int task) {
    const auto shard = static_cast<std::size_t>(task);
    if (order.count(shard) == 0 || failed.load(std::memory_order_relaxed)) return;
    statuses[shard] = read(shard, order.PartOf(sorted_keys, shard),
                           order.PartOf(sorted_rows, shard), order.PartOf(sorted_found, shard));
    if (!statuses[shard].ok()) failed.store(true, std::memory_order_relaxed);
  };
  const int shards = static_cast<int>(order.shards());
  if (workers != nullptr) {
    workers->Run(shards, read_shard);
  } else {
    for (int shard = 0; shard < shards; ++shard) read_shard(shard);
  }
  for (const Status& status : statuses) TERRACE_RETURN_IF_ERROR(status);
  for (std::size_t i = 0; i < keys.size(); ++i) found[order.origin[i]] = sorted_found[i];
  return OkStatus();
}

}  // namespace terrace
