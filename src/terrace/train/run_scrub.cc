#include "terrace/train/run_scrub.h"

#include <optional>
#include <utility>

#include <fmt/format.h>

#include "terrace/store/read_cost.h"
#include "terrace/train/metrics_file.h"
#include "terrace/train/run_reader.h"
#include "terrace/train/summary.h"

namespace terrace {
namespace {

// Where nothing says otherwise: past the page cache, to what the disk holds.
constexpr bool kDirectByDefault = true;

bool IsDamage(const Status& status) {
  return status.code() == StatusCode::kCorruption || status.code() == StatusCode::kNotFound;
}

// The disk opens a file and does not give what is in it.
bool IsUnreadable(FileSystem* fs, const std::string& path, const Status& status) {
  return status.code() == StatusCode::kIo && fs->Open(path, OpenMode::kRead).ok();
}

class RunScrubber {
 public:
  RunScrubber(FileSystem* fs, RunFolder* run) : fs_(fs), run_(run) {}

  Status ScrubAll(bool hold_checkpoints);
  RunScrub Take() { return std::move(scrub_); }

 private:
  // Notes what is wrong with a file; what is no damage as well as refused.
  void Note(const std::string& path, const Status& status, std::vector<Finding>* findings) {
    if (status.ok()) return;
    findings->push_back({path, 0, status.message()});
    if (!IsUnreadable(fs_, path, status)) Refuse(status);
  }
  void Refuse(const Status& status) {
    if (!status.ok() && !IsDamage(status) && scrub_.refused.ok()) scrub_.refused = status;
  }
  std::string At(const char* name) const { return JoinPath(run_->path(), name); }
  // Checkpoints and job.yaml mostly say the same.
  Result<Job> Parse(const std::string& yaml, const std::string& name) {
    if (!parsed_ || parsed_yaml_ != yaml) {
      TERRACE_ASSIGN_OR_RETURN(parsed_, ParseJob(yaml, name, {}));
      parsed_yaml_ = yaml;
    }
    return *parsed_;
  }
  std::string CheckpointPath(std::uint64_t id) const {
    return JoinPath(At("checkpoints"), CheckpointFileName(id));
  }
  // Of those that are there and can be held.
  Status ScrubCheckpoints(bool hold_checkpoints);
  Status ScrubCheckpoint(std::uint64_t id);
  void ScrubFilters(const Checkpoint& checkpoint, std::vector<Finding>* findings);
  Status ScrubStore(const Checkpoint::StoreManifest& named, CheckpointScrub* checkpoint);
  Status ScrubFiles(StoreScrub* store);
  Status ScrubReports();
  // Of lines that are all lines.
  void ScrubMetricsChecksum(const std::string& path, std::uint64_t expected);

  FileSystem* const fs_;
  RunFolder* const run_;
  RunScrub scrub_;
  std::set<std::string> seen_;  // Keys of the parameter files that were read.
  std::vector<std::unique_ptr<FileLock>> holds_;
  std::optional<Job> parsed_;
  std::string parsed_yaml_;
};

Status RunScrubber::ScrubAll(bool hold_checkpoints) {
  // A trainer that keeps one may drop it whenever we look.
  constexpr int kTries = 100;
  for (int i = 0; scrub_.checkpoints.empty() && i < kTries; ++i) {
    TERRACE_RETURN_IF_ERROR(ScrubCheckpoints(hold_checkpoints));
  }
  if (scrub_.checkpoints.empty()) {
    return UnavailableError(
        fmt::format("no checkpoint of '{}' can be held: another process is dropping or locking "
                    "them; try again",
                    run_->path()));
  }
  run_->ScrubMarkers(&scrub_.marker, &scrub_.refused);
  return ScrubReports();
}

Status RunScrubber::ScrubCheckpoints(bool hold_checkpoints) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> ids, run_->ListCheckpointFiles());
  if (ids.empty()) {
    TERRACE_RETURN_IF_ERROR(run_->RefuseLostCheckpoints());
    return NotFoundError(fmt::format(
        "the run '{}' has no checkpoint yet: wait for its first, or train it", run_->path()));
  }
  std::vector<std::uint64_t> held;
  for (const std::uint64_t id : ids) {
    if (hold_checkpoints) {
      Result<std::unique_ptr<FileLock>> hold = run_->HoldCheckpoint(id);
      const StatusCode code = hold.status().code();
      // A trainer is dropping it, or has.
      if (code == StatusCode::kNotFound || code == StatusCode::kUnavailable) continue;
      TERRACE_RETURN_IF_ERROR(hold.status());
      holds_.push_back(std::move(hold).value());
    }
    held.push_back(id);
  }
  for (const std::uint64_t id : held) TERRACE_RETURN_IF_ERROR(ScrubCheckpoint(id));
  return OkStatus();
}

