// The index by key and the index by group (docs/decisions/group-index.md) over the same rows of the
// same keys: memory, requests, bytes and time of uniform and Zipf batches, of updates and of
// openings. The two take turns at each sample, so that the disk is the same for both, and what it
// charges for their requests is measured right before. Every row that is read is checked. Prints
// tables in Markdown, medians (least..most). Direct I/O: no page cache takes part.
//
//   store_index_bench [--tiny] [--folder F] [--keys N] [--row-bytes B] [--batch N]...
//                     [--repeats R] [--rounds R] [--update-seconds T] [--read-threads N] [--seed S]
//
// Rows are loaded in the order of their keys' hashes, as a flush of a cache over blocks brings
// them; in any other order the load would write each block many times. --rounds of updates each
// write for --update-seconds and end with their compaction; --repeats is of reads and openings.
#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/testing/bench_keys.h"
#include "terrace/base/testing/bench_spread.h"
#include "terrace/base/units.h"
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
  std::uint64_t keys = 20'000'000;
  std::uint64_t row_bytes = 128;
  std::vector<std::uint64_t> batches = {20'000, 200'000, 1'000'000};
  std::uint64_t repeats = 5;
  std::uint64_t rounds = 3;
  std::uint64_t update_seconds = 10;  // Of a round.
  std::uint64_t read_threads = 2;     // As of a job.
  std::uint64_t seed = 0;
  std::uint64_t load_batch = 500'000;
  std::uint64_t update_batch = 200'000;
  std::uint64_t disk_mib = 512;
};

// By key, then by group.
enum Side : std::size_t { kByKey, kByGroup, kSides };
// Which keys a batch has.
enum Law : std::size_t { kUniform, kZipf, kLaws };

template <typename Value>
using BySide = std::array<Value, kSides>;
using Samples = BySide<std::vector<double>>;

// Three that count, about.
int DigitsFor(double value) { return value >= 100 ? 0 : value >= 10 ? 1 : value >= 0.1 ? 2 : 4; }

// A line of a table: each pair of columns by key and by group, and what the second is of the first.
void PrintLine(const std::string& what, const std::vector<Samples>& pairs, int digits) {
  std::printf("| %s |", what.c_str());
  for (const Samples& samples : pairs) {
    const BySide<Spread> spreads = {SpreadOf(samples[kByKey]), SpreadOf(samples[kByGroup])};
    for (const Spread& spread : spreads) {
      spread.samples == 1 ? std::printf(" %.*f |", digits, spread.median)
                          : std::printf(" %s |", spread.Text(digits).c_str());
    }
    spreads[kByKey].median > 0
        ? std::printf(" %.2f |", spreads[kByGroup].median / spreads[kByKey].median)
        : std::printf(" - |");
  }
  std::printf("\n");
  std::fflush(stdout);
}

// One store and what is known of it.
struct Subject {
  StoreOptions options;
  std::unique_ptr<Store> store;
  ManifestReference manifest;  // Of the last commit.
  std::uint64_t generation = 1;
};

class Bench {
 public:
  explicit Bench(const Settings& settings)
      : settings_(settings),
        rows_(settings.keys, settings.row_bytes, settings.seed, settings.seed + 1) {}

  Status Run();

 private:
  static double Now() { return Clock::Real()->MonotonicSeconds(); }
  static double Difference(std::uint64_t after, std::uint64_t before) {
    return static_cast<double>(after - before);
  }
  double Keys() const { return static_cast<double>(settings_.keys); }
  // Who goes first takes turns too: a first use of memory or a disk that wakes is nobody's.
  static BySide<Side> InTurn(std::uint64_t repeat) {
    return repeat % 2 == 0 ? BySide<Side>{kByKey, kByGroup} : BySide<Side>{kByGroup, kByKey};
  }
  // Of rows that are written alone by key, with their key entries.
  double RecordBytes() const {
    const std::uint64_t bytes = (settings_.row_bytes + 7) / 8 * 8 + 40;
    return static_cast<double>(bytes);
  }

