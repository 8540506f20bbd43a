#include "terrace/cache/testing/fake_store.h"

#include <algorithm>
#include <unordered_set>

#include "terrace/base/check.h"

namespace terrace {

bool FakeStore::NextFails() {
  ++calls_;
  return fail_at_ >= 0 && fail_at_-- == 0;
}

Status FakeStore::Read(std::span<const Key> keys, std::span<std::byte* const> rows,
                       std::span<std::uint8_t> found, const std::atomic<bool>* stop) {
  MutexLock lock(&mu_);
  const bool fails = NextFails();
  TERRACE_CHECK(std::unordered_set<Key>(keys.begin(), keys.end()).size() == keys.size());
  const auto held = [&]() TERRACE_REQUIRES(mu_) {
    return hold_reads_ || (held_key_ && std::ranges::find(keys, *held_key_) != keys.end());
  };
  while (held()) {
    ++held_reads_;
    changed_.NotifyAll();
    changed_.Wait(&mu_);
    --held_reads_;
  }
  ++reads_ended_;
  changed_.NotifyAll();
  if (fails) return IoError("read fails as the test wants");
  if (stop != nullptr && stop->load()) return AbortedError("reading was stopped");
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto row = rows_.find(keys[i]);
    found[i] = row != rows_.end() ? 1 : 0;
    if (row != rows_.end()) std::memcpy(rows[i], row->second.data(), row_bytes_);
  }
  return OkStatus();
}

class FakeStore::Staged final : public StagedRows {
 public:
  explicit Staged(FakeStore* store) : store_(store) {}
  ~Staged() override {
    MutexLock lock(&store_->mu_);
    --store_->staged_;
  }
  std::uint64_t number = 0;
  std::vector<std::pair<Key, std::vector<std::byte>>> rows;
  std::vector<std::uint8_t> stored;

 private:
  FakeStore* const store_;
};

Status FakeStore::Write(std::span<const Key> keys, std::span<const std::byte* const> rows,
                        std::span<const std::uint8_t> stored) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<StagedRows> staged, Stage(keys, rows, stored));
  return Publish(std::move(staged));
}

Result<std::unique_ptr<StagedRows>> FakeStore::Stage(std::span<const Key> keys,
                                                     std::span<const std::byte* const> rows,
                                                     std::span<const std::uint8_t> stored) {
  auto staged = std::make_unique<Staged>(this);
  Status failure;
  {
    MutexLock lock(&mu_);
    ++staged_;
    staged->number = ++stage_number_;
    TERRACE_CHECK(++writes_ == 1);
    TERRACE_CHECK(!keys.empty() && keys.size() == rows.size() && keys.size() == stored.size());
    TERRACE_CHECK(std::unordered_set<Key>(keys.begin(), keys.end()).size() == keys.size());
    while (hold_writes_) {
      ++held_writes_;
      changed_.NotifyAll();
      changed_.Wait(&mu_);
      --held_writes_;
    }
    --writes_;
    if (NextFails() || fail_writes_) {
      failure = fails_for_room ? OutOfRoomError("there is no room, as the test wants")
                               : IoError("write to /ssd.quota fails as the test wants");
    }
  }
  if (!failure.ok()) return failure;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    staged->rows.emplace_back(keys[i], std::vector<std::byte>(rows[i], rows[i] + row_bytes_));
  }
  staged->stored.assign(stored.begin(), stored.end());
  return std::unique_ptr<StagedRows>(std::move(staged));
}

Status FakeStore::Publish(std::unique_ptr<StagedRows> handle) {
  const auto* staged = static_cast<const Staged*>(handle.get());
  MutexLock lock(&mu_);
  TERRACE_CHECK(++publishes_ == 1);
  while (hold_publishes_) {
    ++held_publishes_;
    changed_.NotifyAll();
    changed_.Wait(&mu_);
    --held_publishes_;
  }
  --publishes_;
  TERRACE_CHECK(publish_number_ < staged->number);
  if (fail_publishes_) return IoError("publish fails as the test wants");
  publish_number_ = staged->number;
  std::vector<Key>& keys = write_keys_.emplace_back();
  for (std::size_t i = 0; i < staged->rows.size(); ++i) {
    const auto& [key, row] = staged->rows[i];
    keys.push_back(key);
    TERRACE_CHECK(staged->stored[i] == (rows_.contains(key) ? kStoredKey : kNewKey));
    rows_[key] = row;
  }
  return OkStatus();
}

