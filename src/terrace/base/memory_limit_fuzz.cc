// Any text as what the system says of its memory and of this process's control groups: three files,
// of which the input's NUL bytes mark the ends. The limit is one that a file states, or the
// machine's.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "terrace/base/check.h"
#include "terrace/base/memory.h"
#include "terrace/base/testing/temporary_folder.h"

namespace {

void WriteText(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

std::string_view TakeText(std::string_view* rest) {
  const std::string_view text = rest->substr(0, rest->find('\0'));
  rest->remove_prefix(std::min(rest->size(), text.size() + 1));
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const terrace::TemporaryFolder folder;
  static const std::filesystem::path proc = folder.path() / "proc",
                                     groups = folder.path() / "groups";
  std::filesystem::create_directories(proc / "self");
  std::filesystem::create_directories(groups / "memory/job");
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  WriteText(proc / "meminfo", TakeText(&rest));
  const terrace::MemoryLimit machine = terrace::ReadMemoryLimit(proc, groups / "none");
  WriteText(proc / "self/cgroup", TakeText(&rest));
  // In each place where a group's limit may lie.
  for (const char* place :
       {"memory.max", "memory/memory.limit_in_bytes", "memory/job/memory.limit_in_bytes"}) {
    WriteText(groups / place, rest);
  }
  const terrace::MemoryLimit limit = terrace::ReadMemoryLimit(proc, groups);
  if (!limit.of_group) {
    TERRACE_CHECK(limit.bytes == machine.bytes);
  } else {
    TERRACE_CHECK(machine.bytes == 0 || limit.bytes < machine.bytes);
  }
  return 0;
}
