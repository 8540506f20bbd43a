// RunFolder: the folder of a run, its marker, its lock and its checkpoints.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "terrace/base/clock.h"
#include "terrace/base/log.h"
#include "terrace/base/rng.h"
#include "terrace/base/sync_point.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/run_marker.h"

namespace terrace {
namespace {

constexpr std::string_view kCheckpointMagic = "TERRCKPT";
constexpr std::string_view kDenseMagic = "TERRDENS";
constexpr std::string_view kFilterMagic = "TERRADMF";
constexpr std::uint32_t kDenseVersion = 1;
constexpr std::uint32_t kFilterVersion = 1;
static_assert(AdmissionFilter::kFrameRoomBytes == kFrameHeaderBytes);
constexpr const char* kLock = "LOCK";
// What a run makes in its folder, beside marker and lock.
constexpr const char* kContents[] = {"checkpoints", "dense",         "admission",   "rows",
                                     "job.yaml",    "metrics.jsonl", "summary.json"};

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

Result<bool> Exists(FileSystem* fs, const std::string& path) {
  Result<FileInfo> info = fs->Stat(path);
  if (info.ok()) return true;
  if (info.status().code() == StatusCode::kNotFound) return false;
  return info.status();
}

// NotFound is fine.
Status RemoveFile(FileSystem* fs, const std::string& path) {
  Status status = fs->Remove(path);
  return status.code() == StatusCode::kNotFound ? OkStatus() : status;
}

std::string Absolute(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  std::string text = (error ? std::filesystem::path(path) : absolute).lexically_normal().string();
  while (text.size() > 1 && text.ends_with('/')) text.pop_back();
  return text;
}

std::vector<std::string> AbsoluteAll(const std::vector<std::string>& paths) {
  std::vector<std::string> result;
  for (const std::string& path : paths) result.push_back(Absolute(path));
  return result;
}

// The number of "checkpoint-00000012"; nullopt: no such name.
std::optional<std::uint64_t> NumberOf(const std::string& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  const char* begin = name.data() + prefix.size();
  const char* end = name.data() + name.size();
  std::uint64_t number = 0;
  auto [rest, error] = std::from_chars(begin, end, number);
  if (error != std::errc() || rest != end || end - begin < 8) return std::nullopt;
  return number;
}

// The same of "filter-00000012-<table>".
std::optional<std::uint64_t> NumberOfFilter(const std::string& name) {
  constexpr std::string_view kPrefix = "filter-";
  return NumberOf(name.substr(0, name.find('-', kPrefix.size())), kPrefix);
}

// The marker that a run must have had, by one of its checkpoints: shard s of a table lies on path s
// mod number of paths.
RunMarker MarkerOf(const Checkpoint& checkpoint, const std::vector<std::string>& ssd_paths) {
  RunMarker marker;
  marker.created_micros = static_cast<std::uint64_t>(Clock::Real()->WallMicros());
  marker.id = fmt::format("{:016x}", HashCombine(marker.created_micros, HashName("a marker lost")));
  marker.ssd_paths = ssd_paths;
  std::string name;  // Of the run's folder on each path.
  for (const Checkpoint::StoreManifest& store : checkpoint.stores) {
    marker.shards = std::max(marker.shards, std::uint64_t{store.shard} + 1);
    const std::filesystem::path folder =
        std::filesystem::path(store.directory).parent_path().parent_path();
    if (ssd_paths.empty()) continue;
    name = folder.filename().string();
    // As it lay when the run began, whatever the working directory is now.
    marker.ssd_paths[store.shard % ssd_paths.size()] = folder.parent_path().string();
  }
  for (const std::string& path : marker.ssd_paths) {
    marker.ssd_folders.push_back(JoinPath(path, name));
  }
  // "<name>-<id>"
  if (!name.empty()) marker.id = name.substr(name.rfind('-') + 1);
  return marker;
}

class RunFolderImpl final : public RunFolder {
 public:
  RunFolderImpl(FileSystem* fs, std::string path, const Job* job)
      : fs_(fs), path_(std::move(path)), job_(job) {}

  Status OpenForReading();
  // For kScrub and kRepair.
  Status OpenDamaged(Mode mode);
  Status OpenForWriting(Mode mode);

