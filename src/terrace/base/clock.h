// Clock: the seam to time. Real in the program, stepped by hand in tests.
#pragma once

#include <cstdint>

namespace terrace {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::int64_t MonotonicNanos() const = 0;
  virtual std::int64_t WallMicros() const = 0;  // Since 1970-01-01 UTC.
  double MonotonicSeconds() const { return static_cast<double>(MonotonicNanos()) * 1e-9; }
  static Clock* Real();  // Lives for ever.
};

// CPU time of the calling thread and of the process, seconds.
double ThreadCpuSeconds();
double ProcessCpuSeconds();

}  // namespace terrace
