// Stores damaged at random and repaired: no row ever comes back with another value than its newest,
// and whatever is missing was named.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "terrace/base/testing/sweep.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/store_repair.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

using io_testing::ReadAll;
using io_testing::Replace;

constexpr std::uint64_t kQuota = std::uint64_t{1} << 30;
constexpr std::uint64_t kMemory = std::uint64_t{64} << 20;

// Rows that were overwritten, erased and compacted.
void MakeStore(StoreHarness* harness, Rng* rng) {
  TERRACE_ASSERT_OK(harness->Create());
  const int writes = 3 + static_cast<int>(rng->Below(12));
  for (int i = 0; i < writes; ++i) {
    TERRACE_ASSERT_OK(harness->Write(harness->RandomKeys(rng, 150)));
    if (rng->Below(3) == 0) TERRACE_ASSERT_OK(harness->Erase(harness->RandomKeys(rng, 60)));
    if (rng->Below(4) == 0) TERRACE_ASSERT_OK(harness->store()->CompactNow());
  }
  TERRACE_ASSERT_OK(harness->Commit());
}

// Damages a file in one of the ways in which disks and people do. other: another file of the store.
void Damage(FileSystem* fs, const std::string& path, const std::string& other, Rng* rng) {
  std::string bytes = ReadAll(fs, path);
  const auto flip = [&](std::size_t at) {
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng->Below(8)));
  };
  switch (rng->Below(8)) {
    case 0:  // A bit.
      flip(rng->Below(bytes.size()));
      break;
    case 1:  // Some bits, anywhere.
      for (int i = 0; i < 12; ++i) flip(rng->Below(bytes.size()));
      break;
    case 2: {  // A stretch of other bytes.
      const std::size_t begin = rng->Below(bytes.size());
      const std::size_t end = std::min(bytes.size(), begin + 1 + rng->Below(3000));
      for (std::size_t i = begin; i < end; ++i) bytes[i] = static_cast<char>(rng->Below(256));
      break;
    }
    case 3: {  // Sectors of zeros.
      const std::size_t begin = rng->Below(bytes.size() / 512) * 512;
      const std::size_t end = std::min(bytes.size(), begin + 512 * (1 + rng->Below(20)));
      std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                bytes.begin() + static_cast<std::ptrdiff_t>(end), '\0');
      break;
    }
    case 4:    // All of it is another file's,
    case 5: {  // or all but some sectors, or some: writes over a file that was used anew are lost.
      std::string old = ReadAll(fs, other);
      old.resize(bytes.size());
      const bool all = rng->Below(2) == 0;
      const std::size_t sectors = bytes.size() / 512;
      const std::size_t begin = all ? 0 : rng->Below(sectors) * 512;
      const std::size_t end =
          all ? bytes.size() : begin + 512 * (1 + rng->Below(sectors - begin / 512));
      if (rng->Below(2) == 0) std::swap(bytes, old);
      std::copy(old.begin() + static_cast<std::ptrdiff_t>(begin),
                old.begin() + static_cast<std::ptrdiff_t>(end),
                bytes.begin() + static_cast<std::ptrdiff_t>(begin));
      break;
    }
    case 6:  // The end is missing.
      bytes.resize(rng->Below(bytes.size()));
      break;
    default:
      TERRACE_ASSERT_OK(fs->Remove(path));
      return;
  }
  Replace(fs, path, bytes);
}

struct Scrubbed {
  Manifest manifest;
  std::vector<FileScrub> files;
  std::vector<const FileScrub*> damaged;
};

void Scrub(FileSystem* fs, const StoreHarness& harness, const ManifestReference& reference,
           Scrubbed* scrubbed) {
  const ScrubOptions options = harness.scrub_options();
  auto manifest =
      ReadManifest(fs, options.directory, reference.id, reference.digest, options.layout);
  TERRACE_ASSERT_OK(manifest.status());
  scrubbed->manifest = *manifest;
  auto buffers = ScrubBuffers::Allocate(options.layout);
  TERRACE_ASSERT_OK(buffers.status());
  for (const Manifest::File& file : manifest->files) {
    scrubbed->files.push_back(ScrubFile(fs, options, file, &*buffers));
    TERRACE_ASSERT_OK(scrubbed->files.back().refused);
  }
  for (const FileScrub& file : scrubbed->files) {
    if (!file.sound()) scrubbed->damaged.push_back(&file);
  }
}

