// The store against a map, on the file system in memory and on the disk.
#include "terrace/store/store.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/testing/sweep.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

std::uint64_t DirectoryBytes(FileSystem* fs, const std::string& path) {
  std::uint64_t bytes = 0;
  const auto entries = fs->List(path);
  EXPECT_TRUE(entries.ok());
  for (const FileInfo& entry : *entries) bytes += (entry.size + 4095) / 4096 * 4096;
  return bytes;
}

// Random operations; `steps` of them.
void RunModel(FileSystem* fs, StoreOptions options, std::uint64_t seed, int steps,
              bool alike_keys = false) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  StoreHarness harness(fs, std::uint64_t{1} << 30, options);
  harness.alike_keys = alike_keys;
  TERRACE_ASSERT_OK(harness.Create());
  for (int step = 0; step < steps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const std::uint64_t dice = rng.Below(100);
    if (dice < 45) {
      TERRACE_ASSERT_OK(harness.Write(harness.RandomKeys(&rng, rng.Below(8) == 0 ? 300 : 60)));
    } else if (dice < 60) {
      TERRACE_ASSERT_OK(harness.CheckRead(harness.RandomKeys(&rng, 100)));
    } else if (dice < 70) {
      TERRACE_ASSERT_OK(harness.Erase(harness.RandomKeys(&rng, rng.Below(4) == 0 ? 300 : 40)));
    } else if (dice < 80) {
      TERRACE_ASSERT_OK(harness.Commit());
    } else if (dice < 85 && !harness.manifests().empty()) {
      auto it = harness.manifests().begin();
      std::advance(it, rng.Below(harness.manifests().size()));
      TERRACE_ASSERT_OK(harness.Drop(it->first));
    } else if (dice < 90 && !harness.manifests().empty()) {
      auto it = harness.manifests().begin();
      std::advance(it, rng.Below(harness.manifests().size()));
      TERRACE_ASSERT_OK(harness.Reopen(it->first));
      TERRACE_ASSERT_OK(harness.CheckAll());
    } else if (dice < 95) {
      TERRACE_ASSERT_OK(harness.store()->CompactNow());
    } else {
      TERRACE_ASSERT_OK(harness.CheckAll());
    }
    TERRACE_ASSERT_OK(harness.store()->background_status());
    if (!options.background_compaction) {
      // Every byte on the disk is in the quota, and no other.
      EXPECT_EQ(harness.quota()->used(), DirectoryBytes(fs, options.directory));
      EXPECT_EQ(harness.quota()->used(), harness.store()->stats().disk_bytes);
    }
  }
  TERRACE_ASSERT_OK(harness.CheckAll());
}

TEST(StoreModel, Memory) {
  for (std::uint64_t seed = 1 + FirstOfSweep(); seed <= 12; seed += kSweepStride) {
    MemoryFileSystem fs;
    RunModel(&fs, StoreHarness::TinyOptions(), seed, 250);
    if (HasFatalFailure()) return;
  }
}

TEST(StoreModel, MemoryWithBackgroundCompaction) {
  for (std::uint64_t seed = 1 + FirstOfSweep(); seed <= 8; seed += kSweepStride) {
    MemoryFileSystem fs;
    StoreOptions options = StoreHarness::TinyOptions();
    options.background_compaction = true;
    RunModel(&fs, options, seed, 250);
    if (HasFatalFailure()) return;
  }
}

TEST(StoreModel, ByGroup) {
  for (std::uint64_t seed = 1 + FirstOfSweep(); seed <= 12; seed += kSweepStride) {
    MemoryFileSystem fs;
    StoreOptions options = StoreHarness::TinyGroupOptions();
    options.background_compaction = seed % 3 == 0;
    // One group, which all rows divide; about as many as there are; empty ones.
    options.expected_rows = seed % 4 == 0 ? 0 : seed % 4 == 1 ? 400 : seed % 4 == 2 ? 5000 : 200;
    options.group.filter_bits = seed % 5 * 3;
    if (seed % 3 == 1) options.group.block_bytes = 12 << 10;
    RunModel(&fs, options, seed, 250, /*alike_keys=*/seed % 5 == 0);
    if (HasFatalFailure()) return;
  }
}

