// The whole pipeline with a network free of torch: synthetic log, real cache and store on a file
// system in memory. The trained rows must be the same bits at every depth, cache size, batch and
// shard count. ThreadSanitizer runs this.
#include <cstring>
#include <map>

#include <gtest/gtest.h>

#include "terrace/base/clock.h"
#include "terrace/data/example_source.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/pipeline/stages.h"
#include "terrace/pipeline/testing/linear_network.h"
#include "terrace/pipeline/train_step.h"
#include "terrace/store/store.h"

namespace terrace {
namespace {

struct Setting {
  std::size_t depth = 0;
  std::uint64_t cache_bytes = std::uint64_t{64} << 20;
  std::uint32_t batch = 512;
  std::uint32_t shards = 1;
  std::uint32_t flush_every = 0;  // Mini-batches; 0: at the end alone.
};

struct Outcome {
  std::map<Key, std::vector<std::byte>> rows;
  std::vector<float> dense;
  double loss = 0;
  std::uint64_t evictions = 0;
};

constexpr std::uint32_t kMinibatch = 64;
constexpr std::uint32_t kDim = 8;

std::vector<std::unique_ptr<Store>> MakeStores(const Setting& setting, std::uint32_t row_bytes,
                                               FileSystem* fs, DiskQuota* quota) {
  std::vector<std::unique_ptr<Store>> stores;
  for (std::uint32_t shard = 0; shard < setting.shards; ++shard) {
    StoreOptions options;
    options.directory = "/rows/shard-" + std::to_string(shard);
    options.table = "default";
    options.shard = shard;
    options.row_bytes = row_bytes;
    options.file_bytes = std::uint64_t{256} << 10;
    options.io_buffer_bytes = std::uint64_t{1} << 20;
    options.background_compaction = setting.depth > 0;
    auto store = Store::Create(fs, Clock::Real(), quota, options);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    stores.push_back(std::move(*store));
  }
  return stores;
}

RowSchema MakeSchema() {
  SegmentSpec embedding;
  embedding.name = "embedding";
  embedding.dim = kDim;
  SegmentSpec wide;
  wide.name = "wide";
  wide.dim = 1;
  wide.initializer.type = InitializerSpec::Type::kZeros;
  return RowSchema::Create("default", {embedding, wide}).value();
}

Outcome Train(const Setting& setting) {
  Outcome outcome;
  MemoryFileSystem fs;
  DataOptions data;
  data.format = "synthetic";
  data.rows = 20000;
  data.cardinality = 1000000;
  data.zipf = 1.01;
  data.categorical_slots = 5;
  data.seed = 3;
  auto source = OpenSource(&fs, data);
  EXPECT_TRUE(source.ok()) << source.status().ToString();

  const RowSchema schema_value = MakeSchema();
  const RowSchema* schema = &schema_value;

  NetworkInputSpec inputs;
  const auto& slots = (*source)->schema().slots;
  inputs.embedding_width = kDim * static_cast<std::uint32_t>(slots.size());
  inputs.dense_width = (*source)->schema().dense_width();
  inputs.wide = true;
  LinearNetwork network(inputs);
  WorkerGroup workers("compute", 2);
  StepTable table;
  table.schema = schema;
  PullStage::Options pull_options;
  pull_options.minibatch = kMinibatch;
  pull_options.resident_sets = setting.depth == 0 ? 1 : 2;
  pull_options.max_sets = setting.depth == 0 ? 0 : static_cast<std::uint32_t>(setting.depth) + 1;
  for (std::uint32_t s = 0; s < slots.size(); ++s) {
    table.slots.push_back({s, s * kDim, false});
    pull_options.slots.push_back({0, s * kDim, false});
  }
  auto executor = StepExecutor::Create({table}, kMinibatch, &network, &workers);
  EXPECT_TRUE(executor.ok());

  DiskQuota quota(std::uint64_t{1} << 40);
  const std::vector<std::unique_ptr<Store>> stores =
      MakeStores(setting, schema->row_bytes(), &fs, &quota);
  std::vector<Store*> store_pointers;
  for (const auto& store : stores) store_pointers.push_back(store.get());
  RowCacheOptions cache_options;
  cache_options.row_bytes = schema->row_bytes();
  cache_options.capacity_bytes = setting.cache_bytes;
  cache_options.flush_bytes = std::uint64_t{256} << 10;
  cache_options.background = setting.depth > 0;
  cache_options.create_row = [schema](Key key, std::byte* row) {
    schema->InitializeRow(9, key, row);
  };
  auto cache = RowCache::Create(cache_options, store_pointers);
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();

  StepRates rates;
  rates.sparse = {{0.05f, 0.05f}};
  rates.dense = 0.01f;
  std::uint64_t seen = 0;
  ReadStage read(source->get(), setting.batch, kMinibatch);
  PullStage pull(pull_options, {cache->get()});
  HostStage stage;
  TrainStage train(
      [&](WorkItem* item, std::uint32_t m) -> Status {
        if (item->minibatches == 0) return OkStatus();
        auto predictions = (*executor)->Train(item, m, rates, seen,
                                              [](std::uint32_t) { return std::string("log"); });
        TERRACE_RETURN_IF_ERROR(predictions.status());
        for (const SlicePrediction& slice : *predictions) outcome.loss += slice.logloss_sum;
        seen += item->MinibatchEnd(m) - item->MinibatchBegin(m);
        if (setting.flush_every == 0 || seen / kMinibatch % setting.flush_every != 0) {
          return OkStatus();
        }
        for (TableWork& work : item->tables) work.marked = 0;
        return (*cache)->FlushDirty();
      },
      [&](std::unique_ptr<WorkItem> item) { pull.Recycle(std::move(item)); });
  Pipeline pipeline({&read, &pull, &stage, &train},
                    std::vector<std::size_t>(setting.depth == 0 ? 0 : 3, setting.depth),
                    Clock::Real());
  const Status status = pipeline.Run();
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(seen, 20000u);
  EXPECT_TRUE((*cache)->FlushDirty().ok());
  outcome.evictions = (*cache)->stats().evictions;
  for (Store* store : store_pointers) {
    const Status visited = store->ForEachRow(std::uint64_t{1} << 20, [&](const RowView& row) {
      outcome.rows.emplace(row.key, std::vector<std::byte>(row.row.begin(), row.row.end()));
      return OkStatus();
    });
    EXPECT_TRUE(visited.ok()) << visited.ToString();
  }
  outcome.dense = network.Save().buffers[0];
  return outcome;
}

TEST(TrainingPipeline, TrainsTheSameBitsAtEveryDepthCacheBatchAndShards) {
  const Outcome reference = Train({});
  EXPECT_GT(reference.rows.size(), 30000u);
  EXPECT_EQ(reference.evictions, 0u);
  const std::uint64_t kSmall = std::uint64_t{3} << 20;
  for (const Setting& setting :
       {Setting{0, kSmall, 512, 1}, Setting{1, kSmall, 2048, 2}, Setting{2, kSmall, 64, 1},
        Setting{4, std::uint64_t{64} << 20, 4096, 3}, Setting{2, kSmall, 8192, 4},
        // As checkpoints in the midst of working sets do: what is trained after one is dirty again.
        Setting{0, kSmall, 2048, 1, 5}, Setting{2, kSmall, 2048, 2, 3}}) {
    const Outcome outcome = Train(setting);
    EXPECT_EQ(outcome.evictions > 0, setting.cache_bytes == kSmall);
    EXPECT_EQ(outcome.loss, reference.loss);
    EXPECT_EQ(outcome.dense, reference.dense);
    EXPECT_TRUE(outcome.rows == reference.rows)
        << "depth " << setting.depth << " batch " << setting.batch << " flush every "
        << setting.flush_every;
  }
}

}  // namespace
}  // namespace terrace
