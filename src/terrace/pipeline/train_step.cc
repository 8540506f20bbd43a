#include "terrace/pipeline/train_step.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/prefetch.h"
#include "terrace/base/units.h"

namespace terrace {
namespace {

// Beyond it a sum over the occurrences of a key, or a square, may leave the range of float: an
// infinite accumulator would hold its weight for ever.
constexpr float kGradientLimit = 1e15f;
// Rows whose sums are made and applied while they are in the first cache: 64 rows of 64 floats are
// 16 KiB.
constexpr std::size_t kRowsAtOnce = 64;

constexpr std::uint32_t kNoExample = ~std::uint32_t{0};
constexpr std::uint32_t kInfiniteBits = 0x7f800000u;

// LargestBits of what it copies.
std::uint32_t CopyAndFindLargest(const float* __restrict from, std::size_t count,
                                 float* __restrict to) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(from[i]) & 0x7fffffffu);
    to[i] = from[i];
  }
  return largest;
}

bool WithinLimit(std::uint32_t largest_bits) {
  return largest_bits < kInfiniteBits && std::bit_cast<float>(largest_bits) < kGradientLimit;
}

// Of up to kRowsAtOnce rows, those that have a place, with their sums moved up to each other.
// places: (kRowsAtOnce)
std::span<std::byte* const> KeepPlaced(std::span<std::byte* const> rows, std::size_t floats,
                                       float* sums, StatisticsDelta* deltas,
                                       std::vector<std::byte*>* places) {
  std::size_t kept = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] == nullptr) continue;
    if (kept < r) {
      std::memcpy(sums + kept * floats, sums + r * floats, floats * sizeof(float));
      deltas[kept] = deltas[r];
    }
    (*places)[kept++] = rows[r];
  }
  return {places->data(), kept};
}

// How slices share the work: a level is one slice for each thread, and the threads take the levels
// in turn, the largest first, so that whoever is late, because another stage uses its core, holds
// up the others by a small slice at most.
struct SliceLevels {
  std::array<std::size_t, 3> shares;  // Of the levels, in parts of `whole`; 0: no such level.
  std::size_t whole;
};
constexpr SliceLevels kSliceLevels[] = {{{5, 2, 1}, 8}, {{3, 1, 0}, 4}, {{1, 1, 0}, 2}};
// The smallest slice of the first two: a product of less takes the multiplying units' time for
// reading parameters.
constexpr std::size_t kLeastSmallSlice = 128;

SliceLevels LevelsFor(std::size_t minibatch, std::size_t threads) {
  if (threads == 1) return {{1, 0, 0}, 1};
  for (const SliceLevels& levels : kSliceLevels) {
    if (minibatch / (levels.whole * threads) >= kLeastSmallSlice) return levels;
  }
  return kSliceLevels[2];
}

}  // namespace

struct StepExecutor::Slice {
  std::unique_ptr<NetworkContext> context;
  std::uint32_t begin = 0;  // Of the mini-batch.
  std::uint32_t end = 0;
  double loss_sum = 0;
  std::uint32_t largest_gradient = 0;  // As LargestBits says it.
  std::uint32_t beyond_limit = 0;      // As ExampleBeyondLimit says it.
  Status status;
  std::vector<float> gradient_sum;      // (kRowsAtOnce, weight_floats)
  std::vector<StatisticsDelta> deltas;  // (kRowsAtOnce)
  std::vector<std::byte*> places;       // (kRowsAtOnce)
  std::uint64_t renewed = 0;            // Rows, since the start.
};

StepExecutor::StepExecutor(std::vector<StepTable> tables, std::uint32_t minibatch, Network* network,
                           WorkerGroup* workers)
    : tables_(std::move(tables)), minibatch_(minibatch), network_(network), workers_(workers) {}

StepExecutor::~StepExecutor() = default;

