#include "terrace/table/row_schema.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/table/initializer.h"

namespace terrace {
namespace {

SegmentSpec Embedding(std::uint32_t dim, SparseOptimizerSpec::Type type) {
  SegmentSpec spec;
  spec.name = "embedding";
  spec.dim = dim;
  spec.optimizer.type = type;
  if (type == SparseOptimizerSpec::Type::kFtrl) {
    spec.initializer.type = InitializerSpec::Type::kZeros;
  }
  return spec;
}

SegmentSpec Wide(SparseOptimizerSpec::Type type) {
  SegmentSpec spec = Embedding(1, type);
  spec.name = "wide";
  return spec;
}

RowSchema Make(std::vector<SegmentSpec> segments, std::string table = "main") {
  Result<RowSchema> schema = RowSchema::Create(std::move(table), std::move(segments));
  EXPECT_TRUE(schema.ok()) << schema.status().ToString();
  return std::move(schema).value();
}

std::vector<std::byte> Row(const RowSchema& schema, std::uint64_t seed, Key key) {
  // Rows start from whatever the memory held before.
  std::vector<std::byte> row(schema.row_bytes(), std::byte{0xee});
  schema.InitializeRow(seed, key, row.data());
  return row;
}

TEST(RowSchemaTest, LaysOutWeightsThenStateThenStatistics) {
  const RowSchema schema = Make(
      {Embedding(8, SparseOptimizerSpec::Type::kAdaGrad), Wide(SparseOptimizerSpec::Type::kFtrl)});
  EXPECT_EQ(schema.weight_floats(), 9u);
  const Segment& embedding = *schema.FindSegment("embedding");
  const Segment& wide = *schema.FindSegment("wide");
  EXPECT_EQ(embedding.weight_offset, 0u);
  EXPECT_EQ(wide.weight_offset, 32u);
  EXPECT_EQ(embedding.state_offset, 36u);
  EXPECT_EQ(embedding.state_floats, 8u);
  EXPECT_EQ(wide.state_offset, 68u);
  EXPECT_EQ(wide.state_floats, 2u);
  // 76 bytes of weights and state, 4 of padding.
  EXPECT_EQ(schema.show_offset(), 80u);
  EXPECT_EQ(schema.click_offset(), 84u);
  EXPECT_EQ(schema.last_seen_offset(), 88u);
  EXPECT_EQ(schema.row_bytes(), 96u);
}

TEST(RowSchemaTest, InitializesTheWholeRowByKeyAndSeed) {
  const RowSchema schema = Make(
      {Embedding(8, SparseOptimizerSpec::Type::kAdaGrad), Wide(SparseOptimizerSpec::Type::kFtrl)});
  const std::vector<std::byte> row = Row(schema, 7, 42);
  EXPECT_EQ(row, Row(schema, 7, 42));
  EXPECT_NE(row, Row(schema, 7, 43));
  EXPECT_NE(row, Row(schema, 8, 42));
  const float* weight = reinterpret_cast<const float*>(row.data());
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(std::fabs(weight[i]) <= 0.01f) << weight[i];
  for (std::size_t i = 32; i < row.size(); ++i) EXPECT_EQ(row[i], std::byte{0}) << i;
}

TEST(RowSchemaTest, NamesEveryFieldOnceAndCoversTheRow) {
  using Type = SparseOptimizerSpec::Type;
  for (Type type : {Type::kSgd, Type::kAdaGrad, Type::kAdaGradRow, Type::kAdam, Type::kFtrl}) {
    for (std::uint32_t dim : {1u, 2u, 7u, 8u, 64u, 4096u}) {
      const RowSchema schema = Make({Wide(Type::kSgd), Embedding(dim, type)});
      std::uint32_t end = 0;
      for (const RowField& field : schema.fields()) {
        if (field.name == "show") end = (end + 7) / 8 * 8;
        EXPECT_EQ(field.offset, end) << field.name;
        end = field.offset + field.count * (field.type == StorageType::kUint64 ? 8 : 4);
      }
      EXPECT_EQ(end, schema.row_bytes());
      EXPECT_EQ(schema.row_bytes() % 8, 0u);
      EXPECT_EQ(schema.FindSegment("embedding")->state_floats,
                OptimizerStateFloats(schema.FindSegment("embedding")->optimizer, dim));
    }
  }
}

TEST(RowSchemaTest, FieldsNameTypeAndMergeRule) {
  const RowSchema schema = Make({Embedding(3, SparseOptimizerSpec::Type::kAdam)});
  std::vector<std::string> names;
  for (const RowField& field : schema.fields()) names.push_back(field.name);
  EXPECT_EQ(names, (std::vector<std::string>{"embedding.weight", "embedding.m", "embedding.v",
                                             "embedding.step", "show", "click", "last_seen"}));
  EXPECT_EQ(schema.fields()[2].merge, MergeRule::kOptimizer);
  EXPECT_EQ(schema.fields()[4].merge, MergeRule::kAdd);
  EXPECT_EQ(schema.fields()[6].merge, MergeRule::kMax);
  EXPECT_EQ(schema.fields()[6].type, StorageType::kUint64);
}

TEST(RowSchemaTest, TextTellsSchemasApart) {
  const auto text = [](auto change) {
    SegmentSpec spec = Embedding(8, SparseOptimizerSpec::Type::kAdaGrad);
    change(&spec);
    return Make({spec}).ToText();
  };
  const std::string base = text([](SegmentSpec*) {});
  EXPECT_EQ(base, text([](SegmentSpec*) {}));
  EXPECT_NE(base, text([](SegmentSpec* s) { s->dim = 16; }));
  EXPECT_NE(base, text([](SegmentSpec* s) { s->initializer.scale = 0.010000001f; }));
  EXPECT_NE(base,
            text([](SegmentSpec* s) { s->initializer.type = InitializerSpec::Type::kNormal; }));
  EXPECT_NE(base, text([](SegmentSpec* s) { s->optimizer.epsilon = 1e-7f; }));
  EXPECT_NE(base, text([](SegmentSpec* s) { s->optimizer.initial_accumulator = 0.1f; }));
  EXPECT_NE(base, text([](SegmentSpec* s) { s->l2 = 1e-6f; }));
  // Settings that its optimizer does not read do not change what the row is.
  EXPECT_EQ(base, text([](SegmentSpec* s) { s->optimizer.beta1 = 0.8f; }));
  EXPECT_NE(Make({Wide(SparseOptimizerSpec::Type::kSgd)}, "a").ToText(),
            Make({Wide(SparseOptimizerSpec::Type::kSgd)}, "b").ToText());
}

TEST(RowSchemaTest, RefusesWhatCannotTrain) {
  using Type = SparseOptimizerSpec::Type;
  const auto refuse = [](std::vector<SegmentSpec> segments, std::string_view part) {
    const Result<RowSchema> schema = RowSchema::Create("t", std::move(segments));
    ASSERT_FALSE(schema.ok()) << part;
    EXPECT_EQ(schema.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(schema.status().message().find(part), std::string::npos) << schema.status().message();
    EXPECT_NE(schema.status().message().find("table \"t\""), std::string::npos);
  };
  const auto with = [](Type type, auto change) {
    SegmentSpec spec = Embedding(8, type);
    change(&spec);
    return std::vector<SegmentSpec>{spec};
  };
  refuse({}, "at least one segment");
  refuse({Embedding(0, Type::kSgd)}, "dimension 0");
  refuse({Embedding(4097, Type::kSgd)}, "dimension 4097");
  refuse({Embedding(8, Type::kSgd), Embedding(8, Type::kSgd)}, "twice");
  refuse(with(Type::kSgd, [](SegmentSpec* s) { s->name = "deep"; }), "\"deep\"");
  refuse(with(Type::kSgd, [](SegmentSpec* s) { s->name = "wide"; }), "one weight");
  refuse(with(Type::kSgd, [](SegmentSpec* s) { s->l2 = -1.0f; }), "l2");
  refuse(with(Type::kSgd, [](SegmentSpec* s) { s->initializer.scale = NAN; }), "scale");
  refuse(with(Type::kSgd, [](SegmentSpec* s) { s->initializer.scale = -0.1f; }), "negative");
  refuse(with(Type::kFtrl,
              [](SegmentSpec* s) { s->initializer.type = InitializerSpec::Type::kUniform; }),
         "z = n = 0");
  refuse(with(Type::kFtrl, [](SegmentSpec* s) { s->l2 = 0.1f; }), "its own l2");
  refuse(with(Type::kFtrl, [](SegmentSpec* s) { s->optimizer.alpha = 0.0f; }), "alpha");
  refuse(with(Type::kFtrl, [](SegmentSpec* s) { s->optimizer.beta = 0.0f; }), "beta and l2");
  refuse(with(Type::kAdaGrad, [](SegmentSpec* s) { s->optimizer.epsilon = 0.0f; }), "epsilon");
  refuse(with(Type::kAdaGradRow, [](SegmentSpec* s) { s->optimizer.epsilon = INFINITY; }),
         "epsilon");
  refuse(with(Type::kAdam, [](SegmentSpec* s) { s->optimizer.beta2 = 1.0f; }), "beta2");
  EXPECT_FALSE(RowSchema::Create("", {Embedding(8, Type::kSgd)}).ok());
}

TEST(InitializerTest, DependsOnSeedTableSegmentKeyAndElement) {
  const RowSchema a = Make({Embedding(8, SparseOptimizerSpec::Type::kSgd)}, "a");
  const RowSchema b = Make({Embedding(8, SparseOptimizerSpec::Type::kSgd)}, "b");
  EXPECT_NE(Row(a, 1, 5), Row(b, 1, 5));
  // A segment's weights do not depend on its neighbours or on the dimension beyond them.
  const RowSchema more =
      Make({Wide(SparseOptimizerSpec::Type::kSgd), Embedding(16, SparseOptimizerSpec::Type::kAdam)},
           "a");
  EXPECT_EQ(std::memcmp(Row(a, 1, 5).data(), Row(more, 1, 5).data() + 4, 32), 0);
  const std::vector<std::byte> row = Row(more, 1, 5);
  const float* weight = reinterpret_cast<const float*>(row.data());
  for (int i = 0; i < 17; ++i) {
    for (int j = 0; j < i; ++j) EXPECT_NE(weight[i], weight[j]) << i << " " << j;
  }
}

TEST(InitializerTest, StartsAccumulatorsWhereTheOptimizerSays) {
  SegmentSpec spec = Embedding(5, SparseOptimizerSpec::Type::kAdaGrad);
  spec.optimizer.initial_accumulator = 0.25f;
  SegmentSpec wide = Wide(SparseOptimizerSpec::Type::kAdaGradRow);
  wide.optimizer.initial_accumulator = 0.5f;
  wide.initializer = {InitializerSpec::Type::kConstant, -2.0f};
  const RowSchema schema = Make({spec, wide});
  const std::vector<std::byte> row = Row(schema, 1, 9);
  const float* value = reinterpret_cast<const float*>(row.data());
  EXPECT_EQ(value[5], -2.0f);
  for (int i = 6; i < 11; ++i) EXPECT_EQ(value[i], 0.25f);
  EXPECT_EQ(value[11], 0.5f);
}

// Moments and range over many keys; the limits are five standard errors.
TEST(InitializerTest, HasTheAskedDistribution) {
  for (const auto type : {InitializerSpec::Type::kUniform, InitializerSpec::Type::kNormal}) {
    SegmentSpec spec = Embedding(16, SparseOptimizerSpec::Type::kSgd);
    spec.initializer = {type, 0.5f};
    const RowSchema schema = Make({spec});
    double sum = 0, squares = 0, fourth = 0, lowest = 1e9, highest = -1e9;
    const int keys = 20000, n = keys * 16;
    std::vector<std::byte> row(schema.row_bytes());
    for (int key = 0; key < keys; ++key) {
      schema.InitializeRow(3, static_cast<Key>(key), row.data());
      for (int i = 0; i < 16; ++i) {
        const double w = reinterpret_cast<const float*>(row.data())[i];
        sum += w;
        squares += w * w;
        fourth += w * w * w * w;
        lowest = std::min(lowest, w);
        highest = std::max(highest, w);
      }
    }
    const bool uniform = type == InitializerSpec::Type::kUniform;
    const double variance = uniform ? 0.25 / 3 : 0.25;
    const double fourth_moment = uniform ? 0.0625 / 5 : 3 * 0.0625;
    EXPECT_NEAR(sum / n, 0.0, 5 * std::sqrt(variance / n));
    EXPECT_NEAR(squares / n, variance, 5 * std::sqrt((fourth_moment - variance * variance) / n));
    EXPECT_NEAR(fourth / n, fourth_moment, 0.05 * fourth_moment);
    if (uniform) {
      EXPECT_GE(lowest, -0.5);
      EXPECT_LT(lowest, -0.499);
      EXPECT_LT(highest, 0.5);
      EXPECT_GT(highest, 0.499);
    } else {
      EXPECT_LT(highest, 5.4 * 0.5);
      EXPECT_GT(highest, 3.5 * 0.5);
    }
  }
}

TEST(InitializerTest, NormalInvertsTheCumulativeDistribution) {
  double worst = 0;
  for (std::uint32_t k = 0; k < (1u << 24);
       k = k < 4096 || k > (1u << 24) - 4096 ? k + 1 : k + 997) {
    const double z = NormalFromBits(k);
    const double p = (2.0 * k + 1) / 33554432.0;
    // One Newton step on the cumulative distribution tells how far z is from its inverse.
    const double side = p < 0.5 ? z : -z;
    const double tail = 0.5 * std::erfc(-side * M_SQRT1_2);
    const double density = std::exp(-0.5 * z * z) / std::sqrt(2 * M_PI);
    const double error = (tail - std::min(p, 1 - p)) / density;
    worst = std::max(worst, std::fabs(error) / std::max(std::fabs(z), 1e-3));
    ASSERT_EQ(NormalFromBits((1u << 24) - 1 - k), -NormalFromBits(k));
  }
  EXPECT_LT(worst, 4e-6);
}

std::string Hex(const std::vector<std::byte>& bytes) {
  std::string text;
  for (std::byte b : bytes) {
    static constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<int>(b) >> 4];
    text += kDigits[static_cast<int>(b) & 15];
  }
  return text;
}

// The rows of format version 1 for fixed seeds and keys. A difference means that models of earlier
// programs would not go on to the same bits.
TEST(RowSchemaTest, RowsOfVersion1AreUnchanged) {
  using Type = SparseOptimizerSpec::Type;
  SegmentSpec normal = Embedding(5, Type::kAdam);
  normal.initializer = {InitializerSpec::Type::kNormal, 0.02f};
  SegmentSpec accumulated = Embedding(16, Type::kAdaGradRow);
  accumulated.optimizer.initial_accumulator = 0.1f;
  SegmentSpec constant = Wide(Type::kSgd);
  constant.initializer = {InitializerSpec::Type::kConstant, 0.5f};
  std::string actual;
  for (const RowSchema& schema :
       {Make({Embedding(8, Type::kAdaGrad), Wide(Type::kFtrl)}), Make({normal}, "users"),
        Make({constant, accumulated}, "ads"), Make({Wide(Type::kFtrl)})}) {
    actual += schema.ToText();
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{7}}) {
      for (const Key key : {Key{0}, Key{0x0001000000000042}, ~Key{0}}) {
        actual += "row seed " + std::to_string(seed) + " key " + std::to_string(key) + " " +
                  Hex(Row(schema, seed, key)) + "\n";
      }
    }
  }
  std::ifstream file(std::string(TERRACE_TABLE_TESTDATA) + "/rows.v1.txt");
  const std::string golden((std::istreambuf_iterator<char>(file)),
                           std::istreambuf_iterator<char>());
  const std::string where = testing::TempDir() + "/rows.v1.txt";
  if (golden != actual) std::ofstream(where) << actual;
  EXPECT_TRUE(golden == actual) << "the rows of this build are in " << where;
}

}  // namespace
}  // namespace terrace
