#include "terrace/table/admission_filter.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/rng.h"

namespace terrace {
namespace {

static_assert(std::endian::native == std::endian::little, "cells are little-endian");

constexpr std::uint32_t kQuarterBits = 128;
// Sets the filter's hashes apart from those that choose shards and places.
constexpr std::uint64_t kStream = HashName("admission filter");

struct Head {
  std::uint64_t table_hash;
  std::uint32_t admit_after;
  std::uint32_t cell_bits;
  std::uint64_t blocks;
  std::uint8_t reserved[40];
};
static_assert(sizeof(Head) == AdmissionFilter::kHeadBytes);
static_assert(std::has_unique_object_representations_v<Head>);

std::uint32_t CellBits(std::uint32_t admit_after) {
  std::uint32_t bits = 2;
  while (admit_after >> bits != 0) bits *= 2;
  return bits;
}

}  // namespace

Result<std::unique_ptr<AdmissionFilter>> AdmissionFilter::Create(const std::string& table,
                                                                 const AdmissionSpec& spec) {
  TERRACE_CHECK(spec.on() && spec.after < 1u << 16 && spec.filter_bytes >= kBlockBytes);
  Result<HugeBuffer> buffer = HugeBuffer::Allocate(ImageBytes(spec));
  if (!buffer.ok()) {
    return buffer.status().WithContext("the admission filter of table '" + table +
                                       "' (admit_filter)");
  }
  return std::unique_ptr<AdmissionFilter>(
      new AdmissionFilter(HashName(table), spec, std::move(buffer).value()));
}

AdmissionFilter::AdmissionFilter(std::uint64_t table_hash, const AdmissionSpec& spec,
                                 HugeBuffer buffer)
    : table_hash_(table_hash),
      admit_after_(spec.after),
      cell_bits_(CellBits(spec.after)),
      blocks_(spec.filter_bytes / kBlockBytes),
      buffer_(std::move(buffer)) {
  Head head = {};
  head.table_hash = table_hash_;
  head.admit_after = admit_after_;
  head.cell_bits = cell_bits_;
  head.blocks = blocks_;
  std::memcpy(buffer_.data() + kFrameRoomBytes, &head, sizeof head);
}

AdmissionFilter::Place AdmissionFilter::PlaceOf(Key key) const {
  const std::uint64_t hash = HashCombine(kStream, key);
  return {RangeOfHash(hash, blocks_), MixKey(hash)};
}

std::uint32_t AdmissionFilter::CellBit(const Place& place, int row) const {
  const std::uint32_t cells = kQuarterBits / cell_bits_;
  const auto number = static_cast<std::uint32_t>(place.cells >> (16 * row)) & (cells - 1);
  return static_cast<std::uint32_t>(row) * kQuarterBits + number * cell_bits_;
}

std::uint32_t AdmissionFilter::Estimate(const Place& place) const {
  const std::uint64_t* const block = BlockOf(place);
  const std::uint64_t mask = (std::uint64_t{1} << cell_bits_) - 1;
  std::uint64_t least = mask;
  for (int row = 0; row < kRows; ++row) {
    const std::uint32_t bit = CellBit(place, row);
    least = std::min(least, block[bit / 64] >> (bit % 64) & mask);
  }
  return static_cast<std::uint32_t>(least);
}

void AdmissionFilter::Count(Key key, std::uint32_t shows) {
  const Place place = PlaceOf(key);
  // A cell counts no further than to what admits.
  const std::uint64_t count =
      std::min<std::uint64_t>(std::uint64_t{Estimate(place)} + shows, admit_after_);
  const std::uint64_t mask = (std::uint64_t{1} << cell_bits_) - 1;
  std::uint64_t* const block = BlockOf(place);
  for (int row = 0; row < kRows; ++row) {
    const std::uint32_t bit = CellBit(place, row);
    std::uint64_t& word = block[bit / 64];
    if ((word >> (bit % 64) & mask) >= count) continue;
    word = (word & ~(mask << (bit % 64))) | count << (bit % 64);
  }
}

double AdmissionFilter::FullShare() const {
  const std::uint64_t mask = (std::uint64_t{1} << cell_bits_) - 1;
  const std::uint64_t* const words = BlockOf({0, 0});
  const std::uint64_t count = blocks_ * (kBlockBytes / sizeof(std::uint64_t));
  std::uint64_t full = 0;
  for (std::uint64_t w = 0; w < count; ++w) {
    if (words[w] == 0) continue;
    for (std::uint32_t bit = 0; bit < 64; bit += cell_bits_) {
      full += (words[w] >> bit & mask) >= admit_after_ ? 1 : 0;
    }
  }
  const std::uint64_t cells = count * 64 / cell_bits_;
  return static_cast<double>(full) / static_cast<double>(cells);
}

Status AdmissionFilter::CheckHead() const {
  Head head;
  std::memcpy(&head, buffer_.data() + kFrameRoomBytes, sizeof head);
  Head wanted = {};
  wanted.table_hash = table_hash_;
  wanted.admit_after = admit_after_;
  wanted.cell_bits = cell_bits_;
  wanted.blocks = blocks_;
  if (std::memcmp(&head, &wanted, sizeof head) == 0) return OkStatus();
  return CorruptionError(
      "its head (bytes 64 to 127) is that of another table's filter, or of one "
      "with another admit_after or size");
}

void AdmissionFilter::CopyFrom(const AdmissionFilter& other) {
  TERRACE_CHECK(other.table_hash_ == table_hash_ && other.admit_after_ == admit_after_ &&
                other.blocks_ == blocks_);
  std::memcpy(buffer_.data(), other.buffer_.data(), image_bytes());
}

}  // namespace terrace
