#include "terrace/store/compaction_pace.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/base/rng.h"
#include "terrace/base/thread.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/store.h"
#include "terrace/store/testing/hooked_file_system.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

// Stepped by hand.
class HandClock final : public Clock {
 public:
  std::int64_t MonotonicNanos() const override { return nanos_; }
  std::int64_t WallMicros() const override { return nanos_ / 1000; }
  void Step(double seconds) { nanos_ += static_cast<std::int64_t>(seconds * 1e9); }

 private:
  std::atomic<std::int64_t> nanos_{1};
};

// For what must not happen.
void Sleep(int millis) {
  Mutex mu;
  CondVar never;
  MutexLock lock(&mu);
  never.WaitFor(&mu, std::chrono::milliseconds(millis));
}

// Until `done`, for at most some seconds.
template <typename Done>
bool Eventually(Done done) {
  for (int i = 0; i < 2000; ++i) {
    if (done()) return true;
    Sleep(5);
  }
  return done();
}

TEST(CompactionPace, IsAQuarterAboveWhatWasNeededLately) {
  HandClock clock;
  CompactionPace pace(&clock);
  EXPECT_EQ(pace.bytes_per_second(), 0);
  // 1000 bytes are written every two seconds, and 3000 are moved for them.
  for (int i = 0; i < 100; ++i) {
    pace.Wrote(1000);
    clock.Step(1);
    pace.Pass(3000);
    clock.Step(1);
  }
  pace.Wrote(1000);
  EXPECT_NEAR(pace.bytes_per_second(), 1.25 * 1500, 1);
  // As soon as nothing is compacted any more, rows set the least.
  for (int i = 0; i < 100; ++i) {
    clock.Step(2);
    pace.Wrote(1000);
  }
  EXPECT_NEAR(pace.bytes_per_second(), 500, 1);
  // Fast writes make for a fast pace.
  for (int i = 0; i < 100; ++i) {
    clock.Step(0.01);
    pace.Wrote(1000);
  }
  EXPECT_NEAR(pace.bytes_per_second(), 100'000, 1000);
}

TEST(CompactionPace, LeavesOutTheTimeInWhichSomebodyWaits) {
  HandClock clock;
  CompactionPace pace(&clock);
  for (int i = 0; i < 100; ++i) {
    pace.Wrote(1000);
    clock.Step(1);
    {
      CompactionPace::Hold hurry(&pace, CompactionPace::kHurry);
      clock.Step(2);
      CompactionPace::Hold another(&pace, CompactionPace::kHurry);
      clock.Step(1);
      pace.Pass(3000);
    }
    clock.Step(1);
  }
  pace.Wrote(1000);
  EXPECT_NEAR(pace.bytes_per_second(), 1.25 * 1500, 1);
  // Also of a wait that goes on.
  CompactionPace::Hold hurry(&pace, CompactionPace::kHurry);
  for (int i = 0; i < 100; ++i) {
    clock.Step(10);
    pace.Pass(3000);
    pace.Wrote(1000);
  }
  EXPECT_GT(pace.bytes_per_second(), 1e6);
}

class Passing {
 public:
  Passing(CompactionPace* pace, std::uint64_t bytes)
      : thread_("pass", ThreadPriority::kNormal, [this, pace, bytes] {
          pace->Pass(bytes);
          done_ = true;
        }) {}
  ~Passing() { thread_.Join(); }
  bool done() const { return done_; }

 private:
  std::atomic<bool> done_{false};
  Thread thread_;
};

TEST(CompactionPace, BlocksBesideAUseAndNotBetweenUses) {
  HandClock clock;
  CompactionPace pace(&clock);
  pace.Wrote(1000);
  pace.Pass(8'000'000);  // Nobody uses the disk.
  clock.Step(1);
  pace.Wrote(1000);
  EXPECT_DOUBLE_EQ(pace.bytes_per_second(), 1e7);
  {
    CompactionPace::Hold use(&pace, CompactionPace::kUse);
    Passing passing(&pace, 10'000'000);
    Sleep(20);
    EXPECT_FALSE(passing.done());
    clock.Step(0.9);
    Sleep(20);
    EXPECT_FALSE(passing.done());
    clock.Step(0.2);
    EXPECT_TRUE(Eventually([&] { return passing.done(); })) << "its time has come";
  }
  auto use = std::make_unique<CompactionPace::Hold>(&pace, CompactionPace::kUse);
  {
    Passing passing(&pace, 100'000'000);
    Sleep(20);
    EXPECT_FALSE(passing.done());
    use.reset();
    EXPECT_TRUE(Eventually([&] { return passing.done(); })) << "the read is over";
  }
  use = std::make_unique<CompactionPace::Hold>(&pace, CompactionPace::kUse);
  {
    Passing passing(&pace, 100'000'000);
    Sleep(20);
    EXPECT_FALSE(passing.done());
    CompactionPace::Hold hurry(&pace, CompactionPace::kHurry);
    EXPECT_TRUE(Eventually([&] { return passing.done(); })) << "somebody waits";
  }
  Passing passing(&pace, 100'000'000);
  Sleep(20);
  EXPECT_FALSE(passing.done());
  pace.Stop();
  EXPECT_TRUE(Eventually([&] { return passing.done(); }));
}

TEST(StorePace, CompactionWaitsForAReadThatIsOnItsWay) {
  MemoryFileSystem memory;
  HookedFileSystem fs(&memory);
  HandClock clock;
  StoreOptions options = StoreHarness::TinyOptions();
  options.background_compaction = true;
  options.file_bytes = 1 << 20;
  StoreHarness harness(&fs, std::uint64_t{1} << 30, options, &clock);
  harness.key_range = 5000;
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 5000)));
  clock.Step(1);
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 100)));
  EXPECT_EQ(harness.store()->stats().compactions, 0u);
  fs.BeforeReads([&] {
    clock.Step(1);
    // It makes compaction due, which would take seconds of a clock that stands.
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 4000)));
    Sleep(50);
    EXPECT_EQ(harness.store()->stats().compactions, 0u);
  });
  TERRACE_ASSERT_OK(harness.CheckRead(harness.KeysFrom(4000, 5000)));
  EXPECT_TRUE(Eventually([&] { return harness.store()->stats().compactions > 0; }));
  TERRACE_ASSERT_OK(harness.CheckAll());
}

