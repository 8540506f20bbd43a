#include "terrace/pipeline/stages.h"

#include <memory>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "terrace/cache/testing/cache_fixture.h"
#include "terrace/data/example_source.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

using ::testing::ElementsAre;

constexpr std::uint32_t kMinibatch = 16;

// Runs stages 1 and 2 over a log of 192 mini-batches in batches of 64, and gives each working set
// back at once. Before set number `drains_at` the caches are to shrink.
std::vector<std::uint32_t> MinibatchesOfSets(std::size_t drains_at) {
  MemoryFileSystem fs;
  DataOptions data;
  data.format = "synthetic";
  data.rows = 192 * kMinibatch;
  data.cardinality = 100;
  data.categorical_slots = 2;
  auto source = OpenSource(&fs, data);
  EXPECT_TRUE(source.ok());
  cache_testing::Fixture fixture(4 << 20, /*background=*/false);
  EXPECT_TRUE(fixture.Open().ok());
  std::vector<std::uint32_t> sets;
  PullStage::Options options;
  options.slots.resize(2);
  options.minibatch = kMinibatch;
  options.before_pull = [&]() -> Result<bool> { return sets.size() == drains_at; };
  ReadStage read(source->get(), 64 * kMinibatch, kMinibatch);
  PullStage pull(options, {fixture.cache.get()});
  const Stage::Emit take = [&](std::unique_ptr<WorkItem> set) {
    if (set->minibatches > 0) sets.push_back(set->minibatches);
    pull.Recycle(std::move(set));
    return OkStatus();
  };
  const Stage::Emit hand_on = [&](std::unique_ptr<WorkItem> batch) {
    bool done = false;
    return pull.Process(std::move(batch), take, &done);
  };
  for (bool done = false; !done;) {
    const Status status = read.Process(nullptr, hand_on, &done);
    EXPECT_TRUE(status.ok()) << status.ToString();
    if (!status.ok()) break;
  }
  return sets;
}

TEST(PullStage, SetsAreSmallAtTheStartAndAfterAllHadToLeave) {
  EXPECT_THAT(MinibatchesOfSets(1000), ElementsAre(4, 8, 16, 32, 4, 64, 64));
  EXPECT_THAT(MinibatchesOfSets(5), ElementsAre(4, 8, 16, 32, 4, 4, 8, 16, 32, 4, 64));
}

}  // namespace
}  // namespace terrace
