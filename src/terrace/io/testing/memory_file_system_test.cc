#include "terrace/io/testing/memory_file_system.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

using io_testing::Bytes;
using Policy = MemoryFileSystem::CrashPolicy;

constexpr std::size_t kBlock = 4096;

std::unique_ptr<File> MustOpen(FileSystem* fs, const std::string& path, OpenMode mode) {
  return std::move(fs->Open(path, mode)).value();
}

void Append(FileSystem* fs, const std::string& path, std::string_view text, bool sync) {
  auto file = MustOpen(fs, path, OpenMode::kAppend);
  TERRACE_ASSERT_OK(file->WriteAt(0, Bytes(text)));
  if (sync) TERRACE_ASSERT_OK(file->Sync());
}

// What a file holds, or "none".
std::string Content(FileSystem* fs, const std::string& path) {
  auto text = ReadFileToString(fs, path);
  return text.ok() ? *text : "none";
}

TEST(MemoryFileSystemTest, ACrashForgetsWhatWasNotSynced) {
  MemoryFileSystem fs;
  Append(&fs, "kept", "one", true);
  Append(&fs, "empty", "never synced", false);
  TERRACE_ASSERT_OK(fs.SyncDirectory("/"));
  Append(&fs, "kept", " two", false);
  Append(&fs, "no_name", "data", true);
  fs.Crash(1, Policy::kLoseUnsynced);
  EXPECT_EQ(Content(&fs, "kept"), "one");
  EXPECT_EQ(Content(&fs, "empty"), "");
  EXPECT_EQ(Content(&fs, "no_name"), "none");
}

TEST(MemoryFileSystemTest, AKilledProcessLosesNothing) {
  MemoryFileSystem fs;
  TERRACE_ASSERT_OK(fs.MakeDirectories("d"));
  Append(&fs, "d/a", "one", false);
  TERRACE_ASSERT_OK(fs.Rename("d/a", "b"));
  fs.Crash(1, Policy::kKeepAll);
  EXPECT_EQ(Content(&fs, "b"), "one");
  EXPECT_EQ(Content(&fs, "d/a"), "none");
  fs.Crash(1, Policy::kLoseUnsynced);
  EXPECT_EQ(Content(&fs, "b"), "one") << "what a crash left is durable";
}

TEST(MemoryFileSystemTest, AFolderThatIsMadeAnewOutlivesTheRemovalOfTheOldOne) {
  for (const bool synced : {false, true}) {
    MemoryFileSystem fs;
    TERRACE_ASSERT_OK(fs.MakeDirectories("d"));
    TERRACE_ASSERT_OK(fs.RemoveDirectory("d"));
    TERRACE_ASSERT_OK(fs.MakeDirectories("d"));
    if (synced) TERRACE_ASSERT_OK(fs.SyncDirectory("/"));
    fs.Crash(1, synced ? Policy::kLoseUnsynced : Policy::kKeepAll);
    TERRACE_EXPECT_OK(fs.Stat("d").status());
  }
}

TEST(MemoryFileSystemTest, RemovalsAndRenamesNeedASyncOfTheFolder) {
  MemoryFileSystem fs;
  Append(&fs, "a", "a", true);
  Append(&fs, "b", "b", true);
  TERRACE_ASSERT_OK(fs.SyncDirectory("/"));
  TERRACE_ASSERT_OK(fs.Remove("a"));
  TERRACE_ASSERT_OK(fs.Rename("b", "c"));
  fs.Crash(1, Policy::kLoseUnsynced);
  EXPECT_EQ(Content(&fs, "a"), "a");
  EXPECT_EQ(Content(&fs, "b"), "b");
  EXPECT_EQ(Content(&fs, "c"), "none");
  TERRACE_ASSERT_OK(fs.Remove("a"));
  TERRACE_ASSERT_OK(fs.Rename("b", "c"));
  TERRACE_ASSERT_OK(fs.SyncDirectory("/"));
  fs.Crash(2, Policy::kLoseUnsynced);
  EXPECT_EQ(Content(&fs, "a"), "none");
  EXPECT_EQ(Content(&fs, "b"), "none");
  EXPECT_EQ(Content(&fs, "c"), "b");
}

TEST(MemoryFileSystemTest, ARandomCrashKeepsSectorsInAnyCombination) {
  constexpr std::size_t kSector = 512;
  std::set<std::string> seen;
  int torn_blocks = 0, torn_lengths = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    MemoryFileSystem fs;
    Append(&fs, "a", std::string(2 * kBlock, 'o'), true);
    TERRACE_ASSERT_OK(fs.SyncDirectory("/"));
    {
      auto file = MustOpen(&fs, "a", OpenMode::kAppend);
      TERRACE_ASSERT_OK(file->Truncate(0));
      TERRACE_ASSERT_OK(file->WriteAt(0, Bytes(std::string(2 * kBlock, 'n'))));
    }
    fs.Crash(seed, Policy::kRandom);
    const std::string text = Content(&fs, "a");
    if (text.size() == 2 * kBlock) seen.insert({text[0], text[kBlock]});
    ASSERT_EQ(text.size() % kSector, 0u);
    torn_lengths += text.size() % kBlock != 0 ? 1 : 0;
    // Inside a sector all is of one time: zeros are one cut and not yet written again.
    for (std::size_t i = 0; i < text.size(); ++i) {
      ASSERT_EQ(text[i], text[i / kSector * kSector]);
      torn_blocks += i % kBlock != 0 && text[i] != text[i - 1] ? 1 : 0;
    }
  }
  EXPECT_GT(torn_blocks, 20);
  EXPECT_GT(torn_lengths, 20);
  for (const char* both : {"oo", "on", "no", "nn"}) EXPECT_EQ(seen.count(both), 1u) << both;
}

