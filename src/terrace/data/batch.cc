#include "terrace/data/batch.h"

#include "terrace/base/check.h"

namespace terrace {

std::uint32_t DataSchema::dense_width() const {
  std::uint32_t width = 0;
  for (const DenseGroup& group : dense) width += group.width;
  return width;
}

std::string DataSchema::ToText() const {
  std::string text = "slots";
  for (const Slot& slot : slots) text += " " + slot.name + ":" + std::to_string(slot.id);
  text += "; dense";
  for (const DenseGroup& group : dense)
    text += " " + group.name + ":" + std::to_string(group.width);
  return text;
}

namespace {
template <typename T>
std::uint64_t Bytes(const std::vector<T>& values) {
  return values.capacity() * sizeof(T);
}
}  // namespace

std::uint64_t Batch::MemoryBytes() const {
  return Bytes(label) + Bytes(weight) + Bytes(dense) + Bytes(key_begin) + Bytes(keys) +
         Bytes(values) + Bytes(time) + Bytes(group) + Bytes(origin_file) + Bytes(origin_line) +
         Bytes(bad_lines_before) + Bytes(cursors);
}

void Batch::Truncate(std::uint32_t count, std::size_t keep_cursors) {
  TERRACE_CHECK(count <= examples && keep_cursors <= cursors.size());
  const auto cut = [this, count](auto* list) {
    if (!list->empty()) list->resize(list->size() / examples * count);
  };
  cut(&label);
  cut(&weight);
  cut(&dense);
  cut(&time);
  cut(&group);
  cut(&origin_file);
  cut(&origin_line);
  key_begin.resize(std::size_t{count} * slots + 1);
  keys.resize(key_begin.back());
  if (!values.empty()) values.resize(keys.size());
  if (!bad_lines_before.empty()) {
    bad_lines_before.resize(count);
    bad_lines_before.push_back(0);
  }
  cursors.resize(keep_cursors);
  examples = count;
  ends_epoch = false;
}

void Batch::Clear() {
  first_example = 0;
  examples = slots = 0;
  ends_epoch = false;
  label.clear();
  weight.clear();
  dense.clear();
  key_begin.clear();
  keys.clear();
  values.clear();
  time.clear();
  group.clear();
  origin_file.clear();
  origin_line.clear();
  bad_lines_before.clear();
  cursors.clear();
}

}  // namespace terrace
