// The cost of reads: measured on a disk whose price and clock the test makes, remembered, asked for
// again on another disk, and without any.
#include "terrace/store/read_cost.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/testing/sweep.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/io/framed_file.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/testing/hooked_file_system.h"

namespace terrace {
namespace {

constexpr char kFolder[] = "/run/rows";
constexpr char kRemembered[] = "/run/rows/read-cost";
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

class StepClock final : public Clock {
 public:
  std::int64_t MonotonicNanos() const override { return nanos_; }
  std::int64_t WallMicros() const override { return 0; }
  void Advance(double seconds) { nanos_ += static_cast<std::int64_t>(seconds * 1e9); }

 private:
  std::int64_t nanos_ = 0;
};

// A disk in memory, on which a read costs what `cost` says.
struct PricedDisk {
  PricedDisk() {
    fs.disk = "device 1";
    fs.after_reads = [this](std::span<const ReadRequest> requests) {
      reads += requests.size();
      double bytes = 0;
      for (const ReadRequest& request : requests) bytes += static_cast<double>(request.bytes_read);
      clock.Advance(cost.Seconds(static_cast<double>(requests.size()), bytes));
    };
    EXPECT_TRUE(memory.MakeDirectories(kFolder).ok());
    options.folder = kFolder;
    options.quota = &quota;
  }
  KnownReadCost Find() {
    Result<KnownReadCost> known = FindReadCost(&fs, &clock, options);
    EXPECT_TRUE(known.ok()) << known.status().ToString();
    EXPECT_EQ(quota.used(), 0u);
    return known.ok() ? *known : KnownReadCost();
  }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    const auto entries = memory.List(kFolder);
    EXPECT_TRUE(entries.ok());
    for (const FileInfo& entry : *entries) names.push_back(entry.name);
    return names;
  }

  MemoryFileSystem memory;
  FaultyFileSystem faulty{&memory, {}};
  HookedFileSystem fs{&faulty};
  StepClock clock;
  DiskQuota quota{std::uint64_t{1} << 30};
  ReadCostOptions options;
  ReadCost cost{200e-6, 2e8};  // Slow, so that few reads fill the time.
  std::uint64_t reads = 0;
};

using Names = std::vector<std::string>;

TEST(ReadCost, GapIsWhatARequestCosts) {
  EXPECT_EQ(ReadCost().MergeGapBytes(), 16u << 10);
  EXPECT_EQ((ReadCost{20e-6, 2e9}.MergeGapBytes()), 40'000u);
  EXPECT_EQ((ReadCost{1e-7, 1e9}.MergeGapBytes()), 4u << 10);
  EXPECT_EQ((ReadCost{8e-3, 2e8}.MergeGapBytes()), 1u << 20);
  EXPECT_EQ((ReadCost{0.0 / 1e-300, -1}.MergeGapBytes()), 4u << 10);
}

TEST(ReadCost, MeasuredOnceAndRemembered) {
  PricedDisk disk;
  const KnownReadCost known = disk.Find();
  EXPECT_EQ(known.origin, ReadCostOrigin::kMeasured) << known.why;
  EXPECT_NEAR(known.cost.request_seconds, 200e-6, 1e-7);
  EXPECT_NEAR(known.cost.bytes_per_second, 2e8, 1e5);
  EXPECT_EQ(disk.Names(), Names{"read-cost"}) << "the scratch file is gone";
  EXPECT_LT(disk.clock.MonotonicSeconds(), 1) << "a second at most";
  const std::uint64_t reads = disk.reads;
  EXPECT_GT(reads, 0u);
  for (const bool read_only : {false, true}) {
    disk.options.read_only = read_only;
    const KnownReadCost again = disk.Find();
    EXPECT_EQ(again.origin, ReadCostOrigin::kRemembered);
    EXPECT_EQ(again.cost.request_seconds, known.cost.request_seconds);
    EXPECT_EQ(again.cost.bytes_per_second, known.cost.bytes_per_second);
  }
  EXPECT_EQ(disk.reads, reads);
}

TEST(ReadCost, MeasuredAgainOnAnotherDisk) {
  PricedDisk disk;
  disk.Find();
  disk.fs.disk = "device 2";
  disk.cost = {80e-6, 1e9};
  // A reader may neither write nor measure.
  disk.options.read_only = true;
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kDefault);
  disk.options.read_only = false;
  const KnownReadCost known = disk.Find();
  EXPECT_EQ(known.origin, ReadCostOrigin::kMeasured);
  EXPECT_NEAR(known.cost.request_seconds, 80e-6, 1e-7);
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kRemembered);
  // Another way to read is another disk, though the same was asked for.
  for (const char* name : {"io_uring", "threads"}) {
    disk.fs.queue_name = name;
    EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kMeasured) << name;
    EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kRemembered) << name;
  }
  disk.options.read_queue.threads *= 2;
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kMeasured);
}

