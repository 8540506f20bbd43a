#include "terrace/model/line_products.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"

namespace terrace {
namespace {

float Random(Rng* rng) { return static_cast<float>(rng->Unit() * 2 - 1); }

// A group of random lines, held by random examples.
struct Group {
  std::vector<std::vector<float>> lines;
  std::vector<std::uint32_t> begin, line, example;
  std::vector<float> value;
  std::vector<float> data;
  LineGroup group;

  void Finish() {
    for (const auto& each : lines) data.insert(data.end(), each.begin(), each.end());
    group.line_data = data.data();
    if (group.begin != nullptr) group.gradient = data.data();
  }
};

std::unique_ptr<Group> MakeGroup(std::size_t first_input, std::size_t width, std::size_t lines,
                                 std::size_t examples, bool shared, bool values, Rng* rng) {
  auto made = std::make_unique<Group>();
  for (std::size_t l = 0; l < lines; ++l) {
    made->lines.emplace_back();
    for (std::size_t k = 0; k < width; ++k) made->lines[l].push_back(Random(rng));
  }
  made->group.first_input = first_input;
  made->group.width = width;
  made->group.lines = lines;
  if (shared) {
    made->begin.push_back(0);
    for (std::size_t l = 0; l < lines; ++l) {
      for (std::uint64_t n = rng->Below(4) + (rng->Below(20) == 0 ? 30 : 0); n > 0; --n) {
        made->line.push_back(static_cast<std::uint32_t>(l));
        made->example.push_back(static_cast<std::uint32_t>(rng->Below(examples)));
        made->value.push_back(Random(rng));
      }
      made->begin.push_back(static_cast<std::uint32_t>(made->example.size()));
    }
    made->group.begin = made->begin.data();
    made->group.line = made->line.data();
    made->group.example = made->example.data();
    made->group.value = values ? made->value.data() : nullptr;
  }
  made->Finish();
  return made;
}

struct Case {
  std::size_t width;  // Of the layer's output.
  std::size_t examples;
  std::vector<std::size_t> dims;  // Of the groups of shared lines.
  std::size_t dense;
  bool values;
};

// Every product and gradient against sums in double over examples, one by one.
void Check(const Case& c, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<std::unique_ptr<Group>> made;
  std::size_t inputs = 0;
  for (const std::size_t dim : c.dims) {
    made.push_back(MakeGroup(inputs, dim, rng.Below(200), c.examples, true, c.values, &rng));
    inputs += dim;
  }
  if (c.dense > 0) {  // In the last place or in the first.
    auto dense = MakeGroup(inputs, c.dense, c.examples, c.examples, false, false, &rng);
    made.insert(seed % 2 == 0 ? made.begin() : made.end(), std::move(dense));
    inputs += c.dense;
  }
  std::vector<float> weight(inputs * c.width);
  for (float& w : weight) w = Random(&rng);

  std::vector<double> x(c.examples * inputs);  // Pooled, as a block.
  std::vector<LineGroup> groups;
  for (const auto& m : made) {
    const LineGroup& g = m->group;
    groups.push_back(g);
    for (std::size_t l = 0; l < g.lines; ++l) {
      const std::size_t first = g.begin ? g.begin[l] : l, last = g.begin ? g.begin[l + 1] : l + 1;
      for (std::size_t o = first; o < last; ++o) {
        const std::size_t e = g.begin ? g.example[o] : l;
        for (std::size_t k = 0; k < g.width; ++k) {
          x[e * inputs + g.first_input + k] +=
              (g.value ? static_cast<double>(g.value[o]) : 1.0) * m->lines[l][k];
        }
      }
    }
  }
  const std::size_t stride = ProductStride(c.width);
  ASSERT_GE(stride, c.width);
  std::vector<float> y(c.examples * stride, std::numeric_limits<float>::quiet_NaN());
  for (std::size_t column = 0; column < c.width; column += kProductColumns) {
    MultiplyLines(groups, weight.data(), inputs, c.width, column, c.examples, y.data(), stride);
  }
  for (std::size_t e = 0; e < c.examples; ++e) {
    for (std::size_t j = 0; j < c.width; ++j) {
      double sum = 0;
      for (std::size_t k = 0; k < inputs; ++k) sum += x[e * inputs + k] * weight[k * c.width + j];
      ASSERT_NEAR(y[e * stride + j], sum, 2e-4) << "example " << e << ", column " << j;
    }
  }

  for (std::size_t e = 0; e < c.examples; ++e) {
    for (std::size_t j = 0; j < c.width; ++j) y[e * stride + j] = Random(&rng);
  }
  std::vector<float> d_weight(weight.size(), std::numeric_limits<float>::quiet_NaN());
  for (const LineGroup& group : groups) {
    DifferentiateLines(group, weight.data(), c.width, y.data(), stride, d_weight.data());
  }
  for (std::size_t k = 0; k < inputs; ++k) {
    for (std::size_t j = 0; j < c.width; ++j) {
      double sum = 0;
      for (std::size_t e = 0; e < c.examples; ++e) sum += x[e * inputs + k] * y[e * stride + j];
      ASSERT_NEAR(d_weight[k * c.width + j], sum, 1e-3) << "input " << k << ", column " << j;
    }
  }
  for (const auto& m : made) {
    const LineGroup& g = m->group;
    if (g.begin == nullptr) continue;
    for (std::size_t l = 0; l < g.lines; ++l) {
      for (std::size_t k = 0; k < g.width; ++k) {
        double sum = 0;
        for (std::size_t o = g.begin[l]; o < g.begin[l + 1]; ++o) {
          for (std::size_t j = 0; j < c.width; ++j) {
            sum += (g.value ? static_cast<double>(g.value[o]) : 1.0) *
                   y[g.example[o] * stride + j] * weight[(g.first_input + k) * c.width + j];
          }
        }
        ASSERT_NEAR(g.gradient[l * g.width + k], sum, 1e-3) << "line " << l << ", input " << k;
      }
    }
  }
}

TEST(LineProducts, AreThoseOfTheExamples) {
  const Case cases[] = {
      {32, 100, {8, 8}, 5, false},         {33, 70, {1, 3, 20}, 1, true},
      {256, 150, {16, 16, 16}, 26, false}, {64, 130, {64, 33, 7}, 9, true},
      {300, 90, {4, 40}, 2, false},        {1, 40, {2}, 3, false},
      {70, 60, {12, 3}, 0, false},
  };
  std::uint64_t seed = 1;
  for (const Case& c : cases) {
    SCOPED_TRACE(seed);
    ASSERT_NO_FATAL_FAILURE(Check(c, seed++));
  }
}

// Which thread makes which columns must not matter.
TEST(LineProducts, ColumnsDoNotDependOnEachOther) {
  Rng rng(5);
  const std::size_t examples = 50, width = 4 * kProductColumns;
  const auto made = MakeGroup(0, 16, 120, examples, true, false, &rng);
  std::vector<float> weight(16 * width);
  for (float& w : weight) w = Random(&rng);
  const std::size_t stride = ProductStride(width);
  std::vector<float> forward(examples * stride), backward(examples * stride);
  for (std::size_t p = 0; p < 4; ++p) {
    MultiplyLines({&made->group, 1}, weight.data(), 16, width, p * kProductColumns, examples,
                  forward.data(), stride);
    MultiplyLines({&made->group, 1}, weight.data(), 16, width, (3 - p) * kProductColumns, examples,
                  backward.data(), stride);
  }
  EXPECT_EQ(std::memcmp(forward.data(), backward.data(), forward.size() * sizeof(float)), 0);
}

}  // namespace
}  // namespace terrace
