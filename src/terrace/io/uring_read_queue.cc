#include <fmt/format.h>
#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/io/posix_file.h"
#include "terrace/io/read_queue.h"

namespace terrace {
namespace {

// The thread that waits works off what is done, once as much is done as it waits for. Otherwise
// each read that ends interrupts it, and beside a training that fills the cores the disk waits.
constexpr unsigned kOneThread = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;

class UringReadQueue final : public ReadQueue {
 public:
  explicit UringReadQueue(int depth) : depth_(static_cast<unsigned>(depth)), slots_(depth_) {
    for (unsigned slot = depth_; slot > 0; --slot) free_.push_back(slot - 1);
  }
  ~UringReadQueue() override {
    AwaitInFlight();  // The kernel writes into the caller's buffers until then.
    if (open_) io_uring_queue_exit(&ring_);
  }

  // Reads into `buffer` need no look-up of its pages where the kernel allows. A negative errno when
  // it refuses the ring.
  int Open(std::span<std::byte> buffer);

  void Start(std::span<ReadRequest> requests) override;
  Status Wait() override;
  std::string_view name() const override { return open_ ? "io_uring" : "plain"; }

 private:
  struct Group {
    std::span<ReadRequest> requests;
    std::size_t next = 0;  // The first that has not been given to a slot.
    std::size_t unfinished = 0;
  };
  // One request on its way.
  struct Slot {
    ReadRequest* request = nullptr;
    Group* group = nullptr;
    bool direct = false;  // As its file was when the call began.
  };

  void Register();
  void Fill();
  void Prepare(unsigned slot);
  bool Submit(unsigned wait_for);
  int TakeOver();
  void Reap();
  void Finish(unsigned slot);
  void AwaitInFlight();
  void Abandon(int error);

