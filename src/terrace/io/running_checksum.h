// RunningChecksum64: Checksum64 of bytes that come one stretch after another. Threads: one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace terrace {

class RunningChecksum64 {
 public:
  RunningChecksum64();
  ~RunningChecksum64();
  RunningChecksum64(RunningChecksum64&&) noexcept;
  RunningChecksum64& operator=(RunningChecksum64&&) noexcept;

  void Add(std::span<const std::byte> data);
  // Of all that was added.
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace terrace
