// RadixSort: sorts by some bits of a 64-bit number, in passes of 11 bits. Store batches are sorted
// by place or by hash on every call; a comparison sort would cost more than the copying of the
// rows. SortSpread does no more of it than numbers like hashes need.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace terrace {

inline constexpr int kRadixBits = 11;

// Sorts `items` by bits [low_bit, high_bit) of number(item); equal ones keep their order. `spare`
// is scratch of any size. Memory: one copy of the items.
template <typename T, typename Number>
void RadixSort(std::vector<T>* items, std::vector<T>* spare, int low_bit, int high_bit,
               Number number) {
  constexpr std::size_t kDigits = std::size_t{1} << kRadixBits;
  if (items->size() < kDigits) {  // A pass would cost more than the comparisons.
    const std::uint64_t mask =
        high_bit >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << high_bit) - 1;
    std::stable_sort(items->begin(), items->end(), [&](const T& a, const T& b) {
      return ((number(a) & mask) >> low_bit) < ((number(b) & mask) >> low_bit);
    });
    return;
  }
  spare->resize(items->size());
  for (int shift = low_bit; shift < high_bit; shift += kRadixBits) {
    const std::uint64_t mask = (std::uint64_t{1} << std::min(kRadixBits, high_bit - shift)) - 1;
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

// Sorts `items` by the `bits` low bits of number(item), in which all of it lies. Meant for numbers
// that spread evenly, as hashes do: high bits that tell most of them apart are sorted, and what is
// left by insertion; numbers that don't spread are sorted by all bits. Memory as RadixSort.
template <typename T, typename Number>
void SortSpread(std::vector<T>* items, std::vector<T>* spare, int bits, Number number) {
  constexpr std::size_t kMostMoves = 4;  // An item; about a tenth of one is usual.
  const int telling = static_cast<int>(std::bit_width(items->size())) + 3;
  const int passes = (telling + kRadixBits - 1) / kRadixBits;
  const int low_bit = std::max(0, bits - passes * kRadixBits);
  RadixSort(items, spare, low_bit, bits, number);
  std::size_t moves = 0;
  for (std::size_t i = 1; i < items->size(); ++i) {
    if (number((*items)[i - 1]) <= number((*items)[i])) continue;
    const T moving = (*items)[i];
    std::size_t at = i;
    for (; at > 0 && number((*items)[at - 1]) > number(moving); --at) {
      (*items)[at] = (*items)[at - 1];
    }
    (*items)[at] = moving;
    moves += i - at;
    if (moves > kMostMoves * items->size()) return RadixSort(items, spare, 0, bits, number);
  }
}

}  // namespace terrace
