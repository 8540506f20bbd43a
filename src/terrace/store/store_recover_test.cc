// What a store finds when it is opened, by one thread and by several.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/parameter_file.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

using io_testing::ReadAll;
using io_testing::Replace;

constexpr std::uint64_t kQuota = std::uint64_t{1} << 32;

// Rows in many files, some of them in several, some erased and some of those written again.
void MakeRows(StoreHarness* harness, std::uint64_t keys) {
  harness->key_range = keys;
  TERRACE_ASSERT_OK(harness->Create());
  TERRACE_ASSERT_OK(harness->Write(harness->KeysFrom(0, keys)));
  TERRACE_ASSERT_OK(harness->Write(harness->KeysFrom(keys / 3, keys / 2)));
  TERRACE_ASSERT_OK(harness->Erase(harness->KeysFrom(keys / 4, keys / 4 + keys / 7)));
  TERRACE_ASSERT_OK(harness->Write(harness->KeysFrom(keys / 4, keys / 4 + keys / 20)));
  TERRACE_ASSERT_OK(harness->Commit());
}

StoreOptions RecoverOptions() {
  StoreOptions options = StoreHarness::TinyOptions();
  options.file_bytes = 256 << 10;
  options.stale_share = 0.9;  // What is stale stays.
  return options;
}

