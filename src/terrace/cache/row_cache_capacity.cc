// What RowCacheImpl does about its limit.
#include <algorithm>
#include <string>
#include <utility>

#include "terrace/cache/row_cache_impl.h"

namespace terrace {
namespace {

// When a cache becomes smaller, its map and its policy's memory are each kept as they are if they
// are too large by at most 1 / kKeptPart of the rows' memory: pins wait while they are rebuilt.
constexpr std::uint64_t kKeptPart = 64;

// Of `have` bytes where `wanted` would do.
std::uint64_t KeptBytes(std::uint64_t have, std::uint64_t wanted, std::uint64_t most_spare) {
  return have > wanted && have - wanted <= most_spare ? have : wanted;
}

}  // namespace

std::uint64_t RowCacheImpl::MostSpareBytes(std::uint64_t chunks) const {
  // Small caches keep nothing, so that BytesFor(1) is the least capacity.
  return chunks < kKeptPart ? 0 : chunks * arena_.chunk_bytes() / kKeptPart;
}

std::uint64_t RowCacheImpl::MapBytesFor(std::uint64_t chunks) const {
  return KeptBytes(map_.bytes(), EntryMap::BytesFor(RowsIn(chunks)), MostSpareBytes(chunks));
}

std::uint64_t RowCacheImpl::PolicyBytesFor(std::uint64_t chunks) const {
  return KeptBytes(policy_->bytes(), policy_->BytesFor(RowsIn(chunks)), MostSpareBytes(chunks));
}

std::uint64_t RowCacheImpl::BytesFor(std::uint64_t chunks) const {
  return chunks * arena_.chunk_bytes() + MapBytesFor(chunks) + PolicyBytesFor(chunks) +
         write_back_->bytes();
}

std::uint64_t RowCacheImpl::UsedBytes() const {
  return (arena_.present_chunks() + supply_.chunks()) * arena_.chunk_bytes() + map_.bytes() +
         policy_->bytes() + write_back_->bytes();
}

std::uint64_t RowCacheImpl::ChunksFor(std::uint64_t capacity_bytes) const {
  std::uint64_t fits = 0;
  std::uint64_t beyond = std::min(capacity_bytes / arena_.chunk_bytes(), arena_.max_chunks()) + 1;
  while (beyond - fits > 1) {
    const std::uint64_t middle = fits + (beyond - fits) / 2;
    (BytesFor(middle) <= capacity_bytes ? fits : beyond) = middle;
  }
  return fits;
}

std::uint64_t RowCacheImpl::LeastCapacity(std::uint64_t rows) const {
  MutexLock lock(&mu_);
  const std::uint64_t rows_per_chunk = arena_.rows_per_chunk();
  return BytesFor(std::max<std::uint64_t>(1, (rows + rows_per_chunk - 1) / rows_per_chunk));
}

void RowCacheImpl::LimitSupply() {
  // A cache that nobody fills takes no memory, one that fills an eighth more than it uses: rows
  // stop coming one day, and what was cleared for them was cleared in vain.
  const std::uint64_t present = arena_.present_chunks();
  const std::uint64_t rest = target_chunks_ > present ? target_chunks_ - present : 0;
  supply_.SetLimit(std::min(rest, (present + 7) / 8));
}

Status RowCacheImpl::SetCapacity(std::uint64_t capacity_bytes) {
  MutexLock lock(&mu_);
  const std::uint64_t chunks = ChunksFor(capacity_bytes);
  if (chunks == 0) {
    return InvalidArgumentError("a cache of " + std::to_string(capacity_bytes) +
                                " bytes is too small; the least is " + std::to_string(BytesFor(1)));
  }
  capacity_bytes_ = capacity_bytes;
  target_chunks_ = chunks;
  map_limit_ = MapBytesFor(chunks);
  policy_limit_ = PolicyBytesFor(chunks);
  LimitSupply();
  if (map_.capacity_rows() == 0) TERRACE_RETURN_IF_ERROR(RebuildMap(RowsIn(1)));
  CloseChunks();
  TERRACE_RETURN_IF_ERROR(ReleaseClosed());
  policy_->SetLimit(RowsIn(target_chunks_));
  room_.NotifyAll();
  if (max_chunks_ > target_chunks_ || arena_.closed_chunks() > 0) {
    return OutOfMemoryError(std::to_string(held_rows_) + " pinned rows keep the cache at " +
                            std::to_string(UsedBytes()) + " bytes instead of " +
                            std::to_string(capacity_bytes) + " until they are released");
  }
  return OkStatus();
}

void RowCacheImpl::CloseChunks() {
  const std::uint64_t rows = arena_.rows_per_chunk();
  max_chunks_ = std::max(target_chunks_, (held_rows_ + needed_rows_ + rows - 1) / rows);
  while (arena_.present_chunks() - arena_.closed_chunks() > max_chunks_) {
    std::uint32_t best = arena_.chunk_numbers();
    for (std::uint32_t chunk = 0; chunk < arena_.chunk_numbers(); ++chunk) {
      if (!arena_.present(chunk) || arena_.closed(chunk)) continue;
      if (best == arena_.chunk_numbers() || std::pair(arena_.held(chunk), arena_.used(chunk)) <
                                                std::pair(arena_.held(best), arena_.used(best))) {
        best = chunk;
      }
    }
    arena_.Close(best);
  }
  for (std::uint32_t chunk = 0; arena_.closed_chunks() > 0 && chunk < arena_.chunk_numbers();
       ++chunk) {
    if (arena_.present_chunks() - arena_.closed_chunks() >= max_chunks_) break;
    if (arena_.present(chunk) && arena_.closed(chunk)) arena_.Reopen(chunk);
  }
}

Result<bool> RowCacheImpl::EmptyChunk(std::uint32_t chunk) {
  std::uint32_t slot = 0;
  // Whatever may have changed while mu_ was released is looked at again.
  while (arena_.present(chunk) && arena_.closed(chunk) && arena_.used(chunk) > 0 &&
         slot < arena_.touched(chunk)) {
    const EntryId id = arena_.id(chunk, slot);
    // Rows that are held keep the chunk; the others go ahead of them.
    if (arena_.entry(id).place < kHeld || arena_.entry(id).pins > 0) {
      ++slot;
      continue;
    }
    if (flushing_ && IsDirty(arena_.entry(id))) {
      TERRACE_RETURN_IF_ERROR(WaitForFlushPart());
      continue;
    }
    {
      WriteBack::AppendScope appends(write_back_.get());
      if (!IsDirty(arena_.entry(id)) || appends.room() > 0) {
        policy_->Forget(id);
        Evict(id, /*may_come=*/true, &appends);
        arena_.Free(id);
        ++slot;
        continue;
      }
    }
    mu_.Unlock();
    Status made = write_back_->MakeRoom(1, /*cancellable=*/false);
    mu_.Lock();
    if (!made.ok()) return made;
  }
  return arena_.present(chunk) && arena_.closed(chunk) && arena_.used(chunk) == 0;
}

Status RowCacheImpl::ReleaseClosed() {
  if (arena_.closed_chunks() > 0) {
    bool emptied = false;
    for (std::uint32_t chunk = 0; chunk < arena_.chunk_numbers(); ++chunk) {
      if (!arena_.present(chunk) || !arena_.closed(chunk)) continue;
      TERRACE_ASSIGN_OR_RETURN(const bool empty, EmptyChunk(chunk));
      emptied = emptied || empty;
    }
    // The policy may refer to what is released until it has swept.
    if (emptied) policy_->Sweep();
    for (std::uint32_t chunk = 0; emptied && chunk < arena_.chunk_numbers(); ++chunk) {
      if (arena_.present(chunk) && arena_.closed(chunk) && arena_.used(chunk) == 0) {
        arena_.Release(chunk);
      }
    }
  }
  // Held rows may need more than the limits.
  const std::uint64_t rows = RowsIn(std::max<std::uint64_t>(max_chunks_, arena_.present_chunks()));
  if (map_.bytes() > std::max(map_limit_, EntryMap::BytesFor(rows))) {
    TERRACE_RETURN_IF_ERROR(RebuildMap(rows));
  }
  if (policy_->bytes() <= std::max(policy_limit_, policy_->BytesFor(rows))) return OkStatus();
  return ReservePolicy(rows);
}

Status RowCacheImpl::ReservePolicy(std::uint64_t rows) {
  TERRACE_RETURN_IF_ERROR(policy_->Reserve(rows));
  policy_rows_ = rows;
  return OkStatus();
}

}  // namespace terrace
