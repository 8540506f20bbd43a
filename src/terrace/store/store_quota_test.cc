// The quota is never passed, and a store under pressure gives what it can before it says no.
#include <gtest/gtest.h>

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/base/sync_point.h"
#include "terrace/base/thread.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/testing/hooked_file_system.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

std::vector<Key> Range(std::uint64_t begin, std::uint64_t end) {
  std::vector<Key> keys;
  for (std::uint64_t i = begin; i < end; ++i) keys.push_back(MixKey(i * 77 + 5));
  return keys;
}

StoreOptions OneFileOptions() {
  StoreOptions options = StoreHarness::TinyOptions();
  options.file_bytes = 1 << 20;
  return options;
}

// Compacts in the background, but nothing by itself: only to make room.
StoreOptions OptionsForRoom() {
  StoreOptions options = OneFileOptions();
  options.background_compaction = true;
  options.compaction = CompactionPolicy::kModelSize;
  options.most_run_bytes = 1 << 20;
  return options;
}

TEST(DiskQuota, CountsAndRefuses) {
  DiskQuota quota(1000);
  TERRACE_ASSERT_OK(quota.Reserve(400, 600));
  const Status refused = quota.Reserve(400, 201);
  EXPECT_EQ(refused.code(), StatusCode::kOutOfRoom);
  for (const char* part : {"ssd.quota", "400 B", "1000 B", "201 B"}) {
    EXPECT_NE(refused.message().find(part), std::string::npos) << refused.message();
  }
  TERRACE_ASSERT_OK(quota.Reserve(400, 200));
  EXPECT_FALSE(quota.Reserve(~std::uint64_t{0}, 0).ok());
  EXPECT_FALSE(quota.Reserve(1, ~std::uint64_t{0}).ok());
  EXPECT_EQ(quota.used(), 800u);
  quota.Release(800);
  EXPECT_EQ(quota.used(), 0u);
  EXPECT_EQ(quota.peak(), 800u);
}

TEST(StoreQuota, RefusedWriteChangesNothingAndMayBeTriedAgain) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, 10 * 4096, OneFileOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(Range(0, 50)));  // Four blocks.
  const Status refused = harness.Write(Range(50, 1000));
  EXPECT_EQ(refused.code(), StatusCode::kOutOfRoom);
  EXPECT_NE(refused.message().find("ssd.quota"), std::string::npos) << refused.message();
  TERRACE_ASSERT_OK(harness.CheckAll());
  TERRACE_ASSERT_OK(harness.Write(Range(20, 70)));
  TERRACE_ASSERT_OK(harness.CheckAll());
  EXPECT_LE(harness.quota()->peak(), 10u * 4096);
}

TEST(StoreQuota, StaleFilesGoBeforeAWriteIsRefused) {
  MemoryFileSystem fs;
  StoreOptions options = OneFileOptions();
  options.background_compaction = true;
  StoreHarness harness(&fs, 13 * 4096, options);
  TERRACE_ASSERT_OK(harness.Create());
  // Each write makes the one before stale; three do not fit side by side with a fourth.
  for (int i = 0; i < 50; ++i) TERRACE_ASSERT_OK(harness.Write(Range(0, 60)));
  TERRACE_ASSERT_OK(harness.CheckAll());
  EXPECT_LE(harness.quota()->peak(), 13u * 4096);
}

