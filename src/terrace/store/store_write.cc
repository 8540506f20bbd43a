#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/units.h"
#include "terrace/store/radix_sort.h"
#include "terrace/store/store_impl.h"

namespace terrace {
namespace {
// Index entries changed under one hold of the lock, so that a read waits for a fraction of a
// millisecond.
constexpr std::size_t kPublishBatch = 4096;
}  // namespace

struct StoreImpl::SortedKey {
  std::uint64_t hash;
  std::uint64_t index;  // In the caller's batch.
};

class StoreImpl::WriteTimer {
 public:
  explicit WriteTimer(StoreImpl* store) : store_(store) { store_->BeginWriteTime(); }
  ~WriteTimer() { store_->EndWriteTime(); }
  WriteTimer(const WriteTimer&) = delete;
  WriteTimer& operator=(const WriteTimer&) = delete;

 private:
  StoreImpl* const store_;
};

Status StoreImpl::Write(std::span<const Key> keys, std::span<const std::byte* const> rows) {
  TERRACE_CHECK(keys.size() == rows.size());
  MutexLock lock(&write_mu_);
  return WriteRecords(keys, rows);
}

// Files that the index does not lead to yet.
class StoreImpl::StagedFiles final : public StagedRows {
 public:
  explicit StagedFiles(StoreImpl* store) : store_(store) {}
  ~StagedFiles() override { store_->Abandon(files); }

  std::vector<SortedKey> order;
  std::vector<FilePtr> files;
  std::uint64_t bytes = 0;
  std::uint64_t sequence = 0;
  bool deletion = false;

 private:
  StoreImpl* const store_;
};

Result<std::unique_ptr<StagedRows>> StoreImpl::Stage(std::span<const Key> keys,
                                                     std::span<const std::byte* const> rows) {
  TERRACE_CHECK(!keys.empty() && keys.size() == rows.size());
  MutexLock lock(&write_mu_);
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<StagedFiles> staged, StageRecords(keys, rows));
  return std::unique_ptr<StagedRows>(std::move(staged));
}

Status StoreImpl::Publish(std::unique_ptr<StagedRows> staged) {
  return PublishStaged(static_cast<StagedFiles*>(staged.get()));
}

Status StoreImpl::Erase(std::span<const Key> keys) {
  MutexLock lock(&write_mu_);
  // A key that is not there needs no record; so a deletion always has an older version on disk.
  std::vector<Key> present;
  std::uint64_t hashes[kPublishBatch];
  Place places[kPublishBatch];
  for (std::size_t begin = 0; begin < keys.size(); begin += kPublishBatch) {
    const std::size_t n = std::min(kPublishBatch, keys.size() - begin);
    for (std::size_t i = 0; i < n; ++i) hashes[i] = MixKey(keys[begin + i]);
    MutexLock state(&mu_);
    index_->Lookup({hashes, n}, places);
    for (std::size_t i = 0; i < n; ++i) {
      if (places[i] != kNoPlace) present.push_back(keys[begin + i]);
    }
  }
  return WriteRecords(present, {});
}

Status StoreImpl::WriteRecords(std::span<const Key> keys, std::span<const std::byte* const> rows) {
  if (keys.empty()) return CheckWritable();
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<StagedFiles> staged, StageRecords(keys, rows));
  return PublishStaged(staged.get());
}