Result<std::unique_ptr<StepExecutor>> StepExecutor::Create(std::vector<StepTable> tables,
                                                           std::uint32_t minibatch,
                                                           Network* network, WorkerGroup* workers,
                                                           std::uint64_t most_bytes) {
  std::unique_ptr<StepExecutor> executor(
      new StepExecutor(std::move(tables), minibatch, network, workers));
  executor->PlanSlices();
  constexpr std::size_t kLineFloats = kCacheLineBytes / sizeof(float);
  executor->gradient_stride_ = AlignUp(network->input_spec().embedding_width, kLineFloats);
  executor->products_ =
      RowProducts::Create(&executor->tables_, network, minibatch, workers->size());
  RowProducts* const products = executor->products_.get();
  const std::size_t gradient_floats = std::max(executor->gradient_stride_ * minibatch,
                                               products == nullptr ? 0 : products->line_floats());
  const auto slices = static_cast<int>(executor->slice_shares_.size()) - 1;
  std::uint64_t bytes =
      gradient_floats * sizeof(float) + (products == nullptr ? 0 : products->bytes());
  for (int i = 0; i < slices; ++i) {
    bytes += network->ContextBytes(executor->MostBlockExamples(executor->MostExamples(i)));
  }
  if (bytes > most_bytes) {
    return InvalidArgumentError(fmt::format(
        "training.minibatch: with this network {} examples take {} on training.threads {}, which "
        "the memory.budget has no room for: raise that beyond it, lower one of the two, or choose "
        "smaller layers (network.hidden)",
        FormatCount(minibatch), FormatBytes(bytes), workers->size()));
  }
  std::size_t widest = 0;
  for (const StepTable& table : executor->tables_) {
    widest = std::max<std::size_t>(widest, table.schema->weight_floats());
  }
  for (int i = 0; i < slices; ++i) {
    auto slice = std::make_unique<Slice>();
    const std::uint32_t block = executor->MostBlockExamples(executor->MostExamples(i));
    TERRACE_ASSIGN_OR_RETURN(slice->context, network->NewContext(block));
    slice->gradient_sum.resize(kRowsAtOnce * widest);
    slice->deltas.resize(kRowsAtOnce);
    slice->places.resize(kRowsAtOnce);
    executor->slices_.push_back(std::move(slice));
  }
  executor->logit_.resize(minibatch);
  executor->probability_.resize(minibatch);
  executor->weight_.resize(minibatch);
  executor->wide_gradient_.resize(minibatch);
  if (products != nullptr) TERRACE_RETURN_IF_ERROR(products->Allocate());
  TERRACE_ASSIGN_OR_RETURN(executor->block_gradient_,
                           HugeBuffer::Allocate(gradient_floats * sizeof(float)));
  executor->block_gradient_.Touch();
  if (products != nullptr) products->UseLines(executor->GradientLine(0));
  return executor;
}

void StepExecutor::PlanSlices() {
  const auto threads = static_cast<std::size_t>(workers_->size());
  const SliceLevels levels = LevelsFor(minibatch_, threads);
  slice_shares_ = {0};
  for (const std::size_t share : levels.shares) {
    for (std::size_t i = 0; share > 0 && i < threads; ++i) {
      slice_shares_.push_back(slice_shares_.back() + share);
    }
  }
}

std::size_t StepExecutor::SliceBegin(std::size_t work, int slice) const {
  return work * slice_shares_[static_cast<std::size_t>(slice)] / slice_shares_.back();
}

std::uint32_t StepExecutor::MostExamples(int slice) const {
  // A smaller mini-batch may round to one more.
  const std::size_t most = SliceBegin(minibatch_, slice + 1) - SliceBegin(minibatch_, slice) + 1;
  return std::min(minibatch_, static_cast<std::uint32_t>(most));
}

std::uint32_t StepExecutor::MostBlockExamples(std::uint32_t slice) const {
  std::uint32_t most = 0;
  for (std::uint32_t left = 1; left <= slice; ++left) {
    most = std::max(most, network_->NextBlock(left));
  }
  return most;
}

