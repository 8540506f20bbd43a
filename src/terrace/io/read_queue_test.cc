#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/thread.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/io/file_system.h"
#include "terrace/io/posix_file.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

using io_testing::Fill;
using io_testing::FirstWrong;

constexpr std::uint64_t kSeed = 31;
constexpr std::size_t kFileBytes = (std::size_t{4} << 20) + 1000;
constexpr std::size_t kMostBlocks = 4;  // Of one read.

struct Variant {
  const char* name;
  enum { kPosix, kMemory, kFaulty } file_system;
  const char* backend;
  int depth;
  int threads;
};

bool UringWorks() {
  ReadQueueOptions options;
  options.backend = "io_uring";
  return FileSystem::Posix()->NewReadQueue(options).ok();
}

class ReadQueueTest : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    const Variant& variant = GetParam();
    if (std::string_view(variant.backend) == "io_uring" && !UringWorks()) {
      GTEST_SKIP() << "this kernel has no io_uring, or forbids it";
    }
    fs_ = FileSystem::Posix();
    root_ = "io_test.XXXXXX";
    if (variant.file_system == Variant::kMemory) {
      memory_ = std::make_unique<MemoryFileSystem>();
      fs_ = memory_.get();
      TERRACE_ASSERT_OK(fs_->MakeDirectories(root_));
    } else {
      ASSERT_NE(mkdtemp(root_.data()), nullptr);
    }
    if (variant.file_system == Variant::kFaulty) {
      faulty_ = std::make_unique<FaultyFileSystem>(fs_, std::vector<FaultRule>());
      fs_ = faulty_.get();
    }
    std::vector<std::byte> bytes(kFileBytes);
    Fill(kSeed, 0, bytes);
    auto file = fs_->Open(JoinPath(root_, "data"), OpenMode::kCreate);
    TERRACE_ASSERT_OK(file);
    TERRACE_ASSERT_OK((*file)->WriteAt(0, bytes));
    ReadQueueOptions options;
    options.backend = variant.backend;
    options.depth = variant.depth;
    options.threads = variant.threads;
    auto queue = fs_->NewReadQueue(options);
    TERRACE_ASSERT_OK(queue);
    queue_ = std::move(*queue);
  }
  void TearDown() override {
    if (fs_ == nullptr) return;
    TERRACE_EXPECT_OK(RemoveTree(fs_, root_));
  }

  std::unique_ptr<File> Open(OpenMode mode) {
    return std::move(fs_->Open(JoinPath(root_, "data"), mode)).value();
  }

  std::unique_ptr<MemoryFileSystem> memory_;
  std::unique_ptr<FaultyFileSystem> faulty_;
  FileSystem* fs_ = nullptr;
  std::string root_;
  std::unique_ptr<ReadQueue> queue_;
};

TEST_P(ReadQueueTest, ThousandsOfRandomReads) {
  Rng rng(kSeed);
  std::unique_ptr<File> files[] = {Open(OpenMode::kRead), Open(OpenMode::kReadDirect)};
  constexpr std::size_t kMostRequests = 300;
  auto arena = HugeBuffer::Allocate(kMostRequests * kMostBlocks * kDirectIoAlignment);
  TERRACE_ASSERT_OK(arena);
  for (int round = 0; round < 12; ++round) {
    std::vector<ReadRequest> requests(rng.Below(kMostRequests + 1));
    for (std::size_t i = 0; i < requests.size(); ++i) {
      ReadRequest& request = requests[i];
      const bool direct = rng.Below(2) == 1;
      const std::size_t unit = direct ? kDirectIoAlignment : 1;
      request.file = files[direct].get();
      // Some lie past the end.
      request.offset = rng.Below(kFileBytes / unit + 2) * unit;
      request.buffer =
          arena->span().subspan(i * kMostBlocks * kDirectIoAlignment,
                                rng.Below(kMostBlocks * kDirectIoAlignment / unit + 1) * unit);
    }
    TERRACE_ASSERT_OK(queue_->Run(requests));
    for (const ReadRequest& request : requests) {
      TERRACE_ASSERT_OK(request.status);
      const std::size_t expected =
          request.offset >= kFileBytes
              ? 0
              : std::min<std::size_t>(request.buffer.size(), kFileBytes - request.offset);
      ASSERT_EQ(request.bytes_read, expected) << "at " << request.offset;
      ASSERT_EQ(FirstWrong(kSeed, request.offset, request.buffer.first(expected)), expected)
          << "at " << request.offset;
    }
  }
}

