// RowProducts: the first layer of a network by the distinct rows of a mini-batch (line_products.h).
// What a slot's keys repeat is multiplied once, and the gradients of rows come out summed. Which
// mini-batches go this way is a function of their keys and of the job alone. Threads: Plan and
// PlanAhead one at a time; the calls for different groups, and those for different panels, run at
// once. Borrows tables and the network that the layer is of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/status.h"
#include "terrace/model/line_products.h"
#include "terrace/model/network.h"
#include "terrace/pipeline/work_item.h"
#include "terrace/table/gather.h"
#include "terrace/table/row_schema.h"

namespace terrace {

// What a step needs to know of one table.
struct StepTable {
  const RowSchema* schema = nullptr;
  std::vector<PooledSlot> slots;  // The table's slots.
  std::uint64_t seed = 0;         // Of the rows that begin anew because they have expired.
  bool admits = false;  // Local rows may have no place: they read as zeros and learn nothing.
};

// The largest magnitude's bits: they order as the magnitudes do, NaN above infinity.
std::uint32_t LargestBits(const float* values, std::size_t count);

class RowProducts {
 public:
  // Null where the layer is none, or too narrow for `threads` to share.
  static std::unique_ptr<RowProducts> Create(const std::vector<StepTable>* tables, Network* network,
                                             std::uint32_t minibatch, int threads);
  // Takes bytes() of memory, all at once. Before anything else. kOutOfMemory.
  Status Allocate();
  std::uint64_t bytes() const { return (product_floats_ + kLists * list_floats_) * sizeof(float); }

  // Of the memory that the caller lends for lines and their gradients, 64-byte aligned, until the
  // mini-batch is applied.
  std::size_t line_floats() const { return line_floats_; }
  void UseLines(float* lines) { lines_ = lines; }

  // Sorts the rows of mini-batch m by slot. False: so many of its keys are distinct that it is
  // better taken by examples; then nothing else may be called.
  bool Plan(const WorkItem& item, std::uint32_t m);
  // Does the work of the next Plan, if that is of this mini-batch. Until then nothing else may be
  // called but what tells the products and sums of the mini-batch before (product, sums, sum_at),
  // which any thread may ask for meanwhile. REQUIRES: m > 0, and item is there until Plan is called
  // for it, or for mini-batch 0 of another.
  void PlanAhead(const WorkItem& item, std::uint32_t m);
  // A group is a slot, the first one the dense features where there are any; a panel some columns
  // of the product. In order: Gather for all groups, Multiply for all panels, then, for training,
  // Differentiate for all groups when the gradients of the products lie in their place, then
  // AddShared once.
  int groups() const { return static_cast<int>(groups_.size()); }
  int panels() const;
  void Gather(const WorkItem& item, std::uint32_t m, int group);
  void Multiply(int panel);
  // Writes the group's part of the layer's gradient.
  void Differentiate(int group);
  void AddShared();
  // What each thread takes with the first of these that it does, and keeps.
  std::size_t thread_bytes() const;

  // (FirstLayer::width) of an example of the mini-batch: its product, then the gradient of it.
  float* product(std::uint32_t example) const { return products_ + example * product_stride_; }
  // After AddShared: the gradient sum of each local row's embedding begins at sums() +
  // sum_at(t)[r].
  const float* sums() const { return lines_; }
  const std::uint32_t* sum_at(std::size_t table) const {
    return sums_of_.at + sums_of_.first_row[table];
  }
  // After Differentiate: the largest magnitude among the sums of each slot's rows, as bits
  // (LargestBits).
  std::uint32_t largest_sum() const;
  // An example of the mini-batch that holds a row whose sum has that magnitude. REQUIRES: after
  // Differentiate and before AddShared.
  std::uint32_t ExampleOfLargestSum() const;

 private:
  struct Group {
    std::size_t table = 0;
    std::uint32_t input_offset = 0;  // Floats: column of the slot in the block.
    std::size_t weight_offset = 0;   // Bytes: of the embedding in a row.
    bool dense = false;
    std::size_t first_line = 0;        // Into line_row_; begins are one more a group.
    std::size_t first_occurrence = 0;  // Into the lists of occurrences.
    std::size_t occurrences = 0;
    std::uint32_t largest = 0;  // Magnitude of its sums, as bits.
  };
  // Of a row that several slots have, floats of lines_: what is added to its sum, and where that
  // is.
  struct SharedSum {
    std::uint32_t from = 0;
    std::uint32_t to = 0;
    std::uint32_t width = 0;
  };

  // Where the sums of a mini-batch's local rows begin.
  struct SumPlaces {
    std::uint32_t* at = nullptr;         // (local rows of all tables)
    std::vector<std::size_t> first_row;  // (tables) into it
  };
  // What PlanAhead was called for; the item may be gone since.
  struct Ahead {
    const WorkItem* item = nullptr;
    const Batch* batch = nullptr;
    std::uint64_t first_example = 0;
    std::uint32_t m = 0;
    bool operator==(const Ahead&) const = default;
  };

  RowProducts(const std::vector<StepTable>* tables, FirstLayer layer,
              const NetworkInputSpec& inputs, std::uint32_t minibatch);
  void PlanMemory();
  static Ahead AheadOf(const WorkItem& item, std::uint32_t m);
  void CountLines(const WorkItem& item, std::uint32_t m);
  void PlaceGroups(const WorkItem& item, std::uint32_t m);
  void AssignLines(const WorkItem& item, std::uint32_t m);
  // The groups of a row that several slots have, ascending, each once.
  void GroupsOfRow(const TableWork& work, std::size_t begin, std::size_t end,
                   std::vector<std::uint32_t>* groups) const;
  void CopyOccurrences(const TableWork& work, std::uint32_t m, int group);

  const std::vector<StepTable>* const tables_;
  const FirstLayer layer_;
  const NetworkInputSpec inputs_;
  const std::uint32_t minibatch_;
  std::vector<Group> groups_;
  std::vector<LineGroup> line_groups_;          // (groups) for the products
  std::vector<std::uint32_t> group_of_column_;  // (embedding columns)
  std::size_t line_floats_ = 0;
  std::size_t most_occurrences_ = 0;
  float* lines_ = nullptr;
  float* products_ = nullptr;  // (minibatch, product_stride_)
  std::size_t product_stride_ = 0;
  static constexpr std::size_t kLists = 8;
  std::size_t product_floats_ = 0, list_floats_ = 0;
  HugeBuffer memory_;  // Of the products and the lists below.

  SumPlaces sums_of_;  // Of the mini-batch that Plan was called for last.

  // Of that which was planned last, perhaps ahead:
  Ahead ahead_;  // Without an item once Plan has been called.
  bool by_rows_ = false;
  std::uint32_t examples_ = 0;
  std::uint32_t* line_row_ = nullptr;   // (lines) local row in the group's table
  std::uint32_t* begin_ = nullptr;      // (lines + groups)
  std::uint32_t* line_ = nullptr;       // (occurrences)
  std::uint32_t* example_ = nullptr;    // (occurrences)
  float* value_ = nullptr;              // (occurrences)
  std::uint32_t* row_group_ = nullptr;  // (local rows of all tables), or kSeveral
  SumPlaces planned_sums_;              // As row_group_ lies.
  std::vector<SharedSum> shared_;
};

}  // namespace terrace
