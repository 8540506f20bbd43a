// Which files compaction rewrites, when, and what that costs; docs/decisions/compaction.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "terrace/base/rng.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/compaction_policy.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

constexpr std::uint64_t kKeys = 20'000;
constexpr std::size_t kBatch = 2000;

// Of some 300 rows a file.
StoreOptions Options(CompactionPolicy policy, double stale_share) {
  StoreOptions options = StoreHarness::TinyOptions();
  options.file_bytes = 300 * 64;
  options.io_buffer_bytes = 1 << 20;
  options.compaction = policy;
  options.stale_share = stale_share;
  return options;
}

// Keys of one write: all alike, or by Zipf's law with exponent 1.
std::vector<Key> Draw(const StoreHarness& harness, Rng* rng, bool zipf) {
  std::set<std::uint64_t> drawn;
  for (std::size_t i = 0; drawn.size() < kBatch && i < 4 * kBatch; ++i) {
    const double u = static_cast<double>(rng->Next() >> 11) * 0x1p-53;
    drawn.insert(zipf ? static_cast<std::uint64_t>(std::pow(double{kKeys}, u)) - 1
                      : rng->Below(kKeys));
  }
  std::vector<Key> keys;
  for (const std::uint64_t i : drawn) keys.push_back(harness.KeyAt(i));
  return keys;
}

// Loads and overwrites; the rows that compaction copied for one that was written since the half.
double Amplify(StoreHarness* harness, int writes, bool zipf, double stale_share) {
  Rng rng(7);
  StoreStats half;
  for (int i = 0; i < writes; ++i) {
    EXPECT_TRUE(harness->Write(Draw(*harness, &rng, zipf)).ok());
    EXPECT_TRUE(harness->store()->CompactNow().ok());
    const StoreStats stats = harness->store()->stats();
    EXPECT_LE(static_cast<double>(stats.stale_bytes),
              stale_share / (1 - stale_share) * static_cast<double>(stats.live_bytes));
    if (i == writes / 2) half = stats;
  }
  const StoreStats stats = harness->store()->stats();
  return static_cast<double>(stats.rows_compacted - half.rows_compacted) /
         static_cast<double>(stats.rows_written - half.rows_written);
}

struct Case {
  CompactionPolicy policy;
  double stale_share;
  bool zipf;
  double most;  // Rows copied for a row written; a third above what was seen.
};

TEST(StoreCompaction, SpaceStaysBoundedAtAKnownPrice) {
  constexpr double kThird = 0.3333;
  for (const Case& c : {Case{CompactionPolicy::kGain, kThird, false, 0.8},
                        Case{CompactionPolicy::kGain, 0.5, false, 0.3},
                        Case{CompactionPolicy::kGain, 0.2, false, 1.75},
                        Case{CompactionPolicy::kGain, kThird, true, 0.9},
                        Case{CompactionPolicy::kGain, 0.5, true, 0.45},
                        Case{CompactionPolicy::kGain, 0.2, true, 1.75},
                        Case{CompactionPolicy::kStaleShare, kThird, false, 2.3},
                        Case{CompactionPolicy::kStaleShare, 0.5, true, 1.2}}) {
    SCOPED_TRACE("policy " + std::to_string(static_cast<int>(c.policy)) + ", stale share " +
                 std::to_string(c.stale_share) + (c.zipf ? ", Zipf" : ", uniform"));
    MemoryFileSystem fs;
    StoreHarness harness(&fs, 1 << 30, Options(c.policy, c.stale_share));
    harness.key_range = kKeys;
    TERRACE_ASSERT_OK(harness.Create());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kKeys)));
    const double amplification = Amplify(&harness, 60, c.zipf, c.stale_share);
    EXPECT_LE(amplification, c.most);
    EXPECT_GT(amplification, 0) << "nothing was compacted";
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

// It copies less than the rewriting of every file above the share, in no more space than allowed.
TEST(StoreCompaction, GainCopiesLessThanStaleShare) {
  for (const bool zipf : {false, true}) {
    double amplification[2];
    for (const CompactionPolicy policy : {CompactionPolicy::kGain, CompactionPolicy::kStaleShare}) {
      MemoryFileSystem fs;
      StoreHarness harness(&fs, 1 << 30, Options(policy, 0.3333));
      TERRACE_ASSERT_OK(harness.Create());
      TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kKeys)));
      amplification[static_cast<int>(policy)] = Amplify(&harness, 60, zipf, 0.3333);
    }
    EXPECT_LT(amplification[0], 0.7 * amplification[1]);
  }
}