Status StepExecutor::WarmUp() {
  workers_->Run(slices(), [&](int i) {
    const std::uint32_t slice_examples = MostExamples(i);
    Slice* slice = slices_[static_cast<std::size_t>(i)].get();
    slice->status = OkStatus();
    const NetworkInput input = slice->context->input();
    for (std::uint32_t left = slice_examples; left > 0 && slice->status.ok();) {
      const std::uint32_t examples = network_->NextBlock(left);
      for (std::uint32_t e = 0; e < examples; ++e) {
        std::fill_n(input.block + e * input.stride, network_->input_spec().width(), 0.0f);
        input.label[e] = 0;
        input.weight[e] = 1;
        if (input.wide != nullptr) input.wide[e] = 0;
      }
      slice->status = network_->Forward(slice->context.get(), examples).status();
      if (slice->status.ok()) {
        slice->status =
            network_->Backward(slice->context.get(), examples, 1.0f, left < slice_examples);
      }
      left -= examples;
    }
  });
  return FirstError();
}

std::size_t StepExecutor::later_bytes() const {
  return products_ == nullptr
             ? 0
             : static_cast<std::size_t>(workers_->size()) * products_->thread_bytes();
}

void StepExecutor::Prepare(const WorkItem& item, std::uint32_t m) {
  const std::uint32_t begin = item.MinibatchBegin(m);
  const std::uint32_t examples = item.MinibatchEnd(m) - begin;
  TERRACE_CHECK(examples > 0 && examples <= minibatch_);
  double weight = 0;
  for (std::uint32_t e = 0; e < examples; ++e) {
    weight += item.batch->weight.empty() ? 1.0f : item.batch->weight[begin + e];
  }
  loss_scale_ = weight > 0 ? static_cast<float>(1.0 / weight) : 0.0f;
  by_rows_ = products_ != nullptr && products_->Plan(item, m);
  predictions_.clear();
  contexts_.clear();
  for (int i = 0; i < slices(); ++i) {
    Slice* slice = slices_[static_cast<std::size_t>(i)].get();
    slice->begin = static_cast<std::uint32_t>(SliceBegin(examples, i));
    slice->end = static_cast<std::uint32_t>(SliceBegin(examples, i + 1));
    slice->status = OkStatus();
    slice->context->set_input_form(by_rows_ ? InputForm::kProduct : InputForm::kBlock);
    if (slice->end > slice->begin) contexts_.push_back(slice->context.get());
  }
}

void StepExecutor::MultiplyRows(const WorkItem& item, std::uint32_t m) {
  if (!by_rows_) return;
  workers_->Run(products_->groups(), [&](int group) { products_->Gather(item, m, group); });
  workers_->Run(products_->panels(), [&](int panel) { products_->Multiply(panel); });
}

void StepExecutor::DifferentiateRows() {
  if (!by_rows_) return;
  workers_->Run(products_->groups(), [&](int group) { products_->Differentiate(group); });
}

Status StepExecutor::RunSlice(const WorkItem& item, std::uint32_t m, bool train, Slice* slice) {
  slice->loss_sum = 0;
  slice->largest_gradient = 0;
  for (std::uint32_t begin = slice->begin; begin < slice->end;) {
    const std::uint32_t examples = network_->NextBlock(slice->end - begin);
    TERRACE_RETURN_IF_ERROR(ForwardBlock(item, m, begin, examples, slice));
    if (train) TERRACE_RETURN_IF_ERROR(BackwardBlock(begin, examples, slice));
    begin += examples;
  }
  return OkStatus();
}

