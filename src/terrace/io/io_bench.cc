// Reads a file by both back ends: sequentially by size and depth, into huge pages and into pages of
// 4 KiB, and in random blocks of 4 KiB; at the greatest depth by io_uring with registered buffers
// too, in turn with plain reads. Every block read is checked to be the one asked for.
//
//   io_bench [--tiny] [--folder F] [--mib N] [--repeats R] [--seed S]
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/io/file_system.h"

namespace terrace {
namespace {

constexpr std::uint64_t kBlockBytes = kDirectIoAlignment;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct Settings {
  std::string folder = ".";
  std::uint64_t mib = 1024;
  int repeats = 5;
  std::uint64_t seed = 0;
  std::vector<std::uint64_t> sizes = {64 << 10, 256 << 10, 1 << 20, 4 << 20};
  std::vector<int> depths = {1, 4, 16, 64};
  std::uint64_t random_reads = 16384;
};

struct Case {
  std::string backend;
  bool sequential = true;
  std::uint64_t size = kBlockBytes;
  int depth = 1;
  bool huge = true;
};

struct Outcome {
  std::vector<double> seconds;  // Sorted.
  std::uint64_t bytes = 0;
  std::uint64_t reads = 0;

  double median() const { return seconds[seconds.size() / 2]; }
  double gigabytes_per_second() const { return static_cast<double>(bytes) / median() * 1e-9; }
};

// What block `index` starts with.
std::uint64_t Stamp(std::uint64_t seed, std::uint64_t index) { return HashCombine(seed, index); }

Status MakeFile(FileSystem* fs, const std::string& path, const Settings& settings) {
  TERRACE_ASSIGN_OR_RETURN(auto file, fs->Open(path, OpenMode::kCreateDirect));
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer chunk, HugeBuffer::Allocate(4 * kMiB));
  Rng rng(settings.seed);
  // Noise, so that no disk compresses it away.
  for (std::uint64_t i = 0; i + 8 <= chunk.size(); i += 8) {
    const std::uint64_t word = rng.Next();
    std::memcpy(chunk.data() + i, &word, sizeof(word));
  }
  for (std::uint64_t at = 0; at < settings.mib * kMiB; at += chunk.size()) {
    for (std::uint64_t block = 0; block < chunk.size(); block += kBlockBytes) {
      const std::uint64_t stamp = Stamp(settings.seed, (at + block) / kBlockBytes);
      std::memcpy(chunk.data() + block, &stamp, sizeof(stamp));
    }
    TERRACE_RETURN_IF_ERROR(file->WriteAt(at, chunk.span()));
  }
  return file->Sync();
}

Status CheckRead(const ReadRequest& request, const Settings& settings) {
  if (request.bytes_read != request.buffer.size()) return CorruptionError("a read came short");
  for (std::uint64_t block = 0; block < request.buffer.size(); block += kBlockBytes) {
    std::uint64_t found;
    std::memcpy(&found, request.buffer.data() + block, sizeof(found));
    if (found != Stamp(settings.seed, (request.offset + block) / kBlockBytes)) {
      return CorruptionError("a read brought another block than the one asked for, at offset " +
                             std::to_string(request.offset + block));
    }
  }
  return OkStatus();
}

// One pass; batches of four times the depth, so that the queue stays full between their ends.
Result<double> Pass(const Case& shape, const Settings& settings, File* file, ReadQueue* queue,
                    std::span<std::byte> arena, int repeat, Outcome* outcome) {
  const std::uint64_t places = settings.mib * kMiB / shape.size;
  const std::uint64_t total = shape.sequential ? places : settings.random_reads;
  const std::uint64_t batch = arena.size() / shape.size;
  Rng rng(HashCombine(settings.seed, static_cast<std::uint64_t>(repeat)));
  std::vector<ReadRequest> requests;
  double seconds = 0;
  outcome->bytes = 0;
  outcome->reads = 0;
  for (std::uint64_t done = 0; done < total; done += requests.size()) {
    requests.assign(std::min(batch, total - done), {});
    for (std::uint64_t i = 0; i < requests.size(); ++i) {
      requests[i].file = file;
      requests[i].offset = (shape.sequential ? done + i : rng.Below(places)) * shape.size;
      requests[i].buffer = arena.subspan(i * shape.size, shape.size);
    }
    const double start = Clock::Real()->MonotonicSeconds();
    TERRACE_RETURN_IF_ERROR(queue->Run(requests));
    seconds += Clock::Real()->MonotonicSeconds() - start;
    for (const ReadRequest& request : requests) {
      TERRACE_RETURN_IF_ERROR(CheckRead(request, settings));
      outcome->bytes += request.bytes_read;
    }
    outcome->reads += requests.size();
  }
  return seconds;
}

std::uint64_t ArenaBytes(const Case& shape) {
  return 4 * static_cast<std::uint64_t>(shape.depth) * shape.size;
}

// Mapped before the clock runs.
Result<HugeBuffer> MakeArena(const Case& shape) {
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer arena,
                           HugeBuffer::Allocate(std::max(ArenaBytes(shape), kHugePageBytes)));
  if (!shape.huge && madvise(arena.data(), arena.size(), MADV_NOHUGEPAGE) != 0) {
    return IoError("the kernel cannot be asked for small pages");
  }
  std::memset(arena.data(), 0, arena.size());
  return arena;
}

