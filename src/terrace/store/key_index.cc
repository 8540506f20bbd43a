#include "terrace/store/key_index.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/raw_vector.h"
#include "terrace/base/rng.h"

namespace terrace {
namespace {

// Keys that take a step of a look-up together.
constexpr std::size_t kGroup = 64;
// Lines that a key tries a step of its own apart; then one after another, until one has room.
constexpr std::uint32_t kHops = 16;
// Above this share of entries a segment gets more lines: an eighth to a twelfth, so that segments
// that grow at the same time do so once.
constexpr double kMaxLoad = 0.96;
constexpr std::uint64_t GrowthDivisor(std::size_t segment) { return 8 + segment % 5; }
// Chunks of the arena: an eighth of what it has, so that a small index stays small.
constexpr std::uint64_t kLeastChunkBytes = 64 << 10;

}  // namespace

template <typename Line>
Status SegmentedIndex<Line>::BlockArena::Reserve(std::uint64_t blocks) {
  constexpr std::uint64_t kBlockBytes = kBlockLines * sizeof(Line);
  while (ready_.size() < blocks) {
    const std::uint64_t wanted = std::max(bytes_ / 8, (blocks - ready_.size()) * kBlockBytes);
    TERRACE_ASSIGN_OR_RETURN(
        HugeBuffer chunk, HugeBuffer::Allocate(std::min(
                              (wanted / kLeastChunkBytes + 1) * kLeastChunkBytes, kHugePageBytes)));
    for (std::uint64_t at = chunk.size(); at > 0; at -= kBlockBytes) {
      ready_.push_back(reinterpret_cast<Line*>(chunk.data() + at - kBlockBytes));
    }
    bytes_ += chunk.size();
    chunks_.push_back(std::move(chunk));
  }
  return OkStatus();
}

template <typename Line>
Line* SegmentedIndex<Line>::BlockArena::Take() {
  TERRACE_CHECK(!ready_.empty());
  Line* block = ready_.back();
  ready_.pop_back();
  return block;
}

template <typename Line>
SegmentedIndex<Line>::SegmentedIndex(int row_bits) : row_bits_(Line::kExact ? kRowBits : row_bits) {
  TERRACE_CHECK(row_bits_ >= 0 && row_bits_ <= kRowBits);
}

template <typename Line>
std::uint32_t SegmentedIndex<Line>::max_slots() const {
  const std::uint64_t slots = std::uint64_t{1} << (Line::kPlaceBits - row_bits_);
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(slots, kMaxFileSlots));
}

template <typename Line>
std::uint64_t SegmentedIndex<Line>::Pack(Place place) const {
  const std::uint64_t row = RowOfPlace(place);
  TERRACE_DCHECK(SlotOfPlace(place) < max_slots() && row >> row_bits_ == 0);
  return std::uint64_t{SlotOfPlace(place)} << row_bits_ | row;
}

template <typename Line>
Place SegmentedIndex<Line>::Unpack(std::uint64_t packed) const {
  return MakePlace(static_cast<std::uint32_t>(packed >> row_bits_),
                   packed & ((std::uint64_t{1} << row_bits_) - 1));
}

template <typename Line>
std::uint32_t SegmentedIndex<Line>::HomeOf(std::uint64_t bits, std::uint32_t lines) {
  return static_cast<std::uint32_t>((static_cast<Uint128>(bits) * lines) >> Line::kHashBits);
}

template <typename Line>
std::uint32_t SegmentedIndex<Line>::NextLine(std::uint64_t bits, std::uint32_t number,
                                             std::uint32_t tried, std::uint32_t lines) {
  if (lines == 1) return 0;
  std::uint64_t step = 1;
  if (tried < kHops) {
    constexpr std::uint64_t kMask = (std::uint64_t{1} << Line::kHashBits) - 1;
    step += HomeOf(bits * 0x9e3779b97f4a7c15ULL & kMask, lines - 1);
  }
  const std::uint64_t next = number + step;
  return static_cast<std::uint32_t>(next >= lines ? next - lines : next);
}

template <typename Line>
typename SegmentedIndex<Line>::Walk SegmentedIndex<Line>::StartWalk(std::uint64_t hash) const {
  const Segment* segment = &segments_[SegmentOf(hash)];
  return {segment, segment->lines == 0 ? 0 : HomeOf(BitsOf(hash), segment->lines), 1, nullptr};
}

