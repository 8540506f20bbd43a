#include "terrace/store/group_store.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/store/radix_sort.h"
#include "terrace/store/section_cursor.h"

namespace terrace {
namespace {

// Keys looked up under one hold of the lock.
constexpr std::size_t kLookUpBatch = 2048;
constexpr std::uint64_t kLeastPartBlocks = 4;

// The inner store's three buffers, and those of blocks that are read and of two parts of a write,
// lie in the room of three.
std::uint64_t InnerBytes(std::uint64_t io_buffer_bytes) { return io_buffer_bytes / 2; }

// What is read of staged files lies in runs.
std::uint64_t PendingBytes(const GroupLayout& layout) {
  constexpr std::uint64_t kEnough = 256 << 10;
  return HugeBuffer::SizeFor(
      std::max(SectionCursor::LeastBuffer(BlockDiskBytes(layout.block_bytes)), kEnough));
}

StoreOptions InnerOptions(const StoreOptions& options, const GroupLayout& layout) {
  StoreOptions inner = options;
  inner.row_bytes = layout.block_bytes;
  inner.io_buffer_bytes = InnerBytes(options.io_buffer_bytes);
  inner.expiry = nullptr;  // It knows of blocks only.
  return inner;
}

}  // namespace

std::uint64_t Store::ReadBufferBytes(IndexKind index, std::uint32_t row_bytes,
                                     const GroupShape& shape, std::uint64_t io_buffer_bytes) {
  const RecordLayout layout =
      RecordLayout::Of("", 0, RecordRowBytes(index, row_bytes, shape.block_bytes));
  return StoreImpl::BufferBytes(
      index == IndexKind::kKey ? io_buffer_bytes : InnerBytes(io_buffer_bytes), layout);
}

std::uint64_t Store::GroupIndexBytes(std::uint32_t row_bytes, const GroupShape& shape,
                                     std::uint64_t expected_rows) {
  const GroupLayout layout = GroupLayout::Of(row_bytes, shape.block_bytes);
  const std::uint64_t groups = layout.GroupsFor(expected_rows);
  constexpr std::uint64_t kSegmentShare = 1;  // Bytes a group, of its directory.
  return GroupFilters::BytesFor(groups, layout.FilterRows(groups), shape.filter_bits) +
         groups * kSegmentShare;
}

bool Store::HasGroupIndex(std::uint32_t row_bytes) {
  return row_bytes <= GroupLayout::kMostRowBytes;
}

Status Store::CheckGroups(std::uint32_t row_bytes, const GroupShape& shape) {
  if (!HasGroupIndex(row_bytes)) {
    return InvalidArgumentError(
        fmt::format("rows of {} bytes are too long for an index by group, which takes {} at most: "
                    "choose index: key",
                    row_bytes, GroupLayout::kMostRowBytes));
  }
  const std::uint32_t least = GroupLayout::LeastBlock(row_bytes);
  if (shape.block_bytes != 0 && shape.block_bytes < least) {
    return InvalidArgumentError(
        fmt::format("blocks of {}KiB are too short for rows of {} bytes, of which {} have to fit: "
                    "choose group_block: {}KiB or more, or auto",
                    shape.block_bytes >> 10, row_bytes, GroupLayout::kLeastRows, least >> 10));
  }
  return OkStatus();
}

Result<std::unique_ptr<Store>> GroupStore::Create(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                                  const StoreOptions& options) {
  if (const Status status = CheckGroups(options.row_bytes, options.group); !status.ok()) {
    return status.WithContext("table " + options.table);
  }
  const GroupLayout layout = GroupLayout::Of(options.row_bytes, options.group.block_bytes);
  const std::uint64_t groups = layout.GroupsFor(options.expected_rows);
  if (groups > GroupDirectory::kMostGroups) {
    return InvalidArgumentError(
        fmt::format("table '{}': {} expected rows make more groups than a "
                    "shard has places for: choose more ssd.shards",
                    options.table, options.expected_rows));
  }
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<GroupStore> store,
                           Make(fs, clock, quota, options, layout, groups));
  TERRACE_RETURN_IF_ERROR(store->inner_->CreateEmpty());
  store->inner_->StartCompaction();
  return std::unique_ptr<Store>(std::move(store));
}

std::uint64_t GroupStore::PartBytes(std::uint64_t wanted, std::uint64_t inner,
                                    std::uint32_t block_bytes) {
  const std::uint64_t rest = wanted > inner ? wanted - inner : 0;
  return std::max(HugeBuffer::SizeWithin(rest),
                  HugeBuffer::SizeFor(kLeastPartBlocks * BlockDiskBytes(block_bytes)));
}

std::uint64_t Store::FurtherBufferBytes(IndexKind index, std::uint32_t row_bytes,
                                        const GroupShape& shape) {
  if (index == IndexKind::kKey) return 0;
  return PendingBytes(GroupLayout::Of(row_bytes, shape.block_bytes));
}

