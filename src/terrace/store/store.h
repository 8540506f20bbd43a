// Store: the SSD tier of one table in one shard (SSD-PS; HPS 6 and appendix E). Rows lie in
// immutable parameter files, written in large sequential chunks; an index in memory says where each
// key's newest row is, or the newest block of rows of a group of keys; files whose stale share is
// above a threshold are rewritten; a manifest, published by rename, is the truth. docs/formats/
// gives the bytes. Threads: internally synchronised: Read from any threads, also at the same time,
// Write, Stage and Erase from one, Publish from one, Commit and Drop from one; compaction runs on
// threads of its own, and so does what goes to the disk. Borrows the FileSystem,
// DiskQuota and Clock, which must outlive it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/busy_clock.h"
#include "terrace/base/check.h"
#include "terrace/base/clock.h"
#include "terrace/base/ids.h"
#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/io/framed_file.h"

namespace terrace {

// What a file of so many bytes takes of the quota.
constexpr std::uint64_t WholeBlocks(std::uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// The bytes that a run may hold on disk, in stores, checkpoints and its other files, each block
// counted once, and the parameter files that its stores may have open. Thread-safe. Reserve before
// writing, settle with what was written, give back when a file is removed.
class DiskQuota {
 public:
  explicit DiskQuota(std::uint64_t limit_bytes, std::uint64_t limit_files = ~std::uint64_t{0})
      : limit_(limit_bytes), limit_files_(limit_files) {}
  // Somebody who holds bytes that he could do without. While it lives, `give` is called when a
  // reservation does not fit, before it is tried once more, on the reserving thread; `room_made`,
  // which may be empty, by TellRoomMade and TellRefused, on theirs.
  class Reclaimer {
   public:
    explicit Reclaimer(DiskQuota* quota, std::function<void()> give,
                       std::function<void()> room_made = nullptr);
    ~Reclaimer();
    Reclaimer(const Reclaimer&) = delete;
    Reclaimer& operator=(const Reclaimer&) = delete;

   private:
    friend class DiskQuota;
    DiskQuota* const quota_;
    const std::function<void()> give_, room_made_;
    // Guarded by the quota's rewrite_mu_.
    bool refused_ = false;  // A rewrite, for another's sake.
    int rewrites_ = 0;      // That go on.
  };

  // kOutOfRoom says what was asked, used and allowed, and names ssd.quota. `keep_free`: bytes that
  // must stay free after it (the last checkpoint and one compaction output).
  Status Reserve(std::uint64_t bytes, std::uint64_t keep_free) TERRACE_EXCLUDES(mu_);
  // Whether so many bytes are free, or would be once reclaimers gave what they could do without:
  // nobody gives anything for the question.
  bool HasFree(std::uint64_t bytes) const { return bytes <= limit_ - needed(); }
  // Adds to the bytes in use that reclaimers would give, what they have given being negative; after
  // Reserve, and after Release.
  void ChangeSpare(std::int64_t bytes) {
    spare_.fetch_add(static_cast<std::uint64_t>(bytes), std::memory_order_relaxed);
  }
  // Bytes in use but for those.
  std::uint64_t needed() const {
    const std::uint64_t used_now = used();
    return used_now - std::min(used_now, spare_.load(std::memory_order_relaxed));
  }
  void Release(std::uint64_t bytes);
  std::uint64_t used() const {
    return used_.load(std::memory_order_relaxed);
  }  // A count; orders nothing.
  // Somebody's reservation that did not fit may fit now.
  void TellRoomMade() TERRACE_EXCLUDES(mu_);
  std::uint64_t peak() const { return peak_.load(std::memory_order_relaxed); }

  // In what stays free for a checkpoint there is room for one rewrite of all stores: whether this
  // one may have it, until it gives it back; Await waits for another one to do so, and goes before
  // those that try. TellRefused tells those that others have kept from it, or from places for
  // files (BeginRewrite), once, that there may be room: none of these goes on, and whoever had it
  // did not find enough even so.
  bool TryTakeRewriteRoom(Reclaimer* by) TERRACE_EXCLUDES(rewrite_mu_);
  void AwaitRewriteRoom(Reclaimer* by) TERRACE_EXCLUDES(rewrite_mu_);
  void GiveRewriteRoom() TERRACE_EXCLUDES(rewrite_mu_);
  void TellRefused() TERRACE_EXCLUDES(mu_, rewrite_mu_);
  std::uint64_t limit() const { return limit_; }

  // False: as many, and `keep_free` more, can't be open besides those that are.
  bool TakeFiles(std::uint64_t files, std::uint64_t keep_free);
  bool HasFreeFiles(std::uint64_t files) { return TakeFiles(0, files); }
  // Likewise for the outputs of a rewrite, of any store, and it has begun; EndRewrite when its
  // inputs have given theirs back. waits: blocks while other rewrites go on and there are too few;
  // it holds none meanwhile, and goes before those that do not wait.
  bool BeginRewrite(Reclaimer* by, std::uint64_t files, bool waits) TERRACE_EXCLUDES(rewrite_mu_);
  void EndRewrite(Reclaimer* by) TERRACE_EXCLUDES(rewrite_mu_);
  // Of those that are open by now, whatever the limit; fewer than none give some back.
  void ChangeFiles(std::int64_t files) {
    files_.fetch_add(static_cast<std::uint64_t>(files), std::memory_order_relaxed);
  }
  std::uint64_t files() const { return files_.load(std::memory_order_relaxed); }
  std::uint64_t limit_files() const { return limit_files_; }

  // What compaction may still do about the bytes that are used: of all stores, each of which tells
  // its own part when it looks at it (CompactionPolicy::kModelSize).
  struct Compactable {
    std::uint64_t apart = 0;  // Of files that no rewrite frees, or that go without a further one.
    std::uint64_t stale = 0;  // Of records that a rewrite leaves out.
  };
  void ChangeCompactable(const Compactable& before, const Compactable& now) {
    apart_.fetch_add(now.apart - before.apart, std::memory_order_relaxed);
    stale_.fetch_add(now.stale - before.stale, std::memory_order_relaxed);
  }
  Compactable compactable() const {
    return {apart_.load(std::memory_order_relaxed), stale_.load(std::memory_order_relaxed)};
  }

 private:
  // Has all reclaimers give what they can.
  void Reclaim() TERRACE_EXCLUDES(mu_);
  bool TryReserve(std::uint64_t bytes, std::uint64_t keep_free);

  const std::uint64_t limit_, limit_files_;
  std::atomic<std::uint64_t> files_{0};
  std::atomic<std::uint64_t> used_{0};
  std::atomic<std::uint64_t> peak_{0};
  std::atomic<std::uint64_t> apart_{0}, stale_{0}, spare_{0};
  Mutex mu_;  // Before those of the reclaimers.
  std::vector<Reclaimer*> reclaimers_ TERRACE_GUARDED_BY(mu_);
  Mutex rewrite_mu_;  // After mu_.
  CondVar rewrite_room_given_, rewrite_ended_;
  int rewrites_ TERRACE_GUARDED_BY(rewrite_mu_) = 0;          // That go on.
  int waiting_rewrites_ TERRACE_GUARDED_BY(rewrite_mu_) = 0;  // For places.
  const Reclaimer* rewrite_room_of_ TERRACE_GUARDED_BY(rewrite_mu_) = nullptr;
  int rewrite_waiters_ TERRACE_GUARDED_BY(rewrite_mu_) = 0;
};

// How the rows of a batch are read: by a plan of what costs least, or all bytes of each file that
// holds one of them (HPS 6), for comparison. The rows are the same.
enum class ReadMode : std::uint8_t { kPlanned, kWholeFile };

// What leads to the rows: an entry a key, or an entry and a Bloom filter a group of keys
// (docs/decisions/group-index.md). The rows are the same.
enum class IndexKind : std::uint8_t { kKey, kGroup };
// How an index by group divides its rows and what it keeps of them in memory.
struct GroupShape {
  static constexpr std::uint32_t kMostBlockBytes = 64 * 4096;
  static constexpr std::uint32_t kMostFilterBits = 32;

  // Of a block of rows on disk, a multiple of 4096; 0: the least in which four rows fit.
  std::uint32_t block_bytes = 0;
  // Of the groups' Bloom filters, for each expected row; 0: there are none, so that a look-up of a
  // key that is not there costs a read.
  std::uint32_t filter_bits = 10;
};
// When parameter files whose stale share is above StoreOptions::stale_share are rewritten, and
// which first.
enum class CompactionPolicy : std::uint8_t {
  kGain,        // When the whole store's is: where a copied row frees most, old rows rather.
  kStaleShare,  // At once; the stalest (HPS E).
  kModelSize,   // When the run holds more than most_run_bytes; the fewest newest rows (AIBox 4.4).
};

// Which rows nobody will miss: expired ones. Thread-safe.
class RowExpiry {
 public:
  virtual ~RowExpiry() = default;
  // Grows when rows may have expired: a store then sweeps its files for them.
  virtual std::uint64_t points() const = 0;
  // Whether a row, the newest of its key, may go. Once true for its bytes, true for ever, and true
  // for or without effect in every older version of the row: one may come back when the store is
  // opened again.
  virtual bool MayGo(const std::byte* row) const = 0;
};

// Who holds rows of a store in memory, and so knows of their keys that the store has them.
class RowHolder {
 public:
  virtual ~RowHolder() = default;
  // Calls `drop` with a 1 for each of `keys` that it holds, and begins to hold none of the others
  // before `drop` has returned. `drop` takes no lock of the holder's.
  virtual void WithHeld(std::span<const Key> keys,
                        const std::function<void(std::span<const std::uint8_t>)>& drop) = 0;
};

struct StoreOptions {
  std::string directory;  // Of this table and shard; made when absent.
  std::string table;      // Written into each file; a file of another table is refused.
  std::uint32_t shard = 0;
  std::uint32_t row_bytes = 0;  // Payload of one row.
  // A parameter file's aim; larger files cost compaction grain. No more rows than most_file_rows.
  std::uint64_t file_bytes = std::uint64_t{16} << 20;
  std::uint64_t most_file_rows = ~std::uint64_t{0};
  // Files that nobody needs any more and that the next ones overwrite, at most, as long as the
  // quota has room: to remove a file and to make the disk find room anew costs as much as writing
  // it.
  std::size_t spare_files = 16;
  // Only files above it are compacted; kModelSize takes any that has stale rows where those above
  // it are too few. But for kModelSize, use stays under live / (1 - stale_share) and what is being
  // rewritten, a file or, in the background, two; with background compaction a write waits while
  // use, with what is staged, is above that by more than two files and as many rows as it writes:
  // then two files and twice a write may come on top.
  double stale_share = 0.3333;
  bool direct_io = true;
  ReadQueueOptions read_queue;
  // For reads; as much again for writing and for compaction. An index by group has more buffers
  // in the same room.
  std::uint64_t io_buffer_bytes = std::uint64_t{8} << 20;
  // Of the buffers that an opening has besides; by default as many as are of use.
  std::uint64_t most_open_bytes = ~std::uint64_t{0};
  ReadMode read_mode = ReadMode::kPlanned;
  // Of a store that is created; afterwards a store has the index that it was made with.
  IndexKind index = IndexKind::kKey;
  std::uint64_t expected_rows = 0;  // Decides the number of groups. More of them cost memory.
  // Of a store that is opened its blocks are what they are.
  GroupShape group;
  // Two needed records of a file are read by one request when no more bytes than these lie between
  // them: what a request costs in bytes of sequential reading (ReadCost::MergeGapBytes). The
  // cheapest plan follows from it for every region by itself: single sectors where rows lie apart,
  // a scan where they lie densely.
  std::uint64_t merge_gap_bytes = std::uint64_t{16} << 10;
  // Threads that check and copy what was read, the caller of Read one of them, and that build the
  // index at an opening, then with one more where there is a background; the others yield to
  // training.
  int read_threads = 1;
  // false: compaction runs inside Write, when due, and Write itself writes (depth 0).
  bool background_compaction = true;
  // Called by a Write that finds no room after compaction gave what it could, with the bytes of the
  // quota that have to be free: makes room elsewhere, or drops an old checkpoint (it may call
  // MakeRoom() and Drop() of this store), and says whether there is more room now. Runs on the
  // thread of that Write. Empty: nothing else can be done.
  std::function<Result<bool>(std::uint64_t bytes)> on_pressure;
  // Counts the time in which any of the stores that share it is written to. Borrowed; may be null.
  BusyClock* write_clock = nullptr;
  // Null: rows stay. Else rows that may go, and that no holder has, are dropped: first from the
  // index, by a sweep that reads all files once for each of its points; compaction then gives their
  // space back. Borrowed.
  const RowExpiry* expiry = nullptr;
  bool read_only =
      false;  // A reader beside the trainer: nothing is written, removed or locked exclusively.
  CompactionPolicy compaction = CompactionPolicy::kGain;
  // Of kModelSize: by the quota's count and what it leaves free, without files that only manifests
  // hold, of all stores that share the quota.
  std::uint64_t most_run_bytes = 0;
};

struct StoreStats {
  std::uint64_t read_bytes = 0,
                write_bytes = 0;  // Since open, of this process; compaction included.
  std::uint64_t read_requests = 0;
  std::uint64_t rows_read = 0, rows_written = 0, rows_compacted = 0;
  // Of the records, with their key entries, that writes were asked to write.
  std::uint64_t wanted_bytes = 0;
  // Rows of a block that was written for another row of it.
  std::uint64_t rows_carried = 0;
  std::uint64_t rows_expired = 0;    // Dropped by sweeps.
  std::uint64_t mistaken_reads = 0;  // Records, or blocks, that were read for absent keys alone.
  std::uint64_t compactions = 0;
  double read_seconds = 0, write_seconds = 0, compaction_seconds = 0;
  std::uint64_t live_rows = 0, live_bytes = 0;  // Newest rows, as records on disk.
  std::uint64_t disk_bytes = 0;                 // Everything in the directory.
  std::uint64_t checkpoint_only_bytes = 0;      // Files that only kept manifests name.
  std::uint64_t spare_bytes = 0;                // Files that the next ones overwrite.
  std::uint64_t index_bytes = 0;                // Memory of the index.
  std::uint64_t files = 0;
  double compaction_wait_seconds = 0;  // For compaction to catch up or to make room.
  std::uint64_t stale_bytes = 0;       // Of the store's files: records that are not the newest.

  StoreStats& operator+=(const StoreStats& other);  // For several stores.
};

// What the writer of a key knows of it. kStoredKey: Read has found it, or a Write has written it,
// and no Erase since. kNewKey: Read has not, and no Write has since, or an Erase has; nobody else
// writes. A claim that is not true leads the index astray.
inline constexpr std::uint8_t kUnknownKey = 0, kStoredKey = 1, kNewKey = 2;

// What a checkpoint says of one store.
struct ManifestReference {
  std::uint64_t id = 0;  // The checkpoint's number; the file is manifest-<id>.
  FileDigest digest;
};

struct HashRange {
  std::uint64_t first = 0, last = 0;  // Of MixKey, both in it.
};

// A row as a merge over all files yields it.
struct RowView {
  Key key = 0;
  std::span<const std::byte> row;  // row_bytes(), valid during the call.
};

// One thing on disk that is not as it was written.
struct Finding {
  std::string file;
  std::uint64_t offset = 0;
  std::string what;
};

// Rows whose files are written and that are not yet part of the store. Its end without Publish
// removes the files. The store must outlive it.
class StagedRows {
 public:
  virtual ~StagedRows() = default;
};

class Store {
 public:
  // An empty store. kInvalidArgument: the directory holds parameter files already.
  static Result<std::unique_ptr<Store>> Create(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                               const StoreOptions& options);
  // What an index by group takes from the start, for the rows that are expected.
  static std::uint64_t GroupIndexBytes(std::uint32_t row_bytes, const GroupShape& shape,
                                       std::uint64_t expected_rows);
  // Rows that a file of so many bytes has, or blocks of rows.
  static std::uint64_t FileRows(IndexKind index, std::uint32_t row_bytes, const GroupShape& shape,
                                std::uint64_t file_bytes);
  // Rows that a new store has places for, as expected_rows counts them: of files of so many bytes,
  // and of so many rows at most.
  static std::uint64_t MostRows(IndexKind index, std::uint32_t row_bytes, const GroupShape& shape,
                                std::uint64_t file_bytes, std::uint64_t most_file_rows);
  // Memory for each of FileRows beside buffers and index, at most: entries of the file that is
  // written and of two that are rewritten, what sorts them (32 bytes each), where rows were (8),
  // and what is known of them.
  static constexpr std::uint64_t kFileRowBytes = 3 * 32 + 2 * 8 + 8;
  // Of StoreOptions::io_buffer_bytes, what such a store takes in any case: its records have to fit.
  static std::uint64_t LeastBufferBytes(IndexKind index, std::uint32_t row_bytes,
                                        const GroupShape& shape);
  // Of the one for reads, where so much is wanted.
  static std::uint64_t ReadBufferBytes(IndexKind index, std::uint32_t row_bytes,
                                       const GroupShape& shape, std::uint64_t io_buffer_bytes);
  // Of a buffer that it has besides the three of so many bytes, at most.
  static std::uint64_t FurtherBufferBytes(IndexKind index, std::uint32_t row_bytes,
                                          const GroupShape& shape);
  // Whether rows of this length can have one.
  static bool HasGroupIndex(std::uint32_t row_bytes);
  // kInvalidArgument: they can't, or not in such blocks; the message says what would do.
  static Status CheckGroups(std::uint32_t row_bytes, const GroupShape& shape);
  // The store as `manifest` committed it; reads key sections only. A writer removes every file that
  // no manifest in `kept` names, what came after `manifest` included; a reader opens the named
  // files and holds them. kNotFound: the manifest or a file is gone (a reader tries a newer
  // checkpoint). kCorruption: names file and offset.
  static Result<std::unique_ptr<Store>> Open(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                             const StoreOptions& options,
                                             const ManifestReference& manifest,
                                             std::span<const ManifestReference> kept);
  virtual ~Store() = default;  // Finish. What was not committed is forgotten by the next Open.

  // Finds the newest rows of `keys` (any order; distinct). rows[i]: row_bytes() to fill; found[i]:
  // 1 or 0 (absent or erased; rows[i] is then untouched). Blocks: on reads. kCorruption: a row
  // failed its check (file, offset, key); no bytes of that row are handed out. kAborted: *stop, if
  // given, became true meanwhile; what it had planned is not read.
  virtual Status Read(std::span<const Key> keys, std::span<std::byte* const> rows,
                      std::span<std::uint8_t> found, const std::atomic<bool>* stop = nullptr) = 0;

  // Appends new versions of `keys` (distinct) as one or more parameter files, in which their rows
  // lie in this order, unless they lie in blocks: those that will be read together are best given
  // together. On success
  // Read sees them; they are durable after Commit. On error no key changed, and after a failed
  // write or sync the store is poisoned: Write, Erase and Commit fail until it is reopened. Blocks:
  // on writes, on the quota's back-pressure (compaction, old manifests). rows[i]: row_bytes().
  // stored[i]: one of the three above. Empty: all unknown, each of which is looked up, and costs a
  // read where the index has that key, or an alike one. REQUIRES, of Stage until its Publish as
  // well: where rows expire, that the holder has the keys that are not new, as for Erase.
  virtual Status Write(std::span<const Key> keys, std::span<const std::byte* const> rows,
                       std::span<const std::uint8_t> stored) = 0;
  // The two halves of Write, so that one thread brings rows to the disk while another leads the
  // index to those before. Publish in the order of Stage, and Read sees them; after a Publish that
  // failed, what was staged behind it is dropped. Errors as of Write; kAborted: what was staged
  // before was dropped, and this was made from it. REQUIRES: for Stage, keys; for Write and Erase,
  // that nothing is staged.
  virtual Result<std::unique_ptr<StagedRows>> Stage(std::span<const Key> keys,
                                                    std::span<const std::byte* const> rows,
                                                    std::span<const std::uint8_t> stored) = 0;
  virtual Status Publish(std::unique_ptr<StagedRows> staged) = 0;
  // While true, a Write or Stage that finds no room fails before an old checkpoint goes for it, or
  // other stores are asked (StoreOptions::on_pressure): who has staged others publishes them first,
  // which makes rows stale, and tries again. Any thread.
  virtual void KeepCheckpoints(bool keep) = 0;
  // So many new rows are to be published before long: an index by key that has to grow grows for
  // all of them at once, instead of a tenth at a time. Any thread.
  virtual void ExpectRows(std::uint64_t rows) = 0;
  // Writes deletion records of the keys that are there, each of which costs a read. REQUIRES: where
  // rows expire, that the holder has the keys, so that no sweep takes them meanwhile.
  virtual Status Erase(std::span<const Key> keys) = 0;

  // Makes all that was written durable and publishes manifest `id` (greater than all before). The
  // caller makes the checkpoint that names it. On error the manifests before it are intact.
  virtual Result<ManifestReference> Commit(std::uint64_t id) = 0;
  // Forgets manifest `id`; files that nothing names any more are removed. Drop of an unknown id is
  // fine.
  virtual Status Drop(std::uint64_t id) = 0;

  // Calls `visit` for each live row, in the order in which they lie, through a buffer of at most
  // buffer_bytes. Checks every row it reads. For digest and export. Not beside Write or Read
  // on the same store, nor from `visit`; compaction waits.
  virtual Status ForEachRow(std::uint64_t buffer_bytes,
                            const std::function<Status(const RowView&)>& visit) = 0;

  // Runs compaction until none is due. For tests.
  virtual Status CompactNow() = 0;

  // Files, and places for them, that Write always leaves to compaction, whose outputs are few and
  // make room.
  static constexpr std::uint64_t kFilesForCompaction = 8;
  // Bytes of the quota that Write, compaction that frees no file at once and all rewrites of a run
  // but one leave free from now on, for the last checkpoint and one compaction output, and open
  // files that Write leaves. Thread-safe.
  virtual void SetKeepFree(std::uint64_t bytes, std::uint64_t files = 0) = 0;
  // Until the next SetKeepFree Write takes of them: the checkpoint that they are for is being
  // written. Thread-safe.
  virtual void OpenReserve() = 0;

  // Compacts what gives its space back at once, until the quota HasFree so many bytes or nothing
  // is left to compact. Blocks: on compaction. Thread-safe. Errors: of compaction, as
  // background_status().
  virtual Status MakeRoom(std::uint64_t bytes) = 0;
  // Likewise, until so many more files may be open or none is due.
  virtual Status MergeFiles(std::uint64_t files) = 0;

  // Sweeps keep the keys of `holder` from now on; null: nobody holds any. Blocks: while a sweep
  // asks the last one.
  virtual void SetHolder(RowHolder* holder) = 0;
  // RowExpiry::points() may have grown: sweeps soon, or, without background compaction, with the
  // next Write.
  virtual void WantSweep() = 0;

  virtual StoreStats stats() const = 0;
  virtual std::uint64_t index_bytes() const = 0;  // As in stats(), cheap.
  // On disk, of rows that so many writes bring, at most; of them, `in_order` come in the order of
  // their keys' hashes, from write to write.
  virtual std::uint64_t MostWriteBytes(std::uint64_t rows, std::uint64_t in_order,
                                       std::uint64_t writes) const = 0;
  // About what many rows take on disk that come in that order.
  virtual std::uint64_t LikelyWriteBytes(std::uint64_t rows) const {
    return MostWriteBytes(rows, rows, 1);
  }
  // Rows of near hashes lie in blocks that are written whole: those that are written in the order
  // of hashes, or with others of their block, cost least. Else rows lie as they are given to a
  // write.
  virtual bool in_blocks() const { return false; }
  // The blocks in which keys of these hashes belong. Any thread; waits for what others do to the
  // index, and for no disk. REQUIRES: in_blocks().
  virtual void BlocksOf(std::span<const std::uint64_t> /*hashes*/, HashRange* /*blocks*/) const {
    TERRACE_CHECK(false);
  }
  // Rows that a write has to bring lest its files be small ones, which compaction merges with
  // others soon. ~0: what a write brings is not what its files hold, or nothing is written.
  virtual std::uint64_t LeastFileRows() const = 0;
  // Ends compaction, and removes what was kept for further writes: what stats() says of the disk
  // from now on stays true. REQUIRES: nothing but reads follows. Blocks: on what is being
  // compacted.
  virtual void Finish() = 0;
  // First error of a background thread, if any: the run stops with it.
  virtual Status background_status() const = 0;
};

// Store::MostWriteBytes of stores that share out the rows evenly.
inline std::uint64_t MostWriteBytes(std::span<Store* const> stores, std::uint64_t rows,
                                    std::uint64_t in_order, std::uint64_t writes) {
  const auto share = [&](std::uint64_t all) { return (all + stores.size() - 1) / stores.size(); };
  std::uint64_t bytes = 0;
  for (const Store* store : stores) {
    bytes += store->MostWriteBytes(share(rows), share(in_order), writes);
  }
  return bytes;
}
inline std::uint64_t LikelyWriteBytes(std::span<Store* const> stores, std::uint64_t rows) {
  std::uint64_t bytes = 0;
  for (const Store* store : stores) bytes += store->LikelyWriteBytes(rows / stores.size());
  return bytes;
}

// Removes the files of the store in `directory`, and the folder then; a link to it goes, and what
// it leads to stays. What is no store's stays, with the folder, and its paths are added to
// *foreign.
Status RemoveStore(FileSystem* fs, const std::string& directory, std::vector<std::string>* foreign);

}  // namespace terrace