Result<Outcome> Measure(const Case& shape, const Settings& settings, FileSystem* fs,
                        const std::string& path) {
  TERRACE_ASSIGN_OR_RETURN(auto file, fs->Open(path, OpenMode::kReadDirect));
  ReadQueueOptions options;
  options.backend = shape.backend;
  options.depth = shape.depth;
  options.threads = shape.depth;
  TERRACE_ASSIGN_OR_RETURN(auto queue, fs->NewReadQueue(options));
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer arena, MakeArena(shape));
  Outcome outcome;
  for (int repeat = 0; repeat < settings.repeats; ++repeat) {
    TERRACE_ASSIGN_OR_RETURN(double seconds,
                             Pass(shape, settings, file.get(), queue.get(),
                                  arena.span().first(ArenaBytes(shape)), repeat, &outcome));
    outcome.seconds.push_back(seconds);
  }
  std::sort(outcome.seconds.begin(), outcome.seconds.end());
  return outcome;
}

std::vector<Case> Cases(const Settings& settings, const std::vector<std::string>& backends) {
  std::vector<Case> cases;
  for (const std::string& backend : backends) {
    for (std::uint64_t size : settings.sizes) {
      for (int depth : settings.depths) {
        cases.push_back({backend, true, size, depth, true});
        cases.push_back({backend, true, size, depth, false});
      }
    }
    for (int depth : settings.depths) {
      cases.push_back({backend, false, kBlockBytes, depth, true});
      cases.push_back({backend, false, kBlockBytes, depth, false});
    }
  }
  return cases;
}

// The same reads with and without registered buffers, pass by pass in turn.
Status CompareRegistered(const Settings& settings, FileSystem* fs, const std::string& path) {
  TERRACE_ASSIGN_OR_RETURN(auto file, fs->Open(path, OpenMode::kReadDirect));
  std::printf("io_uring with registered buffers, compared with plain reads of the same run\n");
  std::printf("%-10s %9s %6s %6s %18s %18s\n", "order", "KiB/read", "depth", "pages", "rate, ratio",
              "CPU a read, ratio");
  for (const Case& shape : Cases(settings, {"io_uring"})) {
    if (shape.depth != settings.depths.back()) continue;
    TERRACE_ASSIGN_OR_RETURN(HugeBuffer arena, MakeArena(shape));
    ReadQueueOptions options;
    options.backend = "io_uring";
    options.depth = shape.depth;
    TERRACE_ASSIGN_OR_RETURN(auto plain, fs->NewReadQueue(options));
    options.buffer = arena.span();
    TERRACE_ASSIGN_OR_RETURN(auto registered, fs->NewReadQueue(options));
    std::vector<double> rates, cpus;
    for (int repeat = 0; repeat < settings.repeats; ++repeat) {
      double seconds[2], cpu[2];
      for (const int which : {repeat % 2, 1 - repeat % 2}) {
        Outcome outcome;
        const double before = ThreadCpuSeconds();
        TERRACE_ASSIGN_OR_RETURN(
            seconds[which],
            Pass(shape, settings, file.get(), which == 0 ? plain.get() : registered.get(),
                 arena.span().first(ArenaBytes(shape)), repeat, &outcome));
        cpu[which] = (ThreadCpuSeconds() - before) / static_cast<double>(outcome.reads);
      }
      rates.push_back(seconds[0] / seconds[1]);
      cpus.push_back(cpu[1] / cpu[0]);
    }
    std::sort(rates.begin(), rates.end());
    std::sort(cpus.begin(), cpus.end());
    std::printf("%-10s %9llu %6d %6s %6.2f (%.2f..%.2f) %6.2f (%.2f..%.2f)\n",
                shape.sequential ? "sequential" : "random",
                static_cast<unsigned long long>(shape.size >> 10), shape.depth,
                shape.huge ? "2 MiB" : "4 KiB", rates[rates.size() / 2], rates.front(),
                rates.back(), cpus[cpus.size() / 2], cpus.front(), cpus.back());
  }
  return OkStatus();
}

