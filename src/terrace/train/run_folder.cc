// RunFolderImpl: the folder of a run, its marker and its lock.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include <fmt/format.h>

#include "terrace/base/clock.h"
#include "terrace/base/log.h"
#include "terrace/base/rng.h"
#include "terrace/base/sync_point.h"
#include "terrace/io/same_file.h"
#include "terrace/train/run_folder_impl.h"
#include "terrace/train/summary.h"

namespace terrace {
namespace {

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

}  // namespace

std::string RunFolderImpl::RecordedDirectory(const std::string& table, std::uint32_t shard) const {
  const std::string place = fmt::format("{}/shard-{}", table, shard);
  if (marker_.ssd_folders.empty()) return "rows/" + place;
  return JoinPath(marker_.ssd_folders[shard % marker_.ssd_folders.size()], place);
}

Status RunFolderImpl::OpenForReading() {
  Result<RunMarker> marker = ReadRunMarker(fs_, path_);
  if (!marker.ok()) {
    if (marker.status().code() != StatusCode::kNotFound) return marker.status();
    TERRACE_RETURN_IF_ERROR(RefuseLostMarker());
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
  return mode == Mode::kRepair ? CheckSsdOwner() : OkStatus();
}

Status RunFolderImpl::RefuseLostMarker() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> files, ListCheckpointFiles());
  if (files.empty()) return OkStatus();
  return CorruptionError(fmt::format(
      "the run '{}' has lost its marker, the file RUN in it; nothing was changed", path_));
}

Status RunFolderImpl::RefuseForeign() {
  TERRACE_RETURN_IF_ERROR(RefuseLostMarker());
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
  TERRACE_ASSIGN_OR_RETURN(const bool has_run, Exists(At(kRunMarkerName)));
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
  // A folder whose RUN is no marker of ours stays as it is, without a lock of ours too. One that
  // another process has removed meanwhile is no matter yet.
  const Status marker = ReadRunMarker(fs_, path_).status();
  if (!marker.ok() && marker.code() != StatusCode::kNotFound) return marker;
  return true;
}

Status RunFolderImpl::TakeLock() {
  const std::string path = At(kLock);
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs_->Open(path, OpenMode::kAppend));
  Result<std::unique_ptr<FileLock>> lock = fs_->Lock(path, /*exclusive=*/true);
  const Status given_up = UnavailableError(
      fmt::format("another process has just given up the run '{}': start again", path_));
  if (lock.status().code() == StatusCode::kNotFound) return given_up;
  if (!lock.ok()) {
    if (lock.status().code() != StatusCode::kUnavailable) return lock.status();
    // Which may have gone, or be about to be written.
    const Result<std::string> text = ReadFileToString(fs_, path);
    std::string holder = text.ok() ? *text : "";
    while (!holder.empty() && holder.back() == '\n') holder.pop_back();
    return UnavailableError(fmt::format(
        "process {} holds the run '{}': wait until it ends, or end it with kill -INT {}",
        holder.empty() ? "(unknown)" : holder, path_, holder.empty() ? "<pid>" : holder));
  }
  lock_ = std::move(lock).value();
  TERRACE_RETURN_IF_ERROR(file->Truncate(0));
  const std::string pid = fmt::format("{}\n", getpid());
  TERRACE_RETURN_IF_ERROR(file->WriteAt(0, std::as_bytes(std::span(pid))));
  // A process that abandoned its run removed the file that this one had opened.
  const Result<std::string> holder = ReadFileToString(fs_, path);
  if (holder.ok() && *holder == pid) return OkStatus();
  if (!holder.ok() && holder.status().code() != StatusCode::kNotFound) return holder.status();
  return given_up;
}

