// HookedFileSystem: passes everything on, and calls a hook before a read queue's next group:
// between the moment at which a reader has planned and the one at which it reads. Borrows `base`.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/io/file_system.h"

namespace terrace {

class HookedFileSystem final : public FileSystem {
 public:
  explicit HookedFileSystem(FileSystem* base) : base_(base) {}
  std::function<void()> before_reads;

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override {
    return base_->Open(path, mode);
  }
  Result<std::unique_ptr<ReadQueue>> NewReadQueue(const ReadQueueOptions& options) override {
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<ReadQueue> queue, base_->NewReadQueue(options));
    return std::unique_ptr<ReadQueue>(std::make_unique<Queue>(this, std::move(queue)));
  }
  Status Rename(const std::string& from, const std::string& to) override {
    return base_->Rename(from, to);
  }
  Status Remove(const std::string& path) override { return base_->Remove(path); }
  Status RemoveDirectory(const std::string& path) override { return base_->RemoveDirectory(path); }
  Status MakeDirectories(const std::string& path) override { return base_->MakeDirectories(path); }
  Status SyncDirectory(const std::string& path) override { return base_->SyncDirectory(path); }
  Result<std::vector<FileInfo>> List(const std::string& path) override { return base_->List(path); }
  Result<FileInfo> Stat(const std::string& path) override { return base_->Stat(path); }
  Result<std::uint64_t> FreeBytes(const std::string& path) override {
    return base_->FreeBytes(path);
  }
  Result<std::unique_ptr<FileLock>> Lock(const std::string& path, bool exclusive) override {
    return base_->Lock(path, exclusive);
  }

 private:
  class Queue final : public ReadQueue {
   public:
    Queue(HookedFileSystem* owner, std::unique_ptr<ReadQueue> base)
        : owner_(owner), base_(std::move(base)) {}
    void Start(std::span<ReadRequest> requests) override {
      // Once: the hook may set the next one.
      if (auto hook = std::exchange(owner_->before_reads, nullptr)) hook();
      base_->Start(requests);
    }
    Status Wait() override { return base_->Wait(); }
    std::string_view name() const override { return "hooked"; }

   private:
    HookedFileSystem* const owner_;
    const std::unique_ptr<ReadQueue> base_;
  };

  FileSystem* const base_;
};

}  // namespace terrace
