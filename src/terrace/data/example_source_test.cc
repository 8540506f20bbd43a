// The stream of examples, over files in memory: the same for every batch size, compression and
// stop.
#include "terrace/data/example_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/data/testing/data_testing.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Lines(int first, int count, char delimiter = '\t') {
  std::string text;
  for (int i = first; i < first + count; ++i) text += CriteoLine(i % 3 == 0, i, delimiter) + "\n";
  return text;
}

DataOptions Options(std::vector<std::string> files) {
  DataOptions options;
  options.files = std::move(files);
  return options;
}

std::unique_ptr<ExampleSource> Open(FileSystem* fs, const DataOptions& options) {
  auto source = OpenSource(fs, options);
  EXPECT_TRUE(source.ok()) << source.status().ToString();
  return source.ok() ? std::move(*source) : nullptr;
}

Stream ReadAll(FileSystem* fs, const DataOptions& options) {
  auto source = Open(fs, options);
  if (source == nullptr) return {};
  return ReadStream(source.get(), 16, {64});
}

template <typename T>
std::vector<T> From(const std::vector<T>& values, std::uint64_t first) {
  return {values.begin() + static_cast<std::ptrdiff_t>(first), values.end()};
}

TEST(ExampleSourceTest, AnyBatchSizesAndAnyStopGiveTheSameStream) {
  const std::uint64_t seed = ::testing::UnitTest::GetInstance()->random_seed();
  RecordProperty("seed", static_cast<int>(seed));
  Rng rng(seed + 1);
  MemoryFileSystem fs;
  const std::string bad = "not a line\n";
  PutFile(&fs, "/logs/a.tsv", bad + Lines(0, 37) + bad + bad + Lines(37, 20));
  PutFile(&fs, "/logs/b.csv.gz", Gzip("\n" + Lines(100, 55, ',') + "1,2,3"));
  PutFile(&fs, "/logs/c.tsv", "");
  PutFile(&fs, "/logs/d.tsv.zst", Zstd(Lines(200, 41) + CriteoLine(1, 999)));
  for (const char* const shuffle : {"none", "files", "examples"}) {
    for (int round = 0; round < 40; ++round) {
      SCOPED_TRACE(std::string(shuffle) + " seed " + std::to_string(seed) + " round " +
                   std::to_string(round));
      DataOptions options = Options({"/logs/*"});
      options.epochs = 2;
      options.shuffle = shuffle;
      options.seed = rng.Below(5);
      options.shuffle_window = 1 + rng.Below(70);
      options.max_bad_fraction = 0.5;
      const auto minibatch = static_cast<std::uint32_t>(1 + rng.Below(20));
      auto reference_source = Open(&fs, options);
      const Stream reference = ReadStream(reference_source.get(), minibatch, {minibatch * 1000});
      ASSERT_TRUE(reference.status.ok()) << reference.status.ToString();
      ASSERT_EQ(reference.examples.size(), 2u * (37 + 20 + 55 + 42));

      std::vector<std::uint32_t> sizes;
      for (int i = 0; i < 5; ++i)
        sizes.push_back(minibatch * static_cast<std::uint32_t>(1 + rng.Below(9)));
      const Stream other = ReadStream(Open(&fs, options).get(), minibatch, sizes);
      ASSERT_TRUE(other.examples == reference.examples);
      ASSERT_TRUE(other.cursors == reference.cursors);
      ASSERT_TRUE(other.bad_after_epoch == reference.bad_after_epoch);

      const std::size_t stop = rng.Below(reference.cursors.size());
      DataCursor cursor = reference.cursors[stop];
      if (rng.Below(4) == 0)  // A cursor without its hint leads to the same place.
        cursor.hint_example = cursor.file = cursor.offset = cursor.line = cursor.bad_lines = 0;
      auto resumed_source = Open(&fs, options);
      ASSERT_TRUE(resumed_source->Seek(cursor).ok());
      const Stream resumed = ReadStream(resumed_source.get(), minibatch, sizes);
      ASSERT_TRUE(resumed.status.ok()) << resumed.status.ToString();
      ASSERT_TRUE(resumed.examples == From(reference.examples, cursor.examples));
      ASSERT_TRUE(resumed.cursors == From(reference.cursors, stop + 1));
    }
  }
}

