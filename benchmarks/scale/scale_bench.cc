// Rates against the number of rows, from a million on to what disk and memory bear: rows of a set
// length are made by the cache over its stores within a memory budget, then pulled and pushed in
// batches as training does, uniform and by a power law, then found again by a restart. Every row
// that is pulled is checked. A step that does not fit is not begun, and the reason is said.
//
//   scale_bench [--tiny] [--folder F] [--index key|group] [--budget-mib N] [--first N] [--most N]
//               [--row-bytes N] [--batch N] [--batches N] [--shards N] [--read-threads N]
//               [--restarts N] [--seed N]
//
// Figures are medians (least..most) of n samples: of tenths of the load, of batches, of restarts.
// The whole load, its commit included, is one figure.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/testing/bench_keys.h"
#include "terrace/base/testing/bench_spread.h"
#include "terrace/base/units.h"
#include "terrace/cache/row_cache.h"
#include "terrace/data/click_log_generator.h"
#include "terrace/io/file_system.h"
#include "terrace/store/group_block.h"
#include "terrace/store/read_cost.h"
#include "terrace/store/store.h"
#include "terrace/store/testing/bench_disk.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr double kZipf = 1.05;
// What a key, or a block of rows, takes of the index at most (docs/decisions/key-index.md).
constexpr std::uint64_t kIndexBytesPerEntry = 9;
constexpr std::uint64_t kProcessBytes = 16 * kMiB;  // Code, stacks, the allocator.
constexpr std::uint64_t kListBytesPerKey = 128;     // Of a batch: the bench's lists and the tiers'.
constexpr std::uint64_t kIoBufferBytes = 8 * kMiB;
constexpr std::uint32_t kLeastRowBytes = 16;

struct Settings {
  std::string folder = ".";
  std::string index = "key";
  std::uint64_t budget_mib = 8192;
  std::uint64_t first = 1'000'000;
  std::uint64_t most = 500'000'000;
  std::uint32_t row_bytes = 48;
  std::size_t batch = 200'000;
  std::uint64_t batches = 30;  // Of each kind; the first third is not measured.
  std::uint64_t shards = 1;
  std::uint64_t read_threads = 1;  // Of a shard; a restart has no others.
  std::uint64_t restarts = 5;
  std::uint64_t seed = 0;

  IndexKind index_kind() const { return index == "group" ? IndexKind::kGroup : IndexKind::kKey; }
};

// A row tells its key, how often it was trained, and its key again at its end.
void MakeRow(Key key, std::uint32_t row_bytes, std::byte* row) {
  std::memset(row, 0, row_bytes);
  std::memcpy(row, &key, sizeof key);
  std::memcpy(row + row_bytes - 4, &key, 4);
}
bool IsRow(Key key, std::uint32_t row_bytes, const std::byte* row) {
  return std::memcmp(row, &key, sizeof key) == 0 && std::memcmp(row + row_bytes - 4, &key, 4) == 0;
}
void TrainRow(std::byte* row) {
  std::uint32_t times;
  std::memcpy(&times, row + 8, sizeof times);
  ++times;
  std::memcpy(row + 8, &times, sizeof times);
}

// What one number of rows came to, rates in rows a second.
struct Step {
  std::uint64_t rows = 0;
  double load = 0;       // Of the whole.
  Spread load_parts;     // Without the commit.
  Spread uniform, zipf;  // Pulled, trained and pushed.
  Spread open;
  double open_share = 0;                   // Of the disk's sequential rate.
  double index_bytes = 0, disk_bytes = 0;  // A row, after the load.
};

std::uint64_t AvailableMemory() {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return 0;
  char line[256];
  unsigned long long kib = 0;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
  }
  std::fclose(file);
  return kib * 1024;
}

class Scale {
 public:
  Scale(const Settings& settings, std::uint64_t rows)
      : settings_(settings), rows_(rows), keys_(settings.seed), rng_(settings.seed) {}

  // Why these rows can't be measured here; empty: they can.
  Result<std::string> WhyNot() const;
  Result<Step> Run();

