// The eviction policies against plain models of them in containers of the standard library, through
// random pins, releases, departures and limits. GhostKeys.
#include "terrace/cache/eviction_policy.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/cache/ghost_keys.h"

namespace terrace {
namespace {

constexpr std::uint64_t kChunkBytes = 16 << 10;
constexpr std::uint32_t kRowBytes = 8;

// What a policy is told, of one row at a time.
class ModelPolicy {
 public:
  virtual ~ModelPolicy() = default;
  virtual void SetLimit(std::uint64_t rows) = 0;
  virtual void Visit(EntryId id) = 0;
  virtual void Admit(EntryId id, Key key) = 0;
  virtual void LastPinGone(EntryId id) = 0;
  virtual void Forget(EntryId id) = 0;
  // pinned: the rows with pins. slots: how many places of the chunk were ever used. used: of them
  // now.
  virtual std::vector<EntryId> TakeVictims(std::size_t count, const std::set<EntryId>& pinned,
                                           std::uint32_t slots, std::uint64_t used) = 0;
  virtual void PutBack(EntryId victim) = 0;
  virtual void LeaveForGood(EntryId /*victim*/) {}
  virtual bool IsHot(EntryId id) const = 0;
};

class S3FifoModel final : public ModelPolicy {
 public:
  S3FifoModel(std::uint64_t rows, const FutureKeys* future) : future_(future) {
    TERRACE_CHECK(ghosts_.Reserve(rows).ok());
  }
  void SetLimit(std::uint64_t rows) override {
    limit_ = rows;
    ghosts_.SetWindow(rows - rows / 10);
  }
  void Visit(EntryId id) override {
    Row& row = rows_.at(id);
    row.visits = std::min(3, row.visits + 1);
    if (LeaveComing(id)) row.held = true;
  }
  void Admit(EntryId id, Key key) override {
    rows_[id] = {.key = key, .visits = 0, .main = ghosts_.Take(MixKey(key)), .held = true};
  }
  void LastPinGone(EntryId id) override {
    Row& row = rows_.at(id);
    if (!row.held) return;
    row.held = false;
    (row.main ? main_ : small_).push_back(id);
  }
  void Forget(EntryId id) override {
    small_.remove(id);
    main_.remove(id);
    LeaveComing(id);
    rows_.erase(id);
  }
  std::size_t coming() const {
    std::size_t rows = 0;
    for (const auto& [time, ids] : coming_) rows += ids.size();
    return rows;
  }
  std::uint64_t overdue() const { return overdue_; }
  std::uint64_t coming_evicted() const { return coming_evicted_; }
  std::vector<EntryId> TakeVictims(std::size_t count, const std::set<EntryId>& pinned,
                                   std::uint32_t /*slots*/, std::uint64_t /*used*/) override {
    std::vector<EntryId> victims;
    while (victims.size() < count && !coming_.empty() &&
           coming_.begin()->first < future_->now() / kTimeTicks) {
      const EntryId id = coming_.begin()->second.front();
      LeaveComing(id);
      if (!Comes(id)) {
        ++overdue_;
        victims.push_back(id);
        Leave(id);
      }
    }
    while (victims.size() < count && small_.size() + main_.size() + coming() > 0) {
      std::uint64_t of_small = 0;
      for (const auto& [id, row] : rows_) of_small += row.main ? 0 : 1;
      const bool small = !small_.empty() && (of_small >= limit_ / 10 || main_.empty());
      if (!small && main_.empty()) {
        const EntryId id = coming_.rbegin()->second.front();
        LeaveComing(id);
        victims.push_back(id);
        Leave(id);
        victims_[id].came = true;
        ++coming_evicted_;
        continue;
      }
      std::list<EntryId>& queue = small ? small_ : main_;
      // A group goes by where its first row was chosen from.
      std::size_t group = 1;
      if (future_ != nullptr) {
        group = std::min({std::size_t{16}, count - victims.size(), queue.size()});
      }
      std::vector<EntryId> taken;
      for (; group > 0; --group) {
        taken.push_back(queue.front());
        queue.pop_front();
      }
      for (const EntryId id : taken) {
        Row& row = rows_.at(id);
        const bool visited = row.visits > 0;
        if (small && visited) row = {.key = row.key, .visits = 0, .main = true, .held = false};
        if (pinned.contains(id)) {
          row.held = true;
        } else if (future_ != nullptr && Comes(id)) {
          // It has its place by when.
        } else if (visited) {
          if (!small) --row.visits;
          main_.push_back(id);
        } else {
          victims.push_back(id);
          Leave(id);
        }
      }
    }
    return victims;
  }
  void PutBack(EntryId victim) override {
    Row& row = rows_[victim] = victims_.at(victim);
    if (std::exchange(row.came, false)) --coming_evicted_;
    (row.main ? main_ : small_).push_back(victim);
  }
  void LeaveForGood(EntryId victim) override {
    const Row& row = victims_.at(victim);
    if (!row.main) ghosts_.Add(MixKey(row.key));
  }
  bool IsHot(EntryId id) const override { return rows_.at(id).main || rows_.at(id).visits > 0; }

