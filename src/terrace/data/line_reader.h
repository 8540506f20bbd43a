// LineReader: the lines of a run's files in the order of its epochs, and where each of them ends.
// Threads: one at a time; Cancel from any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/mutex.h"
#include "terrace/base/status.h"
#include "terrace/data/example_source.h"
#include "terrace/data/read_ahead.h"
#include "terrace/io/file_system.h"

namespace terrace {

// Between two lines.
struct LinePosition {
  std::uint64_t epoch = 0;
  std::uint64_t file = 0;    // In the epoch's order.
  std::uint64_t offset = 0;  // Of the decompressed bytes.
  std::uint64_t line = 0;    // Lines of the file before.
};

class LineReader {
 public:
  struct Line {
    std::string_view text;     // Without its newline; until the next call.
    bool overlong = false;     // More than kLargestLineBytes; `text` is empty.
    std::uint32_t file = 0;    // Index into `files`.
    std::uint64_t number = 0;  // From 1.
  };

  // Borrows fs and files, which outlive it. Starts to read at the first Next.
  LineReader(FileSystem* fs, std::span<const InputFile> files, ReadAhead::Order order,
             std::uint64_t epochs, std::uint64_t read_ahead_bytes);

  void set_position(const LinePosition& position) {
    position_ = position;
  }  // REQUIRES: no Next yet.
  const LinePosition& position() const { return position_; }
  // Reads to the position, as the first Next does else. kAborted: `stopped` said so, which is asked
  // on another thread, and not any more when this returns. REQUIRES: no Next yet.
  Status Reach(const std::function<bool()>& stopped);
  // False: the epoch ended, and position() is the start of the next. Blocks: on reads.
  // REQUIRES: position().epoch < epochs.
  Result<bool> Next(Line* line);
  void Cancel();

  std::uint64_t bytes_read() const { return bytes_read_; }  // From disk.
  // Bytes on disk of the epoch's files before the position, to the chunk.
  std::uint64_t epoch_bytes() const { return earlier_files_bytes_ + file_bytes_; }

 private:
  Status Start(const std::function<bool()>& stopped);
  Status NextChunk();
  void RecycleChunk();
  void EnterEpoch();
  void FinishFile();
  void Carry(std::string_view part);
  void Deliver(std::string_view text, std::uint64_t length, std::uint64_t consumed, Line* line);

  FileSystem* const fs_;
  const std::span<const InputFile> files_;
  const ReadAhead::Order order_;
  const std::uint64_t epochs_;
  const std::uint64_t read_ahead_bytes_;

  LinePosition position_;
  std::vector<std::uint32_t> epoch_order_;
  ReadAhead* chunks_ = nullptr;  // read_ahead_, once it is there.
  std::optional<ReadAhead::Chunk> chunk_;
  std::size_t chunk_at_ = 0;
  std::string carry_;              // The start of a line whose end is in a later chunk.
  std::uint64_t carry_bytes_ = 0;  // With what an overlong line dropped.
  bool carry_delivered_ = false;   // The last line was in carry_.
  std::uint64_t bytes_read_ = 0;
  std::uint64_t earlier_files_bytes_ = 0;
  std::uint64_t file_bytes_ = 0;

  Mutex mu_;
  std::unique_ptr<ReadAhead> read_ahead_ TERRACE_GUARDED_BY(mu_);
  bool cancelled_ TERRACE_GUARDED_BY(mu_) = false;
};

}  // namespace terrace
