// ReadCost: what a read costs on one disk with many in flight, and how it becomes known. Measured
// at the start of a run, remembered beside its rows (docs/formats/read_cost.md). Changes how rows
// are read, never what is read. Threads: pure functions and values; one caller a folder.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "terrace/base/clock.h"
#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/store/store.h"

namespace terrace {

// A read of n bytes takes request_seconds + n / bytes_per_second of the disk's time. With a full
// queue a request costs what it keeps others from, which is far less than its own latency.
struct ReadCost {
  double request_seconds = 1e-5;  // Of a disk that is not known: a gap of 16 KiB.
  double bytes_per_second = 16384 * 1e5;

  double Seconds(double requests, double bytes) const {
    return requests * request_seconds + bytes / bytes_per_second;
  }
  // Reading over so many bytes costs as much as another request. Within 4 KiB, below which no disk
  // is cheaper, and 1 MiB, a part of the read buffer.
  std::uint64_t MergeGapBytes() const;
};

enum class ReadCostOrigin { kDefault, kRemembered, kMeasured };

struct KnownReadCost {
  ReadCost cost;
  ReadCostOrigin origin = ReadCostOrigin::kDefault;
  std::string why;  // Of a default: what kept the disk from being measured.
};

struct ReadCostOptions {
  std::string folder;  // Exists; the stores' folders lie below it, and what is remembered in it.
  ReadQueueOptions read_queue;
  bool direct_io = true;
  bool read_only = false;  // What is remembered, or the default; nothing is written or measured.
  DiskQuota* quota = nullptr;  // For the scratch file; null: no scratch file.
  std::uint64_t scratch_bytes = std::uint64_t{32} << 20;  // At most; more would only take longer.
  // As the stores', whose eighths are in flight: the smaller they are, the more a byte costs.
  std::uint64_t buffer_bytes = std::uint64_t{8} << 20;
};

// What reads of `folder` cost: remembered for this very disk and, but for who only reads, for such
// a buffer; else measured, for some tenths of a
// second, on parameter files below it that are as large as the scratch file would be, else on a
// scratch file, which is gone afterwards; else the default. Fails only when a scratch file can't be
// removed, its own or one that a killed process left: it would hold space that nobody counts.
// Blocks: on the disk.
Result<KnownReadCost> FindReadCost(FileSystem* fs, Clock* clock, const ReadCostOptions& options);

// What is remembered in `folder`: in a file of this name. kNotFound: nothing; kCorruption: damaged;
// kInvalidArgument: by a newer program.
inline constexpr std::string_view kReadCostName = "read-cost";
// Whether it is that file, one in the making, or the scratch file of a measurement.
bool IsReadCostName(std::string_view name);
Status CheckRememberedCost(FileSystem* fs, const std::string& folder);

// Removes the scratch file of a process that was killed. Fine when there is none.
Status RemoveReadCostScratch(FileSystem* fs, const std::string& folder);

// Times random single sectors and long sequential reads of `files` by `queue`, alternating, as a
// store with such a buffer keeps it busy, through a buffer of its own. kUnavailable: files too
// small, or a clock that saw nothing.
Result<ReadCost> MeasureReadCost(Clock* clock, ReadQueue* queue, std::span<File* const> files,
                                 std::uint64_t buffer_bytes);

// The text of the remembered file, and back. kCorruption: not such a text, or costs of no disk.
std::string EncodeReadCost(const ReadCost& cost, std::string_view disk);
Result<ReadCost> DecodeReadCost(std::string_view text, std::string* disk);

}  // namespace terrace
