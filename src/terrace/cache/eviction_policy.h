// EvictionPolicy: which rows leave memory. It sees rows in groups, so that a virtual call is paid
// for many of them, and keeps its order in the entries' place, position and frequency, beside the
// pins in the same sixteen bytes. A pinned row may stay in a queue; a row whose place is kHeld is
// in none. Threads: guarded by its owner, the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "terrace/base/status.h"
#include "terrace/cache/eviction_options.h"
#include "terrace/cache/future_keys.h"
#include "terrace/cache/row_arena.h"

namespace terrace {

// Rows that stay because FutureKeys knows them to come.
struct ComingRows {
  std::uint64_t rows = 0;     // Now, unpinned.
  std::uint64_t evicted = 0;  // So far, since nothing else was left to evict.
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // Memory for `rows` rows; Reserve makes it so. kOutOfMemory: nothing changed. REQUIRES, when it
  // shrinks: no more rows than that are cached.
  virtual std::uint64_t BytesFor(std::uint64_t rows) const = 0;
  virtual Status Reserve(std::uint64_t rows) = 0;
  virtual std::uint64_t bytes() const = 0;
  // How many rows the cache may hold: what shares of it are computed from.
  virtual void SetLimit(std::uint64_t rows) = 0;

  // Rows that a Pin found in memory and is about to pin, pinned by others or not.
  virtual void Visit(std::span<const EntryId> entries) = 0;
  // Rows that a Pin brought to memory and is about to pin; their place is kTaken, and any other
  // afterwards.
  virtual void Admit(std::span<const EntryId> entries) = 0;
  // Rows whose place is kHeld and whose last pin has gone.
  virtual void Release(std::span<const EntryId> entries) = 0;
  // A row without pins leaves otherwise than as a victim; its place is not changed.
  virtual void Forget(EntryId entry) = 0;
  // Up to `count` rows without pins to evict, the best first; they are kHeld and forgotten. Returns
  // how many; fewer only when every other row is pinned. Each is then put back or leaves.
  virtual std::size_t TakeVictims(std::size_t count, EntryId* victims) = 0;
  // Victims that stay after all, unchanged since: they come to the end of a queue.
  virtual void PutBack(std::span<const EntryId> victims) = 0;
  // Victims that leave, their keys and frequencies unchanged since: only now may they be remembered
  // as rows that left, since what is remembered makes room for it.
  virtual void Leave(std::span<const EntryId> victims) = 0;
  // Drops whatever refers to rows that are not cached any more.
  virtual void Sweep() = 0;

  // A row whose Entry::frequency is this or more is hot: likely to be visited again soon. Holds for
  // victims too; of those that are not hot FutureKeys knows nothing.
  virtual std::uint8_t hot_frequency() const = 0;
  virtual ComingRows coming() const { return {}; }
};

// kInvalidArgument: an option out of its limits. Borrows the arena and, for kS3Fifo, what is known
// of the future; null: nothing.
Result<std::unique_ptr<EvictionPolicy>> MakeEvictionPolicy(const EvictionOptions& options,
                                                           RowArena* arena,
                                                           const FutureKeys* future = nullptr);

// LRU in front of LFU: every visit enters an LRU of `lru_share` of the rows, pinned rows included;
// what leaves it enters the LFU, of which the least frequent, oldest row is the victim. Without an
// LRU (kPassLfu) a row enters the LFU when its last pin goes. Visits count up to 255, exactly up to
// 15 and in steps of 8 beyond, and are halved row by row, a few with each victim. A row is hot
// while it counts two visits or more.
std::unique_ptr<EvictionPolicy> MakeLruLfuPolicy(const EvictionOptions& options, RowArena* arena);

// S3-FIFO: rows enter a small queue of a tenth of the cache, or the main one when their key left
// not long ago. The oldest row of the small queue goes to the main one if it was visited since,
// else it is the victim; that of the main queue goes to its end once for each visit, up to three. A
// visit moves nothing: it counts in the entry. A row is hot when it belongs to the main queue or
// was visited since it came to the small one. A row that `future` knows to come leaves either
// queue at its end for those that come at about the same time, until it is visited. Those that have
// not come when it is past are the first victims; the others are victims when there is nothing
// else, those that come last first.
std::unique_ptr<EvictionPolicy> MakeS3FifoPolicy(RowArena* arena, const FutureKeys* future);

}  // namespace terrace
