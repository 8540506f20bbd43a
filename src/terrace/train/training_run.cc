#include "terrace/train/training_run.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "terrace/base/core_binding.h"
#include "terrace/base/log.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/units.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
// Mini-batches that need no new look at a quota with room for several checkpoints.
constexpr std::uint64_t kStepsBetweenSums = 16;

// Examples from a checkpoint to the next; 0: there is only the last.
std::uint64_t CheckpointExamples(const Job& job) {
  std::uint64_t examples = 0;
  const bool beyond =
      __builtin_mul_overflow(job.checkpoint.every_batches, job.training.batch, &examples);
  return beyond ? std::numeric_limits<std::uint64_t>::max() : examples;
}

// And not of the disk or of a limit.
bool IsOfContents(const Status& failure) {
  return failure.code() == StatusCode::kCorruption || failure.code() == StatusCode::kNotFound ||
         failure.code() == StatusCode::kInvalidArgument;
}

bool SameStatus(const Status& a, const Status& b) { return a.ToString() == b.ToString(); }

}  // namespace

TrainingRun::TrainingRun(FileSystem* fs, Clock* clock, const Job& job,
                         const std::atomic<int>* stop_signals)
    : fs_(fs),
      clock_(clock),
      job_(job),
      stop_signals_(stop_signals),
      start_seconds_(clock->MonotonicSeconds()),
      // The interval must not follow training.batch: metrics are the same whatever the batch.
      metrics_every_(job.metrics.every_examples > 0 ? job.metrics.every_examples : 65536) {
  CountMetricsBytes();
}

TrainingRun::~TrainingRun() = default;

Status TrainingRun::TrainMinibatch(WorkItem* item, std::uint32_t m) {
  const std::uint64_t before = cursor_.examples;
  if (item->minibatches > 0) TERRACE_RETURN_IF_ERROR(Step(item, m));
  const Batch& batch = *item->batch;
  const bool batch_ends = item->last_of_batch && m + 1 >= item->minibatches;
  if (!batch.cursors.empty()) {
    cursor_ =
        batch.cursors[std::min<std::size_t>(item->first_minibatch + m, batch.cursors.size() - 1)];
  }
  SetTrainedPosition();
  return AfterMinibatch(item, before, batch_ends && batch.ends_epoch);
}

void TrainingRun::SetTrainedPosition() {
  for (std::size_t t = 0; t < expiry_.size(); ++t) {
    if (expiry_[t] != nullptr && expiry_[t]->SetPosition(cursor_.examples)) stores_->WantSweep(t);
  }
}

Status TrainingRun::AfterMinibatch(WorkItem* item, std::uint64_t before, bool epoch_ends) {
  const std::uint64_t now = cursor_.examples;
  const bool reaches_end = job_.training.max_examples > 0 && now >= job_.training.max_examples;
  // Also where what comes before it fails: the run that resumes makes up for it.
  validation_due_ = job_.has_validation && (epoch_ends || reaches_end ||
                                            Passed(before, now, job_.validation.every_examples));
  if (Passed(before, now, metrics_every_)) TERRACE_RETURN_IF_ERROR(WriteInterval());
  if (validation_due_) TERRACE_RETURN_IF_ERROR(Validate());
  if (Passed(before, now, CheckpointExamples(job_))) {
    TERRACE_RETURN_IF_ERROR(TakeCheckpoint(false));
    // Its rows are clean now, and the mini-batches that follow change some of them again.
    for (TableWork& table : item->tables) table.marked = 0;
  }
  ShowProgress();
  SyncPoint::Hit("train.after_minibatch");
  if (reaches_end) {
    reached_max_examples_ = true;  // Now that nothing has failed.
    return AbortedError("training.max_examples is reached");
  }
  return CheckStop();
}

