#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/prefetch.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/units.h"
#include "terrace/store/radix_sort.h"
#include "terrace/store/store_impl.h"

namespace terrace {

namespace {
// Read at the same time to tell which keys are there.
constexpr std::size_t kCandidateBytes = 512 << 10;

// The first row of file `file` of a write of so many files.
std::size_t FileBegin(std::uint64_t file, std::uint64_t files, std::size_t rows) {
  return file * rows / files;
}
}  // namespace

struct StoreImpl::Candidate {
  std::size_t sorted;  // Its place in the order of the write.
  FilePtr file;
  std::uint64_t row;
};

class StoreImpl::WriteTimer {
 public:
  explicit WriteTimer(StoreImpl* store) : store_(store) {
    if (store_->options_.write_clock != nullptr) store_->options_.write_clock->Begin();
    MutexLock lock(&store_->mu_);
    store_->write_time_.Begin(store_->clock_);
  }
  ~WriteTimer() {
    if (store_->options_.write_clock != nullptr) store_->options_.write_clock->End();
    MutexLock lock(&store_->mu_);
    store_->write_time_.End(store_->clock_);
  }
  WriteTimer(const WriteTimer&) = delete;
  WriteTimer& operator=(const WriteTimer&) = delete;

 private:
  StoreImpl* const store_;
};

Status StoreImpl::Write(std::span<const Key> keys, std::span<const std::byte* const> rows,
                        std::span<const std::uint8_t> stored) {
  TERRACE_CHECK(keys.size() == rows.size() && (stored.empty() || stored.size() == keys.size()));
  MutexLock lock(&write_mu_);
  return WriteRecords(keys, rows, stored);
}

// Files that the index does not lead to yet.
class StoreImpl::StagedFiles final : public StagedRows {
 public:
  explicit StagedFiles(StoreImpl* store) : store_(store) {}
  ~StagedFiles() override {
    store_->ForgetStaged(this);
    store_->Abandon(files);
    store_->ReleaseSlots(slots);
    store_->GiveOrder(std::move(order));
  }

  std::vector<SortedKey> order;
  std::vector<FilePtr> files;
  std::uint64_t bytes = 0;
  std::uint64_t slots = 0;  // Reserved, until it is published.
  std::uint64_t sequence = 0;
  bool deletion = false;
  // Guarded by the store's mu_: what is left of them in its counts of what is staged.
  std::uint64_t rows = 0, overlap = 0;

 private:
  StoreImpl* const store_;
};

Result<std::unique_ptr<StagedRows>> StoreImpl::Stage(std::span<const Key> keys,
                                                     std::span<const std::byte* const> rows,
                                                     std::span<const std::uint8_t> stored) {
  TERRACE_CHECK(!keys.empty() && keys.size() == rows.size());
  TERRACE_CHECK(stored.empty() || stored.size() == keys.size());
  MutexLock lock(&write_mu_);
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<StagedFiles> staged, StageRecords(keys, rows, stored));
  return std::unique_ptr<StagedRows>(std::move(staged));
}

Result<std::unique_ptr<StagedRows>> StoreImpl::StageFrom(
    const std::function<Status(RowSink*)>& fill) {
  MutexLock lock(&write_mu_);
  TERRACE_RETURN_IF_ERROR(BeginWrite());
  const auto next_file = [&](StagedFiles* staged, std::uint64_t expected)
                             TERRACE_REQUIRES(write_mu_) -> Result<std::uint64_t> {
    const std::uint64_t rows = std::min(expected, rows_per_file_);
    if (options_.background_compaction) AwaitCompaction(rows);
    TERRACE_RETURN_IF_ERROR(ReserveUnderPressure(layout_.FileBytes(rows), 1));
    staged->bytes += layout_.FileBytes(rows);
    ++staged->slots;
    return rows;
  };
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<StagedFiles> staged,
                           StageFiles(/*deletion=*/false, next_file, fill));
  return std::unique_ptr<StagedRows>(std::move(staged));
}

Status StoreImpl::Publish(std::unique_ptr<StagedRows> staged) {
  return PublishBlocks(staged.get(), 0);
}

void StoreImpl::ExpectRows(std::uint64_t rows) {
  MutexLock lock(&mu_);
  expected_keys_ = index_->size() + rows;
}

