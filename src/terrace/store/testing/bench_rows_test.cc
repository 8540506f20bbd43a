#include "terrace/store/testing/bench_rows.h"

#include <algorithm>
#include <iterator>
#include <set>

#include <gtest/gtest.h>

namespace terrace {
namespace {

constexpr std::uint64_t kKeys = 1000;

std::set<Key> AllKeys(std::uint64_t key_seed, std::uint64_t seed) {
  BenchRows rows(kKeys, 16, key_seed, seed);
  rows.ChooseRange(0, kKeys);
  return {rows.keys().begin(), rows.keys().end()};
}

TEST(BenchRows, KeysAreThoseOfTheirSeedWhateverIsDrawn) {
  const std::set<Key> keys = AllKeys(1, 2);
  EXPECT_EQ(keys.size(), kKeys);
  EXPECT_EQ(AllKeys(1, 3), keys);
  std::set<Key> both;
  const std::set<Key> others = AllKeys(2, 2);
  std::set_intersection(keys.begin(), keys.end(), others.begin(), others.end(),
                        std::inserter(both, both.end()));
  EXPECT_TRUE(both.empty());
  BenchRows rows(kKeys, 16, 1, 4);
  rows.ChooseUniform(kKeys / 2);
  const std::set<Key> chosen(rows.keys().begin(), rows.keys().end());
  EXPECT_EQ(chosen.size(), kKeys / 2);
  EXPECT_TRUE(std::includes(keys.begin(), keys.end(), chosen.begin(), chosen.end()));
}

}  // namespace
}  // namespace terrace
