#include "terrace/cache/write_back.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/radix_sort.h"

namespace terrace {
namespace {
constexpr int kIndexBits = 24;
constexpr std::size_t kAhead = 16;  // Keys; what memory delivers while one is handled.
constexpr std::uint32_t kIndexMask = (std::uint32_t{1} << kIndexBits) - 1;

std::uint64_t Stride(std::uint32_t row_bytes) { return AlignUp(row_bytes, 8); }

std::uint64_t RowBufferBytes(const WriteBackOptions& options) {
  return HugeBuffer::SizeFor(Stride(options.row_bytes) * options.buffer_rows);
}

std::uint32_t PlaceOf(std::int64_t buffer, std::size_t index) {
  return static_cast<std::uint32_t>(buffer) << kIndexBits | static_cast<std::uint32_t>(index);
}

// Shards written side by side, each by a thread; what one disk takes needs no more.
constexpr std::size_t kMostShardWriters = 4;
}  // namespace

std::uint64_t WriteBack::BytesFor(const WriteBackOptions& options) {
  constexpr std::uint64_t kPerRow =
      2 * sizeof(Key) + sizeof(const std::byte*) + 2 + sizeof(std::uint32_t);
  const std::uint64_t count = BufferCount(options.background, options.hot_apart);
  const std::uint64_t sorting =
      options.future == nullptr ? 0 : (2 * sizeof(std::uint64_t) + count) * options.buffer_rows;
  return count * (RowBufferBytes(options) + kPerRow * options.buffer_rows) + sorting +
         EntryMap::BytesFor(count * options.buffer_rows);
}

Result<std::unique_ptr<WriteBack>> WriteBack::Create(const WriteBackOptions& options,
                                                     std::vector<Store*> stores) {
  TERRACE_CHECK(options.buffer_rows > 0 && options.buffer_rows <= kIndexMask && !stores.empty());
  std::unique_ptr<WriteBack> write_back(new WriteBack(options, std::move(stores)));
  TERRACE_RETURN_IF_ERROR(write_back->Allocate());
  WriteBack* self = write_back.get();
  self->shard_writers_ = std::make_unique<WorkerGroup>(
      "cache-write-",
      options.background ? static_cast<int>(std::min(self->stores_.size(), kMostShardWriters)) : 1,
      nullptr, ThreadPriority::kYielding);
  if (options.background) {
    self->stage_thread_ =
        Thread("cache-write", ThreadPriority::kYielding, [self] { self->StageLoop(); });
    self->publish_thread_ =
        Thread("cache-publish", ThreadPriority::kYielding, [self] { self->PublishLoop(); });
  }
  return write_back;
}

WriteBack::WriteBack(const WriteBackOptions& options, std::vector<Store*> stores)
    : options_(options), stride_(Stride(options.row_bytes)), stores_(std::move(stores)) {}

Status WriteBack::Allocate() {
  MutexLock lock(&mu_);
  buffers_.resize(BufferCount(options_.background, options_.hot_apart));
  for (std::size_t i = buffers_.size(); i > 0; --i) {
    Buffer& buffer = buffers_[i - 1];
    TERRACE_ASSIGN_OR_RETURN(buffer.rows, HugeBuffer::Allocate(RowBufferBytes(options_)));
    buffer.keys.reserve(options_.buffer_rows);
    buffer.stored.reserve(options_.buffer_rows);
    if (options_.future != nullptr) buffer.may_come.reserve(options_.buffer_rows);
    buffer.shard_keys.reserve(options_.buffer_rows);
    buffer.shard_rows.reserve(options_.buffer_rows);
    buffer.shard_stored.reserve(options_.buffer_rows);
    buffer.shard_order.origin.reserve(options_.buffer_rows);
    buffer.staged.resize(stores_.size());
    idle_.push_back(static_cast<std::uint32_t>(i - 1));
  }
  if (options_.future != nullptr) {
    next_uses_.reserve(options_.buffer_rows);
    sort_spare_.reserve(options_.buffer_rows);
  }
  TERRACE_RETURN_IF_ERROR(map_.Reset(buffers_.size() * options_.buffer_rows));
  bytes_ = BytesFor(options_);
  return OkStatus();
}

WriteBack::~WriteBack() { Stop(); }

void WriteBack::Stop() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    work_.NotifyAll();
    staging_.NotifyAll();
    written_.NotifyAll();
  }
  if (stage_thread_.joinable()) stage_thread_.Join();
  if (publish_thread_.joinable()) publish_thread_.Join();
}