// What a read in flight holds comes back in a moment: neither a checkpoint goes for it, nor is a
// write refused.
TEST(StoreQuota, AWriteAwaitsReadsThatHoldWhatItNeeds) {
  MemoryFileSystem memory;
  HookedFileSystem fs(&memory);
  StoreOptions options = OneFileOptions();
  options.on_pressure = [](std::uint64_t /*bytes*/) -> Result<bool> {
    ADD_FAILURE() << "a checkpoint goes";
    return false;
  };
  StoreHarness harness(&fs, 9 * 4096, options);
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(Range(0, 60)));  // Four blocks.
  std::atomic<bool> written{false};
  Thread writer;
  fs.BeforeReads([&] {
    writer = Thread("writer", ThreadPriority::kNormal, [&] {
      for (int i = 0; i < 3; ++i) TERRACE_EXPECT_OK(harness.Write(Range(0, 60)));
      written = true;
    });
    // In a test that fails, it does not wait.
    const double end = Clock::Real()->MonotonicSeconds() + 0.2;
    while (!written && Clock::Real()->MonotonicSeconds() < end) sched_yield();
  });
  const std::vector<Key> keys = Range(0, 60);
  std::vector<std::byte> bytes(keys.size() * options.row_bytes);
  std::vector<std::byte*> rows;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    rows.push_back(bytes.data() + i * options.row_bytes);
  }
  std::vector<std::uint8_t> found(keys.size());
  TERRACE_ASSERT_OK(harness.store()->Read(keys, rows, found));
  writer.Join();
  TERRACE_ASSERT_OK(harness.CheckAll());
  EXPECT_LE(harness.quota()->peak(), 9u * 4096);
}

// A write that finds no room beside those that are staged costs no checkpoint while it is told to
// spare them, and finds some once they are published.
TEST(StoreQuota, AWriteSparesCheckpointsWhileOthersAreStaged) {
  MemoryFileSystem fs;
  StoreOptions options = OneFileOptions();
  options.background_compaction = true;
  int pressed = 0;
  options.on_pressure = [&pressed](std::uint64_t /*bytes*/) -> Result<bool> {
    ++pressed;
    return false;
  };
  DiskQuota quota(13 * 4096);  // Three writes, and not a fourth.
  Result<std::unique_ptr<Store>> store = Store::Create(&fs, Clock::Real(), &quota, options);
  TERRACE_ASSERT_OK(store);
  const std::vector<Key> keys = Range(0, 60);  // Four blocks.
  const std::vector<std::byte> row = TestRow(1, 1, options.row_bytes);
  const std::vector<const std::byte*> rows(keys.size(), row.data());
  const std::vector<std::uint8_t> known(keys.size(), 1);
  TERRACE_ASSERT_OK((*store)->Write(keys, rows, {}));
  auto first = (*store)->Stage(keys, rows, known), second = (*store)->Stage(keys, rows, known);
  TERRACE_ASSERT_OK(first);
  TERRACE_ASSERT_OK(second);
  (*store)->KeepCheckpoints(true);
  EXPECT_EQ((*store)->Stage(keys, rows, known).status().code(), StatusCode::kOutOfRoom);
  EXPECT_EQ(pressed, 0);
  (*store)->KeepCheckpoints(false);
  EXPECT_EQ((*store)->Stage(keys, rows, known).status().code(), StatusCode::kOutOfRoom);
  EXPECT_EQ(pressed, 1);
  TERRACE_ASSERT_OK((*store)->Publish(std::move(*first)));
  auto third = (*store)->Stage(keys, rows, known);
  TERRACE_ASSERT_OK(third);
  EXPECT_EQ(pressed, 1);
  TERRACE_ASSERT_OK((*store)->Publish(std::move(*second)));
  TERRACE_ASSERT_OK((*store)->Publish(std::move(*third)));
}

// A write that reads whether its keys are there holds their file, which gives its space back when
// the write has looked: room is made by then, and no checkpoint has to go.
TEST(StoreQuota, RoomIsMadeOfWhatAWriteLooksAt) {
  MemoryFileSystem memory;
  HookedFileSystem fs(&memory);
  const StoreOptions options = OptionsForRoom();
  StoreHarness harness(&fs, 1 << 20, options);
  DiskQuota* const quota = harness.quota();
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(Range(0, 400)));
  TERRACE_ASSERT_OK(harness.Write(Range(0, 300)));
  std::atomic<bool> made{false};
  bool has_room = false;
  Thread other;
  fs.BeforeReads([&] {
    const std::uint64_t free = quota->limit() - quota->used();
    other = Thread("other", ThreadPriority::kNormal, [&, free] {
      TERRACE_EXPECT_OK(harness.store()->MakeRoom(free + 1));
      has_room = quota->HasFree(free + 1);
      made = true;
    });
    // In a test that fails, it does not wait.
    const double end = Clock::Real()->MonotonicSeconds() + 0.2;
    while (!made && Clock::Real()->MonotonicSeconds() < end) sched_yield();
  });
  const std::vector<Key> keys = Range(350, 351);
  const std::vector<std::byte> row = TestRow(keys[0], 9, options.row_bytes);
  const std::vector<const std::byte*> rows = {row.data()};
  TERRACE_ASSERT_OK(harness.store()->Write(keys, rows, {}));
  other.Join();
  EXPECT_TRUE(has_room);
  TERRACE_ASSERT_OK(harness.store()->background_status());
}

