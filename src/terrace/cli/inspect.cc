// terrace inspect: a run's newest checkpoint as a person, a script or a test asks for it.
#include <charconv>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/base/units.h"
#include "terrace/cli/commands.h"
#include "terrace/data/criteo_parser.h"
#include "terrace/data/example_source.h"
#include "terrace/io/drive_health.h"
#include "terrace/model/network.h"
#include "terrace/store/manifest.h"
#include "terrace/store/parameter_file.h"
#include "terrace/train/run_reader.h"
#include "terrace/train/run_scrub.h"
#include "terrace/train/summary.h"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;

std::string Dump(const Json& object, int indent) {
  return object.dump(indent, ' ', false, Json::error_handler_t::replace) + "\n";
}

// "C1=2bc7", "I2=14": what stands in the log, in a slot of `schema`. nullopt: text has no such
// slot, or no number for one of integers.
std::optional<Key> ColumnKey(std::string_view text, const DataSchema& schema) {
  const std::size_t at = text.find('=');
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view value = text.substr(at + 1);
  for (const DataSchema::Slot& slot : schema.slots) {
    if (slot.name != text.substr(0, at)) continue;
    if (value.empty()) return Key{slot.id} << 48 | kMissingCategory;
    std::uint64_t category = 0;
    if (!slot.name.starts_with('I')) {
      category = HashCategory(value);
    } else {
      std::int64_t integer = 0;
      const char* const end = value.data() + value.size();
      const auto [rest, error] = std::from_chars(value.data(), end, integer);
      if (error != std::errc() || rest != end) return std::nullopt;
      category = BucketOfInteger(integer);
    }
    return Key{slot.id} << 48 | category;
  }
  return std::nullopt;
}

Result<Key> ParseKey(const std::string& text, const DataSchema& schema) {
  if (const std::optional<Key> key = ColumnKey(text, schema)) return *key;
  const bool hexadecimal = text.starts_with("0x") || text.starts_with("0X");
  const char* begin = text.data() + (hexadecimal ? 2 : 0);
  const char* end = text.data() + text.size();
  Key key = 0;
  auto [rest, error] = std::from_chars(begin, end, key, hexadecimal ? 16 : 10);
  if (error == std::errc() && rest == end) return key;
  return InvalidArgumentError(fmt::format(
      "--key '{}' is no key: a decimal number below 2^64, 0x and digits, or a column of the run's "
      "data and what stands in it, as C1=2bc7 or I2=14",
      text));
}

// The fields of one row, by name.
Json FieldsJson(const std::vector<RowField>& fields, std::span<const std::byte> row) {
  Json object = Json::object();
  for (const RowField& field : fields) {
    Json values = Json::array();
    const std::size_t width = field.type == StorageType::kUint64 ? 8 : 4;
    for (std::uint32_t i = 0; i < field.count; ++i) {
      const std::byte* at = row.data() + field.offset + i * width;
      if (field.type == StorageType::kUint64) {
        std::uint64_t value = 0;
        std::memcpy(&value, at, sizeof(value));
        values.push_back(value);
      } else {
        float value = 0;
        std::memcpy(&value, at, sizeof(value));
        values.push_back(value);
      }
    }
    object[field.name] = field.count == 1 ? values[0] : values;
  }
  return object;
}

// Fields beyond the row would be read from foreign memory.
Status CheckFields(const std::vector<RowField>& fields, std::size_t row_bytes) {
  for (const RowField& field : fields) {
    const std::uint64_t width = field.type == StorageType::kUint64 ? 8 : 4;
    if (field.offset + field.count * width > row_bytes) {
      return CorruptionError(fmt::format("field '{}' ends beyond the row", field.name));
    }
  }
  return OkStatus();
}

