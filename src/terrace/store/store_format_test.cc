// The bytes on disk: the golden stores of each version, newer versions, and a flipped bit in every
// byte.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "terrace/base/testing/sweep.h"
#include "terrace/io/framed_file.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/group_directory.h"
#include "terrace/store/manifest.h"
#include "terrace/store/parameter_file.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

using io_testing::ReadAll;
using io_testing::Replace;

constexpr std::uint64_t kQuota = 1 << 30;

// Three files: rows, some of them overwritten, one erased.
void MakeGolden(StoreHarness* harness) {
  TERRACE_ASSERT_OK(harness->Create());
  TERRACE_ASSERT_OK(harness->Write({0, 1, 2, ~std::uint64_t{0}, 0x1234567890abcdef}));
  TERRACE_ASSERT_OK(harness->Write({2, 7}));
  TERRACE_ASSERT_OK(harness->Erase({1}));
  TERRACE_ASSERT_OK(harness->Commit());
}

std::vector<std::string> NamesIn(FileSystem* fs, const std::string& directory) {
  std::vector<std::string> names;
  const auto entries = fs->List(directory);
  EXPECT_TRUE(entries.ok());
  for (const FileInfo& entry : *entries) names.push_back(entry.name);
  return names;
}

// Eight rows a block, of three groups, of which one is divided.
StoreOptions GroupOptions() {
  StoreOptions options = StoreHarness::TinyOptions();
  options.index = IndexKind::kGroup;
  options.row_bytes = 500;
  options.expected_rows = 18;
  options.file_bytes = 1 << 20;
  return options;
}

// Rows, more of one group than a block holds, some of them overwritten, one erased.
void MakeGroupGolden(StoreHarness* harness) {
  TERRACE_ASSERT_OK(harness->Create());
  TERRACE_ASSERT_OK(harness->Write({0, 1, 2, ~std::uint64_t{0}, 0x1234567890abcdef}));
  std::vector<Key> more = {2, 7};
  const GroupDirectory directory(3);
  for (Key key = 100; more.size() < 12; ++key) {
    if (directory.GroupOf(MixKey(key)) == directory.GroupOf(MixKey(2))) more.push_back(key);
  }
  TERRACE_ASSERT_OK(harness->Write(more));
  TERRACE_ASSERT_OK(harness->Erase({1}));
  TERRACE_ASSERT_OK(harness->Commit());
}

// Of the newest version what is written now must be what was written then; older ones are read.
void ExpectGolden(StoreHarness* harness, MemoryFileSystem* fs_of, const std::string& version,
                  std::size_t rows_wanted, bool newest) {
  MemoryFileSystem& fs = *fs_of;
  const std::string folder = JoinPath(TERRACE_TESTDATA, version);
  if (newest && std::getenv("TERRACE_UPDATE_GOLDEN") != nullptr) {
    TERRACE_ASSERT_OK(FileSystem::Posix()->MakeDirectories(folder));
    for (const std::string& name : NamesIn(&fs, harness->options()->directory)) {
      Replace(FileSystem::Posix(), JoinPath(folder, name),
              ReadAll(&fs, JoinPath(harness->options()->directory, name)));
    }
  }
  MemoryFileSystem golden;
  TERRACE_ASSERT_OK(golden.MakeDirectories(harness->options()->directory));
  ManifestReference manifest = harness->manifests().at(1);
  for (const std::string& name : NamesIn(&fs, harness->options()->directory)) {
    const std::string bytes = ReadAll(FileSystem::Posix(), JoinPath(folder, name));
    const bool same = bytes == ReadAll(&fs, JoinPath(harness->options()->directory, name));
    if (newest || name.starts_with("rows-")) {
      EXPECT_EQ(same, newest) << name;
    }
    if (name.starts_with("manifest-")) {
      manifest.digest = {bytes.size(), Checksum64(std::as_bytes(std::span(bytes)))};
    }
    Replace(&golden, JoinPath(harness->options()->directory, name), bytes);
  }
  DiskQuota quota(kQuota);
  auto store = Store::Open(&golden, Clock::Real(), &quota, *harness->options(), manifest, {});
  ASSERT_TRUE(store.ok()) << store.status().ToString();
  RowMap rows;
  TERRACE_ASSERT_OK((*store)->ForEachRow(1 << 16, [&](const RowView& view) {
    rows[view.key].assign(view.row.begin(), view.row.end());
    return OkStatus();
  }));
  EXPECT_EQ(rows, harness->model());
  EXPECT_EQ(rows.size(), rows_wanted);
  EXPECT_EQ(rows.at(7), TestRow(7, 2, harness->options()->row_bytes));
  if (newest) return;
  // What goes on from there mixes files of both versions, compacts them, and is opened again.
  rows[7] = TestRow(7, 99, harness->options()->row_bytes);
  for (int i = 0; i < 20; ++i) {
    const Key key = 7;
    const std::byte* row = rows[7].data();
    TERRACE_ASSERT_OK((*store)->Write({&key, 1}, {&row, 1}, {}));
  }
  TERRACE_ASSERT_OK((*store)->CompactNow());
  EXPECT_GT((*store)->stats().rows_compacted, 0u);
  const auto later = (*store)->Commit(2);
  TERRACE_ASSERT_OK(later);
  for (const bool reopened : {false, true}) {
    if (reopened) {
      store->reset();
      store = Store::Open(&golden, Clock::Real(), &quota, *harness->options(), *later, {});
      ASSERT_TRUE(store.ok()) << store.status().ToString();
    }
    RowMap now;
    TERRACE_ASSERT_OK((*store)->ForEachRow(1 << 16, [&](const RowView& view) {
      now[view.key].assign(view.row.begin(), view.row.end());
      return OkStatus();
    }));
    EXPECT_EQ(now, rows);
  }
}