// Short parts keep a disk less busy: a byte costs more. What is remembered is of such parts.
TEST(ReadCost, ReadsAreThoseOfTheStoresBuffer) {
  PricedDisk disk;
  std::uint64_t longest = 0, most = 0;  // Bytes of a read, reads of a group.
  disk.fs.after_reads = [&](std::span<const ReadRequest> requests) {
    for (const ReadRequest& request : requests) longest = std::max(longest, request.bytes_read);
    most = std::max<std::uint64_t>(most, requests.size());
    const double bytes = static_cast<double>(requests[0].bytes_read * requests.size());
    disk.clock.Advance(disk.cost.Seconds(static_cast<double>(requests.size()), bytes));
  };
  const auto find = [&](std::uint64_t buffer_bytes) {
    longest = most = 0;
    disk.options.buffer_bytes = buffer_bytes;
    const KnownReadCost known = disk.Find();
    EXPECT_NEAR(known.cost.request_seconds, 200e-6, 1e-6);
    EXPECT_NEAR(known.cost.bytes_per_second, 2e8, 1e6);
    return known.origin;
  };
  EXPECT_EQ(find(8 * kMiB), ReadCostOrigin::kMeasured);
  EXPECT_EQ(longest, kMiB);
  EXPECT_EQ(most, 64u);
  EXPECT_EQ(find(256 << 10), ReadCostOrigin::kMeasured);
  EXPECT_EQ(longest, 32u << 10);
  EXPECT_EQ(find(300 << 10), ReadCostOrigin::kRemembered) << "some pages more are the same";
  disk.options.read_only = true;
  for (const std::uint64_t bytes : {std::uint64_t{256} << 10, kMiB, 8 * kMiB}) {
    EXPECT_EQ(find(bytes), ReadCostOrigin::kRemembered) << "to a reader it says something";
  }
  disk.options.read_only = false;
  EXPECT_EQ(find(256 << 10), ReadCostOrigin::kRemembered);
  EXPECT_EQ(find(kMiB), ReadCostOrigin::kMeasured);
  EXPECT_EQ(longest, kMiB / 8);
  EXPECT_LE(most * 512, kMiB / 8);
}

TEST(ReadCost, DamagedMemoryIsIgnoredAndRewritten) {
  PricedDisk disk;
  disk.Find();
  const Result<std::string> whole = ReadFileToString(&disk.memory, kRemembered);
  ASSERT_TRUE(whole.ok());
  for (std::size_t cut = 0; cut < whole->size(); cut += 5) {
    std::string damaged = *whole;
    damaged[cut] = static_cast<char>(damaged[cut] ^ 16);
    for (const std::string& bytes : {damaged, whole->substr(0, cut)}) {
      TERRACE_ASSERT_OK(
          WriteFileAtomically(&disk.memory, kRemembered, std::as_bytes(std::span(bytes))));
      disk.options.read_only = true;
      EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kDefault) << cut;
    }
  }
  disk.options.read_only = false;
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kMeasured);
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kRemembered);
}

TEST(ReadCost, GoldenFileIsReadAndWrittenTheSame) {
  const std::string golden_path = std::string(TERRACE_TESTDATA) + "/read_cost_v1.golden";
  const std::string text = EncodeReadCost({1.5e-5, 3e9}, "threads, device 8:1, /a b");
  const std::string bytes = EncodeFramed("TERRCOST", 1, std::as_bytes(std::span(text)));
  if (std::getenv("TERRACE_UPDATE_GOLDEN") != nullptr) {
    TERRACE_ASSERT_OK(
        WriteFileAtomically(FileSystem::Posix(), golden_path, std::as_bytes(std::span(bytes))));
  }
  const Result<std::string> golden = ReadFileToString(FileSystem::Posix(), golden_path);
  TERRACE_ASSERT_OK(golden.status());
  EXPECT_TRUE(*golden == bytes);
  MemoryFileSystem fs;
  TERRACE_ASSERT_OK(WriteFileAtomically(&fs, "/read-cost", std::as_bytes(std::span(*golden))));
  TERRACE_EXPECT_OK(CheckRememberedCost(&fs, "/"));
}

