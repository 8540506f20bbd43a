// Plans of faults as text.
#include <fmt/format.h>

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/io/faulty_file_system.h"

namespace terrace {
namespace {

constexpr std::pair<std::string_view, FileOperation> kOperations[] = {
    {"open", FileOperation::kOpen},
    {"read", FileOperation::kRead},
    {"write", FileOperation::kWrite},
    {"sync", FileOperation::kSync},
    {"truncate", FileOperation::kTruncate},
    {"size", FileOperation::kSize},
    {"rename", FileOperation::kRename},
    {"remove", FileOperation::kRemove},
    {"make_directories", FileOperation::kMakeDirectories},
    {"sync_directory", FileOperation::kSyncDirectory},
    {"list", FileOperation::kList},
    {"stat", FileOperation::kStat},
    {"space", FileOperation::kSpace},
    {"lock", FileOperation::kLock},
    {"new_read_queue", FileOperation::kNewReadQueue},
};
static_assert(std::size(kOperations) == kFileOperations);

constexpr std::pair<std::string_view, Fault> kFaults[] = {
    {"error", Fault::kError},     {"short_read", Fault::kShortRead},
    {"enospc", Fault::kNoSpace},  {"short_write", Fault::kShortWrite},
    {"flip", Fault::kFlippedBit}, {"sync_error", Fault::kSyncError},
    {"eio", Fault::kError},       {"missing", Fault::kMissing},
};

template <typename T, std::size_t n>
std::optional<T> Lookup(const std::pair<std::string_view, T> (&table)[n], std::string_view name) {
  for (const auto& [known, value] : table) {
    if (known == name) return value;
  }
  return std::nullopt;
}

template <typename T, std::size_t n>
std::string_view NameOf(const std::pair<std::string_view, T> (&table)[n], T value) {
  for (const auto& [name, known] : table) {
    if (known == value) return name;
  }
  return "unknown";
}

template <typename T>
bool ParseNumber(std::string_view text, T* value) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

std::vector<std::string_view> Split(std::string_view text, char separator, std::size_t most) {
  std::vector<std::string_view> parts;
  while (parts.size() + 1 < most) {
    std::size_t end = text.find(separator);
    if (end == std::string_view::npos) break;
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.push_back(text);
  return parts;
}

Status BadPart(std::string_view what, std::string_view part, std::string_view rule) {
  return InvalidArgumentError(
      fmt::format("'{}' is no {} in the fault rule '{}': rules are OPERATION:N[+]:FAULT[:PATH] or "
                  "seed=S,rate=R[,op=OPERATION][,fault=FAULT][,path=PATH], joined by ';'",
                  part, what, rule));
}

Status SetOperation(std::string_view name, std::string_view text, FaultRule* rule) {
  if (name == "any") return OkStatus();
  rule->operation = Lookup(kOperations, name);
  return rule->operation ? OkStatus() : BadPart("operation", name, text);
}

Status SetFault(std::string_view name, std::string_view text, FaultRule* rule) {
  rule->fault = Lookup(kFaults, name);
  return rule->fault ? OkStatus() : BadPart("fault", name, text);
}

Result<FaultRule> ParseNth(std::string_view text) {
  std::vector<std::string_view> parts = Split(text, ':', 4);
  if (parts.size() < 3) return BadPart("rule", text, text);
  FaultRule rule;
  TERRACE_RETURN_IF_ERROR(SetOperation(parts[0], text, &rule));
  std::string_view nth = parts[1];
  if (nth.ends_with('+')) {
    rule.from_then_on = true;
    nth.remove_suffix(1);
  }
  if (!ParseNumber(nth, &rule.nth) || rule.nth == 0) return BadPart("number", parts[1], text);
  TERRACE_RETURN_IF_ERROR(SetFault(parts[2], text, &rule));
  if (parts.size() == 4) rule.path_contains = parts[3];
  return rule;
}

Result<FaultRule> ParseRate(std::string_view text) {
  FaultRule rule;
  rule.fault = std::nullopt;
  for (std::string_view part : Split(text, ',', text.size() + 1)) {
    std::size_t equals = part.find('=');
    std::string_view key = part.substr(0, equals);
    if (equals == std::string_view::npos) return BadPart("setting", part, text);
    std::string_view value = part.substr(equals + 1);
    if (key == "seed") {
      if (!ParseNumber(value, &rule.seed)) return BadPart("seed", value, text);
    } else if (key == "rate") {
      // Negated, so that a NaN is refused as well.
      if (!ParseNumber(value, &rule.rate) || !(rule.rate >= 0 && rule.rate <= 1)) {
        return BadPart("probability", value, text);
      }
    } else if (key == "op") {
      TERRACE_RETURN_IF_ERROR(SetOperation(value, text, &rule));
    } else if (key == "fault") {
      TERRACE_RETURN_IF_ERROR(SetFault(value, text, &rule));
    } else if (key == "path") {
      rule.path_contains = value;
    } else {
      return BadPart("setting", key, text);
    }
  }
  return rule;
}

}  // namespace

std::string_view FileOperationName(FileOperation operation) {
  return NameOf(kOperations, operation);
}

std::string_view FaultName(Fault fault) { return NameOf(kFaults, fault); }

Result<std::vector<FaultRule>> ParseFaultRules(std::string_view text) {
  std::vector<FaultRule> rules;
  for (std::string_view part : Split(text, ';', text.size() + 1)) {
    const bool by_rate = part.find('=') < part.find(':');
    TERRACE_ASSIGN_OR_RETURN(FaultRule rule, by_rate ? ParseRate(part) : ParseNth(part));
    rules.push_back(std::move(rule));
  }
  return rules;
}

Result<std::unique_ptr<FileSystem>> MakeFaultyFileSystem(FileSystem* base, std::string_view spec) {
  TERRACE_ASSIGN_OR_RETURN(std::vector<FaultRule> rules, ParseFaultRules(spec));
  return std::unique_ptr<FileSystem>(std::make_unique<FaultyFileSystem>(base, std::move(rules)));
}

}  // namespace terrace