std::size_t WriteBack::Filled(std::size_t kind) const {
  const std::int64_t number = filling_[kind];
  return number < 0 ? 0 : buffers_[static_cast<std::size_t>(number)].keys.size();
}

std::size_t WriteBack::Rest(std::size_t kind) const {
  return filling_[kind] < 0 ? 0 : options_.buffer_rows - Filled(kind);
}

std::size_t WriteBack::Room() const {
  const std::size_t idle = idle_.size() * options_.buffer_rows;
  if (!options_.hot_apart) return idle + Rest(kOthers);
  const std::size_t one_kind = idle + std::min(Rest(kOthers), Rest(kHot));
  if (idle_.empty()) return one_kind;
  // Or so many of both that each kind needs the last idle buffer.
  return std::min(one_kind, idle - options_.buffer_rows + Rest(kOthers) + Rest(kHot) + 1);
}

std::uint32_t WriteBack::FindPlace(Key key) const {
  return map_.Find(PlaceHash(key), [this, key](std::uint32_t place) {
    return buffers_[place >> kIndexBits].keys[place & kIndexMask] == key;
  });
}

void WriteBack::Append(Key key, const std::byte* row, const WrittenRow& what) {
  const std::uint32_t old = FindPlace(key);
  const std::int64_t old_buffer = old == EntryMap::kNone ? -1 : old >> kIndexBits;
  if (old_buffer >= 0 && (old_buffer == filling_[kOthers] || old_buffer == filling_[kHot])) {
    Buffer& buffer = buffers_[static_cast<std::size_t>(old_buffer)];
    std::memcpy(RowIn(buffer, old & kIndexMask), row, options_.row_bytes);
    if (options_.future != nullptr) buffer.may_come[old & kIndexMask] = what.may_come ? 1 : 0;
    return;
  }
  const std::size_t kind = what.hot && options_.hot_apart ? kHot : kOthers;
  if (filling_[kind] < 0) {
    TERRACE_CHECK(!idle_.empty());
    filling_[kind] = idle_.back();
    idle_.pop_back();
  }
  Buffer& buffer = buffers_[static_cast<std::size_t>(filling_[kind])];
  const std::uint32_t place = PlaceOf(filling_[kind], buffer.keys.size());
  std::memcpy(RowIn(buffer, buffer.keys.size()), row, options_.row_bytes);
  buffer.keys.push_back(key);
  buffer.stored.push_back(what.stored ? kStoredKey : kNewKey);
  buffer.unstored += what.stored ? 0 : 1;
  if (options_.future != nullptr) buffer.may_come.push_back(what.may_come ? 1 : 0);
  ++unwritten_rows_;
  if (old == EntryMap::kNone) {
    map_.Insert(PlaceHash(key), place);
  } else {
    map_.Replace(PlaceHash(key), old, place);
  }
  if (buffer.keys.size() == options_.buffer_rows) Submit(kind);
}

void WriteBack::Submit(std::size_t kind) {
  if (filling_[kind] < 0) return;
  const auto number = static_cast<std::uint32_t>(std::exchange(filling_[kind], -1));
  buffers_[number].sequence = ++submitted_;
  queue_.push_back(number);
  work_.NotifyOne();
}

void WriteBack::SubmitAll() {
  if (filling_[kOthers] >= 0 && filling_[kHot] >= 0 &&
      Filled(kOthers) + Filled(kHot) <= options_.buffer_rows) {
    Join(Filled(kOthers) < Filled(kHot) ? kOthers : kHot);
  }
  for (std::size_t kind = 0; kind < kKinds; ++kind) Submit(kind);
}

