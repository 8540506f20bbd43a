// Every call to the file system made to fail in turn, and power lost at any of them.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "terrace/base/sync_point.h"
#include "terrace/base/testing/sweep.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

constexpr std::uint64_t kQuota = std::uint64_t{1} << 30;

// A failure is fine as long as it is said so; a wrong or lost row is not.
void ExpectNoWrongRow(const Status& status) {
  EXPECT_NE(status.code(), StatusCode::kInternal) << status.ToString();
}

// The life of a store with all verbs in it. Goes on after errors, as a caller might, and checks
// what is read all the time.
void RunScript(StoreHarness* harness, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<Key> all;
  for (std::uint64_t i = 0; i < harness->key_range; ++i) all.push_back(harness->KeyAt(i));
  if (!harness->Create().ok()) return;
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 3; ++i) ExpectNoWrongRow(harness->Write(harness->RandomKeys(&rng, 120)));
    ExpectNoWrongRow(harness->CheckRead(all));
    ExpectNoWrongRow(harness->Erase(harness->RandomKeys(&rng, 60)));
    ExpectNoWrongRow(harness->Commit());
    ExpectNoWrongRow(harness->Write(harness->RandomKeys(&rng, 200)));
    ExpectNoWrongRow(harness->store()->CompactNow());
    ExpectNoWrongRow(harness->CheckRead(all));
    ExpectNoWrongRow(harness->CheckWalk());
    if (harness->manifests().size() > 1) {
      ExpectNoWrongRow(harness->Drop(harness->manifests().begin()->first));
    }
    if (!harness->manifests().empty() && round == 1) {
      const Status status = harness->Reopen(harness->manifests().rbegin()->first);
      ExpectNoWrongRow(status);
      if (!status.ok()) return;
    }
  }
  ExpectNoWrongRow(harness->CheckRead(all));
}

// Opens every manifest that is left, newest last, without faults.
void ExpectManifestsWhole(FileSystem* fs, const StoreHarness& broken) {
  if (broken.manifests().empty()) return;
  const std::uint64_t newest = broken.manifests().rbegin()->first;
  std::vector<ManifestReference> kept;
  for (const auto& [id, reference] : broken.manifests()) kept.push_back(reference);
  DiskQuota quota(kQuota);
  const StoreOptions options = *broken.options();
  {
    // As the trainer does: it removes what came later.
    auto store =
        Store::Open(fs, Clock::Real(), &quota, options, broken.manifests().at(newest), kept);
    ASSERT_TRUE(store.ok()) << store.status().ToString();
  }
  for (const auto& [id, reference] : broken.manifests()) {
    StoreOptions reader = options;
    reader.read_only = true;
    auto store = Store::Open(fs, Clock::Real(), nullptr, reader, reference, {});
    ASSERT_TRUE(store.ok()) << "manifest " << id << ": " << store.status().ToString();
    RowMap rows;
    const Status walked = (*store)->ForEachRow(1 << 20, [&](const RowView& view) {
      rows[view.key].assign(view.row.begin(), view.row.end());
      return OkStatus();
    });
    ASSERT_TRUE(walked.ok()) << walked.ToString();
    EXPECT_EQ(rows, broken.snapshots().at(id)) << "manifest " << id;
    std::vector<Finding> findings;
    ASSERT_TRUE(ScrubManifest(fs, broken.scrub_options(), reference, &findings).ok());
    EXPECT_TRUE(findings.empty()) << findings[0].file << ": " << findings[0].what;
  }
}

StoreOptions OptionsOf(IndexKind index) {
  return index == IndexKind::kKey ? StoreHarness::TinyOptions() : StoreHarness::TinyGroupOptions();
}

class FaultSweep : public testing::TestWithParam<std::tuple<Fault, IndexKind>> {};

