#include "terrace/train/run_reader.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <sstream>

#include <fmt/format.h>
#include <xxhash.h>

#include "terrace/base/clock.h"
#include "terrace/base/rng.h"

namespace terrace {
namespace {

Uint128 Wide(XXH128_hash_t hash) { return (static_cast<Uint128>(hash.high64) << 64) | hash.low64; }

// What the rows of one table come to.
struct TableSum {
  Uint128 sum = 0;
  std::uint64_t rows = 0;
  std::string schema;
};

// A hash over named parts, each with its length, so that no two lists of parts look alike.
class PartHash {
 public:
  void Add(std::string_view name, std::string_view bytes) {
    Append(name);
    Append(bytes);
  }
  void Add(std::string_view name, std::uint64_t value) {
    Add(name, std::string_view(reinterpret_cast<const char*>(&value), sizeof(value)));
  }
  std::string Hex() const {
    const XXH128_hash_t hash = XXH3_128bits(bytes_.data(), bytes_.size());
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
  }

 private:
  void Append(std::string_view bytes) {
    // A long part goes in as its own hash: nothing is held twice.
    const std::uint64_t size = bytes.size();
    const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
    bytes_.append(reinterpret_cast<const char*>(&size), sizeof(size));
    bytes_.append(reinterpret_cast<const char*>(&hash.low64), sizeof(hash.low64));
    bytes_.append(reinterpret_cast<const char*>(&hash.high64), sizeof(hash.high64));
  }
  std::string bytes_;
};

Status SumRows(RunReader* reader, const Checkpoint::StoreManifest& manifest, TableSum* table) {
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store, reader->OpenStore(manifest));
  TERRACE_ASSIGN_OR_RETURN(const ExpiryRule expiry, ExpiryOfSchemaText(manifest.schema));
  const std::uint64_t position = reader->checkpoint().cursor.examples;
  const std::uint64_t seed = XXH3_64bits(manifest.table.data(), manifest.table.size());
  std::string bytes(sizeof(Key) + manifest.row_bytes, '\0');
  return store->ForEachRow(reader->buffer_bytes(), [&](const RowView& row) {
    if (!CountsAt(expiry, row.row, position)) return OkStatus();
    std::memcpy(bytes.data(), &row.key, sizeof(Key));
    std::memcpy(bytes.data() + sizeof(Key), row.row.data(), row.row.size());
    // Sums know no order: rows may lie in any shard and file.
    table->sum += Wide(XXH3_128bits_withSeed(bytes.data(), bytes.size(), seed));
    ++table->rows;
    return OkStatus();
  });
}

}  // namespace

Result<std::unique_ptr<RunReader>> RunReader::Open(FileSystem* fs, const std::string& run) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<RunFolder> folder,
                           RunFolder::Open(fs, run, RunFolder::Mode::kRead, nullptr));
  TERRACE_ASSIGN_OR_RETURN(HeldCheckpoint held, HoldNewestCheckpoint(folder.get()));
  Result<Job> job = ParseJob(held.checkpoint.job_yaml, "the checkpoint's job", {});
  if (!job.ok()) {
    return CorruptionError(
        fmt::format("checkpoint {} of '{}': {}", held.checkpoint.id, run, job.status().message()));
  }
  return std::unique_ptr<RunReader>(
      new RunReader(fs, std::move(folder), std::move(held), std::move(job).value()));
}

std::uint64_t RunReader::buffer_bytes() const {
  // Larger buffers than this gain nothing: reads are sequential.
  constexpr std::uint64_t kEnough = std::uint64_t{64} << 20;
  return std::clamp<std::uint64_t>(job_.memory.budget_bytes / 16, std::uint64_t{1} << 20, kEnough);
}

Result<std::unique_ptr<Store>> RunReader::OpenStore(const Checkpoint::StoreManifest& store) {
  StoreOptions options;
  options.directory = folder_->ResolveDirectory(store.directory);
  options.table = store.table;
  options.shard = store.shard;
  options.row_bytes = store.row_bytes;
  // An opened store's filters know nothing yet, and few keys are asked for, if any.
  options.group.filter_bits = 0;
  options.direct_io = job_.ssd.direct;
  options.read_queue.backend = job_.ssd.backend;
  options.read_queue.threads = job_.ssd.io_threads;
  options.io_buffer_bytes = std::min<std::uint64_t>(options.io_buffer_bytes, buffer_bytes());
  options.background_compaction = false;
  options.read_only = true;
  Result<std::unique_ptr<Store>> opened =
      Store::Open(fs_, Clock::Real(), &quota_, options, store.manifest, {&store.manifest, 1});
  if (!opened.ok()) {
    return opened.status().WithContext(
        fmt::format("opening table {} shard {}", store.table, store.shard));
  }
  return opened;
}

Status MissingIsDamage(const Status& status) {
  return status.code() == StatusCode::kNotFound ? CorruptionError(status.message()) : status;
}

