#include "terrace/store/group_filter.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "terrace/base/ids.h"

namespace terrace {
namespace {

// A wrong "may" in 120; the number of probes that this many bits are best asked with.
constexpr std::uint64_t kBitsPerRow = 10;
constexpr int kProbes = 7;

// Numbers below `bits` for the probes of one key. The hash itself decides the group, so that the
// hashes of a group have its top bits in common.
class Probes {
 public:
  Probes(std::uint64_t hash, std::uint64_t bits) : bits_(bits) {
    const std::uint64_t mixed = MixKey(hash);
    at_ = static_cast<std::uint32_t>(mixed);
    step_ = static_cast<std::uint32_t>(mixed >> 32) | 1;
  }
  std::uint64_t Next() {
    const std::uint64_t probe = (std::uint64_t{at_} * bits_) >> 32;
    at_ += step_;
    return probe;
  }

 private:
  const std::uint64_t bits_;
  std::uint32_t at_;
  std::uint32_t step_;
};

}  // namespace

std::uint64_t GroupFilters::WordsFor(std::uint64_t groups, std::uint64_t expected_rows) {
  const std::uint64_t bits = (expected_rows * kBitsPerRow + groups - 1) / groups;
  // A group's few bits must be less than what a probe tells apart.
  return std::clamp<std::uint64_t>((bits + 63) / 64, 1, std::uint64_t{1} << 20);
}

std::uint64_t GroupFilters::BytesFor(std::uint64_t groups, std::uint64_t expected_rows) {
  return (groups * WordsFor(groups, expected_rows) + (groups + 63) / 64) * sizeof(Word);
}

Result<GroupFilters> GroupFilters::Create(std::uint64_t groups, std::uint64_t expected_rows) {
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer,
                           HugeBuffer::Allocate(BytesFor(groups, expected_rows)));
  return GroupFilters(groups, WordsFor(groups, expected_rows), std::move(buffer));
}

bool GroupFilters::MayHold(std::uint64_t group, std::uint64_t hash) const {
  if (!IsKnown(group)) return true;
  Probes probes(hash, words_ * 64);
  for (int i = 0; i < kProbes; ++i) {
    if (!Bit(filter(group), probes.Next())) return false;
  }
  return true;
}

void GroupFilters::Add(std::uint64_t group, std::uint64_t hash) {
  Probes probes(hash, words_ * 64);
  for (int i = 0; i < kProbes; ++i) SetBit(filter(group), probes.Next());
}

void GroupFilters::SetKeys(std::uint64_t group, std::span<const std::uint64_t> hashes) {
  std::memset(filter(group), 0, words_ * sizeof(Word));
  unknown()[group / 64] &= ~(Word{1} << (group % 64));
  for (const std::uint64_t hash : hashes) Add(group, hash);
}

}  // namespace terrace
