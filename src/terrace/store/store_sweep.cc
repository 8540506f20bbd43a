#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/store_impl.h"

namespace terrace {

void StoreImpl::SetHolder(RowHolder* holder) {
  MutexLock lock(&holder_mu_);
  holder_ = holder;
}

void StoreImpl::WantSweep() {
  MutexLock lock(&mu_);
  compaction_wanted_.NotifyAll();
}

bool StoreImpl::SweepDue() const {
  if (options_.expiry == nullptr) return false;
  const std::uint64_t points = options_.expiry->points();
  for (const FilePtr& file : slots_) {
    if (file != nullptr && file->live && !file->publishing && file->swept_points < points) {
      return true;
    }
  }
  return false;
}

Status StoreImpl::SweepNext(Compactor* compactor, bool* swept) {
  *swept = false;
  if (options_.expiry == nullptr) return OkStatus();
  // First: what expires while the file is read is found next time.
  const std::uint64_t points = options_.expiry->points();
  FilePtr file;
  {
    MutexLock lock(&mu_);
    if (!poison_.ok()) return OkStatus();
    for (const FilePtr& other : slots_) {
      if (other == nullptr || !other->live || other->publishing) continue;
      if (other->swept_points >= points) continue;
      file = other;
      break;
    }
  }
  if (file == nullptr) return OkStatus();
  const Status status = SweepFile(compactor, file);
  if (status.code() == StatusCode::kAborted) return status;
  if (!status.ok()) {
    return status.WithContext(fmt::format("looking for expired rows in {}", options_.directory));
  }
  *swept = true;
  MutexLock lock(&mu_);
  file->swept_points = points;
  return OkStatus();
}

Status StoreImpl::SweepFile(Compactor* compactor, const FilePtr& file) {
  SyncPoint::Hit("store.sweep.before_read");
  SectionReads reads(compactor->reads.get());
  SectionCursor cursor(file->file.get(), kBlockBytes, layout_.record_bytes, file->info.rows,
                       compactor->input, &reads);
  std::vector<Key> keys;
  std::vector<Place> places;
  for (; !cursor.done(); cursor.Advance()) {
    if (cursor.needs_fill()) {
      if (stopping_.load(std::memory_order_relaxed)) return AbortedError("the store is closing");
      TERRACE_RETURN_IF_ERROR(cursor.Fill());
      Pace((cursor.buffered_end() - cursor.index()) * layout_.record_bytes);
    }
    const std::byte* record = cursor.entry(cursor.index());
    TERRACE_RETURN_IF_ERROR(CheckRecord(record, layout_, file->seed, file->path,
                                        cursor.entry_offset(cursor.index()), nullptr));
    const RecordHead head = HeadOf(record);
    if (IsDeletion(head.version) || !options_.expiry->MayGo(record + kRecordHeadBytes)) continue;
    keys.push_back(head.key);
    places.push_back(MakePlace(file->slot, cursor.index()));
    if (keys.size() < kIndexBatch) continue;
    DropRows(keys, places);
    keys.clear();
    places.clear();
  }
  DropRows(keys, places);
  read_bytes_.fetch_add(cursor.bytes_read(), std::memory_order_relaxed);
  SyncPoint::Hit("store.sweep.after_index");
  return OkStatus();
}

void StoreImpl::DropRows(std::span<const Key> keys, std::span<const Place> places) {
  if (keys.empty()) return;
  const auto drop = [&](std::span<const std::uint8_t> held) {
    std::vector<std::uint64_t> hashes;
    std::vector<Place> from;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      // Its holder may write it again as a row that is stored.
      if (held[i] != 0) continue;
      hashes.push_back(MixKey(keys[i]));
      from.push_back(places[i]);
    }
    const std::vector<Place> to(from.size(), kNoPlace);
    std::vector<std::uint8_t> moved(from.size());
    MutexLock lock(&mu_);
    // A record that is not the newest of its key is not led to.
    index_->Move(hashes, from.data(), to.data(), moved.data());
    std::uint64_t dropped = 0;
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (moved[i] == 0) continue;
      AddStale(from[i], /*was_deletion=*/false);
      ++dropped;
    }
    rows_expired_.fetch_add(dropped, std::memory_order_relaxed);
  };
  MutexLock lock(&holder_mu_);
  if (holder_ != nullptr) {
    holder_->WithHeld(keys, drop);
  } else {
    drop(std::vector<std::uint8_t>(keys.size(), 0));
  }
}

}  // namespace terrace
