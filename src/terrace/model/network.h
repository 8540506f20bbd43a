// Network: the dense part of a model as the trainer sees it, free of torch: inputs in, loss and
// gradients out, parameters in flat buffers with the state of their optimizer. The operator graph
// (graph.h) implements it; tests drive the pipeline with a small one of their own. Threads: each
// NetworkContext is used by one thread at a time; contexts of one network run at once. Parameters
// are constant while a Forward or Backward runs; ReduceGradients is called with none running.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/base/status.h"

namespace terrace {

// The input block of the network: one line per example. Columns [0, embedding_width) are the pooled
// embeddings of all slots side by side, then come the dense features. `wide` is one more number per
// example.
struct NetworkInputSpec {
  std::uint32_t embedding_width = 0;  // Floats.
  std::uint32_t dense_width = 0;      // Floats.
  bool wide = false;
  std::uint32_t width() const { return embedding_width + dense_width; }
};

// How a block of examples comes to the network.
enum class InputForm : std::uint8_t {
  kBlock,    // As lines of NetworkInput::block.
  kProduct,  // As what FirstLayer makes of them: the caller multiplies, and differentiates.
};

// A linear layer that alone takes the block. Its product may be made of a mini-batch's distinct
// rows instead of its examples (line_products.h).
struct FirstLayer {
  std::uint32_t width = 0;        // Floats of its output; 0: there is no such layer.
  const float* weight = nullptr;  // (NetworkInputSpec::width(), width)
  // Likewise. With InputForm::kProduct the caller writes it, whole, before ReduceGradients, which
  // leaves it as it is.
  float* gradient = nullptr;
};

// One block of a slice of one mini-batch, owned by the context; the caller fills lines [0,
// examples).
struct NetworkInput {
  float* block = nullptr;    // (max_examples, stride), 64-byte aligned; for InputForm::kBlock
  std::size_t stride = 0;    // Floats; >= width()
  float* wide = nullptr;     // (max_examples), or nullptr
  float* label = nullptr;    // (max_examples)
  float* weight = nullptr;   // (max_examples); 1 for unweighted examples
  float* product = nullptr;  // (max_examples, FirstLayer::width), for InputForm::kProduct
};

class NetworkContext {
 public:
  virtual ~NetworkContext() = default;
  virtual NetworkInput input() = 0;
  // Of the mini-batches from now on, kBlock until it is called; the same for all contexts of a
  // mini-batch. REQUIRES: for kProduct a first layer.
  virtual void set_input_form(InputForm form) { TERRACE_CHECK(form == InputForm::kBlock); }
  // (examples) of the last Forward: the probability of a click, and the logit.
  virtual const float* probability() const = 0;
  virtual const float* logit() const = 0;
  // Gradient of the mini-batch's loss by the last Backward: (examples, stride), columns
  // [0, embedding_width) as in input().block; what stands in those of the dense features is
  // unspecified. nullptr without embeddings. And (examples) of the wide input, or nullptr.
  virtual const float* block_gradient() const = 0;
  virtual std::size_t block_gradient_stride() const = 0;
  virtual const float* wide_gradient() const = 0;
  // With InputForm::kProduct instead of the block's: that of the product, (examples,
  // FirstLayer::width).
  virtual const float* product_gradient() const { return nullptr; }
};

// Named parameter, a range of the flat buffers.
struct ParameterInfo {
  std::string name;  // "linear0.weight"
  std::vector<std::int64_t> shape;
  std::size_t offset = 0;  // Floats in each flat buffer.
  std::size_t size = 0;    // Floats.
};

// Flat buffers of one replica: values, then each optimizer moment, each (parameter_floats).
struct DenseState {
  std::vector<std::string> names;           // "value", "moment1", "moment2", ...
  std::vector<std::vector<float>> buffers;  // by name
  std::uint64_t steps = 0;                  // Optimizer steps taken.
};

struct DenseStep {
  float learning_rate = 0;  // Of this step, by the schedule.
};

class Network {
 public:
  virtual ~Network() = default;
  virtual const NetworkInputSpec& input_spec() const = 0;
  // A slice goes through forward and backward block by block, so that what one step has written is
  // in the cache when the next one reads it: how many of the `left` examples of a slice its next
  // block takes. All of them where reading the parameters again for each block costs more.
  virtual std::uint32_t NextBlock(std::uint32_t left) const = 0;
  // Working memory for blocks of up to max_examples, and the parameters' gradients of a slice.
  // Blocks: no. kOutOfMemory.
  virtual Result<std::unique_ptr<NetworkContext>> NewContext(std::uint32_t max_examples) = 0;