 private:
  bool by_group() const { return settings_.index_kind() == IndexKind::kGroup; }
  std::uint64_t RowsOfShard() const { return rows_ / settings_.shards + 1; }
  // Of a shard: records, rows or blocks of them.
  std::uint64_t RecordsOfShard() const {
    // One group in five takes a second block, or fewer do.
    return by_group() ? GroupLayout::Of(settings_.row_bytes).GroupsFor(RowsOfShard()) / 5 * 6 + 1
                      : RowsOfShard();
  }
  std::uint64_t RecordBytes() const {
    return (RecordRowBytes(settings_.index_kind(), settings_.row_bytes, 0) + 7) / 8 * 8 + 24 + 16;
  }
  std::uint64_t IndexBytes() const {
    const std::uint64_t entries = RecordsOfShard() * kIndexBytesPerEntry;
    return by_group()
               ? entries + Store::GroupIndexBytes(settings_.row_bytes, GroupShape(), RowsOfShard())
               : entries;
  }
  std::uint64_t FixedBytes() const {
    const std::uint64_t buffers =
        3 * kIoBufferBytes +
        Store::FurtherBufferBytes(settings_.index_kind(), settings_.row_bytes, GroupShape());
    return kProcessBytes + (IndexBytes() + buffers) * settings_.shards +
           kListBytesPerKey * settings_.batch;
  }
  std::string Directory(std::uint64_t shard) const {
    return JoinPath(settings_.folder, "scale_bench.rows/shard-" + std::to_string(shard));
  }
  // Stores as the last commit left them, new ones before the first, under a cache of their own.
  Status Open();
  Status Load(Step* step);
  Status TrainBatches(const char* name, bool zipf, Spread* rates);
  std::vector<Key> DrawBatch(bool zipf);
  Status Commit();
  Status Restart(Step* step);
  // Bytes a second of the stores' own files, past the page cache; 0 where they are too small.
  Result<double> SequentialRate();
  StoreStats Stats() const {
    StoreStats stats;
    for (const auto& store : stores_) stats += store->stats();
    return stats;
  }

  const Settings settings_;
  const std::uint64_t rows_;
  const BenchKeys keys_;
  FileSystem* const fs_ = FileSystem::Posix();
  Rng rng_;
  DiskQuota quota_{std::uint64_t{1} << 50};
  ReadCost cost_;
  std::vector<std::unique_ptr<Store>> stores_;
  std::unique_ptr<RowCache> cache_;
  std::vector<ManifestReference> manifests_;  // (shards) Of the last commit.
  std::uint64_t commits_ = 0;
};

Result<std::string> Scale::WhyNot() const {
  const std::uint64_t budget = settings_.budget_mib * kMiB;
  // A batch and its next, with what the cache keeps of each row.
  const std::uint64_t least = 3 * settings_.batch * (settings_.row_bytes + 64) + 8 * kMiB;
  if (FixedBytes() + least > budget) {
    return "the index and buffers of so many rows take " + FormatBytes(FixedBytes()) +
           " and a cache at least " + FormatBytes(least) + ", more than the budget of " +
           FormatBytes(budget);
  }
  const std::uint64_t memory = AvailableMemory();
  if (memory < budget + budget / 8) {
    return "the budget of " + FormatBytes(budget) + " wants an eighth more, and " +
           FormatBytes(memory) + " of memory are free";
  }
  // What batches write comes on top: moved once more by compaction while a commit holds what was
  // there before, as everything is when a third of it is stale. A tenth is left to others.
  TERRACE_ASSIGN_OR_RETURN(const DiskSpace disk, fs_->Space(settings_.folder));
  const std::uint64_t written = 2 * settings_.batches * settings_.batch;
  const std::uint64_t records = RecordsOfShard() * settings_.shards;
  const std::uint64_t wanted =
      (records + std::min(2 * records, 6 * written)) * RecordBytes() + 256 * kMiB;
  if (disk.free_bytes / 10 * 9 < wanted) {
    return "they take up to " + FormatBytes(wanted) + " of the disk, and " +
           FormatBytes(disk.free_bytes) + " are free";
  }
  return std::string();
}

