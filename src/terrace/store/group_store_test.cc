// What the index by group has of its own: blocks that writes on their way have in common, blocks
// that are divided under a reader, filters, rows that may go.
#include "terrace/store/group_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "terrace/base/thread.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

constexpr std::uint64_t kQuota = std::uint64_t{1} << 30;

Result<std::unique_ptr<StagedRows>> Stage(Store* store, const std::vector<Key>& keys,
                                          std::uint64_t generation, std::uint32_t row_bytes) {
  std::vector<std::vector<std::byte>> rows;
  std::vector<const std::byte*> pointers;
  for (const Key key : keys) rows.push_back(TestRow(key, generation, row_bytes));
  for (const auto& row : rows) pointers.push_back(row.data());
  return store->Stage(keys, pointers, {});
}

// Whether every key of the range has the row of its generation (0: none).
Status CheckGenerations(Store* store, const StoreHarness& harness,
                        const std::map<Key, std::uint64_t>& generations) {
  const std::uint32_t row_bytes = harness.options()->row_bytes;
  const std::vector<Key> keys = harness.KeysFrom(0, harness.key_range);
  std::vector<std::byte> memory(keys.size() * row_bytes);
  std::vector<std::byte*> rows;
  for (std::size_t i = 0; i < keys.size(); ++i) rows.push_back(memory.data() + i * row_bytes);
  std::vector<std::uint8_t> found(keys.size());
  TERRACE_RETURN_IF_ERROR(store->Read(keys, rows, found));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto wanted = generations.find(keys[i]);
    if ((found[i] != 0) != (wanted != generations.end())) return InternalError("found or not");
    if (found[i] == 0) continue;
    const std::vector<std::byte> row = TestRow(keys[i], wanted->second, row_bytes);
    if (!std::equal(row.begin(), row.end(), rows[i])) return InternalError("another row");
  }
  return OkStatus();
}

// Halves of writes that overtake each other as two threads might have them do, over few groups, so
// that they meet in their blocks.
TEST(GroupStaged, WritesOnTheirWayMeetInTheirBlocks) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    MemoryFileSystem memory;
    StoreOptions options = StoreHarness::TinyGroupOptions();
    options.background_compaction = seed % 2 == 0;
    options.expected_rows = seed % 3 == 0 ? 0 : 300;
    if (seed % 3 == 1) options.io_buffer_bytes = 1;  // Many parts a write.
    if (seed % 4 == 0) options.group = {8 << 10, 3};
    StoreHarness harness(&memory, kQuota, options);
    TERRACE_ASSERT_OK(harness.Create());
    Store* const store = harness.store();
    Rng rng(seed);
    std::map<Key, std::uint64_t> published;
    std::deque<std::pair<std::unique_ptr<StagedRows>, std::vector<Key>>> staged;
    std::deque<std::uint64_t> generations;
    for (std::uint64_t step = 1; step <= 200; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      const std::uint64_t dice = rng.Below(10);
      if (dice < 5 && staged.size() < 4) {
        const std::vector<Key> keys = harness.RandomKeys(&rng, rng.Below(6) == 0 ? 300 : 30);
        auto rows = Stage(store, keys, step, options.row_bytes);
        TERRACE_ASSERT_OK(rows);
        staged.emplace_back(std::move(*rows), keys);
        generations.push_back(step);
      } else if (dice < 9 && !staged.empty()) {
        TERRACE_ASSERT_OK(store->Publish(std::move(staged.front().first)));
        for (const Key key : staged.front().second) published[key] = generations.front();
        staged.pop_front();
        generations.pop_front();
      } else if (dice == 9 && !staged.empty()) {
        // One is dropped: those behind it were made from its blocks, and are refused.
        const std::size_t dropped = rng.Below(staged.size());
        staged[dropped].first.reset();
        for (std::size_t i = dropped + 1; i < staged.size(); ++i) {
          EXPECT_EQ(store->Publish(std::move(staged[i].first)).code(), StatusCode::kAborted);
        }
        staged.resize(dropped);
        generations.resize(dropped);
      }
      if (step % 10 == 0) TERRACE_ASSERT_OK(CheckGenerations(store, harness, published));
      TERRACE_ASSERT_OK(store->background_status());
    }
    staged.clear();
    TERRACE_ASSERT_OK(CheckGenerations(store, harness, published));
    EXPECT_EQ(store->stats().live_rows, published.size());
    const auto manifest = store->Commit(7);
    TERRACE_ASSERT_OK(manifest);
    harness.Abandon();
    auto reopened = Store::Open(&memory, Clock::Real(), harness.quota(), options, *manifest,
                                std::vector<ManifestReference>{*manifest});
    TERRACE_ASSERT_OK(reopened);
    TERRACE_ASSERT_OK(CheckGenerations(reopened->get(), harness, published));
    EXPECT_EQ((*reopened)->stats().live_rows, published.size());
    if (HasFatalFailure()) return;
  }
}

