// RunStores: the stores of a run, one per table and shard, as one. Threads: Commit, Drop and stats
// from one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/store/read_cost.h"
#include "terrace/store/store.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/job.h"

namespace terrace {

class RunStores {
 public:
  struct Options {
    std::uint64_t io_buffer_bytes = 0;  // Of one store and use.
    std::uint64_t most_file_rows = ~std::uint64_t{0};
    std::uint64_t most_open_bytes = ~std::uint64_t{0};  // Of openings at a time, indexes excepted.
    bool background = true;                             // Compaction on its own thread.
    bool read_only = false;
    // Of a quota that stays short when all stores have given what they could: whether an old
    // checkpoint was dropped. On any thread that writes rows. Empty: none can be.
    std::function<bool()> drop_oldest;
    std::vector<const RowExpiry*> expiry;  // By table, likewise; empty: no row expires.
  };
  // The folders of rows, one on each disk, and what reads cost there.
  struct Disk {
    std::string folder;
    KnownReadCost known;
  };
  // Empty stores in the run's folders, which are emptied first: nothing there is named by a
  // checkpoint.
  static Result<std::unique_ptr<RunStores>> Create(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                                   RunFolder* run, const Job& job,
                                                   const ModelPlan& plan, const Options& options);
  // As `checkpoint` committed them. kept: all checkpoints that stay, this one among them.
  static Result<std::unique_ptr<RunStores>> Open(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                                 RunFolder* run, const Job& job,
                                                 const ModelPlan& plan, const Options& options,
                                                 const Checkpoint& checkpoint,
                                                 std::span<const Checkpoint> kept);

  // What the parameter files and manifests of these checkpoints take of a quota, each counted once,
  // without what can't be read: that is Open's to say.
  static std::uint64_t BytesOf(FileSystem* fs, const RunFolder& run,
                               std::span<const Checkpoint> checkpoints);

  std::vector<Store*> table(std::size_t t) const;
  std::vector<std::string> directories() const;  // Of all stores.
  std::size_t size() const { return stores_.size(); }
  // Makes all rows durable and names them; what goes into Checkpoint::stores.
  Result<std::vector<Checkpoint::StoreManifest>> Commit(std::uint64_t id);
  Status Drop(std::uint64_t id);
  void SetKeepFree(std::uint64_t bytes, std::uint64_t files);
  void OpenReserve();
  // For so many free bytes of the quota: what all stores can free at once, or else the oldest
  // checkpoint. False: nothing was left to give. Thread-safe.
  Result<bool> GiveRoom(std::uint64_t bytes);
  // See Store::MergeFiles.
  Status MergeFiles(std::uint64_t files);
  void WantSweep(std::size_t table);
  StoreStats stats() const;  // Sums.
  // In which any store is written to: they are side by side, and the sums count each.
  double write_seconds() const { return write_clock_.Seconds(); }
  std::uint64_t index_bytes() const;
  // One on each disk, as ssd.paths names them, or in the run's folder.
  std::set<std::string> disk_folders() const;
  // See Store::MostWriteBytes: of a table, each of whose stores gets its share.
  std::uint64_t MostWriteBytes(std::size_t table, std::uint64_t rows, std::uint64_t in_order,
                               std::uint64_t writes) const;
  const std::vector<Disk>& disks() const { return disks_; }
  std::uint64_t most_bytes() const { return most_bytes_; }  // See StoreOptions::most_run_bytes.
  // See Store::Finish.
  void Finish();
  Status background_status() const;
  // What leads to the rows of each table, a line a table, for the start of a run.
  std::vector<std::string> DescribeIndexes() const;

 private:
  struct Entry {
    std::size_t table = 0;
    std::uint32_t shard = 0;
    std::string table_name;
    std::string schema;
    std::string directory;
    std::string recorded_directory;  // As a checkpoint names it.
    std::uint32_t row_bytes = 0;
    IndexKind index = IndexKind::kKey;
    std::uint64_t expected_rows = 0;
    GroupShape group;
    std::unique_ptr<Store> store;
  };
  RunStores(const Clock* clock, DiskQuota* quota, std::function<bool()> drop_oldest)
      : write_clock_(clock), quota_(quota), drop_oldest_(std::move(drop_oldest)) {}
  StoreOptions MakeOptions(const Job& job, const Options& options, const Entry& entry);
  int Openers(const Options& options) const;  // Stores that are opened at a time.
  // Whether the job asks for the index that the checkpoint's store has.
  static Status CheckIndex(const TablePlan& table, const Checkpoint::StoreManifest& manifest,
                           const Options& options);
  // Finds what reads cost on each disk, where the job wants to know. A reader writes nothing.
  Status FindDisks(FileSystem* fs, Clock* clock, const Job& job, const Options& options);
  // What the job's compaction may let the run hold.
  Status FindMostBytes(FileSystem* fs, const Job& job);
  // Whether reads are planned by what they cost.
  static bool PlansByCost(const Job& job) {
    return job.ssd.read == ReadMode::kPlanned && !job.ssd.merge_gap_bytes;
  }
  static std::vector<Entry> MakeEntries(const Job& job, const ModelPlan& plan,
                                        const RunFolder& run);
  BusyClock write_clock_;
  DiskQuota* const quota_;  // Borrowed; null for readers.
  Mutex drop_mu_;           // Held while the oldest checkpoint is dropped.
  const std::function<bool()> drop_oldest_;
  std::vector<Entry> stores_;     // By table, then shard.
  std::vector<Disk> disks_;       // Empty: the job does not ask.
  std::uint64_t most_bytes_ = 0;  // 0: the job does not ask.
};

// How rows are read, a line a disk, for the start of a run.
std::vector<std::string> DescribeReads(const Job& job, std::span<const RunStores::Disk> disks);
// Which files are rewritten, likewise.
std::string DescribeCompaction(const Job& job, std::uint64_t most_bytes);

}  // namespace terrace
