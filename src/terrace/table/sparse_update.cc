#include "terrace/table/sparse_update.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "terrace/base/check.h"
#include "terrace/base/portable_math.h"
#include "terrace/base/prefetch.h"

namespace terrace {
namespace {

// Gradient lines stay in the second-level cache at best: 16 occurrences hide its latency.
constexpr std::size_t kOccurrencesAhead = 16;
// Rows lie in memory at random: so many bytes are asked for ahead, and at least kMinRowsAhead rows.
constexpr std::size_t kBytesAhead = 4096;
constexpr std::size_t kMinRowsAhead = 4;
constexpr std::size_t kMaxRowsAhead = 32;
constexpr std::size_t kRowBlock = 32;  // Rows that all segments visit before the next ones.

// kDim is the dimension at compile time, or 0: `dim` says it at run time. Both do the same
// operations on every element in the same order, so they give the same bits.
template <std::uint32_t kDim, bool kValues>
void AccumulateEmbedding(const MiniBatchRows& rows, const SparseGradients& gradients,
                         std::size_t first, std::size_t last, std::uint32_t runtime_dim,
                         std::size_t sum_stride, float* sum) {
  const std::uint32_t dim = kDim == 0 ? runtime_dim : kDim;
  const std::uint32_t* const begin = rows.begin.data();
  const std::uint32_t* const example = rows.example.data();
  const std::uint32_t* const input_offset = rows.input_offset.data();
  const std::size_t stride = gradients.line_stride;
  const auto gradient_of = [&](std::size_t o) {
    return gradients.lines + example[o] * stride + input_offset[o];
  };
  const std::size_t occurrences_end = begin[last];
  for (std::size_t r = first; r < last; ++r, sum += sum_stride) {
    const std::size_t end = begin[r + 1];
    std::size_t o = begin[r];
    float* __restrict out = sum;
    if (o == end) {
      std::fill_n(out, dim, 0.0f);
      continue;
    }
    for (const std::size_t start = o; o < end; ++o) {
      const std::size_t ahead = o + kOccurrencesAhead;
      if (ahead < occurrences_end) {
        PrefetchRead(gradient_of(ahead), dim * sizeof(float));
      }
      const float* __restrict in = gradient_of(o);
      const float value = kValues ? rows.value[o] : 1.0f;
      if (o == start) {
        for (std::uint32_t i = 0; i < dim; ++i) out[i] = kValues ? value * in[i] : in[i];
      } else {
        for (std::uint32_t i = 0; i < dim; ++i) out[i] += kValues ? value * in[i] : in[i];
      }
    }
  }
}

template <bool kValues>
void AccumulateEmbedding(const MiniBatchRows& rows, const SparseGradients& gradients,
                         std::size_t first, std::size_t last, std::uint32_t dim,
                         std::size_t sum_stride, float* sum, Specialise specialise) {
  if (specialise == Specialise::kNo) {
    return AccumulateEmbedding<0, kValues>(rows, gradients, first, last, dim, sum_stride, sum);
  }
  switch (dim) {
    case 8:
      return AccumulateEmbedding<8, kValues>(rows, gradients, first, last, dim, sum_stride, sum);
    case 16:
      return AccumulateEmbedding<16, kValues>(rows, gradients, first, last, dim, sum_stride, sum);
    case 32:
      return AccumulateEmbedding<32, kValues>(rows, gradients, first, last, dim, sum_stride, sum);
    case 64:
      return AccumulateEmbedding<64, kValues>(rows, gradients, first, last, dim, sum_stride, sum);
    default:
      return AccumulateEmbedding<0, kValues>(rows, gradients, first, last, dim, sum_stride, sum);
  }
}

void CopySums(const SparseGradients& gradients, std::size_t first, std::size_t last,
              std::uint32_t dim, std::size_t sum_stride, float* sum) {
  for (std::size_t r = first; r < last; ++r, sum += sum_stride) {
    if (r + kOccurrencesAhead < last) {
      PrefetchRead(gradients.sums + gradients.sum_at[r + kOccurrencesAhead], dim * sizeof(float));
    }
    std::memcpy(sum, gradients.sums + gradients.sum_at[r], dim * sizeof(float));
  }
}

void AccumulateWide(const MiniBatchRows& rows, const float* wide, std::size_t first,
                    std::size_t last, std::size_t sum_stride, float* sum) {
  const bool values = !rows.value.empty();
  for (std::size_t r = first; r < last; ++r, sum += sum_stride) {
    const std::size_t begin = rows.begin[r], end = rows.begin[r + 1];
    float total = 0.0f;
    for (std::size_t o = begin; o < end; ++o) {
      const float gradient = wide[rows.example[o]];
      const float term = values ? rows.value[o] * gradient : gradient;
      total = o == begin ? term : total + term;
    }
    *sum = total;
  }
}

void AccumulateStatistics(const MiniBatchRows& rows, const SparseGradients& gradients,
                          std::size_t first, std::size_t last, StatisticsDelta* delta) {
  for (std::size_t r = first; r < last; ++r, ++delta) {
    *delta = StatisticsDelta();
    const std::size_t begin = rows.begin[r], end = rows.begin[r + 1];
    for (std::size_t o = begin; o < end; ++o) {
      const std::uint32_t e = rows.example[o];
      if (o > begin && rows.example[o - 1] == e) continue;  // An example shows a key once.
      const float weight = gradients.weight == nullptr ? 1.0f : gradients.weight[e];
      delta->show += weight;
      delta->click += weight * gradients.label[e];
    }
  }
}

// One segment of one step, and what its kernel reads ahead.
struct SegmentStep {
  const Segment* segment = nullptr;
  float learning_rate = 0.0f;
  std::size_t gradient_stride = 0;  // Floats from one row's gradient sum to the next.
  std::size_t row_bytes = 0;
};

// What the loop over a block of rows prefetches: row i asks for row i + distance, within `rows`.
struct RowBlock {
  std::byte* const* rows = nullptr;
  std::size_t count = 0;
  std::size_t distance = 0;   // 0: another segment's pass over the block has asked already.
  std::size_t available = 0;  // Rows from rows[0] to the end of the call.
};

[[gnu::always_inline]] inline void PrefetchAhead(const SegmentStep& step, const RowBlock& block,
                                                 std::size_t i) {
  if (block.distance != 0 && i + block.distance < block.available) {
    PrefetchWrite(block.rows[i + block.distance], step.row_bytes);
  }
}

template <std::uint32_t kDim, bool kL2>
struct Kernels {
  static std::uint32_t Dim(const SegmentStep& step) { return kDim == 0 ? step.segment->dim : kDim; }
  // The gradient with the table's l2.
  static float Gradient(float sum, float weight, float l2) { return kL2 ? sum + l2 * weight : sum; }

