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
struct KeyPlanner::TableScratch {
  KeyMap map;                         // Local rows.
  std::size_t occurrences = 0;        // Of the mini-batch.
  std::uint32_t key_count = 0;        // Local rows.
  std::vector<Key> keys;              // (local rows, and one more at least)
  std::vector<std::uint32_t> counts;  // (local rows)

  // The number of `key` in the mini-batch; a new one is the next of `count`. Whether a key is new
  // is anyone's guess: without a branch nothing is lost on a wrong one.
  std::uint32_t LocalRow(Key key, std::uint64_t hash, std::uint32_t stamp, std::uint32_t* count) {
    KeyMap::Slot* slot = map.Find(key, hash, stamp);
    const bool fresh = slot->stamp != stamp;
    const std::uint32_t number = fresh ? *count : slot->number;
    *slot = {key, stamp, number};
    keys[*count] = key;
    *count += fresh ? 1 : 0;
    return number;
  }
  std::uint64_t MapBytesAfter() const { return map.BytesAfter(MapSlots()); }
  std::uint64_t MemoryBytes() const {
    return map.MemoryBytes() + keys.capacity() * sizeof(Key) +
           counts.capacity() * sizeof(std::uint32_t);
  }
  // When the mini-batch has been planned.
  std::uint64_t BytesAfter() const {
    return MapBytesAfter() + std::max(keys.capacity(), occurrences + 1) * sizeof(Key) +
           std::max(counts.capacity(), occurrences + 1) * sizeof(std::uint32_t);
  }
  // For so many occurrences, at most five sixths of them full, and most often a third.
  std::uint64_t MapSlots() const { return occurrences + occurrences / 5 + 1; }
};

// A mini-batch, and what is found of it.
struct KeyPlanner::Lane {
  std::uint32_t begin = 0, end = 0;  // Examples.
  std::uint32_t stamp = 0;
  std::uint32_t number = 0;                 // Of the item's mini-batches.
  std::size_t first_key = 0, last_key = 0;  // Of the batch.
  std::size_t local_at = 0;                 // Of the item's local rows.
  std::vector<TableScratch> tables;         // (tables)
  // Where its parts of a table's lists begin; (tables).
  std::vector<std::size_t> row_at, occurrence_at;
};

namespace {
// Of the map of a set with so many keys, at most half of them full.
std::uint64_t SetSlots(std::size_t keys) { return 2 * std::uint64_t{keys}; }
}  // namespace

// With one table every occurrence goes to the same map, which may have left the second cache for a
// while.
void KeyPlanner::FindLocalRowsOfTable(std::span<const Key> keys, std::uint32_t stamp,
                                      TableScratch* scratch, std::uint32_t* local_row) {
  constexpr std::size_t kAhead = 16;  // Occurrences.
  std::uint64_t hashes[kAhead];
  std::uint32_t count = 0;
  const auto prefetch = [&](std::size_t k) {
    hashes[k % kAhead] = MixKey(keys[k]);
    scratch->map.Prefetch(hashes[k % kAhead]);
  };
  for (std::size_t k = 0; k < std::min(kAhead, keys.size()); ++k) prefetch(k);
  for (std::size_t k = 0; k < keys.size(); ++k) {
    const std::uint64_t hash = hashes[k % kAhead];
    if (k + kAhead < keys.size()) prefetch(k + kAhead);
    local_row[k] = scratch->LocalRow(keys[k], hash, stamp, &count);
  }
  scratch->key_count = count;
}

KeyPlanner::KeyPlanner(std::vector<PlannedSlot> slots, std::size_t tables,
                       std::uint32_t minibatch_size, std::uint64_t max_bytes, PlanThreads threads)
    : slots_(std::move(slots)),
      tables_(tables),
      minibatch_size_(minibatch_size),
      max_bytes_(max_bytes),
      max_lane_bytes_(threads.max_bytes),
      any_mean_(std::any_of(slots_.begin(), slots_.end(),
                            [](const PlannedSlot& slot) { return slot.mean; })) {
  TERRACE_CHECK(threads.count > 0);
  for (std::size_t t = 0; t < tables; ++t) set_maps_.push_back(std::make_unique<KeyMap>());
  for (int i = 0; i < threads.count; ++i) {
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->tables = std::vector<TableScratch>(tables);
    lanes_.back()->row_at.resize(tables);
    lanes_.back()->occurrence_at.resize(tables);
  }
  if (threads.count > 1) {
    workers_ = std::make_unique<WorkerGroup>("plan-", threads.count, std::move(threads.on_start),
                                             ThreadPriority::kYielding);
  }
}

