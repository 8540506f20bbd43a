// What a run says of itself: the lines of metrics.jsonl, summary.json (docs/formats/metrics.md,
// docs/formats/summary.md), the progress line and the table at the end. Threads: values and pure
// functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/io/drive_health.h"
#include "terrace/model/metrics.h"

namespace terrace {

inline constexpr int kSummaryVersion = 2;
inline constexpr int kMetricsVersion = 2;

// What a run has done to its disks since it began, in all its processes: each resume goes on from
// what its checkpoint says.
struct SsdWear {
  std::uint64_t write_bytes = 0;  // Rows, manifests and compaction.
  std::uint64_t rows_written = 0, rows_compacted = 0;
  double compaction_seconds = 0;
  std::uint64_t wanted_bytes = 0;  // Of the records of the rows that were to be written.

  SsdWear& operator+=(const SsdWear& other);
  // Bytes written for one that was to be; 0: none was.
  double WriteAmplification() const;
};

// Where one stage's time went. Waits are not part of busy; CPU seconds count all its threads.
struct StageTimes {
  double busy_seconds = 0;
  double waited_for_input_seconds = 0;
  double waited_for_output_seconds = 0;
  double cpu_seconds = 0;

  StageTimes& operator-=(const StageTimes& other);
};

struct PipelineTimes {
  StageTimes read, pull, stage, train, write_back;

  PipelineTimes& operator-=(const PipelineTimes& other);
};

// The stage that was busy longest, "train".
std::string LongestStage(const PipelineTimes& times);

// One channel at the end of an interval.
struct ChannelRecord {
  std::string name;                  // "read": the channel after that stage.
  std::uint64_t capacity = 0;        // Batches.
  std::uint64_t depth = 0;           // Batches that it holds.
  std::uint64_t reserved_bytes = 0;  // Memory of what it holds.
};

// Rows that have expired, by where that was noticed.
struct ExpiryCounts {
  std::uint64_t renewed = 0;    // Begun anew by training.
  std::uint64_t unwritten = 0;  // Not written back.
  std::uint64_t dropped = 0;    // By sweeps of the stores.
};

// One interval of metrics.jsonl. What stands before `performance` in the line is a function of the
// job alone; what is in it is measured.
struct IntervalRecord {
  std::uint64_t epoch = 0;
  std::uint64_t examples = 0;  // Since the start of the run.
  std::uint64_t steps = 0;
  std::uint64_t bad_lines = 0;     // Of this epoch.
  ClickMetricsResult window;       // Of this interval: predicted, then trained.
  ClickMetricsResult progressive;  // Since the start of the run.
  // Of keys that were not admitted, in this interval; where tables count shows.
  std::optional<std::uint64_t> unadmitted_shows;
  struct Performance {
    double seconds = 0;           // Wall time of this process.
    double interval_seconds = 0;  // Of the interval; so are all counters below.
    double examples_per_second = 0;
    std::uint64_t batch_examples = 0;  // What the program has adapted the batch to.
    PipelineTimes stages;
    struct Cache {
      std::uint64_t hits = 0, misses = 0, created = 0, evictions = 0;
      std::uint64_t rows = 0, used_bytes = 0, capacity_bytes = 0;  // At the end of the interval.
    } cache;
    struct Ssd {
      double read_seconds = 0, write_seconds = 0, compaction_seconds = 0;
      double compaction_wait_seconds = 0;  // Of writes and training.
      std::uint64_t read_bytes = 0, write_bytes = 0, read_requests = 0, rows_read = 0,
                    rows_written = 0, rows_compacted = 0;
      std::uint64_t mistaken_reads = 0;  // Of records that the index took for an absent key's.
      // At the end of the interval.
      std::uint64_t live_bytes = 0, stale_bytes = 0, disk_bytes = 0, checkpoint_only_bytes = 0;
      SsdWear run;                      // Since the run began.
      std::vector<DriveHealth> drives;  // That tell their wear.
    } ssd;
    std::optional<ExpiryCounts> expiry;  // Where rows expire.
    struct LookAhead {
      std::uint64_t evicted = 0;  // Of the evictions: rows that come again.
      // At the end of the interval.
      std::uint64_t examples = 0;  // Ahead.
      std::uint64_t rows = 0;      // Unpinned, that stay because they come again.
    };
    std::optional<LookAhead> look_ahead;  // Once it has begun.
    std::vector<ChannelRecord> channels;
    std::uint64_t index_bytes = 0;
    std::uint64_t resident_bytes = 0;