TEST_P(FaultSweep, EachOperationInTurn) {
  for (std::uint64_t nth = 1 + FirstOfSweep();; nth += kSweepStride) {
    SCOPED_TRACE("fault at operation " + std::to_string(nth));
    MemoryFileSystem memory;
    FaultRule rule;
    rule.fault = std::get<Fault>(GetParam());
    rule.nth = nth;
    FaultyFileSystem fs(&memory, {rule});
    StoreHarness harness(&fs, kQuota, OptionsOf(std::get<IndexKind>(GetParam())));
    RunScript(&harness, 7);
    harness.Abandon();
    EXPECT_LE(harness.quota()->used(), 0u);
    ExpectManifestsWhole(&memory, harness);
    if (HasFailure()) return;
    if (fs.faults() == 0) {
      EXPECT_GT(nth, 10u);  // The script does have such calls.
      return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, FaultSweep,
                         testing::Combine(testing::Values(Fault::kError, Fault::kShortRead,
                                                          Fault::kShortWrite, Fault::kNoSpace,
                                                          Fault::kSyncError, Fault::kFlippedBit),
                                          testing::Values(IndexKind::kKey, IndexKind::kGroup)),
                         [](const auto& param) {
                           const bool by_key = std::get<IndexKind>(param.param) == IndexKind::kKey;
                           return std::string(FaultName(std::get<Fault>(param.param))) +
                                  (by_key ? "ByKey" : "ByGroup");
                         });

TEST(StoreFault, ManyAtRandom) {
  for (std::uint64_t seed = 1 + FirstOfSweep(); seed <= 60; seed += kSweepStride) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    MemoryFileSystem memory;
    FaultRule rule;
    rule.fault = std::nullopt;
    rule.rate = 0.01;
    rule.seed = seed;
    FaultyFileSystem fs(&memory, {rule});
    StoreHarness harness(&fs, kQuota,
                         OptionsOf(seed % 2 == 0 ? IndexKind::kGroup : IndexKind::kKey));
    RunScript(&harness, seed);
    harness.Abandon();
    ExpectManifestsWhole(&memory, harness);
    if (HasFailure()) return;
  }
}

TEST(StoreFault, FailedWriteChangesNothingAndPoisons) {
  MemoryFileSystem memory;
  FaultyFileSystem fs(&memory, {});
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  ASSERT_TRUE(harness.Create().ok());
  ASSERT_TRUE(harness.Write({1, 2, 3}).ok());
  ASSERT_TRUE(harness.Commit().ok());
  const std::uint64_t used = harness.quota()->used();
  FaultRule rule;
  rule.operation = FileOperation::kWrite;
  rule.fault = Fault::kNoSpace;
  rule.nth = 1;
  fs.SetRules({rule});
  const Status failed = harness.Write({2, 4});
  EXPECT_EQ(failed.code(), StatusCode::kIo);
  EXPECT_NE(failed.message().find("writing 2 rows of table 'ads'"), std::string::npos)
      << failed.ToString();
  EXPECT_EQ(harness.quota()->used(), used);
  EXPECT_TRUE(harness.CheckRead({1, 2, 3, 4}).ok());
  EXPECT_FALSE(harness.Write({5}).ok());
  EXPECT_FALSE(harness.Erase({1}).ok());
  EXPECT_FALSE(harness.store()->Commit(9).ok());
  ASSERT_TRUE(harness.Reopen(1).ok());
  EXPECT_TRUE(harness.Write({5}).ok());
  EXPECT_TRUE(harness.CheckRead({1, 2, 3, 4, 5}).ok());
}

// Runs the script until everything fails from some moment on, loses power, and opens what the last
// manifests name.
void CrashOnce(IndexKind index, std::uint64_t seed, MemoryFileSystem::CrashPolicy policy,
               std::uint64_t at) {
  SCOPED_TRACE("seed " + std::to_string(seed) + " operation " + std::to_string(at));
  MemoryFileSystem memory;
  FaultRule rule;
  rule.fault = Fault::kError;
  rule.nth = at;
  rule.from_then_on = true;
  FaultyFileSystem fs(&memory, {rule});
  StoreHarness harness(&fs, kQuota, OptionsOf(index));
  RunScript(&harness, seed);
  harness.Abandon();
  memory.Crash(seed, policy);
  ExpectManifestsWhole(&memory, harness);
}

class StoreCrash : public testing::TestWithParam<IndexKind> {};

TEST_P(StoreCrash, AtEachOperation) {
  // As many operations as the script has, and some more.
  std::uint64_t operations;
  {
    MemoryFileSystem memory;
    FaultyFileSystem fs(&memory, {});
    StoreHarness harness(&fs, kQuota, OptionsOf(GetParam()));
    RunScript(&harness, 3);
    operations = fs.operations();
  }
  for (auto policy :
       {MemoryFileSystem::CrashPolicy::kLoseUnsynced, MemoryFileSystem::CrashPolicy::kKeepAll,
        MemoryFileSystem::CrashPolicy::kRandom}) {
    for (std::uint64_t at = 1 + FirstOfSweep(); at <= operations + 1; at += kSweepStride) {
      CrashOnce(GetParam(), 3, policy, at);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST_P(StoreCrash, RandomSeeds) {
  for (std::uint64_t seed = 100 + FirstOfSweep(); seed < 200; seed += kSweepStride) {
    CrashOnce(GetParam(), seed, MemoryFileSystem::CrashPolicy::kRandom, 1 + Rng(seed).Below(1500));
    ASSERT_FALSE(HasFailure());
  }
}

// The disk stops at each named moment, the second time that it comes.
TEST_P(StoreCrash, AtEachSyncPoint) {
  for (const char* name :
       {"store.write.before_data", "store.write.after_data", "store.write.before_index",
        "store.commit.before_sync", "store.commit.before_manifest", "store.commit.after_manifest",
        "store.compact.before_write", "store.compact.before_publish", "store.compact.before_remove",
        "store.drop.before_manifest", "store.drop.before_remove", "store.open.before_remove",
        "store.reuse.before_write"}) {
    SCOPED_TRACE(name);
    MemoryFileSystem memory;
    FaultyFileSystem fs(&memory, {});
    int hits = 0;
    SyncPoint::Arm([&](std::string_view hit) {
      if (hit != name || ++hits != 2) return;
      FaultRule rule;
      rule.nth = 1;
      rule.from_then_on = true;
      fs.SetRules({rule});
    });
    StoreHarness harness(&fs, kQuota, OptionsOf(GetParam()));
    RunScript(&harness, 5);
    SyncPoint::Arm(nullptr);
    EXPECT_GE(hits, 2);
    harness.Abandon();
    memory.Crash(1, MemoryFileSystem::CrashPolicy::kRandom);
    ExpectManifestsWhole(&memory, harness);
  }
}

INSTANTIATE_TEST_SUITE_P(All, StoreCrash, testing::Values(IndexKind::kKey, IndexKind::kGroup),
                         [](const auto& param) {
                           return param.param == IndexKind::kKey ? "ByKey" : "ByGroup";
                         });

}  // namespace
}  // namespace terrace
