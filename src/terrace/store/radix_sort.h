// RadixSort: sorts by some bits of a 64-bit number, in passes of 11 bits. Store batches are sorted
// by place or by hash on every call; a comparison sort would cost more than the copying of the
// rows.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace terrace {

// Sorts `items` by bits [low_bit, high_bit) of number(item); equal ones keep their order. `spare`
// is scratch of any size. Memory: one copy of the items.
template <typename T, typename Number>
void RadixSort(std::vector<T>* items, std::vector<T>* spare, int low_bit, int high_bit,
               Number number) {
  constexpr int kDigitBits = 11;
  constexpr std::size_t kDigits = std::size_t{1} << kDigitBits;
  if (items->size() < kDigits) {  // A pass would cost more than the comparisons.
    const std::uint64_t mask =
        high_bit >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << high_bit) - 1;
    std::stable_sort(items->begin(), items->end(), [&](const T& a, const T& b) {
      return ((number(a) & mask) >> low_bit) < ((number(b) & mask) >> low_bit);
    });
    return;
  }
  spare->resize(items->size());
  for (int shift = low_bit; shift < high_bit; shift += kDigitBits) {
    const std::uint64_t mask = (std::uint64_t{1} << std::min(kDigitBits, high_bit - shift)) - 1;
    std::array<std::size_t, kDigits> begin{};
    for (const T& item : *items) ++begin[(number(item) >> shift) & mask];
    std::size_t sum = 0;
    for (std::size_t& count : begin) {
      const std::size_t here = count;
      count = sum;
      sum += here;
    }
    for (const T& item : *items) (*spare)[begin[(number(item) >> shift) & mask]++] = item;
    items->swap(*spare);
  }
}

}  // namespace terrace
