#include "terrace/table/gather.h"

#include <algorithm>

#include "terrace/base/check.h"
#include "terrace/base/prefetch.h"

namespace terrace {
namespace {

constexpr std::size_t kSlotsAhead =
    24;  // Of the table: rows from memory arrive within about so many.

// One call's constants.
struct GatherPlan {
  const PooledLookup* lookup = nullptr;
  std::size_t weight_bytes = 0;        // Of a row: what is read.
  std::uint32_t embedding_offset = 0;  // Bytes.
  std::uint32_t dim = 0;               // 0: no embedding segment
  std::uint32_t wide_offset = 0;       // Bytes.
  std::size_t examples_ahead = 0;
};

[[gnu::always_inline]] inline void PrefetchSlot(const GatherPlan& plan, std::size_t cell) {
  const PooledLookup& lookup = *plan.lookup;
  const std::size_t end = lookup.key_begin[cell + 1] - lookup.first_occurrence;
  for (std::size_t o = lookup.key_begin[cell] - lookup.first_occurrence; o < end; ++o) {
    PrefetchRead(lookup.row[lookup.row_index[o]], plan.weight_bytes);
  }
}

// kDim as in sparse_update.cc.
template <std::uint32_t kDim, bool kValues>
inline void PoolEmbedding(const GatherPlan& plan, std::size_t begin, std::size_t end, bool mean,
                          float* __restrict out) {
  const PooledLookup& lookup = *plan.lookup;
  const std::uint32_t dim = kDim == 0 ? plan.dim : kDim;
  bool empty = true;
  for (std::size_t o = begin; o < end; ++o) {
    const std::byte* const row = lookup.row[lookup.row_index[o]];
    if (row == nullptr) continue;
    const float* __restrict w = reinterpret_cast<const float*>(row + plan.embedding_offset);
    const float value = kValues ? lookup.value[o] : 1.0f;
    if (empty) {
      for (std::uint32_t i = 0; i < dim; ++i) out[i] = kValues ? value * w[i] : w[i];
      empty = false;
    } else {
      for (std::uint32_t i = 0; i < dim; ++i) out[i] += kValues ? value * w[i] : w[i];
    }
  }
  if (empty) {
    for (std::uint32_t i = 0; i < dim; ++i) out[i] = 0.0f;
  } else if (mean) {
    const float count = static_cast<float>(end - begin);
    for (std::uint32_t i = 0; i < dim; ++i) out[i] /= count;
  }
}

inline float SumWide(const GatherPlan& plan, std::size_t begin, std::size_t end, bool mean) {
  const PooledLookup& lookup = *plan.lookup;
  float sum = 0.0f;
  bool empty = true;
  for (std::size_t o = begin; o < end; ++o) {
    const std::byte* const row = lookup.row[lookup.row_index[o]];
    if (row == nullptr) continue;
    const float w = *reinterpret_cast<const float*>(row + plan.wide_offset);
    const float term = lookup.value.empty() ? w : lookup.value[o] * w;
    sum = empty ? term : sum + term;
    empty = false;
  }
  return mean && !empty ? sum / static_cast<float>(end - begin) : sum;
}

template <std::uint32_t kDim, bool kValues>
void Gather(const GatherPlan& plan, std::size_t first, std::size_t last, float* block,
            std::size_t stride, float* wide) {
  const PooledLookup& lookup = *plan.lookup;
  for (std::size_t e = first; e < last; ++e) {
    float* const line = plan.dim == 0 ? nullptr : block + (e - first) * stride;
    const std::size_t cells = e * lookup.data_slots;
    const std::size_t ahead = e + plan.examples_ahead;
    for (const PooledSlot& slot : lookup.slots) {
      if (ahead < last) PrefetchSlot(plan, ahead * lookup.data_slots + slot.slot);
      const std::size_t begin = lookup.key_begin[cells + slot.slot] - lookup.first_occurrence;
      const std::size_t end = lookup.key_begin[cells + slot.slot + 1] - lookup.first_occurrence;
      if (plan.dim != 0) {
        PoolEmbedding<kDim, kValues>(plan, begin, end, slot.mean, line + slot.input_offset);
      }
      if (wide != nullptr && begin != end) wide[e - first] += SumWide(plan, begin, end, slot.mean);
    }
  }
}

template <bool kValues>
void Gather(const GatherPlan& plan, std::size_t first, std::size_t last, float* block,
            std::size_t stride, float* wide, Specialise specialise) {
  switch (specialise == Specialise::kYes ? plan.dim : 0) {
    case 8:
      return Gather<8, kValues>(plan, first, last, block, stride, wide);
    case 16:
      return Gather<16, kValues>(plan, first, last, block, stride, wide);
    case 32:
      return Gather<32, kValues>(plan, first, last, block, stride, wide);
    case 64:
      return Gather<64, kValues>(plan, first, last, block, stride, wide);
    default:
      return Gather<0, kValues>(plan, first, last, block, stride, wide);
  }
}

}  // namespace

void GatherPooled(const RowSchema& schema, const PooledLookup& lookup, std::size_t first,
                  std::size_t last, float* block, std::size_t stride, float* wide,
                  Specialise specialise) {
  TERRACE_CHECK(first <= last && last * lookup.data_slots < lookup.key_begin.size());
  if (first == last || lookup.slots.empty()) return;
  GatherPlan plan;
  plan.lookup = &lookup;
  plan.weight_bytes = schema.weight_floats() * sizeof(float);
  if (const Segment* segment = schema.FindSegment(kEmbeddingSegment)) {
    plan.embedding_offset = segment->weight_offset;
    if (block != nullptr) plan.dim = segment->dim;
  }
  if (const Segment* segment = schema.FindSegment(kWideSegment)) {
    plan.wide_offset = segment->weight_offset;
  } else {
    wide = nullptr;
  }
  plan.examples_ahead = (kSlotsAhead + lookup.slots.size() - 1) / lookup.slots.size();
  for (std::size_t e = first; e < std::min(last, first + plan.examples_ahead); ++e) {
    for (const PooledSlot& slot : lookup.slots) {
      PrefetchSlot(plan, e * lookup.data_slots + slot.slot);
    }
  }
  if (lookup.value.empty()) {
    Gather<false>(plan, first, last, block, stride, wide, specialise);
  } else {
    Gather<true>(plan, first, last, block, stride, wide, specialise);
  }
}

}  // namespace terrace
