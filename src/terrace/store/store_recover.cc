#include <algorithm>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/raw_vector.h"
#include "terrace/store/key_windows.h"
#include "terrace/store/store_impl.h"

namespace terrace {
namespace {

// Of the buffers with which the key sections are read: 16 MiB, so that a round of some files is
// read in large requests, and with many more keys, and files, up to a fifth of what their index
// takes: a round costs what each file does, and threads that wait for one another at its end.
constexpr std::uint64_t kRecoveryBytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kBytesOfAKey = 1;
// Parts of a round a thread, so that one which shares its core, or makes requests, holds up the
// others little.
constexpr std::size_t kSharesOfAThread = 4;
// Requests in flight: those of a round, which nobody hands on while all threads are at work.
constexpr std::uint64_t kMostRequests = 1024;

}  // namespace

// Finds the newest version of each key in a part of each round and puts the places of rows into the
// index.
class StoreImpl::KeyShare {
 public:
  KeyShare(const KeyRounds* rounds, std::span<const FilePtr> files, RowIndex* index, bool visits)
      : rounds_(rounds),
        files_(files),
        index_(index),
        visits_(visits),
        windows_(rounds),
        counts_(files.size()) {
    // As KeyRounds::PlaceOf has it.
    for (std::size_t f = 0; f < files.size(); ++f) TERRACE_CHECK(files[f]->slot == f);
  }

  // Hashes [first, last] of the round, ranges of kFillGrain that no other share has.
  Status Take(std::uint64_t first, std::uint64_t last) {
    windows_.Start(first, last);
    while (!windows_.done()) {
      TERRACE_ASSIGN_OR_RETURN(const std::span<const KeyVersion> window, windows_.Next());
      TakeWindow(window);
      if (!windows_.done() && (windows_.end() + 1) % kFillGrain != 0) continue;
      TERRACE_RETURN_IF_ERROR(index_->Fill(rows_));
      if (visits_) {
        for (const KeyPlace& row : rows_) visited.push_back(row.hash);
      }
      rows_.clear();
    }
    return OkStatus();
  }

  void AddCounts() const {
    for (std::size_t f = 0; f < files_.size(); ++f) {
      files_[f]->stale += counts_[f].stale;
      files_[f]->live_deletions += counts_[f].deletions;
    }
  }

  // Of the last call of Take.
  std::vector<KeyPlace> deletions;
  std::vector<std::uint64_t> visited;  // Rows; if they are wanted.

 private:
  struct Counts {
    std::uint64_t stale = 0, deletions = 0;
  };

  void TakeWindow(std::span<const KeyVersion> window) {
    const std::size_t before = rows_.size();
    rows_.resize(before + window.size());
    KeyPlace* row = rows_.data() + before;
    for (std::size_t i = 0; i < window.size();) {
      // The newest version of a key has the greatest sequence, and of two copies the one in the
      // younger file.
      KeyVersion newest = window[i];
      for (++i; i < window.size() && window[i].hash == newest.hash; ++i) {
        KeyVersion other = window[i];
        if (SequenceOf(rounds_->VersionOf(other)) >= SequenceOf(rounds_->VersionOf(newest))) {
          std::swap(newest, other);
        }
        ++counts_[other.source()].stale;
      }
      if (newest.deletion()) {
        ++counts_[newest.source()].deletions;
        deletions.push_back({newest.hash, rounds_->PlaceOf(newest)});
      } else {
        *row++ = {newest.hash, rounds_->PlaceOf(newest)};
      }
    }
    rows_.resize(static_cast<std::size_t>(row - rows_.data()));
  }

