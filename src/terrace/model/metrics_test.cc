#include "terrace/model/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "terrace/base/rng.h"

namespace terrace {
namespace {

struct Stream {
  std::vector<float> logit, probability, label, weight;
  double logloss = 0;

  void Append(float z, float clicked, float w) {
    const double p = 1.0 / (1.0 + std::exp(-static_cast<double>(z)));
    logit.push_back(z);
    probability.push_back(static_cast<float>(p));
    label.push_back(clicked);
    weight.push_back(w);
    logloss -= w * (clicked != 0 ? std::log(p) : std::log1p(-p));
  }
  ClickMetrics Measure() const {
    ClickMetrics metrics;
    metrics.Add(logit.data(), probability.data(), label.data(), weight.data(), logit.size(),
                logloss);
    return metrics;
  }
  // By all pairs of a click and a no-click.
  double ExactAuc() const {
    double won = 0, pairs = 0;
    for (std::size_t i = 0; i < logit.size(); ++i) {
      if (label[i] == 0) continue;
      for (std::size_t j = 0; j < logit.size(); ++j) {
        if (label[j] != 0) continue;
        const double pair = static_cast<double>(weight[i]) * weight[j];
        pairs += pair;
        won += logit[i] > logit[j] ? pair : logit[i] == logit[j] ? 0.5 * pair : 0.0;
      }
    }
    return won / pairs;
  }
};

Stream RandomStream(std::uint64_t seed, std::size_t examples, bool weighted, double grid) {
  Rng rng(seed);
  Stream stream;
  for (std::size_t i = 0; i < examples; ++i) {
    double z = 6.0 * rng.Unit() - 4.0;
    if (grid > 0) z = std::round(z / grid) * grid;
    const bool click = rng.Unit() < 1.0 / (1.0 + std::exp(-z));
    stream.Append(static_cast<float>(z), click ? 1.0f : 0.0f,
                  weighted ? static_cast<float>(0.1 + 3.0 * rng.Unit()) : 1.0f);
  }
  return stream;
}

TEST(ClickMetricsTest, AucIsWithinItsErrorOfTheExactOne) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    const Stream stream = RandomStream(seed, 3000, seed % 2 == 0, 0.0);
    const ClickMetricsResult result = stream.Measure().Compute();
    EXPECT_LE(std::fabs(result.auc - stream.ExactAuc()), result.auc_error + 1e-12);
    EXPECT_GT(result.auc_error, 0.0);
    EXPECT_LT(result.auc_error, 1e-3);
  }
}

TEST(ClickMetricsTest, TiesCountHalfAndAreExact) {
  // A grid of quarters: no two different logits share a bucket.
  for (bool weighted : {false, true}) {
    const Stream stream = RandomStream(11, 2000, weighted, 0.25);
    EXPECT_NEAR(stream.Measure().Compute().auc, stream.ExactAuc(), 1e-12);
  }
  Stream constant;
  for (int i = 0; i < 10; ++i) constant.Append(0.3f, static_cast<float>(i % 2), 1.0f);
  EXPECT_EQ(constant.Measure().Compute().auc, 0.5);
  Stream zeros;  // The two zeros are one value.
  zeros.Append(-0.0f, 1.0f, 1.0f);
  zeros.Append(0.0f, 0.0f, 1.0f);
  EXPECT_EQ(zeros.Measure().Compute().auc, 0.5);
}

TEST(ClickMetricsTest, OrdersLogitsOfAllMagnitudes) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> ascending = {-infinity, -1e30f, -3.0f, -1e-3f, -1e-30f, 0.0f,
                                        1e-30f,    1e-3f,  2.99f, 1e30f,  infinity};
  for (std::size_t cut = 1; cut < ascending.size(); ++cut) {
    ClickMetrics metrics;
    std::vector<float> label(ascending.size());
    for (std::size_t i = cut; i < label.size(); ++i) label[i] = 1.0f;
    const std::vector<float> probability(ascending.size(), 0.5f);
    metrics.Add(ascending.data(), probability.data(), label.data(), nullptr, label.size(), 1.0);
    EXPECT_EQ(metrics.Compute().auc, 1.0);
    EXPECT_EQ(metrics.Compute().auc_error, 0.0);
  }
}

