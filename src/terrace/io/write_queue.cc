#include "terrace/io/write_queue.h"

#include <algorithm>
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

WriteRing::WriteRing(std::span<std::byte> buffer, std::uint64_t grain, WriteQueue* queue)
    : queue_(queue) {
  TERRACE_CHECK(buffer.size() >= grain);
  const std::uint64_t grains = buffer.size() / grain;
  parts_.resize(queue == nullptr ? 1 : std::min(kParts, grains));
  const std::uint64_t part_bytes = grains / parts_.size() * grain;
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    parts_[p].buffer = buffer.subspan(p * part_bytes, part_bytes);
  }
}

WriteRing::~WriteRing() {
  // A failure here is one of a file that its owner gives up.
  (void)Await();
}

Status WriteRing::Write(File* file, std::uint64_t offset, std::uint64_t bytes) {
  TERRACE_RETURN_IF_ERROR(failure_);
  const std::span<const std::byte> data = part().first(bytes);
  if (queue_ == nullptr) return failure_ = file->WriteAt(offset, data);
  WriteRequest& write = parts_[part_].write;
  write.file = file;
  write.offset = offset;
  write.data = data;
  queue_->Start(&write);
  part_ = (part_ + 1) % parts_.size();
  // The oldest write: by the ring, those of all other parts came after it.
  if (parts_[part_].write.started) failure_ = queue_->Wait(&parts_[part_].write);
  return failure_;
}

Status WriteRing::Await() {
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    WriteRequest& write = parts_[(part_ + p) % parts_.size()].write;
    if (!write.started) continue;
    Status status = queue_->Wait(&write);
    if (failure_.ok()) failure_ = std::move(status);
  }
  return failure_;
}

}  // namespace terrace
