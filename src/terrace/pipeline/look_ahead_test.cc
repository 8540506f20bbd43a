#include "terrace/pipeline/look_ahead.h"

#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/clock.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

constexpr std::uint64_t kTick = FutureKeys::kTickExamples;

// Rows and evictions as caches tell them: with room, or full of rows that come.
constexpr LookAheadRows kRoom{.unpinned = 100, .coming = 50, .evicted = 0, .evicted_coming = 0};
constexpr LookAheadRows kFull{.unpinned = 100, .coming = 90, .evicted = 0, .evicted_coming = 0};

TEST(LookAheadDistance, GrowsWhileThereIsRoomAndShrinksWhereThereIsNone) {
  std::uint64_t planned = 1000;
  LookAheadDistance distance(planned, 20'000);
  EXPECT_EQ(distance.examples(), 100'000u) << "five times what filled memory";
  distance.Update(planned += 1000, 0, kRoom);
  EXPECT_EQ(distance.examples(), 100'000u) << "so much is not known yet";
  distance.Update(planned += 10'000, 1'000'000, kRoom);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 105'000, 2) << "half of what was trained";
  distance.Update(planned += 10'000, 106'000, kRoom);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 106'000, 2) << "no more than is known";
  distance.Update(planned += 10'000, 1'000'000, {.unpinned = 100, .coming = 95});
  EXPECT_NEAR(static_cast<double>(distance.examples()), 104'889, 2) << "by how much it is too full";
  distance.Update(planned += 10'000, 1'000'000, kFull);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 104'889, 2) << "as it should be";
  distance.Update(planned += 10'000, 1'000'000, {.unpinned = 100, .coming = 100});
  EXPECT_NEAR(static_cast<double>(distance.examples()), 102'667, 2);
  distance.Update(planned += 10'000, 1'000'000, {.unpinned = 0, .coming = 0});  // All are pinned.
  EXPECT_NEAR(static_cast<double>(distance.examples()), 107'667, 2);
  // Rows that come again were evicted, more than one in a hundred; then none more.
  const LookAheadRows evicts{.unpinned = 100, .coming = 10, .evicted = 1000, .evicted_coming = 11};
  distance.Update(planned += 10'000, 1'000'000, evicts);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 97'667, 2);
  distance.Update(planned += 10'000, 1'000'000, evicts);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 102'667, 2);
  // Less is known: it does not grow, but shrinks from what counts.
  distance.Update(planned += 1000, 20'000, evicts);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 102'667, 2);
  LookAheadRows full = evicts;
  full.coming = 100;
  distance.Update(planned += 1000, 20'000, full);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 19'778, 2);
  for (int i = 0; i < 100; ++i) distance.Update(planned += 10'000, 1'000'000, full);
  EXPECT_EQ(distance.examples(), kTick) << "never nothing";
}

class LookAheadTest : public testing::Test {
 protected:
  static constexpr std::uint32_t kMinibatch = 512;

  void SetUp() override {
    data_.format = "synthetic";
    data_.rows = 100'000;
    data_.cardinality = 10'000'000;
    data_.zipf = 0.3;
    data_.categorical_slots = 3;
    Make(4 << 20);
  }

  void Make(std::uint64_t bytes) {
    auto future = FutureKeys::Create(bytes);
    ASSERT_TRUE(future.ok());
    future_ = std::move(future).value();
  }
  std::unique_ptr<LookAhead> MakeLookAhead() {
    return std::make_unique<LookAhead>([this] { return OpenSource(&fs_, data_); }, kMinibatch,
                                       future_.get());
  }

  // The keys of so many examples from one on.
  std::vector<Key> KeysOf(std::uint64_t first, std::uint32_t examples) {
    auto source = OpenSource(&fs_, data_);
    EXPECT_TRUE(source.ok());
    EXPECT_TRUE((*source)->Seek(At(first)).ok());
    auto batch = (*source)->Next(examples, kMinibatch);
    EXPECT_TRUE(batch.ok() && batch->has_value());
    return (*batch)->keys;
  }

  static DataCursor At(std::uint64_t example) {
    DataCursor cursor;
    cursor.examples = cursor.example_in_epoch = example;
    return cursor;
  }

  std::uint64_t CountComing(std::span<const Key> keys) const {
    std::uint64_t coming = 0;
    for (const Key key : keys) coming += future_->Coming(MixKey(key)) ? 1 : 0;
    return coming;
  }
  std::uint64_t CountKnown(std::span<const Key> keys) const {
    std::uint64_t known = 0;
    for (const Key key : keys) {
      known += future_->TicksUntilNext(MixKey(key)) != FutureKeys::kNever ? 1 : 0;
    }
    return known;
  }

  // How many examples from one on there is room for.
  std::uint64_t RoomFrom(std::uint64_t first, std::uint64_t bytes, std::uint64_t within) {
    auto future = FutureKeys::Create(bytes);
    EXPECT_TRUE(future.ok());
    (*future)->SetNow(first);
    (*future)->SetWithin(within);
    std::uint64_t ahead = 0;
    for (; (*future)->CanAdd(first + ahead + kTick); ahead += kTick) {
      (*future)->Add(KeysOf(first + ahead, kTick), first + ahead + kTick - 1);
    }
    return ahead;
  }

  static void Await(const std::function<bool()>& done) {
    const double start = Clock::Real()->MonotonicSeconds();
    while (!done()) {
      ASSERT_LT(Clock::Real()->MonotonicSeconds() - start, 120) << "it hangs";
      std::this_thread::yield();
    }
  }

  MemoryFileSystem fs_;
  DataOptions data_;
  std::unique_ptr<FutureKeys> future_;
};

TEST_F(LookAheadTest, KnowsWhatComesAsFarAsThereIsRoomAndKeepsRowsWithinTheDistance) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 19;  // Of 262,144 keys.
  const std::uint64_t within = 20'000;                      // Five times what filled memory.
  const std::uint64_t known = RoomFrom(10 * kMinibatch, kBytes, within);
  EXPECT_GT(known, 60'000u) << "more than the distance";
  EXPECT_LT(known, data_.rows - 20'000) << "and less than the log";
  Make(kBytes);
  const std::unique_ptr<LookAhead> look_ahead = MakeLookAhead();
  EXPECT_FALSE(look_ahead->begun());
  look_ahead->Begin(At(10 * kMinibatch), 4000);
  EXPECT_TRUE(look_ahead->begun());
  Await([&] { return look_ahead->examples_ahead() == known; });
  const std::vector<Key> soon = KeysOf(10 * kMinibatch, within / kMinibatch * kMinibatch);
  // A few are asked for again beyond it, which is all that is known of them.
  EXPECT_GE(CountComing(soon), soon.size() * 9 / 10);
  const std::vector<Key> late = KeysOf(60 * kMinibatch, 40 * kMinibatch);
  EXPECT_LT(CountComing(late), late.size() / 2) << "it is beyond the distance";
  EXPECT_GE(CountKnown(late), late.size() * 95 / 100) << "but known";
  // Training goes on: what only it asked for is forgotten, and more is known.
  const std::vector<Key> latest = KeysOf((known + 20'000) / kMinibatch * kMinibatch, kMinibatch);
  EXPECT_LT(CountKnown(latest), latest.size() / 2);
  look_ahead->SetPlanned(At(60 * kMinibatch), kRoom);
  Await([&] { return CountComing(late) > late.size() * 8 / 10; });  // It is near now.
  look_ahead->SetPlanned(At(100 * kMinibatch), kRoom);
  Await([&] { return CountKnown(latest) > latest.size() * 9 / 10; });
  const std::vector<Key> past = KeysOf(20 * kMinibatch, 10 * kMinibatch);
  EXPECT_LT(CountKnown(past), past.size() / 2);
  look_ahead->Stop();
  EXPECT_GT(look_ahead->examples_ahead(), 0u);
}

TEST_F(LookAheadTest, EndsWithTheLogAndWithoutBeingUsed) {
  const std::unique_ptr<LookAhead> look_ahead = MakeLookAhead();
  look_ahead->Begin(At(0), 1'000'000);
  Await([&] { return look_ahead->examples_ahead() == data_.rows; });
  look_ahead->SetPlanned(At(data_.rows), kRoom);
  EXPECT_EQ(look_ahead->examples_ahead(), 0u);
  MakeLookAhead();                           // Never begins.
  MakeLookAhead()->Begin(At(0), 1'000'000);  // Ends in the midst.
}

TEST_F(LookAheadTest, ALogThatIsNotThereEndsNothingElse) {
  LookAhead look_ahead([] { return NotFoundError("no such log"); }, kMinibatch, future_.get());
  look_ahead.Begin(At(0), 1000);
  look_ahead.SetPlanned(At(kMinibatch), kRoom);
  look_ahead.Stop();
  EXPECT_EQ(future_->coming(), 0u);
}

}  // namespace
}  // namespace terrace
