#include "terrace/store/compaction_pace.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace terrace {
namespace {

constexpr double kSlack = 1.25;
constexpr double kMemory = 7.0 / 8;
constexpr std::int64_t kMostWaitMillis = 100;

}  // namespace

CompactionPace::Hold::Hold(CompactionPace* pace, Reason reason) : pace_(pace), reason_(reason) {
  MutexLock lock(&pace_->mu_);
  pace_->Change(reason, 1);
}

CompactionPace::Hold::~Hold() {
  MutexLock lock(&pace_->mu_);
  pace_->Change(reason_, -1);
}

void CompactionPace::Change(Reason reason, int by) {
  const bool limited = Limited();
  const std::int64_t now = CountHurry();
  holds_[reason] += by;
  if (!limited && Limited()) ready_nanos_ = now;
  if (limited && !Limited()) changed_.NotifyAll();
}

std::int64_t CompactionPace::CountHurry() {
  const std::int64_t now = clock_->MonotonicNanos();
  if (holds_[kHurry] > 0) hurry_nanos_ += now - counted_nanos_;
  return counted_nanos_ = now;
}

void CompactionPace::Wrote(std::uint64_t bytes) {
  MutexLock lock(&mu_);
  const std::int64_t now = CountHurry();
  const std::int64_t hurry = std::exchange(hurry_nanos_, 0);
  // The time that belongs to the first write nobody knows.
  if (last_write_nanos_ != 0) {
    seconds_ = kMemory * seconds_ + static_cast<double>(now - last_write_nanos_ - hurry) * 1e-9;
    written_ = kMemory * written_ + static_cast<double>(bytes);
    moved_ = kMemory * moved_ + moved_since_;
    moved_since_ = 0;
  }
  last_write_nanos_ = now;
}

double CompactionPace::Rate() const {
  if (seconds_ <= 0) return 0;
  // No slower than rows come in: the mean has to come from somewhere.
  return std::max(kSlack * moved_, written_) / seconds_;
}

void CompactionPace::Pass(std::uint64_t bytes) {
  MutexLock lock(&mu_);
  std::int64_t now = clock_->MonotonicNanos();
  moved_since_ += static_cast<double>(bytes);
  const double rate = Rate();
  if (rate <= 0 || !Limited()) return;
  // The time that it took to move them counts.
  const auto nanos = static_cast<std::int64_t>(static_cast<double>(bytes) / rate * 1e9);
  ready_nanos_ = std::max(ready_nanos_ + nanos, now);
  while (Limited() && !stopped_ && now < ready_nanos_) {
    const std::int64_t millis = (ready_nanos_ - now) / 1'000'000 + 1;
    changed_.WaitFor(&mu_, std::chrono::milliseconds(std::min(millis, kMostWaitMillis)));
    now = clock_->MonotonicNanos();
  }
  ready_nanos_ = std::min(ready_nanos_, now);
}

void CompactionPace::Stop() {
  MutexLock lock(&mu_);
  stopped_ = true;
  changed_.NotifyAll();
}

double CompactionPace::bytes_per_second() const {
  MutexLock lock(&mu_);
  return Rate();
}

}  // namespace terrace
