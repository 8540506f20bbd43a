// Whose the rows on ssd.paths are: of the run folder that made them, not of its copies.
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/run_marker.h"

namespace terrace {
namespace {

using io_testing::ReadAll;
using io_testing::Replace;
using testing::HasSubstr;
using Mode = RunFolder::Mode;

// As cp -r, without the lock that a process may hold.
void CopyTree(FileSystem* fs, const std::string& from, const std::string& to) {
  TERRACE_ASSERT_OK(fs->MakeDirectories(to));
  const Result<std::vector<FileInfo>> entries = fs->List(from);
  TERRACE_ASSERT_OK(entries);
  for (const FileInfo& entry : *entries) {
    const std::string source = JoinPath(from, entry.name), target = JoinPath(to, entry.name);
    if (entry.is_directory) {
      CopyTree(fs, source, target);
    } else {
      Replace(fs, target, ReadAll(fs, source));
    }
  }
}

RunMarker SampleMarker() {
  RunMarker marker;
  marker.created_micros = 1795188484053302;
  marker.id = NewRunId("/runs/a", marker.created_micros, 4242);
  marker.shards = 2;
  marker.ssd_paths = {"/ssd0", "/ssd1"};
  for (const std::string& path : marker.ssd_paths) {
    marker.ssd_folders.push_back(JoinPath(path, "a-" + marker.id));
  }
  marker.run_folder = "/runs/a";
  return marker;
}

// A run in /runs/a with two disks of rows and one checkpoint.
class RunOwnerTest : public testing::Test {
 protected:
  RunOwnerTest() {
    job_.ssd.paths = {"/ssd0", "/ssd1"};
    job_.ssd.shards = 2;
    const Result<std::unique_ptr<RunFolder>> run = Open("/runs/a", Mode::kNew);
    TERRACE_EXPECT_OK(run);
    for (std::uint32_t shard : {0, 1}) {
      rows_.push_back((*run)->StoreDirectory("t", shard));
      TERRACE_EXPECT_OK(fs_.MakeDirectories(rows_.back()));
      Replace(&fs_, rows_.back() + "/rows-0000000001", "rows");
    }
    Checkpoint checkpoint;
    checkpoint.id = 1;
    TERRACE_EXPECT_OK((*run)->WriteCheckpoint(checkpoint));
  }

  Result<std::unique_ptr<RunFolder>> Open(const std::string& path, Mode mode) {
    job_.output = path;
    return RunFolder::Open(&fs_, path, mode, &job_);
  }
  std::string Error(const std::string& path, Mode mode) {
    const Result<std::unique_ptr<RunFolder>> run = Open(path, mode);
    if (run.ok()) return "no error";
    EXPECT_EQ(run.status().code(), StatusCode::kInvalidArgument);
    return run.status().message();
  }
  void Move(const std::string& from, const std::string& to) {
    CopyTree(&fs_, from, to);
    TERRACE_ASSERT_OK(RemoveTree(&fs_, from));
  }
  // The folder of the run on one of its disks.
  std::string Disk(int disk) {
    return rows_[static_cast<std::size_t>(disk)].substr(
        0, rows_[static_cast<std::size_t>(disk)].rfind("/t/"));
  }
  bool RowsAreThere() {
    return fs_.Stat(rows_[0] + "/rows-0000000001").ok() &&
           fs_.Stat(rows_[1] + "/rows-0000000001").ok();
  }
  // What a program of before wrote: markers that do not say whose the rows are.
  void ForgetOwner(const std::string& run) {
    for (const std::string& folder : {run, Disk(0), Disk(1)}) {
      Result<RunMarker> marker = ReadRunMarker(&fs_, folder);
      TERRACE_ASSERT_OK(marker);
      marker->run_folder.clear();
      TERRACE_ASSERT_OK(WriteRunMarker(&fs_, folder, *marker));
    }
  }