TEST(StoreModel, RowLengthsByGroup) {
  for (const std::uint32_t row_bytes : {1u, 7u, 512u, 4096u, 20000u}) {
    for (const ReadMode mode : {ReadMode::kPlanned, ReadMode::kWholeFile}) {
      SCOPED_TRACE("rows of " + std::to_string(row_bytes));
      MemoryFileSystem fs;
      StoreOptions options = StoreHarness::TinyGroupOptions();
      options.row_bytes = row_bytes;
      options.read_mode = mode;
      options.io_buffer_bytes = 1;  // The least.
      RunModel(&fs, options, row_bytes, 60);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(StoreModel, KeysThatAnIndexTakesForEachOther) {
  for (std::uint64_t seed = 1 + FirstOfSweep(); seed <= 8; seed += kSweepStride) {
    MemoryFileSystem fs;
    StoreOptions options = StoreHarness::TinyOptions();
    options.background_compaction = seed % 2 == 0;
    RunModel(&fs, options, seed, 250, /*alike_keys=*/true);
    if (HasFatalFailure()) return;
  }
}

// An absent key whose alike one is there costs a read, and no more.
TEST(Store, CountsMistakenReads) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, std::uint64_t{1} << 30, StoreHarness::TinyOptions());
  harness.alike_keys = true;
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write({harness.KeyAt(0), harness.KeyAt(8)}));
  TERRACE_ASSERT_OK(harness.CheckRead({harness.KeyAt(0), harness.KeyAt(8), harness.KeyAt(16)}));
  EXPECT_EQ(harness.store()->stats().mistaken_reads, 0u);
  TERRACE_ASSERT_OK(harness.CheckRead({harness.KeyAt(1), harness.KeyAt(2), harness.KeyAt(9)}));
  EXPECT_EQ(harness.store()->stats().mistaken_reads, 3u);
}

// What a writer claims is trusted; what it wrote last is found all the same, also after an opening.
TEST(Store, AKeyThatIsFalselySaidToBeNewKeepsItsNewestRow) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, std::uint64_t{1} << 30, StoreHarness::TinyOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 40)));
  const std::vector<Key> keys = harness.KeysFrom(10, 20);
  const std::uint32_t row_bytes = StoreHarness::TinyOptions().row_bytes;
  std::vector<std::vector<std::byte>> newest;
  std::vector<const std::byte*> rows;
  for (const Key key : keys) newest.push_back(TestRow(key, 99, row_bytes));
  for (const auto& row : newest) rows.push_back(row.data());
  TERRACE_ASSERT_OK(
      harness.store()->Write(keys, rows, std::vector<std::uint8_t>(keys.size(), kNewKey)));
  const auto expect_newest = [&](Store* store) {
    std::vector<std::vector<std::byte>> read(keys.size(), std::vector<std::byte>(row_bytes));
    std::vector<std::byte*> to;
    for (auto& row : read) to.push_back(row.data());
    std::vector<std::uint8_t> found(keys.size());
    TERRACE_ASSERT_OK(store->Read(keys, to, found));
    EXPECT_EQ(found, std::vector<std::uint8_t>(keys.size(), 1));
    EXPECT_EQ(read, newest);
  };
  expect_newest(harness.store());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 10)));
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(20, 36)));
  EXPECT_DEATH((void)harness.store()->CompactNow(), "internal error");
  TERRACE_ASSERT_OK(harness.Commit());
  TERRACE_ASSERT_OK(harness.Reopen(harness.manifests().begin()->first));
  expect_newest(harness.store());
}

// Rows of a file take 20 of the place's 32 bits; what is left numbers 4,096 files, of which those
// that only a manifest names are none: they are not open either.
TEST(Store, FilesThatOnlyManifestsNameTakeNoPlace) {
  MemoryFileSystem fs;
  StoreOptions options = StoreHarness::TinyOptions();
  options.file_bytes = std::uint64_t{1} << 30;
  options.background_compaction = true;
  StoreHarness harness(&fs, std::uint64_t{1} << 40, options);
  TERRACE_ASSERT_OK(harness.Create());
  for (int i = 0; i < StepsOfWalk(5000); ++i) {
    TERRACE_ASSERT_OK(harness.Write({harness.KeyAt(static_cast<std::uint64_t>(i) % 400)}));
    TERRACE_ASSERT_OK(harness.Commit());
    ASSERT_LT(harness.quota()->files(), 1000u);
  }
  TERRACE_ASSERT_OK(harness.CheckAll());
  while (harness.manifests().size() > 1)
    TERRACE_ASSERT_OK(harness.Drop(harness.manifests().begin()->first));
  TERRACE_ASSERT_OK(harness.Write({harness.KeyAt(1)}));
  TERRACE_ASSERT_OK(harness.CheckAll());
}

