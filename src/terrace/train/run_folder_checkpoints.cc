// RunFolderImpl: checkpoints and what belongs to one of them.
#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "terrace/base/log.h"
#include "terrace/base/sync_point.h"
#include "terrace/train/run_folder_impl.h"

namespace terrace {
namespace {

constexpr std::string_view kCheckpointMagic = "TERRCKPT";
constexpr std::string_view kDenseMagic = "TERRDENS";
constexpr std::string_view kFilterMagic = "TERRADMF";
constexpr std::uint32_t kDenseVersion = 1;
constexpr std::uint32_t kFilterVersion = 1;
static_assert(AdmissionFilter::kFrameRoomBytes == kFrameHeaderBytes);

// The number of "checkpoint-00000012"; nullopt: no such name.
std::optional<std::uint64_t> NumberOf(const std::string& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  const char* begin = name.data() + prefix.size();
  const char* end = name.data() + name.size();
  std::uint64_t number = 0;
  auto [rest, error] = std::from_chars(begin, end, number);
  if (error != std::errc() || rest != end || fmt::format("{:08}", number) != begin) {
    return std::nullopt;
  }
  return number;
}

// The same of "filter-00000012-<table>".
std::optional<std::uint64_t> NumberOfFilter(const std::string& name) {
  constexpr std::string_view kPrefix = "filter-";
  return NumberOf(name.substr(0, name.find('-', kPrefix.size())), kPrefix);
}

}  // namespace

bool IsOfCheckpoint(std::string name) {
  if (name.ends_with(".tmp")) name.resize(name.size() - 4);
  return NumberOf(name, "checkpoint-") || NumberOf(name, "dense-") || NumberOfFilter(name);
}

Result<bool> RunFolderImpl::Exists(const std::string& path) const {
  const Result<FileInfo> info = fs_->Stat(path);
  if (info.ok()) return true;
  if (info.status().code() == StatusCode::kNotFound) return false;
  return info.status();
}

Status RunFolderImpl::RemoveFile(const std::string& path) {
  Status status = fs_->Remove(path);
  return status.code() == StatusCode::kNotFound ? OkStatus() : status;
}

Status RunFolderImpl::ListTemporaries(const std::string& folder, std::vector<std::string>* paths) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, ListOrNone(folder));
  static const std::set<std::string> kOurs = {"RUN.tmp", "job.yaml.tmp", "summary.json.tmp",
                                              "metrics.jsonl.tmp", "removing.tmp"};
  for (const FileInfo& entry : entries) {
    const bool ours = kOurs.contains(entry.name) || IsOfCheckpoint(entry.name);
    if (entry.is_directory || !ours || !entry.name.ends_with(".tmp")) continue;
    paths->push_back(JoinPath(folder, entry.name));
  }
  return OkStatus();
}

Status RunFolderImpl::RemoveTemporaries(const std::string& folder) {
  std::vector<std::string> paths;
  TERRACE_RETURN_IF_ERROR(ListTemporaries(folder, &paths));
  for (const std::string& path : paths) TERRACE_RETURN_IF_ERROR(RemoveFile(path));
  return OkStatus();
}

Result<std::vector<std::uint64_t>> RunFolderImpl::ListCheckpointFiles() {
  std::vector<std::uint64_t> numbers;
  Result<std::vector<FileInfo>> entries = fs_->List(At("checkpoints"));
  if (!entries.ok()) {
    if (entries.status().code() == StatusCode::kNotFound) return numbers;
    return entries.status();
  }
  for (const FileInfo& entry : *entries) {
    const std::optional<std::uint64_t> number = NumberOf(entry.name, "checkpoint-");
    if (number) numbers.push_back(*number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

Result<std::vector<std::uint64_t>> RunFolderImpl::ListCheckpoints() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> files, ListCheckpointFiles());
  std::vector<std::uint64_t> whole;
  for (const std::uint64_t id : files) {
    Result<Checkpoint> checkpoint = ReadCheckpoint(id);
    if (checkpoint.ok()) {
      whole.push_back(id);
    } else if (checkpoint.status().code() == StatusCode::kCorruption) {
      if (!left_out_.insert(id).second) continue;
      LogText(LogLevel::kWarning,
              fmt::format("checkpoint {} is left out: {}", id, checkpoint.status().message()));
    } else if (checkpoint.status().code() != StatusCode::kNotFound) {  // A trainer dropped it.
      return checkpoint.status();
    }
  }
  return whole;
}

Result<Checkpoint> RunFolderImpl::ReadCheckpoint(std::uint64_t id) {
  const std::string path = CheckpointPath(id);
  TERRACE_ASSIGN_OR_RETURN(const std::string payload,
                           ReadFramedFile(fs_, path, kCheckpointMagic, kCheckpointVersion));
  Result<Checkpoint> checkpoint = DecodeCheckpoint(payload);
  if (!checkpoint.ok()) return checkpoint.status().WithContext(path);
  if (checkpoint->id != id) {
    return CorruptionError(fmt::format("{}: holds checkpoint {}", path, checkpoint->id));
  }
  return checkpoint;
}

Result<DenseState> RunFolderImpl::ReadDense(const Checkpoint& checkpoint) {
  const std::string path = DensePath(checkpoint.id);
  if (checkpoint.dense.size() != 1) {
    return CorruptionError(fmt::format("checkpoint {} names {} dense files; this program reads 1",
                                       checkpoint.id, checkpoint.dense.size()));
  }
  TERRACE_ASSIGN_OR_RETURN(
      const std::string payload,
      ReadFramedFile(fs_, path, kDenseMagic, kDenseVersion, &checkpoint.dense[0]));
  Result<DenseState> state = DecodeDense(payload);
  if (!state.ok()) return state.status().WithContext(path);
  return state;
}

Result<FileDigest> RunFolderImpl::WriteDense(std::uint64_t id, const DenseState& state) {
  SyncPoint::Hit("checkpoint.before_dense");
  std::string file = EncodeDense(state, kFrameHeaderBytes);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(file));
  FrameInPlace(kDenseMagic, kDenseVersion, bytes);
  TERRACE_RETURN_IF_ERROR(WriteFileAtomically(fs_, DensePath(id), bytes));
  return FileDigest{bytes.size(), Checksum64(bytes)};
}