Result<std::unique_ptr<StoreImpl::StagedFiles>> StoreImpl::StageRecords(
    std::span<const Key> keys, std::span<const std::byte* const> rows) {
  TERRACE_RETURN_IF_ERROR(CheckWritable());
  // Before the write, because a failure afterwards could no longer say that nothing changed.
  if (!options_.background_compaction) TERRACE_RETURN_IF_ERROR(CompactAll(false));
  TERRACE_RETURN_IF_ERROR(RemoveGone());
  WriteTimer timer(this);
  auto staged = std::make_unique<StagedFiles>(this);
  staged->deletion = rows.empty();
  std::vector<SortedKey>& order = staged->order;
  order.resize(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) order[i] = {MixKey(keys[i]), i};
  {
    std::vector<SortedKey> spare;
    RadixSort(&order, &spare, 0, 64, [](const SortedKey& key) { return key.hash; });
  }
  for (std::size_t i = 1; i < order.size(); ++i) TERRACE_CHECK(order[i - 1].hash < order[i].hash);

  const std::uint64_t file_count = (keys.size() + rows_per_file_ - 1) / rows_per_file_;
  for (std::uint64_t f = 0; f < file_count; ++f) {
    staged->bytes +=
        layout_.FileBytes((f + 1) * keys.size() / file_count - f * keys.size() / file_count);
  }
  TERRACE_RETURN_IF_ERROR(ReserveUnderPressure(staged->bytes));
  {
    MutexLock state(&mu_);
    staged->sequence = ++sequence_;
  }
  SyncPoint::Hit("store.write.before_data");
  const std::uint64_t version = staged->sequence | (staged->deletion ? kDeletionBit : 0);
  const Status status = WriteFiles(order, keys, rows, version, &staged->files);
  if (!status.ok()) {
    std::uint64_t written = 0;
    for (const FilePtr& file : staged->files) written += file->info.bytes;
    GiveSpace(staged->bytes - written);
    staged.reset();
    return Poison(status.WithContext(fmt::format("writing {} rows of table '{}' to {}", keys.size(),
                                                 options_.table, options_.directory)));
  }
  SyncPoint::Hit("store.write.after_data");
  return staged;
}

Status StoreImpl::PublishStaged(StagedFiles* staged) {
  WriteTimer timer(this);
  // Nothing has changed yet, should this fail.
  TERRACE_RETURN_IF_ERROR(ReserveIndex(staged->order, staged->deletion));
  {
    MutexLock state(&mu_);
    TERRACE_CHECK(published_sequence_ < staged->sequence);
    published_sequence_ = staged->sequence;
  }
  PublishFiles(staged->order, staged->files, staged->deletion);
  staged->files.clear();
  write_bytes_.fetch_add(staged->bytes, std::memory_order_relaxed);
  rows_written_.fetch_add(staged->order.size(), std::memory_order_relaxed);
  return OkStatus();
}

void StoreImpl::BeginWriteTime() {
  MutexLock lock(&mu_);
  if (writes_active_++ == 0) writes_since_ = clock_->MonotonicNanos();
}

void StoreImpl::EndWriteTime() {
  MutexLock lock(&mu_);
  if (--writes_active_ > 0) return;
  write_nanos_.fetch_add(clock_->MonotonicNanos() - writes_since_, std::memory_order_relaxed);
}

Status StoreImpl::ReserveUnderPressure(std::uint64_t bytes) {
  Status status = TakeSpace(bytes, keep_free_.load(std::memory_order_relaxed));
  if (status.ok()) return status;
  // First what frees space at once; then old checkpoints, after each of which files are removed
  // that only it named.
  while (true) {
    TERRACE_RETURN_IF_ERROR(CompactAll(/*freeing_only=*/true));
    TERRACE_RETURN_IF_ERROR(RemoveGone());
    status = TakeSpace(bytes, keep_free_.load(std::memory_order_relaxed));
    if (status.ok() || !options_.on_pressure || !options_.on_pressure()) break;
  }
  if (status.ok()) return status;
  return status.WithContext(
      fmt::format("writing {} to {}, after compaction", FormatBytes(bytes), options_.directory));
}

FilePtr StoreImpl::NewFile(std::unique_ptr<File> file, const ParameterFileInfo& info) const {
  auto stored = std::make_shared<StoredFile>();
  stored->info = info;
  stored->path = PathOf(info.id);
  stored->file = std::move(file);
  stored->seed = layout_.CheckSeed(info.id);
  return stored;
}

