#include "terrace/io/read_queue.h"

#include <fmt/format.h>

#include <deque>
#include <string>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/base/mutex.h"
#include "terrace/base/thread.h"

namespace terrace {
namespace {

constexpr int kMaxDepth = 4096;   // Far above what any disk gains from; bounds the ring's memory.
constexpr int kMaxThreads = 256;  // Likewise for stacks.

class ThreadReadQueue final : public ReadQueue {
 public:
  ThreadReadQueue(int threads, std::string_view name) : name_(name) {
    if (threads == 1) return;
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back("io-" + std::to_string(i), ThreadPriority::kNormal, [this] { Loop(); });
    }
  }
  ~ThreadReadQueue() override {
    {
      MutexLock lock(&mu_);
      stop_ = true;
      work_.NotifyAll();
    }
    for (Thread& thread : threads_) thread.Join();
  }

  void Start(std::span<ReadRequest> requests) override {
    MutexLock lock(&mu_);
    groups_.push_back({requests, 0, requests.size()});
    if (!requests.empty()) work_.NotifyAll();
  }

  Status Wait() override {
    MutexLock lock(&mu_);
    TERRACE_CHECK(!groups_.empty());
    Group& group = groups_.front();  // The deque grows at its end; references stay.
    if (threads_.empty()) {
      for (ReadRequest& request : group.requests) RunOne(&request);
      group.unfinished = 0;
    }
    while (group.unfinished > 0) done_.Wait(&mu_);
    const std::span<ReadRequest> requests = group.requests;
    groups_.pop_front();
    return FirstError(requests);
  }

  std::string_view name() const override { return name_; }

 private:
  struct Group {
    std::span<ReadRequest> requests;
    std::size_t next = 0;  // The first that no thread has taken.
    std::size_t unfinished = 0;
  };

  Group* NextGroup() TERRACE_REQUIRES(mu_) {
    for (Group& group : groups_) {
      if (group.next < group.requests.size()) return &group;
    }
    return nullptr;
  }

  // Ends when all that was started is read.
  void Loop() {
    MutexLock lock(&mu_);
    while (true) {
      Group* group = NextGroup();
      if (group == nullptr) {
        if (stop_) return;
        work_.Wait(&mu_);
        continue;
      }
      ReadRequest* request = &group->requests[group->next++];
      mu_.Unlock();
      RunOne(request);
      mu_.Lock();
      if (--group->unfinished == 0) done_.NotifyAll();
    }
  }

  const std::string_view name_;
  Mutex mu_;
  CondVar work_;                                      // A group was started; stop.
  CondVar done_;                                      // A group is done.
  std::deque<Group> groups_ TERRACE_GUARDED_BY(mu_);  // Started, not waited for; oldest first.
  bool stop_ TERRACE_GUARDED_BY(mu_) = false;
  std::vector<Thread> threads_;
};

}  // namespace

Status ValidateReadQueueOptions(const ReadQueueOptions& options) {
  if (options.backend != "auto" && options.backend != "io_uring" && options.backend != "threads") {
    return InvalidArgumentError(
        fmt::format("'{}' is no way to read: use auto, io_uring or threads", options.backend));
  }
  if (options.depth < 1 || options.depth > kMaxDepth) {
    return InvalidArgumentError(
        fmt::format("{} reads in flight: use 1 to {}", options.depth, kMaxDepth));
  }
  if (options.threads < 1 || options.threads > kMaxThreads) {
    return InvalidArgumentError(
        fmt::format("{} I/O threads: use 1 to {}", options.threads, kMaxThreads));
  }
  return OkStatus();
}

std::unique_ptr<ReadQueue> NewThreadReadQueue(int threads, std::string_view name) {
  return std::make_unique<ThreadReadQueue>(threads, name);
}

Status FirstError(std::span<const ReadRequest> requests) {
  for (const ReadRequest& request : requests) {
    if (!request.status.ok()) return request.status;
  }
  return OkStatus();
}

void RunOne(ReadRequest* request) {
  Result<std::size_t> result = request->file->ReadAt(request->offset, request->buffer);
  request->status = result.status();
  request->bytes_read = result.ok() ? *result : 0;
}

}  // namespace terrace
