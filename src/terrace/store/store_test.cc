// The store against a map, on the file system in memory and on the disk.
#include "terrace/store/store.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "terrace/io/testing/memory_file_system.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

#define ASSERT_OK(expr)                                    \
  do {                                                     \
    const Status ok_status_ = (expr);                      \
    ASSERT_TRUE(ok_status_.ok()) << ok_status_.ToString(); \
  } while (false)

std::uint64_t DirectoryBytes(FileSystem* fs, const std::string& path) {
  std::uint64_t bytes = 0;
  const auto entries = fs->List(path);
  EXPECT_TRUE(entries.ok());
  for (const FileInfo& entry : *entries) bytes += (entry.size + 4095) / 4096 * 4096;
  return bytes;
}

// Random operations; `steps` of them.
void RunModel(FileSystem* fs, StoreOptions options, std::uint64_t seed, int steps) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  StoreHarness harness(fs, std::uint64_t{1} << 30, options);
  ASSERT_OK(harness.Create());
  for (int step = 0; step < steps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const std::uint64_t dice = rng.Below(100);
    if (dice < 45) {
      ASSERT_OK(harness.Write(harness.RandomKeys(&rng, rng.Below(8) == 0 ? 300 : 60)));
    } else if (dice < 60) {
      ASSERT_OK(harness.CheckRead(harness.RandomKeys(&rng, 100)));
    } else if (dice < 70) {
      ASSERT_OK(harness.Erase(harness.RandomKeys(&rng, rng.Below(4) == 0 ? 300 : 40)));
    } else if (dice < 80) {
      ASSERT_OK(harness.Commit());
    } else if (dice < 85 && !harness.manifests().empty()) {
      auto it = harness.manifests().begin();
      std::advance(it, rng.Below(harness.manifests().size()));
      ASSERT_OK(harness.Drop(it->first));
    } else if (dice < 90 && !harness.manifests().empty()) {
      auto it = harness.manifests().begin();
      std::advance(it, rng.Below(harness.manifests().size()));
      ASSERT_OK(harness.Reopen(it->first));
      ASSERT_OK(harness.CheckAll());
    } else if (dice < 95) {
      ASSERT_OK(harness.store()->CompactNow());
    } else {
      ASSERT_OK(harness.CheckAll());
    }
    ASSERT_OK(harness.store()->background_status());
    if (!options.background_compaction) {
      // Every byte on the disk is in the quota, and no other.
      EXPECT_EQ(harness.quota()->used(), DirectoryBytes(fs, options.directory));
      EXPECT_EQ(harness.quota()->used(), harness.store()->stats().disk_bytes);
    }
  }
  ASSERT_OK(harness.CheckAll());
}

TEST(StoreModel, Memory) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    MemoryFileSystem fs;
    RunModel(&fs, StoreHarness::TinyOptions(), seed, 250);
    if (HasFatalFailure()) return;
  }
}

TEST(StoreModel, MemoryWithBackgroundCompaction) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    MemoryFileSystem fs;
    StoreOptions options = StoreHarness::TinyOptions();
    options.background_compaction = true;
    RunModel(&fs, options, seed, 250);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace terrace