Result<FileDigest> RunFolderImpl::WriteFilter(std::uint64_t id, const std::string& table,
                                              AdmissionFilter* filter) {
  SyncPoint::Hit("checkpoint.before_filter");
  TERRACE_RETURN_IF_ERROR(fs_->MakeDirectories(At("admission")));
  const std::span<std::byte> image = filter->image();
  FrameInPlace(kFilterMagic, kFilterVersion, image);
  TERRACE_RETURN_IF_ERROR(WriteFileAtomically(fs_, FilterPath(id, table), image));
  return FileDigest{image.size(), Checksum64(image)};
}

Status RunFolderImpl::ReadFilter(const Checkpoint& checkpoint, const std::string& table,
                                 AdmissionFilter* filter) {
  for (const Checkpoint::FilterFile& file : checkpoint.admission) {
    if (file.table != table) continue;
    const std::string path = FilterPath(checkpoint.id, table);
    TERRACE_RETURN_IF_ERROR(
        ReadFramedFileInto(fs_, path, kFilterMagic, kFilterVersion, file.digest, filter->image()));
    const Status head = filter->CheckHead();
    return head.ok() ? head : head.WithContext(path);
  }
  return CorruptionError(
      fmt::format("checkpoint {} names no admission filter of table '{}'", checkpoint.id, table));
}

Result<std::vector<FileInfo>> RunFolderImpl::ListOrNone(const std::string& folder) {
  Result<std::vector<FileInfo>> entries = fs_->List(folder);
  if (entries.status().code() == StatusCode::kNotFound) return std::vector<FileInfo>();
  return entries;
}

Status RunFolderImpl::RemoveFilters(std::uint64_t id) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, ListOrNone(At("admission")));
  for (const FileInfo& entry : entries) {
    if (NumberOfFilter(entry.name) != id) continue;
    TERRACE_RETURN_IF_ERROR(RemoveFile(JoinPath(At("admission"), entry.name)));
  }
  return OkStatus();
}

Status RunFolderImpl::KeepJob(const std::string& yaml) {
  Result<std::string> kept = ReadFileToString(fs_, At("job.yaml"));
  if (kept.ok() && *kept == yaml) return OkStatus();
  return WriteFileAtomically(fs_, At("job.yaml"), std::as_bytes(std::span(yaml)));
}

Result<std::uint64_t> RunFolderImpl::WriteCheckpoint(const Checkpoint& checkpoint,
                                                     DiskQuota* quota) {
  // For people: the checkpoint has the job too.
  TERRACE_RETURN_IF_ERROR(KeepJob(checkpoint.job_yaml));
  TERRACE_ASSIGN_OR_RETURN(const std::string payload, EncodeCheckpoint(checkpoint));
  const std::uint64_t bytes = WholeBlocks(kFrameHeaderBytes + payload.size());
  if (quota != nullptr) TERRACE_RETURN_IF_ERROR(quota->Reserve(bytes, 0));
  SyncPoint::Hit("checkpoint.before_publish");
  const Status written =
      WriteFramedFile(fs_, CheckpointPath(checkpoint.id), kCheckpointMagic,
                      CheckpointVersionOf(checkpoint), std::as_bytes(std::span(payload)))
          .status();
  if (!written.ok()) {
    if (quota != nullptr) quota->Release(bytes);
    return written;
  }
  SyncPoint::Hit("checkpoint.after_publish");
  return bytes;
}

Status RunFolderImpl::RewriteCheckpoint(const Checkpoint& checkpoint) {
  const std::string path = CheckpointPath(checkpoint.id);
  // A reader that holds the file that is there would not hold the one that takes its place.
  const Result<std::unique_ptr<FileLock>> alone = fs_->Lock(path, /*exclusive=*/true);
  if (!alone.ok()) {
    return alone.status().WithContext(fmt::format("writing checkpoint {} anew", checkpoint.id));
  }
  TERRACE_ASSIGN_OR_RETURN(const std::string payload, EncodeCheckpoint(checkpoint));
  return WriteFramedFile(fs_, path, kCheckpointMagic, CheckpointVersionOf(checkpoint),
                         std::as_bytes(std::span(payload)))
      .status();
}

