// EntryMap: mixed key -> number of an entry, open addressing in cache lines of twelve. Keys are not
// stored: a one-byte tag filters and the caller compares the entry's key, which it needs anyway.
// Memory is fixed by Reset(). Threads: guarded by its owner.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/status.h"

namespace terrace {

// For keys whose hashes are alike in their high bits, or are looked up in their order.
constexpr std::uint64_t SpreadHash(std::uint64_t hash) { return hash * 0x9e3779b97f4a7c15ULL; }

class EntryMap {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  // Memory of a map for `rows` rows: lines three quarters full.
  static std::uint64_t BytesFor(std::uint64_t rows);
  // Empties the map and makes it hold `rows`. kOutOfMemory: nothing changed.
  Status Reset(std::uint64_t rows);
  std::uint64_t capacity_rows() const { return capacity_rows_; }
  std::uint64_t bytes() const { return memory_.size(); }
  std::uint64_t size() const { return size_; }

  [[gnu::always_inline]] void Prefetch(std::uint64_t hash) const {
    __builtin_prefetch(&lines_[Home(hash)]);
  }

  // The first entry of the home line whose tag fits, most often the one sought: what to prefetch.
  std::uint32_t Candidate(std::uint64_t hash) const {
    const Line& line = lines_[Home(hash)];
    const std::uint32_t matches = Match(line, Tag(hash));
    return matches == 0 ? kNone : line.entries[std::countr_zero(matches)];
  }

  // The entry for which is_key(entry) holds, or kNone.
  template <typename IsKey>
  std::uint32_t Find(std::uint64_t hash, const IsKey& is_key) const {
    const std::uint8_t tag = Tag(hash);
    std::uint64_t place = Home(hash);
    while (true) {
      const Line& line = lines_[place];
      for (std::uint32_t matches = Match(line, tag); matches != 0; matches &= matches - 1) {
        const std::uint32_t entry = line.entries[std::countr_zero(matches)];
        if (is_key(entry)) return entry;
      }
      if (line.passed == 0) return kNone;
      place = Next(place);
      if (place == Home(hash)) return kNone;
    }
  }

  // Calls visit(entry) for every entry whose hash is `from` or more and below the hash that is
  // returned, 0 for 2^64, and for some that are near them: of as many lines as homes. So all are
  // visited in the order of their hashes, even if Reset() comes between two calls.
  template <typename Visit>
  std::uint64_t VisitFrom(std::uint64_t from, std::uint64_t lines, const Visit& visit) const {
    const std::uint64_t first = Home(from), end = std::min(first + lines, line_count_);
    std::uint64_t place = first;
    for (std::uint64_t seen = 1; seen <= line_count_; ++seen, place = Next(place)) {
      const Line& line = lines_[place];
      for (int way = 0; way < kWays; ++way) {
        if (line.tags[way] != 0) visit(line.entries[way]);
      }
      // Who found its home full lies beyond it.
      if (seen >= end - first && line.passed == 0) break;
    }
    return end == line_count_ ? 0 : FirstHashOf(end, line_count_);
  }

  // Likewise for every entry whose hash is from `first` to `last`, once.
  template <typename Visit>
  void VisitRange(std::uint64_t first, std::uint64_t last, const Visit& visit) const {
    VisitFrom(first, Home(last) - Home(first) + 1, visit);
  }

  // REQUIRES: the key is not in the map, and size() < capacity_rows().
  void Insert(std::uint64_t hash, std::uint32_t entry);
  // REQUIRES: it is there.
  void Erase(std::uint64_t hash, std::uint32_t entry);
  // As Erase followed by Insert of the same key.
  void Replace(std::uint64_t hash, std::uint32_t entry, std::uint32_t by);

 private:
  static constexpr int kWays = 12;
  struct alignas(64) Line {
    std::uint8_t tags[kWays];  // 0: empty.
    std::uint16_t passed;      // Entries that found this line full on their way; sticks at its top.
    std::uint16_t unused;
    std::uint32_t entries[kWays];
  };
  static_assert(sizeof(Line) == 64);

  std::uint64_t Home(std::uint64_t hash) const { return RangeOfHash(hash, line_count_); }
  std::uint64_t Next(std::uint64_t place) const { return place + 1 == line_count_ ? 0 : place + 1; }
  // From all bits of the hash, because high ones choose the line and low ones are equal on a node.
  static std::uint8_t Tag(std::uint64_t hash) {
    const auto tag = static_cast<std::uint8_t>((hash * 0xd6e8feb86659fd93ULL) >> 56);
    return tag == 0 ? 1 : tag;
  }
  static std::uint32_t Match(const Line& line, std::uint8_t tag) {
#if defined(__SSE2__)
    const __m128i tags = _mm_load_si128(reinterpret_cast<const __m128i*>(line.tags));
    const __m128i equal = _mm_cmpeq_epi8(tags, _mm_set1_epi8(static_cast<char>(tag)));
    return static_cast<std::uint32_t>(_mm_movemask_epi8(equal)) & ((1U << kWays) - 1);
#else
    std::uint32_t matches = 0;
    for (int way = 0; way < kWays; ++way) {
      matches |= static_cast<std::uint32_t>(line.tags[way] == tag) << way;
    }
    return matches;
#endif
  }
  // The line and way of an entry that is in the map.
  struct Spot {
    std::uint64_t line;
    int way;
  };
  Spot Locate(std::uint64_t hash, std::uint32_t entry) const;

  HugeBuffer memory_;
  Line* lines_ = nullptr;
  std::uint64_t line_count_ = 0;
  std::uint64_t capacity_rows_ = 0;
  std::uint64_t size_ = 0;
};

}  // namespace terrace
