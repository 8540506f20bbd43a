// Power lost at any call to the file system, below a run with its cache, stores and checkpoints:
// the disk keeps what was synced and of the rest whatever it likes, sector by sector and name by
// name.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "crash/crash_work.h"
#include "terrace/base/log.h"
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

// One disk that loses its power again and again.
class PowerLoss : public testing::TestWithParam<IndexKind> {
 protected:
  void SetUp() override {
    SetLogLevel(LogLevel::kError);
    ASSERT_NO_FATAL_FAILURE(Use({GetParam()}));
  }

  void Use(const WorkerTiers& tiers) {
    Result<Job> job = MakeWorkerJob(kRun, tiers);
    TERRACE_ASSERT_OK(job.status());
    job_ = *job;
    Result<ModelPlan> plan = MakeWorkerPlan(FileSystem::Posix(), job_);
    TERRACE_ASSERT_OK(plan.status());
    plan_ = *plan;
  }

  // Works until call number `at` and all after it fail, then crashes and checks. The calls that the
  // work made.
  std::uint64_t WorkAndCrash(MemoryFileSystem* disk, ExpectedInMemory* expected, std::uint64_t seed,
                             std::uint64_t at, Policy policy) {
    FaultRule rule;
    rule.fault = Fault::kError;
    rule.nth = at;
    rule.from_then_on = true;
    FaultyFileSystem fs(disk, {rule});
    Worker::Options options;
    options.round = ++round_;
    options.seed = seed;
    options.background = false;
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
  constexpr std::uint64_t kDisks = 40;
  constexpr std::uint64_t kLosses = 8;  // Of one disk.
  for (std::uint64_t seed = 1; seed <= kDisks; ++seed) {
    const WorkerTiers tiers = WorkerTiers::Draw(GetParam(), seed);
    SCOPED_TRACE(tiers.ToText());
    ASSERT_NO_FATAL_FAILURE(Use(tiers));
    MemoryFileSystem disk;
    ExpectedInMemory expected;
    Rng rng(seed);
    std::uint64_t calls = 600;
    for (std::uint64_t loss = 0; loss < kLosses; ++loss) {
      const std::uint64_t at = 1 + rng.Below(calls);
      const Policy policy = rng.Below(4) == 0 ? Policy::kLoseUnsynced : Policy::kRandom;
      SCOPED_TRACE("seed " + std::to_string(seed) + ", loss " + std::to_string(loss) + " at call " +
                   std::to_string(at));
      calls = std::max<std::uint64_t>(
          200, WorkAndCrash(&disk, &expected, HashCombine(seed, loss), at, policy));
      if (HasFailure()) return;
    }
  }
}

// The same work on a fresh disk, the power lost at each of its calls.
TEST_P(PowerLoss, AtEachCall) {
  constexpr std::uint64_t kSeed = 7;
  constexpr std::uint64_t kNever = ~std::uint64_t{0};
  std::uint64_t calls = 0;
  {
    MemoryFileSystem disk;
    ExpectedInMemory expected;
    calls = WorkAndCrash(&disk, &expected, kSeed, kNever, Policy::kKeepAll);
    EXPECT_FALSE(expected.Read().kept.empty());
  }
  ASSERT_GT(calls, 100u);
  constexpr std::uint64_t kMoments = 200;
  const std::uint64_t stride = calls / kMoments + 1;
  for (std::uint64_t at = 1; at <= calls; at += stride) {
    SCOPED_TRACE("at call " + std::to_string(at));
    MemoryFileSystem disk;
    ExpectedInMemory expected;
    WorkAndCrash(&disk, &expected, kSeed, at, Policy::kRandom);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Indexes, PowerLoss, testing::Values(IndexKind::kKey, IndexKind::kGroup),
                         [](const auto& param) {
                           return param.param == IndexKind::kKey ? "ByKey" : "ByGroup";
                         });

}  // namespace
}  // namespace terrace