  MemoryFileSystem fs_;
  Job job_;
  std::vector<std::string> rows_;
};

TEST_F(RunOwnerTest, ACopyTouchesNoRowsOfTheRun) {
  CopyTree(&fs_, "/runs/a", "/runs/b");
  for (const Mode mode : {Mode::kOverwrite, Mode::kResume, Mode::kRepair}) {
    const std::string error = Error("/runs/b", mode);
    EXPECT_THAT(error, HasSubstr("'/runs/b' is a copy of the run folder '/runs/a'"));
    EXPECT_THAT(error, HasSubstr(Disk(0)));
    EXPECT_THAT(error, HasSubstr("name another output"));
    EXPECT_TRUE(RowsAreThere());
    EXPECT_TRUE(fs_.Stat("/runs/b/checkpoints/checkpoint-00000001").ok());
  }
  EXPECT_THAT(Error("/runs/b", Mode::kNew), HasSubstr("holds a run already"));
  // Readers may read it.
  TERRACE_EXPECT_OK(Open("/runs/b", Mode::kRead));
  TERRACE_EXPECT_OK(Open("/runs/b", Mode::kScrub));
  // The run itself goes on, and is deleted with its rows.
  TERRACE_EXPECT_OK(Open("/runs/a", Mode::kResume));
  TERRACE_EXPECT_OK(Open("/runs/a", Mode::kOverwrite));
  EXPECT_FALSE(fs_.Stat(rows_[0] + "/rows-0000000001").ok());
}

TEST_F(RunOwnerTest, ACopyWithoutCheckpointsIsNoMoreTheOwner) {
  CopyTree(&fs_, "/runs/a", "/runs/b");
  TERRACE_ASSERT_OK(RemoveTree(&fs_, "/runs/b/checkpoints"));
  EXPECT_THAT(Error("/runs/b", Mode::kResume), HasSubstr("is a copy"));
  EXPECT_TRUE(RowsAreThere());
}

TEST_F(RunOwnerTest, AMovedRunGoesOnAndItsRowsWithIt) {
  Move("/runs/a", "/moved/b");
  TERRACE_ASSERT_OK(Open("/moved/b", Mode::kResume));
  for (const std::string& folder : {std::string("/moved/b"), Disk(0), Disk(1)}) {
    EXPECT_EQ(ReadRunMarker(&fs_, folder)->run_folder, "/moved/b");
  }
  // What is copied from now on is a copy of that one, and what lay at the old place too.
  CopyTree(&fs_, "/moved/b", "/runs/a");
  for (const Mode mode : {Mode::kOverwrite, Mode::kResume}) {
    EXPECT_THAT(Error("/runs/a", mode), HasSubstr("is a copy of the run folder '/moved/b'"));
  }
  TERRACE_ASSERT_OK(Open("/moved/b", Mode::kResume));
  EXPECT_TRUE(RowsAreThere());
}

TEST_F(RunOwnerTest, ACopyOfBeforeTheMoveIsToldByTheDisks) {
  CopyTree(&fs_, "/runs/a", "/copy");
  Move("/runs/a", "/runs/b");
  TERRACE_ASSERT_OK(Open("/runs/b", Mode::kResume));
  EXPECT_THAT(Error("/copy", Mode::kResume), HasSubstr("is a copy of the run folder '/runs/b'"));
  EXPECT_TRUE(RowsAreThere());
}

TEST_F(RunOwnerTest, AMovedRunIsOverwrittenThoughAnotherBeganAtItsOldPlace) {
  Move("/runs/a", "/runs/b");
  TERRACE_ASSERT_OK(Open("/runs/a", Mode::kNew));
  TERRACE_ASSERT_OK(Open("/runs/b", Mode::kOverwrite));
  EXPECT_FALSE(fs_.Stat(rows_[0]).ok());
  EXPECT_EQ(fs_.List("/ssd0")->size(), 2u);  // The new run's, and the other's.
}

TEST_F(RunOwnerTest, WhetherTheOwnerIsThereMustBeKnown) {
  CopyTree(&fs_, "/runs/a", "/runs/b");
  Replace(&fs_, "/runs/a/RUN", "damaged");
  const Result<std::unique_ptr<RunFolder>> run = Open("/runs/b", Mode::kOverwrite);
  EXPECT_EQ(run.status().code(), StatusCode::kCorruption);
  EXPECT_THAT(run.status().message(), HasSubstr("belong to the run folder '/runs/a'"));
  EXPECT_TRUE(RowsAreThere());
}

TEST_F(RunOwnerTest, RunsOfVersion1TellTheirPlaceByTheirId) {
  ForgetOwner("/runs/a");
  CopyTree(&fs_, "/runs/a", "/runs/b");
  for (const Mode mode : {Mode::kOverwrite, Mode::kResume, Mode::kRepair}) {
    EXPECT_THAT(Error("/runs/b", mode), HasSubstr("the run '/runs/b' did not begin there"));
    EXPECT_TRUE(RowsAreThere());
  }
  TERRACE_ASSERT_OK(Open("/runs/a", Mode::kResume));
  EXPECT_EQ(ReadRunMarker(&fs_, Disk(1))->run_folder, "/runs/a");
  EXPECT_THAT(Error("/runs/b", Mode::kResume), HasSubstr("is a copy of the run folder '/runs/a'"));
  ForgetOwner("/runs/a");
  TERRACE_ASSERT_OK(Open("/runs/a", Mode::kOverwrite));
  EXPECT_FALSE(RowsAreThere());
}

TEST_F(RunOwnerTest, ALostMarkerOfACopyIsNotRestored) {
  CopyTree(&fs_, "/runs/a", "/runs/b");
  Replace(&fs_, "/runs/b/RUN", "damaged");
  const std::string marker = ReadAll(&fs_, Disk(0) + "/RUN");
  const Result<std::unique_ptr<RunFolder>> copy = Open("/runs/b", Mode::kRepair);
  TERRACE_ASSERT_OK(copy);
  Checkpoint checkpoint;
  checkpoint.stores = {{"t", 0, 64, rows_[0], "", {}}, {"t", 1, 64, rows_[1], "", {}}};
  const Status restored = (*copy)->RestoreMarkers(checkpoint, job_);
  EXPECT_THAT(restored.message(), HasSubstr("is a copy of the run folder '/runs/a'"));
  EXPECT_EQ(ReadAll(&fs_, "/runs/b/RUN"), "damaged");
  EXPECT_EQ(ReadAll(&fs_, Disk(0) + "/RUN"), marker);
}

TEST(RunOwner, OneFolderByTwoPathsIsNoCopy) {
  const char* const temporary = std::getenv("TMPDIR");
  std::string root = std::string(temporary == nullptr ? "/tmp" : temporary) + "/run_owner_XXXXXX";
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  FileSystem* const fs = FileSystem::Posix();
  TERRACE_ASSERT_OK(fs->MakeDirectories(root + "/place"));
  ASSERT_EQ(symlink((root + "/place").c_str(), (root + "/link").c_str()), 0);
  Job job;
  job.ssd.paths = {root + "/ssd"};
  const auto open = [&](const std::string& path, Mode mode) {
    job.output = path;
    return RunFolder::Open(fs, path, mode, &job);
  };
  {
    const Result<std::unique_ptr<RunFolder>> run = open(root + "/link/a", Mode::kNew);
    TERRACE_ASSERT_OK(run);
    TERRACE_ASSERT_OK((*run)->WriteCheckpoint(Checkpoint()));
  }
  TERRACE_EXPECT_OK(open(root + "/place/a", Mode::kResume));
  CopyTree(fs, root + "/place/a", root + "/place/b");
  EXPECT_THAT(open(root + "/link/b", Mode::kOverwrite).status().message(), HasSubstr("is a copy"));
  // Nor is another folder the run because a link leads there now.
  CopyTree(fs, root + "/place", root + "/elsewhere");
  ASSERT_EQ(unlink((root + "/link").c_str()), 0);
  ASSERT_EQ(symlink((root + "/elsewhere").c_str(), (root + "/link").c_str()), 0);
  EXPECT_THAT(open(root + "/link/a", Mode::kOverwrite).status().message(),
              HasSubstr("is a copy of the run folder '" + root + "/place/a'"));
  TERRACE_EXPECT_OK(open(root + "/place/a", Mode::kOverwrite));
  TERRACE_EXPECT_OK(RemoveTree(fs, root + "/place"));
  TERRACE_EXPECT_OK(RemoveTree(fs, root + "/elsewhere"));
  ASSERT_EQ(unlink((root + "/link").c_str()), 0);
  TERRACE_EXPECT_OK(RemoveTree(fs, root));
}

TEST(RunMarkerFormat, GoldenFilesAreReadAndWrittenTheSame) {
  MemoryFileSystem fs;
  RunMarker marker = SampleMarker();
  TERRACE_ASSERT_OK(WriteRunMarker(&fs, "/", marker));
  const std::string testdata = TERRACE_TESTDATA;
  EXPECT_EQ(ReadAll(&fs, "/RUN"), ReadAll(FileSystem::Posix(), testdata + "/run_v2.golden"));
  EXPECT_EQ(ReadRunMarker(&fs, "/")->run_folder, "/runs/a");
  EXPECT_TRUE(BeganIn(marker, "/runs/a"));
  EXPECT_FALSE(BeganIn(marker, "/runs/b"));
  // Without one that rows elsewhere belong to, as version 1.
  Replace(&fs, "/RUN", ReadAll(FileSystem::Posix(), testdata + "/run_v1.golden"));
  const Result<RunMarker> first = ReadRunMarker(&fs, "/");
  TERRACE_ASSERT_OK(first);
  EXPECT_EQ(first->run_folder, "");
  TERRACE_ASSERT_OK(WriteRunMarker(&fs, "/", *first));
  EXPECT_EQ(ReadAll(&fs, "/RUN"), ReadAll(FileSystem::Posix(), testdata + "/run_v1.golden"));
}

}  // namespace
}  // namespace terrace
