#include "terrace/train/trainer.h"

#include <atomic>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "terrace/base/sync_point.h"
#include "terrace/base/testing/temporary_folder.h"
#include "terrace/data/click_log_generator.h"
#include "terrace/store/parameter_file.h"

namespace terrace {
namespace {

Result<Job> SmallJob(const TemporaryFolder& folder) {
  return ParseJob(fmt::format("output: {}/run\n"
                              "data: {{format: synthetic, rows: 2000, cardinality: 1000}}\n"
                              "table: {{dim: 4}}\nnetwork: {{hidden: [4]}}\n"
                              "training: {{minibatch: 256, batch: 512}}\n"
                              "memory: {{budget: 2GiB}}\n",
                              folder.path().string()),
                  "j.yaml", {});
}

// A signal that comes while a command looks at what it is to do leaves all as it is.
TEST(TrainJob, ASignalBeforeTheRunBeginsChangesNothing) {
  TemporaryFolder folder;
  const Result<Job> job = SmallJob(folder);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  std::atomic<int> signals{1};
  FileSystem* const fs = FileSystem::Posix();
  EXPECT_EQ(TrainJob(fs, *job, RunMode::kNew, &signals).status().code(), StatusCode::kAborted);
  EXPECT_EQ(fs->Stat(job->output).status().code(), StatusCode::kNotFound);
  signals = 0;
  const Result<TrainOutcome> trained = TrainJob(fs, *job, RunMode::kNew, &signals);
  ASSERT_TRUE(trained.ok()) << trained.status().ToString();
  signals = 1;
  EXPECT_EQ(TrainJob(fs, *job, RunMode::kOverwrite, &signals).status().code(),
            StatusCode::kAborted);
  // The run is still there, and finished.
  signals = 0;
  const Result<TrainOutcome> resumed = TrainJob(fs, *job, RunMode::kResume, &signals);
  ASSERT_TRUE(resumed.ok()) << resumed.status().ToString();
  EXPECT_TRUE(resumed->already_finished);
}

// Reading up to where the run was may take as long as training to there.
TEST(TrainJob, ASignalWhileNewFilesAreReadLosesNothing) {
  TemporaryFolder folder;
  FileSystem* const fs = FileSystem::Posix();
  ClickLogSpec spec;
  spec.cardinality = 1000;
  std::vector<std::string> logs;
  for (const char* const name : {"a.tsv", "b.tsv"}) {
    logs.push_back((folder.path() / name).string());
    ASSERT_TRUE(WriteClickLog(fs, spec, 2000, logs.back(), {}).ok());
  }
  const auto job_of = [&](const std::string& log, int examples) {
    return *ParseJob(fmt::format("output: {}/run\n"
                                 "data: {{train: [{}]}}\n"
                                 "table: {{dim: 4}}\nnetwork: {{hidden: [4]}}\n"
                                 "training: {{minibatch: 256, batch: 512, max_examples: {}}}\n"
                                 "memory: {{budget: 2GiB}}\nssd: {{merge_gap: 16KiB}}\n"
                                 "resume: {{accept: [data]}}\n",
                                 folder.path().string(), log, examples),
                     "j.yaml", {});
  };
  std::atomic<int> signals{0};
  ASSERT_TRUE(TrainJob(fs, job_of(logs[0], 512), RunMode::kNew, &signals).ok());
  // The signal comes as the rows are opened, when a file that was left over is removed.
  std::ofstream(folder.path() / "run/rows/default/shard-0" / ParameterFileName(999)) << "x";
  SyncPoint::Arm([&signals](std::string_view name) {
    if (name == "store.open.before_remove") signals = 1;
  });
  const Job job = job_of(logs[1], 1024);
  const Status stopped = TrainJob(fs, job, RunMode::kResume, &signals).status();
  SyncPoint::Arm(nullptr);
  EXPECT_EQ(signals, 1);
  EXPECT_EQ(stopped.code(), StatusCode::kAborted) << stopped.ToString();
  signals = 0;
  const Result<TrainOutcome> resumed = TrainJob(fs, job, RunMode::kResume, &signals);
  ASSERT_TRUE(resumed.ok()) << resumed.status().ToString();
  EXPECT_EQ(resumed->summary.examples, 1024u);
  EXPECT_FALSE(resumed->interrupted);
}

}  // namespace
}  // namespace terrace
