#include "terrace/train/metrics_file.h"

#include <algorithm>
#include <span>

#include <fmt/format.h>

#include "terrace/base/log.h"
#include "terrace/base/memory.h"

namespace terrace {
namespace {

Result<RunningChecksum64> ChecksumOf(FileSystem* fs, const std::string& path, std::uint64_t bytes,
                                     OpenMode mode) {
  constexpr std::uint64_t kBufferBytes = std::uint64_t{1} << 20;
  RunningChecksum64 checksum;
  if (bytes == 0) return checksum;
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs->Open(path, mode));
  TERRACE_ASSIGN_OR_RETURN(const HugeBuffer buffer,
                           HugeBuffer::Allocate(std::min(bytes, kBufferBytes)));
  for (std::uint64_t done = 0; done < bytes;) {
    ReadRequest request;  // What is asked for; a direct read takes whole blocks.
    request.file = file.get();
    request.offset = done;
    request.buffer = buffer.span().first(std::min(buffer.size(), bytes - done));
    const std::span<std::byte> target = IsDirect(mode) ? buffer.span() : request.buffer;
    TERRACE_ASSIGN_OR_RETURN(const std::size_t read, file->ReadAt(done, target));
    request.bytes_read = std::min(read, request.buffer.size());
    TERRACE_RETURN_IF_ERROR(CheckWhole(request));
    checksum.Add(request.buffer);
    done += request.buffer.size();
  }
  return checksum;
}

}  // namespace

Result<std::unique_ptr<MetricsFile>> MetricsFile::Open(FileSystem* fs, DiskQuota* quota,
                                                       const std::string& path, std::uint64_t bytes,
                                                       std::optional<std::uint64_t> checksum) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs->Open(path, OpenMode::kAppend));
  TERRACE_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
  // Its name, before a checkpoint counts its bytes.
  if (bytes == 0) TERRACE_RETURN_IF_ERROR(fs->SyncDirectory(FolderOf(path)));
  if (size < bytes) {
    return CorruptionError(fmt::format(
        "'{}' has {} bytes, but the checkpoint counts {}: the file was cut or replaced. "
        "Restore it, or train anew with --overwrite.",
        path, size, bytes));
  }
  Result<RunningChecksum64> running =
      checksum ? CheckMetrics(fs, path, bytes, *checksum) : ChecksumOfMetrics(fs, path, bytes);
  TERRACE_RETURN_IF_ERROR(running.status());
  if (size > bytes) TERRACE_RETURN_IF_ERROR(file->Truncate(bytes));
  TERRACE_RETURN_IF_ERROR(quota->Reserve(WholeBlocks(bytes), 0).WithContext(path));
  return std::unique_ptr<MetricsFile>(
      new MetricsFile(fs, path, std::move(file), quota, bytes, std::move(*running)));
}

Status MetricsFile::Append(const std::string& line) {
  const std::string text = line + "\n";
  const std::uint64_t needed = WholeBlocks(bytes_ + text.size());
  if (needed > reserved_bytes_) {
    TERRACE_RETURN_IF_ERROR(quota_->Reserve(needed - reserved_bytes_, 0));
    reserved_bytes_ = needed;
  }
  const Status written = file_->WriteAt(bytes_, std::as_bytes(std::span(text)));
  if (!written.ok()) {
    // Where that fails too, so does the next use of it.
    if (const Status cut = CutAndReopen(); !cut.ok()) LogText(LogLevel::kWarning, cut.ToString());
    return written;
  }
  bytes_ += text.size();
  checksum_.Add(std::as_bytes(std::span(text)));
  return OkStatus();
}

Status MetricsFile::CutAndReopen() {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs_->Open(path_, OpenMode::kAppend));
  TERRACE_RETURN_IF_ERROR(file->Truncate(bytes_));
  file_ = std::move(file);
  return OkStatus();
}

Status MetricsFile::Sync() { return file_->Sync(); }

Result<RunningChecksum64> ChecksumOfMetrics(FileSystem* fs, const std::string& path,
                                            std::uint64_t bytes) {
  return ChecksumOf(fs, path, bytes, OpenMode::kRead);
}

Result<RunningChecksum64> CheckMetrics(FileSystem* fs, const std::string& path, std::uint64_t bytes,
                                       std::uint64_t expected) {
  const auto checked = [&](OpenMode mode) -> Result<RunningChecksum64> {
    TERRACE_ASSIGN_OR_RETURN(RunningChecksum64 checksum, ChecksumOf(fs, path, bytes, mode));
    if (checksum.value() == expected) return checksum;
    return CorruptionError(
        fmt::format("'{}': the first {} bytes have checksum {:016x}, but the checkpoint says "
                    "{:016x}: something in them was changed",
                    path, bytes, checksum.value(), expected));
  };
  Result<RunningChecksum64> once = checked(OpenMode::kRead);
  if (once.status().code() != StatusCode::kCorruption) return once;
  // A read may err where the disk does not.
  Result<RunningChecksum64> again = checked(OpenMode::kReadDirect);
  if (again.ok()) LogText(LogLevel::kWarning, "read wrongly once: " + once.status().message());
  return again;
}

}  // namespace terrace
