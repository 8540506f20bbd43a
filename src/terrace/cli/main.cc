// terrace: the program. Reads the arguments, arms what tests ask for, and runs one command.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "terrace/base/clock.h"
#include "terrace/base/log.h"
#include "terrace/base/memory.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/thread.h"
#include "terrace/cli/commands.h"
#include "terrace/io/faulty_file_system.h"
#include "terrace/train/job.h"
#include "terrace/train/job_tree.h"

namespace terrace {
namespace {

std::atomic<int> g_stop_signals{0};
std::atomic<std::int64_t> g_first_stop_nanos{0};  // By the monotonic clock; 0: none came.
const Clock* g_clock = nullptr;                   // Set before there is a handler.
// Nothing has begun that could be lost: a stop signal ends the process.
std::atomic<bool> g_nothing_begun{false};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free &&
                  std::atomic<std::int64_t>::is_always_lock_free,
              "a signal handler may only touch such");

// Ends the process, as a signal handler may.
[[noreturn]] void EndAtOnce(std::string_view text, int code) {
  // Nothing can be done about a terminal that is gone.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
  _exit(code);
}

extern "C" void OnStopSignal(int) {
  // Relaxed, here and below: values that order nothing.
  if (g_nothing_begun.load(std::memory_order_relaxed)) {
    EndAtOnce("interrupted before the run began; nothing was changed\n", kExitInterrupted);
  }
  // One stop often comes as several signals within milliseconds: a shell and the terminal that it
  // closes send one each, and a wrapper passes on what its whole process group got.
  constexpr std::int64_t kAnotherStopNanos = 1'000'000'000;
  const int before = errno;
  const std::int64_t nanos = g_clock->MonotonicNanos();  // A signal handler may ask the kernel.
  errno = before;
  std::int64_t first = 0;
  // Handlers on two threads agree on the first.
  if (g_first_stop_nanos.compare_exchange_strong(first, nanos, std::memory_order_relaxed)) {
    g_stop_signals.store(1, std::memory_order_relaxed);
    return;
  }
  if (nanos - first < kAnotherStopNanos) return;
  // Whoever sends a later one does not want to wait for a checkpoint, and must not read from the
  // exit code that one was taken.
  EndAtOnce("interrupted again: ended at once\n", kExitFailed);
}

void HandleStopSignals() {
  g_clock = Clock::Real();
  struct sigaction action = {};
  action.sa_handler = OnStopSignal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  // A terminal that is closed; nohup has it ignored, and then it stays so.
  struct sigaction before = {};
  if (sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) {
    sigaction(SIGHUP, &action, nullptr);
  }
}

// Whoever reads what a command says while it writes a file or a run may leave; the command goes on.
void IgnoreClosedPipes() { std::signal(SIGPIPE, SIG_IGN); }

// What every command takes.
struct CommonArguments {
  std::string log_level = "info";
  bool quiet = false;
  std::string faults;
  std::string kill_at;
  std::string record_sync_points;
};

void AddCommon(CLI::App* command, CommonArguments* common) {
  command->add_option("--log-level", common->log_level, "debug, info, warning or error")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  command->add_flag("--quiet", common->quiet,
                    "Warnings, errors and results that were asked for, nothing else");
  // The empty group keeps a test's flags out of the help.
  command->add_option("--test-faults", common->faults)->group("");
  command->add_option("--test-kill-at", common->kill_at)->group("");
  command->add_option("--test-record-sync-points", common->record_sync_points)->group("");
}

LogLevel LevelOf(const CommonArguments& common) {
  if (common.quiet) return LogLevel::kWarning;
  if (common.log_level == "debug") return LogLevel::kDebug;
  if (common.log_level == "warning") return LogLevel::kWarning;
  return common.log_level == "error" ? LogLevel::kError : LogLevel::kInfo;
}

// The seams that tests use; kExitWrong for a specification that is none.
int ArmTests(const CommonArguments& common, std::unique_ptr<FileSystem>* faulty) {
  if (!common.faults.empty()) {
    Result<std::unique_ptr<FileSystem>> made =
        MakeFaultyFileSystem(FileSystem::Posix(), common.faults);
    if (!made.ok()) {
      LogText(LogLevel::kError, "--test-faults: " + made.status().message());
      return kExitWrong;
    }
    *faulty = std::move(made).value();
  }
  if (!common.kill_at.empty() && !SyncPoint::ArmKill(common.kill_at)) {
    LogText(LogLevel::kError, "--test-kill-at: expected NAME or NAME:N");
    return kExitWrong;
  }
  if (!common.record_sync_points.empty()) SyncPoint::ArmRecord(common.record_sync_points);
  return kExitDone;
}

using Command = std::function<int(FileSystem*)>;

// Of a whole number, in the forms that a job file takes (1e6, 1_000_000): the parser of the
// arguments would read -1 as 2^64 - 1.
CLI::Validator AtLeast(std::uint64_t least) {
  const auto read = [least](std::string& text) {
    const std::optional<std::uint64_t> value = ParseWhole(text);
    if (!value || *value < least) {
      return fmt::format("'{}' is no whole number of {} or more", text, least);
    }
    text = std::to_string(*value);
    return std::string();
  };
  return {read, ""};
}

// An option that takes texts as they are, as many as follow it. CLI11's own options of several
// values read [a,b] as two of them, and {} as none.
CLI::Option* AddTexts(CLI::App* command, const std::string& name, std::vector<std::string>* texts,
                      const std::string& description) {
  constexpr int kMost = 1 << 24;  // More than the system takes as arguments.
  const CLI::callback_t assign = [texts](const CLI::results_t& results) {
    *texts = results;
    return true;
  };
  return command->add_option(name, assign, description)->expected(1, kMost)->type_name("TEXT");
}

// The same, one text each time that it is given.
CLI::Option* AddOneText(CLI::App* command, const std::string& name, std::vector<std::string>* texts,
                        const std::string& description) {
  // A number from which on CLI11 takes it for the number of all, not of those that follow.
  return AddTexts(command, name, texts, description)
      ->expected(1, CLI::detail::expected_max_vector_size);
}

void AddTrain(CLI::App* app, CommonArguments* common, Command* chosen) {
  CLI::App* command = app->add_subcommand("train", "Trains a model as a job file says");
  auto arguments = std::make_shared<TrainArguments>();  // Shared by parser and command.
  auto help_job = std::make_shared<bool>(false);
  command->add_option("JOB", arguments->job, "The job file (YAML)");
  AddOneText(command, "--set", &arguments->overrides, "path=value: overrides a key of the job")
      ->type_name("PATH=VALUE");
  CLI::Option* resume = command->add_flag("--resume", arguments->resume,
                                          "Goes on from the newest checkpoint, if any");
  command
      ->add_flag("--overwrite", arguments->overwrite,
                 "Deletes the run that is there, and no other file")
      ->excludes(resume);
  command
      ->add_option("--accept", arguments->accept,
                   "data (its files), processor or threads: go on although the run had another")
      ->allow_extra_args(false)
      ->check(CLI::IsMember({"data", "processor", "threads"}));
  command->add_flag("--help-job", *help_job, "Prints all keys of a job file");
  command->footer("Example: terrace train examples/criteo.yaml --set data.train=[log.tsv]");
  AddCommon(command, common);
  command->callback([arguments, help_job, common, chosen] {
    arguments->quiet = common->quiet;
    *chosen = [arguments, help_job](FileSystem* fs) {
      if (*help_job) return PrintResult(JobReferenceText());
      if (arguments->job.empty()) {
        LogText(LogLevel::kError, "train: a JOB file is missing (terrace train --help)");
        return kExitWrong;
      }
      // Of a pipe that nobody closes the job is never read: who waits for it can't look at a count.
      g_nothing_begun.store(true, std::memory_order_relaxed);
      HandleStopSignals();
      IgnoreClosedPipes();
      const auto begins = [] { g_nothing_begun.store(false, std::memory_order_relaxed); };
      return TrainCommand(fs, *arguments, begins, &g_stop_signals);
    };
  });
}

void AddMemory(CLI::App* command, std::string* memory) {
  command->add_option("--memory", *memory, "Memory to use, not the memory.budget of the run's job")
      ->type_name("SIZE");
}

void AddEvaluate(CLI::App* app, CommonArguments* common, Command* chosen) {
  CLI::App* command = app->add_subcommand("evaluate", "Measures a run's model on further data");
  auto arguments = std::make_shared<EvaluateArguments>();
  command->add_option("RUN", arguments->run, "The run's folder")->required();
  AddTexts(command, "--data", &arguments->data, "Files and globs, as in data.train")
      ->required()
      ->type_name("FILE...");
  AddMemory(command, &arguments->memory);
  command
      ->add_option("--max-bad-fraction", arguments->max_bad_fraction,
                   "Share of bad lines that there may be, not the data.max_bad_fraction of the "
                   "run's job")
      ->type_name("0...1");
  command->add_flag("--json", arguments->json, "Prints one JSON object");
  command->footer("Example: terrace evaluate runs/criteo --data logs/day_23.tsv.gz");
  AddCommon(command, common);
  command->callback([arguments, chosen] {
    *chosen = [arguments](FileSystem* fs) { return EvaluateCommand(fs, *arguments); };
  });
}

void AddPredict(CLI::App* app, CommonArguments* common, Command* chosen) {
  CLI::App* command =
      app->add_subcommand("predict", "Writes a probability of a click per line of data");
  auto arguments = std::make_shared<PredictArguments>();
  command->add_option("RUN", arguments->run, "The run's folder")->required();
  AddTexts(command, "--data", &arguments->data, "Files and globs, as in data.train")
      ->required()
      ->type_name("FILE...");
  command
      ->add_option("--output", arguments->output,
                   "The file to write; nan for a bad line, nothing for a header; .gz and .zst are "
                   "compressed")
      ->required();
  AddMemory(command, &arguments->memory);
  command->footer("Example: terrace predict runs/criteo --data new.tsv --output clicks.txt");
  AddCommon(command, common);
  command->callback([arguments, chosen] {
    *chosen = [arguments](FileSystem* fs) {
      HandleStopSignals();
      IgnoreClosedPipes();
      return PredictCommand(fs, *arguments, &g_stop_signals);
    };
  });
}

void AddInspect(CLI::App* app, CommonArguments* common, Command* chosen) {
  CLI::App* command = app->add_subcommand("inspect", "Shows what a run's newest checkpoint holds");
  auto arguments = std::make_shared<InspectArguments>();
  command->add_option("RUN", arguments->run, "The run's folder")->required();
  CLI::Option* digest =
      command->add_flag("--digest", arguments->digest, "One hex line: a hash of the whole content");
  CLI::Option* verify =
      command->add_flag("--verify", arguments->verify,
                        "Reads and checks every byte of all checkpoints; 1 if any is wrong");
  CLI::Option* keys =
      AddOneText(command, "--key", &arguments->keys,
                 "The row of a key (decimal, 0x..., C1=2bc7, or I2=14 where integers are slots) in "
                 "every table that has it");
  CLI::Option* dense = command->add_flag("--dense", arguments->dense,
                                         "The network's parameters and optimizer state");
  CLI::Option* repair = command->add_flag(
      "--repair", arguments->repair,
      "Plans how a damaged run can go on, which rows and checkpoints that costs, and asks");
  repair->excludes(verify)->excludes(keys)->excludes(dense)->excludes(digest);
  command->add_flag("--yes", arguments->yes, "With --repair: does it without asking")
      ->needs(repair);
  command
      ->add_option("--back-to", arguments->back_to,
                   "With --repair: goes back to this checkpoint and drops the later ones")
      ->needs(repair)
      ->transform(AtLeast(1))
      ->type_name("CHECKPOINT");
  command
      ->add_option(
          "--quota", arguments->quota,
          "With --repair: bytes the run may take on disk meanwhile, not the job's ssd.quota")
      ->needs(repair)
      ->type_name("SIZE");
  command->add_flag("--initial", arguments->initial,
                    "With --key or --dense: as they started, before any training");
  command->add_flag("--json", arguments->json, "Prints one JSON object");
  command->footer("Example: terrace inspect runs/criteo --digest");
  AddCommon(command, common);
  command->callback([arguments, chosen] {
    *chosen = [arguments](FileSystem* fs) { return InspectCommand(fs, *arguments); };
  });
}

void AddGenerate(CLI::App* app, CommonArguments* common, Command* chosen) {
  CLI::App* command = app->add_subcommand(
      "generate", "Writes a click log as Criteo text whose true click probabilities are known");
  auto arguments = std::make_shared<GenerateArguments>();
  command->add_option("--rows", arguments->rows, "Lines to write")
      ->required()
      ->transform(AtLeast(1));
  command->add_option("--output", arguments->output, "The file; .gz and .zst are compressed")
      ->required();
  command->add_option("--seed", arguments->seed, "Of the log")
      ->transform(AtLeast(0))
      ->capture_default_str();
  command->add_option("--first-row", arguments->first_row, "Row of the log to begin at")
      ->transform(AtLeast(0))
      ->capture_default_str();
  command->add_option("--cardinality", arguments->cardinality, "Categories of a slot")
      ->transform(AtLeast(1))
      ->capture_default_str();
  command->add_option("--zipf", arguments->zipf, "Exponent of their power law")
      ->capture_default_str();
  command->add_option("--slots", arguments->slots, "Categorical slots, at most 26")
      ->transform(AtLeast(0))
      ->capture_default_str();
  command->add_option("--click-rate", arguments->click_rate, "Share of clicks, nearly")
      ->capture_default_str();
  command->add_option("--signal", arguments->signal, "Standard deviation of the true logit")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Prints the oracle's figures as one JSON object");
  command->footer("Example: terrace generate --rows 1000000 --output log.tsv.zst --seed 7");
  AddCommon(command, common);
  command->callback([arguments, common, chosen] {
    arguments->quiet = common->quiet;
    *chosen = [arguments](FileSystem* fs) {
      HandleStopSignals();
      IgnoreClosedPipes();
      return GenerateCommand(fs, *arguments, &g_stop_signals);
    };
  });
}

// What stands where a command should, or empty.
std::string WrongCommand(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return "";
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) {
    if (command->get_name() == argv[1]) return "";
    names.push_back(command->get_name());
  }
  const std::string nearest = NearestName(argv[1], names);
  return fmt::format("'{}' is no command{}; the commands are {} (terrace --help)", argv[1],
                     nearest.empty() ? "" : fmt::format("; did you mean '{}'?", nearest),
                     fmt::join(names, ", "));
}