Status RunScrubber::ScrubCheckpoint(std::uint64_t id) {
  CheckpointScrub checkpoint;
  checkpoint.id = id;
  const std::string path = CheckpointPath(id);
  Result<Checkpoint> read = run_->ReadCheckpoint(id);
  if (read.status().code() == StatusCode::kNotFound) return OkStatus();  // Dropped before the hold.
  Note(path, read.status(), &checkpoint.findings);
  if (read.ok()) {
    Result<Job> job = Parse(read->job_yaml, "the checkpoint's job");
    if (job.ok()) {
      checkpoint.job = std::move(job).value();
    } else {
      // The file is sound, so it is no damage either.
      Note(path, InvalidArgumentError(job.status().message()).WithContext(path),
           &checkpoint.findings);
    }
    Note(At(fmt::format("dense/dense-{:08}", id).c_str()), run_->ReadDense(*read).status(),
         &checkpoint.findings);
    ScrubFilters(*read, &checkpoint.findings);
    checkpoint.checkpoint = std::move(read).value();
    for (const Checkpoint::StoreManifest& named : checkpoint.checkpoint->stores) {
      TERRACE_RETURN_IF_ERROR(ScrubStore(named, &checkpoint));
    }
  }
  scrub_.checkpoints.push_back(std::move(checkpoint));
  return OkStatus();
}

void RunScrubber::ScrubFilters(const Checkpoint& checkpoint, std::vector<Finding>* findings) {
  for (const Checkpoint::StoreManifest& store : checkpoint.stores) {
    if (store.shard != 0) continue;  // A table has one filter.
    const std::string path =
        At(fmt::format("admission/filter-{:08}-{}", checkpoint.id, store.table).c_str());
    Note(path, ReadAdmissionFilter(run_, checkpoint, store.table, store.schema).status(), findings);
  }
}

Status RunScrubber::ScrubStore(const Checkpoint::StoreManifest& named,
                               CheckpointScrub* checkpoint) {
  StoreScrub store;
  store.options.directory = run_->ResolveDirectory(named.directory);
  store.options.layout = named.record_layout();
  store.options.direct_io = checkpoint->job ? checkpoint->job->ssd.direct : kDirectByDefault;
  scrub_.store_folders.insert(store.options.directory);
  scrub_.disk_folders.insert(FolderOf(FolderOf(store.options.directory)));
  Result<Manifest> manifest = ReadManifest(fs_, store.options.directory, named.manifest.id,
                                           named.manifest.digest, store.options.layout);
  Note(JoinPath(store.options.directory, ManifestFileName(named.manifest.id)), manifest.status(),
       &checkpoint->findings);
  if (!manifest.ok()) return OkStatus();
  store.manifest = std::move(manifest).value();
  TERRACE_RETURN_IF_ERROR(ScrubFiles(&store));
  checkpoint->stores.push_back(std::move(store));
  return OkStatus();
}

Status RunScrubber::ScrubFiles(StoreScrub* store) {
  TERRACE_ASSIGN_OR_RETURN(ScrubBuffers buffers, ScrubBuffers::Allocate(store->options.layout));
  for (const Manifest::File& file : store->manifest.files) {
    const std::string key = fmt::format("{}/{} {:x}", store->options.directory,
                                        ParameterFileName(file.id), file.footer_checksum);
    if (seen_.insert(key).second) {
      FileScrub scrub = ScrubFile(fs_, store->options, file, &buffers);
      scrub_.bytes_read += file.bytes;
      Refuse(scrub.refused.code() == StatusCode::kCorruption
                 ? InvalidArgumentError(scrub.refused.message())  // No damage makes such a file.
                 : scrub.refused);
      if (!scrub.sound()) scrub_.files.emplace(key, std::move(scrub));
    }
    const auto damaged = scrub_.files.find(key);
    if (damaged != scrub_.files.end()) store->damaged.push_back(&damaged->second);
  }
  return OkStatus();
}