// The rows of `keys` in the stores of the checkpoint.
Status ReadRows(RunReader* reader, const std::vector<Key>& keys, Json* rows) {
  for (const Checkpoint::StoreManifest& manifest : reader->checkpoint().stores) {
    TERRACE_ASSIGN_OR_RETURN(const std::vector<RowField> fields,
                             FieldsOfSchemaText(manifest.schema));
    TERRACE_RETURN_IF_ERROR(CheckFields(fields, manifest.row_bytes));
    TERRACE_ASSIGN_OR_RETURN(const ExpiryRule expiry, ExpiryOfSchemaText(manifest.schema));
    TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store, reader->OpenStore(manifest));
    for (const Key key : keys) {
      std::vector<std::byte> row(manifest.row_bytes);
      std::byte* const at = row.data();
      std::uint8_t found = 0;
      TERRACE_RETURN_IF_ERROR(store->Read({&key, 1}, {&at, 1}, {&found, 1}));
      if (found == 0 || !CountsAt(expiry, row, reader->checkpoint().cursor.examples)) continue;
      rows->push_back({{"table", manifest.table},
                       {"shard", manifest.shard},
                       {"key", key},
                       {"fields", FieldsJson(fields, row)}});
    }
  }
  return OkStatus();
}

// The log need not be there any more.
Result<ModelPlan> PlanOf(const Job& job) {
  TERRACE_ASSIGN_OR_RETURN(const DataSchema schema, SchemaOf(job.train_data));
  return MakeModelPlan(job, schema);
}

// The rows of `keys` as every table would create them.
Status InitialRows(RunReader* reader, const std::vector<Key>& keys, Json* rows) {
  TERRACE_ASSIGN_OR_RETURN(const ModelPlan plan, PlanOf(reader->job()));
  for (const TablePlan& table : plan.tables) {
    const std::vector<RowField> fields(table.schema.fields().begin(), table.schema.fields().end());
    for (const Key key : keys) {
      std::vector<std::byte> row(table.schema.row_bytes());
      table.schema.InitializeRow(reader->job().seed, key, row.data());
      rows->push_back(
          {{"table", table.schema.table()}, {"key", key}, {"fields", FieldsJson(fields, row)}});
    }
  }
  return OkStatus();
}

// The dense state, and where its parameters lie in each of its buffers.
struct DenseView {
  std::vector<ParameterInfo> parameters;
  DenseState state;
};

Result<DenseView> ViewDense(RunReader* reader, bool initial) {
  DenseView view;
  TERRACE_ASSIGN_OR_RETURN(const ModelPlan plan, PlanOf(reader->job()));
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<Network> network,
                           CreateNetwork(plan.network, plan.inputs, reader->job().seed));
  const auto& parameters = network->parameters();
  view.parameters.assign(parameters.begin(), parameters.end());
  if (initial) {
    view.state = network->Save();
  } else {
    network.reset();  // Its memory is what the state needs.
    TERRACE_ASSIGN_OR_RETURN(view.state, reader->folder()->ReadDense(reader->checkpoint()));
  }
  for (const ParameterInfo& parameter : view.parameters) {
    for (std::size_t i = 0; i < view.state.names.size(); ++i) {
      if (parameter.offset + parameter.size <= view.state.buffers[i].size()) continue;
      return CorruptionError(fmt::format("parameter '{}' ends beyond the dense state's '{}'",
                                         parameter.name, view.state.names[i]));
    }
  }
  return view;
}

// Writes to standard output in pieces, so that the text of a whole network is never held. Later
// calls do nothing once one failed.
class ResultStream {
 public:
  void Add(std::string_view text) {
    text_ += text;
    if (text_.size() >= kPieceBytes) Flush();
  }
  // kExitFailed where something was not written.
  int Flush() {
    if (code_ == kExitDone) code_ = PrintResult(text_);
    text_.clear();
    return code_;
  }

 private:
  static constexpr std::size_t kPieceBytes = std::size_t{1} << 18;
  std::string text_;
  int code_ = kExitDone;
};

