#include "terrace/train/trainer.h"

#include <atomic>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "terrace/base/testing/temporary_folder.h"

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

}  // namespace
}  // namespace terrace
