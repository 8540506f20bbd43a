#include "terrace/store/key_index.h"

#include <algorithm>
#include <array>
#include <bit>
#include <new>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/raw_vector.h"
#include "terrace/base/rng.h"

namespace terrace {
namespace {

// Lines that look-ups ask memory for together, the turns after which they have come, and the keys
// that are looked up at the same time.
constexpr std::size_t kTogether = 12;
constexpr std::size_t kTurns = 2;
constexpr std::size_t kWindow = 256;
// Lines that a key tries a step of its own apart; then one after another, until one has room.
constexpr std::uint32_t kHops = 16;
// Above this share of entries a segment gets more lines.
constexpr double kMaxLoad = 0.96;
// Chunks of the arena: an eighth of what it has, so that a small index stays small.
constexpr std::uint64_t kLeastChunkBytes = 64 << 10;

}  // namespace

template <typename Line>
Result<std::uint32_t> SegmentedIndex<Line>::LineArena::Take(std::uint64_t lines) {
  if (left_ < lines) {
    const std::uint64_t bytes = (bytes_ / 8 / kLeastChunkBytes + 1) * kLeastChunkBytes;
    TERRACE_ASSIGN_OR_RETURN(
        HugeBuffer chunk,
        HugeBuffer::Allocate(std::max(std::min(bytes, kHugePageBytes), lines * sizeof(Line))));
    const auto first = reinterpret_cast<Line*>(chunk.data());  // Zeroed, which is empty lines.
    next_ = static_cast<std::uint32_t>(units_.size()) * kUnitLines;
    left_ = static_cast<std::uint32_t>(chunk.size() / sizeof(Line));
    for (std::uint32_t at = 0; at < left_; at += kUnitLines) units_.push_back(first + at);
    TERRACE_CHECK(units_.size() <= (std::uint64_t{1} << 32) / kUnitLines);
    bytes_ += chunk.size();
    chunks_.push_back(std::move(chunk));
  }
  const auto taken = static_cast<std::uint32_t>(lines);
  left_ -= taken;
  return std::exchange(next_, next_ + taken);
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
  return static_cast<std::uint32_t>((Product{bits} * lines) >> Line::kHashBits);
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
  // No branch, which nobody could foresee: what is negative is a great number.
  const auto next = static_cast<std::uint32_t>(number + step);
  return std::min(next, next - lines);
}

template <typename Line>
typename SegmentedIndex<Line>::Walk SegmentedIndex<Line>::StartWalk(std::uint64_t hash) const {
  const std::uint64_t s = SegmentOf(hash);
  const std::uint32_t lines = segments_[s].lines;
  return {static_cast<std::uint32_t>(s), lines, HomeOf(BitsOf(hash), lines), 1, nullptr};
}

template <typename Line>
template <bool kToRoom>
inline bool SegmentedIndex<Line>::Step(std::uint64_t hash, Walk* walk, Spot* spot) const {
  Line* const line = walk->line;
  if (const std::uint32_t equal = line->Match(BitsOf(hash)); equal != 0) {
    const auto way = static_cast<std::uint32_t>(std::countr_zero(equal));
    *spot = {line, way, false, Unpack(line->place(way))};
    if (line->state.shared) {
      if (const Other* other = FindOther(hash)) {
        spot->other = true;
        spot->place = other->place;
      }
    }
    return true;
  }
  *spot = Spot();
  if (line->state.passed == 0 && (!kToRoom || line->state.count < Line::kWays)) return true;
  if (walk->tried == walk->lines + kHops) return true;  // All of them are full.
  walk->number = NextLine(BitsOf(hash), walk->number, walk->tried++, walk->lines);
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
  if (walk.lines == 0) return spot;
  do {
    walk.line = LineAt(walk.segment, walk.number);
  } while (!Step<false>(hash, &walk, &spot));
  return spot;
}

template <typename Line>
template <bool kToRoom, typename Visit>
void SegmentedIndex<Line>::ForEachFound(std::span<const std::uint64_t> hashes, Visit visit) const {
  if (segments_.empty()) {
    for (std::size_t i = 0; i < hashes.size(); ++i) visit(i, Spot());
    return;
  }
  // A line that is in no cache has its address in no TLB most often, and until that is translated a
  // prefetch keeps its place in the processor's window, which holds what two or three keys take. So
  // some lines are asked for at once, not so many that memory refuses them, and the work on keys
  // whose lines have come is done between.
  std::array<Walk, kWindow> walks;
  std::array<Spot, kWindow> spots;
  std::array<bool, kWindow> found;
  std::array<Wanted, kWindow> wanted;
  std::array<std::size_t, kWindow> asked;   // A queue of the keys whose lines have been asked for,
  std::size_t head = 0, tail = 0;           // from the head to the tail,
  std::array<std::size_t, kTurns> tails{};  // which was there some turns ago.
  std::size_t started = 0, visited = 0;     // Keys.
  for (std::size_t turn = 0; visited < hashes.size(); ++turn) {
    std::size_t& came = tails[turn % kTurns];
    const std::size_t old_tail = tail;
    for (; head < came; ++head) {
      const std::size_t i = asked[head % kWindow], at = i % kWindow;
      found[at] = Step<kToRoom>(hashes[i], &walks[at], &spots[at]);
      if (!found[at]) asked[tail++ % kWindow] = i;
    }
    for (; visited < started && found[visited % kWindow]; ++visited) {
      visit(visited, spots[visited % kWindow]);
    }
    const std::size_t end = std::min(hashes.size(), visited + kWindow);
    for (; started < end && tail - old_tail < kTogether; ++started) {
      const std::size_t at = started % kWindow;
      walks[at] = StartWalk(hashes[started]);
      found[at] = walks[at].lines == 0;
      if (found[at]) {
        spots[at] = Spot();
      } else {
        asked[tail++ % kWindow] = started;
      }
    }
    // The misses of the lists side by side, then those of the lines.
    for (std::size_t i = old_tail; i < tail; ++i) {
      const Walk& walk = walks[asked[i % kWindow] % kWindow];
      wanted[i - old_tail] = WantedOf(walk.segment, walk.number);
    }
    for (std::size_t i = old_tail; i < tail; ++i) {
      Walk& walk = walks[asked[i % kWindow] % kWindow];
      walk.line = LineAt(wanted[i - old_tail]);
      __builtin_prefetch(walk.line);
    }
    came = tail;
  }
}

template <typename Line>
void SegmentedIndex<Line>::SetPlace(std::uint64_t hash, const Spot& spot, Place place) {
  if (!spot.other) {
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
  if (segments_.empty()) {
    std::fill_n(places, hashes.size(), kNoPlace);
    return;
  }
  // As ForEachFound, whose order of keys nobody needs here: what a key is found to be is stored at
  // once, without a branch, because nobody foresees in which line it ends.
  struct Asked {
    std::size_t key;
    std::uint32_t number, tried;
    const Line* line;
  };
  std::array<std::array<Asked, kTogether>, kTurns> groups;
  std::array<std::size_t, kTurns> sizes{};
  std::array<Wanted, kTogether> wanted;
  std::size_t started = 0, on_their_way = 0;  // Keys.
  for (std::size_t turn = 0; started < hashes.size() || on_their_way > 0; ++turn) {
    std::array<Asked, kTogether>& group = groups[turn % kTurns];
    std::size_t& size = sizes[turn % kTurns];
    std::size_t count = 0;
    for (std::size_t k = 0; k < size; ++k) {
      const Asked asked = group[k];
      const std::uint64_t hash = hashes[asked.key];
      const Line& line = *asked.line;
      const std::uint32_t equal = line.Match(BitsOf(hash));
      const auto way =
          static_cast<std::uint32_t>(std::countr_zero(equal | 1u << (Line::kWays - 1)));
      const Place absent = equal == 0 ? ~Place{0} : 0;
      places[asked.key] = (Unpack(line.place(way)) & ~absent) | (kNoPlace & absent);
      if (equal != 0 && line.state.shared) {
        if (const Other* other = FindOther(hash)) places[asked.key] = other->place;
      }
      group[count] = asked;
      count +=
          static_cast<std::size_t>(equal == 0) & static_cast<std::size_t>(line.state.passed != 0);
    }
    on_their_way -= size;
    size = 0;
    for (std::size_t k = 0; k < count; ++k) {
      Asked asked = group[k];
      const std::uint64_t hash = hashes[asked.key];
      const std::uint32_t lines = segments_[SegmentOf(hash)].lines;
      if (asked.tried == lines + kHops) continue;  // All of them are full.
      asked.number = NextLine(BitsOf(hash), asked.number, asked.tried++, lines);
      group[size++] = asked;
    }
    for (; started < hashes.size() && size < kTogether; ++started) {
      const std::uint64_t hash = hashes[started];
      const std::uint32_t lines = segments_[SegmentOf(hash)].lines;
      places[started] = kNoPlace;
      group[size] = {started, HomeOf(BitsOf(hash), lines), 1, nullptr};
      size += lines > 0 ? 1 : 0;
    }
    on_their_way += size;
    // The misses of the lists side by side, then those of the lines.
    for (std::size_t k = 0; k < size; ++k) {
      wanted[k] = WantedOf(SegmentOf(hashes[group[k].key]), group[k].number);
    }
    for (std::size_t k = 0; k < size; ++k) {
      group[k].line = LineAt(wanted[k]);
      __builtin_prefetch(group[k].line);
    }
  }
}

template <typename Line>
Status SegmentedIndex<Line>::Reserve(std::span<const std::uint64_t> new_hashes) {
  if (new_hashes.empty()) return OkStatus();
  segments_.resize(kSegments);
  std::vector<std::uint32_t> added(kSegments, 0);
  for (const std::uint64_t hash : new_hashes) ++added[SegmentOf(hash)];
  for (std::size_t s = 0; s < kSegments; ++s) {
    if (added[s] == 0) continue;
    TERRACE_RETURN_IF_ERROR(Grow(s, std::uint64_t{segments_[s].count} + added[s]));
  }
  return OkStatus();
}

template <typename Line>
Status SegmentedIndex<Line>::TakeLines(std::size_t s, std::uint64_t count) {
  constexpr double kPerLine = kMaxLoad * Line::kWays;
  const auto wanted = static_cast<std::uint64_t>(static_cast<double>(count) / kPerLine) + 1;
  if (wanted > LineExtents::kMostLines) {
    return InternalError(
        fmt::format("the index by key holds at most {} lines of keys in one of its {} segments; "
                    "use more shards (ssd.shards)",
                    LineExtents::kMostLines, kSegments));
  }
  const std::size_t c = ClassOf(s);
  Segment& segment = segments_[s];
  std::size_t extent = segment.lines == 0 ? 0 : kLineExtents.Find(c, segment.lines - 1).extent + 1;
  while (segment.lines < wanted) {
    if (extent == extents_.size()) {
      std::unique_ptr<std::uint32_t[]> places(new (std::nothrow) std::uint32_t[kSegments]);
      if (!places) {
        return OutOfMemoryError(
            fmt::format("the index of a store asked for {} bytes more; lower memory.budget's "
                        "other users, or use a machine with more memory",
                        kSegments * sizeof(std::uint32_t)));
      }
      extents_.push_back(std::move(places));
    }
    TERRACE_ASSIGN_OR_RETURN(extents_[extent][s], arena_.Take(kLineExtents.size(c, extent)));
    segment.lines = kLineExtents.begin(c, ++extent);
  }
  return OkStatus();
}

template <typename Line>
auto SegmentedIndex<Line>::LinesOf(std::size_t s) const -> SegmentLines {
  const std::size_t c = ClassOf(s);
  SegmentLines lines(segments_[s].lines);
  for (std::size_t k = 0, at = 0; at < lines.size(); ++k) {
    Line* line = arena_.At(extents_[k][s]);
    for (const std::size_t end = kLineExtents.begin(c, k + 1); at < end; ++at) lines[at] = line++;
  }
  return lines;
}

template <typename Line>
auto SegmentedIndex<Line>::EntryOf(std::size_t s, const Line& line, std::uint32_t way) const
    -> Loose {
  const std::uint64_t bits = line.bits(way);
  const std::uint64_t identity = std::uint64_t{s} << Line::kHashBits | bits;
  return {bits, line.place(way), line.state.shared && others_.contains(identity)};
}

template <typename Line>
Status SegmentedIndex<Line>::Grow(std::size_t s, std::uint64_t count) {
  std::uint32_t kept = segments_[s].lines;
  const Status taken = TakeLines(s, count);
  if (segments_[s].lines == kept) return taken;
  const SegmentLines lines = LinesOf(s);
  loose_.clear();
  if (lines.size() > 2 * std::uint64_t{kept}) {
    for (std::uint32_t number = 0; number < kept; ++number) {
      Line* const line = lines[number];
      for (std::uint32_t way = 0; way < line->state.count; ++way) {
        loose_.push_back(EntryOf(s, *line, way));
      }
      *line = Line{};
    }
    kept = 0;
  }
  SpreadLines(s, lines, kept);
  for (const Loose& entry : loose_) {
    InsertEntry(entry, segments_[s].lines, [&](std::uint32_t number) { return lines[number]; });
  }
  return taken;
}

template <typename Line>
void SegmentedIndex<Line>::SpreadLines(std::size_t s, const SegmentLines& lines,
                                       std::uint32_t before) {
  constexpr std::uint32_t kAhead = 16;
  // Homes move only up: from the last line down, those above have been left. They are at most three
  // for the entries at home in a line; the fourth list is of those that are not, or find it full.
  constexpr std::uint32_t kLoose = 3;
  const auto after = static_cast<std::uint32_t>(lines.size());
  for (std::uint32_t number = before; number-- > 0;) {
    if (number >= kAhead) __builtin_prefetch(lines[number - kAhead], 1);
    Line* const line = lines[number];
    const Line old = *line;
    *line = Line{};
    const auto first = static_cast<std::uint32_t>(std::uint64_t{number} * after / before);
    Line loose{};
    Line* to[kLoose + 1];
    std::uint32_t count[kLoose + 1];
    const std::uint32_t homes = std::min(kLoose, after - first);
    for (std::uint32_t k = 0; k < homes; ++k) {
      to[k] = lines[first + k];
      count[k] = to[k]->state.count;
    }
    to[kLoose] = &loose;
    count[kLoose] = 0;
    // Without branches, which nobody could foretell.
    for (std::uint32_t way = 0; way < old.state.count; ++way) {
      const std::uint64_t bits = old.bits(way);
      const std::uint32_t home = HomeOf(bits, after) - first;
      std::uint32_t k = HomeOf(bits, before) == number ? home : kLoose;
      k = count[k] == Line::kWays ? kLoose : k;
      to[k]->Set(count[k]++, bits, old.place(way));
    }
    for (std::uint32_t k = 0; k < homes; ++k) to[k]->state.count = count[k] & 0xf;
    loose.state.shared = old.state.shared;
    for (std::uint32_t way = 0; way < count[kLoose]; ++way) {
      loose_.push_back(EntryOf(s, loose, way));
    }
    if (!old.state.shared) continue;
    for (std::uint32_t way = 0; way < old.state.count; ++way) {
      const Loose entry = EntryOf(s, old, way);
      if (entry.shared) lines[HomeOf(entry.bits, after)]->state.shared = 1;
    }
  }
}

template <typename Line>
void SegmentedIndex<Line>::Append(Line* line, const Loose& entry) {
  line->Set(line->state.count, entry.bits, entry.packed);
  ++line->state.count;
  if (entry.shared) line->state.shared = 1;
}

template <typename Line>
template <typename LineOf>
void SegmentedIndex<Line>::InsertEntry(const Loose& entry, std::uint32_t lines, LineOf line_of) {
  std::uint32_t number = HomeOf(entry.bits, lines);
  Line* line = line_of(number);
  for (std::uint32_t tried = 1; line->state.count == Line::kWays; ++tried) {
    if (line->state.passed < kMaxPassed) ++line->state.passed;
    number = NextLine(entry.bits, number, tried, lines);
    line = line_of(number);
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
      const std::size_t s = SegmentOf(hashes[i]);
      Segment* const segment = &segments_[s];
      TERRACE_CHECK(segment->count < std::uint64_t{segment->lines} * Line::kWays);
      ++segment->count;
      InsertEntry({BitsOf(hashes[i]), Pack(places[i]), false}, segment->lines,
                  [&](std::uint32_t number) { return LineAt(s, number); });
      return;
    }
    TERRACE_CHECK(!Line::kExact && !spot.other);
    spot.line->state.shared = 1;
    others_.insert({IdentityOf(hashes[i]), {hashes[i], places[i]}});
  });
}

