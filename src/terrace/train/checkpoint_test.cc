#include "terrace/train/checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

using io_testing::ReadAll;
using io_testing::Replace;
using testing::HasSubstr;
using Mode = RunFolder::Mode;

Job SmallJob(const std::string& output) {
  Job job;
  job.output = output;
  return job;
}

Checkpoint SampleCheckpoint(std::uint64_t id) {
  Checkpoint checkpoint;
  checkpoint.id = id;
  checkpoint.cursor.epoch = 1;
  checkpoint.cursor.example_in_epoch = 0xfedcba9876543210ULL;
  checkpoint.cursor.examples = ~std::uint64_t{0};
  checkpoint.cursor.hint_example = 5;
  checkpoint.cursor.file = 6;
  checkpoint.cursor.offset = 7;
  checkpoint.cursor.line = 8;
  checkpoint.cursor.bad_lines = 9;
  checkpoint.steps = 10;
  checkpoint.finished = id % 2 == 1;
  checkpoint.stores = {
      {"default", 0, 64, "rows/default/shard-0", "row 1\n", {id, {100, 0x8000000000000001ULL}}},
      {"ads", 3, 32, "/disk/ads", "row 1\nfield", {id, {200, 0}}}};
  checkpoint.dense = {{300, 0x0123456789abcdefULL}};
  checkpoint.metrics_bytes = 11;
  checkpoint.progressive = std::string("\0\xff binary", 9);
  checkpoint.window = "w";
  checkpoint.trainer_state = "{\"batches\":3}";
  checkpoint.dense_network = "dnn\n";
  checkpoint.identity = {{"seed", "7"}, {"data", "a \"quoted\"\nline"}};
  checkpoint.job_yaml = "seed: 7\n";
  return checkpoint;
}

DenseState SampleDense() { return {{"value", "moment1"}, {{1.0f, -0.0f, 3.5f}, {}}, 12}; }

constexpr AdmissionSpec kAdmission = {3, 4096};

std::unique_ptr<AdmissionFilter> SampleFilter(std::uint32_t keys) {
  auto filter = AdmissionFilter::Create("default", kAdmission).value();
  for (std::uint32_t i = 0; i < keys; ++i) filter->Count(Key{i} << 32, 1 + i % 3);
  return filter;
}

// With the filter that it names.
Checkpoint CheckpointWithFilter(RunFolder* run, std::uint64_t id, std::uint32_t keys) {
  Checkpoint checkpoint = SampleCheckpoint(id);
  Result<FileDigest> digest = run->WriteFilter(id, "default", SampleFilter(keys).get());
  TERRACE_EXPECT_OK(digest);
  checkpoint.admission = {{"default", *digest}};
  return checkpoint;
}

// Writes dense state and checkpoint as the trainer does.
Status Commit(RunFolder* run, std::uint64_t id) {
  Checkpoint checkpoint = SampleCheckpoint(id);
  TERRACE_ASSIGN_OR_RETURN(checkpoint.dense[0], run->WriteDense(id, SampleDense()));
  return run->WriteCheckpoint(checkpoint).status();
}

class RunFolderTest : public testing::Test {
 protected:
  RunFolderTest() { TERRACE_EXPECT_OK(fs_.MakeDirectories("/runs")); }

  Result<std::unique_ptr<RunFolder>> Open(Mode mode) {
    return RunFolder::Open(&fs_, "/runs/a", mode, &job_);
  }
  std::string Error(Mode mode) {
    Result<std::unique_ptr<RunFolder>> run = Open(mode);
    return run.ok() ? "no error" : run.status().ToString();
  }
  // A run with checkpoints 1 and 2, not open any more.
  void MakeRun() {
    Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
    TERRACE_ASSERT_OK(run);
    TERRACE_ASSERT_OK(Commit(run->get(), 1));
    TERRACE_ASSERT_OK(Commit(run->get(), 2));
    TERRACE_ASSERT_OK(fs_.MakeDirectories((*run)->StoreDirectory("default", 0)));
    Replace(&fs_, (*run)->StoreDirectory("default", 0) + "/rows-0000000001", "rows");
    Replace(&fs_, "/runs/a/metrics.jsonl", "{}\n");
  }
  bool Exists(const std::string& path) { return fs_.Stat(path).ok(); }
  // Checkpoint 12 is written as the golden file has it, and what is read back comes into `back`.
  void ExpectGolden(const Checkpoint& checkpoint, const std::string& golden, Checkpoint* back) {
    Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
    TERRACE_ASSERT_OK(run);
    TERRACE_ASSERT_OK((*run)->WriteCheckpoint(checkpoint));
    EXPECT_EQ(ReadAll(FileSystem::Posix(), std::string(TERRACE_TESTDATA) + "/" + golden),
              ReadAll(&fs_, "/runs/a/checkpoints/checkpoint-00000012"));
    Result<Checkpoint> read = (*run)->ReadCheckpoint(12);
    TERRACE_ASSERT_OK(read);
    *back = std::move(*read);
  }

  MemoryFileSystem fs_;
  Job job_ = SmallJob("/runs/a");
};

