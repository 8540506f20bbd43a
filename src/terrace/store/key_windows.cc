#include "terrace/store/key_windows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"

namespace terrace {
namespace {

constexpr std::uint64_t kLastHash = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kBlockEntries = kBlockBytes / kKeyEntryBytes;
// Of one read: a disk takes several at a time, and more bring no more bytes a second.
constexpr std::uint64_t kRequestBytes = 512 << 10;
// Entries of a window, about: what fits in the second cache with its copy, and some of each section
// even where there are thousands.
constexpr std::uint64_t kWindowEntries = 8192, kMostWindowEntries = 65536, kEntriesOfASection = 8;
// Sections whose next entries are asked for ahead of their use.
constexpr std::size_t kPrefetchSources = 2;
// Of equal bucket: more are not sorted by insertion.
constexpr std::uint32_t kLongBucket = 32;
// Places that a word moves up within its bucket without a branch; the few that lie further behind
// are sorted by insertion.
constexpr std::size_t kBehind = 2;
// Of a version in a window, below its sequence.
constexpr int kNumberBits = 64 - kSequenceBits;
constexpr std::uint64_t kNumberMask = (std::uint64_t{1} << kNumberBits) - 1;

// Keeps the greater one, returns the other, without a branch to mispredict.
std::uint64_t ExchangeGreater(std::uint64_t word, std::uint64_t* greatest) {
  const bool less = word < *greatest;
  const std::uint64_t lesser = less ? word : *greatest;
  *greatest = less ? *greatest : word;
  return lesser;
}

std::uint64_t BlocksFor(std::uint64_t entries) {
  return (entries + kBlockEntries - 1) / kBlockEntries;
}

}  // namespace

std::uint64_t KeyRounds::Piece::Find(std::uint64_t hash, std::uint64_t guess) const {
  // Entries before `low` are below, entry `high` is not.
  std::uint64_t low = begin, high = cut;
  guess = std::clamp(guess, begin, cut);
  if (guess < cut && HashAt(guess) < hash) {
    low = guess + 1;
    for (std::uint64_t step = 8; low + step < high; step *= 4) {
      if (HashAt(low + step) >= hash) {
        high = low + step;
        break;
      }
      low += step + 1;
    }
  } else {
    high = guess;
    for (std::uint64_t step = 8; low + step <= high; step *= 4) {
      if (HashAt(high - step) < hash) {
        low = high - step + 1;
        break;
      }
      high -= step;
    }
  }
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    if (HashAt(middle) < hash) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

KeyRounds::KeyRounds(ReadQueue* queue, std::span<const KeySection> sections, std::uint64_t grain)
    : queue_(queue), sections_(sections.begin(), sections.end()), grain_(grain) {
  for (const KeySection& section : sections_) entries_ += section.entries;
  for (Buffer& buffer : buffers_) buffer.pieces.resize(sections_.size());
  first_hashes_.resize(sections_.size());
}

Result<std::unique_ptr<KeyRounds>> KeyRounds::Create(ReadQueue* queue,
                                                     std::span<const KeySection> sections,
                                                     std::uint64_t bytes, std::uint64_t grain) {
  TERRACE_CHECK(!sections.empty() && std::has_single_bit(grain));
  std::unique_ptr<KeyRounds> rounds(new KeyRounds(queue, sections, grain));
  std::uint64_t all = 0;
  for (const KeySection& section : sections) all += BlocksFor(section.entries);
  // A round's entries have numbers in a window, whatever the keys are.
  const std::uint64_t most = std::min(bytes / 2, kNumberMask * kKeyEntryBytes) / kBlockBytes;
  const std::uint64_t blocks = std::min(all, std::max<std::uint64_t>(2 * sections.size(), most));
  for (Buffer& buffer : rounds->buffers_) {
    TERRACE_ASSIGN_OR_RETURN(buffer.memory, HugeBuffer::Allocate(blocks * kBlockBytes));
  }
  rounds->ReadAhead();
  return rounds;
}

KeyRounds::~KeyRounds() {
  if (reading_) (void)queue_->Wait();  // Whoever gives up has an error of his own.
}

Status KeyRounds::OutOfOrder(std::size_t source, std::uint64_t i) const {
  const KeySection& section = sections_[source];
  return CorruptionError(fmt::format("{}: the keys at offset {} are out of order",
                                     section.file->path(), section.offset + i * kKeyEntryBytes));
}

std::vector<std::uint64_t> KeyRounds::PlanBlocks(
    const std::vector<std::uint64_t>& kept_blocks) const {
  // Where a section has come to, of all hashes; the blocks it has in as many if it goes on as it
  // began; and what must be read for the next round to bring something.
  struct Plan {
    double at = 0, density = 0;
    std::uint64_t least = 0, most = 0;
    std::uint64_t To(double target) const {
      const double wanted = std::ceil(std::clamp((target - at) * density, 0.0, 0x1p32));
      return std::clamp(static_cast<std::uint64_t>(wanted), least, most);
    }
  };
  std::vector<Plan> plans(sections_.size());
  std::uint64_t free = next_->memory.size() / kBlockBytes, most = 0;
  for (std::size_t s = 0; s < sections_.size(); ++s) {
    const Piece& piece = now_->pieces[s];
    Plan& plan = plans[s];
    free -= kept_blocks[s];
    if (piece.end == sections_[s].entries) continue;
    plan.most = BlocksFor(sections_[s].entries - piece.end);
    plan.least = kept_blocks[s] == 0 ? 1 : 0;
    most += plan.most;
    if (piece.end == 0) continue;  // A file may hold some range only: a block tells which.
    plan.at = std::ldexp(static_cast<double>(piece.HashAt(piece.end - 1)), -64);
    plan.density =
        static_cast<double>(BlocksFor(piece.end)) / std::max(plan.at - first_hashes_[s], 0x1p-53);
  }
  // As far as the buffer allows, and all of them as far: the one that comes least far ends a round.
  const auto blocks_to = [&](double target) {
    std::uint64_t blocks = 0;
    for (const Plan& plan : plans) blocks += plan.To(target);
    return blocks;
  };
  constexpr int kSteps = 32;  // Finer than a block of the longest section.
  double target = 0;
  if (most <= free) {
    target = 1;
    for (Plan& plan : plans) plan.least = plan.most;
  }
  for (double step = 0.5; target < 1 && step > std::ldexp(1.0, -kSteps); step /= 2) {
    if (blocks_to(target + step) <= free) target += step;
  }
  TERRACE_CHECK(blocks_to(target) <= free);
  std::vector<std::uint64_t> blocks;
  for (const Plan& plan : plans) blocks.push_back(plan.To(target));
  return blocks;
}

void KeyRounds::ReadAhead() {
  if (!reading_ && !ended_) StartNext();
}

void KeyRounds::StartNext() {
  std::vector<std::uint64_t> kept(sections_.size());
  for (std::size_t s = 0; s < sections_.size(); ++s) {
    kept[s] = BlocksFor(now_->pieces[s].end - now_->pieces[s].cut);
  }
  const std::vector<std::uint64_t> blocks = PlanBlocks(kept);
  next_->requests.clear();
  std::byte* free = next_->memory.data();
  for (std::size_t s = 0; s < sections_.size(); ++s) {
    const KeySection& section = sections_[s];
    const Piece& before = now_->pieces[s];
    Piece& piece = next_->pieces[s];
    const std::uint64_t kept_bytes = (before.end - before.cut) * kKeyEntryBytes;
    std::byte* const fresh = free + kept[s] * kBlockBytes;
    if (kept_bytes > 0) {
      std::memcpy(fresh - kept_bytes, before.entries + (before.cut - before.begin) * kKeyEntryBytes,
                  kept_bytes);
    }
    piece.begin = before.cut;
    piece.end = piece.cut = std::min(section.entries, before.end + blocks[s] * kBlockEntries);
    piece.entries = fresh - kept_bytes;
    piece.fresh = {fresh, blocks[s] * kBlockBytes};
    for (std::uint64_t at = 0; at < piece.fresh.size(); at += kRequestBytes) {
      ReadRequest request;
      request.file = section.file;
      request.offset = section.offset + before.end * kKeyEntryBytes + at;
      request.buffer = {fresh + at,
                        std::min<std::uint64_t>(kRequestBytes, piece.fresh.size() - at)};
      next_->requests.push_back(std::move(request));
    }
    free = fresh + piece.fresh.size();
  }
  reading_ = true;
  queue_->Start(next_->requests);
}

Status KeyRounds::Await() {
  reading_ = false;
  TERRACE_RETURN_IF_ERROR(queue_->Wait());
  for (const ReadRequest& request : next_->requests) {
    TERRACE_RETURN_IF_ERROR(CheckWhole(request));
    bytes_read_ += request.bytes_read;
  }
  return OkStatus();
}

Result<std::uint64_t> KeyRounds::FindLast() const {
  std::uint64_t last = kLastHash;
  for (std::size_t s = 0; s < sections_.size(); ++s) {
    const Piece& piece = now_->pieces[s];
    if (piece.end == sections_[s].entries) continue;
    const std::uint64_t hash = piece.HashAt(piece.end - 1);
    if (hash < first_) return OutOfOrder(s, piece.end - 1);
    if (hash == kLastHash) return OutOfOrder(s, piece.end);
    last = std::min(last, hash);
  }
  // No less than a grain, where there is one.
  const std::uint64_t whole = (last + 1) & ~(grain_ - 1);  // 0: all hashes that are left.
  return last != kLastHash && whole > first_ ? whole - 1 : last;
}

Result<bool> KeyRounds::Next() {
  if (ended_) return false;
  ReadAhead();
  TERRACE_RETURN_IF_ERROR(Await());
  if (begun_) first_ = last_ + 1;
  begun_ = true;
  std::swap(now_, next_);
  for (std::size_t s = 0; s < sections_.size(); ++s) {
    if (now_->pieces[s].begin > 0) continue;
    first_hashes_[s] = std::ldexp(static_cast<double>(now_->pieces[s].HashAt(0)), -64);
  }
  TERRACE_ASSIGN_OR_RETURN(last_, FindLast());
  ended_ = true;
  for (std::size_t s = 0; s < sections_.size(); ++s) {
    Piece& piece = now_->pieces[s];
    if (last_ != kLastHash) piece.cut = piece.Find(last_ + 1, piece.end);
    if (piece.cut < sections_[s].entries) ended_ = false;
  }
  return true;
}

KeyWindows::KeyWindows(const KeyRounds* rounds)
    : rounds_(rounds),
      bucket_bits_(std::bit_width(
          std::clamp(kEntriesOfASection * rounds->sources(), kWindowEntries, kMostWindowEntries) -
          1)),
      window_bits_(65 - static_cast<int>(std::bit_width(rounds->entries() >> bucket_bits_ | 1))),
      runs_(rounds->sources()),
      places_(std::size_t{1} << bucket_bits_),
      newest_of_(rounds->sources()) {}

void KeyWindows::Start(std::uint64_t first, std::uint64_t last) {
  TERRACE_CHECK(first <= last && first >= rounds_->first() && last <= rounds_->last());
  const auto width = static_cast<double>(rounds_->last() - rounds_->first());
  const auto share = [&](std::uint64_t hash) {
    return static_cast<double>(hash - rounds_->first()) / std::max(width, 1.0);
  };
  const double from = share(first), to = share(last + 1);
  for (std::size_t s = 0; s < runs_.size(); ++s) {
    const KeyRounds::Piece& piece = rounds_->now_->pieces[s];
    // The same for one range's end and the next one's start, whatever the section holds.
    const auto find = [&](std::uint64_t hash, double at) {
      const double steps = at * static_cast<double>(piece.cut - piece.begin);
      return piece.Find(hash, piece.begin + static_cast<std::uint64_t>(steps));
    };
    runs_[s].next = first == rounds_->first() ? piece.begin : find(first, from);
    runs_[s].end = last == rounds_->last() ? piece.cut : find(last + 1, to);
  }
  base_ = first;
  last_ = last;
  done_ = false;
}

Status KeyWindows::Next(RawVector<KeyPlace>* rows, std::vector<KeyPlace>* deletions) {
  TERRACE_CHECK(!done_);
  const std::uint64_t span =
      window_bits_ == 64 ? kLastHash : (std::uint64_t{1} << window_bits_) - 1;
  end_ = std::min(last_, base_ | span);
  done_ = end_ == last_;
  count_ = 0;
  std::fill(places_.begin(), places_.end(), 0);
  for (std::uint32_t source = 0; source < runs_.size(); ++source) {
    // Each has some lines of memory for a window, which nothing but this foresees.
    if (const std::size_t later = source + kPrefetchSources; later < runs_.size()) {
      const KeyRounds::Piece& piece = rounds_->now_->pieces[later];
      const std::byte* const at =
          piece.entries + (runs_[later].next - piece.begin) * kKeyEntryBytes;
      const std::uint64_t bytes =
          std::min(ahead_, (runs_[later].end - runs_[later].next) * kKeyEntryBytes);
      for (std::uint64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
    }
    TERRACE_RETURN_IF_ERROR(Take(source, end_));
    // Its hash is beyond the range.
    if (done_ && runs_[source].next < runs_[source].end) {
      return rounds_->OutOfOrder(source, runs_[source].next);
    }
  }
  ahead_ = kKeyEntryBytes * count_ / runs_.size() + 64;
  Sort();
  if (!FindNewest()) {
    // Keys that somebody chose: their hashes differ only in bits that no word has.
    std::uint64_t* const words = words_.data() + kBehind;
    std::sort(words, words + count_, [&](std::uint64_t one, std::uint64_t other) {
      one &= numbers_, other &= numbers_;
      return std::pair(taken_[one].hash, one) < std::pair(taken_[other].hash, other);
    });
    TERRACE_CHECK(FindNewest());
  }
  Tell(rows, deletions);
  base_ = end_ + 1;
  return OkStatus();
}

Status KeyWindows::Take(std::uint32_t source, std::uint64_t limit) {
  constexpr std::uint64_t kStep = 8;  // Hashes that the processor mixes side by side.
  Run& run = runs_[source];
  const KeyRounds::Piece& piece = rounds_->now_->pieces[source];
  const KeySection& section = rounds_->sections_[source];
  std::uint32_t* const counts = places_.data();
  const int lead = 64 - window_bits_, rest = 64 - bucket_bits_;
  // The least that the next hash may be; 0 after the greatest one.
  std::uint64_t least = base_;
  std::uint64_t i = run.next;
  std::size_t count = count_;
  for (bool more = true; more && i < run.end;) {
    const std::uint64_t step = std::min(kStep, run.end - i);
    std::uint64_t hashes[kStep];
    if (step == kStep) {
      for (std::uint64_t k = 0; k < kStep; ++k) hashes[k] = piece.HashAt(i + k);
    } else {
      for (std::uint64_t k = 0; k < step; ++k) hashes[k] = piece.HashAt(i + k);
    }
    if (taken_.size() < count + kStep) taken_.resize(2 * count + kStep);
    Version* const taken = taken_.data();
    for (std::uint64_t k = 0; k < step; ++k, ++i) {
      const std::uint64_t hash = hashes[k];
      if (hash < least || (least == 0 && i > run.next)) return rounds_->OutOfOrder(source, i);
      if (hash > limit) {
        more = false;
        break;
      }
      const std::uint64_t version = piece.At(i).version;
      const std::uint64_t row = RowOfEntry(section.version, i, version);
      if (row >= section.entries) [[unlikely]] {
        return CorruptionError(fmt::format("{}: the key at offset {} is of no record",
                                           section.file->path(),
                                           section.offset + i * kKeyEntryBytes));
      }
      taken[count++] = {hash, MakePlace(source, row), version};
      ++counts[hash << lead >> rest];
      least = hash + 1;
    }
  }
  run.next = i;
  count_ = count;
  return OkStatus();
}

// A counting sort to buckets of about one version, by the first bits of the hash that differ within
// a window. What moves are words: bits of the hash above the number of the version in taken_.
void KeyWindows::Sort() {
  std::uint32_t sum = 0, longest = 0;
  for (std::uint32_t& place : places_) {
    const std::uint32_t count = place;
    longest = std::max(longest, count);
    place = sum;
    sum += count;
  }
  if (words_.size() < taken_.size() + kBehind) words_.resize(taken_.size() + kBehind);
  numbers_ = std::bit_ceil(count_ + 1) - 1;
  const std::uint64_t numbers = numbers_;
  const std::size_t count = count_;
  const Version* const taken = taken_.data();
  std::uint64_t* const behind = words_.data();
  std::uint64_t* const words = behind + kBehind;
  std::uint32_t* const places = places_.data();
  const int lead = 64 - window_bits_;
  const int rest = 64 - bucket_bits_;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bits = taken[i].hash << lead;
    words[places[bits >> rest]++] = (bits & ~numbers) | i;
  }
  if (longest > kLongBucket) {
    // Of hot keys, or of keys that somebody chose.
    for (std::size_t b = 0, begin = 0; b < places_.size(); begin = places_[b++]) {
      if (places_[b] - begin > kLongBucket) std::sort(words + begin, words + places_[b]);
    }
  }
  // Two passes at once, each of which carries the greatest so far on: all move up by a place that
  // have a greater one before them.
  std::uint64_t greatest = 0, second = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t lesser = ExchangeGreater(words[i], &greatest);
    behind[i] = ExchangeGreater(lesser, &second);
  }
  behind[count] = second;
  behind[count + 1] = greatest;
  for (std::size_t i = 1; i < count; ++i) {
    const std::uint64_t moving = words[i];
    std::size_t at = i;
    for (; at > 0 && words[at - 1] > moving; --at) words[at] = words[at - 1];
    words[at] = moving;
  }
}

// No processor foresees whether a key has another version: nothing branches on it.
bool KeyWindows::FindNewest() {
  keys_ = 0;
  if (count_ == 0) return true;
  TERRACE_CHECK(count_ <= kNumberMask);
  if (newest_.size() < count_) newest_.resize(taken_.size());
  const Version* const taken = taken_.data();
  const std::uint64_t* const words = words_.data() + kBehind;
  std::uint32_t* const newest = newest_.data();
  std::uint64_t hash = taken[words[0] & numbers_].hash;
  // The newest version so far: by sequence, then by section, as its number in taken_ is.
  std::uint64_t best = 0;
  std::size_t key = 0;
  bool sorted = true;
  for (std::size_t i = 0; i < count_; ++i) {
    const std::uint64_t number = words[i] & numbers_;
    const Version& version = taken[number];
    const std::uint64_t other = version.hash != hash ? 1 : 0;
    sorted &= version.hash >= hash;
    hash = version.hash;
    best = std::max(best & (other - 1), SequenceOf(version.version) << kNumberBits | number);
    key += other;
    newest[key] = static_cast<std::uint32_t>(best);
  }
  keys_ = key + 1;
  return sorted;
}

void KeyWindows::Tell(RawVector<KeyPlace>* rows, std::vector<KeyPlace>* deletions) {
  std::size_t told = rows->size();
  rows->resize(told + keys_);
  KeyPlace* const all = rows->data();
  for (std::size_t key = 0; key < keys_; ++key) {
    const Version& version = taken_[newest_[key] & kNumberMask];
    ++newest_of_[SlotOfPlace(version.place)];
    if (IsDeletion(version.version)) [[unlikely]] {
      deletions->push_back({version.hash, version.place});
    } else {
      all[told++] = {version.hash, version.place};
    }
  }
  rows->resize(told);
}

}  // namespace terrace
