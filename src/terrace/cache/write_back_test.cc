// WriteBack with its threads: the halves of writes overlap, and either fails.
#include "terrace/cache/write_back.h"

#include <algorithm>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/base/thread.h"
#include "terrace/cache/testing/cache_fixture.h"
#include "terrace/cache/testing/fake_store.h"

namespace terrace {
namespace {

using cache_testing::InitialRow;
using cache_testing::kRowBytes;
using cache_testing::Row;
using cache_testing::TrainedRow;

// The halves of a write overlap: what is staged while the write before it fails must not get into
// the store before that.
TEST(WriteBack, AWriteStagedBehindAFailedOneIsWrittenAgain) {
  FakeStore store(kRowBytes);
  auto made = WriteBack::Create({.row_bytes = kRowBytes, .buffer_rows = 10}, {&store});
  ASSERT_TRUE(made.ok());
  WriteBack& write_back = **made;
  const auto append = [&](Key key, const Row& row, bool stored = false) {
    WriteBack::AppendScope appends(&write_back);
    appends.Append(key, row.data(), {.stored = stored});
  };
  store.HoldPublishes();
  for (Key key = 0; key < 10; ++key) append(key, TrainedRow(key, 1));
  store.WaitForHeldPublish();
  for (Key key = 5; key < 15; ++key) append(key, TrainedRow(key, 2), key < 10);
  while (store.staged() < 2) std::this_thread::yield();
  store.FailPublishes(true);
  store.LetGo();
  EXPECT_EQ(write_back.MakeRoom(10, false).code(), StatusCode::kOk) << "one buffer is left";
  for (Key key = 20; key < 21; ++key) append(key, TrainedRow(key, 1));
  const Status failed = write_back.MakeRoom(10, false);
  EXPECT_NE(failed.message().find("publish fails"), std::string::npos) << failed.ToString();
  while (store.staged() > 0) std::this_thread::yield();  // None is left behind.
  EXPECT_EQ(store.size(), 0u);
  EXPECT_EQ(write_back.unwritten_rows(), 21u);
  // Both versions are here still, and the newer one is seen.
  Row row(kRowBytes);
  std::byte* place = row.data();
  std::uint8_t found = 0;
  const Key key = 7;
  EXPECT_EQ(write_back.Copy({&key, 1}, {&place, 1}, {&found, 1}), 1u);
  EXPECT_EQ(row, TrainedRow(7, 2));
  EXPECT_FALSE(write_back.Flush().ok());
  EXPECT_FALSE(write_back.status().ok());
  store.FailPublishes(false);
  ASSERT_TRUE(write_back.Flush().ok());
  EXPECT_TRUE(write_back.status().ok());
  for (Key k = 0; k < 15; ++k) EXPECT_EQ(store.Get(k), TrainedRow(k, k < 5 ? 1 : 2)) << k;
  EXPECT_EQ(store.write_sizes(), (std::vector<std::size_t>{10, 10, 1}));
}

// A write of ten rows is held in its second half.
class BehindOneInFlight : public testing::Test {
 protected:
  void SetUp() override {
    auto made = WriteBack::Create({.row_bytes = kRowBytes, .buffer_rows = 10}, {&store_});
    ASSERT_TRUE(made.ok());
    write_back_ = std::move(*made);
    store_.HoldPublishes();
    Append(0);
    store_.WaitForHeldPublish();
  }
  void Append(Key first) {
    WriteBack::AppendScope appends(write_back_.get());
    for (Key key = first; key < first + 10; ++key) appends.Append(key, InitialRow(key).data(), {});
  }

