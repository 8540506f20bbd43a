// The cache over real stores whose rows expire: what a cache knows of the stores stays true while
// sweeps take rows out of them, and nothing that has not expired is lost.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/mutex.h"
#include "terrace/base/rng.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/thread.h"
#include "terrace/cache/testing/store_tiers.h"
#include "terrace/io/testing/test_data.h"

namespace terrace::cache_testing {
namespace {

constexpr std::uint64_t kKeys = 3000;

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

class ExpiringByEither : public testing::TestWithParam<std::tuple<bool, IndexKind>> {
 protected:
  void SetUp() override {
    tiers_.store_options()->index = std::get<1>(GetParam());
    tiers_.store_options()->expected_rows = kKeys;
    TERRACE_ASSERT_OK(tiers_.Open());
  }
  RowCache& cache() { return tiers_.cache(); }
  void Pass() {
    expiry_.Pass();
    tiers_.WantSweep();
  }

  Deadlines expiry_;
  StoreTiers tiers_{std::get<0>(GetParam()), FreshRow, &expiry_};
};
// What follows from the stores' asking who holds a row, as those with an index by key do.
class Expiring : public ExpiringByEither {};

TEST_P(ExpiringByEither, NothingAliveIsLostAndNothingExpiredIsTrainedOn) {
  std::map<Key, Row> model;
  Rng rng(5);
  const auto check = [&](Key key, const std::byte* row) {
    const auto known = model.find(key);
    const Row seen(row, row + kRowBytes);
    if (known != model.end() && !expiry_.MayGo(known->second.data())) {
      ASSERT_EQ(seen, known->second) << key;
    } else {
      // Absent, or an old version of it.
      ASSERT_TRUE(expiry_.MayGo(row)) << key;
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
    auto pinned = cache().Pin(keys);
    TERRACE_ASSERT_OK(pinned);
    // Sweeps may run while rows are pinned, before and after they are trained.
    if (rng.Below(6) == 0) Pass();
    const std::size_t trained = rng.Below(keys.size() + 1);
    for (std::size_t w = 0; w < keys.size(); ++w) {
      std::byte* const row = pinned->row(w);
      ASSERT_NO_FATAL_FAILURE(check(keys[w], row));
      if (w >= trained) continue;
      std::uint64_t least = 0;
      if (expiry_.MayGo(row)) {
        FreshRow(keys[w], row);
      } else {
        least = DeadlineOf(row);
      }
      Train(row);
      const std::uint64_t deadline = std::max(least, expiry_.points() + 1 + rng.Below(5));
      std::memcpy(row, &deadline, sizeof deadline);
      model[keys[w]] = Row(row, row + kRowBytes);
    }
    pinned->MarkDirty(0, trained);
    if (rng.Below(10) == 0) TERRACE_ASSERT_OK(cache().FlushDirty());
    pinned->Release();
    if (rng.Below(10) == 0) TERRACE_ASSERT_OK(cache().WriteAhead(50));
    if (rng.Below(20) == 0) {
      TERRACE_ASSERT_OK(tiers_.Compact());
    }
  }
  TERRACE_ASSERT_OK(cache().FlushDirty());
  std::uint64_t alive = 0;
  for (Key key = 0; key < kKeys; ++key) {
    Row row(kRowBytes);
    std::byte* const at = row.data();
    std::uint8_t found = 0;
    TERRACE_ASSERT_OK(tiers_.StoreOf(key).Read({&key, 1}, {&at, 1}, {&found, 1}));
    const auto known = model.find(key);
    if (known != model.end() && !expiry_.MayGo(known->second.data())) {
      ASSERT_EQ(found, 1) << key;
      ++alive;
    }
    if (found != 0) {
      ASSERT_NO_FATAL_FAILURE(check(key, at));
    }
  }
  EXPECT_GT(alive, 100u);
  EXPECT_GT(tiers_.store_stats().rows_expired, 500u);
  EXPECT_GT(cache().stats().expired, 100u);
  TERRACE_EXPECT_OK(cache().background_status());
}

TEST_P(Expiring, RowsThatNobodyPinsLeaveTheCacheWithTheStoresRecord) {
  const std::vector<Key> keys = KeyRange(0, 200);
  const auto train = [&](std::uint64_t deadline) {
    auto pinned = cache().Pin(keys);
    TERRACE_ASSERT_OK(pinned);
    for (std::size_t w = 0; w < keys.size(); ++w) {
      std::memcpy(pinned->row(w), &deadline, sizeof deadline);
    }
    pinned->MarkDirty(0, keys.size());
  };
  ASSERT_NO_FATAL_FAILURE(train(1));
  TERRACE_ASSERT_OK(cache().FlushDirty());
  EXPECT_EQ(cache().stats().rows, keys.size());
  {
    auto pinned = cache().Pin({keys.data(), 50});
    TERRACE_ASSERT_OK(pinned);
    expiry_.Pass();
    TERRACE_ASSERT_OK(tiers_.Compact());
    EXPECT_EQ(cache().stats().rows, 50u) << "pinned rows stay";
    EXPECT_EQ(tiers_.store_stats().rows_expired, keys.size() - 50);
  }
  // Those that stayed are stored still, the others are new: a write of both is a write of each
  // kind.
  ASSERT_NO_FATAL_FAILURE(train(7));
  TERRACE_ASSERT_OK(cache().FlushDirty());
  EXPECT_EQ(tiers_.store_stats().live_rows, keys.size());
}

TEST_P(Expiring, ACheckpointWritesNoExpiredRow) {
  const std::vector<Key> keys = KeyRange(0, 100);
  auto pinned = cache().Pin(keys);
  TERRACE_ASSERT_OK(pinned);
  for (std::size_t w = 0; w < keys.size(); ++w) {
    const std::uint64_t deadline = w < 60 ? 1 : 9;
    std::memcpy(pinned->row(w), &deadline, sizeof deadline);
  }
  pinned->MarkDirty(0, keys.size());
  expiry_.Pass();
  TERRACE_ASSERT_OK(cache().FlushDirty());
  EXPECT_EQ(tiers_.store_stats().live_rows, 40u);
  EXPECT_EQ(cache().dirty_bytes(), 0u);
  // Trained again, while the pin lasts, they are new to the store.
  for (std::size_t w = 0; w < keys.size(); ++w) {
    const std::uint64_t deadline = 9;
    std::memcpy(pinned->row(w), &deadline, sizeof deadline);
  }
  pinned->MarkDirty(0, keys.size());
  TERRACE_ASSERT_OK(cache().FlushDirty());
  EXPECT_EQ(tiers_.store_stats().live_rows, keys.size());
}

// A row that may go is not written with the others of its block, and takes none along when it is
// evicted.
TEST(ExpiringRows, AreNotWrittenWithTheirBlocks) {
  constexpr std::uint64_t kLives = 5, kMayGo = 0;
  for (const std::uint64_t of_victim : {kLives, kMayGo}) {
    Deadlines expiry;
    Fixture fixture(EvictionType::kS3Fifo, kSmall, /*background=*/false);
    fixture.SetGroups(1);
    fixture.options.expiry = &expiry;
    fixture.options.create_row = FreshRow;
    TERRACE_ASSERT_OK(fixture.Open());
    RowCache& cache = *fixture.cache;
    const std::size_t all = cache.MaxPinnedRows();
    {
      PinnedRows pinned = PinOrDie(&cache, KeyRange(0, all));
      for (Key key = 0; key < all; ++key) {
        const std::uint64_t deadline = key == 0 ? of_victim : (key % 2 == 0 ? kLives : kMayGo);
        std::memcpy(pinned.row(key), &deadline, sizeof deadline);
      }
      pinned.MarkDirty(0, all);
    }
    PinOrDie(&cache, {1'000'000}).Release();  // The first row leaves.
    EXPECT_EQ(cache.stats().evictions, 1u);
    const std::vector<std::vector<Key>> writes = fixture.stores[0]->write_keys();
    if (of_victim == kMayGo) {
      EXPECT_TRUE(writes.empty());
      EXPECT_EQ(cache.stats().expired, 1u);
      continue;
    }
    ASSERT_EQ(writes.size(), 1u);
    EXPECT_EQ(std::count(writes[0].begin(), writes[0].end(), 0), 1);
    EXPECT_GT(writes[0].size(), 20u);
    for (const Key key : writes[0]) EXPECT_EQ(key % 2, 0u);
    EXPECT_GT(cache.stats().expired, 0u);
  }
}

// A write that is in flight when the cache is closed says of its rows that they are stored: until
// it has ended, sweeps leave them to it.
TEST(ExpiringRows, AreHeldUntilTheLastWriteOfAClosedCache) {
  Mutex mu;
  CondVar changed;
  bool held = false, let_go = false;
  SyncPoint::Arm([&](std::string_view name) {
    if (name != "store.write.before_index") return;
    MutexLock lock(&mu);
    held = true;
    changed.NotifyAll();
    while (!let_go) changed.Wait(&mu);
  });
  const auto hold = [&](bool stop) {
    MutexLock lock(&mu);
    let_go = !stop;
    held = false;
    changed.NotifyAll();
  };
  hold(false);
  // After the tiers, whose threads pass other points.
  struct Disarm {
    ~Disarm() { SyncPoint::Arm(nullptr); }
  } disarm;
  Deadlines expiry;
  StoreTiers tiers(/*background=*/true, FreshRow, &expiry);
  TERRACE_ASSERT_OK(tiers.Open());
  const std::vector<Key> keys = KeyRange(0, 100);  // Less than the write buffers take.
  const auto train = [&] {
    auto pinned = tiers.cache().Pin(keys);
    TERRACE_ASSERT_OK(pinned);
    const std::uint64_t deadline = 1;
    for (std::size_t w = 0; w < keys.size(); ++w) {
      std::memcpy(pinned->row(w), &deadline, sizeof deadline);
    }
    pinned->MarkDirty(0, keys.size());
  };
  ASSERT_NO_FATAL_FAILURE(train());
  TERRACE_ASSERT_OK(tiers.cache().FlushDirty());
  ASSERT_NO_FATAL_FAILURE(train());
  hold(true);
  TERRACE_ASSERT_OK(tiers.cache().WriteAhead(keys.size()));
  {
    MutexLock lock(&mu);
    while (!held) changed.Wait(&mu);
  }
  std::atomic<bool> closing = false;
  Thread closer("closer", ThreadPriority::kNormal, [&] {
    closing = true;
    tiers.CloseCache();
  });
  while (!closing) std::this_thread::yield();
  // Time enough for the closer to do harm.
  for (int time = 0; time < 500; ++time) {
    expiry.Pass();
    TERRACE_EXPECT_OK(tiers.Compact());
  }
  hold(false);
  closer.Join();
  expiry.Pass();
  TERRACE_EXPECT_OK(tiers.Compact());
  EXPECT_EQ(tiers.store_stats().live_rows, 0u);
}

// Rows that no file holds, too.
TEST_P(ExpiringByEither, RowsThatNobodyPinsLeaveTheCache) {
  const std::vector<Key> keys = KeyRange(0, 300);
  const std::vector<Key> others = KeyRange(1000, 10);
  const auto train = [&](std::span<const Key> some, PinnedRows* pinned, std::uint64_t deadline) {
    auto made = cache().Pin(some);
    TERRACE_ASSERT_OK(made);
    for (std::size_t w = 0; w < some.size(); ++w) {
      std::memcpy(made->row(w), &deadline, sizeof deadline);
    }
    made->MarkDirty(0, some.size());
    *pinned = std::move(made).value();
  };
  PinnedRows some, kept;
  ASSERT_NO_FATAL_FAILURE(train(keys, &some, 1));
  some.Release();
  ASSERT_NO_FATAL_FAILURE(train(std::span(keys).first(20), &kept, 1));
  ASSERT_NO_FATAL_FAILURE(train(others, &some, 9));
  some.Release();
  EXPECT_EQ(cache().stats().rows, keys.size() + others.size());
  Pass();
  // The next Pin has room for a small cache's rows.
  ASSERT_NO_FATAL_FAILURE(train(others, &some, 9));
  some.Release();
  EXPECT_EQ(cache().stats().rows, 20 + others.size()) << "pinned rows stay, and living ones";
  EXPECT_EQ(cache().stats().expired, keys.size() - 20);
  EXPECT_EQ(tiers_.store_stats().rows_written, 0u);
  kept.Release();
  // Without a Pin after the point, a flush has them leave.
  Pass();
  TERRACE_ASSERT_OK(cache().FlushDirty());
  EXPECT_EQ(cache().stats().rows, others.size());
  EXPECT_EQ(cache().stats().expired, keys.size());
  EXPECT_EQ(tiers_.store_stats().rows_written, others.size()) << "expired rows are not written";
  // Stored rows leave as well, whatever the store does about its own.
  for (int point = 0; point < 7; ++point) expiry_.Pass();
  TERRACE_ASSERT_OK(cache().FlushDirty());
  EXPECT_EQ(cache().stats().rows, 0u);
  // They begin anew.
  ASSERT_NO_FATAL_FAILURE(train(keys, &some, 20));
  some.Release();
  TERRACE_ASSERT_OK(cache().FlushDirty());
  TERRACE_ASSERT_OK(tiers_.Compact());
  EXPECT_EQ(tiers_.store_stats().live_rows, keys.size());
}

// A sweep of a large cache goes on from Pin to Pin, while others come and go.
TEST_P(ExpiringByEither, ASweepGoesOnFromPinToPin) {
  constexpr std::uint64_t kMany = 20'000, kAtOnce = 1000;
  tiers_.cache_options()->capacity_bytes = std::uint64_t{8} << 20;
  tiers_.cache_options()->chunk_bytes = 0;
  TERRACE_ASSERT_OK(tiers_.Open());
  const auto train = [&](Key first, std::uint64_t count, std::uint64_t deadline) {
    const std::vector<Key> keys = KeyRange(first, count);
    auto pinned = cache().Pin(keys);
    TERRACE_ASSERT_OK(pinned);
    for (std::size_t w = 0; w < keys.size(); ++w) {
      std::memcpy(pinned->row(w), &deadline, sizeof deadline);
    }
    pinned->MarkDirty(0, keys.size());
  };
  for (Key first = 0; first < kMany; first += kAtOnce) {
    ASSERT_NO_FATAL_FAILURE(train(first, kAtOnce, 1 + first / kAtOnce % 2));
  }
  ASSERT_EQ(cache().stats().rows, kMany) << "all fit";
  Pass();
  ASSERT_NO_FATAL_FAILURE(train(0, 10, 2));
  EXPECT_GT(cache().stats().rows, kMany / 2 + kAtOnce) << "a Pin does not wait for all of it";
  for (int pin = 0; pin < 10; ++pin) ASSERT_NO_FATAL_FAILURE(train(0, 10, 2));
  EXPECT_EQ(cache().stats().rows, kMany / 2 + 10);
  Pass();
  for (int pin = 0; pin < 10; ++pin) ASSERT_NO_FATAL_FAILURE(train(0, 10, 3));
  EXPECT_EQ(cache().stats().rows, 10u);
}

INSTANTIATE_TEST_SUITE_P(Tiers, ExpiringByEither,
                         testing::Combine(testing::Bool(),
                                          testing::Values(IndexKind::kKey, IndexKind::kGroup)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param) ? "Threads" : "Alone") +
                                  (std::get<1>(param.param) == IndexKind::kKey ? "Key" : "Group");
                         });
INSTANTIATE_TEST_SUITE_P(Threads, Expiring,
                         testing::Combine(testing::Bool(), testing::Values(IndexKind::kKey)));

}  // namespace
}  // namespace terrace::cache_testing
