#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/store/merge.h"
#include "terrace/store/store_impl.h"

namespace terrace {
namespace {
// Of each of the two buffers of a verification.
constexpr std::uint64_t kVerifyBytes = std::uint64_t{1} << 20;
}  // namespace

Status StoreImpl::ForEachRow(std::uint64_t buffer_bytes,
                             const std::function<Status(const RowView&)>& visit) {
  std::vector<FilePtr> files;
  {
    MutexLock lock(&mu_);
    files = LiveFiles();
  }
  if (files.empty()) return OkStatus();
  const std::uint64_t share = std::clamp<std::uint64_t>(
      buffer_bytes / files.size() / kBlockBytes * kBlockBytes,
      SectionCursor::LeastBuffer(layout_.record_bytes), std::uint64_t{1} << 20);
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(share * files.size()));
  std::vector<SectionCursor> cursors;
  cursors.reserve(files.size());
  MergeHeap heap;
  // Checks the record at which source f stands and gives its hash.
  const auto checked_hash = [&](std::uint32_t f) -> Result<std::uint64_t> {
    SectionCursor& cursor = cursors[f];
    TERRACE_RETURN_IF_ERROR(cursor.Fill());
    const std::byte* record = cursor.entry(cursor.index());
    TERRACE_RETURN_IF_ERROR(CheckRecord(record, layout_, files[f]->seed, files[f]->path,
                                        cursor.entry_offset(cursor.index()), nullptr));
    return MixKey(HeadOf(record).key);
  };
  for (std::uint32_t f = 0; f < files.size(); ++f) {
    cursors.emplace_back(files[f]->file.get(), kBlockBytes, layout_.record_bytes,
                         files[f]->info.rows, buffer.span().subspan(f * share, share));
    TERRACE_ASSIGN_OR_RETURN(const std::uint64_t hash, checked_hash(f));
    heap.Push(hash, f);
  }
  // A cursor that moves on may reuse the memory of the newest version, so that one is kept aside.
  std::vector<std::byte> newest(layout_.record_bytes);
  while (!heap.empty()) {
    const std::uint64_t hash = heap.top().hash;
    std::uint64_t version = 0;
    bool first = true;
    while (!heap.empty() && heap.top().hash == hash) {
      const std::uint32_t f = heap.top().source;
      SectionCursor& cursor = cursors[f];
      const std::byte* record = cursor.entry(cursor.index());
      const std::uint64_t here = HeadOf(record).version;
      if (first || SequenceOf(here) >= SequenceOf(version)) {
        version = here;
        std::memcpy(newest.data(), record, newest.size());
        first = false;
      }
      cursor.Advance();
      if (cursor.done()) {
        heap.PopTop();
        continue;
      }
      TERRACE_ASSIGN_OR_RETURN(const std::uint64_t next, checked_hash(f));
      if (next <= hash) {
        return CorruptionError(fmt::format("{}: the records at offset {} are out of order",
                                           files[f]->path, cursor.entry_offset(cursor.index())));
      }
      heap.ReplaceTop(next);
    }
    if (IsDeletion(version)) continue;
    RowView view;
    view.key = HeadOf(newest.data()).key;
    view.row = std::span(newest).subspan(kRecordHeadBytes, layout_.row_bytes);
    TERRACE_RETURN_IF_ERROR(visit(view));
  }
  for (const SectionCursor& cursor : cursors) {
    read_bytes_.fetch_add(cursor.bytes_read(), std::memory_order_relaxed);
  }
  return OkStatus();
}

Status StoreImpl::Verify(std::vector<Finding>* findings) {
  const std::uint64_t record_buffer_bytes =
      std::max(kVerifyBytes, SectionCursor::LeastBuffer(layout_.record_bytes));
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer,
                           HugeBuffer::Allocate(record_buffer_bytes + kVerifyBytes));
  TERRACE_RETURN_IF_ERROR(VerifyManifest(findings));
  std::vector<FilePtr> files;
  {
    MutexLock lock(&mu_);
    files = LiveFiles();
  }
  for (const FilePtr& file : files) {
    TERRACE_RETURN_IF_ERROR(VerifyFile(*file, buffer.span().first(record_buffer_bytes),
                                       buffer.span().subspan(record_buffer_bytes, kVerifyBytes),
                                       findings));
  }
  return OkStatus();
}

