#include "terrace/store/read_cost.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "terrace/base/log.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/io/framed_file.h"

namespace terrace {
namespace {

constexpr std::string_view kScratchName = "read-cost.scratch";
constexpr std::string_view kMagic = "TERRCOST";
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kLeastGap = std::uint64_t{4} << 10;
constexpr std::uint64_t kMostGap = std::uint64_t{1} << 20;
// What lies beyond is no disk but a mistake: from a nanosecond to ten seconds a request, from 1 KB
// to 10 TB a second.
constexpr double kLeastRequest = 1e-9, kMostRequest = 10;
constexpr double kLeastRate = 1e3, kMostRate = 1e13;

// Of a measurement: rounds, of which the medians count, and how long a phase of one takes.
constexpr int kRounds = 3;
constexpr double kPhaseSeconds = 0.02;
constexpr double kMostSeconds = 0.5;  // Afterwards no further round begins.
constexpr std::size_t kGroup = 64;    // Random reads that are waited for together, at most.
// Groups, and long reads, in flight: as many as a store's read buffer has parts.
constexpr std::size_t kPartsAhead = 8;
constexpr std::uint64_t kMeanStep = std::uint64_t{96} << 10;  // Bytes between two of them.
constexpr std::size_t kMostGroups = 256;                      // For a clock that stands.
constexpr std::size_t kMostLarge = 256;
constexpr std::uint64_t kLeastScratch = std::uint64_t{4} << 20;
constexpr double kMostWriteSeconds = 0.25;
constexpr std::size_t kMostOwnFiles = 64;

// A part of such a buffer. Those of a memory plan differ by some pages from start to start, which
// does not change what reads cost: powers of two.
std::uint64_t PartBytes(std::uint64_t buffer_bytes) {
  constexpr std::uint64_t kLeastPart = std::uint64_t{16} << 10;
  return std::clamp(std::bit_floor(buffer_bytes / kPartsAhead), kLeastPart, kMostGap);
}

// What a cost is remembered of: what reads, in which parts, and the disk. The longest parts are not
// named.
constexpr std::string_view kInParts = " in parts of ";
std::string IdentityOf(std::string_view reader, std::uint64_t part_bytes, std::string_view disk) {
  if (part_bytes == kMostGap) return fmt::format("{}, {}", reader, disk);
  return fmt::format("{}{}{} KiB, {}", reader, kInParts, part_bytes >> 10, disk);
}

// Likewise, whatever the parts.
bool IsOf(std::string_view identity, std::string_view reader, std::string_view disk) {
  const std::string rest = fmt::format(", {}", disk);
  if (!identity.starts_with(reader) || !identity.ends_with(rest)) return false;
  if (identity.size() < reader.size() + rest.size()) return false;
  identity.remove_prefix(reader.size());
  identity.remove_suffix(rest.size());
  return identity.empty() || identity.starts_with(kInParts);
}

// Files one after another, as places to read from.
class ReadPlaces {
 public:
  explicit ReadPlaces(std::span<File* const> files) : files_(files) {}

  Status Measure() {
    for (File* file : files_) {
      TERRACE_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
      sizes_.push_back(size / kDirectIoAlignment * kDirectIoAlignment);
      total_ += sizes_.back();
      sector_ = std::max<std::uint64_t>(sector_, file->read_alignment());
    }
    return OkStatus();
  }
  std::uint64_t total() const { return total_; }
  std::uint64_t sector() const { return sector_; }  // The coarsest of the files.

  // The request of `buffer` at `place` of all bytes; one that would cross a file's end moves back.
  ReadRequest At(std::uint64_t place, std::span<std::byte> buffer) const {
    std::size_t f = 0;
    while (place >= sizes_[f]) place -= sizes_[f++];
    ReadRequest request;
    request.file = files_[f];
    request.offset = std::min(place / sector_ * sector_, sizes_[f] - buffer.size());
    request.buffer = buffer;
    return request;
  }
  std::uint64_t smallest() const { return *std::min_element(sizes_.begin(), sizes_.end()); }

