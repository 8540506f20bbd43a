#include "terrace/train/model_runtime.h"

#include <algorithm>

#include "terrace/train/evaluation.h"

namespace terrace {
namespace {

// Where a step takes no more than this, the memory plan refuses a budget that is too small for it,
// and says how much would do.
constexpr std::uint64_t kFewStepBytes = std::uint64_t{1} << 30;

}  // namespace

Result<ModelRuntime> ModelRuntime::Make(const Job& job, const ModelPlan& plan) {
  ModelRuntime made;
  TERRACE_ASSIGN_OR_RETURN(
      made.network, CreateNetwork(plan.network, plan.inputs, job.seed, job.memory.budget_bytes));
  PrepareComputeThread();
  made.workers = std::make_unique<WorkerGroup>("compute", job.training.threads,
                                               [] { PrepareComputeThread(); });
  TERRACE_ASSIGN_OR_RETURN(
      made.executor,
      StepExecutor::Create(StepTables(plan, job.seed), job.training.minibatch, made.network.get(),
                           made.workers.get(), std::max(kFewStepBytes, job.memory.budget_bytes)));
  TERRACE_RETURN_IF_ERROR(made.executor->WarmUp());
  return made;
}

}  // namespace terrace
