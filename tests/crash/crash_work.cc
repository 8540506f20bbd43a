#include "crash/crash_work.h"

#include <cstring>

#include <fmt/format.h>

#include "terrace/base/clock.h"
#include "terrace/data/example_source.h"
#include "terrace/train/run_marker.h"
#include "terrace/train/run_scrub.h"

namespace terrace {
namespace {

constexpr std::uint64_t kKeys = 12'000;
constexpr std::uint64_t kHotKeys = 1'500;       // Half of the work is on these.
constexpr std::size_t kMostRows = 400;          // Of one step.
constexpr std::size_t kKeep = 2;                // Checkpoints.
constexpr std::uint64_t kExamplesAPoint = 800;  // At which rows expire.
// A generation ends in the point at which its row expires.
constexpr int kPointBits = 24;
constexpr std::uint64_t kNeverExpires = (std::uint64_t{1} << kPointBits) - 1;
constexpr int kMostReclaims = 12;  // Compactions until space has come back.
constexpr std::uint64_t kIoBufferBytes = std::uint64_t{256} << 10;

Key KeyAt(std::uint64_t i) { return MixKey(i * 77 + 5); }

std::uint64_t PointOf(std::uint64_t generation) { return generation & kNeverExpires; }
bool HasExpired(std::uint64_t generation, std::uint64_t points) {
  return PointOf(generation) <= points;
}
std::uint64_t GenerationIn(const std::byte* row) {
  std::uint64_t generation;
  std::memcpy(&generation, row, sizeof generation);
  return generation;
}

// The only bytes that a key may have at that generation; 0: as it is created.
void FillRow(Key key, std::uint64_t generation, std::span<std::byte> row) {
  std::memcpy(row.data(), &generation, sizeof generation);
  const std::uint64_t seed = HashCombine(key, generation);
  for (std::size_t i = sizeof generation; i < row.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t word = HashCombine(seed, i);
    std::memcpy(row.data() + i, &word, sizeof word);
  }
}

Status CheckBytes(Key key, std::uint64_t generation, std::span<const std::byte> row) {
  std::vector<std::byte> wanted(row.size());
  FillRow(key, generation, wanted);
  if (std::memcmp(row.data(), wanted.data(), row.size()) == 0) return OkStatus();
  return InternalError(
      fmt::format("key {:#x} has other bytes than those of its generation {:#x}; as if of {:#x}",
                  key, generation, GenerationIn(row.data())));
}

bool IsAlive(const Generations& rows, Key key, std::uint64_t points) {
  const auto found = rows.find(key);
  return found != rows.end() && !HasExpired(found->second, points);
}

// The row that is found for a key: the newest, or, of a key whose row has expired, any of its rows
// that has expired as well.
Status CheckRow(const Generations& rows, Key key, std::uint64_t points,
                std::span<const std::byte> row) {
  const auto found = rows.find(key);
  if (found == rows.end()) {
    return InternalError(fmt::format("key {:#x} was erased, or never committed", key));
  }
  if (!HasExpired(found->second, points)) return CheckBytes(key, found->second, row);
  const std::uint64_t generation = GenerationIn(row.data());
  if (!HasExpired(generation, points)) {
    return InternalError(
        fmt::format("key {:#x} has expired, but its generation {:#x} is there", key, generation));
  }
  return CheckBytes(key, generation, row);
}

// Whoever erases rows holds them meanwhile: no sweep takes them first.
class AllHeld final : public RowHolder {
 public:
  void WithHeld(std::span<const Key> keys,
                const std::function<void(std::span<const std::uint8_t>)>& drop) override {
    drop(std::vector<std::uint8_t>(keys.size(), 1));
  }
};

DenseState DenseOf(std::uint64_t id, std::uint64_t examples) {
  DenseState state;
  state.steps = examples;
  state.names = {"value"};
  state.buffers = {std::vector<float>(100, static_cast<float>(id))};
  return state;
}

// The rows of a checkpoint are those of the snapshot, and no others.
Status CheckRows(FileSystem* fs, RunFolder* run, const Checkpoint& checkpoint,
                 const Snapshot& snapshot) {
  const std::uint64_t points = snapshot.examples / kExamplesAPoint;
  std::uint64_t rows = 0, wanted = 0;
  for (const auto& [key, generation] : snapshot.rows) {
    wanted += HasExpired(generation, points) ? 0 : 1;
  }
  for (const Checkpoint::StoreManifest& named : checkpoint.stores) {
    StoreOptions options;
    options.directory = run->ResolveDirectory(named.directory);
    options.table = named.table;
    options.shard = named.shard;
    options.row_bytes = named.row_bytes;
    options.io_buffer_bytes = kIoBufferBytes;
    options.background_compaction = false;
    options.read_only = true;
    TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store,
                             Store::Open(fs, Clock::Real(), nullptr, options, named.manifest, {}));
    TERRACE_RETURN_IF_ERROR(
        store->ForEachRow(std::uint64_t{4} << 20, [&](const RowView& view) -> Status {
          rows += IsAlive(snapshot.rows, view.key, points) ? 1 : 0;
          return CheckRow(snapshot.rows, view.key, points, view.row);
        }));
  }
  if (rows == wanted) return OkStatus();
  return InternalError(fmt::format("{} rows are there, {} were committed", rows, wanted));
}

Status CheckCheckpoint(FileSystem* fs, RunFolder* run, const CheckpointScrub& there,
                       const Snapshot& snapshot) {
  const Checkpoint& checkpoint = *there.checkpoint;
  TERRACE_ASSIGN_OR_RETURN(const DenseState dense, run->ReadDense(checkpoint));
  const DenseState wanted = DenseOf(snapshot.id, snapshot.examples);
  if (checkpoint.cursor.examples != snapshot.examples || dense.steps != wanted.steps ||
      dense.buffers != wanted.buffers) {
    return InternalError("its cursor or dense state is another's");
  }
  return CheckRows(fs, run, checkpoint, snapshot);
}

}  // namespace

