// StoreHarness: a store beside the map that it must equal, with the content of each kept manifest.
// Keys come from a small range and files are tiny, so that rows are overwritten and compacted all
// the time. Threads: one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/rng.h"
#include "terrace/io/file_system.h"
#include "terrace/store/scrub.h"
#include "terrace/store/store.h"

namespace terrace {

using RowMap = std::map<Key, std::vector<std::byte>>;

// A row that tells its key and generation in every byte.
std::vector<std::byte> TestRow(Key key, std::uint64_t generation, std::uint32_t row_bytes);

class StoreHarness {
 public:
  StoreHarness(FileSystem* fs, std::uint64_t quota_bytes, StoreOptions options,
               Clock* clock = Clock::Real());

  // Small files and buffers, compaction inside Write.
  static StoreOptions TinyOptions();
  // The same by group, with fewer groups than the rows need: they are divided.
  static StoreOptions TinyGroupOptions();

  Status Create();
  // As `id` committed it; newer manifests are forgotten. The model is set back.
  Status Reopen(std::uint64_t id);
  // Ends the process's use of the store without closing anything in order.
  void Abandon() { store_.reset(); }

  Status Write(std::vector<Key> keys);
  Status Erase(const std::vector<Key>& keys);
  Status Commit();
  Status Drop(std::uint64_t id);
  // Reads and compares with the model; kInternal says what differs.
  Status CheckRead(const std::vector<Key>& keys);
  // Reads all keys of the range, walks all rows, scrubs what each manifest names.
  Status CheckAll();
  Status CheckWalk();
  // Where the files lie, for reading them without the store.
  ScrubOptions scrub_options() const;

  std::vector<Key> RandomKeys(Rng* rng, std::size_t most) const;
  // KeyAt of [begin, end).
  std::vector<Key> KeysFrom(std::uint64_t begin, std::uint64_t end) const;
  Key KeyAt(std::uint64_t i) const {
    // The last bits of a hash are in no index.
    if (alike_keys) return UnmixKey(MixKey(i / 8) >> 28 << 28 | (i % 8 * 0x123457));
    return MixKey(i * 77 + 5);
  }

  Store* store() { return store_.get(); }
  DiskQuota* quota() { return &quota_; }
  StoreOptions* options() { return &options_; }
  const StoreOptions* options() const { return &options_; }
  const RowMap& model() const { return model_; }
  const std::map<std::uint64_t, RowMap>& snapshots() const { return snapshots_; }
  const std::map<std::uint64_t, ManifestReference>& manifests() const { return manifests_; }
  // Forgets what the harness knows of manifests newer than `id`, as a crash before they were named
  // would.
  void ForgetAfter(std::uint64_t id);

  std::uint64_t key_range = 400;
  bool alike_keys = false;  // Of eight keys each an index takes one for the other.

 private:
  FileSystem* const fs_;
  Clock* const clock_;
  DiskQuota quota_;
  StoreOptions options_;
  std::unique_ptr<Store> store_;
  RowMap model_;
  std::map<std::uint64_t, RowMap> snapshots_;
  std::map<std::uint64_t, ManifestReference> manifests_;
  std::uint64_t next_manifest_ = 1;
  std::uint64_t generation_ = 0;
};

}  // namespace terrace
