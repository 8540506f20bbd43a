// HookedFileSystem: passes everything on, and calls hooks around the groups of its read queues:
// before the next one, between the moment at which a reader has planned and the one at which it
// reads; and after each, where a test lets its clock go on. Borrows `base`.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/io/testing/forwarding_file_system.h"

namespace terrace {

class HookedFileSystem final : public ForwardingFileSystem {
 public:
  explicit HookedFileSystem(FileSystem* base) : ForwardingFileSystem(base) {}
  // Called once, by whichever thread reads next; it may set the next one. Any thread.
  void BeforeReads(std::function<void()> hook) TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    before_reads_ = std::move(hook);
  }
  // Set before queues are made.
  std::function<void(std::span<const ReadRequest>)> after_reads;
  std::string disk;  // Instead of the base's.
  std::string queue_name = "hooked";

  Result<std::unique_ptr<ReadQueue>> NewReadQueue(const ReadQueueOptions& options) override {
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<ReadQueue> queue, base_->NewReadQueue(options));
    return std::unique_ptr<ReadQueue>(std::make_unique<Queue>(this, std::move(queue)));
  }
  Result<std::string> DiskIdentity(const std::string& path) override {
    return disk.empty() ? base_->DiskIdentity(path) : Result<std::string>(disk);
  }

 private:
  std::function<void()> TakeHook() TERRACE_EXCLUDES(mu_) {
    MutexLock lock(&mu_);
    return std::exchange(before_reads_, nullptr);
  }

  class Queue final : public ReadQueue {
   public:
    Queue(HookedFileSystem* owner, std::unique_ptr<ReadQueue> base)
        : owner_(owner), base_(std::move(base)) {}
    void Start(std::span<ReadRequest> requests) override {
      if (auto hook = owner_->TakeHook()) hook();
      groups_.push_back(requests);
      base_->Start(requests);
    }
    Status Wait() override {
      const Status status = base_->Wait();
      if (owner_->after_reads) owner_->after_reads(groups_.front());
      groups_.pop_front();
      return status;
    }
    std::string_view name() const override { return owner_->queue_name; }

   private:
    HookedFileSystem* const owner_;
    const std::unique_ptr<ReadQueue> base_;
    std::deque<std::span<ReadRequest>> groups_;
  };

  Mutex mu_;
  std::function<void()> before_reads_ TERRACE_GUARDED_BY(mu_);
};

}  // namespace terrace
