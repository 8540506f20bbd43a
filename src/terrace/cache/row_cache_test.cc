#include "terrace/cache/row_cache.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/cache/testing/cache_fixture.h"

namespace terrace::cache_testing {
namespace {

constexpr std::uint64_t kGroups = 100;

std::uint64_t LeastCapacity(EvictionType eviction, bool background, int shards) {
  std::uint64_t low = 0, high = 1 << 20;
  while (high - low > 1) {
    const std::uint64_t middle = (low + high) / 2;
    (Fixture(eviction, middle, background, shards).Open().ok() ? high : low) = middle;
  }
  return high;
}

// Random operations against a map of what training has made. Steps assert; the caller looks for
// fatal failures.
class Model {
 public:
  // groups: of the stores; 0: without blocks.
  Model(std::uint64_t seed, EvictionType eviction, std::uint64_t capacity, bool background,
        int shards, std::uint64_t groups)
      : capacity_(capacity),
        rng_(seed),
        fixture_(eviction, capacity, background, shards),
        limit_(capacity),
        allowed_(capacity) {
    fixture_.SetGroups(groups);
  }

  void Run(int steps) {
    ASSERT_TRUE(fixture_.Open().ok());
    for (int step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
      const std::uint64_t action = rng_.Below(21);
      if (action < 8) {
        Pin();
      } else if (action < 13) {
        TrainSome();
      } else if (action < 16) {
        if (!sets_.empty()) sets_.erase(sets_.begin() + Random(sets_.size()));
      } else if (action < 18) {
        Peek();
      } else if (action < 19) {
        Flush();
      } else if (action < 20) {
        WriteAhead();
      } else {
        SetCapacity();
      }
      const RowCacheStats stats = fixture_.cache->stats();
      ASSERT_LE(stats.used_bytes, allowed_);
      ASSERT_EQ(stats.hits + stats.misses, asked_);
    }
    if (!testing::Test::HasFatalFailure()) Finish();
  }

 private:
  struct Set {
    std::vector<Key> keys;
    PinnedRows pinned;
  };

  std::ptrdiff_t Random(std::size_t bound) {
    return static_cast<std::ptrdiff_t>(rng_.Below(bound));
  }
  Row Expected(Key key) const {
    const auto row = trained_.find(key);
    return row == trained_.end() ? InitialRow(key) : row->second;
  }

  std::size_t Stored() const {
    std::size_t rows = 0;
    for (const auto& store : fixture_.stores) rows += store->size();
    return rows;
  }

  void Pin() {
    // One thread: a Pin that waited would wait for ever.
    if (std::exchange(over_limit_, false)) sets_.clear();
    std::uint64_t held = 0;
    for (const Set& set : sets_) held += set.keys.size();
    const std::uint64_t most = fixture_.cache->MaxPinnedRows();
    if (held >= most || sets_.size() > 5) return;
    std::set<Key> keys;
    const std::uint64_t count = 1 + rng_.Below(std::min<std::uint64_t>(most - held, 300));
    for (std::uint64_t i = 0; i < count; ++i) {
      keys.insert(rng_.Below(rng_.Below(2) == 0 ? kKeys : kKeys / 10));
    }
    Set set;
    set.keys.assign(keys.begin(), keys.end());
    auto pinned = fixture_.cache->Pin(set.keys);
    ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
    set.pinned = std::move(pinned).value();
    asked_ += set.keys.size();
    for (std::size_t w = 0; w < set.keys.size(); ++w) {
      ASSERT_EQ(RowAt(set.pinned, w), Expected(set.keys[w])) << "key " << set.keys[w];
    }
    sets_.push_back(std::move(set));
    ASSERT_LE(fixture_.cache->stats().used_bytes, limit_) << "a Pin reaches the limit";
  }

  void TrainSome() {
    if (sets_.empty()) return;
    Set& set = *(sets_.begin() + Random(sets_.size()));
    const std::size_t begin = rng_.Below(set.keys.size() + 1);
    const std::size_t end = begin + rng_.Below(set.keys.size() - begin + 1);
    for (std::size_t w = begin; w < end; ++w) {
      Train(set.pinned.row(w));
      trained_[set.keys[w]] = RowAt(set.pinned, w);
    }
    set.pinned.MarkDirty(begin, end);
    if (fixture_.options.background) return;
    ASSERT_EQ(fixture_.cache->stats().unstored_rows, trained_.size() - Stored());
  }

