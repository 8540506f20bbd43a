#include "terrace/train/evaluator.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/clock.h"
#include "terrace/base/units.h"
#include "terrace/data/file_list.h"
#include "terrace/data/text_file.h"
#include "terrace/io/same_file.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/evaluation.h"
#include "terrace/train/job.h"
#include "terrace/train/memory_plan.h"
#include "terrace/train/model_runtime.h"
#include "terrace/train/run_reader.h"
#include "terrace/train/run_stores.h"

namespace terrace {
namespace {

// A checkpoint brought up for reading, with everything that predicts from it.
class LoadedRun {
 public:
  static Result<std::unique_ptr<LoadedRun>> Load(FileSystem* fs, const std::string& path,
                                                 const std::vector<std::string>& files,
                                                 const EvaluateOptions& options, bool for_scoring);
  Status Run(ClickMetrics* metrics, const PredictionSink& sink,
             const std::function<bool()>& stopped);
  ExampleSource* source() { return source_.get(); }

 private:
  Status OpenNewestCheckpoint();
  // A generated log may have had other slots than text has.
  Status CompareData() const;
  Status OpenModel();
  Status OpenRows(FileSystem* fs);

  std::unique_ptr<RunFolder> run_;
  std::unique_ptr<FileLock> hold_;
  Checkpoint checkpoint_;
  Job job_;
  std::unique_ptr<ExampleSource> source_;
  std::optional<ModelPlan> plan_;
  ModelRuntime model_;
  MemoryPlan memory_;
  std::unique_ptr<RunStores> stores_;
  std::vector<std::unique_ptr<RowCache>> caches_;
  std::vector<RowCache*> cache_pointers_;
};

Status LoadedRun::OpenNewestCheckpoint() {
  TERRACE_ASSIGN_OR_RETURN(HeldCheckpoint held, HoldNewestCheckpoint(run_.get()));
  hold_ = std::move(held.hold);
  checkpoint_ = std::move(held.checkpoint);
  TERRACE_ASSIGN_OR_RETURN(
      job_, ParseJob(checkpoint_.job_yaml, JoinPath(run_->path(), "checkpoint"), {}));
  return OkStatus();
}

Status LoadedRun::CompareData() const {
  const std::string files = source_->schema().ToText();
  for (const auto& [path, value] : checkpoint_.identity) {
    if (path != kDataSchemaSetting || value == files) continue;
    return InvalidArgumentError(fmt::format(
        "the run was trained on data with other slots or dense features than these files have: "
        "{}; the files: {}",
        value, files));
  }
  return OkStatus();
}

Status LoadedRun::OpenModel() {
  TERRACE_ASSIGN_OR_RETURN(ModelPlan plan, MakeModelPlan(job_, source_->schema()));
  plan_.emplace(std::move(plan));
  TERRACE_ASSIGN_OR_RETURN(model_, ModelRuntime::Make(job_, *plan_));
  TERRACE_ASSIGN_OR_RETURN(const DenseState dense, run_->ReadDense(checkpoint_));
  return model_.network->Load(dense).WithContext("loading the network of the checkpoint");
}

Status LoadedRun::OpenRows(FileSystem* fs) {
  MemoryPlanInput input =
      MakeMemoryPlanInput(job_, *plan_, source_->MemoryBytes(), model_.executor->later_bytes());
  input.of_a_run = true;
  Result<MemoryPlan> memory = PlanMemory(input);
  if (!memory.ok()) {
    return InvalidArgumentError(memory.status().message() +
                                " --memory lets this command use more than the run's job says.");
  }
  memory_ = *std::move(memory);
  RunStores::Options options;
  options.io_buffer_bytes = memory_.io_buffer_bytes;
  options.most_open_bytes = memory_.batches_bytes;  // Not there yet.
  options.background = false;
  options.read_only = true;
  TERRACE_ASSIGN_OR_RETURN(
      stores_, RunStores::Open(fs, Clock::Real(), nullptr, run_.get(), job_, *plan_, options,
                               checkpoint_, std::span<const Checkpoint>(&checkpoint_, 1)));
  const std::uint64_t needed = stores_->index_bytes() + LeastCacheBytes(job_, *plan_);
  if (needed > memory_.rows_bytes) {
    return InvalidArgumentError(fmt::format(
        "the index of the run's rows takes {}: with {} of memory it does not fit; --memory must be "
        "at least {}",
        FormatBytes(stores_->index_bytes()), FormatBytes(memory_.budget_bytes),
        WholeMiB(BudgetForRows(input, needed))));
  }
  const std::vector<std::uint64_t> cache_bytes = SplitCacheBytes(
      *plan_, LeastTableBytes(job_, *plan_), memory_.rows_bytes - stores_->index_bytes());
  for (std::size_t t = 0; t < plan_->tables.size(); ++t) {
    RowCacheOptions cache;
    cache.row_bytes = plan_->tables[t].schema.row_bytes();
    cache.capacity_bytes = cache_bytes[t];
    cache.eviction = job_.cache.eviction;
    cache.background = false;
    // A key that training has never seen reads as zeros.
    cache.create_row = [row_bytes = cache.row_bytes](Key /*key*/, std::byte* row) {
      std::memset(row, 0, row_bytes);
    };
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<RowCache> made,
                             RowCache::Create(cache, stores_->table(t)));
    cache_pointers_.push_back(made.get());
    caches_.push_back(std::move(made));
  }
  return OkStatus();
}

Result<std::unique_ptr<LoadedRun>> LoadedRun::Load(FileSystem* fs, const std::string& path,
                                                   const std::vector<std::string>& files,
                                                   const EvaluateOptions& options,
                                                   bool for_scoring) {
  auto loaded = std::make_unique<LoadedRun>();
  TERRACE_ASSIGN_OR_RETURN(loaded->run_,
                           RunFolder::Open(fs, path, RunFolder::Mode::kRead, nullptr));
  TERRACE_RETURN_IF_ERROR(loaded->OpenNewestCheckpoint());
  std::uint64_t& budget = loaded->job_.memory.budget_bytes;
  // More, or less, than any job may say is as that.
  budget = std::clamp(options.memory_bytes.value_or(budget), kLeastBudgetBytes, kMostBudgetBytes);
  DataOptions data = loaded->job_.train_data;
  if (data.format == "synthetic") data.format = "criteo";  // The generator's text is Criteo's.
  data.files = files;
  data.epochs = 1;
  data.shuffle = "none";
  data.max_bad_fraction = options.max_bad_fraction.value_or(data.max_bad_fraction);
  data.for_scoring = for_scoring;
  data.read_ahead_bytes = ReadAheadBytes(data.read_ahead_bytes, budget);
  TERRACE_ASSIGN_OR_RETURN(loaded->source_, OpenSource(fs, data));
  TERRACE_RETURN_IF_ERROR(loaded->CompareData());
  TERRACE_RETURN_IF_ERROR(MissingIsDamage(loaded->OpenModel()));
  TERRACE_RETURN_IF_ERROR(MissingIsDamage(loaded->OpenRows(fs)));
  return loaded;
}

Status LoadedRun::Run(ClickMetrics* metrics, const PredictionSink& sink,
                      const std::function<bool()>& stopped) {
  KeyPlanner planner(PlannedSlots(*plan_), plan_->tables.size(), job_.training.minibatch,
                     memory_.set_bytes);
  PinProvider rows(cache_pointers_, &*plan_, checkpoint_.cursor.examples);
  const Status status = Evaluate(source_.get(), memory_.batch, job_.training.minibatch, &planner,
                                 &rows, model_.executor.get(), metrics, sink, stopped);
  // What was there when it was opened is no wrong argument, but has gone since.
  return status.code() == StatusCode::kNotFound ? IoError(status.message()) : status;
}

// Whatever the paths: a log that predictions replace is lost.
Status RefuseToReplaceInput(FileSystem* fs, const std::vector<std::string>& files,
                            const std::string& output) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<InputFile> inputs, ExpandFiles(fs, files));
  for (const InputFile& input : inputs) {
    for (const std::string& written : {output, PartialOf(output)}) {
      if (!IsSameFile(input.path, written)) continue;
      return InvalidArgumentError(fmt::format(
          "--output '{}' would replace the input '{}'; name a file that is none of the data",
          output, input.path));
    }
  }
  return OkStatus();
}

