#include "terrace/table/admission_filter.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/rng.h"

namespace terrace {
namespace {

std::unique_ptr<AdmissionFilter> Make(std::uint32_t after, std::uint64_t bytes) {
  return AdmissionFilter::Create("main", {after, bytes}).value();
}

bool SameCells(const AdmissionFilter& a, const AdmissionFilter& b) {
  return a.cells().size() == b.cells().size() &&
         std::memcmp(a.cells().data(), b.cells().data(), a.cells().size()) == 0;
}

class Widths : public testing::TestWithParam<std::uint32_t> {};

TEST_P(Widths, NeverCountsTooFewAndExactlyWithRoom) {
  const std::uint32_t after = GetParam();
  constexpr int kKeys = 300;
  const auto roomy = Make(after, 1 << 20);
  const auto tight = Make(after, kLeastAdmitFilterBytes);
  std::unordered_map<Key, std::uint64_t> shows;
  Rng rng(after);
  for (int call = 0; call < 20'000; ++call) {
    const Key key = rng.Below(kKeys) << 40;
    const auto some = static_cast<std::uint32_t>(1 + rng.Below(std::max(1u, after / 20)));
    EXPECT_EQ(roomy->Admits(key), shows[key] >= after);
    EXPECT_TRUE(tight->Admits(key) || shows[key] < after);
    roomy->Count(key, some);
    tight->Count(key, some);
    shows[key] += some;
  }
  EXPECT_GT(shows[0], after) << "no key came as far as to be admitted";
  EXPECT_FALSE(roomy->Admits(kKeys + Key{1}));
}

TEST_P(Widths, CountsBeyondItsWidthStayThere) {
  const auto filter = Make(GetParam(), kLeastAdmitFilterBytes);
  filter->Count(7, ~std::uint32_t{0});
  EXPECT_TRUE(filter->Admits(7));
  const auto once = Make(GetParam(), kLeastAdmitFilterBytes);
  once->Count(7, GetParam());
  EXPECT_TRUE(SameCells(*filter, *once));
  filter->Count(7, 1);
  EXPECT_TRUE(SameCells(*filter, *once));
}

INSTANTIATE_TEST_SUITE_P(Bits, Widths, testing::Values(2, 3, 4, 15, 16, 255, 256, 65535));

// What docs/admission.md promises of keys that were shown once.
TEST(AdmissionFilter, FewKeysAreAdmittedTooSoon) {
  struct Promise {
    std::uint32_t after;
    double keys_a_byte;
    double most;  // Share of keys that are admitted before their second show.
  };
  constexpr std::uint64_t kBytes = 1 << 20;
  for (const Promise& promise :
       {Promise{2, 0.5, 0.01}, Promise{2, 1, 0.06}, Promise{2, 2, 0.3}, Promise{3, 2, 0.005},
        Promise{5, 2, 0.001}, Promise{5, 4, 0.1}, Promise{16, 2, 0.001}}) {
    const auto filter = Make(promise.after, kBytes);
    const auto keys = static_cast<Key>(promise.keys_a_byte * kBytes);
    for (Key key = 0; key < keys; ++key) filter->Count(key, 1);
    std::uint64_t admitted = 0;
    for (Key key = 0; key < keys; ++key) admitted += filter->Admits(key) ? 1 : 0;
    const double share = static_cast<double>(admitted) / static_cast<double>(keys);
    printf("after %u, %.2f keys a byte: %.5f admitted too soon, %.3f of the cells full\n",
           promise.after, promise.keys_a_byte, share, filter->FullShare());
    EXPECT_LT(share, promise.most) << promise.after << " at " << promise.keys_a_byte;
  }
}

TEST(AdmissionFilter, FullShareCountsCells) {
  const auto filter = Make(3, 4096);
  EXPECT_EQ(filter->FullShare(), 0);
  filter->Count(1, 2);
  EXPECT_EQ(filter->FullShare(), 0);
  filter->Count(1, 1);
  EXPECT_EQ(filter->FullShare(), 4.0 / (4096 * 4));
}

TEST(AdmissionFilter, AnotherFiltersHeadIsFound) {
  const auto filter = Make(3, 4096);
  EXPECT_TRUE(filter->CheckHead().ok());
  for (const auto& [table, after, bytes] :
       {std::tuple("other", 3, 4096), std::tuple("main", 4, 4096), std::tuple("main", 3, 8192)}) {
    const auto other = AdmissionFilter::Create(table, {static_cast<std::uint32_t>(after),
                                                       static_cast<std::uint64_t>(bytes)})
                           .value();
    const auto target = Make(3, 4096);
    std::memcpy(target->image().data(), other->image().data(), target->image_bytes());
    EXPECT_EQ(target->CheckHead().code(), StatusCode::kCorruption) << table << after << bytes;
  }
}

}  // namespace
}  // namespace terrace