// As one JSON object, with a line for each parameter where `lines` is true.
void WriteDense(const DenseView& view, bool lines, ResultStream* out) {
  const char* const next = lines ? "\n  " : "";
  out->Add(fmt::format(R"({{"steps":{},"parameters":[)", view.state.steps));
  bool first = true;
  for (const ParameterInfo& parameter : view.parameters) {
    out->Add(first ? "" : ",");
    out->Add(next);
    first = false;
    out->Add(fmt::format(R"({{"name":{},"shape":{})", Json(parameter.name).dump(),
                         Json(parameter.shape).dump()));
    for (std::size_t i = 0; i < view.state.names.size(); ++i) {
      out->Add(fmt::format(",{}:[", Json(view.state.names[i]).dump()));
      const std::span<const float> values =
          std::span(view.state.buffers[i]).subspan(parameter.offset, parameter.size);
      for (std::size_t v = 0; v < values.size(); ++v) {
        if (v > 0) out->Add(",");
        out->Add(Json(values[v]).dump());
      }
      out->Add("]");
    }
    out->Add("}");
  }
  out->Add("]}");
}

// What a table's stores say of it together.
struct TableView {
  std::uint64_t shards = 0, row_bytes = 0, rows = 0, live_bytes = 0, disk_bytes = 0, files = 0;
  std::uint64_t stale_bytes = 0;
  std::uint64_t checkpoint_only_bytes = 0;  // Of files that only older checkpoints name.
};

Status ViewTables(RunReader* reader, std::map<std::string, TableView>* tables) {
  for (const Checkpoint::StoreManifest& manifest : reader->checkpoint().stores) {
    TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store, reader->OpenStore(manifest));
    const StoreStats stats = store->stats();
    TableView& view = (*tables)[manifest.table];
    ++view.shards;
    view.row_bytes = manifest.row_bytes;
    TERRACE_ASSIGN_OR_RETURN(const ExpiryRule expiry, ExpiryOfSchemaText(manifest.schema));
    TERRACE_ASSIGN_OR_RETURN(const std::uint64_t rows,
                             CountRowsAt(store.get(), expiry, reader->checkpoint().cursor.examples,
                                         reader->buffer_bytes()));
    view.rows += rows;
    view.live_bytes += stats.live_bytes;
    view.disk_bytes += stats.disk_bytes;
    view.files += stats.files;
    view.stale_bytes += stats.stale_bytes;
  }
  return OkStatus();
}

// Adds what only the other checkpoints of `ids` name.
Status ViewOlder(FileSystem* fs, RunReader* reader, const std::vector<std::uint64_t>& ids,
                 std::map<std::string, TableView>* tables) {
  std::set<std::string> seen;
  const auto add = [&](const Checkpoint& checkpoint, bool counts) -> Status {
    for (const Checkpoint::StoreManifest& store : checkpoint.stores) {
      const std::string folder = reader->folder()->ResolveDirectory(store.directory);
      TERRACE_ASSIGN_OR_RETURN(const Manifest manifest,
                               ReadManifest(fs, folder, store.manifest.id, store.manifest.digest,
                                            store.record_layout()));
      for (const Manifest::File& file : manifest.files) {
        const bool is_new = seen.insert(JoinPath(folder, ParameterFileName(file.id))).second;
        if (is_new && counts) (*tables)[store.table].checkpoint_only_bytes += file.bytes;
      }
    }
    return OkStatus();
  };
  TERRACE_RETURN_IF_ERROR(add(reader->checkpoint(), false));
  for (const std::uint64_t id : ids) {
    if (id >= reader->checkpoint().id) continue;
    const Result<Checkpoint> older = reader->folder()->ReadCheckpoint(id);
    const Status status = older.ok() ? add(*older, true) : older.status();
    // A trainer may have dropped it meanwhile.
    if (!status.ok() && status.code() != StatusCode::kNotFound) return status;
  }
  return OkStatus();
}

