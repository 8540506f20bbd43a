// Tiles of products in registers, as in gemm_transposed.cc: kTile lines by two registers of
// columns. Compiled with fused multiply-adds.
#include "terrace/model/line_products.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "terrace/base/memory.h"
#include "terrace/model/lanes.h"

namespace terrace {
namespace {

constexpr std::size_t kTile = kLanes == 16 ? 8 : 4;  // Lines; with two registers each.
constexpr std::size_t kPanel = 2 * kLanes;           // Columns.
using TileLines = std::make_index_sequence<kTile>;
// Lines whose products or sums are made before they are used: those of one panel stay in the L1
// cache (8 KiB), those of all columns in the L2 cache (64 KiB for 256 columns).
constexpr std::size_t kChunk = 8 * kTile;
// Registers in which the gradients of a line's examples are summed: 256 columns at a time.
constexpr std::size_t kSumLanes = kLanes == 16 ? 16 : 8;
// Occurrences; lines of products and of their gradients come from the second or third cache.
constexpr std::size_t kAhead = 6;

// product (as many lines as `l`, kPanel), `stride` apart, = lines times the panel's `width` lines.
template <std::size_t... l>
void MultiplyTile(std::size_t width, const float* lines, const float* panel, float* product,
                  std::size_t stride, std::index_sequence<l...>) {
  Lanes left[] = {((void)l, Lanes{})...};
  Lanes right[] = {((void)l, Lanes{})...};
  for (std::size_t k = 0; k < width; ++k, panel += kPanel) {
    const Lanes b0 = Load(panel), b1 = Load(panel + kLanes);
    ((left[l] += lines[l * width + k] * b0, right[l] += lines[l * width + k] * b1), ...);
  }
  ((Store(left[l], product + l * stride), Store(right[l], product + l * stride + kLanes)), ...);
}

// Runs work(std::make_index_sequence<count>()) for a count of 1 to kTile.
template <std::size_t most = kTile, class Work>
void ForCount(std::size_t count, const Work& work) {
  if constexpr (most > 0) {
    if (count == most) return work(std::make_index_sequence<most>());
    ForCount<most - 1>(count, work);
  }
}

void MultiplyTile(std::size_t count, std::size_t width, const float* lines, const float* panel,
                  float* product, std::size_t stride) {
  ForCount(count, [&](auto each) { MultiplyTile(width, lines, panel, product, stride, each); });
}

// Adds the products of lines [first, last) to those of the examples that hold them.
template <bool kValues>
void AddProducts(const LineGroup& group, std::size_t first, std::size_t last, const float* products,
                 float* y, std::size_t stride) {
  const std::uint32_t* const example = group.example;
  const std::uint32_t* const line = group.line;
  const float* const value = group.value;
  const std::size_t end = group.begin[last], all = group.begin[group.lines];
  for (std::size_t o = group.begin[first]; o < end; ++o) {
    if (o + kAhead < all) {
      const float* ahead = y + example[o + kAhead] * stride;
      __builtin_prefetch(ahead, 1);
      __builtin_prefetch(ahead + kLanes, 1);
    }
    float* const to = y + example[o] * stride;
    const float* const product = products + (line[o] - first) * kPanel;
    Lanes left = Load(product), right = Load(product + kLanes);
    if (kValues) {
      left *= value[o];
      right *= value[o];
    }
    Store(Load(to) + left, to);
    Store(Load(to + kLanes) + right, to + kLanes);
  }
}

void AddProducts(const LineGroup& group, std::size_t first, std::size_t last, const float* products,
                 float* y, std::size_t stride) {
  if (group.value != nullptr) return AddProducts<true>(group, first, last, products, y, stride);
  AddProducts<false>(group, first, last, products, y, stride);
}

// sum (as many registers as `i`) = of columns of dy over occurrences [begin, end) of a line.
template <bool kValues, std::size_t... i>
void SumColumns(const LineGroup& group, std::size_t begin, std::size_t end, const float* dy,
                std::size_t stride, float* sum, std::index_sequence<i...>) {
  const std::uint32_t* const example = group.example;
  const std::size_t all = group.begin[group.lines];
  Lanes sums[] = {((void)i, Lanes{})...};
  for (std::size_t o = begin; o < end; ++o) {
    if (o + kAhead < all) {
      const float* ahead = dy + example[o + kAhead] * stride;
      (__builtin_prefetch(ahead + i * kLanes), ...);
    }
    const float* const line = dy + example[o] * stride;
    if (kValues) {
      const float value = group.value[o];
      ((sums[i] += value * Load(line + i * kLanes)), ...);
    } else {
      ((sums[i] += Load(line + i * kLanes)), ...);
    }
  }
  (Store(sums[i], sum + i * kLanes), ...);
}

template <std::size_t count>
void SumColumns(const LineGroup& group, std::size_t begin, std::size_t end, const float* dy,
                std::size_t stride, float* sum) {
  if (group.value == nullptr) {
    SumColumns<false>(group, begin, end, dy, stride, sum, std::make_index_sequence<count>());
  } else {
    SumColumns<true>(group, begin, end, dy, stride, sum, std::make_index_sequence<count>());
  }
}

// s of lines [first, last), all columns in whole panels.
void SumLines(const LineGroup& group, std::size_t first, std::size_t last, std::size_t width,
              const float* dy, std::size_t stride, float* sums) {
  for (std::size_t l = first; l < last; ++l, sums += stride) {
    const std::size_t begin = group.begin[l], end = group.begin[l + 1];
    std::size_t c = 0;
    for (; c + kSumLanes * kLanes <= width; c += kSumLanes * kLanes) {
      SumColumns<kSumLanes>(group, begin, end, dy + c, stride, sums + c);
    }
    for (; c + 2 * kPanel <= width; c += 2 * kPanel) {
      SumColumns<2 * kPanel / kLanes>(group, begin, end, dy + c, stride, sums + c);
    }
    for (; c < width; c += kPanel) {
      SumColumns<kPanel / kLanes>(group, begin, end, dy + c, stride, sums + c);
    }
  }
}

// d (as many lines of W as `k`, kPanel) = or += the lines, transposed, times their sums. lines:
// from the first of those columns on.
template <std::size_t... k>
void WeightTile(std::size_t count, std::size_t width, const float* lines, const float* sums,
                std::size_t stride, bool add, float* d, std::size_t ldd,
                std::index_sequence<k...>) {
  Lanes left[] = {(add ? Load(d + k * ldd) : Lanes{})...};
  Lanes right[] = {(add ? Load(d + k * ldd + kLanes) : Lanes{})...};
  for (std::size_t i = 0; i < count; ++i, lines += width, sums += stride) {
    const Lanes b0 = Load(sums), b1 = Load(sums + kLanes);
    ((left[k] += lines[k] * b0, right[k] += lines[k] * b1), ...);
  }
  ((Store(left[k], d + k * ldd), Store(right[k], d + k * ldd + kLanes)), ...);
}

// d_weight (group.width lines, width) = or += a chunk of lines, transposed, times its sums.
void AddWeightGradient(const LineGroup& group, std::size_t count, const float* lines,
                       const float* sums, std::size_t stride, bool add, std::size_t width,
                       float* d_weight, float* tile) {
  for (std::size_t c = 0; c < width; c += kPanel) {
    const std::size_t columns = std::min(kPanel, width - c);
    for (std::size_t k = 0; k < group.width; k += kTile) {
      const std::size_t inputs = std::min(kTile, group.width - k);
      float* const to = d_weight + k * width + c;
      const auto multiply = [&](float* d, std::size_t ldd) {
        ForCount(inputs, [&](auto each) {
          WeightTile(count, group.width, lines + k, sums + c, stride, add, d, ldd, each);
        });
      };
      if (columns == kPanel) {
        multiply(to, width);
        continue;
      }
      for (std::size_t i = 0; add && i < inputs; ++i) {
        std::memcpy(tile + i * kPanel, to + i * width, columns * sizeof(float));
      }
      multiply(tile, kPanel);
      for (std::size_t i = 0; i < inputs; ++i) {
        std::memcpy(to + i * width, tile + i * kPanel, columns * sizeof(float));
      }
    }
  }
}

// gradient (kTile, count * kLanes) = sums of a tile's lines, all columns, times W transposed.
template <std::size_t count, std::size_t... l>
void GradientTile(std::size_t width, const float* sums, std::size_t stride, const float* transposed,
                  std::size_t ldt, float* gradient, std::index_sequence<l...>) {
  Lanes products[kTile][count] = {};
  for (std::size_t c = 0; c < width; ++c, transposed += ldt) {
    Lanes w[count];
    for (std::size_t i = 0; i < count; ++i) w[i] = Load(transposed + i * kLanes);
    const auto multiply = [&](std::size_t line, float s) {
      for (std::size_t i = 0; i < count; ++i) products[line][i] += s * w[i];
    };
    (multiply(l, sums[l * stride + c]), ...);
  }
  for (std::size_t line = 0; line < kTile; ++line) {
    for (std::size_t i = 0; i < count; ++i) {
      Store(products[line][i], gradient + (line * count + i) * kLanes);
    }
  }
}

// The gradients of up to kTile lines.
void WriteGradients(const LineGroup& group, std::size_t count, std::size_t width, const float* sums,
                    std::size_t stride, const float* transposed, std::size_t ldt, float* gradient,
                    float* tile) {
  for (std::size_t k = 0; k < group.width; k += kPanel) {
    const bool narrow = group.width - k <= kLanes;
    const std::size_t ld = narrow ? kLanes : kPanel;
    if (narrow) {
      GradientTile<1>(width, sums, stride, transposed + k, ldt, tile, TileLines());
    } else {
      GradientTile<2>(width, sums, stride, transposed + k, ldt, tile, TileLines());
    }
    const std::size_t floats = std::min(ld, group.width - k);
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(gradient + i * group.width + k, tile + i * ld, floats * sizeof(float));
    }
  }
}

// The products of a group of which each example has a line of its own.
void MultiplyOwnLines(const LineGroup& group, const float* panel, bool write, float* tile, float* y,
                      std::size_t stride) {
  for (std::size_t l = 0; l < group.lines; l += kTile) {
    const std::size_t count = std::min(kTile, group.lines - l);
    const float* const lines = group.line_data + l * group.width;
    float* const to = y + l * stride;
    if (write) {
      MultiplyTile(count, group.width, lines, panel, to, stride);
      continue;
    }
    MultiplyTile(count, group.width, lines, panel, tile, kPanel);
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t c = 0; c < kPanel; ++c) to[i * stride + c] += tile[i * kPanel + c];
    }
  }
}