Status RunFolderImpl::DropCheckpoint(std::uint64_t id) {
  const std::string path = CheckpointPath(id);
  Result<std::unique_ptr<FileLock>> alone = fs_->Lock(path, /*exclusive=*/true);
  if (!alone.ok() && alone.status().code() != StatusCode::kNotFound) {
    return alone.status().WithContext(fmt::format("dropping checkpoint {}", id));
  }
  SyncPoint::Hit("checkpoint.drop.before_remove");
  TERRACE_RETURN_IF_ERROR(RemoveFile(path));
  TERRACE_RETURN_IF_ERROR(fs_->SyncDirectory(At("checkpoints")));
  SyncPoint::Hit("checkpoint.drop.after_remove");
  TERRACE_RETURN_IF_ERROR(RemoveFile(DensePath(id)));
  return RemoveFilters(id);
}

Result<std::unique_ptr<FileLock>> RunFolderImpl::HoldCheckpoint(std::uint64_t id) {
  return fs_->Lock(CheckpointPath(id), /*exclusive=*/false);
}

Result<std::vector<std::string>> RunFolderImpl::ListStrays() {
  std::vector<std::string> paths;
  for (const std::string& folder : {path_, At("checkpoints"), At("dense"), At("admission")}) {
    TERRACE_RETURN_IF_ERROR(ListTemporaries(folder, &paths));
  }
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> kept, ListCheckpointFiles());
  const auto is_kept = [&kept](std::uint64_t id) {
    return std::binary_search(kept.begin(), kept.end(), id);
  };
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> dense, ListOrNone(At("dense")));
  for (const FileInfo& entry : dense) {
    const std::optional<std::uint64_t> number = NumberOf(entry.name, "dense-");
    if (number && !is_kept(*number)) paths.push_back(DensePath(*number));
  }
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> filters, ListOrNone(At("admission")));
  for (const FileInfo& entry : filters) {
    const std::optional<std::uint64_t> number = NumberOfFilter(entry.name);
    if (!number || is_kept(*number) || entry.name.ends_with(".tmp")) continue;
    paths.push_back(JoinPath(At("admission"), entry.name));
  }
  return paths;
}

Result<std::uint64_t> RunFolderImpl::NewestDense() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> dense, ListOrNone(At("dense")));
  std::uint64_t newest = 0;
  for (const FileInfo& entry : dense) {
    newest = std::max(newest, NumberOf(entry.name, "dense-").value_or(0));
  }
  return newest;
}

Status RunFolderImpl::RemoveStrays() {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::string> paths, ListStrays());
  for (const std::string& path : paths) TERRACE_RETURN_IF_ERROR(RemoveFile(path));
  return OkStatus();
}

Status WarnOfLostCheckpoint(RunFolder* run) {
  TERRACE_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> lost, run->FindLostCheckpoint());
  if (!lost) return OkStatus();
  LogText(LogLevel::kWarning,
          fmt::format("summary.json of '{}' tells of checkpoint {}, which is not there: an older "
                      "one is used",
                      run->path(), *lost));
  return OkStatus();
}

Result<HeldCheckpoint> HoldNewestCheckpoint(RunFolder* run) {
  // Each round loses only against a trainer that has dropped one more checkpoint meanwhile.
  constexpr int kRounds = 100;
  for (int round = 0; round < kRounds; ++round) {
    TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> ids, run->ListCheckpoints());
    if (ids.empty()) {
      TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> files, run->ListCheckpointFiles());
      if (files.empty()) {
        TERRACE_RETURN_IF_ERROR(run->RefuseLostCheckpoints());
        return NotFoundError(fmt::format(
            "the run '{}' has no checkpoint yet: wait for its first, or train it", run->path()));
      }
      TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> since, run->ListCheckpoints());
      if (!since.empty()) continue;  // The first one has come meanwhile.
      return CorruptionError(fmt::format("no checkpoint of the run '{}' can be read", run->path()));
    }
    const auto lost = [](const Status& status) {
      return status.code() == StatusCode::kNotFound || status.code() == StatusCode::kUnavailable;
    };
    Result<std::unique_ptr<FileLock>> hold = run->HoldCheckpoint(ids.back());
    if (!hold.ok() && lost(hold.status())) continue;
    if (!hold.ok()) return hold.status();
    // Read again: it may have gone between the list and the hold.
    Result<Checkpoint> checkpoint = run->ReadCheckpoint(ids.back());
    if (!checkpoint.ok() && lost(checkpoint.status())) continue;
    if (!checkpoint.ok()) return checkpoint.status();
    TERRACE_RETURN_IF_ERROR(WarnOfLostCheckpoint(run));
    return HeldCheckpoint{std::move(checkpoint).value(), std::move(hold).value()};
  }
  return UnavailableError(
      fmt::format("the checkpoints of '{}' change faster than they can be read", run->path()));
}

}  // namespace terrace
