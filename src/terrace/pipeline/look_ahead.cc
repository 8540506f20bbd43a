#include "terrace/pipeline/look_ahead.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/clock.h"
#include "terrace/base/log.h"

namespace terrace {

LookAhead::LookAhead(Open open, std::uint32_t minibatch, FutureKeys* future)
    : open_(std::move(open)), minibatch_(minibatch), future_(future) {
  TERRACE_CHECK(minibatch > 0);
}

void LookAhead::Stop() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    if (source_ != nullptr) source_->Cancel();
  }
  changed_.NotifyAll();
  if (thread_.joinable()) thread_.Join();
  begun_.store(false, std::memory_order_release);
}

void LookAhead::Begin(const DataCursor& from) {
  TERRACE_CHECK(!begun());
  planned_.store(from.examples, std::memory_order_relaxed);
  seen_.store(from.examples, std::memory_order_relaxed);
  thread_ = Thread("look-ahead", ThreadPriority::kYielding, [this, from] { Loop(from); });
  begun_.store(true, std::memory_order_release);
}

void LookAhead::SetPlanned(const DataCursor& cursor) {
  {
    MutexLock lock(&mu_);
    planned_.store(cursor.examples, std::memory_order_relaxed);
  }
  changed_.NotifyAll();
}

std::uint64_t LookAhead::examples_ahead() const {
  const std::uint64_t seen = seen_.load(std::memory_order_relaxed);
  const std::uint64_t planned = planned_.load(std::memory_order_relaxed);
  return seen > planned ? seen - planned : 0;
}

void LookAhead::Loop(const DataCursor& from) {
  const Status status = ReadOn(from);
  // Training reads the same: if this was no accident, it will say so when it comes there.
  if (!status.ok() && status.code() != StatusCode::kAborted) {
    LogText(LogLevel::kInfo, "looking ahead ends here: " + status.ToString());
  }
  // What passes is no longer to come.
  MutexLock lock(&mu_);
  while (!stop_) {
    future_->SetNow(planned_.load(std::memory_order_relaxed));
    changed_.Wait(&mu_);
  }
}

Status LookAhead::ReadOn(const DataCursor& from) {
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<ExampleSource> source, open_());
  TERRACE_RETURN_IF_ERROR(source->Seek(from));
  {
    MutexLock lock(&mu_);
    source_ = source.get();
  }
  const auto examples =
      minibatch_ * std::max<std::uint32_t>(1, FutureKeys::kTickExamples / minibatch_);
  Status status;
  Batch batch;
  std::uint64_t next = from.examples;
  while (AwaitRoom(next + examples)) {
    Result<std::optional<Batch>> more = source->NextIn(examples, minibatch_, std::move(batch));
    if (!more.ok() || !more->has_value()) {
      status = more.status();
      break;
    }
    batch = std::move(**more);
    Add(batch);
    next = batch.first_example + batch.examples;
    seen_.store(next, std::memory_order_relaxed);
    cpu_seconds_.store(ThreadCpuSeconds(), std::memory_order_relaxed);
  }
  MutexLock lock(&mu_);
  source_ = nullptr;
  return status;
}

bool LookAhead::AwaitRoom(std::uint64_t end) {
  MutexLock lock(&mu_);
  while (!stop_) {
    future_->SetNow(planned_.load(std::memory_order_relaxed));
    if (future_->CanAdd(end)) return true;
    changed_.Wait(&mu_);
  }
  return false;
}

void LookAhead::Add(const Batch& batch) {
  const std::span<const Key> keys(batch.keys);
  for (std::uint32_t begin = 0; begin < batch.examples;) {
    const std::uint32_t end =
        std::min<std::uint32_t>(batch.examples, begin + FutureKeys::kTickExamples);
    const std::size_t first = batch.key_begin[std::size_t{begin} * batch.slots];
    const std::size_t last = batch.key_begin[std::size_t{end} * batch.slots];
    future_->Add(keys.subspan(first, last - first), batch.first_example + end - 1);
    begin = end;
  }
}

}  // namespace terrace
