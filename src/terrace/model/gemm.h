// Gemm: single-precision matrix product on the calling thread, by oneDNN. Results are a function of
// shapes, strides and data alone: neither of addresses nor of the run. Threads: any number at once;
// each has called PrepareComputeThread(), or oneDNN would start threads of its own. A thread keeps
// the kernels of the shapes it has met and one buffer of working memory until it ends: the first
// call with a shape allocates, later ones do not.
#pragma once

#include <cstddef>

namespace terrace {

enum class Transpose { kNo, kYes };

// Row-major C (m, n) = op(A) op(B) + (add ? C : 0), op(A) is (m, k), op(B) is (k, n); lda, ldb, ldc
// are floats from one stored line to the next. Fastest without gaps between lines. REQUIRES: m, n,
// k >= 1; C overlaps neither A nor B.
void Gemm(Transpose transpose_a, Transpose transpose_b, std::size_t m, std::size_t n, std::size_t k,
          const float* a, std::size_t lda, const float* b, std::size_t ldb, bool add, float* c,
          std::size_t ldc);

// The case of Gemm with A transposed, by our own kernel.
void GemmTransposedA(std::size_t m, std::size_t n, std::size_t k, const float* a, std::size_t lda,
                     const float* b, std::size_t ldb, bool add, float* c, std::size_t ldc);

// Lines of the next block of a tall matrix with `left` lines to go. A layer works block by block:
// what one product has written is still in the cache when the next step reads it.
constexpr std::size_t GemmBlock(std::size_t left) {
  constexpr std::size_t kLines = 256;
  return left < kLines + kLines / 2 ? left : kLines;
}

}  // namespace terrace
