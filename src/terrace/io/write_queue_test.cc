#include "terrace/io/write_queue.h"

#include <gtest/gtest.h>

#include <memory>
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

TEST(WriteQueue, WritesForSeveralCallers) {
  MemoryFileSystem fs;
  WriteQueue queue("write");
  auto one = fs.Open("/one", OpenMode::kCreate);
  auto two = fs.Open("/two", OpenMode::kCreate);
  TERRACE_ASSERT_OK(one);
  TERRACE_ASSERT_OK(two);
  Writes first(one->get(), 1, 5), second(two->get(), 2, 5);
  for (std::size_t i = 0; i < 5; ++i) {
    queue.Start(&first.requests[i]);
    queue.Start(&second.requests[i]);
  }
  // In any order.
  for (std::size_t i = 5; i > 0; --i) TERRACE_EXPECT_OK(queue.Wait(&second.requests[i - 1]));
  for (WriteRequest& request : first.requests) TERRACE_EXPECT_OK(queue.Wait(&request));
  ExpectWhole(one->get(), 1, 5);
  ExpectWhole(two->get(), 2, 5);
}

TEST(WriteQueue, CallerGoesOnWhileWritten) {
  MemoryFileSystem memory;
  HeldFileSystem fs(&memory);
  WriteQueue queue("write");
  auto file = fs.Open("/file", OpenMode::kCreate);
  TERRACE_ASSERT_OK(file);
  Writes writes(file->get(), 3, 2);
  fs.HoldWrites();
  queue.Start(&writes.requests[0]);
  fs.WaitForHeldWrite();
  queue.Start(&writes.requests[1]);
  EXPECT_EQ(fs.held(), 1);  // One after another.
  fs.LetGo();
  TERRACE_EXPECT_OK(queue.Wait(&writes.requests[0]));
  TERRACE_EXPECT_OK(queue.Wait(&writes.requests[1]));
  ExpectWhole(file->get(), 3, 2);
}

TEST(WriteQueue, EachRequestHasItsStatus) {
  MemoryFileSystem memory;
  FaultRule rule;
  rule.operation = FileOperation::kWrite;
  rule.fault = Fault::kShortWrite;
  rule.nth = 2;
  rule.path_contains = "bad";
  FaultyFileSystem fs(&memory, {rule});
  WriteQueue queue("write");
  auto bad = fs.Open("/bad", OpenMode::kCreate);
  auto good = fs.Open("/good", OpenMode::kCreate);
  TERRACE_ASSERT_OK(bad);
  TERRACE_ASSERT_OK(good);
  Writes failing(bad->get(), 4, 3), whole(good->get(), 5, 3);
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
  ExpectWhole(good->get(), 5, 3);
  // A request can be used again.
  whole.requests[0].offset = 3 * kBytes;
  queue.Start(&whole.requests[0]);
  TERRACE_EXPECT_OK(queue.Wait(&whole.requests[0]));
}

}  // namespace
}  // namespace terrace