TEST(StoreModel, Disk) {
  char folder[] = "/tmp/terrace_store_test.XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  for (const char* backend : {"auto", "threads"}) {
    for (const bool direct : {true, false}) {
      const bool by_group = direct == (std::string(backend) == "auto");
      SCOPED_TRACE(std::string(backend) + (direct ? " direct" : " buffered"));
      StoreOptions options =
          by_group ? StoreHarness::TinyGroupOptions() : StoreHarness::TinyOptions();
      options.directory = JoinPath(folder, std::string(backend) + (direct ? "-direct" : ""));
      options.read_queue.backend = backend;
      options.direct_io = direct;
      RunModel(FileSystem::Posix(), options, 21, 60);
    }
  }
  EXPECT_TRUE(RemoveTree(FileSystem::Posix(), folder).ok());
}

// Rows longer than a block, and shorter than a word.
TEST(StoreModel, RowLengths) {
  for (const std::uint32_t row_bytes : {1u, 7u, 512u, 4096u, 20000u}) {
    MemoryFileSystem fs;
    StoreOptions options = StoreHarness::TinyOptions();
    options.row_bytes = row_bytes;
    options.file_bytes = 30 * (row_bytes + 40);
    RunModel(&fs, options, row_bytes, 60);
    if (HasFatalFailure()) return;
  }
}