Status StepExecutor::ForwardBlock(const WorkItem& item, std::uint32_t m, std::uint32_t begin,
                                  std::uint32_t examples, Slice* slice) {
  const Batch& batch = *item.batch;
  const NetworkInput input = slice->context->input();
  const NetworkInputSpec& spec = network_->input_spec();
  const std::size_t first = item.MinibatchBegin(m) + std::size_t{begin};
  const std::uint32_t layer_width = network_->first_layer().width;
  for (std::uint32_t e = 0; e < examples; ++e) {
    if (by_rows_) {
      std::memcpy(input.product + std::size_t{e} * layer_width, products_->product(begin + e),
                  layer_width * sizeof(float));
    } else {
      std::memcpy(input.block + e * input.stride + spec.embedding_width,
                  batch.dense.data() + (first + e) * spec.dense_width,
                  spec.dense_width * sizeof(float));
    }
    input.label[e] = batch.label[first + e];
    input.weight[e] = batch.weight.empty() ? 1.0f : batch.weight[first + e];
    if (input.wide != nullptr) input.wide[e] = 0;
  }
  const std::size_t minibatch_cell = std::size_t{item.MinibatchBegin(m)} * batch.slots;
  for (std::size_t t = 0; t < tables_.size() && (!by_rows_ || input.wide != nullptr); ++t) {
    const TableWork& work = item.tables[t];
    PooledLookup lookup;
    lookup.row = std::span<const std::byte* const>(work.places.data() + work.row_begin[m],
                                                   work.row_begin[m + 1] - work.row_begin[m]);
    lookup.slots = tables_[t].slots;
    lookup.key_begin = std::span<const std::uint32_t>(batch.key_begin).subspan(minibatch_cell);
    lookup.data_slots = batch.slots;
    lookup.first_occurrence = batch.key_begin[std::size_t{item.first_example} * batch.slots];
    lookup.row_index = item.local_row;
    if (!batch.values.empty()) {
      lookup.value = std::span<const float>(batch.values).subspan(lookup.first_occurrence);
    }
    GatherPooled(*tables_[t].schema, lookup, begin, begin + examples,
                 by_rows_ ? nullptr : input.block, input.stride, input.wide);
  }
  TERRACE_ASSIGN_OR_RETURN(const double loss, network_->Forward(slice->context.get(), examples));
  slice->loss_sum += loss;
  std::copy_n(slice->context->logit(), examples, logit_.data() + begin);
  std::copy_n(slice->context->probability(), examples, probability_.data() + begin);
  std::copy_n(input.weight, examples, weight_.data() + begin);
  return OkStatus();
}

Status StepExecutor::BackwardBlock(std::uint32_t begin, std::uint32_t examples, Slice* slice) {
  TERRACE_RETURN_IF_ERROR(network_->Backward(slice->context.get(), examples, loss_scale_,
                                             /*add=*/begin > slice->begin));
  const NetworkContext& context = *slice->context;
  const std::size_t width = network_->input_spec().embedding_width;
  std::uint32_t largest = slice->largest_gradient;
  const std::uint32_t layer_width = network_->first_layer().width;
  for (std::uint32_t e = 0; e < examples && by_rows_; ++e) {
    std::memcpy(products_->product(begin + e),
                context.product_gradient() + std::size_t{e} * layer_width,
                layer_width * sizeof(float));
  }
  for (std::uint32_t e = 0; e < examples && width > 0 && !by_rows_; ++e) {
    const float* line = context.block_gradient() + e * context.block_gradient_stride();
    largest = std::max(largest, CopyAndFindLargest(line, width, GradientLine(begin + e)));
  }
  if (context.wide_gradient() != nullptr) {
    largest = std::max(largest, CopyAndFindLargest(context.wide_gradient(), examples,
                                                   wide_gradient_.data() + begin));
  }
  slice->largest_gradient = largest;
  return OkStatus();
}

std::span<const SlicePrediction> StepExecutor::Predictions(const WorkItem& item, std::uint32_t m) {
  const float* label = item.batch->label.data() + item.MinibatchBegin(m);
  for (const auto& slice : slices_) {
    const std::uint32_t begin = slice->begin;
    if (slice->end == begin) continue;
    predictions_.push_back({logit_.data() + begin, probability_.data() + begin, label + begin,
                            weight_.data() + begin, slice->end - begin, slice->loss_sum});
  }
  return predictions_;
}

Status StepExecutor::FirstError() const {
  for (const auto& slice : slices_) TERRACE_RETURN_IF_ERROR(slice->status);
  return OkStatus();
}

Result<std::span<const SlicePrediction>> StepExecutor::Predict(const WorkItem& item,
                                                               std::uint32_t m) {
  Prepare(item, m);
  MultiplyRows(item, m);
  workers_->Run(slices(), [&](int i) {
    Slice* slice = slices_[static_cast<std::size_t>(i)].get();
    slice->status = RunSlice(item, m, /*train=*/false, slice);
  });
  TERRACE_RETURN_IF_ERROR(FirstError());
  return Predictions(item, m);
}