template <typename Line>
template <bool kToRoom>
bool SegmentedIndex<Line>::Step(std::uint64_t hash, Walk* walk, Spot* spot) const {
  if (walk->line == nullptr) return true;  // Of an empty segment.
  if (const std::uint32_t equal = walk->line->Match(BitsOf(hash)); equal != 0) {
    *spot = {walk->line, static_cast<std::uint32_t>(std::countr_zero(equal)), nullptr};
    if (walk->line->state.shared) spot->other = FindOther(hash);
    return true;
  }
  if (walk->line->state.passed == 0 && (!kToRoom || walk->line->state.count < Line::kWays)) {
    return true;
  }
  const std::uint32_t lines = walk->segment->lines;
  if (walk->tried == lines + kHops) return true;  // All of them are full.
  walk->number = NextLine(BitsOf(hash), walk->number, walk->tried++, lines);
  walk->line = walk->segment->line(walk->number);
  return false;
}

template <typename Line>
const typename SegmentedIndex<Line>::Other* SegmentedIndex<Line>::FindOther(
    std::uint64_t hash) const {
  const auto [first, last] = others_.equal_range(IdentityOf(hash));
  for (auto it = first; it != last; ++it) {
    if (it->second.hash == hash) return &it->second;
  }
  return nullptr;
}

template <typename Line>
typename SegmentedIndex<Line>::Spot SegmentedIndex<Line>::Find(std::uint64_t hash) const {
  Spot spot;
  Walk walk = StartWalk(hash);
  if (walk.segment->lines > 0) walk.line = walk.segment->line(walk.number);
  while (!Step<false>(hash, &walk, &spot)) {
  }
  return spot;
}

template <typename Line>
template <bool kToRoom, typename Visit>
void SegmentedIndex<Line>::ForEachFound(std::span<const std::uint64_t> hashes, Visit visit) const {
  if (segments_.empty()) {
    for (std::size_t i = 0; i < hashes.size(); ++i) visit(i, Spot());
    return;
  }
  // Four steps a key: ask for its home block's place, for its home line, look into that, follow
  // what goes on. Those of different groups take turns: memory and processor work at the same time.
  struct Group {
    std::array<Walk, kGroup> walks;
    std::array<Spot, kGroup> spots;
    std::array<std::uint32_t, kGroup> pending;
    std::size_t pending_count = 0;
  };
  constexpr std::size_t kSteps = 4;
  std::array<Group, kSteps> groups;
  const std::size_t count = (hashes.size() + kGroup - 1) / kGroup;
  for (std::size_t now = 0; now < count + kSteps - 1; ++now) {
    const auto group = [&](std::size_t step) { return &groups[(now + kSteps - step) % kSteps]; };
    const auto keys = [&](std::size_t step) {
      if (now < step || now - step >= count) return std::span<const std::uint64_t>();
      const std::size_t begin = (now - step) * kGroup;
      return hashes.subspan(begin, std::min(kGroup, hashes.size() - begin));
    };
    const auto asked = keys(0), placed = keys(1), looked = keys(2), followed = keys(3);
    Group* const looking = group(2);
    looking->pending_count = 0;
    const std::size_t most = std::max({asked.size(), placed.size(), looked.size()});
    for (std::size_t i = 0; i < most; ++i) {
      if (i < asked.size()) {
        Walk& walk = group(0)->walks[i] = StartWalk(asked[i]);
        if (walk.segment->lines > 0) {
          __builtin_prefetch(&walk.segment->blocks[walk.number / kBlockLines]);
        }
      }
      if (i < placed.size()) {
        Walk& walk = group(1)->walks[i];
        if (walk.segment->lines > 0) {
          walk.line = walk.segment->line(walk.number);
          __builtin_prefetch(walk.line);
        }
      }
      if (i < looked.size()) {
        looking->spots[i] = Spot();
        if (Step<kToRoom>(looked[i], &looking->walks[i], &looking->spots[i])) continue;
        __builtin_prefetch(looking->walks[i].line);
        looking->pending[looking->pending_count++] = static_cast<std::uint32_t>(i);
      }
    }
    Group* const following = group(3);
    while (following->pending_count > 0) {
      std::size_t kept = 0;
      for (std::size_t p = 0; p < following->pending_count; ++p) {
        const std::uint32_t i = following->pending[p];
        if (Step<kToRoom>(followed[i], &following->walks[i], &following->spots[i])) continue;
        __builtin_prefetch(following->walks[i].line);
        following->pending[kept++] = i;
      }
      following->pending_count = kept;
    }
    for (std::size_t i = 0; i < followed.size(); ++i) {
      visit((now - 3) * kGroup + i, following->spots[i]);
    }
  }
}

