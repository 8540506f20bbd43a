// The same work on Terrace's store and on another's: first load, reads of random keys by size of
// batch, bursts of writes, and writes with compaction paid, each begun with everything settled.
// Every row that is read is checked. A system that reads by threads does so with as many as served
// this size of batch best. One system a process; run.py runs them one after the other, each within
// its own limit of memory, and prints the ratios. Direct I/O throughout: no page cache takes part.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "store/system.h"
#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/testing/bench_spread.h"
#include "terrace/io/file_system.h"
#include "terrace/store/testing/bench_rows.h"

namespace terrace {
namespace {

struct Settings {
  std::string system = "terrace";
  SystemOptions options;
  std::uint64_t keys = 20'000'000;
  std::vector<std::uint64_t> batches = {20'000, 200'000, 1'000'000};
  std::uint64_t write_batch = 200'000;
  std::uint64_t load_batch = 500'000;
  std::uint64_t burst_batches = 10;
  std::uint64_t repeats = 5;  // Of reads.
  std::uint64_t rounds = 3;   // Of bursts and of sustained writes.
  double update_seconds = 10;
  std::uint64_t seed = BenchFlags::FreshSeed();
};

// Bytes that this process has had the disk write and read; the page cache has no part in them.
struct DiskTraffic {
  double written = 0, read = 0;
};

Result<DiskTraffic> ReadDiskTraffic() {
  std::ifstream file("/proc/self/io");
  if (!file) return InternalError("/proc/self/io can't be read");
  std::string name;
  double value = 0;
  DiskTraffic traffic;
  while (file >> name >> value) {
    if (name == "write_bytes:") traffic.written = value;
    if (name == "read_bytes:") traffic.read = value;
  }
  return traffic;
}

Result<std::uint64_t> BytesUnder(FileSystem* fs, const std::string& folder) {
  std::uint64_t bytes = 0;
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs->List(folder));
  for (const FileInfo& entry : entries) bytes += entry.size;
  return bytes;
}

// Of keys and their rows.
double RowBytes(const Settings& settings, std::uint64_t keys) {
  return static_cast<double>(keys) * static_cast<double>(settings.options.row_bytes + 8);
}

class Bench {
 public:
  Bench(StoreSystem* system, const Settings& settings)
      : system_(system),
        settings_(settings),
        rows_(settings.keys, settings.options.row_bytes, settings.seed, settings.seed) {}

  Result<nlohmann::json> Run() {
    nlohmann::json figures;
    figures["seed"] = settings_.seed;
    TERRACE_ASSIGN_OR_RETURN(figures["load"], Load());
    for (const std::uint64_t batch : settings_.batches) {
      if (batch * 2 > settings_.keys) continue;
      TERRACE_ASSIGN_OR_RETURN(figures["read"][std::to_string(batch)], Read(batch));
    }
    for (const char* const work : {"burst", "sustained"}) {
      for (std::uint64_t round = 0; round < settings_.rounds; ++round) {
        const bool burst = work == std::string_view("burst");
        TERRACE_RETURN_IF_ERROR(burst ? Write(settings_.burst_batches, 0, &figures[work])
                                      : Write(0, settings_.update_seconds, &figures[work]));
      }
    }
    figures["peak_memory_bytes"] = ReadProcessMemory().peak_bytes;
    return figures;
  }

 private:
  static double Now() { return Clock::Real()->MonotonicSeconds(); }

  Result<nlohmann::json> Load() {
    TERRACE_ASSIGN_OR_RETURN(const DiskTraffic before, ReadDiskTraffic());
    double seconds = 0;
    PartRates parts(settings_.keys, 0);
    for (std::uint64_t begin = 0; begin < settings_.keys; begin += settings_.load_batch) {
      rows_.ChooseRange(begin, std::min(settings_.load_batch, settings_.keys - begin));
      rows_.Make(generation_);
      const double start = Now();
      TERRACE_RETURN_IF_ERROR(system_->Write(rows_.keys(), rows_.bytes(), /*fresh=*/true));
      seconds += Now() - start;
      parts.Done(begin + rows_.keys().size(), seconds);
    }
    const double start = Now();
    TERRACE_RETURN_IF_ERROR(system_->Settle());
    seconds += Now() - start;
    TERRACE_ASSIGN_OR_RETURN(const DiskTraffic after, ReadDiskTraffic());
    return nlohmann::json{{"keys_per_second", static_cast<double>(settings_.keys) / seconds},
                          {"part_keys_per_second", parts.rates()},
                          {"write_amplification",
                           (after.written - before.written) / RowBytes(settings_, settings_.keys)}};
  }