Status RunFolderImpl::OpenForWriting(Mode mode) {
  Result<FileInfo> info = fs_->Stat(path_);
  if (info.ok() && !info->is_directory) {
    return InvalidArgumentError(
        fmt::format("output '{}' is a file; a run needs a folder of its own", path_));
  }
  if (!info.ok() && info.status().code() != StatusCode::kNotFound) return info.status();
  if (info.ok()) TERRACE_RETURN_IF_ERROR(Inspect(mode).status());
  // Folders of rows are told with the whole of their path, the working directory's included.
  for (const std::string& path : AbsoluteAll(job_->ssd.paths)) {
    TERRACE_RETURN_IF_ERROR(CheckUtf8("ssd.paths", path));
  }
  if (!job_->ssd.paths.empty()) TERRACE_RETURN_IF_ERROR(CheckUtf8("output", Absolute(path_)));
  if (mode != Mode::kResume) TERRACE_RETURN_IF_ERROR(CheckSsdPaths());
  const Status made = MakeFolders(path_);
  // A file, or a link that leads nowhere, where the path wants a folder.
  if (made.code() == StatusCode::kNotFound) {
    return InvalidArgumentError(made.message()).WithContext("output");
  }
  TERRACE_RETURN_IF_ERROR(made);
  TERRACE_RETURN_IF_ERROR(TakeLock());
  // Once more: another process may have begun a run before the lock was ours.
  TERRACE_ASSIGN_OR_RETURN(const bool has_run, Inspect(mode));
  if (!has_run) return Create();
  TERRACE_ASSIGN_OR_RETURN(marker_, ReadRunMarker(fs_, path_));
  TERRACE_RETURN_IF_ERROR(CheckSsdOwner());
  if (mode == Mode::kResume) {
    TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> files, ListCheckpointFiles());
    if (!files.empty()) return CheckResume();
    TERRACE_RETURN_IF_ERROR(RefuseLostCheckpoints());
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
  for (const std::string& folder : marker_.ssd_folders) {
    TERRACE_ASSIGN_OR_RETURN(const bool exists, Exists(folder));
    if (exists) continue;
    return InvalidArgumentError(
        fmt::format("ssd.paths: the folder '{}' with rows of this run is not there; nothing was "
                    "changed: mount that disk, or put the folder back",
                    folder));
  }
  return TakeSsdFolders();
}

Status RunFolderImpl::RefuseLostCheckpoints() {
  // A process that never took one may have tried as often as this.
  constexpr std::uint64_t kMostAttempts = 3;
  TERRACE_ASSIGN_OR_RETURN(const bool has_summary, Exists(At("summary.json")));
  TERRACE_ASSIGN_OR_RETURN(const std::uint64_t dense, NewestDense());
  TERRACE_ASSIGN_OR_RETURN(const bool removing, Exists(At(kRemoving)));
  if (removing || (!has_summary && dense <= kMostAttempts)) return OkStatus();
  return CorruptionError(fmt::format(
      "'{}' has lost its checkpoints: {} is there, but none in '{}'. Nothing was changed: put them "
      "back, or train --overwrite deletes the run and starts anew",
      path_, has_summary ? "summary.json" : fmt::format("dense state {}", dense),
      At("checkpoints")));
}

std::optional<std::uint64_t> RunFolderImpl::CheckpointOfSummary() {
  const Result<std::string> json = ReadFileToString(fs_, At("summary.json"));
  if (!json.ok()) return std::nullopt;
  const Result<RunSummary> summary = SummaryFromJson(*json);
  return summary.ok() ? std::optional(summary->checkpoint) : std::nullopt;
}

Result<std::optional<std::uint64_t>> RunFolderImpl::FindLostCheckpoint() {
  const std::optional<std::uint64_t> told = CheckpointOfSummary();
  // After it: beside a trainer, the checkpoint that a summary tells of is there first.
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> files, ListCheckpointFiles());
  const bool lost = told && (files.empty() || files.back() < *told);
  return lost ? told : std::nullopt;
}

Status RunFolderImpl::RemoveSummaryBeyond(std::uint64_t id) {
  const std::optional<std::uint64_t> told = CheckpointOfSummary();
  return told && *told > id ? RemoveFile(At("summary.json")) : OkStatus();
}

Status RunFolderImpl::CheckSsdPaths() {
  for (const std::string& path : AbsoluteAll(job_->ssd.paths)) {
    // What lies in the run's folder is made with it.
    if (path.starts_with(Absolute(path_) + "/")) continue;
    Status status = MakeFolders(path);
    if (status.ok()) status = fs_->CheckFolder(path);
    if (status.ok()) continue;
    TERRACE_RETURN_IF_ERROR(Abandon());
    return (status.code() == StatusCode::kNotFound ? InvalidArgumentError(status.message())
                                                   : status)
        .WithContext(fmt::format("ssd.paths: rows can't lie in '{}'; nothing was changed", path));
  }
  return OkStatus();
}

