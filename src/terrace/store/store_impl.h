// StoreImpl: the store of store.h. One file of code for each verb: store_open, store_recover,
// store_read, store_write, store_commit, store_compact (which files, when, by whom), store_rewrite
// (one round of it), store_sweep, store_scan.
//
// Locks, in the order in which they are taken: read_mu_ | write_mu_, the compactors' in their
// order, commit_mu_, each held by one verb throughout (read_mu_: once its plan is made) and
// guarding its buffers; mu_ last and shortly, for the index and the table of files. No disk is
// touched under mu_.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/busy_clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/base/thread.h"
#include "terrace/io/write_queue.h"
#include "terrace/store/compaction_pace.h"
#include "terrace/store/compaction_policy.h"
#include "terrace/store/index.h"
#include "terrace/store/key_index.h"
#include "terrace/store/key_windows.h"
#include "terrace/store/manifest.h"
#include "terrace/store/parameter_file.h"
#include "terrace/store/section_cursor.h"
#include "terrace/store/store.h"

namespace terrace {

// One parameter file of the store. Shared: a reader holds the files it reads while compaction takes
// them out of the table; whoever removes them waits until nobody else holds them. All that changes
// is guarded by the store's mutex.
struct StoredFile {
  ParameterFileInfo info;
  std::string path;
  std::unique_ptr<File> file;  // Null: only a kept manifest names it.
  std::uint64_t seed = 0;

  std::uint32_t slot = kMaxFileSlots;  // In the table; kMaxFileSlots: none.
  std::uint64_t stale = 0;             // Records that are not the newest of their key.
  std::uint64_t live_deletions = 0;    // Deletion records that are.
  std::uint32_t named_by = 0;          // Manifests, one being made included.
  bool live = false;                   // Belongs to the store's present state.
  // The index does not lead to all of its records yet. Of one that is not live, an output of a
  // round of compaction, those count as stale.
  bool publishing = false;
  bool compacting = false;          // Held by a compaction; not retired when fully stale.
  bool synced = false;              // Durable.
  std::uint64_t stale_at_pick = 0;  // When the compaction that holds it began.
  // Its deletion records are looked at again when so many files have gone.
  std::uint64_t deletions_due = 0;
  std::uint64_t swept_points = 0;  // RowExpiry::points() of the last sweep.
};
using FilePtr = std::shared_ptr<StoredFile>;

class StoreImpl final : public Store {
 public:
  // groups: 0, or how many the rows, which are then blocks of rows of so many bytes, belong to
  // (GroupStore).
  StoreImpl(FileSystem* fs, Clock* clock, DiskQuota* quota, const StoreOptions& options,
            std::uint64_t groups = 0, std::uint32_t block_row_bytes = 0);
  ~StoreImpl() override;

  // What each of the three buffers takes where so much is wanted for it.
  static std::uint64_t BufferBytes(std::uint64_t wanted, const RecordLayout& layout);
  // What Create and Open share: limits, folder, buffers, read queue.
  Status Prepare();
  Status CreateEmpty();
  // visit: called with the hash of each key that is there, in order; may be empty.
  Status Recover(const ManifestReference& manifest, std::span<const ManifestReference> kept,
                 const std::function<void(std::uint64_t)>& visit);
  void StartCompaction();

