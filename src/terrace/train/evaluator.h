// Evaluator: metrics and predictions of a run's newest checkpoint over further files. Reads the run
// beside its trainer, writes nothing into it, creates no row and keeps the memory budget of the
// run's job. Threads: one.
#pragma once

#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/model/metrics.h"

namespace terrace {

// files: paths or globs, in the format of the run's job. kNotFound: no run, or no checkpoint yet.
Result<ClickMetricsResult> EvaluateRun(FileSystem* fs, const std::string& run,
                                       const std::vector<std::string>& files);

// Writes a probability per input line to `output` (a new file, or one that is replaced at the end),
// in order; "nan" for a bad line. kInvalidArgument: that would replace one of the inputs.
Status PredictRun(FileSystem* fs, const std::string& run, const std::vector<std::string>& files,
                  const std::string& output);

}  // namespace terrace
