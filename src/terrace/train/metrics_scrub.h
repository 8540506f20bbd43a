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

// What a line is that says it is of a newer version: no damage, or, where the file is known not to
// be as it was written, that.
enum class NewerLines : std::uint8_t { kRefused, kDamaged };

// Of the first `bytes` of the file, which a checkpoint counts; in order. A file that is shorter, or
// not there, lacks its end; what the disk does not give is damage with the lines that it belongs
// to. kInvalidArgument: a line of a newer version, if those are refused. Memory: one line, and a
// buffer.
Result<std::vector<DamagedMetrics>> ScrubMetrics(FileSystem* fs, const std::string& path,
                                                 std::uint64_t bytes, NewerLines newer);

// Puts a line {"kind": "lost"} of the same length in place of each stretch of damage, so that what
// checkpoints say of the file's length stays true; what is beyond `bytes` is cut off. By rename.
Status MendMetrics(FileSystem* fs, const std::string& path, std::uint64_t bytes,
                   const std::vector<DamagedMetrics>& damage);

}  // namespace terrace
