// Whether the calling thread takes denormals for zero, and how it comes not to. Threads: free
// functions, each on the calling one.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

namespace terrace {

// As a process begins.
inline void KeepDenormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() & ~0x8040u);
#elif defined(__aarch64__)
  std::uint64_t fpcr;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  asm volatile("msr fpcr, %0" ::"r"(fpcr & ~(std::uint64_t{1} << 24)));
#endif
}

// Of a result and of an operand that no normal number can hold, how many are zero: 0 or 2, unless
// only a part of the settings is there.
inline int FlushedDenormals() {
  volatile float small = 1e-30f, smaller = 1e-10f;
  volatile float denormal = 1e-40f, large = 1e30f;
  volatile float result = small * smaller;
  volatile float from_denormal = denormal * large;
  return (result == 0.0f ? 1 : 0) + (from_denormal == 0.0f ? 1 : 0);
}

}  // namespace terrace
