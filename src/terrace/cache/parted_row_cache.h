// PartedRowCache: a RowCache of parts, each of some of the table's shards and a cache of its own
// with its share of the capacity. Parts have no key in common, so a working set is pinned in all of
// them side by side, and so they load, write back and flush: what one thread does for a part, a
// core for each part does for the table. It changes no bit of a row. Threads and locks: as
// RowCache; the parts have their own, and no lock of theirs is held here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/base/raw_vector.h"
#include "terrace/base/thread.h"
#include "terrace/cache/row_cache.h"
#include "terrace/cache/shard_order.h"

namespace terrace {

// Of a working set; `order` is by part.
struct PinnedParts {
  ShardOrder order;
  std::vector<PinnedRows> pins;  // (parts)
};

class RowCacheImpl;

class PartedRowCache final : public RowCache {
 public:
  // In how many parts a cache of these options is made.
  static std::uint32_t PartsFor(const RowCacheOptions& options, std::size_t shards);
  // Of how many rows there must be room so that any working set of so many finds room in each part.
  static std::uint64_t RowsToHave(std::uint32_t parts, std::uint64_t rows);
  // REQUIRES: parts = PartsFor(...) > 1.
  static Result<std::unique_ptr<RowCache>> Make(const RowCacheOptions& options,
                                                std::span<Store* const> stores,
                                                std::uint32_t parts);

  std::size_t MaxPinnedRows() const override;
  Result<PinnedRows> StartPin(std::span<const Key> keys) override;
  Status Peek(std::span<const Key> keys, std::span<std::byte* const> rows,
              std::span<std::uint8_t> found) override;
  Status FlushDirty() override;
  Status WriteAhead(std::uint64_t rows) override;
  std::uint64_t dirty_bytes() const override;
  std::uint64_t likely_dirty_bytes() const override;
  std::uint64_t dirty_writes() const override;
  Status SetCapacity(std::uint64_t capacity_bytes) override;
  std::uint64_t LeastCapacity(std::uint64_t rows) const override;
  void Abort(const Status& cause) override;
  Status background_status() const override;
  RowCacheStats stats() const override;

 protected:
  void MarkDirtyEntries(const PinnedRows& pinned, std::size_t begin, std::size_t end) override;
  void Unpin(PinnedRows* pinned) override;
  Status WaitFor(PinnedRows* pinned) override;

 private:
  // Released handles whose lists the next pins fill.
  static constexpr std::size_t kSparePins = 2;

  PartedRowCache(std::uint32_t parts, std::function<void()> on_pin_thread);
  // As if each part were one shard: where parts have as many shards, those that a table of so many
  // shards would send to one.
  ShardRange Parts() const { return ShardRange::All(part_count_); }
  PinnedRows TakeSpare() TERRACE_EXCLUDES(spare_mu_);
  std::uint64_t SumOfParts(std::uint64_t (RowCache::*number)() const) const;
  // The first failure, when all have ended.
  Status ForEachPart(WorkerGroup* workers,
                     const std::function<Status(std::size_t part)>& call) const;

  const std::uint32_t part_count_;
  std::vector<std::unique_ptr<RowCacheImpl>> parts_;
  Mutex pin_mu_;  // One pin at a time.
  // Of the pin: each key's part, and the keys by part.
  RawVector<std::uint8_t> part_of_ TERRACE_GUARDED_BY(pin_mu_);
  RawVector<Key> keys_ TERRACE_GUARDED_BY(pin_mu_);
  WorkerGroup pin_workers_;
  Mutex other_mu_;  // One flush or look at a time.
  WorkerGroup other_workers_;
  Mutex spare_mu_;
  std::vector<PinnedRows> spare_ TERRACE_GUARDED_BY(spare_mu_);
};

}  // namespace terrace
