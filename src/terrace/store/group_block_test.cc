// Blocks, directory and filters of groups: what goes in comes out, damaged bytes are no block, and
// a filter never says that a key is not there that is.
#include "terrace/store/group_block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/group_directory.h"
#include "terrace/store/group_filter.h"
#include "terrace/store/parameter_file.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

TEST(GroupLayout, RecordsFillSectors) {
  for (const std::uint32_t row_bytes : {1u, 8u, 56u, 128u, 300u, 500u, 501u, 4000u, 65520u}) {
    const GroupLayout layout = GroupLayout::Of(row_bytes);
    const RecordLayout record = RecordLayout::Of("ads", 0, layout.block_bytes);
    EXPECT_EQ(record.record_bytes % 4096, 0u);
    EXPECT_GE(layout.most_rows, 4u);
    EXPECT_LE(layout.RowOffset(layout.most_rows), layout.block_bytes);
    EXPECT_GT(layout.RowOffset(layout.most_rows) + 8 + row_bytes, layout.block_bytes);
    // Not a sector more than four rows take.
    if (record.record_bytes > 4096) {
      EXPECT_GT(8 + 4 * (8 + row_bytes), layout.block_bytes - 4096);
    }
    EXPECT_EQ(GroupLayout::LeastBlock(row_bytes), record.record_bytes);
    EXPECT_EQ(BlockDiskBytes(layout.block_bytes), record.record_bytes);
    // Larger ones that are asked for.
    const GroupLayout largest = GroupLayout::Of(row_bytes, GroupShape::kMostBlockBytes);
    EXPECT_EQ(BlockDiskBytes(largest.block_bytes), GroupShape::kMostBlockBytes);
    EXPECT_LE(largest.RowOffset(largest.most_rows), largest.block_bytes);
    EXPECT_GT(largest.RowOffset(largest.most_rows) + 8 + row_bytes, largest.block_bytes);
  }
  EXPECT_EQ(GroupLayout::Of(128, 8192).most_rows, 60u);
  EXPECT_EQ(GroupLayout::Of(128).most_rows, 29u);
  EXPECT_EQ(GroupLayout::Of(128).GroupsFor(0), 1u);
  EXPECT_EQ(GroupLayout::Of(128).GroupsFor(232), 10u);
  EXPECT_EQ(GroupLayout::Of(128).GroupsFor(233), 11u);
}

struct Made {
  std::vector<std::uint64_t> hashes;
  std::vector<std::vector<std::byte>> rows;
  std::vector<std::byte> bytes;
};

Made MakeRandom(const GroupLayout& layout, std::size_t rows, Rng* rng) {
  Made made;
  std::set<std::uint64_t> hashes;
  while (hashes.size() < rows) hashes.insert(rng->Next());
  made.hashes.assign(hashes.begin(), hashes.end());
  std::vector<BlockRow> block;
  for (const std::uint64_t hash : made.hashes) {
    made.rows.push_back(TestRow(UnmixKey(hash), 1, layout.row_bytes));
  }
  for (std::size_t i = 0; i < rows; ++i) block.push_back({made.hashes[i], made.rows[i].data()});
  made.bytes.assign(layout.block_bytes, std::byte{0xcc});
  MakeBlock(layout, block, made.bytes.data());
  return made;
}

TEST(GroupLayout, FourRowsHaveToFit) {
  GroupShape shape;
  TERRACE_EXPECT_OK(Store::CheckGroups(1100, shape));
  shape.block_bytes = 8192;
  TERRACE_EXPECT_OK(Store::CheckGroups(1100, shape));
  shape.block_bytes = 4096;
  TERRACE_EXPECT_OK(Store::CheckGroups(1000, shape));
  const Status status = Store::CheckGroups(1100, shape);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.ToString().find("group_block: 8"), std::string::npos) << status.ToString();
  EXPECT_FALSE(Store::CheckGroups(GroupLayout::kMostRowBytes + 1, {}).ok());
}

