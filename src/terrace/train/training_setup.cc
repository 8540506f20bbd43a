// How a TrainingRun gets its parts, in order: inputs, plan, network, memory, folder, stores,
// caches, state.
#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/core_binding.h"
#include "terrace/base/log.h"
#include "terrace/base/memory.h"
#include "terrace/base/units.h"
#include "terrace/pipeline/stages.h"
#include "terrace/train/index_plan.h"
#include "terrace/train/parts_plan.h"
#include "terrace/train/training_run.h"

namespace terrace {
namespace {

RunFolder::Mode FolderMode(RunMode mode) {
  switch (mode) {
    case RunMode::kNew:
      return RunFolder::Mode::kNew;
    case RunMode::kResume:
      return RunFolder::Mode::kResume;
    case RunMode::kOverwrite:
      return RunFolder::Mode::kOverwrite;
  }
  return RunFolder::Mode::kNew;
}

// As OpenSource; a file that is not there is an error of the job that names it.
Result<std::unique_ptr<ExampleSource>> OpenJobSource(FileSystem* fs, const DataOptions& options,
                                                     std::string_view key) {
  Result<std::unique_ptr<ExampleSource>> source = OpenSource(fs, options);
  if (source.status().code() == StatusCode::kNotFound) {
    return InvalidArgumentError(source.status().message()).WithContext(key);
  }
  return source;
}

// Two things that were looked at one beside the other: what is wrong with the job is told at once.
Status Both(const Status& a, const Status& b) {
  if (a.code() != StatusCode::kInvalidArgument || b.code() != StatusCode::kInvalidArgument) {
    return a.ok() ? b : a;
  }
  return InvalidArgumentError(a.message() + "\n" + b.message());
}

}  // namespace

Status TrainingRun::Prepare(RunMode mode) {
  binding_ = MakeBindingPlan(job_);
  interleaving_.emplace(binding_.memory_nodes);
  const Status planned = PlanRun(mode);
  if (mode == RunMode::kResume) {
    // What a run needed is no matter any more when it is finished.
    TERRACE_ASSIGN_OR_RETURN(already_finished_, IsFinished(planned));
    if (already_finished_) return OkStatus();
  }
  TERRACE_RETURN_IF_ERROR(planned);
  // An archive that is damaged shows it when it is read: no run is deleted for one of which nothing
  // can be trained.
  if (mode == RunMode::kOverwrite) {
    TERRACE_RETURN_IF_ERROR(ReadFirstExamples());
    TERRACE_RETURN_IF_ERROR(TryWhatARunTakes());
  }
  // Nothing has been changed yet, and the run that is there stays as it is.
  if (Signalled()) return AbortedError("a signal came before the run began");
  TERRACE_RETURN_IF_ERROR(OpenRun(mode));
  TERRACE_RETURN_IF_ERROR(MakeCaches());
  WarnOfFullDisks();
  LogText(LogLevel::kInfo, DescribeMemoryPlan(memory_));
  for (const std::string& line : stores_->DescribeIndexes()) LogText(LogLevel::kInfo, line);
  for (const std::string& line : DescribeReads(job_, stores_->disks())) {
    LogText(LogLevel::kInfo, line);
  }
  LogText(LogLevel::kInfo, "binding: " + DescribeBinding(binding_));
  LogText(LogLevel::kInfo, DescribeCompaction(job_, stores_->most_bytes()));
  return OkStatus();
}

Status TrainingRun::PlanRun(RunMode mode) {
  const Status inputs = OpenInputs();
  if (!inputs.ok()) {
    // Limits do not wait for files that are missing.
    if (source_ != nullptr || inputs.code() != StatusCode::kInvalidArgument) return inputs;
    const Result<DataSchema> schema = SchemaOf(job_.train_data);
    if (!schema.ok()) return inputs;
    Result<ModelPlan> plan = MakeModelPlan(job_, *schema);
    if (!plan.ok()) return Both(inputs, plan.status());
    plan_.emplace(std::move(plan).value());
  }
  {
    const ScopedBinding binding(binding_.training);  // The compute threads are born there.
    Result<ModelRuntime> model = ModelRuntime::Make(job_, *plan_);
    if (!model.ok()) return Both(inputs, model.status());
    model_ = std::move(model).value();
  }
  // A run that is there may hold more than a new one can begin with. Before it is deleted.
  const Status quota = mode == RunMode::kResume ? OkStatus() : CheckQuota();
  const Status memory = MakeMemoryPlan();
  const Status keys = mode == RunMode::kResume
                          ? OkStatus()
                          : CheckExpectedKeys(job_, *plan_, memory_.most_file_rows);
  TERRACE_RETURN_IF_ERROR(Both(inputs, Both(memory, Both(quota, Both(CheckOpenFiles(), keys)))));
  return MakeFilters();
}

Result<bool> TrainingRun::IsFinished(const Status& planned) {
  const auto run = RunFolder::Open(fs_, job_.output, RunFolder::Mode::kRead, nullptr);
  if (!run.ok()) return false;
  const Result<std::vector<std::uint64_t>> ids = (*run)->ListCheckpointFiles();
  if (!ids.ok() || ids->empty()) return false;
  const Result<Checkpoint> newest = (*run)->ReadCheckpoint(ids->back());
  // Without the summary, the last process ended between the two: there is still that to do.
  if (!newest.ok() || !newest->finished || !HasSummaryOf(newest->id)) return false;
  if (AsksForMore(*newest)) return false;
  if (plan_ && source_ != nullptr) {
    // A job with another seed has not been trained.
    const Status same = CompareIdentity(
        newest->identity, IdentifyingSettings(job_, *plan_, *source_), job_.resume.accept);
    if (!same.ok()) return Both(planned, same);
  } else {
    LogText(LogLevel::kWarning,
            "whether the job is that of the finished run was not looked at: " + planned.message());
  }
  return true;
}

bool TrainingRun::AsksForMore(const Checkpoint& finished) const {
  const Result<Job> before = ParseJob(finished.job_yaml, "checkpoint", {});
  if (!before.ok()) return false;
  const auto goes_beyond = [&](const Job& job) {
    return job.training.max_examples == 0 || job.training.max_examples > finished.cursor.examples;
  };
  return !goes_beyond(*before) && goes_beyond(job_);
}

Status TrainingRun::OpenInputs() {
  DataOptions train = job_.train_data;
  train.read_ahead_bytes = ReadAheadBytes(train.read_ahead_bytes, job_.memory.budget_bytes);
  train_read_ahead_bytes_ = train.read_ahead_bytes;
  Result<std::unique_ptr<ExampleSource>> source = OpenJobSource(fs_, train, "data.train");
  if (job_.has_validation) {
    const Result<std::unique_ptr<ExampleSource>> validation =
        OpenJobSource(fs_, ValidationData(), "data.validation");
    TERRACE_RETURN_IF_ERROR(Both(source.status(), validation.status()));
    if ((*validation)->schema().ToText() != (*source)->schema().ToText()) {
      return InvalidArgumentError(
          "the validation data has other slots or dense features than the training data");
    }
    validation_source_bytes_ = (*validation)->MemoryBytes();
    validation_files_.assign((*validation)->files().begin(), (*validation)->files().end());
  }
  TERRACE_ASSIGN_OR_RETURN(source_, std::move(source));
  TERRACE_ASSIGN_OR_RETURN(ModelPlan plan, MakeModelPlan(job_, source_->schema()));
  plan_.emplace(std::move(plan));
  const std::string job_text = JobToYaml(job_);
  job_text_bytes_ = job_text.size();
  // What no checkpoint could say is told before there is anything to lose.
  for (const auto& [path, value] : IdentifyingSettings(job_, *plan_, *source_)) {
    identity_bytes_ += path.size() + value.size() + 16;
    TERRACE_RETURN_IF_ERROR(CheckUtf8(path, value));
  }
  std::istringstream lines(job_text);
  for (std::string line; std::getline(lines, line);) {
    TERRACE_RETURN_IF_ERROR(CheckUtf8("the job", line));
  }
  for (const TablePlan& table : plan_->tables)
    rates_.sparse.emplace_back(table.learning_rates.size());
  return OkStatus();
}

Status TrainingRun::ReadFirstExamples() {
  DataOptions train = job_.train_data;
  train.read_ahead_bytes = train_read_ahead_bytes_;
  train.frozen.assign(source_->files().begin(), source_->files().end());
  // A window is filled before its first example comes: the same examples one after another.
  std::uint64_t most = 1;
  if (train.shuffle == "examples") {
    train.shuffle = "files";
    most = train.shuffle_window;
  }
  std::vector<DataOptions> inputs = {std::move(train)};
  if (job_.has_validation) inputs.push_back(ValidationData());
  for (DataOptions& input : inputs) {
    input.epochs = 1;
    input.warns = false;
    TERRACE_ASSIGN_OR_RETURN(const auto source, OpenSource(fs_, input));
    const std::uint32_t examples = job_.training.minibatch;
    bool more = true;
    for (std::uint64_t read = 0; read < most && more && !Signalled(); read += examples) {
      const auto batch = source->Next(examples, examples);
      TERRACE_RETURN_IF_ERROR(
          batch.status().WithContext("reading the first examples, before anything is deleted"));
      more = batch->has_value();
    }
    most = 1;  // Validation data is not shuffled.
  }
  return OkStatus();
}

Status TrainingRun::TryWhatARunTakes() const {
  ReadQueueOptions queue;
  queue.backend = job_.ssd.backend;
  TERRACE_RETURN_IF_ERROR(fs_->NewReadQueue(queue).status().WithContext(
      "making a queue of reads, before anything is deleted"));
  // Mapped, and not used: a run that a limit of the process refuses once it has filled its caches
  // is refused now. Not what is there already, nor what comes and goes.
  const std::uint64_t taken = std::min(
      memory_.resident_bytes + memory_.filter_bytes + memory_.slack_bytes + memory_.transient_bytes,
      memory_.budget_bytes);
  const Status memory = HugeBuffer::Allocate(memory_.budget_bytes - taken).status();
  if (memory.ok()) return OkStatus();
  return OutOfMemoryError(fmt::format(
      "memory.budget is {}, more than the system lets this process have ({}): lower it, or raise "
      "that limit (ulimit -v). Nothing was deleted",
      FormatBytes(memory_.budget_bytes), memory.message()));
}

DataOptions TrainingRun::ValidationData() const {
  DataOptions options = job_.validation_data;
  options.read_ahead_bytes = train_read_ahead_bytes_;
  options.frozen = validation_files_;
  return options;
}

Status TrainingRun::MakeMemoryPlan() {
  DataOptions data = job_.train_data;
  data.read_ahead_bytes = train_read_ahead_bytes_;
  TERRACE_ASSIGN_OR_RETURN(std::uint64_t source_bytes, LeastSourceBytes(data));
  if (source_ != nullptr) source_bytes = source_->MemoryBytes();
  MemoryPlanInput input =
      MakeMemoryPlanInput(job_, *plan_, source_bytes, model_.executor->later_bytes());
  if (job_.has_validation) {
    input.validates = true;
    input.validation_rows_bytes = PeekProvider::MostBytes(*plan_, job_.training.minibatch);
    input.validation_source_bytes =
        validation_source_bytes_ > 0 ? validation_source_bytes_ : source_bytes;
  }
  fixed_capacities_.clear();
  for (const char* stage : {"read", "pull", "stage"}) {
    const auto fixed = job_.pipeline.queues.find(stage);
    fixed_capacities_.push_back(
        fixed == job_.pipeline.queues.end() ? 0 : static_cast<std::size_t>(fixed->second));
  }
  if (job_.pipeline.depth > 0) {
    const double no_times[4] = {};
    capacities_ = ChannelCapacities(job_.pipeline.depth, no_times, fixed_capacities_);
  }
  if (!capacities_.empty()) {
    // One is trained while `depth` others are brought up; more only when channels are asked to hold
    // more.
    input.sets = static_cast<std::uint32_t>(job_.pipeline.depth) + 1;
    if (fixed_capacities_[1] > 0 || fixed_capacities_[2] > 0) {
      input.sets = static_cast<std::uint32_t>(3 + capacities_[1] + capacities_[2]);
    }
    input.batches_ahead = BatchesAhead(capacities_[0]);
  }
  input.read_ahead_bytes = train_read_ahead_bytes_;
  input.most_read_ahead_bytes = job_.train_data.read_ahead_bytes;
  input.dense_state_bytes = model_.network->ParameterBytes();
  for (const TablePlan& table : plan_->tables) {
    // A run that is resumed keeps its index, whatever this budget would choose: that by key has the
    // larger files.
    const IndexKind kind =
        table.index == IndexChoice::kAuto ? IndexKind::kKey : IndexOf(job_, *plan_, table);
    input.file_rows += job_.ssd.shards * Store::FileRows(kind, table.schema.row_bytes(),
                                                         table.group, job_.ssd.file_bytes);
  }
  input.index_room_bytes = IndexRoomBytes(job_, *plan_);
  input.filter_bytes = 2 * FilterFilesBytes();
  input.looks_ahead = job_.cache.look_ahead == "auto" &&
                      job_.cache.eviction.type == EvictionType::kS3Fifo && job_.pipeline.depth > 0;
  Result<MemoryPlan> planned = PlanMemory(input);
  if (!planned.ok() && job_.pipeline.pull_threads == 0 && job_.pipeline.pulling > 1) {
    // Threads that nobody asked for are no reason to refuse a job.
    job_.pipeline.pulling = 1;
    return MakeMemoryPlan();
  }
  TERRACE_ASSIGN_OR_RETURN(memory_, std::move(planned));
  memory_input_ = input;
  const MemoryLimit limit = ReadMemoryLimit();
  if (limit.bytes > 0 && job_.memory.budget_bytes > limit.bytes) {
    LogText(LogLevel::kWarning,
            fmt::format("memory.budget is {}, more than the {} that {} has: the system may end the "
                        "run as memory fills; set memory.budget lower",
                        FormatBytes(job_.memory.budget_bytes), FormatBytes(limit.bytes),
                        limit.of_group ? "its control group" : "the machine"));
  }
  return OkStatus();
}

Status TrainingRun::MakeFilters() {
  for (const TablePlan& table : plan_->tables) {
    const AdmissionSpec& spec = table.schema.admission();
    planned_filters_.emplace_back();
    filters_.emplace_back();
    if (!spec.on()) continue;
    for (auto* filter : {&planned_filters_.back(), &filters_.back()}) {
      TERRACE_ASSIGN_OR_RETURN(*filter, AdmissionFilter::Create(table.schema.table(), spec));
    }
  }
  return OkStatus();
}

Status TrainingRun::OpenRun(RunMode mode) {
  const ScopedBinding binding(binding_.io);  // Where the stores' threads are born.
  TERRACE_ASSIGN_OR_RETURN(run_, RunFolder::Open(fs_, job_.output, FolderMode(mode), &job_));
  quota_ = std::make_unique<DiskQuota>(job_.ssd.quota_bytes, MostParameterFiles());
  TERRACE_RETURN_IF_ERROR(quota_->Reserve(SmallFilesBytes(), 0));
  RunStores::Options options;
  options.io_buffer_bytes = memory_.io_buffer_bytes;
  options.most_file_rows = memory_.most_file_rows;
  options.most_open_bytes = memory_.batches_bytes + memory_.look_ahead_bytes;  // Not there yet.
  options.background = job_.pipeline.depth > 0;
  options.drop_oldest = [this] { return DropOldest(); };
  for (const TablePlan& table : plan_->tables) {
    expiry_.push_back(table.schema.expiry().on() ? std::make_unique<TrainedExpiry>(&table.schema)
                                                 : nullptr);
    options.expiry.push_back(expiry_.back().get());
  }
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> ids, run_->ListCheckpoints());
  const std::string metrics_path = JoinPath(run_->path(), "metrics.jsonl");
  if (ids.empty()) {
    if (mode == RunMode::kResume) {
      LogText(LogLevel::kInfo,
              fmt::format("'{}' has no checkpoint to go on from: the run begins", job_.output));
    }
    TERRACE_RETURN_IF_ERROR(CheckQuota());
    TERRACE_RETURN_IF_ERROR(CheckExpectedKeys(job_, *plan_, memory_.most_file_rows));
    TERRACE_RETURN_IF_ERROR(run_->RemoveStrays());
    TERRACE_ASSIGN_OR_RETURN(
        stores_, RunStores::Create(fs_, clock_, quota_.get(), run_.get(), job_, *plan_, options));
    TERRACE_ASSIGN_OR_RETURN(metrics_file_,
                             MetricsFile::Open(fs_, quota_.get(), metrics_path, 0, std::nullopt));
    return OkStatus();
  }
  std::vector<Checkpoint> kept;
  for (std::uint64_t id : ids) {
    TERRACE_ASSIGN_OR_RETURN(Checkpoint checkpoint, run_->ReadCheckpoint(id));
    kept.push_back(std::move(checkpoint));
  }
  const Checkpoint& newest = kept.back();
  TERRACE_RETURN_IF_ERROR(CompareIdentity(
      newest.identity, IdentifyingSettings(job_, *plan_, *source_), job_.resume.accept));
  TERRACE_RETURN_IF_ERROR(WarnOfLostCheckpoint(run_.get()));
  TERRACE_RETURN_IF_ERROR(run_->RemoveStrays());
  TERRACE_RETURN_IF_ERROR(ReserveKept(kept));
  TERRACE_ASSIGN_OR_RETURN(stores_, RunStores::Open(fs_, clock_, quota_.get(), run_.get(), job_,
                                                    *plan_, options, newest, kept));
  TERRACE_ASSIGN_OR_RETURN(metrics_file_,
                           MetricsFile::Open(fs_, quota_.get(), metrics_path, newest.metrics_bytes,
                                             newest.metrics_checksum));
  TERRACE_RETURN_IF_ERROR(Restore(newest));
  // Last: a resume that is refused leaves what tells of a checkpoint that was taken away.
  return run_->RemoveSummaryBeyond(newest.id);
}

