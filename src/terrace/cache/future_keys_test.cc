// FutureKeys against a map of the times at which each key is asked for.
#include "terrace/cache/future_keys.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/base/thread.h"

namespace terrace {
namespace {

constexpr std::uint64_t kTick = FutureKeys::kTickExamples;
constexpr std::uint16_t kNever = FutureKeys::kNever;

std::unique_ptr<FutureKeys> Make(std::uint64_t bytes) {
  auto made = FutureKeys::Create(bytes);
  EXPECT_TRUE(made.ok());
  return std::move(made).value();
}

void AddAt(FutureKeys* future, std::uint64_t tick, const std::vector<Key>& keys) {
  ASSERT_TRUE(future->CanAdd(tick * kTick));
  future->Add(keys, tick * kTick + kTick - 1);
}

// In a stretch of up to sixteen ticks a time is a tick.
TEST(FutureKeys, TellsWhenAKeyIsAskedForLast) {
  const std::unique_ptr<FutureKeys> future = Make(1 << 20);
  future->SetNow(100 * kTick);
  AddAt(future.get(), 100, {1, 2, 2, 3});
  AddAt(future.get(), 103, {2});
  AddAt(future.get(), 115, {3, 4});
  const auto next = [&](Key key) { return future->TicksUntilNext(MixKey(key)); };
  EXPECT_EQ(next(1), 0);
  EXPECT_EQ(next(2), 3);
  EXPECT_EQ(next(3), 15);
  EXPECT_EQ(next(4), 15);
  EXPECT_EQ(next(5), kNever);
  EXPECT_EQ(future->coming(), 4u);
  future->SetNow(101 * kTick - 1);
  EXPECT_EQ(next(1), 0) << "the last example of a tick has not got its rows";
  future->SetNow(101 * kTick);
  EXPECT_EQ(next(1), kNever);
  EXPECT_EQ(next(2), 2);
  future->SetNow(103 * kTick);
  EXPECT_EQ(next(2), 0);
  future->SetNow(115 * kTick);
  EXPECT_EQ(next(2), kNever);
  EXPECT_EQ(next(3), 0);
  future->SetNow(116 * kTick);
  EXPECT_EQ(next(3), kNever);
  EXPECT_EQ(future->coming(), 0u);
  // Training was faster: nothing is noted.
  future->Add(std::vector<Key>{7}, 115 * kTick);
  EXPECT_EQ(next(7), kNever);
  EXPECT_EQ(future->coming(), 0u);
}

// As a stretch becomes longer than sixteen of its units, they become longer; what is known stays
// true.
TEST(FutureKeys, ALongStretchTellsTheTimeLessExactly) {
  const std::unique_ptr<FutureKeys> future = Make(1 << 20);
  future->SetNow(10 * kTick);
  for (std::uint64_t tick = 0; tick < 500; ++tick) {
    AddAt(future.get(), 10 + tick, {tick});
    std::uint64_t unit = 1;
    while (unit * 16 <= tick) unit *= 2;
    for (Key key = 0; key <= tick; ++key) {
      ASSERT_EQ(future->TicksUntilNext(MixKey(key)), key / unit * unit) << key << " at " << tick;
    }
  }
  // A unit of which a part is past is not.
  future->SetNow((10 + 50) * kTick);
  EXPECT_EQ(future->TicksUntilNext(MixKey(31)), kNever);
  EXPECT_EQ(future->TicksUntilNext(MixKey(40)), 0);
  EXPECT_EQ(future->TicksUntilNext(MixKey(64)), 14);
}

TEST(FutureKeys, LooksNoFurtherThanTimesReach) {
  const std::unique_ptr<FutureKeys> future = Make(1 << 20);
  future->SetNow(7 * kTick);
  std::uint64_t last = 7;
  for (std::uint64_t tick = 7; tick < 100'000; tick += 100) {
    if (!future->CanAdd(tick * kTick)) break;
    AddAt(future.get(), tick, {tick});
    last = tick;
  }
  EXPECT_GT(last, 7 + kNever * 7 / 8 - 200u);
  EXPECT_LT(last, 7u + kNever);
  EXPECT_FALSE(future->CanAdd((std::uint64_t{1} << 40) * kTick));
  const std::uint64_t ahead = last - 7;
  const std::uint16_t told = future->TicksUntilNext(MixKey(last));
  EXPECT_LE(told, ahead);
  EXPECT_GT(told, ahead - kNever / 8 / 8);
  // After a pause, in which all of it passed.
  future->SetNow(1'000'000 * kTick);
  AddAt(future.get(), 1'000'001, {5});
  EXPECT_EQ(future->TicksUntilNext(MixKey(5)), 1);
  EXPECT_EQ(future->coming(), 1u);
}

// Through so many stretches that each is used several times.
TEST(FutureKeys, AgreesWithAllTimesOverARandomStream) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Rng rng(seed);
    const std::unique_ptr<FutureKeys> future = Make(1 << 16);  // Of 24,576 keys.
    std::map<Key, std::set<std::uint64_t>> times;              // Ticks.
    const std::uint64_t start = rng.Below(1000);
    std::uint64_t now = start, front = start, least = kNever;
    future->SetNow(now * kTick);
    std::uint64_t known = 0, comes = 0, ordered = 0, pairs = 0, never = 0, mistaken = 0;
    while (now < start + 1500) {
      for (; future->CanAdd(front * kTick); ++front) {
        std::vector<Key> keys;
        // Keys that move on, so that old ones are never asked for again; few come often.
        for (int i = 0; i < 200; ++i) {
          keys.push_back(front * 20 + rng.Below(rng.Below(4) == 0 ? 20'000 : 2000));
        }
        future->Add(keys, front * kTick + rng.Below(kTick));
        for (const Key key : keys) times[key].insert(front);
      }
      ASSERT_GT(front, now) << "all that is past makes room";
      if (now > start) least = std::min(least, front - now);
      std::uint64_t before = 0, told_before = kNever;
      for (int i = 0; i < 20; ++i) {
        const Key key = front * 20 + rng.Below(8000) - std::min<std::uint64_t>(front * 20, 6000);
        const auto found = times.find(key);
        const std::uint16_t told = future->TicksUntilNext(MixKey(key));
        if (found == times.end() || *found->second.rbegin() < now) {
          ++never;
          mistaken += told != kNever ? 1 : 0;
          continue;
        }
        ++comes;
        if (told == kNever) continue;
        // A time of its own, but for the unit's length.
        const std::uint64_t unit = 8;
        const auto time = found->second.lower_bound(now + told);
        if (time == found->second.end() || *time - now - told >= unit) continue;
        ++known;
        if (told_before != kNever) {
          ++pairs;
          ordered += (before <= *time) == (told_before <= told) || told == told_before ? 1 : 0;
        }
        before = *time;
        told_before = told;
      }
      now += 1 + rng.Below(10);
      future->SetNow(now * kTick + rng.Below(kTick));
      for (auto it = times.begin(); it != times.end();) {
        it = *it->second.rbegin() < now ? times.erase(it) : std::next(it);
      }
    }
    EXPECT_GT(front - start, 5 * least) << "the ring went round";
    EXPECT_GT(least, 100u);
    EXPECT_GT(comes, 1000u);
    EXPECT_GT(never, 500u);
    EXPECT_GT(known, comes * 93 / 100) << "of " << comes;
    EXPECT_GT(ordered, pairs * 97 / 100) << "of " << pairs;
    EXPECT_LT(mistaken, 3 + never / 100) << "of " << never;
  }
}

TEST(FutureKeys, IsFullBeforeItsLinesAre) {
  const std::unique_ptr<FutureKeys> future = Make(1 << 16);  // Of 24,576 keys.
  std::vector<Key> keys(100);
  Key next = 0;
  std::uint64_t tick = 0;
  for (; future->CanAdd(tick * kTick); ++tick) {
    for (Key& key : keys) key = next++;
    future->Add(keys, tick * kTick);
    ASSERT_LT(next, 24'576u);
  }
  EXPECT_GT(next, 21'000u);
  EXPECT_GT(future->coming(), 21'000u);
  std::uint64_t known = 0, near = 0;
  for (Key key = 0; key < next; ++key) {
    const std::uint16_t told = future->TicksUntilNext(MixKey(key));
    known += told != kNever ? 1 : 0;
    near += told <= key / 100 && told + 4u > key / 100 ? 1 : 0;
  }
  EXPECT_GT(known, next * 98 / 100) << "where three lines are full, a key is not known";
  EXPECT_LT(known, next);
  EXPECT_GT(near, next * 96 / 100) << "others are told the time of one that looks alike";
  // What is past makes room when all of a stretch is.
  future->SetNow(tick / 16 * kTick);
  EXPECT_FALSE(future->CanAdd(tick * kTick));
  future->SetNow((tick / 8 + 4) * kTick);
  EXPECT_TRUE(future->CanAdd(tick * kTick));
  EXPECT_LT(future->coming(), next - next / 10);
  future->SetNow(tick * kTick);
  EXPECT_EQ(future->coming(), 0u);
}

// Which keys went on beyond a full line stands beside the times, which get coarser.
TEST(FutureKeys, KeysBeyondAFullLineStayKnown) {
  const std::unique_ptr<FutureKeys> future = Make(1 << 16);  // Of 3072 keys in a stretch.
  std::vector<Key> keys(2600);
  for (Key key = 0; key < keys.size(); ++key) keys[key] = key;
  AddAt(future.get(), 2, keys);
  const auto known = [&] {
    std::uint64_t count = 0;
    for (const Key key : keys) count += future->TicksUntilNext(MixKey(key)) == 2 ? 1 : 0;
    return count;
  };
  const std::uint64_t before = known();
  EXPECT_GT(before, keys.size() * 99 / 100);
  AddAt(future.get(), 200, {5000});
  EXPECT_EQ(known(), before);
  const std::uint16_t late = future->TicksUntilNext(MixKey(5000));
  EXPECT_GT(late, 200 - 16);
  EXPECT_LE(late, 200);
  // Asked for again it has its new time, wherever it stands.
  AddAt(future.get(), 200, keys);
  std::uint64_t moved = 0;
  for (const Key key : keys) {
    const std::uint16_t told = future->TicksUntilNext(MixKey(key));
    EXPECT_TRUE(told == late || told == kNever) << key;
    moved += told == late ? 1 : 0;
  }
  EXPECT_GE(moved, before);
}

// A tick that asks for more keys than a stretch has room for goes on in the next one, and where
// there is none it takes what room is left.
TEST(FutureKeys, ATickMayTakeSeveralStretches) {
  const std::unique_ptr<FutureKeys> future = Make(4096);  // Of 1536 keys.
  std::vector<Key> keys(1100);
  for (Key key = 0; key < keys.size(); ++key) keys[key] = key;
  AddAt(future.get(), 3, keys);
  std::uint64_t known = 0;
  for (const Key key : keys) known += future->TicksUntilNext(MixKey(key)) == 3 ? 1 : 0;
  EXPECT_GT(known, keys.size() * 9 / 10);
  keys.clear();
  for (Key key = 5000; key < 10'000; ++key) keys.push_back(key);
  AddAt(future.get(), 4, keys);
  EXPECT_FALSE(future->CanAdd(5 * kTick));
  EXPECT_LE(future->coming(), 1536u);
  EXPECT_GT(future->coming(), 1300u);
  future->SetNow(5 * kTick);
  EXPECT_TRUE(future->CanAdd(5 * kTick));
  AddAt(future.get(), 5, {1});
  EXPECT_EQ(future->coming(), 1u);
  EXPECT_EQ(future->TicksUntilNext(MixKey(1)), 0);
}

TEST(FutureKeys, IsAskedWhileItLearns) {
  const std::unique_ptr<FutureKeys> future = Make(1 << 14);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> known{0};
  Thread reader("reader", ThreadPriority::kNormal, [&] {
    while (!stop.load(std::memory_order_relaxed)) {
      for (Key key = 0; key < 2000; ++key) {
        future->Prefetch(MixKey(key));
        const std::uint16_t told = future->TicksUntilNext(MixKey(key));
        if (told != kNever) known.fetch_add(1, std::memory_order_relaxed);
      }
    }
  });
  std::uint64_t front = 0, tick = 0;
  for (; tick < 2000 || known.load(std::memory_order_relaxed) == 0; ++tick) {
    future->SetNow(tick * kTick);
    for (; future->CanAdd(front * kTick); ++front) {
      std::vector<Key> keys;
      for (Key key = front % 20 * 100; key < front % 20 * 100 + 100; ++key) keys.push_back(key);
      future->Add(keys, front * kTick);
    }
  }
  stop.store(true, std::memory_order_relaxed);
  reader.Join();
  EXPECT_GT(known.load(), 0u);
}

}  // namespace
}  // namespace terrace