// Whole files in parts as small as can be, and parts of several threads: the same rows.
TEST(StoreModel, WaysToRead) {
  for (const std::uint32_t row_bytes : {20u, 512u, 5000u}) {
    for (const ReadMode mode : {ReadMode::kPlanned, ReadMode::kWholeFile}) {
      for (const int threads : {1, 3}) {
        SCOPED_TRACE("rows of " + std::to_string(row_bytes));
        MemoryFileSystem fs;
        StoreOptions options = StoreHarness::TinyOptions();
        options.row_bytes = row_bytes;
        options.file_bytes = 60 * (row_bytes + 40);
        options.io_buffer_bytes = 1;  // The least.
        options.read_mode = mode;
        options.read_threads = threads;
        RunModel(&fs, options, row_bytes, 60);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// What was given together lies together, in a file and through compaction, and takes one request.
TEST(Store, RowsLieInTheOrderInWhichTheyAreGiven) {
  constexpr std::uint64_t kRows = 3000, kSlice = 100;
  MemoryFileSystem fs;
  StoreOptions options = StoreHarness::TinyOptions();
  options.row_bytes = 256;
  options.file_bytes = 4 << 20;
  options.io_buffer_bytes = 4 << 20;
  options.merge_gap_bytes = 0;
  DiskQuota quota(std::uint64_t{1} << 30);
  auto store = Store::Create(&fs, Clock::Real(), &quota, options);
  TERRACE_ASSERT_OK(store);
  std::vector<Key> keys;
  for (Key key = 0; key < kRows; ++key) keys.push_back(key);
  Rng rng(3);
  for (std::size_t i = keys.size(); i > 1; --i) std::swap(keys[i - 1], keys[rng.Below(i)]);
  std::vector<std::byte> row(options.row_bytes);
  std::vector<const std::byte*> rows(kRows, row.data());
  TERRACE_ASSERT_OK((*store)->Write(keys, rows, {}));
  std::vector<std::byte> out(kSlice * options.row_bytes);
  std::vector<std::byte*> to;
  for (std::uint64_t i = 0; i < kSlice; ++i) to.push_back(out.data() + i * options.row_bytes);
  std::vector<std::uint8_t> found(kSlice);
  const auto requests_of = [&](std::span<const Key> some) {
    const std::uint64_t before = (*store)->stats().read_requests;
    TERRACE_EXPECT_OK((*store)->Read(some, to, found));
    EXPECT_EQ(std::count(found.begin(), found.end(), 1), static_cast<std::ptrdiff_t>(kSlice));
    return (*store)->stats().read_requests - before;
  };
  std::vector<Key> apart;
  for (std::size_t i = 0; i < kSlice; ++i) apart.push_back(keys[i * kRows / kSlice]);
  EXPECT_EQ(requests_of(apart), kSlice);
  for (std::size_t begin = 0; begin < kRows; begin += kSlice) {
    EXPECT_EQ(requests_of(std::span(keys).subspan(begin, kSlice)), 1u) << begin;
  }
  // Every other row is written again; the others become neighbours.
  std::vector<Key> again, left;
  for (std::size_t i = 0; i < kRows; ++i) (i % 2 == 0 ? again : left).push_back(keys[i]);
  TERRACE_ASSERT_OK((*store)->Write(again, std::span(rows).first(again.size()), {}));
  TERRACE_ASSERT_OK((*store)->CompactNow());
  ASSERT_GT((*store)->stats().rows_compacted, 0u);
  for (std::size_t begin = 0; begin + kSlice <= left.size(); begin += kSlice) {
    EXPECT_EQ(requests_of(std::span(left).subspan(begin, kSlice)), 1u) << begin;
    EXPECT_EQ(requests_of(std::span(again).subspan(begin, kSlice)), 1u) << begin;
  }
}

TEST(Store, WholeFilesAreReadWhole) {
  MemoryFileSystem fs;
  StoreOptions options = StoreHarness::TinyOptions();
  options.file_bytes = 64 << 10;
  options.io_buffer_bytes = 512 << 10;
  options.read_mode = ReadMode::kWholeFile;
  StoreHarness harness(&fs, std::uint64_t{1} << 30, options);
  TERRACE_ASSERT_OK(harness.Create());
  const std::vector<Key> keys = harness.KeysFrom(0, 20'000);
  TERRACE_ASSERT_OK(harness.Write(keys));
  ASSERT_GT(harness.store()->stats().files, 5u);
  TERRACE_ASSERT_OK(harness.CheckRead({keys[7]}));
  const std::uint64_t one = harness.store()->stats().read_bytes;
  EXPECT_GE(one, 60u << 10);
  EXPECT_LE(one, 80u << 10);
  TERRACE_ASSERT_OK(harness.CheckRead(keys));
  // Where a buffer cuts a file, one block comes twice.
  const std::uint64_t all = harness.store()->stats().read_bytes - one;
  EXPECT_GE(all, harness.store()->stats().disk_bytes);
  EXPECT_LE(all, 2 * harness.store()->stats().disk_bytes);
}

// A batch large enough for every thread to get rows, some of them damaged.
TEST(Store, ThreadsThatCheckRowsFindTheDamagedOnes) {
  MemoryFileSystem memory;
  FaultyFileSystem fs(&memory, {});
  StoreOptions options = StoreHarness::TinyOptions();
  options.file_bytes = 1 << 20;
  options.io_buffer_bytes = 4 << 20;
  options.read_threads = 4;
  StoreHarness harness(&fs, std::uint64_t{1} << 30, options);
  TERRACE_ASSERT_OK(harness.Create());
  const std::vector<Key> keys = harness.KeysFrom(0, 20'000);
  TERRACE_ASSERT_OK(harness.Write(keys));
  TERRACE_ASSERT_OK(harness.CheckRead(keys));
  auto rules = ParseFaultRules("read:1+:flip:rows-");
  ASSERT_TRUE(rules.ok());
  fs.SetRules(std::move(rules).value());
  const Status status = harness.CheckRead(keys);  // Says if a wrong byte was handed out.
  EXPECT_EQ(status.code(), StatusCode::kCorruption) << status.ToString();
  EXPECT_NE(status.message().find("rows-"), std::string::npos) << status.ToString();
  fs.SetRules({});
  TERRACE_ASSERT_OK(harness.CheckRead(keys));
}

// A batch of more keys than one plan holds.
TEST(Store, MillionsOfKeysInOneBatch) {
  MemoryFileSystem fs;
  StoreOptions options = StoreHarness::TinyOptions();
  options.row_bytes = 8;
  options.file_bytes = 8 << 20;
  options.io_buffer_bytes = 4 << 20;
  DiskQuota quota(std::uint64_t{1} << 30);
  auto store = Store::Create(&fs, Clock::Real(), &quota, options);
  ASSERT_TRUE(store.ok());
  const std::size_t n = (std::size_t{1} << 22) + 1000;
  std::vector<Key> keys(n);
  std::vector<std::uint64_t> values(n), read(n, 0);
  std::vector<const std::byte*> rows(n);
  std::vector<std::byte*> out(n);
  for (std::size_t i = 0; i < n; ++i) {
    keys[i] = i;
    values[i] = HashCombine(i, 3);
    rows[i] = reinterpret_cast<const std::byte*>(&values[i]);
    out[i] = reinterpret_cast<std::byte*>(&read[i]);
  }
  TERRACE_ASSERT_OK((*store)->Write(keys, rows, {}));
  std::vector<std::uint8_t> found(n);
  TERRACE_ASSERT_OK((*store)->Read(keys, out, found));
  EXPECT_EQ(read, values);
  // One read of the whole store costs little more than its bytes.
  EXPECT_LE((*store)->stats().read_bytes, 2 * n * 32);
}

}  // namespace
}  // namespace terrace