Status TrainingRun::ReserveKept(std::span<const Checkpoint> kept) {
  MutexLock lock(&checkpoints_mu_);
  std::uint64_t all = 0, of_kept = 0;
  std::map<std::string, std::uint64_t> own;  // By the name of a checkpoint's file.
  for (const char* folder : {"checkpoints", "dense", "admission"}) {
    Result<std::vector<FileInfo>> entries = fs_->List(JoinPath(run_->path(), folder));
    if (entries.status().code() == StatusCode::kNotFound) continue;
    if (!entries.ok()) return entries.status();
    for (const FileInfo& entry : *entries) {
      all += WholeBlocks(entry.size);
      own[entry.name] = WholeBlocks(entry.size);
    }
  }
  for (const Checkpoint& checkpoint : kept) {
    std::uint64_t bytes = own[CheckpointFileName(checkpoint.id)];
    for (const FileDigest& dense : checkpoint.dense) bytes += WholeBlocks(dense.size);
    for (const auto& filter : checkpoint.admission) bytes += WholeBlocks(filter.digest.size);
    kept_.push_back({checkpoint.id, bytes});
    of_kept += bytes;
  }
  // What is given back is what they name, should somebody have taken a file away.
  const std::uint64_t folders = std::max(all, of_kept);
  const std::uint64_t held = quota_->used() + folders + RunStores::BytesOf(fs_, *run_, kept);
  if (held > quota_->limit()) {
    return InvalidArgumentError(fmt::format(
        "ssd.quota of {} is too small: the run's checkpoints hold {}, and to go on it "
        "needs at least {}",
        FormatBytes(quota_->limit()), FormatBytes(held), WholeMiB(held + LeastQuotaBytes())));
  }
  return quota_->Reserve(folders, 0);
}