template <typename Line>
Status SegmentedIndex<Line>::Fill(std::span<const KeyPlace> keys) {
  std::vector<Other> others;
  while (!keys.empty()) {
    const std::size_t s = SegmentOf(keys.front().hash);
    const auto end = std::partition_point(
        keys.begin(), keys.end(), [s](const KeyPlace& key) { return SegmentOf(key.hash) == s; });
    const std::span<const KeyPlace> part(keys.begin(), end);
    keys = keys.subspan(part.size());
    SegmentLines lines;
    {
      MutexLock lock(&fill_mu_);
      segments_.resize(kSegments);
      if (segments_[s].count > 0) {
        std::vector<std::uint64_t> hashes;
        std::vector<Place> places;
        for (const auto& [hash, place] : part) {
          hashes.push_back(hash);
          places.push_back(place);
        }
        TERRACE_RETURN_IF_ERROR(Reserve(hashes));
        Insert(hashes, places.data());
        continue;
      }
      TERRACE_RETURN_IF_ERROR(TakeLines(s, part.size()));
      lines = LinesOf(s);
    }
    // Nobody else touches this segment.
    others.clear();
    FillSegment(lines, part, &others);
    segments_[s].count = static_cast<std::uint32_t>(part.size() - others.size());
    MutexLock lock(&fill_mu_);
    size_ += part.size();
    for (const Other& other : others) others_.insert({IdentityOf(other.hash), other});
  }
  return OkStatus();
}

