#include <algorithm>
#include <array>
#include <bit>

#include "terrace/cache/entry_queues.h"
#include "terrace/cache/eviction_policy.h"

namespace terrace {
namespace {

constexpr int kLru = 0;  // Queue 0; the classes of the LFU follow.
constexpr std::uint8_t kTopFrequency = 255;
constexpr std::uint8_t kExactFrequencies = 16;
constexpr int kDeadEighths = 8;  // Every visit makes one.
// Frequencies halved with each victim, at most: what a victim costs stays bounded.
constexpr double kMostAgedPerVictim = 8;

// Classes of frequencies 0..15, then 16..23, 24..31, ...
constexpr int ClassOf(std::uint8_t frequency) {
  return frequency < kExactFrequencies ? frequency
                                       : kExactFrequencies + (frequency - kExactFrequencies) / 8;
}
constexpr int kClasses = ClassOf(kTopFrequency) + 1;
constexpr int kQueues = kClasses + 1;
static_assert(kQueues <= EntryQueues::kMaxQueues && kClasses <= 64);

class LruLfuPolicy final : public EvictionPolicy {
 public:
  LruLfuPolicy(const EvictionOptions& options, RowArena* arena)
      : arena_(arena),
        has_lru_(options.type == EvictionType::kLruLfu),
        lru_share_(options.lru_share),
        half_life_(options.half_life),
        queues_(arena, kQueues, kDeadEighths) {}

  std::uint64_t BytesFor(std::uint64_t rows) const override { return queues_.BytesFor(rows); }
  Status Reserve(std::uint64_t rows) override { return queues_.Reserve(rows); }
  std::uint64_t bytes() const override { return queues_.bytes(); }
  void SetLimit(std::uint64_t rows) override {
    lru_limit_ = static_cast<std::uint64_t>(static_cast<double>(rows) * lru_share_);
  }

  void Visit(std::span<const EntryId> entries) override {
    visits_ += entries.size();
    for (const EntryId id : entries) {
      Entry& entry = arena_->entry(id);
      if (entry.frequency != kTopFrequency) ++entry.frequency;
      if (entry.place == kHeld) continue;
      CountOut(entry.place);
      entry.place = kHeld;
      ++held_rows_;
    }
  }

  void Admit(std::span<const EntryId> entries) override {
    visits_ += entries.size();
    for (const EntryId id : entries) {
      Entry& entry = arena_->entry(id);
      entry.frequency = 1;
      entry.place = kHeld;
    }
    held_rows_ += entries.size();
  }

  void Release(std::span<const EntryId> entries) override {
    held_rows_ -= entries.size();
    if (!has_lru_) {
      for (const EntryId id : entries) PushLfu(id);
      return;
    }
    for (const EntryId id : entries) queues_.Push(kLru, id);
    lru_rows_ += entries.size();
  }

  void Forget(EntryId id) override {
    const std::uint8_t place = arena_->entry(id).place;
    if (place == kHeld) {
      --held_rows_;
    } else {
      CountOut(place);
    }
  }

  std::size_t TakeVictims(std::size_t count, EntryId* victims) override {
    Balance();
    Age(static_cast<double>(count) * kMostAgedPerVictim);
    std::size_t taken = 0;
    while (taken < count) {
      int queue = kLru;
      if (used_classes_ != 0) {
        queue = 1 + std::countr_zero(used_classes_);
      } else if (lru_rows_ == 0) {
        break;
      }
      const EntryId id = queues_.Pop(queue);
      TERRACE_CHECK(id != kNoEntry);
      CountOut(static_cast<std::uint8_t>(kFirstQueue + queue));
      victims[taken++] = id;
    }
    return taken;
  }

  void PutBack(std::span<const EntryId> victims) override {
    for (const EntryId id : victims) PushLfu(id);
  }

  void Leave(std::span<const EntryId> /*victims*/) override {}

  void Sweep() override { queues_.Sweep(); }
  std::uint8_t hot_frequency() const override { return 2; }

 private:
  // Counts a row out of its queue.
  void CountOut(std::uint8_t place) {
    const int queue = place - kFirstQueue;
    if (queue == kLru) {
      --lru_rows_;
      return;
    }
    const int frequency_class = queue - 1;
    if (--class_rows_[static_cast<std::size_t>(frequency_class)] == 0) {
      used_classes_ &= ~(std::uint64_t{1} << frequency_class);
    }
  }

  void PushLfu(EntryId id) {
    const int frequency_class = ClassOf(arena_->entry(id).frequency);
    queues_.Push(1 + frequency_class, id);
    ++class_rows_[static_cast<std::size_t>(frequency_class)];
    used_classes_ |= std::uint64_t{1} << frequency_class;
  }

  // What the LRU holds beyond its limit, oldest first, goes to the LFU. Done only when victims are
  // wanted: a row that is visited meanwhile would have come back to the LRU, and one that is not
  // keeps its frequency and its turn.
  void Balance() {
    while (lru_rows_ > 0 && lru_rows_ + held_rows_ > lru_limit_) {
      const EntryId id = queues_.Pop(kLru);
      TERRACE_CHECK(id != kNoEntry);
      --lru_rows_;
      PushLfu(id);
    }
  }

  // Halves the frequencies of as many rows as the visits since the last call pay for, in the order
  // of their places in memory: so each row's is halved once in half_life_ visits for every row, and
  // counts the visits of a row less the longer they are ago.
  void Age(double most) {
    if (half_life_ == 0) return;
    // What could not be halved in time for want of victims is let go beyond one whole round.
    due_ = std::min(due_ + static_cast<double>(visits_) / half_life_,
                    static_cast<double>(arena_->used_rows()));
    visits_ = 0;
    for (; due_ >= 1 && most >= 1; --due_, --most) HalveNext();
  }

  void HalveNext() {
    const EntryId id = NextInMemory();
    if (id == kNoEntry) return;
    Entry& entry = arena_->entry(id);
    if (entry.place < kHeld) return;
    entry.frequency /= 2;
    const int queue = entry.place - kFirstQueue;
    if (entry.place == kHeld || queue == kLru || queue == 1 + ClassOf(entry.frequency)) return;
    CountOut(entry.place);
    entry.place = kHeld;
    PushLfu(id);
  }

  // The entry behind the last one that was aged; kNoEntry at the end of a chunk that is absent.
  EntryId NextInMemory() {
    if (age_chunk_ >= arena_->chunk_numbers()) age_chunk_ = 0;
    if (arena_->present(age_chunk_) && age_slot_ < arena_->touched(age_chunk_)) {
      return arena_->id(age_chunk_, age_slot_++);
    }
    ++age_chunk_;
    age_slot_ = 0;
    return kNoEntry;
  }

  RowArena* const arena_;
  const bool has_lru_;
  const double lru_share_;
  const double half_life_;  // Visits for each row; 0: frequencies are not halved.
  EntryQueues queues_;
  std::uint64_t lru_limit_ = 0;  // Rows, held ones included.
  std::uint64_t held_rows_ = 0;
  std::uint64_t lru_rows_ = 0;  // Not held.
  std::array<std::uint64_t, kClasses> class_rows_{};
  std::uint64_t used_classes_ = 0;  // Bit c: class c has rows.
  std::uint64_t visits_ = 0;        // Since Age() was called.
  double due_ = 0;                  // Rows that are to be halved.
  std::uint32_t age_chunk_ = 0, age_slot_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeLruLfuPolicy(const EvictionOptions& options, RowArena* arena) {
  return std::make_unique<LruLfuPolicy>(options, arena);
}

}  // namespace terrace