std::uint64_t TrainingRun::OtherOpenFiles() const {
  // A store has three queues for reading, and one more at times; all else is the run's.
  return 64 + 4 * plan_->tables.size() * static_cast<std::uint64_t>(job_.ssd.shards);
}

std::uint64_t TrainingRun::MostParameterFiles() const {
  const std::uint64_t others = OtherOpenFiles(), limit = OpenFileLimit();
  return limit > others ? limit - others : 0;
}

Status TrainingRun::CheckOpenFiles() const {
  // Some for each store.
  const std::uint64_t least =
      OtherOpenFiles() + 32 +
      8 * plan_->tables.size() * static_cast<std::uint64_t>(job_.ssd.shards);
  if (OpenFileLimit() >= least) return OkStatus();
  return InvalidArgumentError(
      fmt::format("the system lets this process open {} files, too few for this job: raise that "
                  "limit (ulimit -n) to at least {}, or lower ssd.shards",
                  OpenFileLimit(), least));
}

std::uint64_t TrainingRun::LeastQuotaBytes() const {
  return LeastRowsQuotaBytes() + 2 * job_.ssd.file_bytes + 3 * MostDenseFileBytes() +
         3 * FilterFilesBytes() + 3 * MostCheckpointFileBytes() + SmallFilesBytes();
}