  void Peek() {
    std::set<Key> distinct;
    for (int i = 0; i < 100; ++i) distinct.insert(rng_.Below(kKeys));
    const std::vector<Key> keys(distinct.begin(), distinct.end());
    std::vector<Row> rows(keys.size(), Row(kRowBytes));
    std::vector<std::byte*> places;
    for (Row& row : rows) places.push_back(row.data());
    std::vector<std::uint8_t> found(keys.size(), 7);
    ASSERT_TRUE(fixture_.cache->Peek(keys, places, found).ok());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      ASSERT_EQ(found[i], trained_.contains(keys[i]) ? 1 : 0) << "key " << keys[i];
      if (found[i] != 0) {
        ASSERT_EQ(rows[i], trained_[keys[i]]) << "key " << keys[i];
      }
    }
  }

  void WriteAhead() {
    const std::uint64_t before = fixture_.cache->stats().dirty_rows;
    ASSERT_TRUE(fixture_.cache->WriteAhead(rng_.Below(200)).ok());
    ASSERT_LE(fixture_.cache->stats().dirty_rows, before);
    if (!sets_.empty()) return;
    ASSERT_TRUE(fixture_.cache->WriteAhead(kKeys).ok());
    if (fixture_.options.background) return;  // The last ones wait in a buffer that is not full.
    ASSERT_EQ(fixture_.cache->dirty_bytes(), 0u);
    for (const auto& [key, row] : trained_) ASSERT_EQ(fixture_.Stored(key), row) << "key " << key;
  }

  void Flush() {
    ASSERT_TRUE(fixture_.cache->FlushDirty().ok());
    ASSERT_EQ(fixture_.cache->dirty_bytes(), 0u);
    ASSERT_EQ(fixture_.cache->stats().unstored_rows, 0u);
    for (const auto& [key, row] : trained_) ASSERT_EQ(fixture_.Stored(key), row) << "key " << key;
  }

  void SetCapacity() {
    const std::uint64_t limit = capacity_ / 2 + rng_.Below(capacity_);
    const Status set = fixture_.cache->SetCapacity(limit);
    if (set.code() == StatusCode::kInvalidArgument) return;
    ASSERT_TRUE(set.ok() || set.code() == StatusCode::kOutOfMemory) << set.ToString();
    limit_ = limit;
    // What pinned rows hold may stay, but it is no more than there was.
    allowed_ = set.ok() ? limit : std::max(limit, allowed_);
    over_limit_ = !set.ok();
  }

  void Finish() {
    sets_.clear();
    Flush();
    EXPECT_EQ(Stored(), trained_.size()) << "rows that no training touched were written";
    EXPECT_EQ(fixture_.cache->stats().pinned_rows, 0u);
    ASSERT_TRUE(fixture_.cache->Pin(KeyRange(0, 1)).ok());
    EXPECT_LE(fixture_.cache->stats().used_bytes, limit_);
    EXPECT_EQ(fixture_.cache->stats().dirty_rows, 0u);
  }

