// The writing half of GroupStore.
#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/base/units.h"
#include "terrace/store/group_store.h"

namespace terrace {

// Blocks that the inner store has staged.
class GroupStore::Staged final : public StagedRows {
 public:
  explicit Staged(GroupStore* store) : store_(store) {}
  ~Staged() override { store_->Forget(this); }

  bool Divides() const { return !added.empty(); }

  std::unique_ptr<StagedRows> rows;
  std::vector<std::uint64_t> hashes;  // Of the keys that it writes, in order.
  std::vector<std::uint64_t> blocks;  // Starts, in order.
  std::vector<std::uint64_t> empty;   // Those of blocks without rows.
  std::vector<std::uint64_t> added;   // Those that are new, in order.
  std::int64_t rows_change = 0;
  std::uint64_t carried = 0, expired = 0;
  SweepState swept_from = SweepState::Last();  // Where the sweep began that goes along.
  bool broken = false;                         // Guarded by the store's mutex.
  bool published = false;

 private:
  GroupStore* const store_;
};

// Makes blocks of rows and stages them.
class GroupStore::BlockWriter {
 public:
  BlockWriter(const GroupLayout* layout, StoreImpl::RowSink* sink, Staged* staged)
      : layout_(layout), sink_(sink), staged_(staged), block_(layout->block_bytes) {}

  // About so many blocks more are to be written.
  void Expect(std::uint64_t blocks) { sink_->Expect(blocks); }
  // old: the block was there.
  Status Add(std::uint64_t start, bool old, std::span<const BlockRow> rows) {
    const std::size_t pieces = layout_->PiecesFor(rows.size());
    for (std::size_t p = 0; p < pieces; ++p) {
      const std::size_t begin = p * rows.size() / pieces, end = (p + 1) * rows.size() / pieces;
      const std::uint64_t piece_start = p == 0 ? start : rows[begin].hash;
      MakeBlock(*layout_, rows.subspan(begin, end - begin), block_.data());
      staged_->blocks.push_back(piece_start);
      if (p > 0) staged_->added.push_back(piece_start);
      if (begin == end) staged_->empty.push_back(piece_start);
      TERRACE_RETURN_IF_ERROR(
          sink_->Add(UnmixKey(piece_start), block_, p == 0 && old ? kStoredKey : kUnknownKey));
    }
    return OkStatus();
  }
  Staged* staged() const { return staged_; }

 private:
  const GroupLayout* const layout_;
  StoreImpl::RowSink* const sink_;
  Staged* const staged_;
  std::vector<std::byte> block_;
};

Status GroupStore::Write(std::span<const Key> keys, std::span<const std::byte* const> rows,
                         std::span<const std::uint8_t> stored) {
  TERRACE_CHECK(keys.size() == rows.size() && (stored.empty() || stored.size() == keys.size()));
  if (keys.empty()) return inner_->Write({}, {}, {});
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<StagedRows> staged, Stage(keys, rows, stored));
  return Publish(std::move(staged));
}

Result<std::unique_ptr<StagedRows>> GroupStore::Stage(std::span<const Key> keys,
                                                      std::span<const std::byte* const> rows,
                                                      std::span<const std::uint8_t> stored) {
  TERRACE_CHECK(!keys.empty() && keys.size() == rows.size());
  TERRACE_CHECK(stored.empty() || stored.size() == keys.size());
  MutexLock lock(&stage_mu_);
  // As many empty blocks as a sweep looks at go, or as there is room for: they can wait, and
  // neither what stays free for a checkpoint nor an older checkpoint is for them.
  if (!inner_->reserve_is_open()) {
    std::vector<Key> empty = EmptyBlocks(std::max(part_blocks_, keys.size()));
    while (!empty.empty() && !inner_->HasRoomFor(empty.size())) empty.resize(empty.size() / 2);
    const Status erased = EraseBlocks(empty);
    if (!erased.ok() && erased.code() != StatusCode::kOutOfRoom) return erased;
  }
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<Staged> staged, StageRows(keys, rows));
  return std::unique_ptr<StagedRows>(std::move(staged));
}

