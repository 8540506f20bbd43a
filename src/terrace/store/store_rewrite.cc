// One round of compaction: the newest records of its inputs are copied into outputs, file by file.
#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/store_impl.h"

namespace terrace {
namespace {

// Inputs that are in memory: one is copied while the next begins to be read.
constexpr std::size_t kLanes = 2;

}  // namespace

Status StoreImpl::Rewrite(Compactor* compactor, Compaction* round) {
  SyncPoint::Hit("store.compact.before_write");
  Status status = FindNeededDeletions(compactor, round);
  if (status.ok()) status = CopyInputs(compactor, round);
  if (status.ok()) {
    DropDeletions(*round);
    MutexLock lock(&mu_);
    for (const FilePtr& file : round->inputs) TERRACE_CHECK(file->stale == file->info.rows);
  } else {
    round->writer.reset();
    round->ring.reset();
    if (round->output != nullptr) Abandon({round->output});
  }
  std::uint64_t written = 0;
  for (const FilePtr& file : round->outputs) written += file->info.bytes;
  TERRACE_CHECK(written <= round->space);
  GiveSpace(round->space - written);
  ReleaseSlots(round->files);
  write_bytes_.fetch_add(written, std::memory_order_relaxed);
  return status;
}

Status StoreImpl::FindNeededDeletions(Compactor* compactor, Compaction* round) {
  std::uint64_t newest = 0;
  std::vector<FilePtr> others;
  {
    MutexLock lock(&mu_);
    round->keeps_deletions = true;
    for (const FilePtr& file : round->inputs) {
      if (file->info.deletions > 0) newest = std::max(newest, file->info.max_sequence);
      if (file->live_deletions == 0) continue;
      round->deletions_due = std::min(round->deletions_due, file->deletions_due);
      if (files_gone_ >= file->deletions_due) round->keeps_deletions = false;
    }
    if (round->keeps_deletions) return OkStatus();
    // An older version of a deleted key is a stale record.
    for (const FilePtr& file : LiveFiles()) {
      if (file->stale == 0 || file->info.min_sequence >= newest) continue;
      const std::vector<FilePtr>& inputs = round->inputs;
      if (std::find(inputs.begin(), inputs.end(), file) == inputs.end()) others.push_back(file);
    }
  }
  // The deletions among the inputs' keys with their ages, in the order of the hash as all sections.
  struct Deletion {
    std::uint64_t hash;
    std::uint64_t sequence;
  };
  std::vector<Deletion> candidates;
  for (const FilePtr& file : round->inputs) {
    if (file->info.deletions == 0) continue;
    TERRACE_RETURN_IF_ERROR(
        WalkKeys(compactor, *file, [&](std::uint64_t hash, std::uint64_t version) {
          if (IsDeletion(version)) candidates.push_back({hash, SequenceOf(version)});
        }));
  }
  std::sort(candidates.begin(), candidates.end(), [](const Deletion& a, const Deletion& b) {
    return a.hash != b.hash ? a.hash < b.hash : a.sequence < b.sequence;
  });
  for (const FilePtr& file : others) {
    std::size_t at = 0;
    TERRACE_RETURN_IF_ERROR(
        WalkKeys(compactor, *file, [&](std::uint64_t hash, std::uint64_t version) {
          while (at < candidates.size() && candidates[at].hash < hash) ++at;
          // Of several deletions of the key the last is the newest.
          for (; at < candidates.size() && candidates[at].hash == hash; ++at) {
            if (IsDeletion(version) || SequenceOf(version) >= candidates[at].sequence) continue;
            if (round->needed_deletions.empty() || round->needed_deletions.back() != hash) {
              round->needed_deletions.push_back(hash);
            }
          }
        }));
  }
  std::sort(round->needed_deletions.begin(), round->needed_deletions.end());
  return OkStatus();
}

Status StoreImpl::WalkKeys(Compactor* compactor, const StoredFile& file,
                           const std::function<void(std::uint64_t, std::uint64_t)>& visit) {
  SectionReads reads(compactor->reads.get());
  SectionCursor cursor(file.file.get(), file.info.keys_offset, kKeyEntryBytes, file.info.rows,
                       compactor->input, &reads);
  RunningChecksum checksum;
  cursor.set_checksum(&checksum);
  for (; !cursor.done(); cursor.Advance()) {
    if (cursor.needs_fill()) {
      if (stopping_.load(std::memory_order_relaxed)) return AbortedError("the store is closing");
      TERRACE_RETURN_IF_ERROR(cursor.Fill());
      Pace((cursor.buffered_end() - cursor.index()) * kKeyEntryBytes);
    }
    KeyEntry entry;
    std::memcpy(&entry, cursor.entry(cursor.index()), sizeof entry);
    visit(MixKey(entry.key), entry.version);
  }
  read_bytes_.fetch_add(cursor.bytes_read(), std::memory_order_relaxed);
  if (checksum.Digest() == file.info.keys_checksum) return OkStatus();
  return CorruptionError(fmt::format("{}: the key section at offset {} fails its checksum",
                                     file.path, file.info.keys_offset));
}

Status StoreImpl::CopyInputs(Compactor* compactor, Compaction* round) {
  const std::span<std::byte> buffer = compactor->input;
  const std::size_t lanes =
      std::clamp<std::size_t>(buffer.size() / SectionCursor::LeastBuffer(layout_.record_bytes), 1,
                              std::min(kLanes, round->inputs.size()));
  const std::uint64_t lane_bytes = buffer.size() / lanes / kBlockBytes * kBlockBytes;
  round->ring.emplace(compactor->output, kBlockBytes, compactor->writes.get());
  SectionReads reads(compactor->reads.get());
  std::vector<std::unique_ptr<SectionCursor>> cursors;
  // Begins to read the next input. REQUIRES: what its lane held has been copied.
  const auto start = [&] {
    const std::size_t s = cursors.size();
    const StoredFile& file = *round->inputs[s];
    cursors.push_back(std::make_unique<SectionCursor>(
        file.file.get(), kBlockBytes, layout_.record_bytes, file.info.rows,
        buffer.subspan(s % lanes * lane_bytes, lane_bytes), &reads));
  };
  while (cursors.size() < lanes) start();
  // One after the other: what was written together stays together.
  for (std::size_t s = 0; s < round->inputs.size(); ++s) {
    while (!cursors[s]->done()) {
      TERRACE_RETURN_IF_ERROR(CopyNext(compactor, round, *round->inputs[s], cursors[s].get()));
    }
    read_bytes_.fetch_add(cursors[s]->bytes_read(), std::memory_order_relaxed);
    if (cursors.size() < round->inputs.size()) start();
  }
  return round->writer == nullptr ? OkStatus() : FinishOutput(compactor, round);
}

Status StoreImpl::CopyNext(Compactor* compactor, Compaction* round, const StoredFile& file,
                           SectionCursor* cursor) {
  if (stopping_.load(std::memory_order_relaxed)) return AbortedError("the store is closing");
  TERRACE_RETURN_IF_ERROR(cursor->Fill());
  TERRACE_RETURN_IF_ERROR(JudgeRecords(file, *cursor, round));
  const std::uint64_t begin = cursor->index();
  std::uint64_t copied = 0;
  for (std::size_t i = 0; i < round->newest.size(); ++i) {
    if (round->newest[i] == 0) continue;
    TERRACE_RETURN_IF_ERROR(CopyRecord(compactor, round, cursor->entry(begin + i), file.seed,
                                       MakePlace(file.slot, begin + i)));
    ++copied;
  }
  cursor->AdvanceToFill();
  // Read, and written where they are newest.
  Pace((round->newest.size() + copied) * layout_.record_bytes);
  return OkStatus();
}

Status StoreImpl::JudgeRecords(const StoredFile& file, const SectionCursor& cursor,
                               Compaction* round) {
  const std::uint64_t begin = cursor.index();
  const std::size_t n = cursor.buffered_end() - begin;
  std::vector<std::uint64_t>& hashes = round->hashes;
  hashes.resize(n);
  round->places.resize(n);
  round->newest.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    // Before its key decides anything: a damaged key would make a needed row look stale.
    const std::byte* record = cursor.entry(begin + i);
    TERRACE_RETURN_IF_ERROR(CheckRecord(record, layout_, file.seed, file.path,
                                        cursor.entry_offset(begin + i), nullptr));
    hashes[i] = MixKey(HeadOf(record).key);
  }
  round->deletion_places.assign(n, kNoPlace);
  {
    MutexLock lock(&mu_);
    index_->Lookup(hashes, round->places.data());
    if (file.live_deletions > 0) deletions_->Lookup(hashes, round->deletion_places.data());
  }
  for (std::size_t i = 0; i < n; ++i) {
    const Place here = MakePlace(file.slot, begin + i);
    bool newest = round->places[i] == here;
    if (round->deletion_places[i] == here) {
      newest =
          round->keeps_deletions || std::binary_search(round->needed_deletions.begin(),
                                                       round->needed_deletions.end(), hashes[i]);
      if (!newest) {
        round->dropped_deletions.push_back(hashes[i]);
        round->dropped_places.push_back(here);
      }
    }
    round->newest[i] = newest ? 1 : 0;
  }
  return OkStatus();
}

