#include "terrace/data/click_log_generator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/ids.h"
#include "terrace/base/portable_math.h"
#include "terrace/base/rng.h"

namespace terrace {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
constexpr std::uint32_t kMostSlots = 256;
// Rows from which scale and offset are computed; they lie beyond any row number that is written.
constexpr std::uint64_t kProbeRows = 8192;
constexpr std::uint64_t kFirstProbeRow = std::uint64_t{1} << 62;
// Nearer to 1 than this the general formula loses more digits than the law for 1 is wrong by.
constexpr double kNearlyOne = 1e-6;
// Keeps a logarithm's argument positive and normal.
constexpr double kTiny = 1e-300;

// Sum of the four 16-bit parts of a hash, to mean 0 and variance 1: nearly normal, and cheap.
double NearlyNormal(std::uint64_t hash) {
  const std::uint64_t sum =
      (hash & 0xffff) + (hash >> 16 & 0xffff) + (hash >> 32 & 0xffff) + (hash >> 48);
  constexpr double kScale = 1.0 / 37837.2;  // Standard deviation of the sum: 65536 sqrt(4 / 12).
  return (static_cast<double>(sum) - 131070.0) * kScale;
}

// Four numbers of mean 0 and variance 1 from a hash.
double FactorDot(std::uint64_t a, std::uint64_t b) {
  double dot = 0;
  for (int i = 0; i < 4; ++i) {
    const double x = static_cast<double>(a >> (16 * i) & 0xffff) - 32767.5;
    const double y = static_cast<double>(b >> (16 * i) & 0xffff) - 32767.5;
    dot += x * y;
  }
  // Variance of x: 65536^2 / 12; of the sum of four products: 4 times its square.
  constexpr double kScale = 12.0 / (65536.0 * 65536.0) * 0.5;
  return dot * kScale;
}

// A bijection of 32 bits (two rounds of xor-shift and odd multiplication).
std::uint64_t Scramble32(std::uint64_t x, std::uint64_t key) {
  auto v = static_cast<std::uint32_t>(x) ^ static_cast<std::uint32_t>(key);
  v = (v ^ v >> 16) * 0x7feb352du;
  v = (v ^ v >> 15) * 0x846ca68bu;
  return (v ^ v >> 16) + static_cast<std::uint32_t>(key >> 32);
}

// A bijection of 48 bits, but for the value that stands for no category, which is passed on.
std::uint64_t Scramble48(std::uint64_t x, std::uint64_t key) {
  do {
    x = (x ^ key) & kCategoryMask;
    x = (x ^ x >> 24) * 0x9fb21c651e98df25ULL & kCategoryMask;
    x = (x ^ x >> 23) * 0xd6e8feb86659fd93ULL & kCategoryMask;
    x ^= x >> 24;
  } while (x == kMissingCategory);
  return x;
}

// One integer column: log-uniform over [0, 2^bits), moved down by `shift`, missing in
// `missing` / 256 of the rows. Its effect is `slope` times how far it is from the middle, on the
// scale of its logarithm; `bend` times that distance without its sign; `gap` when it is missing.
struct IntegerColumn {
  int bits;
  int shift;
  int missing;
  double slope;
  double bend;
  double gap;
};
constexpr std::array<IntegerColumn, kCriteoIntegers> kColumns = {{
    {6, 0, 112, 0.30, 0.00, -0.20},
    {10, 3, 0, 0.15, 0.00, 0.00},
    {10, 0, 55, 0.00, 0.25, 0.10},
    {6, 0, 55, -0.10, 0.00, 0.00},
    {16, 0, 7, -0.15, 0.00, 0.00},
    {11, 0, 57, -0.10, 0.10, 0.10},
    {8, 0, 11, 0.25, 0.00, 0.00},
    {7, 0, 0, 0.00, 0.00, 0.00},
    {11, 0, 11, -0.10, 0.15, 0.00},
    {3, 0, 112, 0.15, 0.00, 0.00},
    {7, 0, 11, 0.25, 0.00, 0.00},
    {5, 0, 195, 0.10, 0.00, -0.10},
    {7, 0, 55, -0.20, 0.00, 0.00},
}};

}  // namespace

