// Any bytes either decode to what encodes to the same bytes, or are refused.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "terrace/base/check.h"
#include "terrace/io/framed_file.h"

namespace {

constexpr std::string_view kMagic = "TRFUZZED";
constexpr std::uint32_t kNewestVersion = 3;
constexpr std::size_t kHeaderBytes = 64;

void PutChecksum(std::string* frame, std::size_t at, std::string_view of) {
  const std::uint64_t checksum = terrace::Checksum64(std::as_bytes(std::span(of)));
  std::memcpy(frame->data() + at, &checksum, sizeof(checksum));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  std::string frame(reinterpret_cast<const char*>(data) + 1, size - 1);
  // No fuzzer guesses a checksum: the first byte says which to put right, so that what is behind
  // them is reached.
  if (frame.size() >= kHeaderBytes && (data[0] & 1) != 0) {
    PutChecksum(&frame, 24, std::string_view(frame).substr(kHeaderBytes));
  }
  if (frame.size() >= kHeaderBytes && (data[0] & 2) != 0) {
    PutChecksum(&frame, 56, std::string_view(frame).substr(0, 56));
  }
  auto payload = terrace::DecodeFramed(frame, "fuzz", kMagic, kNewestVersion);
  if (!payload.ok()) {
    TERRACE_CHECK(payload.status().code() == terrace::StatusCode::kCorruption ||
                  payload.status().code() == terrace::StatusCode::kInvalidArgument);
    return 0;
  }
  std::uint32_t version;
  std::memcpy(&version, frame.data() + kMagic.size(), sizeof(version));
  TERRACE_CHECK(version >= 1 && version <= kNewestVersion);
  TERRACE_CHECK(terrace::EncodeFramed(kMagic, version, std::as_bytes(std::span(*payload))) ==
                frame);
  return 0;
}
