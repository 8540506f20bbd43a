// TextFile: a file of text that appears whole or not at all, written as it is or through a
// compressor, which its name chooses: .gz and .zst. Threads: one at a time.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"

namespace terrace {

class TextOutput;

// What is written of a file before it appears. A process that is killed leaves it, and the next one
// that writes the file removes it.
std::string PartialOf(const std::string& path);

class TextFile {
 public:
  // kUnavailable: another process is writing it.
  static Result<std::unique_ptr<TextFile>> Create(FileSystem* fs, const std::string& path);
  ~TextFile();
  Status Append(std::string_view text);
  // Once, after all text: it is there, durably, and replaces what was.
  Status Publish();
  // Of one that is not to appear, because of `cause`, which is returned: removes what was written.
  Status GiveUp(const Status& cause);

 private:
  TextFile(FileSystem* fs, const std::string& path);

  FileSystem* const fs_;
  const std::string path_;
  std::unique_ptr<File> file_;
  std::unique_ptr<FileLock> lock_;  // Null where the file system has none.
  bool renamed_ = false;
  std::unique_ptr<TextOutput> output_;  // Borrows the file.
};

}  // namespace terrace