Status StoreImpl::PublishBlocks(StagedRows* staged, std::int64_t rows_change) {
  return PublishStaged(static_cast<StagedFiles*>(staged), rows_change);
}

Status StoreImpl::Erase(std::span<const Key> keys) {
  MutexLock lock(&write_mu_);
  // A key that is not there needs no record; so a deletion always has an older version on disk.
  std::vector<SortedKey> wanted;
  for (const Key key : keys) {
    wanted.push_back({MixKey(key), static_cast<std::uint32_t>(wanted.size()), kUnknownKey});
  }
  TERRACE_RETURN_IF_ERROR(FindStored(wanted));
  std::vector<Key> present;
  for (const SortedKey& key : wanted) {
    if (key.stored()) present.push_back(keys[key.index]);
  }
  return WriteRecords(present, {}, std::vector<std::uint8_t>(present.size(), kStoredKey));
}

Status StoreImpl::WriteRecords(std::span<const Key> keys, std::span<const std::byte* const> rows,
                               std::span<const std::uint8_t> stored) {
  if (keys.empty()) return CheckWritable();
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<StagedFiles> staged,
                           StageRecords(keys, rows, stored));
  return PublishStaged(staged.get(), 0);
}

std::vector<StoreImpl::SortedKey> StoreImpl::TakeOrder() {
  MutexLock lock(&mu_);
  if (spare_orders_.empty()) return {};
  std::vector<SortedKey> order = std::move(spare_orders_.back());
  spare_orders_.pop_back();
  return order;
}

void StoreImpl::GiveOrder(std::vector<SortedKey> order) {
  constexpr std::size_t kSpareOrders = 2;  // One staged, one published.
  MutexLock lock(&mu_);
  if (spare_orders_.size() < kSpareOrders) spare_orders_.push_back(std::move(order));
}

Status StoreImpl::BeginWrite() {
  TERRACE_RETURN_IF_ERROR(CheckWritable());
  // Before the write, because a failure afterwards could no longer say that nothing changed.
  if (!options_.background_compaction) TERRACE_RETURN_IF_ERROR(CompactAll());
  return RemoveGone();
}

Result<std::unique_ptr<StoreImpl::StagedFiles>> StoreImpl::StageRecords(
    std::span<const Key> keys, std::span<const std::byte* const> rows,
    std::span<const std::uint8_t> stored) {
  TERRACE_RETURN_IF_ERROR(BeginWrite());
  if (options_.background_compaction) AwaitCompaction(keys.size());
  TERRACE_CHECK(keys.size() <= std::numeric_limits<std::uint32_t>::max());
  const std::uint64_t file_count = (keys.size() + rows_per_file_ - 1) / rows_per_file_;
  const auto rows_of = [&](std::uint64_t f) {
    return FileBegin(f + 1, file_count, keys.size()) - FileBegin(f, file_count, keys.size());
  };
  const auto next_file = [&](StagedFiles* staged, std::uint64_t /*expected*/)
                             TERRACE_REQUIRES(write_mu_) -> Result<std::uint64_t> {
    if (staged->files.empty()) {  // The first: space for all of them.
      std::uint64_t bytes = 0;
      for (std::uint64_t f = 0; f < file_count; ++f) bytes += layout_.FileBytes(rows_of(f));
      TERRACE_RETURN_IF_ERROR(ReserveUnderPressure(bytes, file_count));
      staged->bytes = bytes;
      staged->slots = file_count;
    }
    return rows_of(staged->files.size());
  };
  const auto fill = [&](RowSink* sink) -> Status {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (!rows.empty() && i + kPrefetchRows < keys.size()) {
        PrefetchRead(rows[i + kPrefetchRows],
                     std::min<std::size_t>(layout_.row_bytes, kMostPrefetchBytes));
      }
      const std::span<const std::byte> payload =
          rows.empty() ? std::span<const std::byte>()
                       : std::span<const std::byte>(rows[i], layout_.row_bytes);
      TERRACE_RETURN_IF_ERROR(
          sink->Add(keys[i], payload, stored.empty() ? kUnknownKey : stored[i]));
    }
    return OkStatus();
  };
  return StageFiles(rows.empty(), next_file, fill);
}