TEST(CheckpointPayload, ComesBackEqual) {
  Result<std::string> payload = EncodeCheckpoint(SampleCheckpoint(3));
  TERRACE_ASSERT_OK(payload);
  Result<Checkpoint> back = DecodeCheckpoint(*payload);
  TERRACE_ASSERT_OK(back);
  EXPECT_EQ(back->id, 3u);
  EXPECT_EQ(back->cursor, SampleCheckpoint(3).cursor);
  EXPECT_TRUE(back->finished);
  EXPECT_EQ(back->stores[0].manifest.digest.checksum, 0x8000000000000001ULL);
  EXPECT_EQ(back->stores[1].directory, "/disk/ads");
  EXPECT_EQ(back->progressive, SampleCheckpoint(3).progressive);
  EXPECT_EQ(back->identity, SampleCheckpoint(3).identity);
  // Whatever the fields above leave out shows here.
  EXPECT_EQ(*EncodeCheckpoint(*back), *payload);
}

TEST(CheckpointPayload, NoPrefixOfItDecodes) {
  const std::string payload = *EncodeCheckpoint(SampleCheckpoint(3));
  for (std::size_t size = 0; size < payload.size(); ++size) {
    EXPECT_EQ(DecodeCheckpoint(payload.substr(0, size)).status().code(), StatusCode::kCorruption);
  }
  EXPECT_FALSE(DecodeCheckpoint(payload + "x").ok());
}

TEST(CheckpointPayload, ForeignJsonIsRefused) {
  const auto framed = [](const std::string& text) {
    const std::uint64_t size = text.size();
    return std::string(reinterpret_cast<const char*>(&size), 8) + text;
  };
  for (const char* text : {"[]", "{}", "null", "{\"id\": -1}", "{\"id\": \"x\"}", "}"}) {
    EXPECT_EQ(DecodeCheckpoint(framed(text)).status().code(), StatusCode::kCorruption) << text;
  }
}

TEST(DensePayload, ComesBackEqualAndNoPrefixDecodes) {
  const std::string payload = EncodeDense(SampleDense());
  Result<DenseState> back = DecodeDense(payload);
  TERRACE_ASSERT_OK(back);
  EXPECT_EQ(back->names, SampleDense().names);
  EXPECT_EQ(EncodeDense(*back), payload);
  for (std::size_t size = 0; size < payload.size(); ++size) {
    EXPECT_EQ(DecodeDense(payload.substr(0, size)).status().code(), StatusCode::kCorruption);
  }
  std::string huge = payload;
  huge.replace(8, 8, std::string(8, '\xff'));
  EXPECT_FALSE(DecodeDense(huge).ok());
}

TEST_F(RunFolderTest, GoldenFilesAreReadAndWrittenTheSame) {
  TERRACE_ASSERT_OK(Open(Mode::kNew));
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kResume);
  TERRACE_ASSERT_OK(run);
  Checkpoint checkpoint = SampleCheckpoint(12);
  TERRACE_ASSERT_OK((*run)->WriteDense(12, SampleDense()));
  TERRACE_ASSERT_OK((*run)->WriteCheckpoint(checkpoint));
  const std::string testdata = TERRACE_TESTDATA;
  EXPECT_EQ(ReadAll(FileSystem::Posix(), testdata + "/checkpoint_v1.golden"),
            ReadAll(&fs_, "/runs/a/checkpoints/checkpoint-00000012"));
  EXPECT_EQ(ReadAll(FileSystem::Posix(), testdata + "/dense_v1.golden"),
            ReadAll(&fs_, "/runs/a/dense/dense-00000012"));
  // The marker holds the time and an id: it is only read.
  Replace(&fs_, "/runs/a/RUN", ReadAll(FileSystem::Posix(), testdata + "/run_v1.golden"));
  TERRACE_EXPECT_OK(Open(Mode::kRead));
}

TEST_F(RunFolderTest, GoldenFilesOfGroupsAreReadAndWrittenTheSame) {
  Checkpoint checkpoint = SampleCheckpoint(12);
  checkpoint.stores[1].index = IndexKind::kGroup;
  Checkpoint back;
  ASSERT_NO_FATAL_FAILURE(ExpectGolden(checkpoint, "checkpoint_v3.golden", &back));
  EXPECT_EQ(back.stores[0].index, IndexKind::kKey);
  EXPECT_EQ(back.stores[1].index, IndexKind::kGroup);
  EXPECT_EQ(back.stores[1].record_layout().row_bytes, 4072u);
  EXPECT_TRUE(back.admission.empty());
  // No table has rows of that length in groups.
  checkpoint.stores[1].row_bytes = 70'000;
  const Result<std::string> payload = EncodeCheckpoint(checkpoint);
  TERRACE_ASSERT_OK(payload);
  EXPECT_EQ(DecodeCheckpoint(*payload).status().code(), StatusCode::kCorruption);
}

TEST_F(RunFolderTest, GoldenFilesOfCheckedMetricsAreReadAndWrittenTheSame) {
  Checkpoint checkpoint = SampleCheckpoint(12);
  checkpoint.stores[1].index = IndexKind::kGroup;
  checkpoint.metrics_checksum = 0x00fedcba98765432;
  Checkpoint back;
  ASSERT_NO_FATAL_FAILURE(ExpectGolden(checkpoint, "checkpoint_v4.golden", &back));
  EXPECT_EQ(back.metrics_checksum, checkpoint.metrics_checksum);
  EXPECT_EQ(back.stores[1].index, IndexKind::kGroup);
  // Version 4 is not without it.
  std::string payload = *EncodeCheckpoint(checkpoint);
  payload.replace(payload.find("metrics_checksum"), 7, "METRICS");
  EXPECT_EQ(DecodeCheckpoint(payload).status().code(), StatusCode::kCorruption);
}