TEST(GroupStaged, WhatIsDroppedGivesItsSpaceBack) {
  MemoryFileSystem memory;
  StoreHarness harness(&memory, kQuota, StoreHarness::TinyGroupOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 50)));
  const std::uint64_t used = harness.quota()->used();
  {
    auto staged = Stage(harness.store(), harness.KeysFrom(20, 300), 9, 300);
    TERRACE_ASSERT_OK(staged);
    EXPECT_GT(harness.quota()->used(), used);
  }
  EXPECT_EQ(harness.quota()->used(), used);
  TERRACE_ASSERT_OK(harness.CheckAll());
}

// A reader beside a writer that divides blocks all the time: a row that is there is always found,
// as it was or as it is. Then the same beside compaction, checkpoints and halves of writes.
TEST(GroupConcurrency, NoRowIsLostWhileItsBlockIsDivided) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    MemoryFileSystem memory;
    StoreOptions options = StoreHarness::TinyGroupOptions();
    options.background_compaction = true;
    options.expected_rows = 0;
    options.io_buffer_bytes = 256 << 10;
    StoreHarness harness(&memory, kQuota, options);
    TERRACE_ASSERT_OK(harness.Create());
    constexpr std::uint64_t kFirst = 200;
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kFirst)));
    TERRACE_ASSERT_OK(harness.Commit());
    // What was there before is unknown to the filters.
    TERRACE_ASSERT_OK(harness.Reopen(1));
    Store* const opened = harness.store();
    std::atomic<std::uint64_t> written{kFirst};  // All before it are published.
    std::atomic<bool> stop{false};
    Thread writer("writer", ThreadPriority::kNormal, [&] {
      Rng rng(seed);
      for (std::uint64_t next = kFirst; next < 6000;) {
        const std::uint64_t end = next + 1 + rng.Below(200);
        auto first = Stage(opened, harness.KeysFrom(next, end), 1, options.row_bytes);
        TERRACE_CHECK(first.ok());
        auto second = Stage(opened, harness.KeysFrom(next - 50, end), 2, options.row_bytes);
        TERRACE_CHECK(second.ok());
        TERRACE_CHECK(opened->Publish(std::move(*first)).ok());
        written.store(end);
        TERRACE_CHECK(opened->Publish(std::move(*second)).ok());
        next = end;
      }
      stop.store(true);
    });
    Rng rng(seed + 100);
    std::vector<std::byte> memory_of_rows(100 * options.row_bytes);
    std::uint64_t reads = 0;
    for (; !stop.load() || reads < 20; ++reads) {
      const std::uint64_t sure = written.load();
      std::set<std::uint64_t> numbers;
      while (numbers.size() < 100) numbers.insert(rng.Below(sure));
      std::vector<Key> keys;
      std::vector<std::byte*> rows;
      for (const std::uint64_t i : numbers) keys.push_back(harness.KeyAt(i));
      for (std::size_t i = 0; i < keys.size(); ++i) {
        rows.push_back(memory_of_rows.data() + i * options.row_bytes);
      }
      std::vector<std::uint8_t> found(keys.size());
      const Status status = opened->Read(keys, rows, found);
      EXPECT_TRUE(status.ok()) << status.ToString();
      for (std::size_t i = 0; i < keys.size(); ++i) {
        ASSERT_EQ(found[i], 1) << "seed " << seed << " read " << reads;
        bool known = false;
        for (const std::uint64_t generation : {1, 2}) {
          const auto row = TestRow(keys[i], generation, options.row_bytes);
          known |= std::equal(row.begin(), row.end(), rows[i]);
        }
        EXPECT_TRUE(known);
      }
    }
    writer.Join();
    EXPECT_EQ(opened->stats().live_rows, written.load());
    TERRACE_ASSERT_OK(opened->background_status());
  }
}

