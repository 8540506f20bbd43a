// EvictionOptions: which rows leave memory first. Changes no bit of a model, only how often a row
// is found in memory. Threads: a value.
#pragma once

#include <cstdint>

namespace terrace {

enum class EvictionType : std::uint8_t {
  kS3Fifo,   // Three queues, the third of keys that left (Yang et al., SOSP 2023).
  kLruLfu,   // An LRU of every visit in front of an LFU (HPS, appendix D).
  kPassLfu,  // What no working set holds lies in an LFU (AIBox 4.2).
};

struct EvictionOptions {
  EvictionType type = EvictionType::kS3Fifo;
  // kLruLfu: of the rows; what leaves the LRU enters the LFU. 0 to 1.
  double lru_share = 0.5;
  // kLruLfu, kPassLfu: frequencies are halved once in so many visits for each row that the cache
  // may hold. Less follows a change sooner, more ranks rows better while nothing changes. 0: never.
  double half_life = 10;
};

}  // namespace terrace