RowMap RowsOf(Store* store) {
  RowMap rows;
  TERRACE_EXPECT_OK(store->ForEachRow(1 << 20, [&](const RowView& view) {
    rows[view.key].assign(view.row.begin(), view.row.end());
    return OkStatus();
  }));
  return rows;
}

// What the repaired store holds is of the model; what is missing was named, or may be a nameless
// one.
void ExpectHonest(const RowMap& rows, const RowMap& model, const StoreLosses& losses) {
  std::set<Key> named(losses.dropped.begin(), losses.dropped.end());
  named.insert(losses.outdated.begin(), losses.outdated.end());
  EXPECT_EQ(named.size(), losses.dropped.size() + losses.outdated.size());
  for (const auto& [key, row] : rows) {
    const auto wanted = model.find(key);
    ASSERT_NE(wanted, model.end()) << std::hex << key << " came back";
    ASSERT_EQ(row, wanted->second) << std::hex << key << " has an older value";
    ASSERT_FALSE(named.contains(key)) << std::hex << key << " was to be dropped";
  }
  std::uint64_t unnamed = 0;
  for (const auto& [key, row] : model) unnamed += rows.contains(key) || named.contains(key) ? 0 : 1;
  EXPECT_LE(unnamed, losses.unknown_rows);
  // No row is given up that needn't be: what was dropped by name was there, unless its deletion is
  // a nameless one.
  std::uint64_t erased = 0;
  for (const Key key : losses.dropped) erased += model.contains(key) ? 0 : 1;
  EXPECT_LE(erased, losses.unknown_rows);
}

// No file has a record of a key that was given up.
void ExpectNoRecordsOf(FileSystem* fs, const ScrubOptions& options,
                       const ManifestReference& repaired, const StoreLosses& losses) {
  std::set<Key> gone(losses.dropped.begin(), losses.dropped.end());
  gone.insert(losses.outdated.begin(), losses.outdated.end());
  auto manifest = ReadManifest(fs, options.directory, repaired.id, repaired.digest, options.layout);
  TERRACE_ASSERT_OK(manifest.status());
  auto buffers = ScrubBuffers::Allocate(options.layout);
  TERRACE_ASSERT_OK(buffers.status());
  for (const Manifest::File& file : manifest->files) {
    const FileScrub scrub = ScrubFile(fs, options, file, &*buffers);
    TERRACE_ASSERT_OK(
        WalkSalvaged(fs, options, scrub, &*buffers, [&](const SalvagedRecord& record) {
          EXPECT_FALSE(gone.contains(record.key)) << std::hex << record.key;
          return OkStatus();
        }));
  }
}

