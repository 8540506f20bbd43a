// Loads a store, reads uniform batches of fresh keys by size of batch, and overwrites rows with
// compaction paid, as a cache does: a batch goes to the disk while the index takes the last one in
// and the next is made. Every row read is checked. Reads are put beside the model of the disk, t =
// a * requests + bytes / b, which is measured on the store's own files before every batch: once for
// the requests that the store made, once for the cheapest plan over the same number of random keys,
// and beside the disk's rate of random sectors; writes beside the disk's rate in the same run, and
// beside the rate that it has while it is read from as well, as compaction does.
// Direct I/O: no page cache takes part. Each figure is a median (least..most, number of samples):
// of tenths of the load, of reads and openings by --repeats, of rounds of updates by --rounds, each
// of which begins when the last one's compaction is done.
//
//   store_bench [--tiny] [--folder F] [--keys N] [--row-bytes B] [--gap BYTES] [--repeats R]
//               [--seed S] [--rounds R] [--update-seconds T] [--read-threads N] [--whole-file 0|1]
//               [--depth N]
//               [--batch N]...    (besides 20,000, 200,000 and 1,000,000)
//               [--file-mib M] [--zipf 0|1] [--file-sizes 0|1]
//               [--group 0|1]     (the index by group: what it is measured by is an index by key's)
//
// --zipf draws keys by Zipf's law of exponent 1. --file-sizes 1 measures nothing but what the size
// of a parameter file costs: for sizes up to 256 MiB, uniform and Zipf overwrites with compaction
// paid, and after them reads of the first size of batch, planned and by whole files.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/testing/bench_spread.h"
#include "terrace/io/file_system.h"
#include "terrace/store/read_cost.h"
#include "terrace/store/store.h"
#include "terrace/store/testing/bench_disk.h"
#include "terrace/store/testing/bench_rows.h"
#include "terrace/store/testing/bench_writes.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct Settings {
  std::string folder = ".";
  std::uint64_t keys = 5'000'000;  // 20'000'000: where the targets lie.
  std::uint64_t row_bytes = 128;
  std::uint64_t gap_bytes = ~std::uint64_t{0};  // As measured at the start, on a scratch file.
  std::uint64_t read_threads = 2;               // As of a job.
  std::uint64_t whole_file = 0;
  std::uint64_t group = 0;
  std::uint64_t depth = static_cast<std::uint64_t>(ReadQueueOptions().depth);
  std::uint64_t repeats = 5;
  std::uint64_t seed = 0;
  std::uint64_t rounds = 3;
  std::uint64_t update_seconds = 10;  // Of a round.
  std::vector<std::uint64_t> batches = {20'000, 200'000, 1'000'000};
  std::uint64_t load_batch = 500'000;
  std::uint64_t disk_mib = 512;
  std::uint64_t file_mib = StoreOptions().file_bytes / kMiB;
  std::uint64_t zipf = 0;
  bool tiny = false;  // Everything, on little.
  std::uint64_t file_sizes = 0;
  std::vector<std::uint64_t> sizes_mib = {4, 8, 16, 32, 64, 128, 256};
};

// n random records among all, and what the cheapest plan that reads them takes at any cost.
class PlanModel {
 public:
  PlanModel(std::uint64_t n, std::uint64_t records, double record_bytes, Rng* rng)
      : record_bytes_(record_bytes) {
    std::vector<double> at(n);
    for (double& place : at) place = static_cast<double>(rng->Below(records)) * record_bytes;
    std::sort(at.begin(), at.end());
    steps_.reserve(n);
    for (std::uint64_t i = 1; i < n; ++i) steps_.push_back(at[i] - at[i - 1]);
  }
  // Gaps are read over when that costs less than a request.
  double Seconds(const ReadCost& cost) const {
    const double apart = cost.Seconds(1, 512 + record_bytes_);
    double seconds = apart;
    for (const double step : steps_) seconds += std::min(step / cost.bytes_per_second, apart);
    return seconds;
  }

 private:
  const double record_bytes_;
  std::vector<double> steps_;
};

