#include "terrace/data/criteo_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "terrace/data/testing/data_testing.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;

// A line with `value` in column `column` (0: label), the others empty but for the label.
std::string LineWith(int column, const std::string& value, char delimiter = '\t') {
  std::string line = column == 0 ? value : "1";
  for (int i = 1; i < kCriteoColumns; ++i) {
    line += delimiter;
    if (i == column) line += value;
  }
  return line;
}

struct Parsed {
  bool good = false;
  CriteoRow row;
  std::string reason;
};

Parsed Parse(const std::string& line, const CriteoLayout& layout = {}) {
  Parsed parsed;
  BadLine bad;
  // A copy without spare bytes, so that a read beyond it is seen by AddressSanitizer.
  const std::vector<char> exact(line.begin(), line.end());
  parsed.good = ParseCriteoLine({exact.data(), exact.size()}, layout, &parsed.row, &bad);
  if (!parsed.good) parsed.reason = bad.ToString();
  return parsed;
}

TEST(CriteoParserTest, ReadsEveryColumn) {
  for (const char delimiter : {'\t', ','}) {
    std::string line = "1";
    for (int i = 0; i < 13; ++i) line.append(1, delimiter).append(std::to_string(i * 1000 + 7));
    for (std::size_t i = 0; i < 26; ++i)
      line.append(1, delimiter).append("0000abc").append(1, "0123456789abcdef"[i % 16]);
    CriteoLayout layout;
    layout.delimiter = delimiter;
    const Parsed parsed = Parse(line, layout);
    ASSERT_TRUE(parsed.good) << parsed.reason;
    EXPECT_EQ(parsed.row.label, 1.0f);
    for (std::size_t i = 0; i < 13; ++i)
      EXPECT_EQ(parsed.row.integers[i], static_cast<std::int64_t>(i) * 1000 + 7);
    for (std::size_t i = 0; i < 26; ++i) EXPECT_EQ(parsed.row.categories[i], 0xabc0u + i % 16);
    layout.has_id = true;
    EXPECT_EQ(Parse("any text" + std::string(1, delimiter) + line, layout).row.integers[3], 3007);
  }
}

TEST(CriteoParserTest, Labels) {
  for (const char* const text : {"0", "0.0", "0.", "-0"}) {
    EXPECT_TRUE(Parse(LineWith(0, text)).good) << text;
    EXPECT_EQ(Parse(LineWith(0, text)).row.label, 0.0f);
  }
  for (const char* const text : {"1", "1.0", "1.00", "01"})
    EXPECT_EQ(Parse(LineWith(0, text)).row.label, 1.0f) << text;
  for (const char* const text : {"", "2", "-1", "0.5", "yes", "1 ", " 1", "+1", "1e0", "\"1\""}) {
    EXPECT_FALSE(Parse(LineWith(0, text)).good) << text;
    EXPECT_EQ(Parse(LineWith(0, text)).reason, "column 1 (Label) is not 0 or 1") << text;
  }
}

TEST(CriteoParserTest, Integers) {
  const std::vector<std::pair<std::string, std::int64_t>> good = {
      {"", kMissingInteger},
      {"0", 0},
      {"-1", -1},
      {"-3", -3},
      {"14.0", 14},
      {"14.", 14},
      {"14.000000", 14},
      {"0007", 7},
      {"1234567", 1234567},
      {"-14.0", -14},
      {"12345678", 12345678},
      {"999999999999999999", 999999999999999999},
      {"-999999999999999999", -999999999999999999}};
  // At the start, the middle and the end of the integers: by the fast way and the slow one.
  for (const int column : {1, 7, 13}) {
    for (const auto& [text, value] : good) {
      const Parsed parsed = Parse(LineWith(column, text));
      ASSERT_TRUE(parsed.good) << text << ": " << parsed.reason;
      EXPECT_EQ(parsed.row.integers[static_cast<std::size_t>(column - 1)], value) << text;
    }
    const std::string name =
        "column " + std::to_string(column + 1) + " (I" + std::to_string(column) + ") ";
    for (const char* const text : {"x", "-", "1-", "1x", "--1", "+1", " 1", "1 ", "1e5", ".", ".0",
                                   "12a4567", "nan", ":", "/", "1,2", "a2345678"}) {
      EXPECT_EQ(Parse(LineWith(column, text)).reason, name + "is no integer") << text;
    }
    EXPECT_EQ(Parse(LineWith(column, "14.5")).reason, name + "has a fraction");
    EXPECT_EQ(Parse(LineWith(column, "14.05")).reason, name + "has a fraction");
    EXPECT_EQ(Parse(LineWith(column, "1234567890123456789")).reason,
              name + "has more than 18 digits");
    EXPECT_FALSE(Parse(LineWith(column, std::string("1\0", 2))).good);
    EXPECT_FALSE(Parse(LineWith(column, std::string(3, '\0'))).good);
  }
}

