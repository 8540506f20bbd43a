// FutureKeys: the keys that examples to come will ask for, as far as the stream of examples was
// looked at ahead of training, and when. What will be asked for soon stays in memory, as in
// Bélády's optimal order of eviction (A study of replacement algorithms for a virtual-storage
// computer, IBM Systems Journal 1966), of which this knows as much as it has room for; what comes
// later leaves, but one knows when it will be back.
// What is known is a ring of stretches, parts of the stream one after another, each a table of
// lines of 24 keys: 16 bits of a key's hash, and in which sixteenth of the stretch it is asked for
// last. So a key takes 2.7 bytes in each stretch that asks for it. A stretch is forgotten as a
// whole, when all of it is past. A key that does not come may be taken for one that does (in 3 of
// 10,000 look-ups for each full stretch). One whose line is full is in one of the next two, or,
// when they are full too, not known. Threads: Add, SetNow, CanAdd and coming one thread at a time;
// the others any, beside it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/status.h"

namespace terrace {

class FutureKeys {
 public:
  // Memory of so many bytes, in whole pages. kOutOfMemory. REQUIRES: bytes > 0.
  static Result<std::unique_ptr<FutureKeys>> Create(std::uint64_t bytes);

  // Examples up to `example`, at most kTickExamples of them, ask for these keys. Calls come in the
  // order of the examples. REQUIRES: example is no later than one that CanAdd was asked for.
  void Add(std::span<const Key> keys, std::uint64_t example);
  // Examples before `example` have got their rows: what only they asked for is forgotten.
  void SetNow(std::uint64_t example);
  // Whether there is room, and the time is not too far ahead.
  bool CanAdd(std::uint64_t example) const;
  // Keys that are known to come; one that several stretches ask for counts in each. A gauge.
  std::uint64_t coming() const;

  // Where examples have got their rows up to, in ticks.
  std::uint64_t now() const { return now_.load(std::memory_order_relaxed); }
  // What TicksUntilNext will read; of a key that is likely to come soon only what it reads first.
  [[gnu::always_inline]] void Prefetch(std::uint64_t hash, bool comes_soon = false) const {
    const Lines& lines = LinesOf(hash);
    std::uint32_t left = comes_soon ? kSoonStretches : kStretches;
    ForStretches(now(), [&](std::uint32_t number, auto&) {
      __builtin_prefetch(&lines[number]);
      return --left == 0;
    });
  }
  // How many ticks from now on the key is asked for, as far as that is known: the last time in the
  // first stretch that asks for it, to a sixteenth of the stretch. At most kNever - 1.
  std::uint16_t TicksUntilNext(std::uint64_t hash) const {
    const std::uint64_t from = now();
    const std::uint64_t next = NextTick(hash, from);
    return next == kNoTick
               ? kNever
               : static_cast<std::uint16_t>(std::min<std::uint64_t>(next - from, kNever - 1));
  }
  static constexpr std::uint16_t kNever = 65535;

  // Memory for each row that the caches hold: about 21 known keys, a frequent one counted in each
  // stretch. In a click log that is eight times the distance within which rows that come again fill
  // memory: of rows that come later than one sees, each costs a read of its own
  // (docs/decisions/look-ahead.md).
  static constexpr std::uint64_t kBytesPerCachedRow = 56;
  // Examples that have one time.
  static constexpr std::uint64_t kTickExamples = 2048;

 private:
  static constexpr std::uint32_t kStretches = 8, kSoonStretches = 2;
  // So that what the ring knows is less than kNever ticks away.
  static constexpr std::uint64_t kMostStretchTicks = kNever / kStretches;
  static constexpr std::uint64_t kNoTick = ~std::uint64_t{0};
  static constexpr std::uint32_t kRecent = 4096;  // Keys.

  // A key is 16 bits of its hash, its mark (0: none), four to a word, and four bits of time,
  // sixteen to a word. Words are read and written whole, relaxed, by one writer; what a reader sees
  // late costs a read of the disk at most.
  static constexpr std::uint32_t kMarkWords = 6, kTimeWords = 2;
  static constexpr std::uint32_t kWays = kMarkWords * 4;
  static constexpr std::uint64_t kTimes = 16;
  struct alignas(64) Line {
    std::array<std::uint64_t, kMarkWords> marks;
    std::array<std::uint64_t, kTimeWords> times;  // And, in the upper half of the last, kPassed.
  };
  static_assert(sizeof(Line) == 64);
  // Three bits of each key that found the line full and went on to the next, so that few others are
  // sought there.
  static constexpr std::uint64_t kPassed = 0xffff'ffff'0000'0000;
  static std::uint64_t PassedBits(std::uint64_t mark) {
    const auto bit = [mark](int from) { return std::uint64_t{1} << (mark >> from & 31); };
    return (bit(0) | bit(5) | bit(10)) << 32;
  }
  static bool HasPassed(Line& line, std::uint64_t passed_bits) {
    return (Load(line.times[1]) & passed_bits) == passed_bits;
  }
  static constexpr int kMostHops = 2;
  // The lines of all stretches for the same hashes, beside each other: a look-up reads one place.
  using Lines = std::array<Line, kStretches>;
  static std::uint64_t Load(std::uint64_t& word) {
    return std::atomic_ref(word).load(std::memory_order_relaxed);
  }
  static void Store(std::uint64_t& word, std::uint64_t value) {
    std::atomic_ref(word).store(value, std::memory_order_relaxed);
  }
  // The four bits of time of a way: which word, and where in it.
  static std::uint64_t& TimeWord(Line& line, std::uint32_t way) { return line.times[way / 16]; }
  static std::uint32_t TimeShift(std::uint32_t way) { return way % 16 * 4; }
  static std::uint64_t TimeIn(Line& line, std::uint32_t way) {
    return Load(TimeWord(line, way)) >> TimeShift(way) & (kTimes - 1);
  }