Status TrainingRun::Step(WorkItem* item, std::uint32_t m) {
  for (std::size_t t = 0; t < plan_->tables.size(); ++t) {
    for (std::size_t s = 0; s < plan_->tables[t].learning_rates.size(); ++s) {
      rates_.sparse[t][s] = plan_->tables[t].learning_rates[s].At(steps_);
    }
  }
  rates_.dense = job_.network_learning_rate.At(steps_);
  const auto file_name = [this](std::uint32_t file) {
    return file < source_->files().size() ? source_->files()[file].path : std::string("synthetic");
  };
  const Result<std::span<const SlicePrediction>> predictions =
      model_.executor->Train(item, m, rates_, cursor_.examples, file_name);
  if (!predictions.ok()) {
    sound_failure_ = predictions.status();
    return sound_failure_;
  }
  AddPredictions(*predictions, &progressive_);
  AddPredictions(*predictions, &window_);
  CountMetricsBytes();
  for (std::size_t t = 0; t < filters_.size(); ++t) {
    if (filters_[t] == nullptr) continue;
    const std::uint64_t shows = CountTrained(item->tables[t], m, filters_[t].get());
    unadmitted_shows_ += shows;
    unadmitted_in_window_ += shows;
  }
  ++steps_;
  ++minibatches_since_start_;
  return OkStatus();
}

bool TrainingRun::Passed(std::uint64_t before, std::uint64_t now, std::uint64_t every) {
  return every > 0 && before / every != now / every;
}

bool TrainingRun::AllTrained() const {
  return job_.training.max_examples > 0 && cursor_.examples >= job_.training.max_examples;
}

bool TrainingRun::Signalled() const {
  // Relaxed: the signal is seen a mini-batch later at worst.
  return stop_signals_ != nullptr && stop_signals_->load(std::memory_order_relaxed) > 0;
}

Status TrainingRun::CheckStop() {
  for (RowCache* cache : cache_pointers_) TERRACE_RETURN_IF_ERROR(cache->background_status());
  TERRACE_RETURN_IF_ERROR(stores_->background_status());
  if (Signalled()) {
    interrupted_ = true;
    return AbortedError("interrupted by a signal");
  }
  TERRACE_RETURN_IF_ERROR(ReserveForLastCheckpoint());
  MutexLock lock(&stop_mu_);
  return stop_after_checkpoint_;
}

std::uint64_t TrainingRun::CheckpointBytes() const {
  // Pinned rows are dirty, or will be soon.
  std::uint64_t bytes =
      2 * MostDenseFileBytes() + FilterFilesBytes() + MostCheckpointFileBytes() + kMiB;
  for (std::size_t t = 0; t < caches_.size(); ++t) {
    const std::uint64_t pinned = caches_[t]->stats().pinned_rows;
    bytes += caches_[t]->dirty_bytes() + stores_->MostWriteBytes(t, pinned, pinned, 1);
  }
  return bytes;
}

std::uint64_t TrainingRun::MostDenseFileBytes() const {
  return WholeBlocks(model_.network->ParameterBytes() + 4096);
}

std::uint64_t TrainingRun::FilterFilesBytes() const {
  std::uint64_t bytes = 0;
  for (const TablePlan& table : plan_->tables) {
    const AdmissionSpec& spec = table.schema.admission();
    if (spec.on()) bytes += WholeBlocks(AdmissionFilter::ImageBytes(spec));
  }
  return bytes;
}

std::uint64_t TrainingRun::MostCheckpointFileBytes() const {
  // In JSON a character of these texts takes two bytes at most. Numbers and names are less than the
  // rest.
  std::uint64_t text = job_text_bytes_ + identity_bytes_ + model_.network->ToText().size();
  std::size_t path = job_.output.size();
  for (const std::string& folder : job_.ssd.paths) path = std::max(path, folder.size());
  for (const TablePlan& table : plan_->tables) {
    text += (static_cast<std::uint64_t>(job_.ssd.shards) + 1) *
            (table.schema.ToText().size() + path + 1024);
  }
  return WholeBlocks(2 * text + kMiB / 16 + most_metrics_bytes_.load(std::memory_order_relaxed));
}

void TrainingRun::CountMetricsBytes() {
  const std::uint64_t more = kStepsBetweenSums * job_.training.minibatch;
  most_metrics_bytes_.store(progressive_.MostSavedBytes(more) + window_.MostSavedBytes(more),
                            std::memory_order_relaxed);
}

std::uint64_t TrainingRun::SmallFilesBytes() const {
  // Marker, lock, summary and what reads cost; folders take blocks as well, more as files come.
  constexpr std::uint64_t kRunBytes = kMiB / 8, kFolderBytes = kMiB / 64;
  const std::uint64_t folders =
      plan_->tables.size() * (static_cast<std::uint64_t>(job_.ssd.shards) + 1) +
      2 * job_.ssd.paths.size();
  // job.yaml, which is replaced by a new one.
  return kRunBytes + 2 * WholeBlocks(job_text_bytes_) + folders * kFolderBytes;
}

