// What RowCacheImpl does for checkpoints and readers.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "terrace/base/prefetch.h"
#include "terrace/base/sync_point.h"
#include "terrace/cache/row_cache_impl.h"

namespace terrace {

void RowCacheImpl::PeekCached(std::size_t first, std::span<const Key> keys,
                              std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                              std::vector<std::size_t>* missing) const {
  std::array<EntryId, kGroup> entries;
  MutexLock lock(&mu_);
  write_back_->Copy(keys, rows, found);
  for (std::size_t begin = 0; begin < keys.size(); begin += kGroup) {
    const auto group = keys.subspan(begin, std::min(kGroup, keys.size() - begin));
    Lookup(group, entries.data());
    for (std::size_t i = 0; i < group.size(); ++i) {
      // A row on its way here is still as its store has it.
      const std::uint8_t flags =
          entries[i] == kNoEntry ? kLoadingFlag : LoadFlags(arena_.entry(entries[i]));
      if (flags == kLoadingFlag) {
        if (found[begin + i] == 0) missing->push_back(first + begin + i);
      } else if (flags != kNewFlag) {
        // At least as new as what the write buffer has.
        std::memcpy(rows[begin + i], arena_.row(entries[i]), options_.row_bytes);
        found[begin + i] = 1;
      }
    }
  }
}

Status RowCacheImpl::Peek(std::span<const Key> keys, std::span<std::byte* const> rows,
                          std::span<std::uint8_t> found) {
  constexpr std::size_t kKeysPerLock = 1024;  // A Pin or release waits no longer than for these.
  std::fill(found.begin(), found.end(), std::uint8_t{0});
  std::vector<std::size_t> missing;
  for (std::size_t first = 0; first < keys.size(); first += kKeysPerLock) {
    const std::size_t count = std::min(keys.size() - first, kKeysPerLock);
    PeekCached(first, keys.subspan(first, count), rows.subspan(first, count),
               found.subspan(first, count), &missing);
  }
  if (missing.empty()) return OkStatus();
  std::vector<Key> missing_keys;
  std::vector<std::byte*> missing_rows;
  for (const std::size_t i : missing) {
    missing_keys.push_back(keys[i]);
    missing_rows.push_back(rows[i]);
  }
  std::vector<std::uint8_t> missing_found(missing.size(), 0);
  TERRACE_RETURN_IF_ERROR(
      ReadFromStores(&readers_.front(), missing_keys, missing_rows, missing_found, nullptr));
  for (std::size_t i = 0; i < missing.size(); ++i) found[missing[i]] = missing_found[i];
  return OkStatus();
}

Status RowCacheImpl::FlushDirty() {
  MutexLock one_flush(&flush_mu_);
  {
    MutexLock lock(&mu_);
    flushing_ = in_blocks_;
  }
  const Status status = FlushAll();
  MutexLock lock(&mu_);
  flushing_ = false;
  flushed_.NotifyAll();
  return status;
}

Status RowCacheImpl::FlushAll() {
  // What failed before comes first, because newer versions of its rows may follow.
  TERRACE_RETURN_IF_ERROR(write_back_->Flush());
  for (bool more = true; more;) {
    MutexLock lock(&mu_);
    more = SweepExpired(kSweepSlots);
  }
  SyncPoint::Hit("cache.flush.before_walk");
  DirtyWalk walk;
  // A row that comes from here on was read from a store or is new.
  do {
    TERRACE_RETURN_IF_ERROR(FlushPart(&walk, /*pinned=*/true, /*cancellable=*/false).status());
  } while (!walk.ended());
  SyncPoint::Hit("cache.flush.before_write");
  TERRACE_RETURN_IF_ERROR(write_back_->Flush());
  SyncPoint::Hit("cache.flush.after_write");
  return OkStatus();
}

Status RowCacheImpl::WaitForFlush() {
  while (flushing_ && aborted_.ok()) flushed_.Wait(&mu_);
  return aborted_;
}

Status RowCacheImpl::WaitForFlushPart() {
  if (flushing_ && aborted_.ok()) flushed_.Wait(&mu_);
  return aborted_;
}

Status RowCacheImpl::WriteAhead(std::uint64_t rows) {
  const std::uint64_t begin = ahead_.next;
  std::uint64_t done = 0;
  // Once around at most: to the end, and from there to where it began.
  for (bool to_end = true; done < rows && (to_end || ahead_.next < begin);) {
    {
      MutexLock lock(&mu_);
      TERRACE_RETURN_IF_ERROR(WaitForFlush());
    }
    TERRACE_ASSIGN_OR_RETURN(const std::uint64_t some,
                             FlushPart(&ahead_, /*pinned=*/false, /*cancellable=*/true));
    done += some;
    if (!ahead_.ended()) continue;
    if (!to_end) break;
    to_end = false;
  }
  return write_back_->WriteNow();
}

std::uint64_t RowCacheImpl::FindDirty(DirtyWalk* walk, bool pinned) const {
  walk->part.clear();
  const auto is_wanted = [pinned](Entry& entry) {
    return IsDirty(entry) && (entry.pins == 0 || pinned);
  };
  return in_blocks_ ? FindByHash(walk, is_wanted) : FindInMemory(walk, is_wanted);
}

template <typename IsWanted>
std::uint64_t RowCacheImpl::FindByHash(DirtyWalk* walk, const IsWanted& is_wanted) const {
  const std::uint64_t end = map_.VisitFrom(walk->next, kFlushLines, [&](EntryId id) {
    PrefetchRead(&arena_.entry(id), sizeof(Entry));
    walk->part.push_back({0, id});
  });
  for (DirtyWalk::Row& row : walk->part) row.place = MixKey(arena_.entry(row.id).key);
  std::erase_if(walk->part, [&](const DirtyWalk::Row& row) {
    return row.place < walk->next || row.place > end - 1 || !is_wanted(arena_.entry(row.id));
  });
  std::sort(walk->part.begin(), walk->part.end(),
            [](const DirtyWalk::Row& a, const DirtyWalk::Row& b) { return a.place < b.place; });
  return end;
}

template <typename IsWanted>
std::uint64_t RowCacheImpl::FindInMemory(DirtyWalk* walk, const IsWanted& is_wanted) const {
  std::uint32_t chunk = arena_.chunk_of(static_cast<EntryId>(walk->next));
  std::uint32_t slot = arena_.slot_of(static_cast<EntryId>(walk->next));
  if (chunk < arena_.chunk_numbers() && arena_.present(chunk)) {
    const std::uint32_t touched = arena_.touched(chunk);
    for (const std::uint32_t end = std::min(touched, slot + kFlushSlots); slot < end; ++slot) {
      const EntryId id = arena_.id(chunk, slot);
      Entry& entry = arena_.entry(id);
      if (entry.place >= kHeld && is_wanted(entry)) walk->part.push_back({id, id});
    }
    if (slot < touched) return arena_.id(chunk, slot);
  }
  ++chunk;
  return chunk < arena_.chunk_numbers() ? arena_.id(chunk, 0) : 0;
}

std::size_t RowCacheImpl::AppendDirty(DirtyWalk* walk, std::uint64_t end) {
  constexpr std::size_t kAhead = 8;
  WriteBack::AppendScope appends(write_back_.get());
  const std::size_t room = appends.room();
  std::size_t appended = 0;
  for (std::size_t i = 0; i < walk->part.size(); ++i) {
    if (i + kAhead < walk->part.size()) {
      const EntryId ahead = walk->part[i + kAhead].id;
      appends.Prefetch(arena_.entry(ahead).key);
      PrefetchRead(arena_.row(ahead),
                   std::min<std::size_t>(options_.row_bytes, kMostPrefetchBytes));
    }
    const auto [place, id] = walk->part[i];
    if (DropExpired(id)) continue;
    if (appended == room) {
      walk->next = place;
      return appended;
    }
    AppendRow(id, /*may_come=*/true, &appends);
    ++appended;
  }
  walk->part.clear();
  walk->next = end;
  return appended;
}

Result<std::uint64_t> RowCacheImpl::FlushPart(DirtyWalk* walk, bool pinned, bool cancellable) {
  std::size_t appended = 0;
  {
    MutexLock lock(&mu_);
    appended = AppendDirty(walk, FindDirty(walk, pinned));
    if (flushing_) flushed_.NotifyAll();
  }
  // Rows that were found and not appended may have left by the time there is room.
  if (!walk->part.empty()) TERRACE_RETURN_IF_ERROR(write_back_->MakeRoom(1, cancellable));
  return appended;
}

std::uint64_t RowCacheImpl::dirty_writes() const {
  const std::uint64_t rows =
      dirty_rows_.load(std::memory_order_relaxed) + write_back_->unwritten_rows();
  // Every full buffer, the rests of those that are there, and the last one of each kind are a write
  // of each store, which has its share of the rows.
  return rows == 0 ? 0 : rows / write_back_->buffer_rows() + 3 * (write_back_->hot_apart() ? 2 : 1);
}

std::uint64_t RowCacheImpl::dirty_bytes() const {
  const std::uint64_t rows = dirty_rows_.load(std::memory_order_relaxed);
  const std::uint64_t appended = write_back_->unwritten_rows();
  if (rows + appended == 0) return 0;
  // Evictions before the flush may bring them, in any order.
  const std::uint64_t others = appended + std::min(rows, write_back_->most_rows() - appended);
  return MostWriteBytes(stores_, rows + appended, rows + appended - others,
                        std::max<std::uint64_t>(1, dirty_writes()));
}

std::uint64_t RowCacheImpl::likely_dirty_bytes() const {
  const std::uint64_t rows = dirty_rows_.load(std::memory_order_relaxed);
  const std::uint64_t appended = write_back_->unwritten_rows();
  return (rows == 0 ? 0 : LikelyWriteBytes(stores_, rows)) +
         (appended == 0 ? 0 : MostWriteBytes(stores_, appended, 0, 1));
}

}  // namespace terrace
