#include "terrace/data/click_log_generator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/data/testing/data_testing.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;

// The published algorithm, with the library's functions and nothing left out.
std::uint64_t ReferenceZipf(double n, double e, std::uint64_t hash) {
  const auto integral = [e](double x) {
    return e == 1 ? std::log(x) : std::expm1((1 - e) * std::log(x)) / (1 - e);
  };
  const auto inverse = [e](double u) {
    return e == 1 ? std::exp(u) : std::exp(std::log1p((1 - e) * u) / (1 - e));
  };
  const double first = integral(1.5) - 1;
  const double last = integral(n + 0.5);
  for (;; hash = MixKey(hash)) {
    const double u = last + UnitDouble(hash) * (first - last);
    const double rank = std::clamp(std::floor(inverse(u) + 0.5), 1.0, n);
    if (u >= integral(rank + 0.5) - std::pow(rank, -e)) return static_cast<std::uint64_t>(rank);
  }
}

TEST(ZipfSamplerTest, DrawsWhatThePublishedAlgorithmDraws) {
  for (const double exponent : {0.0, 0.3, 0.8, 1.0, 1.05, 1.5, 2.0, 4.0}) {
    for (const std::uint64_t count : {1ull, 2ull, 10ull, 1000ull, 1000000ull}) {
      const ZipfSampler sampler(count, exponent);
      std::vector<std::uint64_t> hashes(20000);
      std::vector<std::uint64_t> ranks(hashes.size());
      for (std::size_t i = 0; i < hashes.size(); ++i) hashes[i] = MixKey(i);
      sampler.Sample(hashes.data(), hashes.size(), ranks.data());
      int differences = 0;
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        ASSERT_GE(ranks[i], 1u);
        ASSERT_LE(ranks[i], count);
        differences += ranks[i] != ReferenceZipf(static_cast<double>(count), exponent, hashes[i]);
      }
      // Rounding decides a draw in a million.
      EXPECT_LE(differences, 1) << exponent << " " << count;
    }
  }
}

TEST(ZipfSamplerTest, FollowsThePowerLaw) {
  constexpr int kDraws = 400000;
  for (const double exponent : {0.0, 0.8, 1.0, 1.05, 2.0}) {
    const ZipfSampler sampler(50, exponent);
    double sum = 0;
    for (std::size_t k = 1; k <= 50; ++k) sum += std::pow(static_cast<double>(k), -exponent);
    std::vector<std::uint64_t> hashes(kDraws);
    std::vector<std::uint64_t> ranks(kDraws);
    for (std::size_t i = 0; i < hashes.size(); ++i) hashes[i] = MixKey(i + 77);
    sampler.Sample(hashes.data(), hashes.size(), ranks.data());
    std::vector<double> seen(51);
    for (const std::uint64_t rank : ranks) ++seen[rank];
    double chi_squared = 0;
    for (std::size_t k = 1; k <= 50; ++k) {
      const double wanted = kDraws * std::pow(static_cast<double>(k), -exponent) / sum;
      chi_squared += (seen[k] - wanted) * (seen[k] - wanted) / wanted;
    }
    // 49 degrees of freedom: above 94 once in 10,000.
    EXPECT_LT(chi_squared, 94) << exponent;
  }
}

