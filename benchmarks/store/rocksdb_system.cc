// RocksDB at the settings that served this work best: direct reads and compaction, no write-ahead
// log, no compression, index and filters in a cache of 256 MiB, Bloom filters of 10 bits, blocks of
// 4 KiB with a hash index, three memtables of 32 MiB, dynamic levels. Debian's build has no
// io_uring, so threads are its only way to many reads at a time; how many, the bench finds out.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include "store/system.h"
#include "terrace/base/thread.h"

namespace terrace {
namespace {

constexpr std::size_t kKeysPerRead = 64;
constexpr std::size_t kKeysPerWrite = 2000;

Status FromRocksDb(const rocksdb::Status& status) {
  return status.ok() ? OkStatus() : IoError("RocksDB: " + status.ToString());
}

// Its order of bytes is the order of numbers.
using KeyBytes = std::array<char, sizeof(Key)>;
KeyBytes BytesOf(Key key) {
  key = __builtin_bswap64(key);
  KeyBytes bytes;
  std::memcpy(bytes.data(), &key, sizeof key);
  return bytes;
}

class RocksDbSystem final : public StoreSystem {
 public:
  explicit RocksDbSystem(const SystemOptions& options)
      : row_bytes_(options.row_bytes),
        readers_("rocksdb-read", options.read_threads.front(), nullptr, ThreadPriority::kNormal),
        writers_("rocksdb-write", options.threads, nullptr, ThreadPriority::kNormal) {}

  Status Open(const std::string& folder) {
    rocksdb::BlockBasedTableOptions table;
    table.block_cache = rocksdb::NewLRUCache(std::size_t{256} << 20, 4, false, 0.3);
    table.cache_index_and_filter_blocks = true;
    table.cache_index_and_filter_blocks_with_high_priority = true;
    table.pin_l0_filter_and_index_blocks_in_cache = true;
    table.block_size = 4096;
    table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10, false));
    table.data_block_index_type =
        rocksdb::BlockBasedTableOptions::DataBlockIndexType::kDataBlockBinaryAndHash;
    table.data_block_hash_table_util_ratio = 0.75;
    table.format_version = 5;
    rocksdb::Options options;
    options.create_if_missing = true;
    options.compression = rocksdb::kNoCompression;
    options.use_direct_reads = true;
    options.use_direct_io_for_flush_and_compaction = true;
    options.IncreaseParallelism(2);
    options.max_background_jobs = 3;
    options.max_subcompactions = 2;
    options.write_buffer_size = std::size_t{32} << 20;
    options.max_write_buffer_number = 3;
    options.level0_file_num_compaction_trigger = 4;
    options.level0_slowdown_writes_trigger = 20;
    options.level0_stop_writes_trigger = 36;
    options.target_file_size_base = std::uint64_t{64} << 20;
    options.max_bytes_for_level_base = std::uint64_t{256} << 20;
    options.level_compaction_dynamic_level_bytes = true;
    options.max_open_files = -1;
    options.bytes_per_sync = 1 << 20;
    options.compaction_readahead_size = 1 << 20;
    options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    rocksdb::DB* db = nullptr;
    const Status status = FromRocksDb(rocksdb::DB::Open(options, folder, &db));
    db_.reset(db);
    return status;
  }

  Status Write(std::span<const Key> keys, std::span<const std::byte> rows,
               bool /*fresh*/) override {
    return InParts(
        &writers_, writers_.size(), keys.size(), kKeysPerWrite,
        [&](std::size_t begin, std::size_t end) {
          rocksdb::WriteOptions options;
          options.disableWAL = true;
          rocksdb::WriteBatch batch((end - begin) * (row_bytes_ + 24));
          for (std::size_t i = begin; i < end; ++i) {
            const KeyBytes key = BytesOf(keys[i]);
            const auto* row = reinterpret_cast<const char*>(rows.data() + i * row_bytes_);
            TERRACE_RETURN_IF_ERROR(FromRocksDb(batch.Put(rocksdb::Slice(key.data(), key.size()),
                                                          rocksdb::Slice(row, row_bytes_))));
          }
          return FromRocksDb(db_->Write(options, &batch));
        });
  }

