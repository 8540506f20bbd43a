#include "terrace/store/key_index.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/rng.h"

namespace terrace {
namespace {

// `narrow`: all hashes in one segment with equal homes, as an attacker would choose keys.
void RunModel(std::uint64_t seed, bool narrow) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  KeyIndex index;
  std::map<std::uint64_t, Place> model;
  const auto draw = [&]() -> std::uint64_t {
    if (narrow)
      return (std::uint64_t{0xfff} << 52) | ((std::uint64_t{1} << 52) - 1 - rng.Below(900));
    return rng.Below(8) == 0 ? ~std::uint64_t{0} - rng.Below(4) : MixKey(rng.Below(20000));
  };
  for (int step = 0; step < 400; ++step) {
    std::set<std::uint64_t> chosen;
    const std::size_t n = 1 + rng.Below(200);
    while (chosen.size() < n) chosen.insert(draw());
    const std::vector<std::uint64_t> hashes(chosen.begin(), chosen.end());
    std::vector<Place> places(n), previous(n), from(n);
    std::vector<std::uint8_t> moved(n);
    for (Place& place : places) {
      place = MakePlace(static_cast<std::uint32_t>(rng.Below(kMaxFileSlots)),
                        rng.Below(kMaxRowsPerFile));
    }
    const auto in_model = [&](std::size_t i) {
      const auto it = model.find(hashes[i]);
      return it == model.end() ? kNoPlace : it->second;
    };
    switch (rng.Below(4)) {
      case 0: {
        std::vector<std::uint64_t> added;
        for (std::size_t i = 0; i < n; ++i) {
          if (in_model(i) == kNoPlace) added.push_back(hashes[i]);
        }
        ASSERT_TRUE(index.Reserve(added).ok());
        index.Set(hashes, places.data(), previous.data());
        for (std::size_t i = 0; i < n; ++i) {
          ASSERT_EQ(previous[i], in_model(i));
          model[hashes[i]] = places[i];
        }
        break;
      }
      case 1: {
        const bool remove = rng.Below(2) == 0;
        for (std::size_t i = 0; i < n; ++i) {
          from[i] = rng.Below(2) == 0 ? in_model(i) : MakePlace(1, 2);
          if (remove) places[i] = kNoPlace;
        }
        index.Move(hashes, from.data(), places.data(), moved.data());
        for (std::size_t i = 0; i < n; ++i) {
          const bool expected = in_model(i) != kNoPlace && in_model(i) == from[i];
          ASSERT_EQ(moved[i] != 0, expected);
          if (!expected) continue;
          if (remove) {
            model.erase(hashes[i]);
          } else {
            model[hashes[i]] = places[i];
          }
        }
        break;
      }
      case 2:
        index.Erase(hashes, previous.data());
        for (std::size_t i = 0; i < n; ++i) {
          ASSERT_EQ(previous[i], in_model(i));
          model.erase(hashes[i]);
        }
        break;
      default:
        index.Lookup(hashes, places.data());
        for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(places[i], in_model(i));
    }
    ASSERT_EQ(index.size(), model.size());
  }
  for (const auto& [hash, place] : model) {
    Place found;
    index.Lookup({&hash, 1}, &found);
    ASSERT_EQ(found, place);
  }
}

TEST(KeyIndex, EqualsMap) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) RunModel(seed, false);
}

TEST(KeyIndex, KeysChosenToCollide) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) RunModel(seed, true);
}

TEST(KeyIndex, BytesAKeyWhileGrowing) {
  KeyIndex index;
  std::vector<std::uint64_t> hashes(10000);
  std::vector<Place> places(hashes.size()), previous(hashes.size());
  double most = 0;
  for (std::uint64_t key = 0; key < 2'000'000; key += hashes.size()) {
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      hashes[i] = MixKey(key + i);
      places[i] = MakePlace(7, i);
    }
    ASSERT_TRUE(index.Reserve(hashes).ok());
    index.Set(hashes, places.data(), previous.data());
    if (key >= 1'000'000) {
      most = std::max(most, static_cast<double>(index.bytes()) / static_cast<double>(index.size()));
    }
  }
  EXPECT_LT(most, 12 / 0.85 * 1.25 * 1.2);  // A table just grown, its tail, its head.
}

}  // namespace
}  // namespace terrace
