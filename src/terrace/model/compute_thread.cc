#include "terrace/base/thread.h"
#include "terrace/model/network.h"

// Declared by <omp.h>, which this compiler ships only beside its own OpenMP runtime; the runtime
// itself comes with oneDNN, and torch brings one of the same interface.
extern "C" void omp_set_num_threads(int count);

namespace terrace {

void PrepareComputeThread() {
  FlushDenormals();
  // OpenMP keeps this number per thread. At one, neither oneDNN nor torch opens a parallel region,
  // so no pool of OpenMP threads is ever made.
  omp_set_num_threads(1);
}

}  // namespace terrace