Result<std::unique_ptr<StoreImpl::StagedFiles>> StoreImpl::StageFiles(bool deletion,
                                                                      const NextFile& next_file,
                                                                      const Fill& fill) {
  WriteTimer timer(this);
  auto staged = std::make_unique<StagedFiles>(this);
  staged->deletion = deletion;
  staged->order = TakeOrder();
  staged->order.clear();
  {
    MutexLock state(&mu_);
    staged->sequence = ++sequence_;
  }
  SyncPoint::Hit("store.write.before_data");
  Status status;
  bool failed;
  std::uint64_t rows;
  {
    RowSink sink(this, &next_file, write_buffer_.span(), &write_keys_, staged.get());
    status = fill(&sink);
    if (status.ok()) status = sink.End();
    failed = sink.failed_;
    rows = sink.rows_;
  }
  if (!status.ok()) {
    std::uint64_t written = 0;
    for (const FilePtr& file : staged->files) written += file->info.bytes;
    GiveSpace(staged->bytes - written);
    staged.reset();
    if (!failed) return status;
    return Poison(status.WithContext(fmt::format("writing {} rows of table '{}' to {}", rows,
                                                 options_.table, options_.directory)));
  }
  CountStaged(staged.get());
  SyncPoint::Hit("store.write.after_data");
  return staged;
}

StoreImpl::RowSink::RowSink(StoreImpl* store, const NextFile* next_file,
                            std::span<std::byte> buffer, KeyEntries* keys, StagedFiles* staged)
    : store_(store),
      next_file_(next_file),
      keys_(keys),
      staged_(staged),
      version_(staged->sequence | (staged->deletion ? kDeletionBit : 0)),
      ring_(buffer, kBlockBytes, store->write_queue_.get()) {}

Status StoreImpl::RowSink::Failed(Status status) {
  failed_ = failed_ || !status.ok();
  return status;
}

Status StoreImpl::RowSink::Add(Key key, std::span<const std::byte> row, std::uint8_t stored) {
  ++rows_;
  if (!writer_) TERRACE_RETURN_IF_ERROR(Begin());
  stored_.push_back(stored);
  Status status = writer_->Add(key, version_, row);
  if (status.ok() && writer_->rows() < most_rows_) [[likely]] {
    return status;
  }
  return status.ok() ? FinishFile() : Failed(std::move(status));
}

Status StoreImpl::RowSink::Begin() {
  use_.reset();
  TERRACE_ASSIGN_OR_RETURN(most_rows_,
                           (*next_file_)(staged_, std::max(expected_, kMoreThanExpected)));
  use_.emplace(&store_->pace_, CompactionPace::kUse);
  // Whatever becomes of it, Abandon removes it by this entry.
  ParameterFileInfo planned;
  planned.bytes = store_->layout_.FileBytes(most_rows_);
  {
    MutexLock lock(&store_->mu_);
    planned.id = store_->next_file_id_++;
  }
  store_->pace_.Wrote(planned.bytes);
  staged_->files.push_back(store_->NewFile(nullptr, planned));
  Result<std::unique_ptr<File>> file = store_->OpenNew(planned.id, planned.bytes);
  TERRACE_RETURN_IF_ERROR(Failed(file.status()));
  writer_.emplace(*std::move(file), store_->layout_, planned.id, keys_, &ring_);
  stored_.clear();
  return OkStatus();
}

Status StoreImpl::RowSink::FinishFile() {
  Result<ParameterFileInfo> info = writer_->Finish();
  TERRACE_RETURN_IF_ERROR(Failed(info.status()));
  FilePtr& file = staged_->files.back();
  TERRACE_CHECK(info->bytes == store_->layout_.FileBytes(info->rows) && info->rows <= most_rows_);
  expected_ -= std::min(expected_, info->rows);
  const std::uint64_t unused = file->info.bytes - info->bytes;
  store_->GiveSpace(unused);
  staged_->bytes -= unused;
  file = store_->NewFile(writer_->TakeFile(), *info);
  writer_.reset();
  // The writer has sorted them.
  std::vector<SortedKey>& order = staged_->order;
  const std::size_t first = order.size();
  for (const KeyEntry& entry : keys_->entries) {
    const std::uint64_t row = RowOfEntry(info->version, /*i=*/0, entry.version);
    order.push_back({MixKey(entry.key), static_cast<std::uint32_t>(first + row), stored_[row]});
  }
  for (std::size_t i = first + 1; i < order.size(); ++i) {
    TERRACE_CHECK(order[i - 1].hash < order[i].hash);
  }
  return OkStatus();
}