TEST(ClickMetricsTest, MeansAreByWeight) {
  Stream stream;
  stream.Append(0.0f, 1.0f, 3.0f);
  stream.Append(-1.0f, 0.0f, 1.0f);
  const ClickMetricsResult result = stream.Measure().Compute();
  const double p = 1.0 / (1.0 + std::exp(1.0));
  EXPECT_EQ(result.examples, 2u);
  EXPECT_EQ(result.weight, 4.0);
  EXPECT_EQ(result.mean_label, 0.75);
  EXPECT_NEAR(result.mean_prediction, (3 * 0.5 + p) / 4, 1e-7);
  EXPECT_NEAR(result.calibration, (3 * 0.5 + p) / 3, 1e-7);
  EXPECT_NEAR(result.logloss, (3 * std::log(2.0) - std::log1p(-p)) / 4, 1e-12);
  const double entropy = -(0.75 * std::log(0.75) + 0.25 * std::log(0.25));
  EXPECT_NEAR(result.ne, result.logloss / entropy, 1e-12);
}

TEST(ClickMetricsTest, ConstantPredictionOfTheMeanHasEntropyOne) {
  Stream stream;
  for (int i = 0; i < 100; ++i) {
    stream.Append(static_cast<float>(std::log(0.2 / 0.8)), i < 20 ? 1.0f : 0.0f, 1.0f);
  }
  EXPECT_NEAR(stream.Measure().Compute().ne, 1.0, 1e-6);
  EXPECT_NEAR(stream.Measure().Compute().calibration, 1.0, 1e-6);
}

TEST(ClickMetricsTest, OneClassOrNoExamplesGiveNaN) {
  const ClickMetricsResult nothing = ClickMetrics().Compute();
  EXPECT_EQ(nothing.examples, 0u);
  for (double value : {nothing.auc, nothing.auc_error, nothing.logloss, nothing.ne,
                       nothing.calibration, nothing.mean_label, nothing.mean_prediction}) {
    EXPECT_TRUE(std::isnan(value));
  }
  for (float only : {0.0f, 1.0f}) {
    Stream stream;
    for (int i = 0; i < 5; ++i) stream.Append(0.1f * static_cast<float>(i), only, 1.0f);
    const ClickMetricsResult result = stream.Measure().Compute();
    EXPECT_TRUE(std::isnan(result.auc) && std::isnan(result.auc_error) && std::isnan(result.ne));
    EXPECT_FALSE(std::isnan(result.logloss));
    EXPECT_EQ(std::isnan(result.calibration), only == 0.0f);
  }
}

TEST(ClickMetricsTest, NaNIsSeenAndNotRanked) {
  Stream stream = RandomStream(3, 100, false, 0.0);
  stream.logit[50] = std::numeric_limits<float>::quiet_NaN();
  const ClickMetricsResult result = stream.Measure().Compute();
  for (double value : {result.auc, result.auc_error, result.mean_prediction, result.calibration}) {
    EXPECT_TRUE(std::isnan(value));
  }
}

TEST(ClickMetricsTest, CutOfTheStreamChangesNoBit) {
  const Stream stream = RandomStream(5, 1000, true, 0.0);
  ClickMetrics cut;
  for (std::size_t start = 0; start < 1000;) {
    const std::size_t count = std::min<std::size_t>(1000 - start, 1 + start % 97);
    cut.Add(&stream.logit[start], &stream.probability[start], &stream.label[start],
            &stream.weight[start], count, start == 0 ? stream.logloss : 0.0);
    start += count;
  }
  EXPECT_EQ(cut.Save(), stream.Measure().Save());
}

TEST(ClickMetricsTest, ClearedIsAsNew) {
  const float logit[] = {-1.0f, 0.5f, 2.0f}, probability[] = {0.3f, 0.6f, 0.9f};
  const float label[] = {0.0f, 1.0f, 1.0f};
  ClickMetrics metrics;
  metrics.Add(logit, probability, label, nullptr, 3, 1.5);
  ASSERT_NE(metrics.Save(), ClickMetrics().Save());
  metrics.Clear();
  EXPECT_EQ(metrics.Save(), ClickMetrics().Save());
}

