#include "terrace/train/parts_plan.h"

#include <cerrno>
#include <functional>
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "terrace/base/testing/temporary_folder.h"
#include "terrace/train/run_marker.h"
#include "terrace/train/training_run.h"

namespace terrace {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

Job LargeJob() {
  Job job;
  job.output = "run";
  job.memory.budget_bytes = 8 * kGiB;
  job.ssd.quota_bytes = 100 * kGiB;
  return job;
}

TEST(PullThreads, AreAQuarterOfTheCoresUnlessTheJobSays) {
  Job job = LargeJob();
  EXPECT_EQ(PullThreads(job, 1), 1);
  EXPECT_EQ(PullThreads(job, 2), 1);
  EXPECT_EQ(PullThreads(job, 16), 4);
  EXPECT_EQ(PullThreads(job, 256), 8);
  job.pipeline.pull_threads = 3;
  EXPECT_EQ(PullThreads(job, 256), 3);
  job.pipeline.depth = 0;
  EXPECT_EQ(PullThreads(job, 256), 1);
}

TEST(PullThreads, LeaveEachPartItsCoresAndTheBudgetItsRows) {
  Job job = LargeJob();
  job.training.threads = 10;  // With two for I/O, two that read and one that pulls 15.
  EXPECT_EQ(PullThreads(job, 16), 2);
  EXPECT_EQ(PullThreads(job, 15), 1);
  job.training.threads = 16;  // Cores are shared in any case.
  EXPECT_EQ(PullThreads(job, 16), 4);
  job.memory.budget_bytes = kGiB / 2;
  EXPECT_EQ(PullThreads(job, 16), 2);
  job.memory.budget_bytes = kGiB / 16;
  EXPECT_EQ(PullThreads(job, 16), 1);
}

TEST(CacheParts, DivideTheShards) {
  Job job = LargeJob();
  job.ssd.shards = 6;
  EXPECT_EQ(CacheParts(job), 1u);
  job.pipeline.pulling = 4;
  EXPECT_EQ(CacheParts(job), 3u);
  job.ssd.shards = 8;
  EXPECT_EQ(CacheParts(job), 4u);
  job.pipeline.depth = 0;
  EXPECT_EQ(CacheParts(job), 1u);
}

TEST(ShardsOfNewRun, AsManyAsPullAndThereIsRoomFor) {
  Job job = LargeJob();
  EXPECT_EQ(ShardsOfNewRun(job, 1), 1);
  EXPECT_EQ(ShardsOfNewRun(job, 4), 4);
  job.memory.budget_bytes = kGiB / 2;
  EXPECT_EQ(ShardsOfNewRun(job, 4), 2);
  job = LargeJob();
  job.ssd.quota_bytes = 6 * kGiB;
  EXPECT_EQ(ShardsOfNewRun(job, 4), 3);
  job = LargeJob();
  for (int i = 0; i < 25; ++i) job.tables[fmt::format("t{}", i)];
  EXPECT_EQ(ShardsOfNewRun(job, 4), 1);
  job.ssd.paths = {"a", "b"};  // However little there is: each has rows.
  EXPECT_EQ(ShardsOfNewRun(job, 4), 2);
}

TEST(ShardsOfNewRun, AsManyOnEachDisk) {
  Job job = LargeJob();
  job.ssd.paths = {"a", "b", "c"};
  EXPECT_EQ(ShardsOfNewRun(job, 4), 12);
  EXPECT_EQ(ShardsOfNewRun(job, 3), 3);
  job.ssd.paths = {"a", "b", "c", "d", "e"};
  EXPECT_EQ(ShardsOfNewRun(job, 4), 15);
  EXPECT_EQ(ShardsOfNewRun(job, 1), 5);
}

TEST(WithParts, ARunThatGoesOnHasItsShards) {
  TemporaryFolder folder;
  Job job = LargeJob();
  job.output = folder.path();
  job.pipeline.pull_threads = 2;
  RunMarker marker;
  marker.shards = 7;
  marker.id = "0123456789abcdef";
  ASSERT_TRUE(WriteRunMarker(FileSystem::Posix(), folder.path(), marker).ok());
  const Job resumed = WithParts(FileSystem::Posix(), job, RunMode::kResume);
  EXPECT_EQ(resumed.ssd.shards, 7);
  EXPECT_FALSE(resumed.ssd.shards_auto);
  EXPECT_EQ(resumed.pipeline.pulling, 2);
  EXPECT_EQ(WithParts(FileSystem::Posix(), job, RunMode::kOverwrite).ssd.shards, 2);
  job.ssd.shards = 3;
  job.ssd.shards_auto = false;
  EXPECT_EQ(WithParts(FileSystem::Posix(), job, RunMode::kResume).ssd.shards, 3);
}

// What it says, of a process of its own: a plan starts from what its process has in memory, and of
// what an attempt has used some stays.
Status InAProcessOfItsOwn(const std::function<Status()>& attempt) {
  int ends[2];
  if (pipe(ends) != 0) return ErrnoError(errno, "create", "a pipe");
  const pid_t child = fork();
  if (child < 0) return ErrnoError(errno, "start", "a process");
  if (child == 0) {
    const Status status = attempt();
    const std::string said =
        static_cast<char>(status.code()) + std::string(status.ok() ? "" : status.message());
    const bool written =
        write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size());
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  std::string said;
  char piece[512];
  for (ssize_t bytes; (bytes = read(ends[0], piece, sizeof(piece))) > 0;) said.append(piece, bytes);
  close(ends[0]);
  int ended = 0;
  EXPECT_EQ(waitpid(child, &ended, 0), child);
  if (!WIFEXITED(ended) || WEXITSTATUS(ended) != 0 || said.empty()) {
    return IoError(fmt::format("the process of an attempt ended with {}", ended));
  }
  const auto code = static_cast<StatusCode>(said[0]);
  return code == StatusCode::kOk ? Status() : Status(code, said.substr(1));
}

// Threads that nobody asked for are no reason to refuse a budget with room for one.
TEST(AutomaticPullThreads, GiveWayToABudgetThatIsShort) {
  const auto prepare = [](std::uint64_t budget_mib, int pulling, int asked) {
    return InAProcessOfItsOwn([&]() -> Status {
      TemporaryFolder folder;
      TERRACE_ASSIGN_OR_RETURN(
          Job job,
          ParseJob(fmt::format("output: {}/run\n"
                               "data: {{format: synthetic, rows: 100, cardinality: 1000}}\n"
                               "table: {{dim: 8}}\nnetwork: {{hidden: [8]}}\n"
                               "training: {{minibatch: 4096, batch: 4096}}\nssd: {{shards: 4}}\n"
                               "memory: {{budget: {}MiB}}\n",
                               folder.path().string(), budget_mib),
                   "j.yaml", {}));
      job.pipeline.pulling = pulling;
      job.pipeline.pull_threads = asked;
      TrainingRun run(FileSystem::Posix(), Clock::Real(), job, nullptr);
      const Status status = run.Prepare(RunMode::kNew);
      run.AbandonIfUntrained();
      return status;
    });
  };
  const Status refused = prepare(1, 1, 1);
  ASSERT_EQ(refused.code(), StatusCode::kInvalidArgument) << refused.ToString();
  constexpr std::string_view kNeeds = "needs at least ";
  const std::size_t at = refused.message().find(kNeeds);
  ASSERT_NE(at, std::string::npos) << refused.ToString();
  const std::uint64_t least = std::stoull(refused.message().substr(at + kNeeds.size())) + 4;
  const Status of_one = prepare(least, 1, 1);
  EXPECT_TRUE(of_one.ok()) << of_one.ToString();
  EXPECT_EQ(prepare(least, 4, 4).code(), StatusCode::kInvalidArgument);
  const Status automatic = prepare(least, 4, 0);
  EXPECT_TRUE(automatic.ok()) << automatic.ToString();
}

}  // namespace
}  // namespace terrace
