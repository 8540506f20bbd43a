#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <numbers>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/channel.h"
#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/base/portable_math.h"
#include "terrace/base/rng.h"
#include "terrace/base/status.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/testing/denormals.h"
#include "terrace/base/testing/temporary_folder.h"
#include "terrace/base/thread.h"
#include "terrace/base/units.h"

namespace terrace {
namespace {

TEST(Ids, MixKeyIsABijectionWithItsInverse) {
  Rng rng(1);
  for (int i = 0; i < 100000; ++i) {
    const Key key = rng.Next();
    ASSERT_EQ(UnmixKey(MixKey(key)), key);
  }
  EXPECT_EQ(UnmixKey(MixKey(0)), 0u);
  EXPECT_EQ(UnmixKey(MixKey(~Key{0})), ~Key{0});
}

TEST(Ids, ShardsAreBalanced) {
  std::uint64_t counts[3] = {};
  for (Key key = 0; key < 300000; ++key) ++counts[ShardOfHash(MixKey(key), 3)];
  for (std::uint64_t count : counts) EXPECT_NEAR(static_cast<double>(count), 100000, 2000);
}

TEST(Hashes, RangesBeginAtTheirFirstHash) {
  constexpr std::uint64_t kLast = ~std::uint64_t{0};
  for (const std::uint64_t parts : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3},
                                    std::uint64_t{1000}, (std::uint64_t{1} << 36) - 5, kLast}) {
    EXPECT_EQ(FirstHashOf(0, parts), 0u);
    EXPECT_EQ(RangeOfHash(kLast, parts), parts - 1);
    Rng rng(parts);
    for (int i = 0; i < 1000; ++i) {
      const std::uint64_t range = rng.Below(parts);
      const std::uint64_t first = FirstHashOf(range, parts);
      ASSERT_EQ(RangeOfHash(first, parts), range);
      if (range == 0) continue;
      ASSERT_EQ(RangeOfHash(first - 1, parts), range - 1);
    }
  }
}

TEST(Units, BytesReadAndWritten) {
  EXPECT_EQ(ParseBytes("2GiB"), std::uint64_t{2} << 30);
  EXPECT_EQ(ParseBytes("1.5 KB"), 1500u);
  EXPECT_EQ(ParseBytes("320mib"), std::uint64_t{320} << 20);
  EXPECT_EQ(ParseBytes("17"), 17u);
  EXPECT_EQ(ParseBytes("2 giraffes"), std::nullopt);
  EXPECT_EQ(ParseBytes("-1"), std::nullopt);
  EXPECT_EQ(ParseBytes(""), std::nullopt);
  EXPECT_EQ(ParseBytes("1e30"), std::nullopt);
  EXPECT_EQ(FormatBytes(std::uint64_t{2} << 30), "2.00 GiB");
  EXPECT_EQ(FormatCount(1234567), "1,234,567");
}

TEST(Channel, DeliversInOrderAndEnds) {
  Channel<int> channel(2);
  Thread sender("sender", ThreadPriority::kNormal, [&] {
    for (int i = 0; i < 1000; ++i) TERRACE_CHECK(channel.Send(i).ok());
    channel.Close();
  });
  for (int i = 0; i < 1000; ++i) {
    auto item = channel.Receive();
    ASSERT_TRUE(item.ok());
    ASSERT_EQ(**item, i);
  }
  auto end = channel.Receive();
  ASSERT_TRUE(end.ok());
  EXPECT_FALSE(end->has_value());
  sender.Join();
}

TEST(Channel, AbortWakesBothSidesWithTheFirstCause) {
  Channel<int> channel(1);
  ASSERT_TRUE(channel.Send(1).ok());
  Status sent;
  Thread sender("sender", ThreadPriority::kNormal, [&] { sent = channel.Send(2); });
  channel.Abort(IoError("disk"));
  channel.Abort(AbortedError("later"));
  sender.Join();
  EXPECT_EQ(sent.code(), StatusCode::kIo);
  EXPECT_EQ(channel.Receive().status().code(), StatusCode::kIo);
}