TEST(ReadCost, ANewerFileIsRefusedAsSuch) {
  MemoryFileSystem fs;
  const std::string newer = EncodeFramed("TERRCOST", 2, {});
  TERRACE_ASSERT_OK(WriteFileAtomically(&fs, "/read-cost", std::as_bytes(std::span(newer))));
  const Status status = CheckRememberedCost(&fs, "/");
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("/read-cost"), std::string::npos) << status.ToString();
  EXPECT_NE(status.message().find("version 2"), std::string::npos) << status.ToString();
}

TEST(ReadCost, TextIsReadBackOrRefused) {
  std::string disk;
  const auto cost = DecodeReadCost(EncodeReadCost({1.5e-5, 3e9}, "device 8:1, /a b"), &disk);
  ASSERT_TRUE(cost.ok());
  EXPECT_EQ(cost->request_seconds, 1.5e-5);
  EXPECT_EQ(cost->bytes_per_second, 3e9);
  EXPECT_EQ(disk, "device 8:1, /a b");
  for (const char* text : {"", " ", "1", "1e-5 ", "1e-5 1e9", "x 1e9 d", "-1e-5 1e9 d", "nan 1e9 d",
                           "1e-5 inf d", "1e-5 0 d", "0 1e9 d", "1e-5  1e9 d"}) {
    EXPECT_EQ(DecodeReadCost(text, &disk).status().code(), StatusCode::kCorruption) << text;
  }
}

TEST(ReadCost, ParameterFilesAreReadWhereTheyAreLargeEnough) {
  PricedDisk disk;
  const std::string shard = JoinPath(kFolder, "ads/shard-0");
  TERRACE_ASSERT_OK(disk.memory.MakeDirectories(shard));
  std::vector<std::byte> bytes(20 * kMiB);
  for (const char* name : {"rows-00000001", "rows-00000002", "other"}) {
    auto file = disk.memory.Open(JoinPath(shard, name), OpenMode::kCreate);
    ASSERT_TRUE(file.ok());
    TERRACE_ASSERT_OK((*file)->WriteAt(0, bytes));
  }
  // No scratch file may be made.
  auto rules = ParseFaultRules("open:1+:error:scratch");
  ASSERT_TRUE(rules.ok());
  disk.faulty.SetRules(std::move(rules).value());
  const KnownReadCost known = disk.Find();
  EXPECT_EQ(known.origin, ReadCostOrigin::kMeasured) << known.why;
  EXPECT_NEAR(known.cost.request_seconds, 200e-6, 1e-7);
  // One of them alone is too small.
  TERRACE_ASSERT_OK(disk.memory.Remove(kRemembered));
  TERRACE_ASSERT_OK(disk.memory.Remove(JoinPath(shard, "rows-00000001")));
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kDefault);
}

TEST(ReadCost, NoDiskNoMeasurement) {
  PricedDisk disk;
  disk.fs.disk = "";  // In memory.
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kDefault);
  disk.fs.disk = "device 1";
  disk.options.direct_io = false;
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kDefault);
  EXPECT_TRUE(disk.Names().empty());
  EXPECT_EQ(disk.reads, 0u);
  // A clock that stands still tells nothing, and is not waited for.
  disk.options.direct_io = true;
  disk.fs.after_reads = nullptr;
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kDefault);
  EXPECT_TRUE(disk.Names().empty());
}

TEST(ReadCost, ASlowDiskIsNotKeptBusy) {
  PricedDisk disk;
  disk.cost = {7e-3, 1.5e8};
  const KnownReadCost known = disk.Find();
  EXPECT_EQ(known.origin, ReadCostOrigin::kMeasured) << known.why;
  EXPECT_NEAR(known.cost.request_seconds, 7e-3, 1e-4);
  EXPECT_LT(disk.clock.MonotonicSeconds(), 1);
}

