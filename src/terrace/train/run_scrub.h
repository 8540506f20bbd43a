// RunScrub: every byte of a run on disk, read and checked: all kept checkpoints, their dense
// states, manifests and parameter files, the markers, metrics.jsonl, summary.json, job.yaml and
// read-cost. A parameter file that several checkpoints name is read once. Threads: one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/store/scrub.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/job.h"
#include "terrace/train/metrics_scrub.h"

namespace terrace {

// One store of a checkpoint whose manifest is whole.
struct StoreScrub {
  ScrubOptions options;
  Manifest manifest;
  std::vector<const FileScrub*> damaged;  // Of the files that it names; owned by the RunScrub.
};

// One file in checkpoints/, and what it names.
struct CheckpointScrub {
  std::uint64_t id = 0;
  std::optional<Checkpoint> checkpoint;  // None: its file is damaged.
  std::optional<Job> job;                // Likewise.
  // What is wrong with the checkpoint itself, its dense state and its manifests: with any of it,
  // nothing can go on from here.
  std::vector<Finding> findings;
  std::vector<StoreScrub> stores;  // As in the checkpoint, when nothing is wrong with it.

  bool holds() const { return findings.empty(); }
  bool rows_damaged() const {
    for (const StoreScrub& store : stores) {
      if (!store.damaged.empty()) return true;
    }
    return false;
  }
};

struct RunScrub {
  std::vector<CheckpointScrub> checkpoints;  // Oldest first.
  std::map<std::string, FileScrub> files;    // Damaged parameter files; a key for each version.
  std::vector<Finding> marker, job, summary, metrics, read_costs;
  std::vector<DamagedMetrics> damaged_metrics;
  std::uint64_t metrics_bytes = 0;      // As the newest checkpoint counts them.
  bool metrics_differ = false;          // All are lines, but not all as they were written.
  std::set<std::string> store_folders;  // Of all stores of all checkpoints.
  std::set<std::string> disk_folders;   // That hold the folders of the tables.
  // The first thing that is wrong and is no damage: a newer format, a file that may not be opened.
  Status refused;

  std::vector<Finding> Findings() const;  // All.
  std::uint64_t bytes_read = 0;           // Of parameter files.
};

// Reads the run. Beside a trainer (RunFolder::Mode::kScrub) it holds each checkpoint while it
// reads, so that none is dropped; one that goes before is none of the run's. Damage is no error.
// kNotFound: there is no checkpoint yet.
Result<RunScrub> ScrubRun(FileSystem* fs, RunFolder* run, bool hold_checkpoints);

}  // namespace terrace