  Status Read(std::span<const Key> keys, std::span<std::byte> rows,
              std::span<std::uint8_t> found) override {
    order_.resize(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      order_[i] = {keys[i], static_cast<std::uint32_t>(i)};
    }
    std::sort(order_.begin(), order_.end());
    return InParts(&readers_, read_threads_, keys.size(), kKeysPerRead,
                   [&](std::size_t begin, std::size_t end) {
                     const std::size_t count = end - begin;
                     std::array<KeyBytes, kKeysPerRead> bytes;
                     std::array<rocksdb::Slice, kKeysPerRead> slices;
                     std::array<rocksdb::PinnableSlice, kKeysPerRead> values;
                     std::array<rocksdb::Status, kKeysPerRead> statuses;
                     for (std::size_t i = 0; i < count; ++i) {
                       bytes[i] = BytesOf(order_[begin + i].first);
                       slices[i] = rocksdb::Slice(bytes[i].data(), bytes[i].size());
                     }
                     rocksdb::ReadOptions options;
                     options.verify_checksums = true;
                     db_->MultiGet(options, db_->DefaultColumnFamily(), count, slices.data(),
                                   values.data(), statuses.data(), /*sorted_input=*/true);
                     for (std::size_t i = 0; i < count; ++i) {
                       const std::uint32_t at = order_[begin + i].second;
                       found[at] = statuses[i].ok() && values[i].size() == row_bytes_ ? 1 : 0;
                       if (found[at] != 0) {
                         std::memcpy(rows.data() + at * row_bytes_, values[i].data(), row_bytes_);
                       } else if (!statuses[i].IsNotFound()) {
                         TERRACE_RETURN_IF_ERROR(FromRocksDb(statuses[i]));
                       }
                     }
                     return OkStatus();
                   });
  }

  bool UseReadThreads(int threads) override {
    read_threads_ = threads;
    return true;
  }

  Status Settle() override {
    TERRACE_RETURN_IF_ERROR(FromRocksDb(db_->Flush(rocksdb::FlushOptions())));
    for (bool busy = true; busy;) {
      busy = false;
      for (const char* what : {"rocksdb.compaction-pending", "rocksdb.num-running-compactions",
                               "rocksdb.num-running-flushes"}) {
        std::uint64_t value = 0;
        if (!db_->GetIntProperty(what, &value))
          return InternalError(std::string("RocksDB: ") + what);
        busy = busy || value > 0;
      }
      if (busy) db_->GetEnv()->SleepForMicroseconds(20'000);
    }
    return OkStatus();
  }

 private:
  // Runs work(begin, end) over [0, count) in parts of `part`, shared out among so many threads.
  template <typename Work>
  static Status InParts(WorkerGroup* group, int threads, std::size_t count, std::size_t part,
                        const Work& work) {
    std::atomic<std::size_t> next = 0;  // Relaxed: a counter.
    std::vector<Status> statuses(static_cast<std::size_t>(threads));
    group->Run(threads, [&](int thread) {
      Status* const status = &statuses[static_cast<std::size_t>(thread)];
      while (status->ok()) {
        const std::size_t begin = next.fetch_add(part, std::memory_order_relaxed);
        if (begin >= count) return;
        *status = work(begin, std::min(begin + part, count));
      }
    });
    for (const Status& status : statuses) TERRACE_RETURN_IF_ERROR(status);
    return OkStatus();
  }

  const std::size_t row_bytes_;
  WorkerGroup readers_;
  int read_threads_ = readers_.size();
  WorkerGroup writers_;
  std::unique_ptr<rocksdb::DB> db_;
  std::vector<std::pair<Key, std::uint32_t>> order_;
};

}  // namespace

Result<std::unique_ptr<StoreSystem>> OpenRocksDb(const SystemOptions& options) {
  auto system = std::make_unique<RocksDbSystem>(options);
  TERRACE_RETURN_IF_ERROR(system->Open(StoreSystem::StoreFolder(options)));
  return std::unique_ptr<StoreSystem>(std::move(system));
}

}  // namespace terrace
