// RunRepair: what a damaged run can go on from, and the way there. A plan first, which changes
// nothing; then, when its reader agrees, its execution. The run is locked meanwhile.
//
// What each damage admits:
//   - a checkpoint, its dense state or a manifest of it: go back to the newest that is whole
//   - records of a parameter file: a further checkpoint without the rows that are lost; training
//   makes
//     them anew when it meets them. Checkpoints that name the file as well are dropped
//   - a key section, a header, a footer: the file is written anew from its records, and nothing is
//   lost
//   - a marker, job.yaml: written anew from the checkpoint
//   - metrics.jsonl: the damaged lines are lost, and what else was changed in it stays; checkpoints
//     get its new checksum
//   - summary.json and read-cost: removed, and made again by the next trainer
//
// Killed at any moment, it leaves a run that can be repaired again: what the plan goes on from is
// touched only after its successor is published by rename. Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/store/store_repair.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/run_scrub.h"

namespace terrace {

struct RepairOptions {
  std::optional<std::uint64_t> back_to;  // A checkpoint; none: the newest that can be gone on from.
  std::optional<std::uint64_t> quota_bytes;  // Instead of the job's ssd.quota.
};

struct RepairPlan {
  std::vector<Finding> findings;
  // The checkpoint that the run goes on from, and where that stands.
  std::uint64_t base = 0;
  std::uint64_t base_examples = 0;
  // The newest that is there, and where it stands; no examples: its file can't be read.
  std::uint64_t newest = 0;
  std::optional<std::uint64_t> newest_examples;
  // The checkpoint that takes the base's place without what is lost; 0: the base itself stays.
  std::uint64_t successor = 0;
  struct StoreRepair {
    std::string table;
    std::uint32_t shard = 0;
    std::vector<std::string> files;  // That are written anew.
    StoreLosses losses;
    // Of a store with an index by group, whose losses are of blocks: the most rows of one, and the
    // hashes of the keys that go with them.
    std::uint32_t block_rows = 0;
    std::vector<HashRange> dropped_hashes, outdated_hashes;
  };
  std::vector<StoreRepair> stores;         // Those with damage.
  std::vector<std::uint64_t> dropped;      // Checkpoints, in order.
  std::optional<std::uint64_t> undamaged;  // One that names no damaged file, where rows are lost.
  std::uint64_t undamaged_examples = 0;
  bool markers = false, job = false, summary = false;
  std::uint64_t metrics_bytes = 0;      // Of the lines that are lost.
  bool metrics_accepted = false;        // As they are, though something in them was changed.
  std::vector<std::string> read_costs;  // Files that are removed.
  std::vector<std::string> strays;      // That nothing names, likewise.
  std::uint64_t stray_bytes = 0;
  std::uint64_t write_bytes = 0;  // Of what a checkpoint names and of its own file, at most.

  bool empty() const { return findings.empty() && dropped.empty() && strays.empty(); }
  // Rows, or blocks of them, that the repair gives up, those whose keys nothing tells included.
  std::uint64_t lost_rows() const;
};

class RunRepair {
 public:
  // Locks the run, reads all of it, and makes the plan. kUnavailable: a trainer holds the run.
  // kCorruption: there is nothing to go on from. kInvalidArgument: something there is no damage, as
  // a newer format, or back_to is no checkpoint that holds. kOutOfRoom: of the quota.
  static Result<std::unique_ptr<RunRepair>> Open(FileSystem* fs, const std::string& run,
                                                 const RepairOptions& options);

  const RepairPlan& plan() const { return plan_; }
  // Does it. On error the run can be repaired again. kUnavailable: a reader holds a checkpoint that
  // is to be dropped; all else is done.
  Status Apply();

 private:
  RunRepair(FileSystem* fs, std::unique_ptr<RunFolder> folder, RunScrub scrub)
      : fs_(fs), folder_(std::move(folder)), scrub_(std::move(scrub)) {}

  Status MakePlan(const RepairOptions& options);
  Status ChooseBase(const RepairOptions& options);
  // What the base has lost. why_not: filled in where it can't be gone on from.
  // drops_unnamed: also where that costs rows that nothing names.
  Status FindBaseLosses(const CheckpointScrub& base, bool drops_unnamed, std::string* why_not);
  void ChooseDropped();
  Status FindStrays();
  // Strays of the stores, when these checkpoints are there. Their manifests are whole.
  Status ListStoreStrays(const std::vector<const CheckpointScrub*>& kept,
                         std::vector<std::string>* paths, std::uint64_t* bytes);
  Status CheckQuota(const RepairOptions& options);
  Status RemoveFiles(const std::vector<std::string>& paths);
  Status MendReports();
  // Gives the checkpoint the checksum of the metrics that are there now.
  Status TakeMetricsAsTheyAre(Checkpoint* checkpoint);
  // Writes and publishes the successor.
  Status PublishSuccessor();
  // Into files of the successor's own.
  Status CopyFilters(Checkpoint* next);
  Status RemoveDropped();

  FileSystem* const fs_;
  const std::unique_ptr<RunFolder> folder_;
  const RunScrub scrub_;
  const CheckpointScrub* base_ = nullptr;
  std::vector<StoreLosses> losses_;  // Of the base's stores, in their order.
  RepairPlan plan_;
};

}  // namespace terrace
