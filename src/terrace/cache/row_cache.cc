#include "terrace/cache/row_cache.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "terrace/base/prefetch.h"
#include "terrace/base/sync_point.h"
#include "terrace/cache/parted_row_cache.h"
#include "terrace/cache/row_cache_impl.h"

namespace terrace {
namespace {

constexpr std::uint32_t kVictims = 32;  // Rows evicted together, likewise.
// After so many groups without a clean row a pin beside a flush waits for more to be clean.
constexpr std::uint32_t kDirtyGroups = 64;
// Beyond so many at once a disk is busy, and threads only cost memory.
constexpr std::size_t kMostShardReaders = 16;
constexpr std::uint32_t kMaxHandles = 255;  // Entry::pins has eight bits.
constexpr std::uint32_t kMaxBufferRows = (std::uint32_t{1} << 24) - 1;

// Chunks of 2 MiB, but about sixteen in a small cache, so that capacity is used well, and at most
// 4,096 in a large one, because every chunk is a mapping.
std::uint64_t ChunkBytes(const RowCacheOptions& options) {
  constexpr std::uint64_t kPage = 4096;
  const std::uint64_t least =
      (options.row_bytes + 7 + sizeof(Entry) + 64 + kPage - 1) / kPage * kPage;
  std::uint64_t bytes = options.chunk_bytes / kPage * kPage;
  if (options.chunk_bytes == 0) {
    bytes = std::min(options.capacity_bytes / 16 / kPage * kPage, kHugePageBytes);
    const std::uint64_t pages = (options.capacity_bytes / 4096 + kHugePageBytes - 1);
    bytes = std::max(bytes, pages / kHugePageBytes * kHugePageBytes > kHugePageBytes
                                ? pages / kHugePageBytes * kHugePageBytes
                                : 0);
  }
  return std::max(bytes, least);
}

std::uint32_t BufferRows(const RowCacheOptions& options, std::size_t shards, bool hot_apart) {
  // Each shard gets flush_bytes at a time, but all buffers stay within an eighth of the capacity.
  const std::uint64_t most =
      options.capacity_bytes / 8 /
      std::max<std::uint64_t>(2, WriteBack::BufferCount(options.background, hot_apart));
  const std::uint64_t bytes = std::min(options.flush_bytes * shards, most);
  const std::uint64_t rows = bytes / (options.row_bytes + 40);
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(rows, 1, kMaxBufferRows));
}

// Of a table all stores are alike.
bool InBlocks(std::span<Store* const> stores) { return stores.front()->in_blocks(); }

WriteBackOptions BufferOptions(const RowCacheOptions& options, std::span<Store* const> stores) {
  WriteBackOptions result;
  result.row_bytes = options.row_bytes;
  result.background = options.background;
  result.clock = options.clock;
  std::uint64_t least_rows = 1;
  for (const Store* store : stores) least_rows = std::max(least_rows, store->LeastFileRows());
  // A buffer's rows are not shared out quite evenly.
  const std::uint64_t share = BufferRows(options, stores.size(), true) / stores.size() * 7 / 8;
  result.hot_apart = options.hot_apart && share >= least_rows;
  result.in_order = InBlocks(stores);
  if (!result.in_order) result.future = options.future;  // Rows in blocks lie by their hashes.
  result.buffer_rows = BufferRows(options, stores.size(), result.hot_apart);
  return result;
}

}  // namespace

std::uint64_t RowCacheOptions::FlushBytesFor(std::uint64_t capacity_bytes) {
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  const std::uint64_t bytes =
      std::max(std::min(capacity_bytes / 16, 16 * kMiB), capacity_bytes / 64);
  return std::clamp(bytes, kMiB / 4, 64 * kMiB);
}

RowCacheStats& RowCacheStats::operator+=(const RowCacheStats& other) {
  hits += other.hits;
  misses += other.misses;
  created += other.created;
  evictions += other.evictions;
  written_back += other.written_back;
  expired += other.expired;
  rows += other.rows;
  pinned_rows += other.pinned_rows;
  coming_rows += other.coming_rows;
  coming_evicted += other.coming_evicted;
  dirty_rows += other.dirty_rows;
  unstored_rows += other.unstored_rows;
  used_bytes += other.used_bytes;
  capacity_bytes += other.capacity_bytes;
  reserve_waits += other.reserve_waits;
  load_cpu_seconds += other.load_cpu_seconds;
  write_busy_seconds += other.write_busy_seconds;
  write_wait_seconds += other.write_wait_seconds;
  write_cpu_seconds += other.write_cpu_seconds;
  return *this;
}

