#include "terrace/train/index_plan.h"

#include <fmt/format.h>

#include "terrace/base/units.h"
#include "terrace/store/group_block.h"

namespace terrace {
namespace {

// Of a new table, in all its shards.
std::uint64_t MostKeys(const Job& job, const TablePlan& table, IndexKind kind,
                       std::uint64_t most_file_rows) {
  return static_cast<std::uint64_t>(job.ssd.shards) *
         Store::MostRows(kind, table.schema.row_bytes(), table.group, job.ssd.file_bytes,
                         most_file_rows);
}

}  // namespace

IndexKind IndexOf(const Job& job, const ModelPlan& plan, const TablePlan& table) {
  if (table.index == IndexChoice::kGroup) return IndexKind::kGroup;
  if (table.index == IndexChoice::kKey || !Store::HasGroupIndex(table.schema.row_bytes())) {
    return IndexKind::kKey;
  }
  const std::uint64_t places = MostKeys(job, table, IndexKind::kKey, ~std::uint64_t{0});
  if (table.expected_keys > places) return IndexKind::kGroup;
  const std::uint64_t most = job.memory.budget_bytes / kIndexBudgetShare / plan.tables.size();
  return table.expected_keys * kKeyIndexBytes > most ? IndexKind::kGroup : IndexKind::kKey;
}

Status CheckExpectedKeys(const Job& job, const ModelPlan& plan, std::uint64_t most_file_rows) {
  for (const TablePlan& table : plan.tables) {
    const IndexKind kind = IndexOf(job, plan, table);
    const auto shards = static_cast<std::uint64_t>(job.ssd.shards);
    const std::uint64_t most = MostKeys(job, table, kind, most_file_rows);
    if (table.expected_keys <= most) continue;
    const std::uint64_t a_shard = most / shards;
    const bool by_key = kind == IndexKind::kKey;
    const bool fits_by_group =
        by_key && Store::HasGroupIndex(table.schema.row_bytes()) &&
        table.expected_keys <= MostKeys(job, table, IndexKind::kGroup, most_file_rows);
    return InvalidArgumentError(fmt::format(
        "table '{}' is to have {} keys ({}.expected_keys), but an index by {} has places for {} "
        "in a shard, and ssd.shards is {}: choose ssd.shards: {} or more{}, or lower "
        "{}.expected_keys if the table will have fewer",
        table.schema.table(), FormatCount(table.expected_keys), table.settings,
        by_key ? "key" : "group", FormatCount(a_shard), shards,
        (table.expected_keys + a_shard - 1) / a_shard,
        fits_by_group ? fmt::format(", or {}.index: group", table.settings) : "", table.settings));
  }
  return OkStatus();
}

std::uint64_t IndexBytes(IndexKind kind, std::uint32_t row_bytes, const GroupShape& group,
                         std::uint64_t keys) {
  if (kind == IndexKind::kKey) return keys * kKeyIndexBytes;
  // One group in five takes a second block, or fewer do.
  const std::uint64_t blocks =
      GroupLayout::Of(row_bytes, group.block_bytes).GroupsFor(keys) / 5 * 6 + 1;
  return Store::GroupIndexBytes(row_bytes, group, keys) + blocks * kKeyIndexBytes;
}

std::uint64_t IndexRoomBytes(const Job& job, const ModelPlan& plan) {
  // An index of few keys takes some hundred KiB whatever they are; each shard of a table has one.
  constexpr std::uint64_t kFewKeysBytes = std::uint64_t{1} << 20;
  const std::uint64_t stores = plan.tables.size() * static_cast<std::uint64_t>(job.ssd.shards);
  return stores * kFewKeysBytes + kIndexRoomRows * kKeyIndexBytes;
}

std::uint64_t MinibatchWriteBytes(const Job& job, const ModelPlan& plan) {
  std::uint64_t bytes = 0;
  for (const TablePlan& table : plan.tables) {
    const std::uint32_t row_bytes = table.schema.row_bytes();
    std::uint64_t records = std::uint64_t{job.training.minibatch} * table.slots.size();
    const IndexKind kind = IndexOf(job, plan, table);
    if (kind == IndexKind::kGroup) {
      const GroupLayout layout = GroupLayout::Of(row_bytes, table.group.block_bytes);
      records = std::min(records, layout.GroupsFor(table.expected_keys));
    }
    bytes += records * RecordRowBytes(kind, row_bytes, table.group.block_bytes);
  }
  return bytes;
}

std::uint64_t FirstIndexBytes(const Job& job, const ModelPlan& plan) {
  std::uint64_t bytes = 0;
  for (const TablePlan& table : plan.tables) {
    if (IndexOf(job, plan, table) == IndexKind::kKey) continue;
    bytes += Store::GroupIndexBytes(table.schema.row_bytes(), table.group, table.expected_keys);
  }
  return bytes;
}

}  // namespace terrace
