// Files that nobody needs any more are overwritten by new ones.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "terrace/io/testing/forwarding_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/parameter_file.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

// Counts what happens to files of rows.
class CountingFileSystem final : public ForwardingFileSystem {
 public:
  using ForwardingFileSystem::ForwardingFileSystem;
  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override {
    const bool rows = path.find("/rows-") != std::string::npos;
    if (rows && mode == OpenMode::kCreateDirect) ++created;
    if (rows && mode == OpenMode::kOverwriteDirect) ++overwritten;
    return ForwardingFileSystem::Open(path, mode);
  }
  Status Remove(const std::string& path) override {
    if (path.find("/rows-") != std::string::npos) ++removed;
    return ForwardingFileSystem::Remove(path);
  }

  int created = 0, overwritten = 0, removed = 0;
};

StoreOptions Options() {
  StoreOptions options = StoreHarness::TinyOptions();
  options.file_bytes = 1 << 20;
  return options;
}

std::uint64_t BytesIn(FileSystem* fs, const std::string& folder) {
  std::uint64_t bytes = 0;
  const auto entries = fs->List(folder);
  EXPECT_TRUE(entries.ok());
  for (const FileInfo& entry : *entries) bytes += AlignUp(entry.size, kBlockBytes);
  return bytes;
}

TEST(SpareFiles, ServeTheNextOnes) {
  MemoryFileSystem memory;
  CountingFileSystem fs(&memory);
  StoreHarness harness(&fs, 1 << 30, Options());
  TERRACE_ASSERT_OK(harness.Create());
  for (int i = 0; i < 50; ++i) {
    // Longer and shorter ones than before, so that files grow and are cut.
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 40 + i * 7 % 300)));
    EXPECT_EQ(BytesIn(&fs, harness.options()->directory), harness.quota()->used());
    EXPECT_EQ(harness.store()->stats().disk_bytes, harness.quota()->used());
  }
  EXPECT_GT(fs.overwritten, 30);
  EXPECT_LT(fs.created, 20);
  EXPECT_EQ(fs.removed, 0);
  TERRACE_ASSERT_OK(harness.store()->CompactNow());  // Which looks for what nobody needs.
  EXPECT_GT(harness.store()->stats().spare_bytes, 0u);
  TERRACE_ASSERT_OK(harness.CheckAll());
  // After a restart nobody knows them; a store that is closed leaves none.
  TERRACE_ASSERT_OK(harness.Commit());
  const std::uint64_t needed = harness.quota()->used() - harness.store()->stats().spare_bytes;
  harness.Abandon();
  EXPECT_EQ(BytesIn(&fs, harness.options()->directory), needed);
  TERRACE_ASSERT_OK(harness.Reopen(1));
  EXPECT_EQ(harness.quota()->used(), needed);
  TERRACE_ASSERT_OK(harness.CheckAll());
}

TEST(SpareFiles, AreGoneForGoodAfterFinish) {
  for (std::uint64_t round = 0; round < 20; ++round) {
    MemoryFileSystem fs;
    StoreOptions options = Options();
    options.file_bytes = 1 << 14;
    options.background_compaction = true;
    StoreHarness harness(&fs, 1 << 30, options);
    TERRACE_ASSERT_OK(harness.Create());
    // Parts of files become stale, so that compaction has work when the last write is done.
    for (std::uint64_t i = 0; i < 10 + round; ++i) {
      const std::uint64_t first = i * 700 % 2000;
      TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(first, first + 1000)));
    }
    harness.store()->Finish();
    const StoreStats stats = harness.store()->stats();
    EXPECT_EQ(stats.spare_bytes, 0u);
    EXPECT_EQ(BytesIn(&fs, harness.options()->directory), stats.disk_bytes);
    EXPECT_EQ(harness.quota()->used(), stats.disk_bytes);
    TERRACE_ASSERT_OK(harness.CheckAll());
    EXPECT_EQ(harness.store()->stats().compactions, stats.compactions);
    EXPECT_EQ(harness.store()->stats().disk_bytes, stats.disk_bytes);
  }
}