TEST(ClickMetricsTest, RestoresWhatItSaved) {
  const Stream before = RandomStream(8, 500, true, 0.0);
  const Stream after = RandomStream(9, 500, true, 0.0);
  const auto add = [](const Stream& s, ClickMetrics* metrics) {
    metrics->Add(s.logit.data(), s.probability.data(), s.label.data(), s.weight.data(),
                 s.logit.size(), s.logloss);
  };
  ClickMetrics whole, first, second;
  add(before, &whole);
  add(before, &first);
  add(after, &second);  // Restore replaces all of it.
  ASSERT_TRUE(second.Restore(first.Save()).ok());
  EXPECT_EQ(second.Save(), first.Save());
  add(after, &whole);
  add(after, &second);
  EXPECT_EQ(second.Save(), whole.Save());
  EXPECT_EQ(second.Compute().auc, whole.Compute().auc);
  EXPECT_LT(ClickMetrics().Save().size(), 100u);
  EXPECT_EQ(ClickMetrics().MostSavedBytes(0), ClickMetrics().Save().size());
  EXPECT_EQ(whole.MostSavedBytes(0), whole.Save().size());
  EXPECT_EQ(second.MostSavedBytes(0), second.Save().size());
  EXPECT_GT(whole.MostSavedBytes(1), whole.Save().size());
}

TEST(ClickMetricsTest, RefusesEveryDamagedState) {
  Stream stream;
  stream.Append(0.5f, 1.0f, 1.0f);
  stream.Append(-0.5f, 0.0f, 2.0f);
  const std::string good = stream.Measure().Save();
  ClickMetrics metrics;
  for (std::size_t byte = 0; byte < good.size(); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[byte] = static_cast<char>(bad[byte] ^ (1 << bit));
      // What says that it is newer is not looked at any further; a checkpoint has a check around
      // it.
      const bool newer = byte >= 8 && byte < 12 && bad.substr(8, 4) != std::string(4, '\0');
      EXPECT_EQ(metrics.Restore(bad).code(),
                newer ? StatusCode::kInvalidArgument : StatusCode::kCorruption)
          << byte;
    }
  }
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(metrics.Restore(good.substr(0, size)).code(), StatusCode::kCorruption) << size;
  }
  EXPECT_EQ(metrics.Restore(good + '\0').code(), StatusCode::kCorruption);
  EXPECT_EQ(metrics.Save(), ClickMetrics().Save());  // A failure leaves it as it was.
  EXPECT_TRUE(metrics.Restore(good).ok());
}

TEST(ClickMetricsTest, GoldenStateIsReadAndWrittenTheSame) {
  const std::string path = std::string(TERRACE_TESTDATA) + "/click_metrics_v1.golden";
  if (std::getenv("TERRACE_UPDATE_GOLDEN") != nullptr) {
    Stream stream;
    stream.Append(0.5f, 1.0f, 1.0f);
    stream.Append(-0.5f, 0.0f, 2.0f);
    stream.Append(-3.0f, 1.0f, 0.25f);
    std::ofstream(path, std::ios::binary) << stream.Measure().Save();
  }
  std::ifstream file(path, std::ios::binary);
  const std::string golden((std::istreambuf_iterator<char>(file)),
                           std::istreambuf_iterator<char>());
  ClickMetrics metrics;
  ASSERT_TRUE(metrics.Restore(golden).ok());
  EXPECT_EQ(metrics.Save(), golden);
  const ClickMetricsResult result = metrics.Compute();
  EXPECT_EQ(result.examples, 3u);
  EXPECT_EQ(result.mean_label, 1.25 / 3.25);
}

TEST(ClickMetricsTest, ANewerStateIsRefusedAsSuch) {
  std::string newer = ClickMetrics().Save();
  newer[8] = 2;
  ClickMetrics metrics;
  const Status status = metrics.Restore(newer);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("format version 2"), std::string::npos) << status.ToString();
  EXPECT_NE(status.message().find("up to version 1"), std::string::npos) << status.ToString();
}

}  // namespace
}  // namespace terrace