Status GroupStore::Erase(std::span<const Key> keys) {
  MutexLock lock(&stage_mu_);
  TERRACE_RETURN_IF_ERROR(inner_->Write({}, {}, {}));  // Whether it can be written to.
  TERRACE_RETURN_IF_ERROR(EraseBlocks(EmptyBlocks(~std::size_t{0})));
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<Staged> staged, StageRows(keys, {}));
  return Publish(std::move(staged));
}

std::uint64_t GroupStore::NewestStartOf(std::uint64_t hash) const {
  std::uint64_t start = directory_.StartOf(hash);
  for (const Staged* staged : pending_) {
    const auto after = std::upper_bound(staged->added.begin(), staged->added.end(), hash);
    // The last one at or before the hash, if that is nearer; it is of the same group then.
    if (after != staged->added.begin()) start = std::max(start, *(after - 1));
  }
  return start;
}

std::vector<GroupStore::BlockKeys> GroupStore::PlanWrite(std::span<const SortedKey> order) {
  std::vector<BlockKeys> blocks;
  for (std::size_t next = 0; next < order.size();) {
    MutexLock state(&mu_);
    const std::size_t end = std::min(order.size(), next + kIndexBatch);
    for (; next < end; ++next) {
      const std::uint64_t start = NewestStartOf(order[next].hash);
      const auto at = static_cast<std::uint32_t>(next);
      if (blocks.empty() || blocks.back().start != start) blocks.push_back({start, at, at, false});
      blocks.back().end = at + 1;
    }
  }
  return blocks;
}

std::size_t GroupStore::Merge(const BlockView* block, std::span<const SortedKey> news,
                              std::span<const std::byte* const> rows,
                              std::vector<BlockRow>* merged) const {
  merged->clear();
  std::size_t expired = 0;
  std::size_t n = 0;
  const auto take_next = [&] {
    if (!rows.empty()) merged->push_back({news[n].hash, rows[news[n].index]});
    ++n;
  };
  for (std::uint32_t i = 0; block != nullptr && i < block->size(); ++i) {
    const std::uint64_t hash = block->hash(i);
    while (n < news.size() && news[n].hash < hash) take_next();
    if (n < news.size() && news[n].hash == hash) {
      take_next();
    } else if (options_.expiry != nullptr && options_.expiry->MayGo(block->row(i))) {
      ++expired;
    } else {
      merged->push_back({hash, block->row(i)});
    }
  }
  while (n < news.size()) take_next();
  return expired;
}

Result<std::unique_ptr<GroupStore::Staged>> GroupStore::StageRows(
    std::span<const Key> keys, std::span<const std::byte* const> rows) {
  auto staged = std::make_unique<Staged>(this);
  const std::vector<SortedKey> order = SortKeys(keys);
  if (!rows.empty()) {
    staged->hashes.reserve(order.size());
    for (const SortedKey& key : order) staged->hashes.push_back(key.hash);
  }
  std::uint64_t dropped;
  {
    MutexLock state(&mu_);
    dropped = dropped_;
  }
  const auto fill = [&](StoreImpl::RowSink* sink) TERRACE_REQUIRES(stage_mu_) -> Status {
    BlockWriter out(&layout_, sink, staged.get());
    const std::vector<BlockKeys> blocks = PlanWrite(order);
    out.Expect(blocks.size() + 2 * order.size() / layout_.most_rows + 2);  // Some are divided.
    TERRACE_RETURN_IF_ERROR(WriteBlocks(blocks, order, rows, &out));
    return SweepDue() ? Sweep(std::max(part_blocks_, staged->blocks.size()), &out) : OkStatus();
  };
  TERRACE_ASSIGN_OR_RETURN(staged->rows, inner_->StageFrom(fill));
  MutexLock state(&mu_);
  staged->broken = dropped != dropped_;
  pending_.push_back(staged.get());
  return staged;
}

