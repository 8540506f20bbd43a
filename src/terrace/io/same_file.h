// Where paths lead that were named on the command line. Asks the kernel, past every FileSystem.
// Threads: free functions.
#pragma once

#include <string>

#include "terrace/base/status.h"

namespace terrace {

// The path itself, or where the link leads that it names. kNotFound: nowhere.
Result<std::string> FollowLinks(const std::string& path);

// The same place by a path without links in it; the path itself where nothing is there.
std::string RealPath(const std::string& path);

// Through links, hard ones too. False where either is not there.
bool IsSameFile(const std::string& a, const std::string& b);

}  // namespace terrace
