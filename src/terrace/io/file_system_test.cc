// One body over the posix file system, buffered and direct, and the one in memory.
#include "terrace/io/file_system.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/testing/temporary_folder.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

using io_testing::Bytes;
using io_testing::Fill;
using io_testing::FirstWrong;

struct Variant {
  const char* name;
  bool memory;
  OpenMode create;
  OpenMode read;
};

class FileSystemTest : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    if (GetParam().memory) {
      memory_ = std::make_unique<MemoryFileSystem>();
      fs_ = memory_.get();
      root_ = "/test";
      TERRACE_ASSERT_OK(fs_->MakeDirectories(root_));
      return;
    }
    fs_ = FileSystem::Posix();
    // In the working folder, that is, the build: /tmp may be a tmpfs, which knows no direct I/O.
    std::string name = "io_test.XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override {
    if (fs_ != nullptr && !root_.empty()) TERRACE_EXPECT_OK(RemoveTree(fs_, root_));
  }

  std::string Path(std::string_view name) { return JoinPath(root_, name); }

  // A file of `blocks` of 4 KiB, synced.
  void MakeFile(const std::string& path, std::uint64_t seed, std::size_t blocks) {
    auto file = fs_->Open(path, GetParam().create);
    TERRACE_ASSERT_OK(file);
    auto buffer = HugeBuffer::Allocate(blocks * kDirectIoAlignment);
    TERRACE_ASSERT_OK(buffer);
    auto data = buffer->span().first(blocks * kDirectIoAlignment);
    Fill(seed, 0, data);
    TERRACE_ASSERT_OK((*file)->WriteAt(0, data));
    TERRACE_ASSERT_OK((*file)->Sync());
  }

  void Append(const std::string& path, std::string_view text) {
    auto file = fs_->Open(path, OpenMode::kAppend);
    TERRACE_ASSERT_OK(file);
    TERRACE_ASSERT_OK((*file)->WriteAt(0, Bytes(text)));
  }

  std::unique_ptr<MemoryFileSystem> memory_;
  FileSystem* fs_ = nullptr;
  std::string root_;
};

TEST_P(FileSystemTest, AnOverwrittenFileKeepsItsLength) {
  const bool direct = IsDirect(GetParam().create);
  const OpenMode mode = direct ? OpenMode::kOverwriteDirect : OpenMode::kOverwrite;
  EXPECT_EQ(fs_->Open(Path("a"), mode).status().code(), StatusCode::kNotFound);
  MakeFile(Path("a"), 1, 4);
  auto buffer = HugeBuffer::Allocate(4 * kDirectIoAlignment);
  TERRACE_ASSERT_OK(buffer);
  const auto first = buffer->span().first(kDirectIoAlignment);
  {
    auto file = fs_->Open(Path("a"), mode);
    TERRACE_ASSERT_OK(file);
    Fill(2, 0, first);
    TERRACE_ASSERT_OK((*file)->WriteAt(0, first));
    EXPECT_EQ(*(*file)->Size(), 4 * kDirectIoAlignment);
    TERRACE_ASSERT_OK((*file)->Truncate(2 * kDirectIoAlignment));
    TERRACE_ASSERT_OK((*file)->Sync());
  }
  auto file = fs_->Open(Path("a"), GetParam().read);
  TERRACE_ASSERT_OK(file);
  const auto both = buffer->span().first(2 * kDirectIoAlignment);
  TERRACE_ASSERT_OK(ReadFully(file->get(), 0, both));
  EXPECT_EQ(*(*file)->Size(), 2 * kDirectIoAlignment);
  EXPECT_EQ(FirstWrong(2, 0, first), kDirectIoAlignment);
  EXPECT_EQ(FirstWrong(1, kDirectIoAlignment, both.subspan(kDirectIoAlignment)),
            kDirectIoAlignment);
}

