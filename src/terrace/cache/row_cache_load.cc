// How RowCacheImpl brings rows from the stores.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/sync_point.h"
#include "terrace/cache/row_cache_impl.h"

namespace terrace {

void RowCacheImpl::LoaderLoop() {
  MutexLock lock(&mu_);
  while (true) {
    while (!stop_ && loads_.empty()) load_wanted_.Wait(&mu_);
    if (loads_.empty()) return;
    RunOldestLoad();
  }
}

Status RowCacheImpl::WaitFor(RowLoad* load) {
  MutexLock lock(&mu_);
  WaitLocked(load);
  return load->status;
}

void RowCacheImpl::WaitLocked(RowLoad* load) {
  while (!load->done) {
    if (options_.background || loading_) {
      loaded_.Wait(&mu_);
    } else {
      RunOldestLoad();
    }
  }
}

void RowCacheImpl::RunOldestLoad() {
  const std::shared_ptr<RowLoad> load = loads_.front();
  loading_ = true;
  Status status = aborted_;
  if (status.ok()) {
    mu_.Unlock();
    status = Load(load.get());
    mu_.Lock();
    // An aborted read says only that it was.
    if (!status.ok() && !aborted_.ok()) status = aborted_;
  }
  loading_ = false;
  loads_.pop_front();
  EndLoad(load.get(), status);
  for (; !status.ok() && !loads_.empty(); loads_.pop_front()) {
    EndLoad(loads_.front().get(), status);
  }
  loaded_.NotifyAll();
}

Status RowCacheImpl::Load(RowLoad* load) {
  SyncPoint::Hit("cache.pin.before_read");
  load->found.assign(load->keys.size(), 0);
  const double begin = clock_->MonotonicSeconds();
  TERRACE_RETURN_IF_ERROR(ReadFromStores(load->keys, load->rows, load->found, &stop_reads_));
  load->seconds = clock_->MonotonicSeconds() - begin;
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
  counts_.load_seconds += load->seconds;
  load->status = status;
  load->done = true;
}

Status RowCacheImpl::ReadFromStores(std::span<const Key> keys, std::span<std::byte* const> rows,
                                    std::span<std::uint8_t> found, const std::atomic<bool>* stop) {
  MutexLock one_read(&read_mu_);
  if (stores_.size() == 1) return stores_[0]->Read(keys, rows, found, stop);
  const auto shards = static_cast<std::uint32_t>(stores_.size());
  std::vector<std::vector<std::size_t>> by_shard(shards);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    by_shard[ShardOfHash(MixKey(keys[i]), shards)].push_back(i);
  }
  for (std::uint32_t shard = 0; shard < shards; ++shard) {
    const std::vector<std::size_t>& index = by_shard[shard];
    if (index.empty()) continue;
    std::vector<Key> shard_keys;
    std::vector<std::byte*> shard_rows;
    for (const std::size_t i : index) {
      shard_keys.push_back(keys[i]);
      shard_rows.push_back(rows[i]);
    }
    std::vector<std::uint8_t> shard_found(index.size(), 0);
    const Status read = stores_[shard]->Read(shard_keys, shard_rows, shard_found, stop);
    if (!read.ok()) return read.WithContext("shard " + std::to_string(shard));
    for (std::size_t i = 0; i < index.size(); ++i) found[index[i]] = shard_found[i];
  }
  return OkStatus();
}

}  // namespace terrace
