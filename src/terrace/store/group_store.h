// GroupStore: the store with an index by group (AIBox 4.1, 4.3, 4.4;
// docs/decisions/group-index.md). Over a StoreImpl whose rows are blocks of rows of a group: what
// is in memory of a group is where its block lies and a Bloom filter of its keys. A write reads the
// blocks of its keys, and writes them with its rows; so it knows by itself what is there, and
// neither `stored` nor a RowHolder tell it more. Rows that may go leave their block when it is
// written next; while some are due, a write looks at as many further blocks as it wrote.
//
// Locks, in the order in which they are taken: read_mu_ | stage_mu_, each held by a verb throughout
// and guarding its buffers; publish_mu_, held while staged blocks become those of the store, or are
// read; mu_ last and shortly (a cache that asks for blocks holds its own). The inner store's come
// after all of them.
#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/base/thread.h"
#include "terrace/store/group_block.h"
#include "terrace/store/group_directory.h"
#include "terrace/store/group_filter.h"
#include "terrace/store/store.h"
#include "terrace/store/store_impl.h"

namespace terrace {

class GroupStore final : public Store {
 public:
  static Result<std::unique_ptr<Store>> Create(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                               const StoreOptions& options);
  // What each of its three buffers of blocks takes, beside those of the inner store, where so much
  // is wanted for both.
  static std::uint64_t PartBytes(std::uint64_t wanted, std::uint64_t inner,
                                 std::uint32_t block_bytes);
  static Result<std::unique_ptr<Store>> Open(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                             const StoreOptions& options, const Manifest& named,
                                             const ManifestReference& manifest,
                                             std::span<const ManifestReference> kept);

  Status Read(std::span<const Key> keys, std::span<std::byte* const> rows,
              std::span<std::uint8_t> found, const std::atomic<bool>* stop) override;
  Status Write(std::span<const Key> keys, std::span<const std::byte* const> rows,
               std::span<const std::uint8_t> stored) override;
  Result<std::unique_ptr<StagedRows>> Stage(std::span<const Key> keys,
                                            std::span<const std::byte* const> rows,
                                            std::span<const std::uint8_t> stored) override;
  Status Publish(std::unique_ptr<StagedRows> staged) override;
  void KeepCheckpoints(bool keep) override { inner_->KeepCheckpoints(keep); }
  void ExpectRows(std::uint64_t /*rows*/) override {}  // Few of them are new blocks.
  Status Erase(std::span<const Key> keys) override;
  Result<ManifestReference> Commit(std::uint64_t id) override { return inner_->Commit(id); }
  Status Drop(std::uint64_t id) override { return inner_->Drop(id); }
  Status ForEachRow(std::uint64_t buffer_bytes,
                    const std::function<Status(const RowView&)>& visit) override;
  Status CompactNow() override;
  void SetKeepFree(std::uint64_t bytes, std::uint64_t files) override {
    inner_->SetKeepFree(bytes, files);
  }
  void OpenReserve() override { inner_->OpenReserve(); }
  Status MakeRoom(std::uint64_t bytes) override { return inner_->MakeRoom(bytes); }
  Status MergeFiles(std::uint64_t files) override { return inner_->MergeFiles(files); }
  void SetHolder(RowHolder* /*holder*/) override {}
  void WantSweep() override {}
  StoreStats stats() const override;
  std::uint64_t index_bytes() const override;
  std::uint64_t MostWriteBytes(std::uint64_t rows, std::uint64_t in_order,
                               std::uint64_t writes) const override;
  std::uint64_t LikelyWriteBytes(std::uint64_t rows) const override;
  bool in_blocks() const override { return true; }
  void BlocksOf(std::span<const std::uint64_t> hashes, HashRange* blocks) const override {
    MutexLock lock(&mu_);
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      blocks[i] = {directory_.StartOf(hashes[i]), directory_.LastOf(hashes[i])};
    }
  }
  // A block has rows of either kind.
  std::uint64_t LeastFileRows() const override { return ~std::uint64_t{0}; }
  void Finish() override { inner_->Finish(); }
  Status background_status() const override { return inner_->background_status(); }

