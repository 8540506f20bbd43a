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

Status RowCacheImpl::WaitFor(PinnedRows* pinned) {
  if (pinned->load_ == nullptr) return OkStatus();
  {
    MutexLock lock(&mu_);
    WaitLocked(pinned->load_.get());
    TERRACE_RETURN_IF_ERROR(pinned->load_->status);
  }
  pinned->load_ = nullptr;  // The lists of a load, often the last who has them.
  return OkStatus();
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
      map_.Erase(MapHash(entry.key), load->entries[i]);
      StoreFlags(entry, kLostFlag);
    }
  }
  if (!status.ok()) {
    ++failed_loads_;
    load_failure_ = status;
  }
  load->status = status;
  load->done = true;
}

Status RowCacheImpl::ReadFromStores(StoreReader* reader, std::span<const Key> keys,
                                    std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                                    const std::atomic<bool>* stop) {
  MutexLock one_read(&reader->mu);
  const auto read = [&](std::size_t shard, std::span<const Key> its_keys,
                        std::span<std::byte* const> its_rows, std::span<std::uint8_t> its_found) {
    const Status status = stores_[shard]->Read(its_keys, its_rows, its_found, stop);
    return shards_.of == 1 || status.ok()
               ? status
               : status.WithContext("shard " + std::to_string(shards_.first + shard));
  };
  if (stores_.size() == 1) return read(0, keys, rows, found);
  ShardOrder order;
  SortByShard(keys, shards_, &order);
  return ReadByShard(order, keys, rows, found, reader->workers.get(), read);
}

}  // namespace terrace