 private:
  const std::span<File* const> files_;
  std::vector<std::uint64_t> sizes_;
  std::uint64_t total_ = 0;
  std::uint64_t sector_ = 1;
};

// Runs groups made by `make(i)`, `ahead` of them started at a time, for kPhaseSeconds or until
// `most`. The seconds of a request while the queue was full: from the first group's end to the
// last's.
template <typename Make>
Result<double> TimeGroups(Clock* clock, ReadQueue* queue, std::size_t ahead, std::size_t most,
                          Make make) {
  std::vector<std::vector<ReadRequest>> groups(ahead);
  double first = 0, last = 0;
  std::size_t started = 0, done = 0, counted = 0;
  Status status;
  const double begin = clock->MonotonicSeconds();
  for (bool more = true; more || done < started;) {
    while (more && started < most && started - done < ahead) {
      std::vector<ReadRequest>& group = groups[started % ahead];
      group = make(started++);
      queue->Start(group);
      // The first alone: a slow disk is not asked for hundreds of reads.
      if (started == 1) break;
    }
    const std::vector<ReadRequest>& group = groups[done % ahead];
    const Status read = queue->Wait();
    if (status.ok()) status = read;
    for (const ReadRequest& request : group) {
      if (status.ok() && request.bytes_read != request.buffer.size()) {
        status = UnavailableError("a file ended earlier than its size");
      }
    }
    const double now = clock->MonotonicSeconds();
    if (done++ == 0) {
      first = now;
    } else {
      counted += group.size();
    }
    last = now;
    more = more && status.ok() && started < most && now - begin < kPhaseSeconds;
  }
  TERRACE_RETURN_IF_ERROR(status);
  // A disk that takes the whole phase for one group is told by that one.
  if (counted == 0) return (last - begin) / static_cast<double>(groups[0].size());
  return (last - first) / static_cast<double>(counted);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

bool IsOfADisk(const ReadCost& cost) {
  return cost.request_seconds >= kLeastRequest && cost.request_seconds <= kMostRequest &&
         cost.bytes_per_second >= kLeastRate && cost.bytes_per_second <= kMostRate;
}

using Files = std::vector<std::unique_ptr<File>>;

// The largest parameter files below the folder; empty when they are smaller together than `bytes`.
Result<Files> OwnFiles(FileSystem* fs, const std::string& folder, std::uint64_t bytes) {
  std::vector<std::pair<std::uint64_t, std::string>> found;
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> tables, fs->List(folder));
  for (const FileInfo& table : tables) {
    if (!table.is_directory) continue;
    const std::string table_path = JoinPath(folder, table.name);
    TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> shards, fs->List(table_path));
    for (const FileInfo& shard : shards) {
      if (!shard.is_directory) continue;
      const std::string shard_path = JoinPath(table_path, shard.name);
      TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> files, fs->List(shard_path));
      for (const FileInfo& file : files) {
        if (!file.name.starts_with("rows-")) continue;
        found.emplace_back(file.size, JoinPath(shard_path, file.name));
      }
    }
  }
  std::sort(found.rbegin(), found.rend());
  if (found.size() > kMostOwnFiles) found.resize(kMostOwnFiles);
  Files files;
  std::uint64_t total = 0;
  for (const auto& [size, path] : found) {
    if (size < kMostGap) break;
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs->Open(path, OpenMode::kReadDirect));
    files.push_back(std::move(file));
    total += size;
  }
  if (total < bytes) files.clear();
  return files;
}

// Writes noise, which no disk compresses away, until `bytes` or the time are up.
Result<std::unique_ptr<File>> WriteScratch(FileSystem* fs, Clock* clock, const std::string& path,
                                           std::uint64_t bytes, std::uint64_t buffer_bytes) {
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(buffer_bytes));
  Rng rng(1);
  for (std::uint64_t at = 0; at < buffer.size(); at += 8) {
    const std::uint64_t word = rng.Next();
    std::memcpy(buffer.data() + at, &word, sizeof word);
  }
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs->Open(path, OpenMode::kCreateDirect));
  const double begin = clock->MonotonicSeconds();
  for (std::uint64_t at = 0; at < bytes;) {
    const std::uint64_t n = std::min(buffer.size(), bytes - at);
    TERRACE_RETURN_IF_ERROR(file->WriteAt(at, buffer.span().first(n)));
    at += n;
    if (at >= kLeastScratch && clock->MonotonicSeconds() - begin > kMostWriteSeconds) break;
  }
  TERRACE_RETURN_IF_ERROR(file->Sync());
  return file;
}

Result<ReadCost> MeasureFiles(Clock* clock, const ReadCostOptions& options, ReadQueue* queue,
                              const Files& files) {
  std::vector<File*> borrowed;
  for (const std::unique_ptr<File>& file : files) borrowed.push_back(file.get());
  return MeasureReadCost(clock, queue, borrowed, options.buffer_bytes);
}

