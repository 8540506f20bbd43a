// TextOutput: text to a new file, as it is or through a compressor, which the file's name chooses:
// .gz and .zst. Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"

namespace terrace {

class TextOutput {
 public:
  virtual ~TextOutput() = default;
  virtual Status Append(std::string_view text) = 0;
  // Once, after all text. The file is not synced.
  virtual Status Finish() = 0;

 protected:
  explicit TextOutput(File* file) : file_(file) {}
  Status Write(const void* data, std::size_t size);

 private:
  File* const file_;
  std::uint64_t offset_ = 0;
};

// For an empty file, which is borrowed. `path`: its name in the end.
Result<std::unique_ptr<TextOutput>> NewTextOutput(File* file, const std::string& path);

}  // namespace terrace
