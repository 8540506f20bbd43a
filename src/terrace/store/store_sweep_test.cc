// Rows that may go leave the index, and the disk after them; what somebody holds stays.
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"
#include "terrace/store/scrub.h"
#include "terrace/store/store.h"
#include "terrace/store/testing/store_harness.h"

namespace terrace {
namespace {

constexpr std::uint32_t kRowBytes = 40;
constexpr std::uint64_t kKeys = 600;
using Row = std::vector<std::byte>;

// A row begins with the point at which it may go.
class Deadlines final : public RowExpiry {
 public:
  std::uint64_t points() const override { return points_.load(); }
  bool MayGo(const std::byte* row) const override {
    std::uint64_t deadline;
    std::memcpy(&deadline, row, sizeof deadline);
    return deadline <= points();
  }
  void Pass() { ++points_; }

 private:
  std::atomic<std::uint64_t> points_{0};
};

class Held final : public RowHolder {
 public:
  void WithHeld(std::span<const Key> asked,
                const std::function<void(std::span<const std::uint8_t>)>& drop) override {
    std::vector<std::uint8_t> held;
    for (const Key key : asked) held.push_back(keys.contains(key) ? 1 : 0);
    drop(held);
  }
  std::set<Key> keys;
};

Row MakeRow(Key key, std::uint64_t deadline, std::uint64_t generation) {
  Row row = TestRow(key, generation, kRowBytes);
  std::memcpy(row.data(), &deadline, sizeof deadline);
  return row;
}

class SweepTest : public testing::Test {
 protected:
  SweepTest() : quota_(std::uint64_t{1} << 30) {
    options_ = StoreHarness::TinyOptions();
    options_.directory = "/rows";
    options_.row_bytes = kRowBytes;
    options_.background_compaction = false;
    options_.spare_files = 0;
    options_.expiry = &expiry_;
  }
  ~SweepTest() override {
    if (store_ != nullptr) store_->SetHolder(nullptr);
  }
  void Create() {
    auto store = Store::Create(&fs_, Clock::Real(), &quota_, options_);
    TERRACE_ASSERT_OK(store);
    store_ = std::move(store).value();
  }
  void CommitAndReopen() {
    auto manifest = store_->Commit(++commits_);
    TERRACE_ASSERT_OK(manifest);
    std::vector<Finding> findings;
    TERRACE_ASSERT_OK(ScrubManifest(
        &fs_, {options_.directory, RecordLayout::Of(options_.table, options_.shard, kRowBytes)},
        *manifest, &findings));
    ASSERT_TRUE(findings.empty()) << findings[0].what;
    store_.reset();
    auto store = Store::Open(&fs_, Clock::Real(), &quota_, options_, *manifest, {&*manifest, 1});
    TERRACE_ASSERT_OK(store);
    store_ = std::move(store).value();
  }
  // stored: as a cache would say it.
  void Write(const std::vector<std::pair<Key, Row>>& rows, bool say_stored) {
    std::vector<Key> keys;
    std::vector<const std::byte*> bytes;
    std::vector<std::uint8_t> stored;
    for (const auto& [key, row] : rows) {
      keys.push_back(key);
      bytes.push_back(row.data());
      stored.push_back(say_stored && held_.keys.contains(key) ? 1 : 0);
      model_[key] = row;
    }
    TERRACE_ASSERT_OK(store_->Write(keys, bytes, stored));
  }
  // The row that the store has; empty: none.
  Row Stored(Key key) {
    Row row(kRowBytes);
    std::byte* const at = row.data();
    std::uint8_t found = 0;
    TERRACE_EXPECT_OK(store_->Read({&key, 1}, {&at, 1}, {&found, 1}));
    return found != 0 ? row : Row();
  }
  // What has not expired is there; of the rest at most versions that may go.
  void Check() {
    for (const auto& [key, row] : model_) {
      const Row stored = Stored(key);
      if (!expiry_.MayGo(row.data())) {
        ASSERT_EQ(stored, row) << key;
      } else if (!stored.empty()) {
        ASSERT_TRUE(expiry_.MayGo(stored.data())) << key;
      }
    }
  }
  std::uint64_t DiskBytes() {
    std::uint64_t bytes = 0;
    const auto files = fs_.List("/rows");
    TERRACE_EXPECT_OK(files);
    for (const FileInfo& file : *files) bytes += file.size;
    return bytes;
  }

