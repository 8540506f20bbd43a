#include "terrace/store/testing/store_harness.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "terrace/store/group_block.h"

namespace terrace {

std::vector<std::byte> TestRow(Key key, std::uint64_t generation, std::uint32_t row_bytes) {
  std::vector<std::byte> row(row_bytes);
  for (std::uint32_t i = 0; i < row_bytes; ++i) {
    row[i] =
        static_cast<std::byte>(HashCombine(HashCombine(key, generation), i / 8) >> (8 * (i % 8)));
  }
  return row;
}

StoreHarness::StoreHarness(FileSystem* fs, std::uint64_t quota_bytes, StoreOptions options,
                           Clock* clock)
    : fs_(fs), clock_(clock), quota_(quota_bytes), options_(std::move(options)) {}

StoreOptions StoreHarness::TinyOptions() {
  StoreOptions options;
  options.directory = "/run/rows/ads/shard-0";
  options.table = "ads";
  options.row_bytes = 20;
  options.file_bytes = 64 * 30;
  options.io_buffer_bytes = 64 << 10;
  options.merge_gap_bytes = 4096;
  options.background_compaction = false;
  return options;
}

StoreOptions StoreHarness::TinyGroupOptions() {
  StoreOptions options = TinyOptions();
  options.index = IndexKind::kGroup;
  options.row_bytes = 300;  // 13 to a block.
  options.expected_rows = 200;
  options.file_bytes = 16 << 12;
  return options;
}

Status StoreHarness::Create() {
  TERRACE_ASSIGN_OR_RETURN(store_, Store::Create(fs_, clock_, &quota_, options_));
  return OkStatus();
}

void StoreHarness::ForgetAfter(std::uint64_t id) {
  snapshots_.erase(snapshots_.upper_bound(id), snapshots_.end());
  manifests_.erase(manifests_.upper_bound(id), manifests_.end());
}

Status StoreHarness::Reopen(std::uint64_t id) {
  store_.reset();
  ForgetAfter(id);
  std::vector<ManifestReference> kept;
  for (const auto& [other, reference] : manifests_) kept.push_back(reference);
  TERRACE_ASSIGN_OR_RETURN(store_,
                           Store::Open(fs_, clock_, &quota_, options_, manifests_.at(id), kept));
  model_ = snapshots_.at(id);
  return OkStatus();
}

Status StoreHarness::Write(std::vector<Key> keys) {
  ++generation_;
  // In some order: files of neighbours would become stale all at once.
  std::sort(keys.begin(), keys.end(),
            [](Key a, Key b) { return HashCombine(a, 1) < HashCombine(b, 1); });
  RowMap written;
  std::vector<const std::byte*> rows;
  std::vector<std::uint8_t> stored;
  for (Key key : keys) {
    written[key] = TestRow(key, generation_, options_.row_bytes);
    rows.push_back(written[key].data());
    // A writer does not know of each key that it is there, and now and then of none.
    const std::uint8_t known = model_.contains(key) ? kStoredKey : kNewKey;
    if (generation_ % 4 != 0) stored.push_back(key % 5 != 0 ? known : kUnknownKey);
  }
  TERRACE_RETURN_IF_ERROR(store_->Write(keys, rows, stored));
  for (auto& [key, row] : written) model_[key] = std::move(row);
  return OkStatus();
}

Status StoreHarness::Erase(const std::vector<Key>& keys) {
  TERRACE_RETURN_IF_ERROR(store_->Erase(keys));
  for (Key key : keys) model_.erase(key);
  return OkStatus();
}

Status StoreHarness::Commit() {
  const std::uint64_t id = next_manifest_++;
  TERRACE_ASSIGN_OR_RETURN(manifests_[id], [&]() -> Result<ManifestReference> {
    Result<ManifestReference> reference = store_->Commit(id);
    if (!reference.ok()) manifests_.erase(id);
    return reference;
  }());
  snapshots_[id] = model_;
  return OkStatus();
}

Status StoreHarness::Drop(std::uint64_t id) {
  manifests_.erase(id);
  snapshots_.erase(id);
  return store_->Drop(id);
}

Status StoreHarness::CheckRead(const std::vector<Key>& keys) {
  std::vector<std::byte> memory(keys.size() * options_.row_bytes, std::byte{0xee});
  std::vector<std::byte*> rows;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    rows.push_back(memory.data() + i * options_.row_bytes);
  }
  std::vector<std::uint8_t> found(keys.size(), 2);
  const Status status = store_->Read(keys, rows, found);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto expected = model_.find(keys[i]);
    const bool handed_out = found[i] == 1;
    if (handed_out && (expected == model_.end() ||
                       !std::equal(expected->second.begin(), expected->second.end(), rows[i]))) {
      return InternalError(fmt::format("key {:#x} reads as a row that it never had", keys[i]));
    }
    if (status.ok() && !handed_out && expected != model_.end()) {
      return InternalError(fmt::format("key {:#x} is lost", keys[i]));
    }
    if (status.ok() && !handed_out && rows[i][0] != std::byte{0xee}) {
      return InternalError(fmt::format("absent key {:#x} was given bytes", keys[i]));
    }
  }
  return status;
}

