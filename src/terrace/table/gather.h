// The forward twin of accumulate: the weights of a mini-batch's keys, pooled by slot into the input
// block of the network, and summed into its wide input. Threads: a free function over disjoint
// ranges of examples; it only reads the rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "terrace/table/row_schema.h"
#include "terrace/table/sparse_update.h"

namespace terrace {

// A slot of the table whose rows are read.
struct PooledSlot {
  std::uint32_t slot = 0;          // Its number in the CSR.
  std::uint32_t input_offset = 0;  // Floats: where its pooled embedding starts in a block line.
  // Divides the sum of the embeddings, and the slot's share of the wide sum, by the number of the
  // slot's keys in the example. The gradient of that is value / number of keys for each occurrence:
  // the caller puts it into MiniBatchRows::value.
  bool mean = false;
};

// The keys of a mini-batch's examples as one table sees them. Several tables share one CSR: each
// lists its own slots, and fills their columns of the same block.
struct PooledLookup {
  std::span<const std::byte* const> row;  // (rows) where local row r lies; nullptr reads as zeros.
  std::span<const PooledSlot> slots;      // Of this table, each once, in the order of the wide sum.
  // CSR by (example, slot) over all slots of the data: the keys of (e, s) are the occurrences
  // [key_begin[e * data_slots + s], key_begin[e * data_slots + s + 1]).
  std::span<const std::uint32_t> key_begin;
  std::uint32_t data_slots = 0;
  // Subtracted from an occurrence to index the two arrays below, so that a mini-batch may use the
  // key_begin of its whole batch.
  std::uint32_t first_occurrence = 0;
  std::span<const std::uint32_t> row_index;  // (occurrences) local row; others' slots are not read.
  std::span<const float> value;              // (occurrences) per-key values, or empty: all 1.
};

// For examples e in [first, last): block[(e - first) * stride + input_offset] becomes the pooled
// embedding of each of the table's slots, zeros for a slot without keys; wide[e - first], unless
// wide is nullptr, is increased by the sum of the wide weights of the table's keys (the caller
// starts it at 0). Without an "embedding" segment, or as nullptr, the block is not touched; without
// a "wide" segment `wide` is not. Sums take the keys in their order, from the first key's weights
// on; any split into ranges gives the same bits.
void GatherPooled(const RowSchema& schema, const PooledLookup& lookup, std::size_t first,
                  std::size_t last, float* block, std::size_t stride, float* wide,
                  Specialise specialise = Specialise::kYes);

}  // namespace terrace
