#include "terrace/store/key_windows.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "terrace/base/ids.h"
#include "terrace/store/radix_sort.h"

namespace terrace {
namespace {

constexpr std::uint64_t kLastHash = std::numeric_limits<std::uint64_t>::max();
// Two passes; what they leave is nearly sorted.
constexpr int kSortedBits = 22;

KeyEntry EntryAt(const SectionCursor& cursor, std::uint64_t i) {
  KeyEntry entry;
  std::memcpy(&entry, cursor.entry(i), sizeof entry);
  return entry;
}

Status OutOfOrder(const SectionCursor& cursor, std::uint64_t i) {
  return CorruptionError(fmt::format("{}: the keys at offset {} are out of order", cursor.path(),
                                     cursor.entry_offset(i)));
}

}  // namespace

KeyWindows::KeyWindows(std::span<SectionCursor> cursors, std::uint64_t entries)
    : cursors_(cursors), span_(kLastHash / (entries / kWindowEntries + 1)) {}

Result<std::uint64_t> KeyWindows::LimitOf() const {
  std::uint64_t limit = base_ > kLastHash - span_ ? kLastHash : base_ + span_;
  for (const SectionCursor& cursor : cursors_) {
    if (cursor.buffered_end() == cursor.entries()) continue;
    const std::uint64_t last = cursor.buffered_end() - 1;
    const std::uint64_t hash = MixKey(EntryAt(cursor, last).key);
    if (hash < base_) return OutOfOrder(cursor, last);
    limit = std::min(limit, hash);
  }
  return limit;
}

Result<std::span<const KeyVersion>> KeyWindows::Next() {
  window_.clear();
  while (window_.empty()) {
    bool done = true;
    for (SectionCursor& cursor : cursors_) {
      if (cursor.done()) continue;
      done = false;
      if (cursor.needs_fill()) TERRACE_RETURN_IF_ERROR(cursor.Fill());
    }
    if (done) break;
    TERRACE_ASSIGN_OR_RETURN(const std::uint64_t limit, LimitOf());
    for (std::uint32_t source = 0; source < cursors_.size(); ++source) {
      TERRACE_RETURN_IF_ERROR(Take(source, limit));
    }
    Sort(limit);
    base_ = limit == kLastHash ? kLastHash : limit + 1;
  }
  return std::span<const KeyVersion>(window_);
}

Status KeyWindows::Take(std::uint32_t source, std::uint64_t limit) {
  SectionCursor& cursor = cursors_[source];
  const std::uint64_t begin = cursor.index();
  std::uint64_t before = 0;
  std::uint64_t i = begin;
  for (; i < cursor.buffered_end(); ++i) {
    const KeyEntry entry = EntryAt(cursor, i);
    const std::uint64_t hash = MixKey(entry.key);
    if (hash < base_ || (i > begin && hash <= before)) return OutOfOrder(cursor, i);
    if (hash > limit) break;
    window_.push_back({hash, entry.version, source, static_cast<std::uint32_t>(i)});
    before = hash;
  }
  cursor.MoveTo(i);
  return OkStatus();
}

void KeyWindows::Sort(std::uint64_t limit) {
  const std::uint64_t base = base_;
  const int bits = static_cast<int>(std::bit_width(limit - base));
  RadixSort(&window_, &spare_, std::max(0, bits - kSortedBits), bits,
            [base](const KeyVersion& version) { return version.hash - base; });
  for (std::size_t i = 1; i < window_.size(); ++i) {
    const KeyVersion moving = window_[i];
    std::size_t at = i;
    for (; at > 0 && window_[at - 1].hash > moving.hash; --at) window_[at] = window_[at - 1];
    window_[at] = moving;
  }
}

}  // namespace terrace
