#include "terrace/io/pipe.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>

#include <gtest/gtest.h>

#include "terrace/base/thread.h"

namespace terrace {
namespace {

// What ReadPipe makes of a pipe into which somebody writes `text` in pieces.
Result<std::string> Through(const std::string& text, std::uint64_t most_bytes) {
  std::array<int, 2> ends = {};
  EXPECT_EQ(pipe(ends.data()), 0);
  Thread writer("writer", ThreadPriority::kNormal, [&] {
    for (std::size_t at = 0; at < text.size();) {
      const ssize_t n =
          write(ends[1], text.data() + at, std::min<std::size_t>(1000, text.size() - at));
      ASSERT_GT(n, 0);
      at += static_cast<std::size_t>(n);
    }
    close(ends[1]);
  });
  Result<std::string> read = ReadPipe("/dev/fd/" + std::to_string(ends[0]), most_bytes);
  writer.Join();
  close(ends[0]);
  return read;
}

TEST(ReadPipe, ReadsToTheEnd) {
  EXPECT_EQ(Through("", 10).value(), "");
  EXPECT_EQ(Through("a: 1\n", 10).value(), "a: 1\n");
  std::string long_text;
  for (int i = 0; i < 100'000; ++i) long_text += std::to_string(i);
  EXPECT_EQ(Through(long_text, long_text.size()).value(), long_text);
}

TEST(ReadPipe, MoreThanItMayHaveIsRefused) {
  EXPECT_EQ(Through("0123456789", 10).value(), "0123456789");
  const Status status = Through("0123456789a", 10).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("gives more than 10 B"), std::string::npos) << status.ToString();
}

TEST(ReadPipe, AFileThatIsNotThereIsNotFound) {
  EXPECT_EQ(ReadPipe("/none/such", 10).status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace terrace
