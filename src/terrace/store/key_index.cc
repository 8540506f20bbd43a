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

// Keys that are looked up together, and how many of their lines are asked for ahead.
constexpr std::size_t kRound = 1024;
constexpr std::size_t kAhead = 80;
// Lines that a key tries a step of its own apart; then one after another, until one has room.
constexpr std::uint32_t kHops = 16;
// Above this share of entries a segment gets more lines; above the greater one also if it is the
// first of its group, or others have just got some.
constexpr double kMaxLoad = 0.95, kMostLoad = 0.985;
// Keys that may be moved for each that is to come, a little more than are on average: a batch
// doesn't notice whose turn it is.
constexpr std::uint64_t kMovesAKey = 12;
// Of a chunk of the arena, and of all before they are huge pages.
constexpr std::uint64_t kLeastChunkBytes = 64 << 10, kLeastHugeBytes = 6 * kHugePageBytes;

}  // namespace

template <typename Line>
Result<Line*> SegmentedIndex<Line>::LineArena::Take(std::uint64_t lines) {
  const std::uint64_t bytes = lines * sizeof(Line);
  if (chunks_.empty() || chunks_.back().size() - used_ < bytes) {
    // As much again, of which the system gives what is used; an eighth while a huge page would be
    // much of a small index.
    const std::uint64_t all = full_ + used_;
    const std::uint64_t more = all < kLeastHugeBytes ? all / 8 : all;
    TERRACE_ASSIGN_OR_RETURN(HugeBuffer chunk,
                             HugeBuffer::Allocate(std::max({more, kLeastChunkBytes, bytes})));
    chunks_.push_back(std::move(chunk));
    full_ = all;
    used_ = 0;
  }
  // Zeroed, which is empty lines.
  return reinterpret_cast<Line*>(chunks_.back().data() + std::exchange(used_, used_ + bytes));
}

template <typename Line>
std::uint64_t SegmentedIndex<Line>::LineArena::bytes() const {
  const bool huge = !chunks_.empty() && chunks_.back().size() >= kHugePageBytes;
  return full_ + AlignUp(used_, huge ? kHugePageBytes : 4096);
}

template <typename Line>
SegmentedIndex<Line>::SegmentedIndex(int row_bits) : row_bits_(Line::kExact ? kRowBits : row_bits) {
  TERRACE_CHECK(row_bits_ >= 0 && row_bits_ <= kRowBits);
}

