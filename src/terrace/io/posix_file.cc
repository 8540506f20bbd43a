#include "terrace/io/posix_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "terrace/base/check.h"

namespace terrace {

Status StickyError::Get() const {
  MutexLock lock(&mu_);
  return first_.ok() ? first_ : first_.WithContext("an earlier failure holds until it is reopened");
}

Status StickyError::Set(Status status) {
  MutexLock lock(&mu_);
  if (first_.ok()) first_ = status;
  return status;
}

void CheckDirectAlignment(std::uint64_t offset, const std::byte* data, std::size_t size,
                          std::size_t alignment) {
  TERRACE_CHECK(offset % alignment == 0);
  TERRACE_CHECK(reinterpret_cast<std::uintptr_t>(data) % alignment == 0);
  TERRACE_CHECK(size % alignment == 0);
}

namespace {
std::size_t ReadAlignment(int fd, bool direct) {
  if (!direct) return kSectorBytes;
#ifdef STATX_DIOALIGN
  struct statx info = {};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
      (info.stx_mask & STATX_DIOALIGN) != 0 && info.stx_dio_offset_align > 0) {
    const std::size_t told = std::max({kSectorBytes, std::size_t{info.stx_dio_offset_align},
                                       std::size_t{info.stx_dio_mem_align}});
    if (kDirectIoAlignment % told == 0) return told;
  }
#endif
  return kDirectIoAlignment;
}
}  // namespace

PosixFile::PosixFile(int fd, std::string path, bool aligned, bool direct)
    : fd_(fd),
      path_(std::move(path)),
      aligned_(aligned),
      read_alignment_(ReadAlignment(fd, direct)),
      direct_(direct) {}

PosixFile::~PosixFile() {
  // Nothing to report: what mattered was synced, and Linux frees the descriptor in any case.
  close(fd_);
}

// Some file systems grant O_DIRECT at open and refuse the calls (overlays, coarser alignment).
bool PosixFile::FallBackToBuffered() {
  int flags = fcntl(fd_, F_GETFL);
  if (flags < 0 || fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0) return false;
  direct_.store(false, std::memory_order_release);
  return true;
}

ReadStep PosixFile::AfterRead(std::uint64_t offset, std::size_t size, std::size_t before,
                              bool was_direct, std::int64_t result) {
  ReadStep step;
  step.bytes_read = before;
  if (result < 0) {
    int error = static_cast<int>(-result);
    if (error == EINTR || error == EAGAIN) return step;
    if (error == EINVAL && was_direct && FallBackToBuffered()) return step;
    step.done = true;
    step.status = ErrnoError(
        error, fmt::format("reading {} bytes at offset {} of", size - before, offset + before),
        path_);
    return step;
  }
  step.bytes_read = before + static_cast<std::size_t>(result);
  if (result == 0 || step.bytes_read == size) {
    step.done = true;
    return step;
  }
  if (!was_direct || step.bytes_read % read_alignment_ == 0) return step;
  // A direct read that stops inside a block is at the end of the file, unless it was cut short.
  Result<std::uint64_t> end = Size();
  if (!end.ok() || offset + step.bytes_read >= *end) {
    step.done = true;
    if (!end.ok()) step.status = end.status();
    return step;
  }
  std::size_t whole = step.bytes_read / read_alignment_ * read_alignment_;
  if (whole == before && !FallBackToBuffered()) {
    step.done = true;
    step.status = IoError(fmt::format("reading '{}': only {} of {} bytes came at offset {}", path_,
                                      step.bytes_read, size, offset));
    return step;
  }
  step.bytes_read = whole;
  return step;
}

Result<std::size_t> PosixFile::ReadAt(std::uint64_t offset, std::span<std::byte> buffer) {
  if (aligned_) CheckDirectAlignment(offset, buffer.data(), buffer.size(), read_alignment_);
  if (buffer.empty()) return std::size_t{0};
  ReadStep step;
  while (!step.done) {
    std::size_t done = step.bytes_read;
    const bool was_direct = direct();
    ssize_t n = pread(fd_, buffer.data() + done, std::min(buffer.size() - done, kMaxBytesPerCall),
                      static_cast<off_t>(offset + done));
    step = AfterRead(offset, buffer.size(), done, was_direct, n < 0 ? -std::int64_t{errno} : n);
  }
  if (!step.status.ok()) return step.status;
  return step.bytes_read;
}

Status PosixFile::WriteLoop(std::uint64_t offset, std::span<const std::byte> data) {
  std::size_t done = 0;
  while (done < data.size()) {
    std::size_t want = std::min(data.size() - done, kMaxBytesPerCall);
    const bool was_direct = direct();
    ssize_t n = pwrite(fd_, data.data() + done, want, static_cast<off_t>(offset + done));
    if (n < 0) {
      int error = errno;
      if (error == EINTR) continue;
      if (error == EINVAL && was_direct && FallBackToBuffered()) continue;
      return ErrnoError(error, fmt::format("writing {} bytes at offset {} of", want, offset + done),
                        path_);
    }
    std::size_t moved = static_cast<std::size_t>(n);
    if (was_direct && done + moved < data.size()) {
      moved = moved / kDirectIoAlignment * kDirectIoAlignment;
    }
    if (moved == 0) {
      // The next call reports the cause, if there is one; a second zero would loop for ever.
      if (was_direct && n > 0 && FallBackToBuffered()) continue;
      return IoError(fmt::format("writing '{}': the disk took {} of {} bytes at offset {}", path_,
                                 n, want, offset + done));
    }
    done += moved;
  }
  return OkStatus();
}

Status PosixFile::WriteAt(std::uint64_t offset, std::span<const std::byte> data) {
  if (aligned_) CheckDirectAlignment(offset, data.data(), data.size(), kDirectIoAlignment);
  TERRACE_RETURN_IF_ERROR(error_.Get());
  Status status = WriteLoop(offset, data);
  return status.ok() ? status : error_.Set(std::move(status));
}

Status PosixFile::Sync() {
  TERRACE_RETURN_IF_ERROR(error_.Get());
  // fdatasync covers the size, which is all the metadata that a reader needs.
  int result;
  do {
    result = fdatasync(fd_);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return OkStatus();
  return error_.Set(ErrnoError(errno, "syncing", path_));
}

Result<std::uint64_t> PosixFile::Size() {
  struct stat info;
  if (fstat(fd_, &info) != 0) return ErrnoError(errno, "asking the size of", path_);
  return static_cast<std::uint64_t>(info.st_size);
}

Status PosixFile::Truncate(std::uint64_t size) {
  TERRACE_RETURN_IF_ERROR(error_.Get());
  int result;
  do {
    result = ftruncate(fd_, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return OkStatus();
  return error_.Set(ErrnoError(errno, fmt::format("cutting to {} bytes", size), path_));
}

}  // namespace terrace
