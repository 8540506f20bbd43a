// Any bytes as the payload of a checkpoint or dense file: no crash, and what decodes comes back
// equal.
#include <cstddef>
#include <cstdint>
#include <string>

#include "terrace/base/check.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/summary.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string payload(reinterpret_cast<const char*>(data), size);
  const terrace::Result<terrace::Checkpoint> checkpoint = terrace::DecodeCheckpoint(payload);
  if (checkpoint.ok()) {
    const terrace::Result<std::string> encoded = terrace::EncodeCheckpoint(*checkpoint);
    TERRACE_CHECK(encoded.ok());
    const terrace::Result<terrace::Checkpoint> again = terrace::DecodeCheckpoint(*encoded);
    TERRACE_CHECK(again.ok());
    TERRACE_CHECK(*terrace::EncodeCheckpoint(*again) == *encoded);
  }
  const terrace::Result<terrace::DenseState> dense = terrace::DecodeDense(payload);
  if (dense.ok()) TERRACE_CHECK(terrace::EncodeDense(*dense) == payload);
  const terrace::Result<terrace::RunSummary> summary = terrace::SummaryFromJson(payload);
  if (summary.ok()) {
    const std::string text = terrace::SummaryToJson(*summary);
    const terrace::Result<terrace::RunSummary> again = terrace::SummaryFromJson(text);
    TERRACE_CHECK(again.ok() && terrace::SummaryToJson(*again) == text);
  }
  return 0;
}
