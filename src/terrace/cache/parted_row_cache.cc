#include "terrace/cache/parted_row_cache.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/cache/row_cache_impl.h"

namespace terrace {
namespace {

// Of n keys a part of p has n / p and some more, hashes being what they are: beyond so many
// standard deviations (and as many keys, of few) once in 10^15 sets.
constexpr double kDeviations = 8;

double WithMore(double mean) { return mean + kDeviations * std::sqrt(mean) + kDeviations; }

// The mean with which WithMore is `rows`.
double MeanFor(double rows) {
  const double root = std::sqrt(std::max(0.0, rows - kDeviations + kDeviations * kDeviations / 4));
  const double mean = std::max(0.0, root - kDeviations / 2);
  return mean * mean;
}

}  // namespace

std::uint32_t PartedRowCache::PartsFor(const RowCacheOptions& options, std::size_t shards) {
  if (!options.background) return 1;
  auto parts = static_cast<std::uint32_t>(std::min<std::size_t>(options.parts, shards));
  while (parts > 1 && shards % parts != 0) --parts;
  return std::max<std::uint32_t>(1, parts);
}

Result<std::unique_ptr<RowCache>> PartedRowCache::Make(const RowCacheOptions& options,
                                                       std::span<Store* const> stores,
                                                       std::uint32_t parts) {
  TERRACE_CHECK(parts > 1 && stores.size() % parts == 0);
  const auto shards = static_cast<std::uint32_t>(stores.size());
  std::unique_ptr<PartedRowCache> cache(new PartedRowCache(parts, options.on_pin_thread));
  RowCacheOptions of_part = options;
  of_part.capacity_bytes /= parts;
  of_part.parts = 1;
  const std::uint32_t count = shards / parts;
  for (std::uint32_t first = 0; first < shards; first += count) {
    const auto of_it = stores.subspan(first, count);
    TERRACE_ASSIGN_OR_RETURN(
        std::unique_ptr<RowCacheImpl> part,
        RowCacheImpl::Make(of_part, {of_it.begin(), of_it.end()}, {first, count, shards}));
    cache->parts_.push_back(std::move(part));
  }
  return std::unique_ptr<RowCache>(std::move(cache));
}

PartedRowCache::PartedRowCache(std::uint32_t parts, std::function<void()> on_pin_thread)
    : part_count_(parts),
      pin_workers_("cache-pin-", static_cast<int>(parts), std::move(on_pin_thread),
                   ThreadPriority::kYielding),
      other_workers_("cache-part-", static_cast<int>(parts), nullptr, ThreadPriority::kYielding) {}

Status PartedRowCache::ForEachPart(WorkerGroup* workers,
                                   const std::function<Status(std::size_t part)>& call) const {
  std::vector<Status> statuses(parts_.size());
  workers->Run(static_cast<int>(parts_.size()), [&](int part) {
    const auto p = static_cast<std::size_t>(part);
    statuses[p] = call(p);
  });
  for (const Status& status : statuses) TERRACE_RETURN_IF_ERROR(status);
  return OkStatus();
}

std::size_t PartedRowCache::MaxPinnedRows() const {
  std::size_t least = ~std::size_t{0};
  for (const auto& part : parts_) least = std::min(least, part->MaxPinnedRows());
  return static_cast<std::size_t>(MeanFor(static_cast<double>(least)) * part_count_);
}

std::uint64_t PartedRowCache::RowsToHave(std::uint32_t parts, std::uint64_t rows) {
  if (parts == 1) return rows;
  return parts *
         static_cast<std::uint64_t>(std::ceil(WithMore(static_cast<double>(rows) / parts) + 1));
}

std::uint64_t PartedRowCache::LeastCapacity(std::uint64_t rows) const {
  const std::uint64_t of_part = RowsToHave(part_count_, rows) / part_count_;
  std::uint64_t least = 0;
  for (const auto& part : parts_) least = std::max(least, part->LeastCapacity(of_part));
  return least * part_count_;
}

PinnedRows PartedRowCache::TakeSpare() {
  MutexLock lock(&spare_mu_);
  PinnedRows pinned;
  if (spare_.empty()) return pinned;
  pinned = std::move(spare_.back());
  spare_.pop_back();
  return pinned;
}

Result<PinnedRows> PartedRowCache::StartPin(std::span<const Key> keys) {
  MutexLock one_pin(&pin_mu_);
  PinnedRows pinned = TakeSpare();
  if (pinned.parts_ == nullptr) pinned.parts_ = std::make_shared<PinnedParts>();
  PinnedParts& parts = *pinned.parts_;
  ShardOrder& order = parts.order;
  order.begins.resize(part_count_ + 1U);
  order.origin.resize(keys.size());
  part_of_.resize(keys.size());
  keys_.resize(keys.size());
  pinned.rows_.resize(keys.size());
  parts.pins.resize(part_count_);
  std::uint8_t* const part_of = part_of_.data();
  Key* const sorted = keys_.data();
  pin_workers_.Run(static_cast<int>(part_count_), [&](int slice) {
    const std::size_t begin = keys.size() * static_cast<std::size_t>(slice) / part_count_;
    const std::size_t end = keys.size() * (static_cast<std::size_t>(slice) + 1) / part_count_;
    NumberShards(keys.subspan(begin, end - begin), Parts(), part_of + begin);
  });
  // Sets pinned before leave whatever this one has of other parts when it waits for room in one.
  const Status status = ForEachPart(&pin_workers_, [&](std::size_t p) {
    const std::span<const std::uint32_t> origin = SortShard({part_of, keys.size()}, p, &order);
    const std::span<Key> its_keys(sorted + (origin.data() - order.origin.data()), origin.size());
    for (std::size_t i = 0; i < origin.size(); ++i) its_keys[i] = keys[origin[i]];
    TERRACE_ASSIGN_OR_RETURN(parts.pins[p],
                             parts_[p]->StartPinOfPart(its_keys, origin, pinned.rows_.data()));
    return OkStatus();
  });
  if (!status.ok()) {
    for (PinnedRows& pin : parts.pins) pin.Release();
    return status;
  }
  pinned.cache_ = this;
  return pinned;
}

Status PartedRowCache::WaitFor(PinnedRows* pinned) {
  for (PinnedRows& pin : pinned->parts_->pins) TERRACE_RETURN_IF_ERROR(pin.Wait());
  return OkStatus();
}

void PartedRowCache::Unpin(PinnedRows* pinned) {
  for (PinnedRows& pin : pinned->parts_->pins) pin.Release();
  MutexLock lock(&spare_mu_);
  if (spare_.size() < kSparePins) spare_.push_back(std::move(*pinned));
}

void PartedRowCache::MarkDirtyEntries(const PinnedRows& pinned, std::size_t begin,
                                      std::size_t end) {
  PinnedParts& parts = *pinned.parts_;
  for (std::size_t p = 0; p < parts.pins.size(); ++p) {
    const std::span<const std::uint32_t> origin = parts.order.PartOf(parts.order.origin, p);
    const auto place = [&](std::size_t row) {
      return static_cast<std::size_t>(std::lower_bound(origin.begin(), origin.end(), row) -
                                      origin.begin());
    };
    parts.pins[p].MarkDirty(place(begin), place(end));
  }
}

Status PartedRowCache::Peek(std::span<const Key> keys, std::span<std::byte* const> rows,
                            std::span<std::uint8_t> found) {
  ShardOrder order;
  SortByShard(keys, Parts(), &order);
  MutexLock one(&other_mu_);
  return ReadByShard(order, keys, rows, found, &other_workers_,
                     [&](std::size_t p, std::span<const Key> its_keys,
                         std::span<std::byte* const> its_rows, std::span<std::uint8_t> its_found) {
                       return parts_[p]->Peek(its_keys, its_rows, its_found);
                     });
}

Status PartedRowCache::FlushDirty() {
  MutexLock one(&other_mu_);
  return ForEachPart(&other_workers_, [&](std::size_t p) { return parts_[p]->FlushDirty(); });
}

Status PartedRowCache::WriteAhead(std::uint64_t rows) {
  MutexLock one_pin(&pin_mu_);
  const std::uint64_t of_part = rows / part_count_ + (rows % part_count_ > 0 ? 1 : 0);
  return ForEachPart(&pin_workers_, [&](std::size_t p) { return parts_[p]->WriteAhead(of_part); });
}

std::uint64_t PartedRowCache::SumOfParts(std::uint64_t (RowCache::*number)() const) const {
  std::uint64_t sum = 0;
  for (const auto& part : parts_) sum += ((*part).*number)();
  return sum;
}

std::uint64_t PartedRowCache::dirty_bytes() const { return SumOfParts(&RowCache::dirty_bytes); }

std::uint64_t PartedRowCache::likely_dirty_bytes() const {
  return SumOfParts(&RowCache::likely_dirty_bytes);
}

std::uint64_t PartedRowCache::dirty_writes() const {
  std::uint64_t most = 0;
  for (const auto& part : parts_) most = std::max(most, part->dirty_writes());
  return most;
}

Status PartedRowCache::SetCapacity(std::uint64_t capacity_bytes) {
  // Parts are alike: what is too small for one is refused by the first, before anything changes.
  Status held;
  for (const auto& part : parts_) {
    Status status = part->SetCapacity(capacity_bytes / part_count_);
    if (status.ok()) continue;
    if (status.code() != StatusCode::kOutOfMemory) return status;
    held = std::move(status);
  }
  return held;
}

void PartedRowCache::Abort(const Status& cause) {
  for (const auto& part : parts_) part->Abort(cause);
}

Status PartedRowCache::background_status() const {
  for (const auto& part : parts_) TERRACE_RETURN_IF_ERROR(part->background_status());
  return OkStatus();
}

RowCacheStats PartedRowCache::stats() const {
  RowCacheStats sum;
  double busy = 0, wait = 0;  // Parts write side by side: the time of one is the time of all.
  for (const auto& part : parts_) {
    const RowCacheStats stats = part->stats();
    sum += stats;
    busy = std::max(busy, stats.write_busy_seconds);
    wait = std::max(wait, stats.write_wait_seconds);
  }
  sum.write_busy_seconds = busy;
  sum.write_wait_seconds = wait;
  sum.load_cpu_seconds += pin_workers_.cpu_seconds();
  sum.write_cpu_seconds += other_workers_.cpu_seconds();
  return sum;
}

}  // namespace terrace
