// RunFolder and checkpoints: what a run leaves on disk and how one cut of it is named
// (docs/formats/checkpoint.md).
//   RUN (marker)  LOCK  job.yaml  metrics.jsonl  summary.json  checkpoints/checkpoint-00000012
//   dense/dense-00000012 admission/filter-00000012-<table> rows/<table>/shard-<s>/...
//   (or <ssd path>/<run name>-<id>/<table>/shard-<s>/...)
// Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/data/batch.h"
#include "terrace/io/file_system.h"
#include "terrace/io/framed_file.h"
#include "terrace/model/network.h"
#include "terrace/store/parameter_file.h"
#include "terrace/store/store.h"
#include "terrace/table/admission_filter.h"
#include "terrace/train/job.h"

namespace terrace {

// All that a checkpoint holds beside rows and dense state. One file, published by rename; the
// commit point of the run.
struct Checkpoint {
  std::uint64_t id = 0;
  DataCursor cursor;
  std::uint64_t steps = 0;  // Mini-batches trained.
  bool finished = false;    // Training is done.
  struct StoreManifest {
    std::string table;
    std::uint32_t shard = 0;
    std::uint32_t row_bytes = 0;
    std::string directory;  // Absolute, or relative to the run folder.
    std::string schema;     // RowSchema::ToText().
    ManifestReference manifest;
    IndexKind index = IndexKind::kKey;
    std::uint32_t block_bytes = 0;       // By group: as GroupShape's.
    RecordLayout record_layout() const;  // Of its parameter files.
  };
  std::vector<StoreManifest> stores;
  std::vector<FileDigest>
      dense;  // One per replica; the file is dense/dense-<id> (one replica now).
  struct FilterFile {
    std::string table;
    FileDigest digest;
  };
  std::vector<FilterFile> admission;  // One per table that counts shows.
  std::uint64_t metrics_bytes = 0;    // metrics.jsonl is cut back to this on resume.
  // XXH3-64 of these bytes; none: of a program that made none.
  std::optional<std::uint64_t> metrics_checksum;
  std::string progressive;    // ClickMetrics::Save() of the whole run.
  std::string window;         // ... of the current metrics interval.
  std::string trainer_state;  // JSON of counters that the trainer carries over a resume.
  std::string dense_network;  // Network::ToText().
  std::vector<std::pair<std::string, std::string>> identity;  // IdentifyingSettings().
  std::string job_yaml;  // JobToYaml() of the run that made it.
};

// The differences between the settings of a run and those of now. kInvalidArgument: a line each
// with the path and both values, and what to do. `accept` names settings whose difference is only
// logged: "processor", "threads", and "data" for other files in the same order of reading.
Status CompareIdentity(const std::vector<std::pair<std::string, std::string>>& run,
                       const std::vector<std::pair<std::string, std::string>>& now,
                       const std::vector<std::string>& accept);

// How many files the settings name, as far as that can be told; 0: none.
std::size_t FilesOfIdentity(const std::vector<std::pair<std::string, std::string>>& settings);
// Whether they name other files, or of other sizes.
bool FilesDiffer(const std::vector<std::pair<std::string, std::string>>& run,
                 const std::vector<std::pair<std::string, std::string>>& now);

class RunFolder {
 public:
  enum class Mode {
    kNew,  // kInvalidArgument when it holds a run, naming --resume and --overwrite; or other files,
           // naming them.
    kOverwrite,  // Deletes the run that carries our marker, rows on ssd.paths too, and of its
                 // folders nothing else; anything else is refused.
    kResume,     // The run there; without one, as kNew.
    kRead,   // A reader beside the trainer: takes no lock, writes nothing. kNotFound without a run.
    kScrub,  // As kRead, and damaged markers are no error: ScrubMarkers tells.
    kRepair,  // As kScrub, alone with the run.
  };
  // Takes LOCK except for kRead and kScrub. kUnavailable: another process holds the run, with its
  // pid. `job` is for the first three.
  static Result<std::unique_ptr<RunFolder>> Open(FileSystem* fs, const std::string& path, Mode mode,
                                                 const Job* job);
  virtual ~RunFolder() = default;

