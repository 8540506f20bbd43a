// EntryMap, EntryQueues and RowArena against containers of the standard library; ChunkSupply
// and GhostKeys.
#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>
#include <unordered_map>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/base/sync_point.h"
#include "terrace/cache/chunk_supply.h"
#include "terrace/cache/entry_map.h"
#include "terrace/cache/entry_queues.h"
#include "terrace/cache/ghost_keys.h"
#include "terrace/cache/row_arena.h"

namespace terrace {
namespace {

void AddChunk(RowArena* arena) {
  auto memory = HugeBuffer::Allocate(arena->chunk_bytes());
  TERRACE_CHECK(memory.ok());
  arena->AddChunk(std::move(memory).value());
}

// hash_of: what the map is given for key k. Few distinct homes make long ways.
template <typename HashOf>
void RunMapModel(std::uint64_t seed, std::uint64_t rows, const HashOf& hash_of) {
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Rng rng(seed);
  EntryMap map;
  ASSERT_TRUE(map.Reset(rows).ok());
  EXPECT_EQ(map.bytes(), EntryMap::BytesFor(rows));
  std::unordered_map<Key, std::uint32_t> model;
  std::unordered_map<std::uint32_t, Key> key_of;
  std::uint32_t next = 0;
  for (int step = 0; step < 200'000; ++step) {
    const Key key = rng.Below(2 * rows);
    const auto in_model = model.find(key);
    const std::uint32_t found =
        map.Find(hash_of(key), [&](std::uint32_t entry) { return key_of.at(entry) == key; });
    ASSERT_EQ(found, in_model == model.end() ? EntryMap::kNone : in_model->second);
    if (found == EntryMap::kNone) {
      if (map.size() == rows) continue;
      key_of[next] = key;
      model[key] = next;
      map.Insert(hash_of(key), next++);
    } else if (rng.Below(3) == 0) {
      key_of[next] = key;
      map.Replace(hash_of(key), found, next);
      model[key] = next++;
    } else {
      map.Erase(hash_of(key), found);
      model.erase(key);
    }
    ASSERT_EQ(map.size(), model.size());
  }
}

TEST(EntryMap, AgreesWithAMap) {
  RunMapModel(1, 5000, [](Key key) { return MixKey(key); });
  RunMapModel(2, 500, [](Key key) { return MixKey(key); });
}

TEST(EntryMap, AgreesWithAMapWhenHashesCollide) {
  RunMapModel(3, 500, [](Key key) { return MixKey(key % 3); });
  RunMapModel(4, 500, [](Key) { return ~std::uint64_t{0}; });
}

// Steps over the whole map; each entry once, in the part that its hash belongs to, though the map
// is made anew with another number of lines meanwhile.
template <typename HashOf>
void VisitAll(std::uint64_t seed, std::uint64_t rows, const HashOf& hash_of) {
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Rng rng(seed);
  EntryMap map;
  const auto fill = [&](std::uint64_t room) {
    TERRACE_CHECK(map.Reset(room).ok());
    for (std::uint32_t entry = 0; entry < rows; ++entry) map.Insert(hash_of(entry), entry);
  };
  fill(rows);
  std::vector<int> visits(rows, 0);
  std::uint64_t from = 0, parts = 0;
  do {
    std::uint64_t visited = 0;
    std::vector<std::uint32_t> inside;
    const auto visit = [&](std::uint32_t entry) {
      ++visited;
      if (hash_of(entry) >= from) inside.push_back(entry);
    };
    const std::uint64_t end = map.VisitFrom(from, 1 + rng.Below(4), visit);
    ASSERT_TRUE(end == 0 || end > from);
    for (const std::uint32_t entry : inside) visits[entry] += hash_of(entry) <= end - 1 ? 1 : 0;
    from = end;
    ++parts;
    ASSERT_LE(visited, rows);
    if (rng.Below(4) == 0) fill(rows * (1 + rng.Below(3)));
  } while (from != 0);
  for (std::uint32_t entry = 0; entry < rows; ++entry) ASSERT_EQ(visits[entry], 1) << entry;
  EXPECT_GT(parts, 1u);
}

TEST(EntryMap, VisitsEachEntryOnceInTheOrderOfHashes) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    ASSERT_NO_FATAL_FAILURE(VisitAll(seed, 2000, [](Key key) { return MixKey(key); }));
    // Long ways.
    ASSERT_NO_FATAL_FAILURE(VisitAll(seed, 300, [](Key key) { return MixKey(key % 5) + key; }));
    // The last line's are full, and the way goes on at the first.
    ASSERT_NO_FATAL_FAILURE(
        VisitAll(seed, 100, [](Key key) { return ~std::uint64_t{0} - 40 + key % 40; }));
  }
}

