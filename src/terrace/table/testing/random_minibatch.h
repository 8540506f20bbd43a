// RandomMiniBatch: examples with keys in slots, as the layers above hand them to this one, for
// tests and benchmarks. Keys repeat: inside a slot, across slots and across examples. Threads: a
// value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "terrace/table/gather.h"
#include "terrace/table/sparse_update.h"

namespace terrace {

struct RandomMiniBatchOptions {
  std::uint64_t seed = 1;
  std::uint32_t examples = 64;
  std::uint32_t slots = 3;
  std::uint32_t keys_per_slot = 2;  // 0 to 2 * this, unless exactly.
  bool exactly = false;             // Every slot holds keys_per_slot keys.
  std::uint32_t rows = 40;          // Distinct keys to draw from.
  double skew = 1.0;                // Of the draw: 1 is uniform; larger favours low numbers.
  std::uint32_t dim = 8;
  bool values = false;
  bool weights = false;
};

struct RandomMiniBatch {
  explicit RandomMiniBatch(const RandomMiniBatchOptions& options);

  // rows: (touched) of row_number.
  MiniBatchRows Rows(const std::vector<std::byte*>& rows) const;
  // line gradients are block(example) of `gradient`; stride() floats a line.
  SparseGradients Gradients() const;
  std::size_t stride() const { return options.slots * options.dim + 5; }

  RandomMiniBatchOptions options;
  // By (example, slot, key).
  std::vector<std::uint32_t> key_begin;  // (examples * slots + 1)
  std::vector<std::uint32_t> row_index;  // (occurrences) into row_number
  std::vector<float> value;              // (occurrences) or empty
  std::vector<std::uint32_t>
      row_number;  // (touched) which of the options.rows, by first occurrence.
  // By row.
  std::vector<std::uint32_t> begin, example, input_offset;
  std::vector<float> row_value;
  // Gradients, labels and weights by example.
  std::vector<float> gradient, wide, label, weight;
  std::vector<const float*> line;
};

}  // namespace terrace