TEST(GroupBlock, RoundTrip) {
  Rng rng(5);
  for (const std::uint32_t row_bytes : {1u, 20u, 300u, 4096u}) {
    const GroupLayout layout = GroupLayout::Of(row_bytes);
    for (const std::size_t rows : {std::size_t{0}, std::size_t{1}, std::size_t{layout.most_rows}}) {
      const Made made = MakeRandom(layout, rows, &rng);
      const auto block = BlockView::Parse(layout, made.bytes, rows == 0 ? 77 : made.hashes.front());
      TERRACE_ASSERT_OK(block);
      ASSERT_EQ(block->size(), rows);
      for (std::uint32_t i = 0; i < rows; ++i) {
        EXPECT_EQ(block->Find(made.hashes[i]), i);
        EXPECT_FALSE(block->Find(made.hashes[i] + 1));
        EXPECT_EQ(std::vector<std::byte>(block->row(i), block->row(i) + row_bytes), made.rows[i]);
      }
      if (rows == 0) continue;
      EXPECT_FALSE(BlockView::Parse(layout, made.bytes, made.hashes.front() + 1).ok());
    }
  }
}

TEST(GroupBlock, WhatIsNoBlockIsRefused) {
  Rng rng(6);
  const GroupLayout layout = GroupLayout::Of(300);
  const Made made = MakeRandom(layout, 5, &rng);
  const auto with = [&](std::size_t at, int value) {
    std::vector<std::byte> bytes = made.bytes;
    bytes[at] = static_cast<std::byte>(value);
    return BlockView::Parse(layout, bytes, 0);
  };
  TERRACE_EXPECT_OK(with(0, 5));
  EXPECT_EQ(with(0, 6).status().code(),
            StatusCode::kCorruption);  // Key 0 comes after greater ones.
  EXPECT_EQ(with(0, 14).status().code(), StatusCode::kCorruption);
  EXPECT_EQ(with(3, 1).status().code(), StatusCode::kCorruption);
  EXPECT_EQ(with(4, 1).status().code(), StatusCode::kCorruption);
  EXPECT_FALSE(
      BlockView::Parse(layout, std::span(made.bytes).first(layout.block_bytes - 1), 0).ok());
  // The greatest hash of all, and a key behind it.
  std::vector<std::byte> row(layout.row_bytes), bytes(layout.block_bytes);
  const BlockRow last[] = {{~std::uint64_t{0}, row.data()}};
  MakeBlock(layout, last, bytes.data());
  TERRACE_EXPECT_OK(BlockView::Parse(layout, bytes, ~std::uint64_t{0}));
  bytes[0] = std::byte{2};
  EXPECT_FALSE(BlockView::Parse(layout, bytes, 0).ok());
}

TEST(GroupDirectory, StartsDivideTheHashes) {
  Rng rng(7);
  for (const std::uint64_t groups : {std::uint64_t{1}, std::uint64_t{3}, std::uint64_t{64},
                                     std::uint64_t{1000003}, GroupDirectory::kMostGroups}) {
    GroupDirectory directory(groups);
    EXPECT_EQ(directory.FirstStart(0), 0u);
    for (int i = 0; i < 2000; ++i) {
      const std::uint64_t group = rng.Below(groups);
      const std::uint64_t start = directory.FirstStart(group);
      EXPECT_EQ(directory.GroupOf(start), group);
      EXPECT_EQ(directory.StartOf(start), start);
      if (group > 0) {
        EXPECT_EQ(directory.GroupOf(start - 1), group - 1);
      }
    }
    EXPECT_EQ(directory.GroupOf(~std::uint64_t{0}), groups - 1);
  }
  GroupDirectory directory(3);
  std::set<std::uint64_t> starts = {directory.FirstStart(0), directory.FirstStart(1),
                                    directory.FirstStart(2)};
  for (int i = 0; i < 300; ++i) {
    const std::uint64_t start = rng.Next();
    directory.Add(start);
    directory.Add(start);
    starts.insert(start);
    const std::uint64_t hash = rng.Next();
    const auto after = starts.upper_bound(hash);
    EXPECT_EQ(directory.StartOf(hash), *std::prev(after));
    EXPECT_EQ(directory.LastOf(hash), after == starts.end() ? ~std::uint64_t{0} : *after - 1);
  }
  directory.Add(directory.FirstStart(1));
  EXPECT_EQ(directory.added(), 300u);
  std::vector<std::uint64_t> all;
  for (std::uint64_t group = 0; group < 3; ++group) {
    const std::vector<std::uint64_t> some = directory.StartsOf(group);
    EXPECT_EQ(directory.IsDivided(group), some.size() > 1);
    all.insert(all.end(), some.begin(), some.end());
  }
  EXPECT_EQ(all, std::vector<std::uint64_t>(starts.begin(), starts.end()));
}

