// Reads, writes, commits and compaction side by side; and the orders of events that could go wrong.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "terrace/base/ids.h"
#include "terrace/base/mutex.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/thread.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/group_block.h"
#include "terrace/store/testing/hooked_file_system.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

constexpr std::uint64_t kQuota = std::uint64_t{1} << 30;

class StoreHazard : public testing::TestWithParam<IndexKind> {
 protected:
  static bool ByGroup() { return GetParam() == IndexKind::kGroup; }
  static StoreOptions Options() {
    return ByGroup() ? StoreHarness::TinyGroupOptions() : StoreHarness::TinyOptions();
  }
  // Some of KeysFrom(0, 400), so that a write of them leaves part of the files before it stale: by
  // group those of every other one, where any keys would be of all.
  static std::vector<Key> SomeKeys(const StoreHarness& harness) {
    if (!ByGroup()) return harness.KeysFrom(0, 250);
    const GroupLayout layout = GroupLayout::Of(harness.options()->row_bytes);
    const std::uint64_t groups = layout.GroupsFor(harness.options()->expected_rows);
    std::vector<Key> keys = harness.KeysFrom(0, 400);
    std::erase_if(keys, [&](Key key) {
      return (static_cast<unsigned __int128>(MixKey(key)) * groups >> 64) % 2 != 0;
    });
    return keys;
  }
};

TEST_P(StoreHazard, RowCompactedWhileRead) {
  MemoryFileSystem memory;
  HookedFileSystem fs(&memory);
  StoreOptions options = Options();
  options.spare_files = 0;
  StoreHarness harness(&fs, kQuota, options);
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 400)));
  TERRACE_ASSERT_OK(harness.Write(SomeKeys(harness)));
  const std::uint64_t before = harness.store()->stats().compactions;
  // The reader knows places in files that are compacted away before it reads them.
  std::uint64_t used_while_read = 0;
  fs.BeforeReads([&] {
    // On a thread of its own: a reader takes none of the writers' locks.
    Thread compactor("compactor", ThreadPriority::kNormal, [&] {
      const Status status = harness.store()->CompactNow();
      EXPECT_TRUE(status.ok()) << status.ToString();
    });
    compactor.Join();
    used_while_read = harness.quota()->used();
  });
  TERRACE_ASSERT_OK(harness.CheckRead(harness.KeysFrom(0, 400)));
  EXPECT_GT(harness.store()->stats().compactions, before);
  TERRACE_ASSERT_OK(harness.CheckAll());
  // What the reader held went as soon as somebody looked.
  TERRACE_ASSERT_OK(harness.Write({1}));
  EXPECT_LT(harness.quota()->used(), used_while_read);
}

// By group a write waits for reads, since it reads blocks itself.
TEST(StoreHazardByKey, IndexGrownWhileRead) {
  MemoryFileSystem memory;
  HookedFileSystem fs(&memory);
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 300)));
  const std::uint64_t before = harness.store()->index_bytes();
  fs.BeforeReads([&] { TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(1000, 61000))); });
  TERRACE_ASSERT_OK(harness.CheckRead(harness.KeysFrom(0, 300)));
  EXPECT_GT(harness.store()->index_bytes(), before);
  TERRACE_ASSERT_OK(harness.CheckRead(harness.KeysFrom(0, 61000)));
}

TEST_P(StoreHazard, CheckpointDuringCompaction) {
  for (const char* moment : {"store.compact.before_write", "store.compact.before_remove"}) {
    SCOPED_TRACE(moment);
    MemoryFileSystem memory;
    StoreHarness harness(&memory, kQuota, Options());
    TERRACE_ASSERT_OK(harness.Create());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 400)));
    TERRACE_ASSERT_OK(harness.Write(SomeKeys(harness)));
    bool committed = false;
    SyncPoint::Arm([&](std::string_view name) {
      if (name != moment || committed) return;
      committed = true;
      TERRACE_ASSERT_OK(harness.Commit());
    });
    TERRACE_ASSERT_OK(harness.store()->CompactNow());
    SyncPoint::Arm(nullptr);
    ASSERT_TRUE(committed);
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(100, 400)));
    TERRACE_ASSERT_OK(harness.store()->CompactNow());
    harness.Abandon();
    memory.Crash(1, MemoryFileSystem::CrashPolicy::kLoseUnsynced);
    TERRACE_ASSERT_OK(harness.Reopen(1));
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

