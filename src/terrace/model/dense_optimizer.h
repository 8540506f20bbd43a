// DenseOptimizer: SGD, AdaGrad and Adam over flat buffers. Element by element, so any split into
// ranges gives the same bits. Threads: constant; calls on disjoint ranges run at once.
//
// g is the gradient of the step (t counts from 1), w the weight. First, for all of them:
//   g := clip_scale * g + l2 * w
// sgd      moments:  m := momentum * m + g                  apply:  w := w - lr * m
//          (without momentum there is no m:                         w := w - lr * g)
// adagrad  moments:  s := s + g * g                         apply:  w := w - lr * g / (sqrt(s) +
// eps)
//          s starts at initial_accumulator.
// adam     moments:  m := m + (g - m) * (1 - beta1)         apply:  w := w - step * m / d,
//                    v := beta2 * v + (1 - beta2) * g * g   step = lr / (1 - beta1^t),
//                                                           d = sqrt(v) / sqrt(1 - beta2^t) + eps
#pragma once

#include <cstddef>
#include <cstdint>

#include "terrace/base/status.h"
#include "terrace/model/network.h"

namespace terrace {

class DenseOptimizer {
 public:
  // kInvalidArgument names the setting.
  static Result<DenseOptimizer> Create(const DenseOptimizerSpec& spec);

  int moments() const { return moments_; }  // Buffers of state, 0 to 2.
  float initial_moment() const { return type_ == Type::kAdaGrad ? spec_.initial_accumulator : 0; }
  const DenseOptimizerSpec& spec() const { return spec_; }

  // Factor that brings a gradient of this sum of squares down to clip_norm; 1 without clip_norm.
  float ClipScale(double gradient_square_sum) const;

  // The three steps for elements [0, count) of the given pointers. A moment that the optimizer does
  // not have is nullptr.
  void PrepareGradient(std::size_t count, float clip_scale, const float* value,
                       float* gradient) const;
  void AccumulateMoments(std::size_t count, const float* gradient, float* moment1,
                         float* moment2) const;
  void Apply(std::size_t count, float learning_rate, std::uint64_t step, const float* gradient,
             const float* moment1, const float* moment2, float* value) const;

 private:
  enum class Type { kSgd, kAdaGrad, kAdam };
  DenseOptimizerSpec spec_;
  Type type_ = Type::kSgd;
  int moments_ = 0;
};

}  // namespace terrace
