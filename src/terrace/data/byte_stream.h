// ByteStream: the bytes of one input file in order, decompressed when its first bytes say gzip or
// zstd. Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "terrace/base/status.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"

namespace terrace {

enum class Compression : std::uint8_t { kNone, kGzip, kZstd };

class ByteStream {
 public:
  struct Piece {
    std::uint64_t offset = 0;  // Of its first byte among the decompressed bytes.
    std::span<const std::byte> bytes;
  };
  virtual ~ByteStream() = default;
  // The next bytes, as a part of `buffer`; empty only at the end. Blocks: on reads.
  // REQUIRES: buffer aligned to kDirectIoAlignment, its size a multiple of it and not 0.
  // kCorruption: an archive that is damaged or ends early, or a file that became shorter than
  // InputFile::size; names the file and the byte.
  virtual Result<Piece> Read(std::span<std::byte> buffer) = 0;
  // Bytes of the file used so far; any thread's reads of it come between calls of Read.
  virtual std::uint64_t file_bytes() const = 0;
  virtual Compression compression() const = 0;
  // What it holds besides the caller's buffer; for zstd as the first frame asks.
  virtual std::uint64_t MemoryBytes() const = 0;
};

// Reads `file` past the page cache where that is possible; only its first file.size bytes count.
// The first piece starts at or before `start` of the decompressed bytes: near it for a plain file,
// at 0 for an archive. Blocks: on a read.
Result<std::unique_ptr<ByteStream>> OpenByteStream(FileSystem* fs, const InputFile& file,
                                                   std::uint64_t start);

}  // namespace terrace
