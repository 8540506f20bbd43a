// BusyTime and BusyClock: time in which something goes on, perhaps several times over, of which
// each moment counts once. Threads: BusyTime is guarded by its owner; BusyClock is thread-safe.
#pragma once

#include <cstdint>

#include "terrace/base/clock.h"
#include "terrace/base/mutex.h"

namespace terrace {

struct BusyTime {
  int active = 0;
  std::int64_t since = 0, nanos = 0;

  void Begin(const Clock* clock) {
    if (active++ == 0) since = clock->MonotonicNanos();
  }
  void End(const Clock* clock) {
    if (--active == 0) nanos += clock->MonotonicNanos() - since;
  }
  double Seconds(const Clock* clock) const {
    const std::int64_t going_on = active > 0 ? clock->MonotonicNanos() - since : 0;
    return static_cast<double>(nanos + going_on) * 1e-9;
  }
};

// Of several owners together. Borrows the clock.
class BusyClock {
 public:
  explicit BusyClock(const Clock* clock) : clock_(clock) {}
  void Begin() TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    time_.Begin(clock_);
  }
  void End() TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    time_.End(clock_);
  }
  double Seconds() const TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    return time_.Seconds(clock_);
  }

 private:
  const Clock* const clock_;
  mutable Mutex mu_;
  BusyTime time_ TERRACE_GUARDED_BY(mu_);
};

}  // namespace terrace
