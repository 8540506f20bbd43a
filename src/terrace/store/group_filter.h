// GroupFilters: a Bloom filter for each group of a store (AIBox 4.1, 4.3), which says of a key that
// its group does not have it, or that it may. A group whose keys are not known says that it may
// have all, and filters of no bits always do. Threads: guarded by the owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/status.h"

namespace terrace {

class GroupFilters {
 public:
  // Filters of groups that are known to be empty, of so many bits for each expected row.
  // kOutOfMemory.
  static Result<GroupFilters> Create(std::uint64_t groups, std::uint64_t expected_rows,
                                     std::uint32_t bits_a_row);
  // What they take.
  static std::uint64_t BytesFor(std::uint64_t groups, std::uint64_t expected_rows,
                                std::uint32_t bits_a_row);

  bool MayHold(std::uint64_t group, std::uint64_t hash) const;
  bool IsKnown(std::uint64_t group) const { return !Bit(unknown(), group); }
  // Of what keys the group has nothing is known from now on.
  void Forget(std::uint64_t group) { SetBit(unknown(), group); }
  void Add(std::uint64_t group, std::uint64_t hash);
  // The group has these keys and no others.
  void SetKeys(std::uint64_t group, std::span<const std::uint64_t> hashes);
  std::uint64_t bytes() const { return buffer_.size(); }

 private:
  using Word = std::uint64_t;
  GroupFilters(std::uint64_t groups, std::uint64_t words_a_group, int probes, HugeBuffer buffer)
      : groups_(groups), words_(words_a_group), probes_(probes), buffer_(std::move(buffer)) {}
  static std::uint64_t WordsFor(std::uint64_t groups, std::uint64_t expected_rows,
                                std::uint32_t bits_a_row);

  Word* filter(std::uint64_t group) const {
    return reinterpret_cast<Word*>(buffer_.data()) + group * words_;
  }
  // A bit a group, behind the filters.
  Word* unknown() const { return filter(groups_); }
  static bool Bit(const Word* words, std::uint64_t i) {
    return (words[i / 64] >> (i % 64) & 1) != 0;
  }
  static void SetBit(Word* words, std::uint64_t i) { words[i / 64] |= Word{1} << (i % 64); }

  std::uint64_t groups_;
  std::uint64_t words_;  // Of one filter.
  int probes_;
  HugeBuffer buffer_;
};

}  // namespace terrace
