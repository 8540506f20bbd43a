// On its own: the inlined header warns with some compilers.
#define XXH_INLINE_ALL  // Compiled for this processor, not for the oldest one.
#include <xxhash.h>

#include "terrace/io/framed_file.h"

namespace terrace {

std::uint64_t Checksum64(std::span<const std::byte> data) {
  return XXH3_64bits(data.data(), data.size());
}

}  // namespace terrace
