// Where the lines of an index's segments lie: in extents, the first ones a line each, then each a
// tenth of what the segment had before, so that the list of them stays short and a segment grows
// without moving. Their sizes are those of the segment's class. The classes lie evenly between two
// growths, so that segments of the same size, which all of an index are, do not all grow at once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace terrace {

class LineExtents {
 public:
  static constexpr std::size_t kClasses = 8;
  static constexpr std::size_t kMost = 162;  // Extents of a segment.
  static constexpr std::uint32_t kMostLines = std::uint32_t{1} << 24;

  constexpr LineExtents() {
    for (std::size_t c = 0; c < kClasses; ++c) {
      std::uint32_t* begin = begin_[c];
      for (std::uint32_t k = 0; k <= kSingles; ++k) begin[k] = k;
      std::uint64_t lines = (std::uint64_t{kSingles} << 20) + (c << 20) / kClasses;
      for (std::size_t k = kSingles; k < kMost; ++k) {
        lines += lines / kSingles;
        begin[k + 1] = static_cast<std::uint32_t>(lines >> 20);
      }
      std::uint8_t k = 0;
      for (std::uint32_t range = 0; range < kRanges; ++range) {
        while (begin[k + 1] <= FirstOf(range) && k + 1u < kMost) ++k;
        first_[c][range] = k;
      }
    }
  }

  // A line by its extent.
  struct Spot {
    std::size_t extent;
    std::uint32_t beyond;  // Lines of the extent before it.
  };
  Spot Find(std::size_t c, std::uint32_t line) const {
    std::size_t extent = first_[c][RangeOf(line)];
    extent += line >= begin_[c][extent + 1] ? 1 : 0;
    return {extent, line - begin_[c][extent]};
  }
  // The first line of an extent, or how many are before it.
  std::uint32_t begin(std::size_t c, std::size_t extent) const { return begin_[c][extent]; }
  std::uint32_t size(std::size_t c, std::size_t extent) const {
    return begin_[c][extent + 1] - begin_[c][extent];
  }

 private:
  static constexpr std::uint32_t kSingles = 10;  // Extents of one line; then each of a tenth.
  static constexpr std::uint32_t kRanges = 352;

  // Ranges of lines so narrow, a sixteenth of where they begin, that each touches two extents at
  // most.
  static constexpr std::uint32_t RangeOf(std::uint32_t line) {
    if (line < 32) return line;
    const auto shift = static_cast<std::uint32_t>(std::bit_width(line)) - 5;
    return (shift << 4) + (line >> shift);
  }
  static constexpr std::uint32_t FirstOf(std::uint32_t range) {
    if (range < 32) return range;
    const std::uint32_t shift = (range >> 4) - 1;
    return (range - (shift << 4)) << shift;
  }

  std::uint32_t begin_[kClasses][kMost + 1] = {};
  std::uint8_t first_[kClasses][kRanges] = {};
};

inline constexpr LineExtents kLineExtents;

}  // namespace terrace
