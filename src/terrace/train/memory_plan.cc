#include "terrace/train/memory_plan.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/memory.h"
#include "terrace/base/units.h"
#include "terrace/cache/future_keys.h"
#include "terrace/cache/parted_row_cache.h"
#include "terrace/data/batch.h"
#include "terrace/pipeline/key_plan.h"
#include "terrace/pipeline/work_item.h"
#include "terrace/store/store.h"
#include "terrace/train/index_plan.h"
#include "terrace/train/parts_plan.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kMetadataBytes = 96;  // Of a cached row, at most: entry, map, queues.

std::uint64_t Minibatches(const MemoryPlanInput& input, std::uint64_t examples) {
  return (examples + input.minibatch - 1) / input.minibatch;
}

// Of the examples of a batch: keys with their CSR, dense features, label, origin; of a mini-batch
// and of the end of an epoch a cursor.
std::uint64_t BatchBytes(const MemoryPlanInput& input, std::uint64_t examples) {
  return examples * (std::uint64_t{input.slots} * 12 + std::uint64_t{input.dense_width} * 4 + 24) +
         (Minibatches(input, examples) + 1) * sizeof(DataCursor);
}

// Of the lists of a working set and of the planner's maps, an occurrence of a key: what a click log
// takes, and what it takes when no key comes twice. A set that takes more is cut.
constexpr std::uint64_t kSetBytes = 44, kMostSetBytes = kMostOccurrenceBytes;
constexpr std::uint64_t kMapBytes = 24, kMostMapBytes = 104;

std::uint64_t SetBytes(const MemoryPlanInput& input, std::uint32_t batch) {
  const std::uint64_t usual = std::uint64_t{input.slots} * batch * kSetBytes;
  const std::uint64_t least = std::uint64_t{input.slots} * input.minibatch * kMostSetBytes;
  return std::max(usual, least) + Minibatches(input, batch) * input.tables * kMinibatchBytes;
}

std::uint64_t MapBytes(const MemoryPlanInput& input, std::uint32_t batch) {
  const std::uint64_t usual = std::uint64_t{input.slots} * batch * kMapBytes;
  const std::uint64_t least = std::uint64_t{input.slots} * input.minibatch * kMostMapBytes;
  return std::max(usual, least);
}

// What stores take to plan the reads of one set, of which two are loaded at a time, an occurrence
// of a key: 16 bytes a row that is read, which a third of the occurrences are.
constexpr std::uint64_t kReadPlanBytes = 6, kMostReadPlanBytes = 16;

std::uint64_t ReadPlanBytes(const MemoryPlanInput& input, std::uint32_t batch) {
  const std::uint64_t usual = std::uint64_t{input.slots} * batch * kReadPlanBytes;
  const std::uint64_t least = std::uint64_t{input.slots} * input.minibatch * kMostReadPlanBytes;
  return std::max(usual, least);
}

// Of an occurrence of a key in a set whose caches have parts: each part's own lists of the set's
// rows, which three fifths of the occurrences are in a set that takes all that it may.
constexpr std::uint64_t kPartsBytes = 8, kMostPartsBytes = 12;

std::uint64_t PartsBytes(const MemoryPlanInput& input, std::uint32_t batch) {
  if (input.cache_parts == 1) return 0;
  const std::uint64_t usual = std::uint64_t{input.slots} * batch * kPartsBytes;
  const std::uint64_t least = std::uint64_t{input.slots} * input.minibatch * kMostPartsBytes;
  return std::max(usual, least);
}

// Of an occurrence in one mini-batch, of which each thread of the planner has a map of its own:
// where slots have several keys, fewer threads plan.
constexpr std::uint64_t kPlanThreadBytes = 52;

std::uint64_t PlanThreadBytes(const MemoryPlanInput& input) {
  const std::uint64_t usual = std::uint64_t{input.slots} * input.minibatch * kPlanThreadBytes;
  return (input.pull_threads - 1) *
         std::max(usual, input.tables * KeyPlanner::kLeastLaneBytesOfTable);
}

// Of an occurrence of a key, where admission counts: its number among those admitted, and the key.
constexpr std::uint64_t kAdmissionBytes = 12;

