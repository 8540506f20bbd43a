// KeyPlanner: turns the keys of a batch into a working set: the distinct keys of each table, and
// for every mini-batch its distinct rows with their occurrences in the order in which gradients are
// summed. A key is hashed once. Threads: one thread at a time (stage 2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/data/batch.h"
#include "terrace/pipeline/work_item.h"

namespace terrace {

// What the planner has to know of a slot.
struct PlannedSlot {
  std::uint32_t table = 0;
  std::uint32_t input_offset = 0;  // Column of the embedding block.
  bool mean =
      false;  // Mean pooling: an occurrence's value is divided by the number of the slot's keys.
};

class KeyPlanner {
 public:
  // slots: by DataSchema::slots. max_bytes: an item ends before a mini-batch that may take it and
  // the planner's maps beyond so many; one mini-batch is planned in any case.
  KeyPlanner(std::vector<PlannedSlot> slots, std::size_t tables, std::uint32_t minibatch_size,
             std::uint64_t max_bytes = ~std::uint64_t{0});
  ~KeyPlanner();

  // Plans examples [first_example, ...) of `batch` mini-batch by mini-batch into one item, at most
  // max_minibatches of them, and stops before one that would take a table beyond max_rows[t]
  // distinct keys. The item
  // holds at least one mini-batch; kOutOfMemory when that one alone is too large (`table` and the
  // rows it has are in the message), or when the maps can't grow. first_minibatch: the batch's
  // mini-batch that starts at first_example. REQUIRES: first_example < batch->examples.
  Result<std::unique_ptr<WorkItem>> Plan(std::shared_ptr<const Batch> batch,
                                         std::uint32_t first_example, std::uint32_t first_minibatch,
                                         std::span<const std::size_t> max_rows,
                                         std::uint32_t max_minibatches = ~0u);

  // Takes back an item whose work is done, for its memory. Any thread.
  void Recycle(std::unique_ptr<WorkItem> item) TERRACE_EXCLUDES(spare_mu_);

  std::uint64_t MemoryBytes() const;

 private:
  class KeyMap;
  struct TableMaps;

  std::unique_ptr<WorkItem> TakeItem() TERRACE_EXCLUDES(spare_mu_);
  // Occurrences by table in examples [begin, end), into maps_.
  void CountOccurrences(const Batch& batch, std::uint32_t begin, std::uint32_t end);
  // Whether a mini-batch with the occurrences that were counted may be added within max_bytes.
  bool HasMemoryFor(const WorkItem& item) const;

  // Appends one mini-batch. False: a table is beyond its limit; the item is as before. After an
  // error the item is of no use.
  Result<bool> AddMinibatch(WorkItem* item, std::uint32_t begin, std::uint32_t end,
                            std::span<const std::size_t> max_rows, std::uint32_t* full_table);
  void FindLocalRows(const Batch& batch, std::uint32_t begin, std::uint32_t end, WorkItem* item);
  static void FindLocalRowsOfTable(std::span<const Key> keys, std::uint32_t stamp, TableMaps* maps,
                                   std::uint32_t* local_row);
  // The rows of the mini-batch in the set.
  Status FindWorkingRows(TableMaps* maps, TableWork* table);
  void Invert(const Batch& batch, std::uint32_t begin, std::uint32_t end, WorkItem* item);

  const std::vector<PlannedSlot> slots_;
  const std::size_t tables_;
  const std::uint32_t minibatch_size_;
  const std::uint64_t max_bytes_;
  const bool any_mean_;
  std::vector<std::unique_ptr<TableMaps>> maps_;  // (tables)
  // Numbers, over the planner's life, of the current mini-batch and working set.
  std::uint32_t minibatch_stamp_ = 0;
  std::uint32_t set_stamp_ = 0;
  Mutex spare_mu_;
  std::vector<std::unique_ptr<WorkItem>> spare_ TERRACE_GUARDED_BY(spare_mu_);
};

}  // namespace terrace