void WriteBack::Join(std::size_t kind) {
  const std::int64_t from_number = std::exchange(filling_[kind], -1);
  const std::int64_t to_number = filling_[kind == kHot ? kOthers : kHot];
  Buffer& from = buffers_[static_cast<std::size_t>(from_number)];
  Buffer& to = buffers_[static_cast<std::size_t>(to_number)];
  for (std::size_t i = 0; i < from.keys.size(); ++i) {
    if (i + kAhead < from.keys.size()) map_.Prefetch(PlaceHash(from.keys[i + kAhead]));
    const std::size_t at = to.keys.size();
    std::memcpy(RowIn(to, at), RowIn(from, i), options_.row_bytes);
    to.keys.push_back(from.keys[i]);
    to.stored.push_back(from.stored[i]);
    if (options_.future != nullptr) to.may_come.push_back(from.may_come[i]);
    // Nothing newer is appended than what is being filled in.
    map_.Replace(PlaceHash(from.keys[i]), PlaceOf(from_number, i), PlaceOf(to_number, at));
  }
  to.unstored += from.unstored;
  from.Clear();
  idle_.push_back(static_cast<std::uint32_t>(from_number));
}

void WriteBack::SortByNextUse(Buffer* buffer) {
  constexpr int kRowBits = 32, kTickBits = 16;
  ShardOrder& order = buffer->shard_order;
  for (std::size_t shard = 0; shard < order.shards(); ++shard) {
    const std::span<std::uint32_t> rows = order.PartOf(order.origin, shard);
    next_uses_.clear();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i + kAhead < rows.size() && buffer->may_come[rows[i + kAhead]] != 0) {
        options_.future->Prefetch(MixKey(buffer->keys[rows[i + kAhead]]));
      }
      const std::uint64_t ticks =
          buffer->may_come[rows[i]] != 0
              ? options_.future->TicksUntilNext(MixKey(buffer->keys[rows[i]]))
              : FutureKeys::kNever;
      next_uses_.push_back(ticks << kRowBits | rows[i]);
    }
    RadixSort(&next_uses_, &sort_spare_, kRowBits, kRowBits + kTickBits,
              [](std::uint64_t use) { return use; });
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<std::uint32_t>(next_uses_[i]);
    }
  }
}

Status WriteBack::StageRows(Buffer* buffer) {
  SyncPoint::Hit("cache.writeback.before_write");
  const ShardOrder& order = buffer->shard_order;
  SortByShard(buffer->keys, options_.shards, &buffer->shard_order);
  // Rows lie on the disk as they are given to the store, and a batch reads those together that lie
  // together.
  if (options_.future != nullptr) SortByNextUse(buffer);
  buffer->shard_keys.clear();
  buffer->shard_rows.clear();
  buffer->shard_stored.clear();
  for (const std::uint32_t i : order.origin) {
    buffer->shard_keys.push_back(buffer->keys[i]);
    buffer->shard_rows.push_back(RowIn(*buffer, i));
    buffer->shard_stored.push_back(buffer->stored[i]);
  }
  std::vector<Status> statuses(stores_.size());
  std::atomic<bool> failed = false;  // Relaxed: a shard more or less is written in vain.
  shard_writers_->Run(static_cast<int>(stores_.size()), [&](int shard) {
    const auto s = static_cast<std::size_t>(shard);
    if (order.count(s) == 0 || failed.load(std::memory_order_relaxed)) return;
    Result<std::unique_ptr<StagedRows>> staged =
        stores_[s]->Stage(order.PartOf(buffer->shard_keys, s), order.PartOf(buffer->shard_rows, s),
                          order.PartOf(buffer->shard_stored, s));
    if (staged.ok()) {
      buffer->staged[s] = std::move(staged).value();
      return;
    }
    statuses[s] = staged.status();
    failed.store(true, std::memory_order_relaxed);
  });
  for (std::size_t shard = 0; shard < statuses.size(); ++shard) {
    if (statuses[shard].ok()) continue;
    for (auto& staged : buffer->staged) staged.reset();
    return statuses[shard].WithContext("writing evicted rows to shard " +
                                       std::to_string(options_.shards.first + shard));
  }
  return OkStatus();
}

Status WriteBack::PublishRows(Buffer* buffer) {
  for (std::size_t shard = 0; shard < stores_.size(); ++shard) {
    if (buffer->staged[shard] == nullptr) continue;
    const Status published = stores_[shard]->Publish(std::move(buffer->staged[shard]));
    if (published.ok()) continue;
    for (auto& staged : buffer->staged) staged.reset();
    // What is tried again goes to the shards before it a second time.
    for (std::size_t i = 0; i < buffer->shard_order.begins[shard]; ++i) {
      buffer->stored[buffer->shard_order.origin[i]] = kStoredKey;
    }
    return published.WithContext("writing evicted rows to shard " +
                                 std::to_string(options_.shards.first + shard));
  }
  SyncPoint::Hit("cache.writeback.after_write");
  return OkStatus();
}

