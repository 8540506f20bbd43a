// ChunkSupply: memory for the arena's chunks, made and touched ahead by a thread of its own: the
// system clears a page when it is touched first, and a Pin that fills the cache would wait for
// that. Threads: internally synchronised.
#pragma once

#include <cstdint>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/base/thread.h"

namespace terrace {

class ChunkSupply {
 public:
  // background: false: no thread, nothing is made ahead.
  ChunkSupply(std::uint64_t chunk_bytes, bool background);
  ~ChunkSupply();

  // From now on up to so many chunks are made ahead. What is beyond goes back to the system.
  // Blocks: on the chunk in the making, if that is beyond.
  void SetLimit(std::uint64_t chunks) TERRACE_EXCLUDES(mu_);
  // One chunk: from those made ahead, or made here; waits for the one in the making if the limit
  // allows no more beside it. kOutOfMemory: nothing changed.
  Result<HugeBuffer> Take() TERRACE_EXCLUDES(mu_);
  // Made ahead, the one in the making included.
  std::uint64_t chunks() const TERRACE_EXCLUDES(mu_);
  double cpu_seconds() const { return thread_.cpu_seconds(); }  // Of its thread.

 private:
  void Loop() TERRACE_EXCLUDES(mu_);

  const std::uint64_t chunk_bytes_;
  const bool background_;
  mutable Mutex mu_;
  CondVar wanted_;  // The limit allows more; stop.
  CondVar made_;
  std::vector<HugeBuffer> ready_ TERRACE_GUARDED_BY(mu_);
  std::uint64_t limit_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t making_ TERRACE_GUARDED_BY(mu_) = 0;
  bool refused_ TERRACE_GUARDED_BY(mu_) = false;  // By the system: Take will meet it, and say so.
  bool stop_ TERRACE_GUARDED_BY(mu_) = false;
  Thread thread_;
};

}  // namespace terrace
