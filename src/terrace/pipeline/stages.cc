#include "terrace/pipeline/stages.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/clock.h"

namespace terrace {

// Gives the memory of its batch back when the last working set of it goes.
struct ReadStage::HeldBatch {
  HeldBatch(std::shared_ptr<Spares> to, Batch full)
      : spares(std::move(to)), batch(std::move(full)) {}
  ~HeldBatch() {
    MutexLock lock(&spares->mu);
    spares->batches.push_back(std::move(batch));
  }
  const std::shared_ptr<Spares> spares;
  Batch batch;
};

ReadStage::ReadStage(ExampleSource* source, std::uint32_t batch_examples, std::uint32_t minibatch)
    : source_(source), batch_examples_(batch_examples), minibatch_(minibatch) {
  TERRACE_CHECK(minibatch > 0 && batch_examples % minibatch == 0);
}

Status ReadStage::Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* done) {
  TERRACE_CHECK(item == nullptr);
  Batch spare;
  {
    MutexLock lock(&spares_->mu);
    if (!spares_->batches.empty()) {
      spare = std::move(spares_->batches.back());
      spares_->batches.pop_back();
    }
  }
  Result<std::optional<Batch>> next =
      source_->NextIn(batch_examples_, minibatch_, std::move(spare));
  if (next.status().code() == StatusCode::kAborted) return next.status();
  if (!next.ok() || !next->has_value()) {
    failure_ = next.status();
    *done = true;
    return OkStatus();
  }
  std::optional<Batch> batch = std::move(next).value();
  item = std::make_unique<WorkItem>();
  item->minibatch_size = minibatch_;
  item->end_example = batch->examples;
  item->last_of_batch = true;
  const auto held = std::make_shared<HeldBatch>(spares_, std::move(*batch));
  item->batch = std::shared_ptr<const Batch>(held, &held->batch);
  return emit(std::move(item));
}

void ReadStage::Cancel(const Status& /*cause*/) { source_->Cancel(); }

PullStage::PullStage(Options options, std::vector<RowCache*> caches)
    : options_(std::move(options)),
      caches_(std::move(caches)),
      limiter_(options_.max_sets),
      planner_(options_.slots, caches_.size(), options_.minibatch, options_.max_set_bytes,
               PlanThreads{options_.plan_threads, options_.max_plan_thread_bytes,
                           options_.on_plan_thread}),
      admission_(options_.admission),
      released_(std::max<std::size_t>(1, options_.max_sets)) {
  if (options_.max_sets > 0) {
    release_thread_ = Thread("release", ThreadPriority::kYielding, [this] { ReleaseLoop(); });
  }
}

PullStage::~PullStage() {
  released_.Close();
  if (release_thread_.joinable()) release_thread_.Join();
}

void PullStage::Recycle(std::unique_ptr<WorkItem> item) {
  if (!release_thread_.joinable()) {
    planner_.Recycle(std::move(item));
    return;
  }
  // There is room: no more sets are alive. Nobody aborts this channel.
  TERRACE_CHECK(released_.Send(std::move(item)).ok());
}

void PullStage::ReleaseLoop() {
  while (true) {
    Result<std::optional<std::unique_ptr<WorkItem>>> item = released_.Receive();
    TERRACE_CHECK(item.ok());  // Likewise.
    if (!item->has_value()) return;
    planner_.Recycle(std::move(**item));
    release_cpu_seconds_.store(ThreadCpuSeconds(), std::memory_order_relaxed);
  }
}

