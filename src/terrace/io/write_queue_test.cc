#include "terrace/io/write_queue.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/io/faulty_file_system.h"
#include "terrace/io/testing/held_file_system.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

using io_testing::Fill;
using io_testing::FirstWrong;

constexpr std::size_t kBytes = 1000;

// Request i writes its share of file `seed`.
struct Writes {
  Writes(File* file, std::uint64_t seed, std::size_t count) : data(count), requests(count) {
    for (std::size_t i = 0; i < count; ++i) {
      data[i].resize(kBytes);
      Fill(seed, i * kBytes, data[i]);
      requests[i].file = file;
      requests[i].offset = i * kBytes;
      requests[i].data = data[i];
    }
  }
  std::vector<std::vector<std::byte>> data;
  std::vector<WriteRequest> requests;
};

void ExpectWhole(File* file, std::uint64_t seed, std::size_t count) {
  std::vector<std::byte> read(count * kBytes);
  TERRACE_ASSERT_OK(ReadFully(file, 0, read));
  EXPECT_EQ(FirstWrong(seed, 0, read), read.size());
}

std::unique_ptr<File> Create(FileSystem* fs, const std::string& path) {
  Result<std::unique_ptr<File>> file = fs->Open(path, OpenMode::kCreate);
  TERRACE_EXPECT_OK(file);
  return file.ok() ? std::move(file).value() : nullptr;
}

// The nth write into the file "/bad" meets this fault.
FaultRule BadWrite(Fault fault, std::uint64_t nth) {
  FaultRule rule;
  rule.operation = FileOperation::kWrite;
  rule.fault = fault;
  rule.nth = nth;
  rule.path_contains = "bad";
  return rule;
}

TEST(WriteQueue, WritesForSeveralCallers) {
  MemoryFileSystem fs;
  WriteQueue queue("write");
  const std::unique_ptr<File> one = Create(&fs, "/one"), two = Create(&fs, "/two");
  Writes first(one.get(), 1, 5), second(two.get(), 2, 5);
  for (std::size_t i = 0; i < 5; ++i) {
    queue.Start(&first.requests[i]);
    queue.Start(&second.requests[i]);
  }
  // In any order.
  for (std::size_t i = 5; i > 0; --i) TERRACE_EXPECT_OK(queue.Wait(&second.requests[i - 1]));
  for (WriteRequest& request : first.requests) TERRACE_EXPECT_OK(queue.Wait(&request));
  ExpectWhole(one.get(), 1, 5);
  ExpectWhole(two.get(), 2, 5);
}

TEST(WriteQueue, CallerGoesOnWhileWritten) {
  MemoryFileSystem memory;
  HeldFileSystem fs(&memory);
  WriteQueue queue("write");
  const std::unique_ptr<File> file = Create(&fs, "/file");
  Writes writes(file.get(), 3, 2);
  fs.HoldWrites();
  queue.Start(&writes.requests[0]);
  fs.WaitForHeldWrite();
  queue.Start(&writes.requests[1]);
  EXPECT_EQ(fs.held(), 1);  // One after another.
  fs.LetGo();
  TERRACE_EXPECT_OK(queue.Wait(&writes.requests[0]));
  TERRACE_EXPECT_OK(queue.Wait(&writes.requests[1]));
  ExpectWhole(file.get(), 3, 2);
}

TEST(WriteQueue, EachRequestHasItsStatus) {
  MemoryFileSystem memory;
  FaultyFileSystem fs(&memory, {BadWrite(Fault::kShortWrite, 2)});
  WriteQueue queue("write");
  const std::unique_ptr<File> bad = Create(&fs, "/bad"), good = Create(&fs, "/good");
  Writes failing(bad.get(), 4, 3), whole(good.get(), 5, 3);
  for (std::size_t i = 0; i < 3; ++i) {
    queue.Start(&failing.requests[i]);
    queue.Start(&whole.requests[i]);
  }
  TERRACE_EXPECT_OK(queue.Wait(&failing.requests[0]));
  const Status first = queue.Wait(&failing.requests[1]);
  EXPECT_EQ(first.code(), StatusCode::kIo);
  // The file remembers; nothing is written behind a hole.
  const Status later = queue.Wait(&failing.requests[2]);
  EXPECT_EQ(later.code(), StatusCode::kIo);
  EXPECT_NE(first.ToString(), later.ToString());
  for (WriteRequest& request : whole.requests) TERRACE_EXPECT_OK(queue.Wait(&request));
  EXPECT_EQ(fs.operations(FileOperation::kWrite), 5u);
  ExpectWhole(good.get(), 5, 3);
  // A request can be used again.
  whole.requests[0].offset = 3 * kBytes;
  queue.Start(&whole.requests[0]);
  TERRACE_EXPECT_OK(queue.Wait(&whole.requests[0]));
}

// Fills the ring's part with what file `seed` has at `offset` and writes it.
Status WritePart(WriteRing* ring, File* file, std::uint64_t seed, std::uint64_t offset) {
  Fill(seed, offset, ring->part());
  return ring->Write(file, offset, ring->part().size());
}

TEST(WriteRing, FilesFollowOneAnotherWithoutAPause) {
  for (const bool queued : {true, false}) {
    MemoryFileSystem memory;
    HeldFileSystem fs(&memory);
    WriteQueue queue("write");
    std::vector<std::byte> buffer(4 * kBytes);
    WriteRing ring(buffer, kBytes / 10, queued ? &queue : nullptr);
    EXPECT_EQ(ring.part().size(), queued ? kBytes : 4 * kBytes);
    const std::unique_ptr<File> one = Create(&fs, "/one"), two = Create(&fs, "/two");
    if (queued) fs.HoldWrites();
    TERRACE_ASSERT_OK(WritePart(&ring, one.get(), 1, 0));
    TERRACE_ASSERT_OK(WritePart(&ring, one.get(), 1, ring.part().size()));
    TERRACE_ASSERT_OK(WritePart(&ring, two.get(), 2, 0));
    if (queued) {
      fs.WaitForHeldWrite();
      fs.LetGo();
    }
    // Parts are used again.
    for (std::size_t i = 1; i < 10; ++i) {
      TERRACE_ASSERT_OK(WritePart(&ring, two.get(), 2, i * ring.part().size()));
    }
    TERRACE_ASSERT_OK(ring.Await());
    ExpectWhole(one.get(), 1, 2 * ring.part().size() / kBytes);
    ExpectWhole(two.get(), 2, 10 * ring.part().size() / kBytes);
  }
}

TEST(WriteRing, TheFirstFailureStaysAndNothingMoreIsWritten) {
  for (const bool queued : {true, false}) {
    MemoryFileSystem memory;
    FaultyFileSystem fs(&memory, {BadWrite(Fault::kNoSpace, 1)});
    WriteQueue queue("write");
    std::vector<std::byte> buffer(4 * kBytes);
    WriteRing ring(buffer, kBytes, queued ? &queue : nullptr);
    const std::unique_ptr<File> bad = Create(&fs, "/bad"), good = Create(&fs, "/good");
    (void)WritePart(&ring, bad.get(), 1, 0);
    const Status failure = ring.Await();
    EXPECT_EQ(failure.code(), StatusCode::kIo);
    EXPECT_NE(failure.message().find("/bad"), std::string::npos) << failure.ToString();
    EXPECT_EQ(WritePart(&ring, good.get(), 2, 0).ToString(), failure.ToString());
    EXPECT_EQ(ring.Await().ToString(), failure.ToString());
    EXPECT_EQ(fs.operations(FileOperation::kWrite), 1u);
  }
}

}  // namespace
}  // namespace terrace
