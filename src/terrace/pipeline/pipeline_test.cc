#include "terrace/pipeline/pipeline.h"

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>

#include "terrace/base/core_binding.h"
#include "terrace/base/log.h"
#include "terrace/base/thread.h"

namespace terrace {
namespace {

std::unique_ptr<WorkItem> Item(std::uint32_t number) {
  auto item = std::make_unique<WorkItem>();
  auto batch = std::make_shared<Batch>();
  batch->first_example = number;
  item->batch = std::move(batch);
  return item;
}

// Emits items 0 .. count - 1, then is done, perhaps early.
class Source final : public Stage {
 public:
  explicit Source(std::uint32_t count, Status early = OkStatus())
      : count_(count), early_(std::move(early)) {}
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* done) override {
    EXPECT_EQ(item, nullptr);
    if (next_ == count_) {
      *done = true;
      return OkStatus();
    }
    return emit(Item(next_++));
  }
  Status EndedEarly() const override { return next_ == count_ ? early_ : OkStatus(); }

 private:
  const std::string name_ = "source";
  const std::uint32_t count_;
  const Status early_;
  std::uint32_t next_ = 0;
};

// Emits each item `copies` times; fails at item number `fail_at`.
class Repeat final : public Stage {
 public:
  Repeat(std::uint32_t copies, std::uint64_t fail_at) : copies_(copies), fail_at_(fail_at) {}
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* /*done*/) override {
    const std::uint64_t number = item->batch->first_example;
    if (number == fail_at_) return IoError("the disk is gone");
    for (std::uint32_t copy = 0; copy < copies_; ++copy) {
      TERRACE_RETURN_IF_ERROR(emit(Item(static_cast<std::uint32_t>(number))));
    }
    return OkStatus();
  }
  void Cancel(const Status& cause) override {
    EXPECT_FALSE(cause.ok());
    ++cancels;
  }
  std::atomic<int> cancels{0};

 private:
  const std::string name_ = "repeat";
  const std::uint32_t copies_;
  const std::uint64_t fail_at_;
};

class Sink final : public Stage {
 public:
  explicit Sink(std::uint64_t fail_at) : fail_at_(fail_at) {}
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& /*emit*/, bool* /*done*/) override {
    if (item->batch->first_example == fail_at_) return CorruptionError("bad row");
    seen.push_back(item->batch->first_example);
    return OkStatus();
  }
  std::vector<std::uint64_t> seen;

 private:
  const std::string name_ = "sink";
  const std::uint64_t fail_at_;
};

constexpr std::uint64_t kNever = ~std::uint64_t{0};

TEST(Pipeline, EveryDepthDeliversTheSameItemsInOrder) {
  for (std::size_t capacity : {0, 1, 2, 5}) {
    Source source(200);
    Repeat repeat(3, kNever);
    Sink sink(kNever);
    const std::vector<std::size_t> capacities(capacity == 0 ? 0 : 2, capacity);
    Pipeline pipeline({&source, &repeat, &sink}, capacities, Clock::Real());
    ASSERT_TRUE(pipeline.Run().ok());
    ASSERT_EQ(sink.seen.size(), 600u);
    for (std::size_t i = 0; i < sink.seen.size(); ++i) ASSERT_EQ(sink.seen[i], i / 3);
    EXPECT_EQ(pipeline.times()[2].items, 600u);
  }
}

TEST(Pipeline, TheFirstFailureEndsEveryStageAndIsTheResult) {
  for (std::size_t capacity : {0, 1, 3}) {
    Source source(1000000);
    Repeat repeat(1, 50);
    Sink sink(kNever);
    const std::vector<std::size_t> capacities(capacity == 0 ? 0 : 2, capacity);
    Pipeline pipeline({&source, &repeat, &sink}, capacities, Clock::Real());
    const Status status = pipeline.Run();
    EXPECT_EQ(status.code(), StatusCode::kIo);
    EXPECT_EQ(status.message(), "the disk is gone");
    EXPECT_LE(sink.seen.size(), 50u);
    EXPECT_EQ(repeat.cancels, capacity > 0 ? 1 : 0);
  }
}

