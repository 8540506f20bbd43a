// Loads a store, reads uniform batches of fresh keys by size of batch, and overwrites rows with
// compaction paid, as a cache does: a batch goes to the disk while the index takes the last one in
// and the next is made. Every row read is checked. Reads are put beside the model of the disk, t =
// a * requests + bytes / b, which is measured on the store's own files before every batch: once for
// the requests that the store made, once for the cheapest plan over the same number of random keys,
// and beside the disk's rate of random sectors; writes beside the disk's rate in the same run, and
// beside the rate that it has while it is read from as well, as compaction does.
// Direct I/O: no page cache takes part.
//
//   store_bench [--tiny] [--folder F] [--keys N] [--row-bytes B] [--gap BYTES] [--repeats R]
//               [--seed S] [--update-seconds T] [--read-threads N] [--whole-file 0|1] [--depth N]
//               [--batch N]...    (besides 20,000, 200,000 and 1,000,000)
//               [--file-mib M] [--zipf 0|1] [--file-sizes 0|1]
//               [--group 0|1]     (the index by group: what it is measured by is an index by key's)
//
// --zipf draws keys by Zipf's law of exponent 1. --file-sizes 1 measures nothing but what the size
// of a parameter file costs: for sizes up to 256 MiB, uniform and Zipf overwrites with compaction
// paid, and after them reads of the first size of batch, planned and by whole files.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/thread.h"
#include "terrace/io/file_system.h"
#include "terrace/store/read_cost.h"
#include "terrace/store/store.h"
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
  std::uint64_t update_seconds = 10;
  std::vector<std::uint64_t> batches = {20'000, 200'000, 1'000'000};
  std::uint64_t load_batch = 500'000;
  std::uint64_t disk_mib = 512;
  std::uint64_t file_mib = StoreOptions().file_bytes / kMiB;
  std::uint64_t zipf = 0;
  bool tiny = false;  // Everything, on little.
  std::uint64_t file_sizes = 0;
  std::vector<std::uint64_t> sizes_mib = {4, 8, 16, 32, 64, 128, 256};
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Bytes a second, sync included. beside(bytes) is called after each write.
Result<double> MeasureWrites(
    FileSystem* fs, const Settings& settings,
    const std::function<void(std::uint64_t)>& beside = [](std::uint64_t) {}) {
  const std::string path = JoinPath(settings.folder, "store_bench.disk");
  TERRACE_RETURN_IF_ERROR(RemoveTree(fs, path));
  const Clock* clock = Clock::Real();
  const std::uint64_t bytes = settings.disk_mib * kMiB;
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(8 * kMiB));
  Rng rng(settings.seed);
  for (std::uint64_t at = 0; at < buffer.size(); at += 8) {
    const std::uint64_t word = rng.Next();
    std::memcpy(buffer.data() + at, &word, 8);
  }
  TERRACE_ASSIGN_OR_RETURN(auto file, fs->Open(path, OpenMode::kCreateDirect));
  const double start = clock->MonotonicSeconds();
  for (std::uint64_t at = 0; at < bytes; at += buffer.size()) {
    const std::uint64_t part = std::min(buffer.size(), bytes - at);
    TERRACE_RETURN_IF_ERROR(file->WriteAt(at, buffer.span().first(part)));
    beside(part);
  }
  TERRACE_RETURN_IF_ERROR(file->Sync());
  const double rate = static_cast<double>(bytes) / (clock->MonotonicSeconds() - start);
  TERRACE_RETURN_IF_ERROR(fs->Remove(path));
  return rate;
}

std::vector<File*> Borrowed(const std::vector<std::unique_ptr<File>>& files) {
  std::vector<File*> borrowed;
  for (const auto& file : files) borrowed.push_back(file.get());
  return borrowed;
}

// A thread that reads files from their beginnings to their ends, as many bytes as it is told.
class SteadyReads {
 private:
  static constexpr std::size_t kRequests = 4;
  static constexpr double kMostBehind = 16.0 * kMiB;

