#include "terrace/base/thread.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/clock.h"

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

Thread::Thread(std::string name, ThreadPriority priority, std::function<void()> body)
    : thread_([name = std::move(name), priority, body = std::move(body)] {
        SetCurrentThreadName(name);
        FlushDenormals();
        if (priority == ThreadPriority::kYielding) {
          // Nice values are per thread on Linux; a refusal only costs speed.
          (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 5);
        }
        body();
      }) {}

Thread::~Thread() { TERRACE_CHECK(!thread_.joinable()); }

void Thread::Join() { thread_.join(); }

WorkerGroup::WorkerGroup(const std::string& name, int size, std::function<void()> on_start)
    : size_(size) {
  TERRACE_CHECK(size >= 1);
  {
    MutexLock lock(&mu_);
    cpu_seconds_.resize(static_cast<std::size_t>(size));
  }
  for (int worker = 1; worker < size; ++worker) {
    threads_.emplace_back(name + std::to_string(worker), ThreadPriority::kNormal,
                          [this, worker, on_start] {
                            if (on_start) on_start();
                            Loop(worker);
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

void WorkerGroup::Run(const std::function<void(int)>& task) {
  if (size_ > 1) {
    MutexLock lock(&mu_);
    task_ = &task;
    running_ = size_ - 1;
    ++round_;
    start_.NotifyAll();
  }
  task(0);
  if (size_ > 1) {
    MutexLock lock(&mu_);
    while (running_ > 0) done_.Wait(&mu_);
    task_ = nullptr;
  }
}

double WorkerGroup::cpu_seconds() const {
  MutexLock lock(&mu_);
  double sum = 0;
  for (double seconds : cpu_seconds_) sum += seconds;
  return sum;
}

void WorkerGroup::Loop(int worker) {
  std::uint64_t seen = 0;
  while (true) {
    const std::function<void(int)>* task = nullptr;
    {
      MutexLock lock(&mu_);
      while (round_ == seen && !stop_) start_.Wait(&mu_);
      if (stop_) return;
      seen = round_;
      task = task_;
    }
    (*task)(worker);
    const double cpu_seconds = ThreadCpuSeconds();
    MutexLock lock(&mu_);
    cpu_seconds_[static_cast<std::size_t>(worker)] = cpu_seconds;
    if (--running_ == 0) done_.NotifyOne();
  }
}

}  // namespace terrace