  Status Prepare();
  Status Load();
  Status ReadBatches(std::uint64_t batch);
  Status ReadBatch(std::uint64_t batch, Law law, Side side);
  Status AbsentKeys();
  // Of the keys that rows_ has chosen, all of which are there or none.
  Status ReadChosen(bool there, Law law, Side side);
  Status Updates();
  Status UpdateRound(Law law, Side side);
  Status Openings();
  // What only an older manifest names is neither compacted nor given back.
  static Status CommitNewest(Subject* subject);
  Result<ReadCost> ReadsNow(const Subject& subject) const {
    return MeasureStoreReads(fs_, {subject.options.directory}, subject.options.read_queue,
                             subject.options.io_buffer_bytes, cost_);
  }
  std::vector<std::unique_ptr<BenchRows>> MakeRows() const;
  void DrawKeys(BenchRows* rows, std::uint64_t n, Law law) const {
    law == kZipf ? rows->ChooseZipf(n) : rows->ChooseUniform(n);
  }
  // A sample of the figure of that name, and all of them, in the order of their names' first ones.
  void Add(const char* figure, Law law, Side side, double value);
  void PrintFigures(const std::string& of, std::size_t laws);

  struct Figure {
    const char* name;
    std::vector<Samples> by_law;  // (kLaws)
  };

  FileSystem* const fs_ = FileSystem::Posix();
  const Settings settings_;
  DiskQuota quota_{std::uint64_t{1} << 50};
  ReadCost cost_;
  Spread disk_writes_;  // Bytes a second.
  BySide<Subject> subjects_;
  BenchRows rows_;
  std::vector<std::byte*> targets_;
  std::vector<Figure> figures_;  // Of the lines that come next.
};

void Bench::Add(const char* name, Law law, Side side, double value) {
  auto figure = std::find_if(figures_.begin(), figures_.end(), [&](const Figure& known) {
    return std::string_view(known.name) == name;
  });
  if (figure == figures_.end()) {
    figure = figures_.insert(figure, {name, std::vector<Samples>(kLaws)});
  }
  figure->by_law[law][side].push_back(value);
}

void Bench::PrintFigures(const std::string& of, std::size_t laws) {
  for (Figure& figure : figures_) {
    figure.by_law.resize(laws);
    double most = 0;
    for (const Samples& samples : figure.by_law) {
      for (const auto& values : samples) most = std::max(most, SpreadOf(values).most);
    }
    PrintLine(of + figure.name, figure.by_law, DigitsFor(most));
  }
  figures_.clear();
}

std::vector<std::unique_ptr<BenchRows>> Bench::MakeRows() const {
  std::vector<std::unique_ptr<BenchRows>> rows;
  for (std::uint64_t i = 0; i < BenchWrites::kBatches; ++i) {
    rows.push_back(std::make_unique<BenchRows>(settings_.keys, settings_.row_bytes, settings_.seed,
                                               settings_.seed + 2 + i));
  }
  return rows;
}

Status Bench::CommitNewest(Subject* subject) {
  const std::uint64_t id = subject->manifest.id + 1;
  TERRACE_ASSIGN_OR_RETURN(subject->manifest, subject->store->Commit(id));
  return id == 1 ? OkStatus() : subject->store->Drop(id - 1);
}

Status Bench::Prepare() {
  TERRACE_ASSIGN_OR_RETURN(disk_writes_,
                           MeasureDiskWriteRounds(fs_, settings_.folder, settings_.disk_mib * kMiB,
                                                  settings_.seed, settings_.rounds));
  const std::string root = JoinPath(settings_.folder, "index_bench.rows");
  TERRACE_ASSIGN_OR_RETURN(const KnownReadCost known, CalibrateIn(fs_, root, &quota_));
  cost_ = known.cost;
  for (const Side side : {kByKey, kByGroup}) {
    StoreOptions& options = subjects_[side].options;
    options.directory = JoinPath(root, side == kByKey ? "key" : "group");
    options.table = "bench";
    options.row_bytes = static_cast<std::uint32_t>(settings_.row_bytes);
    options.index = side == kByKey ? IndexKind::kKey : IndexKind::kGroup;
    options.expected_rows = settings_.keys;
    options.read_threads = static_cast<int>(settings_.read_threads);
    options.merge_gap_bytes = cost_.MergeGapBytes();
    TERRACE_ASSIGN_OR_RETURN(subjects_[side].store,
                             Store::Create(fs_, Clock::Real(), &quota_, options));
  }
  std::printf(
      "%s keys of %llu bytes; disk: %.2f us a request + bytes / %.2f GB/s%s, writes %s "
      "GB/s; medians (least..most) of %llu reads and openings and %llu rounds of updates\n",
      FormatCount(settings_.keys).c_str(), static_cast<unsigned long long>(settings_.row_bytes),
      cost_.request_seconds * 1e6, cost_.bytes_per_second * 1e-9, known.why.c_str(),
      disk_writes_.Text(2, 1e-9).c_str(), static_cast<unsigned long long>(settings_.repeats),
      static_cast<unsigned long long>(settings_.rounds));
  return OkStatus();
}

