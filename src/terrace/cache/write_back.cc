#include "terrace/cache/write_back.h"

#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/sync_point.h"

namespace terrace {
namespace {
constexpr int kIndexBits = 24;
constexpr std::size_t kAhead = 16;  // Keys; what memory delivers while one is handled.
constexpr std::uint32_t kIndexMask = (std::uint32_t{1} << kIndexBits) - 1;

std::uint64_t Stride(std::uint32_t row_bytes) { return (std::uint64_t{row_bytes} + 7) / 8 * 8; }

std::uint64_t RowBufferBytes(const WriteBackOptions& options) {
  const std::uint64_t bytes = Stride(options.row_bytes) * options.buffer_rows;
  const std::uint64_t unit = bytes >= kHugePageBytes ? kHugePageBytes : 4096;
  return (bytes + unit - 1) / unit * unit;
}

std::uint64_t BufferCount(const WriteBackOptions& options) { return options.background ? 2 : 1; }
}  // namespace

std::uint64_t WriteBack::BytesFor(const WriteBackOptions& options) {
  constexpr std::uint64_t kPerRow = 2 * sizeof(Key) + sizeof(const std::byte*) + 2;
  const std::uint64_t count = BufferCount(options);
  return count * (RowBufferBytes(options) + kPerRow * options.buffer_rows) +
         EntryMap::BytesFor(count * options.buffer_rows);
}

Result<std::unique_ptr<WriteBack>> WriteBack::Create(const WriteBackOptions& options,
                                                     std::vector<Store*> stores) {
  TERRACE_CHECK(options.buffer_rows > 0 && options.buffer_rows <= kIndexMask && !stores.empty());
  std::unique_ptr<WriteBack> write_back(new WriteBack(options, std::move(stores)));
  TERRACE_RETURN_IF_ERROR(write_back->Allocate());
  if (options.background) {
    WriteBack* self = write_back.get();
    self->thread_ = Thread("cache-write", ThreadPriority::kYielding, [self] { self->Loop(); });
  }
  return write_back;
}

WriteBack::WriteBack(const WriteBackOptions& options, std::vector<Store*> stores)
    : options_(options), stride_(Stride(options.row_bytes)), stores_(std::move(stores)) {}

Status WriteBack::Allocate() {
  MutexLock lock(&mu_);
  buffers_.resize(BufferCount(options_));
  for (std::size_t i = buffers_.size(); i > 0; --i) {
    Buffer& buffer = buffers_[i - 1];
    TERRACE_ASSIGN_OR_RETURN(buffer.rows, HugeBuffer::Allocate(RowBufferBytes(options_)));
    buffer.keys.reserve(options_.buffer_rows);
    buffer.stored.reserve(options_.buffer_rows);
    buffer.shard_keys.reserve(options_.buffer_rows);
    buffer.shard_rows.reserve(options_.buffer_rows);
    buffer.shard_stored.reserve(options_.buffer_rows);
    idle_.push_back(static_cast<std::uint32_t>(i - 1));
  }
  TERRACE_RETURN_IF_ERROR(map_.Reset(buffers_.size() * options_.buffer_rows));
  bytes_ = BytesFor(options_);
  return OkStatus();
}

WriteBack::~WriteBack() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    work_.NotifyAll();
  }
  if (thread_.joinable()) thread_.Join();
}

std::size_t WriteBack::Room() const {
  std::size_t room = idle_.size() * options_.buffer_rows;
  if (filling_ >= 0) {
    room += options_.buffer_rows - buffers_[static_cast<std::size_t>(filling_)].keys.size();
  }
  return room;
}

std::uint32_t WriteBack::FindPlace(Key key) const {
  return map_.Find(MixKey(key), [this, key](std::uint32_t place) {
    return buffers_[place >> kIndexBits].keys[place & kIndexMask] == key;
  });
}

void WriteBack::Append(Key key, const std::byte* row, bool stored) {
  if (filling_ < 0) {
    TERRACE_CHECK(!idle_.empty());
    filling_ = idle_.back();
    idle_.pop_back();
  }
  Buffer& buffer = buffers_[static_cast<std::size_t>(filling_)];
  const std::uint32_t old = FindPlace(key);
  if (old != EntryMap::kNone && static_cast<std::int64_t>(old >> kIndexBits) == filling_) {
    std::memcpy(RowIn(buffer, old & kIndexMask), row, options_.row_bytes);
    return;
  }
  const std::uint32_t place = static_cast<std::uint32_t>(filling_) << kIndexBits |
                              static_cast<std::uint32_t>(buffer.keys.size());
  std::memcpy(RowIn(buffer, buffer.keys.size()), row, options_.row_bytes);
  buffer.keys.push_back(key);
  buffer.stored.push_back(stored ? 1 : 0);
  ++unwritten_rows_;
  if (old == EntryMap::kNone) {
    map_.Insert(MixKey(key), place);
  } else {
    map_.Replace(MixKey(key), old, place);
  }
  if (buffer.keys.size() == options_.buffer_rows) Submit();
}

