// flip_sweep: every byte of every file of a run, with one bit of it flipped (or each of its eight,
// one after another), is detected or does no harm: never does a wrong row come to light, and none
// gets lost in silence.
//
//   flip_sweep --run FOLDER [--seed S] [--bits one|all]
//
// The run is copied to memory and stays as it is. What is checked of a flipped byte is what reads
// that file, as far as it is cheap: of parameter files the scrub of that file, then the stores of
// all checkpoints that name it, row for row; of files with a frame the one function through which
// everything reads them. Of reports the scrub of the
// run. Of small files, and of a sample of all bytes: that scrub, and the digest as any reader sees
// it.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "terrace/base/clock.h"
#include "terrace/base/log.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/store/read_cost.h"
#include "terrace/store/scrub.h"
#include "terrace/store/store.h"
#include "terrace/train/run_reader.h"
#include "terrace/train/run_scrub.h"

namespace terrace {
namespace {

constexpr std::uint64_t kBufferBytes = 1;       // The least that a store takes.
constexpr std::uint64_t kMergeBytes = 1 << 16;  // Of rows in order.
// A file with a frame up to this is checked as a whole run at every byte, a longer one at one in so
// many.
constexpr std::size_t kSmallFile = 512;
constexpr std::uint64_t kSampled = 64;

// What people read, or nobody: no digest depends on these.
const std::set<std::string> kReports = {"LOCK", "job.yaml", "metrics.jsonl", "summary.json"};
// Of them, those without a check of all their bytes.
const std::set<std::string> kUnchecked = {"LOCK", "job.yaml", "summary.json"};

using Rows = std::map<Key, std::string>;

std::string Text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A file in memory, of which any bit may be flipped.
class CopiedFile {
 public:
  static Result<CopiedFile> Create(FileSystem* fs, const std::string& path,
                                   const std::string& bytes) {
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs->Open(path, OpenMode::kCreate));
    TERRACE_RETURN_IF_ERROR(file->WriteAt(0, std::as_bytes(std::span(bytes))));
    return CopiedFile(std::move(file), bytes);
  }
  const std::string& bytes() const { return bytes_; }
  Status Flip(std::size_t at, unsigned bit) { return Put(at, bytes_[at] ^ (1 << bit)); }
  Status Restore(std::size_t at) { return Put(at, bytes_[at]); }

 private:
  CopiedFile(std::unique_ptr<File> file, std::string bytes)
      : file_(std::move(file)), bytes_(std::move(bytes)) {}
  Status Put(std::size_t at, int value) {
    const auto byte = static_cast<std::byte>(value);
    return file_->WriteAt(at, {&byte, 1});
  }

  std::unique_ptr<File> file_;
  std::string bytes_;  // As they are in the run.
};

struct Arguments {
  std::string run;
  std::uint64_t seed = 1;
  bool all_bits = false;
};

// What a flip came to.
enum class Outcome { kDetected, kHarmless };

class Sweep {
 public:
  explicit Sweep(Arguments arguments) : arguments_(std::move(arguments)), rng_(arguments_.seed) {}

  // kInternal: a flip is neither detected nor harmless.
  Status Run();

 private:
  // One checkpoint's store, and what its rows are.
  struct StoreCheck {
    StoreOptions options;
    ManifestReference reference;
    Manifest manifest;
    RecordLayout layout;
    Rows rows;
  };
  using Check = std::function<Result<Outcome>()>;

  std::string At(const std::string& name) const { return JoinPath(arguments_.run, name); }
  Status Copy(const std::string& folder);
  // Which files there are, who reads them, and what they hold.
  Status Learn();
  Status LearnStore(const Checkpoint::StoreManifest& named);
  Status LearnParameterFile(const std::string& path, const StoreCheck& store,
                            const Manifest::File& file);
  Status LearnDigests(std::uint64_t newest);
  Status LearnReports();
  Status SweepFile(const std::string& path, CopiedFile* file);
  Result<Outcome> CheckFlip(const std::string& path, std::uint64_t number, bool small);
  // Opens the store, and reads all its rows by key and in order. kInternal: they are others.
  Status CheckStore(const StoreCheck& store);
  Status CheckReads(Store* store, const StoreCheck& check, const std::vector<Key>& keys);
  // The scrub of the whole run, and its digest.
  Result<Outcome> CheckRun(const std::string& path);
  Result<Outcome> CheckScrub(const std::string& path);
  Result<std::string> Digest();

