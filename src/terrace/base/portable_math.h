// Functions from additions, multiplications and one division, so that the same input gives the same
// bits on every processor and C library, and loops over them vectorise. Of logarithms,
// exponentials, cosines and powers, what the reader feeds, the generator draws and a model learns
// depends on these alone, but for what initial rows are drawn with (table/initializer.cc). Threads:
// pure functions.
#pragma once

#include <bit>
#include <cstdint>

namespace terrace {

// ln(x) to about 2e-16 relative to max(1, |ln x|). REQUIRES: x is positive, finite and normal.
inline double PortableLog(double x) {
  // x = 2^e m with m in [sqrt(1/2), sqrt(2)); the subtraction of sqrt(1/2)'s bits moves the border.
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  const std::uint64_t shifted = bits - 0x3fe6a09e667f3bcdULL;
  const std::int64_t exponent = static_cast<std::int64_t>(shifted) >> 52;
  const double m = std::bit_cast<double>(bits - (static_cast<std::uint64_t>(exponent) << 52));
  // ln m = 2 atanh(f), f = (m - 1) / (m + 1), |f| < 0.1716.
  const double f = (m - 1.0) / (m + 1.0);
  const double s = f * f;
  double p = 1.0 / 21;
  p = p * s + 1.0 / 19;
  p = p * s + 1.0 / 17;
  p = p * s + 1.0 / 15;
  p = p * s + 1.0 / 13;
  p = p * s + 1.0 / 11;
  p = p * s + 1.0 / 9;
  p = p * s + 1.0 / 7;
  p = p * s + 1.0 / 5;
  p = p * s + 1.0 / 3;
  const double series = 2.0 * f + 2.0 * f * (s * p);
  return static_cast<double>(exponent) * 0x1.62e42fefa39efp-1 + series;
}

// e^x to about 1e-15 relative; x is clamped to [-700, 700], and NaN stays NaN.
inline double PortableExp(double x) {
  x = x < -700.0 ? -700.0 : x;
  x = x > 700.0 ? 700.0 : x;
  // Adding 1.5 * 2^52 rounds to the nearest integer and leaves it in the low bits.
  constexpr double kRound = 0x1.8p52;
  const double rounded = x * 0x1.71547652b82fep0 + kRound;
  const double k = rounded - kRound;
  const double r = (x - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const std::uint64_t scale = (std::bit_cast<std::uint64_t>(rounded) + 1023) << 52;
  return p * std::bit_cast<double>(scale);
}

// cos(pi x) to about 2e-16. REQUIRES: x in [0, 1].
inline double PortableCosPi(double x) {
  // The sine of what is left to pi / 2, by its series.
  const double y = 3.14159265358979323846 * (0.5 - x);
  const double s = y * y;
  double p = 1.0 / 51090942171709440000.0;
  p = p * s - 1.0 / 121645100408832000.0;
  p = p * s + 1.0 / 355687428096000.0;
  p = p * s - 1.0 / 1307674368000.0;
  p = p * s + 1.0 / 6227020800.0;
  p = p * s - 1.0 / 39916800.0;
  p = p * s + 1.0 / 362880.0;
  p = p * s - 1.0 / 5040.0;
  p = p * s + 1.0 / 120.0;
  p = p * s - 1.0 / 6.0;
  return y + y * (s * p);
}

// beta^steps by squaring.
inline double IntegerPower(double beta, std::uint64_t steps) {
  double power = 1.0;
  while (steps != 0) {
    if (steps & 1) power *= beta;
    beta *= beta;
    steps >>= 1;
  }
  return power;
}

inline double PortableSigmoid(double x) { return 1.0 / (1.0 + PortableExp(-x)); }

}  // namespace terrace