TEST(StoreRecover, TheSameByOneThreadAndByMany) {
  for (const bool alike_keys : {false, true}) {
    MemoryFileSystem fs;
    StoreHarness harness(&fs, kQuota, RecoverOptions());
    harness.alike_keys = alike_keys;
    MakeRows(&harness, 30'000);
    const StoreStats before = harness.store()->stats();
    ASSERT_GT(before.files, 8u);
    ASSERT_GT(before.stale_bytes, 0u);
    for (int i = 0; i < 6; ++i) {
      SCOPED_TRACE(i);
      constexpr int kThreads[] = {1, 2, 5};
      harness.options()->read_threads = kThreads[i % 3];
      harness.options()->background_compaction = i < 3;  // With a thread more.
      TERRACE_ASSERT_OK(harness.Reopen(1));
      const StoreStats after = harness.store()->stats();
      EXPECT_EQ(after.live_rows, before.live_rows);
      EXPECT_EQ(after.files, before.files);
      EXPECT_EQ(after.stale_bytes, before.stale_bytes);
      EXPECT_EQ(after.disk_bytes, before.disk_bytes);
      TERRACE_ASSERT_OK(harness.CheckAll());
    }
    // The store goes on as one that was never closed: deletions are known, and so is what is stale.
    TERRACE_ASSERT_OK(harness.Erase(harness.KeysFrom(0, 5'000)));
    TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(4'000, 12'000)));
    TERRACE_ASSERT_OK(harness.store()->CompactNow());
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
}

// Buffers that hold a part of what there is bring it in many reads.
TEST(StoreRecover, BuffersKeepToTheirBytes) {
  MemoryFileSystem memory;
  FaultyFileSystem fs(&memory, {});
  StoreHarness harness(&fs, kQuota, RecoverOptions());
  MakeRows(&harness, 30'000);
  std::uint64_t reads[2];
  for (const int limited : {0, 1}) {
    if (limited == 1) harness.options()->most_open_bytes = 128 << 10;
    fs.SetRules({});
    TERRACE_ASSERT_OK(harness.Reopen(1));
    reads[limited] = fs.operations(FileOperation::kRead);
    TERRACE_ASSERT_OK(harness.CheckAll());
  }
  const std::uint64_t sections = 30'000 * kKeyEntryBytes;  // At least.
  EXPECT_GE(reads[1], reads[0] + sections / (64 << 10));
}

// More than one round of reads. own_ranges: each file of a write has a range of hashes of its own.
void RecoverMillionsOfKeys(std::uint64_t file_bytes, std::uint64_t least_files, bool own_ranges) {
  MemoryFileSystem fs;
  StoreOptions options = StoreHarness::TinyOptions();
  options.row_bytes = 8;
  options.file_bytes = file_bytes;
  options.io_buffer_bytes = 4 << 20;
  options.stale_share = 0.9;
  DiskQuota quota(kQuota);
  auto store = Store::Create(&fs, Clock::Real(), &quota, options);
  ASSERT_TRUE(store.ok());
  constexpr std::size_t kKeys = 800'000, kAgain = 250'000, kErased = 50'000;
  std::vector<Key> keys(kKeys);
  std::vector<std::uint64_t> values(kKeys), read(kKeys, 0);
  std::vector<const std::byte*> rows(kKeys);
  std::vector<std::byte*> out(kKeys);
  for (std::size_t i = 0; i < kKeys; ++i) {
    keys[i] = i;
    rows[i] = reinterpret_cast<const std::byte*>(&values[i]);
    out[i] = reinterpret_cast<std::byte*>(&read[i]);
  }
  const auto write = [&](std::size_t n, std::uint64_t generation) {
    for (std::size_t i = 0; i < n; ++i) values[i] = HashCombine(i, generation);
    const auto place = [&](Key key) { return own_ranges ? MixKey(key) : HashCombine(key, 1); };
    std::vector<Key> order(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(n));
    std::sort(order.begin(), order.end(), [&](Key a, Key b) { return place(a) < place(b); });
    std::vector<const std::byte*> written;
    for (const Key key : order) written.push_back(rows[key]);
    return (*store)->Write(order, written, {});
  };
  TERRACE_ASSERT_OK(write(kKeys, 1));
  TERRACE_ASSERT_OK(write(kAgain, 2));
  TERRACE_ASSERT_OK((*store)->Erase({keys.data(), kErased}));
  const auto reference = (*store)->Commit(1);
  ASSERT_TRUE(reference.ok());
  const StoreStats before = (*store)->stats();
  ASSERT_GE(before.files, least_files);
  for (const int threads : {1, 3}) {
    store->reset();
    options.read_threads = threads;
    store = Store::Open(&fs, Clock::Real(), &quota, options, *reference, {&*reference, 1});
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    const StoreStats after = (*store)->stats();
    EXPECT_EQ(after.live_rows, kKeys - kErased);
    EXPECT_EQ(after.stale_bytes, before.stale_bytes);
    EXPECT_LE(after.index_bytes, before.index_bytes * 21 / 20);
    // Each key section once, in whole blocks.
    const std::uint64_t entries = (kKeys + kAgain + kErased) * kKeyEntryBytes;
    EXPECT_GE(after.read_bytes, entries);
    EXPECT_LE(after.read_bytes, entries + after.files * kBlockBytes);
    std::vector<std::uint8_t> found(kKeys);
    TERRACE_ASSERT_OK((*store)->Read(keys, out, found));
    for (std::size_t i = 0; i < kKeys; ++i) {
      ASSERT_EQ(found[i], i < kErased ? 0 : 1) << i;
      if (found[i] != 0) {
        ASSERT_EQ(read[i], values[i]) << i;
      }
    }
  }
}

TEST(StoreRecover, MillionsOfKeys) { RecoverMillionsOfKeys(8 << 20, 5, false); }
// A round brings all of some files and nothing of most.
TEST(StoreRecover, HundredsOfFilesOfOwnRanges) { RecoverMillionsOfKeys(128 << 10, 300, true); }
TEST(StoreRecover, HundredsOfFiles) { RecoverMillionsOfKeys(128 << 10, 300, false); }

TEST(StoreRecover, DamagedKeysAreNamed) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, RecoverOptions());
  MakeRows(&harness, 20'000);
  harness.Abandon();
  const RecordLayout layout = RecordLayout::Of("ads", 0, harness.options()->row_bytes);
  const std::string path = JoinPath(harness.options()->directory, ParameterFileName(2));
  const std::string good = ReadAll(&fs, path);
  auto file = fs.Open(path, OpenMode::kRead);
  ASSERT_TRUE(file.ok());
  const auto info = ReadFooter(file->get(), good.size(), 2, layout);
  ASSERT_TRUE(info.ok());
  ASSERT_GT(info->rows, 1000u);
  Rng rng(5);
  for (std::uint64_t row = 0; row < info->rows; row += 1 + rng.Below(100)) {
    std::string bad = good;
    const std::uint64_t at = info->keys_offset + row * kKeyEntryBytes + rng.Below(kKeyEntryBytes);
    bad[at] = static_cast<char>(bad[at] ^ (1 << rng.Below(8)));
    Replace(&fs, path, bad);
    for (const int threads : {1, 3}) {
      harness.options()->read_threads = threads;
      const Status status = harness.Reopen(1);
      ASSERT_EQ(status.code(), StatusCode::kCorruption) << row << ": " << status.ToString();
      ASSERT_NE(status.message().find(path + ": the key"), std::string::npos)
          << row << ": " << status.ToString();
    }
  }
  Replace(&fs, path, good);
  TERRACE_ASSERT_OK(harness.Reopen(1));
  TERRACE_ASSERT_OK(harness.CheckAll());
}

}  // namespace
}  // namespace terrace