ClickLogSpec ClickLogSpecOf(const DataOptions& options) {
  ClickLogSpec spec;
  spec.seed = options.log_seed;
  spec.cardinality = options.cardinality;
  spec.zipf = options.zipf;
  spec.categorical_slots = options.categorical_slots;
  return spec;
}

ZipfSampler::ZipfSampler(std::uint64_t count, double exponent)
    : count_(static_cast<double>(count)),
      exponent_(exponent),
      one_minus_exponent_(std::abs(1 - exponent) < kNearlyOne ? 0 : 1 - exponent),
      reciprocal_(one_minus_exponent_ == 0 ? 0 : 1 / one_minus_exponent_) {
  integral_first_ = IntegralOfDensity(1.5) - 1;
  integral_last_ = IntegralOfDensity(count_ + 0.5);
  sliver_ = exponent * (exponent + 1) / 12;
  for (int rank = 1; rank <= 32; ++rank) {
    const double width = InverseIntegral(AcceptFrom(rank)) - rank + 0.5;
    sliver_ = std::max(sliver_, width * rank * rank);
  }
}

// H(x), the integral of x^-exponent, zero at 1.
double ZipfSampler::IntegralOfDensity(double x) const {
  const double log = PortableLog(x);
  if (one_minus_exponent_ == 0) return log;
  return (PortableExp(one_minus_exponent_ * log) - 1) * reciprocal_;
}

double ZipfSampler::InverseIntegral(double u) const {
  if (one_minus_exponent_ == 0) return PortableExp(u);
  // Rounding may take the far end of a steep law to zero or just below.
  const double inside = std::abs(1 + one_minus_exponent_ * u) + kTiny;
  return PortableExp(PortableLog(inside) * reciprocal_);
}

// u >= H(rank + 1/2) - h(rank). The refused part of [rank - 1/2, rank + 1/2) is a sliver at its
// start, of width e(e + 1) / 24 rank^2 and terms that are smaller for large ranks: what lies beyond
// sliver_ / rank^2, which is wider for every rank, needs nothing computed.
bool ZipfSampler::Accept(double u, double x, double rank) const {
  if ((x - rank + 0.5) * rank * rank >= sliver_) return true;
  return u >= AcceptFrom(rank);
}

double ZipfSampler::AcceptFrom(double rank) const {
  return IntegralOfDensity(rank + 0.5) - PortableExp(-exponent_ * PortableLog(rank));
}

// Draws again from further hashes until one is accepted: nearly always at once.
std::uint64_t ZipfSampler::Retry(std::uint64_t hash) const {
  for (;;) {
    hash = MixKey(hash);
    const double u = integral_last_ + UnitDouble(hash) * (integral_first_ - integral_last_);
    const double x = InverseIntegral(u);
    const double rank = std::clamp(std::floor(x + 0.5), 1.0, count_);
    if (Accept(u, x, rank)) return static_cast<std::uint64_t>(rank);
  }
}

void ZipfSampler::Sample(const std::uint64_t* hashes, std::size_t n, std::uint64_t* ranks) const {
  constexpr std::size_t kBlock = 32;
  double u[kBlock];
  double x[kBlock];
  for (std::size_t first = 0; first < n; first += kBlock) {
    const std::size_t size = std::min(kBlock, n - first);
    const double width = integral_first_ - integral_last_;
    // Loops without branches, which the compiler turns into vector code.
    for (std::size_t i = 0; i < size; ++i)
      u[i] = integral_last_ + UnitDouble(hashes[first + i]) * width;
    if (one_minus_exponent_ == 0) {
      for (std::size_t i = 0; i < size; ++i) x[i] = PortableExp(u[i]);
    } else {
      for (std::size_t i = 0; i < size; ++i) {
        // As InverseIntegral.
        const double inside = std::abs(1 + one_minus_exponent_ * u[i]) + kTiny;
        x[i] = PortableExp(PortableLog(inside) * reciprocal_);
      }
    }
    for (std::size_t i = 0; i < size; ++i) {
      const double rank =
          std::clamp(static_cast<double>(static_cast<std::int64_t>(x[i] + 0.5)), 1.0, count_);
      ranks[first + i] =
          Accept(u[i], x[i], rank) ? static_cast<std::uint64_t>(rank) : Retry(hashes[first + i]);
    }
  }
}

