// WriteBack: dirty rows on their way to the stores. Rows are copied into buffers of fixed size, hot
// ones and the others into buffers of their own if that is asked for; a full buffer is written, in
// the order in which its rows will be asked for as far as the future is known, by
// two threads, of which one brings the next buffer to the disk while the other has the stores take
// the last one in; or by whoever needs the room. Until its write has succeeded a row is found here,
// in its newest version. A row's versions are written in the order of appending; a failed write
// stays first in the queue and nothing is written until Flush() tries again. Threads: internally
// synchronised; Append from one thread at a time. Borrows the stores.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/base/thread.h"
#include "terrace/cache/entry_map.h"
#include "terrace/cache/future_keys.h"
#include "terrace/cache/shard_order.h"
#include "terrace/store/store.h"

namespace terrace {

struct WriteBackOptions {
  std::uint32_t row_bytes = 0;
  std::uint32_t buffer_rows = 0;  // Leave together; at most 2^24.
  bool background = true;         // Three buffers and two threads; false: one, and none.
  Clock* clock = Clock::Real();
  bool hot_apart = false;  // Hot rows and the others have writes of their own; one buffer more.
  const FutureKeys* future = nullptr;  // Borrowed; null: nobody looks ahead.
  bool in_order = false;               // A flush comes in the order of the keys' hashes.
  ShardRange shards = {};              // That the stores are.
};

// Where the time of the thread that brings buffers to the disk went; CPU seconds count the threads
// beside it too.
struct WriteBackTimes {
  double busy_seconds = 0, waited_for_input_seconds = 0, cpu_seconds = 0;
};

// What the cache knows of a row that it writes.
struct WrittenRow {
  bool stored = false;  // Its store has the key, or will by what was appended before; else not.
  bool hot = false;     // See EvictionPolicy.
  // False: nothing is known of when it will be asked for, so that it need not be looked up.
  bool may_come = true;
};

class WriteBack {
 public:
  // One of a kind is filled, one goes to the disk, one into the index.
  static std::uint64_t BufferCount(bool background, bool hot_apart) {
    return (background ? 3 : 1) + (hot_apart ? 1 : 0);
  }
  static std::uint64_t BytesFor(const WriteBackOptions& options);
  // kOutOfMemory.
  static Result<std::unique_ptr<WriteBack>> Create(const WriteBackOptions& options,
                                                   std::vector<Store*> stores);
  ~WriteBack();  // After Stop().
  // Returns after the writes in flight; what is not written by then is lost, but still found here.
  void Stop() TERRACE_EXCLUDES(mu_);

  // Takes rows in. While one lives, nobody else gets at the buffers: another thread's Flush() or
  // MakeRoom() would submit a part-filled one under the appender's feet. Its owner waits
  // for no room and no disk meanwhile.
  class TERRACE_THREAD_ANNOTATION(scoped_lockable) AppendScope {
   public:
    explicit AppendScope(WriteBack* write_back) TERRACE_ACQUIRE(write_back->mu_)
        : write_back_(write_back) {
      write_back->mu_.Lock();
    }
    ~AppendScope() TERRACE_RELEASE() { write_back_->mu_.Unlock(); }
    AppendScope(const AppendScope&) = delete;
    AppendScope& operator=(const AppendScope&) = delete;
    // Rows that can be appended now, whichever of them are hot.
    std::size_t room() const TERRACE_NO_THREAD_SAFETY_ANALYSIS { return write_back_->Room(); }
    // What the next Append of the key will touch.
    [[gnu::always_inline]] void Prefetch(Key key) const TERRACE_NO_THREAD_SAFETY_ANALYSIS {
      write_back_->map_.Prefetch(write_back_->PlaceHash(key));
    }
    // Copies a row; replaces an older version that is not yet being written, and is then written in
    // its place. REQUIRES: room.
    void Append(Key key, const std::byte* row,
                const WrittenRow& what) TERRACE_NO_THREAD_SAFETY_ANALYSIS {
      write_back_->Append(key, row, what);
    }

   private:
    WriteBack* const write_back_;
  };

