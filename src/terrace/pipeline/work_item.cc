#include "terrace/pipeline/work_item.h"

namespace terrace {

std::uint64_t TableWork::MemoryBytes() const {
  return (keys.capacity() + unadmitted.capacity()) * sizeof(Key) +
         value.capacity() * sizeof(float) + places.capacity() * sizeof(std::byte*) +
         (key_end.capacity() + row_begin.capacity() + rows.capacity() + inverse_begin.capacity() +
          occurrence_begin.capacity() + example.capacity() + input_offset.capacity() +
          unadmitted_shows.capacity() + unadmitted_end.capacity()) *
             sizeof(std::uint32_t);
}

std::uint64_t WorkItem::MemoryBytes() const {
  std::uint64_t bytes = local_row.capacity() * sizeof(std::uint32_t);
  for (const TableWork& table : tables) bytes += table.MemoryBytes();
  return bytes;
}

std::uint64_t WorkItem::UsedBytes() const {
  std::uint64_t bytes = local_row.size() * sizeof(std::uint32_t);
  for (const TableWork& table : tables) {
    bytes += minibatches * kMinibatchBytes + table.keys.size() * kWorkingRowBytes +
             table.rows.size() * kLocalRowBytes + table.example.size() * 2 * sizeof(std::uint32_t) +
             table.value.size() * sizeof(float);
  }
  return bytes;
}

Result<SetLimiter::Token> SetLimiter::Take() {
  MutexLock lock(&mu_);
  while (alive_ == limit_ && cancelled_.ok()) released_.Wait(&mu_);
  TERRACE_RETURN_IF_ERROR(cancelled_);
  ++alive_;
  return Token(this);
}

std::uint32_t SetLimiter::alive() const {
  MutexLock lock(&mu_);
  return alive_;
}

Result<std::uint32_t> SetLimiter::AwaitFewer(std::uint32_t many) {
  MutexLock lock(&mu_);
  while (alive_ >= many && cancelled_.ok()) released_.Wait(&mu_);
  TERRACE_RETURN_IF_ERROR(cancelled_);
  return alive_;
}

void SetLimiter::Cancel(const Status& cause) {
  MutexLock lock(&mu_);
  if (cancelled_.ok()) cancelled_ = cause;
  released_.NotifyAll();
}

void SetLimiter::Release() {
  MutexLock lock(&mu_);
  --alive_;
  released_.NotifyOne();
}

void WorkItem::Clear() {
  batch.reset();
  token.GiveBack();
  local_row.clear();
  for (TableWork& table : tables) {
    table.pinned.Release();
    table.keys.clear();
    table.key_end.clear();
    table.row_begin.clear();
    table.rows.clear();
    table.inverse_begin.clear();
    table.occurrence_begin.clear();
    table.example.clear();
    table.input_offset.clear();
    table.value.clear();
    table.unadmitted.clear();
    table.unadmitted_shows.clear();
    table.unadmitted_end.clear();
    table.places.clear();
    table.marked = 0;
  }
  minibatch_size = first_example = end_example = first_minibatch = minibatches = 0;
  last_of_batch = false;
}

}  // namespace terrace
