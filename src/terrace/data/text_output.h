// TextOutput: text to a new file, as it is or through a compressor, which the file's name chooses:
// .gz and .zst. TextFile: a file of text that appears whole or not at all. Threads: one at a time.
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

// What is written of a file before it appears. A process that is killed leaves it, and the next one
// that writes the file removes it.
std::string PartialOf(const std::string& path);

class TextFile {
 public:
  // kUnavailable: another process is writing it.
  static Result<std::unique_ptr<TextFile>> Create(FileSystem* fs, const std::string& path);
  Status Append(std::string_view text) { return output_->Append(text); }
  // Once, after all text: it is there, durably, and replaces what was.
  Status Publish();
  // Of one that is not to appear, because of `cause`, which is returned: removes what was written.
  Status GiveUp(const Status& cause);

 private:
  TextFile(FileSystem* fs, const std::string& path) : fs_(fs), path_(path) {}

  FileSystem* const fs_;
  const std::string path_;
  std::unique_ptr<File> file_;
  std::unique_ptr<FileLock> lock_;  // Null where the file system has none.
  bool renamed_ = false;
  std::unique_ptr<TextOutput> output_;
};

}  // namespace terrace
