#include "terrace/base/core_binding.h"

#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "terrace/base/log.h"

namespace terrace {
namespace {

// Linux is built for no more.
constexpr std::size_t kMostUnits = 8192;
constexpr std::size_t kMostNodes = 1024;
constexpr std::size_t kWordBits = 8 * sizeof(unsigned long);

struct UnitSet {
  cpu_set_t words[kMostUnits / CPU_SETSIZE];
};

// 0, or an errno.
int Bind(std::span<const int> units) {
  UnitSet set;
  CPU_ZERO_S(sizeof set, set.words);
  for (const int unit : units) CPU_SET_S(static_cast<std::size_t>(unit), sizeof set, set.words);
  return pthread_setaffinity_np(pthread_self(), sizeof set, set.words);
}

void TellNotBound(std::span<const int> units, const std::string& why) {
  LogText(LogLevel::kWarning,
          fmt::format("a thread is not bound to cpus {}: {}", RangesText(units), why));
}

}  // namespace

Result<std::vector<int>> CurrentUnits() {
  UnitSet set;
  if (const int error = pthread_getaffinity_np(pthread_self(), sizeof set, set.words); error != 0) {
    return UnavailableError(
        fmt::format("the system does not say where a thread may run: {}", std::strerror(error)));
  }
  std::vector<int> units;
  for (std::size_t unit = 0; unit < kMostUnits; ++unit) {
    if (CPU_ISSET_S(unit, sizeof set, set.words)) units.push_back(static_cast<int>(unit));
  }
  return units;
}

ScopedBinding::ScopedBinding(std::span<const int> units) {
  if (units.empty()) return;
  Result<std::vector<int>> before = CurrentUnits();
  const int error = before.ok() ? Bind(units) : 0;
  if (before.ok() && error == 0) {
    before_ = std::move(before).value();
    return;
  }
  TellNotBound(units, before.ok() ? std::strerror(error) : before.status().message());
}

void BindCurrentThread(std::span<const int> units) {
  if (units.empty()) return;
  if (const int error = Bind(units); error != 0) TellNotBound(units, std::strerror(error));
}

ScopedBinding::~ScopedBinding() {
  if (before_.empty()) return;
  if (const int error = Bind(before_); error != 0) {
    LogText(LogLevel::kWarning, fmt::format("a thread stays bound to its cpus, not {}: {}",
                                            RangesText(before_), std::strerror(error)));
  }
}

ScopedInterleaving::ScopedInterleaving(std::span<const int> nodes) {
  if (nodes.size() < 2) return;
  int policy = MPOL_DEFAULT;
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0 || policy != MPOL_DEFAULT) {
    return;
  }
  unsigned long mask[kMostNodes / kWordBits] = {};
  for (const int node : nodes) {
    const auto bit = static_cast<std::size_t>(node);
    if (bit < kMostNodes) mask[bit / kWordBits] |= 1UL << bit % kWordBits;
  }
  if (syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, mask, kMostNodes) == 0) {
    set_ = true;
    return;
  }
  LogText(LogLevel::kWarning, fmt::format("memory is not interleaved over NUMA nodes {}: {}",
                                          RangesText(nodes), std::strerror(errno)));
}

ScopedInterleaving::~ScopedInterleaving() {
  if (set_ && syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0) != 0) {
    LogText(LogLevel::kWarning,
            fmt::format("memory stays interleaved over NUMA nodes: {}", std::strerror(errno)));
  }
}

std::string RangesText(std::span<const int> numbers) {
  std::string text;
  for (std::size_t begin = 0; begin < numbers.size();) {
    std::size_t end = begin + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (begin > 0) text += ',';
    text += end - begin == 1 ? fmt::format("{}", numbers[begin])
                             : fmt::format("{}-{}", numbers[begin], numbers[end - 1]);
    begin = end;
  }
  return text;
}

}  // namespace terrace
