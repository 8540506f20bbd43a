// Spread: what a benchmark says of several samples of one thing. PartRates: samples of the rate of
// one long work. Threads: values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace terrace {

struct Spread {
  double median = 0, least = 0, most = 0;
  std::size_t samples = 0;

  // "1.50 (1.25..2.00)", each value times `scale`.
  std::string Text(int digits, double scale = 1) const {
    char text[128];
    std::snprintf(text, sizeof text, "%.*f (%.*f..%.*f)", digits, median * scale, digits,
                  least * scale, digits, most * scale);
    return text;
  }
};

// Of an even number of samples the median is halfway between the middle two. None: zeros.
inline Spread SpreadOf(std::vector<double> samples) {
  if (samples.empty()) return {};
  std::sort(samples.begin(), samples.end());
  const std::size_t n = samples.size();
  return {(samples[(n - 1) / 2] + samples[n / 2]) / 2, samples.front(), samples.back(), n};
}

// A tenth of the work is a part, or as much more as its steps make it.
class PartRates {
 public:
  PartRates(std::uint64_t units, double begin_seconds)
      : least_(units / 10), begin_seconds_(begin_seconds) {}

  // So many units are done by now, all told.
  void Done(std::uint64_t units, double now_seconds) {
    if (units == begin_ || units - begin_ < least_) return;
    rates_.push_back(static_cast<double>(units - begin_) / (now_seconds - begin_seconds_));
    Skip(units, now_seconds);
  }
  // Likewise, and what was done since the last part tells nothing.
  void Skip(std::uint64_t units, double now_seconds) {
    begin_ = units;
    begin_seconds_ = now_seconds;
  }
  const std::vector<double>& rates() const { return rates_; }  // Units a second.

 private:
  const std::uint64_t least_;
  std::uint64_t begin_ = 0;
  double begin_seconds_;
  std::vector<double> rates_;
};

}  // namespace terrace
