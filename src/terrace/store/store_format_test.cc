// The bytes on disk: the golden store of version 1, newer versions, and a flipped bit in every
// byte.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "terrace/io/framed_file.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
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

const char* const kGoldenFiles[] = {"manifest-00000001", "rows-0000000001", "rows-0000000002",
                                    "rows-0000000003"};

TEST(StoreFormat, GoldenVersion1) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  MakeGolden(&harness);
  const std::string folder = JoinPath(TERRACE_TESTDATA, "v1");
  if (std::getenv("TERRACE_UPDATE_GOLDEN") != nullptr) {
    TERRACE_ASSERT_OK(FileSystem::Posix()->MakeDirectories(folder));
    for (const char* name : kGoldenFiles) {
      Replace(FileSystem::Posix(), JoinPath(folder, name),
              ReadAll(&fs, JoinPath(harness.options()->directory, name)));
    }
  }
  // What is written now is what was written then ...
  MemoryFileSystem golden;
  TERRACE_ASSERT_OK(golden.MakeDirectories(harness.options()->directory));
  for (const char* name : kGoldenFiles) {
    const std::string bytes = ReadAll(FileSystem::Posix(), JoinPath(folder, name));
    EXPECT_TRUE(bytes == ReadAll(&fs, JoinPath(harness.options()->directory, name))) << name;
    Replace(&golden, JoinPath(harness.options()->directory, name), bytes);
  }
  // ... and what was written then is read.
  DiskQuota quota(kQuota);
  auto store = Store::Open(&golden, Clock::Real(), &quota, *harness.options(),
                           harness.manifests().at(1), {});
  ASSERT_TRUE(store.ok()) << store.status().ToString();
  RowMap rows;
  TERRACE_ASSERT_OK((*store)->ForEachRow(1 << 16, [&](const RowView& view) {
    rows[view.key].assign(view.row.begin(), view.row.end());
    return OkStatus();
  }));
  EXPECT_EQ(rows, harness.model());
  EXPECT_EQ(rows.size(), 5u);
  EXPECT_EQ(rows.at(7), TestRow(7, 2, 20));
}

TEST(StoreFormat, NewerVersionIsRefusedByName) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  MakeGolden(&harness);
  const std::string path = JoinPath(harness.options()->directory, "rows-0000000002");
  std::string bytes = ReadAll(&fs, path);
  const std::size_t footer = bytes.size() - 4096;
  bytes[footer + 8] = 2;  // The version.
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

TEST(StoreFormat, AFlippedBitInEveryByteIsNoticed) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  MakeGolden(&harness);
  Rng rng(17);
  EXPECT_FALSE(Noticed(&fs, &harness));
  for (const char* name : kGoldenFiles) {
    const std::string path = JoinPath(harness.options()->directory, name);
    const std::string good = ReadAll(&fs, path);
    for (std::size_t i = 0; i < good.size(); ++i) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << rng.Below(8)));
      Replace(&fs, path, bad);
      ASSERT_TRUE(Noticed(&fs, &harness)) << name << " byte " << i;
      if (HasFailure()) FAIL() << name << " byte " << i;
    }
    Replace(&fs, path, good);
  }
  EXPECT_FALSE(Noticed(&fs, &harness));
}

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
  const std::string payload = EncodeManifest(manifest);
  auto decoded = DecodeManifest(payload, "m");
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(EncodeManifest(*decoded), payload);
  for (std::size_t n = 0; n < payload.size(); ++n) {
    EXPECT_FALSE(DecodeManifest(payload.substr(0, n), "m").ok()) << n;
  }
  EXPECT_FALSE(DecodeManifest(payload + "x", "m").ok());
}

}  // namespace
}  // namespace terrace
