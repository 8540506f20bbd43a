// MakeModelPlan and what identifies a model.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "terrace/train/job.h"
#include "terrace/train/job_keys.h"
#include "terrace/train/job_tree.h"
#include "terrace/train/processor_type.h"

namespace terrace {
namespace {

const TableJob& TableNamed(const Job& job, const std::string& name) {
  if (name.empty() || name == "default") return job.table;
  return job.tables.at(name);
}

// I1 to I13 of a Criteo log.
bool IsIntegerColumn(std::string_view name) {
  if (name.size() < 2 || name.front() != 'I') return false;
  return std::all_of(name.begin() + 1, name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

Status CheckNames(const Job& job, const DataSchema& data) {
  std::vector<std::string> names;
  for (const DataSchema::Slot& slot : data.slots) names.push_back(slot.name);
  std::string problems;
  for (const auto& [name, slot] : job.slots) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    const std::string nearest = NearestName(name, names);
    if (!problems.empty()) problems += '\n';
    problems +=
        fmt::format("slots.{}: the data has no slot '{}'; ", name, name) +
        (IsIntegerColumn(name) ? "integer columns are slots where data.integers is bucket or both"
         : nearest.empty()     ? fmt::format("it has: {}", fmt::join(names, ", "))
                               : fmt::format("did you mean '{}'?", nearest));
  }
  if (problems.empty()) return OkStatus();
  return InvalidArgumentError(problems);
}

struct PlannedTable {
  std::string name;
  const TableJob* job = nullptr;
  std::uint32_t dim = 0;
};

Result<TablePlan> PlanTable(const Job& job, const PlannedTable& planned,
                            std::vector<std::uint32_t> slots) {
  SegmentSpec embedding;
  embedding.name = "embedding";
  embedding.dim = planned.dim;
  embedding.initializer = planned.job->initializer;
  embedding.optimizer = planned.job->optimizer;
  embedding.l2 = planned.job->l2;
  std::vector<SegmentSpec> segments = {embedding};
  std::vector<LearningRate> rates = {planned.job->learning_rate};
  if (job.network.wide) {
    SegmentSpec wide;
    wide.name = "wide";
    wide.dim = 1;
    wide.initializer.type = InitializerSpec::Type::kZeros;
    wide.optimizer = job.wide_optimizer_given ? job.wide_optimizer : planned.job->optimizer;
    wide.l2 = job.wide_l2;
    segments.push_back(wide);
    rates.push_back(job.wide_optimizer_given ? job.wide_learning_rate : planned.job->learning_rate);
  }
  Result<RowSchema> schema =
      RowSchema::Create(planned.name, segments, planned.job->admission, planned.job->expiry);
  if (!schema.ok()) return schema.status().WithContext("table " + planned.name);
  const bool is_default = planned.job == &job.table;
  std::string settings = is_default ? "table" : "tables." + planned.job->name;
  const GroupShape& group = planned.job->group;
  const IndexChoice index = planned.job->index;
  // With auto, rows that are too long have the other index.
  if (index == IndexChoice::kGroup || (index == IndexChoice::kAuto && group.block_bytes > 0 &&
                                       Store::HasGroupIndex(schema->row_bytes()))) {
    const Status status = Store::CheckGroups(schema->row_bytes(), group);
    if (!status.ok()) return status.WithContext(settings);
  }
  return TablePlan{std::move(settings),
                   std::move(schema).value(),
                   rates,
                   std::move(slots),
                   index,
                   planned.job->expected_keys,
                   group};
}

}  // namespace

Result<ModelPlan> MakeModelPlan(const Job& job, const DataSchema& data) {
  TERRACE_RETURN_IF_ERROR(CheckNames(job, data));
  std::vector<PlannedTable> planned;
  std::vector<std::vector<std::uint32_t>> slots_of;
  std::set<std::string> used;
  ModelPlan plan;
  std::uint32_t column = 0;
  for (std::uint32_t s = 0; s < data.slots.size(); ++s) {
    SlotJob slot;
    if (const auto found = job.slots.find(data.slots[s].name); found != job.slots.end()) {
      slot = found->second;
    }
    const TableJob& table = TableNamed(job, slot.table);
    used.insert(table.name);
    PlannedTable wanted{table.name, &table, slot.dim == 0 ? table.dim : slot.dim};
    if (wanted.dim != table.dim) wanted.name += fmt::format(".dim{}", wanted.dim);
    auto place = std::find_if(planned.begin(), planned.end(), [&wanted](const PlannedTable& other) {
      return other.name == wanted.name;
    });
    if (place == planned.end()) {
      place = planned.insert(planned.end(), wanted);
      slots_of.emplace_back();
    }
    const auto index = static_cast<std::uint32_t>(place - planned.begin());
    slots_of[index].push_back(s);
    plan.slots.push_back({index, column, wanted.dim, slot.pooling});
    column += wanted.dim;
  }
  for (const auto& [name, table] : job.tables) {
    if (!used.contains(name)) {
      return InvalidArgumentError(fmt::format(
          "tables.{}: no slot uses this table; give it one under slots, or take it out", name));
    }
  }
  for (std::size_t t = 0; t < planned.size(); ++t) {
    TERRACE_ASSIGN_OR_RETURN(TablePlan table, PlanTable(job, planned[t], slots_of[t]));
    plan.tables.push_back(std::move(table));
  }
  plan.inputs.embedding_width = column;
  plan.inputs.dense_width = data.dense_width();
  plan.inputs.wide = job.network.wide;
  plan.network = job.network;
  if (plan.inputs.width() == 0) {
    return InvalidArgumentError("data: the examples have neither keys nor dense features");
  }
  return plan;
}

std::vector<std::pair<std::string, std::string>> IdentifyingSettings(const Job& job,
                                                                     const ModelPlan& plan,
                                                                     const ExampleSource& source) {
  std::vector<std::pair<std::string, std::string>> settings;
  for (const JobKey& key : JobKeys()) {
    if (!key.identifies || (key.applies && !key.applies(job, ""))) continue;
    std::optional<std::string> value = key.print(job, "");
    // Both mean the processor.
    if (key.path == "device" && value == "auto") value = "cpu";
    if (value) settings.emplace_back(key.path, *value);
  }
  settings.emplace_back(kDataSetting, source.IdentityText());
  settings.emplace_back(kDataSchemaSetting, source.schema().ToText());
  for (std::size_t s = 0; s < plan.slots.size(); ++s) {
    const SlotPlan& slot = plan.slots[s];
    settings.emplace_back(
        "slots." + source.schema().slots[s].name,
        fmt::format("table {} dim {} pooling {}", plan.tables[slot.table].schema.table(), slot.dim,
                    slot.pooling == SlotJob::Pooling::kSum ? "sum" : "mean"));
  }
  for (const TablePlan& table : plan.tables) {
    const std::string path = "tables." + table.schema.table();
    settings.emplace_back(path, table.schema.ToText());
    for (std::size_t i = 0; i < table.learning_rates.size(); ++i) {
      settings.emplace_back(
          fmt::format("{}.{}.learning_rate", path, table.schema.segments()[i].name),
          LearningRateText(table.learning_rates[i]));
    }
  }
  settings.emplace_back("processor", ProcessorType());
  return settings;
}

}  // namespace terrace