template <typename Line>
Place SegmentedIndex<Line>::PlaceOf(const Spot& spot) const {
  if (spot.other != nullptr) return spot.other->place;
  return spot.present() ? Unpack(spot.line->place(spot.way)) : kNoPlace;
}

template <typename Line>
void SegmentedIndex<Line>::SetPlace(std::uint64_t hash, const Spot& spot, Place place) {
  if (spot.other == nullptr) {
    spot.line->Set(spot.way, BitsOf(hash), Pack(place));
    return;
  }
  const auto [first, last] = others_.equal_range(IdentityOf(hash));
  for (auto it = first; it != last; ++it) {
    if (it->second.hash == hash) it->second.place = place;
  }
}

template <typename Line>
void SegmentedIndex<Line>::Lookup(std::span<const std::uint64_t> hashes, Place* places) const {
  ForEachFound<false>(hashes, [&](std::size_t i, const Spot& spot) { places[i] = PlaceOf(spot); });
}

template <typename Line>
Status SegmentedIndex<Line>::Reserve(std::span<const std::uint64_t> new_hashes) {
  if (new_hashes.empty()) return OkStatus();
  segments_.resize(kSegments);
  std::vector<std::uint32_t> added(kSegments, 0);
  for (const std::uint64_t hash : new_hashes) ++added[SegmentOf(hash)];
  const auto lines_for = [&](std::size_t s) {
    return LinesFor(s, std::uint64_t{segments_[s].count} + added[s]);
  };
  std::uint64_t blocks = 0;
  for (std::size_t s = 0; s < kSegments; ++s) {
    if (added[s] > 0) blocks += NewBlocks(segments_[s], lines_for(s));
  }
  TERRACE_RETURN_IF_ERROR(arena_.Reserve(blocks));
  for (std::size_t s = 0; s < kSegments; ++s) {
    if (added[s] == 0) continue;
    if (const std::uint64_t lines = lines_for(s); lines > segments_[s].lines) {
      TERRACE_RETURN_IF_ERROR(Grow(&segments_[s], lines));
    }
  }
  return OkStatus();
}

template <typename Line>
std::uint64_t SegmentedIndex<Line>::LinesFor(std::size_t s, std::uint64_t count) const {
  const Segment& segment = segments_[s];
  constexpr double kPerLine = kMaxLoad * Line::kWays;
  if (static_cast<double>(count) <= kPerLine * segment.lines) return segment.lines;
  const auto wanted = static_cast<std::uint64_t>(static_cast<double>(count) / kPerLine) + 1;
  if (wanted <= kBlockLines) return wanted;
  const std::uint64_t blocks = segment.lines / kBlockLines;
  return std::max((wanted + kBlockLines - 1) / kBlockLines,
                  blocks + std::max<std::uint64_t>(1, blocks / GrowthDivisor(s))) *
         kBlockLines;
}

template <typename Line>
std::uint64_t SegmentedIndex<Line>::NewBlocks(const Segment& segment, std::uint64_t lines) {
  if (lines <= kBlockLines) return 0;
  return lines / kBlockLines - (segment.small ? 0 : segment.blocks.size());
}

template <typename Line>
auto SegmentedIndex<Line>::EntryOf(const Segment& segment, const Line& line,
                                   std::uint32_t way) const -> Loose {
  const auto top = static_cast<std::uint64_t>(&segment - segments_.data()) << Line::kHashBits;
  const std::uint64_t bits = line.bits(way);
  return {bits, line.place(way), line.state.shared && others_.contains(top | bits)};
}

template <typename Line>
Status SegmentedIndex<Line>::Grow(Segment* segment, std::uint64_t lines) {
  loose_.clear();
  std::uint32_t kept = segment->lines;
  if (segment->small || lines > 2 * std::uint64_t{kept}) {
    kept = 0;
    for (std::uint32_t number = 0; number < segment->lines; ++number) {
      const Line& line = *segment->line(number);
      for (std::uint32_t way = 0; way < line.state.count; ++way) {
        loose_.push_back(EntryOf(*segment, line, way));
      }
    }
  }
  TERRACE_RETURN_IF_ERROR(TakeLines(segment, lines));
  for (std::uint32_t i = kept; i < segment->lines; ++i) *segment->line(i) = Line{};
  SpreadLines(*segment, kept);
  for (const Loose& entry : loose_) InsertEntry(*segment, entry);
  return OkStatus();
}

