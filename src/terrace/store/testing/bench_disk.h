// The disk below a benchmark of stores: the rate of its writes, alone and beside reads, and what
// reads of a store's own files cost. Direct I/O: no page cache takes part. Threads: one caller.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_spread.h"
#include "terrace/base/thread.h"
#include "terrace/io/file_system.h"
#include "terrace/store/read_cost.h"

namespace terrace {

// Bytes a second of a new file in `folder`, sync included. beside(bytes) is called after each
// write.
inline Result<double> MeasureDiskWrites(
    FileSystem* fs, const std::string& folder, std::uint64_t bytes, std::uint64_t seed,
    const std::function<void(std::uint64_t)>& beside = [](std::uint64_t) {}) {
  const std::string path = JoinPath(folder, "bench.disk");
  TERRACE_RETURN_IF_ERROR(RemoveTree(fs, path));
  const Clock* clock = Clock::Real();
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(std::uint64_t{8} << 20));
  Rng rng(seed);
  for (std::uint64_t at = 0; at < buffer.size(); at += 8) {
    const std::uint64_t word = rng.Next();
    std::memcpy(buffer.data() + at, &word, 8);
  }
  TERRACE_ASSIGN_OR_RETURN(auto file, fs->Open(path, OpenMode::kCreateDirect));
  const double start = clock->MonotonicSeconds();
  for (std::uint64_t at = 0; at < bytes; at += buffer.size()) {
    const std::uint64_t part = std::min(buffer.size(), bytes - at);
    TERRACE_RETURN_IF_ERROR(file->WriteAt(at, buffer.span().first(part)));
    beside(part);
  }
  TERRACE_RETURN_IF_ERROR(file->Sync());
  const double rate = static_cast<double>(bytes) / (clock->MonotonicSeconds() - start);
  TERRACE_RETURN_IF_ERROR(fs->Remove(path));
  return rate;
}

// The same, a file after another with other bytes.
inline Result<Spread> MeasureDiskWriteRounds(FileSystem* fs, const std::string& folder,
                                             std::uint64_t bytes, std::uint64_t seed,
                                             std::uint64_t rounds) {
  std::vector<double> rates;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    TERRACE_ASSIGN_OR_RETURN(rates.emplace_back(),
                             MeasureDiskWrites(fs, folder, bytes, seed + round));
  }
  return SpreadOf(rates);
}

// Makes `folder` anew, and finds what reads cost on its disk.
inline Result<KnownReadCost> CalibrateIn(FileSystem* fs, const std::string& folder,
                                         DiskQuota* quota) {
  TERRACE_RETURN_IF_ERROR(RemoveTree(fs, folder));
  TERRACE_RETURN_IF_ERROR(fs->MakeDirectories(folder));
  ReadCostOptions calibration;
  calibration.folder = folder;
  calibration.quota = quota;
  return FindReadCost(fs, Clock::Real(), calibration);
}

// Some parameter files of a store, open for direct reads.
class BenchFiles {
 public:
  // Of the stores' files that have at least so many bytes, as many as may well be open.
  static Result<BenchFiles> Open(FileSystem* fs, const std::vector<std::string>& directories,
                                 std::uint64_t least_bytes) {
    constexpr std::size_t kMost = 512;
    BenchFiles files;
    for (const std::string& directory : directories) {
      TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs->List(directory));
      for (const FileInfo& entry : entries) {
        if (!entry.name.starts_with("rows-") || entry.size < least_bytes) continue;
        if (files.owned_.size() == kMost) break;
        TERRACE_ASSIGN_OR_RETURN(auto file,
                                 fs->Open(JoinPath(directory, entry.name), OpenMode::kReadDirect));
        files.borrowed_.push_back(file.get());
        files.owned_.push_back(std::move(file));
      }
    }
    return files;
  }
  bool empty() const { return owned_.empty(); }
  const std::vector<File*>& files() const { return borrowed_; }

 private:
  std::vector<std::unique_ptr<File>> owned_;
  std::vector<File*> borrowed_;
};