  const std::string& path() const override { return path_; }
  std::string StoreDirectory(const std::string& table, std::uint32_t shard) const override {
    return ResolveDirectory(RecordedDirectory(table, shard));
  }
  std::string RecordedDirectory(const std::string& table, std::uint32_t shard) const override;
  std::string ResolveDirectory(const std::string& recorded) const override {
    return JoinPath(path_, recorded);  // An absolute one stays as it is.
  }
  Result<std::vector<std::uint64_t>> ListCheckpoints() override;
  Result<std::vector<std::uint64_t>> ListCheckpointFiles() override;
  Result<Checkpoint> ReadCheckpoint(std::uint64_t id) override;
  Result<DenseState> ReadDense(const Checkpoint& checkpoint) override;
  Result<FileDigest> WriteDense(std::uint64_t id, const DenseState& state) override;
  Result<FileDigest> WriteFilter(std::uint64_t id, const std::string& table,
                                 AdmissionFilter* filter) override;
  Status ReadFilter(const Checkpoint& checkpoint, const std::string& table,
                    AdmissionFilter* filter) override;
  Status WriteCheckpoint(const Checkpoint& checkpoint) override;
  Status DropCheckpoint(std::uint64_t id) override;
  Result<std::unique_ptr<FileLock>> HoldCheckpoint(std::uint64_t id) override;
  Result<std::vector<std::string>> ListStrays() override;
  Status RemoveStrays() override;
  void ScrubMarkers(std::vector<Finding>* findings, Status* refused) override;
  Status RestoreMarkers(const Checkpoint& checkpoint, const Job& job) override;

 private:
  std::string At(std::string_view name) const { return JoinPath(path_, name); }
  std::string CheckpointPath(std::uint64_t id) const {
    return At(fmt::format("checkpoints/checkpoint-{:08}", id));
  }
  std::string DensePath(std::uint64_t id) const { return At(fmt::format("dense/dense-{:08}", id)); }
  std::string FilterPath(std::uint64_t id, const std::string& table) const {
    return At(fmt::format("admission/filter-{:08}-{}", id, table));
  }
  // Nothing where the folder is not there.
  Result<std::vector<FileInfo>> ListOrNone(const std::string& folder);
  // Those of one checkpoint.
  Status RemoveFilters(std::uint64_t id);

  // Whether a run is there; refuses what `mode` may not touch.
  Result<bool> Inspect(Mode mode);
  Status RefuseForeign();
  Status TakeLock();
  Status CheckResume();
  Status Create();
  Status CheckSsdMarkers();
  Status RemoveRun();
  Status ListTemporaries(const std::string& folder, std::vector<std::string>* paths);
  Status RemoveTemporaries(const std::string& folder);
  // Writes job.yaml where it says something else.
  Status KeepJob(const std::string& yaml);

  FileSystem* const fs_;
  const std::string path_;
  const Job* const job_;  // Borrowed during Open; nullptr for a reader.
  RunMarker marker_;
  Status marker_status_;  // Why there is none; of kScrub and kRepair.
  std::unique_ptr<FileLock> lock_;
};

std::string RunFolderImpl::RecordedDirectory(const std::string& table, std::uint32_t shard) const {
  const std::string place = fmt::format("{}/shard-{}", table, shard);
  if (marker_.ssd_folders.empty()) return "rows/" + place;
  return JoinPath(marker_.ssd_folders[shard % marker_.ssd_folders.size()], place);
}

Status RunFolderImpl::OpenForReading() {
  Result<RunMarker> marker = ReadRunMarker(fs_, path_);
  if (!marker.ok()) {
    if (marker.status().code() != StatusCode::kNotFound) return marker.status();
    return NotFoundError(fmt::format("'{}' holds no run (no file RUN in it)", path_));
  }
  marker_ = std::move(marker).value();
  return OkStatus();
}

Status RunFolderImpl::OpenDamaged(Mode mode) {
  Result<RunMarker> marker = ReadRunMarker(fs_, path_);
  if (marker.status().code() == StatusCode::kNotFound) {
    // Only a run has checkpoints.
    TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> files, ListCheckpointFiles());
    if (files.empty()) {
      return NotFoundError(fmt::format("'{}' holds no run (no file RUN in it)", path_));
    }
  }
  if (mode == Mode::kRepair) {
    TERRACE_RETURN_IF_ERROR(TakeLock());
    marker = ReadRunMarker(fs_, path_);  // Another process may have changed it until now.
  }
  marker_status_ = marker.status();
  if (marker.ok()) marker_ = std::move(marker).value();
  return OkStatus();
}

Status RunFolderImpl::RefuseForeign() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs_->List(path_));
  std::string names;
  int foreign = 0;
  for (const FileInfo& entry : entries) {
    // What a crash before the marker may have left.
    if (entry.name == kLock || entry.name == std::string(kRunMarkerName) + ".tmp") continue;
    if (++foreign <= 3) names += (names.empty() ? "" : ", ") + entry.name;
  }
  if (foreign == 0) return OkStatus();
  return InvalidArgumentError(fmt::format(
      "'{}' holds no run but other files ({}{}), and carries no marker RUN: nothing there is "
      "touched, --overwrite included; name another output",
      path_, names, foreign > 3 ? ", ..." : ""));
}

