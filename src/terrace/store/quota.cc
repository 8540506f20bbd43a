#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/units.h"
#include "terrace/store/store.h"

namespace terrace {

DiskQuota::Reclaimer::Reclaimer(DiskQuota* quota, std::function<void()> give)
    : quota_(quota), give_(std::move(give)) {
  MutexLock lock(&quota_->mu_);
  quota_->reclaimers_.push_back(this);
}

DiskQuota::Reclaimer::~Reclaimer() {
  MutexLock lock(&quota_->mu_);
  std::erase(quota_->reclaimers_, this);
}

Status DiskQuota::Reserve(std::uint64_t bytes, std::uint64_t keep_free) {
  if (TryReserve(bytes, keep_free)) return OkStatus();
  Reclaim();
  if (TryReserve(bytes, keep_free)) return OkStatus();
  return IoError(fmt::format(
      "ssd.quota: {} more bytes ({}) do not fit: {} of {} are used{}; raise ssd.quota, or keep "
      "fewer checkpoints (checkpoint.keep)",
      bytes, FormatBytes(bytes), FormatBytes(used()), FormatBytes(limit_),
      keep_free == 0
          ? std::string()
          : fmt::format(" and {} stay free for the last checkpoint", FormatBytes(keep_free))));
}

void DiskQuota::Reclaim() {
  MutexLock lock(&mu_);
  for (const Reclaimer* reclaimer : reclaimers_) reclaimer->give_();
}

bool DiskQuota::TryReserve(std::uint64_t bytes, std::uint64_t keep_free) {
  // Relaxed throughout: the counters order no other memory.
  std::uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    // Additions could wrap; limit_ - used can't, since used never passes the limit.
    if (bytes > limit_ - used || keep_free > limit_ - used - bytes) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  const std::uint64_t now = used + bytes;
  std::uint64_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < now && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
  return true;
}

bool DiskQuota::TakeFiles(std::uint64_t files, std::uint64_t keep_free) {
  std::uint64_t now = files_.load(std::memory_order_relaxed);
  do {
    if (now + files + keep_free > limit_files_) return false;
  } while (!files_.compare_exchange_weak(now, now + files, std::memory_order_relaxed));
  return true;
}

void DiskQuota::Release(std::uint64_t bytes) {
  const std::uint64_t before = used_.fetch_sub(bytes, std::memory_order_relaxed);
  TERRACE_CHECK(before >= bytes);
}

}  // namespace terrace