Status StoreImpl::RowSink::End() {
  if (writer_) TERRACE_RETURN_IF_ERROR(FinishFile());
  return Failed(ring_.Await());
}

void StoreImpl::CountStaged(StagedFiles* staged) {
  std::uint64_t overlap = 0;
  for (const SortedKey& key : staged->order) overlap += key.stored() ? 1 : 0;
  MutexLock lock(&mu_);
  staged->rows = staged->order.size();
  staged->overlap = overlap;
  staged_rows_ += staged->rows;
  staged_overlap_ += overlap;
  compaction_wanted_.NotifyAll();
}

void StoreImpl::ForgetStaged(StagedFiles* staged) {
  MutexLock lock(&mu_);
  staged_rows_ -= std::exchange(staged->rows, 0);
  staged_overlap_ -= std::exchange(staged->overlap, 0);
  compacted_.NotifyAll();  // A write that waits may have less to wait for.
}

Status StoreImpl::PublishStaged(StagedFiles* staged, std::int64_t rows_change) {
  WriteTimer timer(this);
  // Nothing has changed yet, should one of these fail.
  TERRACE_RETURN_IF_ERROR(FindStored(staged->order));
  TERRACE_RETURN_IF_ERROR(ReserveIndex(*staged));
  {
    // Part of the store before the first old version becomes stale: a commit in between must not
    // name neither.
    MutexLock state(&mu_);
    TERRACE_CHECK(published_sequence_ < staged->sequence);
    published_sequence_ = staged->sequence;
    for (const FilePtr& file : staged->files) {
      Register(file, /*live=*/true);
      file->publishing = true;
      if (options_.expiry != nullptr) file->swept_points = options_.expiry->points();
      if (staged->deletion) file->live_deletions = file->info.rows;
    }
    reserved_slots_ -= std::exchange(staged->slots, 0);
    CountFiles();
    staged_rows_ -= std::exchange(staged->rows, 0);
    rows_in_blocks_ += static_cast<std::uint64_t>(rows_change);
  }
  SyncPoint::Hit("store.write.before_index");
  PublishFiles(staged);
  ForgetStaged(staged);
  staged->files.clear();
  write_bytes_.fetch_add(staged->bytes, std::memory_order_relaxed);
  rows_written_.fetch_add(staged->order.size(), std::memory_order_relaxed);
  return OkStatus();
}

bool StoreImpl::ReserveSlots(std::uint64_t files, std::uint64_t spare, std::uint64_t keep_files) {
  MutexLock lock(&mu_);
  if (used_slots() + files + spare > index_->max_slots()) return false;
  if (!quota_->TakeFiles(files, spare + keep_files)) return false;
  counted_slots_ += files;
  reserved_slots_ += files;
  return true;
}

void StoreImpl::ReleaseSlots(std::uint64_t files) {
  MutexLock lock(&mu_);
  reserved_slots_ -= files;
  CountFiles();
}

Status StoreImpl::NoSlots(std::uint64_t files) const {
  MutexLock lock(&mu_);
  if (used_slots() + files + kFilesForCompaction > index_->max_slots()) {
    return OutOfRoomError(fmt::format(
        "{} holds {} parameter files and is to get {} more, but its index has places for {}: "
        "choose larger files (ssd.file_size) or more shards (ssd.shards)",
        options_.directory, used_slots(), files, index_->max_slots()));
  }
  return OutOfRoomError(fmt::format(
      "{} is to get {} more parameter files, of which the run has {} open, and the system lets it "
      "open {}, some of which are for compaction and a last checkpoint: raise that limit (ulimit "
      "-n), or choose larger files (ssd.file_size)",
      options_.directory, files, quota_->files(), quota_->limit_files()));
}

