// WriteQueue: a thread that writes while its callers fill the next buffer. Every write goes through
// File::WriteAt, so each file system sees it. A thread and not io_uring: the kernel takes a direct
// write that grows its file on a thread of its own anyway. Threads: any; a file's writes come from
// one caller. Borrows files and bytes until Wait has returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>

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

}  // namespace terrace
