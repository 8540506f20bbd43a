// Trainer: one run from its job to its final checkpoint. Threads: TrainJob on one; `stop_signals`
// may grow from a signal handler.
#pragma once

#include <atomic>
#include <string>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/train/job.h"
#include "terrace/train/summary.h"

namespace terrace {

enum class RunMode {
  kNew,        // Refuses a folder that holds a run.
  kResume,     // From the newest checkpoint; without one, as kNew.
  kOverwrite,  // Deletes the run there first.
};

struct TrainOutcome {
  bool interrupted = false;       // A signal came; the run ended with a checkpoint.
  bool already_finished = false;  // kResume of a finished run: nothing was done.
  RunSummary summary;
};

// Trains. kInvalidArgument: the job or its inputs are wrong, seen before anything was trained. Ends
// with a checkpoint when *stop_signals becomes positive (nullptr: never); kAborted: it was before
// anything was changed, or before a run that is resumed went on. On error the last checkpoint is
// intact; a new run of which nothing was trained leaves nothing.
Result<TrainOutcome> TrainJob(FileSystem* fs, const Job& job, RunMode mode,
                              const std::atomic<int>* stop_signals);

}  // namespace terrace