TEST(StoreFormat, GoldenByKey) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  MakeGolden(&harness);
  ExpectGolden(&harness, &fs, "v1", 5, /*newest=*/false);
  ExpectGolden(&harness, &fs, "v3", 5, /*newest=*/true);
}

TEST(StoreFormat, GoldenByGroup) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, GroupOptions());
  MakeGroupGolden(&harness);
  ExpectGolden(&harness, &fs, "v2", 15, /*newest=*/false);
  ExpectGolden(&harness, &fs, "v3_by_group", 15, /*newest=*/true);
}

TEST(StoreFormat, NewerVersionIsRefusedByName) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  MakeGolden(&harness);
  const std::string path = JoinPath(harness.options()->directory, "rows-0000000002");
  std::string bytes = ReadAll(&fs, path);
  const std::size_t footer = bytes.size() - 4096;
  bytes[footer + 8] = static_cast<char>(kParameterFileVersion + 1);
  const std::uint64_t checksum = Checksum64(std::as_bytes(std::span(&bytes[footer], 4088)));
  std::memcpy(&bytes[footer + 4088], &checksum, 8);
  Replace(&fs, path, bytes);
  const Status status = harness.Reopen(1);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("newer version"), std::string::npos) << status.ToString();
  EXPECT_NE(status.message().find("rows-0000000002"), std::string::npos) << status.ToString();
}

TEST(StoreFormat, NewerManifestIsRefused) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  MakeGolden(&harness);
  ManifestReference reference{1, {}};
  const std::string path = JoinPath(harness.options()->directory, "manifest-00000001");
  auto digest = WriteFramedFile(&fs, path, kManifestMagic, kManifestVersion + 1, {});
  ASSERT_TRUE(digest.ok());
  reference.digest = *digest;
  DiskQuota quota(kQuota);
  auto store = Store::Open(&fs, Clock::Real(), &quota, *harness.options(), reference, {});
  ASSERT_FALSE(store.ok());
  EXPECT_EQ(store.status().code(), StatusCode::kInvalidArgument) << store.status().ToString();
}

TEST(StoreFormat, AnotherTableShardOrRowLengthIsRefused) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  MakeGolden(&harness);
  for (int what = 0; what < 3; ++what) {
    StoreOptions options = *harness.options();
    if (what == 0) options.table = "users";
    if (what == 1) options.shard = 3;
    if (what == 2) options.row_bytes = 24;
    options.read_only = true;
    auto store = Store::Open(&fs, Clock::Real(), nullptr, options, harness.manifests().at(1), {});
    ASSERT_FALSE(store.ok());
    EXPECT_EQ(store.status().code(), StatusCode::kInvalidArgument) << store.status().ToString();
  }
}

TEST(StoreFormat, CreateRefusesAFolderWithRows) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  MakeGolden(&harness);
  harness.Abandon();
  EXPECT_EQ(harness.Create().code(), StatusCode::kInvalidArgument);
}

