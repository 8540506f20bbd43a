// Speed of the reader: Criteo text parsed from memory against a loop of getline and stoi, a source
// over a file (plain, zstd), and the generator. Prints the median of some runs in CPU time of the
// process, all threads together, their spread, and checks what it computed. --tiny: few rows, one
// run, as a test.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/data/click_log_generator.h"
#include "terrace/data/criteo_parser.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"

namespace terrace {
namespace {

struct Timing {
  double median_seconds = 0;
  double spread = 0;  // (slowest - fastest) / median
};

Timing Measure(int runs, const std::function<void()>& body) {
  std::vector<double> seconds;
  for (int run = 0; run < runs; ++run) {
    const double start = ProcessCpuSeconds();
    body();
    seconds.push_back(ProcessCpuSeconds() - start);
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  return {median, (seconds.back() - seconds.front()) / median};
}

void Print(const char* what, const Timing& timing, std::uint64_t rows, std::uint64_t bytes) {
  std::printf("%-34s %9.0f rows/s %7.1f MB/s a core   spread %4.1f %%\n", what,
              static_cast<double>(rows) / timing.median_seconds,
              static_cast<double>(bytes) / timing.median_seconds * 1e-6, 100 * timing.spread);
}

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "data_bench: %s\n", what);
  std::exit(1);
}

// What many programs of this field do: a string a line, a string a field, stoi and stoul.
std::uint64_t SumByGetline(const std::string& text) {
  std::istringstream in(text);
  std::string line;
  std::string field;
  std::uint64_t sum = 0;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    for (int column = 0; column < kCriteoColumns && std::getline(fields, field, '\t'); ++column) {
      if (field.empty()) continue;
      if (column <= kCriteoIntegers)
        sum += static_cast<std::uint64_t>(std::stoi(field));
      else
        sum += std::stoul(field, nullptr, 16);
    }
  }
  return sum;
}

std::uint64_t SumByParser(std::string_view text) {
  const CriteoLayout layout;
  CriteoRow row;
  BadLine bad;
  std::uint64_t sum = 0;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    Require(ParseCriteoLine(text.substr(0, end), layout, &row, &bad), "a bad line");
    text.remove_prefix(end + 1);
    sum += static_cast<std::uint64_t>(row.label);
    for (const std::int64_t x : row.integers)
      sum += x == kMissingInteger ? 0 : static_cast<std::uint64_t>(x);
    for (const std::uint64_t x : row.categories) sum += x == kMissingCategory ? 0 : x;
  }
  return sum;
}

// Lines and examples of a batch, as the reader makes them.
std::uint64_t EncodeAll(std::string_view text) {
  const CriteoLayout layout;
  const ExampleEncoder encoder(IntegerEncoding::kDense, false, kCriteoCategories);
  CriteoRow row;
  BadLine bad;
  std::uint64_t keys = 0;
  constexpr std::uint32_t kExamples = 16384;
  Batch batch = encoder.NewBatch(kExamples);
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    Require(ParseCriteoLine(text.substr(0, end), layout, &row, &bad), "a bad line");
    text.remove_prefix(end + 1);
    encoder.Append(row.label, row.integers.data(), row.categories.data(), &batch);
    if (batch.examples == kExamples || text.empty()) {
      keys += batch.keys.size();
      batch = encoder.NewBatch(kExamples);
    }
  }
  return keys;
}

std::uint64_t Drain(const DataOptions& options) {
  auto source = OpenSource(FileSystem::Posix(), options);
  Require(source.ok(), "the source does not open");
  std::uint64_t examples = 0;
  for (;;) {
    auto batch = (*source)->Next(16384, 512);
    Require(batch.ok(), "the source fails");
    if (!batch->has_value()) return examples;
    examples += (**batch).examples;
  }
}

int Run(bool tiny) {
  const std::uint64_t rows = tiny ? 2000 : 200'000;
  const int runs = tiny ? 1 : 7;
  const std::string folder =
      std::filesystem::temp_directory_path() / ("terrace_data_bench." + std::to_string(getpid()));
  Require(FileSystem::Posix()->MakeDirectories(folder).ok(), "no temporary folder");
  const std::string plain = folder + "/log.tsv";
  const std::string zstd = folder + "/log.tsv.zst";
  Require(WriteClickLog(FileSystem::Posix(), {}, rows, plain, {}).ok(), "writing fails");
  Require(WriteClickLog(FileSystem::Posix(), {}, rows, zstd, {}).ok(), "writing fails");
  auto read = ReadFileToString(FileSystem::Posix(), plain);
  Require(read.ok(), "reading fails");
  const std::string text = std::move(*read);
  std::printf("%llu rows, %.1f MB of text, median of %d\n", static_cast<unsigned long long>(rows),
              static_cast<double>(text.size()) * 1e-6, runs);

  std::uint64_t by_getline = 0;
  const Timing getline = Measure(tiny ? 1 : 3, [&] { by_getline = SumByGetline(text); });
  Print("getline, stoi", getline, rows, text.size());
  std::uint64_t by_parser = 0;
  const Timing parser = Measure(runs, [&] { by_parser = SumByParser(text); });
  Print("parser", parser, rows, text.size());
  Require(by_getline == by_parser, "parser and getline disagree");
  std::uint64_t keys = 0;
  Print("parser and encoder", Measure(runs, [&] { keys = EncodeAll(text); }), rows, text.size());
  Require(keys == rows * kCriteoCategories, "keys are missing");
  DataOptions options;
  std::uint64_t examples = 0;
  for (const std::string& path : {plain, zstd}) {
    options.files = {path};
    const Timing timing = Measure(runs, [&] { examples = Drain(options); });
    Print(path == plain ? "source, plain file" : "source, zstd file", timing, rows, text.size());
    Require(examples == rows, "examples are missing");
  }
  options = DataOptions();
  options.format = "synthetic";
  options.rows = rows;
  for (const auto& [name, zipf] :
       {std::pair("synthetic source, zipf 1.05", 1.05), std::pair("synthetic source, zipf 1", 1.0),
        std::pair("synthetic source, uniform", 0.0)}) {
    options.zipf = zipf;
    Print(name, Measure(runs, [&] { examples = Drain(options); }), rows, 0);
    Require(examples == rows, "examples are missing");
  }
  std::printf("parser / getline: %.1f\n", getline.median_seconds / parser.median_seconds);
  Require(RemoveTree(FileSystem::Posix(), folder).ok(), "the temporary folder stays");
  return 0;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  return terrace::Run(argc > 1 && std::strcmp(argv[1], "--tiny") == 0);
}
