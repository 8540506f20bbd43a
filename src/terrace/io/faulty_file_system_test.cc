#include "terrace/io/faulty_file_system.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

using io_testing::Bytes;

std::vector<FaultRule> Rules(std::string_view text) {
  auto rules = ParseFaultRules(text);
  EXPECT_TRUE(rules.ok()) << rules.status().ToString();
  return rules.ok() ? *rules : std::vector<FaultRule>();
}

// Touches every call of a file system; the first error.
Status Exercise(FileSystem* fs) {
  TERRACE_RETURN_IF_ERROR(fs->MakeDirectories("d"));
  {
    TERRACE_ASSIGN_OR_RETURN(auto file, fs->Open("d/a", OpenMode::kCreate));
    TERRACE_RETURN_IF_ERROR(file->WriteAt(0, Bytes("0123456789")));
    TERRACE_RETURN_IF_ERROR(file->Truncate(8));
    TERRACE_RETURN_IF_ERROR(file->Sync());
    TERRACE_RETURN_IF_ERROR(file->Size().status());
  }
  TERRACE_RETURN_IF_ERROR(fs->SyncDirectory("d"));
  TERRACE_RETURN_IF_ERROR(fs->Stat("d/a").status());
  TERRACE_RETURN_IF_ERROR(fs->Space("d").status());
  TERRACE_RETURN_IF_ERROR(fs->Lock("d/a", true).status());
  TERRACE_RETURN_IF_ERROR(fs->Rename("d/a", "d/b"));
  TERRACE_ASSIGN_OR_RETURN(auto file, fs->Open("d/b", OpenMode::kRead));
  std::byte bytes[8];
  TERRACE_RETURN_IF_ERROR(ReadFully(file.get(), 0, bytes));
  if (std::memcmp(bytes, "01234567", 8) != 0) return CorruptionError("'d/b' has another byte");
  TERRACE_ASSIGN_OR_RETURN(auto queue, fs->NewReadQueue({}));
  ReadRequest requests[2];
  requests[0] = {file.get(), 0, std::span(bytes).first(4), {}, 0};
  requests[1] = {file.get(), 4, std::span(bytes).last(4), {}, 0};
  TERRACE_RETURN_IF_ERROR(queue->Run(requests));
  if (requests[0].bytes_read + requests[1].bytes_read != 8)
    return CorruptionError("'d/b' is short");
  if (std::memcmp(bytes, "01234567", 8) != 0) return CorruptionError("'d/b' has another byte");
  file.reset();
  return RemoveTree(fs, "d");
}

struct Sweep {
  const char* rule;  // What follows "any:N:".
  int calls;         // That it can meet in Exercise.
};

TEST(FaultyFileSystemTest, EveryCallIsMadeToFailInTurn) {
  for (const Sweep& sweep : {Sweep{"error", 21}, Sweep{"short_read", 3}, Sweep{"short_write", 1},
                             Sweep{"enospc", 6}, Sweep{"sync_error", 2}, Sweep{"flip", 3}}) {
    int failed = 0;
    for (int nth = 1;; ++nth) {
      MemoryFileSystem memory;
      FaultyFileSystem fs(&memory, Rules("any:" + std::to_string(nth) + ":" + sweep.rule));
      Status status = Exercise(&fs);
      if (fs.faults() == 0) {
        TERRACE_EXPECT_OK(status);
        break;
      }
      ++failed;
      EXPECT_EQ(fs.faults(), 1u);
      EXPECT_FALSE(status.ok()) << sweep.rule << " " << nth;
      const bool lies =
          sweep.rule == std::string("flip") || sweep.rule == std::string("short_read");
      EXPECT_EQ(status.code(), lies ? StatusCode::kCorruption : StatusCode::kIo)
          << status.ToString();
      if (sweep.rule == std::string("enospc")) {
        EXPECT_NE(status.message().find("No space left"), std::string::npos);
      }
    }
    EXPECT_EQ(failed, sweep.calls) << sweep.rule;
  }
}