  virtual const std::string& path() const = 0;
  // The folder of a store: inside the run, or on ssd.paths (a shard lies on one path: shard %
  // paths).
  virtual std::string StoreDirectory(const std::string& table, std::uint32_t shard) const = 0;
  // What Checkpoint::StoreManifest::directory says of it: relative to the run where it lies inside,
  // so that a run may be moved. ResolveDirectory is the way back.
  virtual std::string RecordedDirectory(const std::string& table, std::uint32_t shard) const = 0;
  virtual std::string ResolveDirectory(const std::string& recorded) const = 0;
  // Ids of the checkpoints, oldest first; a file that is no whole checkpoint is left out with a
  // warning.
  virtual Result<std::vector<std::uint64_t>> ListCheckpoints() = 0;
  // Ids of all that lie there, whole or not.
  virtual Result<std::vector<std::uint64_t>> ListCheckpointFiles() = 0;
  // Of a run without any. kCorruption: there were some, which are gone.
  virtual Status RefuseLostCheckpoints() = 0;
  // The checkpoint that summary.json tells of, where neither its file nor a newer one is there, for
  // somebody has taken it away.
  virtual Result<std::optional<std::uint64_t>> FindLostCheckpoint() = 0;
  // Before the run goes on from checkpoint `id`: removes a summary.json of a later one, which this
  // run makes anew. Until then nothing is to tell of it.
  virtual Status RemoveSummaryBeyond(std::uint64_t id) = 0;
  virtual Result<Checkpoint> ReadCheckpoint(std::uint64_t id) = 0;
  virtual Result<DenseState> ReadDense(const Checkpoint& checkpoint) = 0;
  // Writes dense/dense-<id>, durable; the digest goes into Checkpoint::dense.
  virtual Result<FileDigest> WriteDense(std::uint64_t id, const DenseState& state) = 0;
  // Writes admission/filter-<id>-<table>, durable; the digest goes into Checkpoint::admission. The
  // filter's image gets its frame.
  virtual Result<FileDigest> WriteFilter(std::uint64_t id, const std::string& table,
                                         AdmissionFilter* filter) = 0;
  // Fills the filter of the table. kCorruption: the file, or the checkpoint names none.
  virtual Status ReadFilter(const Checkpoint& checkpoint, const std::string& table,
                            AdmissionFilter* filter) = 0;
  // Publishes. Everything that it names is durable already. The bytes that its file takes, which
  // were reserved of `quota`, if there is one.
  virtual Result<std::uint64_t> WriteCheckpoint(const Checkpoint& checkpoint,
                                                DiskQuota* quota = nullptr) = 0;
  // Publishes it in the place of the one with its id, which names the same files. kUnavailable: a
  // reader holds that one; nothing was changed.
  virtual Status RewriteCheckpoint(const Checkpoint& checkpoint) = 0;
  // Removes the checkpoint's file (first), its dense file and filters. kUnavailable: a reader holds
  // it; nothing was removed. The caller drops the stores' manifests afterwards.
  virtual Status DropCheckpoint(std::uint64_t id) = 0;
  // A reader's hold on a checkpoint: while it lives, a trainer keeps it and its files.
  virtual Result<std::unique_ptr<FileLock>> HoldCheckpoint(std::uint64_t id) = 0;
  // Paths of dense files, filters and temporaries that no checkpoint names, whole or not.
  virtual Result<std::vector<std::string>> ListStrays() = 0;
  // Removes them. Trainer only, at start.
  virtual Status RemoveStrays() = 0;
  // What is wrong with the markers of the run, on its other disks too. `refused`: the first of it
  // that is no damage, as a newer format.
  virtual void ScrubMarkers(std::vector<Finding>* findings, Status* refused) = 0;
  // Writes the markers that are damaged anew: from a whole one, else from what `checkpoint` and its
  // job say.
  virtual Status RestoreMarkers(const Checkpoint& checkpoint, const Job& job) = 0;
  // Removes what Open made, folders that were not there before included; nothing of a run that it
  // found and goes on with. REQUIRES: nothing in the run is open. The folder is used no more.
  virtual Status Abandon() = 0;
};

// A checkpoint that a reader holds.
struct HeldCheckpoint {
  Checkpoint checkpoint;
  std::unique_ptr<FileLock> hold;
};
// Of a run that has checkpoints, but not the one that it ended with.
Status WarnOfLostCheckpoint(RunFolder* run);

// The newest whole checkpoint, held; looks again when a trainer drops it meanwhile. kNotFound:
// there is none yet. Warns of a newer one that was taken away.
Result<HeldCheckpoint> HoldNewestCheckpoint(RunFolder* run);

// Version 5 has a store of larger blocks than the least ones, 4 the checksum of the metrics, as all
// that are made anew; 3 has a store by group, 2 names admission filters, 1 has none of these.
inline constexpr std::uint32_t kCheckpointVersion = 5;
std::uint32_t CheckpointVersionOf(const Checkpoint& checkpoint);
// In the folder "checkpoints" of a run.
std::string CheckpointFileName(std::uint64_t id);
// A path or name that is to stand in a checkpoint. kInvalidArgument, with `what` it is: it is no
// UTF-8 text.
Status CheckUtf8(std::string_view what, const std::string& text);
// The payload of a checkpoint file, and back (kCorruption: no such payload). For tests too.
Result<std::string> EncodeCheckpoint(const Checkpoint& checkpoint);
Result<Checkpoint> DecodeCheckpoint(const std::string& payload);
// Behind `room` bytes for a frame.
std::string EncodeDense(const DenseState& state, std::size_t room = 0);
Result<DenseState> DecodeDense(const std::string& payload);

}  // namespace terrace