TEST(Pipeline, WhatEndsTheFirstStageEarlyIsToldWhenAllHasPassed) {
  for (std::size_t capacity : {0, 1, 3}) {
    const std::vector<std::size_t> capacities(capacity == 0 ? 0 : 2, capacity);
    for (const bool sink_fails : {false, true}) {
      Source source(50, CorruptionError("the log is damaged"));
      Repeat repeat(2, kNever);
      Sink sink(sink_fails ? 49 : kNever);
      Pipeline pipeline({&source, &repeat, &sink}, capacities, Clock::Real());
      const Status status = pipeline.Run();
      EXPECT_EQ(status.message(), sink_fails ? "bad row" : "the log is damaged");
      EXPECT_EQ(sink.seen.size(), sink_fails ? 98u : 100u);
    }
  }
}

TEST(Pipeline, AFailureAtTheEndStopsAFullPipeline) {
  Source source(1000000);
  Repeat repeat(4, kNever);
  Sink sink(10);
  Pipeline pipeline({&source, &repeat, &sink}, {2, 2}, Clock::Real());
  EXPECT_EQ(pipeline.Run().code(), StatusCode::kCorruption);
}

TEST(Pipeline, AbortFromOutsideEndsIt) {
  Source source(~std::uint32_t{0});
  Repeat repeat(1, kNever);
  Sink sink(kNever);
  Pipeline pipeline({&source, &repeat, &sink}, {1, 1}, Clock::Real());
  Thread other("other", ThreadPriority::kNormal, [&] { pipeline.Abort(AbortedError("enough")); });
  EXPECT_EQ(pipeline.Run().code(), StatusCode::kAborted);
  other.Join();
}

// Ends by its channel; is told so slowly.
class SlowToCancel final : public Stage {
 public:
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> /*item*/, const Emit& emit, bool* /*done*/) override {
    return emit(Item(0));
  }
  void Cancel(const Status& /*cause*/) override {
    MutexLock lock(&mu_);
    never_.WaitFor(&mu_, std::chrono::milliseconds(100));
    cancelled = true;
  }
  std::atomic<bool> cancelled{false};

 private:
  const std::string name_ = "slow to cancel";
  Mutex mu_;
  CondVar never_;
};

TEST(Pipeline, RunReturnsWhenNoStageIsToldAnythingAnyMore) {
  SlowToCancel source;
  Sink sink(kNever);
  Pipeline pipeline({&source, &sink}, {1}, Clock::Real());
  Thread other("other", ThreadPriority::kNormal, [&] { pipeline.Abort(AbortedError("enough")); });
  EXPECT_EQ(pipeline.Run().code(), StatusCode::kAborted);
  EXPECT_TRUE(source.cancelled);
  other.Join();
}

TEST(Pipeline, AnAbortAfterTheEndTouchesNoStage) {
  for (std::size_t capacity : {0, 1}) {
    Source source(3);
    Repeat repeat(1, kNever);
    Sink sink(kNever);
    const std::vector<std::size_t> capacities(capacity == 0 ? 0 : 2, capacity);
    Pipeline pipeline({&source, &repeat, &sink}, capacities, Clock::Real());
    ASSERT_TRUE(pipeline.Run().ok());
    pipeline.Abort(AbortedError("too late"));
    EXPECT_EQ(repeat.cancels, 0);
  }
}

// What it does after its input ends when the sink lets it; may fail in it.
class Epilogue final : public Stage {
 public:
  explicit Epilogue(Status result) : result_(std::move(result)) {}
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* /*done*/) override {
    return emit(std::move(item));
  }
  Status AfterInput() override {
    ++calls;
    MutexLock lock(&mu_);
    begun_ = true;
    changed_.NotifyAll();
    return result_;
  }
  void WaitUntilBegun() {
    MutexLock lock(&mu_);
    while (!begun_) changed_.Wait(&mu_);
  }
  std::atomic<int> calls{0};

 private:
  const std::string name_ = "epilogue";
  const Status result_;
  Mutex mu_;
  CondVar changed_;
  bool begun_ TERRACE_GUARDED_BY(mu_) = false;
};

