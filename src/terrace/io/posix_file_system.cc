#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "terrace/base/log.h"
#include "terrace/base/sync_point.h"
#include "terrace/io/disk_identity.h"
#include "terrace/io/drive_health.h"
#include "terrace/io/posix_file.h"
#include "terrace/io/read_queue.h"

namespace terrace {
namespace {

constexpr mode_t kFileMode = 0644;
constexpr mode_t kFolderMode = 0755;

int OpenRetrying(const std::string& path, int flags) {
  int fd;
  do {
    fd = open(path.c_str(), flags | O_CLOEXEC, kFileMode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

int OpenFlags(OpenMode mode) {
  switch (mode) {
    case OpenMode::kRead:
    case OpenMode::kReadDirect:
      return O_RDONLY;
    case OpenMode::kCreate:
    case OpenMode::kCreateDirect:
      return O_RDWR | O_CREAT | O_EXCL;
    case OpenMode::kOverwrite:
    case OpenMode::kOverwriteDirect:
      return O_RDWR;
    case OpenMode::kAppend:
      return O_RDWR | O_CREAT | O_APPEND;
  }
  return O_RDONLY;
}

FileInfo MakeInfo(std::string name, const struct stat& info) {
  FileInfo result;
  result.name = std::move(name);
  result.size = static_cast<std::uint64_t>(info.st_size);
  result.disk_bytes = static_cast<std::uint64_t>(info.st_blocks) * 512;  // st_blocks' own unit.
  result.is_directory = S_ISDIR(info.st_mode);
  // A link that leads nowhere is listed as itself.
  result.is_special = !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode) && !S_ISLNK(info.st_mode);
  result.links = static_cast<std::uint64_t>(info.st_nlink);
  result.modified_micros =
      std::int64_t{info.st_mtim.tv_sec} * 1'000'000 + info.st_mtim.tv_nsec / 1000;
  return result;
}

class PosixLock final : public FileLock {
 public:
  explicit PosixLock(int fd) : fd_(fd) {}
  ~PosixLock() override { close(fd_); }

 private:
  const int fd_;
};

class PosixFileSystem final : public FileSystem {
 public:
  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override {
    const bool aligned = IsDirect(mode);
    bool direct = aligned;
    int fd = OpenRetrying(path, OpenFlags(mode) | (direct ? O_DIRECT : 0));
    if (fd < 0 && direct && errno == EINVAL) {
      // A kernel before 6.0 leaves the file behind when it refuses O_DIRECT after creating it.
      if (mode == OpenMode::kCreateDirect) (void)unlink(path.c_str());
      direct = false;
      fd = OpenRetrying(path, OpenFlags(mode));
    }
    if (fd < 0) {
      if (errno == EEXIST) {
        return InvalidArgumentError(fmt::format("creating '{}': it exists already", path));
      }
      return ErrnoError(errno, "opening", path);
    }
    return std::unique_ptr<File>(std::make_unique<PosixFile>(fd, path, aligned, direct));
  }

  Result<std::unique_ptr<ReadQueue>> NewReadQueue(const ReadQueueOptions& options) override {
    TERRACE_RETURN_IF_ERROR(ValidateReadQueueOptions(options));
    if (options.backend == "threads") return NewThreadReadQueue(options.threads);
    Result<std::unique_ptr<ReadQueue>> queue = NewUringReadQueue(options.depth, options.buffer);
    if (queue.ok() || options.backend == "io_uring") return queue;
    LogText(LogLevel::kDebug,
            fmt::format("reading with {} threads: {}", options.threads, queue.status().message()));
    return NewThreadReadQueue(options.threads);
  }

  Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) == 0) return OkStatus();
    return ErrnoError(errno, fmt::format("renaming '{}' to", from), to);
  }

  Status Remove(const std::string& path) override {
    if (unlink(path.c_str()) == 0) return OkStatus();
    return ErrnoError(errno, "removing", path);
  }

  Status RemoveDirectory(const std::string& path) override {
    if (rmdir(path.c_str()) == 0) return OkStatus();
    return ErrnoError(errno, "removing folder", path);
  }

