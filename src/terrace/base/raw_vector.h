// RawVector: a std::vector whose resize() leaves new elements as they are in memory, for arrays of
// plain numbers that are written right after. Threads: as std::vector.
#pragma once

#include <memory>
#include <type_traits>
#include <vector>

namespace terrace {

template <typename T>
struct RawAllocator : std::allocator<T> {
  static_assert(std::is_trivially_default_constructible_v<T>);
  template <typename U>
  struct rebind {
    using other = RawAllocator<U>;
  };
  RawAllocator() = default;
  template <typename U>
  RawAllocator(const RawAllocator<U>& /*other*/) {}  // NOLINT: allocators convert by design.

  // A new element without a value. With one it is constructed as ever.
  template <typename U>
  void construct(U* /*at*/) noexcept {}
};

template <typename T>
using RawVector = std::vector<T, RawAllocator<T>>;

}  // namespace terrace
