// Topology: the cores of this machine that this process may use, and the memory beside them.
// Threads: values and functions that any thread may call.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "terrace/base/status.h"

struct hwloc_topology;

namespace terrace {

struct Topology {
  struct Core {
    std::vector<int> units;  // Processing units, as the system numbers them; ascending.
    int node = 0;            // NUMA node, likewise.
  };
  std::vector<Core> cores;  // Neighbours stand side by side.
};

// Inside the calling thread's affinity mask and the process's control group. Takes some memory for
// itself, of which the process keeps a part.
Result<Topology> ReadTopology();
// Of a machine as hwloc describes it, those of `allowed` units alone.
Topology TopologyOf(hwloc_topology* machine, std::span<const int> allowed);

// The NUMA nodes of this machine, ascending, as `file` lists them, at hardly any cost; empty: it
// does not.
std::vector<int> OnlineNodes(const std::string& file = "/sys/devices/system/node/online");

// The NUMA node that the disk is attached to on which `path` lies or would be made; -1 when the
// system does not say.
int NodeOfDisk(const std::string& path);

}  // namespace terrace
