#include "terrace/cache/ghost_keys.h"

#include <algorithm>
#include <bit>
#include <new>
#include <string>

namespace terrace {

std::uint64_t GhostKeys::BytesFor(std::uint64_t rows) {
  constexpr std::uint64_t kKeys = std::uint64_t{kLines} * kWays;
  return (rows + kKeys - 1) / kKeys * sizeof(Segment);
}

Status GhostKeys::Reserve(std::uint64_t rows) {
  const std::uint64_t wanted = BytesFor(rows) / sizeof(Segment);
  if (wanted < segments_.size()) segments_.resize(wanted);
  while (segments_.size() < wanted) {
    std::unique_ptr<Segment> segment(new (std::nothrow) Segment());
    if (segment == nullptr) {
      return OutOfMemoryError("asked the system for " + std::to_string(sizeof(Segment)) +
                              " bytes for the keys of evicted rows");
    }
    segments_.push_back(std::move(segment));
  }
  line_count_ = (rows + kWays - 1) / kWays;
  return OkStatus();
}

void GhostKeys::SetWindow(std::uint64_t keys) {
  keys_a_time_ = std::max<std::uint64_t>(1, keys / kTimesInWindow);
  times_in_window_ = static_cast<std::uint32_t>(keys / keys_a_time_);
}

void GhostKeys::Add(std::uint64_t hash) {
  if (++added_ >= keys_a_time_) {
    added_ = 0;
    ++time_;
  }
  // An empty place, or that of the oldest; without branches, for vector instructions.
  Line& line = *LineOf(hash);
  std::uint32_t best = 0;
  for (std::uint32_t way = 0; way < kWays; ++way) {
    const std::uint32_t ghost = line.ghosts[way];
    const std::uint32_t age = ghost == 0 ? kTimeMask + 1 : Age(ghost);
    best = std::max(best, age * kWays + way);
  }
  line.ghosts[best % kWays] = MarkOf(hash) | (time_ & kTimeMask);
}

bool GhostKeys::Take(std::uint64_t hash) {
  Line& line = *LineOf(hash);
  const std::uint32_t mark = MarkOf(hash);
  std::uint32_t matches = 0;
  for (std::uint32_t way = 0; way < kWays; ++way) {
    matches |= static_cast<std::uint32_t>((line.ghosts[way] & ~kTimeMask) == mark) << way;
  }
  if (matches == 0) return false;
  std::uint32_t& ghost = line.ghosts[static_cast<std::size_t>(std::countr_zero(matches))];
  const bool recent = Age(ghost) < times_in_window_;
  ghost = 0;
  return recent;
}

}  // namespace terrace