template <typename Line>
std::uint32_t SegmentedIndex<Line>::max_slots() const {
  return SlotsFor(row_bits_);
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
const typename SegmentedIndex<Line>::Other* SegmentedIndex<Line>::FindOther(
    std::uint64_t hash) const {
  const auto [first, last] = others_.equal_range(IdentityOf(hash));
  for (auto it = first; it != last; ++it) {
    if (it->second.hash == hash) return &it->second;
  }
  return nullptr;
}

template <typename Line>
auto SegmentedIndex<Line>::Find(std::uint64_t hash) const -> Spot {
  const std::size_t s = SegmentOf(hash);
  const std::uint64_t bits = BitsOf(hash);
  std::uint32_t number = HomeOf(bits, lines_[s]);
  for (std::uint32_t tried = 1; tried <= lines_[s] + kHops; ++tried) {
    Line* const line = LineAt(s, number);
    if (const std::uint32_t equal = line->Match(bits); equal != 0) {
      const auto way = static_cast<std::uint32_t>(std::countr_zero(equal));
      const Other* const other = line->state.shared ? FindOther(hash) : nullptr;
      if (other != nullptr) return {line, way, true, other->place};
      return {line, way, false, Unpack(line->place(way))};
    }
    if (line->state.passed == 0) break;
    number = NextLine(bits, number, tried, lines_[s]);
  }
  return Spot();
}

template <typename Line>
[[gnu::noinline]] void SegmentedIndex<Line>::HomeLines(std::span<const std::uint64_t> hashes,
                                                       std::size_t first, std::span<Sought> sought,
                                                       Line** lines) const {
  static constinit Line empty{};  // Nobody writes it: an insertion comes after Reserve.
  const std::uint32_t* const lines_of = lines_.data();
  for (std::size_t i = 0; i < sought.size(); ++i) {
    const std::uint64_t hash = hashes[first + i];
    const std::size_t s = SegmentOf(hash);
    const std::uint32_t count = lines_of[s];
    const std::uint32_t number = HomeOf(BitsOf(hash), count);
    sought[i] = {static_cast<std::uint32_t>(first + i), number, 1};
    lines[i] = count > 0 ? LineAt(s, number) : &empty;
  }
}

template <typename Line>
[[gnu::noinline]] std::size_t SegmentedIndex<Line>::NextLines(std::span<const std::uint64_t> hashes,
                                                              std::span<Sought> sought,
                                                              Line** lines) const {
  const std::uint32_t* const lines_of = lines_.data();
  std::size_t count = 0;
  for (const Sought& last : sought) {
    const std::uint64_t hash = hashes[last.key];
    const std::size_t s = SegmentOf(hash);
    if (last.tried == lines_of[s] + kHops) continue;  // All of them are full.
    const std::uint32_t number = NextLine(BitsOf(hash), last.number, last.tried, lines_of[s]);
    lines[count] = LineAt(s, number);
    sought[count++] = {last.key, number, last.tried + 1};
  }
  return count;
}

template <typename Line>
template <bool kToRoom, typename Tell>
[[gnu::noinline]] std::size_t SegmentedIndex<Line>::LookInto(std::span<const std::uint64_t> hashes,
                                                             std::span<Sought> sought,
                                                             Line* const* lines, Tell tell) const {
  std::size_t left = 0, shared = 0;
  std::array<std::uint32_t, kRound> shared_keys;
  const auto look = [&](std::size_t i) __attribute__((always_inline)) {
    const Sought asked = sought[i];
    Line* const line = lines[i];
    const LineState state = line->state;
    const std::uint32_t equal = line->Match(BitsOf(hashes[asked.key]));
    const auto way = static_cast<std::uint32_t>(std::countr_zero(equal | 1u << (Line::kWays - 1)));
    tell(asked, line, way, equal != 0);
    if (state.shared) [[unlikely]]
      shared_keys[shared++] = asked.key;
    sought[left] = asked;
    const bool goes_on = state.passed != 0 || (kToRoom && state.count == Line::kWays);
    left += static_cast<std::size_t>(equal == 0) & static_cast<std::size_t>(goes_on);
  };
  const std::size_t ahead = std::min(sought.size(), kAhead);
  for (std::size_t i = 0; i < ahead; ++i) __builtin_prefetch(lines[i]);
  std::size_t i = 0;
  for (; i + ahead < sought.size(); ++i) {
    __builtin_prefetch(lines[i + ahead]);
    look(i);
  }
  for (; i < sought.size(); ++i) look(i);
  for (std::size_t k = 0; k < shared; ++k) {
    if (const Other* other = FindOther(hashes[shared_keys[k]])) tell(shared_keys[k], *other);
  }
  return left;
}

template <typename Line>
template <bool kToRoom, typename Tell>
void SegmentedIndex<Line>::FindEach(std::span<const std::uint64_t> hashes, Tell tell) const {
  std::array<Sought, kRound> sought;
  std::array<Line*, kRound> lines;
  std::size_t count = 0;
  for (std::size_t started = 0; started < hashes.size() || count > 0;) {
    count = NextLines(hashes, std::span(sought).first(count), lines.data());
    const std::size_t fresh = std::min(kRound - count, hashes.size() - started);
    HomeLines(hashes, started, std::span(sought).subspan(count, fresh), lines.data() + count);
    started += fresh;
    count = LookInto<kToRoom>(hashes, std::span(sought).first(count + fresh), lines.data(), tell);
  }
}

template <typename Line>
struct SegmentedIndex<Line>::TellSpots {
  const SegmentedIndex* index;
  Spot* spots;

  [[gnu::always_inline]] void operator()(const Sought& asked, Line* line, std::uint32_t way,
                                         bool found) {
    spots[asked.key] = {found ? line : nullptr, way, false, index->Unpack(line->place(way))};
  }
  void operator()(std::uint32_t key, const Other& other) {
    spots[key].other = true;
    spots[key].place = other.place;
  }
};

// Of keys that are to be inserted: an absent one goes past the full lines before the first that has
// room, and is counted there at once. InsertAt takes that back where a key turns out to be alike to
// another.
template <typename Line>
struct SegmentedIndex<Line>::TellRooms {
  TellSpots spots;
  Room* rooms;

  [[gnu::always_inline]] void operator()(const Sought& asked, Line* line, std::uint32_t way,
                                         bool found) {
    spots(asked, line, way, found);
    Room& room = rooms[asked.key];
    LineState& state = line->state;
    const bool searching = !found & (room.line == nullptr), full = state.count == Line::kWays;
    const std::uint32_t passed = state.passed + static_cast<std::uint32_t>(searching & full);
    state.passed = std::min<std::uint32_t>(passed, kMaxPassed) & kMaxPassed;
    const bool here = searching & !full;
    room = {here ? line : room.line, here ? asked.number : room.number,
            here ? asked.tried : room.tried};
  }
  void operator()(std::uint32_t key, const Other& other) { spots(key, other); }
};

template <typename Line>
template <typename Visit>
void SegmentedIndex<Line>::ForEachFound(std::span<const std::uint64_t> hashes, Visit visit) const {
  if (lines_.empty()) {
    for (std::size_t i = 0; i < hashes.size(); ++i) visit(i, Spot());
    return;
  }
  std::vector<Spot> spots(std::min(kRound, hashes.size()));
  for (std::size_t begin = 0; begin < hashes.size(); begin += kRound) {
    const auto round = hashes.subspan(begin, std::min(kRound, hashes.size() - begin));
    FindEach<false>(round, TellSpots{this, spots.data()});
    for (std::size_t i = 0; i < round.size(); ++i) {
      if (!spots[i].present()) spots[i] = Spot();
      visit(begin + i, spots[i]);
    }
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
struct SegmentedIndex<Line>::TellPlaces {
  const SegmentedIndex* index;
  Place* places;

  // Without a branch: nobody foresees which of the keys are here.
  [[gnu::always_inline]] void operator()(const Sought& asked, Line* line, std::uint32_t way,
                                         bool found) {
    const Place mask = found ? ~Place{0} : 0;
    places[asked.key] = (index->Unpack(line->place(way)) & mask) | (kNoPlace & ~mask);
  }
  void operator()(std::uint32_t key, const Other& other) { places[key] = other.place; }
};

template <typename Line>
void SegmentedIndex<Line>::Lookup(std::span<const std::uint64_t> hashes, Place* places) const {
  if (lines_.empty()) {
    std::fill_n(places, hashes.size(), kNoPlace);
  } else {
    FindEach<false>(hashes, TellPlaces{this, places});
  }
}

template <typename Line>
Status SegmentedIndex<Line>::Reserve(std::span<const std::uint64_t> new_hashes,
                                     std::uint64_t expected) {
  if (new_hashes.empty()) return OkStatus();
  TERRACE_RETURN_IF_ERROR(MakeSegments());
  std::vector<std::uint32_t> added(kSegments, 0);
  for (const std::uint64_t hash : new_hashes) ++added[SegmentOf(hash)];
  std::uint64_t moves = kMovesAKey * new_hashes.size();
  for (std::size_t s = 0; s < kSegments; ++s) {
    if (added[s] == 0) continue;
    const std::uint64_t count = std::uint64_t{counts_[s]} + added[s];
    if (moves == 0 && lines_[s] >= LinesFor(count, kMostLoad)) continue;
    const std::uint32_t before = lines_[s];
    TERRACE_RETURN_IF_ERROR(Grow(s, count, expected / kSegments));
    if (lines_[s] > before) moves -= std::min<std::uint64_t>(moves, counts_[s]);
  }
  return OkStatus();
}

template <typename Line>
Status SegmentedIndex<Line>::MakeSegments() {
  if (!lines_.empty()) return OkStatus();
  TERRACE_ASSIGN_OR_RETURN(extents_,
                           HugeBuffer::Allocate(LineExtents::kMost * kGroups * sizeof(Line*)));
  lines_.resize(kSegments);
  counts_.resize(kSegments);
  return OkStatus();
}

template <typename Line>
Status SegmentedIndex<Line>::TakeLines(std::size_t s, std::uint64_t count, std::uint64_t expected) {
  if (LinesFor(count, kMaxLoad) > LineExtents::kMostLines) {
    return InternalError(
        fmt::format("the index by key holds at most {} lines of keys in one of its {} segments; "
                    "use more shards (ssd.shards)",
                    LineExtents::kMostLines, kSegments));
  }
  const std::size_t c = ClassOf(s), g = GroupOf(s);
  std::uint32_t& lines = lines_[s];
  const std::uint64_t wanted = std::min<std::uint64_t>(
      LinesFor(std::max(count, expected), kMaxLoad), LineExtents::kMostLines);
  bool for_expected = false;
  std::size_t extent = lines == 0 ? 0 : kLineExtents.Find(c, lines - 1).extent + 1;
  for (; lines < wanted; lines = kLineExtents.begin(c, ++extent)) {
    Line*& place = Extent(extent)[g];
    if (place != nullptr) continue;
    const bool group_is_full =
        static_cast<double>(group_counts_[g]) > kMaxLoad * kGroupSegments * Line::kWays * lines;
    if (!group_is_full && !for_expected && lines >= LinesFor(count, kMostLoad)) break;
    for_expected = expected > count;
    TERRACE_ASSIGN_OR_RETURN(place, arena_.Take(kGroupSegments * kLineExtents.size(c, extent)));
    extents_used_ = std::max(extents_used_, extent + 1);
  }
  return OkStatus();
}

template <typename Line>
auto SegmentedIndex<Line>::LinesOf(std::size_t s) const -> SegmentLines {
  const std::size_t c = ClassOf(s);
  SegmentLines lines(lines_[s]);
  for (std::size_t k = 0, at = 0; at < lines.size(); ++k) {
    Line* line = Extent(k)[GroupOf(s)] + s % kGroupSegments * kLineExtents.size(c, k);
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
Status SegmentedIndex<Line>::Grow(std::size_t s, std::uint64_t count, std::uint64_t expected) {
  std::uint32_t kept = lines_[s];
  const Status taken = TakeLines(s, count, expected);
  if (lines_[s] == kept) return taken;
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
    InsertEntry(entry, lines_[s], HomeOf(entry.bits, lines_[s]), 1,
                [&](std::uint32_t number) { return lines[number]; });
  }
  return taken;
}

template <typename Line>
void SegmentedIndex<Line>::SpreadLines(std::size_t s, const SegmentLines& lines,
                                       std::uint32_t before) {
  constexpr std::uint32_t kLinesAhead = 16;
  // Homes move only up: from the last line down, those above have been left. They are at most three
  // for the entries at home in a line; the fourth list is of those that are not, or find it full.
  constexpr std::uint32_t kLoose = 3;
  const auto after = static_cast<std::uint32_t>(lines.size());
  for (std::uint32_t number = before; number-- > 0;) {
    if (number >= kLinesAhead) __builtin_prefetch(lines[number - kLinesAhead], 1);
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
void SegmentedIndex<Line>::InsertEntry(const Loose& entry, std::uint32_t lines,
                                       std::uint32_t number, std::uint32_t tried, LineOf line_of) {
  Line* line = line_of(number);
  for (; line->state.count == Line::kWays; ++tried) {
    if (line->state.passed < kMaxPassed) ++line->state.passed;
    number = NextLine(entry.bits, number, tried, lines);
    line = line_of(number);
  }
  Append(line, entry);
}

template <typename Line>
void SegmentedIndex<Line>::Insert(std::span<const std::uint64_t> hashes, const Place* places) {
  TERRACE_CHECK(!lines_.empty() || hashes.empty());
  // Else the line that stands for none would be written.
  for (const std::uint64_t hash : hashes) TERRACE_DCHECK(lines_[SegmentOf(hash)] > 0);
  std::vector<Spot> spots(std::min(kRound, hashes.size()));
  std::vector<Room> rooms;
  for (std::size_t begin = 0; begin < hashes.size(); begin += kRound) {
    const auto round = hashes.subspan(begin, std::min(kRound, hashes.size() - begin));
    rooms.assign(round.size(), Room());
    FindEach<true>(round, TellRooms{{this, spots.data()}, rooms.data()});
    for (std::size_t i = 0; i < round.size(); ++i) {
      // The one before may be alike, and have been inserted since.
      TERRACE_DCHECK(begin + i == 0 || hashes[begin + i - 1] < round[i]);
      const bool may_be_alike = begin + i > 0 && Alike(hashes[begin + i - 1], round[i]);
      InsertAt(round[i], places[begin + i],
               may_be_alike && !spots[i].present() ? Find(round[i]) : spots[i], rooms[i]);
    }
  }
}

template <typename Line>
void SegmentedIndex<Line>::InsertAt(std::uint64_t hash, Place place, const Spot& spot,
                                    const Room& room) {
  ++size_;
  if (spot.present()) {
    TERRACE_CHECK(!Line::kExact && !spot.other);
    Unpass(hash, spot.line, room.line);
    spot.line->state.shared = 1;
    others_.insert({IdentityOf(hash), {hash, place}});
    return;
  }
  const std::size_t s = SegmentOf(hash);
  TERRACE_CHECK(counts_[s] < std::uint64_t{lines_[s]} * Line::kWays);
  ++counts_[s];
  ++group_counts_[GroupOf(s)];
  // Those before it may have filled the line since.
  InsertEntry({BitsOf(hash), Pack(place), false}, lines_[s], room.number, room.tried,
              [&](std::uint32_t number) { return LineAt(s, number); });
}

template <typename Line>
void SegmentedIndex<Line>::Unpass(std::uint64_t hash, const Line* end, const Line* other_end) {
  const std::size_t s = SegmentOf(hash);
  const std::uint64_t bits = BitsOf(hash);
  std::uint32_t number = HomeOf(bits, lines_[s]);
  for (std::uint32_t tried = 1;; ++tried) {
    Line* const line = LineAt(s, number);
    if (line == end || line == other_end) return;
    if (line->state.passed < kMaxPassed) --line->state.passed;
    number = NextLine(bits, number, tried, lines_[s]);
  }
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
      TERRACE_RETURN_IF_ERROR(MakeSegments());
      if (counts_[s] > 0) {
        std::vector<std::uint64_t> hashes;
        std::vector<Place> places;
        for (const auto& [hash, place] : part) {
          hashes.push_back(hash);
          places.push_back(place);
        }
        TERRACE_RETURN_IF_ERROR(Reserve(hashes, /*expected=*/0));
        Insert(hashes, places.data());
        continue;
      }
      TERRACE_RETURN_IF_ERROR(TakeLines(s, part.size(), /*expected=*/0));
      lines = LinesOf(s);
    }
    // Nobody else touches this segment.
    others.clear();
    FillSegment(lines, part, &others);
    counts_[s] = static_cast<std::uint32_t>(part.size() - others.size());
    MutexLock lock(&fill_mu_);
    group_counts_[GroupOf(s)] += counts_[s];
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
  ForEachFound(hashes, [&](std::size_t i, const Spot& spot) {
    TERRACE_CHECK(spot.present());
    previous[i] = spot.place;
    SetPlace(hashes[i], spot, places[i]);
  });
}

template <typename Line>
void SegmentedIndex<Line>::Move(std::span<const std::uint64_t> hashes, const Place* from,
                                const Place* to, std::uint8_t* moved) {
  bool removed = false;
  ForEachFound(hashes, [&](std::size_t i, Spot spot) {
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
  ForEachFound(hashes, [&](std::size_t i, Spot spot) {
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
  Unpass(hash, spot.line, spot.line);
  const std::uint32_t end = spot.line->state.count - 1u;
  spot.line->Set(spot.way, spot.line->bits(end), spot.line->place(end));
  --spot.line->state.count;
  --counts_[s];
  --group_counts_[GroupOf(s)];
}

template <typename Line>
std::uint64_t SegmentedIndex<Line>::bytes() const {
  // A node of the map holds its link as well.
  constexpr std::uint64_t kNodeBytes = sizeof(std::pair<std::uint64_t, Other>) + 2 * sizeof(void*);
  return (lines_.size() + counts_.size()) * sizeof(std::uint32_t) +
         extents_used_ * kGroups * sizeof(Line*) + arena_.bytes() +
         loose_.capacity() * sizeof(Loose) + others_.size() * kNodeBytes +
         others_.bucket_count() * sizeof(void*);
}

template class SegmentedIndex<TaggedLine>;
template class SegmentedIndex<ExactLine>;

}  // namespace terrace
