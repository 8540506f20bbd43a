// Any bytes as the payload of an admission filter's file, whole by its checksums: refused as
// another's, or a filter of this table that counts whatever its cells hold.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "terrace/base/check.h"
#include "terrace/io/framed_file.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/train/checkpoint.h"

namespace terrace {
namespace {

constexpr AdmissionSpec kSpec = {3, 256};  // Four blocks.

std::unique_ptr<AdmissionFilter> MakeFilter() {
  return AdmissionFilter::Create("default", kSpec).value();
}

void ReadAsFilter(const std::string& payload) {
  MemoryFileSystem fs;
  Job job;
  job.output = "/run";
  const auto run = RunFolder::Open(&fs, job.output, RunFolder::Mode::kNew, &job).value();
  Checkpoint checkpoint;
  checkpoint.id = 1;
  TERRACE_CHECK(fs.MakeDirectories("/run/admission").ok());
  const Result<FileDigest> digest =
      WriteFramedFile(&fs, "/run/admission/filter-00000001-default", "TERRADMF", 1,
                      std::as_bytes(std::span(payload)));
  checkpoint.admission = {{"default", digest.value()}};
  const std::unique_ptr<AdmissionFilter> filter = MakeFilter();
  const Status read = run->ReadFilter(checkpoint, "default", filter.get());
  if (!read.ok()) {
    TERRACE_CHECK(read.code() == StatusCode::kCorruption && !read.message().empty());
    return;
  }
  // Its head is what such a filter's is, bit for bit.
  const std::unique_ptr<AdmissionFilter> fresh = MakeFilter();
  const auto head = [](AdmissionFilter* of) {
    return of->image().subspan(AdmissionFilter::kFrameRoomBytes, AdmissionFilter::kHeadBytes);
  };
  TERRACE_CHECK(std::ranges::equal(head(filter.get()), head(fresh.get())));
  for (Key key = 0; key < 64; ++key) {
    filter->Count(key, kSpec.after);
    TERRACE_CHECK(filter->Admits(key));
  }
}

}  // namespace
}  // namespace terrace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t kMostBytes = 4096;  // No filter here is longer.
  std::string payload(reinterpret_cast<const char*>(data), std::min(size, kMostBytes));
  terrace::ReadAsFilter(payload);
  // The same at the right length, where the head decides.
  const std::size_t whole =
      terrace::AdmissionFilter::ImageBytes(terrace::kSpec) - terrace::kFrameHeaderBytes;
  payload.resize(whole, '\0');
  terrace::ReadAsFilter(payload);
  return 0;
}