void WriteBack::Submit() {
  if (filling_ < 0) return;
  Buffer& buffer = buffers_[static_cast<std::size_t>(filling_)];
  buffer.sequence = ++submitted_;
  queue_.push_back(static_cast<std::uint32_t>(filling_));
  filling_ = -1;
  work_.NotifyOne();
}

Status WriteBack::WriteRows(Buffer* buffer) {
  SyncPoint::Hit("cache.writeback.before_write");
  // A counting sort by shard; the store brings the rows of one into its own order.
  const auto shards = static_cast<std::uint32_t>(stores_.size());
  const std::vector<Key>& keys = buffer->keys;
  std::vector<std::size_t> ends(shards + 1, 0);
  for (const Key key : keys) ++ends[ShardOfHash(MixKey(key), shards) + 1];
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  buffer->shard_keys.resize(keys.size());
  buffer->shard_rows.resize(keys.size());
  buffer->shard_stored.resize(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::size_t place = ends[ShardOfHash(MixKey(keys[i]), shards)]++;
    buffer->shard_keys[place] = keys[i];
    buffer->shard_rows[place] = RowIn(*buffer, i);
    buffer->shard_stored[place] = buffer->stored[i];
  }
  std::size_t begin = 0;
  for (std::uint32_t shard = 0; shard < shards; ++shard) {
    const std::size_t count = ends[shard] - begin;
    if (count == 0) continue;
    const Status written = stores_[shard]->Write(
        std::span<const Key>(buffer->shard_keys).subspan(begin, count),
        std::span<const std::byte* const>(buffer->shard_rows).subspan(begin, count),
        std::span<const std::uint8_t>(buffer->shard_stored).subspan(begin, count));
    if (!written.ok()) {
      // What is tried again goes to the shards before it a second time.
      for (std::size_t i = 0; i < keys.size(); ++i) {
        if (ShardOfHash(MixKey(keys[i]), shards) < shard) buffer->stored[i] = 1;
      }
      return written.WithContext("writing evicted rows to shard " + std::to_string(shard));
    }
    begin = ends[shard];
  }
  SyncPoint::Hit("cache.writeback.after_write");
  return OkStatus();
}

void WriteBack::WriteOldest() {
  const std::uint32_t number = queue_.front();
  Buffer& buffer = buffers_[number];
  writing_ = true;
  mu_.Unlock();
  // A submitted buffer's rows and keys are constant until it is idle again.
  Status status = WriteRows(&buffer);
  mu_.Lock();
  writing_ = false;
  if (status.ok()) {
    for (std::size_t i = 0; i < buffer.keys.size(); ++i) {
      if (i + kAhead < buffer.keys.size()) map_.Prefetch(MixKey(buffer.keys[i + kAhead]));
      // A newer version may lie in another buffer by now.
      const std::uint32_t place = FindPlace(buffer.keys[i]);
      if (place == (number << kIndexBits | static_cast<std::uint32_t>(i))) {
        map_.Erase(MixKey(buffer.keys[i]), place);
      }
    }
    queue_.pop_front();
    written_sequence_ = buffer.sequence;
    written_rows_ += buffer.keys.size();
    unwritten_rows_ -= buffer.keys.size();
    buffer.keys.clear();
    buffer.stored.clear();
    idle_.push_back(number);
  } else {
    failure_ = std::move(status);
    failed_.store(true, std::memory_order_relaxed);
  }
  written_.NotifyAll();
}

void WriteBack::Loop() {
  MutexLock lock(&mu_);
  while (true) {
    while (!stop_ && (queue_.empty() || !failure_.ok() || writing_)) work_.Wait(&mu_);
    if (stop_) return;
    WriteOldest();
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
    if (queue_.empty()) Submit();
    TERRACE_RETURN_IF_ERROR(WaitForSequence(written_sequence_ + 1, cancellable));
  }
  return OkStatus();
}

Status WriteBack::WriteNow() {
  if (options_.background) return OkStatus();
  MutexLock lock(&mu_);
  Submit();
  return WaitForSequence(submitted_, /*cancellable=*/false);
}

Status WriteBack::Flush() {
  MutexLock lock(&mu_);
  Submit();
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
    if (i + kAhead < keys.size()) map_.Prefetch(MixKey(keys[i + kAhead]));
    const std::uint32_t place = FindPlace(keys[i]);
    if (place == EntryMap::kNone) continue;
    std::memcpy(rows[i], RowIn(buffers_[place >> kIndexBits], place & kIndexMask),
                options_.row_bytes);
    found[i] = 1;
    ++copied;
  }
  return copied;
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

std::uint64_t WriteBack::written_rows() const {
  MutexLock lock(&mu_);
  return written_rows_;
}

}  // namespace terrace