PinnedRows::PinnedRows(PinnedRows&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)),
      rows_(std::exchange(other.rows_, {})),
      entries_(std::exchange(other.entries_, {})),
      load_(std::exchange(other.load_, nullptr)),
      parts_(std::exchange(other.parts_, nullptr)) {}

PinnedRows& PinnedRows::operator=(PinnedRows&& other) noexcept {
  if (this != &other) {
    Release();
    cache_ = std::exchange(other.cache_, nullptr);
    rows_ = std::exchange(other.rows_, {});
    entries_ = std::exchange(other.entries_, {});
    load_ = std::exchange(other.load_, nullptr);
    parts_ = std::exchange(other.parts_, nullptr);
  }
  return *this;
}

void PinnedRows::MarkDirty(std::size_t begin, std::size_t end) {
  if (begin == end) return;
  TERRACE_CHECK(cache_ != nullptr && begin < end && end <= size());
  cache_->MarkDirtyEntries(*this, begin, end);
}

Status PinnedRows::Wait() { return cache_ == nullptr ? OkStatus() : cache_->WaitFor(this); }

void PinnedRows::Release() {
  if (cache_ != nullptr) std::exchange(cache_, nullptr)->Unpin(this);
  rows_ = {};
  entries_ = {};
  load_ = nullptr;
  parts_ = nullptr;
}

Result<PinnedRows> RowCache::Pin(std::span<const Key> keys) {
  TERRACE_ASSIGN_OR_RETURN(PinnedRows pinned, StartPin(keys));
  TERRACE_RETURN_IF_ERROR(pinned.Wait());
  return pinned;
}

Result<std::unique_ptr<RowCache>> RowCache::Create(const RowCacheOptions& options,
                                                   std::vector<Store*> stores) {
  const std::uint32_t parts = PartedRowCache::PartsFor(options, stores.size());
  if (parts > 1) return PartedRowCache::Make(options, stores, parts);
  const ShardRange shards = ShardRange::All(stores.size());
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<RowCache> cache,
                           RowCacheImpl::Make(options, std::move(stores), shards));
  return cache;
}

Result<std::unique_ptr<RowCacheImpl>> RowCacheImpl::Make(const RowCacheOptions& options,
                                                         std::vector<Store*> stores,
                                                         const ShardRange& shards) {
  if (options.row_bytes == 0 || options.row_bytes > (std::uint32_t{1} << 30)) {
    return InvalidArgumentError("a row of " + std::to_string(options.row_bytes) +
                                " bytes: a cache holds rows of 1 byte to 1 GiB");
  }
  if (stores.empty() || stores.size() > 0xffff || !options.create_row || options.flush_bytes == 0) {
    return InvalidArgumentError("a cache needs stores, create_row and flush_bytes");
  }
  const std::uint64_t chunk_bytes = ChunkBytes(options);
  WriteBackOptions buffers = BufferOptions(options, stores);
  buffers.shards = shards;
  const std::uint32_t rows = RowArena::RowsPerChunk(options.row_bytes, chunk_bytes);
  TERRACE_CHECK(rows > 0);
  // What is too small is refused before anything is allocated.
  const std::uint64_t fixed_bytes = WriteBack::BytesFor(buffers);
  if (fixed_bytes + chunk_bytes > options.capacity_bytes) {
    return InvalidArgumentError("a cache of " + std::to_string(options.capacity_bytes) +
                                " bytes is too small: its write buffers take " +
                                std::to_string(fixed_bytes) + " and its first " +
                                std::to_string(rows) + " rows " + std::to_string(chunk_bytes));
  }
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<WriteBack> write_back,
                           WriteBack::Create(buffers, stores));
  std::unique_ptr<RowCacheImpl> cache(
      new RowCacheImpl(options, std::move(stores), shards, chunk_bytes, std::move(write_back)));
  {
    MutexLock lock(&cache->mu_);
    TERRACE_ASSIGN_OR_RETURN(cache->policy_,
                             MakeEvictionPolicy(options.eviction, &cache->arena_, options.future));
  }
  TERRACE_RETURN_IF_ERROR(cache->SetCapacity(options.capacity_bytes));
  for (Store* store : cache->stores_) store->SetHolder(cache.get());
  if (options.background) {
    RowCacheImpl* self = cache.get();
    for (std::size_t i = 0; i < kLoaders; ++i) {
      StoreReader* reader = &self->readers_[i];
      if (self->stores_.size() > 1) {
        const int threads = static_cast<int>(std::min(self->stores_.size(), kMostShardReaders));
        MutexLock lock(&reader->mu);
        reader->workers = std::make_unique<WorkerGroup>("cache-read-", threads, nullptr,
                                                        ThreadPriority::kYielding);
        self->read_groups_.push_back(reader->workers.get());
      }
      self->loaders_[i] = Thread("cache-read", ThreadPriority::kNormal,
                                 [self, reader] { self->LoaderLoop(reader); });
    }
  }
  return cache;
}