Result<bool> RunFolderImpl::Inspect(Mode mode) {
  TERRACE_ASSIGN_OR_RETURN(const bool has_run, Exists(fs_, At(kRunMarkerName)));
  if (!has_run) {
    TERRACE_RETURN_IF_ERROR(RefuseForeign());
    return false;
  }
  if (mode == Mode::kNew) {
    return InvalidArgumentError(fmt::format(
        "'{}' holds a run already: --resume goes on with it, --overwrite deletes it and starts "
        "anew",
        path_));
  }
  return true;
}

Status RunFolderImpl::TakeLock() {
  const std::string path = At(kLock);
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs_->Open(path, OpenMode::kAppend));
  Result<std::unique_ptr<FileLock>> lock = fs_->Lock(path, /*exclusive=*/true);
  if (!lock.ok()) {
    if (lock.status().code() != StatusCode::kUnavailable) return lock.status();
    std::string holder = ReadFileToString(fs_, path).ok() ? *ReadFileToString(fs_, path) : "";
    while (!holder.empty() && holder.back() == '\n') holder.pop_back();
    return UnavailableError(fmt::format(
        "process {} holds the run '{}': wait until it ends, or end it with kill -INT {}",
        holder.empty() ? "(unknown)" : holder, path_, holder.empty() ? "<pid>" : holder));
  }
  lock_ = std::move(lock).value();
  TERRACE_RETURN_IF_ERROR(file->Truncate(0));
  return file->WriteAt(0, Bytes(fmt::format("{}\n", getpid())));
}

Status RunFolderImpl::OpenForWriting(Mode mode) {
  Result<FileInfo> info = fs_->Stat(path_);
  if (info.ok() && !info->is_directory) {
    return InvalidArgumentError(
        fmt::format("output '{}' is a file; a run needs a folder of its own", path_));
  }
  if (!info.ok() && info.status().code() != StatusCode::kNotFound) return info.status();
  if (info.ok()) TERRACE_RETURN_IF_ERROR(Inspect(mode).status());
  TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(path_));
  TERRACE_RETURN_IF_ERROR(TakeLock());
  // Once more: another process may have begun a run before the lock was ours.
  TERRACE_ASSIGN_OR_RETURN(const bool has_run, Inspect(mode));
  if (!has_run) return Create();
  TERRACE_ASSIGN_OR_RETURN(marker_, ReadRunMarker(fs_, path_));
  if (mode == Mode::kResume) {
    TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> files, ListCheckpointFiles());
    if (!files.empty()) return CheckResume();
  }
  TERRACE_RETURN_IF_ERROR(RemoveRun());
  return Create();
}

// A run with checkpoints goes on only from a whole one, on the disks that it began on.
Status RunFolderImpl::CheckResume() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> whole, ListCheckpoints());
  if (whole.empty()) {
    return CorruptionError(fmt::format(
        "no checkpoint in '{}' can be read (see the warnings above); nothing was changed. "
        "--overwrite deletes the run and starts anew",
        path_));
  }
  const std::vector<std::string> paths = AbsoluteAll(job_->ssd.paths);
  if (paths != marker_.ssd_paths) {
    return InvalidArgumentError(fmt::format(
        "ssd.paths: the run's rows lie in [{}], the job now says [{}]; put the old ones back",
        fmt::join(marker_.ssd_paths, ", "), fmt::join(paths, ", ")));
  }
  if (static_cast<std::uint64_t>(job_->ssd.shards) != marker_.shards) {
    return InvalidArgumentError(
        fmt::format("ssd.shards: the run has {}, the job now says {}; put the old number back",
                    marker_.shards, job_->ssd.shards));
  }
  return OkStatus();
}