TEST_P(ReadQueueTest, EachRequestHasItsOwnStatus) {
  auto file = Open(OpenMode::kRead);
  // A folder can be opened and not be read, on every file system.
  auto folder = fs_->Open(root_, OpenMode::kRead);
  TERRACE_ASSERT_OK(folder);
  std::vector<std::byte> buffer(100 * 64);
  std::vector<ReadRequest> requests(100);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].file = i % 10 == 7 ? folder->get() : file.get();
    requests[i].offset = i * 1000;
    requests[i].buffer = std::span(buffer).subspan(i * 64, 64);
  }
  for (int again = 0; again < 2; ++again) {
    Status status = queue_->Run(requests);
    EXPECT_EQ(status.code(), StatusCode::kIo);
    EXPECT_NE(status.message().find(root_), std::string::npos) << status.message();
    EXPECT_EQ(status.message(), requests[7].status.message());
    for (std::size_t i = 0; i < requests.size(); ++i) {
      ASSERT_EQ(requests[i].status.ok(), i % 10 != 7) << i;
      ASSERT_EQ(requests[i].bytes_read, i % 10 != 7 ? 64u : 0u);
      if (i % 10 == 7) continue;
      ASSERT_EQ(FirstWrong(kSeed, i * 1000, requests[i].buffer), 64u);
    }
  }
}

// As the store reads: some groups are on their way while one is handled and its memory used again.
TEST_P(ReadQueueTest, GroupsEndInTheOrderOfTheirStart) {
  Rng rng(kSeed + 1);
  auto file = Open(OpenMode::kReadDirect);
  constexpr std::size_t kGroups = 5, kMostRequests = 40;
  auto arena = HugeBuffer::Allocate(kGroups * kMostRequests * kDirectIoAlignment);
  TERRACE_ASSERT_OK(arena);
  std::vector<ReadRequest> groups[kGroups];
  std::size_t started = 0, done = 0;
  while (done < 60) {
    while (started < 60 && started - done < kGroups && (started == done || rng.Below(3) > 0)) {
      const std::size_t place = started++ % kGroups;
      groups[place].assign(rng.Below(kMostRequests + 1), {});
      for (std::size_t i = 0; i < groups[place].size(); ++i) {
        ReadRequest& request = groups[place][i];
        request.file = file.get();
        request.offset = rng.Below(kFileBytes / kDirectIoAlignment) * kDirectIoAlignment;
        request.buffer = arena->span().subspan((place * kMostRequests + i) * kDirectIoAlignment,
                                               kDirectIoAlignment);
      }
      queue_->Start(groups[place]);
    }
    TERRACE_ASSERT_OK(queue_->Wait());
    for (const ReadRequest& request : groups[done++ % kGroups]) {
      ASSERT_EQ(request.bytes_read, kDirectIoAlignment);
      ASSERT_EQ(FirstWrong(kSeed, request.offset, request.buffer), kDirectIoAlignment);
    }
  }
  // What is started and not waited for does not outlive the queue.
  groups[0].assign(1, {});
  groups[0][0].file = file.get();
  groups[0][0].buffer = arena->span().first(kDirectIoAlignment);
  queue_->Start(groups[0]);
  queue_.reset();
}

TEST_P(ReadQueueTest, ThreadsUseItOneAfterTheOther) {
  auto file = Open(OpenMode::kReadDirect);
  auto memory = HugeBuffer::Allocate(kFileBytes);
  TERRACE_ASSERT_OK(memory);
  Rng rng(kSeed + 2);
  const auto read = [&] {
    std::ranges::fill(memory->span(), std::byte{0});
    std::vector<ReadRequest> requests(200);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i].file = file.get();
      requests[i].offset = rng.Below(kFileBytes / kDirectIoAlignment) * kDirectIoAlignment;
      requests[i].buffer = memory->span().subspan(i * kDirectIoAlignment, kDirectIoAlignment);
    }
    // Two groups: the second one is staged while the first is on its way.
    queue_->Start(std::span(requests).first(120));
    queue_->Start(std::span(requests).subspan(120));
    for (int group = 0; group < 2; ++group) TERRACE_ASSERT_OK(queue_->Wait());
    for (const ReadRequest& request : requests) {
      ASSERT_EQ(request.bytes_read, kDirectIoAlignment);
      ASSERT_EQ(FirstWrong(kSeed, request.offset, request.buffer), kDirectIoAlignment);
    }
  };
  const std::string name(queue_->name());  // It says so when it has given io_uring up.
  for (int turn = 0; turn < 3; ++turn) {
    Thread other("reader", ThreadPriority::kNormal, read);
    other.Join();
    read();
  }
  EXPECT_EQ(queue_->name(), name);
}

