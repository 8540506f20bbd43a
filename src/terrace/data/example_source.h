// ExampleSource: the stream of examples of a run, in its global order, as batches. Readers (criteo)
// and the generator (synthetic) implement it. Threads: one thread at a time; Cancel from any.
// Read-ahead threads are the source's own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/data/batch.h"
#include "terrace/io/file_system.h"

namespace terrace {

// One input file, frozen with its size at the start of the run.
struct InputFile {
  std::string path;
  std::uint64_t size = 0;  // Bytes on disk.
};

struct SourceStats {
  std::uint64_t examples = 0;
  std::uint64_t lines = 0;
  std::uint64_t bad_lines = 0;
  std::uint64_t bytes_read = 0;  // From disk.
  double progress = 0;  // Of all epochs, [0, 1], by bytes or rows; for the ETA. 0: unknown.
};

// In IdentityText, between the rest and the list of files with their sizes.
inline constexpr std::string_view kFilesInIdentity = "; files";

class ExampleSource {
 public:
  virtual ~ExampleSource() = default;
  virtual const DataSchema& schema() const = 0;
  // The next examples in global order: `examples` of them (a multiple of minibatch); fewer when
  // Seek went inside a mini-batch, so that mini-batches still end at multiples of minibatch from
  // the epoch's start, and at an epoch's end. nullopt: all epochs are done. A mini-batch never
  // spans two epochs. Blocks: on reads. kCorruption: a truncated archive (file, offset);
  // kInvalidArgument: more bad lines than data.max_bad_fraction, with the first of them. Whole
  // mini-batches before what is wrong come first; after an error every further call gives the same
  // one.
  Result<std::optional<Batch>> Next(std::uint32_t examples, std::uint32_t minibatch) {
    return NextIn(examples, minibatch, Batch());
  }
  // The same in the memory of `old`, a batch that nobody needs any more.
  virtual Result<std::optional<Batch>> NextIn(std::uint32_t examples, std::uint32_t minibatch,
                                              Batch old) = 0;
  // What Next gave, if it was an error. On the thread of Next.
  virtual Status failure() const { return OkStatus(); }
  // Goes to `cursor`. REQUIRES: before the first Next.
  virtual Status Seek(const DataCursor& cursor) = 0;
  // Reads to there, as the first Next does else. Blocks: on reads. kCorruption: the data ends
  // before. kAborted: `stopped`, if any, said so; as after Cancel. It is asked before each line,
  // and on another thread for each piece of an archive before the first one.
  virtual Status ReadToPosition(const std::function<bool()>& stopped) {
    return stopped && stopped() ? AbortedError("reading was stopped") : OkStatus();
  }
  virtual std::span<const InputFile> files() const = 0;
  // The most that it holds besides the batches that it gave out.
  virtual std::uint64_t MemoryBytes() const { return 0; }
  virtual SourceStats stats() const = 0;  // Any thread.
  // The order of examples as text: files with sizes, epochs, shuffling. Part of what identifies a
  // model.
  virtual std::string IdentityText() const = 0;
  // Ends a blocked Next soon with kAborted. Any thread.
  virtual void Cancel() = 0;
};

struct DataOptions {
  std::string format = "criteo";   // criteo | synthetic
  std::vector<std::string> files;  // Paths or globs, in order; for `synthetic` unused.
  // Not empty: what `files` were when a source of them was opened before; they are not looked at.
  std::vector<InputFile> frozen;
  std::uint64_t epochs = 1;
  std::uint64_t seed = 0;
  std::string shuffle = "none";  // none | files | examples (files, and examples within windows)
  std::uint64_t shuffle_window =
      65536;  // Examples that change places among themselves; memory grows with it.
  std::string integers =
      "dense";                   // dense | bucket | both: what becomes of Criteo's integer columns
  std::string missing = "skip";  // skip: an empty category has no key | key: it has one of its own
  double max_bad_fraction = 0.01;  // Of the lines; more stops the run.
  // Every line gets a score: bad ones are only counted, after a start with a good one.
  bool for_scoring = false;
  // Warns of the first bad lines and of empty files; else somebody who reads the same does.
  bool warns = true;
  std::uint64_t read_ahead_bytes = std::uint64_t{8} << 20;
  // synthetic (see click_log_generator.h)
  std::uint64_t rows = 0;
  std::uint64_t first_row = 0;  // Training and validation take disjoint ranges of one log.
  std::uint64_t cardinality = 1'000'000;  // Categories a slot.
  double zipf = 1.05;
  std::uint32_t categorical_slots = 26;
  std::uint64_t log_seed = 1;  // Of the log; `seed` only shuffles it.
};

// Expands globs and freezes sizes, unless that was done before, opens every file and parses its
// first line. kNotFound / kInvalidArgument name the file (and line) and what to do. Reads files
// through `fs`.
Result<std::unique_ptr<ExampleSource>> OpenSource(FileSystem* fs, const DataOptions& options);

// Of the source that the options name, whether or not its files are there. Errors: of the options.
Result<DataSchema> SchemaOf(const DataOptions& options);
// Likewise, ExampleSource::MemoryBytes of one whose files are not compressed.
Result<std::uint64_t> LeastSourceBytes(const DataOptions& options);

}  // namespace terrace
