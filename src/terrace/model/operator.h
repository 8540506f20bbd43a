// Operator: one named step of a network. It owns no parameters: values, parameters and gradients
// reach it through a context that belongs to one copy of the network and one mini-batch. Threads:
// operators are constant; a context is used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/status.h"

namespace terrace {

// A view of floats, one line per example; the first lines of a context's storage.
struct Matrix {
  float* data = nullptr;
  std::size_t stride = 0;  // Floats from one line to the next; >= width.
  std::size_t width = 0;   // Floats of a line.
  float* line(std::size_t example) const { return data + example * stride; }
  explicit operator bool() const { return data != nullptr; }
};

// Where a gradient goes. Without data it is not needed. A matrix narrower than the value asks for
// its first columns alone.
struct GradientTarget {
  Matrix matrix;
  bool add = false;  // Add to what is there; otherwise overwrite.
};

struct ParameterTarget {
  float* data = nullptr;
  bool add = false;
};

enum class InitialValue {
  kZero,
  kHeUniform,  // In [-b, b), b = sqrt(6 / fan_in), for layers that a ReLU follows.
};

// What an operator wants of a parameter. Operators that name the same one share it.
struct ParameterSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  InitialValue initial = InitialValue::kZero;
  std::uint32_t fan_in = 1;
  std::size_t size() const;  // Floats.
};

// For plans and placements.
struct OperatorCost {
  double forward_flops_per_example = 0;
  double backward_flops_per_example = 0;
  std::uint64_t activation_bytes_per_example = 0;  // Output and what is saved for Backward.
  std::uint64_t parameter_bytes = 0;
};

// What an operator that needs more than Saved() keeps between Forward and Backward.
class OperatorState {
 public:
  virtual ~OperatorState() = default;
};

struct OperatorContext {
  std::size_t examples = 0;
  Matrix output;                         // Forward writes it, Backward may read it.
  Matrix saved;                          // Forward writes it for Backward.
  std::vector<Matrix> inputs;            // As Forward got them; Backward may read them.
  std::vector<const float*> parameters;  // Values, in the order of Operator::parameters().
  std::vector<GradientTarget> input_gradients;
  std::vector<ParameterTarget> parameter_gradients;
  // Set by the graph where a ReLU follows in place and absorbs_relu(): Forward clamps what it has
  // written, Backward first clears the output gradient where the output is not above zero.
  bool relu_follows = false;
  // Only where takes_product(): the product of input 0 and the weight lies in the output already,
  // and Backward leaves the gradients of both to the caller, who finds that of the product where
  // the output's was.
  bool product_given = false;
  std::unique_ptr<OperatorState> state;
};

class Operator {
 public:
  explicit Operator(std::string name) : name_(std::move(name)) {}
  virtual ~Operator() = default;
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  const std::string& name() const { return name_; }
  virtual std::string_view type() const = 0;
  // Floats of an output line. kInvalidArgument names the operator and what is wrong.
  virtual Result<std::size_t> OutputWidth(std::span<const std::size_t> input_widths) const = 0;
  virtual std::vector<ParameterSpec> Parameters(std::span<const std::size_t> input_widths) const;
  virtual std::size_t SavedWidth(std::span<const std::size_t> input_widths) const;
  virtual OperatorCost Cost(std::span<const std::size_t> input_widths) const = 0;
  // The output may lie where input 0 lies: Backward then reads only output and output gradient, and
  // writes the input gradient over the latter.
  virtual bool in_place() const { return false; }
  // Does the work of a ReLU behind it when context->relu_follows, while its output is in the cache.
  virtual bool absorbs_relu() const { return false; }
  virtual bool is_relu() const { return false; }
  // A linear layer, parameter 0 its weight, whose product the caller may make.
  virtual bool takes_product() const { return false; }

  // Writes context->output. `inputs` stay valid until Backward is done.
  virtual Status Forward(OperatorContext* context, std::span<const Matrix> inputs) const = 0;
  // After Forward with the same context. Writes input_gradients and parameter_gradients.
  virtual Status Backward(OperatorContext* context, const Matrix& output_gradient) const = 0;

 private:
  const std::string name_;
};

}  // namespace terrace
