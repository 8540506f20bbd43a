#include "terrace/train/run_stores.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/core_binding.h"
#include "terrace/base/thread.h"
#include "terrace/base/units.h"
#include "terrace/store/group_block.h"
#include "terrace/store/manifest.h"
#include "terrace/train/index_plan.h"

namespace terrace {
namespace {

// The folder that holds those of the tables: of <folder>/<table>/shard-<s>.
std::string DiskFolder(const std::string& store_directory) {
  return FolderOf(FolderOf(store_directory));
}

// That this process may use.
std::size_t Cores() {
  const Result<std::vector<int>> units = CurrentUnits();
  return units.ok() ? units->size() : 1;
}

}  // namespace

std::vector<RunStores::Entry> RunStores::MakeEntries(const Job& job, const ModelPlan& plan,
                                                     const RunFolder& run) {
  std::vector<Entry> entries;
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    const RowSchema& schema = plan.tables[t].schema;
    for (std::uint32_t shard = 0; shard < static_cast<std::uint32_t>(job.ssd.shards); ++shard) {
      Entry entry;
      entry.table = t;
      entry.shard = shard;
      entry.table_name = schema.table();
      entry.schema = schema.ToText();
      entry.directory = run.StoreDirectory(schema.table(), shard);
      entry.recorded_directory = run.RecordedDirectory(schema.table(), shard);
      entry.row_bytes = schema.row_bytes();
      entry.index = IndexOf(job, plan, plan.tables[t]);
      const auto shards = static_cast<std::uint64_t>(job.ssd.shards);
      entry.expected_rows = (plan.tables[t].expected_keys + shards - 1) / shards;
      entry.group = plan.tables[t].group;
      // What it is anyhow needs no name in a checkpoint.
      if (entry.index == IndexKind::kGroup &&
          entry.group.block_bytes == GroupLayout::LeastBlock(entry.row_bytes)) {
        entry.group.block_bytes = 0;
      }
      entries.push_back(std::move(entry));
    }
  }
  return entries;
}

int RunStores::Openers(const Options& options) const {
  return options.background ? static_cast<int>(std::min(stores_.size(), Cores())) : 1;
}

std::vector<std::string> RunStores::directories() const {
  std::vector<std::string> all;
  for (const Entry& entry : stores_) all.push_back(entry.directory);
  return all;
}

StoreOptions RunStores::MakeOptions(const Job& job, const Options& options, const Entry& entry) {
  StoreOptions store;
  store.directory = entry.directory;
  store.table = entry.table_name;
  store.shard = entry.shard;
  store.row_bytes = entry.row_bytes;
  store.index = entry.index;
  store.expected_rows = entry.expected_rows;
  store.group = entry.group;
  store.file_bytes = job.ssd.file_bytes;
  store.most_file_rows = options.most_file_rows;
  store.compaction = job.ssd.compaction;
  store.stale_share = job.ssd.stale_share;
  store.most_run_bytes = most_bytes_;
  store.direct_io = job.ssd.direct;
  store.read_queue.backend = job.ssd.backend;
  store.read_queue.threads = std::max(4, 4 * job.ssd.io_threads);
  store.io_buffer_bytes = options.io_buffer_bytes;
  store.most_open_bytes = options.most_open_bytes / static_cast<std::uint64_t>(Openers(options));
  store.read_mode = job.ssd.read;
  if (job.ssd.merge_gap_bytes) store.merge_gap_bytes = *job.ssd.merge_gap_bytes;
  for (const Disk& disk : disks_) {
    if (disk.folder == DiskFolder(entry.directory)) {
      store.merge_gap_bytes = disk.known.cost.MergeGapBytes();
    }
  }
  // The shards of a batch are read side by side, each by a thread that checks its rows as well.
  if (options.background) {
    store.read_threads = (job.ssd.io_threads + job.ssd.shards - 1) / job.ssd.shards;
  }
  store.background_compaction = options.background;
  store.read_only = options.read_only;
  store.on_pressure = [this](std::uint64_t bytes) { return GiveRoom(bytes); };
  store.write_clock = &write_clock_;
  if (!options.expiry.empty()) store.expiry = options.expiry[entry.table];
  return store;
}

