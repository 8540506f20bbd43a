#include "terrace/base/sync_point.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <memory>
#include <set>
#include <utility>

#include "terrace/base/mutex.h"

namespace terrace {
namespace {
std::function<void(std::string_view)>& Handler() {
  static std::function<void(std::string_view)> handler;
  return handler;
}
}  // namespace

std::atomic<bool> SyncPoint::armed_{false};
std::atomic<int> SyncPoint::inside_{0};

void SyncPoint::Arm(std::function<void(std::string_view)> handler) {
  // In one order with what Call does: a thread that is not seen inside sees that nothing is armed.
  armed_.store(false, std::memory_order_seq_cst);
  while (inside_.load(std::memory_order_seq_cst) != 0) sched_yield();
  Handler() = std::move(handler);
  armed_.store(static_cast<bool>(Handler()), std::memory_order_seq_cst);
}

void SyncPoint::Call(std::string_view name) {
  inside_.fetch_add(1, std::memory_order_seq_cst);
  if (armed_.load(std::memory_order_seq_cst)) Handler()(name);
  inside_.fetch_sub(1, std::memory_order_seq_cst);
}

bool SyncPoint::ArmKill(std::string_view specification) {
  std::size_t colon = specification.rfind(':');
  std::uint64_t count = 1;
  std::string name(specification.substr(0, colon));
  if (colon != std::string_view::npos) {
    std::string_view digits = specification.substr(colon + 1);
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), count);
    if (error != std::errc() || end != digits.data() + digits.size() || count == 0) return false;
  }
  if (name.empty()) return false;
  // Shared because std::function must be copyable; the handler lives as long as the process.
  auto left = std::make_shared<std::atomic<std::uint64_t>>(count);
  Arm([name, left](std::string_view hit) {
    if (hit == name && left->fetch_sub(1, std::memory_order_relaxed) == 1) kill(getpid(), SIGKILL);
  });
  return true;
}

void SyncPoint::ArmRecord(const std::string& path) {
  struct State {
    Mutex mu;
    std::set<std::string, std::less<>> seen;
  };
  auto state = std::make_shared<State>();  // Copyable handler, as above.
  Arm([state, path](std::string_view hit) {
    MutexLock lock(&state->mu);
    if (!state->seen.emplace(hit).second) return;
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) return;
    std::string line = std::string(hit) + "\n";
    (void)!write(fd, line.data(), line.size());
    close(fd);
  });
}

}  // namespace terrace