std::uint64_t TrainingRun::LeastRowsQuotaBytes() const {
  // Whatever parts a cache has on this machine: they hold no more rows.
  Job job = job_;
  job.pipeline.pulling = 1;
  return 4 * std::max(LeastCacheBytes(job, *plan_), MinibatchWriteBytes(job, *plan_));
}

Status TrainingRun::CheckQuota() const {
  const std::uint64_t least = LeastQuotaBytes();
  if (job_.ssd.quota_bytes >= least) return OkStatus();
  return InvalidArgumentError(fmt::format(
      "ssd.quota of {} is too small: a checkpoint, the rows of a mini-batch and "
      "one compaction need at least {} (two files of ssd.file_size {}, rows {}, network "
      "{}{})",
      FormatBytes(job_.ssd.quota_bytes), WholeMiB(least), FormatBytes(2 * job_.ssd.file_bytes),
      FormatBytes(LeastRowsQuotaBytes()), FormatBytes(3 * MostDenseFileBytes()),
      FilterFilesBytes() == 0
          ? ""
          : fmt::format(", table.admit_filter {}", FormatBytes(3 * FilterFilesBytes()))));
}

void TrainingRun::WarnOfFullDisks() {
  std::map<std::uint64_t, std::uint64_t> free_bytes;  // By device.
  std::string paths;
  for (const std::string& folder : stores_->disk_folders()) {
    const Result<DiskSpace> space = fs_->Space(folder);
    if (!space.ok()) return;  // A disk that does not say.
    if (!free_bytes.emplace(space->device, space->free_bytes).second) continue;
    paths += fmt::format("{}'{}'", paths.empty() ? "" : " and ", folder);
  }
  std::uint64_t bytes = 0;
  for (const auto& [device, free] : free_bytes) bytes += free;
  const std::uint64_t used = quota_->used();  // By what the run has there already.
  const std::uint64_t quota = job_.ssd.quota_bytes;
  if (quota <= used || quota - used <= bytes) return;
  LogText(
      LogLevel::kWarning,
      fmt::format("ssd.quota is {}, {} of it in use, but only {} free on the disk{} of {}: the run "
                  "stops when that is full; free space there, or set ssd.quota lower",
                  FormatBytes(quota), FormatBytes(used),
                  FormatBytes(bytes) + (free_bytes.size() > 1 ? " are" : " is"),
                  free_bytes.size() > 1 ? "s" : "", paths));
}