Status Bench::Load() {
  std::vector<Key> keys(settings_.keys);
  const BenchKeys all(settings_.seed);
  for (std::uint64_t i = 0; i < keys.size(); ++i) keys[i] = MixKey(all.At(i));
  std::sort(keys.begin(), keys.end());
  for (Key& key : keys) key = UnmixKey(key);
  for (const Side side : {kByKey, kByGroup}) {
    Subject& subject = subjects_[side];
    const double start = Now();
    PartRates parts(settings_.keys, start);
    BenchWrites writes(subject.store.get(), MakeRows(), kNewKey);
    for (std::uint64_t begin = 0; begin < keys.size(); begin += settings_.load_batch) {
      const std::uint64_t end = std::min(begin + settings_.load_batch, settings_.keys);
      TERRACE_RETURN_IF_ERROR(writes.Write([&](BenchRows* rows) {
        rows->ChooseThese(std::span(keys).subspan(begin, end - begin));
        rows->Make(1);
      }));
      // The first batches are taken before any is written.
      end <= BenchWrites::kBatches* settings_.load_batch ? parts.Skip(end, Now())
                                                         : parts.Done(end, Now());
    }
    TERRACE_RETURN_IF_ERROR(writes.Finish());
    TERRACE_RETURN_IF_ERROR(CommitNewest(&subject));
    const StoreStats stats = subject.store->stats();
    if (stats.live_rows != settings_.keys) return InternalError("rows are missing after the load");
    for (const double rate : parts.rates()) {
      Add("load, thousand keys a second", kUniform, side, rate * 1e-3);
    }
    Add("load, bytes written a key", kUniform, side,
        static_cast<double>(stats.write_bytes) / Keys());
    Add("index, bytes a key", kUniform, side, static_cast<double>(stats.index_bytes) / Keys());
    Add("rows on disk, bytes a key", kUniform, side,
        static_cast<double>(stats.live_bytes) / Keys());
  }
  return OkStatus();
}

Status Bench::ReadBatch(std::uint64_t batch, Law law, Side side) {
  DrawKeys(&rows_, batch, law);
  return ReadChosen(true, law, side);
}

Status Bench::ReadChosen(bool there, Law law, Side side) {
  Store* const store = subjects_[side].store.get();
  targets_.resize(rows_.keys().size());
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    targets_[i] = rows_.bytes().data() + i * settings_.row_bytes;
  }
  TERRACE_ASSIGN_OR_RETURN(const ReadCost now, ReadsNow(subjects_[side]));
  const StoreStats before = store->stats();
  const double cpu = ProcessCpuSeconds();
  const double start = Now();
  TERRACE_RETURN_IF_ERROR(store->Read(rows_.keys(), targets_, rows_.found()));
  const double seconds = Now() - start;
  const double cpu_seconds = ProcessCpuSeconds() - cpu;
  const auto found = std::count(rows_.found().begin(), rows_.found().end(), 1);
  if (there ? !rows_.AllRight() : found > 0) return InternalError("a row is lost or wrong");
  const StoreStats after = store->stats();
  const auto n = static_cast<double>(targets_.size());
  const double requests = Difference(after.read_requests, before.read_requests);
  const double bytes = Difference(after.read_bytes, before.read_bytes);
  Add("thousand a second", law, side, n / seconds * 1e-3);
  Add("requests a key", law, side, requests / n);
  Add("bytes a key", law, side, bytes / n);
  Add("of the time the disk charges, %", law, side, 100 * now.Seconds(requests, bytes) / seconds);
  Add("CPU, us a key", law, side, cpu_seconds / n * 1e6);
  return OkStatus();
}