Status GroupStore::WriteBlocks(std::span<const BlockKeys> blocks, std::span<const SortedKey> order,
                               std::span<const std::byte* const> rows, BlockWriter* out) {
  WritePart parts[2] = {{{}, {}, &part_buffers_[0]}, {{}, {}, &part_buffers_[1]}};
  WritePart *now = &parts[0], *next = &parts[1];
  const auto take = [&](WritePart* part) {
    part->blocks = blocks.first(std::min(part_blocks_, blocks.size()));
    blocks = blocks.subspan(part->blocks.size());
  };
  take(now);
  if (!now->blocks.empty()) TERRACE_RETURN_IF_ERROR(ReadPart(now));
  for (; !now->blocks.empty(); std::swap(now, next)) {
    take(next);
    Status merged, read;
    constexpr int kMerge = 0;
    const auto step = [&](int task) TERRACE_REQUIRES(stage_mu_) {
      if (task == kMerge) {
        merged = MergePart(*now, order, rows, out);
      } else {
        read = ReadPart(next);
      }
    };
    stage_workers_->Run(next->blocks.empty() ? 1 : 2, step);
    TERRACE_RETURN_IF_ERROR(merged);
    TERRACE_RETURN_IF_ERROR(read);
  }
  return OkStatus();
}

Status GroupStore::MergePart(const WritePart& part, std::span<const SortedKey> order,
                             std::span<const std::byte* const> rows, BlockWriter* out) {
  Staged* const staged = out->staged();
  std::vector<BlockRow> merged;
  for (std::size_t b = 0; b < part.blocks.size(); ++b) {
    const auto& [start, begin, end, learns] = part.blocks[b];
    const std::span<const SortedKey> news = order.subspan(begin, end - begin);
    std::optional<BlockView> block;
    if (part.found[b] != 0) {
      TERRACE_ASSIGN_OR_RETURN(block, ParseBlock(BlockIn(*part.buffer, b), start));
    }
    const std::size_t expired = Merge(block ? &*block : nullptr, news, rows, &merged);
    const std::size_t old_rows = block ? block->size() : 0;
    // Nothing that there is to take out; of one that is empty already the space is to come back.
    if (rows.empty() && merged.size() == old_rows && (old_rows > 0 || !block)) continue;
    staged->expired += expired;
    staged->carried += merged.size() - (rows.empty() ? 0 : news.size());
    staged->rows_change +=
        static_cast<std::int64_t>(merged.size()) - static_cast<std::int64_t>(old_rows);
    TERRACE_RETURN_IF_ERROR(out->Add(start, block.has_value(), merged));
  }
  return OkStatus();
}

bool GroupStore::SweepDue() {
  {
    MutexLock state(&mu_);
    sweep_ = std::min(sweep_, std::exchange(sweep_lost_from_, SweepState::Last()));
  }
  return options_.expiry != nullptr &&
         (sweep_.next > 0 || options_.expiry->points() > sweep_.swept_points);
}

Status GroupStore::Sweep(std::size_t blocks, BlockWriter* out) {
  out->staged()->swept_from = sweep_;
  if (sweep_.next == 0) sweep_.points = options_.expiry->points();
  // Those that this write has made anew are swept.
  const std::vector<std::uint64_t> swept = out->staged()->blocks;
  std::vector<BlockKeys> found;  // Of the groups that are looked at.
  bool ended = false;
  while (found.size() < blocks && !ended) {
    MutexLock state(&mu_);
    for (std::size_t n = 0; n < kIndexBatch && found.size() < blocks && !ended; ++n) {
      for (const std::uint64_t start : directory_.StartsOf(sweep_.next)) {
        if (std::binary_search(swept.begin(), swept.end(), start)) continue;
        found.push_back({start, 0, 0, false});
      }
      ended = ++sweep_.next == directory_.groups();
    }
  }
  out->Expect(std::min<std::uint64_t>(found.size(), inner_->rows()));
  TERRACE_RETURN_IF_ERROR(WriteBlocks(found, {}, {}, out));
  if (ended) {
    sweep_.next = 0;
    sweep_.swept_points = sweep_.points;
  }
  std::vector<std::uint64_t>& all = out->staged()->blocks;
  std::sort(all.begin(), all.end());
  return OkStatus();
}

