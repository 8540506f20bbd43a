// The hazards of a cache between a trainer and its stores, each a test of its name, and faults.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include "terrace/base/sync_point.h"
#include "terrace/base/testing/sweep.h"
#include "terrace/base/thread.h"
#include "terrace/cache/row_cache.h"
#include "terrace/cache/testing/cache_fixture.h"
#include "terrace/cache/write_back.h"

namespace terrace::cache_testing {
namespace {

class Hazard : public OverPolicies {};
INSTANTIATE_TEST_SUITE_P(Policies, Hazard, kPolicies);
class Reservation : public OverPolicies {};
INSTANTIATE_TEST_SUITE_P(Policies, Reservation, kPolicies);
class Capacity : public OverPolicies {};
INSTANTIATE_TEST_SUITE_P(Policies, Capacity, kPolicies);
class Faults : public OverPolicies {};
INSTANTIATE_TEST_SUITE_P(Policies, Faults, kPolicies);
class Concurrency : public OverPolicies {};
INSTANTIATE_TEST_SUITE_P(Policies, Concurrency, kPolicies);
class SyncPoints : public OverPolicies {};
INSTANTIATE_TEST_SUITE_P(Policies, SyncPoints, kPolicies);
class Policy : public OverPolicies {};
INSTANTIATE_TEST_SUITE_P(Policies, Policy, kPolicies);

TEST_P(Hazard, RowPulledWhileItsWriteBackIsInFlight) {
  Fixture fixture(GetParam(), kSmall, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  FakeStore& store = *fixture.stores[0];
  const std::size_t all = cache.MaxPinnedRows();
  TrainRange(&cache, 0, all);
  store.HoldWrites();
  // Evicts part of the trained rows, until a buffer is on its way. The rest of the buffers must
  // have room for what goes on.
  Key next = 1'000'000;
  while (cache.stats().evictions < 100) {
    PinOrDie(&cache, KeyRange(next, 10));  // Never trained: they go again.
    TrainRange(&cache, next, 10);
    next += 10;
  }
  store.WaitForHeldWrite();
  EXPECT_EQ(store.size(), 0u);
  const RowCacheStats before = cache.stats();
  // The oldest trained rows are those in flight; none may come from the store, which lacks them.
  PinnedRows again = PinOrDie(&cache, KeyRange(0, 40));
  for (std::size_t w = 0; w < again.size(); ++w) ASSERT_EQ(RowAt(again, w), TrainedRow(w, 1)) << w;
  EXPECT_EQ(cache.stats().hits - before.hits, 40u);
  EXPECT_EQ(cache.stats().misses, before.misses);
  TrainAll(&again);
  again.Release();
  store.LetGo();
  ASSERT_TRUE(cache.FlushDirty().ok());
  for (Key key = 0; key < all; ++key) {
    ASSERT_EQ(fixture.Stored(key), TrainedRow(key, key < 40 ? 2 : 1)) << key;
  }
}

TEST_P(Hazard, NewerVersionIsEvictedWhileTheOlderIsInFlight) {
  Fixture fixture(GetParam(), kSmall, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  FakeStore& store = *fixture.stores[0];
  store.HoldWrites();
  std::atomic<bool> done{false};
  const std::size_t all = cache.MaxPinnedRows();
  Thread trainer("trainer", ThreadPriority::kNormal, [&] {
    for (int round = 0; round < 4; ++round) {
      TrainRange(&cache, 0, all / 2);
      TrainRange(&cache, 1'000'000, all);
    }
    done = true;
  });
  store.WaitForHeldWrite();
  EXPECT_FALSE(done) << "the write buffers are full, so it must wait";
  store.LetGo();
  trainer.Join();
  ASSERT_TRUE(cache.FlushDirty().ok());
  for (Key key = 0; key < all / 2; ++key) ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 4));
}

TEST(LfuHazard, TwoVersionsOfARowAreOnTheirWayAndTheNewerOneIsSeen) {
  Fixture fixture(kSmall, /*background=*/true);
  fixture.options.eviction = {
      .type = EvictionType::kLruLfu,
      .lru_share = 0};  // The least frequent row goes first, whatever was seen last.
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  const std::size_t all = cache.MaxPinnedRows();
  TrainRange(&cache, 0, all);
  PinOrDie(&cache, KeyRange(10, all - 10));  // Rows 0 to 9 are the least frequent now.
  fixture.stores[0]->HoldWrites();
  PinnedRows others = PinOrDie(&cache, KeyRange(1'000'000, 110));
  fixture.stores[0]->WaitForHeldWrite();
  TrainRange(&cache, 0, 10);
  PinnedRows more = PinOrDie(&cache, KeyRange(2'000'000, 10));  // In the place of rows 0 to 9.
  const auto expect_newer = [&](const char* when) {
    const std::vector<Key> keys = KeyRange(0, 10);
    std::vector<Row> rows(10, Row(kRowBytes));
    std::vector<std::byte*> places;
    for (Row& row : rows) places.push_back(row.data());
    std::vector<std::uint8_t> found(10);
    ASSERT_TRUE(cache.Peek(keys, places, found).ok());
    for (Key key = 0; key < 10; ++key) ASSERT_EQ(rows[key], TrainedRow(key, 2)) << when;
  };
  EXPECT_EQ(fixture.stores[0]->size(), 0u);
  expect_newer("both are in write buffers");
  fixture.stores[0]->LetGo();
  while (cache.stats().written_back == 0) std::this_thread::yield();
  for (Key key = 0; key < 10; ++key) {
    ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 1)) << "the test is about this moment";
  }
  expect_newer("the older is in the store");
  ASSERT_TRUE(cache.FlushDirty().ok());
  for (Key key = 0; key < 10; ++key) ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 2));
}

