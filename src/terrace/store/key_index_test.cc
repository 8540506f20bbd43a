#include "terrace/store/key_index.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/rng.h"

namespace terrace {
namespace {

constexpr int kTestRowBits = 12;

// How the hashes of a test lie.
enum class Spread {
  kRandom,  // And some at the very end.
  kNarrow,  // In one segment with equal homes, as an attacker would choose keys.
  kAlike,   // Groups that only their lowest bits tell apart.
};

std::uint64_t DrawHash(Spread spread, Rng* rng) {
  switch (spread) {
    case Spread::kNarrow:
      return ~std::uint64_t{0} - (rng->Below(900) << 28);
    case Spread::kAlike:
      return MixKey(rng->Below(60)) >> 28 << 28 | rng->Below(12);
    case Spread::kRandom:
      break;
  }
  return rng->Below(8) == 0 ? ~std::uint64_t{0} - rng->Below(4) : MixKey(rng->Below(20000));
}

template <typename Index>
class Model {
 public:
  Model(std::uint64_t seed, Spread spread) : rng_(seed), spread_(spread), index_(kTestRowBits) {}

  void Step() {
    std::set<std::uint64_t> chosen;
    const std::size_t n = 1 + rng_.Below(200);
    while (chosen.size() < n) chosen.insert(DrawHash(spread_, &rng_));
    hashes_.assign(chosen.begin(), chosen.end());
    places_.resize(n);
    for (Place& place : places_) {
      place = MakePlace(static_cast<std::uint32_t>(rng_.Below(index_.max_slots())),
                        rng_.Below(1 << kTestRowBits));
    }
    switch (rng_.Below(4)) {
      case 0:
        return Write();
      case 1:
        return Move();
      case 2:
        return Erase();
      default:
        return Lookup();
    }
  }

  // What the index has, of all that it should have.
  std::map<std::uint64_t, Place> Present() const {
    std::map<std::uint64_t, Place> present;
    for (const auto& [hash, place] : model_) index_.Lookup({&hash, 1}, &present[hash]);
    return present;
  }
  const std::map<std::uint64_t, Place>& expected() const { return model_; }
  const Index& index() const { return index_; }

 private:
  Place InModel(std::uint64_t hash) const {
    const auto it = model_.find(hash);
    return it == model_.end() ? kNoPlace : it->second;
  }
  // The drawn hashes that are in the index, or those that are not.
  std::vector<std::uint64_t> Drawn(bool present) const {
    std::vector<std::uint64_t> drawn;
    for (const std::uint64_t hash : hashes_) {
      if (model_.contains(hash) == present) drawn.push_back(hash);
    }
    return drawn;
  }

  void Write() {
    const std::vector<std::uint64_t> there = Drawn(true), added = Drawn(false);
    std::vector<Place> previous(there.size());
    index_.Replace(there, places_.data(), previous.data());
    for (std::size_t i = 0; i < there.size(); ++i) {
      ASSERT_EQ(previous[i], InModel(there[i]));
      model_[there[i]] = places_[i];
    }
    ASSERT_TRUE(index_.Reserve(added).ok());
    index_.Insert(added, places_.data());
    for (std::size_t i = 0; i < added.size(); ++i) model_[added[i]] = places_[i];
  }

  void Move() {
    const bool remove = rng_.Below(2) == 0;
    std::vector<Place> from(hashes_.size());
    std::vector<std::uint8_t> moved(hashes_.size());
    for (std::size_t i = 0; i < hashes_.size(); ++i) {
      from[i] = rng_.Below(2) == 0 ? InModel(hashes_[i]) : MakePlace(1, 2);
      if (remove) places_[i] = kNoPlace;
    }
    index_.Move(hashes_, from.data(), places_.data(), moved.data());
    for (std::size_t i = 0; i < hashes_.size(); ++i) {
      const bool expected = InModel(hashes_[i]) != kNoPlace && InModel(hashes_[i]) == from[i];
      ASSERT_EQ(moved[i] != 0, expected);
      if (!expected) continue;
      if (remove) {
        model_.erase(hashes_[i]);
      } else {
        model_[hashes_[i]] = places_[i];
      }
    }
  }

