#include "terrace/cache/entry_queues.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace terrace {
namespace {
constexpr std::uint32_t kPrefetchAhead = 8;  // References; a cache line of memory takes as long.

// How many blocks are looked through for each that is taken: s. There is room for C = R (1 + d/8)
// references, R being the rows. A sweep begins when C / (s + 1) are free, and looks through the
// others while as many are pushed: it ends in time. What it leaves dead is of rows that left
// meanwhile, and each of those is held or was pushed again; so at most R + C / (s + 1) references
// are left. The next sweep needs C / (s + 1) to be free too: s + 1 >= 2 (8 + d) / d. With half as
// much again sweeps begin later, and are fewer.
std::uint64_t SweepStep(std::uint64_t dead_eighths) {
  return 3 * (8 + dead_eighths) / dead_eighths;
}
}  // namespace

EntryQueues::EntryQueues(RowArena* arena, int queues, int dead_eighths)
    : arena_(arena),
      queue_count_(queues),
      dead_eighths_(static_cast<std::uint64_t>(dead_eighths)),
      sweep_step_(SweepStep(dead_eighths_)) {
  TERRACE_CHECK(queues <= kMaxQueues && dead_eighths > 0);
}

// Live and dead references between two sweeps, and for each queue two blocks that are not full, one
// of them while a sweep copies.
std::uint64_t EntryQueues::BlocksFor(std::uint64_t rows) const {
  constexpr std::uint64_t kReferences = kBlockWords - 1;
  const std::uint64_t references = rows + (rows * dead_eighths_ + 7) / 8;
  return (references + kReferences - 1) / kReferences +
         2 * static_cast<std::uint64_t>(queue_count_) + 1;
}

std::uint64_t EntryQueues::BytesFor(std::uint64_t rows) const {
  return (BlocksFor(rows) + kSegmentBlocks - 1) / kSegmentBlocks * kSegmentBytes;
}

Status EntryQueues::Reserve(std::uint64_t rows) {
  const std::uint64_t wanted = BytesFor(rows) / kSegmentBytes;
  while (segments_.size() < wanted) {
    std::unique_ptr<Segment> segment(new (std::nothrow) Segment);
    if (segment == nullptr) {
      return OutOfMemoryError("asked the system for " + std::to_string(kSegmentBytes) +
                              " bytes for the order of cached rows");
    }
    AddSegment(std::move(segment));
  }
  if (segments_.size() == wanted) return OkStatus();
  // After the first sweep the blocks below the limit that are free suffice for what lies above it.
  Sweep();
  block_limit_ = static_cast<std::uint32_t>(wanted * kSegmentBlocks);
  std::uint32_t free = std::exchange(free_block_, kNoBlock);
  free_blocks_ = 0;
  while (free != kNoBlock) {
    const std::uint32_t next = block(free)[0];
    FreeBlock(free);
    free = next;
  }
  Sweep();
  segments_.resize(wanted);
  block_limit_ = ~std::uint32_t{0};
  return OkStatus();
}

void EntryQueues::AddSegment(std::unique_ptr<Segment> segment) {
  segments_.push_back(std::move(segment));
  const auto first = static_cast<std::uint32_t>((segments_.size() - 1) * kSegmentBlocks);
  for (std::uint32_t i = kSegmentBlocks; i > 0; --i) FreeBlock(first + i - 1);
}

void EntryQueues::FreeBlock(std::uint32_t number) {
  if (number == sweep_end_) sweep_end_ = kNoBlock;
  if (number >= block_limit_) return;
  block(number)[0] = free_block_;
  free_block_ = number;
  ++free_blocks_;
}

void EntryQueues::Append(Queue* queue, std::uint8_t place, EntryId id) {
  if (queue->tail == kNoBlock || queue->tail_word == kBlockWords) {
    const std::uint32_t fresh = free_block_;
    TERRACE_CHECK(fresh != kNoBlock);
    free_block_ = block(fresh)[0];
    --free_blocks_;
    block(fresh)[0] = kNoBlock;
    if (queue->tail == kNoBlock) {
      queue->head = fresh;
      queue->head_word = 1;
    } else {
      block(queue->tail)[0] = fresh;
    }
    queue->tail = fresh;
    queue->tail_word = 1;
  }
  block(queue->tail)[queue->tail_word] = id;
  Entry& entry = arena_->entry(id);
  entry.place = place;
  entry.position = queue->tail * kBlockWords + queue->tail_word;
  ++queue->tail_word;
}

void EntryQueues::Push(int queue, EntryId id) {
  Queue& to = queues_[static_cast<std::size_t>(queue)];
  if (to.tail == kNoBlock || to.tail_word == kBlockWords) MakeRoom();
  Append(&to, static_cast<std::uint8_t>(kFirstQueue + queue), id);
}

