#include "terrace/data/text_file.h"

#include <gtest/gtest.h>

#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

TEST(TextFile, AppearsWholeOrNotAtAll) {
  MemoryFileSystem fs;
  ASSERT_TRUE(fs.MakeDirectories("/d").ok());
  const auto content = [&] { return ReadFileToString(&fs, "/d/a.txt").value(); };
  for (const std::string text : {"one", "two"}) {
    auto file = TextFile::Create(&fs, "/d/a.txt");
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    ASSERT_TRUE((*file)->Append(text).ok());
    EXPECT_EQ(fs.Stat("/d/a.txt").ok(), text == "two");
    ASSERT_TRUE((*file)->Publish().ok());
    EXPECT_EQ(content(), text);
  }
  auto file = TextFile::Create(&fs, "/d/a.txt");
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Append("three").ok());
  EXPECT_EQ((*file)->GiveUp(AbortedError("enough")).code(), StatusCode::kAborted);
  EXPECT_EQ(content(), "two");
  EXPECT_EQ(fs.List("/d").value().size(), 1u);
  // Durable as soon as it is there.
  fs.Crash(1, MemoryFileSystem::CrashPolicy::kLoseUnsynced);
  EXPECT_EQ(content(), "two");
}

TEST(TextFile, HasOneWriter) {
  MemoryFileSystem fs;
  ASSERT_TRUE(fs.MakeDirectories("/d").ok());
  auto first = TextFile::Create(&fs, "/d/a.txt");
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE((*first)->Append("one").ok());
  const auto second = TextFile::Create(&fs, "/d/a.txt");
  EXPECT_EQ(second.status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(TextFile::Create(&fs, "/d/b.txt").ok());
  ASSERT_TRUE((*first)->Publish().ok());
  EXPECT_EQ(ReadFileToString(&fs, "/d/a.txt").value(), "one");
  first->reset();
  EXPECT_TRUE(TextFile::Create(&fs, "/d/a.txt").ok());
}

TEST(TextFile, IsWrittenWhereNothingCanBeLocked) {
  MemoryFileSystem memory;
  ASSERT_TRUE(memory.MakeDirectories("/d").ok());
  FaultyFileSystem fs(&memory, ParseFaultRules("lock:1+:error").value());
  auto file = TextFile::Create(&fs, "/d/a.txt");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  ASSERT_TRUE((*file)->Append("one").ok());
  ASSERT_TRUE((*file)->Publish().ok());
}

}  // namespace
}  // namespace terrace
