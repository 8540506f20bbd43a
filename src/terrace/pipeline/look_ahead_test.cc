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
  LookAheadDistance distance(planned, 33'334);
  EXPECT_EQ(distance.examples(), 100'002u) << "three times what filled memory";
  distance.Update(planned += 1000, 0, kRoom);
  EXPECT_EQ(distance.examples(), 100'002u) << "it was not reached yet";
  distance = LookAheadDistance(planned, 100'000 / 3 + 1);
  distance.Update(planned += 10'000, 100'000, kRoom);
  EXPECT_EQ(distance.examples(), 105'002u) << "half of what was trained";
  distance.Update(planned += 10'000, 105'000, kFull);
  EXPECT_EQ(distance.examples(), 101'002u) << "by how much it is too full";
  distance.Update(planned += 10'000, 101'000, {.unpinned = 100, .coming = 75});
  EXPECT_EQ(distance.examples(), 101'002u) << "as it should be";
  distance.Update(planned += 10'000, 101'000, {.unpinned = 100, .coming = 100});
  EXPECT_NEAR(static_cast<double>(distance.examples()), 94'335, 2);
  distance.Update(planned += 10'000, 94'333, {.unpinned = 0, .coming = 0});  // All are pinned.
  EXPECT_NEAR(static_cast<double>(distance.examples()), 99'335, 2);
  // Rows that come again were evicted, more than one in a hundred; then none more.
  const LookAheadRows evicts{.unpinned = 100, .coming = 10, .evicted = 1000, .evicted_coming = 11};
  distance.Update(planned += 10'000, 99'333, evicts);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 89'335, 2);
  distance.Update(planned += 10'000, 89'333, evicts);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 94'335, 2);
  // Something else holds it up: it does not run away, but shrinks.
  distance.Update(planned += 1000, 20'000, evicts);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 94'335, 2);
  LookAheadRows full = evicts;
  full.coming = 90;
  distance.Update(planned += 1000, 20'000, full);
  EXPECT_NEAR(static_cast<double>(distance.examples()), 93'935, 2);
  for (int i = 0; i < 100; ++i) distance.Update(planned += 10'000, 0, full);
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
    auto future = FutureKeys::Create(4 << 20);
    ASSERT_TRUE(future.ok());
    future_ = std::move(future).value();
  }

  std::unique_ptr<LookAhead> Make() {
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

TEST_F(LookAheadTest, KnowsWhatComesAsFarAsItLooks) {
  const std::unique_ptr<LookAhead> look_ahead = Make();
  EXPECT_FALSE(look_ahead->begun());
  look_ahead->Begin(At(10 * kMinibatch), 10'000);
  EXPECT_TRUE(look_ahead->begun());
  const std::uint64_t most = 30'000;  // Three times what filled memory.
  Await([&] { return look_ahead->examples_ahead() + kTick > most; });
  EXPECT_LE(look_ahead->examples_ahead(), most);
  const std::vector<Key> soon = KeysOf(10 * kMinibatch, 20'000 / kMinibatch * kMinibatch);
  EXPECT_EQ(CountComing(soon), soon.size());
  const std::vector<Key> late = KeysOf(70'000 / kMinibatch * kMinibatch, 10 * kMinibatch);
  EXPECT_LT(CountComing(late), late.size() / 2) << "few keys are asked for by all";
  // Training goes on: what only it asked for is forgotten, and more is known.
  look_ahead->SetPlanned(At(60 * kMinibatch), kRoom);
  look_ahead->SetPlanned(At(100 * kMinibatch), kRoom);
  Await([&] { return look_ahead->examples_ahead() + kTick > most; });
  EXPECT_GT(CountComing(late), late.size() / 2);
  const std::vector<Key> past = KeysOf(20 * kMinibatch, 10 * kMinibatch);
  EXPECT_LT(CountComing(past), past.size() / 2);
  look_ahead->Stop();
  EXPECT_GT(look_ahead->examples_ahead(), 0u);
}

TEST_F(LookAheadTest, EndsWithTheLogAndWithoutBeingUsed) {
  const std::unique_ptr<LookAhead> look_ahead = Make();
  look_ahead->Begin(At(0), 1'000'000);
  Await([&] { return look_ahead->examples_ahead() == data_.rows; });
  look_ahead->SetPlanned(At(data_.rows), kRoom);
  EXPECT_EQ(look_ahead->examples_ahead(), 0u);
  Make();                           // Never begins.
  Make()->Begin(At(0), 1'000'000);  // Ends in the midst.
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
