// ClickMetrics: streaming AUC, log loss, normalised entropy and calibration of predictions, in
// bounded memory. A value that one thread uses. Results do not depend on how the stream is cut, but
// sums keep the order of Add calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "terrace/base/status.h"

namespace terrace {

struct ClickMetricsResult {
  std::uint64_t examples = 0;
  double weight = 0;
  double auc = 0;          // NaN when only one class was seen. Ties count half.
  double auc_error = 0;    // |auc - exact AUC| is at most this: pairs that share a bucket, halved.
  double logloss = 0;      // Natural logarithm, mean by weight. NaN for no examples.
  double ne = 0;           // Log loss over that of the mean label; NaN when one class only.
  double calibration = 0;  // Mean prediction over mean label; NaN without clicks.
  double mean_label = 0;   // Both means are NaN for no examples.
  double mean_prediction = 0;
};

class ClickMetrics {
 public:
  ClickMetrics();
  // As newly made, in the memory it has: a new one would be given 4 MiB of fresh pages.
  void Clear();
  // NaN: a NaN logit or probability makes auc, mean_prediction and calibration NaN for good; the
  // trainer stops before that.
  // logit, label (0 or 1), weight (nullptr: 1): (count). logloss_sum: of these, as the network
  // summed it.
  void Add(const float* logit, const float* probability, const float* label, const float* weight,
           std::size_t count, double logloss_sum);
  ClickMetricsResult Compute() const;
  // The whole state, for checkpoints (docs/formats/click_metrics.md); sparse, so short early in a
  // run. Restore: kCorruption on foreign bytes, and nothing is changed.
  std::string Save() const;
  // Its length after so many more examples, at most.
  std::uint64_t MostSavedBytes(std::uint64_t more_examples) const;
  Status Restore(const std::string& bytes);
  std::uint64_t MemoryBytes() const;

 private:
  struct Bucket {
    double clicks = 0, no_clicks = 0;  // Weight of label 1, of label 0.
  };

  // By the top 18 bits of the logit's ordered float representation: 9 bits of mantissa.
  std::vector<Bucket> buckets_;
  std::uint64_t filled_buckets_ = 0;
  std::uint64_t examples_ = 0;
  double weight_ = 0, label_sum_ = 0, prediction_sum_ = 0, logloss_sum_ = 0;
};

}  // namespace terrace
