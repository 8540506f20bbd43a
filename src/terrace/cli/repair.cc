// terrace inspect --repair: the plan of a repair as a person or a script reads it, the question,
// and the repair.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terrace/base/log.h"
#include "terrace/base/units.h"
#include "terrace/cli/commands.h"
#include "terrace/train/run_repair.h"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;

Json HashesJson(const std::vector<HashRange>& ranges) {
  Json all = Json::array();
  for (const HashRange& range : ranges) all.push_back({range.first, range.last});
  return all;
}

Json StoreJson(const RepairPlan::StoreRepair& store) {
  Json object = {{"table", store.table}, {"shard", store.shard}, {"files", store.files}};
  if (store.block_rows > 0) {
    object["dropped_hashes"] = HashesJson(store.dropped_hashes);
    object["outdated_hashes"] = HashesJson(store.outdated_hashes);
    object["unknown_blocks"] = store.losses.unknown_rows;
    object["replaced_blocks"] = store.losses.replaced_rows;
    return object;
  }
  object["dropped_keys"] = store.losses.dropped;
  object["outdated_keys"] = store.losses.outdated;
  object["unknown_rows"] = store.losses.unknown_rows;
  object["replaced_rows"] = store.losses.replaced_rows;
  return object;
}

Json PlanJson(const RepairPlan& plan) {
  Json stores = Json::array();
  for (const RepairPlan::StoreRepair& store : plan.stores) stores.push_back(StoreJson(store));
  Json object = {{"format_version", kResultVersion},
                 {"findings", FindingsJson(plan.findings)},
                 {"newest_checkpoint", plan.newest},
                 {"newest_examples", nullptr},
                 {"checkpoint", plan.base},
                 {"examples", plan.base_examples},
                 {"successor", nullptr},
                 {"stores", stores},
                 {"dropped_checkpoints", plan.dropped},
                 {"undamaged_checkpoint", nullptr},
                 {"markers", plan.markers},
                 {"job_yaml", plan.job},
                 {"summary_json", plan.summary},
                 {"lost_metrics_bytes", plan.metrics_bytes},
                 {"metrics_accepted", plan.metrics_accepted},
                 {"read_costs", plan.read_costs},
                 {"leftovers", plan.strays},
                 {"leftover_bytes", plan.stray_bytes},
                 {"write_bytes", plan.write_bytes}};
  if (plan.newest_examples) object["newest_examples"] = *plan.newest_examples;
  if (plan.successor > 0) object["successor"] = plan.successor;
  if (plan.undamaged) object["undamaged_checkpoint"] = *plan.undamaged;
  return object;
}

// Lines of so many names each. A file of rows that are lost has hundreds of thousands, behind which
// nobody would see the question: a terminal gets the first ones.
template <typename Name, typename ToText>
std::string NamesText(const std::vector<Name>& names, std::size_t a_line, const ToText& to_text) {
  constexpr std::size_t kMostLines = 20;
  const std::size_t most = isatty(STDOUT_FILENO) == 1 ? kMostLines * a_line : names.size();
  const std::size_t named = std::min(names.size(), most);
  std::string text;
  for (std::size_t i = 0; i < named; ++i) {
    text += (i % a_line == 0 ? "      " : " ") + to_text(names[i]);
    if (i % a_line == a_line - 1 || i + 1 == named) text += "\n";
  }
  if (named < names.size()) {
    text += fmt::format("      and {} more, which are named in a file or pipe, and with --json\n",
                        FormatCount(names.size() - named));
  }
  return text;
}

std::string KeysText(const std::vector<Key>& keys) {
  return NamesText(keys, 5, [](Key key) { return fmt::format("{:#x}", key); });
}

std::string HashesText(const std::vector<HashRange>& ranges) {
  return NamesText(ranges, 1, [](const HashRange& range) {
    return fmt::format("{:#018x} to {:#018x}", range.first, range.last);
  });
}

// By key of rows, by group of blocks of them, which are named by the hashes of their rows' keys.
std::string LossesText(const RepairPlan::StoreRepair& store) {
  const StoreLosses& losses = store.losses;
  const bool blocks = store.block_rows > 0;
  const std::string_view rows = blocks ? "blocks" : "rows", records = blocks ? "blocks" : "records";
  const std::string_view whose =
      blocks ? "The keys of their rows have hashes (docs/formats/group_block.md)" : "Their keys";
  std::string text;
  if (!losses.dropped.empty()) {
    text += fmt::format(
        "    drops {} {}{} whose newest record is lost; training makes them anew when it meets "
        "them, and no older record comes back. {}:\n{}",
        FormatCount(losses.dropped.size()), rows,
        blocks ? fmt::format(" of up to {} rows", store.block_rows) : "", whose,
        blocks ? HashesText(store.dropped_hashes) : KeysText(losses.dropped));
  }
  if (losses.unknown_rows > 0) {
    text += fmt::format("    {} {} are lost whose keys nothing tells any more\n",
                        FormatCount(losses.unknown_rows), records);
  }
  if (!losses.outdated.empty()) {
    text += fmt::format(
        "    drops {} whole {} too, because such a lost record may have been newer. {}:\n{}",
        FormatCount(losses.outdated.size()), rows, whose,
        blocks ? HashesText(store.outdated_hashes) : KeysText(losses.outdated));
  }
  if (losses.replaced_rows > 0) {
    text += fmt::format("    {} damaged {} had been replaced by newer ones: no loss\n",
                        FormatCount(losses.replaced_rows), records);
  }
  return text;
}

