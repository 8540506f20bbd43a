// Counter-based random numbers: pure functions of (seed, stream, counter), so that no result
// depends on an order.
#pragma once

#include <cstdint>
#include <string_view>

#include "terrace/base/ids.h"

namespace terrace {

constexpr std::uint64_t HashCombine(std::uint64_t a, std::uint64_t b) {
  return MixKey(a ^ MixKey(b));
}

// FNV-1a 64 of a name, for the stream of a named table or parameter.
constexpr std::uint64_t HashName(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

// [0, 1) with 24 bits, exact in float.
constexpr float UnitFloat(std::uint64_t bits) { return static_cast<float>(bits >> 40) * 0x1p-24f; }
// [0, 1) with 53 bits.
constexpr double UnitDouble(std::uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

__extension__ typedef unsigned __int128 Uint128;

// Which of `parts` equal ranges of all hashes one lies in, in the order of hashes; and the least
// hash of a range. REQUIRES: parts > 0.
constexpr std::uint64_t RangeOfHash(std::uint64_t hash, std::uint64_t parts) {
  return static_cast<std::uint64_t>((static_cast<Uint128>(hash) * parts) >> 64);
}
constexpr std::uint64_t FirstHashOf(std::uint64_t range, std::uint64_t parts) {
  const Uint128 scaled = (static_cast<Uint128>(range) << 64) + parts - 1;
  return static_cast<std::uint64_t>(scaled / parts);
}

// A sequence of splitmix64; for tests, generators and shuffles.
class Rng {
 public:
  explicit constexpr Rng(std::uint64_t seed) : state_(MixKey(seed)) {}
  constexpr std::uint64_t Next() { return MixKey(state_ += 0x9e3779b97f4a7c15ULL); }
  constexpr double Unit() { return UnitDouble(Next()); }
  // [0, bound), by multiplication; the bias is below bound / 2^64. REQUIRES: bound > 0.
  constexpr std::uint64_t Below(std::uint64_t bound) { return RangeOfHash(Next(), bound); }

 private:
  std::uint64_t state_;
};

}  // namespace terrace
