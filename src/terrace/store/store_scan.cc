#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/store/merge.h"
#include "terrace/store/store_impl.h"

namespace terrace {
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
  std::deque<SectionCursor> cursors;  // Which stay where they are.
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

}  // namespace terrace
