// BenchKeys: the keys of a run of a benchmark, in no order that a structure could profit from, and
// others with each seed. Threads: a value.
#pragma once

#include <cstdint>

#include "terrace/base/ids.h"
#include "terrace/base/rng.h"

namespace terrace {

class BenchKeys {
 public:
  explicit constexpr BenchKeys(std::uint64_t seed) : salt_(HashCombine(seed, HashName("keys"))) {}
  // A bijection, so that keys are distinct.
  constexpr Key At(std::uint64_t number) const { return MixKey(number ^ salt_); }
  constexpr std::uint64_t NumberOf(Key key) const { return UnmixKey(key) ^ salt_; }

 private:
  std::uint64_t salt_;
};

}  // namespace terrace
