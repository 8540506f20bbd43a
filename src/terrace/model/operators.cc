#include "terrace/model/operators.h"

#include <utility>

#include <fmt/format.h>

#include "terrace/model/gemm.h"
#include "terrace/model/kernels.h"

namespace terrace {
namespace {

Status WrongInputs(const Operator& op, std::string_view wanted,
                   std::span<const std::size_t> widths) {
  return InvalidArgumentError(fmt::format("network: {} \"{}\" takes {}, not inputs of widths [{}]",
                                          op.type(), op.name(), wanted, fmt::join(widths, ", ")));
}

ConstColumn ReadColumn(const Matrix& matrix) { return {matrix.data, matrix.stride}; }
Column WriteColumn(const Matrix& matrix) { return {matrix.data, matrix.stride}; }

}  // namespace

LinearOperator::LinearOperator(std::string name, std::size_t out_width)
    : Operator(std::move(name)), out_width_(out_width) {}

Result<std::size_t> LinearOperator::OutputWidth(std::span<const std::size_t> input_widths) const {
  if (input_widths.size() != 1) return WrongInputs(*this, "one input", input_widths);
  if (out_width_ == 0) {
    return InvalidArgumentError(fmt::format("network: layer \"{}\" has width 0", name()));
  }
  return out_width_;
}

std::vector<ParameterSpec> LinearOperator::Parameters(
    std::span<const std::size_t> input_widths) const {
  ParameterSpec weight;
  weight.name = name() + ".weight";
  weight.shape = {static_cast<std::int64_t>(input_widths[0]),
                  static_cast<std::int64_t>(out_width_)};
  weight.initial = InitialValue::kHeUniform;
  weight.fan_in = static_cast<std::uint32_t>(input_widths[0]);
  ParameterSpec bias;
  bias.name = name() + ".bias";
  bias.shape = {static_cast<std::int64_t>(out_width_)};
  return {weight, bias};
}

OperatorCost LinearOperator::Cost(std::span<const std::size_t> input_widths) const {
  OperatorCost cost;
  const auto in = static_cast<double>(input_widths[0]), out = static_cast<double>(out_width_);
  cost.forward_flops_per_example = 2 * in * out + out;
  cost.backward_flops_per_example = 4 * in * out + out;
  cost.activation_bytes_per_example = out_width_ * sizeof(float);
  cost.parameter_bytes = (input_widths[0] + 1) * out_width_ * sizeof(float);
  return cost;
}

Status LinearOperator::Forward(OperatorContext* context, std::span<const Matrix> inputs) const {
  const Matrix& x = inputs[0];
  const Matrix& y = context->output;
  const float* weight = context->parameters[0];
  const float* bias = context->parameters[1];
  const std::size_t examples = context->examples;
  if (out_width_ == 1) {
    DotLines(examples, x.width, x.data, x.stride, weight, bias[0], y.data, y.stride);
    if (context->relu_follows) Relu(examples, 1, y.data, y.stride, y.data, y.stride);
    return OkStatus();
  }
  for (std::size_t first = 0, count = 0; first < examples; first += count) {
    count = GemmBlock(examples - first);
    if (!context->product_given) {
      Gemm(Transpose::kNo, Transpose::kNo, count, out_width_, x.width, x.line(first), x.stride,
           weight, out_width_, false, y.line(first), y.stride);
    }
    if (context->relu_follows) {
      AddBiasRelu(count, out_width_, bias, y.line(first), y.stride);
    } else {
      AddBias(count, out_width_, bias, y.line(first), y.stride);
    }
  }
  return OkStatus();
}

Status LinearOperator::Backward(OperatorContext* context, const Matrix& output_gradient) const {
  const Matrix& x = context->inputs[0];
  const Matrix& y = context->output;
  const Matrix& dy = output_gradient;
  const float* weight = context->parameters[0];
  const ParameterTarget& d_weight = context->parameter_gradients[0];
  const ParameterTarget& d_bias = context->parameter_gradients[1];
  const GradientTarget& dx = context->input_gradients[0];
  const std::size_t examples = context->examples;
  for (std::size_t first = 0, count = 0; first < examples; first += count) {
    count = GemmBlock(examples - first);
    if (context->relu_follows) {
      ReluBackward(count, out_width_, y.line(first), y.stride, dy.line(first), dy.stride, false,
                   dy.line(first), dy.stride);
    }
    ColumnSums(count, out_width_, dy.line(first), dy.stride, first > 0 || d_bias.add, d_bias.data);
    if (context->product_given) continue;
    if (out_width_ == 1) {
      WeightedColumnSums(count, x.width, x.line(first), x.stride, dy.line(first), dy.stride,
                         first > 0 || d_weight.add, d_weight.data);
      if (dx.matrix) {
        OuterProduct(count, dx.matrix.width, dy.line(first), dy.stride, weight, dx.add,
                     dx.matrix.line(first), dx.matrix.stride);
      }
      continue;
    }
    Gemm(Transpose::kYes, Transpose::kNo, x.width, out_width_, count, x.line(first), x.stride,
         dy.line(first), dy.stride, first > 0 || d_weight.add, d_weight.data, out_width_);
    if (dx.matrix) {
      Gemm(Transpose::kNo, Transpose::kYes, count, dx.matrix.width, out_width_, dy.line(first),
           dy.stride, weight, out_width_, dx.add, dx.matrix.line(first), dx.matrix.stride);
    }
  }
  return OkStatus();
}

Result<std::size_t> ReluOperator::OutputWidth(std::span<const std::size_t> input_widths) const {
  if (input_widths.size() != 1) return WrongInputs(*this, "one input", input_widths);
  return input_widths[0];
}

OperatorCost ReluOperator::Cost(std::span<const std::size_t> input_widths) const {
  OperatorCost cost;
  cost.forward_flops_per_example = static_cast<double>(input_widths[0]);
  cost.backward_flops_per_example = static_cast<double>(input_widths[0]);
  return cost;
}

Status ReluOperator::Forward(OperatorContext* context, std::span<const Matrix> inputs) const {
  const Matrix& x = inputs[0];
  const Matrix& y = context->output;
  Relu(context->examples, x.width, x.data, x.stride, y.data, y.stride);
  return OkStatus();
}

Status ReluOperator::Backward(OperatorContext* context, const Matrix& output_gradient) const {
  const GradientTarget& dx = context->input_gradients[0];
  if (!dx.matrix) return OkStatus();
  const Matrix& y = context->output;
  ReluBackward(context->examples, dx.matrix.width, y.data, y.stride, output_gradient.data,
               output_gradient.stride, dx.add, dx.matrix.data, dx.matrix.stride);
  return OkStatus();
}

Result<std::size_t> AddOperator::OutputWidth(std::span<const std::size_t> input_widths) const {
  if (input_widths.empty()) return WrongInputs(*this, "at least one input", input_widths);
  for (const std::size_t width : input_widths) {
    if (width != input_widths[0]) return WrongInputs(*this, "inputs of one width", input_widths);
  }
  return input_widths[0];
}

OperatorCost AddOperator::Cost(std::span<const std::size_t> input_widths) const {
  OperatorCost cost;
  cost.forward_flops_per_example = static_cast<double>(input_widths[0] * input_widths.size());
  cost.activation_bytes_per_example = input_widths[0] * sizeof(float);
  return cost;
}

Status AddOperator::Forward(OperatorContext* context, std::span<const Matrix> inputs) const {
  const Matrix& y = context->output;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    AddLines(context->examples, y.width, inputs[i].data, inputs[i].stride, i > 0, y.data, y.stride);
  }
  return OkStatus();
}

