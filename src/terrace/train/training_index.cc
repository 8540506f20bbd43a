// What of memory is the rows' and what their index's.
#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "terrace/base/units.h"
#include "terrace/train/index_plan.h"
#include "terrace/train/training_run.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

std::uint64_t Sum(std::span<const std::uint64_t> numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::uint64_t{0});
}

}  // namespace

void TrainingRun::ExpectRows() const {
  const std::uint64_t planned = planned_index_bytes_.load(std::memory_order_relaxed);
  const std::uint64_t taken = stores_->index_bytes() + IndexStep() / 4;
  const std::uint64_t room = planned > taken ? planned - taken : 0;
  const std::vector<std::uint64_t> rows = NewToIndexes();
  if (Sum(rows) > room / kKeyIndexBytes) return;
  for (std::size_t t = 0; t < rows.size(); ++t) {
    const std::vector<Store*> shards = stores_->table(t);
    for (Store* store : shards) store->ExpectRows(rows[t] / shards.size());
  }
}

std::vector<std::uint64_t> TrainingRun::NewToIndexes() const {
  std::vector<std::uint64_t> rows;
  for (std::size_t t = 0; t < caches_.size(); ++t) {
    // By group few of them are new blocks.
    const bool in_blocks = stores_->table(t).front()->in_blocks();
    rows.push_back(in_blocks ? 0 : caches_[t]->stats().unstored_rows);
  }
  return rows;
}

std::uint64_t TrainingRun::ComingIndexBytes(std::span<const std::uint64_t> new_rows) const {
  std::uint64_t all = 0;
  for (std::size_t t = 0; t < new_rows.size(); ++t) {
    std::uint64_t bytes = 0, rows = new_rows[t];
    for (const Store* store : stores_->table(t)) {
      bytes += store->index_bytes();
      if (rows > 0) rows += store->stats().live_rows;
    }
    // What has grown for expected rows has their room already.
    all += std::max(bytes, rows * kKeyIndexBytes);
  }
  return all;
}

std::vector<std::uint64_t> TrainingRun::LeastCaches() const {
  std::vector<std::uint64_t> least = LeastTableBytes(job_, *plan_);
  for (std::size_t t = 0; t < caches_.size(); ++t) {
    const std::uint64_t rows = job_.training.minibatch * plan_->tables[t].slots.size();
    least[t] = std::max(least[t], caches_[t]->LeastCapacity(rows));
  }
  return least;
}

Result<bool> TrainingRun::GiveWayToIndex() {
  // In few steps, each ahead of the growth: a cache that shrinks waits for all pinned rows to
  // leave. A checkpoint stores all rows that no store has yet.
  const std::uint64_t step = IndexStep();
  const std::uint64_t planned_before = planned_index_bytes_.load(std::memory_order_relaxed);
  const std::vector<std::uint64_t> new_rows = NewToIndexes();
  const std::uint64_t at_most = stores_->index_bytes() + Sum(new_rows) * kKeyIndexBytes;
  if (at_most + step / 4 < planned_before) return false;
  const std::uint64_t index_bytes = ComingIndexBytes(new_rows);
  if (index_bytes + step / 4 < planned_before) return false;
  const std::vector<std::uint64_t> least_caches = LeastCaches();
  const std::uint64_t least = Sum(least_caches);
  if (index_bytes + least > memory_.rows_bytes) {
    // With more memory the write buffers are larger as well.
    const std::uint64_t needed = BudgetForRows(memory_input_, index_bytes / 4 * 9 + least);
    MutexLock lock(&stop_mu_);
    if (stop_after_checkpoint_.ok()) {
      stop_after_checkpoint_ =
          OutOfMemoryError(fmt::format("the index of the rows on disk has grown to {} and the "
                                       "cache can give way no more. The run has stopped after a "
                                       "checkpoint: go on with --resume --set memory.budget={}MiB, "
                                       "which is enough for twice the rows",
                                       FormatBytes(index_bytes), (needed + kMiB - 1) / kMiB));
    }
    return false;
  }
  const std::uint64_t planned = std::min(index_bytes + step, memory_.rows_bytes - least);
  planned_index_bytes_.store(planned, std::memory_order_relaxed);
  const std::vector<std::uint64_t> bytes =
      SplitCacheBytes(*plan_, least_caches, memory_.rows_bytes - planned);
  bool drains = false;
  for (std::size_t t = 0; t < caches_.size(); ++t) {
    const Status status = caches_[t]->SetCapacity(bytes[t]);
    // kOutOfMemory: pinned rows hold more for now; the cache comes down to its limit as they leave.
    if (status.code() == StatusCode::kOutOfMemory) {
      drains = true;
    } else if (!status.ok()) {
      return status;
    }
  }
  return drains;
}

std::uint64_t TrainingRun::IndexStep() const { return std::max(kMiB / 4, memory_.rows_bytes / 16); }

}  // namespace terrace
