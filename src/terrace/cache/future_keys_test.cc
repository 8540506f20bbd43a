// FutureKeys against a map of the last time at which each key is asked for.
#include "terrace/cache/future_keys.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/base/thread.h"

namespace terrace {
namespace {

constexpr std::uint64_t kTick = FutureKeys::kTickExamples;

std::unique_ptr<FutureKeys> Make(std::uint64_t bytes) {
  auto made = FutureKeys::Create(bytes);
  EXPECT_TRUE(made.ok());
  return std::move(made).value();
}

// Over so many ticks that the bits of a time come round several times.
TEST(FutureKeys, KnowsEachKeyUntilItIsAskedForLast) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Rng rng(seed);
    const std::unique_ptr<FutureKeys> future = Make(1 << 20);
    std::map<Key, std::uint64_t> last;  // Ticks.
    const std::uint64_t start = rng.Below(1000);
    std::uint64_t now = start, front = start;
    future->SetNow(now * kTick);
    std::uint64_t known = 0, unknown = 0, mistaken = 0;
    while (now < start + 15'000) {
      // Keys that move on, so that old ones are never asked for again.
      for (; front < now + 200; ++front) {
        std::vector<Key> keys;
        for (int i = 0; i < 20; ++i)
          keys.push_back(front * 2 + rng.Below(rng.Below(4) == 0 ? 4000 : 40));
        const std::uint64_t example = front * kTick + rng.Below(kTick);
        ASSERT_TRUE(future->CanAdd(example));
        future->Add(keys, example);
        for (const Key key : keys) last[key] = front;
      }
      now += 1 + rng.Below(50);
      future->SetNow(now * kTick + rng.Below(kTick));
      for (int i = 0; i < 20; ++i) {
        const Key key = now * 2 + rng.Below(6000) - std::min<std::uint64_t>(now * 2, 3000);
        const auto found = last.find(key);
        const bool comes = found != last.end() && found->second >= now;
        const bool said = future->Coming(MixKey(key));
        if (comes) {
          ASSERT_TRUE(said) << "key " << key << " at " << now;
          ++known;
        } else {
          mistaken += said ? 1 : 0;
          ++unknown;
        }
      }
      std::uint64_t coming = 0;
      for (auto it = last.begin(); it != last.end();) {
        it = it->second < now ? last.erase(it) : std::next(it);
      }
      coming = last.size();
      ASSERT_GE(future->coming() + 3, coming);
      ASSERT_LE(future->coming(), coming + 3) << "two keys may look alike";
    }
    EXPECT_GT(known, 1000u);
    EXPECT_GT(unknown, 1000u);
    EXPECT_LE(mistaken, 2 + unknown / 1000);
  }
}

TEST(FutureKeys, IsFullBeforeItsLinesAre) {
  const std::unique_ptr<FutureKeys> future = Make(1 << 16);  // Of 16,384 keys.
  std::vector<Key> keys(100);
  Key next = 0;
  std::uint64_t tick = 0;
  for (; future->CanAdd(tick * kTick); ++tick) {
    for (Key& key : keys) key = next++;
    future->Add(keys, tick * kTick);
    ASSERT_LT(next, 20'000u);
  }
  EXPECT_GT(next, 13'000u);
  std::uint64_t known = 0;
  for (Key key = 0; key < next; ++key) known += future->Coming(MixKey(key)) ? 1 : 0;
  EXPECT_GT(known, next * 9 / 10) << "where a line is full, a key is not known";
  // What has passed makes room.
  future->SetNow(tick / 2 * kTick);
  EXPECT_TRUE(future->CanAdd(tick * kTick));
  EXPECT_LE(future->coming(), next / 2 + 100);
  EXPECT_FALSE(future->CanAdd((tick + (std::uint64_t{1} << 40)) * kTick)) << "too far ahead";
}

TEST(FutureKeys, IsAskedWhileItLearns) {
  const std::unique_ptr<FutureKeys> future = Make(1 << 16);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> known{0};
  Thread reader("reader", ThreadPriority::kNormal, [&] {
    while (!stop.load(std::memory_order_relaxed)) {
      for (Key key = 0; key < 2000; ++key) {
        future->Prefetch(MixKey(key));
        if (future->Coming(MixKey(key))) known.fetch_add(1, std::memory_order_relaxed);
      }
    }
  });
  std::uint64_t tick = 0;
  for (; tick < 200 || known.load(std::memory_order_relaxed) == 0; ++tick) {
    std::vector<Key> keys;
    for (Key key = tick % 20 * 100; key < tick % 20 * 100 + 100; ++key) keys.push_back(key);
    future->Add(keys, (tick + 10) * kTick);
    future->SetNow(tick * kTick);
  }
  stop.store(true, std::memory_order_relaxed);
  reader.Join();
  EXPECT_GT(known.load(), 0u);
}

}  // namespace
}  // namespace terrace
