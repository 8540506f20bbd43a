// What a reader meets besides good lines: each odd input has the result that docs/data.md promises.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/testing/temporary_folder.h"
#include "terrace/base/thread.h"
#include "terrace/data/criteo_parser.h"
#include "terrace/data/example_source.h"
#include "terrace/data/file_list.h"
#include "terrace/data/testing/data_testing.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Lines(int first, int count, char delimiter = '\t') {
  std::string text;
  for (int i = first; i < first + count; ++i) text += CriteoLine(i % 3 == 0, i, delimiter) + "\n";
  return text;
}

std::string Header() {
  std::string header = "Id,Label";
  for (int i = 1; i <= 13; ++i) header.append(",I").append(std::to_string(i));
  for (int i = 1; i <= 26; ++i) header.append(",C").append(std::to_string(i));
  return header;
}

class OddInputTest : public ::testing::Test {
 protected:
  Stream Read(std::vector<std::string> files) {
    options_.files = std::move(files);
    auto source = OpenSource(&fs_, options_);
    if (!source.ok()) {
      Stream stream;
      stream.status = source.status();
      return stream;
    }
    Stream stream = ReadStream(source->get(), 16, {160});
    stats_ = (*source)->stats();
    return stream;
  }
  Status OpenStatus(std::vector<std::string> files) {
    options_.files = std::move(files);
    auto source = OpenSource(&fs_, options_);
    return source.ok() ? OkStatus() : source.status();
  }
  MemoryFileSystem fs_;
  DataOptions options_;
  SourceStats stats_;
};

TEST_F(OddInputTest, CarriageReturnsAndAMissingLastNewlineChangeNothing) {
  std::string text = Lines(0, 5);
  PutFile(&fs_, "/unix", text);
  std::string dos;
  for (const char c : text) dos += c == '\n' ? std::string("\r\n") : std::string(1, c);
  PutFile(&fs_, "/dos", dos);
  PutFile(&fs_, "/cut", text.substr(0, text.size() - 1));
  PutFile(&fs_, "/mark", "\xef\xbb\xbf" + text);
  const Stream unix_lines = Read({"/unix"});
  ASSERT_EQ(unix_lines.examples.size(), 5u);
  for (const char* const path : {"/dos", "/cut", "/mark"})
    EXPECT_TRUE(Read({path}).examples == unix_lines.examples) << path;
}

TEST_F(OddInputTest, AByteOrderMarkAloneIsNoLine) {
  PutFile(&fs_, "/mark", "\xef\xbb\xbf");
  PutFile(&fs_, "/packed", Gzip("\xef\xbb\xbf"));
  PutFile(&fs_, "/log", Lines(0, 5));
  options_.max_bad_fraction = 1;
  const Stream stream = Read({"/mark", "/log", "/packed"});
  ASSERT_TRUE(stream.status.ok()) << stream.status.ToString();
  EXPECT_EQ(stream.examples.size(), 5u);
  EXPECT_EQ(stats_.lines, 5u);
  EXPECT_EQ(stats_.bad_lines, 0u);
  // With a newline behind it, it is a blank one.
  PutFile(&fs_, "/mark", "\xef\xbb\xbf\n");
  EXPECT_EQ(Read({"/mark", "/log"}).examples.size(), 5u);
  EXPECT_EQ(stats_.lines, 6u);
  EXPECT_EQ(stats_.bad_lines, 1u);
}

TEST_F(OddInputTest, HeaderWithIdColumn) {
  std::string text = Header() + "\r\n";
  for (int i = 0; i < 4; ++i)
    text += std::to_string(1000 + i) + "," + CriteoLine(i % 2, i, ',') + "\r\n";
  PutFile(&fs_, "/a", text);
  const Stream stream = Read({"/a"});
  ASSERT_EQ(stream.examples.size(), 4u);
  EXPECT_EQ(stats_.lines, 4u);
  EXPECT_EQ(stream.examples[0].line, 2u);
  PutFile(&fs_, "/b", CriteoLine(1, 3) + "\n");
  EXPECT_EQ(stream.examples[3].keys, Read({"/b"}).examples[0].keys);
  // The order of columns is checked, and told with file and line.
  std::string swapped = text;
  swapped.replace(swapped.find("C7"), 2, "C8");
  PutFile(&fs_, "/c", swapped);
  EXPECT_THAT(OpenStatus({"/c"}).message(),
              AllOf(HasSubstr("/c:1"), HasSubstr("C8"), HasSubstr("C7 belongs")));
}

