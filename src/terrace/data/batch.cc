#include "terrace/data/batch.h"

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