// Opens the damaged store, reads every row, verifies. True: the damage was noticed by the check
// that looks for it.
bool Noticed(FileSystem* fs, StoreHarness* harness) {
  StoreOptions options = *harness->options();
  options.read_only = true;
  auto store = Store::Open(fs, Clock::Real(), nullptr, options, harness->manifests().at(1), {});
  if (!store.ok()) {
    EXPECT_NE(store.status().code(), StatusCode::kInternal);
    return true;
  }
  for (const Key key : {Key{0}, Key{1}, Key{2}, ~Key{0}, Key{0x1234567890abcdef}, Key{7}, Key{9}}) {
    std::vector<std::byte> row(options.row_bytes);
    std::byte* rows[] = {row.data()};
    std::uint8_t found[] = {0};
    if (!(*store)->Read({&key, 1}, rows, found).ok()) continue;
    const auto expected = harness->model().find(key);
    EXPECT_EQ(found[0] == 1, expected != harness->model().end());
    if (found[0] == 1 && expected != harness->model().end()) {
      EXPECT_EQ(row, expected->second);
    }
  }
  std::vector<Finding> findings;
  TERRACE_EXPECT_OK(
      ScrubManifest(fs, harness->scrub_options(), harness->manifests().at(1), &findings));
  return !findings.empty();
}

void FlipEveryByte(bool by_group) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, by_group ? GroupOptions() : StoreHarness::TinyOptions());
  if (by_group) {
    MakeGroupGolden(&harness);
  } else {
    MakeGolden(&harness);
  }
  Rng rng(17);
  EXPECT_FALSE(Noticed(&fs, &harness));
  for (const std::string& name : NamesIn(&fs, harness.options()->directory)) {
    const std::string path = JoinPath(harness.options()->directory, name);
    const std::string good = ReadAll(&fs, path);
    for (std::size_t i = FirstOfSweep(); i < good.size(); i += kSweepStride) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << rng.Below(8)));
      Replace(&fs, path, bad);
      ASSERT_TRUE(Noticed(&fs, &harness)) << name << " byte " << i;
      if (testing::Test::HasFailure()) FAIL() << name << " byte " << i;
    }
    Replace(&fs, path, good);
  }
  EXPECT_FALSE(Noticed(&fs, &harness));
}

TEST(StoreFormat, AFlippedBitInEveryByteIsNoticed) { FlipEveryByte(/*by_group=*/false); }

TEST(StoreFormat, AFlippedBitInEveryByteOfBlocksIsNoticed) { FlipEveryByte(/*by_group=*/true); }

TEST(StoreFormat, AScrubGoesOnAfterAFinding) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  MakeGolden(&harness);
  // Records of two files.
  for (const char* name : {"rows-0000000001", "rows-0000000002"}) {
    const std::string path = JoinPath(harness.options()->directory, name);
    std::string bytes = ReadAll(&fs, path);
    bytes[4096 + 30] = static_cast<char>(bytes[4096 + 30] ^ 1);
    Replace(&fs, path, bytes);
  }
  std::vector<Finding> findings;
  TERRACE_ASSERT_OK(
      ScrubManifest(&fs, harness.scrub_options(), harness.manifests().at(1), &findings));
  int records = 0;
  for (const Finding& finding : findings) {
    EXPECT_EQ(finding.offset, 4096u);
    records += finding.what.find("the record at offset 4096") != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(records, 2);
}

TEST(StoreFormat, ManifestRoundTrip) {
  Manifest manifest;
  manifest.id = 12;
  manifest.table = "ads";
  manifest.shard = 3;
  manifest.row_bytes = 20;
  manifest.sequence = 99;
  manifest.next_file_id = 50;
  manifest.files = {{7, 4096, 3, 11}, {49, 8192, 5, 12}};
  EXPECT_EQ(manifest.version(), 1u);
  const std::string by_key = EncodeManifest(manifest);
  manifest.groups = 100;
  manifest.rows_in_blocks = 77;
  manifest.block_row_bytes = 20;
  EXPECT_EQ(manifest.version(), 2u);
  for (const std::string& payload : {by_key, EncodeManifest(manifest)}) {
    auto decoded = DecodeManifest(payload, "m");
    ASSERT_TRUE(decoded.ok());
    EXPECT_EQ(EncodeManifest(*decoded), payload);
    for (std::size_t n = 0; n < payload.size(); ++n) {
      // Without what version 2 adds it is one of version 1; the frame's version tells.
      EXPECT_EQ(DecodeManifest(payload.substr(0, n), "m").ok(), n == by_key.size()) << n;
    }
    EXPECT_FALSE(DecodeManifest(payload + "x", "m").ok());
  }
  manifest.groups = GroupDirectory::kMostGroups + 1;
  EXPECT_FALSE(DecodeManifest(EncodeManifest(manifest), "m").ok());
}

}  // namespace
}  // namespace terrace
