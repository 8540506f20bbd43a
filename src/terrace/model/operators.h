// The operators of the networks in zoo form: each does its forward and backward itself, on the
// calling thread, without allocation. Threads: constant.
#pragma once

#include <string>
#include <vector>

#include "terrace/model/operator.h"

namespace terrace {

// y = x W + b, W (in, out), He-uniform by fan-in. Parameters "<name>.weight" and "<name>.bias".
class LinearOperator : public Operator {
 public:
  LinearOperator(std::string name, std::size_t out_width);
  std::string_view type() const override { return "linear"; }
  Result<std::size_t> OutputWidth(std::span<const std::size_t> input_widths) const override;
  std::vector<ParameterSpec> Parameters(std::span<const std::size_t> input_widths) const override;
  OperatorCost Cost(std::span<const std::size_t> input_widths) const override;
  bool absorbs_relu() const override { return true; }
  bool takes_product() const override { return out_width_ > 1; }
  Status Forward(OperatorContext* context, std::span<const Matrix> inputs) const override;
  Status Backward(OperatorContext* context, const Matrix& output_gradient) const override;

 private:
  const std::size_t out_width_;
};

// max(x, 0); NaN stays NaN.
class ReluOperator : public Operator {
 public:
  explicit ReluOperator(std::string name) : Operator(std::move(name)) {}
  std::string_view type() const override { return "relu"; }
  Result<std::size_t> OutputWidth(std::span<const std::size_t> input_widths) const override;
  OperatorCost Cost(std::span<const std::size_t> input_widths) const override;
  bool in_place() const override { return true; }
  bool is_relu() const override { return true; }
  Status Forward(OperatorContext* context, std::span<const Matrix> inputs) const override;
  Status Backward(OperatorContext* context, const Matrix& output_gradient) const override;
};

// The sum of its inputs, which have one width.
class AddOperator : public Operator {
 public:
  explicit AddOperator(std::string name) : Operator(std::move(name)) {}
  std::string_view type() const override { return "add"; }
  Result<std::size_t> OutputWidth(std::span<const std::size_t> input_widths) const override;
  OperatorCost Cost(std::span<const std::size_t> input_widths) const override;
  Status Forward(OperatorContext* context, std::span<const Matrix> inputs) const override;
  Status Backward(OperatorContext* context, const Matrix& output_gradient) const override;
};

// Inputs logit, label, weight, one column each; output weight * log loss by example, natural
// logarithm. Saves the probability.
class LogLossOperator : public Operator {
 public:
  explicit LogLossOperator(std::string name) : Operator(std::move(name)) {}
  std::string_view type() const override { return "log_loss"; }
  Result<std::size_t> OutputWidth(std::span<const std::size_t> input_widths) const override;
  std::size_t SavedWidth(std::span<const std::size_t> input_widths) const override;
  OperatorCost Cost(std::span<const std::size_t> input_widths) const override;
  Status Forward(OperatorContext* context, std::span<const Matrix> inputs) const override;
  Status Backward(OperatorContext* context, const Matrix& output_gradient) const override;
};

}  // namespace terrace