TEST(StoreQuota, OldManifestsGoUnderPressureOneByOne) {
  MemoryFileSystem fs;
  StoreOptions options = OneFileOptions();
  StoreHarness* self = nullptr;
  int dropped = 0;
  options.on_pressure = [&](std::uint64_t) -> Result<bool> {
    if (self->manifests().size() < 2) return false;  // The newest never.
    ++dropped;
    TERRACE_RETURN_IF_ERROR(self->Drop(self->manifests().begin()->first));
    return true;
  };
  StoreHarness harness(&fs, 19 * 4096, options);
  self = &harness;
  TERRACE_ASSERT_OK(harness.Create());
  for (int i = 0; i < 3; ++i) {
    TERRACE_ASSERT_OK(harness.Write(Range(0, 60)));
    TERRACE_ASSERT_OK(harness.Commit());
  }
  EXPECT_EQ(dropped, 0);
  EXPECT_GT(harness.store()->stats().checkpoint_only_bytes, 0u);
  TERRACE_ASSERT_OK(harness.Write(Range(100, 250)));
  EXPECT_EQ(dropped, 1);
  const Status refused = harness.Write(Range(300, 1500));
  EXPECT_EQ(refused.code(), StatusCode::kOutOfRoom);
  EXPECT_EQ(dropped, 2);
  EXPECT_EQ(harness.manifests().size(), 1u);
  TERRACE_ASSERT_OK(harness.CheckAll());
  TERRACE_ASSERT_OK(harness.Reopen(3));
  TERRACE_ASSERT_OK(harness.CheckAll());
  EXPECT_LE(harness.quota()->peak(), 19u * 4096);
}

// However much of the quota is free; and no checkpoint goes for them, which takes none.
TEST(StoreQuota, PlacesForFilesAreNotBytes) {
  MemoryFileSystem fs;
  StoreOptions options = StoreHarness::TinyOptions();
  options.file_bytes = std::uint64_t{128} << 20;
  bool asked = false;
  options.on_pressure = [&](std::uint64_t /*bytes*/) -> Result<bool> {
    asked = true;
    return false;
  };
  StoreHarness harness(&fs, std::uint64_t{1} << 30, options);
  TERRACE_ASSERT_OK(harness.Create());
  // A file of so many rows leaves 4,096 places for files.
  TERRACE_ASSERT_OK(harness.Write(Range(0, (1 << 19) + 1)));
  TERRACE_ASSERT_OK(harness.Commit());
  harness.options()->file_bytes = 64;
  TERRACE_ASSERT_OK(harness.Reopen(1));
  TERRACE_ASSERT_OK(harness.Write(Range(0, 4000)));
  const Status refused = harness.Write(Range(4000, 5000));
  EXPECT_EQ(refused.code(), StatusCode::kOutOfRoom);
  EXPECT_NE(
      refused.message().find("/run/rows/ads/shard-0 holds 4001 parameter files and is to get "
                             "1000 more, but its index has places for 4096: choose larger files "
                             "(ssd.file_size) or more shards (ssd.shards)"),
      std::string::npos)
      << refused.message();
  EXPECT_FALSE(asked);
  // Eight are compaction's.
  EXPECT_EQ(harness.Write(Range(4000, 4088)).code(), StatusCode::kOutOfRoom);
  TERRACE_ASSERT_OK(harness.Write(Range(4000, 4087)));
  EXPECT_EQ(harness.Write(Range(4087, 4088)).code(), StatusCode::kOutOfRoom);
  TERRACE_ASSERT_OK(harness.CheckRead(Range(0, 5000)));
}

