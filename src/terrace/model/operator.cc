#include "terrace/model/operator.h"

namespace terrace {

std::size_t ParameterSpec::size() const {
  std::size_t floats = 1;
  for (const std::int64_t length : shape) floats *= static_cast<std::size_t>(length);
  return floats;
}

std::vector<ParameterSpec> Operator::Parameters(
    std::span<const std::size_t> /*input_widths*/) const {
  return {};
}

std::size_t Operator::SavedWidth(std::span<const std::size_t> /*input_widths*/) const { return 0; }

}  // namespace terrace