void TrainingRun::AbandonIfUntrained() {
  if (run_ == nullptr || last_checkpoint_ > 0 || cursor_.examples > 0) return;
  caches_.clear();
  metrics_file_.reset();
  stores_.reset();
  const Status abandoned = run_->Abandon();
  if (!abandoned.ok()) LogText(LogLevel::kWarning, abandoned.message());
}

bool TrainingRun::HasSummaryOf(std::uint64_t checkpoint) {
  const Result<std::string> json = ReadFileToString(fs_, JoinPath(job_.output, "summary.json"));
  if (!json.ok()) return false;
  const Result<RunSummary> summary = SummaryFromJson(*json);
  return summary.ok() && summary->checkpoint == checkpoint;
}

Result<DataCursor> TrainingRun::SeekData(const Checkpoint& checkpoint) {
  const ScopedBinding binding(binding_.reading);  // Where reading ahead begins.
  const auto now = IdentifyingSettings(job_, *plan_, *source_);
  const DataCursor& cursor = checkpoint.cursor;
  if (!FilesDiffer(checkpoint.identity, now)) {
    TERRACE_RETURN_IF_ERROR(source_->Seek(cursor));
    return cursor;
  }
  // Accepted: bytes and lines of the old files say nothing about the new ones, now and in the next
  // checkpoint, which is of the new ones.
  DataCursor counted;
  counted.epoch = cursor.epoch;
  counted.example_in_epoch = cursor.example_in_epoch;
  counted.examples = cursor.examples;
  if (cursor.example_in_epoch == 0) {
    TERRACE_RETURN_IF_ERROR(source_->Seek(counted));
    return counted;
  }
  const std::size_t files = FilesOfIdentity(checkpoint.identity);
  if (job_.train_data.shuffle != "none" && files != source_->files().size()) {
    return InvalidArgumentError(fmt::format(
        "--accept data: the run has {} files and the job now {}: with data.shuffle another number "
        "of files is another order, amid an epoch too; give as many as before",
        files, source_->files().size()));
  }
  LogText(LogLevel::kInfo, fmt::format("reading the new files up to example {} of the epoch",
                                       FormatCount(cursor.example_in_epoch)));
  TERRACE_RETURN_IF_ERROR(source_->Seek(counted));
  const Status read = source_->ReadToPosition([this] { return Signalled(); });
  if (read.ok()) return counted;
  if (read.code() != StatusCode::kCorruption) return read;
  return InvalidArgumentError("--accept data: " + read.message());
}

