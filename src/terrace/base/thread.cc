#include "terrace/base/thread.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <system_error>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/memory.h"

namespace terrace {

void FlushDenormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // FTZ (bit 15) and DAZ (bit 6).
#elif defined(__aarch64__)
  std::uint64_t fpcr;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  asm volatile("msr fpcr, %0" ::"r"(fpcr | (std::uint64_t{1} << 24)));
#endif
}

void SetCurrentThreadName(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

Thread::Thread(std::string name, ThreadPriority priority, std::function<void()> body) try
    : thread_([name, priority, body = std::move(body)] {
        SetCurrentThreadName(name);
        FlushDenormals();
        if (priority == ThreadPriority::kYielding) {
          // Nice values are per thread on Linux: beyond the main thread's, which has the process's
          // number, and not its parent's, which may yield itself. A refusal only costs speed.
          constexpr int kSteps = 5, kMostNice = 19;
          const int own = getpriority(PRIO_PROCESS, static_cast<id_t>(getpid()));
          (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)),
                            std::min(kMostNice, own + kSteps));
        }
        body();
      }) {
} catch (const std::system_error&) {
  EndForLackOfMemory("a thread, \"" + name + "\"");
}

Thread::~Thread() { TERRACE_CHECK(!thread_.joinable()); }

void Thread::Join() { thread_.join(); }

double Thread::cpu_seconds() const {
  if (!thread_.joinable()) return 0;
  clockid_t clock = 0;
  // That it is not const says nothing: it gives a number.
  const auto handle = const_cast<std::thread&>(thread_).native_handle();
  if (pthread_getcpuclockid(handle, &clock) != 0) return 0;
  timespec time{};
  if (clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

WorkerGroup::WorkerGroup(const std::string& name, int size, std::function<void()> on_start,
                         ThreadPriority priority)
    : size_(size) {
  TERRACE_CHECK(size >= 1);
  for (int thread = 1; thread < size; ++thread) {
    threads_.emplace_back(name + std::to_string(thread), priority, [this, on_start] {
      if (on_start) on_start();
      Loop();
    });
  }
}

WorkerGroup::~WorkerGroup() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    start_.NotifyAll();
  }
  for (Thread& thread : threads_) thread.Join();
}

void WorkerGroup::Run(int tasks, const std::function<void(int)>& task) {
  if (size_ == 1) {
    for (int i = 0; i < tasks; ++i) task(i);
    return;
  }
  MutexLock lock(&mu_);
  task_ = &task;
  tasks_ = tasks;
  next_ = 0;
  if (tasks > 1) start_.NotifyAll();
  RunTasks();
  while (running_ > 0) done_.Wait(&mu_);
}

void WorkerGroup::RunTasks() {
  while (next_ < tasks_) {
    const int i = next_++;
    const std::function<void(int)>* task = task_;
    ++running_;
    mu_.Unlock();
    (*task)(i);
    mu_.Lock();
    if (--running_ == 0 && next_ == tasks_) done_.NotifyOne();
  }
}

double WorkerGroup::cpu_seconds() const {
  double sum = 0;
  for (const Thread& thread : threads_) sum += thread.cpu_seconds();
  return sum;
}

void WorkerGroup::Loop() {
  MutexLock lock(&mu_);
  while (!stop_) {
    RunTasks();
    if (next_ == tasks_ && !stop_) start_.Wait(&mu_);
  }
}

}  // namespace terrace
