// KeyWindows: all versions of all keys of several key sections, by hash, a range of hashes at a
// time. Sections are sorted, so that a range is a piece of each, and what the pieces hold is sorted
// in the second cache: a heap over as many sections would mispredict at every level for every key.
// Threads: one. Borrows the cursors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/store/parameter_file.h"

namespace terrace {

struct KeyVersion {
  std::uint64_t hash;
  std::uint64_t version;
  std::uint32_t source;  // Number of the cursor.
  std::uint32_t row;     // Of its section.
};

class KeyWindows {
 public:
  // Sections of fewer than 2^32 entries, `entries` in all. Memory: 48 bytes for every entry that
  // the cursors' buffers hold, at the very most; for hashes as MixKey makes them about 2 MiB.
  KeyWindows(std::span<SectionCursor> cursors, std::uint64_t entries);

  // The versions of the next keys, sorted by hash, equal hashes by source; none are split from
  // their like. Empty: there are no more. Valid until the next call. kCorruption: a section is not
  // sorted. Reads, at the cursors' files.
  Result<std::span<const KeyVersion>> Next();

 private:
  static constexpr std::uint64_t kWindowEntries = 32768;

  // The last hash of a range from base_ on whose entries are all in memory.
  Result<std::uint64_t> LimitOf() const;
  Status Take(std::uint32_t source, std::uint64_t limit);
  void Sort(std::uint64_t limit);

  const std::span<SectionCursor> cursors_;
  const std::uint64_t span_;  // Hashes of a window, less one.
  std::uint64_t base_ = 0;    // The first hash that is not behind.
  std::vector<KeyVersion> window_, spare_;
};

}  // namespace terrace
