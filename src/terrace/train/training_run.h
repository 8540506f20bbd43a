// TrainingRun: one run in this process: prepares every part, drives the pipeline, takes
// checkpoints, writes metrics. Threads: Prepare and Run on one thread, which is stage 4's;
// BeforePull on stage 2's; DropOldest on any that writes.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/core_binding.h"
#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/cache/row_cache.h"
#include "terrace/data/example_source.h"
#include "terrace/model/metrics.h"
#include "terrace/pipeline/key_plan.h"
#include "terrace/pipeline/look_ahead.h"
#include "terrace/pipeline/pipeline.h"
#include "terrace/pipeline/stages.h"
#include "terrace/store/store.h"
#include "terrace/train/binding_plan.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/evaluation.h"
#include "terrace/train/job.h"
#include "terrace/train/memory_plan.h"
#include "terrace/train/metrics_file.h"
#include "terrace/train/model_runtime.h"
#include "terrace/train/run_stores.h"
#include "terrace/train/summary.h"
#include "terrace/train/trained_expiry.h"
#include "terrace/train/trainer.h"

namespace terrace {

class TrainingRun {
 public:
  TrainingRun(FileSystem* fs, Clock* clock, const Job& job, const std::atomic<int>* stop_signals);
  ~TrainingRun();

  // Opens inputs, plans memory, and only then touches the run's folder.
  Status Prepare(RunMode mode);
  bool already_finished() const { return already_finished_; }
  // Trains to the end, or to a checkpoint when a signal comes.
  Result<TrainOutcome> Run();
  // After an error: removes the run's folder where this process made it and nothing was trained.
  void AbandonIfUntrained();

 private:
  // All that comes before the folder is touched.
  Status PlanRun(RunMode mode);
  // Whether the run there is finished; `planned`: whether this process could train it. Only reads.
  // kInvalidArgument: it is another model's, as far as that can be told.
  Result<bool> IsFinished(const Status& planned);
  // Of a run that ended at training.max_examples: whether the job now allows more.
  bool AsksForMore(const Checkpoint& finished) const;
  Status OpenInputs();
  // Of a further source, which is closed again: the first mini-batch of the job's data.
  Status ReadFirstExamples();
  // Asks for the rest of what a run asks of the system, and gives it back.
  Status TryWhatARunTakes() const;
  DataOptions ValidationData() const;
  Status MakeMemoryPlan();
  Status OpenRun(RunMode mode);
  // Of a new run.
  Status CheckQuota() const;
  std::uint64_t LeastQuotaBytes() const;
  std::uint64_t LeastRowsQuotaBytes() const;  // Of it, for rows.
  // That the system lets this process have open.
  std::uint64_t OtherOpenFiles() const;  // At most.
  std::uint64_t MostParameterFiles() const;
  Status CheckOpenFiles() const;
  // Where the disks have less room than the quota lets the run take.
  void WarnOfFullDisks();
  Status MakeFilters();
  Status MakeCaches();
  // Whether summary.json is there and tells of that checkpoint.
  bool HasSummaryOf(std::uint64_t checkpoint);
  Status Restore(const Checkpoint& checkpoint);
  // Goes to the checkpoint's position in the data, and returns what is true of it there.
  Result<DataCursor> SeekData(const Checkpoint& checkpoint);

