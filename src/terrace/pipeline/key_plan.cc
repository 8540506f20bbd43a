#include "terrace/pipeline/key_plan.h"

#include <algorithm>
#include <bit>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/memory.h"

namespace terrace {

// Key -> number, open addressing by the mixed hash, four slots a cache line, in huge pages. A slot
// whose stamp is older than the map's current one is free, so that a map starts anew without being
// cleared.
class KeyPlanner::KeyMap {
 public:
  struct Slot {
    Key key = 0;
    std::uint32_t stamp = 0;  // Of the map when the key came; 0: never used.
    std::uint32_t number = 0;
  };
  static_assert(sizeof(Slot) == 16);

  [[gnu::always_inline]] void Prefetch(std::uint64_t hash) const {
    __builtin_prefetch(&slots()[Home(hash)], 1);
  }

  // The slot of `key`; it is new when its stamp is not `stamp`. REQUIRES: a free slot.
  Slot* Find(Key key, std::uint64_t hash, std::uint32_t stamp) {
    for (std::size_t at = Home(hash);; at = (at + 1) & mask_) {
      Slot& slot = slots()[at];
      if (slot.stamp != stamp || slot.key == key) return &slot;
    }
  }

  // Makes it have `count` slots at least, and keeps those of the stamp. kOutOfMemory: nothing
  // changed.
  Status Reserve(std::uint64_t count, std::uint32_t stamp) {
    const std::uint64_t bytes = BytesAfter(count);
    if (bytes == memory_.size()) return OkStatus();
    TERRACE_ASSIGN_OR_RETURN(HugeBuffer memory, HugeBuffer::Allocate(bytes));
    const HugeBuffer old = std::exchange(memory_, std::move(memory));
    const std::span<const Slot> before(reinterpret_cast<const Slot*>(old.data()),
                                       old.size() / sizeof(Slot));
    mask_ = memory_.size() / sizeof(Slot) - 1;
    for (const Slot& slot : before) {
      if (slot.stamp == stamp) *Find(slot.key, MixKey(slot.key), stamp) = slot;
    }
    return OkStatus();
  }

  // What Reserve makes of it.
  std::uint64_t BytesAfter(std::uint64_t count) const {
    constexpr std::uint64_t kLeast = 4096;  // Slots.
    return std::max(memory_.size(), std::bit_ceil(std::max(count, kLeast)) * sizeof(Slot));
  }

  void Clear() { std::fill_n(slots(), memory_.size() / sizeof(Slot), Slot()); }
  std::uint64_t MemoryBytes() const { return memory_.size(); }

 private:
  Slot* slots() const { return reinterpret_cast<Slot*>(memory_.data()); }
  std::size_t Home(std::uint64_t hash) const { return (hash >> 16) & mask_; }
  HugeBuffer memory_;  // A power of two of slots.
  std::size_t mask_ = 0;
};

// An occurrence goes to the map of its mini-batch, which lies in the second cache; only the first
// of a key there goes on to the map of the set.
struct KeyPlanner::TableMaps {
  KeyMap minibatch;  // Local rows.
  KeyMap set;        // Working rows.
  // Scratch of one mini-batch:
  std::size_t occurrences = 0;
  std::uint32_t key_count = 0;        // Local rows.
  std::vector<Key> keys;              // (local rows, and one more at least)
  std::vector<std::uint32_t> counts;  // (local rows)

  // The number of `key` in the mini-batch; a new one is the next of `count`. Whether a key is new
  // is anyone's guess: without a branch nothing is lost on a wrong one.
  std::uint32_t LocalRow(Key key, std::uint64_t hash, std::uint32_t stamp, std::uint32_t* count) {
    KeyMap::Slot* slot = minibatch.Find(key, hash, stamp);
    const bool fresh = slot->stamp != stamp;
    const std::uint32_t number = fresh ? *count : slot->number;
    *slot = {key, stamp, number};
    keys[*count] = key;
    *count += fresh ? 1 : 0;
    return number;
  }