// A store with so many damaged files, repaired, opened, compacted, and used further.
void RepairOnce(std::uint64_t seed, std::uint64_t most_damaged) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  harness.key_range = 200 + rng.Below(500);
  ASSERT_NO_FATAL_FAILURE(MakeStore(&harness, &rng));
  const ManifestReference reference = harness.manifests().at(1);
  const RowMap model = harness.model();
  harness.Abandon();
  const ScrubOptions options = harness.scrub_options();
  Scrubbed before;
  ASSERT_NO_FATAL_FAILURE(Scrub(&fs, harness, reference, &before));
  ASSERT_TRUE(before.damaged.empty());
  for (std::uint64_t i = 0; i < 1 + rng.Below(most_damaged); ++i) {
    const Manifest::File& file = before.manifest.files[rng.Below(before.manifest.files.size())];
    const std::string path = JoinPath(options.directory, ParameterFileName(file.id));
    if (fs.Stat(path).ok() && fs.Stat(path)->size > 0) {
      const std::uint64_t other = before.manifest.files[rng.Below(before.manifest.files.size())].id;
      const std::string other_path = JoinPath(options.directory, ParameterFileName(other));
      ASSERT_NO_FATAL_FAILURE(
          Damage(&fs, path, fs.Stat(other_path).ok() ? other_path : path, &rng));
    }
  }
  Scrubbed scrubbed;
  ASSERT_NO_FATAL_FAILURE(Scrub(&fs, harness, reference, &scrubbed));
  // Bits may have been flipped back, and bytes replaced by equal ones; all else is found.
  const bool rows_expire = rng.Below(2) == 0;
  auto losses = FindLosses(&fs, options, scrubbed.manifest, scrubbed.damaged, rows_expire, kMemory);
  TERRACE_ASSERT_OK(losses.status());
  auto repaired = RewriteStore(&fs, options, scrubbed.manifest, scrubbed.damaged, *losses, 2);
  TERRACE_ASSERT_OK(repaired.status());
  std::vector<Finding> findings;
  TERRACE_ASSERT_OK(ScrubManifest(&fs, options, *repaired, &findings));
  ASSERT_TRUE(findings.empty()) << findings[0].file << ": " << findings[0].what;
  if (rows_expire) {
    ASSERT_NO_FATAL_FAILURE(ExpectNoRecordsOf(&fs, options, *repaired, *losses));
  }
  Scrubbed mended;
  ASSERT_NO_FATAL_FAILURE(Scrub(&fs, harness, *repaired, &mended));
  const auto longest = [](const Manifest& manifest) {
    std::uint64_t rows = 0;
    for (const Manifest::File& file : manifest.files) rows = std::max(rows, file.rows);
    return rows;
  };
  // Or the store would have places for fewer files than before.
  EXPECT_LE(longest(mended.manifest), longest(scrubbed.manifest));

  DiskQuota quota(kQuota);
  auto store =
      Store::Open(&fs, Clock::Real(), &quota, *harness.options(), *repaired, {&*repaired, 1});
  TERRACE_ASSERT_OK(store.status());
  ExpectHonest(RowsOf(store->get()), model, *losses);
  // Nor does anything come back when files are rewritten and deletions end.
  for (int round = 0; round < 4; ++round) {
    const std::vector<Key> keys = harness.RandomKeys(&rng, 80);
    const std::vector<std::byte> row = TestRow(1, 999, harness.options()->row_bytes);
    const std::vector<const std::byte*> rows(keys.size(), row.data());
    TERRACE_ASSERT_OK((*store)->Write(keys, rows, {}));
    TERRACE_ASSERT_OK((*store)->Erase(keys));
    TERRACE_ASSERT_OK((*store)->CompactNow());
    RowMap left = model;
    for (const Key key : keys) left.erase(key);
    for (const auto& [key, value] : RowsOf(store->get())) {
      ASSERT_TRUE(model.contains(key)) << std::hex << key << " came back";
      ASSERT_EQ(value, model.at(key)) << std::hex << key;
      ASSERT_TRUE(left.contains(key)) << std::hex << key << " was erased";
    }
  }
}

TEST(StoreRepair, OneDamagedFile) {
  for (std::uint64_t seed = 1 + FirstOfSweep(); seed <= 300; seed += kSweepStride) {
    ASSERT_NO_FATAL_FAILURE(RepairOnce(seed, 1));
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST(StoreRepair, ManyDamagedFiles) {
  for (std::uint64_t seed = 1001 + FirstOfSweep(); seed <= 1200; seed += kSweepStride) {
    ASSERT_NO_FATAL_FAILURE(RepairOnce(seed, 12));
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

// An erased key whose deletion record is damaged stays erased.
TEST(StoreRepair, ADamagedDeletionStaysOne) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write({1, 2, 3}));
  TERRACE_ASSERT_OK(harness.Erase({2}));
  TERRACE_ASSERT_OK(harness.Commit());
  const std::string path = JoinPath(harness.options()->directory, ParameterFileName(2));
  std::string bytes = ReadAll(&fs, path);
  bytes[kBlockBytes + 30] ^= 1;
  Replace(&fs, path, bytes);
  Scrubbed scrubbed;
  ASSERT_NO_FATAL_FAILURE(Scrub(&fs, harness, harness.manifests().at(1), &scrubbed));
  ASSERT_EQ(scrubbed.damaged.size(), 1u);
  EXPECT_EQ(scrubbed.damaged[0]->whole, 1u);
  auto losses = FindLosses(&fs, harness.scrub_options(), scrubbed.manifest, scrubbed.damaged,
                           /*rows_expire=*/false, kMemory);
  TERRACE_ASSERT_OK(losses.status());
  EXPECT_TRUE(losses->dropped.empty());
  auto repaired =
      RewriteStore(&fs, harness.scrub_options(), scrubbed.manifest, scrubbed.damaged, *losses, 2);
  TERRACE_ASSERT_OK(repaired.status());
  DiskQuota quota(kQuota);
  auto store = Store::Open(&fs, Clock::Real(), &quota, *harness.options(), *repaired, {});
  TERRACE_ASSERT_OK(store.status());
  EXPECT_EQ(RowsOf(store->get()), harness.model());
}

TEST(StoreRepair, TooManySuspectsAreAnError) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write({1, 2, 3}));
  TERRACE_ASSERT_OK(harness.Write({4}));
  TERRACE_ASSERT_OK(harness.Commit());
  TERRACE_ASSERT_OK(fs.Remove(JoinPath(harness.options()->directory, ParameterFileName(2))));
  Scrubbed scrubbed;
  ASSERT_NO_FATAL_FAILURE(Scrub(&fs, harness, harness.manifests().at(1), &scrubbed));
  auto losses = FindLosses(&fs, harness.scrub_options(), scrubbed.manifest, scrubbed.damaged,
                           /*rows_expire=*/false, 100);
  EXPECT_EQ(losses.status().code(), StatusCode::kOutOfMemory) << losses.status().ToString();
  losses = FindLosses(&fs, harness.scrub_options(), scrubbed.manifest, scrubbed.damaged,
                      /*rows_expire=*/false, kMemory);
  TERRACE_ASSERT_OK(losses.status());
  EXPECT_EQ(losses->outdated.size(), 3u);
  EXPECT_EQ(losses->unknown_rows, 1u);
}

