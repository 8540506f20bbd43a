#include "terrace/cli/oracle.h"

#include <cmath>

namespace terrace {

void Oracle::Add(std::span<const double> probability, std::span<const float> label) {
  logit_.resize(label.size());
  rounded_.resize(label.size());
  double logloss = 0;
  for (std::size_t i = 0; i < label.size(); ++i) {
    const double p = probability[i];
    logit_[i] = static_cast<float>(std::log(p) - std::log1p(-p));
    rounded_[i] = static_cast<float>(p);
    logloss -= label[i] > 0.5f ? std::log(p) : std::log1p(-p);
  }
  metrics_.Add(logit_.data(), rounded_.data(), label.data(), nullptr, label.size(), logloss);
}

Result<ClickMetricsResult> OracleOf(const ClickLogSpec& spec, std::uint64_t first_row,
                                    std::uint64_t rows) {
  Oracle oracle;
  TERRACE_RETURN_IF_ERROR(
      RunOracle(spec, first_row, rows,
                [&](std::span<const double> probability, std::span<const float> label) {
                  oracle.Add(probability, label);
                }));
  return oracle.Compute();
}

}  // namespace terrace