TEST_F(OddInputTest, FilesWithoutExamples) {
  PutFile(&fs_, "/empty", "");
  PutFile(&fs_, "/header", Header());
  PutFile(&fs_, "/data", Lines(0, 3));
  EXPECT_EQ(Read({"/empty", "/data", "/header", "/data"}).examples.size(), 6u);
  const Status status = OpenStatus({"/empty", "/header"});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("no example in them"));
  PutFile(&fs_, "/empty.gz", Gzip(""));
  PutFile(&fs_, "/empty.zst", Zstd(""));
  EXPECT_EQ(Read({"/empty.gz", "/data", "/empty.zst"}).examples.size(), 3u);
}

TEST_F(OddInputTest, BadLinesAreCountedAndPlacedInTheOrderOfLines) {
  const std::string good = CriteoLine(1, 1) + "\n";
  const std::string nul = std::string("\0\0\0\n", 4);
  const std::string overlong = std::string(kLargestLineBytes + 1, 'a') + "\n";
  PutFile(&fs_, "/a", "\n" + good + "1\t2\n" + nul + good + good);
  PutFile(&fs_, "/b", overlong + good + "\r\n" + "x");
  options_.max_bad_fraction = 1;
  const Stream stream = Read({"/a", "/b"});
  ASSERT_TRUE(stream.status.ok()) << stream.status.ToString();
  std::vector<std::uint32_t> before;
  std::vector<std::uint64_t> lines;
  for (const Example& example : stream.examples) {
    before.push_back(example.bad_before);
    lines.push_back(example.line);
  }
  EXPECT_THAT(before, ElementsAre(1, 2, 0, 1));
  EXPECT_THAT(lines, ElementsAre(2, 5, 6, 2));
  EXPECT_THAT(stream.bad_after_epoch, ElementsAre(2));
  EXPECT_EQ(stats_.lines, 10u);
  EXPECT_EQ(stats_.bad_lines, 6u);
}

TEST_F(OddInputTest, LongestLineIsReadAndOneByteMoreIsBad) {
  // The last category is as long as it takes.
  const std::string start = "1" + std::string(39, '\t');
  for (const std::size_t length : {kLargestLineBytes, kLargestLineBytes + 1}) {
    const std::string line = start + std::string(length - start.size(), 'z');
    PutFile(&fs_, "/a", CriteoLine(0, 1) + "\n" + line + "\n" + CriteoLine(0, 2) + "\n");
    PutFile(&fs_, "/b", CriteoLine(0, 1) + "\n" + line);
    options_.max_bad_fraction = 1;
    const bool fits = length == kLargestLineBytes;
    EXPECT_EQ(Read({"/a"}).examples.size(), fits ? 3u : 2u);
    EXPECT_EQ(stats_.bad_lines, fits ? 0u : 1u);
    EXPECT_EQ(Read({"/b"}).examples.size(), fits ? 2u : 1u);
  }
}

TEST_F(OddInputTest, OnlyBadLinesEndTheEpochWithoutExamples) {
  PutFile(&fs_, "/a", "bad\nworse\n");
  options_.max_bad_fraction = 1;
  options_.epochs = 2;
  const Stream stream = Read({"/a"});
  ASSERT_TRUE(stream.status.ok()) << stream.status.ToString();
  EXPECT_TRUE(stream.examples.empty());
  EXPECT_THAT(stream.bad_after_epoch, ElementsAre(2, 2));
}