// Two writes of one store, the second of which overwrites `rows` keys of the first: committed, and
// closed.
void WriteTwice(StoreHarness* harness, std::uint64_t first, std::uint64_t rows) {
  TERRACE_ASSERT_OK(harness->Create());
  TERRACE_ASSERT_OK(harness->Write(harness->KeysFrom(0, first)));
  TERRACE_ASSERT_OK(harness->Write(harness->KeysFrom(0, rows)));
  TERRACE_ASSERT_OK(harness->Commit());
  harness->Abandon();
}

KeyEntry EntryAt(const std::string& bytes, std::uint64_t at) {
  KeyEntry entry;
  std::memcpy(&entry, bytes.data() + at, sizeof entry);
  return entry;
}

// A record of which nothing tells the key is none of those whose keys their own records tell.
TEST(StoreRepair, OneNamelessRowTakesNoWholeOnesAlong) {
  MemoryFileSystem fs;
  StoreOptions store_options = StoreHarness::TinyOptions();
  store_options.file_bytes = 1 << 20;
  StoreHarness harness(&fs, kQuota, store_options);
  constexpr std::uint64_t kRows = 2000;
  harness.key_range = 5 * kRows;
  ASSERT_NO_FATAL_FAILURE(WriteTwice(&harness, 5 * kRows, kRows));
  const ScrubOptions options = harness.scrub_options();
  const std::string path = JoinPath(options.directory, ParameterFileName(2));
  std::string bytes = ReadAll(&fs, path);
  // A block of keys reads as zeros, and the record of one of them is damaged.
  const std::uint64_t keys_at = options.layout.KeysOffset(kRows) + kBlockBytes;
  const KeyEntry entry = EntryAt(bytes, keys_at + 100 * kKeyEntryBytes);
  std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(keys_at), kBlockBytes, '\0');
  bytes[options.layout.RecordOffset(RowOfEntry(kParameterFileVersion, 0, entry.version)) + 8] ^= 1;
  Replace(&fs, path, bytes);
  Scrubbed scrubbed;
  ASSERT_NO_FATAL_FAILURE(Scrub(&fs, harness, harness.manifests().at(1), &scrubbed));
  ASSERT_EQ(scrubbed.damaged.size(), 1u);
  EXPECT_EQ(scrubbed.damaged[0]->unknown_rows(), 1u);
  for (const bool rows_expire : {false, true}) {
    auto losses =
        FindLosses(&fs, options, scrubbed.manifest, scrubbed.damaged, rows_expire, kMemory);
    TERRACE_ASSERT_OK(losses);
    EXPECT_TRUE(losses->dropped.empty());
    const std::set<Key> outdated(losses->outdated.begin(), losses->outdated.end());
    EXPECT_TRUE(outdated.contains(entry.key));
    for (const Key key : harness.KeysFrom(0, kRows)) {
      EXPECT_TRUE(key == entry.key || !outdated.contains(key)) << key;
    }
  }
}

