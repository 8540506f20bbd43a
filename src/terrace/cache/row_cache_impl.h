// RowCacheImpl: RowCache over RowArena, EntryMap, an EvictionPolicy and WriteBack. A cached row is
// in the map and in the policy, or held; a row that left dirty is in WriteBack until a store has
// it. Both change under mu_, so a key that is in neither is in its store in its newest version, or
// nowhere. Locks: pin_mu_ or flush_mu_, then mu_, then WriteBack's own, then a store's, which is
// asked for its blocks; none is held while a store reads or writes, except those that keep a second
// Pin, flush or reader out.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/base/thread.h"
#include "terrace/cache/chunk_supply.h"
#include "terrace/cache/entry_map.h"
#include "terrace/cache/eviction_policy.h"
#include "terrace/cache/row_arena.h"
#include "terrace/cache/row_cache.h"
#include "terrace/cache/write_back.h"

namespace terrace {

// Rows of one Pin on their way from the stores. Loads begin and end in the order of their pins, so
// that when one is done all rows of the pins before it are there as well; two run at a time, of
// which one is looked up, or its new rows are made, while the other has the disk. A failed
// load takes all those with it that are pinned before it has ended: they may share rows with it.
struct RowLoad {
  std::vector<EntryId> entries;  // (rows)
  std::vector<Key> keys;         // (rows)
  std::vector<std::byte*> rows;
  std::vector<std::uint8_t> found;  // (rows) 1: in a store; 0: created.
  // Guarded by the cache's mutex.
  bool done = false;
  Status status;
};

// How far the cache's dirty rows were visited: in the order of their keys' hashes, so that stores
// of blocks get those of a block together, else in that in which they lie in memory.
struct DirtyWalk {
  struct Row {
    std::uint64_t place;  // Hash, or number of the entry.
    EntryId id;
  };
  std::uint64_t next = 0;  // Smaller places were visited; 0 after the largest too.
  std::vector<Row> part;   // What is left to do at `next` when the buffers were full.

  bool ended() const { return next == 0 && part.empty(); }
};

class RowCacheImpl final : public RowCache, public RowHolder {
 public:
  // shards: those that the stores are.
  static Result<std::unique_ptr<RowCacheImpl>> Make(const RowCacheOptions& options,
                                                    std::vector<Store*> stores,
                                                    const ShardRange& shards);
  ~RowCacheImpl() override;

  std::size_t MaxPinnedRows() const override;
  Result<PinnedRows> StartPin(std::span<const Key> keys) override;
  // The same, but what the handle's rows() would tell is written to `rows`: the row of keys[i] to
  // rows[places[i]].
  Result<PinnedRows> StartPinOfPart(std::span<const Key> keys,
                                    std::span<const std::uint32_t> places, std::byte** rows);
  Status Peek(std::span<const Key> keys, std::span<std::byte* const> rows,
              std::span<std::uint8_t> found) override;
  Status FlushDirty() override;
  Status WriteAhead(std::uint64_t rows) override;
  std::uint64_t dirty_bytes() const override;
  std::uint64_t likely_dirty_bytes() const override;
  std::uint64_t dirty_writes() const override;
  Status SetCapacity(std::uint64_t capacity_bytes) override;
  std::uint64_t LeastCapacity(std::uint64_t rows) const override;
  void Abort(const Status& cause) override;
  Status background_status() const override;
  RowCacheStats stats() const override;
  void WithHeld(std::span<const Key> keys,
                const std::function<void(std::span<const std::uint8_t>)>& drop) override;

 protected:
  void MarkDirtyEntries(const PinnedRows& pinned, std::size_t begin, std::size_t end) override;
  void Unpin(PinnedRows* pinned) override;
  Status WaitFor(PinnedRows* pinned) override;

 private:
  static constexpr std::size_t kGroup = 64;  // Keys looked up together; their lines fit into L1.

  // The keys of a Pin that are not in the cache, by their number in the Pin.
  struct Missing {
    std::vector<std::uint32_t> index;
    std::vector<Key> keys;
    std::vector<std::byte*> rows;
    std::vector<std::uint8_t> found;  // 1: copied from the write buffer.

    void Clear() {
      index.clear();
      keys.clear();
      rows.clear();
      found.clear();
    }
  };
  // Where a Pin writes where its rows are.
  struct RowPlaces {
    std::byte** rows;
    const std::uint32_t* places;  // (keys) Null: in the order of the keys.

