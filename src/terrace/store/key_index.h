// The indexes by key. KeyIndex takes less than 8 bytes a key: an entry holds 24 bits of the hash
// and 32 of the place, and the record on disk decides whether it is the key's. ExactIndex takes 14
// and is never wrong. Both are 4096 segments by the top bits of the hash, each a table of cache
// lines of its own (double hashing from line to line) that grows by a tenth at a time
// (LineExtents), so that growth neither pauses a batch nor doubles memory; what segments grow by is
// never given back. The home lines of a segment's keys follow their hashes, so that sorted keys
// fill it from line to line.
//
// Keys that an entry can't tell apart, because the 36 bits of segment and entry are equal: the
// first has the entry, the others lie in a map by their whole hash, and the entry's line says that
// there are some.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/base/raw_vector.h"
#include "terrace/base/rng.h"
#include "terrace/base/status.h"
#include "terrace/store/index.h"
#include "terrace/store/line_extents.h"

namespace terrace {

// What a line says beside its entries.
struct LineState {
  std::uint8_t count : 4;   // Entries, the first ones of the line.
  std::uint8_t shared : 1;  // One of them has its bits in common with other keys.
  std::uint8_t passed : 3;  // Keys that found it full on their way; sticks at its top.
};

// Nine entries of 24 bits of the hash and 32 of the place.
struct alignas(64) TaggedLine {
  static constexpr bool kExact = false;
  using Word = std::uint32_t;  // Holds the bits of a hash, and a place.
  static constexpr int kHashBits = 24;
  static constexpr int kPlaceBits = 32;
  static constexpr std::uint32_t kWays = 9;

  // One bit for each entry that has these bits of the hash.
  std::uint32_t Match(std::uint64_t bits) const {
    std::uint32_t equal = 0;
#if defined(__SSE2__)
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
    const __m128i wanted = _mm_set1_epi16(static_cast<short>(bits));
    // Eight masks of 16 bits to bytes, to bits.
    equal = static_cast<std::uint32_t>(
        _mm_movemask_epi8(_mm_packs_epi16(_mm_cmpeq_epi16(first, wanted), _mm_setzero_si128())));
    equal |= static_cast<std::uint32_t>(low[8] == static_cast<std::uint16_t>(bits)) << 8;
    // The line's last 16 bytes, of which all nine of `high` are the seventh and those behind it.
    const __m128i last = _mm_load_si128(reinterpret_cast<const __m128i*>(this) + 3);
    const __m128i wanted_high = _mm_set1_epi8(static_cast<char>(bits >> 16));
    equal &= static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(last, wanted_high))) >> 6;
#else
    for (std::uint32_t way = 0; way < kWays; ++way) {
      equal |= static_cast<std::uint32_t>(this->bits(way) == bits) << way;
    }
#endif
    return equal & ((1u << state.count) - 1);
  }
  std::uint64_t bits(std::uint32_t way) const { return std::uint64_t{high[way]} << 16 | low[way]; }
  std::uint64_t place(std::uint32_t way) const { return places[way]; }
  void Set(std::uint32_t way, std::uint64_t bits, std::uint64_t place) {
    places[way] = static_cast<std::uint32_t>(place);
    low[way] = static_cast<std::uint16_t>(bits);
    high[way] = static_cast<std::uint8_t>(bits >> 16);
  }
  // As many entries as there is room for.
  void SetAll(const std::uint32_t* all_bits, const std::uint32_t* all_places) {
    std::copy_n(all_places, kWays, places);
    std::transform(all_bits, all_bits + kWays, low,
                   [](std::uint32_t bits) { return static_cast<std::uint16_t>(bits); });
    std::transform(all_bits, all_bits + kWays, high,
                   [](std::uint32_t bits) { return static_cast<std::uint8_t>(bits >> 16); });
  }

  std::uint32_t places[kWays];
  std::uint16_t low[kWays];
  std::uint8_t high[kWays];
  LineState state;
};
static_assert(sizeof(TaggedLine) == 64 && offsetof(TaggedLine, high) == 48 + 6);

// Five entries of all other bits of the hash, and of the whole place.
struct alignas(64) ExactLine {
  static constexpr bool kExact = true;
  using Word = std::uint64_t;
  static constexpr int kHashBits = 52;
  static constexpr int kPlaceBits = terrace::kPlaceBits;
  static constexpr std::uint32_t kWays = 5;