    // Makes totals since the start, `before` and these, into what came between. States and rates
    // are left alone.
    void SubtractTotals(const Performance& before);
  } performance;
};

struct ValidationRecord {
  std::uint64_t epoch = 0;
  std::uint64_t examples = 0;  // Of training, when it ran.
  std::uint64_t steps = 0;
  ClickMetricsResult result;
  double seconds = 0;
};

// One line without its newline. NaN is null.
std::string IntervalToJson(const IntervalRecord& record);
std::string ValidationToJson(const ValidationRecord& record);

struct AdmissionSummary {
  std::uint64_t unadmitted_shows = 0;  // Of keys that were not admitted.
  double full_cells = 0;               // Share of the cells of the fullest filter.
};

struct RunSummary {
  bool finished = false;         // false: interrupted after a checkpoint.
  std::uint64_t checkpoint = 0;  // The newest.
  std::uint64_t epochs = 0;      // Begun.
  std::uint64_t steps = 0;
  std::uint64_t examples = 0;          // Of the run.
  std::uint64_t process_examples = 0;  // Trained by this process: fewer after a resume.
  // Of this process's mini-batches, those whose first layer went by distinct rows.
  std::optional<std::uint64_t> steps_by_rows;
  std::uint64_t bad_lines = 0;
  double seconds = 0;                 // Wall time of this process from start to final checkpoint.
  std::optional<double> cpu_seconds;  // Of all its threads, the kernel's part in it too.
  double examples_per_second = 0;
  ClickMetricsResult progressive;
  std::optional<ClickMetricsResult> validation;  // The last one.
  std::optional<AdmissionSummary> admission;     // Where tables count shows.
  std::optional<ExpiryCounts> expiry;            // Of this process, where rows expire.
  std::optional<std::string> binding;            // DescribeBinding() of this process.
  std::uint64_t rows = 0;
  std::uint64_t model_bytes = 0;  // Live rows and dense state.
  struct Memory {
    std::uint64_t budget_bytes = 0, peak_bytes = 0;
    double index_bytes_per_key = 0;
  } memory;
  struct Cache {
    std::uint64_t hits = 0, misses = 0, evictions = 0;
  } cache;
  struct Ssd {
    std::uint64_t read_bytes = 0, write_bytes = 0, live_bytes = 0, disk_bytes = 0,
                  checkpoint_only_bytes = 0;
    std::uint64_t stale_bytes = 0;
    double compaction_seconds = 0, compaction_wait_seconds = 0;  // Of this process.
    SsdWear run;
    std::uint64_t rated_write_bytes = 0;  // ssd.rated_writes.
  } ssd;
  PipelineTimes stages;
};

// What it stands for in one JSON object.
std::string SsdWearToJson(const SsdWear& wear);
std::string DriveToJson(const DriveHealth& drive);
// The part "ssd" of a checkpoint's trainer_state; nothing where it has none, as before version 2 of
// the summary. kCorruption: no such object.
Result<SsdWear> SsdWearOf(const std::string& trainer_state);
// For a person. rated_write_bytes: 0: unknown.
std::string SsdWearText(const SsdWear& wear, std::uint64_t rated_write_bytes);

// The whole of summary.json.
std::string SummaryToJson(const RunSummary& summary);
// kCorruption: no summary; kInvalidArgument: of a newer version.
Result<RunSummary> SummaryFromJson(const std::string& json);
// A person's table of the summary, several lines; `run` is the folder.
std::string SummaryTable(const RunSummary& summary, const std::string& run);
// One JSON object of a result, for `evaluate --json` and checkpoints.
std::string ResultToJson(const ClickMetricsResult& result);
// kCorruption: no such object.
Result<ClickMetricsResult> ResultFromJson(const std::string& json);
// A person's table of a result.
std::string ResultTable(const ClickMetricsResult& result, std::uint64_t bad_lines = 0);

// How far a run is.
struct Advance {
  std::uint64_t trained = 0;       // Examples of the whole run.
  std::uint64_t read = 0;          // Likewise; more than that wait to be trained.
  double read_share = 0;           // Of all that there are; 0: unknown.
  std::uint64_t max_examples = 0;  // training.max_examples; 0: none.
  double examples_per_second = 0;
};
// Until the end; negative: unknown.
double SecondsLeft(const Advance& advance);

struct Progress {
  std::uint64_t examples = 0;
  double examples_per_second = 0;
  double auc = 0, logloss = 0;  // Of the window; NaN when unknown.
  double hit_rate = 0;          // [0, 1]; NaN before the first access.
  double ssd_read_bytes_per_second = 0, ssd_write_bytes_per_second = 0;
  std::uint64_t memory_bytes = 0;
  double eta_seconds = -1;  // Negative: unknown.
};

// "1,234,567 examples | 45.6 k/s | AUC 0.7612 | log loss 0.4587 | hits 93.1 % | SSD 12.3 + 4.5 MB/s
// | 1.21 GiB | 0:12:05 left"
std::string ProgressLine(const Progress& progress);
std::string FormatDuration(double seconds);  // "0:12:05", "3.21 s"

}  // namespace terrace