TEST_F(OddInputTest, TooManyBadLinesStopTheRun) {
  std::string text = Lines(0, 20);
  for (int i = 0; i < 30; ++i) text += "bad\n";
  text += Lines(20, 2000);
  PutFile(&fs_, "/a", text);
  const Stream stream = Read({"/a"});
  EXPECT_EQ(stream.status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(stream.status.message(),
              AllOf(HasSubstr("30 of 1,000 lines are bad"), HasSubstr("/a:21: column 1 (Label)")));
  options_.max_bad_fraction = 0.03;
  EXPECT_TRUE(Read({"/a"}).status.ok());
  // A short epoch is judged at its end.
  options_.max_bad_fraction = 0.01;
  PutFile(&fs_, "/b", Lines(0, 20) + "bad\n");
  EXPECT_THAT(Read({"/b"}).status.message(), HasSubstr("1 of 21 lines are bad"));
}

TEST_F(OddInputTest, BadFractionIsTheSameAfterResume) {
  std::string text = Lines(0, 600);
  for (int i = 0; i < 30; ++i) text += "bad\n";
  text += Lines(600, 1200);
  PutFile(&fs_, "/a", text);
  options_.files = {"/a"};
  options_.max_bad_fraction = 0.02;
  auto first = OpenSource(&fs_, options_);
  ASSERT_TRUE(first.ok());
  // The check comes at line 1,000, behind 970 good lines.
  auto batch = (*first)->Next(700, 100);
  ASSERT_TRUE(batch.ok()) << batch.status().ToString();
  const DataCursor cursor = (**batch).cursors.back();
  EXPECT_EQ(cursor.bad_lines, 30u);
  batch = (*first)->Next(700, 100);
  ASSERT_TRUE(batch.ok() && batch->has_value()) << batch.status().ToString();
  EXPECT_EQ((**batch).examples, 200u);
  EXPECT_EQ((**batch).cursors.size(), 2u);
  const Status cause = (*first)->Next(700, 100).status();
  EXPECT_THAT(cause.message(), HasSubstr("30 of 1,000 lines are bad"));
  // The error stays.
  EXPECT_EQ((*first)->Next(100, 100).status().message(), cause.message());
  auto second = OpenSource(&fs_, options_);
  ASSERT_TRUE(second.ok());
  ASSERT_TRUE((*second)->Seek(cursor).ok());
  EXPECT_EQ((*(*second)->Next(700, 100))->examples, 200u);
  EXPECT_THAT((*second)->Next(700, 100).status().message(), HasSubstr("30 of 1,000 lines are bad"));
}

TEST_F(OddInputTest, TheFirstBadLineIsNamedIfItWasReadSinceTheResume) {
  const std::string bad = "bad\nbad\nbad\n";
  options_.max_bad_fraction = 0;
  const auto message = [this](const std::string& text, std::uint64_t bad_before) {
    PutFile(&fs_, "/a", text);
    options_.files = {"/a"};
    auto first = OpenSource(&fs_, options_);
    EXPECT_TRUE(first.ok());
    auto batch = (*first)->Next(100, 100);
    EXPECT_TRUE(batch.ok() && batch->has_value()) << batch.status().ToString();
    const DataCursor cursor = (**batch).cursors.back();
    EXPECT_EQ(cursor.bad_lines, bad_before);
    auto second = OpenSource(&fs_, options_);
    EXPECT_TRUE(second.ok() && (*second)->Seek(cursor).ok());
    return ReadStream(second->get(), 100, {100}).status.message();
  };
  EXPECT_THAT(message(Lines(0, 50) + bad + Lines(50, 250), 3),
              AllOf(HasSubstr("3 of 303 lines are bad"),
                    HasSubstr("; all of them lie before the place of the resume. Correct")));
  EXPECT_THAT(message(Lines(0, 50) + bad + Lines(50, 250) + "bad\n", 3),
              AllOf(HasSubstr("4 of 304 lines are bad"),
                    HasSubstr("; the first since the resume: /a:304: column 1")));
  EXPECT_THAT(message(Lines(0, 300) + bad, 0), AllOf(HasSubstr("3 of 303 lines are bad"),
                                                     HasSubstr("; the first: /a:301: column 1")));
}

TEST_F(OddInputTest, NoCriteoTextIsRefusedAtOnce) {
  PutFile(&fs_, "/csv", "user,item,rating\n1,2,3\n");
  const Status status = OpenStatus({"/csv"});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("/csv:1"), HasSubstr("40 columns")));
  // Many bad lines in front of a good one are for the run to judge.
  std::string text;
  for (int i = 0; i < 50; ++i) text += "bad\n";
  PutFile(&fs_, "/late", text + CriteoLine(1, 1, ',') + "\n");
  options_.max_bad_fraction = 0.99;
  EXPECT_EQ(Read({"/late"}).examples.size(), 1u);
}

