#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/prefetch.h"
#include "terrace/store/radix_sort.h"
#include "terrace/store/store_impl.h"

namespace terrace {
namespace {

// Keys of one plan: their places and their indices in the batch fill one word together, of which a
// place takes less than it may, because nobody holds four million files open. A larger batch takes
// several plans, which read over the same bytes again where rows lie densely; a plan takes 16 bytes
// a key.
constexpr int kIndexBits = 22;
constexpr std::size_t kSliceKeys = std::size_t{1} << kIndexBits;
static_assert(kMaxFileSlots < std::uint64_t{1} << (64 - kIndexBits - kRowBits));
// Rows that a thread checks and copies before it takes more: some tenths of a millisecond.
constexpr std::size_t kTaskRows = 512;

std::uint32_t SlotOf(std::uint64_t wanted) { return SlotOfPlace(wanted >> kIndexBits); }
std::uint32_t RowOf(std::uint64_t wanted) { return RowOfPlace(wanted >> kIndexBits); }
std::size_t IndexOf(std::uint64_t wanted) { return wanted & (kSliceKeys - 1); }

}  // namespace

// Bytes that one request reads, and the wanted records in them.
struct StoreImpl::Range {
  StoredFile* file = nullptr;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::size_t begin = 0;  // Of ReadPlan::wanted.
  std::size_t end = 0;
};

// A part of the read buffer and the group of requests that fills it: one part is handled while the
// disk fills the others.
struct StoreImpl::ReadPart {
  std::span<std::byte> buffer;
  std::vector<Range> ranges;          // In the order of their wanted records.
  std::vector<ReadRequest> requests;  // (ranges)

  void Clear() {
    ranges.clear();
    requests.clear();
  }
  // `at`: where in the buffer.
  void Add(const Range& range, std::size_t at) {
    ReadRequest request;
    request.file = range.file->file.get();
    request.offset = range.offset;
    request.buffer = buffer.subspan(at, range.bytes);
    requests.push_back(std::move(request));
    ranges.push_back(range);
  }
};

struct StoreImpl::ReadPlan {
  std::span<const Key> keys;
  std::span<std::byte* const> rows;
  std::span<std::uint8_t> found;
  std::vector<std::uint64_t> wanted;  // Place and index of the key, one word; sorted.
  std::vector<FilePtr> held;          // By slot: the files that the places lie in.
};

StoreImpl::ReadInFlight::ReadInFlight(StoreImpl* store) : store_(store) {
  MutexLock lock(&store_->mu_);
  ++store_->reads_in_flight_;
}

StoreImpl::ReadInFlight::~ReadInFlight() {
  MutexLock lock(&store_->mu_);
  --store_->reads_in_flight_;
  store_->compacted_.NotifyAll();
  if (store_->GoneToRemove()) store_->compaction_wanted_.NotifyAll();
}

struct StoreImpl::ReadCursor {
  std::size_t next = 0;  // Of ReadPlan::wanted.
  // When files are read whole: the file that is read, and where it is read on; 0: at another file.
  std::uint32_t slot = 0;
  std::uint64_t offset = 0;