// What reads cost now, on the stores' own files; `otherwise` where they are too small to tell.
inline Result<ReadCost> MeasureStoreReads(FileSystem* fs,
                                          const std::vector<std::string>& directories,
                                          const ReadQueueOptions& read_queue,
                                          std::uint64_t buffer_bytes, const ReadCost& otherwise) {
  TERRACE_ASSIGN_OR_RETURN(const BenchFiles files,
                           BenchFiles::Open(fs, directories, std::uint64_t{1} << 20));
  if (files.empty()) return otherwise;
  TERRACE_ASSIGN_OR_RETURN(auto queue, fs->NewReadQueue(read_queue));
  const Result<ReadCost> cost =
      MeasureReadCost(Clock::Real(), queue.get(), files.files(), buffer_bytes);
  if (cost.status().code() == StatusCode::kUnavailable) return otherwise;
  return cost;
}

// A thread that reads files from their beginnings to their ends, as many bytes as it is told.
class SteadyReads {
 private:
  static constexpr std::size_t kRequests = 4;
  static constexpr std::uint64_t kRequestBytes = std::uint64_t{1} << 20;
  static constexpr double kMostBehind = 16.0 * kRequestBytes;

 public:
  static constexpr std::uint64_t kLeastFileBytes = kRequests * kRequestBytes;

  // REQUIRES: files of kLeastFileBytes. All are borrowed.
  SteadyReads(ReadQueue* queue, std::vector<File*> files)
      : queue_(queue), files_(std::move(files)) {}
  ~SteadyReads() {
    {
      MutexLock lock(&mu_);
      ended_ = true;
      changed_.NotifyAll();
    }
    if (thread_.joinable()) thread_.Join();
  }
  Status Start() {
    TERRACE_ASSIGN_OR_RETURN(buffer_, HugeBuffer::Allocate(kLeastFileBytes));
    thread_ = Thread("reads", ThreadPriority::kNormal, [this] { Loop(); });
    return OkStatus();
  }
  // Blocks: while more than kMostBehind bytes are left to read.
  void Read(double bytes) {
    MutexLock lock(&mu_);
    wanted_ += bytes;
    changed_.NotifyAll();
    while (wanted_ > kMostBehind && status_.ok()) changed_.Wait(&mu_);
  }
  Status status() const {
    MutexLock lock(&mu_);
    return status_;
  }

 private:
  void Loop() {
    for (std::size_t f = 0;; f = (f + 1) % files_.size()) {
      const Result<std::uint64_t> size = files_[f]->Size();
      Status status = size.status();
      for (std::uint64_t at = 0; status.ok() && at + kLeastFileBytes <= *size;
           at += kLeastFileBytes) {
        {
          MutexLock lock(&mu_);
          while (wanted_ <= 0 && !ended_) changed_.Wait(&mu_);
          if (ended_) return;
        }
        std::array<ReadRequest, kRequests> requests;
        for (std::size_t i = 0; i < kRequests; ++i) {
          requests[i].file = files_[f];
          requests[i].offset = at + i * kRequestBytes;
          requests[i].buffer = buffer_.span().subspan(i * kRequestBytes, kRequestBytes);
        }
        status = queue_->Run(requests);
        MutexLock lock(&mu_);
        wanted_ -= static_cast<double>(kLeastFileBytes);
        changed_.NotifyAll();
      }
      if (status.ok()) continue;
      MutexLock lock(&mu_);
      status_ = status;
      changed_.NotifyAll();
      return;
    }
  }

  ReadQueue* const queue_;
  const std::vector<File*> files_;
  HugeBuffer buffer_;
  mutable Mutex mu_;
  CondVar changed_;
  double wanted_ TERRACE_GUARDED_BY(mu_) = 0;
  bool ended_ TERRACE_GUARDED_BY(mu_) = false;
  Status status_ TERRACE_GUARDED_BY(mu_);
  Thread thread_;
};

}  // namespace terrace
