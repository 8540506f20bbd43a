// Any text as what is remembered of a disk: refused with words, or a cost that a disk can have,
// which is written and read back the same.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "terrace/base/check.h"
#include "terrace/store/read_cost.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::string disk;
  const auto cost = terrace::DecodeReadCost(text, &disk);
  if (!cost.ok()) {
    TERRACE_CHECK(cost.status().code() == terrace::StatusCode::kCorruption);
    TERRACE_CHECK(!cost.status().message().empty());
    return 0;
  }
  TERRACE_CHECK(text.ends_with(" " + disk));
  TERRACE_CHECK(cost->request_seconds >= 1e-9 && cost->request_seconds <= 10);
  TERRACE_CHECK(cost->bytes_per_second >= 1e3 && cost->bytes_per_second <= 1e13);
  const std::uint64_t gap = cost->MergeGapBytes();
  TERRACE_CHECK(gap >= std::uint64_t{4} << 10 && gap <= std::uint64_t{1} << 20);
  std::string same_disk;
  const auto again = terrace::DecodeReadCost(terrace::EncodeReadCost(*cost, disk), &same_disk);
  TERRACE_CHECK(again.ok() && same_disk == disk);
  TERRACE_CHECK(again->request_seconds == cost->request_seconds);
  TERRACE_CHECK(again->bytes_per_second == cost->bytes_per_second);
  return 0;
}
