// row_cache_bench: what pinning costs. In one run and on one thread: a raw prefetched gather of the
// rows (the ceiling: memory's own rate), std::unordered_map look-up and copy (what one would write
// in five lines, without a policy), and, for each eviction policy, Pin + release with every key in
// memory, the same with a copy of the rows, and with a share of misses that evicts dirty rows to a
// store in memory; then what several threads do beside one, where the cache has as many parts, in
// turn with one thread and with raw gathers of both, so that a machine that is not its own alters a
// round's ratios little. Keys are what a log with 26 slots of hashed categories has. Axes: policy,
// rows, row bytes, keys a batch, threads. --tiny checks the results on a small cache.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/prefetch.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/testing/bench_spread.h"
#include "terrace/base/thread.h"
#include "terrace/cache/row_cache.h"

namespace terrace {
namespace {

struct Settings {
  std::uint64_t rows = 4'000'000;
  std::uint32_t row_bytes = 128;
  std::size_t batch = 200'000;
  int rounds = 15;
  int threads = 2;  // Beside one.
  std::uint64_t seed = 0;
};

// A store that finds each key and forgets what it is given: the cost of a miss without the cost of
// a disk.
class NullStore final : public Store {
 public:
  explicit NullStore(std::uint32_t row_bytes) : row_bytes_(row_bytes) {}
  Status Read(std::span<const Key> keys, std::span<std::byte* const> rows,
              std::span<std::uint8_t> found, const std::atomic<bool>* /*stop*/) override {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      found[i] = 1;
      std::memset(rows[i], static_cast<int>(keys[i] & 0xff), row_bytes_);
    }
    return OkStatus();
  }
  Status Write(std::span<const Key> keys, std::span<const std::byte* const> rows,
               std::span<const std::uint8_t> /*stored*/) override {
    for (std::size_t i = 0; i < keys.size(); ++i) sum_ += static_cast<std::uint64_t>(rows[i][0]);
    return OkStatus();
  }
  Result<std::unique_ptr<StagedRows>> Stage(std::span<const Key> keys,
                                            std::span<const std::byte* const> rows,
                                            std::span<const std::uint8_t> /*stored*/) override {
    TERRACE_RETURN_IF_ERROR(Write(keys, rows, {}));
    return std::make_unique<StagedRows>();
  }
  Status Publish(std::unique_ptr<StagedRows> /*staged*/) override { return OkStatus(); }
  void KeepCheckpoints(bool /*keep*/) override {}
  void ExpectRows(std::uint64_t /*rows*/) override {}
  Status Erase(std::span<const Key> /*keys*/) override { return OkStatus(); }
  Result<ManifestReference> Commit(std::uint64_t /*id*/) override { return ManifestReference(); }
  Status Drop(std::uint64_t /*id*/) override { return OkStatus(); }
  Status ForEachRow(std::uint64_t /*buffer_bytes*/,
                    const std::function<Status(const RowView&)>& /*visit*/) override {
    return OkStatus();
  }
  Status CompactNow() override { return OkStatus(); }
  void SetKeepFree(std::uint64_t /*bytes*/, std::uint64_t /*files*/) override {}
  void OpenReserve() override {}
  Status MakeRoom(std::uint64_t /*bytes*/) override { return OkStatus(); }
  Status MergeFiles(std::uint64_t /*files*/) override { return OkStatus(); }
  void SetHolder(RowHolder* /*holder*/) override {}  // Nothing expires in it.
  void WantSweep() override {}
  StoreStats stats() const override { return {}; }
  std::uint64_t index_bytes() const override { return 0; }
  std::uint64_t MostWriteBytes(std::uint64_t rows, std::uint64_t /*in_order*/,
                               std::uint64_t /*writes*/) const override {
    return rows * row_bytes_;
  }
  std::uint64_t LeastFileRows() const override { return 1; }
  void Finish() override {}
  Status background_status() const override { return OkStatus(); }

 private:
  const std::uint32_t row_bytes_;
  std::uint64_t sum_ = 0;
};

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "row_cache_bench: wrong result: %s\n", what);
  std::exit(1);
}

// The key of row `number`, each another one, and others with each seed: a slot and a hash of 48
// bits.
Key KeyOf(std::uint64_t seed, std::uint64_t number) {
  constexpr std::uint64_t kSlots = 26, kOdd = 0x9e3779b97f4b;
  return number % kSlots << 48 | ((number * kOdd ^ MixKey(seed)) & ((std::uint64_t{1} << 48) - 1));
}

