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
      for (std::uint64_t& word : lines_[i][next].times) Store(word, 0);
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
      auto& [first, last] = lines_[i][newest].times;
      Store(first, Load(first) >> 1 & kHalves);
      Store(last, (Load(last) & kPassed) | (Load(last) >> 1 & kHalves & ~kPassed));
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
  // Keys between two looks at whether a stretch is full; fewer when it is nearly full.
  constexpr std::uint64_t kLeastGroup = 32, kMostGroup = 256;
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
  std::array<std::uint64_t, kMostGroup> hashes;
  for (std::uint64_t time = TimeOf(tick); !keys.empty();) {
    const std::uint64_t left = MostKeys() - std::min(MostKeys(), newest().keys);
    const std::uint64_t most = std::clamp(left, kLeastGroup, kMostGroup);
    // Without a branch: nobody foresees which keys were there just before.
    std::size_t count = 0, seen = 0;
    for (; seen < keys.size() && count < most; ++seen) {
      const std::uint64_t hash = MixKey(keys[seen]);
      std::uint64_t& recent = recent_[hash % kRecent];
      hashes[count] = hash;
      count += recent != hash ? 1 : 0;
      recent = hash;
    }
    keys = keys.subspan(seen);
    AddToLines({hashes.data(), count}, time);
    // Where no stretch is free, the lines that have room take the rest of this tick.
    if (newest().keys < MostKeys() || !NextIsFree()) continue;
    BeginStretch(tick);
    time = TimeOf(tick);
  }
}

FutureKeys::Spot FutureKeys::FindRoom(Lines* lines, std::uint32_t stretch,
                                      std::uint64_t passed_bits) {
  for (int hops = 0;; ++hops, lines = NextOf(lines)) {
    Line& line = (*lines)[stretch];
    const std::uint32_t ways = FindWays(line, 0);
    if (ways != 0 || hops == kMostHops) return {&line, ways};
    Store(line.times[1], Load(line.times[1]) | passed_bits);
  }
}

void FutureKeys::AddToLines(std::span<const std::uint64_t> hashes, std::uint64_t time) {
  constexpr std::size_t kAhead = 24;
  const std::uint32_t newest = newest_.load(std::memory_order_relaxed);
  const auto prefetch = [&](std::size_t i) __attribute__((always_inline)) {
    __builtin_prefetch(&LinesOf(hashes[i])[newest], 1);
  };
  for (std::size_t i = 0; i < std::min(kAhead, hashes.size()); ++i) prefetch(i);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (i + kAhead < hashes.size()) prefetch(i + kAhead);
    const std::uint64_t mark = MarkOf(hashes[i]), passed_bits = PassedBits(mark);
    Lines* const lines = &LinesOf(hashes[i]);
    Spot spot = Find(lines, newest, mark, passed_bits);
    if (spot.ways == 0) {
      spot = FindRoom(lines, newest, passed_bits);
      if (spot.ways == 0) continue;
      ++stretches_[newest].keys;
    }
    Line& line = *spot.line;
    const auto way = static_cast<std::uint32_t>(std::countr_zero(spot.ways));
    // A reader that sees the mark without the time takes that of the key before.
    const auto put = [](std::uint64_t& word, std::uint64_t bits, std::uint64_t value,
                        std::uint32_t shift) {
      Store(word, (Load(word) & ~(bits << shift)) | value << shift);
    };
    put(TimeWord(line, way), kTimes - 1, time, TimeShift(way));
    put(line.marks[way / 4], 0xffff, mark, way % 4 * 16);
  }
}

}  // namespace terrace