TEST_P(FileSystemTest, ReadsBackWhatWasWritten) {
  MakeFile(Path("a"), 1, 9);
  auto file = fs_->Open(Path("a"), GetParam().read);
  TERRACE_ASSERT_OK(file);
  EXPECT_EQ((*file)->path(), Path("a"));
  EXPECT_EQ(*(*file)->Size(), 9 * kDirectIoAlignment);
  auto buffer = HugeBuffer::Allocate(4 * kDirectIoAlignment);
  TERRACE_ASSERT_OK(buffer);
  EXPECT_EQ(*(*file)->ReadAt(8192, buffer->span()), 4 * kDirectIoAlignment);
  EXPECT_EQ(FirstWrong(1, 8192, buffer->span()), buffer->size());
}

TEST_P(FileSystemTest, ShortReadsOnlyAtTheEnd) {
  MakeFile(Path("a"), 1, 3);
  Append(Path("a"), "tail");
  auto file = fs_->Open(Path("a"), GetParam().read);
  TERRACE_ASSERT_OK(file);
  auto buffer = HugeBuffer::Allocate(4 * kDirectIoAlignment);
  TERRACE_ASSERT_OK(buffer);
  EXPECT_EQ(*(*file)->ReadAt(0, buffer->span()), 3 * kDirectIoAlignment + 4);
  EXPECT_EQ(std::memcmp(buffer->data() + 3 * kDirectIoAlignment, "tail", 4), 0);
  EXPECT_EQ(*(*file)->ReadAt(3 * kDirectIoAlignment, buffer->span()), 4u);
  EXPECT_EQ(*(*file)->ReadAt(4 * kDirectIoAlignment, buffer->span()), 0u);
  EXPECT_EQ(*(*file)->ReadAt(0, {}), 0u);
  Status status = ReadFully(file->get(), 0, buffer->span());
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_NE(status.message().find(Path("a")), std::string::npos) << status.message();
}

