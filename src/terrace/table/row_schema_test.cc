#include "terrace/table/row_schema.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
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

}  // namespace
}  // namespace terrace
