#include "terrace/io/faulty_file_system.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <numeric>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/io/posix_file.h"
#include "terrace/io/read_queue.h"

namespace terrace {
namespace {

// Those that a seed chooses from: any call may meet an error that it did not ask for, but not every
// caller's file goes while it works.
constexpr Fault kAllFaults[] = {Fault::kError,   Fault::kShortRead, Fault::kShortWrite,
                                Fault::kNoSpace, Fault::kSyncError, Fault::kFlippedBit};
bool CanMeet(FileOperation operation, Fault fault) {
  switch (fault) {
    case Fault::kError:
      return true;
    case Fault::kShortRead:
    case Fault::kFlippedBit:
      return operation == FileOperation::kRead;
    case Fault::kShortWrite:
      return operation == FileOperation::kWrite;
    case Fault::kNoSpace:
      return operation == FileOperation::kOpen || operation == FileOperation::kWrite ||
             operation == FileOperation::kTruncate || operation == FileOperation::kRename ||
             operation == FileOperation::kMakeDirectories;
    case Fault::kSyncError:
      return operation == FileOperation::kSync || operation == FileOperation::kSyncDirectory;
    case Fault::kMissing:
      return operation == FileOperation::kOpen;
  }
  return false;
}

Fault ChooseFault(FileOperation operation, std::uint64_t random) {
  std::vector<Fault> possible;
  for (Fault fault : kAllFaults) {
    if (CanMeet(operation, fault)) possible.push_back(fault);
  }
  return possible[random % possible.size()];
}

Status FaultError(Fault fault, FileOperation operation, const std::string& path) {
  return ErrnoError(fault == Fault::kNoSpace   ? ENOSPC
                    : fault == Fault::kMissing ? ENOENT
                                               : EIO,
                    fmt::format("{} (a fault made on purpose) of", FileOperationName(operation)),
                    path);
}

// What a read that was made to lie returns, of `n` bytes in `buffer`.
std::size_t Spoil(Fault fault, std::uint64_t random, std::span<std::byte> buffer, std::size_t n) {
  if (n == 0) return 0;
  // The whole pages only, so that a direct reader sees what a shorter file would give it.
  if (fault == Fault::kShortRead) {
    std::size_t half = n / 2;
    return half >= kDirectIoAlignment ? half / kDirectIoAlignment * kDirectIoAlignment : half;
  }
  std::uint64_t bit = random % (std::uint64_t{n} * 8);
  buffer[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
  return n;
}

}  // namespace

class FaultyFile final : public File {
 public:
  FaultyFile(FaultyFileSystem* fs, std::unique_ptr<File> base, bool aligned)
      : fs_(fs), base_(std::move(base)), aligned_(aligned) {}

  Result<std::size_t> ReadAt(std::uint64_t offset, std::span<std::byte> buffer) override {
    auto hit = fs_->Count(FileOperation::kRead, path());
    if (hit && hit->fault == Fault::kError) {
      return FaultError(hit->fault, FileOperation::kRead, path());
    }
    TERRACE_ASSIGN_OR_RETURN(std::size_t n, base_->ReadAt(offset, buffer));
    return hit ? Spoil(hit->fault, hit->random, buffer, n) : n;
  }

  Status WriteAt(std::uint64_t offset, std::span<const std::byte> data) override {
    TERRACE_RETURN_IF_ERROR(error_.Get());
    auto hit = fs_->Count(FileOperation::kWrite, path());
    if (!hit) return base_->WriteAt(offset, data);
    if (hit->fault != Fault::kError) {
      std::size_t half = data.size() / 2;
      if (aligned_) half = half / kDirectIoAlignment * kDirectIoAlignment;
      if (half > 0) {
        Status status = base_->WriteAt(offset, data.first(half));
        if (!status.ok()) return error_.Set(std::move(status));
      }
    }
    return error_.Set(FaultError(hit->fault, FileOperation::kWrite, path()));
  }