// Compaction that can't keep up: the writer waits for it, and the space stays bounded.
TEST(StorePace, AWriterWaitsForCompactionThatIsFarBehind) {
  for (const double stale_share : {0.2, 0.3333, 0.5}) {
    MemoryFileSystem fs;
    StoreOptions options = StoreHarness::TinyOptions();
    options.background_compaction = true;
    options.file_bytes = 300 * 64;
    options.io_buffer_bytes = 256 << 10;
    options.stale_share = stale_share;
    StoreHarness harness(&fs, std::uint64_t{1} << 30, options);
    harness.key_range = 20'000;
    TERRACE_ASSERT_OK(harness.Create());
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 20'000)));
    Rng rng(3);
    constexpr std::uint64_t kMost = 2000;
    for (int i = 0; i < 150; ++i) {
      TERRACE_ASSERT_OK(harness.Write(harness.RandomKeys(&rng, kMost)));
      const StoreStats stats = harness.store()->stats();
      const double record = static_cast<double>(stats.live_bytes) / 20'000;
      EXPECT_LE(static_cast<double>(stats.live_bytes + stats.stale_bytes),
                static_cast<double>(stats.live_bytes) / (1 - stale_share) +
                    record * static_cast<double>(2 * kMost + 3 * 300));
    }
    EXPECT_GT(harness.store()->stats().compactions, 0u);
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

}  // namespace
}  // namespace terrace
