// What the tests of jobs share: a job of two lines, to which they add their own. Threads: any.
#pragma once

#include <string>
#include <vector>

#include "terrace/train/job.h"

namespace terrace {

inline constexpr const char* kSmallJob =
    "output: runs/a\n"
    "data: {format: criteo, train: [a.tsv]}\n";

// Messages call the file j.yaml; what follows the small job begins at its line 3.
inline Result<Job> Parse(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return ParseJob(yaml, "j.yaml", overrides);
}

}  // namespace terrace
