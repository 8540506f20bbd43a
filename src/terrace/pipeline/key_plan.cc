#include "terrace/pipeline/key_plan.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/memory.h"

namespace terrace {

// Open addressing by the mixed hash. A slot whose stamp is older than the current working set is
// free, so that a new set starts without clearing the map.
class KeyPlanner::KeyMap {
 public:
  struct Slot {
    Key key = 0;
    std::uint32_t stamp = 0;    // Mini-batch of the key's latest occurrence; 0: never used.
    std::uint32_t working = 0;  // Row of the working set.
    std::uint32_t local = 0;    // Row of the mini-batch `stamp`.
    std::uint32_t unused = 0;
  };
  static_assert(sizeof(Slot) == 24);

  KeyMap() : slots_(std::size_t{1} << 12) {}

  void Prefetch(std::uint64_t hash) const { __builtin_prefetch(&slots_[Home(hash)], 1); }

  // The slot of `key`, which is new in the working set when its stamp is below set_stamp.
  Slot* Find(Key key, std::uint64_t hash, std::uint32_t set_stamp) {
    const std::size_t mask = slots_.size() - 1;
    for (std::size_t at = Home(hash);; at = (at + 1) & mask) {
      Slot& slot = slots_[at];
      if (slot.stamp < set_stamp || slot.key == key) return &slot;
    }
  }

  // Makes room for `more` keys beside the `used` ones of the current set, at a load of at most one
  // half.
  void Reserve(std::size_t used, std::size_t more, std::uint32_t set_stamp) {
    const std::size_t size = BytesAfter(used, more) / sizeof(Slot);
    if (size == slots_.size()) return;
    std::vector<Slot> old(size);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.stamp >= set_stamp) *Find(slot.key, MixKey(slot.key), set_stamp) = slot;
    }
  }

  // What Reserve makes of it.
  std::uint64_t BytesAfter(std::size_t used, std::size_t more) const {
    std::size_t size = slots_.size();
    while (size < 2 * (used + more)) size *= 2;
    return size * sizeof(Slot);
  }

  void Clear() { std::fill(slots_.begin(), slots_.end(), Slot()); }
  std::uint64_t MemoryBytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  std::size_t Home(std::uint64_t hash) const { return (hash >> 16) & (slots_.size() - 1); }
  std::vector<Slot> slots_;
};

KeyPlanner::KeyPlanner(std::vector<PlannedSlot> slots, std::size_t tables,
                       std::uint32_t minibatch_size, std::uint64_t max_bytes)
    : slots_(std::move(slots)),
      tables_(tables),
      minibatch_size_(minibatch_size),
      max_bytes_(max_bytes),
      any_mean_(std::any_of(slots_.begin(), slots_.end(),
                            [](const PlannedSlot& slot) { return slot.mean; })),
      counts_(tables) {
  for (std::size_t t = 0; t < tables; ++t) maps_.push_back(std::make_unique<KeyMap>());
}

KeyPlanner::~KeyPlanner() = default;

std::uint64_t KeyPlanner::MemoryBytes() const {
  std::uint64_t bytes = 0;
  for (const auto& map : maps_) bytes += map->MemoryBytes();
  for (const auto& counts : counts_) bytes += counts.capacity() * sizeof(std::uint32_t);
  return bytes;
}

