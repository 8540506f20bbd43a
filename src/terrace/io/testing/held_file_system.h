// HeldFileSystem: passes everything on, and holds writes in flight until a test lets them go. While
// a write is held its bytes must not change and its file must not be closed. Threads: any. Borrows
// `base`.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/io/testing/forwarding_file_system.h"

namespace terrace {

class HeldFileSystem final : public ForwardingFileSystem {
 public:
  explicit HeldFileSystem(FileSystem* base) : ForwardingFileSystem(base) {}

  // Writes of files whose path contains `part` stop at their start until LetGo.
  void HoldWrites(const std::string& part = "") {
    MutexLock lock(&mu_);
    hold_ = true;
    part_ = part;
  }
  void LetGo() {
    MutexLock lock(&mu_);
    hold_ = false;
    changed_.NotifyAll();
  }
  void WaitForHeldWrite() {
    MutexLock lock(&mu_);
    while (held_ == 0) changed_.Wait(&mu_);
  }
  int held() const {
    MutexLock lock(&mu_);
    return held_;
  }

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override {
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, base_->Open(path, mode));
    return std::unique_ptr<File>(std::make_unique<HeldFile>(this, std::move(file)));
  }

 private:
  class HeldFile final : public File {
   public:
    HeldFile(HeldFileSystem* owner, std::unique_ptr<File> base)
        : owner_(owner), base_(std::move(base)) {}
    ~HeldFile() override { EXPECT_EQ(writing_, 0) << "closed while it is written"; }
    Result<std::size_t> ReadAt(std::uint64_t offset, std::span<std::byte> buffer) override {
      return base_->ReadAt(offset, buffer);
    }
    std::size_t read_alignment() const override { return base_->read_alignment(); }
    Status WriteAt(std::uint64_t offset, std::span<const std::byte> data) override {
      ++writing_;
      owner_->Hold(path(), data);
      Status status = base_->WriteAt(offset, data);
      --writing_;
      return status;
    }
    Status Sync() override { return base_->Sync(); }
    Result<std::uint64_t> Size() override { return base_->Size(); }
    Status Truncate(std::uint64_t size) override { return base_->Truncate(size); }
    const std::string& path() const override { return base_->path(); }

   private:
    HeldFileSystem* const owner_;
    const std::unique_ptr<File> base_;
    std::atomic<int> writing_{0};
  };

  void Hold(const std::string& path, std::span<const std::byte> data) {
    MutexLock lock(&mu_);
    if (!hold_ || path.find(part_) == std::string::npos) return;
    const std::vector<std::byte> before(data.begin(), data.end());
    ++held_;
    changed_.NotifyAll();
    while (hold_) changed_.Wait(&mu_);
    --held_;
    EXPECT_TRUE(std::equal(before.begin(), before.end(), data.begin()))
        << "bytes changed while they were written to " << path;
  }

  mutable Mutex mu_;
  CondVar changed_;
  bool hold_ TERRACE_GUARDED_BY(mu_) = false;
  std::string part_ TERRACE_GUARDED_BY(mu_);
  int held_ TERRACE_GUARDED_BY(mu_) = 0;
};

}  // namespace terrace