TEST(ReadCost, LittleSpaceMakesASmallScratchOrNone) {
  PricedDisk disk;
  disk.memory.set_capacity_bytes(40 * kMiB);
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kMeasured);
  TERRACE_ASSERT_OK(disk.memory.Remove(kRemembered));
  disk.memory.set_capacity_bytes(16 * kMiB);
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kDefault);
  disk.memory.set_capacity_bytes(~std::uint64_t{0});
  DiskQuota small(16 * kMiB);
  disk.options.quota = &small;
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kDefault);
  disk.options.quota = nullptr;
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kDefault);
  EXPECT_TRUE(disk.Names().empty());
}

TEST(ReadCost, StrayScratchGoes) {
  PricedDisk disk;
  const auto leave_stray = [&] {
    const std::string bytes = "stray";
    return WriteFileAtomically(&disk.memory, JoinPath(kFolder, "read-cost.scratch"),
                               std::as_bytes(std::span(bytes)));
  };
  TERRACE_ASSERT_OK(leave_stray());
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kMeasured);
  EXPECT_EQ(disk.Names(), Names{"read-cost"});
  // Where nothing is measured too; but a reader touches nothing.
  TERRACE_ASSERT_OK(leave_stray());
  disk.options.read_only = true;
  disk.Find();
  EXPECT_EQ(disk.Names().size(), 2u);
  disk.options.read_only = false;
  EXPECT_EQ(disk.Find().origin, ReadCostOrigin::kRemembered);
  EXPECT_EQ(disk.Names(), Names{"read-cost"});
}

// A start goes on without the measurement, and without a scratch file.
TEST(ReadCost, EveryCallFailing) {
  for (const char* fault : {"error", "enospc", "short_read"}) {
    for (std::uint64_t n = 1 + FirstOfSweep();; n += kSweepStride) {
      SCOPED_TRACE(std::string(fault) + " at " + std::to_string(n));
      PricedDisk disk;
      disk.options.scratch_bytes = 4 * kMiB;
      auto rules = ParseFaultRules("any:" + std::to_string(n) + ":" + fault);
      ASSERT_TRUE(rules.ok());
      disk.faulty.SetRules(std::move(rules).value());
      const Result<KnownReadCost> known = FindReadCost(&disk.fs, &disk.clock, disk.options);
      EXPECT_EQ(disk.quota.used(), 0u);
      if (disk.faulty.faults() == 0) {
        ASSERT_TRUE(known.ok());
        EXPECT_EQ(known->origin, ReadCostOrigin::kMeasured);
        break;
      }
      disk.faulty.SetRules({});
      if (known.ok()) {
        for (const std::string& name : disk.Names()) EXPECT_NE(name, "read-cost.scratch");
      } else {
        EXPECT_NE(known.status().message().find("read-cost.scratch"), std::string::npos);
      }
      EXPECT_NE(disk.Find().origin, ReadCostOrigin::kDefault);
      for (const std::string& name : disk.Names()) EXPECT_NE(name, "read-cost.scratch");
      // Most of the reads are alike.
      if (n > 40) n += 97;
    }
  }
}

TEST(ReadCost, RealDisk) {
  char folder[] = "/tmp/terrace_read_cost_test.XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  DiskQuota quota(std::uint64_t{1} << 30);
  ReadCostOptions options;
  options.folder = folder;
  options.quota = &quota;
  options.scratch_bytes = 4 * kMiB;
  for (const char* backend : {"auto", "threads"}) {
    options.read_queue.backend = backend;
    // Whatever the disk is: no failure, no stray, within the bounds.
    const auto known = FindReadCost(FileSystem::Posix(), Clock::Real(), options);
    ASSERT_TRUE(known.ok()) << known.status().ToString();
    EXPECT_GE(known->cost.MergeGapBytes(), 4u << 10);
    EXPECT_LE(known->cost.MergeGapBytes(), 1u << 20);
    EXPECT_FALSE(FileSystem::Posix()->Stat(JoinPath(folder, "read-cost.scratch")).ok());
    EXPECT_EQ(quota.used(), 0u);
  }
  EXPECT_TRUE(RemoveTree(FileSystem::Posix(), folder).ok());
}

}  // namespace
}  // namespace terrace