// Of batches; shares are of what the disk gave a moment before.
struct ReadFigures {
  Spread rate;                                    // Keys a second.
  Spread cpu, request_seconds, bytes_per_second;  // CPU: seconds a key.
  Spread of_own_plan, of_best_plan, of_sectors;
  double requests_a_key = 0, bytes_a_key = 0;
};

// Of rounds of updates; rates are rows a second.
struct UpdateFigures {
  Spread rate, paid_rate;                // Until all is written; until compaction is done.
  Spread longest, median, cpu, waiting;  // Seconds of a write, of a key; a share of the writing.
  Spread amplification, of_disk, of_both, space;
};

class Bench {
 public:
  Bench(FileSystem* fs, const Settings& settings)
      : fs_(fs),
        settings_(settings),
        rows_(settings.keys, settings.row_bytes, settings.seed, settings.seed + 1) {}

  Status Run();
  // One size of files, one line.
  Status RunFileSize();

 private:
  Status Load();
  Status Prepare();
  Status MeasureBatches(std::uint64_t batch, ReadFigures* figures);
  Status ReadBatches(std::uint64_t batch);
  Status MeasureUpdates(UpdateFigures* figures);
  Status CommitNewest();
  Status OpenStore();
  Status Update();
  Status Reopen();
  // What reads cost now, on the store's own files; in a tiny run as the scratch file said.
  Status MeasureReads();
  // What writes cost now, with so many bytes read from the store's files for each that is written.
  Result<double> MeasureWritesBeside(double reads) const;
  void DrawKeys(std::uint64_t n);
  void FindPlaces();                                         // Of the chosen rows.
  std::vector<std::unique_ptr<BenchRows>> MakeRows() const;  // Of batches to be written.
  Status ReadOnce(std::uint64_t n, double* seconds, double* cpu);

  FileSystem* const fs_;
  const Settings settings_;
  Spread disk_writes_;  // Bytes a second.
  ReadCost cost_;       // Of the last measurement.
  StoreOptions options_;
  DiskQuota quota_{std::uint64_t{1} << 40};
  std::unique_ptr<Store> store_;
  ManifestReference manifest_;  // Of the last commit.
  std::uint64_t generation_ = 1;
  BenchRows rows_;
  std::vector<std::byte*> targets_;
};

void Bench::DrawKeys(std::uint64_t n) {
  settings_.zipf != 0 ? rows_.ChooseZipf(n) : rows_.ChooseUniform(n);
  FindPlaces();
}

void Bench::FindPlaces() {
  targets_.resize(rows_.keys().size());
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    targets_[i] = rows_.bytes().data() + i * settings_.row_bytes;
  }
}

std::vector<std::unique_ptr<BenchRows>> Bench::MakeRows() const {
  std::vector<std::unique_ptr<BenchRows>> rows;
  for (std::uint64_t i = 0; i < BenchWrites::kBatches; ++i) {
    rows.push_back(std::make_unique<BenchRows>(settings_.keys, settings_.row_bytes, settings_.seed,
                                               settings_.seed + 2 + i));
  }
  return rows;
}

