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

  std::uint64_t CountKnown(std::span<const Key> keys) const {
    std::uint64_t known = 0;
    for (const Key key : keys) {
      known += future_->TicksUntilNext(MixKey(key)) != FutureKeys::kNever ? 1 : 0;
    }
    return known;
  }

  // How many examples from one on there is room for.
  std::uint64_t RoomFrom(std::uint64_t first, std::uint64_t bytes) {
    auto future = FutureKeys::Create(bytes);
    EXPECT_TRUE(future.ok());
    (*future)->SetNow(first);
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

TEST_F(LookAheadTest, KnowsWhatComesAsFarAsThereIsRoom) {
  constexpr std::uint64_t kBytes = std::uint64_t{5} << 17;  // Of 245,760 keys.
  const std::uint64_t known = RoomFrom(10 * kMinibatch, kBytes);
  EXPECT_GT(known, 50'000u);
  EXPECT_LT(known, data_.rows - 20'000) << "less than the log";
  Make(kBytes);
  const std::unique_ptr<LookAhead> look_ahead = MakeLookAhead();
  EXPECT_FALSE(look_ahead->begun());
  look_ahead->Begin(At(10 * kMinibatch));
  EXPECT_TRUE(look_ahead->begun());
  Await([&] { return look_ahead->examples_ahead() == known; });
  const std::vector<Key> late = KeysOf(60 * kMinibatch, 40 * kMinibatch);
  EXPECT_GE(CountKnown(late), late.size() * 93 / 100);
  // Training goes on: what only it asked for is forgotten, and more is known.
  const std::vector<Key> latest = KeysOf((known + 20'000) / kMinibatch * kMinibatch, kMinibatch);
  EXPECT_LT(CountKnown(latest), latest.size() / 2);
  look_ahead->SetPlanned(At(100 * kMinibatch));
  Await([&] { return CountKnown(latest) > latest.size() * 9 / 10; });
  const std::vector<Key> past = KeysOf(20 * kMinibatch, 10 * kMinibatch);
  EXPECT_LT(CountKnown(past), past.size() / 2);
  look_ahead->Stop();
  EXPECT_GT(look_ahead->examples_ahead(), 0u);
}

TEST_F(LookAheadTest, EndsWithTheLogAndWithoutBeingUsed) {
  const std::unique_ptr<LookAhead> look_ahead = MakeLookAhead();
  look_ahead->Begin(At(0));
  Await([&] { return look_ahead->examples_ahead() == data_.rows; });
  look_ahead->SetPlanned(At(data_.rows));
  EXPECT_EQ(look_ahead->examples_ahead(), 0u);
  MakeLookAhead();                // Never begins.
  MakeLookAhead()->Begin(At(0));  // Ends in the midst.
}

TEST_F(LookAheadTest, ALogThatIsNotThereEndsNothingElse) {
  LookAhead look_ahead([] { return NotFoundError("no such log"); }, kMinibatch, future_.get());
  look_ahead.Begin(At(0));
  look_ahead.SetPlanned(At(kMinibatch));
  look_ahead.Stop();
  EXPECT_EQ(future_->coming(), 0u);
}

}  // namespace
}  // namespace terrace
