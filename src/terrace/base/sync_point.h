// Named sync points: places at which a test stops, kills or fails the process. One of the three
// test seams, beside FileSystem and Clock. Without an armed handler a point costs one relaxed load.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace terrace {

class SyncPoint {
 public:
  // Calls the armed handler, if any, with the name; the handler may block, or kill the process.
  static void Hit(std::string_view name) {
    // Relaxed: a thread that comes just then may pass; Call looks again.
    if (armed_.load(std::memory_order_relaxed)) Call(name);
  }
  // nullptr disarms. Threads may hit points meanwhile: waits until none is in the handler that was
  // armed, which may hit points itself. One at a time; not from a handler.
  static void Arm(std::function<void(std::string_view)> handler);
  // Kills the process with SIGKILL at the n-th (from 1) hit of `name`:
  // "store.commit.before_rename:2". False: the text is no such specification.
  static bool ArmKill(std::string_view specification);
  // Appends each name that is hit to `path`, one line each the first time, so that a test learns
  // them all.
  static void ArmRecord(const std::string& path);

 private:
  static void Call(std::string_view name);
  static std::atomic<bool> armed_;
  static std::atomic<int> inside_;  // Threads in Call, once for each point that they are at.
};

}  // namespace terrace