bool WorkerExpiry::SetExamples(std::uint64_t examples) {
  const std::uint64_t points = examples / kExamplesAPoint;
  return points_.exchange(points, std::memory_order_relaxed) != points;
}

bool WorkerExpiry::MayGo(const std::byte* row) const {
  return HasExpired(GenerationIn(row), points());
}

void Expected::Apply(Note note, Snapshot snapshot) {
  switch (note) {
    case Note::kPending:
      pending = std::move(snapshot);
      break;
    case Note::kDone:
      kept[snapshot.id] = std::move(*pending);
      pending.reset();
      break;
    case Note::kDropping:
      dropping.insert(snapshot.id);
      break;
    case Note::kDeleting:
      deleting = true;
      break;
    case Note::kDeleted:
      *this = Expected();
      break;
  }
}

WorkerTiers WorkerTiers::Draw(IndexKind index, std::uint64_t seed) {
  constexpr const char* kPolicies[] = {"s3_fifo", "lru_lfu", "pass_lfu"};
  constexpr const char* kCompactions[] = {"gain", "stale_share", "model_size"};
  constexpr const char* kReads[] = {"planned", "whole_file"};
  constexpr int kShards[] = {1, 2, 4};
  constexpr int kFilterBits[] = {10, 3, 0};
  const std::uint64_t drawn = MixKey(seed);
  WorkerTiers tiers;
  tiers.index = index;
  tiers.policy = kPolicies[drawn % 3];
  tiers.compaction = kCompactions[drawn / 3 % 3];
  tiers.read = kReads[drawn / 9 % 2];
  tiers.shards = kShards[drawn / 18 % 3];
  if (index == IndexKind::kGroup) tiers.filter_bits = kFilterBits[drawn / 54 % 3];
  return tiers;
}