    void Put(std::size_t key, std::byte* row) const {
      rows[places == nullptr ? key : places[key]] = row;
    }
  };
  // Reads of the stores, one at a time.
  struct StoreReader {
    Mutex mu;
    std::unique_ptr<WorkerGroup> workers TERRACE_GUARDED_BY(mu);  // Null: shard by shard.
  };
  static constexpr std::size_t kLoaders = 2;
  // That a flush visits under one hold of mu_: of the map, some hundred rows; of a chunk.
  static constexpr std::uint64_t kFlushLines = 64;
  static constexpr std::uint32_t kFlushSlots = 4096;
  // Slots that are looked at for expired rows under one hold of mu_: a fraction of a millisecond.
  static constexpr std::size_t kSweepSlots = 4096;
  // Released handles whose lists the next Pins fill: fresh pages would cost more than to fill them.
  static constexpr std::size_t kSparePins = 2;

  RowCacheImpl(const RowCacheOptions& options, std::vector<Store*> stores, const ShardRange& shards,
               std::uint64_t chunk_bytes, std::unique_ptr<WriteBack> write_back);

  // Of so many chunks with what orders their rows, and the parts of that; what is there already may
  // stay a little larger than it would be built.
  std::uint64_t BytesFor(std::uint64_t chunks) const TERRACE_REQUIRES(mu_);
  std::uint64_t MapBytesFor(std::uint64_t chunks) const TERRACE_REQUIRES(mu_);
  std::uint64_t PolicyBytesFor(std::uint64_t chunks) const TERRACE_REQUIRES(mu_);
  std::uint64_t MostSpareBytes(std::uint64_t chunks) const;
  std::uint64_t ChunksFor(std::uint64_t capacity_bytes) const TERRACE_REQUIRES(mu_);
  std::uint64_t UsedBytes() const TERRACE_REQUIRES(mu_);
  std::uint64_t RowsIn(std::uint64_t chunks) const { return chunks * arena_.rows_per_chunk(); }

