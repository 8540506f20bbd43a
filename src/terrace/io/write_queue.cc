#include "terrace/io/write_queue.h"

#include <utility>

#include "terrace/base/check.h"

namespace terrace {

WriteQueue::WriteQueue(const std::string& thread_name)
    : thread_(thread_name, ThreadPriority::kNormal, [this] { Loop(); }) {}

WriteQueue::~WriteQueue() {
  {
    MutexLock lock(&mu_);
    TERRACE_CHECK(queue_.empty() && !writing_);
    stop_ = true;
    work_.NotifyOne();
  }
  thread_.Join();
}

void WriteQueue::Start(WriteRequest* request) {
  TERRACE_CHECK(!request->started);
  request->started = true;
  MutexLock lock(&mu_);
  request->done = false;
  request->status = OkStatus();
  queue_.push_back(request);
  work_.NotifyOne();
}

Status WriteQueue::Wait(WriteRequest* request) {
  TERRACE_CHECK(request->started);
  MutexLock lock(&mu_);
  while (!request->done) written_.Wait(&mu_);
  request->started = false;
  return request->status;
}

void WriteQueue::Loop() {
  MutexLock lock(&mu_);
  while (true) {
    while (!stop_ && queue_.empty()) work_.Wait(&mu_);
    if (queue_.empty()) return;
    WriteRequest* request = queue_.front();
    queue_.pop_front();
    writing_ = true;
    mu_.Unlock();
    Status status = request->file->WriteAt(request->offset, request->data);
    mu_.Lock();
    writing_ = false;
    request->status = std::move(status);
    request->done = true;
    written_.NotifyAll();
  }
}

}  // namespace terrace
