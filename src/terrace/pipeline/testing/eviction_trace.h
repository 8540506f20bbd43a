// What eviction_bench gives each cache, and what it counts: batches of keys, and those found in
// memory. A result that can't be ends the process. Threads: one.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "terrace/base/clock.h"

namespace terrace {

inline void Require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "eviction_bench: %s\n", what.c_str());
  std::exit(1);
}

// Distinct keys of each batch.
struct Trace {
  std::vector<std::vector<std::uint32_t>> batches;
  std::uint32_t keys = 0;
};

struct Score {
  std::uint64_t visits = 0, hits = 0;
  std::uint64_t first_visits = 0;  // Which no policy can have in memory, and which read no disk.
  std::uint64_t all_visits = 0;    // Those of the warm-up too.
  double seconds = 0;              // In the policy.
  double Hits() const { return 100.0 * static_cast<double>(hits) / static_cast<double>(visits); }
  double KnownHits() const {
    return visits == first_visits
               ? 100
               : 100.0 * static_cast<double>(hits) / static_cast<double>(visits - first_visits);
  }
  double Nanos() const { return 1e9 * seconds / static_cast<double>(all_visits); }
};

// Counts visits of a trace's batches, in order. The first quarter is for filling the memory.
class Scorer {
 public:
  explicit Scorer(const Trace& trace) : warm_(trace.batches.size() / 4), seen_(trace.keys) {}
  void Visit(std::size_t batch, std::uint32_t key, bool hit) {
    ++score_.all_visits;
    Require(!hit || seen_[key], "a key is in memory before its first visit");
    if (batch >= warm_) {
      ++score_.visits;
      score_.hits += hit ? 1 : 0;
      score_.first_visits += seen_[key] ? 0 : 1;
    }
    seen_[key] = true;
  }
  Score score(double seconds) {
    score_.seconds = seconds;
    return score_;
  }

 private:
  const std::size_t warm_;
  std::vector<bool> seen_;  // (keys)
  Score score_;
};

// Seconds spent between Start and Stop.
class Stopwatch {
 public:
  void Start() { begin_ = Clock::Real()->MonotonicNanos(); }
  void Stop() { nanos_ += Clock::Real()->MonotonicNanos() - begin_; }
  double seconds() const { return static_cast<double>(nanos_) * 1e-9; }

 private:
  std::int64_t begin_ = 0, nanos_ = 0;
};

}  // namespace terrace
