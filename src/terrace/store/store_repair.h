// Repair of one store: what rows a damaged store has lost, and the store without them. A row whose
// newest record is lost is dropped, so that training makes it anew; an older record of it never
// comes back as current. Of a store with an index by group a row is a block, whose key is the one
// of the hash at which it starts. Threads: a call uses nothing but its arguments.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/store/scrub.h"

namespace terrace {

// What a repair of a store's manifest gives up. Keys are in the order of MixKey.
struct StoreLosses {
  std::vector<Key> dropped;  // Their newest record is lost.
  // Whole rows that may be older than a lost record whose key nothing tells: dropped too.
  std::vector<Key> outdated;
  std::uint64_t unknown_rows = 0;   // Lost records whose key nothing tells.
  std::uint64_t replaced_rows = 0;  // Lost records that a newer one had replaced: no loss.
  // Where rows expire, a deletion record does not stand against an older one for as long as that
  // lies there: training makes the row anew, the deletion is overtaken, and the new row may go
  // before the old one would. Then no older record is left: these sound files are written anew too.
  bool leaves_no_older = false;
  std::vector<Manifest::File> older_files;
};

// Finds what is lost by the damaged files of `manifest`. `damaged`: the scrubs of those, none of
// them refused. Reads the key sections of the other files and the damaged files once more.
// rows_expire: see StoreLosses::leaves_no_older. kOutOfMemory: more rows may be outdated than fit
// into memory_bytes.
Result<StoreLosses> FindLosses(FileSystem* fs, const ScrubOptions& options,
                               const Manifest& manifest, std::span<const FileScrub* const> damaged,
                               bool rows_expire, std::uint64_t memory_bytes);

// Bytes on disk that RewriteStore writes at most, the manifest included.
std::uint64_t RewriteBytes(const ScrubOptions& options, const Manifest& manifest,
                           std::span<const FileScrub* const> damaged, const StoreLosses& losses);

// Writes what is whole in the damaged files to new ones, with a deletion record for each dropped
// row or, where rows expire, without any older record of it, and commits them with the other files
// as manifest `id`. Where blocks are lost, the rows of those that are left are counted, which reads
// them all. All of it is durable when it returns; what the old manifests name stays as it is.
Result<ManifestReference> RewriteStore(FileSystem* fs, const ScrubOptions& options,
                                       const Manifest& manifest,
                                       std::span<const FileScrub* const> damaged,
                                       const StoreLosses& losses, std::uint64_t id);

// Names in the folder of a store that are a store's own and that no manifest of `kept` names: what
// a process left that was killed, or dropped a checkpoint. A folder that is not there has none.
Result<std::vector<FileInfo>> StoreStrays(FileSystem* fs, const std::string& directory,
                                          std::span<const Manifest> kept);

}  // namespace terrace