// Of all disks that hold something of the run.
Json Drives(RunReader* reader) {
  std::vector<std::string> folders = {reader->folder()->path()};
  for (const Checkpoint::StoreManifest& store : reader->checkpoint().stores) {
    folders.push_back(reader->folder()->ResolveDirectory(store.directory));
  }
  Json all = Json::array();
  for (const DriveHealth& drive : DrivesOf(folders)) {
    all.push_back(Json::parse(DriveToJson(drive)));
  }
  return all;
}

std::string DriveText(const Json& drive) {
  const std::string model = drive["model"].get<std::string>();
  const std::string name =
      drive["device"].get<std::string>() + (model.empty() ? "" : " (" + model + ")");
  if (drive.contains("unknown")) {
    return fmt::format("  drive {}: says nothing of its wear, {}\n", name,
                       drive["unknown"].get<std::string>());
  }
  return fmt::format(
      "  drive {}: {} % of its life used, {:.4g} TB written in it, {} % spare left\n", name,
      drive["percentage_used"].dump(), drive["written_bytes"].get<double>() * 1e-12,
      drive["available_spare_percent"].dump());
}

Result<Json> Overview(FileSystem* fs, RunReader* reader) {
  const Checkpoint& checkpoint = reader->checkpoint();
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> ids,
                           reader->folder()->ListCheckpoints());
  std::map<std::string, TableView> views;
  TERRACE_RETURN_IF_ERROR(ViewTables(reader, &views));
  TERRACE_RETURN_IF_ERROR(ViewOlder(fs, reader, ids, &views));
  TERRACE_ASSIGN_OR_RETURN(const SsdWear wear, SsdWearOf(checkpoint.trainer_state));
  Json tables = Json::array();
  for (const auto& [name, view] : views) {
    tables.push_back({{"name", name},
                      {"rows", view.rows},
                      {"row_bytes", view.row_bytes},
                      {"shards", view.shards},
                      {"files", view.files},
                      {"live_bytes", view.live_bytes},
                      {"stale_bytes", view.stale_bytes},
                      {"disk_bytes", view.disk_bytes},
                      {"checkpoint_only_bytes", view.checkpoint_only_bytes}});
  }
  std::uint64_t dense_bytes = 0;
  for (const FileDigest& digest : checkpoint.dense) dense_bytes += digest.size;
  Json settings = Json::object();
  for (const auto& [path, value] : checkpoint.identity) settings[path] = value;
  return Json{{"format_version", kResultVersion},
              {"run", reader->folder()->path()},
              {"checkpoint", checkpoint.id},
              {"checkpoints", ids},
              {"finished", checkpoint.finished},
              {"epoch", checkpoint.cursor.epoch},
              {"example_in_epoch", checkpoint.cursor.example_in_epoch},
              {"examples", checkpoint.cursor.examples},
              {"steps", checkpoint.steps},
              {"tables", tables},
              {"ssd",
               {{"run", Json::parse(SsdWearToJson(wear))},
                {"rated_write_bytes", reader->job().ssd.rated_write_bytes},
                {"drives", Drives(reader)}}},
              {"dense_bytes", dense_bytes},
              {"settings", settings},
              {"job", checkpoint.job_yaml}};
}