std::uint64_t BatchesBytes(const MemoryPlanInput& input, std::uint32_t batch) {
  // Each set keeps its batch; more are read ahead.
  const std::uint64_t batches = input.sets + input.batches_ahead;
  return batches * BatchBytes(input, batch) +
         input.sets * (SetBytes(input, batch) + PartsBytes(input, batch)) + MapBytes(input, batch) +
         PlanThreadBytes(input) + std::min(input.sets, 2U) * ReadPlanBytes(input, batch) +
         (input.filter_bytes > 0 ? std::uint64_t{input.slots} * batch * kAdmissionBytes : 0);
}

// Of a file: fewer would make too many files. And what files in the making take within the slack.
constexpr std::uint64_t kLeastFileRows = 4096, kFilesInSlack = 6 * kMiB;

// Examples of a validation's batch, at least; a mini-batch that is larger is one.
constexpr std::uint32_t kLeastValidation = 1024, kMostValidation = 4096;

void SetValidation(const MemoryPlanInput& input, std::uint32_t examples, MemoryPlan* plan) {
  const std::uint32_t batch =
      std::max(input.minibatch, examples / input.minibatch * input.minibatch);
  plan->validation_batch = batch;
  plan->validation_set_bytes = SetBytes(input, batch) + MapBytes(input, batch);
}

// Vectors of a batch that grow hold up to twice as much.
std::uint64_t ValidationBytes(const MemoryPlanInput& input, const MemoryPlan& plan) {
  return plan.validation_set_bytes + 2 * BatchBytes(input, plan.validation_batch);
}

// The rows of more examples are read with fewer requests each, which may take of `spare` bytes.
// Returns what they take.
std::uint64_t EnlargeValidation(const MemoryPlanInput& input, std::uint64_t spare,
                                MemoryPlan* plan) {
  const std::uint64_t before = ValidationBytes(input, *plan);
  for (std::uint32_t examples = kMostValidation; examples > kLeastValidation; examples /= 2) {
    MemoryPlan enlarged = *plan;
    SetValidation(input, examples, &enlarged);
    const std::uint64_t more = ValidationBytes(input, enlarged) - before;
    if (more > spare) continue;
    enlarged.transient_bytes += more;
    *plan = enlarged;
    return more;
  }
  return 0;
}

// What is spent before batches and rows get a byte.
MemoryPlan FixedPart(const MemoryPlanInput& input) {
  MemoryPlan plan;
  plan.budget_bytes = input.budget_bytes;
  plan.resident_bytes = input.resident_bytes;
  plan.slack_bytes = 12 * kMiB + input.budget_bytes / 50;
  // Threads of their own.
  if (input.cache_parts > 1)
    plan.slack_bytes += std::uint64_t{input.tables} * input.cache_parts * kMiB;
  plan.transient_bytes = 2 * input.dense_state_bytes + 12 * kMiB;
  if (input.validates) {
    SetValidation(input, kLeastValidation, &plan);
    plan.transient_bytes += input.validation_rows_bytes + ValidationBytes(input, plan);
  }
  plan.filter_bytes = input.filter_bytes;
  const std::uint64_t before =
      plan.resident_bytes + plan.slack_bytes + plan.transient_bytes + plan.filter_bytes;
  const std::uint64_t rest = input.budget_bytes > before ? input.budget_bytes - before : 0;
  // All of it is counted, though a buffer may be shorter by a page: the more budget, the more rows.
  const std::uint64_t least_io = HugeBuffer::SizeFor(input.least_io_buffer_bytes);
  const std::uint64_t io = std::max(
      std::clamp<std::uint64_t>(rest / 8 / (3 * std::uint64_t{input.stores}), kMiB / 4, 8 * kMiB),
      least_io);
  plan.io_buffer_bytes = std::max(HugeBuffer::SizeWithin(io), least_io);
  std::uint64_t source_bytes = input.source_bytes + input.validation_source_bytes;
  if (input.most_read_ahead_bytes > 0) {
    source_bytes +=
        (input.validates ? 2 : 1) *
        (ReadAheadBytes(input.most_read_ahead_bytes, input.budget_bytes) - input.read_ahead_bytes);
  }
  const std::uint64_t least_files = input.stores * kLeastFileRows * Store::kFileRowBytes;
  std::uint64_t files = input.file_rows * Store::kFileRowBytes;
  if (const std::uint64_t most = std::max({rest / 32, least_files, kFilesInSlack}); files > most) {
    plan.most_file_rows = most / input.stores / Store::kFileRowBytes;
    files = most;
  }
  plan.io_bytes = 3 * std::uint64_t{input.stores} * io + files - std::min(files, kFilesInSlack) +
                  source_bytes + input.further_buffer_bytes;
  return plan;
}

