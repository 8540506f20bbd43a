// Reads real Criteo samples, where they lie beside the checkout, and checks rows and click rates
// against the figures of their README.
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"

namespace terrace {
namespace {

struct Sample {
  const char* path;
  std::uint64_t rows;
  double click_rate;  // Rounded to four digits.
};

class RealDataTest : public ::testing::TestWithParam<Sample> {};

TEST_P(RealDataTest, HasTheRowsAndClickRateOfItsReadme) {
  const std::string folder = TERRACE_REAL_DATA_DIR;
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "the real click logs are not at " << folder;
  DataOptions options;
  options.files = {folder + "/" + GetParam().path};
  options.max_bad_fraction = 0;
  auto source = OpenSource(FileSystem::Posix(), options);
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  double clicks = 0;
  std::uint64_t rows = 0;
  for (;;) {
    auto batch = (*source)->Next(4096, 512);
    ASSERT_TRUE(batch.ok()) << batch.status().ToString();
    if (!batch->has_value()) break;
    for (const float label : (**batch).label) clicks += label;
    rows += (**batch).examples;
  }
  EXPECT_EQ(rows, GetParam().rows);
  EXPECT_NEAR(clicks / static_cast<double>(rows), GetParam().click_rate, 0.000051);
}

INSTANTIATE_TEST_SUITE_P(
    Samples, RealDataTest,
    ::testing::Values(Sample{"criteo-kaggle-pool34k/pool.tsv.zst", 34357, 0.2304},
                      Sample{"criteo-kaggle-head10k/train-10k.txt", 10000, 0.2182},
                      Sample{"criteo-kaggle-x4-8k/valid_sample.csv", 3999, 0.2161},
                      Sample{"criteo-kaggle-x4-8k/test_sample.csv", 3999, 0.2093},
                      Sample{"criteo-1tb-day0-10k/day_0.part.txt", 10000, 0.0265},
                      Sample{"criteo-tiny/train.tiny.csv", 1999, 0.2091},
                      Sample{"criteo-tiny/tr.rx.csv", 1999, 0.2241},
                      Sample{"criteo-tiny/va.rx.csv", 1999, 0.2651},
                      Sample{"criteo-tiny/criteo_sample.txt", 200, 0.2450}));

}  // namespace
}  // namespace terrace