Status RunFolderImpl::Create() {
  const std::string absolute = Absolute(path_);
  marker_ = RunMarker();
  marker_.created_micros = static_cast<std::uint64_t>(Clock::Real()->WallMicros());
  marker_.id =
      fmt::format("{:016x}", HashCombine(HashCombine(HashName(absolute), marker_.created_micros),
                                         static_cast<std::uint64_t>(getpid())));
  marker_.shards = static_cast<std::uint64_t>(job_->ssd.shards);
  marker_.ssd_paths = AbsoluteAll(job_->ssd.paths);
  const std::string name = absolute.substr(absolute.rfind('/') + 1);
  for (const std::string& path : marker_.ssd_paths) {
    marker_.ssd_folders.push_back(JoinPath(path, fmt::format("{}-{}", name, marker_.id)));
  }
  // The marker first: it names the other folders, so that whatever a crash leaves can be deleted.
  SyncPoint::Hit("run.create.before_marker");
  TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, path_, marker_));
  SyncPoint::Hit("run.create.after_marker");
  for (const std::string& folder : marker_.ssd_folders) {
    TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(folder));
    TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, folder, marker_));
  }
  TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(At("checkpoints")));
  TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(At("dense")));
  TERRACE_RETURN_IF_ERROR(KeepJob(JobToYaml(*job_)));
  return fs_->SyncDirectory(path_);
}

// Each folder on ssd.paths that is there must be this run's, or empty.
Status RunFolderImpl::CheckSsdMarkers() {
  for (const std::string& folder : marker_.ssd_folders) {
    Result<std::vector<FileInfo>> entries = fs_->List(folder);
    if (!entries.ok()) {
      if (entries.status().code() == StatusCode::kNotFound) continue;
      return entries.status();
    }
    const bool empty = std::all_of(entries->begin(), entries->end(), [](const FileInfo& entry) {
      return entry.name == std::string(kRunMarkerName) + ".tmp";
    });
    if (empty) continue;
    Result<RunMarker> marker = ReadRunMarker(fs_, folder);
    if (!marker.ok() || marker->id != marker_.id) {
      return InvalidArgumentError(fmt::format(
          "'{}' belongs to the run '{}', but does not carry its marker RUN{}; nothing was deleted: "
          "look at it, and delete it by hand",
          folder, path_, marker.ok() ? "" : " (" + marker.status().message() + ")"));
    }
  }
  return OkStatus();
}

Status RunFolderImpl::RemoveRun() {
  TERRACE_RETURN_IF_ERROR(CheckSsdMarkers());
  // Checkpoints first, and durably: from then on nobody finds what is being deleted, after a loss
  // of power either. The marker last: a crash leaves a folder that --overwrite still accepts.
  for (const char* name : kContents) {
    TERRACE_RETURN_IF_ERROR(RemoveTree(fs_, At(name)));
    if (name == kContents[0]) TERRACE_RETURN_IF_ERROR(fs_->SyncDirectory(path_));
  }
  SyncPoint::Hit("run.remove.after_contents");
  for (const std::string& folder : marker_.ssd_folders) {
    Result<std::vector<FileInfo>> entries = fs_->List(folder);
    if (!entries.ok() && entries.status().code() == StatusCode::kNotFound) continue;
    if (!entries.ok()) return entries.status();
    for (const FileInfo& entry : *entries) {
      if (entry.name == kRunMarkerName) continue;
      TERRACE_RETURN_IF_ERROR(RemoveTree(fs_, JoinPath(folder, entry.name)));
    }
    TERRACE_RETURN_IF_ERROR(RemoveTree(fs_, folder));
  }
  // Gone for good before the marker that names them goes.
  for (const std::string& path : marker_.ssd_paths) {
    const Status synced = fs_->SyncDirectory(path);
    if (!synced.ok() && synced.code() != StatusCode::kNotFound) return synced;
  }
  TERRACE_RETURN_IF_ERROR(RemoveTemporaries(path_));
  TERRACE_RETURN_IF_ERROR(fs_->SyncDirectory(path_));
  SyncPoint::Hit("run.remove.before_marker");
  TERRACE_RETURN_IF_ERROR(RemoveFile(fs_, At(kRunMarkerName)));
  TERRACE_RETURN_IF_ERROR(fs_->SyncDirectory(path_));
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> left, fs_->List(path_));
  for (const FileInfo& entry : left) {
    if (entry.name == kLock) continue;
    LogText(LogLevel::kWarning, fmt::format("'{}' is not of the run and stays", At(entry.name)));
  }
  return OkStatus();
}

