// RowCache: the memory tier of one table (MEM-PS; HPS 5 and appendix D). Holds rows in huge-page
// arenas, brings missing ones from the stores of the table's shards, creates those that exist
// nowhere, keeps the working sets pinned, evicts by the policy that was asked for, and writes dirty
// rows back in batches. Threads: internally synchronised. Pins come from one thread at a time
// (stage 2), their rows are waited for by any (stage 3); MarkDirty, release and FlushDirty from
// stage 4 and the checkpoint; Peek from the validation. Borrows stores and schema callback, which
// must outlive it. Rows never move while pinned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/ids.h"
#include "terrace/base/status.h"
#include "terrace/cache/eviction_options.h"
#include "terrace/cache/future_keys.h"
#include "terrace/store/store.h"

namespace terrace {

struct RowCacheOptions {
  std::uint32_t row_bytes = 0;
  std::uint64_t capacity_bytes =
      0;  // For rows, their metadata, hash map and the write buffer, all together.
  EvictionOptions eviction;
  // Rows of the keys that it knows to come soon are evicted last, by kS3Fifo, and rows lie in the
  // files of stores without blocks in the order in which they come. Borrowed; null: nothing is
  // known.
  const FutureKeys* future = nullptr;
  // Dirty rows that are written together.
  std::uint64_t flush_bytes = std::uint64_t{16} << 20;
  // For a cache of so many bytes. More of them cost a written row less, in the index above all, and
  // make larger files; a small cache has better use for the memory.
  static std::uint64_t FlushBytesFor(std::uint64_t capacity_bytes);
  // Hot rows, which by the policy's count will be visited again soon, and the others are written
  // into files of their own, where the buffers are large enough for the stores' files; one buffer
  // more. false: for comparison.
  bool hot_apart = true;
  // Threads of the cache's own read what a Pin lacks, from all shards at the same time, and write
  // what was evicted. false: a Pin writes what it evicts before it goes on, and PinnedRows::Wait
  // reads, one shard after another (depth 0).
  bool background = true;
  // Above 1, with `background`: so many parts of the table, each of as many of its shards, are
  // pinned, loaded and written side by side, each in its share of the capacity (PartedRowCache). As
  // many of them as the number of shards divides by, if that is fewer.
  std::uint32_t parts = 1;
  // Runs once on each thread that pins beside the caller's; may be empty.
  std::function<void()> on_pin_thread;
  // Grain of the arenas; 0: 2 MiB, less for a small capacity and more for a huge one.
  std::uint64_t chunk_bytes = 0;
  // Fills the row that a key starts with: a pure function of the key.
  std::function<void(Key, std::byte*)> create_row;
  Clock* clock = Clock::Real();
  // Null: rows stay. Else a row that may go is not written back, and leaves if nobody pins it:
  // after each point every Pin goes through some of the rows, and FlushDirty through those that are
  // left. Its store drops what it has of it.
  const RowExpiry* expiry = nullptr;
};

struct RowCacheStats {
  std::uint64_t hits = 0,
                misses = 0;   // Distinct keys of each Pin: in memory (write buffer too), or not.
  std::uint64_t created = 0;  // Misses that were in no store.
  std::uint64_t evictions = 0, written_back = 0;  // Rows.
  std::uint64_t expired = 0;                      // Rows that were not written back.
  std::uint64_t rows = 0, pinned_rows = 0, dirty_rows = 0;
  std::uint64_t unstored_rows = 0;   // Dirty ones that no store has.
  std::uint64_t coming_rows = 0;     // Unpinned, that stay because they are known to come.
  std::uint64_t coming_evicted = 0;  // Of evictions: nothing else was left to evict.
  std::uint64_t used_bytes = 0, capacity_bytes = 0;
  std::uint64_t reserve_waits = 0;  // Pins that waited for an earlier working set to leave.
  // CPU time of the threads that load rows and touch memory for them; then where the time of the
  // thread that writes what was evicted went, with the CPU time of those beside it. Without threads
  // of the cache's own its callers have that time, also in their own figures.
  double load_cpu_seconds = 0;
  double write_busy_seconds = 0, write_wait_seconds = 0, write_cpu_seconds = 0;

  RowCacheStats& operator+=(const RowCacheStats& other);  // For several tables.
};

class RowCache;
struct PinnedParts;
struct RowLoad;

// A pinned working set: working-set row w lies at row(w) until the handle goes. Move-only; released
// by the destructor. A row that this or another handle has not marked dirty since it was created is
// forgotten with its last pin.
class PinnedRows {
 public:
  PinnedRows() = default;
  PinnedRows(PinnedRows&& other) noexcept;
  PinnedRows& operator=(PinnedRows&& other) noexcept;
  ~PinnedRows() { Release(); }

  // Blocks: until the rows' bytes are there; they may be read and trained after it succeeded. On
  // error the handle is good for nothing but its release.
  Status Wait();
  std::size_t size() const { return parts_ == nullptr ? entries_.size() : rows_.size(); }
  std::byte* row(std::size_t w) const { return rows_[w]; }
  std::span<std::byte* const> rows() const { return rows_; }
  // Working-set rows [begin, end) were trained. May be called for the same rows again.
  void MarkDirty(std::size_t begin, std::size_t end);
  void Release();

