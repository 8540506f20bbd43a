// What a job makes of its data: where slots lie, the texts of schemas, and the settings that
// identify a model.
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "terrace/train/run_reader.h"
#include "terrace/train/testing/small_job.h"

namespace terrace {
namespace {

// A source that has a schema and nothing else.
class SchemaSource final : public ExampleSource {
 public:
  explicit SchemaSource(DataSchema schema) : schema_(std::move(schema)) {}
  const DataSchema& schema() const override { return schema_; }
  Result<std::optional<Batch>> NextIn(std::uint32_t, std::uint32_t, Batch) override {
    return std::optional<Batch>();
  }
  Status Seek(const DataCursor&) override { return OkStatus(); }
  std::span<const InputFile> files() const override { return {}; }
  SourceStats stats() const override { return {}; }
  std::string IdentityText() const override { return "nothing"; }
  void Cancel() override {}

 private:
  const DataSchema schema_;
};

DataSchema ThreeSlots() { return {{{"C1", 1}, {"C2", 2}, {"C3", 3}}, {{"integers", 26}}}; }

TEST(ModelPlan, SlotsLieSideBySideInTheirTables) {
  Result<Job> job = Parse(std::string(kSmallJob) +
                          "tables: {ads: {dim: 4}}\n"
                          "slots: {C2: {table: ads, pooling: mean}, C3: {dim: 2}}\n"
                          "network: {wide: true}\n");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  Result<ModelPlan> plan = MakeModelPlan(*job, ThreeSlots());
  ASSERT_TRUE(plan.ok()) << plan.status().ToString();
  ASSERT_EQ(plan->tables.size(), 3u);
  EXPECT_EQ(plan->tables[0].schema.table(), "default");
  EXPECT_EQ(plan->tables[1].schema.table(), "ads");
  EXPECT_EQ(plan->tables[2].schema.table(), "default.dim2");
  EXPECT_EQ(plan->tables[1].slots, std::vector<std::uint32_t>{1});
  EXPECT_EQ(plan->slots[1].input_offset, 8u);
  EXPECT_EQ(plan->slots[2].input_offset, 12u);
  EXPECT_EQ(plan->slots[1].pooling, SlotJob::Pooling::kMean);
  EXPECT_EQ(plan->inputs.embedding_width, 14u);
  EXPECT_EQ(plan->inputs.dense_width, 26u);
  EXPECT_TRUE(plan->inputs.wide);
  ASSERT_NE(plan->tables[0].schema.FindSegment("wide"), nullptr);
  EXPECT_EQ(plan->tables[0].schema.FindSegment("wide")->optimizer.type,
            SparseOptimizerSpec::Type::kAdaGrad);
}

TEST(ModelPlan, RefusesWhatTheDataDoesNotHave) {
  const auto error = [](const std::string& lines) {
    Result<Job> job = Parse(kSmallJob + lines);
    return job.ok() ? MakeModelPlan(*job, ThreeSlots()).status().message() : "the job is wrong";
  };
  EXPECT_EQ(error("slots: {c1: {dim: 3}}\n"),
            "slots.c1: the data has no slot 'c1'; did you mean 'C1'?");
  EXPECT_EQ(error("slots: {user: {dim: 3}}\n"),
            "slots.user: the data has no slot 'user'; it has: C1, C2, C3");
  EXPECT_EQ(error("slots: {I1: {dim: 3}}\n"),
            "slots.I1: the data has no slot 'I1'; integer columns are slots where data.integers is "
            "bucket or both");
  EXPECT_EQ(error("tables: {ads: {}}\n"),
            "tables.ads: no slot uses this table; give it one under slots, or take it out");
}

TEST(ModelPlan, BlocksAreOfTablesWithAnIndexByGroup) {
  const auto plan = [](const std::string& index) {
    Result<Job> job = Parse(std::string(kSmallJob) +
                            "table: {dim: 8, index: group, group_block: 4KiB, expected_keys: 9}\n"
                            "tables: {long: {dim: 1024, index: " +
                            index + "}}\nslots: {C1: {table: long}}\n");
    return job.ok() ? MakeModelPlan(*job, ThreeSlots()).status() : job.status();
  };
  const Status group = plan("group");
  EXPECT_EQ(group.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(group.message(), testing::HasSubstr("tables.long: blocks of 4KiB are too short"));
  EXPECT_EQ(plan("auto").ToString(), group.ToString());
  const Status key = plan("key");
  EXPECT_TRUE(key.ok()) << key.ToString();
}

TEST(SchemaText, GivesTheFieldsBack) {
  Result<Job> job = Parse(std::string(kSmallJob) +
                          "table: {optimizer: {type: adam}}\n"
                          "network: {wide: true}\n");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  const ModelPlan plan = *MakeModelPlan(*job, ThreeSlots());
  const RowSchema& schema = plan.tables[0].schema;
  Result<std::vector<RowField>> fields = FieldsOfSchemaText(schema.ToText());
  ASSERT_TRUE(fields.ok()) << fields.status().ToString();
  ASSERT_EQ(fields->size(), schema.fields().size());
  for (std::size_t i = 0; i < fields->size(); ++i) {
    const RowField& expected = schema.fields()[i];
    EXPECT_EQ((*fields)[i].name, expected.name);
    EXPECT_EQ((*fields)[i].offset, expected.offset);
    EXPECT_EQ((*fields)[i].count, expected.count);
    EXPECT_EQ((*fields)[i].type, expected.type);
  }
  EXPECT_FALSE(FieldsOfSchemaText("row 1\nfield show offset x\n").ok());
  EXPECT_FALSE(FieldsOfSchemaText("").ok());
}

TEST(IdentifyingSettings, DifferWhereTheBitsWould) {
  const SchemaSource source(ThreeSlots());
  const auto settings = [&source](const std::string& lines) {
    Result<Job> job = Parse(kSmallJob + lines);
    EXPECT_TRUE(job.ok()) << job.status().ToString();
    Result<ModelPlan> plan = MakeModelPlan(*job, source.schema());
    EXPECT_TRUE(plan.ok()) << plan.status().ToString();
    return IdentifyingSettings(*job, *plan, source);
  };
  const auto base = settings("");
  for (const char* same :
       {"device: auto\n", "binding: off\n", "memory: {budget: 1GiB}\n", "training: {batch: 1024}\n",
        "slots: {C1: {dim: 8}}\n", "pipeline: {depth: 0}\n", "checkpoint: {keep: 5}\n",
        "cache: {policy: pass_lfu}\n", "cache: {policy: lru_lfu, lru_share: 0.1}\n",
        "ssd: {quota: 1GiB, io_threads: 4, read: whole_file, merge_gap: 1KiB}\n",
        "ssd: {compaction: stale_share, stale_share: 0.2}\n",
        "validation: {every_examples: 100}\n"}) {
    EXPECT_EQ(settings(same), base) << same;
  }
  std::set<std::string> seen;
  for (const char* other : {"seed: 1\n",
                            "training: {threads: 1}\n",
                            "training: {minibatch: 256}\n",
                            "table: {dim: 9}\n",
                            "table: {l2: 0.1}\n",
                            "table: {optimizer: {learning_rate: 0.06}}\n",
                            "table: {optimizer: {learning_rate: {base: 0.05, warmup_steps: 1}}}\n",
                            "table: {optimizer: {epsilon: 1e-7}}\n",
                            "table: {optimizer: {type: ftrl}}\n",
                            "table: {optimizer: {type: ftrl, l1: 0.5}}\n",
                            "table: {optimizer: {type: ftrl, learning_rate: 0.5}}\n",
                            "table: {optimizer: {type: adam, beta2: 0.5}}\n",
                            "network: {wide: true, wide_l2: 0.5}\n",
                            "network: {wide: true, wide_optimizer: {learning_rate: 0.5}}\n",
                            "table: {initializer: {scale: 0.02}}\n",
                            "slots: {C1: {pooling: mean}}\n",
                            "network: {wide: true}\n",
                            "network: {hidden: [2]}\n",
                            "network: {optimizer: {l2: 0.1}}\n",
                            "network: {optimizer: {clip_norm: 1}}\n",
                            "network: {optimizer: {learning_rate: 0.002}}\n"}) {
    const auto differing = settings(other);
    EXPECT_NE(differing, base) << other;
    EXPECT_TRUE(seen.insert(fmt::format("{}", fmt::join(differing, "|"))).second) << other;
  }
  EXPECT_EQ(base.back().first, "processor");
  EXPECT_THAT(base.back().second, testing::Not(testing::IsEmpty()));
}

TEST(SchemaText, SaysWhenKeysGetRowsAndWhenRowsExpire) {
  SegmentSpec segment;
  segment.name = "embedding";
  segment.dim = 2;
  AdmissionSpec admission{7, 12345};
  ExpirySpec expiry;
  expiry.every_examples = 1000;
  expiry.after = 77;
  expiry.below = 1.0 / 3;
  expiry.show_weight = 0.1 + 0.2;
  expiry.click_weight = 1e20;
  expiry.decay = 1 - 0x1p-52;
  const std::string text = RowSchema::Create("t", {segment}, admission, expiry)->ToText();
  const Result<AdmissionSpec> admits = AdmissionOfSchemaText(text);
  ASSERT_TRUE(admits.ok()) << admits.status().ToString();
  EXPECT_EQ(admits->after, 7u);
  EXPECT_EQ(admits->filter_bytes, 12345u);
  const Result<ExpiryRule> rule = ExpiryOfSchemaText(text);
  ASSERT_TRUE(rule.ok()) << rule.status().ToString();
  const ExpirySpec& read = rule->spec();
  EXPECT_EQ(read.every_examples, 1000u);
  EXPECT_EQ(read.after, 77u);
  EXPECT_EQ(read.below, expiry.below);
  EXPECT_EQ(read.show_weight, expiry.show_weight);
  EXPECT_EQ(read.click_weight, expiry.click_weight);
  EXPECT_EQ(read.decay, expiry.decay);
  const std::string plain = RowSchema::Create("t", {segment})->ToText();
  EXPECT_FALSE(AdmissionOfSchemaText(plain)->on());
  EXPECT_FALSE(ExpiryOfSchemaText(plain)->on());
  EXPECT_EQ(text.substr(0, plain.size()), plain);
  for (const char* line : {"admission", "admission after 1 filter 4096", "admission after x"}) {
    EXPECT_EQ(AdmissionOfSchemaText(line).status().code(), StatusCode::kCorruption) << line;
  }
  for (const char* line :
       {"expiry", "expiry every 1 after 0 below 0 show_weight 0 click_weight 0 decay 1",
        "expiry every 1 after 1 below 1 show_weight 2 click_weight 1 decay 1",
        "expiry every 1 after 1 below 1 show_weight 0 click_weight 1 decay 2"}) {
    EXPECT_EQ(ExpiryOfSchemaText(line).status().code(), StatusCode::kCorruption) << line;
  }
}

}  // namespace
}  // namespace terrace