Result<std::span<const SlicePrediction>> StepExecutor::Train(
    WorkItem* work, std::uint32_t m, const StepRates& rates, std::uint64_t examples_seen,
    const std::function<std::string(std::uint32_t)>& file_name) {
  const WorkItem& item = *work;
  Prepare(item, m);
  RenewRows(item, m, examples_seen);
  MultiplyRows(item, m);
  workers_->Run(slices(), [&](int i) {
    Slice* slice = slices_[static_cast<std::size_t>(i)].get();
    slice->status = RunSlice(item, m, /*train=*/true, slice);
  });
  TERRACE_RETURN_IF_ERROR(FirstError());
  std::uint32_t largest = 0;
  for (const auto& slice : slices_) {
    if (slice->end == slice->begin) continue;
    if (!std::isfinite(slice->loss_sum))
      return BadGradient(item, m, file_name, "the loss is not finite", kNoExample);
    largest = std::max(largest, slice->largest_gradient);
  }
  DifferentiateRows();
  if (by_rows_) largest = std::max(largest, products_->largest_sum());
  if (!WithinLimit(largest)) {
    return BadGradient(
        item, m, file_name, "a gradient of an embedding is not finite, or beyond 1e15",
        by_rows_ && !WithinLimit(products_->largest_sum()) ? products_->ExampleOfLargestSum()
                                                           : kNoExample);
  }
  if (by_rows_) products_->AddShared();
  if (SumsMayPassLimit(item, m, largest)) {
    const std::uint32_t example = ExampleBeyondLimit(item, m);
    if (example != kNoExample) {
      return BadGradient(item, m, file_name, "the gradients of a row sum to more than 1e15",
                         example);
    }
  }
  const int parts = slices();
  workers_->Run(slices(), [&](int part) { network_->ReduceGradients(contexts_, part, parts); });
  // Of the norm, which no element is beyond. A NaN is not within it either.
  if (!(std::sqrt(network_->ClippedSquareSum()) < kGradientLimit)) {
    return BadGradient(item, m, file_name,
                       "the gradient of the network is not finite, or its norm beyond 1e15",
                       kNoExample);
  }
  DenseStep dense;
  dense.learning_rate = rates.dense;
  // The next mini-batch is planned beside the update, once each thread has a slice: that is one
  // thread's work.
  const bool plans = products_ != nullptr && m + 1 < item.minibatches;
  const int plan_at = plans ? std::min(parts, workers_->size()) : parts;
  workers_->Run(parts + (plans ? 1 : 0), [&](int task) {
    if (task == plan_at) return products_->PlanAhead(item, m + 1);
    const int part = task < plan_at ? task : task - 1;
    network_->ApplyGradients(dense, part, parts);
    ApplyRows(item, m, part, rates,
              examples_seen + (item.MinibatchEnd(m) - item.MinibatchBegin(m)));
    MarkRows(work, m, part);
  });
  for (TableWork& table : work->tables) table.marked = table.key_end[m];
  network_->Advance();
  steps_by_rows_ += by_rows_ ? 1 : 0;
  return Predictions(item, m);
}

std::uint64_t StepExecutor::renewed_rows() const {
  std::uint64_t rows = 0;
  for (const auto& slice : slices_) rows += slice->renewed;
  return rows;
}

void StepExecutor::RenewRows(const WorkItem& item, std::uint32_t m, std::uint64_t position) {
  bool any = false;
  for (const StepTable& table : tables_) any |= table.schema->expiry().Points(position) > 0;
  if (any) workers_->Run(slices(), [&](int part) { RenewPart(item, m, position, part); });
}

