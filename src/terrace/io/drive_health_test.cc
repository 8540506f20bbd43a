#include "terrace/io/drive_health.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/testing/temporary_folder.h"

namespace terrace {
namespace {

namespace stdfs = std::filesystem;

// What the kernel shows of a machine, as far as it is looked at.
class DrivesTest : public ::testing::Test {
 protected:
  DrivesTest() {
    stdfs::create_directories(root_ / "dev/block");
    stdfs::create_directories(root_ / "nodes");
  }

  stdfs::path AddDisk(const std::string& name, const std::string& model) {
    const stdfs::path disk = root_ / "devices" / name;
    stdfs::create_directories(disk / "device");
    stdfs::create_directories(disk / "slaves");
    if (!model.empty()) std::ofstream(disk / "device/model") << model << "    \n";
    return disk;
  }
  static stdfs::path AddPartition(const stdfs::path& disk, const std::string& name) {
    stdfs::create_directories(disk / name);
    std::ofstream(disk / name / "partition") << "1\n";
    return disk / name;
  }
  stdfs::path AddOver(const std::string& name, const std::vector<stdfs::path>& parts) {
    const stdfs::path device = root_ / "devices" / name;
    stdfs::create_directories(device / "slaves");
    for (const stdfs::path& part : parts) {
      stdfs::create_symlink(part, device / "slaves" / part.filename());
    }
    return device;
  }
  std::vector<DriveHealth> Of(const stdfs::path& device) {
    stdfs::remove(root_ / "dev/block/9:3");
    stdfs::create_symlink(device, root_ / "dev/block/9:3");
    return DrivesOfDevice(makedev(9, 3), root_, root_ / "nodes");
  }
  static std::vector<std::string> Names(const std::vector<DriveHealth>& drives) {
    std::vector<std::string> names;
    for (const DriveHealth& drive : drives) names.push_back(drive.device + "|" + drive.model);
    return names;
  }

  const TemporaryFolder folder_;
  const stdfs::path root_ = folder_.path();
};

using Texts = std::vector<std::string>;

TEST_F(DrivesTest, ADiskAPartitionAndWhatIsMadeOfThem) {
  const stdfs::path one = AddDisk("sda", "Model A"), two = AddDisk("nvme1n1", "Model B 2TB");
  EXPECT_EQ(Names(Of(one)), Texts{"sda|Model A"});
  EXPECT_EQ(Names(Of(AddPartition(two, "nvme1n1p2"))), Texts{"nvme1n1|Model B 2TB"});
  const stdfs::path raid = AddOver("md0", {AddPartition(one, "sda1"), two});
  EXPECT_EQ(Names(Of(raid)), (Texts{"nvme1n1|Model B 2TB", "sda|Model A"}));
  EXPECT_EQ(Names(Of(AddOver("dm-0", {raid}))), (Texts{"nvme1n1|Model B 2TB", "sda|Model A"}));
}

TEST_F(DrivesTest, OthersOfTheirKindAreToldApart) {
  const auto describe = [&](const stdfs::path& device) {
    Of(device);
    return DescribeDrives(makedev(9, 3), root_);
  };
  const stdfs::path one = AddDisk("sda", "Model A"), two = AddDisk("sdb", "Model A");
  std::ofstream(one / "size") << "1000\n";
  std::ofstream(two / "size") << "1000\n";
  EXPECT_EQ(describe(one), "Model A 1000");
  EXPECT_EQ(describe(one), describe(two));
  std::ofstream(one / "device/serial") << "  S1  \n";
  std::ofstream(two / "serial") << "S2";
  EXPECT_EQ(describe(one), "Model A S1 1000");
  EXPECT_EQ(describe(AddPartition(two, "sdb1")), "Model A S2 1000");
  const std::string both = describe(AddOver("md0", {one, two}));
  EXPECT_EQ(both, "Model A S1 1000; Model A S2 1000");
  // After a start that found them the other way round.
  std::ofstream(one / "device/serial") << "S2\n";
  std::ofstream(two / "serial") << "S1\n";
  EXPECT_EQ(describe(root_ / "devices/md0"), both);
  EXPECT_EQ(DescribeDrives(makedev(0, 77), root_), "");
}

TEST_F(DrivesTest, WhyADriveSaysNothing) {
  const std::vector<DriveHealth> other = Of(AddDisk("vda", ""));
  ASSERT_EQ(other.size(), 1u);
  EXPECT_EQ(other[0].model, "");
  EXPECT_EQ(other[0].unknown, "it is no NVMe drive");
  const stdfs::path disk = AddDisk("nvme0n1", "Model C");
  const std::string node = root_ / "nodes/nvme0n1";
  EXPECT_EQ(Of(disk).at(0).unknown, node + " can't be opened: No such file or directory");
  std::ofstream(node) << "no drive";
  EXPECT_EQ(Of(disk).at(0).unknown,
            "its health log can't be asked for: Inappropriate ioctl for device");
}

TEST_F(DrivesTest, DevicesInACircleAndNoneAtAll) {
  const stdfs::path one = AddOver("dm-1", {});
  const stdfs::path two = AddOver("dm-2", {one});
  stdfs::create_symlink(two, one / "slaves/dm-2");
  EXPECT_TRUE(Of(one).empty());
  EXPECT_TRUE(DrivesOfDevice(makedev(0, 77), root_, root_ / "nodes").empty());
  const std::vector<std::string> nothing = {root_ / "nothing"};
  EXPECT_TRUE(DrivesOf(nothing).empty());
}

TEST_F(DrivesTest, ThisMachinesOwnSayWhyOrHowMuch) {
  const std::vector<std::string> one = {root_};
  const std::vector<std::string> both = {root_ / "dev", root_ / "nodes"};
  EXPECT_EQ(Names(DrivesOf(both)), Names(DrivesOf(one)));  // Each drive once.
  for (const DriveHealth& drive : DrivesOf(one)) {
    EXPECT_FALSE(drive.device.empty());
    EXPECT_TRUE(!drive.unknown.empty() || drive.health.available_spare_percent <= 100)
        << drive.device;
  }
}

TEST(NvmeHealth, IsTakenFromItsPlaces) {
  std::array<std::byte, kNvmeHealthBytes> page{};
  EXPECT_EQ(ParseNvmeHealth(page), NvmeHealth());
  // Neighbours that must not be taken for them.
  for (const std::size_t at : {0, 1, 2, 4, 6, 47, 64}) page[at] = std::byte{0xEE};
  page[3] = std::byte{97};
  page[5] = std::byte{130};
  page[48] = std::byte{0x10};
  page[49] = std::byte{0x02};
  EXPECT_EQ(ParseNvmeHealth(page), (NvmeHealth{130, 97, 0x210 * 512000.0}));
  page[63] = std::byte{1};  // 2^120.
  EXPECT_NEAR(ParseNvmeHealth(page).written_bytes / (0x1p120 * 512000), 1, 1e-9);
}

}  // namespace
}  // namespace terrace
