#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/store/radix_sort.h"
#include "terrace/store/store_impl.h"

namespace terrace {
namespace {

// Keys of one plan: their places and their indices in the batch fill one word together.
constexpr int kIndexBits = 64 - kPlaceBits;
constexpr std::size_t kSliceKeys = std::size_t{1} << kIndexBits;
// Keys looked up under one hold of the lock, so that a write waits for a fraction of a millisecond.
constexpr std::size_t kLookupBatch = 4096;

Place PlaceOf(std::uint64_t wanted) { return wanted >> kIndexBits; }
std::size_t IndexOf(std::uint64_t wanted) { return wanted & (kSliceKeys - 1); }

}  // namespace

// Bytes that one request reads, and the wanted records in them.
struct StoreImpl::Range {
  StoredFile* file = nullptr;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::size_t buffer_offset = 0;
  std::size_t begin = 0;  // Of ReadPlan::wanted.
  std::size_t end = 0;
};

struct StoreImpl::ReadPlan {
  std::vector<std::uint64_t> wanted;  // Place and index of the key, one word; sorted.
  std::vector<std::uint64_t> spare;
  std::vector<FilePtr> held;  // By slot: the files that the places lie in.
  std::vector<ReadRequest> requests;
};

Status StoreImpl::Read(std::span<const Key> keys, std::span<std::byte* const> rows,
                       std::span<std::uint8_t> found) {
  TERRACE_CHECK(keys.size() == rows.size() && keys.size() == found.size());
  MutexLock lock(&read_mu_);
  ScopedTimer timer(clock_, &read_nanos_);
  bool held_gone = false;
  for (std::size_t begin = 0; begin < keys.size(); begin += kSliceKeys) {
    const std::size_t n = std::min(kSliceKeys, keys.size() - begin);
    ReadPlan plan;
    TERRACE_RETURN_IF_ERROR(PlanRead(keys.subspan(begin, n), found.subspan(begin, n), &plan));
    TERRACE_RETURN_IF_ERROR(
        RunPlan(keys.subspan(begin, n), rows.subspan(begin, n), found.subspan(begin, n), &plan));
    MutexLock state(&mu_);
    for (const FilePtr& file : plan.held) held_gone |= file != nullptr && !file->live;
  }
  if (held_gone) {  // What compaction could not remove while it was read.
    MutexLock state(&mu_);
    compaction_wanted_.NotifyAll();
  }
  return OkStatus();
}

Status StoreImpl::PlanRead(std::span<const Key> keys, std::span<std::uint8_t> found,
                           ReadPlan* plan) {
  plan->wanted.reserve(keys.size());
  std::uint64_t hashes[kLookupBatch];
  Place places[kLookupBatch];
  std::uint32_t most_slots = 0;
  for (std::size_t begin = 0; begin < keys.size(); begin += kLookupBatch) {
    const std::size_t n = std::min(kLookupBatch, keys.size() - begin);
    for (std::size_t i = 0; i < n; ++i) hashes[i] = MixKey(keys[begin + i]);
    MutexLock lock(&mu_);
    index_->Lookup({hashes, n}, places);
    if (plan->held.size() < slots_.size()) plan->held.resize(slots_.size());
    for (std::size_t i = 0; i < n; ++i) {
      found[begin + i] = 0;
      if (places[i] == kNoPlace) continue;
      const std::uint32_t slot = SlotOfPlace(places[i]);
      if (plan->held[slot] == nullptr) plan->held[slot] = slots_[slot];
      most_slots = std::max(most_slots, slot + 1);
      plan->wanted.push_back((places[i] << kIndexBits) | (begin + i));
    }
  }
  int slot_bits = 0;
  while ((std::uint64_t{1} << slot_bits) < most_slots) ++slot_bits;
  RadixSort(&plan->wanted, &plan->spare, kIndexBits, kIndexBits + kRowBits + slot_bits,
            [](std::uint64_t wanted) { return wanted; });
  return OkStatus();
}

Status StoreImpl::RunPlan(std::span<const Key> keys, std::span<std::byte* const> rows,
                          std::span<std::uint8_t> found, ReadPlan* plan) {
  std::vector<Range> round;
  std::size_t used = 0;  // Of the buffer.
  const std::vector<std::uint64_t>& wanted = plan->wanted;
  for (std::size_t i = 0; i < wanted.size();) {
    Range range;
    const std::uint32_t slot = SlotOfPlace(PlaceOf(wanted[i]));
    range.file = plan->held[slot].get();
    range.begin = i;
    const auto offset_of = [&](std::size_t w) {
      return kBlockBytes + std::uint64_t{RowOfPlace(PlaceOf(wanted[w]))} * layout_.record_bytes;
    };
    range.offset = offset_of(i) / kBlockBytes * kBlockBytes;
    std::uint64_t end = AlignUp(offset_of(i) + layout_.record_bytes, kBlockBytes);
    for (++i; i < wanted.size() && SlotOfPlace(PlaceOf(wanted[i])) == slot; ++i) {
      const std::uint64_t next_begin = offset_of(i) / kBlockBytes * kBlockBytes;
      const std::uint64_t next_end = AlignUp(offset_of(i) + layout_.record_bytes, kBlockBytes);
      if (next_begin > end + options_.merge_gap_bytes) break;
      if (next_end - range.offset > read_bytes_limit_) break;
      end = next_end;
    }
    range.end = i;
    range.bytes = end - range.offset;
    if (used + range.bytes > read_buffer_.size()) {
      TERRACE_RETURN_IF_ERROR(RunRound(round, keys, rows, found, plan));
      round.clear();
      used = 0;
    }
    range.buffer_offset = used;
    used += range.bytes;
    round.push_back(range);
  }
  if (!round.empty()) TERRACE_RETURN_IF_ERROR(RunRound(round, keys, rows, found, plan));
  rows_read_.fetch_add(wanted.size(), std::memory_order_relaxed);
  return OkStatus();
}

Status StoreImpl::RunRound(std::span<const Range> ranges, std::span<const Key> keys,
                           std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                           ReadPlan* plan) {
  plan->requests.clear();
  for (const Range& range : ranges) {
    ReadRequest request;
    request.file = range.file->file.get();
    request.offset = range.offset;
    request.buffer = read_buffer_.span().subspan(range.buffer_offset, range.bytes);
    plan->requests.push_back(std::move(request));
  }
  TERRACE_RETURN_IF_ERROR(read_queue_->Run(plan->requests));
  std::uint64_t bytes = 0;
  for (std::size_t r = 0; r < ranges.size(); ++r) {
    const Range& range = ranges[r];
    const ReadRequest& request = plan->requests[r];
    if (request.bytes_read != range.bytes) {
      return CorruptionError(fmt::format("{}: ends at offset {}, inside of its records",
                                         range.file->path, range.offset + request.bytes_read));
    }
    bytes += range.bytes;
    for (std::size_t w = range.begin; w < range.end; ++w) {
      const std::size_t i = IndexOf(plan->wanted[w]);
      const std::uint64_t offset =
          kBlockBytes + std::uint64_t{RowOfPlace(PlaceOf(plan->wanted[w]))} * layout_.record_bytes;
      const std::byte* record = request.buffer.data() + (offset - range.offset);
      TERRACE_RETURN_IF_ERROR(CheckRecord(record, layout_, range.file->seed, range.file->path,
                                          offset, index_exact_ ? &keys[i] : nullptr));
      if (HeadOf(record).key != keys[i]) continue;  // Of an index that may answer with another's.
      std::memcpy(rows[i], record + kRecordHeadBytes, layout_.row_bytes);
      found[i] = 1;
    }
  }
  read_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  read_requests_.fetch_add(ranges.size(), std::memory_order_relaxed);
  return OkStatus();
}

}  // namespace terrace