  MemoryFileSystem fs_;
  DiskQuota quota_;
  Deadlines expiry_;
  Held held_;
  StoreOptions options_;
  std::unique_ptr<Store> store_;
  std::map<Key, Row> model_;
  std::uint64_t commits_ = 0;
};

TEST_F(SweepTest, ExpiredRowsLeaveTheDiskThoughNothingWasOverwritten) {
  options_.compaction = CompactionPolicy::kStaleShare;  // So that no file keeps much of them.
  Create();
  for (Key key = 0; key < kKeys; ++key)
    Write({{key, MakeRow(key, key % 10 == 0 ? 9 : 1, 1)}}, false);
  TERRACE_ASSERT_OK(store_->CompactNow());
  const std::uint64_t before = DiskBytes();
  EXPECT_EQ(store_->stats().live_rows, kKeys);
  expiry_.Pass();
  EXPECT_EQ(store_->stats().live_rows, kKeys);
  TERRACE_ASSERT_OK(store_->CompactNow());
  EXPECT_EQ(store_->stats().live_rows, kKeys / 10);
  EXPECT_EQ(store_->stats().rows_expired, kKeys - kKeys / 10);
  EXPECT_LT(DiskBytes(), before / 3);
  Check();
  CommitAndReopen();
  Check();
  EXPECT_EQ(store_->stats().live_rows, kKeys / 10);
}

TEST_F(SweepTest, AFileOfExpiredRowsGoesWithoutBeingRewritten) {
  Create();
  std::vector<std::pair<Key, Row>> rows;
  for (Key key = 0; key < kKeys; ++key) rows.emplace_back(key, MakeRow(key, 1, 1));
  Write(rows, false);
  expiry_.Pass();
  TERRACE_ASSERT_OK(store_->CompactNow());
  EXPECT_EQ(store_->stats().rows_compacted, 0u);
  EXPECT_EQ(store_->stats().files, 0u);
  EXPECT_EQ(DiskBytes(), 0u);
}

TEST_F(SweepTest, ACheckpointKeepsItsFiles) {
  Create();
  std::vector<std::pair<Key, Row>> rows;
  for (Key key = 0; key < kKeys; ++key) rows.emplace_back(key, MakeRow(key, 1 + key % 2, 1));
  Write(rows, false);
  const auto manifest = store_->Commit(++commits_);
  TERRACE_ASSERT_OK(manifest);
  expiry_.Pass();
  TERRACE_ASSERT_OK(store_->CompactNow());
  EXPECT_EQ(store_->stats().live_rows, kKeys / 2);
  // A reader of that checkpoint sees all of it.
  StoreOptions reading = options_;
  reading.expiry = nullptr;
  reading.read_only = true;
  auto reader = Store::Open(&fs_, Clock::Real(), nullptr, reading, *manifest, {&*manifest, 1});
  TERRACE_ASSERT_OK(reader);
  EXPECT_EQ((*reader)->stats().live_rows, kKeys);
  // So does a trainer that goes on from it; it sweeps by itself.
  store_.reset();
  auto store = Store::Open(&fs_, Clock::Real(), &quota_, options_, *manifest, {&*manifest, 1});
  TERRACE_ASSERT_OK(store);
  store_ = std::move(store).value();
  EXPECT_EQ(store_->stats().live_rows, kKeys);
  TERRACE_ASSERT_OK(store_->CompactNow());
  EXPECT_EQ(store_->stats().live_rows, kKeys / 2);
  Check();
}

TEST_F(SweepTest, WhatIsHeldStaysUntilAnotherPoint) {
  Create();
  store_->SetHolder(&held_);
  std::vector<std::pair<Key, Row>> rows;
  for (Key key = 0; key < kKeys; ++key) rows.emplace_back(key, MakeRow(key, 1, 1));
  Write(rows, false);
  for (Key key = 0; key < kKeys; key += 3) held_.keys.insert(key);
  expiry_.Pass();
  TERRACE_ASSERT_OK(store_->CompactNow());
  EXPECT_EQ(store_->stats().live_rows, kKeys / 3);
  // Its holder says that the store has it.
  Write({{0, MakeRow(0, 8, 2)}, {3, MakeRow(3, 8, 2)}}, /*say_stored=*/true);
  Check();
  held_.keys.clear();
  TERRACE_ASSERT_OK(store_->CompactNow());
  EXPECT_EQ(store_->stats().live_rows, kKeys / 3) << "swept twice for one point";
  expiry_.Pass();
  TERRACE_ASSERT_OK(store_->CompactNow());
  EXPECT_EQ(store_->stats().live_rows, 2u);
  Check();
}

TEST_F(SweepTest, ADamagedRecordIsAnErrorOfTheSweep) {
  Create();
  std::vector<std::pair<Key, Row>> rows;
  for (Key key = 0; key < kKeys; ++key) rows.emplace_back(key, MakeRow(key, 5, 1));
  Write(rows, false);
  const auto files = fs_.List("/rows");
  TERRACE_ASSERT_OK(files);
  const std::string path = "/rows/" + files->front().name;
  std::string bytes = *ReadFileToString(&fs_, path);
  bytes[4096 + 30] = static_cast<char>(bytes[4096 + 30] ^ 1);
  const auto manifest = store_->Commit(++commits_);
  TERRACE_ASSERT_OK(manifest);
  store_.reset();
  TERRACE_ASSERT_OK(WriteFileAtomically(&fs_, path, std::as_bytes(std::span(bytes))));
  auto store = Store::Open(&fs_, Clock::Real(), &quota_, options_, *manifest, {&*manifest, 1});
  TERRACE_ASSERT_OK(store);
  store_ = std::move(store).value();
  expiry_.Pass();
  const Status swept = store_->CompactNow();
  EXPECT_EQ(swept.code(), StatusCode::kCorruption);
  EXPECT_NE(swept.message().find("expired rows"), std::string::npos) << swept.ToString();
}

// Against a map: writes, points, sweeps, holders, checkpoints and recoveries in any order.
TEST_F(SweepTest, RandomOperations) {
  Create();
  Rng rng(17);
  store_->SetHolder(&held_);
  std::uint64_t expired = 0;
  for (int step = 0; step < 400; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const std::uint64_t dice = rng.Below(100);
    if (dice < 55) {
      std::map<Key, Row> rows;
      for (std::uint64_t i = 1 + rng.Below(60); i > 0; --i) {
        const Key key = rng.Below(kKeys);
        // A newer version never has to go before an older one.
        std::uint64_t least = 0;
        if (model_.contains(key)) std::memcpy(&least, model_[key].data(), sizeof least);
        const std::uint64_t deadline = std::max(least, expiry_.points() + 1 + rng.Below(4));
        rows[key] = MakeRow(key, deadline, static_cast<std::uint64_t>(step));
      }
      ASSERT_NO_FATAL_FAILURE(Write({rows.begin(), rows.end()}, rng.Below(2) == 0));
      // Who wrote them may hold them, and knows from now on that they are stored.
      for (const auto& [key, row] : rows) {
        if (rng.Below(3) == 0) held_.keys.insert(key);
      }
    } else if (dice < 65) {
      expiry_.Pass();
    } else if (dice < 75) {
      std::erase_if(held_.keys, [&](Key) { return rng.Below(2) == 0; });
    } else if (dice < 85) {
      TERRACE_ASSERT_OK(store_->CompactNow());
    } else if (dice < 90) {
      expired += store_->stats().rows_expired;
      ASSERT_NO_FATAL_FAILURE(CommitAndReopen());
      held_.keys.clear();  // Another process.
      store_->SetHolder(&held_);
    } else {
      ASSERT_NO_FATAL_FAILURE(Check());
    }
  }
  ASSERT_NO_FATAL_FAILURE(Check());
  EXPECT_GT(expired, 500u);
}

}  // namespace
}  // namespace terrace