TEST(StoreQuota, OpenFilesAreTheStores) {
  MemoryFileSystem fs;
  StoreOptions options = StoreHarness::TinyOptions();
  options.file_bytes = 64;  // A row each.
  DiskQuota quota(std::uint64_t{1} << 30, /*limit_files=*/40);
  const std::vector<std::byte> row(options.row_bytes);
  ManifestReference manifest;
  {
    auto store = Store::Create(&fs, Clock::Real(), &quota, options);
    TERRACE_ASSERT_OK(store.status());
    const auto write = [&](std::uint64_t begin, std::uint64_t end) {
      const std::vector<Key> keys = Range(begin, end);
      return (*store)->Write(keys, std::vector<const std::byte*>(keys.size(), row.data()), {});
    };
    (*store)->SetKeepFree(4096, 10);
    TERRACE_ASSERT_OK(write(0, 20));
    EXPECT_EQ(quota.files(), 20u);
    // Eight are compaction's, ten the last checkpoint's.
    const Status refused = write(20, 24);
    EXPECT_EQ(refused.code(), StatusCode::kOutOfRoom);
    EXPECT_NE(refused.message().find("ulimit -n"), std::string::npos) << refused.message();
    EXPECT_EQ(quota.files(), 20u);
    (*store)->OpenReserve();
    TERRACE_ASSERT_OK(write(20, 30));
    EXPECT_EQ(quota.files(), 30u);
    auto committed = (*store)->Commit(1);
    TERRACE_ASSERT_OK(committed.status());
    manifest = *committed;
    // Their first versions are in the manifest alone.
    TERRACE_ASSERT_OK(write(0, 2));
    TERRACE_ASSERT_OK(write(2, 3));
    EXPECT_EQ(quota.files(), 31u);
  }
  EXPECT_EQ(quota.files(), 0u);
  auto store = Store::Open(&fs, Clock::Real(), &quota, options, manifest,
                           std::span<const ManifestReference>(&manifest, 1));
  TERRACE_ASSERT_OK(store.status());
  EXPECT_EQ(quota.files(), 30u);
}

// Of one table, which share a quota.
std::array<std::unique_ptr<Store>, 2> TwoShards(FileSystem* fs, DiskQuota* quota,
                                                bool second_in_background) {
  std::array<std::unique_ptr<Store>, 2> stores;
  for (std::uint32_t shard = 0; shard < 2; ++shard) {
    StoreOptions options = OneFileOptions();
    options.shard = shard;
    options.directory = "/run/rows/ads/shard-" + std::to_string(shard);
    options.background_compaction = second_in_background && shard == 1;
    auto store = Store::Create(fs, Clock::Real(), quota, options);
    TERRACE_EXPECT_OK(store.status());
    stores[shard] = std::move(store).value();
  }
  return stores;
}

// Into one file; of that of 60 a third stays when 40 are written after it.
void WriteRows(Store* store, std::uint64_t count) {
  const std::vector<std::byte> row(OneFileOptions().row_bytes);
  const std::vector<const std::byte*> rows(count, row.data());
  TERRACE_EXPECT_OK(store->Write(Range(0, count), rows, {}));
}

// A caller's rewrite that finds no places for its files awaits those of another store's, and does
// not say that there is nothing to merge.
TEST(StoreQuota, ARewriteAwaitsThePlacesOfAnother) {
  MemoryFileSystem fs;
  DiskQuota quota(std::uint64_t{1} << 30, /*limit_files=*/100);
  const auto stores = TwoShards(&fs, &quota, /*second_in_background=*/false);
  for (const auto& store : stores) {
    WriteRows(store.get(), 60);
    WriteRows(store.get(), 40);
    EXPECT_EQ(store->stats().compactions, 0u);
  }
  std::atomic<bool> first{true}, waits{false};
  Thread other;
  SyncPoint::Arm([&](std::string_view point) {
    if (point == "quota.rewrite.waits") waits = true;
    if (point != "store.compact.before_write" || !first.exchange(false)) return;
    // The last place is the first store's.
    const auto rest = static_cast<std::int64_t>(quota.limit_files() - quota.files());
    quota.ChangeFiles(rest);
    other = Thread("other", ThreadPriority::kNormal,
                   [&] { TERRACE_EXPECT_OK(stores[1]->CompactNow()); });
    while (!waits) sched_yield();
    quota.ChangeFiles(-rest);
  });
  TERRACE_ASSERT_OK(stores[0]->CompactNow());
  other.Join();
  SyncPoint::Arm(nullptr);
  EXPECT_EQ(stores[0]->stats().compactions, 1u);
  EXPECT_EQ(stores[1]->stats().compactions, 1u);
  EXPECT_EQ(quota.files(), 4u);
}