  // Stage 4: one mini-batch and what is due after it.
  Status TrainMinibatch(WorkItem* item, std::uint32_t m);
  // Tells the tiers how far training is.
  void SetTrainedPosition();
  // What is due at the boundary after it: metrics, validation, checkpoint, stop. before: examples
  // before it.
  Status AfterMinibatch(WorkItem* item, std::uint64_t before, bool epoch_ends);
  Status Step(WorkItem* item, std::uint32_t m);
  // Whether a boundary of every `every` examples was passed since `before`.
  static bool Passed(std::uint64_t before, std::uint64_t now, std::uint64_t every);
  Status Validate();
  // finished: with the interval of metrics that is open.
  Status TakeCheckpoint(bool finished);
  Status DropCheckpointsBeyond(std::size_t keep);
  // For a short quota: whether there was one to drop.
  bool DropOldest() TERRACE_EXCLUDES(checkpoints_mu_);
  // kUnavailable: a reader holds it.
  Status DropKept(std::size_t i) TERRACE_REQUIRES(checkpoints_mu_);
  Status CheckStop();
  bool AllTrained() const;  // That the job asks for, by training.max_examples.
  bool Signalled() const;
  // Bytes on disk that a checkpoint taken now would write at most, those of a dense file, and those
  // of its admission filters.
  std::uint64_t CheckpointBytes() const;
  std::uint64_t CheckpointFiles(std::uint64_t bytes) const;  // Of such a checkpoint, at most.
  std::uint64_t MostDenseFileBytes() const;
  std::uint64_t FilterFilesBytes() const;
  // Of the checkpoint's own file, some mini-batches from now.
  std::uint64_t MostCheckpointFileBytes() const;
  // Of the metrics in it. After each change of them.
  void CountMetricsBytes();
  // Of the files that a run has once and of its folders.
  std::uint64_t SmallFilesBytes() const;
  // Reserves what checkpoints hold beside the stores, damaged ones too, and notes each one's.
  Status ReserveKept(std::span<const Checkpoint> kept) TERRACE_EXCLUDES(checkpoints_mu_);
  // Writes what a checkpoint names and notes it there; adds what that takes of the quota, beside
  // the stores, to `bytes`.
  Status WriteCheckpointParts(Checkpoint* checkpoint, std::uint64_t* bytes);
  Status WriteFilters(Checkpoint* checkpoint, std::uint64_t* bytes);
  // Removes what is there of a checkpoint that failed, whose parts take so much.
  void RemoveFailedCheckpoint(std::uint64_t id, std::uint64_t bytes);
  // Of one that admits keys too soon, once.
  void WarnOfFullFilter(const std::string& table, const AdmissionFilter& filter);
  // Keeps that much of the quota free: waits for compaction, then drops old checkpoints for it, and
  // asks for a stop when there is no more to drop.
  Status ReserveForLastCheckpoint() TERRACE_EXCLUDES(checkpoints_mu_);
  Status AfterFailure(const Status& failure);
  // Whether a checkpoint of what was trained before is worth its place.
  bool LeavesMoreThanSaved(const Status& failure) const;
  // Of a disk that fails or is full, or a log that is damaged: adds what the run still has and how
  // it goes on.
  Status WithWayOn(const Status& failure) const;
  // Notes a failure of an input; way_on: what is to be done about it, should its contents be wrong.
  void FailedByInput(const Status& failure, std::string_view way_on);
  Result<bool> BeforePull();
  void AfterPull(const DataCursor& cursor);
  // By table, rows that its stores' indexes will have to take in: of a table by key, those that no
  // store has.
  std::vector<std::uint64_t> NewToIndexes() const;
  // Of the indexes, once these are stored.
  std::uint64_t ComingIndexBytes(std::span<const std::uint64_t> new_rows) const;
  // What the caches, by table, can't give way below.
  std::vector<std::uint64_t> LeastCaches() const;
  // True: pinned rows hold more than the caches may have from now on.
  Result<bool> GiveWayToIndex();
  // Writes rows ahead of what a checkpoint could write in checkpoint.final_seconds.
  Status WriteAhead();
  // Writes what the last sets do not hold while these are trained: the final checkpoint has less to
  // do.
  Status WriteAheadOfEnd();
  // Rows are about to be written, perhaps all of them: tells the stores how many of them are new,
  // as far as the caches leave room for an index that grows for them at once.
  void ExpectRows() const;
  // Bytes of the index that the caches give way to at a time.
  std::uint64_t IndexStep() const;
  void AdaptChannels();

  // What is written down.
  Status WriteInterval();
  IntervalRecord::Performance Totals() const;
  PipelineTimes Times() const;
  RowCacheStats CacheStats() const;
  void ShowProgress();
  std::string SaveTrainerState() const;
  // Of the whole run; `stores`: what this process did.
  SsdWear Wear(const StoreStats& stores) const;
  // The disks of rows that tell their wear, asked once a minute at most.
  const std::vector<DriveHealth>& Drives();
  Status RestoreTrainerState(const std::string& json);
  Result<RunSummary> Summarize(bool finished);
  // Of all tables, without expired ones: reads every row of tables that have an expiry.
  Result<std::uint64_t> CountRows();
  bool AnyExpires() const;
  ExpiryCounts CountExpired() const;
  Status WriteSummary(const RunSummary& summary);

  FileSystem* const fs_;
  Clock* const clock_;
  Job job_;  // Changed while memory is planned and caches are made alone.
  const std::atomic<int>* const stop_signals_;
  const double start_seconds_;
  const std::uint64_t metrics_every_;