Result<std::unique_ptr<ClickLogGenerator>> ClickLogGenerator::Create(const ClickLogSpec& spec) {
  const auto wrong = [](std::string_view name, auto value, std::string_view legal) {
    return InvalidArgumentError(fmt::format("{} is {}; legal: {}", name, value, legal));
  };
  if (spec.cardinality < 1 || spec.cardinality > 1'000'000'000'000)
    return wrong("cardinality", spec.cardinality, "1 to 10^12");
  if (!(spec.zipf >= 0 && spec.zipf <= 4)) return wrong("zipf", spec.zipf, "0 to 4");
  if (spec.categorical_slots < 1 || spec.categorical_slots > kMostSlots)
    return wrong("slots", spec.categorical_slots, fmt::format("1 to {}", kMostSlots));
  if (!(spec.click_rate > 0 && spec.click_rate < 1))
    return wrong("click_rate", spec.click_rate, "above 0 and below 1");
  if (!(spec.signal >= 0 && spec.signal <= 10)) return wrong("signal", spec.signal, "0 to 10");
  std::unique_ptr<ClickLogGenerator> generator(new ClickLogGenerator(spec));
  generator->Calibrate();
  return generator;
}

ClickLogGenerator::ClickLogGenerator(const ClickLogSpec& spec)
    : spec_(spec),
      narrow_(spec.cardinality <= (std::uint64_t{1} << 32)),
      zipf_(spec.cardinality, spec.zipf) {
  for (std::uint32_t s = 0; s < spec.categorical_slots; ++s) {
    slot_hash_.push_back(HashCombine(spec.seed, s + 1));
    // The first slots matter most, as a log's few good features do.
    slot_strength_.push_back(1 / std::sqrt(1.0 + s));
  }
}

// Finds scale and offset so that the logit's deviation and the mean probability are as specified.
void ClickLogGenerator::Calibrate() {
  std::vector<double> scores(kProbeRows);
  ClickLogRow row;
  row.categories.resize(spec_.categorical_slots);
  row.scratch.resize(std::size_t{2} * spec_.categorical_slots);
  double sum = 0;
  for (std::uint64_t i = 0; i < kProbeRows; ++i) {
    scores[i] = Score(HashCombine(spec_.seed, kFirstProbeRow + i), &row);
    sum += scores[i];
  }
  const double mean = sum / static_cast<double>(kProbeRows);
  double squares = 0;
  for (const double score : scores) squares += (score - mean) * (score - mean);
  const double deviation = std::sqrt(squares / static_cast<double>(kProbeRows));
  scale_ = deviation > 0 ? spec_.signal / deviation : 0;
  // The mean probability rises with the offset: halve an interval that surely holds the answer.
  double low = -100;
  double high = 100;
  for (int step = 0; step < 50; ++step) {
    offset_ = 0.5 * (low + high);
    double clicks = 0;
    for (const double score : scores) clicks += PortableSigmoid(scale_ * score + offset_);
    (clicks > spec_.click_rate * static_cast<double>(kProbeRows) ? high : low) = offset_;
  }
}

double ClickLogGenerator::ScoreIntegers(std::uint64_t row_hash, std::int64_t* integers) const {
  double score = 0;
  for (std::size_t c = 0; c < kColumns.size(); ++c) {
    const IntegerColumn& column = kColumns[c];
    const std::uint64_t hash = MixKey(row_hash + (1000 + c) * kGolden);
    if (static_cast<int>(hash & 0xff) < column.missing) {
      integers[c] = kMissingInteger;
      score += column.gap;
      continue;
    }
    // 2^power <= x + 1 < 2^(power + 1), its lower bits uniform.
    const auto power =
        static_cast<int>((hash >> 8 & 0xff) * static_cast<unsigned>(column.bits) >> 8);
    const std::uint64_t low = (hash >> 16) & ((std::uint64_t{1} << power) - 1);
    integers[c] = static_cast<std::int64_t>((std::uint64_t{1} << power) + low) - 1 - column.shift;
    // log2(x + 1) on straight lines between the powers of two.
    const double level =
        power + static_cast<double>(low) / static_cast<double>(std::uint64_t{1} << power);
    const double distance = level - 0.5 * column.bits;
    score += column.slope * distance + column.bend * std::abs(distance);
  }
  return score;
}