  Status Sync() override {
    TERRACE_RETURN_IF_ERROR(error_.Get());
    Status status = fs_->CountSimple(FileOperation::kSync, path());
    return status.ok() ? base_->Sync() : error_.Set(std::move(status));
  }

  Result<std::uint64_t> Size() override {
    TERRACE_RETURN_IF_ERROR(fs_->CountSimple(FileOperation::kSize, path()));
    return base_->Size();
  }

  Status Truncate(std::uint64_t size) override {
    TERRACE_RETURN_IF_ERROR(error_.Get());
    Status status = fs_->CountSimple(FileOperation::kTruncate, path());
    return status.ok() ? base_->Truncate(size) : error_.Set(std::move(status));
  }

  const std::string& path() const override { return base_->path(); }
  std::size_t read_alignment() const override { return base_->read_alignment(); }

 private:
  friend class FaultyReadQueue;

  FaultyFileSystem* const fs_;
  const std::unique_ptr<File> base_;
  const bool aligned_;
  StickyError error_;
};

class FaultyReadQueue final : public ReadQueue {
 public:
  FaultyReadQueue(FaultyFileSystem* fs, std::unique_ptr<ReadQueue> base)
      : fs_(fs), base_(std::move(base)) {}

  void Start(std::span<ReadRequest> requests) override {
    Group& group = groups_.emplace_back();
    group.requests = requests;
    group.hits.resize(requests.size());
    for (std::size_t i = 0; i < requests.size(); ++i) {
      ReadRequest& request = requests[i];
      auto& hit = group.hits[i];
      hit = fs_->Count(FileOperation::kRead, request.file->path());
      request.status = OkStatus();
      request.bytes_read = 0;
      if (hit && hit->fault == Fault::kError) {
        request.status = FaultError(hit->fault, FileOperation::kRead, request.file->path());
        continue;
      }
      ReadRequest inner = request;
      // A file of another file system is read as it is.
      if (auto* file = dynamic_cast<FaultyFile*>(request.file)) inner.file = file->base_.get();
      group.passed.push_back(std::move(inner));
      group.origins.push_back(i);
    }
    base_->Start(group.passed);
  }

  Status Wait() override {
    TERRACE_CHECK(!groups_.empty());
    // Each request carries its own status; the first of them is the result below.
    (void)base_->Wait().ok();
    const Group group = std::move(groups_.front());
    groups_.pop_front();
    for (std::size_t j = 0; j < group.passed.size(); ++j) {
      ReadRequest& request = group.requests[group.origins[j]];
      request.status = group.passed[j].status;
      request.bytes_read = group.passed[j].bytes_read;
      if (const auto& hit = group.hits[group.origins[j]]; hit && request.status.ok()) {
        request.bytes_read = Spoil(hit->fault, hit->random, request.buffer, request.bytes_read);
      }
    }
    return FirstError(group.requests);
  }

  std::string_view name() const override { return base_->name(); }

 private:
  struct Group {
    std::span<ReadRequest> requests;
    std::vector<std::optional<FaultyFileSystem::Hit>> hits;  // (requests)
    std::vector<ReadRequest> passed;                         // Those that the base reads.
    std::vector<std::size_t> origins;                        // Their places in `requests`.
  };