TEST_F(RunFolderTest, GoldenFilesOfLargeBlocksAreReadAndWrittenTheSame) {
  Checkpoint checkpoint = SampleCheckpoint(12);
  checkpoint.stores[1].index = IndexKind::kGroup;
  checkpoint.stores[1].block_bytes = 16 << 10;
  checkpoint.metrics_checksum = 0x00fedcba98765432;
  Checkpoint back;
  ASSERT_NO_FATAL_FAILURE(ExpectGolden(checkpoint, "checkpoint_v5.golden", &back));
  EXPECT_EQ(back.stores[0].block_bytes, 0u);
  EXPECT_EQ(back.stores[1].block_bytes, 16u << 10);
  EXPECT_EQ(back.stores[1].record_layout().row_bytes, 16360u);
  // No store has such blocks.
  for (const std::uint32_t bytes : {4095u, 4097u, 260u << 10}) {
    checkpoint.stores[1].block_bytes = bytes;
    EXPECT_EQ(DecodeCheckpoint(*EncodeCheckpoint(checkpoint)).status().code(),
              StatusCode::kCorruption);
  }
  checkpoint.stores[1].block_bytes = 4096;
  checkpoint.stores[1].row_bytes = 2000;
  EXPECT_EQ(DecodeCheckpoint(*EncodeCheckpoint(checkpoint)).status().code(),
            StatusCode::kCorruption);
  checkpoint.stores[1].index = IndexKind::kKey;
  EXPECT_EQ(DecodeCheckpoint(*EncodeCheckpoint(checkpoint)).status().code(),
            StatusCode::kCorruption);
}

TEST_F(RunFolderTest, ACheckpointIsNotWrittenAnewUnderItsReader) {
  MakeRun();
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kResume);
  TERRACE_ASSERT_OK(run);
  Checkpoint checkpoint = *(*run)->ReadCheckpoint(2);
  checkpoint.metrics_checksum = 5;
  const Result<std::unique_ptr<RunFolder>> reader = Open(Mode::kRead);
  TERRACE_ASSERT_OK(reader);
  {
    const auto hold = (*reader)->HoldCheckpoint(2);
    TERRACE_ASSERT_OK(hold);
    EXPECT_EQ((*run)->RewriteCheckpoint(checkpoint).code(), StatusCode::kUnavailable);
    EXPECT_EQ((*run)->ReadCheckpoint(2)->metrics_checksum, std::nullopt);
  }
  TERRACE_EXPECT_OK((*run)->RewriteCheckpoint(checkpoint));
  EXPECT_EQ((*run)->ReadCheckpoint(2)->metrics_checksum, 5u);
}

TEST_F(RunFolderTest, GoldenFilesOfAdmissionAreReadAndWrittenTheSame) {
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
  TERRACE_ASSERT_OK(run);
  const Checkpoint checkpoint = CheckpointWithFilter(run->get(), 12, 300);
  TERRACE_ASSERT_OK((*run)->WriteCheckpoint(checkpoint));
  const std::string testdata = TERRACE_TESTDATA;
  EXPECT_EQ(ReadAll(FileSystem::Posix(), testdata + "/checkpoint_v2.golden"),
            ReadAll(&fs_, "/runs/a/checkpoints/checkpoint-00000012"));
  EXPECT_EQ(ReadAll(FileSystem::Posix(), testdata + "/filter_v1.golden"),
            ReadAll(&fs_, "/runs/a/admission/filter-00000012-default"));
  Result<Checkpoint> back = (*run)->ReadCheckpoint(12);
  TERRACE_ASSERT_OK(back);
  const auto filter = AdmissionFilter::Create("default", kAdmission).value();
  TERRACE_ASSERT_OK((*run)->ReadFilter(*back, "default", filter.get()));
  for (std::uint32_t i = 0; i < 300; ++i) {
    EXPECT_TRUE(filter->Admits(Key{i} << 32) || i % 3 != 2) << i;
  }
  EXPECT_EQ((*run)->ReadFilter(*back, "ads", filter.get()).code(), StatusCode::kCorruption);
}

TEST_F(RunFolderTest, EveryByteOfAFilterIsChecked) {
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
  TERRACE_ASSERT_OK(run);
  const Checkpoint checkpoint = CheckpointWithFilter(run->get(), 2, 300);
  const std::string path = "/runs/a/admission/filter-00000002-default";
  const std::string whole = ReadAll(&fs_, path);
  const auto filter = AdmissionFilter::Create("default", kAdmission).value();
  const auto read = [&] { return (*run)->ReadFilter(checkpoint, "default", filter.get()); };
  TERRACE_ASSERT_OK(read());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string broken = whole;
    broken[i] = static_cast<char>(broken[i] ^ (1 << (i % 8)));
    Replace(&fs_, path, broken);
    ASSERT_EQ(read().code(), StatusCode::kCorruption) << "byte " << i;
    ASSERT_THAT(read().message(), HasSubstr(path));
  }
  for (std::size_t size : {std::size_t{0}, std::size_t{63}, whole.size() / 2, whole.size() - 1}) {
    Replace(&fs_, path, whole.substr(0, size));
    EXPECT_EQ(read().code(), StatusCode::kCorruption);
  }
  // A sound one of another checkpoint.
  CheckpointWithFilter(run->get(), 3, 301);
  Replace(&fs_, path, ReadAll(&fs_, "/runs/a/admission/filter-00000003-default"));
  EXPECT_THAT(read().message(), HasSubstr("another file than the one named"));
  TERRACE_ASSERT_OK(fs_.Remove(path));
  EXPECT_EQ(read().code(), StatusCode::kNotFound);
}

