// BindingPlan: which cores the threads of a run have to themselves (CE 3.1), decided before the
// start and printed. Threads: pure functions and values.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "terrace/base/core_binding.h"
#include "terrace/base/status.h"
#include "terrace/base/topology.h"
#include "terrace/train/job.h"

namespace terrace {

// Threads of a run that keep a core busy at times.
struct ThreadsWanted {
  std::vector<int> disk_nodes = {-1};  // The NUMA node of each disk with rows; -1: unknown.
  int io = 2;       // Bring rows from the disks, a core for each disk at least, and write them.
  int reading = 2;  // Read and parse examples.
  int pulling = 1;  // Plan working sets and wait for their rows.
  int training = 1;

  int io_threads() const { return std::max(io, static_cast<int>(disk_nodes.size())); }
  int all() const { return io_threads() + reading + pulling + training; }
};

struct BindingPlan {
  // Processing units of each part; all are empty where nothing is bound.
  std::vector<int> io, reading, pulling, training;
  std::vector<int> memory_nodes;  // Memory is taken from them in turn; empty: from wherever.
  std::string why_not;            // Nothing is bound, because.
};

// Every part gets whole cores, as many as its threads want and an equal share of those that are
// left; the cores of I/O lie beside the disks. Nothing is bound where a thread would have to share
// a core of its part while others are idle: where the cores are fewer than the threads.
BindingPlan PlanBinding(const Topology& topology, const ThreadsWanted& wanted);

// What a plan asks this machine.
struct MachineQueries {
  std::function<Result<std::vector<int>>()> units = CurrentUnits;
  std::function<std::vector<int>()> nodes = [] { return OnlineNodes(); };
  std::function<Result<Topology>()> topology = ReadTopology;  // Only where the others don't do.
};

// Of a job, on a machine as it is now. A pipeline without threads binds nothing, and takes memory
// from all nodes like any other; `binding: off` leaves both to the system.
BindingPlan MakeBindingPlan(const Job& job, const MachineQueries& machine = {});
ThreadsWanted ThreadsOf(const Job& job);

// "I/O on cpus 0-1, reading on 2-3, ...", or "none: why".
std::string DescribeBinding(const BindingPlan& plan);

}  // namespace terrace
