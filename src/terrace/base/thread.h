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
  // CPU time that it has used, seconds; 0 before it was started and after its end. Any thread.
  // REQUIRES: nobody joins it meanwhile.
  double cpu_seconds() const;

 private:
  std::thread thread_;
};

// Runs `task(i)` for i in [0, tasks) on `size` threads, the caller one of them, and returns when
// all are done. A thread takes the next task as soon as it is free, so that one which has to share
// its core holds up the others by a task at most; which thread runs a task is left to chance,
// except that task 0 is the caller's. Threads sleep between runs. Run() is called by one thread at
// a time.
class WorkerGroup {
 public:
  // REQUIRES: size >= 1. on_start runs once on each thread, the caller's excepted; so does the
  // priority count.
  WorkerGroup(const std::string& name, int size, std::function<void()> on_start = nullptr,
              ThreadPriority priority = ThreadPriority::kNormal);
  ~WorkerGroup();
  int size() const { return size_; }
  void Run(int tasks, const std::function<void(int)>& task) TERRACE_EXCLUDES(mu_);
  // CPU time of the group's own threads, seconds; the caller's is not in it.
  double cpu_seconds() const;

 private:
  // Runs tasks until none is left to begin.
  void RunTasks() TERRACE_REQUIRES(mu_);
  void Loop() TERRACE_EXCLUDES(mu_);

  const int size_;
  Mutex mu_;
  CondVar start_;
  CondVar done_;
  const std::function<void(int)>* task_ TERRACE_GUARDED_BY(mu_) = nullptr;
  int tasks_ TERRACE_GUARDED_BY(mu_) = 0;
  int next_ TERRACE_GUARDED_BY(mu_) = 0;     // The first that nobody has begun.
  int running_ TERRACE_GUARDED_BY(mu_) = 0;  // Begun and not ended.
  bool stop_ TERRACE_GUARDED_BY(mu_) = false;
  std::vector<Thread> threads_;
};

}  // namespace terrace