// Compaction that another store's keeps from places sleeps meanwhile, and goes on when that has
// ended.
TEST(StoreQuota, RefusedCompactionSleepsUntilTheOtherEnds) {
  MemoryFileSystem fs;
  DiskQuota quota(std::uint64_t{1} << 30, /*limit_files=*/100);
  const auto stores = TwoShards(&fs, &quota, /*second_in_background=*/true);
  std::atomic<bool> holds{false}, fills{false}, goes_on{false};
  std::atomic<int> picked{0};
  std::atomic<std::int64_t> rest{0};
  SyncPoint::Arm([&](std::string_view point) {
    if (point == "store.compact.before_write" && !holds.exchange(true)) {
      while (!goes_on) sched_yield();
    } else if (point == "store.write.before_index" && fills) {
      // Before anything is due there are no places left.
      rest = static_cast<std::int64_t>(quota.limit_files() - quota.files());
      quota.ChangeFiles(rest);
    } else if (point == "store.compact.picked" && fills) {
      ++picked;
    }
  });
  WriteRows(stores[0].get(), 60);
  WriteRows(stores[0].get(), 40);
  WriteRows(stores[1].get(), 60);
  Thread first("first", ThreadPriority::kNormal,
               [&] { TERRACE_EXPECT_OK(stores[0]->CompactNow()); });
  while (!holds) sched_yield();
  fills = true;
  WriteRows(stores[1].get(), 40);
  while (picked == 0) sched_yield();
  // Time enough to try many times.
  const double end = Clock::Real()->MonotonicSeconds() + 0.05;
  while (Clock::Real()->MonotonicSeconds() < end) sched_yield();
  EXPECT_LE(picked, 4) << "two threads may each have tried, and once more";
  fills = false;
  quota.ChangeFiles(-rest);
  goes_on = true;
  first.Join();
  while (stores[1]->stats().compactions == 0) sched_yield();
  SyncPoint::Arm(nullptr);
}

TEST(StoreQuota, ARewriteThatWaitsForPlacesGoesBeforeThoseThatDoNot) {
  DiskQuota quota(std::uint64_t{1} << 30, /*limit_files=*/10);
  int told = 0;
  DiskQuota::Reclaimer one(&quota, [] {}), two(&quota, [] {}),
      three(
          &quota, [] {}, [&] { ++told; });
  ASSERT_TRUE(quota.BeginRewrite(&one, 8, /*waits=*/false));
  std::atomic<bool> waits{false}, began{false};
  SyncPoint::Arm([&](std::string_view point) {
    if (point == "quota.rewrite.waits") waits = true;
  });
  Thread other("other", ThreadPriority::kNormal,
               [&] { began = quota.BeginRewrite(&two, 4, /*waits=*/true); });
  while (!waits) sched_yield();
  // Two places are free, and would be of those that the other one waits for.
  EXPECT_FALSE(quota.BeginRewrite(&three, 2, /*waits=*/false));
  quota.ChangeFiles(-8);
  quota.EndRewrite(&one);
  other.Join();
  SyncPoint::Arm(nullptr);
  EXPECT_TRUE(began);
  // Not while that goes on, or it would try again and again.
  quota.TellRefused();
  EXPECT_EQ(told, 0);
  quota.EndRewrite(&two);
  quota.TellRefused();
  quota.TellRefused();
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(quota.BeginRewrite(&three, 2, /*waits=*/false));
  EXPECT_EQ(quota.files(), 6u);
  // Its own places, or anybody's but a rewrite's, it hears of otherwise.
  EXPECT_FALSE(quota.BeginRewrite(&three, 5, /*waits=*/false));
  quota.TellRefused();
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(quota.BeginRewrite(&two, 4, /*waits=*/false));
  EXPECT_FALSE(quota.BeginRewrite(&three, 5, /*waits=*/false));
  quota.EndRewrite(&two);
  quota.TellRefused();
  EXPECT_EQ(told, 2);
}