Status RunStores::FindDisks(FileSystem* fs, Clock* clock, const Job& job, const Options& options) {
  std::set<std::string> folders;
  for (const Entry& entry : stores_) folders.insert(DiskFolder(entry.directory));
  for (const std::string& folder : folders) {
    if (!options.read_only) TERRACE_RETURN_IF_ERROR(fs->MakeDirectories(folder));
    if (!PlansByCost(job)) {
      if (!options.read_only) TERRACE_RETURN_IF_ERROR(RemoveReadCostScratch(fs, folder));
      continue;
    }
    ReadCostOptions cost;
    cost.folder = folder;
    cost.read_queue = MakeOptions(job, options, stores_.front()).read_queue;
    cost.buffer_bytes = 0;
    for (const Entry& entry : stores_) {
      if (DiskFolder(entry.directory) != folder) continue;
      cost.buffer_bytes =
          std::max(cost.buffer_bytes, Store::ReadBufferBytes(entry.index, entry.row_bytes,
                                                             entry.group, options.io_buffer_bytes));
    }
    cost.direct_io = job.ssd.direct;
    cost.read_only = options.read_only;
    cost.quota = quota_;
    TERRACE_ASSIGN_OR_RETURN(KnownReadCost known, FindReadCost(fs, clock, cost));
    disks_.push_back({folder, std::move(known)});
  }
  if (options.read_only) return OkStatus();
  return FindMostBytes(fs, job);
}

Status RunStores::FindMostBytes(FileSystem* fs, const Job& job) {
  if (job.ssd.compaction != CompactionPolicy::kModelSize) return OkStatus();
  std::map<std::uint64_t, std::uint64_t> capacities;  // By device.
  for (const Entry& entry : stores_) {
    TERRACE_ASSIGN_OR_RETURN(const DiskSpace space, fs->Space(DiskFolder(entry.directory)));
    capacities[space.device] = space.capacity_bytes;
  }
  std::uint64_t capacity = 0;
  for (const auto& [device, bytes] : capacities) capacity += bytes;
  capacity = std::min(capacity, job.ssd.quota_bytes);
  // AIBox 4.4: model size * MAX_REPLICATION.
  const double share = std::min(1.0, 0.85 + job.ssd.over_provisioning);
  most_bytes_ = static_cast<std::uint64_t>(static_cast<double>(capacity) * share);
  return OkStatus();
}

Result<std::unique_ptr<RunStores>> RunStores::Create(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                                     RunFolder* run, const Job& job,
                                                     const ModelPlan& plan,
                                                     const Options& options) {
  std::unique_ptr<RunStores> stores(new RunStores(clock, quota, options.drop_oldest));
  stores->stores_ = MakeEntries(job, plan, *run);
  for (Entry& entry : stores->stores_) {
    std::vector<std::string> foreign;  // Told by who deleted the run before.
    TERRACE_RETURN_IF_ERROR(RemoveStore(fs, entry.directory, &foreign));
  }
  TERRACE_RETURN_IF_ERROR(stores->FindDisks(fs, clock, job, options));
  for (Entry& entry : stores->stores_) {
    TERRACE_ASSIGN_OR_RETURN(
        entry.store, Store::Create(fs, clock, quota, stores->MakeOptions(job, options, entry)));
  }
  return stores;
}

Result<std::unique_ptr<RunStores>> RunStores::Open(FileSystem* fs, Clock* clock, DiskQuota* quota,
                                                   RunFolder* run, const Job& job,
                                                   const ModelPlan& plan, const Options& options,
                                                   const Checkpoint& checkpoint,
                                                   std::span<const Checkpoint> kept) {
  std::unique_ptr<RunStores> stores(new RunStores(clock, quota, options.drop_oldest));
  stores->stores_ = MakeEntries(job, plan, *run);
  auto find = [](const Checkpoint& in, const Entry& entry) -> const Checkpoint::StoreManifest* {
    for (const Checkpoint::StoreManifest& store : in.stores) {
      if (store.table == entry.table_name && store.shard == entry.shard) return &store;
    }
    return nullptr;
  };
  for (Entry& entry : stores->stores_) {
    const Checkpoint::StoreManifest* manifest = find(checkpoint, entry);
    if (manifest == nullptr || checkpoint.stores.size() != stores->stores_.size()) {
      return InvalidArgumentError(
          fmt::format("checkpoint {} has {} stores, the job asks for {}: ssd.shards and the tables "
                      "must stay as they were",
                      checkpoint.id, checkpoint.stores.size(), stores->stores_.size()));
    }
    TERRACE_RETURN_IF_ERROR(CheckIndex(plan.tables[entry.table], *manifest, options));
    entry.index = manifest->index;
    entry.group.block_bytes = manifest->block_bytes;
    entry.directory = run->ResolveDirectory(manifest->directory);
  }
  TERRACE_RETURN_IF_ERROR(stores->FindDisks(fs, clock, job, options));
  // Each builds its index on its threads for reading.
  const auto open = [&](Entry* entry) -> Status {
    std::vector<ManifestReference> references;
    for (const Checkpoint& other : kept) {
      if (const Checkpoint::StoreManifest* reference = find(other, *entry))
        references.push_back(reference->manifest);
    }
    TERRACE_ASSIGN_OR_RETURN(
        entry->store, Store::Open(fs, clock, quota, stores->MakeOptions(job, options, *entry),
                                  find(checkpoint, *entry)->manifest, references));
    return OkStatus();
  };
  const std::size_t count = stores->stores_.size();
  std::vector<Status> opened(count);
  WorkerGroup openers("open", stores->Openers(options));
  openers.Run(static_cast<int>(count), [&](int i) {
    const auto s = static_cast<std::size_t>(i);
    opened[s] = open(&stores->stores_[s]);
  });
  for (const Status& status : opened) TERRACE_RETURN_IF_ERROR(status);
  return stores;
}

