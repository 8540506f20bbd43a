// terrace generate: a click log, and what an oracle that knows its probabilities would score on it.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terrace/base/clock.h"
#include "terrace/base/log.h"
#include "terrace/base/units.h"
#include "terrace/cli/commands.h"
#include "terrace/cli/oracle.h"
#include "terrace/data/click_log_generator.h"
#include "terrace/train/summary.h"

namespace terrace {
int GenerateCommand(FileSystem* fs, const GenerateArguments& arguments,
                    const std::atomic<int>* stop_signals) {
  ClickLogSpec spec;
  spec.seed = arguments.seed;
  spec.cardinality = arguments.cardinality;
  spec.zipf = arguments.zipf;
  spec.categorical_slots = arguments.slots;
  spec.click_rate = arguments.click_rate;
  spec.signal = arguments.signal;
  Oracle oracle;
  WriteClickLogOptions options;
  options.first_row = arguments.first_row;
  options.oracle = [&oracle](std::span<const double> probability, std::span<const float> label) {
    oracle.Add(probability, label);
  };
  // A line a second is enough for a person.
  constexpr double kProgressSeconds = 1;
  const double start = Clock::Real()->MonotonicSeconds();
  double last = start;
  options.keep_going = [&](std::uint64_t rows) {
    const double now = Clock::Real()->MonotonicSeconds();
    if (now - last >= kProgressSeconds) {
      last = now;
      SetProgressLine(
          fmt::format("{} of {} lines", FormatCount(rows), FormatCount(arguments.rows)));
    }
    return stop_signals->load(std::memory_order_relaxed) == 0;  // A count that orders nothing.
  };
  constexpr std::uint64_t kMostRows = std::uint64_t{1} << 60;  // As of a job.
  if (arguments.rows > kMostRows || arguments.first_row > kMostRows - arguments.rows) {
    return ReportFailure(
        InvalidArgumentError("--first-row and --rows are 2^60 at most, and so is their sum"));
  }
  const Result<std::string> place = OutputPlace(fs, arguments.output);
  if (!place.ok()) return ReportFailure(place.status());
  const Status status = WriteClickLog(fs, spec, arguments.rows, *place, options);
  SetProgressLine("");
  if (!status.ok()) {
    if (status.code() != StatusCode::kAborted ||
        stop_signals->load(std::memory_order_relaxed) == 0) {
      return ReportFailure(status);
    }
    LogText(LogLevel::kInfo, "interrupted; nothing was written");
    return kExitInterrupted;
  }
  const double seconds = Clock::Real()->MonotonicSeconds() - start;
  LogText(LogLevel::kInfo, fmt::format("wrote {} lines to {} in {}", FormatCount(arguments.rows),
                                       arguments.output, FormatDuration(seconds)));
  if (arguments.quiet && !arguments.json) return kExitDone;
  const ClickMetricsResult result = oracle.Compute();
  if (arguments.json) {
    const nlohmann::ordered_json object = {
        {"format_version", kResultVersion},
        {"rows", arguments.rows},
        {"output", arguments.output},
        {"oracle", nlohmann::ordered_json::parse(ResultToJson(result))}};
    return PrintResult(
        object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
  }
  return PrintResult("An oracle that knows the true probabilities scores on it\n" +
                     ResultTable(result));
}

}  // namespace terrace
