// Files without a length: a pipe, a terminal. Asks the kernel, past every FileSystem, whose files
// are read at offsets. Threads: free functions.
#pragma once

#include <cstdint>
#include <string>

#include "terrace/base/status.h"

namespace terrace {

// All that comes until the end. kInvalidArgument: more than `most_bytes`, of which no more is read.
// Blocks: until whoever writes to it closes it.
Result<std::string> ReadPipe(const std::string& path, std::uint64_t most_bytes);

}  // namespace terrace
