#include <algorithm>
#include <bit>
#include <charconv>
#include <set>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/group_block.h"
#include "terrace/store/group_store.h"
#include "terrace/store/store_impl.h"

namespace terrace {
namespace {

constexpr std::string_view kFilePrefix = "rows-";
// A compactor's reads are large, one or two of a file at a time.
constexpr int kCompactionReads = 32, kCompactionReadThreads = 2;

// The id in "rows-<id>"; 0: no such name.
std::uint64_t FileIdOf(std::string_view name) {
  if (!name.starts_with(kFilePrefix)) return 0;
  name.remove_prefix(kFilePrefix.size());
  std::uint64_t id = 0;
  std::from_chars(name.data(), name.data() + name.size(), id);
  return id;
}

// Of the files that a store writes.
std::uint64_t RecordsPerFile(std::uint64_t file_rows, std::uint64_t most_file_rows) {
  return std::clamp<std::uint64_t>(file_rows, 1, std::max<std::uint64_t>(most_file_rows, 1));
}

// Of the index of files that have no more rows than so many.
int RowBitsFor(std::uint64_t most_rows) { return std::bit_width(most_rows - 1); }

Status CheckOptions(const StoreOptions& options) {
  if (options.directory.empty()) return InvalidArgumentError("a store needs a directory");
  if (options.row_bytes == 0 || options.row_bytes > kMaxRowBytes) {
    return InvalidArgumentError(
        fmt::format("table '{}': rows of {} bytes; 1 to {} are possible, so choose a smaller "
                    "table.dim",
                    options.table, options.row_bytes, kMaxRowBytes));
  }
  if (!(options.stale_share > 0 && options.stale_share < 1)) {
    return InvalidArgumentError(
        fmt::format("ssd.stale_share is {}; it lies between 0 and 1", options.stale_share));
  }
  if (options.file_bytes == 0) return InvalidArgumentError("ssd.file_size is 0");
  return OkStatus();
}

}  // namespace

std::uint64_t Store::FileRows(IndexKind index, std::uint32_t row_bytes, const GroupShape& shape,
                              std::uint64_t file_bytes) {
  const std::uint64_t record_bytes =
      kRecordHeadBytes + AlignUp(RecordRowBytes(index, row_bytes, shape.block_bytes), 8) +
      kKeyEntryBytes;
  return std::clamp<std::uint64_t>(file_bytes / record_bytes, 1, kMaxRowsPerFile);
}

std::uint64_t Store::MostRows(IndexKind index, std::uint32_t row_bytes, const GroupShape& shape,
                              std::uint64_t file_bytes, std::uint64_t most_file_rows) {
  const std::uint64_t file_records =
      RecordsPerFile(FileRows(index, row_bytes, shape, file_bytes), most_file_rows);
  const std::uint64_t files =
      KeyIndex::SlotsFor(RowBitsFor(file_records)) - Store::kFilesForCompaction;
  const std::uint64_t records = files * file_records;
  if (index == IndexKind::kKey) return records;
  const GroupLayout layout = GroupLayout::Of(row_bytes, shape.block_bytes);
  return layout.FilterRows(std::min(records, GroupDirectory::kMostGroups));
}

std::uint64_t Store::LeastBufferBytes(IndexKind index, std::uint32_t row_bytes,
                                      const GroupShape& shape) {
  const RecordLayout layout =
      RecordLayout::Of("", 0, RecordRowBytes(index, row_bytes, shape.block_bytes));
  const std::uint64_t least = StoreImpl::BufferBytes(0, layout);
  return index == IndexKind::kKey ? least
                                  : least + GroupStore::PartBytes(0, least, layout.row_bytes);
}

Result<std::unique_ptr<Store>> Store::Create(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                             const StoreOptions& options) {
  TERRACE_CHECK(quota != nullptr && !options.read_only);
  TERRACE_RETURN_IF_ERROR(CheckOptions(options));
  if (options.index == IndexKind::kGroup) return GroupStore::Create(fs, clock, quota, options);
  auto store = std::make_unique<StoreImpl>(fs, clock, quota, options);
  TERRACE_RETURN_IF_ERROR(store->Prepare());
  TERRACE_RETURN_IF_ERROR(store->CreateEmpty());
  store->StartCompaction();
  return std::unique_ptr<Store>(std::move(store));
}

Result<std::unique_ptr<Store>> Store::Open(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                           const StoreOptions& options,
                                           const ManifestReference& manifest,
                                           std::span<const ManifestReference> kept) {
  TERRACE_CHECK(quota != nullptr || options.read_only);
  TERRACE_RETURN_IF_ERROR(CheckOptions(options));
  const auto opened = [&]() -> Result<std::unique_ptr<Store>> {
    // What index a store has, it says itself.
    TERRACE_ASSIGN_OR_RETURN(const Manifest named,
                             ReadManifest(fs, options.directory, manifest.id, manifest.digest));
    if (named.groups > 0) {
      return GroupStore::Open(fs, clock, quota, options, named, manifest, kept);
    }
    auto store = std::make_unique<StoreImpl>(fs, clock, quota, options);
    TERRACE_RETURN_IF_ERROR(store->Prepare());
    TERRACE_RETURN_IF_ERROR(store->Recover(manifest, kept, nullptr));
    store->StartCompaction();
    return std::unique_ptr<Store>(std::move(store));
  };
  Result<std::unique_ptr<Store>> store = opened();
  if (store.ok()) return store;
  return store.status().WithContext(
      fmt::format("opening {} as of manifest {}", options.directory, manifest.id));
}

StoreImpl::StoreImpl(FileSystem* fs, Clock* clock, DiskQuota* quota, const StoreOptions& options,
                     std::uint64_t groups, std::uint32_t block_row_bytes)
    : fs_(fs),
      clock_(clock),
      quota_(options.read_only ? nullptr : quota),
      options_(options),
      layout_(RecordLayout::Of(options.table, options.shard, options.row_bytes)),
      groups_(groups),
      block_row_bytes_(block_row_bytes),
      rule_(options),
      pace_(clock) {
  rows_per_file_ = RecordsPerFile(
      FileRows(IndexKind::kKey, options.row_bytes, {}, options.file_bytes), options.most_file_rows);
  MakeIndexes(rows_per_file_);
}

void StoreImpl::MakeIndexes(std::uint64_t most_rows) {
  MutexLock lock(&mu_);
  index_ = std::make_unique<KeyIndex>(RowBitsFor(most_rows));
  deletions_ = std::make_unique<ExactIndex>();
}

StoreImpl::~StoreImpl() {
  Finish();  // Compaction uses it to its end.
  reclaimer_.reset();
  // The files stay on disk; the next user of this quota counts what it finds there.
  if (quota_ == nullptr) return;
  quota_->Release(disk_bytes_.load(std::memory_order_relaxed));
  MutexLock lock(&mu_);
  quota_->ChangeFiles(-static_cast<std::int64_t>(counted_slots_));
  quota_->ChangeCompactable(told_, {});
}

void StoreImpl::Finish() {
  {
    MutexLock lock(&mu_);
    stopping_.store(true, std::memory_order_relaxed);
    compaction_wanted_.NotifyAll();
  }
  pace_.Stop();
  for (Compactor& compactor : compactors_) {
    if (compactor.thread.joinable()) compactor.thread.Join();
  }
  RemoveSpares();
}

std::uint64_t StoreImpl::BufferBytes(std::uint64_t wanted, const RecordLayout& layout) {
  const std::uint64_t least = kReadParts * SectionCursor::LeastBuffer(layout.record_bytes);
  return std::max(HugeBuffer::SizeWithin(wanted), HugeBuffer::SizeFor(least));
}

Status StoreImpl::Prepare() {
  const std::uint64_t buffer_bytes = BufferBytes(options_.io_buffer_bytes, layout_);
  {
    MutexLock lock(&read_mu_);
    TERRACE_ASSIGN_OR_RETURN(read_buffer_, HugeBuffer::Allocate(buffer_bytes));
    ReadQueueOptions queue = options_.read_queue;
    queue.buffer = read_buffer_.span();
    TERRACE_ASSIGN_OR_RETURN(read_queue_, fs_->NewReadQueue(queue));
    if (options_.read_threads > 1) {
      read_workers_ = std::make_unique<WorkerGroup>("store-read", options_.read_threads, nullptr,
                                                    ThreadPriority::kYielding);
    }
  }
  if (options_.read_only) return OkStatus();
  if (options_.background_compaction) write_queue_ = std::make_unique<WriteQueue>("store-write");
  {
    MutexLock lock(&write_mu_);
    TERRACE_ASSIGN_OR_RETURN(write_buffer_, HugeBuffer::Allocate(buffer_bytes));
  }
  TERRACE_ASSIGN_OR_RETURN(compact_buffer_, HugeBuffer::Allocate(buffer_bytes));
  const int compactors = options_.background_compaction ? kCompactors : 1;
  const std::uint64_t share = buffer_bytes / compactors / kBlockBytes * kBlockBytes;
  for (int c = 0; c < compactors; ++c) {
    TERRACE_RETURN_IF_ERROR(
        PrepareCompactor(&compactors_[c], compact_buffer_.span().subspan(c * share, share)));
  }
  reclaimer_.emplace(
      quota_, [this] { RemoveSpares(); },
      [this] {
        MutexLock lock(&mu_);
        RoomMade();
      });
  return fs_->MakeDirectories(options_.directory);
}

Status StoreImpl::PrepareCompactor(Compactor* compactor, std::span<std::byte> buffer) {
  MutexLock lock(&compactor->mu);
  compactor->input = buffer.first(buffer.size() / 4 * 3 / kBlockBytes * kBlockBytes);
  compactor->output = buffer.subspan(compactor->input.size());
  ReadQueueOptions queue = options_.read_queue;
  queue.depth = kCompactionReads;
  queue.threads = kCompactionReadThreads;
  queue.buffer = compactor->input;
  TERRACE_ASSIGN_OR_RETURN(compactor->reads, fs_->NewReadQueue(queue));
  if (options_.background_compaction) {
    compactor->writes = std::make_unique<WriteQueue>("compact-write");
  }
  return OkStatus();
}

Status RemoveStore(FileSystem* fs, const std::string& directory,
                   std::vector<std::string>* foreign) {
  const Result<FileInfo> info = fs->Stat(directory);
  if (info.status().code() == StatusCode::kNotFound) {
    const Status removed = fs->Remove(directory);  // A link that leads nowhere, perhaps.
    return removed.code() == StatusCode::kNotFound ? OkStatus() : removed;
  }
  TERRACE_RETURN_IF_ERROR(info.status());
  TERRACE_ASSIGN_OR_RETURN(const bool is_link, IsLinkToFolder(fs, directory));
  if (is_link) return fs->Remove(directory);
  if (!info->is_directory) {
    foreign->push_back(directory);
    return OkStatus();
  }
  return RemoveOwnFiles(fs, directory, IsStoreFileName, foreign);
}

Status StoreImpl::CreateEmpty() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs_->List(options_.directory));
  for (const FileInfo& entry : entries) {
    if (!entry.is_directory && IsStoreFileName(entry.name)) {
      return InvalidArgumentError(
          fmt::format("{} already holds rows ({}); a new store needs an empty folder",
                      options_.directory, entry.name));
    }
  }
  return OkStatus();
}