TEST(Mutex, InTurnWhoeverWaitsIsNext) {
  Mutex mu(Mutex::Order::kInTurn);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> taken{0};
  std::thread holder([&] {
    while (!stop.load()) {
      MutexLock lock(&mu);
      taken.fetch_add(1);
      const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
      while (std::chrono::steady_clock::now() < until) {
      }
    }
  });
  std::vector<std::uint64_t> waited;
  std::uint64_t last = 0;
  for (int i = 0; i < 51; ++i) {
    while (taken.load() == last) std::this_thread::yield();  // It is taken now.
    const std::uint64_t before = taken.load();
    MutexLock lock(&mu);
    last = taken.load();
    waited.push_back(last - before);
  }
  stop.store(true);
  holder.join();
  // Some were held up on their way to the queue.
  std::nth_element(waited.begin(), waited.begin() + 25, waited.end());
  EXPECT_LE(waited[25], 2u);
}

// Each handler's own counter has stopped for good once the next is armed, or none.
TEST(SyncPoint, IsArmedAndDisarmedWhileThreadsHitIt) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!stop) SyncPoint::Hit("outer");
    });
  }
  for (int round = 0; round < 50; ++round) {
    auto hits = std::make_unique<std::atomic<int>>(0);
    SyncPoint::Arm([&counter = *hits, owned = std::string("outer")](std::string_view name) {
      if (name == owned) SyncPoint::Hit("inner");
      ++counter;
    });
    while (*hits < 3) std::this_thread::yield();
    if (round % 2 == 0)
      SyncPoint::Arm(nullptr);
    else
      SyncPoint::Arm([](std::string_view) {});
    const int last = *hits;
    std::this_thread::yield();
    EXPECT_EQ(*hits, last);
  }
  SyncPoint::Arm(nullptr);
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(WorkerGroup, RunsEveryTaskOnceEachRound) {
  for (int size : {1, 2, 5}) {
    WorkerGroup group("worker", size);
    for (int round = 0; round < 200; ++round) {
      const int tasks = round % 12;
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      std::atomic<bool> first_is_the_callers{true};
      const std::thread::id caller = std::this_thread::get_id();
      group.Run(tasks, [&](int task) {
        ++runs[static_cast<std::size_t>(task)];
        if (task == 0 && std::this_thread::get_id() != caller) first_is_the_callers = false;
      });
      for (const auto& times : runs) ASSERT_EQ(times, 1);
      ASSERT_TRUE(first_is_the_callers);
    }
  }
}

TEST(WorkerGroup, AFreeThreadTakesTheTasksOfOneThatIsHeldUp) {
  WorkerGroup group("worker", 2);
  std::atomic<int> done{0};
  group.Run(5, [&](int task) {
    if (task == 0) {
      while (done < 4) std::this_thread::yield();
    }
    ++done;
  });
  EXPECT_EQ(done, 5);
}

// A thread is born with the settings of the one that starts it, so that one must have others.
TEST(Thread, FlushesDenormals) {
  KeepDenormals();
  for (const ThreadPriority priority : {ThreadPriority::kNormal, ThreadPriority::kYielding}) {
    int flushed = 0;
    Thread thread("flushing", priority, [&] { flushed = FlushedDenormals(); });
    thread.Join();
    EXPECT_EQ(flushed, 2);
  }
  EXPECT_EQ(FlushedDenormals(), 0);
  FlushDenormals();
  EXPECT_EQ(FlushedDenormals(), 2);
  KeepDenormals();
}

TEST(WorkerGroup, ItsOwnThreadsFlushDenormals) {
  KeepDenormals();
  constexpr int kThreads = 3;
  WorkerGroup workers("flushing", kThreads);
  std::atomic<int> arrived{0}, flushed{0};
  // A task on each thread: none ends before all have begun.
  workers.Run(kThreads, [&](int /*task*/) {
    flushed += FlushedDenormals();
    ++arrived;
    while (arrived < kThreads) std::this_thread::yield();
  });
  EXPECT_EQ(FlushedDenormals(), 0);
  EXPECT_EQ(flushed, 2 * (kThreads - 1));
}