template <typename Line>
void SegmentedIndex<Line>::SpreadLines(const Segment& segment, std::uint32_t before) {
  constexpr std::uint32_t kAhead = 2 * kBlockLines;
  // Homes move only up: from the last line down, those above have been left. They are at most three
  // for the entries at home in a line; the fourth list is of those that are not, or find it full.
  constexpr std::uint32_t kLoose = 3;
  for (std::uint32_t number = before; number-- > 0;) {
    if (number >= kAhead) __builtin_prefetch(segment.line(number - kAhead), 1);
    const Line old = *segment.line(number);
    *segment.line(number) = Line{};
    const auto first = static_cast<std::uint32_t>(std::uint64_t{number} * segment.lines / before);
    Line loose{};
    Line* to[kLoose + 1];
    std::uint32_t count[kLoose + 1];
    const std::uint32_t homes = std::min(kLoose, segment.lines - first);
    for (std::uint32_t k = 0; k < homes; ++k) {
      to[k] = segment.line(first + k);
      count[k] = to[k]->state.count;
    }
    to[kLoose] = &loose;
    count[kLoose] = 0;
    // Without branches, which nobody could foretell.
    for (std::uint32_t way = 0; way < old.state.count; ++way) {
      const std::uint64_t bits = old.bits(way);
      const std::uint32_t home = HomeOf(bits, segment.lines) - first;
      std::uint32_t k = HomeOf(bits, before) == number ? home : kLoose;
      k = count[k] == Line::kWays ? kLoose : k;
      to[k]->Set(count[k]++, bits, old.place(way));
    }
    for (std::uint32_t k = 0; k < homes; ++k) to[k]->state.count = count[k] & 0xf;
    loose.state.shared = old.state.shared;
    for (std::uint32_t way = 0; way < count[kLoose]; ++way) {
      loose_.push_back(EntryOf(segment, loose, way));
    }
    if (!old.state.shared) continue;
    for (std::uint32_t way = 0; way < old.state.count; ++way) {
      const Loose entry = EntryOf(segment, old, way);
      if (entry.shared) segment.line(HomeOf(entry.bits, segment.lines))->state.shared = 1;
    }
  }
}

template <typename Line>
Status SegmentedIndex<Line>::TakeLines(Segment* segment, std::uint64_t lines) {
  if (lines > std::numeric_limits<std::uint32_t>::max()) {
    return InternalError(
        "the index by key holds at most 4e9 lines of keys in one of its 4096 segments; use more "
        "shards (ssd.shards)");
  }
  // Not std::make_unique, whose failure is an exception.
  std::unique_ptr<Line[], Free> small;
  if (lines <= kBlockLines) {
    small.reset(static_cast<Line*>(std::aligned_alloc(alignof(Line), lines * sizeof(Line))));
    if (!small) {
      return OutOfMemoryError(
          fmt::format("the index of a store asked for {} bytes more; lower memory.budget's other "
                      "users, or use a machine with more memory",
                      lines * sizeof(Line)));
    }
  }
  const auto bytes_of = [](const Segment& counted) {
    return counted.blocks.capacity() * sizeof(Line*) +
           (counted.small ? counted.lines * sizeof(Line) : 0);
  };
  segment_bytes_ -= bytes_of(*segment);
  if (segment->small || small) segment->blocks.clear();
  segment->small = std::move(small);
  if (segment->small) {
    segment->blocks.push_back(segment->small.get());
  } else {
    segment->blocks.reserve(lines / kBlockLines);
    while (segment->blocks.size() < lines / kBlockLines) segment->blocks.push_back(arena_.Take());
  }
  segment->lines = static_cast<std::uint32_t>(lines);
  segment_bytes_ += bytes_of(*segment);
  return OkStatus();
}

template <typename Line>
void SegmentedIndex<Line>::Append(Line* line, const Loose& entry) {
  line->Set(line->state.count, entry.bits, entry.packed);
  ++line->state.count;
  if (entry.shared) line->state.shared = 1;
}

template <typename Line>
void SegmentedIndex<Line>::InsertEntry(const Segment& segment, const Loose& entry) {
  std::uint32_t number = HomeOf(entry.bits, segment.lines);
  Line* line = segment.line(number);
  for (std::uint32_t tried = 1; line->state.count == Line::kWays; ++tried) {
    if (line->state.passed < kMaxPassed) ++line->state.passed;
    number = NextLine(entry.bits, number, tried, segment.lines);
    line = segment.line(number);
  }
  Append(line, entry);
}