template <typename Line>
void SegmentedIndex<Line>::FillSegment(const SegmentLines& lines, std::span<const KeyPlace> keys,
                                       std::vector<Other>* others) const {
  using Word = typename Line::Word;
  const auto line_count = static_cast<std::uint32_t>(lines.size());
  // Of the keys that have no like before them, and of as many more as a line may read beyond them.
  RawVector<Word> all_bits(keys.size() + Line::kWays), all_places(keys.size() + Line::kWays);
  std::vector<std::uint32_t> ends(line_count);  // Of those at home in a line, in these.
  Word* const bits_of = all_bits.data();
  Word* const place_of = all_places.data();
  std::uint32_t* const end_of = ends.data();
  std::uint32_t count = 0;
  std::uint64_t before = ~std::uint64_t{0};  // No bits of a hash.
  for (const auto& [hash, place] : keys) {
    const std::uint64_t bits = BitsOf(hash);
    bits_of[count] = static_cast<Word>(bits);
    place_of[count] = static_cast<Word>(Pack(place));
    count += bits != before ? 1 : 0;
    end_of[HomeOf(bits, line_count)] = count;
    before = bits;
  }
  std::fill_n(bits_of + count, Line::kWays, 0);
  std::fill_n(place_of + count, Line::kWays, 0);
  // How many keys have their home in a line nobody foresees: each is written as a full one, and its
  // count says what is its own.
  RawVector<Homeless> homeless(count);
  std::size_t left = 0;
  std::vector<std::uint8_t> counts(line_count), passed(line_count);
  for (std::uint32_t number = 0, begin = 0; number < line_count; ++number) {
    lines[number]->SetAll(bits_of + begin, place_of + begin);
    const std::uint32_t end = std::max(begin, end_of[number]);
    counts[number] = static_cast<std::uint8_t>(std::min(end - begin, Line::kWays));
    for (begin += Line::kWays; begin < end; ++begin) homeless[left++] = {begin, number, 0};
    begin = end;
  }
  RawVector<Homeless> settled(left + 1);
  HopOn(bits_of, std::span(homeless).first(left), counts, passed.data(), settled.data());
  for (const Homeless& entry : std::span(settled).first(left)) {
    lines[entry.line]->Set(entry.way, bits_of[entry.key], place_of[entry.key]);
  }
  for (std::uint32_t number = 0; number < line_count; ++number) {
    LineState state{};
    state.count = counts[number] & 0xf;
    state.passed = passed[number] & kMaxPassed;
    lines[number]->state = state;
  }
  for (std::size_t i = 1; count < keys.size(); ++i) {
    const std::uint64_t bits = BitsOf(keys[i].hash);
    if (bits != BitsOf(keys[i - 1].hash)) continue;
    ++count;
    others->push_back(keys[i]);
    std::uint32_t number = HomeOf(bits, line_count);
    for (std::uint32_t tried = 1; lines[number]->Match(bits) == 0; ++tried) {
      number = NextLine(bits, number, tried, line_count);
    }
    lines[number]->state.shared = 1;
  }
}