 public:
  static constexpr std::uint64_t kLeastFileBytes = kRequests * kMiB;

  // REQUIRES: files of kLeastFileBytes. All are borrowed.
  SteadyReads(ReadQueue* queue, std::vector<File*> files)
      : queue_(queue), files_(std::move(files)) {}
  ~SteadyReads() {
    {
      MutexLock lock(&mu_);
      ended_ = true;
      changed_.NotifyAll();
    }
    if (thread_.joinable()) thread_.Join();
  }
  Status Start() {
    TERRACE_ASSIGN_OR_RETURN(buffer_, HugeBuffer::Allocate(kRequests * kMiB));
    thread_ = Thread("reads", ThreadPriority::kNormal, [this] { Loop(); });
    return OkStatus();
  }
  // Blocks: while more than kMostBehind bytes are left to read.
  void Read(double bytes) {
    MutexLock lock(&mu_);
    wanted_ += bytes;
    changed_.NotifyAll();
    while (wanted_ > kMostBehind && status_.ok()) changed_.Wait(&mu_);
  }
  Status status() const {
    MutexLock lock(&mu_);
    return status_;
  }

 private:
  void Loop() {
    for (std::size_t f = 0;; f = (f + 1) % files_.size()) {
      const Result<std::uint64_t> size = files_[f]->Size();
      Status status = size.status();
      for (std::uint64_t at = 0; status.ok() && at + kRequests * kMiB <= *size;
           at += kRequests * kMiB) {
        {
          MutexLock lock(&mu_);
          while (wanted_ <= 0 && !ended_) changed_.Wait(&mu_);
          if (ended_) return;
        }
        std::array<ReadRequest, kRequests> requests;
        for (std::size_t i = 0; i < kRequests; ++i) {
          requests[i].file = files_[f];
          requests[i].offset = at + i * kMiB;
          requests[i].buffer = buffer_.span().subspan(i * kMiB, kMiB);
        }
        status = queue_->Run(requests);
        MutexLock lock(&mu_);
        wanted_ -= static_cast<double>(kRequests * kMiB);
        changed_.NotifyAll();
      }
      if (status.ok()) continue;
      MutexLock lock(&mu_);
      status_ = status;
      changed_.NotifyAll();
      return;
    }
  }

  ReadQueue* const queue_;
  const std::vector<File*> files_;
  HugeBuffer buffer_;
  mutable Mutex mu_;
  CondVar changed_;
  double wanted_ TERRACE_GUARDED_BY(mu_) = 0;
  bool ended_ TERRACE_GUARDED_BY(mu_) = false;
  Status status_ TERRACE_GUARDED_BY(mu_);
  Thread thread_;
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

// Medians of batches; shares are of what the disk gave a moment before.
struct ReadFigures {
  std::vector<double> seconds;  // Sorted.
  double cpu = 0, request_seconds = 0, bytes_per_second = 0;
  double of_own_plan = 0, of_best_plan = 0, of_sectors = 0;
  double requests_a_key = 0, bytes_a_key = 0;
};

struct UpdateFigures {
  double written = 0;                                                            // Rows.
  double writing = 0, waiting = 0, total = 0, longest = 0, median = 0, cpu = 0;  // Seconds.
  double amplification = 0, of_disk = 0, of_both = 0, space = 0;
};

class Bench {
 public:
  Bench(FileSystem* fs, const Settings& settings)
      : fs_(fs), settings_(settings), rows_(settings.keys, settings.row_bytes, settings.seed + 1) {}

  Status Run();
  // One size of files, one line.
  Status RunFileSize();

