// hot_files_bench: what it is worth to write hot rows into files of their own. Generated click logs
// are trained through a cache and a store, whose files lie in --folder, with hot rows together with
// the others and apart, by each eviction policy; every few batches are a checkpoint. All figures
// are counts of the second half of the log and the same in every run of a seed: nothing runs in the
// background, and no time is taken. What a read costs is said in bytes: those that were read and,
// for each request, as many as the gap that a request is worth (docs/decisions/reads.md). --tiny
// checks the rows and that either way as many are read and written.
//
//   hot_files_bench [--tiny] [--folder F] [--examples N] [--cardinality N] [--zipf-percent P]
//                   [--batch N] [--checkpoint-batches N] [--row-bytes B] [--cache-kib N]
//                   [--buffer-kib N] [--file-kib N] [--gap BYTES] [--group 0|1] [--policy NAME]
//                   [--seed N]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/cache/row_cache.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"
#include "terrace/store/store.h"

namespace terrace {
namespace {

struct Settings {
  std::string folder = ".";
  std::uint64_t examples = 400'000;
  std::uint64_t cardinality = 200'000;  // Of each slot.
  std::uint64_t zipf_percent = 105;     // A hundred times the exponent.
  std::uint32_t batch = 8192;           // Examples.
  std::uint64_t checkpoint_batches = 4;
  std::uint32_t row_bytes = 128;
  std::uint64_t cache_kib = 64 << 10;
  std::uint64_t buffer_kib = 1024;
  std::uint64_t file_kib = 2048;
  std::uint64_t gap = StoreOptions().merge_gap_bytes;
  std::uint64_t group = 0;
  std::string policy;      // Empty: all.
  std::uint64_t seed = 0;  // Of the log.
};

template <typename T>
T Require(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "hot_files_bench: %s\n", result.status().ToString().c_str());
    std::exit(1);
  }
  return std::move(result).value();
}
void Require(const Status& status) {
  if (!status.ok()) Require(Result<int>(status));
}
void Require(bool condition, const char* what) {
  if (!condition) Require(InternalError(what));
}

struct Figures {
  std::uint64_t missed = 0, written = 0;  // Rows.
  double read_bytes = 0, requests = 0;    // A missed row.
  double read_cost = 0;                   // Likewise, in bytes.
  double amplification = 0, copied = 0;   // Bytes and rows for each that was to be written.
  double space = 0;                       // Of the newest rows' bytes, mean after checkpoints.
  double files = 0;                       // Likewise.
  std::uint64_t live_rows = 0, cached_rows = 0;
};

class Training {
 public:
  Training(const Settings& settings, EvictionType policy, bool hot_apart)
      : settings_(settings), directory_(JoinPath(settings.folder, "hot_files_bench.rows")) {
    Require(RemoveTree(fs_, directory_));
    StoreOptions store;
    store.directory = directory_;
    store.table = "bench";
    store.row_bytes = settings.row_bytes;
    store.file_bytes = settings.file_kib << 10;
    store.direct_io = false;
    store.background_compaction = false;
    store.merge_gap_bytes = settings.gap;
    if (settings.group != 0) {
      store.index = IndexKind::kGroup;
      store.expected_rows = 4 * settings.cardinality;
    }
    store_ = Require(Store::Create(fs_, Clock::Real(), &quota_, store));
    RowCacheOptions cache;
    cache.row_bytes = settings.row_bytes;
    cache.capacity_bytes = settings.cache_kib << 10;
    cache.flush_bytes = settings.buffer_kib << 10;
    cache.eviction.type = policy;
    cache.background = false;
    cache.hot_apart = hot_apart;
    cache.create_row = [bytes = settings.row_bytes](Key key, std::byte* row) {
      std::memset(row, 0, bytes);
      std::memcpy(row, &key, sizeof key);
    };
    cache_ = Require(RowCache::Create(cache, {store_.get()}));
  }
  ~Training() {
    cache_.reset();
    store_.reset();
    Require(RemoveTree(fs_, directory_));
  }

  Figures Run() {
    DataOptions data;
    data.format = "synthetic";
    data.rows = settings_.examples;
    data.cardinality = settings_.cardinality;
    data.zipf = static_cast<double>(settings_.zipf_percent) / 100;
    data.log_seed = settings_.seed;
    const auto source = Require(OpenSource(fs_, data));
    std::uint64_t examples = 0, batches = 0;
    StoreStats start;
    while (const auto batch = Require(source->Next(settings_.batch, settings_.batch))) {
      if (!measuring_ && 2 * examples >= settings_.examples) {
        start = store_->stats();
        measuring_ = true;
      }
      std::vector<Key> keys(batch->keys.begin(), batch->keys.end());
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      Train(keys);
      examples += batch->examples;
      if (++batches % settings_.checkpoint_batches == 0) Checkpoint();
    }
    Checkpoint();
    return FiguresSince(start);
  }

 private:
  void Train(const std::vector<Key>& keys) {
    PinnedRows pinned = Require(cache_->StartPin(keys));  // Writes what it evicts.
    const StoreStats before = store_->stats();
    Require(pinned.Wait());  // Reads.
    const StoreStats after = store_->stats();
    for (std::size_t w = 0; w < keys.size(); ++w) {
      Require(std::memcmp(pinned.row(w), &keys[w], sizeof(Key)) == 0, "another key's row");
    }
    pinned.MarkDirty(0, keys.size());
    if (!measuring_) return;
    missed_ += after.rows_read - before.rows_read;
    read_bytes_ += after.read_bytes - before.read_bytes;
    requests_ += after.read_requests - before.read_requests;
  }