TEST(StoreCompaction, ModelSizeWaitsForTheRunsSpace) {
  MemoryFileSystem fs;
  StoreOptions options = Options(CompactionPolicy::kModelSize, 0.5);
  options.most_run_bytes = 4 << 20;
  options.spare_files = 0;
  StoreHarness harness(&fs, 1 << 30, options);
  harness.key_range = kKeys;
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kKeys)));
  Rng rng(7);
  std::uint64_t most = 0;
  while (harness.store()->stats().compactions == 0) {
    TERRACE_ASSERT_OK(harness.Write(Draw(harness, &rng, false)));
    most = std::max(most, harness.quota()->used());
    TERRACE_ASSERT_OK(harness.store()->CompactNow());
    ASSERT_LT(most, 8u << 20);
  }
  EXPECT_GT(most, options.most_run_bytes);
  EXPECT_LE(harness.quota()->used(), options.most_run_bytes);
  const StoreStats stats = harness.store()->stats();
  EXPECT_GT(stats.stale_bytes, stats.live_bytes / 4) << "more was compacted than had to be";
  TERRACE_ASSERT_OK(harness.CheckAll());
}

// Files that are stale to less than the share are merged too, if that is enough.
TEST(StoreCompaction, ModelSizeTakesFilesBelowTheStaleShareWhereUseIsAboveTheLimit) {
  std::uint64_t loaded = 0, most_run_bytes = 0;
  // First without a limit, to see where one would lie.
  for (const bool limited : {false, true}) {
    SCOPED_TRACE(limited);
    MemoryFileSystem fs;
    StoreOptions options = Options(CompactionPolicy::kModelSize, 0.3333);
    options.most_run_bytes = limited ? most_run_bytes : std::uint64_t{1} << 40;
    options.spare_files = 0;
    StoreHarness harness(&fs, 1 << 30, options);
    harness.key_range = kKeys;
    TERRACE_ASSERT_OK(harness.Create());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kKeys)));
    if (!limited) loaded = harness.quota()->used();
    // A fifth of each file, whose rows lie by their keys' mixed hashes.
    std::vector<Key> keys = harness.KeysFrom(0, kKeys);
    std::sort(keys.begin(), keys.end(), [](Key a, Key b) { return MixKey(a) < MixKey(b); });
    std::vector<Key> fifth;
    for (std::size_t i = 0; i < keys.size(); i += 5) fifth.push_back(keys[i]);
    TERRACE_ASSERT_OK(harness.Write(fifth));
    TERRACE_ASSERT_OK(harness.store()->CompactNow());
    const std::uint64_t used = harness.quota()->used();
    if (!limited) {
      EXPECT_EQ(harness.store()->stats().compactions, 0u);
      ASSERT_GT(used, loaded);
      most_run_bytes = used - (used - loaded) / 3;
      continue;
    }
    EXPECT_GT(harness.store()->stats().compactions, 0u);
    EXPECT_LE(used, most_run_bytes);
    EXPECT_GT(harness.store()->stats().stale_bytes, 0u) << "more was compacted than had to be";
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

// Of a run of several stores that share its quota, with rows beside which what a file takes besides
// is little.
Result<std::unique_ptr<Store>> ShardOfRun(FileSystem* fs, DiskQuota* quota, std::uint32_t shard,
                                          std::uint64_t most_run_bytes) {
  StoreOptions options = Options(CompactionPolicy::kModelSize, 0.3333);
  options.directory = fmt::format("store{}", shard);
  options.shard = shard;
  options.row_bytes = 200;
  options.file_bytes = 300 * 240;
  options.most_run_bytes = most_run_bytes;
  options.spare_files = 0;
  return Store::Create(fs, Clock::Real(), quota, options);
}

// Every nth of kKeys rows from one of them on, whose hashes lie evenly, so that each file has as
// many of them.
Status WriteEvery(std::uint64_t nth, Store* store, std::uint64_t from = 0) {
  std::vector<Key> keys;
  for (std::uint64_t i = from; i < kKeys; i += nth) keys.push_back(UnmixKey(i << 44));
  const std::vector<std::byte> row = TestRow(nth, 1, 200);
  const std::vector<const std::byte*> rows(keys.size(), row.data());
  return store->Write(keys, rows, std::vector<std::uint8_t>(keys.size(), nth == 1 ? 0 : 1));
}