TEST_P(ReadQueueTest, AnEmptyBatchIsDone) { TERRACE_EXPECT_OK(queue_->Run({})); }

const Variant kVariants[] = {
    {"uring_1", Variant::kPosix, "io_uring", 1, 1},
    {"uring_7", Variant::kPosix, "io_uring", 7, 1},
    {"uring_64", Variant::kPosix, "io_uring", 64, 1},
    {"threads_1", Variant::kPosix, "threads", 64, 1},
    {"threads_4", Variant::kPosix, "threads", 64, 4},
    {"auto", Variant::kPosix, "auto", 64, 4},
    {"memory", Variant::kMemory, "auto", 64, 4},
    {"memory_threads", Variant::kMemory, "threads", 64, 4},
    {"faulty_uring", Variant::kFaulty, "io_uring", 16, 1},
    {"faulty_threads", Variant::kFaulty, "threads", 16, 4},
};
INSTANTIATE_TEST_SUITE_P(All, ReadQueueTest, testing::ValuesIn(kVariants),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

TEST(ReadQueueOptionsTest, WrongOnesAreRefusedByName) {
  MemoryFileSystem memory;
  for (FileSystem* fs : {FileSystem::Posix(), static_cast<FileSystem*>(&memory)}) {
    ReadQueueOptions options;
    options.backend = "spdk";
    Status status = fs->NewReadQueue(options).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("'spdk'"), std::string::npos);
    options = {};
    options.depth = 0;
    EXPECT_EQ(fs->NewReadQueue(options).status().code(), StatusCode::kInvalidArgument);
    options = {};
    options.threads = -1;
    EXPECT_EQ(fs->NewReadQueue(options).status().code(), StatusCode::kInvalidArgument);
  }
}

// Makes io_uring_setup fail with EPERM in this process, as container runtimes do.
bool ForbidUring() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),  // The number of the call lies first.
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program = {static_cast<unsigned short>(std::size(filter)), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// 0: as it should be.
int ReadWhereUringIsForbidden() {
  if (!ForbidUring()) return 1;
  ReadQueueOptions options;
  options.backend = "io_uring";
  Status status = FileSystem::Posix()->NewReadQueue(options).status();
  if (status.code() != StatusCode::kUnavailable) return 2;
  if (status.message().find("Operation not permitted") == std::string::npos) return 3;
  options.backend = "auto";
  auto queue = FileSystem::Posix()->NewReadQueue(options);
  if (!queue.ok() || (*queue)->name() != "threads") return 4;
  auto file = FileSystem::Posix()->Open("/proc/self/exe", OpenMode::kRead);
  if (!file.ok()) return 5;
  std::byte bytes[64][4];
  std::vector<ReadRequest> requests(64);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].file = file->get();
    requests[i].buffer = bytes[i];
  }
  if (!(*queue)->Run(requests).ok()) return 6;
  for (const auto& start : bytes) {
    if (start[1] != std::byte{'E'} || start[3] != std::byte{'F'}) return 7;
  }
  return 0;
}

TEST(ReadQueueFallbackTest, ThreadsReadWhereUringIsForbidden) {
  EXPECT_EXIT(std::_Exit(ReadWhereUringIsForbidden()), testing::ExitedWithCode(0), "");
}

// A file whose direct calls are granted at open, and refused where they begin amid a sector.
class RefusedDirectReads : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string_view(GetParam()) == "io_uring" && !UringWorks()) {
      GTEST_SKIP() << "this kernel has no io_uring, or forbids it";
    }
    ASSERT_NE(mkdtemp(root_.data()), nullptr);
    const std::string path = JoinPath(root_, "data");
    std::vector<std::byte> bytes(kFileBytes);
    Fill(kSeed, 0, bytes);
    TERRACE_ASSERT_OK(WriteFileAtomically(fs_, path, bytes));
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0) GTEST_SKIP() << "this file system has no direct I/O";
    file_ = std::make_unique<PosixFile>(fd, path, /*aligned=*/false, /*direct=*/true);
  }
  void TearDown() override { TERRACE_EXPECT_OK(RemoveTree(fs_, root_)); }

  FileSystem* const fs_ = FileSystem::Posix();
  std::string root_ = "io_test.XXXXXX";
  std::unique_ptr<PosixFile> file_;
};