 private:
  struct Row {
    Key key;
    int visits;
    bool main, held;
    bool came = false;  // A victim though it was known to come.
  };
  static constexpr std::uint64_t kTimeTicks = 8;

  void Leave(EntryId id) {
    victims_[id] = rows_.at(id);
    rows_.erase(id);
  }
  // Whether it is known to come; then it has its place among those of its time.
  bool Comes(EntryId id) {
    Row& row = rows_.at(id);
    const std::uint16_t ticks = future_->TicksUntilNext(MixKey(row.key));
    if (ticks == FutureKeys::kNever) return false;
    row = {.key = row.key, .visits = 0, .main = true, .held = false};
    coming_[(future_->now() + ticks) / kTimeTicks].push_back(id);
    return true;
  }
  bool LeaveComing(EntryId id) {
    for (auto& [time, ids] : coming_) {
      const auto found = std::find(ids.begin(), ids.end(), id);
      if (found == ids.end()) continue;
      ids.erase(found);
      if (ids.empty()) coming_.erase(time);
      return true;
    }
    return false;
  }

  std::uint64_t limit_ = 0;
  std::map<EntryId, Row> rows_;
  std::map<EntryId, Row> victims_;  // As each one was last.
  std::list<EntryId> small_, main_;
  std::map<std::uint64_t, std::list<EntryId>> coming_;  // By time.
  std::uint64_t overdue_ = 0;                           // Rows that did not come.
  std::uint64_t coming_evicted_ = 0;
  GhostKeys ghosts_;
  const FutureKeys* const future_;
};

class LruLfuModel final : public ModelPolicy {
 public:
  explicit LruLfuModel(const EvictionOptions& options) : options_(options) {}
  void SetLimit(std::uint64_t rows) override {
    lru_limit_ = static_cast<std::uint64_t>(static_cast<double>(rows) * options_.lru_share);
  }
  void Visit(EntryId id) override {
    ++visits_;
    frequency_.at(id) = std::min(255, frequency_.at(id) + 1);
    TakeOut(id);
    held_.insert(id);
  }
  void Admit(EntryId id, Key /*key*/) override {
    ++visits_;
    frequency_[id] = 1;
    held_.insert(id);
  }
  void LastPinGone(EntryId id) override {
    held_.erase(id);
    if (options_.type == EvictionType::kLruLfu) {
      lru_.push_back(id);
    } else {
      lfu_[ClassOf(frequency_[id])].push_back(id);
    }
  }
  void Forget(EntryId id) override {
    TakeOut(id);
    held_.erase(id);
    frequency_.erase(id);
  }
  std::vector<EntryId> TakeVictims(std::size_t count, const std::set<EntryId>& /*pinned*/,
                                   std::uint32_t slots, std::uint64_t used) override {
    while (!lru_.empty() && lru_.size() + held_.size() > lru_limit_) {
      lfu_[ClassOf(frequency_[lru_.front()])].push_back(lru_.front());
      lru_.pop_front();
    }
    Age(count, slots, used);
    std::vector<EntryId> victims;
    while (victims.size() < count) {
      std::erase_if(lfu_, [](const auto& entry) { return entry.second.empty(); });
      std::list<EntryId>& from = lfu_.empty() ? lru_ : lfu_.begin()->second;
      if (from.empty()) break;
      victims.push_back(from.front());
      from.pop_front();
      victims_[victims.back()] = frequency_.at(victims.back());
      frequency_.erase(victims.back());
    }
    return victims;
  }
  void PutBack(EntryId victim) override {
    frequency_[victim] = victims_.at(victim);
    lfu_[ClassOf(frequency_[victim])].push_back(victim);
  }
  bool IsHot(EntryId id) const override { return frequency_.at(id) > 1; }