Status StoreImpl::VerifyManifest(std::vector<Finding>* findings) {
  ManifestReference newest;
  {
    MutexLock lock(&mu_);
    if (manifests_.empty()) return OkStatus();
    newest = manifests_.rbegin()->second.reference;
  }
  const Result<Manifest> manifest =
      ReadManifest(fs_, options_.directory, newest.id, newest.digest, layout_);
  if (!manifest.ok()) {
    findings->push_back({JoinPath(options_.directory, ManifestFileName(newest.id)), 0,
                         manifest.status().ToString()});
  }
  return OkStatus();
}

Status StoreImpl::VerifyFile(const StoredFile& file, std::span<std::byte> record_buffer,
                             std::span<std::byte> key_buffer, std::vector<Finding>* findings) {
  const auto find = [&](std::uint64_t offset, std::string what) {
    findings->push_back({file.path, offset, std::move(what)});
  };
  // A file of its own, so that what the disk holds now is read, not what was opened.
  Result<std::unique_ptr<File>> opened =
      fs_->Open(file.path, options_.direct_io ? OpenMode::kReadDirect : OpenMode::kRead);
  if (!opened.ok()) {
    find(0, opened.status().ToString());
    return OkStatus();
  }
  File* const disk = opened->get();
  const Result<ParameterFileInfo> footer = ReadFooter(disk, file.info.bytes, file.info.id, layout_);
  if (!footer.ok()) {
    find(file.info.bytes - kBlockBytes, footer.status().ToString());
  } else if (footer->footer_checksum != file.info.footer_checksum) {
    find(file.info.bytes - kBlockBytes, "the footer is not the one that the manifest names");
  }
  // The sections are judged by what the store knows of the file, so that a damaged footer hides
  // nothing.
  if (const Status status = ReadFully(disk, 0, record_buffer.first(kBlockBytes)); !status.ok()) {
    find(0, status.ToString());
    return OkStatus();
  }
  if (const Status status =
          CheckHeader(record_buffer.first(kBlockBytes), file.path, file.info, layout_);
      !status.ok()) {
    find(0, status.ToString());
  }
  RunningChecksum records_sum;
  if (const Status status =
          SumRange(disk, kBlockBytes, file.info.keys_offset, record_buffer, &records_sum);
      !status.ok()) {
    find(kBlockBytes, status.ToString());
  } else if (records_sum.Digest() != file.info.records_checksum) {
    find(kBlockBytes, "the records fail their common checksum");
  }
  VerifyRecords(file, disk, record_buffer, key_buffer, findings);
  return OkStatus();
}

void StoreImpl::VerifyRecords(const StoredFile& file, File* disk,
                              std::span<std::byte> record_buffer, std::span<std::byte> key_buffer,
                              std::vector<Finding>* findings) {
  const auto find = [&](std::uint64_t offset, std::string what) {
    findings->push_back({file.path, offset, std::move(what)});
  };
  SectionCursor records(disk, kBlockBytes, layout_.record_bytes, file.info.rows, record_buffer);
  SectionCursor keys(disk, file.info.keys_offset, kKeyEntryBytes, file.info.rows, key_buffer);
  RunningChecksum keys_sum;
  keys.set_checksum(&keys_sum);
  std::uint64_t previous = 0;
  for (; !records.done(); records.Advance(), keys.Advance()) {
    if (Status status = records.Fill(); !status.ok()) {
      find(records.entry_offset(records.index()), status.ToString());
      return;
    }
    if (Status status = keys.Fill(); !status.ok()) {
      find(keys.entry_offset(keys.index()), status.ToString());
      return;
    }
    const std::byte* record = records.entry(records.index());
    const std::uint64_t offset = records.entry_offset(records.index());
    const RecordHead head = HeadOf(record);
    if (const Status status = CheckRecord(record, layout_, file.seed, file.path, offset, nullptr);
        !status.ok()) {
      find(offset, status.message());
      continue;
    }
    KeyEntry entry;
    std::memcpy(&entry, keys.entry(keys.index()), sizeof entry);
    if (entry.key != head.key || entry.version != head.version) {
      find(keys.entry_offset(keys.index()),
           fmt::format("the key section says key {:#x}, version {:#x}; the record at offset {} "
                       "says key {:#x}, version {:#x}",
                       entry.key, entry.version, offset, head.key, head.version));
    }
    const std::uint64_t hash = MixKey(head.key);
    if (records.index() > 0 && hash <= previous) find(offset, "the records are out of order");
    previous = hash;
  }
  if (keys_sum.Digest() != file.info.keys_checksum) {
    find(file.info.keys_offset, "the key section fails its checksum");
  }
}

}  // namespace terrace
