#include "terrace/base/topology.h"

#include <hwloc.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>

#include <fmt/format.h>

#include "terrace/base/core_binding.h"

namespace terrace {

Topology TopologyOf(hwloc_topology* machine, std::span<const int> allowed) {
  Topology topology;
  const int cores = hwloc_get_nbobjs_by_type(machine, HWLOC_OBJ_CORE);
  for (int c = 0; c < cores; ++c) {
    const hwloc_obj_t core =
        hwloc_get_obj_by_type(machine, HWLOC_OBJ_CORE, static_cast<unsigned>(c));
    Topology::Core found;
    for (const int unit : allowed) {
      if (hwloc_bitmap_isset(core->cpuset, static_cast<unsigned>(unit)) != 0) {
        found.units.push_back(unit);
      }
    }
    if (found.units.empty()) continue;
    std::sort(found.units.begin(), found.units.end());
    found.node = std::max(0, hwloc_bitmap_first(core->nodeset));
    topology.cores.push_back(std::move(found));
  }
  return topology;
}

Result<Topology> ReadTopology() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<int> allowed, CurrentUnits());
  hwloc_topology_t machine;
  if (hwloc_topology_init(&machine) != 0) return InternalError("hwloc can't be started");
  const std::unique_ptr<hwloc_topology, void (*)(hwloc_topology*)> owner(machine,
                                                                         hwloc_topology_destroy);
  if (hwloc_topology_load(machine) != 0) {
    return UnavailableError("the system does not describe its processors");
  }
  return TopologyOf(machine, allowed);
}

std::vector<int> OnlineNodes(const std::string& file) {
  constexpr int kMostNodes = 1024;  // Linux is built for no more.
  std::ifstream stream(file);
  std::string line;  // "0-1,4"
  std::getline(stream, line);
  const char* at = line.data();
  const char* const end = at + line.size();
  const auto read = [&at, end](int* node) {
    const auto [rest, error] = std::from_chars(at, end, *node);
    at = rest;
    return error == std::errc() && *node >= 0 && *node < kMostNodes;
  };
  std::vector<int> nodes;
  for (;; ++at) {
    int first = 0;
    if (!read(&first)) return {};
    int last = first;
    if (at != end && *at == '-') {
      ++at;
      if (!read(&last) || last < first) return {};
    }
    for (int node = first; node <= last; ++node) nodes.push_back(node);
    if (at == end) return nodes;
    if (*at != ',') return {};
  }
}

int NodeOfDisk(const std::string& path) {
  std::error_code error;
  std::filesystem::path existing = std::filesystem::absolute(path, error);
  struct stat info;
  while (stat(existing.c_str(), &info) != 0) {
    if (!existing.has_relative_path()) return -1;
    existing = existing.parent_path();
  }
  const std::string link =
      fmt::format("/sys/dev/block/{}:{}", major(info.st_dev), minor(info.st_dev));
  char resolved[PATH_MAX];
  if (realpath(link.c_str(), resolved) == nullptr) return -1;
  // The partition lies in its disk's folder, that in its controller's, and one of these says it.
  for (std::string folder = resolved; folder.size() > 1; folder.resize(folder.rfind('/'))) {
    std::FILE* file = std::fopen((folder + "/numa_node").c_str(), "re");
    if (file == nullptr) continue;
    int node = -1;
    const bool read = std::fscanf(file, "%d", &node) == 1;
    std::fclose(file);
    if (read && node >= 0) return node;
  }
  return -1;
}

}  // namespace terrace
