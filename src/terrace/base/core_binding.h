// Where threads run and where their memory lies. A thread is born on the processing units of the
// thread that starts it, and with its way of taking memory: what is bound here passes both on.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "terrace/base/status.h"

namespace terrace {

// The processing units that the calling thread may run on, ascending.
Result<std::vector<int>> CurrentUnits();

// Binds the calling thread to processing units while it lives; empty: leaves it where it is. A
// refusal is logged and costs speed alone. REQUIRES: made and destroyed by one thread.
class ScopedBinding {
 public:
  explicit ScopedBinding(std::span<const int> units);
  ~ScopedBinding();
  ScopedBinding(const ScopedBinding&) = delete;
  ScopedBinding& operator=(const ScopedBinding&) = delete;

 private:
  std::vector<int> before_;  // Empty: nothing is bound.
};

// As that, for as long as the thread lives.
void BindCurrentThread(std::span<const int> units);

// Has the calling thread take its memory from the NUMA nodes in turn while it lives; fewer than two
// nodes change nothing, nor does it where somebody has chosen a policy for the process. Likewise.
class ScopedInterleaving {
 public:
  explicit ScopedInterleaving(std::span<const int> nodes);
  ~ScopedInterleaving();
  ScopedInterleaving(const ScopedInterleaving&) = delete;
  ScopedInterleaving& operator=(const ScopedInterleaving&) = delete;

 private:
  bool set_ = false;
};

// "0-3,8": ascending numbers as Linux writes them.
std::string RangesText(std::span<const int> numbers);

}  // namespace terrace