std::string OverviewText(const Json& view) {
  std::string text =
      fmt::format("{}: {} at checkpoint {} (kept: {})\n", view["run"].get<std::string>(),
                  view["finished"].get<bool>() ? "finished" : "not finished",
                  view["checkpoint"].dump(), view["checkpoints"].dump());
  text += fmt::format("  {} examples, {} mini-batches, epoch {}\n",
                      FormatCount(view["examples"].get<std::uint64_t>()),
                      FormatCount(view["steps"].get<std::uint64_t>()), view["epoch"].dump());
  for (const Json& table : view["tables"]) {
    text += fmt::format(
        "  table {}: {} rows of {} bytes in {} shards, {} live, {} stale, {} on disk, "
        "{} more for older checkpoints\n",
        table["name"].get<std::string>(), FormatCount(table["rows"].get<std::uint64_t>()),
        table["row_bytes"].dump(), table["shards"].dump(),
        FormatBytes(table["live_bytes"].get<std::uint64_t>()),
        FormatBytes(table["stale_bytes"].get<std::uint64_t>()),
        FormatBytes(table["disk_bytes"].get<std::uint64_t>()),
        FormatBytes(table["checkpoint_only_bytes"].get<std::uint64_t>()));
  }
  const SsdWear wear = SsdWearOf(Json{{"ssd", view["ssd"]["run"]}}.dump()).value();
  text += fmt::format("  SSD: {}\n",
                      SsdWearText(wear, view["ssd"]["rated_write_bytes"].get<std::uint64_t>()));
  for (const Json& drive : view["ssd"]["drives"]) text += DriveText(drive);
  text += fmt::format("  network: {}\n", FormatBytes(view["dense_bytes"].get<std::uint64_t>()));
  text += "  settings that identify the model:\n";
  std::string last_value;
  int alike = 0;  // Slots in a row that say the same are told once.
  for (const auto& [path, value] : view["settings"].items()) {
    std::string shown = value.get<std::string>();
    while (!shown.empty() && shown.back() == '\n') shown.pop_back();
    const bool repeats = path.starts_with("slots.") && shown == last_value;
    last_value = shown;
    if (repeats) {
      ++alike;
      continue;
    }
    if (alike > 0) text += fmt::format("    ... and {} slots alike\n", alike);
    alike = 0;
    for (std::size_t at = 0; (at = shown.find('\n', at)) != std::string::npos; at += 9) {
      shown.replace(at, 1, "\n        ");
    }
    text += fmt::format("    {}: {}\n", path, shown);
  }
  return text;
}

std::string RowsText(const Json& rows) {
  std::string text;
  for (const Json& row : rows) {
    text += fmt::format("table {} key {} (0x{:016x})\n", row["table"].get<std::string>(),
                        row["key"].dump(), row["key"].get<std::uint64_t>());
    for (const auto& [name, value] : row["fields"].items()) {
      text += fmt::format("  {:<24}{}\n", name, value.dump());
    }
  }
  return text;
}

// One inspection: what was asked for, collected as JSON and as text side by side.
struct Report {
  Json json = {{"format_version", kResultVersion}};
  std::string text;
  std::optional<DenseView> dense;  // Too large to be held as either; comes last.
  bool wrong = false;
};

Status InspectRows(const InspectArguments& arguments, RunReader* reader, Report* report) {
  TERRACE_ASSIGN_OR_RETURN(const DataSchema schema, SchemaOf(reader->job().train_data));
  std::vector<Key> keys;
  for (const std::string& text : arguments.keys) {
    TERRACE_ASSIGN_OR_RETURN(const Key key, ParseKey(text, schema));
    keys.push_back(key);
  }
  Json rows = Json::array();
  TERRACE_RETURN_IF_ERROR(arguments.initial ? InitialRows(reader, keys, &rows)
                                            : ReadRows(reader, keys, &rows));
  report->json["rows"] = rows;
  report->text += RowsText(rows);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    bool found = false;
    for (const Json& row : rows) found = found || row["key"].get<Key>() == keys[i];
    if (!found) report->text += fmt::format("no table has key {}\n", arguments.keys[i]);
  }
  return OkStatus();
}

