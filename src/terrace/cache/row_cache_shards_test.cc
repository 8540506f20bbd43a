// The shards of a table, read at the same time: what one of them does while others are in flight.
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/cache/row_cache.h"
#include "terrace/cache/testing/cache_fixture.h"

namespace terrace::cache_testing {
namespace {

constexpr std::uint64_t kSmallSharded = 256 << 10;
constexpr int kShards = 3;

// Keys [0, 60) trained once and in the stores, not in the cache.
void Store60(Fixture* fixture) {
  RowCache& cache = *fixture->cache;
  for (const Key first : {Key{0}, Key{1'000'000}}) {
    auto pinned = cache.Pin(KeyRange(first, first == 0 ? 60 : cache.MaxPinnedRows()));
    ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
    TrainAll(&*pinned);
  }
  ASSERT_TRUE(cache.FlushDirty().ok());
}

void ExpectAll60(Fixture* fixture, int times) {
  auto pinned = fixture->cache->Pin(KeyRange(0, 60));
  ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
  for (std::size_t w = 0; w < 60; ++w) ASSERT_EQ(RowAt(*pinned, w), TrainedRow(w, times)) << w;
}

// A pin of those keys whose reads are in flight: all of them, none waits for another.
Result<PinnedRows> StartHeldPin(Fixture* fixture) {
  for (auto& store : fixture->stores) store->HoldReads();
  Result<PinnedRows> pinned = fixture->cache->StartPin(KeyRange(0, 60));
  if (!pinned.ok()) return pinned;
  for (auto& store : fixture->stores) store->WaitForHeldRead();
  return pinned;
}

TEST(Shards, AreReadAtTheSameTime) {
  Fixture fixture(kSmallSharded, /*background=*/true, kShards);
  ASSERT_TRUE(fixture.Open().ok());
  Store60(&fixture);
  auto pinned = StartHeldPin(&fixture);
  ASSERT_TRUE(pinned.ok());
  for (auto& store : fixture.stores) store->LetGo();
  ASSERT_TRUE(pinned->Wait().ok());
  for (std::size_t w = 0; w < 60; ++w) ASSERT_EQ(RowAt(*pinned, w), TrainedRow(w, 1)) << w;
}

TEST(Shards, ManyAndWithoutThreads) {
  for (const bool background : {false, true}) {
    for (const int shards : {2, 40}) {  // More than threads.
      SCOPED_TRACE(shards);
      Fixture fixture(std::uint64_t{4} << 20, background, shards);
      ASSERT_TRUE(fixture.Open().ok());
      Store60(&fixture);
      // Among keys that exist nowhere.
      std::vector<Key> keys = KeyRange(0, 60);
      for (Key key = 500; key < 900; ++key) keys.push_back(key);
      auto pinned = fixture.cache->Pin(keys);
      ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
      for (std::size_t w = 0; w < keys.size(); ++w) {
        ASSERT_EQ(RowAt(*pinned, w), w < 60 ? TrainedRow(keys[w], 1) : InitialRow(keys[w])) << w;
      }
    }
  }
}

TEST(Shards, OneFailsWhileOthersRead) {
  for (int failing = 0; failing < kShards; ++failing) {
    Fixture fixture(kSmallSharded, /*background=*/true, kShards);
    ASSERT_TRUE(fixture.Open().ok());
    Store60(&fixture);
    fixture.stores[failing]->FailAt(0);
    auto pinned = StartHeldPin(&fixture);
    ASSERT_TRUE(pinned.ok());
    fixture.stores[failing]->LetGo();
    // Its failure is known only when the others, which write into the rows, are done.
    for (int i = 0; i < kShards; ++i) {
      if (i != failing) fixture.stores[i]->LetGo();
    }
    const Status status = pinned->Wait();
    EXPECT_EQ(status.code(), StatusCode::kIo);
    EXPECT_NE(status.message().find("shard " + std::to_string(failing)), std::string::npos)
        << status.ToString();
    pinned->Release();
    ExpectAll60(&fixture, 1);
  }
}

TEST(Shards, AbortInTheMidst) {
  Fixture fixture(kSmallSharded, /*background=*/true, kShards);
  ASSERT_TRUE(fixture.Open().ok());
  Store60(&fixture);
  auto pinned = StartHeldPin(&fixture);
  ASSERT_TRUE(pinned.ok());
  fixture.stores[0]->LetGo();
  fixture.cache->Abort(AbortedError("the test ends it"));
  for (int i = 1; i < kShards; ++i) fixture.stores[i]->LetGo();
  EXPECT_EQ(pinned->Wait().message(), "the test ends it");
}

}  // namespace
}  // namespace terrace::cache_testing
