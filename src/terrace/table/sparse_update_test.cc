#include "terrace/table/sparse_update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/table/testing/random_minibatch.h"

namespace terrace {
namespace {

using Type = SparseOptimizerSpec::Type;
constexpr Type kAllTypes[] = {Type::kSgd, Type::kAdaGrad, Type::kAdaGradRow, Type::kAdam,
                              Type::kFtrl};

SegmentSpec Spec(const char* name, std::uint32_t dim, Type type, float l2 = 0.0f) {
  SegmentSpec spec;
  spec.name = name;
  spec.dim = dim;
  spec.optimizer.type = type;
  spec.optimizer.l1 = type == Type::kFtrl ? 0.002f : 0.0f;
  spec.optimizer.l2 = type == Type::kFtrl ? 0.1f : 0.0f;
  if (type == Type::kFtrl) {
    spec.initializer.type = InitializerSpec::Type::kZeros;
  } else {
    spec.initializer.scale = 0.1f;
    spec.l2 = l2;
  }
  return spec;
}

RowSchema Make(std::vector<SegmentSpec> segments) {
  Result<RowSchema> schema = RowSchema::Create("main", std::move(segments));
  EXPECT_TRUE(schema.ok()) << schema.status().ToString();
  return std::move(schema).value();
}

// Rows 0..count of a table, as they start.
struct Rows {
  Rows(const RowSchema& schema, std::size_t count) : bytes(count * schema.row_bytes()) {
    for (std::size_t r = 0; r < count; ++r) {
      row.push_back(bytes.data() + r * schema.row_bytes());
      schema.InitializeRow(5, r, row.back());
    }
  }
  std::vector<std::byte*> Of(const RandomMiniBatch& batch) const {
    std::vector<std::byte*> result;
    for (std::uint32_t r : batch.row_number) result.push_back(row[r]);
    return result;
  }
  std::vector<std::byte> bytes;
  std::vector<std::byte*> row;
};

struct Sums {
  Sums(const RowSchema& schema, const MiniBatchRows& rows, const SparseGradients& gradients,
       std::vector<std::size_t> cuts = {}, Specialise specialise = Specialise::kYes)
      : gradient(rows.rows() * schema.weight_floats(), std::nanf("")), delta(rows.rows()) {
    cuts.push_back(rows.rows());
    std::size_t first = 0;
    for (std::size_t last : cuts) {
      Accumulate(schema, rows, gradients, first, last,
                 gradient.data() + first * schema.weight_floats(), delta.data() + first,
                 specialise);
      first = last;
    }
  }
  std::vector<float> gradient;
  std::vector<StatisticsDelta> delta;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

// One segment's weights and state in double, by the formulas of docs/optimizers.md.
struct Reference {
  Reference(const SegmentSpec& segment, const float* weight)
      : spec(segment), w(weight, weight + segment.dim), a(segment.dim), b(segment.dim) {
    for (double& x : a) x = IsAdaGrad() ? segment.optimizer.initial_accumulator : 0.0;
  }
  bool IsAdaGrad() const {
    return spec.optimizer.type == Type::kAdaGrad || spec.optimizer.type == Type::kAdaGradRow;
  }

  void Step(double lr, const float* sum) {
    const SparseOptimizerSpec& o = spec.optimizer;
    ++steps;
    double squares = 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = sum[i] + spec.l2 * w[i];
      squares += g * g;
    }
    if (o.type == Type::kAdaGradRow) a[0] += squares / static_cast<double>(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = sum[i] + spec.l2 * w[i];
      switch (o.type) {
        case Type::kSgd:
          w[i] -= lr * g;
          break;
        case Type::kAdaGrad:
          a[i] += g * g;
          w[i] -= lr * g / (std::sqrt(a[i]) + o.epsilon);
          break;
        case Type::kAdaGradRow:
          w[i] -= lr * g / (std::sqrt(a[0]) + o.epsilon);
          break;
        case Type::kAdam: {
          a[i] = o.beta1 * a[i] + (1.0 - o.beta1) * g;
          b[i] = o.beta2 * b[i] + (1.0 - o.beta2) * g * g;
          const double mean = a[i] / (1.0 - std::pow(static_cast<double>(o.beta1), steps));
          const double square = b[i] / (1.0 - std::pow(static_cast<double>(o.beta2), steps));
          w[i] -= lr * mean / (std::sqrt(square) + o.epsilon);
          break;
        }
        case Type::kFtrl: {
          const double sigma = (std::sqrt(b[i] + g * g) - std::sqrt(b[i])) / o.alpha;
          a[i] += g - sigma * w[i];
          b[i] += g * g;
          const double sign = a[i] < 0 ? -1.0 : 1.0;
          w[i] = std::fabs(a[i]) <= o.l1
                     ? 0.0
                     : -(a[i] - sign * o.l1) / ((o.beta + std::sqrt(b[i])) / o.alpha + o.l2);
          break;
        }
      }
    }
  }