void StepExecutor::RenewPart(const WorkItem& item, std::uint32_t m, std::uint64_t position,
                             int part) {
  constexpr std::size_t kAhead = 16;  // Rows; what memory delivers while one is looked at.
  Slice* slice = slices_[static_cast<std::size_t>(part)].get();
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const RowSchema& schema = *tables_[t].schema;
    if (schema.expiry().Points(position) == 0) continue;
    const TableWork& work = item.tables[t];
    const std::size_t count = work.row_begin[m + 1] - work.row_begin[m];
    const std::size_t base = work.row_begin[m];
    const std::size_t last = base + SliceBegin(count, part + 1);
    for (std::size_t r = base + SliceBegin(count, part); r < last; ++r) {
      if (r + kAhead < last && work.places[r + kAhead] != nullptr) {
        __builtin_prefetch(work.places[r + kAhead] + schema.statistics_offset());
      }
      std::byte* const row = work.places[r];
      if (row == nullptr) continue;
      std::uint64_t last_seen;
      std::memcpy(&last_seen, row + schema.last_seen_offset(), sizeof last_seen);
      if (last_seen == 0 || !schema.expiry().Expired(row + schema.statistics_offset(), position)) {
        continue;
      }
      schema.InitializeRow(tables_[t].seed, work.keys[work.rows[r]], row);
      ++slice->renewed;
    }
  }
}

template <typename Visit>
void StepExecutor::SumRows(const WorkItem& item, std::uint32_t m, int part, Visit visit) {
  Slice* slice = slices_[static_cast<std::size_t>(part)].get();
  const std::uint32_t begin_example = item.MinibatchBegin(m);
  SparseGradients gradients;
  if (!by_rows_) {
    gradients.lines = GradientLine(0);
    gradients.line_stride = gradient_stride_;
  }
  gradients.wide = network_->input_spec().wide ? wide_gradient_.data() : nullptr;
  gradients.label = item.batch->label.data() + begin_example;
  gradients.weight =
      item.batch->weight.empty() ? nullptr : item.batch->weight.data() + begin_example;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const TableWork& work = item.tables[t];
    const std::size_t row_begin = work.row_begin[m];
    const std::size_t row_count = work.row_begin[m + 1] - row_begin;
    const std::size_t occurrence_begin = work.occurrence_begin[m];
    const std::size_t occurrences = work.occurrence_begin[m + 1] - occurrence_begin;
    MiniBatchRows rows;
    rows.row = std::span<std::byte* const>(work.places.data() + row_begin, row_count);
    rows.begin =
        std::span<const std::uint32_t>(work.inverse_begin.data() + row_begin + m, row_count + 1);
    rows.example =
        std::span<const std::uint32_t>(work.example.data() + occurrence_begin, occurrences);
    rows.input_offset =
        std::span<const std::uint32_t>(work.input_offset.data() + occurrence_begin, occurrences);
    if (!work.value.empty()) {
      rows.value = std::span<const float>(work.value.data() + occurrence_begin, occurrences);
    }
    if (by_rows_) {
      gradients.sums = products_->sums();
      gradients.sum_at = products_->sum_at(t);
    }
    // Shares of rows and occurrences together; the bits do not depend on where the ranges part.
    auto boundary = [&](int border) -> std::size_t {
      const std::size_t target = SliceBegin(row_count + occurrences, border);
      std::size_t low = 0, high = row_count;
      while (low < high) {
        const std::size_t middle = (low + high) / 2;
        if (middle + rows.begin[middle] < target)
          low = middle + 1;
        else
          high = middle;
      }
      return low;
    };
    const std::size_t last = boundary(part + 1);
    for (std::size_t first = boundary(part); first < last; first += kRowsAtOnce) {
      const std::size_t end = std::min(first + kRowsAtOnce, last);
      Accumulate(*tables_[t].schema, rows, gradients, first, end, slice->gradient_sum.data(),
                 slice->deltas.data());
      visit(t, rows, first, end);
    }
  }
}

void StepExecutor::ApplyRows(const WorkItem& item, std::uint32_t m, int part,
                             const StepRates& rates, std::uint64_t examples_seen) {
  Slice* slice = slices_[static_cast<std::size_t>(part)].get();
  ApplyStep step;
  step.examples_seen = examples_seen;
  step.examples_before = examples_seen - (item.MinibatchEnd(m) - item.MinibatchBegin(m));
  SumRows(item, m, part,
          [&](std::size_t t, const MiniBatchRows& rows, std::size_t first, std::size_t end) {
            const StepTable& table = tables_[t];
            step.learning_rate = rates.sparse[t];
            std::span<std::byte* const> placed = rows.row.subspan(first, end - first);
            if (table.admits) {
              placed = KeepPlaced(placed, table.schema->weight_floats(), slice->gradient_sum.data(),
                                  slice->deltas.data(), &slice->places);
            }
            Apply(*table.schema, step, placed, slice->gradient_sum.data(), slice->deltas.data());
          });
}