  Status Read(std::span<const Key> keys, std::span<std::byte* const> rows,
              std::span<std::uint8_t> found, const std::atomic<bool>* stop) override;
  Status Write(std::span<const Key> keys, std::span<const std::byte* const> rows,
               std::span<const std::uint8_t> stored) override;
  Result<std::unique_ptr<StagedRows>> Stage(std::span<const Key> keys,
                                            std::span<const std::byte* const> rows,
                                            std::span<const std::uint8_t> stored) override;
  Status Publish(std::unique_ptr<StagedRows> staged) override;
  void KeepCheckpoints(bool keep) override {
    keep_checkpoints_.store(keep, std::memory_order_relaxed);
  }
  void ExpectRows(std::uint64_t rows) override;
  Status Erase(std::span<const Key> keys) override;
  Result<ManifestReference> Commit(std::uint64_t id) override;
  Status Drop(std::uint64_t id) override;
  Status ForEachRow(std::uint64_t buffer_bytes,
                    const std::function<Status(const RowView&)>& visit) override;
  Status CompactNow() override;
  void SetKeepFree(std::uint64_t bytes, std::uint64_t files) override {
    keep_free_.store(bytes, std::memory_order_relaxed);  // Numbers; they order nothing.
    writes_keep_free_.store(bytes, std::memory_order_relaxed);
    writes_keep_files_.store(files, std::memory_order_relaxed);
  }
  void OpenReserve() override {
    writes_keep_free_.store(0, std::memory_order_relaxed);
    writes_keep_files_.store(0, std::memory_order_relaxed);
  }
  // What stays free is being taken: the last checkpoint is on its way.
  bool reserve_is_open() const {
    return writes_keep_free_.load(std::memory_order_relaxed) <
           keep_free_.load(std::memory_order_relaxed);
  }
  // A write of so many rows finds room without anything's being given up for it.
  bool HasRoomFor(std::uint64_t rows) const {
    const std::uint64_t files = (rows + rows_per_file_ - 1) / rows_per_file_;
    return quota_->HasFree(files * layout_.FileBytes(std::min(rows, rows_per_file_)) +
                           writes_keep_free_.load(std::memory_order_relaxed));
  }
  Status MakeRoom(std::uint64_t bytes) override;
  Status MergeFiles(std::uint64_t files) override;
  void SetHolder(RowHolder* holder) override;
  void WantSweep() override;
  StoreStats stats() const override;
  std::uint64_t index_bytes() const override;
  std::uint64_t MostWriteBytes(std::uint64_t rows, std::uint64_t in_order,
                               std::uint64_t writes) const override;
  std::uint64_t LeastFileRows() const override;
  void Finish() override;
  Status background_status() const override;

  // Of blocks. What follows is as Store says of its verbs.
  // Stages the rows that `fill` adds, of which nobody knows yet how many they are, in files as long
  // as they may be. An error of `fill` that is not its sink's is returned, and nothing changed.
  class RowSink;
  Result<std::unique_ptr<StagedRows>> StageFrom(const std::function<Status(RowSink*)>& fill);
  // rows_change: of the rows in all blocks.
  Status PublishBlocks(StagedRows* staged, std::int64_t rows_change);
  // Reads rows that are staged and not published yet. hashes: of keys, ascending. found[i]: 1 or 0.
  // buffer: aligned, at least SectionCursor::LeastBuffer of a record. Any thread.
  Status ReadStaged(const StagedRows& staged, std::span<const std::uint64_t> hashes,
                    std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                    std::span<std::byte> buffer);
  std::uint64_t rows_in_blocks() const;
  std::uint64_t rows() const;

 private:
  class KeyShare;  // Of a recovery, one thread's.
  struct Range;    // Of a read plan.
  struct ReadPart;
  struct ReadPlan;  // One slice of a batch.
  class ReadInFlight;
  struct ReadCursor;  // How far a plan has come.
  // Of a write.
  struct SortedKey {
    std::uint64_t hash;
    std::uint32_t index;  // In the caller's batch.
    std::uint8_t known;   // kUnknownKey until it has been looked up.

    bool stored() const { return known == kStoredKey; }
  };
  class StagedFiles;  // A write whose files are there.
  class WriteTimer;
  struct Compactor;   // Rewrites files.
  struct Compaction;  // One round of it.
  struct Named {
    ManifestReference reference;
    std::vector<StoredFile*> files;  // Alive while named_by counts this manifest.
  };

  // --- shared, store_open.cc
  Status CheckWritable() const TERRACE_EXCLUDES(mu_);
  // Notes the first error after which nothing may be written; returns it.
  Status Poison(const Status& cause) TERRACE_EXCLUDES(mu_);

