// FileSystem: the one seam to disks. Posix (direct, asynchronous), in memory (forgets what was not
// synced), faulty. Threads: a FileSystem is thread-safe; a File takes concurrent ReadAt calls,
// writes come from one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/status.h"

namespace terrace {

enum class OpenMode {
  kRead,             // The file exists.
  kCreate,           // Makes a new file, read and write; kInvalidArgument names a file that exists.
  kReadDirect,       // As kRead, past the page cache where the file system allows (else buffered).
  kCreateDirect,     // As kCreate, likewise.
  kOverwrite,        // The file exists and is written anew, from its start; it keeps its length.
  kOverwriteDirect,  // As kOverwrite, past the page cache likewise.
  kAppend,           // Opens or makes; writes go to the end. Not direct.
};

constexpr bool IsDirect(OpenMode mode) {
  return mode == OpenMode::kReadDirect || mode == OpenMode::kCreateDirect ||
         mode == OpenMode::kOverwriteDirect;
}

// One open file. The destructor closes; what Sync() has not covered may be lost in a crash.
class File {
 public:
  virtual ~File() = default;
  // Reads up to buffer.size() bytes at `offset`; fewer only at the end of the file.
  // A direct file asks for offset, size and buffer aligned to read_alignment().
  virtual Result<std::size_t> ReadAt(std::uint64_t offset, std::span<std::byte> buffer) = 0;
  // A divisor of kDirectIoAlignment: the sector of the disk, where the kernel tells it.
  virtual std::size_t read_alignment() const = 0;
  // Writes all of `data` at `offset`, growing the file. A direct file asks for offset, size and
  // data aligned to kDirectIoAlignment. After an error the
  // bytes there are unknown, and every later WriteAt, Truncate and Sync of this File fails too:
  // reopen the file to go on.
  virtual Status WriteAt(std::uint64_t offset, std::span<const std::byte> data) = 0;
  // Durable on success. After an error every later Sync fails too: the state on disk is unknown.
  virtual Status Sync() = 0;
  virtual Result<std::uint64_t> Size() = 0;
  virtual Status Truncate(std::uint64_t size) = 0;
  virtual const std::string& path() const = 0;
};

// Exactly buffer.size() bytes; kCorruption names the file when it ends before.
Status ReadFully(File* file, std::uint64_t offset, std::span<std::byte> buffer);

struct FileInfo {
  std::string name;              // Without its folder.
  std::uint64_t size = 0;        // Bytes.
  std::uint64_t disk_bytes = 0;  // Bytes of the blocks that it holds.
  bool is_directory = false;
  bool is_special = false;           // A device, a pipe or a socket: it has no length.
  std::uint64_t links = 1;           // Names that it has.
  std::int64_t modified_micros = 0;  // Since 1970.
};

struct DiskSpace {
  std::uint64_t device = 0;  // The same for what lies on the same disk.
  std::uint64_t capacity_bytes = 0;
  std::uint64_t free_bytes = 0;  // That this user may still write.
};

// One read of a batch. `status` and `bytes_read` are results: fewer bytes than asked only at the
// end of the file.
struct ReadRequest {
  File* file = nullptr;
  std::uint64_t offset = 0;
  std::span<std::byte> buffer;
  Status status;
  std::size_t bytes_read = 0;
};

// As ReadFully, of one that has ended without an error.
Status CheckWhole(const ReadRequest& request);

// Reads many ranges at once: io_uring, or a pool of threads where the kernel forbids it. Requests
// come in groups, so that a caller handles one while the next are read. One caller at a time; until
// all it has started is waited for, or the queue destroyed, the calls are of the same thread.
class ReadQueue {
 public:
  virtual ~ReadQueue() = default;  // Waits for what was started.
  // Begins to read a group, after all those started before it, without waiting for the disk.
  // Requests and buffers are the queue's until Wait has returned for the group.
  virtual void Start(std::span<ReadRequest> requests) = 0;
  // Blocks: until the oldest group not yet waited for is done. Each request has its own status; the
  // result is the group's first error, with its file. REQUIRES: there is such a group.
  virtual Status Wait() = 0;
  virtual std::string_view name() const = 0;  // "io_uring", "threads", "memory", ...