Status Scale::Open() {
  cache_.reset();
  stores_.clear();
  std::vector<Store*> borrowed;
  for (std::uint64_t shard = 0; shard < settings_.shards; ++shard) {
    StoreOptions options;
    options.directory = Directory(shard);
    options.table = "scale";
    options.shard = static_cast<std::uint32_t>(shard);
    options.row_bytes = settings_.row_bytes;
    options.index = settings_.index_kind();
    options.expected_rows = RowsOfShard();
    options.io_buffer_bytes = kIoBufferBytes;
    options.read_threads = static_cast<int>(settings_.read_threads);
    options.merge_gap_bytes = cost_.MergeGapBytes();
    if (commits_ == 0) {
      TERRACE_ASSIGN_OR_RETURN(auto store, Store::Create(fs_, Clock::Real(), &quota_, options));
      stores_.push_back(std::move(store));
    } else {
      const ManifestReference& manifest = manifests_[shard];
      TERRACE_ASSIGN_OR_RETURN(
          auto store, Store::Open(fs_, Clock::Real(), &quota_, options, manifest, {&manifest, 1}));
      stores_.push_back(std::move(store));
    }
    borrowed.push_back(stores_.back().get());
  }
  RowCacheOptions options;
  options.row_bytes = settings_.row_bytes;
  options.capacity_bytes = settings_.budget_mib * kMiB - FixedBytes();
  options.flush_bytes = RowCacheOptions::FlushBytesFor(options.capacity_bytes);
  options.create_row = [bytes = settings_.row_bytes](Key key, std::byte* row) {
    MakeRow(key, bytes, row);
  };
  TERRACE_ASSIGN_OR_RETURN(cache_, RowCache::Create(options, borrowed));
  return OkStatus();
}

Status Scale::Load(Step* step) {
  const double start = Clock::Real()->MonotonicSeconds();
  PartRates parts(rows_, start);
  std::vector<Key> keys;
  for (std::uint64_t row = 0; row < rows_;) {
    keys.clear();
    for (; keys.size() < settings_.batch && row < rows_; ++row) keys.push_back(keys_.At(row));
    TERRACE_ASSIGN_OR_RETURN(PinnedRows pinned, cache_->Pin(keys));
    for (std::size_t w = 0; w < keys.size(); ++w) TrainRow(pinned.row(w));
    pinned.MarkDirty(0, keys.size());
    parts.Done(row, Clock::Real()->MonotonicSeconds());
  }
  const double filled = Clock::Real()->MonotonicSeconds();
  TERRACE_RETURN_IF_ERROR(Commit());
  const double end = Clock::Real()->MonotonicSeconds();
  const StoreStats stats = Stats();
  if (stats.live_rows != rows_) return InternalError("rows are missing after the load");
  const auto rows = static_cast<double>(rows_);
  step->load = rows / (end - start);
  step->load_parts = SpreadOf(parts.rates());
  step->index_bytes = static_cast<double>(stats.index_bytes) / rows;
  step->disk_bytes = static_cast<double>(stats.disk_bytes) / rows;
  std::printf(
      "  load     %7.3f M rows/s with the commit of %.1f s, before it %s; %.2f GB/s written, %.0f "
      "bytes read and %.0f written a row; on disk %.1f bytes a row, in the index %.2f; n %zu\n",
      step->load * 1e-6, end - filled, step->load_parts.Text(3, 1e-6).c_str(),
      static_cast<double>(stats.write_bytes) / (end - start) * 1e-9,
      static_cast<double>(stats.read_bytes) / rows, static_cast<double>(stats.write_bytes) / rows,
      step->disk_bytes, step->index_bytes, step->load_parts.samples);
  std::fflush(stdout);
  return OkStatus();
}