TEST(GroupFilter, AbsentKeysCostAReadAfterAnOpeningAndThenNone) {
  MemoryFileSystem memory;
  StoreOptions options = StoreHarness::TinyGroupOptions();
  options.expected_rows = 4000;
  StoreHarness harness(&memory, kQuota, options);
  harness.key_range = 8000;
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 2000)));
  const auto reads_of_absent = [&] {
    const std::uint64_t before = harness.store()->stats().read_requests;
    const std::uint64_t mistaken = harness.store()->stats().mistaken_reads;
    TERRACE_EXPECT_OK(harness.CheckRead(harness.KeysFrom(5000, 5400)));
    EXPECT_LE(harness.store()->stats().mistaken_reads - mistaken,
              harness.store()->stats().rows_read + 400);
    return harness.store()->stats().mistaken_reads - mistaken +
           (harness.store()->stats().read_requests == before ? 0 : 1);
  };
  EXPECT_LE(reads_of_absent(), 8u);
  TERRACE_ASSERT_OK(harness.Commit());
  TERRACE_ASSERT_OK(harness.Reopen(1));
  EXPECT_GT(reads_of_absent(), 200u);
  EXPECT_LE(reads_of_absent(), 8u);
  TERRACE_ASSERT_OK(harness.CheckAll());
}

// What a write is said to take at most it does, where each row has a block of its own and where
// all share few.
TEST(GroupStore, WritesTakeWhatIsSaid) {
  for (const std::uint64_t expected : {0u, 100u, 1000u, 100'000u}) {
    for (const std::uint64_t buffer : {1u, 8u << 20}) {
      MemoryFileSystem memory;
      StoreOptions options = StoreHarness::TinyGroupOptions();
      options.expected_rows = expected;
      options.io_buffer_bytes = buffer;
      options.background_compaction = true;
      StoreHarness harness(&memory, kQuota, options);
      TERRACE_ASSERT_OK(harness.Create());
      for (const std::uint64_t rows : {1u, 100u, 3000u, 10u, 3000u}) {
        const std::uint64_t most = harness.store()->MostWriteBytes(rows, 0, 1);
        const std::uint64_t before = harness.store()->stats().write_bytes;
        auto staged = Stage(harness.store(), harness.KeysFrom(0, rows), 1, options.row_bytes);
        TERRACE_ASSERT_OK(staged);
        TERRACE_ASSERT_OK(harness.store()->Publish(std::move(*staged)));
        EXPECT_LE(harness.store()->stats().write_bytes - before, most)
            << rows << " rows, " << expected << " expected, buffers of " << buffer;
      }
    }
  }
}

// The space for a last checkpoint is kept free by that number: a write asks for no more on its way.
TEST(GroupStore, AWriteFitsWhereWhatItTakesIsFree) {
  for (const std::uint64_t expected : {0u, 100u, 1000u, 100'000u}) {
    for (const std::uint64_t buffer : {1u, 8u << 20}) {
      for (const std::uint64_t file_bytes : {std::uint64_t{64} << 10, std::uint64_t{16} << 20}) {
        MemoryFileSystem memory;
        StoreOptions options = StoreHarness::TinyGroupOptions();
        options.expected_rows = expected;
        options.io_buffer_bytes = buffer;
        options.file_bytes = file_bytes;
        options.spare_files = 0;
        StoreHarness harness(&memory, kQuota, options);
        TERRACE_ASSERT_OK(harness.Create());
        DiskQuota* const quota = harness.quota();
        for (const std::uint64_t rows : {1u, 100u, 3000u, 10u, 3000u}) {
          TERRACE_ASSERT_OK(harness.store()->CompactNow());
          const std::uint64_t others =
              quota->limit() - quota->used() - harness.store()->MostWriteBytes(rows, 0, 1);
          TERRACE_ASSERT_OK(quota->Reserve(others, 0));
          auto staged = Stage(harness.store(), harness.KeysFrom(0, rows), 1, options.row_bytes);
          TERRACE_ASSERT_OK(staged);
          TERRACE_ASSERT_OK(harness.store()->Publish(std::move(*staged)));
          quota->Release(others);
        }
      }
    }
  }
}

// A first write meets blocks more evenly than those that go round them, and divides some: it takes
// up to a third more than was estimated.
TEST(GroupStore, WritesTakeAboutWhatIsLikely) {
  for (const std::uint64_t rows : {300u, 1000u, 3000u, 10'000u}) {
    MemoryFileSystem memory;
    StoreOptions options = StoreHarness::TinyGroupOptions();
    options.expected_rows = 10'000;
    options.io_buffer_bytes = 8 << 20;
    StoreHarness harness(&memory, kQuota, options);
    TERRACE_ASSERT_OK(harness.Create());
    EXPECT_EQ(harness.store()->LikelyWriteBytes(0), 0u);
    const auto likely = static_cast<double>(harness.store()->LikelyWriteBytes(rows));
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, rows)));
    const auto written = static_cast<double>(harness.store()->stats().write_bytes);
    EXPECT_GT(likely, written * 2 / 3) << rows << " rows";
    EXPECT_LT(likely, written * 1.1) << rows << " rows";
  }
}

