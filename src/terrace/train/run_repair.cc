#include "terrace/train/run_repair.h"

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/rng.h"
#include "terrace/base/sync_point.h"
#include "terrace/base/units.h"
#include "terrace/store/group_block.h"
#include "terrace/store/read_cost.h"
#include "terrace/train/metrics_file.h"
#include "terrace/train/run_reader.h"

namespace terrace {
namespace {

// Of the budget, for rows that may be outdated; the rest is for buffers and what is lost.
constexpr std::uint64_t kBudgetShare = 4;

// Of blocks whose keys these are: which hashes their rows' keys have, the last ones included. A
// block ends where the next one of its group starts, or before: with the group at the latest.
std::vector<HashRange> RangesOfBlocks(const std::vector<Key>& blocks, std::uint64_t groups) {
  std::vector<HashRange> ranges;
  for (const Key block : blocks) {
    const std::uint64_t start = MixKey(block), group = RangeOfHash(start, groups);
    ranges.push_back(
        {start, group + 1 == groups ? ~std::uint64_t{0} : FirstHashOf(group + 1, groups) - 1});
  }
  return ranges;
}

// Empty: nothing. A lost block takes rows along that nothing names, and so does a lost record
// without its key, which may be newer than any other record: all rows of older files go with it.
std::string LostUnnamedText(const StoreScrub& store, const StoreLosses& losses) {
  const bool blocks = store.manifest.groups > 0;
  if (!blocks && losses.unknown_rows == 0) return "";
  const std::uint64_t lost = losses.dropped.size() + losses.outdated.size() + losses.unknown_rows;
  if (lost == 0) return "";
  return fmt::format("{} {} of table '{}' are lost or may be outdated", lost,
                     blocks ? "blocks of rows" : "rows", store.options.layout.table);
}

}  // namespace

std::uint64_t RepairPlan::lost_rows() const {
  std::uint64_t rows = 0;
  for (const StoreRepair& store : stores) {
    rows += store.losses.dropped.size() + store.losses.outdated.size() + store.losses.unknown_rows;
  }
  return rows;
}

Result<std::unique_ptr<RunRepair>> RunRepair::Open(FileSystem* fs, const std::string& run,
                                                   const RepairOptions& options) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<RunFolder> folder,
                           RunFolder::Open(fs, run, RunFolder::Mode::kRepair, nullptr));
  TERRACE_ASSIGN_OR_RETURN(RunScrub scrub, ScrubRun(fs, folder.get(), /*hold_checkpoints=*/false));
  if (!scrub.refused.ok()) {
    return scrub.refused.WithContext("nothing was repaired, for this is no damage");
  }
  std::unique_ptr<RunRepair> repair(new RunRepair(fs, std::move(folder), std::move(scrub)));
  TERRACE_RETURN_IF_ERROR(repair->MakePlan(options));
  return repair;
}

Status RunRepair::MakePlan(const RepairOptions& options) {
  plan_.findings = scrub_.Findings();
  TERRACE_RETURN_IF_ERROR(ChooseBase(options));
  ChooseDropped();
  plan_.markers = !scrub_.marker.empty();
  plan_.job = !scrub_.job.empty();
  // One of a checkpoint that the run does not end with would tell of another run.
  const bool ends_elsewhere = plan_.base != plan_.newest || plan_.successor > 0;
  plan_.summary = !scrub_.summary.empty() ||
                  (ends_elsewhere && fs_->Stat(JoinPath(folder_->path(), "summary.json")).ok());
  for (const DamagedMetrics& stretch : scrub_.damaged_metrics) {
    plan_.metrics_bytes += stretch.bytes;
  }
  plan_.metrics_accepted = scrub_.metrics_differ;
  for (const Finding& finding : scrub_.read_costs) plan_.read_costs.push_back(finding.file);
  TERRACE_RETURN_IF_ERROR(FindStrays());
  return CheckQuota(options);
}