  void Erase() {
    const std::vector<std::uint64_t> there = Drawn(true);
    std::vector<Place> previous(there.size());
    index_.Erase(there, previous.data());
    for (std::size_t i = 0; i < there.size(); ++i) {
      ASSERT_EQ(previous[i], InModel(there[i]));
      model_.erase(there[i]);
    }
  }

  void Lookup() {
    index_.Lookup(hashes_, places_.data());
    for (std::size_t i = 0; i < hashes_.size(); ++i) {
      if (model_.contains(hashes_[i])) {
        ASSERT_EQ(places_[i], InModel(hashes_[i]));
      } else if (places_[i] != kNoPlace) {
        // Another's, which it can't be told from.
        bool alike = false;
        for (const auto& [hash, place] : model_) {
          alike |= place == places_[i] && index_.Alike(hash, hashes_[i]);
        }
        ASSERT_TRUE(alike);
      }
    }
  }

  Rng rng_;
  const Spread spread_;
  Index index_;
  std::map<std::uint64_t, Place> model_;
  std::vector<std::uint64_t> hashes_;
  std::vector<Place> places_;
};

template <typename Index>
class IndexByKey : public ::testing::Test {};
using Indexes = ::testing::Types<KeyIndex, ExactIndex>;
TYPED_TEST_SUITE(IndexByKey, Indexes);

TYPED_TEST(IndexByKey, EqualsMap) {
  for (const Spread spread : {Spread::kRandom, Spread::kNarrow, Spread::kAlike}) {
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Model<TypeParam> model(seed, spread);
      for (int step = 0; step < 400; ++step) {
        model.Step();
        if (this->HasFatalFailure()) return;
      }
      EXPECT_EQ(model.index().size(), model.expected().size());
      EXPECT_EQ(model.Present(), model.expected());
    }
  }
}

// The greatest place of the narrowest rows and of the widest.
TYPED_TEST(IndexByKey, PlacesUpToTheLast) {
  for (const int row_bits : {0, 1, 12, 20}) {
    TypeParam index(row_bits);
    const std::uint64_t hash = MixKey(5);
    const Place last = MakePlace(index.max_slots() - 1, (std::uint64_t{1} << row_bits) - 1);
    ASSERT_TRUE(index.Reserve({&hash, 1}).ok());
    index.Insert({&hash, 1}, &last);
    Place found;
    index.Lookup({&hash, 1}, &found);
    EXPECT_EQ(found, last);
  }
}

// Bytes a key over a growth by four: the mean, and the most.
template <typename Index>
std::pair<double, double> BytesAKey(std::uint64_t keys) {
  Index index(kTestRowBits);
  std::vector<std::uint64_t> hashes(keys / 500);
  std::vector<Place> places(hashes.size(), MakePlace(7, 1));
  double most = 0, sum = 0;
  int points = 0;
  for (std::uint64_t key = 0; key < keys; key += hashes.size()) {
    for (std::size_t i = 0; i < hashes.size(); ++i) hashes[i] = MixKey(key + i);
    EXPECT_TRUE(index.Reserve(hashes).ok());
    index.Insert(hashes, places.data());
    if (key < keys / 4) continue;
    const double bytes = static_cast<double>(index.bytes()) / static_cast<double>(index.size());
    most = std::max(most, bytes);
    sum += bytes;
    ++points;
  }
  return {sum / points, most};
}

// key_index_bench shows the growth from ten to a hundred million keys.
TEST(KeyIndex, BytesAKeyWhileGrowing) {
  const auto [mean, most] = BytesAKey<KeyIndex>(4'000'000);
  EXPECT_LT(mean, 8.8);
  EXPECT_LT(most, 10.2);
  const auto [exact_mean, exact_most] = BytesAKey<ExactIndex>(2'000'000);
  EXPECT_LT(exact_mean, 16);
  EXPECT_LT(exact_most, 19);
}

}  // namespace
}  // namespace terrace
