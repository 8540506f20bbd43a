#include "terrace/model/dense_optimizer.h"

#include <cmath>

#include <fmt/format.h>

#include "terrace/base/portable_math.h"

namespace terrace {

Result<DenseOptimizer> DenseOptimizer::Create(const DenseOptimizerSpec& spec) {
  const auto fail = [](std::string_view setting, double value, std::string_view wanted) {
    return InvalidArgumentError(
        fmt::format("network.optimizer.{} is {}, must be {}", setting, value, wanted));
  };
  DenseOptimizer optimizer;
  optimizer.spec_ = spec;
  if (spec.type == "sgd") {
    optimizer.type_ = Type::kSgd;
    optimizer.moments_ = spec.momentum != 0 ? 1 : 0;
  } else if (spec.type == "adagrad") {
    optimizer.type_ = Type::kAdaGrad;
    optimizer.moments_ = 1;
  } else if (spec.type == "adam") {
    optimizer.type_ = Type::kAdam;
    optimizer.moments_ = 2;
  } else {
    return InvalidArgumentError(
        fmt::format("network.optimizer.type is \"{}\", must be sgd, adagrad or adam", spec.type));
  }
  if (!(spec.epsilon > 0 && std::isfinite(spec.epsilon)) && spec.type != "sgd") {
    return fail("epsilon", spec.epsilon, "above 0");
  }
  if (!(spec.beta1 >= 0 && spec.beta1 < 1)) return fail("beta1", spec.beta1, "in [0, 1)");
  if (!(spec.beta2 >= 0 && spec.beta2 < 1)) return fail("beta2", spec.beta2, "in [0, 1)");
  if (!(spec.initial_accumulator >= 0 && std::isfinite(spec.initial_accumulator))) {
    return fail("initial_accumulator", spec.initial_accumulator, "0 or more");
  }
  if (!(spec.momentum >= 0 && spec.momentum < 1)) {
    return fail("momentum", spec.momentum, "in [0, 1)");
  }
  if (!(spec.l2 >= 0 && std::isfinite(spec.l2))) return fail("l2", spec.l2, "0 or more");
  if (!(spec.clip_norm >= 0 && std::isfinite(spec.clip_norm))) {
    return fail("clip_norm", spec.clip_norm, "0 (none) or more");
  }
  return optimizer;
}

float DenseOptimizer::ClipScale(double gradient_square_sum) const {
  if (spec_.clip_norm <= 0) return 1.0f;
  const double scale = spec_.clip_norm / (std::sqrt(gradient_square_sum) + 1e-6);
  return scale < 1 ? static_cast<float>(scale) : 1.0f;
}

void DenseOptimizer::PrepareGradient(std::size_t count, float clip_scale, const float* value,
                                     float* gradient) const {
  const float l2 = spec_.l2;
  float* __restrict g = gradient;
  if (clip_scale != 1.0f) {
    for (std::size_t i = 0; i < count; ++i) g[i] *= clip_scale;
  }
  if (l2 != 0.0f) {
    for (std::size_t i = 0; i < count; ++i) g[i] += l2 * value[i];
  }
}

void DenseOptimizer::AccumulateMoments(std::size_t count, const float* gradient, float* moment1,
                                       float* moment2) const {
  const float* g = gradient;
  float* __restrict m = moment1;
  float* __restrict v = moment2;
  switch (type_) {
    case Type::kSgd: {
      if (moments_ == 0) return;
      const float momentum = spec_.momentum;
      for (std::size_t i = 0; i < count; ++i) m[i] = momentum * m[i] + g[i];
      return;
    }
    case Type::kAdaGrad:
      for (std::size_t i = 0; i < count; ++i) m[i] += g[i] * g[i];
      return;
    case Type::kAdam: {
      const float rest1 = 1.0f - spec_.beta1;
      const float beta2 = spec_.beta2;
      const float rest2 = 1.0f - spec_.beta2;
      for (std::size_t i = 0; i < count; ++i) {
        m[i] += (g[i] - m[i]) * rest1;
        v[i] = beta2 * v[i] + rest2 * g[i] * g[i];
      }
      return;
    }
  }
}

void DenseOptimizer::Apply(std::size_t count, float learning_rate, std::uint64_t step,
                           const float* gradient, const float* moment1, const float* moment2,
                           float* value) const {
  const float* g = gradient;
  const float* m = moment1;
  const float* v = moment2;
  float* __restrict w = value;
  const float epsilon = spec_.epsilon;
  switch (type_) {
    case Type::kSgd: {
      const float* direction = moments_ == 0 ? g : m;
      for (std::size_t i = 0; i < count; ++i) w[i] -= learning_rate * direction[i];
      return;
    }
    case Type::kAdaGrad:
      for (std::size_t i = 0; i < count; ++i) {
        w[i] -= learning_rate * g[i] / (std::sqrt(m[i]) + epsilon);
      }
      return;
    case Type::kAdam: {
      const double correction1 = 1.0 - IntegerPower(static_cast<double>(spec_.beta1), step);
      const double correction2 = 1.0 - IntegerPower(static_cast<double>(spec_.beta2), step);
      const auto size = static_cast<float>(learning_rate / correction1);
      const auto root = static_cast<float>(std::sqrt(correction2));
      for (std::size_t i = 0; i < count; ++i) {
        w[i] -= size * (m[i] / (std::sqrt(v[i]) / root + epsilon));
      }
      return;
    }
  }
}

}  // namespace terrace