Status TrainingRun::Restore(const Checkpoint& checkpoint) {
  TERRACE_ASSIGN_OR_RETURN(const DenseState dense, run_->ReadDense(checkpoint));
  TERRACE_RETURN_IF_ERROR(
      model_.network->Load(dense).WithContext("loading the network of the checkpoint"));
  for (std::size_t t = 0; t < filters_.size(); ++t) {
    if (filters_[t] == nullptr) continue;
    TERRACE_RETURN_IF_ERROR(
        run_->ReadFilter(checkpoint, plan_->tables[t].schema.table(), filters_[t].get()));
    planned_filters_[t]->CopyFrom(*filters_[t]);
  }
  const std::string origin = fmt::format("checkpoint {} of '{}'", checkpoint.id, run_->path());
  TERRACE_RETURN_IF_ERROR(progressive_.Restore(checkpoint.progressive).WithContext(origin));
  TERRACE_RETURN_IF_ERROR(window_.Restore(checkpoint.window).WithContext(origin));
  CountMetricsBytes();
  TERRACE_RETURN_IF_ERROR(RestoreTrainerState(checkpoint.trainer_state));
  TERRACE_ASSIGN_OR_RETURN(cursor_, SeekData(checkpoint));
  steps_ = checkpoint.steps;
  last_checkpoint_ = attempted_checkpoint_ = checkpoint.id;
  checkpointed_examples_ = cursor_.examples;
  SetTrainedPosition();
  LogText(LogLevel::kInfo, fmt::format("resuming from checkpoint {} at example {}", checkpoint.id,
                                       FormatCount(cursor_.examples)));
  if (AllTrained()) return OkStatus();
  // An archive is read from its beginning, which takes long. What else is wrong with it is met, and
  // said, by who reads on.
  const ScopedBinding binding(binding_.reading);
  const Status read = source_->ReadToPosition([this] { return Signalled(); });
  return read.code() == StatusCode::kAborted ? read : OkStatus();
}