  // --- shared, store_files.cc
  std::string PathOf(std::uint64_t file_id) const;
  // Space on disk: of the quota and of disk_bytes.
  Status TakeSpace(std::uint64_t bytes, std::uint64_t keep_free);
  void GiveSpace(std::uint64_t bytes);
  std::uint32_t TakeSlot() TERRACE_REQUIRES(mu_);
  // By files, those on their way included.
  std::uint64_t used_slots() const TERRACE_REQUIRES(mu_) {
    return slots_.size() - free_slots_.size() + reserved_slots_;
  }
  // Tells the quota.
  void CountFiles() TERRACE_REQUIRES(mu_);
  void Register(const FilePtr& file, bool live) TERRACE_REQUIRES(mu_);
  void Retire(StoredFile* file) TERRACE_REQUIRES(mu_);
  // One more record of the file at `place` is stale; retires a live file without newest records.
  void AddStale(Place place, bool was_deletion) TERRACE_REQUIRES(mu_);
  // The retired file is nobody's but the store's. REQUIRES: mu_ is held.
  static bool IsUnread(const FilePtr& file);
  bool GoneToRemove() const TERRACE_REQUIRES(mu_);
  // Removes retired files that nothing names or reads, or keeps them as spares.
  Status RemoveGone() TERRACE_EXCLUDES(mu_);
  // And those that are read now. Blocks: until these reads have ended, and other threads have given
  // back the space of what they are removing.
  Status RemoveAllGone() TERRACE_EXCLUDES(mu_);
  // A file that nobody needs any more, in the quota still: a new one overwrites it.
  struct Spare {
    std::string path;
    std::uint64_t bytes;
  };
  // False: it has to be removed.
  bool KeepSpare(const StoredFile& file) TERRACE_EXCLUDES(mu_);
  // The one that suits a file of so many bytes best.
  std::optional<Spare> TakeSpare(std::uint64_t bytes) TERRACE_EXCLUDES(mu_);
  void RemoveSpares() TERRACE_EXCLUDES(mu_);
  // A file to be written, of at most so many bytes, which are reserved. On error it may exist.
  Result<std::unique_ptr<File>> OpenNew(std::uint64_t id, std::uint64_t bytes)
      TERRACE_EXCLUDES(mu_);
  std::vector<FilePtr> LiveFiles() const TERRACE_REQUIRES(mu_);  // By id.
  // Removes files that were written but never became part of the store, and gives their quota back.
  void Abandon(const std::vector<FilePtr>& files);

  // --- store_open.cc
  Status PrepareCompactor(Compactor* compactor, std::span<std::byte> buffer)
      TERRACE_EXCLUDES(compactor->mu);
  // Makes the indexes for files of up to so many rows.
  void MakeIndexes(std::uint64_t most_rows) TERRACE_EXCLUDES(mu_);
  Result<FilePtr> OpenFile(const Manifest::File& file);
  // Those of a manifest, by all threads for reading.
  Result<std::vector<FilePtr>> OpenFiles(const Manifest& manifest) TERRACE_EXCLUDES(read_mu_);
  Status NameKept(std::span<const ManifestReference> kept, const Manifest& newest)
      TERRACE_EXCLUDES(mu_);
  Status RemoveStrays() TERRACE_EXCLUDES(mu_);

  // --- store_recover.cc
  // Reads the key sections of the files and fills both indexes, which are empty; counts what is
  // stale. visit: as of Recover.
  Status BuildIndex(const std::vector<FilePtr>& files,
                    const std::function<void(std::uint64_t)>& visit) TERRACE_EXCLUDES(mu_);
  // Takes the round that was read.
  static Status TakeRound(WorkerGroup* workers, KeyRounds* rounds,
                          std::span<const std::unique_ptr<KeyShare>> shares,
                          std::span<RunningChecksum> checksums);
  // What a share found in these files and did not put into the index.
  Status TakeFound(std::span<const FilePtr> files, KeyShare* share,
                   const std::function<void(std::uint64_t)>& visit) TERRACE_EXCLUDES(mu_);

  // --- store_read.cc
  // Where the wanted keys lie, in the order of their places.
  void PlanRead(ReadPlan* plan) TERRACE_EXCLUDES(mu_);
  Status RunPlan(const ReadPlan& plan, const std::atomic<bool>* stop) TERRACE_REQUIRES(read_mu_);
  // Plans requests for the wanted rows from the cursor on, as many as fit.
  void FillPart(const ReadPlan& plan, ReadCursor* cursor, ReadPart* part) const;
  void FillPartWithFiles(const ReadPlan& plan, ReadCursor* cursor, ReadPart* part) const;
  // A record of another key than the one wanted: fine if the index can't tell them apart.
  Status CheckMistaken(const std::byte* record, Key wanted, const std::string& path,
                       std::uint64_t offset) TERRACE_EXCLUDES(mu_);
  // Checks and hands out the rows of a part that was read, on all threads for reading.
  Status TakePart(const ReadPlan& plan, const ReadPart& part) TERRACE_REQUIRES(read_mu_);
  // The wanted rows [begin, end) of it.
  Status TakeRows(const ReadPlan& plan, const ReadPart& part, std::size_t begin, std::size_t end);