Result<std::unique_ptr<WorkItem>> PullStage::Plan(const std::shared_ptr<const Batch>& batch,
                                                  std::uint32_t first_example,
                                                  std::uint32_t first_minibatch) {
  std::vector<std::size_t> all;
  std::vector<std::size_t> share;
  for (const RowCache* cache : caches_) {
    all.push_back(cache->MaxPinnedRows());
    share.push_back(std::max<std::size_t>(1, all.back() / options_.resident_sets));
  }
  Result<std::unique_ptr<WorkItem>> item =
      planner_.Plan(batch, first_example, first_minibatch, share, max_minibatches_);
  if (!item.ok() && item.status().code() == StatusCode::kOutOfMemory &&
      options_.resident_sets > 1) {
    // One mini-batch that fits only alone: it waits for the set before it.
    item = planner_.Plan(batch, first_example, first_minibatch, all);
  }
  if (max_minibatches_ < batch->examples) max_minibatches_ *= 2;
  planner_bytes_.store(planner_.MemoryBytes() + admission_.MemoryBytes(),
                       std::memory_order_relaxed);
  return item;
}

Status PullStage::Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* /*done*/) {
  const std::shared_ptr<const Batch> batch = std::move(item->batch);
  if (batch->examples == 0) {  // Only tells the end of an epoch.
    item->batch = batch;
    item->tables.resize(caches_.size());
    return emit(std::move(item));
  }
  std::uint32_t example = 0;
  std::uint32_t minibatch = 0;
  while (example < batch->examples) {
    SetLimiter::Token token;
    if (options_.max_sets > 0) {
      TERRACE_ASSIGN_OR_RETURN(token, limiter_.Take());
    }
    if (options_.before_pull) {
      TERRACE_ASSIGN_OR_RETURN(const bool drains, options_.before_pull());
      if (drains) max_minibatches_ = kFirstMinibatches;
    }
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<WorkItem> planned, Plan(batch, example, minibatch));
    admission_.Admit(planned.get());
    planned->token = std::move(token);
    example = planned->end_example;
    minibatch += planned->minibatches;
    // A set that waits for memory of one table holds its rows of those before: the sets that it
    // waits for have all of theirs.
    for (std::size_t t = 0; t < caches_.size(); ++t) {
      TableWork& table = planned->tables[t];
      TERRACE_ASSIGN_OR_RETURN(table.pinned, caches_[t]->StartPin(table.keys));
    }
    if (options_.after_pull) options_.after_pull(batch->cursors.at(minibatch - 1));
    TERRACE_RETURN_IF_ERROR(emit(std::move(planned)));
  }
  return OkStatus();
}

Status PullStage::AfterInput() {
  if (!options_.after_last_pull) return OkStatus();
  while (true) {
    const std::uint32_t alive = limiter_.alive();
    TERRACE_RETURN_IF_ERROR(options_.after_last_pull());
    if (alive == 0) return OkStatus();
    TERRACE_ASSIGN_OR_RETURN(const std::uint32_t left, limiter_.AwaitFewer(alive));
    if (left == 0) return OkStatus();
  }
}

void PullStage::Cancel(const Status& cause) {
  limiter_.Cancel(cause);
  for (RowCache* cache : caches_) cache->Abort(cause);
}

Status HostStage::Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* /*done*/) {
  for (TableWork& table : item->tables) {
    TERRACE_RETURN_IF_ERROR(table.pinned.Wait());
    table.places.resize(table.rows.size());
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      const std::uint32_t w = table.rows[r];
      table.places[r] = w == kNoWorkingRow ? nullptr : table.pinned.row(w);
    }
  }
  return emit(std::move(item));
}

Status TrainStage::Process(std::unique_ptr<WorkItem> item, const Emit& /*emit*/, bool* /*done*/) {
  for (std::uint32_t m = 0; m < std::max(item->minibatches, 1u); ++m) {
    // Relaxed: a mini-batch more or less before the stop does not matter.
    if (cancelled_.load(std::memory_order_relaxed)) return AbortedError("another stage failed");
    TERRACE_RETURN_IF_ERROR(train_(item.get(), m));
  }
  if (recycle_) recycle_(std::move(item));
  return OkStatus();
}

void TrainStage::Cancel(const Status& /*cause*/) {
  cancelled_.store(true, std::memory_order_relaxed);
}

}  // namespace terrace
