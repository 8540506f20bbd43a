// A small run, whole: a bit flipped in every byte of its small files, files of newer programs, and
// what a repair makes of either.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/base/testing/sweep.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/train/run_reader.h"
#include "terrace/train/run_repair.h"
#include "terrace/train/run_scrub.h"

namespace terrace {
namespace {

using io_testing::ReadAll;
using io_testing::Replace;
using testing::HasSubstr;

constexpr char kRun[] = "/runs/a";
constexpr std::uint32_t kRowBytes = 24;

// Every file below a folder with its bytes.
std::map<std::string, std::string> Contents(FileSystem* fs, const std::string& folder) {
  std::map<std::string, std::string> files;
  const Result<std::vector<FileInfo>> entries = fs->List(folder);
  TERRACE_EXPECT_OK(entries.status());
  for (const FileInfo& entry : *entries) {
    const std::string path = JoinPath(folder, entry.name);
    if (!entry.is_directory) {
      files[path] = ReadAll(fs, path);
    } else {
      files.merge(Contents(fs, path));
    }
  }
  return files;
}

class RunScrubTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<Job> job = ParseJob("seed: 1\noutput: /runs/a\ndata: {train: [/log.tsv]}\n", "job", {});
    TERRACE_ASSERT_OK(job.status());
    job_ = *job;
    Result<std::unique_ptr<RunFolder>> run =
        RunFolder::Open(&fs_, kRun, RunFolder::Mode::kNew, &job_);
    TERRACE_ASSERT_OK(run.status());
    StoreOptions options;
    options.directory = (*run)->StoreDirectory("default", 0);
    options.table = "default";
    options.row_bytes = kRowBytes;
    options.background_compaction = false;
    DiskQuota quota(std::uint64_t{1} << 30);
    auto store = Store::Create(&fs_, Clock::Real(), &quota, options);
    TERRACE_ASSERT_OK(store.status());
    const std::string metrics = R"({"format_version":1,"kind":"interval"})";
    Replace(&fs_, At("metrics.jsonl"), metrics + "\n");
    for (std::uint64_t id = 1; id <= 2; ++id) {
      const std::vector<Key> keys = {1, 2, 10 + id};
      const std::vector<std::byte> row(kRowBytes, static_cast<std::byte>(id));
      const std::vector<const std::byte*> rows(keys.size(), row.data());
      TERRACE_ASSERT_OK((*store)->Write(keys, rows, {}));
      Checkpoint checkpoint;
      checkpoint.id = id;
      checkpoint.cursor.examples = 100 * id;
      auto manifest = (*store)->Commit(id);
      TERRACE_ASSERT_OK(manifest.status());
      checkpoint.stores = {{"default", 0, kRowBytes, "rows/default/shard-0", "row 1\n", *manifest}};
      auto dense = (*run)->WriteDense(id, {{"value"}, {{1.0f, static_cast<float>(id)}}, id});
      TERRACE_ASSERT_OK(dense.status());
      checkpoint.dense = {*dense};
      checkpoint.metrics_bytes = metrics.size() + 1;
      checkpoint.metrics_checksum = Checksum64(io_testing::Bytes(metrics + "\n"));
      checkpoint.job_yaml = JobToYaml(job_);
      TERRACE_ASSERT_OK((*run)->WriteCheckpoint(checkpoint));
    }
  }
  static std::string At(const std::string& name) { return JoinPath(kRun, name); }

  Result<RunScrub> Scrub() {
    TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<RunFolder> run,
                             RunFolder::Open(&fs_, kRun, RunFolder::Mode::kScrub, nullptr));
    return ScrubRun(&fs_, run.get(), true);
  }
  // Whether a scrub names the file.
  bool Names(const std::string& path) {
    const Result<RunScrub> scrub = Scrub();
    if (!scrub.ok()) return scrub.status().message().find(path) != std::string::npos;
    for (const Finding& finding : scrub->Findings()) {
      if (finding.file == path) return true;
    }
    return false;
  }

  MemoryFileSystem fs_;
  Job job_;
};

TEST_F(RunScrubTest, AWholeRunHasNoFindings) {
  const Result<RunScrub> scrub = Scrub();
  TERRACE_ASSERT_OK(scrub.status());
  EXPECT_TRUE(scrub->Findings().empty()) << scrub->Findings()[0].what;
  EXPECT_EQ(scrub->checkpoints.size(), 2u);
}

// As it was when it was written down: a change of it is one of the format.
TEST_F(RunScrubTest, TheDigestIsTheSameInEveryProgram) {
  const auto reader = RunReader::Open(&fs_, kRun);
  TERRACE_ASSERT_OK(reader.status());
  const Result<std::string> digest = DigestOf(reader->get());
  TERRACE_ASSERT_OK(digest.status());
  EXPECT_EQ(*digest, "62dc661448201ee2e26e9284a5fe6683");
}

