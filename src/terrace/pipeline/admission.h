// Admission: which keys of a planned working set may have a row, by the shows that were counted
// before each of its mini-batches. Stage 2 decides, with a filter that is as far as its plans; what
// it has counted goes with the set, so that stage 4 brings a second filter, the one that
// checkpoints hold, to where training is. Threads: one thread at a time (stage 2).
#pragma once

#include <cstdint>
#include <vector>

#include "terrace/pipeline/work_item.h"
#include "terrace/table/admission_filter.h"

namespace terrace {

class Admission {
 public:
  // filters: by table, null where every key is admitted; borrowed.
  explicit Admission(std::vector<AdmissionFilter*> filters) : filters_(std::move(filters)) {}

  // Takes the keys that no mini-batch of the set admits out of it, gives the local rows of those
  // that are not admitted yet the number kNoWorkingRow, and counts their shows. REQUIRES: sets in
  // the order of the stream, each once.
  void Admit(WorkItem* item);
  std::uint64_t MemoryBytes() const;

 private:
  void AdmitTable(std::uint32_t minibatches, AdmissionFilter* filter, TableWork* table);

  const std::vector<AdmissionFilter*> filters_;
  std::vector<std::uint32_t> numbers_;  // (working rows as planned) among those admitted.
  std::vector<Key> admitted_;
};

// Counts what stage 2 has counted of mini-batch m of the set. Returns the shows of keys that were
// not admitted.
std::uint64_t CountTrained(const TableWork& table, std::uint32_t m, AdmissionFilter* filter);

}  // namespace terrace
