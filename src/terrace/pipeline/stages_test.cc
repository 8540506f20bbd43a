#include "terrace/pipeline/stages.h"

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "terrace/base/thread.h"
#include "terrace/cache/testing/cache_fixture.h"
#include "terrace/data/example_source.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

using ::testing::ElementsAre;

constexpr std::uint32_t kMinibatch = 16;

DataOptions LogOf(std::uint64_t minibatches) {
  DataOptions data;
  data.format = "synthetic";
  data.rows = minibatches * kMinibatch;
  data.cardinality = 100;
  data.categorical_slots = 2;
  return data;
}

// Runs stages 1 and 2 over a log of 192 mini-batches in batches of 64, and gives each working set
// back at once. Before set number `drains_at` the caches are to shrink.
std::vector<std::uint32_t> MinibatchesOfSets(std::size_t drains_at) {
  MemoryFileSystem fs;
  auto source = OpenSource(&fs, LogOf(192));
  EXPECT_TRUE(source.ok());
  cache_testing::Fixture fixture(4 << 20, /*background=*/false);
  EXPECT_TRUE(fixture.Open().ok());
  std::vector<std::uint32_t> sets;
  PullStage::Options options;
  options.slots.resize(2);
  options.minibatch = kMinibatch;
  options.before_pull = [&]() -> Result<bool> { return sets.size() == drains_at; };
  std::uint64_t pulled = 0;
  options.after_pull = [&](const DataCursor& cursor) { pulled = cursor.examples; };
  ReadStage read(source->get(), 64 * kMinibatch, kMinibatch);
  PullStage pull(options, {fixture.cache.get()});
  const Stage::Emit take = [&](std::unique_ptr<WorkItem> set) {
    if (set->minibatches > 0) sets.push_back(set->minibatches);
    EXPECT_EQ(pulled, set->batch->first_example + set->end_example);
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

// A working set of one mini-batch with as many keys as examples in each of two tables.
std::unique_ptr<WorkItem> SetOfTwoTables(Key first, std::uint32_t examples) {
  auto batch = std::make_shared<Batch>();
  batch->examples = examples;
  batch->slots = 2;
  batch->label.assign(examples, 0);
  batch->key_begin.push_back(0);
  for (std::uint32_t e = 0; e < examples; ++e) {
    for (int slot = 0; slot < 2; ++slot) {
      batch->keys.push_back(first + e);
      batch->key_begin.push_back(static_cast<std::uint32_t>(batch->keys.size()));
    }
  }
  auto item = std::make_unique<WorkItem>();
  item->batch = std::move(batch);
  return item;
}

TEST(PullStage, ASetThatWaitsInOneTableHoldsItsRowsOfTheTablesBefore) {
  cache_testing::Fixture roomy(4 << 20, /*background=*/true);
  cache_testing::Fixture tight(1 << 18, /*background=*/true);
  ASSERT_TRUE(roomy.Open().ok() && tight.Open().ok());
  const auto rows = static_cast<std::uint32_t>(tight.cache->MaxPinnedRows() * 2 / 3);
  ASSERT_GE(roomy.cache->MaxPinnedRows(), 2 * rows);
  PullStage::Options options;
  options.slots = {{0, 0, false}, {1, 0, false}};
  options.minibatch = rows;
  options.resident_sets = 1;
  PullStage pull(options, {roomy.cache.get(), tight.cache.get()});
  std::vector<std::unique_ptr<WorkItem>> sets;
  const auto pull_set = [&](Key first) {
    bool done = false;
    return pull.Process(
        SetOfTwoTables(first, rows),
        [&](std::unique_ptr<WorkItem> set) -> Status {
          for (TableWork& table : set->tables) TERRACE_RETURN_IF_ERROR(table.pinned.Wait());
          sets.push_back(std::move(set));
          return OkStatus();
        },
        &done);
  };
  ASSERT_TRUE(pull_set(1).ok());
  std::unique_ptr<WorkItem> first = std::move(sets[0]);
  Status status;
  Thread second("second", ThreadPriority::kNormal, [&] { status = pull_set(1'000'000); });
  while (tight.cache->stats().reserve_waits == 0) std::this_thread::yield();
  EXPECT_EQ(roomy.cache->stats().pinned_rows, 2 * rows);
  EXPECT_EQ(tight.cache->stats().pinned_rows, rows);
  pull.Recycle(std::move(first));
  second.Join();
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(roomy.cache->stats().pinned_rows, rows);
  EXPECT_EQ(tight.cache->stats().pinned_rows, rows);
}

// What is done after the last pull is done again as each set goes, while others are alive.
TEST(PullStage, WritesAheadAfterEachOfTheLastSets) {
  cache_testing::Fixture fixture(4 << 20, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  constexpr std::size_t kSets = 3;
  std::vector<std::unique_ptr<WorkItem>> alive;
  std::vector<std::size_t> alive_at_call;
  PullStage* stage = nullptr;
  PullStage::Options options;
  options.slots.resize(1);
  options.minibatch = kMinibatch;
  options.max_sets = kSets;
  options.after_last_pull = [&] {
    alive_at_call.push_back(alive.size());
    // Each call lets one set go: training has done it.
    if (!alive.empty()) {
      stage->Recycle(std::move(alive.back()));
      alive.pop_back();
    }
    return OkStatus();
  };
  PullStage pull(options, {fixture.cache.get()});
  stage = &pull;
  for (std::size_t set = 0; set < kSets; ++set) {
    auto batch = std::make_shared<Batch>();
    batch->examples = kMinibatch;
    batch->slots = 1;
    batch->label.assign(kMinibatch, 0);
    for (std::uint32_t e = 0; e <= kMinibatch; ++e) batch->key_begin.push_back(e);
    for (std::uint32_t e = 0; e < kMinibatch; ++e) batch->keys.push_back(1 + e + 8 * set);
    auto item = std::make_unique<WorkItem>();
    item->batch = std::move(batch);
    bool done = false;
    const Stage::Emit take = [&](std::unique_ptr<WorkItem> planned) -> Status {
      for (TableWork& table : planned->tables) TERRACE_RETURN_IF_ERROR(table.pinned.Wait());
      alive.push_back(std::move(planned));
      return OkStatus();
    };
    ASSERT_TRUE(pull.Process(std::move(item), take, &done).ok());
  }
  ASSERT_TRUE(pull.AfterInput().ok());
  EXPECT_THAT(alive_at_call, ElementsAre(3, 2, 1));
}

// Counts the batches that it gave out.
class CountingSource final : public ExampleSource {
 public:
  explicit CountingSource(std::unique_ptr<ExampleSource> source) : source_(std::move(source)) {}
  const DataSchema& schema() const override { return source_->schema(); }
  Result<std::optional<Batch>> NextIn(std::uint32_t examples, std::uint32_t minibatch,
                                      Batch old) override {
    ++batches;
    return source_->NextIn(examples, minibatch, std::move(old));
  }
  Status Seek(const DataCursor& cursor) override { return source_->Seek(cursor); }
  std::span<const InputFile> files() const override { return source_->files(); }
  SourceStats stats() const override { return source_->stats(); }
  std::string IdentityText() const override { return source_->IdentityText(); }
  void Cancel() override { source_->Cancel(); }
  std::atomic<std::uint32_t> batches{0};

 private:
  const std::unique_ptr<ExampleSource> source_;
};

// While training takes none, as many batches are alive as the memory plan counts.
TEST(Stages, AsManyBatchesAreAliveAsAreCounted) {
  MemoryFileSystem fs;
  auto opened = OpenSource(&fs, LogOf(100));
  ASSERT_TRUE(opened.ok());
  CountingSource source(std::move(*opened));
  cache_testing::Fixture fixture(4 << 20, /*background=*/true);
  ASSERT_TRUE(fixture.Open().ok());
  constexpr std::uint32_t kSets = 3;
  PullStage::Options options;
  options.slots.resize(2);
  options.minibatch = kMinibatch;
  options.max_sets = kSets;
  ReadStage read(&source, kMinibatch, kMinibatch);
  PullStage pull(options, {fixture.cache.get()});
  HostStage stage;
  std::atomic<bool> go_on{false};
  TrainStage train(
      [&](WorkItem*, std::uint32_t) {
        while (!go_on) std::this_thread::yield();
        return OkStatus();
      },
      [&](std::unique_ptr<WorkItem> item) { pull.Recycle(std::move(item)); });
  const std::vector<std::size_t> capacities = {2, 1, 1};
  Pipeline pipeline({&read, &pull, &stage, &train}, capacities, Clock::Real());
  const std::uint32_t counted = kSets + BatchesAhead(capacities[0]);
  Thread watch("watch", ThreadPriority::kNormal, [&] {
    while (source.batches < counted) std::this_thread::yield();
    const double end = Clock::Real()->MonotonicSeconds() + 0.1;
    while (Clock::Real()->MonotonicSeconds() < end) std::this_thread::yield();
    EXPECT_EQ(source.batches, counted);
    go_on = true;
  });
  EXPECT_TRUE(pipeline.Run().ok());
  watch.Join();
  EXPECT_EQ(source.batches, 101u);  // And the end.
}

}  // namespace
}  // namespace terrace
