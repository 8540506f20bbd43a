#include "terrace/base/memory.h"

#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include <fmt/format.h>

namespace terrace {

Result<HugeBuffer> HugeBuffer::Allocate(std::uint64_t bytes) {
  const bool huge = bytes >= kHugePageBytes;
  HugeBuffer buffer;
  buffer.size_ = SizeFor(bytes);
  if (buffer.size_ == 0) return buffer;
  // A huge page needs its alignment: map one more and trim both ends.
  const std::uint64_t mapped_bytes = huge ? buffer.size_ + kHugePageBytes : buffer.size_;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    buffer.size_ = 0;
    return OutOfMemoryError(
        fmt::format("asked the system for {} bytes: {}", mapped_bytes, std::strerror(errno)));
  }
  auto* begin = static_cast<std::byte*>(mapped);
  if (huge) {
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    const std::uint64_t head = (kHugePageBytes - address % kHugePageBytes) % kHugePageBytes;
    if (head > 0) munmap(begin, head);
    const std::uint64_t tail = mapped_bytes - head - buffer.size_;
    if (tail > 0) munmap(begin + head + buffer.size_, tail);
    begin += head;
    (void)madvise(begin, buffer.size_, MADV_HUGEPAGE);  // Advice: a refusal only costs speed.
  }
  buffer.data_ = begin;
  return buffer;
}

void HugeBuffer::Touch() {
  for (std::uint64_t at = 0; at < size_; at += 4096) {
    volatile std::byte* const byte = data_ + at;
    *byte = *byte;
  }
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, size_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

HugeBuffer::~HugeBuffer() {
  if (data_ != nullptr) munmap(data_, size_);
}

void EndForLackOfMemory(std::uint64_t bytes) {
  constexpr std::string_view kUnit = " bytes";
  char text[32];
  char* first = text + sizeof text - kUnit.size();
  std::memcpy(first, kUnit.data(), kUnit.size());
  do {
    *--first = static_cast<char>('0' + bytes % 10);
    bytes /= 10;
  } while (bytes > 0);
  EndForLackOfMemory(std::string_view(first, static_cast<std::size_t>(text + sizeof text - first)));
}

void EndForLackOfMemory(std::string_view what) {
  for (const std::string_view part :
       {std::string_view("\nerror: out of memory: asked the system for "), what,
        std::string_view(
            ". A run's last checkpoint is intact (train --resume goes on from it); end what "
            "else needs memory, lower memory.budget, or raise the limits of this "
            "process.\n")}) {
    if (write(STDERR_FILENO, part.data(), part.size()) < 0) break;  // Nobody listens.
  }
  _exit(1);
}

void EndUnlessMemoryLeft(std::uint64_t bytes) {
  // Writable and with its room reserved, since only that counts where the system gives no more
  // than it has.
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) EndForLackOfMemory(bytes);
  munmap(mapped, bytes);
}

ProcessMemory ReadProcessMemory() {
  ProcessMemory memory;
  std::FILE* file = std::fopen("/proc/self/status", "re");
  if (file == nullptr) return memory;
  char line[256];
  unsigned long long kib = 0;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "VmRSS: %llu kB", &kib) == 1) memory.resident_bytes += kib * 1024;
    if (std::sscanf(line, "VmHWM: %llu kB", &kib) == 1) memory.peak_bytes += kib * 1024;
    if (std::sscanf(line, "HugetlbPages: %llu kB", &kib) == 1) {
      memory.resident_bytes += kib * 1024;
      memory.peak_bytes += kib * 1024;
    }
  }
  std::fclose(file);
  return memory;
}

MemoryLimit ReadMemoryLimit(const std::string& proc, const std::string& groups) {
  MemoryLimit limit;
  std::string line;
  std::ifstream machine(proc + "/meminfo");
  while (limit.bytes == 0 && std::getline(machine, line)) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemTotal: %llu kB", &kib) == 1) limit.bytes = kib * 1024;
  }
  // A line a hierarchy: number, controllers, the group's path. Version 2 has number 0.
  std::ifstream of_process(proc + "/self/cgroup");
  while (std::getline(of_process, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const bool unified = line.starts_with("0::");
    if (!unified && controllers.find(",memory,") == std::string::npos) continue;
    const std::string root = unified ? groups : groups + "/memory";
    // A limit above holds too. In a container the path may be the host's: what is not there is
    // passed over.
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      std::ifstream file(root + path + (unified ? "/memory.max" : "/memory.limit_in_bytes"));
      std::uint64_t bytes = 0;  // Not read where the file says "max".
      if (file >> bytes && (limit.bytes == 0 || bytes < limit.bytes)) limit = {bytes, true};
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return limit;
}

void ConfigureAllocator() {
  mallopt(M_ARENA_MAX, 2);
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  mallopt(M_TRIM_THRESHOLD, 4 << 20);
}

void RaiseOpenFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);  // A refusal leaves the limit; opening beyond it says so.
}

std::uint64_t OpenFileLimit() {
  rlimit limit{};
  const bool known = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return known ? limit.rlim_cur : ~std::uint64_t{0};
}

}  // namespace terrace
