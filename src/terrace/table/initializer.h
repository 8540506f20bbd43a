// Initial weights by their InitializerSpec: pure functions of a 64-bit state and the element's
// index, in arithmetic of our own, so that no version of a C library decides a weight.
// Threads: free functions.
#pragma once

#include <cstdint>

#include "terrace/table/row_schema.h"

namespace terrace {

// Fills weight[0, dim). Elements 2i and 2i + 1 come from one 64-bit hash of (state, i):
// docs/formats /row.md has the formula.
void FillInitialWeights(const InitializerSpec& spec, std::uint64_t state, std::uint32_t dim,
                        float* weight);

// The standard normal number whose cumulative probability is (2k + 1) / 2^25. REQUIRES: k < 2^24.
float NormalFromBits(std::uint32_t k);

}  // namespace terrace
