// What an oracle that knows the true probabilities of a generated click log scores on it. Threads:
// one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/data/click_log_generator.h"
#include "terrace/model/metrics.h"

namespace terrace {

class Oracle {
 public:
  // Adds true probabilities, as if a model had predicted them. Both: (rows)
  void Add(std::span<const double> probability, std::span<const float> label);
  ClickMetricsResult Compute() const { return metrics_.Compute(); }

 private:
  ClickMetrics metrics_;
  std::vector<float> logit_;
  std::vector<float> rounded_;
};

// Of rows [first_row, first_row + rows) of the log, which are made for it: a million takes a
// second. kInvalidArgument: no such log.
Result<ClickMetricsResult> OracleOf(const ClickLogSpec& spec, std::uint64_t first_row,
                                    std::uint64_t rows);

}  // namespace terrace
