// What the tests of readers share: files in memory, archives, and streams of examples as values.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"

namespace terrace {

void PutFile(FileSystem* fs, const std::string& path, std::string_view text);
std::string Gzip(std::string_view text);
std::string Zstd(std::string_view text, int window_log = 0);  // 0: the usual one.

// A line with these columns, without newline: label, I1..I13, C1..C26.
std::string CriteoLine(int label, int number, char delimiter = '\t');

// One example, with everything that a batch says about it but its mini-batch.
struct Example {
  std::uint64_t ordinal = 0;
  float label = 0;
  std::vector<float> dense;
  std::vector<std::vector<Key>> keys;  // By slot.
  std::uint32_t file = 0;
  std::uint64_t line = 0;
  std::uint32_t bad_before = 0;
  bool operator==(const Example&) const = default;
};

// All that a source gave from some point to the end.
struct Stream {
  std::vector<Example> examples;
  // After each mini-batch, with the ordinal of the example that follows.
  std::vector<DataCursor> cursors;
  std::vector<std::uint32_t> bad_after_epoch;
  Status status;  // What ended it, when no end of data did.
};

void AppendBatch(const Batch& batch, std::size_t dense_width, Stream* stream);
// REQUIRES: batch_sizes is not empty; they are used in turn.
Stream ReadStream(ExampleSource* source, std::uint32_t minibatch,
                  const std::vector<std::uint32_t>& batch_sizes);

}  // namespace terrace