std::uint64_t TrainingRun::CheckpointFiles(std::uint64_t bytes) const {
  std::uint64_t writes = 0, row_bytes = ~std::uint64_t{0};
  for (std::size_t t = 0; t < caches_.size(); ++t) {
    writes += caches_[t]->dirty_writes() + 1;  // And what is pinned.
    row_bytes = std::min<std::uint64_t>(row_bytes, plan_->tables[t].schema.row_bytes());
  }
  std::uint64_t file_bytes = job_.ssd.file_bytes;
  if (memory_.most_file_rows < file_bytes / row_bytes) {
    file_bytes = memory_.most_file_rows * row_bytes;
  }
  const std::uint64_t files = writes * static_cast<std::uint64_t>(job_.ssd.shards) +
                              bytes / file_bytes + Store::kFilesForCompaction;
  // A bound that is above what a checkpoint takes as a rule: not for its sake does a run stop that
  // has files left.
  return std::min(files, quota_->limit_files() / 4);
}

Status TrainingRun::ReserveForLastCheckpoint() {
  // Where there is room for several checkpoints, the sums are made anew every few mini-batches:
  // what these change is less.
  if (quota_has_room_ && steps_ % kStepsBetweenSums != 0) return OkStatus();
  const std::uint64_t needed = CheckpointBytes() + job_.ssd.file_bytes;
  const std::uint64_t files = CheckpointFiles(needed);
  stores_->SetKeepFree(needed, files);
  quota_has_room_ = quota_->HasFree(4 * needed) && quota_->HasFreeFiles(4 * files);
  for (bool given = true; given && !quota_->HasFree(needed);) {
    TERRACE_ASSIGN_OR_RETURN(given, stores_->GiveRoom(needed));
  }
  if (!quota_->HasFreeFiles(files)) TERRACE_RETURN_IF_ERROR(stores_->MergeFiles(files));
  Status short_of;
  if (!quota_->HasFree(needed)) {
    // For the next checkpoint as much again as for this one.
    const std::uint64_t enough = quota_->needed() + 2 * needed;
    short_of = OutOfRoomError(fmt::format(
        "ssd.quota of {} does not last: {} are in use, and up to {} more have to stay free for a "
        "checkpoint of what memory holds. The run has stopped after that checkpoint: go on with "
        "--resume --set ssd.quota={}MiB",
        FormatBytes(quota_->limit()), FormatBytes(quota_->needed()), FormatBytes(needed),
        (enough + kMiB - 1) / kMiB));
  } else if (!quota_->HasFreeFiles(files)) {
    short_of = OutOfRoomError(fmt::format(
        "the run has {} parameter files open, the system lets it open {}, and {} more are kept for "
        "a checkpoint of what memory holds. The run has stopped after that checkpoint: raise that "
        "limit (ulimit -n) or choose larger files (ssd.file_size), and go on with --resume",
        quota_->files(), quota_->limit_files(), files));
  }
  MutexLock lock(&stop_mu_);
  if (stop_after_checkpoint_.ok()) stop_after_checkpoint_ = std::move(short_of);
  return OkStatus();
}

Result<bool> TrainingRun::BeforePull() {
  TERRACE_ASSIGN_OR_RETURN(const bool drains, GiveWayToIndex());
  TERRACE_RETURN_IF_ERROR(WriteAhead());
  return drains;
}

void TrainingRun::AfterPull(const DataCursor& cursor) {
  if (look_ahead_ == nullptr) return;
  if (look_ahead_->begun()) {
    look_ahead_->SetPlanned(cursor);
    return;
  }
  const RowCacheStats stats = CacheStats();
  if (!LookAhead::Fills(stats.used_bytes, stats.capacity_bytes)) return;
  // Near its end the log asks for too little to be worth the first use of memory for that.
  constexpr double kNearItsEnd = 0.95;
  if (source_->stats().progress > kNearItsEnd) return;
  LogText(
      LogLevel::kInfo,
      fmt::format("memory fills with rows at example {}: looking ahead for those that come again",
                  FormatCount(cursor.examples)));
  const ScopedBinding binding(binding_.reading);
  look_ahead_->Begin(cursor);
}

