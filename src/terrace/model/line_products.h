// The products of a linear layer by the distinct lines of its input. Where examples share parts of
// their input, as those share a row that hold the same key, such a part is multiplied once:
//   y[e] = sum over groups g, over lines l of g that e holds, of v (x_l W_g)
// and backward, with s_l = sum over the examples e that hold l of v dy[e],
//   dx_l = s_l W_g^T  (already the sum over all examples),   dW_g = sum over l of x_l^T s_l.
// A group is the distinct lines of one slot, or the dense features, of which each example has a
// line of its own. Threads: free functions; calls on disjoint columns or groups run at once. A
// thread keeps its working memory until it ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace terrace {

struct LineGroup {
  std::size_t first_input = 0;  // The line of W that the first float of a line meets.
  std::size_t width = 0;        // Floats of a line.
  std::size_t lines = 0;
  const float* line_data = nullptr;  // (lines, width)
  // (lines, width) written by DifferentiateLines; may be where the lines are. nullptr: not wanted,
  // as for a group without `begin`.
  float* gradient = nullptr;
  // Line l is held in the occurrences [begin[l], begin[l + 1]), by the example and with the value
  // of each. Without `begin` line l is that of example l alone.
  const std::uint32_t* begin = nullptr;    // (lines + 1), from 0 on
  const std::uint32_t* line = nullptr;     // (occurrences) ascending
  const std::uint32_t* example = nullptr;  // (occurrences)
  const float* value = nullptr;            // (occurrences), or nullptr: all 1
};

// Columns of a product that one call makes: [first, first + kProductColumns) as far as there are.
extern const std::size_t kProductColumns;
// Floats from one example's line of a product to the next that hold `width` columns and what a call
// writes beyond them: zeros. Not a multiple of 4 KiB, so that a column does not fall into one set
// of a cache.
std::size_t ProductStride(std::size_t width);

// y (examples, stride), columns from `first_column` on, becomes the sum of all groups' products, in
// their order and that of their lines. weight: (inputs, width). Fastest when the first group has no
// `begin`.
void MultiplyLines(std::span<const LineGroup> groups, const float* weight, std::size_t inputs,
                   std::size_t width, std::size_t first_column, std::size_t examples, float* y,
                   std::size_t stride);

// The gradients of one group from those of the products, `dy` (examples, stride): its lines of
// d_weight (inputs, width) and, where wanted, group.gradient are overwritten.
void DifferentiateLines(const LineGroup& group, const float* weight, std::size_t width,
                        const float* dy, std::size_t stride, float* d_weight);

// Of the working memory that a thread keeps once it has made either for such a layer, whose widest
// group is so wide.
std::size_t LineThreadBytes(std::size_t inputs, std::size_t width, std::size_t widest_group);

}  // namespace terrace
