#include "terrace/cli/commands.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terrace/base/log.h"
#include "terrace/base/units.h"
#include "terrace/cli/oracle.h"
#include "terrace/io/same_file.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/evaluator.h"
#include "terrace/train/job.h"
#include "terrace/train/run_marker.h"
#include "terrace/train/summary.h"
#include "terrace/train/trainer.h"

namespace terrace {
namespace {

// Whether `message` names the folder or something in it, not just a path with those letters.
bool NamesPathIn(std::string_view message, std::string_view folder) {
  if (folder.empty()) return false;
  constexpr std::string_view kBefore = " '\"(";  // Of a path in a message.
  for (std::size_t at = message.find(folder); at != std::string_view::npos;
       at = message.find(folder, at + 1)) {
    const std::string_view rest = message.substr(at + folder.size());
    const bool begins = at == 0 || kBefore.find(message[at - 1]) != std::string_view::npos;
    if (begins && (folder.ends_with('/') || rest.starts_with('/') || rest.starts_with('\''))) {
      return true;
    }
  }
  return false;
}

// Where a file of the run is damaged.
void AdviseOnDamage(FileSystem* fs, const Status& status, const std::string& run) {
  // Of a run's own file; a damaged log is another matter.
  if (status.code() != StatusCode::kCorruption) return;
  std::vector<std::string> folders = {run};
  if (const Result<RunMarker> marker = ReadRunMarker(fs, run); marker.ok()) {
    folders.insert(folders.end(), marker->ssd_folders.begin(), marker->ssd_folders.end());
  }
  const auto named = [&](const std::string& folder) {
    return NamesPathIn(status.message(), folder);
  };
  if (std::none_of(folders.begin(), folders.end(), named)) return;
  // Of a run that has lost its checkpoints neither could say more.
  const Result<std::unique_ptr<RunFolder>> folder =
      RunFolder::Open(fs, run, RunFolder::Mode::kScrub, nullptr);
  if (folder.ok()) {
    const Result<std::vector<std::uint64_t>> files = (*folder)->ListCheckpointFiles();
    if (files.ok() && files->empty()) return;
  }
  LogText(
      LogLevel::kInfo,
      fmt::format("terrace inspect {} --verify names all that is damaged, and terrace inspect {} "
                  "--repair what can be done",
                  ShellWord(run), ShellWord(run)));
}

std::optional<double> ParseFraction(const std::string& text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  // Negated, so that a NaN is refused as well.
  if (error != std::errc() || rest != end || !(value >= 0 && value <= 1)) return std::nullopt;
  return value;
}

// Beside what was trained on a generated log, what could be reached there.
int PrintOracle(const DataOptions& data) {
  constexpr std::uint64_t kMostRows = 1'000'000;
  const std::uint64_t rows = std::min(data.rows, kMostRows);
  const Result<ClickMetricsResult> result = OracleOf(ClickLogSpecOf(data), data.first_row, rows);
  if (!result.ok()) return ReportFailure(result.status());
  return PrintResult(
      fmt::format("An oracle that knows the true probabilities scores on {} {} rows of the "
                  "log\n",
                  rows < data.rows ? "the first" : "the", FormatCount(rows)) +
      ResultTable(*result));
}

// The command that goes on with a run that was interrupted.
std::string ResumeCommand(FileSystem* fs, const TrainArguments& arguments, const Job& job) {
  std::string command = ShellWord(program_invocation_name) + " train ";
  const Result<FileInfo> file = fs->Stat(arguments.job);
  // What a pipe said comes no second time, and what /dev/stdin names is another command's: the run
  // keeps the whole of its job, with what overrode it.
  const bool gone = !file.ok() || file->is_special || arguments.job.starts_with("/dev/") ||
                    arguments.job.starts_with("/proc/");
  if (gone) return command + ShellWord(JoinPath(job.output, "job.yaml")) + " --resume";
  command += ShellWord(arguments.job);
  for (const std::string& set : arguments.overrides) command += " --set " + ShellWord(set);
  for (const std::string& name : arguments.accept) command += " --accept " + name;
  return command + " --resume";
}

}  // namespace

std::string ShellWord(const std::string& text) {
  const auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || std::strchr("_-./=:,+@%", c);
  };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

int ReportFailure(const Status& status) {
  LogText(LogLevel::kError, status.message());
  const bool wrong =
      status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kNotFound;
  return wrong ? kExitWrong : kExitFailed;
}

Result<std::optional<std::uint64_t>> SizeArgument(std::string_view name, const std::string& text) {
  if (text.empty()) return std::optional<std::uint64_t>();
  const std::optional<std::uint64_t> bytes = ParseBytes(text);
  if (bytes) return bytes;
  return InvalidArgumentError(
      fmt::format("{} '{}' is no size: a number of bytes, or one as 40GiB", name, text));
}

int ReportFailureOfRun(FileSystem* fs, const Status& status, const std::string& run) {
  const int code = ReportFailure(status);
  AdviseOnDamage(fs, status, run);
  return code;
}

Result<std::string> OutputPlace(FileSystem* fs, const std::string& output) {
  // A rename onto a link would replace the link, not what it names.
  const Result<std::string> followed = FollowLinks(output);
  if (followed.status().code() == StatusCode::kNotFound) {
    return InvalidArgumentError(
        fmt::format("--output '{}' is a link that leads to no file; name a file", output));
  }
  TERRACE_RETURN_IF_ERROR(followed.status());
  const std::string& place = *followed;
  TERRACE_RETURN_IF_ERROR(RefuseInsideRun(fs, place).WithContext("--output"));
  const Result<FileInfo> info = fs->Stat(place);
  if (info.status().code() == StatusCode::kNotFound) {
    const std::size_t slash = place.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : place.substr(0, slash + 1);
    if (fs->Stat(folder).status().code() != StatusCode::kNotFound) return place;
    return InvalidArgumentError(
        fmt::format("--output '{}': the folder '{}' is not there", output, folder));
  }
  TERRACE_RETURN_IF_ERROR(info.status());
  if (!info->is_directory && !info->is_special) return place;
  return InvalidArgumentError(
      fmt::format("--output '{}' is {}, and a file would replace it; name a file", output,
                  info->is_directory ? "a folder" : "a device or a pipe"));
}

int PrintResult(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (written && std::fflush(stdout) == 0) return kExitDone;
  LogText(LogLevel::kError, "the result cannot be written to standard output");
  return kExitFailed;
}

int TrainCommand(FileSystem* fs, const TrainArguments& arguments,
                 const std::function<void()>& begins, const std::atomic<int>* stop_signals) {
  Result<Job> job = ReadJob(fs, arguments.job, arguments.overrides);
  if (!job.ok()) return ReportFailure(job.status());
  begins();
  for (const std::string& name : arguments.accept) job->resume.accept.push_back(name);
  const RunMode mode = arguments.resume      ? RunMode::kResume
                       : arguments.overwrite ? RunMode::kOverwrite
                                             : RunMode::kNew;
  Result<TrainOutcome> outcome = TrainJob(fs, *job, mode, stop_signals);
  SetProgressLine("");
  // Relaxed: a count that orders nothing.
  if (outcome.status().code() == StatusCode::kAborted &&
      stop_signals->load(std::memory_order_relaxed) > 0) {
    LogText(LogLevel::kInfo, arguments.resume
                                 ? "interrupted before the run went on; nothing was lost"
                                 : "interrupted before the run began; nothing was changed");
    return kExitInterrupted;
  }
  if (!outcome.ok()) {
    LogText(LogLevel::kError, outcome.status().message());
    AdviseOnDamage(fs, outcome.status(), job->output);
    // A file that is missing before the run begins is an argument that is wrong; later, a failure.
    return outcome.status().code() == StatusCode::kInvalidArgument ? kExitWrong : kExitFailed;
  }
  if (outcome->already_finished) {
    LogText(LogLevel::kInfo, fmt::format("'{}' is finished: nothing is left to do", job->output));
    return kExitDone;
  }
  const int printed =
      arguments.quiet ? kExitDone : PrintResult(SummaryTable(outcome->summary, job->output));
  if (!outcome->interrupted) {
    const bool generated = job->train_data.format == "synthetic" && !arguments.quiet;
    return printed == kExitDone && generated ? PrintOracle(job->train_data) : printed;
  }
  LogText(LogLevel::kInfo,
          "interrupted after a checkpoint; go on with: " + ResumeCommand(fs, arguments, *job));
  return kExitInterrupted;
}

int EvaluateCommand(FileSystem* fs, const EvaluateArguments& arguments) {
  const Result<std::optional<std::uint64_t>> memory = SizeArgument("--memory", arguments.memory);
  if (!memory.ok()) return ReportFailure(memory.status());
  EvaluateOptions options;
  options.memory_bytes = *memory;
  if (!arguments.max_bad_fraction.empty()) {
    options.max_bad_fraction = ParseFraction(arguments.max_bad_fraction);
    if (!options.max_bad_fraction) {
      return ReportFailure(InvalidArgumentError(fmt::format(
          "--max-bad-fraction '{}' is no number from 0 to 1", arguments.max_bad_fraction)));
    }
  }
  const Result<Evaluation> evaluation = EvaluateRun(fs, arguments.run, arguments.data, options);
  SetProgressLine("");
  if (!evaluation.ok()) return ReportFailureOfRun(fs, evaluation.status(), arguments.run);
  if (!arguments.json) return PrintResult(ResultTable(evaluation->result, evaluation->bad_lines));
  nlohmann::ordered_json object = {{"format_version", kResultVersion}};
  object.update(nlohmann::ordered_json::parse(ResultToJson(evaluation->result)));
  object["bad_lines"] = evaluation->bad_lines;
  return PrintResult(object.dump() + "\n");
}

int PredictCommand(FileSystem* fs, const PredictArguments& arguments,
                   const std::atomic<int>* stop_signals) {
  const Result<std::string> place = OutputPlace(fs, arguments.output);
  if (!place.ok()) return ReportFailure(place.status());
  const Result<std::optional<std::uint64_t>> memory = SizeArgument("--memory", arguments.memory);
  if (!memory.ok()) return ReportFailure(memory.status());
  // Relaxed: a count that orders nothing.
  const auto stopped = [stop_signals] { return stop_signals->load(std::memory_order_relaxed) > 0; };
  const Result<SourceStats> lines =
      PredictRun(fs, arguments.run, arguments.data, *memory, *place, stopped);
  SetProgressLine("");
  if (lines.status().code() == StatusCode::kAborted && stopped()) {
    LogText(LogLevel::kInfo, "interrupted; nothing was written");
    return kExitInterrupted;
  }
  if (!lines.ok()) return ReportFailureOfRun(fs, lines.status(), arguments.run);
  LogText(LogLevel::kInfo,
          fmt::format("wrote {} lines to {}", FormatCount(lines->lines), arguments.output));
  if (lines->bad_lines > 0) {
    LogText(LogLevel::kWarning,
            fmt::format("bad lines that got nan: {}", FormatCount(lines->bad_lines)));
  }
  return kExitDone;
}

}  // namespace terrace