std::vector<Key> Scale::DrawBatch(bool zipf) {
  std::vector<std::uint64_t> places(settings_.batch);
  for (std::uint64_t& place : places) place = zipf ? rng_.Next() : rng_.Below(rows_);
  if (zipf) {
    const std::vector<std::uint64_t> hashes = places;
    ZipfSampler(rows_, kZipf).Sample(hashes.data(), hashes.size(), places.data());
    // Frequent rows do not lie side by side, nor were they made first.
    for (std::uint64_t& place : places) place = MixKey(place) % rows_;
  }
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  std::vector<Key> keys;
  for (const std::uint64_t place : places) keys.push_back(keys_.At(place));
  return keys;
}

Status Scale::TrainBatches(const char* name, bool zipf, Spread* rates) {
  std::vector<double> all, pulls;
  StoreStats stores_before;
  RowCacheStats cache_before;
  std::uint64_t measured = 0;
  double seconds = 0;
  for (std::uint64_t b = 0; b < settings_.batches; ++b) {
    const std::vector<Key> keys = DrawBatch(zipf);
    const bool warm = b >= settings_.batches / 3;
    if (b == settings_.batches / 3) {
      stores_before = Stats();
      cache_before = cache_->stats();
    }
    const double start = Clock::Real()->MonotonicSeconds();
    TERRACE_ASSIGN_OR_RETURN(PinnedRows pinned, cache_->Pin(keys));
    const double pulled = Clock::Real()->MonotonicSeconds();
    std::size_t wrong = 0;
    for (std::size_t w = 0; w < keys.size(); ++w) {
      wrong += IsRow(keys[w], settings_.row_bytes, pinned.row(w)) ? 0 : 1;
      TrainRow(pinned.row(w));
    }
    pinned.MarkDirty(0, keys.size());
    pinned.Release();
    const double end = Clock::Real()->MonotonicSeconds();
    if (wrong > 0) return InternalError(std::to_string(wrong) + " rows are wrong");
    if (!warm) continue;
    all.push_back(static_cast<double>(keys.size()) / (end - start));
    pulls.push_back(static_cast<double>(keys.size()) / (pulled - start));
    measured += keys.size();
    seconds += end - start;
  }
  for (const auto& store : stores_) TERRACE_RETURN_IF_ERROR(store->background_status());
  TERRACE_RETURN_IF_ERROR(cache_->background_status());
  const StoreStats stores = Stats();
  const RowCacheStats cache = cache_->stats();
  if (cache.created != cache_before.created) return InternalError("a stored row was made anew");
  *rates = SpreadOf(all);
  const Spread pull = SpreadOf(pulls);
  const auto keys = static_cast<double>(measured);
  const auto bytes = static_cast<double>(stores.read_bytes - stores_before.read_bytes);
  const auto requests = static_cast<double>(stores.read_requests - stores_before.read_requests);
  std::printf(
      "  %-8s %s M rows/s, pull alone %s; %.1f %% hits, %.0f bytes read in %.2f requests and %.0f "
      "written a row; the disk charges %.0f %% of the time for the reads; n %zu\n",
      name, rates->Text(3, 1e-6).c_str(), pull.Text(3, 1e-6).c_str(),
      100 * static_cast<double>(cache.hits - cache_before.hits) / keys, bytes / keys,
      requests / keys, static_cast<double>(stores.write_bytes - stores_before.write_bytes) / keys,
      100 * cost_.Seconds(requests, bytes) / seconds, rates->samples);
  std::fflush(stdout);
  return OkStatus();
}

Status Scale::Commit() {
  // As before a checkpoint of training: by group few rows make new blocks.
  const std::uint64_t unstored = cache_->stats().unstored_rows;
  for (const auto& store : stores_) {
    store->ExpectRows(store->in_blocks() ? 0 : unstored / stores_.size());
  }
  TERRACE_RETURN_IF_ERROR(cache_->FlushDirty());
  ++commits_;
  manifests_.clear();
  for (const auto& store : stores_) {
    TERRACE_ASSIGN_OR_RETURN(manifests_.emplace_back(), store->Commit(commits_));
    TERRACE_RETURN_IF_ERROR(store->Drop(commits_ - 1));
  }
  return OkStatus();
}

