// The four stages of a job on one machine: read, pull, stage (host), train.
// Threads: each stage's Process runs on the thread that the pipeline gives it; Cancel from any.
// Borrow what they are given until the pipeline has run.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/channel.h"
#include "terrace/base/mutex.h"
#include "terrace/base/thread.h"
#include "terrace/cache/row_cache.h"
#include "terrace/data/example_source.h"
#include "terrace/pipeline/admission.h"
#include "terrace/pipeline/key_plan.h"
#include "terrace/pipeline/pipeline.h"

namespace terrace {

// How many batches are alive at most besides one for each working set, when so many fit in the
// channel behind stage 1: that which stage 1 hands on, those, and that which waits in stage 2 for a
// set to go.
constexpr std::uint32_t BatchesAhead(std::size_t capacity) {
  return static_cast<std::uint32_t>(capacity) + 2;
}

// Stage 1: the source's batches, one item each. A source that fails ends the input, and what was
// read before passes the other stages: EndedEarly says why.
class ReadStage final : public Stage {
 public:
  // batch_examples: a multiple of minibatch.
  ReadStage(ExampleSource* source, std::uint32_t batch_examples, std::uint32_t minibatch);
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* done) override;
  void Cancel(const Status& cause) override;
  Status EndedEarly() const override { return failure_; }

 private:
  // The memory of batches that are done, for the next: fresh pages for each would cost more than to
  // fill them. No batch gets new memory while one is left, so they are no more than were ever alive
  // together. Outlives the stage with the last batch.
  struct Spares {
    Mutex mu;
    std::vector<Batch> batches TERRACE_GUARDED_BY(mu);
  };
  struct HeldBatch;

  const std::string name_ = "read";
  const std::shared_ptr<Spares> spares_ = std::make_shared<Spares>();
  ExampleSource* const source_;
  const std::uint32_t batch_examples_;
  const std::uint32_t minibatch_;
  Status failure_;  // Of the source.
};

// Stage 2: plans the working set, leaves out what is not admitted, and pins its rows; cuts a batch
// whose rows do not fit.
class PullStage final : public Stage {
 public:
  struct Options {
    std::vector<PlannedSlot> slots;  // By DataSchema::slots.
    std::uint32_t minibatch = 0;     // Examples.
    // Working sets that are to be in memory together: 1 at depth 0, else 2, so that one is brought
    // up beside another.
    std::uint32_t resident_sets = 2;
    // Working sets that may be alive at a time, the one that is planned included; 0: any number.
    std::uint32_t max_sets = 0;
    std::uint64_t max_set_bytes = ~std::uint64_t{0};  // Of the lists of one: see KeyPlanner.
    int plan_threads = 1;                             // That plan one together: likewise,
    std::uint64_t max_plan_thread_bytes = 0;          //   with this.
    std::function<void()> on_plan_thread;
    // By table, as far as was trained before the first batch; null: every key has a row. Empty:
    // likewise of all.
    std::vector<AdmissionFilter*> admission;
    // Called before each plan; lets the owner shrink caches for an index that has grown. True: the
    // next set will wait until no other is pinned. An error stops the run.
    std::function<Result<bool>()> before_pull;
    // Called after each set: the examples before the cursor have got their rows.
    std::function<void(const DataCursor&)> after_pull;
    // Called once the last set is planned and on its way, and with max_sets again after each set
    // that goes, while others are alive; not when the stages run one after another.
    std::function<Status()> after_last_pull;
  };
  // caches: by table.
  PullStage(Options options, std::vector<RowCache*> caches);
  ~PullStage() override;  // Once all that was taken back is released.
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* done) override;
  Status AfterInput() override;
  void Cancel(const Status& cause) override;
  // Takes back an item whose work is done: releases its rows, and keeps its memory for another.
  // With max_sets a thread beside does it, since the rows' entries lie all over the cache. Any
  // thread.
  void Recycle(std::unique_ptr<WorkItem> item);
  // CPU time of that thread; and of those that plan beside this stage's. Any thread.
  double release_cpu_seconds() const {
    return release_cpu_seconds_.load(std::memory_order_relaxed);
  }
  double plan_cpu_seconds() const { return planner_.cpu_seconds(); }
  std::uint64_t MemoryBytes() const {
    return planner_bytes_.load(std::memory_order_relaxed);
  }  // A gauge.

 private:
  // While the trainer has nothing (at the start, and after all sets had to leave) a set of this
  // many mini-batches is there soon; each that follows may be twice as large.
  static constexpr std::uint32_t kFirstMinibatches = 4;

  Result<std::unique_ptr<WorkItem>> Plan(const std::shared_ptr<const Batch>& batch,
                                         std::uint32_t first_example,
                                         std::uint32_t first_minibatch);
  void ReleaseLoop();

  const std::string name_ = "pull";
  const Options options_;
  const std::vector<RowCache*> caches_;
  SetLimiter limiter_;
  KeyPlanner planner_;
  Admission admission_;
  std::uint32_t max_minibatches_ = kFirstMinibatches;  // Of the next set.
  std::atomic<std::uint64_t> planner_bytes_{0};
  Channel<std::unique_ptr<WorkItem>> released_;
  std::atomic<double> release_cpu_seconds_{0};
  Thread release_thread_;  // With max_sets.
};

// Stage 3 on a CPU job: rows are used where they are; each mini-batch learns where that is.
class HostStage final : public Stage {
 public:
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* done) override;

 private:
  const std::string name_ = "stage";
};

// Stage 4: hands each mini-batch in order to `train`, which marks the rows that it changes dirty,
// then releases the rows. An error of `train` ends the run; the mini-batches before it stay
// trained.
class TrainStage final : public Stage {
 public:
  using Train = std::function<Status(WorkItem* item, std::uint32_t minibatch)>;
  // recycle, if given, gets each item that is done, for its memory.
  using Recycle = std::function<void(std::unique_ptr<WorkItem>)>;
  // wants_to_stop, if given: see Stage::WantsToStop.
  explicit TrainStage(Train train, Recycle recycle = nullptr,
                      std::function<bool()> wants_to_stop = nullptr)
      : train_(std::move(train)),
        recycle_(std::move(recycle)),
        wants_to_stop_(std::move(wants_to_stop)) {}
  bool WantsToStop() override { return wants_to_stop_ && wants_to_stop_(); }
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* done) override;
  void Cancel(const Status& cause) override;

 private:
  const std::string name_ = "train";
  const Train train_;
  const Recycle recycle_;
  const std::function<bool()> wants_to_stop_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace terrace
