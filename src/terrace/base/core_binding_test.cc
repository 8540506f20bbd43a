#include "terrace/base/core_binding.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

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