std::string WorkerTiers::ToText() const {
  return fmt::format(
      "index {}, group_filter_bits {}, cache.policy {}, ssd.compaction {}, ssd.read {}, ssd.shards "
      "{} of a new run",
      index == IndexKind::kGroup ? "group" : "key", filter_bits, policy, compaction, read, shards);
}

Result<Job> MakeWorkerJob(const std::string& run, const WorkerTiers& tiers) {
  const std::string yaml = fmt::format(
      "seed: 1\noutput: {}\ndata: {{format: synthetic, rows: 1000, cardinality: 100}}\n"
      "table: {{dim: 8, optimizer: {{type: adagrad, learning_rate: 0.1}}, index: {}, "
      "expected_keys: 600{}}}\n"
      "network: {{type: dnn, hidden: [4]}}\n"
      "training: {{batch: 512, minibatch: 512, threads: 1}}\n"
      "memory: {{budget: 256MiB}}\n"
      "cache: {{policy: {}}}\n"
      "ssd: {{shards: {}, file_size: 64KiB, stale_share: 0.4, merge_gap: 16KiB, read: {}, "
      "compaction: {}, quota: {}}}\n",
      run, tiers.index == IndexKind::kGroup ? "group" : "key",
      tiers.index == IndexKind::kGroup ? fmt::format(", group_filter_bits: {}", tiers.filter_bits)
                                       : "",
      tiers.policy, tiers.shards, tiers.read, tiers.compaction,
      // Of model_size, so little that it has to compact.
      tiers.compaction == "model_size" ? "2MiB, over_provisioning: 0" : "1GiB");
  return ParseJob(yaml, "the harness's job", {});
}

Result<ModelPlan> MakeWorkerPlan(FileSystem* fs, const Job& job) {
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<ExampleSource> source,
                           OpenSource(fs, job.train_data));
  return MakeModelPlan(job, source->schema());
}

Worker::Worker(FileSystem* fs, Job job, ModelPlan plan, ExpectedState* expected,
               const Options& options)
    : fs_(fs),
      shards_(static_cast<int>(job.ssd.shards)),
      plan_(std::move(plan)),
      expected_(expected),
      options_(options),
      job_(std::move(job)),
      rng_(options.seed),
      next_generation_((options.round << 24) + 1) {}

Status Worker::Work(bool anew) {
  TERRACE_RETURN_IF_ERROR(anew ? StartAnew() : Open(RunFolder::Mode::kResume));
  const std::uint64_t operations = 5 + rng_.Below(options_.most_operations);
  for (std::uint64_t i = 0; i < operations; ++i) TERRACE_RETURN_IF_ERROR(Operation());
  return OkStatus();
}

Status Worker::Operation() {
  const std::uint64_t choice = rng_.Below(100);
  if (choice < 56) return Step();
  if (choice < 68) return Peek();
  if (choice < 80) return TakeCheckpoint();
  if (choice < 85) return Compact();
  if (choice < 90) return cache_->WriteAhead(rng_.Below(2000));
  if (choice < 94) return Erase(RandomKeys());
  if (choice < 96) return Reclaim();
  if (choice < 99) return Open(RunFolder::Mode::kResume);
  return StartAnew();
}

void Worker::Close() {
  cache_.reset();
  stores_.reset();
  run_.reset();
  quota_.reset();
}

