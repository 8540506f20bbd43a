#include "terrace/store/key_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/rng.h"
#include "terrace/base/thread.h"

namespace terrace {
namespace {

constexpr int kTestRowBits = 12;

// How the hashes of a test lie.
enum class Spread {
  kRandom,  // And some at the very end.
  kNarrow,  // In one segment with equal homes, as an attacker would choose keys.
  kAlike,   // Groups that only their lowest bits tell apart.
  kBoth,    // Such groups in one segment, with equal homes.
};

std::uint64_t DrawHash(Spread spread, Rng* rng) {
  switch (spread) {
    case Spread::kNarrow:
      return ~std::uint64_t{0} - (rng->Below(900) << 28);
    case Spread::kBoth:
      return ~std::uint64_t{0} - (rng->Below(300) << 28) - rng->Below(4);
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
    const std::uint64_t expected = rng_.Below(3) * (index_.size() + rng_.Below(5000));
    ASSERT_TRUE(index_.Reserve(added, expected).ok());
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

// The extents of a segment follow each other, none is much more than a tenth of what is before it,
// and classes grow at different times.
TEST(LineExtents, EachLineHasOne) {
  constexpr std::uint32_t kLines = 1 << 20;
  for (std::size_t c = 0; c < LineExtents::kClasses; ++c) {
    EXPECT_GE(kLineExtents.begin(c, LineExtents::kMost), LineExtents::kMostLines);
    std::size_t extent = 0;
    for (std::uint32_t line = 0; line < kLines; ++line) {
      if (line == kLineExtents.begin(c, extent) + kLineExtents.size(c, extent)) ++extent;
      const LineExtents::Spot spot = kLineExtents.Find(c, line);
      ASSERT_EQ(spot.extent, extent) << "class " << c << ", line " << line;
      ASSERT_EQ(spot.beyond, line - kLineExtents.begin(c, extent));
    }
    // Of the others, the first line and the one before.
    for (std::size_t k = extent + 1; k < LineExtents::kMost; ++k) {
      EXPECT_EQ(kLineExtents.Find(c, kLineExtents.begin(c, k)).extent, k);
      EXPECT_EQ(kLineExtents.Find(c, kLineExtents.begin(c, k) - 1).extent, k - 1);
    }
    for (std::size_t k = 0; k < LineExtents::kMost; ++k) {
      EXPECT_GE(kLineExtents.size(c, k), 1u);
      EXPECT_LE(kLineExtents.size(c, k), 2 + kLineExtents.begin(c, k) / 10);
    }
    const std::size_t next = c + 1;
    if (next == LineExtents::kClasses) continue;
    EXPECT_GT(kLineExtents.begin(next, 100), kLineExtents.begin(c, 100));
  }
}

TEST(TaggedLine, MatchesByEachOfItsWays) {
  Rng rng(3);
  int some = 0, several = 0;
  for (int round = 0; round < 20'000; ++round) {
    TaggedLine line{};
    line.state.count = static_cast<std::uint8_t>(rng.Below(TaggedLine::kWays + 1)) & 0xf;
    line.state.passed = static_cast<std::uint8_t>(rng.Below(8)) & 0x7;
    // Of few values, and such as have one half in common.
    const auto draw = [&] { return rng.Below(4) << 16 | rng.Below(4); };
    for (std::uint32_t way = 0; way < TaggedLine::kWays; ++way) line.Set(way, draw(), rng.Next());
    const std::uint64_t bits = draw();
    const std::uint32_t equal = line.MatchOneByOne(bits);
    for (std::uint32_t way = 0; way < TaggedLine::kWays; ++way) {
      ASSERT_EQ((equal >> way & 1) != 0, way < line.state.count && line.bits(way) == bits);
    }
#if defined(__SSE2__)
    ASSERT_EQ(line.MatchInTwoRegisters(bits), equal);
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    ASSERT_EQ(line.MatchInOneRegister(bits), equal);
#endif
    ASSERT_EQ(line.Match(bits), equal);
    some += equal != 0 ? 1 : 0;
    several += (equal & (equal - 1)) != 0 ? 1 : 0;
  }
  EXPECT_GT(some, 1000);
  EXPECT_GT(several, 100);
}

template <typename Index>
class IndexByKey : public ::testing::Test {};
using Indexes = ::testing::Types<KeyIndex, ExactIndex>;
TYPED_TEST_SUITE(IndexByKey, Indexes);

TYPED_TEST(IndexByKey, EqualsMap) {
  for (const Spread spread : {Spread::kRandom, Spread::kNarrow, Spread::kAlike, Spread::kBoth}) {
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
    ASSERT_TRUE(index.Reserve({&hash, 1}, /*expected=*/0).ok());
    index.Insert({&hash, 1}, &last);
    Place found;
    index.Lookup({&hash, 1}, &found);
    EXPECT_EQ(found, last);
  }
}

// Places of distinct hashes, in their order.
std::map<std::uint64_t, Place> DrawPlaces(Spread spread, std::size_t n, std::uint32_t max_slots,
                                          Rng* rng) {
  std::map<std::uint64_t, Place> places;
  for (std::size_t i = 0; i < n; ++i) {
    places[DrawHash(spread, rng)] =
        MakePlace(static_cast<std::uint32_t>(rng->Below(max_slots)), rng->Below(1 << kTestRowBits));
  }
  return places;
}

std::vector<KeyPlace> Together(const std::vector<std::uint64_t>& hashes,
                               const std::vector<Place>& places) {
  std::vector<KeyPlace> keys;
  for (std::size_t i = 0; i < hashes.size(); ++i) keys.push_back({hashes[i], places[i]});
  return keys;
}

// Filled in pieces that share no range of hashes, by so many threads, and then inserted to and
// erased from, an index has what one has that was filled key by key.
TYPED_TEST(IndexByKey, FilledAsInserted) {
  for (const Spread spread : {Spread::kRandom, Spread::kNarrow, Spread::kAlike, Spread::kBoth}) {
    for (const std::size_t n : {1, 30, 3'000, 100'000}) {
      for (const int threads : {1, 3}) {
        Rng rng(n);
        TypeParam filled(kTestRowBits), inserted(kTestRowBits);
        const auto placed = DrawPlaces(spread, n, filled.max_slots(), &rng);
        std::vector<std::uint64_t> hashes;
        std::vector<Place> places;
        std::vector<std::size_t> pieces = {0};  // Their ends.
        for (const auto& [hash, place] : placed) {
          if (!hashes.empty() && hash / kFillGrain != hashes.back() / kFillGrain &&
              rng.Below(7) == 0) {
            pieces.push_back(hashes.size());
          }
          hashes.push_back(hash);
          places.push_back(place);
        }
        pieces.push_back(hashes.size());
        const std::vector<KeyPlace> keys = Together(hashes, places);
        std::vector<Status> done(pieces.size() - 1);
        WorkerGroup workers("fill", threads);
        workers.Run(static_cast<int>(done.size()), [&](int piece) {
          const auto i = static_cast<std::size_t>(piece);
          done[i] = filled.Fill({keys.data() + pieces[i], keys.data() + pieces[i + 1]});
        });
        for (const Status& status : done) ASSERT_TRUE(status.ok());
        ASSERT_TRUE(inserted.Reserve(hashes, /*expected=*/0).ok());
        inserted.Insert(hashes, places.data());
        EXPECT_EQ(filled.size(), inserted.size());
        EXPECT_LE(filled.bytes(), inserted.bytes() * 23 / 20);
        std::vector<Place> found(hashes.size());
        filled.Lookup(hashes, found.data());
        ASSERT_EQ(found, places);
        // What is absent is taken for another as rarely.
        std::vector<std::uint64_t> absent(hashes.size());
        for (std::uint64_t& hash : absent) hash = rng.Next();
        std::vector<Place> expected(absent.size());
        filled.Lookup(absent, found.data());
        inserted.Lookup(absent, expected.data());
        ASSERT_EQ(found, expected);
        // Each key takes as long a way out again as in.
        std::vector<Place> erased(hashes.size());
        filled.Erase(hashes, erased.data());
        ASSERT_EQ(erased, places);
        EXPECT_EQ(filled.size(), 0u);
        ASSERT_TRUE(filled.Reserve(hashes, /*expected=*/0).ok());
        filled.Insert(hashes, places.data());
        filled.Lookup(hashes, found.data());
        ASSERT_EQ(found, places);
      }
    }
  }
}

// Of a range in two pieces the second one finds keys there.
TYPED_TEST(IndexByKey, FilledPieceByPiece) {
  for (const Spread spread : {Spread::kNarrow, Spread::kAlike}) {
    Rng rng(7);
    TypeParam index(kTestRowBits);
    const auto placed = DrawPlaces(spread, 2'000, index.max_slots(), &rng);
    std::vector<std::uint64_t> hashes;
    std::vector<Place> places;
    for (const auto& [hash, place] : placed) {
      hashes.push_back(hash);
      places.push_back(place);
    }
    const std::vector<KeyPlace> keys = Together(hashes, places);
    for (std::size_t begin = 0; begin < keys.size(); begin += 100) {
      const std::size_t end = std::min(keys.size(), begin + 100);
      ASSERT_TRUE(index.Fill({keys.data() + begin, keys.data() + end}).ok());
    }
    std::vector<Place> found(hashes.size());
    index.Lookup(hashes, found.data());
    EXPECT_EQ(found, places);
    EXPECT_EQ(index.size(), hashes.size());
  }
}

// An index that was filled is as large as one that has grown, and its segments do not all grow
// again with the next keys.
TEST(KeyIndex, GrowsAfterItWasFilled) {
  constexpr std::uint64_t kKeys = 4'000'000;
  KeyIndex index(kTestRowBits);
  std::vector<std::uint64_t> hashes(kKeys);
  for (std::uint64_t key = 0; key < kKeys; ++key) hashes[key] = MixKey(key);
  std::sort(hashes.begin(), hashes.end());
  const std::vector<Place> places(kKeys, MakePlace(7, 1));
  ASSERT_TRUE(index.Fill(Together(hashes, places)).ok());
  EXPECT_LT(static_cast<double>(index.bytes()) / kKeys, 8.6);
  // A twentieth more keys cost about a twentieth more memory.
  const auto before = static_cast<double>(index.bytes());
  hashes.resize(kKeys / 20);
  for (std::uint64_t i = 0; i < hashes.size(); ++i) hashes[i] = MixKey(kKeys + i);
  std::sort(hashes.begin(), hashes.end());
  ASSERT_TRUE(index.Reserve(hashes, /*expected=*/0).ok());
  index.Insert(hashes, places.data());
  EXPECT_LT(static_cast<double>(index.bytes()) / before, 1.07);
}

// In segments of some hundred keys, of which some wait for their group or for the next batch to get
// lines, and with batches that bring a key or so to each.
TYPED_TEST(IndexByKey, KeepsItsKeysWhileSegmentsWait) {
  constexpr std::uint64_t kKeys = 1'500'000, kBatch = 5'000;
  const auto place_of = [](std::uint64_t key) {
    return MakePlace(static_cast<std::uint32_t>(key >> kTestRowBits),
                     key & ((std::uint64_t{1} << kTestRowBits) - 1));
  };
  TypeParam index(kTestRowBits);
  std::vector<std::uint64_t> hashes(kBatch);
  std::vector<Place> places(kBatch);
  Rng rng(5);
  for (std::uint64_t key = 0; key < kKeys; key += kBatch) {
    for (std::uint64_t i = 0; i < kBatch; ++i) hashes[i] = MixKey(key + i);
    std::sort(hashes.begin(), hashes.end());
    for (std::uint64_t i = 0; i < kBatch; ++i) places[i] = place_of(UnmixKey(hashes[i]));
    ASSERT_TRUE(index.Reserve(hashes, /*expected=*/0).ok());
    index.Insert(hashes, places.data());
    for (std::uint64_t& hash : hashes) hash = MixKey(rng.Below(key + kBatch));
    index.Lookup(hashes, places.data());
    for (std::uint64_t i = 0; i < kBatch; ++i) {
      ASSERT_EQ(places[i], place_of(UnmixKey(hashes[i]))) << "of " << key + kBatch << " keys";
    }
  }
  EXPECT_EQ(index.size(), kKeys);
}

// Nearly all of its memory comes with the first keys, and is what as many would have without.
TYPED_TEST(IndexByKey, GrowsAtOnceForWhatIsExpected) {
  constexpr std::uint64_t kKeys = 1'500'000, kBatch = 20'000;
  TypeParam expecting(kTestRowBits), growing(kTestRowBits);
  std::vector<std::uint64_t> hashes(kBatch);
  const std::vector<Place> places(kBatch, MakePlace(7, 1));
  double first = 0;
  for (std::uint64_t key = 0; key < kKeys; key += kBatch) {
    for (std::uint64_t i = 0; i < kBatch; ++i) hashes[i] = MixKey(key + i);
    std::sort(hashes.begin(), hashes.end());
    ASSERT_TRUE(expecting.Reserve(hashes, kKeys).ok());
    expecting.Insert(hashes, places.data());
    ASSERT_TRUE(growing.Reserve(hashes, /*expected=*/0).ok());
    growing.Insert(hashes, places.data());
    if (key == 0) first = static_cast<double>(expecting.bytes());
  }
  const auto last = static_cast<double>(expecting.bytes());
  EXPECT_GT(first / last, 0.9);
  EXPECT_NEAR(last / static_cast<double>(growing.bytes()), 1, 0.05);
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
    std::sort(hashes.begin(), hashes.end());
    EXPECT_TRUE(index.Reserve(hashes, /*expected=*/0).ok());
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