TEST(EntryQueues, AgreeWithDequesThroughSweepsAndResizes) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Rng rng(seed);
    constexpr int kQueues = 5;
    RowArena arena(16, 64 << 10);
    AddChunk(&arena);
    const std::uint64_t rows = arena.rows_per_chunk();
    EntryQueues queues(&arena, kQueues, seed % 2 == 0 ? 1 : 8);
    std::vector<std::deque<EntryId>> model(kQueues);
    std::vector<EntryId> outside;  // In no queue.
    for (std::uint64_t i = 0; i < rows; ++i) outside.push_back(arena.Allocate());
    ASSERT_TRUE(queues.Reserve(rows).ok());
    for (int step = 0; step < 60'000; ++step) {
      const auto queue = static_cast<int>(rng.Below(kQueues));
      auto& in_model = model[static_cast<std::size_t>(queue)];
      const std::uint64_t action = rng.Below(1000);
      if (action < 500 && !outside.empty()) {
        const std::size_t which = rng.Below(outside.size());
        const EntryId id = outside[which];
        outside[which] = outside.back();
        outside.pop_back();
        queues.Push(queue, id);
        ASSERT_EQ(arena.entry(id).place, kFirstQueue + queue);
        in_model.push_back(id);
      } else if (action < 650) {
        const EntryId id = queues.Pop(queue);
        ASSERT_EQ(id, in_model.empty() ? kNoEntry : in_model.front());
        if (id == kNoEntry) continue;
        in_model.pop_front();
        outside.push_back(id);
      } else if (action < 990 && !in_model.empty()) {
        const std::size_t which = rng.Below(in_model.size());
        const EntryId id = in_model[which];
        in_model.erase(in_model.begin() + static_cast<std::ptrdiff_t>(which));
        arena.entry(id).place = kHeld;  // Leaves from the middle.
        outside.push_back(id);
      } else {
        std::uint64_t inside = rows - outside.size();
        const std::uint64_t reserved = inside + rng.Below(rows - inside + 1);
        // Down to what is needed, and back: entries outside may be pushed again.
        ASSERT_TRUE(queues.Reserve(reserved).ok());
        ASSERT_EQ(queues.bytes(), queues.BytesFor(reserved));
        ASSERT_TRUE(queues.Reserve(rows).ok());
      }
    }
    for (int queue = 0; queue < kQueues; ++queue) {
      for (const EntryId expected : model[static_cast<std::size_t>(queue)]) {
        ASSERT_EQ(queues.Pop(queue), expected);
      }
      ASSERT_EQ(queues.Pop(queue), kNoEntry);
    }
  }
}

