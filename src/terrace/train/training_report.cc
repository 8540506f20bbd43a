// What a TrainingRun writes down: metrics, progress, trainer state, summary.
#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terrace/base/log.h"
#include "terrace/base/memory.h"
#include "terrace/train/run_reader.h"
#include "terrace/train/training_run.h"

namespace terrace {
namespace {

constexpr double kDrivesEverySeconds = 60;

StageTimes FromReport(const StageReport& report) {
  StageTimes times;
  times.busy_seconds = report.busy_seconds;
  times.waited_for_input_seconds = report.waited_for_input_seconds;
  times.waited_for_output_seconds = report.waited_for_output_seconds;
  times.cpu_seconds = report.cpu_seconds;
  return times;
}

}  // namespace

RowCacheStats TrainingRun::CacheStats() const {
  RowCacheStats sum;
  for (const RowCache* cache : cache_pointers_) sum += cache->stats();
  return sum;
}

PipelineTimes TrainingRun::Times() const {
  PipelineTimes times;
  const std::vector<StageReport> reports = pipeline_ != nullptr ? pipeline_->times() : final_times_;
  for (const StageReport& report : reports) {
    if (report.name == "read") times.read = FromReport(report);
    if (report.name == "pull") times.pull = FromReport(report);
    if (report.name == "stage") times.stage = FromReport(report);
    if (report.name == "train") times.train = FromReport(report);
  }
  times.train.cpu_seconds += model_.workers->cpu_seconds();
  if (look_ahead_ != nullptr) times.read.cpu_seconds += look_ahead_->cpu_seconds();
  const RowCacheStats caches = CacheStats();
  times.pull.cpu_seconds += caches.load_cpu_seconds;
  // Write-back is no stage of the pipeline, and nothing lies behind it that it could wait for.
  times.write_back.busy_seconds = caches.write_busy_seconds;
  times.write_back.waited_for_input_seconds = caches.write_wait_seconds;
  times.write_back.cpu_seconds = caches.write_cpu_seconds;
  if (pull_ != nullptr) {
    times.pull.cpu_seconds += pull_->plan_cpu_seconds();
    times.write_back.cpu_seconds += pull_->release_cpu_seconds();
  }
  return times;
}

IntervalRecord::Performance TrainingRun::Totals() const {
  IntervalRecord::Performance now;
  now.seconds = clock_->MonotonicSeconds() - start_seconds_;
  now.batch_examples = memory_.batch;
  now.stages = Times();
  const RowCacheStats cache = CacheStats();
  now.cache.hits = cache.hits;
  now.cache.misses = cache.misses;
  now.cache.created = cache.created;
  now.cache.evictions = cache.evictions;
  now.cache.rows = cache.rows;
  now.cache.used_bytes = cache.used_bytes;
  now.cache.capacity_bytes = cache.capacity_bytes;
  const StoreStats ssd = stores_->stats();
  now.ssd.read_seconds = ssd.read_seconds;
  now.ssd.write_seconds = ssd.write_seconds;
  now.ssd.compaction_seconds = ssd.compaction_seconds;
  now.ssd.read_bytes = ssd.read_bytes;
  now.ssd.write_bytes = ssd.write_bytes;
  now.ssd.read_requests = ssd.read_requests;
  now.ssd.rows_read = ssd.rows_read;
  now.ssd.rows_written = ssd.rows_written;
  now.ssd.rows_compacted = ssd.rows_compacted;
  now.ssd.mistaken_reads = ssd.mistaken_reads;
  now.ssd.compaction_wait_seconds = ssd.compaction_wait_seconds;
  now.ssd.live_bytes = ssd.live_bytes;
  now.ssd.stale_bytes = ssd.stale_bytes;
  now.ssd.disk_bytes = ssd.disk_bytes;
  now.ssd.checkpoint_only_bytes = ssd.checkpoint_only_bytes;
  now.ssd.run = Wear(ssd);
  for (const ChannelState& channel :
       pipeline_ != nullptr ? pipeline_->channels() : final_channels_) {
    now.channels.push_back({channel.name, channel.capacity, channel.size, channel.bytes});
  }
  if (AnyExpires()) now.expiry = CountExpired();
  if (look_ahead_ != nullptr && look_ahead_->begun()) {
    now.look_ahead = {cache.coming_evicted, look_ahead_->examples_ahead(), cache.coming_rows};
  }
  now.index_bytes = ssd.index_bytes;
  now.resident_bytes = ReadProcessMemory().resident_bytes;
  return now;
}

SsdWear TrainingRun::Wear(const StoreStats& stores) const {
  SsdWear wear{stores.write_bytes, stores.rows_written, stores.rows_compacted + stores.rows_carried,
               stores.compaction_seconds, stores.wanted_bytes};
  wear += wear_before_;
  return wear;
}

const std::vector<DriveHealth>& TrainingRun::Drives() {
  const double now = clock_->MonotonicSeconds();
  if (now - drives_asked_seconds_ >= kDrivesEverySeconds) {
    drives_asked_seconds_ = now;
    drives_ = DrivesOf(stores_->directories());
    std::erase_if(drives_, [](const DriveHealth& drive) { return !drive.unknown.empty(); });
  }
  return drives_;
}

Status TrainingRun::WriteInterval() {
  IntervalRecord record;
  record.epoch = cursor_.epoch;
  record.examples = cursor_.examples;
  record.steps = steps_;
  record.bad_lines = cursor_.bad_lines;
  record.window = window_.Compute();
  record.progressive = progressive_.Compute();
  if (FilterFilesBytes() > 0) record.unadmitted_shows = unadmitted_in_window_;
  const IntervalRecord::Performance totals = Totals();
  record.performance = totals;
  record.performance.ssd.drives = Drives();
  record.performance.SubtractTotals(last_totals_);
  record.performance.examples_per_second =
      record.performance.interval_seconds > 0
          ? static_cast<double>(cursor_.examples - last_interval_examples_) /
                record.performance.interval_seconds
          : 0;
  // Of one that is not written the run that resumes tells first.
  TERRACE_RETURN_IF_ERROR(metrics_file_->Append(IntervalToJson(record)));
  unadmitted_in_window_ = 0;
  last_totals_ = totals;
  last_interval_examples_ = cursor_.examples;
  last_window_ = record.window;
  window_.Clear();
  return OkStatus();
}

void TrainingRun::ShowProgress() {
  const double now = clock_->MonotonicSeconds();
  if (now - last_progress_seconds_ < ProgressIntervalSeconds()) return;
  const double seconds =
      now - (last_progress_seconds_ > 0 ? last_progress_seconds_ : start_seconds_);
  Progress progress;
  progress.examples = cursor_.examples;
  const std::uint64_t before = std::max(last_progress_examples_, start_examples_);
  progress.examples_per_second =
      seconds > 0 ? static_cast<double>(cursor_.examples - before) / seconds : 0;
  ClickMetricsResult window = window_.Compute();
  if (window.examples == 0) window = last_window_;
  progress.auc = window.auc;
  progress.logloss = window.logloss;
  const RowCacheStats cache = CacheStats();
  const double accesses = static_cast<double>(cache.hits + cache.misses);
  progress.hit_rate = accesses > 0 ? static_cast<double>(cache.hits) / accesses
                                   : std::numeric_limits<double>::quiet_NaN();
  const StoreStats ssd = stores_->stats();
  if (seconds > 0) {
    progress.ssd_read_bytes_per_second =
        static_cast<double>(ssd.read_bytes - last_progress_read_) / seconds;
    progress.ssd_write_bytes_per_second =
        static_cast<double>(ssd.write_bytes - last_progress_write_) / seconds;
  }
  progress.memory_bytes = ReadProcessMemory().resident_bytes;
  // The first mini-batches are no measure of the rate.
  if (last_progress_seconds_ > 0) {
    const SourceStats read = source_->stats();
    const double rate =
        static_cast<double>(cursor_.examples - start_examples_) / (now - start_seconds_);
    progress.eta_seconds = SecondsLeft({cursor_.examples, start_examples_ + read.examples,
                                        read.progress, job_.training.max_examples, rate});
  }
  SetProgressLine(ProgressLine(progress));
  last_progress_seconds_ = now;
  last_progress_examples_ = cursor_.examples;
  last_progress_read_ = ssd.read_bytes;
  last_progress_write_ = ssd.write_bytes;
}

std::string TrainingRun::SaveTrainerState() const {
  nlohmann::json state;
  state["validation_due"] = validation_due_;
  state["validated_examples"] = validated_examples_;
  state["ssd"] = nlohmann::json::parse(SsdWearToJson(Wear(stores_->stats())));
  if (validation_.has_value())
    state["validation"] = nlohmann::json::parse(ResultToJson(*validation_));
  if (FilterFilesBytes() > 0) {
    state["unadmitted_shows"] = unadmitted_shows_;
    state["unadmitted_in_window"] = unadmitted_in_window_;
  }
  return state.dump();
}

Status TrainingRun::RestoreTrainerState(const std::string& json) {
  const nlohmann::json state = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!state.is_object())
    return CorruptionError("the trainer's state in the checkpoint is no JSON object");
  TERRACE_ASSIGN_OR_RETURN(wear_before_, SsdWearOf(json));
  // One that failed may be given up.
  validation_due_ = job_.has_validation && state.value("validation_due", false);
  validated_examples_ = state.value("validated_examples", std::uint64_t{0});
  unadmitted_shows_ = state.value("unadmitted_shows", std::uint64_t{0});
  unadmitted_in_window_ = state.value("unadmitted_in_window", std::uint64_t{0});
  if (!state.contains("validation")) return OkStatus();
  TERRACE_ASSIGN_OR_RETURN(validation_, ResultFromJson(state["validation"].dump()));
  return OkStatus();
}