// Is busy with the last item until the epilogue has begun.
class LateSink final : public Stage {
 public:
  LateSink(std::uint64_t last, Epilogue* epilogue) : last_(last), epilogue_(epilogue) {}
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& /*emit*/, bool* /*done*/) override {
    if (item->batch->first_example == last_) epilogue_->WaitUntilBegun();
    ++items;
    return OkStatus();
  }
  int items = 0;

 private:
  const std::string name_ = "late";
  const std::uint64_t last_;
  Epilogue* const epilogue_;
};

TEST(Pipeline, AStageWorksOnAfterItsInputWhileLaterOnesAreBusy) {
  Source source(10);
  Epilogue epilogue(OkStatus());
  LateSink sink(9, &epilogue);
  Pipeline pipeline({&source, &epilogue, &sink}, {1, 1}, Clock::Real());
  ASSERT_TRUE(pipeline.Run().ok());
  EXPECT_EQ(epilogue.calls, 1);
  EXPECT_EQ(sink.items, 10);
}

TEST(Pipeline, WhatFailsAfterTheInputIsTheResult) {
  Source source(10);
  Epilogue epilogue(IoError("the disk is full"));
  LateSink sink(9, &epilogue);
  Pipeline pipeline({&source, &epilogue, &sink}, {1, 1}, Clock::Real());
  EXPECT_EQ(pipeline.Run().message(), "the disk is full");
}

TEST(Pipeline, NothingFollowsTheInputAfterAFailureOrWithNobodyBehind) {
  for (std::size_t capacity : {0, 1}) {
    Source source(10);
    Epilogue epilogue(OkStatus());
    Sink sink(capacity == 0 ? kNever : 5);
    const std::vector<std::size_t> capacities(capacity == 0 ? 0 : 2, capacity);
    Pipeline pipeline({&source, &epilogue, &sink}, capacities, Clock::Real());
    EXPECT_EQ(pipeline.Run().ok(), capacity == 0);
    EXPECT_EQ(epilogue.calls, 0);
  }
}

// Waits inside the first stage until it is cancelled, as a reader of a slow disk does.
class SlowSource final : public Stage {
 public:
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> /*item*/, const Emit& /*emit*/,
                 bool* /*done*/) override {
    MutexLock lock(&mu_);
    while (!cancelled_) changed_.Wait(&mu_);
    return AbortedError("cancelled");
  }
  void Cancel(const Status& /*cause*/) override {
    MutexLock lock(&mu_);
    cancelled_ = true;
    changed_.NotifyAll();
  }

 private:
  const std::string name_ = "slow";
  Mutex mu_;
  CondVar changed_;
  bool cancelled_ TERRACE_GUARDED_BY(mu_) = false;
};

class StoppingSink final : public Stage {
 public:
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> /*item*/, const Emit& /*emit*/,
                 bool* /*done*/) override {
    return OkStatus();
  }
  bool WantsToStop() override { return ++asked_ > 1; }

 private:
  const std::string name_ = "stopping";
  int asked_ = 0;
};

TEST(Pipeline, TheLastStageMayStopWhileItWaitsForASlowOne) {
  SlowSource source;
  StoppingSink sink;
  Pipeline pipeline({&source, &sink}, {1}, Clock::Real());
  EXPECT_EQ(pipeline.Run().code(), StatusCode::kAborted);
}

// Waits until the channel behind it is full, and then asks for the end.
class StoppingBehindFullChannel final : public Stage {
 public:
  const std::string& name() const override { return name_; }
  Status Process(std::unique_ptr<WorkItem> /*item*/, const Emit& /*emit*/,
                 bool* /*done*/) override {
    while (pipeline->channels().front().size == 0) std::this_thread::yield();
    return AbortedError("asked to stop");
  }
  void Cancel(const Status& /*cause*/) override { cancelled = true; }
  const Pipeline* pipeline = nullptr;
  std::atomic<bool> cancelled{false};

 private:
  const std::string name_ = "stopping";
};