Status Bench::Load() {
  const Clock* clock = Clock::Real();
  // With the time in which rows are made.
  const double begin_load = clock->MonotonicSeconds();
  BenchWrites writes(store_.get(), MakeRows(), kNewKey);
  PartRates parts(settings_.keys, begin_load);
  for (std::uint64_t begin = 0; begin < settings_.keys; begin += settings_.load_batch) {
    TERRACE_RETURN_IF_ERROR(writes.Write([&](BenchRows* rows) {
      rows->ChooseRange(begin, std::min(settings_.load_batch, settings_.keys - begin));
      rows->Make(1);
    }));
    const std::uint64_t end = std::min(begin + settings_.load_batch, settings_.keys);
    // The first batches are taken before any is written.
    const double now = clock->MonotonicSeconds();
    end <= BenchWrites::kBatches* settings_.load_batch ? parts.Skip(end, now)
                                                       : parts.Done(end, now);
  }
  TERRACE_RETURN_IF_ERROR(writes.Finish());
  const double seconds = clock->MonotonicSeconds() - begin_load;
  const double cpu = writes.cpu_seconds();
  const double start = clock->MonotonicSeconds();
  TERRACE_RETURN_IF_ERROR(CommitNewest());
  const double commit = clock->MonotonicSeconds() - start;
  const StoreStats stats = store_->stats();
  std::printf(
      "load: %.2f M keys/s, its parts %s, %.2f GB/s (%.0f %% of the disk's writes); commit %.2f s; "
      "%llu files, index %.2f bytes a key; CPU %.3f us a key; n %zu\n",
      static_cast<double>(settings_.keys) / seconds * 1e-6,
      SpreadOf(parts.rates()).Text(2, 1e-6).c_str(),
      static_cast<double>(stats.write_bytes) / seconds * 1e-9,
      100 * static_cast<double>(stats.write_bytes) / seconds / disk_writes_.median, commit,
      static_cast<unsigned long long>(stats.files),
      static_cast<double>(stats.index_bytes) / static_cast<double>(stats.live_rows),
      cpu / static_cast<double>(settings_.keys) * 1e6, parts.rates().size());
  return OkStatus();
}

// What only an older manifest names is neither compacted nor given back.
Status Bench::CommitNewest() {
  const std::uint64_t id = manifest_.id + 1;
  TERRACE_ASSIGN_OR_RETURN(manifest_, store_->Commit(id));
  return id == 1 ? OkStatus() : store_->Drop(id - 1);
}

Status Bench::ReadOnce(std::uint64_t n, double* seconds, double* cpu) {
  DrawKeys(n);
  const double cpu_before = ProcessCpuSeconds();
  const double start = Clock::Real()->MonotonicSeconds();
  TERRACE_RETURN_IF_ERROR(store_->Read(rows_.keys(), targets_, rows_.found()));
  *seconds = Clock::Real()->MonotonicSeconds() - start;
  *cpu = ProcessCpuSeconds() - cpu_before;
  return rows_.AllRight() ? OkStatus() : InternalError("a row is lost or wrong");
}

Status Bench::MeasureReads() {
  TERRACE_ASSIGN_OR_RETURN(
      cost_, MeasureStoreReads(fs_, {options_.directory}, options_.read_queue,
                               Store::ReadBufferBytes(options_.index, options_.row_bytes,
                                                      options_.group, options_.io_buffer_bytes),
                               cost_));
  return OkStatus();
}

Result<double> Bench::MeasureWritesBeside(double reads) const {
  TERRACE_ASSIGN_OR_RETURN(const BenchFiles files, BenchFiles::Open(fs_, {options_.directory},
                                                                    SteadyReads::kLeastFileBytes));
  if (files.empty()) return disk_writes_.median;  // A tiny run.
  TERRACE_ASSIGN_OR_RETURN(auto queue, fs_->NewReadQueue(options_.read_queue));
  SteadyReads steady(queue.get(), files.files());
  TERRACE_RETURN_IF_ERROR(steady.Start());
  TERRACE_ASSIGN_OR_RETURN(const double rate,
                           MeasureDiskWrites(fs_, settings_.folder, settings_.disk_mib * kMiB,
                                             settings_.seed, [&](std::uint64_t bytes) {
                                               steady.Read(reads * static_cast<double>(bytes));
                                             }));
  TERRACE_RETURN_IF_ERROR(steady.status());
  return rate;
}

