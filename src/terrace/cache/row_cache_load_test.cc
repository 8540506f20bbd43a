// Rows on their way from the stores: pins that share them, loads that overlap, fail or are aborted.
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/thread.h"
#include "terrace/cache/row_cache.h"
#include "terrace/cache/testing/cache_fixture.h"

namespace terrace::cache_testing {
namespace {

class Loads : public OverPolicies {};
INSTANTIATE_TEST_SUITE_P(Policies, Loads, kPolicies);

TEST_P(Loads, TwoPinsShareRowsThatAreOnTheirWay) {
  Fixture fixture(GetParam(), kSmall, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  TrainRange(&cache, 0, 20);
  TrainRange(&cache, 1'000'000, cache.MaxPinnedRows());  // Rows 0 to 19 leave.
  ASSERT_TRUE(cache.FlushDirty().ok());
  fixture.stores[0]->HoldReads();
  auto first = cache.StartPin(KeyRange(0, 20));
  ASSERT_TRUE(first.ok());
  fixture.stores[0]->WaitForHeldRead();
  const RowCacheStats before = cache.stats();
  auto same = cache.StartPin(KeyRange(10, 10));     // None of its own.
  auto further = cache.StartPin(KeyRange(15, 10));  // And five that are in no store.
  ASSERT_TRUE(same.ok() && further.ok());
  EXPECT_EQ(cache.stats().misses - before.misses, 5u);
  fixture.stores[0]->LetGo();
  ASSERT_TRUE(further->Wait().ok());
  ASSERT_TRUE(same->Wait().ok());
  for (std::size_t w = 0; w < 10; ++w) {
    EXPECT_EQ(RowAt(*same, w), TrainedRow(10 + w, 1));
    EXPECT_EQ(RowAt(*further, w), w < 5 ? TrainedRow(15 + w, 1) : InitialRow(15 + w));
    EXPECT_EQ(first->row(10 + w), same->row(w));
  }
  ASSERT_TRUE(first->Wait().ok());
  TrainAll(&*first);
  EXPECT_EQ(RowAt(*same, 0), TrainedRow(10, 2));
}

TEST_P(Loads, ALoadRunsBesideTheOneBeforeItAndEndsAfterIt) {
  for (const std::int64_t fails : {-1, 0, 1, 2}) {  // Which of the loads.
    SCOPED_TRACE(fails);
    Fixture fixture(GetParam(), kSmall, /*background=*/true);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    FakeStore& store = *fixture.stores[0];
    store.HoldReadsOf(0);
    store.FailAt(fails);
    auto first = cache.StartPin(KeyRange(0, 20));
    store.WaitForHeldRead();
    auto second = cache.StartPin(KeyRange(10, 20));  // Half of them are those of the first.
    store.WaitForReads(1);                           // Of the second.
    auto third = cache.StartPin(KeyRange(20, 20));
    ASSERT_TRUE(first.ok() && second.ok() && third.ok());
    EXPECT_EQ(cache.stats().created, 0u);
    store.LetGo();
    const auto code = [fails](std::int64_t load) {
      return fails < 0 || load < fails ? StatusCode::kOk : StatusCode::kIo;
    };
    EXPECT_EQ(third->Wait().code(), code(2));
    EXPECT_EQ(second->Wait().code(), code(1));
    EXPECT_EQ(first->Wait().code(), code(0));
    PinnedRows again = PinOrDie(&cache, KeyRange(0, 40));
    for (std::size_t w = 0; w < 40; ++w) ASSERT_EQ(RowAt(again, w), InitialRow(w));
  }
}

TEST_P(Loads, AFailedLoadTakesThePinsThatMayShareItsRows) {
  for (const bool background : {false, true}) {
    SCOPED_TRACE(background);
    Fixture fixture(GetParam(), kSmall, background);
    ASSERT_TRUE(fixture.Open().ok());
    RowCache& cache = *fixture.cache;
    TrainRange(&cache, 0, 20);
    TrainRange(&cache, 1'000'000, cache.MaxPinnedRows());
    ASSERT_TRUE(cache.FlushDirty().ok());
    fixture.stores[0]->HoldReads();
    fixture.stores[0]->FailAt(0);
    auto first = cache.StartPin(KeyRange(0, 20));
    if (background) fixture.stores[0]->WaitForHeldRead();
    auto second = cache.StartPin(KeyRange(10, 20));
    auto third = cache.StartPin(KeyRange(0, 5));
    ASSERT_TRUE(first.ok() && second.ok() && third.ok());
    fixture.stores[0]->LetGo();
    for (auto* pinned : {&first, &second, &third}) {
      EXPECT_EQ((*pinned)->Wait().code(), StatusCode::kIo);
    }
    // What failed is pinned still; whoever asks for it anew gets it anew, and both go in peace.
    PinnedRows again = PinOrDie(&cache, KeyRange(0, 30));
    for (std::size_t w = 0; w < 30; ++w) {
      ASSERT_EQ(RowAt(again, w), w < 20 ? TrainedRow(w, 1) : InitialRow(w));
    }
    first->Release();
    TrainAll(&again);
    second->Release();
    again.Release();
    third->Release();
    ASSERT_TRUE(cache.FlushDirty().ok());
    for (Key key = 0; key < 30; ++key) {
      ASSERT_EQ(fixture.Stored(key), TrainedRow(key, key < 20 ? 2 : 1)) << key;
    }
  }
}

// Also one that has pinned them and waits for room for others.
TEST_P(Loads, AFailedLoadTakesThePinThatWaitsForRoom) {
  Fixture fixture(GetParam(), kSmall, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  FakeStore& store = *fixture.stores[0];
  const std::size_t all = cache.MaxPinnedRows();
  TrainRange(&cache, 0, 20);
  TrainRange(&cache, 1'000'000, all);
  ASSERT_TRUE(cache.FlushDirty().ok());
  TrainRange(&cache, 1'000'000, all);
  store.HoldReads();
  store.HoldWrites();
  store.FailAt(0);
  auto first = cache.StartPin(KeyRange(0, 20));
  ASSERT_TRUE(first.ok());
  store.WaitForHeldRead();
  // More than the write buffers have room for.
  std::vector<Key> keys = KeyRange(2'000'000, all / 2);
  keys.push_back(0);
  Result<PinnedRows> second = InternalError("not yet");
  Thread pin("pin", ThreadPriority::kNormal, [&] { second = cache.StartPin(keys); });
  while (cache.stats().pinned_rows <= 20) std::this_thread::yield();
  store.LetReadsGo();
  EXPECT_EQ(first->Wait().code(), StatusCode::kIo);
  store.LetGo();
  pin.Join();
  EXPECT_EQ((second.ok() ? second->Wait() : second.status()).code(), StatusCode::kIo);
  PinnedRows again = PinOrDie(&cache, KeyRange(0, 20));
  for (std::size_t w = 0; w < 20; ++w) ASSERT_EQ(RowAt(again, w), TrainedRow(w, 1));
}

TEST_P(Loads, AbortEndsAPinWhoseRowsAreOnTheirWay) {
  Fixture fixture(GetParam(), kSmall, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  fixture.stores[0]->HoldReads();
  auto first = cache.StartPin(KeyRange(0, 20));
  fixture.stores[0]->WaitForHeldRead();
  auto second = cache.StartPin(KeyRange(100, 20));
  ASSERT_TRUE(first.ok() && second.ok());
  cache.Abort(AbortedError("the test ends it"));
  fixture.stores[0]->LetGo();
  EXPECT_EQ(second->Wait().message(), "the test ends it");
  EXPECT_EQ(cache.StartPin(KeyRange(0, 1)).status().message(), "the test ends it");
}

}  // namespace
}  // namespace terrace::cache_testing
