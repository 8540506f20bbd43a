// The stores of a run share its quota.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/testing/hooked_file_system.h"
#include "terrace/train/run_stores.h"
#include "terrace/train/testing/small_job.h"

namespace terrace {
namespace {

std::vector<Key> Range(std::uint64_t begin, std::uint64_t end) {
  std::vector<Key> keys;
  for (std::uint64_t i = begin; i < end; ++i) keys.push_back(MixKey(i));
  return keys;
}

class RunStoresTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    Result<Job> job = Parse(std::string(kSmallJob) +
                            "ssd: {shards: 2, file_size: 1MiB, read: whole_file, quota: 64MiB}\n");
    TERRACE_ASSERT_OK(job.status());
    job_ = *job;
    Result<ModelPlan> plan = MakeModelPlan(job_, {{{"C1", 1}}, {{"integers", 13}}});
    TERRACE_ASSERT_OK(plan.status());
    plan_ = *plan;
    auto run = RunFolder::Open(&fs_, job_.output, RunFolder::Mode::kNew, &job_);
    TERRACE_ASSERT_OK(run.status());
    run_ = std::move(*run);
    RunStores::Options options;
    options.io_buffer_bytes = std::uint64_t{1} << 20;
    options.background = GetParam();
    options.drop_oldest = [this] {
      ++asked_to_drop_;
      return false;
    };
    auto stores = RunStores::Create(&fs_, Clock::Real(), &quota_, run_.get(), job_, plan_, options);
    TERRACE_ASSERT_OK(stores.status());
    stores_ = std::move(*stores);
  }
  Status Write(std::size_t shard, const std::vector<Key>& keys) {
    const std::vector<std::byte> row(plan_.tables[0].schema.row_bytes());
    const std::vector<const std::byte*> rows(keys.size(), row.data());
    return stores_->table(0)[shard]->Write(keys, rows, {});
  }

  MemoryFileSystem fs_;
  Job job_;
  ModelPlan plan_;
  DiskQuota quota_{std::uint64_t{64} << 20};
  std::unique_ptr<RunFolder> run_;
  std::unique_ptr<RunStores> stores_;
  int asked_to_drop_ = 0;
};

// What one has that is stale, though not due, goes before another one's write is refused, and
// before a checkpoint does.
TEST_P(RunStoresTest, OneMakesRoomForAnother) {
  TERRACE_ASSERT_OK(Write(1, Range(0, 5'000)));
  const std::uint64_t file_bytes = quota_.used();
  for (std::uint64_t i = 1; i < 6; ++i) {
    TERRACE_ASSERT_OK(Write(1, Range(5'000 * i, 5'000 * (i + 1))));
  }
  // Of the first file a fifth stays; of all files five sixths.
  TERRACE_ASSERT_OK(Write(1, Range(0, 4'000)));
  EXPECT_EQ(stores_->stats().compactions, 0u);
  TERRACE_ASSERT_OK(quota_.Reserve(quota_.limit() - quota_.used() - file_bytes / 2, 0));
  TERRACE_ASSERT_OK(Write(0, Range(0, 5'000)));
  EXPECT_EQ(stores_->stats().compactions, 1u);
  EXPECT_EQ(asked_to_drop_, 0);
  const Status refused = Write(0, Range(5'000, 10'000));
  EXPECT_EQ(refused.code(), StatusCode::kOutOfRoom);
  EXPECT_NE(refused.message().find("ssd.quota"), std::string::npos) << refused.message();
  EXPECT_EQ(asked_to_drop_, 1);
}

// What reads cost is measured as the stores read: by the memory plan their buffers may be short.
TEST(RunStores, ReadsAreMeasuredInTheStoresParts) {
  for (const char* index : {"key", "group"}) {
    MemoryFileSystem memory;
    HookedFileSystem fs(&memory);
    fs.disk = "device 1";
    std::uint64_t longest = 0;
    fs.after_reads = [&](std::span<const ReadRequest> requests) {
      for (const ReadRequest& request : requests) longest = std::max(longest, request.bytes_read);
    };
    const Result<Job> job =
        Parse(std::string(kSmallJob) + "ssd: {quota: 1GiB}\ntable: {index: " + index +
              ", expected_keys: 1000}\n");
    TERRACE_ASSERT_OK(job.status());
    const Result<ModelPlan> plan = MakeModelPlan(*job, {{{"C1", 1}}, {{"integers", 13}}});
    TERRACE_ASSERT_OK(plan.status());
    auto run = RunFolder::Open(&fs, job->output, RunFolder::Mode::kNew, &*job);
    TERRACE_ASSERT_OK(run.status());
    DiskQuota quota{std::uint64_t{1} << 30};
    RunStores::Options options;
    options.io_buffer_bytes = std::uint64_t{1} << 20;
    options.background = false;
    const auto stores =
        RunStores::Create(&fs, Clock::Real(), &quota, run->get(), *job, *plan, options);
    TERRACE_ASSERT_OK(stores.status());
    // By group half of it is for blocks.
    EXPECT_EQ(longest, std::string(index) == "key" ? 128u << 10 : 64u << 10);
  }
}

INSTANTIATE_TEST_SUITE_P(Background, RunStoresTest, testing::Bool());

}  // namespace
}  // namespace terrace
