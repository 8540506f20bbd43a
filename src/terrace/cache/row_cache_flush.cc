// What RowCacheImpl does for checkpoints and readers.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

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
  // What failed before comes first, because newer versions of its rows may follow.
  TERRACE_RETURN_IF_ERROR(write_back_->Flush());
  for (bool more = true; more;) {
    MutexLock lock(&mu_);
    more = SweepExpired(kSweepSlots);
  }
  std::uint32_t chunks = 0;
  {
    MutexLock lock(&mu_);
    chunks = arena_.chunk_numbers();
  }
  // A chunk that a Pin adds from here on holds rows that were read from a store or are new.
  for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
    TERRACE_RETURN_IF_ERROR(FlushChunk(chunk, /*pinned=*/true, /*cancellable=*/false).status());
  }
  SyncPoint::Hit("cache.flush.before_write");
  TERRACE_RETURN_IF_ERROR(write_back_->Flush());
  SyncPoint::Hit("cache.flush.after_write");
  return OkStatus();
}

Status RowCacheImpl::WriteAhead(std::uint64_t rows) {
  std::uint32_t chunks = 0;
  {
    MutexLock lock(&mu_);
    TERRACE_RETURN_IF_ERROR(aborted_);
    chunks = arena_.chunk_numbers();
  }
  std::uint64_t done = 0;
  for (std::uint32_t visited = 0; visited < chunks && done < rows; ++visited) {
    ahead_chunk_ = (ahead_chunk_ + 1) % chunks;
    TERRACE_ASSIGN_OR_RETURN(const std::uint64_t some,
                             FlushChunk(ahead_chunk_, /*pinned=*/false, /*cancellable=*/true));
    done += some;
  }
  return write_back_->WriteNow();
}

Result<std::uint64_t> RowCacheImpl::FlushChunk(std::uint32_t chunk, bool pinned, bool cancellable) {
  std::uint64_t rows = 0;
  MutexLock lock(&mu_);
  for (std::uint32_t slot = 0; true;) {
    rows += AppendDirty(chunk, pinned, &slot);
    if (!arena_.present(chunk) || slot >= arena_.touched(chunk)) return rows;
    mu_.Unlock();
    Status made = write_back_->MakeRoom(1, cancellable);
    mu_.Lock();
    // The slot may have another row, or none, by now.
    if (!made.ok()) return made;
  }
}

std::uint64_t RowCacheImpl::AppendDirty(std::uint32_t chunk, bool pinned, std::uint32_t* slot) {
  constexpr std::uint32_t kAhead = 16;
  WriteBack::AppendScope appends(write_back_.get());
  const std::size_t room = appends.room();
  std::size_t appended = 0;
  for (; arena_.present(chunk) && *slot < arena_.touched(chunk); ++*slot) {
    if (*slot + kAhead < arena_.touched(chunk)) {
      appends.Prefetch(arena_.entry(arena_.id(chunk, *slot + kAhead)).key);
    }
    const EntryId id = arena_.id(chunk, *slot);
    Entry& entry = arena_.entry(id);
    if (entry.place < kHeld || (entry.pins > 0 && !pinned)) continue;
    if (!IsDirty(entry) || DropExpired(id)) continue;
    if (appended == room) break;
    appends.Append(entry.key, arena_.row(id), {.stored = IsStored(entry), .hot = IsHot(entry)});
    StoreFlags(entry, 0);
    dirty_rows_.fetch_sub(1, std::memory_order_relaxed);
    ++appended;
  }
  return appended;
}

std::uint64_t RowCacheImpl::dirty_bytes() const {
  const std::uint64_t rows =
      dirty_rows_.load(std::memory_order_relaxed) + write_back_->unwritten_rows();
  if (rows == 0) return 0;
  // Every full buffer, the rests of those that are there, and the last one of each kind are a write
  // of each store, which has its share of the rows.
  const std::uint64_t writes =
      rows / write_back_->buffer_rows() + 3 * (write_back_->hot_apart() ? 2 : 1);
  return MostWriteBytes(stores_, rows, writes);
}

}  // namespace terrace
