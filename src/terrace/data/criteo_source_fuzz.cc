// Any bytes as an input file (plain, gzip, zstd): a clear Status or a stream in which every line is
// an example or a bad line, and which goes on from a cursor in the middle.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/data/example_source.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

struct Sums {
  std::uint64_t examples = 0;
  std::uint64_t bad_lines = 0;
  std::vector<Key> keys;
  DataCursor middle;  // After the second mini-batch.
  bool failed = false;
};

Sums Drain(FileSystem* fs, const DataOptions& options, const DataCursor& from) {
  Sums sums;
  auto source = OpenSource(fs, options);
  if (!source.ok()) {
    TERRACE_CHECK(!source.status().message().empty());
    sums.failed = true;
    return sums;
  }
  TERRACE_CHECK((*source)->Seek(from).ok());
  std::uint64_t cursors = 0;
  for (;;) {
    auto batch = (*source)->Next(4, 2);
    if (!batch.ok()) {
      TERRACE_CHECK(!batch.status().message().empty());
      sums.failed = true;
      return sums;
    }
    if (!batch->has_value()) break;
    const Batch& b = **batch;
    TERRACE_CHECK(b.first_example == from.examples + sums.examples);
    TERRACE_CHECK(b.key_begin.size() == std::size_t{b.examples} * b.slots + 1);
    TERRACE_CHECK(b.key_begin.back() == b.keys.size());
    for (const std::uint32_t bad : b.bad_lines_before) sums.bad_lines += bad;
    sums.keys.insert(sums.keys.end(), b.keys.begin(), b.keys.end());
    for (const DataCursor& cursor : b.cursors)
      if (++cursors == 2) sums.middle = cursor;
    sums.examples += b.examples;
  }
  const SourceStats stats = (*source)->stats();
  TERRACE_CHECK(stats.examples == sums.examples);
  TERRACE_CHECK(stats.lines == stats.examples + stats.bad_lines);
  TERRACE_CHECK(stats.bad_lines == sums.bad_lines);
  return sums;
}

int Fuzz(const std::uint8_t* data, std::size_t size) {
  SetLogLevel(LogLevel::kError);
  MemoryFileSystem fs;
  {
    auto file = fs.Open("/log", OpenMode::kCreate);
    TERRACE_CHECK(file.ok());
    TERRACE_CHECK((*file)->WriteAt(0, std::as_bytes(std::span(data, size))).ok());
  }
  DataOptions options;
  options.files = {"/log"};
  options.max_bad_fraction = 1;
  options.read_ahead_bytes = 128 << 10;
  const Sums whole = Drain(&fs, options, {});
  if (whole.failed || whole.middle.examples == 0 || whole.middle.epoch > 0) return 0;
  const Sums rest = Drain(&fs, options, whole.middle);
  TERRACE_CHECK(!rest.failed);
  TERRACE_CHECK(rest.keys.size() <= whole.keys.size());
  TERRACE_CHECK(std::equal(rest.keys.rbegin(), rest.keys.rend(), whole.keys.rbegin()));
  TERRACE_CHECK(rest.examples + whole.middle.examples == whole.examples);
  return 0;
}

}  // namespace
}  // namespace terrace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return terrace::Fuzz(data, size);
}