// Whatever rows leave from the middle, in whichever order they come back: sweeps end in time, a few
// blocks at a time.
TEST(EntryQueues, NoPushWaitsForAWholeSweep) {
  for (const int dead_eighths : {1, 2, 8}) {
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      SCOPED_TRACE(testing::Message() << dead_eighths << " dead to eight, seed " << seed);
      Rng rng(seed);
      constexpr int kQueues = 3;
      RowArena arena(16, 64 << 10);
      EntryQueues queues(&arena, kQueues, dead_eighths);
      // As many as fill what there is memory for.
      std::uint64_t rows = 20 * arena.rows_per_chunk();
      while (queues.BytesFor(rows + 1) == queues.BytesFor(rows)) ++rows;
      std::vector<EntryId> inside, outside;
      while (outside.size() < rows) {
        if (outside.size() % arena.rows_per_chunk() == 0) AddChunk(&arena);
        outside.push_back(arena.Allocate());
      }
      ASSERT_TRUE(queues.Reserve(rows).ok());
      const auto push = [&](std::size_t which) {
        const EntryId id = outside[which];
        outside[which] = outside.back();
        outside.pop_back();
        inside.push_back(id);
        const std::uint64_t before = queues.swept_blocks();
        queues.Push(static_cast<int>(rng.Below(kQueues)), id);
        ASSERT_LE(queues.swept_blocks() - before, queues.most_swept_by_push());
      };
      const auto leave = [&](std::size_t which) {
        arena.entry(inside[which]).place = kHeld;
        outside.push_back(inside[which]);
        inside[which] = inside.back();
        inside.pop_back();
      };
      while (!outside.empty()) ASSERT_NO_FATAL_FAILURE(push(rng.Below(outside.size())));
      for (int round = 0; round < 40; ++round) {
        // A set that is pinned, of rows here and there, of old or of new ones; all of them at most.
        const std::size_t count = 1 + rng.Below(rng.Below(4) == 0 ? rows : rows / 8);
        const std::uint64_t kind = rng.Below(3);
        for (std::size_t i = 0; i < count && !inside.empty(); ++i) {
          const std::size_t range = kind == 0 ? inside.size() : (inside.size() + 15) / 16;
          const std::size_t at = rng.Below(range);
          leave(kind == 2 ? inside.size() - 1 - at : at);
        }
        while (!outside.empty()) {
          ASSERT_NO_FATAL_FAILURE(push(kind == 0 ? rng.Below(outside.size()) : 0));
        }
        for (std::size_t i = 0; round % 8 == 0 && i < rows / 4; ++i) {
          const EntryId id = queues.Pop(static_cast<int>(rng.Below(kQueues)));
          if (id != kNoEntry) outside.push_back(id);
        }
        std::erase_if(inside, [&](EntryId id) { return arena.entry(id).place == kHeld; });
      }
      EXPECT_GT(queues.swept_blocks(), rows / 64);  // More than all of them once.
    }
  }
}

TEST(RowArena, HandsOutEverySlotOnceAndReusesReleasedChunks) {
  RowArena arena(20, 4096);
  const std::uint32_t rows = arena.rows_per_chunk();
  EXPECT_GE(rows * (24 + sizeof(Entry)), 4096 - 24 - sizeof(Entry) - 64);
  std::vector<EntryId> taken;
  for (int chunk = 0; chunk < 3; ++chunk) {
    AddChunk(&arena);
    for (std::uint32_t i = 0; i < rows; ++i) {
      taken.push_back(arena.Allocate());
      ASSERT_NE(taken.back(), kNoEntry);
      std::fill_n(arena.row(taken.back()), 24, static_cast<std::byte>(taken.size()));
    }
    ASSERT_EQ(arena.Allocate(), kNoEntry);
  }
  for (std::size_t i = 0; i < taken.size(); ++i) {
    ASSERT_EQ(*arena.row(taken[i]), static_cast<std::byte>(i + 1)) << "rows must not overlap";
  }
  arena.Close(1);
  for (const EntryId id : taken) {
    arena.Unhold(id);
    arena.Free(id);
  }
  EXPECT_EQ(arena.used_rows(), 0u);
  arena.Release(1);
  EXPECT_EQ(arena.present_chunks(), 2u);
  std::uint32_t count = 0;
  while (arena.Allocate() != kNoEntry) ++count;
  EXPECT_EQ(count, 2 * rows);
  AddChunk(&arena);
  EXPECT_EQ(arena.chunk_numbers(), 3u);
  while (arena.Allocate() != kNoEntry) ++count;
  EXPECT_EQ(count, 3 * rows);
}

constexpr std::uint64_t kChunk = 64 << 10;

bool IsZero(const HugeBuffer& buffer) {
  return std::all_of(buffer.data(), buffer.data() + buffer.size(),
                     [](std::byte byte) { return byte == std::byte{0}; });
}

TEST(ChunkSupply, MakesAheadUpToItsLimit) {
  ChunkSupply supply(kChunk, /*background=*/true);
  EXPECT_EQ(supply.chunks(), 0u);
  supply.SetLimit(3);
  std::vector<HugeBuffer> taken;
  for (int i = 0; i < 10; ++i) {
    while (supply.chunks() < 3) std::this_thread::yield();
    auto chunk = supply.Take();
    ASSERT_TRUE(chunk.ok());
    EXPECT_EQ(chunk->size(), kChunk);
    EXPECT_TRUE(IsZero(*chunk));
    chunk->data()[0] = std::byte{1};
    taken.push_back(std::move(chunk).value());
    EXPECT_LE(supply.chunks(), 2u) << "the taken one counts until the limit is set again";
    supply.SetLimit(3);
  }
  supply.SetLimit(1);
  EXPECT_LE(supply.chunks(), 1u);
  supply.SetLimit(0);
  EXPECT_EQ(supply.chunks(), 0u);
  ASSERT_TRUE(supply.Take().ok());
}