TEST_F(RunFolderTest, FiltersGoWithTheirCheckpoint) {
  {
    Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
    TERRACE_ASSERT_OK(run);
    for (std::uint64_t id : {1, 2, 3}) {
      TERRACE_ASSERT_OK((*run)->WriteCheckpoint(CheckpointWithFilter(run->get(), id, 10)));
    }
    CheckpointWithFilter(run->get(), 4, 10);  // Never published.
    TERRACE_ASSERT_OK((*run)->DropCheckpoint(2));
    EXPECT_FALSE(Exists("/runs/a/admission/filter-00000002-default"));
  }
  Replace(&fs_, "/runs/a/admission/filter-00000009-x-y.tmp", "stray");
  Replace(&fs_, "/runs/a/admission/notes", "mine");
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kResume);
  TERRACE_ASSERT_OK(run);
  TERRACE_ASSERT_OK((*run)->RemoveStrays());
  std::vector<std::string> names;
  const Result<std::vector<FileInfo>> files = fs_.List("/runs/a/admission");
  TERRACE_ASSERT_OK(files);
  for (const FileInfo& file : *files) names.push_back(file.name);
  EXPECT_EQ(names, (std::vector<std::string>{"filter-00000001-default", "filter-00000003-default",
                                             "notes"}));
}

TEST_F(RunFolderTest, NewFolderHasMarkerLockAndPlaces) {
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
  TERRACE_ASSERT_OK(run);
  EXPECT_EQ((*run)->StoreDirectory("ads", 3), "/runs/a/rows/ads/shard-3");
  EXPECT_EQ((*run)->RecordedDirectory("ads", 3), "rows/ads/shard-3");
  EXPECT_TRUE(Exists("/runs/a/RUN"));
  EXPECT_EQ(ReadAll(&fs_, "/runs/a/LOCK"), fmt::format("{}\n", getpid()));
  EXPECT_EQ((*run)->ListCheckpoints()->size(), 0u);
}

TEST_F(RunFolderTest, AnExistingRunIsRefusedWithBothWaysOut) {
  MakeRun();
  const std::string error = Error(Mode::kNew);
  EXPECT_THAT(error, HasSubstr("'/runs/a' holds a run already"));
  EXPECT_THAT(error, HasSubstr("--resume"));
  EXPECT_THAT(error, HasSubstr("--overwrite"));
  EXPECT_TRUE(Exists("/runs/a/rows/default/shard-0/rows-0000000001"));
}

TEST_F(RunFolderTest, ForeignFilesAreNeverTouched) {
  TERRACE_ASSERT_OK(fs_.MakeDirectories("/runs/a/photos"));
  Replace(&fs_, "/runs/a/thesis.txt", "mine");
  for (Mode mode : {Mode::kNew, Mode::kResume, Mode::kOverwrite}) {
    EXPECT_THAT(Error(mode), HasSubstr("holds no run but other files (photos, thesis.txt)"));
  }
  EXPECT_EQ(ReadAll(&fs_, "/runs/a/thesis.txt"), "mine");
  EXPECT_FALSE(Exists("/runs/a/LOCK"));
  EXPECT_THAT(Error(Mode::kRead), HasSubstr("holds no run"));
  // A file of that name may be somebody else's.
  Replace(&fs_, "/runs/a/RUN", "mine too");
  for (Mode mode : {Mode::kResume, Mode::kOverwrite}) {
    EXPECT_THAT(Error(mode), HasSubstr("/runs/a/RUN"));
  }
  EXPECT_EQ(ReadAll(&fs_, "/runs/a/RUN"), "mine too");
  EXPECT_EQ(fs_.List("/runs/a")->size(), 3u) << "nothing was added";
}

TEST_F(RunFolderTest, OutputThatIsAFile) {
  Replace(&fs_, "/runs/a", "text");
  for (Mode mode : {Mode::kNew, Mode::kResume, Mode::kOverwrite}) {
    EXPECT_THAT(Error(mode), HasSubstr("output '/runs/a' is a file"));
  }
}

TEST_F(RunFolderTest, ResumeWithoutARunStartsIt) {
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kResume);
  TERRACE_ASSERT_OK(run);
  EXPECT_TRUE((*run)->ListCheckpoints()->empty());
  EXPECT_TRUE(Exists("/runs/a/RUN"));
}

TEST_F(RunFolderTest, ResumeWithoutACheckpointStartsCleanly) {
  {
    Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
    TERRACE_ASSERT_OK(run);
    TERRACE_ASSERT_OK(fs_.MakeDirectories("/runs/a/rows/default/shard-0"));
    Replace(&fs_, "/runs/a/rows/default/shard-0/rows-0000000001", "half a row");
  }
  TERRACE_ASSERT_OK(Open(Mode::kResume));
  EXPECT_FALSE(Exists("/runs/a/rows"));
}

