// AdmissionFilter: how often each key of a table was shown, so that a key gets a row only after its
// N-th show. A blocked count-min sketch with conservative update (Estan and Varghese 2002): it
// never counts too few shows of a key, and sometimes too many; docs/admission.md says how often.
// Its memory is the image of its file (docs/formats/admission_filter.md). Threads: a value; one at
// a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/status.h"
#include "terrace/table/row_schema.h"

namespace terrace {

class AdmissionFilter {
 public:
  // In front of the head, for the frame of the file.
  static constexpr std::size_t kFrameRoomBytes = 64;
  static constexpr std::size_t kHeadBytes = 64;
  static constexpr std::size_t kBlockBytes = 64;  // A line of the processor's cache.

  // Empty. kOutOfMemory. REQUIRES: spec.on(), within the limits that RowSchema::Create checks.
  static Result<std::unique_ptr<AdmissionFilter>> Create(const std::string& table,
                                                         const AdmissionSpec& spec);

  // Whether the key was shown admit_after times or more, as far as is counted; once true, true for
  // ever.
  bool Admits(Key key) const { return Estimate(PlaceOf(key)) >= admit_after_; }
  // `shows` more of the key. What the filter holds depends on the order of calls.
  void Count(Key key, std::uint32_t shows);
  // Asks for the memory that a call for the key will touch.
  [[gnu::always_inline]] void Prefetch(Key key) const {
    __builtin_prefetch(BlockOf(PlaceOf(key)), 1);
  }

  // The share of cells that count no further: its fourth power is about the share of new keys that
  // are admitted at once.
  double FullShare() const;

  // The bytes of the file, frame first; what is behind the head changes with Count.
  std::span<std::byte> image() { return buffer_.span().first(image_bytes()); }
  std::uint64_t image_bytes() const { return ImageBytes(blocks_); }
  static std::uint64_t ImageBytes(const AdmissionSpec& spec) {
    return ImageBytes(spec.filter_bytes / kBlockBytes);
  }
  std::span<const std::byte> cells() const {
    return buffer_.span().subspan(kFrameRoomBytes + kHeadBytes, blocks_ * kBlockBytes);
  }
  // After an image was read into image(): kCorruption when its head is of another filter.
  Status CheckHead() const;
  void CopyFrom(const AdmissionFilter& other);  // REQUIRES: of the same table and spec.

 private:
  static constexpr int kRows = 4;  // A key has a cell in each quarter of its block.
  struct Place {
    std::uint64_t block;
    std::uint64_t cells;  // Sixteen bits for the number of the cell in each quarter.
  };

  AdmissionFilter(std::uint64_t table_hash, const AdmissionSpec& spec, HugeBuffer buffer);
  static std::uint64_t ImageBytes(std::uint64_t blocks) {
    return kFrameRoomBytes + kHeadBytes + blocks * kBlockBytes;
  }
  Place PlaceOf(Key key) const;
  std::uint64_t* BlockOf(const Place& place) const {
    return reinterpret_cast<std::uint64_t*>(buffer_.data() + kFrameRoomBytes + kHeadBytes) +
           place.block * (kBlockBytes / sizeof(std::uint64_t));
  }
  // Bit of the block at which the place's cell in a quarter begins.
  std::uint32_t CellBit(const Place& place, int row) const;
  std::uint32_t Estimate(const Place& place) const;

  const std::uint64_t table_hash_;
  const std::uint32_t admit_after_;
  const std::uint32_t cell_bits_;  // 2, 4, 8 or 16: the least that can count to admit_after.
  const std::uint64_t blocks_;
  const HugeBuffer buffer_;
};

}  // namespace terrace
