#include "terrace/table/testing/random_minibatch.h"

#include <algorithm>
#include <cmath>

#include "terrace/base/rng.h"

namespace terrace {

RandomMiniBatch::RandomMiniBatch(const RandomMiniBatchOptions& given) : options(given) {
  Rng rng(options.seed);
  const auto number = [&rng] { return static_cast<float>(2.0 * rng.Unit() - 1.0); };
  constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::vector<std::uint32_t> local(options.rows, kNone);
  std::vector<std::uint32_t> of_example, of_slot;
  key_begin.push_back(0);
  for (std::uint32_t e = 0; e < options.examples; ++e) {
    for (std::uint32_t s = 0; s < options.slots; ++s) {
      const std::uint64_t keys =
          options.exactly ? options.keys_per_slot : rng.Below(2 * options.keys_per_slot + 1);
      for (std::uint64_t k = 0; k < keys; ++k) {
        const double draw = std::pow(rng.Unit(), options.skew) * options.rows;
        const auto row = std::min(static_cast<std::uint32_t>(draw), options.rows - 1);
        if (local[row] == kNone) {
          local[row] = static_cast<std::uint32_t>(row_number.size());
          row_number.push_back(row);
        }
        row_index.push_back(local[row]);
        of_example.push_back(e);
        of_slot.push_back(s);
        if (options.values) value.push_back(number());
      }
      key_begin.push_back(static_cast<std::uint32_t>(row_index.size()));
    }
  }
  begin.assign(row_number.size() + 1, 0);
  for (std::uint32_t r : row_index) ++begin[r + 1];
  for (std::size_t r = 0; r < row_number.size(); ++r) begin[r + 1] += begin[r];
  std::vector<std::uint32_t> next(begin.begin(), begin.end() - 1);
  example.resize(row_index.size());
  input_offset.resize(row_index.size());
  row_value.resize(value.size());
  for (std::size_t o = 0; o < row_index.size(); ++o) {
    const std::uint32_t place = next[row_index[o]]++;
    example[place] = of_example[o];
    input_offset[place] = of_slot[o] * options.dim;
    if (options.values) row_value[place] = value[o];
  }
  gradient.resize(options.examples * stride());
  for (float& g : gradient) g = 0.01f * number();
  for (std::uint32_t e = 0; e < options.examples; ++e) {
    wide.push_back(0.01f * number());
    label.push_back(rng.Unit() < 0.3 ? 1.0f : 0.0f);
    if (options.weights) weight.push_back(static_cast<float>(0.5 + rng.Unit()));
  }
}

MiniBatchRows RandomMiniBatch::Rows(const std::vector<std::byte*>& rows) const {
  MiniBatchRows result;
  result.row = rows;
  result.begin = begin;
  result.example = example;
  result.input_offset = input_offset;
  result.value = row_value;
  return result;
}

SparseGradients RandomMiniBatch::Gradients() const {
  SparseGradients result;
  result.lines = gradient.data();
  result.line_stride = stride();
  result.wide = wide.data();
  result.label = label.data();
  result.weight = weight.empty() ? nullptr : weight.data();
  return result;
}

}  // namespace terrace
