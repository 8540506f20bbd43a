// Lanes: as many floats as a register of the instruction set holds, for kernels that keep tiles of
// products in registers. Private to model.
#pragma once

#include <cstddef>
#include <cstring>

namespace terrace {

#if defined(__AVX512F__)
inline constexpr std::size_t kLanes = 16;
#elif defined(__AVX__)
inline constexpr std::size_t kLanes = 8;
#else
inline constexpr std::size_t kLanes = 4;
#endif

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

// Of any alignment.
inline Lanes Load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
inline void Store(const Lanes& lanes, float* to) { std::memcpy(to, &lanes, sizeof lanes); }

}  // namespace terrace
