#include "terrace/train/trainer.h"

#include <utility>

#include "terrace/base/clock.h"
#include "terrace/train/parts_plan.h"
#include "terrace/train/training_run.h"

namespace terrace {

Result<TrainOutcome> TrainJob(FileSystem* fs, const Job& job, RunMode mode,
                              const std::atomic<int>* stop_signals) {
  TrainingRun run(fs, Clock::Real(), WithParts(fs, job, mode), stop_signals);
  if (Status status = run.Prepare(mode); !status.ok()) {
    run.AbandonIfUntrained();
    return status;
  }
  if (run.already_finished()) {
    TrainOutcome outcome;
    outcome.already_finished = true;
    return outcome;
  }
  Result<TrainOutcome> outcome = run.Run();
  if (!outcome.ok()) run.AbandonIfUntrained();
  return outcome;
}

}  // namespace terrace