// The options that the chosen command does not have, with the nearest ones that it has, or empty.
std::string WrongOptions(const CLI::App& app) {
  std::string wrong;
  for (const CLI::App* command : app.get_subcommands()) {
    std::vector<std::string> names;
    for (const CLI::Option* option : command->get_options()) {
      if (option->get_group().empty()) continue;  // Of tests.
      for (const std::string& name : option->get_lnames()) names.push_back(name);
    }
    for (const std::string& argument : command->remaining()) {
      if (!argument.starts_with("--") || argument.size() == 2) continue;
      const std::string name = argument.substr(2, argument.find('=') - 2);
      const std::string nearest = NearestName(name, names);
      wrong += fmt::format("{}'--{}' is no option of {}{}", wrong.empty() ? "" : "\n", name,
                           command->get_name(),
                           nearest.empty() ? "" : fmt::format("; did you mean '--{}'?", nearest));
    }
    if (!wrong.empty()) wrong += fmt::format(" (terrace {} --help)", command->get_name());
  }
  return wrong;
}

// The option of a command that an argument names, or null.
const CLI::Option* NamedOption(const CLI::App& command, const std::string& argument) {
  if (!argument.starts_with("--")) return nullptr;
  return command.get_option_no_throw(argument.substr(0, argument.find('=')));
}