 private:
  // Exact up to 15, then eight to a class.
  static int ClassOf(int frequency) { return frequency < 16 ? frequency : 14 + frequency / 8; }
  void TakeOut(EntryId id) {
    lru_.remove(id);
    for (auto& [frequency_class, rows] : lfu_) rows.remove(id);
  }
  void Age(std::size_t victims, std::uint32_t slots, std::uint64_t used) {
    if (options_.half_life == 0) return;
    due_ = std::min(due_ + visits_ / options_.half_life, static_cast<double>(used));
    visits_ = 0;
    for (std::size_t left = 8 * victims; due_ >= 1 && left > 0; --left, --due_) {
      if (hand_ >= slots) {  // A step for the end of the chunk.
        hand_ = 0;
        continue;
      }
      const EntryId id = hand_++;
      const auto frequency = frequency_.find(id);
      if (frequency == frequency_.end()) continue;
      const int before = ClassOf(frequency->second);
      frequency->second /= 2;
      const int after = ClassOf(frequency->second);
      const auto list = lfu_.find(before);
      if (after == before || list == lfu_.end()) continue;
      const auto place = std::find(list->second.begin(), list->second.end(), id);
      if (place == list->second.end()) continue;  // In the LRU, or held.
      list->second.erase(place);
      lfu_[after].push_back(id);
    }
  }

  const EvictionOptions options_;
  std::uint64_t lru_limit_ = 0;
  std::map<EntryId, int> frequency_;
  std::map<EntryId, int> victims_;  // As each one was last.
  std::set<EntryId> held_;
  std::list<EntryId> lru_;
  std::map<int, std::list<EntryId>> lfu_;
  double visits_ = 0, due_ = 0;
  std::uint32_t hand_ = 0;
};

// Does what the cache does with a policy, and the same with its model.
class Comparison {
 public:
  Comparison(const EvictionOptions& options, std::uint64_t seed, FutureKeys* future = nullptr)
      : rng_(seed), arena_(kRowBytes, kChunkBytes), future_(future) {
    auto memory = HugeBuffer::Allocate(kChunkBytes);
    TERRACE_CHECK(memory.ok());
    arena_.AddChunk(std::move(memory).value());
    rows_ = arena_.rows_per_chunk();
    auto made = MakeEvictionPolicy(options, &arena_, future);
    TERRACE_CHECK(made.ok());
    policy_ = std::move(made).value();
    TERRACE_CHECK(policy_->Reserve(rows_).ok());
    if (options.type == EvictionType::kS3Fifo) {
      model_ = std::make_unique<S3FifoModel>(rows_, future);
    } else {
      model_ = std::make_unique<LruLfuModel>(options);
    }
    SetLimit(rows_);
  }

