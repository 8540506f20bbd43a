// KeyIndex: the exact index, 12 bytes an entry. 4096 segments by the top bits of the hash, each a
// table of its own that grows by itself, so that growth neither pauses a batch nor doubles memory.
// Inside a segment the entries stand in the order of their hashes, each at or after its home
// position (linear probing kept sorted): a look-up of an absent key ends as early as that of a
// present one, and growing is one sequential copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/store/index.h"

namespace terrace {

class KeyIndex final : public RowIndex {
 public:
  KeyIndex() : segments_(kSegments) {}

  bool exact() const override { return true; }
  void Lookup(std::span<const std::uint64_t> hashes, Place* places) const override;
  Status Reserve(std::span<const std::uint64_t> new_hashes) override;
  void Set(std::span<const std::uint64_t> hashes, const Place* places, Place* previous) override;
  void Move(std::span<const std::uint64_t> hashes, const Place* from, const Place* to,
            std::uint8_t* moved) override;
  void Erase(std::span<const std::uint64_t> hashes, Place* previous) override;
  std::uint64_t size() const override { return size_; }
  std::uint64_t bytes() const override { return bytes_ + kSegments * sizeof(Segment); }

 private:
  static constexpr int kSegmentBits = 12;
  static constexpr std::size_t kSegments = std::size_t{1} << kSegmentBits;
  static constexpr std::size_t kEntryBytes = 12;
  // Entries after the last home, so that what is displaced there needs no wrap-around.
  static constexpr std::uint32_t kMostTailEntries = 32;

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  struct Segment {
    std::unique_ptr<std::byte[], Free> entries;  // (capacity + tail) of kEntryBytes
    std::uint32_t capacity = 0;                  // Home positions.
    std::uint32_t tail = 0;
    std::uint32_t count = 0;
    std::uint32_t last = 0;  // One past the last entry in use.
  };

  static std::uint32_t HomeOf(std::uint64_t low_hash, std::uint32_t capacity);
  // The position of the entry, or where it would be inserted; `found` says which.
  static std::uint32_t Find(const Segment& segment, std::uint64_t low_hash, bool* found);
  void Insert(Segment* segment, std::uint64_t low_hash, Place place);
  void Remove(Segment* segment, std::uint32_t position);
  // Grows to hold `count` entries and copies.
  Status Grow(Segment* segment, std::uint64_t count);
  template <typename Visit>
  void ForEachPrefetched(std::span<const std::uint64_t> hashes, Visit visit) const;

  std::vector<Segment> segments_;
  std::uint64_t size_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t returned_bytes_ = 0;  // bytes_ when freed memory was last given back.
};

}  // namespace terrace