bool TrainingRun::AnyExpires() const {
  return std::any_of(expiry_.begin(), expiry_.end(),
                     [](const auto& expiry) { return expiry != nullptr; });
}

ExpiryCounts TrainingRun::CountExpired() const {
  return {model_.executor->renewed_rows(), CacheStats().expired, stores_->stats().rows_expired};
}

Result<std::uint64_t> TrainingRun::CountRows() {
  std::uint64_t rows = 0;
  for (std::size_t t = 0; t < plan_->tables.size(); ++t) {
    for (Store* store : stores_->table(t)) {
      TERRACE_ASSIGN_OR_RETURN(const std::uint64_t some,
                               CountRowsAt(store, plan_->tables[t].schema.expiry(),
                                           cursor_.examples, memory_.io_buffer_bytes));
      rows += some;
    }
  }
  return rows;
}

Result<RunSummary> TrainingRun::Summarize(bool finished) {
  RunSummary summary;
  summary.finished = finished;
  summary.checkpoint = last_checkpoint_;
  summary.epochs = cursor_.epoch + (cursor_.example_in_epoch > 0 ? 1 : 0);
  summary.steps = steps_;
  summary.examples = cursor_.examples;
  summary.process_examples = cursor_.examples - start_examples_;
  summary.bad_lines = source_->stats().bad_lines;
  summary.seconds = clock_->MonotonicSeconds() - start_seconds_;
  summary.cpu_seconds = ProcessCpuSeconds();
  summary.examples_per_second =
      summary.seconds > 0 ? static_cast<double>(summary.process_examples) / summary.seconds : 0;
  summary.progressive = progressive_.Compute();
  summary.validation = validation_;
  if (FilterFilesBytes() > 0) {
    summary.admission.emplace();
    summary.admission->unadmitted_shows = unadmitted_shows_;
    for (const auto& filter : filters_) {
      if (filter == nullptr) continue;
      summary.admission->full_cells = std::max(summary.admission->full_cells, filter->FullShare());
    }
  }
  const StoreStats ssd = stores_->stats();
  summary.binding = DescribeBinding(binding_);
  summary.steps_by_rows = model_.executor->steps_by_rows();
  summary.rows = ssd.live_rows;
  // A signal is answered soon: then what is not swept yet stays in the number.
  if (finished) {
    TERRACE_ASSIGN_OR_RETURN(summary.rows, CountRows());
  }
  if (AnyExpires()) summary.expiry = CountExpired();
  summary.model_bytes = ssd.live_bytes + model_.network->parameter_floats() * sizeof(float) *
                                             model_.network->Save().buffers.size();
  summary.memory.budget_bytes = job_.memory.budget_bytes;
  summary.memory.peak_bytes = ReadProcessMemory().peak_bytes;
  summary.memory.index_bytes_per_key =
      ssd.live_rows > 0 ? static_cast<double>(ssd.index_bytes) / static_cast<double>(ssd.live_rows)
                        : 0;
  const RowCacheStats cache = CacheStats();
  summary.cache.hits = cache.hits;
  summary.cache.misses = cache.misses;
  summary.cache.evictions = cache.evictions;
  summary.ssd.read_bytes = ssd.read_bytes;
  summary.ssd.write_bytes = ssd.write_bytes;
  summary.ssd.live_bytes = ssd.live_bytes;
  summary.ssd.disk_bytes = ssd.disk_bytes;
  summary.ssd.checkpoint_only_bytes = ssd.checkpoint_only_bytes;
  summary.ssd.stale_bytes = ssd.stale_bytes;
  summary.ssd.compaction_seconds = ssd.compaction_seconds;
  summary.ssd.compaction_wait_seconds = ssd.compaction_wait_seconds;
  summary.ssd.run = Wear(ssd);
  summary.ssd.rated_write_bytes = job_.ssd.rated_write_bytes;
  summary.stages = Times();
  return summary;
}

Status TrainingRun::WriteSummary(const RunSummary& summary) {
  const std::string json = SummaryToJson(summary);
  return WriteFileAtomically(fs_, JoinPath(run_->path(), "summary.json"),
                             std::as_bytes(std::span(json)));
}

}  // namespace terrace
