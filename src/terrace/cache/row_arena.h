// RowArena: the memory of cached rows. Chunks in huge pages hold the metadata entries of their rows
// in front and the rows behind; an entry's number gives the place of both, and neither ever moves.
// A chunk can be closed to new rows and given back once it is empty. Threads: guarded by its owner,
// except that flags of a pinned entry may be changed by any thread through the functions below.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/status.h"

namespace terrace {

// Number of an entry: chunk in the high bits, slot within it in the low ones.
using EntryId = std::uint32_t;
inline constexpr EntryId kNoEntry = ~EntryId{0};

// Where an entry is, as Entry::place says: these, or a queue of the eviction policy from
// kFirstQueue on.
inline constexpr std::uint8_t kFree = 0;   // Zero, as fresh memory is.
inline constexpr std::uint8_t kTaken = 1;  // By a Pin that has not published it yet.
inline constexpr std::uint8_t kHeld = 2;   // Pinned, or chosen as a victim, and in no queue.
inline constexpr std::uint8_t kFirstQueue = 3;

inline constexpr std::uint8_t kDirtyFlag = 1;    // Trained since it was last written.
inline constexpr std::uint8_t kNewFlag = 2;      // Created here and never trained.
inline constexpr std::uint8_t kLoadingFlag = 4;  // Pinned; its bytes are not here yet.
inline constexpr std::uint8_t kLostFlag = 8;  // Pinned; its load failed, so it is not in the map.
// No store has the row, and no write of it is on its way: beside kDirtyFlag, or alone when it was
// dropped because it had expired.
inline constexpr std::uint8_t kUnstoredFlag = 16;

// Four share a cache line.
struct Entry {
  Key key;
  std::uint32_t position;  // Of the policy's reference to it, or the next free slot.
  std::uint8_t pins;
  std::uint8_t place;
  std::uint8_t frequency;  // The policy's.
  std::uint8_t flags;
};
static_assert(sizeof(Entry) == 16 && alignof(Entry) == 8);

// Relaxed: a thread that needs another's mark has met it in the cache's mutex since, when the pin
// was released or by the order of stages.
inline std::uint8_t LoadFlags(Entry& entry) {
  return std::atomic_ref<std::uint8_t>(entry.flags).load(std::memory_order_relaxed);
}
inline void StoreFlags(Entry& entry, std::uint8_t flags) {
  std::atomic_ref<std::uint8_t>(entry.flags).store(flags, std::memory_order_relaxed);
}
// Marks the row trained; its flags when it was not dirty before, else 0.
inline std::uint8_t SetDirty(Entry& entry) {
  std::atomic_ref<std::uint8_t> flags(entry.flags);
  const std::uint8_t before = flags.load(std::memory_order_relaxed);
  if ((before & kDirtyFlag) != 0) return 0;
  const std::uint8_t unstored = before == kNewFlag ? kUnstoredFlag : before & kUnstoredFlag;
  const std::uint8_t after = kDirtyFlag | unstored;
  return (flags.exchange(after, std::memory_order_relaxed) & kDirtyFlag) == 0 ? after : 0;
}
inline bool IsDirty(Entry& entry) { return (LoadFlags(entry) & kDirtyFlag) != 0; }
inline bool IsStored(Entry& entry) { return (LoadFlags(entry) & kUnstoredFlag) == 0; }

class RowArena {
 public:
  // REQUIRES: chunk_bytes a multiple of 4 KiB that holds at least one row.
  RowArena(std::uint32_t row_bytes, std::uint64_t chunk_bytes);
  // How many rows of `row_bytes` a chunk holds.
  static std::uint32_t RowsPerChunk(std::uint32_t row_bytes, std::uint64_t chunk_bytes);

  std::uint32_t rows_per_chunk() const { return rows_per_chunk_; }
  std::uint64_t chunk_bytes() const { return chunk_bytes_; }
  // Chunks beyond this many could not be numbered, or not be listed in a table that never moves.
  std::uint64_t max_chunks() const {
    return std::min<std::uint64_t>((std::uint64_t{1} << (32 - slot_bits_)) - 1, kMaxChunks);
  }

