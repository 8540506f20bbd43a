// RunFolderImpl: the only RunFolder; run_folder.cc has the folder itself, its marker and its lock,
// run_folder_checkpoints.cc what lies in it, run_folder_remove.cc how it goes. Threads: as
// RunFolder.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "terrace/train/checkpoint.h"
#include "terrace/train/run_marker.h"

namespace terrace {

// "checkpoint-00000012", "dense-00000012", "filter-00000012-ads", and such a name with .tmp.
bool IsOfCheckpoint(std::string name);

inline constexpr const char* kLock = "LOCK";
inline constexpr const char* kRemoving = "removing.tmp";  // Says that a run is being deleted.

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
  Status RefuseLostCheckpoints() override;
  Result<std::optional<std::uint64_t>> FindLostCheckpoint() override;
  Status RemoveSummaryBeyond(std::uint64_t id) override;
  Result<Checkpoint> ReadCheckpoint(std::uint64_t id) override;
  Result<DenseState> ReadDense(const Checkpoint& checkpoint) override;
  Result<FileDigest> WriteDense(std::uint64_t id, const DenseState& state) override;
  Result<FileDigest> WriteFilter(std::uint64_t id, const std::string& table,
                                 AdmissionFilter* filter) override;
  Status ReadFilter(const Checkpoint& checkpoint, const std::string& table,
                    AdmissionFilter* filter) override;
  Result<std::uint64_t> WriteCheckpoint(const Checkpoint& checkpoint, DiskQuota* quota) override;
  Status RewriteCheckpoint(const Checkpoint& checkpoint) override;
  Status DropCheckpoint(std::uint64_t id) override;
  Result<std::unique_ptr<FileLock>> HoldCheckpoint(std::uint64_t id) override;
  Result<std::vector<std::string>> ListStrays() override;
  Status RemoveStrays() override;
  void ScrubMarkers(std::vector<Finding>* findings, Status* refused) override;
  Status RestoreMarkers(const Checkpoint& checkpoint, const Job& job) override;
  Status Abandon() override;

 private:
  std::string At(std::string_view name) const { return JoinPath(path_, name); }
  std::string CheckpointPath(std::uint64_t id) const {
    return JoinPath(At("checkpoints"), CheckpointFileName(id));
  }
  std::string DensePath(std::uint64_t id) const { return At(fmt::format("dense/dense-{:08}", id)); }
  std::string FilterPath(std::uint64_t id, const std::string& table) const {
    return At(fmt::format("admission/filter-{:08}-{}", id, table));
  }
  Result<bool> Exists(const std::string& path) const;
  // NotFound is fine.
  Status RemoveFile(const std::string& path);
  // Nothing where it is not whole, or not there.
  std::optional<std::uint64_t> CheckpointOfSummary();
  // Nothing where the folder is not there.
  Result<std::vector<FileInfo>> ListOrNone(const std::string& folder);
  // Those of one checkpoint.
  Status RemoveFilters(std::uint64_t id);

  // Whether a run is there; refuses what `mode` may not touch.
  Result<bool> Inspect(Mode mode);
  // Of a folder without one. kCorruption: it has checkpoints.
  Status RefuseLostMarker();
  Status RefuseForeign();
  Status TakeLock();
  Status CheckResume();
  Status Create();
  // As MakeDirectories, and Abandon knows which of them were not there.
  Status MakeFolders(const std::string& path);
  Status CheckSsdMarkers();
  // Refuses a copy of a run folder that is still there: the rows on ssd.paths are that one's.
  Status CheckSsdOwner();
  // The same where the rows in `folder` are said to be those of the run folder `owner`.
  Status CheckOwner(const std::string& owner, const std::string& folder);
  // Says in all markers that the rows on ssd.paths are this folder's, where one says otherwise.
  Status TakeSsdFolders();
  // Whether a new run's rows may lie on ssd.paths, before anything is changed. Makes these folders.
  Status CheckSsdPaths();
  Result<std::uint64_t> NewestDense();  // Its number; 0: there is none.
  // Deletes the run, and names what in its folders is not of it, and stays.
  Status RemoveRun();
  // With what else is left in the folder.
  Status TellForeign(std::vector<std::string>* foreign);
  // Before it: what a link leads to may be another's, and would go in part.
  Status RefuseLinks() const;
  Status ListTemporaries(const std::string& folder, std::vector<std::string>* paths);
  Status RemoveTemporaries(const std::string& folder);
  // Writes job.yaml where it says something else.
  Status KeepJob(const std::string& yaml);

  FileSystem* const fs_;
  const std::string path_;
  const Job* const job_;  // Borrowed during Open; nullptr for a reader.
  RunMarker marker_;
  Status marker_status_;  // Why there is none; of kScrub and kRepair.
  bool moved_ = false;    // CheckSsdOwner: since its markers were written.
  std::unique_ptr<FileLock> lock_;
  std::set<std::uint64_t> left_out_;       // Checkpoints that were told to be damaged.
  bool created_ = false;                   // The run, by Open.
  std::vector<std::string> made_folders_;  // By Open, those that hold others first.
};

}  // namespace terrace
