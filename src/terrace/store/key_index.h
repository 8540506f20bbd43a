// The indexes by key. KeyIndex takes less than 8 bytes a key: an entry holds 24 bits of the hash
// and 32 of the place, and the record on disk decides whether it is the key's. ExactIndex takes 14
// and is never wrong. Both are 4096 segments by the top bits of the hash, each a table of cache
// lines of its own (double hashing from line to line) that grows by a tenth at a time
// (LineExtents), so that growth neither pauses a batch nor doubles memory; what segments grow by,
// sixteen at a time, is never given back. The home lines of a segment's keys follow their hashes,
// so that sorted keys fill it from line to line.
//
// Keys that an entry can't tell apart, because the 36 bits of segment and entry are equal: the
// first has the entry, the others lie in a map by their whole hash, and the entry's line says that
// there are some.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
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
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return MatchInOneRegister(bits);
#elif defined(__SSE2__)
    return MatchInTwoRegisters(bits);
#else
    return MatchOneByOne(bits);
#endif
  }
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  std::uint32_t MatchInOneRegister(std::uint64_t bits) const {
    // The last 32 bytes: `low` begins with their third word, `high` with their 23rd byte.
    const __m256i last = _mm256_load_si256(reinterpret_cast<const __m256i*>(this) + 1);
    const std::uint32_t equal_low =
        _mm256_cmpeq_epi16_mask(last, _mm256_set1_epi16(static_cast<short>(bits))) >> 2;
    const std::uint32_t equal_high =
        _mm256_cmpeq_epi8_mask(last, _mm256_set1_epi8(static_cast<char>(bits >> 16))) >> 22;
    return equal_low & equal_high & Present();
  }
#endif
#if defined(__SSE2__)
  std::uint32_t MatchInTwoRegisters(std::uint64_t bits) const {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
    const __m128i wanted = _mm_set1_epi16(static_cast<short>(bits));
    // Eight masks of 16 bits to bytes, to bits.
    auto equal = static_cast<std::uint32_t>(
        _mm_movemask_epi8(_mm_packs_epi16(_mm_cmpeq_epi16(first, wanted), _mm_setzero_si128())));
    equal |= static_cast<std::uint32_t>(low[8] == static_cast<std::uint16_t>(bits)) << 8;
    // The line's last 16 bytes, of which all nine of `high` are the seventh and those behind it.
    const __m128i last = _mm_load_si128(reinterpret_cast<const __m128i*>(this) + 3);
    const __m128i wanted_high = _mm_set1_epi8(static_cast<char>(bits >> 16));
    equal &= static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(last, wanted_high))) >> 6;
    return equal & Present();
  }
