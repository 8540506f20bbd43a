// CompactionPace: what compaction may take of a disk that batches use. While a read or a write of
// the store is on its way, compaction moves bytes no faster than a quarter above its mean since
// the last writes; between them, as fast as it can. So the mean follows what the space bound needs,
// and a batch loses no more than that share of the disk. Time in which somebody waits for
// compaction does not count: where writes are as fast as compaction lets them, a pace beside them
// would only make them wait longer afterwards. Thread-safe. Borrows the clock.
#pragma once

#include <cstdint>

#include "terrace/base/clock.h"
#include "terrace/base/mutex.h"

namespace terrace {

class CompactionPace {
 public:
  explicit CompactionPace(const Clock* clock) : clock_(clock) {}

  // Holds of the pace, for their lifetime: the disk is used, or somebody waits for compaction,
  // which then goes as fast as it can.
  enum Reason { kUse, kHurry };
  class Hold {
   public:
    Hold(CompactionPace* pace, Reason reason);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    CompactionPace* const pace_;
    const Reason reason_;
  };

  // A write of so many bytes begins.
  void Wrote(std::uint64_t bytes) TERRACE_EXCLUDES(mu_);
  // Compaction has moved so many. Blocks: until it may move more.
  void Pass(std::uint64_t bytes) TERRACE_EXCLUDES(mu_);
  // No Pass blocks any more.
  void Stop() TERRACE_EXCLUDES(mu_);
  // Beside reads and writes; 0: no limit, for want of writes.
  double bytes_per_second() const TERRACE_EXCLUDES(mu_);

 private:
  double Rate() const TERRACE_REQUIRES(mu_);
  // Takes the time up to now in. Gives it.
  std::int64_t CountHurry() TERRACE_REQUIRES(mu_);
  bool Limited() const TERRACE_REQUIRES(mu_) { return holds_[kUse] > 0 && holds_[kHurry] == 0; }
  void Change(Reason reason, int by) TERRACE_REQUIRES(mu_);

  const Clock* const clock_;
  mutable Mutex mu_;
  CondVar changed_;
  int holds_[2] TERRACE_GUARDED_BY(mu_) = {};
  bool stopped_ TERRACE_GUARDED_BY(mu_) = false;
  std::int64_t last_write_nanos_ TERRACE_GUARDED_BY(mu_) = 0;  // 0: none.
  std::int64_t hurry_nanos_ TERRACE_GUARDED_BY(mu_) = 0;    // In which somebody waited, since then,
  std::int64_t counted_nanos_ TERRACE_GUARDED_BY(mu_) = 0;  // up to this time.
  std::int64_t ready_nanos_ TERRACE_GUARDED_BY(mu_) = 0;    // What was moved is paid for by then.
  // Of the last writes; each counts an eighth less than the next.
  double seconds_ TERRACE_GUARDED_BY(mu_) = 0;
  double written_ TERRACE_GUARDED_BY(mu_) = 0, moved_ TERRACE_GUARDED_BY(mu_) = 0;  // Bytes.
  double moved_since_ TERRACE_GUARDED_BY(mu_) = 0;  // The last write.
};

}  // namespace terrace
