#include "terrace/train/binding_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/core_binding.h"

namespace terrace {
namespace {

// Hands out cores, each once.
class FreeCores {
 public:
  explicit FreeCores(const Topology& topology) : cores_(topology.cores), taken_(cores_.size()) {}

  // The first free one of the node, or of all. REQUIRES: one is free.
  void TakeFrom(int node, std::vector<int>* units) {
    for (const bool of_node : {true, false}) {
      for (std::size_t c = 0; c < cores_.size(); ++c) {
        if (taken_[c] || (of_node && cores_[c].node != node)) continue;
        taken_[c] = true;
        units->insert(units->end(), cores_[c].units.begin(), cores_[c].units.end());
        return;
      }
    }
  }

 private:
  const std::vector<Topology::Core>& cores_;
  std::vector<bool> taken_;  // (cores)
};

std::string TooFew(std::size_t count, const char* what, int threads) {
  return fmt::format("{} {}{} for {} threads that keep one busy at times", count, what,
                     count == 1 ? "" : "s", threads);
}

}  // namespace

BindingPlan PlanBinding(const Topology& topology, const ThreadsWanted& wanted) {
  BindingPlan plan;
  std::set<int> nodes;
  for (const Topology::Core& core : topology.cores) nodes.insert(core.node);
  if (nodes.size() > 1) plan.memory_nodes.assign(nodes.begin(), nodes.end());
  const struct {
    std::vector<int>* units;
    int threads;
  } parts[] = {{&plan.io, wanted.io_threads()},
               {&plan.reading, wanted.reading},
               {&plan.pulling, wanted.pulling},
               {&plan.training, wanted.training}};
  const int left = static_cast<int>(topology.cores.size()) - wanted.all();
  if (left < 0) {
    plan.why_not = TooFew(topology.cores.size(), "core", wanted.all());
    return plan;
  }
  FreeCores free(topology);
  const int share = left / 4;
  const std::size_t disks = wanted.disk_nodes.size();
  for (const auto& part : parts) {
    const bool io = part.units == &plan.io;
    const bool last = part.units == &plan.training;
    const int count = part.threads + (last ? left - 3 * share : share);
    for (int i = 0; i < count; ++i) {
      free.TakeFrom(io ? wanted.disk_nodes[static_cast<std::size_t>(i) % disks] : -1, part.units);
    }
    std::sort(part.units->begin(), part.units->end());
  }
  return plan;
}

ThreadsWanted ThreadsOf(const Job& job) {
  ThreadsWanted wanted;
  wanted.disk_nodes.clear();
  for (const std::string& path : job.ssd.paths) wanted.disk_nodes.push_back(NodeOfDisk(path));
  if (job.ssd.paths.empty()) wanted.disk_nodes.push_back(NodeOfDisk(job.output));
  // One more takes what is evicted to the disk, and compacts.
  wanted.io = std::max(job.ssd.io_threads, static_cast<int>(wanted.disk_nodes.size())) + 1;
  // Text is read and decompressed ahead of the parser.
  wanted.reading = job.train_data.format == "synthetic" ? 1 : 2;
  wanted.pulling = job.pipeline.pulling;
  wanted.training = job.training.threads;
  return wanted;
}

BindingPlan MakeBindingPlan(const Job& job, const MachineQueries& machine) {
  BindingPlan none;
  if (job.binding == "off") {
    none.why_not = "binding is off";
    return none;
  }
  const ThreadsWanted wanted = ThreadsOf(job);
  const Result<std::vector<int>> units = machine.units();
  if (job.pipeline.depth == 0) {
    none.why_not = "with pipeline.depth 0 the stages share a thread";
  } else if (units.ok() && units->size() < static_cast<std::size_t>(wanted.all())) {
    // No core has less than a unit.
    none.why_not = TooFew(units->size(), "cpu", wanted.all());
  }
  // A machine of one node needs no closer look then, which takes memory.
  if (!none.why_not.empty() && machine.nodes().size() < 2) return none;
  const Result<Topology> topology = machine.topology();
  if (!topology.ok()) {
    if (none.why_not.empty()) none.why_not = topology.status().message();
    return none;
  }
  BindingPlan plan = PlanBinding(*topology, wanted);
  if (none.why_not.empty()) return plan;
  none.memory_nodes = std::move(plan.memory_nodes);
  return none;
}

std::string DescribeBinding(const BindingPlan& plan) {
  std::string text =
      plan.why_not.empty()
          ? fmt::format("I/O on cpus {}, reading on {}, pulling on {}, training on {}",
                        RangesText(plan.io), RangesText(plan.reading), RangesText(plan.pulling),
                        RangesText(plan.training))
          : "none: " + plan.why_not;
  if (!plan.memory_nodes.empty()) {
    text += fmt::format("; memory from NUMA nodes {} in turn", RangesText(plan.memory_nodes));
  }
  return text;
}

}  // namespace terrace