TEST(GroupFilters, NeverDenyAKeyThatIsThere) {
  Rng rng(8);
  constexpr std::uint64_t kGroups = 500, kRows = 12'000;
  auto made = GroupFilters::Create(kGroups, kRows, 10);
  TERRACE_ASSERT_OK(made);
  GroupFilters filters = std::move(*made);
  EXPECT_EQ(filters.bytes(), (GroupFilters::BytesFor(kGroups, kRows, 10) + 4095) / 4096 * 4096);
  const GroupDirectory directory(kGroups);
  std::set<std::uint64_t> hashes;
  const auto expect_no_lie = [&] {
    for (const std::uint64_t hash : hashes) {
      ASSERT_TRUE(filters.MayHold(directory.GroupOf(hash), hash));
    }
  };
  // At what was expected few absent keys pass, at ten times as many more do.
  for (const std::uint64_t rows : {kRows, 10 * kRows}) {
    while (hashes.size() < rows) {
      const std::uint64_t hash = rng.Next();
      hashes.insert(hash);
      filters.Add(directory.GroupOf(hash), hash);
    }
    expect_no_lie();
    int passed = 0;
    for (int i = 0; i < 20'000; ++i) {
      const std::uint64_t hash = rng.Next();
      passed += filters.MayHold(directory.GroupOf(hash), hash) ? 1 : 0;
    }
    if (rows == kRows) {
      EXPECT_LT(passed, 20'000 * 3 / 100);
    }
  }
  // Of a group of which nothing is known everything may be there, until its keys are told.
  filters.Forget(17);
  EXPECT_FALSE(filters.IsKnown(17));
  EXPECT_TRUE(filters.IsKnown(16) && filters.IsKnown(18));
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(filters.MayHold(17, rng.Next()));
  std::vector<std::uint64_t> keys;
  for (const std::uint64_t hash : hashes) {
    if (directory.GroupOf(hash) == 17) keys.push_back(hash);
  }
  filters.SetKeys(17, keys);
  EXPECT_TRUE(filters.IsKnown(17));
  expect_no_lie();
  filters.Forget(17);
  filters.SetKeys(17, {});
  EXPECT_FALSE(filters.MayHold(17, keys.front()));
}

// The share of absent keys that pass, of filters with so many bits: about 0.6185^bits.
TEST(GroupFilters, FewerBitsPassMore) {
  constexpr std::uint64_t kGroups = 4, kRows = 100'000;
  const GroupDirectory directory(kGroups);
  std::uint64_t bytes_before = 0;
  for (const std::uint32_t bits : {0u, 1u, 2u, 5u, 10u, 20u, 32u}) {
    SCOPED_TRACE(bits);
    auto filters = GroupFilters::Create(kGroups, kRows, bits);
    TERRACE_ASSERT_OK(filters);
    EXPECT_GE(filters->bytes(), bytes_before);
    bytes_before = filters->bytes();
    Rng rng(bits);
    std::vector<std::uint64_t> hashes(kRows);
    for (std::uint64_t& hash : hashes) {
      hash = rng.Next();
      filters->Add(directory.GroupOf(hash), hash);
    }
    for (const std::uint64_t hash : hashes) {
      ASSERT_TRUE(filters->MayHold(directory.GroupOf(hash), hash));
    }
    constexpr int kAsked = 50'000;
    int passed = 0;
    for (int i = 0; i < kAsked; ++i) {
      const std::uint64_t hash = rng.Next();
      passed += filters->MayHold(directory.GroupOf(hash), hash) ? 1 : 0;
    }
    const double share = std::pow(0.6185, bits);
    EXPECT_LT(passed, kAsked * (1.15 * share + 0.0005));
    EXPECT_GT(passed, kAsked * (0.85 * share - 0.001));
  }
}

}  // namespace
}  // namespace terrace
