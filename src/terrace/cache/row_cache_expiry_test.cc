// The cache over real stores whose rows expire: what a cache knows of the stores stays true while
// sweeps take rows out of them, and nothing that has not expired is lost.
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/cache/row_cache.h"
#include "terrace/cache/testing/cache_fixture.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace::cache_testing {
namespace {

constexpr std::uint32_t kShards = 2;
constexpr std::uint64_t kKeys = 3000;
constexpr std::uint64_t kCapacity = 96 << 10;  // Bytes; some hundreds of rows.

// A row begins with the point at which it may go; 0: it was never trained.
std::uint64_t DeadlineOf(const std::byte* row) {
  std::uint64_t deadline;
  std::memcpy(&deadline, row, sizeof deadline);
  return deadline;
}

class Deadlines final : public RowExpiry {
 public:
  std::uint64_t points() const override { return points_.load(); }
  bool MayGo(const std::byte* row) const override { return DeadlineOf(row) <= points(); }
  void Pass() { ++points_; }

 private:
  std::atomic<std::uint64_t> points_{0};
};

void FreshRow(Key key, std::byte* row) {
  FillRow(key, row);
  std::memset(row, 0, sizeof(std::uint64_t));
}

class ExpiringTiers {
  MemoryFileSystem fs_;  // Before the stores, whose threads use them to their end.
  DiskQuota quota_;

 public:
  explicit ExpiringTiers(bool background) : quota_(std::uint64_t{1} << 30) {
    std::vector<Store*> borrowed;
    for (std::uint32_t shard = 0; shard < kShards; ++shard) {
      StoreOptions options;
      options.directory = "/rows/shard-" + std::to_string(shard);
      options.table = "ads";
      options.shard = shard;
      options.row_bytes = kRowBytes;
      options.file_bytes = 16 << 10;
      options.io_buffer_bytes = 64 << 10;
      options.background_compaction = background;
      options.expiry = &expiry;
      stores.push_back(Store::Create(&fs_, Clock::Real(), &quota_, options).value());
      borrowed.push_back(stores.back().get());
    }
    RowCacheOptions options;
    options.row_bytes = kRowBytes;
    options.capacity_bytes = kCapacity;
    options.chunk_bytes = 4096;
    options.background = background;
    options.create_row = FreshRow;
    options.expiry = &expiry;
    cache = RowCache::Create(options, Clock::Real(), borrowed).value();
  }
  void Pass() {
    expiry.Pass();
    for (auto& store : stores) store->WantSweep();
  }
  std::uint64_t rows_expired() const {
    std::uint64_t rows = 0;
    for (const auto& store : stores) rows += store->stats().rows_expired;
    return rows;
  }
  Store* StoreOf(Key key) { return stores[ShardOfHash(MixKey(key), kShards)].get(); }

