// EntryQueues: first-in-first-out queues of entries over one pool of blocks. An entry is in one
// queue at most; it leaves from the middle by changing Entry::place, and its old reference is
// skipped later. So a visit costs no neighbour's cache line, and what is taken next is known ahead
// and prefetched. Memory is bounded: when blocks get few, dead references are swept out, a few
// blocks with each that is taken, so that nobody waits for all of them. Threads: guarded by its
// owner. Borrows the arena.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/cache/row_arena.h"

namespace terrace {

class EntryQueues {
 public:
  static constexpr int kMaxQueues = 200;

  // dead_eighths: dead references for every eight rows, at least 1: more for who has rows leave
  // from the middle often.
  EntryQueues(RowArena* arena, int queues, int dead_eighths);
  // Memory for `rows` entries at a time.
  std::uint64_t BytesFor(std::uint64_t rows) const;
  // Makes room for `rows` entries; smaller: gives memory back. REQUIRES: no more entries are in the
  // queues. kOutOfMemory: nothing changed.
  Status Reserve(std::uint64_t rows);
  std::uint64_t bytes() const { return segments_.size() * kSegmentBytes; }

  // Sets the entry's place (kFirstQueue + queue) and position. REQUIRES: it is in no queue.
  void Push(int queue, EntryId id);
  // The oldest entry that is still in the queue, now kHeld; kNoEntry when there is none.
  EntryId Pop(int queue);
  // Drops references to entries that left their queue, all at once. Afterwards only entries in a
  // queue are referred to, so that other chunks can be released.
  void Sweep();
  // Blocks that sweeps have looked through; how many one Push may.
  std::uint64_t swept_blocks() const { return swept_blocks_; }
  std::uint64_t most_swept_by_push() const { return sweep_step_; }

 private:
  static constexpr std::uint32_t kBlockWords = 64;  // The first names the next block.
  static constexpr std::uint32_t kSegmentBlocks = 64;
  static constexpr std::uint64_t kSegmentBytes =
      std::uint64_t{kSegmentBlocks} * kBlockWords * sizeof(std::uint32_t);
  static constexpr std::uint32_t kNoBlock = ~std::uint32_t{0};
  using Segment = std::array<std::uint32_t, kSegmentBlocks * kBlockWords>;

  struct Queue {
    std::uint32_t head = kNoBlock, tail = kNoBlock;
    std::uint32_t head_word = 1, tail_word = 1;  // Next to pop in head, next to push in tail.
  };

  std::uint64_t BlocksFor(std::uint64_t rows) const;
  std::uint32_t* block(std::uint32_t number) {
    return &(*segments_[number / kSegmentBlocks])[number % kSegmentBlocks * kBlockWords];
  }
  void FreeBlock(std::uint32_t number);
  void Append(Queue* queue, std::uint8_t place, EntryId id);
  EntryId PopFrom(Queue* queue, std::uint8_t place);
  // A block is about to be taken: goes on with the sweep, or begins one when few are free.
  void MakeRoom();
  void BeginSweepOf(int queue);  // And of those behind it.
  // Looks through so many blocks, fewer when the sweep ends.
  void SweepBlocks(std::uint64_t blocks);
  void SweepHead(Queue* rest);
  // Puts what is kept of the queue that is swept before what is left of it.
  void JoinKept();
  void PrefetchHead(const Queue& queue);
  void AddSegment(std::unique_ptr<Segment> segment);

  RowArena* const arena_;
  const int queue_count_;
  const std::uint64_t dead_eighths_;
  const std::uint64_t sweep_step_;  // Blocks looked through for each that is taken.
  std::array<Queue, kMaxQueues> queues_;
  // The sweep goes through one queue after another. What it keeps of one is the queue's front, what
  // queues_ has of it the rest, which is swept up to what was the last block when its turn came.
  static constexpr int kNoSweep = -1;
  int swept_queue_ = kNoSweep;
  Queue kept_;                          // Empty, or rest's first block is a whole one.
  std::uint32_t sweep_end_ = kNoBlock;  // That last block; kNoBlock when it is gone.
  std::uint64_t swept_blocks_ = 0;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::uint32_t free_block_ = kNoBlock;  // List through the first words.
  std::uint64_t free_blocks_ = 0;
  std::uint32_t block_limit_ = ~std::uint32_t{0};  // Blocks from here on are not used again.
};

}  // namespace terrace
