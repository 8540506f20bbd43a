// Any text as a job file: no crash, and what is a job comes back equal from its own YAML.
#include <cstddef>
#include <cstdint>
#include <string>

#include "terrace/base/check.h"
#include "terrace/train/job.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  // What follows a zero byte is an override.
  const std::size_t zero = text.find('\0');
  std::vector<std::string> overrides;
  if (zero != std::string::npos) overrides.push_back(text.substr(zero + 1));
  const terrace::Result<terrace::Job> job =
      terrace::ParseJob(text.substr(0, zero), "fuzz.yaml", overrides);
  if (!job.ok()) {
    TERRACE_CHECK(job.status().code() == terrace::StatusCode::kInvalidArgument);
    TERRACE_CHECK(!job.status().message().empty());
    return 0;
  }
  const std::string yaml = terrace::JobToYaml(*job);
  const terrace::Result<terrace::Job> again = terrace::ParseJob(yaml, "again.yaml", {});
  TERRACE_CHECK(again.ok());
  TERRACE_CHECK(terrace::JobToYaml(*again) == yaml);
  return 0;
}
