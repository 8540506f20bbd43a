#include <fmt/format.h>
#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/io/posix_file.h"
#include "terrace/io/read_queue.h"

namespace terrace {
namespace {

class UringReadQueue final : public ReadQueue {
 public:
  explicit UringReadQueue(int depth) : depth_(static_cast<std::size_t>(depth)) {}
  ~UringReadQueue() override {
    if (open_) io_uring_queue_exit(&ring_);
  }

  // A negative errno when the kernel refuses.
  int Open() {
    int result = io_uring_queue_init(static_cast<unsigned>(depth_), &ring_, 0);
    open_ = result == 0;
    return result;
  }

  Status Run(std::span<ReadRequest> requests) override;
  std::string_view name() const override { return "io_uring"; }

 private:
  void Prepare(ReadRequest* request);
  bool SubmitAndWait();
  void Reap();
  void Abandon(int error);

  const std::size_t depth_;
  bool open_ = false;
  io_uring ring_;
  std::vector<ReadRequest*> again_;   // Short or interrupted; bytes_read says where they go on.
  std::vector<ReadRequest*> staged_;  // In the submission ring, not yet taken by the kernel.
  std::size_t in_flight_ = 0;         // Taken by the kernel, not yet reaped.
};

void UringReadQueue::Prepare(ReadRequest* request) {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  TERRACE_CHECK(sqe != nullptr);  // At most depth_ requests are between Prepare and Reap.
  std::size_t done = request->bytes_read;
  std::size_t want = std::min(request->buffer.size() - done, kMaxBytesPerCall);
  io_uring_prep_read(sqe, static_cast<PosixFile*>(request->file)->fd(),
                     request->buffer.data() + done, static_cast<unsigned>(want),
                     request->offset + done);
  io_uring_sqe_set_data(sqe, request);
  staged_.push_back(request);
}

// False: the ring takes no more.
bool UringReadQueue::SubmitAndWait() {
  constexpr int kMaxRefusals = 100;  // With nothing in flight, so that nothing can give way.
  for (int refusals = 0; refusals < kMaxRefusals;) {
    int result = io_uring_submit_and_wait(&ring_, 1);
    if (result >= 0) {
      std::size_t taken = std::min(static_cast<std::size_t>(result), staged_.size());
      staged_.erase(staged_.begin(), staged_.begin() + static_cast<std::ptrdiff_t>(taken));
      in_flight_ += taken;
      if (in_flight_ > 0 || staged_.empty()) return true;
      ++refusals;
      continue;
    }
    if (result == -EINTR) continue;
    if (result != -EAGAIN && result != -EBUSY) {
      Abandon(-result);
      return false;
    }
    if (in_flight_ > 0) {
      io_uring_cqe* cqe;
      if (int wait = io_uring_wait_cqe(&ring_, &cqe); wait == 0 || wait == -EINTR) return true;
    }
    ++refusals;
  }
  Abandon(EBUSY);
  return false;
}

void UringReadQueue::Reap() {
  io_uring_cqe* cqe;
  while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
    auto* request = static_cast<ReadRequest*>(io_uring_cqe_get_data(cqe));
    std::int64_t result = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    --in_flight_;
    ReadStep step =
        static_cast<PosixFile*>(request->file)
            ->AfterRead(request->offset, request->buffer.size(), request->bytes_read, result);
    request->bytes_read = step.bytes_read;
    request->status = std::move(step.status);
    if (!step.done) again_.push_back(request);
  }
}

// The kernel still writes into the buffers of what it took, so those are awaited; the rest is read
// by plain calls, and so are all later requests.
void UringReadQueue::Abandon(int error) {
  LogText(LogLevel::kWarning,
          fmt::format("io_uring stopped taking reads ({}); reading by plain calls from here on, "
                      "which is slower",
                      std::strerror(error)));
  while (in_flight_ > 0) {
    io_uring_cqe* cqe;
    int wait = io_uring_wait_cqe(&ring_, &cqe);
    TERRACE_CHECK(wait == 0 || wait == -EINTR || wait == -EAGAIN);
    Reap();
  }
  again_.insert(again_.end(), staged_.begin(), staged_.end());
  staged_.clear();
  io_uring_queue_exit(&ring_);
  open_ = false;
}

Status UringReadQueue::Run(std::span<ReadRequest> requests) {
  std::size_t next = 0;
  while (open_ &&
         (next < requests.size() || !again_.empty() || !staged_.empty() || in_flight_ > 0)) {
    while (in_flight_ + staged_.size() < depth_) {
      if (!again_.empty()) {
        ReadRequest* request = again_.back();
        again_.pop_back();
        Prepare(request);
        continue;
      }
      if (next == requests.size()) break;
      ReadRequest* request = &requests[next++];
      auto* file = dynamic_cast<PosixFile*>(request->file);
      if (file == nullptr || request->buffer.empty()) {
        RunOne(request);  // A wrapped file has no descriptor that may be read past it.
        continue;
      }
      if (file->aligned()) {
        CheckDirectAlignment(request->offset, request->buffer.data(), request->buffer.size());
      }
      request->bytes_read = 0;
      request->status = OkStatus();
      Prepare(request);
    }
    if (in_flight_ + staged_.size() == 0) break;
    if (!SubmitAndWait()) break;
    Reap();
  }
  for (ReadRequest* request : again_) RunOne(request);
  again_.clear();
  for (; next < requests.size(); ++next) RunOne(&requests[next]);
  return FirstError(requests);
}

}  // namespace

Result<std::unique_ptr<ReadQueue>> NewUringReadQueue(int depth) {
  auto queue = std::make_unique<UringReadQueue>(depth);
  if (int result = queue->Open(); result != 0) {
    return UnavailableError(fmt::format(
        "io_uring cannot be used here ({}): the kernel lacks or forbids it, or locked memory is "
        "limited (ulimit -l); use auto or threads",
        std::strerror(-result)));
  }
  return std::unique_ptr<ReadQueue>(std::move(queue));
}

}  // namespace terrace
