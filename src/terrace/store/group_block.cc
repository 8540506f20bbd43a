#include "terrace/store/group_block.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/store/parameter_file.h"

namespace terrace {
namespace {

// Of a block, on average. Where 30 rows fit a group has 24: one group in nine then takes a second
// block, which costs less space than emptier groups would.
constexpr double kFillShare = 0.8;

// A block is a record without its head.
constexpr std::uint32_t BlockBytes(std::uint32_t disk_bytes) {
  return static_cast<std::uint32_t>(disk_bytes - kRecordHeadBytes);
}
constexpr std::uint32_t MostRows(std::uint32_t disk_bytes, std::uint32_t row_bytes) {
  return (BlockBytes(disk_bytes) - 8) / (8 + row_bytes);
}
static_assert(BlockBytes(GroupShape::kMostBlockBytes) <= kMaxRowBytes);
static_assert(MostRows(GroupShape::kMostBlockBytes, GroupLayout::kMostRowBytes) ==
                  GroupLayout::kLeastRows &&
              MostRows(GroupShape::kMostBlockBytes, GroupLayout::kMostRowBytes + 1) <
                  GroupLayout::kLeastRows);

}  // namespace

std::uint32_t GroupLayout::LeastBlock(std::uint32_t row_bytes) {
  TERRACE_CHECK(row_bytes > 0 && row_bytes <= kMostRowBytes);
  std::uint32_t disk_bytes = kBlockBytes;
  while (MostRows(disk_bytes, row_bytes) < kLeastRows) disk_bytes += kBlockBytes;
  return disk_bytes;
}

GroupLayout GroupLayout::Of(std::uint32_t row_bytes, std::uint32_t disk_bytes) {
  const std::uint32_t least = LeastBlock(row_bytes);
  if (disk_bytes == 0) disk_bytes = least;
  TERRACE_CHECK(disk_bytes >= least && disk_bytes % kBlockBytes == 0);
  GroupLayout layout;
  layout.row_bytes = row_bytes;
  layout.block_bytes = BlockBytes(disk_bytes);
  layout.most_rows = MostRows(disk_bytes, row_bytes);
  return layout;
}

double GroupLayout::filled_rows() const { return most_rows * kFillShare; }

std::uint64_t GroupLayout::FilterRows(std::uint64_t groups) const {
  return static_cast<std::uint64_t>(static_cast<double>(groups) * filled_rows());
}

std::size_t GroupLayout::PiecesFor(std::size_t rows) const {
  const auto filled = static_cast<std::size_t>(filled_rows());
  return rows <= most_rows ? 1 : (rows + filled - 1) / filled;
}

std::uint64_t GroupLayout::GroupsFor(std::uint64_t expected_rows) const {
  const double groups = static_cast<double>(expected_rows) / filled_rows();
  return std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::ceil(groups)));
}

std::uint32_t RecordRowBytes(IndexKind index, std::uint32_t row_bytes, std::uint32_t disk_bytes) {
  return index == IndexKind::kKey ? row_bytes : GroupLayout::Of(row_bytes, disk_bytes).block_bytes;
}

std::uint32_t BlockDiskBytes(std::uint32_t block_bytes) {
  return static_cast<std::uint32_t>(block_bytes + kRecordHeadBytes);
}

Result<BlockView> BlockView::Parse(const GroupLayout& layout, std::span<const std::byte> block,
                                   std::uint64_t least_hash) {
  if (block.size() != layout.block_bytes) {
    return CorruptionError(
        fmt::format("a block of {} bytes, not {}", block.size(), layout.block_bytes));
  }
  std::uint32_t head[2];
  std::memcpy(head, block.data(), sizeof head);
  if (head[0] > layout.most_rows || head[1] != 0) {
    return CorruptionError(
        fmt::format("a block says that it has {} rows, of {} at most", head[0], layout.most_rows));
  }
  const BlockView view(&layout, block.data(), head[0]);
  for (std::uint32_t i = 0; i < view.rows_; ++i) {
    const std::uint64_t hash = view.hash(i);
    if (hash < least_hash) {
      return CorruptionError(
          fmt::format("key {:#x} is out of order or of another block, at place {} of its block",
                      view.key(i), i));
    }
    // The last one may have the greatest hash of all.
    if (hash == ~std::uint64_t{0} && i + 1 < view.rows_) {
      return CorruptionError("a key follows that with the greatest hash");
    }
    least_hash = hash + 1;
  }
  return view;
}

std::optional<std::uint32_t> BlockView::Find(std::uint64_t hash) const {
  std::uint32_t begin = 0, end = rows_;
  while (begin < end) {
    const std::uint32_t middle = begin + (end - begin) / 2;
    if (this->hash(middle) < hash) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  if (begin < rows_ && this->hash(begin) == hash) return begin;
  return std::nullopt;
}

void MakeBlock(const GroupLayout& layout, std::span<const BlockRow> rows, std::byte* block) {
  TERRACE_CHECK(rows.size() <= layout.most_rows);
  std::memset(block, 0, layout.block_bytes);
  const auto count = static_cast<std::uint32_t>(rows.size());
  std::memcpy(block, &count, sizeof count);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Key key = UnmixKey(rows[i].hash);
    std::memcpy(block + layout.KeyOffset(i), &key, sizeof key);
    std::memcpy(block + layout.RowOffset(i), rows[i].row, layout.row_bytes);
  }
}

}  // namespace terrace
