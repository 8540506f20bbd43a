// ClickLogGenerator: rows of a made-up click log whose true click probabilities are known. Each row
// is a function of (spec, row number) alone: same bits on every processor.
// docs/click-log-generator.md describes the distribution. Threads: const functions, any thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/data/criteo_parser.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"

namespace terrace {

struct ClickLogSpec {
  std::uint64_t seed = 1;
  std::uint64_t cardinality = 1'000'000;  // Categories a slot, up to 10^12.
  double zipf = 1.05;                     // Exponent of the power law, 0 (uniform) to 4.
  std::uint32_t categorical_slots = 26;   // 1 to 256.
  double click_rate = 0.25;               // Mean of the true probability, nearly.
  double signal = 1.3;  // Standard deviation of the true logit; 1.3 gives an oracle's AUC of 0.79.
};

ClickLogSpec ClickLogSpecOf(const DataOptions& options);

// Power law P(k) ~ k^-exponent over k = 1..count, in constant memory: rejection-inversion
// (W. Hoermann, G. Derflinger, "Rejection-inversion to generate variates from monotone discrete
// distributions", ACM TOMACS 6(3), 1996).
class ZipfSampler {
 public:
  ZipfSampler(std::uint64_t count, double exponent);
  // For each hash a draw: a function of the hash, uniform hashes give the power law.
  // hashes, ranks: (n), ranks from 1.
  void Sample(const std::uint64_t* hashes, std::size_t n, std::uint64_t* ranks) const;

 private:
  double IntegralOfDensity(double x) const;
  double InverseIntegral(double u) const;
  bool Accept(double u, double x, double rank) const;
  double AcceptFrom(double rank) const;
  std::uint64_t Retry(std::uint64_t hash) const;

  double count_;
  double exponent_;
  double one_minus_exponent_;  // 0 when the exponent is nearly 1.
  double reciprocal_;          // Of that.
  double integral_first_;
  double integral_last_;
  double sliver_;
};

struct ClickLogRow {
  float label = 0;
  double probability = 0;
  std::array<std::int64_t, kCriteoIntegers> integers;
  std::vector<std::uint64_t> categories;  // (categorical_slots) as in Criteo text
  std::vector<std::uint64_t> scratch;     // Of MakeRow.
};

class ClickLogGenerator {
 public:
  // kInvalidArgument names the limit that `spec` breaks.
  static Result<std::unique_ptr<ClickLogGenerator>> Create(const ClickLogSpec& spec);
  const ClickLogSpec& spec() const { return spec_; }
  void MakeRow(std::uint64_t row, ClickLogRow* out) const;
  // Hexadecimal digits of a category in text: 8 up to 2^32 categories a slot, else 12.
  int category_digits() const { return narrow_ ? 8 : 12; }
  std::string IdentityText() const;

 private:
  explicit ClickLogGenerator(const ClickLogSpec& spec);
  void Calibrate();
  // The score before scale and offset; fills integers and categories.
  double Score(std::uint64_t row_hash, ClickLogRow* out) const;
  double ScoreIntegers(std::uint64_t row_hash, std::int64_t* integers) const;
  double ScoreCategories(std::uint64_t row_hash, ClickLogRow* out) const;

  const ClickLogSpec spec_;
  const bool narrow_;
  const ZipfSampler zipf_;
  double scale_ = 1;
  double offset_ = 0;
  std::vector<std::uint64_t> slot_hash_;  // (categorical_slots)
  std::vector<double> slot_strength_;     // (categorical_slots)
};

// The true probabilities and the labels of some rows, in order: what an oracle's AUC, log loss and
// calibration are computed from.
using OracleCallback =
    std::function<void(std::span<const double> probability, std::span<const float> label)>;

struct WriteClickLogOptions {
  std::uint64_t first_row = 0;
  OracleCallback oracle;                               // May be empty.
  std::function<bool(std::uint64_t rows)> keep_going;  // After each block; false: kAborted.
};

// Writes rows as Criteo text with tabs, without header; gzip for a path that ends in .gz, zstd for
// .zst. The file appears whole or not at all, and replaces one that is there.
// REQUIRES of the spec: at most 26 categorical slots, else kInvalidArgument.
Status WriteClickLog(FileSystem* fs, const ClickLogSpec& spec, std::uint64_t rows,
                     const std::string& path, const WriteClickLogOptions& options);

// Gives rows [first_row, first_row + rows) to `oracle` without writing them.
Status RunOracle(const ClickLogSpec& spec, std::uint64_t first_row, std::uint64_t rows,
                 const OracleCallback& oracle);

}  // namespace terrace