  // Waits until `rows` (at most buffer_rows) can be appended; without a thread it writes.
  // cancellable: Cancel() ends it with its cause. Fails with the failure of a write.
  Status MakeRoom(std::size_t rows, bool cancellable) TERRACE_EXCLUDES(mu_);
  // Writes all that is appended, here, when there is no thread; otherwise does nothing.
  Status WriteNow() TERRACE_EXCLUDES(mu_);
  // Writes all that was appended before the call and waits for it; a failed write is tried again.
  Status Flush() TERRACE_EXCLUDES(mu_);

  // Copies the rows of those `keys` that are here and sets found[i]; leaves the others' alone.
  // Returns how many.
  std::size_t Copy(std::span<const Key> keys, std::span<std::byte* const> rows,
                   std::span<std::uint8_t> found) const TERRACE_EXCLUDES(mu_);

  // Sets found[i] for those keys whose rows are here; leaves the others' alone.
  void Find(std::span<const Key> keys, std::span<std::uint8_t> found) const TERRACE_EXCLUDES(mu_);

  void Cancel(const Status& cause) TERRACE_EXCLUDES(mu_);
  // The failure of a write, until Flush() has overcome it. Waits for nobody while there is none.
  Status status() const TERRACE_EXCLUDES(mu_);
  std::uint64_t unwritten_rows() const TERRACE_EXCLUDES(mu_);
  std::uint64_t unstored_rows() const TERRACE_EXCLUDES(mu_);  // Of them, that no store has.
  std::uint64_t written_rows() const TERRACE_EXCLUDES(mu_);
  // Of its threads; without them, of whoever writes.
  WriteBackTimes times() const TERRACE_EXCLUDES(mu_);
  std::uint64_t bytes() const { return bytes_; }
  std::uint32_t buffer_rows() const { return options_.buffer_rows; }
  std::uint64_t most_rows() const {  // Unwritten ones.
    return BufferCount(options_.background, options_.hot_apart) * options_.buffer_rows;
  }
  bool hot_apart() const { return options_.hot_apart; }

 private:
  // Kinds of rows: hot ones, if they are apart, and the others.
  static constexpr std::size_t kOthers = 0, kHot = 1, kKinds = 2;

  struct Buffer {
    HugeBuffer rows;
    std::vector<Key> keys;
    std::vector<std::uint8_t> stored;    // (keys) kStoredKey or kNewKey: of its store.
    std::vector<std::uint8_t> may_come;  // (keys) 1 or 0; empty without a future.
    std::uint64_t unstored = 0;          // Of them kNewKey, when they were appended.
    std::uint64_t sequence = 0;          // Of its submission, from 1.
    // Of the write: the rows by shard, and what the stores have written of them.
    std::vector<Key> shard_keys;
    std::vector<const std::byte*> shard_rows;
    std::vector<std::uint8_t> shard_stored;
    ShardOrder shard_order;
    std::vector<std::unique_ptr<StagedRows>> staged;  // (shards) Null: no rows.

    void Clear() {
      keys.clear();
      stored.clear();
      may_come.clear();
      unstored = 0;
    }
  };