Status RunFolderImpl::ListTemporaries(const std::string& folder, std::vector<std::string>* paths) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, ListOrNone(folder));
  static const std::set<std::string> kOurs = {"RUN.tmp", "job.yaml.tmp", "summary.json.tmp",
                                              "metrics.jsonl.tmp"};
  for (const FileInfo& entry : entries) {
    const bool ours = kOurs.contains(entry.name) || entry.name.starts_with("checkpoint-") ||
                      entry.name.starts_with("dense-") || entry.name.starts_with("filter-");
    if (entry.is_directory || !ours || !entry.name.ends_with(".tmp")) continue;
    paths->push_back(JoinPath(folder, entry.name));
  }
  return OkStatus();
}

Status RunFolderImpl::RemoveTemporaries(const std::string& folder) {
  std::vector<std::string> paths;
  TERRACE_RETURN_IF_ERROR(ListTemporaries(folder, &paths));
  for (const std::string& path : paths) TERRACE_RETURN_IF_ERROR(RemoveFile(fs_, path));
  return OkStatus();
}

Result<std::vector<std::uint64_t>> RunFolderImpl::ListCheckpointFiles() {
  std::vector<std::uint64_t> numbers;
  Result<std::vector<FileInfo>> entries = fs_->List(At("checkpoints"));
  if (!entries.ok()) {
    if (entries.status().code() == StatusCode::kNotFound) return numbers;
    return entries.status();
  }
  for (const FileInfo& entry : *entries) {
    const std::optional<std::uint64_t> number = NumberOf(entry.name, "checkpoint-");
    if (number) numbers.push_back(*number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

Result<std::vector<std::uint64_t>> RunFolderImpl::ListCheckpoints() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> files, ListCheckpointFiles());
  std::vector<std::uint64_t> whole;
  for (const std::uint64_t id : files) {
    Result<Checkpoint> checkpoint = ReadCheckpoint(id);
    if (checkpoint.ok()) {
      whole.push_back(id);
    } else if (checkpoint.status().code() == StatusCode::kCorruption) {
      LogText(LogLevel::kWarning,
              fmt::format("checkpoint {} is left out: {}", id, checkpoint.status().message()));
    } else if (checkpoint.status().code() != StatusCode::kNotFound) {  // A trainer dropped it.
      return checkpoint.status();
    }
  }
  return whole;
}

Result<Checkpoint> RunFolderImpl::ReadCheckpoint(std::uint64_t id) {
  const std::string path = CheckpointPath(id);
  TERRACE_ASSIGN_OR_RETURN(const std::string payload,
                           ReadFramedFile(fs_, path, kCheckpointMagic, kCheckpointVersion));
  Result<Checkpoint> checkpoint = DecodeCheckpoint(payload);
  if (!checkpoint.ok()) return checkpoint.status().WithContext(path);
  if (checkpoint->id != id) {
    return CorruptionError(fmt::format("{}: holds checkpoint {}", path, checkpoint->id));
  }
  return checkpoint;
}

Result<DenseState> RunFolderImpl::ReadDense(const Checkpoint& checkpoint) {
  const std::string path = DensePath(checkpoint.id);
  if (checkpoint.dense.size() != 1) {
    return CorruptionError(fmt::format("checkpoint {} names {} dense files; this program reads 1",
                                       checkpoint.id, checkpoint.dense.size()));
  }
  TERRACE_ASSIGN_OR_RETURN(
      const std::string payload,
      ReadFramedFile(fs_, path, kDenseMagic, kDenseVersion, &checkpoint.dense[0]));
  Result<DenseState> state = DecodeDense(payload);
  if (!state.ok()) return state.status().WithContext(path);
  return state;
}

Result<FileDigest> RunFolderImpl::WriteDense(std::uint64_t id, const DenseState& state) {
  SyncPoint::Hit("checkpoint.before_dense");
  const std::string payload = EncodeDense(state);
  return WriteFramedFile(fs_, DensePath(id), kDenseMagic, kDenseVersion, Bytes(payload));
}

Result<FileDigest> RunFolderImpl::WriteFilter(std::uint64_t id, const std::string& table,
                                              AdmissionFilter* filter) {
  SyncPoint::Hit("checkpoint.before_filter");
  TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(At("admission")));
  const std::span<std::byte> image = filter->image();
  FrameInPlace(kFilterMagic, kFilterVersion, image);
  TERRACE_RETURN_IF_ERROR(WriteFileAtomically(fs_, FilterPath(id, table), image));
  return FileDigest{image.size(), Checksum64(image)};
}