RowCacheImpl::RowCacheImpl(const RowCacheOptions& options, std::vector<Store*> stores,
                           const ShardRange& shards, std::uint64_t chunk_bytes,
                           std::unique_ptr<WriteBack> write_back)
    : options_(options),
      stores_(std::move(stores)),
      shards_(shards),
      victims_at_once_(std::min(kVictims, write_back->buffer_rows())),
      in_blocks_(InBlocks(stores_)),
      write_back_(std::move(write_back)),
      arena_(options.row_bytes, chunk_bytes),
      supply_(chunk_bytes, options.background) {}

RowCacheImpl::~RowCacheImpl() {
  // A write in flight says which of its rows are stored: until it is in, no sweep may take them.
  write_back_->Stop();
  for (Store* store : stores_) store->SetHolder(nullptr);
  {
    MutexLock lock(&mu_);
    TERRACE_CHECK(handles_ == 0);
    stop_ = true;
    load_wanted_.NotifyAll();
  }
  for (Thread& loader : loaders_) {
    if (loader.joinable()) loader.Join();
  }
}

std::size_t RowCacheImpl::MaxPinnedRows() const {
  MutexLock lock(&mu_);
  return RowsIn(target_chunks_);
}

void RowCacheImpl::Lookup(std::span<const Key> keys, EntryId* entries) const {
  std::array<std::uint64_t, kGroup> hashes;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    hashes[i] = MapHash(keys[i]);
    map_.Prefetch(hashes[i]);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    entries[i] = map_.Candidate(hashes[i]);
    if (entries[i] != kNoEntry) __builtin_prefetch(&arena_.entry(entries[i]), 1);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (entries[i] != kNoEntry && arena_.entry(entries[i]).key == keys[i]) continue;
    const Key key = keys[i];
    entries[i] =
        map_.Find(hashes[i], [this, key](EntryId id) { return arena_.entry(id).key == key; });
  }
}

Result<PinnedRows> RowCacheImpl::StartPin(std::span<const Key> keys) {
  return StartPinAt(keys, nullptr);
}

Result<PinnedRows> RowCacheImpl::StartPinOfPart(std::span<const Key> keys,
                                                std::span<const std::uint32_t> places,
                                                std::byte** rows) {
  TERRACE_CHECK(places.size() == keys.size());
  const RowPlaces at = {rows, places.data()};
  return StartPinAt(keys, &at);
}