// The limit is the run's: what only two stores together can give is taken from both.
TEST(StoreCompaction, ModelSizeCountsTheStoresOfARunTogether) {
  std::uint64_t loaded = 0, most_run_bytes = std::uint64_t{1} << 40;
  for (const bool limited : {false, true}) {
    SCOPED_TRACE(limited);
    MemoryFileSystem fs;
    DiskQuota quota(1 << 30);
    std::vector<std::unique_ptr<Store>> stores;
    for (std::uint32_t shard = 0; shard < 2; ++shard) {
      auto store = ShardOfRun(&fs, &quota, shard, most_run_bytes);
      TERRACE_ASSERT_OK(store);
      stores.push_back(std::move(*store));
    }
    for (const auto& store : stores) TERRACE_ASSERT_OK(WriteEvery(1, store.get()));
    if (!limited) loaded = quota.used();
    for (const auto& store : stores) TERRACE_ASSERT_OK(WriteEvery(5, store.get()));
    for (int round = 0; round < 2; ++round) {
      for (const auto& store : stores) TERRACE_ASSERT_OK(store->CompactNow());
    }
    if (!limited) {
      most_run_bytes = quota.used() - (quota.used() - loaded) / 5 * 3;
      for (const auto& store : stores) {
        EXPECT_EQ(store->stats().compactions, 0u);
        EXPECT_LT(store->stats().stale_bytes, quota.used() - most_run_bytes);
      }
      continue;
    }
    EXPECT_LE(quota.used(), most_run_bytes);
    for (const auto& store : stores) EXPECT_GT(store->stats().compactions, 0u);
  }
}

// What one store can't give, for want of room to rewrite it, does not make another one copy its
// rows again and again.
TEST(StoreCompaction, ModelSizeCountsOnNoStoreWithoutRoom) {
  MemoryFileSystem fs;
  DiskQuota quota(1 << 30);
  const std::uint64_t most_run_bytes = quota.limit() - (300 << 10);
  auto full = ShardOfRun(&fs, &quota, 1, most_run_bytes);
  auto busy = ShardOfRun(&fs, &quota, 2, most_run_bytes);
  TERRACE_ASSERT_OK(full);
  TERRACE_ASSERT_OK(busy);
  for (Store* store : {full->get(), busy->get()}) TERRACE_ASSERT_OK(WriteEvery(1, store));
  TERRACE_ASSERT_OK((*full)->Commit(1));
  TERRACE_ASSERT_OK(WriteEvery(5, full->get()));
  const std::uint64_t free = quota.limit() - quota.used();
  for (Store* store : {full->get(), busy->get()}) {
    store->SetKeepFree(free);
    store->OpenReserve();
  }
  TERRACE_ASSERT_OK((*full)->CompactNow());
  EXPECT_EQ((*full)->stats().compactions, 0u);
  const std::uint64_t rows = (*busy)->stats().rows_written;
  for (std::uint64_t i = 0; i < 50; ++i) {
    TERRACE_ASSERT_OK(WriteEvery(kKeys, busy->get(), i * kKeys / 50));
  }
  // Small files are merged.
  EXPECT_LT((*busy)->stats().rows_compacted, 500u);
  EXPECT_EQ((*busy)->stats().rows_written, rows + 50);
}

// What no compaction could free does not make it rewrite files for ever.
TEST(StoreCompaction, ModelSizeEndsWhereItsSpaceIsTooSmall) {
  MemoryFileSystem fs;
  StoreOptions options = Options(CompactionPolicy::kModelSize, 0.5);
  options.most_run_bytes = 4096;
  StoreHarness harness(&fs, 1 << 30, options);
  harness.key_range = kKeys;
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kKeys)));
  TERRACE_ASSERT_OK(harness.Commit());  // Keeps the files.
  const double amplification = Amplify(&harness, 20, false, 0.5);
  EXPECT_LE(amplification, 1.1);
  TERRACE_ASSERT_OK(harness.CheckAll());
}

TEST(CompactionRule, GainPutsOldFilesBeforeYoungOnesAndNoAgeBeforeAnEmptyFile) {
  StoreOptions options;
  options.stale_share = 0.3;
  const CompactionRule rule(options);
  EXPECT_GT(rule.Rank({100, 50}, 10), rule.Rank({100, 40}, 10));
  EXPECT_GT(rule.Rank({100, 40}, 40), rule.Rank({100, 50}, 10));
  EXPECT_GT(rule.Rank({100, 40}, 10), rule.Rank({10, 4}, 9));
  EXPECT_GT(rule.Rank({10, 10}, 1), rule.Rank({100, 99}, 1'000'000));
  EXPECT_FALSE(rule.IsWorth({10, 3}));
  EXPECT_TRUE(rule.IsWorth({10, 4}));
  EXPECT_FALSE(rule.Due({1000, 300}, 0));
  EXPECT_TRUE(rule.Due({1000, 301}, 0));
}