Status Bench::MeasureBatches(std::uint64_t batch, ReadFigures* figures) {
  const double record_bytes = static_cast<double>((settings_.row_bytes + 7) / 8 * 8 + 24);
  const PlanModel model(batch, settings_.keys, record_bytes, rows_.rng());
  std::vector<double> rates, of_own_plan, of_best_plan, of_sectors, cpu, a, b;
  const auto n = static_cast<double>(batch);
  const StoreStats first = store_->stats();
  StoreStats before = first;
  for (std::uint64_t repeat = 0; repeat < settings_.repeats; ++repeat) {
    // The disk is shared: what it gave a moment ago is what it is compared with.
    TERRACE_RETURN_IF_ERROR(MeasureReads());
    double seconds, cpu_of_read;
    TERRACE_RETURN_IF_ERROR(ReadOnce(batch, &seconds, &cpu_of_read));
    const StoreStats after = store_->stats();
    const double requests = static_cast<double>(after.read_requests - before.read_requests);
    const double bytes = static_cast<double>(after.read_bytes - before.read_bytes);
    rates.push_back(n / seconds);
    cpu.push_back(cpu_of_read / n);
    a.push_back(cost_.request_seconds);
    b.push_back(cost_.bytes_per_second);
    of_own_plan.push_back(cost_.Seconds(requests, bytes) / seconds);
    of_best_plan.push_back(model.Seconds(cost_) / seconds);
    of_sectors.push_back(n * cost_.Seconds(1, 512) / seconds);
    before = after;
  }
  const auto rows = static_cast<double>(before.rows_read - first.rows_read);
  figures->rate = SpreadOf(rates);
  figures->cpu = SpreadOf(cpu);
  figures->request_seconds = SpreadOf(a);
  figures->bytes_per_second = SpreadOf(b);
  figures->of_own_plan = SpreadOf(of_own_plan);
  figures->of_best_plan = SpreadOf(of_best_plan);
  figures->of_sectors = SpreadOf(of_sectors);
  figures->requests_a_key = static_cast<double>(before.read_requests - first.read_requests) / rows;
  figures->bytes_a_key = static_cast<double>(before.read_bytes - first.read_bytes) / rows;
  return OkStatus();
}

Status Bench::ReadBatches(std::uint64_t batch) {
  ReadFigures read;
  TERRACE_RETURN_IF_ERROR(MeasureBatches(batch, &read));
  std::printf(
      "read %8llu keys: %s K keys/s, %.0f %% (%.0f..%.0f) of the cheapest plan's model, %.0f %% of "
      "its own plan's, %.0f %% of the disk's random sectors; a = %.2f us, b = %.2f GB/s; CPU %.2f "
      "us a key (%.2f..%.2f); %.2f requests and %.0f bytes a key; n %zu\n",
      static_cast<unsigned long long>(batch), read.rate.Text(0, 1e-3).c_str(),
      100 * read.of_best_plan.median, 100 * read.of_best_plan.least, 100 * read.of_best_plan.most,
      100 * read.of_own_plan.median, 100 * read.of_sectors.median,
      read.request_seconds.median * 1e6, read.bytes_per_second.median * 1e-9, read.cpu.median * 1e6,
      read.cpu.least * 1e6, read.cpu.most * 1e6, read.requests_a_key, read.bytes_a_key,
      read.rate.samples);
  std::fflush(stdout);
  return OkStatus();
}