void WriteBack::EndWrite() {
  const std::uint32_t number = queue_.front();
  Buffer& buffer = buffers_[number];
  for (std::size_t i = 0; i < buffer.keys.size(); ++i) {
    if (i + kAhead < buffer.keys.size()) map_.Prefetch(PlaceHash(buffer.keys[i + kAhead]));
    // A newer version may lie in another buffer by now.
    const std::uint32_t place = FindPlace(buffer.keys[i]);
    if (place == PlaceOf(number, i)) {
      map_.Erase(PlaceHash(buffer.keys[i]), place);
    }
  }
  queue_.pop_front();
  written_sequence_ = buffer.sequence;
  written_rows_ += buffer.keys.size();
  unwritten_rows_ -= buffer.keys.size();
  buffer.Clear();
  idle_.push_back(number);
  written_.NotifyAll();
}

void WriteBack::Fail(Status failure) {
  failure_ = std::move(failure);
  failed_.store(true, std::memory_order_relaxed);
  written_.NotifyAll();
}

// A submitted buffer's rows and keys are constant until it is idle again: that is what lets the
// following work on them without mu_.

void WriteBack::WriteOldest() {
  Buffer& buffer = buffers_[queue_.front()];
  writing_ = true;
  mu_.Unlock();
  const double begin = options_.clock->MonotonicSeconds(), cpu_begin = ThreadCpuSeconds();
  Status status = StageRows(&buffer);
  if (status.ok()) status = PublishRows(&buffer);
  const double busy = options_.clock->MonotonicSeconds() - begin;
  const double cpu = ThreadCpuSeconds() - cpu_begin;
  mu_.Lock();
  times_.busy_seconds += busy;
  times_.cpu_seconds += cpu;
  writing_ = false;
  if (status.ok()) {
    EndWrite();
  } else {
    Fail(std::move(status));
  }
}

void WriteBack::StageLoop() {
  MutexLock lock(&mu_);
  double before = options_.clock->MonotonicSeconds();
  const auto count_time = [&](double WriteBackTimes::*of) TERRACE_REQUIRES(mu_) {
    const double now = options_.clock->MonotonicSeconds();
    times_.*of += now - std::exchange(before, now);
  };
  while (true) {
    while (!stop_ && (staged_ == queue_.size() || dropping_ || !failure_.ok())) work_.Wait(&mu_);
    count_time(&WriteBackTimes::waited_for_input_seconds);
    if (stop_) return;
    Buffer& buffer = buffers_[queue_[staged_]];
    const std::uint64_t failed_before = failed_publishes_, written_before = written_sequence_;
    // What is staged before it may be all that leaves it no room: no checkpoint goes until that is
    // published.
    const bool ahead = staged_ > 0;
    mu_.Unlock();
    for (Store* store : stores_) store->KeepCheckpoints(ahead);
    Status status = StageRows(&buffer);
    mu_.Lock();
    count_time(&WriteBackTimes::busy_seconds);
    if (failed_before != failed_publishes_) {
      // The stores take nothing in before that which failed.
      mu_.Unlock();
      for (auto& staged : buffer.staged) staged.reset();
      mu_.Lock();
    } else if (status.ok()) {
      ++staged_;
      staging_.NotifyOne();
    } else if (status.code() == StatusCode::kOutOfRoom &&
               (staged_ > 0 || written_sequence_ != written_before)) {
      // It is tried again.
      while (!stop_ && staged_ > 0) written_.Wait(&mu_);
    } else {
      Fail(std::move(status));
    }
  }
}

