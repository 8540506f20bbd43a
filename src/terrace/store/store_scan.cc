#include <algorithm>
#include <memory>
#include <vector>

#include "terrace/store/store_impl.h"

namespace terrace {
namespace {

// One half is walked while the disk fills the other; more gains nothing.
constexpr std::uint64_t kMostScanBytes = std::uint64_t{8} << 20;

}  // namespace

Status StoreImpl::ForEachRow(std::uint64_t buffer_bytes,
                             const std::function<Status(const RowView&)>& visit) {
  // No round meanwhile.
  std::vector<std::unique_ptr<MutexLock>> compactors;
  for (Compactor& compactor : compactors_) {
    compactors.push_back(std::make_unique<MutexLock>(&compactor.mu));
  }
  MutexLock reading(&read_mu_);
  std::vector<FilePtr> files;
  {
    MutexLock lock(&mu_);
    files = LiveFiles();
  }
  const std::uint64_t bytes = std::max(AlignUp(std::min(buffer_bytes, kMostScanBytes), kBlockBytes),
                                       SectionCursor::LeastBuffer(layout_.record_bytes));
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(bytes));
  SectionReads reads(read_queue_.get());
  std::vector<std::uint64_t> hashes;
  std::vector<Place> places;
  for (const FilePtr& file : files) {
    SectionCursor cursor(file->file.get(), kBlockBytes, layout_.record_bytes, file->info.rows,
                         buffer.span().first(bytes), &reads);
    while (!cursor.done()) {
      TERRACE_RETURN_IF_ERROR(cursor.Fill());
      const std::uint64_t begin = cursor.index();
      hashes.clear();
      for (std::uint64_t i = begin; i < cursor.buffered_end(); ++i) {
        TERRACE_RETURN_IF_ERROR(CheckRecord(cursor.entry(i), layout_, file->seed, file->path,
                                            cursor.entry_offset(i), nullptr));
        hashes.push_back(MixKey(HeadOf(cursor.entry(i)).key));
      }
      places.resize(hashes.size());
      {
        MutexLock lock(&mu_);
        index_->Lookup(hashes, places.data());
      }
      for (std::size_t i = 0; i < places.size(); ++i, cursor.Advance()) {
        // Else it is stale, or a deletion.
        if (places[i] != MakePlace(file->slot, begin + i)) continue;
        const std::byte* record = cursor.entry(begin + i);
        RowView view;
        view.key = HeadOf(record).key;
        view.row = {record + kRecordHeadBytes, layout_.row_bytes};
        TERRACE_RETURN_IF_ERROR(visit(view));
      }
    }
    read_bytes_.fetch_add(cursor.bytes_read(), std::memory_order_relaxed);
  }
  return OkStatus();
}

}  // namespace terrace