std::uint64_t LeastRowBytes(const MemoryPlanInput& input) {
  return input.least_cache_bytes + input.index_bytes + input.index_room_bytes;
}

// Batches of one mini-batch, the rows of one, and what the given budget spends besides.
std::uint64_t LeastBytes(const MemoryPlanInput& input) {
  const MemoryPlan plan = FixedPart(input);
  return plan.resident_bytes + plan.slack_bytes + plan.transient_bytes + plan.filter_bytes +
         plan.io_bytes + BatchesBytes(input, input.minibatch) + LeastRowBytes(input);
}

void PlanLookAhead(const MemoryPlanInput& input, MemoryPlan* plan) {
  constexpr std::uint64_t kMostFutureBytes = 1024 * kMiB;
  const std::uint64_t rows = plan->rows_bytes / input.row_bytes;
  const std::uint64_t source =
      input.source_bytes +
      BatchBytes(input, std::max<std::uint64_t>(input.minibatch, FutureKeys::kTickExamples));
  const std::uint64_t both = plan->rows_bytes / 8;  // More would cost more than it gains.
  if (source >= both) return;
  const std::uint64_t most =
      std::min({rows * FutureKeys::kBytesPerCachedRow, both - source, kMostFutureBytes});
  // A sixteenth of what it should have tells of too few keys to be worth a second reading.
  if (most < rows * FutureKeys::kBytesPerCachedRow / 16) return;
  // In whole pages; of large ones no more than fit.
  const std::uint64_t future =
      most < kHugePageBytes ? HugeBuffer::SizeFor(most) : most / kHugePageBytes * kHugePageBytes;
  if (plan->rows_bytes - future - source < LeastRowBytes(input)) return;
  plan->future_bytes = future;
  plan->look_ahead_bytes = future + source;
  plan->rows_bytes -= plan->look_ahead_bytes;
}

// ", or lower A or B": the settings to which a good part of what is needed at least is due, the
// greatest part first.
std::string SettingsToLower(const MemoryPlanInput& input) {
  if (input.of_a_run) return "";
  const std::uint64_t needed = LeastBudgetBytes(input);
  std::vector<std::pair<std::uint64_t, std::string_view>> found;
  const auto try_without = [&](std::string_view setting, const auto& change) {
    MemoryPlanInput without = input;
    change(&without);
    const std::uint64_t least = LeastBudgetBytes(without);
    if (least + needed / 8 <= needed) found.emplace_back(least, setting);
  };
  try_without("training.minibatch", [](MemoryPlanInput* in) {
    const std::uint64_t tables = in->tables * 8 * kMiB;  // See LeastTableBytes.
    const std::uint64_t rows = in->least_cache_bytes - std::min(in->least_cache_bytes, tables);
    in->least_cache_bytes -= rows - rows / std::max(1U, in->minibatch);
    in->minibatch = 1;
  });
  try_without("ssd.shards", [](MemoryPlanInput* in) {
    in->further_buffer_bytes = in->further_buffer_bytes / in->stores * in->tables;
    in->stores = in->tables;
  });
  try_without("table.admit_filter", [](MemoryPlanInput* in) { in->filter_bytes = 0; });
  try_without("network.hidden", [](MemoryPlanInput* in) {
    // Parameters and what is kept beside them; a copy for a checkpoint comes to it.
    in->resident_bytes -= std::min(in->resident_bytes, in->dense_state_bytes);
    in->dense_state_bytes = 0;
  });
  std::sort(found.begin(), found.end());
  std::string text;
  for (const auto& [least, setting] : found) {
    text += fmt::format("{}{}", text.empty() ? ", or lower " : " or ", setting);
  }
  return text;
}

// Nothing without filters.
std::string FiltersText(const MemoryPlan& plan, std::string_view before) {
  return plan.filter_bytes == 0 ? "" : std::string(before) + FormatBytes(plan.filter_bytes);
}

}  // namespace

std::string WholeMiB(std::uint64_t bytes) {
  return fmt::format("{} MiB", bytes / kMiB + (bytes % kMiB > 0 ? 1 : 0));
}

std::uint64_t ReadAheadBytes(std::uint64_t most_bytes, std::uint64_t budget_bytes) {
  constexpr std::uint64_t kEnough = std::uint64_t{1} << 30;
  return std::min({most_bytes, std::max(kMiB, budget_bytes / 128), kEnough});
}

