#include "terrace/train/trainer.h"

#include <utility>

#include "terrace/base/clock.h"
#include "terrace/train/training_run.h"

namespace terrace {

Result<TrainOutcome> TrainJob(FileSystem* fs, const Job& job, RunMode mode,
                              const std::atomic<int>* stop_signals) {
  TrainingRun run(fs, Clock::Real(), job, stop_signals);
  TERRACE_RETURN_IF_ERROR(run.Prepare(mode));
  if (run.already_finished()) {
    TrainOutcome outcome;
    outcome.already_finished = true;
    return outcome;
  }
  return run.Run();
}

}  // namespace terrace