void StoreImpl::StartCompaction() {
  if (options_.read_only || !options_.background_compaction) return;
  const char* name = "compact";
  for (Compactor& compactor : compactors_) {
    compactor.thread = Thread(std::exchange(name, "compact2"), ThreadPriority::kYielding,
                              [this, &compactor] { CompactLoop(&compactor); });
  }
}

Status StoreImpl::CheckWritable() const {
  TERRACE_CHECK(!options_.read_only);
  MutexLock lock(&mu_);
  if (!poison_.ok()) {
    return poison_.WithContext(fmt::format(
        "{} failed before and must be opened again from its last checkpoint", options_.directory));
  }
  return OkStatus();
}

Status StoreImpl::Poison(const Status& cause) {
  MutexLock lock(&mu_);
  if (poison_.ok()) poison_ = cause;
  compacted_.NotifyAll();  // There is nothing to wait for any more.
  return cause;
}

Result<FilePtr> StoreImpl::OpenFile(const Manifest::File& named) {
  auto file = std::make_shared<StoredFile>();
  file->path = PathOf(named.id);
  TERRACE_ASSIGN_OR_RETURN(
      file->file,
      fs_->Open(file->path, options_.direct_io ? OpenMode::kReadDirect : OpenMode::kRead));
  TERRACE_ASSIGN_OR_RETURN(file->info,
                           ReadFooter(file->file.get(), named.bytes, named.id, layout_));
  if (file->info.footer_checksum != named.footer_checksum || file->info.rows != named.rows) {
    return CorruptionError(fmt::format("{}: is not the file that the manifest names", file->path));
  }
  file->seed = layout_.CheckSeed(named.id);
  file->synced = true;
  return file;
}

