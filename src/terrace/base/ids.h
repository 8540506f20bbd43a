// Key and the one mixed hash of a key, of which shard, device, node and table position use
// independent bits.
#pragma once

#include <compare>
#include <cstdint>

namespace terrace {

// 64-bit feature id. Any value is legal.
using Key = std::uint64_t;

// A bijection of 64 bits (the finalizer of splitmix64, Steele et al. 2014): distinct keys keep
// distinct hashes.
constexpr std::uint64_t MixKey(Key key) {
  std::uint64_t x = key + 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

namespace internal {
// Inverse of x ^ (x >> shift).
constexpr std::uint64_t UnshiftRight(std::uint64_t x, int shift) {
  std::uint64_t result = x;
  for (int done = shift; done < 64; done += shift) result = x ^ (result >> shift);
  return result;
}
}  // namespace internal

// The inverse of MixKey.
constexpr Key UnmixKey(std::uint64_t hash) {
  std::uint64_t x = internal::UnshiftRight(hash, 31) * 0x319642b2d24d8ec3ULL;
  x = internal::UnshiftRight(x, 27) * 0x96de1b173f119089ULL;
  return internal::UnshiftRight(x, 30) - 0x9e3779b97f4a7c15ULL;
}

// Bits of the mixed hash, from the top: 63..40 place in indexes and hash maps, 39..24 shard of the
// store, 23..12 device, 11..0 node and group.
constexpr std::uint32_t ShardOfHash(std::uint64_t hash, std::uint32_t shards) {
  return static_cast<std::uint32_t>((((hash >> 24) & 0xffff) * shards) >> 16);
}

}  // namespace terrace
