#include "terrace/model/kernels.h"

#include <cmath>
#include <cstring>

#include "terrace/base/portable_math.h"

// The iterations of the next loop do not depend on each other, whatever its pointers might alias.
#if defined(__clang__)
#define TERRACE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TERRACE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace terrace {
namespace {

constexpr std::size_t kLanes = 16;
// One register of 16 floats where the processor has it, several smaller ones elsewhere: the lanes,
// and so the order of sums, are the same.
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

Lanes Load(const float* p) {
  Lanes lanes;
  std::memcpy(&lanes, p, sizeof lanes);
  return lanes;
}

float SumLanes(const Lanes& lanes) {
  float sums[kLanes];
  std::memcpy(sums, &lanes, sizeof lanes);
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

}  // namespace

void AddBias(std::size_t examples, std::size_t width, const float* bias, float* y,
             std::size_t stride) {
  for (std::size_t e = 0; e < examples; ++e) {
    float* __restrict line = y + e * stride;
    for (std::size_t j = 0; j < width; ++j) line[j] += bias[j];
  }
}

void AddBiasRelu(std::size_t examples, std::size_t width, const float* bias, float* y,
                 std::size_t stride) {
  for (std::size_t e = 0; e < examples; ++e) {
    float* __restrict line = y + e * stride;
    for (std::size_t j = 0; j < width; ++j) {
      const float sum = line[j] + bias[j];
      line[j] = sum < 0.0f ? 0.0f : sum;
    }
  }
}

void Relu(std::size_t examples, std::size_t width, const float* x, std::size_t x_stride, float* y,
          std::size_t y_stride) {
  for (std::size_t e = 0; e < examples; ++e) {
    const float* from = x + e * x_stride;
    float* to = y + e * y_stride;
    TERRACE_INDEPENDENT
    for (std::size_t j = 0; j < width; ++j) to[j] = from[j] < 0.0f ? 0.0f : from[j];
  }
}

void ReluBackward(std::size_t examples, std::size_t width, const float* y, std::size_t y_stride,
                  const float* dy, std::size_t dy_stride, bool add, float* dx,
                  std::size_t dx_stride) {
  for (std::size_t e = 0; e < examples; ++e) {
    const float* out = y + e * y_stride;
    const float* from = dy + e * dy_stride;
    float* to = dx + e * dx_stride;
    if (add) {
      TERRACE_INDEPENDENT
      for (std::size_t j = 0; j < width; ++j) to[j] += out[j] <= 0.0f ? 0.0f : from[j];
    } else {
      TERRACE_INDEPENDENT
      for (std::size_t j = 0; j < width; ++j) to[j] = out[j] <= 0.0f ? 0.0f : from[j];
    }
  }
}

void ColumnSums(std::size_t examples, std::size_t width, const float* y, std::size_t stride,
                bool add, float* sums) {
  if (!add) std::memset(sums, 0, width * sizeof(float));
  std::size_t e = 0;
  // Four lines at a time spare three quarters of the loads and stores of the sums.
  for (; e + 4 <= examples; e += 4) {
    const float* line = y + e * stride;
    TERRACE_INDEPENDENT
    for (std::size_t j = 0; j < width; ++j) {
      sums[j] += (line[j] + line[stride + j]) + (line[2 * stride + j] + line[3 * stride + j]);
    }
  }
  for (; e < examples; ++e) {
    const float* line = y + e * stride;
    TERRACE_INDEPENDENT
    for (std::size_t j = 0; j < width; ++j) sums[j] += line[j];
  }
}

void AddLines(std::size_t examples, std::size_t width, const float* x, std::size_t x_stride,
              bool add, float* y, std::size_t y_stride) {
  for (std::size_t e = 0; e < examples; ++e) {
    const float* from = x + e * x_stride;
    float* __restrict to = y + e * y_stride;
    if (add) {
      for (std::size_t j = 0; j < width; ++j) to[j] += from[j];
    } else {
      std::memcpy(to, from, width * sizeof(float));
    }
  }
}

void DotLines(std::size_t examples, std::size_t width, const float* x, std::size_t x_stride,
              const float* w, float bias, float* y, std::size_t y_stride) {
  for (std::size_t e = 0; e < examples; ++e) {
    const float* line = x + e * x_stride;
    Lanes sums = {};
    std::size_t j = 0;
    for (; j + kLanes <= width; j += kLanes) sums += Load(line + j) * Load(w + j);
    float sum = SumLanes(sums);
    for (; j < width; ++j) sum += line[j] * w[j];
    y[e * y_stride] = sum + bias;
  }
}

void WeightedColumnSums(std::size_t examples, std::size_t width, const float* x,
                        std::size_t x_stride, const float* dy, std::size_t dy_stride, bool add,
                        float* dw) {
  if (!add) std::memset(dw, 0, width * sizeof(float));
  for (std::size_t e = 0; e < examples; ++e) {
    const float* line = x + e * x_stride;
    const float factor = dy[e * dy_stride];
    float* __restrict to = dw;
    for (std::size_t j = 0; j < width; ++j) to[j] += factor * line[j];
  }
}

void OuterProduct(std::size_t examples, std::size_t width, const float* dy, std::size_t dy_stride,
                  const float* w, bool add, float* dx, std::size_t dx_stride) {
  for (std::size_t e = 0; e < examples; ++e) {
    const float factor = dy[e * dy_stride];
    float* __restrict to = dx + e * dx_stride;
    if (add) {
      for (std::size_t j = 0; j < width; ++j) to[j] += factor * w[j];
    } else {
      for (std::size_t j = 0; j < width; ++j) to[j] = factor * w[j];
    }
  }
}

void LogLossForward(std::size_t examples, ConstColumn logit, ConstColumn label, ConstColumn weight,
                    Column loss, Column probability) {
  for (std::size_t e = 0; e < examples; ++e) {
    const float x = logit[e];
    // The exponent is never positive, so nothing overflows.
    const auto t = static_cast<float>(PortableExp(-std::fabs(static_cast<double>(x))));
    probability[e] = (x >= 0.0f ? 1.0f : t) / (1.0f + t);
    const float positive = x < 0.0f ? 0.0f : x;
    loss[e] = weight[e] * (positive - x * label[e] + std::log1p(t));
  }
}

void LogLossBackward(std::size_t examples, ConstColumn probability, ConstColumn label,
                     ConstColumn weight, ConstColumn d_loss, bool add, Column d_logit) {
  for (std::size_t e = 0; e < examples; ++e) {
    const float gradient = d_loss[e] * weight[e] * (probability[e] - label[e]);
    d_logit[e] = add ? d_logit[e] + gradient : gradient;
  }
}

}  // namespace terrace