Status RunFolderImpl::ReadFilter(const Checkpoint& checkpoint, const std::string& table,
                                 AdmissionFilter* filter) {
  for (const Checkpoint::FilterFile& file : checkpoint.admission) {
    if (file.table != table) continue;
    const std::string path = FilterPath(checkpoint.id, table);
    TERRACE_RETURN_IF_ERROR(
        ReadFramedFileInto(fs_, path, kFilterMagic, kFilterVersion, file.digest, filter->image()));
    const Status head = filter->CheckHead();
    return head.ok() ? head : head.WithContext(path);
  }
  return CorruptionError(
      fmt::format("checkpoint {} names no admission filter of table '{}'", checkpoint.id, table));
}

Result<std::vector<FileInfo>> RunFolderImpl::ListOrNone(const std::string& folder) {
  Result<std::vector<FileInfo>> entries = fs_->List(folder);
  if (entries.status().code() == StatusCode::kNotFound) return std::vector<FileInfo>();
  return entries;
}

Status RunFolderImpl::RemoveFilters(std::uint64_t id) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, ListOrNone(At("admission")));
  for (const FileInfo& entry : entries) {
    if (NumberOfFilter(entry.name) != id) continue;
    TERRACE_RETURN_IF_ERROR(RemoveFile(fs_, JoinPath(At("admission"), entry.name)));
  }
  return OkStatus();
}

Status RunFolderImpl::KeepJob(const std::string& yaml) {
  Result<std::string> kept = ReadFileToString(fs_, At("job.yaml"));
  if (kept.ok() && *kept == yaml) return OkStatus();
  return WriteFileAtomically(fs_, At("job.yaml"), Bytes(yaml));
}

Status RunFolderImpl::WriteCheckpoint(const Checkpoint& checkpoint) {
  // For people: the checkpoint has the job too.
  TERRACE_RETURN_IF_ERROR(KeepJob(checkpoint.job_yaml));
  TERRACE_ASSIGN_OR_RETURN(const std::string payload, EncodeCheckpoint(checkpoint));
  SyncPoint::Hit("checkpoint.before_publish");
  TERRACE_RETURN_IF_ERROR(WriteFramedFile(fs_, CheckpointPath(checkpoint.id), kCheckpointMagic,
                                          CheckpointVersionOf(checkpoint), Bytes(payload))
                              .status());
  SyncPoint::Hit("checkpoint.after_publish");
  return OkStatus();
}

Status RunFolderImpl::DropCheckpoint(std::uint64_t id) {
  const std::string path = CheckpointPath(id);
  Result<std::unique_ptr<FileLock>> alone = fs_->Lock(path, /*exclusive=*/true);
  if (!alone.ok() && alone.status().code() != StatusCode::kNotFound) {
    return alone.status().WithContext(fmt::format("dropping checkpoint {}", id));
  }
  SyncPoint::Hit("checkpoint.drop.before_remove");
  TERRACE_RETURN_IF_ERROR(RemoveFile(fs_, path));
  TERRACE_RETURN_IF_ERROR(fs_->SyncDirectory(At("checkpoints")));
  SyncPoint::Hit("checkpoint.drop.after_remove");
  TERRACE_RETURN_IF_ERROR(RemoveFile(fs_, DensePath(id)));
  return RemoveFilters(id);
}

Result<std::unique_ptr<FileLock>> RunFolderImpl::HoldCheckpoint(std::uint64_t id) {
  return fs_->Lock(CheckpointPath(id), /*exclusive=*/false);
}

Result<std::vector<std::string>> RunFolderImpl::ListStrays() {
  std::vector<std::string> paths;
  for (const std::string& folder : {path_, At("checkpoints"), At("dense"), At("admission")}) {
    TERRACE_RETURN_IF_ERROR(ListTemporaries(folder, &paths));
  }
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> kept, ListCheckpointFiles());
  const auto is_kept = [&kept](std::uint64_t id) {
    return std::binary_search(kept.begin(), kept.end(), id);
  };
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> dense, ListOrNone(At("dense")));
  for (const FileInfo& entry : dense) {
    const std::optional<std::uint64_t> number = NumberOf(entry.name, "dense-");
    if (number && !is_kept(*number)) paths.push_back(DensePath(*number));
  }
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> filters, ListOrNone(At("admission")));
  for (const FileInfo& entry : filters) {
    const std::optional<std::uint64_t> number = NumberOfFilter(entry.name);
    if (!number || is_kept(*number) || entry.name.ends_with(".tmp")) continue;
    paths.push_back(JoinPath(At("admission"), entry.name));
  }
  return paths;
}