// Of working memory.
std::size_t MultiplyFloats(std::size_t inputs) { return (inputs + kChunk) * kPanel; }
std::size_t DifferentiateFloats(std::size_t width, std::size_t stride, std::size_t group_width) {
  return kTile * kPanel + kChunk * stride + width * AlignUp(group_width, kPanel);
}

void Clear(std::size_t lines, float* y, std::size_t stride) {
  for (std::size_t l = 0; l < lines; ++l) std::fill_n(y + l * stride, kPanel, 0.0f);
}

}  // namespace

const std::size_t kProductColumns = kPanel;

std::size_t ProductStride(std::size_t width) { return AlignUp(width, kPanel) + kLanes; }

std::size_t LineThreadBytes(std::size_t inputs, std::size_t width, std::size_t widest_group) {
  return HugeBuffer::SizeFor(
      sizeof(float) * std::max(MultiplyFloats(inputs),
                               DifferentiateFloats(width, ProductStride(width), widest_group)));
}

void MultiplyLines(std::span<const LineGroup> groups, const float* weight, std::size_t inputs,
                   std::size_t width, std::size_t first_column, std::size_t examples, float* y,
                   std::size_t stride) {
  float* const panel = ThreadFloats(MultiplyFloats(inputs));
  float* const products = panel + inputs * kPanel;
  const std::size_t columns = std::min(kPanel, width - first_column);
  for (std::size_t k = 0; k < inputs; ++k) {
    std::memcpy(panel + k * kPanel, weight + k * width + first_column, columns * sizeof(float));
    std::fill_n(panel + k * kPanel + columns, kPanel - columns, 0.0f);
  }
  y += first_column;
  for (const LineGroup& group : groups) {
    const float* const lines_of_w = panel + group.first_input * kPanel;
    if (group.begin == nullptr) {
      MultiplyOwnLines(group, lines_of_w, &group == groups.data(), products, y, stride);
      continue;
    }
    if (&group == groups.data()) Clear(examples, y, stride);
    for (std::size_t first = 0; first < group.lines; first += kChunk) {
      const std::size_t last = std::min(first + kChunk, group.lines);
      for (std::size_t l = first; l < last; l += kTile) {
        MultiplyTile(std::min(kTile, last - l), group.width, group.line_data + l * group.width,
                     lines_of_w, products + (l - first) * kPanel, kPanel);
      }
      AddProducts(group, first, last, products, y, stride);
    }
  }
}