Status GroupStore::ReadPart(WritePart* part) {
  part->found.assign(part->blocks.size(), 0);
  TERRACE_RETURN_IF_ERROR(ReadPending(part));
  std::vector<Key> keys;
  std::vector<std::byte*> blocks;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < part->blocks.size(); ++i) {
    if (part->found[i] != 0) continue;
    keys.push_back(UnmixKey(part->blocks[i].start));
    blocks.push_back(BlockIn(*part->buffer, i).data());
    places.push_back(i);
  }
  std::vector<std::uint8_t> there(keys.size());
  TERRACE_RETURN_IF_ERROR(inner_->Read(keys, blocks, there, nullptr));
  for (std::size_t i = 0; i < places.size(); ++i) part->found[places[i]] = there[i];
  return OkStatus();
}

Status GroupStore::ReadPending(WritePart* part) {
  // What is published meanwhile is found in the store afterwards.
  const auto wants = [&]() TERRACE_REQUIRES(mu_) {
    for (const Staged* staged : pending_) {
      for (const BlockKeys& block : part->blocks) {
        if (std::binary_search(staged->blocks.begin(), staged->blocks.end(), block.start)) {
          return true;
        }
      }
    }
    return false;
  };
  {
    MutexLock state(&mu_);
    if (!wants()) return OkStatus();
  }
  MutexLock publish(&publish_mu_);
  std::vector<Staged*> pending;
  {
    MutexLock state(&mu_);
    pending.assign(pending_.rbegin(), pending_.rend());  // The newest first.
  }
  std::vector<std::uint64_t> wanted;
  std::vector<std::byte*> blocks;
  std::vector<std::size_t> places;
  for (Staged* staged : pending) {
    wanted.clear();
    blocks.clear();
    places.clear();
    for (std::size_t i = 0; i < part->blocks.size(); ++i) {
      const std::uint64_t start = part->blocks[i].start;
      if (part->found[i] != 0) continue;
      if (!std::binary_search(staged->blocks.begin(), staged->blocks.end(), start)) continue;
      wanted.push_back(start);
      blocks.push_back(BlockIn(*part->buffer, i).data());
      places.push_back(i);
    }
    if (wanted.empty()) continue;
    std::vector<std::uint8_t> there(wanted.size());
    TERRACE_RETURN_IF_ERROR(
        inner_->ReadStaged(*staged->rows, wanted, blocks, there, pending_buffer_.span()));
    for (std::size_t i = 0; i < places.size(); ++i) part->found[places[i]] |= there[i];
  }
  return OkStatus();
}