Result<std::unique_ptr<Store>> GroupStore::Open(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                                const StoreOptions& options, const Manifest& named,
                                                const ManifestReference& manifest,
                                                std::span<const ManifestReference> kept) {
  if (!HasGroupIndex(options.row_bytes)) {
    return InvalidArgumentError(
        fmt::format("rows of {} bytes have no index by group", options.row_bytes));
  }
  if (options.row_bytes != named.block_row_bytes) {
    return InvalidArgumentError(fmt::format("holds blocks of rows of {} bytes, not of {}",
                                            named.block_row_bytes, options.row_bytes));
  }
  const std::uint32_t block_bytes = BlockDiskBytes(named.row_bytes);
  if (block_bytes % kBlockBytes != 0 || block_bytes < GroupLayout::LeastBlock(options.row_bytes)) {
    return CorruptionError(
        fmt::format("the manifest names blocks of {} bytes, in which rows of {} "
                    "bytes don't lie",
                    named.row_bytes, options.row_bytes));
  }
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<GroupStore> store,
                           Make(fs, clock, quota, options,
                                GroupLayout::Of(options.row_bytes, block_bytes), named.groups));
  GroupStore* const self = store.get();
  TERRACE_RETURN_IF_ERROR(self->inner_->Recover(manifest, kept, [self](std::uint64_t start) {
    MutexLock lock(&self->mu_);
    self->directory_.Add(start);
    self->filters_.Forget(self->directory_.GroupOf(start));
  }));
  self->inner_->StartCompaction();
  return std::unique_ptr<Store>(std::move(store));
}

Result<std::unique_ptr<GroupStore>> GroupStore::Make(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                                     const StoreOptions& options,
                                                     const GroupLayout& layout,
                                                     std::uint64_t groups) {
  TERRACE_ASSIGN_OR_RETURN(
      GroupFilters filters,
      GroupFilters::Create(groups, layout.FilterRows(groups), options.group.filter_bits));
  std::unique_ptr<GroupStore> store(
      new GroupStore(fs, clock, quota, options, layout, groups, std::move(filters)));
  TERRACE_RETURN_IF_ERROR(store->inner_->Prepare());
  TERRACE_RETURN_IF_ERROR(store->Allocate());
  return store;
}

GroupStore::GroupStore(FileSystem* fs, Clock* clock, DiskQuota* quota, const StoreOptions& options,
                       const GroupLayout& layout, std::uint64_t groups, GroupFilters filters)
    : options_(options),
      layout_(layout),
      inner_(std::make_unique<StoreImpl>(fs, clock, quota, InnerOptions(options, layout), groups,
                                         options.row_bytes)),
      directory_(groups),
      filters_(std::move(filters)) {}

Status GroupStore::Allocate() {
  const std::uint64_t inner = StoreImpl::BufferBytes(InnerBytes(options_.io_buffer_bytes),
                                                     RecordLayout::Of("", 0, layout_.block_bytes));
  const std::uint64_t bytes = PartBytes(options_.io_buffer_bytes, inner, layout_.block_bytes);
  part_blocks_ = bytes / layout_.block_bytes;
  {
    MutexLock lock(&read_mu_);
    TERRACE_ASSIGN_OR_RETURN(read_blocks_, HugeBuffer::Allocate(bytes));
  }
  if (options_.read_only) return OkStatus();
  MutexLock lock(&stage_mu_);
  stage_workers_ = std::make_unique<WorkerGroup>(
      "store-merge", options_.background_compaction ? 2 : 1, nullptr, ThreadPriority::kYielding);
  for (HugeBuffer& buffer : part_buffers_) {
    TERRACE_ASSIGN_OR_RETURN(buffer, HugeBuffer::Allocate(bytes));
  }
  TERRACE_ASSIGN_OR_RETURN(pending_buffer_, HugeBuffer::Allocate(PendingBytes(layout_)));
  return OkStatus();
}

std::vector<GroupStore::SortedKey> GroupStore::SortKeys(std::span<const Key> keys) {
  TERRACE_CHECK(keys.size() <= std::numeric_limits<std::uint32_t>::max());
  std::vector<SortedKey> order(keys.size()), spare;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    order[i] = {MixKey(keys[i]), static_cast<std::uint32_t>(i)};
  }
  SortSpread(&order, &spare, 64, [](const SortedKey& key) { return key.hash; });
  for (std::size_t i = 1; i < order.size(); ++i) TERRACE_CHECK(order[i - 1].hash < order[i].hash);
  return order;
}

Result<BlockView> GroupStore::ParseBlock(std::span<const std::byte> block,
                                         std::uint64_t least_hash) const {
  Result<BlockView> view = BlockView::Parse(layout_, block, least_hash);
  if (view.ok()) return view;
  return view.status().WithContext(fmt::format("the block of hash {:#x} of table '{}' in {}",
                                               least_hash, options_.table, options_.directory));
}

