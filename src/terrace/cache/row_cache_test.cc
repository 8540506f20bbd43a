#include "terrace/cache/row_cache.h"

#include <cstring>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/base/thread.h"
#include "terrace/cache/testing/fake_store.h"

namespace terrace {
namespace {

constexpr std::uint32_t kRowBytes = 40;
using Row = std::vector<std::byte>;

// The row a key starts with.
void FillRow(Key key, std::byte* row) {
  for (std::uint32_t i = 0; i < kRowBytes; ++i) {
    row[i] = static_cast<std::byte>(MixKey(key + i) >> 13);
  }
}
Row InitialRow(Key key) {
  Row row(kRowBytes);
  FillRow(key, row.data());
  return row;
}
// What training makes of a row: depends on all its bytes.
void Train(std::byte* row) {
  std::uint64_t hash = HashName({reinterpret_cast<const char*>(row), kRowBytes});
  for (std::uint32_t i = 0; i < kRowBytes; ++i) {
    row[i] = static_cast<std::byte>(MixKey(hash + i) >> 7);
  }
}

struct Fixture {
  explicit Fixture(std::uint64_t capacity_bytes, bool background, int shards = 1,
                   std::uint64_t chunk_bytes = 4096, std::uint64_t flush_bytes = 1 << 20) {
    for (int i = 0; i < shards; ++i) stores.push_back(std::make_unique<FakeStore>(kRowBytes));
    options.row_bytes = kRowBytes;
    options.capacity_bytes = capacity_bytes;
    options.background_write_back = background;
    options.chunk_bytes = chunk_bytes;
    options.flush_bytes = flush_bytes;
    options.create_row = FillRow;
    std::vector<Store*> borrowed;
    for (auto& store : stores) borrowed.push_back(store.get());
    auto made = RowCache::Create(options, Clock::Real(), borrowed);
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    if (made.ok()) cache = std::move(made).value();
  }
  Row Stored(Key key) const {
    return stores[ShardOfHash(MixKey(key), static_cast<std::uint32_t>(stores.size()))]->Get(key);
  }
  RowCacheOptions options;
  std::vector<std::unique_ptr<FakeStore>> stores;
  std::unique_ptr<RowCache> cache;
};

std::uint64_t LeastCapacity(bool background, int shards) {
  std::uint64_t low = 0, high = 1 << 20;
  while (high - low > 1) {
    const std::uint64_t middle = (low + high) / 2;
    RowCacheOptions options;
    options.row_bytes = kRowBytes;
    options.capacity_bytes = middle;
    options.background_write_back = background;
    options.chunk_bytes = 4096;
    options.create_row = FillRow;
    FakeStore store(kRowBytes);
    std::vector<Store*> stores(static_cast<std::size_t>(shards), &store);
    (RowCache::Create(options, Clock::Real(), stores).ok() ? high : low) = middle;
  }
  return high;
}

// Random operations against a map of what training has made.
void RunModel(std::uint64_t seed, std::uint64_t capacity, bool background, int shards,
              std::uint64_t key_count, int steps) {
  SCOPED_TRACE(testing::Message() << "seed " << seed << " capacity " << capacity << " background "
                                  << background << " shards " << shards);
  Rng rng(seed);
  Fixture fixture(capacity, background, shards);
  ASSERT_NE(fixture.cache, nullptr);
  RowCache& cache = *fixture.cache;
  std::map<Key, Row> trained;
  struct Set {
    std::vector<Key> keys;
    PinnedRows pinned;
  };
  std::vector<Set> sets;
  const auto expected = [&](Key key) {
    const auto row = trained.find(key);
    return row == trained.end() ? InitialRow(key) : row->second;
  };
  const auto row_at = [&](const PinnedRows& pinned, std::size_t w) {
    return Row(pinned.row(w), pinned.row(w) + kRowBytes);
  };
  std::uint64_t asked = 0;
  std::uint64_t limit = capacity;
  for (int step = 0; step < steps; ++step) {
    const std::uint64_t action = rng.Below(20);
    if (action < 8) {
      std::uint64_t held = 0;
      for (const Set& set : sets) held += set.keys.size();
      const std::uint64_t most = cache.MaxPinnedRows();
      if (held >= most || sets.size() > 5) continue;
      std::set<Key> keys;
      const std::uint64_t count = 1 + rng.Below(std::min<std::uint64_t>(most - held, 300));
      for (std::uint64_t i = 0; i < count; ++i) {
        keys.insert(rng.Below(2) == 0 ? rng.Below(key_count) : rng.Below(key_count / 10 + 1));
      }
      Set set;
      set.keys.assign(keys.begin(), keys.end());
      auto pinned = cache.Pin(set.keys);
      ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
      set.pinned = std::move(pinned).value();
      asked += set.keys.size();
      for (std::size_t w = 0; w < set.keys.size(); ++w) {
        ASSERT_EQ(row_at(set.pinned, w), expected(set.keys[w])) << "key " << set.keys[w];
      }
      sets.push_back(std::move(set));
    } else if (action < 13) {
      if (sets.empty()) continue;
      Set& set = sets[rng.Below(sets.size())];
      std::vector<std::uint32_t> dirty;
      for (std::uint32_t w = 0; w < set.keys.size(); ++w) {
        if (rng.Below(3) == 0) dirty.push_back(w);
      }
      for (const std::uint32_t w : dirty) {
        Train(set.pinned.row(w));
        trained[set.keys[w]] = row_at(set.pinned, w);
      }
      set.pinned.MarkDirty(dirty);
    } else if (action < 16) {
      if (sets.empty()) continue;
      const std::size_t which = rng.Below(sets.size());
      sets.erase(sets.begin() + static_cast<std::ptrdiff_t>(which));
    } else if (action < 18) {
      std::set<Key> distinct;
      for (int i = 0; i < 100; ++i) distinct.insert(rng.Below(key_count));
      const std::vector<Key> keys(distinct.begin(), distinct.end());
      std::vector<Row> rows(keys.size(), Row(kRowBytes));
      std::vector<std::byte*> places;
      for (Row& row : rows) places.push_back(row.data());
      std::vector<std::uint8_t> found(keys.size(), 7);
      ASSERT_TRUE(cache.Peek(keys, places, found).ok());
      for (std::size_t i = 0; i < keys.size(); ++i) {
        ASSERT_EQ(found[i], trained.contains(keys[i]) ? 1 : 0) << "key " << keys[i];
        if (found[i] != 0) {
          ASSERT_EQ(rows[i], trained[keys[i]]) << "key " << keys[i];
        }
      }
    } else if (action < 19) {
      ASSERT_TRUE(cache.FlushDirty().ok());
      ASSERT_EQ(cache.dirty_bytes(), 0u);
      for (const auto& [key, row] : trained) ASSERT_EQ(fixture.Stored(key), row) << "key " << key;
    } else {
      limit = capacity + rng.Below(capacity);
      const Status set = cache.SetCapacity(limit);
      ASSERT_TRUE(set.ok() || set.code() == StatusCode::kOutOfMemory) << set.ToString();
      if (set.ok()) {
        ASSERT_LE(cache.stats().used_bytes, limit);
      }
    }
    const RowCacheStats stats = cache.stats();
    ASSERT_LE(stats.used_bytes, stats.capacity_bytes);
    ASSERT_EQ(stats.hits + stats.misses, asked);
    // With nothing pinned the limit is reached by the next Pin at the latest.
    if (sets.size() == 1 && action < 8) {
      ASSERT_LE(stats.used_bytes, limit);
    }
  }
  sets.clear();
  ASSERT_TRUE(cache.FlushDirty().ok());
  std::size_t stored = 0;
  for (auto& store : fixture.stores) stored += store->size();
  EXPECT_EQ(stored, trained.size()) << "rows that no training touched were written";
  for (const auto& [key, row] : trained) ASSERT_EQ(fixture.Stored(key), row) << "key " << key;
  EXPECT_EQ(cache.stats().pinned_rows, 0u);
  EXPECT_EQ(cache.stats().dirty_rows, 0u);
}

TEST(RowCacheModel, AgreesWithAMapAtEveryCapacity) {
  const std::uint64_t seed = 20240611;
  for (const bool background : {false, true}) {
    for (const int shards : {1, 3}) {
      const std::uint64_t least = LeastCapacity(background, shards);
      for (const std::uint64_t capacity :
           {least, least + 5000, 2 * least, 4 * least, std::uint64_t{8} << 20}) {
        RunModel(seed + capacity, capacity, background, shards, 3000, 1500);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace terrace