TEST_P(StoreHazard, CompactionDuringCheckpoint) {
  for (const char* moment : {"store.commit.before_sync", "store.commit.before_manifest"}) {
    SCOPED_TRACE(moment);
    MemoryFileSystem memory;
    StoreHarness harness(&memory, kQuota, Options());
    TERRACE_ASSERT_OK(harness.Create());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 400)));
    TERRACE_ASSERT_OK(harness.Write(SomeKeys(harness)));
    SyncPoint::Arm([&](std::string_view name) {
      if (name == moment) TERRACE_ASSERT_OK(harness.store()->CompactNow());
    });
    TERRACE_ASSERT_OK(harness.Commit());
    SyncPoint::Arm(nullptr);
    EXPECT_GT(harness.store()->stats().compactions, 0u);
    EXPECT_GT(harness.store()->stats().checkpoint_only_bytes, 0u);
    harness.Abandon();
    memory.Crash(1, MemoryFileSystem::CrashPolicy::kLoseUnsynced);
    TERRACE_ASSERT_OK(harness.Reopen(1));
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

TEST_P(StoreHazard, ReaderOfAnOldCheckpointWhileItIsDropped) {
  MemoryFileSystem memory;
  HookedFileSystem fs(&memory);
  StoreHarness harness(&memory, kQuota, Options());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 400)));
  TERRACE_ASSERT_OK(harness.Commit());
  const ManifestReference old = harness.manifests().at(1);
  const RowMap expected = harness.snapshots().at(1);
  StoreOptions options = Options();
  options.read_only = true;
  auto reader = Store::Open(&fs, Clock::Real(), nullptr, options, old, {});
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 400)));
  TERRACE_ASSERT_OK(harness.Commit());
  fs.BeforeReads([&] { TERRACE_ASSERT_OK(harness.Drop(1)); });
  // It has its files open: it goes on to read what it opened.
  for (const auto& [key, row] : expected) {
    std::vector<std::byte> memory_of_row(row.size());
    std::byte* rows[] = {memory_of_row.data()};
    std::uint8_t found[] = {0};
    TERRACE_ASSERT_OK((*reader)->Read({&key, 1}, rows, found));
    ASSERT_EQ(found[0], 1);
    ASSERT_EQ(memory_of_row, row);
  }
  EXPECT_EQ(harness.store()->stats().checkpoint_only_bytes, 0u);
  // A reader that comes now is told which file is gone.
  reader = Store::Open(&fs, Clock::Real(), nullptr, options, old, {});
  ASSERT_FALSE(reader.ok());
  EXPECT_EQ(reader.status().code(), StatusCode::kNotFound);
  EXPECT_NE(reader.status().message().find("manifest-00000001"), std::string::npos);
  TERRACE_ASSERT_OK(harness.CheckAll());
}

// The files of a write belong to the store before the index leads to their rows: a compaction must
// not take those rows for stale.
TEST_P(StoreHazard, CompactionWhileAWriteTakesEffect) {
  MemoryFileSystem memory;
  StoreOptions options = Options();
  options.background_compaction = true;  // So that Write itself does not compact.
  StoreHarness harness(&memory, kQuota, options);
  TERRACE_ASSERT_OK(harness.Create());
  harness.key_range = 500;
  SyncPoint::Arm([&](std::string_view name) {
    if (name == "store.write.before_index") TERRACE_ASSERT_OK(harness.store()->CompactNow());
  });
  // Many small files, which are merged from the smallest on: that of a write of one row at once.
  for (std::uint64_t i = 0; i < 150; ++i) {
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(3 * i, 3 * i + (i % 5 == 4 ? 1 : 5))));
    // By group an erasure keeps CompactNow out.
    if (i % 7 == 6 && !ByGroup())
      TERRACE_ASSERT_OK(harness.Erase(harness.KeysFrom(3 * i, 3 * i + 1)));
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
  TERRACE_ASSERT_OK(harness.Commit());
  TERRACE_ASSERT_OK(harness.Reopen(1));
  TERRACE_ASSERT_OK(harness.CheckAll());
  harness.Abandon();
  SyncPoint::Arm(nullptr);
}