// REQUIRES: no scratch file is there. Leaves none, unless its removal fails.
Result<ReadCost> MeasureScratch(FileSystem* fs, Clock* clock, const ReadCostOptions& options,
                                ReadQueue* queue, Status* removed) {
  if (options.quota == nullptr) return UnavailableError("no scratch file is allowed");
  // A small part of what is free: a run that just fits must not stop for it.
  constexpr std::uint64_t kShare = 8;
  TERRACE_ASSIGN_OR_RETURN(const DiskSpace space, fs->Space(options.folder));
  const std::uint64_t left =
      options.quota->limit() - std::min(options.quota->limit(), options.quota->used());
  const std::uint64_t bytes =
      std::min({options.scratch_bytes, space.free_bytes / kShare, left / kShare}) / kLeastScratch *
      kLeastScratch;
  if (bytes == 0) return UnavailableError("too little space for a scratch file");
  TERRACE_RETURN_IF_ERROR(options.quota->Reserve(bytes, 0));
  const std::string path = JoinPath(options.folder, kScratchName);
  Result<ReadCost> cost = [&]() -> Result<ReadCost> {
    Files files;
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                             WriteScratch(fs, clock, path, bytes, options.buffer_bytes));
    files.push_back(std::move(file));
    return MeasureFiles(clock, options, queue, files);
  }();
  *removed = RemoveReadCostScratch(fs, options.folder);
  options.quota->Release(bytes);
  return cost;
}

Result<ReadCost> ReadRemembered(FileSystem* fs, const std::string& path,
                                const std::function<bool(std::string_view)>& fits) {
  TERRACE_ASSIGN_OR_RETURN(const std::string text, ReadFramedFile(fs, path, kMagic, kVersion));
  std::string of_disk;
  TERRACE_ASSIGN_OR_RETURN(const ReadCost cost, DecodeReadCost(text, &of_disk));
  if (!fits(of_disk)) return UnavailableError(fmt::format("remembered of another: {}", of_disk));
  return cost;
}

}  // namespace

std::uint64_t ReadCost::MergeGapBytes() const {
  const double gap = request_seconds * bytes_per_second;
  if (!(gap > static_cast<double>(kLeastGap))) return kLeastGap;
  if (gap >= static_cast<double>(kMostGap)) return kMostGap;
  return static_cast<std::uint64_t>(gap);
}

std::string EncodeReadCost(const ReadCost& cost, std::string_view disk) {
  return fmt::format("{} {} {}", cost.request_seconds, cost.bytes_per_second, disk);
}

Result<ReadCost> DecodeReadCost(std::string_view text, std::string* disk) {
  ReadCost cost;
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, cost.request_seconds);
  const bool one = first.ec == std::errc() && first.ptr != end && *first.ptr == ' ';
  const auto second =
      one ? std::from_chars(first.ptr + 1, end, cost.bytes_per_second) : std::from_chars_result{};
  if (!one || second.ec != std::errc() || second.ptr == end || *second.ptr != ' ' ||
      !IsOfADisk(cost)) {
    return CorruptionError("is no cost of reads");
  }
  disk->assign(second.ptr + 1, end);
  return cost;
}

Result<ReadCost> MeasureReadCost(Clock* clock, ReadQueue* queue, std::span<File* const> files,
                                 std::uint64_t buffer_bytes) {
  ReadPlaces places(files);
  TERRACE_RETURN_IF_ERROR(places.Measure());
  const std::uint64_t part = PartBytes(buffer_bytes);
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(kPartsAhead * part));
  const std::uint64_t sector = places.sector();
  const std::uint64_t large = part / sector * sector;
  const std::size_t group_size = std::min<std::size_t>(kGroup, part / sector);
  if (files.empty() || places.smallest() < large) {
    return UnavailableError("the files are too small to be measured");
  }
  // Mapped before the clock runs.
  std::memset(buffer.data(), 0, buffer.size());
  Rng rng(1);
  std::uint64_t place = 0;  // Of the sectors: forwards by random steps, as a store reads.
  std::uint64_t at = 0;     // Of the long reads.
  const auto random_group = [&](std::size_t g) {
    std::vector<ReadRequest> group;
    for (std::size_t i = 0; i < group_size; ++i) {
      const std::size_t slot = (g % kPartsAhead) * group_size + i;
      group.push_back(places.At(place, buffer.span().subspan(slot * sector, sector)));
      place = (place + rng.Below(2 * kMeanStep)) % places.total();
    }
    return group;
  };
  const auto large_group = [&](std::size_t g) {
    const std::span<std::byte> target = buffer.span().subspan((g % kPartsAhead) * large, large);
    std::vector<ReadRequest> group = {places.At(at, target)};
    at = (at + large) % places.total();
    return group;
  };
  std::vector<double> small_seconds, large_seconds;
  const double begin = clock->MonotonicSeconds();
  for (int round = 0; round < kRounds; ++round) {
    TERRACE_ASSIGN_OR_RETURN(const double few,
                             TimeGroups(clock, queue, kPartsAhead, kMostGroups, random_group));
    TERRACE_ASSIGN_OR_RETURN(const double many,
                             TimeGroups(clock, queue, kPartsAhead, kMostLarge, large_group));
    small_seconds.push_back(few);
    large_seconds.push_back(many);
    if (clock->MonotonicSeconds() - begin > kMostSeconds) break;
  }
  // Two points make the line.
  const double few = Median(small_seconds), many = Median(large_seconds);
  const double a_byte = (many - few) / static_cast<double>(large - sector);
  ReadCost cost;
  cost.bytes_per_second = 1 / a_byte;
  cost.request_seconds = few - static_cast<double>(sector) * a_byte;
  if (!std::isfinite(cost.bytes_per_second) || !IsOfADisk(cost)) {
    return UnavailableError(
        fmt::format("{} s for a sector and {} s for {} bytes are no disk's", few, many, large));
  }
  return cost;
}