std::string StoreText(const RepairPlan::StoreRepair& store) {
  const StoreLosses& losses = store.losses;
  std::string text = fmt::format("  - table {}, shard {}: writes what is whole of {} {} anew\n",
                                 store.table, store.shard, FormatCount(store.files.size()),
                                 store.files.size() == 1 ? "file" : "files");
  text += LossesText(store);
  if (losses.dropped.empty() && losses.outdated.empty() && losses.unknown_rows == 0) {
    text += "    no row is lost\n";
  }
  return text;
}

std::string BaseText(const RepairPlan& plan) {
  const std::string base =
      fmt::format("checkpoint {} (example {})", plan.base, FormatCount(plan.base_examples));
  std::string text;
  if (plan.base != plan.newest) {
    text += fmt::format(
        "  - goes back from checkpoint {} ({}) to {}: what was trained since is trained again\n",
        plan.newest,
        plan.newest_examples ? "example " + FormatCount(*plan.newest_examples)
                             : std::string("its file can't be read"),
        base);
  }
  if (plan.successor > 0) {
    text +=
        fmt::format("  - makes checkpoint {} of {} without what is lost\n", plan.successor, base);
  }
  for (const RepairPlan::StoreRepair& store : plan.stores) text += StoreText(store);
  if (!plan.dropped.empty()) {
    text += fmt::format("  - drops checkpoints {}\n", fmt::join(plan.dropped, ", "));
  }
  return text;
}

std::string PlanText(const RepairPlan& plan, const std::string& run) {
  if (plan.empty()) return "nothing is damaged, and nothing is left over\n";
  std::string text = plan.findings.empty() ? "nothing is damaged\n" : FindingsText(plan.findings);
  text += "the repair\n" + BaseText(plan);
  if (plan.markers) text += "  - writes the marker RUN anew\n";
  if (plan.job) text += "  - writes job.yaml anew, from the checkpoint\n";
  if (plan.summary) text += "  - removes summary.json; train --resume writes it again\n";
  if (plan.metrics_bytes > 0) {
    text += fmt::format("  - gives up {} bytes of metrics.jsonl whose lines are damaged\n",
                        FormatCount(plan.metrics_bytes));
  }
  if (plan.metrics_accepted) {
    text += "  - takes metrics.jsonl as it is: nothing tells which of its figures was changed\n";
  }
  for (const std::string& path : plan.read_costs) {
    text += fmt::format("  - removes {}; the next trainer measures the disk again\n", path);
  }
  if (!plan.strays.empty()) {
    text += fmt::format("  - removes {} left-over files that no checkpoint names ({})\n",
                        FormatCount(plan.strays.size()), FormatBytes(plan.stray_bytes));
  }
  if (plan.write_bytes > 0) {
    text += fmt::format("  it writes up to {}\n", FormatBytes(plan.write_bytes));
  }
  if (plan.undamaged) {
    text += fmt::format(
        "no row would be lost by going back to checkpoint {} (example {}), from where training "
        "comes to the same bits again: terrace inspect {} --repair --back-to {}\n",
        *plan.undamaged, FormatCount(plan.undamaged_examples), ShellWord(run), *plan.undamaged);
  }
  return text;
}

// Whether the person at the terminal agrees.
bool Ask() {
  std::fputs("Do this? [y/N] ", stderr);
  std::fflush(stderr);
  std::array<char, 16> answer{};
  if (std::fgets(answer.data(), answer.size(), stdin) == nullptr) return false;
  return answer[0] == 'y' || answer[0] == 'Y';
}

Result<RepairOptions> OptionsOf(const InspectArguments& arguments) {
  RepairOptions options;
  options.back_to = arguments.back_to;
  TERRACE_ASSIGN_OR_RETURN(options.quota_bytes, SizeArgument("--quota", arguments.quota));
  return options;
}

}  // namespace

int RepairCommand(FileSystem* fs, const InspectArguments& arguments) {
  const Result<RepairOptions> options = OptionsOf(arguments);
  if (!options.ok()) return ReportFailure(options.status());
  const Result<std::unique_ptr<RunRepair>> repair = RunRepair::Open(fs, arguments.run, *options);
  if (!repair.ok()) return ReportFailure(repair.status());
  const RepairPlan& plan = (*repair)->plan();
  const int printed = PrintResult(
      arguments.json ? PlanJson(plan).dump(1, ' ', false, Json::error_handler_t::replace) + "\n"
                     : PlanText(plan, arguments.run));
  if (printed != kExitDone || plan.empty()) return printed;
  const bool asked = !arguments.yes && isatty(STDIN_FILENO) == 1 && isatty(STDERR_FILENO) == 1;
  if (!arguments.yes && !(asked && Ask())) {
    LogText(LogLevel::kError, "nothing was changed; the same command with --yes does it");
    return kExitFailed;
  }
  if (const Status status = (*repair)->Apply(); !status.ok()) {
    return ReportFailure(status.WithContext("the repair is not complete; it can be begun again"));
  }
  LogText(LogLevel::kInfo,
          fmt::format("'{}' is repaired: train --resume goes on from checkpoint {} (example {})",
                      arguments.run, plan.successor > 0 ? plan.successor : plan.base,
                      FormatCount(plan.base_examples)));
  return kExitDone;
}

}  // namespace terrace