  std::uint32_t Match(std::uint64_t bits) const {
    std::uint32_t equal = 0;
    for (std::uint32_t way = 0; way < kWays; ++way) {
      equal |= static_cast<std::uint32_t>(words[way] >> 12 == bits) << way;
    }
    return equal & ((1u << state.count) - 1);
  }
  std::uint64_t bits(std::uint32_t way) const { return words[way] >> 12; }
  std::uint64_t place(std::uint32_t way) const {
    return (words[way] & 0xfff) << 32 | low_places[way];
  }
  void Set(std::uint32_t way, std::uint64_t bits, std::uint64_t place) {
    words[way] = bits << 12 | place >> 32;
    low_places[way] = static_cast<std::uint32_t>(place);
  }
  void SetAll(const std::uint64_t* all_bits, const std::uint64_t* all_places) {
    for (std::uint32_t way = 0; way < kWays; ++way) Set(way, all_bits[way], all_places[way]);
  }

  std::uint64_t words[kWays];
  std::uint32_t low_places[kWays];
  LineState state;
};
static_assert(sizeof(ExactLine) == 64);

template <typename Line>
class SegmentedIndex final : public RowIndex {
 public:
  // Rows of a file have numbers below 2^row_bits; the fewer, the more files have places.
  explicit SegmentedIndex(int row_bits = kRowBits);

  bool Alike(std::uint64_t hash, std::uint64_t other) const override {
    return IdentityOf(hash) == IdentityOf(other);
  }
  std::uint32_t max_slots() const override;
  void Lookup(std::span<const std::uint64_t> hashes, Place* places) const override;
  Status Reserve(std::span<const std::uint64_t> new_hashes) override;
  void Insert(std::span<const std::uint64_t> hashes, const Place* places) override;
  Status Fill(std::span<const KeyPlace> keys) override;
  void Replace(std::span<const std::uint64_t> hashes, const Place* places,
               Place* previous) override;
  void Move(std::span<const std::uint64_t> hashes, const Place* from, const Place* to,
            std::uint8_t* moved) override;
  void Erase(std::span<const std::uint64_t> hashes, Place* previous) override;
  std::uint64_t size() const override { return size_; }
  std::uint64_t bytes() const override;

 private:
  static constexpr int kSegmentBits = 12;
  static constexpr std::size_t kSegments = std::size_t{1} << kSegmentBits;
  static_assert(kFillGrain == std::uint64_t{1} << (64 - kSegmentBits));
  static constexpr std::uint64_t kMaxPassed = 7;

  // Memory of extents, which numbers of 32 bits find: of 256 GiB, more than entries have places.
  class LineArena {
   public:
    // The number of the first of so many empty lines in a row. kOutOfMemory.
    Result<std::uint32_t> Take(std::uint64_t lines);
    Line* At(std::uint32_t number) const {
      return units_[number / kUnitLines] + number % kUnitLines;
    }
    std::uint64_t bytes() const { return bytes_; }

   private:
    static constexpr std::uint32_t kUnitLines = kHugePageBytes / sizeof(Line);

    std::vector<HugeBuffer> chunks_;
    std::vector<Line*> units_;  // One for each kUnitLines of a chunk; most chunks have one.
    std::uint32_t next_ = 0;    // Number of the next line that nobody has,
    std::uint32_t left_ = 0;    // and how many follow it in its chunk.
    std::uint64_t bytes_ = 0;
  };
  struct Segment {
    std::uint32_t lines = 0;
    std::uint32_t count = 0;
  };
  // A key that an entry can't tell from that of another.
  using Other = KeyPlace;
  // Where a key is: in an entry (perhaps an alike one's), or among the others.
  struct Spot {
    Line* line = nullptr;
    std::uint32_t way = 0;
    bool other = false;
    Place place = kNoPlace;
    bool present() const { return line != nullptr; }
  };
  // An entry out of its segment.
  struct Loose {
    std::uint64_t bits;
    std::uint64_t packed;
    bool shared;
  };

  // Of bits of a hash and a number of lines.
  using Product = std::conditional_t<Line::kHashBits + 32 <= 64, std::uint64_t, Uint128>;

  static std::uint64_t IdentityOf(std::uint64_t hash) {
    return hash >> (64 - kSegmentBits - Line::kHashBits);
  }
  static std::uint64_t SegmentOf(std::uint64_t hash) { return hash >> (64 - kSegmentBits); }
  static std::uint64_t BitsOf(std::uint64_t hash) {
    return hash << kSegmentBits >> (64 - Line::kHashBits);
  }
  static std::uint32_t HomeOf(std::uint64_t bits, std::uint32_t lines);
  static std::size_t ClassOf(std::size_t s) { return s % LineExtents::kClasses; }
  // A line, before the list of extents has been read.
  struct Wanted {
    const std::uint32_t* extent;  // The number of its first line.
    std::uint32_t beyond;         // Lines of it before the wanted one.
  };
  // REQUIRES: segment s has so many lines.
  Wanted WantedOf(std::size_t s, std::uint32_t number) const {
    const LineExtents::Spot spot = kLineExtents.Find(ClassOf(s), number);
    return {&extents_[spot.extent][s], spot.beyond};
  }
  Line* LineAt(Wanted wanted) const { return arena_.At(*wanted.extent) + wanted.beyond; }
  Line* LineAt(std::size_t s, std::uint32_t number) const { return LineAt(WantedOf(s, number)); }
  std::uint64_t Pack(Place place) const;
  Place Unpack(std::uint64_t packed) const;