void DifferentiateLines(const LineGroup& group, const float* weight, std::size_t width,
                        const float* dy, std::size_t stride, float* d_weight) {
  const bool summed = group.begin != nullptr;
  const std::size_t ldt = AlignUp(group.width, kPanel);
  float* const tile = ThreadFloats(DifferentiateFloats(width, stride, group.width));
  float* const chunk_sums = tile + kTile * kPanel;
  float* const transposed = chunk_sums + kChunk * stride;
  weight += group.first_input * width;
  d_weight += group.first_input * width;
  if (group.gradient != nullptr) {
    for (std::size_t c = 0; c < width; ++c) {
      for (std::size_t k = 0; k < group.width; ++k) transposed[c * ldt + k] = weight[k * width + c];
      std::fill_n(transposed + c * ldt + group.width, ldt - group.width, 0.0f);
    }
  }
  if (group.lines == 0) std::fill_n(d_weight, group.width * width, 0.0f);
  for (std::size_t first = 0; first < group.lines; first += kChunk) {
    const std::size_t last = std::min(first + kChunk, group.lines);
    if (summed) SumLines(group, first, last, width, dy, stride, chunk_sums);
    const float* const sums = summed ? chunk_sums : dy + first * stride;
    AddWeightGradient(group, last - first, group.line_data + first * group.width, sums, stride,
                      first > 0, width, d_weight, tile);
    if (group.gradient == nullptr) continue;
    for (std::size_t l = first; l < last; l += kTile) {
      WriteGradients(group, std::min(kTile, last - l), width, sums + (l - first) * stride, stride,
                     transposed, ldt, group.gradient + l * group.width, tile);
    }
  }
}

}  // namespace terrace