// places: null for the handle's own list.
Result<PinnedRows> RowCacheImpl::StartPinAt(std::span<const Key> keys, const RowPlaces* places) {
  MutexLock one_pin(&pin_mu_);
  PinnedRows pinned;
  Missing& missing = missing_;
  missing.Clear();
  MutexLock lock(&mu_);
  if (!spare_pins_.empty()) {
    pinned = std::move(spare_pins_.back());
    spare_pins_.pop_back();
  }
  // Faster than rows come, and less than the work of the Pin itself; it frees entries for it.
  SweepExpired(std::max(kSweepSlots, 4 * keys.size()));
  pinned.entries_.assign(keys.size(), kNoEntry);
  if (places == nullptr) pinned.rows_.resize(keys.size());
  const RowPlaces at = places != nullptr ? *places : RowPlaces{pinned.rows_.data(), nullptr};
  TERRACE_RETURN_IF_ERROR(Reserve(keys));
  const std::uint64_t failed_before = failed_loads_;
  PinPresent(keys, at, &pinned, &missing);
  Status allocated = AllocateMissing(at, &pinned, &missing);
  // While that waited for room; it may have been to bring rows that are pinned here.
  if (allocated.ok() && failed_loads_ != failed_before) allocated = load_failure_;
  if (!allocated.ok()) {
    UndoPin(pinned, missing);
    return allocated;
  }
  // Under the same hold of mu_ as the eviction's end and the entry into the map: a row that is in
  // neither, nor here, is in its store in its newest version.
  write_back_->Copy(missing.keys, missing.rows, missing.found);
  Publish(&pinned, missing);
  pinned.cache_ = this;
  return pinned;
}

Status RowCacheImpl::Reserve(std::span<const Key> keys) {
  bool waited = false;
  while (true) {
    if (!aborted_.ok()) return aborted_;
    TERRACE_RETURN_IF_ERROR(write_back_->status());
    CloseChunks();
    TERRACE_RETURN_IF_ERROR(ReleaseClosed());
    const std::uint64_t limit = RowsIn(target_chunks_);
    // Rows that every working set pins would keep their chunks for ever: the limit is reached when
    // no set is pinned.
    const bool over_limit = arena_.closed_chunks() > 0 && handles_ > 0;
    if (keys.size() > limit) {
      return OutOfMemoryError(
          "a working set of " + std::to_string(keys.size()) +
          " rows does not fit into a cache of " + std::to_string(limit) +
          " rows: a larger memory.budget or a smaller training.batch is needed");
    }
    if (handles_ < kMaxHandles && !over_limit) {
      std::uint64_t needed = keys.size();
      if (held_rows_ + needed > limit) needed = CountNotHeld(keys);
      if (held_rows_ + needed <= limit) {
        needed_rows_ = needed;
        CloseChunks();
        return OkStatus();
      }
    }
    if (!std::exchange(waited, true)) ++counts_.reserve_waits;
    room_.Wait(&mu_);
  }
}

std::uint64_t RowCacheImpl::CountNotHeld(std::span<const Key> keys) const {
  std::array<EntryId, kGroup> entries;
  std::uint64_t count = 0;
  for (std::size_t begin = 0; begin < keys.size(); begin += kGroup) {
    const auto group = keys.subspan(begin, std::min(kGroup, keys.size() - begin));
    Lookup(group, entries.data());
    for (std::size_t i = 0; i < group.size(); ++i) {
      count += entries[i] == kNoEntry || arena_.entry(entries[i]).pins == 0;
    }
  }
  return count;
}

void RowCacheImpl::PinPresent(std::span<const Key> keys, const RowPlaces& places,
                              PinnedRows* pinned, Missing* missing) {
  std::array<EntryId, kGroup> present;
  for (std::size_t begin = 0; begin < keys.size(); begin += kGroup) {
    const auto group = keys.subspan(begin, std::min(kGroup, keys.size() - begin));
    EntryId* entries = pinned->entries_.data() + begin;
    Lookup(group, entries);
    std::size_t count = 0;
    for (std::size_t i = 0; i < group.size(); ++i) {
      if (entries[i] == kNoEntry) {
        missing->index.push_back(static_cast<std::uint32_t>(begin + i));
        continue;
      }
      present[count++] = entries[i];
      places.Put(begin + i, arena_.row(entries[i]));
    }
    policy_->Visit({present.data(), count});
    for (std::size_t i = 0; i < count; ++i) {
      if (arena_.entry(present[i]).pins++ > 0) continue;
      arena_.Hold(present[i]);
      ++held_rows_;
    }
  }
  needed_rows_ = missing->index.size();
  missing->keys.reserve(missing->index.size());
  for (const std::uint32_t index : missing->index) missing->keys.push_back(keys[index]);
  missing->found.assign(missing->index.size(), 0);
}

