#include "terrace/cache/future_keys.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "terrace/base/check.h"

namespace terrace {

Result<std::unique_ptr<FutureKeys>> FutureKeys::Create(std::uint64_t bytes) {
  TERRACE_CHECK(bytes > 0);
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer memory, HugeBuffer::Allocate(bytes));
  const std::uint64_t lines = memory.size() / sizeof(Line);
  return std::unique_ptr<FutureKeys>(new FutureKeys(std::move(memory), lines));
}

FutureKeys::FutureKeys(HugeBuffer memory, std::uint64_t lines)
    : memory_(std::move(memory)),
      // Zeroed, which is what a line without keys is.
      lines_(reinterpret_cast<Line*>(memory_.data())),
      line_count_(lines),
      recent_(kRecent) {}

bool FutureKeys::CanAdd(std::uint64_t example) const {
  // Beyond seven eighths too many lines are full.
  return coming_ < line_count_ * (kWays * 7 / 8) &&
         example / kTickExamples < now_tick_ + kMostTicksAhead;
}

void FutureKeys::SetNow(std::uint64_t example) {
  const std::uint64_t tick = example / kTickExamples;
  if (coming_ == 0 && swept_lines_ == 0 && now_tick_ == 0) now_tick_ = tick;  // The first time.
  for (; now_tick_ < tick; ++now_tick_) {
    std::uint32_t& past = asked_last_[now_tick_ & kTimeMask];
    coming_ -= past;
    past = 0;
    const std::uint64_t lines = (line_count_ + kTicksOfSweep - 1) / kTicksOfSweep;
    for (std::uint64_t i = 0; i < lines; ++i) SweepLine(swept_lines_++ % line_count_);
  }
  now_.store(static_cast<std::uint32_t>(now_tick_) & kTimeMask, std::memory_order_relaxed);
}

void FutureKeys::SweepLine(std::uint64_t number) {
  Line& line = lines_[number];
  for (std::uint32_t way = 0; way < kWays; ++way) {
    const std::uint32_t word = Load(line, way);
    const auto now = static_cast<std::uint32_t>(now_tick_ + 1) & kTimeMask;
    if (word != 0 && !IsAhead(word, now)) Store(line, way, 0);
  }
}

void FutureKeys::Add(std::span<const Key> keys, std::uint64_t example) {
  constexpr std::size_t kGroup = 32;
  const std::uint64_t tick = example / kTickExamples;
  TERRACE_CHECK(tick < now_tick_ + kMostTicksAhead);
  if (tick < now_tick_) return;  // Training was faster.
  if (tick != recent_tick_) {
    std::fill(recent_.begin(), recent_.end(), 0);
    recent_tick_ = tick;
  }
  std::array<std::uint64_t, kGroup> hashes;
  std::size_t count = 0;
  const auto add_group = [&] {
    for (std::size_t i = 0; i < count; ++i) {
      AddToLine(hashes[i], static_cast<std::uint32_t>(tick) & kTimeMask);
    }
    count = 0;
  };
  for (const Key key : keys) {
    const std::uint64_t hash = MixKey(key);
    std::uint64_t& recent = recent_[hash % kRecent];
    if (recent == hash) continue;
    recent = hash;
    __builtin_prefetch(LineOf(hash), 1);
    hashes[count++] = hash;
    if (count == kGroup) add_group();
  }
  add_group();
}

void FutureKeys::AddToLine(std::uint64_t hash, std::uint32_t time) {
  Line& line = *LineOf(hash);
  const std::uint32_t mark = MarkOf(hash);
  const auto now = static_cast<std::uint32_t>(now_tick_) & kTimeMask;
  std::uint32_t same = 0, past = 0;
  for (std::uint32_t way = 0; way < kWays; ++way) {
    const std::uint32_t word = Load(line, way);
    same |= static_cast<std::uint32_t>((word & ~kTimeMask) == mark) << way;
    past |= static_cast<std::uint32_t>(word == 0 || !IsAhead(word, now)) << way;
  }
  const std::uint32_t places = same != 0 ? same : past;
  if (places == 0) return;
  const auto way = static_cast<std::uint32_t>(std::countr_zero(places));
  if ((past >> way & 1) == 0) {
    --asked_last_[Load(line, way) & kTimeMask];
  } else {
    ++coming_;
  }
  ++asked_last_[time];
  Store(line, way, mark | time);
}

}  // namespace terrace