Status TrainingRun::MakeCaches() {
  const ScopedBinding binding(binding_.io);
  const std::uint64_t index_bytes = stores_->index_bytes();
  std::uint64_t least = LeastCacheBytes(job_, *plan_);
  // Of a run that began where there are fewer cores.
  if (job_.pipeline.pull_threads == 0 && memory_.rows_bytes < index_bytes + least) {
    job_.pipeline.pulling = 1;
    least = LeastCacheBytes(job_, *plan_);
  }
  if (memory_.rows_bytes < index_bytes + least) {
    return InvalidArgumentError(
        fmt::format("the index of the run's rows takes {}: memory.budget must be at least {}",
                    FormatBytes(index_bytes),
                    // With room to go on in.
                    WholeMiB(BudgetForRows(memory_input_,
                                           index_bytes + least + IndexRoomBytes(job_, *plan_)))));
  }
  const std::uint64_t planned = std::min(index_bytes + IndexStep(), memory_.rows_bytes - least);
  planned_index_bytes_.store(planned, std::memory_order_relaxed);
  if (memory_.future_bytes > 0) {
    TERRACE_ASSIGN_OR_RETURN(future_keys_, FutureKeys::Create(memory_.future_bytes));
    DataOptions data = job_.train_data;
    data.read_ahead_bytes = train_read_ahead_bytes_;
    data.warns = false;  // The first reading does.
    data.frozen.assign(source_->files().begin(), source_->files().end());
    look_ahead_ = std::make_unique<LookAhead>([fs = fs_, data] { return OpenSource(fs, data); },
                                              job_.training.minibatch, future_keys_.get());
  }
  const std::vector<std::uint64_t> bytes =
      SplitCacheBytes(*plan_, LeastTableBytes(job_, *plan_), memory_.rows_bytes - planned);
  for (std::size_t t = 0; t < plan_->tables.size(); ++t) {
    const RowSchema* schema = &plan_->tables[t].schema;
    RowCacheOptions options;
    options.row_bytes = schema->row_bytes();
    options.capacity_bytes = bytes[t];
    options.eviction = job_.cache.eviction;
    options.future = future_keys_.get();
    options.flush_bytes = RowCacheOptions::FlushBytesFor(options.capacity_bytes);
    options.background = job_.pipeline.depth > 0;
    options.parts = CacheParts(job_);
    options.on_pin_thread = [units = binding_.pulling] { BindCurrentThread(units); };
    options.clock = clock_;
    options.expiry = expiry_[t].get();
    options.create_row = [schema, seed = job_.seed](Key key, std::byte* row) {
      schema->InitializeRow(seed, key, row);
    };
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<RowCache> cache,
                             RowCache::Create(options, stores_->table(t)));
    cache_pointers_.push_back(cache.get());
    caches_.push_back(std::move(cache));
  }
  validation_planner_ =
      std::make_unique<KeyPlanner>(PlannedSlots(*plan_), plan_->tables.size(),
                                   job_.training.minibatch, memory_.validation_set_bytes);
  return OkStatus();
}

}  // namespace terrace
