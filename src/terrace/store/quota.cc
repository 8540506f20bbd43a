#include <algorithm>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/units.h"
#include "terrace/store/store.h"

namespace terrace {

Status DiskQuota::Reserve(std::uint64_t bytes, std::uint64_t keep_free) {
  // Relaxed throughout: the counters order no other memory.
  std::uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    // Additions could wrap; limit_ - used can't, since used never passes the limit.
    if (bytes > limit_ - used || keep_free > limit_ - used - bytes) {
      return IoError(fmt::format(
          "ssd.quota: {} more bytes ({}) do not fit: {} of {} are used{}; raise ssd.quota, or keep "
          "fewer checkpoints (checkpoint.keep)",
          bytes, FormatBytes(bytes), FormatBytes(used), FormatBytes(limit_),
          keep_free == 0
              ? std::string()
              : fmt::format(" and {} stay free for the last checkpoint", FormatBytes(keep_free))));
    }
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  const std::uint64_t now = used + bytes;
  std::uint64_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < now && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
  return OkStatus();
}

void DiskQuota::Release(std::uint64_t bytes) {
  const std::uint64_t before = used_.fetch_sub(bytes, std::memory_order_relaxed);
  TERRACE_CHECK(before >= bytes);
}

}  // namespace terrace