Status Worker::Open(RunFolder::Mode mode) {
  Close();
  // The job's only says when model_size compacts.
  quota_ = std::make_unique<DiskQuota>(std::uint64_t{1} << 30);
  job_.ssd.shards = shards_;
  if (mode == RunFolder::Mode::kResume) {
    const Result<RunMarker> marker = ReadRunMarker(fs_, job_.output);
    if (marker.ok()) job_.ssd.shards = static_cast<int>(marker->shards);
  }
  TERRACE_ASSIGN_OR_RETURN(run_, RunFolder::Open(fs_, job_.output, mode, &job_));
  TERRACE_ASSIGN_OR_RETURN(kept_, run_->ListCheckpoints());
  TERRACE_RETURN_IF_ERROR(run_->RemoveStrays());
  RunStores::Options options;
  options.io_buffer_bytes = kIoBufferBytes;
  options.background = options_.background;
  options.expiry = {&expiry_};
  if (kept_.empty()) {
    rows_.clear();
    examples_ = 0;
    expiry_.SetExamples(0);
    TERRACE_ASSIGN_OR_RETURN(stores_, RunStores::Create(fs_, Clock::Real(), quota_.get(),
                                                        run_.get(), job_, plan_, options));
  } else {
    std::vector<Checkpoint> checkpoints;
    for (const std::uint64_t id : kept_) {
      TERRACE_ASSIGN_OR_RETURN(Checkpoint checkpoint, run_->ReadCheckpoint(id));
      checkpoints.push_back(std::move(checkpoint));
    }
    const Expected expected = expected_->Read();
    const auto found = expected.kept.find(kept_.back());
    if (found == expected.kept.end()) {
      return InternalError(fmt::format("checkpoint {} was never committed", kept_.back()));
    }
    rows_ = found->second.rows;
    examples_ = checkpoints.back().cursor.examples;
    expiry_.SetExamples(examples_);
    TERRACE_ASSIGN_OR_RETURN(
        stores_, RunStores::Open(fs_, Clock::Real(), quota_.get(), run_.get(), job_, plan_, options,
                                 checkpoints.back(), checkpoints));
  }
  return MakeCache();
}

Status Worker::MakeCache() {
  const RowSchema& schema = plan_.tables[0].schema;
  RowCacheOptions options;
  options.row_bytes = schema.row_bytes();
  options.capacity_bytes = std::uint64_t{256} << 10;
  options.chunk_bytes = std::uint64_t{16} << 10;
  options.background = options_.background;
  options.flush_bytes = std::uint64_t{32} << 10;
  options.eviction = job_.cache.eviction;
  options.create_row = [bytes = schema.row_bytes()](Key key, std::byte* row) {
    FillRow(key, 0, {row, bytes});
  };
  options.expiry = &expiry_;
  TERRACE_ASSIGN_OR_RETURN(cache_, RowCache::Create(options, stores_->table(0)));
  return OkStatus();
}

std::vector<Key> Worker::RandomKeys() {
  std::set<Key> keys;
  const std::size_t n = 1 + rng_.Below(kMostRows);
  while (keys.size() < n) keys.insert(KeyAt(rng_.Below(rng_.Below(2) == 0 ? kHotKeys : kKeys)));
  return {keys.begin(), keys.end()};
}

std::uint64_t Worker::NewGeneration(Key key) {
  const std::uint64_t life = MixKey(key) % 8;
  const std::uint64_t point = life < 3 ? expiry_.points() + 1 + life : kNeverExpires;
  return next_generation_++ << kPointBits | point;
}

Status Worker::Step() {
  const std::size_t bytes = plan_.tables[0].schema.row_bytes();
  const std::vector<Key> keys = RandomKeys();
  TERRACE_ASSIGN_OR_RETURN(PinnedRows pinned, cache_->Pin(keys));
  for (std::size_t w = 0; w < keys.size(); ++w) {
    const std::span<const std::byte> row(pinned.row(w), bytes);
    const bool created =
        GenerationIn(pinned.row(w)) == 0 && !IsAlive(rows_, keys[w], expiry_.points());
    TERRACE_RETURN_IF_ERROR(created ? CheckBytes(keys[w], 0, row)
                                    : CheckRow(rows_, keys[w], expiry_.points(), row));
  }
  // Some are only looked at.
  const std::size_t trained = rng_.Below(4) == 0 ? rng_.Below(keys.size()) : keys.size();
  for (std::size_t w = 0; w < trained; ++w) {
    const std::uint64_t generation = NewGeneration(keys[w]);
    FillRow(keys[w], generation, {pinned.row(w), bytes});
    rows_[keys[w]] = generation;
  }
  pinned.MarkDirty(0, trained);
  examples_ += trained;
  if (expiry_.SetExamples(examples_)) stores_->WantSweep(0);
  return OkStatus();
}