  // --- store_commit.cc
  Result<ManifestReference> PublishManifest(const Manifest& manifest,
                                            const std::vector<FilePtr>& unsynced)
      TERRACE_REQUIRES(commit_mu_) TERRACE_EXCLUDES(mu_);

  // --- store_write.cc
  // A list that GiveOrder takes back: fresh pages would cost as much as filling it.
  std::vector<SortedKey> TakeOrder() TERRACE_EXCLUDES(mu_);
  void GiveOrder(std::vector<SortedKey> order) TERRACE_EXCLUDES(mu_);
  Status WriteRecords(std::span<const Key> keys, std::span<const std::byte* const> rows,
                      std::span<const std::uint8_t> stored) TERRACE_REQUIRES(write_mu_)
      TERRACE_EXCLUDES(mu_);
  // REQUIRES: there are keys.
  Result<std::unique_ptr<StagedFiles>> StageRecords(std::span<const Key> keys,
                                                    std::span<const std::byte* const> rows,
                                                    std::span<const std::uint8_t> stored)
      TERRACE_REQUIRES(write_mu_) TERRACE_EXCLUDES(mu_);
  // Writes the files of rows that `fill` adds. next_file: called before each with the number of
  // rows that are expected, reserves space and slot for it and says how many rows it has at most.
  using Fill = std::function<Status(RowSink*)>;
  using NextFile = std::function<Result<std::uint64_t>(StagedFiles*, std::uint64_t expected)>;
  Result<std::unique_ptr<StagedFiles>> StageFiles(bool deletion, const NextFile& next_file,
                                                  const Fill& fill) TERRACE_REQUIRES(write_mu_)
      TERRACE_EXCLUDES(mu_);
  // What every write does first.
  Status BeginWrite() TERRACE_REQUIRES(write_mu_) TERRACE_EXCLUDES(mu_);
  Status PublishStaged(StagedFiles* staged, std::int64_t rows_change) TERRACE_EXCLUDES(mu_);
  // Of the quota and of the index's file slots.
  Status ReserveUnderPressure(std::uint64_t bytes, std::uint64_t files) TERRACE_REQUIRES(write_mu_)
      TERRACE_EXCLUDES(mu_);
  // Of files that are to be written, `spare` more kept free, of those that the system lets the run
  // open besides `keep_files`; false: there are not so many.
  bool ReserveSlots(std::uint64_t files, std::uint64_t spare, std::uint64_t keep_files)
      TERRACE_EXCLUDES(mu_);
  void ReleaseSlots(std::uint64_t files) TERRACE_EXCLUDES(mu_);
  // Why there are not so many.
  Status NoSlots(std::uint64_t files) const TERRACE_EXCLUDES(mu_);
  // Finds out which of the keys of which nothing is known are there.
  Status FindStored(std::span<SortedKey> order) TERRACE_EXCLUDES(mu_);
  struct Candidate;  // A key that is there if a record says so.
  Status ReadCandidates(std::span<SortedKey> order, std::span<const Candidate> candidates)
      TERRACE_EXCLUDES(mu_);
  Status TakeCandidate(std::span<SortedKey> order, const Candidate& candidate,
                       const ReadRequest& request) TERRACE_EXCLUDES(mu_);
  // Makes room in the index for what a write adds, before the write takes effect.
  Status ReserveIndex(const StagedFiles& staged) TERRACE_EXCLUDES(mu_);
  // Leads the index to the files of one write.
  void PublishFiles(StagedFiles* staged) TERRACE_EXCLUDES(mu_);
  void PublishRows(std::span<const SortedKey> chunk, std::span<const Place> places)
      TERRACE_REQUIRES(mu_);
  void PublishDeletions(std::span<const SortedKey> chunk, std::span<const Place> places)
      TERRACE_REQUIRES(mu_);
  FilePtr NewFile(std::unique_ptr<File> file, const ParameterFileInfo& info) const;

