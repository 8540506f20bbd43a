#include "terrace/cache/future_keys.h"

#include <utility>

#include "terrace/base/check.h"

namespace terrace {

Result<std::unique_ptr<FutureKeys>> FutureKeys::Create(std::uint64_t bytes) {
  TERRACE_CHECK(bytes > 0);
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer memory, HugeBuffer::Allocate(bytes));
  const std::uint64_t lines = memory.size() / sizeof(Lines);
  return std::unique_ptr<FutureKeys>(new FutureKeys(std::move(memory), lines));
}

FutureKeys::FutureKeys(HugeBuffer memory, std::uint64_t lines)
    : memory_(std::move(memory)),
      // Zeroed, which is what a line without keys is.
      lines_(reinterpret_cast<Lines*>(memory_.data())),
      line_count_(lines),
      recent_(kRecent) {}

bool FutureKeys::NextIsFree() const {
  const std::uint32_t next = (newest_.load(std::memory_order_relaxed) + 1) % kStretches;
  return stretches_[next].end.load(std::memory_order_relaxed) <= now();
}

bool FutureKeys::CanAdd(std::uint64_t example) const {
  const std::uint64_t tick = example / kTickExamples;
  if (tick >= now() + kNever) return false;
  const Stretch& newest = stretches_[newest_.load(std::memory_order_relaxed)];
  const std::uint64_t start = newest.start.load(std::memory_order_relaxed);
  return (newest.keys < MostKeys() && tick < start + kMostStretchTicks) || NextIsFree();
}

std::uint64_t FutureKeys::coming() const {
  std::uint64_t keys = 0;
  ForStretches(now(), [&](std::uint32_t, const Stretch& stretch) {
    keys += stretch.keys;
    return false;
  });
  return keys;
}

void FutureKeys::SetNow(std::uint64_t example) {
  now_.store(example / kTickExamples, std::memory_order_relaxed);
}

void FutureKeys::BeginStretch(std::uint64_t tick) {
  if (!NextIsFree()) return;
  const std::uint32_t before = newest_.load(std::memory_order_relaxed);
  const std::uint32_t next = (before + 1) % kStretches;
  Stretch& stretch = stretches_[next];
  if (stretch.keys > 0) {
    for (std::uint64_t i = 0; i < line_count_; ++i) {
      for (std::uint64_t& word : lines_[i][next].marks) Store(word, 0);
    }
  }
  // As long as the last one, and a little longer.
  const std::uint64_t length = stretches_[before].end.load(std::memory_order_relaxed) -
                               stretches_[before].start.load(std::memory_order_relaxed);
  stretch.keys = 0;
  stretch.unit.store(length * 9 / 8 / kTimes + 1, std::memory_order_relaxed);
  stretch.start.store(tick, std::memory_order_relaxed);
  newest_.store(next, std::memory_order_relaxed);
  std::fill(recent_.begin(), recent_.end(), 0);
  recent_time_ = 0;
}

std::uint64_t FutureKeys::TimeOf(std::uint64_t tick) {
  const std::uint32_t newest = newest_.load(std::memory_order_relaxed);
  Stretch& stretch = stretches_[newest];
  std::uint64_t unit = stretch.unit.load(std::memory_order_relaxed);
  const std::uint64_t since = tick - stretch.start.load(std::memory_order_relaxed);
  for (; since / unit >= kTimes; unit *= 2) {
    for (std::uint64_t i = 0; i < line_count_; ++i) {
      constexpr std::uint64_t kHalves = 0x7777'7777'7777'7777;
      for (std::uint64_t& word : lines_[i][newest].times) Store(word, Load(word) >> 1 & kHalves);
    }
    stretch.unit.store(2 * unit, std::memory_order_relaxed);
  }
  if (since / unit != recent_time_) {
    std::fill(recent_.begin(), recent_.end(), 0);
    recent_time_ = since / unit;
  }
  stretch.end.store(tick + 1, std::memory_order_relaxed);
  return since / unit;
}

void FutureKeys::Add(std::span<const Key> keys, std::uint64_t example) {
  constexpr std::size_t kGroup = 32;
  const std::uint64_t tick = example / kTickExamples;
  const std::uint64_t from = now();
  TERRACE_CHECK(tick < from + kNever);
  if (tick < from) return;  // Training was faster.
  const auto newest = [this]() -> const Stretch& {
    return stretches_[newest_.load(std::memory_order_relaxed)];
  };
  if (tick >= newest().start.load(std::memory_order_relaxed) + kMostStretchTicks ||
      newest().end.load(std::memory_order_relaxed) <= from) {
    BeginStretch(tick);
  }
  std::array<std::uint64_t, kGroup> hashes;
  std::size_t count = 0;
  std::uint64_t time = TimeOf(tick);
  const auto add_group = [&] {
    for (std::size_t i = 0; i < count; ++i) AddToLine(hashes[i], time);
    count = 0;
    // Where no stretch is free, the lines that have room take the rest of this tick.
    if (newest().keys < MostKeys() || !NextIsFree()) return;
    BeginStretch(tick);
    time = TimeOf(tick);
  };
  for (const Key key : keys) {
    const std::uint64_t hash = MixKey(key);
    std::uint64_t& recent = recent_[hash % kRecent];
    if (recent == hash) continue;
    recent = hash;
    __builtin_prefetch(&LinesOf(hash)[newest_.load(std::memory_order_relaxed)], 1);
    hashes[count++] = hash;
    if (count == kGroup) add_group();
  }
  add_group();
}

void FutureKeys::AddToLine(std::uint64_t hash, std::uint64_t time) {
  const std::uint32_t newest = newest_.load(std::memory_order_relaxed);
  Line& line = LinesOf(hash)[newest];
  const std::uint64_t mark = MarkOf(hash);
  std::uint64_t ways = FindWays(line, mark);
  if (ways == 0) {
    ways = FindWays(line, 0);
    if (ways == 0) return;
    ++stretches_[newest].keys;
  }
  const Way way = FirstOf(ways);
  // A reader that sees the mark without the time takes that of the key before.
  const std::uint64_t times = Load(line.times[way.time_word]);
  Store(line.times[way.time_word],
        (times & ~((kTimes - 1) << way.time_shift)) | time << way.time_shift);
  const std::uint64_t marks = Load(line.marks[way.word]);
  Store(line.marks[way.word], (marks & ~(std::uint64_t{0xffff} << way.shift)) | mark << way.shift);
}

}  // namespace terrace