Result<double> Scale::SequentialRate() {
  std::vector<std::string> directories;
  for (std::uint64_t shard = 0; shard < settings_.shards; ++shard) {
    directories.push_back(Directory(shard));
  }
  ReadCost none;
  none.bytes_per_second = 0;
  TERRACE_ASSIGN_OR_RETURN(const ReadCost cost,
                           MeasureStoreReads(fs_, directories, {}, kIoBufferBytes, none));
  return cost.bytes_per_second;
}

Status Scale::Restart(Step* step) {
  TERRACE_RETURN_IF_ERROR(Commit());
  std::vector<double> seconds, rates, shares, disk;
  std::uint64_t bytes = 0;
  for (std::uint64_t repeat = 0; repeat < settings_.restarts; ++repeat) {
    cache_.reset();
    stores_.clear();
    TERRACE_ASSIGN_OR_RETURN(const double rate, SequentialRate());
    disk.push_back(rate);
    const double start = Clock::Real()->MonotonicSeconds();
    TERRACE_RETURN_IF_ERROR(Open());
    seconds.push_back(Clock::Real()->MonotonicSeconds() - start);
    const StoreStats stats = Stats();
    if (stats.live_rows != rows_) return InternalError("rows are lost by the restart");
    bytes = stats.read_bytes;
    rates.push_back(static_cast<double>(rows_) / seconds.back());
    shares.push_back(rate > 0 ? static_cast<double>(bytes) / seconds.back() / rate : 0);
  }
  step->open = SpreadOf(rates);
  const Spread share = SpreadOf(shares);
  step->open_share = share.median;
  std::printf(
      "  restart  %s M rows/s, %s s, %.1f bytes read a row; %s %% of the disk's sequential %.2f "
      "GB/s; n %zu\n",
      step->open.Text(3, 1e-6).c_str(), SpreadOf(seconds).Text(3).c_str(),
      static_cast<double>(bytes) / static_cast<double>(rows_), share.Text(0, 100).c_str(),
      SpreadOf(disk).median * 1e-9, share.samples);
  // What was found is what was written.
  const std::vector<Key> keys = DrawBatch(false);
  TERRACE_ASSIGN_OR_RETURN(PinnedRows pinned, cache_->Pin(keys));
  for (std::size_t w = 0; w < keys.size(); ++w) {
    if (!IsRow(keys[w], settings_.row_bytes, pinned.row(w))) {
      return InternalError("a row is wrong after the restart");
    }
  }
  if (cache_->stats().created > 0) return InternalError("a row is missing after the restart");
  return OkStatus();
}

Result<Step> Scale::Run() {
  Step step;
  step.rows = rows_;
  const std::string root = JoinPath(settings_.folder, "scale_bench.rows");
  TERRACE_ASSIGN_OR_RETURN(const KnownReadCost known, CalibrateIn(fs_, root, &quota_));
  cost_ = known.cost;
  std::printf(
      "%s rows of %u bytes, index by %s, budget %s, a cache of %s; disk: %.2f us a request + bytes "
      "/ %.2f "
      "GB/s\n",
      FormatCount(rows_).c_str(), settings_.row_bytes, settings_.index.c_str(),
      FormatBytes(settings_.budget_mib * kMiB).c_str(),
      FormatBytes(settings_.budget_mib * kMiB - FixedBytes()).c_str(), cost_.request_seconds * 1e6,
      cost_.bytes_per_second * 1e-9);
  TERRACE_RETURN_IF_ERROR(Open());
  TERRACE_RETURN_IF_ERROR(Load(&step));
  TERRACE_RETURN_IF_ERROR(TrainBatches("uniform", false, &step.uniform));
  TERRACE_RETURN_IF_ERROR(TrainBatches("zipf", true, &step.zipf));
  TERRACE_RETURN_IF_ERROR(Restart(&step));
  const auto peak = static_cast<double>(ReadProcessMemory().peak_bytes);
  const auto count = static_cast<double>(rows_);
  std::printf("  memory   %.0f MB at most, %.1f bytes a row; %.2f of them in the index\n",
              peak * 1e-6, peak / count, static_cast<double>(Stats().index_bytes) / count);
  std::fflush(stdout);
  cache_.reset();
  stores_.clear();
  TERRACE_RETURN_IF_ERROR(RemoveTree(fs_, root));
  return step;
}

