// Batch: the examples whose rows are brought up together, as they pass from the reader to the
// trainer. Threads: a value that one stage owns at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "terrace/base/ids.h"

namespace terrace {

// What the examples of a run look like: fixed for the run by the data section of the job file.
struct DataSchema {
  struct Slot {
    std::string name;      // "C1"
    std::uint16_t id = 0;  // Top 16 bits of its keys.
  };
  struct DenseGroup {
    std::string name;         // "integers"
    std::uint32_t width = 0;  // Floats.
  };
  std::vector<Slot> slots;        // In the order of a batch's CSR.
  std::vector<DenseGroup> dense;  // Their columns lie side by side in this order.
  std::uint32_t dense_width() const;
  std::string ToText() const;  // Canonical; part of what identifies a model.
};

// A position in the global order of examples. The first three say where training stands; the rest
// only speeds the way there.
struct DataCursor {
  std::uint64_t epoch = 0;  // From 0.
  std::uint64_t example_in_epoch =
      0;                       // Examples of this epoch before the position, bad lines not counted.
  std::uint64_t examples = 0;  // Examples since the start of the run.
  // Hint: `hint_example` examples of the epoch lie before byte `offset` of the (decompressed) file
  // number `file` in the epoch's order; `line` lines of it lie before. 0 everywhere: start of the
  // epoch.
  std::uint64_t hint_example = 0;
  std::uint64_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t line = 0;
  std::uint64_t bad_lines = 0;  // Of this epoch, before the hint.
  bool operator==(const DataCursor&) const = default;
};

// Examples in global order. CSR by (example, slot): the keys of example e and slot s are
// keys[key_begin[e * slots + s] .. key_begin[e * slots + s + 1]).
struct Batch {
  std::uint64_t first_example = 0;  // Ordinal since the start of the run of example 0.
  std::uint32_t examples = 0;
  std::uint32_t slots = 0;
  bool ends_epoch = false;    // Its last example is the last of an epoch; examples may then be 0.
  std::vector<float> label;   // (examples)
  std::vector<float> weight;  // (examples), or empty: all 1
  std::vector<float> dense;   // (examples, dense_width)
  std::vector<std::uint32_t> key_begin;    // (examples * slots + 1)
  std::vector<Key> keys;                   // (key_begin.back())
  std::vector<float> values;               // (keys) per-key values, or empty: all 1
  std::vector<std::uint64_t> time;         // (examples), or empty
  std::vector<std::uint64_t> group;        // (examples), or empty
  std::vector<std::uint32_t> origin_file;  // (examples) number in the frozen list of files
  std::vector<std::uint64_t> origin_line;  // (examples) from 1; for `synthetic` the row number
  // (examples + 1), or empty: none. Bad lines between the example before and this one; the last
  // entry counts those after the last example at an epoch's end, and is 0 elsewhere. In the order
  // of the lines unless DataOptions::shuffle is "examples", which leaves it empty.
  std::vector<std::uint32_t> bad_lines_before;
  // The cursor after the examples [0, mini-batch end) of this batch, one per mini-batch boundary in
  // order; the last one is the end of the batch. At an epoch's end that is the start of the next
  // epoch; a batch without examples has this one cursor.
  std::vector<DataCursor> cursors;

  std::uint64_t MemoryBytes() const;
  // No examples; the lists keep their memory.
  void Clear();
  // Keeps the first `count` examples. REQUIRES: they end where `keep_cursors` cursors do, amid an
  // epoch.
  void Truncate(std::uint32_t count, std::size_t keep_cursors);
};

}  // namespace terrace
