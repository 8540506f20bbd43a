// What the tests of the cache share: rows that say by their bytes what was done to them, and a
// cache over fake stores. Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/channel.h"
#include "terrace/base/rng.h"
#include "terrace/base/thread.h"
#include "terrace/cache/row_cache.h"
#include "terrace/cache/testing/fake_store.h"

namespace terrace::cache_testing {

constexpr std::uint32_t kRowBytes = 40;
using Row = std::vector<std::byte>;

// The row a key starts with.
inline void FillRow(Key key, std::byte* row) {
  for (std::uint32_t i = 0; i < kRowBytes; ++i) {
    row[i] = static_cast<std::byte>(MixKey(key + i) >> 13);
  }
}
inline Row InitialRow(Key key) {
  Row row(kRowBytes);
  FillRow(key, row.data());
  return row;
}
// What training makes of a row: depends on all its bytes.
inline void Train(std::byte* row) {
  const std::uint64_t hash = HashName({reinterpret_cast<const char*>(row), kRowBytes});
  for (std::uint32_t i = 0; i < kRowBytes; ++i) {
    row[i] = static_cast<std::byte>(MixKey(hash + i) >> 7);
  }
}
inline Row RowAt(const PinnedRows& pinned, std::size_t w) {
  return Row(pinned.row(w), pinned.row(w) + kRowBytes);
}
inline Row TrainedRow(Key key, int times) {
  Row row = InitialRow(key);
  for (int i = 0; i < times; ++i) Train(row.data());
  return row;
}
inline std::vector<Key> KeyRange(Key first, std::size_t count) {
  std::vector<Key> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back(first + i);
  return keys;
}
inline void TrainAll(PinnedRows* pinned) {
  for (std::size_t w = 0; w < pinned->size(); ++w) Train(pinned->row(w));
  pinned->MarkDirty(0, pinned->size());
}

struct Fixture {
  Fixture(std::uint64_t capacity_bytes, bool background, int shards = 1)
      : Fixture(EvictionOptions().type, capacity_bytes, background, shards) {}
  Fixture(EvictionType eviction, std::uint64_t capacity_bytes, bool background, int shards = 1) {
    for (int i = 0; i < shards; ++i) stores.push_back(std::make_unique<FakeStore>(kRowBytes));
    options.row_bytes = kRowBytes;
    options.capacity_bytes = capacity_bytes;
    options.eviction.type = eviction;
    options.background = background;
    options.chunk_bytes = 4096;
    options.create_row = FillRow;
  }
  // Before Open: stores of blocks, of so many groups, which have no hot rows apart; 0: others.
  void SetGroups(std::uint64_t groups) {
    for (auto& store : stores) store->SetGroups(groups);
    options.hot_apart = groups == 0;
  }
  // The cache is null when the options are refused.
  Status Open() {
    std::vector<Store*> borrowed;
    for (auto& store : stores) borrowed.push_back(store.get());
    auto made = RowCache::Create(options, borrowed);
    if (!made.ok()) return made.status();
    cache = std::move(made).value();
    return OkStatus();
  }
  FakeStore& StoreOf(Key key) const {
    return *stores[ShardOfHash(MixKey(key), static_cast<std::uint32_t>(stores.size()))];
  }
  Row Stored(Key key) const { return StoreOf(key).Get(key); }

  RowCacheOptions options;
  std::vector<std::unique_ptr<FakeStore>> stores;
  std::unique_ptr<RowCache> cache;
};

inline PinnedRows PinOrDie(RowCache* cache, const std::vector<Key>& keys) {
  auto pinned = cache->Pin(keys);
  EXPECT_TRUE(pinned.ok()) << pinned.status().ToString();
  return pinned.ok() ? std::move(pinned).value() : PinnedRows();
}

// Pins, trains and releases `count` keys from `first` on.
inline void TrainRange(RowCache* cache, Key first, std::size_t count) {
  PinnedRows pinned = PinOrDie(cache, KeyRange(first, count));
  TrainAll(&pinned);
}

// How often the rows of a test were trained, and so what they must be.
struct TrainedTimes {
  // As the last stage does with a set: looks at its rows, then trains them, unless it is cut.
  void Train(const std::vector<Key>& keys, bool cut, PinnedRows* pinned) {
    for (std::size_t w = 0; w < keys.size(); ++w) {
      ASSERT_EQ(RowAt(*pinned, w), TrainedRow(keys[w], times[keys[w]])) << "key " << keys[w];
    }
    if (cut) return;
    TrainAll(pinned);
    for (const Key key : keys) ++times[key];
  }
  void ExpectPeeked(const std::vector<Key>& keys, RowCache* cache) {
    std::vector<Row> rows(keys.size(), Row(kRowBytes));
    std::vector<std::byte*> places;
    for (Row& row : rows) places.push_back(row.data());
    std::vector<std::uint8_t> found(rows.size());
    ASSERT_TRUE(cache->Peek(keys, places, found).ok());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(found[i], times[keys[i]] > 0 ? 1 : 0);
      if (found[i] != 0) {
        ASSERT_EQ(rows[i], TrainedRow(keys[i], times[keys[i]]));
      }
    }
  }

  std::map<Key, int> times;
};

// Stage 2 pins the sets that `next` makes on a thread of its own, ahead of stage 4, which trains
// them here and, after each, may do something else; some sets are cut, and some are peeked at.
inline void TrainPinnedAhead(RowCache* cache, int batches, std::uint64_t seed,
                             const std::function<std::vector<Key>(int batch)>& next,
                             const std::function<void(int batch)>& after, TrainedTimes* trained) {
  struct Work {
    std::vector<Key> keys;
    PinnedRows pinned;
  };
  Channel<Work> channel(3);
  Thread puller("puller", ThreadPriority::kNormal, [&] {
    for (int batch = 0; batch < batches; ++batch) {
      Work work;
      work.keys = next(batch);
      work.pinned = PinOrDie(cache, work.keys);
      if (!channel.Send(std::move(work)).ok()) return;
    }
    channel.Close();
  });
  Rng rng(seed);
  const auto train = [&] {
    for (int batch = 0;; ++batch) {
      auto received = channel.Receive();
      ASSERT_TRUE(received.ok());
      if (!received->has_value()) return;
      Work work = std::move(**received);
      ASSERT_NO_FATAL_FAILURE(trained->Train(work.keys, /*cut=*/rng.Below(6) == 0, &work.pinned));
      ASSERT_NO_FATAL_FAILURE(after(batch));
      if (batch % 5 == 0) {
        ASSERT_NO_FATAL_FAILURE(trained->ExpectPeeked(work.keys, cache));
      }
    }
  };
  train();
  // In a test that fails, whoever pins does not wait for ever.
  if (testing::Test::HasFatalFailure()) channel.Abort(AbortedError("the test failed"));
  puller.Join();
}

constexpr std::uint64_t kSmall = 128 << 10;  // Bytes; about a thousand rows.

// What a test of it is made for every eviction policy of kPolicies.
class OverPolicies : public testing::TestWithParam<EvictionType> {};
inline const auto kPolicies =
    testing::Values(EvictionType::kS3Fifo, EvictionType::kLruLfu, EvictionType::kPassLfu);

}  // namespace terrace::cache_testing
