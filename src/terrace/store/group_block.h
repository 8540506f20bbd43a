// A block of rows of one group (docs/formats/group_block.md): what a store with an index by group
// keeps as one row of its parameter files. Threads: values, and views of bytes that they borrow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "terrace/base/ids.h"
#include "terrace/base/status.h"
#include "terrace/store/store.h"

namespace terrace {

// Where keys and rows lie in the blocks of a table.
struct GroupLayout {
  static constexpr std::uint32_t kMostRowBytes = 65520;
  // Of a block: fewer would make the index no smaller than one by key.
  static constexpr std::uint32_t kLeastRows = 4;

  std::uint32_t row_bytes = 0;
  std::uint32_t block_bytes = 0;
  std::uint32_t most_rows = 0;  // m of AIBox 4.1.

  // Of blocks of so many bytes on disk (0: of the least, as GroupShape::block_bytes). REQUIRES:
  // 0 < row_bytes <= kMostRowBytes, and the block holds kLeastRows.
  static GroupLayout Of(std::uint32_t row_bytes, std::uint32_t disk_bytes = 0);
  // Of the least block that holds kLeastRows, likewise.
  static std::uint32_t LeastBlock(std::uint32_t row_bytes);
  std::size_t KeyOffset(std::size_t i) const { return 8 + 8 * i; }
  std::size_t RowOffset(std::size_t i) const { return KeyOffset(most_rows) + i * row_bytes; }
  // Rows of a block on average: a group of so many rarely takes a second one.
  double filled_rows() const;
  // For which the filters of so many groups are made. An opened store does not know what was
  // expected of it; its groups do.
  std::uint64_t FilterRows(std::uint64_t groups) const;
  // Into how many blocks the rows of one are divided that do not fit it.
  std::size_t PiecesFor(std::size_t rows) const;
  // Groups for so many rows.
  std::uint64_t GroupsFor(std::uint64_t expected_rows) const;
};

// Payload of a record in the files of a table whose rows are this long: a row, or a block of them
// of so many bytes on disk (as of GroupLayout::Of).
std::uint32_t RecordRowBytes(IndexKind index, std::uint32_t row_bytes, std::uint32_t disk_bytes);
// The other way: what a block takes on disk that is a record's payload.
std::uint32_t BlockDiskBytes(std::uint32_t block_bytes);

// The rows of a block, in the order of their keys' hashes.
class BlockView {
 public:
  // kCorruption: these are not the bytes of a block whose hashes are `least_hash` or more; the
  // message says what is wrong, not where.
  static Result<BlockView> Parse(const GroupLayout& layout, std::span<const std::byte> block,
                                 std::uint64_t least_hash);

  std::uint32_t size() const { return rows_; }
  Key key(std::size_t i) const {
    Key key;
    __builtin_memcpy(&key, block_ + layout_->KeyOffset(i), sizeof key);
    return key;
  }
  std::uint64_t hash(std::size_t i) const { return MixKey(key(i)); }
  const std::byte* row(std::size_t i) const { return block_ + layout_->RowOffset(i); }
  // The place of the key with this hash.
  std::optional<std::uint32_t> Find(std::uint64_t hash) const;

 private:
  BlockView(const GroupLayout* layout, const std::byte* block, std::uint32_t rows)
      : layout_(layout), block_(block), rows_(rows) {}

  const GroupLayout* layout_;
  const std::byte* block_;
  std::uint32_t rows_;
};

// A row on its way into a block.
struct BlockRow {
  std::uint64_t hash = 0;
  const std::byte* row = nullptr;
};

// REQUIRES: at most most_rows rows in ascending order of the hashes; block_bytes of memory that
// none of them lies in.
void MakeBlock(const GroupLayout& layout, std::span<const BlockRow> rows, std::byte* block);

}  // namespace terrace