TEST(ZipfSamplerTest, ReachesTheTailOfATrillion) {
  const ZipfSampler sampler(1'000'000'000'000, 1.05);
  std::vector<std::uint64_t> hashes(100000);
  std::vector<std::uint64_t> ranks(hashes.size());
  for (std::size_t i = 0; i < hashes.size(); ++i) hashes[i] = MixKey(i);
  sampler.Sample(hashes.data(), hashes.size(), ranks.data());
  EXPECT_GT(*std::max_element(ranks.begin(), ranks.end()), 900'000'000'000u);
  EXPECT_GT(std::count(ranks.begin(), ranks.end(), 1u), 5000);
}

struct Oracle {
  double auc = 0;
  double calibration = 0;
  double click_rate = 0;
};

Oracle Measure(const ClickLogSpec& spec, std::uint64_t rows) {
  std::vector<std::pair<double, float>> pairs;
  double predicted = 0;
  double clicked = 0;
  const Status status = RunOracle(
      spec, 0, rows, [&](std::span<const double> probability, std::span<const float> label) {
        for (std::size_t i = 0; i < label.size(); ++i) {
          pairs.emplace_back(probability[i], label[i]);
          predicted += probability[i];
          clicked += label[i];
        }
      });
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(pairs.size(), rows);
  std::sort(pairs.begin(), pairs.end());
  double ranks = 0;
  for (std::size_t i = 0; i < pairs.size(); ++i)
    if (pairs[i].second > 0) ranks += static_cast<double>(i + 1);
  const auto n = static_cast<double>(rows);
  return {(ranks - clicked * (clicked + 1) / 2) / (clicked * (n - clicked)), predicted / clicked,
          clicked / n};
}

TEST(ClickLogGeneratorTest, OracleIsAsGoodAsPromisedWhateverTheSetting) {
  for (const auto& [cardinality, zipf] :
       {std::pair<std::uint64_t, double>{1'000'000, 1.05}, {100, 0.5}, {1'000'000'000'000, 1.2}}) {
    ClickLogSpec spec;
    spec.cardinality = cardinality;
    spec.zipf = zipf;
    const Oracle oracle = Measure(spec, 100000);
    EXPECT_GT(oracle.auc, 0.78) << cardinality;
    EXPECT_LT(oracle.auc, 0.80) << cardinality;
    EXPECT_NEAR(oracle.click_rate, 0.25, 0.01) << cardinality;
    EXPECT_NEAR(oracle.calibration, 1, 0.02) << cardinality;
  }
}

TEST(ClickLogGeneratorTest, CategoriesAreABijectionOfRanks) {
  for (const std::uint64_t cardinality : {std::uint64_t{300}, (std::uint64_t{1} << 32) + 1}) {
    ClickLogSpec spec;
    spec.cardinality = cardinality;
    spec.zipf = cardinality == 300 ? 0 : 1.05;
    auto generator = ClickLogGenerator::Create(spec);
    ASSERT_TRUE(generator.ok());
    const bool narrow = cardinality == 300;
    EXPECT_EQ((*generator)->category_digits(), narrow ? 8 : 12);
    std::set<std::uint64_t> first;
    std::set<std::uint64_t> second;
    ClickLogRow row;
    for (std::uint64_t r = 0; r < 20000; ++r) {
      (*generator)->MakeRow(r, &row);
      ASSERT_EQ(row.categories.size(), 26u);
      first.insert(row.categories[0]);
      second.insert(row.categories[1]);
    }
    if (!narrow) {
      EXPECT_GT(*first.rbegin(), std::uint64_t{1} << 40);
      EXPECT_LT(*first.rbegin(), kMissingCategory);
      continue;
    }
    EXPECT_EQ(first.size(), 300u);
    EXPECT_EQ(second.size(), 300u);
    EXPECT_NE(first, second);
    EXPECT_LT(*first.rbegin(), std::uint64_t{1} << 32);
  }
}

// FNV-1a of the text of the first rows: pins the log's bits on every processor and compiler.
TEST(ClickLogGeneratorTest, GoldenRows) {
  MemoryFileSystem fs;
  ASSERT_TRUE(fs.MakeDirectories("/d").ok());
  ClickLogSpec spec;
  ASSERT_TRUE(WriteClickLog(&fs, spec, 2000, "/d/narrow", {}).ok());
  spec.cardinality = 1'000'000'000'000;
  spec.zipf = 1;
  spec.seed = 9;
  ASSERT_TRUE(WriteClickLog(&fs, spec, 2000, "/d/wide", {}).ok());
  auto narrow = ReadFileToString(&fs, "/d/narrow");
  auto wide = ReadFileToString(&fs, "/d/wide");
  ASSERT_TRUE(narrow.ok() && wide.ok());
  EXPECT_EQ(HashName(*narrow), 7666473342893518446u) << narrow->substr(0, 300);
  EXPECT_EQ(HashName(*wide), 12539969761858549052u) << wide->substr(0, 300);
}

TEST(ClickLogGeneratorTest, SyntheticSourceGivesWhatReadingTheWrittenLogGives) {
  MemoryFileSystem fs;
  ASSERT_TRUE(fs.MakeDirectories("/logs").ok());
  for (const char* const integers : {"dense", "both"}) {
    for (const char* const path : {"/logs/a.tsv", "/logs/a.tsv.gz", "/logs/a.tsv.zst"}) {
      DataOptions options;
      options.format = "synthetic";
      options.rows = 3000;
      options.first_row = 12345;
      options.cardinality = 5000;
      options.log_seed = 4;
      options.integers = integers;
      options.epochs = 2;
      WriteClickLogOptions write;
      write.first_row = options.first_row;
      ASSERT_TRUE(WriteClickLog(&fs, ClickLogSpecOf(options), options.rows, path, write).ok());
      auto synthetic = OpenSource(&fs, options);
      ASSERT_TRUE(synthetic.ok()) << synthetic.status().ToString();
      EXPECT_EQ(SchemaOf(options)->ToText(), (*synthetic)->schema().ToText());
      Stream made = ReadStream(synthetic->get(), 64, {64, 640});
      options.format = "criteo";
      options.files = {path};
      auto text = OpenSource(&fs, options);
      ASSERT_TRUE(text.ok()) << text.status().ToString();
      Stream read = ReadStream(text->get(), 64, {128});
      ASSERT_TRUE(read.status.ok()) << read.status.ToString();
      EXPECT_EQ((*synthetic)->schema().ToText(), (*text)->schema().ToText());
      EXPECT_EQ(SchemaOf(options)->ToText(), (*text)->schema().ToText());
      EXPECT_NE((*synthetic)->IdentityText(), (*text)->IdentityText());
      ASSERT_EQ(made.examples.size(), 6000u);
      EXPECT_EQ(made.examples[0].line, 12345u);
      for (Example& example : made.examples) example.line = example.line - 12345 + 1;
      EXPECT_TRUE(made.examples == read.examples) << path;
      EXPECT_EQ(made.cursors.size(), read.cursors.size());
    }
  }
}

TEST(ClickLogGeneratorTest, SyntheticSourceResumesAnywhereAndShuffles) {
  DataOptions options;
  options.format = "synthetic";
  options.rows = 1000;
  options.epochs = 2;
  options.shuffle = "examples";
  options.shuffle_window = 300;
  const auto open = [&] {
    auto source = OpenSource(nullptr, options);
    EXPECT_TRUE(source.ok()) << source.status().ToString();
    return std::move(*source);
  };
  const Stream reference = ReadStream(open().get(), 7, {7000});
  ASSERT_EQ(reference.examples.size(), 2000u);
  const Stream other = ReadStream(open().get(), 7, {7, 21, 140});
  EXPECT_TRUE(other.examples == reference.examples);
  EXPECT_TRUE(other.cursors == reference.cursors);
  for (std::size_t stop = 0; stop < reference.cursors.size(); stop += 13) {
    auto source = open();
    ASSERT_TRUE(source->Seek(reference.cursors[stop]).ok());
    const Stream resumed = ReadStream(source.get(), 7, {70});
    const std::vector<Example> rest(
        reference.examples.begin() + static_cast<std::ptrdiff_t>(reference.cursors[stop].examples),
        reference.examples.end());
    EXPECT_TRUE(resumed.examples == rest) << stop;
  }
  std::set<std::uint64_t> window;
  bool moved = false;
  for (std::size_t i = 0; i < 300; ++i) {
    window.insert(reference.examples[i].line);
    moved |= reference.examples[i].line != i;
  }
  EXPECT_TRUE(moved);
  EXPECT_EQ(window.size(), 300u);
  EXPECT_EQ(*window.rbegin(), 299u);
  EXPECT_NE(reference.examples[0].line, reference.examples[1000].line);
  EXPECT_EQ(reference.bad_after_epoch, (std::vector<std::uint32_t>{0, 0}));

  auto source = open();
  source->Cancel();
  EXPECT_EQ(source->Next(7, 7).status().code(), StatusCode::kAborted);
}

TEST(ClickLogGeneratorTest, WriterReportsItsOracleAndStopsClean) {
  MemoryFileSystem fs;
  ASSERT_TRUE(fs.MakeDirectories("/d").ok());
  PutFile(&fs, "/d/log.tsv.partial", "left by a killed run");
  WriteClickLogOptions options;
  std::uint64_t rows = 0;
  options.oracle = [&](std::span<const double> probability, std::span<const float> label) {
    ASSERT_EQ(probability.size(), label.size());
    rows += label.size();
  };
  ASSERT_TRUE(WriteClickLog(&fs, {}, 5000, "/d/log.tsv", options).ok());
  EXPECT_EQ(rows, 5000u);
  auto text = ReadFileToString(&fs, "/d/log.tsv");
  ASSERT_TRUE(text.ok());
  EXPECT_EQ(std::count(text->begin(), text->end(), '\n'), 5000);

  options.keep_going = [](std::uint64_t) { return false; };
  const Status stopped = WriteClickLog(&fs, {}, 9000, "/d/log.tsv", options);
  EXPECT_EQ(stopped.code(), StatusCode::kAborted);
  // What was there stays, and nothing lies beside it.
  auto after = ReadFileToString(&fs, "/d/log.tsv");
  ASSERT_TRUE(after.ok());
  EXPECT_TRUE(*after == *text);
  auto listed = fs.List("/d");
  ASSERT_TRUE(listed.ok());
  EXPECT_EQ(listed->size(), 1u);

  const Status nowhere = WriteClickLog(&fs, {}, 10, "/nowhere/log.tsv", {});
  EXPECT_FALSE(nowhere.ok());
  fs.set_capacity_bytes(fs.used_bytes() + 8192);
  const Status full = WriteClickLog(&fs, {}, 5000, "/d/other.tsv", {});
  EXPECT_EQ(full.code(), StatusCode::kIo);
  EXPECT_THAT(full.message(), HasSubstr("writing /d/other.tsv"));
}

// The text tells any two logs apart, and is what older runs have of the usual ones.
TEST(ClickLogGeneratorTest, IdentityTellsEveryDigitOfZipf) {
  const auto text = [](double zipf) {
    ClickLogSpec spec;
    spec.zipf = zipf;
    return (*ClickLogGenerator::Create(spec))->IdentityText();
  };
  EXPECT_THAT(text(1.05), HasSubstr("; zipf 1.050000; "));
  EXPECT_THAT(text(0), HasSubstr("; zipf 0.000000; "));
  EXPECT_THAT(text(1.0500004), HasSubstr("; zipf 1.0500004; "));
  EXPECT_NE(text(1e-7), text(0));
  EXPECT_NE(text(std::nextafter(1.05, 2)), text(1.05));
}

TEST(ClickLogGeneratorTest, LimitsAreNamed) {
  ClickLogSpec spec;
  spec.cardinality = 0;
  EXPECT_THAT(ClickLogGenerator::Create(spec).status().message(), HasSubstr("cardinality"));
  spec = {};
  spec.cardinality = 1'000'000'000'001;
  EXPECT_THAT(ClickLogGenerator::Create(spec).status().message(), HasSubstr("cardinality"));
  spec = {};
  spec.zipf = std::nan("");
  EXPECT_THAT(ClickLogGenerator::Create(spec).status().message(), HasSubstr("zipf"));
  spec = {};
  spec.categorical_slots = 257;
  EXPECT_THAT(ClickLogGenerator::Create(spec).status().message(), HasSubstr("slots"));
  spec = {};
  spec.click_rate = 1;
  EXPECT_THAT(ClickLogGenerator::Create(spec).status().message(), HasSubstr("click_rate"));
  spec = {};
  spec.signal = -1;
  EXPECT_THAT(ClickLogGenerator::Create(spec).status().message(), HasSubstr("signal"));
  MemoryFileSystem fs;
  spec = {};
  spec.categorical_slots = 27;
  EXPECT_THAT(WriteClickLog(&fs, spec, 1, "/x", {}).message(), HasSubstr("26 categories"));
}

}  // namespace
}  // namespace terrace