 private:
  Status Load();
  Status Prepare();
  Status MeasureBatches(std::uint64_t batch, ReadFigures* figures);
  Status ReadBatches(std::uint64_t batch);
  Status MeasureUpdates(UpdateFigures* figures);
  Status Update();
  Status Reopen();
  // What reads cost now, on the store's own files.
  Status MeasureReads();
  // The store's files.
  Result<std::vector<std::unique_ptr<File>>> OpenFiles(std::uint64_t least_bytes) const;
  // What writes cost now, with so many bytes read from the store's files for each that is written.
  Result<double> MeasureWritesBeside(double reads) const;
  void DrawKeys(std::uint64_t n);
  void FindPlaces();                                         // Of the chosen rows.
  std::vector<std::unique_ptr<BenchRows>> MakeRows() const;  // Of batches to be written.
  Status ReadOnce(std::uint64_t n, double* seconds, double* cpu);

  FileSystem* const fs_;
  const Settings settings_;
  double disk_writes_ = 0;  // Bytes a second.
  ReadCost cost_;           // Of the last measurement.
  StoreOptions options_;
  DiskQuota quota_{std::uint64_t{1} << 40};
  std::unique_ptr<Store> store_;
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
    rows.push_back(
        std::make_unique<BenchRows>(settings_.keys, settings_.row_bytes, settings_.seed + 2 + i));
  }
  return rows;
}

Status Bench::Load() {
  const Clock* clock = Clock::Real();
  // With the time in which rows are made.
  const double begin_load = clock->MonotonicSeconds();
  BenchWrites writes(store_.get(), MakeRows(), kNewKey);
  for (std::uint64_t begin = 0; begin < settings_.keys; begin += settings_.load_batch) {
    TERRACE_RETURN_IF_ERROR(writes.Write([&](BenchRows* rows) {
      rows->ChooseRange(begin, std::min(settings_.load_batch, settings_.keys - begin));
      rows->Make(1);
    }));
  }
  TERRACE_RETURN_IF_ERROR(writes.Finish());
  const double seconds = clock->MonotonicSeconds() - begin_load;
  const double cpu = writes.cpu_seconds();
  const double start = clock->MonotonicSeconds();
  TERRACE_ASSIGN_OR_RETURN([[maybe_unused]] const ManifestReference reference, store_->Commit(1));
  const double commit = clock->MonotonicSeconds() - start;
  const StoreStats stats = store_->stats();
  std::printf(
      "load: %.2f M keys/s, %.2f GB/s (%.0f %% of the disk's writes); commit %.2f s; %llu files, "
      "index %.2f bytes a key; CPU %.3f us a key\n",
      static_cast<double>(settings_.keys) / seconds * 1e-6,
      static_cast<double>(stats.write_bytes) / seconds * 1e-9,
      100 * static_cast<double>(stats.write_bytes) / seconds / disk_writes_, commit,
      static_cast<unsigned long long>(stats.files),
      static_cast<double>(stats.index_bytes) / static_cast<double>(stats.live_rows),
      cpu / static_cast<double>(settings_.keys) * 1e6);
  return OkStatus();
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

Result<std::vector<std::unique_ptr<File>>> Bench::OpenFiles(std::uint64_t least_bytes) const {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs_->List(options_.directory));
  std::vector<std::unique_ptr<File>> files;
  for (const FileInfo& entry : entries) {
    if (!entry.name.starts_with("rows-") || entry.size < least_bytes) continue;
    TERRACE_ASSIGN_OR_RETURN(
        auto file, fs_->Open(JoinPath(options_.directory, entry.name), OpenMode::kReadDirect));
    files.push_back(std::move(file));
  }
  return files;
}

Status Bench::MeasureReads() {
  TERRACE_ASSIGN_OR_RETURN(const auto files, OpenFiles(kMiB));
  if (files.empty()) return OkStatus();  // A tiny run: as the scratch file said.
  TERRACE_ASSIGN_OR_RETURN(auto queue, fs_->NewReadQueue(options_.read_queue));
  TERRACE_ASSIGN_OR_RETURN(cost_, MeasureReadCost(Clock::Real(), queue.get(), Borrowed(files),
                                                  options_.io_buffer_bytes));
  return OkStatus();
}