  // --- store_compact.cc
  void CompactLoop(Compactor* compactor) TERRACE_EXCLUDES(mu_);
  // For whom a round is: compaction's own threads; a caller who wants all that is due; one who
  // wants space, and so only files whose removal gives theirs back at once. Callers wait for
  // another's round where they find nothing to do, or no space, before it has ended.
  enum class RoundFor { kBackground, kCaller, kSpace };
  // more: whether another one may have something to do.
  Status CompactRound(Compactor* compactor, RoundFor whom, bool* more)
      TERRACE_REQUIRES(compactor->mu) TERRACE_EXCLUDES(mu_);
  // Blocks a caller until one of the others' rounds has ended, which may hold files that he could
  // use. False: there was none.
  bool AwaitOtherRound(RoundFor whom) TERRACE_REQUIRES(mu_);
  // There may be room where compaction found none.
  void RoomMade() TERRACE_REQUIRES(mu_) {
    ++room_made_;
    compaction_wanted_.NotifyAll();
  }
  // Space and slots for its outputs, perhaps in the room for one rewrite (DiskQuota). Callers wait
  // for slots that rounds of other stores have; the slots come first, so that no round waits for
  // them with something that another one needs.
  bool ReserveRound(RoundFor whom, Compaction* round) TERRACE_EXCLUDES(mu_);
  bool BeginRewrite(std::uint64_t files, bool waits) TERRACE_EXCLUDES(mu_);
  // Its outputs are part of the store from here on, and inputs without newest rows no longer.
  void ReleaseFiles(Compaction* round) TERRACE_EXCLUDES(mu_);
  Status CompactAll() TERRACE_EXCLUDES(mu_);
  // Until that is enough or none is due.
  Status CompactUntil(RoundFor whom, const std::function<bool()>& enough) TERRACE_EXCLUDES(mu_);
  // The files that are to be compacted, in this order; none: none is due.
  std::vector<FilePtr> DueFiles(bool freeing_only) TERRACE_REQUIRES(mu_);
  bool CompactionDue() TERRACE_REQUIRES(mu_) {
    return no_room_at_ != room_made_ && !DueFiles(/*freeing_only=*/false).empty();
  }
  void PickInputs(bool freeing_only, Compaction* round) TERRACE_REQUIRES(mu_);
  FileUse UseOf(const StoredFile& file) const TERRACE_REQUIRES(mu_);
  // Bytes that compaction has moved. Blocks: on its own threads, see CompactionPace.
  void Pace(std::uint64_t bytes);
  // Blocks: until compaction has caught up with the writes before one of so many rows.
  void AwaitCompaction(std::uint64_t rows) TERRACE_REQUIRES(write_mu_) TERRACE_EXCLUDES(mu_);
  // Of the files that the store has. as_rewritten: as if the rounds that go on had ended.
  FileUse StoreUse(bool as_rewritten) const TERRACE_REQUIRES(mu_);
  // And when what is staged belongs to it.
  FileUse UseWithStaged(FileUse store) const TERRACE_REQUIRES(mu_) {
    return {store.rows + staged_rows_, store.reclaimable + staged_overlap_};
  }
  void CountStaged(StagedFiles* staged) TERRACE_EXCLUDES(mu_);
  void ForgetStaged(StagedFiles* staged) TERRACE_EXCLUDES(mu_);
  struct RunUse {
    // As if the rounds that go on had ended, with what stays free for the next checkpoint, without
    // what compaction can't free.
    std::uint64_t bytes = 0;
    std::uint64_t stale_bytes = 0;  // That rewrites would free.
  };
  // Of the policy that asks for it; tells the other stores this one's part.
  RunUse UseOfRun() TERRACE_REQUIRES(mu_);
  void TellCompactable() TERRACE_REQUIRES(mu_);