  const unsigned depth_;
  bool open_ = false;
  io_uring ring_;
  std::span<std::byte> buffer_;      // To be registered.
  std::span<std::byte> registered_;  // Empty: the kernel refused.
  std::deque<Group> groups_;         // Started, not waited for; oldest first.
  std::vector<Slot> slots_;          // (depth_)
  std::vector<unsigned> free_;
  std::vector<unsigned> again_;   // Short or interrupted; bytes_read says where they go on.
  std::vector<unsigned> staged_;  // In the submission ring, not yet taken by the kernel.
  unsigned in_flight_ = 0;        // Taken by the kernel, not yet reaped.
};

int UringReadQueue::Open(std::span<std::byte> buffer) {
  buffer_ = buffer;
  int result = io_uring_queue_init(depth_, &ring_, kOneThread);
  // Before Linux 6.1.
  if (result == -EINVAL) result = io_uring_queue_init(depth_, &ring_, 0);
  open_ = result == 0;
  if (open_) Register();
  return result;
}

void UringReadQueue::Register() {
  registered_ = {};
  if (buffer_.empty()) return;
  const iovec memory = {buffer_.data(), buffer_.size()};
  const int result = io_uring_register_buffers(&ring_, &memory, 1);
  if (result == 0) {
    registered_ = buffer_;
    return;
  }
  LogText(LogLevel::kDebug, fmt::format("the kernel registers no read buffer of {} bytes ({})",
                                        buffer_.size(), std::strerror(-result)));
}

// A new ring, the calling thread's, with what was staged in the other thread's.
int UringReadQueue::TakeOver() {
  TERRACE_CHECK(in_flight_ == 0);  // A group is waited for where it was started.
  io_uring_queue_exit(&ring_);
  open_ = false;
  if (const int result = Open(buffer_); result != 0) return result;
  const std::vector<unsigned> staged = std::exchange(staged_, {});
  for (const unsigned slot : staged) Prepare(slot);
  return 0;
}

// Puts requests into the submission ring, in their order, until all slots are taken.
void UringReadQueue::Fill() {
  for (; !again_.empty(); again_.pop_back()) Prepare(again_.back());
  for (Group& group : groups_) {
    while (group.next < group.requests.size()) {
      if (free_.empty()) return;
      ReadRequest* request = &group.requests[group.next++];
      auto* file = dynamic_cast<PosixFile*>(request->file);
      if (file == nullptr || request->buffer.empty()) {
        RunOne(request);  // A wrapped file has no descriptor that may be read past it.
        --group.unfinished;
        continue;
      }
      if (file->aligned()) {
        CheckDirectAlignment(request->offset, request->buffer.data(), request->buffer.size(),
                             file->read_alignment());
      }
      request->bytes_read = 0;
      request->status = OkStatus();
      const unsigned slot = free_.back();
      free_.pop_back();
      slots_[slot] = {request, &group, false};
      Prepare(slot);
    }
  }
}

void UringReadQueue::Prepare(unsigned slot) {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  TERRACE_CHECK(sqe != nullptr);  // The ring has an entry for each slot.
  const ReadRequest& request = *slots_[slot].request;
  const std::size_t done = request.bytes_read;
  const std::size_t want = std::min(request.buffer.size() - done, kMaxBytesPerCall);
  std::byte* const to = request.buffer.data() + done;
  const auto* file = static_cast<PosixFile*>(request.file);
  const int fd = file->fd();
  slots_[slot].direct = file->direct();
  if (to >= registered_.data() && to + want <= registered_.data() + registered_.size()) {
    io_uring_prep_read_fixed(sqe, fd, to, static_cast<unsigned>(want), request.offset + done, 0);
  } else {
    io_uring_prep_read(sqe, fd, to, static_cast<unsigned>(want), request.offset + done);
  }
  sqe->user_data = slot;
  staged_.push_back(slot);
}

// Hands what is staged to the kernel and waits until `wait_for` of what it has are done. False: the
// ring takes no more.
bool UringReadQueue::Submit(unsigned wait_for) {
  constexpr int kMaxRefusals = 100;  // With nothing in flight, so that nothing can give way.
  for (int refusals = 0; refusals < kMaxRefusals;) {
    int result = io_uring_submit_and_wait(&ring_, wait_for);
    if (result >= 0) {
      const unsigned taken = std::min(static_cast<unsigned>(result),  //
                                      static_cast<unsigned>(staged_.size()));
      staged_.erase(staged_.begin(), staged_.begin() + taken);
      in_flight_ += taken;
      if (in_flight_ > 0 || staged_.empty()) return true;
      ++refusals;
      continue;
    }
    if (result == -EINTR) continue;
    const bool others = result == -EEXIST;  // The ring is another thread's.
    if (others && (result = TakeOver()) == 0) continue;
    if (others || (result != -EAGAIN && result != -EBUSY)) {
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
    const auto slot = static_cast<unsigned>(cqe->user_data);
    const std::int64_t result = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    --in_flight_;
    ReadRequest* request = slots_[slot].request;
    ReadStep step = static_cast<PosixFile*>(request->file)
                        ->AfterRead(request->offset, request->buffer.size(), request->bytes_read,
                                    slots_[slot].direct, result);
    request->bytes_read = step.bytes_read;
    request->status = std::move(step.status);
    if (step.done) {
      Finish(slot);
    } else {
      again_.push_back(slot);
    }
  }
}

void UringReadQueue::Finish(unsigned slot) {
  --slots_[slot].group->unfinished;
  slots_[slot] = {};
  free_.push_back(slot);
}

void UringReadQueue::AwaitInFlight() {
  while (in_flight_ > 0) {
    io_uring_cqe* cqe;
    int wait = io_uring_wait_cqe(&ring_, &cqe);
    TERRACE_CHECK(wait == 0 || wait == -EINTR || wait == -EAGAIN);
    Reap();
  }
}

// What the kernel took is awaited; the rest is read by plain calls, and so are all later requests.
void UringReadQueue::Abandon(int error) {
  LogText(LogLevel::kWarning,
          fmt::format("io_uring stopped taking reads ({}); reading by plain calls from here on, "
                      "which is slower",
                      std::strerror(error)));
  AwaitInFlight();
  again_.insert(again_.end(), staged_.begin(), staged_.end());
  staged_.clear();
  if (open_) io_uring_queue_exit(&ring_);
  open_ = false;
  for (; !again_.empty(); again_.pop_back()) {
    RunOne(slots_[again_.back()].request);
    Finish(again_.back());
  }
}

void UringReadQueue::Start(std::span<ReadRequest> requests) {
  groups_.push_back({requests, 0, requests.size()});
  if (!open_) return;
  Reap();
  Fill();
  if (!staged_.empty()) Submit(0);
}

Status UringReadQueue::Wait() {
  TERRACE_CHECK(!groups_.empty());
  Group& group = groups_.front();
  while (open_ && group.unfinished > 0) {
    Fill();
    if (group.unfinished == 0) break;
    // Some at a time, so that a fast disk does not wake this thread for each of them, and few, so
    // that its queue stays full.
    const std::size_t on_their_way = in_flight_ + staged_.size();
    const std::size_t wait_for =
        std::min({group.unfinished, on_their_way, std::max<std::size_t>(1, depth_ / 32)});
    if (!Submit(static_cast<unsigned>(wait_for))) break;
    Reap();
  }
  // Without a ring.
  for (; group.next < group.requests.size(); --group.unfinished)
    RunOne(&group.requests[group.next++]);
  TERRACE_CHECK(group.unfinished == 0);
  const std::span<ReadRequest> requests = group.requests;
  groups_.pop_front();
  // The disk goes on while the caller handles this group.
  if (open_) {
    Fill();
    if (!staged_.empty()) Submit(0);
  }
  return FirstError(requests);
}

}  // namespace

Result<std::unique_ptr<ReadQueue>> NewUringReadQueue(int depth, std::span<std::byte> buffer) {
  auto queue = std::make_unique<UringReadQueue>(depth);
  if (int result = queue->Open(buffer); result != 0) {
    return UnavailableError(fmt::format(
        "io_uring cannot be used here ({}): the kernel lacks or forbids it, or locked memory is "
        "limited (ulimit -l); use auto or threads",
        std::strerror(-result)));
  }
  return std::unique_ptr<ReadQueue>(std::move(queue));
}

}  // namespace terrace
