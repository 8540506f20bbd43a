// Graph: a network as named operators over named values. Subgraph: any subset of its operators with
// the values between them, which runs without the rest. SubgraphContext: the memory of one
// mini-batch, allocated once. Threads: Graph is built by one thread and constant afterwards;
// contexts of one Subgraph run at once, each on one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/status.h"
#include "terrace/model/network.h"
#include "terrace/model/operator.h"

namespace terrace {

using ValueId = std::size_t;
using OperatorId = std::size_t;
inline constexpr OperatorId kNoOperator = static_cast<OperatorId>(-1);

struct GraphValue {
  enum class Kind { kInput, kOutput, kColumns, kConcat };
  std::string name;
  std::size_t width = 0;
  Kind kind = Kind::kInput;
  bool needs_gradient = false;
  OperatorId producer = kNoOperator;  // kOutput.
  std::vector<ValueId> parts;         // kColumns: the value they are cut from; kConcat: in order.
  std::size_t first_column = 0;       // kColumns.
};

struct GraphNode {
  std::unique_ptr<Operator> op;
  std::vector<ValueId> inputs;
  ValueId output = 0;
  std::vector<std::size_t> input_widths;
  std::vector<ParameterSpec> parameters;
};

class Graph {
 public:
  // All: kInvalidArgument when the name is taken or the widths do not fit.
  Result<ValueId> AddInput(const std::string& name, std::size_t width, bool needs_gradient);
  // Columns [first, first + width) of a value, where they lie.
  Result<ValueId> AddColumns(const std::string& name, ValueId of, std::size_t first,
                             std::size_t width);
  // The parts side by side. Free: the parts are computed (or filled) in their columns. A part lies
  // in one concat only.
  Result<ValueId> AddConcat(const std::string& name, std::span<const ValueId> parts);
  // The output's name is the operator's.
  Result<ValueId> AddOperator(std::unique_ptr<Operator> op, std::span<const ValueId> inputs);
  // The caller gives this value's gradient before Backward.
  void MarkOutput(ValueId value);

  Result<ValueId> Find(const std::string& name) const;  // kNotFound
  const std::vector<GraphValue>& values() const { return values_; }
  const std::vector<GraphNode>& nodes() const { return nodes_; }  // In an order that runs.
  const std::vector<ValueId>& outputs() const { return outputs_; }
  OperatorCost Cost() const;

 private:
  Status CheckNewName(const std::string& name) const;

  std::vector<GraphValue> values_;
  std::vector<GraphNode> nodes_;
  std::vector<ValueId> outputs_;
  std::vector<bool> placed_;  // (values) in a concat.
};

class SubgraphContext;

// Borrows the graph, which outlives it.
class Subgraph {
 public:
  // `operators` ascending. kInvalidArgument: the subset cannot run, named.
  static Result<Subgraph> Create(const Graph* graph, std::span<const OperatorId> operators);
  static Result<Subgraph> Whole(const Graph* graph);

  // Values that the caller fills before Forward: graph inputs and what other operators produce.
  const std::vector<ValueId>& inputs() const { return inputs_; }
  // Values that the rest of the graph takes, and graph outputs: for those that need one the caller
  // fills the gradient before Backward.
  const std::vector<ValueId>& outputs() const { return outputs_; }
  // Of this subset alone, as ranges of its own flat buffer; each starts at a multiple of 16 floats,
  // and what lies between is zero.
  const std::vector<ParameterInfo>& parameters() const { return parameters_; }
  std::size_t parameter_floats() const { return parameter_floats_; }
  // A function of (seed, name of the parameter, element index). values: (parameter_floats), zeroed.
  void Initialize(std::uint64_t seed, float* values) const;

  // `parameters` (parameter_floats), 64-byte aligned, is borrowed for the context's life.
  // kOutOfMemory.
  Result<std::unique_ptr<SubgraphContext>> NewContext(std::size_t max_examples,
                                                      const float* parameters) const;
  std::uint64_t ContextBytes(std::size_t max_examples) const;

  // REQUIRES: examples <= the context's max_examples. Allocate nothing, unless an operator says so.
  // `add`: the gradients of parameters are added to those that the context has.
  Status Forward(SubgraphContext* context, std::size_t examples) const;
  Status Backward(SubgraphContext* context, std::size_t examples, bool add = false) const;

 private:
  friend class SubgraphContext;
  // A buffer of values and, where needed, its twin of gradients.
  struct Storage {
    std::size_t width = 0;
    std::size_t stride = 0;
    bool gradient = false;
    bool add = false;  // Several writers share a column: all of them add.
    std::vector<std::pair<std::size_t, std::size_t>> zero;  // Columns to clear before Backward.
  };
  struct Place {
    static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);
    std::size_t storage = kNowhere;
    std::size_t column = 0;
    explicit operator bool() const { return storage != kNowhere; }
  };
  struct Step {
    OperatorId op = 0;
    bool in_place = false;                // Output lies over input 0.
    bool absorbed = false;                // The operator before does its work.
    bool relu_follows = false;            // The next one is absorbed.
    std::vector<std::size_t> parameters;  // Indices into parameters_.
    std::vector<bool> parameter_add;      // In Backward: another operator has written it before.
    std::vector<std::size_t> gradient_width;  // By input; 0: not needed.
  };

  Status PlaceValues();
  bool Inside(ValueId value) const;
  void Need(ValueId value, std::vector<ValueId>* needed) const;
  void PlanInPlace(OperatorId op);
  void PlanParameters();
  void PlanGradients();
  std::size_t GradientWidth(ValueId value) const;

  const Graph* graph_ = nullptr;
  std::vector<bool> member_;  // (operators)
  std::vector<Step> steps_;
  std::vector<ValueId> inputs_, outputs_;
  std::vector<Storage> storages_;
  std::vector<Place> places_;  // (values)
  std::vector<ParameterInfo> parameters_;
  std::vector<ParameterSpec> parameter_specs_;
  std::size_t parameter_floats_ = 0;
};

class SubgraphContext {
 public:
  std::size_t max_examples() const { return max_examples_; }
  // REQUIRES: the value is produced, taken or viewed in the subset.
  Matrix value(ValueId id) const;
  // Without data where none is needed.
  Matrix gradient(ValueId id) const;
  // From now on the caller makes the operator's product, or no longer (OperatorContext).
  // REQUIRES: it is a member and takes_product().
  void set_product_given(OperatorId id, bool given);
  float* parameter_gradient() const { return parameter_gradient_; }
  // What the operator saved in Forward. REQUIRES: it is a member.
  Matrix saved(OperatorId id) const;

 private:
  friend class Subgraph;
  const Subgraph* subgraph_ = nullptr;
  std::size_t max_examples_ = 0;
  HugeBuffer memory_;
  std::vector<Matrix> storage_values_, storage_gradients_;  // (storages)
  float* parameter_gradient_ = nullptr;
  std::vector<OperatorContext> operators_;  // (steps)
  std::vector<Matrix> output_gradients_;    // (steps)
};

}  // namespace terrace