TEST_F(RunFolderTest, ResumeKeepsWhatIsThere) {
  MakeRun();
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kResume);
  TERRACE_ASSERT_OK(run);
  EXPECT_EQ(*(*run)->ListCheckpoints(), (std::vector<std::uint64_t>{1, 2}));
  EXPECT_TRUE(Exists("/runs/a/rows/default/shard-0/rows-0000000001"));
  Result<Checkpoint> checkpoint = (*run)->ReadCheckpoint(2);
  TERRACE_ASSERT_OK(checkpoint);
  Result<DenseState> dense = (*run)->ReadDense(*checkpoint);
  TERRACE_ASSERT_OK(dense);
  EXPECT_EQ(EncodeDense(*dense), EncodeDense(SampleDense()));
}

TEST_F(RunFolderTest, ARunWithBrokenCheckpointsIsNotStartedAnew) {
  MakeRun();
  for (int id : {1, 2})
    Replace(&fs_, fmt::format("/runs/a/checkpoints/checkpoint-0000000{}", id), "");
  EXPECT_THAT(Error(Mode::kResume), HasSubstr("no checkpoint in '/runs/a' can be read"));
  EXPECT_TRUE(Exists("/runs/a/rows/default/shard-0/rows-0000000001"));
}

TEST_F(RunFolderTest, OverwriteDeletesTheRunAndNothingElse) {
  MakeRun();
  Replace(&fs_, "/runs/a/notes.txt", "mine");
  Replace(&fs_, "/runs/a/dense/notes.txt", "mine");
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kOverwrite);
  TERRACE_ASSERT_OK(run);
  EXPECT_TRUE((*run)->ListCheckpoints()->empty());
  EXPECT_FALSE(Exists("/runs/a/rows"));
  EXPECT_EQ(fs_.List("/runs/a/dense")->size(), 1u);
  EXPECT_EQ(ReadAll(&fs_, "/runs/a/dense/notes.txt"), "mine");
  EXPECT_FALSE(Exists("/runs/a/metrics.jsonl"));
  EXPECT_TRUE(Exists("/runs/a/RUN"));
  EXPECT_EQ(ReadAll(&fs_, "/runs/a/notes.txt"), "mine");
}

TEST_F(RunFolderTest, RowsOnSsdPathsFollowTheRun) {
  job_.ssd.paths = {"/ssd0", "/ssd1/"};
  job_.ssd.shards = 3;
  std::string first;
  {
    Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
    TERRACE_ASSERT_OK(run);
    first = (*run)->StoreDirectory("t", 0);
    EXPECT_THAT(first, testing::MatchesRegex("/ssd0/a-[0-9a-f]{16}/t/shard-0"));
    EXPECT_THAT((*run)->StoreDirectory("t", 1), HasSubstr("/ssd1/a-"));
    EXPECT_THAT((*run)->StoreDirectory("t", 2), HasSubstr("/ssd0/a-"));
    EXPECT_EQ((*run)->ResolveDirectory((*run)->RecordedDirectory("t", 0)), first);
    TERRACE_ASSERT_OK(fs_.MakeDirectories(first));
    Replace(&fs_, first + "/rows-0000000001", "rows");
    TERRACE_ASSERT_OK(Commit(run->get(), 1));
  }
  Replace(&fs_, "/ssd0/other.txt", "mine");
  job_.ssd.shards = 2;
  EXPECT_THAT(Error(Mode::kResume), HasSubstr("ssd.shards: the run has 3, the job now says 2"));
  job_.ssd.paths = {"/ssd0"};
  EXPECT_THAT(Error(Mode::kResume), HasSubstr("ssd.paths: the run's rows lie in [/ssd0, /ssd1]"));
  TERRACE_ASSERT_OK(Open(Mode::kOverwrite));
  EXPECT_FALSE(Exists(first + "/rows-0000000001"));
  EXPECT_EQ(fs_.List("/ssd1")->size(), 0u);
  EXPECT_EQ(ReadAll(&fs_, "/ssd0/other.txt"), "mine");
}

TEST_F(RunFolderTest, OverwriteRefusesAnSsdFolderWithoutOurMarker) {
  job_.ssd.paths = {"/ssd0"};
  std::string folder;
  {
    Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
    TERRACE_ASSERT_OK(run);
    folder = "/ssd0/" + fs_.List("/ssd0")->at(0).name;
  }
  TERRACE_ASSERT_OK(fs_.Remove(folder + "/RUN"));
  Replace(&fs_, folder + "/thesis.txt", "mine");
  EXPECT_THAT(Error(Mode::kOverwrite), HasSubstr("does not carry its marker RUN"));
  EXPECT_EQ(ReadAll(&fs_, folder + "/thesis.txt"), "mine");
  EXPECT_TRUE(Exists("/runs/a/RUN"));
}

TEST_F(RunFolderTest, ASecondWriterIsToldWhoHoldsTheRun) {
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kNew);
  TERRACE_ASSERT_OK(run);
  TERRACE_ASSERT_OK(Commit(run->get(), 1));
  for (Mode mode : {Mode::kResume, Mode::kOverwrite}) {
    Result<std::unique_ptr<RunFolder>> second = Open(mode);
    ASSERT_FALSE(second.ok());
    EXPECT_EQ(second.status().code(), StatusCode::kUnavailable);
    EXPECT_THAT(second.status().message(), HasSubstr(fmt::format("process {}", getpid())));
  }
  // A reader needs no lock.
  TERRACE_EXPECT_OK(Open(Mode::kRead));
  run->reset();
  TERRACE_EXPECT_OK(Open(Mode::kResume));
}

