#include "terrace/train/summary.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terrace/base/units.h"
#include "terrace/train/json_fields.h"

namespace terrace {
namespace {

// Fields keep the order in which they are written here.
using Json = nlohmann::ordered_json;

constexpr std::array<std::pair<const char*, StageTimes PipelineTimes::*>, 5> kStages = {{
    {"read", &PipelineTimes::read},
    {"pull", &PipelineTimes::pull},
    {"stage", &PipelineTimes::stage},
    {"train", &PipelineTimes::train},
    {"write_back", &PipelineTimes::write_back},
}};

Json StagesJson(const PipelineTimes& times) {
  Json object;
  for (const auto& [name, member] : kStages) {
    const StageTimes& stage = times.*member;
    object[name] = {{"busy_seconds", stage.busy_seconds},
                    {"waited_for_input_seconds", stage.waited_for_input_seconds},
                    {"waited_for_output_seconds", stage.waited_for_output_seconds},
                    {"cpu_seconds", stage.cpu_seconds}};
  }
  return object;
}

// NaN and infinity become null: JSON has no other word for them.
Json ResultJson(const ClickMetricsResult& result) {
  return {{"examples", result.examples},
          {"auc", result.auc},
          {"auc_error", result.auc_error},
          {"logloss", result.logloss},
          {"ne", result.ne},
          {"calibration", result.calibration},
          {"mean_label", result.mean_label},
          {"mean_prediction", result.mean_prediction}};
}

Json ExpiryJson(const ExpiryCounts& counts) {
  return {
      {"renewed", counts.renewed}, {"unwritten", counts.unwritten}, {"dropped", counts.dropped}};
}

Json WearJson(const SsdWear& wear) {
  return {{"write_bytes", wear.write_bytes},
          {"rows_written", wear.rows_written},
          {"rows_compacted", wear.rows_compacted},
          {"compaction_seconds", wear.compaction_seconds},
          {"write_amplification", wear.WriteAmplification()}};
}

Json DriveJson(const DriveHealth& drive) {
  Json object = {{"device", drive.device}, {"model", drive.model}};
  if (!drive.unknown.empty()) {
    object["unknown"] = drive.unknown;
  } else {
    object["percentage_used"] = drive.health.percentage_used;
    object["available_spare_percent"] = drive.health.available_spare_percent;
    object["written_bytes"] = drive.health.written_bytes;
  }
  return object;
}

Json PerformanceJson(const IntervalRecord::Performance& performance) {
  Json channels = Json::array();
  for (const ChannelRecord& channel : performance.channels) {
    channels.push_back({{"name", channel.name},
                        {"capacity", channel.capacity},
                        {"depth", channel.depth},
                        {"reserved_bytes", channel.reserved_bytes}});
  }
  const auto& cache = performance.cache;
  const auto& ssd = performance.ssd;
  Json object = {{"seconds", performance.seconds},
                 {"interval_seconds", performance.interval_seconds},
                 {"examples_per_second", performance.examples_per_second},
                 {"batch_examples", performance.batch_examples},
                 {"stages", StagesJson(performance.stages)},
                 {"cache",
                  {{"hits", cache.hits},
                   {"misses", cache.misses},
                   {"created", cache.created},
                   {"evictions", cache.evictions},
                   {"rows", cache.rows},
                   {"used_bytes", cache.used_bytes},
                   {"capacity_bytes", cache.capacity_bytes}}},
                 {"ssd",
                  {{"read_seconds", ssd.read_seconds},
                   {"write_seconds", ssd.write_seconds},
                   {"compaction_seconds", ssd.compaction_seconds},
                   {"compaction_wait_seconds", ssd.compaction_wait_seconds},
                   {"read_bytes", ssd.read_bytes},
                   {"write_bytes", ssd.write_bytes},
                   {"read_requests", ssd.read_requests},
                   {"rows_read", ssd.rows_read},
                   {"rows_written", ssd.rows_written},
                   {"rows_compacted", ssd.rows_compacted},
                   {"mistaken_reads", ssd.mistaken_reads},
                   {"live_bytes", ssd.live_bytes},
                   {"stale_bytes", ssd.stale_bytes},
                   {"disk_bytes", ssd.disk_bytes},
                   {"checkpoint_only_bytes", ssd.checkpoint_only_bytes},
                   {"run", WearJson(ssd.run)}}},
                 {"channels", channels},
                 {"index_bytes", performance.index_bytes},
                 {"resident_bytes", performance.resident_bytes}};
  for (const DriveHealth& drive : ssd.drives) object["ssd"]["drives"].push_back(DriveJson(drive));
  if (performance.expiry) object["expiry"] = ExpiryJson(*performance.expiry);
  if (performance.look_ahead) {
    object["look_ahead"] = {{"evicted", performance.look_ahead->evicted},
                            {"examples", performance.look_ahead->examples},
                            {"rows", performance.look_ahead->rows}};
  }
  return object;
}

Status ReadResult(const nlohmann::json& object, ClickMetricsResult* result) {
  JsonFields fields(object);
  fields.Read("examples", &result->examples);
  fields.Read("auc", &result->auc);
  fields.Read("auc_error", &result->auc_error);
  fields.Read("logloss", &result->logloss);
  fields.Read("ne", &result->ne);
  fields.Read("calibration", &result->calibration);
  fields.Read("mean_label", &result->mean_label);
  fields.Read("mean_prediction", &result->mean_prediction);
  return fields.status();
}

Status ReadStages(const nlohmann::json& object, PipelineTimes* times) {
  JsonFields fields(object);
  for (const auto& [name, member] : kStages) {
    const nlohmann::json& stage_object = fields.Object(name);
    TERRACE_RETURN_IF_ERROR(fields.status());
    StageTimes& stage = times->*member;
    JsonFields stage_fields(stage_object);
    stage_fields.Read("busy_seconds", &stage.busy_seconds);
    stage_fields.Read("waited_for_input_seconds", &stage.waited_for_input_seconds);
    stage_fields.Read("waited_for_output_seconds", &stage.waited_for_output_seconds);
    stage_fields.Read("cpu_seconds", &stage.cpu_seconds);
    TERRACE_RETURN_IF_ERROR(stage_fields.status());
  }
  return OkStatus();
}

Status ReadWear(const nlohmann::json& object, SsdWear* wear) {
  JsonFields fields(object);
  fields.Read("write_bytes", &wear->write_bytes);
  fields.Read("rows_written", &wear->rows_written);
  fields.Read("rows_compacted", &wear->rows_compacted);
  fields.Read("compaction_seconds", &wear->compaction_seconds);
  double amplification = 0;
  fields.Read("write_amplification", &amplification);
  TERRACE_RETURN_IF_ERROR(fields.status());
  // In summary.json it is null where nothing was to be written.
  const double wanted = static_cast<double>(wear->write_bytes) / amplification;
  if (amplification > 0 && wanted < 0x1p63) {
    wear->wanted_bytes = static_cast<std::uint64_t>(std::llround(wanted));
  }
  return OkStatus();
}

Status ReadParts(const nlohmann::json& object, std::uint64_t version, RunSummary* summary) {
  JsonFields fields(object);
  JsonFields memory(fields.Object("memory"));
  memory.Read("budget_bytes", &summary->memory.budget_bytes);
  memory.Read("peak_bytes", &summary->memory.peak_bytes);
  memory.Read("index_bytes_per_key", &summary->memory.index_bytes_per_key);
  TERRACE_RETURN_IF_ERROR(memory.status());
  JsonFields cache(fields.Object("cache"));
  cache.Read("hits", &summary->cache.hits);
  cache.Read("misses", &summary->cache.misses);
  cache.Read("evictions", &summary->cache.evictions);
  TERRACE_RETURN_IF_ERROR(cache.status());
  JsonFields ssd(fields.Object("ssd"));
  ssd.Read("read_bytes", &summary->ssd.read_bytes);
  ssd.Read("write_bytes", &summary->ssd.write_bytes);
  ssd.Read("live_bytes", &summary->ssd.live_bytes);
  ssd.Read("disk_bytes", &summary->ssd.disk_bytes);
  ssd.Read("checkpoint_only_bytes", &summary->ssd.checkpoint_only_bytes);
  if (version >= 2) {
    ssd.Read("stale_bytes", &summary->ssd.stale_bytes);
    ssd.Read("compaction_seconds", &summary->ssd.compaction_seconds);
    ssd.Read("compaction_wait_seconds", &summary->ssd.compaction_wait_seconds);
    ssd.Read("rated_write_bytes", &summary->ssd.rated_write_bytes);
    TERRACE_RETURN_IF_ERROR(ReadWear(ssd.Object("run"), &summary->ssd.run));
  }
  TERRACE_RETURN_IF_ERROR(ssd.status());
  TERRACE_RETURN_IF_ERROR(ReadStages(fields.Object("stages"), &summary->stages));
  TERRACE_RETURN_IF_ERROR(ReadResult(fields.Object("progressive"), &summary->progressive));
  const nlohmann::json* validation = fields.Find("validation");
  if (validation != nullptr && !validation->is_null()) {
    ClickMetricsResult result;
    TERRACE_RETURN_IF_ERROR(ReadResult(*validation, &result));
    summary->validation = result;
  }
  if (object.contains("admission")) {
    JsonFields admission(fields.Object("admission"));
    summary->admission.emplace();
    admission.Read("unadmitted_shows", &summary->admission->unadmitted_shows);
    admission.Read("full_cells", &summary->admission->full_cells);
    TERRACE_RETURN_IF_ERROR(admission.status());
  }
  if (object.contains("expiry")) {
    JsonFields expiry(fields.Object("expiry"));
    summary->expiry.emplace();
    expiry.Read("renewed", &summary->expiry->renewed);
    expiry.Read("unwritten", &summary->expiry->unwritten);
    expiry.Read("dropped", &summary->expiry->dropped);
    TERRACE_RETURN_IF_ERROR(expiry.status());
  }
  if (object.contains("binding")) fields.Read("binding", &summary->binding.emplace());
  if (object.contains("steps_by_rows")) {
    fields.Read("steps_by_rows", &summary->steps_by_rows.emplace());
  }
  if (object.contains("cpu_seconds")) fields.Read("cpu_seconds", &summary->cpu_seconds.emplace());
  return fields.status();
}

std::string Number(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "-";
}

double Percent(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? std::nan("") : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

std::string Line(std::string_view name, const std::string& value) {
  return fmt::format("  {:<16}{}\n", name, value);
}

std::string MetricsText(const ClickMetricsResult& result) {
  return fmt::format("AUC {}, log loss {}, NE {}, calibration {}", Number(result.auc, 4),
                     Number(result.logloss, 4), Number(result.ne, 4),
                     Number(result.calibration, 3));
}

std::string Rate(double per_second) {
  if (!std::isfinite(per_second)) return "-";
  if (per_second >= 1e6) return fmt::format("{:.2f} M/s", per_second / 1e6);
  if (per_second >= 1e3) return fmt::format("{:.1f} k/s", per_second / 1e3);
  return fmt::format("{:.0f} /s", per_second);
}

}  // namespace

SsdWear& SsdWear::operator+=(const SsdWear& other) {
  write_bytes += other.write_bytes;
  rows_written += other.rows_written;
  rows_compacted += other.rows_compacted;
  compaction_seconds += other.compaction_seconds;
  wanted_bytes += other.wanted_bytes;
  return *this;
}

double SsdWear::WriteAmplification() const {
  if (wanted_bytes == 0) return 0;
  return static_cast<double>(write_bytes) / static_cast<double>(wanted_bytes);
}

StageTimes& StageTimes::operator-=(const StageTimes& other) {
  busy_seconds -= other.busy_seconds;
  waited_for_input_seconds -= other.waited_for_input_seconds;
  waited_for_output_seconds -= other.waited_for_output_seconds;
  cpu_seconds -= other.cpu_seconds;
  return *this;
}

PipelineTimes& PipelineTimes::operator-=(const PipelineTimes& other) {
  for (const auto& [name, member] : kStages) this->*member -= other.*member;
  return *this;
}

void IntervalRecord::Performance::SubtractTotals(const Performance& before) {
  interval_seconds = seconds - before.seconds;
  stages -= before.stages;
  cache.hits -= before.cache.hits;
  cache.misses -= before.cache.misses;
  cache.created -= before.cache.created;
  cache.evictions -= before.cache.evictions;
  ssd.read_seconds -= before.ssd.read_seconds;
  ssd.write_seconds -= before.ssd.write_seconds;
  ssd.compaction_seconds -= before.ssd.compaction_seconds;
  ssd.compaction_wait_seconds -= before.ssd.compaction_wait_seconds;
  ssd.read_bytes -= before.ssd.read_bytes;
  ssd.write_bytes -= before.ssd.write_bytes;
  ssd.read_requests -= before.ssd.read_requests;
  ssd.rows_read -= before.ssd.rows_read;
  ssd.rows_written -= before.ssd.rows_written;
  ssd.rows_compacted -= before.ssd.rows_compacted;
  ssd.mistaken_reads -= before.ssd.mistaken_reads;
  if (expiry && before.expiry) {
    expiry->renewed -= before.expiry->renewed;
    expiry->unwritten -= before.expiry->unwritten;
    expiry->dropped -= before.expiry->dropped;
  }
  if (look_ahead && before.look_ahead) look_ahead->evicted -= before.look_ahead->evicted;
}

std::string LongestStage(const PipelineTimes& times) {
  const char* longest = kStages[0].first;
  double busy = -1;
  for (const auto& [name, member] : kStages) {
    if ((times.*member).busy_seconds > busy) {
      busy = (times.*member).busy_seconds;
      longest = name;
    }
  }
  return longest;
}

namespace {

// What a drive calls itself may be no UTF-8.
std::string DumpForPeople(const Json& object) {
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::string IntervalToJson(const IntervalRecord& record) {
  Json object = {{"format_version", kMetricsVersion},
                 {"kind", "interval"},
                 {"epoch", record.epoch},
                 {"examples", record.examples},
                 {"steps", record.steps},
                 {"bad_lines", record.bad_lines},
                 {"window", ResultJson(record.window)},
                 {"progressive", ResultJson(record.progressive)}};
  if (record.unadmitted_shows) object["unadmitted_shows"] = *record.unadmitted_shows;
  object["performance"] = PerformanceJson(record.performance);
  return DumpForPeople(object);
}

std::string ValidationToJson(const ValidationRecord& record) {
  const Json object = {{"format_version", kMetricsVersion},
                       {"kind", "validation"},
                       {"epoch", record.epoch},
                       {"examples", record.examples},
                       {"steps", record.steps},
                       {"validation", ResultJson(record.result)},
                       {"performance", {{"seconds", record.seconds}}}};
  return object.dump();
}

std::string SsdWearToJson(const SsdWear& wear) { return WearJson(wear).dump(); }

std::string DriveToJson(const DriveHealth& drive) { return DumpForPeople(DriveJson(drive)); }

Result<SsdWear> SsdWearOf(const std::string& trainer_state) {
  const nlohmann::json state = nlohmann::json::parse(trainer_state, nullptr, false);
  if (!state.is_object()) {
    return CorruptionError("the trainer's state in the checkpoint is no JSON object");
  }
  SsdWear wear;
  if (!state.contains("ssd")) return wear;
  TERRACE_RETURN_IF_ERROR(
      ReadWear(state["ssd"], &wear).WithContext("the trainer's state in the checkpoint"));
  return wear;
}

std::string SsdWearText(const SsdWear& wear, std::uint64_t rated_write_bytes) {
  std::string text = fmt::format(
      "{} written at write amplification {}, {} of compaction", FormatBytes(wear.write_bytes),
      Number(wear.WriteAmplification(), 2), FormatDuration(wear.compaction_seconds));
  if (rated_write_bytes > 0) {
    text +=
        fmt::format("; {:.3g} % of the {} that the disks are rated for",
                    Percent(wear.write_bytes, rated_write_bytes), FormatBytes(rated_write_bytes));
  }
  return text;
}

std::string SummaryToJson(const RunSummary& summary) {
  Json object = {
      {"format_version", kSummaryVersion},
      {"finished", summary.finished},
      {"checkpoint", summary.checkpoint},
      {"epochs", summary.epochs},
      {"steps", summary.steps},
      {"examples", summary.examples},
      {"process_examples", summary.process_examples},
      {"bad_lines", summary.bad_lines},
      {"seconds", summary.seconds},
      {"examples_per_second", summary.examples_per_second},
      {"progressive", ResultJson(summary.progressive)},
      {"validation", summary.validation ? ResultJson(*summary.validation) : Json(nullptr)},
      {"rows", summary.rows},
      {"model_bytes", summary.model_bytes},
      {"memory",
       {{"budget_bytes", summary.memory.budget_bytes},
        {"peak_bytes", summary.memory.peak_bytes},
        {"index_bytes_per_key", summary.memory.index_bytes_per_key}}},
      {"cache",
       {{"hits", summary.cache.hits},
        {"misses", summary.cache.misses},
        {"evictions", summary.cache.evictions}}},
      {"ssd",
       {{"read_bytes", summary.ssd.read_bytes},
        {"write_bytes", summary.ssd.write_bytes},
        {"live_bytes", summary.ssd.live_bytes},
        {"disk_bytes", summary.ssd.disk_bytes},
        {"checkpoint_only_bytes", summary.ssd.checkpoint_only_bytes},
        {"stale_bytes", summary.ssd.stale_bytes},
        {"compaction_seconds", summary.ssd.compaction_seconds},
        {"compaction_wait_seconds", summary.ssd.compaction_wait_seconds},
        {"run", WearJson(summary.ssd.run)},
        {"rated_write_bytes", summary.ssd.rated_write_bytes}}},
      {"stages", StagesJson(summary.stages)}};
  if (summary.admission) {
    object["admission"] = {{"unadmitted_shows", summary.admission->unadmitted_shows},
                           {"full_cells", summary.admission->full_cells}};
  }
  if (summary.expiry) object["expiry"] = ExpiryJson(*summary.expiry);
  if (summary.binding) object["binding"] = *summary.binding;
  if (summary.steps_by_rows) object["steps_by_rows"] = *summary.steps_by_rows;
  if (summary.cpu_seconds) object["cpu_seconds"] = *summary.cpu_seconds;
  return object.dump(2) + "\n";
}

Result<RunSummary> SummaryFromJson(const std::string& text) {
  const nlohmann::json object = nlohmann::json::parse(text, nullptr, false);
  if (object.is_discarded()) return CorruptionError("the summary is not JSON");
  RunSummary summary;
  JsonFields fields(object);
  std::uint64_t version = 0;
  fields.Read("format_version", &version);
  if (fields.status().ok() && version > kSummaryVersion) {
    return InvalidArgumentError(fmt::format(
        "the summary has format version {}, written by a newer terrace; this one reads {}", version,
        kSummaryVersion));
  }
  fields.Read("finished", &summary.finished);
  fields.Read("checkpoint", &summary.checkpoint);
  fields.Read("epochs", &summary.epochs);
  fields.Read("steps", &summary.steps);
  fields.Read("examples", &summary.examples);
  fields.Read("process_examples", &summary.process_examples);
  fields.Read("bad_lines", &summary.bad_lines);
  fields.Read("seconds", &summary.seconds);
  fields.Read("examples_per_second", &summary.examples_per_second);
  fields.Read("rows", &summary.rows);
  fields.Read("model_bytes", &summary.model_bytes);
  TERRACE_RETURN_IF_ERROR(fields.status());
  TERRACE_RETURN_IF_ERROR(ReadParts(object, version, &summary));
  return summary;
}

std::string ResultToJson(const ClickMetricsResult& result) { return ResultJson(result).dump(); }

Result<ClickMetricsResult> ResultFromJson(const std::string& json) {
  ClickMetricsResult result;
  TERRACE_RETURN_IF_ERROR(ReadResult(nlohmann::json::parse(json, nullptr, false), &result));
  return result;
}

std::string ResultTable(const ClickMetricsResult& result, std::uint64_t bad_lines) {
  return Line("examples", FormatCount(result.examples)) + Line("AUC", Number(result.auc, 5)) +
         Line("log loss", Number(result.logloss, 5)) + Line("NE", Number(result.ne, 5)) +
         Line("calibration", Number(result.calibration, 4)) +
         Line("clicks",
              fmt::format("{} of the examples, {} predicted", Number(result.mean_label, 5),
                          Number(result.mean_prediction, 5))) +
         (bad_lines > 0 ? Line("bad lines", FormatCount(bad_lines)) : "");
}

std::string SummaryTable(const RunSummary& summary, const std::string& run) {
  const RunSummary::Memory& memory = summary.memory;
  std::string text = fmt::format("{} {} at checkpoint {}\n", run,
                                 summary.finished ? "finished" : "stopped", summary.checkpoint);
  text +=
      Line("examples",
           fmt::format("{} in {} ({}){}", FormatCount(summary.process_examples),
                       FormatDuration(summary.seconds), Rate(summary.examples_per_second),
                       summary.process_examples == summary.examples
                           ? ""
                           : fmt::format("; {} of the whole run", FormatCount(summary.examples))));
  if (summary.bad_lines > 0) text += Line("bad lines", FormatCount(summary.bad_lines));
  text += Line("progressive", MetricsText(summary.progressive));
  if (summary.validation) text += Line("validation", MetricsText(*summary.validation));
  text += Line("model", fmt::format("{} rows, {}", FormatCount(summary.rows),
                                    FormatBytes(summary.model_bytes)));
  if (summary.admission) {
    text += Line("admission", fmt::format("{} shows of keys without a row yet; {} % of the filter "
                                          "full",
                                          FormatCount(summary.admission->unadmitted_shows),
                                          Number(100 * summary.admission->full_cells, 1)));
  }
  if (summary.expiry) {
    text += Line("expiry", fmt::format("{} rows begun anew, {} not written back, {} dropped on "
                                       "disk",
                                       FormatCount(summary.expiry->renewed),
                                       FormatCount(summary.expiry->unwritten),
                                       FormatCount(summary.expiry->dropped)));
  }
  text +=
      Line("memory", fmt::format("{} at most, of a budget of {}; {} index bytes a key",
                                 FormatBytes(memory.peak_bytes), FormatBytes(memory.budget_bytes),
                                 Number(memory.index_bytes_per_key, 1)));
  text += Line(
      "memory tier",
      fmt::format("{} % of row accesses hit; {} evictions",
                  Number(Percent(summary.cache.hits, summary.cache.hits + summary.cache.misses), 1),
                  FormatCount(summary.cache.evictions)));
  text += Line(
      "SSD", fmt::format("{} read, {} written; holds {}, {} of it live, {} stale and {} for "
                         "checkpoints alone",
                         FormatBytes(summary.ssd.read_bytes), FormatBytes(summary.ssd.write_bytes),
                         FormatBytes(summary.ssd.disk_bytes), FormatBytes(summary.ssd.live_bytes),
                         FormatBytes(summary.ssd.stale_bytes),
                         FormatBytes(summary.ssd.checkpoint_only_bytes)));
  if (summary.binding) text += Line("binding", *summary.binding);
  text += Line("SSD, whole run", SsdWearText(summary.ssd.run, summary.ssd.rated_write_bytes));
  text += Line("longest stage", LongestStage(summary.stages));
  text += fmt::format("  {:<16}{:>10}{:>12}{:>12}{:>10}\n", "stage", "busy s", "no input s",
                      "no room s", "CPU s");
  for (const auto& [name, member] : kStages) {
    const StageTimes& stage = summary.stages.*member;
    text += fmt::format("  {:<16}{:>10.2f}{:>12.2f}{:>12.2f}{:>10.2f}\n", name, stage.busy_seconds,
                        stage.waited_for_input_seconds, stage.waited_for_output_seconds,
                        stage.cpu_seconds);
  }
  return text;
}

std::string FormatDuration(double seconds) {
  if (!(seconds >= 0)) return "-";
  if (seconds < 60) return fmt::format("{:.2f} s", seconds);
  const auto whole = static_cast<std::uint64_t>(seconds + 0.5);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

double SecondsLeft(const Advance& advance) {
  double examples = advance.max_examples > 0 ? static_cast<double>(advance.max_examples)
                                             : std::numeric_limits<double>::infinity();
  if (advance.read_share > 0) {
    examples = std::min(examples, static_cast<double>(advance.read) / advance.read_share);
  }
  if (!std::isfinite(examples) || advance.examples_per_second <= 0) return -1;
  return std::max(0.0, examples - static_cast<double>(advance.trained)) /
         advance.examples_per_second;
}

std::string ProgressLine(const Progress& progress) {
  std::string text = fmt::format(
      "{} examples | {} | AUC {} | log loss {} | hits {} % | SSD {:.1f} + {:.1f} MB/s | {}",
      FormatCount(progress.examples), Rate(progress.examples_per_second), Number(progress.auc, 4),
      Number(progress.logloss, 4), Number(100 * progress.hit_rate, 1),
      progress.ssd_read_bytes_per_second / 1e6, progress.ssd_write_bytes_per_second / 1e6,
      FormatBytes(progress.memory_bytes));
  if (progress.eta_seconds >= 0) text += " | " + FormatDuration(progress.eta_seconds) + " left";
  return text;
}

}  // namespace terrace
