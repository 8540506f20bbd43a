// FaultyFileSystem: passes every call on to another file system, except for those that a plan makes
// fail. Tests sweep it over operation 1, 2, 3, ... until nothing fails any more; the program takes
// a plan as text by a hidden flag.
//
// A plan as text is a list of rules, separated by ';':
//   OPERATION:N[+]:FAULT[:PATH]   the N-th matching call (from 1), with '+' all from there on, and
//                                 only calls on paths that contain PATH
//   seed=S,rate=R[,op=OPERATION][,fault=FAULT][,path=PATH]   each call with probability R
// for instance "write:17:enospc", "any:3+:error:manifest", "seed=5,rate=0.001".
// OPERATION: any open read write sync truncate size rename remove make_directories sync_directory
// list stat free_bytes lock new_read_queue. FAULT: error (or eio) short_read short_write enospc
// sync_error flip missing; Fault says which calls each can meet, and others are not counted.
//
// Threads: thread-safe, as FileSystem asks; with several threads the numbering is theirs to race
// for. Borrows `base`, which must outlive it; must itself outlive the files and queues it gave out.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/io/file_system.h"

namespace terrace {

enum class FileOperation {
  kOpen,
  kRead,
  kWrite,
  kSync,
  kTruncate,
  kSize,
  kRename,
  kRemove,  // A file or an empty folder.
  kMakeDirectories,
  kSyncDirectory,
  kList,
  kStat,
  kSpace,
  kLock,
  kNewReadQueue,
};
inline constexpr int kFileOperations = 15;

enum class Fault {
  kError,       // EIO from any call; nothing was done.
  kShortRead,   // A read ends early, as if the file did.
  kShortWrite,  // Half of the bytes are written, then EIO.
  kNoSpace,     // ENOSPC from open, write (after half of the bytes), truncate, rename or a folder
                // made.
  kSyncError,   // EIO from a sync of a file or folder; nothing became durable.
  kFlippedBit,  // A read succeeds with one bit wrong.
  kMissing,     // ENOENT from open, as if the file had gone. Only where a rule names it.
};

// As in a plan's text.
std::string_view FileOperationName(FileOperation operation);
std::string_view FaultName(Fault fault);

struct FaultRule {
  std::optional<FileOperation> operation;      // None: any.
  std::string path_contains;                   // Empty: any.
  std::optional<Fault> fault = Fault::kError;  // None: by the seed, among those the call can meet.
  // Either the n-th matching call ...
  std::uint64_t nth = 0;
  bool from_then_on = false;
  // ... or, where nth is 0, each with this probability.
  double rate = 0;
  std::uint64_t seed = 0;
};

// kInvalidArgument tells which part of the text is no rule.
Result<std::vector<FaultRule>> ParseFaultRules(std::string_view text);

class FaultyFileSystem final : public FileSystem {
 public:
  FaultyFileSystem(FileSystem* base, std::vector<FaultRule> rules);
  ~FaultyFileSystem() override;

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
  // Counts as a stat.
  Result<std::string> DiskIdentity(const std::string& path) override;
  Result<std::unique_ptr<FileLock>> Lock(const std::string& path, bool exclusive) override;

  // Replaces the rules and starts all counts again.
  void SetRules(std::vector<FaultRule> rules) TERRACE_EXCLUDES(mu_);
  std::uint64_t operations() const TERRACE_EXCLUDES(mu_);  // Calls seen, of every kind.
  std::uint64_t operations(FileOperation operation) const TERRACE_EXCLUDES(mu_);
  std::uint64_t faults() const TERRACE_EXCLUDES(mu_);  // Calls that were made to fail or lie.

 private:
  friend class FaultyFile;
  friend class FaultyReadQueue;

  struct Hit {
    Fault fault;
    std::uint64_t random;  // Where a bit is flipped.
  };
  struct RuleState {
    FaultRule rule;
    std::uint64_t matched = 0;
  };

  // Counts one call and says whether it fails.
  std::optional<Hit> Count(FileOperation operation, const std::string& path) TERRACE_EXCLUDES(mu_);
  // For calls of which every fault is an error: OK, or that error.
  Status CountSimple(FileOperation operation, const std::string& path) TERRACE_EXCLUDES(mu_);

  FileSystem* const base_;
  mutable Mutex mu_;
  std::vector<RuleState> rules_ TERRACE_GUARDED_BY(mu_);
  std::array<std::uint64_t, kFileOperations> operations_ TERRACE_GUARDED_BY(mu_) = {};
  std::uint64_t faults_ TERRACE_GUARDED_BY(mu_) = 0;
};

// By a plan as text; borrows `base` as above.
Result<std::unique_ptr<FileSystem>> MakeFaultyFileSystem(FileSystem* base, std::string_view spec);

}  // namespace terrace