  void Run(int steps) {
    for (int step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
      const std::uint64_t action = rng_.Below(100);
      if (action < 50) {
        Pin();
      } else if (action < 94) {
        if (!sets_.empty()) Unpin(rng_.Below(sets_.size()));
      } else if (action < 97) {
        ForgetSome();
      } else if (action < 98) {
        SetLimit(rows_ / 2 + rng_.Below(rows_ / 2));
      } else {
        policy_->Sweep();
      }
      ASSERT_EQ(policy_->bytes(), policy_->BytesFor(rows_));
      for (const auto& [key, id] : cached_) {
        const bool hot = arena_.entry(id).frequency >= policy_->hot_frequency();
        ASSERT_EQ(hot, model_->IsHot(id)) << "key " << key;
        (hot ? hot_ : others_) += 1;
      }
    }
    EXPECT_GT(std::min(hot_, others_), 1000u) << "both kinds are to be there";
  }
  std::uint64_t victims() const { return victims_; }
  std::uint64_t cold_victims() const { return cold_victims_; }  // Where the future is known.
  // Of these, those that come again; and the most rows that stayed for it.
  std::uint64_t coming_evicted() const { return policy_->coming().evicted; }
  std::uint64_t most_coming() const { return most_coming_; }
  std::uint64_t overdue() const { return static_cast<S3FifoModel*>(model_.get())->overdue(); }

 private:
  void SetLimit(std::uint64_t rows) {
    policy_->SetLimit(rows);
    model_->SetLimit(rows);
  }

  // Few keys are asked for often, and what is asked for moves.
  std::vector<Key> RandomKeys() {
    std::set<Key> keys;
    const std::uint64_t count = 1 + rng_.Below(100);
    const std::uint64_t base = ++pins_ / 50 * 20;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t range = std::uint64_t{16} << rng_.Below(9);
      keys.insert(base + rng_.Below(range));
    }
    return {keys.begin(), keys.end()};
  }

  // Some of the keys that the next pins may ask for are known.
  void LookAhead() {
    if (future_ == nullptr) return;
    ticks_ += rng_.Below(3);
    future_->SetNow(ticks_ * FutureKeys::kTickExamples);
    std::vector<Key> keys;
    // At times nearly all.
    for (std::uint64_t i = 0; i < 10 + pins_ / 100 % 4 * 400; ++i) {
      keys.push_back(pins_ / 50 * 20 + rng_.Below(2000));
    }
    const std::uint64_t example = (ticks_ + 30) * FutureKeys::kTickExamples;
    if (future_->CanAdd(example)) future_->Add(keys, example);
  }

  void Pin() {
    LookAhead();
    if (pinned_.size() + 100 > rows_ || sets_.size() > 6) return;
    const std::vector<Key> keys = RandomKeys();
    std::vector<EntryId> set, present;
    std::vector<Key> missing;
    for (const Key key : keys) {
      const auto found = cached_.find(key);
      if (found == cached_.end()) {
        missing.push_back(key);
      } else {
        present.push_back(found->second);
        model_->Visit(found->second);
      }
    }
    policy_->Visit(present);
    for (const EntryId id : present) AddPin(id);
    std::vector<EntryId> fresh;
    while (fresh.size() < missing.size()) {
      const EntryId id = arena_.Allocate();
      if (id != kNoEntry) {
        fresh.push_back(id);
        continue;
      }
      ASSERT_NO_FATAL_FAILURE(Evict(missing.size() - fresh.size()));
    }
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      arena_.entry(fresh[i]).key = missing[i];
      cached_[missing[i]] = fresh[i];
      model_->Admit(fresh[i], missing[i]);
    }
    policy_->Admit(fresh);
    for (const EntryId id : fresh) {
      ASSERT_GE(arena_.entry(id).place, kHeld);
      arena_.Unhold(id);
      AddPin(id);
    }
    set = present;
    set.insert(set.end(), fresh.begin(), fresh.end());
    sets_.push_back(std::move(set));
  }

  void AddPin(EntryId id) {
    if (arena_.entry(id).pins++ == 0) pinned_.insert(id);
  }

