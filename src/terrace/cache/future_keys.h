// FutureKeys: the keys that examples to come will ask for, as far as the stream of examples was
// looked at ahead of training, each with the last time at which it is known to be asked for: 20
// bits of a key's hash and a coarse time, sixteen to a cache line. What will be asked for again
// stays in memory, as in Bélády's optimal order of eviction (A study of replacement algorithms for
// a virtual-storage computer, IBM Systems Journal 1966), of which this knows as much as it has room
// for. A key may be taken for another (2 in 100,000), and one whose line is full is not known.
// Threads: Add, SetNow, CanAdd and coming one thread at a time; the others any, beside it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/status.h"

namespace terrace {

class FutureKeys {
 public:
  // Memory of so many bytes, in whole lines. kOutOfMemory. REQUIRES: bytes > 0.
  static Result<std::unique_ptr<FutureKeys>> Create(std::uint64_t bytes);

  // Examples up to `example`, at most kTickExamples of them, ask for these keys. Calls come in the
  // order of the examples. REQUIRES: example is no later than one that CanAdd was asked for.
  void Add(std::span<const Key> keys, std::uint64_t example);
  // Examples before `example` have got their rows: what only they asked for is forgotten.
  void SetNow(std::uint64_t example);
  // Whether there is room, and the time is not too far ahead.
  bool CanAdd(std::uint64_t example) const;
  // Keys that are known to come.
  std::uint64_t coming() const { return coming_; }

  void Prefetch(std::uint64_t hash) const { __builtin_prefetch(LineOf(hash)); }
  // Whether an example to come asks for the key with this mixed hash (MixKey).
  bool Coming(std::uint64_t hash) const {
    Line& line = *LineOf(hash);
    const std::uint32_t mark = MarkOf(hash);
    // Relaxed here and elsewhere: a change that is seen late costs a read of the disk at most.
    const std::uint32_t now = now_.load(std::memory_order_relaxed);
    bool coming = false;
    for (std::uint32_t way = 0; way < kWays; ++way) {
      const std::uint32_t word = Load(line, way);
      coming |= (word & ~kTimeMask) == mark && IsAhead(word, now);
    }
    return coming;
  }

  // Memory for each row that the caches hold: three keys that come for each are as many as are of
  // use (docs/decisions/look-ahead.md).
  static constexpr std::uint64_t kBytesPerCachedRow = 14;
  // Examples that have one time.
  static constexpr std::uint64_t kTickExamples = 2048;

 private:
  static constexpr std::uint32_t kWays = 16;
  static constexpr int kTimeBits = 12;
  static constexpr std::uint32_t kTimeMask = (std::uint32_t{1} << kTimeBits) - 1;
  // A quarter of what the bits tell apart. What is past would look as if it came again three
  // quarters later, but by then it was swept out.
  static constexpr std::uint32_t kMostTicksAhead = std::uint32_t{1} << (kTimeBits - 2);
  static constexpr std::uint32_t kTicksOfSweep = std::uint32_t{1} << (kTimeBits - 1);
  static constexpr std::uint32_t kRecent = 4096;  // Keys.
  // Each: hash bits above, time below; 0: empty.
  struct alignas(64) Line {
    std::array<std::uint32_t, kWays> ways;
  };
  static std::uint32_t Load(Line& line, std::uint32_t way) {
    return std::atomic_ref(line.ways[way]).load(std::memory_order_relaxed);
  }
  static void Store(Line& line, std::uint32_t way, std::uint32_t word) {
    std::atomic_ref(line.ways[way]).store(word, std::memory_order_relaxed);
  }

  FutureKeys(HugeBuffer memory, std::uint64_t lines);
  Line* LineOf(std::uint64_t hash) const {
    return lines_ + static_cast<std::uint64_t>((static_cast<Uint128>(hash) * line_count_) >> 64);
  }
  // Of all bits, because high ones choose the line. Never 0.
  static std::uint32_t MarkOf(std::uint64_t hash) {
    const auto mark = static_cast<std::uint32_t>((hash * 0xd6e8feb86659fd93ULL) >> 32);
    return (mark >> kTimeBits == 0 ? mark | 1U << kTimeBits : mark) & ~kTimeMask;
  }
  static bool IsAhead(std::uint32_t word, std::uint32_t now) {
    return ((word - now) & kTimeMask) <= kMostTicksAhead;
  }
  void AddToLine(std::uint64_t hash, std::uint32_t time);
  // Empties the places of past keys in a line.
  void SweepLine(std::uint64_t line);

  const HugeBuffer memory_;
  Line* const lines_;
  const std::uint64_t line_count_;
  std::atomic<std::uint32_t> now_{0};  // Ticks, modulo their bits.
  // The adding thread's.
  std::uint64_t now_tick_ = 0;
  std::uint64_t coming_ = 0;
  std::uint64_t swept_lines_ = 0;                          // Of the sweep that goes on.
  std::array<std::uint32_t, kTimeMask + 1> asked_last_{};  // By time: keys.
  std::vector<std::uint64_t> recent_;  // Added at recent_tick_: what is asked for often.
  std::uint64_t recent_tick_ = ~std::uint64_t{0};
};

}  // namespace terrace
