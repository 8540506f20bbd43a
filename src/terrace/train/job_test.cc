#include "terrace/train/job.h"

#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/train/job_keys.h"
#include "terrace/train/testing/small_job.h"

namespace terrace {
namespace {

// The small job with further lines.
std::string ErrorOf(const std::string& lines, const std::vector<std::string>& overrides = {}) {
  Result<Job> job = Parse(kSmallJob + lines, overrides);
  if (job.ok()) return "no error";
  EXPECT_EQ(job.status().code(), StatusCode::kInvalidArgument);
  return job.status().message();
}

TEST(ParseJob, TwoLinesAreAWholeJob) {
  Result<Job> job = Parse(kSmallJob);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->output, "runs/a");
  EXPECT_EQ(job->train_data.files, std::vector<std::string>{"a.tsv"});
  EXPECT_FALSE(job->has_validation);
  EXPECT_EQ(job->table.dim, 8u);
  EXPECT_EQ(job->table.name, "default");
  EXPECT_FLOAT_EQ(job->table.learning_rate.At(0), 0.05f);
  EXPECT_FLOAT_EQ(job->network_learning_rate.At(0), 0.001f);
  EXPECT_EQ(job->training.batch, 65536u);
  EXPECT_EQ(job->memory.budget_bytes, std::uint64_t{2} << 30);
  EXPECT_EQ(job->pipeline.depth, 2);
  EXPECT_EQ(job->checkpoint.keep, 2);
}

TEST(ParseJob, ReadsEveryFixedName) {
  Result<Job> job = Parse(R"(
seed: 7
device: cpu
output: runs/criteo
data: {format: criteo, train: [logs/*.tsv.zst], validation: [v.tsv], epochs: 3}
table: {dim: 16, optimizer: {type: adagrad, learning_rate: 0.05}, initializer: {type: uniform, scale: 0.01}, l2: 0}
tables: {ads: {dim: 4, optimizer: {type: ftrl, learning_rate: 0.1, l1: 1}}, users: {}}
slots: {C1: {table: ads, dim: 2, pooling: mean}}
network: {type: dnn, hidden: [64, 32], wide: true, optimizer: {type: adam, learning_rate: {base: 0.002, warmup_steps: 100, decay: linear, decay_steps: 1e3}, l2: 0.5, clip_norm: null}}
training: {batch: 65_536, minibatch: 512, threads: 1}
validation: {every_examples: null}
memory: {budget: 320MiB}
ssd: {paths: [d0, d1], quota: 1.5GiB, shards: 2, io_threads: 3, read: whole_file, merge_gap: 32KiB, compaction: model_size, over_provisioning: 0.1, rated_writes: 600TB}
pipeline: {depth: 0, queues: {read: 3, pull: null}}
checkpoint: {every_batches: 5, keep: 7}
)");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->seed, 7u);
  EXPECT_EQ(job->train_data.seed, 7u);
  EXPECT_EQ(job->train_data.epochs, 3u);
  EXPECT_TRUE(job->has_validation);
  EXPECT_EQ(job->validation_data.epochs, 1u);
  EXPECT_EQ(job->validation_data.files, std::vector<std::string>{"v.tsv"});
  ASSERT_EQ(job->tables.size(), 2u);
  EXPECT_EQ(job->tables["ads"].dim, 4u);
  EXPECT_EQ(job->tables["ads"].optimizer.type, SparseOptimizerSpec::Type::kFtrl);
  EXPECT_FLOAT_EQ(job->tables["ads"].optimizer.alpha, 0.1f);
  EXPECT_EQ(job->tables["users"].dim, 16u);
  EXPECT_EQ(job->tables["users"].name, "users");
  EXPECT_EQ(job->slots["C1"].pooling, SlotJob::Pooling::kMean);
  EXPECT_EQ(job->network.hidden, (std::vector<std::uint32_t>{64, 32}));
  EXPECT_FLOAT_EQ(job->network_learning_rate.At(0), 0.002f / 100);
  EXPECT_FLOAT_EQ(job->network_learning_rate.At(99), 0.002f);
  EXPECT_FLOAT_EQ(job->network_learning_rate.At(600), 0.001f);
  EXPECT_FLOAT_EQ(job->network_learning_rate.At(100'000), 0.0f);
  EXPECT_EQ(job->ssd.quota_bytes, std::uint64_t{3} << 29);
  EXPECT_EQ(job->ssd.read, ReadMode::kWholeFile);
  EXPECT_EQ(job->ssd.merge_gap_bytes, 32u << 10);
  EXPECT_EQ(job->ssd.compaction, CompactionPolicy::kModelSize);
  EXPECT_EQ(job->ssd.over_provisioning, 0.1);
  EXPECT_EQ(job->ssd.rated_write_bytes, 600'000'000'000'000u);
  EXPECT_EQ(job->pipeline.queues, (std::map<std::string, int>{{"read", 3}}));
}

TEST(ParseJob, TheGapOfReadsIsMeasuredUnlessGiven) {
  Result<Job> job = Parse(kSmallJob);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_FALSE(job->ssd.merge_gap_bytes.has_value());
  for (const char* gap : {"auto", "0", "4096", "1MiB"}) {
    job = Parse(kSmallJob + fmt::format("ssd: {{merge_gap: {}}}\n", gap));
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    Result<Job> again = Parse(JobToYaml(*job));
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(job->ssd.merge_gap_bytes, again->ssd.merge_gap_bytes) << gap;
    EXPECT_EQ(job->ssd.merge_gap_bytes.has_value(), std::string(gap) != "auto");
  }
  for (const char* gap : {"none", "[1]", "-1", "null"}) {
    EXPECT_FALSE(Parse(kSmallJob + fmt::format("ssd: {{merge_gap: {}}}\n", gap)).ok()) << gap;
  }
}

TEST(ParseJob, EvictionPolicyAndItsSettings) {
  Result<Job> job = Parse(kSmallJob);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->cache.eviction.type, EvictionType::kS3Fifo);
  const std::pair<const char*, EvictionType> cases[] = {
      {"policy: s3_fifo", EvictionType::kS3Fifo},
      {"policy: lru_lfu, lru_share: 0.25, half_life: 3", EvictionType::kLruLfu},
      {"policy: pass_lfu, half_life: 0", EvictionType::kPassLfu},
      // Settings of an LFU alone ask for one, as in jobs that are older than the choice.
      {"lru_share: 0.25", EvictionType::kLruLfu},
      {"half_life: 3", EvictionType::kLruLfu}};
  for (const auto& [text, type] : cases) {
    job = Parse(kSmallJob + fmt::format("cache: {{{}}}\n", text));
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    EXPECT_EQ(job->cache.eviction.type, type) << text;
    Result<Job> again = Parse(JobToYaml(*job));
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(again->cache.eviction.type, type) << text;
    EXPECT_EQ(again->cache.eviction.lru_share, job->cache.eviction.lru_share) << text;
    EXPECT_EQ(again->cache.eviction.half_life, job->cache.eviction.half_life) << text;
  }
  EXPECT_EQ(Parse(std::string(kSmallJob) + "cache: {lru_share: 0.25}\n")->cache.eviction.lru_share,
            0.25);
  EXPECT_EQ(Parse(std::string(kSmallJob) + "cache: {half_life: 3}\n")->cache.eviction.half_life, 3);
}

TEST(ParseJob, SyntheticValidationFollowsTraining) {
  Result<Job> job = Parse(
      "output: r\nseed: 3\n"
      "data: {format: synthetic, rows: 1000, validation_rows: 200, first_row: 50}\n");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->validation_data.first_row, 1050u);
  EXPECT_EQ(job->validation_data.rows, 200u);
  EXPECT_EQ(job->train_data.rows, 1000u);
  EXPECT_TRUE(job->has_validation);
}

struct BadJob {
  const char* lines;
  const char* message;
};

class BadJobs : public testing::TestWithParam<BadJob> {};

TEST_P(BadJobs, SaysWhereAndWhat) { EXPECT_EQ(ErrorOf(GetParam().lines), GetParam().message); }

INSTANTIATE_TEST_SUITE_P(
    Messages, BadJobs,
    testing::Values(
        BadJob{"training: {batchsize: 9}\n",
               "j.yaml:3: unknown key 'batchsize' in training; did you mean 'batch'?"},
        BadJob{"\n\ntraning: {batch: 9}\n",
               "j.yaml:5: unknown key 'traning'; did you mean 'training'?"},
        BadJob{"minibatch: 64\n",
               "j.yaml:3: unknown key 'minibatch'; did you mean 'training.minibatch'?"},
        BadJob{"pooling: mean\n",
               "j.yaml:3: unknown key 'pooling'; 'slots.*.pooling' is a key of its own"},
        BadJob{"memory: {xyzzy: 1}\n",
               "j.yaml:3: unknown key 'xyzzy' in memory; legal here: budget"},
        BadJob{"tables: {ads: {dmi: 4}}\n",
               "j.yaml:3: unknown key 'dmi' in tables.ads; did you mean 'dim'?"},
        BadJob{"cache: {policy: lfu}\n",
               "j.yaml:3: cache.policy is 'lfu'; legal: s3_fifo | lru_lfu | pass_lfu"},
        BadJob{"cache: {policy: s3_fifo, lru_share: 0.5}\n",
               "j.yaml:3: cache.lru_share has no meaning here: it is for policy lru_lfu"},
        BadJob{"cache: {policy: pass_lfu, lru_share: 0.5}\n",
               "j.yaml:3: cache.lru_share has no meaning here: it is for policy lru_lfu"},
        BadJob{"cache: {policy: s3_fifo, half_life: 5}\n",
               "j.yaml:3: cache.half_life has no meaning here: it is for policy lru_lfu, "
               "pass_lfu"},
        BadJob{"cache: {policy: lru_lfu, lru_share: 1.5}\n",
               "j.yaml:3: cache.lru_share is 1.5; legal: 0 to 1"},
        BadJob{"cache: {half_life: -1}\n", "j.yaml:3: cache.half_life is -1; legal: 0 to 1000000"},
        BadJob{"ssd: {compaction: always}\n",
               "j.yaml:3: ssd.compaction is 'always'; legal: gain | stale_share | model_size"},
        BadJob{"ssd: {over_provisioning: 0.1}\n",
               "j.yaml:3: ssd.over_provisioning has no meaning here: it is for compaction "
               "model_size"},
        BadJob{"training: {batch: many}\n",
               "j.yaml:3: training.batch: expected a whole number, got 'many'"},
        BadJob{"training: {batch: -512}\n",
               "j.yaml:3: training.batch: expected a whole number, got '-512'"},
        BadJob{"training: {minibatch: 0}\n",
               "j.yaml:3: training.minibatch is 0; legal: 1 to 1,048,576"},
        BadJob{
            "training:\n  minibatch: 512\n  batch: 1000\n",
            "j.yaml:5: training.batch is 1000, which is no multiple of training.minibatch (512)"},
        BadJob{"training: 7\n",
               "j.yaml:3: training holds settings by name, such as {minibatch: ...}"},
        BadJob{"training: {threads: [1]}\n",
               "j.yaml:3: training.threads: expected a whole number, got a list"},
        BadJob{"training: {threads: }\n",
               "j.yaml:3: training.threads: expected a whole number, got nothing"},
        BadJob{"memory: {budget: lots}\n",
               "j.yaml:3: memory.budget: expected a size such as 2GiB or 500MB, got 'lots'"},
        BadJob{"memory: {budget: 5}\n", "j.yaml:3: memory.budget is 5; legal: 1MiB to 64TiB"},
        BadJob{"memory: {budget: 1000TiB}\n",
               "j.yaml:3: memory.budget is 1000TiB; legal: 1MiB to 64TiB"},
        BadJob{"ssd: {file_size: 9223372036854774784}\n",
               "j.yaml:3: ssd.file_size is 9007199254740991KiB; legal: 64KiB to 1TiB"},
        BadJob{"device: cuda\n",
               "j.yaml:3: device is cuda, which this version cannot do yet; use cpu (or auto)"},
        BadJob{"device: cpuu\n",
               "j.yaml:3: device is 'cpuu'; legal: cpu | cuda | auto; did you mean 'cpu'?"},
        BadJob{"table: {l2: nan}\n", "j.yaml:3: table.l2: expected a number, got 'nan'"},
        BadJob{"table: {l2: 1.5e6}\n", "j.yaml:3: table.l2 is 1500000; legal: 0 to 1000000"},
        BadJob{"tables: {a: {l2: 1.5e6}}\n",
               "j.yaml:3: tables.a.l2 is 1500000; legal: 0 to 1000000"},
        BadJob{"network: {wide: true, wide_l2: 1e30}\n",
               "j.yaml:3: network.wide_l2 is 1e+30; legal: 0 to 1000000"},
        BadJob{"network: {optimizer: {l2: 1e30}}\n",
               "j.yaml:3: network.optimizer.l2 is 1e+30; legal: 0 to 1000000"},
        BadJob{"table: {optimizer: {learning_rate: 1e-60}}\n",
               "j.yaml:3: table.optimizer.learning_rate is 1e-60, which in 32 bits is 0; legal: "
               "above 0 to 1000000"},
        BadJob{"table: {optimizer: {epsilon: 1e-300}}\n",
               "j.yaml:3: table.optimizer.epsilon is 1e-300, which in 32 bits is 0; legal: above 0 "
               "to 1"},
        BadJob{"table: {optimizer: {type: adagrad, beta1: 0.9}}\n",
               "j.yaml:3: table.optimizer.beta1 has no meaning here: it is for type adam"},
        BadJob{"table: {optimizer: {type: ftrl}, initializer: {type: normal}}\n",
               "j.yaml:3: table.initializer.type must be zeros: ftrl starts at z = n = 0, which is "
               "weight 0"},
        BadJob{"table: {optimizer: {type: ftrl}, initializer: {scale: 0.5}}\n",
               "j.yaml:3: table.initializer.scale has no meaning here: it is for initializer.type "
               "other than zeros"},
        BadJob{"tables: {a: {optimizer: {type: ftrl}, initializer: {scale: 0.5}}}\n",
               "j.yaml:3: tables.a.initializer.scale has no meaning here: it is for "
               "initializer.type other than zeros"},
        BadJob{"table: {optimizer: {type: ftrl, learning_rate: {base: 1, warmup_steps: 3}}}\n",
               "j.yaml:3: table.optimizer.learning_rate is a schedule, but ftrl takes a number, "
               "its alpha"},
        BadJob{"table: {optimizer: {learning_rate: {decay: cosine}}}\n",
               "j.yaml:3: table.optimizer.learning_rate.decay_steps is missing: a decay takes a "
               "number of mini-batches"},
        BadJob{"table: {admit_after: 65536}\n",
               "j.yaml:3: table.admit_after is 65536; legal: 0 to 65,535"},
        BadJob{"table: {admit_after: 2, admit_filter: 1KiB}\n",
               "j.yaml:3: table.admit_filter is 1KiB; legal: 4KiB to 1TiB"},
        BadJob{"table: {admit_after: 2, admit_filter: 2048TiB}\n",
               "j.yaml:3: table.admit_filter is 2048TiB; legal: 4KiB to 1TiB"},
        BadJob{"table: {admit_after: 1, admit_filter: 1MiB}\n",
               "j.yaml:3: table.admit_filter has no meaning here: it is for admit_after of 2 or "
               "more"},
        BadJob{"table: {index: group}\n",
               "j.yaml:3: table.index is group, which needs expected_keys: how many keys the table "
               "will have"},
        BadJob{"table: {index: hash, expected_keys: 5}\n",
               "j.yaml:3: table.index is 'hash'; legal: auto | key | group"},
        BadJob{"table: {expected_keys: 1000000000000001}\n",
               "j.yaml:3: table.expected_keys is 1000000000000001; legal: 0 to "
               "1,000,000,000,000,000"},
        BadJob{"table: {expire_every_examples: 10}\n",
               "j.yaml:3: table.expire_every_examples is given, but neither expire_after nor "
               "expire_below: no row would ever expire"},
        BadJob{"table: {expire_after: 10}\n",
               "j.yaml:3: table.expire_after has no meaning here: it is for expire_every_examples "
               "above 0"},
        BadJob{"table: {expire_every_examples: 5, expire_after: 9, expire_decay: 0.5}\n",
               "j.yaml:3: table.expire_decay has no meaning here: it is for expire_below above 0"},
        BadJob{"table: {expire_every_examples: 5, expire_below: 1e-9}\n",
               "j.yaml:3: table.expire_below is 1e-09; legal: 0, or 1e-06 or more"},
        BadJob{"table: {expire_every_examples: 5, expire_below: 1, expire_show_weight: 2}\n",
               "j.yaml:3: table.expire_click_weight is 1, below expire_show_weight (2): a click "
               "would lower a score"},
        BadJob{"table: {expire_every_examples: 5, expire_below: 1, expire_decay: 1.5}\n",
               "j.yaml:3: table.expire_decay is 1.5; legal: 0 to 1"},
        BadJob{"tables: {default: {}}\n",
               "j.yaml:3: tables.default: 'table' is the default table; name this one otherwise"},
        BadJob{"tables: {RUN: {}}\n",
               "j.yaml:3: tables.RUN: a file of the program has this name beside the folders of "
               "the tables; name this one otherwise"},
        BadJob{"tables: {read-cost: {}}\n",
               "j.yaml:3: tables.read-cost: a file of the program has this name beside the folders "
               "of the tables; name this one otherwise"},
        BadJob{"tables: {a/b: {}}\n",
               "j.yaml:3: tables: 'a/b' is no name: letters, digits, _ and -, at most 64"},
        BadJob{"tables: {ads: {}}\nslots: {C1: {table: adz}}\n",
               "j.yaml:4: slots.C1.table is 'adz', which is no table; did you mean 'ads'?"},
        BadJob{"network: {hidden: 64}\n",
               "j.yaml:3: network.hidden: expected a list such as [256, 128], got '64'"},
        BadJob{"network: {hidden: [64, 0]}\n",
               "j.yaml:3: network.hidden has '0'; legal: widths of 1 to 65,536"},
        BadJob{"network: {wide_optimizer: {type: ftrl}}\n",
               "j.yaml:3: network.wide_optimizer has no meaning here: it is for wide: true"},
        BadJob{"ssd: {paths: [a, b], shards: 1}\n",
               "j.yaml:3: ssd.shards is 1, but ssd.paths names 2 folders: a shard lies on one of "
               "them, so some would stay empty; raise it to 2 or more"},
        BadJob{"seed: 1\nseed: 2\n", "j.yaml:4: 'seed' is given twice"},
        BadJob{"format_version: 2\n",
               "j.yaml:3: format_version is '2'; this program reads version 1"},
        BadJob{"resume: {accept: [thread]}\n",
               "j.yaml:3: resume.accept has 'thread'; legal: data | processor | threads"},
        BadJob{"---\nseed: 1\n", "j.yaml:3: a second document begins here; a job is one"}));

TEST(ParseJob, CollectsAllProblemsInTheOrderOfLines) {
  Result<Job> job = Parse(
      "data: {format: criteo, rows: 3}\n"
      "training: {batch: x, thread: 2}\n"
      "memory: {budget: 1}\n",
      {"pipeline.depth=99", "nosuch=1"});
  ASSERT_FALSE(job.ok());
  EXPECT_EQ(job.status().message(),
            "j.yaml: output is missing: the folder of the run, such as runs/first\n"
            "j.yaml:1: data.rows has no meaning here: it is for format synthetic\n"
            "j.yaml:1: data.train is missing: the files to train on, such as [logs/*.tsv]\n"
            "j.yaml:2: unknown key 'thread' in training; did you mean 'threads'?\n"
            "j.yaml:2: training.batch: expected a whole number, got 'x'\n"
            "j.yaml:3: memory.budget is 1; legal: 1MiB to 64TiB\n"
            "--set pipeline.depth: pipeline.depth is 99; legal: 0 to 64\n"
            "--set nosuch: unknown key 'nosuch'; legal here: format_version, seed, device, output, "
            "binding, "
            "data, table, tables, slots, network, training, validation, memory, ssd, cache, "
            "pipeline, checkpoint, metrics, resume");
}

TEST(ParseJob, SyntaxErrorsNameTheLine) {
  EXPECT_THAT(ErrorOf("training: {batch: 3\n"), testing::StartsWith("j.yaml:4: not YAML: "));
  EXPECT_THAT(Parse("just text").status().message(),
              testing::StartsWith("j.yaml: a job is a map of settings"));
  std::string deep;
  for (int i = 0; i < 40; ++i) deep += "{a: ";
  EXPECT_FALSE(Parse(deep).ok());
  // An alias inside its own anchor must end too.
  EXPECT_FALSE(Parse("data: &a {train: *a}\noutput: x\n").ok());
  EXPECT_FALSE(Parse("").ok());
}

TEST(ParseJob, OverridesAnyPath) {
  Result<Job> job =
      Parse(kSmallJob, {"training.batch=1024", "training.minibatch=64", "data.train=[x, y]",
                        "tables.ads.dim=3", "table.optimizer.learning_rate.warmup_steps=10",
                        "network={hidden: [3], wide: yes}", "output=\"a=b\""});
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->training.batch, 1024u);
  EXPECT_EQ(job->train_data.files, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(job->tables["ads"].dim, 3u);
  EXPECT_EQ(job->table.learning_rate.warmup_steps, 10u);
  EXPECT_EQ(job->table.learning_rate.base, 0.05);
  EXPECT_TRUE(job->network.wide);
  EXPECT_EQ(job->output, "a=b");
  job = Parse(std::string(kSmallJob) + "table: {optimizer: {learning_rate: 0.3}}\n",
              {"table.optimizer.learning_rate.warmup_steps=10"});
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->table.learning_rate.base, 0.3);
  EXPECT_EQ(ErrorOf("", {"seed"}), "--set seed: expected path=value, as in training.batch=65536");
  EXPECT_EQ(ErrorOf("", {"seed..x=1"}), "--set seed..x: the path has an empty part");
  EXPECT_EQ(ErrorOf("seed: 3\n", {"seed.x=1"}),
            "--set seed.x: 'seed' holds a value, not settings by name");
  EXPECT_THAT(ErrorOf("", {"seed=[1"}), testing::StartsWith("--set seed: not YAML: "));
}

TEST(ParseJob, AdmissionIsOffUnlessAskedFor) {
  Result<Job> job = Parse(kSmallJob);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_FALSE(job->table.admission.on());
  job = Parse(std::string(kSmallJob) +
              "table: {admit_after: 5, admit_filter: 1MiB}\n"
              "tables: {a: {}, b: {admit_after: 0}, c: {admit_filter: 2MiB}}\n");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->table.admission.after, 5u);
  EXPECT_EQ(job->tables["a"].admission.filter_bytes, 1u << 20);
  EXPECT_FALSE(job->tables["b"].admission.on());
  EXPECT_EQ(job->tables["c"].admission.after, 5u);
  EXPECT_EQ(job->tables["c"].admission.filter_bytes, 2u << 20);
  Result<Job> again = Parse(JobToYaml(*job));
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_EQ(JobToYaml(*again), JobToYaml(*job));
}

TEST(ParseJob, TablesInheritTheIndex) {
  Result<Job> job = Parse(std::string(kSmallJob) +
                          "table: {index: group, expected_keys: 1e6, group_block: 16KiB, "
                          "group_filter_bits: 4}\n"
                          "tables: {a: {}, b: {index: auto, expected_keys: 0, group_block: auto}}"
                          "\n");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->tables["a"].index, IndexChoice::kGroup);
  EXPECT_EQ(job->tables["a"].expected_keys, 1'000'000u);
  EXPECT_EQ(job->tables["a"].group.block_bytes, 16u << 10);
  EXPECT_EQ(job->tables["a"].group.filter_bits, 4u);
  EXPECT_EQ(job->tables["b"].index, IndexChoice::kAuto);
  EXPECT_EQ(job->tables["b"].group.block_bytes, 0u);
  Result<Job> again = Parse(JobToYaml(*job));
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_EQ(JobToYaml(*again), JobToYaml(*job));
}

TEST(ParseJob, ExpiryIsOffUnlessAskedFor) {
  Result<Job> job = Parse(kSmallJob);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_FALSE(job->table.expiry.on());
  job = Parse(std::string(kSmallJob) +
              "table: {expire_every_examples: 1e6, expire_below: 0.3, expire_decay: 0.9}\n"
              "tables: {a: {}, b: {expire_every_examples: 0}, c: {expire_after: 7}}\n");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->table.expiry.every_examples, 1'000'000u);
  EXPECT_EQ(job->tables["a"].expiry.decay, 0.9);
  EXPECT_EQ(job->tables["a"].expiry.show_weight, 0.1);
  EXPECT_FALSE(job->tables["b"].expiry.on());
  EXPECT_EQ(job->tables["c"].expiry.after, 7u);
  EXPECT_EQ(job->tables["c"].expiry.below, 0.3);
  Result<Job> again = Parse(JobToYaml(*job));
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_EQ(JobToYaml(*again), JobToYaml(*job));
}

TEST(ParseJob, TablesTakeWhatTheyLeaveOutFromTheDefault) {
  Result<Job> job = Parse(std::string(kSmallJob) +
                          "table: {dim: 5, optimizer: {type: adam, beta1: 0.5}, l2: 0.25}\n"
                          "tables: {a: {l2: 0}, b: {optimizer: {type: adam}}, c: {optimizer: "
                          "{type: ftrl}}}\n");
  // c takes the default table's l2, which is not for ftrl.
  ASSERT_FALSE(job.ok());
  EXPECT_THAT(job.status().message(),
              testing::HasSubstr("tables.c.l2 is not for ftrl; the table takes the 0.25 of "
                                 "table.l2: set tables.c.l2 to 0"));
  const std::string ftrl = std::string(kSmallJob) + "table: {dim: 5, l2: 0.25}\ntables: {c: ";
  job = Parse(ftrl + "{l2: 0.5, optimizer: {type: ftrl}}}\n");
  ASSERT_FALSE(job.ok());
  EXPECT_THAT(job.status().message(),
              testing::HasSubstr("tables.c.l2 is not for ftrl; it has its"));
  EXPECT_TRUE(Parse(ftrl + "{l2: 0, optimizer: {type: ftrl}}}\n").ok());
  job =
      Parse(std::string(kSmallJob) +
            "table: {dim: 5, optimizer: {type: adam, beta1: 0.5, learning_rate: 0.3}}\n"
            "tables: {a: {dim: 2}, b: {optimizer: {type: adam}}, c: {optimizer: {type: ftrl}}}\n");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->tables["a"].optimizer.beta1, 0.5f);
  EXPECT_EQ(job->tables["a"].learning_rate.base, 0.3);
  EXPECT_EQ(job->tables["b"].optimizer.beta1, 0.9f);
  EXPECT_EQ(job->tables["b"].learning_rate.base, 0.001);
  EXPECT_EQ(job->tables["b"].dim, 5u);
  EXPECT_EQ(job->tables["c"].initializer.type, InitializerSpec::Type::kZeros);
  EXPECT_EQ(job->table.initializer.type, InitializerSpec::Type::kUniform);
  // A scale that is the default table's is no word about a table with ftrl.
  job = Parse(std::string(kSmallJob) +
              "table: {initializer: {scale: 0.5}}\ntables: {c: {optimizer: {type: ftrl}}}\n");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  EXPECT_EQ(job->tables["c"].initializer.type, InitializerSpec::Type::kZeros);
}

// A value of a key, legal by its own limits; empty: leave it out.
std::string RandomValue(const JobKey& key, Rng* rng) {
  const auto pick = [rng](const std::string& choices) {
    std::vector<std::string> words;
    std::string word;
    for (char c : choices + " ") {
      if (c != ' ') {
        word += c;
      } else {
        if (!word.empty() && word != "|") words.push_back(word);
        word.clear();
      }
    }
    return words[rng->Below(words.size())];
  };
  if (key.path == "format_version" || key.path == "device") return "";
  if (key.path.starts_with("data.format")) return rng->Below(2) == 0 ? "criteo" : "synthetic";
  if (key.path == "training.batch") return "";
  if (key.path == "slots.*.table") return rng->Below(2) == 0 ? "" : "t1";
  if (key.path == "ssd.paths") return rng->Below(2) == 0 ? "[]" : "[\"a: #b\"]";
  if (key.path == "resume.accept") return "[threads]";
  if (key.type == "word") return pick(key.limits);
  if (key.type == "true or false") return rng->Below(2) == 0 ? "true" : "false";
  if (key.type == "size") return std::to_string((1 << 20) + rng->Below(1 << 30));
  if (key.type == "text") return "\"x/y z\"";
  if (key.type == "list of text") return "[a.tsv, 'b \"c\".tsv', \"d\\te\"]";
  if (key.type == "list of whole numbers") return rng->Below(2) == 0 ? "[]" : "[7, 9, 11]";
  if (key.type.starts_with("whole number")) return std::to_string(1 + rng->Below(60));
  return std::to_string(0.06 + 0.8 * rng->Unit());
}

// What does not apply beside the other values is taken out again, as a user would.
TEST(JobToYaml, ReadsBackToTheSameJob) {
  const std::uint64_t seed = 20;
  SCOPED_TRACE(seed);
  Rng rng(seed);
  int parsed = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<std::string> overrides = {"tables.t1={}", "slots.C1={}"};
    for (const JobKey& key : JobKeys()) {
      std::string path = key.path;
      if (const auto star = path.find('*'); star != std::string::npos) {
        path.replace(star, 1, path.starts_with("tables") ? "t1" : "C1");
      }
      // A whole rate and its parts exclude each other.
      const bool schedule = path.find("learning_rate.") != std::string::npos;
      if (rng.Below(schedule ? 8 : 3) != 0) continue;
      const std::string value = RandomValue(key, &rng);
      if (!value.empty()) overrides.push_back(path + "=" + value);
    }
    Result<Job> job = Parse(kSmallJob, overrides);
    for (int attempt = 0; !job.ok() && attempt < 12; ++attempt) {
      // Each message begins with its path: take those overrides out.
      std::vector<std::string> kept;
      for (const std::string& text : overrides) {
        const std::string path = text.substr(0, text.find('='));
        if (job.status().message().find("--set " + path + ": ") == std::string::npos) {
          kept.push_back(text);
        }
      }
      if (kept.size() == overrides.size()) break;
      overrides = kept;
      job = Parse(kSmallJob, overrides);
    }
    if (!job.ok()) continue;
    ++parsed;
    const std::string yaml = JobToYaml(*job);
    Result<Job> again = ParseJob(yaml, "again.yaml", {});
    ASSERT_TRUE(again.ok()) << again.status().ToString() << "\n" << yaml;
    EXPECT_EQ(JobToYaml(*again), yaml);
    EXPECT_EQ(again->network_learning_rate.At(12345), job->network_learning_rate.At(12345));
    EXPECT_EQ(again->table.optimizer.alpha, job->table.optimizer.alpha);
    EXPECT_EQ(again->validation_data.first_row, job->validation_data.first_row);
    EXPECT_EQ(again->has_validation, job->has_validation);
  }
  EXPECT_GT(parsed, 200);
}

// Keys may be added, with defaults; those that stand in somebody's job stay what they are.
TEST(JobFormat, GoldenFileIsReadAndEachOfItsLinesIsWritten) {
  FileSystem* fs = FileSystem::Posix();
  const std::string path =
      std::string(TERRACE_ROOT) + "/src/terrace/train/testdata/job_v1.golden.yaml";
  Result<std::string> golden = ReadFileToString(fs, path);
  ASSERT_TRUE(golden.ok()) << golden.status().ToString();
  Result<Job> job = ReadJob(fs, path, {});
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  const std::string written = JobToYaml(*job);
  std::size_t at = 0;
  for (std::size_t begin = 0; begin < golden->size();) {
    const std::size_t end = golden->find('\n', begin) + 1;
    const std::string line = golden->substr(begin, end - begin);
    const std::size_t found = written.find(line, at);
    ASSERT_NE(found, std::string::npos) << line << "is missing, or in another place, in\n"
                                        << written;
    at = found + line.size();
    begin = end;
  }
  job = Parse("format_version: 2\n" + std::string(kSmallJob));
  EXPECT_THAT(job.status().message(), testing::HasSubstr("this program reads version 1"));
}

TEST(JobKeys, AreDistinctAndDescribed) {
  std::set<std::string> paths;
  for (const JobKey& key : JobKeys()) {
    EXPECT_TRUE(paths.insert(key.path).second) << key.path;
    EXPECT_FALSE(key.doc.empty()) << key.path;
    EXPECT_TRUE(key.set && key.print) << key.path;
  }
  EXPECT_THAT(JobReferenceText(), testing::HasSubstr("training.batch\n    whole number"));
}

TEST(JobReference, StandsInTheDocument) {
  FileSystem* fs = FileSystem::Posix();
  Result<std::string> document =
      ReadFileToString(fs, std::string(TERRACE_ROOT) + "/docs/job-file.md");
  ASSERT_TRUE(document.ok()) << document.status().ToString();
  const std::string reference = JobReferenceMarkdown();
  if (document->ends_with(reference)) return;
  const std::string where = testing::TempDir() + "/job-file-reference.md";
  const Status written = WriteFileAtomically(fs, where, std::as_bytes(std::span(reference)));
  ADD_FAILURE() << "docs/job-file.md does not end with the reference of this build, which is in "
                << where << " " << written.ToString();
}

TEST(Examples, AreWholeJobs) {
  const std::string folder = std::string(TERRACE_ROOT) + "/examples";
  Result<std::vector<FileInfo>> files = FileSystem::Posix()->List(folder);
  ASSERT_TRUE(files.ok());
  EXPECT_GE(files->size(), 3u);
  for (const FileInfo& file : *files) {
    Result<Job> job = ReadJob(FileSystem::Posix(), folder + "/" + file.name, {});
    EXPECT_TRUE(job.ok()) << job.status().ToString();
  }
}

TEST(LearningRate, WarmsUpAndFalls) {
  LearningRate rate;
  rate.base = 1;
  rate.warmup_steps = 4;
  EXPECT_EQ(rate.At(0), 0.25f);
  EXPECT_EQ(rate.At(3), 1.0f);
  EXPECT_EQ(rate.At(4), 1.0f);
  EXPECT_EQ(rate.At(~std::uint64_t{0}), 1.0f);
  rate.decay = LearningRate::Decay::kCosine;
  rate.decay_steps = 10;
  rate.final = 0.5;
  EXPECT_EQ(rate.At(4), 1.0f);
  EXPECT_NEAR(rate.At(9), 0.75f, 1e-6);
  EXPECT_EQ(rate.At(14), 0.5f);
  EXPECT_EQ(rate.At(~std::uint64_t{0}), 0.5f);
}

}  // namespace
}  // namespace terrace