  static void Sgd(const SegmentStep& step, const RowBlock& block, const float* sum) {
    const Segment& segment = *step.segment;
    const float rate = step.learning_rate, l2 = segment.l2;
    const std::uint32_t dim = Dim(step);
    for (std::size_t r = 0; r < block.count; ++r, sum += step.gradient_stride) {
      PrefetchAhead(step, block, r);
      float* __restrict w = reinterpret_cast<float*>(block.rows[r] + segment.weight_offset);
      const float* __restrict s = sum;
      for (std::uint32_t i = 0; i < dim; ++i) w[i] -= rate * Gradient(s[i], w[i], l2);
    }
  }

  static void AdaGrad(const SegmentStep& step, const RowBlock& block, const float* sum) {
    const Segment& segment = *step.segment;
    const float rate = step.learning_rate, l2 = segment.l2;
    const float epsilon = segment.optimizer.epsilon;
    const std::uint32_t dim = Dim(step);
    for (std::size_t r = 0; r < block.count; ++r, sum += step.gradient_stride) {
      PrefetchAhead(step, block, r);
      float* __restrict w = reinterpret_cast<float*>(block.rows[r] + segment.weight_offset);
      float* __restrict a = reinterpret_cast<float*>(block.rows[r] + segment.state_offset);
      const float* __restrict s = sum;
      for (std::uint32_t i = 0; i < dim; ++i) {
        const float g = Gradient(s[i], w[i], l2);
        const float accumulator = a[i] + g * g;
        a[i] = accumulator;
        w[i] -= (rate * g) / (std::sqrt(accumulator) + epsilon);
      }
    }
  }

  // Sum of squares in 8 lanes (element i in lane i mod 8), then the lanes in pairs.
  static float SquareSum(const float* __restrict s, const float* __restrict w, std::uint32_t dim,
                         float l2) {
    float lane[8] = {};
    std::uint32_t i = 0;
    for (; i + 8 <= dim; i += 8) {
      for (std::uint32_t j = 0; j < 8; ++j) {
        const float g = Gradient(s[i + j], w[i + j], l2);
        lane[j] += g * g;
      }
    }
    for (std::uint32_t j = 0; i + j < dim; ++j) {
      const float g = Gradient(s[i + j], w[i + j], l2);
      lane[j] += g * g;
    }
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
           ((lane[1] + lane[5]) + (lane[3] + lane[7]));
  }