Status GroupStore::Read(std::span<const Key> keys, std::span<std::byte* const> rows,
                        std::span<std::uint8_t> found, const std::atomic<bool>* stop) {
  TERRACE_CHECK(keys.size() == rows.size() && keys.size() == found.size());
  MutexLock lock(&read_mu_);
  std::fill(found.begin(), found.end(), std::uint8_t{0});
  std::uint64_t divisions;
  {
    MutexLock state(&mu_);
    divisions = ended_.divisions;
  }
  std::vector<SortedKey> missing;
  TERRACE_RETURN_IF_ERROR(LookUp(SortKeys(keys), rows, found, stop, &missing));
  bool divided;
  {
    MutexLock state(&mu_);
    divided = begun_.divisions != divisions;
  }
  if (divided && !missing.empty()) {
    // Their rows may have gone to another block between the look-up and the read of the old one.
    // While nothing is published both are of one moment.
    const std::vector<SortedKey> again = std::move(missing);
    missing.clear();
    MutexLock publish(&publish_mu_);
    TERRACE_RETURN_IF_ERROR(LookUp(again, rows, found, stop, &missing));
  }
  std::uint64_t count = 0;
  for (const std::uint8_t one : found) count += one;
  rows_read_.fetch_add(count, std::memory_order_relaxed);
  return OkStatus();
}

Status GroupStore::LookUp(std::span<const SortedKey> order, std::span<std::byte* const> rows,
                          std::span<std::uint8_t> found, const std::atomic<bool>* stop,
                          std::vector<SortedKey>* missing) {
  std::vector<SortedKey> wanted;
  std::vector<BlockKeys> blocks;
  std::vector<Key> keys;
  std::vector<std::byte*> places;
  std::vector<std::uint8_t> found_blocks;
  for (std::size_t next = 0; next < order.size();) {
    Moment before;
    {
      MutexLock state(&mu_);
      before = begun_ == ended_ ? ended_ : Moment{~std::uint64_t{0}, 0};
    }
    PlanPart(order, &next, &wanted, &blocks);
    keys.clear();
    places.clear();
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      keys.push_back(UnmixKey(blocks[b].start));
      places.push_back(BlockIn(read_blocks_, b).data());
    }
    found_blocks.assign(blocks.size(), 0);
    TERRACE_RETURN_IF_ERROR(inner_->Read(keys, places, found_blocks, stop));
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      if (found_blocks[b] == 0) {
        missing->insert(missing->end(),
                        wanted.begin() + static_cast<std::ptrdiff_t>(blocks[b].begin),
                        wanted.begin() + static_cast<std::ptrdiff_t>(blocks[b].end));
        continue;
      }
      TERRACE_ASSIGN_OR_RETURN(const BlockView block,
                               ParseBlock(BlockIn(read_blocks_, b), blocks[b].start));
      TakeBlock(blocks[b], block, wanted, rows, found, missing);
    }
    Learn(blocks, found_blocks, before);
  }
  return OkStatus();
}

void GroupStore::PlanPart(std::span<const SortedKey> order, std::size_t* next,
                          std::vector<SortedKey>* wanted, std::vector<BlockKeys>* blocks) {
  wanted->clear();
  blocks->clear();
  while (*next < order.size()) {
    MutexLock lock(&mu_);
    const std::size_t end = std::min(order.size(), *next + kLookUpBatch);
    for (; *next < end; ++*next) {
      const SortedKey& key = order[*next];
      const std::uint64_t group = directory_.GroupOf(key.hash);
      if (!filters_.MayHold(group, key.hash)) continue;
      const std::uint64_t start = directory_.StartOf(key.hash);
      if (blocks->empty() || blocks->back().start != start) {
        if (blocks->size() == part_blocks_) return;
        const bool learns = !filters_.IsKnown(group) && !directory_.IsDivided(group);
        const auto at = static_cast<std::uint32_t>(wanted->size());
        blocks->push_back({start, at, at, learns});
      }
      wanted->push_back(key);
      blocks->back().end = static_cast<std::uint32_t>(wanted->size());
    }
  }
}

void GroupStore::TakeBlock(const BlockKeys& keys, const BlockView& block,
                           std::span<const SortedKey> wanted, std::span<std::byte* const> rows,
                           std::span<std::uint8_t> found, std::vector<SortedKey>* missing) {
  bool any = false;
  for (std::size_t w = keys.begin; w < keys.end; ++w) {
    const std::optional<std::uint32_t> place = block.Find(wanted[w].hash);
    if (!place) {
      missing->push_back(wanted[w]);
      continue;
    }
    std::memcpy(rows[wanted[w].index], block.row(*place), layout_.row_bytes);
    found[wanted[w].index] = 1;
    any = true;
  }
  if (!any) mistaken_reads_.fetch_add(1, std::memory_order_relaxed);
}

