// Writes in two halves, and writes by the store's thread: what fails, what is dropped, what is in
// flight when the store ends.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "terrace/base/thread.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/held_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

constexpr std::uint64_t kQuota = std::uint64_t{1} << 30;
constexpr std::uint64_t kManyRows = 6000;  // Of 48 bytes: several times the write buffer.

StoreOptions BackgroundOptions() {
  StoreOptions options = StoreHarness::TinyOptions();
  options.background_compaction = true;
  options.file_bytes = 1 << 20;
  return options;
}

Result<std::unique_ptr<StagedRows>> Stage(StoreHarness* harness, const std::vector<Key>& keys,
                                          std::uint64_t generation) {
  std::vector<std::vector<std::byte>> rows;
  std::vector<const std::byte*> pointers;
  for (const Key key : keys) {
    rows.push_back(TestRow(key, generation, harness->options()->row_bytes));
  }
  for (const auto& row : rows) pointers.push_back(row.data());
  return harness->store()->Stage(keys, pointers, {});
}

// The generation of the row that is read; -1: none.
int Generation(StoreHarness* harness, Key key) {
  std::vector<std::byte> row(harness->options()->row_bytes);
  std::byte* place = row.data();
  std::uint8_t found = 0;
  TERRACE_CHECK(harness->store()->Read({&key, 1}, {&place, 1}, {&found, 1}).ok());
  for (int generation = 0; found != 0; ++generation) {
    if (row == TestRow(key, static_cast<std::uint64_t>(generation), harness->options()->row_bytes))
      return generation;
  }
  return -1;
}

std::size_t RowFiles(FileSystem* fs, StoreHarness* harness) {
  std::size_t count = 0;
  const auto infos = fs->List(harness->options()->directory);
  for (const FileInfo& info : *infos) count += info.name.starts_with("rows-") ? 1 : 0;
  return count;
}

// The rows that are to come count, however many of them each write brings.
TEST(StoreStaged, TheIndexGrowsAtOnceForWhatIsExpected) {
  constexpr std::uint64_t kRows = 150'000, kWrite = 5'000;
  MemoryFileSystem memory;
  StoreHarness harness(&memory, kQuota, BackgroundOptions());
  TERRACE_ASSERT_OK(harness.Create());
  harness.store()->ExpectRows(kRows);
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kWrite)));
  const auto first = static_cast<double>(harness.store()->index_bytes());
  for (std::uint64_t key = kWrite; key < kRows; key += kWrite) {
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(key, key + kWrite)));
  }
  EXPECT_GT(first / static_cast<double>(harness.store()->index_bytes()), 0.8);
}

TEST(StoreStaged, IsSeenWhenPublished) {
  for (const bool background : {false, true}) {
    MemoryFileSystem memory;
    StoreOptions options = BackgroundOptions();
    options.background_compaction = background;
    StoreHarness harness(&memory, kQuota, options);
    TERRACE_ASSERT_OK(harness.Create());
    const std::vector<Key> both = harness.KeysFrom(0, 20);
    auto first = Stage(&harness, both, 1);
    TERRACE_ASSERT_OK(first);
    // The second is on the disk before the first is seen.
    auto second = Stage(&harness, harness.KeysFrom(10, 30), 2);
    TERRACE_ASSERT_OK(second);
    EXPECT_EQ(Generation(&harness, both[0]), -1);
    TERRACE_ASSERT_OK(harness.store()->Publish(std::move(*first)));
    EXPECT_EQ(Generation(&harness, both[0]), 1);
    EXPECT_EQ(Generation(&harness, both[15]), 1);
    // A manifest in between names the first alone.
    const auto manifest = harness.store()->Commit(1);
    TERRACE_ASSERT_OK(manifest);
    TERRACE_ASSERT_OK(harness.store()->Publish(std::move(*second)));
    EXPECT_EQ(Generation(&harness, both[5]), 1);
    EXPECT_EQ(Generation(&harness, both[15]), 2);
    EXPECT_EQ(harness.store()->stats().live_rows, 30u);
    EXPECT_EQ(harness.store()->stats().rows_written, 40u);
    harness.Abandon();
    auto reopened = Store::Open(&memory, Clock::Real(), harness.quota(), options, *manifest,
                                std::vector<ManifestReference>{*manifest});
    TERRACE_ASSERT_OK(reopened);
    EXPECT_EQ((*reopened)->stats().live_rows, 20u);
  }
}

