// OpenSource: checks the options together and opens the source that they name.
#include <string>

#include "terrace/data/criteo_parser.h"
#include "terrace/data/criteo_source.h"
#include "terrace/data/example_source.h"
#include "terrace/data/synthetic_source.h"

namespace terrace {
namespace {

// A window's examples are held in memory twice while the vectors grow.
constexpr std::uint64_t kLargestWindow = std::uint64_t{1} << 24;
constexpr std::uint64_t kLeastReadAhead = std::uint64_t{64} << 10;

Status CheckOptions(const DataOptions& options) {
  std::string wrong;
  const auto require = [&wrong](bool holds, const std::string& message) {
    if (!holds) wrong += (wrong.empty() ? "" : "\n") + message;
  };
  require(options.format == "criteo" || options.format == "synthetic",
          "data.format is '" + options.format + "'; it is criteo or synthetic");
  require(options.epochs >= 1, "data.epochs is 0; it is at least 1");
  require(options.shuffle == "none" || options.shuffle == "files" || options.shuffle == "examples",
          "data.shuffle is '" + options.shuffle + "'; it is none, files or examples");
  require(options.shuffle_window >= 1 && options.shuffle_window <= kLargestWindow,
          "data.shuffle_window is " + std::to_string(options.shuffle_window) + "; it is 1 to " +
              std::to_string(kLargestWindow));
  if (Result<IntegerEncoding> integers = ParseIntegerEncoding(options.integers); !integers.ok())
    require(false, integers.status().message());
  require(options.missing == "skip" || options.missing == "key",
          "data.missing is '" + options.missing + "'; it is skip or key");
  require(
      options.max_bad_fraction >= 0 && options.max_bad_fraction <= 1,
      "data.max_bad_fraction is " + std::to_string(options.max_bad_fraction) + "; it is 0 to 1");
  require(options.read_ahead_bytes >= kLeastReadAhead,
          "data.read_ahead is " + std::to_string(options.read_ahead_bytes) +
              " bytes; it is 64 KiB or more");
  if (options.format == "synthetic") {
    require(options.rows >= 1, "data.rows is 0; say how many rows the synthetic log has");
    require(options.rows <= std::uint64_t{1} << 60 && options.first_row <= std::uint64_t{1} << 60,
            "data.rows and data.first_row are at most 2^60");
    Result<std::unique_ptr<ClickLogGenerator>> generator =
        ClickLogGenerator::Create(ClickLogSpecOf(options));
    if (!generator.ok()) require(false, "data." + generator.status().message());
  }
  if (wrong.empty()) return OkStatus();
  return InvalidArgumentError(wrong);
}

}  // namespace

Result<std::unique_ptr<ExampleSource>> OpenSource(FileSystem* fs, const DataOptions& options) {
  TERRACE_RETURN_IF_ERROR(CheckOptions(options));
  if (options.format == "synthetic") return SyntheticSource::Open(options);
  return CriteoSource::Open(fs, options);
}

Result<DataSchema> SchemaOf(const DataOptions& options) {
  TERRACE_RETURN_IF_ERROR(CheckOptions(options));
  TERRACE_ASSIGN_OR_RETURN(const IntegerEncoding integers, ParseIntegerEncoding(options.integers));
  const auto categories = options.format == "synthetic"
                              ? options.categorical_slots
                              : static_cast<std::uint32_t>(kCriteoCategories);
  return ExampleEncoder(integers, options.missing == "key", categories).schema();
}

Result<std::uint64_t> LeastSourceBytes(const DataOptions& options) {
  TERRACE_ASSIGN_OR_RETURN(const DataSchema schema, SchemaOf(options));
  return options.format == "synthetic" ? SyntheticSource::BytesOf(options)
                                       : CriteoSource::BytesOf(options, schema, 0);
}

}  // namespace terrace
