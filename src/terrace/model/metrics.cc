#include "terrace/model/metrics.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "terrace/io/framed_file.h"

namespace terrace {
namespace {

static_assert(std::endian::native == std::endian::little, "The format is written as it lies.");

constexpr int kBucketBits = 18;  // Sign, exponent and 9 bits of mantissa: 4 MiB of sums.
constexpr std::size_t kBuckets = std::size_t{1} << kBucketBits;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

constexpr char kMagic[8] = {'T', 'R', 'C', 'M', 'E', 'T', 'R', 'C'};
constexpr std::uint32_t kVersion = 1;

struct StateHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t buckets;   // Entries that follow.
  std::uint64_t length;    // Bytes of the whole state.
  std::uint64_t checksum;  // XXH3-64 of what follows; what precedes is known from the rest.
  std::uint64_t examples;
  double weight, label_sum, prediction_sum, logloss_sum;
};
static_assert(sizeof(StateHeader) == 72 && offsetof(StateHeader, checksum) == 24);

struct StateEntry {
  std::uint64_t bucket;
  double clicks, no_clicks;
};
static_assert(sizeof(StateEntry) == 24);

// Larger logits have larger or equal buckets; -0 is 0.
std::size_t BucketOf(float logit) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(logit + 0.0f);
  const std::uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return ordered >> (32 - kBucketBits);
}

// x * log(x), continued to 0.
double XLogX(double x) { return x > 0 ? x * std::log(x) : 0.0; }

std::uint64_t Checksum(const std::string& bytes) {
  const std::span<const char> all(bytes.data(), bytes.size());
  return Checksum64(std::as_bytes(all.subspan(offsetof(StateHeader, examples))));
}

bool IsSum(double value) { return std::isfinite(value) && value >= 0; }

}  // namespace

ClickMetrics::ClickMetrics() : buckets_(kBuckets) {}

void ClickMetrics::Clear() {
  std::fill(buckets_.begin(), buckets_.end(), Bucket());
  filled_buckets_ = 0;
  examples_ = 0;
  weight_ = label_sum_ = prediction_sum_ = logloss_sum_ = 0;
}

void ClickMetrics::Add(const float* logit, const float* probability, const float* label,
                       const float* weight, std::size_t count, double logloss_sum) {
  for (std::size_t i = 0; i < count; ++i) {
    const double w = weight == nullptr ? 1.0 : weight[i];
    const double clicked = w * label[i];
    Bucket& bucket = buckets_[BucketOf(logit[i])];
    if (bucket.clicks == 0 && bucket.no_clicks == 0) ++filled_buckets_;
    bucket.clicks += clicked;
    bucket.no_clicks += w - clicked;
    weight_ += w;
    label_sum_ += clicked;
    prediction_sum_ += w * (std::isnan(logit[i]) ? logit[i] : probability[i]);
  }
  examples_ += count;
  logloss_sum_ += logloss_sum;
}

ClickMetricsResult ClickMetrics::Compute() const {
  ClickMetricsResult result;
  result.examples = examples_;
  result.weight = weight_;
  double below = 0, pairs = 0, shared = 0, clicks = 0;
  for (const Bucket& bucket : buckets_) {
    pairs += bucket.clicks * (below + 0.5 * bucket.no_clicks);
    shared += 0.5 * bucket.clicks * bucket.no_clicks;
    below += bucket.no_clicks;
    clicks += bucket.clicks;
  }
  const double all_pairs = clicks * below;
  const bool known = all_pairs > 0 && !std::isnan(prediction_sum_);
  result.auc = known ? pairs / all_pairs : kNaN;
  result.auc_error = known ? shared / all_pairs : kNaN;
  if (!(weight_ > 0)) {
    result.logloss = result.ne = result.calibration = kNaN;
    result.mean_label = result.mean_prediction = kNaN;
    return result;
  }
  result.logloss = logloss_sum_ / weight_;
  result.mean_label = label_sum_ / weight_;
  result.mean_prediction = prediction_sum_ / weight_;
  const double entropy = -XLogX(result.mean_label) - XLogX(1.0 - result.mean_label);
  result.ne = all_pairs > 0 ? result.logloss / entropy : kNaN;
  result.calibration = label_sum_ > 0 ? prediction_sum_ / label_sum_ : kNaN;
  return result;
}

