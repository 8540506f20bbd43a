// Power lost at any call to the file system, below a run with its cache, stores and checkpoints:
// the disk keeps what was synced and of the rest whatever it likes, sector by sector and name by
// name. Each time with another seed, which it says: --gtest_random_seed=SEED begins with it.
// TERRACE_POWER_LOSS_DISKS=N takes N disks at random moments instead of some.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "crash/crash_work.h"
#include "terrace/base/log.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/testing/sweep.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

using Policy = MemoryFileSystem::CrashPolicy;

constexpr char kRun[] = "/runs/one";
constexpr std::uint64_t kMostOperations = 40;

class ExpectedInMemory final : public ExpectedState {
 public:
  Status Add(Note note, const Snapshot& snapshot) override {
    expected_.Apply(note, snapshot);
    return OkStatus();
  }
  Expected Read() const override { return expected_; }
  Status Restart(const std::vector<Snapshot>& kept) override {
    expected_ = Expected();
    for (const Snapshot& snapshot : kept) expected_.kept[snapshot.id] = snapshot;
    return OkStatus();
  }

 private:
  Expected expected_;
};

std::uint64_t FirstSeed() {
  const auto given = static_cast<std::uint64_t>(GTEST_FLAG_GET(random_seed));
  const std::uint64_t seed = given != 0 ? given : BenchFlags::FreshSeed();
  std::printf("--gtest_random_seed=%lu\n", seed);
  std::fflush(stdout);  // A test that stops the process says no more.
  return seed;
}

std::uint64_t Disks() {
  constexpr std::uint64_t kDisks = 40 / kSweepStride;
  const char* const given = std::getenv("TERRACE_POWER_LOSS_DISKS");
  return given == nullptr ? kDisks : std::strtoull(given, nullptr, 10);
}

// One disk that loses its power again and again.
class PowerLoss : public testing::TestWithParam<IndexKind> {
 protected:
  void SetUp() override { SetLogLevel(LogLevel::kError); }

  void Use(const WorkerTiers& tiers) {
    Result<Job> job = MakeWorkerJob(kRun, tiers);
    TERRACE_ASSERT_OK(job.status());
    job_ = *job;
    Result<ModelPlan> plan = MakeWorkerPlan(FileSystem::Posix(), job_);
    TERRACE_ASSERT_OK(plan.status());
    plan_ = *plan;
  }

  // Works until call number `at` and all after it fail, then crashes and checks. The calls that the
  // work made. With `threads` of cache and stores the seed alone does not say which call that is.
  std::uint64_t WorkAndCrash(MemoryFileSystem* disk, ExpectedInMemory* expected, std::uint64_t seed,
                             std::uint64_t at, Policy policy, bool threads) {
    FaultRule rule;
    rule.fault = Fault::kError;
    rule.nth = at;
    rule.from_then_on = true;
    FaultyFileSystem fs(disk, {rule});
    Worker::Options options;
    options.round = ++round_;
    options.seed = seed;
    options.background = threads;
    options.most_operations = kMostOperations;
    {
      Worker worker(&fs, job_, plan_, expected, options);
      const Status status = worker.Work(/*anew=*/false);
      EXPECT_TRUE(status.ok() || fs.faults() > 0) << status.ToString();
      EXPECT_NE(status.code(), StatusCode::kInternal) << status.ToString();
    }
    const std::uint64_t calls = fs.operations();
    disk->Crash(seed, policy);
    TERRACE_EXPECT_OK(CheckRun(disk, kRun, expected));
    return calls;
  }

  Job job_;
  ModelPlan plan_;
  std::uint64_t round_ = 0;
};

TEST_P(PowerLoss, AtRandomMoments) {
  constexpr std::uint64_t kLosses = 8;  // Of one disk.
  const std::uint64_t first = FirstSeed(), disks = Disks();
  ASSERT_GT(disks, 0u);
  for (std::uint64_t seed = first; seed < first + disks; ++seed) {
    MemoryFileSystem disk;
    ExpectedInMemory expected;
    round_ = 0;  // As if this disk were the first.
    Rng rng(seed);
    std::uint64_t calls = 600;
    for (std::uint64_t loss = 0; loss < kLosses; ++loss) {
      const std::uint64_t at = 1 + rng.Below(calls);
      const Policy policy = rng.Below(4) == 0 ? Policy::kLoseUnsynced : Policy::kRandom;
      const bool threads = rng.Below(3) == 0;
      const WorkerTiers tiers = WorkerTiers::Draw(GetParam(), HashCombine(seed, loss));
      SCOPED_TRACE("--gtest_random_seed=" + std::to_string(seed) + ", loss " +
                   std::to_string(loss) + " at call " + std::to_string(at) +
                   (threads ? ", with threads; " : "; ") + tiers.ToText());
      ASSERT_NO_FATAL_FAILURE(Use(tiers));
      calls = std::max<std::uint64_t>(
          200, WorkAndCrash(&disk, &expected, HashCombine(seed, loss), at, policy, threads));
      if (HasFailure()) return;
    }
  }
}

// The same work on a fresh disk, the power lost at each of its calls. Without threads: whichever
// of them came first would make other calls.
TEST_P(PowerLoss, AtEachCall) {
  constexpr std::uint64_t kNever = ~std::uint64_t{0};
  constexpr std::uint64_t kLeastCalls = 100, kMostCalls = 500;
  std::uint64_t seed = FirstSeed(), calls = 0;
  // The first seed whose work commits something and is soon done.
  for (bool fit = false; !fit; seed += fit ? 0 : 1) {
    const WorkerTiers tiers = WorkerTiers::Draw(GetParam(), seed);
    SCOPED_TRACE("--gtest_random_seed=" + std::to_string(seed) + "; " + tiers.ToText());
    ASSERT_NO_FATAL_FAILURE(Use(tiers));
    MemoryFileSystem disk;
    ExpectedInMemory expected;
    calls = WorkAndCrash(&disk, &expected, seed, kNever, Policy::kKeepAll, /*threads=*/false);
    if (HasFailure()) return;
    fit = !expected.Read().kept.empty() && calls >= kLeastCalls && calls <= kMostCalls;
  }
  SCOPED_TRACE("--gtest_random_seed=" + std::to_string(seed));
  for (std::uint64_t at = 1 + FirstOfSweep(); at <= calls; at += kSweepStride) {
    SCOPED_TRACE("at call " + std::to_string(at));
    MemoryFileSystem disk;
    ExpectedInMemory expected;
    WorkAndCrash(&disk, &expected, seed, at, Policy::kRandom, /*threads=*/false);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Indexes, PowerLoss, testing::Values(IndexKind::kKey, IndexKind::kGroup),
                         [](const auto& param) {
                           return param.param == IndexKind::kKey ? "ByKey" : "ByGroup";
                         });

}  // namespace
}  // namespace terrace