Status AddOperator::Backward(OperatorContext* context, const Matrix& output_gradient) const {
  for (const GradientTarget& dx : context->input_gradients) {
    if (!dx.matrix) continue;
    AddLines(context->examples, dx.matrix.width, output_gradient.data, output_gradient.stride,
             dx.add, dx.matrix.data, dx.matrix.stride);
  }
  return OkStatus();
}

Result<std::size_t> LogLossOperator::OutputWidth(std::span<const std::size_t> input_widths) const {
  if (input_widths.size() != 3 || input_widths[0] != 1 || input_widths[1] != 1 ||
      input_widths[2] != 1) {
    return WrongInputs(*this, "logit, label and weight of one column each", input_widths);
  }
  return std::size_t{1};
}

std::size_t LogLossOperator::SavedWidth(std::span<const std::size_t> /*input_widths*/) const {
  return 1;
}

OperatorCost LogLossOperator::Cost(std::span<const std::size_t> /*input_widths*/) const {
  OperatorCost cost;
  cost.forward_flops_per_example = 50;  // Two transcendental functions and a division.
  cost.backward_flops_per_example = 3;
  cost.activation_bytes_per_example = 2 * sizeof(float);
  return cost;
}

Status LogLossOperator::Forward(OperatorContext* context, std::span<const Matrix> inputs) const {
  LogLossForward(context->examples, ReadColumn(inputs[0]), ReadColumn(inputs[1]),
                 ReadColumn(inputs[2]), WriteColumn(context->output), WriteColumn(context->saved));
  return OkStatus();
}

Status LogLossOperator::Backward(OperatorContext* context, const Matrix& output_gradient) const {
  const GradientTarget& d_logit = context->input_gradients[0];
  if (!d_logit.matrix) return OkStatus();
  LogLossBackward(context->examples, ReadColumn(context->saved), ReadColumn(context->inputs[1]),
                  ReadColumn(context->inputs[2]), ReadColumn(output_gradient), d_logit.add,
                  WriteColumn(d_logit.matrix));
  return OkStatus();
}

}  // namespace terrace
