// Gemm: single-precision matrix product on the calling thread, by oneDNN. Results are a function of
// shapes and data alone: neither of addresses nor of the run. Threads: any number at once; each has
// called PrepareComputeThread(), or oneDNN would start threads of its own.
#pragma once

#include <cstddef>

namespace terrace {

enum class Transpose { kNo, kYes };

// Row-major C (m, n) = op(A) op(B) + (add ? C : 0), op(A) is (m, k), op(B) is (k, n); lda, ldb, ldc
// are floats from one stored line to the next. REQUIRES: m, n, k >= 1; C overlaps neither A nor B.
void Gemm(Transpose transpose_a, Transpose transpose_b, std::size_t m, std::size_t n, std::size_t k,
          const float* a, std::size_t lda, const float* b, std::size_t ldb, bool add, float* c,
          std::size_t ldc);

}  // namespace terrace
