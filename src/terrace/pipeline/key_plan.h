// KeyPlanner: turns the keys of a batch into a working set: the distinct keys of each table, and
// for every mini-batch its distinct rows with their occurrences in the order in which gradients are
// summed. A key is hashed once. Threads: one thread at a time (stage 2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/base/thread.h"
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

// Threads that plan mini-batches side by side, the caller one of them. The rows of
// the items are the same; which mini-batches an item has may hang on what the threads' maps take.
struct PlanThreads {
  int count = 1;
  // Of the maps of mini-batches of all but the first; where mini-batches need more, fewer work.
  std::uint64_t max_bytes = 0;
  std::function<void()> on_start = nullptr;  // Runs once on each but the caller; may be null.
};

class KeyPlanner {
 public:
  // What a thread beyond the first takes at least, of a table.
  static constexpr std::uint64_t kLeastLaneBytesOfTable = 80 << 10;

  // slots: by DataSchema::slots. max_bytes: an item ends before a mini-batch that may take it and
  // the planner's maps, those of threads beyond the first not counted, beyond so many; one
  // mini-batch is planned in any case.
  KeyPlanner(std::vector<PlannedSlot> slots, std::size_t tables, std::uint32_t minibatch_size,
             std::uint64_t max_bytes = ~std::uint64_t{0}, PlanThreads threads = {});
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
  // CPU time of the planner's own threads, seconds.
  double cpu_seconds() const { return workers_ == nullptr ? 0 : workers_->cpu_seconds(); }

 private:
  class KeyMap;
  struct TableScratch;
  struct Lane;

  std::unique_ptr<WorkItem> TakeItem() TERRACE_EXCLUDES(spare_mu_);
  // Gives lanes the next mini-batches of the item, as far as there are and max_bytes allows; how
  // many.
  Result<std::size_t> FillLanes(const WorkItem& item, std::uint32_t max_minibatches);
  void CountOccurrences(const Batch& batch, Lane* lane) const;
  // Whether so many lanes may work at a time, with mini-batches of theirs counted.
  bool MayUse(std::size_t lanes) const;
  // Whether the mini-batches of the first `lanes` lanes may be added within max_bytes.
  bool HasMemoryFor(const WorkItem& item, std::size_t lanes) const;
  // Appends the mini-batches of the first `lanes` lanes, and returns how many: fewer, where the
  // next takes a table beyond its limit. After an error the item is of no use.
  Result<std::size_t> AddMinibatches(WorkItem* item, std::size_t lanes,
                                     std::span<const std::size_t> max_rows,
                                     std::uint32_t* full_table);
  void OnLanes(std::size_t lanes, const std::function<void(Lane*)>& task);
  void FindLocalRows(const Batch& batch, Lane* lane, std::uint32_t* local_row) const;
  static void FindLocalRowsOfTable(std::span<const Key> keys, std::uint32_t stamp,
                                   TableScratch* scratch, std::uint32_t* local_row);
  // The rows of the mini-batch in the set.
  Status FindWorkingRows(const TableScratch& scratch, KeyMap* set, TableWork* table) const;
  void Invert(Lane* lane, WorkItem* item) const;

  const std::vector<PlannedSlot> slots_;
  const std::size_t tables_;
  const std::uint32_t minibatch_size_;
  const std::uint64_t max_bytes_, max_lane_bytes_;
  const bool any_mean_;
  std::vector<std::unique_ptr<Lane>> lanes_;       // (threads) A mini-batch each.
  std::vector<std::unique_ptr<KeyMap>> set_maps_;  // (tables) Working rows.
  std::unique_ptr<WorkerGroup> workers_;           // Null: one thread.
  // Numbers, over the planner's life, of the current mini-batch and working set.
  std::uint32_t minibatch_stamp_ = 0;
  std::uint32_t set_stamp_ = 0;
  Mutex spare_mu_;
  std::vector<std::unique_ptr<WorkItem>> spare_ TERRACE_GUARDED_BY(spare_mu_);
};

}  // namespace terrace