std::uint64_t RunStores::BytesOf(FileSystem* fs, const RunFolder& run,
                                 std::span<const Checkpoint> checkpoints) {
  std::set<std::pair<std::string, std::uint64_t>> counted;  // Folder and id.
  std::uint64_t bytes = 0;
  for (const Checkpoint& checkpoint : checkpoints) {
    for (const Checkpoint::StoreManifest& store : checkpoint.stores) {
      const std::string directory = run.ResolveDirectory(store.directory);
      const ManifestReference& reference = store.manifest;
      const Result<Manifest> manifest = ReadManifest(fs, directory, reference.id, reference.digest);
      if (!manifest.ok()) continue;
      bytes += WholeBlocks(reference.digest.size);
      for (const Manifest::File& file : manifest->files) {
        if (counted.emplace(directory, file.id).second) bytes += file.bytes;
      }
    }
  }
  return bytes;
}

std::vector<Store*> RunStores::table(std::size_t t) const {
  std::vector<Store*> stores;
  for (const Entry& entry : stores_) {
    if (entry.table == t) stores.push_back(entry.store.get());
  }
  return stores;
}

Result<std::vector<Checkpoint::StoreManifest>> RunStores::Commit(std::uint64_t id) {
  std::vector<Checkpoint::StoreManifest> manifests;
  for (Entry& entry : stores_) {
    Checkpoint::StoreManifest manifest;
    manifest.table = entry.table_name;
    manifest.shard = entry.shard;
    manifest.row_bytes = entry.row_bytes;
    manifest.index = entry.index;
    if (entry.index == IndexKind::kGroup) manifest.block_bytes = entry.group.block_bytes;
    manifest.directory = entry.recorded_directory;
    manifest.schema = entry.schema;
    TERRACE_ASSIGN_OR_RETURN(manifest.manifest, entry.store->Commit(id));
    manifests.push_back(std::move(manifest));
  }
  return manifests;
}

Status RunStores::Drop(std::uint64_t id) {
  Status first;
  for (Entry& entry : stores_) {
    Status dropped = entry.store->Drop(id);
    if (first.ok()) first = std::move(dropped);
  }
  return first;
}

void RunStores::SetKeepFree(std::uint64_t bytes, std::uint64_t files) {
  for (Entry& entry : stores_) entry.store->SetKeepFree(bytes, files);
}

void RunStores::OpenReserve() {
  for (Entry& entry : stores_) entry.store->OpenReserve();
}

Status RunStores::MergeFiles(std::uint64_t files) {
  for (Entry& entry : stores_) TERRACE_RETURN_IF_ERROR(entry.store->MergeFiles(files));
  return OkStatus();
}

Result<bool> RunStores::GiveRoom(std::uint64_t bytes) {
  const std::uint64_t used = quota_->used();
  for (Entry& entry : stores_) TERRACE_RETURN_IF_ERROR(entry.store->MakeRoom(bytes));
  // One after the other: what was dropped for another store may do for this one.
  MutexLock lock(&drop_mu_);
  if (quota_->HasFree(bytes) || quota_->used() < used) return true;
  return drop_oldest_ && drop_oldest_();
}

void RunStores::WantSweep(std::size_t table) {
  for (Entry& entry : stores_) {
    if (entry.table == table) entry.store->WantSweep();
  }
}

StoreStats RunStores::stats() const {
  StoreStats sum;
  for (const Entry& entry : stores_) sum += entry.store->stats();
  return sum;
}

std::set<std::string> RunStores::disk_folders() const {
  std::set<std::string> folders;
  for (const Entry& entry : stores_) folders.insert(DiskFolder(entry.directory));
  return folders;
}

std::uint64_t RunStores::index_bytes() const {
  std::uint64_t bytes = 0;
  for (const Entry& entry : stores_) bytes += entry.store->index_bytes();
  return bytes;
}

std::uint64_t RunStores::MostWriteBytes(std::size_t table, std::uint64_t rows,
                                        std::uint64_t in_order, std::uint64_t writes) const {
  return terrace::MostWriteBytes(this->table(table), rows, in_order, writes);
}

