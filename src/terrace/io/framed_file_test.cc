#include "terrace/io/framed_file.h"

#include <gtest/gtest.h>

#include <string>

#include <fmt/format.h>

#include "terrace/io/faulty_file_system.h"
#include "terrace/io/running_checksum.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

using io_testing::Bytes;

constexpr std::string_view kMagic = "TRGOLDEN";

std::string GoldenPayload() {
  std::string payload = "A payload with every byte: ";
  for (int i = 0; i < 256; ++i) payload += static_cast<char>(i);
  return payload;
}

class FramedFileTest : public testing::Test {
 protected:
  Result<std::string> ReadBytes(std::string_view bytes, std::uint32_t newest_version = 1) {
    Status written = WriteFileAtomically(&fs_, "f", Bytes(bytes));
    if (!written.ok()) return written;
    return ReadFramedFile(&fs_, "f", kMagic, newest_version);
  }

  MemoryFileSystem fs_;
};

TEST(RunningChecksum, IsThatOfTheWhole) {
  std::string all;
  RunningChecksum64 running;
  EXPECT_EQ(running.value(), Checksum64({}));
  // Over the lengths at which XXH3 changes its ways.
  for (const std::size_t size : {1, 15, 3, 200, 0, 1, 1024, 5000}) {
    const std::string part(size, static_cast<char>('a' + size % 26));
    all += part;
    running.Add(Bytes(part));
    EXPECT_EQ(running.value(), Checksum64(Bytes(all))) << all.size();
  }
  const RunningChecksum64 moved = std::move(running);
  EXPECT_EQ(moved.value(), Checksum64(Bytes(all)));
}

TEST_F(FramedFileTest, ReadsBackWhatWasWritten) {
  for (const std::string& payload : {std::string(), std::string("x"), std::string(100'000, 'y')}) {
    auto digest = WriteFramedFile(&fs_, "f", kMagic, 1, Bytes(payload));
    TERRACE_ASSERT_OK(digest);
    EXPECT_EQ(digest->size, payload.size() + 64);
    EXPECT_EQ(digest->checksum, Checksum64(Bytes(*ReadFileToString(&fs_, "f"))));
    EXPECT_EQ(*ReadFramedFile(&fs_, "f", kMagic, 1, &*digest), payload);
    EXPECT_EQ(*ReadFramedFile(&fs_, "f", kMagic, 9), payload);
  }
  EXPECT_EQ(ReadFramedFile(&fs_, "none", kMagic, 1).status().code(), StatusCode::kNotFound);
}

TEST_F(FramedFileTest, GoldenFileIsReadAndWrittenTheSame) {
  const std::string path = JoinPath(TERRACE_TESTDATA, "framed_v1.golden");
  auto payload = ReadFramedFile(FileSystem::Posix(), path, kMagic, 1);
  TERRACE_ASSERT_OK(payload);
  EXPECT_EQ(*payload, GoldenPayload());
  EXPECT_EQ(*ReadFileToString(FileSystem::Posix(), path),
            EncodeFramed(kMagic, 1, Bytes(GoldenPayload())));
}

TEST_F(FramedFileTest, ChecksumIsTheKnownXxh3) {
  EXPECT_EQ(Checksum64({}), 0x2d06800538d394c2ULL);  // The published value for no bytes, seed 0.
}

TEST_F(FramedFileTest, EveryFlippedBitIsFound) {
  const std::string bytes = EncodeFramed(kMagic, 1, Bytes("a small payload"));
  TERRACE_ASSERT_OK(ReadBytes(bytes));
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string broken = bytes;
    broken[bit / 8] = static_cast<char>(broken[bit / 8] ^ (1 << (bit % 8)));
    auto result = ReadBytes(broken);
    ASSERT_EQ(result.status().code(), StatusCode::kCorruption)
        << "bit " << bit << ": " << result.status().ToString();
    ASSERT_NE(result.status().message().find("'f'"), std::string::npos);
  }
}

TEST_F(FramedFileTest, EveryTruncationAndEveryAdditionIsFound) {
  const std::string bytes = EncodeFramed(kMagic, 1, Bytes("a small payload"));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_EQ(ReadBytes(bytes.substr(0, size)).status().code(), StatusCode::kCorruption) << size;
  }
  for (std::size_t more = 1; more < 100; ++more) {
    ASSERT_EQ(ReadBytes(bytes + std::string(more, '\0')).status().code(), StatusCode::kCorruption);
  }
}

TEST_F(FramedFileTest, AnotherKindOfFileIsNamed) {
  auto result = ReadBytes(EncodeFramed("TRMANIFE", 1, Bytes("x")));
  EXPECT_EQ(result.status().code(), StatusCode::kCorruption);
  EXPECT_NE(result.status().message().find("TRMANIFE"), std::string::npos);
  EXPECT_NE(result.status().message().find(kMagic), std::string::npos);
  std::string text = "label\t1\n" + std::string(100, '\x01');
  EXPECT_EQ(ReadBytes(text).status().code(), StatusCode::kCorruption);
}

