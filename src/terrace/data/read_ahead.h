// ReadAhead: one thread that reads files in the order of the epochs, decompresses them and hands
// their bytes on in chunks, within a fixed memory. Threads: Next and Recycle on one thread, Cancel
// on any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "terrace/base/channel.h"
#include "terrace/base/memory.h"
#include "terrace/base/status.h"
#include "terrace/base/thread.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"

namespace terrace {

struct ReadAheadOptions {
  std::uint64_t bytes = std::uint64_t{8} << 20;  // Of all chunks together; at least 128 KiB.
  std::uint64_t epochs = 1;
  // Where to start.
  std::uint64_t epoch = 0;
  std::uint64_t file = 0;  // In the epoch's order.
  std::uint64_t offset = 0;
  // Of an archive all that lies before `offset` has to be decompressed: asked for each chunk of
  // that, on the reading thread, and ends it with kAborted. May be empty.
  std::function<bool()> stopped;
};

class ReadAhead {
 public:
  struct Chunk {
    HugeBuffer buffer;
    std::span<const std::byte> bytes;  // A part of `buffer`; empty in a file's last chunk.
    std::uint64_t epoch = 0;
    std::uint64_t file = 0;        // In the epoch's order.
    std::uint64_t file_bytes = 0;  // Of the file on disk, used so far.
    bool ends_file = false;
    Status status;  // When not ok, the rest is empty and nothing follows.
  };
  // The indices into `files` of an epoch, in reading order.
  using Order = std::function<std::vector<std::uint32_t>(std::uint64_t epoch)>;

  // Borrows fs and files, which outlive it. REQUIRES: files is not empty.
  static Result<std::unique_ptr<ReadAhead>> Start(FileSystem* fs, std::span<const InputFile> files,
                                                  Order order, const ReadAheadOptions& options);
  ~ReadAhead();

  // Blocks: until a chunk is read. nullopt: all epochs are read. kAborted: Cancel was called.
  Result<std::optional<Chunk>> Next();
  void Recycle(Chunk chunk);
  void Cancel();

 private:
  ReadAhead(FileSystem* fs, std::span<const InputFile> files, Order order,
            const ReadAheadOptions& options, std::size_t chunks);
  Status ReadAll();
  Status ReadFile(std::uint64_t epoch, std::uint64_t position, const InputFile& file,
                  std::uint64_t start);

  FileSystem* const fs_;
  const std::span<const InputFile> files_;
  const Order order_;
  const ReadAheadOptions options_;
  Channel<HugeBuffer> free_;
  Channel<Chunk> full_;
  Thread thread_;
};

}  // namespace terrace