Result<std::vector<RowField>> FieldsOfSchemaText(const std::string& text) {
  std::vector<RowField> fields;
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string kind;
    std::string offset_word;
    std::string count_word;
    std::string type;
    RowField field;
    if (!(words >> kind) || kind != "field") continue;
    words >> field.name >> offset_word >> field.offset >> count_word >> field.count >> type;
    if (!words || offset_word != "offset" || count_word != "count" ||
        (type != "float32" && type != "uint64")) {
      return CorruptionError(fmt::format("a schema has the line '{}', which is no field", line));
    }
    field.type = type == "uint64" ? StorageType::kUint64 : StorageType::kFloat32;
    fields.push_back(std::move(field));
  }
  if (fields.empty()) return CorruptionError("a schema names no field");
  return fields;
}

Result<AdmissionSpec> AdmissionOfSchemaText(const std::string& text) {
  AdmissionSpec admission;
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string kind, after, filter;
    if (!(words >> kind) || kind != "admission") continue;
    words >> after >> admission.after >> filter >> admission.filter_bytes;
    if (!words || after != "after" || filter != "filter" || !admission.on() ||
        admission.after > kMaxAdmitAfter || admission.filter_bytes < kLeastAdmitFilterBytes) {
      return CorruptionError(
          fmt::format("a schema has the line '{}', which is no admission", line));
    }
  }
  return admission;
}

Result<ExpiryRule> ExpiryOfSchemaText(const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  ExpiryRule rule;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string kind, every, after, below, show, click, decay;
    ExpirySpec spec;
    if (!(words >> kind) || kind != "expiry") continue;
    words >> every >> spec.every_examples >> after >> spec.after >> below >> spec.below >> show >>
        spec.show_weight >> click >> spec.click_weight >> decay >> spec.decay;
    if (!words || every != "every" || after != "after" || below != "below" ||
        show != "show_weight" || click != "click_weight" || decay != "decay" ||
        !CheckExpiry(spec).ok()) {
      return CorruptionError(fmt::format("a schema has the line '{}', which is no expiry", line));
    }
    rule = ExpiryRule(spec);
  }
  return rule;
}

Result<std::uint64_t> CountRowsAt(Store* store, const ExpiryRule& expiry, std::uint64_t position,
                                  std::uint64_t buffer_bytes) {
  if (!expiry.on()) return store->stats().live_rows;
  std::uint64_t rows = 0;
  TERRACE_RETURN_IF_ERROR(store->ForEachRow(buffer_bytes, [&](const RowView& row) {
    rows += CountsAt(expiry, row.row, position) ? 1 : 0;
    return OkStatus();
  }));
  return rows;
}

Result<std::unique_ptr<AdmissionFilter>> ReadAdmissionFilter(RunFolder* folder,
                                                             const Checkpoint& checkpoint,
                                                             const std::string& table,
                                                             const std::string& schema) {
  TERRACE_ASSIGN_OR_RETURN(const AdmissionSpec spec, AdmissionOfSchemaText(schema));
  if (!spec.on()) return std::unique_ptr<AdmissionFilter>();
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<AdmissionFilter> filter,
                           AdmissionFilter::Create(table, spec));
  TERRACE_RETURN_IF_ERROR(folder->ReadFilter(checkpoint, table, filter.get()));
  return filter;
}

Result<std::string> DigestOf(RunReader* reader) {
  const Checkpoint& checkpoint = reader->checkpoint();
  std::map<std::string, TableSum> tables;  // By name: the order of stores is the disks' matter.
  for (const Checkpoint::StoreManifest& manifest : checkpoint.stores) {
    TableSum& table = tables[manifest.table];
    table.schema = manifest.schema;
    TERRACE_RETURN_IF_ERROR(SumRows(reader, manifest, &table));
  }
  PartHash hash;
  hash.Add("terrace digest", 1);
  for (const auto& [name, table] : tables) {
    hash.Add("table", name);
    hash.Add("schema", table.schema);
    hash.Add("rows", table.rows);
    hash.Add("sum low", static_cast<std::uint64_t>(table.sum));
    hash.Add("sum high", static_cast<std::uint64_t>(table.sum >> 64));
    TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<AdmissionFilter> filter,
                             ReadAdmissionFilter(reader->folder(), checkpoint, name, table.schema));
    if (filter == nullptr) continue;
    hash.Add("admission", std::string_view(reinterpret_cast<const char*>(filter->cells().data()),
                                           filter->cells().size()));
  }
  TERRACE_ASSIGN_OR_RETURN(const DenseState dense, reader->folder()->ReadDense(checkpoint));
  hash.Add("network", checkpoint.dense_network);
  hash.Add("optimizer steps", dense.steps);
  for (std::size_t i = 0; i < dense.names.size(); ++i) {
    hash.Add(dense.names[i],
             std::string_view(reinterpret_cast<const char*>(dense.buffers[i].data()),
                              dense.buffers[i].size() * sizeof(float)));
  }
  hash.Add("steps", checkpoint.steps);
  hash.Add("epoch", checkpoint.cursor.epoch);
  hash.Add("example in epoch", checkpoint.cursor.example_in_epoch);
  hash.Add("examples", checkpoint.cursor.examples);
  hash.Add("progressive", checkpoint.progressive);
  return hash.Hex();
}

}  // namespace terrace
