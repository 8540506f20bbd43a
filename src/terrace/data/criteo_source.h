// CriteoSource: Criteo text files as a stream of examples. Threads: as ExampleSource; one thread of
// its own reads and decompresses ahead.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/data/criteo_parser.h"
#include "terrace/data/example_source.h"
#include "terrace/data/line_reader.h"
#include "terrace/io/file_system.h"

namespace terrace {

class CriteoSource final : public ExampleSource {
 public:
  // As OpenSource. REQUIRES: options are checked. Borrows fs.
  static Result<std::unique_ptr<ExampleSource>> Open(FileSystem* fs, const DataOptions& options);

  // MemoryBytes of one with these options; stream_bytes: of the hungriest decompressor.
  static std::uint64_t BytesOf(const DataOptions& options, const DataSchema& schema,
                               std::uint64_t stream_bytes);

  const DataSchema& schema() const override { return encoder_.schema(); }
  Result<std::optional<Batch>> NextIn(std::uint32_t examples, std::uint32_t minibatch,
                                      Batch old) override;
  Status Seek(const DataCursor& cursor) override;
  Status ReadToPosition(const std::function<bool()>& stopped) override;
  Status failure() const override { return error_; }
  std::span<const InputFile> files() const override { return files_; }
  std::uint64_t MemoryBytes() const override;
  SourceStats stats() const override;
  std::string IdentityText() const override;
  void Cancel() override { reader_.Cancel(); }

 private:
  CriteoSource(FileSystem* fs, const DataOptions& options, IntegerEncoding integers,
               std::vector<InputFile> files, std::vector<CriteoLayout> layouts,
               std::uint64_t stream_bytes);
  Status FillBatch(std::uint64_t wanted, std::uint32_t minibatch, Batch* batch);
  Status FinishSeek();
  Result<bool> AppendNext(Batch* batch);
  Result<bool> HasNext();
  Result<bool> NextRow(LineReader::Line* line, CriteoRow* row);
  Status FillWindow();
  void AppendRow(const LineReader::Line& line, const CriteoRow& row, Batch* batch) const;
  Status CountBadLine(const LineReader::Line& line, const BadLine& bad);
  Status CheckBadFraction() const;
  DataCursor Cursor() const;
  void FinishEpoch(bool at_boundary, Batch* batch);
  void UpdateStats();
  bool windowed() const { return options_.shuffle == "examples"; }

  const DataOptions options_;
  const ExampleEncoder encoder_;
  const std::vector<InputFile> files_;
  const std::vector<CriteoLayout> layouts_;  // By file.
  const std::uint64_t stream_bytes_;         // Of the hungriest decompressor.
  std::uint64_t epoch_bytes_ = 0;

  LineReader reader_;
  std::function<bool()> stopped_;  // Within ReadToPosition.
  Status error_;
  bool started_ = false;
  std::uint64_t epoch_ = 0;
  std::uint64_t example_in_epoch_ = 0;  // Given out.
  std::uint64_t examples_ = 0;          // Since the start of the run.
  std::uint64_t to_skip_ = 0;           // Good lines between the hint and the position.
  std::uint64_t rows_in_epoch_ = 0;     // Good lines read, given out or not.
  std::uint64_t bad_in_epoch_ = 0;
  std::uint32_t bad_run_ = 0;  // Bad lines since the last good one.
  std::uint64_t bad_logged_ = 0;
  std::string first_bad_;    // That was read here; empty: none was.
  bool bad_before_ = false;  // Seek has passed over bad lines.
  bool epoch_read_ = false;  // No line of the epoch is left.
  // One example read ahead, to know whether the epoch goes on (not with windows).
  Batch pending_;
  std::uint32_t pending_bad_run_ = 0;
  // The window that is given out in the order window_order_.
  Batch window_;
  std::vector<std::uint32_t> window_order_;
  std::uint32_t window_at_ = 0;
  DataCursor window_start_;  // Only its hint.

  mutable Mutex mu_;
  SourceStats stats_ TERRACE_GUARDED_BY(mu_);
  std::uint64_t lines_ = 0;
  std::uint64_t bad_lines_ = 0;
  std::uint64_t rows_given_ = 0;
};

}  // namespace terrace