  void Evict(std::size_t wanted) {
    const std::size_t count = 1 + rng_.Below(wanted);
    std::vector<EntryId> taken(count, kNoEntry);
    taken.resize(policy_->TakeVictims(count, taken.data()));
    ASSERT_EQ(taken, model_->TakeVictims(count, pinned_, arena_.touched(0), arena_.used_rows()));
    ASSERT_GT(taken.size(), 0u);
    victims_ += taken.size();
    most_coming_ = std::max(most_coming_, policy_->coming().rows);
    if (future_ != nullptr) {
      const auto* const model = static_cast<S3FifoModel*>(model_.get());
      ASSERT_EQ(policy_->coming().rows, model->coming());
      ASSERT_EQ(policy_->coming().evicted, model->coming_evicted());
    }
    std::vector<EntryId> stay, leave;
    for (const EntryId id : taken) {
      ASSERT_EQ(arena_.entry(id).place, kHeld);
      ASSERT_EQ(arena_.entry(id).pins, 0);
      const bool hot = arena_.entry(id).frequency >= policy_->hot_frequency();
      if (future_ != nullptr && !hot) {
        ++cold_victims_;
        ASSERT_EQ(future_->TicksUntilNext(MixKey(arena_.entry(id).key)), FutureKeys::kNever);
      }
      if (rng_.Below(8) == 0) {
        stay.push_back(id);
        model_->PutBack(id);
        continue;
      }
      leave.push_back(id);
      model_->LeaveForGood(id);
    }
    policy_->PutBack(stay);
    policy_->Leave(leave);
    for (const EntryId id : leave) Free(id);
  }

  void Free(EntryId id) {
    cached_.erase(arena_.entry(id).key);
    arena_.Free(id);
  }

  void Unpin(std::size_t which) {
    std::vector<EntryId> released;
    for (const EntryId id : sets_[which]) {
      Entry& entry = arena_.entry(id);
      if (--entry.pins > 0) continue;
      pinned_.erase(id);
      if (rng_.Below(20) == 0) {  // As a row that no training has touched.
        policy_->Forget(id);
        model_->Forget(id);
        Free(id);
        continue;
      }
      if (entry.place == kHeld) released.push_back(id);
      model_->LastPinGone(id);
    }
    policy_->Release(released);
    sets_.erase(sets_.begin() + static_cast<std::ptrdiff_t>(which));
  }

  // As when a chunk is given back.
  void ForgetSome() {
    std::vector<EntryId> loose;
    for (const auto& [key, id] : cached_) {
      if (!pinned_.contains(id) && rng_.Below(10) == 0) loose.push_back(id);
    }
    for (const EntryId id : loose) {
      policy_->Forget(id);
      model_->Forget(id);
      Free(id);
    }
  }

  Rng rng_;
  RowArena arena_;
  FutureKeys* const future_;
  std::uint64_t ticks_ = 0, most_coming_ = 0;
  std::uint64_t rows_ = 0;
  std::unique_ptr<EvictionPolicy> policy_;
  std::unique_ptr<ModelPolicy> model_;
  std::map<Key, EntryId> cached_;
  std::set<EntryId> pinned_;
  std::vector<std::vector<EntryId>> sets_;
  std::uint64_t pins_ = 0, victims_ = 0, cold_victims_ = 0;
  std::uint64_t hot_ = 0, others_ = 0;  // Rows that were seen to be so, after each step.
};

void Compare(const EvictionOptions& options) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Comparison comparison(options, seed);
    ASSERT_NO_FATAL_FAILURE(comparison.Run(2000));
    EXPECT_GT(comparison.victims(), 5000u) << "the test is about victims";
  }
}

TEST(EvictionPolicy, S3FifoAgreesWithItsModel) { Compare({.type = EvictionType::kS3Fifo}); }