TEST(ChunkSupply, AFallingLimitWaitsForTheChunkInTheMaking) {
  std::atomic<bool> in_the_making{false}, go_on{false};
  SyncPoint::Arm([&](std::string_view name) {
    if (name != "cache.memory.before_touch") return;
    in_the_making = true;
    while (!go_on) std::this_thread::yield();
  });
  {
    ChunkSupply supply(kChunk, /*background=*/true);
    supply.SetLimit(1);
    while (!in_the_making) std::this_thread::yield();
    EXPECT_EQ(supply.chunks(), 1u) << "what is in the making counts";
    Thread release("release", ThreadPriority::kNormal, [&] { go_on = true; });
    supply.SetLimit(0);
    EXPECT_TRUE(go_on);
    EXPECT_EQ(supply.chunks(), 0u);
    release.Join();
    // Taken where the limit allows no other beside it.
    in_the_making = go_on = false;
    supply.SetLimit(1);
    while (!in_the_making) std::this_thread::yield();
    Thread again("release", ThreadPriority::kNormal, [&] { go_on = true; });
    ASSERT_TRUE(supply.Take().ok());
    EXPECT_TRUE(go_on);
    EXPECT_EQ(supply.chunks(), 0u);
    again.Join();
  }
  SyncPoint::Arm(nullptr);
}

TEST(ChunkSupply, WithoutAThreadNothingIsMadeAhead) {
  ChunkSupply supply(kChunk, /*background=*/false);
  supply.SetLimit(5);
  EXPECT_EQ(supply.chunks(), 0u);
  auto chunk = supply.Take();
  ASSERT_TRUE(chunk.ok());
  EXPECT_EQ(chunk->size(), kChunk);
  EXPECT_EQ(supply.chunks(), 0u);
}

TEST(ChunkSupply, WhoTakesMeetsTheLackOfMemory) {
  ChunkSupply supply(std::uint64_t{1} << 47, /*background=*/true);  // More than can be addressed.
  supply.SetLimit(2);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(supply.Take().status().code(), StatusCode::kOutOfMemory);
    supply.SetLimit(2);
  }
}

TEST(GhostKeys, RemembersTheLastWindowAndForgetsWhatIsTaken) {
  for (const std::uint64_t rows : {std::uint64_t{1000}, std::uint64_t{200'000}}) {
    GhostKeys ghosts;
    ASSERT_TRUE(ghosts.Reserve(rows).ok());
    EXPECT_EQ(ghosts.bytes(), GhostKeys::BytesFor(rows));
    const std::uint64_t window = rows * 9 / 10;
    ghosts.SetWindow(window);
    // Many windows, so that times come round several times.
    const Key end = 20 * window;
    for (Key key = 0; key < end; ++key) ghosts.Add(MixKey(key));
    const auto found = [&](Key first, Key last) {
      std::uint64_t count = 0;
      for (Key key = first; key < last; ++key) count += ghosts.Take(MixKey(key)) ? 1 : 0;
      return count;
    };
    const std::uint64_t slack = window / 500 + 1;  // A window is counted in about 1024 times.
    EXPECT_LE(found(0, end - window - slack), end / 50'000 + 3) << "taken for others";
    EXPECT_LE(found(2 * end, 3 * end), end / 50'000 + 3);
    const std::uint64_t lately = found(end - window + slack, end);
    EXPECT_GT(lately, window * 9 / 10) << "the sixteenth of a line makes room for the next";
    EXPECT_EQ(found(end - window + slack, end), 0u) << "taken before";
  }
}

TEST(GhostKeys, ReservesAndGivesBack) {
  GhostKeys ghosts;
  EXPECT_EQ(ghosts.bytes(), 0u);
  ASSERT_TRUE(ghosts.Reserve(100'000).ok());
  ghosts.SetWindow(100);
  ghosts.Add(MixKey(1));
  EXPECT_TRUE(ghosts.Take(MixKey(1)));
  EXPECT_FALSE(ghosts.Take(MixKey(1)));
  ASSERT_TRUE(ghosts.Reserve(10).ok());
  EXPECT_EQ(ghosts.bytes(), GhostKeys::BytesFor(10));
  ghosts.Add(MixKey(2));
  EXPECT_TRUE(ghosts.Take(MixKey(2)));
}

}  // namespace
}  // namespace terrace
