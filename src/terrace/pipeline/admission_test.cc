#include "terrace/pipeline/admission.h"

#include <cstring>
#include <map>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"
#include "terrace/pipeline/key_plan.h"

namespace terrace {
namespace {

constexpr std::uint32_t kSlots = 3;  // The first two of table 0, the third of table 1.
constexpr std::uint32_t kMinibatch = 16;
constexpr std::uint32_t kExamples = 40 * kMinibatch - 5;
constexpr AdmissionSpec kSpec = {3, 1 << 16};

// Examples with no, one or several keys in a slot, some twice.
std::shared_ptr<const Batch> MakeBatch() {
  Rng rng(9);
  auto batch = std::make_shared<Batch>();
  batch->examples = kExamples;
  batch->slots = kSlots;
  batch->key_begin.push_back(0);
  for (std::uint32_t e = 0; e < kExamples; ++e) {
    for (std::uint32_t s = 0; s < kSlots; ++s) {
      for (std::uint64_t k = rng.Below(4); k > 0; --k) {
        const double unit = rng.Unit();
        batch->keys.push_back((std::uint64_t{s / 2} << 48) +
                              static_cast<Key>(unit * unit * unit * 300));
      }
      batch->key_begin.push_back(static_cast<std::uint32_t>(batch->keys.size()));
    }
  }
  return batch;
}

// Which keys of table 0 each mini-batch admits, by exact counts.
std::vector<std::map<Key, bool>> Expected(const Batch& batch) {
  std::vector<std::map<Key, bool>> admitted;
  std::map<Key, std::uint32_t> shows;
  for (std::uint32_t begin = 0; begin < kExamples; begin += kMinibatch) {
    std::map<Key, std::uint32_t> seen;
    for (std::uint32_t e = begin; e < std::min(begin + kMinibatch, kExamples); ++e) {
      const std::set<Key> keys(batch.keys.begin() + batch.key_begin[e * kSlots],
                               batch.keys.begin() + batch.key_begin[e * kSlots + 2]);
      for (const Key key : keys) ++seen[key];
    }
    admitted.emplace_back();
    for (const auto& [key, count] : seen) {
      admitted.back()[key] = shows[key] >= kSpec.after;
      shows[key] += count;
    }
  }
  return admitted;
}

bool SameCells(const AdmissionFilter& a, const AdmissionFilter& b) {
  return std::memcmp(a.cells().data(), b.cells().data(), a.cells().size()) == 0;
}

class AdmissionTest : public testing::TestWithParam<std::uint32_t> {
 protected:
  std::unique_ptr<AdmissionFilter> NewFilter() {
    return AdmissionFilter::Create("main", kSpec).value();
  }
};

TEST_P(AdmissionTest, DecidesByTheShowsBeforeEachMinibatchHoweverSetsAreCut) {
  const std::shared_ptr<const Batch> batch = MakeBatch();
  const auto expected = Expected(*batch);
  const auto planned = NewFilter(), trained = NewFilter();
  Admission admission({planned.get(), nullptr});
  KeyPlanner planner({{0, 0, false}, {0, 4, false}, {1, 8, false}}, 2, kMinibatch);
  const std::size_t limit[2] = {100000, 100000};
  std::uint32_t example = 0, minibatch = 0;
  std::uint64_t unadmitted = 0, rows = 0;
  while (example < kExamples) {
    const auto plain = planner.Plan(batch, example, minibatch, limit, GetParam()).value();
    auto item = planner.Plan(batch, example, minibatch, limit, GetParam()).value();
    admission.Admit(item.get());
    const TableWork& work = item->tables[0];
    const TableWork& before = plain->tables[0];
    EXPECT_EQ(item->tables[1].keys, plain->tables[1].keys);
    EXPECT_EQ(item->tables[1].rows, plain->tables[1].rows);
    std::set<Key> so_far;
    for (std::uint32_t m = 0; m < item->minibatches; ++m) {
      std::uint64_t shows = 0;
      std::map<Key, bool> admitted;
      for (std::uint32_t r = work.row_begin[m]; r < work.row_begin[m + 1]; ++r) {
        const Key key = before.keys[before.rows[r]];
        admitted[key] = work.rows[r] != kNoWorkingRow;
        if (!admitted[key]) continue;
        EXPECT_EQ(work.keys[work.rows[r]], key);
        so_far.insert(key);
      }
      EXPECT_EQ(admitted, expected[minibatch + m]) << "mini-batch " << minibatch + m;
      // What a checkpoint after this mini-batch marks trained.
      EXPECT_EQ(std::set<Key>(work.keys.begin(), work.keys.begin() + work.key_end[m]), so_far);
      EXPECT_EQ(work.key_end[m], so_far.size());
      for (std::uint32_t i = m == 0 ? 0 : work.unadmitted_end[m - 1]; i < work.unadmitted_end[m];
           ++i) {
        shows += work.unadmitted_shows[i];
      }
      EXPECT_EQ(CountTrained(work, m, trained.get()), shows);
      unadmitted += shows;
    }
    EXPECT_EQ(work.keys.size(), so_far.size()) << "a key that nobody admits is pinned";
    EXPECT_TRUE(SameCells(*planned, *trained));
    rows += so_far.size();
    example = item->end_example;
    minibatch += item->minibatches;
  }
  EXPECT_EQ(minibatch, expected.size());
  EXPECT_GT(unadmitted, 100u);
  EXPECT_GT(rows, 100u);
  // However the stream was cut.
  const auto whole = NewFilter();
  Admission once({whole.get(), nullptr});
  once.Admit(planner.Plan(batch, 0, 0, limit).value().get());
  EXPECT_TRUE(SameCells(*whole, *planned));
}

INSTANTIATE_TEST_SUITE_P(MinibatchesASet, AdmissionTest, testing::Values(1, 3, 7, 100));

}  // namespace
}  // namespace terrace
