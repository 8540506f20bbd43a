#include "terrace/model/gemm.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/model/network.h"

namespace terrace {
namespace {

struct Product {
  Transpose transpose_a, transpose_b;
  std::size_t m, n, k;
  std::size_t gap;  // Floats between lines.
  bool add;
};

std::vector<float> Random(std::uint64_t seed, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = 2 * UnitFloat(HashCombine(seed, i)) - 1;
  return values;
}

// The whole of C, gaps too, with every operand `shift` floats behind where malloc put it.
std::vector<float> Multiply(const Product& p, std::size_t shift) {
  const bool ta = p.transpose_a == Transpose::kYes, tb = p.transpose_b == Transpose::kYes;
  const std::size_t lda = (ta ? p.m : p.k) + p.gap, ldb = (tb ? p.k : p.n) + p.gap;
  const std::size_t ldc = p.n + p.gap;
  const auto place = [&](std::uint64_t seed, std::size_t count) {
    std::vector<float> values = Random(seed, count);
    values.insert(values.begin(), shift, 0.0f);
    return values;
  };
  const std::vector<float> a = place(1, (ta ? p.k : p.m) * lda);
  const std::vector<float> b = place(2, (tb ? p.n : p.k) * ldb);
  std::vector<float> c = place(3, p.m * ldc);
  Gemm(p.transpose_a, p.transpose_b, p.m, p.n, p.k, a.data() + shift, lda, b.data() + shift, ldb,
       p.add, c.data() + shift, ldc);
  return {c.begin() + static_cast<std::ptrdiff_t>(shift), c.end()};
}

void Check(const Product& p) {
  const bool ta = p.transpose_a == Transpose::kYes, tb = p.transpose_b == Transpose::kYes;
  const std::string what = std::to_string(p.m) + " x " + std::to_string(p.n) + " x " +
                           std::to_string(p.k) + " gap " + std::to_string(p.gap) +
                           (ta ? " TA" : "") + (tb ? " TB" : "") + (p.add ? " add" : "");
  const std::size_t lda = (ta ? p.m : p.k) + p.gap, ldb = (tb ? p.k : p.n) + p.gap;
  const std::size_t ldc = p.n + p.gap;
  const std::vector<float> a = Random(1, (ta ? p.k : p.m) * lda);
  const std::vector<float> b = Random(2, (tb ? p.n : p.k) * ldb);
  const std::vector<float> before = Random(3, p.m * ldc);
  const std::vector<float> c = Multiply(p, 0);
  for (std::size_t i = 0; i < p.m; ++i) {
    for (std::size_t j = 0; j < ldc; ++j) {
      if (j >= p.n) {
        ASSERT_EQ(c[i * ldc + j], before[i * ldc + j]) << what << ": wrote between lines";
        continue;
      }
      double sum = p.add ? before[i * ldc + j] : 0;
      for (std::size_t l = 0; l < p.k; ++l) {
        const double x = ta ? a[l * lda + i] : a[i * lda + l];
        sum += x * (tb ? b[j * ldb + l] : b[l * ldb + j]);
      }
      ASSERT_NEAR(sum, c[i * ldc + j], 2e-6 * (1 + static_cast<double>(p.k))) << what;
    }
  }
  for (const std::size_t shift : {0, 1, 5, 16}) ASSERT_EQ(c, Multiply(p, shift)) << what;
}

TEST(Gemm, IsRightAndDependsOnNoAddress) {
  PrepareComputeThread();
  const std::size_t sizes[][3] = {{1, 1, 1},      {1, 7, 300},   {300, 2, 1},    {12, 32, 256},
                                  {13, 33, 257},  {64, 32, 256}, {44, 100, 384}, {429, 64, 37},
                                  {61, 1024, 40}, {1024, 40, 61}};
  for (const auto& [m, n, k] : sizes) {
    for (const std::size_t gap : {0, 3}) {
      for (const bool add : {false, true}) {
        for (const auto& [ta, tb] :
             {std::pair{Transpose::kNo, Transpose::kNo}, std::pair{Transpose::kNo, Transpose::kYes},
              std::pair{Transpose::kYes, Transpose::kNo},
              std::pair{Transpose::kYes, Transpose::kYes}}) {
          ASSERT_NO_FATAL_FAILURE(Check({ta, tb, m, n, k, gap, add}));
        }
      }
    }
  }
}

TEST(Gemm, NaNAndInfinityStay) {
  PrepareComputeThread();
  for (const Transpose ta : {Transpose::kNo, Transpose::kYes}) {
    const std::size_t m = 20, n = 40, k = 30;
    std::vector<float> a(m * k, 1.0f), b(k * n, 0.0f), c(m * n);
    a[ta == Transpose::kYes ? 3 * m + 2 : 2 * k + 3] = NAN;
    Gemm(ta, Transpose::kNo, m, n, k, a.data(), ta == Transpose::kYes ? m : k, b.data(), n, false,
         c.data(), n);
    for (std::size_t i = 0; i < m; ++i) {
      for (std::size_t j = 0; j < n; ++j) EXPECT_EQ(std::isnan(c[i * n + j]), i == 2);
    }
  }
}

TEST(Gemm, BlocksCoverAllLines) {
  for (std::size_t examples = 1; examples < 3000; examples += 7) {
    std::size_t first = 0;
    while (first < examples) {
      const std::size_t count = GemmBlock(examples - first);
      ASSERT_GE(count, std::min<std::size_t>(examples, 128));
      ASSERT_LT(count, 384u);
      first += count;
    }
    ASSERT_EQ(first, examples);
  }
}

}  // namespace
}  // namespace terrace
