// The legal keys of a job file, as one table: path, type, limits, meaning, and how each is read
// into a Job and printed from one. Parsing, messages, `train --help-job` and docs/job-file.md come
// from it. Threads: constant after the first use.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "terrace/train/job.h"
#include "terrace/train/job_tree.h"

namespace terrace {

struct JobKey {
  std::string path;    // "training.batch"; "*" stands for the user's own name: "tables.*.dim".
  std::string type;    // "whole number"
  std::string limits;  // "1 to 4096"; may be empty.
  std::string doc;     // One line.
  // Part of what identifies a model: fixed for the life of a run. Keys of tables, slots and input
  // files are covered by the plan and the source instead.
  bool identifies = false;
  std::string default_note;  // Instead of the default's value: "as in table".
  // Sets the job's field. The text says what is wrong; empty: nothing. `name` stands for the "*".
  std::function<std::string(const JobNode&, Job*, const std::string& name)> set;
  // The value as YAML; nullopt: left out of a complete job.
  std::function<std::optional<std::string>(const Job&, const std::string& name)> print;
  // Whether the key means anything beside the other values ("rows" does not beside format criteo).
  std::function<bool(const Job&, const std::string& name)> applies;  // Empty: always.
  std::string applies_text;                                          // "format synthetic"
};

// In the order of the document; a key that sets the defaults of others stands before them.
const std::vector<JobKey>& JobKeys();

// A schedule as one line: what identifies a model.
std::string LearningRateText(const LearningRate& rate);

}  // namespace terrace
