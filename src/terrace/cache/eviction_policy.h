// EvictionPolicy: which rows leave memory. It sees rows in batches and keeps its order in the
// entries' place, position and frequency. Threads: guarded by its owner, the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "terrace/base/status.h"
#include "terrace/cache/row_arena.h"

namespace terrace {

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

  // Rows that a Pin found in memory, pinned by others or not; they become kHeld.
  virtual void Visit(std::span<const EntryId> entries) = 0;
  // Rows that a Pin brought to memory; they become kHeld.
  virtual void Admit(std::span<const EntryId> entries) = 0;
  // kHeld rows whose last pin has gone.
  virtual void Release(std::span<const EntryId> entries) = 0;
  // A row leaves otherwise than as a victim; its place is not changed.
  virtual void Forget(EntryId entry) = 0;
  // Up to `count` rows to evict, the best first; they are kHeld and forgotten. Returns how many;
  // fewer only when every other row is held.
  virtual std::size_t TakeVictims(std::size_t count, EntryId* victims) = 0;
  // Drops whatever refers to rows that are not cached any more.
  virtual void Sweep() = 0;
};

// HPS appendix D: every visit enters an LRU of `lru_share` of the rows, pinned rows included; what
// leaves it enters an LFU, of which the least frequent, oldest row is the victim. Visits count up
// to 255, exactly up to 15 and in steps of 8 beyond. Borrows the arena.
std::unique_ptr<EvictionPolicy> MakeLruLfuPolicy(RowArena* arena, double lru_share);

}  // namespace terrace
