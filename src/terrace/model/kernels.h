// The element-wise kernels around the matrix products. Free functions on the calling thread; the
// order of every sum is fixed by the shapes. Strides count floats.
#pragma once

#include <cstddef>
#include <cstdint>

namespace terrace {

// y[e][j] += bias[j]
void AddBias(std::size_t examples, std::size_t width, const float* bias, float* y,
             std::size_t stride);
// y[e][j] = max(y[e][j] + bias[j], 0); NaN stays NaN.
void AddBiasRelu(std::size_t examples, std::size_t width, const float* bias, float* y,
                 std::size_t stride);
// y = max(x, 0), NaN stays NaN; x == y is allowed.
void Relu(std::size_t examples, std::size_t width, const float* x, std::size_t x_stride, float* y,
          std::size_t y_stride);
// dx = y > 0 ? dy : 0 (added to dx with `add`); a NaN in y passes dy. dx == dy is allowed.
void ReluBackward(std::size_t examples, std::size_t width, const float* y, std::size_t y_stride,
                  const float* dy, std::size_t dy_stride, bool add, float* dx,
                  std::size_t dx_stride);
// sums[j] = sum over e of y[e][j] (added to sums with `add`).
void ColumnSums(std::size_t examples, std::size_t width, const float* y, std::size_t stride,
                bool add, float* sums);
// y += x, or y = x without `add`.
void AddLines(std::size_t examples, std::size_t width, const float* x, std::size_t x_stride,
              bool add, float* y, std::size_t y_stride);

// A linear layer of one output: y[e * y_stride] = x[e] . w + bias.
void DotLines(std::size_t examples, std::size_t width, const float* x, std::size_t x_stride,
              const float* w, float bias, float* y, std::size_t y_stride);
// dw = sum over e of dy[e] * x[e] (added with `add`).
void WeightedColumnSums(std::size_t examples, std::size_t width, const float* x,
                        std::size_t x_stride, const float* dy, std::size_t dy_stride, bool add,
                        float* dw);
// dx[e] = dy[e] * w (added with `add`).
void OuterProduct(std::size_t examples, std::size_t width, const float* dy, std::size_t dy_stride,
                  const float* w, bool add, float* dx, std::size_t dx_stride);

// One float of each example.
struct ConstColumn {
  const float* data;
  std::size_t stride;
  float operator[](std::size_t example) const { return data[example * stride]; }
};
struct Column {
  float* data;
  std::size_t stride;
  float& operator[](std::size_t example) const { return data[example * stride]; }
};

// loss = weight * log loss of the logit, probability = the logistic function of the logit. Stable
// for any finite logit; a NaN stays one.
void LogLossForward(std::size_t examples, ConstColumn logit, ConstColumn label, ConstColumn weight,
                    Column loss, Column probability);
// d_logit = d_loss * weight * (probability - label) (added with `add`).
void LogLossBackward(std::size_t examples, ConstColumn probability, ConstColumn label,
                     ConstColumn weight, ConstColumn d_loss, bool add, Column d_logit);

}  // namespace terrace