TEST_F(RunFolderTest, AReadersHoldKeepsACheckpoint) {
  MakeRun();
  Result<std::unique_ptr<RunFolder>> trainer = Open(Mode::kResume);
  Result<std::unique_ptr<RunFolder>> reader = Open(Mode::kRead);
  TERRACE_ASSERT_OK(trainer);
  TERRACE_ASSERT_OK(reader);
  Result<HeldCheckpoint> held = HoldNewestCheckpoint(reader->get());
  TERRACE_ASSERT_OK(held);
  EXPECT_EQ(held->checkpoint.id, 2u);
  EXPECT_EQ((*trainer)->DropCheckpoint(2).code(), StatusCode::kUnavailable);
  TERRACE_EXPECT_OK((*reader)->ReadDense(held->checkpoint));
  TERRACE_EXPECT_OK((*trainer)->DropCheckpoint(1));
  EXPECT_FALSE(Exists("/runs/a/dense/dense-00000001"));
  held->hold.reset();
  TERRACE_EXPECT_OK((*trainer)->DropCheckpoint(2));
  TERRACE_EXPECT_OK((*trainer)->DropCheckpoint(2));
  EXPECT_EQ(HoldNewestCheckpoint(reader->get()).status().code(), StatusCode::kNotFound);
}

TEST_F(RunFolderTest, EveryByteOfACheckpointIsChecked) {
  MakeRun();
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kRead);
  TERRACE_ASSERT_OK(run);
  const Checkpoint checkpoint = *(*run)->ReadCheckpoint(2);
  for (const std::string name : {"checkpoints/checkpoint-00000002", "dense/dense-00000002"}) {
    const std::string path = "/runs/a/" + name;
    const std::string whole = ReadAll(&fs_, path);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      std::string broken = whole;
      broken[i] = static_cast<char>(broken[i] ^ (1 << (i % 8)));
      Replace(&fs_, path, broken);
      const Status status = name.starts_with("dense") ? (*run)->ReadDense(checkpoint).status()
                                                      : (*run)->ReadCheckpoint(2).status();
      ASSERT_EQ(status.code(), StatusCode::kCorruption) << name << " byte " << i;
      ASSERT_THAT(status.message(), HasSubstr(path));
    }
    for (std::size_t size : {std::size_t{0}, std::size_t{63}, whole.size() / 2, whole.size() - 1}) {
      Replace(&fs_, path, whole.substr(0, size));
      const Status status = name.starts_with("dense") ? (*run)->ReadDense(checkpoint).status()
                                                      : (*run)->ReadCheckpoint(2).status();
      ASSERT_EQ(status.code(), StatusCode::kCorruption);
    }
    if (name.starts_with("checkpoints")) {
      EXPECT_EQ(*(*run)->ListCheckpoints(), std::vector<std::uint64_t>{1});
      EXPECT_EQ(HoldNewestCheckpoint(run->get())->checkpoint.id, 1u);
    }
    Replace(&fs_, path, whole);
  }
  // Another checkpoint under this name.
  Replace(&fs_, "/runs/a/checkpoints/checkpoint-00000002",
          ReadAll(&fs_, "/runs/a/checkpoints/checkpoint-00000001"));
  EXPECT_EQ((*run)->ReadCheckpoint(2).status().code(), StatusCode::kCorruption);
}

TEST_F(RunFolderTest, StraysGoAndNamedFilesStay) {
  MakeRun();
  Replace(&fs_, "/runs/a/dense/dense-00000009", "stray");
  Replace(&fs_, "/runs/a/checkpoints/checkpoint-00000009.tmp", "stray");
  Replace(&fs_, "/runs/a/notes.tmp", "mine");
  Result<std::unique_ptr<RunFolder>> run = Open(Mode::kResume);
  TERRACE_ASSERT_OK(run);
  TERRACE_ASSERT_OK((*run)->RemoveStrays());
  EXPECT_FALSE(Exists("/runs/a/dense/dense-00000009"));
  EXPECT_FALSE(Exists("/runs/a/checkpoints/checkpoint-00000009.tmp"));
  EXPECT_TRUE(Exists("/runs/a/notes.tmp"));
  EXPECT_TRUE(Exists("/runs/a/dense/dense-00000002"));
}

// What a crash at any operation leaves: checkpoint 2 whole, and 3 either whole or absent.
void ExpectSound(FileSystem* fs, const Job& job, bool committed) {
  Result<std::unique_ptr<RunFolder>> run = RunFolder::Open(fs, "/runs/a", Mode::kResume, &job);
  TERRACE_ASSERT_OK(run);
  TERRACE_ASSERT_OK((*run)->RemoveStrays());
  const std::vector<std::uint64_t> ids = *(*run)->ListCheckpoints();
  ASSERT_GE(ids.size(), 1u);
  if (committed) {
    EXPECT_EQ(ids.back(), 3u);
  }
  for (const std::uint64_t id : ids) {
    Result<Checkpoint> checkpoint = (*run)->ReadCheckpoint(id);
    TERRACE_ASSERT_OK(checkpoint);
    TERRACE_EXPECT_OK((*run)->ReadDense(*checkpoint));
  }
  // And the run goes on from there.
  TERRACE_EXPECT_OK(Commit(run->get(), ids.back() + 1));
}

