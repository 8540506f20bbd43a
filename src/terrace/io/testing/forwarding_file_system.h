// ForwardingFileSystem: passes everything on; what a test changes it overrides. Threads: as `base`,
// which is borrowed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "terrace/io/file_system.h"

namespace terrace {

class ForwardingFileSystem : public FileSystem {
 public:
  explicit ForwardingFileSystem(FileSystem* base) : base_(base) {}

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override {
    return base_->Open(path, mode);
  }
  Result<std::unique_ptr<ReadQueue>> NewReadQueue(const ReadQueueOptions& options) override {
    return base_->NewReadQueue(options);
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
  Result<DiskSpace> Space(const std::string& path) override { return base_->Space(path); }
  Result<std::string> DiskIdentity(const std::string& path) override {
    return base_->DiskIdentity(path);
  }
  Result<std::unique_ptr<FileLock>> Lock(const std::string& path, bool exclusive) override {
    return base_->Lock(path, exclusive);
  }

 protected:
  FileSystem* const base_;
};

}  // namespace terrace