  struct ReadSample {
    double rate = 0;            // Keys a second.
    double cpu = 0, bytes = 0;  // A key.
  };
  // One batch of fresh keys.
  Result<ReadSample> ReadOnce(std::uint64_t batch) {
    rows_.ChooseUniform(batch);
    TERRACE_ASSIGN_OR_RETURN(const DiskTraffic before, ReadDiskTraffic());
    const double cpu_before = ProcessCpuSeconds();
    const double start = Now();
    TERRACE_RETURN_IF_ERROR(system_->Read(rows_.keys(), rows_.bytes(), rows_.found()));
    const double seconds = Now() - start;
    const double cpu = ProcessCpuSeconds() - cpu_before;
    TERRACE_ASSIGN_OR_RETURN(const DiskTraffic after, ReadDiskTraffic());
    if (!rows_.AllRight()) return InternalError("a row is lost or wrong");
    const auto n = static_cast<double>(batch);
    return ReadSample{n / seconds, cpu / n, (after.read - before.read) / n};
  }

  // Fewer and fewer threads are tried until they are clearly slower; the best stay.
  Status ChooseReadThreads(std::uint64_t batch, nlohmann::json* figures) {
    constexpr double kClearly = 0.7;
    double best = 0;
    int chosen = 0;
    for (const int threads : settings_.options.read_threads) {
      if (!system_->UseReadThreads(threads)) return OkStatus();
      TERRACE_ASSIGN_OR_RETURN(const ReadSample sample, ReadOnce(batch));
      (*figures)["tried_threads"].push_back({threads, sample.rate});
      if (sample.rate < kClearly * best) break;
      if (sample.rate <= best) continue;
      best = sample.rate;
      chosen = threads;
    }
    system_->UseReadThreads(chosen);
    (*figures)["threads"].push_back(chosen);
    return OkStatus();
  }

  Result<nlohmann::json> Read(std::uint64_t batch) {
    nlohmann::json figures;
    // Memory is used for the first time, and caches of indexes fill.
    TERRACE_RETURN_IF_ERROR(ReadOnce(batch).status());
    TERRACE_RETURN_IF_ERROR(ChooseReadThreads(batch, &figures));
    for (std::uint64_t repeat = 0; repeat < settings_.repeats; ++repeat) {
      TERRACE_ASSIGN_OR_RETURN(const ReadSample sample, ReadOnce(batch));
      figures["keys_per_second"].push_back(sample.rate);
      figures["cpu_seconds_per_key"].push_back(sample.cpu);
      figures["read_bytes_per_key"].push_back(sample.bytes);
    }
    return figures;
  }

  // A sample of so many batches, or of so many seconds and then until everything is settled.
  Status Write(std::uint64_t batches, double for_seconds, nlohmann::json* figures) {
    const std::uint64_t batch = std::min(settings_.write_batch, settings_.keys / 4);
    TERRACE_ASSIGN_OR_RETURN(const DiskTraffic before, ReadDiskTraffic());
    const double cpu_before = ProcessCpuSeconds();
    double seconds = 0, made_cpu = 0;
    std::vector<double> each;
    for (std::uint64_t done = 0; for_seconds > 0 ? seconds < for_seconds : done < batches; ++done) {
      const double cpu = ThreadCpuSeconds();
      rows_.ChooseUniform(batch);
      rows_.Make(++generation_);
      made_cpu += ThreadCpuSeconds() - cpu;
      const double start = Now();
      TERRACE_RETURN_IF_ERROR(system_->Write(rows_.keys(), rows_.bytes(), /*fresh=*/false));
      each.push_back(Now() - start);
      seconds += each.back();
    }
    const auto keys = static_cast<double>(each.size() * batch);
    double cpu = ProcessCpuSeconds() - cpu_before - made_cpu;
    const double start = Now();
    TERRACE_RETURN_IF_ERROR(system_->Settle());
    if (for_seconds > 0) {
      seconds += Now() - start;
      cpu = ProcessCpuSeconds() - cpu_before - made_cpu;
      TERRACE_ASSIGN_OR_RETURN(const DiskTraffic after, ReadDiskTraffic());
      (*figures)["write_amplification"].push_back((after.written - before.written) /
                                                  RowBytes(settings_, each.size() * batch));
    }
    const Spread write = SpreadOf(each);
    (*figures)["keys_per_second"].push_back(keys / seconds);
    (*figures)["cpu_seconds_per_key"].push_back(cpu / keys);
    (*figures)["longest_write_seconds"].push_back(write.most);
    (*figures)["median_write_seconds"].push_back(write.median);
    return OkStatus();
  }

