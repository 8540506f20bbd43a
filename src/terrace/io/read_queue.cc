#include "terrace/io/read_queue.h"

#include <fmt/format.h>

#include <atomic>

#include "terrace/base/thread.h"

namespace terrace {
namespace {

constexpr int kMaxDepth = 4096;   // Far above what any disk gains from; bounds the ring's memory.
constexpr int kMaxThreads = 256;  // Likewise for stacks.

class ThreadReadQueue final : public ReadQueue {
 public:
  ThreadReadQueue(int threads, std::string_view name) : name_(name), workers_("io", threads) {}

  Status Run(std::span<ReadRequest> requests) override {
    if (requests.size() <= 1 || workers_.size() == 1) {
      for (ReadRequest& request : requests) RunOne(&request);
      return FirstError(requests);
    }
    // Relaxed: only hands out each index once; the group's own lock publishes the results.
    std::atomic<std::size_t> next{0};
    workers_.Run([&](int) {
      while (true) {
        std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
        if (i >= requests.size()) return;
        RunOne(&requests[i]);
      }
    });
    return FirstError(requests);
  }

  std::string_view name() const override { return name_; }

 private:
  const std::string_view name_;
  WorkerGroup workers_;
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