Status Worker::Peek() {
  const std::size_t bytes = plan_.tables[0].schema.row_bytes();
  const std::vector<Key> keys = RandomKeys();
  std::vector<std::byte> memory(keys.size() * bytes);
  std::vector<std::byte*> rows;
  for (std::size_t i = 0; i < keys.size(); ++i) rows.push_back(memory.data() + i * bytes);
  std::vector<std::uint8_t> found(keys.size());
  TERRACE_RETURN_IF_ERROR(cache_->Peek(keys, rows, found));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (found[i] == 0 && IsAlive(rows_, keys[i], expiry_.points())) {
      return InternalError(fmt::format("key {:#x} is lost", keys[i]));
    }
    if (found[i] == 0) continue;
    TERRACE_RETURN_IF_ERROR(CheckRow(rows_, keys[i], expiry_.points(), {rows[i], bytes}));
  }
  return OkStatus();
}

Status Worker::Compact() {
  for (Store* store : stores_->table(0)) TERRACE_RETURN_IF_ERROR(store->CompactNow());
  return OkStatus();
}

Status Worker::Erase(const std::vector<Key>& keys) {
  TERRACE_RETURN_IF_ERROR(cache_->FlushDirty());
  cache_.reset();
  const std::vector<Store*> stores = stores_->table(0);
  std::vector<std::vector<Key>> by_shard(stores.size());
  for (const Key key : keys) {
    by_shard[ShardOfHash(MixKey(key), static_cast<std::uint32_t>(stores.size()))].push_back(key);
    // Of an expired row a store may have forgotten all but an older version, which has expired too.
    if (IsAlive(rows_, key, expiry_.points())) rows_.erase(key);
  }
  AllHeld held;
  for (std::size_t shard = 0; shard < stores.size(); ++shard) {
    stores[shard]->SetHolder(&held);
    const Status status = stores[shard]->Erase(by_shard[shard]);
    stores[shard]->SetHolder(nullptr);
    TERRACE_RETURN_IF_ERROR(status);
  }
  return MakeCache();
}

Status Worker::Reclaim() {
  const bool all = rng_.Below(2) == 0;
  std::vector<Key> keys;
  for (const auto& [key, generation] : rows_) {
    if (all || HashCombine(key, examples_) % 8 != 0) keys.push_back(key);
  }
  TERRACE_RETURN_IF_ERROR(Erase(keys));
  // Deletion records are looked at again when other files have gone, so that some work goes on.
  StoreStats stats;
  for (int time = 0; time < kMostReclaims; ++time) {
    // First: what a flush makes stale behind a compaction is compacted beside the checkpoints, the
    // first of which then holds the files of before.
    TERRACE_RETURN_IF_ERROR(cache_->FlushDirty());
    TERRACE_RETURN_IF_ERROR(Compact());
    // No older checkpoint keeps a file.
    for (std::size_t i = 0; i < kKeep; ++i) TERRACE_RETURN_IF_ERROR(TakeCheckpoint());
    // Which promises no more than its limit of the run.
    if (job_.ssd.compaction == CompactionPolicy::kModelSize) return OkStatus();
    stats = stores_->stats();
    if (stats.disk_bytes - stats.spare_bytes <= MostBytes(stats)) return OkStatus();
    for (int step = 0; step < 4; ++step) TERRACE_RETURN_IF_ERROR(Step());
  }
  return InternalError(
      fmt::format("{} rows were erased, {} bytes of rows are left, and {} bytes in {} files",
                  keys.size(), stats.live_bytes, stats.disk_bytes, stats.files));
}

std::uint64_t Worker::MostBytes(const StoreStats& stats) const {
  // Of a file's header, key section and footer, and what alignment adds.
  constexpr std::uint64_t kFrameBytes = std::uint64_t{16} << 10;
  const std::uint64_t shards = stores_->size();
  return static_cast<std::uint64_t>(static_cast<double>(stats.live_bytes) /
                                    (1 - job_.ssd.stale_share)) +
         stats.files * kFrameBytes +
         // What is too little to be worth a rewrite, and the manifests.
         shards * (job_.ssd.file_bytes + kKeep * kFrameBytes);
}

