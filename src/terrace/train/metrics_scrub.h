// What of metrics.jsonl is no line of metrics, and the file without it. Threads: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"

namespace terrace {

// Bytes side by side that hold no whole line, the end of the last of them included.
struct DamagedMetrics {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::string what;
};

// Of the first `bytes` of the file, which a checkpoint counts; in order. A file that is shorter, or
// not there, lacks its end. kInvalidArgument: a line of a newer version. Memory: one line, and a
// buffer.
Result<std::vector<DamagedMetrics>> ScrubMetrics(FileSystem* fs, const std::string& path,
                                                 std::uint64_t bytes);

// Puts a line {"kind": "lost"} of the same length in place of each stretch of damage, so that what
// checkpoints say of the file's length stays true; what is beyond `bytes` is cut off. By rename.
Status MendMetrics(FileSystem* fs, const std::string& path, std::uint64_t bytes,
                   const std::vector<DamagedMetrics>& damage);

}  // namespace terrace
