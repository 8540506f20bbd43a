// Evaluation: predicts a stream of examples with rows that a provider brings and the network's
// parameters as they are. Validation in a run, `evaluate` and `predict` share it. Threads: one
// caller; work on the executor's workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/cache/row_cache.h"
#include "terrace/data/example_source.h"
#include "terrace/model/metrics.h"
#include "terrace/pipeline/key_plan.h"
#include "terrace/pipeline/train_step.h"
#include "terrace/train/job.h"

namespace terrace {

// What the planner and the step need to know, from the model plan. The StepTables borrow the plan.
std::vector<PlannedSlot> PlannedSlots(const ModelPlan& plan);
std::vector<StepTable> StepTables(const ModelPlan& plan, std::uint64_t seed);

// Fills item->tables[t].places for a planned item; rows that exist nowhere, or have expired at the
// position of what is evaluated, get nullptr.
class RowProvider {
 public:
  virtual ~RowProvider() = default;
  virtual Status Bring(WorkItem* item) = 0;
  // The most distinct rows of a table that one Bring takes.
  virtual std::vector<std::size_t> MaxRows() const = 0;
};

// Copies rows out of a trainer's caches without changing them (validation).
class PeekProvider final : public RowProvider {
 public:
  // Of the copied rows at most: those of a mini-batch of distinct keys, more where they are short.
  static std::uint64_t MostBytes(const ModelPlan& plan, std::uint32_t minibatch);
  // position: examples trained.
  PeekProvider(std::vector<RowCache*> caches, const ModelPlan* plan, std::uint32_t minibatch,
               std::uint64_t position);
  Status Bring(WorkItem* item) override;
  std::vector<std::size_t> MaxRows() const override;

 private:
  const std::vector<RowCache*> caches_;
  const ModelPlan* const plan_;
  const std::uint32_t minibatch_;
  const std::uint64_t position_;
  std::vector<std::vector<std::byte>> rows_;  // (tables)
  // Of the rows of a table, each in turn.
  std::vector<std::byte*> place_;
  std::vector<std::uint8_t> found_;
};

// Pins rows in caches over read-only stores, whose create_row marks rows that exist nowhere
// (evaluate, predict).
class PinProvider final : public RowProvider {
 public:
  // position: examples trained.
  PinProvider(std::vector<RowCache*> caches, const ModelPlan* plan, std::uint64_t position)
      : caches_(std::move(caches)), plan_(plan), position_(position) {}
  Status Bring(WorkItem* item) override;
  std::vector<std::size_t> MaxRows() const override;

 private:
  const std::vector<RowCache*> caches_;
  const ModelPlan* const plan_;
  const std::uint64_t position_;
};

// Called for each predicted mini-batch in order, with its batch and first example in it.
using PredictionSink = std::function<Status(const Batch& batch, std::uint32_t first_example,
                                            std::span<const SlicePrediction>)>;

// Runs `source` to its end. batch_examples: a multiple of minibatch. metrics and sink may be null.
// `stopped`, if given, ends it between mini-batches with kAborted when it returns true.
Status Evaluate(ExampleSource* source, std::uint32_t batch_examples, std::uint32_t minibatch,
                KeyPlanner* planner, RowProvider* rows, StepExecutor* executor,
                ClickMetrics* metrics, const PredictionSink& sink,
                const std::function<bool()>& stopped);

void AddPredictions(std::span<const SlicePrediction> predictions, ClickMetrics* metrics);

}  // namespace terrace