// The user's own nice value counts, and who yields does not yield more for having been started by
// one that does.
TEST(Thread, YieldsByFiveToTheProcess) {
  const auto nice = [](id_t thread) { return getpriority(PRIO_PROCESS, thread); };
  const int own = nice(static_cast<id_t>(getpid()));
  int outer = 0, inner = 0;
  Thread thread("outer", ThreadPriority::kYielding, [&] {
    outer = nice(0);
    Thread within("inner", ThreadPriority::kYielding, [&] { inner = nice(0); });
    within.Join();
  });
  thread.Join();
  EXPECT_EQ(outer, std::min(19, own + 5));
  EXPECT_EQ(inner, outer);
}

TEST(Thread, TellsItsCpuTimeWhileItRuns) {
  std::atomic<bool> stop{false};
  Thread thread("busy", ThreadPriority::kNormal, [&] {
    while (!stop.load()) {
    }
  });
  while (thread.cpu_seconds() < 0.01) std::this_thread::yield();
  stop.store(true);
  thread.Join();
  EXPECT_EQ(thread.cpu_seconds(), 0);
  EXPECT_EQ(Thread().cpu_seconds(), 0);
}

TEST(WorkerGroup, CountsTheCpuTimeOfItsOwnThreads) {
  WorkerGroup group("worker", 2);
  std::atomic<bool> stop{false};
  // Two threads are in it, whichever runs which task, and both use time.
  group.Run(2, [&](int task) {
    if (task == 1) {
      while (group.cpu_seconds() < 0.01) std::this_thread::yield();
      stop.store(true);
    } else {
      while (!stop.load()) {
      }
    }
  });
  EXPECT_GE(group.cpu_seconds(), 0.01);
  WorkerGroup alone("alone", 1);
  alone.Run(1, [](int) {});
  EXPECT_EQ(alone.cpu_seconds(), 0);
}

TEST(HugeBuffer, IsZeroedAlignedAndMovable) {
  auto buffer = HugeBuffer::Allocate(3 << 20);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer->size(), std::uint64_t{4} << 20);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % kHugePageBytes, 0u);
  EXPECT_EQ(buffer->data()[buffer->size() - 1], std::byte{0});
  HugeBuffer moved = std::move(*buffer);
  EXPECT_NE(moved.data(), nullptr);
  EXPECT_FALSE(HugeBuffer::Allocate(std::uint64_t{1} << 60).ok());
}

TEST(EndUnlessMemoryLeft, OnlyWhereTheSystemGivesNone) {
  EndUnlessMemoryLeft(1 << 20);
  EXPECT_EXIT(EndUnlessMemoryLeft(std::uint64_t{1} << 60), testing::ExitedWithCode(1),
              "out of memory: asked the system for 1152921504606846976 bytes");
}

// A made-up system under a folder of the test.
class MemoryLimitTest : public ::testing::Test {
 protected:
  MemoryLimitTest() { Write("proc/meminfo", "MemFree: 5 kB\nMemTotal:       1000 kB\n"); }
  void Write(const std::string& path, const std::string& text) { root_.Write(path, text); }
  MemoryLimit Read() const {
    return ReadMemoryLimit(root_.path() / "proc", root_.path() / "groups");
  }

  const TemporaryFolder root_;
};

TEST_F(MemoryLimitTest, WithoutGroupsTheMachines) {
  EXPECT_EQ(Read().bytes, 1000u * 1024);
  EXPECT_FALSE(Read().of_group);
  Write("proc/self/cgroup", "0::/not/there\n");
  EXPECT_EQ(Read().bytes, 1000u * 1024);
  std::filesystem::remove_all(root_.path() / "proc");
  EXPECT_EQ(Read().bytes, 0u);
}