Status StoreImpl::ReserveUnderPressure(std::uint64_t bytes, std::uint64_t files) {
  bool has_slots = true;
  const auto reserve = [&]() -> Status {
    has_slots = ReserveSlots(files, kFilesForCompaction,
                             writes_keep_files_.load(std::memory_order_relaxed));
    if (!has_slots) return NoSlots(files);
    const Status taken = TakeSpace(bytes, writes_keep_free_.load(std::memory_order_relaxed));
    if (!taken.ok()) ReleaseSlots(files);
    return taken;
  };
  Status status = reserve();
  if (status.ok()) return status;
  while (true) {
    // What frees space at once; of places merging whatever is due frees some.
    const bool merges = !has_slots;
    TERRACE_RETURN_IF_ERROR(CompactUntil(merges ? RoundFor::kCaller : RoundFor::kSpace, [&] {
      status = reserve();
      return status.ok();
    }));
    if (status.ok()) return status;
    if (!has_slots) {
      if (merges) break;  // No more than that helps: a checkpoint takes no place.
      continue;
    }
    // Likewise elsewhere; then old checkpoints, after each of which files are removed that only it
    // named.
    if (!options_.on_pressure || keep_checkpoints_.load(std::memory_order_relaxed)) break;
    const std::uint64_t keep_free = writes_keep_free_.load(std::memory_order_relaxed);
    TERRACE_ASSIGN_OR_RETURN(const bool more, options_.on_pressure(bytes + keep_free));
    if (!more) break;
  }
  return status.WithContext(
      fmt::format("writing {} to {}, after compaction", FormatBytes(bytes), options_.directory));
}

Status StoreImpl::FindStored(std::span<SortedKey> order) {
  const ReadInFlight in_flight(this);  // Ends when the candidates have let their files go.
  std::vector<Candidate> candidates;
  std::vector<std::size_t> unknown;  // By place in the order.
  std::uint64_t hashes[kIndexBatch];
  Place places[kIndexBatch];
  for (std::size_t next = 0; next < order.size();) {
    unknown.clear();
    for (; next < order.size() && unknown.size() < kIndexBatch; ++next) {
      if (order[next].known != kUnknownKey) continue;
      hashes[unknown.size()] = order[next].hash;
      unknown.push_back(next);
    }
    MutexLock lock(&mu_);
    index_->Lookup({hashes, unknown.size()}, places);
    for (std::size_t i = 0; i < unknown.size(); ++i) {
      order[unknown[i]].known = kNewKey;
      if (places[i] == kNoPlace) continue;
      candidates.push_back({unknown[i], slots_[SlotOfPlace(places[i])], RowOfPlace(places[i])});
    }
  }
  return ReadCandidates(order, candidates);
}

Status StoreImpl::ReadCandidates(std::span<SortedKey> order,
                                 std::span<const Candidate> candidates) {
  if (candidates.empty()) return OkStatus();
  const std::uint64_t most_bytes = AlignUp(layout_.record_bytes, kBlockBytes) + kBlockBytes;
  const std::size_t together =
      std::clamp<std::size_t>(kCandidateBytes / most_bytes, 1, candidates.size());
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(together * most_bytes));
  ReadQueueOptions queue_options = options_.read_queue;
  queue_options.buffer = buffer.span();
  TERRACE_ASSIGN_OR_RETURN(const auto queue, fs_->NewReadQueue(queue_options));
  std::vector<ReadRequest> requests;
  for (std::size_t begin = 0; begin < candidates.size(); begin += requests.size()) {
    requests.assign(std::min(together, candidates.size() - begin), ReadRequest());
    for (std::size_t r = 0; r < requests.size(); ++r) {
      const Candidate& candidate = candidates[begin + r];
      requests[r].file = candidate.file->file.get();
      const std::uint64_t sector = requests[r].file->read_alignment();
      const std::uint64_t offset = layout_.RecordOffset(candidate.row);
      requests[r].offset = offset / sector * sector;
      requests[r].buffer = buffer.span().subspan(
          r * most_bytes, AlignUp(offset + layout_.record_bytes, sector) - requests[r].offset);
    }
    TERRACE_RETURN_IF_ERROR(queue->Run(requests));
    for (std::size_t r = 0; r < requests.size(); ++r) {
      TERRACE_RETURN_IF_ERROR(TakeCandidate(order, candidates[begin + r], requests[r]));
    }
  }
  return OkStatus();
}

