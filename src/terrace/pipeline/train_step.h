// StepExecutor: one mini-batch from rows to rows: gather and pool, forward, backward, sum the
// gradients per key, apply (HPS algorithm 1, lines 12-14). A mini-batch runs as slices, two or
// three a compute thread, and a slice as blocks, from gather to backward, which stay in the second
// cache. Where keys repeat, the first layer of the network is multiplied by distinct rows before
// the slices, and differentiated after them (RowProducts); else a slice gathers its examples' rows.
// All sums have a fixed order, so the result depends on the number of compute threads and on
// nothing else of the machine. Threads: one caller; the work runs on the WorkerGroup. Borrows
// network, workers and schemas.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/status.h"
#include "terrace/base/thread.h"
#include "terrace/model/network.h"
#include "terrace/pipeline/row_products.h"
#include "terrace/pipeline/work_item.h"
#include "terrace/table/row_schema.h"
#include "terrace/table/sparse_update.h"

namespace terrace {

struct StepRates {
  std::vector<std::vector<float>> sparse;  // (tables)(segments) learning rates of this step
  float dense = 0;
};

// The predictions of one slice, in the order of examples; valid until the next step.
struct SlicePrediction {
  const float* logit = nullptr;
  const float* probability = nullptr;
  const float* label = nullptr;
  const float* weight = nullptr;
  std::uint32_t examples = 0;
  double logloss_sum = 0;
};

class StepExecutor {
 public:
  // Makes the contexts of the slices that a mini-batch of `minibatch` examples is cut into.
  // kOutOfMemory; kInvalidArgument, before it is taken: all would come to more than `most_bytes`.
  static Result<std::unique_ptr<StepExecutor>> Create(std::vector<StepTable> tables,
                                                      std::uint32_t minibatch, Network* network,
                                                      WorkerGroup* workers,
                                                      std::uint64_t most_bytes = ~std::uint64_t{0});
  ~StepExecutor();

  // Predicts mini-batch m, then trains on it: rows, dense parameters and statistics change, and
  // rows that a cache holds are marked dirty.
  // examples_seen: trained before this step, of the whole run. A loss or gradient that is NaN,
  // infinite, or beyond 1e15, of a row or as the network's norm after clipping: kInternal, naming
  // files, lines and keys; nothing was applied. file_name: of an origin_file number, for that
  // message.
  Result<std::span<const SlicePrediction>> Train(
      WorkItem* item, std::uint32_t m, const StepRates& rates, std::uint64_t examples_seen,
      const std::function<std::string(std::uint32_t)>& file_name);
  // Predicts only. Rows that `places` has as nullptr read as zeros.
  Result<std::span<const SlicePrediction>> Predict(const WorkItem& item, std::uint32_t m);

  // Rows that had expired when training touched them, since the start. What the stores have dropped
  // by then is not among them.
  std::uint64_t renewed_rows() const;
  // Mini-batches trained since the start whose first layer went by distinct rows.
  std::uint64_t steps_by_rows() const { return steps_by_rows_; }

  // Runs forward and backward on zeros in every context, so that all memory they will use is in
  // use. Changes nothing.
  Status WarmUp();
  // What the threads take, all together, with the first mini-batch whose first layer goes by
  // distinct rows, and keep.
  std::size_t later_bytes() const;

 private:
  struct Slice;

  int slices() const { return static_cast<int>(slices_.size()); }
  StepExecutor(std::vector<StepTable> tables, std::uint32_t minibatch, Network* network,
               WorkerGroup* workers);
  void Prepare(const WorkItem& item, std::uint32_t m);
  // The first layer's products of the whole mini-batch, where they are made of its rows.
  void MultiplyRows(const WorkItem& item, std::uint32_t m);
  void DifferentiateRows();
  // Begins the mini-batch's expired rows anew, before anything reads them.
  void RenewRows(const WorkItem& item, std::uint32_t m, std::uint64_t position);
  void RenewPart(const WorkItem& item, std::uint32_t m, std::uint64_t position, int part);
  // The block of `examples` from `begin` of the mini-batch on.
  Status ForwardBlock(const WorkItem& item, std::uint32_t m, std::uint32_t begin,
                      std::uint32_t examples, Slice* slice);
  Status BackwardBlock(std::uint32_t begin, std::uint32_t examples, Slice* slice);
  float* GradientLine(std::uint32_t example) const {
    return reinterpret_cast<float*>(block_gradient_.data()) + example * gradient_stride_;
  }
  // Decides how slices share the work, by the sizes of mini-batch and workers.
  void PlanSlices();
  // Where a slice begins in `work` examples or rows.
  std::size_t SliceBegin(std::size_t work, int slice) const;
  std::uint32_t MostExamples(int slice) const;  // Of any mini-batch.
  // The largest block that a slice of at most so many examples has.
  std::uint32_t MostBlockExamples(std::uint32_t slice) const;
  Status RunSlice(const WorkItem& item, std::uint32_t m, bool train, Slice* slice);
  std::span<const SlicePrediction> Predictions(const WorkItem& item, std::uint32_t m);
  // visit(table, rows, first, end), with the sums of these rows in the slice of the part.
  template <typename Visit>
  void SumRows(const WorkItem& item, std::uint32_t m, int part, Visit visit);
  // Whether the sum of a row's gradients may be beyond what one of its occurrences may be.
  bool SumsMayPassLimit(const WorkItem& item, std::uint32_t m, std::uint32_t largest) const;
  // An example that holds a row whose sum is not finite, or beyond the limit; kNoExample: there is
  // none.
  std::uint32_t ExampleBeyondLimit(const WorkItem& item, std::uint32_t m);
  void ApplyRows(const WorkItem& item, std::uint32_t m, int part, const StepRates& rates,
                 std::uint64_t examples_seen);
  // Marks the working rows that no mini-batch before m has marked.
  void MarkRows(WorkItem* item, std::uint32_t m, int part) const;
  Status FirstError() const;
  // known: an example that is to blame, where the block's gradients do not show it.
  Status BadGradient(const WorkItem& item, std::uint32_t m,
                     const std::function<std::string(std::uint32_t)>& file_name,
                     std::string_view what, std::uint32_t known) const;

  const std::vector<StepTable> tables_;
  const std::uint32_t minibatch_;
  Network* const network_;
  WorkerGroup* const workers_;
  std::vector<std::size_t> slice_shares_;  // (slices + 1) Of the work, before each slice.
  std::vector<std::unique_ptr<Slice>> slices_;
  std::vector<SlicePrediction> predictions_;  // Those that have examples.
  std::vector<NetworkContext*> contexts_;     // Likewise.
  std::unique_ptr<RowProducts> products_;     // Null where the network offers no first layer.
  std::uint64_t steps_by_rows_ = 0;
  // Of the current mini-batch:
  bool by_rows_ = false;  // products_ makes the first layer's product.
  float loss_scale_ = 0;
  std::vector<float> logit_, probability_, weight_, wide_gradient_;  // (examples)
  // (examples, gradient_stride_) by the embeddings; or what products_ borrows.
  HugeBuffer block_gradient_;
  std::size_t gradient_stride_ = 0;  // Floats; whole cache lines.
};

}  // namespace terrace