TEST_P(StoreHazard, WriteOvertakesCompaction) {
  MemoryFileSystem memory;
  StoreHarness harness(&memory, kQuota, Options());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 400)));
  TERRACE_ASSERT_OK(harness.Erase(harness.KeysFrom(350, 400)));
  TERRACE_ASSERT_OK(harness.Write(SomeKeys(harness)));
  TERRACE_ASSERT_OK(harness.Commit());
  // After the compaction has read and written its rows: the index must keep the newer ones. It may
  // be a compaction thread's, which is often faster than CompactNow, so the harness has a lock.
  Mutex mu;
  std::atomic<bool> armed{false};
  std::atomic<bool> open{false};
  std::atomic<bool> done{false};
  SyncPoint::Arm([&](std::string_view name) {
    if (name != "store.compact.before_publish" || !armed.load() || done.exchange(true)) return;
    while (!open.load()) sched_yield();  // It may be the only round, and begins with the store.
    MutexLock lock(&mu);
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(200, 300)));
    TERRACE_ASSERT_OK(harness.Erase(harness.KeysFrom(300, 320)));
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(360, 370)));
  });
  harness.options()->background_compaction = true;  // So that Write itself does not compact.
  // Nor waits for the compaction that it interrupts, which is not two files behind.
  harness.options()->file_bytes = ByGroup() ? 1 << 20 : 64 * 500;
  armed.store(true);
  TERRACE_ASSERT_OK(harness.Reopen(1));
  open.store(true);
  for (int i = 0; i < 1000 && !done.load(); ++i) {
    {
      MutexLock lock(&mu);
      TERRACE_ASSERT_OK(harness.Write(ByGroup() ? SomeKeys(harness) : harness.KeysFrom(0, 330)));
    }
    TERRACE_ASSERT_OK(harness.store()->CompactNow());
  }
  ASSERT_TRUE(done.load());
  // Not before the compaction that was interrupted has ended.
  TERRACE_ASSERT_OK(harness.store()->CompactNow());
  TERRACE_ASSERT_OK(harness.store()->background_status());
  TERRACE_ASSERT_OK(harness.CheckAll());
  harness.Abandon();
  SyncPoint::Arm(nullptr);
}

INSTANTIATE_TEST_SUITE_P(Indexes, StoreHazard, testing::Values(IndexKind::kKey, IndexKind::kGroup),
                         [](const auto& param) {
                           return param.param == IndexKind::kKey ? "ByKey" : "ByGroup";
                         });

// A row that tells its key and how often it was written.
constexpr std::uint32_t kRowBytes = 24;
void MakeRow(Key key, std::uint64_t generation, std::byte* row) {
  const std::uint64_t words[3] = {generation, key, HashCombine(key, generation)};
  std::memcpy(row, words, sizeof words);
}

class StoreVerbs : public testing::TestWithParam<IndexKind> {};

