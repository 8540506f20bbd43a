#include "terrace/pipeline/row_products.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/prefetch.h"

namespace terrace {
namespace {

// Of the floats that the examples' embeddings have, those that the distinct rows may have at most
// (docs/decisions/row-products.md).
constexpr double kMostDistinct = 0.75;
constexpr std::uint32_t kSeveral = ~std::uint32_t{0};
// Rows: what memory delivers while one is copied.
constexpr std::size_t kLinesAhead = 24;

// The occurrences of local row r of mini-batch m.
std::pair<std::size_t, std::size_t> OccurrencesOf(const TableWork& work, std::uint32_t m,
                                                  std::size_t r) {
  const std::uint32_t* begin = work.inverse_begin.data() + work.row_begin[m] + m;
  const std::size_t base = work.occurrence_begin[m];
  return {base + begin[r], base + begin[r + 1]};
}

}  // namespace

std::uint32_t LargestBits(const float* values, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  }
  return largest;
}

RowProducts::RowProducts(const std::vector<StepTable>* tables, FirstLayer layer,
                         const NetworkInputSpec& inputs, std::uint32_t minibatch)
    : tables_(tables), layer_(layer), inputs_(inputs), minibatch_(minibatch) {}

std::unique_ptr<RowProducts> RowProducts::Create(const std::vector<StepTable>* tables,
                                                 Network* network, std::uint32_t minibatch,
                                                 int threads) {
  const FirstLayer layer = network->first_layer();
  const NetworkInputSpec& inputs = network->input_spec();
  std::unique_ptr<RowProducts> made(new RowProducts(tables, layer, inputs, minibatch));
  // Sums are found by offsets of 32 bits.
  const bool wide = std::uint64_t{minibatch} * inputs.width() >= std::uint64_t{1} << 31;
  if (layer.width < kProductColumns || made->panels() < threads || inputs.embedding_width == 0 ||
      wide) {
    return nullptr;
  }
  made->PlanMemory();
  return made;
}

void RowProducts::PlanMemory() {
  if (inputs_.dense_width > 0) {
    Group group;
    group.dense = true;
    group.input_offset = inputs_.embedding_width;
    groups_.push_back(group);
    line_groups_.push_back({inputs_.embedding_width, inputs_.dense_width});
  }
  group_of_column_.resize(inputs_.embedding_width);
  for (std::size_t t = 0; t < tables_->size(); ++t) {
    const StepTable& table = (*tables_)[t];
    const Segment* segment = table.schema->FindSegment(kEmbeddingSegment);
    if (segment == nullptr) continue;
    for (const PooledSlot& slot : table.slots) {
      Group group;
      group.table = t;
      group.input_offset = slot.input_offset;
      group.weight_offset = segment->weight_offset;
      std::fill_n(group_of_column_.begin() + slot.input_offset, segment->dim,
                  static_cast<std::uint32_t>(groups_.size()));
      most_occurrences_ += minibatch_;
      groups_.push_back(group);
      line_groups_.push_back({slot.input_offset, segment->dim});
    }
  }
  line_floats_ = static_cast<std::size_t>(kMostDistinct * minibatch_ * inputs_.embedding_width);
  sums_of_.first_row.resize(tables_->size());
  planned_sums_.first_row.resize(tables_->size());

  product_stride_ = ProductStride(layer_.width);
  product_floats_ = AlignUp(minibatch_ * product_stride_, 16);
  list_floats_ = AlignUp(most_occurrences_ + groups_.size() + 1, 16);
}

Status RowProducts::Allocate() {
  TERRACE_ASSIGN_OR_RETURN(memory_, HugeBuffer::Allocate(bytes()));
  memory_.Touch();
  products_ = reinterpret_cast<float*>(memory_.data());
  auto* lists = reinterpret_cast<std::uint32_t*>(products_ + product_floats_);
  for (std::uint32_t** each :
       {&line_row_, &begin_, &line_, &example_, &row_group_, &sums_of_.at, &planned_sums_.at}) {
    *each = lists;
    lists += list_floats_;
  }
  value_ = reinterpret_cast<float*>(lists);
  return OkStatus();
}

int RowProducts::panels() const {
  return static_cast<int>((layer_.width + kProductColumns - 1) / kProductColumns);
}

RowProducts::Ahead RowProducts::AheadOf(const WorkItem& item, std::uint32_t m) {
  return {&item, item.batch.get(), item.batch->first_example + item.first_example, m};
}

bool RowProducts::Plan(const WorkItem& item, std::uint32_t m) {
  if (ahead_ != AheadOf(item, m)) PlanAhead(item, m);
  ahead_ = Ahead();
  std::swap(sums_of_, planned_sums_);
  return by_rows_;
}

