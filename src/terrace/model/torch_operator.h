// TorchOperator: an operator written as a torch expression alone. Its backward is torch's autograd
// over that expression. For operators that are rare or small: unlike those of operators.h it
// allocates in every step. Torch-free networks do not link it, nor load torch. Threads: see
// operator.h; torch works on the calling thread alone.
#pragma once

#include <span>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "terrace/model/operator.h"

namespace terrace {

class TorchOperator : public Operator {
 public:
  using Operator::Operator;
  // Of (examples, width) inputs and parameters of their shapes: (examples, output width), float.
  // May throw what torch throws; the caller makes it a Status.
  virtual at::Tensor Compute(std::span<const at::Tensor> inputs,
                             std::span<const at::Tensor> parameters) const = 0;

  // Both: kInternal with torch's message.
  Status Forward(OperatorContext* context, std::span<const Matrix> inputs) const final;
  Status Backward(OperatorContext* context, const Matrix& output_gradient) const final;
};

// Second-order factorisation of the fields of its input, each `dim` wide: the sum over all pairs of
// their inner products (Rendle, Factorization Machines, 2010); one column.
class FactorisationOperator : public TorchOperator {
 public:
  FactorisationOperator(std::string name, std::size_t dim)
      : TorchOperator(std::move(name)), dim_(dim) {}
  std::string_view type() const override { return "factorisation"; }
  Result<std::size_t> OutputWidth(std::span<const std::size_t> input_widths) const override;
  OperatorCost Cost(std::span<const std::size_t> input_widths) const override;
  at::Tensor Compute(std::span<const at::Tensor> inputs,
                     std::span<const at::Tensor> parameters) const override;

 private:
  const std::size_t dim_;
};

}  // namespace terrace