Status StoreImpl::WriteFiles(std::span<const SortedKey> order, std::span<const Key> keys,
                             std::span<const std::byte* const> rows, std::uint64_t version,
                             std::vector<FilePtr>* files) {
  const std::uint64_t file_count = (order.size() + rows_per_file_ - 1) / rows_per_file_;
  for (std::uint64_t f = 0; f < file_count; ++f) {
    std::uint64_t id;
    {
      MutexLock lock(&mu_);
      id = next_file_id_++;
    }
    const std::size_t begin = f * order.size() / file_count;
    const std::size_t end = (f + 1) * order.size() / file_count;
    // Whatever becomes of it, Abandon removes it by this entry.
    ParameterFileInfo planned;
    planned.id = id;
    planned.bytes = layout_.FileBytes(end - begin);
    files->push_back(NewFile(nullptr, planned));
    TERRACE_ASSIGN_OR_RETURN(
        auto writer, ParameterFileWriter::Create(fs_, PathOf(id), layout_, id, options_.direct_io,
                                                 write_buffer_.span(), write_queue_.get()));
    for (std::size_t i = begin; i < end; ++i) {
      if (!rows.empty() && i + kPrefetchRows < end) {
        const std::byte* next = rows[order[i + kPrefetchRows].index];
        const std::size_t bytes = std::min<std::size_t>(layout_.row_bytes, kMostPrefetchBytes);
        for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at);
      }
      const std::size_t index = order[i].index;
      const std::span<const std::byte> payload =
          rows.empty() ? std::span<const std::byte>()
                       : std::span<const std::byte>(rows[index], layout_.row_bytes);
      TERRACE_RETURN_IF_ERROR(writer->Add(keys[index], version, payload));
    }
    TERRACE_ASSIGN_OR_RETURN(const ParameterFileInfo info, writer->Finish());
    TERRACE_CHECK(info.bytes == planned.bytes);
    files->back() = NewFile(writer->TakeFile(), info);
  }
  return OkStatus();
}

Status StoreImpl::ReserveIndex(std::span<const SortedKey> order, bool deletion) {
  std::vector<std::uint64_t> added;
  std::uint64_t hashes[kPublishBatch];
  Place places[kPublishBatch];
  for (std::size_t begin = 0; begin < order.size(); begin += kPublishBatch) {
    const std::size_t n = std::min(kPublishBatch, order.size() - begin);
    for (std::size_t i = 0; i < n; ++i) hashes[i] = order[begin + i].hash;
    MutexLock lock(&mu_);
    (deletion ? deletions_ : index_)->Lookup({hashes, n}, places);
    for (std::size_t i = 0; i < n; ++i) {
      if (places[i] == kNoPlace) added.push_back(hashes[i]);
    }
  }
  MutexLock lock(&mu_);
  return (deletion ? deletions_ : index_)->Reserve(added);
}

void StoreImpl::PublishFiles(std::span<const SortedKey> order, const std::vector<FilePtr>& files,
                             bool deletion) {
  {
    // Part of the store before the first old version becomes stale: a commit in between must not
    // name neither.
    MutexLock lock(&mu_);
    for (const FilePtr& file : files) {
      Register(file, /*live=*/true);
      file->publishing = true;
      if (deletion) file->live_deletions = file->info.rows;
    }
  }
  SyncPoint::Hit("store.write.before_index");
  std::uint64_t hashes[kPublishBatch];
  Place places[kPublishBatch];
  std::size_t i = 0;
  for (const FilePtr& file : files) {
    for (std::uint64_t row = 0; row < file->info.rows;) {
      const std::size_t n = std::min<std::uint64_t>(kPublishBatch, file->info.rows - row);
      for (std::size_t k = 0; k < n; ++k, ++i, ++row) {
        hashes[k] = order[i].hash;
        places[k] = MakePlace(file->slot, row);
      }
      MutexLock lock(&mu_);
      PublishChunk({hashes, n}, {places, n}, deletion);
    }
  }
  MutexLock lock(&mu_);
  for (const FilePtr& file : files) file->publishing = false;
  compaction_wanted_.NotifyAll();
}

void StoreImpl::PublishChunk(std::span<const std::uint64_t> hashes, std::span<const Place> places,
                             bool deletion) {
  Place previous[kPublishBatch];
  RowIndex* into = deletion ? deletions_.get() : index_.get();
  RowIndex* out_of = deletion ? index_.get() : deletions_.get();
  into->Set(hashes, places.data(), previous);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (previous[i] != kNoPlace) AddStale(previous[i], deletion);
  }
  if (out_of->size() == 0) return;
  out_of->Erase(hashes, previous);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (previous[i] != kNoPlace) AddStale(previous[i], !deletion);
  }
}

}  // namespace terrace