// Twenty times the rows that were expected: a key still costs one block, and memory grows by what
// the blocks take.
TEST(GroupStore, MoreRowsThanExpected) {
  MemoryFileSystem memory;
  StoreOptions options = StoreHarness::TinyGroupOptions();
  options.expected_rows = 500;
  options.io_buffer_bytes = 1 << 20;
  StoreHarness harness(&memory, kQuota, options);
  TERRACE_ASSERT_OK(harness.Create());
  for (std::uint64_t begin = 0; begin < 10'000; begin += 1000) {
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(begin, begin + 1000)));
  }
  harness.key_range = 10'500;
  TERRACE_ASSERT_OK(harness.CheckAll());
  TERRACE_ASSERT_OK(harness.Commit());
  TERRACE_ASSERT_OK(harness.Reopen(1));
  TERRACE_ASSERT_OK(harness.CheckAll());
  const StoreStats before = harness.store()->stats();
  TERRACE_ASSERT_OK(harness.CheckRead({harness.KeyAt(77)}));
  const StoreStats after = harness.store()->stats();
  EXPECT_EQ(after.read_requests - before.read_requests, 1u);
  EXPECT_EQ(after.read_bytes - before.read_bytes, 4096u);
  EXPECT_EQ(after.live_bytes % 4096, 0u);
  EXPECT_LT(after.live_bytes / 4096, 10'000u / 5);  // Of 13.
}

// Rows of the keys in `gone` may go.
class ExpiryByKey final : public RowExpiry {
 public:
  std::uint64_t points() const override { return points_; }
  bool MayGo(const std::byte* row) const override {
    Key key;
    std::memcpy(&key, row, sizeof key);
    return gone.contains(key);
  }
  void Pass() { ++points_; }
  std::set<Key> gone;

 private:
  std::uint64_t points_ = 0;
};

Status WriteKeyed(Store* store, const std::vector<Key>& keys, std::uint32_t row_bytes) {
  std::vector<std::vector<std::byte>> rows(keys.size(), std::vector<std::byte>(row_bytes));
  std::vector<const std::byte*> pointers;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(rows[i].data(), &keys[i], sizeof(Key));
    pointers.push_back(rows[i].data());
  }
  return store->Write(keys, pointers, std::vector<std::uint8_t>(keys.size(), 1));
}

std::set<Key> AllKeys(Store* store) {
  std::set<Key> keys;
  TERRACE_EXPECT_OK(store->ForEachRow(1 << 20, [&](const RowView& row) {
    keys.insert(row.key);
    return OkStatus();
  }));
  return keys;
}

// A store for 3,000 rows, of which those that the test names may go.
class GroupExpiry : public ::testing::Test {
 protected:
  void SetUp() override {
    TERRACE_ASSERT_OK(harness.Create());
    store = harness.store();
  }

  MemoryFileSystem memory;
  ExpiryByKey expiry;
  const StoreOptions options = OptionsWith(&expiry);
  StoreHarness harness{&memory, kQuota, options};
  Store* store = nullptr;

 private:
  static StoreOptions OptionsWith(const RowExpiry* expiry) {
    StoreOptions options = StoreHarness::TinyGroupOptions();
    options.expected_rows = 3000;
    options.expiry = expiry;
    return options;
  }
};

