// Evaluator: metrics and predictions of a run's newest checkpoint over further files. Reads the run
// beside its trainer, writes nothing into it, creates no row and keeps the memory budget of the
// run's job. Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"
#include "terrace/model/metrics.h"

namespace terrace {

struct EvaluateOptions {
  std::optional<std::uint64_t> memory_bytes;  // If it is not the job's memory.budget.
  std::optional<double> max_bad_fraction;     // If it is not the job's data.max_bad_fraction.
};

struct Evaluation {
  ClickMetricsResult result;
  std::uint64_t bad_lines = 0;
};
// files: paths or globs, in the format of the run's job. kNotFound: no run, no checkpoint yet, or
// no such file; one that goes later is kIo. kInvalidArgument: more bad lines than there may be.
Result<Evaluation> EvaluateRun(FileSystem* fs, const std::string& run,
                               const std::vector<std::string>& files,
                               const EvaluateOptions& options);

// Writes a probability per line of data to `output` (a new file, or one that is replaced at the
// end; compressed where its name ends in .gz or .zst), in order; "nan" for a bad line, nothing for
// a header. Returns how many lines there were. kInvalidArgument: that would replace one of the
// inputs; or a file begins with bad lines alone. kAborted: `stopped`, which is asked now and then,
// was true; then there is no output.
Result<SourceStats> PredictRun(FileSystem* fs, const std::string& run,
                               const std::vector<std::string>& files,
                               std::optional<std::uint64_t> memory_bytes, const std::string& output,
                               const std::function<bool()>& stopped);

}  // namespace terrace