  // The same for the network's life; what it points to changes with the parameters.
  virtual FirstLayer first_layer() { return {}; }
  // Fills probability() and logit(). Returns the block's sum of weight * log loss, in double,
  // natural logarithm.
  virtual Result<double> Forward(NetworkContext* context, std::uint32_t examples) = 0;
  // Fills the context's gradients; loss_scale is 1 / (weight of the whole mini-batch of all
  // workers). Gradients of parameters stay in the context until ReduceGradients; `add`: to those of
  // the slice's blocks before.
  virtual Status Backward(NetworkContext* context, std::uint32_t examples, float loss_scale,
                          bool add) = 0;

  // Sums the parameter gradients of the slices in the order of `contexts` (those that ran
  // Backward), in parts: part p of `parts` covers its own range of the flat buffer, so that threads
  // share the work; any split gives the same bits.
  virtual void ReduceGradients(std::span<NetworkContext* const> contexts, int part, int parts) = 0;
  // After all parts: sum of squares of the reduced gradient in double, in a fixed order. NaN or Inf
  // tells a bad gradient.
  virtual double GradientSquareSum() = 0;
  // The same of the gradient as ApplyGradients takes it, after clip_norm.
  virtual double ClippedSquareSum() { return GradientSquareSum(); }
  // Applies clip_norm (of the whole gradient), l2 and the optimizer, in parts as above. Starts
  // after all parts of ReduceGradients; Advance() once after all parts.
  virtual void ApplyGradients(const DenseStep& step, int part, int parts) = 0;
  virtual void Advance() = 0;

  virtual std::span<const ParameterInfo> parameters() const = 0;
  virtual std::size_t parameter_floats() const = 0;
  virtual DenseState Save() const = 0;
  // kInvalidArgument: names or sizes differ.
  virtual Status Load(const DenseState& state) = 0;
  // Bytes of one context for max_examples, and of parameters with state and gradients: for the
  // memory plan.
  virtual std::uint64_t ContextBytes(std::uint32_t max_examples) const = 0;
  virtual std::uint64_t ParameterBytes() const = 0;
  virtual std::string ToText() const = 0;  // Canonical; part of what identifies a model.
};

struct DenseOptimizerSpec {
  std::string type = "adam";  // sgd | adagrad | adam
  float epsilon = 1e-8f;
  float beta1 = 0.9f, beta2 = 0.999f;
  float initial_accumulator = 0.0f;
  float momentum = 0.0f;   // sgd
  float l2 = 0.0f;         // Added to the gradient as l2 * w.
  double clip_norm = 0.0;  // 0: none.
};

struct NetworkSpec {
  std::string type = "dnn";
  std::vector<std::uint32_t> hidden = {256, 128};
  bool wide = false;
  DenseOptimizerSpec optimizer;
};

// Starts each parameter as a function of (seed, name, element index): weights He-uniform by fan-in,
// biases zero. kInvalidArgument: an unknown type, a width of 0, ParameterBytes() beyond most_bytes,
// which is told before they are taken.
Result<std::unique_ptr<Network>> CreateNetwork(const NetworkSpec& spec,
                                               const NetworkInputSpec& inputs, std::uint64_t seed,
                                               std::uint64_t most_bytes = ~std::uint64_t{0});

// Tells torch and the BLAS below it to use one thread, the caller's: slices run on the trainer's
// own threads. Called once by every thread that runs a context.
void PrepareComputeThread();

}  // namespace terrace