Status StoreImpl::CopyRecord(Compactor* compactor, Compaction* round, const std::byte* record,
                             std::uint64_t seed, Place from) {
  if (round->writer == nullptr) TERRACE_RETURN_IF_ERROR(BeginOutput(compactor, round));
  TERRACE_RETURN_IF_ERROR(round->writer->Copy(record, seed));
  compactor->from.push_back(from);
  if (round->writer->rows() < rows_per_file_) [[likely]] {
    return OkStatus();
  }
  return FinishOutput(compactor, round);
}

Status StoreImpl::BeginOutput(Compactor* compactor, Compaction* round) {
  ParameterFileInfo planned;
  {
    MutexLock lock(&mu_);
    planned.id = next_file_id_++;
  }
  std::uint64_t space = round->space;
  for (const FilePtr& output : round->outputs) space -= output->info.bytes;
  round->output = NewFile(nullptr, planned);  // By which a failure removes it.
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                           OpenNew(planned.id, std::min(space, layout_.FileBytes(rows_per_file_))));
  round->writer = std::make_unique<ParameterFileWriter>(std::move(file), layout_, planned.id,
                                                        &compactor->keys, &*round->ring);
  const std::uint64_t rows = std::min(rows_per_file_, round->rows_left);
  round->rows_left -= rows;
  compactor->keys.entries.reserve(rows);
  compactor->from.clear();
  compactor->from.reserve(rows);
  return OkStatus();
}