void RowProducts::PlanAhead(const WorkItem& item, std::uint32_t m) {
  ahead_ = AheadOf(item, m);
  by_rows_ = false;
  examples_ = item.MinibatchEnd(m) - item.MinibatchBegin(m);
  std::size_t occurrences = 0, rows = 0;
  for (std::size_t t = 0; t < tables_->size(); ++t) {
    const TableWork& work = item.tables[t];
    occurrences += work.occurrence_begin[m + 1] - work.occurrence_begin[m];
    planned_sums_.first_row[t] = rows;
    rows += work.row_begin[m + 1] - work.row_begin[m];
  }
  if (occurrences > most_occurrences_) return;
  CountLines(item, m);
  std::size_t floats = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!groups_[g].dense) floats += line_groups_[g].lines * line_groups_[g].width;
  }
  if (static_cast<double>(floats) > kMostDistinct * examples_ * inputs_.embedding_width) return;
  by_rows_ = true;
  PlaceGroups(item, m);
  AssignLines(item, m);
}

void RowProducts::CountLines(const WorkItem& item, std::uint32_t m) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    line_groups_[g].lines = groups_[g].dense ? examples_ : 0;
    groups_[g].occurrences = 0;
  }
  std::vector<std::uint32_t> several;
  for (std::size_t t = 0; t < tables_->size(); ++t) {
    if ((*tables_)[t].schema->FindSegment(kEmbeddingSegment) == nullptr) continue;
    const TableWork& work = item.tables[t];
    const std::size_t rows = work.row_begin[m + 1] - work.row_begin[m];
    std::uint32_t* const row_group = row_group_ + planned_sums_.first_row[t];
    for (std::size_t r = 0; r < rows; ++r) {
      const auto [begin, end] = OccurrencesOf(work, m, r);
      const std::uint32_t offset = work.input_offset[begin];
      bool same = true;
      for (std::size_t o = begin + 1; o < end; ++o) same &= work.input_offset[o] == offset;
      if (same) {
        const std::uint32_t g = group_of_column_[offset];
        row_group[r] = g;
        ++line_groups_[g].lines;
        groups_[g].occurrences += end - begin;
        continue;
      }
      row_group[r] = kSeveral;
      GroupsOfRow(work, begin, end, &several);
      for (const std::uint32_t g : several) ++line_groups_[g].lines;
      for (std::size_t o = begin; o < end; ++o) {
        ++groups_[group_of_column_[work.input_offset[o]]].occurrences;
      }
    }
  }
}

void RowProducts::GroupsOfRow(const TableWork& work, std::size_t begin, std::size_t end,
                              std::vector<std::uint32_t>* groups) const {
  groups->clear();
  for (std::size_t o = begin; o < end; ++o) {
    groups->push_back(group_of_column_[work.input_offset[o]]);
  }
  std::sort(groups->begin(), groups->end());
  groups->erase(std::unique(groups->begin(), groups->end()), groups->end());
}

void RowProducts::PlaceGroups(const WorkItem& item, std::uint32_t m) {
  std::size_t line = 0, occurrence = 0;
  float* row_lines = lines_;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    LineGroup& lines = line_groups_[g];
    if (group.dense) {
      lines.line_data =
          item.batch->dense.data() + std::size_t{item.MinibatchBegin(m)} * inputs_.dense_width;
    } else {
      lines.line_data = lines.gradient = row_lines;
      row_lines += lines.lines * lines.width;
      group.first_line = line;
      group.first_occurrence = occurrence;
      lines.begin = begin_ + line + g;
      lines.line = line_ + occurrence;
      lines.example = example_ + occurrence;
      line += lines.lines;
      occurrence += group.occurrences;
    }
  }
  TERRACE_CHECK(row_lines <= lines_ + line_floats_);
}

void RowProducts::AssignLines(const WorkItem& item, std::uint32_t m) {
  shared_.clear();
  std::vector<std::uint32_t> next(groups_.size()), several;
  for (std::size_t t = 0; t < tables_->size(); ++t) {
    if ((*tables_)[t].schema->FindSegment(kEmbeddingSegment) == nullptr) continue;
    const TableWork& work = item.tables[t];
    const std::size_t rows = work.row_begin[m + 1] - work.row_begin[m];
    const std::uint32_t* const row_group = row_group_ + planned_sums_.first_row[t];
    std::uint32_t* const sum_at = planned_sums_.at + planned_sums_.first_row[t];
    const auto take_line = [&](std::uint32_t g, std::size_t r) {
      const LineGroup& lines = line_groups_[g];
      const std::uint32_t line = next[g]++;
      line_row_[groups_[g].first_line + line] = static_cast<std::uint32_t>(r);
      return static_cast<std::uint32_t>(lines.gradient - lines_ + line * lines.width);
    };
    for (std::size_t r = 0; r < rows; ++r) {
      if (row_group[r] != kSeveral) {
        sum_at[r] = take_line(row_group[r], r);
        continue;
      }
      const auto [begin, end] = OccurrencesOf(work, m, r);
      GroupsOfRow(work, begin, end, &several);
      for (const std::uint32_t g : several) {
        const std::uint32_t at = take_line(g, r);
        if (g == several[0]) {
          sum_at[r] = at;
        } else {
          shared_.push_back({at, sum_at[r], static_cast<std::uint32_t>(line_groups_[g].width)});
        }
      }
    }
  }
}