  FakeStore store_{kRowBytes};
  std::unique_ptr<WriteBack> write_back_;
};

// A write that finds no room beside the one before it finds some when that is part of the store_.
TEST_F(BehindOneInFlight, AWriteWithoutRoomIsTriedAgain) {
  EXPECT_FALSE(store_.keeps_checkpoints);
  store_.fails_for_room = true;
  store_.FailAt(0);
  Append(100);
  while (!store_.FaultWasHit()) std::this_thread::yield();
  EXPECT_TRUE(store_.keeps_checkpoints);
  store_.LetGo();
  ASSERT_TRUE(write_back_->Flush().ok());
  EXPECT_EQ(store_.size(), 20u);
  EXPECT_FALSE(store_.keeps_checkpoints) << "the second time it may cost one";
}

// A write that fails at its first half, while the one before it is in its second.
TEST_F(BehindOneInFlight, AWriteThatFailsLeavesThatAlone) {
  store_.FailWrites(true);
  Append(100);
  while (write_back_->status().ok()) std::this_thread::yield();
  store_.LetGo();
  while (write_back_->written_rows() < 10) std::this_thread::yield();
  EXPECT_EQ(store_.size(), 10u);
  EXPECT_FALSE(write_back_->status().ok());
  store_.FailWrites(false);
  ASSERT_TRUE(write_back_->Flush().ok());
  EXPECT_EQ(store_.size(), 20u);
}

// Whose next use is known comes first, and of those the one that is asked for sooner; of whom
// nothing is said to be known is not looked up.
TEST(WriteBack, RowsAreWrittenInTheOrderOfTheirNextUse) {
  constexpr std::uint64_t kTick = FutureKeys::kTickExamples;
  constexpr Key kRows = 3000;  // More than what is sorted by comparison, in each shard.
  auto future = FutureKeys::Create(1 << 20);
  ASSERT_TRUE(future.ok());
  std::map<std::uint64_t, std::vector<Key>> asked;
  for (Key key = 0; key < kRows / 2; ++key) asked[5 + key * 37 % 40].push_back(key);
  (*future)->SetNow(3 * kTick);
  for (const auto& [tick, keys] : asked) (*future)->Add(keys, tick * kTick);
  for (const std::size_t shards : {1, 2}) {
    std::vector<std::unique_ptr<FakeStore>> stores;
    std::vector<Store*> pointers;
    for (std::size_t s = 0; s < shards; ++s) {
      pointers.push_back(stores.emplace_back(std::make_unique<FakeStore>(kRowBytes)).get());
    }
    auto made = WriteBack::Create({.row_bytes = kRowBytes,
                                   .buffer_rows = kRows,
                                   .future = future->get(),
                                   .shards = ShardRange::All(shards)},
                                  pointers);
    ASSERT_TRUE(made.ok());
    {
      WriteBack::AppendScope appends(made->get());
      const auto append = [&](Key key, bool may_come) {
        appends.Append(key, InitialRow(key).data(), {.may_come = may_come});
      };
      append(0, false);
      append(2, true);
      // What was said last counts.
      append(0, true);
      append(2, false);
      for (Key key = kRows - 1; key > 2; --key) append(key, true);
      append(1, false);
    }
    ASSERT_TRUE((*made)->Flush().ok());
    std::size_t written = 0;
    for (const auto& store : stores) {
      const std::vector<std::vector<Key>> writes = store->write_keys();
      ASSERT_EQ(writes.size(), 1u);
      std::vector<std::uint16_t> ticks;
      for (const Key key : writes[0]) {
        const std::uint16_t known = (*future)->TicksUntilNext(MixKey(key));
        ASSERT_TRUE(key > 2 || known != FutureKeys::kNever);
        ticks.push_back(key == 1 || key == 2 ? FutureKeys::kNever : known);
        EXPECT_EQ(store->Get(key), InitialRow(key));
      }
      EXPECT_TRUE(std::is_sorted(ticks.begin(), ticks.end()));
      // Known ones, and of different ticks; the others but for those that are mistaken for them.
      EXPECT_LT(ticks[0] + 10, ticks[writes[0].size() / 2 - writes[0].size() / 10]);
      EXPECT_LT(ticks[writes[0].size() / 2 - writes[0].size() / 10], FutureKeys::kNever);
      EXPECT_EQ(ticks.back(), FutureKeys::kNever);
      written += writes[0].size();
    }
    EXPECT_EQ(written, kRows);
  }
}

TEST(WriteBack, WhatIsStagedAtTheEndIsDropped) {
  FakeStore store(kRowBytes);
  {
    auto made = WriteBack::Create({.row_bytes = kRowBytes, .buffer_rows = 10}, {&store});
    ASSERT_TRUE(made.ok());
    store.HoldPublishes();
    {
      WriteBack::AppendScope appends(made->get());
      for (Key key = 0; key < 20; ++key) appends.Append(key, InitialRow(key).data(), {});
    }
    while (store.staged() < 2) std::this_thread::yield();
    Thread release("release", ThreadPriority::kNormal, [&] { store.LetGo(); });
    made->reset();
    release.Join();
  }
  EXPECT_EQ(store.staged(), 0);
}

// Shards are written side by side; when one fails, nothing of the others stays behind.
TEST(WriteBack, OneShardOfSeveralFails) {
  for (const bool background : {false, true}) {
    std::vector<std::unique_ptr<FakeStore>> stores;
    std::vector<Store*> borrowed;
    for (int shard = 0; shard < 5; ++shard) {
      stores.push_back(std::make_unique<FakeStore>(kRowBytes));
      borrowed.push_back(stores.back().get());
    }
    auto made = WriteBack::Create({.row_bytes = kRowBytes,
                                   .buffer_rows = 200,
                                   .background = background,
                                   .shards = ShardRange::All(5)},
                                  borrowed);
    ASSERT_TRUE(made.ok());
    stores[3]->FailAt(0);
    {
      WriteBack::AppendScope appends(made->get());
      for (Key key = 0; key < 150; ++key) appends.Append(key, TrainedRow(key, 1).data(), {});
    }
    const Status failed = (*made)->Flush();
    EXPECT_NE(failed.message().find("shard 3"), std::string::npos) << failed.ToString();
    for (const auto& store : stores) {
      EXPECT_EQ(store->staged(), 0);
      EXPECT_EQ(store->size(), 0u);
    }
    ASSERT_TRUE((*made)->Flush().ok());
    std::size_t rows = 0;
    for (const auto& store : stores) rows += store->size();
    EXPECT_EQ(rows, 150u);
    for (Key key = 0; key < 150; ++key) {
      EXPECT_EQ(stores[ShardOfHash(MixKey(key), 5)]->Get(key), TrainedRow(key, 1));
    }
  }
}

// Keys of every third row are hot.
WrittenRow Third(Key key) { return {.hot = key % 3 == 0}; }

TEST(WriteBack, TellsWhereItsTimeWent) {
  for (const bool background : {true, false}) {
    FakeStore store(kRowBytes);
    const double begin = Clock::Real()->MonotonicSeconds();
    auto made = WriteBack::Create(
        {.row_bytes = kRowBytes, .buffer_rows = 1000, .background = background}, {&store});
    ASSERT_TRUE(made.ok());
    WriteBack& write_back = **made;
    for (int round = 0; round < 20; ++round) {
      {
        WriteBack::AppendScope appends(&write_back);
        for (Key key = 0; key < 100; ++key)
          appends.Append(key, InitialRow(key).data(), {.stored = round > 0});
      }
      ASSERT_TRUE(write_back.Flush().ok());
    }
    const WriteBackTimes times = write_back.times();
    const double elapsed = Clock::Real()->MonotonicSeconds() - begin;
    EXPECT_GT(times.busy_seconds, 0);
    EXPECT_GT(times.cpu_seconds, 0);
    EXPECT_EQ(times.waited_for_input_seconds > 0, background);
    EXPECT_LE(times.busy_seconds + times.waited_for_input_seconds, elapsed);
  }
}

TEST(WriteBack, HotRowsAndTheOthersHaveWritesOfTheirOwn) {
  for (const bool background : {false, true}) {
    FakeStore store(kRowBytes);
    auto made = WriteBack::Create(
        {.row_bytes = kRowBytes, .buffer_rows = 10, .background = background, .hot_apart = true},
        {&store});
    ASSERT_TRUE(made.ok());
    for (Key key = 0; key < 100; ++key) {
      ASSERT_TRUE((*made)->MakeRoom(1, false).ok());
      WriteBack::AppendScope appends(made->get());
      appends.Append(key, TrainedRow(key, 1).data(), Third(key));
    }
    ASSERT_TRUE((*made)->Flush().ok());
    EXPECT_EQ(store.size(), 100u);
    for (Key key = 0; key < 100; ++key) EXPECT_EQ(store.Get(key), TrainedRow(key, 1)) << key;
    const auto writes = store.write_keys();
    EXPECT_EQ(writes.size(), 10u) << "34 and 66: three and six full ones, and the rests in one";
    for (std::size_t write = 0; write + 1 < writes.size(); ++write) {
      for (const Key key : writes[write]) EXPECT_EQ(key % 3 == 0, writes[write][0] % 3 == 0);
    }
  }
}

// Two small files would take the place of one; what does not fit into one buffer is no small file.
TEST(WriteBack, RestsAreOneWriteWhereTheyFit) {
  const std::vector<std::pair<Key, std::vector<std::size_t>>> cases = {
      {1, {1}}, {7, {7}}, {10, {10}}, {15, {15}}, {18, {12, 6}}, {20, {13, 7}}};
  for (const auto& [rows, sizes] : cases) {
    FakeStore store(kRowBytes);
    auto made =
        WriteBack::Create({.row_bytes = kRowBytes, .buffer_rows = 15, .hot_apart = true}, {&store});
    ASSERT_TRUE(made.ok());
    std::vector<Row> read(rows, Row(kRowBytes));
    {
      WriteBack::AppendScope appends(made->get());
      for (Key key = 0; key < rows; ++key)
        appends.Append(key, TrainedRow(key, 1).data(), Third(key));
    }
    store.HoldPublishes();
    Thread flusher("flusher", ThreadPriority::kNormal, [&] { EXPECT_TRUE((*made)->Flush().ok()); });
    store.WaitForHeldPublish();
    // What was brought to the other buffer is found there.
    for (Key key = 0; key < rows; ++key) {
      std::byte* place = read[key].data();
      std::uint8_t found = 0;
      EXPECT_EQ((*made)->Copy({&key, 1}, {&place, 1}, {&found, 1}), 1u);
      EXPECT_EQ(read[key], TrainedRow(key, 1)) << key;
    }
    store.LetGo();
    flusher.Join();
    EXPECT_EQ(store.write_sizes(), sizes);
    EXPECT_EQ(store.size(), rows);
    EXPECT_EQ((*made)->unwritten_rows(), 0u);
  }
}

TEST(WriteBack, ANewerVersionOfTheOtherKindTakesTheOldersPlace) {
  FakeStore store(kRowBytes);
  auto made =
      WriteBack::Create({.row_bytes = kRowBytes, .buffer_rows = 10, .hot_apart = true}, {&store});
  ASSERT_TRUE(made.ok());
  {
    WriteBack::AppendScope appends(made->get());
    appends.Append(1, TrainedRow(1, 1).data(), {.hot = false});
    appends.Append(2, TrainedRow(2, 1).data(), {.hot = true});
    appends.Append(1, TrainedRow(1, 2).data(), {.stored = true, .hot = true});
    appends.Append(2, TrainedRow(2, 2).data(), {.stored = true, .hot = false});
  }
  EXPECT_EQ((*made)->unwritten_rows(), 2u);
  ASSERT_TRUE((*made)->Flush().ok());
  EXPECT_EQ(store.write_sizes(), (std::vector<std::size_t>{2}));
  for (const Key key : {1, 2}) EXPECT_EQ(store.Get(key), TrainedRow(key, 2));
}

// Appends as many rows as there is room for, of whatever kinds, beside failures of the store.
TEST(WriteBack, RoomIsForRowsOfAnyKind) {
  for (const bool background : {false, true}) {
    for (const std::uint32_t buffer_rows : {1, 2, 3, 10}) {
      SCOPED_TRACE(testing::Message() << "background " << background << " rows " << buffer_rows);
      FakeStore store(kRowBytes);
      auto made = WriteBack::Create({.row_bytes = kRowBytes,
                                     .buffer_rows = buffer_rows,
                                     .background = background,
                                     .hot_apart = true},
                                    {&store});
      ASSERT_TRUE(made.ok());
      WriteBack& write_back = **made;
      Rng rng(buffer_rows);
      std::map<Key, int> versions;
      for (int round = 0; round < 2000; ++round) {
        if (rng.Below(50) == 0) store.FailAt(static_cast<std::int64_t>(rng.Below(3)));
        if (rng.Below(20) == 0 || !write_back.status().ok()) {
          while (!write_back.Flush().ok()) continue;
          ASSERT_EQ(write_back.unwritten_rows(), 0u);
          for (const auto& [key, version] : versions) {
            ASSERT_EQ(store.Get(key), TrainedRow(key, version)) << key;
          }
        }
        const std::size_t wanted = 1 + rng.Below(buffer_rows);
        if (!write_back.MakeRoom(wanted, false).ok()) continue;
        const std::uint64_t hot_of = 1 + rng.Below(3);
        WriteBack::AppendScope appends(&write_back);
        const std::size_t room = appends.room();
        ASSERT_GE(room, wanted);
        for (std::size_t i = 0; i < room; ++i) {
          const Key key = rng.Below(200);
          const int version = ++versions[key];
          appends.Append(key, TrainedRow(key, version).data(),
                         {.stored = version > 1, .hot = rng.Below(hot_of) == 0});
        }
      }
      ASSERT_TRUE(write_back.Flush().ok() || write_back.Flush().ok());
      EXPECT_EQ(store.size(), versions.size());
    }
  }
}

}  // namespace
}  // namespace terrace