std::uint64_t LeastBudgetBytes(const MemoryPlanInput& input) {
  MemoryPlanInput tried = input;
  tried.budget_bytes = 0;
  // A larger budget has larger shares, which are below a quarter of it: the sequence ends.
  for (std::uint64_t least = LeastBytes(tried); least > tried.budget_bytes;
       least = LeastBytes(tried)) {
    tried.budget_bytes = (least + kMiB - 1) / kMiB * kMiB;
  }
  // What the process holds already differs a little from start to start.
  return tried.budget_bytes + 2 * kMiB;
}

std::uint64_t BudgetForRows(const MemoryPlanInput& input, std::uint64_t rows_bytes) {
  const std::uint64_t needed = rows_bytes + 2 * kMiB;  // As for the least.
  MemoryPlanInput tried = input;
  tried.budget_bytes = LeastBudgetBytes(input);
  // A larger budget may leave less for rows, where batches become larger; of what is added in the
  // long run rows get most.
  while (true) {
    const Result<MemoryPlan> plan = PlanMemory(tried);
    if (plan.ok() && plan->rows_bytes >= needed) return tried.budget_bytes;
    const std::uint64_t missing = plan.ok() ? needed - plan->rows_bytes : kMiB;
    tried.budget_bytes += (missing + kMiB - 1) / kMiB * kMiB;
  }
}

MemoryPlanInput MakeMemoryPlanInput(const Job& job, const ModelPlan& plan,
                                    std::uint64_t source_bytes, std::uint64_t later_bytes) {
  MemoryPlanInput input;
  input.budget_bytes = job.memory.budget_bytes;
  input.resident_bytes = ReadProcessMemory().resident_bytes + later_bytes;
  input.stores =
      static_cast<std::uint32_t>(plan.tables.size()) * static_cast<std::uint32_t>(job.ssd.shards);
  input.tables = static_cast<std::uint32_t>(plan.tables.size());
  input.pull_threads = static_cast<std::uint32_t>(job.pipeline.pulling);
  input.cache_parts = CacheParts(job);
  input.slots = static_cast<std::uint32_t>(plan.slots.size());
  input.dense_width = plan.inputs.dense_width;
  input.batch = job.training.batch;
  input.minibatch = job.training.minibatch;
  input.least_cache_bytes = LeastCacheBytes(job, plan);
  std::uint64_t slots = 0, row_bytes = 0;
  for (const TablePlan& table : plan.tables) {
    slots += table.slots.size();
    row_bytes += table.slots.size() * (table.schema.row_bytes() + kMetadataBytes);
  }
  input.row_bytes = row_bytes / std::max<std::uint64_t>(1, slots);
  input.index_bytes = FirstIndexBytes(job, plan);
  for (const TablePlan& table : plan.tables) {
    const IndexKind kind = IndexOf(job, plan, table);
    const std::uint32_t bytes = table.schema.row_bytes();
    input.least_io_buffer_bytes =
        std::max(input.least_io_buffer_bytes, Store::LeastBufferBytes(kind, bytes, table.group));
    input.further_buffer_bytes += static_cast<std::uint64_t>(job.ssd.shards) *
                                  Store::FurtherBufferBytes(kind, bytes, table.group);
  }
  input.source_bytes = source_bytes;
  return input;
}

std::vector<std::uint64_t> LeastTableBytes(const Job& job, const ModelPlan& plan) {
  std::vector<std::uint64_t> least;
  const std::uint32_t parts = CacheParts(job);
  for (const TablePlan& table : plan.tables) {
    const std::uint64_t rows = PartedRowCache::RowsToHave(
        parts, std::uint64_t{job.training.minibatch} * table.slots.size());
    // Arenas come in huge pages, and the write buffer takes a share.
    least.push_back(2 * rows * (table.schema.row_bytes() + kMetadataBytes) + 8 * kMiB +
                    (parts > 1 ? parts * kMiB : 0));
  }
  return least;
}

std::uint64_t LeastCacheBytes(const Job& job, const ModelPlan& plan) {
  const std::vector<std::uint64_t> least = LeastTableBytes(job, plan);
  return std::accumulate(least.begin(), least.end(), std::uint64_t{0});
}