Status RunFolderImpl::Create() {
  created_ = true;
  const std::string absolute = Absolute(path_);
  marker_ = RunMarker();
  marker_.created_micros = static_cast<std::uint64_t>(Clock::Real()->WallMicros());
  marker_.id = NewRunId(absolute, marker_.created_micros, getpid());
  marker_.shards = static_cast<std::uint64_t>(job_->ssd.shards);
  marker_.ssd_paths = AbsoluteAll(job_->ssd.paths);
  const std::string name = absolute.substr(absolute.rfind('/') + 1);
  for (const std::string& path : marker_.ssd_paths) {
    marker_.ssd_folders.push_back(JoinPath(path, fmt::format("{}-{}", name, marker_.id)));
  }
  if (!marker_.ssd_folders.empty()) marker_.run_folder = RealPath(absolute);
  // The marker first: it names the other folders, so that whatever a crash leaves can be deleted.
  SyncPoint::Hit("run.create.before_marker");
  TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, path_, marker_));
  SyncPoint::Hit("run.create.after_marker");
  for (const std::string& folder : marker_.ssd_folders) {
    TERRACE_RETURN_IF_ERROR(MakeFolders(folder));
    TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, folder, marker_));
  }
  TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(At("checkpoints")));
  TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(At("dense")));
  TERRACE_RETURN_IF_ERROR(KeepJob(JobToYaml(*job_)));
  return fs_->SyncDirectory(path_);
}

Status RunFolderImpl::MakeFolders(const std::string& path) {
  std::vector<std::string> missing;
  for (std::filesystem::path folder = Absolute(path); folder != folder.root_path();
       folder = folder.parent_path()) {
    TERRACE_ASSIGN_OR_RETURN(const bool exists, Exists(folder.string()));
    if (exists) break;
    missing.push_back(folder.string());
  }
  made_folders_.insert(made_folders_.end(), missing.rbegin(), missing.rend());
  return fs_->MakeDirectories(path);
}

Status RunFolderImpl::Abandon() {
  if (created_) {
    TERRACE_RETURN_IF_ERROR(RemoveRun());
    TERRACE_RETURN_IF_ERROR(RemoveFile(At(kLock)));
  }
  for (auto folder = made_folders_.rbegin(); folder != made_folders_.rend(); ++folder) {
    // One that holds something by now is another's too, and stays.
    const Status removed = fs_->RemoveDirectory(*folder);
    if (!removed.ok()) LogText(LogLevel::kDebug, removed.message());
  }
  return OkStatus();
}