  static void AdaGradRow(const SegmentStep& step, const RowBlock& block, const float* sum) {
    const Segment& segment = *step.segment;
    const float rate = step.learning_rate, l2 = segment.l2;
    const float epsilon = segment.optimizer.epsilon;
    const std::uint32_t dim = Dim(step);
    for (std::size_t r = 0; r < block.count; ++r, sum += step.gradient_stride) {
      PrefetchAhead(step, block, r);
      float* __restrict w = reinterpret_cast<float*>(block.rows[r] + segment.weight_offset);
      float* a = reinterpret_cast<float*>(block.rows[r] + segment.state_offset);
      const float* __restrict s = sum;
      const float accumulator = *a + SquareSum(s, w, dim, l2) / static_cast<float>(dim);
      *a = accumulator;
      const float scale = rate / (std::sqrt(accumulator) + epsilon);
      for (std::uint32_t i = 0; i < dim; ++i) w[i] -= scale * Gradient(s[i], w[i], l2);
    }
  }

  static void Adam(const SegmentStep& step, const RowBlock& block, const float* sum) {
    const Segment& segment = *step.segment;
    const SparseOptimizerSpec& spec = segment.optimizer;
    const float l2 = segment.l2, epsilon = spec.epsilon;
    const double beta1 = spec.beta1, beta2 = spec.beta2;
    const float keep1 = spec.beta1, take1 = static_cast<float>(1.0 - beta1);
    const float keep2 = spec.beta2, take2 = static_cast<float>(1.0 - beta2);
    const std::uint32_t dim = Dim(step);
    for (std::size_t r = 0; r < block.count; ++r, sum += step.gradient_stride) {
      PrefetchAhead(step, block, r);
      float* __restrict w = reinterpret_cast<float*>(block.rows[r] + segment.weight_offset);
      float* __restrict m = reinterpret_cast<float*>(block.rows[r] + segment.state_offset);
      float* __restrict v = m + dim;
      float* count = m + 2 * dim;
      const float* __restrict s = sum;
      const float steps = *count + 1.0f;
      *count = steps;
      const std::uint32_t t = static_cast<std::uint32_t>(steps);
      const float rate = static_cast<float>(step.learning_rate / (1.0 - IntegerPower(beta1, t)));
      const float root = static_cast<float>(1.0 / std::sqrt(1.0 - IntegerPower(beta2, t)));
      for (std::uint32_t i = 0; i < dim; ++i) {
        const float g = Gradient(s[i], w[i], l2);
        const float mean = keep1 * m[i] + take1 * g;
        const float square = keep2 * v[i] + take2 * (g * g);
        m[i] = mean;
        v[i] = square;
        w[i] -= (rate * mean) / (std::sqrt(square) * root + epsilon);
      }
    }
  }