  SegmentSpec spec;
  std::vector<double> w, a, b;  // a: accumulator, m or z; b: v or n
  double largest = 0;
  int steps = 0;
};

// Relative to the larger of the value and a tenth of the largest weight that the segment has had:
// where a weight passes through zero, the rounding of what it was remains.
void ExpectClose(Reference& reference, const float* weight, const std::string& what) {
  for (double w : reference.w) reference.largest = std::max(reference.largest, std::fabs(w));
  for (std::size_t i = 0; i < reference.w.size(); ++i) {
    const double scale = std::max(std::fabs(reference.w[i]), 0.1 * reference.largest);
    ASSERT_LE(std::fabs(weight[i] - reference.w[i]), 1e-5 * scale) << what << " element " << i;
  }
}

TEST(ApplyTest, FollowsTheFormulasInDouble) {
  for (Type type : kAllTypes) {
    for (std::uint32_t dim : {1u, 3u, 8u, 13u, 16u, 32u, 64u}) {
      for (float l2 : {0.0f, 0.01f}) {
        SegmentSpec spec = Spec("embedding", dim, type, l2);
        spec.optimizer.initial_accumulator = dim == 3 ? 0.1f : 0.0f;
        const RowSchema schema = Make({spec});
        Rows rows(schema, 1);
        Reference reference(spec, reinterpret_cast<const float*>(rows.row[0]));
        Rng rng(dim + 100 * static_cast<int>(type));
        std::vector<float> sum(dim);
        for (int step = 1; step <= 200; ++step) {
          // Drifting gradients: weights go somewhere.
          for (float& g : sum) g = static_cast<float>(0.1 * (rng.Unit() - 0.3));
          const float lr = 0.05f / (1.0f + 0.01f * static_cast<float>(step));
          const StatisticsDelta delta;
          Apply(schema, {{&lr, 1}, 1}, rows.row, sum.data(), &delta);
          reference.Step(lr, sum.data());
          ExpectClose(reference, reinterpret_cast<const float*>(rows.row[0]),
                      schema.ToText() + "step " + std::to_string(step));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(ApplyTest, ReadsAccumulatorsAfterAddingAndEpsilonOutsideTheRoot) {
  SegmentSpec spec = Spec("embedding", 1, Type::kAdaGrad);
  spec.optimizer.epsilon = 0.5f;
  spec.initializer = {InitializerSpec::Type::kConstant, 1.0f};
  const RowSchema schema = Make({spec});
  Rows rows(schema, 1);
  const float lr = 0.5f, gradient = 2.0f;
  const StatisticsDelta delta;
  Apply(schema, {{&lr, 1}, 1}, rows.row, &gradient, &delta);
  const float* row = reinterpret_cast<const float*>(rows.row[0]);
  EXPECT_EQ(row[1], 4.0f);
  EXPECT_EQ(row[0], 1.0f - 0.5f * 2.0f / 2.5f);
}

// With the largest rate, initial weights, l2 and gradients that a job may have.
TEST(ApplyTest, AccumulatorsOfAdaGradStayFinite) {
  for (const Type type : {Type::kAdaGrad, Type::kAdaGradRow}) {
    for (const float initial : {1e6f, -1e6f}) {
      for (const int same : {1, 7, 1000}) {  // Gradients of one sign after each other.
        SegmentSpec spec = Spec("embedding", 8, type, 1e6f);
        spec.initializer = {InitializerSpec::Type::kConstant, initial};
        const RowSchema schema = Make({spec});
        Rows rows(schema, 1);
        const float lr = 1e6f;
        const StatisticsDelta delta;
        const float* const row = reinterpret_cast<const float*>(rows.row[0]);
        for (int step = 0; step < 5000; ++step) {
          std::vector<float> sum(8, step / same % 2 == 0 ? 1e15f : -1e15f);
          sum[0] = 1.0f;
          Apply(schema, {{&lr, 1}, 1}, rows.row, sum.data(), &delta);
          for (int i = 0; i < 8; ++i) ASSERT_LE(std::fabs(spec.l2 * row[i]), 1.1e15f) << step;
        }
        const int accumulators = type == Type::kAdaGrad ? 8 : 1;
        for (int i = 8; i < 8 + accumulators; ++i) {
          EXPECT_LT(row[i], 5000 * 5e30f) << schema.ToText();
        }
      }
    }
  }
}

TEST(ApplyTest, FtrlKeepsSmallWeightsAtZero) {
  SegmentSpec spec = Spec("wide", 1, Type::kFtrl);
  spec.optimizer.l1 = 1.0f;
  const RowSchema schema = Make({spec});
  Rows rows(schema, 1);
  const float lr = 123.0f;  // Not read.
  const StatisticsDelta delta;
  const float* row = reinterpret_cast<const float*>(rows.row[0]);
  for (float gradient : {0.5f, 0.5f, -2.0f}) {
    Apply(schema, {{&lr, 1}, 1}, rows.row, &gradient, &delta);
    EXPECT_EQ(row[0], 0.0f);
  }
  EXPECT_EQ(row[1], -1.0f);
  EXPECT_EQ(row[2], 4.5f);
  const float gradient = -2.0f;
  Apply(schema, {{&lr, 1}, 1}, rows.row, &gradient, &delta);
  EXPECT_GT(row[0], 0.0f);
}

TEST(ApplyTest, AdamCountsTheStepsOfEachRow) {
  const RowSchema schema = Make({Spec("embedding", 8, Type::kAdam)});
  Rows rows(schema, 2);
  const std::vector<float> sum(16, 0.25f);
  const std::vector<StatisticsDelta> delta(2);
  const float lr = 0.01f;
  const std::span<std::byte* const> all(rows.row);
  for (int i = 0; i < 5; ++i) {
    Apply(schema, {{&lr, 1}, 1}, all.first(1), sum.data(), delta.data());
  }
  Apply(schema, {{&lr, 1}, 1}, all, sum.data(), delta.data());
  EXPECT_EQ(reinterpret_cast<const float*>(rows.row[0])[24], 6.0f);
  EXPECT_EQ(reinterpret_cast<const float*>(rows.row[1])[24], 1.0f);
}

TEST(ApplyTest, SpecialisedAndGeneralPathsGiveTheSameBits) {
  for (Type type : kAllTypes) {
    for (std::uint32_t dim : {1u, 8u, 16u, 32u, 64u}) {
      for (float l2 : {0.0f, 0.01f}) {
        const RowSchema schema =
            Make({Spec("embedding", dim, type, l2), Spec("wide", 1, Type::kFtrl)});
        RandomMiniBatchOptions options;
        options.dim = dim;
        options.examples = 200;
        options.rows = 150;
        options.values = l2 != 0.0f;
        Rows fast(schema, options.rows), slow(schema, options.rows);
        for (int step = 0; step < 5; ++step) {
          options.seed = static_cast<std::uint64_t>(step);
          const RandomMiniBatch batch(options);
          const auto train = [&](const Rows& rows, Specialise specialise) {
            const std::vector<std::byte*> of_batch = rows.Of(batch);
            const Sums sums(schema, batch.Rows(of_batch), batch.Gradients(), {}, specialise);
            const float lr[] = {0.05f, 0.1f};
            Apply(schema, {lr, 7}, of_batch, sums.gradient.data(), sums.delta.data(), specialise);
            return sums.gradient;
          };
          ASSERT_TRUE(SameBits(train(fast, Specialise::kYes), train(slow, Specialise::kNo)));
        }
        ASSERT_EQ(fast.bytes, slow.bytes) << schema.ToText();
        ASSERT_NE(fast.bytes, Rows(schema, options.rows).bytes);
      }
    }
  }
}

TEST(ApplyTest, AnySplitGivesTheSameBits) {
  for (Type type : kAllTypes) {
    const RowSchema schema = Make({Spec("embedding", 16, type), Spec("wide", 1, Type::kAdaGrad)});
    RandomMiniBatchOptions options;
    options.dim = 16;
    options.examples = 300;
    options.rows = 400;
    options.weights = true;
    const RandomMiniBatch batch(options);
    const std::size_t touched = batch.row_number.size();
    ASSERT_GT(touched, 200u);
    Rows whole(schema, options.rows);
    const std::vector<std::byte*> whole_rows = whole.Of(batch);
    const Sums sums(schema, batch.Rows(whole_rows), batch.Gradients());
    const float lr[] = {0.05f, 0.1f};
    Apply(schema, {lr, 300}, whole_rows, sums.gradient.data(), sums.delta.data());
    Rng rng(17);
    for (int trial = 0; trial < 20; ++trial) {
      std::vector<std::size_t> cuts;
      for (std::size_t cut = rng.Below(60); cut < touched; cut += rng.Below(trial * 10 + 2)) {
        cuts.push_back(cut);
      }
      Rows parts(schema, options.rows);
      const std::vector<std::byte*> rows = parts.Of(batch);
      const Sums split(schema, batch.Rows(rows), batch.Gradients(), cuts);
      ASSERT_TRUE(SameBits(split.gradient, sums.gradient));
      cuts.push_back(touched);
      std::size_t first = 0;
      for (std::size_t last : cuts) {
        Apply(schema, {lr, 300}, std::span(rows).subspan(first, last - first),
              split.gradient.data() + first * schema.weight_floats(), split.delta.data() + first);
        first = last;
      }
      ASSERT_EQ(parts.bytes, whole.bytes);
    }
  }
}

TEST(ApplyTest, AddsStatistics) {
  const RowSchema schema = Make({Spec("embedding", 5, Type::kAdaGrad)});
  Rows rows(schema, 2);
  const std::vector<float> sum(10, 0.0f);
  const std::vector<StatisticsDelta> delta = {{3.0f, 1.0f}, {0.5f, 0.0f}};
  const float lr = 0.1f;
  Apply(schema, {{&lr, 1}, 512}, rows.row, sum.data(), delta.data());
  Apply(schema, {{&lr, 1}, 1024}, std::span(rows.row).first(1), sum.data(), delta.data());
  const auto read = [&](int r, float* show, float* click) {
    std::uint64_t seen = 0;
    std::memcpy(show, rows.row[r] + schema.show_offset(), 4);
    std::memcpy(click, rows.row[r] + schema.click_offset(), 4);
    std::memcpy(&seen, rows.row[r] + schema.last_seen_offset(), 8);
    return seen;
  };
  float show = 0, click = 0;
  EXPECT_EQ(read(0, &show, &click), 1024u);
  EXPECT_EQ(show, 6.0f);
  EXPECT_EQ(click, 2.0f);
  EXPECT_EQ(read(1, &show, &click), 512u);
  EXPECT_EQ(show, 0.5f);
  EXPECT_EQ(click, 0.0f);
}

TEST(AccumulateTest, SumsInTheOrderOfOccurrences) {
  for (std::uint32_t dim : {1u, 5u, 8u, 16u, 32u, 64u, 65u}) {
    for (const bool values : {false, true}) {
      const RowSchema schema =
          Make({Spec("wide", 1, Type::kSgd), Spec("embedding", dim, Type::kSgd)});
      RandomMiniBatchOptions options;
      options.seed = dim;
      options.dim = dim;
      options.values = values;
      options.weights = values;
      const RandomMiniBatch batch(options);
      const Rows rows(schema, options.rows);
      const std::vector<std::byte*> of_batch = rows.Of(batch);
      const Sums sums(schema, batch.Rows(of_batch), batch.Gradients());
      // Walks the examples, their slots and their keys, and knows no row order.
      std::vector<float> expected(sums.gradient.size());
      std::vector<StatisticsDelta> delta(sums.delta.size());
      std::vector<bool> started(delta.size());
      for (std::uint32_t e = 0; e < options.examples; ++e) {
        std::vector<bool> counted(delta.size());
        for (std::uint32_t s = 0; s < options.slots; ++s) {
          const std::uint32_t cell = e * options.slots + s;
          for (std::uint32_t o = batch.key_begin[cell]; o < batch.key_begin[cell + 1]; ++o) {
            const std::uint32_t r = batch.row_index[o];
            const float value = values ? batch.value[o] : 1.0f;
            const auto add = [&](std::uint32_t i, float g) {
              float& to = expected[r * (dim + 1) + i];
              to = started[r] ? to + value * g : value * g;
            };
            add(0, batch.wide[e]);
            const float* const line = &batch.gradient[e * batch.stride()];
            for (std::uint32_t i = 0; i < dim; ++i) add(1 + i, line[s * dim + i]);
            started[r] = true;
            const float weight = values ? batch.weight[e] : 1.0f;
            if (!counted[r]) delta[r].show += weight;
            if (!counted[r]) delta[r].click += weight * batch.label[e];
            counted[r] = true;
          }
        }
      }
      EXPECT_TRUE(SameBits(sums.gradient, expected));
      for (std::size_t r = 0; r < delta.size(); ++r) {
        EXPECT_EQ(sums.delta[r].show, delta[r].show);
        EXPECT_EQ(sums.delta[r].click, delta[r].click);
      }
    }
  }
}

TEST(AccumulateTest, CountsAnExampleOnceAndItsGradientsEach) {
  const RowSchema schema = Make({Spec("embedding", 2, Type::kSgd), Spec("wide", 1, Type::kSgd)});
  // One row: twice in slot 0 and once in slot 1 of example 0, once in example 1.
  const std::vector<std::byte*> row = {nullptr};
  const std::vector<std::uint32_t> begin = {0, 4}, example = {0, 0, 0, 1}, offset = {0, 0, 2, 0};
  const float lines[] = {1, 2, 3, 4, /**/ 10, 20, 30, 40};
  const float wide[] = {0.5f, 0.25f}, label[] = {1, 0}, weight[] = {2, 3};
  const MiniBatchRows rows = {row, begin, example, offset, {}};
  const SparseGradients gradients = {lines, 4, wide, label, weight};
  const Sums sums(schema, rows, gradients);
  EXPECT_EQ(sums.gradient, (std::vector<float>{1 + 1 + 3 + 10, 2 + 2 + 4 + 20, 1.75f}));
  EXPECT_EQ(sums.delta[0].show, 5.0f);
  EXPECT_EQ(sums.delta[0].click, 2.0f);
}

TEST(AccumulateTest, StartsFromTheFirstGradientAndZeroesRowsWithoutAny) {
  const RowSchema schema = Make({Spec("embedding", 8, Type::kSgd), Spec("wide", 1, Type::kSgd)});
  const std::vector<std::byte*> row(2);
  const std::vector<std::uint32_t> begin = {0, 1, 1}, example = {0}, offset = {0};
  const std::vector<float> line(8, -0.0f);
  const float wide = -0.0f, label = 1;
  const Sums sums(schema, {row, begin, example, offset, {}},
                  {line.data(), 8, &wide, &label, nullptr});
  for (int i = 0; i < 9; ++i) {
    EXPECT_TRUE(std::signbit(sums.gradient[i])) << i;  // 0 + -0 would be +0.
    EXPECT_FALSE(std::signbit(sums.gradient[9 + i]));
    EXPECT_EQ(sums.gradient[9 + i], 0.0f);
  }
  EXPECT_EQ(sums.delta[1].show, 0.0f);
}

}  // namespace
}  // namespace terrace
