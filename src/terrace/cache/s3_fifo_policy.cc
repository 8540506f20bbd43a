#include <algorithm>
#include <array>

#include "terrace/cache/entry_queues.h"
#include "terrace/cache/eviction_policy.h"
#include "terrace/cache/ghost_keys.h"

namespace terrace {
namespace {

// Queues.
constexpr int kSmall = 0;
constexpr int kMain = 1;
constexpr int kComing = 2;  // Of rows that are known to come, none of them pinned.
constexpr int kQueues = 3;
constexpr std::uint64_t kRowsPerSmallRow = 10;  // The small queue's share, as the paper has it.
// Of Entry::frequency: visits since the row came to its queue, and whether a row that is held
// belongs to the main queue.
constexpr std::uint8_t kVisits = 3;
constexpr std::uint8_t kOfMain = 4;
constexpr std::size_t kGroup = 16;  // Rows at the end of a queue that are looked at together.
// Rows leave from the middle when they go otherwise than as victims, and when they have come.
constexpr int kDeadEighths = 2, kDeadEighthsWithComing = 8;

class S3FifoPolicy final : public EvictionPolicy {
 public:
  S3FifoPolicy(RowArena* arena, const FutureKeys* future)
      : arena_(arena),
        future_(future),
        queues_(arena, kQueues, future == nullptr ? kDeadEighths : kDeadEighthsWithComing) {}

  std::uint64_t BytesFor(std::uint64_t rows) const override {
    return queues_.BytesFor(rows) + GhostKeys::BytesFor(rows);
  }
  Status Reserve(std::uint64_t rows) override {
    TERRACE_RETURN_IF_ERROR(ghosts_.Reserve(rows));
    return queues_.Reserve(rows);
  }
  std::uint64_t bytes() const override { return queues_.bytes() + ghosts_.bytes(); }
  void SetLimit(std::uint64_t rows) override {
    small_limit_ = rows / kRowsPerSmallRow;
    ghosts_.SetWindow(rows - small_limit_);
  }

  void Visit(std::span<const EntryId> entries) override {
    for (const EntryId id : entries) {
      Entry& entry = arena_->entry(id);
      entry.frequency =
          static_cast<std::uint8_t>(entry.frequency + ((entry.frequency & kVisits) != kVisits));
      if (entry.place == kFirstQueue + kComing) {
        entry.place = kHeld;
        --coming_.rows;
      }
    }
  }

  void Admit(std::span<const EntryId> entries) override {
    if (any_ghosts_) {
      for (const EntryId id : entries) ghosts_.Prefetch(MixKey(arena_->entry(id).key));
    }
    for (const EntryId id : entries) {
      Entry& entry = arena_->entry(id);
      const bool of_main = any_ghosts_ && ghosts_.Take(MixKey(entry.key));
      entry.frequency = of_main ? kOfMain : 0;
      // It can't leave before its pins go: in a queue it would only be passed over.
      entry.place = kHeld;
      held_small_ += of_main ? 0 : 1;
    }
  }

  void Release(std::span<const EntryId> entries) override {
    for (const EntryId id : entries) {
      if ((arena_->entry(id).frequency & kOfMain) == 0) --held_small_;
      Push(id);
    }
  }

  void Forget(EntryId id) override {
    const Entry& entry = arena_->entry(id);
    if (entry.place == kFirstQueue + kSmall) {
      --small_rows_;
    } else if (entry.place == kFirstQueue + kMain) {
      --main_rows_;
    } else if (entry.place == kFirstQueue + kComing) {
      --coming_.rows;
    } else if ((entry.frequency & kOfMain) == 0) {
      --held_small_;
    }
  }