  Deadlines expiry;
  std::vector<std::unique_ptr<Store>> stores;
  std::unique_ptr<RowCache> cache;
};

class Expiring : public testing::TestWithParam<bool> {};

TEST_P(Expiring, NothingAliveIsLostAndNothingExpiredIsTrainedOn) {
  ExpiringTiers tiers(GetParam());
  std::map<Key, Row> model;
  Rng rng(5);
  const auto check = [&](Key key, const std::byte* row) {
    const auto known = model.find(key);
    const Row seen(row, row + kRowBytes);
    if (known != model.end() && !tiers.expiry.MayGo(known->second.data())) {
      ASSERT_EQ(seen, known->second) << key;
    } else {
      // Absent, or an old version of it.
      ASSERT_TRUE(tiers.expiry.MayGo(row)) << key;
    }
  };
  for (int step = 0; step < 600; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    std::set<Key> wanted;
    while (wanted.size() < 120) {
      const double unit = rng.Unit();
      wanted.insert(static_cast<Key>(unit * unit * kKeys));
    }
    const std::vector<Key> keys(wanted.begin(), wanted.end());
    auto pinned = tiers.cache->Pin(keys);
    TERRACE_ASSERT_OK(pinned);
    // Sweeps may run while rows are pinned, before and after they are trained.
    if (rng.Below(6) == 0) tiers.Pass();
    const std::size_t trained = rng.Below(keys.size() + 1);
    for (std::size_t w = 0; w < keys.size(); ++w) {
      std::byte* const row = pinned->row(w);
      ASSERT_NO_FATAL_FAILURE(check(keys[w], row));
      if (w >= trained) continue;
      std::uint64_t least = 0;
      if (tiers.expiry.MayGo(row)) {
        FreshRow(keys[w], row);
      } else {
        least = DeadlineOf(row);
      }
      Train(row);
      const std::uint64_t deadline = std::max(least, tiers.expiry.points() + 1 + rng.Below(5));
      std::memcpy(row, &deadline, sizeof deadline);
      model[keys[w]] = Row(row, row + kRowBytes);
    }
    pinned->MarkDirty(0, trained);
    if (rng.Below(10) == 0) TERRACE_ASSERT_OK(tiers.cache->FlushDirty());
    pinned->Release();
    if (rng.Below(10) == 0) TERRACE_ASSERT_OK(tiers.cache->WriteAhead(50));
    if (rng.Below(20) == 0) {
      for (auto& store : tiers.stores) TERRACE_ASSERT_OK(store->CompactNow());
    }
  }
  TERRACE_ASSERT_OK(tiers.cache->FlushDirty());
  std::uint64_t alive = 0;
  for (Key key = 0; key < kKeys; ++key) {
    Row row(kRowBytes);
    std::byte* const at = row.data();
    std::uint8_t found = 0;
    TERRACE_ASSERT_OK(tiers.StoreOf(key)->Read({&key, 1}, {&at, 1}, {&found, 1}));
    const auto known = model.find(key);
    if (known != model.end() && !tiers.expiry.MayGo(known->second.data())) {
      ASSERT_EQ(found, 1) << key;
      ++alive;
    }
    if (found != 0) {
      ASSERT_NO_FATAL_FAILURE(check(key, at));
    }
  }
  EXPECT_GT(alive, 100u);
  EXPECT_GT(tiers.rows_expired(), 500u);
  EXPECT_GT(tiers.cache->stats().expired, 100u);
  TERRACE_EXPECT_OK(tiers.cache->background_status());
}

TEST_P(Expiring, RowsThatNobodyPinsLeaveTheCacheWithTheStoresRecord) {
  ExpiringTiers tiers(GetParam());
  const std::vector<Key> keys = KeyRange(0, 200);
  const auto train = [&](std::uint64_t deadline) {
    auto pinned = tiers.cache->Pin(keys);
    TERRACE_ASSERT_OK(pinned);
    for (std::size_t w = 0; w < keys.size(); ++w) {
      std::memcpy(pinned->row(w), &deadline, sizeof deadline);
    }
    pinned->MarkDirty(0, keys.size());
  };
  ASSERT_NO_FATAL_FAILURE(train(1));
  TERRACE_ASSERT_OK(tiers.cache->FlushDirty());
  EXPECT_EQ(tiers.cache->stats().rows, keys.size());
  tiers.expiry.Pass();
  {
    auto pinned = tiers.cache->Pin({keys.data(), 50});
    TERRACE_ASSERT_OK(pinned);
    for (auto& store : tiers.stores) TERRACE_ASSERT_OK(store->CompactNow());
    EXPECT_EQ(tiers.cache->stats().rows, 50u) << "pinned rows stay";
    EXPECT_EQ(tiers.rows_expired(), keys.size() - 50);
  }
  // Those that stayed are stored still, the others are new: a write of both is a write of each
  // kind.
  ASSERT_NO_FATAL_FAILURE(train(7));
  TERRACE_ASSERT_OK(tiers.cache->FlushDirty());
  std::uint64_t rows = 0;
  for (auto& store : tiers.stores) rows += store->stats().live_rows;
  EXPECT_EQ(rows, keys.size());
}

TEST_P(Expiring, ACheckpointWritesNoExpiredRow) {
  ExpiringTiers tiers(GetParam());
  const std::vector<Key> keys = KeyRange(0, 100);
  auto pinned = tiers.cache->Pin(keys);
  TERRACE_ASSERT_OK(pinned);
  for (std::size_t w = 0; w < keys.size(); ++w) {
    const std::uint64_t deadline = w < 60 ? 1 : 9;
    std::memcpy(pinned->row(w), &deadline, sizeof deadline);
  }
  pinned->MarkDirty(0, keys.size());
  tiers.expiry.Pass();
  TERRACE_ASSERT_OK(tiers.cache->FlushDirty());
  std::uint64_t rows = 0;
  for (auto& store : tiers.stores) rows += store->stats().live_rows;
  EXPECT_EQ(rows, 40u);
  EXPECT_EQ(tiers.cache->dirty_bytes(), 0u);
  // Trained again, while the pin lasts, they are new to the store.
  for (std::size_t w = 0; w < keys.size(); ++w) {
    const std::uint64_t deadline = 9;
    std::memcpy(pinned->row(w), &deadline, sizeof deadline);
  }
  pinned->MarkDirty(0, keys.size());
  TERRACE_ASSERT_OK(tiers.cache->FlushDirty());
  rows = 0;
  for (auto& store : tiers.stores) rows += store->stats().live_rows;
  EXPECT_EQ(rows, keys.size());
}

INSTANTIATE_TEST_SUITE_P(Threads, Expiring, testing::Bool());

}  // namespace
}  // namespace terrace::cache_testing
