#include "terrace/train/evaluation.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace terrace {

namespace {

// Distinct rows of a table that a validation holds at a time.
std::size_t PeekedRows(const ModelPlan& plan, const TablePlan& table, std::uint32_t minibatch) {
  constexpr std::size_t kBytes = 4 << 20;  // Of all tables, where a mini-batch needs no more.
  return std::max(minibatch * table.slots.size(),
                  kBytes / plan.tables.size() / table.schema.row_bytes());
}

}  // namespace

std::vector<PlannedSlot> PlannedSlots(const ModelPlan& plan) {
  std::vector<PlannedSlot> slots;
  for (const SlotPlan& slot : plan.slots) {
    slots.push_back({slot.table, slot.input_offset, slot.pooling == SlotJob::Pooling::kMean});
  }
  return slots;
}

std::vector<StepTable> StepTables(const ModelPlan& plan, std::uint64_t seed) {
  std::vector<StepTable> tables;
  for (const TablePlan& table : plan.tables) {
    StepTable step;
    step.schema = &table.schema;
    step.seed = seed;
    step.admits = table.schema.admission().on();
    for (std::uint32_t s : table.slots) {
      PooledSlot slot;
      slot.slot = s;
      slot.input_offset = plan.slots[s].input_offset;
      slot.mean = plan.slots[s].pooling == SlotJob::Pooling::kMean;
      step.slots.push_back(slot);
    }
    tables.push_back(std::move(step));
  }
  return tables;
}

std::uint64_t PeekProvider::MostBytes(const ModelPlan& plan, std::uint32_t minibatch) {
  std::uint64_t bytes = 0;
  for (const TablePlan& table : plan.tables) {
    bytes += PeekedRows(plan, table, minibatch) *
             (table.schema.row_bytes() + sizeof(std::byte*) + sizeof(std::uint8_t));
  }
  return bytes;
}

PeekProvider::PeekProvider(std::vector<RowCache*> caches, const ModelPlan* plan,
                           std::uint32_t minibatch, std::uint64_t position)
    : caches_(std::move(caches)),
      plan_(plan),
      minibatch_(minibatch),
      position_(position),
      rows_(caches_.size()) {
  // At once: one that grows would be there twice. What is not used of it takes no memory.
  const std::vector<std::size_t> most = MaxRows();
  for (std::size_t t = 0; t < rows_.size(); ++t) {
    rows_[t].reserve(most[t] * plan_->tables[t].schema.row_bytes());
  }
}

std::vector<std::size_t> PeekProvider::MaxRows() const {
  std::vector<std::size_t> rows;
  for (const TablePlan& table : plan_->tables) {
    rows.push_back(PeekedRows(*plan_, table, minibatch_));
  }
  return rows;
}

Status PeekProvider::Bring(WorkItem* item) {
  for (std::size_t t = 0; t < caches_.size(); ++t) {
    TableWork& work = item->tables[t];
    const std::size_t row_bytes = plan_->tables[t].schema.row_bytes();
    rows_[t].resize(work.keys.size() * row_bytes);
    place_.resize(work.keys.size());
    for (std::size_t w = 0; w < place_.size(); ++w) place_[w] = rows_[t].data() + w * row_bytes;
    found_.assign(work.keys.size(), 0);
    TERRACE_RETURN_IF_ERROR(caches_[t]->Peek(work.keys, place_, found_));
    const ExpiryRule& expiry = plan_->tables[t].schema.expiry();
    for (std::size_t w = 0; expiry.on() && w < place_.size(); ++w) {
      if (found_[w] != 0 && !CountsAt(expiry, {place_[w], row_bytes}, position_)) found_[w] = 0;
    }
    work.places.resize(work.rows.size());
    for (std::size_t r = 0; r < work.rows.size(); ++r) {
      const std::uint32_t w = work.rows[r];
      work.places[r] = found_[w] != 0 ? place_[w] : nullptr;
    }
  }
  return OkStatus();
}

std::vector<std::size_t> PinProvider::MaxRows() const {
  std::vector<std::size_t> rows;
  for (const RowCache* cache : caches_) rows.push_back(cache->MaxPinnedRows());
  return rows;
}

Status PinProvider::Bring(WorkItem* item) {
  for (std::size_t t = 0; t < caches_.size(); ++t) {
    TableWork& work = item->tables[t];
    TERRACE_ASSIGN_OR_RETURN(work.pinned, caches_[t]->Pin(work.keys));
    work.places.resize(work.rows.size());
    const RowSchema& schema = plan_->tables[t].schema;
    for (std::size_t r = 0; r < work.rows.size(); ++r) {
      std::byte* const row = work.pinned.row(work.rows[r]);
      work.places[r] =
          CountsAt(schema.expiry(), {row, schema.row_bytes()}, position_) ? row : nullptr;
    }
  }
  return OkStatus();
}

void AddPredictions(std::span<const SlicePrediction> predictions, ClickMetrics* metrics) {
  for (const SlicePrediction& slice : predictions) {
    metrics->Add(slice.logit, slice.probability, slice.label, slice.weight, slice.examples,
                 slice.logloss_sum);
  }
}

Status Evaluate(ExampleSource* source, std::uint32_t batch_examples, std::uint32_t minibatch,
                KeyPlanner* planner, RowProvider* rows, StepExecutor* executor,
                ClickMetrics* metrics, const PredictionSink& sink,
                const std::function<bool()>& stopped) {
  while (true) {
    TERRACE_ASSIGN_OR_RETURN(std::optional<Batch> next, source->Next(batch_examples, minibatch));
    if (!next.has_value()) return OkStatus();
    auto batch = std::make_shared<const Batch>(std::move(*next));
    std::uint32_t example = 0;
    std::uint32_t first_minibatch = 0;
    while (example < batch->examples) {
      std::vector<std::size_t> max_rows = rows->MaxRows();
      Result<std::unique_ptr<WorkItem>> item =
          planner->Plan(batch, example, first_minibatch, max_rows);
      if (!item.ok() && item.status().code() == StatusCode::kOutOfMemory) {
        // One mini-batch is taken whatever it needs: a cache that has no room for it says so
        // itself.
        for (std::size_t& limit : max_rows) limit = std::size_t{minibatch} * batch->slots * 64;
        item = planner->Plan(batch, example, first_minibatch, max_rows, /*max_minibatches=*/1);
      }
      TERRACE_RETURN_IF_ERROR(item.status());
      WorkItem* work = item->get();
      TERRACE_RETURN_IF_ERROR(rows->Bring(work));
      for (std::uint32_t m = 0; m < work->minibatches; ++m) {
        if (stopped && stopped()) return AbortedError("stopped by a signal");
        TERRACE_ASSIGN_OR_RETURN(std::span<const SlicePrediction> predictions,
                                 executor->Predict(*work, m));
        if (metrics != nullptr) AddPredictions(predictions, metrics);
        if (sink) TERRACE_RETURN_IF_ERROR(sink(*batch, work->MinibatchBegin(m), predictions));
      }
      example = work->end_example;
      first_minibatch += work->minibatches;
    }
    if (batch->examples == 0 && sink) TERRACE_RETURN_IF_ERROR(sink(*batch, 0, {}));
  }
}

}  // namespace terrace