void WriteBack::PublishLoop() {
  MutexLock lock(&mu_);
  while (true) {
    while (!stop_ && staged_ == 0) staging_.Wait(&mu_);
    if (stop_) return;
    Buffer& buffer = buffers_[queue_.front()];
    mu_.Unlock();
    Status status = PublishRows(&buffer);
    mu_.Lock();
    if (status.ok()) {
      --staged_;
      EndWrite();
      continue;
    }
    // All that was staged behind it begins anew, so that versions keep their order.
    std::vector<std::unique_ptr<StagedRows>> dropped;
    for (std::size_t i = 1; i < staged_; ++i) {
      for (auto& staged : buffers_[queue_[i]].staged) dropped.push_back(std::move(staged));
    }
    staged_ = 0;
    ++failed_publishes_;
    dropping_ = true;  // Nothing is staged anew meanwhile.
    mu_.Unlock();
    dropped.clear();
    mu_.Lock();
    dropping_ = false;
    Fail(std::move(status));
  }
}

Status WriteBack::WaitForSequence(std::uint64_t sequence, bool cancellable) {
  while (written_sequence_ < sequence) {
    if (cancellable && !cancelled_.ok()) return cancelled_;
    if (!failure_.ok()) return failure_;
    if (!options_.background && !writing_) {
      WriteOldest();
    } else {
      written_.Wait(&mu_);
    }
  }
  return OkStatus();
}

Status WriteBack::MakeRoom(std::size_t rows, bool cancellable) {
  TERRACE_CHECK(rows <= options_.buffer_rows);
  MutexLock lock(&mu_);
  while (Room() < rows) {
    // What is being filled may be too small a rest of a buffer.
    if (queue_.empty()) Submit(Filled(kHot) > Filled(kOthers) ? kHot : kOthers);
    TERRACE_RETURN_IF_ERROR(WaitForSequence(written_sequence_ + 1, cancellable));
  }
  return OkStatus();
}

Status WriteBack::WriteNow() {
  if (options_.background) return OkStatus();
  MutexLock lock(&mu_);
  SubmitAll();
  return WaitForSequence(submitted_, /*cancellable=*/false);
}

Status WriteBack::Flush() {
  MutexLock lock(&mu_);
  SubmitAll();
  if (!failure_.ok()) {
    failure_ = OkStatus();
    failed_.store(false, std::memory_order_relaxed);
    work_.NotifyOne();
  }
  return WaitForSequence(submitted_, /*cancellable=*/false);
}

std::size_t WriteBack::Copy(std::span<const Key> keys, std::span<std::byte* const> rows,
                            std::span<std::uint8_t> found) const {
  MutexLock lock(&mu_);
  if (map_.size() == 0) return 0;
  std::size_t copied = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) map_.Prefetch(PlaceHash(keys[i + kAhead]));
    const std::uint32_t place = FindPlace(keys[i]);
    if (place == EntryMap::kNone) continue;
    std::memcpy(rows[i], RowIn(buffers_[place >> kIndexBits], place & kIndexMask),
                options_.row_bytes);
    found[i] = 1;
    ++copied;
  }
  return copied;
}

void WriteBack::Find(std::span<const Key> keys, std::span<std::uint8_t> found) const {
  MutexLock lock(&mu_);
  if (map_.size() == 0) return;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) map_.Prefetch(PlaceHash(keys[i + kAhead]));
    if (FindPlace(keys[i]) != EntryMap::kNone) found[i] = 1;
  }
}

void WriteBack::Cancel(const Status& cause) {
  MutexLock lock(&mu_);
  if (cancelled_.ok()) cancelled_ = cause;
  written_.NotifyAll();
}

Status WriteBack::status() const {
  // Relaxed: the lock below orders what matters.
  if (!failed_.load(std::memory_order_relaxed)) return OkStatus();
  MutexLock lock(&mu_);
  return failure_;
}

std::uint64_t WriteBack::unwritten_rows() const {
  MutexLock lock(&mu_);
  return unwritten_rows_;
}

std::uint64_t WriteBack::unstored_rows() const {
  MutexLock lock(&mu_);
  std::uint64_t rows = 0;
  for (const Buffer& buffer : buffers_) rows += buffer.unstored;
  return rows;
}

std::uint64_t WriteBack::written_rows() const {
  MutexLock lock(&mu_);
  return written_rows_;
}

WriteBackTimes WriteBack::times() const {
  MutexLock lock(&mu_);
  WriteBackTimes times = times_;
  times.cpu_seconds +=
      stage_thread_.cpu_seconds() + publish_thread_.cpu_seconds() + shard_writers_->cpu_seconds();
  return times;
}

}  // namespace terrace
