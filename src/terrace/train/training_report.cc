// What a TrainingRun writes down: metrics, progress, trainer state, summary.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terrace/base/log.h"
#include "terrace/base/memory.h"
#include "terrace/train/training_run.h"

namespace terrace {
namespace {

StageTimes FromReport(const StageReport& report) {
  StageTimes times;
  times.busy_seconds = report.busy_seconds;
  times.waited_for_input_seconds = report.waited_for_input_seconds;
  times.waited_for_output_seconds = report.waited_for_output_seconds;
  times.cpu_seconds = report.cpu_seconds;
  return times;
}

StageTimes Difference(const StageTimes& a, const StageTimes& b) {
  StageTimes d;
  d.busy_seconds = a.busy_seconds - b.busy_seconds;
  d.waited_for_input_seconds = a.waited_for_input_seconds - b.waited_for_input_seconds;
  d.waited_for_output_seconds = a.waited_for_output_seconds - b.waited_for_output_seconds;
  d.cpu_seconds = a.cpu_seconds - b.cpu_seconds;
  return d;
}

}  // namespace

RowCacheStats TrainingRun::CacheStats() const {
  RowCacheStats sum;
  for (const RowCache* cache : cache_pointers_) {
    const RowCacheStats one = cache->stats();
    sum.hits += one.hits;
    sum.misses += one.misses;
    sum.created += one.created;
    sum.evictions += one.evictions;
    sum.written_back += one.written_back;
    sum.rows += one.rows;
    sum.dirty_rows += one.dirty_rows;
    sum.used_bytes += one.used_bytes;
    sum.capacity_bytes += one.capacity_bytes;
  }
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
  times.train.cpu_seconds += workers_->cpu_seconds();
  // Write-back is not a stage of the pipeline: its time is that of the stores' writing.
  const StoreStats stores = stores_->stats();
  times.write_back.busy_seconds = stores.write_seconds;
  return times;
}

void TrainingRun::FillPerformance(IntervalRecord::Performance* performance) {
  IntervalRecord::Performance now;
  now.seconds = clock_->MonotonicSeconds() - start_seconds_;
  now.stages = Times();
  const RowCacheStats cache = CacheStats();
  now.cache.hits = cache.hits;
  now.cache.misses = cache.misses;
  now.cache.created = cache.created;
  now.cache.evictions = cache.evictions;
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

  const IntervalRecord::Performance& last = last_totals_;
  IntervalRecord::Performance out = now;
  out.interval_seconds = now.seconds - last.seconds;
  out.stages.read = Difference(now.stages.read, last.stages.read);
  out.stages.pull = Difference(now.stages.pull, last.stages.pull);
  out.stages.stage = Difference(now.stages.stage, last.stages.stage);
  out.stages.train = Difference(now.stages.train, last.stages.train);
  out.stages.write_back = Difference(now.stages.write_back, last.stages.write_back);
  out.cache.hits -= last.cache.hits;
  out.cache.misses -= last.cache.misses;
  out.cache.created -= last.cache.created;
  out.cache.evictions -= last.cache.evictions;
  out.ssd.read_seconds -= last.ssd.read_seconds;
  out.ssd.write_seconds -= last.ssd.write_seconds;
  out.ssd.compaction_seconds -= last.ssd.compaction_seconds;
  out.ssd.read_bytes -= last.ssd.read_bytes;
  out.ssd.write_bytes -= last.ssd.write_bytes;
  out.ssd.read_requests -= last.ssd.read_requests;
  out.ssd.rows_read -= last.ssd.rows_read;
  out.ssd.rows_written -= last.ssd.rows_written;
  out.ssd.rows_compacted -= last.ssd.rows_compacted;
  last_totals_ = now;

  out.batch_examples = memory_.batch;
  out.cache.rows = cache.rows;
  out.cache.used_bytes = cache.used_bytes;
  out.cache.capacity_bytes = cache.capacity_bytes;
  out.ssd.live_bytes = ssd.live_bytes;
  out.ssd.disk_bytes = ssd.disk_bytes;
  out.ssd.write_amplification = ssd.rows_written > 0
                                    ? static_cast<double>(ssd.rows_written + ssd.rows_compacted) /
                                          static_cast<double>(ssd.rows_written)
                                    : 0;
  if (pipeline_ != nullptr) {
    for (const ChannelState& channel : pipeline_->channels()) {
      out.channels.push_back({channel.name, channel.capacity, channel.size, channel.bytes});
    }
  }
  out.index_bytes = stores_->index_bytes();
  out.resident_bytes = ReadProcessMemory().resident_bytes;
  *performance = out;
}

Status TrainingRun::WriteInterval() {
  IntervalRecord record;
  record.epoch = cursor_.epoch;
  record.examples = cursor_.examples;
  record.steps = steps_;
  record.bad_lines = cursor_.bad_lines;
  record.window = window_.Compute();
  record.progressive = progressive_.Compute();
  FillPerformance(&record.performance);
  record.performance.examples_per_second =
      record.performance.interval_seconds > 0
          ? static_cast<double>(record.window.examples) / record.performance.interval_seconds
          : 0;
  window_ = ClickMetrics();
  return metrics_file_->Append(IntervalToJson(record));
}

void TrainingRun::ShowProgress(bool force) {
  const double now = clock_->MonotonicSeconds();
  if (!force && now - last_progress_seconds_ < 1.0) return;
  const double seconds =
      now - (last_progress_seconds_ > 0 ? last_progress_seconds_ : start_seconds_);
  Progress progress;
  progress.examples = cursor_.examples;
  const std::uint64_t before = std::max(last_progress_examples_, start_examples_);
  progress.examples_per_second =
      seconds > 0 ? static_cast<double>(cursor_.examples - before) / seconds : 0;
  const ClickMetricsResult window = window_.Compute();
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
  const double done = source_->stats().progress;
  const double elapsed = now - start_seconds_;
  if (done > 0.01 && start_examples_ == 0) progress.eta_seconds = elapsed * (1 - done) / done;
  SetProgressLine(ProgressLine(progress));
  last_progress_seconds_ = now;
  last_progress_examples_ = cursor_.examples;
  last_progress_read_ = ssd.read_bytes;
  last_progress_write_ = ssd.write_bytes;
}

std::string TrainingRun::SaveTrainerState() const {
  nlohmann::json state;
  state["validation_due"] = validation_due_;
  if (validation_.has_value()) {
    state["validation"] = {{"examples", validation_->examples},
                           {"weight", validation_->weight},
                           {"auc", validation_->auc},
                           {"auc_error", validation_->auc_error},
                           {"logloss", validation_->logloss},
                           {"ne", validation_->ne},
                           {"calibration", validation_->calibration},
                           {"mean_label", validation_->mean_label},
                           {"mean_prediction", validation_->mean_prediction}};
  }
  return state.dump();
}

Status TrainingRun::RestoreTrainerState(const std::string& json) {
  const nlohmann::json state = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!state.is_object())
    return CorruptionError("the trainer's state in the checkpoint is no JSON object");
  validation_due_ = state.value("validation_due", false);
  if (!state.contains("validation") || !state["validation"].is_object()) return OkStatus();
  const nlohmann::json& in = state["validation"];
  auto number = [&](const char* name) {
    return in.contains(name) && in[name].is_number() ? in[name].get<double>()
                                                     : std::numeric_limits<double>::quiet_NaN();
  };
  ClickMetricsResult result;
  result.examples = static_cast<std::uint64_t>(number("examples"));
  result.weight = number("weight");
  result.auc = number("auc");
  result.auc_error = number("auc_error");
  result.logloss = number("logloss");
  result.ne = number("ne");
  result.calibration = number("calibration");
  result.mean_label = number("mean_label");
  result.mean_prediction = number("mean_prediction");
  validation_ = result;
  return OkStatus();
}