// As many records are lost at each reading, but not the same ones: what is given up would not be
// what was lost, and an older record of that would come back.
TEST(StoreRepair, ADiskThatReadsOtherwiseLaterEndsIt) {
  MemoryFileSystem fs;
  StoreHarness harness(&fs, kQuota, StoreHarness::TinyOptions());
  ASSERT_NO_FATAL_FAILURE(WriteTwice(&harness, 20, 10));
  const ScrubOptions options = harness.scrub_options();
  const std::string older = JoinPath(options.directory, ParameterFileName(1));
  const std::string path = JoinPath(options.directory, ParameterFileName(2));
  const std::string whole = ReadAll(&fs, path), whole_older = ReadAll(&fs, older);
  const auto damage = [&](std::uint64_t row) {
    std::string bytes = whole;
    bytes[options.layout.RecordOffset(row) + kRecordHeadBytes] ^= 1;
    Replace(&fs, path, bytes);
  };
  damage(2);
  Scrubbed scrubbed;
  ASSERT_NO_FATAL_FAILURE(Scrub(&fs, harness, harness.manifests().at(1), &scrubbed));
  ASSERT_EQ(scrubbed.damaged.size(), 1u);
  for (const bool rows_expire : {false, true}) {
    const auto find = [&] {
      return FindLosses(&fs, options, scrubbed.manifest, scrubbed.damaged, rows_expire, kMemory);
    };
    const auto losses = find();
    TERRACE_ASSERT_OK(losses.status());
    EXPECT_EQ(losses->dropped.size(), 1u);
    damage(5);
    EXPECT_EQ(find().status().code(), StatusCode::kUnavailable);
    const auto repaired =
        RewriteStore(&fs, options, scrubbed.manifest, scrubbed.damaged, *losses, 2);
    EXPECT_EQ(repaired.status().code(), StatusCode::kUnavailable);
    damage(2);
    // The keys of a file that was sound.
    std::string bytes = whole_older;
    bytes[options.layout.KeysOffset(20) + 5 * kKeyEntryBytes] ^= 1;
    Replace(&fs, older, bytes);
    EXPECT_EQ(find().status().code(), StatusCode::kUnavailable);
    Replace(&fs, older, whole_older);
  }
}

// Of a file that was used anew, lost writes leave a block of another file's keys and the head of
// one record, which is longer than a sector: what both say is not what that record was.
TEST(StoreRepair, TwoLostWritesTellNoKey) {
  MemoryFileSystem fs;
  StoreOptions store_options = StoreHarness::TinyOptions();
  store_options.row_bytes = 8192 - kRecordHeadBytes;
  store_options.file_bytes = 16 << 20;
  StoreHarness harness(&fs, kQuota, store_options);
  constexpr std::uint64_t kRows = 300;
  harness.key_range = 4 * kRows;
  TERRACE_ASSERT_OK(harness.Create());
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(3 * kRows, 4 * kRows)));
  // What the newest file is to have had before.
  const ScrubOptions options = harness.scrub_options();
  const auto files = fs.List(options.directory);
  TERRACE_ASSERT_OK(files.status());
  ASSERT_EQ(files->size(), 1u);
  const std::string old = ReadAll(&fs, JoinPath(options.directory, files->front().name));
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, 2 * kRows)));
  TERRACE_ASSERT_OK(harness.Write(harness.KeysFrom(0, kRows)));
  TERRACE_ASSERT_OK(harness.Commit());
  harness.Abandon();
  Scrubbed sound;
  ASSERT_NO_FATAL_FAILURE(Scrub(&fs, harness, harness.manifests().at(1), &sound));
  const FileScrub& newest = sound.files.back();
  const std::string now = ReadAll(&fs, newest.path);
  ASSERT_EQ(newest.file.rows, kRows);
  ASSERT_EQ(old.size(), now.size());
  const std::uint64_t keys_at = options.layout.KeysOffset(kRows);
  for (std::uint64_t row = 0; row < kRows; row += 7) {
    std::string bytes = now;
    const std::uint64_t record_at = options.layout.RecordOffset(row);
    bytes.replace(keys_at, kBlockBytes, old, keys_at, kBlockBytes);
    bytes.replace(record_at, kBlockBytes, old, record_at, kBlockBytes);
    Replace(&fs, newest.path, bytes);
    Scrubbed scrubbed;
    ASSERT_NO_FATAL_FAILURE(Scrub(&fs, harness, harness.manifests().at(1), &scrubbed));
    ASSERT_EQ(scrubbed.damaged.size(), 1u);
    auto losses = FindLosses(&fs, options, scrubbed.manifest, scrubbed.damaged,
                             /*rows_expire=*/false, kMemory);
    TERRACE_ASSERT_OK(losses);
    Key key = 0;
    std::memcpy(&key, now.data() + record_at + 8, sizeof key);  // Behind the check.
    std::set<Key> named(losses->dropped.begin(), losses->dropped.end());
    named.insert(losses->outdated.begin(), losses->outdated.end());
    EXPECT_TRUE(named.contains(key)) << "row " << row << ": an older record of it would come back";
  }
}

}  // namespace
}  // namespace terrace
