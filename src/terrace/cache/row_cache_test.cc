#include "terrace/cache/row_cache.h"

#include <cstring>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/cache/testing/cache_fixture.h"

namespace terrace {
namespace {

using namespace cache_testing;  // NOLINT: the test is written in its words.

std::uint64_t LeastCapacity(bool background, int shards) {
  std::uint64_t low = 0, high = 1 << 20;
  while (high - low > 1) {
    const std::uint64_t middle = (low + high) / 2;
    (Fixture(middle, background, shards).Open().ok() ? high : low) = middle;
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
  ASSERT_TRUE(fixture.Open().ok());
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
  std::uint64_t asked = 0;
  std::uint64_t limit = capacity, allowed = capacity;
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
        ASSERT_EQ(RowAt(set.pinned, w), expected(set.keys[w])) << "key " << set.keys[w];
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
        trained[set.keys[w]] = RowAt(set.pinned, w);
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
      const std::uint64_t asked_limit = capacity / 2 + rng.Below(capacity);
      const Status set = cache.SetCapacity(asked_limit);
      if (set.code() == StatusCode::kInvalidArgument) continue;
      ASSERT_TRUE(set.ok() || set.code() == StatusCode::kOutOfMemory) << set.ToString();
      limit = asked_limit;
      // What pinned rows hold may stay, but it is no more than there was.
      allowed = set.ok() ? limit : std::max(limit, allowed);
    }
    const RowCacheStats stats = cache.stats();
    ASSERT_LE(stats.used_bytes, allowed);
    ASSERT_EQ(stats.hits + stats.misses, asked);
  }
  sets.clear();
  ASSERT_TRUE(cache.FlushDirty().ok());
  std::size_t stored = 0;
  for (auto& store : fixture.stores) stored += store->size();
  EXPECT_EQ(stored, trained.size()) << "rows that no training touched were written";
  for (const auto& [key, row] : trained) ASSERT_EQ(fixture.Stored(key), row) << "key " << key;
  EXPECT_EQ(cache.stats().pinned_rows, 0u);
  ASSERT_TRUE(cache.Pin(KeyRange(0, 1)).ok());
  EXPECT_LE(cache.stats().used_bytes, limit);
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
