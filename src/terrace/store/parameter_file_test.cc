// The writer with a queue: the same bytes as without, and failures of writes that come late.
#include "terrace/store/parameter_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "terrace/base/rng.h"
#include "terrace/base/thread.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/held_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

constexpr std::uint32_t kRowBytes = 100;
const char kPath[] = "/file";

std::vector<Key> SortedKeys(std::size_t count) {
  std::vector<Key> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back(i * 7 + 1);
  std::sort(keys.begin(), keys.end(), [](Key a, Key b) { return MixKey(a) < MixKey(b); });
  return keys;
}

std::vector<std::byte> RowOf(Key key) {
  std::vector<std::byte> row(kRowBytes);
  io_testing::Fill(key, 0, row);
  return row;
}

struct Writer {
  Writer(FileSystem* fs, std::uint64_t buffer_bytes, WriteQueue* queue)
      : layout(RecordLayout::Of("ads", 0, kRowBytes)),
        buffer(std::move(HugeBuffer::Allocate(buffer_bytes)).value()) {
    auto file = fs->Open(kPath, OpenMode::kCreateDirect);
    TERRACE_CHECK(file.ok());
    ring.emplace(buffer.span(), kBlockBytes, queue);
    writer =
        std::make_unique<ParameterFileWriter>(std::move(file).value(), layout, 1, &keys, &*ring);
  }
  Status Add(Key key) { return writer->Add(key, 9, RowOf(key)); }
  // Adds until something fails.
  Result<ParameterFileInfo> WriteAll(const std::vector<Key>& added) {
    for (const Key key : added) TERRACE_RETURN_IF_ERROR(Add(key));
    TERRACE_ASSIGN_OR_RETURN(const ParameterFileInfo info, writer->Finish());
    TERRACE_RETURN_IF_ERROR(ring->Await());
    return info;
  }

  const RecordLayout layout;
  HugeBuffer buffer;
  KeyEntries keys;
  std::optional<WriteRing> ring;
  std::unique_ptr<ParameterFileWriter> writer;
};

TEST(ParameterFileWriter, QueueChangesNoByte) {
  for (const std::size_t rows : {1, 30, 31, 500, 3000}) {
    for (const std::uint64_t blocks : {1, 2, 3, 4, 5, 16}) {
      SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(blocks) + " blocks");
      std::string files[2];
      for (const bool queued : {false, true}) {
        MemoryFileSystem fs;
        WriteQueue queue("write");
        Writer writer(&fs, blocks * kBlockBytes, queued ? &queue : nullptr);
        const auto info = writer.WriteAll(SortedKeys(rows));
        TERRACE_ASSERT_OK(info);
        auto content = ReadFileToString(&fs, kPath);
        TERRACE_ASSERT_OK(content);
        EXPECT_EQ(content->size(), info->bytes);
        files[queued ? 1 : 0] = *content;
      }
      EXPECT_TRUE(files[0] == files[1]);
    }
  }
}

// Records stand as they were added, their keys in order, each with the number of its record.
TEST(ParameterFileWriter, KeysAreSortedWhateverTheOrderOfRecords) {
  for (const std::size_t rows : {1, 2, 31, 5000}) {
    SCOPED_TRACE(std::to_string(rows) + " rows");
    MemoryFileSystem fs;
    Writer writer(&fs, 4 * kBlockBytes, nullptr);
    std::vector<Key> keys = SortedKeys(rows);
    Rng rng(rows);
    for (std::size_t i = keys.size(); i > 1; --i) std::swap(keys[i - 1], keys[rng.Below(i)]);
    const auto info = writer.WriteAll(keys);
    TERRACE_ASSERT_OK(info);
    const std::string file = *ReadFileToString(&fs, kPath);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::byte* record =
          reinterpret_cast<const std::byte*>(file.data()) + writer.layout.RecordOffset(row);
      EXPECT_EQ(HeadOf(record).key, keys[row]);
      EXPECT_EQ(HeadOf(record).version, 9u);
    }
    const std::vector<Key> sorted = SortedKeys(rows);
    for (std::size_t i = 0; i < rows; ++i) {
      KeyEntry entry;
      std::memcpy(&entry, file.data() + info->keys_offset + i * sizeof entry, sizeof entry);
      EXPECT_EQ(entry.key, sorted[i]);
      EXPECT_EQ(SequenceOf(entry.version), 9u);
      EXPECT_EQ(keys[RowOfEntry(info->version, i, entry.version)], entry.key);
      EXPECT_EQ(VersionOfEntry(info->version, entry.version), 9u);
    }
  }
}

TEST(ParameterFileWriter, FillsTheNextPartWhileOneIsWritten) {
  MemoryFileSystem memory;
  HeldFileSystem fs(&memory);
  WriteQueue queue("write");
  Writer writer(&fs, 4 * kBlockBytes, &queue);
  const std::vector<Key> keys = SortedKeys(1000);
  fs.HoldWrites();
  // The header has the first part; one record more would fill the last, and wait for the first.
  const std::size_t fits = 3 * kBlockBytes / writer.layout.record_bytes - 1;
  for (std::size_t i = 0; i < fits; ++i) TERRACE_ASSERT_OK(writer.Add(keys[i]));
  fs.WaitForHeldWrite();
  fs.LetGo();
  for (std::size_t i = fits; i < keys.size(); ++i) TERRACE_ASSERT_OK(writer.Add(keys[i]));
  TERRACE_ASSERT_OK(writer.writer->Finish());
  TERRACE_ASSERT_OK(writer.ring->Await());
}

TEST(ParameterFileWriter, EachFailedWriteIsReported) {
  for (const Fault fault : {Fault::kError, Fault::kShortWrite, Fault::kNoSpace}) {
    for (std::uint64_t nth = 1;; ++nth) {
      SCOPED_TRACE(std::string(FaultName(fault)) + " at write " + std::to_string(nth));
      MemoryFileSystem memory;
      FaultRule rule;
      rule.operation = FileOperation::kWrite;
      rule.fault = fault;
      rule.nth = nth;
      FaultyFileSystem fs(&memory, {rule});
      WriteQueue queue("write");
      Writer writer(&fs, 4 * kBlockBytes, &queue);
      const auto info = writer.WriteAll(SortedKeys(1000));
      if (fs.faults() == 0) {
        TERRACE_EXPECT_OK(info);
        EXPECT_GT(nth, 20u);
        break;
      }
      ASSERT_EQ(info.status().code(), StatusCode::kIo);
      // The failure itself, not one of those that follow from it.
      EXPECT_EQ(info.status().message().find("earlier"), std::string::npos)
          << info.status().ToString();
      // And it stays.
      EXPECT_EQ(writer.ring->Await().code(), StatusCode::kIo);
    }
  }
}

TEST(ParameterFileWriter, EndWaitsForWhatIsWritten) {
  MemoryFileSystem memory;
  HeldFileSystem fs(&memory);
  WriteQueue queue("write");
  Writer writer(&fs, 4 * kBlockBytes, &queue);
  fs.HoldWrites();
  for (const Key key : SortedKeys(60)) TERRACE_ASSERT_OK(writer.Add(key));
  fs.WaitForHeldWrite();
  Thread end("end", ThreadPriority::kNormal, [&] { writer.writer.reset(); });
  fs.LetGo();
  end.Join();
  EXPECT_EQ(fs.held(), 0);  // The file's own end looks whether it is written.
}

}  // namespace
}  // namespace terrace
