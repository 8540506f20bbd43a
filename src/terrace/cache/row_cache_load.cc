// How RowCacheImpl brings rows from the stores.
#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/sync_point.h"
#include "terrace/cache/row_cache_impl.h"
#include "terrace/cache/shard_order.h"

namespace terrace {

void RowCacheImpl::LoaderLoop(StoreReader* reader) {
  MutexLock lock(&mu_);
  while (true) {
    while (!stop_ && !HasLoad()) load_wanted_.Wait(&mu_);
    if (!HasLoad()) return;
    RunLoad(reader);
  }
}

Status RowCacheImpl::WaitFor(RowLoad* load) {
  MutexLock lock(&mu_);
  WaitLocked(load);
  return load->status;
}

void RowCacheImpl::WaitLocked(RowLoad* load) {
  while (!load->done) {
    if (options_.background || running_loads_ > 0) {
      loaded_.Wait(&mu_);
    } else {
      RunLoad(&readers_.front());
    }
  }
}

void RowCacheImpl::RunLoad(StoreReader* reader) {
  const std::shared_ptr<RowLoad> load = loads_[running_loads_++];
  Status status = aborted_;
  if (status.ok()) {
    mu_.Unlock();
    status = Load(reader, load.get());
    mu_.Lock();
    // An aborted read says only that it was.
    if (!status.ok() && !aborted_.ok()) status = aborted_;
  }
  while (loads_.front() != load) loaded_.Wait(&mu_);
  if (status.ok()) status = load->status;  // Of the one before it.
  --running_loads_;
  loads_.pop_front();
  EndLoad(load.get(), status);
  if (!status.ok()) {
    // Those that run have the failure to end with; the others end here.
    for (std::size_t i = 0; i < running_loads_; ++i) loads_[i]->status = status;
    for (; HasLoad(); loads_.pop_back()) EndLoad(loads_.back().get(), status);
  }
  loaded_.NotifyAll();
}

Status RowCacheImpl::Load(StoreReader* reader, RowLoad* load) {
  SyncPoint::Hit("cache.pin.before_read");
  load->found.assign(load->keys.size(), 0);
  TERRACE_RETURN_IF_ERROR(
      ReadFromStores(reader, load->keys, load->rows, load->found, &stop_reads_));
  for (std::size_t i = 0; i < load->keys.size(); ++i) {
    if (load->found[i] == 0) options_.create_row(load->keys[i], load->rows[i]);
  }
  return OkStatus();
}

void RowCacheImpl::EndLoad(RowLoad* load, const Status& status) {
  constexpr std::size_t kAhead = 16;
  for (std::size_t i = 0; i < load->entries.size(); ++i) {
    if (i + kAhead < load->entries.size()) {
      __builtin_prefetch(&arena_.entry(load->entries[i + kAhead]), 1);
    }
    Entry& entry = arena_.entry(load->entries[i]);
    if (status.ok()) {
      StoreFlags(entry, load->found[i] != 0 ? 0 : kNewFlag);
      counts_.created += load->found[i] == 0 ? 1 : 0;
    } else {
      // A later Pin of the key starts anew; what is pinned goes with its last pin.
      map_.Erase(MixKey(entry.key), load->entries[i]);
      StoreFlags(entry, kLostFlag);
    }
  }
  load->status = status;
  load->done = true;
}

Status RowCacheImpl::ReadFromStores(StoreReader* reader, std::span<const Key> keys,
                                    std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                                    const std::atomic<bool>* stop) {
  MutexLock one_read(&reader->mu);
  if (stores_.size() == 1) return stores_[0]->Read(keys, rows, found, stop);
  ShardOrder order;
  SortByShard(keys, stores_.size(), &order);
  std::vector<Key> sorted_keys(keys.size());
  std::vector<std::byte*> sorted_rows(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    sorted_keys[i] = keys[order.origin[i]];
    sorted_rows[i] = rows[order.origin[i]];
  }
  std::vector<std::uint8_t> sorted_found(keys.size(), 0);
  std::vector<Status> statuses(stores_.size());
  // Relaxed: a shard more that is read in vain does no harm.
  std::atomic<bool> failed{false};
  const auto read_shard = [&](int task) {
    const auto shard = static_cast<std::size_t>(task);
    if (order.count(shard) == 0 || failed.load(std::memory_order_relaxed)) return;
    const Status read =
        stores_[shard]->Read(order.PartOf(sorted_keys, shard), order.PartOf(sorted_rows, shard),
                             order.PartOf(sorted_found, shard), stop);
    if (read.ok()) return;
    statuses[shard] = read.WithContext("shard " + std::to_string(shard));
    failed.store(true, std::memory_order_relaxed);
  };
  const int shards = static_cast<int>(stores_.size());
  if (reader->workers != nullptr) {
    reader->workers->Run(shards, read_shard);
  } else {
    for (int shard = 0; shard < shards; ++shard) read_shard(shard);
  }
  for (const Status& status : statuses) TERRACE_RETURN_IF_ERROR(status);
  for (std::size_t i = 0; i < keys.size(); ++i) found[order.origin[i]] = sorted_found[i];
  return OkStatus();
}

}  // namespace terrace