Status Worker::TakeCheckpoint() {
  TERRACE_RETURN_IF_ERROR(cache_->FlushDirty());
  Checkpoint checkpoint;
  checkpoint.id = kept_.empty() ? 1 : kept_.back() + 1;
  checkpoint.cursor.examples = examples_;
  TERRACE_RETURN_IF_ERROR(expected_->Add(Note::kPending, {checkpoint.id, examples_, rows_}));
  TERRACE_ASSIGN_OR_RETURN(checkpoint.stores, stores_->Commit(checkpoint.id));
  TERRACE_ASSIGN_OR_RETURN(const FileDigest dense,
                           run_->WriteDense(checkpoint.id, DenseOf(checkpoint.id, examples_)));
  checkpoint.dense.push_back(dense);
  checkpoint.job_yaml = JobToYaml(job_);
  TERRACE_RETURN_IF_ERROR(run_->WriteCheckpoint(checkpoint).status());
  TERRACE_RETURN_IF_ERROR(expected_->Add(Note::kDone, {checkpoint.id, 0, {}}));
  kept_.push_back(checkpoint.id);
  while (kept_.size() > kKeep) {
    const std::uint64_t id = kept_.front();
    TERRACE_RETURN_IF_ERROR(expected_->Add(Note::kDropping, {id, 0, {}}));
    TERRACE_RETURN_IF_ERROR(run_->DropCheckpoint(id));
    TERRACE_RETURN_IF_ERROR(stores_->Drop(id));
    kept_.erase(kept_.begin());
  }
  return OkStatus();
}

Status Worker::StartAnew() {
  TERRACE_RETURN_IF_ERROR(expected_->Add(Note::kDeleting, {}));
  TERRACE_RETURN_IF_ERROR(Open(RunFolder::Mode::kOverwrite));
  return expected_->Add(Note::kDeleted, {});
}

Status CheckRun(FileSystem* fs, const std::string& run_path, ExpectedState* state) {
  const Expected expected = state->Read();
  std::vector<Snapshot> there;
  Result<std::unique_ptr<RunFolder>> run =
      RunFolder::Open(fs, run_path, RunFolder::Mode::kScrub, nullptr);
  Result<RunScrub> scrub = run.ok() ? ScrubRun(fs, run->get(), false) : run.status();
  if (!scrub.ok() && scrub.status().code() != StatusCode::kNotFound) return scrub.status();
  if (scrub.ok()) {
    const std::vector<Finding> findings = scrub->Findings();
    // A run that is being deleted loses its parts one after another, checkpoints first.
    if (!findings.empty()) {
      return InternalError(
          fmt::format("{} at byte {}: {}", findings[0].file, findings[0].offset, findings[0].what));
    }
    for (const CheckpointScrub& checkpoint : scrub->checkpoints) {
      const auto kept = expected.kept.find(checkpoint.id);
      const bool pending = expected.pending && expected.pending->id == checkpoint.id;
      if (kept == expected.kept.end() && !pending) {
        return InternalError(fmt::format("checkpoint {} was never begun", checkpoint.id));
      }
      const Snapshot& snapshot = pending ? *expected.pending : kept->second;
      TERRACE_RETURN_IF_ERROR(CheckCheckpoint(fs, run->get(), checkpoint, snapshot)
                                  .WithContext(fmt::format("checkpoint {}", checkpoint.id)));
      there.push_back(snapshot);
    }
  }
  for (const auto& [id, snapshot] : expected.kept) {
    if (expected.deleting || expected.dropping.contains(id)) continue;
    bool found = false;
    for (const Snapshot& one : there) found = found || one.id == id;
    if (!found) return InternalError(fmt::format("checkpoint {} is gone", id));
  }
  return state->Restart(there);
}

}  // namespace terrace
