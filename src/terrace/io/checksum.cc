// On its own: the inlined header warns with some compilers.
#define XXH_INLINE_ALL  // Compiled for this processor, not for the oldest one.
#include <xxhash.h>

#include "terrace/io/framed_file.h"
#include "terrace/io/running_checksum.h"

namespace terrace {

std::uint64_t Checksum64(std::span<const std::byte> data) {
  return XXH3_64bits(data.data(), data.size());
}

struct RunningChecksum64::State {
  XXH3_state_t xxh;
};

RunningChecksum64::RunningChecksum64() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh);
}
RunningChecksum64::~RunningChecksum64() = default;
RunningChecksum64::RunningChecksum64(RunningChecksum64&&) noexcept = default;
RunningChecksum64& RunningChecksum64::operator=(RunningChecksum64&&) noexcept = default;

void RunningChecksum64::Add(std::span<const std::byte> data) {
  XXH3_64bits_update(&state_->xxh, data.data(), data.size());
}

std::uint64_t RunningChecksum64::value() const { return XXH3_64bits_digest(&state_->xxh); }

}  // namespace terrace