Result<double> Bench::MeasureWritesBeside(double reads) const {
  TERRACE_ASSIGN_OR_RETURN(const auto files, OpenFiles(SteadyReads::kLeastFileBytes));
  if (files.empty()) return disk_writes_;  // A tiny run.
  TERRACE_ASSIGN_OR_RETURN(auto queue, fs_->NewReadQueue(options_.read_queue));
  SteadyReads steady(queue.get(), Borrowed(files));
  TERRACE_RETURN_IF_ERROR(steady.Start());
  TERRACE_ASSIGN_OR_RETURN(const double rate,
                           MeasureWrites(fs_, settings_, [&](std::uint64_t bytes) {
                             steady.Read(reads * static_cast<double>(bytes));
                           }));
  TERRACE_RETURN_IF_ERROR(steady.status());
  return rate;
}

Status Bench::MeasureBatches(std::uint64_t batch, ReadFigures* figures) {
  const double record_bytes = static_cast<double>((settings_.row_bytes + 7) / 8 * 8 + 24);
  const PlanModel model(batch, settings_.keys, record_bytes, rows_.rng());
  std::vector<double>& seconds = figures->seconds;
  seconds.resize(settings_.repeats);
  std::vector<double> of_own_plan, of_best_plan, of_sectors, cpu, a, b;
  const auto n = static_cast<double>(batch);
  const StoreStats first = store_->stats();
  StoreStats before = first;
  for (double& one : seconds) {
    // The disk is shared: what it gave a moment ago is what it is compared with.
    TERRACE_RETURN_IF_ERROR(MeasureReads());
    double cpu_of_read;
    TERRACE_RETURN_IF_ERROR(ReadOnce(batch, &one, &cpu_of_read));
    const StoreStats after = store_->stats();
    const double requests = static_cast<double>(after.read_requests - before.read_requests);
    const double bytes = static_cast<double>(after.read_bytes - before.read_bytes);
    cpu.push_back(cpu_of_read);
    a.push_back(cost_.request_seconds);
    b.push_back(cost_.bytes_per_second);
    of_own_plan.push_back(cost_.Seconds(requests, bytes) / one);
    of_best_plan.push_back(model.Seconds(cost_) / one);
    of_sectors.push_back(n * cost_.Seconds(1, 512) / one);
    before = after;
  }
  std::sort(seconds.begin(), seconds.end());
  const auto rows = static_cast<double>(before.rows_read - first.rows_read);
  figures->cpu = Median(cpu);
  figures->request_seconds = Median(a);
  figures->bytes_per_second = Median(b);
  figures->of_own_plan = Median(of_own_plan);
  figures->of_best_plan = Median(of_best_plan);
  figures->of_sectors = Median(of_sectors);
  figures->requests_a_key = static_cast<double>(before.read_requests - first.read_requests) / rows;
  figures->bytes_a_key = static_cast<double>(before.read_bytes - first.read_bytes) / rows;
  return OkStatus();
}

Status Bench::ReadBatches(std::uint64_t batch) {
  ReadFigures read;
  TERRACE_RETURN_IF_ERROR(MeasureBatches(batch, &read));
  const auto n = static_cast<double>(batch);
  std::printf(
      "read %8llu keys: %.0f K keys/s (%.0f..%.0f), %.0f %% of the cheapest plan's model, %.0f %% "
      "of its own plan's, %.0f %% of the disk's random sectors; a = %.2f us, b = %.2f GB/s; CPU "
      "%.2f us a key; %.2f requests and %.0f bytes a key\n",
      static_cast<unsigned long long>(batch), n / Median(read.seconds) * 1e-3,
      n / read.seconds.back() * 1e-3, n / read.seconds.front() * 1e-3, 100 * read.of_best_plan,
      100 * read.of_own_plan, 100 * read.of_sectors, read.request_seconds * 1e6,
      read.bytes_per_second * 1e-9, read.cpu / n * 1e6, read.requests_a_key, read.bytes_a_key);
  std::fflush(stdout);
  return OkStatus();
}