Status RowCacheImpl::AllocateMissing(const RowPlaces& places, PinnedRows* pinned,
                                     Missing* missing) {
  std::array<EntryId, kVictims> freed;
  const std::size_t wanted = missing->keys.size();
  missing->rows.reserve(wanted);
  const auto take = [&](EntryId id) {
    const std::size_t number = missing->rows.size();
    arena_.entry(id).key = missing->keys[number];
    pinned->entries_[missing->index[number]] = id;
    places.Put(missing->index[number], arena_.row(id));
    missing->rows.push_back(arena_.row(id));
  };
  bool evicted = false;
  std::uint32_t all_dirty = 0;  // Groups of victims, one after another.
  while (missing->rows.size() < wanted) {
    const EntryId id = arena_.Allocate();
    if (id != kNoEntry) {
      take(id);
      ++held_rows_;
      --needed_rows_;
      continue;
    }
    if (arena_.present_chunks() < max_chunks_) {
      TERRACE_RETURN_IF_ERROR(AddChunk());
      continue;
    }
    const std::size_t victims =
        std::min<std::size_t>(wanted - missing->rows.size(), victims_at_once_);
    const auto take_freed = [&](std::size_t count) TERRACE_REQUIRES(mu_) {
      for (std::size_t i = 0; i < count; ++i) take(freed[i]);
      held_rows_ += count;
      needed_rows_ -= count;
      evicted = true;
    };
    if (flushing_) {
      const std::size_t clean = EvictGroup(victims, freed.data(), nullptr);
      take_freed(clean);
      all_dirty = clean > 0 ? 0 : all_dirty + 1;
      if (all_dirty == kDirtyGroups) {
        all_dirty = 0;
        TERRACE_RETURN_IF_ERROR(WaitForFlushPart());
      }
      continue;
    }
    {
      WriteBack::AppendScope appends(write_back_.get());
      if (appends.room() >= victims) {
        take_freed(EvictGroup(victims, freed.data(), &appends));
        continue;
      }
    }
    mu_.Unlock();
    Status room = write_back_->MakeRoom(victims, /*cancellable=*/true);
    mu_.Lock();
    if (!room.ok()) return room;
  }
  if (!evicted || options_.background) return OkStatus();
  mu_.Unlock();
  Status written = write_back_->WriteNow();
  mu_.Lock();
  return written;
}

Status RowCacheImpl::AddChunk() {
  const std::uint64_t rows = RowsIn(arena_.present_chunks() + 1);
  if (map_.capacity_rows() < rows) {
    // Doubled, so that every row is moved once on average, but never beyond what the limit allows.
    TERRACE_RETURN_IF_ERROR(
        RebuildMap(std::max(rows, std::min(2 * map_.capacity_rows(), RowsIn(max_chunks_)))));
  }
  // What a larger cache had reserved may have been kept.
  if (policy_rows_ < rows) TERRACE_RETURN_IF_ERROR(ReservePolicy(rows));
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer memory, supply_.Take());
  arena_.AddChunk(std::move(memory));
  LimitSupply();
  return OkStatus();
}

Status RowCacheImpl::RebuildMap(std::uint64_t rows) {
  TERRACE_RETURN_IF_ERROR(map_.Reset(rows));
  constexpr std::uint32_t kAhead = 16;  // Entries; what memory delivers while one is inserted.
  for (std::uint32_t chunk = 0; chunk < arena_.chunk_numbers(); ++chunk) {
    if (!arena_.present(chunk)) continue;
    const std::uint32_t touched = arena_.touched(chunk);
    for (std::uint32_t slot = 0; slot < touched; ++slot) {
      if (slot + kAhead < touched) {
        map_.Prefetch(MapHash(arena_.entry(arena_.id(chunk, slot + kAhead)).key));
      }
      const EntryId id = arena_.id(chunk, slot);
      Entry& entry = arena_.entry(id);
      if (entry.place >= kHeld && LoadFlags(entry) != kLostFlag) {
        map_.Insert(MapHash(entry.key), id);
      }
    }
  }
  return OkStatus();
}