double ClickLogGenerator::ScoreCategories(std::uint64_t row_hash, ClickLogRow* out) const {
  std::uint64_t* const categories = out->categories.data();
  const std::size_t slots = spec_.categorical_slots;
  std::uint64_t* const hash = out->scratch.data();
  std::uint64_t* const rank = hash + slots;
  for (std::size_t s = 0; s < slots; ++s) hash[s] = MixKey(row_hash + (s + 1) * kGolden);
  zipf_.Sample(hash, slots, rank);
  if (narrow_) {
    for (std::size_t s = 0; s < slots; ++s)
      categories[s] = Scramble32(rank[s] - 1, slot_hash_[s]) & 0xffffffff;
  } else {
    for (std::size_t s = 0; s < slots; ++s) categories[s] = Scramble48(rank[s] - 1, slot_hash_[s]);
  }
  // What a category does is a function of its slot and itself.
  for (std::size_t s = 0; s < slots; ++s) hash[s] = MixKey(slot_hash_[s] + categories[s] * kGolden);
  double score = 0;
  for (std::size_t s = 0; s < slots; ++s) score += slot_strength_[s] * NearlyNormal(hash[s]);
  // Pairs of neighbours: a product of four factors each.
  const std::size_t pairs = std::min<std::size_t>(slots / 2, 6);
  for (std::size_t p = 0; p < pairs; ++p) {
    constexpr double kPairStrength = 0.4;
    score += kPairStrength * FactorDot(MixKey(hash[2 * p]), MixKey(hash[2 * p + 1]));
  }
  return score;
}

double ClickLogGenerator::Score(std::uint64_t row_hash, ClickLogRow* out) const {
  return ScoreIntegers(row_hash, out->integers.data()) + ScoreCategories(row_hash, out);
}

void ClickLogGenerator::MakeRow(std::uint64_t row, ClickLogRow* out) const {
  out->categories.resize(spec_.categorical_slots);
  out->scratch.resize(std::size_t{2} * spec_.categorical_slots);
  const std::uint64_t row_hash = HashCombine(spec_.seed, row);
  out->probability = PortableSigmoid(scale_ * Score(row_hash, out) + offset_);
  out->label = UnitDouble(MixKey(row_hash)) < out->probability ? 1.0f : 0.0f;
}

std::string ClickLogGenerator::IdentityText() const {
  // Six decimals, as ever, where they are all of it.
  std::string zipf = fmt::format("{:.6f}", spec_.zipf);
  if (std::stod(zipf) != spec_.zipf) zipf = fmt::format("{}", spec_.zipf);
  return fmt::format("seed {}; cardinality {}; zipf {}; categorical_slots {}", spec_.seed,
                     spec_.cardinality, zipf, spec_.categorical_slots);
}

Status RunOracle(const ClickLogSpec& spec, std::uint64_t first_row, std::uint64_t rows,
                 const OracleCallback& oracle) {
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<ClickLogGenerator> generator,
                           ClickLogGenerator::Create(spec));
  constexpr std::uint64_t kBlock = 4096;
  std::vector<double> probability;
  std::vector<float> label;
  ClickLogRow row;
  for (std::uint64_t done = 0; done < rows; done += kBlock) {
    probability.clear();
    label.clear();
    const std::uint64_t end = std::min(rows, done + kBlock);
    for (std::uint64_t r = done; r < end; ++r) {
      generator->MakeRow(first_row + r, &row);
      probability.push_back(row.probability);
      label.push_back(row.label);
    }
    oracle(probability, label);
  }
  return OkStatus();
}

}  // namespace terrace
