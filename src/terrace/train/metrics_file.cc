#include "terrace/train/metrics_file.h"

#include <span>

#include <fmt/format.h>

namespace terrace {

Result<std::unique_ptr<MetricsFile>> MetricsFile::Open(FileSystem* fs, const std::string& path,
                                                       std::uint64_t bytes) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs->Open(path, OpenMode::kAppend));
  TERRACE_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
  if (size < bytes) {
    return CorruptionError(fmt::format(
        "'{}' has {} bytes, but the checkpoint counts {}: the file was cut or replaced. "
        "Restore it, or train anew with --overwrite.",
        path, size, bytes));
  }
  if (size > bytes) TERRACE_RETURN_IF_ERROR(file->Truncate(bytes));
  return std::unique_ptr<MetricsFile>(new MetricsFile(std::move(file), bytes));
}

Status MetricsFile::Append(const std::string& line) {
  const std::string text = line + "\n";
  TERRACE_RETURN_IF_ERROR(file_->WriteAt(bytes_, std::as_bytes(std::span(text))));
  bytes_ += text.size();
  return OkStatus();
}

Status MetricsFile::Sync() { return file_->Sync(); }

}  // namespace terrace