Result<std::vector<FilePtr>> StoreImpl::OpenFiles(const Manifest& manifest) {
  std::vector<Result<FilePtr>> opened(manifest.files.size(), InternalError("not opened"));
  const auto open_one = [&](int i) {
    const auto f = static_cast<std::size_t>(i);
    opened[f] = OpenFile(manifest.files[f]);
  };
  const int tasks = static_cast<int>(opened.size());
  MutexLock reading(&read_mu_);
  if (read_workers_ == nullptr) {
    for (int task = 0; task < tasks; ++task) open_one(task);
  } else {
    read_workers_->Run(tasks, open_one);
  }
  std::vector<FilePtr> files;
  for (Result<FilePtr>& file : opened) {
    TERRACE_RETURN_IF_ERROR(file.status());
    files.push_back(std::move(file).value());
  }
  return files;
}

Status StoreImpl::NameKept(std::span<const ManifestReference> kept, const Manifest& newest) {
  for (const ManifestReference& reference : kept) {
    if (reference.id == newest.id) continue;
    TERRACE_ASSIGN_OR_RETURN(
        const Manifest manifest,
        ReadManifest(fs_, options_.directory, reference.id, reference.digest, layout_));
    MutexLock lock(&mu_);
    std::unordered_map<std::uint64_t, StoredFile*> known;
    for (const FilePtr& file : slots_) {
      if (file != nullptr) known[file->info.id] = file.get();
    }
    for (const FilePtr& file : retired_) known[file->info.id] = file.get();
    Named named{reference, {}};
    for (const Manifest::File& entry : manifest.files) {
      StoredFile*& file = known[entry.id];
      if (file == nullptr) {
        auto only_named = std::make_shared<StoredFile>();
        only_named->info.id = entry.id;
        only_named->info.bytes = entry.bytes;
        only_named->info.rows = entry.rows;
        only_named->path = PathOf(entry.id);
        file = only_named.get();
        retired_.push_back(std::move(only_named));
      }
      ++file->named_by;
      named.files.push_back(file);
    }
    manifests_[reference.id] = std::move(named);
    last_manifest_ = std::max(last_manifest_, reference.id);
    next_file_id_ = std::max(next_file_id_, manifest.next_file_id);
  }
  return OkStatus();
}