TEST(ExampleSourceTest, MiniBatchesEndAtMultiplesFromTheEpochsStart) {
  MemoryFileSystem fs;
  PutFile(&fs, "/a", Lines(0, 50));
  DataOptions options = Options({"/a"});
  options.epochs = 2;
  auto source = Open(&fs, options);
  DataCursor inside;
  inside.example_in_epoch = 5;
  inside.examples = 5;
  ASSERT_TRUE(source->Seek(inside).ok());
  std::vector<std::uint32_t> sizes;
  std::vector<std::size_t> cursors;
  std::vector<bool> ends;
  for (;;) {
    auto batch = source->Next(32, 16);
    ASSERT_TRUE(batch.ok()) << batch.status().ToString();
    if (!batch->has_value()) break;
    sizes.push_back((**batch).examples);
    cursors.push_back((**batch).cursors.size());
    ends.push_back((**batch).ends_epoch);
  }
  EXPECT_EQ(sizes, (std::vector<std::uint32_t>{27, 18, 32, 18}));
  EXPECT_EQ(cursors, (std::vector<std::size_t>{2, 2, 2, 2}));
  EXPECT_EQ(ends, (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(source->stats().progress, 1.0);
  EXPECT_EQ(source->stats().examples, 95u);
}

TEST(ExampleSourceTest, TextGzipAndZstdGiveTheSameExamples) {
  MemoryFileSystem fs;
  const std::string text = Lines(0, 3000);
  const std::string half = text.substr(0, text.size() / 2);
  PutFile(&fs, "/plain", text);
  PutFile(&fs, "/gz", Gzip(text));
  PutFile(&fs, "/gz2", Gzip(half) + Gzip(text.substr(half.size())) + std::string(512, '\0'));
  PutFile(&fs, "/zst", Zstd(text));
  PutFile(&fs, "/zst2", Zstd(half) + Zstd("") + Zstd(text.substr(half.size())));
  const Stream plain = ReadAll(&fs, Options({"/plain"}));
  ASSERT_EQ(plain.examples.size(), 3000u);
  for (const char* const path : {"/gz", "/gz2", "/zst", "/zst2"}) {
    const Stream other = ReadAll(&fs, Options({path}));
    EXPECT_TRUE(other.status.ok()) << path << other.status.ToString();
    EXPECT_TRUE(other.examples == plain.examples) << path;
    EXPECT_TRUE(other.cursors == plain.cursors) << path;
  }
}

// As zstd makes them with --long or --ultra: a frame whose window is its whole content, of more
// than the usual eight MiB, also behind frames that are to be skipped.
TEST(ExampleSourceTest, AWindowMayBeTheWholeContent) {
  MemoryFileSystem fs;
  std::string text;
  while (text.size() < (std::size_t{9} << 20)) text += Lines(0, 3000);
  const std::string archive = Zstd(text, /*window_log=*/24);
  ASSERT_NE(archive[4] & 0x20, 0) << "a single segment";
  std::string skipped("\x53\x2a\x4d\x18\x05\0\0\0abcde", 13);
  PutFile(&fs, "/whole.zst", archive);
  PutFile(&fs, "/behind.zst", skipped + skipped + archive);
  PutFile(&fs, "/plain", text);
  const Stream plain = ReadAll(&fs, Options({"/plain"}));
  for (const char* const path : {"/whole.zst", "/behind.zst"}) {
    auto source = OpenSource(&fs, Options({path}));
    ASSERT_TRUE(source.ok()) << source.status().ToString();
    EXPECT_GE((*source)->MemoryBytes(), std::uint64_t{16} << 20);
    const Stream other = ReadAll(&fs, Options({path}));
    EXPECT_TRUE(other.status.ok()) << path << other.status.ToString();
    EXPECT_TRUE(other.examples == plain.examples) << path;
  }
}

TEST(ExampleSourceTest, TruncatedArchiveIsCorruptionWithFileAndByte) {
  MemoryFileSystem fs;
  // Larger than what opening looks at, so that the run finds it.
  const std::string text = Lines(0, 3000);
  for (const std::string& archive : {Gzip(text), Zstd(text)}) {
    const std::string cut = archive.substr(0, archive.size() - 20);
    PutFile(&fs, "/cut", cut);
    const Stream stream = ReadAll(&fs, Options({"/cut"}));
    EXPECT_EQ(stream.status.code(), StatusCode::kCorruption);
    EXPECT_THAT(stream.status.message(),
                AllOf(HasSubstr("/cut"), HasSubstr("byte " + std::to_string(cut.size())),
                      HasSubstr("ends too early")));
  }
}

TEST(ExampleSourceTest, DamagedArchiveIsCorruption) {
  MemoryFileSystem fs;
  const std::string text = Lines(0, 3000);
  std::string gzip = Gzip(text);
  gzip[gzip.size() / 2] = static_cast<char>(gzip[gzip.size() / 2] ^ 0x55);
  PutFile(&fs, "/gz", gzip);
  EXPECT_EQ(ReadAll(&fs, Options({"/gz"})).status.code(), StatusCode::kCorruption);
  PutFile(&fs, "/tail", Gzip(text) + "rubbish");
  EXPECT_THAT(ReadAll(&fs, Options({"/tail"})).status.message(), HasSubstr("no gzip member"));
}

}  // namespace
}  // namespace terrace