 private:
  friend class RowCacheImpl;
  friend class PartedRowCache;
  RowCache* cache_ = nullptr;
  std::vector<std::byte*> rows_;        // (keys of the Pin) Of a part's pin: none.
  std::vector<std::uint32_t> entries_;  // (keys of the Pin) places in the cache's metadata
  std::shared_ptr<RowLoad> load_;       // What brings rows that were not there; null: all were.
  std::shared_ptr<PinnedParts> parts_;  // Of a cache in parts, which has the two above; else null.
};

class RowCache {
 public:
  // stores: the table's shards, by ShardOfHash. kOutOfMemory; kInvalidArgument: a capacity too
  // small to work with.
  static Result<std::unique_ptr<RowCache>> Create(const RowCacheOptions& options,
                                                  std::vector<Store*> stores);
  virtual ~RowCache() =
      default;  // REQUIRES: no PinnedRows is alive. Dirty rows are lost: FlushDirty first.

  // The largest working set, in rows, that can be pinned when nothing else is: what a batch is cut
  // to.
  virtual std::size_t MaxPinnedRows() const = 0;

  // Pins the rows of `keys` (distinct) and has those that are not in memory brought there, or
  // created when they exist nowhere: PinnedRows::Wait says when they are. Reserves the memory of
  // all these first and waits for earlier sets to be released until there is enough; none is pinned
  // meanwhile, rows of another table's cache may be. Blocks: on that wait, on writes when the write
  // buffers are full, on a FlushDirty over stores of blocks before it evicts. kOutOfMemory at once
  // (of a cache in parts: when the other parts have theirs): more than MaxPinnedRows(). After
  // Abort(): its cause. After a failed write-back: its failure, until FlushDirty has overcome it.
  // On error, no change.
  virtual Result<PinnedRows> StartPin(std::span<const Key> keys) = 0;
  // StartPin and Wait.
  Result<PinnedRows> Pin(std::span<const Key> keys);

  // Copies the rows of `keys` (distinct) as trained so far: found[i] = 1 and row_bytes() at
  // rows[i]; a key that no training has touched, one created ahead included, is not found. Changes
  // nothing. Blocks: on reads.
  virtual Status Peek(std::span<const Key> keys, std::span<std::byte* const> rows,
                      std::span<std::uint8_t> found) = 0;

  // Writes every dirty row, pinned or not, to its store, and waits for all write-back in flight:
  // afterwards the stores hold all that was trained. REQUIRES: no row is being trained meanwhile.
  // Runs beside a Pin, even one that waits for memory, and after Abort(). On error the rows stay
  // dirty; the next call tries again what failed before.
  virtual Status FlushDirty() = 0;
  // Has up to `rows` dirty rows that nobody pins written, going on where the last call ended, so
  // that FlushDirty has less to do. Blocks: as StartPin, on writes and on a FlushDirty. From the
  // thread of the pins. Fails as StartPin does.
  virtual Status WriteAhead(std::uint64_t rows) = 0;
  // An upper bound of the bytes that FlushDirty would write now; and about how many it would.
  virtual std::uint64_t dirty_bytes() const = 0;
  virtual std::uint64_t likely_dirty_bytes() const = 0;
  // Likewise an upper bound: writes of each store.
  virtual std::uint64_t dirty_writes() const = 0;

  // Changes the limit. Smaller: evicts, and gives arena chunks back to the system. Blocks: as
  // StartPin, on writes and on a FlushDirty, which Abort ends. kOutOfMemory: pinned rows hold more;
  // the next Pin waits for them to leave and reaches the limit. kInvalidArgument: too small to work
  // with; nothing changed.
  virtual Status SetCapacity(std::uint64_t capacity_bytes) = 0;
  // The least that it takes with which so many rows can be pinned: the write buffers stay as they
  // are.
  virtual std::uint64_t LeastCapacity(std::uint64_t rows) const = 0;

  // Ends Pin's waits with `cause`; Pin fails from now on. FlushDirty still works, so that an
  // interrupted run can make its checkpoint.
  virtual void Abort(const Status& cause) = 0;
  // The failure of a write-back, if any; until FlushDirty has overcome it.
  virtual Status background_status() const = 0;

  virtual RowCacheStats stats() const = 0;

 protected:
  friend class PinnedRows;
  virtual void MarkDirtyEntries(const PinnedRows& pinned, std::size_t begin, std::size_t end) = 0;
  // Waits for a load in flight.
  virtual void Unpin(PinnedRows* pinned) = 0;
  virtual Status WaitFor(PinnedRows* pinned) = 0;
};

// The reader of a checkpoint (evaluate, predict): the same cache over read-only stores; rows that
// exist nowhere are zeros. It is RowCache with create_row that zeroes and nothing marked dirty.

}  // namespace terrace