Status StoreHarness::CheckWalk() {
  auto wanted = model_.size();
  std::set<Key> seen;
  TERRACE_RETURN_IF_ERROR(store_->ForEachRow(1 << 20, [&](const RowView& view) -> Status {
    if (!seen.insert(view.key).second) return InternalError("the walk finds a key twice");
    const auto expected = model_.find(view.key);
    if (expected == model_.end() || wanted == 0) {
      return InternalError(fmt::format("the walk finds key {:#x}, which is not there", view.key));
    }
    --wanted;
    if (!std::equal(expected->second.begin(), expected->second.end(), view.row.begin(),
                    view.row.end())) {
      return InternalError(fmt::format("the walk finds another row of key {:#x}", view.key));
    }
    return OkStatus();
  }));
  if (wanted != 0) return InternalError(fmt::format("the walk misses {} rows", wanted));
  return OkStatus();
}

Status StoreHarness::CheckAll() {
  std::vector<Key> keys;
  for (std::uint64_t i = 0; i < key_range; ++i) keys.push_back(KeyAt(i));
  TERRACE_RETURN_IF_ERROR(CheckRead(keys));
  TERRACE_RETURN_IF_ERROR(CheckWalk());
  std::vector<Finding> findings;
  for (const auto& [id, reference] : manifests_) {
    TERRACE_RETURN_IF_ERROR(ScrubManifest(fs_, scrub_options(), reference, &findings));
  }
  if (!findings.empty()) {
    return InternalError(fmt::format("verification finds {} offset {}: {}", findings[0].file,
                                     findings[0].offset, findings[0].what));
  }
  const StoreStats stats = store_->stats();
  if (stats.live_rows != model_.size()) {
    return InternalError(
        fmt::format("the store counts {} rows, not {}", stats.live_rows, model_.size()));
  }
  return OkStatus();
}

ScrubOptions StoreHarness::scrub_options() const {
  const std::uint32_t row_bytes =
      RecordRowBytes(options_.index, options_.row_bytes, options_.group.block_bytes);
  return {options_.directory, RecordLayout::Of(options_.table, options_.shard, row_bytes),
          options_.direct_io};
}

std::vector<Key> StoreHarness::KeysFrom(std::uint64_t begin, std::uint64_t end) const {
  std::vector<Key> keys;
  for (std::uint64_t i = begin; i < end; ++i) keys.push_back(KeyAt(i));
  return keys;
}

std::vector<Key> StoreHarness::RandomKeys(Rng* rng, std::size_t most) const {
  std::set<Key> keys;
  const std::size_t n = 1 + rng->Below(most);
  while (keys.size() < n) keys.insert(KeyAt(rng->Below(key_range)));
  std::vector<Key> shuffled(keys.begin(), keys.end());
  for (std::size_t i = shuffled.size(); i > 1; --i)
    std::swap(shuffled[i - 1], shuffled[rng->Below(i)]);
  return shuffled;
}

}  // namespace terrace