  // What a key is in the map by. Of a part the bits that choose the shard are alike, and a large
  // map would lead to few of its lines by them; stores of blocks are written to in the order of
  // hashes.
  std::uint64_t MapHash(Key key) const {
    return in_blocks_ ? MixKey(key) : SpreadHash(MixKey(key));
  }
  // Looks `keys` up (at most kGroup of them); kNoEntry where a key is not in memory.
  void Lookup(std::span<const Key> keys, EntryId* entries) const TERRACE_REQUIRES(mu_);
  Status Reserve(std::span<const Key> keys) TERRACE_REQUIRES(mu_);
  std::uint64_t CountNotHeld(std::span<const Key> keys) const TERRACE_REQUIRES(mu_);
  Result<PinnedRows> StartPinAt(std::span<const Key> keys, const RowPlaces* places);
  void PinPresent(std::span<const Key> keys, const RowPlaces& places, PinnedRows* pinned,
                  Missing* missing) TERRACE_REQUIRES(mu_);
  // Takes an entry for each missing row, evicting others. May release mu_ meanwhile.
  Status AllocateMissing(const RowPlaces& places, PinnedRows* pinned, Missing* missing)
      TERRACE_REQUIRES(mu_);
  Status AddChunk() TERRACE_REQUIRES(mu_);
  // Lets chunks be made ahead, within the capacity.
  void LimitSupply() TERRACE_REQUIRES(mu_);
  // Evicts up to `wanted` rows, and writes what AppendBlocks says; their entries go to `freed`, or
  // back to the arena when their chunk is closed. REQUIRES: wanted <= victims_at_once_, and the
  // write buffer has room for as many. appends null: dirty ones stay.
  std::size_t EvictGroup(std::size_t wanted, EntryId* freed, WriteBack::AppendScope* appends)
      TERRACE_REQUIRES(mu_);
  bool IsHot(const Entry& entry) const TERRACE_REQUIRES(mu_) {
    return entry.frequency >= policy_->hot_frequency();
  }
  // Takes a row out of the map, to the write buffer when it is dirty; whether it went there. The
  // entry is the caller's.
  bool Evict(EntryId id, bool may_come, WriteBack::AppendScope* appends) TERRACE_REQUIRES(mu_);
  // Writes what is dirty of the blocks of these hashes, of rows that are written, and is pinned by
  // nobody, as far as there is room. It stays, and its block need not be written once more when it
  // leaves. Sorts them. REQUIRES: in_blocks_, and as many as victims at most.
  void AppendBlocks(std::span<std::uint64_t> written, WriteBack::AppendScope* appends)
      TERRACE_REQUIRES(mu_);
  // A dirty row goes to the write buffers, and is clean.
  void AppendRow(EntryId id, bool may_come, WriteBack::AppendScope* appends) TERRACE_REQUIRES(mu_);
  // A dirty row that may go is clean from now on, as if it had been written.
  bool DropExpired(EntryId id) TERRACE_REQUIRES(mu_);
  // Whether the row may go, is not held, and so has left the cache.
  bool LeaveExpired(EntryId id) TERRACE_REQUIRES(mu_);
  // Once after each expiry point: has all rows leave that may, going through so many more slots.
  // Whether there is more to do.
  bool SweepExpired(std::size_t slots) TERRACE_REQUIRES(mu_);
  // Enters the rows of a Pin; those whose bytes are in no buffer are on their way from now on.
  void Publish(PinnedRows* pinned, const Missing& missing) TERRACE_REQUIRES(mu_);
  bool HasLoad() const TERRACE_REQUIRES(mu_) { return running_loads_ < loads_.size(); }
  // Runs the oldest load that does not run, by `reader`; mu_ is released meanwhile. Returns when it
  // has ended. REQUIRES: HasLoad().
  void RunLoad(StoreReader* reader) TERRACE_REQUIRES(mu_);
  // Reads the rows, or creates them.
  Status Load(StoreReader* reader, RowLoad* load) TERRACE_EXCLUDES(mu_);
  void EndLoad(RowLoad* load, const Status& status) TERRACE_REQUIRES(mu_);
  void WaitLocked(RowLoad* load) TERRACE_REQUIRES(mu_);
  void LoaderLoop(StoreReader* reader) TERRACE_EXCLUDES(mu_);
  Status ReadFromStores(StoreReader* reader, std::span<const Key> keys,
                        std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                        const std::atomic<bool>* stop);
  void UndoPin(const PinnedRows& pinned, const Missing& missing) TERRACE_REQUIRES(mu_);
  void UnpinEntries(std::span<const EntryId> entries) TERRACE_REQUIRES(mu_);
  // Copies what is in memory; appends the numbers of the other keys, counted from `first`.
  void PeekCached(std::size_t first, std::span<const Key> keys, std::span<std::byte* const> rows,
                  std::span<std::uint8_t> found, std::vector<std::size_t>* missing) const
      TERRACE_EXCLUDES(mu_);
  // FlushDirty, while flushing_ tells of it.
  Status FlushAll() TERRACE_EXCLUDES(mu_);
  // Copies the dirty rows of the walk's next part to the write buffers until they are full, and
  // waits for room there then. pinned: pinned ones too; cancellable: Abort ends it. Returns how
  // many there were; the walk is then where to go on.
  Result<std::uint64_t> FlushPart(DirtyWalk* walk, bool pinned, bool cancellable)
      TERRACE_EXCLUDES(mu_);
  // Its halves. The part's rows, and the place at which it ends, 0: the last; then their way into
  // the buffers. The part is empty if all have gone it.
  std::uint64_t FindDirty(DirtyWalk* walk, bool pinned) const TERRACE_REQUIRES(mu_);
  template <typename IsWanted>
  std::uint64_t FindByHash(DirtyWalk* walk, const IsWanted& is_wanted) const TERRACE_REQUIRES(mu_);
  template <typename IsWanted>
  std::uint64_t FindInMemory(DirtyWalk* walk, const IsWanted& is_wanted) const
      TERRACE_REQUIRES(mu_);
  std::size_t AppendDirty(DirtyWalk* walk, std::uint64_t end) TERRACE_REQUIRES(mu_);
  // A dirty row that is about not to be.
  void CountClean(Entry& entry) {
    dirty_rows_.fetch_sub(1, std::memory_order_relaxed);
    if (!IsStored(entry)) unstored_rows_.fetch_sub(1, std::memory_order_relaxed);
  }
  // While stores of blocks take a flush, so that nothing that is written beside it has them write
  // a block again; until more of it has been taken, or it has ended. Fail after Abort. May release
  // mu_.
  Status WaitForFlush() TERRACE_REQUIRES(mu_);
  Status WaitForFlushPart() TERRACE_REQUIRES(mu_);