std::string ClickMetrics::Save() const {
  std::string bytes(sizeof(StateHeader), '\0');
  StateHeader header = {};
  for (std::size_t b = 0; b < kBuckets; ++b) {
    const Bucket& bucket = buckets_[b];
    if (bucket.clicks == 0 && bucket.no_clicks == 0) continue;
    const StateEntry entry = {b, bucket.clicks, bucket.no_clicks};
    bytes.append(reinterpret_cast<const char*>(&entry), sizeof(entry));
    ++header.buckets;
  }
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.length = bytes.size();
  header.examples = examples_;
  header.weight = weight_;
  header.label_sum = label_sum_;
  header.prediction_sum = prediction_sum_;
  header.logloss_sum = logloss_sum_;
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.checksum = Checksum(bytes);
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

Status ClickMetrics::Restore(const std::string& bytes) {
  const auto corrupt = [](std::string_view what) {
    return CorruptionError("state of the click metrics: " + std::string(what) +
                           "; resume from an older checkpoint");
  };
  StateHeader header;
  if (bytes.size() < sizeof(header)) return corrupt("shorter than its header");
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return corrupt("wrong magic");
  if (header.version > kVersion) {
    return InvalidArgumentError("state of the click metrics: format version " +
                                std::to_string(header.version) +
                                ", written by a newer terrace; this one reads up to version " +
                                std::to_string(kVersion) + ": use the newer program");
  }
  if (header.version == 0) return corrupt("format version 0");
  if (header.length != bytes.size() ||
      header.length != sizeof(header) + std::uint64_t{header.buckets} * sizeof(StateEntry)) {
    return corrupt("wrong length");
  }
  if (header.checksum != Checksum(bytes)) return corrupt("wrong checksum");
  if (!IsSum(header.weight) || !IsSum(header.label_sum)) return corrupt("sums out of range");
  ClickMetrics restored;
  std::uint64_t next = 0;
  for (std::uint32_t i = 0; i < header.buckets; ++i) {
    StateEntry entry;
    std::memcpy(&entry, bytes.data() + sizeof(header) + i * sizeof(entry), sizeof(entry));
    if (entry.bucket < next || entry.bucket >= kBuckets) return corrupt("buckets out of order");
    if (!IsSum(entry.clicks) || !IsSum(entry.no_clicks) || entry.clicks + entry.no_clicks == 0) {
      return corrupt("a bucket out of range");
    }
    next = entry.bucket + 1;
    restored.buckets_[entry.bucket] = {entry.clicks, entry.no_clicks};
  }
  restored.filled_buckets_ = header.buckets;
  restored.examples_ = header.examples;
  restored.weight_ = header.weight;
  restored.label_sum_ = header.label_sum;
  restored.prediction_sum_ = header.prediction_sum;
  restored.logloss_sum_ = header.logloss_sum;
  *this = std::move(restored);
  return OkStatus();
}

std::uint64_t ClickMetrics::MostSavedBytes(std::uint64_t more_examples) const {
  const std::uint64_t more = std::min<std::uint64_t>(more_examples, kBuckets);
  const std::uint64_t entries = std::min<std::uint64_t>(filled_buckets_ + more, kBuckets);
  return sizeof(StateHeader) + entries * sizeof(StateEntry);
}

std::uint64_t ClickMetrics::MemoryBytes() const {
  return sizeof(*this) + buckets_.capacity() * sizeof(Bucket);
}

}  // namespace terrace
