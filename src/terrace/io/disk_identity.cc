#include "terrace/io/disk_identity.h"

#include <sys/sysmacros.h>

#include <cstdint>
#include <cstring>

#include <fmt/format.h>

namespace terrace {

std::string DiskIdentityText(dev_t device, const struct statfs& file_system,
                             std::string_view drives, std::string_view whole_path) {
  std::uint64_t id;
  static_assert(sizeof file_system.f_fsid == sizeof id);
  std::memcpy(&id, &file_system.f_fsid, sizeof id);
  // Of a file system without a device of its own the size may follow what others of its pool hold.
  const bool sized = major(device) != 0 || id == 0;
  return fmt::format("device {}:{}, file system {:#x} {:016x} of {} blocks, drives [{}], {}",
                     major(device), minor(device), static_cast<std::uint64_t>(file_system.f_type),
                     id,
                     sized ? static_cast<std::uint64_t>(file_system.f_blocks) : std::uint64_t{0},
                     drives, whole_path);
}

}  // namespace terrace