  std::size_t TakeVictims(std::size_t count, EntryId* victims) override {
    std::size_t taken = TakeStranded(count, victims);
    while (taken < count) {
      const bool small =
          small_rows_ > 0 && (small_rows_ + held_small_ >= small_limit_ || main_rows_ == 0);
      if (!small && main_rows_ == 0) {
        if (coming_.rows == 0) break;
        victims[taken++] = queues_.Pop(kComing);
        --coming_.rows;
        ++coming_.evicted;
        continue;
      }
      std::uint64_t& rows = small ? small_rows_ : main_rows_;
      // Several where the future is asked for each, so that its lines come from memory together.
      std::array<EntryId, kGroup> group;
      const std::size_t group_size =
          future_ == nullptr
              ? 1
              : std::min({group.size(), count - taken, static_cast<std::size_t>(rows)});
      for (std::size_t i = 0; i < group_size; ++i) {
        group[i] = queues_.Pop(small ? kSmall : kMain);
        TERRACE_CHECK(group[i] != kNoEntry);
        if (future_ != nullptr) future_->Prefetch(MixKey(arena_->entry(group[i]).key));
      }
      rows -= group_size;
      for (std::size_t i = 0; i < group_size; ++i) {
        if (Stays(group[i], small)) continue;
        if (small) ghosts_.Prefetch(MixKey(arena_->entry(group[i]).key));
        victims[taken++] = group[i];
      }
    }
    for (std::size_t i = 0; i < taken; ++i) {
      const Entry& entry = arena_->entry(victims[i]);
      if ((entry.frequency & kOfMain) != 0) continue;
      ghosts_.Add(MixKey(entry.key));
      any_ghosts_ = true;
    }
    return taken;
  }

  void Sweep() override { queues_.Sweep(); }
  std::uint8_t hot_frequency() const override { return 1; }
  ComingRows coming() const override { return coming_; }

 private:
  // Looks at as many of the rows that have stayed longest because they come. One that does not, or
  // not soon any more, is a victim: it was taken for another, or fewer examples count as soon.
  std::size_t TakeStranded(std::size_t count, EntryId* victims) {
    std::size_t taken = 0;
    for (std::size_t left = std::min<std::size_t>(count, coming_.rows); left > 0;) {
      std::array<EntryId, kGroup> group;
      const std::size_t group_size = std::min(group.size(), left);
      left -= group_size;
      for (std::size_t i = 0; i < group_size; ++i) {
        group[i] = queues_.Pop(kComing);
        TERRACE_CHECK(group[i] != kNoEntry);
        future_->Prefetch(MixKey(arena_->entry(group[i]).key));
      }
      for (std::size_t i = 0; i < group_size; ++i) {
        if (future_->Coming(MixKey(arena_->entry(group[i]).key))) {
          queues_.Push(kComing, group[i]);
        } else {
          victims[taken++] = group[i];
          --coming_.rows;
        }
      }
    }
    return taken;
  }

  // Whether a row that came to the end of its queue is no victim, and goes where it belongs.
  bool Stays(EntryId id, bool small) {
    Entry& entry = arena_->entry(id);
    const bool visited = (entry.frequency & kVisits) != 0;
    if (small && visited) entry.frequency = kOfMain;
    if (entry.pins > 0) {
      // It comes back when its last pin goes.
      if (small && !visited) ++held_small_;
      return true;
    }
    if (future_ != nullptr && future_->Coming(MixKey(entry.key))) {
      entry.frequency = kOfMain;
      queues_.Push(kComing, id);
      ++coming_.rows;
      return true;
    }
    if (!visited) return false;
    if (!small) --entry.frequency;
    Push(id);
    return true;
  }

  // To the end of its queue.
  void Push(EntryId id) {
    const bool of_main = (arena_->entry(id).frequency & kOfMain) != 0;
    ++(of_main ? main_rows_ : small_rows_);
    queues_.Push(of_main ? kMain : kSmall, id);
  }

  RowArena* const arena_;
  const FutureKeys* const future_;
  EntryQueues queues_;
  GhostKeys ghosts_;
  bool any_ghosts_ = false;
  std::uint64_t small_limit_ = 0;  // Rows, held ones included.
  // In the queues, pinned ones too.
  std::uint64_t small_rows_ = 0;
  std::uint64_t main_rows_ = 0;
  ComingRows coming_;
  std::uint64_t held_small_ = 0;  // Of the small queue, but not in it while they are pinned.
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeS3FifoPolicy(RowArena* arena, const FutureKeys* future) {
  return std::make_unique<S3FifoPolicy>(arena, future);
}

}  // namespace terrace