TEST(StoreQuota, KeepFreeIsForTheLastCheckpoint) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, 10 * 4096, OneFileOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(Range(0, 50)));
  harness.store()->SetKeepFree(5 * 4096);
  EXPECT_EQ(harness.Write(Range(50, 100)).code(), StatusCode::kOutOfRoom);
  harness.store()->OpenReserve();
  TERRACE_ASSERT_OK(harness.Write(Range(50, 100)));
  TERRACE_ASSERT_OK(harness.Commit());
  TERRACE_ASSERT_OK(harness.CheckAll());
}

TEST(StoreQuota, CompactionThatFreesNothingLeavesTheReserveToTheCheckpoint) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, 1 << 20, OneFileOptions());
  DiskQuota* const quota = harness.quota();
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(Range(0, 200)));
  TERRACE_ASSERT_OK(harness.Commit());  // Keeps that file.
  harness.store()->SetKeepFree(quota->limit() - quota->used());
  harness.store()->OpenReserve();
  TERRACE_ASSERT_OK(harness.Write(Range(0, 150)));
  // The file is due now, and a write has what is due rewritten first.
  TERRACE_ASSERT_OK(harness.Write(Range(200, 250)));
  EXPECT_EQ(harness.store()->stats().compactions, 0u);
  harness.store()->SetKeepFree(0);
  TERRACE_ASSERT_OK(harness.store()->CompactNow());
  EXPECT_GT(harness.store()->stats().compactions, 0u);
  TERRACE_ASSERT_OK(harness.CheckAll());
}

TEST(StoreQuota, MakeRoomCompactsNoMoreThanIsAskedFor) {
  MemoryFileSystem fs;
  const StoreOptions options = OptionsForRoom();
  StoreHarness harness(&fs, 1 << 20, options);
  DiskQuota* const quota = harness.quota();
  TERRACE_ASSERT_OK(harness.Create());
  // Files that are half stale, but for the first ones, which a checkpoint keeps.
  for (std::uint64_t i = 0; i < 6; ++i) {
    TERRACE_ASSERT_OK(harness.Write(Range(i * 100, i * 100 + 200)));
  }
  TERRACE_ASSERT_OK(harness.Commit());
  for (std::uint64_t i = 6; i < 12; ++i) {
    TERRACE_ASSERT_OK(harness.Write(Range(i * 100, i * 100 + 200)));
  }
  const std::uint64_t free = quota->limit() - quota->used();
  TERRACE_ASSERT_OK(harness.store()->MakeRoom(free));
  EXPECT_EQ(harness.store()->stats().compactions, 0u);
  EXPECT_FALSE(quota->HasFree(free + 1));
  TERRACE_ASSERT_OK(harness.store()->MakeRoom(free + 1));
  EXPECT_TRUE(quota->HasFree(free + 1));
  TERRACE_ASSERT_OK(harness.CheckAll());
  // All that there is: what the checkpoint names stays.
  const std::uint64_t compactions = harness.store()->stats().compactions;
  TERRACE_ASSERT_OK(harness.store()->MakeRoom(quota->limit()));
  EXPECT_FALSE(quota->HasFree(quota->limit()));
  EXPECT_GE(harness.store()->stats().compactions, compactions);
  TERRACE_ASSERT_OK(harness.CheckAll());
  TERRACE_ASSERT_OK(harness.Reopen(1));
  TERRACE_ASSERT_OK(harness.CheckAll());
}