Status FakeStore::Erase(std::span<const Key> keys) {
  MutexLock lock(&mu_);
  for (const Key key : keys) rows_.erase(key);
  return OkStatus();
}

Result<ManifestReference> FakeStore::Commit(std::uint64_t id) {
  ManifestReference reference;
  reference.id = id;
  return reference;
}
Status FakeStore::Drop(std::uint64_t /*id*/) { return OkStatus(); }

Status FakeStore::ForEachRow(std::uint64_t /*buffer_bytes*/,
                             const std::function<Status(const RowView&)>& visit) {
  MutexLock lock(&mu_);
  for (const auto& [key, row] : rows_) {
    TERRACE_RETURN_IF_ERROR(visit(RowView{.key = key, .row = row}));
  }
  return OkStatus();
}
Status FakeStore::CompactNow() { return OkStatus(); }
StoreStats FakeStore::stats() const { return {}; }

void FakeStore::FailAt(std::int64_t call) {
  MutexLock lock(&mu_);
  fail_at_ = call;
}
bool FakeStore::FaultWasHit() const {
  MutexLock lock(&mu_);
  return fail_at_ < 0;
}
void FakeStore::FailWrites(bool fail) {
  MutexLock lock(&mu_);
  fail_writes_ = fail;
}
void FakeStore::FailPublishes(bool fail) {
  MutexLock lock(&mu_);
  fail_publishes_ = fail;
}
void FakeStore::HoldReads() {
  MutexLock lock(&mu_);
  hold_reads_ = true;
}
void FakeStore::HoldReadsOf(Key key) {
  MutexLock lock(&mu_);
  held_key_ = key;
}
void FakeStore::HoldWrites() {
  MutexLock lock(&mu_);
  hold_writes_ = true;
}
void FakeStore::HoldPublishes() {
  MutexLock lock(&mu_);
  hold_publishes_ = true;
}
void FakeStore::LetReadsGo() {
  MutexLock lock(&mu_);
  hold_reads_ = false;
  held_key_.reset();
  changed_.NotifyAll();
}
void FakeStore::LetGo() {
  MutexLock lock(&mu_);
  hold_publishes_ = false;
  hold_reads_ = false;
  held_key_.reset();
  hold_writes_ = false;
  changed_.NotifyAll();
}
void FakeStore::WaitForHeldRead() {
  MutexLock lock(&mu_);
  while (held_reads_ == 0) changed_.Wait(&mu_);
}
void FakeStore::WaitForReads(std::uint64_t count) {
  MutexLock lock(&mu_);
  while (reads_ended_ < count) changed_.Wait(&mu_);
}
void FakeStore::WaitForHeldWrite() {
  MutexLock lock(&mu_);
  while (held_writes_ == 0) changed_.Wait(&mu_);
}
void FakeStore::WaitForHeldPublish() {
  MutexLock lock(&mu_);
  while (held_publishes_ == 0) changed_.Wait(&mu_);
}
int FakeStore::staged() const {
  MutexLock lock(&mu_);
  return staged_;
}

bool FakeStore::Contains(Key key) const {
  MutexLock lock(&mu_);
  return rows_.contains(key);
}
std::vector<std::byte> FakeStore::Get(Key key) const {
  MutexLock lock(&mu_);
  const auto row = rows_.find(key);
  return row == rows_.end() ? std::vector<std::byte>() : row->second;
}
std::size_t FakeStore::size() const {
  MutexLock lock(&mu_);
  return rows_.size();
}
std::uint64_t FakeStore::calls() const {
  MutexLock lock(&mu_);
  return calls_;
}
std::vector<std::vector<Key>> FakeStore::write_keys() const {
  MutexLock lock(&mu_);
  return write_keys_;
}

std::vector<std::size_t> FakeStore::write_sizes() const {
  std::vector<std::size_t> sizes;
  for (const std::vector<Key>& keys : write_keys()) sizes.push_back(keys.size());
  return sizes;
}

}  // namespace terrace