TEST_F(FramedFileTest, ANewerVersionIsRefusedAsSuch) {
  const std::string bytes = EncodeFramed(kMagic, 3, Bytes("x"));
  auto result = ReadBytes(bytes, 2);
  EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(result.status().message().find("version 3"), std::string::npos);
  EXPECT_NE(result.status().message().find("up to version 2"), std::string::npos);
  TERRACE_EXPECT_OK(ReadBytes(bytes, 3));
}

TEST_F(FramedFileTest, ASoundFileThatIsNotTheOneNamedIsFound) {
  auto first = WriteFramedFile(&fs_, "f", kMagic, 1, Bytes("one"));
  auto second = WriteFramedFile(&fs_, "f", kMagic, 1, Bytes("two"));
  TERRACE_ASSERT_OK(first);
  TERRACE_ASSERT_OK(second);
  TERRACE_EXPECT_OK(ReadFramedFile(&fs_, "f", kMagic, 1, &*second));
  EXPECT_EQ(ReadFramedFile(&fs_, "f", kMagic, 1, &*first).status().code(), StatusCode::kCorruption);
}

// What a read that errs once is told of, and what a disk that errs is.
TEST_F(FramedFileTest, WhatIsReadWronglyOnceIsReadAgain) {
  for (const std::size_t size : {15, 4032, 5000, 3'000'000}) {
    const std::string payload(size, 'p');
    const auto digest = WriteFramedFile(&fs_, "f", kMagic, 1, Bytes(payload));
    TERRACE_ASSERT_OK(digest);
    for (const char* const fault : {"flip", "short_read"}) {
      SCOPED_TRACE(fault);
      FaultyFileSystem faulty(&fs_, *ParseFaultRules(fmt::format("read:1:{}", fault)));
      testing::internal::CaptureStderr();
      const Result<std::string> read = ReadFramedFile(&faulty, "f", kMagic, 1, &*digest);
      EXPECT_EQ(faulty.faults(), 1u);
      TERRACE_ASSERT_OK(read);
      EXPECT_EQ(*read, payload);
      const std::string warning = testing::internal::GetCapturedStderr();
      EXPECT_NE(warning.find("'f' was read wrongly once and is whole when read again"),
                std::string::npos)
          << warning;
      for (const int n : {1, 2}) {  // Of the head, and of all.
        faulty.SetRules(*ParseFaultRules(fmt::format("read:{}:{}", n, fault)));
        std::string into(size + kFrameHeaderBytes, '\0');
        TERRACE_EXPECT_OK(ReadFramedFileInto(&faulty, "f", kMagic, 1, *digest,
                                             std::as_writable_bytes(std::span(into))));
        EXPECT_EQ(into.substr(kFrameHeaderBytes), payload);
        EXPECT_EQ(faulty.faults(), 1u);
      }
      faulty.SetRules(*ParseFaultRules(fmt::format("read:1+:{}", fault)));
      EXPECT_EQ(ReadFramedFile(&faulty, "f", kMagic, 1).status().code(), StatusCode::kCorruption);
      EXPECT_GE(faulty.faults(), 2u);
    }
  }
}

TEST_F(FramedFileTest, AFrameInPlaceIsTheSameFile) {
  std::string file = std::string(kFrameHeaderBytes, 'z') + "a small payload";
  const auto bytes = std::as_writable_bytes(std::span(file));
  FrameInPlace(kMagic, 3, bytes);
  EXPECT_EQ(file, EncodeFramed(kMagic, 3, Bytes("a small payload")));
  auto digest = WriteFramedFile(&fs_, "f", kMagic, 3, Bytes("a small payload"));
  TERRACE_ASSERT_OK(digest);
  std::string read(file.size(), '\0');
  const auto into = std::as_writable_bytes(std::span(read));
  TERRACE_ASSERT_OK(ReadFramedFileInto(&fs_, "f", kMagic, 3, *digest, into));
  EXPECT_EQ(read, file);
  EXPECT_EQ(ReadFramedFileInto(&fs_, "f", kMagic, 3, *digest, into.first(70)).code(),
            StatusCode::kCorruption);
  // A newer version is told from a broken file whatever its length.
  EXPECT_EQ(ReadFramedFileInto(&fs_, "f", kMagic, 2, *digest, into.first(70)).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadFramedFileInto(&fs_, "none", kMagic, 3, *digest, into).code(),
            StatusCode::kNotFound);
}

}  // namespace
}  // namespace terrace
