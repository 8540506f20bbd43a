#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/units.h"
#include "terrace/store/store.h"

namespace terrace {

DiskQuota::Reclaimer::Reclaimer(DiskQuota* quota, std::function<void()> give,
                                std::function<void()> room_made)
    : quota_(quota), give_(std::move(give)), room_made_(std::move(room_made)) {
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
  return OutOfRoomError(fmt::format(
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

void DiskQuota::TellRoomMade() {
  MutexLock lock(&mu_);
  for (const Reclaimer* reclaimer : reclaimers_) {
    if (reclaimer->room_made_) reclaimer->room_made_();
  }
}

bool DiskQuota::TryTakeRewriteRoom(Reclaimer* by) {
  MutexLock lock(&rewrite_mu_);
  if (rewrite_room_of_ == nullptr && rewrite_waiters_ == 0) {
    rewrite_room_of_ = by;
    return true;
  }
  if (rewrite_room_of_ != by) by->refused_ = true;
  return false;
}

void DiskQuota::AwaitRewriteRoom(Reclaimer* by) {
  MutexLock lock(&rewrite_mu_);
  ++rewrite_waiters_;
  while (rewrite_room_of_ != nullptr) rewrite_room_given_.Wait(&rewrite_mu_);
  --rewrite_waiters_;
  rewrite_room_of_ = by;
}

void DiskQuota::GiveRewriteRoom() {
  MutexLock lock(&rewrite_mu_);
  rewrite_room_of_ = nullptr;
  rewrite_room_given_.NotifyOne();
}

void DiskQuota::TellRefused() {
  MutexLock lock(&mu_);
  for (Reclaimer* reclaimer : reclaimers_) {
    bool refused;
    {
      MutexLock rewrite(&rewrite_mu_);
      // Not before nobody is left that kept it from a rewrite: whose end is told as well.
      const bool free = rewrites_ == reclaimer->rewrites_ && waiting_rewrites_ == 0 &&
                        rewrite_room_of_ == nullptr && rewrite_waiters_ == 0;
      refused = free && std::exchange(reclaimer->refused_, false);
    }
    if (refused && reclaimer->room_made_) reclaimer->room_made_();
  }
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

bool DiskQuota::BeginRewrite(Reclaimer* by, std::uint64_t files, bool waits) {
  MutexLock lock(&rewrite_mu_);
  // Else those that do not wait could take what ended rewrites gave back, each time.
  bool taken = (waits || waiting_rewrites_ == 0) && TakeFiles(files, 0);
  if (!taken && waits) {
    ++waiting_rewrites_;
    SyncPoint::Hit("quota.rewrite.waits");
    while (!taken && rewrites_ > 0) {
      rewrite_ended_.Wait(&rewrite_mu_);
      taken = TakeFiles(files, 0);
    }
    --waiting_rewrites_;
  } else if (!taken) {
    by->refused_ |= waiting_rewrites_ > 0 || rewrites_ > by->rewrites_;
  }
  rewrites_ += taken;
  by->rewrites_ += taken;
  return taken;
}

void DiskQuota::EndRewrite(Reclaimer* by) {
  MutexLock lock(&rewrite_mu_);
  --rewrites_;
  --by->rewrites_;
  rewrite_ended_.NotifyAll();
}

void DiskQuota::Release(std::uint64_t bytes) {
  const std::uint64_t before = used_.fetch_sub(bytes, std::memory_order_relaxed);
  TERRACE_CHECK(before >= bytes);
}

}  // namespace terrace