std::vector<Key> DistinctKeys(std::uint64_t seed, Rng* rng, std::size_t count, std::uint64_t first,
                              std::uint64_t range) {
  std::unordered_set<std::uint64_t> seen;
  std::vector<Key> keys;
  while (keys.size() < count) {
    const std::uint64_t number = first + rng->Below(range);
    if (seen.insert(number).second) keys.push_back(KeyOf(seed, number));
  }
  return keys;
}

// Runs `body` for fresh keys each round and rates what it timed itself, in seconds: rows a second.
Spread Measure(const Settings& settings, const std::function<double(int)>& body) {
  std::vector<double> rates;
  for (int round = 0; round < settings.rounds; ++round) {
    rates.push_back(static_cast<double>(settings.batch) / body(round));
  }
  return SpreadOf(rates);
}

double Seconds(const std::function<void()>& work) {
  const std::int64_t begin = Clock::Real()->MonotonicNanos();
  work();
  return static_cast<double>(Clock::Real()->MonotonicNanos() - begin) * 1e-9;
}

void Print(const char* name, const Settings& settings, const Spread& rates, const Spread& raw,
           const Spread& map) {
  std::printf("%-34s %7.2f M rows/s (%.2f .. %.2f)  %6.2f GB/s  %5.1f %% of raw  %5.2f x map\n",
              name, rates.median / 1e6, rates.least / 1e6, rates.most / 1e6,
              rates.median * settings.row_bytes / 1e9, 100 * rates.median / raw.median,
              rates.median / map.median);
}

// Copies rows to a line-up, prefetching ahead.
void Gather(std::span<std::byte* const> rows, std::uint32_t row_bytes, std::byte* to) {
  constexpr std::size_t kAhead = 16;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size()) PrefetchRead(rows[i + kAhead], row_bytes);
    std::memcpy(to + i * row_bytes, rows[i], row_bytes);
  }
}

class Bench {
 public:
  explicit Bench(const Settings& settings)
      : settings_(settings), rng_(settings.seed), workers_("copy", settings.threads) {}

  void Run() {
    MakeCopyBuffer();
    const Spread raw = Raw();
    const Spread map = UnorderedMap();
    std::printf(
        "%llu rows of %u bytes, batches of %zu random keys, one thread, seed %llu; medians of %d "
        "rounds\n",
        static_cast<unsigned long long>(settings_.rows), settings_.row_bytes, settings_.batch,
        static_cast<unsigned long long>(settings_.seed), settings_.rounds);
    Print("raw prefetched gather", settings_, raw, raw, map);
    Print("std::unordered_map find + copy", settings_, map, raw, map);
    const std::pair<const char*, EvictionType> policies[] = {{"s3_fifo", EvictionType::kS3Fifo},
                                                             {"lru_lfu", EvictionType::kLruLfu},
                                                             {"pass_lfu", EvictionType::kPassLfu}};
    for (const auto& [name, type] : policies) {
      Cached one = Prepare(type, 1);
      std::printf("%s\n", name);
      Print("Pin, all hits", settings_, Hits(&one, true, false, false), raw, map);
      Print("release", settings_, Hits(&one, false, false, true), raw, map);
      Print("Pin + copy", settings_, Hits(&one, true, true, false), raw, map);
      Print("Pin + copy + release", settings_, Hits(&one, true, true, true), raw, map);
      if (settings_.threads > 1) PrintGains(&one, type);
      for (const int percent : {10, 50}) {
        const std::string line = "Pin + dirty + release, " + std::to_string(percent) + " % misses";
        Print(line.c_str(), settings_, Misses(&one, percent), raw, map);
      }
    }
  }

 private:
  // A cache of as many parts as threads.
  struct Cached {
    int threads = 1;
    std::vector<std::unique_ptr<NullStore>> stores;
    std::unique_ptr<RowCache> cache;
  };
  struct HitSeconds {
    double pin = 0, copy = 0, release = 0;
  };