Status StoreImpl::TakeCandidate(std::span<SortedKey> order, const Candidate& candidate,
                                const ReadRequest& request) {
  TERRACE_RETURN_IF_ERROR(CheckWhole(request));
  const std::string& path = candidate.file->path;
  read_bytes_.fetch_add(request.bytes_read, std::memory_order_relaxed);
  read_requests_.fetch_add(1, std::memory_order_relaxed);
  SortedKey& key = order[candidate.sorted];
  const Key wanted = UnmixKey(key.hash);
  const std::uint64_t offset = layout_.RecordOffset(candidate.row);
  const std::byte* record = request.buffer.data() + (offset - request.offset);
  TERRACE_RETURN_IF_ERROR(
      CheckRecord(record, layout_, candidate.file->seed, path, offset, &wanted));
  key.known = HeadOf(record).key == wanted ? kStoredKey : kNewKey;
  return key.stored() ? OkStatus() : CheckMistaken(record, wanted, path, offset);
}

FilePtr StoreImpl::NewFile(std::unique_ptr<File> file, const ParameterFileInfo& info) const {
  auto stored = std::make_shared<StoredFile>();
  stored->info = info;
  stored->path = PathOf(info.id);
  stored->file = std::move(file);
  stored->seed = layout_.CheckSeed(info.id);
  return stored;
}

Status StoreImpl::ReserveIndex(const StagedFiles& staged) {
  std::vector<std::uint64_t> added[2];  // Rows, deletions.
  for (const SortedKey& key : staged.order) {
    if (staged.deletion || !key.stored()) added[staged.deletion ? 1 : 0].push_back(key.hash);
  }
  if (staged.files.size() > 1) {
    std::vector<std::uint64_t> spare;
    SortSpread(&added[0], &spare, 64, [](std::uint64_t hash) { return hash; });
  }
  // Readers have their turns in between: room is made range by range, for all new keys of a range.
  const std::span<const std::uint64_t> rows = added[0];
  for (std::size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    end = std::min(begin + kIndexBatch, rows.size());
    while (end < rows.size() && rows[end] / kFillGrain == rows[end - 1] / kFillGrain) ++end;
    MutexLock lock(&mu_);
    TERRACE_RETURN_IF_ERROR(index_->Reserve(rows.subspan(begin, end - begin), expected_keys_));
  }
  MutexLock lock(&mu_);
  return deletions_->Reserve(added[1], /*expected=*/0);
}

void StoreImpl::PublishFiles(StagedFiles* staged) {
  const std::span<const SortedKey> order = staged->order;
  Place places[kIndexBatch];
  std::size_t begin = 0;
  for (const FilePtr& file : staged->files) {
    const std::size_t file_begin = begin, file_end = begin + file->info.rows;
    while (begin < file_end) {
      const std::size_t n = std::min(kIndexBatch, file_end - begin);
      for (std::size_t i = 0; i < n; ++i) {
        places[i] = MakePlace(file->slot, order[begin + i].index - file_begin);
      }
      MutexLock lock(&mu_);
      // Each is stale from here on, not only to be.
      std::uint64_t stale = 0;
      for (const SortedKey& key : order.subspan(begin, n)) stale += key.stored() ? 1 : 0;
      stale = std::min(stale, staged->overlap);
      staged->overlap -= stale;
      staged_overlap_ -= stale;
      if (staged->deletion) {
        PublishDeletions(order.subspan(begin, n), {places, n});
      } else {
        PublishRows(order.subspan(begin, n), {places, n});
      }
      begin += n;
    }
  }
  MutexLock lock(&mu_);
  for (const FilePtr& file : staged->files) file->publishing = false;
  compaction_wanted_.NotifyAll();
}