TEST(RunFolderFaults, EveryFailingOperationOfACommitLeavesTheLastCheckpoint) {
  const std::string faults[] = {"error", "enospc", "sync_error", "short_write"};
  for (const std::string& fault : faults) {
    bool failed = true;
    for (int n = 1; failed; ++n) {
      ASSERT_LT(n, 200);
      for (auto policy :
           {MemoryFileSystem::CrashPolicy::kLoseUnsynced, MemoryFileSystem::CrashPolicy::kKeepAll,
            MemoryFileSystem::CrashPolicy::kRandom}) {
        SCOPED_TRACE(fmt::format("{} at operation {}", fault, n));
        MemoryFileSystem memory;
        TERRACE_ASSERT_OK(memory.MakeDirectories("/runs"));
        const Job job = SmallJob("/runs/a");
        FaultyFileSystem faulty(&memory, {});
        Status status;
        {
          Result<std::unique_ptr<RunFolder>> run =
              RunFolder::Open(&faulty, "/runs/a", Mode::kNew, &job);
          TERRACE_ASSERT_OK(run);
          TERRACE_ASSERT_OK(Commit(run->get(), 2));
          Result<std::vector<FaultRule>> rules =
              ParseFaultRules(fmt::format("any:{}:{}", n, fault));
          TERRACE_ASSERT_OK(rules);
          faulty.SetRules(*rules);
          status = Commit(run->get(), 3);
          failed = faulty.faults() > 0;
          faulty.SetRules({});
        }
        memory.Crash(static_cast<std::uint64_t>(n), policy);
        ExpectSound(&memory, job, status.ok());
      }
    }
  }
}

// What a resume reads of the newest checkpoint, on a disk that fails or lies once.
Status ReadAsAResume(FileSystem* fs, const Job& job) {
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<RunFolder> run,
                           RunFolder::Open(fs, "/runs/a", Mode::kResume, &job));
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> ids, run->ListCheckpoints());
  if (ids.empty()) return NotFoundError("every checkpoint was left out");
  EXPECT_EQ(ids.back(), 3u) << "a read that errs once costs no checkpoint";
  TERRACE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, run->ReadCheckpoint(ids.back()));
  TERRACE_ASSIGN_OR_RETURN(const DenseState dense, run->ReadDense(checkpoint));
  EXPECT_EQ(EncodeDense(dense), EncodeDense(SampleDense()));
  Checkpoint expected = SampleCheckpoint(checkpoint.id);
  expected.dense = checkpoint.dense;  // Commit's.
  EXPECT_EQ(*EncodeCheckpoint(checkpoint), *EncodeCheckpoint(expected));
  return run->RemoveStrays();
}

TEST(RunFolderFaults, EveryFailingOperationOfAResumeIsAStatusAndLeavesTheCheckpoints) {
  for (const char* const fault : {"error", "short_read", "flip", "enospc", "sync_error"}) {
    bool failed = true;
    int refused = 0;
    for (int n = 1; failed; ++n) {
      ASSERT_LT(n, 200);
      SCOPED_TRACE(fmt::format("{} at operation {}", fault, n));
      MemoryFileSystem memory;
      TERRACE_ASSERT_OK(memory.MakeDirectories("/runs"));
      const Job job = SmallJob("/runs/a");
      {
        Result<std::unique_ptr<RunFolder>> run =
            RunFolder::Open(&memory, "/runs/a", Mode::kNew, &job);
        TERRACE_ASSERT_OK(run);
        TERRACE_ASSERT_OK(Commit(run->get(), 2));
        TERRACE_ASSERT_OK(Commit(run->get(), 3));
      }
      FaultyFileSystem faulty(&memory, {});
      faulty.SetRules(*ParseFaultRules(fmt::format("any:{}:{}", n, fault)));
      const Status status = ReadAsAResume(&faulty, job);
      failed = faulty.faults() > 0;
      refused += status.ok() ? 0 : 1;
      EXPECT_TRUE(status.ok() || !status.message().empty());
      // LOCK has no checks: a pid that is read wrongly is another's.
      if (std::string_view(fault) == "flip" && status.code() != StatusCode::kUnavailable) {
        TERRACE_EXPECT_OK(status);
      }
      ExpectSound(&memory, job, /*committed=*/true);
    }
    if (std::string_view(fault) == "error") {
      EXPECT_GT(refused, 5);
    }
  }
}

TEST(RunFolderFaults, EveryFailingOperationOfOverwriteLeavesAnErrorOrANewRun) {
  bool failed = true;
  for (int n = 1; failed; ++n) {
    ASSERT_LT(n, 300);
    SCOPED_TRACE(n);
    MemoryFileSystem memory;
    TERRACE_ASSERT_OK(memory.MakeDirectories("/runs"));
    Job job = SmallJob("/runs/a");
    job.ssd.paths = {"/ssd"};
    FaultyFileSystem faulty(&memory, {});
    {
      Result<std::unique_ptr<RunFolder>> run =
          RunFolder::Open(&faulty, "/runs/a", Mode::kNew, &job);
      TERRACE_ASSERT_OK(run);
      TERRACE_ASSERT_OK(Commit(run->get(), 2));
    }
    faulty.SetRules(*ParseFaultRules(fmt::format("any:{}:error", n)));
    const Status status = RunFolder::Open(&faulty, "/runs/a", Mode::kOverwrite, &job).status();
    failed = faulty.faults() > 0;
    memory.Crash(7, MemoryFileSystem::CrashPolicy::kLoseUnsynced);
    // Tried again, it succeeds, whatever the first try left.
    Result<std::unique_ptr<RunFolder>> run =
        RunFolder::Open(&memory, "/runs/a", Mode::kOverwrite, &job);
    TERRACE_ASSERT_OK(run);
    EXPECT_TRUE((*run)->ListCheckpoints()->empty()) << status.ToString();
    EXPECT_EQ(memory.List("/ssd")->size(), 1u);
  }
}

