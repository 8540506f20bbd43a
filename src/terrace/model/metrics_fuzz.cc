// Any bytes are refused or restored to a state that saves as the same bytes.
#include <cstddef>
#include <cstdint>
#include <string>

#include "terrace/model/metrics.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  terrace::ClickMetrics metrics;
  if (metrics.Restore(bytes).ok()) {
    (void)metrics.Compute();
    TERRACE_CHECK(metrics.Save() == bytes);
  }
  return 0;
}