  // Set by Prepare, constant afterwards; destroyed in reverse order.
  bool already_finished_ = false;
  std::uint64_t train_read_ahead_bytes_ = 0, validation_source_bytes_ = 0;
  std::vector<InputFile> validation_files_;  // Frozen at the start.
  std::unique_ptr<ExampleSource> source_;
  std::optional<ModelPlan> plan_;
  std::uint64_t job_text_bytes_ = 0, identity_bytes_ = 0;
  ModelRuntime model_;
  std::vector<std::size_t> fixed_capacities_;
  std::vector<std::size_t> capacities_;
  MemoryPlanInput memory_input_;
  MemoryPlan memory_;
  BindingPlan binding_;
  std::optional<ScopedInterleaving> interleaving_;
  std::unique_ptr<RunFolder> run_;
  std::unique_ptr<DiskQuota> quota_;
  // The stores' threads drop checkpoints, to their end.
  Mutex checkpoints_mu_;
  struct Kept {
    std::uint64_t id = 0;
    std::uint64_t bytes = 0;  // Of the quota: its own file, its dense file and its filters.
  };
  std::vector<Kept> kept_ TERRACE_GUARDED_BY(checkpoints_mu_);  // Oldest first.
  std::vector<std::unique_ptr<TrainedExpiry>> expiry_;  // By table; null: rows never expire.
  std::unique_ptr<RunStores> stores_;
  // By table; null: every key has a row. Stage 2's are as far as it has planned.
  std::vector<std::unique_ptr<AdmissionFilter>> planned_filters_;
  std::vector<std::unique_ptr<AdmissionFilter>> filters_;
  std::unique_ptr<FutureKeys> future_keys_;  // Null: nobody looks ahead.
  std::unique_ptr<LookAhead> look_ahead_;    // Until the pipeline has ended.
  std::vector<std::unique_ptr<RowCache>> caches_;
  std::vector<RowCache*> cache_pointers_;
  std::unique_ptr<PullStage> pull_;  // Made by Run.
  std::unique_ptr<KeyPlanner> validation_planner_;
  std::unique_ptr<MetricsFile> metrics_file_;
  Pipeline* pipeline_ = nullptr;  // While Run drives it.
  // Afterwards.
  std::vector<StageReport> final_times_;
  std::vector<ChannelState> final_channels_;

  // Stage 4's.
  DataCursor cursor_;
  std::uint64_t steps_ = 0;
  std::uint64_t start_examples_ = 0;  // Trained before this process.
  std::uint64_t last_checkpoint_ = 0;
  std::uint64_t attempted_checkpoint_ = 0;  // The same, or a later one that failed.
  StepRates rates_;
  ClickMetrics progressive_;
  ClickMetrics window_;
  ClickMetricsResult last_window_;  // The one that ended last in this process.
  std::optional<ClickMetricsResult> validation_;
  bool reached_max_examples_ = false;
  bool interrupted_ = false;
  // What ended training and leaves what was trained intact: the input, or a step that applied
  // nothing.
  Status sound_failure_;
  std::string_view input_way_on_;  // What is to be done about that input; empty: it was another.
  std::uint64_t checkpointed_examples_ = 0;  // By the newest checkpoint.
  bool validation_due_ = false;
  std::uint64_t validated_examples_ = 0;  // Trained by the last validation.
  SsdWear wear_before_;                   // As the checkpoint said that this process resumed from.
  std::vector<DriveHealth> drives_;
  double drives_asked_seconds_ = -std::numeric_limits<double>::infinity();
  // Shows of keys that were not admitted: of the run, and of the interval.
  std::uint64_t unadmitted_shows_ = 0, unadmitted_in_window_ = 0;
  bool warned_of_filter_ = false;
  // At the last interval's end, or this process's start.
  IntervalRecord::Performance last_totals_;
  std::uint64_t last_interval_examples_ = 0;
  double last_progress_seconds_ = 0;
  std::uint64_t last_progress_examples_ = 0;
  std::uint64_t last_progress_read_ = 0, last_progress_write_ = 0;
  std::uint64_t minibatches_since_start_ = 0;
  bool quota_has_room_ = false;  // For several checkpoints, when it was last looked at.

  // Relaxed: stage 2 reads what it was lately.
  std::atomic<std::uint64_t> most_metrics_bytes_{0};

  // Stage 2's.
  // What the caches leave free for the index. Relaxed: a checkpoint reads what it was lately.
  std::atomic<std::uint64_t> planned_index_bytes_{0};

  Mutex stop_mu_;
  Status stop_after_checkpoint_ TERRACE_GUARDED_BY(stop_mu_);
};

}  // namespace terrace
