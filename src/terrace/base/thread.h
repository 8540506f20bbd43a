// Thread: a named thread that its owner joins. WorkerGroup: n threads that run one function
// together, again and again. Every thread flushes denormals to zero: a denormal costs a training
// step and no result needs it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "terrace/base/mutex.h"

namespace terrace {

// Sets flush-to-zero and denormals-are-zero for the calling thread.
void FlushDenormals();
void SetCurrentThreadName(const std::string& name);  // At most 15 characters are kept.

enum class ThreadPriority {
  kNormal,
  kYielding,  // Runs when normal threads leave a core free (a raised nice value): stages 1-3.
};

class Thread {
 public:
  Thread() = default;
  Thread(std::string name, ThreadPriority priority, std::function<void()> body);
  Thread(Thread&&) = default;
  Thread& operator=(Thread&&) = default;
  ~Thread();  // REQUIRES: joined, or never started.
  void Join();
  bool joinable() const { return thread_.joinable(); }

 private:
  std::thread thread_;
};

// Runs `task(worker)` for worker in [0, size) on `size` threads, of which the caller is worker 0,
// and returns when all are done. Threads sleep between runs. Run() is called by one thread at a
// time.
class WorkerGroup {
 public:
  // REQUIRES: size >= 1. on_start runs once on each worker's thread, the caller's excepted.
  WorkerGroup(const std::string& name, int size, std::function<void()> on_start = nullptr);
  ~WorkerGroup();
  int size() const { return size_; }
  void Run(const std::function<void(int)>& task);
  // CPU time that the group's own threads have used up to the last Run; the caller's is not in it.
  double cpu_seconds() const TERRACE_EXCLUDES(mu_);

 private:
  void Loop(int worker);

  const int size_;
  mutable Mutex mu_;
  CondVar start_;
  CondVar done_;
  const std::function<void(int)>* task_ TERRACE_GUARDED_BY(mu_) = nullptr;
  std::uint64_t round_ TERRACE_GUARDED_BY(mu_) = 0;
  int running_ TERRACE_GUARDED_BY(mu_) = 0;
  bool stop_ TERRACE_GUARDED_BY(mu_) = false;
  std::vector<double> cpu_seconds_ TERRACE_GUARDED_BY(mu_);  // (workers)
  std::vector<Thread> threads_;
};

}  // namespace terrace