// They cost what the index can't tell from present ones.
Status Bench::AbsentKeys() {
  const std::uint64_t batch = settings_.batches.front();
  for (std::uint64_t repeat = 0; repeat < settings_.repeats; ++repeat) {
    rows_.ChooseRange(settings_.keys + repeat * batch, batch);
    for (const Side side : InTurn(repeat)) {
      TERRACE_RETURN_IF_ERROR(ReadChosen(false, kUniform, side));
    }
  }
  PrintFigures("absent keys, " + FormatCount(batch) + " at a time: ", 1);
  return OkStatus();
}

Status Bench::ReadBatches(std::uint64_t batch) {
  for (std::uint64_t repeat = 0; repeat < settings_.repeats; ++repeat) {
    for (const Law law : {kUniform, kZipf}) {
      for (const Side side : InTurn(repeat)) {
        TERRACE_RETURN_IF_ERROR(ReadBatch(batch, law, side));
      }
    }
  }
  PrintFigures("reads of " + FormatCount(batch) + ": ", kLaws);
  return OkStatus();
}

Status Bench::UpdateRound(Law law, Side side) {
  Subject& subject = subjects_[side];
  TERRACE_RETURN_IF_ERROR(CommitNewest(&subject));
  const std::uint64_t batch = std::min(settings_.update_batch, settings_.keys / 4);
  const StoreStats before = subject.store->stats();
  double written = 0;
  // To the last moment, compaction's end included, and with the time in which rows are made.
  const double begin = Now();
  BenchWrites writes(subject.store.get(), MakeRows(), kStoredKey);
  do {
    TERRACE_RETURN_IF_ERROR(writes.Write([&](BenchRows* rows) {
      DrawKeys(rows, batch, law);
      rows->Make(++subject.generation);
    }));
    written += static_cast<double>(batch);
    TERRACE_RETURN_IF_ERROR(subject.store->background_status());
  } while (Now() - begin < static_cast<double>(settings_.update_seconds));
  TERRACE_RETURN_IF_ERROR(writes.Finish());
  TERRACE_RETURN_IF_ERROR(subject.store->CompactNow());
  const double seconds = Now() - begin;
  const StoreStats after = subject.store->stats();
  const double bytes = Difference(after.write_bytes, before.write_bytes);
  Add("thousand a second, compaction paid", law, side, written / seconds * 1e-3);
  Add("bytes read a key", law, side, Difference(after.read_bytes, before.read_bytes) / written);
  Add("bytes written a key", law, side, bytes / written);
  Add("write amplification", law, side, bytes / (written * RecordBytes()));
  Add("of what the disk's writes allow, %", law, side, 100 * bytes / seconds / disk_writes_.median);
  Add("longest write, s", law, side, SpreadOf(writes.seconds()).most);
  return OkStatus();
}

Status Bench::Updates() {
  for (std::uint64_t round = 0; round < settings_.rounds; ++round) {
    for (const Law law : {kUniform, kZipf}) {
      for (const Side side : InTurn(round)) {
        TERRACE_RETURN_IF_ERROR(UpdateRound(law, side));
      }
    }
  }
  PrintFigures("updates of " + FormatCount(settings_.update_batch) + ": ", kLaws);
  return OkStatus();
}