TEST_P(FileSystemTest, CreateRefusesWhatExistsAndOpenWhatDoesNot) {
  auto missing = fs_->Open(Path("a"), GetParam().read);
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_NE(missing.status().message().find(Path("a")), std::string::npos);
  EXPECT_EQ(fs_->Open(Path("no/a"), GetParam().create).status().code(), StatusCode::kNotFound);
  MakeFile(Path("a"), 1, 1);
  auto again = fs_->Open(Path("a"), GetParam().create);
  EXPECT_EQ(again.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(again.status().message().find(Path("a")), std::string::npos);
  EXPECT_EQ(fs_->Stat(Path("a"))->size, kDirectIoAlignment);
}

TEST_P(FileSystemTest, AppendGoesToTheEnd) {
  Append(Path("log"), "one ");
  Append(Path("log"), "two ");
  Append(Path("log"), "three");
  EXPECT_EQ(*ReadFileToString(fs_, Path("log")), "one two three");
}

TEST_P(FileSystemTest, TruncateCutsAndGrowsWithZeros) {
  Append(Path("a"), "0123456789");
  auto file = fs_->Open(Path("a"), OpenMode::kAppend);
  TERRACE_ASSERT_OK(file);
  TERRACE_ASSERT_OK((*file)->Truncate(4));
  EXPECT_EQ(*(*file)->Size(), 4u);
  TERRACE_ASSERT_OK((*file)->Truncate(6));
  EXPECT_EQ(*ReadFileToString(fs_, Path("a")), std::string("0123\0\0", 6));
  TERRACE_ASSERT_OK((*file)->Truncate(0));
  EXPECT_EQ(*ReadFileToString(fs_, Path("a")), "");
}

TEST_P(FileSystemTest, HolesReadAsZeros) {
  {
    auto file = fs_->Open(Path("a"), OpenMode::kCreate);
    TERRACE_ASSERT_OK(file);
    TERRACE_ASSERT_OK((*file)->WriteAt(100'000, Bytes("end")));
  }
  auto text = ReadFileToString(fs_, Path("a"));
  TERRACE_ASSERT_OK(text);
  EXPECT_EQ(*text, std::string(100'000, '\0') + "end");
  auto info = fs_->Stat(Path("a"));
  EXPECT_EQ(info->size, 100'003u);
  EXPECT_LT(info->disk_bytes, info->size);
}

TEST_P(FileSystemTest, RenameReplacesInOneStep) {
  Append(Path("old"), "old");
  Append(Path("new"), "new");
  auto reader = fs_->Open(Path("old"), OpenMode::kRead);
  TERRACE_ASSERT_OK(reader);
  TERRACE_ASSERT_OK(fs_->Rename(Path("new"), Path("old")));
  EXPECT_EQ(*ReadFileToString(fs_, Path("old")), "new");
  EXPECT_EQ(fs_->Stat(Path("new")).status().code(), StatusCode::kNotFound);
  std::byte buffer[3];
  TERRACE_ASSERT_OK(ReadFully(reader->get(), 0, buffer));
  EXPECT_EQ(std::memcmp(buffer, "old", 3), 0) << "an open file outlives its name";
  EXPECT_EQ(fs_->Rename(Path("new"), Path("x")).code(), StatusCode::kNotFound);
}

TEST_P(FileSystemTest, RenameMovesFoldersWhole) {
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("d/e")));
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("full/x")));
  Append(Path("d/e/f"), "text");
  EXPECT_FALSE(fs_->Rename(Path("d"), Path("d/e/d")).ok());
  EXPECT_FALSE(fs_->Rename(Path("d"), Path("full")).ok());
  EXPECT_FALSE(fs_->Rename(Path("d"), Path("d/e/f")).ok());
  EXPECT_FALSE(fs_->Rename(Path("d/e/f"), Path("full")).ok());
  TERRACE_ASSERT_OK(fs_->Rename(Path("d"), Path("full/x")));
  EXPECT_EQ(*ReadFileToString(fs_, Path("full/x/e/f")), "text");
  EXPECT_EQ(fs_->Stat(Path("d")).status().code(), StatusCode::kNotFound);
}

TEST_P(FileSystemTest, RemoveTakesFilesAndEmptyFolders) {
  EXPECT_EQ(fs_->Remove(Path("a")).code(), StatusCode::kNotFound);
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("d/e")));
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("d/e/")));
  Append(Path("d/e/f"), "x");
  EXPECT_FALSE(fs_->Remove(Path("d")).ok());
  EXPECT_FALSE(fs_->RemoveDirectory(Path("d/e")).ok());
  EXPECT_FALSE(fs_->RemoveDirectory(Path("d/e/f")).ok());
  EXPECT_FALSE(fs_->MakeDirectories(Path("d/e/f")).ok());
  EXPECT_FALSE(fs_->MakeDirectories(Path("d/e/f/g")).ok());
  TERRACE_ASSERT_OK(fs_->Remove(Path("d/e/f")));
  TERRACE_ASSERT_OK(fs_->RemoveDirectory(Path("d/e")));
  EXPECT_TRUE(fs_->List(Path("d"))->empty());
  EXPECT_EQ(fs_->RemoveDirectory(Path("d/e")).code(), StatusCode::kNotFound);
}

TEST_P(FileSystemTest, ListTellsNamesInOrderAndSizes) {
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("d")));
  MakeFile(Path("b"), 1, 2);
  Append(Path("a"), "12345");
  auto infos = fs_->List(root_);
  TERRACE_ASSERT_OK(infos);
  ASSERT_EQ(infos->size(), 3u);
  EXPECT_EQ((*infos)[0].name, "a");
  EXPECT_EQ((*infos)[0].size, 5u);
  EXPECT_FALSE((*infos)[0].is_directory);
  EXPECT_EQ((*infos)[1].name, "b");
  EXPECT_EQ((*infos)[1].disk_bytes, 2 * kDirectIoAlignment);
  EXPECT_EQ((*infos)[2].name, "d");
  EXPECT_TRUE((*infos)[2].is_directory);
  auto stat = fs_->Stat(Path("d/"));
  TERRACE_ASSERT_OK(stat);
  EXPECT_EQ(stat->name, "d");
  EXPECT_GT(stat->modified_micros, 1'500'000'000'000'000);
  EXPECT_EQ(fs_->List(Path("none")).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(fs_->List(Path("a")).ok());
}

TEST_P(FileSystemTest, ChecksFolders) {
  TERRACE_ASSERT_OK(fs_->Open(Path("file"), OpenMode::kCreate).status());
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("folder")));
  TERRACE_EXPECT_OK(fs_->CheckFolder(Path("folder")));
  for (const char* name : {"file", "none"}) {
    EXPECT_EQ(fs_->CheckFolder(Path(name)).code(), StatusCode::kNotFound) << name;
  }
}

