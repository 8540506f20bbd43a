#include "terrace/base/testing/bench_spread.h"

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(BenchSpread, MedianLeastAndMost) {
  const Spread odd = SpreadOf({3, 1, 2});
  EXPECT_EQ(odd.Text(1), "2.0 (1.0..3.0)");
  EXPECT_EQ(odd.samples, 3u);
  EXPECT_EQ(SpreadOf({4, 1, 2, 3}).Text(2, 10), "25.00 (10.00..40.00)");
  EXPECT_EQ(SpreadOf({}).samples, 0u);
}

TEST(BenchSpread, PartsAreATenthOrMoreAndWhatIsSkippedIsNotCounted) {
  PartRates parts(100, 0);
  parts.Skip(20, 1);
  parts.Done(25, 2);  // Too little yet.
  parts.Done(30, 3);
  parts.Done(70, 5);
  parts.Done(70, 6);  // Nothing.
  EXPECT_EQ(parts.rates(), (std::vector<double>{5, 20}));
}

}  // namespace
}  // namespace terrace