  const Arguments arguments_;
  Rng rng_;
  MemoryFileSystem fs_;
  std::map<std::string, CopiedFile> files_;
  std::unique_ptr<RunFolder> folder_;
  std::vector<std::unique_ptr<StoreCheck>> stores_;
  std::map<std::string, Check> checks_;  // By path; of other files the run alone.
  std::set<std::string> digests_;        // Of the checkpoints.
  std::optional<ScrubBuffers> buffers_;
};

Status Sweep::Copy(const std::string& folder) {
  TERRACE_RETURN_IF_ERROR(fs_.MakeDirectories(folder));
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, FileSystem::Posix()->List(folder));
  for (const FileInfo& entry : entries) {
    const std::string path = JoinPath(folder, entry.name);
    if (entry.is_directory) {
      TERRACE_RETURN_IF_ERROR(Copy(path));
      continue;
    }
    TERRACE_ASSIGN_OR_RETURN(const std::string bytes, ReadFileToString(FileSystem::Posix(), path));
    TERRACE_ASSIGN_OR_RETURN(CopiedFile file, CopiedFile::Create(&fs_, path, bytes));
    files_.emplace(path, std::move(file));
  }
  return OkStatus();
}

Result<Outcome> DetectedBy(const Status& status) {
  if (status.code() == StatusCode::kInternal) return status;
  return status.ok() ? Outcome::kHarmless : Outcome::kDetected;
}

Status Sweep::Learn() {
  TERRACE_ASSIGN_OR_RETURN(folder_,
                           RunFolder::Open(&fs_, arguments_.run, RunFolder::Mode::kScrub, nullptr));
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> ids, folder_->ListCheckpoints());
  if (ids.size() < 2) return InvalidArgumentError("the run has fewer than two checkpoints");
  for (const std::uint64_t id : ids) {
    TERRACE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, folder_->ReadCheckpoint(id));
    checks_[At(fmt::format("checkpoints/checkpoint-{:08}", id))] = [this, id] {
      return DetectedBy(folder_->ReadCheckpoint(id).status());
    };
    checks_[At(fmt::format("dense/dense-{:08}", id))] = [this, checkpoint] {
      return DetectedBy(folder_->ReadDense(checkpoint).status());
    };
    for (const Checkpoint::StoreManifest& named : checkpoint.stores) {
      checks_[At(fmt::format("admission/filter-{:08}-{}", id, named.table))] = [this, checkpoint,
                                                                                named] {
        return DetectedBy(
            ReadAdmissionFilter(folder_.get(), checkpoint, named.table, named.schema).status());
      };
      TERRACE_RETURN_IF_ERROR(LearnStore(named));
    }
  }
  TERRACE_RETURN_IF_ERROR(LearnDigests(ids.back()));
  return LearnReports();
}

Status Sweep::LearnStore(const Checkpoint::StoreManifest& named) {
  auto check = std::make_unique<StoreCheck>();
  check->options.directory = folder_->ResolveDirectory(named.directory);
  check->options.table = named.table;
  check->options.shard = named.shard;
  check->options.row_bytes = named.row_bytes;
  check->options.io_buffer_bytes = kBufferBytes;
  check->options.background_compaction = false;
  check->options.read_only = true;
  check->reference = named.manifest;
  check->layout = named.record_layout();
  TERRACE_ASSIGN_OR_RETURN(check->manifest,
                           ReadManifest(&fs_, check->options.directory, named.manifest.id,
                                        named.manifest.digest, check->layout));
  TERRACE_ASSIGN_OR_RETURN(
      const std::unique_ptr<Store> store,
      Store::Open(&fs_, Clock::Real(), nullptr, check->options, named.manifest, {}));
  TERRACE_RETURN_IF_ERROR(store->ForEachRow(kMergeBytes, [&](const RowView& view) {
    check->rows[view.key] = Text(view.row);
    return OkStatus();
  }));
  if (check->rows.empty()) return InvalidArgumentError("a store of the run has no rows");
  if (!buffers_) {
    TERRACE_ASSIGN_OR_RETURN(buffers_, ScrubBuffers::Allocate(check->layout));
  }
  for (const Manifest::File& file : check->manifest.files) {
    const std::string path = JoinPath(check->options.directory, ParameterFileName(file.id));
    TERRACE_RETURN_IF_ERROR(LearnParameterFile(path, *check, file));
  }
  stores_.push_back(std::move(check));
  return OkStatus();
}

