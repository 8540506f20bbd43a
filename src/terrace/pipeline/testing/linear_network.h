// LinearNetwork: a network free of torch for the tests of pipeline and trainer: logistic regression
// over the input block and the wide input, with plain SGD on its weights.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/model/network.h"

namespace terrace {

class LinearNetwork final : public Network {
 public:
  explicit LinearNetwork(const NetworkInputSpec& inputs)
      : inputs_(inputs), weights_(inputs.width()) {
    for (std::size_t i = 0; i < weights_.size(); ++i) weights_[i] = i % 2 == 0 ? 0.5f : -0.25f;
    info_.push_back(
        {"linear.weight", {static_cast<std::int64_t>(weights_.size())}, 0, weights_.size()});
    gradient_.resize(weights_.size());
  }

  class Context final : public NetworkContext {
   public:
    Context(const NetworkInputSpec& inputs, std::uint32_t max_examples)
        : width(inputs.width()),
          block(std::size_t{max_examples} * inputs.width()),
          wide(inputs.wide ? max_examples : 0),
          label(max_examples),
          weight(max_examples),
          logits(max_examples),
          probabilities(max_examples),
          block_grad(block.size()),
          wide_grad(max_examples),
          gradient(inputs.width()) {}
    NetworkInput input() override {
      return {block.data(), width, wide.empty() ? nullptr : wide.data(), label.data(),
              weight.data()};
    }
    const float* probability() const override { return probabilities.data(); }
    const float* logit() const override { return logits.data(); }
    const float* block_gradient() const override { return block_grad.data(); }
    std::size_t block_gradient_stride() const override { return width; }
    const float* wide_gradient() const override {
      return wide.empty() ? nullptr : wide_grad.data();
    }

    const std::size_t width;
    std::vector<float> block, wide, label, weight, logits, probabilities, block_grad, wide_grad,
        gradient;
  };

  const NetworkInputSpec& input_spec() const override { return inputs_; }
  std::uint32_t NextBlock(std::uint32_t left) const override { return left < 5 ? left : 3; }
  Result<std::unique_ptr<NetworkContext>> NewContext(std::uint32_t max_examples) override {
    return std::unique_ptr<NetworkContext>(std::make_unique<Context>(inputs_, max_examples));
  }
  Result<double> Forward(NetworkContext* context, std::uint32_t examples) override {
    auto* c = static_cast<Context*>(context);
    double loss = 0;
    for (std::uint32_t e = 0; e < examples; ++e) {
      float z = c->wide.empty() ? 0.0f : c->wide[e];
      for (std::size_t i = 0; i < c->width; ++i) z += weights_[i] * c->block[e * c->width + i];
      c->logits[e] = z;
      c->probabilities[e] = 1.0f / (1.0f + std::exp(-z));
      loss += c->weight[e] *
              (std::log1p(std::exp(-std::fabs(z))) + std::max(z, 0.0f) - z * c->label[e]);
    }
    return loss;
  }
  Status Backward(NetworkContext* context, std::uint32_t examples, float loss_scale,
                  bool add) override {
    auto* c = static_cast<Context*>(context);
    if (!add) std::fill(c->gradient.begin(), c->gradient.end(), 0.0f);
    for (std::uint32_t e = 0; e < examples; ++e) {
      const float delta = (c->probabilities[e] - c->label[e]) * c->weight[e] * loss_scale;
      c->wide_grad[e] = delta;
      for (std::size_t i = 0; i < c->width; ++i) {
        c->block_grad[e * c->width + i] = delta * weights_[i];
        c->gradient[i] += delta * c->block[e * c->width + i];
      }
    }
    return OkStatus();
  }
  void ReduceGradients(std::span<NetworkContext* const> contexts, int part, int parts) override {
    const auto [first, last] = Range(part, parts);
    for (std::size_t i = first; i < last; ++i) {
      gradient_[i] = 0;
      for (NetworkContext* context : contexts)
        gradient_[i] += static_cast<Context*>(context)->gradient[i];
    }
  }
  double GradientSquareSum() override {
    double sum = 0;
    for (float g : gradient_) sum += static_cast<double>(g) * g;
    return sum;
  }
  void ApplyGradients(const DenseStep& step, int part, int parts) override {
    const auto [first, last] = Range(part, parts);
    for (std::size_t i = first; i < last; ++i) weights_[i] -= step.learning_rate * gradient_[i];
  }
  void Advance() override { ++steps_; }
  std::span<const ParameterInfo> parameters() const override { return info_; }
  std::size_t parameter_floats() const override { return weights_.size(); }
  DenseState Save() const override { return {{"value"}, {weights_}, steps_}; }
  Status Load(const DenseState& state) override {
    if (state.buffers.size() != 1 || state.buffers[0].size() != weights_.size()) {
      return InvalidArgumentError("another network");
    }
    weights_ = state.buffers[0];
    steps_ = state.steps;
    return OkStatus();
  }
  std::uint64_t ContextBytes(std::uint32_t max_examples) const override {
    return std::uint64_t{max_examples} * (2 * inputs_.width() + 6) * sizeof(float);
  }
  std::uint64_t ParameterBytes() const override { return 2 * weights_.size() * sizeof(float); }
  std::string ToText() const override { return "linear"; }

 private:
  std::pair<std::size_t, std::size_t> Range(int part, int parts) const {
    const std::size_t n = weights_.size();
    return {n * static_cast<std::size_t>(part) / static_cast<std::size_t>(parts),
            n * static_cast<std::size_t>(part + 1) / static_cast<std::size_t>(parts)};
  }
  const NetworkInputSpec inputs_;
  std::vector<float> weights_;
  std::vector<float> gradient_;
  std::vector<ParameterInfo> info_;
  std::uint64_t steps_ = 0;
};

}  // namespace terrace