TEST_P(RefusedDirectReads, AreAllRepeatedThoughTheyWereOnTheirWayTogether) {
  ReadQueueOptions options;
  options.backend = GetParam();
  options.depth = 64;
  options.threads = 4;
  auto queue = fs_->NewReadQueue(options);
  TERRACE_ASSERT_OK(queue);
  constexpr std::size_t kBytes = 777;
  std::vector<std::byte> buffer(256 * kBytes);
  std::vector<ReadRequest> requests(256);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].file = file_.get();
    requests[i].offset = i * 1000 + 1;
    requests[i].buffer = std::span(buffer).subspan(i * kBytes, kBytes);
  }
  TERRACE_ASSERT_OK((*queue)->Run(requests));
  for (const ReadRequest& request : requests) {
    ASSERT_EQ(request.bytes_read, kBytes);
    ASSERT_EQ(FirstWrong(kSeed, request.offset, request.buffer), kBytes);
  }
}

// What the kernel says to calls that began before the first of them was refused, and after.
TEST_P(RefusedDirectReads, AreRepeatedOnceAsBufferedOnes) {
  for (int call = 0; call < 3; ++call) {
    const ReadStep step = file_->AfterRead(4096, 8192, 4096, /*was_direct=*/true, -EINVAL);
    EXPECT_FALSE(step.done);
    EXPECT_EQ(step.bytes_read, 4096u);
    EXPECT_FALSE(file_->direct());
  }
  const ReadStep step = file_->AfterRead(4096, 8192, 4096, /*was_direct=*/false, -EINVAL);
  EXPECT_TRUE(step.done);
  EXPECT_EQ(step.status.code(), StatusCode::kIo);
  EXPECT_NE(step.status.message().find(file_->path()), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(All, RefusedDirectReads, testing::Values("io_uring", "threads"));

class RegisteredBuffer : public testing::Test {
 protected:
  void SetUp() override {
    if (!UringWorks()) GTEST_SKIP() << "this kernel has no io_uring, or forbids it";
    ASSERT_NE(mkdtemp(root_.data()), nullptr);
    std::vector<std::byte> bytes(kFileBytes);
    Fill(kSeed, 0, bytes);
    auto file = fs_->Open(JoinPath(root_, "data"), OpenMode::kCreate);
    TERRACE_ASSERT_OK(file);
    TERRACE_ASSERT_OK((*file)->WriteAt(0, bytes));
    options_.backend = "io_uring";
    options_.depth = 16;
  }
  void TearDown() override { TERRACE_EXPECT_OK(RemoveTree(fs_, root_)); }

  // Reads all of the file into `memory`, in pieces of odd and even numbers of blocks.
  void ReadAllInto(std::span<std::byte> memory) {
    auto queue = fs_->NewReadQueue(options_);
    TERRACE_ASSERT_OK(queue);
    for (const OpenMode mode : {OpenMode::kRead, OpenMode::kReadDirect}) {
      auto file = fs_->Open(JoinPath(root_, "data"), mode);
      TERRACE_ASSERT_OK(file);
      std::ranges::fill(memory, std::byte{0});
      std::vector<ReadRequest> requests;
      for (std::size_t at = 0, blocks = 1; at < kFileBytes; at += blocks * kDirectIoAlignment) {
        blocks = blocks % 7 + 1;
        requests.push_back({});
        requests.back().file = file->get();
        requests.back().offset = at;
        requests.back().buffer = memory.subspan(at, blocks * kDirectIoAlignment);
      }
      TERRACE_ASSERT_OK((*queue)->Run(requests));
      EXPECT_EQ(FirstWrong(kSeed, 0, memory.first(kFileBytes)), kFileBytes);
    }
  }

  FileSystem* const fs_ = FileSystem::Posix();
  std::string root_ = "io_test.XXXXXX";
  ReadQueueOptions options_;
};

TEST_F(RegisteredBuffer, IsReadToAndBesideIt) {
  auto memory = HugeBuffer::Allocate(kFileBytes + 8 * kDirectIoAlignment);
  TERRACE_ASSERT_OK(memory);
  // Some requests lie before it, within, after it, and across both of its ends.
  options_.buffer = memory->span().subspan(kFileBytes / 3 / kDirectIoAlignment * kDirectIoAlignment,
                                           kFileBytes / 3);
  ReadAllInto(memory->span());
  options_.buffer = memory->span();
  ReadAllInto(memory->span());
}

TEST_F(RegisteredBuffer, ThatTheKernelRefusesIsNotNeeded) {
  auto memory = HugeBuffer::Allocate(kFileBytes + 8 * kDirectIoAlignment);
  TERRACE_ASSERT_OK(memory);
  // Not the process's to write.
  auto other = HugeBuffer::Allocate(kHugePageBytes);
  TERRACE_ASSERT_OK(other);
  ASSERT_EQ(mprotect(other->data(), other->size(), PROT_NONE), 0);
  options_.buffer = other->span();
  ReadAllInto(memory->span());
}

}  // namespace
}  // namespace terrace
