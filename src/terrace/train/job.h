// Job: the job file, parsed, checked and complete with defaults; docs/job-file.md describes every
// key for users. Threads: a value, constant after it is read.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/cache/eviction_options.h"
#include "terrace/data/batch.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"
#include "terrace/model/network.h"
#include "terrace/store/store.h"
#include "terrace/table/row_schema.h"

namespace terrace {

// A number, or {base, warmup_steps, decay: none | linear | cosine, decay_steps, final}. Steps are
// mini-batches from 0.
struct LearningRate {
  enum class Decay : std::uint8_t { kNone, kLinear, kCosine };
  double base = 0;
  std::uint64_t warmup_steps = 0;  // Rises linearly from base / warmup_steps.
  Decay decay = Decay::kNone;
  std::uint64_t decay_steps = 0;  // After the warm-up.
  double final = 0;
  float At(std::uint64_t step) const;
};

// kAuto: as memory and the expected keys ask for.
enum class IndexChoice : std::uint8_t { kAuto, kKey, kGroup };

struct TableJob {
  std::string name;
  std::uint32_t dim = 8;
  SparseOptimizerSpec optimizer;
  LearningRate learning_rate;
  InitializerSpec initializer;
  float l2 = 0;
  IndexChoice index = IndexChoice::kAuto;
  std::uint64_t expected_keys = 0;  // 0: nobody knows.
  GroupShape group;
  AdmissionSpec admission{0, std::uint64_t{64} << 20};
  ExpirySpec expiry;
};

struct SlotJob {
  enum class Pooling : std::uint8_t { kSum, kMean };
  std::string table;      // Empty: the default table.
  std::uint32_t dim = 0;  // 0: the table's.
  Pooling pooling = Pooling::kSum;
};

// Of memory.budget. The most is more than any machine has; a chunk of so large a cache still has
// fewer than 2^31 rows.
inline constexpr std::uint64_t kLeastBudgetBytes = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kMostBudgetBytes = std::uint64_t{64} << 40;

struct Job {
  std::uint64_t seed = 0;
  std::string device = "cpu";
  std::string output;
  std::string binding = "auto";  // auto | off
  DataOptions train_data;
  DataOptions validation_data;  // files empty and rows 0: no validation
  bool has_validation = false;
  TableJob table;                          // The default, named "default".
  std::map<std::string, TableJob> tables;  // Further ones; what they leave out is as in `table`.
  std::map<std::string, SlotJob> slots;
  NetworkSpec network;
  LearningRate network_learning_rate;
  // The wide weight of a key, when network.wide: dim 1, starts at zero. Its optimizer defaults to
  // that of its table.
  bool wide_optimizer_given = false;
  SparseOptimizerSpec wide_optimizer;
  LearningRate wide_learning_rate;
  float wide_l2 = 0;
  struct Training {
    std::uint32_t batch = 65536;    // Examples; a multiple of minibatch.
    std::uint32_t minibatch = 512;  // Examples of one optimizer step.
    int threads = 2;
    std::uint64_t max_examples = 0;  // 0: all epochs. Stops after the mini-batch that reaches it.
  } training;
  struct Validation {
    std::uint64_t every_examples = 0;  // 0: only at each epoch's end.
  } validation;
  struct Memory {
    std::uint64_t budget_bytes = std::uint64_t{2} << 30;
  } memory;
  struct Ssd {
    std::vector<std::string> paths;  // Empty: inside `output`.
    std::uint64_t quota_bytes = std::uint64_t{50} << 30;
    int shards = 1;
    bool shards_auto = true;  // Until a run is begun or gone on with (parts_plan.h).
    int io_threads = 1;
    std::string backend = "auto";  // auto | io_uring | threads
    std::uint64_t file_bytes = StoreOptions().file_bytes;
    CompactionPolicy compaction = CompactionPolicy::kGain;
    double stale_share = 0.3333;
    double over_provisioning = 0.07;      // Of kModelSize.
    std::uint64_t rated_write_bytes = 0;  // Of the disks, in their life; 0: unknown.
    bool direct = true;
    ReadMode read = ReadMode::kPlanned;
    std::optional<std::uint64_t> merge_gap_bytes;  // None: as the disk was measured.
  } ssd;
  struct Cache {
    bool policy_given = false;
    EvictionOptions eviction;
    std::string look_ahead = "auto";  // auto | off
  } cache;
  struct Pipeline {
    int depth = 2;
    int pull_threads = 0;  // 0: by the machine.
    int pulling = 1;       // What that comes to: set where a run begins or goes on (parts_plan.h).
    std::map<std::string, int>
        queues;  // "read", "pull", "stage": capacity of the channel after that stage.
  } pipeline;
  struct Checkpoint {
    std::uint64_t every_batches = 50;  // Of training.batch examples; 0: only at the end.
    int keep = 2;
    // A checkpoint at any moment takes about so long at most, at the write rate that was seen: rows
    // that would take longer are written ahead.
    double final_seconds = 10;
  } checkpoint;
  struct Metrics {
    std::uint64_t every_examples = 0;  // 0: 65536, whatever the batch.
  } metrics;
  struct Resume {
    // "processor", "threads": identifying settings that may differ from the run's on --resume. The
    // result is then no longer that of an undisturbed run.
    std::vector<std::string> accept;
  } resume;
};

// Parses, applies `--set path=value` overrides (YAML values) and checks every key and limit
// together. kInvalidArgument: all that is wrong, a line each, with file and line ("jobs/a.yaml:7:
// unknown key 'batchsize' in training; did you mean 'batch'?"). `base_name` is the file's name in
// messages.
Result<Job> ParseJob(std::string_view yaml, const std::string& base_name,
                     const std::vector<std::string>& overrides);
// From a file, or from a pipe to its end. kNotFound: none; kInvalidArgument also: one that may not
// be read.
Result<Job> ReadJob(FileSystem* fs, const std::string& path,
                    const std::vector<std::string>& overrides);
// The complete job as YAML that ParseJob reads back to the same Job. Starts with format_version.
std::string JobToYaml(const Job& job);
// The reference of all keys: a table of text for a terminal, or the tables of docs/job-file.md.
std::string JobReferenceText();
std::string JobReferenceMarkdown();

// Where each slot's rows lie and which columns of the network's input they fill.
struct SlotPlan {
  std::uint32_t table = 0;         // Index into ModelPlan::tables.
  std::uint32_t input_offset = 0;  // Column of the embedding block.
  std::uint32_t dim = 0;
  SlotJob::Pooling pooling = SlotJob::Pooling::kSum;
};

struct TablePlan {
  std::string settings;  // Where they stand in the job: "table", or "tables.<name>".
  RowSchema schema;      // Segments: "embedding", and "wide" when the network is wide.
  std::vector<LearningRate> learning_rates;  // By segment.
  std::vector<std::uint32_t> slots;          // Indices into DataSchema::slots.
  IndexChoice index = IndexChoice::kAuto;
  std::uint64_t expected_keys = 0;
  GroupShape group;
};

struct ModelPlan {
  std::vector<TablePlan>
      tables;  // A slot whose dim differs from its table's gets a table "<name>.dim<d>".
  std::vector<SlotPlan> slots;  // By DataSchema::slots.
  NetworkInputSpec inputs;
  NetworkSpec network;
};

// kInvalidArgument: a slot name that the data does not have (with the nearest), a table that no
// slot uses, ...
Result<ModelPlan> MakeModelPlan(const Job& job, const DataSchema& data);

// Of the settings below: the slots and dense features of the data.
inline constexpr const char* kDataSetting = "data";
inline constexpr const char* kDataSchemaSetting = "data.schema";

// Settings that identify the model, as (path, value) pairs in a fixed order: seed, data identity,
// tables, slots, network, minibatch, threads, type of processor, ... Two runs with equal pairs
// train the same bits. What is not here may change on --resume.
std::vector<std::pair<std::string, std::string>> IdentifyingSettings(const Job& job,
                                                                     const ModelPlan& plan,
                                                                     const ExampleSource& source);

}  // namespace terrace
