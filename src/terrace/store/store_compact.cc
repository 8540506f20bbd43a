#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/store_impl.h"

namespace terrace {
namespace {

constexpr std::size_t kMoveBatch = 4096;
// So many files of less than a quarter of the aimed size are merged: else flushes of few rows would
// leave ever more files.
constexpr std::size_t kMostSmallFiles = 16;
constexpr std::size_t kMostInputs = 64;
// Of a round, that are in memory: the rest of one is copied while the next is judged and one more
// is read.
constexpr std::size_t kLanes = 3;

}  // namespace

std::uint64_t StoreImpl::LeastFileRows() const {
  return options_.read_only ? ~std::uint64_t{0} : (rows_per_file_ + 3) / 4;
}

struct StoreImpl::CompactionInput {
  FilePtr file;
  std::unique_ptr<SectionCursor> cursor;
};

// Records of an input that are in memory, and which of them are the newest of their key.
struct StoreImpl::JudgedPart {
  const std::byte* records = nullptr;
  Place first = 0;                   // Of the first.
  std::vector<std::uint8_t> newest;  // (records) 1 or 0.
};

struct StoreImpl::Moved {
  std::uint64_t hash;
  Place from;
  bool deletion;
};

struct StoreImpl::Compaction {
  std::vector<FilePtr> inputs;          // By id.
  std::uint64_t rows_left = 0;          // Newest ones without a place in an output, at most.
  std::uint64_t space = 0;              // Reserved for outputs.
  std::uint64_t files = 0;              // Outputs at most.
  std::unique_ptr<SectionReads> reads;  // Of the sources.
  std::vector<CompactionInput> sources;
  // Hashes of the newest deletions among the inputs of which an older version is in some other
  // file, sorted; the other deletions end here.
  std::vector<std::uint64_t> needed_deletions;
  std::vector<FilePtr> outputs;
  std::optional<WriteRing> ring;  // Ends before the outputs that it writes.
  KeyEntries keys;                // The writer's.
  std::unique_ptr<ParameterFileWriter> writer;
  std::uint64_t writer_id = 0;
  std::vector<std::vector<Moved>> moved;  // By output, then by row.
  std::vector<Moved> dropped_deletions;
  JudgedPart parts[2];                         // One is judged while the other is copied.
  std::vector<std::uint64_t> hashes;           // Of the records that are judged,
  std::vector<Place> places, deletion_places;  // and what the indexes say of them.
};

FileUse StoreImpl::UseOf(const StoredFile& file) const {
  const bool deletions_too = files_gone_ >= file.deletions_due;
  return {file.info.rows, file.stale + (deletions_too ? file.live_deletions : 0)};
}

void StoreImpl::Pace(std::uint64_t bytes) {
  if (options_.background_compaction) pace_.Pass(bytes);
}

FileUse StoreImpl::StoreUse() const {
  FileUse use;
  for (const FilePtr& file : slots_) {
    if (file == nullptr || !file->live) continue;
    const FileUse of_file = UseOf(*file);
    use.rows += of_file.rows;
    use.reclaimable += of_file.reclaimable;
  }
  return use;
}

void StoreImpl::AwaitCompaction(std::uint64_t rows) {
  const auto slack = static_cast<double>(2 * rows_per_file_ + rows);
  MutexLock lock(&mu_);
  // What is staged can't be taken back, and is in use as soon as it is published.
  if (rule_.RowsAbove(UseWithStaged(StoreUse())) <= slack) return;
  ScopedTimer timer(clock_, &compaction_wait_nanos_);
  const CompactionPace::Hold hurry(&pace_, CompactionPace::kHurry);
  // A quota that leaves no room for a rewrite, or an error, is met by the write itself.
  while (rule_.RowsAbove(UseWithStaged(StoreUse())) > slack && poison_.ok() && background_.ok() &&
         !compaction_blocked_ && !DueFiles(/*freeing_only=*/false).empty()) {
    compacted_.Wait(&mu_);
  }
}

std::uint64_t StoreImpl::RunBytes() const {
  std::uint64_t bytes = quota_->used() + keep_free_.load(std::memory_order_relaxed);
  for (const FilePtr& file : retired_) bytes -= file->info.bytes;
  for (const Spare& spare : spares_) bytes -= spare.bytes;
  return bytes;
}

std::vector<FilePtr> StoreImpl::DueFiles(bool freeing_only) const {
  std::vector<std::pair<double, FilePtr>> worth;
  std::vector<FilePtr> small;
  FileUse store;
  const bool any = options_.compaction == CompactionPolicy::kModelSize && !freeing_only &&
                   rule_.TakesAny(StoreUse(), RunBytes(), layout_.record_bytes + kKeyEntryBytes);
  const auto is_worth = [&](const FileUse& use) {
    return rule_.IsWorth(use) || (any && use.reclaimable > 0);
  };
  for (const FilePtr& file : slots_) {
    if (file == nullptr || !file->live || file->publishing) continue;
    if (freeing_only && file->named_by > 0) continue;
    const FileUse use = UseOf(*file);
    store.rows += use.rows;
    store.reclaimable += use.reclaimable;
    if (is_worth(use)) {
      worth.emplace_back(rule_.Rank(use, sequence_ - file->info.max_sequence + 1), file);
    }
    if (file->info.rows < LeastFileRows()) small.push_back(file);
  }
  std::vector<FilePtr> due;
  // For space at once, what the policy would leave for later too.
  if (!worth.empty() && (freeing_only || rule_.Due(UseWithStaged(store), RunBytes()))) {
    std::sort(worth.begin(), worth.end(), [](const auto& x, const auto& y) {
      return x.first != y.first ? x.first > y.first : x.second->info.id < y.second->info.id;
    });
    for (auto& [rank, file] : worth) due.push_back(std::move(file));
  }
  if (small.size() > kMostSmallFiles) {
    std::sort(small.begin(), small.end(), [](const FilePtr& a, const FilePtr& b) {
      return a->info.rows != b->info.rows ? a->info.rows < b->info.rows : a->info.id < b->info.id;
    });
    const bool has_worth = !due.empty();
    for (FilePtr& file : small) {
      if (!has_worth || !is_worth(UseOf(*file))) due.push_back(std::move(file));
    }
  }
  return due;
}

void StoreImpl::PickInputs(bool freeing_only, Compaction* round) {
  // One round rewrites about one file's worth, so that little space is needed beside the inputs.
  std::uint64_t newest_rows = 0;
  for (const FilePtr& file : DueFiles(freeing_only)) {
    const std::uint64_t rows = file->info.rows - file->stale;
    if (!round->inputs.empty() &&
        (newest_rows + rows > rows_per_file_ || round->inputs.size() == kMostInputs)) {
      break;
    }
    newest_rows += rows;
    round->inputs.push_back(file);
  }
  std::sort(round->inputs.begin(), round->inputs.end(),
            [](const FilePtr& a, const FilePtr& b) { return a->info.id < b->info.id; });
  round->rows_left = newest_rows;
  if (newest_rows > 0) {
    round->files = (newest_rows + rows_per_file_ - 1) / rows_per_file_;
    for (std::uint64_t f = 0; f < round->files; ++f) {
      round->space += layout_.FileBytes(std::min(rows_per_file_, newest_rows - f * rows_per_file_));
    }
  }
  for (const FilePtr& file : round->inputs) {
    file->compacting = true;
    file->stale_at_pick = file->stale;
  }
}

void StoreImpl::CompactLoop() {
  while (true) {
    {
      MutexLock lock(&mu_);
      while (!stopping_.load(std::memory_order_relaxed) &&
             (!background_.ok() || !poison_.ok() ||
              !(GoneToRemove() || SweepDue() ||
                (!compaction_blocked_ && !DueFiles(/*freeing_only=*/false).empty())))) {
        compaction_wanted_.Wait(&mu_);
      }
      if (stopping_.load(std::memory_order_relaxed)) return;
    }
    Status status = RemoveGone();
    if (status.ok()) {
      MutexLock compact(&compact_mu_);
      bool compacted = false;
      bool swept = false;
      status = SweepNext(&swept);
      if (status.ok()) status = CompactRound(/*freeing_only=*/false, &compacted);
    }
    if (status.ok() || status.code() == StatusCode::kAborted) continue;
    LogText(LogLevel::kError, status.ToString());
    MutexLock lock(&mu_);
    if (background_.ok()) background_ = status;
    compacted_.NotifyAll();
  }
}

Status StoreImpl::CompactNow() {
  TERRACE_RETURN_IF_ERROR(CheckWritable());
  return CompactAll();
}

Status StoreImpl::CompactAll() {
  const CompactionPace::Hold hurry(&pace_, CompactionPace::kHurry);
  MutexLock compact(&compact_mu_);
  for (bool swept = true; swept;) TERRACE_RETURN_IF_ERROR(SweepNext(&swept));
  TERRACE_RETURN_IF_ERROR(RemoveGone());
  for (bool compacted = true; compacted;) {
    TERRACE_RETURN_IF_ERROR(CompactRound(/*freeing_only=*/false, &compacted));
  }
  return OkStatus();
}

Status StoreImpl::CompactUntil(const std::function<bool()>& enough) {
  ScopedTimer timer(clock_, &compaction_wait_nanos_);
  const CompactionPace::Hold hurry(&pace_, CompactionPace::kHurry);
  MutexLock compact(&compact_mu_);
  // No sweep: it takes too long.
  TERRACE_RETURN_IF_ERROR(RemoveGone());
  for (bool compacted = true; compacted && !enough();) {
    TERRACE_RETURN_IF_ERROR(CompactRound(/*freeing_only=*/true, &compacted));
  }
  return OkStatus();
}

Status StoreImpl::MakeRoom(std::uint64_t bytes) {
  return CompactUntil([&] { return quota_->HasFree(bytes); });
}

Status StoreImpl::CompactRound(bool freeing_only, bool* compacted) {
  *compacted = false;
  ScopedTimer timer(clock_, &compaction_nanos_);
  Compaction round;
  {
    MutexLock lock(&mu_);
    if (!poison_.ok()) return OkStatus();
    PickInputs(freeing_only, &round);
    if (round.inputs.empty()) return OkStatus();
  }
  bool frees = true;
  {
    MutexLock lock(&mu_);
    for (const FilePtr& file : round.inputs) frees &= file->named_by == 0;
  }
  const bool has_slots = ReserveSlots(round.files, /*spare=*/0);
  // What frees no space at once must leave the last checkpoint its share.
  if (!has_slots ||
      !TakeSpace(round.space, frees ? 0 : keep_free_.load(std::memory_order_relaxed)).ok()) {
    if (has_slots) ReleaseSlots(round.files);
    ReleaseInputs(&round);
    MutexLock lock(&mu_);
    compaction_blocked_ = true;  // Not a failure: the next removal of a file makes room.
    compacted_.NotifyAll();
    return OkStatus();
  }
  SyncPoint::Hit("store.compact.before_write");
  Status status = FindNeededDeletions(&round);
  if (status.ok()) status = CopyInputs(&round);
  std::uint64_t written = 0;
  for (const FilePtr& file : round.outputs) written += file->info.bytes;
  TERRACE_CHECK(written <= round.space || !status.ok());
  if (!status.ok()) {
    round.writer.reset();
    round.ring.reset();
    GiveSpace(round.space - std::min(written, round.space));
    ReleaseSlots(round.files);
    Abandon(round.outputs);
    ReleaseInputs(&round);
    if (status.code() == StatusCode::kAborted) return status;
    return Poison(status.WithContext(fmt::format("compacting {}", options_.directory)));
  }
  GiveSpace(round.space - written);
  SyncPoint::Hit("store.compact.before_publish");
  PublishCompaction(&round);
  SyncPoint::Hit("store.compact.before_remove");
  write_bytes_.fetch_add(written, std::memory_order_relaxed);
  compactions_.fetch_add(1, std::memory_order_relaxed);
  *compacted = true;
  round.sources.clear();
  round.inputs.clear();
  return RemoveGone();
}

void StoreImpl::ReleaseInputs(Compaction* round) {
  MutexLock lock(&mu_);
  for (const FilePtr& file : round->inputs) {
    if (file->live && file->stale == file->info.rows) Retire(file.get());
    file->compacting = false;
  }
  round->sources.clear();
}

Status StoreImpl::FindNeededDeletions(Compaction* round) {
  std::uint64_t deletions = 0;
  std::uint64_t newest = 0;
  std::vector<FilePtr> others;
  {
    MutexLock lock(&mu_);
    for (const FilePtr& file : round->inputs) {
      deletions += file->live_deletions;
      if (file->info.deletions > 0) newest = std::max(newest, file->info.max_sequence);
    }
    if (deletions == 0) return OkStatus();
    // An older version of a deleted key is a stale record.
    for (const FilePtr& file : LiveFiles()) {
      if (!file->compacting && file->stale > 0 && file->info.min_sequence < newest) {
        others.push_back(file);
      }
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
    TERRACE_RETURN_IF_ERROR(WalkKeys(*file, [&](std::uint64_t hash, std::uint64_t version) {
      if (IsDeletion(version)) candidates.push_back({hash, SequenceOf(version)});
    }));
  }
  std::sort(candidates.begin(), candidates.end(), [](const Deletion& a, const Deletion& b) {
    return a.hash != b.hash ? a.hash < b.hash : a.sequence < b.sequence;
  });
  for (const FilePtr& file : others) {
    std::size_t at = 0;
    TERRACE_RETURN_IF_ERROR(WalkKeys(*file, [&](std::uint64_t hash, std::uint64_t version) {
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

Status StoreImpl::WalkKeys(const StoredFile& file,
                           const std::function<void(std::uint64_t, std::uint64_t)>& visit) {
  SectionReads reads(compact_queue_.get());
  SectionCursor cursor(file.file.get(), file.info.keys_offset, kKeyEntryBytes, file.info.rows,
                       compact_buffer_.span().first(compact_input_bytes_), &reads);
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

Status StoreImpl::JudgeNext(Compaction* round, CompactionInput* source, JudgedPart* part) {
  SectionCursor& cursor = *source->cursor;
  const StoredFile& file = *source->file;
  part->newest.clear();
  if (stopping_.load(std::memory_order_relaxed)) return AbortedError("the store is closing");
  TERRACE_RETURN_IF_ERROR(cursor.Fill());
  const std::uint64_t begin = cursor.index();
  const std::size_t n = cursor.buffered_end() - begin;
  std::vector<std::uint64_t>& hashes = round->hashes;
  std::vector<Place>& places = round->places;
  std::vector<Place>& deletion_places = round->deletion_places;
  hashes.resize(n);
  places.resize(n);
  deletion_places.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    // Before its key decides anything: a damaged key would make a needed row look stale.
    const std::byte* record = cursor.entry(begin + i);
    TERRACE_RETURN_IF_ERROR(CheckRecord(record, layout_, file.seed, file.path,
                                        cursor.entry_offset(begin + i), nullptr));
    hashes[i] = MixKey(HeadOf(record).key);
  }
  {
    MutexLock lock(&mu_);
    index_->Lookup(hashes, places.data());
    if (file.live_deletions > 0) {
      deletions_->Lookup(hashes, deletion_places.data());
    } else {
      std::fill(deletion_places.begin(), deletion_places.end(), kNoPlace);
    }
  }
  part->records = cursor.entry(begin);
  part->first = MakePlace(file.slot, begin);
  part->newest.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    const Place here = part->first + i;
    bool newest = places[i] == here;
    if (deletion_places[i] == here) {
      newest = std::binary_search(round->needed_deletions.begin(), round->needed_deletions.end(),
                                  hashes[i]);
      if (!newest) round->dropped_deletions.push_back({hashes[i], here, true});
    }
    part->newest[i] = newest ? 1 : 0;
  }
  cursor.AdvanceToFill();
  const auto newest = std::count(part->newest.begin(), part->newest.end(), 1);
  // Read, and written where they are newest.
  Pace((n + static_cast<std::uint64_t>(newest)) * layout_.record_bytes);
  return OkStatus();
}

Status StoreImpl::CopyPart(Compaction* round, const JudgedPart& part) {
  for (std::size_t i = 0; i < part.newest.size(); ++i) {
    if (part.newest[i] == 0) continue;
    TERRACE_RETURN_IF_ERROR(
        CopyRow(round, part.records + i * layout_.record_bytes, part.first + i));
  }
  return OkStatus();
}

Status StoreImpl::CopyRow(Compaction* round, const std::byte* record, Place from) {
  const RecordHead head = HeadOf(record);
  if (round->writer == nullptr) {
    {
      MutexLock lock(&mu_);
      round->writer_id = next_file_id_++;
    }
    std::uint64_t space = round->space;
    for (const FilePtr& output : round->outputs) space -= output->info.bytes;
    ParameterFileInfo planned;
    planned.id = round->writer_id;
    round->outputs.push_back(NewFile(nullptr, planned));
    TERRACE_ASSIGN_OR_RETURN(
        std::unique_ptr<File> file,
        OpenNew(round->writer_id, std::min(space, layout_.FileBytes(rows_per_file_))));
    round->writer = std::make_unique<ParameterFileWriter>(
        std::move(file), layout_, round->writer_id, &round->keys, &*round->ring);
    const std::uint64_t rows = std::min(rows_per_file_, round->rows_left);
    round->rows_left -= rows;
    round->keys.entries.reserve(rows);
    round->moved.emplace_back().reserve(rows);
  }
  const std::span<const std::byte> payload =
      IsDeletion(head.version)
          ? std::span<const std::byte>()
          : std::span<const std::byte>(record + kRecordHeadBytes, layout_.row_bytes);
  TERRACE_RETURN_IF_ERROR(round->writer->Add(head.key, head.version, payload));
  round->moved.back().push_back({MixKey(head.key), from, IsDeletion(head.version)});
  if (round->writer->rows() == rows_per_file_) return FinishOutput(round);
  return OkStatus();
}

Status StoreImpl::FinishOutput(Compaction* round) {
  if (round->writer == nullptr) return OkStatus();
  TERRACE_ASSIGN_OR_RETURN(const ParameterFileInfo info, round->writer->Finish());
  round->outputs.back() = NewFile(round->writer->TakeFile(), info);
  round->writer.reset();
  rows_compacted_.fetch_add(info.rows, std::memory_order_relaxed);
  return OkStatus();
}

Status StoreImpl::CopyInputs(Compaction* round) {
  const std::size_t lanes = std::clamp<std::size_t>(
      compact_input_bytes_ / SectionCursor::LeastBuffer(layout_.record_bytes), 1,
      std::min(kLanes, round->inputs.size()));
  const std::uint64_t lane_bytes = compact_input_bytes_ / lanes / kBlockBytes * kBlockBytes;
  round->reads = std::make_unique<SectionReads>(compact_queue_.get());
  round->ring.emplace(compact_buffer_.span().subspan(compact_input_bytes_), kBlockBytes,
                      compact_write_queue_.get());
  round->sources.resize(round->inputs.size());
  // Begins to read it. REQUIRES: what its lane held has been copied.
  const auto start = [&](std::size_t s) TERRACE_REQUIRES(compact_mu_) {
    CompactionInput& source = round->sources[s];
    source.file = round->inputs[s];
    source.cursor = std::make_unique<SectionCursor>(
        source.file->file.get(), kBlockBytes, layout_.record_bytes, source.file->info.rows,
        compact_buffer_.span().subspan(s % lanes * lane_bytes, lane_bytes), round->reads.get(),
        SectionCursor::kMostParts);
  };
  // One after the other: what was written together stays together. What was judged is copied while
  // the next is read and judged, which is this thread's, as the queue of reads is.
  constexpr int kJudge = 0, kCopy = 1;
  JudgedPart *next = &round->parts[0], *last = &round->parts[1];
  std::size_t opened = 0;
  for (; opened + 1 < lanes; ++opened) start(opened);
  for (std::size_t s = 0; s < round->sources.size(); ++s) {
    CompactionInput& source = round->sources[s];
    if (lanes == 1) {
      TERRACE_RETURN_IF_ERROR(CopyPart(round, *last));
      last->newest.clear();
      start(opened++);
    }
    while (!source.cursor->done()) {
      Status copied, judged;
      const auto step = [&](int task) {
        if (task == kJudge) {
          judged = JudgeNext(round, &source, next);
        } else {
          copied = CopyPart(round, *last);
        }
      };
      if (source.cursor->keeps_last()) {
        compact_workers_->Run(2, step);
      } else {
        step(kCopy);
        if (copied.ok()) step(kJudge);
      }
      TERRACE_RETURN_IF_ERROR(copied);
      TERRACE_RETURN_IF_ERROR(judged);
      std::swap(next, last);
      // The end of the source before is copied by now.
      if (opened < std::min(s + lanes, round->sources.size())) start(opened++);
    }
    read_bytes_.fetch_add(source.cursor->bytes_read(), std::memory_order_relaxed);
  }
  TERRACE_RETURN_IF_ERROR(CopyPart(round, *last));
  TERRACE_RETURN_IF_ERROR(FinishOutput(round));
  return round->ring->Await();
}

void StoreImpl::PublishCompaction(Compaction* round) {
  {
    MutexLock lock(&mu_);
    std::uint64_t swept_points = ~std::uint64_t{0};
    for (const FilePtr& file : round->inputs) {
      swept_points = std::min(swept_points, file->swept_points);
    }
    for (const FilePtr& file : round->outputs) {
      Register(file, /*live=*/false);
      file->swept_points = swept_points;
      // Until a record of it turns out to be overtaken.
      file->live_deletions = file->info.deletions;
    }
    reserved_slots_ -= round->files;
  }
  // The inputs stay part of the store until all of their rows have moved: a commit in between names
  // them, and they hold the same rows.
  for (std::size_t o = 0; o < round->outputs.size(); ++o) {
    const std::vector<Moved>& moved = round->moved[o];
    for (std::size_t begin = 0; begin < moved.size(); begin += kMoveBatch) {
      MoveBatch(std::span(moved).subspan(begin, std::min(kMoveBatch, moved.size() - begin)),
                round->outputs[o].get(), begin);
    }
  }
  for (std::size_t begin = 0; begin < round->dropped_deletions.size(); begin += kMoveBatch) {
    MoveBatch(std::span(round->dropped_deletions)
                  .subspan(begin, std::min(kMoveBatch, round->dropped_deletions.size() - begin)),
              nullptr, 0);
  }
  MutexLock lock(&mu_);
  for (const FilePtr& file : round->outputs) {
    file->live = true;
    if (file->stale == file->info.rows) Retire(file.get());
  }
  for (const FilePtr& file : round->inputs) {
    TERRACE_CHECK(file->stale == file->info.rows);
    Retire(file.get());
    file->compacting = false;
  }
  compacted_.NotifyAll();
}

void StoreImpl::MoveBatch(std::span<const Moved> items, StoredFile* output,
                          std::uint64_t first_row) {
  std::vector<std::uint64_t> hashes[2];  // Of rows, of deletions.
  std::vector<Place> from[2], to[2];
  for (std::size_t i = 0; i < items.size(); ++i) {
    const int kind = items[i].deletion ? 1 : 0;
    hashes[kind].push_back(items[i].hash);
    from[kind].push_back(items[i].from);
    to[kind].push_back(output == nullptr ? kNoPlace : MakePlace(output->slot, first_row + i));
  }
  std::vector<std::uint8_t> moved(items.size());
  MutexLock lock(&mu_);
  for (int kind : {0, 1}) {
    RowIndex* index = kind == 0 ? index_.get() : deletions_.get();
    index->Move(hashes[kind], from[kind].data(), to[kind].data(), moved.data());
    for (std::size_t i = 0; i < hashes[kind].size(); ++i) {
      if (moved[i] != 0) {
        AddStale(from[kind][i], kind == 1);
      } else if (output != nullptr) {  // A write overtook the compaction.
        ++output->stale;
        if (kind == 1) --output->live_deletions;
      }
    }
  }
}

bool StoreImpl::GoneToRemove() const {
  for (const FilePtr& file : retired_) {
    if (IsGone(file)) return true;
  }
  return false;
}

}  // namespace terrace