  void PrintGains(Cached* one, EvictionType policy) {
    Cached several = Prepare(policy, settings_.threads);
    const HugeBuffer memory = RowsForRaw();
    std::vector<double> raw, pin, copied;
    for (int round = 0; round < settings_.rounds; ++round) {
      raw.push_back(RawSeconds(memory, 1) / RawSeconds(memory, settings_.threads));
      const HitSeconds alone = HitRound(one, true), beside = HitRound(&several, true);
      pin.push_back(alone.pin / beside.pin);
      copied.push_back((alone.pin + alone.copy) / (beside.pin + beside.copy));
    }
    const Spread raw_gain = SpreadOf(raw);
    const auto print = [&](const char* name, const std::vector<double>& gains) {
      const std::string line =
          std::string(name) + ", " + std::to_string(settings_.threads) + " threads";
      const Spread gain = SpreadOf(gains);
      std::printf("%-34s %s x one thread (raw %s): %.0f %% of raw's gain\n", line.c_str(),
                  gain.Text(2).c_str(), raw_gain.Text(2).c_str(),
                  100 * gain.median / raw_gain.median);
    };
    print("Pin, all hits", pin);
    print("Pin + copy", copied);
  }

  Cached Prepare(EvictionType policy, int threads) {
    Cached cached;
    cached.threads = threads;
    std::vector<Store*> stores;
    for (int part = 0; part < threads; ++part) {
      cached.stores.push_back(std::make_unique<NullStore>(settings_.row_bytes));
      stores.push_back(cached.stores.back().get());
    }
    RowCacheOptions options;
    options.eviction.type = policy;
    options.row_bytes = settings_.row_bytes;
    // Rows, metadata and an eighth for write buffers; the fill leaves a little of it free.
    options.capacity_bytes = settings_.rows * (settings_.row_bytes + 40) * 9 / 8 + (8 << 20);
    options.background = threads > 1;  // Nothing of it works where all rows are found.
    options.parts = static_cast<std::uint32_t>(threads);
    if (threads > 1)
      options.capacity_bytes += options.capacity_bytes / 4;  // Parts differ a little.
    options.flush_bytes = 4 << 20;
    options.create_row = [](Key, std::byte*) { std::abort(); };
    auto made = RowCache::Create(options, stores);
    Require(made.ok(), "Create");
    cached.cache = std::move(made).value();
    Require(cached.cache->MaxPinnedRows() >= settings_.rows, "the rows fit");
    std::vector<Key> keys;
    for (std::uint64_t first = 0; first < settings_.rows; first += settings_.batch) {
      keys.clear();
      for (std::uint64_t i = first; i < std::min(first + settings_.batch, settings_.rows); ++i) {
        keys.push_back(KeyOf(settings_.seed, i));
      }
      Require(cached.cache->Pin(keys).ok(), "Pin of the fill");
    }
    return cached;
  }

  void MakeCopyBuffer() {
    auto buffer = HugeBuffer::Allocate(settings_.batch * settings_.row_bytes);
    Require(buffer.ok(), "memory");
    copy_ = std::move(buffer).value();
    std::memset(copy_.data(), 0, copy_.size());
  }

  void GatherOn(int threads, std::span<std::byte* const> rows) {
    if (threads == 1) return Gather(rows, settings_.row_bytes, copy_.data());
    const std::size_t parts = static_cast<std::size_t>(threads);
    workers_.Run(threads, [&](int part) {
      const std::size_t begin = rows.size() * static_cast<std::size_t>(part) / parts;
      const std::size_t end = rows.size() * static_cast<std::size_t>(part + 1) / parts;
      Gather(rows.subspan(begin, end - begin), settings_.row_bytes,
             copy_.data() + begin * settings_.row_bytes);
    });
  }

  HugeBuffer RowsForRaw() const {
    auto made = HugeBuffer::Allocate(settings_.rows * settings_.row_bytes);
    Require(made.ok(), "memory");
    HugeBuffer memory = std::move(made).value();
    std::memset(memory.data(), 1, memory.size());
    return memory;
  }

  double RawSeconds(const HugeBuffer& memory, int threads) {
    std::vector<std::byte*> rows(settings_.batch);
    for (auto& row : rows) row = memory.data() + rng_.Below(settings_.rows) * settings_.row_bytes;
    return Seconds([&] { GatherOn(threads, rows); });
  }

  Spread Raw() {
    const HugeBuffer memory = RowsForRaw();
    return Measure(settings_, [&](int) { return RawSeconds(memory, 1); });
  }

