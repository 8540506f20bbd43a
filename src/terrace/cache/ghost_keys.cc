#include "terrace/cache/ghost_keys.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "terrace/base/check.h"

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
  Line& line = *LineOf(hash);
  const std::uint32_t mark = MarkOf(hash);
  std::uint32_t* oldest = &line.ghosts[0];
  std::uint32_t oldest_age = 0;
  for (std::uint32_t& ghost : line.ghosts) {
    if (ghost == 0) {
      oldest = &ghost;
      break;
    }
    const std::uint32_t age = Age(ghost);
    if (age < oldest_age) continue;
    oldest = &ghost;
    oldest_age = age;
  }
  *oldest = mark | (time_ & kTimeMask);
}

bool GhostKeys::Take(std::uint64_t hash) {
  Line& line = *LineOf(hash);
  const std::uint32_t mark = MarkOf(hash);
  for (std::uint32_t& ghost : line.ghosts) {
    if ((ghost & ~kTimeMask) != mark) continue;
    const bool recent = Age(ghost) < times_in_window_;
    ghost = 0;
    return recent;
  }
  return false;
}

}  // namespace terrace