TEST_F(GroupExpiry, RowsThatMayGoGoWithTheWritesThatFollow) {
  const std::vector<Key> keys = harness.KeysFrom(0, 3000);
  TERRACE_ASSERT_OK(WriteKeyed(store, keys, options.row_bytes));
  std::set<Key> left(keys.begin(), keys.end());
  for (std::size_t i = 0; i < keys.size(); i += 2) {
    expiry.gone.insert(keys[i]);
    left.erase(keys[i]);
  }
  // Without a point nothing is looked for, but what is written is written without them.
  TERRACE_ASSERT_OK(WriteKeyed(store, {keys[1]}, options.row_bytes));
  const std::uint64_t first = store->stats().rows_expired;
  EXPECT_GT(first, 0u);
  EXPECT_LE(first, 13u);
  expiry.Pass();
  store->WantSweep();
  for (int i = 0; i < 100 && store->stats().live_rows > left.size(); ++i) {
    TERRACE_ASSERT_OK(WriteKeyed(store, {keys[1]}, options.row_bytes));
  }
  EXPECT_EQ(store->stats().live_rows, left.size());
  EXPECT_EQ(store->stats().rows_expired, keys.size() - left.size());
  EXPECT_EQ(AllKeys(store), left);
  TERRACE_ASSERT_OK(store->Commit(1));
  // All but one go, and their blocks with them.
  expiry.gone.insert(keys.begin(), keys.end());
  expiry.gone.erase(keys[1]);
  expiry.Pass();
  TERRACE_ASSERT_OK(store->CompactNow());
  EXPECT_EQ(AllKeys(store), std::set<Key>{keys[1]});
  TERRACE_ASSERT_OK(store->Drop(1));
  const auto manifest = store->Commit(2);
  TERRACE_ASSERT_OK(manifest);
  TERRACE_ASSERT_OK(store->CompactNow());
  EXPECT_EQ(store->stats().live_rows, 1u);
  EXPECT_EQ(store->stats().live_bytes, 4096u);
  // They stay gone, and may come anew.
  harness.Abandon();
  expiry.gone.clear();
  auto reopened = Store::Open(&memory, Clock::Real(), harness.quota(), options, *manifest,
                              std::vector<ManifestReference>{*manifest});
  TERRACE_ASSERT_OK(reopened);
  EXPECT_EQ(AllKeys(reopened->get()), std::set<Key>{keys[1]});
  TERRACE_ASSERT_OK(WriteKeyed(reopened->get(), keys, options.row_bytes));
  EXPECT_EQ(AllKeys(reopened->get()), std::set<Key>(keys.begin(), keys.end()));
}

// The blocks of a sweep come after those of the write that takes it along, in an order of their
// own: the next write, staged before they are published, has to find both.
TEST_F(GroupExpiry, WritesStagedBehindASweepAreMadeFromIt) {
  std::vector<Key> keys = harness.KeysFrom(0, 3000);
  std::sort(keys.begin(), keys.end(), [](Key a, Key b) { return MixKey(a) < MixKey(b); });
  TERRACE_ASSERT_OK(WriteKeyed(store, keys, options.row_bytes));
  expiry.gone = {keys[0], keys[1]};
  expiry.Pass();
  // Two neighbours of the last block, each in a write of its own, while the first block is swept.
  std::vector<std::vector<std::byte>> rows;
  std::vector<std::unique_ptr<StagedRows>> staged;
  for (std::size_t i = 1; i <= 2; ++i) {
    const Key key = keys[keys.size() - i];
    rows.emplace_back(options.row_bytes, static_cast<std::byte>(i));
    std::memcpy(rows.back().data(), &key, sizeof key);
    const std::byte* row = rows.back().data();
    auto write = store->Stage({&key, 1}, {&row, 1}, {});
    TERRACE_ASSERT_OK(write);
    staged.push_back(std::move(write).value());
  }
  for (auto& write : staged) TERRACE_ASSERT_OK(store->Publish(std::move(write)));
  for (std::size_t i = 1; i <= 2; ++i) {
    const Key key = keys[keys.size() - i];
    std::vector<std::byte> row(options.row_bytes);
    std::byte* const at = row.data();
    std::uint8_t found = 0;
    TERRACE_ASSERT_OK(store->Read({&key, 1}, {&at, 1}, {&found, 1}));
    EXPECT_EQ(found, 1);
    EXPECT_TRUE(row == rows[i - 1]) << "write " << i << " was lost";
  }
  EXPECT_FALSE(AllKeys(store).contains(keys[0]));
}

