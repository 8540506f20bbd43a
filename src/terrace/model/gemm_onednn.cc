// This file never sees torch's include folder, which carries headers of another oneDNN.
#include <oneapi/dnnl/dnnl.h>

#include "terrace/base/check.h"
#include "terrace/model/gemm.h"

namespace terrace {

void Gemm(Transpose transpose_a, Transpose transpose_b, std::size_t m, std::size_t n, std::size_t k,
          const float* a, std::size_t lda, const float* b, std::size_t ldb, bool add, float* c,
          std::size_t ldc) {
  const auto size = [](std::size_t value) { return static_cast<dnnl_dim_t>(value); };
  const dnnl_status_t status = dnnl_sgemm(
      transpose_a == Transpose::kYes ? 'T' : 'N', transpose_b == Transpose::kYes ? 'T' : 'N',
      size(m), size(n), size(k), 1.0f, a, size(lda), b, size(ldb), add ? 1.0f : 0.0f, c, size(ldc));
  TERRACE_CHECK(status == dnnl_success);  // It refuses nothing but illegal shapes.
}

}  // namespace terrace
