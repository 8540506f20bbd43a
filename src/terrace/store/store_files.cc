// The files of a store: their space, their slots, and what becomes of those that nobody needs.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/store_impl.h"

namespace terrace {

std::string StoreImpl::PathOf(std::uint64_t file_id) const {
  return JoinPath(options_.directory, ParameterFileName(file_id));
}

Status StoreImpl::TakeSpace(std::uint64_t bytes, std::uint64_t keep_free) {
  TERRACE_RETURN_IF_ERROR(quota_->Reserve(bytes, keep_free));
  disk_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return OkStatus();
}

void StoreImpl::GiveSpace(std::uint64_t bytes) {
  disk_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  quota_->Release(bytes);
}

std::uint32_t StoreImpl::TakeSlot() {
  if (!free_slots_.empty()) {
    const std::uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
  TERRACE_CHECK(slots_.size() < index_->max_slots());  // By ReserveSlots.
  slots_.push_back(nullptr);
  return static_cast<std::uint32_t>(slots_.size() - 1);
}

void StoreImpl::CountFiles() {
  if (quota_ == nullptr) return;
  quota_->ChangeFiles(static_cast<std::int64_t>(used_slots() - counted_slots_));
  counted_slots_ = used_slots();
}

void StoreImpl::Register(const FilePtr& file, bool live) {
  file->slot = TakeSlot();
  file->live = live;
  file->live_deletions = 0;
  slots_[file->slot] = file;
  const std::uint64_t live_files = slots_.size() - free_slots_.size();
  file->deletions_due = files_gone_ + std::max<std::uint64_t>(1, live_files / 2);
}

void StoreImpl::Retire(StoredFile* file) {
  file->live = false;
  if (!file->compacting || file->stale_at_pick > 0) ++files_gone_;
  RoomMade();
  retired_.push_back(slots_[file->slot]);
  // The slot itself is free when nobody holds the file: a reader may have noted places in it.
}

void StoreImpl::AddStale(Place place, bool was_deletion) {
  StoredFile* file = slots_[SlotOfPlace(place)].get();
  ++file->stale;
  if (was_deletion) --file->live_deletions;
  TERRACE_DCHECK(file->stale <= file->info.rows);
  if (file->stale == file->info.rows && file->live && !file->compacting) Retire(file);
}

std::vector<FilePtr> StoreImpl::LiveFiles() const {
  std::vector<FilePtr> files;
  for (const FilePtr& file : slots_) {
    if (file != nullptr && file->live) files.push_back(file);
  }
  std::sort(files.begin(), files.end(),
            [](const FilePtr& a, const FilePtr& b) { return a->info.id < b->info.id; });
  return files;
}

bool StoreImpl::IsUnread(const FilePtr& file) {
  // The table and the list of retired files hold it; new holders come only through the table, under
  // the lock, and only of files that are not retired: a count without others stays so.
  return file.use_count() <= (file->slot == kMaxFileSlots ? 1 : 2);
}

Status StoreImpl::RemoveGone() {
  if (options_.read_only) return OkStatus();
  std::vector<FilePtr> gone;
  {
    MutexLock lock(&mu_);
    std::size_t kept = 0;
    bool freed = false;
    for (FilePtr& file : retired_) {
      const bool unread = IsUnread(file);
      if (unread && file->slot != kMaxFileSlots) {
        slots_[file->slot].reset();
        free_slots_.push_back(file->slot);
        file->slot = kMaxFileSlots;
        file->file.reset();  // What only a checkpoint names need not be open.
        freed = true;
      }
      if (unread && file->named_by == 0) {
        gone.push_back(std::move(file));
      } else {
        retired_[kept++] = std::move(file);
      }
    }
    retired_.resize(kept);
    CountFiles();
    if (freed) RoomMade();
    if (!gone.empty()) ++removing_;
  }
  Status first;
  for (FilePtr& file : gone) {
    SyncPoint::Hit("store.drop.before_remove");
    if (KeepSpare(*file)) continue;
    const Status status = fs_->Remove(file->path);
    if (!status.ok() && status.code() != StatusCode::kNotFound) {
      if (first.ok()) first = status;
      MutexLock lock(&mu_);
      retired_.push_back(file);  // Still on the disk and in the quota.
      continue;
    }
    GiveSpace(file->info.bytes);
  }
  if (!gone.empty()) {
    MutexLock lock(&mu_);
    RoomMade();
    TellCompactable();
    --removing_;
    compacted_.NotifyAll();
  }
  return first;
}

Status StoreImpl::RemoveAllGone() {
  while (true) {
    TERRACE_RETURN_IF_ERROR(RemoveGone());
    MutexLock lock(&mu_);
    const auto held = [&]() TERRACE_REQUIRES(mu_) {
      return reads_in_flight_ > 0 &&
             std::any_of(retired_.begin(), retired_.end(), [](const FilePtr& file) {
               return file->named_by == 0 && !IsUnread(file);
             });
    };
    while (removing_ > 0 || held()) compacted_.Wait(&mu_);
    if (!GoneToRemove()) return OkStatus();
  }
}

void StoreImpl::Abandon(const std::vector<FilePtr>& files) {
  for (const FilePtr& file : files) {
    file->file.reset();
    const Status status = fs_->Remove(file->path);
    if (!status.ok() && status.code() != StatusCode::kNotFound) {
      // It stays in the quota and is removed by the next open.
      continue;
    }
    GiveSpace(file->info.bytes);
  }
}

bool StoreImpl::KeepSpare(const StoredFile& file) {
  // With a second name, which somebody made to keep what it holds, it is not ours alone.
  const Result<FileInfo> info = fs_->Stat(file.path);
  if (!info.ok() || info->links != 1) return false;
  MutexLock lock(&mu_);
  if (spares_.size() >= options_.spare_files) return false;
  spares_.push_back({file.path, file.info.bytes});
  quota_->ChangeSpare(static_cast<std::int64_t>(file.info.bytes));
  return true;
}

std::optional<StoreImpl::Spare> StoreImpl::TakeSpare(std::uint64_t bytes) {
  MutexLock lock(&mu_);
  if (spares_.empty()) return std::nullopt;
  // The longest that need not be cut, or that of which least is cut.
  const auto better = [bytes](const Spare& a, const Spare& b) {
    const bool a_fits = a.bytes <= bytes, b_fits = b.bytes <= bytes;
    if (a_fits != b_fits) return a_fits;
    return a_fits ? a.bytes > b.bytes : a.bytes < b.bytes;
  };
  const auto best = std::min_element(spares_.begin(), spares_.end(), better);
  Spare spare = std::move(*best);
  spares_.erase(best);
  return spare;
}

void StoreImpl::RemoveSpares() {
  std::vector<Spare> spares;
  {
    MutexLock lock(&mu_);
    spares.swap(spares_);
  }
  for (const Spare& spare : spares) {
    const Status status = fs_->Remove(spare.path);
    if (status.ok() || status.code() == StatusCode::kNotFound) {
      GiveSpace(spare.bytes);
    } else {
      // It stays in the quota and is removed by the next open.
      LogText(LogLevel::kWarning, status.ToString());
    }
    quota_->ChangeSpare(-static_cast<std::int64_t>(spare.bytes));
  }
  MutexLock lock(&mu_);
  TellCompactable();
}

Result<std::unique_ptr<File>> StoreImpl::OpenNew(std::uint64_t id, std::uint64_t bytes) {
  const std::string path = PathOf(id);
  std::optional<Spare> spare = TakeSpare(bytes);
  if (!spare) {
    return fs_->Open(path, options_.direct_io ? OpenMode::kCreateDirect : OpenMode::kCreate);
  }
  if (Status status = fs_->Rename(spare->path, path); !status.ok()) {
    MutexLock lock(&mu_);
    spares_.push_back(*std::move(spare));
    return status;
  }
  SyncPoint::Hit("store.reuse.before_write");
  Result<std::unique_ptr<File>> file =
      fs_->Open(path, options_.direct_io ? OpenMode::kOverwriteDirect : OpenMode::kOverwrite);
  if (file.ok() && spare->bytes > bytes) {
    if (Status status = (*file)->Truncate(bytes); !status.ok()) file = std::move(status);
  }
  GiveSpace(spare->bytes);  // From here on the new file's.
  quota_->ChangeSpare(-static_cast<std::int64_t>(spare->bytes));
  return file;
}

}  // namespace terrace