// A flush would submit a half-full buffer between an eviction's look at the room and its copies.
TEST(WriteBackHazard, AFlushTakesNoRoomFromUnderAnEviction) {
  FakeStore store(kRowBytes);
  auto made = WriteBack::Create({.row_bytes = kRowBytes, .buffer_rows = 10}, {&store});
  ASSERT_TRUE(made.ok());
  WriteBack& write_back = **made;
  const Row row = InitialRow(1);
  store.HoldWrites();
  {
    WriteBack::AppendScope appends(&write_back);
    for (Key key = 0; key < 23; ++key) appends.Append(key, row.data(), {});
  }
  store.WaitForHeldWrite();  // One buffer is in flight, one waits, the last holds three rows.
  std::atomic<bool> started{false};
  Status flushed;
  Thread flusher;
  {
    WriteBack::AppendScope appends(&write_back);
    ASSERT_EQ(appends.room(), 7u);
    flusher = Thread("flusher", ThreadPriority::kNormal, [&] {
      started = true;
      flushed = write_back.Flush();
    });
    while (!started) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();  // It gets as far as it can.
    for (Key key = 23; key < 30; ++key) appends.Append(key, row.data(), {});
  }
  store.LetGo();
  flusher.Join();
  EXPECT_TRUE(flushed.ok());
  EXPECT_EQ(store.size(), 30u);
}

TEST_P(Hazard, FlushBesideEvictions) {
  for (const bool background : {false, true}) {
    Fixture fixture(GetParam(), kSmall, background);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    const std::size_t all = cache.MaxPinnedRows();
    constexpr int kRounds = 40;
    for (int round = 0; round < kRounds; ++round) {
      TrainRange(&cache, 0, all);
      std::atomic<bool> done{false};
      Thread puller("puller", ThreadPriority::kNormal, [&] {
        // Held, so that each takes the place of a trained row.
        std::vector<PinnedRows> held;
        for (Key next = 1'000'000; held.size() < 30; next += 31) {
          held.push_back(PinOrDie(&cache, KeyRange(next, 31)));
        }
        done = true;
      });
      while (!done) {
        const Status flushed = cache.FlushDirty();
        EXPECT_TRUE(flushed.ok()) << flushed.ToString();
      }
      puller.Join();
    }
    ASSERT_TRUE(cache.FlushDirty().ok());
    for (Key key = 0; key < all; ++key) ASSERT_EQ(fixture.Stored(key), TrainedRow(key, kRounds));
  }
}

TEST_P(Hazard, TrainedInABatchWhilePinnedByTheNext) {
  for (const bool background : {false, true}) {
    Fixture fixture(GetParam(), kSmall, background);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    PinnedRows batch = PinOrDie(&cache, KeyRange(0, 100));
    PinnedRows next = PinOrDie(&cache, KeyRange(50, 100));
    TrainAll(&batch);
    for (std::size_t w = 0; w < 50; ++w) {
      EXPECT_EQ(next.row(w), batch.row(w + 50)) << "one row has one place";
    }
    batch.Release();
    for (std::size_t w = 0; w < 50; ++w) ASSERT_EQ(RowAt(next, w), TrainedRow(50 + w, 1));
    TrainAll(&next);
    next.Release();
    // Through the store and back.
    TrainRange(&cache, 1'000'000, cache.MaxPinnedRows());
    PinnedRows again = PinOrDie(&cache, KeyRange(0, 150));
    for (std::size_t w = 0; w < 150; ++w) {
      ASSERT_EQ(RowAt(again, w), TrainedRow(w, w >= 50 && w < 100 ? 2 : 1)) << w;
    }
  }
}