Status RunRepair::ChooseBase(const RepairOptions& options) {
  const std::vector<CheckpointScrub>& all = scrub_.checkpoints;
  plan_.newest = all.back().id;
  if (all.back().checkpoint) plan_.newest_examples = all.back().checkpoint->cursor.examples;
  std::string why_not;
  // Where a checkpoint has all that nothing could name, the run goes back.
  for (const bool drops_unnamed : {false, true}) {
    why_not.clear();
    for (auto it = all.rbegin(); it != all.rend() && base_ == nullptr; ++it) {
      if (options.back_to && it->id != *options.back_to) continue;
      if (!it->holds()) {
        why_not += fmt::format("\n  checkpoint {}: {}", it->id, it->findings[0].what);
        continue;
      }
      std::string why;
      TERRACE_RETURN_IF_ERROR(FindBaseLosses(*it, drops_unnamed, &why));
      if (why.empty()) {
        base_ = &*it;
      } else {
        why_not += fmt::format("\n  checkpoint {}: {}", it->id, why);
      }
    }
  }
  if (base_ == nullptr && options.back_to) {
    std::vector<std::uint64_t> ids;
    for (const CheckpointScrub& checkpoint : all) ids.push_back(checkpoint.id);
    return InvalidArgumentError(
        fmt::format("--back-to {}: the run can't go on from there; its checkpoints are {}{}",
                    *options.back_to, fmt::join(ids, ", "), why_not));
  }
  if (base_ == nullptr) {
    return CorruptionError(
        fmt::format("'{}' can't be repaired, and nothing was changed: there is no checkpoint left "
                    "to go on from. Put a copy of the damaged files back, or train anew with "
                    "--overwrite.{}",
                    folder_->path(), why_not));
  }
  plan_.base = base_->id;
  plan_.base_examples = base_->checkpoint->cursor.examples;
  if (base_->rows_damaged()) plan_.successor = plan_.newest + 1;
  return OkStatus();
}

Status RunRepair::FindBaseLosses(const CheckpointScrub& base, bool drops_unnamed,
                                 std::string* why_not) {
  losses_.assign(base.stores.size(), {});
  plan_.stores.clear();
  for (std::size_t s = 0; s < base.stores.size(); ++s) {
    const StoreScrub& store = base.stores[s];
    if (store.damaged.empty()) continue;
    TERRACE_ASSIGN_OR_RETURN(const ExpiryRule expiry,
                             ExpiryOfSchemaText(base.checkpoint->stores[s].schema));
    Result<StoreLosses> losses =
        FindLosses(fs_, store.options, store.manifest, store.damaged, expiry.on(),
                   base.job->memory.budget_bytes / kBudgetShare);
    if (losses.status().code() == StatusCode::kOutOfMemory) {
      *why_not = losses.status().message();
      return OkStatus();
    }
    TERRACE_ASSIGN_OR_RETURN(losses_[s], std::move(losses));
    const std::uint64_t groups = store.manifest.groups;
    if (!drops_unnamed) *why_not = LostUnnamedText(store, losses_[s]);
    if (!why_not->empty()) return OkStatus();
    RepairPlan::StoreRepair repair;
    if (groups > 0) {
      repair.block_rows =
          GroupLayout::Of(store.manifest.block_row_bytes, BlockDiskBytes(store.manifest.row_bytes))
              .most_rows;
      repair.dropped_hashes = RangesOfBlocks(losses_[s].dropped, groups);
      repair.outdated_hashes = RangesOfBlocks(losses_[s].outdated, groups);
    }
    repair.table = store.options.layout.table;
    repair.shard = store.options.layout.shard;
    for (const FileScrub* file : store.damaged) repair.files.push_back(file->path);
    repair.losses = losses_[s];
    plan_.stores.push_back(std::move(repair));
  }
  return OkStatus();
}

void RunRepair::ChooseDropped() {
  for (const CheckpointScrub& checkpoint : scrub_.checkpoints) {
    const bool whole = checkpoint.holds() && !checkpoint.rows_damaged();
    if (checkpoint.id > plan_.base || !whole) plan_.dropped.push_back(checkpoint.id);
    if (checkpoint.id < plan_.base && whole && plan_.lost_rows() > 0) {
      plan_.undamaged = checkpoint.id;
      plan_.undamaged_examples = checkpoint.checkpoint->cursor.examples;
    }
  }
}

Status RunRepair::ListStoreStrays(const std::vector<const CheckpointScrub*>& kept,
                                  std::vector<std::string>* paths, std::uint64_t* bytes) {
  for (const std::string& folder : scrub_.store_folders) {
    std::vector<Manifest> manifests;
    for (const CheckpointScrub* checkpoint : kept) {
      for (const StoreScrub& store : checkpoint->stores) {
        if (store.options.directory == folder) manifests.push_back(store.manifest);
      }
    }
    TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> strays,
                             StoreStrays(fs_, folder, manifests));
    for (const FileInfo& stray : strays) {
      paths->push_back(JoinPath(folder, stray.name));
      *bytes += stray.size;
    }
  }
  return OkStatus();
}

Status RunRepair::FindStrays() {
  TERRACE_ASSIGN_OR_RETURN(plan_.strays, folder_->ListStrays());
  for (const std::string& path : plan_.strays) {
    TERRACE_ASSIGN_OR_RETURN(const FileInfo info, fs_->Stat(path));
    plan_.stray_bytes += info.size;
  }
  for (const std::string& folder : scrub_.disk_folders) {
    const Result<std::vector<FileInfo>> entries = fs_->List(folder);
    if (entries.status().code() == StatusCode::kNotFound) continue;
    if (!entries.ok()) return entries.status();
    for (const FileInfo& entry : *entries) {
      // Of a measurement that was killed, or a temporary of what is remembered.
      if (entry.is_directory || !IsReadCostName(entry.name)) continue;
      if (entry.name == kReadCostName) continue;
      plan_.strays.push_back(JoinPath(folder, entry.name));
      plan_.stray_bytes += entry.size;
    }
  }
  std::vector<const CheckpointScrub*> all;
  for (const CheckpointScrub& checkpoint : scrub_.checkpoints) all.push_back(&checkpoint);
  return ListStoreStrays(all, &plan_.strays, &plan_.stray_bytes);
}