Status TrainingRun::WriteAhead() {
  // Until the disk has shown its rate; slower than any SSD of today.
  constexpr double kFirstBytesPerSecond = 200e6;
  constexpr double kEnoughBytes = 256e6;
  const StoreStats stores = stores_->stats();
  // Compaction's bytes are among those written; its time is not.
  const double written =
      static_cast<double>(stores.write_bytes) *
      static_cast<double>(stores.rows_written + stores.rows_carried) /
      static_cast<double>(stores.rows_written + stores.rows_carried + stores.rows_compacted + 1);
  const double seconds = stores_->write_seconds();
  const double rate =
      written >= kEnoughBytes && seconds > 0 ? written / seconds : kFirstBytesPerSecond;
  const double limit = rate * job_.checkpoint.final_seconds / static_cast<double>(caches_.size());
  bool told = false;
  for (std::size_t t = 0; t < caches_.size(); ++t) {
    const std::uint64_t dirty_bytes = caches_[t]->likely_dirty_bytes();
    const double beyond = static_cast<double>(dirty_bytes) - limit;
    if (beyond <= 0) continue;
    if (!std::exchange(told, true)) ExpectRows();
    const double rows = beyond / static_cast<double>(dirty_bytes) *
                        static_cast<double>(caches_[t]->stats().dirty_rows);
    TERRACE_RETURN_IF_ERROR(caches_[t]->WriteAhead(static_cast<std::uint64_t>(rows) + 1));
  }
  return OkStatus();
}

Status TrainingRun::WriteAheadOfEnd() {
  // What is kept free for the last checkpoint has to be free still when these rows are written.
  if (!quota_->HasFree(2 * CheckpointBytes())) return OkStatus();
  ExpectRows();
  for (RowCache* cache : cache_pointers_) {
    TERRACE_RETURN_IF_ERROR(cache->WriteAhead(~std::uint64_t{0}));
  }
  return OkStatus();
}

void TrainingRun::AdaptChannels() {
  // After the stages have shown their times; the user's capacities stay.
  if (pipeline_ == nullptr || capacities_.empty()) return;
  std::vector<double> busy;
  for (const StageReport& stage : pipeline_->times()) busy.push_back(stage.busy_seconds);
  const std::vector<std::size_t> adapted =
      ChannelCapacities(job_.pipeline.depth, busy, fixed_capacities_);
  for (std::size_t c = 0; c < adapted.size(); ++c) {
    pipeline_->SetCapacity(c, std::min(adapted[c], capacities_[c]));
  }
}

Result<TrainOutcome> TrainingRun::Run() {
  ReadStage read(source_.get(), memory_.batch, job_.training.minibatch);
  PullStage::Options options;
  options.slots = PlannedSlots(*plan_);
  options.minibatch = job_.training.minibatch;
  options.resident_sets = job_.pipeline.depth > 0 ? 2 : 1;
  if (!capacities_.empty()) options.max_sets = memory_.sets;
  options.max_set_bytes = memory_.set_bytes;
  options.plan_threads = job_.pipeline.pulling;
  options.max_plan_thread_bytes = memory_.plan_thread_bytes;
  options.on_plan_thread = [units = binding_.pulling] { BindCurrentThread(units); };
  for (const auto& filter : planned_filters_) options.admission.push_back(filter.get());
  options.before_pull = [this] { return BeforePull(); };
  options.after_pull = [this](const DataCursor& cursor) { AfterPull(cursor); };
  options.after_last_pull = [this] { return WriteAheadOfEnd(); };
  pull_ = std::make_unique<PullStage>(options, cache_pointers_);
  HostStage stage;
  TrainStage train(
      [this](WorkItem* item, std::uint32_t m) {
        const Status status = TrainMinibatch(item, m);
        if (item->first_minibatch + m == 0 && minibatches_since_start_ > 1) AdaptChannels();
        return status;
      },
      [this](std::unique_ptr<WorkItem> item) { pull_->Recycle(std::move(item)); },
      [this] {
        interrupted_ = interrupted_ || Signalled();
        return interrupted_;
      });
  Status status;
  start_examples_ = last_interval_examples_ = cursor_.examples;
  const bool all_done = AllTrained();
  // Where the job has become shorter than what is trained, this is its end.
  validation_due_ |= all_done && job_.has_validation && validated_examples_ != cursor_.examples;
  // What the run before could not write.
  const std::uint64_t open = window_.Compute().examples;
  if (Passed(cursor_.examples - open, cursor_.examples, metrics_every_)) status = WriteInterval();
  if (status.ok() && validation_due_) status = Validate();
  if (status.ok() && !all_done) {
    Pipeline pipeline({&read, pull_.get(), &stage, &train}, capacities_, clock_,
                      {binding_.reading, binding_.pulling, binding_.pulling, binding_.training});
    pipeline_ = &pipeline;
    status = pipeline.Run();
    // It is the result only where no other failure was.
    if (const Status early = read.EndedEarly(); !early.ok() && SameStatus(early, status)) {
      status = early.WithContext("reading data.train");
      FailedByInput(status,
                    "the log is mended, the same command with --resume goes on from there (and "
                    "with --accept data, where its files have other names or sizes)");
    }
    final_times_ = pipeline.times();
    final_channels_ = pipeline.channels();
    pipeline_ = nullptr;
    if (look_ahead_ != nullptr) look_ahead_->Stop();
  }
  SetProgressLine("");
  const bool stopped_on_purpose = interrupted_ || reached_max_examples_;
  if (!status.ok() && !stopped_on_purpose) return AfterFailure(status);
  if (!status.ok() && status.code() != StatusCode::kAborted) {
    // Of what comes after the stop; whoever goes on from there meets it again.
    LogText(LogLevel::kError, "while the run stopped: " + status.ToString());
  }
  if (Status last = TakeCheckpoint(!interrupted_); !last.ok()) {
    return AfterFailure(last.WithContext("final checkpoint"));
  }
  stores_->Finish();
  TrainOutcome outcome;
  outcome.interrupted = interrupted_;
  TERRACE_ASSIGN_OR_RETURN(outcome.summary, Summarize(!interrupted_));
  TERRACE_RETURN_IF_ERROR(WriteSummary(outcome.summary));
  return outcome;
}