Result<std::unique_ptr<WorkItem>> KeyPlanner::Plan(std::shared_ptr<const Batch> batch,
                                                   std::uint32_t first_example,
                                                   std::uint32_t first_minibatch,
                                                   std::span<const std::size_t> max_rows) {
  TERRACE_CHECK(first_example < batch->examples);
  TERRACE_CHECK(batch->slots == slots_.size());
  if (minibatch_stamp_ > 0xf0000000u) {  // Stamps start again before they wrap.
    for (auto& map : maps_) map->Clear();
    minibatch_stamp_ = 0;
  }
  set_stamp_ = minibatch_stamp_ + 1;
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
  while (item->end_example < item->batch->examples) {
    const std::uint32_t begin = item->end_example;
    const std::uint32_t end = std::min(begin + minibatch_size_, item->batch->examples);
    if (item->minibatches > 0 && !HasMemoryFor(*item, begin, end)) break;
    std::uint32_t full_table = 0;
    if (!AddMinibatch(item.get(), begin, end, max_rows, &full_table)) {
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

bool KeyPlanner::HasMemoryFor(const WorkItem& item, std::uint32_t begin, std::uint32_t end) const {
  const Batch& batch = *item.batch;
  const std::size_t occurrences = batch.key_begin[std::size_t{end} * batch.slots] -
                                  batch.key_begin[std::size_t{begin} * batch.slots];
  std::uint64_t bytes = item.UsedBytes() + occurrences * kMostOccurrenceBytes;
  for (std::size_t t = 0; t < tables_; ++t) {
    bytes += maps_[t]->BytesAfter(item.tables[t].keys.size(), occurrences);
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

bool KeyPlanner::AddMinibatch(WorkItem* item, std::uint32_t begin, std::uint32_t end,
                              std::span<const std::size_t> max_rows, std::uint32_t* full_table) {
  const Batch& batch = *item->batch;
  const std::size_t occurrences = batch.key_begin[std::size_t{end} * batch.slots] -
                                  batch.key_begin[std::size_t{begin} * batch.slots];
  std::vector<std::size_t> keys_before;
  std::vector<std::size_t> rows_before;
  for (std::size_t t = 0; t < tables_; ++t) {
    keys_before.push_back(item->tables[t].keys.size());
    rows_before.push_back(item->tables[t].rows.size());
    maps_[t]->Reserve(keys_before[t], occurrences, set_stamp_);
  }
  const std::size_t local_before = item->local_row.size();
  ++minibatch_stamp_;
  LookUp(batch, begin, end, item);
  for (std::uint32_t t = 0; t < tables_; ++t) {
    if (item->tables[t].keys.size() <= max_rows[t]) continue;
    // The keys of this mini-batch stay in the maps with stamps of a set that ends here.
    for (std::size_t u = 0; u < tables_; ++u) {
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

void KeyPlanner::LookUp(const Batch& batch, std::uint32_t begin, std::uint32_t end,
                        WorkItem* item) {
  const std::size_t slots = slots_.size();
  const std::uint32_t* key_begin = batch.key_begin.data() + std::size_t{begin} * slots;
  const std::size_t first = key_begin[0];
  const std::size_t last = batch.key_begin[std::size_t{end} * slots];
  const std::size_t local_at = item->local_row.size();
  item->local_row.resize(local_at + (last - first));
  std::uint32_t* local_row = item->local_row.data() + local_at;
  constexpr std::size_t kAhead = 16;  // Occurrences; hides one miss of the map.
  const Key* keys = batch.keys.data();
  // With one table every occurrence goes to the same map, and slots need not be followed.
  std::size_t cell = 0;  // example * slots + slot
  std::uint64_t hashes[kAhead];
  auto prefetch = [&](std::size_t k) {
    hashes[k % kAhead] = MixKey(keys[k]);
    if (tables_ == 1) maps_[0]->Prefetch(hashes[k % kAhead]);
  };
  for (std::size_t k = first; k < std::min(first + kAhead, last); ++k) prefetch(k);
  for (std::size_t k = first; k < last; ++k) {
    std::uint32_t t = 0;
    if (tables_ > 1) {
      while (key_begin[cell + 1] <= k) ++cell;
      t = slots_[cell % slots].table;
    }
    const std::uint64_t hash = hashes[k % kAhead];
    if (k + kAhead < last) prefetch(k + kAhead);
    TableWork& table = item->tables[t];
    KeyMap::Slot* slot = maps_[t]->Find(keys[k], hash, set_stamp_);
    if (slot->stamp < set_stamp_) {
      slot->key = keys[k];
      slot->working = static_cast<std::uint32_t>(table.keys.size());
      slot->stamp = set_stamp_ - 1;  // Seen in no mini-batch of this set yet.
      table.keys.push_back(keys[k]);
    }
    if (slot->stamp != minibatch_stamp_) {
      slot->stamp = minibatch_stamp_;
      slot->local = static_cast<std::uint32_t>(table.rows.size() - table.row_begin.back());
      table.rows.push_back(slot->working);
    }
    local_row[k - first] = slot->local;
  }
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
    counts_[t].assign(table.rows.size() - table.row_begin.back() + 1, 0);
  }
  if (tables_ == 1) {
    std::uint32_t* counts = counts_[0].data();
    for (std::size_t i = 0; i < last - first; ++i) ++counts[local_row[i] + 1];
  } else {
    for (std::uint32_t e = 0; e < end - begin; ++e) {
      for (std::size_t s = 0; s < slots; ++s) {
        const std::size_t cell = e * slots + s;
        std::uint32_t* counts = counts_[slots_[s].table].data();
        for (std::size_t k = key_begin[cell]; k < key_begin[cell + 1]; ++k)
          ++counts[local_row[k - first] + 1];
      }
    }
  }
  for (std::size_t t = 0; t < tables_; ++t) {
    TableWork& table = item->tables[t];
    std::vector<std::uint32_t>& counts = counts_[t];
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
          counts_[slot.table].data();  // Of each row: where its next occurrence goes.
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
    table.row_begin.push_back(static_cast<std::uint32_t>(table.rows.size()));
    table.occurrence_begin.push_back(static_cast<std::uint32_t>(table.example.size()));
  }
}

}  // namespace terrace
