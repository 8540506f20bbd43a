// GroupDirectory: which block a key lies in (docs/formats/group_block.md). Groups that are one
// block take no memory here. Threads: guarded by the owner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "terrace/base/rng.h"

namespace terrace {

class GroupDirectory {
 public:
  // REQUIRES: 0 < groups <= kMostGroups.
  explicit GroupDirectory(std::uint64_t groups) : groups_(groups) {}
  // Starts further apart than the bits that an index can tell apart.
  static constexpr std::uint64_t kMostGroups = std::uint64_t{1} << 36;

  std::uint64_t groups() const { return groups_; }
  std::uint64_t GroupOf(std::uint64_t hash) const {
    return static_cast<std::uint64_t>((static_cast<Uint128>(hash) * groups_) >> 64);
  }
  // Where the first block of a group starts.
  std::uint64_t FirstStart(std::uint64_t group) const {
    const Uint128 scaled = (static_cast<Uint128>(group) << 64) + groups_ - 1;
    return static_cast<std::uint64_t>(scaled / groups_);
  }
  // Where the block starts that a hash lies in.
  std::uint64_t StartOf(std::uint64_t hash) const {
    const std::uint64_t group = GroupOf(hash);
    if (const std::vector<std::uint64_t>* starts = Divided(group)) {
      const auto after = std::upper_bound(starts->begin(), starts->end(), hash);
      if (after != starts->begin()) return *(after - 1);
    }
    return FirstStart(group);
  }
  bool IsDivided(std::uint64_t group) const { return Divided(group) != nullptr; }
  // Starts of the group's blocks, in order.
  std::vector<std::uint64_t> StartsOf(std::uint64_t group) const {
    std::vector<std::uint64_t> starts = {FirstStart(group)};
    if (const std::vector<std::uint64_t>* further = Divided(group)) {
      starts.insert(starts.end(), further->begin(), further->end());
    }
    return starts;
  }
  // A block starts here. One that starts its group, or is known already, changes nothing.
  void Add(std::uint64_t start) {
    const std::uint64_t group = GroupOf(start);
    if (start == FirstStart(group)) return;
    std::vector<std::uint64_t>& starts = divided_[group];
    const auto at = std::lower_bound(starts.begin(), starts.end(), start);
    if (at != starts.end() && *at == start) return;
    starts.insert(at, start);
    ++added_;
  }
  std::uint64_t added() const { return added_; }  // Blocks that start no group.
  std::uint64_t bytes() const {
    constexpr std::uint64_t kNodeBytes = 72;  // Of the map: node, bucket, what malloc adds to both.
    return divided_.size() * kNodeBytes + added_ * 2 * sizeof(std::uint64_t);
  }

 private:
  // The starts of further blocks; null: there are none.
  const std::vector<std::uint64_t>* Divided(std::uint64_t group) const {
    if (divided_.empty()) return nullptr;
    const auto found = divided_.find(group);
    return found == divided_.end() ? nullptr : &found->second;
  }

  const std::uint64_t groups_;
  std::unordered_map<std::uint64_t, std::vector<std::uint64_t>> divided_;
  std::uint64_t added_ = 0;
};

}  // namespace terrace
