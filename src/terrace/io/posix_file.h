// PosixFile: one open file of the posix file system, and what the asynchronous reader shares with
// it. Internal to io/. Threads: as File.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/io/file_system.h"

namespace terrace {

// The first failed write or sync of a file. The kernel reports a failed write-back once and then
// forgets it, so the file must remember.
class StickyError {
 public:
  Status Get() const TERRACE_EXCLUDES(mu_);
  // Keeps the first error; returns what was given.
  Status Set(Status status) TERRACE_EXCLUDES(mu_);

 private:
  mutable Mutex mu_;
  Status first_ TERRACE_GUARDED_BY(mu_);
};

// A direct file's calls must be aligned; a caller that is not has a defect.
void CheckDirectAlignment(std::uint64_t offset, const std::byte* data, std::size_t size,
                          std::size_t alignment);
// What disks and file systems ask for at least, as far as the kernel does not tell.
inline constexpr std::size_t kSectorBytes = 512;

// What to do after one read call of a request returned.
struct ReadStep {
  bool done = false;
  std::size_t bytes_read = 0;  // In all; where the next call starts when not done.
  Status status;
};

class PosixFile final : public File {
 public:
  // Takes `fd`. `aligned`: the mode asked for direct I/O; `direct`: the file system granted it.
  PosixFile(int fd, std::string path, bool aligned, bool direct);
  ~PosixFile() override;

  Result<std::size_t> ReadAt(std::uint64_t offset, std::span<std::byte> buffer) override;
  Status WriteAt(std::uint64_t offset, std::span<const std::byte> data) override;
  Status Sync() override;
  Result<std::uint64_t> Size() override;
  Status Truncate(std::uint64_t size) override;
  const std::string& path() const override { return path_; }
  std::size_t read_alignment() const override { return read_alignment_; }

  int fd() const { return fd_; }
  bool aligned() const { return aligned_; }
  // Of the calls that begin from here on. False for ever once a direct call was refused.
  bool direct() const { return direct_.load(std::memory_order_acquire); }

  // Judges the outcome of a read of buffer[before, ...): `result` is a count or a negative errno.
  // `was_direct`: as direct() was when the call began. Of many direct calls on their way all may be
  // refused, and each is to be repeated.
  ReadStep AfterRead(std::uint64_t offset, std::size_t size, std::size_t before, bool was_direct,
                     std::int64_t result);

 private:
  Status WriteLoop(std::uint64_t offset, std::span<const std::byte> data);
  // After a direct call that was refused. Whether it may be repeated, as a buffered one.
  bool FallBackToBuffered();

  const int fd_;
  const std::string path_;
  const bool aligned_;
  const std::size_t read_alignment_;
  // Released after the descriptor was changed: whoever sees false makes buffered calls. A stale
  // true only makes one more call be repeated.
  std::atomic<bool> direct_;
  StickyError error_;
};

// More than this the kernel never moves in one call; a multiple of every alignment.
inline constexpr std::size_t kMaxBytesPerCall = std::size_t{1} << 30;

}  // namespace terrace