TEST_F(OddInputTest, GlobsAndPaths) {
  for (const char* const path : {"/logs/d2/b.tsv", "/logs/d2/a.tsv", "/logs/d1/c.tsv",
                                 "/logs/d1/.hidden.tsv", "/logs/d1/c.txt", "/logs/[x].tsv"})
    PutFile(&fs_, path, Lines(0, 1));
  const auto expand = [&](std::vector<std::string> patterns) {
    auto files = ExpandFiles(&fs_, patterns);
    std::vector<std::string> paths;
    if (!files.ok()) return std::vector<std::string>{files.status().ToString()};
    for (const InputFile& file : *files) paths.push_back(file.path);
    return paths;
  };
  EXPECT_THAT(expand({"/logs/*/*.tsv"}),
              ElementsAre("/logs/d1/c.tsv", "/logs/d2/a.tsv", "/logs/d2/b.tsv"));
  EXPECT_THAT(expand({"/logs/d2/b.tsv", "/logs/d?/[ac].tsv", "/logs/d2/b.tsv"}),
              ElementsAre("/logs/d2/b.tsv", "/logs/d1/c.tsv", "/logs/d2/a.tsv", "/logs/d2/b.tsv"));
  EXPECT_THAT(expand({"/logs/[x].tsv"}), ElementsAre("/logs/[x].tsv"));
  EXPECT_THAT(expand({"/logs/d1/.h*"}), ElementsAre("/logs/d1/.hidden.tsv"));
  EXPECT_THAT(expand({"/logs/*.csv"})[0], AllOf(HasSubstr("not found"), HasSubstr("/logs/*.csv")));
  EXPECT_THAT(expand({"/nowhere/*/a"})[0], HasSubstr("no file matches"));
  // What the pattern supposes to be a folder may be a file, in one place or in all.
  PutFile(&fs_, "/other/a/sub/x.tsv", Lines(0, 1));
  PutFile(&fs_, "/other/b/sub", Lines(0, 1));
  EXPECT_THAT(expand({"/other/*/sub/*.tsv"}), ElementsAre("/other/a/sub/x.tsv"));
  EXPECT_THAT(expand({"/other/b/sub/*.tsv"})[0], HasSubstr("no file matches"));
  EXPECT_THAT(expand({"/logs/none.tsv"})[0], HasSubstr("no such file"));
  EXPECT_THAT(expand({"/logs/d1"})[0], HasSubstr("is a folder"));
  EXPECT_THAT(expand({})[0], HasSubstr("no input files"));
}

