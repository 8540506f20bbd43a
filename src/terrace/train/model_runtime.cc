#include "terrace/train/model_runtime.h"

#include "terrace/train/evaluation.h"

namespace terrace {

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
                           made.workers.get(), job.memory.budget_bytes));
  TERRACE_RETURN_IF_ERROR(made.executor->WarmUp());
  return made;
}

}  // namespace terrace
