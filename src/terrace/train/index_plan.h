// Which index the stores of a table get, and what it takes of memory. Threads: pure functions.
#pragma once

#include <cstdint>

#include "terrace/store/store.h"
#include "terrace/train/job.h"

namespace terrace {

// What an index by key takes of memory (docs/decisions/key-index.md).
inline constexpr std::uint64_t kKeyIndexBytes = 8;
// All indexes by key may take one in so many bytes of the budget: with more the cache soon has
// nothing left to give, with less they beat those by group (docs/decisions/group-index.md).
inline constexpr std::uint64_t kIndexBudgetShare = 2;

// The index of a new table; auto: by group where the expected keys would take an index by key
// beyond the table's part of the share of the budget, or its shards have no places for them by key.
IndexKind IndexOf(const Job& job, const ModelPlan& plan, const TablePlan& table);

// kInvalidArgument: a new table's shards have no places for the keys that are expected, and the
// store would refuse those beyond when they come; the message says what would do. most_file_rows:
// of a file, by the memory plan.
Status CheckExpectedKeys(const Job& job, const ModelPlan& plan, std::uint64_t most_file_rows);

// Of a table with so many keys.
std::uint64_t IndexBytes(IndexKind kind, std::uint32_t row_bytes, const GroupShape& group,
                         std::uint64_t keys);

// What the least budget has room for: so many rows more than a new run begins with may be indexed
// before it has to stop.
inline constexpr std::uint64_t kIndexRoomRows = 250'000;
std::uint64_t IndexRoomBytes(const Job& job, const ModelPlan& plan);

// What a write of the rows of a mini-batch of distinct keys takes of the disk in a new run, about:
// by group a block for each, as far as there are blocks.
std::uint64_t MinibatchWriteBytes(const Job& job, const ModelPlan& plan);

// What the indexes of a new run take before it has a row.
std::uint64_t FirstIndexBytes(const Job& job, const ModelPlan& plan);

}  // namespace terrace