Status GroupStore::Publish(std::unique_ptr<StagedRows> rows) {
  auto* const staged = static_cast<Staged*>(rows.get());
  MutexLock publish(&publish_mu_);
  {
    MutexLock state(&mu_);
    if (staged->broken) {
      return AbortedError("what was staged before these rows was dropped: stage them again");
    }
    TERRACE_CHECK(!pending_.empty() && pending_.front() == staged);
    ++begun_.publishes;
    begun_.divisions += staged->Divides() ? 1 : 0;
  }
  // A key too many does no harm, one that is not there yet would.
  ForBatches(staged->hashes, [&](std::uint64_t hash) TERRACE_REQUIRES(mu_) {
    const std::uint64_t group = directory_.GroupOf(hash);
    if (filters_.IsKnown(group)) filters_.Add(group, hash);
  });
  const Status status = inner_->PublishBlocks(staged->rows.get(), staged->rows_change);
  if (status.ok()) {
    ForBatches(staged->added,
               [&](std::uint64_t start) TERRACE_REQUIRES(mu_) { directory_.Add(start); });
  }
  MutexLock state(&mu_);
  if (status.ok()) {
    staged->published = true;
    pending_.pop_front();
    if (!empty_blocks_.empty()) {
      for (const std::uint64_t start : staged->blocks) empty_blocks_.erase(start);
    }
    empty_blocks_.insert(staged->empty.begin(), staged->empty.end());
    rows_written_.fetch_add(staged->hashes.size(), std::memory_order_relaxed);
    rows_carried_.fetch_add(staged->carried, std::memory_order_relaxed);
    rows_expired_.fetch_add(staged->expired, std::memory_order_relaxed);
    WarnWhenFull();
  }
  ended_ = begun_;
  return status;
}

void GroupStore::ForBatches(std::span<const std::uint64_t> hashes,
                            const std::function<void(std::uint64_t)>& visit) {
  for (std::size_t begin = 0; begin < hashes.size(); begin += kIndexBatch) {
    MutexLock state(&mu_);
    const std::size_t end = std::min(hashes.size(), begin + kIndexBatch);
    for (std::size_t i = begin; i < end; ++i) visit(hashes[i]);
  }
}

void GroupStore::WarnWhenFull() {
  const std::uint64_t rows = inner_->rows_in_blocks();
  if (warned_ || rows <= directory_.groups() * layout_.most_rows) return;
  warned_ = true;
  LogText(
      LogLevel::kWarning,
      fmt::format("table '{}' has {} rows in {}, more than its {} groups were made for: further "
                  "blocks take memory as needed, and their filters say less. Make the next run "
                  "with a larger expected_keys",
                  options_.table, FormatCount(rows), options_.directory,
                  FormatCount(directory_.groups())));
}

void GroupStore::Forget(Staged* staged) {
  if (staged->published) return;
  MutexLock publish(&publish_mu_);
  MutexLock state(&mu_);
  sweep_lost_from_ = std::min(sweep_lost_from_, staged->swept_from);
  const auto at = std::find(pending_.begin(), pending_.end(), staged);
  if (at == pending_.end()) return;
  for (auto behind = at + 1; behind != pending_.end(); ++behind) (*behind)->broken = true;
  pending_.erase(at);
  ++dropped_;
}

std::vector<Key> GroupStore::EmptyBlocks(std::size_t most) {
  std::vector<Key> keys;
  MutexLock state(&mu_);
  if (!pending_.empty()) return keys;
  for (const std::uint64_t start : empty_blocks_) {
    if (keys.size() == most) break;
    keys.push_back(UnmixKey(start));
  }
  return keys;
}

Status GroupStore::EraseBlocks(std::span<const Key> keys) {
  if (keys.empty()) return OkStatus();
  TERRACE_RETURN_IF_ERROR(inner_->Erase(keys));
  MutexLock state(&mu_);
  for (const Key key : keys) empty_blocks_.erase(MixKey(key));
  return OkStatus();
}

Status GroupStore::CompactNow() {
  {
    MutexLock lock(&stage_mu_);
    TERRACE_RETURN_IF_ERROR(inner_->Write({}, {}, {}));  // Whether it can be written to.
    const auto staged = [&] {
      MutexLock state(&mu_);
      return !pending_.empty();
    };
    while (SweepDue() && !staged()) {
      TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<Staged> swept, StageRows({}, {}));
      TERRACE_RETURN_IF_ERROR(Publish(std::move(swept)));
    }
    TERRACE_RETURN_IF_ERROR(EraseBlocks(EmptyBlocks(~std::size_t{0})));
  }
  return inner_->CompactNow();
}

}  // namespace terrace