  // --- store_rewrite.cc
  // Rewrites the inputs of the round, which has its space and slots, and publishes its outputs.
  Status Rewrite(Compactor* compactor, Compaction* round) TERRACE_REQUIRES(compactor->mu)
      TERRACE_EXCLUDES(mu_);
  Status FindNeededDeletions(Compactor* compactor, Compaction* round)
      TERRACE_REQUIRES(compactor->mu) TERRACE_EXCLUDES(mu_);
  // (hash, version) of each record, by the key section. Checks it.
  Status WalkKeys(Compactor* compactor, const StoredFile& file,
                  const std::function<void(std::uint64_t, std::uint64_t)>& visit)
      TERRACE_REQUIRES(compactor->mu);
  Status CopyInputs(Compactor* compactor, Compaction* round) TERRACE_REQUIRES(compactor->mu)
      TERRACE_EXCLUDES(mu_);
  // Brings the next records of an input to memory and copies those that are the newest of their
  // key.
  Status CopyNext(Compactor* compactor, Compaction* round, const StoredFile& file,
                  SectionCursor* cursor) TERRACE_REQUIRES(compactor->mu) TERRACE_EXCLUDES(mu_);
  // Which of the records in memory are: round->newest.
  Status JudgeRecords(const StoredFile& file, const SectionCursor& cursor, Compaction* round)
      TERRACE_EXCLUDES(mu_);
  Status CopyRecord(Compactor* compactor, Compaction* round, const std::byte* record,
                    std::uint64_t seed, Place from) TERRACE_REQUIRES(compactor->mu)
      TERRACE_EXCLUDES(mu_);
  Status BeginOutput(Compactor* compactor, Compaction* round) TERRACE_REQUIRES(compactor->mu)
      TERRACE_EXCLUDES(mu_);
  // Writes it to its end and publishes it.
  Status FinishOutput(Compactor* compactor, Compaction* round) TERRACE_REQUIRES(compactor->mu)
      TERRACE_EXCLUDES(mu_);
  // Leads the index from where the records were to the output.
  void PublishOutput(const Compactor& compactor, Compaction* round, const FilePtr& output)
      TERRACE_REQUIRES(compactor.mu) TERRACE_EXCLUDES(mu_);
  // Takes deletions that nothing needs any more out of the index.
  void DropDeletions(const Compaction& round) TERRACE_EXCLUDES(mu_);

  // --- store_sweep.cc
  bool SweepDue() const TERRACE_REQUIRES(mu_);
  // Takes the expired rows of one file out of the index; false: all files are swept.
  Status SweepNext(Compactor* compactor, bool* swept) TERRACE_REQUIRES(compactor->mu)
      TERRACE_EXCLUDES(mu_);
  Status SweepFile(Compactor* compactor, const FilePtr& file) TERRACE_REQUIRES(compactor->mu)
      TERRACE_EXCLUDES(mu_);
  // The records of the file that may go, as far as the index leads to them and nobody holds them.
  void DropRows(std::span<const Key> keys, std::span<const Place> places) TERRACE_EXCLUDES(mu_);

  // Constant after construction.
  FileSystem* const fs_;
  Clock* const clock_;
  DiskQuota* const quota_;  // Null for a reader.
  const StoreOptions options_;
  const RecordLayout layout_;
  const std::uint64_t groups_;
  const std::uint32_t block_row_bytes_;
  const CompactionRule rule_;
  CompactionPace pace_;  // Synchronises itself.
  std::optional<DiskQuota::Reclaimer> reclaimer_;
  std::uint64_t rows_per_file_ = 0;

  Mutex read_mu_;
  HugeBuffer read_buffer_ TERRACE_GUARDED_BY(read_mu_);
  std::unique_ptr<ReadQueue> read_queue_ TERRACE_GUARDED_BY(read_mu_);
  std::unique_ptr<WorkerGroup> read_workers_ TERRACE_GUARDED_BY(read_mu_);  // Null: one thread.

  // Null where nothing is done in the background.
  std::unique_ptr<WriteQueue> write_queue_;

  Mutex write_mu_;
  HugeBuffer write_buffer_ TERRACE_GUARDED_BY(write_mu_);
  KeyEntries write_keys_ TERRACE_GUARDED_BY(write_mu_);  // Of the file in the making.

  // Two rewrite at a time in the background, so that the disk has work while one of them leads the
  // index to its rows, judges or begins. Whoever else compacts, or sweeps, is the first of them.
  struct Compactor {
    Mutex mu;
    std::span<std::byte> input TERRACE_GUARDED_BY(mu), output TERRACE_GUARDED_BY(mu);
    std::unique_ptr<ReadQueue> reads TERRACE_GUARDED_BY(mu);
    // Not the writes': small ones of compaction would wait for a batch's large ones.
    std::unique_ptr<WriteQueue> writes TERRACE_GUARDED_BY(mu);
    // Of the output in the making: its entries, and where its rows were. Kept as long as files are
    // due: fresh pages for each round would cost as much as filling them.
    KeyEntries keys TERRACE_GUARDED_BY(mu);
    std::vector<Place> from TERRACE_GUARDED_BY(mu);
    Thread thread;
  };
  static constexpr int kCompactors = 2;
  HugeBuffer compact_buffer_;  // Theirs, shared out by Prepare.
  Compactor compactors_[kCompactors];