RunSummary TrainingRun::Summarize(bool finished) {
  RunSummary summary;
  summary.finished = finished;
  summary.checkpoint = last_checkpoint_;
  summary.epochs = cursor_.epoch + (cursor_.example_in_epoch > 0 ? 1 : 0);
  summary.steps = steps_;
  summary.examples = cursor_.examples;
  summary.process_examples = cursor_.examples - start_examples_;
  summary.bad_lines = source_->stats().bad_lines;
  summary.seconds = clock_->MonotonicSeconds() - start_seconds_;
  summary.examples_per_second =
      summary.seconds > 0 ? static_cast<double>(summary.process_examples) / summary.seconds : 0;
  summary.progressive = progressive_.Compute();
  summary.validation = validation_;
  const StoreStats ssd = stores_->stats();
  summary.rows = ssd.live_rows;
  summary.model_bytes = ssd.live_bytes + network_->parameter_floats() * sizeof(float) *
                                             network_->Save().buffers.size();
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
  summary.stages = Times();
  return summary;
}

Status TrainingRun::WriteSummary(const RunSummary& summary) {
  const std::string json = SummaryToJson(summary);
  return WriteFileAtomically(fs_, JoinPath(run_->path(), "summary.json"),
                             std::as_bytes(std::span(json)));
}

}  // namespace terrace