void GroupStore::Learn(std::span<const BlockKeys> blocks, std::span<const std::uint8_t> found,
                       const Moment& before) {
  std::vector<std::uint64_t> hashes;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (!blocks[b].learns || found[b] == 0) continue;
    const Result<BlockView> block =
        BlockView::Parse(layout_, BlockIn(read_blocks_, b), blocks[b].start);
    TERRACE_CHECK(block.ok());
    hashes.clear();
    for (std::uint32_t i = 0; i < block->size(); ++i) hashes.push_back(block->hash(i));
    MutexLock lock(&mu_);
    // Else the block may have gained keys since it was read.
    if (begun_ != before) return;
    filters_.SetKeys(directory_.GroupOf(blocks[b].start), hashes);
  }
}

Status GroupStore::ForEachRow(std::uint64_t buffer_bytes,
                              const std::function<Status(const RowView&)>& visit) {
  return inner_->ForEachRow(buffer_bytes, [&](const RowView& row) -> Status {
    TERRACE_ASSIGN_OR_RETURN(const BlockView block, ParseBlock(row.row, MixKey(row.key)));
    for (std::uint32_t i = 0; i < block.size(); ++i) {
      RowView view;
      view.key = block.key(i);
      view.row = {block.row(i), layout_.row_bytes};
      TERRACE_RETURN_IF_ERROR(visit(view));
    }
    return OkStatus();
  });
}

StoreStats GroupStore::stats() const {
  StoreStats stats = inner_->stats();
  constexpr auto kRelaxed = std::memory_order_relaxed;
  const std::uint64_t rows_written = rows_written_.load(kRelaxed);
  stats.rows_carried = rows_carried_.load(kRelaxed);
  // Of blocks that compaction wrote, as of those that writes wrote.
  if (stats.rows_written > 0) {
    stats.rows_compacted =
        static_cast<std::uint64_t>(static_cast<double>(stats.rows_compacted) *
                                   static_cast<double>(rows_written + stats.rows_carried) /
                                   static_cast<double>(stats.rows_written));
  }
  stats.rows_written = rows_written;
  // As by key: what a row takes that is written alone.
  stats.wanted_bytes =
      rows_written *
      (RecordLayout::Of(options_.table, 0, options_.row_bytes).record_bytes + kKeyEntryBytes);
  stats.rows_read = rows_read_.load(kRelaxed);
  stats.rows_expired = rows_expired_.load(kRelaxed);
  stats.mistaken_reads += mistaken_reads_.load(kRelaxed);
  stats.live_rows = inner_->rows_in_blocks();
  stats.index_bytes = index_bytes();
  return stats;
}

std::uint64_t GroupStore::index_bytes() const {
  const std::uint64_t inner = inner_->index_bytes();
  MutexLock lock(&mu_);
  return inner + directory_.bytes() + filters_.bytes();
}

std::uint64_t GroupStore::MostWriteBytes(std::uint64_t rows, std::uint64_t in_order,
                                         std::uint64_t writes) const {
  std::uint64_t blocks;
  {
    MutexLock lock(&mu_);
    blocks = directory_.groups() + directory_.added();
  }
  // Each row may ask for a block of its own, until all are written by each write, or, of rows in
  // order, by one and some by the next one too; blocks are divided; and a sweep goes along.
  const std::uint64_t others = rows - in_order;
  std::uint64_t most =
      std::min(in_order, blocks) + (blocks > others / writes ? others : blocks * writes) +
      2 * rows / layout_.most_rows + writes * (2 + StoreImpl::RowSink::kMoreThanExpected);
  if (options_.expiry != nullptr) {
    // As many blocks again, or what a buffer holds, until the sweeps have come round twice.
    most += std::min(most + writes * part_blocks_, 2 * (most + inner_->rows()));
  }
  // A write's last file may be one that was begun for what it did not expect.
  return inner_->MostWriteBytes(most, 0, 2 * writes);
}

std::uint64_t GroupStore::LikelyWriteBytes(std::uint64_t rows) const {
  if (rows == 0) return 0;
  MutexLock lock(&mu_);
  const auto blocks = static_cast<double>(directory_.groups() + directory_.added());
  // Rows come to random blocks, and writes go round them: a block that was written the share t of a
  // round ago has been met with 1 - exp(-t oldest), where the rows make out `oldest`; the mean over
  // t.
  const double oldest = 2 * static_cast<double>(rows) / blocks;
  const double met = blocks * (1 + std::expm1(-oldest) / oldest);
  return inner_->LikelyWriteBytes(static_cast<std::uint64_t>(met) + 1);
}

}  // namespace terrace