  Status MakeDirectories(const std::string& path) override {
    if (mkdir(path.c_str(), kFolderMode) == 0) return SyncDirectory(FolderOf(path));
    int error = errno;
    if (error == ENOENT) {
      std::string parent = FolderOf(path);
      if (parent == path || path.empty()) return ErrnoError(error, "making folder", path);
      TERRACE_RETURN_IF_ERROR(MakeDirectories(parent));
      if (mkdir(path.c_str(), kFolderMode) == 0) return SyncDirectory(parent);
      error = errno;
    }
    if (error == EEXIST) {
      struct stat info;
      if (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return OkStatus();
      error = ENOTDIR;
    }
    return ErrnoError(error, "making folder", path);
  }

  Status CheckFolder(const std::string& path) override {
    TERRACE_RETURN_IF_ERROR(FileSystem::CheckFolder(path));
    if (access(path.c_str(), W_OK | X_OK) == 0) return OkStatus();
    return ErrnoError(errno, "writing to folder", path);
  }

  Status SyncDirectory(const std::string& path) override {
    int fd = OpenRetrying(path, O_RDONLY | O_DIRECTORY);
    if (fd < 0) return ErrnoError(errno, "opening folder", path);
    int result;
    do {
      result = fsync(fd);
    } while (result != 0 && errno == EINTR);
    int error = errno;
    close(fd);
    // Some network file systems cannot sync a folder and say so by EINVAL; their names are durable
    // at once.
    if (result == 0 || error == EINVAL) return OkStatus();
    return ErrnoError(error, "syncing folder", path);
  }

  Result<std::vector<FileInfo>> List(const std::string& path) override {
    DIR* folder = opendir(path.c_str());
    if (folder == nullptr) return ErrnoError(errno, "listing", path);
    std::vector<FileInfo> infos;
    Status status = ReadEntries(folder, path, &infos);
    closedir(folder);
    if (!status.ok()) return status;
    std::sort(infos.begin(), infos.end(),
              [](const FileInfo& a, const FileInfo& b) { return a.name < b.name; });
    return infos;
  }

  Result<FileInfo> Stat(const std::string& path) override {
    struct stat info;
    if (stat(path.c_str(), &info) != 0) return ErrnoError(errno, "looking at", path);
    std::size_t end = path.find_last_not_of('/');
    std::size_t slash = end == std::string::npos ? end : path.rfind('/', end);
    std::size_t start = slash == std::string::npos ? 0 : slash + 1;
    return MakeInfo(end == std::string::npos ? path : path.substr(start, end + 1 - start), info);
  }

  Result<DiskSpace> Space(const std::string& path) override {
    struct statvfs info;
    int result;
    do {
      result = statvfs(path.c_str(), &info);
    } while (result != 0 && errno == EINTR);
    struct stat place;
    if (result == 0) result = stat(path.c_str(), &place);
    if (result != 0) return ErrnoError(errno, "asking the space of", path);
    return DiskSpace{place.st_dev, static_cast<std::uint64_t>(info.f_blocks) * info.f_frsize,
                     static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize};
  }

  Result<std::string> DiskIdentity(const std::string& path) override {
    struct stat info;
    struct statfs file_system;
    if (stat(path.c_str(), &info) != 0 || statfs(path.c_str(), &file_system) != 0) {
      return ErrnoError(errno, "asking the disk of", path);
    }
    const std::unique_ptr<char, decltype(&std::free)> whole(realpath(path.c_str(), nullptr),
                                                            &std::free);
    if (whole == nullptr) return ErrnoError(errno, "asking the whole path of", path);
    return DiskIdentityText(info.st_dev, file_system, DescribeDrives(info.st_dev, "/sys"),
                            whole.get());
  }

  Result<std::unique_ptr<FileLock>> Lock(const std::string& path, bool exclusive) override {
    int fd = OpenRetrying(path, O_RDONLY);
    if (fd < 0) return ErrnoError(errno, "opening the lock", path);
    SyncPoint::Hit("file.lock.opened");
    int result;
    do {
      result = flock(fd, (exclusive ? LOCK_EX : LOCK_SH) | LOCK_NB);
    } while (result != 0 && errno == EINTR);
    const int error = result == 0 ? 0 : errno;
    std::unique_ptr<FileLock> lock = std::make_unique<PosixLock>(fd);  // Or, if not, what closes.
    if (error == EWOULDBLOCK) {
      return UnavailableError(fmt::format("'{}' is locked by another process", path));
    }
    if (error != 0) return ErrnoError(error, "locking", path);
    struct stat locked, named;
    if (fstat(fd, &locked) != 0) return ErrnoError(errno, "asking for", path);
    if (stat(path.c_str(), &named) != 0) return ErrnoError(errno, "asking for", path);
    if (locked.st_dev == named.st_dev && locked.st_ino == named.st_ino) return lock;
    return NotFoundError(
        fmt::format("'{}' was replaced while it was being locked: try again", path));
  }

 private:
  static Status ReadEntries(DIR* folder, const std::string& path, std::vector<FileInfo>* infos) {
    while (true) {
      errno = 0;
      const dirent* entry = readdir(folder);
      if (entry == nullptr) {
        return errno == 0 ? OkStatus() : ErrnoError(errno, "listing", path);
      }
      std::string name = entry->d_name;
      if (name == "." || name == "..") continue;
      struct stat info;
      if (fstatat(dirfd(folder), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // Removed since.
        return ErrnoError(errno, "looking at", JoinPath(path, name));
      }
      const bool is_link = S_ISLNK(info.st_mode);
      // A link counts as the file it names; one that leads nowhere is listed as itself.
      if (is_link) (void)fstatat(dirfd(folder), name.c_str(), &info, 0);
      infos->push_back(MakeInfo(std::move(name), info));
      // Whoever walks the tree, to remove it say, must not leave it through a link.
      if (is_link) infos->back().is_directory = false;
    }
  }
};

}  // namespace

FileSystem* FileSystem::Posix() {
  static PosixFileSystem file_system;
  return &file_system;
}

void OccupyStandardStreams() {
  for (int stream = 0; stream <= 2; ++stream) {
    if (fcntl(stream, F_GETFD) != -1 || errno != EBADF) continue;
    (void)open("/dev/null", stream == 0 ? O_WRONLY : O_RDONLY);  // The lowest free number.
  }
}

}  // namespace terrace
