#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/store_impl.h"

namespace terrace {

Result<ManifestReference> StoreImpl::Commit(std::uint64_t id) {
  MutexLock commit(&commit_mu_);
  TERRACE_RETURN_IF_ERROR(CheckWritable());
  Manifest manifest;
  std::vector<FilePtr> files;
  std::vector<FilePtr> unsynced;
  Named named;
  {
    MutexLock lock(&mu_);
    if (id <= last_manifest_) {
      return InvalidArgumentError(fmt::format("manifest {} of {} is not newer than manifest {}", id,
                                              options_.directory, last_manifest_));
    }
    manifest.id = id;
    manifest.table = layout_.table;
    manifest.shard = layout_.shard;
    manifest.row_bytes = layout_.row_bytes;
    manifest.sequence = sequence_;
    manifest.next_file_id = next_file_id_;
    manifest.groups = groups_;
    manifest.rows_in_blocks = rows_in_blocks_;
    manifest.block_row_bytes = block_row_bytes_;
    files = LiveFiles();
    for (const FilePtr& file : files) {
      manifest.files.push_back(
          {file->info.id, file->info.bytes, file->info.rows, file->info.footer_checksum});
      ++file->named_by;  // From here on compaction leaves it on the disk.
      named.files.push_back(file.get());
      if (!file->synced) unsynced.push_back(file);
    }
  }
  Result<ManifestReference> published = PublishManifest(manifest, unsynced);
  MutexLock lock(&mu_);
  for (const FilePtr& file : unsynced) file->synced |= published.ok();
  if (!published.ok()) {
    for (StoredFile* file : named.files) --file->named_by;
    return published;
  }
  named.reference = *published;
  manifests_[id] = std::move(named);
  last_manifest_ = id;
  return published;
}

Result<ManifestReference> StoreImpl::PublishManifest(const Manifest& manifest,
                                                     const std::vector<FilePtr>& unsynced) {
  const auto context = fmt::format("committing manifest {} of {}", manifest.id, options_.directory);
  const std::string payload = EncodeManifest(manifest);
  const std::uint64_t space = AlignUp(payload.size() + kBlockBytes, kBlockBytes);
  if (Status status = TakeSpace(space, 0); !status.ok()) return status.WithContext(context);
  SyncPoint::Hit("store.commit.before_sync");
  for (const FilePtr& file : unsynced) {
    if (Status status = file->file->Sync(); !status.ok()) {
      GiveSpace(space);
      return Poison(status.WithContext(context));
    }
  }
  // The names of the files, before a name that leads to them.
  if (Status status = fs_->SyncDirectory(options_.directory); !status.ok()) {
    GiveSpace(space);
    return Poison(status.WithContext(context));
  }
  SyncPoint::Hit("store.commit.before_manifest");
  const Result<FileDigest> digest =
      WriteFramedFile(fs_, JoinPath(options_.directory, ManifestFileName(manifest.id)),
                      kManifestMagic, manifest.version(), std::as_bytes(std::span(payload)));
  if (!digest.ok()) return Poison(digest.status().WithContext(context));
  GiveSpace(space - AlignUp(digest->size, kBlockBytes));
  write_bytes_.fetch_add(digest->size, std::memory_order_relaxed);
  SyncPoint::Hit("store.commit.after_manifest");
  return ManifestReference{manifest.id, *digest};
}

Status StoreImpl::Drop(std::uint64_t id) {
  TERRACE_CHECK(!options_.read_only);
  MutexLock commit(&commit_mu_);
  std::uint64_t space;
  {
    MutexLock lock(&mu_);
    const auto found = manifests_.find(id);
    if (found == manifests_.end()) return OkStatus();
    space = AlignUp(found->second.reference.digest.size, kBlockBytes);
  }
  SyncPoint::Hit("store.drop.before_manifest");
  const Status removed = fs_->Remove(JoinPath(options_.directory, ManifestFileName(id)));
  if (!removed.ok() && removed.code() != StatusCode::kNotFound) {
    return removed.WithContext(fmt::format("dropping manifest {} of {}", id, options_.directory));
  }
  GiveSpace(space);
  {
    MutexLock lock(&mu_);
    const auto found = manifests_.find(id);
    for (StoredFile* file : found->second.files) --file->named_by;
    manifests_.erase(found);
    RoomMade();
  }
  return RemoveGone();
}

}  // namespace terrace