template <typename Line>
void SegmentedIndex<Line>::Insert(std::span<const std::uint64_t> hashes, const Place* places) {
  ForEachFound<true>(hashes, [&](std::size_t i, Spot spot) {
    TERRACE_DCHECK(i == 0 || hashes[i - 1] < hashes[i]);
    // The one before may be alike, and have been inserted since.
    if (!spot.present() && i > 0 && Alike(hashes[i - 1], hashes[i])) spot = Find(hashes[i]);
    ++size_;
    if (!spot.present()) {
      Segment* segment = &segments_[SegmentOf(hashes[i])];
      TERRACE_CHECK(segment->count < std::uint64_t{segment->lines} * Line::kWays);
      ++segment->count;
      InsertEntry(*segment, {BitsOf(hashes[i]), Pack(places[i]), false});
      return;
    }
    TERRACE_CHECK(!Line::kExact && spot.other == nullptr);
    spot.line->state.shared = 1;
    others_.insert({IdentityOf(hashes[i]), {hashes[i], places[i]}});
  });
}

template <typename Line>
Status SegmentedIndex<Line>::Fill(std::span<const std::uint64_t> hashes, const Place* places) {
  std::vector<Other> others;
  for (std::size_t begin = 0, end; begin < hashes.size(); begin = end) {
    const std::size_t s = SegmentOf(hashes[begin]);
    end = begin + 1;
    while (end < hashes.size() && SegmentOf(hashes[end]) == s) ++end;
    const auto part = hashes.subspan(begin, end - begin);
    {
      MutexLock lock(&fill_mu_);
      segments_.resize(kSegments);
      if (segments_[s].count > 0) {
        TERRACE_RETURN_IF_ERROR(Reserve(part));
        Insert(part, places + begin);
        continue;
      }
      TERRACE_RETURN_IF_ERROR(StartSegment(s, part.size()));
    }
    // Nobody else touches this segment.
    Segment* const segment = &segments_[s];
    others.clear();
    FillSegment(*segment, part, places + begin, &others);
    segment->count = static_cast<std::uint32_t>(part.size() - others.size());
    MutexLock lock(&fill_mu_);
    size_ += part.size();
    for (const Other& other : others) others_.insert({IdentityOf(other.hash), other});
  }
  return OkStatus();
}

template <typename Line>
Status SegmentedIndex<Line>::StartSegment(std::size_t s, std::size_t count) {
  std::uint64_t lines = LinesFor(s, count);
  if (const std::uint64_t blocks = lines / kBlockLines; blocks > 1) {
    // Anywhere between two of its growths, so that the segments do not all grow next.
    lines += blocks * (s / 5 % 8) / (8 * GrowthDivisor(s)) * kBlockLines;
  }
  TERRACE_RETURN_IF_ERROR(arena_.Reserve(NewBlocks(segments_[s], lines)));
  return TakeLines(&segments_[s], lines);
}

template <typename Line>
void SegmentedIndex<Line>::FillSegment(const Segment& segment,
                                       std::span<const std::uint64_t> hashes, const Place* places,
                                       std::vector<Other>* others) const {
  // First each line gets those at home there, then what did not fit hops on.
  using Product = std::conditional_t<Line::kHashBits + 32 <= 64, std::uint64_t, Uint128>;
  struct Homeless {
    std::uint32_t key, line;
  };
  RawVector<Homeless> homeless(hashes.size());
  std::size_t left = 0;                      // Homeless ones.
  std::uint64_t before = ~std::uint64_t{0};  // No bits of a hash.
  Product end = 0;                           // Bits times lines, of the first key behind the line.
  const auto keys = static_cast<std::uint32_t>(hashes.size());
  for (std::uint32_t number = 0, i = 0; number < segment.lines; ++number) {
    Line* const line = segment.line(number);
    *line = Line{};
    std::uint32_t count = 0;
    end += Product{1} << Line::kHashBits;
    for (; i < keys; ++i) {
      const std::uint64_t bits = BitsOf(hashes[i]);
      if (Product{bits} * segment.lines >= end) break;
      if (bits == before) {
        if (count <= Line::kWays) line->state.shared = 1;  // Else the one before is homeless.
        others->push_back({hashes[i], places[i]});
        continue;
      }
      before = bits;
      if (count < Line::kWays) {
        line->Set(count, bits, Pack(places[i]));
      } else {
        homeless[left++] = {i, number};
      }
      ++count;
    }
    line->state.count = std::min(count, Line::kWays) & 0xf;
  }
  // As InsertEntry does, all of them a hop at a time: of one after another each would wait for the
  // branches of the one before, which nothing foresees.
  for (std::uint32_t tried = 1; left > 0; ++tried) {
    const std::span<Homeless> hopping = std::span(homeless).first(left);
    for (Homeless& entry : hopping) {
      LineState& full = segment.line(entry.line)->state;
      if (full.passed < kMaxPassed) ++full.passed;
      entry.line = NextLine(BitsOf(hashes[entry.key]), entry.line, tried, segment.lines);
    }
    left = 0;
    for (const Homeless& entry : hopping) {
      Line* const line = segment.line(entry.line);
      if (line->state.count == Line::kWays) {
        homeless[left++] = entry;
        continue;
      }
      const std::uint64_t bits = BitsOf(hashes[entry.key]);
      const bool shared = entry.key + 1 < keys && BitsOf(hashes[entry.key + 1]) == bits;
      Append(line, {bits, Pack(places[entry.key]), shared});
    }
  }
}