#endif
  std::uint32_t MatchOneByOne(std::uint64_t bits) const {
    std::uint32_t equal = 0;
    for (std::uint32_t way = 0; way < kWays; ++way) {
      equal |= static_cast<std::uint32_t>(this->bits(way) == bits) << way;
    }
    return equal & Present();
  }
  // A bit for each entry that there is.
  std::uint32_t Present() const { return (1u << state.count) - 1; }
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
static_assert(sizeof(TaggedLine) == 64 && offsetof(TaggedLine, low) == 32 + 4 &&
              offsetof(TaggedLine, high) == 48 + 6);

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
  // File slots that have a place where rows of a file have numbers below 2^row_bits.
  static constexpr std::uint32_t SlotsFor(int row_bits) {
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(std::uint64_t{1} << (Line::kPlaceBits - row_bits), kMaxFileSlots));
  }
  // Rows of a file have numbers below 2^row_bits; the fewer, the more files have places.
  explicit SegmentedIndex(int row_bits = kRowBits);

  bool Alike(std::uint64_t hash, std::uint64_t other) const override {
    return IdentityOf(hash) == IdentityOf(other);
  }
  std::uint32_t max_slots() const override;
  void Lookup(std::span<const std::uint64_t> hashes, Place* places) const override;
  Status Reserve(std::span<const std::uint64_t> new_hashes, std::uint64_t expected) override;
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
  static constexpr std::size_t kGroupSegments = 16;
  static constexpr std::size_t kGroups = kSegments / kGroupSegments;

  // Memory of extents, from chunks of which the system gives what is used.
  class LineArena {
   public:
    // So many empty lines in a row. kOutOfMemory.
    Result<Line*> Take(std::uint64_t lines);
    std::uint64_t bytes() const;

   private:
    std::vector<HugeBuffer> chunks_;
    std::uint64_t used_ = 0;  // Bytes of the last one,
    std::uint64_t full_ = 0;  // and of those before it.
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
  static std::size_t GroupOf(std::size_t s) { return s / kGroupSegments; }
  static std::size_t ClassOf(std::size_t s) { return GroupOf(s) % LineExtents::kClasses; }
  Line** Extent(std::size_t extent) const {
    return reinterpret_cast<Line**>(extents_.data()) + extent * kGroups;
  }
  // REQUIRES: segment s has so many lines.
  [[gnu::always_inline]] Line* LineAt(std::size_t s, std::uint32_t number) const {
    const LineExtents::Spot spot = kLineExtents.Find(ClassOf(s), number);
    return Extent(spot.extent)[GroupOf(s)] + (s % kGroupSegments * spot.size + spot.beyond);
  }
  std::uint64_t Pack(Place place) const;
  Place Unpack(std::uint64_t packed) const;

  // The line after `number`, for a key that has tried so many.
  static std::uint32_t NextLine(std::uint64_t bits, std::uint32_t number, std::uint32_t tried,
                                std::uint32_t lines);
  const Other* FindOther(std::uint64_t hash) const;
  Spot Find(std::uint64_t hash) const;
  // A key in a batch, by its number there, and the line that it is looked for in: its home line,
  // then others until one has its bits or says that nothing went past it.
  struct Sought {
    std::uint32_t key;
    std::uint32_t number;
    std::uint32_t tried;  // Lines, this one included.
  };
  // The keys from `first` on, and where their home lines lie.
  void HomeLines(std::span<const std::uint64_t> hashes, std::size_t first, std::span<Sought> sought,
                 Line** lines) const;
  // Leaves those that have a next line, and says how many there are and where these lie.
  std::size_t NextLines(std::span<const std::uint64_t> hashes, std::span<Sought> sought,
                        Line** lines) const;
  // Leaves those that go on to a next line, and says how many. tell(asked, line, way, found) of
  // all, and tell(key, other) of those that are among the others. kToRoom: an absent key goes on to
  // the first line that has room.
  template <bool kToRoom, typename Tell>
  std::size_t LookInto(std::span<const std::uint64_t> hashes, std::span<Sought> sought,
                       Line* const* lines, Tell tell) const;
  // What is told last of a key holds. The misses of many keys are in flight.
  template <bool kToRoom, typename Tell>
  void FindEach(std::span<const std::uint64_t> hashes, Tell tell) const;
  // The first line on a key's way that has room, as Sought says where.
  struct Room {
    Line* line = nullptr;
    std::uint32_t number = 0;
    std::uint32_t tried = 0;
  };
  struct TellPlaces;
  struct TellSpots;
  struct TellRooms;
  // Calls visit(i, spot) for each hash, in their order.
  template <typename Visit>
  void ForEachFound(std::span<const std::uint64_t> hashes, Visit visit) const;
  void SetPlace(std::uint64_t hash, const Spot& spot, Place place);
  void Remove(std::uint64_t hash, const Spot& spot);
  // REQUIRES: the line has room.
  static void Append(Line* line, const Loose& entry);
  // Into the first line that has room, from `number` on, of which `tried` says as in Sought.
  // REQUIRES: one has. line_of(number) leads to it.
  template <typename LineOf>
  static void InsertEntry(const Loose& entry, std::uint32_t lines, std::uint32_t number,
                          std::uint32_t tried, LineOf line_of);
  // A key that is not there, by what was found of it.
  void InsertAt(std::uint64_t hash, Place place, const Spot& spot, const Room& room);
  // The key has not gone past the lines from its home to one of these two, after all.
  void Unpass(std::uint64_t hash, const Line* end, const Line* other_end);
  // Where each line of a segment lies, for who goes over all of them, also while another thread
  // takes lines for other segments.
  using SegmentLines = RawVector<Line*>;
  SegmentLines LinesOf(std::size_t s) const;
  Status MakeSegments();
  // Of a segment, so that `count` entries are at most such a share of what they have room for.
  static std::uint64_t LinesFor(std::uint64_t count, double load) {
    return static_cast<std::uint64_t>(static_cast<double>(count) / (load * Line::kWays)) + 1;
  }
  // Gives segment s empty lines for `count` entries, if it has not so many, and then for as many as
  // are expected; the first of its group waits for the others as long as it has room without.
  Status TakeLines(std::size_t s, std::uint64_t count, std::uint64_t expected);
  // The same, and has its entries lie where they belong among the lines that there are then.
  Status Grow(std::size_t s, std::uint64_t count, std::uint64_t expected);
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
  Mutex fill_mu_;  // Held by Fill while it changes what segments share.
  // Of each segment its lines and its entries. None in an index that never had a key.
  std::vector<std::uint32_t> lines_, counts_;
  std::array<std::uint64_t, kGroups> group_counts_{};  // Entries.
  LineArena arena_;
  HugeBuffer extents_;  // (extent, group) Where it begins; null before the group needs it.
  std::size_t extents_used_ = 0;
  std::vector<Loose> loose_;  // Entries of a segment that grows, without a line.
  std::unordered_multimap<std::uint64_t, Other> others_;  // By IdentityOf.
  std::uint64_t size_ = 0;
};

using KeyIndex = SegmentedIndex<TaggedLine>;
using ExactIndex = SegmentedIndex<ExactLine>;
extern template class SegmentedIndex<TaggedLine>;
extern template class SegmentedIndex<ExactLine>;

}  // namespace terrace