void EntryQueues::PrefetchHead(const Queue& queue) {
  if (queue.head == kNoBlock) return;
  const std::uint32_t end = queue.head == queue.tail ? queue.tail_word : kBlockWords;
  for (std::uint32_t i = 1; i < std::min(end, 1 + kPrefetchAhead); ++i) {
    __builtin_prefetch(&arena_->entry(block(queue.head)[i]), 1);
  }
}

EntryId EntryQueues::Pop(int queue) {
  const auto place = static_cast<std::uint8_t>(kFirstQueue + queue);
  if (queue == swept_queue_) {
    const EntryId id = PopFrom(&kept_, place);
    if (id != kNoEntry) return id;
  }
  return PopFrom(&queues_[static_cast<std::size_t>(queue)], place);
}

EntryId EntryQueues::PopFrom(Queue* queue, std::uint8_t place) {
  Queue& from = *queue;
  while (from.head != kNoBlock) {
    const std::uint32_t* words = block(from.head);
    const std::uint32_t end = from.head == from.tail ? from.tail_word : kBlockWords;
    if (from.head_word == end) {
      const std::uint32_t next = from.head == from.tail ? kNoBlock : words[0];
      FreeBlock(from.head);
      from.head = next;
      from.head_word = 1;
      if (next == kNoBlock) from.tail = kNoBlock;
      PrefetchHead(from);
      continue;
    }
    if (from.head_word + kPrefetchAhead < end) {
      __builtin_prefetch(&arena_->entry(words[from.head_word + kPrefetchAhead]), 1);
    }
    const EntryId id = words[from.head_word];
    const std::uint32_t position = from.head * kBlockWords + from.head_word;
    ++from.head_word;
    Entry& entry = arena_->entry(id);
    if (entry.place == place && entry.position == position) {
      entry.place = kHeld;
      return id;
    }
  }
  return kNoEntry;
}

void EntryQueues::MakeRoom() {
  if (swept_queue_ == kNoSweep) {
    if (free_blocks_ > segments_.size() * kSegmentBlocks / (sweep_step_ + 1)) return;
    BeginSweepOf(0);
  }
  SweepBlocks(sweep_step_);
  if (free_block_ == kNoBlock) Sweep();  // Where there are more queues than blocks for rows.
}

void EntryQueues::Sweep() {
  if (swept_queue_ != kNoSweep) JoinKept();
  BeginSweepOf(0);
  SweepBlocks(~std::uint64_t{0});
}

void EntryQueues::BeginSweepOf(int queue) {
  swept_queue_ = queue;
  sweep_end_ = queues_[static_cast<std::size_t>(queue)].tail;
}

void EntryQueues::SweepBlocks(std::uint64_t blocks) {
  while (swept_queue_ != kNoSweep) {
    if (sweep_end_ == kNoBlock) {
      JoinKept();
      const int next = swept_queue_ + 1;
      if (next == queue_count_) {
        swept_queue_ = kNoSweep;
      } else {
        BeginSweepOf(next);
      }
      continue;
    }
    if (blocks-- == 0) return;
    SweepHead(&queues_[static_cast<std::size_t>(swept_queue_)]);
    ++swept_blocks_;
  }
}

void EntryQueues::SweepHead(Queue* rest) {
  const std::uint32_t number = rest->head, begin = rest->head_word;
  const bool last = number == rest->tail;
  const std::uint32_t end = last ? rest->tail_word : kBlockWords;
  // What is kept may be written to where it lay.
  std::array<std::uint32_t, kBlockWords> words;
  std::memcpy(words.data(), block(number), sizeof words);
  rest->head = last ? kNoBlock : words[0];
  rest->head_word = 1;
  if (last) rest->tail = kNoBlock;
  // The entries of the next block come from memory while this one's are looked at.
  if (!last) {
    const std::uint32_t next_end = rest->head == rest->tail ? rest->tail_word : kBlockWords;
    for (std::uint32_t i = 1; i < next_end; ++i) {
      __builtin_prefetch(&arena_->entry(block(rest->head)[i]), 1);
    }
  }
  FreeBlock(number);
  const auto place = static_cast<std::uint8_t>(kFirstQueue + swept_queue_);
  for (std::uint32_t i = begin; i < end; ++i) {
    const Entry& entry = arena_->entry(words[i]);
    if (entry.place == place && entry.position == number * kBlockWords + i) {
      Append(&kept_, place, words[i]);
    }
  }
}

void EntryQueues::JoinKept() {
  Queue& rest = queues_[static_cast<std::size_t>(swept_queue_)];
  const Queue kept = std::exchange(kept_, Queue());
  if (kept.head == kNoBlock) return;
  if (rest.head == kNoBlock) {
    rest = kept;
    return;
  }
  // What its last block has no references for refers to the last entry once more, and is dead: its
  // entry says that it lies elsewhere.
  std::uint32_t* const words = block(kept.tail);
  std::fill(words + kept.tail_word, words + kBlockWords, words[kept.tail_word - 1]);
  words[0] = rest.head;
  rest.head = kept.head;
  rest.head_word = kept.head_word;
}

}  // namespace terrace
