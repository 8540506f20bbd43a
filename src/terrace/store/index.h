// RowIndex: where the newest row of each key lies. The store works on this interface alone, so that
// an index by group of keys, whose answer may be another key's record, can stand beside the one by
// key. Threads: guarded by the store's mutex. All hashes are MixKey(key), and those of one call are
// distinct; calls take batches because each look-up is a miss of the processor's caches.
#pragma once

#include <cstdint>
#include <span>

#include "terrace/base/status.h"

namespace terrace {

// File slot (24 bits) and row in the file (20 bits).
using Place = std::uint64_t;
inline constexpr int kRowBits = 20;
inline constexpr int kPlaceBits = 44;
inline constexpr std::uint64_t kMaxRowsPerFile = std::uint64_t{1} << kRowBits;
// Slots above it stay unused: nobody holds four million files open, and a read plan has bits to
// spare.
inline constexpr std::uint32_t kMaxFileSlots = 0x3ff000;
inline constexpr Place kNoPlace = (Place{1} << kPlaceBits) - 1;

constexpr Place MakePlace(std::uint32_t slot, std::uint64_t row) {
  return (static_cast<Place>(slot) << kRowBits) | row;
}
constexpr std::uint32_t SlotOfPlace(Place place) {
  return static_cast<std::uint32_t>(place >> kRowBits);
}
constexpr std::uint32_t RowOfPlace(Place place) {
  return static_cast<std::uint32_t>(place & (kMaxRowsPerFile - 1));
}

struct KeyPlace {
  std::uint64_t hash;
  Place place;
};

// From a multiple of it on (see RowIndex::Fill).
inline constexpr std::uint64_t kFillGrain = std::uint64_t{1} << 52;

class RowIndex {
 public:
  virtual ~RowIndex() = default;

  // Whether the index may take one key for the other: a look-up of a key that is not there may give
  // the place of an alike one, and the record there says so by its key. Of keys that are there each
  // has its own place.
  virtual bool Alike(std::uint64_t hash, std::uint64_t other) const = 0;
  // File slots below it have a place here.
  virtual std::uint32_t max_slots() const = 0;

  // places[i]: where hashes[i] lies, or kNoPlace; of an absent key perhaps an alike one's place.
  virtual void Lookup(std::span<const std::uint64_t> hashes, Place* places) const = 0;
  // Makes room for these new hashes, all of a range of kFillGrain that are to come: the next Insert
  // of them can't fail. expected: keys of the whole index before long, or 0; what grows then grows
  // for them at once. kOutOfMemory: nothing changed that a look-up would notice.
  virtual Status Reserve(std::span<const std::uint64_t> new_hashes, std::uint64_t expected) = 0;
  // Adds keys in the order of their hashes. REQUIRES: none of them is there; room, by Reserve.
  virtual void Insert(std::span<const std::uint64_t> hashes, const Place* places) = 0;
  // Both in one; several threads may call it at the same time with keys of different ranges of
  // kFillGrain hashes, and do nothing else. For building an index: a range that has no keys yet
  // gets the lines that these need, and its keys in their order. REQUIRES: as for Insert.
  // kOutOfMemory: some of them may be there.
  virtual Status Fill(std::span<const KeyPlace> keys) = 0;
  // Changes the places of keys; previous[i]: what it was. REQUIRES: each is there.
  virtual void Replace(std::span<const std::uint64_t> hashes, const Place* places,
                       Place* previous) = 0;
  // Where the place of hashes[i] still is from[i], makes it to[i] (kNoPlace: removes it).
  // moved[i]: 1 or 0.
  virtual void Move(std::span<const std::uint64_t> hashes, const Place* from, const Place* to,
                    std::uint8_t* moved) = 0;
  // Removes keys; previous[i]: where it was. REQUIRES: each is there, or no alike one is
  // (previous[i] is then kNoPlace).
  virtual void Erase(std::span<const std::uint64_t> hashes, Place* previous) = 0;

  virtual std::uint64_t size() const = 0;   // Keys.
  virtual std::uint64_t bytes() const = 0;  // Memory.
};

}  // namespace terrace