  Entry& entry(EntryId id) const {
    return reinterpret_cast<Entry*>(bases_[id >> slot_bits_])[id & slot_mask_];
  }
  std::byte* row(EntryId id) const {
    return bases_[id >> slot_bits_] + rows_offset_ + std::uint64_t{id & slot_mask_} * stride_;
  }

  // `memory`: chunk_bytes(), zeroed.
  void AddChunk(HugeBuffer memory);
  // An entry in state kTaken, from an open chunk, counted as held; kNoEntry when all are taken.
  EntryId Allocate();
  // REQUIRES: not held.
  void Free(EntryId id);

  // Held entries keep their chunk.
  void Hold(EntryId id) { ++held_[id >> slot_bits_]; }
  void Unhold(EntryId id) { --held_[id >> slot_bits_]; }

  // Chunk numbers run from 0 to chunk_numbers(); some are absent.
  std::uint32_t chunk_numbers() const { return static_cast<std::uint32_t>(chunks_.size()); }
  bool present(std::uint32_t chunk) const { return bases_[chunk] != nullptr; }
  bool closed(std::uint32_t chunk) const { return chunks_[chunk].closed; }
  bool is_closed(EntryId id) const { return chunks_[id >> slot_bits_].closed; }
  std::uint32_t held(std::uint32_t chunk) const { return held_[chunk]; }
  std::uint32_t used(std::uint32_t chunk) const { return chunks_[chunk].used; }
  // Slots from 0 that may be taken; those beyond never were.
  std::uint32_t touched(std::uint32_t chunk) const { return chunks_[chunk].fresh; }
  EntryId id(std::uint32_t chunk, std::uint32_t slot) const { return chunk << slot_bits_ | slot; }
  std::uint32_t chunk_of(EntryId id) const { return id >> slot_bits_; }
  std::uint32_t slot_of(EntryId id) const { return id & slot_mask_; }

  // A closed chunk hands out no slots.
  void Close(std::uint32_t chunk);
  void Reopen(std::uint32_t chunk);
  // Gives the memory of a chunk back. REQUIRES: used(chunk) == 0.
  void Release(std::uint32_t chunk);

  std::uint32_t present_chunks() const { return present_chunks_; }
  std::uint32_t closed_chunks() const { return closed_chunks_; }
  std::uint64_t used_rows() const { return used_rows_; }

 private:
  static constexpr std::uint32_t kNoSlot = ~std::uint32_t{0};
  static constexpr std::uint64_t kMaxChunks = 65535;
  struct Chunk {
    HugeBuffer buffer;
    std::uint32_t fresh = 0;            // Slots below were handed out once.
    std::uint32_t free_head = kNoSlot;  // List through Entry::position.
    std::uint32_t used = 0;
    bool closed = false;
    bool listed = false;  // In open_.
  };
  bool HasSlot(const Chunk& chunk) const {
    return !chunk.closed && (chunk.free_head != kNoSlot || chunk.fresh < rows_per_chunk_);
  }
  void List(std::uint32_t chunk);

  const std::uint64_t chunk_bytes_;
  const std::uint64_t stride_;  // Bytes from row to row, a multiple of 8.
  const std::uint32_t rows_per_chunk_;
  const int slot_bits_;
  const std::uint32_t slot_mask_;
  const std::uint64_t rows_offset_;
  // (chunk numbers) nullptr where absent. Never moves: entries are found by threads that hold a pin
  // only, while chunks are added.
  const std::unique_ptr<std::byte*[]> bases_;
  std::vector<std::uint32_t> held_;  // (chunk numbers)
  std::vector<Chunk> chunks_;        // (chunk numbers)
  std::vector<std::uint32_t> open_;  // Chunks that may have slots; a stack.
  std::uint32_t present_chunks_ = 0;
  std::uint32_t closed_chunks_ = 0;
  std::uint64_t used_rows_ = 0;
};

}  // namespace terrace