TEST(StoreQuota, ReopenCountsWhatIsThere) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, 1 << 20, OneFileOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(Range(0, 50)));
  TERRACE_ASSERT_OK(harness.Commit());
  TERRACE_ASSERT_OK(harness.Write(Range(0, 20)));
  TERRACE_ASSERT_OK(harness.Commit());
  const std::uint64_t used = harness.quota()->used();
  TERRACE_ASSERT_OK(harness.Write(Range(0, 500)));
  TERRACE_ASSERT_OK(harness.Reopen(2));
  EXPECT_EQ(harness.quota()->used(), used);
  // Ids are not used again, though the files are gone.
  TERRACE_ASSERT_OK(harness.Write(Range(0, 5)));
  EXPECT_TRUE(fs.Stat(harness.options()->directory + "/rows-0000000004").ok());
  EXPECT_FALSE(fs.Stat(harness.options()->directory + "/rows-0000000003").ok());
}

// Space stays within live / (1 - stale share) + one write + one compaction output.
TEST(StoreQuota, SpaceBoundOverManyUpdates) {
  MemoryFileSystem fs;
  StoreOptions options = StoreHarness::TinyOptions();
  options.row_bytes = 100;
  options.spare_files = 0;
  options.file_bytes = 64 << 10;
  options.io_buffer_bytes = 1 << 20;
  StoreHarness harness(&fs, 1 << 30, options);
  harness.key_range = 20000;
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(Range(0, 20000)));
  Rng rng(5);
  const std::uint64_t file_bytes = options.file_bytes + 3 * 4096;
  for (int i = 0; i < 60; ++i) {
    std::vector<Key> keys = harness.RandomKeys(&rng, 4000);
    const std::uint64_t write_bytes = keys.size() * 160 + 4 * 4096 * (1 + keys.size() / 400);
    TERRACE_ASSERT_OK(harness.Write(keys));
    const StoreStats stats = harness.store()->stats();
    // Records with their key entries; blocks are rounded up in each file.
    const double live = static_cast<double>(stats.live_rows * (128 + 16) + stats.files * 4 * 4096);
    EXPECT_LE(static_cast<double>(stats.disk_bytes),
              live / (1 - options.stale_share) + static_cast<double>(write_bytes + file_bytes));
  }
  TERRACE_ASSERT_OK(harness.CheckAll());
}

// What is on its way to a store takes space there, too. Compaction runs in the background.
class StoreSpace : public testing::TestWithParam<IndexKind> {
 protected:
  static constexpr std::uint64_t kRows = 20'000;

  void SetUp() override {
    options_.row_bytes = 100;
    options_.spare_files = 0;
    options_.file_bytes = 64 << 10;
    options_.io_buffer_bytes = 256 << 10;
    options_.background_compaction = true;
    options_.index = GetParam();
    options_.expected_rows = kRows;
    auto created = Store::Create(&fs_, Clock::Real(), &quota_, options_);
    ASSERT_TRUE(created.ok()) << created.status().ToString();
    store_ = std::move(created).value();
    keys_ = Range(0, kRows);
    std::sort(keys_.begin(), keys_.end(), [](Key a, Key b) { return MixKey(a) < MixKey(b); });
    const std::vector<const std::byte*> rows(kRows, row_.data());
    TERRACE_ASSERT_OK(store_->Write(keys_, rows, {}));
  }
  Result<std::unique_ptr<StagedRows>> Stage(std::span<const Key> keys) {
    const std::vector<const std::byte*> rows(keys.size(), row_.data());
    return store_->Stage(keys, rows, std::vector<std::uint8_t>(keys.size(), kStoredKey));
  }

  MemoryFileSystem fs_;
  DiskQuota quota_{std::uint64_t{1} << 30};
  StoreOptions options_ = StoreHarness::TinyOptions();
  std::unique_ptr<Store> store_;
  std::vector<Key> keys_;  // In the order of their hashes: as they lie in files and blocks.
  const std::vector<std::byte> row_ = std::vector<std::byte>(100, std::byte{1});
};