TEST_P(StoreVerbs, SideBySide) {
  constexpr std::uint64_t kKeys = 3000;
  constexpr int kRounds = 60;
  MemoryFileSystem memory;
  StoreOptions options = StoreHarness::TinyOptions();
  options.row_bytes = kRowBytes;
  options.file_bytes = 200 * 64;
  options.background_compaction = true;
  options.index = GetParam();
  options.expected_rows = 500;  // Blocks are divided under the readers.
  DiskQuota quota(kQuota);
  auto created = Store::Create(&memory, Clock::Real(), &quota, options);
  ASSERT_TRUE(created.ok());
  Store* store = created->get();
  // Generation g of a key is written before published[key] becomes g.
  std::vector<std::atomic<std::uint64_t>> published(kKeys);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> reads{0};
  const auto check = [&](const Status& status) {
    EXPECT_TRUE(status.ok()) << status.ToString();
    if (!status.ok()) stop.store(true);
  };
  Thread writer("writer", ThreadPriority::kNormal, [&] {
    Rng rng(1);
    std::vector<std::byte> bytes(kKeys * kRowBytes);
    for (std::uint64_t generation = 1; generation <= kRounds && !stop.load(); ++generation) {
      std::vector<Key> keys;
      std::vector<const std::byte*> rows;
      for (Key key = 0; key < kKeys; ++key) {
        if (generation > 1 && rng.Below(3) != 0) continue;
        MakeRow(key, generation, &bytes[key * kRowBytes]);
        keys.push_back(key);
        rows.push_back(&bytes[key * kRowBytes]);
      }
      check(store->Write(keys, rows, {}));
      for (Key key : keys) published[key].store(generation);
    }
    stop.store(true);
  });
  Thread committer("committer", ThreadPriority::kNormal, [&] {
    for (std::uint64_t id = 1; !stop.load(); ++id) {
      const auto reference = store->Commit(id);
      check(reference.ok() ? OkStatus() : reference.status());
      if (id > 2) check(store->Drop(id - 2));
    }
  });
  const auto read_some = [&](std::uint64_t seed) {
    Rng rng(seed);
    std::vector<std::byte> bytes(kKeys * kRowBytes);
    while (!stop.load()) {
      std::vector<Key> keys;
      std::vector<std::byte*> rows;
      std::vector<std::uint64_t> least;
      for (Key key = 0; key < kKeys; ++key) {
        if (rng.Below(4) != 0) continue;
        keys.push_back(key);
        rows.push_back(&bytes[key * kRowBytes]);
        least.push_back(published[key].load());
      }
      std::vector<std::uint8_t> found(keys.size());
      check(store->Read(keys, rows, found));
      for (std::size_t i = 0; i < keys.size(); ++i) {
        std::uint64_t words[3];
        std::memcpy(words, rows[i], sizeof words);
        const bool whole = words[1] == keys[i] && words[2] == HashCombine(keys[i], words[0]);
        if (found[i] == 0 ? least[i] > 0 : !whole || words[0] < least[i]) {
          ADD_FAILURE() << "key " << keys[i] << " found " << int{found[i]} << " generation "
                        << words[0] << " where " << least[i] << " was written";
          stop.store(true);
          break;
        }
      }
      reads.fetch_add(1);
    }
  };
  Thread reader("reader", ThreadPriority::kNormal, [&] { read_some(2); });
  Thread second_reader("reader2", ThreadPriority::kNormal, [&] { read_some(3); });
  writer.Join();
  committer.Join();
  reader.Join();
  second_reader.Join();
  check(store->background_status());
  EXPECT_GT(reads.load(), 0u);
  // Writes of so many rows leave no block as it was: files go without being compacted.
  if (GetParam() == IndexKind::kKey) {
    EXPECT_GT(store->stats().compactions, 0u);
  }
  EXPECT_EQ(store->stats().live_rows, kKeys);
  check(store->CompactNow());
  std::vector<Finding> findings;
  const Result<ManifestReference> last = store->Commit(std::uint64_t{1} << 32);
  check(last.status());
  check(ScrubManifest(
      &memory,
      ScrubOptions{options.directory, RecordLayout::Of(options.table, 0,
                                                       RecordRowBytes(options.index, kRowBytes,
                                                                      options.group.block_bytes))},
      *last, &findings));
  EXPECT_TRUE(findings.empty());
}

INSTANTIATE_TEST_SUITE_P(Indexes, StoreVerbs, testing::Values(IndexKind::kKey, IndexKind::kGroup),
                         [](const auto& param) {
                           return param.param == IndexKind::kKey ? "ByKey" : "ByGroup";
                         });

// Of compaction in the background, the first rounds to have written their outputs stop there,
// before they lead the index to them.
class TwoRounds : public testing::TestWithParam<std::uint64_t> {
 protected:
  static constexpr std::uint64_t kKeys = 20'000;
  static constexpr std::uint64_t kFileRows = 1000;