TEST_F(RunScrubTest, AFlippedBitInEveryByteOfASmallFileIsNamed) {
  // One checkpoint is enough: each kind of file is there, and rows that it shares with another.
  for (const char* name : {"checkpoints/checkpoint-00000001", "dense/dense-00000001",
                           "rows/default/shard-0/manifest-00000001"}) {
    TERRACE_ASSERT_OK(fs_.Remove(At(name)));
  }
  Rng rng(23);
  int files = 0;
  for (const auto& [path, whole] : Contents(&fs_, kRun)) {
    // Those are for people: they have no check, and no later result depends on them.
    if (path == At("LOCK") || path == At("job.yaml")) continue;
    // Every byte of parameter files is for store_format_test and tests/crash/flip_sweep.
    if (path.find("/rows-") != std::string::npos) continue;
    ++files;
    for (std::size_t i = FirstOfSweep(); i < whole.size(); i += kSweepStride) {
      std::string bad = whole;
      bad[i] = static_cast<char>(bad[i] ^ (1 << rng.Below(8)));
      Replace(&fs_, path, bad);
      ASSERT_TRUE(Names(path)) << path << " byte " << i;
    }
    Replace(&fs_, path, whole);
  }
  EXPECT_EQ(files, 5);  // Marker, checkpoint, dense state, manifest, metrics.
  const Result<RunScrub> scrub = Scrub();
  TERRACE_ASSERT_OK(scrub.status());
  EXPECT_TRUE(scrub->Findings().empty());
}

// A file as a later program would write it.
std::string AsNewer(const std::string& bytes, std::size_t block, std::size_t block_bytes) {
  std::string newer = bytes;
  newer[block + 8] = 9;  // The version's lowest byte.
  const std::uint64_t checksum =
      Checksum64(std::as_bytes(std::span(&newer[block], block_bytes - 8)));
  std::memcpy(&newer[block + block_bytes - 8], &checksum, 8);
  return newer;
}