Status StoreImpl::FinishOutput(Compactor* compactor, Compaction* round) {
  TERRACE_ASSIGN_OR_RETURN(const ParameterFileInfo info, round->writer->Finish());
  TERRACE_RETURN_IF_ERROR(round->ring->Await());
  const FilePtr output = NewFile(round->writer->TakeFile(), info);
  round->writer.reset();
  round->output.reset();
  rows_compacted_.fetch_add(info.rows, std::memory_order_relaxed);
  SyncPoint::Hit("store.compact.before_publish");
  PublishOutput(*compactor, round, output);
  return OkStatus();
}

void StoreImpl::PublishOutput(const Compactor& compactor, Compaction* round,
                              const FilePtr& output) {
  {
    MutexLock lock(&mu_);
    // Not live: the inputs stay part of the store until all of their rows have moved, and a commit
    // in between names them, which hold the same rows.
    Register(output, /*live=*/false);
    output->publishing = true;
    output->stale = output->info.rows;
    output->swept_points = ~std::uint64_t{0};
    for (const FilePtr& file : round->inputs) {
      output->swept_points = std::min(output->swept_points, file->swept_points);
    }
    // Until a record of it turns out to be overtaken.
    output->live_deletions = output->info.deletions;
    if (round->keeps_deletions) output->deletions_due = round->deletions_due;
    --reserved_slots_;
  }
  --round->files;
  round->outputs.push_back(output);
  const std::span<const KeyEntry> entries = compactor.keys.entries;  // By hash.
  std::vector<std::uint64_t> hashes[2];                              // Of rows, of deletions.
  std::vector<Place> from[2], to[2];
  std::uint8_t moved[kIndexBatch];
  for (std::size_t begin = 0; begin < entries.size(); begin += kIndexBatch) {
    for (const int kind : {0, 1}) {
      hashes[kind].clear();
      from[kind].clear();
      to[kind].clear();
    }
    for (const KeyEntry& entry :
         entries.subspan(begin, std::min(kIndexBatch, entries.size() - begin))) {
      const int kind = IsDeletion(entry.version) ? 1 : 0;
      const std::uint64_t row = RowOfEntry(output->info.version, /*i=*/0, entry.version);
      hashes[kind].push_back(MixKey(entry.key));
      from[kind].push_back(compactor.from[row]);
      to[kind].push_back(MakePlace(output->slot, row));
    }
    MutexLock lock(&mu_);
    for (const int kind : {0, 1}) {
      RowIndex* index = kind == 0 ? index_.get() : deletions_.get();
      index->Move(hashes[kind], from[kind].data(), to[kind].data(), moved);
      for (std::size_t i = 0; i < hashes[kind].size(); ++i) {
        if (moved[i] != 0) {
          AddStale(from[kind][i], kind == 1);
          --output->stale;
        } else if (kind == 1) {  // A write overtook the compaction.
          --output->live_deletions;
        }
      }
    }
  }
}

void StoreImpl::DropDeletions(const Compaction& round) {
  const std::size_t n = round.dropped_deletions.size();
  const std::vector<Place> nowhere(n, kNoPlace);
  std::vector<std::uint8_t> moved(n);
  for (std::size_t begin = 0; begin < n; begin += kIndexBatch) {
    const std::size_t count = std::min(kIndexBatch, n - begin);
    MutexLock lock(&mu_);
    deletions_->Move(std::span(round.dropped_deletions).subspan(begin, count),
                     round.dropped_places.data() + begin, nowhere.data(), moved.data());
    for (std::size_t i = 0; i < count; ++i) {
      if (moved[i] != 0) AddStale(round.dropped_places[begin + i], /*was_deletion=*/true);
    }
  }
}

}  // namespace terrace
