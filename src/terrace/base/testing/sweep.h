// How much of a sweep over many like cases a build takes: all in the plain one; under a sanitizer,
// where each takes five to twenty times as long, every kSweepStride-th, from another one each time.
#pragma once

#include <cstdint>

#include "terrace/base/testing/bench_flags.h"

namespace terrace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr std::uint64_t kSweepStride = 8;
#else
inline constexpr std::uint64_t kSweepStride = 1;
#endif

// The first of the cases to take, from 0 on. A failure must name its case.
inline std::uint64_t FirstOfSweep() { return BenchFlags::FreshSeed() % kSweepStride; }

// Of a random walk, whose steps build on each other: a quarter of them under a sanitizer.
constexpr int StepsOfWalk(int steps) { return kSweepStride == 1 ? steps : steps / 4; }

}  // namespace terrace