 private:
  struct SortedKey {
    std::uint64_t hash;
    std::uint32_t index;  // In the caller's batch.
  };
  // Keys of one block, [begin, end) of a sorted batch.
  struct BlockKeys {
    std::uint64_t start;
    std::uint32_t begin, end;
    bool learns;  // Its keys would tell the filter of its group all that it is to know.
  };
  // What a write changes at a time: of two parts one is read while the other one is merged and
  // written.
  struct WritePart {
    std::span<const BlockKeys> blocks;  // As many as the buffer holds, ascending.
    std::vector<std::uint8_t> found;    // (blocks) Those that are there, in the buffer.
    const HugeBuffer* buffer;
  };
  // How far looking for rows that may go has come.
  struct SweepState {
    std::uint64_t swept_points = 0;  // RowExpiry::points() of the last whole sweep.
    std::uint64_t next = 0;    // The group that is next in the one that goes on; 0: none does.
    std::uint64_t points = 0;  // Of the one that goes on.
    static SweepState Last() { return {~std::uint64_t{0}, 0, 0}; }
    auto operator<=>(const SweepState&) const = default;
  };
  class Staged;  // A write whose blocks are staged.
  class BlockWriter;

  GroupStore(FileSystem* fs, Clock* clock, DiskQuota* quota, const StoreOptions& options,
             const GroupLayout& layout, std::uint64_t groups, GroupFilters filters);
  static Result<std::unique_ptr<GroupStore>> Make(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                                  const StoreOptions& options,
                                                  const GroupLayout& layout, std::uint64_t groups);
  Status Allocate();
  static std::vector<SortedKey> SortKeys(std::span<const Key> keys);
  // With what a failed check of a block's bytes says.
  Result<BlockView> ParseBlock(std::span<const std::byte> block, std::uint64_t least_hash) const;
  std::span<std::byte> BlockIn(const HugeBuffer& buffer, std::size_t i) const {
    return buffer.span().subspan(i * layout_.block_bytes, layout_.block_bytes);
  }

  // --- reading
  // What a look-up may have to do with a Publish that runs beside it.
  struct Moment {
    std::uint64_t publishes = 0, divisions = 0;
    bool operator==(const Moment&) const = default;
  };
  // missing: the keys of blocks that were read without finding them.
  Status LookUp(std::span<const SortedKey> order, std::span<std::byte* const> rows,
                std::span<std::uint8_t> found, const std::atomic<bool>* stop,
                std::vector<SortedKey>* missing) TERRACE_REQUIRES(read_mu_) TERRACE_EXCLUDES(mu_);
  // The blocks to be read for keys from order[*next] on, as many as the buffer holds. `wanted`: of
  // which of the keys; the ranges are of it.
  void PlanPart(std::span<const SortedKey> order, std::size_t* next, std::vector<SortedKey>* wanted,
                std::vector<BlockKeys>* blocks) TERRACE_EXCLUDES(mu_);
  void TakeBlock(const BlockKeys& keys, const BlockView& block, std::span<const SortedKey> wanted,
                 std::span<std::byte* const> rows, std::span<std::uint8_t> found,
                 std::vector<SortedKey>* missing);
  void Learn(std::span<const BlockKeys> blocks, std::span<const std::uint8_t> found,
             const Moment& before) TERRACE_REQUIRES(read_mu_) TERRACE_EXCLUDES(mu_);

