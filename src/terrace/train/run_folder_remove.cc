// RunFolderImpl: how a run is deleted, and nothing but what is of it.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/base/log.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/read_cost.h"
#include "terrace/train/run_folder_impl.h"

namespace terrace {
namespace {

// What a run makes in its folder, beside marker and lock.
// In the order in which they are removed: what tells of checkpoints with them.
constexpr const char* kContents[] = {"checkpoints", "summary.json", "dense",        "admission",
                                     "rows",        "job.yaml",     "metrics.jsonl"};

const std::string kMarkerTemporary = std::string(kRunMarkerName) + ".tmp";

bool IsDigits(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool IsShard(std::string_view name) {
  return name.starts_with("shard-") && IsDigits(name.substr(6));
}

// Removes the folder of a table, but what is not of it, and the folder then, too.
Status RemoveTable(FileSystem* fs, const std::string& folder, std::vector<std::string>* foreign) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs->List(folder));
  const std::size_t before = foreign->size();
  for (const FileInfo& entry : entries) {
    const std::string path = JoinPath(folder, entry.name);
    if (IsShard(entry.name)) {
      TERRACE_RETURN_IF_ERROR(RemoveStore(fs, path, foreign));
    } else {
      foreign->push_back(path);
    }
  }
  return foreign->size() == before ? fs->RemoveDirectory(folder) : OkStatus();
}

// Of a folder with the rows of tables, all but the folder itself, and its marker, if it has one.
Status RemoveTables(FileSystem* fs, const std::string& folder, bool has_marker,
                    std::vector<std::string>* foreign) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs->List(folder));
  for (const FileInfo& entry : entries) {
    const std::string path = JoinPath(folder, entry.name);
    if (entry.is_directory) {
      TERRACE_RETURN_IF_ERROR(RemoveTable(fs, path, foreign));
      continue;
    }
    // Somebody has put a table elsewhere: the link goes, what it leads to is not looked at, and
    // need not be there.
    TERRACE_ASSIGN_OR_RETURN(const bool to_folder, IsLinkToFolder(fs, path));
    const bool is_link = to_folder || fs->Stat(path).status().code() == StatusCode::kNotFound;
    if (is_link || IsReadCostName(entry.name)) {
      TERRACE_RETURN_IF_ERROR(fs->Remove(path));
    } else if (!has_marker || (entry.name != kRunMarkerName && entry.name != kMarkerTemporary)) {
      foreign->push_back(path);
    }
  }
  return OkStatus();
}

// One of kContents.
Status RemoveContents(FileSystem* fs, std::string_view name, const std::string& path,
                      std::vector<std::string>* foreign) {
  const Result<FileInfo> info = fs->Stat(path);
  if (info.status().code() == StatusCode::kNotFound || (info.ok() && !info->is_directory)) {
    const Status removed = fs->Remove(path);  // A file, or a link that leads nowhere.
    return removed.code() == StatusCode::kNotFound ? OkStatus() : removed;
  }
  TERRACE_RETURN_IF_ERROR(info.status());
  if (name != "rows") return RemoveOwnFiles(fs, path, IsOfCheckpoint, foreign);
  const std::size_t before = foreign->size();
  TERRACE_RETURN_IF_ERROR(RemoveTables(fs, path, /*has_marker=*/false, foreign));
  return foreign->size() == before ? fs->RemoveDirectory(path) : OkStatus();
}

}  // namespace

Status RunFolderImpl::RefuseLinks() const {
  std::vector<std::string> folders = marker_.ssd_folders;
  for (const char* name : kContents) folders.push_back(At(name));
  for (const std::string& folder : folders) {
    TERRACE_ASSIGN_OR_RETURN(const bool is_link, IsLinkToFolder(fs_, folder));
    if (!is_link) continue;
    return InvalidArgumentError(fmt::format(
        "'{}' is a link to a folder, which --overwrite does not delete through. Nothing was "
        "changed. Move the folder back in the link's place, or delete the run by hand",
        folder));
  }
  return OkStatus();
}

