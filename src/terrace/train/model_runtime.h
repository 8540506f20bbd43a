// ModelRuntime: the network of a job and the threads that run it, ready for the first mini-batch.
// Threads: made and used by one.
#pragma once

#include <memory>

#include "terrace/base/status.h"
#include "terrace/base/thread.h"
#include "terrace/model/network.h"
#include "terrace/pipeline/train_step.h"
#include "terrace/train/job.h"

namespace terrace {

struct ModelRuntime {
  // Every kernel has run once on zeros, so that what it allocates is known to the memory plan; no
  // parameter was changed by that. Borrows `plan`. The caller becomes a compute thread.
  static Result<ModelRuntime> Make(const Job& job, const ModelPlan& plan);

  std::unique_ptr<Network> network;
  std::unique_ptr<WorkerGroup> workers;
  std::unique_ptr<StepExecutor> executor;
};

}  // namespace terrace