Status TrainingRun::AfterFailure(const Status& failure) {
  bool wanted = false;
  {
    MutexLock lock(&stop_mu_);
    wanted = !stop_after_checkpoint_.ok() && SameStatus(failure, stop_after_checkpoint_);
  }
  if (!SameStatus(failure, sound_failure_)) input_way_on_ = {};
  // What was right to begin with and trained for a while is no wrong argument, but a log that is
  // damaged further on.
  const bool later = failure.code() == StatusCode::kInvalidArgument && cursor_.examples > 0;
  const Status stopped =
      (later ? CorruptionError(failure.message()) : failure)
          .WithContext(fmt::format("training stopped at example {}", cursor_.examples));
  if (!wanted && !LeavesMoreThanSaved(failure)) return WithWayOn(stopped);
  const Status checkpoint = TakeCheckpoint(false);
  if (checkpoint.ok()) {
    LogText(LogLevel::kInfo,
            fmt::format("a checkpoint at example {} holds all that was trained", cursor_.examples));
  } else if (checkpoint.ToString() != failure.ToString()) {
    LogText(LogLevel::kWarning, "no further checkpoint could be taken: " + checkpoint.ToString());
  }
  if (!wanted) return WithWayOn(stopped);
  // It speaks of the checkpoint.
  return checkpoint.ok() ? stopped
                         : WithWayOn(checkpoint.WithContext(
                               fmt::format("training stopped at example {}", cursor_.examples)));
}

bool TrainingRun::LeavesMoreThanSaved(const Status& failure) const {
  if (SameStatus(failure, sound_failure_)) return cursor_.examples > checkpointed_examples_;
  // A full disk or quota, or memory, leaves what was trained intact: the reserve is there for one
  // last checkpoint.
  return failure.code() == StatusCode::kIo || failure.code() == StatusCode::kOutOfRoom ||
         failure.code() == StatusCode::kOutOfMemory;
}

Status TrainingRun::WithWayOn(const Status& failure) const {
  if (!input_way_on_.empty() && last_checkpoint_ > 0) {
    return {failure.code(), fmt::format("{}. Checkpoint {} is intact: once {}", failure.message(),
                                        last_checkpoint_, input_way_on_)};
  }
  const bool of_a_limit = failure.code() == StatusCode::kOutOfRoom;
  if (failure.code() != StatusCode::kIo && !of_a_limit) return failure;
  // A limit's message says what to change.
  const std::string_view what =
      of_a_limit ? "with that changed" : "free space on that disk, or mend it, and";
  const std::string left =
      last_checkpoint_ > 0
          ? fmt::format(
                "Checkpoint {} is intact: {} the same command with --resume goes on from there",
                last_checkpoint_, what)
          : fmt::format(
                "The run has no checkpoint yet: {} the same command with --resume starts it anew",
                what);
  return {failure.code(), fmt::format("{}. {}", failure.message(), left)};
}