TEST_P(Hazard, CreatedAheadThenCut) {
  Fixture fixture(GetParam(), kSmall, /*background=*/false);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  PinnedRows batch = PinOrDie(&cache, KeyRange(0, 100));
  PinnedRows ahead = PinOrDie(&cache, KeyRange(50, 100));
  for (const std::size_t w : {0, 1, 2, 3, 4, 60}) Train(batch.row(w));
  batch.MarkDirty(0, 5);
  batch.MarkDirty(60, 61);
  EXPECT_EQ(cache.stats().created, 150u);
  // A checkpoint here holds what was trained, and nothing that was only created.
  ASSERT_TRUE(cache.FlushDirty().ok());
  EXPECT_EQ(fixture.stores[0]->size(), 6u);
  std::vector<Row> rows(2, Row(kRowBytes));
  const std::vector<std::byte*> places = {rows[0].data(), rows[1].data()};
  std::vector<std::uint8_t> found(2);
  const std::vector<Key> keys = {60, 61};
  ASSERT_TRUE(cache.Peek(keys, places, found).ok());
  EXPECT_EQ(found[0], 1);
  EXPECT_EQ(found[1], 0);
  EXPECT_EQ(rows[0], TrainedRow(60, 1));
  batch.Release();
  EXPECT_EQ(cache.stats().rows, 105u) << "those that the next batch holds, and the trained ones";
  ahead.Release();
  EXPECT_EQ(cache.stats().rows, 6u);
  ASSERT_TRUE(cache.FlushDirty().ok());
  EXPECT_EQ(fixture.stores[0]->size(), 6u);
  // Pinned again, they start as they did.
  PinnedRows again = PinOrDie(&cache, KeyRange(50, 100));
  for (std::size_t w = 0; w < 100; ++w) {
    ASSERT_EQ(RowAt(again, w), TrainedRow(50 + w, w == 10 ? 1 : 0));
  }
}

// Over stores of blocks a flush comes in the order of hashes, and nothing comes between its rows: a
// Pin for which clean rows are too few waits for it to make more of them so, or for an abort.
TEST_P(Hazard, EvictionBesideAFlushOfBlocks) {
  for (const bool abort : {false, true}) {
    Fixture fixture(GetParam(), kSmall, /*background=*/true);
    fixture.SetGroups(100);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    FakeStore& store = *fixture.stores[0];
    const std::size_t all = cache.MaxPinnedRows();
    TrainRange(&cache, 0, all);
    store.HoldWrites();
    Status flushed, pinned;
    Thread flush("flush", ThreadPriority::kNormal, [&] { flushed = cache.FlushDirty(); });
    store.WaitForHeldWrite();
    std::vector<Key> keys = KeyRange(1'000'000, all / 2);
    keys.push_back(0);  // Is there, and pinned before others are evicted.
    Thread pin("pin", ThreadPriority::kNormal, [&] { pinned = cache.Pin(keys).status(); });
    while (cache.stats().pinned_rows == 0) std::this_thread::yield();
    if (abort) {
      cache.Abort(AbortedError("the test ends it"));
      pin.Join();
      EXPECT_EQ(pinned.code(), StatusCode::kAborted);
    }
    store.LetGo();
    flush.Join();
    if (!abort) pin.Join();
    ASSERT_TRUE(flushed.ok()) << flushed.ToString();
    ASSERT_EQ(pinned.ok(), !abort) << pinned.ToString();
    std::vector<std::uint64_t> hashes;
    for (const std::vector<Key>& written : store.write_keys()) {
      for (const Key key : written) hashes.push_back(MixKey(key));
    }
    EXPECT_EQ(hashes.size(), all);
    EXPECT_TRUE(std::is_sorted(hashes.begin(), hashes.end()));
    EXPECT_GT(store.write_keys().size(), 2u);
  }
}

// A Pin that finds enough clean rows to evict does not wait for a flush beside it, and takes no
// others.
TEST_P(Hazard, EvictionOfCleanRowsBesideAFlushOfBlocks) {
  Fixture fixture(GetParam(), kSmall, /*background=*/true);
  fixture.SetGroups(100);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  FakeStore& store = *fixture.stores[0];
  const std::size_t all = cache.MaxPinnedRows();
  TrainRange(&cache, 0, all);
  ASSERT_TRUE(cache.FlushDirty().ok());
  TrainRange(&cache, 0, all / 2);
  store.HoldWrites();
  Status flushed;
  Thread flush("flush", ThreadPriority::kNormal, [&] { flushed = cache.FlushDirty(); });
  store.WaitForHeldWrite();
  for (Key next = 1'000'000; next < 1'000'000 + all / 4; next += 10) {
    PinnedRows pinned = PinOrDie(&cache, KeyRange(next, 10));
    TrainAll(&pinned);
  }
  const std::size_t written = store.write_keys().size();
  store.LetGo();
  flush.Join();
  ASSERT_TRUE(flushed.ok()) << flushed.ToString();
  std::vector<std::uint64_t> hashes;
  const std::vector<std::vector<Key>> writes = store.write_keys();
  for (std::size_t w = written; w < writes.size(); ++w) {
    for (const Key key : writes[w]) hashes.push_back(MixKey(key));
  }
  EXPECT_TRUE(std::is_sorted(hashes.begin(), hashes.end()));
  for (Key key = 0; key < all / 2; ++key) {
    ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 2)) << key;
  }
}