  TwoRounds() : rng_(GetParam()), harness_(&memory_, kQuota, Options()) {
    harness_.key_range = kKeys;
  }
  ~TwoRounds() override {
    GoOn();
    harness_.Abandon();
    SyncPoint::Arm(nullptr);
  }
  static StoreOptions Options() {
    StoreOptions options = StoreHarness::TinyOptions();
    options.background_compaction = true;
    options.file_bytes = kFileRows * 64;
    return options;
  }
  void Load() {
    TERRACE_ASSERT_OK(harness_.Create());
    TERRACE_ASSERT_OK(harness_.Write(harness_.KeysFrom(0, kKeys)));
  }
  void StopRounds(int most) {
    SyncPoint::Arm([this, most](std::string_view name) {
      if (name != "store.compact.before_publish") return;
      MutexLock lock(&mu_);
      if (stopped_ == most) return;
      ++stopped_;
      changed_.NotifyAll();
      while (!go_on_) changed_.Wait(&mu_);
    });
  }
  // For so long, in a test that fails.
  bool AwaitStopped(int rounds, double seconds = 60) {
    const double end = Clock::Real()->MonotonicSeconds() + seconds;
    MutexLock lock(&mu_);
    while (stopped_ < rounds && Clock::Real()->MonotonicSeconds() < end) changed_.Wait(&mu_);
    return stopped_ >= rounds;
  }
  void GoOn() {
    MutexLock lock(&mu_);
    go_on_ = true;
    changed_.NotifyAll();
  }
  std::vector<Key> SomeKeys(std::size_t count) {
    std::vector<Key> keys = harness_.KeysFrom(0, kKeys);
    for (std::size_t i = 0; i < count; ++i) {
      std::swap(keys[i], keys[i + rng_.Below(keys.size() - i)]);
    }
    keys.resize(count);
    return keys;
  }
  void FinishAndCheck(std::uint64_t manifest) {
    GoOn();
    TERRACE_ASSERT_OK(harness_.store()->CompactNow());
    TERRACE_ASSERT_OK(harness_.store()->background_status());
    TERRACE_ASSERT_OK(harness_.CheckAll());
    TERRACE_ASSERT_OK(harness_.Reopen(manifest));
    TERRACE_ASSERT_OK(harness_.CheckAll());
  }

  Rng rng_;
  MemoryFileSystem memory_;
  Mutex mu_;
  CondVar changed_;
  int stopped_ TERRACE_GUARDED_BY(mu_) = 0;
  bool go_on_ TERRACE_GUARDED_BY(mu_) = false;
  StoreHarness harness_;
};