  WriteBack(const WriteBackOptions& options, std::vector<Store*> stores);
  // For map_. Sets and what is evicted of them come in the order of MixKey, spread over all hashes:
  // their lines then lie side by side. Of a flush in that order a buffer's hashes are close
  // together, and their lines must not be.
  std::uint64_t PlaceHash(Key key) const {
    return options_.in_order ? SpreadHash(MixKey(key)) : MixKey(key);
  }
  Status Allocate() TERRACE_EXCLUDES(mu_);
  std::byte* RowIn(const Buffer& buffer, std::size_t index) const {
    return buffer.rows.data() + index * stride_;
  }
  std::uint32_t FindPlace(Key key) const TERRACE_REQUIRES(mu_);
  std::size_t Room() const TERRACE_REQUIRES(mu_);
  void Append(Key key, const std::byte* row, const WrittenRow& what) TERRACE_REQUIRES(mu_);
  // Rows in the buffer that is being filled with rows of a kind, and how many more it takes; 0 both
  // without one.
  std::size_t Filled(std::size_t kind) const TERRACE_REQUIRES(mu_);
  std::size_t Rest(std::size_t kind) const TERRACE_REQUIRES(mu_);
  // Has what is being filled with rows of a kind, if anything, written.
  void Submit(std::size_t kind) TERRACE_REQUIRES(mu_);
  // Both kinds, as one write where one buffer takes them: two would be small files.
  void SubmitAll() TERRACE_REQUIRES(mu_);
  // Brings the rows that are being filled in of a kind to those of the other.
  void Join(std::size_t kind) TERRACE_REQUIRES(mu_);
  // Writes the oldest submitted buffer, mu_ released meanwhile. REQUIRES: there is one, no failure,
  // nobody writes, and there are no threads.
  void WriteOldest() TERRACE_REQUIRES(mu_);
  // Writes or waits until `sequence` is written. Returns the failure or the cancellation.
  Status WaitForSequence(std::uint64_t sequence, bool cancellable) TERRACE_REQUIRES(mu_);
  // Brings the rows of each shard into the order in which they will be asked for.
  void SortByNextUse(Buffer* buffer);
  // The halves of a write. A buffer that failed has nothing staged.
  Status StageRows(Buffer* buffer) TERRACE_EXCLUDES(mu_);
  Status PublishRows(Buffer* buffer) TERRACE_EXCLUDES(mu_);
  // The oldest buffer is in the stores.
  void EndWrite() TERRACE_REQUIRES(mu_);
  void Fail(Status failure) TERRACE_REQUIRES(mu_);
  void StageLoop() TERRACE_EXCLUDES(mu_);
  void PublishLoop() TERRACE_EXCLUDES(mu_);

  const WriteBackOptions options_;
  const std::uint64_t stride_;
  const std::vector<Store*> stores_;
  std::uint64_t bytes_ = 0;      // Set once.
  std::vector<Buffer> buffers_;  // Which of them a thread may touch, the numbers below say.

  mutable Mutex mu_;
  CondVar work_;     // For StageLoop: a buffer was submitted, a failure cleared, stop.
  CondVar staging_;  // For PublishLoop: a buffer was staged, stop.
  CondVar written_;  // A write has ended; cancelled.
  EntryMap map_ TERRACE_GUARDED_BY(mu_);  // Place of the newest version: buffer * 2^24 + index.
  std::deque<std::uint32_t> queue_ TERRACE_GUARDED_BY(mu_);  // Submitted, the oldest first.
  std::size_t staged_ TERRACE_GUARDED_BY(mu_) = 0;           // So many of them, from the oldest on.
  std::uint64_t failed_publishes_ TERRACE_GUARDED_BY(mu_) = 0;
  bool dropping_ TERRACE_GUARDED_BY(mu_) = false;  // What was staged behind one of these.
  std::vector<std::uint32_t> idle_ TERRACE_GUARDED_BY(mu_);
  std::array<std::int64_t, kKinds> filling_ TERRACE_GUARDED_BY(mu_) = {-1, -1};  // -1: none.
  std::uint64_t submitted_ TERRACE_GUARDED_BY(mu_) = 0;  // Sequence numbers.
  std::uint64_t written_sequence_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t unwritten_rows_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t written_rows_ TERRACE_GUARDED_BY(mu_) = 0;
  WriteBackTimes times_ TERRACE_GUARDED_BY(mu_);  // CPU of whoever writes without threads.
  bool writing_ TERRACE_GUARDED_BY(mu_) = false;  // Without threads.
  bool stop_ TERRACE_GUARDED_BY(mu_) = false;
  Status failure_ TERRACE_GUARDED_BY(mu_);
  std::atomic<bool> failed_ = false;  // Whether there is one.
  Status cancelled_ TERRACE_GUARDED_BY(mu_);
  // Whoever stages uses these.
  std::unique_ptr<WorkerGroup> shard_writers_;
  std::vector<std::uint64_t> next_uses_, sort_spare_;  // Ticks above the row's number.
  Thread stage_thread_;
  Thread publish_thread_;
};

}  // namespace terrace
