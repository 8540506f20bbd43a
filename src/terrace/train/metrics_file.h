// MetricsFile: metrics.jsonl of a run, appended line by line and cut back to a checkpoint on
// resume. Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"

namespace terrace {

class MetricsFile {
 public:
  // Opens or makes `path` and cuts it to `bytes`. kCorruption: the file is shorter.
  static Result<std::unique_ptr<MetricsFile>> Open(FileSystem* fs, const std::string& path,
                                                   std::uint64_t bytes);
  Status Append(const std::string& line);  // Without its newline.
  Status Sync();
  std::uint64_t bytes() const { return bytes_; }

 private:
  MetricsFile(std::unique_ptr<File> file, std::uint64_t bytes)
      : file_(std::move(file)), bytes_(bytes) {}
  std::unique_ptr<File> file_;
  std::uint64_t bytes_;
};

}  // namespace terrace
