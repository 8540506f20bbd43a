// Pipeline: runs a given list of stages, one thread each, with a bounded channel between neighbours
// (HPS 3, appendix B). A stage stalls when the next channel is full. The first failure wins, ends
// every stage, and is the result. Threads: Run is called once; the last stage runs on the caller's
// thread, and with depth 0 all of them do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/pipeline/work_item.h"

namespace terrace {

class Stage {
 public:
  // Hands an item to the next stage. Blocks: while its channel is full. An error: stop and return
  // it.
  using Emit = std::function<Status(std::unique_ptr<WorkItem>)>;

  virtual ~Stage() = default;
  virtual const std::string& name() const = 0;
  // Takes an item and emits none, one or several. The first stage gets nullptr, again and again,
  // until it sets *done.
  virtual Status Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* done) = 0;
  // Called once its input has ended and all that it emitted is on its way, while later stages still
  // work: not at depth 0, where none does. An error ends the run.
  virtual Status AfterInput() { return OkStatus(); }
  // Of the first stage: why it was done before it had emitted all there is, if it was. Asked when
  // what it emitted has passed every stage; Run returns it.
  virtual Status EndedEarly() const { return OkStatus(); }
  // Ends a blocked Process or AfterInput soon. Any thread; after the failure of another stage.
  virtual void Cancel(const Status& /*cause*/) {}
  // Asked while the stage waits for its input: true ends the run with kAborted. On the stage's own
  // thread.
  virtual bool WantsToStop() { return false; }
};

struct StageReport {
  std::string name;
  double busy_seconds = 0;
  double waited_for_input_seconds = 0;
  double waited_for_output_seconds = 0;
  double cpu_seconds = 0;  // Of the stage's own thread.
  std::uint64_t items = 0;
};

struct ChannelState {
  std::string name;  // Of the stage that fills it.
  std::size_t size = 0;
  std::size_t capacity = 0;
  std::uint64_t bytes = 0;  // Held by the items in it, rows not counted.
};

class Pipeline {
 public:
  // capacities: of the channel after each stage but the last; empty runs the stages one after
  // another (depth 0). units: of each stage, the processing units that its thread is bound to; none
  // where it may run anywhere. Borrows stages and clock until Run returns.
  Pipeline(std::vector<Stage*> stages, std::vector<std::size_t> capacities, Clock* clock,
           std::vector<std::vector<int>> units = {});
  ~Pipeline();

  // Blocks: until the first stage is done and all items have passed, or a stage failed. Every item
  // is destroyed then. Unless another stage has failed, what ended the first one early is the
  // result.
  Status Run();
  // Ends Run soon with `cause`; does nothing when Run has ended. Any thread.
  void Abort(const Status& cause);

  // Any thread, during Run too.
  std::vector<StageReport> times() const;
  std::vector<ChannelState> channels() const;
  void SetCapacity(std::size_t channel, std::size_t capacity);

 private:
  struct Link;

  Status RunSequential();
  void RunThreaded();
  // Body of stage s; returns when its input ends or something failed.
  void StageLoop(std::size_t s);
  Status RunStage(std::size_t s);
  Status RunAfterInput(std::size_t s);
  void AddTime(std::size_t s, double StageReport::*field, double seconds);

  const std::vector<Stage*> stages_;
  const std::vector<std::size_t> capacities_;
  Clock* const clock_;
  const std::vector<std::vector<int>> units_;  // (stages), or none.
  std::vector<std::unique_ptr<Link>> links_;   // links_[s] lies between stage s and s + 1.
  mutable Mutex mu_;
  CondVar abort_ended_;
  Status failure_ TERRACE_GUARDED_BY(mu_);
  bool aborting_ TERRACE_GUARDED_BY(mu_) = false;  // A thread tells channels and stages.
  bool ended_ TERRACE_GUARDED_BY(mu_) = false;     // Run touches no stage any more.
  std::vector<StageReport> times_ TERRACE_GUARDED_BY(mu_);
};

// The capacities for working sets brought up `depth` ahead of training: depth - 1 wait in the
// channel after the second stage (less when that stage is seen to be fast: HPS 3 presets capacities
// from the stages' times), one in the others. busy_seconds: of each stage; all 0: not known yet.
// fixed: (channels) 0, or the capacity that the user asked for.
std::vector<std::size_t> ChannelCapacities(int depth, std::span<const double> busy_seconds,
                                           std::span<const std::size_t> fixed);

}  // namespace terrace