template <typename Line>
void SegmentedIndex<Line>::HopOn(const typename Line::Word* bits, std::span<Homeless> homeless,
                                 std::span<std::uint8_t> counts, std::uint8_t* passed,
                                 Homeless* settled) {
  const auto line_count = static_cast<std::uint32_t>(counts.size());
  for (std::uint32_t tried = 1; !homeless.empty(); ++tried) {
    std::size_t left = 0;
    for (Homeless entry : homeless) {
      std::uint8_t& full = passed[entry.line];
      full += full < kMaxPassed ? 1 : 0;
      entry.line = NextLine(bits[entry.key], entry.line, tried, line_count);
      entry.way = counts[entry.line];
      const std::uint32_t fits = entry.way < Line::kWays ? 1 : 0;
      counts[entry.line] = static_cast<std::uint8_t>(entry.way + fits);
      homeless[left] = *settled = entry;
      settled += fits;
      left += 1 - fits;
    }
    homeless = homeless.first(left);
  }
}

template <typename Line>
void SegmentedIndex<Line>::Replace(std::span<const std::uint64_t> hashes, const Place* places,
                                   Place* previous) {
  ForEachFound<false>(hashes, [&](std::size_t i, const Spot& spot) {
    TERRACE_CHECK(spot.present());
    previous[i] = spot.place;
    SetPlace(hashes[i], spot, places[i]);
  });
}