void Print(const std::vector<Case>& cases, const std::vector<Outcome>& outcomes) {
  double ceiling = 0;
  for (const Outcome& outcome : outcomes) {
    ceiling = std::max(ceiling, outcome.gigabytes_per_second());
  }
  std::printf("ceiling: the fastest read of this run, %.2f GB/s\n", ceiling);
  std::printf("%-9s %-10s %9s %6s %6s %9s %9s %10s %9s\n", "back end", "order", "KiB/read", "depth",
              "pages", "GB/s", "% of top", "IOPS", "spread %");
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& shape = cases[i];
    const Outcome& outcome = outcomes[i];
    const double spread =
        100 * (outcome.seconds.back() - outcome.seconds.front()) / outcome.median();
    std::printf("%-9s %-10s %9llu %6d %6s %9.2f %9.0f %10.0f %9.0f\n", shape.backend.c_str(),
                shape.sequential ? "sequential" : "random",
                static_cast<unsigned long long>(shape.size >> 10), shape.depth,
                shape.huge ? "2 MiB" : "4 KiB", outcome.gigabytes_per_second(),
                100 * outcome.gigabytes_per_second() / ceiling,
                static_cast<double>(outcome.reads) / outcome.median(), spread);
  }
}

Status RunAll(const Settings& settings) {
  FileSystem* fs = FileSystem::Posix();
  std::vector<std::string> backends = {"threads"};
  ReadQueueOptions options;
  options.backend = "io_uring";
  if (auto queue = fs->NewReadQueue(options); queue.ok()) {
    backends.insert(backends.begin(), "io_uring");
  } else {
    std::printf("without io_uring: %s\n", queue.status().ToString().c_str());
  }
  const std::string path = JoinPath(settings.folder, "io_bench.data");
  TERRACE_RETURN_IF_ERROR(RemoveTree(fs, path));
  Status status = MakeFile(fs, path, settings);
  std::vector<Case> cases = Cases(settings, backends);
  std::vector<Outcome> outcomes;
  for (const Case& shape : cases) {
    if (!status.ok()) break;
    Result<Outcome> outcome = Measure(shape, settings, fs, path);
    status = outcome.status();
    if (outcome.ok()) outcomes.push_back(std::move(*outcome));
  }
  if (status.ok() && backends.front() == "io_uring") status = CompareRegistered(settings, fs, path);
  Status removed = RemoveTree(fs, path);
  TERRACE_RETURN_IF_ERROR(status);
  TERRACE_RETURN_IF_ERROR(removed);
  std::printf("%llu MiB read directly, seed %llu, median of %d\n",
              static_cast<unsigned long long>(settings.mib),
              static_cast<unsigned long long>(settings.seed), settings.repeats);
  Print(cases, outcomes);
  return OkStatus();
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  terrace::Settings settings;
  terrace::BenchFlags flags([&] {
    settings.mib = 8;
    settings.repeats = 1;
    settings.sizes = {256 << 10, 1 << 20};
    settings.depths = {1, 8};
    settings.random_reads = 256;
  });
  flags.Add("folder", &settings.folder);
  flags.Add("mib", &settings.mib);
  flags.Add("repeats", &settings.repeats);
  flags.AddSeed(&settings.seed);
  if (!flags.Parse(argc, argv)) return 2;
  if (settings.mib == 0 || settings.repeats <= 0) {
    std::fprintf(stderr, "io_bench: all numbers must be positive\n");
    return 2;
  }
  settings.mib = (settings.mib + 3) / 4 * 4;  // Whole chunks, and whole reads.
  terrace::Status status = terrace::RunAll(settings);
  if (status.ok()) return 0;
  std::fprintf(stderr, "io_bench: %s\n", status.ToString().c_str());
  return 1;
}
