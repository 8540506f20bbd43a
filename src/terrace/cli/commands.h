// The commands of the program, each from its options to its exit code. Results go to standard
// output, everything else to the log. Threads: the main thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "terrace/base/status.h"
#include "terrace/data/click_log_generator.h"
#include "terrace/io/file_system.h"
#include "terrace/store/store.h"

namespace terrace {

inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitWrong = 2;          // The arguments, or the job file.
inline constexpr int kExitInterrupted = 130;  // Train: after a checkpoint.

// format_version of what commands print with --json (docs/formats/results.md).
inline constexpr int kResultVersion = 1;

struct TrainArguments {
  std::string job;
  std::vector<std::string> overrides;
  std::vector<std::string> accept;
  bool resume = false;
  bool overwrite = false;
  bool quiet = false;  // No summary.
};
// `begins` is called once the job is read, before anything is changed: from then on it is looked at
// *stop_signals.
int TrainCommand(FileSystem* fs, const TrainArguments& arguments,
                 const std::function<void()>& begins, const std::atomic<int>* stop_signals);

struct EvaluateArguments {
  std::string run;
  std::vector<std::string> data;
  std::string memory;            // A size, or empty: as the run's job has it.
  std::string max_bad_fraction;  // A number, or empty, likewise.
  bool json = false;
};
int EvaluateCommand(FileSystem* fs, const EvaluateArguments& arguments);

struct PredictArguments {
  std::string run;
  std::vector<std::string> data;
  std::string output;
  std::string memory;  // A size, or empty: as the run's job has it.
};
int PredictCommand(FileSystem* fs, const PredictArguments& arguments,
                   const std::atomic<int>* stop_signals);

struct InspectArguments {
  std::string run;
  bool digest = false;
  bool verify = false;
  bool json = false;
  bool dense = false;
  bool initial = false;
  bool repair = false;
  bool yes = false;                      // The user agrees to what the plan says.
  std::optional<std::uint64_t> back_to;  // A checkpoint.
  std::string quota;                     // Of the repair; empty: the job's.
  std::vector<std::string> keys;         // Decimal, hexadecimal after 0x, or a column's.
};
int InspectCommand(FileSystem* fs, const InspectArguments& arguments);
// What `repair` asks for: prints the plan, and carries it out where the user agrees.
int RepairCommand(FileSystem* fs, const InspectArguments& arguments);

struct GenerateArguments {
  std::uint64_t rows = 0;
  std::string output;
  std::uint64_t seed = ClickLogSpec().seed;
  std::uint64_t first_row = 0;
  std::uint64_t cardinality = ClickLogSpec().cardinality;
  double zipf = ClickLogSpec().zipf;
  std::uint32_t slots = ClickLogSpec().categorical_slots;
  double click_rate = ClickLogSpec().click_rate;
  double signal = ClickLogSpec().signal;
  bool json = false;
  bool quiet = false;  // No oracle, unless as JSON.
};
int GenerateCommand(FileSystem* fs, const GenerateArguments& arguments,
                    const std::atomic<int>* stop_signals);

// A line for each, with file and offset, and how many there are.
std::string FindingsText(const std::vector<Finding>& findings);
nlohmann::ordered_json FindingsJson(const std::vector<Finding>& findings);

// Logs the error and says which exit code it is, for commands that only read.
int ReportFailure(const Status& status);
// The same; where a file of the run is damaged, says too which commands tell more.
int ReportFailureOfRun(FileSystem* fs, const Status& status, const std::string& run);
// Of an option that takes a size; nothing where it was not given.
Result<std::optional<std::uint64_t>> SizeArgument(std::string_view name, const std::string& text);
// Where a command's --output is to be written, through links. kInvalidArgument: there is something
// that must not be replaced, a folder or a device, say, or the place lies within a run.
Result<std::string> OutputPlace(FileSystem* fs, const std::string& output);
// As a shell takes it for one word: of a path or a name in a command that somebody may paste.
std::string ShellWord(const std::string& text);
// Writes to standard output; kExitFailed when that cannot be written.
int PrintResult(const std::string& text);

}  // namespace terrace