Status Bench::MeasureUpdates(UpdateFigures* figures) {
  const Clock* clock = Clock::Real();
  const std::uint64_t batch = std::min<std::uint64_t>(200'000, settings_.keys / 4);
  const StoreStats before = store_->stats();
  std::uint64_t generation = 1;
  // To the last moment, compaction's end included, and with the time in which rows are made.
  const double begin = clock->MonotonicSeconds();
  BenchWrites writes(store_.get(), MakeRows(), kStoredKey);
  do {
    ++generation;
    TERRACE_RETURN_IF_ERROR(writes.Write([&](BenchRows* rows) {
      settings_.zipf != 0 ? rows->ChooseZipf(batch) : rows->ChooseUniform(batch);
      rows->Make(generation);
    }));
    figures->written += static_cast<double>(batch);
    TERRACE_RETURN_IF_ERROR(store_->background_status());
  } while (clock->MonotonicSeconds() - begin < static_cast<double>(settings_.update_seconds));
  TERRACE_RETURN_IF_ERROR(writes.Finish());
  figures->writing = clock->MonotonicSeconds() - begin;
  TERRACE_RETURN_IF_ERROR(store_->CompactNow());
  figures->total = clock->MonotonicSeconds() - begin;
  figures->longest = *std::max_element(writes.seconds().begin(), writes.seconds().end());
  figures->median = Median(writes.seconds());
  figures->cpu = writes.cpu_seconds();
  const StoreStats after = store_->stats();
  const auto bytes = static_cast<double>(after.write_bytes - before.write_bytes);
  figures->waiting = after.compaction_wait_seconds - before.compaction_wait_seconds;
  figures->amplification =
      bytes / (figures->written * static_cast<double>((settings_.row_bytes + 7) / 8 * 8 + 40));
  figures->of_disk = bytes / figures->total / disk_writes_;
  const auto read = static_cast<double>(after.read_bytes - before.read_bytes);
  TERRACE_ASSIGN_OR_RETURN(const double beside, MeasureWritesBeside(read / bytes));
  figures->of_both = bytes / figures->total / beside;
  figures->space = static_cast<double>(after.disk_bytes - after.checkpoint_only_bytes) /
                   static_cast<double>(after.live_bytes);
  return OkStatus();
}

Status Bench::Update() {
  UpdateFigures update;
  TERRACE_RETURN_IF_ERROR(MeasureUpdates(&update));
  std::printf(
      "update: %.2f M keys/s, with compaction paid to its end %.2f M keys/s at write "
      "amplification %.2f (%.0f %% of what the disk's writes allow, %.0f %% of what they do beside "
      "as many reads as compaction's), space %.2fx, longest write %.3f s of a median of %.3f, "
      "%.0f %% of the writing for compaction to catch up, CPU of the writing threads %.3f us a "
      "key\n",
      update.written / update.writing * 1e-6, update.written / update.total * 1e-6,
      update.amplification, 100 * update.of_disk, 100 * update.of_both, update.space,
      update.longest, update.median, 100 * update.waiting / update.writing,
      update.cpu / update.written * 1e6);
  return OkStatus();
}

Status Bench::Reopen() {
  TERRACE_ASSIGN_OR_RETURN(const ManifestReference reference, store_->Commit(2));
  TERRACE_RETURN_IF_ERROR(store_->Drop(1));
  const std::uint64_t rows = store_->stats().live_rows;
  std::vector<double> all, cpu, of_disk;
  for (std::uint64_t repeat = 0; repeat < settings_.repeats; ++repeat) {
    store_.reset();
    TERRACE_RETURN_IF_ERROR(MeasureReads());
    const double cpu_before = ProcessCpuSeconds();
    const double start = Clock::Real()->MonotonicSeconds();
    TERRACE_ASSIGN_OR_RETURN(
        store_, Store::Open(fs_, Clock::Real(), &quota_, options_, reference, {&reference, 1}));
    const double seconds = Clock::Real()->MonotonicSeconds() - start;
    cpu.push_back(ProcessCpuSeconds() - cpu_before);
    all.push_back(seconds);
    const StoreStats stats = store_->stats();
    if (stats.live_rows != rows) return InternalError("rows are lost by reopening");
    of_disk.push_back(static_cast<double>(stats.read_bytes) / seconds / cost_.bytes_per_second);
  }
  std::sort(all.begin(), all.end());
  const StoreStats stats = store_->stats();
  const auto n = static_cast<double>(rows);
  std::printf(
      "open: %.3f s (%.3f..%.3f), CPU %.3f, %.2f M keys/s; %.1f bytes read a key, %.0f %% of the "
      "disk's sequential rate; index %.2f bytes a key\n",
      Median(all), all.front(), all.back(), Median(cpu), n / Median(all) * 1e-6,
      static_cast<double>(stats.read_bytes) / n, 100 * Median(of_disk),
      static_cast<double>(stats.index_bytes) / n);
  double read_seconds, read_cpu;
  return ReadOnce(std::min<std::uint64_t>(settings_.keys / 2, 20'000), &read_seconds, &read_cpu);
}

Status Bench::Prepare() {
  TERRACE_ASSIGN_OR_RETURN(disk_writes_, MeasureWrites(fs_, settings_));
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
      "disk: a = %.2f us a request, b = %.2f GB/s, measured in %.2f s%s; writes %.2f GB/s; "
      "gaps of up to %.1f KiB are read over\n",
      cost_.request_seconds * 1e6, cost_.bytes_per_second * 1e-9,
      Clock::Real()->MonotonicSeconds() - start, known.why.c_str(), disk_writes_ * 1e-9,
      static_cast<double>(options_.merge_gap_bytes) / 1024);
  TERRACE_ASSIGN_OR_RETURN(store_, Store::Create(fs_, Clock::Real(), &quota_, options_));
  return Load();
}

Status Bench::RunFileSize() {
  TERRACE_RETURN_IF_ERROR(Prepare());
  UpdateFigures update;
  TERRACE_RETURN_IF_ERROR(MeasureUpdates(&update));
  TERRACE_ASSIGN_OR_RETURN(const ManifestReference reference, store_->Commit(2));
  TERRACE_RETURN_IF_ERROR(store_->Drop(1));
  ReadFigures reads[2];
  for (const ReadMode mode : {ReadMode::kPlanned, ReadMode::kWholeFile}) {
    store_.reset();
    options_.read_mode = mode;
    TERRACE_ASSIGN_OR_RETURN(
        store_, Store::Open(fs_, Clock::Real(), &quota_, options_, reference, {&reference, 1}));
    TERRACE_RETURN_IF_ERROR(
        MeasureBatches(settings_.batches.front(), &reads[static_cast<int>(mode)]));
  }
  std::printf(
      "files of %4llu MiB, %s: overwrites at %3.0f %% of what the disk's writes allow (%3.0f %% "
      "beside as many reads as compaction's), write amplification %.2f, space %.2fx, longest write "
      "%.1f "
      "medians; reads of the cheapest plan's "
      "model: planned %3.0f %%, whole_file %3.0f %%\n",
      static_cast<unsigned long long>(settings_.file_mib),
      settings_.zipf != 0 ? "Zipf   " : "uniform", 100 * update.of_disk, 100 * update.of_both,
      update.amplification, update.space, update.longest / update.median,
      100 * reads[0].of_best_plan, 100 * reads[1].of_best_plan);
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
      settings->file_mib > 0) {
    return true;
  }
  std::fprintf(stderr,
               "store_bench: at least 1000 keys, rows of 8 bytes, one repeat and files of a MiB\n");
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
