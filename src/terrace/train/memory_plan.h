// MemoryPlan: how the budget of the whole process is split, computed before the start and printed.
// Threads: pure functions and a value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/train/job.h"

namespace terrace {

struct MemoryPlanInput {
  std::uint64_t budget_bytes = 0;
  // Of the process now, and what its compute threads take later: code, network, contexts; they
  // stay.
  std::uint64_t resident_bytes = 0;
  std::uint32_t stores = 1;       // Tables * shards.
  std::uint64_t file_rows = 0;    // Of a file of each store that is written, all together.
  std::uint32_t slots = 0;        // Of the data.
  std::uint32_t tables = 1;       // Each with a cache.
  std::uint32_t dense_width = 0;  // Floats.
  std::uint32_t batch = 0;        // Examples, as the job asks.
  std::uint32_t minibatch = 0;
  std::uint32_t pull_threads = 1;       // That plan a working set together.
  std::uint32_t cache_parts = 1;        // Of each table's cache.
  std::uint32_t sets = 1;               // Working sets alive at a time.
  std::uint32_t batches_ahead = 0;      // Batches besides those of the sets.
  std::uint64_t least_cache_bytes = 0;  // Of all tables: LeastCacheBytes.
  // Of each store and use, for the longest records: Store::LeastBufferBytes.
  std::uint64_t least_io_buffer_bytes = 0;
  std::uint64_t further_buffer_bytes = 0;  // Of all stores: Store::FurtherBufferBytes.
  std::uint64_t dense_state_bytes = 0;     // A copy of it is made for a checkpoint.
  std::uint64_t index_bytes = 0;           // Of the stores now; more after a resume.
  std::uint64_t index_room_bytes = 0;      // That it must be able to grow by; a reader's does not.
  std::uint64_t filter_bytes = 0;          // Of all admission filters, both of each table.
  std::uint64_t source_bytes = 0;          // Of one source: read-ahead, archive, shuffling window.
  // Of source_bytes, and of a validation's, and what the job allows of it: another budget has
  // another share. 0: every budget has that of source_bytes.
  std::uint64_t read_ahead_bytes = 0, most_read_ahead_bytes = 0;
  bool validates = false;
  // Of a validation: what it copies of rows, and its source, as source_bytes.
  std::uint64_t validation_rows_bytes = 0, validation_source_bytes = 0;
  bool of_a_run = false;  // That is read: of its job's settings only the budget may be another.
  bool looks_ahead = false;
  std::uint64_t row_bytes = 0;  // In a cache, all that belongs to it: the mean over the slots.
};

struct MemoryPlan {
  std::uint64_t budget_bytes = 0;
  std::uint64_t resident_bytes = 0;    // Code, network and contexts.
  std::uint64_t slack_bytes = 0;       // For what nobody counts: allocator, stacks, page tables.
  std::uint64_t transient_bytes = 0;   // Checkpoint copies, metrics, validation.
  std::uint64_t filter_bytes = 0;      // Admission filters.
  std::uint64_t future_bytes = 0;      // Of FutureKeys; 0: nobody looks ahead.
  std::uint64_t look_ahead_bytes = 0;  // With the source that is read for it.
  std::uint64_t io_buffer_bytes = 0;   // Of one store and use; a store has three.
  // Of a file of any store: where memory is short, fewer than the job's file size has room for.
  std::uint64_t most_file_rows = ~std::uint64_t{0};
  // All buffers, and what files in the making take beyond their part of the slack.
  std::uint64_t io_bytes = 0;
  std::uint32_t batch = 0;              // Examples, adapted; a multiple of minibatch.
  std::uint32_t sets = 1;               // Working sets alive at a time.
  std::uint64_t set_bytes = 0;          // Of one, with the planner's maps; rows not counted.
  std::uint64_t plan_thread_bytes = 0;  // Of the planner's threads beyond the first.
  // Likewise, of a validation: examples of a batch, fewer where memory is short.
  std::uint32_t validation_batch = 0;
  std::uint64_t validation_set_bytes = 0;
  // Batches and working sets in flight, rows not counted, and the planner's maps.
  std::uint64_t batches_bytes = 0;
  std::uint64_t rows_bytes =
      0;  // Caches and the stores' indexes together: the index grows, the caches give way.
};

// The least budget that PlanMemory accepts, in whole MiB, with a little to spare;
// input.budget_bytes is not read.
std::uint64_t LeastBudgetBytes(const MemoryPlanInput& input);
// The least budget, likewise, whose plan leaves so many bytes for rows and index, which it does not
// know of beforehand.
std::uint64_t BudgetForRows(const MemoryPlanInput& input, std::uint64_t rows_bytes);
// kInvalidArgument: the budget is too small; says the least that would do.
Result<MemoryPlan> PlanMemory(const MemoryPlanInput& input);
std::string DescribeMemoryPlan(const MemoryPlan& plan);

// "628 MiB": whole ones, rounded up, so that who asks for the least that would do has it.
std::string WholeMiB(std::uint64_t bytes);

// What a trainer or an evaluator reads ahead, of the most that its job allows.
std::uint64_t ReadAheadBytes(std::uint64_t most_bytes, std::uint64_t budget_bytes);

// What a trainer and an evaluator of this job have in common; the process is measured as it is now.
// later_bytes: StepExecutor::later_bytes().
MemoryPlanInput MakeMemoryPlanInput(const Job& job, const ModelPlan& plan,
                                    std::uint64_t source_bytes, std::uint64_t later_bytes);

// The least that each table's cache needs for training to go on: the rows of one mini-batch of
// distinct keys, with their metadata; and all together.
std::vector<std::uint64_t> LeastTableBytes(const Job& job, const ModelPlan& plan);
std::uint64_t LeastCacheBytes(const Job& job, const ModelPlan& plan);
// `bytes` over the tables' caches: `least`, by table, and of the rest a share by its slots and the
// length of its rows. REQUIRES: at least the sum of `least`.
std::vector<std::uint64_t> SplitCacheBytes(const ModelPlan& plan,
                                           std::span<const std::uint64_t> least,
                                           std::uint64_t bytes);

}  // namespace terrace