TEST_F(MemoryLimitTest, TheLeastOfAGroupAndThoseAbove) {
  Write("proc/self/cgroup", "0::/a/b\n");
  Write("groups/a/b/memory.max", "max\n");
  EXPECT_EQ(Read().bytes, 1000u * 1024);
  Write("groups/a/memory.max", "5000\n");
  EXPECT_EQ(Read().bytes, 5000u);
  EXPECT_TRUE(Read().of_group);
  Write("groups/a/b/memory.max", "4000\n");
  EXPECT_EQ(Read().bytes, 4000u);
  Write("groups/memory.max", "3000\n");
  EXPECT_EQ(Read().bytes, 3000u);
}

TEST_F(MemoryLimitTest, VersionOneHasAHierarchyForMemory) {
  Write("proc/self/cgroup", "7:cpu:/c\n4:hugetlb,memory:/m\n0::/\nwithout colons\n");
  Write("groups/memory/c/memory.limit_in_bytes", "1\n");
  Write("groups/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_FALSE(Read().of_group);
  Write("groups/memory/m/memory.limit_in_bytes", "6000\n");
  EXPECT_EQ(Read().bytes, 6000u);
  EXPECT_TRUE(Read().of_group);
}

TEST(Status, ContextStandsBeforeTheCause) {
  const Status status = CorruptionError("bad checksum at 17").WithContext("opening shard 3");
  EXPECT_EQ(status.ToString(), "corruption: opening shard 3: bad checksum at 17");
}

// By its code, whatever the words: a path may have those of a limit.
TEST(Status, ALimitIsNoFailureOfADisk) {
  EXPECT_EQ(ErrnoError(EMFILE, "opening", "/rows").code(), StatusCode::kOutOfRoom);
  EXPECT_EQ(ErrnoError(ENOSPC, "writing", "/ssd.quota").code(), StatusCode::kIo);
  EXPECT_EQ(ErrnoError(ELOOP, "opening", "/a").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(OutOfRoomError("full").WithContext("writing").ToString(), "out of room: writing: full");
}

TEST(PortableMathTest, AgreesWithTheLibrary) {
  Rng rng(3);
  for (int i = 0; i < 200000; ++i) {
    const double x = std::exp((rng.Unit() - 0.5) * 200);
    ASSERT_NEAR(PortableLog(x), std::log(x), 4e-16 * std::max(1.0, std::abs(std::log(x)))) << x;
    const double y = (rng.Unit() - 0.5) * 200;
    ASSERT_NEAR(PortableExp(y) / std::exp(y), 1, 4e-15) << y;
  }
  EXPECT_EQ(PortableLog(1), 0);
  EXPECT_EQ(PortableExp(0), 1);
  EXPECT_NEAR(PortableExp(1e9), PortableExp(700), 0);
  EXPECT_GT(PortableExp(-1e9), 0);
  EXPECT_TRUE(std::isnan(PortableExp(std::nan(""))));
  for (int i = 0; i <= 1000; ++i) {
    const double share = i / 1000.0;
    ASSERT_NEAR(PortableCosPi(share), std::cos(std::numbers::pi * share), 5e-16) << share;
  }
  for (const double beta : {0.9, 0.999, 1.0, 0.0}) {
    for (const std::uint64_t steps : {0ULL, 1ULL, 2ULL, 77ULL, 100'000ULL, 1ULL << 40}) {
      const double power = std::pow(beta, static_cast<double>(steps));
      ASSERT_NEAR(IntegerPower(beta, steps), power, 1e-10 * power) << beta << " ^ " << steps;
    }
  }
}

// On every processor, with every compiler and C library.
TEST(PortableMathTest, HasTheSameBitsEverywhere) {
  std::uint64_t bits = 0;
  const auto take = [&bits](double x) {
    bits = HashCombine(bits, std::bit_cast<std::uint64_t>(x));
  };
  for (int i = 1; i <= 100'000; ++i) {
    take(PortableLog(i * 0.37));
    take(PortableExp((i - 50'000) * 0.0031));
    take(PortableCosPi(i * 1e-5));
    take(IntegerPower(0.999, static_cast<std::uint64_t>(i)));
  }
  EXPECT_EQ(bits, 0x7239a02013f4ba46u);
}

}  // namespace
}  // namespace terrace