TEST_P(Hazard, RePulledAfterAFailedFlush) {
  for (const bool background : {false, true}) {
    Fixture fixture(GetParam(), kSmall, background);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    const std::size_t all = cache.MaxPinnedRows();
    TrainRange(&cache, 0, all);
    fixture.stores[0]->FailWrites(true);
    EXPECT_EQ(cache.FlushDirty().code(), StatusCode::kIo);
    EXPECT_EQ(cache.background_status().code(), StatusCode::kIo);
    EXPECT_EQ(cache.stats().dirty_rows, all);
    EXPECT_GE(cache.dirty_bytes(), all * kRowBytes);
    EXPECT_EQ(cache.Pin(KeyRange(0, 10)).status().code(), StatusCode::kIo);
    EXPECT_EQ(cache.FlushDirty().code(), StatusCode::kIo) << "it is tried again";
    fixture.stores[0]->FailWrites(false);
    ASSERT_TRUE(cache.FlushDirty().ok());
    EXPECT_TRUE(cache.background_status().ok());
    EXPECT_EQ(cache.stats().dirty_rows, 0u);
    PinnedRows again = PinOrDie(&cache, KeyRange(0, all));
    for (std::size_t w = 0; w < all; ++w) ASSERT_EQ(RowAt(again, w), TrainedRow(w, 1));
    TrainAll(&again);
    again.Release();
    ASSERT_TRUE(cache.FlushDirty().ok());
    for (Key key = 0; key < all; ++key) ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 2));
  }
}

TEST_P(Hazard, EvictedAfterAFailedFlushIsServedFromTheWriteBuffer) {
  Fixture fixture(GetParam(), kSmall, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  const std::size_t all = cache.MaxPinnedRows();
  TrainRange(&cache, 0, all);
  fixture.stores[0]->FailWrites(true);
  Status failed;
  for (Key next = 1'000'000; failed.ok(); next += 10) {
    auto pinned = cache.Pin(KeyRange(next, 10));
    if (pinned.ok()) {
      TrainAll(&*pinned);
    } else {
      failed = pinned.status();
    }
  }
  EXPECT_EQ(failed.code(), StatusCode::kIo);
  EXPECT_EQ(cache.stats().pinned_rows, 0u);
  // The trained rows are all still readable, though no store has them.
  const std::vector<Key> keys = KeyRange(0, all);
  std::vector<Row> rows(all, Row(kRowBytes));
  std::vector<std::byte*> places;
  for (Row& row : rows) places.push_back(row.data());
  std::vector<std::uint8_t> found(all);
  ASSERT_TRUE(cache.Peek(keys, places, found).ok());
  for (Key key = 0; key < all; ++key) {
    ASSERT_EQ(found[key], 1) << key;
    ASSERT_EQ(rows[key], TrainedRow(key, 1)) << key;
  }
  fixture.stores[0]->FailWrites(false);
  ASSERT_TRUE(cache.FlushDirty().ok());
  for (Key key = 0; key < all; ++key) ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 1));
}