TEST_F(RunScrubTest, ANewerFileIsRefusedAndNothingIsRepaired) {
  constexpr std::size_t kFrameHeader = 64;
  for (const char* name :
       {"RUN", "checkpoints/checkpoint-00000001", "checkpoints/checkpoint-00000002",
        "dense/dense-00000002", "rows/default/shard-0/manifest-00000002",
        "rows/default/shard-0/rows-0000000001"}) {
    SCOPED_TRACE(name);
    const std::string path = At(name);
    const std::string whole = ReadAll(&fs_, path);
    const bool rows = path.find("rows-") != std::string::npos;
    Replace(&fs_, path,
            rows ? AsNewer(whole, whole.size() - kBlockBytes, kBlockBytes)
                 : AsNewer(whole, 0, kFrameHeader));
    const Result<RunScrub> scrub = Scrub();
    TERRACE_ASSERT_OK(scrub.status());
    EXPECT_EQ(scrub->refused.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(scrub->refused.message(), HasSubstr(path));
    EXPECT_THAT(scrub->refused.message(), HasSubstr("version 9"));
    EXPECT_THAT(scrub->refused.message(), HasSubstr("newer"));
    EXPECT_THAT(scrub->refused.message(), HasSubstr("reads up to"));
    EXPECT_TRUE(Names(path));
    const auto before = Contents(&fs_, kRun);
    const auto repair = RunRepair::Open(&fs_, kRun, {});
    EXPECT_EQ(repair.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(repair.status().message(), HasSubstr("nothing was repaired"));
    EXPECT_EQ(Contents(&fs_, kRun), before);
    Replace(&fs_, path, whole);
  }
}

// Of the version that the line before has with a bit of its digit flipped.
constexpr char kNewerLine[] = R"({"format_version":3,"kind":"interval"})"
                              "\n";

TEST_F(RunScrubTest, ANewerLineOfMetricsThatWasWrittenSoIsRefused) {
  Replace(&fs_, At("metrics.jsonl"), kNewerLine);
  {
    const auto run = RunFolder::Open(&fs_, kRun, RunFolder::Mode::kRepair, nullptr);
    TERRACE_ASSERT_OK(run.status());
    Result<Checkpoint> newest = (*run)->ReadCheckpoint(2);
    TERRACE_ASSERT_OK(newest.status());
    newest->metrics_checksum = Checksum64(io_testing::Bytes(kNewerLine));
    TERRACE_ASSERT_OK((*run)->RewriteCheckpoint(*newest));
  }
  const Result<RunScrub> scrub = Scrub();
  TERRACE_ASSERT_OK(scrub.status());
  EXPECT_EQ(scrub->refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(scrub->refused.message(), HasSubstr(At("metrics.jsonl")));
  EXPECT_THAT(scrub->refused.message(), HasSubstr("format version 3"));
  EXPECT_THAT(scrub->refused.message(), HasSubstr("reads 2"));
}

TEST_F(RunScrubTest, AReportWhoseVersionIsDamagedIsRepaired) {
  const std::string metrics = ReadAll(&fs_, At("metrics.jsonl"));
  Replace(&fs_, At("metrics.jsonl"), kNewerLine);
  Replace(&fs_, At("summary.json"), R"({"format_version": 3})");
  for (const char* name : {"metrics.jsonl", "summary.json"}) EXPECT_TRUE(Names(At(name))) << name;
  auto repair = RunRepair::Open(&fs_, kRun, {});
  TERRACE_ASSERT_OK(repair.status());
  EXPECT_TRUE((*repair)->plan().summary);
  EXPECT_EQ((*repair)->plan().metrics_bytes, metrics.size());
  EXPECT_THAT((*repair)->plan().dropped, testing::IsEmpty());
  EXPECT_EQ((*repair)->plan().successor, 0u);
  for (const Finding& finding : (*repair)->plan().findings) {
    EXPECT_THAT(finding.what, HasSubstr("format version 3"));
  }
  TERRACE_ASSERT_OK((*repair)->Apply());
  repair->reset();
  EXPECT_FALSE(fs_.Stat(At("summary.json")).ok());
  const Result<RunScrub> scrub = Scrub();
  TERRACE_ASSERT_OK(scrub.status());
  TERRACE_EXPECT_OK(scrub->refused);
  EXPECT_TRUE(scrub->Findings().empty()) << scrub->Findings()[0].what;
}

TEST_F(RunScrubTest, ARepairTakesAnotherFigureInALineAsItIs) {
  const std::string before = ReadAll(&fs_, At("metrics.jsonl"));
  std::string after = before;
  after.replace(after.find("interval"), 8, "interVal");
  Replace(&fs_, At("metrics.jsonl"), after);
  auto repair = RunRepair::Open(&fs_, kRun, {});
  TERRACE_ASSERT_OK(repair.status());
  EXPECT_TRUE((*repair)->plan().metrics_accepted);
  EXPECT_EQ((*repair)->plan().metrics_bytes, 0u);
  EXPECT_THAT((*repair)->plan().dropped, testing::IsEmpty());
  EXPECT_EQ((*repair)->plan().successor, 0u);
  TERRACE_ASSERT_OK((*repair)->Apply());
  repair->reset();
  EXPECT_EQ(ReadAll(&fs_, At("metrics.jsonl")), after);
  const Result<RunScrub> scrub = Scrub();
  TERRACE_ASSERT_OK(scrub.status());
  EXPECT_TRUE(scrub->Findings().empty()) << scrub->Findings()[0].what;
  // The older checkpoint, which nobody looks at now, may be gone back to.
  for (const CheckpointScrub& checkpoint : scrub->checkpoints) {
    EXPECT_EQ(checkpoint.checkpoint->metrics_checksum, Checksum64(io_testing::Bytes(after)));
  }
}

TEST_F(RunScrubTest, ARepairAfterAnyDamageOfOneFileIsWhole) {
  Rng rng(5);
  const std::map<std::string, std::string> whole = Contents(&fs_, kRun);
  for (const auto& [path, bytes] : whole) {
    if (path == At("LOCK")) continue;
    for (int way = 0; way < 8; ++way) {
      SCOPED_TRACE(path + " way " + std::to_string(way));
      std::string bad = bytes.substr(0, way == 0 ? rng.Below(bytes.size()) : bytes.size());
      for (int i = 0; way > 1 && i < 3; ++i) {
        std::size_t at = rng.Below(bad.size());
        bad[at] = static_cast<char>(bad[at] ^ 0x55);
      }
      if (way == 1) {
        TERRACE_ASSERT_OK(fs_.Remove(path));
      } else {
        Replace(&fs_, path, bad);
      }
      auto repair = RunRepair::Open(&fs_, kRun, {});
      TERRACE_ASSERT_OK(repair.status());
      TERRACE_ASSERT_OK((*repair)->Apply());
      repair->reset();
      const Result<RunScrub> scrub = Scrub();
      TERRACE_ASSERT_OK(scrub.status());
      EXPECT_TRUE(scrub->Findings().empty()) << scrub->Findings()[0].what;
      TERRACE_ASSERT_OK(RemoveTree(&fs_, kRun));
      for (const auto& [name, content] : whole) {
        TERRACE_ASSERT_OK(fs_.MakeDirectories(name.substr(0, name.rfind('/'))));
        Replace(&fs_, name, content);
      }
    }
  }
}

}  // namespace
}  // namespace terrace