bool IsReadCostName(std::string_view name) {
  return name == kReadCostName || name == kScratchName ||
         (name.starts_with(kReadCostName) && name.substr(kReadCostName.size()) == ".tmp");
}

Status CheckRememberedCost(FileSystem* fs, const std::string& folder) {
  const std::string path = JoinPath(folder, kReadCostName);
  TERRACE_ASSIGN_OR_RETURN(const std::string text, ReadFramedFile(fs, path, kMagic, kVersion));
  std::string disk;
  return DecodeReadCost(text, &disk).status().WithContext(path);
}

Status RemoveReadCostScratch(FileSystem* fs, const std::string& folder) {
  const Status status = fs->Remove(JoinPath(folder, kScratchName));
  return status.code() == StatusCode::kNotFound ? OkStatus() : status;
}

Result<KnownReadCost> FindReadCost(FileSystem* fs, Clock* clock, const ReadCostOptions& options) {
  KnownReadCost known;
  const auto by_default = [&](std::string why) {
    LogText(LogLevel::kDebug, fmt::format("the disk of {} was not measured: {}; reads are planned "
                                          "for one of {:.1f} us a request + {:.2f} GB/s",
                                          options.folder, why, known.cost.request_seconds * 1e6,
                                          known.cost.bytes_per_second * 1e-9));
    known.why = std::move(why);
    return known;
  };
  if (!options.read_only) {
    TERRACE_RETURN_IF_ERROR(RemoveReadCostScratch(fs, options.folder));
  }
  if (!options.direct_io) return by_default("the page cache stands before it");
  const Result<std::string> disk = fs->DiskIdentity(options.folder);
  if (!disk.ok()) return by_default(disk.status().ToString());
  if (disk->empty()) return by_default("the file system has none");
  // Not what was asked for: of `auto` there may be another one next time.
  const Result<std::unique_ptr<ReadQueue>> queue = fs->NewReadQueue(options.read_queue);
  if (!queue.ok()) return by_default(queue.status().ToString());
  const std::string_view backend = (*queue)->name();
  const std::string reader = backend == "threads"
                                 ? fmt::format("{} {}", options.read_queue.threads, backend)
                                 : std::string(backend);
  const std::string identity = IdentityOf(reader, PartBytes(options.buffer_bytes), *disk);
  // To who may not measure what a trainer with other buffers has measured says more than nothing.
  const auto fits = [&](std::string_view of_disk) {
    return of_disk == identity || (options.read_only && IsOf(of_disk, reader, *disk));
  };
  const std::string path = JoinPath(options.folder, kReadCostName);
  if (Result<ReadCost> remembered = ReadRemembered(fs, path, fits); remembered.ok()) {
    known.cost = *remembered;
    known.origin = ReadCostOrigin::kRemembered;
    return known;
  } else if (options.read_only) {
    return by_default(remembered.status().ToString());
  } else if (remembered.status().code() != StatusCode::kNotFound) {
    LogText(LogLevel::kDebug, fmt::format("{}: {}", path, remembered.status().message()));
  }
  Status removed;
  Result<ReadCost> cost = [&]() -> Result<ReadCost> {
    const Result<Files> own = OwnFiles(fs, options.folder, options.scratch_bytes);
    if (own.ok() && !own->empty()) return MeasureFiles(clock, options, queue->get(), *own);
    return MeasureScratch(fs, clock, options, queue->get(), &removed);
  }();
  TERRACE_RETURN_IF_ERROR(removed.WithContext("removing what the disk was measured on"));
  if (!cost.ok()) return by_default(cost.status().ToString());
  known.cost = *cost;
  known.origin = ReadCostOrigin::kMeasured;
  const std::string text = EncodeReadCost(*cost, identity);
  const Result<FileDigest> written =
      WriteFramedFile(fs, path, kMagic, kVersion, std::as_bytes(std::span(text)));
  if (!written.ok()) {  // The next start measures again.
    LogText(LogLevel::kDebug, written.status().WithContext("remembering the disk").ToString());
  }
  return known;
}

}  // namespace terrace