void TrainingRun::FailedByInput(const Status& failure, std::string_view way_on) {
  sound_failure_ = failure;
  input_way_on_ = IsOfContents(failure) ? way_on : std::string_view();
}

Status TrainingRun::Validate() {
  constexpr std::string_view kMended =
      "data.validation is mended, or names other files, the same command with --resume goes on "
      "from there";
  const double start = clock_->MonotonicSeconds();
  const Result<std::unique_ptr<ExampleSource>> opened = OpenSource(fs_, ValidationData());
  if (!opened.ok()) {
    FailedByInput(opened.status().WithContext("validation"), kMended);
    return sound_failure_;
  }
  ExampleSource* const source = opened->get();
  const std::uint32_t minibatch = job_.training.minibatch;
  PeekProvider rows(cache_pointers_, &*plan_, minibatch, cursor_.examples);
  ClickMetrics metrics;
  const Status evaluated =
      Evaluate(source, memory_.validation_batch, minibatch, validation_planner_.get(), &rows,
               model_.executor.get(), &metrics, nullptr, [this] { return Signalled(); })
          .WithContext("validation");
  // By a signal. It stays due, and the run that resumes makes up for it.
  if (evaluated.code() == StatusCode::kAborted) interrupted_ = true;
  // Of the data, and not of a row.
  if (!evaluated.ok() && !source->failure().ok()) FailedByInput(evaluated, kMended);
  TERRACE_RETURN_IF_ERROR(evaluated);
  ValidationRecord record;
  record.epoch = cursor_.epoch;
  record.examples = cursor_.examples;
  record.steps = steps_;
  record.result = metrics.Compute();
  record.seconds = clock_->MonotonicSeconds() - start;
  validation_ = record.result;
  LogText(LogLevel::kInfo,
          fmt::format("validation after {} examples: AUC {:.5f}, log loss {:.5f}, calibration "
                      "{:.4f} on {} examples",
                      FormatCount(cursor_.examples), record.result.auc, record.result.logloss,
                      record.result.calibration, FormatCount(record.result.examples)));
  TERRACE_RETURN_IF_ERROR(metrics_file_->Append(ValidationToJson(record)));
  validation_due_ = false;
  validated_examples_ = cursor_.examples;
  return OkStatus();
}

Status TrainingRun::TakeCheckpoint(bool finished) {
  SyncPoint::Hit("checkpoint.before_flush");
  stores_->OpenReserve();  // This is the checkpoint that it is for.
  ExpectRows();
  // One that failed may have left something behind under its own number.
  const std::uint64_t id = ++attempted_checkpoint_;
  for (RowCache* cache : cache_pointers_) TERRACE_RETURN_IF_ERROR(cache->FlushDirty());
  // The last interval has what was written for it too: no other follows that could tell of it.
  if (finished && window_.Compute().examples > 0) TERRACE_RETURN_IF_ERROR(WriteInterval());
  Checkpoint checkpoint;
  checkpoint.id = id;
  checkpoint.cursor = cursor_;
  checkpoint.steps = steps_;
  checkpoint.finished = finished;
  std::uint64_t bytes = 0;
  if (const Status parts = WriteCheckpointParts(&checkpoint, &bytes); !parts.ok()) {
    RemoveFailedCheckpoint(id, bytes);
    return parts;
  }
  checkpoint.metrics_bytes = metrics_file_->bytes();
  checkpoint.metrics_checksum = metrics_file_->checksum();
  checkpoint.progressive = progressive_.Save();
  checkpoint.window = window_.Save();
  checkpoint.trainer_state = SaveTrainerState();
  checkpoint.dense_network = model_.network->ToText();
  checkpoint.identity = IdentifyingSettings(job_, *plan_, *source_);
  checkpoint.job_yaml = JobToYaml(job_);
  const Result<std::uint64_t> own_bytes = run_->WriteCheckpoint(checkpoint, quota_.get());
  if (!own_bytes.ok()) {
    RemoveFailedCheckpoint(id, bytes);
    return own_bytes.status();
  }
  last_checkpoint_ = id;
  checkpointed_examples_ = cursor_.examples;
  {
    MutexLock lock(&checkpoints_mu_);
    kept_.push_back({id, *own_bytes + bytes});
  }
  SyncPoint::Hit("checkpoint.before_drop");
  return DropCheckpointsBeyond(static_cast<std::size_t>(job_.checkpoint.keep));
}