  static constexpr std::uint64_t kKeys = 3000;
  const std::uint64_t capacity_;
  Rng rng_;
  Fixture fixture_;
  std::map<Key, Row> trained_;
  std::vector<Set> sets_;
  std::uint64_t asked_ = 0;
  std::uint64_t limit_, allowed_;  // Bytes: what was set last, and what pinned rows may keep.
  bool over_limit_ = false;        // The next Pin waits until nothing is pinned.
};

class RowCacheModel : public testing::TestWithParam<EvictionType> {};
INSTANTIATE_TEST_SUITE_P(Policies, RowCacheModel,
                         testing::Values(EvictionType::kS3Fifo, EvictionType::kLruLfu,
                                         EvictionType::kPassLfu));

// Keys below 1000 are visited three times in two pins, the others once: by the policies' own counts
// the former are hot. Writes bring one kind, but for the last of a flush, which may bring the
// rests.
TEST_P(RowCacheModel, HotRowsAreWrittenApart) {
  for (const bool background : {false, true}) {
    for (const bool hot_apart : {true, false}) {
      SCOPED_TRACE(testing::Message() << "background " << background << " apart " << hot_apart);
      Fixture fixture(GetParam(), /*capacity_bytes=*/512 << 10, background);
      fixture.options.flush_bytes = 8 << 10;
      fixture.options.hot_apart = hot_apart;
      ASSERT_TRUE(fixture.Open().ok());
      const auto train = [&](Key first, std::size_t count) {
        auto pinned = fixture.cache->Pin(KeyRange(first, count));
        ASSERT_TRUE(pinned.ok());
        TrainAll(&*pinned);
      };
      const auto mixed_writes = [&] {
        std::size_t mixed = 0;
        for (const std::vector<Key>& keys : fixture.stores[0]->write_keys()) {
          const auto hot = static_cast<std::size_t>(
              std::count_if(keys.begin(), keys.end(), [](Key key) { return key < 1000; }));
          mixed += hot > 0 && hot < keys.size() ? 1 : 0;
        }
        return mixed;
      };
      for (int visit = 0; visit < 3; ++visit) train(0, 1000);
      train(1000, 1000);
      ASSERT_TRUE(fixture.cache->FlushDirty().ok());
      ASSERT_EQ(fixture.stores[0]->size(), 2000u);
      EXPECT_GT(fixture.stores[0]->write_sizes().size(), 10u);
      EXPECT_LE(mixed_writes(), 1u);
      for (Key key = 0; key < 2000; ++key) {
        ASSERT_EQ(fixture.Stored(key), TrainedRow(key, key < 1000 ? 3 : 1)) << key;
      }
    }
  }
}

// Of a group's dirty rows all that nobody pins are written with one that is evicted, stay, and are
// not written again for that.
TEST_P(RowCacheModel, AGroupIsWrittenTogether) {
  Fixture fixture(GetParam(), kSmall, /*background=*/false, /*shards=*/2);
  fixture.SetGroups(kGroups);
  ASSERT_TRUE(fixture.Open().ok());
  RowCache& cache = *fixture.cache;
  const auto place = [](Key key) {
    return std::pair(RangeOfHash(MixKey(key), kGroups), ShardOfHash(MixKey(key), 2));
  };
  const auto written = [&] {
    std::vector<Key> keys;
    for (const auto& store : fixture.stores) {
      for (const std::vector<Key>& some : store->write_keys()) {
        keys.insert(keys.end(), some.begin(), some.end());
      }
    }
    std::sort(keys.begin(), keys.end());
    return keys;
  };
  const std::size_t all = cache.MaxPinnedRows(), kHeld = all / 2;
  PinnedRows held = PinOrDie(&cache, KeyRange(0, kHeld));
  TrainAll(&held);
  TrainRange(&cache, kHeld, all - kHeld);
  ASSERT_TRUE(written().empty());
  PinOrDie(&cache, {1'000'000}).Release();
  const std::vector<Key> first = written();
  ASSERT_FALSE(first.empty());
  std::vector<Key> expected = KeyRange(kHeld, all - kHeld);
  std::erase_if(expected, [&](Key key) { return place(key) != place(first[0]); });
  EXPECT_EQ(first, expected);
  EXPECT_GT(first.size(), 1u);
  EXPECT_EQ(cache.stats().evictions, 1u);
  EXPECT_EQ(cache.stats().dirty_rows, all - first.size());
  held.Release();
  // Those that stayed are evicted, and what is trained again is written again.
  TrainRange(&cache, first[0], 1);
  TrainRange(&cache, 2'000'000, all);
  ASSERT_TRUE(cache.FlushDirty().ok());
  for (Key key = 0; key < all; ++key) {
    ASSERT_EQ(fixture.Stored(key), TrainedRow(key, key == first[0] ? 2 : 1)) << key;
  }
  const std::vector<Key> twice = written();
  EXPECT_EQ(twice.size(), 2 * all + 1);
  EXPECT_EQ(std::count(twice.begin(), twice.end(), first[0]), 2);
}

TEST_P(RowCacheModel, AgreesWithAMapAtEveryCapacity) {
  const std::uint64_t seed = 20240611;
  for (const bool background : {false, true}) {
    for (const int shards : {1, 3}) {
      const std::uint64_t least = LeastCapacity(GetParam(), background, shards);
      for (const std::uint64_t capacity :
           {least, least + 5000, 2 * least, 4 * least, std::uint64_t{8} << 20}) {
        for (const std::uint64_t groups : {std::uint64_t{0}, kGroups}) {
          SCOPED_TRACE(testing::Message()
                       << "seed " << seed + capacity << " capacity " << capacity << " background "
                       << background << " shards " << shards << " groups " << groups);
          ASSERT_NO_FATAL_FAILURE(
              Model(seed + capacity, GetParam(), capacity, background, shards, groups)
                  .Run(groups == 0 ? 1500 : 500));
        }
      }
    }
  }
}

}  // namespace
}  // namespace terrace::cache_testing
