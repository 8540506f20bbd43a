#include "terrace/table/initializer.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "terrace/base/rng.h"

namespace terrace {
namespace {

// Natural logarithm of a normal number, by the polynomial of Cephes' logf (Moshier).
inline float Log(float a) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(a);
  std::int32_t exponent = static_cast<std::int32_t>(bits >> 23) - 126;
  float m = std::bit_cast<float>((bits & 0x007fffffu) | 0x3f000000u);
  const bool low = m < 0.707106781186547524f;
  exponent -= low ? 1 : 0;
  m = (low ? m + m : m) - 1.0f;
  const float z = m * m;
  float y = 7.0376836292E-2f;
  y = y * m - 1.1514610310E-1f;
  y = y * m + 1.1676998740E-1f;
  y = y * m - 1.2420140846E-1f;
  y = y * m + 1.4249322787E-1f;
  y = y * m - 1.6668057665E-1f;
  y = y * m + 2.0000714765E-1f;
  y = y * m - 2.4999993993E-1f;
  y = y * m + 3.3333331174E-1f;
  y = y * m * z;
  const float e = static_cast<float>(exponent);
  y = y + e * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (m + y) + e * 0.693359375f;
}

// Inverse of the error function, single precision (Giles, "Approximating the erfinv function").
// Both branches are computed, so that the loop around it vectorises.
inline float InverseErf(float x) {
  const float magnitude = std::fabs(x);
  const float w = -Log((1.0f - magnitude) * (1.0f + magnitude));
  const float c = w - 2.5f;
  float p = 2.81022636e-08f;
  p = 3.43273939e-07f + p * c;
  p = -3.5233877e-06f + p * c;
  p = -4.39150654e-06f + p * c;
  p = 0.00021858087f + p * c;
  p = -0.00125372503f + p * c;
  p = -0.00417768164f + p * c;
  p = 0.246640727f + p * c;
  p = 1.50140941f + p * c;
  const float t = std::sqrt(std::max(w, 0.0f)) - 3.0f;
  float q = -0.000200214257f;
  q = 0.000100950558f + q * t;
  q = 0.00134934322f + q * t;
  q = -0.00367342844f + q * t;
  q = 0.00573950773f + q * t;
  q = -0.0076224613f + q * t;
  q = 0.00943887047f + q * t;
  q = 1.00167406f + q * t;
  q = 2.83297682f + q * t;
  return (w < 5.0f ? p : q) * x;
}

inline float Normal(std::uint32_t k) {
  // An odd number of at most 24 bits: exact.
  const float x = static_cast<float>(static_cast<std::int32_t>(2 * k + 1) - (1 << 24)) * 0x1p-24f;
  return 1.41421356237309505f * InverseErf(x);
}

template <typename Map>
void Fill(std::uint64_t state, std::uint32_t dim, float* weight, Map map) {
  std::uint64_t counter = state;
  std::uint32_t i = 0;
  for (; i + 1 < dim; i += 2, counter += 0x9e3779b97f4a7c15ULL) {
    const std::uint64_t bits = MixKey(counter);
    weight[i] = map(static_cast<std::uint32_t>(bits >> 40));
    weight[i + 1] = map(static_cast<std::uint32_t>(bits) >> 8);
  }
  if (i < dim) weight[i] = map(static_cast<std::uint32_t>(MixKey(counter) >> 40));
}

}  // namespace

float NormalFromBits(std::uint32_t k) { return Normal(k); }

void FillInitialWeights(const InitializerSpec& spec, std::uint64_t state, std::uint32_t dim,
                        float* weight) {
  const float scale = spec.scale;
  switch (spec.type) {
    case InitializerSpec::Type::kZeros:
      std::fill_n(weight, dim, 0.0f);
      return;
    case InitializerSpec::Type::kConstant:
      std::fill_n(weight, dim, scale);
      return;
    case InitializerSpec::Type::kUniform:
      Fill(state, dim, weight, [scale](std::uint32_t k) {
        return scale * (static_cast<float>(static_cast<std::int32_t>(k) - (1 << 23)) * 0x1p-23f);
      });
      return;
    case InitializerSpec::Type::kNormal:
      Fill(state, dim, weight, [scale](std::uint32_t k) { return scale * Normal(k); });
      return;
  }
}

}  // namespace terrace