  // Gives the memory of closed chunks without held rows back. May release mu_.
  Status ReleaseClosed() TERRACE_REQUIRES(mu_);
  // Closes as many chunks as the limit demands; held rows raise the limit.
  void CloseChunks() TERRACE_REQUIRES(mu_);
  // Evicts the rows of one closed chunk that are not held; true when it is empty. May release mu_.
  Result<bool> EmptyChunk(std::uint32_t chunk) TERRACE_REQUIRES(mu_);
  Status RebuildMap(std::uint64_t rows) TERRACE_REQUIRES(mu_);
  Status ReservePolicy(std::uint64_t rows) TERRACE_REQUIRES(mu_);

  const RowCacheOptions options_;
  const std::vector<Store*> stores_;
  const ShardRange shards_;
  const std::uint32_t victims_at_once_;
  const bool in_blocks_;  // Of rows of near hashes the stores write at a time.
  const std::unique_ptr<WriteBack> write_back_;

  Mutex pin_mu_;  // One Pin at a time.
  Missing missing_ TERRACE_GUARDED_BY(pin_mu_);
  Mutex flush_mu_;  // One FlushDirty at a time.
  std::array<StoreReader, kLoaders> readers_;
  std::vector<const WorkerGroup*> read_groups_;  // Those of readers_. Set by Create.
  mutable Mutex mu_;
  CondVar room_;         // Rows were released; aborted.
  CondVar load_wanted_;  // For the loaders: a load was queued; stop.
  CondVar loaded_;       // A load has ended.
  CondVar flushed_;      // flushing_ is false, or more rows are clean; aborted.
  // Bases and rows of pinned entries are read without mu_; chunk tables change under it.
  RowArena arena_;
  ChunkSupply supply_;
  EntryMap map_ TERRACE_GUARDED_BY(mu_);
  std::unique_ptr<EvictionPolicy> policy_ TERRACE_GUARDED_BY(mu_);
  std::uint64_t capacity_bytes_ TERRACE_GUARDED_BY(mu_) = 0;
  // What capacity_bytes_ allows: chunks, and bytes of the map and of the policy beside them.
  std::uint64_t target_chunks_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t map_limit_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t policy_limit_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t policy_rows_ TERRACE_GUARDED_BY(mu_) = 0;  // That the policy has memory for.
  std::uint64_t max_chunks_ TERRACE_GUARDED_BY(mu_) = 0;   // The same, or what held rows need.
  std::uint64_t held_rows_ TERRACE_GUARDED_BY(mu_) = 0;  // Pinned, or taken by the Pin in progress.
  std::uint64_t needed_rows_ TERRACE_GUARDED_BY(mu_) = 0;  // Reserved by the Pin in progress.
  std::uint32_t handles_ TERRACE_GUARDED_BY(mu_) = 0;
  std::vector<PinnedRows> spare_pins_ TERRACE_GUARDED_BY(mu_);
  DirtyWalk ahead_;  // Where WriteAhead goes on; its thread's.
  bool flushing_ TERRACE_GUARDED_BY(mu_) =
      false;  // Rows are on their way from the cache to blocks.
  // Expiry points of the last whole sweep, and of the one that goes on; where it does.
  std::uint64_t swept_points_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t sweep_points_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint32_t sweep_chunk_ TERRACE_GUARDED_BY(mu_) = 0, sweep_slot_ TERRACE_GUARDED_BY(mu_) = 0;
  std::deque<std::shared_ptr<RowLoad>> loads_ TERRACE_GUARDED_BY(mu_);  // Not done; oldest first.
  std::size_t running_loads_ TERRACE_GUARDED_BY(mu_) = 0;               // The first ones of them.
  std::uint64_t failed_loads_ TERRACE_GUARDED_BY(mu_) = 0;
  Status load_failure_ TERRACE_GUARDED_BY(mu_);  // Of the last of them.
  bool stop_ TERRACE_GUARDED_BY(mu_) = false;
  Status aborted_ TERRACE_GUARDED_BY(mu_);
  std::atomic<bool> stop_reads_{false};           // Relaxed: seen between two reads.
  RowCacheStats counts_ TERRACE_GUARDED_BY(mu_);  // The counters of it only.
  // In the cache, and of them those that no store has. Counts; they order nothing.
  std::atomic<std::uint64_t> dirty_rows_{0}, unstored_rows_{0};
  std::array<Thread, kLoaders> loaders_;
};

}  // namespace terrace