std::size_t RowCacheImpl::EvictGroup(std::size_t wanted, EntryId* freed,
                                     WriteBack::AppendScope* appends) {
  std::array<EntryId, kVictims> victims;
  const std::size_t count = policy_->TakeVictims(wanted, victims.data());
  TERRACE_CHECK(count > 0);  // What is reserved is not held.
  for (std::size_t i = 0; i < count; ++i) {
    Entry& entry = arena_.entry(victims[i]);
    map_.Prefetch(MapHash(entry.key));
    if (appends == nullptr || !IsDirty(entry)) continue;
    appends->Prefetch(entry.key);
    PrefetchRead(arena_.row(victims[i]),
                 std::min<std::size_t>(options_.row_bytes, kMostPrefetchBytes));
  }
  std::array<EntryId, kVictims> leaving;
  std::array<std::uint64_t, kVictims> written;  // Hashes, if there are blocks.
  std::size_t dirty = 0, leave = 0, writes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const EntryId id = victims[i];
    if (appends == nullptr && IsDirty(arena_.entry(id)) && !DropExpired(id)) {
      victims[dirty++] = id;
    } else {
      leaving[leave++] = id;
    }
  }
  policy_->PutBack({victims.data(), dirty});
  policy_->Leave({leaving.data(), leave});
  std::size_t kept = 0;
  for (std::size_t i = 0; i < leave; ++i) {
    const EntryId id = leaving[i];
    if (Evict(id, /*may_come=*/IsHot(arena_.entry(id)), appends) && in_blocks_) {
      written[writes++] = MixKey(arena_.entry(id).key);
    }
    if (arena_.is_closed(id)) {
      arena_.Free(id);
      continue;
    }
    arena_.entry(id).place = kTaken;
    arena_.Hold(id);
    freed[kept++] = id;
  }
  if (writes > 0) AppendBlocks({written.data(), writes}, appends);
  return kept;
}

bool RowCacheImpl::Evict(EntryId id, bool may_come, WriteBack::AppendScope* appends) {
  const bool written = IsDirty(arena_.entry(id)) && !DropExpired(id);
  if (written) {
    SyncPoint::Hit("cache.evict.before_write");
    AppendRow(id, may_come, appends);
  }
  map_.Erase(MapHash(arena_.entry(id).key), id);
  ++counts_.evictions;
  return written;
}

void RowCacheImpl::AppendRow(EntryId id, bool may_come, WriteBack::AppendScope* appends) {
  Entry& entry = arena_.entry(id);
  appends->Append(entry.key, arena_.row(id),
                  {.stored = IsStored(entry), .hot = IsHot(entry), .may_come = may_come});
  CountClean(entry);
  StoreFlags(entry, 0);
}

void RowCacheImpl::AppendBlocks(std::span<std::uint64_t> written, WriteBack::AppendScope* appends) {
  std::sort(written.begin(), written.end());
  std::array<std::uint64_t, kVictims> hashes;
  std::array<HashRange, kVictims> blocks;
  struct BlockRow {
    EntryId id;
    std::uint32_t block;  // Its number.
  };
  std::vector<BlockRow> rows;
  std::size_t room = appends->room();
  for (std::uint32_t shard = 0; shard < stores_.size(); ++shard) {
    std::size_t count = 0;
    for (const std::uint64_t hash : written) {
      if (shards_.Number(hash) == shard) hashes[count++] = hash;
    }
    if (count == 0) continue;
    stores_[shard]->BlocksOf({hashes.data(), count}, blocks.data());
    rows.clear();
    for (std::uint32_t b = 0; b < count; ++b) {
      if (b > 0 && blocks[b].first == blocks[b - 1].first) continue;
      map_.VisitRange(blocks[b].first, blocks[b].last, [&](EntryId id) {
        __builtin_prefetch(&arena_.entry(id), 1);
        rows.push_back({id, b});
      });
    }
    std::erase_if(rows, [&](const BlockRow& row) {
      Entry& entry = arena_.entry(row.id);
      if (!IsDirty(entry) || entry.pins > 0) return true;
      const std::uint64_t hash = MixKey(entry.key);
      const auto& [first, last] = blocks[row.block];
      if (hash < first || hash > last || shards_.Number(hash) != shard) return true;
      appends->Prefetch(entry.key);
      PrefetchRead(arena_.row(row.id),
                   std::min<std::size_t>(options_.row_bytes, kMostPrefetchBytes));
      return false;
    });
    for (const BlockRow& row : rows) {
      if (DropExpired(row.id)) continue;
      if (room == 0) return;
      AppendRow(row.id, /*may_come=*/true, appends);
      --room;
    }
  }
}