TEST(SpareFiles, AreNoMoreThanAskedFor) {
  for (const std::size_t most : {0, 1, 3}) {
    MemoryFileSystem memory;
    CountingFileSystem fs(&memory);
    StoreOptions options = Options();
    options.spare_files = most;
    StoreHarness harness(&fs, 1 << 30, options);
    TERRACE_ASSERT_OK(harness.Create());
    for (std::uint64_t i = 0; i < 8; ++i) {
      TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(i * 50, i * 50 + 50)));
    }
    const std::uint64_t bytes = harness.quota()->used();
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 400)));  // The eight are stale.
    TERRACE_ASSERT_OK(harness.store()->CompactNow());
    EXPECT_EQ(harness.store()->stats().spare_bytes, bytes / 8 * most);
    EXPECT_EQ(fs.removed, 8 - static_cast<int>(most));
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

TEST(SpareFiles, AKeptManifestsFilesAreNone) {
  MemoryFileSystem memory;
  CountingFileSystem fs(&memory);
  StoreHarness harness(&fs, 1 << 30, Options());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 300)));
  TERRACE_ASSERT_OK(harness.Commit());
  for (int i = 0; i < 5; ++i) TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 300)));
  TERRACE_ASSERT_OK(harness.Commit());
  TERRACE_ASSERT_OK(harness.CheckAll());  // Scrubs what both name.
  TERRACE_ASSERT_OK(harness.Drop(1));
  const int before = fs.overwritten;
  for (int i = 0; i < 3; ++i) TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 300)));
  EXPECT_GT(fs.overwritten, before);
  TERRACE_ASSERT_OK(harness.Reopen(2));
  TERRACE_ASSERT_OK(harness.CheckAll());
}

TEST(SpareFiles, GoWhenTheirRoomIsNeeded) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, 40 * 4096, Options());
  DiskQuota* const quota = harness.quota();
  TERRACE_ASSERT_OK(harness.Create());
  for (int i = 0; i < 4; ++i) TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 300)));
  TERRACE_ASSERT_OK(harness.store()->CompactNow());
  const std::uint64_t spare = harness.store()->stats().spare_bytes;
  ASSERT_GT(spare, 0u);
  // For something else than this store.
  const std::uint64_t free = quota->limit() - quota->used();
  TERRACE_ASSERT_OK(quota->Reserve(free, 0));
  // To ask takes none.
  EXPECT_TRUE(quota->HasFree(spare));
  EXPECT_FALSE(quota->HasFree(spare + 1));
  EXPECT_EQ(harness.store()->stats().spare_bytes, spare);
  TERRACE_ASSERT_OK(quota->Reserve(spare, 0));
  EXPECT_EQ(harness.store()->stats().spare_bytes, 0u);
  EXPECT_FALSE(quota->HasFree(1));
  EXPECT_FALSE(quota->Reserve(1, 0).ok());
  EXPECT_EQ(quota->peak(), quota->limit());
  quota->Release(free + spare);
  TERRACE_ASSERT_OK(harness.CheckAll());
}

TEST(SpareFiles, AFileWithASecondNameKeepsItsBytes) {
  std::string folder = "spare_test.XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  StoreOptions options = Options();
  options.directory = folder + "/rows";
  StoreHarness harness(FileSystem::Posix(), 1 << 30, options);
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 300)));
  // Somebody's backup.
  namespace fs = std::filesystem;
  const fs::path backup = folder + "/backup";
  for (const auto& entry : fs::directory_iterator(options.directory)) {
    fs::create_hard_link(entry.path(), backup);
  }
  const auto bytes = [&backup] {
    std::ifstream in(backup, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const std::string before = bytes();
  ASSERT_FALSE(before.empty());
  for (int i = 0; i < 10; ++i) TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 300)));
  TERRACE_ASSERT_OK(harness.store()->CompactNow());
  EXPECT_GT(harness.store()->stats().spare_bytes, 0u);
  EXPECT_EQ(bytes(), before);
  EXPECT_EQ(fs::hard_link_count(backup), 1u);
  TERRACE_ASSERT_OK(harness.CheckAll());
  harness.Abandon();
  TERRACE_EXPECT_OK(RemoveTree(FileSystem::Posix(), folder));
}

}  // namespace
}  // namespace terrace
