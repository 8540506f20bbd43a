// Asks for the cache lines of a byte range ahead of use. Always inlined, and so must be any
// function that does nothing else: GCC takes a call of one for an expression without effect and
// drops it. Threads: free functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace terrace {

inline constexpr std::size_t kCacheLineBytes = 64;
// Of a row that lies anywhere in memory; beyond so many bytes the processor sees its pattern
// itself.
inline constexpr std::size_t kMostPrefetchBytes = 512;

// For reading, into all levels.
[[gnu::always_inline]] inline void PrefetchRead(const void* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data) & ~(kCacheLineBytes - 1);
  const auto end = reinterpret_cast<std::uintptr_t>(data) + bytes;
  for (auto line = begin; line < end; line += kCacheLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 3);
  }
}

// For writing: takes the lines exclusively.
[[gnu::always_inline]] inline void PrefetchWrite(const void* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data) & ~(kCacheLineBytes - 1);
  const auto end = reinterpret_cast<std::uintptr_t>(data) + bytes;
  for (auto line = begin; line < end; line += kCacheLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(line), 1, 3);
  }
}

}  // namespace terrace