KeyPlanner::~KeyPlanner() = default;

std::uint64_t KeyPlanner::MemoryBytes() const {
  std::uint64_t bytes = 0;
  for (const auto& set : set_maps_) bytes += set->MemoryBytes();
  for (const auto& lane : lanes_) {
    for (const TableScratch& scratch : lane->tables) bytes += scratch.MemoryBytes();
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
    for (auto& set : set_maps_) set->Clear();
    for (auto& lane : lanes_) {
      for (TableScratch& scratch : lane->tables) scratch.map.Clear();
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
  const std::uint32_t examples = batch->examples - first_example;
  const std::uint32_t minibatches = std::min(
      max_minibatches, examples / minibatch_size_ + (examples % minibatch_size_ > 0 ? 1 : 0));
  for (TableWork& table : item->tables) {
    table.key_end.reserve(minibatches);
    table.row_begin.reserve(minibatches + 1);
    table.occurrence_begin.reserve(minibatches + 1);
    table.row_begin.push_back(0);
    table.occurrence_begin.push_back(0);
  }
  item->batch = std::move(batch);
  while (item->end_example < item->batch->examples && item->minibatches < max_minibatches) {
    TERRACE_ASSIGN_OR_RETURN(const std::size_t lanes, FillLanes(*item, max_minibatches));
    if (lanes == 0) break;
    std::uint32_t full_table = 0;
    TERRACE_ASSIGN_OR_RETURN(const std::size_t added,
                             AddMinibatches(item.get(), lanes, max_rows, &full_table));
    if (added == lanes) continue;
    if (item->minibatches > 0) break;
    return OutOfMemoryError(
        fmt::format("the distinct rows of one mini-batch of {} examples are more than the {} rows "
                    "of table number {} that the memory budget holds",
                    lanes_[0]->end - lanes_[0]->begin, max_rows[full_table], full_table));
  }
  item->last_of_batch = item->end_example == item->batch->examples;
  return item;
}

Result<std::size_t> KeyPlanner::FillLanes(const WorkItem& item, std::uint32_t max_minibatches) {
  const Batch& batch = *item.batch;
  const std::size_t slots = slots_.size();
  std::uint32_t begin = item.end_example;
  std::size_t lanes = 0;
  // The first mini-batch of an item that resumes inside a mini-batch is shorter: mini-batches are
  // counted from the start of the epoch, and the reader cuts batches at their boundaries.
  while (lanes < lanes_.size() && begin < batch.examples &&
         item.minibatches + lanes < max_minibatches) {
    Lane& lane = *lanes_[lanes];
    lane.begin = begin;
    lane.end = std::min(begin + minibatch_size_, batch.examples);
    lane.first_key = batch.key_begin[std::size_t{lane.begin} * slots];
    lane.last_key = batch.key_begin[std::size_t{lane.end} * slots];
    CountOccurrences(batch, &lane);
    if (lanes > 0 && !MayUse(lanes + 1)) break;
    if (item.minibatches + lanes > 0 && !HasMemoryFor(item, lanes + 1)) break;
    lane.stamp = ++minibatch_stamp_;
    for (TableScratch& scratch : lane.tables) {
      scratch.key_count = 0;
      if (scratch.keys.size() <= scratch.occurrences) {
        scratch.keys.reserve(scratch.occurrences + 1);  // No more.
        scratch.keys.resize(scratch.occurrences + 1);
      }
      TERRACE_RETURN_IF_ERROR(scratch.map.Reserve(scratch.MapSlots(), lane.stamp));
    }
    begin = lane.end;
    ++lanes;
  }
  return lanes;
}

void KeyPlanner::CountOccurrences(const Batch& batch, Lane* lane) const {
  if (tables_ == 1) {
    lane->tables[0].occurrences = lane->last_key - lane->first_key;
    return;
  }
  for (TableScratch& scratch : lane->tables) scratch.occurrences = 0;
  const std::size_t slots = slots_.size();
  const std::uint32_t* key_begin = batch.key_begin.data() + std::size_t{lane->begin} * slots;
  const std::size_t cells = std::size_t{lane->end - lane->begin} * slots;
  for (std::size_t cell = 0; cell < cells; ++cell) {
    lane->tables[slots_[cell % slots].table].occurrences += key_begin[cell + 1] - key_begin[cell];
  }
}

bool KeyPlanner::MayUse(std::size_t lanes) const {
  // Below, threads would take longer to wake than to plan.
  constexpr std::size_t kLeastKeys = 4096;
  if (lanes_[0]->last_key - lanes_[0]->first_key < kLeastKeys) return false;
  std::uint64_t bytes = 0;
  for (std::size_t i = 1; i < lanes_.size(); ++i) {
    for (const TableScratch& scratch : lanes_[i]->tables) {
      bytes += i < lanes ? scratch.BytesAfter() : scratch.MemoryBytes();
    }
  }
  return bytes <= max_lane_bytes_;
}

bool KeyPlanner::HasMemoryFor(const WorkItem& item, std::size_t lanes) const {
  std::uint64_t bytes = item.UsedBytes();
  for (std::size_t t = 0; t < tables_; ++t) {
    std::uint64_t occurrences = 0, map_bytes = 0;
    for (std::size_t i = 0; i < lanes; ++i) {
      occurrences += lanes_[i]->tables[t].occurrences;
      map_bytes = std::max(map_bytes, lanes_[i]->tables[t].MapBytesAfter());
    }
    bytes += lanes * kMinibatchBytes + occurrences * kMostOccurrenceBytes + map_bytes +
             set_maps_[t]->BytesAfter(SetSlots(item.tables[t].keys.size() + occurrences));
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

void KeyPlanner::OnLanes(std::size_t lanes, const std::function<void(Lane*)>& task) {
  if (lanes == 1) return task(lanes_[0].get());
  workers_->Run(static_cast<int>(lanes),
                [&](int lane) { task(lanes_[static_cast<std::size_t>(lane)].get()); });
}

Result<std::size_t> KeyPlanner::AddMinibatches(WorkItem* item, std::size_t lanes,
                                               std::span<const std::size_t> max_rows,
                                               std::uint32_t* full_table) {
  const Batch& batch = *item->batch;
  for (std::size_t i = 0; i < lanes; ++i) {
    Lane& lane = *lanes_[i];
    lane.local_at = item->local_row.size();
    item->local_row.resize(lane.local_at + (lane.last_key - lane.first_key));
  }
  OnLanes(lanes,
          [&](Lane* lane) { FindLocalRows(batch, lane, item->local_row.data() + lane->local_at); });
  std::size_t added = 0;
  bool fits = true;
  for (; added < lanes && fits; added += fits ? 1 : 0) {
    Lane& lane = *lanes_[added];
    std::vector<std::size_t> keys_before;
    for (std::uint32_t t = 0; t < tables_ && fits; ++t) {
      TableWork& table = item->tables[t];
      keys_before.push_back(table.keys.size());
      lane.row_at[t] = table.rows.size();
      lane.occurrence_at[t] = table.occurrence_begin.back();
      TERRACE_RETURN_IF_ERROR(FindWorkingRows(lane.tables[t], set_maps_[t].get(), &table));
      fits = table.keys.size() <= max_rows[t];
      if (!fits) *full_table = t;
    }
    if (!fits) {
      // The keys of this mini-batch stay in the map of a set that ends here.
      for (std::size_t u = 0; u < keys_before.size(); ++u) {
        item->tables[u].keys.resize(keys_before[u]);
        item->tables[u].rows.resize(lane.row_at[u]);
      }
      item->local_row.resize(lane.local_at);
      break;
    }
    for (std::uint32_t t = 0; t < tables_; ++t) {
      TableWork& table = item->tables[t];
      const std::size_t end = lane.occurrence_at[t] + lane.tables[t].occurrences;
      table.key_end.push_back(static_cast<std::uint32_t>(table.keys.size()));
      table.row_begin.push_back(static_cast<std::uint32_t>(table.rows.size()));
      table.occurrence_begin.push_back(static_cast<std::uint32_t>(end));
    }
    item->end_example = lane.end;
    lane.number = item->minibatches++;
  }
  if (added == 0) return added;
  const bool values = any_mean_ || !batch.values.empty();
  for (TableWork& table : item->tables) {
    table.inverse_begin.resize(table.rows.size() + item->minibatches);
    table.example.resize(table.occurrence_begin.back());
    table.input_offset.resize(table.occurrence_begin.back());
    if (values) table.value.resize(table.occurrence_begin.back());
  }
  OnLanes(added, [&](Lane* lane) { Invert(lane, item); });
  return added;
}

void KeyPlanner::FindLocalRows(const Batch& batch, Lane* lane, std::uint32_t* local_row) const {
  const std::span<const Key> keys(batch.keys.data() + lane->first_key,
                                  lane->last_key - lane->first_key);
  if (tables_ == 1) {
    FindLocalRowsOfTable(keys, lane->stamp, &lane->tables[0], local_row);
    return;
  }
  const std::size_t slots = slots_.size();
  const std::uint32_t* key_begin = batch.key_begin.data() + std::size_t{lane->begin} * slots;
  std::size_t cell = 0;  // example * slots + slot
  for (std::size_t k = 0; k < keys.size(); ++k) {
    while (key_begin[cell + 1] <= lane->first_key + k) ++cell;
    TableScratch& scratch = lane->tables[slots_[cell % slots].table];
    local_row[k] = scratch.LocalRow(keys[k], MixKey(keys[k]), lane->stamp, &scratch.key_count);
  }
}

Status KeyPlanner::FindWorkingRows(const TableScratch& scratch, KeyMap* set,
                                   TableWork* table) const {
  const std::size_t count = scratch.key_count;
  const std::size_t known = table->keys.size();
  TERRACE_RETURN_IF_ERROR(set->Reserve(SetSlots(known + count), set_stamp_));
  table->keys.resize(known + count + 1);  // One more, which is written and never read.
  const std::size_t rows = table->rows.size();
  table->rows.resize(rows + count);
  std::size_t next = known;
  constexpr std::size_t kAhead = 16;  // Keys; hides one miss of the map.
  const Key* keys = scratch.keys.data();
  std::uint64_t hashes[kAhead];
  auto prefetch = [&](std::size_t k) {
    hashes[k % kAhead] = MixKey(keys[k]);
    set->Prefetch(hashes[k % kAhead]);
  };
  for (std::size_t k = 0; k < std::min(kAhead, count); ++k) prefetch(k);
  for (std::size_t k = 0; k < count; ++k) {
    const std::uint64_t hash = hashes[k % kAhead];
    if (k + kAhead < count) prefetch(k + kAhead);
    KeyMap::Slot* slot = set->Find(keys[k], hash, set_stamp_);
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

void KeyPlanner::Invert(Lane* lane, WorkItem* item) const {
  const Batch& batch = *item->batch;
  const std::size_t slots = slots_.size();
  const std::uint32_t* key_begin = batch.key_begin.data() + std::size_t{lane->begin} * slots;
  const std::size_t first = lane->first_key, last = lane->last_key;
  const std::uint32_t examples = lane->end - lane->begin;
  const std::uint32_t* local_row = item->local_row.data() + lane->local_at;
  const bool values = any_mean_ || !batch.values.empty();

  // Counting sort by local row; within a row the order of occurrences stays.
  for (TableScratch& scratch : lane->tables) scratch.counts.assign(scratch.key_count + 1, 0);
  if (tables_ == 1) {
    std::uint32_t* counts = lane->tables[0].counts.data();
    for (std::size_t i = 0; i < last - first; ++i) ++counts[local_row[i] + 1];
  } else {
    for (std::uint32_t e = 0; e < examples; ++e) {
      for (std::size_t s = 0; s < slots; ++s) {
        const std::size_t cell = e * slots + s;
        std::uint32_t* counts = lane->tables[slots_[s].table].counts.data();
        for (std::size_t k = key_begin[cell]; k < key_begin[cell + 1]; ++k)
          ++counts[local_row[k - first] + 1];
      }
    }
  }
  for (std::size_t t = 0; t < tables_; ++t) {
    std::vector<std::uint32_t>& counts = lane->tables[t].counts;
    for (std::size_t r = 1; r < counts.size(); ++r) counts[r] += counts[r - 1];
    std::copy(counts.begin(), counts.end(),
              item->tables[t].inverse_begin.begin() +
                  static_cast<std::ptrdiff_t>(lane->row_at[t] + lane->number));
  }
  std::size_t cell = 0;
  for (std::uint32_t e = 0; e < examples; ++e) {
    for (std::size_t s = 0; s < slots; ++s, ++cell) {
      const PlannedSlot& slot = slots_[s];
      TableWork& table = item->tables[slot.table];
      // Of each row: where its next occurrence goes.
      std::uint32_t* next = lane->tables[slot.table].counts.data();
      const std::size_t base = lane->occurrence_at[slot.table];
      const float keys =
          slot.mean ? static_cast<float>(key_begin[cell + 1] - key_begin[cell]) : 1.0f;
      for (std::size_t k = key_begin[cell]; k < key_begin[cell + 1]; ++k) {
        const std::size_t at = base + next[local_row[k - first]]++;
        table.example[at] = e;
        table.input_offset[at] = slot.input_offset;
        if (values) table.value[at] = (batch.values.empty() ? 1.0f : batch.values[k]) / keys;
      }
    }
  }
}

}  // namespace terrace
