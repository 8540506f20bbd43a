// Any bytes as a drive's health log and as the model that the system names: figures that a drive
// can have, and a line of text without blanks at its ends.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <sys/sysmacros.h>

#include "terrace/base/check.h"
#include "terrace/base/testing/temporary_folder.h"
#include "terrace/io/drive_health.h"

namespace {

void CheckPage(const std::uint8_t* data, std::size_t size) {
  std::array<std::byte, terrace::kNvmeHealthBytes> page{};
  std::memcpy(page.data(), data, std::min(size, page.size()));
  const terrace::NvmeHealth health = terrace::ParseNvmeHealth(page);
  TERRACE_CHECK(health.percentage_used <= 255 && health.available_spare_percent <= 255);
  TERRACE_CHECK(std::isfinite(health.written_bytes) && health.written_bytes >= 0);
  // A byte that is not looked at changes nothing.
  page[200] ^= std::byte{0xff};
  TERRACE_CHECK(terrace::ParseNvmeHealth(page) == health);
}

// A system with one disk, 9:3.
struct System {
  System() {
    std::filesystem::create_directories(folder.path() / "dev/block");
    std::filesystem::create_directories(folder.path() / "devices/sda/device");
    std::filesystem::create_symlink(folder.path() / "devices/sda", folder.path() / "dev/block/9:3");
  }
  const terrace::TemporaryFolder folder;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  CheckPage(data, size);
  static const System system;
  const std::filesystem::path root = system.folder.path();
  std::ofstream(root / "devices/sda/device/model", std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  const std::vector<terrace::DriveHealth> drives =
      terrace::DrivesOfDevice(makedev(9, 3), root, root / "none");
  TERRACE_CHECK(drives.size() == 1 && drives[0].device == "sda" && !drives[0].unknown.empty());
  const std::string& model = drives[0].model;
  TERRACE_CHECK(model.size() < 256 && model.find('\n') == std::string::npos);
  TERRACE_CHECK(model.empty() || (model.front() != ' ' && model.back() != ' '));
  return 0;
}
