// RunReader: the newest checkpoint of a run, held and open for reading beside its trainer: its job,
// its stores, its dense state. Writes nothing. Threads: one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/store/store.h"
#include "terrace/table/row_schema.h"
#include "terrace/train/checkpoint.h"
#include "terrace/train/job.h"

namespace terrace {

class RunReader {
 public:
  // kNotFound: no run, or no checkpoint yet.
  static Result<std::unique_ptr<RunReader>> Open(FileSystem* fs, const std::string& run);

  RunFolder* folder() { return folder_.get(); }
  const Checkpoint& checkpoint() const { return held_.checkpoint; }
  // The job that made the checkpoint.
  const Job& job() const { return job_; }
  // Memory for reading rows in order, within the job's budget.
  std::uint64_t buffer_bytes() const;
  // Opens one store of the checkpoint. Its index takes memory as in the trainer: open one at a time
  // where one is enough.
  Result<std::unique_ptr<Store>> OpenStore(const Checkpoint::StoreManifest& store);

 private:
  RunReader(FileSystem* fs, std::unique_ptr<RunFolder> folder, HeldCheckpoint held, Job job)
      : fs_(fs),
        folder_(std::move(folder)),
        held_(std::move(held)),
        job_(std::move(job)),
        quota_(~std::uint64_t{0}) {}

  FileSystem* const fs_;
  std::unique_ptr<RunFolder> folder_;
  HeldCheckpoint held_;
  Job job_;
  DiskQuota quota_;  // Of a reader: never asked.
};

// What reading a checkpoint that is held came to: a file that is missing there is damage,
// kCorruption.
Status MissingIsDamage(const Status& status);

// The fields of a row, from the canonical text of its schema. kCorruption: no such text.
Result<std::vector<RowField>> FieldsOfSchemaText(const std::string& text);

// When keys get rows, likewise. kCorruption: no such text.
Result<AdmissionSpec> AdmissionOfSchemaText(const std::string& text);

// When rows expire, likewise.
Result<ExpiryRule> ExpiryOfSchemaText(const std::string& text);

// The rows of a store that count at a position. Reads every row where the rule lets any expire.
Result<std::uint64_t> CountRowsAt(Store* store, const ExpiryRule& expiry, std::uint64_t position,
                                  std::uint64_t buffer_bytes);

// The admission filter of a table, read and checked; its memory is that of the job's admit_filter.
// Null: the table, whose schema has that text, has none.
Result<std::unique_ptr<AdmissionFilter>> ReadAdmissionFilter(RunFolder* folder,
                                                             const Checkpoint& checkpoint,
                                                             const std::string& table,
                                                             const std::string& schema);

// The content of a checkpoint as 32 hexadecimal digits: equal for equal models, wherever and in
// whichever order rows lie (docs/formats/digest.md). Reads every row and its check.
Result<std::string> DigestOf(RunReader* reader);

}  // namespace terrace