Status RunFolderImpl::RemoveStrays() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::string> paths, ListStrays());
  for (const std::string& path : paths) TERRACE_RETURN_IF_ERROR(RemoveFile(fs_, path));
  return OkStatus();
}

void RunFolderImpl::ScrubMarkers(std::vector<Finding>* findings, Status* refused) {
  const auto judge = [&](const std::string& folder, const Status& status) {
    if (status.ok()) return;
    findings->push_back({JoinPath(folder, kRunMarkerName), 0, status.message()});
    const bool damage =
        status.code() == StatusCode::kCorruption || status.code() == StatusCode::kNotFound;
    if (!damage && refused->ok()) *refused = status;
  };
  judge(path_, marker_status_);
  for (const std::string& folder : marker_.ssd_folders) {
    const Result<RunMarker> marker = ReadRunMarker(fs_, folder);
    judge(folder, marker.status());
    if (marker.ok() && marker->id != marker_.id) {
      judge(folder, InvalidArgumentError(fmt::format(
                        "'{}' carries the marker of another run than '{}'", folder, path_)));
    }
  }
}

Status RunFolderImpl::RestoreMarkers(const Checkpoint& checkpoint, const Job& job) {
  if (!marker_status_.ok()) {
    marker_ = MarkerOf(checkpoint, AbsoluteAll(job.ssd.paths));
    for (const std::string& folder : marker_.ssd_folders) {
      Result<RunMarker> other = ReadRunMarker(fs_, folder);
      if (!other.ok()) continue;
      marker_ = std::move(other).value();  // It says all that the lost one said.
      break;
    }
    TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, path_, marker_));
    marker_status_ = OkStatus();
  }
  for (const std::string& folder : marker_.ssd_folders) {
    if (ReadRunMarker(fs_, folder).ok()) continue;
    TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(folder));
    TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, folder, marker_));
  }
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<RunFolder>> RunFolder::Open(FileSystem* fs, const std::string& path,
                                                   Mode mode, const Job* job) {
  auto folder = std::make_unique<RunFolderImpl>(fs, path, job);
  if (mode == Mode::kRead) {
    TERRACE_RETURN_IF_ERROR(folder->OpenForReading());
  } else if (mode == Mode::kScrub || mode == Mode::kRepair) {
    TERRACE_RETURN_IF_ERROR(folder->OpenDamaged(mode));
  } else {
    TERRACE_CHECK(job != nullptr);
    TERRACE_RETURN_IF_ERROR(folder->OpenForWriting(mode));
  }
  return std::unique_ptr<RunFolder>(std::move(folder));
}

Result<HeldCheckpoint> HoldNewestCheckpoint(RunFolder* run) {
  // Each round loses only against a trainer that has dropped one more checkpoint meanwhile.
  constexpr int kRounds = 100;
  for (int round = 0; round < kRounds; ++round) {
    TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> ids, run->ListCheckpoints());
    if (ids.empty()) {
      return NotFoundError(fmt::format(
          "the run '{}' has no checkpoint yet: wait for its first, or train it", run->path()));
    }
    const auto lost = [](const Status& status) {
      return status.code() == StatusCode::kNotFound || status.code() == StatusCode::kUnavailable;
    };
    Result<std::unique_ptr<FileLock>> hold = run->HoldCheckpoint(ids.back());
    if (!hold.ok() && lost(hold.status())) continue;
    if (!hold.ok()) return hold.status();
    // Read again: it may have gone between the list and the hold.
    Result<Checkpoint> checkpoint = run->ReadCheckpoint(ids.back());
    if (!checkpoint.ok() && lost(checkpoint.status())) continue;
    if (!checkpoint.ok()) return checkpoint.status();
    return HeldCheckpoint{std::move(checkpoint).value(), std::move(hold).value()};
  }
  return UnavailableError(
      fmt::format("the checkpoints of '{}' change faster than they can be read", run->path()));
}

}  // namespace terrace
