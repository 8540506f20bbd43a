#include "terrace/table/expiry.h"

#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"

namespace terrace {
namespace {

struct Row {
  float show = 0;
  float click = 0;
  std::uint64_t last_seen = 0;
  std::byte* bytes() { return reinterpret_cast<std::byte*>(this); }
  const std::byte* bytes() const { return reinterpret_cast<const std::byte*>(this); }
};
static_assert(sizeof(Row) == kStatisticsBytes);

ExpirySpec ByAge(std::uint64_t every, std::uint64_t after) {
  ExpirySpec spec;
  spec.every_examples = every;
  spec.after = after;
  return spec;
}

ExpirySpec ByScore(std::uint64_t every, double below, double decay) {
  ExpirySpec spec;
  spec.every_examples = every;
  spec.below = below;
  spec.decay = decay;
  return spec;
}

TEST(ExpiryRule, OffKeepsEverything) {
  const ExpiryRule rule;
  EXPECT_FALSE(rule.on());
  EXPECT_FALSE(rule.Expired(Row{0, 0, 1}.bytes(), ~std::uint64_t{0}));
  EXPECT_TRUE(CountsAt(rule, {Row{0, 0, 0}.bytes(), sizeof(Row)}, 5));
}

TEST(ExpiryRule, AgeIsTestedAtPointsOnly) {
  const ExpiryRule rule(ByAge(100, 150));
  const Row row{1, 1, 130};
  for (std::uint64_t position = 130; position < 1000; ++position) {
    // 300 is the first point that is 150 examples behind 130.
    EXPECT_EQ(rule.Expired(row.bytes(), position), position >= 300) << position;
    EXPECT_EQ(rule.Droppable(row.bytes(), position), position >= 300) << position;
  }
  // Seen by the mini-batch whose end is the point: not looked at there.
  EXPECT_FALSE(rule.Expired(Row{1, 1, 300}.bytes(), 399));
  EXPECT_TRUE(rule.Expired(Row{1, 1, 250}.bytes(), 400));
  EXPECT_FALSE(CountsAt(rule, {row.bytes(), sizeof(Row)}, 300));
  EXPECT_FALSE(CountsAt(rule, {Row{}.bytes(), sizeof(Row)}, 10)) << "never trained";
}

TEST(ExpiryRule, ScoreDecaysWithEachPoint) {
  const ExpiryRule rule(ByScore(10, 1.0, 0.5));
  // 0.1 * (8 - 3) + 1 * 3 = 3.5: after one point 1.75, after two 0.875.
  const Row row{8, 3, 15};
  EXPECT_FALSE(rule.Expired(row.bytes(), 20));
  EXPECT_FALSE(rule.Expired(row.bytes(), 29));
  EXPECT_TRUE(rule.Expired(row.bytes(), 30));
  Row decayed = row;
  rule.Decay(decayed.bytes(), 29);
  EXPECT_EQ(decayed.show, 4.0f);
  EXPECT_EQ(decayed.click, 1.5f);
  EXPECT_EQ(decayed.last_seen, 15u);
  Row same = row;
  rule.Decay(same.bytes(), 19);
  EXPECT_EQ(same.show, 8.0f);
  // Without decay the first point decides.
  const ExpiryRule constant(ByScore(10, 1.0, 1.0));
  EXPECT_FALSE(constant.Expired(row.bytes(), ~std::uint64_t{0}));
  EXPECT_TRUE(constant.Expired(Row{9, 0, 15}.bytes(), 20));
  EXPECT_FALSE(constant.Expired(Row{9, 0, 15}.bytes(), 19));
}

TEST(ExpiryRule, WhatHasExpiredStaysSo) {
  for (const double decay : {0.999999999, 0.9999, 0.98, 0.7, 0.1, 0.0, 1.0}) {
    const ExpiryRule rule(ByScore(1, 0.37, decay));
    Rng rng(static_cast<std::uint64_t>(decay * 1e6));
    for (int trial = 0; trial < 50; ++trial) {
      const auto show = static_cast<float>(rng.Unit() * 20);
      const Row row{show, static_cast<float>(rng.Unit()) * show, 1 + rng.Below(5)};
      bool expired = false;
      for (std::uint64_t position = 1; position < 200'000; position += 1 + position / 500) {
        const bool now = rule.Expired(row.bytes(), position);
        ASSERT_TRUE(now || !expired) << decay << " at " << position;
        ASSERT_TRUE(now || !rule.Droppable(row.bytes(), position));
        expired = now;
      }
    }
  }
}

// Any version of a row that a store may bring back has expired where a newer one may go.
TEST(ExpiryRule, OlderVersionsHaveExpiredWhereTheNewestMayGo) {
  std::uint64_t compared = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    ExpirySpec spec = ByScore(1 + rng.Below(4), 0.05 + rng.Unit(), 0.9 + 0.1 * rng.Unit());
    if (rng.Below(3) == 0) spec.after = 1 + rng.Below(200);
    if (rng.Below(8) == 0) spec.decay = 1;
    spec.show_weight = rng.Unit();
    spec.click_weight = spec.show_weight + (rng.Below(4) == 0 ? 0 : rng.Unit());
    // Versions that lie at the threshold: that is where rounding decides.
    const ExpiryRule rule(spec);
    std::vector<Row> versions;
    Row row;
    std::uint64_t position = 0;
    for (int step = 0; step < 300; ++step) {
      position += 1 + rng.Below(6);
      if (row.last_seen != 0 && rule.Expired(row.bytes(), position)) {
        row = Row();
      } else {
        rule.Decay(row.bytes(), position);
      }
      // The weights of examples may be anything that is not negative.
      const auto weight = static_cast<float>(rng.Unit() * (rng.Below(3) == 0 ? 1e-7 : 0.3));
      row.show += weight;
      row.click += rng.Below(5) == 0 ? weight : 0.0f;
      row.last_seen = position + 1;
      versions.push_back(row);
      for (std::uint64_t later = position + 1; later < position + 60; ++later) {
        if (!rule.Droppable(row.bytes(), later)) continue;
        for (const Row& older : versions) {
          ASSERT_TRUE(rule.Expired(older.bytes(), later)) << "seed " << seed << ", step " << step;
          ++compared;
        }
        break;
      }
    }
  }
  EXPECT_GT(compared, 10'000u);
}

TEST(ExpiryRule, SmallStatisticsVanish) {
  const ExpiryRule rule(ByScore(1, 0.5, 0.5));
  Row row{1, 1, 1};
  rule.Decay(row.bytes(), 140);
  EXPECT_EQ(row.show, 0.0f);
  EXPECT_EQ(row.click, 0.0f);
}

}  // namespace
}  // namespace terrace