// A write that finds no room is staged again and again: the sweep that went along with it goes back
// to where that began, not to the first group.
TEST_F(GroupExpiry, ASweepGoesOnThoughWritesAreDropped) {
  std::vector<Key> keys = harness.KeysFrom(0, 3000);
  std::sort(keys.begin(), keys.end(), [](Key a, Key b) { return MixKey(a) < MixKey(b); });
  TERRACE_ASSERT_OK(WriteKeyed(store, keys, options.row_bytes));
  expiry.gone.insert(keys.begin() + 1, keys.end());
  const auto writes_of_a_sweep = [&](bool drops) {
    expiry.Pass();
    int writes = 0;
    const std::uint64_t expired = store->stats().rows_expired;
    while (store->stats().rows_expired - expired < keys.size() - 1 && writes < 1000) {
      if (drops) {
        std::vector<std::byte> row(options.row_bytes);
        const std::byte* const at = row.data();
        const auto dropped = store->Stage({keys.data(), 1}, {&at, 1}, {});
        TERRACE_EXPECT_OK(dropped);
      }
      TERRACE_EXPECT_OK(WriteKeyed(store, {keys[0]}, options.row_bytes));
      ++writes;
    }
    return writes;
  };
  const int alone = writes_of_a_sweep(/*drops=*/false);
  EXPECT_GT(alone, 1);
  const auto gone = std::exchange(expiry.gone, {});
  TERRACE_ASSERT_OK(WriteKeyed(store, keys, options.row_bytes));
  expiry.gone = gone;
  EXPECT_LE(writes_of_a_sweep(/*drops=*/true), alone + 1);
  EXPECT_EQ(AllKeys(store), std::set<Key>{keys[0]});
}

// To write that a block is empty takes space before it gives any: it waits for such as no
// checkpoint needs.
TEST_F(GroupExpiry, EmptyBlocksTakeNothingOfWhatStaysFree) {
  DiskQuota* const quota = harness.quota();
  std::vector<Key> keys = harness.KeysFrom(0, 3000);
  std::sort(keys.begin(), keys.end(), [](Key a, Key b) { return MixKey(a) < MixKey(b); });
  TERRACE_ASSERT_OK(WriteKeyed(store, keys, options.row_bytes));
  const std::uint64_t of_all = store->stats().live_bytes;
  // The sweep that goes along with one write leaves half of the blocks empty.
  const std::vector<Key> stay(keys.begin(), keys.begin() + 1500);
  expiry.gone.insert(keys.begin() + 1500, keys.end());
  expiry.Pass();
  TERRACE_ASSERT_OK(WriteKeyed(store, stay, options.row_bytes));
  ASSERT_EQ(store->stats().live_rows, stay.size());
  TERRACE_ASSERT_OK(store->Commit(1));  // Compaction frees nothing.
  for (const bool open : {true, false}) {
    // Room for one row, and for less than the empty blocks.
    const std::uint64_t most = store->MostWriteBytes(1, 0, 1);
    store->SetKeepFree(open ? most : 0);
    if (open) store->OpenReserve();
    const std::uint64_t others = quota->limit() - quota->used() - most;
    TERRACE_ASSERT_OK(quota->Reserve(others, 0));
    const std::uint64_t before = store->stats().write_bytes;
    TERRACE_ASSERT_OK(WriteKeyed(store, {stay[0]}, options.row_bytes));
    EXPECT_LE(store->stats().write_bytes - before, most);
    quota->Release(others);
  }
  store->SetKeepFree(0);
  TERRACE_ASSERT_OK(store->Drop(1));
  for (int i = 0; i < 100; ++i) {
    TERRACE_ASSERT_OK(WriteKeyed(store, {stay[0]}, options.row_bytes));
  }
  TERRACE_ASSERT_OK(store->Commit(2));
  TERRACE_ASSERT_OK(store->CompactNow());
  EXPECT_EQ(AllKeys(store), std::set<Key>(stay.begin(), stay.end()));
  EXPECT_LE(store->stats().live_bytes, of_all * 6 / 10);
}

