#include "terrace/cache/eviction_policy.h"

#include <cmath>

namespace terrace {

Result<std::unique_ptr<EvictionPolicy>> MakeEvictionPolicy(const EvictionOptions& options,
                                                           RowArena* arena,
                                                           const FutureKeys* future) {
  if (!(options.lru_share >= 0 && options.lru_share <= 1)) {
    return InvalidArgumentError("lru_share must lie between 0 and 1");
  }
  if (!(options.half_life >= 0) || std::isinf(options.half_life)) {
    return InvalidArgumentError("half_life must be 0 or more");
  }
  switch (options.type) {
    case EvictionType::kS3Fifo:
      return MakeS3FifoPolicy(arena, future);
    case EvictionType::kLruLfu:
    case EvictionType::kPassLfu:
      return MakeLruLfuPolicy(options, arena);
  }
  return InvalidArgumentError("no eviction policy of this type");
}

}  // namespace terrace
