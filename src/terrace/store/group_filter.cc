#include "terrace/store/group_filter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

#include "terrace/base/ids.h"

namespace terrace {
namespace {

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

std::uint64_t GroupFilters::WordsFor(std::uint64_t groups, std::uint64_t expected_rows,
                                     std::uint32_t bits_a_row) {
  if (bits_a_row == 0) return 0;
  const std::uint64_t bits = (expected_rows * bits_a_row + groups - 1) / groups;
  // A group's few bits must be less than what a probe tells apart.
  return std::clamp<std::uint64_t>((bits + 63) / 64, 1, std::uint64_t{1} << 20);
}

std::uint64_t GroupFilters::BytesFor(std::uint64_t groups, std::uint64_t expected_rows,
                                     std::uint32_t bits_a_row) {
  return (groups * WordsFor(groups, expected_rows, bits_a_row) + (groups + 63) / 64) * sizeof(Word);
}

Result<GroupFilters> GroupFilters::Create(std::uint64_t groups, std::uint64_t expected_rows,
                                          std::uint32_t bits_a_row) {
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer,
                           HugeBuffer::Allocate(BytesFor(groups, expected_rows, bits_a_row)));
  // As many as the bits are best asked with: ten say a wrong "may" in 120 with seven.
  const auto probes = static_cast<int>(std::lround(bits_a_row * std::numbers::ln2));
  return GroupFilters(groups, WordsFor(groups, expected_rows, bits_a_row), probes,
                      std::move(buffer));
}

bool GroupFilters::MayHold(std::uint64_t group, std::uint64_t hash) const {
  if (!IsKnown(group)) return true;
  Probes probes(hash, words_ * 64);
  for (int i = 0; i < probes_; ++i) {
    if (!Bit(filter(group), probes.Next())) return false;
  }
  return true;
}

void GroupFilters::Add(std::uint64_t group, std::uint64_t hash) {
  Probes probes(hash, words_ * 64);
  for (int i = 0; i < probes_; ++i) SetBit(filter(group), probes.Next());
}

void GroupFilters::SetKeys(std::uint64_t group, std::span<const std::uint64_t> hashes) {
  std::memset(filter(group), 0, words_ * sizeof(Word));
  unknown()[group / 64] &= ~(Word{1} << (group % 64));
  for (const std::uint64_t hash : hashes) Add(group, hash);
}

}  // namespace terrace
