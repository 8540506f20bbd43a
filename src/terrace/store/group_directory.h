// GroupDirectory: which block a key lies in (docs/formats/group_block.md). First blocks of groups
// follow from the number of groups; the starts of the others are kept in order, in segments by the
// top bits of the hash. Threads: guarded by the owner.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "terrace/base/rng.h"

namespace terrace {

class GroupDirectory {
 public:
  // REQUIRES: 0 < groups <= kMostGroups.
  explicit GroupDirectory(std::uint64_t groups)
      : groups_(groups),
        shift_(64 - std::clamp(static_cast<int>(std::bit_width(groups / kSegmentGroups)),
                               kLeastSegmentBits, kMostSegmentBits)),
        segments_(std::size_t{1} << (64 - shift_)) {}
  // Starts further apart than the bits that an index can tell apart.
  static constexpr std::uint64_t kMostGroups = std::uint64_t{1} << 36;

  std::uint64_t groups() const { return groups_; }
  std::uint64_t GroupOf(std::uint64_t hash) const { return RangeOfHash(hash, groups_); }
  // Where the first block of a group starts.
  std::uint64_t FirstStart(std::uint64_t group) const { return FirstHashOf(group, groups_); }
  // Where the block starts that a hash lies in.
  std::uint64_t StartOf(std::uint64_t hash) const {
    const std::uint64_t first = FirstStart(GroupOf(hash));
    for (std::size_t s = SegmentOf(hash);; --s) {
      const std::vector<std::uint64_t>& starts = segments_[s];
      const auto after = std::upper_bound(starts.begin(), starts.end(), hash);
      // It may be of a group before.
      if (after != starts.begin()) return std::max(first, *(after - 1));
      if (s == SegmentOf(first)) return first;
    }
  }
  // The last hash of that block.
  std::uint64_t LastOf(std::uint64_t hash) const {
    const std::uint64_t last = LastHash(GroupOf(hash));
    for (std::size_t s = SegmentOf(hash); s <= SegmentOf(last); ++s) {
      const std::vector<std::uint64_t>& starts = segments_[s];
      const auto after = std::upper_bound(starts.begin(), starts.end(), hash);
      if (after != starts.end()) return std::min(last, *after - 1);
    }
    return last;
  }
  bool IsDivided(std::uint64_t group) const {
    return StartOf(LastHash(group)) != FirstStart(group);
  }
  // Starts of the group's blocks, in order.
  std::vector<std::uint64_t> StartsOf(std::uint64_t group) const {
    const std::uint64_t first = FirstStart(group), last = LastHash(group);
    std::vector<std::uint64_t> found = {first};
    for (std::size_t s = SegmentOf(first); s <= SegmentOf(last); ++s) {
      const std::vector<std::uint64_t>& starts = segments_[s];
      found.insert(found.end(), std::upper_bound(starts.begin(), starts.end(), first),
                   std::upper_bound(starts.begin(), starts.end(), last));
    }
    return found;
  }
  // A block starts here. One that starts its group, or is known already, changes nothing.
  void Add(std::uint64_t start) {
    if (start == FirstStart(GroupOf(start))) return;
    std::vector<std::uint64_t>& starts = segments_[SegmentOf(start)];
    const auto at = std::lower_bound(starts.begin(), starts.end(), start);
    if (at != starts.end() && *at == start) return;
    starts.insert(at, start);
    ++added_;
  }
  std::uint64_t added() const { return added_; }  // Blocks that start no group.
  std::uint64_t bytes() const {
    // Of a vector and of what malloc adds; of a start, with the room that vectors leave.
    constexpr std::uint64_t kSegmentBytes = sizeof(std::vector<std::uint64_t>) + 16,
                            kStartBytes = 12;
    return segments_.size() * kSegmentBytes + added_ * kStartBytes;
  }

 private:
  // Few enough for their further blocks to be found within some cache lines.
  static constexpr std::uint64_t kSegmentGroups = 64;
  static constexpr int kLeastSegmentBits = 8, kMostSegmentBits = 20;

  std::uint64_t LastHash(std::uint64_t group) const {
    return group + 1 == groups_ ? ~std::uint64_t{0} : FirstStart(group + 1) - 1;
  }
  std::size_t SegmentOf(std::uint64_t hash) const {
    return static_cast<std::size_t>(hash >> shift_);
  }

  const std::uint64_t groups_;
  const int shift_;
  std::vector<std::vector<std::uint64_t>> segments_;  // In order, and so are they.
  std::uint64_t added_ = 0;
};

}  // namespace terrace