TEST_P(FileSystemTest, LocksExcludeEachOther) {
  Append(Path("lock"), "");
  EXPECT_EQ(fs_->Lock(Path("none"), true).status().code(), StatusCode::kNotFound);
  auto held = fs_->Lock(Path("lock"), true);
  TERRACE_ASSERT_OK(held);
  EXPECT_EQ(fs_->Lock(Path("lock"), true).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(fs_->Lock(Path("lock"), false).status().code(), StatusCode::kUnavailable);
  held->reset();
  auto one = fs_->Lock(Path("lock"), false);
  auto two = fs_->Lock(Path("lock"), false);
  TERRACE_ASSERT_OK(one);
  TERRACE_ASSERT_OK(two);
  EXPECT_EQ(fs_->Lock(Path("lock"), true).status().code(), StatusCode::kUnavailable);
  one->reset();
  two->reset();
  TERRACE_EXPECT_OK(fs_->Lock(Path("lock"), true));
}

TEST_P(FileSystemTest, SpaceTellsOfTheDisk) {
  auto space = fs_->Space(root_);
  TERRACE_ASSERT_OK(space);
  EXPECT_GT(space->free_bytes, 0u);
  EXPECT_GE(space->capacity_bytes, space->free_bytes);
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("below")));
  EXPECT_EQ(fs_->Space(Path("below"))->device, space->device);
  EXPECT_EQ(fs_->Space(Path("none")).status().code(), StatusCode::kNotFound);
}

TEST_P(FileSystemTest, DiskIdentityIsOfThePlace) {
  auto identity = fs_->DiskIdentity(root_);
  TERRACE_ASSERT_OK(identity);
  if (identity->empty()) return;  // In memory.
  auto again = fs_->DiskIdentity(root_ + "/.");
  TERRACE_ASSERT_OK(again);
  EXPECT_EQ(*identity, *again);
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("other")));
  auto other = fs_->DiskIdentity(Path("other"));
  TERRACE_ASSERT_OK(other);
  EXPECT_NE(*identity, *other);
  EXPECT_EQ(fs_->DiskIdentity(Path("none")).status().code(), StatusCode::kNotFound);
}

TEST_P(FileSystemTest, AFailedWritePoisonsTheFileUntilReopened) {
  MakeFile(Path("a"), 1, 1);
  auto file = fs_->Open(Path("a"), OpenMode::kRead);
  TERRACE_ASSERT_OK(file);
  Status first = (*file)->WriteAt(0, Bytes("x"));
  EXPECT_EQ(first.code(), StatusCode::kIo);
  EXPECT_NE(first.message().find(Path("a")), std::string::npos);
  Status sync = (*file)->Sync();
  EXPECT_EQ(sync.code(), StatusCode::kIo);
  EXPECT_NE(sync.message().find(first.message()), std::string::npos) << sync.message();
  EXPECT_FALSE((*file)->Truncate(0).ok());
  auto buffer = HugeBuffer::Allocate(kDirectIoAlignment);
  TERRACE_ASSERT_OK(buffer);
  TERRACE_EXPECT_OK(ReadFully(file->get(), 0, buffer->span()));
  TERRACE_EXPECT_OK((*fs_->Open(Path("a"), OpenMode::kAppend))->Sync());
}