template <typename Line>
void SegmentedIndex<Line>::Move(std::span<const std::uint64_t> hashes, const Place* from,
                                const Place* to, std::uint8_t* moved) {
  bool removed = false;
  ForEachFound<false>(hashes, [&](std::size_t i, Spot spot) {
    // A removal before may have brought another entry there.
    if (removed && spot.present()) spot = Find(hashes[i]);
    moved[i] = 0;
    if (!spot.present() || spot.place != from[i]) return;
    moved[i] = 1;
    if (to[i] == kNoPlace) {
      Remove(hashes[i], spot);
      removed = true;
    } else {
      SetPlace(hashes[i], spot, to[i]);
    }
  });
}

template <typename Line>
void SegmentedIndex<Line>::Erase(std::span<const std::uint64_t> hashes, Place* previous) {
  ForEachFound<false>(hashes, [&](std::size_t i, Spot spot) {
    if (spot.present()) spot = Find(hashes[i]);  // As in Move.
    previous[i] = spot.place;
    if (spot.present()) Remove(hashes[i], spot);
  });
}

template <typename Line>
void SegmentedIndex<Line>::Remove(std::uint64_t hash, const Spot& spot) {
  const std::size_t s = SegmentOf(hash);
  --size_;
  const auto [first, last] = others_.equal_range(IdentityOf(hash));
  if (spot.other) {
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
  const std::uint32_t lines = segments_[s].lines;
  std::uint32_t number = HomeOf(BitsOf(hash), lines);
  for (std::uint32_t tried = 1; LineAt(s, number) != spot.line; ++tried) {
    LineState& state = LineAt(s, number)->state;
    if (state.passed < kMaxPassed) --state.passed;
    number = NextLine(BitsOf(hash), number, tried, lines);
  }
  const std::uint32_t end = spot.line->state.count - 1u;
  spot.line->Set(spot.way, spot.line->bits(end), spot.line->place(end));
  --spot.line->state.count;
  --segments_[s].count;
}

template <typename Line>
std::uint64_t SegmentedIndex<Line>::bytes() const {
  // A node of the map holds its link as well.
  constexpr std::uint64_t kNodeBytes = sizeof(std::pair<std::uint64_t, Other>) + 2 * sizeof(void*);
  return segments_.size() * sizeof(Segment) + extents_.size() * kSegments * sizeof(std::uint32_t) +
         arena_.bytes() + loose_.capacity() * sizeof(Loose) + others_.size() * kNodeBytes +
         others_.bucket_count() * sizeof(void*);
}

template class SegmentedIndex<TaggedLine>;
template class SegmentedIndex<ExactLine>;

}  // namespace terrace
