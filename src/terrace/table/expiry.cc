#include "terrace/table/expiry.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "terrace/base/check.h"

namespace terrace {
namespace {

// Periods after which nothing is left of a score, whatever the decay.
constexpr std::size_t kMostPeriods = 65536;
// As good as nothing, and far from where arithmetic loses digits.
constexpr double kLeastPower = 0x1p-200;

// Why Droppable is safe. Let an older version of a row have statistics s, and a newer one, which
// was made from it by updates, t; d[i] are the periods that each update decayed, n those since t,
// and N = sum d[i] + n those since s. Updates add what is not negative and round up, so in exact
// arithmetic base(t) >= base(s) * product of Power(d[i]), but for the few roundings of base itself.
// Power(k) is decay^k within a relative k * 2^-53, by one rounding a factor. So base(t) * Power(n)
// >= base(s) * Power(N) * (1 - 2 * N * 2^-53 - small), and N < 2^16, because Power is 0 beyond.
// With a margin of 2^-30: is t's score below (1 - margin) * below, then s's is below `below`. As
// for the age, s was seen earlier. A row that was made anew in between, because s had expired,
// changes nothing: s stays expired.
constexpr double kMargin = 0x1p-30;

struct Statistics {
  float show;
  float click;
  std::uint64_t last_seen;
};
static_assert(sizeof(Statistics) == kStatisticsBytes);

Statistics Load(const std::byte* at) {
  Statistics statistics;
  std::memcpy(&statistics, at, sizeof statistics);
  return statistics;
}

// The least float that is not below; what a float can only hold as a denormal is 0, as on the
// threads that flush those.
float RoundUp(double value) {
  if (value < FLT_MIN) return 0;
  const auto rounded = static_cast<float>(value);
  return static_cast<double>(rounded) < value
             ? std::nextafter(rounded, std::numeric_limits<float>::infinity())
             : rounded;
}

}  // namespace

ExpiryRule::ExpiryRule(const ExpirySpec& spec) : spec_(spec), drop_below_(spec.below) {
  if (!spec.decays()) return;
  TERRACE_CHECK(spec.decay >= 0 && spec.click_weight >= spec.show_weight && spec.show_weight >= 0);
  drop_below_ = spec.below * (1 - kMargin);
  for (double power = 1; power >= kLeastPower && powers_.size() < kMostPeriods;) {
    powers_.push_back(power);
    power *= spec.decay;
  }
}

double ExpiryRule::Power(std::uint64_t periods) const {
  if (!spec_.decays()) return 1;
  return periods < powers_.size() ? powers_[periods] : 0;
}

bool ExpiryRule::Expired(const std::byte* statistics, std::uint64_t position, double below) const {
  if (!on()) return false;
  const Statistics row = Load(statistics);
  const std::uint64_t points = Points(position);
  const std::uint64_t seen_points = Points(row.last_seen);
  if (points <= seen_points) return false;
  // The newest point is at or before the position, and after the row was last seen.
  if (spec_.after > 0 && points * spec_.every_examples - row.last_seen >= spec_.after) return true;
  if (spec_.below == 0) return false;
  // Rises with show and with click, in whatever way the sums are rounded: a click is worth a show
  // at least.
  const double base =
      spec_.show_weight * row.show + (spec_.click_weight - spec_.show_weight) * row.click;
  return base * Power(points - seen_points) < below;
}

void ExpiryRule::Decay(std::byte* statistics, std::uint64_t position) const {
  if (!spec_.decays()) return;
  Statistics row = Load(statistics);
  const std::uint64_t points = Points(position);
  const std::uint64_t seen_points = Points(row.last_seen);
  if (points <= seen_points) return;
  const double power = Power(points - seen_points);
  row.show = RoundUp(row.show * power);
  row.click = RoundUp(row.click * power);
  std::memcpy(statistics, &row, sizeof row);
}

bool CountsAt(const ExpiryRule& rule, std::span<const std::byte> row, std::uint64_t position) {
  if (!rule.on()) return true;
  const std::byte* const statistics = row.data() + row.size() - kStatisticsBytes;
  return Load(statistics).last_seen != 0 && !rule.Expired(statistics, position);
}

}  // namespace terrace