TEST(StoreStaged, WhatIsDroppedLeavesNothing) {
  MemoryFileSystem memory;
  StoreHarness harness(&memory, kQuota, BackgroundOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write({1, 2, 3}));
  const std::uint64_t used = harness.quota()->used();
  {
    auto staged = Stage(&harness, harness.KeysFrom(0, kManyRows), 9);
    TERRACE_ASSERT_OK(staged);
    EXPECT_GT(harness.quota()->used(), used);
    EXPECT_EQ(RowFiles(&memory, &harness), 2u);
  }
  EXPECT_EQ(harness.quota()->used(), used);
  EXPECT_EQ(RowFiles(&memory, &harness), 1u);
  TERRACE_ASSERT_OK(harness.Write({2, 4}));
  TERRACE_ASSERT_OK(harness.CheckRead({1, 2, 3, 4}));
}

// Each write of the store's thread fails in turn.
TEST(StoreStaged, FailedWritesBehindTheCallersBack) {
  for (const Fault fault : {Fault::kError, Fault::kShortWrite, Fault::kNoSpace}) {
    for (std::uint64_t nth = 1;; ++nth) {
      SCOPED_TRACE(std::string(FaultName(fault)) + " at write " + std::to_string(nth));
      MemoryFileSystem memory;
      FaultyFileSystem fs(&memory, {});
      StoreHarness harness(&fs, kQuota, BackgroundOptions());
      TERRACE_ASSERT_OK(harness.Create());
      TERRACE_ASSERT_OK(harness.Write({1, 2, 3}));
      TERRACE_ASSERT_OK(harness.Commit());
      const std::uint64_t used = harness.quota()->used();
      FaultRule rule;
      rule.operation = FileOperation::kWrite;
      rule.fault = fault;
      rule.nth = nth;
      rule.path_contains = "rows-";
      fs.SetRules({rule});
      const Status written = harness.Write(harness.KeysFrom(0, kManyRows));
      if (fs.faults() == 0) {
        TERRACE_EXPECT_OK(written);
        EXPECT_GT(nth, 10u);
        break;
      }
      EXPECT_EQ(written.code(), StatusCode::kIo);
      EXPECT_NE(written.message().find("a fault made on purpose"), std::string::npos)
          << written.ToString();
      EXPECT_EQ(harness.quota()->used(), used);
      EXPECT_EQ(RowFiles(&memory, &harness), 1u);
      TERRACE_EXPECT_OK(harness.CheckRead({1, 2, 3, harness.KeyAt(5)}));
      EXPECT_FALSE(harness.Write({5}).ok());
      TERRACE_ASSERT_OK(harness.Reopen(1));
      TERRACE_EXPECT_OK(harness.CheckRead({1, 2, 3, harness.KeyAt(5)}));
    }
  }
}

TEST(StoreStaged, AFailedWriteOfCompactionPoisons) {
  MemoryFileSystem memory;
  FaultyFileSystem fs(&memory, {});
  StoreHarness harness(&fs, kQuota, BackgroundOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kManyRows)));
  TERRACE_ASSERT_OK(harness.Commit());
  // The next write makes most of the first file stale, and is itself in the file after it.
  FaultRule rule;
  rule.operation = FileOperation::kWrite;
  rule.fault = Fault::kShortWrite;
  rule.nth = 1;
  rule.path_contains = "rows-0000000003";
  fs.SetRules({rule});
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kManyRows * 2 / 3)));
  const Status compacted = harness.store()->CompactNow();
  while (harness.store()->background_status().ok() && compacted.ok()) std::this_thread::yield();
  EXPECT_FALSE(harness.Write({1}).ok());
  EXPECT_EQ(RowFiles(&memory, &harness), 2u);
  TERRACE_EXPECT_OK(harness.CheckRead(harness.KeysFrom(0, kManyRows)));
  TERRACE_ASSERT_OK(harness.Reopen(1));
  TERRACE_EXPECT_OK(harness.CheckRead(harness.KeysFrom(0, kManyRows)));
}

TEST(StoreStaged, TheStoreEndsWhileCompactionWrites) {
  MemoryFileSystem memory;
  HeldFileSystem fs(&memory);
  StoreHarness harness(&fs, kQuota, BackgroundOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kManyRows)));
  TERRACE_ASSERT_OK(harness.Commit());
  fs.HoldWrites("rows-0000000003");
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kManyRows * 2 / 3)));
  fs.WaitForHeldWrite();
  Thread end("end", ThreadPriority::kNormal, [&] { harness.Abandon(); });
  fs.LetGo();
  end.Join();
  EXPECT_EQ(harness.quota()->used(), 0u);
  TERRACE_ASSERT_OK(harness.Reopen(1));
  TERRACE_EXPECT_OK(harness.CheckRead(harness.KeysFrom(0, kManyRows)));
}

}  // namespace
}  // namespace terrace