Status RunScrubber::ScrubReports() {
  const std::string job = At("job.yaml");
  const Result<std::string> yaml = ReadFileToString(fs_, job);
  Note(job, yaml.status(), &scrub_.job);
  if (yaml.ok()) {
    const Status parsed = Parse(*yaml, job).status();
    if (!parsed.ok()) Note(job, CorruptionError(parsed.message()), &scrub_.job);
  }
  const std::string summary = At("summary.json");
  const Result<std::string> json = ReadFileToString(fs_, summary);
  if (json.ok()) {
    // One of a newer version too, which a flipped bit makes of ours: it is made anew.
    const Status read = SummaryFromJson(*json).status();
    if (!read.ok()) scrub_.summary.push_back({summary, 0, read.WithContext(summary).message()});
    TERRACE_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> lost, run_->FindLostCheckpoint());
    if (lost) {
      scrub_.summary.push_back(
          {summary, 0, fmt::format("tells of checkpoint {}, which is not there", *lost)});
    }
  } else if (json.status().code() != StatusCode::kNotFound) {  // Before the end there is none.
    Note(summary, json.status(), &scrub_.summary);
  }
  std::optional<std::uint64_t> checksum;
  for (auto it = scrub_.checkpoints.rbegin(); it != scrub_.checkpoints.rend(); ++it) {
    if (!it->checkpoint) continue;
    scrub_.metrics_bytes = it->checkpoint->metrics_bytes;
    checksum = it->checkpoint->metrics_checksum;
    break;
  }
  const std::string metrics = At("metrics.jsonl");
  Result<std::vector<DamagedMetrics>> lines =
      ScrubMetrics(fs_, metrics, scrub_.metrics_bytes, NewerLines::kRefused);
  // Nobody wrote a line of a newer version where the checkpoint says that the file was another.
  if (lines.status().code() == StatusCode::kInvalidArgument &&
      (!checksum || CheckMetrics(fs_, metrics, scrub_.metrics_bytes, *checksum).status().code() ==
                        StatusCode::kCorruption)) {
    lines = ScrubMetrics(fs_, metrics, scrub_.metrics_bytes, NewerLines::kDamaged);
  }
  Note(metrics, lines.status(), &scrub_.metrics);
  Refuse(lines.status());  // Not even what is whole of it can be read.
  if (lines.ok()) scrub_.damaged_metrics = std::move(lines).value();
  for (const DamagedMetrics& stretch : scrub_.damaged_metrics) {
    scrub_.metrics.push_back({metrics, stretch.offset, stretch.what});
  }
  if (scrub_.metrics.empty() && checksum) ScrubMetricsChecksum(metrics, *checksum);
  for (const std::string& folder : scrub_.disk_folders) {
    const Status status = CheckRememberedCost(fs_, folder);
    // What a newer program remembers is none of ours.
    const bool damaged = status.code() == StatusCode::kCorruption;
    Note(JoinPath(folder, kReadCostName), damaged ? status : OkStatus(), &scrub_.read_costs);
  }
  return OkStatus();
}

void RunScrubber::ScrubMetricsChecksum(const std::string& path, std::uint64_t expected) {
  const Status status = CheckMetrics(fs_, path, scrub_.metrics_bytes, expected).status();
  Note(path, status, &scrub_.metrics);
  scrub_.metrics_differ = status.code() == StatusCode::kCorruption;
}

}  // namespace

std::vector<Finding> RunScrub::Findings() const {
  std::vector<Finding> all = marker;
  const auto add = [&](const std::vector<Finding>& some) {
    all.insert(all.end(), some.begin(), some.end());
  };
  for (const CheckpointScrub& checkpoint : checkpoints) add(checkpoint.findings);
  for (const auto& [key, file] : files) add(file.findings);
  for (const auto* some : {&job, &summary, &metrics, &read_costs}) add(*some);
  return all;
}

Result<RunScrub> ScrubRun(FileSystem* fs, RunFolder* run, bool hold_checkpoints) {
  RunScrubber scrubber(fs, run);
  TERRACE_RETURN_IF_ERROR(scrubber.ScrubAll(hold_checkpoints));
  return scrubber.Take();
}

}  // namespace terrace