Status RunStores::CheckIndex(const TablePlan& table, const Checkpoint::StoreManifest& manifest,
                             const Options& options) {
  const bool by_group = manifest.index == IndexKind::kGroup;
  if (table.index != IndexChoice::kAuto && (table.index == IndexChoice::kGroup) != by_group) {
    return InvalidArgumentError(
        fmt::format("table '{0}' has an index by {1}, which is fixed for the life of a run: set "
                    "{2}.index to {1} or auto, or make a new run",
                    manifest.table, by_group ? "group" : "key", table.settings));
  }
  if (!by_group) return OkStatus();
  const std::uint32_t had = BlockDiskBytes(manifest.record_layout().row_bytes);
  if (table.group.block_bytes != 0 && table.group.block_bytes != had) {
    return InvalidArgumentError(
        fmt::format("table '{0}' has blocks of {1}KiB, which is fixed for the life of a run: set "
                    "{2}.group_block to {1}KiB or auto, or make a new run",
                    manifest.table, had >> 10, table.settings));
  }
  // Where the job leaves it to the run, others may have been planned for.
  const std::uint64_t least =
      Store::LeastBufferBytes(IndexKind::kGroup, manifest.row_bytes, {had, 0});
  if (options.read_only || options.io_buffer_bytes >= least) return OkStatus();
  return InvalidArgumentError(
      fmt::format("table '{0}' has blocks of {1}KiB, whose buffers take more memory than was "
                  "planned for: set {2}.index to group and {2}.group_block to {1}KiB",
                  manifest.table, had >> 10, table.settings));
}

std::vector<std::string> RunStores::DescribeIndexes() const {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < stores_.size(); ++i) {
    const Entry& entry = stores_[i];
    if (entry.shard != 0) continue;
    std::uint64_t bytes = 0, shards = 0;
    for (const Entry& other : stores_) {
      if (other.table != entry.table) continue;
      bytes += other.store->index_bytes();
      ++shards;
    }
    const double keys = static_cast<double>(shards * entry.expected_rows);
    if (entry.index == IndexKind::kKey) {
      lines.push_back(fmt::format("index: table {}, by key, about {} bytes a key", entry.table_name,
                                  kKeyIndexBytes));
    } else if (keys == 0) {
      lines.push_back(
          fmt::format("index: table {}, by group, {} now", entry.table_name, FormatBytes(bytes)));
    } else {
      lines.push_back(
          fmt::format("index: table {}, by group, about {:.1f} bytes a key for {} keys, {} now",
                      entry.table_name,
                      static_cast<double>(IndexBytes(entry.index, entry.row_bytes, entry.group,
                                                     shards * entry.expected_rows)) /
                          keys,
                      FormatCount(shards * entry.expected_rows), FormatBytes(bytes)));
    }
  }
  return lines;
}

void RunStores::Finish() {
  for (const Entry& entry : stores_) entry.store->Finish();
}

Status RunStores::background_status() const {
  for (const Entry& entry : stores_) TERRACE_RETURN_IF_ERROR(entry.store->background_status());
  return OkStatus();
}

std::vector<std::string> DescribeReads(const Job& job, std::span<const RunStores::Disk> disks) {
  if (job.ssd.read == ReadMode::kWholeFile) return {"reads: whole parameter files (ssd.read)"};
  if (job.ssd.merge_gap_bytes) {
    return {fmt::format("reads: gaps of up to {} are read over (ssd.merge_gap)",
                        FormatBytes(*job.ssd.merge_gap_bytes))};
  }
  std::vector<std::string> lines;
  for (const RunStores::Disk& disk : disks) {
    const ReadCost& cost = disk.known.cost;
    const char* origin = disk.known.origin == ReadCostOrigin::kMeasured     ? "measured"
                         : disk.known.origin == ReadCostOrigin::kRemembered ? "remembered"
                                                                            : "by default";
    lines.push_back(fmt::format(
        "reads: {:.2f} us a request + bytes / {:.2f} GB/s ({}) in {}, so gaps of up to {} are read "
        "over",
        cost.request_seconds * 1e6, cost.bytes_per_second * 1e-9, origin, disk.folder,
        FormatBytes(cost.MergeGapBytes())));
  }
  return lines;
}

std::string DescribeCompaction(const Job& job, std::uint64_t most_bytes) {
  if (job.ssd.compaction == CompactionPolicy::kModelSize) {
    return fmt::format(
        "compaction: of files that are stale to more than {:.0f} %, or to less if that is enough, "
        "while the run holds more than {} on disk",
        100 * job.ssd.stale_share, FormatBytes(most_bytes));
  }
  return fmt::format(
      "compaction: of files that are stale to more than {:.0f} %{}; they take up to {:.2f} times "
      "the space of the rows, and in each shard two files and two writes of evicted rows more",
      100 * job.ssd.stale_share,
      job.ssd.compaction == CompactionPolicy::kGain ? ", when all together are" : "",
      1 / (1 - job.ssd.stale_share));
}

}  // namespace terrace
