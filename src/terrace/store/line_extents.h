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
      // Up to the range of a line that no segment has.
      std::size_t range = 0;
      for (std::size_t k = 0; k < kMost; ++k) {
        for (; range < kRanges && FirstOf(range) < begin[k + 1]; ++range) {
          first_[c][range] = static_cast<std::uint8_t>(k);
        }
      }
    }
  }

  // A line by its extent.
  struct Spot {
    std::size_t extent;
    std::uint32_t size;    // Lines of the extent,
    std::uint32_t beyond;  // and of it before this one.
  };
  [[gnu::always_inline]] Spot Find(std::size_t c, std::uint32_t line) const {
    std::size_t extent = first_[c][RangeOf(line)];
    extent += line >= begin_[c][extent + 1] ? 1 : 0;
    const std::uint32_t first = begin_[c][extent];
    return {extent, begin_[c][extent + 1] - first, line - first};
  }
  // The first line of an extent, or how many are before it.
  std::uint32_t begin(std::size_t c, std::size_t extent) const { return begin_[c][extent]; }
  std::uint32_t size(std::size_t c, std::size_t extent) const {
    return begin_[c][extent + 1] - begin_[c][extent];
  }

 private:
  static constexpr std::uint32_t kSingles = 10;  // Extents of one line; then each of a tenth.

  // Ranges of lines so narrow, a sixteenth of where they begin at most, that each touches two
  // extents at most: a float says by its exponent and the first bits of its fraction in which one a
  // line is.
  static constexpr std::uint32_t kFirstRange = std::bit_cast<std::uint32_t>(16.0f) >> 19;
  static constexpr std::uint32_t kRanges = 336;
  static constexpr std::uint32_t RangeOf(std::uint32_t line) {
    const auto number = static_cast<float>(static_cast<std::int32_t>(line + 16));
    return (std::bit_cast<std::uint32_t>(number) >> 19) - kFirstRange;
  }
  static constexpr std::uint32_t FirstOf(std::size_t range) {
    const auto bits = (static_cast<std::uint32_t>(range) + kFirstRange) << 19;
    return static_cast<std::uint32_t>(std::bit_cast<float>(bits)) - 16;
  }

  // By powers of 2, which a shift finds.
  std::uint32_t begin_[kClasses][256] = {};
  std::uint8_t first_[kClasses][512] = {};
};

inline constexpr LineExtents kLineExtents;

}  // namespace terrace
