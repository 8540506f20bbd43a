#include "terrace/base/clock.h"

#include <ctime>

namespace terrace {
namespace {

std::int64_t Nanos(clockid_t id) {
  timespec t{};
  clock_gettime(id, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

class RealClock final : public Clock {
 public:
  std::int64_t MonotonicNanos() const override { return Nanos(CLOCK_MONOTONIC); }
  std::int64_t WallMicros() const override { return Nanos(CLOCK_REALTIME) / 1000; }
};

}  // namespace

Clock* Clock::Real() {
  static RealClock clock;
  return &clock;
}

double ThreadCpuSeconds() { return static_cast<double>(Nanos(CLOCK_THREAD_CPUTIME_ID)) * 1e-9; }
double ProcessCpuSeconds() { return static_cast<double>(Nanos(CLOCK_PROCESS_CPUTIME_ID)) * 1e-9; }

}  // namespace terrace
