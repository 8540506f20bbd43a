// What the tests of files share: bytes that tell where they came from, files as texts, and checks
// of a Status.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "terrace/base/rng.h"
#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/io/framed_file.h"

namespace terrace::io_testing {

inline std::string Describe(const Status& status) { return status.ToString(); }
template <typename T>
std::string Describe(const Result<T>& result) {
  return result.status().ToString();
}

}  // namespace terrace::io_testing

#define TERRACE_ASSERT_OK(expression)                                                        \
  do {                                                                                       \
    const auto& assert_ok_result_ = (expression);                                            \
    ASSERT_TRUE(assert_ok_result_.ok()) << terrace::io_testing::Describe(assert_ok_result_); \
  } while (false)
#define TERRACE_EXPECT_OK(expression)                                                        \
  do {                                                                                       \
    const auto& expect_ok_result_ = (expression);                                            \
    EXPECT_TRUE(expect_ok_result_.ok()) << terrace::io_testing::Describe(expect_ok_result_); \
  } while (false)

namespace terrace::io_testing {

inline std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// A file's bytes; one that can't be read is a failure.
inline std::string ReadAll(FileSystem* fs, const std::string& path) {
  const Result<std::string> text = ReadFileToString(fs, path);
  TERRACE_EXPECT_OK(text);
  return text.ok() ? *text : std::string();
}
inline void Replace(FileSystem* fs, const std::string& path, const std::string& content) {
  TERRACE_ASSERT_OK(WriteFileAtomically(fs, path, Bytes(content)));
}

// Byte `offset` of the file `seed`, so that a read of the wrong place is seen.
inline std::byte Expected(std::uint64_t seed, std::uint64_t offset) {
  return static_cast<std::byte>(HashCombine(seed, offset / 8) >> (8 * (offset % 8)));
}

inline void Fill(std::uint64_t seed, std::uint64_t offset, std::span<std::byte> buffer) {
  for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = Expected(seed, offset + i);
}

// Where `buffer` first differs from the file; its size when it does not.
inline std::size_t FirstWrong(std::uint64_t seed, std::uint64_t offset,
                              std::span<const std::byte> buffer) {
  std::size_t i = 0;
  while (i < buffer.size() && buffer[i] == Expected(seed, offset + i)) ++i;
  return i;
}

}  // namespace terrace::io_testing