Status RunFolderImpl::RemoveRun() {
  TERRACE_RETURN_IF_ERROR(CheckSsdMarkers());
  TERRACE_RETURN_IF_ERROR(RefuseLinks());
  // Made after the folders, and gone before them.
  TERRACE_ASSIGN_OR_RETURN(const bool was_whole, Exists(At("job.yaml")));
  // Else what a loss of power brings back would be a run that has lost its checkpoints. On a full
  // disk it can't be said, and the run has to be deleted once more by --overwrite then.
  Status said = fs_->Open(At(kRemoving), OpenMode::kAppend).status();
  if (said.ok()) said = fs_->SyncDirectory(path_);
  if (!said.ok()) LogText(LogLevel::kDebug, said.message());
  // Checkpoints first, and durably: from then on nobody finds what is being deleted, after a loss
  // of power either. The marker last: a crash leaves a folder that --overwrite still accepts.
  std::vector<std::string> foreign;
  std::vector<std::string> markers;  // In folders that stay: they say whose these are till the end.
  for (const char* name : kContents) {
    TERRACE_RETURN_IF_ERROR(RemoveContents(fs_, name, At(name), &foreign));
    if (name == kContents[0]) TERRACE_RETURN_IF_ERROR(fs_->SyncDirectory(path_));
  }
  SyncPoint::Hit("run.remove.after_contents");
  for (const std::string& folder : marker_.ssd_folders) {
    TERRACE_ASSIGN_OR_RETURN(const bool exists, Exists(folder));
    if (!exists) {
      if (was_whole) {
        LogText(LogLevel::kWarning,
                fmt::format("'{}' is not there: rows that the run has on it, if its disk is just "
                            "not mounted, stay there",
                            folder));
      }
      continue;
    }
    const std::size_t before = foreign.size();
    TERRACE_RETURN_IF_ERROR(RemoveTables(fs_, folder, /*has_marker=*/true, &foreign));
    TERRACE_RETURN_IF_ERROR(RemoveFile(JoinPath(folder, kMarkerTemporary)));
    if (foreign.size() > before) {
      markers.push_back(JoinPath(folder, kRunMarkerName));
      continue;
    }
    TERRACE_RETURN_IF_ERROR(RemoveFile(JoinPath(folder, kRunMarkerName)));
    TERRACE_RETURN_IF_ERROR(fs_->RemoveDirectory(folder));
  }
  // Gone for good before the marker that names them goes.
  for (const std::string& path : marker_.ssd_paths) {
    const Status synced = fs_->SyncDirectory(path);
    if (!synced.ok() && synced.code() != StatusCode::kNotFound) return synced;
  }
  TERRACE_RETURN_IF_ERROR(RemoveTemporaries(path_));
  TERRACE_RETURN_IF_ERROR(fs_->SyncDirectory(path_));
  TERRACE_RETURN_IF_ERROR(TellForeign(&foreign));
  // A run that is given up leaves a folder that --overwrite accepts once more.
  if (created_ && !foreign.empty()) return OkStatus();
  SyncPoint::Hit("run.remove.before_marker");
  TERRACE_RETURN_IF_ERROR(RemoveFile(At(kRunMarkerName)));
  TERRACE_RETURN_IF_ERROR(fs_->SyncDirectory(path_));
  for (const std::string& marker : markers) TERRACE_RETURN_IF_ERROR(RemoveFile(marker));
  return OkStatus();
}

Status RunFolderImpl::TellForeign(std::vector<std::string>* foreign) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> left, fs_->List(path_));
  for (const FileInfo& entry : left) {
    if (entry.name == kLock || entry.name == kRunMarkerName) continue;
    const bool told = std::any_of(foreign->begin(), foreign->end(), [&](const std::string& path) {
      return path.starts_with(At(entry.name) + "/");
    });
    if (!told) foreign->push_back(At(entry.name));
  }
  for (const std::string& path : *foreign) {
    // With ssd.paths in a folder of the run, what was met there was of the run after all.
    TERRACE_ASSIGN_OR_RETURN(const bool exists, Exists(path));
    if (exists) {
      LogText(LogLevel::kWarning, fmt::format("'{}' is not of the run and stays", path));
    }
  }
  return OkStatus();
}

}  // namespace terrace