Status RunAll(const Settings& settings) {
  std::vector<Step> steps;
  for (std::uint64_t rows = settings.first; rows <= settings.most;) {
    Scale scale(settings, rows);
    TERRACE_ASSIGN_OR_RETURN(const std::string why_not, scale.WhyNot());
    if (!why_not.empty()) {
      std::printf("%s rows are not begun: %s\n", FormatCount(rows).c_str(), why_not.c_str());
      break;
    }
    TERRACE_ASSIGN_OR_RETURN(const Step step, scale.Run());
    steps.push_back(step);
    if (rows == settings.most) break;
    rows = std::min(rows * 10, settings.most);
  }
  if (steps.empty()) return InvalidArgumentError("no step could be measured");
  // As docs/scale.md has them.
  std::printf(
      "million rows a second, and what they are of the first line's\n"
      "| rows, by %s | index, bytes a key | disk, bytes a row | load, with commit | its parts | "
      "uniform | Zipf | restart | of the disk's sequential rate |\n"
      "|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
      settings.index.c_str());
  const Step& first = steps[0];
  for (const Step& step : steps) {
    std::printf(
        "| %s | %.1f | %.0f | %.2f, %.0f %% | %s | %s, %.0f %% | %s, %.0f %% | %s, %.0f %% | %.0f "
        "%% "
        "|\n",
        FormatCount(step.rows).c_str(), step.index_bytes, step.disk_bytes, step.load * 1e-6,
        100 * step.load / first.load, step.load_parts.Text(2, 1e-6).c_str(),
        step.uniform.Text(3, 1e-6).c_str(), 100 * step.uniform.median / first.uniform.median,
        step.zipf.Text(3, 1e-6).c_str(), 100 * step.zipf.median / first.zipf.median,
        step.open.Text(1, 1e-6).c_str(), 100 * step.open.median / first.open.median,
        100 * step.open_share);
  }
  return OkStatus();
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  terrace::ConfigureAllocator();
  terrace::RaiseOpenFileLimit();
  terrace::Settings settings;
  terrace::BenchFlags flags([&] {
    settings.budget_mib = 64;
    settings.first = 20'000;
    settings.most = 200'000;
    settings.batch = 5'000;
    settings.batches = 6;
    settings.restarts = 2;
  });
  flags.Add("folder", &settings.folder);
  flags.Add("index", &settings.index);
  flags.Add("budget-mib", &settings.budget_mib);
  flags.Add("first", &settings.first);
  flags.Add("most", &settings.most);
  flags.Add("row-bytes", &settings.row_bytes);
  flags.Add("batch", &settings.batch);
  flags.Add("batches", &settings.batches);
  flags.Add("shards", &settings.shards);
  flags.Add("read-threads", &settings.read_threads);
  flags.Add("restarts", &settings.restarts);
  flags.AddSeed(&settings.seed);
  if (!flags.Parse(argc, argv)) return 2;
  if (settings.first < 1000 || settings.most < settings.first || settings.batch == 0 ||
      settings.batch > settings.first || settings.batches < 3 || settings.shards == 0 ||
      settings.read_threads == 0 || settings.restarts == 0 ||
      settings.row_bytes < terrace::kLeastRowBytes ||
      (settings.index != "key" && settings.index != "group")) {
    std::fprintf(stderr,
                 "scale_bench: an index by key or group, at least 1000 rows of 16 bytes, 3 batches "
                 "of at most as many rows, a shard, a thread and a restart\n");
    return 2;
  }
  const terrace::Status status = terrace::RunAll(settings);
  if (status.ok()) return 0;
  std::fprintf(stderr, "scale_bench: %s\n", status.ToString().c_str());
  return 1;
}
