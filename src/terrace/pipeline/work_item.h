// WorkItem: one working set on its way through the stages. Each stage fills its part and hands the
// whole on; what it owns (pins, memory) is given back when the item goes. Threads: a value that one
// stage owns at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/cache/row_cache.h"
#include "terrace/data/batch.h"

namespace terrace {

// What a working set says of one table. Rows are numbered twice: by working row w over the whole
// set, and by local row r within a mini-batch, so that a key is hashed once and training touches
// small dense arrays.
struct TableWork {
  std::vector<Key> keys;                 // (working rows) distinct, by first occurrence
  std::vector<std::uint32_t> row_begin;  // (minibatches + 1) local rows of mini-batch m are
  std::vector<std::uint32_t> rows;  //   rows[row_begin[m] .. row_begin[m + 1]): their working rows
  std::vector<std::uint32_t>
      inverse_begin;  // (local rows + minibatches) of mini-batch m from row_begin[m] + m on:
                      //   local row r's occurrences, relative to occurrence_begin[m]
  std::vector<std::uint32_t> occurrence_begin;  // (minibatches + 1) into the three below
  std::vector<std::uint32_t> example;           // (occurrences) within the mini-batch
  std::vector<std::uint32_t>
      input_offset;          // (occurrences) column of the slot in the network's input
  std::vector<float> value;  // (occurrences), or empty: all 1

  // By stage 2.
  PinnedRows pinned;
  // By stage 3: where each local row of each mini-batch lies, on the device that trains it. Laid
  // out like `rows`.
  std::vector<std::byte*> places;

  std::uint64_t MemoryBytes() const;
};

struct WorkItem {
  // Shared because a batch that does not fit in memory is cut into several items.
  std::shared_ptr<const Batch> batch;
  std::uint32_t minibatch_size = 0;  // Examples; only the last mini-batch of an epoch has fewer.
  // Examples [first_example, end_example) of the batch, a whole number of mini-batches.
  std::uint32_t first_example = 0;
  std::uint32_t end_example = 0;
  std::uint32_t first_minibatch =
      0;  // Of the batch: index of the first cursor that this item reaches.
  std::uint32_t minibatches = 0;
  bool last_of_batch = false;

  // (keys of the examples) local row, within its mini-batch and table, of each occurrence of
  // batch->keys from batch->key_begin[first_example * slots] on.
  std::vector<std::uint32_t> local_row;
  std::vector<TableWork> tables;

  std::uint32_t MinibatchBegin(std::uint32_t m) const { return first_example + m * minibatch_size; }
  std::uint32_t MinibatchEnd(std::uint32_t m) const {
    const std::uint32_t end = MinibatchBegin(m) + minibatch_size;
    return end < end_example ? end : end_example;
  }
  std::uint64_t MemoryBytes() const;

  // Gives back what it pins and its batch, and empties its lists but keeps their memory, for the
  // next working set: to take fresh pages from the system for each costs more than to fill them.
  void Clear();
};

}  // namespace terrace
