#include "terrace/io/drive_health.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>

#include <fmt/format.h>

namespace terrace {
namespace {

// Devices on top of each other that are followed; more is a circle.
constexpr int kMostLevels = 8;

// Empty: there is no such place.
std::string Resolved(const std::string& path) {
  char resolved[PATH_MAX];
  return realpath(path.c_str(), resolved) == nullptr ? std::string() : std::string(resolved);
}

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

std::string LastOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// Names in a folder, sorted; none if it can't be read.
std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), closedir);
  if (entries == nullptr) return names;
  while (const dirent* entry = readdir(entries.get())) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The first line of a small file, without blanks at its ends.
std::string LineOf(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             std::fclose);
  char text[256];
  if (file == nullptr || std::fgets(text, sizeof text, file.get()) == nullptr) return {};
  std::string line = text;
  line.erase(0, line.find_first_not_of(" \t\n"));
  line.erase(line.find_last_not_of(" \t\n") + 1);
  return line;
}

// Of the disks below a device's folder in sysfs: their folders, by name.
void FindDisks(std::string folder, int levels, std::map<std::string, std::string>* disks) {
  if (levels == 0) return;
  if (Exists(folder + "/partition")) folder.resize(folder.rfind('/'));
  const std::vector<std::string> parts = NamesIn(folder + "/slaves");
  if (parts.empty()) disks->emplace(LastOf(folder), folder);
  for (const std::string& part : parts) {
    const std::string below = Resolved(folder + "/slaves/" + part);
    if (!below.empty()) FindDisks(below, levels - 1, disks);
  }
}

std::map<std::string, std::string> DisksOf(std::uint64_t device, const std::string& sysfs) {
  std::map<std::string, std::string> disks;
  const std::string folder =
      Resolved(fmt::format("{}/dev/block/{}:{}", sysfs, major(device), minor(device)));
  if (!folder.empty()) FindDisks(folder, kMostLevels, &disks);
  return disks;
}

void AskNvme(const std::string& node, DriveHealth* drive) {
  const int fd = open(node.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    drive->unknown = fmt::format("{} can't be opened: {}", node, std::strerror(errno));
    return;
  }
  constexpr std::uint8_t kGetLogPage = 0x02;
  constexpr std::uint32_t kHealthLog = 0x02, kWholeDrive = 0xFFFFFFFF;
  std::array<std::byte, kNvmeHealthBytes> page{};
  nvme_admin_cmd command{};
  command.opcode = kGetLogPage;
  command.nsid = kWholeDrive;
  command.addr = reinterpret_cast<std::uint64_t>(page.data());
  command.data_len = kNvmeHealthBytes;
  command.cdw10 = (kNvmeHealthBytes / 4 - 1) << 16 | kHealthLog;  // Words, less one.
  const int answer = ioctl(fd, NVME_IOCTL_ADMIN_CMD, &command);
  const int error = errno;
  close(fd);
  if (answer == 0) {
    drive->health = ParseNvmeHealth(page);
  } else if (answer > 0) {
    drive->unknown = fmt::format("it refuses its health log with status {:#x}", answer);
  } else {
    drive->unknown = fmt::format("its health log can't be asked for: {}", std::strerror(error));
  }
}

}  // namespace

NvmeHealth ParseNvmeHealth(std::span<const std::byte, kNvmeHealthBytes> page) {
  constexpr std::size_t kSpareAt = 3, kUsedAt = 5, kWrittenAt = 48, kCountBytes = 16;
  constexpr double kUnitBytes = 1000 * 512;
  NvmeHealth health;
  health.available_spare_percent = std::to_integer<std::uint32_t>(page[kSpareAt]);
  health.percentage_used = std::to_integer<std::uint32_t>(page[kUsedAt]);
  double units = 0;  // 128 bits, the least significant byte first.
  for (std::size_t i = kCountBytes; i > 0; --i) {
    units = units * 256 + std::to_integer<std::uint32_t>(page[kWrittenAt + i - 1]);
  }
  health.written_bytes = units * kUnitBytes;
  return health;
}

std::vector<DriveHealth> DrivesOf(std::span<const std::string> paths) {
  std::set<dev_t> devices;  // Paths share them, and a drive answers slowly.
  for (const std::string& path : paths) {
    struct stat info;
    if (stat(path.c_str(), &info) == 0) devices.insert(info.st_dev);
  }
  std::map<std::string, DriveHealth> by_name;
  for (const dev_t device : devices) {
    for (DriveHealth& drive : DrivesOfDevice(device, "/sys", "/dev")) {
      by_name[drive.device] = std::move(drive);
    }
  }
  std::vector<DriveHealth> drives;
  for (auto& [name, drive] : by_name) drives.push_back(std::move(drive));
  return drives;
}

std::vector<DriveHealth> DrivesOfDevice(std::uint64_t device, const std::string& sysfs,
                                        const std::string& dev) {
  std::vector<DriveHealth> drives;
  for (const auto& [name, place] : DisksOf(device, sysfs)) {
    DriveHealth drive;
    drive.device = name;
    drive.model = LineOf(place + "/device/model");
    if (name.starts_with("nvme")) {
      AskNvme(dev + "/" + name, &drive);
    } else {
      drive.unknown = "it is no NVMe drive";
    }
    drives.push_back(std::move(drive));
  }
  return drives;
}

std::string DescribeDrives(std::uint64_t device, const std::string& sysfs) {
  // Where the kinds of drives have them: SCSI, NVMe and virtual ones, memory cards.
  constexpr const char* kNames[] = {"device/model", "device/serial", "serial",    "wwid",
                                    "device/wwid",  "uuid",          "device/cid"};
  std::vector<std::string> texts;
  for (const auto& [name, place] : DisksOf(device, sysfs)) {
    std::string text;
    for (const char* of_drive : kNames) {
      const std::string line = LineOf(fmt::format("{}/{}", place, of_drive));
      if (!line.empty()) text += line + " ";
    }
    texts.push_back(text + LineOf(place + "/size"));
  }
  std::sort(texts.begin(), texts.end());
  return fmt::format("{}", fmt::join(texts, "; "));
}

}  // namespace terrace
