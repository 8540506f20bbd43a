#include "terrace/pipeline/pipeline.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "terrace/base/channel.h"
#include "terrace/base/core_binding.h"
#include "terrace/base/log.h"
#include "terrace/base/thread.h"

namespace terrace {

struct Pipeline::Link {
  explicit Link(std::size_t capacity) : channel(capacity) {}
  Channel<std::unique_ptr<WorkItem>> channel;
  std::atomic<std::uint64_t> bytes{0};  // A gauge; orders nothing.
};

Pipeline::Pipeline(std::vector<Stage*> stages, std::vector<std::size_t> capacities, Clock* clock,
                   std::vector<std::vector<int>> units)
    : stages_(std::move(stages)),
      capacities_(std::move(capacities)),
      clock_(clock),
      units_(std::move(units)) {
  TERRACE_CHECK(!stages_.empty());
  TERRACE_CHECK(units_.empty() || units_.size() == stages_.size());
  TERRACE_CHECK(capacities_.empty() || capacities_.size() + 1 == stages_.size());
  for (std::size_t capacity : capacities_) links_.push_back(std::make_unique<Link>(capacity));
  MutexLock lock(&mu_);
  for (Stage* stage : stages_) {
    StageReport times;
    times.name = stage->name();
    times_.push_back(times);
  }
}

Pipeline::~Pipeline() = default;

Status Pipeline::Run() {
  Status status;
  if (capacities_.empty()) {
    status = RunSequential();
  } else {
    RunThreaded();
  }
  MutexLock lock(&mu_);
  ended_ = true;
  // The stages may go when Run returns.
  while (aborting_) abort_ended_.Wait(&mu_);
  if (status.ok()) status = failure_;
  return status.ok() ? stages_.front()->EndedEarly() : status;
}

void Pipeline::AddTime(std::size_t s, double StageReport::*field, double seconds) {
  MutexLock lock(&mu_);
  times_[s].*field += seconds;
}

Status Pipeline::RunSequential() {
  // Time of a stage is its own: what it spends inside emit belongs to the stages after it.
  std::function<Status(std::size_t, std::unique_ptr<WorkItem>, bool*)> step =
      [&](std::size_t s, std::unique_ptr<WorkItem> item, bool* done) -> Status {
    const double start = clock_->MonotonicSeconds();
    const double cpu_start = ThreadCpuSeconds();
    double nested = 0;
    double cpu_nested = 0;
    const Stage::Emit emit = [&](std::unique_ptr<WorkItem> next) -> Status {
      TERRACE_CHECK(s + 1 < stages_.size());
      const double nested_start = clock_->MonotonicSeconds();
      const double cpu_nested_start = ThreadCpuSeconds();
      bool ignored = false;
      Status status = step(s + 1, std::move(next), &ignored);
      nested += clock_->MonotonicSeconds() - nested_start;
      cpu_nested += ThreadCpuSeconds() - cpu_nested_start;
      return status;
    };
    Status status = stages_[s]->Process(std::move(item), emit, done);
    AddTime(s, &StageReport::busy_seconds, clock_->MonotonicSeconds() - start - nested);
    AddTime(s, &StageReport::cpu_seconds, ThreadCpuSeconds() - cpu_start - cpu_nested);
    MutexLock lock(&mu_);
    ++times_[s].items;
    if (status.ok() && !failure_.ok()) status = failure_;
    return status;
  };
  bool done = false;
  while (!done) TERRACE_RETURN_IF_ERROR(step(0, nullptr, &done));
  return OkStatus();
}

void Pipeline::RunThreaded() {
  std::vector<Thread> threads;
  for (std::size_t s = 0; s + 1 < stages_.size(); ++s) {
    threads.emplace_back(stages_[s]->name(), ThreadPriority::kYielding,
                         [this, s] { StageLoop(s); });
  }
  StageLoop(stages_.size() - 1);
  for (Thread& thread : threads) thread.Join();
}

void Pipeline::StageLoop(std::size_t s) {
  const ScopedBinding binding(units_.empty() ? std::span<const int>() : units_[s]);
  Status status = RunStage(s);
  if (!status.ok()) Abort(status);
  if (s == links_.size()) return;
  links_[s]->channel.Close();
  if (status.ok()) status = RunAfterInput(s);
  if (!status.ok()) Abort(status);
}

Status Pipeline::RunAfterInput(std::size_t s) {
  const double start = clock_->MonotonicSeconds();
  const double cpu_start = ThreadCpuSeconds();
  Status status = stages_[s]->AfterInput();
  AddTime(s, &StageReport::busy_seconds, clock_->MonotonicSeconds() - start);
  AddTime(s, &StageReport::cpu_seconds, ThreadCpuSeconds() - cpu_start);
  return status;
}

Status Pipeline::RunStage(std::size_t s) {
  double waited = 0;
  const Stage::Emit emit = [&](std::unique_ptr<WorkItem> item) -> Status {
    TERRACE_CHECK(s < links_.size());
    const double start = clock_->MonotonicSeconds();
    const std::uint64_t bytes =
        item->MemoryBytes() + (item->last_of_batch ? item->batch->MemoryBytes() : 0);
    links_[s]->bytes += bytes;
    Status status = links_[s]->channel.Send(std::move(item));
    const double seconds = clock_->MonotonicSeconds() - start;
    waited += seconds;
    AddTime(s, &StageReport::waited_for_output_seconds, seconds);
    return status;
  };
  bool done = false;
  while (!done) {
    std::unique_ptr<WorkItem> item;
    if (s > 0) {
      const double start = clock_->MonotonicSeconds();
      TERRACE_ASSIGN_OR_RETURN(
          std::optional<std::unique_ptr<WorkItem>> received,
          links_[s - 1]->channel.Receive([&] { return stages_[s]->WantsToStop(); }));
      AddTime(s, &StageReport::waited_for_input_seconds, clock_->MonotonicSeconds() - start);
      if (!received.has_value()) return OkStatus();
      item = std::move(*received);
      links_[s - 1]->bytes -=
          item->MemoryBytes() + (item->last_of_batch ? item->batch->MemoryBytes() : 0);
    }
    const double start = clock_->MonotonicSeconds();
    const double cpu_start = ThreadCpuSeconds();
    waited = 0;
    const Status status = stages_[s]->Process(std::move(item), emit, &done);
    AddTime(s, &StageReport::busy_seconds, clock_->MonotonicSeconds() - start - waited);
    AddTime(s, &StageReport::cpu_seconds, ThreadCpuSeconds() - cpu_start);
    TERRACE_RETURN_IF_ERROR(status);
    MutexLock lock(&mu_);
    ++times_[s].items;
  }
  return OkStatus();
}

void Pipeline::Abort(const Status& cause) {
  {
    MutexLock lock(&mu_);
    if (!failure_.ok()) {
      // What a stage says after it was told to stop is an effect, not a cause.
      if (cause.code() != StatusCode::kAborted && cause.ToString() != failure_.ToString()) {
        LogText(LogLevel::kWarning, "after the first failure: " + cause.ToString());
      }
      return;
    }
    if (ended_) return;
    failure_ = cause;
    aborting_ = true;
  }
  {
    // An item waits, as it goes, for its rows to be read, unless that is cancelled before.
    std::vector<std::deque<std::unique_ptr<WorkItem>>> dropped;
    for (const auto& link : links_) dropped.push_back(link->channel.Abort(cause));
    for (Stage* stage : stages_) stage->Cancel(cause);
  }
  MutexLock lock(&mu_);
  aborting_ = false;
  abort_ended_.NotifyAll();
}

std::vector<StageReport> Pipeline::times() const {
  MutexLock lock(&mu_);
  return times_;
}

std::vector<ChannelState> Pipeline::channels() const {
  std::vector<ChannelState> states;
  for (std::size_t s = 0; s < links_.size(); ++s) {
    ChannelState state;
    state.name = stages_[s]->name();
    state.size = links_[s]->channel.size();
    state.capacity = links_[s]->channel.capacity();
    state.bytes = links_[s]->bytes.load();
    states.push_back(state);
  }
  return states;
}

void Pipeline::SetCapacity(std::size_t channel, std::size_t capacity) {
  links_.at(channel)->channel.set_capacity(capacity);
}

std::vector<std::size_t> ChannelCapacities(int depth, std::span<const double> busy_seconds,
                                           std::span<const std::size_t> fixed) {
  std::vector<std::size_t> capacities;
  if (depth == 0) return capacities;
  double longest = 0;
  for (double seconds : busy_seconds) longest = std::max(longest, seconds);
  for (std::size_t channel = 0; channel + 1 < busy_seconds.size(); ++channel) {
    // One batch waits beside the one that each stage has in hand; more are held where the working
    // sets are, in the channel after the second stage.
    std::size_t capacity = channel == 1 ? static_cast<std::size_t>(std::max(1, depth - 1)) : 1;
    if (longest > 0 && capacity > 1) {
      // A channel never pays beyond what its producer can be late by.
      const double share = busy_seconds[channel] / longest;
      capacity =
          1 + static_cast<std::size_t>(std::lround(static_cast<double>(capacity - 1) * share));
    }
    if (channel < fixed.size() && fixed[channel] > 0) capacity = fixed[channel];
    capacities.push_back(capacity);
  }
  return capacities;
}

}  // namespace terrace
