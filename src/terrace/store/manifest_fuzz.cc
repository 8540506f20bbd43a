// Any bytes either decode to a manifest that encodes to the same bytes, or are refused.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "terrace/base/check.h"
#include "terrace/store/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view payload(reinterpret_cast<const char*>(data), size);
  const auto manifest = terrace::DecodeManifest(payload, "fuzz");
  if (!manifest.ok()) {
    TERRACE_CHECK(manifest.status().code() == terrace::StatusCode::kCorruption);
    return 0;
  }
  TERRACE_CHECK(terrace::EncodeManifest(*manifest) == payload);
  return 0;
}
