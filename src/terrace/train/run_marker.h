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
  // Whose the rows in ssd_folders are: the run folder, absolute and without links. A copy says the
  // same. Empty: without ssd_paths, and where version 1 did not say.
  std::string run_folder;
};

inline constexpr const char* kRunMarkerName = "RUN";

// kNotFound; kCorruption names the file; kInvalidArgument: of a newer version.
Result<RunMarker> ReadRunMarker(FileSystem* fs, const std::string& folder);
// Version 2 says run_folder; without one, version 1 is written.
Status WriteRunMarker(FileSystem* fs, const std::string& folder, const RunMarker& marker);
// kInvalidArgument, naming the run: a file at `path` would lie in the folder of a run, or in one of
// its folders of rows on ssd.paths, whatever links and ".." lead there.
Status RefuseInsideRun(FileSystem* fs, const std::string& path);
// Whether the run began in `run_folder`, an absolute path: its id says so, in every version.
bool BeganIn(const RunMarker& marker, const std::string& run_folder);
// The id of a run that begins there.
std::string NewRunId(const std::string& run_folder, std::uint64_t created_micros, int pid);

}  // namespace terrace