// A batch that counts whether it went before the stages were cancelled.
class NotingBatch {
 public:
  NotingBatch(const std::atomic<bool>* cancelled, std::atomic<int>* before, std::atomic<int>* after)
      : cancelled_(cancelled), before_(before), after_(after) {}
  ~NotingBatch() { ++*(*cancelled_ ? after_ : before_); }
  NotingBatch(const NotingBatch&) = delete;
  NotingBatch& operator=(const NotingBatch&) = delete;
  Batch batch;

 private:
  const std::atomic<bool>* const cancelled_;
  std::atomic<int>*const before_, *const after_;
};

// What an item owns may go only when reads end, which they do when they are cancelled.
TEST(Pipeline, WhatChannelsHoldGoesAfterTheStagesAreCancelled) {
  StoppingBehindFullChannel sink;
  std::atomic<int> before{0}, after{0};
  class Held final : public Stage {
   public:
    explicit Held(std::shared_ptr<NotingBatch> second) : second_(std::move(second)) {}
    const std::string& name() const override { return name_; }
    Status Process(std::unique_ptr<WorkItem> /*item*/, const Emit& emit, bool* done) override {
      auto item = Item(0);
      *done = ++emitted_ == 2;
      if (*done) {  // It is in the channel while the sink has the first one.
        const Batch* const batch = &second_->batch;
        item->batch = std::shared_ptr<const Batch>(std::move(second_), batch);
      }
      return emit(std::move(item));
    }

   private:
    const std::string name_ = "held";
    std::shared_ptr<NotingBatch> second_;
    int emitted_ = 0;
  };
  Held source(std::make_shared<NotingBatch>(&sink.cancelled, &before, &after));
  Pipeline pipeline({&source, &sink}, {1}, Clock::Real());
  sink.pipeline = &pipeline;
  EXPECT_EQ(pipeline.Run().code(), StatusCode::kAborted);
  EXPECT_EQ(before, 0);
  EXPECT_EQ(after, 1);
}

TEST(Pipeline, CapacitiesFollowTheStagesTimes) {
  const double unknown[4] = {};
  EXPECT_EQ(ChannelCapacities(4, unknown, {}), (std::vector<std::size_t>{1, 3, 1}));
  EXPECT_EQ(ChannelCapacities(1, unknown, {}), (std::vector<std::size_t>{1, 1, 1}));
  EXPECT_TRUE(ChannelCapacities(0, unknown, {}).empty());
  const double slow_train[4] = {1.0, 1.0, 0.0, 10.0};
  EXPECT_EQ(ChannelCapacities(4, slow_train, {}), (std::vector<std::size_t>{1, 1, 1}));
  const double slow_pull[4] = {1.0, 10.0, 0.0, 5.0};
  EXPECT_EQ(ChannelCapacities(4, slow_pull, {}), (std::vector<std::size_t>{1, 3, 1}));
  const std::size_t fixed[3] = {7, 0, 2};
  EXPECT_EQ(ChannelCapacities(4, slow_pull, fixed), (std::vector<std::size_t>{7, 3, 2}));
}

// Notes where its thread may run.
class Bound final : public Stage {
 public:
  explicit Bound(Stage* stage) : stage_(stage) {}
  const std::string& name() const override { return stage_->name(); }
  Status Process(std::unique_ptr<WorkItem> item, const Emit& emit, bool* done) override {
    TERRACE_ASSIGN_OR_RETURN(units, CurrentUnits());
    return stage_->Process(std::move(item), emit, done);
  }
  std::vector<int> units;

 private:
  Stage* const stage_;
};

TEST(Pipeline, EachStageRunsWhereItIsBound) {
  const std::vector<int> before = CurrentUnits().value();
  Source source(3);
  Repeat repeat(1, kNever);
  Sink sink(kNever);
  Bound first(&source), second(&repeat), last(&sink);
  Pipeline pipeline({&first, &second, &last}, {1, 1}, Clock::Real(),
                    {{before.front()}, {}, {before.back()}});
  ASSERT_TRUE(pipeline.Run().ok());
  EXPECT_EQ(first.units, std::vector<int>{before.front()});
  EXPECT_EQ(second.units, before);
  EXPECT_EQ(last.units, std::vector<int>{before.back()});
  EXPECT_EQ(CurrentUnits().value(), before) << "the caller's own binding comes back";
}

}  // namespace
}  // namespace terrace
