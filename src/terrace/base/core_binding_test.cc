#include "terrace/base/core_binding.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/testing/temporary_folder.h"
#include "terrace/base/thread.h"
#include "terrace/base/topology.h"

namespace terrace {
namespace {

std::vector<int> UnitsNow() {
  const Result<std::vector<int>> units = CurrentUnits();
  EXPECT_TRUE(units.ok()) << units.status().ToString();
  return units.ok() ? *units : std::vector<int>();
}

int MemoryPolicyNow() {
  int policy = -1;
  return syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) == 0 ? policy : -1;
}

TEST(CoreBinding, AThreadIsBornWhereItsMakerIsBound) {
  const std::vector<int> before = UnitsNow();
  ASSERT_FALSE(before.empty());
  const std::vector<int> one = {before.back()};
  std::vector<int> seen, after_release;
  Thread thread;
  {
    const ScopedBinding binding(one);
    EXPECT_EQ(UnitsNow(), one);
    {
      const ScopedBinding anywhere({});
      EXPECT_EQ(UnitsNow(), one);
    }
    EXPECT_EQ(UnitsNow(), one);
    thread = Thread("bound", ThreadPriority::kNormal, [&] { seen = UnitsNow(); });
  }
  thread.Join();
  EXPECT_EQ(seen, one);
  EXPECT_EQ(UnitsNow(), before);
}

TEST(CoreBinding, ARefusalLeavesTheThreadWhereItIs) {
  const std::vector<int> before = UnitsNow();
  {
    const ScopedBinding binding(std::vector<int>{8191});  // No machine has so many.
    EXPECT_EQ(UnitsNow(), before);
  }
  EXPECT_EQ(UnitsNow(), before);
}

TEST(Interleaving, IsPassedOnAndGivenBack) {
  if (MemoryPolicyNow() != MPOL_DEFAULT) GTEST_SKIP() << "the system has no NUMA policies, or one";
  int seen = -1;
  {
    const ScopedInterleaving one_node(std::vector<int>{0});
    EXPECT_EQ(MemoryPolicyNow(), MPOL_DEFAULT);
    // Nodes that are not there are left out by the system.
    const ScopedInterleaving nodes(std::vector<int>{0, 1});
    EXPECT_EQ(MemoryPolicyNow(), MPOL_INTERLEAVE);
    Thread thread("born", ThreadPriority::kNormal, [&] { seen = MemoryPolicyNow(); });
    thread.Join();
    const ScopedInterleaving chosen_before(std::vector<int>{0, 1});
    EXPECT_EQ(MemoryPolicyNow(), MPOL_INTERLEAVE);
  }
  EXPECT_EQ(seen, MPOL_INTERLEAVE);
  EXPECT_EQ(MemoryPolicyNow(), MPOL_DEFAULT);
}

TEST(Topology, KeepsToTheMaskOfTheThread) {
  const auto units_of = [](const Topology& topology) {
    std::vector<int> units;
    for (const Topology::Core& core : topology.cores) {
      units.insert(units.end(), core.units.begin(), core.units.end());
    }
    std::sort(units.begin(), units.end());
    return units;
  };
  const std::vector<int> all = UnitsNow();
  const Result<Topology> whole = ReadTopology();
  ASSERT_TRUE(whole.ok()) << whole.status().ToString();
  EXPECT_EQ(units_of(*whole), all);
  const std::vector<int> one = {all.front()};
  const ScopedBinding binding(one);
  const Result<Topology> part = ReadTopology();
  ASSERT_TRUE(part.ok()) << part.status().ToString();
  EXPECT_EQ(units_of(*part), one);
}

TEST(Topology, NodesAreReadFromTheList) {
  const TemporaryFolder folder;
  const std::string file = folder.path() / "online";
  const auto nodes = [&](const std::string& text) {
    folder.Write("online", text);
    return OnlineNodes(file);
  };
  using Nodes = std::vector<int>;
  EXPECT_EQ(OnlineNodes(file), Nodes());
  EXPECT_EQ(nodes("0\n"), Nodes{0});
  EXPECT_EQ(nodes("0-1\n"), (Nodes{0, 1}));
  EXPECT_EQ(nodes("0,2-4,7\n"), (Nodes{0, 2, 3, 4, 7}));
  for (const char* text : {"", "\n", "none\n", "-1\n", "3-1\n", "0-4294967295\n"}) {
    EXPECT_EQ(nodes(text), Nodes()) << text;
  }
}

TEST(Topology, TheNodesOfTheCoresAreOnline) {
  const std::vector<int> online = OnlineNodes();
  if (online.empty()) GTEST_SKIP() << "the system does not list its nodes";
  const Result<Topology> topology = ReadTopology();
  ASSERT_TRUE(topology.ok()) << topology.status().ToString();
  for (const Topology::Core& core : topology->cores) {
    EXPECT_TRUE(std::binary_search(online.begin(), online.end(), core.node)) << core.node;
  }
}

TEST(Topology, ADiskThatNobodyKnowsHasNoNode) {
  EXPECT_EQ(NodeOfDisk("/proc/self"), -1);
  EXPECT_EQ(NodeOfDisk("/proc/self/not there/at all"), -1);
  EXPECT_EQ(NodeOfDisk("not there/yet"), NodeOfDisk("."));
}

TEST(RangesText, IsAsLinuxWritesIt) {
  EXPECT_EQ(RangesText({}), "");
  EXPECT_EQ(RangesText(std::vector<int>{3}), "3");
  EXPECT_EQ(RangesText(std::vector<int>{0, 1, 2, 5, 7, 8}), "0-2,5,7-8");
}

}  // namespace
}  // namespace terrace