Status Sweep::LearnParameterFile(const std::string& path, const StoreCheck& store,
                                 const Manifest::File& file) {
  if (!files_.contains(path)) return CorruptionError(path + " is not there");
  const Check others = std::move(checks_[path]);
  // Every byte of it has a check, so the scrub always sees it; what it may come to is told by
  // those who read.
  checks_[path] = [this, others, &store, file]() -> Result<Outcome> {
    const ScrubOptions options{store.options.directory, store.layout};
    if (ScrubFile(&fs_, options, file, &*buffers_).sound()) {
      return InternalError("the scrub does not see it");
    }
    TERRACE_RETURN_IF_ERROR(CheckStore(store));
    return others ? others() : Result<Outcome>(Outcome::kDetected);
  };
  return OkStatus();
}

Result<std::string> Sweep::Digest() {
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<RunReader> reader,
                           RunReader::Open(&fs_, arguments_.run));
  return DigestOf(reader.get());
}

Status Sweep::LearnDigests(std::uint64_t newest) {
  TERRACE_ASSIGN_OR_RETURN(std::string digest, Digest());
  digests_.insert(std::move(digest));
  // A reader that finds the newest checkpoint damaged takes the one before.
  CopiedFile& checkpoint = files_.at(At(fmt::format("checkpoints/checkpoint-{:08}", newest)));
  TERRACE_RETURN_IF_ERROR(checkpoint.Flip(checkpoint.bytes().size() / 2, 0));
  TERRACE_ASSIGN_OR_RETURN(digest, Digest());
  digests_.insert(std::move(digest));
  if (digests_.size() != 2) return InvalidArgumentError("two checkpoints have the same digest");
  return checkpoint.Restore(checkpoint.bytes().size() / 2);
}

Status Sweep::LearnReports() {
  for (const std::string& name : kReports) {
    const std::string path = At(name);
    const auto file = files_.find(path);
    if (file == files_.end()) continue;
    // A digest that does without the file depends on no byte of it.
    TERRACE_RETURN_IF_ERROR(fs_.Remove(path));
    TERRACE_ASSIGN_OR_RETURN(const std::string digest, Digest());
    if (!digests_.contains(digest)) return InternalError("the digest changes without " + path);
    TERRACE_ASSIGN_OR_RETURN(file->second,
                             CopiedFile::Create(&fs_, path, std::string(file->second.bytes())));
    checks_[path] = [this, path] { return CheckScrub(path); };
  }
  return OkStatus();
}

Status Sweep::CheckStore(const StoreCheck& check) {
  const Result<std::unique_ptr<Store>> store =
      Store::Open(&fs_, Clock::Real(), nullptr, check.options, check.reference, {});
  if (!store.ok()) return OkStatus();
  std::vector<Key> keys;
  for (const auto& [key, row] : check.rows) keys.push_back(key);
  keys.push_back(MixKey(check.rows.begin()->first) | 1);  // Of no row.
  TERRACE_RETURN_IF_ERROR(CheckReads(store->get(), check, keys));
  std::uint64_t rows = 0;
  const Status status = (*store)->ForEachRow(kMergeBytes, [&](const RowView& view) {
    ++rows;
    const auto found = check.rows.find(view.key);
    if (found != check.rows.end() && found->second == Text(view.row)) return OkStatus();
    return InternalError(fmt::format("in order, key {:#x} has a wrong row", view.key));
  });
  if (status.ok() && rows != check.rows.size()) {
    return InternalError(fmt::format("{} of {} rows in order", rows, check.rows.size()));
  }
  return status.code() == StatusCode::kInternal ? status : OkStatus();
}

// Halves what can't be read, so that every row that can be read is compared.
Status Sweep::CheckReads(Store* store, const StoreCheck& check, const std::vector<Key>& keys) {
  const std::size_t row_bytes = check.options.row_bytes;
  std::string memory(keys.size() * row_bytes, '\0');
  std::vector<std::byte*> rows;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    rows.push_back(reinterpret_cast<std::byte*>(memory.data() + i * row_bytes));
  }
  std::vector<std::uint8_t> found(keys.size());
  if (!store->Read(keys, rows, found).ok()) {
    if (keys.size() == 1) return OkStatus();
    const auto middle = keys.begin() + static_cast<std::ptrdiff_t>(keys.size() / 2);
    TERRACE_RETURN_IF_ERROR(CheckReads(store, check, {keys.begin(), middle}));
    return CheckReads(store, check, {middle, keys.end()});
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto wanted = check.rows.find(keys[i]);
    if ((found[i] != 0) != (wanted != check.rows.end())) {
      return InternalError(
          fmt::format("key {:#x} is {}", keys[i], found[i] ? "there" : "not there"));
    }
    if (found[i] != 0 && memory.compare(i * row_bytes, row_bytes, wanted->second) != 0) {
      return InternalError(fmt::format("key {:#x} has a wrong row", keys[i]));
    }
  }
  return OkStatus();
}