Status Bench::MeasureUpdates(UpdateFigures* figures) {
  const Clock* clock = Clock::Real();
  const std::uint64_t batch = std::min<std::uint64_t>(200'000, settings_.keys / 4);
  const double record_bytes = static_cast<double>((settings_.row_bytes + 7) / 8 * 8 + 40);
  std::vector<double> rate, paid_rate, longest, median, cpu, waiting;
  std::vector<double> amplification, of_disk, of_both, space;
  for (std::uint64_t round = 0; round < settings_.rounds; ++round) {
    TERRACE_RETURN_IF_ERROR(CommitNewest());
    const StoreStats before = store_->stats();
    double written = 0;
    // To the last moment, compaction's end included, and with the time in which rows are made.
    const double begin = clock->MonotonicSeconds();
    BenchWrites writes(store_.get(), MakeRows(), kStoredKey);
    do {
      ++generation_;
      TERRACE_RETURN_IF_ERROR(writes.Write([&](BenchRows* rows) {
        settings_.zipf != 0 ? rows->ChooseZipf(batch) : rows->ChooseUniform(batch);
        rows->Make(generation_);
      }));
      written += static_cast<double>(batch);
      TERRACE_RETURN_IF_ERROR(store_->background_status());
    } while (clock->MonotonicSeconds() - begin < static_cast<double>(settings_.update_seconds));
    TERRACE_RETURN_IF_ERROR(writes.Finish());
    const double writing = clock->MonotonicSeconds() - begin;
    TERRACE_RETURN_IF_ERROR(store_->CompactNow());
    const double total = clock->MonotonicSeconds() - begin;
    const StoreStats after = store_->stats();
    const auto bytes = static_cast<double>(after.write_bytes - before.write_bytes);
    const auto read = static_cast<double>(after.read_bytes - before.read_bytes);
    TERRACE_ASSIGN_OR_RETURN(const double beside, MeasureWritesBeside(read / bytes));
    const Spread write = SpreadOf(writes.seconds());
    rate.push_back(written / writing);
    paid_rate.push_back(written / total);
    longest.push_back(write.most);
    median.push_back(write.median);
    cpu.push_back(writes.cpu_seconds() / written);
    waiting.push_back((after.compaction_wait_seconds - before.compaction_wait_seconds) / writing);
    amplification.push_back(bytes / (written * record_bytes));
    of_disk.push_back(bytes / total / disk_writes_.median);
    of_both.push_back(bytes / total / beside);
    space.push_back(static_cast<double>(after.disk_bytes - after.checkpoint_only_bytes) /
                    static_cast<double>(after.live_bytes));
  }
  *figures = {SpreadOf(rate),    SpreadOf(paid_rate), SpreadOf(longest),       SpreadOf(median),
              SpreadOf(cpu),     SpreadOf(waiting),   SpreadOf(amplification), SpreadOf(of_disk),
              SpreadOf(of_both), SpreadOf(space)};
  return OkStatus();
}

Status Bench::Update() {
  UpdateFigures update;
  TERRACE_RETURN_IF_ERROR(MeasureUpdates(&update));
  std::printf(
      "update: %s M keys/s, with compaction paid to its end %s M keys/s at write amplification %s "
      "(%s %% of what the disk's writes allow, %s %% of what they do beside as many reads as "
      "compaction's), space %sx, longest write %s s of a median of %s, %s %% of the writing for "
      "compaction to catch up, CPU of the writing threads %s us a key; n %zu\n",
      update.rate.Text(2, 1e-6).c_str(), update.paid_rate.Text(2, 1e-6).c_str(),
      update.amplification.Text(2).c_str(), update.of_disk.Text(0, 100).c_str(),
      update.of_both.Text(0, 100).c_str(), update.space.Text(2).c_str(),
      update.longest.Text(3).c_str(), update.median.Text(3).c_str(),
      update.waiting.Text(0, 100).c_str(), update.cpu.Text(3, 1e6).c_str(), update.rate.samples);
  return OkStatus();
}

Status Bench::Reopen() {
  TERRACE_RETURN_IF_ERROR(CommitNewest());
  const std::uint64_t rows = store_->stats().live_rows;
  std::vector<double> all, cpu, of_disk;
  for (std::uint64_t repeat = 0; repeat < settings_.repeats; ++repeat) {
    store_.reset();
    TERRACE_RETURN_IF_ERROR(MeasureReads());
    const double cpu_before = ProcessCpuSeconds();
    const double start = Clock::Real()->MonotonicSeconds();
    TERRACE_RETURN_IF_ERROR(OpenStore());
    const double seconds = Clock::Real()->MonotonicSeconds() - start;
    cpu.push_back(ProcessCpuSeconds() - cpu_before);
    all.push_back(seconds);
    const StoreStats stats = store_->stats();
    if (stats.live_rows != rows) return InternalError("rows are lost by reopening");
    of_disk.push_back(static_cast<double>(stats.read_bytes) / seconds / cost_.bytes_per_second);
  }
  const StoreStats stats = store_->stats();
  const auto n = static_cast<double>(rows);
  const Spread seconds = SpreadOf(all);
  std::printf(
      "open: %s s, CPU %s, %.2f M keys/s; %.1f bytes read a key, %s %% of the disk's sequential "
      "rate; index %.2f bytes a key; n %zu\n",
      seconds.Text(3).c_str(), SpreadOf(cpu).Text(3).c_str(), n / seconds.median * 1e-6,
      static_cast<double>(stats.read_bytes) / n, SpreadOf(of_disk).Text(0, 100).c_str(),
      static_cast<double>(stats.index_bytes) / n, seconds.samples);
  double read_seconds, read_cpu;
  return ReadOnce(std::min<std::uint64_t>(settings_.keys / 2, 20'000), &read_seconds, &read_cpu);
}

// As the last commit left it. REQUIRES: it is not open.
Status Bench::OpenStore() {
  TERRACE_ASSIGN_OR_RETURN(
      store_, Store::Open(fs_, Clock::Real(), &quota_, options_, manifest_, {&manifest_, 1}));
  return OkStatus();
}

Status Bench::Prepare() {
  TERRACE_ASSIGN_OR_RETURN(disk_writes_,
                           MeasureDiskWriteRounds(fs_, settings_.folder, settings_.disk_mib * kMiB,
                                                  settings_.seed, settings_.rounds));
  options_.directory = JoinPath(settings_.folder, "store_bench.rows");
  options_.table = "bench";
  options_.row_bytes = static_cast<std::uint32_t>(settings_.row_bytes);
  options_.read_threads = static_cast<int>(settings_.read_threads);
  options_.read_queue.depth = static_cast<int>(settings_.depth);
  if (settings_.group != 0) options_.index = IndexKind::kGroup;
  options_.expected_rows = settings_.keys;
  options_.file_bytes = settings_.file_mib * kMiB;
  options_.read_mode = settings_.whole_file != 0 ? ReadMode::kWholeFile : ReadMode::kPlanned;
  TERRACE_RETURN_IF_ERROR(RemoveTree(fs_, options_.directory));
  ReadCostOptions calibration;
  calibration.folder = settings_.folder;
  calibration.read_queue = options_.read_queue;
  calibration.buffer_bytes = Store::ReadBufferBytes(options_.index, options_.row_bytes,
                                                    options_.group, options_.io_buffer_bytes);
  calibration.quota = &quota_;
  const double start = Clock::Real()->MonotonicSeconds();
  TERRACE_RETURN_IF_ERROR(RemoveTree(fs_, JoinPath(settings_.folder, "read-cost")));
  TERRACE_ASSIGN_OR_RETURN(const KnownReadCost known,
                           FindReadCost(fs_, Clock::Real(), calibration));
  TERRACE_RETURN_IF_ERROR(RemoveTree(fs_, JoinPath(settings_.folder, "read-cost")));
  cost_ = known.cost;
  options_.merge_gap_bytes =
      settings_.gap_bytes == ~std::uint64_t{0} ? cost_.MergeGapBytes() : settings_.gap_bytes;
  std::printf(
      "disk: a = %.2f us a request, b = %.2f GB/s, measured in %.2f s%s; writes %s GB/s; "
      "gaps of up to %.1f KiB are read over\n",
      cost_.request_seconds * 1e6, cost_.bytes_per_second * 1e-9,
      Clock::Real()->MonotonicSeconds() - start, known.why.c_str(),
      disk_writes_.Text(2, 1e-9).c_str(), static_cast<double>(options_.merge_gap_bytes) / 1024);
  TERRACE_ASSIGN_OR_RETURN(store_, Store::Create(fs_, Clock::Real(), &quota_, options_));
  return Load();
}

Status Bench::RunFileSize() {
  TERRACE_RETURN_IF_ERROR(Prepare());
  UpdateFigures update;
  TERRACE_RETURN_IF_ERROR(MeasureUpdates(&update));
  TERRACE_RETURN_IF_ERROR(CommitNewest());
  ReadFigures reads[2];
  for (const ReadMode mode : {ReadMode::kPlanned, ReadMode::kWholeFile}) {
    store_.reset();
    options_.read_mode = mode;
    TERRACE_RETURN_IF_ERROR(OpenStore());
    TERRACE_RETURN_IF_ERROR(
        MeasureBatches(settings_.batches.front(), &reads[static_cast<int>(mode)]));
  }
  std::printf(
      "files of %4llu MiB, %s: overwrites at %s %% of what the disk's writes allow (%s %% beside "
      "as "
      "many reads as compaction's), write amplification %s, space %sx, longest write %.1f medians; "
      "reads of the cheapest plan's model: planned %s %%, whole_file %s %%; n %zu and %zu\n",
      static_cast<unsigned long long>(settings_.file_mib),
      settings_.zipf != 0 ? "Zipf   " : "uniform", update.of_disk.Text(0, 100).c_str(),
      update.of_both.Text(0, 100).c_str(), update.amplification.Text(2).c_str(),
      update.space.Text(2).c_str(), update.longest.median / update.median.median,
      reads[0].of_best_plan.Text(0, 100).c_str(), reads[1].of_best_plan.Text(0, 100).c_str(),
      update.rate.samples, reads[0].rate.samples);
  std::fflush(stdout);
  store_.reset();
  return RemoveTree(fs_, options_.directory);
}

Status Bench::Run() {
  TERRACE_RETURN_IF_ERROR(Prepare());
  for (const std::uint64_t batch : settings_.batches) {
    if (batch * 2 <= settings_.keys) TERRACE_RETURN_IF_ERROR(ReadBatches(batch));
  }
  TERRACE_RETURN_IF_ERROR(Update());
  TERRACE_RETURN_IF_ERROR(Reopen());
  const ProcessMemory memory = ReadProcessMemory();
  std::printf("peak memory %.0f MB\n", static_cast<double>(memory.peak_bytes) * 1e-6);
  store_.reset();
  return RemoveTree(fs_, options_.directory);
}

Status RunAll(FileSystem* fs, Settings settings) {
  if (settings.tiny || settings.file_sizes == 0) TERRACE_RETURN_IF_ERROR(Bench(fs, settings).Run());
  if (!settings.tiny && settings.file_sizes == 0) return OkStatus();
  for (const std::uint64_t zipf : {0, 1}) {
    for (const std::uint64_t size : settings.sizes_mib) {
      settings.zipf = zipf;
      settings.file_mib = size;
      TERRACE_RETURN_IF_ERROR(Bench(fs, settings).RunFileSize());
    }
  }
  return OkStatus();
}

bool ParseArguments(int argc, char** argv, Settings* settings) {
  BenchFlags flags([settings] {
    settings->tiny = true;
    settings->keys = 20'000;
    settings->batches = {200, 5'000};
    settings->load_batch = 5'000;
    settings->repeats = 2;
    settings->rounds = 2;
    settings->update_seconds = 0;
    settings->disk_mib = 16;
    settings->sizes_mib = {1, 2};
  });
  flags.Add("folder", &settings->folder);
  flags.Add("keys", &settings->keys);
  flags.Add("batch", &settings->batches);
  flags.Add("row-bytes", &settings->row_bytes);
  flags.Add("gap", &settings->gap_bytes);
  flags.Add("repeats", &settings->repeats);
  flags.AddSeed(&settings->seed);
  flags.Add("rounds", &settings->rounds);
  flags.Add("update-seconds", &settings->update_seconds);
  flags.Add("read-threads", &settings->read_threads);
  flags.Add("whole-file", &settings->whole_file);
  flags.Add("group", &settings->group);
  flags.Add("zipf", &settings->zipf);
  flags.Add("depth", &settings->depth);
  flags.Add("file-mib", &settings->file_mib);
  flags.Add("file-sizes", &settings->file_sizes);
  if (!flags.Parse(argc, argv)) return false;
  if (settings->keys >= 1000 && settings->row_bytes >= 8 && settings->repeats > 0 &&
      settings->rounds > 0 && settings->file_mib > 0) {
    return true;
  }
  std::fprintf(stderr,
               "store_bench: at least 1000 keys, rows of 8 bytes, one repeat and round, and files "
               "of a MiB\n");
  return false;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  terrace::ConfigureAllocator();
  terrace::Settings settings;
  if (!terrace::ParseArguments(argc, argv, &settings)) return 2;
  const terrace::Status status = terrace::RunAll(terrace::FileSystem::Posix(), settings);
  if (status.ok()) return 0;
  std::fprintf(stderr, "store_bench: %s\n", status.ToString().c_str());
  return 1;
}