Status RunRepair::CheckQuota(const RepairOptions& options) {
  if (plan_.successor == 0) return OkStatus();
  for (std::size_t s = 0; s < base_->stores.size(); ++s) {
    const StoreScrub& store = base_->stores[s];
    plan_.write_bytes += RewriteBytes(store.options, store.manifest, store.damaged, losses_[s]);
  }
  for (const FileDigest& dense : base_->checkpoint->dense) {
    plan_.write_bytes += WholeBlocks(dense.size);
  }
  for (const Checkpoint::FilterFile& filter : base_->checkpoint->admission) {
    plan_.write_bytes += WholeBlocks(filter.digest.size);
  }
  TERRACE_ASSIGN_OR_RETURN(const std::string payload, EncodeCheckpoint(*base_->checkpoint));
  plan_.write_bytes += WholeBlocks(kFrameHeaderBytes + payload.size()) + kBlockBytes;
  std::uint64_t used = 0;
  std::set<std::string> folders = scrub_.store_folders;
  folders.insert(folder_->path());
  folders.insert(JoinPath(folder_->path(), "checkpoints"));
  folders.insert(JoinPath(folder_->path(), "dense"));
  folders.insert(JoinPath(folder_->path(), "admission"));
  const std::set<std::string> strays(plan_.strays.begin(), plan_.strays.end());
  for (const std::string& folder : folders) {
    const Result<std::vector<FileInfo>> entries = fs_->List(folder);
    if (entries.status().code() == StatusCode::kNotFound) continue;
    if (!entries.ok()) return entries.status();
    for (const FileInfo& entry : *entries) {
      if (entry.is_directory || strays.contains(JoinPath(folder, entry.name))) continue;
      used += WholeBlocks(entry.size);
    }
  }
  const std::uint64_t quota = options.quota_bytes.value_or(base_->job->ssd.quota_bytes);
  if (used <= quota && plan_.write_bytes <= quota - used) return OkStatus();
  return OutOfRoomError(fmt::format(
      "ssd.quota of {} has no room for the repair, which writes up to {} before it removes what is "
      "damaged: {} are in use. Nothing was changed; --quota {}MiB lets it have the room",
      FormatBytes(quota), FormatBytes(plan_.write_bytes), FormatBytes(used),
      (used + plan_.write_bytes + (std::uint64_t{1} << 20) - 1) >> 20));
}

Status RunRepair::Apply() {
  SyncPoint::Hit("repair.before_change");
  if (plan_.markers) {
    TERRACE_RETURN_IF_ERROR(folder_->RestoreMarkers(*base_->checkpoint, *base_->job));
  }
  TERRACE_RETURN_IF_ERROR(RemoveFiles(plan_.strays));
  TERRACE_RETURN_IF_ERROR(MendReports());
  if (plan_.successor > 0) TERRACE_RETURN_IF_ERROR(PublishSuccessor());
  SyncPoint::Hit("repair.before_drop");
  return RemoveDropped();
}

Status RunRepair::RemoveFiles(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    const Status status = fs_->Remove(path);
    if (!status.ok() && status.code() != StatusCode::kNotFound) return status;
  }
  return OkStatus();
}

Status RunRepair::MendReports() {
  std::vector<std::string> gone = plan_.read_costs;
  if (plan_.summary) gone.push_back(JoinPath(folder_->path(), "summary.json"));
  TERRACE_RETURN_IF_ERROR(RemoveFiles(gone));
  if (plan_.job) {
    const std::string& yaml = base_->checkpoint->job_yaml;
    TERRACE_RETURN_IF_ERROR(WriteFileAtomically(fs_, JoinPath(folder_->path(), "job.yaml"),
                                                std::as_bytes(std::span(yaml))));
  }
  const std::string metrics = JoinPath(folder_->path(), "metrics.jsonl");
  if (!scrub_.damaged_metrics.empty()) {
    SyncPoint::Hit("repair.before_metrics");
    TERRACE_RETURN_IF_ERROR(
        MendMetrics(fs_, metrics, scrub_.metrics_bytes, scrub_.damaged_metrics));
  }
  if (scrub_.metrics.empty()) return OkStatus();
  for (const CheckpointScrub& named : scrub_.checkpoints) {
    const bool dropped =
        std::find(plan_.dropped.begin(), plan_.dropped.end(), named.id) != plan_.dropped.end();
    if (dropped || !named.checkpoint) continue;
    Checkpoint checkpoint = *named.checkpoint;
    TERRACE_RETURN_IF_ERROR(TakeMetricsAsTheyAre(&checkpoint));
    if (checkpoint.metrics_checksum == named.checkpoint->metrics_checksum) continue;
    const Status status = folder_->RewriteCheckpoint(checkpoint);
    if (status.code() == StatusCode::kUnavailable) {
      return status.WithContext("a reader holds a checkpoint: repair again when it has ended");
    }
    TERRACE_RETURN_IF_ERROR(status);
  }
  return OkStatus();
}

