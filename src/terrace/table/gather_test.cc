#include "terrace/table/gather.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/table/testing/random_minibatch.h"

namespace terrace {
namespace {

RowSchema Make(std::uint32_t dim, bool wide, const char* table = "main") {
  std::vector<SegmentSpec> segments;
  SegmentSpec spec;
  spec.initializer.scale = 1.0f;
  if (dim != 0) {
    spec.name = "embedding";
    spec.dim = dim;
    segments.push_back(spec);
  }
  if (wide) {
    spec.name = "wide";
    spec.dim = 1;
    segments.push_back(spec);
  }
  Result<RowSchema> schema = RowSchema::Create(table, std::move(segments));
  EXPECT_TRUE(schema.ok()) << schema.status().ToString();
  return std::move(schema).value();
}

struct Rows {
  Rows(const RowSchema& schema, const RandomMiniBatch& batch)
      : bytes(batch.row_number.size() * schema.row_bytes()) {
    for (std::size_t r = 0; r < batch.row_number.size(); ++r) {
      schema.InitializeRow(5, batch.row_number[r], bytes.data() + r * schema.row_bytes());
      row.push_back(bytes.data() + r * schema.row_bytes());
    }
  }
  std::vector<std::byte> bytes;
  std::vector<const std::byte*> row;
};

std::vector<PooledSlot> AllSlots(const RandomMiniBatch& batch, bool mean = false) {
  std::vector<PooledSlot> slots;
  for (std::uint32_t s = 0; s < batch.options.slots; ++s) {
    slots.push_back({s, s * batch.options.dim, mean});
  }
  return slots;
}

PooledLookup Lookup(const RandomMiniBatch& batch, const Rows& rows,
                    std::span<const PooledSlot> slots) {
  PooledLookup lookup;
  lookup.row = rows.row;
  lookup.slots = slots;
  lookup.key_begin = batch.key_begin;
  lookup.data_slots = batch.options.slots;
  lookup.row_index = batch.row_index;
  lookup.value = batch.value;
  return lookup;
}

struct Output {
  Output(const RandomMiniBatch& batch, float fill)
      : block(batch.options.examples * batch.stride(), fill), wide(batch.options.examples) {}
  bool operator==(const Output& other) const {
    return std::memcmp(block.data(), other.block.data(), block.size() * 4) == 0 &&
           std::memcmp(wide.data(), other.wide.data(), wide.size() * 4) == 0;
  }
  std::vector<float> block, wide;
};

// Key by key, in order, from the first key on.
Output Expected(const RowSchema& schema, const RandomMiniBatch& batch, const Rows& rows,
                std::span<const PooledSlot> slots, float fill) {
  Output output(batch, fill);
  const Segment* embedding = schema.FindSegment("embedding");
  const Segment* wide = schema.FindSegment("wide");
  const auto pool = [&](const PooledSlot& slot, std::uint32_t e, std::uint32_t offset) {
    const std::uint32_t cell = e * batch.options.slots + slot.slot;
    const std::uint32_t begin = batch.key_begin[cell], end = batch.key_begin[cell + 1];
    float sum = 0.0f;
    bool first = true;
    for (std::uint32_t o = begin; o < end; ++o) {
      if (rows.row[batch.row_index[o]] == nullptr) continue;
      const float w = *reinterpret_cast<const float*>(rows.row[batch.row_index[o]] + offset);
      const float term = batch.value.empty() ? w : batch.value[o] * w;
      sum = first ? term : sum + term;
      first = false;
    }
    return slot.mean && end > begin ? sum / static_cast<float>(end - begin) : sum;
  };
  for (std::uint32_t e = 0; e < batch.options.examples; ++e) {
    for (const PooledSlot& slot : slots) {
      for (std::uint32_t i = 0; embedding != nullptr && i < embedding->dim; ++i) {
        output.block[e * batch.stride() + slot.input_offset + i] =
            pool(slot, e, embedding->weight_offset + 4 * i);
      }
      if (wide != nullptr) output.wide[e] += pool(slot, e, wide->weight_offset);
    }
  }
  return output;
}

TEST(GatherPooledTest, EqualsAPlainLoop) {
  for (std::uint32_t dim : {0u, 1u, 5u, 8u, 16u, 32u, 64u, 65u}) {
    for (int variant = 0; variant < 8; ++variant) {
      RandomMiniBatchOptions options;
      options.seed = dim * 10 + variant;
      options.dim = dim;
      options.values = (variant & 1) != 0;
      options.slots = variant == 3 ? 1 : 4;
      const bool mean = (variant & 2) != 0, wide = dim == 0 || (variant & 4) != 0;
      const RandomMiniBatch batch(options);
      const RowSchema schema = Make(dim, wide);
      Rows rows(schema, batch);
      rows.row[1] = nullptr;  // An unseen key reads as zeros.
      const std::vector<PooledSlot> slots = AllSlots(batch, mean);
      const Output expected = Expected(schema, batch, rows, slots, 7.0f);
      for (Specialise specialise : {Specialise::kYes, Specialise::kNo}) {
        Output output(batch, 7.0f);
        GatherPooled(schema, Lookup(batch, rows, slots), 0, options.examples, output.block.data(),
                     batch.stride(), output.wide.data(), specialise);
        ASSERT_TRUE(output == expected) << "dim " << dim << " variant " << variant;
      }
    }
  }
}

TEST(GatherPooledTest, AnySplitGivesTheSameBits) {
  RandomMiniBatchOptions options;
  options.dim = 16;
  options.examples = 333;
  const RandomMiniBatch batch(options);
  const RowSchema schema = Make(16, true);
  const Rows rows(schema, batch);
  const std::vector<PooledSlot> slots = AllSlots(batch);
  const Output expected = Expected(schema, batch, rows, slots, 0.0f);
  Rng rng(3);
  for (int trial = 0; trial < 10; ++trial) {
    Output output(batch, 0.0f);
    for (std::size_t first = 0; first < options.examples;) {
      const std::size_t last =
          std::min<std::size_t>(options.examples, first + rng.Below(10 * trial + 2));
      // Lines count from the range's first example.
      GatherPooled(schema, Lookup(batch, rows, slots), first, last,
                   output.block.data() + first * batch.stride(), batch.stride(),
                   output.wide.data() + first);
      first = last;
    }
    ASSERT_TRUE(output == expected);
  }
}

TEST(GatherPooledTest, TablesFillTheirColumnsOfOneBlock) {
  RandomMiniBatchOptions options;
  options.dim = 8;
  options.slots = 5;
  const RandomMiniBatch batch(options);
  const RowSchema a = Make(8, true, "a"), b = Make(8, true, "b"), lr = Make(0, true, "lr");
  const Rows rows_a(a, batch), rows_b(b, batch), rows_lr(lr, batch);
  const std::vector<PooledSlot> of_a = {{0, 32, false}, {3, 0, true}}, of_b = {{4, 8, false}},
                                of_lr = {{1, 0, false}};
  Output output(batch, 7.0f);
  const auto gather = [&](const RowSchema& schema, const Rows& rows,
                          const std::vector<PooledSlot>& slots) {
    GatherPooled(schema, Lookup(batch, rows, slots), 0, options.examples, output.block.data(),
                 batch.stride(), output.wide.data());
  };
  gather(a, rows_a, of_a);
  gather(b, rows_b, of_b);
  gather(lr, rows_lr, of_lr);
  const Output only_a = Expected(a, batch, rows_a, of_a, 7.0f);
  const Output only_b = Expected(b, batch, rows_b, of_b, 7.0f);
  const Output only_lr = Expected(lr, batch, rows_lr, of_lr, 7.0f);
  for (std::uint32_t e = 0; e < options.examples; ++e) {
    for (std::size_t c = 0; c < batch.stride(); ++c) {
      const std::size_t at = e * batch.stride() + c;
      const Output& from = c >= 8 && c < 16 ? only_b : only_a;  // Others keep the fill.
      ASSERT_EQ(output.block[at], from.block[at]) << e << " " << c;
    }
    ASSERT_NEAR(output.wide[e], only_a.wide[e] + only_b.wide[e] + only_lr.wide[e], 1e-5);
  }
}

TEST(GatherPooledTest, ReadsAMiniBatchInsideItsBatch) {
  RandomMiniBatchOptions options;
  options.dim = 8;
  options.values = true;
  const RandomMiniBatch batch(options);
  const RowSchema schema = Make(8, false);
  const Rows rows(schema, batch);
  const std::vector<PooledSlot> slots = AllSlots(batch);
  const Output expected = Expected(schema, batch, rows, slots, 0.0f);
  PooledLookup lookup = Lookup(batch, rows, slots);
  const std::size_t start = 20;
  lookup.first_occurrence = batch.key_begin[start * options.slots];
  lookup.key_begin = lookup.key_begin.subspan(start * options.slots);
  lookup.row_index = lookup.row_index.subspan(lookup.first_occurrence);
  lookup.value = lookup.value.subspan(lookup.first_occurrence);
  Output output(batch, 0.0f);
  GatherPooled(schema, lookup, 0, options.examples - start, output.block.data(), batch.stride(),
               nullptr);
  EXPECT_EQ(std::memcmp(output.block.data(), expected.block.data() + start * batch.stride(),
                        (options.examples - start) * batch.stride() * 4),
            0);
}

// The gradient that Accumulate forms for a weight is the slope of what GatherPooled computes.
TEST(GatherPooledTest, AccumulateIsItsTranspose) {
  for (const bool mean : {false, true}) {
    RandomMiniBatchOptions options;
    options.dim = 8;
    options.values = true;
    options.examples = 40;
    RandomMiniBatch batch(options);
    const RowSchema schema = Make(8, true);
    Rows rows(schema, batch);
    const std::vector<PooledSlot> slots = AllSlots(batch, mean);
    if (mean) {  // As the header asks: value / number of keys, by row.
      std::vector<std::uint32_t> next(batch.begin.begin(), batch.begin.end() - 1);
      for (std::size_t cell = 0; cell + 1 < batch.key_begin.size(); ++cell) {
        const std::uint32_t begin = batch.key_begin[cell], end = batch.key_begin[cell + 1];
        for (std::uint32_t o = begin; o < end; ++o) {
          batch.row_value[next[batch.row_index[o]]++] =
              batch.value[o] / static_cast<float>(end - begin);
        }
      }
    }
    // loss = <gradient, block> + <wide gradient, wide> is linear: its value is <sums, weights>.
    Output output(batch, 0.0f);
    GatherPooled(schema, Lookup(batch, rows, slots), 0, options.examples, output.block.data(),
                 batch.stride(), output.wide.data());
    double loss = 0;
    for (std::uint32_t e = 0; e < options.examples; ++e) {
      loss += static_cast<double>(output.wide[e]) * batch.wide[e];
      for (std::uint32_t c = 0; c < options.slots * options.dim; ++c) {
        loss += static_cast<double>(output.block[e * batch.stride() + c]) *
                batch.gradient[e * batch.stride() + c];
      }
    }
    std::vector<std::byte*> mutable_rows;
    for (std::size_t r = 0; r < rows.row.size(); ++r) {
      mutable_rows.push_back(rows.bytes.data() + r * schema.row_bytes());
    }
    std::vector<float> sum(rows.row.size() * 9);
    std::vector<StatisticsDelta> delta(rows.row.size());
    Accumulate(schema, batch.Rows(mutable_rows), batch.Gradients(), 0, rows.row.size(), sum.data(),
               delta.data());
    double transposed = 0;
    for (std::size_t r = 0; r < rows.row.size(); ++r) {
      for (int i = 0; i < 9; ++i) {
        transposed +=
            static_cast<double>(sum[r * 9 + i]) * reinterpret_cast<const float*>(rows.row[r])[i];
      }
    }
    EXPECT_NEAR(transposed, loss, 1e-5 * std::max(1.0, std::fabs(loss)));
    EXPECT_GT(std::fabs(loss), 1e-3);
  }
}

}  // namespace
}  // namespace terrace
