// The text that tells one disk from another: FileSystem::DiskIdentity of the real file system.
// Threads: any.
#pragma once

#include <sys/types.h>
#include <sys/vfs.h>

#include <string>
#include <string_view>

namespace terrace {

// One line. The same for the same disk after the system's next start, other for another disk at the
// same place, as where a folder was restored on another machine. drives: DescribeDrives of the
// device; whole_path: without links.
std::string DiskIdentityText(dev_t device, const struct statfs& file_system,
                             std::string_view drives, std::string_view whole_path);

}  // namespace terrace