Status StoreImpl::RemoveStrays() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs_->List(options_.directory));
  std::set<std::string> wanted;
  std::uint64_t bytes = 0;
  {
    MutexLock lock(&mu_);
    const auto want = [&](const FilePtr& file) {
      if (file == nullptr) return;
      wanted.insert(ParameterFileName(file->info.id));
      bytes += file->info.bytes;
    };
    for (const FilePtr& file : slots_) want(file);
    for (const FilePtr& file : retired_) want(file);
    for (const auto& [id, named] : manifests_) {
      wanted.insert(ManifestFileName(id));
      bytes += AlignUp(named.reference.digest.size, kBlockBytes);
    }
    // Never the id of a file that was there: a reader could take one for the other.
    for (const FileInfo& entry : entries) {
      next_file_id_ = std::max(next_file_id_, FileIdOf(entry.name) + 1);
    }
  }
  for (const FileInfo& entry : entries) {
    if (entry.is_directory || !IsStoreFileName(entry.name)) continue;
    if (wanted.contains(entry.name)) continue;
    SyncPoint::Hit("store.open.before_remove");
    TERRACE_RETURN_IF_ERROR(fs_->Remove(JoinPath(options_.directory, entry.name)));
  }
  return TakeSpace(bytes, 0);
}

Status StoreImpl::Recover(const ManifestReference& reference,
                          std::span<const ManifestReference> kept,
                          const std::function<void(std::uint64_t)>& visit) {
  TERRACE_ASSIGN_OR_RETURN(
      const Manifest manifest,
      ReadManifest(fs_, options_.directory, reference.id, reference.digest, layout_));
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FilePtr> files, OpenFiles(manifest));
  Named named{reference, {}};
  std::uint64_t most_rows = rows_per_file_;
  for (const FilePtr& file : files) {
    named.files.push_back(file.get());
    most_rows = std::max(most_rows, file->info.rows);
  }
  MakeIndexes(most_rows);
  {
    MutexLock lock(&mu_);
    if (files.size() + kFilesForCompaction > index_->max_slots()) {
      return InvalidArgumentError(
          fmt::format("{} holds {} parameter files, and with files of up to {} rows its index has "
                      "places for {}: lower ssd.file_size",
                      options_.directory, files.size(), most_rows, index_->max_slots()));
    }
    for (const FilePtr& file : files) {
      Register(file, /*live=*/true);
      file->named_by = 1;
    }
    CountFiles();
    manifests_[reference.id] = std::move(named);
    last_manifest_ = reference.id;
    sequence_ = manifest.sequence;
    next_file_id_ = manifest.next_file_id;
    rows_in_blocks_ = manifest.rows_in_blocks;
  }
  TERRACE_RETURN_IF_ERROR(BuildIndex(files, visit));
  if (options_.read_only) {
    std::uint64_t bytes = AlignUp(reference.digest.size, kBlockBytes);
    for (const FilePtr& file : files) bytes += file->info.bytes;
    disk_bytes_.store(bytes, std::memory_order_relaxed);
    return OkStatus();
  }
  TERRACE_RETURN_IF_ERROR(NameKept(kept, manifest));
  TERRACE_RETURN_IF_ERROR(RemoveStrays());
  MutexLock lock(&mu_);
  for (const FilePtr& file : files) {
    if (file->stale == file->info.rows) Retire(file.get());
  }
  return OkStatus();
}