TEST(EvictionPolicy, S3FifoThatKnowsWhatComesAgreesWithItsModel) {
  std::uint64_t evicted = 0, overdue = 0;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    auto future = FutureKeys::Create(1 << 16);
    ASSERT_TRUE(future.ok());
    Comparison comparison({.type = EvictionType::kS3Fifo}, seed, future->get());
    ASSERT_NO_FATAL_FAILURE(comparison.Run(2000));
    EXPECT_GT(comparison.victims(), 5000u);
    EXPECT_GT(comparison.cold_victims(), 1000u);
    EXPECT_GT(comparison.most_coming(), 50u) << "the test is about rows that stay";
    overdue += comparison.overdue();
    evicted += comparison.coming_evicted();
  }
  EXPECT_GT(evicted, 0u) << "and about those that leave all the same";
  EXPECT_GT(overdue, 0u) << "or do not come";
}

TEST(EvictionPolicy, LruLfuAgreesWithItsModel) {
  for (const double share : {0.0, 0.3, 0.5, 1.0}) {
    for (const double half_life : {0.0, 0.5, 10.0}) {
      SCOPED_TRACE(testing::Message() << "share " << share << " half-life " << half_life);
      ASSERT_NO_FATAL_FAILURE(
          Compare({.type = EvictionType::kLruLfu, .lru_share = share, .half_life = half_life}));
    }
  }
}

TEST(EvictionPolicy, PassLfuAgreesWithItsModel) {
  for (const double half_life : {0.0, 10.0}) {
    ASSERT_NO_FATAL_FAILURE(Compare({.type = EvictionType::kPassLfu, .half_life = half_life}));
  }
}

TEST(EvictionPolicy, WrongOptionsAreRefused) {
  RowArena arena(kRowBytes, kChunkBytes);
  for (const double wrong : {-0.1, 1.1, std::nan("")}) {
    EXPECT_EQ(MakeEvictionPolicy({.lru_share = wrong}, &arena).status().code(),
              StatusCode::kInvalidArgument);
  }
  for (const double wrong : {-1.0, std::nan(""), HUGE_VAL}) {
    EXPECT_EQ(MakeEvictionPolicy({.half_life = wrong}, &arena).status().code(),
              StatusCode::kInvalidArgument);
  }
}

// As rows do that can't be written while a flush is under way, round and round.
TEST(EvictionPolicy, RowsThatArePutBackTakeNoPlaceOfThoseThatLeft) {
  RowArena arena(kRowBytes, kChunkBytes);
  auto memory = HugeBuffer::Allocate(kChunkBytes);
  ASSERT_TRUE(memory.ok());
  arena.AddChunk(std::move(memory).value());
  auto policy = MakeS3FifoPolicy(&arena, nullptr);
  constexpr std::size_t kRows = 16;  // A line of ghosts.
  ASSERT_TRUE(policy->Reserve(kRows).ok());
  policy->SetLimit(kRows);
  const auto bring = [&](Key first, std::size_t count) {
    std::vector<EntryId> rows;
    for (std::size_t i = 0; i < count; ++i) {
      rows.push_back(arena.Allocate());
      arena.entry(rows.back()).key = first + i;
    }
    policy->Admit(rows);
    for (const EntryId id : rows) arena.Unhold(id);
    return rows;
  };
  const auto take = [&](std::size_t count) {
    std::vector<EntryId> victims(count);
    EXPECT_EQ(policy->TakeVictims(count, victims.data()), count);
    return victims;
  };
  constexpr std::uint64_t kLeft = 100, kStays = 200, kRemembered = 10;
  policy->Release(bring(kLeft, kRemembered));
  const std::vector<EntryId> left = take(kRemembered);
  policy->Leave(left);
  for (const EntryId id : left) arena.Free(id);
  policy->Release(bring(kStays, 1));
  for (std::size_t i = 0; i < 2 * kRows; ++i) policy->PutBack(take(1));
  std::size_t remembered = 0;
  for (const EntryId id : bring(kLeft, kRemembered)) {
    remembered += arena.entry(id).frequency >= policy->hot_frequency() ? 1 : 0;
  }
  EXPECT_EQ(remembered, kRemembered);
}

}  // namespace
}  // namespace terrace
