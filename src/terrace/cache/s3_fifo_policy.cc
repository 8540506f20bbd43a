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
constexpr int kComing = 2;  // From here on: of rows that are known to come, none of them pinned.
constexpr std::uint64_t kRowsPerSmallRow = 10;  // The small queue's share, as the paper has it.
// Of Entry::frequency: visits since the row came to its queue, and whether a row that is held
// belongs to the main queue.
constexpr std::uint8_t kVisits = 3;
constexpr std::uint8_t kOfMain = 4;
constexpr std::size_t kGroup = 16;  // Rows at the end of a queue that are looked at together.
// Rows leave from the middle when they go otherwise than as victims, and when they have come.
constexpr int kDeadEighths = 2, kDeadEighthsWithComing = 8;

// Entry::position of a victim that was known to come: no reference to it is left.
constexpr std::uint32_t kOfComing = ~std::uint32_t{0};
// Rows that are known to come, by when: each queue has those of so many ticks, one time after
// another, round and round; what comes later than that is in the last one.
constexpr std::uint64_t kTicksOfQueue = 8;
constexpr std::uint64_t kComingQueues = EntryQueues::kMaxQueues - kComing;

class S3FifoPolicy final : public EvictionPolicy {
 public:
  S3FifoPolicy(RowArena* arena, const FutureKeys* future)
      : arena_(arena),
        future_(future),
        queues_(arena, future == nullptr ? kComing : EntryQueues::kMaxQueues,
                future == nullptr ? kDeadEighths : kDeadEighthsWithComing) {}

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
      if (entry.place >= kFirstQueue + kComing) {
        LeaveComing(entry.place);
        entry.place = kHeld;
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
    } else if (entry.place >= kFirstQueue + kComing) {
      LeaveComing(entry.place);
    } else if ((entry.frequency & kOfMain) == 0) {
      --held_small_;
    }
  }

  std::size_t TakeVictims(std::size_t count, EntryId* victims) override {
    std::size_t taken = future_ == nullptr ? 0 : TakeOverdue(count, victims);
    while (taken < count) {
      const bool small =
          small_rows_ > 0 && (small_rows_ + held_small_ >= small_limit_ || main_rows_ == 0);
      if (!small && main_rows_ == 0) {
        if (coming_.rows == 0) break;
        // The one that comes last.
        while (coming_rows_[last_ % kComingQueues] == 0) --last_;
        victims[taken++] = PopComing(last_);
        arena_->entry(victims[taken - 1]).position = kOfComing;
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
        if (future_ != nullptr) future_->Prefetch(MixKey(arena_->entry(group[i]).key), !small);
      }
      rows -= group_size;
      for (std::size_t i = 0; i < group_size; ++i) {
        if (Stays(group[i], small)) continue;
        if (small) ghosts_.Prefetch(MixKey(arena_->entry(group[i]).key));
        victims[taken++] = group[i];
      }
    }
    return taken;
  }

  void PutBack(std::span<const EntryId> victims) override {
    for (const EntryId id : victims) {
      if (arena_->entry(id).position == kOfComing) --coming_.evicted;
      Push(id);
    }
  }

  void Leave(std::span<const EntryId> victims) override {
    for (const EntryId id : victims) {
      const Entry& entry = arena_->entry(id);
      if ((entry.frequency & kOfMain) != 0) continue;
      ghosts_.Add(MixKey(entry.key));
      any_ghosts_ = true;
    }
  }

  void Sweep() override { queues_.Sweep(); }
  std::uint8_t hot_frequency() const override { return 1; }
  ComingRows coming() const override { return coming_; }

 private:
  // Of a row that is in no queue: whether it is known to come, and has its place by when.
  bool PushIfComing(EntryId id) {
    Entry& entry = arena_->entry(id);
    const std::uint64_t ticks = future_->TicksUntilNext(MixKey(entry.key));
    if (ticks == FutureKeys::kNever) return false;
    const std::uint64_t now = future_->now();
    if (coming_.rows == 0) first_ = last_ = now / kTicksOfQueue;
    const std::uint64_t time = std::min((now + ticks) / kTicksOfQueue, first_ + kComingQueues - 1);
    last_ = std::max(last_, time);
    entry.frequency = kOfMain;
    queues_.Push(kComing + static_cast<int>(time % kComingQueues), id);
    ++coming_rows_[time % kComingQueues];
    ++coming_.rows;
    return true;
  }

  EntryId PopComing(std::uint64_t time) {
    const EntryId id = queues_.Pop(kComing + static_cast<int>(time % kComingQueues));
    TERRACE_CHECK(id != kNoEntry);
    LeaveComing(static_cast<std::uint8_t>(kFirstQueue + kComing + time % kComingQueues));
    return id;
  }
  void LeaveComing(std::uint8_t place) {
    --coming_rows_[place - kFirstQueue - kComing];
    --coming_.rows;
  }

  // Rows that should have come by now, which were most often taken for others: those that are not
  // known to come later.
  std::size_t TakeOverdue(std::size_t count, EntryId* victims) {
    const std::uint64_t now = future_->now() / kTicksOfQueue;
    std::size_t taken = 0;
    while (true) {
      std::array<EntryId, kGroup> group;
      std::size_t size = 0;
      while (coming_.rows > 0 && first_ < now && size < std::min(kGroup, count - taken)) {
        if (coming_rows_[first_ % kComingQueues] == 0) {
          ++first_;
          continue;
        }
        group[size] = PopComing(first_);
        future_->Prefetch(MixKey(arena_->entry(group[size]).key));
        ++size;
      }
      if (size == 0) return taken;
      for (std::size_t i = 0; i < size; ++i) {
        if (!PushIfComing(group[i])) victims[taken++] = group[i];
      }
    }
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
    if (future_ != nullptr && PushIfComing(id)) return true;
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
  std::array<std::uint64_t, kComingQueues> coming_rows_{};
  // Times of the queues (ticks / kTicksOfQueue) that may have rows.
  std::uint64_t first_ = 0, last_ = 0;
  std::uint64_t held_small_ = 0;  // Of the small queue, but not in it while they are pinned.
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeS3FifoPolicy(RowArena* arena, const FutureKeys* future) {
  return std::make_unique<S3FifoPolicy>(arena, future);
}

}  // namespace terrace
