#include "terrace/store/key_index.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"

namespace terrace {
namespace {

// 52 bits of hash, then the upper 12 bits of the place; the lower 32 bits of the place follow.
struct Entry {
  std::uint64_t word;
  std::uint32_t low_place;
};

constexpr int kLowHashBits = 52;
constexpr std::uint64_t kLowHashMask = (std::uint64_t{1} << kLowHashBits) - 1;
// As many misses in flight as a core keeps.
constexpr std::size_t kPrefetchAhead = 16;
constexpr double kMaxLoad = 0.85;
constexpr double kGrowth = 1.25;
// Bytes by which the index grows before freed memory goes back to the system.
constexpr std::uint64_t kLeastBetweenReturns = std::uint64_t{2} << 20;

Entry LoadEntry(const std::byte* at) {
  Entry entry;
  std::memcpy(&entry.word, at, 8);
  std::memcpy(&entry.low_place, at + 8, 4);
  return entry;
}

void StoreEntry(std::byte* at, std::uint64_t low_hash, Place place) {
  const std::uint64_t word = (low_hash << 12) | (place >> 32);
  const auto low_place = static_cast<std::uint32_t>(place);
  std::memcpy(at, &word, 8);
  std::memcpy(at + 8, &low_place, 4);
}

// No place in use has the upper 12 bits all set (kMaxFileSlots).
bool IsEmpty(std::uint64_t word) { return (word & 0xfff) == 0xfff; }
Place PlaceOf(const Entry& entry) { return ((entry.word & 0xfff) << 32) | entry.low_place; }

}  // namespace

std::uint32_t KeyIndex::HomeOf(std::uint64_t low_hash, std::uint32_t capacity) {
  return static_cast<std::uint32_t>((static_cast<Uint128>(low_hash) * capacity) >> kLowHashBits);
}

std::uint32_t KeyIndex::Find(const Segment& segment, std::uint64_t low_hash, bool* found) {
  *found = false;
  if (segment.capacity == 0) return 0;
  std::uint32_t position = HomeOf(low_hash, segment.capacity);
  const std::uint32_t end = segment.last;
  const std::byte* at = segment.entries.get() + position * kEntryBytes;
  for (; position < end; ++position, at += kEntryBytes) {
    std::uint64_t word;
    std::memcpy(&word, at, 8);
    // An empty entry compares as the greatest hash.
    if ((word >> 12) < low_hash) continue;
    *found = (word >> 12) == low_hash && !IsEmpty(word);
    return position;
  }
  return position;
}

template <typename Visit>
void KeyIndex::ForEachPrefetched(std::span<const std::uint64_t> hashes, Visit visit) const {
  const auto prefetch = [this](std::uint64_t hash) {
    const Segment& segment = segments_[hash >> kLowHashBits];
    if (segment.capacity == 0) return;
    __builtin_prefetch(segment.entries.get() +
                       HomeOf(hash & kLowHashMask, segment.capacity) * kEntryBytes);
  };
  const std::size_t n = hashes.size();
  for (std::size_t i = 0; i < std::min(n, kPrefetchAhead); ++i) prefetch(hashes[i]);
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kPrefetchAhead < n) prefetch(hashes[i + kPrefetchAhead]);
    visit(i, hashes[i] >> kLowHashBits, hashes[i] & kLowHashMask);
  }
}

void KeyIndex::Lookup(std::span<const std::uint64_t> hashes, Place* places) const {
  ForEachPrefetched(hashes, [&](std::size_t i, std::size_t s, std::uint64_t low_hash) {
    const Segment& segment = segments_[s];
    bool found;
    const std::uint32_t position = Find(segment, low_hash, &found);
    places[i] =
        found ? PlaceOf(LoadEntry(segment.entries.get() + position * kEntryBytes)) : kNoPlace;
  });
}

Status KeyIndex::Reserve(std::span<const std::uint64_t> new_hashes) {
  std::vector<std::uint32_t> added(kSegments, 0);
  for (std::uint64_t hash : new_hashes) ++added[hash >> kLowHashBits];
  for (std::size_t s = 0; s < kSegments; ++s) {
    if (added[s] == 0) continue;
    Segment* segment = &segments_[s];
    const std::uint64_t count = std::uint64_t{segment->count} + added[s];
    if (static_cast<double>(count) <= kMaxLoad * segment->capacity) continue;
    TERRACE_RETURN_IF_ERROR(Grow(segment, count));
  }
  // The holes that grown segments leave in the heap fit no other.
  if (bytes_ >= returned_bytes_ + std::max(kLeastBetweenReturns, bytes_ / 64)) {
    ReturnFreedMemory();
    returned_bytes_ = bytes_;
  }
  return OkStatus();
}