  // Slots for so many occurrences, at most five sixths of them full, and most often a third.
  static std::uint64_t MinibatchSlots(std::size_t occurrences) {
    return occurrences + occurrences / 5 + 1;
  }
  // Slots for so many keys, at most half of them full.
  static std::uint64_t SetSlots(std::size_t keys) { return 2 * std::uint64_t{keys}; }
};

// With one table every occurrence goes to the same map, which may have left the second cache for a
// while.
void KeyPlanner::FindLocalRowsOfTable(std::span<const Key> keys, std::uint32_t stamp,
                                      TableMaps* maps, std::uint32_t* local_row) {
  constexpr std::size_t kAhead = 16;  // Occurrences.
  std::uint64_t hashes[kAhead];
  std::uint32_t count = 0;
  const auto prefetch = [&](std::size_t k) {
    hashes[k % kAhead] = MixKey(keys[k]);
    maps->minibatch.Prefetch(hashes[k % kAhead]);
  };
  for (std::size_t k = 0; k < std::min(kAhead, keys.size()); ++k) prefetch(k);
  for (std::size_t k = 0; k < keys.size(); ++k) {
    const std::uint64_t hash = hashes[k % kAhead];
    if (k + kAhead < keys.size()) prefetch(k + kAhead);
    local_row[k] = maps->LocalRow(keys[k], hash, stamp, &count);
  }
  maps->key_count = count;
}

KeyPlanner::KeyPlanner(std::vector<PlannedSlot> slots, std::size_t tables,
                       std::uint32_t minibatch_size, std::uint64_t max_bytes)
    : slots_(std::move(slots)),
      tables_(tables),
      minibatch_size_(minibatch_size),
      max_bytes_(max_bytes),
      any_mean_(std::any_of(slots_.begin(), slots_.end(),
                            [](const PlannedSlot& slot) { return slot.mean; })) {
  for (std::size_t t = 0; t < tables; ++t) maps_.push_back(std::make_unique<TableMaps>());
}

KeyPlanner::~KeyPlanner() = default;

std::uint64_t KeyPlanner::MemoryBytes() const {
  std::uint64_t bytes = 0;
  for (const auto& maps : maps_) {
    bytes += maps->minibatch.MemoryBytes() + maps->set.MemoryBytes() +
             maps->keys.capacity() * sizeof(Key) + maps->counts.capacity() * sizeof(std::uint32_t);
  }
  return bytes;
}

Result<std::unique_ptr<WorkItem>> KeyPlanner::Plan(std::shared_ptr<const Batch> batch,
                                                   std::uint32_t first_example,
                                                   std::uint32_t first_minibatch,
                                                   std::span<const std::size_t> max_rows,
                                                   std::uint32_t max_minibatches) {
  TERRACE_CHECK(max_minibatches > 0 && first_example < batch->examples);
  TERRACE_CHECK(batch->slots == slots_.size());
  if (minibatch_stamp_ > 0xf0000000u) {  // Stamps start again before they wrap; sets are fewer.
    for (auto& maps : maps_) {
      maps->minibatch.Clear();
      maps->set.Clear();
    }
    minibatch_stamp_ = set_stamp_ = 0;
  }
  ++set_stamp_;
  std::unique_ptr<WorkItem> item = TakeItem();
  item->minibatch_size = minibatch_size_;
  item->first_example = first_example;
  item->end_example = first_example;
  item->first_minibatch = first_minibatch;
  item->tables.resize(tables_);
  const std::size_t key_count =
      batch->keys.size() - batch->key_begin[std::size_t{first_example} * batch->slots];
  item->local_row.reserve(key_count);
  for (TableWork& table : item->tables) {
    table.row_begin.push_back(0);
    table.occurrence_begin.push_back(0);
  }
  item->batch = std::move(batch);
  // The first mini-batch of an item that resumes inside a mini-batch is shorter: mini-batches are
  // counted from the start of the epoch, and the reader cuts batches at their boundaries.
  while (item->end_example < item->batch->examples && item->minibatches < max_minibatches) {
    const std::uint32_t begin = item->end_example;
    const std::uint32_t end = std::min(begin + minibatch_size_, item->batch->examples);
    CountOccurrences(*item->batch, begin, end);
    if (item->minibatches > 0 && !HasMemoryFor(*item)) break;
    std::uint32_t full_table = 0;
    TERRACE_ASSIGN_OR_RETURN(const bool fits,
                             AddMinibatch(item.get(), begin, end, max_rows, &full_table));
    if (!fits) {
      if (item->minibatches > 0) break;
      return OutOfMemoryError(fmt::format(
          "the distinct rows of one mini-batch of {} examples are more than the {} rows "
          "of table number {} that the memory budget holds",
          end - begin, max_rows[full_table], full_table));
    }
    item->end_example = end;
    ++item->minibatches;
  }
  item->last_of_batch = item->end_example == item->batch->examples;
  return item;
}

void KeyPlanner::CountOccurrences(const Batch& batch, std::uint32_t begin, std::uint32_t end) {
  const std::size_t slots = slots_.size();
  const std::uint32_t* key_begin = batch.key_begin.data() + std::size_t{begin} * slots;
  const std::size_t cells = std::size_t{end - begin} * slots;
  for (auto& maps : maps_) maps->occurrences = 0;
  if (tables_ == 1) {
    maps_[0]->occurrences = key_begin[cells] - key_begin[0];
    return;
  }
  for (std::size_t cell = 0; cell < cells; ++cell) {
    maps_[slots_[cell % slots].table]->occurrences += key_begin[cell + 1] - key_begin[cell];
  }
}

bool KeyPlanner::HasMemoryFor(const WorkItem& item) const {
  std::uint64_t bytes = item.UsedBytes();
  for (std::size_t t = 0; t < tables_; ++t) {
    const TableMaps& maps = *maps_[t];
    bytes +=
        maps.occurrences * kMostOccurrenceBytes +
        maps.minibatch.BytesAfter(TableMaps::MinibatchSlots(maps.occurrences)) +
        maps.set.BytesAfter(TableMaps::SetSlots(item.tables[t].keys.size() + maps.occurrences));
  }
  return bytes <= max_bytes_;
}

std::unique_ptr<WorkItem> KeyPlanner::TakeItem() {
  MutexLock lock(&spare_mu_);
  if (spare_.empty()) return std::make_unique<WorkItem>();
  std::unique_ptr<WorkItem> item = std::move(spare_.back());
  spare_.pop_back();
  return item;
}

void KeyPlanner::Recycle(std::unique_ptr<WorkItem> item) {
  // Given back last, so that the next set takes this item's memory and no fresh one.
  const SetLimiter::Token token = std::move(item->token);
  item->Clear();
  MutexLock lock(&spare_mu_);
  // One is used while one waits: more would only hold memory.
  if (spare_.size() < 2) spare_.push_back(std::move(item));
}

Result<bool> KeyPlanner::AddMinibatch(WorkItem* item, std::uint32_t begin, std::uint32_t end,
                                      std::span<const std::size_t> max_rows,
                                      std::uint32_t* full_table) {
  const Batch& batch = *item->batch;
  std::vector<std::size_t> keys_before;
  std::vector<std::size_t> rows_before;
  ++minibatch_stamp_;
  for (std::size_t t = 0; t < tables_; ++t) {
    TableMaps& maps = *maps_[t];
    keys_before.push_back(item->tables[t].keys.size());
    rows_before.push_back(item->tables[t].rows.size());
    maps.key_count = 0;
    if (maps.keys.size() <= maps.occurrences) maps.keys.resize(maps.occurrences + 1);
    TERRACE_RETURN_IF_ERROR(
        maps.minibatch.Reserve(TableMaps::MinibatchSlots(maps.occurrences), minibatch_stamp_));
  }
  const std::size_t local_before = item->local_row.size();
  FindLocalRows(batch, begin, end, item);
  for (std::uint32_t t = 0; t < tables_; ++t) {
    TERRACE_RETURN_IF_ERROR(FindWorkingRows(maps_[t].get(), &item->tables[t]));
    if (item->tables[t].keys.size() <= max_rows[t]) continue;
    // The keys of this mini-batch stay in the map of a set that ends here.
    for (std::size_t u = 0; u <= t; ++u) {
      item->tables[u].keys.resize(keys_before[u]);
      item->tables[u].rows.resize(rows_before[u]);
    }
    item->local_row.resize(local_before);
    *full_table = t;
    return false;
  }
  Invert(batch, begin, end, item);
  return true;
}

void KeyPlanner::FindLocalRows(const Batch& batch, std::uint32_t begin, std::uint32_t end,
                               WorkItem* item) {
  const std::size_t slots = slots_.size();
  const std::uint32_t* key_begin = batch.key_begin.data() + std::size_t{begin} * slots;
  const std::size_t first = key_begin[0];
  const std::size_t last = batch.key_begin[std::size_t{end} * slots];
  const std::size_t local_at = item->local_row.size();
  item->local_row.resize(local_at + (last - first));
  std::uint32_t* local_row = item->local_row.data() + local_at;
  const std::span<const Key> keys(batch.keys.data() + first, last - first);
  if (tables_ == 1) {
    FindLocalRowsOfTable(keys, minibatch_stamp_, maps_[0].get(), local_row);
    return;
  }
  std::size_t cell = 0;  // example * slots + slot
  for (std::size_t k = 0; k < keys.size(); ++k) {
    while (key_begin[cell + 1] <= first + k) ++cell;
    TableMaps& maps = *maps_[slots_[cell % slots].table];
    local_row[k] = maps.LocalRow(keys[k], MixKey(keys[k]), minibatch_stamp_, &maps.key_count);
  }
}

Status KeyPlanner::FindWorkingRows(TableMaps* maps, TableWork* table) {
  const std::size_t count = maps->key_count;
  const std::size_t known = table->keys.size();
  TERRACE_RETURN_IF_ERROR(maps->set.Reserve(TableMaps::SetSlots(known + count), set_stamp_));
  table->keys.resize(known + count + 1);  // One more, which is written and never read.
  const std::size_t rows = table->rows.size();
  table->rows.resize(rows + count);
  std::size_t next = known;
  constexpr std::size_t kAhead = 16;  // Keys; hides one miss of the map.
  const Key* keys = maps->keys.data();
  std::uint64_t hashes[kAhead];
  auto prefetch = [&](std::size_t k) {
    hashes[k % kAhead] = MixKey(keys[k]);
    maps->set.Prefetch(hashes[k % kAhead]);
  };
  for (std::size_t k = 0; k < std::min(kAhead, count); ++k) prefetch(k);
  for (std::size_t k = 0; k < count; ++k) {
    const std::uint64_t hash = hashes[k % kAhead];
    if (k + kAhead < count) prefetch(k + kAhead);
    KeyMap::Slot* slot = maps->set.Find(keys[k], hash, set_stamp_);
    const bool fresh = slot->stamp != set_stamp_;
    const std::uint32_t number = fresh ? static_cast<std::uint32_t>(next) : slot->number;
    *slot = {keys[k], set_stamp_, number};
    table->keys[next] = keys[k];
    next += fresh ? 1 : 0;
    table->rows[rows + k] = number;
  }
  table->keys.resize(next);
  return OkStatus();
}

void KeyPlanner::Invert(const Batch& batch, std::uint32_t begin, std::uint32_t end,
                        WorkItem* item) {
  const std::size_t slots = slots_.size();
  const std::uint32_t* key_begin = batch.key_begin.data() + std::size_t{begin} * slots;
  const std::size_t first = key_begin[0];
  const std::size_t last = batch.key_begin[std::size_t{end} * slots];
  const std::uint32_t* local_row =
      item->local_row.data() + (item->local_row.size() - (last - first));
  const bool values = any_mean_ || !batch.values.empty();

  // Counting sort by local row; within a row the order of occurrences stays.
  for (std::size_t t = 0; t < tables_; ++t) {
    TableWork& table = item->tables[t];
    maps_[t]->counts.assign(table.rows.size() - table.row_begin.back() + 1, 0);
  }
  if (tables_ == 1) {
    std::uint32_t* counts = maps_[0]->counts.data();
    for (std::size_t i = 0; i < last - first; ++i) ++counts[local_row[i] + 1];
  } else {
    for (std::uint32_t e = 0; e < end - begin; ++e) {
      for (std::size_t s = 0; s < slots; ++s) {
        const std::size_t cell = e * slots + s;
        std::uint32_t* counts = maps_[slots_[s].table]->counts.data();
        for (std::size_t k = key_begin[cell]; k < key_begin[cell + 1]; ++k)
          ++counts[local_row[k - first] + 1];
      }
    }
  }
  for (std::size_t t = 0; t < tables_; ++t) {
    TableWork& table = item->tables[t];
    std::vector<std::uint32_t>& counts = maps_[t]->counts;
    for (std::size_t r = 1; r < counts.size(); ++r) counts[r] += counts[r - 1];
    table.inverse_begin.insert(table.inverse_begin.end(), counts.begin(), counts.end());
    const std::size_t total = table.occurrence_begin.back() + counts.back();
    table.example.resize(total);
    table.input_offset.resize(total);
    if (values) table.value.resize(total);
  }
  std::size_t cell = 0;
  for (std::uint32_t e = 0; e < end - begin; ++e) {
    for (std::size_t s = 0; s < slots; ++s, ++cell) {
      const PlannedSlot& slot = slots_[s];
      TableWork& table = item->tables[slot.table];
      std::uint32_t* next =
          maps_[slot.table]->counts.data();  // Of each row: where its next occurrence goes.
      const std::size_t base = table.occurrence_begin.back();
      const float share =
          slot.mean ? 1.0f / static_cast<float>(key_begin[cell + 1] - key_begin[cell]) : 1.0f;
      for (std::size_t k = key_begin[cell]; k < key_begin[cell + 1]; ++k) {
        const std::size_t at = base + next[local_row[k - first]]++;
        table.example[at] = e;
        table.input_offset[at] = slot.input_offset;
        if (values) table.value[at] = share * (batch.values.empty() ? 1.0f : batch.values[k]);
      }
    }
  }
  for (TableWork& table : item->tables) {
    table.key_end.push_back(static_cast<std::uint32_t>(table.keys.size()));
    table.row_begin.push_back(static_cast<std::uint32_t>(table.rows.size()));
    table.occurrence_begin.push_back(static_cast<std::uint32_t>(table.example.size()));
  }
}

}  // namespace terrace