std::vector<std::uint64_t> SplitCacheBytes(const ModelPlan& plan,
                                           std::span<const std::uint64_t> least,
                                           std::uint64_t bytes) {
  const std::uint64_t least_of_all = std::accumulate(least.begin(), least.end(), std::uint64_t{0});
  TERRACE_CHECK(bytes >= least_of_all);
  // Rows of a table are wanted in proportion to its slots.
  std::vector<double> shares;
  for (const TablePlan& table : plan.tables) {
    shares.push_back(static_cast<double>(table.slots.size()) *
                     (table.schema.row_bytes() + kMetadataBytes));
  }
  const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<std::uint64_t> split;
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    split.push_back(least[t] + static_cast<std::uint64_t>(
                                   static_cast<double>(bytes - least_of_all) * shares[t] / total));
  }
  return split;
}

Result<MemoryPlan> PlanMemory(const MemoryPlanInput& input) {
  MemoryPlan plan = FixedPart(input);
  const std::uint64_t fixed = plan.resident_bytes + plan.slack_bytes + plan.transient_bytes +
                              plan.filter_bytes + plan.io_bytes;
  const std::uint64_t least_rows = LeastRowBytes(input);
  if (LeastBytes(input) > input.budget_bytes) {
    MemoryPlanInput enough = input;
    enough.budget_bytes = LeastBudgetBytes(input);
    const MemoryPlan least = FixedPart(enough);
    return InvalidArgumentError(fmt::format(
        "memory.budget of {} is too small: this job needs at least {} (process and network {}, "
        "rows of one mini-batch and index {}{}, buffers {}{}). Raise memory.budget{}.",
        FormatBytes(input.budget_bytes), WholeMiB(enough.budget_bytes),
        FormatBytes(least.resident_bytes), FormatBytes(least_rows),
        input.index_room_bytes > 0
            ? fmt::format(", which is to have room for {} rows", FormatCount(kIndexRoomRows))
            : "",
        FormatBytes(least.io_bytes + least.slack_bytes + least.transient_bytes +
                    BatchesBytes(input, input.minibatch)),
        FiltersText(least, ", admission filters "), SettingsToLower(input)));
  }
  std::uint64_t rest = input.budget_bytes - fixed;
  if (input.validates) {
    const std::uint64_t least = least_rows + BatchesBytes(input, input.minibatch);
    rest -= EnlargeValidation(input, std::min(rest / 32, rest - least), &plan);
  }
  // A share of what is left goes to batches, more only when one mini-batch asks for it. The larger
  // a batch, the fewer bytes of the disk are read for each of its rows; but the more rows stay in
  // memory, the fewer are read at all. Measured: docs/performance.md.
  const std::uint64_t share = std::min(rest / 8, rest - least_rows);
  std::uint32_t batch = input.batch / input.minibatch * input.minibatch;
  if (BatchesBytes(input, batch) > share) {
    std::uint32_t fits = 1, beyond = batch / input.minibatch;  // Mini-batches.
    while (beyond - fits > 1) {
      const std::uint32_t middle = fits + (beyond - fits) / 2;
      (BatchesBytes(input, middle * input.minibatch) <= share ? fits : beyond) = middle;
    }
    batch = fits * input.minibatch;
  }
  plan.batch = batch;
  plan.sets = input.sets;
  plan.set_bytes = SetBytes(input, batch) + MapBytes(input, batch);
  plan.plan_thread_bytes = PlanThreadBytes(input);
  plan.batches_bytes = BatchesBytes(input, batch);
  plan.rows_bytes = rest - plan.batches_bytes;
  if (input.looks_ahead) PlanLookAhead(input, &plan);
  return plan;
}

std::string DescribeMemoryPlan(const MemoryPlan& plan) {
  return fmt::format(
      "memory: {} budget = {} rows and index + {} batches in flight ({} examples each) + {} I/O "
      "buffers + {} process and network{}{} + {} for checkpoints and slack",
      FormatBytes(plan.budget_bytes), FormatBytes(plan.rows_bytes), FormatBytes(plan.batches_bytes),
      FormatCount(plan.batch), FormatBytes(plan.io_bytes), FormatBytes(plan.resident_bytes),
      FiltersText(plan, " + admission filters of "),
      plan.look_ahead_bytes == 0
          ? ""
          : fmt::format(" + {} to look ahead", FormatBytes(plan.look_ahead_bytes)),
      FormatBytes(plan.transient_bytes + plan.slack_bytes));
}

}  // namespace terrace