TEST(CompareIdentity, OtherFilesMayBeAccepted) {
  using Settings = std::vector<std::pair<std::string, std::string>>;
  const auto data = [](const std::string& epochs, const std::string& files) {
    return Settings{{"seed", "7"},
                    {"data", "format criteo; epochs " + epochs + "; missing skip; files " + files}};
  };
  const Settings run = data("2", "/logs/a 1.tsv:10 /logs/b:20");
  EXPECT_EQ(FilesOfIdentity(run), 2u);
  EXPECT_FALSE(FilesDiffer(run, run));
  for (const char* files : {"/logs/a 1.tsv:10", "/new/a 1.tsv:10 /logs/b:20",
                            "/logs/a 1.tsv:10 /logs/b:21", "/logs/b:20 /logs/a 1.tsv:10"}) {
    const Settings now = data("2", files);
    EXPECT_TRUE(FilesDiffer(run, now));
    const Status refused = CompareIdentity(run, now, {"threads", "processor"});
    EXPECT_THAT(refused.message(), HasSubstr("data files: the run has '"));
    EXPECT_THAT(refused.message(), HasSubstr("--accept data goes on with the files"));
    EXPECT_THAT(refused.message(), HasSubstr("those of another log"));
    EXPECT_THAT(refused.message(), Not(HasSubstr("rounding")));
    TERRACE_EXPECT_OK(CompareIdentity(run, now, {"data"}));
  }
  // What it says of a long list is what differs.
  EXPECT_THAT(CompareIdentity(run, data("2", "/logs/a 1.tsv:10 /logs/c:20"), {}).message(),
              HasSubstr("the run has '/logs/b:20', the job now '/logs/c:20'"));
  // One that goes on after the other.
  const Settings longer = data("2", "/logs/a 1.tsv:10 /logs/b:20 /logs/b:20");
  EXPECT_THAT(CompareIdentity(run, longer, {}).message(),
              HasSubstr("the run has '(nothing more)', the job now '/logs/b:20'"));
  EXPECT_THAT(CompareIdentity(data("2", "/logs/a 1.tsv:10"), run, {}).message(),
              HasSubstr("the run has '(nothing more)', the job now '/logs/b:20'"));
  EXPECT_THAT(CompareIdentity(run, data("2", "/logs/a 1.tsv:10"), {}).message(),
              HasSubstr("the run has '/logs/b:20', the job now '(nothing more)'"));
  // Nothing else of the data, nor of the rest.
  Settings other = data("3", "/new/a:10");
  EXPECT_THAT(CompareIdentity(run, other, {"data"}).message(), Not(HasSubstr("--accept data")));
  EXPECT_FALSE(CompareIdentity(run, data("3", "/logs/a 1.tsv:10 /logs/b:20"), {"data"}).ok());
  other = data("2", "/new/a:10");
  other[0].second = "8";
  EXPECT_FALSE(CompareIdentity(run, other, {"data"}).ok());
  const Settings generated = {{"seed", "7"}, {"data", "format synthetic; rows 0+10"}};
  EXPECT_FALSE(CompareIdentity(run, generated, {"data"}).ok());
  EXPECT_FALSE(CompareIdentity(generated, run, {"data"}).ok());
  EXPECT_EQ(FilesOfIdentity(generated), 0u);
}

TEST(CompareIdentity, NamesPathsAndBothValues) {
  using Settings = std::vector<std::pair<std::string, std::string>>;
  const Settings run = {{"seed", "7"}, {"training.threads", "2"}, {"data", "files\na\nb\n"}};
  TERRACE_EXPECT_OK(CompareIdentity(run, run, {}));
  Settings now = run;
  now[0].second = "8";
  now[2].second = "files\na\nc\n";
  Status status = CompareIdentity(run, now, {});
  EXPECT_EQ(status.message(),
            "the settings identify another model than the run's:\n"
            "  seed: the run has '7', the job now '8'\n"
            "  data: the run has 'b', the job now 'c'\n"
            "put the old values back, or start anew with --overwrite or another output");
  now = run;
  now[1].second = "1";
  status = CompareIdentity(run, now, {});
  EXPECT_THAT(status.message(), HasSubstr("training.threads: the run has '2', the job now '1'"));
  EXPECT_THAT(status.message(), HasSubstr("--accept threads"));
  TERRACE_EXPECT_OK(CompareIdentity(run, now, {"threads"}));
  EXPECT_FALSE(CompareIdentity(run, now, {"processor"}).ok());
  now = run;
  now.pop_back();
  EXPECT_THAT(CompareIdentity(run, now, {}).message(), HasSubstr("the job now '(nothing)'"));
  EXPECT_FALSE(CompareIdentity(now, run, {}).ok());
}

}  // namespace
}  // namespace terrace