// What a write is worth is counted alike by either index; what it costs in bytes differs.
TEST(GroupStore, BytesThatWereToBeWrittenAreThoseByKey) {
  for (const IndexKind index : {IndexKind::kKey, IndexKind::kGroup}) {
    MemoryFileSystem memory;
    StoreOptions options =
        index == IndexKind::kKey ? StoreHarness::TinyOptions() : StoreHarness::TinyGroupOptions();
    options.file_bytes = 1 << 20;
    options.expected_rows = 4000;
    StoreHarness harness(&memory, kQuota, options);
    harness.key_range = 4000;
    TERRACE_ASSERT_OK(harness.Create());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 4000)));
    const StoreStats loaded = harness.store()->stats();
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 100)));
    const StoreStats stats = harness.store()->stats();
    const std::uint64_t record_bytes =
        kRecordHeadBytes + (options.row_bytes + 7) / 8 * 8 + kKeyEntryBytes;
    EXPECT_EQ(stats.rows_written, 4100u);
    EXPECT_EQ(stats.wanted_bytes, 4100 * record_bytes);
    EXPECT_GE(loaded.write_bytes, loaded.wanted_bytes);
    const double amplification = static_cast<double>(stats.write_bytes - loaded.write_bytes) /
                                 static_cast<double>(stats.wanted_bytes - loaded.wanted_bytes);
    if (index == IndexKind::kKey) {
      EXPECT_LT(amplification, 4);  // A small file's blocks.
    } else {
      EXPECT_GT(amplification, 9) << "blocks of 4 KiB for a row or two each";
      EXPECT_LT(amplification, 12) << "and one file of them, in however many parts it was made";
    }
  }
}

// Blocks are read while those before them are on their way to the disk.
TEST(GroupStore, AReadThatFailsInTheMiddleOfAWriteChangesNothing) {
  for (const bool background : {false, true}) {
    MemoryFileSystem memory;
    FaultyFileSystem fs(&memory, {});
    StoreOptions options = StoreHarness::TinyGroupOptions();
    options.expected_rows = 1000;
    options.background_compaction = background;
    StoreHarness harness(&fs, kQuota, options);
    TERRACE_ASSERT_OK(harness.Create());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 1000)));
    TERRACE_ASSERT_OK(harness.Commit());
    FaultRule rule;
    rule.operation = FileOperation::kRead;
    bool failed = true;
    int failures = 0;
    for (rule.nth = 1; failed; ++rule.nth) {
      SCOPED_TRACE("read " + std::to_string(rule.nth));
      // Of compaction's reads the first to fail would end the background's work.
      TERRACE_ASSERT_OK(harness.store()->CompactNow());
      fs.SetRules({rule});
      auto staged = Stage(harness.store(), harness.KeysFrom(0, 1000), rule.nth, options.row_bytes);
      failed = !staged.ok();
      failures += failed ? 1 : 0;
      if (failed) {
        EXPECT_EQ(staged.status().code(), StatusCode::kIo);
      }
      fs.SetRules({});
      staged = Status(AbortedError("not to be published"));
      TERRACE_ASSERT_OK(harness.CheckRead(harness.KeysFrom(0, 1000)));
      EXPECT_EQ(harness.quota()->used(), harness.store()->stats().disk_bytes);
    }
    EXPECT_GT(failures, 5) << "a write of many parts";
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 1000)));
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

TEST(GroupStore, IsOpenedAsWhatItWasMade) {
  MemoryFileSystem memory;
  StoreHarness harness(&memory, kQuota, StoreHarness::TinyGroupOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 300)));
  TERRACE_ASSERT_OK(harness.Commit());
  const ManifestReference reference = harness.manifests().at(1);
  for (const bool read_only : {true, false}) {
    harness.Abandon();
    StoreOptions options = *harness.options();
    options.index = IndexKind::kKey;
    options.expected_rows = 7;
    options.read_only = read_only;
    DiskQuota quota(kQuota);
    auto store = Store::Open(&memory, Clock::Real(), read_only ? nullptr : &quota, options,
                             reference, {&reference, 1});
    TERRACE_ASSERT_OK(store);
    EXPECT_EQ(AllKeys(store->get()).size(), 300u);
  }
  // Rows of another length are not its own.
  StoreOptions options = *harness.options();
  options.read_only = true;
  options.row_bytes = 600;
  EXPECT_EQ(Store::Open(&memory, Clock::Real(), nullptr, options, reference, {}).status().code(),
            StatusCode::kInvalidArgument);
  options.row_bytes = 70'000;
  EXPECT_EQ(Store::Open(&memory, Clock::Real(), nullptr, options, reference, {}).status().code(),
            StatusCode::kInvalidArgument);
  options.read_only = false;
  options.index = IndexKind::kGroup;
  options.directory = "/elsewhere";
  DiskQuota quota(kQuota);
  const Status refused = Store::Create(&memory, Clock::Real(), &quota, options).status();
  EXPECT_NE(refused.message().find("choose index: key"), std::string::npos) << refused.ToString();
}

}  // namespace
}  // namespace terrace
