// WorkItem: one working set on its way through the stages. Each stage fills its part and hands the
// whole on; what it owns (pins, memory) is given back when the item goes. Threads: a value that one
// stage owns at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/mutex.h"
#include "terrace/base/raw_vector.h"
#include "terrace/base/status.h"
#include "terrace/cache/row_cache.h"
#include "terrace/data/batch.h"

namespace terrace {

// Bytes of a working set.
inline constexpr std::uint64_t kWorkingRowBytes = 41;  // Key, pin, place, and its load's lists.
inline constexpr std::uint64_t kLocalRowBytes = 16;    // Row, inverse, place.
// Of a mini-batch in each table: where its part of each list ends, in five of them.
inline constexpr std::uint64_t kMinibatchBytes = 20;
// Of an occurrence of a key that is in no other place.
inline constexpr std::uint64_t kMostOccurrenceBytes = kWorkingRowBytes + kLocalRowBytes + 16;

// The working row of a local row whose key is not admitted (Admission): it reads as zeros.
inline constexpr std::uint32_t kNoWorkingRow = ~std::uint32_t{0};

// What a working set says of one table. Rows are numbered twice: by working row w over the whole
// set, and by local row r within a mini-batch, so that a key is hashed once and training touches
// small dense arrays.
struct TableWork {
  RawVector<Key> keys;                   // (working rows) distinct, by first occurrence
  std::vector<std::uint32_t> key_end;    // (minibatches) working rows of mini-batches [0, m]
  std::vector<std::uint32_t> row_begin;  // (minibatches + 1) local rows of mini-batch m are
  RawVector<std::uint32_t> rows;  //   rows[row_begin[m] .. row_begin[m + 1]): their working rows
  RawVector<std::uint32_t>
      inverse_begin;  // (local rows + minibatches) of mini-batch m from row_begin[m] + m on:
                      //   local row r's occurrences, relative to occurrence_begin[m]
  std::vector<std::uint32_t> occurrence_begin;  // (minibatches + 1) into the three below
  RawVector<std::uint32_t> example;             // (occurrences) within the mini-batch
  RawVector<std::uint32_t> input_offset;  // (occurrences) column of the slot in the network's input
  RawVector<float> value;                 // (occurrences), or empty: all 1

  // Where admission counts: the local rows that were not admitted, in the order of `rows`.
  std::vector<Key> unadmitted;
  std::vector<std::uint32_t> unadmitted_shows;  // Examples of the mini-batch that hold the key.
  std::vector<std::uint32_t> unadmitted_end;    // (minibatches) of mini-batches [0, m]

  // By stage 2.
  PinnedRows pinned;
  // By stage 3: where each local row of each mini-batch lies, on the device that trains it; null:
  // it has no working row. Laid out like `rows`.
  RawVector<std::byte*> places;
  // By stage 4: working rows [0, marked) are marked dirty. 0 again once the cache was flushed.
  std::uint32_t marked = 0;

  std::uint64_t MemoryBytes() const;
};

// How many working sets may be alive at a time. Threads: any.
class SetLimiter {
 public:
  // The right to one working set, given back when it goes.
  class Token {
   public:
    Token() = default;
    explicit Token(SetLimiter* limiter) : limiter_(limiter) {}
    Token(Token&& other) noexcept : limiter_(std::exchange(other.limiter_, nullptr)) {}
    Token& operator=(Token&& other) noexcept {
      if (this != &other) {
        GiveBack();
        limiter_ = std::exchange(other.limiter_, nullptr);
      }
      return *this;
    }
    ~Token() { GiveBack(); }
    void GiveBack() {
      if (limiter_ != nullptr) std::exchange(limiter_, nullptr)->Release();
    }

   private:
    SetLimiter* limiter_ = nullptr;
  };

  explicit SetLimiter(std::uint32_t limit) : limit_(limit) {}
  // Blocks: until fewer than the limit are alive. After Cancel: its cause.
  Result<Token> Take() TERRACE_EXCLUDES(mu_);
  std::uint32_t alive() const TERRACE_EXCLUDES(mu_);
  // Blocks: until fewer than `many` are alive. Returns how many. After Cancel: its cause.
  Result<std::uint32_t> AwaitFewer(std::uint32_t many) TERRACE_EXCLUDES(mu_);
  void Cancel(const Status& cause) TERRACE_EXCLUDES(mu_);

 private:
  void Release() TERRACE_EXCLUDES(mu_);

  const std::uint32_t limit_;
  mutable Mutex mu_;
  CondVar released_;
  std::uint32_t alive_ TERRACE_GUARDED_BY(mu_) = 0;
  Status cancelled_ TERRACE_GUARDED_BY(mu_);
};

struct WorkItem {
  // Shared because a batch that does not fit in memory is cut into several items.
  std::shared_ptr<const Batch> batch;
  std::uint32_t minibatch_size = 0;  // Examples; only the last mini-batch of an epoch has fewer.
  // Examples [first_example, end_example) of the batch, a whole number of mini-batches.
  std::uint32_t first_example = 0;
  std::uint32_t end_example = 0;
  std::uint32_t first_minibatch =
      0;  // Of the batch: index of the first cursor that this item reaches.
  std::uint32_t minibatches = 0;
  bool last_of_batch = false;

  // (keys of the examples) local row, within its mini-batch and table, of each occurrence of
  // batch->keys from batch->key_begin[first_example * slots] on.
  RawVector<std::uint32_t> local_row;
  std::vector<TableWork> tables;
  SetLimiter::Token token;

  std::uint32_t MinibatchBegin(std::uint32_t m) const { return first_example + m * minibatch_size; }
  std::uint32_t MinibatchEnd(std::uint32_t m) const {
    const std::uint32_t end = MinibatchBegin(m) + minibatch_size;
    return end < end_example ? end : end_example;
  }
  std::uint64_t MemoryBytes() const;
  // What is filled now and what later stages add for it; memory that is only kept is not counted.
  std::uint64_t UsedBytes() const;

  // Gives back what it pins and its batch, and empties its lists but keeps their memory, for the
  // next working set: to take fresh pages from the system for each costs more than to fill them.
  void Clear();
};

}  // namespace terrace