bool RowCacheImpl::DropExpired(EntryId id) {
  if (options_.expiry == nullptr || !options_.expiry->MayGo(arena_.row(id))) return false;
  Entry& entry = arena_.entry(id);
  CountClean(entry);
  StoreFlags(entry, LoadFlags(entry) & kUnstoredFlag);
  ++counts_.expired;
  return true;
}

bool RowCacheImpl::LeaveExpired(EntryId id) {
  Entry& entry = arena_.entry(id);
  if (entry.place < kFirstQueue || entry.pins > 0 || options_.expiry == nullptr) return false;
  if (!options_.expiry->MayGo(arena_.row(id))) return false;
  if (IsDirty(entry)) DropExpired(id);
  policy_->Forget(id);
  map_.Erase(MapHash(entry.key), id);
  arena_.Free(id);
  return true;
}

bool RowCacheImpl::SweepExpired(std::size_t slots) {
  if (options_.expiry == nullptr) return false;
  if (sweep_points_ == swept_points_) {
    sweep_points_ = options_.expiry->points();
    if (sweep_points_ == swept_points_) return false;
    sweep_chunk_ = sweep_slot_ = 0;
  }
  for (; sweep_chunk_ < arena_.chunk_numbers(); ++sweep_chunk_) {
    for (; arena_.present(sweep_chunk_) && sweep_slot_ < arena_.touched(sweep_chunk_);
         ++sweep_slot_) {
      if (slots-- == 0) return true;
      LeaveExpired(arena_.id(sweep_chunk_, sweep_slot_));
    }
    sweep_slot_ = 0;
  }
  swept_points_ = sweep_points_;
  return false;
}

void RowCacheImpl::WithHeld(std::span<const Key> keys,
                            const std::function<void(std::span<const std::uint8_t>)>& drop) {
  std::vector<std::uint8_t> held(keys.size());
  std::array<EntryId, kGroup> entries;
  // Whatever comes to be held has to enter the map first.
  MutexLock lock(&mu_);
  write_back_->Find(keys, held);
  for (std::size_t begin = 0; begin < keys.size(); begin += kGroup) {
    const auto group = keys.subspan(begin, std::min(kGroup, keys.size() - begin));
    Lookup(group, entries.data());
    for (std::size_t i = 0; i < group.size(); ++i) {
      if (entries[i] == kNoEntry || held[begin + i] != 0) continue;
      held[begin + i] = LeaveExpired(entries[i]) ? 0 : 1;
    }
  }
  drop(held);
}

void RowCacheImpl::Publish(PinnedRows* pinned, const Missing& missing) {
  auto load = std::make_shared<RowLoad>();
  std::array<EntryId, kGroup> group;
  for (std::size_t begin = 0; begin < missing.keys.size(); begin += kGroup) {
    const std::size_t count = std::min(kGroup, missing.keys.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      map_.Prefetch(MapHash(missing.keys[begin + i]));
      group[i] = pinned->entries_[missing.index[begin + i]];
      __builtin_prefetch(&arena_.entry(group[i]), 1);
    }
    policy_->Admit({group.data(), count});
    for (std::size_t i = 0; i < count; ++i) {
      Entry& entry = arena_.entry(group[i]);
      entry.pins = 1;
      const bool here = missing.found[begin + i] != 0;
      StoreFlags(entry, here ? 0 : kLoadingFlag);
      map_.Insert(MapHash(entry.key), group[i]);
      if (here) continue;
      load->entries.push_back(group[i]);
      load->keys.push_back(entry.key);
      load->rows.push_back(arena_.row(group[i]));
    }
  }
  counts_.hits += pinned->size() - load->keys.size();
  counts_.misses += load->keys.size();
  ++handles_;
  if (!load->keys.empty()) {
    loads_.push_back(std::move(load));
    load_wanted_.NotifyOne();
  }
  // Without rows of its own the pin may share some that an earlier one brings.
  if (!loads_.empty()) pinned->load_ = loads_.back();
}

void RowCacheImpl::UndoPin(const PinnedRows& pinned, const Missing& missing) {
  std::vector<EntryId> present = pinned.entries_;
  for (const std::uint32_t index : missing.index) {
    const EntryId id = std::exchange(present[index], kNoEntry);
    if (id == kNoEntry) continue;
    arena_.Unhold(id);
    arena_.Free(id);
    --held_rows_;
  }
  std::erase(present, kNoEntry);
  needed_rows_ = 0;
  UnpinEntries(present);
}