  // Written by the adding thread; a look-up may see them as of different moments, with what follows
  // from it as above.
  struct Stretch {
    std::atomic<std::uint64_t> start{0}, end{0};  // Ticks; the end is beyond the last.
    std::atomic<std::uint64_t> unit{1};           // Ticks that have one time.
    std::uint64_t keys = 0;                       // The adding thread's.
  };

  FutureKeys(HugeBuffer memory, std::uint64_t lines);
  Lines& LinesOf(std::uint64_t hash) const { return lines_[RangeOfHash(hash, line_count_)]; }
  Lines* NextOf(Lines* lines) const {
    return lines + 1 == lines_ + line_count_ ? lines_ : lines + 1;
  }
  // Of all bits, because high ones choose the line. Never 0.
  static std::uint64_t MarkOf(std::uint64_t hash) {
    const std::uint64_t mark = (hash * 0xd6e8feb86659fd93ULL) >> 48;
    return mark == 0 ? 1 : mark;
  }
  // A bit for each way of the line that has the mark.
  static std::uint32_t FindWays(Line& line, std::uint64_t mark) {
#if defined(__SSE2__)
    const __m128i wanted = _mm_set1_epi16(static_cast<short>(mark));
    const auto equal = [&](std::size_t word) {  // In two words.
      return _mm_cmpeq_epi16(wanted,
                             _mm_set_epi64x(static_cast<long long>(Load(line.marks[word + 1])),
                                            static_cast<long long>(Load(line.marks[word]))));
    };
    const auto low =
        static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(equal(0), equal(2))));
    const auto high = static_cast<std::uint32_t>(
        _mm_movemask_epi8(_mm_packs_epi16(equal(4), _mm_setzero_si128())));
    return high << 16 | low;
#else
    std::uint32_t found = 0;
    for (std::uint32_t way = 0; way < kWays; ++way) {
      const std::uint64_t other = Load(line.marks[way / 4]) >> (way % 4 * 16) & 0xffff;
      found |= static_cast<std::uint32_t>(other == mark) << way;
    }
    return found;
#endif
  }
  // Calls visit(number, stretch) for those that are not past at `from`, the oldest first, until it
  // returns true.
  template <typename Visit>
  void ForStretches(std::uint64_t from, const Visit& visit) const {
    const std::uint32_t newest = newest_.load(std::memory_order_relaxed);
    for (std::uint32_t i = 1; i <= kStretches; ++i) {
      const std::uint32_t number = (newest + i) % kStretches;
      const Stretch& stretch = stretches_[number];
      if (stretch.end.load(std::memory_order_relaxed) <= from) continue;
      if (visit(number, stretch)) return;
    }
  }
  struct Spot {
    Line* line;
    std::uint32_t ways;  // A bit for each that fits.
  };
  // Where a stretch has the key whose home is `lines`.
  Spot Find(Lines* lines, std::uint32_t stretch, std::uint64_t mark,
            std::uint64_t passed_bits) const {
    for (int hops = 0;; ++hops, lines = NextOf(lines)) {
      Line& line = (*lines)[stretch];
      const std::uint32_t ways = FindWays(line, mark);
      if (ways != 0 || hops == kMostHops || !HasPassed(line, passed_bits)) return {&line, ways};
    }
  }
  // The first known tick from `from` on that asks for the key, or kNoTick.
  std::uint64_t NextTick(std::uint64_t hash, std::uint64_t from) const {
    Lines* const lines = &LinesOf(hash);
    const std::uint64_t mark = MarkOf(hash), passed_bits = PassedBits(mark);
    std::uint64_t next = kNoTick;
    ForStretches(from, [&](std::uint32_t number, const Stretch& stretch) {
      const Spot found = Find(lines, number, mark, passed_bits);
      if (found.ways == 0) return false;
      const std::uint64_t time = TimeIn(*found.line, std::countr_zero(found.ways));
      const std::uint64_t unit = stretch.unit.load(std::memory_order_relaxed);
      const std::uint64_t tick = stretch.start.load(std::memory_order_relaxed) + time * unit;
      if (tick + unit <= from) return false;
      next = std::max(tick, from);
      return true;
    });
    return next;
  }

  // Of a stretch. Beyond seven eighths of the ways too many keys go on, or find no room.
  std::uint64_t MostKeys() const { return line_count_ * (kWays * 7 / 8); }
  bool NextIsFree() const;
  // The next stretch begins, if it is free.
  void BeginStretch(std::uint64_t tick);
  // Makes the units of the newest stretch so long that the tick is in one of them.
  std::uint64_t TimeOf(std::uint64_t tick);
  // Where a stretch has room for a key that it has not; those who find it full leave their bits.
  Spot FindRoom(Lines* lines, std::uint32_t stretch, std::uint64_t passed_bits);
  void AddToLines(std::span<const std::uint64_t> hashes, std::uint64_t time);

  const HugeBuffer memory_;
  Lines* const lines_;
  const std::uint64_t line_count_;  // Of each stretch.
  std::array<Stretch, kStretches> stretches_;
  std::atomic<std::uint32_t> newest_{0};
  std::atomic<std::uint64_t> now_{0};  // Ticks.
  // The adding thread's.
  std::vector<std::uint64_t> recent_;  // Hashes in the newest stretch with recent_time_.
  std::uint64_t recent_time_ = 0;
};

}  // namespace terrace
