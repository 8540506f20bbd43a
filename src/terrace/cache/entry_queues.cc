#include "terrace/cache/entry_queues.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace terrace {
namespace {
constexpr std::uint32_t kPrefetchAhead = 8;  // References; a cache line of memory takes as long.
}  // namespace

EntryQueues::EntryQueues(RowArena* arena, int queues, int dead_eighths)
    : arena_(arena), queue_count_(queues), dead_eighths_(static_cast<std::uint64_t>(dead_eighths)) {
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
  if (number >= block_limit_) return;
  block(number)[0] = free_block_;
  free_block_ = number;
}

void EntryQueues::Append(Queue* queue, std::uint8_t place, EntryId id) {
  if (queue->tail == kNoBlock || queue->tail_word == kBlockWords) {
    const std::uint32_t fresh = free_block_;
    TERRACE_CHECK(fresh != kNoBlock);
    free_block_ = block(fresh)[0];
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
  if (free_block_ == kNoBlock && (to.tail == kNoBlock || to.tail_word == kBlockWords)) Sweep();
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
  Queue& from = queues_[static_cast<std::size_t>(queue)];
  const auto place = static_cast<std::uint8_t>(kFirstQueue + queue);
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

void EntryQueues::KeepLive(Queue* kept, std::uint8_t place, const Block& block) {
  for (std::uint32_t i = block.begin; i < block.end; ++i) {
    const Entry& entry = arena_->entry(block.words[i]);
    if (entry.place == place && entry.position == block.number * kBlockWords + i) {
      Append(kept, place, block.words[i]);
    }
  }
}

void EntryQueues::Sweep() {
  for (int queue = 0; queue < queue_count_; ++queue) {
    Queue& kept = queues_[static_cast<std::size_t>(queue)];
    const Queue old = std::exchange(kept, Queue());
    const auto place = static_cast<std::uint8_t>(kFirstQueue + queue);
    // While the entries of one block come from memory, those of the block before are looked at.
    std::array<Block, 2> blocks;
    int current = 0;
    for (std::uint32_t number = old.head; number != kNoBlock; current ^= 1) {
      Block& next = blocks[static_cast<std::size_t>(current)];
      const bool last = number == old.tail;
      next.number = number;
      next.begin = number == old.head ? old.head_word : 1;
      next.end = last ? old.tail_word : kBlockWords;
      std::memcpy(next.words.data(), block(number), sizeof next.words);
      for (std::uint32_t i = next.begin; i < next.end; ++i) {
        __builtin_prefetch(&arena_->entry(next.words[i]), 1);
      }
      // Free at once: what is kept of it fits into it.
      FreeBlock(number);
      KeepLive(&kept, place, blocks[static_cast<std::size_t>(current ^ 1)]);
      number = last ? kNoBlock : next.words[0];
    }
    KeepLive(&kept, place, blocks[static_cast<std::size_t>(current ^ 1)]);
  }
}

}  // namespace terrace