// Rows of both rounds' inputs are overwritten and erased, and a commit names what there is.
TEST_P(TwoRounds, WritesAndACommitBeforeEitherIsPublished) {
  StopRounds(2);
  Load();
  TERRACE_ASSERT_OK(harness_.Write(SomeKeys(12'000)));
  ASSERT_TRUE(AwaitStopped(2));
  // These wait for no compaction: it is less than two files and they behind.
  TERRACE_ASSERT_OK(harness_.Write(SomeKeys(1500)));
  TERRACE_ASSERT_OK(harness_.Erase(SomeKeys(2500)));
  TERRACE_ASSERT_OK(harness_.Commit());
  FinishAndCheck(1);
}

// A round stops, and another one rewrites deletions of rows that the first one's inputs hold: they
// are needed as long as those are there.
TEST_P(TwoRounds, DeletionsOfRowsInTheOthersInputs) {
  StopRounds(1);
  Load();
  TERRACE_ASSERT_OK(harness_.Write(SomeKeys(6000)));
  TERRACE_ASSERT_OK(harness_.Erase(SomeKeys(6000)));
  ASSERT_TRUE(AwaitStopped(1));
  // Until deletions have been looked at, which is when half as many files have gone as there are.
  while (harness_.store()->stats().compactions < 40) {
    TERRACE_ASSERT_OK(harness_.Write(SomeKeys(2000)));
  }
  TERRACE_ASSERT_OK(harness_.Commit());
  FinishAndCheck(1);
}

// The quota has room for one output: the second round finds none, and goes on when the first one
// has ended, though nobody writes.
TEST_P(TwoRounds, RoomForOne) {
  StopRounds(1);
  Load();
  const std::uint64_t file_bytes = harness_.quota()->used() / (kKeys / kFileRows);
  const std::uint64_t free = harness_.quota()->limit() - harness_.quota()->used();
  TERRACE_ASSERT_OK(harness_.quota()->Reserve(free - 12 * file_bytes - file_bytes * 3 / 2, 0));
  TERRACE_ASSERT_OK(harness_.Write(SomeKeys(12'000)));
  ASSERT_TRUE(AwaitStopped(1));
  TERRACE_ASSERT_OK(harness_.CheckRead(harness_.KeysFrom(0, kKeys)));  // It has time to look.
  EXPECT_EQ(harness_.store()->stats().compactions, 0u);
  GoOn();
  const double end = Clock::Real()->MonotonicSeconds() + 60;  // Of a test that fails.
  while (harness_.store()->stats().compactions < 2 && Clock::Real()->MonotonicSeconds() < end) {
    TERRACE_ASSERT_OK(harness_.CheckRead(harness_.KeysFrom(0, 100)));
  }
  EXPECT_GE(harness_.store()->stats().compactions, 2u);
  TERRACE_ASSERT_OK(harness_.Commit());
  FinishAndCheck(1);
}

// A checkpoint names the files that are due, and what is free is its own: neither round finds room,
// and neither keeps asking, nor a write waiting.
TEST_P(TwoRounds, RoomForNone) {
  DiskQuota* const quota = harness_.quota();
  Load();
  TERRACE_ASSERT_OK(harness_.Commit());
  harness_.store()->SetKeepFree(quota->limit() - quota->used());
  harness_.store()->OpenReserve();
  std::atomic<int> asked{0};
  const DiskQuota::Reclaimer counter(quota, [&asked] { asked.fetch_add(1); });
  for (int i = 0; i < 5; ++i) {
    TERRACE_ASSERT_OK(harness_.Write(SomeKeys(12'000)));
    TERRACE_ASSERT_OK(harness_.CheckRead(harness_.KeysFrom(0, kKeys)));
  }
  EXPECT_EQ(harness_.store()->stats().compactions, 0u);
  EXPECT_LE(asked.load(), 4);  // Once each, as no room is made.
  harness_.store()->SetKeepFree(0);
  FinishAndCheck(1);
  EXPECT_GT(asked.load(), 0);
}

// A caller's round leaves more alone because another one goes on, which finds no room either and
// has ended before the caller looks for it: he asks again, and does not give up.
TEST_P(TwoRounds, ACallerBesideARoundWithoutRoom) {
  DiskQuota* const quota = harness_.quota();
  const auto caller = std::this_thread::get_id();
  SyncPoint::Arm([&](std::string_view name) {
    if (name != "store.compact.picked") return;
    char thread[16];
    ASSERT_EQ(pthread_getname_np(pthread_self(), thread, sizeof thread), 0);
    if (std::this_thread::get_id() == caller) {
      GoOn();
      EXPECT_TRUE(harness_.CheckRead(harness_.KeysFrom(0, kKeys)).ok());  // It has time to end.
    } else if (thread == std::string_view("compact2")) {  // The first one's turn is the caller's.
      MutexLock lock(&mu_);
      if (stopped_++ > 0) return;
      changed_.NotifyAll();
      while (!go_on_) changed_.Wait(&mu_);
    }
  });
  Load();
  TERRACE_ASSERT_OK(harness_.Commit());
  while (!AwaitStopped(1, 0)) TERRACE_ASSERT_OK(harness_.Write(SomeKeys(2000)));
  // A checkpoint names what that one holds. No checkpoint names all that is due next.
  harness_.store()->SetKeepFree(quota->limit());
  harness_.store()->OpenReserve();
  TERRACE_ASSERT_OK(harness_.Write(SomeKeys(12'000)));
  const std::uint64_t free = quota->limit() - quota->used();
  TERRACE_ASSERT_OK(harness_.store()->MakeRoom(free + 1));
  EXPECT_TRUE(quota->HasFree(free + 1));
  harness_.store()->SetKeepFree(0);
  FinishAndCheck(1);
}

INSTANTIATE_TEST_SUITE_P(Seeds, TwoRounds, testing::Range<std::uint64_t>(1, 5));

// Three stores of a run, half of whose records are stale once the last write is published. What
// each is to keep free is all of the quota: a rewrite takes of it, or finds no room.
class StoresOfARun {
 public:
  explicit StoresOfARun(DiskQuota* quota) {
    options_.background_compaction = true;
    options_.spare_files = 0;
    for (std::uint64_t i = 0; i < 3000; ++i) keys_.push_back(MixKey(i));
    row_ = TestRow(1, 1, options_.row_bytes);
    for (std::uint32_t shard = 0; shard < 3; ++shard) {
      options_.shard = shard;
      options_.directory = fmt::format("store{}", shard);
      auto store = Store::Create(&fs_, Clock::Real(), quota, options_);
      EXPECT_TRUE(store.ok());
      stores.push_back(std::move(*store));
      EXPECT_TRUE(stores.back()->Write(keys_, Rows(keys_.size()), {}).ok());
    }
  }
  void Stage() {
    std::vector<Key> most;
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      if (i % 3 != 0) most.push_back(keys_[i]);
    }
    const std::vector<std::uint8_t> known(most.size(), 1);
    for (const auto& store : stores) {
      auto staged = store->Stage(most, Rows(most.size()), known);
      EXPECT_TRUE(staged.ok());
      staged_.push_back(std::move(*staged));
      store->SetKeepFree(kQuota);
    }
  }
  void Publish() {
    for (std::size_t s = 0; s < stores.size(); ++s) {
      TERRACE_EXPECT_OK(stores[s]->Publish(std::move(staged_[s])));
    }
  }

 private:
  std::vector<const std::byte*> Rows(std::size_t count) const { return {count, row_.data()}; }

  MemoryFileSystem fs_;  // Before the stores, whose threads use it to their end.
  StoreOptions options_ = StoreHarness::TinyOptions();
  std::vector<Key> keys_;
  std::vector<std::byte> row_;

 public:
  std::vector<std::unique_ptr<Store>> stores;

 private:
  std::vector<std::unique_ptr<StagedRows>> staged_;
};

// What stays free for a checkpoint has room for one rewrite, of whichever store of the run.
TEST(StoreThreads, OneRewriteOfAllStoresTakesOfWhatIsLeftFree) {
  static std::atomic<int> picked, stopped;
  static std::atomic<bool> go_on;
  picked = stopped = 0;
  go_on = false;
  DiskQuota quota(kQuota);
  StoresOfARun run(&quota);
  SyncPoint::Arm([](std::string_view name) {
    if (name == "store.compact.picked") ++picked;
    if (name != "store.compact.before_publish") return;
    ++stopped;
    while (!go_on) sched_yield();
  });
  run.Stage();
  run.Publish();
  while (stopped == 0 || picked < 4) sched_yield();
  // In a program that lets them, the others have come there too by then.
  const double end = Clock::Real()->MonotonicSeconds() + 0.2;
  while (stopped == 1 && Clock::Real()->MonotonicSeconds() < end) sched_yield();
  EXPECT_EQ(stopped, 1);
  go_on = true;
  // Each has its turn, though nobody writes.
  for (const auto& store : run.stores) {
    const double last = Clock::Real()->MonotonicSeconds() + 60;  // Of a test that fails.
    while (store->stats().compactions == 0 && Clock::Real()->MonotonicSeconds() < last) {
      sched_yield();
    }
    EXPECT_GT(store->stats().compactions, 0u);
    TERRACE_EXPECT_OK(store->background_status());
  }
  SyncPoint::Arm(nullptr);
}

// None finds room, and each has kept others from trying: they try once more each, and then rest.
TEST(StoreThreads, StoresWithoutRoomDoNotWakeEachOtherForEver) {
  static std::atomic<int> picked;
  picked = 0;
  DiskQuota quota(kQuota);
  StoresOfARun run(&quota);
  run.Stage();
  TERRACE_ASSERT_OK(quota.Reserve(quota.limit() - quota.used(), 0));
  SyncPoint::Arm([](std::string_view name) { picked += name == "store.compact.picked" ? 1 : 0; });
  run.Publish();
  while (picked < 3) sched_yield();
  const double end = Clock::Real()->MonotonicSeconds() + 0.2;
  while (Clock::Real()->MonotonicSeconds() < end) sched_yield();
  EXPECT_LT(picked, 200);
  SyncPoint::Arm(nullptr);
  for (const auto& store : run.stores) EXPECT_EQ(store->stats().compactions, 0u);
}

TEST(StoreThreads, ClosesDuringCompaction) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    MemoryFileSystem memory;
    StoreOptions options = StoreHarness::TinyOptions();
    options.background_compaction = true;
    StoreHarness harness(&memory, kQuota, options);
    TERRACE_ASSERT_OK(harness.Create());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 400)));
    TERRACE_ASSERT_OK(harness.Commit());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 10 * seed + 100)));
    harness.Abandon();
    EXPECT_EQ(harness.quota()->used(), 0u);
    TERRACE_ASSERT_OK(harness.Reopen(1));
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

}  // namespace
}  // namespace terrace