void TrainingRun::RemoveFailedCheckpoint(std::uint64_t id, std::uint64_t bytes) {
  // Its file first, which may be there in spite of the failure; while it is, all that it names is.
  Status removed = run_->DropCheckpoint(id);
  if (removed.ok()) {
    quota_->Release(bytes);
    removed = stores_->Drop(id);
  }
  if (!removed.ok()) LogText(LogLevel::kWarning, removed.ToString());
}

Status TrainingRun::WriteCheckpointParts(Checkpoint* checkpoint, std::uint64_t* bytes) {
  SyncPoint::Hit("checkpoint.before_commit");
  TERRACE_ASSIGN_OR_RETURN(checkpoint->stores, stores_->Commit(checkpoint->id));
  TERRACE_RETURN_IF_ERROR(quota_->Reserve(MostDenseFileBytes(), 0));
  const Result<FileDigest> digest = run_->WriteDense(checkpoint->id, model_.network->Save());
  quota_->Release(MostDenseFileBytes() - (digest.ok() ? WholeBlocks(digest->size) : 0));
  TERRACE_RETURN_IF_ERROR(digest.status());
  *bytes += WholeBlocks(digest->size);
  checkpoint->dense.push_back(*digest);
  TERRACE_RETURN_IF_ERROR(WriteFilters(checkpoint, bytes));
  return metrics_file_->Sync();
}

Status TrainingRun::WriteFilters(Checkpoint* checkpoint, std::uint64_t* bytes) {
  for (std::size_t t = 0; t < filters_.size(); ++t) {
    AdmissionFilter* const filter = filters_[t].get();
    if (filter == nullptr) continue;
    const std::string& table = plan_->tables[t].schema.table();
    const std::uint64_t image_bytes = WholeBlocks(filter->image_bytes());
    TERRACE_RETURN_IF_ERROR(quota_->Reserve(image_bytes, 0));
    const Result<FileDigest> digest = run_->WriteFilter(checkpoint->id, table, filter);
    if (!digest.ok()) {
      quota_->Release(image_bytes);
      return digest.status();
    }
    *bytes += image_bytes;
    checkpoint->admission.push_back({table, *digest});
    WarnOfFullFilter(table, *filter);
  }
  return OkStatus();
}

void TrainingRun::WarnOfFullFilter(const std::string& table, const AdmissionFilter& filter) {
  // With half of its cells full a filter admits one new key in sixteen at once.
  constexpr double kFull = 0.5;
  if (warned_of_filter_ || filter.FullShare() < kFull) return;
  warned_of_filter_ = true;
  LogText(LogLevel::kWarning,
          fmt::format("{:.0f} % of the admission filter of table '{}' are full: many new keys get "
                      "a row with their first show. A larger admit_filter counts more keys; it "
                      "makes another model, so it needs a new run",
                      100 * filter.FullShare(), table));
}

Status TrainingRun::DropKept(std::size_t i) {
  const Kept dropped = kept_[i];
  TERRACE_RETURN_IF_ERROR(run_->DropCheckpoint(dropped.id));
  kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(i));
  quota_->Release(dropped.bytes);
  return stores_->Drop(dropped.id);
}

Status TrainingRun::DropCheckpointsBeyond(std::size_t keep) {
  MutexLock lock(&checkpoints_mu_);
  for (std::size_t i = 0; kept_.size() > keep && i < kept_.size() - 1;) {
    const Status status = DropKept(i);
    if (status.code() == StatusCode::kUnavailable) {  // A reader holds it; next time.
      ++i;
      continue;
    }
    TERRACE_RETURN_IF_ERROR(status);
  }
  return OkStatus();
}

bool TrainingRun::DropOldest() {
  MutexLock lock(&checkpoints_mu_);
  for (std::size_t i = 0; i + 1 < kept_.size(); ++i) {
    const std::uint64_t id = kept_[i].id;
    const Status status = DropKept(i);
    if (status.code() == StatusCode::kUnavailable) continue;  // A reader holds it.
    if (!status.ok()) {
      LogText(LogLevel::kWarning, status.ToString());
      return false;
    }
    LogText(LogLevel::kInfo, fmt::format("ssd.quota is short: checkpoint {} was dropped", id));
    return true;
  }
  return false;
}

}  // namespace terrace
