// What is the same over every file system.
#include "terrace/io/file_system.h"

#include <algorithm>

#include <fmt/format.h>

#include "terrace/base/sync_point.h"

namespace terrace {
namespace {

Status WriteTemporary(FileSystem* fs, const std::string& path, std::span<const std::byte> data) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs->Open(path, OpenMode::kCreate));
  TERRACE_RETURN_IF_ERROR(file->WriteAt(0, data));
  SyncPoint::Hit("io.write_atomically.before_sync");
  return file->Sync();
}

// Whether `path`, which leads to a folder, is a link: its own folder lists it as no folder then.
Result<bool> IsListedAsFile(FileSystem* fs, const std::string& path) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs->List(FolderOf(path)));
  const std::string_view whole = std::string_view(path).substr(0, path.find_last_not_of('/') + 1);
  const std::string_view name = whole.substr(whole.rfind('/') + 1);
  return std::any_of(entries.begin(), entries.end(), [&](const FileInfo& entry) {
    return entry.name == name && !entry.is_directory;
  });
}

// REQUIRES: no link.
Status RemoveFolder(FileSystem* fs, const std::string& path) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs->List(path));
  for (const FileInfo& entry : entries) {
    const std::string child = JoinPath(path, entry.name);
    TERRACE_RETURN_IF_ERROR(entry.is_directory ? RemoveFolder(fs, child) : fs->Remove(child));
  }
  return fs->RemoveDirectory(path);
}

}  // namespace

Status ReadFully(File* file, std::uint64_t offset, std::span<std::byte> buffer) {
  ReadRequest request;
  request.file = file;
  request.offset = offset;
  request.buffer = buffer;
  TERRACE_ASSIGN_OR_RETURN(request.bytes_read, file->ReadAt(offset, buffer));
  return CheckWhole(request);
}

Status CheckWhole(const ReadRequest& request) {
  if (request.bytes_read == request.buffer.size()) return OkStatus();
  return CorruptionError(fmt::format("'{}' ends at byte {}, {} bytes before it should",
                                     request.file->path(), request.offset + request.bytes_read,
                                     request.buffer.size() - request.bytes_read));
}

Result<std::string> ReadFileToString(FileSystem* fs, const std::string& path) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs->Open(path, OpenMode::kRead));
  TERRACE_ASSIGN_OR_RETURN(std::uint64_t size, file->Size());
  std::string text(size, '\0');
  TERRACE_RETURN_IF_ERROR(ReadFully(file.get(), 0, std::as_writable_bytes(std::span(text))));
  return text;
}

Status WriteFileAtomically(FileSystem* fs, const std::string& path,
                           std::span<const std::byte> data) {
  const std::string temporary = path + ".tmp";
  Status removed = fs->Remove(temporary);  // Left by a crash.
  if (!removed.ok() && removed.code() != StatusCode::kNotFound) return removed;
  Status status = WriteTemporary(fs, temporary, data);
  if (status.ok()) {
    SyncPoint::Hit("io.write_atomically.before_rename");
    status = fs->Rename(temporary, path);
  }
  if (!status.ok()) {
    // The first error is the one to tell; what stays is removed by the next writer.
    (void)fs->Remove(temporary).ok();
    return status;
  }
  SyncPoint::Hit("io.write_atomically.before_sync_directory");
  TERRACE_RETURN_IF_ERROR(fs->SyncDirectory(FolderOf(path)));
  SyncPoint::Hit("io.write_atomically.done");
  return OkStatus();
}

Result<bool> IsLinkToFolder(FileSystem* fs, const std::string& path) {
  const Result<FileInfo> info = fs->Stat(path);
  if (info.status().code() == StatusCode::kNotFound) return false;
  TERRACE_RETURN_IF_ERROR(info.status());
  return info->is_directory ? IsListedAsFile(fs, path) : false;
}

Status RemoveOwnFiles(FileSystem* fs, const std::string& folder,
                      const std::function<bool(const std::string&)>& is_own,
                      std::vector<std::string>* foreign) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs->List(folder));
  const std::size_t before = foreign->size();
  for (const FileInfo& entry : entries) {
    const std::string path = JoinPath(folder, entry.name);
    if (entry.is_directory || !is_own(entry.name)) {
      foreign->push_back(path);
    } else {
      TERRACE_RETURN_IF_ERROR(fs->Remove(path));
    }
  }
  return foreign->size() == before ? fs->RemoveDirectory(folder) : OkStatus();
}

Status RemoveTree(FileSystem* fs, const std::string& path) {
  Result<FileInfo> info = fs->Stat(path);
  if (!info.ok()) {
    return info.status().code() == StatusCode::kNotFound ? OkStatus() : info.status();
  }
  if (!info->is_directory) return fs->Remove(path);
  TERRACE_ASSIGN_OR_RETURN(const bool is_link, IsListedAsFile(fs, path));
  return is_link ? fs->Remove(path) : RemoveFolder(fs, path);
}

std::string FolderOf(const std::string& path) {
  std::size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path.empty() ? "." : "/";
  std::size_t slash = path.rfind('/', end);
  if (slash == std::string::npos) return ".";
  std::size_t last = path.find_last_not_of('/', slash);
  return last == std::string::npos ? "/" : path.substr(0, last + 1);
}

std::string JoinPath(std::string_view folder, std::string_view name) {
  if (folder.empty() || name.starts_with('/')) return std::string(name);
  if (folder.ends_with('/')) return fmt::format("{}{}", folder, name);
  return fmt::format("{}/{}", folder, name);
}

Status FileSystem::CheckFolder(const std::string& path) {
  TERRACE_ASSIGN_OR_RETURN(const FileInfo info, Stat(path));
  if (info.is_directory) return OkStatus();
  return NotFoundError("'" + path + "' is no folder");
}

}  // namespace terrace
