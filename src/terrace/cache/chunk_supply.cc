#include "terrace/cache/chunk_supply.h"

#include <utility>

#include "terrace/base/sync_point.h"

namespace terrace {

ChunkSupply::ChunkSupply(std::uint64_t chunk_bytes, bool background)
    : chunk_bytes_(chunk_bytes), background_(background) {
  if (background_) {
    thread_ = Thread("cache-memory", ThreadPriority::kYielding, [this] { Loop(); });
  }
}

ChunkSupply::~ChunkSupply() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    wanted_.NotifyOne();
  }
  if (thread_.joinable()) thread_.Join();
}

void ChunkSupply::SetLimit(std::uint64_t chunks) {
  if (!background_) return;
  MutexLock lock(&mu_);
  limit_ = chunks;
  while (ready_.size() + making_ > limit_) {
    if (ready_.empty()) {
      made_.Wait(&mu_);
    } else {
      ready_.pop_back();
    }
  }
  if (ready_.size() + making_ < limit_) wanted_.NotifyOne();
}

Result<HugeBuffer> ChunkSupply::Take() {
  {
    MutexLock lock(&mu_);
    while (ready_.empty() && making_ > 0 && making_ >= limit_) made_.Wait(&mu_);
    if (!ready_.empty()) {
      HugeBuffer taken = std::move(ready_.back());
      ready_.pop_back();
      // The chunk counts as its taker's now.
      if (limit_ > 0) --limit_;
      return taken;
    }
    if (limit_ > 0) --limit_;
    refused_ = false;
  }
  return HugeBuffer::Allocate(chunk_bytes_);
}

std::uint64_t ChunkSupply::chunks() const {
  MutexLock lock(&mu_);
  return ready_.size() + making_;
}

void ChunkSupply::Loop() {
  MutexLock lock(&mu_);
  while (true) {
    while (!stop_ && (refused_ || ready_.size() + making_ >= limit_)) wanted_.Wait(&mu_);
    if (stop_) return;
    making_ = 1;
    mu_.Unlock();
    SyncPoint::Hit("cache.memory.before_touch");
    Result<HugeBuffer> made = HugeBuffer::Allocate(chunk_bytes_);
    if (made.ok()) made->Touch();
    mu_.Lock();
    making_ = 0;
    if (made.ok()) {
      ready_.push_back(std::move(made).value());
    } else {
      refused_ = true;
    }
    made_.NotifyAll();
  }
}

}  // namespace terrace
