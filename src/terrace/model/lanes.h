// What kernels that keep tiles of products in registers have in common. Lanes: as many floats as a
// register of the instruction set holds. Private to model.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>

#include "terrace/base/memory.h"

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

// Working memory of the calling thread, 64-byte aligned, which keeps it until it ends: the same for
// all kernels, of which a thread runs one at a time. Ends the process for lack of memory.
inline float* ThreadFloats(std::size_t floats) {
  thread_local HugeBuffer buffer;
  const std::size_t bytes = floats * sizeof(float);
  if (bytes > buffer.size()) {
    Result<HugeBuffer> larger = HugeBuffer::Allocate(bytes);
    if (!larger.ok()) EndForLackOfMemory(bytes);
    buffer = std::move(larger).value();
  }
  return reinterpret_cast<float*>(buffer.data());
}

}  // namespace terrace
