// The optimum that knows the future (Belady 1966), for eviction_bench. Threads: one.
#pragma once

#include <cstdint>

#include "terrace/pipeline/testing/eviction_trace.h"

namespace terrace {

// The row that is wanted last goes. It need not keep what earlier batches pin, so that no policy
// can be better.
Score RunOptimum(const Trace& trace, std::uint64_t rows);

}  // namespace terrace
