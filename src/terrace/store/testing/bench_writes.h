// BenchWrites: batches of rows on their way into a store, as a cache writes them: one goes to the
// disk while the index takes the last one in and the caller makes the next. Threads: the caller's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "terrace/base/channel.h"
#include "terrace/base/check.h"
#include "terrace/base/clock.h"
#include "terrace/base/mutex.h"
#include "terrace/base/thread.h"
#include "terrace/store/store.h"
#include "terrace/store/testing/bench_rows.h"

namespace terrace {

class BenchWrites {
 public:
  static constexpr std::size_t kBatches = 3;

  // rows: kBatches, one batch each. known: of all keys, see Store::Write. Borrows the store.
  BenchWrites(Store* store, std::vector<std::unique_ptr<BenchRows>> rows, std::uint8_t known)
      : store_(store), known_(known) {
    TERRACE_CHECK(rows.size() == kBatches);
    for (std::size_t i = 0; i < kBatches; ++i) {
      batches_[i].rows = std::move(rows[i]);
      TERRACE_CHECK(free_.Send(&batches_[i]).ok());
    }
    stager_ = Thread("stage", ThreadPriority::kNormal, [this] { Loop(&BenchWrites::Stage); });
    publisher_ =
        Thread("publish", ThreadPriority::kNormal, [this] { Loop(&BenchWrites::Publish); });
  }
  ~BenchWrites() {
    if (stager_.joinable()) (void)Finish();
  }

  // Writes what `make` fills in.
  template <typename Make>
  Status Write(Make make) {
    TERRACE_ASSIGN_OR_RETURN(const std::optional<Batch*> batch, free_.Receive());
    make((*batch)->rows.get());
    return made_.Send(*batch);
  }
  // Waits for the last batch. The figures are there afterwards.
  Status Finish() {
    made_.Close();
    stager_.Join();
    publisher_.Join();
    MutexLock lock(&mu_);
    return failure_;
  }
  const std::vector<double>& seconds() const { return seconds_; }  // Of both halves, by batch.
  double cpu_seconds() const { return cpu_[0] + cpu_[1]; }

 private:
  struct Batch {
    std::unique_ptr<BenchRows> rows;
    std::vector<const std::byte*> sources;
    std::vector<std::uint8_t> stored;
    std::unique_ptr<StagedRows> staged;
    double seconds = 0;
  };

  // Both halves end with the first failure, and the caller with them.
  void Loop(Status (BenchWrites::*half)()) {
    const Status status = (this->*half)();
    const bool stages = half == &BenchWrites::Stage;
    cpu_[stages ? 0 : 1] = ThreadCpuSeconds();
    if (stages) staged_.Close();
    if (status.ok()) return;
    {
      MutexLock lock(&mu_);
      if (failure_.ok()) failure_ = status;
    }
    for (Channel<Batch*>* channel : {&free_, &made_, &staged_}) channel->Abort(status);
  }

  Status Stage() {
    while (true) {
      TERRACE_ASSIGN_OR_RETURN(const std::optional<Batch*> received, made_.Receive());
      if (!received.has_value()) return OkStatus();
      Batch* batch = *received;
      const std::span<const Key> keys = batch->rows->keys();
      batch->stored.assign(keys.size(), known_);
      batch->sources.resize(keys.size());
      const std::size_t row_bytes = batch->rows->bytes().size() / keys.size();
      for (std::size_t i = 0; i < keys.size(); ++i) {
        batch->sources[i] = batch->rows->bytes().data() + i * row_bytes;
      }
      const double start = Clock::Real()->MonotonicSeconds();
      TERRACE_ASSIGN_OR_RETURN(batch->staged, store_->Stage(keys, batch->sources, batch->stored));
      batch->seconds = Clock::Real()->MonotonicSeconds() - start;
      TERRACE_RETURN_IF_ERROR(staged_.Send(batch));
    }
  }

  Status Publish() {
    while (true) {
      TERRACE_ASSIGN_OR_RETURN(const std::optional<Batch*> received, staged_.Receive());
      if (!received.has_value()) return OkStatus();
      const double start = Clock::Real()->MonotonicSeconds();
      TERRACE_RETURN_IF_ERROR(store_->Publish(std::move((*received)->staged)));
      seconds_.push_back((*received)->seconds + Clock::Real()->MonotonicSeconds() - start);
      TERRACE_RETURN_IF_ERROR(free_.Send(*received));
    }
  }

  Store* const store_;
  const std::uint8_t known_;
  std::array<Batch, kBatches> batches_;
  Channel<Batch*> free_{kBatches}, made_{1}, staged_{1};
  std::vector<double> seconds_;  // The publisher's until Finish.
  std::array<double, 2> cpu_ = {};
  Mutex mu_;
  Status failure_ TERRACE_GUARDED_BY(mu_);
  Thread stager_, publisher_;
};

}  // namespace terrace
