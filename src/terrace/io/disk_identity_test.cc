#include "terrace/io/disk_identity.h"

#include <sys/sysmacros.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <string>

#include <gtest/gtest.h>

namespace terrace {
namespace {

struct statfs FileSystemOf(std::uint64_t type, std::uint64_t id, std::uint64_t blocks) {
  struct statfs file_system {};
  file_system.f_type = static_cast<decltype(file_system.f_type)>(type);
  std::memcpy(&file_system.f_fsid, &id, sizeof id);
  file_system.f_blocks = blocks;
  return file_system;
}

TEST(DiskIdentity, OneOfWhichAnyPartDiffersIsAnother) {
  const dev_t device = makedev(259, 1);
  const struct statfs file_system = FileSystemOf(0xef53, 77, 1000);
  const std::string identity = DiskIdentityText(device, file_system, "Model S1", "/runs/rows");
  EXPECT_EQ(identity,
            "device 259:1, file system 0xef53 000000000000004d of 1000 blocks, drives [Model S1], "
            "/runs/rows");
  struct statfs fuller = file_system;
  fuller.f_bfree = 5;
  fuller.f_bavail = 4;
  EXPECT_EQ(DiskIdentityText(device, fuller, "Model S1", "/runs/rows"), identity);
  const std::set<std::string> all = {
      identity,
      DiskIdentityText(makedev(259, 2), file_system, "Model S1", "/runs/rows"),
      DiskIdentityText(device, FileSystemOf(0x9123, 77, 1000), "Model S1", "/runs/rows"),
      DiskIdentityText(device, FileSystemOf(0xef53, 78, 1000), "Model S1", "/runs/rows"),
      DiskIdentityText(device, FileSystemOf(0xef53, 77, 1001), "Model S1", "/runs/rows"),
      DiskIdentityText(device, file_system, "Model S2", "/runs/rows"),
      DiskIdentityText(device, file_system, "Model S1", "/runs/other"),
  };
  EXPECT_EQ(all.size(), 7u);
}

TEST(DiskIdentity, SizeOfAPoolCountsOnlyWhereNothingElseDoes) {
  const auto identity = [](std::uint64_t id, std::uint64_t blocks) {
    return DiskIdentityText(makedev(0, 40), FileSystemOf(0x2fc12fc1, id, blocks), "", "/pool");
  };
  EXPECT_EQ(identity(5, 1000), identity(5, 900));
  EXPECT_NE(identity(5, 1000), identity(6, 1000));
  EXPECT_NE(identity(0, 1000), identity(0, 900));
}

}  // namespace
}  // namespace terrace