TEST(CompactionRule, ModelSizePutsTheFewestNewestRowsFirst) {
  StoreOptions options;
  options.compaction = CompactionPolicy::kModelSize;
  options.most_run_bytes = 100;
  const CompactionRule rule(options);
  EXPECT_GT(rule.Rank({10, 5}, 1), rule.Rank({100, 90}, 1));
  EXPECT_FALSE(rule.Due({100, 99}, 100));
  EXPECT_TRUE(rule.Due({100, 1}, 101));
  EXPECT_FALSE(rule.TakesAny(100, 200)) << "not above the limit";
  EXPECT_TRUE(rule.TakesAny(300, 200));
  EXPECT_FALSE(rule.TakesAny(301, 200)) << "that would not be enough";
  EXPECT_FALSE(CompactionRule(StoreOptions()).TakesAny(101, 200));
}

// Deletions that an older version still needs are written anew as they are: that frees nothing, and
// it must not make the new file due again.
TEST(StoreCompaction, DeletionsThatAreStillNeededAreNotCompactedWithoutEnd) {
  for (const CompactionPolicy policy : {CompactionPolicy::kStaleShare, CompactionPolicy::kGain}) {
    MemoryFileSystem fs;
    StoreOptions options = Options(policy, 0.2);
    options.file_bytes = 64 << 10;  // Each write one file.
    StoreHarness harness(&fs, 1 << 30, options);
    TERRACE_ASSERT_OK(harness.Create());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 100)));
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(100, 110)));
    TERRACE_ASSERT_OK(harness.Erase(harness.KeysFrom(0, 10)));
    TERRACE_ASSERT_OK(harness.Erase(harness.KeysFrom(10, 20)));
    // A file goes: deletions are looked at again.
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(100, 110)));
    TERRACE_ASSERT_OK(harness.store()->CompactNow());
    EXPECT_GT(harness.store()->stats().compactions, 0u) << "the deletions were not looked at";
    EXPECT_LE(harness.store()->stats().compactions, 3u);
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

// Which deletions an older version needs is looked up in the keys of most files, and so not each
// time that one of them is copied.
TEST(StoreCompaction, DeletionsAreCopiedUnseenUntilFilesHaveGone) {
  constexpr std::uint64_t kFiles = 60, kRows = 400;
  const auto read_by_a_merge = [](bool erases) {
    MemoryFileSystem fs;
    StoreOptions options = Options(CompactionPolicy::kGain, 0.5);
    options.file_bytes = kRows * options.row_bytes;
    StoreHarness harness(&fs, 1 << 30, options);
    harness.key_range = (kFiles + 1) * kRows;
    TERRACE_EXPECT_OK(harness.Create());
    std::vector<Key> one_of_each;
    for (std::uint64_t i = 0; i < kFiles; ++i) {
      TERRACE_EXPECT_OK(harness.Write(harness.KeysFrom(i * kRows, (i + 1) * kRows)));
      one_of_each.push_back(harness.KeyAt(i * kRows));
    }
    TERRACE_EXPECT_OK(harness.Write(one_of_each));
    const StoreStats before = harness.store()->stats();
    // Small files, until they are merged.
    for (std::uint64_t i = 0; harness.store()->stats().compactions == before.compactions; ++i) {
      EXPECT_LT(i, 40u);
      if (i >= 40) break;
      const std::vector<Key> keys = harness.KeysFrom(kFiles * kRows + i, kFiles * kRows + i + 1);
      TERRACE_EXPECT_OK(i == 3 && erases ? harness.Erase(harness.KeysFrom(1, 2))
                                         : harness.Write(keys));
    }
    const std::uint64_t read = harness.store()->stats().read_bytes - before.read_bytes;
    TERRACE_EXPECT_OK(harness.CheckAll());
    TERRACE_EXPECT_OK(harness.Commit());
    // What is deleted stays so.
    TERRACE_EXPECT_OK(harness.Reopen(1));
    TERRACE_EXPECT_OK(harness.CheckAll());
    return read;
  };
  EXPECT_LE(read_by_a_merge(true), read_by_a_merge(false) + kFiles / 2 * 4096);
}

}  // namespace
}  // namespace terrace