// Collects text and writes it in large pieces.
class PredictionWriter {
 public:
  explicit PredictionWriter(TextFile* file) : file_(file) {}
  Status Line(std::string_view text) {
    pending_ += text;
    pending_ += '\n';
    return pending_.size() < (1 << 20) ? OkStatus() : Flush();
  }
  Status Flush() {
    TERRACE_RETURN_IF_ERROR(file_->Append(pending_));
    pending_.clear();
    return OkStatus();
  }

 private:
  TextFile* const file_;
  std::string pending_;
};

// The lines of one mini-batch, "nan" where a bad line stood.
Status WritePredictions(const Batch& batch, std::uint32_t first_example,
                        std::span<const SlicePrediction> slices, PredictionWriter* writer) {
  const auto write_bad = [&](std::uint32_t at) -> Status {
    const std::uint32_t count = batch.bad_lines_before.empty() ? 0 : batch.bad_lines_before[at];
    for (std::uint32_t i = 0; i < count; ++i) TERRACE_RETURN_IF_ERROR(writer->Line("nan"));
    return OkStatus();
  };
  std::uint32_t example = first_example;
  for (const SlicePrediction& slice : slices) {
    for (std::uint32_t e = 0; e < slice.examples; ++e, ++example) {
      TERRACE_RETURN_IF_ERROR(write_bad(example));
      TERRACE_RETURN_IF_ERROR(writer->Line(fmt::format("{:.9g}", slice.probability[e])));
    }
  }
  return example == batch.examples ? write_bad(example) : OkStatus();
}

}  // namespace