Status RunRepair::TakeMetricsAsTheyAre(Checkpoint* checkpoint) {
  if (!checkpoint->metrics_checksum || scrub_.metrics.empty()) return OkStatus();
  TERRACE_ASSIGN_OR_RETURN(const RunningChecksum64 checksum,
                           ChecksumOfMetrics(fs_, JoinPath(folder_->path(), "metrics.jsonl"),
                                             checkpoint->metrics_bytes));
  checkpoint->metrics_checksum = checksum.value();
  return OkStatus();
}

Status RunRepair::PublishSuccessor() {
  Checkpoint next = *base_->checkpoint;
  next.id = plan_.successor;
  TERRACE_RETURN_IF_ERROR(TakeMetricsAsTheyAre(&next));
  for (std::size_t s = 0; s < base_->stores.size(); ++s) {
    const StoreScrub& store = base_->stores[s];
    TERRACE_ASSIGN_OR_RETURN(
        next.stores[s].manifest,
        RewriteStore(fs_, store.options, store.manifest, store.damaged, losses_[s], next.id));
  }
  TERRACE_ASSIGN_OR_RETURN(const DenseState dense, folder_->ReadDense(*base_->checkpoint));
  TERRACE_ASSIGN_OR_RETURN(next.dense[0], folder_->WriteDense(next.id, dense));
  TERRACE_RETURN_IF_ERROR(CopyFilters(&next));
  SyncPoint::Hit("repair.before_publish");
  TERRACE_RETURN_IF_ERROR(folder_->WriteCheckpoint(next).status());
  SyncPoint::Hit("repair.after_publish");
  return OkStatus();
}

Status RunRepair::CopyFilters(Checkpoint* next) {
  next->admission.clear();
  for (const Checkpoint::StoreManifest& store : base_->checkpoint->stores) {
    if (store.shard != 0) continue;  // A table has one filter.
    TERRACE_ASSIGN_OR_RETURN(
        const std::unique_ptr<AdmissionFilter> filter,
        ReadAdmissionFilter(folder_.get(), *base_->checkpoint, store.table, store.schema));
    if (filter == nullptr) continue;
    TERRACE_ASSIGN_OR_RETURN(const FileDigest digest,
                             folder_->WriteFilter(next->id, store.table, filter.get()));
    next->admission.push_back({store.table, digest});
  }
  return OkStatus();
}

Status RunRepair::RemoveDropped() {
  for (const std::uint64_t id : plan_.dropped) {
    const Status status = folder_->DropCheckpoint(id);
    if (status.code() == StatusCode::kUnavailable) {
      return status.WithContext(
          "the repair is published, but a reader holds a checkpoint that has to go: repair again "
          "when it has ended");
    }
    TERRACE_RETURN_IF_ERROR(status);
  }
  // What only those named. The successor's manifests are read as they now lie there.
  TERRACE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> ids, folder_->ListCheckpoints());
  std::vector<CheckpointScrub> kept;
  for (const std::uint64_t id : ids) {
    CheckpointScrub checkpoint;
    checkpoint.id = id;
    TERRACE_ASSIGN_OR_RETURN(const Checkpoint read, folder_->ReadCheckpoint(id));
    for (const Checkpoint::StoreManifest& named : read.stores) {
      StoreScrub store;
      store.options.directory = folder_->ResolveDirectory(named.directory);
      store.options.layout = named.record_layout();
      TERRACE_ASSIGN_OR_RETURN(store.manifest,
                               ReadManifest(fs_, store.options.directory, named.manifest.id,
                                            named.manifest.digest, store.options.layout));
      checkpoint.stores.push_back(std::move(store));
    }
    kept.push_back(std::move(checkpoint));
  }
  std::vector<const CheckpointScrub*> pointers;
  for (const CheckpointScrub& checkpoint : kept) pointers.push_back(&checkpoint);
  std::vector<std::string> strays;
  std::uint64_t bytes = 0;
  TERRACE_RETURN_IF_ERROR(ListStoreStrays(pointers, &strays, &bytes));
  SyncPoint::Hit("repair.before_remove");
  return RemoveFiles(strays);
}

}  // namespace terrace