  // --- writing
  // No rows: takes the keys out of their blocks.
  Result<std::unique_ptr<Staged>> StageRows(std::span<const Key> keys,
                                            std::span<const std::byte* const> rows)
      TERRACE_REQUIRES(stage_mu_) TERRACE_EXCLUDES(mu_, publish_mu_);
  std::vector<BlockKeys> PlanWrite(std::span<const SortedKey> order) TERRACE_EXCLUDES(mu_);
  // The rows of a block (null: there is none) with those of `news`, or, with no rows, without them;
  // returns how many it leaves out because they may go.
  std::size_t Merge(const BlockView* block, std::span<const SortedKey> news,
                    std::span<const std::byte* const> rows, std::vector<BlockRow>* merged) const;
  // Merges the blocks with the keys of `order` that they say, and writes those that change.
  Status WriteBlocks(std::span<const BlockKeys> blocks, std::span<const SortedKey> order,
                     std::span<const std::byte* const> rows, BlockWriter* out)
      TERRACE_REQUIRES(stage_mu_) TERRACE_EXCLUDES(mu_, publish_mu_);
  Status MergePart(const WritePart& part, std::span<const SortedKey> order,
                   std::span<const std::byte* const> rows, BlockWriter* out)
      TERRACE_EXCLUDES(mu_, publish_mu_);
  // The newest of its blocks, staged ones included. Beside a MergePart of the other one.
  Status ReadPart(WritePart* part) TERRACE_REQUIRES(stage_mu_) TERRACE_EXCLUDES(mu_, publish_mu_);
  Status ReadPending(WritePart* part) TERRACE_REQUIRES(stage_mu_)
      TERRACE_EXCLUDES(mu_, publish_mu_);
  // Looks for rows that may go in up to so many further blocks, from where the last call ended.
  Status Sweep(std::size_t blocks, BlockWriter* out) TERRACE_REQUIRES(stage_mu_)
      TERRACE_EXCLUDES(mu_, publish_mu_);
  bool SweepDue() TERRACE_REQUIRES(stage_mu_);
  // Where the block starts that a row with this hash is to be written to.
  std::uint64_t NewestStartOf(std::uint64_t hash) const TERRACE_REQUIRES(mu_);
  // Up to so many blocks without rows, if nothing is staged, by the keys of their starts.
  std::vector<Key> EmptyBlocks(std::size_t most) TERRACE_REQUIRES(stage_mu_) TERRACE_EXCLUDES(mu_);
  // Gives back their space, once it has taken some.
  Status EraseBlocks(std::span<const Key> keys) TERRACE_REQUIRES(stage_mu_) TERRACE_EXCLUDES(mu_);
  // Calls `visit` for each hash under mu_, which it holds for some of them at a time.
  void ForBatches(std::span<const std::uint64_t> hashes,
                  const std::function<void(std::uint64_t)>& visit) TERRACE_EXCLUDES(mu_);
  void WarnWhenFull() TERRACE_REQUIRES(mu_);
  // It is not published: what was staged behind it was made from blocks that never come.
  void Forget(Staged* staged) TERRACE_EXCLUDES(publish_mu_, mu_);

  // Constant after construction.
  const StoreOptions options_;
  const GroupLayout layout_;
  const std::unique_ptr<StoreImpl> inner_;
  std::size_t part_blocks_ = 0;  // That a buffer holds.

  Mutex read_mu_;
  HugeBuffer read_blocks_ TERRACE_GUARDED_BY(read_mu_);

  Mutex stage_mu_;
  HugeBuffer part_buffers_[2] TERRACE_GUARDED_BY(stage_mu_);
  // One merges and writes while the other reads; only one where nothing is done in the background.
  std::unique_ptr<WorkerGroup> stage_workers_ TERRACE_GUARDED_BY(stage_mu_);
  HugeBuffer pending_buffer_ TERRACE_GUARDED_BY(stage_mu_);
  SweepState sweep_ TERRACE_GUARDED_BY(stage_mu_);

  Mutex publish_mu_;

  mutable Mutex mu_;
  GroupDirectory directory_ TERRACE_GUARDED_BY(mu_);
  GroupFilters filters_ TERRACE_GUARDED_BY(mu_);
  std::deque<Staged*> pending_ TERRACE_GUARDED_BY(mu_);           // Removed under publish_mu_ only.
  std::uint64_t dropped_ TERRACE_GUARDED_BY(mu_) = 0;             // Of those that were pending.
  std::set<std::uint64_t> empty_blocks_ TERRACE_GUARDED_BY(mu_);  // Starts.
  Moment begun_ TERRACE_GUARDED_BY(mu_);
  Moment ended_ TERRACE_GUARDED_BY(mu_);
  // Before the first sweep that went along with a write which was dropped since: it looked in vain.
  SweepState sweep_lost_from_ TERRACE_GUARDED_BY(mu_) = SweepState::Last();
  bool warned_ TERRACE_GUARDED_BY(mu_) = false;

  // Relaxed atomics: counters for stats().
  std::atomic<std::uint64_t> rows_read_{0}, rows_written_{0}, rows_carried_{0}, rows_expired_{0};
  std::atomic<std::uint64_t> mistaken_reads_{0};
};

}  // namespace terrace