Status KeyIndex::Grow(Segment* segment, std::uint64_t count) {
  const double wanted = std::max({static_cast<double>(count) / kMaxLoad,
                                  static_cast<double>(segment->capacity) * kGrowth, 8.0});
  if (wanted > 4e9) {
    return InternalError(
        "the index by key holds at most 3e9 keys in one of its 4096 segments; use "
        "more shards (ssd.shards)");
  }
  Segment grown;
  grown.capacity = static_cast<std::uint32_t>(wanted) + 1;
  // Short in a small table, where it would be most of the memory.
  std::uint32_t tail = std::min(kMostTailEntries, 4 + grown.capacity / 8);
  while (true) {
    const std::size_t bytes = (std::size_t{grown.capacity} + tail) * kEntryBytes;
    // Not std::make_unique, whose failure is an exception.
    grown.entries.reset(static_cast<std::byte*>(std::malloc(bytes)));
    if (!grown.entries) {
      return OutOfMemoryError(
          fmt::format("the index of a store asked for {} bytes more; lower memory.budget's other "
                      "users, or use a machine with more memory",
                      bytes));
    }
    std::memset(grown.entries.get(), 0xff, bytes);
    grown.count = 0;
    grown.last = 0;
    bool fits = true;
    for (std::uint32_t from = 0; from < segment->last; ++from) {
      const std::byte* at = segment->entries.get() + from * kEntryBytes;
      const Entry entry = LoadEntry(at);
      if (IsEmpty(entry.word)) continue;
      const std::uint32_t position = std::max(HomeOf(entry.word >> 12, grown.capacity), grown.last);
      // Half of the tail stays free for what comes.
      fits = position < grown.capacity + tail / 2;
      if (!fits) break;
      std::memcpy(grown.entries.get() + position * kEntryBytes, at, kEntryBytes);
      grown.last = position + 1;
      ++grown.count;
    }
    if (fits) break;
    tail = tail * 2 + segment->count / 8;  // Only keys chosen to collide come here.
  }
  grown.tail = tail;
  bytes_ += (std::uint64_t{grown.capacity} + grown.tail) * kEntryBytes;
  if (segment->capacity > 0) {
    bytes_ -= (std::uint64_t{segment->capacity} + segment->tail) * kEntryBytes;
  }
  *segment = std::move(grown);
  return OkStatus();
}

void KeyIndex::Insert(Segment* segment, std::uint64_t low_hash, Place place) {
  bool found;
  std::uint32_t position = Find(*segment, low_hash, &found);
  TERRACE_DCHECK(!found);
  if (segment->last == segment->capacity + segment->tail || segment->capacity == 0) {
    // The tail is full: rare, since Reserve leaves it half empty.
    const Status grown = Grow(segment, segment->count + 1);
    TERRACE_CHECK(grown.ok());
    position = Find(*segment, low_hash, &found);
  }
  std::byte* at = segment->entries.get() + position * kEntryBytes;
  std::uint32_t hole = position;
  while (hole < segment->last &&
         !IsEmpty(LoadEntry(segment->entries.get() + hole * kEntryBytes).word)) {
    ++hole;
  }
  std::memmove(at + kEntryBytes, at, (hole - position) * kEntryBytes);
  StoreEntry(at, low_hash, place);
  segment->last = std::max(segment->last, hole + 1);
  ++segment->count;
  ++size_;
}

void KeyIndex::Remove(Segment* segment, std::uint32_t position) {
  std::byte* base = segment->entries.get();
  // What follows without a hole and not at its home moves one back.
  std::uint32_t end = position + 1;
  while (end < segment->last) {
    const Entry entry = LoadEntry(base + end * kEntryBytes);
    if (IsEmpty(entry.word) || HomeOf(entry.word >> 12, segment->capacity) == end) break;
    ++end;
  }
  std::memmove(base + position * kEntryBytes, base + (position + 1) * kEntryBytes,
               (end - position - 1) * kEntryBytes);
  std::memset(base + (end - 1) * kEntryBytes, 0xff, kEntryBytes);
  if (end == segment->last) {
    while (segment->last > 0 && IsEmpty(LoadEntry(base + (segment->last - 1) * kEntryBytes).word)) {
      --segment->last;
    }
  }
  --segment->count;
  --size_;
}

void KeyIndex::Set(std::span<const std::uint64_t> hashes, const Place* places, Place* previous) {
  ForEachPrefetched(hashes, [&](std::size_t i, std::size_t s, std::uint64_t low_hash) {
    Segment* segment = &segments_[s];
    bool found;
    const std::uint32_t position = Find(*segment, low_hash, &found);
    if (!found) {
      previous[i] = kNoPlace;
      Insert(segment, low_hash, places[i]);
      return;
    }
    std::byte* at = segment->entries.get() + position * kEntryBytes;
    previous[i] = PlaceOf(LoadEntry(at));
    StoreEntry(at, low_hash, places[i]);
  });
}

void KeyIndex::Move(std::span<const std::uint64_t> hashes, const Place* from, const Place* to,
                    std::uint8_t* moved) {
  ForEachPrefetched(hashes, [&](std::size_t i, std::size_t s, std::uint64_t low_hash) {
    Segment* segment = &segments_[s];
    bool found;
    const std::uint32_t position = Find(*segment, low_hash, &found);
    moved[i] = 0;
    if (!found) return;
    std::byte* at = segment->entries.get() + position * kEntryBytes;
    if (PlaceOf(LoadEntry(at)) != from[i]) return;
    moved[i] = 1;
    if (to[i] == kNoPlace) {
      Remove(segment, position);
    } else {
      StoreEntry(at, low_hash, to[i]);
    }
  });
}

void KeyIndex::Erase(std::span<const std::uint64_t> hashes, Place* previous) {
  ForEachPrefetched(hashes, [&](std::size_t i, std::size_t s, std::uint64_t low_hash) {
    Segment* segment = &segments_[s];
    bool found;
    const std::uint32_t position = Find(*segment, low_hash, &found);
    previous[i] = kNoPlace;
    if (!found) return;
    previous[i] = PlaceOf(LoadEntry(segment->entries.get() + position * kEntryBytes));
    Remove(segment, position);
  });
}

}  // namespace terrace