  Mutex commit_mu_;

  Mutex holder_mu_;  // Before mu_; held while the holder is asked.
  RowHolder* holder_ TERRACE_GUARDED_BY(holder_mu_) = nullptr;

  // In turn: Publish takes it for each few thousand rows of a write, which must not keep reads out
  // for as long as the whole of it takes.
  mutable Mutex mu_{Mutex::Order::kInTurn};
  CondVar compaction_wanted_;
  CondVar compacted_;
  std::unique_ptr<RowIndex> index_ TERRACE_GUARDED_BY(mu_);
  std::uint64_t expected_keys_ TERRACE_GUARDED_BY(mu_) = 0;        // In it, by the last ExpectRows.
  std::unique_ptr<ExactIndex> deletions_ TERRACE_GUARDED_BY(mu_);  // Newest deletion records.
  std::vector<std::vector<SortedKey>> spare_orders_ TERRACE_GUARDED_BY(mu_);
  std::vector<FilePtr> slots_ TERRACE_GUARDED_BY(mu_);
  std::vector<std::uint32_t> free_slots_ TERRACE_GUARDED_BY(mu_);
  std::uint64_t reserved_slots_ TERRACE_GUARDED_BY(mu_) = 0;  // Of files on their way.
  std::uint64_t counted_slots_ TERRACE_GUARDED_BY(mu_) = 0;   // Used ones that the quota knows of.
  std::vector<FilePtr> retired_ TERRACE_GUARDED_BY(mu_);      // Not live; on disk still.
  int reads_in_flight_ TERRACE_GUARDED_BY(mu_) = 0;
  int removing_ TERRACE_GUARDED_BY(mu_) = 0;  // Threads that have taken some from there.
  std::vector<Spare> spares_ TERRACE_GUARDED_BY(mu_);
  std::map<std::uint64_t, Named> manifests_ TERRACE_GUARDED_BY(mu_);
  std::uint64_t last_manifest_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t sequence_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t published_sequence_ TERRACE_GUARDED_BY(mu_) = 0;  // Of the last write.
  // Of halves of writes and of rounds of compaction, which overlap with their like.
  BusyTime write_time_ TERRACE_GUARDED_BY(mu_), compaction_time_ TERRACE_GUARDED_BY(mu_);
  std::uint64_t rounds_ended_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t next_file_id_ TERRACE_GUARDED_BY(mu_) = 1;
  std::uint64_t rows_in_blocks_ TERRACE_GUARDED_BY(mu_) = 0;
  // Rows in files that no index leads to yet, and those that they will make stale.
  std::uint64_t staged_rows_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t staged_overlap_ TERRACE_GUARDED_BY(mu_) = 0;
  // Retired since open, and stale records with them: with a file that was written anew as it was,
  // no older version of a deleted key has gone.
  std::uint64_t files_gone_ TERRACE_GUARDED_BY(mu_) = 0;
  Status poison_ TERRACE_GUARDED_BY(mu_);
  Status background_ TERRACE_GUARDED_BY(mu_);
  // How often files went or space came back, and how often when compaction last found no room.
  std::uint64_t room_made_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t no_room_at_ TERRACE_GUARDED_BY(mu_) = ~std::uint64_t{0};
  DiskQuota::Compactable told_ TERRACE_GUARDED_BY(mu_);

