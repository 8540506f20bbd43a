// MemoryFileSystem: a file system in memory that remembers what was made durable, and forgets the
// rest when a test says that the machine crashed.
//
// What a crash may take: data written since the file's last Sync, any sector of it without the
// others; lengths likewise; and names made, replaced or removed since the last SyncDirectory of
// their folder, each without the others. A rename inside one folder is kept or lost whole. A file
// whose name is durable and whose data is not is there and empty.
//
// Threads: thread-safe, as FileSystem asks. Must outlive the files, queues and locks it gave out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/mutex.h"
#include "terrace/base/rng.h"
#include "terrace/io/file_system.h"

namespace terrace {

struct MemoryFileSystemOptions {
  std::uint64_t capacity_bytes = ~std::uint64_t{0};  // Of blocks of 4 KiB; beyond it: ENOSPC.
  Clock* clock = Clock::Real();                      // Borrowed; for modified_micros.
};

class MemoryFileSystem final : public FileSystem {
 public:
  enum class CrashPolicy {
    kLoseUnsynced,  // The least that a disk may keep.
    kKeepAll,       // A killed process: the kernel writes everything later.
    kRandom,        // Each unsynced sector, length and name independently, by the seed.
  };

  using Options = MemoryFileSystemOptions;

  explicit MemoryFileSystem(const Options& options = Options());
  ~MemoryFileSystem() override;

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override;
  Result<std::unique_ptr<ReadQueue>> NewReadQueue(const ReadQueueOptions& options) override;
  Status Rename(const std::string& from, const std::string& to) override;
  Status Remove(const std::string& path) override;
  Status RemoveDirectory(const std::string& path) override;
  Status MakeDirectories(const std::string& path) override;
  Status SyncDirectory(const std::string& path) override;
  Result<std::vector<FileInfo>> List(const std::string& path) override;
  Result<FileInfo> Stat(const std::string& path) override;
  Result<DiskSpace> Space(const std::string& path) override;
  Result<std::unique_ptr<FileLock>> Lock(const std::string& path, bool exclusive) override;

  // Locks are given back; files opened before fail from now on.
  void Crash(std::uint64_t seed, CrashPolicy policy) TERRACE_EXCLUDES(mu_);
  void set_capacity_bytes(std::uint64_t bytes) TERRACE_EXCLUDES(mu_);
  std::uint64_t used_bytes() const TERRACE_EXCLUDES(mu_);

 private:
  friend class MemoryFile;
  friend class MemoryLock;
  struct Node;
  struct NameChange;
  using NodePtr = std::shared_ptr<Node>;  // Shared: a name, a durable name and open files hold one.

  Result<NodePtr> Find(const std::string& path) const TERRACE_REQUIRES(mu_);
  // The folder of `path` and its last component.
  Result<NodePtr> FindParent(const std::string& path, std::string* name) const
      TERRACE_REQUIRES(mu_);
  void SetName(const NodePtr& folder, const std::string& name, NodePtr node) TERRACE_REQUIRES(mu_);
  void LogChange(NameChange change) TERRACE_REQUIRES(mu_);
  // Those parts of changes that are not to wait for a sync: `taken` says so of each, in order.
  template <typename Taken>
  void TakeChanges(Taken taken) TERRACE_REQUIRES(mu_);
  void Release(const NodePtr& node) TERRACE_REQUIRES(mu_);
  Status Write(Node* node, std::uint64_t offset, std::span<const std::byte> data,
               const std::string& path) TERRACE_REQUIRES(mu_);
  void Resize(Node* node, std::uint64_t size) TERRACE_REQUIRES(mu_);
  // What a crash leaves of `node` and of all below it.
  void Recover(Node* node, CrashPolicy policy, Rng* rng, std::set<Node*>* seen)
      TERRACE_REQUIRES(mu_);
  FileInfo Info(const std::string& name, const Node& node) const TERRACE_REQUIRES(mu_);

  Clock* const clock_;
  mutable Mutex mu_;
  std::uint64_t capacity_bytes_ TERRACE_GUARDED_BY(mu_);
  std::uint64_t used_bytes_ TERRACE_GUARDED_BY(mu_) = 0;
  std::uint64_t generation_ TERRACE_GUARDED_BY(mu_) = 0;  // Counts crashes.
  NodePtr root_ TERRACE_GUARDED_BY(mu_);
  std::vector<NameChange> changes_ TERRACE_GUARDED_BY(mu_);  // Not yet durable, in order.
};

}  // namespace terrace
