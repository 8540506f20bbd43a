// RunMarker: the file RUN, which says that a folder is a run and where the rest of it lies
// (docs/formats/checkpoint.md). Threads: values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"

namespace terrace {

struct RunMarker {
  std::string id;  // 16 hexadecimal digits.
  std::uint64_t created_micros = 0;
  std::uint64_t shards = 1;
  std::vector<std::string> ssd_paths;    // Absolute; as the job names them.
  std::vector<std::string> ssd_folders;  // This run's folder in each of them.
};

inline constexpr const char* kRunMarkerName = "RUN";

// kNotFound; kCorruption names the file; kInvalidArgument: of a newer version.
Result<RunMarker> ReadRunMarker(FileSystem* fs, const std::string& folder);
Status WriteRunMarker(FileSystem* fs, const std::string& folder, const RunMarker& marker);

}  // namespace terrace
