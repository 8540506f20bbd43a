// HugeBuffer: page-aligned memory in huge pages, for rows and for direct I/O. ProcessMemory: what
// the kernel counts. MemoryLimit: what it allows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "terrace/base/status.h"

namespace terrace {

inline constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;
inline constexpr std::size_t kDirectIoAlignment = 4096;  // Bytes; enough for every disk's O_DIRECT.

constexpr std::uint64_t AlignUp(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Anonymous memory from mmap, zeroed, advised to be in huge pages. Move-only owner.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  // What Allocate takes for so many bytes.
  static constexpr std::uint64_t SizeFor(std::uint64_t bytes) {
    return AlignUp(bytes, bytes >= kHugePageBytes ? kHugePageBytes : 4096);
  }
  // What may be asked for lest it takes more than so many bytes.
  static constexpr std::uint64_t SizeWithin(std::uint64_t bytes) {
    const std::uint64_t unit = bytes >= kHugePageBytes ? kHugePageBytes : 4096;
    return bytes / unit * unit;
  }
  // kOutOfMemory names what was asked. The size is rounded up to 4 KiB, from 2 MiB on to 2 MiB (and
  // aligned to it).
  static Result<HugeBuffer> Allocate(std::uint64_t bytes);
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;
  ~HugeBuffer();

  // Has the system give every page now, which it else does when the page is used first.
  void Touch();

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }
  std::span<std::byte> span() const { return {data_, size_}; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

struct ProcessMemory {
  std::uint64_t resident_bytes = 0;  // VmRSS, huge pages of hugetlbfs included.
  std::uint64_t peak_bytes = 0;      // VmHWM, likewise.
};
ProcessMemory ReadProcessMemory();

// What the system lets this process have: the least of the machine's memory and of the limits of
// the control groups that it is in (versions 1 and 2).
struct MemoryLimit {
  std::uint64_t bytes = 0;  // 0: the system does not say.
  bool of_group = false;    // A control group's.
};
// proc, groups: where the system describes them.
MemoryLimit ReadMemoryLimit(const std::string& proc = "/proc",
                            const std::string& groups = "/sys/fs/cgroup");

// Keeps malloc from holding back what is freed: fixed mmap threshold, few arenas. Call first in
// main().
void ConfigureAllocator();
// For the lack of something in the midst of what can't return a Status: says what was asked and
// ends the process with status 1, as if it had been killed, which no checkpoint minds. Allocates
// nothing.
[[noreturn]] void EndForLackOfMemory(std::uint64_t bytes);
[[noreturn]] void EndForLackOfMemory(std::string_view what);
// Before a library allocates up to `bytes` without looking whether it got them: ends the process
// likewise if the system would not give them now. A moment later another thread may have taken
// them: ask for several times what the library takes.
void EndUnlessMemoryLeft(std::uint64_t bytes);
// Raises the limit of open files to what the system allows this process: a store keeps its files
// open.
void RaiseOpenFileLimit();
std::uint64_t OpenFileLimit();

}  // namespace terrace