TEST_P(FileSystemTest, WriteFileAtomicallyReplacesAndCleansUp) {
  Append(Path("f.tmp"), "left by a crash");
  TERRACE_ASSERT_OK(WriteFileAtomically(fs_, Path("f"), Bytes("one")));
  TERRACE_ASSERT_OK(WriteFileAtomically(fs_, Path("f"), Bytes("second")));
  EXPECT_EQ(*ReadFileToString(fs_, Path("f")), "second");
  TERRACE_ASSERT_OK(WriteFileAtomically(fs_, Path("empty"), {}));
  EXPECT_EQ(*ReadFileToString(fs_, Path("empty")), "");
  EXPECT_EQ(fs_->List(root_)->size(), 2u);
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("folder/full")));
  EXPECT_FALSE(WriteFileAtomically(fs_, Path("folder"), Bytes("x")).ok());
  EXPECT_EQ(fs_->Stat(Path("folder.tmp")).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(ReadFileToString(fs_, Path("none")).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(ReadFileToString(fs_, Path("folder")).ok());
}

TEST_P(FileSystemTest, RemoveTreeTakesAllOfIt) {
  TERRACE_ASSERT_OK(fs_->MakeDirectories(Path("d/e/f")));
  Append(Path("d/1"), "x");
  Append(Path("d/e/2"), "x");
  Append(Path("d/e/f/3"), "x");
  TERRACE_ASSERT_OK(RemoveTree(fs_, Path("d")));
  EXPECT_TRUE(fs_->List(root_)->empty());
  TERRACE_EXPECT_OK(RemoveTree(fs_, Path("d")));
}

// Random writes, cuts and reads against a string.
TEST_P(FileSystemTest, BehavesAsAString) {
  const std::uint64_t seed = 20;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Rng rng(seed);
  const bool aligned = GetParam().read == OpenMode::kReadDirect;
  auto file = fs_->Open(Path("a"), GetParam().create);
  TERRACE_ASSERT_OK(file);
  auto buffer = HugeBuffer::Allocate(16 * kDirectIoAlignment);
  TERRACE_ASSERT_OK(buffer);
  const std::size_t unit = aligned ? kDirectIoAlignment : 1;
  const std::size_t most = buffer->size() / unit;
  std::string model;
  for (int step = 0; step < 500; ++step) {
    const std::size_t offset = rng.Below(3 * most) * unit;
    const std::size_t size = rng.Below(most + 1) * unit;
    const auto part = buffer->span().first(size);
    switch (rng.Below(8)) {
      case 0:
        TERRACE_ASSERT_OK((*file)->Truncate(offset));
        model.resize(offset);
        break;
      case 1:
      case 2:
      case 3:
        Fill(static_cast<std::uint64_t>(step), 0, part);
        TERRACE_ASSERT_OK((*file)->WriteAt(offset, part));
        if (size > 0) model.resize(std::max(model.size(), offset + size));
        if (size > 0) std::memcpy(model.data() + offset, part.data(), size);
        break;
      default: {
        auto n = (*file)->ReadAt(offset, part);
        TERRACE_ASSERT_OK(n);
        const std::size_t expected =
            offset >= model.size() ? 0 : std::min(size, model.size() - offset);
        ASSERT_EQ(*n, expected) << "step " << step;
        if (expected > 0) {
          ASSERT_EQ(std::memcmp(part.data(), model.data() + offset, expected), 0)
              << "step " << step;
        }
      }
    }
    ASSERT_EQ(*(*file)->Size(), model.size());
  }
}

const Variant kVariants[] = {
    {"posix_buffered", false, OpenMode::kCreate, OpenMode::kRead},
    {"posix_direct", false, OpenMode::kCreateDirect, OpenMode::kReadDirect},
    {"memory", true, OpenMode::kCreate, OpenMode::kRead},
    {"memory_direct", true, OpenMode::kCreateDirect, OpenMode::kReadDirect},
};
INSTANTIATE_TEST_SUITE_P(All, FileSystemTest, testing::ValuesIn(kVariants),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

TEST(PosixFileSystemTest, ALockIsOfTheFileThatHasTheName) {
  TemporaryFolder folder;
  FileSystem* const fs = FileSystem::Posix();
  const std::string path = folder.path() / "lock", other = folder.path() / "other";
  for (const std::string& name : {path, other}) {
    TERRACE_ASSERT_OK(fs->Open(name, OpenMode::kCreate).status());
  }
  SyncPoint::Arm([&](std::string_view point) {
    if (point == "file.lock.opened") TERRACE_EXPECT_OK(fs->Rename(other, path));
  });
  const auto replaced = fs->Lock(path, /*exclusive=*/false);
  SyncPoint::Arm(nullptr);
  EXPECT_EQ(replaced.status().code(), StatusCode::kNotFound) << replaced.status().ToString();
  TERRACE_EXPECT_OK(fs->Lock(path, /*exclusive=*/true).status());
  SyncPoint::Arm([&](std::string_view point) {
    if (point == "file.lock.opened") TERRACE_EXPECT_OK(fs->Remove(path));
  });
  EXPECT_EQ(fs->Lock(path, /*exclusive=*/true).status().code(), StatusCode::kNotFound);
  SyncPoint::Arm(nullptr);
}

TEST(PosixFileSystemTest, LocksHoldBetweenProcessesAndEndWithTheirs) {
  FileSystem* fs = FileSystem::Posix();
  std::string root = "io_test.XXXXXX";
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  const std::string path = JoinPath(root, "lock");
  TERRACE_ASSERT_OK(WriteFileAtomically(fs, path, {}));
  int ready[2];
  int go[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(go), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(go[1]);
    auto lock = fs->Lock(path, true);
    const char told = lock.ok() ? 'y' : 'n';
    (void)!write(ready[1], &told, 1);
    char byte;
    (void)!read(go[0], &byte, 1);  // Until the parent closes its end.
    _Exit(0);                      // Without destructors, as a killed process.
  }
  char told = 0;
  ASSERT_EQ(read(ready[0], &told, 1), 1);
  EXPECT_EQ(told, 'y');
  EXPECT_EQ(fs->Lock(path, true).status().code(), StatusCode::kUnavailable);
  for (int fd : {go[0], go[1], ready[0], ready[1]}) close(fd);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  TERRACE_EXPECT_OK(fs->Lock(path, true));
  TERRACE_EXPECT_OK(RemoveTree(fs, root));
}

TEST(PosixFileSystemTest, RemoveTreeDoesNotFollowLinks) {
  FileSystem* fs = FileSystem::Posix();
  std::string root = "io_test.XXXXXX";
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  TERRACE_ASSERT_OK(fs->MakeDirectories(JoinPath(root, "kept")));
  TERRACE_ASSERT_OK(fs->MakeDirectories(JoinPath(root, "gone")));
  TERRACE_ASSERT_OK(WriteFileAtomically(fs, JoinPath(root, "kept/file"), Bytes("x")));
  ASSERT_EQ(symlink("../kept", JoinPath(root, "gone/link").c_str()), 0);
  ASSERT_EQ(symlink("nowhere", JoinPath(root, "gone/broken").c_str()), 0);
  EXPECT_EQ(fs->List(JoinPath(root, "gone"))->size(), 2u);
  TERRACE_ASSERT_OK(RemoveTree(fs, JoinPath(root, "gone")));
  // Nor one that is the whole tree.
  ASSERT_EQ(symlink("kept", JoinPath(root, "link").c_str()), 0);
  EXPECT_TRUE(*IsLinkToFolder(fs, JoinPath(root, "link")));
  EXPECT_TRUE(*IsLinkToFolder(fs, JoinPath(root, "link/")));
  EXPECT_FALSE(*IsLinkToFolder(fs, JoinPath(root, "kept")));
  EXPECT_FALSE(*IsLinkToFolder(fs, JoinPath(root, "kept/file")));
  EXPECT_FALSE(*IsLinkToFolder(fs, JoinPath(root, "nothing")));
  TERRACE_ASSERT_OK(RemoveTree(fs, JoinPath(root, "link")));
  EXPECT_EQ(*ReadFileToString(fs, JoinPath(root, "kept/file")), "x");
  TERRACE_EXPECT_OK(RemoveTree(fs, root));
}

TEST(FileHelpersTest, JoinPathPutsOneSlash) {
  EXPECT_EQ(JoinPath("a", "b"), "a/b");
  EXPECT_EQ(JoinPath("a/", "b"), "a/b");
  EXPECT_EQ(JoinPath("", "b"), "b");
  EXPECT_EQ(JoinPath("/", "b"), "/b");
  EXPECT_EQ(JoinPath("a", "/b"), "/b");
}

}  // namespace
}  // namespace terrace
