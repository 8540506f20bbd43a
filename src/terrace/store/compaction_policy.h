// CompactionRule: which parameter files are rewritten, when and which first
// (docs/decisions/compaction.md). Threads: a value.
#pragma once

#include <cstdint>

#include "terrace/store/store.h"

namespace terrace {

// What the rule asks of a file; sums of them stand for a store.
struct FileUse {
  std::uint64_t rows = 0;
  std::uint64_t reclaimable = 0;  // Those that a rewrite leaves out.
};

class CompactionRule {
 public:
  explicit CompactionRule(const StoreOptions& options)
      : policy_(options.compaction),
        stale_share_(options.stale_share),
        most_run_bytes_(options.most_run_bytes) {}

  // Nothing else is rewritten for its stale rows, but for TakesAny, so that no rewrite copies more
  // than (1 - stale_share) / stale_share rows for one that it frees.
  bool IsWorth(const FileUse& file) const {
    return static_cast<double>(file.reclaimable) > stale_share_ * static_cast<double>(file.rows);
  }
  // Whether files with any stale row are rewritten now, however few: where the run is above its
  // limit and its stores have as many bytes of stale records as it takes. Where they have not, rows
  // would be copied again and again for nothing.
  bool TakesAny(std::uint64_t run_bytes, std::uint64_t stale_bytes) const {
    return policy_ == CompactionPolicy::kModelSize && run_bytes > most_run_bytes_ &&
           run_bytes - most_run_bytes_ <= stale_bytes;
  }
  // Whether the files that are worth it are rewritten now. `store`: the sum of its files; where it
  // is due by that sum, one of them is worth it.
  bool Due(const FileUse& store, std::uint64_t run_bytes) const;
  // By how many rows the store passes its bound, where the policy has one.
  double RowsAbove(const FileUse& store) const;
  // Greater ones first. `age`: writes since the file's youngest row.
  double Rank(const FileUse& file, std::uint64_t age) const;

 private:
  CompactionPolicy policy_;
  double stale_share_;
  std::uint64_t most_run_bytes_;
};

}  // namespace terrace