Result<Outcome> Sweep::CheckScrub(const std::string& path) {
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<RunFolder> folder,
                           RunFolder::Open(&fs_, arguments_.run, RunFolder::Mode::kScrub, nullptr));
  TERRACE_ASSIGN_OR_RETURN(const RunScrub scrub, ScrubRun(&fs_, folder.get(), false));
  const std::vector<Finding> findings = scrub.Findings();
  for (const Finding& finding : findings) {
    if (finding.file == path) return Outcome::kDetected;
  }
  if (findings.empty()) return Outcome::kHarmless;
  return InternalError("the scrub blames " + findings[0].file);
}

Result<Outcome> Sweep::CheckRun(const std::string& path) {
  TERRACE_ASSIGN_OR_RETURN(const Outcome outcome, CheckScrub(path));
  const Result<std::string> digest = Digest();
  if (digest.ok() && !digests_.contains(*digest)) return InternalError("another digest");
  if (!digest.ok() && outcome == Outcome::kHarmless) {
    return InternalError(digest.status().ToString());
  }
  return outcome;
}

Result<Outcome> Sweep::CheckFlip(const std::string& path, std::uint64_t number, bool small) {
  const auto check = checks_.find(path);
  if (check == checks_.end()) return CheckRun(path);
  TERRACE_ASSIGN_OR_RETURN(const Outcome outcome, check->second());
  if (!small && number % kSampled != 0) return outcome;
  TERRACE_ASSIGN_OR_RETURN(const Outcome whole, CheckRun(path));
  if (outcome != whole) return InternalError("only one of the scrub and a reader sees it");
  return whole;
}

Status Sweep::SweepFile(const std::string& path, CopiedFile* file) {
  const std::string name = path.substr(arguments_.run.size() + 1);
  const bool small = file->bytes().size() <= kSmallFile;
  std::uint64_t flips = 0, detected = 0;
  for (std::size_t at = 0; at < file->bytes().size(); ++at) {
    const auto drawn = static_cast<unsigned>(rng_.Below(8));
    for (unsigned bit = 0; bit < 8; ++bit) {
      if (!arguments_.all_bits && bit != drawn) continue;
      TERRACE_RETURN_IF_ERROR(file->Flip(at, bit));
      const Result<Outcome> outcome = CheckFlip(path, flips, small);
      if (!outcome.ok()) {
        return outcome.status().WithContext(fmt::format("{} byte {} bit {}", name, at, bit));
      }
      ++flips;
      detected += *outcome == Outcome::kDetected ? 1 : 0;
    }
    TERRACE_RETURN_IF_ERROR(file->Restore(at));
  }
  std::printf("%s: %zu bytes, %lu flips, %lu detected, %lu harmless\n", name.c_str(),
              file->bytes().size(), flips, detected, flips - detected);
  std::fflush(stdout);
  if (detected == flips || kUnchecked.contains(name)) return OkStatus();
  return InternalError(name + ": not every flip was detected");
}

Status Sweep::Run() {
  TERRACE_RETURN_IF_ERROR(Copy(arguments_.run));
  TERRACE_RETURN_IF_ERROR(Learn());
  for (auto& [path, file] : files_) TERRACE_RETURN_IF_ERROR(SweepFile(path, &file));
  TERRACE_ASSIGN_OR_RETURN(const Outcome outcome, CheckRun(arguments_.run));
  return outcome == Outcome::kHarmless ? OkStatus() : InternalError("a flip was left over");
}

bool Parse(int argc, char** argv, Arguments* arguments) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--run") {
      arguments->run = value;
    } else if (name == "--seed") {
      const char* end = value.data() + value.size();
      if (std::from_chars(value.data(), end, arguments->seed).ptr != end) return false;
    } else if (name == "--bits" && (value == "one" || value == "all")) {
      arguments->all_bits = value == "all";
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && arguments->run.starts_with('/');
}

int Main(int argc, char** argv) {
  Arguments arguments;
  if (!Parse(argc, argv, &arguments)) {
    std::fputs("flip_sweep --run ABSOLUTE_FOLDER [--seed S] [--bits one|all]\n", stderr);
    return 2;
  }
  ConfigureAllocator();
  SetLogLevel(LogLevel::kError);
  const Status status = Sweep(std::move(arguments)).Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) { return terrace::Main(argc, argv); }