void StoreImpl::PublishRows(std::span<const SortedKey> chunk, std::span<const Place> places) {
  // Those that are there, those that are new.
  std::vector<std::uint64_t> hashes[2];
  std::vector<Place> to[2];
  for (std::size_t i = 0; i < chunk.size(); ++i) {
    const int kind = chunk[i].stored() ? 0 : 1;
    hashes[kind].push_back(chunk[i].hash);
    to[kind].push_back(places[i]);
  }
  Place previous[kIndexBatch];
  index_->Replace(hashes[0], to[0].data(), previous);
  for (std::size_t i = 0; i < hashes[0].size(); ++i) AddStale(previous[i], false);
  index_->Insert(hashes[1], to[1].data());
  if (deletions_->size() == 0) return;
  deletions_->Erase(hashes[1], previous);
  for (std::size_t i = 0; i < hashes[1].size(); ++i) {
    if (previous[i] != kNoPlace) AddStale(previous[i], /*was_deletion=*/true);
  }
}

void StoreImpl::PublishDeletions(std::span<const SortedKey> chunk, std::span<const Place> places) {
  std::uint64_t hashes[kIndexBatch];
  Place previous[kIndexBatch];
  for (std::size_t i = 0; i < chunk.size(); ++i) hashes[i] = chunk[i].hash;
  deletions_->Insert({hashes, chunk.size()}, places.data());
  index_->Erase({hashes, chunk.size()}, previous);
  for (std::size_t i = 0; i < chunk.size(); ++i) {
    TERRACE_CHECK(previous[i] != kNoPlace);
    AddStale(previous[i], /*was_deletion=*/false);
  }
}

Status StoreImpl::ReadStaged(const StagedRows& staged, std::span<const std::uint64_t> hashes,
                             std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                             std::span<std::byte> buffer) {
  const auto& write = static_cast<const StagedFiles&>(staged);
  struct Wanted {
    std::size_t index;  // Of the caller's.
    std::uint64_t row;  // In the file.
  };
  std::fill(found.begin(), found.end(), std::uint8_t{0});
  std::size_t file_begin = 0;
  std::vector<Wanted> wanted;
  for (const FilePtr& file : write.files) {
    const std::span<const SortedKey> keys =
        std::span(write.order).subspan(file_begin, file->info.rows);
    wanted.clear();
    auto at = keys.begin();
    const auto first = std::lower_bound(hashes.begin(), hashes.end(), keys.front().hash);
    for (auto i = static_cast<std::size_t>(first - hashes.begin()); i < hashes.size(); ++i) {
      at = std::lower_bound(
          at, keys.end(), hashes[i],
          [](const SortedKey& key, std::uint64_t hash) { return key.hash < hash; });
      if (at == keys.end()) break;
      if (at->hash == hashes[i]) wanted.push_back({i, at->index - file_begin});
    }
    std::sort(wanted.begin(), wanted.end(),
              [](const Wanted& a, const Wanted& b) { return a.row < b.row; });
    const std::uint64_t sector = file->file->read_alignment();
    const auto begin_of = [&](std::size_t w) {
      return layout_.RecordOffset(wanted[w].row) / sector * sector;
    };
    const auto end_of = [&](std::size_t w) {
      return AlignUp(layout_.RecordOffset(wanted[w].row) + layout_.record_bytes, sector);
    };
    for (std::size_t w = 0; w < wanted.size();) {
      const std::uint64_t begin = begin_of(w);
      std::uint64_t end = end_of(w);
      std::size_t last = w + 1;
      for (; last < wanted.size() && end_of(last) - begin <= buffer.size(); ++last) {
        if (begin_of(last) > end + options_.merge_gap_bytes) break;
        end = end_of(last);
      }
      TERRACE_RETURN_IF_ERROR(ReadFully(file->file.get(), begin, buffer.first(end - begin)));
      read_bytes_.fetch_add(end - begin, std::memory_order_relaxed);
      read_requests_.fetch_add(1, std::memory_order_relaxed);
      for (; w < last; ++w) {
        const std::uint64_t offset = layout_.RecordOffset(wanted[w].row);
        const std::byte* record = buffer.data() + (offset - begin);
        const Key key = UnmixKey(hashes[wanted[w].index]);
        TERRACE_RETURN_IF_ERROR(CheckRecord(record, layout_, file->seed, file->path, offset, &key));
        std::memcpy(rows[wanted[w].index], record + kRecordHeadBytes, layout_.row_bytes);
        found[wanted[w].index] = 1;
      }
    }
    file_begin += file->info.rows;
  }
  return OkStatus();
}

}  // namespace terrace
