#include "terrace/cache/entry_map.h"

#include <utility>

#include "terrace/base/check.h"

namespace terrace {
namespace {
constexpr std::uint64_t kRowsPerLine = 9;  // Of twelve: about one entry in twenty goes on.
constexpr std::uint16_t kPassedTop = 0xffff;
}  // namespace

std::uint64_t EntryMap::BytesFor(std::uint64_t rows) {
  return HugeBuffer::SizeFor((rows + kRowsPerLine - 1) / kRowsPerLine * sizeof(Line));
}

Status EntryMap::Reset(std::uint64_t rows) {
  TERRACE_CHECK(rows > 0);
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer memory, HugeBuffer::Allocate(BytesFor(rows)));
  memory_ = std::move(memory);
  lines_ = reinterpret_cast<Line*>(memory_.data());
  line_count_ = memory_.size() / sizeof(Line);
  capacity_rows_ = line_count_ * kRowsPerLine;
  size_ = 0;
  return OkStatus();
}

void EntryMap::Insert(std::uint64_t hash, std::uint32_t entry) {
  TERRACE_DCHECK(size_ < capacity_rows_);
  ++size_;
  std::uint64_t place = Home(hash);
  while (true) {
    Line& line = lines_[place];
    const std::uint32_t empty = Match(line, 0);
    if (empty != 0) {
      const int way = std::countr_zero(empty);
      line.tags[way] = Tag(hash);
      line.entries[way] = entry;
      return;
    }
    if (line.passed != kPassedTop) ++line.passed;
    place = Next(place);
  }
}

EntryMap::Spot EntryMap::Locate(std::uint64_t hash, std::uint32_t entry) const {
  const std::uint8_t tag = Tag(hash);
  std::uint64_t place = Home(hash);
  while (true) {
    const Line& line = lines_[place];
    for (std::uint32_t matches = Match(line, tag); matches != 0; matches &= matches - 1) {
      const int way = std::countr_zero(matches);
      if (line.entries[way] == entry) return {place, way};
    }
    TERRACE_CHECK(line.passed != 0);
    place = Next(place);
  }
}

void EntryMap::Erase(std::uint64_t hash, std::uint32_t entry) {
  const Spot spot = Locate(hash, entry);
  for (std::uint64_t place = Home(hash); place != spot.line; place = Next(place)) {
    if (lines_[place].passed != kPassedTop) --lines_[place].passed;
  }
  lines_[spot.line].tags[spot.way] = 0;
  --size_;
}

void EntryMap::Replace(std::uint64_t hash, std::uint32_t entry, std::uint32_t by) {
  const Spot spot = Locate(hash, entry);
  lines_[spot.line].entries[spot.way] = by;
}

}  // namespace terrace
