// FakeStore: a Store in memory for tests of the layers above. Counts calls, fails the call it is
// told to, and holds Read or Write in flight until a test lets them go. Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/base/rng.h"
#include "terrace/store/store.h"

namespace terrace {

class FakeStore final : public Store {
 public:
  explicit FakeStore(std::uint32_t row_bytes) : row_bytes_(row_bytes) {}

  Status Read(std::span<const Key> keys, std::span<std::byte* const> rows,
              std::span<std::uint8_t> found, const std::atomic<bool>* stop) override;
  // The test ends when `stored` is not the truth.
  Status Write(std::span<const Key> keys, std::span<const std::byte* const> rows,
               std::span<const std::uint8_t> stored) override;
  Result<std::unique_ptr<StagedRows>> Stage(std::span<const Key> keys,
                                            std::span<const std::byte* const> rows,
                                            std::span<const std::uint8_t> stored) override;
  Status Publish(std::unique_ptr<StagedRows> staged) override;
  void KeepCheckpoints(bool keep) override { keeps_checkpoints = keep; }
  void ExpectRows(std::uint64_t /*rows*/) override {}
  Status Erase(std::span<const Key> keys) override;
  Result<ManifestReference> Commit(std::uint64_t id) override;
  Status Drop(std::uint64_t id) override;
  // Only what the cache's tests need is here.
  Status ForEachRow(std::uint64_t buffer_bytes,
                    const std::function<Status(const RowView&)>& visit) override;
  Status CompactNow() override;
  void SetKeepFree(std::uint64_t /*bytes*/, std::uint64_t /*files*/) override {}
  void OpenReserve() override {}
  Status MakeRoom(std::uint64_t /*bytes*/) override { return OkStatus(); }
  Status MergeFiles(std::uint64_t /*files*/) override { return OkStatus(); }
  void SetHolder(RowHolder* /*holder*/) override {}  // Nothing expires in it.
  void WantSweep() override {}
  StoreStats stats() const override;
  std::uint64_t index_bytes() const override { return 0; }
  std::uint64_t MostWriteBytes(std::uint64_t rows, std::uint64_t /*in_order*/,
                               std::uint64_t writes) const override {
    return rows * (row_bytes_ + 64) + writes * 16384;
  }
  bool in_blocks() const override { return groups_ > 0; }
  void BlocksOf(std::span<const std::uint64_t> hashes, HashRange* blocks) const override {
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      const std::uint64_t group = RangeOfHash(hashes[i], groups_);
      blocks[i] = {FirstHashOf(group, groups_), FirstHashOf(group + 1, groups_) - 1};
    }
  }
  std::uint64_t LeastFileRows() const override { return 1; }
  void Finish() override {}
  Status background_status() const override { return OkStatus(); }

  std::atomic<bool> keeps_checkpoints{false};  // As it was told last.
  std::atomic<bool> fails_for_room{false};     // Stages that fail do so with kOutOfRoom.

  // Before a cache has it: says that it has a block for each of so many groups.
  void SetGroups(std::uint64_t groups) { groups_ = groups; }
  // The n-th Read, Write or Stage from now (0: the next) fails with kIo, and changes nothing;
  // negative: none.
  void FailAt(std::int64_t call);
  bool FaultWasHit() const;  // Of FailAt.
  // From now on every Write and Stage (every Publish) fails, or none.
  void FailWrites(bool fail);
  void FailPublishes(bool fail);
  // Reads, Writes (and Stages), Publishes from now on stop at their start until LetGo.
  void HoldReads();
  void HoldReadsOf(Key key);
  void HoldWrites();
  void HoldPublishes();
  void LetReadsGo();
  void LetGo();
  // Returns when a Read (Write) is held; when so many Reads have returned.
  void WaitForHeldRead();
  void WaitForReads(std::uint64_t count);
  void WaitForHeldWrite();
  void WaitForHeldPublish();
  int staged() const;  // Handles that are neither published nor dropped.

  bool Contains(Key key) const;
  std::vector<std::byte> Get(Key key) const;
  std::size_t size() const;
  std::uint64_t calls() const;
  // Of each Write that succeeded.
  std::vector<std::vector<Key>> write_keys() const;
  std::vector<std::size_t> write_sizes() const;  // Rows.

 private:
  class Staged;
  // Counts the call; true when it is to fail.
  bool NextFails() TERRACE_REQUIRES(mu_);

  const std::uint32_t row_bytes_;
  std::uint64_t groups_ = 0;
  mutable Mutex mu_;
  CondVar changed_;
  std::unordered_map<Key, std::vector<std::byte>> rows_ TERRACE_GUARDED_BY(mu_);
  std::vector<std::vector<Key>> write_keys_ TERRACE_GUARDED_BY(mu_);
  std::uint64_t calls_ TERRACE_GUARDED_BY(mu_) = 0;
  std::int64_t fail_at_ TERRACE_GUARDED_BY(mu_) = -1;
  bool fail_writes_ TERRACE_GUARDED_BY(mu_) = false;
  bool fail_publishes_ TERRACE_GUARDED_BY(mu_) = false;
  bool hold_publishes_ TERRACE_GUARDED_BY(mu_) = false;
  int held_publishes_ TERRACE_GUARDED_BY(mu_) = 0;
  int publishes_ TERRACE_GUARDED_BY(mu_) = 0;                 // In progress.
  int staged_ TERRACE_GUARDED_BY(mu_) = 0;                    // Alive.
  std::uint64_t stage_number_ TERRACE_GUARDED_BY(mu_) = 0;    // Of the last.
  std::uint64_t publish_number_ TERRACE_GUARDED_BY(mu_) = 0;  // Of the last that was published.
  bool hold_reads_ TERRACE_GUARDED_BY(mu_) = false;
  std::optional<Key> held_key_ TERRACE_GUARDED_BY(mu_);  // Whose Reads are held.
  std::uint64_t reads_ended_ TERRACE_GUARDED_BY(mu_) = 0;
  bool hold_writes_ TERRACE_GUARDED_BY(mu_) = false;
  int held_reads_ TERRACE_GUARDED_BY(mu_) = 0;
  int held_writes_ TERRACE_GUARDED_BY(mu_) = 0;
  int writes_ TERRACE_GUARDED_BY(mu_) = 0;  // In progress: the contract allows one.
};

}  // namespace terrace
