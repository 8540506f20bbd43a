// JobNode: a job file as a tree that remembers where each value came from, so that every message
// names its line. The one place that touches yaml-cpp. Threads: values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/base/status.h"

namespace terrace {

// Where a value was written: "jobs/a.yaml:7", or "--set training.batch". `order` sorts messages:
// lines of the file, then overrides.
struct JobOrigin {
  std::string text;
  std::size_t order = 0;
};

struct JobNode {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  JobOrigin origin;
  std::string scalar;
  std::vector<JobNode> items;
  // Of a map, in the order of the file, each with its name; names are distinct.
  std::vector<JobNode> entries;
  std::string name;  // As an entry of a map.

  const JobNode* Find(std::string_view entry_name) const;
};

// What is wrong with a job, collected so that a user sees all of it at once.
class JobProblems {
 public:
  void Add(const JobOrigin& origin, std::string message);
  bool empty() const { return problems_.empty(); }
  // kInvalidArgument, a line each, in the order of the file.
  Status ToStatus() const;

 private:
  struct Problem {
    JobOrigin origin;
    std::string message;
  };
  std::vector<Problem> problems_;
};

// The tree of a file. Syntax errors, names given twice and trees beyond any job's size are
// problems; what could be read is returned.
JobNode ParseJobTree(std::string_view yaml, const std::string& base_name, JobProblems* problems);
// Applies the `index`-th `--set path=value`; value is YAML. A path through a number that may be a
// schedule
// ("...learning_rate.warmup_steps") keeps the number as its base.
void ApplyOverride(const std::string& override_text, std::size_t index, JobNode* tree,
                   JobProblems* problems);

// The name among `candidates` that is fewest edits away, or empty when none is near.
std::string NearestName(std::string_view name, const std::vector<std::string>& candidates);

// A whole number as a user writes it: 65536, 65_536 and 1e6 alike.
std::optional<std::uint64_t> ParseWhole(std::string text);

// A scalar as YAML reads it back: plain where that is safe, else in double quotes.
std::string YamlText(std::string_view text);

}  // namespace terrace