TEST(CriteoParserTest, Categories) {
  const std::string ff(12, 'f');
  const std::vector<std::pair<std::string, std::uint64_t>> good = {
      {"", kMissingCategory},
      {"0", 0},
      {"a", 10},
      {"0a", 10},
      {"DEADBEEF", 0xdeadbeef},
      {"deadbeef", 0xdeadbeef},
      {"0123abcd", 0x0123abcd},
      {"123456789abc", 0x123456789abc},
      {"fffffffffffe", 0xfffffffffffe},
      {ff, HashCategory(ff)},
      {"user-17", HashCategory("user-17")},
      {"1234567g", HashCategory("1234567g")},
      {"g1234567", HashCategory("g1234567")},
      {"0000000000001", HashCategory("0000000000001")}};
  for (const int column : {14, 20, 39}) {
    for (const auto& [text, value] : good) {
      const Parsed parsed = Parse(LineWith(column, text));
      ASSERT_TRUE(parsed.good) << text << ": " << parsed.reason;
      EXPECT_EQ(parsed.row.categories[static_cast<std::size_t>(column - 14)], value) << text;
      EXPECT_LE(value, kMissingCategory);
    }
    for (const std::string& text :
         {std::string("ab\0d", 4), std::string(8, '\0'), std::string("a\x1f")})
      EXPECT_THAT(Parse(LineWith(column, text)).reason, HasSubstr("holds a control character"));
  }
  // Not the values of hexadecimal numbers, and pinned: models on disk depend on them.
  EXPECT_EQ(HashCategory("user-17"), 0x4089d44d5371u);
  EXPECT_EQ(HashCategory(ff), 0x94b071b6046eu);
}

TEST(CriteoParserTest, ColumnsAndLineEnds) {
  const std::string line = CriteoLine(1, 3);
  EXPECT_TRUE(Parse(line).good);
  EXPECT_TRUE(Parse(line + "\r").good);
  EXPECT_EQ(Parse(line + "\r").row.categories, Parse(line).row.categories);
  EXPECT_EQ(Parse("").reason, "the line is blank");
  EXPECT_EQ(Parse("\r").reason, "the line is blank");
  EXPECT_EQ(Parse("1").reason, "the line has too few columns");
  EXPECT_EQ(Parse(std::string("1") + std::string(38, '\t')).reason, "the line has too few columns");
  EXPECT_TRUE(Parse(std::string("1") + std::string(39, '\t')).good);
  EXPECT_EQ(Parse(std::string("1") + std::string(40, '\t')).reason,
            "the line has too many columns");
  EXPECT_EQ(Parse(line + "\t").reason, "the line has too many columns");
  EXPECT_EQ(Parse("1,2,3").reason, "column 1 (Label) is not 0 or 1");
  CriteoLayout with_id;
  with_id.has_id = true;
  EXPECT_EQ(Parse("17", with_id).reason, "the line has only one column");
  EXPECT_FALSE(Parse(std::string("1\t1\r\t"), {}).good);
}

TEST(CriteoParserTest, Layouts) {
  const auto header = [](const std::string& first, char delimiter) {
    std::string text = first;
    for (int i = 1; i <= 13; ++i) text.append(1, delimiter).append("I").append(std::to_string(i));
    for (int i = 1; i <= 26; ++i) text.append(1, delimiter).append("c").append(std::to_string(i));
    return text;
  };
  auto layout = DetectCriteoLayout(header("Id,Label", ',') + "\r");
  ASSERT_TRUE(layout.ok());
  EXPECT_TRUE(layout->has_header && layout->has_id && layout->delimiter == ',');
  layout = DetectCriteoLayout(header("LABEL", '\t'));
  ASSERT_TRUE(layout.ok());
  EXPECT_TRUE(layout->has_header && !layout->has_id && layout->delimiter == '\t');
  layout = DetectCriteoLayout(CriteoLine(1, 5, ','));
  ASSERT_TRUE(layout.ok());
  EXPECT_TRUE(!layout->has_header && !layout->has_id && layout->delimiter == ',');
  layout = DetectCriteoLayout("");
  ASSERT_TRUE(layout.ok());
  EXPECT_TRUE(!layout->has_header && layout->delimiter == '\t');

  EXPECT_THAT(DetectCriteoLayout(header("label,more", ',')).status().message(),
              HasSubstr("41 columns"));
  EXPECT_THAT(DetectCriteoLayout(header("a,b,label", ',')).status().message(),
              HasSubstr("the label in column 3"));
  std::string swapped = header("label", ',');
  swapped.replace(swapped.find("I3"), 2, "I4");
  EXPECT_THAT(DetectCriteoLayout(swapped).status().message(),
              HasSubstr("has I4 in column 4 where I3 belongs"));
}

