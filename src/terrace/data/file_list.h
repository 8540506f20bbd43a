// File lists: globs to files with their sizes, and the order in which an epoch reads them.
// Threads: free functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"

namespace terrace {

// The files of `patterns` in their order; those of one glob (*, ?, [...] in any part of the path)
// sorted by path. A path that exists is taken as it stands, whatever characters it has. kNotFound:
// no such file, or none matches; kInvalidArgument: a folder, a device or a pipe, or no pattern at
// all.
Result<std::vector<InputFile>> ExpandFiles(FileSystem* fs,
                                           const std::vector<std::string>& patterns);

// A permutation of [0, count), a function of the numbers given; the identity unless `shuffle`.
std::vector<std::uint32_t> EpochOrder(std::uint32_t count, bool shuffle, std::uint64_t seed,
                                      std::uint64_t epoch, std::uint64_t window);

}  // namespace terrace