  static void Ftrl(const SegmentStep& step, const RowBlock& block, const float* sum) {
    const Segment& segment = *step.segment;
    const SparseOptimizerSpec& spec = segment.optimizer;
    const float alpha = spec.alpha, beta = spec.beta, l1 = spec.l1, l2 = spec.l2;
    const std::uint32_t dim = Dim(step);
    for (std::size_t r = 0; r < block.count; ++r, sum += step.gradient_stride) {
      PrefetchAhead(step, block, r);
      float* __restrict w = reinterpret_cast<float*>(block.rows[r] + segment.weight_offset);
      float* __restrict z = reinterpret_cast<float*>(block.rows[r] + segment.state_offset);
      float* __restrict n = z + dim;
      const float* __restrict s = sum;
      for (std::uint32_t i = 0; i < dim; ++i) {
        const float g = s[i];
        const float squares = n[i] + g * g;
        const float root = std::sqrt(squares);
        const float sigma = (root - std::sqrt(n[i])) / alpha;
        const float linear = z[i] + (g - sigma * w[i]);
        n[i] = squares;
        z[i] = linear;
        const float shrunk = linear - std::copysign(l1, linear);
        const float weight = -shrunk / ((beta + root) / alpha + l2);
        w[i] = std::fabs(linear) <= l1 ? 0.0f : weight;
      }
    }
  }
};

using SegmentKernel = void (*)(const SegmentStep&, const RowBlock&, const float*);

template <std::uint32_t kDim, bool kL2>
SegmentKernel KernelFor(SparseOptimizerSpec::Type type) {
  using K = Kernels<kDim, kL2>;
  switch (type) {
    case SparseOptimizerSpec::Type::kSgd:
      return K::Sgd;
    case SparseOptimizerSpec::Type::kAdaGrad:
      return K::AdaGrad;
    case SparseOptimizerSpec::Type::kAdaGradRow:
      return K::AdaGradRow;
    case SparseOptimizerSpec::Type::kAdam:
      return K::Adam;
    case SparseOptimizerSpec::Type::kFtrl:
      return K::Ftrl;
  }
  return nullptr;
}

template <std::uint32_t kDim>
SegmentKernel KernelFor(const Segment& segment) {
  return segment.l2 == 0.0f ? KernelFor<kDim, false>(segment.optimizer.type)
                            : KernelFor<kDim, true>(segment.optimizer.type);
}

SegmentKernel KernelFor(const Segment& segment, Specialise specialise) {
  if (specialise == Specialise::kNo) return KernelFor<0>(segment);
  switch (segment.dim) {
    case 1:
      return KernelFor<1>(segment);
    case 8:
      return KernelFor<8>(segment);
    case 16:
      return KernelFor<16>(segment);
    case 32:
      return KernelFor<32>(segment);
    case 64:
      return KernelFor<64>(segment);
    default:
      return KernelFor<0>(segment);
  }
}

void ApplyStatistics(const RowSchema& schema, const ApplyStep& step, const RowBlock& block,
                     const StatisticsDelta* delta) {
  const std::uint64_t examples_seen = step.examples_seen;
  if (schema.expiry().spec().decays()) {
    for (std::size_t r = 0; r < block.count; ++r) {
      schema.expiry().Decay(block.rows[r] + schema.statistics_offset(), step.examples_before);
    }
  }
  for (std::size_t r = 0; r < block.count; ++r) {
    std::byte* const row = block.rows[r];
    float* show = reinterpret_cast<float*>(row + schema.show_offset());
    float* click = reinterpret_cast<float*>(row + schema.click_offset());
    *show += delta[r].show;
    *click += delta[r].click;
    std::memcpy(row + schema.last_seen_offset(), &examples_seen, sizeof(examples_seen));
  }
}

}  // namespace

void Accumulate(const RowSchema& schema, const MiniBatchRows& rows,
                const SparseGradients& gradients, std::size_t first, std::size_t last,
                float* gradient_sum, StatisticsDelta* delta, Specialise specialise) {
  TERRACE_CHECK(first <= last && last <= rows.rows());
  TERRACE_CHECK(rows.begin.size() == rows.rows() + 1);
  if (first == last) return;
  const std::size_t stride = schema.weight_floats();
  for (const Segment& segment : schema.segments()) {
    float* sum = gradient_sum + segment.weight_offset / sizeof(float);
    if (segment.name == kWideSegment) {
      TERRACE_CHECK(gradients.wide != nullptr);
      AccumulateWide(rows, gradients.wide, first, last, stride, sum);
    } else if (gradients.sums != nullptr) {
      CopySums(gradients, first, last, segment.dim, stride, sum);
    } else if (rows.value.empty()) {
      AccumulateEmbedding<false>(rows, gradients, first, last, segment.dim, stride, sum,
                                 specialise);
    } else {
      AccumulateEmbedding<true>(rows, gradients, first, last, segment.dim, stride, sum, specialise);
    }
  }
  AccumulateStatistics(rows, gradients, first, last, delta);
}

void Apply(const RowSchema& schema, const ApplyStep& step, std::span<std::byte* const> rows,
           const float* gradient_sum, const StatisticsDelta* delta, Specialise specialise) {
  const std::span<const Segment> segments = schema.segments();
  TERRACE_CHECK(step.learning_rate.size() == segments.size());
  const std::size_t row_bytes = schema.row_bytes();
  const std::size_t distance = std::clamp(kBytesAhead / row_bytes, kMinRowsAhead, kMaxRowsAhead);
  for (std::size_t r = 0; r < std::min(distance, rows.size()); ++r) {
    PrefetchWrite(rows[r], row_bytes);
  }
  const std::size_t stride = schema.weight_floats();
  for (std::size_t start = 0; start < rows.size(); start += kRowBlock) {
    RowBlock block;
    block.rows = rows.data() + start;
    block.available = rows.size() - start;
    block.count = std::min(kRowBlock, block.available);
    block.distance = distance;
    for (std::size_t s = 0; s < segments.size(); ++s) {
      const SegmentStep segment_step = {&segments[s], step.learning_rate[s], stride, row_bytes};
      KernelFor(segments[s], specialise)(
          segment_step, block,
          gradient_sum + start * stride + segments[s].weight_offset / sizeof(float));
      block.distance = 0;
    }
    ApplyStatistics(schema, step, block, delta + start);
  }
}

}  // namespace terrace