  bool done(const ReadPlan& plan) const { return next == plan.wanted.size() && offset == 0; }
};

Status StoreImpl::Read(std::span<const Key> keys, std::span<std::byte* const> rows,
                       std::span<std::uint8_t> found, const std::atomic<bool>* stop) {
  TERRACE_CHECK(keys.size() == rows.size() && keys.size() == found.size());
  const CompactionPace::Hold use(&pace_, CompactionPace::kUse);
  for (std::size_t begin = 0; begin < keys.size(); begin += kSliceKeys) {
    const std::size_t n = std::min(kSliceKeys, keys.size() - begin);
    const ReadInFlight in_flight(this);  // Ends when the plan has let its files go.
    ReadPlan plan;
    plan.keys = keys.subspan(begin, n);
    plan.rows = rows.subspan(begin, n);
    plan.found = found.subspan(begin, n);
    {
      ScopedTimer timer(clock_, &read_nanos_);
      PlanRead(&plan);
    }
    // One plan is made while another one has the disk.
    {
      MutexLock lock(&read_mu_);
      ScopedTimer timer(clock_, &read_nanos_);
      TERRACE_RETURN_IF_ERROR(RunPlan(plan, stop));
    }
  }
  return OkStatus();
}

void StoreImpl::PlanRead(ReadPlan* plan) {
  const std::size_t count = plan->keys.size();
  plan->wanted.reserve(count);
  std::uint64_t hashes[kIndexBatch];
  Place places[kIndexBatch];
  std::uint32_t most_slots = 0;
  for (std::size_t begin = 0; begin < count; begin += kIndexBatch) {
    const std::size_t n = std::min(kIndexBatch, count - begin);
    for (std::size_t i = 0; i < n; ++i) hashes[i] = MixKey(plan->keys[begin + i]);
    MutexLock lock(&mu_);
    index_->Lookup({hashes, n}, places);
    if (plan->held.size() < slots_.size()) plan->held.resize(slots_.size());
    for (std::size_t i = 0; i < n; ++i) {
      plan->found[begin + i] = 0;
      if (places[i] == kNoPlace) continue;
      const std::uint32_t slot = SlotOfPlace(places[i]);
      if (plan->held[slot] == nullptr) plan->held[slot] = slots_[slot];
      most_slots = std::max(most_slots, slot + 1);
      plan->wanted.push_back((places[i] << kIndexBits) | (begin + i));
    }
  }
  int slot_bits = 0;
  while ((std::uint64_t{1} << slot_bits) < most_slots) ++slot_bits;
  std::vector<std::uint64_t> spare;
  RadixSort(&plan->wanted, &spare, kIndexBits, kIndexBits + kRowBits + slot_bits,
            [](std::uint64_t wanted) { return wanted; });
}

Status StoreImpl::RunPlan(const ReadPlan& plan, const std::atomic<bool>* stop) {
  std::vector<ReadPart> parts(kReadParts);
  const std::size_t part_bytes = read_buffer_.size() / kReadParts / kBlockBytes * kBlockBytes;
  for (std::size_t p = 0; p < kReadParts; ++p) {
    parts[p].buffer = read_buffer_.span().subspan(p * part_bytes, part_bytes);
  }
  Status status;
  ReadCursor cursor;
  for (std::size_t started = 0, done = 0;;) {
    // Relaxed: one part more or less does not matter.
    if (stop != nullptr && stop->load(std::memory_order_relaxed) && status.ok()) {
      status = AbortedError("reading rows was stopped");
    }
    while (status.ok() && !cursor.done(plan) && started - done < kReadParts) {
      ReadPart* part = &parts[started++ % kReadParts];
      part->Clear();
      if (options_.read_mode == ReadMode::kWholeFile) {
        FillPartWithFiles(plan, &cursor, part);
      } else {
        FillPart(plan, &cursor, part);
      }
      read_queue_->Start(part->requests);
    }
    if (started == done) break;
    // After a failure what was started is waited for: the disk still writes into the buffer.
    const ReadPart& part = parts[done++ % kReadParts];
    const Status read = read_queue_->Wait();
    if (status.ok()) status = read.ok() ? TakePart(plan, part) : read;
  }
  TERRACE_RETURN_IF_ERROR(status);
  rows_read_.fetch_add(plan.wanted.size(), std::memory_order_relaxed);
  return OkStatus();
}

void StoreImpl::FillPart(const ReadPlan& plan, ReadCursor* cursor, ReadPart* part) const {
  const std::vector<std::uint64_t>& wanted = plan.wanted;
  std::uint64_t sector = kBlockBytes;  // Of the file that is looked at.
  const auto begin_of = [&](std::size_t w) {
    return layout_.RecordOffset(RowOf(wanted[w])) / sector * sector;
  };
  const auto end_of = [&](std::size_t w) {
    return AlignUp(layout_.RecordOffset(RowOf(wanted[w])) + layout_.record_bytes, sector);
  };
  std::size_t used = 0;  // Of the part's buffer.
  std::size_t& next = cursor->next;
  while (next < wanted.size()) {
    Range range;
    const std::uint32_t slot = SlotOf(wanted[next]);
    range.file = plan.held[slot].get();
    sector = range.file->file->read_alignment();
    range.begin = next;
    range.offset = begin_of(next);
    std::uint64_t end = end_of(next);
    const std::uint64_t limit = part->buffer.size() - used;
    if (end - range.offset > limit) break;
    for (++next; next < wanted.size() && SlotOf(wanted[next]) == slot; ++next) {
      if (begin_of(next) > end + options_.merge_gap_bytes) break;
      if (end_of(next) - range.offset > limit) break;
      end = end_of(next);
    }
    range.end = next;
    range.bytes = end - range.offset;
    part->Add(range, used);
    used += range.bytes;
  }
}

void StoreImpl::FillPartWithFiles(const ReadPlan& plan, ReadCursor* cursor, ReadPart* part) const {
  const std::vector<std::uint64_t>& wanted = plan.wanted;
  std::size_t used = 0;
  while (!cursor->done(plan)) {
    if (cursor->offset == 0) cursor->slot = SlotOf(wanted[cursor->next]);
    const std::uint64_t limit = part->buffer.size() - used;
    // A rest of the buffer that holds no record would bring nothing on.
    if (used > 0 && limit < SectionCursor::LeastBuffer(layout_.record_bytes)) break;
    Range range;
    range.file = plan.held[cursor->slot].get();
    range.begin = cursor->next;
    range.offset = cursor->offset;
    const std::uint64_t file_end = range.file->info.bytes;
    const std::uint64_t end = std::min(file_end, range.offset + limit);
    while (cursor->next < wanted.size() && SlotOf(wanted[cursor->next]) == cursor->slot &&
           layout_.RecordOffset(RowOf(wanted[cursor->next])) + layout_.record_bytes <= end) {
      ++cursor->next;
    }
    range.end = cursor->next;
    range.bytes = end - range.offset;
    part->Add(range, used);
    used += range.bytes;
    // A record that the cut goes through is read again from its block on.
    const std::uint64_t row = (end - kBlockBytes) / layout_.record_bytes;
    const std::uint64_t cut = layout_.RecordOffset(row) / kBlockBytes * kBlockBytes;
    cursor->offset = end == file_end ? 0 : row < range.file->info.rows ? cut : end;
  }
}

Status StoreImpl::TakePart(const ReadPlan& plan, const ReadPart& part) {
  std::uint64_t bytes = 0;
  for (std::size_t r = 0; r < part.ranges.size(); ++r) {
    const Range& range = part.ranges[r];
    TERRACE_RETURN_IF_ERROR(CheckWhole(part.requests[r]));
    bytes += range.bytes;
  }
  const std::size_t begin = part.ranges.front().begin, end = part.ranges.back().end;
  if (read_workers_ == nullptr || end - begin < 2 * kTaskRows) {
    TERRACE_RETURN_IF_ERROR(TakeRows(plan, part, begin, end));
  } else {
    const std::size_t tasks = (end - begin + kTaskRows - 1) / kTaskRows;
    std::vector<Status> taken(tasks);
    read_workers_->Run(static_cast<int>(tasks), [&](int task) {
      const std::size_t first = begin + static_cast<std::size_t>(task) * kTaskRows;
      const auto i = static_cast<std::size_t>(task);
      taken[i] = TakeRows(plan, part, first, std::min(end, first + kTaskRows));
    });
    for (const Status& status : taken) TERRACE_RETURN_IF_ERROR(status);
  }
  read_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  read_requests_.fetch_add(part.ranges.size(), std::memory_order_relaxed);
  return OkStatus();
}

Status StoreImpl::CheckMistaken(const std::byte* record, Key wanted, const std::string& path,
                                std::uint64_t offset) {
  const Key key = HeadOf(record).key;
  mistaken_reads_.fetch_add(1, std::memory_order_relaxed);
  MutexLock lock(&mu_);
  if (index_->Alike(MixKey(key), MixKey(wanted))) return OkStatus();
  return CorruptionError(fmt::format("{}: the record at offset {} is of key {:#x}, not {:#x}", path,
                                     offset, key, wanted));
}

Status StoreImpl::TakeRows(const ReadPlan& plan, const ReadPart& part, std::size_t begin,
                           std::size_t end) {
  const std::size_t prefetch_bytes =
      std::min<std::size_t>(layout_.record_bytes, kMostPrefetchBytes);
  std::size_t r = static_cast<std::size_t>(
      std::partition_point(part.ranges.begin(), part.ranges.end(),
                           [&](const Range& range) { return range.end <= begin; }) -
      part.ranges.begin());
  for (std::size_t w = begin; w < end; ++w) {
    while (w >= part.ranges[r].end) ++r;
    const Range& range = part.ranges[r];
    // Keys, rows and records lie apart from each other, none in a cache of the processor: first the
    // lists are asked for, then what they lead to.
    if (w + 2 * kPrefetchRows < plan.wanted.size()) {
      const std::size_t later = IndexOf(plan.wanted[w + 2 * kPrefetchRows]);
      __builtin_prefetch(&plan.rows[later]);
      __builtin_prefetch(&plan.keys[later]);
      __builtin_prefetch(&plan.found[later], 1);
    }
    if (w + kPrefetchRows < plan.wanted.size()) {
      PrefetchWrite(plan.rows[IndexOf(plan.wanted[w + kPrefetchRows])], prefetch_bytes);
    }
    if (w + kPrefetchRows < range.end) {
      const std::uint64_t offset = layout_.RecordOffset(RowOf(plan.wanted[w + kPrefetchRows]));
      PrefetchRead(part.requests[r].buffer.data() + (offset - range.offset), prefetch_bytes);
    }
    const std::size_t i = IndexOf(plan.wanted[w]);
    const std::uint64_t offset = layout_.RecordOffset(RowOf(plan.wanted[w]));
    const std::byte* record = part.requests[r].buffer.data() + (offset - range.offset);
    TERRACE_RETURN_IF_ERROR(
        CheckRecord(record, layout_, range.file->seed, range.file->path, offset, &plan.keys[i]));
    if (HeadOf(record).key != plan.keys[i]) {
      TERRACE_RETURN_IF_ERROR(CheckMistaken(record, plan.keys[i], range.file->path, offset));
      continue;
    }
    std::memcpy(plan.rows[i], record + kRecordHeadBytes, layout_.row_bytes);
    plan.found[i] = 1;
  }
  return OkStatus();
}

}  // namespace terrace
