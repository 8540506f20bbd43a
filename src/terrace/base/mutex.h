// Mutex, MutexLock, CondVar with clang's thread-safety annotations; TERRACE_GUARDED_BY names the
// mutex of a member.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define TERRACE_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define TERRACE_THREAD_ANNOTATION(x)
#endif
#define TERRACE_GUARDED_BY(x) TERRACE_THREAD_ANNOTATION(guarded_by(x))
#define TERRACE_REQUIRES(...) TERRACE_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define TERRACE_EXCLUDES(...) TERRACE_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define TERRACE_ACQUIRE(...) TERRACE_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define TERRACE_RELEASE(...) TERRACE_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define TERRACE_NO_THREAD_SAFETY_ANALYSIS TERRACE_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace terrace {

class TERRACE_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  enum class Order : bool {
    kAny,
    // Who waits gets the mutex before its holder gets it again. For a mutex that one thread takes
    // over and over with little in between: the others would hardly ever get it.
    kInTurn,
  };
  Mutex() = default;
  explicit Mutex(Order order) : order_(order) {}

  void Lock() TERRACE_ACQUIRE() {
    // Who waits for mu_ holds turn_, at which the last holder then queues.
    if (order_ == Order::kInTurn) turn_.lock();
    mu_.lock();
    if (order_ == Order::kInTurn) turn_.unlock();
  }
  void Unlock() TERRACE_RELEASE() { mu_.unlock(); }

 private:
  friend class CondVar;
  const Order order_ = Order::kAny;
  std::mutex turn_;
  std::mutex mu_;
};

class TERRACE_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex* mu) TERRACE_ACQUIRE(mu) : mu_(mu) { mu_->Lock(); }
  ~MutexLock() TERRACE_RELEASE() { mu_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mu_;
};

// Wait() may return early: call it in a loop over the condition.
class CondVar {
 public:
  // Looks again every half second even without a notification: glibc before 2.41 may lose one (its
  // bug 25847), and a run must not stand still for that.
  void Wait(Mutex* mu) TERRACE_REQUIRES(mu) { WaitFor(mu, std::chrono::milliseconds(500)); }
  void WaitFor(Mutex* mu, std::chrono::milliseconds timeout)
      TERRACE_REQUIRES(mu) TERRACE_NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mu->mu_, std::adopt_lock);
    cv_.wait_for(lock, timeout);
    lock.release();
  }
  void NotifyOne() { cv_.notify_one(); }
  void NotifyAll() { cv_.notify_all(); }

 private:
  std::condition_variable cv_;
};

}  // namespace terrace