Result<Evaluation> EvaluateRun(FileSystem* fs, const std::string& run,
                               const std::vector<std::string>& files,
                               const EvaluateOptions& options) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<LoadedRun> loaded,
                           LoadedRun::Load(fs, run, files, options, /*for_scoring=*/false));
  ClickMetrics metrics;
  const Status status = loaded->Run(&metrics, nullptr, nullptr);
  if (loaded->source()->failure().code() == StatusCode::kInvalidArgument &&
      !options.max_bad_fraction) {
    return InvalidArgumentError(
        status.message() +
        "; --max-bad-fraction lets this command take more than the run's job says");
  }
  TERRACE_RETURN_IF_ERROR(status);
  return Evaluation{metrics.Compute(), loaded->source()->stats().bad_lines};
}

Result<SourceStats> PredictRun(FileSystem* fs, const std::string& run,
                               const std::vector<std::string>& files,
                               std::optional<std::uint64_t> memory_bytes, const std::string& output,
                               const std::function<bool()>& stopped) {
  TERRACE_RETURN_IF_ERROR(RefuseToReplaceInput(fs, files, output));
  EvaluateOptions options;
  options.memory_bytes = memory_bytes;
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<LoadedRun> loaded,
                           LoadedRun::Load(fs, run, files, options, /*for_scoring=*/true));
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<TextFile> file, TextFile::Create(fs, output));
  PredictionWriter writer(file.get());
  const auto sink = [&writer](const Batch& batch, std::uint32_t first_example,
                              std::span<const SlicePrediction> slices) {
    return WritePredictions(batch, first_example, slices, &writer);
  };
  Status status = loaded->Run(nullptr, sink, stopped);
  if (status.ok()) status = writer.Flush();
  if (status.ok()) status = file->Publish();
  if (!status.ok()) return file->GiveUp(status);
  return loaded->source()->stats();
}

}  // namespace terrace
