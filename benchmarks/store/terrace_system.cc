#include <utility>
#include <vector>

#include "store/system.h"
#include "terrace/base/thread.h"
#include "terrace/io/file_system.h"
#include "terrace/store/read_cost.h"
#include "terrace/store/store.h"

namespace terrace {
namespace {

// Writes as the cache does: one thread brings a batch to the disk while another leads the index to
// the one before.
class TerraceSystem final : public StoreSystem {
 public:
  ~TerraceSystem() override {
    if (publisher_.joinable()) publisher_.Join();
  }

  Status Open(const SystemOptions& options) {
    FileSystem* const fs = FileSystem::Posix();
    StoreOptions store;
    store.directory = StoreFolder(options);
    store.table = "bench";
    store.row_bytes = options.row_bytes;
    store.stale_share = 1.0 / 3;  // Space of at most 1.5 times what lives.
    store.read_threads = options.threads;
    ReadCostOptions calibration;
    calibration.folder = options.folder;
    calibration.read_queue = store.read_queue;
    calibration.quota = &quota_;
    TERRACE_ASSIGN_OR_RETURN(const KnownReadCost known,
                             FindReadCost(fs, Clock::Real(), calibration));
    store.merge_gap_bytes = known.cost.MergeGapBytes();
    row_bytes_ = options.row_bytes;
    TERRACE_ASSIGN_OR_RETURN(store_, Store::Create(fs, Clock::Real(), &quota_, store));
    return OkStatus();
  }

  Status Write(std::span<const Key> keys, std::span<const std::byte> rows, bool fresh) override {
    sources_.resize(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) sources_[i] = rows.data() + i * row_bytes_;
    // As the cache knows it of each row that it read, or made.
    stored_.assign(keys.size(), fresh ? kNewKey : kStoredKey);
    TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<StagedRows> staged,
                             store_->Stage(keys, sources_, stored_));
    TERRACE_RETURN_IF_ERROR(AwaitPublisher());
    staged_ = std::move(staged);
    publisher_ = Thread("publish", ThreadPriority::kNormal,
                        [this] { published_ = store_->Publish(std::move(staged_)); });
    return store_->background_status();
  }

  Status Read(std::span<const Key> keys, std::span<std::byte> rows,
              std::span<std::uint8_t> found) override {
    TERRACE_RETURN_IF_ERROR(AwaitPublisher());
    targets_.resize(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) targets_[i] = rows.data() + i * row_bytes_;
    return store_->Read(keys, targets_, found);
  }

  Status Settle() override {
    TERRACE_RETURN_IF_ERROR(AwaitPublisher());
    // What only an older manifest names is neither compacted nor given back.
    TERRACE_RETURN_IF_ERROR(CommitNewest());
    TERRACE_RETURN_IF_ERROR(store_->CompactNow());
    return CommitNewest();
  }

 private:
  Status AwaitPublisher() {
    if (publisher_.joinable()) publisher_.Join();
    return published_;
  }

  Status CommitNewest() {
    TERRACE_RETURN_IF_ERROR(store_->Commit(++commit_).status());
    return store_->Drop(commit_ - 1);
  }

  DiskQuota quota_{std::uint64_t{1} << 42};
  std::size_t row_bytes_ = 0;
  std::uint64_t commit_ = 0;
  std::unique_ptr<Store> store_;
  std::unique_ptr<StagedRows> staged_;  // The publisher's, while it runs.
  Thread publisher_;
  Status published_;  // The publisher's, once it is joined.
  std::vector<const std::byte*> sources_;
  std::vector<std::byte*> targets_;
  std::vector<std::uint8_t> stored_;
};

}  // namespace

Result<std::unique_ptr<StoreSystem>> OpenTerrace(const SystemOptions& options) {
  auto system = std::make_unique<TerraceSystem>();
  TERRACE_RETURN_IF_ERROR(system->Open(options));
  return std::unique_ptr<StoreSystem>(std::move(system));
}

}  // namespace terrace
