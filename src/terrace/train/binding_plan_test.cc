#include "terrace/train/binding_plan.h"

#include <hwloc.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "terrace/base/core_binding.h"
#include "terrace/base/rng.h"
#include "terrace/train/testing/small_job.h"

namespace terrace {
namespace {

using testing::HasSubstr;

// A machine in hwloc's words, of whose units those of `allowed` may be used; empty: all.
Topology Machine(const std::string& description, std::vector<int> allowed = {}) {
  hwloc_topology_t machine;
  EXPECT_EQ(hwloc_topology_init(&machine), 0);
  EXPECT_EQ(hwloc_topology_set_synthetic(machine, description.c_str()), 0) << description;
  EXPECT_EQ(hwloc_topology_load(machine), 0);
  if (allowed.empty()) {
    allowed.resize(static_cast<std::size_t>(hwloc_get_nbobjs_by_type(machine, HWLOC_OBJ_PU)));
    std::iota(allowed.begin(), allowed.end(), 0);
  }
  Topology topology = TopologyOf(machine, allowed);
  hwloc_topology_destroy(machine);
  return topology;
}

ThreadsWanted Training(int threads) {
  ThreadsWanted wanted;
  wanted.training = threads;
  return wanted;
}

TEST(BindingPlan, TwoCoresAreLeftAlone) {
  const BindingPlan plan = PlanBinding(Machine("pack:1 core:2 pu:1"), Training(2));
  EXPECT_EQ(DescribeBinding(plan), "none: 2 cores for 7 threads that keep one busy at times");
  EXPECT_TRUE(plan.io.empty() && plan.reading.empty() && plan.pulling.empty() &&
              plan.training.empty() && plan.memory_nodes.empty());
}

TEST(BindingPlan, AsManyCoresAsThreadsAreGivenOutOneByOne) {
  const Topology machine = Machine("pack:1 core:16 pu:1");
  EXPECT_EQ(DescribeBinding(PlanBinding(machine, Training(11))),
            "I/O on cpus 0-1, reading on 2-3, pulling on 4, training on 5-15");
  EXPECT_THAT(DescribeBinding(PlanBinding(machine, Training(12))),
              HasSubstr("none: 16 cores for 17 threads"));
}

TEST(BindingPlan, WhatIsLeftGoesToAllInEqualParts) {
  EXPECT_EQ(DescribeBinding(PlanBinding(Machine("pack:1 core:16 pu:1"), Training(4))),
            "I/O on cpus 0-2, reading on 3-5, pulling on 6-7, training on 8-15");
}

TEST(BindingPlan, IoLiesBesideItsDisksAndMemoryOnAllNodes) {
  const Topology machine = Machine("pack:2 [numa] core:24 pu:1");
  ThreadsWanted wanted = Training(40);
  EXPECT_EQ(DescribeBinding(PlanBinding(machine, wanted)),
            "I/O on cpus 0-1, reading on 2-3, pulling on 4, training on 5-47; memory from NUMA "
            "nodes 0-1 in turn");
  wanted.disk_nodes = {1};
  EXPECT_EQ(DescribeBinding(PlanBinding(machine, wanted)),
            "I/O on cpus 24-25, reading on 0-1, pulling on 2, training on 3-23,26-47; memory from "
            "NUMA nodes 0-1 in turn");
  wanted.disk_nodes = {0, 1, 1, 0};
  const BindingPlan four = PlanBinding(machine, wanted);
  EXPECT_EQ(RangesText(four.io), "0-1,24-25");
  // A disk of a node whose cores this process may not use.
  const BindingPlan one_node =
      PlanBinding(Machine("pack:2 [numa] core:24 pu:1", {0, 1, 2, 3, 4, 5, 6}), [] {
        ThreadsWanted other = Training(2);
        other.disk_nodes = {1};
        return other;
      }());
  EXPECT_EQ(DescribeBinding(one_node),
            "I/O on cpus 0-1, reading on 2-3, pulling on 4, training on 5-6");
}

TEST(BindingPlan, ACoreIsOneWhateverItsThreads) {
  // Siblings are numbered apart, as most systems do.
  const Topology machine =
      Machine("pack:1 core:8 pu:2(indexes=0,8,1,9,2,10,3,11,4,12,5,13,6,14,7,15)");
  EXPECT_EQ(DescribeBinding(PlanBinding(machine, Training(3))),
            "I/O on cpus 0-1,8-9, reading on 2-3,10-11, pulling on 4,12, training on 5-7,13-15");
  EXPECT_THAT(DescribeBinding(PlanBinding(machine, Training(4))), HasSubstr("none: 8 cores for 9"));
}

TEST(BindingPlan, KeepsToWhatTheProcessMayUse) {
  const std::vector<int> allowed = {3, 5, 6, 17, 18, 20, 30};
  const BindingPlan plan = PlanBinding(Machine("pack:2 [numa] core:16 pu:1", allowed), Training(2));
  EXPECT_EQ(DescribeBinding(plan),
            "I/O on cpus 3,5, reading on 6,17, pulling on 18, training on 20,30; memory from NUMA "
            "nodes 0-1 in turn");
}

TEST(BindingPlan, PartsShareNoCore) {
  Rng rng(3);
  const Topology whole = Machine("pack:2 [numa] core:24 pu:2");
  int bound = 0;
  for (int round = 0; round < 500; ++round) {
    Topology machine;
    for (const Topology::Core& core : whole.cores) {
      if (rng.Below(4) > 0) machine.cores.push_back(core);
    }
    ThreadsWanted wanted;
    wanted.io = 1 + static_cast<int>(rng.Below(6));
    wanted.reading = 1 + static_cast<int>(rng.Below(2));
    wanted.training = 1 + static_cast<int>(rng.Below(40));
    wanted.disk_nodes.assign(1 + rng.Below(4), static_cast<int>(rng.Below(4)) - 1);
    const BindingPlan plan = PlanBinding(machine, wanted);
    if (!plan.why_not.empty()) continue;
    ++bound;
    std::set<int> seen;
    std::size_t units = 0;
    for (const auto* part : {&plan.io, &plan.reading, &plan.pulling, &plan.training}) {
      seen.insert(part->begin(), part->end());
      units += part->size();
      EXPECT_TRUE(std::is_sorted(part->begin(), part->end()));
    }
    EXPECT_EQ(units, seen.size()) << "a unit of two parts";
    EXPECT_EQ(units, 2 * machine.cores.size()) << "an idle core";
    EXPECT_GE(plan.io.size(), 2 * std::max<std::size_t>(wanted.io, wanted.disk_nodes.size()));
    EXPECT_GE(plan.training.size(), 2 * static_cast<std::size_t>(wanted.training));
    for (const Topology::Core& core : machine.cores) {
      for (const int unit : core.units) EXPECT_TRUE(seen.contains(unit));
    }
  }
  EXPECT_GT(bound, 100);
}

TEST(BindingPlan, OffAndDepthZeroBindNothing) {
  const auto described = [](const std::string& lines) {
    const Result<Job> job = Parse(kSmallJob + lines);
    EXPECT_TRUE(job.ok()) << job.status().ToString();
    return DescribeBinding(MakeBindingPlan(*job));
  };
  EXPECT_EQ(described("binding: off\n"), "none: binding is off");
  EXPECT_EQ(described("pipeline: {depth: 0}\n"),
            "none: with pipeline.depth 0 the stages share a thread");
  EXPECT_THAT(described("training: {threads: 256}\n"), HasSubstr("threads that keep one busy"));
}

TEST(BindingPlan, MemoryComesFromAllNodesWhereNoThreadIsBound) {
  const Topology two_nodes = Machine("pack:2 [numa] core:24 pu:1");
  MachineQueries machine;
  machine.units = []() -> Result<std::vector<int>> { return std::vector<int>(48); };
  machine.nodes = [] { return std::vector<int>{0, 1}; };
  machine.topology = [&]() -> Result<Topology> { return two_nodes; };
  const auto described = [&machine](const std::string& lines) {
    const Result<Job> job = Parse(kSmallJob + lines);
    EXPECT_TRUE(job.ok()) << job.status().ToString();
    return DescribeBinding(MakeBindingPlan(*job, machine));
  };
  EXPECT_EQ(described("pipeline: {depth: 0}\n"),
            "none: with pipeline.depth 0 the stages share a thread; memory from NUMA nodes 0-1 in "
            "turn");
  EXPECT_EQ(described("training: {threads: 256}\n"),
            "none: 48 cpus for 261 threads that keep one busy at times; memory from NUMA nodes 0-1 "
            "in turn");
  EXPECT_THAT(described("training: {threads: 40}\n"),
              testing::AllOf(testing::StartsWith("I/O on cpus"), HasSubstr("NUMA nodes 0-1")));
  EXPECT_EQ(described("binding: off\n"), "none: binding is off");
  // Inside what the process may use there may be one node.
  machine.topology = []() -> Result<Topology> {
    return Machine("pack:2 [numa] core:24 pu:1", {0, 1});
  };
  EXPECT_EQ(described("pipeline: {depth: 0}\n"),
            "none: with pipeline.depth 0 the stages share a thread");
  machine.topology = []() -> Result<Topology> { return UnavailableError("not known"); };
  EXPECT_EQ(described("pipeline: {depth: 0}\n"),
            "none: with pipeline.depth 0 the stages share a thread");
  EXPECT_EQ(described(""), "none: not known");
}

TEST(BindingPlan, ASmallMachineOfOneNodeIsNotLookedAtClosely) {
  MachineQueries machine;
  machine.units = []() -> Result<std::vector<int>> { return std::vector<int>(2); };
  machine.topology = []() -> Result<Topology> {
    ADD_FAILURE() << "the topology takes memory";
    return Topology();
  };
  for (const std::vector<int>& nodes : {std::vector<int>{0}, std::vector<int>{}}) {
    machine.nodes = [nodes] { return nodes; };
    EXPECT_THAT(DescribeBinding(MakeBindingPlan(*Parse(kSmallJob), machine)),
                HasSubstr("none: 2 cpus for 7 threads"));
  }
}

TEST(BindingPlan, ThreadsOfAJob) {
  const Result<Job> job = Parse(std::string(kSmallJob) +
                                "training: {threads: 3}\n"
                                "ssd: {paths: [a, b, c], shards: 3, io_threads: 2}\n");
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  const ThreadsWanted wanted = ThreadsOf(*job);
  EXPECT_EQ(wanted.disk_nodes.size(), 3u);
  EXPECT_EQ(wanted.io, 4);
  EXPECT_EQ(wanted.reading, 2);
  EXPECT_EQ(wanted.training, 3);
}

}  // namespace
}  // namespace terrace
