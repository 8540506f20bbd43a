// Any bytes as what a run's folder holds beside checkpoints: the payload of its marker, the text of
// a row's schema, the trainer's state, metrics.jsonl. Each is read or refused with words, and
// metrics that were mended have nothing left to mend.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/io/framed_file.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/train/metrics_scrub.h"
#include "terrace/train/run_marker.h"
#include "terrace/train/run_reader.h"
#include "terrace/train/summary.h"

namespace terrace {
namespace {

void CheckRefusal(const Status& status) {
  TERRACE_CHECK(status.ok() || !status.message().empty());
  TERRACE_CHECK(status.code() != StatusCode::kInternal);
}

void ReadMarker(const std::string& payload) {
  MemoryFileSystem fs;
  TERRACE_CHECK(fs.MakeDirectories("/run").ok());
  TERRACE_CHECK(WriteFramedFile(&fs, JoinPath("/run", kRunMarkerName), "TERRMARK", 2,
                                std::as_bytes(std::span(payload)))
                    .ok());
  const Result<RunMarker> marker = ReadRunMarker(&fs, "/run");
  CheckRefusal(marker.status());
  if (!marker.ok()) return;
  TERRACE_CHECK(WriteRunMarker(&fs, "/run", *marker).ok());
  const Result<RunMarker> again = ReadRunMarker(&fs, "/run");
  TERRACE_CHECK(again.ok() && again->ssd_folders.size() == marker->ssd_folders.size() &&
                again->run_folder.empty() == marker->run_folder.empty());
}

void ReadMetrics(const std::string& text, NewerLines newer) {
  MemoryFileSystem fs;
  const std::string path = "/metrics.jsonl";
  TERRACE_CHECK(WriteFileAtomically(&fs, path, std::as_bytes(std::span(text))).ok());
  // Ends in a line, as what a checkpoint counts does.
  const std::uint64_t bytes = text.rfind('\n') + 1;
  const Result<std::vector<DamagedMetrics>> damage = ScrubMetrics(&fs, path, bytes, newer);
  CheckRefusal(damage.status());
  if (!damage.ok() || damage->empty()) return;
  const Status mended = MendMetrics(&fs, path, bytes, *damage);
  CheckRefusal(mended);
  if (!mended.ok()) return;
  // A stretch that is too short for words becomes blanks, which belong to the line behind them.
  constexpr std::uint64_t kWords = 64;
  for (const DamagedMetrics& stretch : *damage) {
    if (stretch.bytes < kWords) return;
  }
  const Result<std::vector<DamagedMetrics>> left = ScrubMetrics(&fs, path, bytes, newer);
  TERRACE_CHECK(left.ok() && left->empty());
}

}  // namespace
}  // namespace terrace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  terrace::ReadMarker(text);
  terrace::ReadMetrics(text, terrace::NewerLines::kRefused);
  terrace::ReadMetrics(text, terrace::NewerLines::kDamaged);
  terrace::CheckRefusal(terrace::FieldsOfSchemaText(text).status());
  terrace::CheckRefusal(terrace::AdmissionOfSchemaText(text).status());
  terrace::CheckRefusal(terrace::ExpiryOfSchemaText(text).status());
  terrace::CheckRefusal(terrace::SsdWearOf(text).status());
  return 0;
}