  void Checkpoint() {
    Require(cache_->FlushDirty());
    Require(store_->Commit(++checkpoint_));
    if (checkpoint_ > 1) Require(store_->Drop(checkpoint_ - 1));
    if (!measuring_) return;
    const StoreStats stats = store_->stats();
    ++measured_checkpoints_;
    space_ += static_cast<double>(stats.disk_bytes) / static_cast<double>(stats.live_bytes);
    files_ += stats.files;
  }

  Figures FiguresSince(const StoreStats& start) const {
    const StoreStats end = store_->stats();
    Figures figures;
    figures.missed = missed_;
    figures.written = end.rows_written - start.rows_written;
    const auto missed = static_cast<double>(missed_);
    figures.read_bytes = static_cast<double>(read_bytes_) / missed;
    figures.requests = static_cast<double>(requests_) / missed;
    figures.read_cost = figures.read_bytes + figures.requests * static_cast<double>(settings_.gap);
    const auto written = static_cast<double>(figures.written);
    // A record's head, and its place in the key section.
    const double record_bytes = settings_.row_bytes + 40;
    figures.amplification =
        static_cast<double>(end.write_bytes - start.write_bytes) / (written * record_bytes);
    figures.copied = static_cast<double>(end.rows_compacted - start.rows_compacted) / written;
    figures.space = space_ / static_cast<double>(measured_checkpoints_);
    figures.files = static_cast<double>(files_) / static_cast<double>(measured_checkpoints_);
    figures.live_rows = end.live_rows;
    figures.cached_rows = cache_->stats().rows;
    return figures;
  }

  FileSystem* const fs_ = FileSystem::Posix();
  const Settings settings_;
  const std::string directory_;
  DiskQuota quota_{std::uint64_t{1} << 40};
  std::unique_ptr<Store> store_;
  std::unique_ptr<RowCache> cache_;
  std::uint64_t checkpoint_ = 0, measured_checkpoints_ = 0;
  bool measuring_ = false;
  std::uint64_t missed_ = 0, read_bytes_ = 0, requests_ = 0, files_ = 0;
  double space_ = 0;
};

void Print(const char* policy, const char* how, const Figures& figures) {
  std::printf(
      "%-8s %-8s read: %6.0f bytes, %.4f requests, cost %6.0f bytes a missed row; written: "
      "amplification %.3f, copied %.3f a row; space %.2fx, %4.0f files\n",
      policy, how, figures.read_bytes, figures.requests, figures.read_cost, figures.amplification,
      figures.copied, figures.space, figures.files);
}

void Run(const Settings& settings) {
  const std::pair<const char*, EvictionType> policies[] = {{"s3_fifo", EvictionType::kS3Fifo},
                                                           {"lru_lfu", EvictionType::kLruLfu},
                                                           {"pass_lfu", EvictionType::kPassLfu}};
  bool any = false;
  for (const auto& [name, policy] : policies) {
    if (!settings.policy.empty() && settings.policy != name) continue;
    const Figures together = Training(settings, policy, /*hot_apart=*/false).Run();
    const Figures apart = Training(settings, policy, /*hot_apart=*/true).Run();
    if (!any) {
      std::printf("%llu rows of %u bytes, %llu of them in memory; batches miss %llu rows\n",
                  static_cast<unsigned long long>(together.live_rows), settings.row_bytes,
                  static_cast<unsigned long long>(together.cached_rows),
                  static_cast<unsigned long long>(together.missed));
    }
    Print(name, "together", together);
    Print(name, "apart", apart);
    std::printf("%-8s apart as a share of together: read cost %.2f, bytes written %.2f\n", name,
                apart.read_cost / together.read_cost, apart.amplification / together.amplification);
    Require(apart.live_rows == together.live_rows && apart.missed > 0, "rows are lost");
    std::fflush(stdout);
    any = true;
  }
  Require(any, "no policy has that name");
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  terrace::ConfigureAllocator();
  terrace::Settings settings;
  terrace::BenchFlags flags([&] {
    settings.examples = 8192;
    settings.cardinality = 20'000;
    settings.batch = 256;
    settings.cache_kib = 8192;
    settings.buffer_kib = 128;
    settings.file_kib = 256;
  });
  flags.Add("folder", &settings.folder);
  flags.Add("examples", &settings.examples);
  flags.Add("cardinality", &settings.cardinality);
  flags.Add("zipf-percent", &settings.zipf_percent);
  flags.Add("batch", &settings.batch);
  flags.Add("checkpoint-batches", &settings.checkpoint_batches);
  flags.Add("row-bytes", &settings.row_bytes);
  flags.Add("cache-kib", &settings.cache_kib);
  flags.Add("buffer-kib", &settings.buffer_kib);
  flags.Add("file-kib", &settings.file_kib);
  flags.Add("gap", &settings.gap);
  flags.Add("group", &settings.group);
  flags.Add("policy", &settings.policy);
  flags.AddSeed(&settings.seed);
  if (!flags.Parse(argc, argv)) return 2;
  if (settings.batch == 0 || settings.checkpoint_batches == 0 || settings.row_bytes < 8 ||
      settings.examples < std::uint64_t{4} * settings.batch * settings.checkpoint_batches) {
    std::fprintf(stderr,
                 "hot_files_bench: rows have 8 bytes or more, and the examples are those of four "
                 "checkpoints or more\n");
    return 2;
  }
  terrace::Run(settings);
  return 0;
}
