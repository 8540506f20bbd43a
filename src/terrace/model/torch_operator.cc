#include "terrace/model/torch_operator.h"

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

namespace terrace {
namespace {

struct TorchState : OperatorState {
  std::vector<at::Tensor> inputs, parameters;
  at::Tensor output;
};

// torch keeps its number of threads by thread, too.
void UseOneTorchThread() {
  thread_local const bool done = [] {
    at::set_num_threads(1);
    return true;
  }();
  (void)done;
}

at::Tensor View(float* data, std::size_t examples, std::size_t width, std::size_t stride) {
  return at::from_blob(data,
                       {static_cast<std::int64_t>(examples), static_cast<std::int64_t>(width)},
                       {static_cast<std::int64_t>(stride), 1}, at::kFloat);
}

at::Tensor View(const Matrix& matrix, std::size_t examples) {
  return View(matrix.data, examples, matrix.width, matrix.stride);
}

void Put(const at::Tensor& from, bool add, at::Tensor to) {
  if (!from.defined()) {  // The expression does not depend on it.
    if (!add) to.zero_();
  } else if (add) {
    to.add_(from);
  } else {
    to.copy_(from);
  }
}

Status Failed(const Operator& op, const char* when, const std::exception& error) {
  const std::string message = error.what();
  return InternalError("network: " + std::string(op.type()) + " \"" + op.name() + "\", " + when +
                       ": torch: " + message.substr(0, message.find('\n')));
}

}  // namespace

Status TorchOperator::Forward(OperatorContext* context, std::span<const Matrix> inputs) const {
  try {
    UseOneTorchThread();
    auto state = std::make_unique<TorchState>();
    const at::AutoGradMode record(true);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      at::Tensor input = View(inputs[i], context->examples);
      if (context->input_gradients[i].matrix) input.requires_grad_(true);
      state->inputs.push_back(std::move(input));
    }
    const std::vector<ParameterSpec> specs = [&] {
      std::vector<std::size_t> widths;
      for (const Matrix& input : inputs) widths.push_back(input.width);
      return Parameters(widths);
    }();
    for (std::size_t p = 0; p < specs.size(); ++p) {
      // Never written through: torch has no view of what is constant.
      auto* data = const_cast<float*>(context->parameters[p]);
      at::Tensor parameter = at::from_blob(data, specs[p].shape, at::kFloat);
      state->parameters.push_back(parameter.requires_grad_(true));
    }
    state->output = Compute(state->inputs, state->parameters);
    const at::AutoGradMode pause(false);
    View(context->output, context->examples).copy_(state->output);
    context->state = std::move(state);
  } catch (const std::exception& error) {
    return Failed(*this, "forward", error);
  }
  return OkStatus();
}

Status TorchOperator::Backward(OperatorContext* context, const Matrix& output_gradient) const {
  try {
    UseOneTorchThread();
    // The recording is for one use, and its tensors are freed with it.
    const std::unique_ptr<OperatorState> owner = std::move(context->state);
    auto* state = static_cast<TorchState*>(owner.get());
    TERRACE_CHECK(state != nullptr);  // Forward comes first.
    std::vector<at::Tensor> leaves;
    for (std::size_t i = 0; i < state->inputs.size(); ++i) {
      if (context->input_gradients[i].matrix) leaves.push_back(state->inputs[i]);
    }
    leaves.insert(leaves.end(), state->parameters.begin(), state->parameters.end());
    if (leaves.empty()) return OkStatus();
    const std::vector<at::Tensor> gradients = torch::autograd::grad(
        {state->output}, leaves, {View(output_gradient, context->examples)},
        /*retain_graph=*/std::nullopt, /*create_graph=*/false, /*allow_unused=*/true);
    const at::AutoGradMode pause(false);
    std::size_t next = 0;
    for (const GradientTarget& target : context->input_gradients) {
      if (!target.matrix) continue;
      at::Tensor gradient = gradients[next++];
      if (gradient.defined()) {
        gradient = gradient.narrow(1, 0, static_cast<std::int64_t>(target.matrix.width));
      }
      Put(gradient, target.add, View(target.matrix, context->examples));
    }
    for (std::size_t p = 0; p < state->parameters.size(); ++p) {
      const ParameterTarget& target = context->parameter_gradients[p];
      Put(gradients[next++], target.add,
          at::from_blob(target.data, state->parameters[p].sizes(), at::kFloat));
    }
  } catch (const std::exception& error) {
    return Failed(*this, "backward", error);
  }
  return OkStatus();
}

Result<std::size_t> FactorisationOperator::OutputWidth(
    std::span<const std::size_t> input_widths) const {
  if (input_widths.size() != 1 || dim_ == 0 || input_widths[0] % dim_ != 0) {
    return InvalidArgumentError("network: factorisation \"" + name() +
                                "\" takes one input of fields that are " + std::to_string(dim_) +
                                " wide each");
  }
  return std::size_t{1};
}

OperatorCost FactorisationOperator::Cost(std::span<const std::size_t> input_widths) const {
  OperatorCost cost;
  cost.forward_flops_per_example = 4.0 * static_cast<double>(input_widths[0]);
  cost.backward_flops_per_example = 4.0 * static_cast<double>(input_widths[0]);
  cost.activation_bytes_per_example = (input_widths[0] + 2 * dim_ + 1) * sizeof(float);
  return cost;
}

at::Tensor FactorisationOperator::Compute(std::span<const at::Tensor> inputs,
                                          std::span<const at::Tensor> /*parameters*/) const {
  const at::Tensor fields =
      inputs[0].reshape({inputs[0].size(0), -1, static_cast<std::int64_t>(dim_)});
  const at::Tensor sum = fields.sum(1);
  return 0.5 * (sum * sum - (fields * fields).sum(1)).sum(1, /*keepdim=*/true);
}

}  // namespace terrace
