// Whether two paths lead to one file. Asks the kernel, past every FileSystem: only what was named
// on the command line is compared. Threads: a free function.
#pragma once

#include <string>

namespace terrace {

// Through links, hard ones too. False where either is not there.
bool IsSameFile(const std::string& a, const std::string& b);

}  // namespace terrace
