#include "terrace/pipeline/admission.h"

#include <algorithm>
#include <span>

#include "terrace/base/check.h"

namespace terrace {
namespace {

constexpr std::size_t kAhead = 16;  // Keys; what memory delivers while one is handled.

// How many of a row's occurrences are in an example that no earlier one of them is in.
std::uint32_t Shows(std::span<const std::uint32_t> examples) {
  std::uint32_t shows = 0;
  for (std::size_t o = 0; o < examples.size(); ++o) {
    shows += o == 0 || examples[o] != examples[o - 1] ? 1 : 0;
  }
  return shows;
}

void CountAll(std::span<const Key> keys, std::span<const std::uint32_t> shows,
              AdmissionFilter* filter) {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) filter->Prefetch(keys[i + kAhead]);
    filter->Count(keys[i], shows[i]);
  }
}

}  // namespace

std::uint64_t Admission::MemoryBytes() const {
  return numbers_.capacity() * sizeof(std::uint32_t) + admitted_.capacity() * sizeof(Key);
}

void Admission::Admit(WorkItem* item) {
  for (std::size_t t = 0; t < filters_.size(); ++t) {
    if (filters_[t] != nullptr) AdmitTable(item->minibatches, filters_[t], &item->tables[t]);
  }
}

void Admission::AdmitTable(std::uint32_t minibatches, AdmissionFilter* filter, TableWork* table) {
  numbers_.assign(table->keys.size(), kNoWorkingRow);
  admitted_.clear();
  for (std::uint32_t m = 0; m < minibatches; ++m) {
    const std::size_t begin = table->row_begin[m], end = table->row_begin[m + 1];
    const std::uint32_t* const inverse = table->inverse_begin.data() + begin + m;
    const std::uint32_t* const examples = table->example.data() + table->occurrence_begin[m];
    const std::size_t first = table->unadmitted.size();
    for (std::size_t r = begin; r < end; ++r) {
      if (r + kAhead < end) filter->Prefetch(table->keys[table->rows[r + kAhead]]);
      std::uint32_t& number = numbers_[table->rows[r]];
      const Key key = table->keys[table->rows[r]];
      // What an earlier mini-batch of the set has admitted stays so: counts only grow.
      if (number == kNoWorkingRow && filter->Admits(key)) {
        number = static_cast<std::uint32_t>(admitted_.size());
        admitted_.push_back(key);
      }
      table->rows[r] = number;
      if (number != kNoWorkingRow) continue;
      const std::uint32_t* const at = inverse + (r - begin);
      table->unadmitted.push_back(key);
      table->unadmitted_shows.push_back(Shows({examples + at[0], examples + at[1]}));
    }
    // In effect from the next mini-batch on.
    const std::size_t count = table->unadmitted.size() - first;
    CountAll({table->unadmitted.data() + first, count},
             {table->unadmitted_shows.data() + first, count}, filter);
    table->unadmitted_end.push_back(static_cast<std::uint32_t>(table->unadmitted.size()));
    table->key_end[m] = static_cast<std::uint32_t>(admitted_.size());
  }
  table->keys.assign(admitted_.begin(), admitted_.end());
}

std::uint64_t CountTrained(const TableWork& table, std::uint32_t m, AdmissionFilter* filter) {
  TERRACE_CHECK(m < table.unadmitted_end.size());
  const std::size_t first = m == 0 ? 0 : table.unadmitted_end[m - 1];
  const std::size_t count = table.unadmitted_end[m] - first;
  const std::span<const std::uint32_t> shows(table.unadmitted_shows.data() + first, count);
  CountAll({table.unadmitted.data() + first, count}, shows, filter);
  std::uint64_t sum = 0;
  for (const std::uint32_t some : shows) sum += some;
  return sum;
}

}  // namespace terrace