  FaultyFileSystem* const fs_;
  std::deque<Group> groups_;               // Started, not waited for; oldest first.
  const std::unique_ptr<ReadQueue> base_;  // Goes first: it may read into the groups until then.
};

FaultyFileSystem::FaultyFileSystem(FileSystem* base, std::vector<FaultRule> rules) : base_(base) {
  SetRules(std::move(rules));
}

FaultyFileSystem::~FaultyFileSystem() = default;

void FaultyFileSystem::SetRules(std::vector<FaultRule> rules) {
  MutexLock lock(&mu_);
  rules_.clear();
  for (FaultRule& rule : rules) rules_.push_back({std::move(rule), 0});
  operations_ = {};
  faults_ = 0;
}

std::uint64_t FaultyFileSystem::operations() const {
  MutexLock lock(&mu_);
  return std::accumulate(operations_.begin(), operations_.end(), std::uint64_t{0});
}

std::uint64_t FaultyFileSystem::operations(FileOperation operation) const {
  MutexLock lock(&mu_);
  return operations_[static_cast<std::size_t>(operation)];
}

std::uint64_t FaultyFileSystem::faults() const {
  MutexLock lock(&mu_);
  return faults_;
}

std::optional<FaultyFileSystem::Hit> FaultyFileSystem::Count(FileOperation operation,
                                                             const std::string& path) {
  MutexLock lock(&mu_);
  ++operations_[static_cast<std::size_t>(operation)];
  std::optional<Hit> hit;
  for (RuleState& state : rules_) {
    const FaultRule& rule = state.rule;
    if (rule.operation && *rule.operation != operation) continue;
    if (rule.fault && !CanMeet(operation, *rule.fault)) continue;
    if (path.find(rule.path_contains) == std::string::npos) continue;
    ++state.matched;
    const std::uint64_t random = HashCombine(rule.seed, state.matched);
    const bool fires = rule.nth == 0 ? UnitDouble(random) < rule.rate
                                     : state.matched == rule.nth ||
                                           (rule.from_then_on && state.matched > rule.nth);
    // Every rule counts every call, whichever fires first.
    if (!fires || hit) continue;
    const std::uint64_t choice = MixKey(random);
    hit = Hit{rule.fault ? *rule.fault : ChooseFault(operation, choice), MixKey(choice)};
  }
  if (hit) {
    ++faults_;
    LogText(LogLevel::kDebug,
            fmt::format("fault on purpose: {} in {} of '{}'", FaultName(hit->fault),
                        FileOperationName(operation), path));
  }
  return hit;
}

Status FaultyFileSystem::CountSimple(FileOperation operation, const std::string& path) {
  auto hit = Count(operation, path);
  return hit ? FaultError(hit->fault, operation, path) : OkStatus();
}

Result<std::unique_ptr<File>> FaultyFileSystem::Open(const std::string& path, OpenMode mode) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kOpen, path));
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, base_->Open(path, mode));
  return std::unique_ptr<File>(std::make_unique<FaultyFile>(this, std::move(file), IsDirect(mode)));
}

Result<std::unique_ptr<ReadQueue>> FaultyFileSystem::NewReadQueue(const ReadQueueOptions& options) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kNewReadQueue, ""));
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<ReadQueue> queue, base_->NewReadQueue(options));
  return std::unique_ptr<ReadQueue>(std::make_unique<FaultyReadQueue>(this, std::move(queue)));
}

Status FaultyFileSystem::Rename(const std::string& from, const std::string& to) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kRename, to));
  return base_->Rename(from, to);
}

Status FaultyFileSystem::Remove(const std::string& path) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kRemove, path));
  return base_->Remove(path);
}

Status FaultyFileSystem::RemoveDirectory(const std::string& path) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kRemove, path));
  return base_->RemoveDirectory(path);
}

Status FaultyFileSystem::MakeDirectories(const std::string& path) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kMakeDirectories, path));
  return base_->MakeDirectories(path);
}

Status FaultyFileSystem::SyncDirectory(const std::string& path) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kSyncDirectory, path));
  return base_->SyncDirectory(path);
}

Result<std::vector<FileInfo>> FaultyFileSystem::List(const std::string& path) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kList, path));
  return base_->List(path);
}

Result<FileInfo> FaultyFileSystem::Stat(const std::string& path) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kStat, path));
  return base_->Stat(path);
}

Result<DiskSpace> FaultyFileSystem::Space(const std::string& path) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kSpace, path));
  return base_->Space(path);
}

Result<std::string> FaultyFileSystem::DiskIdentity(const std::string& path) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kStat, path));
  return base_->DiskIdentity(path);
}

Result<std::unique_ptr<FileLock>> FaultyFileSystem::Lock(const std::string& path, bool exclusive) {
  TERRACE_RETURN_IF_ERROR(CountSimple(FileOperation::kLock, path));
  return base_->Lock(path, exclusive);
}

}  // namespace terrace