TEST(FileList, LinksAreFollowedAndDevicesRefused) {
  const TemporaryFolder folder;
  folder.Write("plain.tsv", Lines(0, 1));
  EXPECT_THAT(ExpandFiles(FileSystem::Posix(), {(folder.path() / "plain.tsv/*.tsv").string()})
                  .status()
                  .ToString(),
              HasSubstr("no file matches"));
  folder.Write("store/d1/a.tsv", Lines(0, 1));
  folder.Write("store/b.tsv", Lines(0, 1));
  const std::filesystem::path logs = folder.path() / "logs";
  std::filesystem::create_directories(logs);
  std::filesystem::create_directory_symlink(folder.path() / "store/d1", logs / "day");
  std::filesystem::create_symlink(folder.path() / "store/b.tsv", logs / "b.tsv");
  const auto expand = [&](const std::string& pattern) {
    return ExpandFiles(FileSystem::Posix(), {(logs / pattern).string()});
  };
  for (const char* const pattern : {"*/a.tsv", "day/*", "d*/?.tsv"}) {
    const auto files = expand(pattern);
    ASSERT_TRUE(files.ok()) << files.status().ToString();
    ASSERT_EQ(files->size(), 1u);
    EXPECT_EQ((*files)[0].path, logs / "day/a.tsv");
    EXPECT_EQ((*files)[0].size, Lines(0, 1).size());
  }
  const auto files = expand("*");
  ASSERT_TRUE(files.ok()) << files.status().ToString();
  ASSERT_EQ(files->size(), 1u) << "a link to a folder is none of the files";
  EXPECT_EQ((*files)[0].path, logs / "b.tsv");
  std::filesystem::create_symlink(folder.path() / "gone", logs / "broken.tsv");
  EXPECT_THAT(expand("*.tsv").status().message(), HasSubstr("broken.tsv: no such file"));
  const auto device = ExpandFiles(FileSystem::Posix(), {"/dev/null"});
  EXPECT_EQ(device.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(device.status().message(), HasSubstr("/dev/null is a device or a pipe"));
}

TEST_F(OddInputTest, FilesThatChangeAfterOpening) {
  const std::string text = Lines(0, 5000);
  PutFile(&fs_, "/a", text);
  options_.files = {"/a"};
  auto grown = OpenSource(&fs_, options_);
  auto shrunk = OpenSource(&fs_, options_);
  ASSERT_TRUE(grown.ok() && shrunk.ok());
  PutFile(&fs_, "/a", text + Lines(0, 100));
  EXPECT_EQ(ReadStream(grown->get(), 16, {160}).examples.size(), 5000u);
  PutFile(&fs_, "/a", text.substr(0, text.size() / 2));
  const Stream stream = ReadStream(shrunk->get(), 16, {160});
  EXPECT_EQ(stream.status.code(), StatusCode::kCorruption);
  EXPECT_THAT(stream.status.message(), AllOf(HasSubstr("/a"), HasSubstr("ends at byte")));
}

TEST_F(OddInputTest, SeekBeyondTheDataIsAnError) {
  PutFile(&fs_, "/a", Lines(0, 50));
  PutFile(&fs_, "/z", Zstd(Lines(0, 50)));
  for (const char* const path : {"/a", "/z"}) {
    options_.files = {path};
    DataCursor cursor;
    cursor.example_in_epoch = 60;
    cursor.examples = 60;
    auto source = OpenSource(&fs_, options_);
    ASSERT_TRUE(source.ok());
    ASSERT_TRUE((*source)->Seek(cursor).ok());
    EXPECT_THAT((*source)->Next(10, 10).status().message(), HasSubstr("only 50 examples"));
    cursor.hint_example = 60;
    cursor.offset = 1 << 20;
    source = OpenSource(&fs_, options_);
    ASSERT_TRUE(source.ok());
    ASSERT_TRUE((*source)->Seek(cursor).ok());
    EXPECT_THAT((*source)->Next(10, 10).status().message(), HasSubstr("before byte 1048576"));
    cursor.file = 1;
    source = OpenSource(&fs_, options_);
    ASSERT_TRUE(source.ok());
    EXPECT_EQ((*source)->Seek(cursor).code(), StatusCode::kInvalidArgument);
  }
}

TEST_F(OddInputTest, ReadingToAPositionCanBeStopped) {
  PutFile(&fs_, "/a", Lines(0, 50) + "no example\nnor this\n" + Lines(50, 50));
  options_.files = {"/a"};
  options_.max_bad_fraction = 1;
  DataCursor cursor;
  cursor.example_in_epoch = 60;
  cursor.examples = 60;
  for (const char* const shuffle : {"none", "examples"}) {
    options_.shuffle = shuffle;
    auto source = OpenSource(&fs_, options_);
    ASSERT_TRUE(source.ok());
    ASSERT_TRUE((*source)->Seek(cursor).ok());
    int asked = 0;
    EXPECT_EQ((*source)->ReadToPosition([&asked] { return ++asked > 52; }).code(),
              StatusCode::kAborted);
    EXPECT_EQ(asked, 53);
    source = OpenSource(&fs_, options_);
    ASSERT_TRUE(source.ok());
    ASSERT_TRUE((*source)->Seek(cursor).ok());
    EXPECT_TRUE((*source)->ReadToPosition([] { return false; }).ok());
    EXPECT_TRUE((*source)->Next(10, 10).ok());
  }
}

// Of an archive all that lies before the position is decompressed.
TEST_F(OddInputTest, TheWayThroughAnArchiveCanBeStopped) {
  const std::string text = Lines(0, 60'000);
  options_.read_ahead_bytes = 128 << 10;
  for (const auto& [path, archive] : {std::pair("/z", Zstd(text)), std::pair("/g", Gzip(text))}) {
    SCOPED_TRACE(path);
    PutFile(&fs_, path, archive);
    const Stream all = Read({path});
    ASSERT_EQ(all.examples.size(), 60'000u);
    const DataCursor& cursor = all.cursors[all.cursors.size() * 9 / 10];
    ASSERT_GT(cursor.offset, std::uint64_t{3} << 20);
    std::atomic<int> asked = 0;
    auto source = OpenSource(&fs_, options_);
    ASSERT_TRUE(source.ok());
    ASSERT_TRUE((*source)->Seek(cursor).ok());
    EXPECT_EQ((*source)->ReadToPosition([&asked] { return ++asked > 20; }).code(),
              StatusCode::kAborted);
    EXPECT_EQ(asked.load(), 21);
    EXPECT_EQ((*source)->Next(10, 10).status().code(), StatusCode::kAborted);
    asked = 0;
    source = OpenSource(&fs_, options_);
    ASSERT_TRUE(source.ok());
    ASSERT_TRUE((*source)->Seek(cursor).ok());
    ASSERT_TRUE((*source)->ReadToPosition([&asked] { return ++asked > 1'000'000; }).ok());
    EXPECT_GT(asked.load(), 40);
    auto batch = (*source)->Next(16, 16);
    ASSERT_TRUE(batch.ok());
    Stream rest;
    AppendBatch(**batch, (*source)->schema().dense_width(), &rest);
    EXPECT_EQ(rest.examples.front(), all.examples[cursor.examples]);
  }
}

TEST_F(OddInputTest, OptionsAreCheckedTogether) {
  options_.format = "csv";
  options_.epochs = 0;
  options_.shuffle = "yes";
  options_.shuffle_window = 0;
  options_.integers = "raw";
  options_.missing = "drop";
  options_.max_bad_fraction = 2;
  options_.read_ahead_bytes = 1;
  const Status status = OpenStatus({"/a"});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  for (const char* const name : {"format", "epochs", "shuffle", "shuffle_window", "integers",
                                 "missing", "max_bad_fraction", "read_ahead"})
    EXPECT_THAT(status.message(), HasSubstr(std::string("data.") + name));
}

TEST_F(OddInputTest, ShufflesAreFunctionsOfSeedAndEpoch) {
  for (int i = 0; i < 8; ++i) PutFile(&fs_, "/f" + std::to_string(i), Lines(i * 100, 20));
  options_.epochs = 3;
  options_.shuffle = "files";
  options_.seed = 5;
  const auto files_of = [](const Stream& stream) {
    std::vector<std::uint32_t> order;
    for (const Example& example : stream.examples)
      if (order.empty() || order.back() != example.file) order.push_back(example.file);
    return order;
  };
  const std::vector<std::uint32_t> order = files_of(Read({"/f*"}));
  ASSERT_EQ(order.size(), 24u);
  EXPECT_EQ(order, files_of(Read({"/f*"})));
  EXPECT_EQ(std::set<std::uint32_t>(order.begin(), order.begin() + 8).size(), 8u);
  EXPECT_FALSE(std::equal(order.begin(), order.begin() + 8, order.begin() + 8));
  options_.seed = 6;
  EXPECT_NE(order, files_of(Read({"/f*"})));

  options_.shuffle = "examples";
  options_.shuffle_window = 1000;
  const Stream mixed = Read({"/f*"});
  ASSERT_EQ(mixed.examples.size(), 480u);
  std::set<std::pair<std::uint32_t, std::uint64_t>> places;
  for (std::size_t i = 0; i < 160; ++i)
    places.emplace(mixed.examples[i].file, mixed.examples[i].line);
  EXPECT_EQ(places.size(), 160u);
  EXPECT_GT(files_of(mixed).size(), 100u);
}

TEST_F(OddInputTest, CancelEndsAReadThatWaits) {
  PutFile(&fs_, "/a", Lines(0, 20000));
  options_.files = {"/a"};
  options_.epochs = 1'000'000;  // More than anything reads before the other thread runs.
  auto source = OpenSource(&fs_, options_);
  ASSERT_TRUE(source.ok());
  auto batch = (*source)->Next(16, 16);
  ASSERT_TRUE(batch.ok());
  Thread other("cancel", ThreadPriority::kNormal, [&] { (*source)->Cancel(); });
  Status status;
  while (status.ok()) status = (*source)->Next(16, 16).status();
  other.Join();
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  // Before the first Next too.
  auto early = OpenSource(&fs_, options_);
  ASSERT_TRUE(early.ok());
  (*early)->Cancel();
  EXPECT_EQ((*early)->Next(16, 16).status().code(), StatusCode::kAborted);
}

TEST_F(OddInputTest, TheFirstFiveBadLinesAreShown) {
  std::string text = Lines(0, 3);
  for (int i = 0; i < 9; ++i) text += "bad\n";
  PutFile(&fs_, "/a", text);
  options_.max_bad_fraction = 1;
  ::testing::internal::CaptureStderr();
  const Stream stream = Read({"/a"});
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(stats_.bad_lines, 9u);
  EXPECT_THAT(log, AllOf(HasSubstr("bad line /a:4: column 1 (Label) is not 0 or 1\n"),
                         HasSubstr("/a:8: column 1 (Label) is not 0 or 1; further ones")));
  EXPECT_THAT(log, ::testing::Not(HasSubstr("/a:9")));
}

// Each read, open and stat in turn fails, ends early, or (in archives, which have checks) lies.
TEST_F(OddInputTest, EveryFaultOfTheDiskIsAStatus) {
  const std::string text = Lines(0, 6000);
  PutFile(&fs_, "/log.tsv", text);
  PutFile(&fs_, "/log.gz", Gzip(text));
  PutFile(&fs_, "/log.zst", Zstd(text));
  options_.read_ahead_bytes = 128 << 10;
  const Stream reference = Read({"/log.tsv"});
  ASSERT_EQ(reference.examples.size(), 6000u);
  for (const char* const path : {"/log.tsv", "/log.gz", "/log.zst"}) {
    for (const Fault fault : {Fault::kError, Fault::kShortRead, Fault::kFlippedBit}) {
      if (fault == Fault::kFlippedBit && std::string(path) == "/log.tsv") continue;
      for (std::uint64_t n = 1;; ++n) {
        SCOPED_TRACE(std::string(path) + " " + std::string(FaultName(fault)) + " " +
                     std::to_string(n));
        FaultRule rule;
        rule.fault = fault;
        rule.nth = n;
        rule.seed = n;
        FaultyFileSystem faulty(&fs_, {rule});
        options_.files = {path};
        auto source = OpenSource(&faulty, options_);
        Stream stream;
        if (source.ok()) stream = ReadStream(source->get(), 16, {160});
        const Status status = source.ok() ? stream.status : source.status();
        if (faulty.faults() == 0) {
          ASSERT_GT(n, 4u);
          ASSERT_TRUE(status.ok()) << status.ToString();
          ASSERT_TRUE(stream.examples == reference.examples);
          break;
        }
        if (status.ok()) {
          // A bit of the archive's header that means nothing.
          ASSERT_EQ(fault, Fault::kFlippedBit);
          ASSERT_TRUE(stream.examples == reference.examples);
          continue;
        }
        EXPECT_THAT(status.message(), HasSubstr(path));
        if (fault == Fault::kFlippedBit) continue;
        EXPECT_EQ(status.code(),
                  fault == Fault::kError ? StatusCode::kIo : StatusCode::kCorruption);
        // What came before is right.
        ASSERT_LE(stream.examples.size(), reference.examples.size());
        EXPECT_TRUE(
            std::equal(stream.examples.begin(), stream.examples.end(), reference.examples.begin()));
        EXPECT_EQ(stream.examples.size() % 16, 0u);
      }
    }
  }
}

// From the log mended, what comes after is as if it had never been damaged.
TEST_F(OddInputTest, WholeMinibatchesBeforeTheDamageAreGiven) {
  constexpr std::uint32_t kMinibatch = 16;
  const std::string text = Lines(0, 1000) + "bad\n" + Lines(1000, 500);
  options_.shuffle_window = 100;
  options_.read_ahead_bytes = 128 << 10;  // Of a file that is cut its last chunk is not given.
  for (const char* const shuffle : {"none", "examples"}) {
    options_.shuffle = shuffle;
    for (const bool truncated : {false, true}) {
      SCOPED_TRACE(std::string(shuffle) + (truncated ? " truncated" : " bad lines"));
      options_.files = {"/log"};
      options_.max_bad_fraction = 0.01;
      PutFile(&fs_, "/log", text + Lines(1500, 1500));
      auto whole = OpenSource(&fs_, options_);
      ASSERT_TRUE(whole.ok());
      const Stream reference = ReadStream(whole->get(), kMinibatch, {160});
      ASSERT_TRUE(reference.status.ok());
      std::string bad_lines;
      for (int i = 0; i < 100; ++i) bad_lines += "bad\n";
      if (!truncated) PutFile(&fs_, "/log", text + bad_lines);
      auto damaged = OpenSource(&fs_, options_);
      ASSERT_TRUE(damaged.ok());
      if (truncated) PutFile(&fs_, "/log", text);
      const Stream stream = ReadStream(damaged->get(), kMinibatch, {160});
      EXPECT_EQ(stream.status.code(),
                truncated ? StatusCode::kCorruption : StatusCode::kInvalidArgument);
      EXPECT_EQ((*damaged)->failure().ToString(), stream.status.ToString());
      EXPECT_EQ((*damaged)->stats().examples, stream.examples.size());
      const std::size_t given = stream.examples.size();
      ASSERT_EQ(given % kMinibatch, 0u);
      if (truncated) {
        EXPECT_GT(given, 500u);
      } else {
        // Of windows that with the damage is not there.
        EXPECT_EQ(given, 1500 / kMinibatch * kMinibatch);
      }
      ASSERT_EQ(stream.cursors.size(), given / kMinibatch);
      EXPECT_EQ(stream.cursors.back().example_in_epoch, given);
      PutFile(&fs_, "/log", text + Lines(1500, 1500));
      auto mended = OpenSource(&fs_, options_);
      ASSERT_TRUE(mended.ok() && (*mended)->Seek(stream.cursors.back()).ok());
      const Stream rest = ReadStream(mended->get(), kMinibatch, {160});
      ASSERT_TRUE(rest.status.ok()) << rest.status.ToString();
      std::vector<Example> all = stream.examples;
      all.insert(all.end(), rest.examples.begin(), rest.examples.end());
      ASSERT_EQ(all.size(), reference.examples.size());
      for (std::size_t i = 0; i < all.size(); ++i) {
        all[i].bad_before = reference.examples[i].bad_before;
        ASSERT_TRUE(all[i] == reference.examples[i]) << i;
      }
    }
  }
}

TEST_F(OddInputTest, IdentityNamesFilesAndOrder) {
  PutFile(&fs_, "/a", Lines(0, 3));
  options_.files = {"/a"};
  const auto identity = [&] {
    auto source = OpenSource(&fs_, options_);
    EXPECT_TRUE(source.ok());
    return (*source)->IdentityText();
  };
  const std::string plain = identity();
  EXPECT_THAT(plain, HasSubstr("/a:"));
  options_.seed = 3;
  EXPECT_EQ(identity(), plain);  // Nothing is shuffled.
  options_.max_bad_fraction = 0.5;
  options_.read_ahead_bytes = 1 << 20;
  EXPECT_EQ(identity(), plain);
  options_.shuffle = "files";
  const std::string shuffled = identity();
  EXPECT_NE(shuffled, plain);
  options_.seed = 4;
  EXPECT_NE(identity(), shuffled);
  PutFile(&fs_, "/a", Lines(0, 4));
  options_.shuffle = "none";
  EXPECT_NE(identity(), plain);
}

}  // namespace
}  // namespace terrace
