// The host twin of accumulate and apply (HPS 4.1, algorithm 2): gradients are summed per key in a
// fixed order, then the optimizer is applied to the sums. Two calls, because several workers
// exchange the sums between them. Threads: free functions over disjoint ranges; see each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "terrace/table/row_schema.h"

namespace terrace {

// kNo takes the path for any dimension even where one for this dimension exists: tests compare
// them.
enum class Specialise : std::uint8_t { kYes, kNo };

// What one mini-batch says of its distinct rows, by local row index r in [0, rows()).
struct MiniBatchRows {
  std::span<std::byte* const> row;  // (rows) where row r lies.
  std::span<const std::uint32_t>
      begin;  // (rows + 1) occurrences of r are [begin[r], begin[r+1]) of the two below,
  std::span<const std::uint32_t>
      example;  //   in the order of examples, then slots: the order in which gradients are summed.
  std::span<const std::uint32_t>
      input_offset;  // (occurrences) floats: where the occurrence's slot starts in a gradient line.
  // (occurrences) per-key values, or empty: all 1. A slot with mean pooling has value / number of
  // its keys in the example here.
  std::span<const float> value;
  std::size_t rows() const { return row.size(); }
};

// Gradients of the network's sparse inputs for a mini-batch.
struct SparseGradients {
  // (examples, line_stride) of the network's input block; the columns of the embeddings count.
  const float* lines = nullptr;
  std::size_t line_stride = 0;    // Floats.
  const float* wide = nullptr;    // (examples) gradient of the wide sum, or nullptr.
  const float* label = nullptr;   // (examples)
  const float* weight = nullptr;  // (examples) or nullptr: all 1.
  // Instead of lines, where they are summed already: those of row r's embedding begin at sums +
  // sum_at[r].
  const float* sums = nullptr;
  const std::uint32_t* sum_at = nullptr;  // (rows)
};

// Of the distinct examples that hold the row's key: their weight, and their weight times label.
struct StatisticsDelta {
  float show = 0;
  float click = 0;
};

// Sums for rows [first, last): gradient_sum (last - first, schema.weight_floats()), delta (last -
// first). The "embedding" segment takes columns [input_offset, + dim) of a line; the "wide" segment
// takes `wide`. A sum starts from the first occurrence's gradient; a row without occurrences has
// zeros. Any split into ranges gives the same bits. Ranges of a few hundred rows, each followed by
// its Apply, keep the sums in the first levels of the processor's cache.
void Accumulate(const RowSchema& schema, const MiniBatchRows& rows,
                const SparseGradients& gradients, std::size_t first, std::size_t last,
                float* gradient_sum, StatisticsDelta* delta,
                Specialise specialise = Specialise::kYes);

struct ApplyStep {
  std::span<const float> learning_rate;  // (segments) of this step, by each segment's schedule;
                                         // FTRL reads its alpha instead.
  std::uint64_t examples_seen = 0;  // Trained after this mini-batch: becomes last_seen of its rows.
  // Trained before it: the expiry points until here have let the statistics of its rows decay.
  std::uint64_t examples_before = 0;
};

// Applies the optimizers of all segments and the statistics to `count` distinct rows. rows:
// (count), sums as above.
void Apply(const RowSchema& schema, const ApplyStep& step, std::span<std::byte* const> rows,
           const float* gradient_sum, const StatisticsDelta* delta,
           Specialise specialise = Specialise::kYes);

}  // namespace terrace