TEST_P(Reservation, WaitsForEarlierSetsWithNothingPinnedAndAFlushGoesOn) {
  for (const bool background : {false, true}) {
    Fixture fixture(GetParam(), kSmall, background);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    const std::size_t all = cache.MaxPinnedRows();
    PinnedRows first = PinOrDie(&cache, KeyRange(0, all - 100));
    PinnedRows second = PinOrDie(&cache, KeyRange(0, all - 50));  // Mostly the same rows.
    TrainAll(&second);
    std::atomic<bool> pinned{false};
    Thread puller("puller", ThreadPriority::kNormal, [&] {
      PinnedRows third = PinOrDie(&cache, KeyRange(500'000, 300));
      pinned = true;
      EXPECT_LE(cache.stats().pinned_rows, all);
    });
    while (cache.stats().reserve_waits == 0) std::this_thread::yield();
    EXPECT_EQ(cache.stats().pinned_rows, all - 50) << "nothing is pinned while it waits";
    ASSERT_TRUE(cache.FlushDirty().ok());
    EXPECT_EQ(fixture.stores[0]->size(), all - 50);
    first.Release();
    EXPECT_FALSE(pinned) << "the second set holds nearly everything still";
    second.Release();
    puller.Join();
    EXPECT_TRUE(pinned);
    EXPECT_EQ(cache.stats().reserve_waits, 1u);
  }
}

TEST_P(Reservation, TooLargeASetIsRefusedAtOnce) {
  Fixture fixture(GetParam(), kSmall, /*background=*/false);
  ASSERT_TRUE(fixture.Open().ok());
  PinnedRows held = PinOrDie(fixture.cache.get(), KeyRange(0, 10));
  const auto refused = fixture.cache->Pin(KeyRange(0, fixture.cache->MaxPinnedRows() + 1));
  EXPECT_EQ(refused.status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(fixture.cache->stats().pinned_rows, 10u);
}

TEST_P(Reservation, AbortEndsTheWait) {
  Fixture fixture(GetParam(), kSmall, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  PinnedRows first = PinOrDie(&cache, KeyRange(0, cache.MaxPinnedRows()));
  TrainAll(&first);
  Status ended;
  Thread puller("puller", ThreadPriority::kNormal,
                [&] { ended = cache.Pin(KeyRange(500'000, 300)).status(); });
  while (cache.stats().reserve_waits == 0) std::this_thread::yield();
  cache.Abort(AbortedError("the test stops"));
  puller.Join();
  EXPECT_EQ(ended.code(), StatusCode::kAborted);
  EXPECT_EQ(cache.Pin(KeyRange(0, 1)).status().code(), StatusCode::kAborted);
  const std::size_t trained = first.size();
  first.Release();
  ASSERT_TRUE(cache.FlushDirty().ok()) << "an interrupted run makes its checkpoint";
  EXPECT_EQ(fixture.stores[0]->size(), trained);
}

TEST_P(Reservation, AbortEndsTheWaitForWriteBuffers) {
  Fixture fixture(GetParam(), kSmall, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  const std::size_t all = cache.MaxPinnedRows();
  TrainRange(&cache, 0, all);
  fixture.stores[0]->HoldWrites();
  Status ended;
  Thread puller("puller", ThreadPriority::kNormal,
                [&] { ended = cache.Pin(KeyRange(500'000, all)).status(); });
  fixture.stores[0]->WaitForHeldWrite();
  cache.Abort(AbortedError("the test stops"));
  puller.Join();
  EXPECT_EQ(ended.code(), StatusCode::kAborted);
  EXPECT_EQ(cache.stats().pinned_rows, 0u);
  fixture.stores[0]->LetGo();
  ASSERT_TRUE(cache.FlushDirty().ok());
  for (Key key = 0; key < all; ++key) ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 1));
}

TEST_P(Reservation, MoreHandlesThanARowCanCountWait) {
  Fixture fixture(GetParam(), kSmall, /*background=*/false);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  std::vector<PinnedRows> handles;
  for (int i = 0; i < 255; ++i) handles.push_back(PinOrDie(&cache, KeyRange(0, 2)));
  TrainAll(&handles[17]);
  std::atomic<bool> pinned{false};
  Thread puller("puller", ThreadPriority::kNormal, [&] {
    PinnedRows last = PinOrDie(&cache, KeyRange(0, 2));
    pinned = true;
  });
  while (cache.stats().reserve_waits == 0) std::this_thread::yield();
  EXPECT_FALSE(pinned);
  handles.pop_back();
  puller.Join();
  handles.clear();
  EXPECT_EQ(cache.stats().pinned_rows, 0u);
  EXPECT_EQ(cache.stats().rows, 2u);
}

TEST_P(Capacity, PinnedRowsDelayAShrinkAndTheNextPinReachesIt) {
  Fixture fixture(GetParam(), 4 * kSmall, /*background=*/false);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  TrainRange(&cache, 0, cache.MaxPinnedRows());
  PinnedRows held = PinOrDie(&cache, KeyRange(0, cache.MaxPinnedRows() / 2));
  const std::uint64_t smaller = kSmall;
  EXPECT_EQ(cache.SetCapacity(smaller).code(), StatusCode::kOutOfMemory);
  EXPECT_GT(cache.stats().used_bytes, smaller);
  // What nobody holds has gone from the chunks that have to go, so that the pin finds little to do.
  EXPECT_LE(cache.stats().rows, held.size() + cache.MaxPinnedRows());
  for (std::size_t w = 0; w < held.size(); ++w) ASSERT_EQ(RowAt(held, w), TrainedRow(w, 1));
  held.Release();
  PinnedRows next = PinOrDie(&cache, KeyRange(0, 10));
  EXPECT_LE(cache.stats().used_bytes, smaller);
  for (std::size_t w = 0; w < next.size(); ++w) ASSERT_EQ(RowAt(next, w), TrainedRow(w, 1));
  next.Release();
  EXPECT_EQ(cache.SetCapacity(1000).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(cache.SetCapacity(8 * kSmall).ok());
  const std::size_t grown = cache.MaxPinnedRows();
  PinnedRows more = PinOrDie(&cache, KeyRange(0, grown));
  EXPECT_LE(cache.stats().used_bytes, 8 * kSmall);
}

// Chunks that are made ahead count, and go first.
TEST_P(Capacity, MemoryMadeAheadStaysWithinTheLimit) {
  constexpr std::uint64_t kMost = 16 * kSmall;
  Fixture fixture(GetParam(), kMost, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  Rng rng(3);
  std::uint64_t limit = kMost;
  for (int step = 0; step < StepsOfWalk(300); ++step) {
    if (rng.Below(8) == 0) {
      // A little less, or any other.
      limit = rng.Below(2) == 0 ? std::max(kMost / 8, limit - limit / (16 + rng.Below(200)))
                                : kMost / (1 + rng.Below(4));
      ASSERT_TRUE(cache.SetCapacity(limit).ok());
      EXPECT_LE(cache.stats().used_bytes, limit) << step;
    }
    TrainRange(&cache, rng.Below(10'000), 1 + rng.Below(cache.MaxPinnedRows()));
    EXPECT_LE(cache.stats().used_bytes, limit) << step;
  }
}

// Whatever it holds in between, while pinned rows keep more chunks than the limit has.
TEST_P(Capacity, AShrinkThatPinnedRowsDelayEndsWithinTheLimit) {
  constexpr std::uint64_t kMost = 16 * kSmall;
  for (std::uint64_t round = FirstOfSweep(); round < 30; round += kSweepStride) {
    Rng rng(round);
    Fixture fixture(GetParam(), kMost, /*background=*/true);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    const std::uint64_t limit = kMost / 2 - rng.Below(kMost / 4);
    ASSERT_TRUE(cache.SetCapacity(limit).ok());
    // Rows in all chunks, and in some more of them than are to stay.
    const Key some = cache.MaxPinnedRows() * 33 / 32 + rng.Below(1000);
    ASSERT_TRUE(cache.SetCapacity(kMost).ok());
    const Key all = cache.MaxPinnedRows();
    TrainRange(&cache, 0, all);
    std::vector<Key> sparse[2];
    for (Key key = 0; key < all; key += 16) sparse[0].push_back(key);
    for (Key key = 8; key < some; key += 16) sparse[1].push_back(key);
    PinnedRows everywhere = PinOrDie(&cache, sparse[0]);
    PinnedRows nearly = PinOrDie(&cache, sparse[1]);
    EXPECT_EQ(cache.SetCapacity(limit).code(), StatusCode::kOutOfMemory);
    PinnedRows next;
    Thread puller("puller", ThreadPriority::kNormal,
                  [&] { next = PinOrDie(&cache, KeyRange(0, 10)); });
    while (cache.stats().reserve_waits == 0) std::this_thread::yield();
    everywhere.Release();
    // It has given back what it could, and waits again.
    while (cache.stats().used_bytes > limit + kMost / 8) std::this_thread::yield();
    nearly.Release();
    puller.Join();
    EXPECT_LE(cache.stats().used_bytes, limit) << round;
  }
}

// S3-FIFO remembers as many of the rows that left as it holds, though it began with one chunk.
TEST(GhostKeys, GrowWithTheCache) {
  Fixture fixture(EvictionType::kS3Fifo, kSmall, /*background=*/false);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  const std::size_t all = cache.MaxPinnedRows(), again = all / 4;
  const auto train = [&](Key first, std::size_t count) {
    for (Key key = first; key < first + count; key += 10) TrainRange(&cache, key, 10);
  };
  train(0, all);
  train(100'000, all / 2);  // The first ones leave,
  train(0, again);          // and come again: they stay when others pass that come only once.
  train(200'000, all + all / 4);
  const std::uint64_t hits = cache.stats().hits;
  train(0, again);
  EXPECT_GE(cache.stats().hits - hits, again * 9 / 10);
}

TEST_P(Capacity, AFailedPinHoldsNothing) {
  Fixture fixture(GetParam(), 4 * kSmall, /*background=*/false);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  TrainRange(&cache, 0, 100);
  fixture.stores[0]->FailAt(0);
  const auto failed = cache.Pin(KeyRange(50, cache.MaxPinnedRows()));
  EXPECT_EQ(failed.status().code(), StatusCode::kIo);
  EXPECT_EQ(cache.stats().pinned_rows, 0u);
  EXPECT_EQ(cache.stats().rows, 50u) << "the others had to make room";
  ASSERT_TRUE(cache.SetCapacity(kSmall).ok());
  EXPECT_LE(cache.stats().used_bytes, kSmall);
}

TEST_P(Capacity, ABigBudgetWithASmallTableCostsLittle) {
  Fixture fixture(GetParam(), std::uint64_t{1} << 30, /*background=*/true);
  fixture.options.chunk_bytes = 0;
  ASSERT_TRUE(fixture.Open().ok());
  const std::uint64_t write_buffers = fixture.cache->stats().used_bytes;
  TrainRange(fixture.cache.get(), 0, 1000);
  EXPECT_LE(fixture.cache->stats().used_bytes - write_buffers, std::uint64_t{5} << 20);
}

TEST(Options, WrongOnesAreRefused) {
  Fixture tiny(1000, /*background=*/false);
  EXPECT_EQ(tiny.Open().code(), StatusCode::kInvalidArgument);
  Fixture no_rows(kSmall, false);
  no_rows.options.row_bytes = 0;
  EXPECT_EQ(no_rows.Open().code(), StatusCode::kInvalidArgument);
  Fixture share(kSmall, false);
  share.options.eviction.lru_share = 1.5;
  EXPECT_EQ(share.Open().code(), StatusCode::kInvalidArgument);
  Fixture no_creator(kSmall, false);
  no_creator.options.create_row = nullptr;
  EXPECT_EQ(no_creator.Open().code(), StatusCode::kInvalidArgument);
}

// One run of everything; every call of a store that fails is followed by another try.
void RunWithFaultAt(std::int64_t fault, EvictionType eviction, bool background, int shards,
                    bool* fault_was_hit) {
  Fixture fixture(eviction, kSmall / 2, background, shards);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  fixture.stores.back()->FailAt(fault);
  const std::size_t all = cache.MaxPinnedRows();
  std::map<Key, int> trained;
  Rng rng(7);
  for (int step = 0; step < 12; ++step) {
    std::vector<Key> keys;
    for (Key key = rng.Below(all); keys.size() < all / 2; key += 1 + rng.Below(4)) {
      keys.push_back(key);
    }
    auto pinned = cache.Pin(keys);
    if (!pinned.ok()) {
      ASSERT_EQ(pinned.status().code(), StatusCode::kIo);
      ASSERT_EQ(cache.stats().pinned_rows, 0u);
      ASSERT_TRUE(cache.FlushDirty().ok()) << "the fault is over";
      pinned = cache.Pin(keys);
    }
    ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
    for (std::size_t w = 0; w < keys.size(); ++w) {
      ASSERT_EQ(RowAt(*pinned, w), TrainedRow(keys[w], trained[keys[w]])) << keys[w];
    }
    TrainAll(&*pinned);
    for (const Key key : keys) ++trained[key];
    if (step % 4 == 3) {
      Status flushed = cache.FlushDirty();
      if (!flushed.ok()) flushed = cache.FlushDirty();
      ASSERT_TRUE(flushed.ok()) << flushed.ToString();
    }
  }
  for (const auto& [key, times] : trained) {
    ASSERT_EQ(fixture.Stored(key), times > 0 ? TrainedRow(key, times) : Row()) << key;
  }
  *fault_was_hit = fixture.stores.back()->FaultWasHit();
}

TEST_P(Faults, EveryCallOfAStoreFailsInTurn) {
  for (const bool background : {false, true}) {
    for (const int shards : {1, 2}) {
      std::int64_t fault = 0;
      for (bool hit = true; hit; ++fault) {
        SCOPED_TRACE(testing::Message()
                     << "call " << fault << " background " << background << " shards " << shards);
        RunWithFaultAt(fault, GetParam(), background, shards, &hit);
        if (HasFatalFailure()) return;
      }
      EXPECT_GT(fault, 20) << "background " << background << " shards " << shards;
    }
  }
}

// Stage 2 pins ahead while stage 4 trains, flushes and reads; the limit moves meanwhile.
TEST_P(Concurrency, PinAheadWhileTrainingFlushingAndPeeking) {
  for (const bool background : {false, true}) {
    Fixture fixture(GetParam(), 3 * kSmall, background, 2);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    constexpr int kBatches = 120;
    constexpr Key kKeys = 6000;
    TrainedTimes trained;
    Rng rng(11);
    const auto next = [&](int batch) {
      if (batch > 0 && batch % 10 == 0) {
        const Status set = cache.SetCapacity((2 + rng.Below(3)) * kSmall);
        EXPECT_TRUE(set.ok() || set.code() == StatusCode::kOutOfMemory) << set.ToString();
      }
      std::vector<Key> keys;
      for (Key key = rng.Below(20); key < kKeys && keys.size() < 400; key += 1 + rng.Below(30)) {
        keys.push_back(key);
      }
      return keys;
    };
    const auto after = [&](int batch) {
      if (batch % 7 == 0) {
        ASSERT_TRUE(cache.FlushDirty().ok());
      }
    };
    ASSERT_NO_FATAL_FAILURE(TrainPinnedAhead(&cache, kBatches, /*seed=*/12, next, after, &trained));
    ASSERT_TRUE(cache.FlushDirty().ok());
    for (const auto& [key, times] : trained.times) {
      ASSERT_EQ(fixture.Stored(key), times > 0 ? TrainedRow(key, times) : Row()) << key;
    }
    EXPECT_EQ(cache.stats().pinned_rows, 0u);
  }
}

// Rows that are evicted while a flush begins fill the write buffers, and it waits for room before
// it can do anything: it does not take that for its end.
TEST_P(SyncPoints, AFlushThatFindsNoRoomIsNotOver) {
  for (const bool blocks : {false, true}) {
    Fixture fixture(GetParam(), kSmall, /*background=*/true);
    fixture.options.flush_bytes = 10 * (kRowBytes + 40);  // Three buffers of ten rows.
    fixture.options.hot_apart = false;
    if (blocks) fixture.SetGroups(100);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    FakeStore& store = *fixture.stores[0];
    const std::size_t all = cache.MaxPinnedRows();
    TrainRange(&cache, 0, all);
    static FakeStore* held_store;
    static RowCache* evicting_cache;
    held_store = &store;
    evicting_cache = blocks ? nullptr : &cache;  // Over blocks no eviction runs beside it.
    SyncPoint::Arm([](std::string_view name) {
      if (name != "cache.flush.before_walk") return;
      held_store->HoldWrites();
      if (evicting_cache != nullptr) TrainRange(evicting_cache, 1'000'000, 30);
    });
    Thread release("release", ThreadPriority::kNormal, [&] {
      store.WaitForHeldWrite();
      // However soon it lets go, the flush has to write all rows.
      for (int i = 0; i < 10'000; ++i) std::this_thread::yield();
      store.LetGo();
    });
    const Status flushed = cache.FlushDirty();
    SyncPoint::Arm(nullptr);
    release.Join();
    ASSERT_TRUE(flushed.ok()) << flushed.ToString();
    EXPECT_EQ(cache.stats().dirty_rows, 0u);
    for (Key key = 0; key < all; ++key) ASSERT_EQ(fixture.Stored(key), TrainedRow(key, 1)) << key;
  }
}

// The names that a crash test arms.
TEST_P(SyncPoints, AreHit) {
  static std::atomic<int> before_write, after_write, before_read, evict, flush;
  before_write = after_write = before_read = evict = flush = 0;
  SyncPoint::Arm([](std::string_view name) {
    before_write += name == "cache.writeback.before_write";
    after_write += name == "cache.writeback.after_write";
    before_read += name == "cache.pin.before_read";
    evict += name == "cache.evict.before_write";
    flush += name == "cache.flush.before_write";
  });
  {
    Fixture fixture(GetParam(), kSmall, /*background=*/false);
    ASSERT_TRUE(fixture.Open().ok());
    TrainRange(fixture.cache.get(), 0, fixture.cache->MaxPinnedRows());
    TrainRange(fixture.cache.get(), 1'000'000, 100);
    ASSERT_TRUE(fixture.cache->FlushDirty().ok());
  }
  SyncPoint::Arm(nullptr);
  EXPECT_GE(before_write, 2);
  EXPECT_EQ(after_write, before_write);
  EXPECT_EQ(before_read, 2);
  EXPECT_EQ(evict, 100);
  EXPECT_EQ(flush, 1);
}

TEST_P(Policy, FrequentRowsSurviveAScan) {
  Fixture fixture(GetParam(), 4 * kSmall, /*background=*/false);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  const std::size_t all = cache.MaxPinnedRows();
  const std::size_t frequent = all / 4;  // Less than the LFU's half.
  for (int visit = 0; visit < 5; ++visit) TrainRange(&cache, 0, frequent);
  // Four times the cache, each row once: too little for a frequency of five to age to one.
  for (Key next = 1'000'000; next < 1'000'000 + 4 * all; next += 50) {
    TrainRange(&cache, next, 50);
  }
  const RowCacheStats before = cache.stats();
  PinOrDie(&cache, KeyRange(0, frequent));
  EXPECT_EQ(cache.stats().hits - before.hits, frequent);
  EXPECT_EQ(cache.stats().misses, before.misses);
}

TEST(LruLfu, RecentRowsSurviveFrequentOnes) {
  // The last rows seen stay, though seen once, as long as the LRU has room for them: what leaves
  // are rows seen as often, but longer ago.
  Fixture fixture(EvictionType::kLruLfu, 4 * kSmall, /*background=*/false);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  const std::size_t all = cache.MaxPinnedRows();
  for (int visit = 0; visit < 5; ++visit) TrainRange(&cache, 0, all / 4);
  for (Key next = 1'000'000; next < 1'000'000 + 2 * all; next += 50) TrainRange(&cache, next, 50);
  const Key end = 1'000'000 + (2 * all + 49) / 50 * 50;
  const std::size_t recent = all * 2 / 5;
  const std::uint64_t misses = cache.stats().misses;
  PinOrDie(&cache, KeyRange(end - recent, recent));
  EXPECT_EQ(cache.stats().misses, misses);
}

TEST_P(Hazard, CacheShrinksThoughSomeRowsArePinnedByEverySet) {
  Fixture fixture(GetParam(), std::uint64_t{1} << 20, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  const std::size_t all = cache.MaxPinnedRows();
  TrainRange(&cache, 0, all);
  // Every 16th row is hot: no chunk is without one.
  std::vector<Key> hot;
  for (Key key = 0; key < all; key += 16) hot.push_back(key);
  PinnedRows held = PinOrDie(&cache, hot);
  const std::uint64_t limit = std::uint64_t{1} << 19;
  EXPECT_EQ(cache.SetCapacity(limit).code(), StatusCode::kOutOfMemory);
  std::atomic<bool> done{false};
  PinnedRows next;
  Thread puller("puller", ThreadPriority::kNormal, [&] {
    next = PinOrDie(&cache, hot);
    done = true;
  });
  while (cache.stats().reserve_waits == 0) std::this_thread::yield();
  EXPECT_FALSE(done);
  TrainAll(&held);
  held.Release();
  puller.Join();
  EXPECT_LE(cache.stats().used_bytes, limit);
  for (std::size_t w = 0; w < hot.size(); ++w) ASSERT_EQ(RowAt(next, w), TrainedRow(hot[w], 2));
  next.Release();
  ASSERT_TRUE(cache.FlushDirty().ok());
  for (Key key = 0; key < all; ++key) {
    ASSERT_EQ(fixture.Stored(key), TrainedRow(key, key % 16 == 0 ? 2 : 1)) << key;
  }
}

}  // namespace
}  // namespace terrace::cache_testing