template <typename Line>
void SegmentedIndex<Line>::Replace(std::span<const std::uint64_t> hashes, const Place* places,
                                   Place* previous) {
  ForEachFound<false>(hashes, [&](std::size_t i, const Spot& spot) {
    TERRACE_CHECK(spot.present());
    previous[i] = PlaceOf(spot);
    SetPlace(hashes[i], spot, places[i]);
  });
}

template <typename Line>
void SegmentedIndex<Line>::Move(std::span<const std::uint64_t> hashes, const Place* from,
                                const Place* to, std::uint8_t* moved) {
  ForEachFound<false>(hashes, [&](std::size_t i, Spot spot) {
    // A removal before may have brought another entry there.
    if (spot.present()) spot = Find(hashes[i]);
    moved[i] = 0;
    if (!spot.present() || PlaceOf(spot) != from[i]) return;
    moved[i] = 1;
    if (to[i] == kNoPlace) {
      Remove(hashes[i], spot);
    } else {
      SetPlace(hashes[i], spot, to[i]);
    }
  });
}

template <typename Line>
void SegmentedIndex<Line>::Erase(std::span<const std::uint64_t> hashes, Place* previous) {
  ForEachFound<false>(hashes, [&](std::size_t i, Spot spot) {
    if (spot.present()) spot = Find(hashes[i]);  // As in Move.
    previous[i] = PlaceOf(spot);
    if (spot.present()) Remove(hashes[i], spot);
  });
}

template <typename Line>
void SegmentedIndex<Line>::Remove(std::uint64_t hash, const Spot& spot) {
  Segment* segment = &segments_[SegmentOf(hash)];
  --size_;
  const auto [first, last] = others_.equal_range(IdentityOf(hash));
  if (spot.other != nullptr) {
    for (auto it = first; it != last; ++it) {
      if (it->second.hash != hash) continue;
      others_.erase(it);
      return;
    }
  }
  if (spot.line->state.shared && first != last) {
    // The entry is another's now.
    spot.line->Set(spot.way, BitsOf(hash), Pack(first->second.place));
    others_.erase(first);
    return;
  }
  std::uint32_t number = HomeOf(BitsOf(hash), segment->lines);
  for (std::uint32_t tried = 1; segment->line(number) != spot.line; ++tried) {
    LineState& state = segment->line(number)->state;
    if (state.passed < kMaxPassed) --state.passed;
    number = NextLine(BitsOf(hash), number, tried, segment->lines);
  }
  const std::uint32_t end = spot.line->state.count - 1u;
  spot.line->Set(spot.way, spot.line->bits(end), spot.line->place(end));
  --spot.line->state.count;
  --segment->count;
}

template <typename Line>
std::uint64_t SegmentedIndex<Line>::bytes() const {
  // A node of the map holds its link as well.
  constexpr std::uint64_t kNodeBytes = sizeof(std::pair<std::uint64_t, Other>) + 2 * sizeof(void*);
  return segments_.size() * sizeof(Segment) + segment_bytes_ + arena_.bytes() +
         loose_.capacity() * sizeof(Loose) + others_.size() * kNodeBytes +
         others_.bucket_count() * sizeof(void*);
}

template class SegmentedIndex<TaggedLine>;
template class SegmentedIndex<ExactLine>;

}  // namespace terrace