Status StoreImpl::background_status() const {
  MutexLock lock(&mu_);
  return background_;
}

std::uint64_t StoreImpl::rows_in_blocks() const {
  MutexLock lock(&mu_);
  return rows_in_blocks_;
}

std::uint64_t StoreImpl::MostWriteBytes(std::uint64_t rows, std::uint64_t /*in_order*/,
                                        std::uint64_t writes) const {
  // A row's place in the key section; a file's header, footer and what its sections are rounded by.
  return rows * (layout_.record_bytes + kKeyEntryBytes) +
         (rows / rows_per_file_ + writes) * 4 * kBlockBytes;
}

std::uint64_t StoreImpl::rows() const {
  MutexLock lock(&mu_);
  return index_->size();
}

std::uint64_t StoreImpl::index_bytes() const {
  MutexLock lock(&mu_);
  return index_->bytes() + deletions_->bytes();
}

StoreStats& StoreStats::operator+=(const StoreStats& other) {
  read_bytes += other.read_bytes;
  write_bytes += other.write_bytes;
  read_requests += other.read_requests;
  rows_read += other.rows_read;
  rows_written += other.rows_written;
  wanted_bytes += other.wanted_bytes;
  rows_compacted += other.rows_compacted;
  rows_carried += other.rows_carried;
  rows_expired += other.rows_expired;
  mistaken_reads += other.mistaken_reads;
  compactions += other.compactions;
  read_seconds += other.read_seconds;
  write_seconds += other.write_seconds;
  compaction_seconds += other.compaction_seconds;
  live_rows += other.live_rows;
  live_bytes += other.live_bytes;
  disk_bytes += other.disk_bytes;
  checkpoint_only_bytes += other.checkpoint_only_bytes;
  spare_bytes += other.spare_bytes;
  index_bytes += other.index_bytes;
  files += other.files;
  stale_bytes += other.stale_bytes;
  compaction_wait_seconds += other.compaction_wait_seconds;
  return *this;
}

StoreStats StoreImpl::stats() const {
  StoreStats stats;
  constexpr auto kRelaxed = std::memory_order_relaxed;
  stats.read_bytes = read_bytes_.load(kRelaxed);
  stats.write_bytes = write_bytes_.load(kRelaxed);
  stats.read_requests = read_requests_.load(kRelaxed);
  stats.rows_read = rows_read_.load(kRelaxed);
  stats.rows_written = rows_written_.load(kRelaxed);
  stats.wanted_bytes = stats.rows_written * (layout_.record_bytes + kKeyEntryBytes);
  stats.rows_compacted = rows_compacted_.load(kRelaxed);
  stats.rows_expired = rows_expired_.load(kRelaxed);
  stats.mistaken_reads = mistaken_reads_.load(kRelaxed);
  stats.compactions = compactions_.load(kRelaxed);
  stats.read_seconds = static_cast<double>(read_nanos_.load(kRelaxed)) * 1e-9;
  stats.compaction_wait_seconds = static_cast<double>(compaction_wait_nanos_.load(kRelaxed)) * 1e-9;
  stats.disk_bytes = disk_bytes_.load(kRelaxed);
  MutexLock lock(&mu_);
  stats.write_seconds = write_time_.Seconds(clock_);
  stats.compaction_seconds = compaction_time_.Seconds(clock_);
  stats.live_rows = index_->size();
  stats.live_bytes = stats.live_rows * layout_.record_bytes;
  stats.index_bytes = index_->bytes() + deletions_->bytes();
  for (const FilePtr& file : slots_) {
    if (file == nullptr || !file->live) continue;
    ++stats.files;
    stats.stale_bytes += file->stale * layout_.record_bytes;
  }
  for (const FilePtr& file : retired_) {
    if (file->named_by > 0) stats.checkpoint_only_bytes += file->info.bytes;
  }
  for (const Spare& spare : spares_) stats.spare_bytes += spare.bytes;
  return stats;
}

}  // namespace terrace