TEST_P(StoreSpace, WhatIsStagedMakesCompactionDue) {
  // Half of what three tenths of the files hold: they are too stale, all together are not.
  std::vector<Key> some;
  const std::size_t stride = GetParam() == IndexKind::kKey ? 2 : 60;  // A block has 30 rows.
  for (std::size_t i = 0; i < kRows * 3 / 10; i += stride) some.push_back(keys_[i]);
  auto staged = Stage(some);
  TERRACE_ASSERT_OK(staged.status());
  TERRACE_ASSERT_OK(store_->Publish(std::move(staged).value()));
  EXPECT_EQ(store_->stats().compactions, 0u);
  auto first = Stage(std::span(keys_).subspan(kRows * 4 / 10));
  TERRACE_ASSERT_OK(first.status());
  auto second = Stage(std::span(keys_).first(100));
  TERRACE_ASSERT_OK(second.status());
  EXPECT_GT(store_->stats().compactions, 0u) << "of what the first will make stale";
  TERRACE_ASSERT_OK(store_->Publish(std::move(first).value()));
  TERRACE_ASSERT_OK(store_->Publish(std::move(second).value()));
}

// One that is dropped is counted no more: nobody waits for what it would have made stale.
TEST_P(StoreSpace, WhatIsDroppedMakesNothingDue) {
  for (int i = 0; i < 5; ++i) {
    auto dropped = Stage(keys_);
    TERRACE_ASSERT_OK(dropped.status());
  }
  TERRACE_ASSERT_OK(store_->CompactNow());
  EXPECT_EQ(store_->stats().stale_bytes, 0u);
  auto staged = Stage(std::span(keys_).first(100));
  TERRACE_ASSERT_OK(staged.status());
  TERRACE_ASSERT_OK(store_->Publish(std::move(staged).value()));
  EXPECT_EQ(store_->stats().compactions, 0u);
}

TEST_P(StoreSpace, StaleRecordsKeepToTheBound) {
  Rng rng(3);
  constexpr std::size_t kStretches = 4, kStretch = kRows / 20;
  const auto draw = [&] {
    std::vector<Key> keys;
    for (std::size_t s = 0; s < kStretches; ++s) {
      const auto begin = static_cast<std::ptrdiff_t>(rng.Below(kRows - kStretch));
      keys.insert(keys.end(), keys_.begin() + begin, keys_.begin() + begin + kStretch);
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    return keys;
  };
  for (int i = 0; i < 60; ++i) {
    // Two writes on their way at a time, as a cache has them.
    auto first = Stage(draw());
    TERRACE_ASSERT_OK(first.status());
    auto second = Stage(draw());
    TERRACE_ASSERT_OK(second.status());
    TERRACE_ASSERT_OK(store_->Publish(std::move(first).value()));
    TERRACE_ASSERT_OK(store_->Publish(std::move(second).value()));
    const StoreStats stats = store_->stats();
    const auto live = static_cast<double>(stats.live_bytes);
    const double write = live * kStretches * kStretch / kRows + kStretches * 4096;
    EXPECT_LE(live + static_cast<double>(stats.stale_bytes),
              live / (1 - options_.stale_share) + 2 * static_cast<double>(options_.file_bytes) +
                  2 * write);
  }
}

INSTANTIATE_TEST_SUITE_P(Indexes, StoreSpace, testing::Values(IndexKind::kKey, IndexKind::kGroup),
                         [](const auto& param) {
                           return param.param == IndexKind::kKey ? "ByKey" : "ByGroup";
                         });

// Rows that are erased and made anew for ever leave neither rows nor deletions behind.
TEST(StoreQuota, DeletionsDoNotPileUp) {
  MemoryFileSystem fs;
  StoreOptions options = StoreHarness::TinyOptions();
  StoreHarness harness(&fs, 1 << 30, options);
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(Range(0, 200)));  // These stay.
  std::uint64_t most = 0;
  for (std::uint64_t i = 0; i < 300; ++i) {
    TERRACE_ASSERT_OK(harness.Write(Range(1000 + i * 50, 1050 + i * 50)));
    TERRACE_ASSERT_OK(harness.Erase(Range(1000 + i * 50, 1050 + i * 50)));
    if (i >= 20) most = std::max(most, harness.store()->stats().disk_bytes);
  }
  // 15,000 keys came and went through files of 16 KiB for 30 rows.
  EXPECT_LE(most, 100u * 4 * 4096);
  EXPECT_EQ(harness.store()->stats().live_rows, 200u);
  TERRACE_ASSERT_OK(harness.CheckAll());
}

}  // namespace
}  // namespace terrace
