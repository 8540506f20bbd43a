// MetricsFile: metrics.jsonl of a run, appended line by line and cut back to a checkpoint on
// resume, with a checksum of all that is in it. Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/io/running_checksum.h"
#include "terrace/store/store.h"

namespace terrace {

class MetricsFile {
 public:
  // Opens or makes `path` and cuts it to `bytes`, which are reserved of `quota`, as is what comes
  // later. kCorruption: the file is shorter, or they have another checksum than the one given; then
  // the file stays as it is. Borrows the quota.
  static Result<std::unique_ptr<MetricsFile>> Open(FileSystem* fs, DiskQuota* quota,
                                                   const std::string& path, std::uint64_t bytes,
                                                   std::optional<std::uint64_t> checksum);
  // Without its newline. On error, kOutOfRoom of the quota included, the file is as before.
  Status Append(const std::string& line);
  Status Sync();
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t checksum() const { return checksum_.value(); }  // XXH3-64 of all bytes().

 private:
  MetricsFile(FileSystem* fs, std::string path, std::unique_ptr<File> file, DiskQuota* quota,
              std::uint64_t bytes, RunningChecksum64 checksum)
      : fs_(fs),
        path_(std::move(path)),
        file_(std::move(file)),
        quota_(quota),
        bytes_(bytes),
        reserved_bytes_(WholeBlocks(bytes)),
        checksum_(std::move(checksum)) {}

  // After a write that failed: cuts off what may have been written, and opens it anew, because a
  // file keeps its first error.
  Status CutAndReopen();

  FileSystem* const fs_;
  const std::string path_;
  std::unique_ptr<File> file_;
  DiskQuota* const quota_;
  std::uint64_t bytes_;
  std::uint64_t reserved_bytes_;
  RunningChecksum64 checksum_;
};

// Of the first `bytes` of the file, which has as many. Memory: a buffer.
Result<RunningChecksum64> ChecksumOfMetrics(FileSystem* fs, const std::string& path,
                                            std::uint64_t bytes);
// The same, which must be `expected`, else kCorruption. What seems changed is read once more, past
// the page cache, before it is judged; a warning tells of a read that erred.
Result<RunningChecksum64> CheckMetrics(FileSystem* fs, const std::string& path, std::uint64_t bytes,
                                       std::uint64_t expected);

}  // namespace terrace