TEST(FaultyFileSystemTest, AFileIsMissingWhereARuleSaysSo) {
  MemoryFileSystem memory;
  TERRACE_ASSERT_OK(WriteFileAtomically(&memory, "one", Bytes("1")));
  FaultyFileSystem fs(&memory, Rules("open:2:missing"));
  EXPECT_TRUE(fs.Open("one", OpenMode::kRead).ok());
  EXPECT_EQ(fs.Open("one", OpenMode::kRead).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(fs.Open("one", OpenMode::kRead).ok());
}

TEST(FaultyFileSystemTest, CountsCallsByKind) {
  MemoryFileSystem memory;
  FaultyFileSystem fs(&memory, {});
  TERRACE_ASSERT_OK(Exercise(&fs));
  EXPECT_EQ(fs.operations(), 21u);
  EXPECT_EQ(fs.operations(FileOperation::kRead), 3u);
  EXPECT_EQ(fs.operations(FileOperation::kOpen), 2u);
  EXPECT_EQ(fs.faults(), 0u);
  fs.SetRules({});
  EXPECT_EQ(fs.operations(), 0u);
}

TEST(FaultyFileSystemTest, OnceOrFromThenOnAndByPath) {
  MemoryFileSystem memory;
  TERRACE_ASSERT_OK(WriteFileAtomically(&memory, "one", Bytes("1")));
  TERRACE_ASSERT_OK(WriteFileAtomically(&memory, "two", Bytes("2")));
  FaultyFileSystem fs(&memory, Rules("stat:2:error"));
  std::vector<bool> ok;
  for (int i = 0; i < 4; ++i) ok.push_back(fs.Stat("one").ok());
  EXPECT_EQ(ok, (std::vector<bool>{true, false, true, true}));
  fs.SetRules(Rules("stat:2+:error:tw"));
  ok.clear();
  for (int i = 0; i < 3; ++i) {
    ok.push_back(fs.Stat("one").ok());
    ok.push_back(fs.Stat("two").ok());
  }
  EXPECT_EQ(ok, (std::vector<bool>{true, true, true, false, true, false}));
  fs.SetRules(Rules("stat:1:error;list:1:error"));
  EXPECT_FALSE(fs.Stat("one").ok());
  EXPECT_FALSE(fs.List("/").ok());
  EXPECT_EQ(fs.faults(), 2u);
}

TEST(FaultyFileSystemTest, AFailedSyncHoldsAndMakesNothingDurable) {
  MemoryFileSystem memory;
  FaultyFileSystem fs(&memory, Rules("sync:1:sync_error"));
  auto file = fs.Open("a", OpenMode::kCreate);
  TERRACE_ASSERT_OK(file);
  TERRACE_ASSERT_OK((*file)->WriteAt(0, Bytes("data")));
  TERRACE_ASSERT_OK(fs.SyncDirectory("/"));
  EXPECT_EQ((*file)->Sync().code(), StatusCode::kIo);
  EXPECT_EQ((*file)->Sync().code(), StatusCode::kIo);
  EXPECT_EQ((*file)->WriteAt(0, Bytes("more")).code(), StatusCode::kIo);
  EXPECT_EQ(fs.faults(), 1u);
  memory.Crash(1, MemoryFileSystem::CrashPolicy::kLoseUnsynced);
  EXPECT_EQ(*ReadFileToString(&memory, "a"), "");
}

TEST(FaultyFileSystemTest, ShortWritesLeaveHalf) {
  for (const char* fault : {"short_write", "enospc"}) {
    MemoryFileSystem memory;
    FaultyFileSystem fs(&memory, Rules(std::string("write:1:") + fault));
    {
      auto file = fs.Open("a", OpenMode::kCreate);
      TERRACE_ASSERT_OK(file);
      EXPECT_EQ((*file)->WriteAt(0, Bytes("01234567")).code(), StatusCode::kIo);
    }
    EXPECT_EQ(*ReadFileToString(&memory, "a"), "0123");
  }
}

TEST(FaultyFileSystemTest, FlipsOneBit) {
  MemoryFileSystem memory;
  const std::string text(64, 'x');
  TERRACE_ASSERT_OK(WriteFileAtomically(&memory, "a", Bytes(text)));
  FaultyFileSystem fs(&memory, Rules("read:1+:flip"));
  std::string last;
  for (int i = 0; i < 20; ++i) {
    auto read = ReadFileToString(&fs, "a");
    TERRACE_ASSERT_OK(read);
    int bits = 0;
    for (std::size_t j = 0; j < text.size(); ++j) {
      bits += std::popcount(static_cast<unsigned char>((*read)[j] ^ text[j]));
    }
    EXPECT_EQ(bits, 1);
    EXPECT_NE(*read, last);
    last = *read;
  }
}

TEST(FaultyFileSystemTest, ByRateAsTheSeedSays) {
  auto run = [](std::string_view spec) {
    MemoryFileSystem memory;
    EXPECT_TRUE(WriteFileAtomically(&memory, "a", Bytes("1")).ok());
    FaultyFileSystem fs(&memory, Rules(spec));
    std::string outcomes;
    for (int i = 0; i < 1000; ++i) outcomes += fs.Stat("a").ok() ? '.' : 'x';
    return outcomes;
  };
  const std::string once = run("seed=5,rate=0.1");
  EXPECT_EQ(once, run("seed=5,rate=0.1"));
  EXPECT_NE(once, run("seed=6,rate=0.1"));
  const auto failed = std::count(once.begin(), once.end(), 'x');
  EXPECT_GT(failed, 60);
  EXPECT_LT(failed, 150);
  EXPECT_EQ(run("seed=5,rate=0"), std::string(1000, '.'));
  EXPECT_EQ(run("rate=1"), std::string(1000, 'x'));
  EXPECT_EQ(run("rate=1,op=read"), std::string(1000, '.'));
  EXPECT_EQ(run("rate=1,path=b"), std::string(1000, '.'));
  EXPECT_EQ(run("rate=1,fault=flip"), std::string(1000, '.'));
}

TEST(FaultRulesTest, WhatIsNoRuleIsNamed) {
  for (const char* text :
       {"", "write", "write:1", "write:0:error", "write:x:error", "write:-1:error", "write:1:fire",
        "fly:1:error", "seed=x,rate=0.1", "rate=2", "rate=nan", "rate=-1", "speed=1", "rate=0.1,",
        "op=fly,rate=0.1", "write:1:error;", "write:1++:error"}) {
    auto rules = ParseFaultRules(text);
    EXPECT_EQ(rules.status().code(), StatusCode::kInvalidArgument) << text;
    MemoryFileSystem memory;
    EXPECT_FALSE(MakeFaultyFileSystem(&memory, text).ok());
  }
  EXPECT_NE(ParseFaultRules("write:1:fire").status().message().find("'fire'"), std::string::npos);
  auto rules = Rules("write:17:enospc;any:2+:eio:a:b=c;seed=5,rate=0.001");
  ASSERT_EQ(rules.size(), 3u);
  EXPECT_EQ(rules[0].operation, FileOperation::kWrite);
  EXPECT_EQ(rules[0].nth, 17u);
  EXPECT_EQ(rules[0].fault, Fault::kNoSpace);
  EXPECT_EQ(rules[1].operation, std::nullopt);
  EXPECT_TRUE(rules[1].from_then_on);
  EXPECT_EQ(rules[1].path_contains, "a:b=c");
  EXPECT_EQ(rules[2].fault, std::nullopt);
  EXPECT_EQ(rules[2].seed, 5u);
  EXPECT_EQ(rules[2].rate, 0.001);
  for (int i = 0; i < kFileOperations; ++i) {
    auto operation = static_cast<FileOperation>(i);
    auto parsed = Rules(std::string(FileOperationName(operation)) + ":1:error");
    ASSERT_EQ(parsed.size(), 1u);
    EXPECT_EQ(parsed[0].operation, operation);
  }
}

}  // namespace
}  // namespace terrace
