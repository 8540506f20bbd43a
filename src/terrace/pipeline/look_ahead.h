// LookAhead: reads the training log a second time, ahead of the first, and tells the caches which
// keys will come and when (FutureKeys). It begins when rows are about to be evicted and reads as
// far as FutureKeys has room. What it knows changes no bit of a model. Threads: one of its own,
// which yields; Begin and SetPlanned from one thread (stage 2), the others from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/base/thread.h"
#include "terrace/cache/future_keys.h"
#include "terrace/data/example_source.h"

namespace terrace {

class LookAhead {
 public:
  using Open = std::function<Result<std::unique_ptr<ExampleSource>>()>;
  // open: makes a source of the same examples, on the thread of its own. future: borrowed; nobody
  // else adds to it.
  LookAhead(Open open, std::uint32_t minibatch, FutureKeys* future);
  ~LookAhead() { Stop(); }

  // Of memory that holds rows: whether it is time to begin. Before, nothing can be gained.
  static bool Fills(std::uint64_t used, std::uint64_t capacity) { return used >= capacity / 4 * 3; }
  // Examples from `from` on have not got their rows. REQUIRES: has not begun.
  void Begin(const DataCursor& from);
  // And has not been stopped. Any thread.
  bool begun() const { return begun_.load(std::memory_order_acquire); }
  // Examples before `cursor` have got their rows. REQUIRES: has begun.
  void SetPlanned(const DataCursor& cursor) TERRACE_EXCLUDES(mu_);

  // Ends it; the gauges stay. From the thread that owns it.
  void Stop() TERRACE_EXCLUDES(mu_);

  // Examples that were looked at and have not got their rows yet. A gauge.
  std::uint64_t examples_ahead() const;
  double cpu_seconds() const { return cpu_seconds_.load(std::memory_order_relaxed); }

 private:
  void Loop(const DataCursor& from) TERRACE_EXCLUDES(mu_);
  // Reads on until the end of the log, or Stop.
  Status ReadOn(const DataCursor& from) TERRACE_EXCLUDES(mu_);
  // Blocks: until examples up to `end` may be added. False: it is to stop.
  bool AwaitRoom(std::uint64_t end) TERRACE_EXCLUDES(mu_);
  void Add(const Batch& batch);

  const Open open_;
  const std::uint32_t minibatch_;
  FutureKeys* const future_;
  Mutex mu_;
  CondVar changed_;
  ExampleSource* source_ TERRACE_GUARDED_BY(mu_) = nullptr;  // While it is read.
  bool stop_ TERRACE_GUARDED_BY(mu_) = false;
  std::atomic<bool> begun_{false};
  // Relaxed: gauges, and how far stage 2 is.
  std::atomic<std::uint64_t> planned_{0};
  std::atomic<std::uint64_t> seen_{0};
  std::atomic<double> cpu_seconds_{0};
  Thread thread_;
};

}  // namespace terrace
