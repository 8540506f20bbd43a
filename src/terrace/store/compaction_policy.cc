#include "terrace/store/compaction_policy.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace terrace {

bool CompactionRule::Due(const FileUse& store, std::uint64_t run_bytes) const {
  switch (policy_) {
    case CompactionPolicy::kGain:
      return IsWorth(store);
    case CompactionPolicy::kStaleShare:
      return true;
    case CompactionPolicy::kModelSize:
      return run_bytes > most_run_bytes_;
  }
  return true;
}

double CompactionRule::RowsAbove(const FileUse& store) const {
  if (policy_ == CompactionPolicy::kModelSize) return 0;
  const auto rows = static_cast<double>(store.rows);
  const auto newest = static_cast<double>(store.rows - store.reclaimable);
  return std::max(0.0, rows - newest / (1 - stale_share_));
}

double CompactionRule::Rank(const FileUse& file, std::uint64_t age) const {
  const auto newest = static_cast<double>(file.rows - file.reclaimable);
  const auto reclaimable = static_cast<double>(file.reclaimable);
  switch (policy_) {
    case CompactionPolicy::kGain:
      if (newest == 0) return std::numeric_limits<double>::infinity();
      // Rows that nobody overwrote for long will stay so, and a young file gets staler by waiting.
      return reclaimable / newest * std::sqrt(static_cast<double>(age));
    case CompactionPolicy::kStaleShare:
      return reclaimable / static_cast<double>(file.rows);
    case CompactionPolicy::kModelSize:
      return -newest;
  }
  return 0;
}

}  // namespace terrace