// An option without a value, where a shell has left nothing of a variable: CLI11 would take the
// next argument for it, another option too. Or empty.
std::string MissingValue(const CLI::App& app, int argc, char** argv) {
  const CLI::App* command = nullptr;
  for (const CLI::App* one : app.get_subcommands({})) {
    if (argc >= 2 && one->get_name() == argv[1]) command = one;
  }
  if (command == nullptr) return "";
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    const CLI::Option* const option = NamedOption(*command, argument);
    if (option == nullptr) continue;
    const std::size_t equals = argument.find('=');
    const bool next = equals == std::string::npos && option->get_items_expected_max() > 0;
    const bool none_next = next && i + 1 < argc &&
                           (*argv[i + 1] == '\0' || NamedOption(*command, argv[i + 1]) != nullptr);
    if (equals + 1 == argument.size() || none_next) {
      return fmt::format("'{}' has no value (terrace {} --help)", argument, command->get_name());
    }
    if (next) ++i;  // Its value.
  }
  return "";
}

int Main(int argc, char** argv) {
  OccupyStandardStreams();
  // A file that may grow no further is an error of the write (EFBIG), not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  ConfigureAllocator();
  RaiseOpenFileLimit();
  FlushDenormals();
  CLI::App app("terrace trains click models whose embedding tables are larger than memory.",
               "terrace");
  app.require_subcommand(1);
  app.set_version_flag("--version", TERRACE_VERSION);
  app.footer(
      "Each command has its own --help. Exit codes: 0 done, 1 failed, 2 wrong arguments or "
      "job file, 130 interrupted (train: after a checkpoint, or before the run began; another "
      "signal at least a second later ends it at once, with 1).");
  CommonArguments common;
  Command command;
  AddTrain(&app, &common, &command);
  AddEvaluate(&app, &common, &command);
  AddPredict(&app, &common, &command);
  AddInspect(&app, &common, &command);
  AddGenerate(&app, &common, &command);
  std::string wrong = WrongCommand(app, argc, argv);
  if (wrong.empty()) wrong = MissingValue(app, argc, argv);
  if (!wrong.empty()) {
    LogText(LogLevel::kError, wrong);
    return kExitWrong;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    wrong = error.get_exit_code() == 0 ? "" : WrongOptions(app);
    if (!wrong.empty()) {
      LogText(LogLevel::kError, wrong);
      return kExitWrong;
    }
    std::ostringstream help;
    // Help and version are "errors" with code 0.
    return app.exit(error, help) == 0 ? PrintResult(help.str()) : kExitWrong;
  }
  SetLogLevel(LevelOf(common));
  std::unique_ptr<FileSystem> faulty;
  const int armed = ArmTests(common, &faulty);
  if (armed != kExitDone) return armed;
  return command(faulty != nullptr ? faulty.get() : FileSystem::Posix());
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) { return terrace::Main(argc, argv); }