  StoreSystem* const system_;
  const Settings settings_;
  BenchRows rows_;
  std::uint64_t generation_ = 1;
};

Status Run(const Settings& settings) {
  TERRACE_ASSIGN_OR_RETURN(
      std::unique_ptr<StoreSystem> system,
      settings.system == "terrace" ? OpenTerrace(settings.options) : OpenRocksDb(settings.options));
  TERRACE_ASSIGN_OR_RETURN(nlohmann::json figures, Bench(system.get(), settings).Run());
  // Until then files that nobody needs any more may still be on their way out.
  system.reset();
  TERRACE_ASSIGN_OR_RETURN(
      const std::uint64_t space,
      BytesUnder(FileSystem::Posix(), StoreSystem::StoreFolder(settings.options)));
  figures["sustained"]["space"] = static_cast<double>(space) / RowBytes(settings, settings.keys);
  std::printf("%s\n", figures.dump().c_str());
  return OkStatus();
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  terrace::ConfigureAllocator();
  terrace::Settings settings;
  bool tiny = false;
  CLI::App app("The same work on Terrace's store and on another's; prints one JSON object");
  app.add_option("--system", settings.system, "terrace or rocksdb")
      ->check(CLI::IsMember({"terrace", "rocksdb"}));
  app.add_option("--folder", settings.options.folder, "Empty, and left as the system leaves it")
      ->required()
      ->check(CLI::ExistingDirectory);
  app.add_option("--keys", settings.keys)->check(CLI::PositiveNumber);
  app.add_option("--row-bytes", settings.options.row_bytes)->check(CLI::Range(8, 4096));
  app.add_option("--threads", settings.options.threads)->check(CLI::PositiveNumber);
  app.add_option("--read-threads", settings.options.read_threads,
                 "Of a system that reads by threads: each is tried")
      ->check(CLI::PositiveNumber);
  app.add_option("--batch", settings.batches)->check(CLI::PositiveNumber);
  app.add_option("--repeats", settings.repeats)->check(CLI::PositiveNumber);
  app.add_option("--rounds", settings.rounds)->check(CLI::PositiveNumber);
  app.add_option("--update-seconds", settings.update_seconds)->check(CLI::PositiveNumber);
  app.add_option("--seed", settings.seed);
  app.add_flag("--tiny", tiny, "A check that it works");
  CLI11_PARSE(app, argc, argv);
  if (tiny) {
    settings.keys = 20'000;
    settings.batches = {200, 5'000};
    settings.load_batch = 5'000;
    settings.burst_batches = 2;
    settings.repeats = 2;
    settings.rounds = 2;
    settings.update_seconds = 0.1;
  }
  std::sort(settings.options.read_threads.begin(), settings.options.read_threads.end(),
            std::greater<>());
  for (const std::uint64_t batch : settings.batches) {
    if (batch <= settings.keys / 2) continue;
    std::fprintf(stderr, "peers_bench: --batch %llu: at most half of --keys\n",
                 static_cast<unsigned long long>(batch));
    return 2;
  }
  const terrace::Status status = terrace::Run(settings);
  if (status.ok()) return 0;
  std::fprintf(stderr, "peers_bench: %s\n", status.ToString().c_str());
  return 1;
}
