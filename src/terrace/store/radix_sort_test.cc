#include "terrace/store/radix_sort.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"

namespace terrace {
namespace {

struct Item {
  std::uint64_t number;
  std::size_t index;

  bool operator==(const Item&) const = default;
};

std::uint64_t NumberOf(const Item& item) { return item.number; }

// Equal numbers come too.
std::vector<Item> Items(std::size_t n, const std::function<std::uint64_t(Rng*)>& number) {
  Rng rng(n);
  std::vector<Item> items;
  for (std::size_t i = 0; i < n; ++i) items.push_back({number(&rng), i});
  for (std::size_t i = 0; i + 7 < n; i += 7) items[i].number = items[i + 7].number;
  return items;
}

void ExpectSorted(std::vector<Item> items, int bits) {
  std::vector<Item> expected = items, spare;
  std::stable_sort(expected.begin(), expected.end(),
                   [](const Item& a, const Item& b) { return a.number < b.number; });
  SortSpread(&items, &spare, bits, NumberOf);
  EXPECT_EQ(items, expected);
}

TEST(SortSpread, SortsWhateverTheNumbersAre) {
  for (const std::size_t n : {0, 1, 2, 100, 3000, 70'000}) {
    SCOPED_TRACE(n);
    ExpectSorted(Items(n, [](Rng* rng) { return rng->Next(); }), 64);
    ExpectSorted(Items(n, [](Rng* rng) { return rng->Next() >> 30; }), 34);
    ExpectSorted(Items(n, [](Rng* rng) { return rng->Next() >> 60; }), 4);
    // High bits that tell nothing.
    ExpectSorted(Items(n, [](Rng* rng) { return rng->Next() >> 34; }), 64);
    ExpectSorted(Items(n, [](Rng* rng) { return rng->Next() << 62 | rng->Next() >> 50; }), 64);
    ExpectSorted(Items(n, [](Rng*) { return std::uint64_t{5}; }), 64);
  }
}

TEST(RadixSort, SortsByTheBitsAskedFor) {
  for (const std::size_t n : {100, 70'000}) {
    std::vector<Item> items = Items(n, [](Rng* rng) { return rng->Next(); });
    std::vector<Item> expected = items, spare;
    const auto middle = [](const Item& item) { return item.number >> 20 & 0xFFFFFF; };
    std::stable_sort(expected.begin(), expected.end(),
                     [&](const Item& a, const Item& b) { return middle(a) < middle(b); });
    RadixSort(&items, &spare, 20, 44, NumberOf);
    EXPECT_EQ(items, expected);
  }
}

}  // namespace
}  // namespace terrace
