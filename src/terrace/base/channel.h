// Channel<T>: a bounded queue between two stages. Close() ends it after what it holds; Abort() ends
// it at once. Threads: any number of senders and receivers. Internally synchronised.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "terrace/base/mutex.h"
#include "terrace/base/status.h"

namespace terrace {

template <typename T>
class Channel {
 public:
  // REQUIRES: capacity >= 1, in items.
  explicit Channel(std::size_t capacity) : capacity_(capacity) { TERRACE_CHECK(capacity >= 1); }

  // Blocks: while the channel is full. After Abort: its cause, and the item is dropped. REQUIRES:
  // not closed.
  Status Send(T item) TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    while (items_.size() >= capacity_ && abort_cause_.ok()) not_full_.Wait(&mu_);
    if (!abort_cause_.ok()) return abort_cause_;
    TERRACE_CHECK(!closed_);
    items_.push_back(std::move(item));
    not_empty_.NotifyOne();
    return OkStatus();
  }

  // Blocks: while the channel is open and empty. nullopt: closed and drained. After Abort: its
  // cause. `stopped`, if given, is asked at least every half second of the wait: true ends it with
  // kAborted.
  Result<std::optional<T>> Receive(const std::function<bool()>& stopped = nullptr)
      TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    while (items_.empty() && !closed_ && abort_cause_.ok()) {
      if (stopped && stopped()) return AbortedError("stopped while waiting for a batch");
      not_empty_.Wait(&mu_);
    }
    if (!abort_cause_.ok()) return abort_cause_;
    if (items_.empty()) return std::optional<T>();
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    not_full_.NotifyOne();
    return item;
  }

  void Close() TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    closed_ = true;
    not_empty_.NotifyAll();
  }

  // The first cause stays. Returns what the channel held, for the caller to drop when he can wait
  // for what an item owns. REQUIRES: !cause.ok().
  std::deque<T> Abort(const Status& cause) TERRACE_EXCLUDES(mu_) {
    std::deque<T> dropped;
    MutexLock lock(&mu_);
    if (abort_cause_.ok()) abort_cause_ = cause;
    dropped.swap(items_);
    not_full_.NotifyAll();
    not_empty_.NotifyAll();
    return dropped;
  }

  std::size_t size() const TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    return items_.size();
  }
  std::size_t capacity() const TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    return capacity_;
  }
  // Changes the capacity from now on; what is queued stays. REQUIRES: capacity >= 1.
  void set_capacity(std::size_t capacity) TERRACE_EXCLUDES(mu_) {
    TERRACE_CHECK(capacity >= 1);
    MutexLock lock(&mu_);
    capacity_ = capacity;
    not_full_.NotifyAll();
  }

 private:
  mutable Mutex mu_;
  CondVar not_full_;
  CondVar not_empty_;
  std::size_t capacity_ TERRACE_GUARDED_BY(mu_);
  std::deque<T> items_ TERRACE_GUARDED_BY(mu_);
  bool closed_ TERRACE_GUARDED_BY(mu_) = false;
  Status abort_cause_ TERRACE_GUARDED_BY(mu_);
};

}  // namespace terrace