void RowProducts::Gather(const WorkItem& item, std::uint32_t m, int index) {
  const Group& group = groups_[static_cast<std::size_t>(index)];
  if (group.dense) return;
  const LineGroup& lines = line_groups_[static_cast<std::size_t>(index)];
  const TableWork& work = item.tables[group.table];
  const std::size_t count = lines.lines, width = lines.width;
  const std::uint32_t* const rows = line_row_ + group.first_line;
  std::byte* const* const places = work.places.data() + work.row_begin[m];
  float* to = lines.gradient;
  for (std::size_t l = 0; l < count; ++l, to += width) {
    if (l + kLinesAhead < count) {
      const std::byte* const ahead = places[rows[l + kLinesAhead]];
      if (ahead != nullptr) PrefetchRead(ahead + group.weight_offset, width * sizeof(float));
    }
    const std::byte* const place = places[rows[l]];
    if (place == nullptr) {
      std::fill_n(to, width, 0.0f);
      continue;
    }
    const float* const from = reinterpret_cast<const float*>(place + group.weight_offset);
    for (std::size_t i = 0; i < width; ++i) to[i] = from[i];
  }
  CopyOccurrences(work, m, index);
}

void RowProducts::CopyOccurrences(const TableWork& work, std::uint32_t m, int index) {
  const Group& group = groups_[static_cast<std::size_t>(index)];
  LineGroup* const lines = &line_groups_[static_cast<std::size_t>(index)];
  const std::uint32_t* const rows = line_row_ + group.first_line;
  const std::uint32_t* const row_group = row_group_ + sums_of_.first_row[group.table];
  std::uint32_t* const begins = begin_ + group.first_line + static_cast<std::size_t>(index);
  std::uint32_t* const line = line_ + group.first_occurrence;
  std::uint32_t* const example = example_ + group.first_occurrence;
  float* const value = value_ + group.first_occurrence;
  const bool values = !work.value.empty();
  std::uint32_t at = 0;
  begins[0] = 0;
  for (std::size_t l = 0; l < lines->lines; ++l) {
    const auto [begin, end] = OccurrencesOf(work, m, rows[l]);
    const bool several = row_group[rows[l]] == kSeveral;
    for (std::size_t o = begin; o < end; ++o) {
      if (several && work.input_offset[o] != group.input_offset) continue;
      line[at] = static_cast<std::uint32_t>(l);
      example[at] = work.example[o];
      if (values) value[at] = work.value[o];
      ++at;
    }
    begins[l + 1] = at;
  }
  lines->value = values ? value : nullptr;
}

std::size_t RowProducts::thread_bytes() const {
  std::size_t widest = 0;
  for (const LineGroup& group : line_groups_) widest = std::max(widest, group.width);
  return LineThreadBytes(inputs_.width(), layer_.width, widest);
}

void RowProducts::Multiply(int panel) {
  MultiplyLines(line_groups_, layer_.weight, inputs_.width(), layer_.width,
                static_cast<std::size_t>(panel) * kProductColumns, examples_, products_,
                product_stride_);
}

void RowProducts::Differentiate(int index) {
  Group* const group = &groups_[static_cast<std::size_t>(index)];
  const LineGroup& lines = line_groups_[static_cast<std::size_t>(index)];
  DifferentiateLines(lines, layer_.weight, layer_.width, products_, product_stride_,
                     layer_.gradient);
  if (group->dense) return;
  group->largest = LargestBits(lines.gradient, lines.lines * lines.width);
}

void RowProducts::AddShared() {
  for (const SharedSum& shared : shared_) {
    for (std::uint32_t i = 0; i < shared.width; ++i) {
      lines_[shared.to + i] += lines_[shared.from + i];
    }
  }
}

std::uint32_t RowProducts::largest_sum() const {
  std::uint32_t largest = 0;
  for (const Group& group : groups_) largest = std::max(largest, group.largest);
  return largest;
}

std::uint32_t RowProducts::ExampleOfLargestSum() const {
  const std::uint32_t largest = largest_sum();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].dense || groups_[g].largest != largest) continue;
    const LineGroup& lines = line_groups_[g];
    for (std::size_t l = 0; l < lines.lines; ++l) {
      if (LargestBits(lines.gradient + l * lines.width, lines.width) == largest) {
        return lines.example[lines.begin[l]];
      }
    }
  }
  TERRACE_CHECK(false);
}

}  // namespace terrace
