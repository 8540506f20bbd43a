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
// Parts of a round a thread, each of which costs something for every file. The later ones are
// smaller: a thread that shares its core, or makes requests, holds up the others by the last one.
constexpr std::uint64_t kSharesOfAThread = 4;
// Of a round's ranges so many lie before part `i`: of four parts a thread the first ones have 4
// tenths of what is a thread's, the next ones 3, 2 and 1.
std::uint64_t RangesBefore(std::uint64_t ranges, std::uint64_t i, std::uint64_t parts) {
  const std::uint64_t sizes = std::min(parts, kSharesOfAThread), threads = parts / sizes;
  std::uint64_t before = 0;
  for (std::uint64_t part = 0; part < i; ++part) before += sizes - part / threads;
  return ranges * before / (threads * sizes * (sizes + 1) / 2);
}
// Requests in flight: those of a round, which nobody hands on while all threads are at work.
constexpr std::uint64_t kMostRequests = 1024;

}  // namespace

// Finds the newest version of each key in a part of each round and puts the places of rows into the
// index.
class StoreImpl::KeyShare {
 public:
  KeyShare(const KeyRounds* rounds, std::span<const FilePtr> files, RowIndex* index, bool visits)
      : index_(index), visits_(visits), windows_(rounds) {
    // As KeyWindows tells places.
    for (std::size_t f = 0; f < files.size(); ++f) TERRACE_CHECK(files[f]->slot == f);
  }

  // Hashes [first, last] of the round, ranges of kFillGrain that no other share has.
  Status Take(std::uint64_t first, std::uint64_t last) {
    windows_.Start(first, last);
    while (!windows_.done()) {
      TERRACE_RETURN_IF_ERROR(windows_.Next(&rows_, &deletions));
      if (!windows_.done() && (windows_.end() + 1) % kFillGrain != 0) continue;
      TERRACE_RETURN_IF_ERROR(index_->Fill(rows_));
      if (visits_) {
        for (const KeyPlace& row : rows_) visited.push_back(row.hash);
      }
      rows_.clear();
    }
    return OkStatus();
  }

  std::uint64_t newest(std::size_t f) const { return windows_.newest(f); }

  // Of the last call of Take.
  std::vector<KeyPlace> deletions;
  std::vector<std::uint64_t> visited;  // Rows; if they are wanted.

 private:
  RowIndex* const index_;
  const bool visits_;
  KeyWindows windows_;
  RawVector<KeyPlace> rows_;  // That are not in the index yet.
};

Status StoreImpl::TakeRound(WorkerGroup* workers, KeyRounds* rounds,
                            std::span<const std::unique_ptr<KeyShare>> shares,
                            std::span<RunningChecksum> checksums) {
  const std::uint64_t first = rounds->first() / kFillGrain;
  const std::uint64_t ranges = rounds->last() / kFillGrain - first + 1;
  std::vector<Status> taken(shares.size());
  const auto caller = std::this_thread::get_id();
  const auto take = [&](int task) {
    // Requests, while the other threads have begun.
    if (std::this_thread::get_id() == caller) rounds->ReadAhead();
    const auto i = static_cast<std::size_t>(task);
    for (std::size_t f = i; f < checksums.size(); f += shares.size()) {
      checksums[f].Update(rounds->fresh(f));
    }
    const std::uint64_t begin = first + RangesBefore(ranges, i, shares.size());
    const std::uint64_t end = first + RangesBefore(ranges, i + 1, shares.size());
    if (begin == end) return;
    taken[i] = shares[i]->Take(std::max(rounds->first(), begin * kFillGrain),
                               std::min(rounds->last(), end * kFillGrain - 1));
  };
  workers->Run(static_cast<int>(shares.size()), take);
  for (const Status& status : taken) TERRACE_RETURN_IF_ERROR(status);
  return OkStatus();
}

Status StoreImpl::TakeFound(std::span<const FilePtr> files, KeyShare* share,
                            const std::function<void(std::uint64_t)>& visit) {
  for (const std::uint64_t hash : share->visited) visit(hash);
  share->visited.clear();
  MutexLock lock(&mu_);
  for (const KeyPlace& key : share->deletions) ++files[SlotOfPlace(key.place)]->live_deletions;
  TERRACE_RETURN_IF_ERROR(deletions_->Fill(share->deletions));
  share->deletions.clear();
  return OkStatus();
}

Status StoreImpl::BuildIndex(const std::vector<FilePtr>& files,
                             const std::function<void(std::uint64_t)>& visit) {
  if (files.empty()) return OkStatus();
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
  // One more in the background: making a round's requests blocks where the disk's own queue is
  // full, which took the caller two fifths of his time.
  WorkerGroup workers("store-open",
                      options_.read_threads + (options_.background_compaction ? 1 : 0), nullptr,
                      ThreadPriority::kYielding);
  std::vector<std::unique_ptr<KeyShare>> shares(
      workers.size() == 1 ? 1 : static_cast<std::size_t>(options_.read_threads) * kSharesOfAThread);
  for (auto& share : shares) {
    share = std::make_unique<KeyShare>(rounds.get(), files, index, static_cast<bool>(visit));
  }
  std::vector<RunningChecksum> checksums(files.size());
  while (true) {
    TERRACE_ASSIGN_OR_RETURN(const bool more, rounds->Next());
    if (!more) break;
    TERRACE_RETURN_IF_ERROR(TakeRound(&workers, rounds.get(), shares, checksums));
    for (const auto& share : shares) TERRACE_RETURN_IF_ERROR(TakeFound(files, share.get(), visit));
  }
  read_bytes_.fetch_add(rounds->bytes_read(), std::memory_order_relaxed);
  for (std::size_t f = 0; f < files.size(); ++f) {
    if (checksums[f].Digest() == files[f]->info.keys_checksum) continue;
    return CorruptionError(fmt::format("{}: the key section at offset {} fails its checksum",
                                       files[f]->path, files[f]->info.keys_offset));
  }
  MutexLock lock(&mu_);
  for (std::size_t f = 0; f < files.size(); ++f) {
    files[f]->stale += files[f]->info.rows;
    for (const auto& share : shares) files[f]->stale -= share->newest(f);
  }
  return OkStatus();
}

}  // namespace terrace
