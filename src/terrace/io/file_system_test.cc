// One body over the posix file system, buffered and direct, and the one in memory.
#include "terrace/io/file_system.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

#define ASSERT_OK(expr)                                   \
  do {                                                    \
    const auto& ok_status_ = (expr);                      \
    ASSERT_TRUE(ok_status_.ok()) << StatusOf(ok_status_); \
  } while (false)

std::string StatusOf(const Status& status) { return status.ToString(); }
template <typename T>
std::string StatusOf(const Result<T>& result) {
  return result.status().ToString();
}

std::span<const std::byte> Bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

// Byte `i` of file `seed`, so that a read of the wrong place is seen.
std::byte Expected(std::uint64_t seed, std::uint64_t offset) {
  return static_cast<std::byte>(HashCombine(seed, offset / 8) >> (8 * (offset % 8)));
}

void Fill(std::uint64_t seed, std::uint64_t offset, std::span<std::byte> buffer) {
  for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = Expected(seed, offset + i);
}

struct Variant {
  const char* name;
  bool memory;
  OpenMode create;
  OpenMode read;
};

class FileSystemTest : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    if (GetParam().memory) {
      memory_ = std::make_unique<MemoryFileSystem>();
      fs_ = memory_.get();
      root_ = "/test";
      ASSERT_OK(fs_->MakeDirectories(root_));
      return;
    }
    fs_ = FileSystem::Posix();
    // Not in /tmp by habit: a tmpfs knows no direct I/O, the folder of the build mostly does.
    std::string name = "io_test.XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(fs_, root_).ok()); }

  std::string Path(std::string_view name) { return JoinPath(root_, name); }

  // A file of `blocks` of 4 KiB, synced.
  void MakeFile(const std::string& path, std::uint64_t seed, std::size_t blocks) {
    auto file = fs_->Open(path, GetParam().create);
    ASSERT_OK(file);
    auto buffer = HugeBuffer::Allocate(blocks * kDirectIoAlignment);
    ASSERT_OK(buffer);
    auto data = buffer->span().first(blocks * kDirectIoAlignment);
    Fill(seed, 0, data);
    ASSERT_OK((*file)->WriteAt(0, data));
    ASSERT_OK((*file)->Sync());
  }

  std::unique_ptr<MemoryFileSystem> memory_;
  FileSystem* fs_ = nullptr;
  std::string root_;
};

TEST_P(FileSystemTest, ReadsBackWhatWasWritten) {
  MakeFile(Path("a"), 1, 9);
  auto file = fs_->Open(Path("a"), GetParam().read);
  ASSERT_OK(file);
  EXPECT_EQ(*(*file)->Size(), 9 * kDirectIoAlignment);
  auto buffer = HugeBuffer::Allocate(4 * kDirectIoAlignment);
  ASSERT_OK(buffer);
  auto n = (*file)->ReadAt(8192, buffer->span());
  ASSERT_OK(n);
  ASSERT_EQ(*n, 4 * kDirectIoAlignment);
  for (std::size_t i = 0; i < *n; ++i) ASSERT_EQ(buffer->span()[i], Expected(1, 8192 + i)) << i;
}

TEST_P(FileSystemTest, ShortReadsOnlyAtTheEnd) {
  MakeFile(Path("a"), 1, 3);
  {
    auto file = fs_->Open(Path("a"), OpenMode::kAppend);
    ASSERT_OK(file);
    ASSERT_OK((*file)->WriteAt(0, Bytes("tail")));
  }
  auto file = fs_->Open(Path("a"), GetParam().read);
  ASSERT_OK(file);
  auto buffer = HugeBuffer::Allocate(4 * kDirectIoAlignment);
  ASSERT_OK(buffer);
  EXPECT_EQ(*(*file)->ReadAt(0, buffer->span()), 3 * kDirectIoAlignment + 4);
  EXPECT_EQ(std::memcmp(buffer->data() + 3 * kDirectIoAlignment, "tail", 4), 0);
  EXPECT_EQ(*(*file)->ReadAt(3 * kDirectIoAlignment, buffer->span()), 4u);
  EXPECT_EQ(*(*file)->ReadAt(4 * kDirectIoAlignment, buffer->span()), 0u);
  Status status = ReadFully(file->get(), 0, buffer->span());
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_NE(status.message().find(Path("a")), std::string::npos) << status.message();
}

const Variant kVariants[] = {
    {"posix_buffered", false, OpenMode::kCreate, OpenMode::kRead},
    {"posix_direct", false, OpenMode::kCreateDirect, OpenMode::kReadDirect},
    {"memory", true, OpenMode::kCreate, OpenMode::kRead},
    {"memory_direct", true, OpenMode::kCreateDirect, OpenMode::kReadDirect},
};
INSTANTIATE_TEST_SUITE_P(All, FileSystemTest, testing::ValuesIn(kVariants),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

}  // namespace
}  // namespace terrace
