// The product of a transposed matrix and another, of which weight gradients are made. Our own,
// because both operands pack by plain copies of short runs, which oneDNN's general code does not
// use: see docs/decisions/gemm.md. Compiled with fused multiply-adds.
#include <algorithm>
#include <cstring>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/model/gemm.h"
#include "terrace/model/lanes.h"

namespace terrace {
namespace {

// A tile of C is kTileLines lines of two registers; with the two of B and one of A it fills the
// register file of the instruction set.
constexpr std::size_t kTileLines = kLanes == 16 ? 12 : 6;
constexpr std::size_t kTileWidth = 2 * kLanes;
// Depth of a pass: kTileWidth columns of B of this depth stay in the L1 cache (32 KiB).
constexpr std::size_t kDepth = 256;
// Lines of C in a block: their columns of A, of the same depth, stay in the L2 cache (480 KiB).
constexpr std::size_t kBlockLines = 40 * kTileLines;

// tile = A (depth, kTileLines), lines `a_stride` apart, transposed times B panel (depth,
// kTileWidth).
template <std::size_t... line>
inline __attribute__((always_inline)) void MultiplyTile(std::size_t depth, const float* a,
                                                        std::size_t a_stride, const float* b,
                                                        float* c, std::size_t ldc, bool add,
                                                        std::index_sequence<line...>) {
  Lanes left[] = {((void)line, Lanes{})...};
  Lanes right[] = {((void)line, Lanes{})...};
  // The tile of C is needed at the end: by then it is here.
  (__builtin_prefetch(c + line * ldc, 1), ...);
  (__builtin_prefetch(c + line * ldc + kLanes, 1), ...);
  for (std::size_t l = 0; l < depth; ++l) {
    const Lanes b0 = Load(b);
    const Lanes b1 = Load(b + kLanes);
    ((left[line] += a[line] * b0, right[line] += a[line] * b1), ...);
    a += a_stride;
    b += kTileWidth;
  }
  const auto store = [&](std::size_t i, const Lanes& x, const Lanes& y) {
    float* to = c + i * ldc;
    Store(add ? Load(to) + x : x, to);
    Store(add ? Load(to + kLanes) + y : y, to + kLanes);
  };
  (store(line, left[line], right[line]), ...);
}

void FullTile(std::size_t depth, const float* a, std::size_t a_stride, const float* b, float* c,
              std::size_t ldc, bool add) {
  MultiplyTile(depth, a, a_stride, b, c, ldc, add, std::make_index_sequence<kTileLines>());
}

void EdgeTile(std::size_t lines, std::size_t width, std::size_t depth, const float* a,
              std::size_t a_stride, const float* b, float* c, std::size_t ldc, bool add) {
  float tile[kTileLines * kTileWidth];
  // No more lines are multiplied than needed, by thirds of a tile.
  constexpr std::size_t kThird = kTileLines / 3;
  if (lines <= kThird) {
    MultiplyTile(depth, a, a_stride, b, tile, kTileWidth, false,
                 std::make_index_sequence<kThird>());
  } else if (lines <= 2 * kThird) {
    MultiplyTile(depth, a, a_stride, b, tile, kTileWidth, false,
                 std::make_index_sequence<2 * kThird>());
  } else {
    MultiplyTile(depth, a, a_stride, b, tile, kTileWidth, false,
                 std::make_index_sequence<kTileLines>());
  }
  for (std::size_t i = 0; i < lines; ++i) {
    for (std::size_t j = 0; j < width; ++j) {
      const float value = tile[i * kTileWidth + j];
      c[i * ldc + j] = add ? c[i * ldc + j] + value : value;
    }
  }
}

// (depth, width) at `from` to panels of `panel` columns, the last one filled up with zeros. A few
// lines at a time, read from end to end: a cache line that holds parts of two panels is still there
// for the second.
template <std::size_t panel>
void Pack(std::size_t depth, std::size_t width, const float* from, std::size_t ld, float* to) {
  constexpr std::size_t kTogether = 8;
  for (std::size_t begin = 0; begin < depth; begin += kTogether) {
    const std::size_t end = std::min(begin + kTogether, depth);
    for (std::size_t first = 0; first < width; first += panel) {
      const std::size_t count = std::min(panel, width - first);
      float* line_to = to + first * depth + begin * panel;
      for (std::size_t l = begin; l < end; ++l, line_to += panel) {
        const float* line = from + l * ld + first;
        if (count == panel) {
          std::memcpy(line_to, line, panel * sizeof(float));
          continue;
        }
        for (std::size_t c = 0; c < count; ++c) line_to[c] = line[c];
        for (std::size_t c = count; c < panel; ++c) line_to[c] = 0.0f;
      }
    }
  }
}

// Where lines lie a multiple of 4 KiB apart, a column falls into one set of the L1 cache and
// reading it evicts itself: then a packed copy is faster than the lines where they are.
bool LinesCollide(std::size_t ld) { return ld % 1024 == 0; }

// One block of lines of C and one pass of depth; panels: room for what is copied.
void MultiplyBlock(std::size_t m, std::size_t n, std::size_t depth, const float* a, std::size_t lda,
                   const float* b, std::size_t ldb, bool add, float* c, std::size_t ldc,
                   float* a_panels, float* b_panel) {
  // Lines that are read only once are read where they are.
  const bool pack = n > kTileWidth || LinesCollide(lda);
  const std::size_t first_packed = pack ? 0 : m / kTileLines * kTileLines;
  Pack<kTileLines>(depth, m - first_packed, a + first_packed, lda, a_panels);
  const std::size_t tiles = (m + kTileLines - 1) / kTileLines;
  const std::size_t fetched_by_tile = (depth + tiles - 1) / tiles;
  for (std::size_t j = 0; j < n; j += kTileWidth) {
    const std::size_t width = std::min(kTileWidth, n - j);
    Pack<kTileWidth>(depth, width, b + j, ldb, b_panel);
    // Lines of the next panel come nearer while this one is multiplied.
    const std::size_t to_fetch = j + 2 * kTileWidth <= n ? depth : 0;
    std::size_t fetched = 0;
    for (std::size_t i = 0; i < m; i += kTileLines) {
      const std::size_t lines = std::min(kTileLines, m - i);
      for (const std::size_t end = std::min(to_fetch, fetched + fetched_by_tile); fetched < end;
           ++fetched) {
        const float* next = b + fetched * ldb + j + kTileWidth;
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + kLanes, 0, 2);
      }
      const bool packed = i >= first_packed;
      const float* columns = packed ? a_panels + (i - first_packed) * depth : a + i;
      const std::size_t stride = packed ? kTileLines : lda;
      float* to = c + i * ldc + j;
      if (lines == kTileLines && width == kTileWidth) {
        FullTile(depth, columns, stride, b_panel, to, ldc, add);
      } else {
        EdgeTile(lines, width, depth, columns, stride, b_panel, to, ldc, add);
      }
    }
  }
}

}  // namespace

void GemmTransposedA(std::size_t m, std::size_t n, std::size_t k, const float* a, std::size_t lda,
                     const float* b, std::size_t ldb, bool add, float* c, std::size_t ldc) {
  const std::size_t a_floats = AlignUp(AlignUp(std::min(m, kBlockLines), kTileLines) * kDepth, 16);
  float* const a_panels = ThreadFloats(a_floats + kTileWidth * kDepth);
  float* const b_panel = a_panels + a_floats;
  for (std::size_t i = 0; i < m; i += kBlockLines) {
    const std::size_t lines = std::min(kBlockLines, m - i);
    for (std::size_t l = 0; l < k; l += kDepth) {
      MultiplyBlock(lines, n, std::min(kDepth, k - l), a + l * lda + i, lda, b + l * ldb, ldb,
                    add || l > 0, c + i * ldc, ldc, a_panels, b_panel);
    }
  }
}

}  // namespace terrace
