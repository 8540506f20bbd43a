// GhostKeys: keys that left the cache not long ago, the last `window` of them: 20 bits of a key's
// hash and a coarse time of leaving, sixteen to a cache line, the oldest of a line making room. A
// key may be taken for another (below 2 in 100,000 look-ups), and some are lost early, where a line
// gets more than its share (about 4 in 100 when the window is nine tenths of the room). Threads:
// guarded by its owner.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/base/status.h"

namespace terrace {

class GhostKeys {
 public:
  // Memory for as many keys as `rows`.
  static std::uint64_t BytesFor(std::uint64_t rows);
  // Keys that are here are lost when the size changes. kOutOfMemory: nothing changed.
  Status Reserve(std::uint64_t rows);
  std::uint64_t bytes() const { return segments_.size() * sizeof(Segment); }
  // Keys that left before so many others are no longer found.
  void SetWindow(std::uint64_t keys);

  [[gnu::always_inline]] void Prefetch(std::uint64_t hash) const {
    if (!segments_.empty()) __builtin_prefetch(LineOf(hash), 1);
  }
  // REQUIRES: Reserve was called with some rows; likewise Take.
  void Add(std::uint64_t hash);
  // Whether the key left within the window; it is forgotten.
  bool Take(std::uint64_t hash);

 private:
  static constexpr std::uint32_t kWays = 16;
  static constexpr std::uint32_t kLines = 256;  // Of a segment.
  static constexpr int kTimeBits = 12;
  static constexpr std::uint32_t kTimeMask = (std::uint32_t{1} << kTimeBits) - 1;
  static constexpr std::uint32_t kTimesInWindow = 1024;  // A quarter of what the bits tell apart.
  // Each: hash bits above, time below; 0: empty. What left before the bits can tell would look
  // young again, but by then its line has been filled several times over.
  struct alignas(64) Line {
    std::array<std::uint32_t, kWays> ghosts;
  };
  using Segment = std::array<Line, kLines>;

  Line* LineOf(std::uint64_t hash) const {
    const std::uint64_t line = RangeOfHash(hash, line_count_);
    return &(*segments_[line / kLines])[line % kLines];
  }
  // Of all bits, because high ones choose the line and low ones are equal on a node. Never 0.
  static std::uint32_t MarkOf(std::uint64_t hash) {
    const auto mark = static_cast<std::uint32_t>((hash * 0xd6e8feb86659fd93ULL) >> 32);
    return (mark >> kTimeBits == 0 ? mark | 1U << kTimeBits : mark) & ~kTimeMask;
  }
  std::uint32_t Age(std::uint32_t ghost) const { return (time_ - ghost) & kTimeMask; }

  std::vector<std::unique_ptr<Segment>> segments_;
  std::uint64_t line_count_ = 0;  // In use; the last segment may have more.
  std::uint64_t keys_a_time_ = 1;
  std::uint32_t times_in_window_ = 0;
  std::uint64_t added_ = 0;  // At this time.
  std::uint32_t time_ = 0;
};

}  // namespace terrace