Status Bench::Openings() {
  for (const Side side : {kByKey, kByGroup}) {
    Add("index, bytes a key", kUniform, side,
        static_cast<double>(subjects_[side].store->stats().index_bytes) / Keys());
    TERRACE_RETURN_IF_ERROR(CommitNewest(&subjects_[side]));
  }
  for (std::uint64_t repeat = 0; repeat < settings_.repeats; ++repeat) {
    for (const Side side : InTurn(repeat)) {
      Subject& subject = subjects_[side];
      subject.store.reset();
      TERRACE_ASSIGN_OR_RETURN(const ReadCost now, ReadsNow(subject));
      const double cpu = ProcessCpuSeconds();
      const double start = Now();
      TERRACE_ASSIGN_OR_RETURN(
          subject.store, Store::Open(fs_, Clock::Real(), &quota_, subject.options, subject.manifest,
                                     {&subject.manifest, 1}));
      const double seconds = Now() - start;
      const StoreStats stats = subject.store->stats();
      if (stats.live_rows != settings_.keys) return InternalError("rows are lost by reopening");
      const auto bytes = static_cast<double>(stats.read_bytes);
      Add("opening, s", kUniform, side, seconds);
      Add("opening, bytes read a key", kUniform, side, bytes / Keys());
      Add("opening, of the disk's sequential rate, %", kUniform, side,
          100 * bytes / seconds / now.bytes_per_second);
      Add("opening, CPU s", kUniform, side, ProcessCpuSeconds() - cpu);
    }
  }
  PrintFigures("", 1);
  for (const Side side : {kByKey, kByGroup}) {
    TERRACE_RETURN_IF_ERROR(ReadBatch(settings_.batches.front(), kUniform, side));
  }
  PrintFigures("first read of " + FormatCount(settings_.batches.front()) + " after it: ", 1);
  return OkStatus();
}

Status Bench::Run() {
  TERRACE_RETURN_IF_ERROR(Prepare());
  std::printf("\n| | by key | by group | ratio |\n|---|---:|---:|---:|\n");
  TERRACE_RETURN_IF_ERROR(Load());
  PrintFigures("", 1);
  TERRACE_RETURN_IF_ERROR(AbsentKeys());
  std::printf(
      "\n| | by key, uniform | by group, uniform | ratio | by key, Zipf | by group, Zipf | "
      "ratio |\n|---|---:|---:|---:|---:|---:|---:|\n");
  for (const std::uint64_t batch : settings_.batches) TERRACE_RETURN_IF_ERROR(ReadBatches(batch));
  TERRACE_RETURN_IF_ERROR(Updates());
  std::printf("\n| after the updates | by key | by group | ratio |\n|---|---:|---:|---:|\n");
  TERRACE_RETURN_IF_ERROR(Openings());
  std::printf("\npeak memory of both, %.0f MB\n",
              static_cast<double>(ReadProcessMemory().peak_bytes) * 1e-6);
  for (Subject& subject : subjects_) subject.store.reset();
  return RemoveTree(fs_, JoinPath(settings_.folder, "index_bench.rows"));
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  terrace::ConfigureAllocator();
  terrace::RaiseOpenFileLimit();
  terrace::Settings settings;
  terrace::BenchFlags flags([&] {
    settings.keys = 20'000;
    settings.batches = {200, 5'000};
    settings.load_batch = 2'000;
    settings.update_batch = 2'000;
    settings.repeats = 2;
    settings.rounds = 2;
    settings.update_seconds = 0;
    settings.disk_mib = 16;
  });
  flags.Add("folder", &settings.folder);
  flags.Add("keys", &settings.keys);
  flags.Add("row-bytes", &settings.row_bytes);
  flags.Add("batch", &settings.batches);
  flags.Add("repeats", &settings.repeats);
  flags.Add("rounds", &settings.rounds);
  flags.Add("update-seconds", &settings.update_seconds);
  flags.Add("read-threads", &settings.read_threads);
  flags.AddSeed(&settings.seed);
  if (!flags.Parse(argc, argv)) return 2;
  const std::uint64_t longest = *std::max_element(settings.batches.begin(), settings.batches.end());
  if (settings.keys < 2 * longest || settings.row_bytes < 8 ||
      !terrace::Store::HasGroupIndex(static_cast<std::uint32_t>(settings.row_bytes)) ||
      settings.repeats == 0 || settings.rounds == 0 || settings.read_threads == 0) {
    std::fprintf(
        stderr,
        "store_index_bench: keys for two of the longest batch, rows of 8 bytes that fit into "
        "a block, a repeat, a round and a thread\n");
    return 2;
  }
  const terrace::Status status = terrace::Bench(settings).Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "store_index_bench: %s\n", status.ToString().c_str());
  return 1;
}
