// What a run is put through when it is to be killed or to lose its power: random work of row cache,
// stores and checkpoints, the state that is expected of it, and the comparison. What a worker is
// about to commit, it notes first; what it has committed, afterwards. The check allows what lies
// between the two and nothing else. Threads: one, but for those of the cache and the stores.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/base/status.h"
#include "terrace/cache/row_cache.h"
#include "terrace/io/file_system.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/job.h"
#include "terrace/train/run_stores.h"

namespace terrace {

using Generations = std::unordered_map<Key, std::uint64_t>;

// What a checkpoint holds: of each row the generation, from which its bytes follow. Rows that have
// expired by then are among them, and may be there or not; erased ones are not.
struct Snapshot {
  std::uint64_t id = 0;
  std::uint64_t examples = 0;
  Generations rows;
};

// Rows expire at points in the stream of examples; a row's generation says at which.
class WorkerExpiry final : public RowExpiry {
 public:
  // Whether a point has passed.
  bool SetExamples(std::uint64_t examples);
  std::uint64_t points() const override { return points_.load(std::memory_order_relaxed); }
  bool MayGo(const std::byte* row) const override;

 private:
  // Relaxed: fewer points only let fewer rows go.
  std::atomic<std::uint64_t> points_{0};
};

enum class Note : std::uint64_t {
  kPending = 1,  // About to commit this.
  kDone,         // It is committed.
  kDropping,     // About to drop a checkpoint.
  kDeleting,     // About to delete the run.
  kDeleted,      // There is an empty one.
};

struct Expected {
  std::map<std::uint64_t, Snapshot> kept;
  std::optional<Snapshot> pending;   // May be there.
  std::set<std::uint64_t> dropping;  // May be gone.
  bool deleting = false;             // All may be gone.

  void Apply(Note note, Snapshot snapshot);
};

// Keeps the notes where no crash of the run can touch them.
class ExpectedState {
 public:
  virtual ~ExpectedState() = default;
  virtual Status Add(Note note, const Snapshot& snapshot) = 0;
  virtual Expected Read() const = 0;
  // These are there now, and nothing is on its way.
  virtual Status Restart(const std::vector<Snapshot>& kept) = 0;
};

// How the tiers of a run work; a checkpoint has the same rows whatever they are.
struct WorkerTiers {
  IndexKind index = IndexKind::kKey;
  int filter_bits = 10;             // table.group_filter_bits
  std::string policy = "s3_fifo";   // cache.policy
  std::string compaction = "gain";  // ssd.compaction
  std::string read = "planned";     // ssd.read
  int shards = 2;                   // ssd.shards of a run that begins; one that is there keeps its.
  // The same for a seed.
  static WorkerTiers Draw(IndexKind index, std::uint64_t seed);
  std::string ToText() const;
};

// A small job for a run in that folder, and its plan. The table expects fewer keys than it gets.
Result<Job> MakeWorkerJob(const std::string& run, const WorkerTiers& tiers);
Result<ModelPlan> MakeWorkerPlan(FileSystem* fs, const Job& job);

// A process's use of the run: opens what the newest checkpoint says and works on it.
class Worker {
 public:
  struct Options {
    std::uint64_t round = 1;  // Another for each use of the run.
    std::uint64_t seed = 1;
    bool background = true;  // Cache and stores have threads.
    std::uint64_t most_operations = 60;
  };
  // Borrows fs and expected. A run that is there need not have the job's number of shards.
  Worker(FileSystem* fs, Job job, ModelPlan plan, ExpectedState* expected, const Options& options);
  // `anew`: begins by deleting the run. kInternal: something was not what it should be; other
  // errors are those of the file system.
  Status Work(bool anew);

 private:
  Status Operation();
  void Close();
  Status Open(RunFolder::Mode mode);
  Status MakeCache();
  std::vector<Key> RandomKeys();
  // A generation that the key never had, of a row that expires later than all before it.
  std::uint64_t NewGeneration(Key key);
  // Brings rows up, checks them, and changes them.
  Status Step();
  Status Peek();
  Status Compact();
  // Between two lives of the cache, which would know of no erasure.
  Status Erase(const std::vector<Key>& keys);
  // Erases most rows, or all, and looks whether their space comes back.
  Status Reclaim();
  // On disk, of stores that have compacted all that is due.
  std::uint64_t MostBytes(const StoreStats& stats) const;
  // In the order of the trainer.
  Status TakeCheckpoint();
  Status StartAnew();

  FileSystem* const fs_;
  const int shards_;  // Of a run that begins.
  const ModelPlan plan_;
  ExpectedState* const expected_;
  const Options options_;
  Job job_;  // With the shards of the run.
  Rng rng_;
  std::uint64_t next_generation_;
  std::uint64_t examples_ = 0;
  Generations rows_;  // As trained by now, expired ones among them.
  std::vector<std::uint64_t> kept_;
  WorkerExpiry expiry_;
  std::unique_ptr<DiskQuota> quota_;
  std::unique_ptr<RunFolder> run_;
  std::unique_ptr<RunStores> stores_;
  std::unique_ptr<RowCache> cache_;
};

// Compares what lies in the folder with what is expected, whole and byte by byte, and restarts the
// expected state from there. kInternal: something is lost, damaged, or there that should not be.
Status CheckRun(FileSystem* fs, const std::string& run, ExpectedState* expected);

}  // namespace terrace