  // The line after `number`, for a key that has tried so many.
  static std::uint32_t NextLine(std::uint64_t bits, std::uint32_t number, std::uint32_t tried,
                                std::uint32_t lines);
  // From the home line on, until a line has such an entry or says that nothing went past it.
  struct Walk {
    std::uint32_t segment = 0;
    std::uint32_t lines = 0;   // Of the segment; 0: there is nothing to look into.
    std::uint32_t number = 0;  // Of the line.
    std::uint32_t tried = 0;   // Lines, this one included.
    Line* line = nullptr;      // Once it is known where it lies.
  };
  Walk StartWalk(std::uint64_t hash) const;
  // Looks into one line; false: there is a next one. kToRoom: for an absent key goes on to the line
  // where it would be put.
  template <bool kToRoom>
  bool Step(std::uint64_t hash, Walk* walk, Spot* spot) const;
  const Other* FindOther(std::uint64_t hash) const;
  Spot Find(std::uint64_t hash) const;
  // Calls visit(i, spot) for each hash, in their order, with the misses of many of them in flight.
  template <bool kToRoom, typename Visit>
  void ForEachFound(std::span<const std::uint64_t> hashes, Visit visit) const;
  void SetPlace(std::uint64_t hash, const Spot& spot, Place place);
  void Remove(std::uint64_t hash, const Spot& spot);
  // REQUIRES: the line has room.
  static void Append(Line* line, const Loose& entry);
  // REQUIRES: a line has room. line_of(number) leads to it.
  template <typename LineOf>
  static void InsertEntry(const Loose& entry, std::uint32_t lines, LineOf line_of);
  // Where each line of a segment lies, for who goes over all of them, also while another thread
  // takes lines for other segments.
  using SegmentLines = RawVector<Line*>;
  SegmentLines LinesOf(std::size_t s) const;
  // Gives segment s empty lines for `count` entries, if it has not so many.
  Status TakeLines(std::size_t s, std::uint64_t count);
  // The same, and has its entries lie where they belong among the lines that there are then.
  Status Grow(std::size_t s, std::uint64_t count);
  Loose EntryOf(std::size_t s, const Line& line, std::uint32_t way) const;
  // Moves the entries of the first `before` lines, which were all, to where they are at home among
  // those that the segment has now, at most twice as many; the others go to `loose_`.
  void SpreadLines(std::size_t s, const SegmentLines& lines, std::uint32_t before);
  // Puts the keys of a segment that has none into its lines; those that are alike go to `others`.
  void FillSegment(const SegmentLines& lines, std::span<const KeyPlace> keys,
                   std::vector<Other>* others) const;
  // A key that is to be put into a line, whose home is full.
  struct Homeless {
    std::uint32_t key, line, way;
  };
  // Finds lines for them as InsertEntry does, all of them a hop at a time and without a branch on
  // what has room, which nobody could foresee. counts, passed: of the lines. settled: has room for
  // one more than there are.
  static void HopOn(const typename Line::Word* bits, std::span<Homeless> homeless,
                    std::span<std::uint8_t> counts, std::uint8_t* passed, Homeless* settled);

  const int row_bits_;
  Mutex fill_mu_;                  // Held by Fill while it changes what segments share.
  std::vector<Segment> segments_;  // None in an index that never had a key.
  LineArena arena_;
  // Of each extent where it lies in each segment; made when the first segment needs it.
  std::vector<std::unique_ptr<std::uint32_t[]>> extents_;
  std::vector<Loose> loose_;  // Entries of a segment that grows, without a line.
  std::unordered_multimap<std::uint64_t, Other> others_;  // By IdentityOf.
  std::uint64_t size_ = 0;
};

using KeyIndex = SegmentedIndex<TaggedLine>;
using ExactIndex = SegmentedIndex<ExactLine>;
extern template class SegmentedIndex<TaggedLine>;
extern template class SegmentedIndex<ExactLine>;

}  // namespace terrace