bool StepExecutor::SumsMayPassLimit(const WorkItem& item, std::uint32_t m,
                                    std::uint32_t largest) const {
  double most = 0;
  for (const TableWork& work : item.tables) {
    const std::size_t begin = work.occurrence_begin[m];
    const std::size_t count = work.occurrence_begin[m + 1] - begin;
    const float value = work.value.empty()
                            ? 1.0f
                            : std::bit_cast<float>(LargestBits(work.value.data() + begin, count));
    most = std::max(most, static_cast<double>(count) * std::max(value, 1.0f));
  }
  return most * std::bit_cast<float>(largest) >= kGradientLimit;
}

std::uint32_t StepExecutor::ExampleBeyondLimit(const WorkItem& item, std::uint32_t m) {
  workers_->Run(slices(), [&](int part) {
    Slice* slice = slices_[static_cast<std::size_t>(part)].get();
    slice->beyond_limit = kNoExample;
    SumRows(item, m, part,
            [&](std::size_t t, const MiniBatchRows& rows, std::size_t first, std::size_t end) {
              const std::size_t floats = tables_[t].schema->weight_floats();
              for (std::size_t r = first; r < end; ++r) {
                const float* sums = slice->gradient_sum.data() + (r - first) * floats;
                if (WithinLimit(LargestBits(sums, floats))) continue;
                slice->beyond_limit = std::min(slice->beyond_limit, rows.example[rows.begin[r]]);
              }
            });
  });
  std::uint32_t example = kNoExample;
  for (const auto& slice : slices_) example = std::min(example, slice->beyond_limit);
  return example;
}

void StepExecutor::MarkRows(WorkItem* item, std::uint32_t m, int part) const {
  for (TableWork& table : item->tables) {
    if (table.pinned.size() == 0) continue;
    const std::uint32_t rows = table.key_end[m] - table.marked;
    table.pinned.MarkDirty(table.marked + SliceBegin(rows, part),
                           table.marked + SliceBegin(rows, part + 1));
  }
}

Status StepExecutor::BadGradient(const WorkItem& item, std::uint32_t m,
                                 const std::function<std::string(std::uint32_t)>& file_name,
                                 std::string_view what, std::uint32_t known) const {
  const Batch& batch = *item.batch;
  const std::uint32_t begin = item.MinibatchBegin(m);
  const std::uint32_t end = item.MinibatchEnd(m);
  std::string message = fmt::format(
      "{} in the mini-batch of examples {} to {} of the run; nothing of it was applied.", what,
      batch.first_example + begin, batch.first_example + end - 1);
  const auto is_bad = [&](std::uint32_t e) {
    if (!std::isfinite(logit_[e])) return true;
    if (by_rows_ || known != kNoExample) return e == known;
    return !WithinLimit(LargestBits(GradientLine(e), network_->input_spec().embedding_width));
  };
  int shown = 0;
  for (std::uint32_t e = 0; e < end - begin && shown < 3; ++e) {
    if (!is_bad(e)) continue;
    ++shown;
    const std::uint32_t at = begin + e;
    message += fmt::format(" Line {} of '{}', keys", batch.origin_line[at],
                           file_name(batch.origin_file[at]));
    const std::uint32_t first_key = batch.key_begin[std::size_t{at} * batch.slots];
    const std::uint32_t last_key = batch.key_begin[std::size_t{at + 1} * batch.slots];
    for (std::uint32_t k = first_key; k < std::min(last_key, first_key + 8); ++k) {
      message += fmt::format(" {:#x}", batch.keys[k]);
    }
    message += last_key > first_key + 8 ? " ..." : ".";
  }
  if (shown == 0) {
    message += fmt::format(" It begins at line {} of '{}'.", batch.origin_line[begin],
                           file_name(batch.origin_file[begin]));
  }
  return InternalError(message +
                       " Lower the learning rates, or clip (network.optimizer.clip_norm).");
}

}  // namespace terrace