  // Relaxed atomics: counters for stats(), and a flag whose effect may come a little later.
  std::atomic<bool> stopping_{false};
  std::atomic<bool> keep_checkpoints_{false};  // Of the caller's own thread, as a rule.
  std::atomic<std::uint64_t> keep_free_{0}, writes_keep_free_{0}, writes_keep_files_{0};
  std::atomic<std::uint64_t> disk_bytes_{0};
  std::atomic<std::uint64_t> read_bytes_{0}, write_bytes_{0}, read_requests_{0};
  std::atomic<std::uint64_t> rows_read_{0}, rows_written_{0}, rows_compacted_{0}, compactions_{0};
  std::atomic<std::uint64_t> rows_expired_{0};
  std::atomic<std::uint64_t> mistaken_reads_{0};
  std::atomic<std::int64_t> read_nanos_{0}, compaction_wait_nanos_{0};
};

struct StoreImpl::Compaction {
  std::vector<FilePtr> inputs;    // By id.
  std::uint64_t rows_left = 0;    // Newest ones without a place in an output, at most.
  std::uint64_t space = 0;        // Reserved for outputs.
  std::uint64_t files = 0;        // Outputs that are to come, at most.
  bool frees = true;              // No checkpoint needs an input.
  bool has_rewrite_room = false;  // Of the quota.
  bool alone = true;              // No other round was going on at its beginning,
  std::uint64_t room_made = 0;    // when room had been made so often.
  // To look for older versions costs the keys of most files: not before it is due (StoredFile),
  // until when all deletions stay.
  bool keeps_deletions = false;
  std::uint64_t deletions_due = ~std::uint64_t{0};  // Of those that stay.
  // Hashes of the newest deletions among the inputs of which an older version is in some other
  // file, sorted; the other deletions end here.
  std::vector<std::uint64_t> needed_deletions;
  std::vector<std::uint64_t> dropped_deletions;  // Their hashes,
  std::vector<Place> dropped_places;             // and where they are.
  std::vector<FilePtr> outputs;                  // That the index leads to.
  std::optional<WriteRing> ring;
  FilePtr output;  // In the making, with its writer.
  std::unique_ptr<ParameterFileWriter> writer;
  // Of the records of an input that are in memory.
  std::vector<std::uint64_t> hashes;
  std::vector<Place> places, deletion_places;
  std::vector<std::uint8_t> newest;  // 1 or 0.
};

// Takes the rows of a write, one after another, to its files. Threads: that of the write.
class StoreImpl::RowSink {
 public:
  // A file that is begun for rows that nobody expected has space for so many.
  static constexpr std::uint64_t kMoreThanExpected = 16;
  // About so many rows are to come from here on: the next file gets space for no more.
  void Expect(std::uint64_t rows) { expected_ = rows + (writer_ ? writer_->rows() : 0); }
  // row: copied; empty in a deletion. The first failure of a file that is known by then.
  Status Add(Key key, std::span<const std::byte> row, std::uint8_t stored);

 private:
  friend class StoreImpl;
  RowSink(StoreImpl* store, const NextFile* next_file, std::span<std::byte> buffer,
          KeyEntries* keys, StagedFiles* staged);
  Status Begin();  // A file.
  Status FinishFile();
  // Blocks: until all is written.
  Status End();
  Status Failed(Status status);  // Remembers that it is none, which poisons the store.

  StoreImpl* const store_;
  const NextFile* const next_file_;
  KeyEntries* const keys_;
  StagedFiles* const staged_;
  const std::uint64_t version_;
  WriteRing ring_;
  std::optional<CompactionPace::Hold> use_;
  std::optional<ParameterFileWriter> writer_;  // Of the file in the making,
  std::uint64_t most_rows_ = 0;                // which gets so many,
  std::vector<std::uint8_t> stored_;           // and this is known of those that it has.
  std::uint64_t expected_ = 0;                 // Of this file and those to come.
  std::uint64_t rows_ = 0;                     // Of all files.
  bool failed_ = false;
};

// The read buffer's parts, which the disk and the reader take in turn.
inline constexpr std::size_t kReadParts = 8;
// Index entries changed or looked up under one hold of the lock, so that others wait for a fraction
// of a millisecond.
inline constexpr std::size_t kIndexBatch = 4096;
// Rows of a batch lie anywhere in memory: so many are fetched ahead.
inline constexpr std::size_t kPrefetchRows = 8;

// While it lives, files that compaction could remove may be held.
class StoreImpl::ReadInFlight {
 public:
  explicit ReadInFlight(StoreImpl* store);
  ~ReadInFlight();
  ReadInFlight(const ReadInFlight&) = delete;
  ReadInFlight& operator=(const ReadInFlight&) = delete;

 private:
  StoreImpl* const store_;
};

// Counts from its construction to its destruction.
class ScopedTimer {
 public:
  ScopedTimer(const Clock* clock, std::atomic<std::int64_t>* total)
      : clock_(clock), total_(total), start_(clock->MonotonicNanos()) {}
  ~ScopedTimer() {
    total_->fetch_add(clock_->MonotonicNanos() - start_, std::memory_order_relaxed);
  }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  const Clock* const clock_;
  std::atomic<std::int64_t>* const total_;
  const std::int64_t start_;
};

}  // namespace terrace