TEST(CriteoParserTest, IntegerFeatures) {
  EXPECT_EQ(LogOfInteger(0), 0.0f);
  for (const std::int64_t x : {1, 2, 3, 1023, 1024, 123456, 999999999}) {
    EXPECT_NEAR(LogOfInteger(x), std::log1p(static_cast<double>(x)), 2e-6) << x;
    EXPECT_EQ(LogOfInteger(-x), -LogOfInteger(x));
  }
  // Contestants' rule: above 2 the square of the logarithm, below each number its own.
  EXPECT_EQ(BucketOfInteger(3), 1u);
  EXPECT_EQ(BucketOfInteger(8), 4u);
  EXPECT_EQ(BucketOfInteger(1000), 47u);
  for (std::int64_t x = 3; x < 100000; x += 7) {
    const double log = std::log(static_cast<double>(x));
    if (std::abs(log * log - std::round(log * log)) < 1e-9) continue;
    ASSERT_EQ(BucketOfInteger(x), static_cast<std::uint64_t>(log * log)) << x;
  }
  const std::uint64_t base = std::uint64_t{1} << 40;
  EXPECT_EQ(BucketOfInteger(2), base);
  EXPECT_EQ(BucketOfInteger(1), base + 1);
  EXPECT_EQ(BucketOfInteger(0), base + 2);
  EXPECT_EQ(BucketOfInteger(-1), base + 3);
  EXPECT_EQ(BucketOfInteger(-999999999999999999), 2 * base - 1);
}

TEST(ExampleEncoderTest, SlotsAndKeys) {
  CriteoRow row;
  row.integers.fill(kMissingInteger);
  row.integers[0] = 8;
  row.integers[1] = -2;
  row.categories.fill(kMissingCategory);
  row.categories[25] = 0xabc;
  const std::uint64_t missing = kMissingCategory;

  const ExampleEncoder dense(IntegerEncoding::kDense, false, 26);
  EXPECT_EQ(dense.schema().slots.size(), 26u);
  EXPECT_EQ(dense.schema().slots[0].name, "C1");
  EXPECT_EQ(dense.schema().slots[0].id, 14);
  EXPECT_EQ(dense.schema().slots[25].id, 39);
  EXPECT_EQ(dense.schema().dense_width(), 26u);
  Batch batch = dense.NewBatch(1);
  dense.Append(1, row.integers.data(), row.categories.data(), &batch);
  EXPECT_EQ(batch.keys, (std::vector<Key>{Key{39} << 48 | 0xabc}));
  EXPECT_EQ(batch.dense[0], LogOfInteger(8));
  EXPECT_EQ(batch.dense[1], -LogOfInteger(2));
  EXPECT_EQ(batch.dense[2], 0.0f);
  EXPECT_EQ(batch.dense[13], 0.0f);
  EXPECT_EQ(batch.dense[15], 1.0f);

  const ExampleEncoder bucket(IntegerEncoding::kBucket, true, 26);
  EXPECT_EQ(bucket.schema().slots.size(), 39u);
  EXPECT_EQ(bucket.schema().slots[0].name, "I1");
  EXPECT_EQ(bucket.schema().slots[12].id, 13);
  EXPECT_EQ(bucket.schema().dense_width(), 0u);
  batch = bucket.NewBatch(1);
  bucket.Append(0, row.integers.data(), row.categories.data(), &batch);
  ASSERT_EQ(batch.keys.size(), 39u);
  EXPECT_EQ(batch.keys[0], Key{1} << 48 | 4);
  EXPECT_EQ(batch.keys[1], Key{2} << 48 | BucketOfInteger(-2));
  EXPECT_EQ(batch.keys[2], Key{3} << 48 | missing);
  EXPECT_EQ(batch.keys[13], Key{14} << 48 | missing);
  EXPECT_EQ(batch.keys[38], Key{39} << 48 | 0xabc);
  EXPECT_TRUE(batch.dense.empty());

  const ExampleEncoder both(IntegerEncoding::kBoth, false, 26);
  EXPECT_EQ(both.schema().slots.size(), 39u);
  EXPECT_EQ(both.schema().dense_width(), 26u);
  EXPECT_NE(both.schema().ToText(), dense.schema().ToText());
}

}  // namespace
}  // namespace terrace