TEST(MemoryFileSystemTest, AFileThatGrowsAfterACrashShowsNoOldBytes) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    MemoryFileSystem fs;
    Append(&fs, "a", "one", true);
    TERRACE_ASSERT_OK(fs.SyncDirectory("/"));
    Append(&fs, "a", "two", false);
    fs.Crash(seed, Policy::kRandom);
    const std::string left = Content(&fs, "a");
    TERRACE_ASSERT_OK(MustOpen(&fs, "a", OpenMode::kAppend)->Truncate(10));
    ASSERT_EQ(Content(&fs, "a"), left + std::string(10 - left.size(), '\0'));
  }
}

TEST(MemoryFileSystemTest, ARandomCrashKeepsNamesInAnyCombination) {
  std::set<std::string> seen;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    MemoryFileSystem fs;
    Append(&fs, "a", "x", true);
    Append(&fs, "b", "x", true);
    fs.Crash(seed, Policy::kRandom);
    std::string names;
    const std::vector<FileInfo> infos = fs.List("/").value();
    for (const FileInfo& info : infos) names += info.name;
    seen.insert(names);
  }
  EXPECT_EQ(seen, (std::set<std::string>{"", "a", "b", "ab"}));
}

TEST(MemoryFileSystemTest, ACrashIsAFunctionOfItsSeed) {
  auto run = [](std::uint64_t seed) {
    MemoryFileSystem fs;
    for (int i = 0; i < 40; ++i) Append(&fs, std::to_string(i % 8), std::string(5000, 'x'), i == 9);
    fs.Crash(seed, Policy::kRandom);
    std::string state;
    const std::vector<FileInfo> infos = fs.List("/").value();
    for (const FileInfo& info : infos) {
      state += info.name + ":" + Content(&fs, info.name) + ";";
    }
    return state;
  };
  EXPECT_EQ(run(4), run(4));
  EXPECT_NE(run(4), run(5));
}

TEST(MemoryFileSystemTest, ACrashEndsFilesAndLocks) {
  MemoryFileSystem fs;
  Append(&fs, "a", "one", true);
  TERRACE_ASSERT_OK(fs.SyncDirectory("/"));
  auto file = MustOpen(&fs, "a", OpenMode::kAppend);
  auto lock = fs.Lock("a", true);
  TERRACE_ASSERT_OK(lock);
  fs.Crash(1, Policy::kLoseUnsynced);
  EXPECT_EQ(file->WriteAt(0, Bytes("x")).code(), StatusCode::kIo);
  EXPECT_EQ(file->Sync().code(), StatusCode::kIo);
  EXPECT_FALSE(file->Size().ok());
  auto again = fs.Lock("a", true);
  TERRACE_ASSERT_OK(again);
  lock->reset();
  EXPECT_EQ(fs.Lock("a", true).status().code(), StatusCode::kUnavailable)
      << "the dead process's lock is not the new one's";
  EXPECT_EQ(Content(&fs, "a"), "one");
}

TEST(MemoryFileSystemTest, AFullDiskSaysSoAndFreesWhatIsRemoved) {
  MemoryFileSystem fs({.capacity_bytes = 4 * kBlock});
  Append(&fs, "a", std::string(3 * kBlock, 'a'), true);
  EXPECT_EQ(fs.Space("/")->free_bytes, kBlock);
  auto file = MustOpen(&fs, "b", OpenMode::kAppend);
  Status status = file->WriteAt(0, Bytes(std::string(2 * kBlock, 'b')));
  EXPECT_EQ(status.code(), StatusCode::kIo);
  EXPECT_NE(status.message().find("No space left"), std::string::npos);
  EXPECT_EQ(file->Sync().code(), StatusCode::kIo);
  EXPECT_EQ(fs.Space("/")->free_bytes, 0u);
  TERRACE_ASSERT_OK(fs.Remove("b"));
  EXPECT_EQ(fs.Space("/")->free_bytes, 0u) << "an open file holds its blocks";
  file.reset();
  EXPECT_EQ(fs.Space("/")->free_bytes, kBlock);
  TERRACE_ASSERT_OK(MustOpen(&fs, "a", OpenMode::kAppend)->Truncate(1));
  EXPECT_EQ(fs.used_bytes(), kBlock);
  fs.Crash(1, Policy::kKeepAll);
  EXPECT_EQ(fs.used_bytes(), kBlock);
}

// The protocol that everything published rests on: at whichever call the machine dies and whatever
// the disk keeps, the file is the old one or the new one.
TEST(MemoryFileSystemTest, AtomicWritesSurviveACrashAtEveryCall) {
  for (std::uint64_t nth = 1;; ++nth) {
    bool finished = false;
    std::set<std::string> seen;
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
      MemoryFileSystem memory;
      TERRACE_ASSERT_OK(WriteFileAtomically(&memory, "d", Bytes("old")));
      FaultRule rule;
      rule.nth = nth;
      rule.from_then_on = true;
      FaultyFileSystem fs(&memory, {rule});
      finished = WriteFileAtomically(&fs, "d", Bytes("new and longer")).ok();
      memory.Crash(seed, Policy::kRandom);
      seen.insert(Content(&memory, "d"));
    }
    if (finished) {
      EXPECT_EQ(seen, std::set<std::string>{"new and longer"});
      EXPECT_GE(nth, 6u) << "remove, open, write, sync, rename, sync of the folder";
      return;
    }
    seen.erase("old");
    seen.erase("new and longer");
    EXPECT_TRUE(seen.empty()) << "call " << nth << " left " << *seen.begin();
  }
}

}  // namespace
}  // namespace terrace
