// WriteQueue: a thread that writes while its callers fill the next part of a buffer, which a
// WriteRing has. Every write goes through File::WriteAt, so each file system sees it. A thread and
// not io_uring: the kernel takes a direct write that grows its file on a thread of its own anyway.
// Threads: any; a file's writes come from one caller. Borrows files and bytes until Wait has
// returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/base/thread.h"
#include "terrace/io/file_system.h"

namespace terrace {

// One write. From Start to Wait it and its bytes are the queue's.
struct WriteRequest {
  File* file = nullptr;
  std::uint64_t offset = 0;
  std::span<const std::byte> data;
  bool started = false;  // And not waited for; its caller's.
  // Guarded by the queue's mutex.
  bool done = false;
  Status status;
};

class WriteQueue {
 public:
  explicit WriteQueue(const std::string& thread_name);
  ~WriteQueue();  // REQUIRES: all that was started has been waited for.
  WriteQueue(const WriteQueue&) = delete;
  WriteQueue& operator=(const WriteQueue&) = delete;

  // Writes go to the disk one after another, in the order of Start. How many wait, callers bound by
  // the buffers that they have. REQUIRES: not started.
  void Start(WriteRequest* request) TERRACE_EXCLUDES(mu_);
  // Blocks: until the write has ended. Its status. REQUIRES: started.
  Status Wait(WriteRequest* request) TERRACE_EXCLUDES(mu_);

 private:
  void Loop() TERRACE_EXCLUDES(mu_);

  Mutex mu_;
  CondVar work_;     // A write was started; stop.
  CondVar written_;  // One has ended.
  std::deque<WriteRequest*> queue_ TERRACE_GUARDED_BY(mu_);
  bool writing_ TERRACE_GUARDED_BY(mu_) = false;
  bool stop_ TERRACE_GUARDED_BY(mu_) = false;
  Thread thread_;
};

// A buffer in parts, of which one is filled while the disk takes the others; files may follow one
// another without a pause. Threads: one thread's.
class WriteRing {
 public:
  // `buffer`: borrowed; of `grain` bytes or more, of which parts are multiples. `queue`: null:
  // Write does it itself, and the buffer is one part.
  WriteRing(std::span<std::byte> buffer, std::uint64_t grain, WriteQueue* queue);
  ~WriteRing();  // Waits for what is being written.
  WriteRing(const WriteRing&) = delete;
  WriteRing& operator=(const WriteRing&) = delete;

  // Nothing of it is being written.
  std::span<std::byte> part() const { return parts_[part_].buffer; }
  // Writes the first `bytes` of part() and makes another one part(). Blocks: until that is free.
  // The first failure of a write since the construction, after which nothing more is written. The
  // file is borrowed until Await has returned.
  Status Write(File* file, std::uint64_t offset, std::uint64_t bytes);
  // Blocks: until all is written. The first failure.
  Status Await();

 private:
  // With a queue: small ones keep the wait for the last of them short.
  static constexpr std::uint64_t kParts = 4;
  struct Part {
    std::span<std::byte> buffer;
    WriteRequest write;
  };

  WriteQueue* const queue_;
  std::vector<Part> parts_;
  std::size_t part_ = 0;  // The one that is filled.
  Status failure_;
};

}  // namespace terrace
