// The payloads of checkpoint and dense files (docs/formats/checkpoint.md), and the comparison of
// settings.
#include "terrace/train/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <sstream>

#include <fmt/format.h>

#include "terrace/base/log.h"
#include "terrace/store/group_block.h"
#include "terrace/train/json_fields.h"

namespace terrace {
namespace {

// How a store by group says so; one by key says nothing.
constexpr const char* kGroupIndexName = "group";

using nlohmann::json;

std::string HexText(std::uint64_t value) { return fmt::format("{:016x}", value); }

json DigestJson(const FileDigest& digest) {
  return {{"size", digest.size}, {"checksum", HexText(digest.checksum)}};
}

void ReadHex(JsonFields* fields, const char* name, std::uint64_t* value) {
  std::string text;
  fields->Read(name, &text);
  if (!fields->status().ok()) return;
  const char* end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data(), end, *value, 16);
  if (error != std::errc() || rest != end || text.size() != 16) {
    fields->Fail(name, "16 hexadecimal digits");
  }
}

Status ReadDigest(const json& object, FileDigest* digest) {
  JsonFields fields(object);
  fields.Read("size", &digest->size);
  ReadHex(&fields, "checksum", &digest->checksum);
  return fields.status();
}

json CursorJson(const DataCursor& cursor) {
  return {{"epoch", cursor.epoch},       {"example_in_epoch", cursor.example_in_epoch},
          {"examples", cursor.examples}, {"hint_example", cursor.hint_example},
          {"file", cursor.file},         {"offset", cursor.offset},
          {"line", cursor.line},         {"bad_lines", cursor.bad_lines}};
}

Status ReadCursor(const json& object, DataCursor* cursor) {
  JsonFields fields(object);
  fields.Read("epoch", &cursor->epoch);
  fields.Read("example_in_epoch", &cursor->example_in_epoch);
  fields.Read("examples", &cursor->examples);
  fields.Read("hint_example", &cursor->hint_example);
  fields.Read("file", &cursor->file);
  fields.Read("offset", &cursor->offset);
  fields.Read("line", &cursor->line);
  fields.Read("bad_lines", &cursor->bad_lines);
  return fields.status();
}

Status ReadStore(const json& object, Checkpoint::StoreManifest* store) {
  JsonFields fields(object);
  fields.Read("table", &store->table);
  fields.Read("shard", &store->shard);
  fields.Read("row_bytes", &store->row_bytes);
  if (object.contains("index")) {
    std::string index;
    fields.Read("index", &index);
    if (index != kGroupIndexName || store->row_bytes == 0 ||
        !Store::HasGroupIndex(store->row_bytes)) {
      return CorruptionError("field 'index' is not of a store by group");
    }
    store->index = IndexKind::kGroup;
  }
  if (object.contains("block_bytes")) {
    GroupShape shape;
    fields.Read("block_bytes", &shape.block_bytes);
    if (store->index != IndexKind::kGroup || shape.block_bytes == 0 ||
        shape.block_bytes > GroupShape::kMostBlockBytes || shape.block_bytes % kBlockBytes != 0 ||
        !Store::CheckGroups(store->row_bytes, shape).ok()) {
      return CorruptionError("field 'block_bytes' is not of a store by group");
    }
    store->block_bytes = shape.block_bytes;
  }
  fields.Read("directory", &store->directory);
  fields.Read("schema", &store->schema);
  fields.Read("manifest", &store->manifest.id);
  const json& digest = fields.Object("manifest_digest");
  TERRACE_RETURN_IF_ERROR(fields.status());
  return ReadDigest(digest, &store->manifest.digest);
}

json CheckpointJson(const Checkpoint& checkpoint) {
  json stores = json::array();
  for (const Checkpoint::StoreManifest& store : checkpoint.stores) {
    stores.push_back({{"table", store.table},
                      {"shard", store.shard},
                      {"row_bytes", store.row_bytes},
                      {"directory", store.directory},
                      {"schema", store.schema},
                      {"manifest", store.manifest.id},
                      {"manifest_digest", DigestJson(store.manifest.digest)}});
    if (store.index == IndexKind::kGroup) stores.back()["index"] = kGroupIndexName;
    if (store.block_bytes > 0) stores.back()["block_bytes"] = store.block_bytes;
  }
  json dense = json::array();
  for (const FileDigest& digest : checkpoint.dense) dense.push_back(DigestJson(digest));
  json identity = json::array();
  for (const auto& [path, value] : checkpoint.identity) identity.push_back({path, value});
  json object = {{"format_version", CheckpointVersionOf(checkpoint)},
                 {"id", checkpoint.id},
                 {"cursor", CursorJson(checkpoint.cursor)},
                 {"steps", checkpoint.steps},
                 {"finished", checkpoint.finished},
                 {"stores", stores},
                 {"dense", dense},
                 {"metrics_bytes", checkpoint.metrics_bytes},
                 {"progressive_bytes", checkpoint.progressive.size()},
                 {"window_bytes", checkpoint.window.size()},
                 {"trainer_state", checkpoint.trainer_state},
                 {"dense_network", checkpoint.dense_network},
                 {"identity", identity},
                 {"job_yaml", checkpoint.job_yaml}};
  if (checkpoint.metrics_checksum) {
    object["metrics_checksum"] = HexText(*checkpoint.metrics_checksum);
  }
  if (CheckpointVersionOf(checkpoint) >= 2) object["admission"] = json::array();
  for (const Checkpoint::FilterFile& filter : checkpoint.admission) {
    object["admission"].push_back({{"table", filter.table}, {"file", DigestJson(filter.digest)}});
  }
  return object;
}

Status ReadLists(JsonFields* fields, Checkpoint* checkpoint) {
  for (const json& item : fields->Array("stores")) {
    Checkpoint::StoreManifest store;
    TERRACE_RETURN_IF_ERROR(ReadStore(item, &store));
    checkpoint->stores.push_back(std::move(store));
  }
  for (const json& item : fields->Array("dense")) {
    FileDigest digest;
    TERRACE_RETURN_IF_ERROR(ReadDigest(item, &digest));
    checkpoint->dense.push_back(digest);
  }
  for (const json& item : fields->Array("identity")) {
    if (!item.is_array() || item.size() != 2 || !item[0].is_string() || !item[1].is_string()) {
      return CorruptionError("field 'identity' is not a list of pairs");
    }
    checkpoint->identity.emplace_back(item[0].get<std::string>(), item[1].get<std::string>());
  }
  return fields->status();
}

Status ReadFilters(JsonFields* fields, Checkpoint* checkpoint) {
  for (const json& item : fields->Array("admission")) {
    JsonFields entry(item);
    Checkpoint::FilterFile filter;
    entry.Read("table", &filter.table);
    const json& digest = entry.Object("file");
    TERRACE_RETURN_IF_ERROR(entry.status());
    TERRACE_RETURN_IF_ERROR(ReadDigest(digest, &filter.digest));
    checkpoint->admission.push_back(std::move(filter));
  }
  return fields->status();
}

template <typename T>
void Append(std::string* bytes, T value) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Takes values from the front of bytes that may end anywhere.
class Cutter {
 public:
  explicit Cutter(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  bool Take(T* value) {
    if (bytes_.size() < sizeof(T)) return false;
    std::memcpy(value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
    return true;
  }
  bool Take(std::uint64_t size, std::string_view* value) {
    if (bytes_.size() < size) return false;
    *value = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return true;
  }
  bool empty() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

// The lines of a text that are others in another one, or not there; all of two short ones.
std::string Difference(const std::string& text, const std::string& other) {
  const auto is_short = [](const std::string& one) {
    return one.find('\n') == std::string::npos && one.size() <= 200;
  };
  if (is_short(text) && is_short(other)) return text;
  std::istringstream lines(text);
  std::istringstream others(other);
  std::string line;
  std::string other_line;
  std::string result;
  int shown = 0;
  while (std::getline(lines, line)) {
    const bool same = std::getline(others, other_line) && line == other_line;
    if (same || ++shown > 3) continue;
    result += (result.empty() ? "" : " / ") + line.substr(0, 300);
  }
  if (shown > 3) result += fmt::format(" / ... ({} lines differ)", shown);
  return result.empty() ? "(nothing more)" : result;
}

using Settings = std::vector<std::pair<std::string, std::string>>;

// ExampleSource::IdentityText of a run: how the examples are read, and from which files.
struct DataIdentity {
  std::string order;
  std::string files;  // A line each: path:size.
  std::size_t count = 0;
};

DataIdentity SplitDataIdentity(const std::string& text) {
  DataIdentity identity;
  const std::size_t at = text.find(kFilesInIdentity);
  identity.order = text.substr(0, at);
  if (at == std::string::npos) return identity;
  const std::string list = text.substr(std::min(at + kFilesInIdentity.size() + 1, text.size()));
  identity.files = list;
  for (std::size_t i = 0; i <= list.size() && !list.empty(); ++i) {
    if (i < list.size() && list[i] != ' ') continue;
    // A space within a path does not follow a size.
    const std::size_t digits = list.find_last_not_of("0123456789", i == 0 ? 0 : i - 1);
    if (i == 0 || digits == std::string::npos || digits + 1 == i || list[digits] != ':') continue;
    ++identity.count;
    if (i < list.size()) identity.files[i] = '\n';
  }
  return identity;
}

DataIdentity DataIdentityOf(const Settings& settings) {
  for (const auto& [path, value] : settings) {
    if (path == kDataSetting) return SplitDataIdentity(value);
  }
  return {};
}

}  // namespace

std::size_t FilesOfIdentity(const Settings& settings) { return DataIdentityOf(settings).count; }

bool FilesDiffer(const Settings& run, const Settings& now) {
  return DataIdentityOf(run).files != DataIdentityOf(now).files;
}

RecordLayout Checkpoint::StoreManifest::record_layout() const {
  return RecordLayout::Of(table, shard, RecordRowBytes(index, row_bytes, block_bytes));
}

std::string CheckpointFileName(std::uint64_t id) { return fmt::format("checkpoint-{:08}", id); }

std::uint32_t CheckpointVersionOf(const Checkpoint& checkpoint) {
  for (const Checkpoint::StoreManifest& store : checkpoint.stores) {
    if (store.block_bytes > 0) return 5;
  }
  if (checkpoint.metrics_checksum) return 4;
  for (const Checkpoint::StoreManifest& store : checkpoint.stores) {
    if (store.index == IndexKind::kGroup) return 3;
  }
  return checkpoint.admission.empty() ? 1 : 2;
}

Status CheckUtf8(std::string_view what, const std::string& text) {
  try {
    (void)json(text).dump();
    return OkStatus();
  } catch (const json::exception&) {
    return InvalidArgumentError(
        fmt::format("{}: {} is no UTF-8 text, and could stand in no checkpoint: rename it", what,
                    json(text).dump(-1, ' ', false, json::error_handler_t::replace)));
  }
}

Result<std::string> EncodeCheckpoint(const Checkpoint& checkpoint) {
  std::string text;
  try {
    text = CheckpointJson(checkpoint).dump(1);
  } catch (const json::exception& error) {
    return InvalidArgumentError(
        fmt::format("a path or name of the run is no UTF-8 text: {}", error.what()));
  }
  std::string payload;
  Append(&payload, static_cast<std::uint64_t>(text.size()));
  return payload + text + checkpoint.progressive + checkpoint.window;
}

Result<Checkpoint> DecodeCheckpoint(const std::string& payload) {
  Cutter cutter(payload);
  std::uint64_t text_bytes = 0;
  std::string_view text;
  if (!cutter.Take(&text_bytes) || !cutter.Take(text_bytes, &text)) {
    return CorruptionError("the description is cut off");
  }
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) return CorruptionError("the description is not JSON");
  Checkpoint checkpoint;
  JsonFields fields(object);
  std::uint32_t version = 0;
  std::uint64_t progressive_bytes = 0;
  std::uint64_t window_bytes = 0;
  fields.Read("format_version", &version);
  fields.Read("id", &checkpoint.id);
  fields.Read("steps", &checkpoint.steps);
  fields.Read("finished", &checkpoint.finished);
  fields.Read("metrics_bytes", &checkpoint.metrics_bytes);
  fields.Read("progressive_bytes", &progressive_bytes);
  fields.Read("window_bytes", &window_bytes);
  fields.Read("trainer_state", &checkpoint.trainer_state);
  fields.Read("dense_network", &checkpoint.dense_network);
  fields.Read("job_yaml", &checkpoint.job_yaml);
  const json& cursor = fields.Object("cursor");
  TERRACE_RETURN_IF_ERROR(fields.status());
  if (version < 1 || version > kCheckpointVersion) {
    return CorruptionError(
        fmt::format("field 'format_version' is not 1 to {}", kCheckpointVersion));
  }
  TERRACE_RETURN_IF_ERROR(ReadCursor(cursor, &checkpoint.cursor));
  TERRACE_RETURN_IF_ERROR(ReadLists(&fields, &checkpoint));
  if (version >= 2) TERRACE_RETURN_IF_ERROR(ReadFilters(&fields, &checkpoint));
  if (version >= 4) {
    ReadHex(&fields, "metrics_checksum", &checkpoint.metrics_checksum.emplace());
    TERRACE_RETURN_IF_ERROR(fields.status());
  }
  std::string_view progressive;
  std::string_view window;
  if (!cutter.Take(progressive_bytes, &progressive) || !cutter.Take(window_bytes, &window) ||
      !cutter.empty()) {
    return CorruptionError("the metrics' state has another length than the description says");
  }
  checkpoint.progressive = progressive;
  checkpoint.window = window;
  return checkpoint;
}

std::string EncodeDense(const DenseState& state, std::size_t room) {
  TERRACE_CHECK(state.names.size() == state.buffers.size());
  std::size_t bytes = room + 2 * sizeof(std::uint64_t);
  for (std::size_t i = 0; i < state.names.size(); ++i) {
    bytes +=
        2 * sizeof(std::uint64_t) + state.names[i].size() + state.buffers[i].size() * sizeof(float);
  }
  std::string payload;
  payload.reserve(bytes);  // A large network's is to be held once, not in the doubles of a string.
  payload.resize(room);
  Append(&payload, state.steps);
  Append(&payload, static_cast<std::uint64_t>(state.names.size()));
  for (std::size_t i = 0; i < state.names.size(); ++i) {
    Append(&payload, static_cast<std::uint64_t>(state.names[i].size()));
    payload += state.names[i];
    Append(&payload, static_cast<std::uint64_t>(state.buffers[i].size()));
    payload.append(reinterpret_cast<const char*>(state.buffers[i].data()),
                   state.buffers[i].size() * sizeof(float));
  }
  return payload;
}

Result<DenseState> DecodeDense(const std::string& payload) {
  const Status cut = CorruptionError("the dense state is cut off");
  Cutter cutter(payload);
  DenseState state;
  std::uint64_t buffers = 0;
  if (!cutter.Take(&state.steps) || !cutter.Take(&buffers)) return cut;
  for (std::uint64_t i = 0; i < buffers; ++i) {
    std::uint64_t name_bytes = 0;
    std::uint64_t floats = 0;
    std::string_view name;
    std::string_view data;
    if (!cutter.Take(&name_bytes) || !cutter.Take(name_bytes, &name) || !cutter.Take(&floats) ||
        floats > payload.size() || !cutter.Take(floats * sizeof(float), &data)) {
      return cut;
    }
    state.names.emplace_back(name);
    state.buffers.emplace_back(floats);
    if (floats > 0) std::memcpy(state.buffers.back().data(), data.data(), data.size());
  }
  if (!cutter.empty()) return CorruptionError("the dense state has bytes too many");
  return state;
}

Status CompareIdentity(const std::vector<std::pair<std::string, std::string>>& run,
                       const std::vector<std::pair<std::string, std::string>>& now,
                       const std::vector<std::string>& accept) {
  // Other files that are read in the same way are a difference of their own.
  const DataIdentity run_data = DataIdentityOf(run), data = DataIdentityOf(now);
  const bool only_files = run_data.order == data.order && run_data.count > 0 && data.count > 0;
  const std::map<std::string, std::string> before(run.begin(), run.end());
  const std::map<std::string, std::string> after(now.begin(), now.end());
  std::string problems;
  bool rounding = false, files = false;
  const auto accepts = [&](std::string_view name) {
    return std::find(accept.begin(), accept.end(), name) != accept.end();
  };
  const auto differ = [&](const std::string& path, const std::string& old_value,
                          const std::string& new_value) {
    const std::string name = path == "training.threads" ? "threads" : path;
    if (path == kDataSetting && only_files) {
      const std::string text = fmt::format("data files: the run has '{}', the job now '{}'",
                                           Difference(run_data.files, data.files),
                                           Difference(data.files, run_data.files));
      if (accepts("data")) {
        LogText(LogLevel::kWarning,
                text +
                    "; accepted: what the run has read of the old ones is taken to be the same in "
                    "the new ones, else the results are those of another log");
      } else {
        files = true;
        problems += "\n  " + text;
      }
      return;
    }
    const std::string text =
        fmt::format("{}: the run has '{}', the job now '{}'", path,
                    Difference(old_value, new_value), Difference(new_value, old_value));
    if ((name == "threads" || name == "processor") && accepts(name)) {
      LogText(LogLevel::kWarning, text +
                                      "; accepted, so the bits are no longer those of an "
                                      "undisturbed run");
      return;
    }
    rounding |= name == "threads" || name == "processor";
    problems += "\n  " + text;
  };
  for (const auto& [path, value] : run) {
    const auto found = after.find(path);
    if (found == after.end()) {
      differ(path, value, "(nothing)");
    } else if (found->second != value) {
      differ(path, value, found->second);
    }
  }
  for (const auto& [path, value] : now) {
    if (!before.contains(path)) differ(path, "(nothing)", value);
  }
  if (problems.empty()) return OkStatus();
  std::string advice = "put the old values back, or start anew with --overwrite or another output";
  if (rounding) {
    advice += "; --accept threads and --accept processor go on with another rounding";
  }
  if (files) {
    advice +=
        "; --accept data goes on with the files that the job names now, as after a log was moved, "
        "compressed or mended: the examples up to the run's position must be the same in the same "
        "order, else the results are those of another log";
  }
  return InvalidArgumentError("the settings identify another model than the run's:" + problems +
                              "\n" + advice);
}

}  // namespace terrace