  Spread UnorderedMap() {
    const HugeBuffer memory = RowsForRaw();
    std::unordered_map<Key, std::byte*> map;
    map.reserve(settings_.rows);
    for (std::uint64_t i = 0; i < settings_.rows; ++i) {
      map[KeyOf(settings_.seed, i)] = memory.data() + i * settings_.row_bytes;
    }
    return Measure(settings_, [&](int) {
      const std::vector<Key> keys =
          DistinctKeys(settings_.seed, &rng_, settings_.batch, 0, settings_.rows);
      return Seconds([&] {
        for (std::size_t i = 0; i < keys.size(); ++i) {
          std::memcpy(copy_.data() + i * settings_.row_bytes, map.find(keys[i])->second,
                      settings_.row_bytes);
        }
      });
    });
  }

  // All keys are in memory.
  HitSeconds HitRound(Cached* cached, bool copy) {
    const std::vector<Key> keys =
        DistinctKeys(settings_.seed, &rng_, settings_.batch, 0, settings_.rows);
    PinnedRows pinned;
    HitSeconds seconds;
    seconds.pin = Seconds([&] {
      auto result = cached->cache->Pin(keys);
      Require(result.ok(), "Pin");
      pinned = std::move(result).value();
    });
    if (copy) {
      seconds.copy = Seconds([&] { GatherOn(cached->threads, pinned.rows()); });
      for (std::size_t i = 0; i < keys.size(); ++i) {
        Require(copy_.data()[i * settings_.row_bytes] == static_cast<std::byte>(keys[i]),
                "a row's bytes");
      }
    }
    seconds.release = Seconds([&] { pinned.Release(); });
    return seconds;
  }

  // Of what is named.
  Spread Hits(Cached* cached, bool pin, bool copy, bool release) {
    return Measure(settings_, [&](int) {
      const HitSeconds seconds = HitRound(cached, copy);
      return (pin ? seconds.pin : 0) + seconds.copy + (release ? seconds.release : 0);
    });
  }

  // A share of the keys was never seen; all are marked dirty, so that what is evicted is written.
  Spread Misses(Cached* cached, int percent) {
    // From a full cache on, so that each miss evicts.
    for (bool full = false; !full; next_new_ += settings_.batch) {
      std::vector<Key> keys;
      for (std::size_t i = 0; i < settings_.batch; ++i)
        keys.push_back(KeyOf(settings_.seed, next_new_ + i));
      const std::uint64_t before = cached->cache->stats().evictions;
      Require(cached->cache->Pin(keys).ok(), "Pin of new keys");
      full = cached->cache->stats().evictions > before;
    }
    const std::size_t missing = settings_.batch * static_cast<std::size_t>(percent) / 100;
    return Measure(settings_, [&](int) {
      // Recent rows are in memory; those beyond next_new_ are not.
      const std::uint64_t recent = settings_.rows / 4;
      std::vector<Key> keys = DistinctKeys(settings_.seed, &rng_, settings_.batch - missing,
                                           next_new_ - recent, recent);
      for (std::size_t i = 0; i < missing; ++i) keys.push_back(KeyOf(settings_.seed, next_new_++));
      return Seconds([&] {
        auto result = cached->cache->Pin(keys);
        Require(result.ok(), "Pin");
        result->MarkDirty(0, keys.size());
        result->Release();
      });
    });
  }

  const Settings settings_;
  Rng rng_;
  WorkerGroup workers_;
  HugeBuffer copy_;
  std::uint64_t next_new_ = std::uint64_t{1} << 40;
};

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  terrace::Settings settings;
  terrace::BenchFlags flags([&] {
    settings.rows = 40'000;
    settings.batch = 2'000;
    settings.rounds = 3;
  });
  flags.Add("rows", &settings.rows);
  flags.Add("row-bytes", &settings.row_bytes);
  flags.Add("batch", &settings.batch);
  flags.Add("rounds", &settings.rounds);
  flags.Add("threads", &settings.threads);
  flags.AddSeed(&settings.seed);
  if (!flags.Parse(argc, argv)) return 2;
  if (settings.rows == 0 || settings.row_bytes == 0 || settings.batch == 0 ||
      settings.rounds <= 0 || settings.threads <= 0 || settings.batch * 2 > settings.rows) {
    std::fprintf(stderr,
                 "row_cache_bench: all numbers must be positive, and a batch at most half "
                 "of the rows\n");
    return 2;
  }
  terrace::Bench(settings).Run();
  return 0;
}