// Each folder on ssd.paths that is there must be this run's, or empty.
Status RunFolderImpl::CheckSsdMarkers() {
  for (const std::string& folder : marker_.ssd_folders) {
    Result<std::vector<FileInfo>> entries = fs_->List(folder);
    if (!entries.ok()) {
      TERRACE_ASSIGN_OR_RETURN(const bool exists, Exists(folder));
      if (!exists) continue;
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

Status RunFolderImpl::CheckOwner(const std::string& owner, const std::string& folder) {
  const std::string here = RealPath(Absolute(path_));
  if (owner == here || IsSameFile(owner, here)) return OkStatus();
  moved_ = true;
  const Result<RunMarker> other = ReadRunMarker(fs_, owner);
  if (other.status().code() == StatusCode::kNotFound) return OkStatus();
  if (other.ok() && other->id != marker_.id) return OkStatus();  // Another run, begun there later.
  if (!other.ok()) {
    return other.status().WithContext(fmt::format(
        "the rows in '{}' belong to the run folder '{}', not to '{}', and whether that one is "
        "still there cannot be told; nothing was changed",
        folder, owner, here));
  }
  return InvalidArgumentError(fmt::format(
      "'{0}' is a copy of the run folder '{1}', which is still there: the rows in '{2}' belong to "
      "that one. Nothing was changed. Train '{1}', or name another output; delete the copy by "
      "hand, without its rows; or delete '{1}' by hand to go on with the copy",
      here, owner, folder));
}

Status RunFolderImpl::CheckSsdOwner() {
  moved_ = false;
  if (marker_.ssd_folders.empty()) return OkStatus();
  bool said = false;
  const auto check = [&](const RunMarker& marker, const std::string& folder) -> Status {
    if (marker.run_folder.empty()) {
      moved_ = true;  // Whose the rows are gets said.
      return OkStatus();
    }
    said = true;
    return CheckOwner(marker.run_folder, folder);
  };
  for (const std::string& folder : marker_.ssd_folders) {
    const Result<RunMarker> marker = ReadRunMarker(fs_, folder);
    // One that is damaged or gone says nothing, and one of another run is no matter of owners.
    if (!marker.ok() || marker->id != marker_.id) continue;
    TERRACE_RETURN_IF_ERROR(check(*marker, folder));
  }
  TERRACE_RETURN_IF_ERROR(check(marker_, marker_.ssd_folders[0]));
  if (said || BeganIn(marker_, Absolute(path_))) return OkStatus();
  return InvalidArgumentError(fmt::format(
      "the run '{}' did not begin there, and '{}' does not say whose its rows are (an older "
      "program wrote it): this folder was moved, or is a copy. Nothing was changed. Move it back "
      "to the path where the run began, --resume it there, and move it then; delete a copy by "
      "hand, without its rows",
      Absolute(path_), marker_.ssd_folders[0]));
}

Status RunFolderImpl::TakeSsdFolders() {
  if (!moved_) return OkStatus();
  const std::string before = marker_.run_folder;
  marker_.run_folder = RealPath(Absolute(path_));
  for (const std::string& folder : marker_.ssd_folders) {
    const Result<RunMarker> marker = ReadRunMarker(fs_, folder);
    if (!marker.ok() || marker->id != marker_.id) continue;
    TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, folder, marker_));
  }
  // Last: until then the next resume finds that the run was moved.
  TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, path_, marker_));
  moved_ = false;
  if (before.empty()) return OkStatus();
  LogText(LogLevel::kInfo,
          fmt::format("the run was moved from '{}': its rows in {} are those of "
                      "'{}' now",
                      before, fmt::join(marker_.ssd_folders, ", "), marker_.run_folder));
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
    if (!marker_.ssd_folders.empty()) marker_.run_folder = RealPath(Absolute(path_));
    for (const std::string& folder : marker_.ssd_folders) {
      Result<RunMarker> other = ReadRunMarker(fs_, folder);
      if (!other.ok()) continue;
      marker_ = std::move(other).value();  // It says all that the lost one said.
      break;
    }
    TERRACE_RETURN_IF_ERROR(CheckSsdOwner());
    TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, path_, marker_));
    marker_status_ = OkStatus();
  }
  TERRACE_RETURN_IF_ERROR(TakeSsdFolders());
  for (const std::string& folder : marker_.ssd_folders) {
    if (ReadRunMarker(fs_, folder).ok()) continue;
    TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(folder));
    TERRACE_RETURN_IF_ERROR(WriteRunMarker(fs_, folder, marker_));
  }
  return OkStatus();
}

Result<std::unique_ptr<RunFolder>> RunFolder::Open(FileSystem* fs, const std::string& path,
                                                   Mode mode, const Job* job) {
  auto folder = std::make_unique<RunFolderImpl>(fs, path, job);
  if (mode == Mode::kRead) {
    TERRACE_RETURN_IF_ERROR(folder->OpenForReading());
  } else if (mode == Mode::kScrub || mode == Mode::kRepair) {
    TERRACE_RETURN_IF_ERROR(folder->OpenDamaged(mode));
  } else {
    TERRACE_CHECK(job != nullptr);
    const Status opened = folder->OpenForWriting(mode);
    if (!opened.ok()) {
      const Status abandoned = folder->Abandon();
      if (!abandoned.ok()) LogText(LogLevel::kWarning, abandoned.message());
      return opened;
    }
  }
  return std::unique_ptr<RunFolder>(std::move(folder));
}

}  // namespace terrace