void RowCacheImpl::MarkDirtyEntries(const PinnedRows& pinned, std::size_t begin, std::size_t end) {
  constexpr std::size_t kAhead = 16;
  std::uint64_t fresh = 0, unstored = 0;
  for (std::size_t w = begin; w < end; ++w) {
    if (w + kAhead < end) __builtin_prefetch(&arena_.entry(pinned.entries_[w + kAhead]), 1);
    const std::uint8_t flags = SetDirty(arena_.entry(pinned.entries_[w]));
    fresh += (flags & kDirtyFlag) != 0 ? 1 : 0;
    unstored += (flags & kUnstoredFlag) != 0 ? 1 : 0;
  }
  dirty_rows_.fetch_add(fresh, std::memory_order_relaxed);
  unstored_rows_.fetch_add(unstored, std::memory_order_relaxed);
}

void RowCacheImpl::Unpin(PinnedRows* pinned) {
  MutexLock lock(&mu_);
  if (pinned->load_ != nullptr) WaitLocked(pinned->load_.get());
  --handles_;
  UnpinEntries(pinned->entries_);
  pinned->load_ = nullptr;
  if (spare_pins_.size() < kSparePins) spare_pins_.push_back(std::move(*pinned));
}

void RowCacheImpl::UnpinEntries(std::span<const EntryId> entries) {
  constexpr std::size_t kAhead = 16;
  std::array<EntryId, kGroup> released;
  std::size_t count = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i + kAhead < entries.size()) __builtin_prefetch(&arena_.entry(entries[i + kAhead]), 1);
    Entry& entry = arena_.entry(entries[i]);
    TERRACE_DCHECK(entry.pins > 0);
    if (--entry.pins > 0) continue;
    arena_.Unhold(entries[i]);
    --held_rows_;
    const std::uint8_t flags = LoadFlags(entry);
    if (flags == kNewFlag || flags == kLostFlag) {
      // Never trained: its value is a function of its key, and it must leave no trace.
      policy_->Forget(entries[i]);
      if (flags == kNewFlag) map_.Erase(MapHash(entry.key), entries[i]);
      arena_.Free(entries[i]);
      continue;
    }
    if (entry.place == kHeld) released[count++] = entries[i];
    if (count == released.size()) policy_->Release({released.data(), std::exchange(count, 0)});
  }
  policy_->Release({released.data(), count});
  room_.NotifyAll();
}

void RowCacheImpl::Abort(const Status& cause) {
  write_back_->Cancel(cause);
  stop_reads_.store(true, std::memory_order_relaxed);
  MutexLock lock(&mu_);
  if (aborted_.ok()) aborted_ = cause;
  room_.NotifyAll();
  flushed_.NotifyAll();
}

Status RowCacheImpl::background_status() const { return write_back_->status(); }

RowCacheStats RowCacheImpl::stats() const {
  MutexLock lock(&mu_);
  RowCacheStats result = counts_;
  result.written_back = write_back_->written_rows();
  result.rows = arena_.used_rows();
  result.pinned_rows = held_rows_;
  result.dirty_rows = dirty_rows_.load(std::memory_order_relaxed) + write_back_->unwritten_rows();
  result.unstored_rows =
      unstored_rows_.load(std::memory_order_relaxed) + write_back_->unstored_rows();
  result.coming_rows = policy_->coming().rows;
  result.coming_evicted = policy_->coming().evicted;
  result.used_bytes = UsedBytes();
  result.capacity_bytes = std::max(capacity_bytes_, result.used_bytes);
  result.load_cpu_seconds = supply_.cpu_seconds();
  for (const Thread& loader : loaders_) result.load_cpu_seconds += loader.cpu_seconds();
  for (const WorkerGroup* group : read_groups_) result.load_cpu_seconds += group->cpu_seconds();
  const WriteBackTimes times = write_back_->times();
  result.write_busy_seconds = times.busy_seconds;
  result.write_wait_seconds = times.waited_for_input_seconds;
  result.write_cpu_seconds = times.cpu_seconds;
  return result;
}

}  // namespace terrace
