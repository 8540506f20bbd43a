// What the comparison asks of a store on disk: Terrace's, and those of others. Threads: one caller;
// a system uses as many of its own as serve it best.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/status.h"

namespace terrace {

struct SystemOptions {
  std::string folder;  // Empty, and the system's own.
  std::uint32_t row_bytes = 128;
  int threads = 2;  // Cores.
  // Of a system whose only way to many reads at a time is threads: what is tried, descending.
  std::vector<int> read_threads = {64, 32, 16, 4, 1};
};

class StoreSystem {
 public:
  virtual ~StoreSystem() = default;
  // Distinct keys in any order; rows: (keys, row_bytes). fresh: none of them was ever written.
  virtual Status Write(std::span<const Key> keys, std::span<const std::byte> rows, bool fresh) = 0;
  virtual Status Read(std::span<const Key> keys, std::span<std::byte> rows,
                      std::span<std::uint8_t> found) = 0;
  // Of those that it has, for the reads that come next. false: it has no such choice.
  virtual bool UseReadThreads(int /*threads*/) { return false; }
  // Returns when everything is on disk and no compaction is due.
  virtual Status Settle() = 0;

  // Where a system has its files, and nothing else lies.
  static std::string StoreFolder(const SystemOptions& options) { return options.folder + "/store"; }
};

Result<std::unique_ptr<StoreSystem>> OpenTerrace(const SystemOptions& options);
Result<std::unique_ptr<StoreSystem>> OpenRocksDb(const SystemOptions& options);

}  // namespace terrace