  const KeyRounds* const rounds_;
  const std::span<const FilePtr> files_;
  RowIndex* const index_;
  const bool visits_;
  KeyWindows windows_;
  std::vector<Counts> counts_;  // (files)
  RawVector<KeyPlace> rows_;    // That are not in the index yet.
};

Status StoreImpl::TakeRound(KeyRounds* rounds, std::span<const std::unique_ptr<KeyShare>> shares,
                            std::span<RunningChecksum> checksums) {
  const std::uint64_t first = rounds->first() / kFillGrain;
  const std::uint64_t ranges = rounds->last() / kFillGrain - first + 1;
  std::vector<Status> taken(shares.size());
  const auto caller = std::this_thread::get_id();
  const auto take = [&](int task) {
    // Requests, which cost time as well, while the other threads have begun.
    if (std::this_thread::get_id() == caller) rounds->ReadAhead();
    const auto i = static_cast<std::size_t>(task);
    for (std::size_t f = i; f < checksums.size(); f += shares.size()) {
      checksums[f].Update(rounds->fresh(f));
    }
    const std::uint64_t begin = first + ranges * i / shares.size();
    const std::uint64_t end = first + ranges * (i + 1) / shares.size();
    if (begin == end) return;
    taken[i] = shares[i]->Take(std::max(rounds->first(), begin * kFillGrain),
                               std::min(rounds->last(), end * kFillGrain - 1));
  };
  const int tasks = static_cast<int>(shares.size());
  if (read_workers_ == nullptr) {
    for (int task = 0; task < tasks; ++task) take(task);
  } else {
    read_workers_->Run(tasks, take);
  }
  for (const Status& status : taken) TERRACE_RETURN_IF_ERROR(status);
  return OkStatus();
}

Status StoreImpl::TakeFound(KeyShare* share, const std::function<void(std::uint64_t)>& visit) {
  for (const std::uint64_t hash : share->visited) visit(hash);
  share->visited.clear();
  MutexLock lock(&mu_);
  TERRACE_RETURN_IF_ERROR(deletions_->Fill(share->deletions));
  share->deletions.clear();
  return OkStatus();
}

Status StoreImpl::BuildIndex(const std::vector<FilePtr>& files,
                             const std::function<void(std::uint64_t)>& visit) {
  if (files.empty()) return OkStatus();
  MutexLock reading(&read_mu_);
  ReadQueueOptions queue_options = options_.read_queue;
  queue_options.depth =
      std::max(queue_options.depth,
               static_cast<int>(std::min<std::uint64_t>(2 * files.size(), kMostRequests)));
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<ReadQueue> queue,
                           fs_->NewReadQueue(queue_options));
  std::vector<KeySection> sections;
  std::uint64_t entries = 0;
  for (const FilePtr& file : files) {
    sections.push_back(
        {file->file.get(), file->info.keys_offset, file->info.rows, file->info.version});
    entries += file->info.rows;
  }
  TERRACE_ASSIGN_OR_RETURN(
      const std::unique_ptr<KeyRounds> rounds,
      KeyRounds::Create(queue.get(), sections,
                        std::min(kRecoveryBytes + entries * kBytesOfAKey, options_.most_open_bytes),
                        kFillGrain));
  RowIndex* index;
  {
    MutexLock lock(&mu_);
    index = index_.get();
  }
  std::vector<std::unique_ptr<KeyShare>> shares(
      read_workers_ == nullptr
          ? 1
          : static_cast<std::size_t>(read_workers_->size()) * kSharesOfAThread);
  for (auto& share : shares) {
    share = std::make_unique<KeyShare>(rounds.get(), files, index, static_cast<bool>(visit));
  }
  std::vector<RunningChecksum> checksums(files.size());
  while (true) {
    TERRACE_ASSIGN_OR_RETURN(const bool more, rounds->Next());
    if (!more) break;
    TERRACE_RETURN_IF_ERROR(TakeRound(rounds.get(), shares, checksums));
    for (const auto& share : shares) TERRACE_RETURN_IF_ERROR(TakeFound(share.get(), visit));
  }
  read_bytes_.fetch_add(rounds->bytes_read(), std::memory_order_relaxed);
  for (std::size_t f = 0; f < files.size(); ++f) {
    if (checksums[f].Digest() == files[f]->info.keys_checksum) continue;
    return CorruptionError(fmt::format("{}: the key section at offset {} fails its checksum",
                                       files[f]->path, files[f]->info.keys_offset));
  }
  MutexLock lock(&mu_);
  for (const auto& share : shares) share->AddCounts();
  return OkStatus();
}

}  // namespace terrace
