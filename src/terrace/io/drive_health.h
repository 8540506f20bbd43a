// What drives say of their own wear: the health log of NVMe drives, by the kernel's pass-through of
// admin commands. Other drives, and those that this process may not ask, are named with the reason.
// And what tells a drive from others of its kind.
// Threads: any. Nothing here fails a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace terrace {

// Of the SMART / Health Information log page (NVM Express Base Specification 2.0, 5.16.1.3).
struct NvmeHealth {
  std::uint32_t percentage_used = 0;  // Of the life that its maker expects; beyond 100 too, to 255.
  std::uint32_t available_spare_percent = 0;
  double written_bytes = 0;  // By hosts, in its life; in thousands of 512 bytes.
  bool operator==(const NvmeHealth&) const = default;
};

inline constexpr std::size_t kNvmeHealthBytes = 512;
NvmeHealth ParseNvmeHealth(std::span<const std::byte, kNvmeHealthBytes> page);

struct DriveHealth {
  std::string device;   // As the kernel names it: nvme0n1.
  std::string model;    // Empty: it has none.
  std::string unknown;  // Why `health` says nothing; empty: it does.
  NvmeHealth health;
};

// The drives that hold these paths, through partitions and devices that others make up (LVM, RAID,
// encryption), each once, by name. Empty: no drive of this machine does. Blocks: on the drives'
// answers.
std::vector<DriveHealth> DrivesOf(std::span<const std::string> paths);
// Those of the block device of this number. sysfs, dev: where the system describes and offers them.
std::vector<DriveHealth> DrivesOfDevice(std::uint64_t device, const std::string& sysfs,
                                        const std::string& dev);
// Of the drives that hold the block device of this number: models, serial numbers, ids and sizes in
// one line of text, the same whatever the system calls them at its next start. Empty: none is
// known.
std::string DescribeDrives(std::uint64_t device, const std::string& sysfs);

}  // namespace terrace
