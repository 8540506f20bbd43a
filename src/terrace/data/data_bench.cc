// Speed of the reader: Criteo text parsed from memory, beside a search for its separators alone,
// the ceiling, and a loop of getline and stoi; a source over a file (plain, zstd), and the
// generator. Prints medians (least..most) of --runs in CPU time of the process, all threads
// together, and checks what it computed.
//
//   data_bench [--tiny] [--rows N] [--runs N] [--seed S]
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/testing/bench_spread.h"
#include "terrace/data/click_log_generator.h"
#include "terrace/data/criteo_parser.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"

namespace terrace {
namespace {

struct Settings {
  std::uint64_t rows = 200'000;
  int runs = 7;
  std::uint64_t seed = 0;  // Of the log.
};

// Rows a second.
Spread Measure(int runs, std::uint64_t rows, const std::function<void()>& body) {
  std::vector<double> rates;
  for (int run = 0; run < runs; ++run) {
    const double start = ProcessCpuSeconds();
    body();
    rates.push_back(static_cast<double>(rows) / (ProcessCpuSeconds() - start));
  }
  return SpreadOf(rates);
}

// ceiling: rows a second, or 0 where there is none. row_bytes: of text, likewise.
void Print(const char* what, const Spread& rate, double row_bytes, double ceiling) {
  std::printf("%-28s %s K rows/s", what, rate.Text(0, 1e-3).c_str());
  if (row_bytes > 0) std::printf(", %.1f MB/s a core", rate.median * row_bytes * 1e-6);
  if (ceiling > 0) std::printf(", %.0f %% of the separators", 100 * rate.median / ceiling);
  std::printf("; n %zu\n", rate.samples);
}

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "data_bench: %s\n", what);
  std::exit(1);
}

// As fast as text can be looked through: of each byte whether it ends a field.
std::uint64_t CountSeparators(std::string_view text) {
  std::uint64_t count = 0;
  for (const char c : text) count += c == '\t' || c == '\n' ? 1 : 0;
  return count;
}

// What many programs of this field do: a string a line, a string a field, stoi and stoul.
std::uint64_t SumByGetline(const std::string& text) {
  std::istringstream in(text);
  std::string line;
  std::uint64_t sum = 0;
  while (std::getline(in, line)) {
    std::size_t begin = 0;
    for (int column = 0; column < kCriteoColumns; ++column) {
      const std::size_t end = std::min(line.find('\t', begin), line.size());
      const std::string field = line.substr(begin, end - begin);
      begin = std::min(end + 1, line.size());
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

void Run(const Settings& settings) {
  const std::uint64_t rows = settings.rows;
  const std::string folder =
      std::filesystem::temp_directory_path() / ("terrace_data_bench." + std::to_string(getpid()));
  Require(FileSystem::Posix()->MakeDirectories(folder).ok(), "no temporary folder");
  const std::string plain = folder + "/log.tsv";
  const std::string zstd = folder + "/log.tsv.zst";
  ClickLogSpec log;
  log.seed = settings.seed;
  for (const std::string& path : {plain, zstd}) {
    Require(WriteClickLog(FileSystem::Posix(), log, rows, path, {}).ok(), "writing fails");
  }
  auto read = ReadFileToString(FileSystem::Posix(), plain);
  Require(read.ok(), "reading fails");
  const std::string text = std::move(*read);
  const double row_bytes = static_cast<double>(text.size()) / static_cast<double>(rows);
  std::printf("%llu rows, %.1f MB of text\n", static_cast<unsigned long long>(rows),
              static_cast<double>(text.size()) * 1e-6);
  const auto measure = [&](int runs, const std::function<void()>& body) {
    return Measure(runs, rows, body);
  };

  std::uint64_t separators = 0;
  const Spread scan = measure(settings.runs, [&] { separators = CountSeparators(text); });
  Print("separators alone", scan, row_bytes, 0);
  Require(separators == rows * kCriteoColumns, "fields are missing");
  std::uint64_t by_getline = 0;
  const Spread getline =
      measure(std::min(settings.runs, 3), [&] { by_getline = SumByGetline(text); });
  Print("getline, stoi", getline, row_bytes, scan.median);
  std::uint64_t by_parser = 0;
  const Spread parser = measure(settings.runs, [&] { by_parser = SumByParser(text); });
  Print("parser", parser, row_bytes, scan.median);
  Require(by_getline == by_parser, "parser and getline disagree");
  std::uint64_t keys = 0;
  Print("parser and encoder", measure(settings.runs, [&] { keys = EncodeAll(text); }), row_bytes,
        scan.median);
  Require(keys == rows * kCriteoCategories, "keys are missing");
  DataOptions options;
  std::uint64_t examples = 0;
  for (const std::string& path : {plain, zstd}) {
    options.files = {path};
    const Spread rate = measure(settings.runs, [&] { examples = Drain(options); });
    Print(path == plain ? "source, plain file" : "source, zstd file", rate, row_bytes, scan.median);
    Require(examples == rows, "examples are missing");
  }
  options = DataOptions();
  options.format = "synthetic";
  options.rows = rows;
  options.log_seed = settings.seed;
  for (const auto& [name, zipf] :
       {std::pair("synthetic source, zipf 1.05", 1.05), std::pair("synthetic source, zipf 1", 1.0),
        std::pair("synthetic source, uniform", 0.0)}) {
    options.zipf = zipf;
    Print(name, measure(settings.runs, [&] { examples = Drain(options); }), 0, 0);
    Require(examples == rows, "examples are missing");
  }
  std::printf("parser / getline: %.1f\n", parser.median / getline.median);
  Require(RemoveTree(FileSystem::Posix(), folder).ok(), "the temporary folder stays");
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  terrace::Settings settings;
  terrace::BenchFlags flags([&] {
    settings.rows = 2000;
    settings.runs = 1;
  });
  flags.Add("rows", &settings.rows);
  flags.Add("runs", &settings.runs);
  flags.AddSeed(&settings.seed);
  if (!flags.Parse(argc, argv)) return 2;
  terrace::Require(settings.rows > 0 && settings.runs > 0, "a row and a run at least");
  terrace::Run(settings);
  return 0;
}