  // One group. REQUIRES: none is started and not waited for.
  Status Run(std::span<ReadRequest> requests) {
    Start(requests);
    return Wait();
  }
};

struct ReadQueueOptions {
  std::string backend = "auto";  // auto | io_uring | threads
  // Requests in flight: just below the 128 that a virtio disk's queue takes. What is more waits in
  // the kernel's scheduler, whose thread then takes the cores of the training to hand it on.
  int depth = 126;
  int threads = 4;  // Of the pool.
  // Memory that most reads go to, borrowed while the queue lives: io_uring keeps it mapped, which
  // saves its share of each read, where the kernel allows (ulimit -l). Others may be read to too.
  std::span<std::byte> buffer;
};

// A lock on a file between processes, given back by the destructor or the end of the process.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) = 0;
  virtual Result<std::unique_ptr<ReadQueue>> NewReadQueue(const ReadQueueOptions& options) = 0;
  // Replaces `to` in one step. Durable after SyncDirectory of the folder.
  virtual Status Rename(const std::string& from, const std::string& to) = 0;
  virtual Status Remove(const std::string& path) = 0;           // A file. kNotFound when absent.
  virtual Status RemoveDirectory(const std::string& path) = 0;  // An empty folder.
  // With its parents, all durable; fine when it exists.
  virtual Status MakeDirectories(const std::string& path) = 0;
  virtual Status SyncDirectory(const std::string& path) = 0;
  virtual Result<std::vector<FileInfo>> List(
      const std::string& path) = 0;  // Sorted by name, "." and ".." left out.
  virtual Result<FileInfo> Stat(const std::string& path) = 0;
  // Whether something can be made in a folder, as far as can be told without making it. kNotFound:
  // there is no such folder.
  virtual Status CheckFolder(const std::string& path);
  virtual Result<DiskSpace> Space(const std::string& path) = 0;  // Of the disk of `path`.
  // Which disk an existing `path` lies on, as text that another disk, file system or place would
  // not have. Empty: none that a clock could tell anything of.
  virtual Result<std::string> DiskIdentity(const std::string& /*path*/) { return std::string(); }
  // Takes a lock on `path`, an existing file. kUnavailable: another process holds it. kNotFound:
  // the file that was there has gone, or been replaced. Does not block.
  virtual Result<std::unique_ptr<FileLock>> Lock(const std::string& path, bool exclusive) = 0;

  static FileSystem* Posix();  // Lives for ever.
};

// Whole small files. WriteFileAtomically: temporary file (`path`.tmp), sync, rename, sync of the
// folder. The state after an error: the old file, or, when only the last step failed, either. One
// writer of a path at a time.
Result<std::string> ReadFileToString(FileSystem* fs, const std::string& path);
Status WriteFileAtomically(FileSystem* fs, const std::string& path,
                           std::span<const std::byte> data);
// A folder with all it holds; of links the link alone. NotFound is fine.
Status RemoveTree(FileSystem* fs, const std::string& path);
// Removes the files in a folder whose names is_own takes, and then the folder; with what else there
// is in it, which is added to *foreign, it stays.
Status RemoveOwnFiles(FileSystem* fs, const std::string& folder,
                      const std::function<bool(const std::string&)>& is_own,
                      std::vector<std::string>* foreign);
// Whether what lies there is a link that leads to a folder. NotFound: false.
Result<bool> IsLinkToFolder(FileSystem* fs, const std::string& path);
std::string JoinPath(std::string_view folder, std::string_view name);
// What `path` lies in; "." where it names no folder.
std::string FolderOf(const std::string& path);
// Where a standard stream is closed, the next file that is opened would take its place and get what
// is said to people. From now on something stands there that refuses it. Before any file is opened.
void OccupyStandardStreams();

}  // namespace terrace