Status InspectFindings(FileSystem* fs, const std::string& run, Report* report) {
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<RunFolder> folder,
                           RunFolder::Open(fs, run, RunFolder::Mode::kScrub, nullptr));
  TERRACE_ASSIGN_OR_RETURN(const RunScrub scrub,
                           ScrubRun(fs, folder.get(), /*hold_checkpoints=*/true));
  const std::vector<Finding> findings = scrub.Findings();
  report->json["findings"] = FindingsJson(findings);
  report->wrong = !findings.empty();
  if (report->wrong) {
    report->text += FindingsText(findings);
    report->text +=
        scrub.refused.ok()
            ? fmt::format("what can be done: terrace inspect {} --repair\n", ShellWord(run))
            : fmt::format(
                  "this is no damage, and no repair begins before it is out of the way: {}\n",
                  scrub.refused.message());
  } else {
    report->text += fmt::format(
        "every byte of {} checkpoints, {} of rows and the metrics is as it was written\n",
        scrub.checkpoints.size(), FormatBytes(scrub.bytes_read));
  }
  return OkStatus();
}

Status InspectCheckpoint(FileSystem* fs, const InspectArguments& arguments, RunReader* reader,
                         Report* report) {
  const bool part = arguments.digest || arguments.dense || !arguments.keys.empty();
  if (!part) {
    TERRACE_ASSIGN_OR_RETURN(report->json, Overview(fs, reader));
    report->text = OverviewText(report->json);
  }
  if (arguments.digest) {
    TERRACE_ASSIGN_OR_RETURN(const std::string digest, DigestOf(reader));
    report->json["digest"] = digest;
    report->text += digest + "\n";
  }
  if (!arguments.keys.empty()) {
    TERRACE_RETURN_IF_ERROR(InspectRows(arguments, reader, report));
  }
  if (arguments.dense) {
    TERRACE_ASSIGN_OR_RETURN(report->dense, ViewDense(reader, arguments.initial));
  }
  return OkStatus();
}

Status Inspect(FileSystem* fs, const InspectArguments& arguments, Report* report) {
  // By itself: a damaged run may have nothing else to show.
  if (arguments.verify) {
    TERRACE_RETURN_IF_ERROR(InspectFindings(fs, arguments.run, report));
    if (!arguments.digest && !arguments.dense && arguments.keys.empty()) return OkStatus();
  }
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<RunReader> reader,
                           RunReader::Open(fs, arguments.run));
  return MissingIsDamage(InspectCheckpoint(fs, arguments, reader.get(), report));
}

int Print(const Report& report, bool json) {
  std::string text = json ? Dump(report.json, 1) : report.text;
  if (!report.dense) return PrintResult(text);
  constexpr std::string_view kEnd = "\n}\n";  // Of an object that has a member.
  if (json) {
    TERRACE_CHECK(text.ends_with(kEnd));
    text.resize(text.size() - kEnd.size());
    text += ",\n \"dense\": ";
  }
  ResultStream out;
  out.Add(text);
  WriteDense(*report.dense, /*lines=*/json, &out);
  out.Add(json ? kEnd : "\n");
  return out.Flush();
}

}  // namespace

std::string FindingsText(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) {
    text += fmt::format("{} at byte {}: {}\n", finding.file, finding.offset, finding.what);
  }
  return text + fmt::format("{} findings\n", findings.size());
}

nlohmann::ordered_json FindingsJson(const std::vector<Finding>& findings) {
  Json list = Json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"file", finding.file}, {"offset", finding.offset}, {"what", finding.what}});
  }
  return list;
}

int InspectCommand(FileSystem* fs, const InspectArguments& arguments) {
  if (arguments.initial && arguments.keys.empty() && !arguments.dense) {
    return ReportFailure(InvalidArgumentError("--initial goes with --key or --dense"));
  }
  if (arguments.repair) return RepairCommand(fs, arguments);
  Report report;
  const Status status = Inspect(fs, arguments, &report);
  if (!status.ok()) {
    if (report.wrong) (void)Print(report, arguments.json);  // What was found by then.
    return ReportFailureOfRun(fs, status, arguments.run);
  }
  const int printed = Print(report, arguments.json);
  return printed == kExitDone && report.wrong ? kExitFailed : printed;
}

}  // namespace terrace
