#include "terrace/data/read_ahead.h"

#include <algorithm>
#include <string>
#include <utility>

#include "terrace/data/byte_stream.h"

namespace terrace {
namespace {
constexpr std::uint64_t kSmallestChunkBytes = std::uint64_t{64} << 10;
// Reads of this size run at a disk's sequential rate.
constexpr std::uint64_t kLargestChunkBytes = std::uint64_t{1} << 20;
}  // namespace

ReadAhead::ReadAhead(FileSystem* fs, std::span<const InputFile> files, Order order,
                     const ReadAheadOptions& options, std::size_t chunks)
    : fs_(fs),
      files_(files),
      order_(std::move(order)),
      options_(options),
      free_(chunks),
      full_(chunks + 1) {}

Result<std::unique_ptr<ReadAhead>> ReadAhead::Start(FileSystem* fs,
                                                    std::span<const InputFile> files, Order order,
                                                    const ReadAheadOptions& options) {
  TERRACE_CHECK(!files.empty());
  const std::uint64_t chunk_bytes =
      std::clamp(options.bytes / 8, kSmallestChunkBytes, kLargestChunkBytes) / kSmallestChunkBytes *
      kSmallestChunkBytes;
  // Two, so that one is read while the other is parsed.
  const std::uint64_t chunks = std::max<std::uint64_t>(options.bytes / chunk_bytes, 2);
  std::unique_ptr<ReadAhead> self(
      new ReadAhead(fs, files, std::move(order), options, static_cast<std::size_t>(chunks)));
  for (std::uint64_t i = 0; i < chunks; ++i) {
    TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(chunk_bytes));
    TERRACE_RETURN_IF_ERROR(self->free_.Send(std::move(buffer)));
  }
  self->thread_ = Thread("data-read", ThreadPriority::kYielding, [raw = self.get()] {
    Status status = raw->ReadAll();
    if (!status.ok()) {
      Chunk last;
      last.status = std::move(status);
      // After Cancel the channel refuses it, and the receiver has its cause already.
      if (!raw->full_.Send(std::move(last)).ok()) return;
    }
    raw->full_.Close();
  });
  return self;
}

ReadAhead::~ReadAhead() {
  Cancel();
  if (thread_.joinable()) thread_.Join();
}

void ReadAhead::Cancel() {
  const Status cause = AbortedError("reading was cancelled");
  free_.Abort(cause);
  full_.Abort(cause);
}

Result<std::optional<ReadAhead::Chunk>> ReadAhead::Next() {
  TERRACE_ASSIGN_OR_RETURN(std::optional<Chunk> chunk, full_.Receive());
  if (chunk.has_value() && !chunk->status.ok()) return chunk->status;
  return chunk;
}

void ReadAhead::Recycle(Chunk chunk) {
  if (!chunk.buffer) return;
  // Refused only after Cancel; then the buffer is freed here.
  if (!free_.Send(std::move(chunk.buffer)).ok()) return;
}

Status ReadAhead::ReadAll() {
  std::uint64_t first = options_.file;
  std::uint64_t start = options_.offset;
  for (std::uint64_t epoch = options_.epoch; epoch < options_.epochs; ++epoch) {
    const std::vector<std::uint32_t> order = order_(epoch);
    for (std::uint64_t position = first; position < order.size(); ++position) {
      TERRACE_RETURN_IF_ERROR(ReadFile(epoch, position, files_[order[position]], start));
      start = 0;
    }
    first = 0;
  }
  return OkStatus();
}

Status ReadAhead::ReadFile(std::uint64_t epoch, std::uint64_t position, const InputFile& file,
                           std::uint64_t start) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<ByteStream> stream, OpenByteStream(fs_, file, start));
  for (;;) {
    TERRACE_ASSIGN_OR_RETURN(std::optional<HugeBuffer> buffer, free_.Receive());
    TERRACE_ASSIGN_OR_RETURN(ByteStream::Piece piece, stream->Read(buffer->span()));
    const std::uint64_t end = piece.offset + piece.bytes.size();
    const bool ends_file = piece.bytes.empty();
    if (ends_file && piece.offset < start) {
      return CorruptionError(file.path + ": ends at byte " + std::to_string(piece.offset) +
                             " of its contents, before byte " + std::to_string(start) +
                             " where reading is to go on; it is not the file that was read before");
    }
    if (!ends_file && end <= start) {
      if (options_.stopped && options_.stopped()) return AbortedError("reading was stopped");
      TERRACE_RETURN_IF_ERROR(free_.Send(std::move(*buffer)));
      continue;
    }
    if (piece.offset < start)
      piece.bytes = piece.bytes.subspan(static_cast<std::size_t>(start - piece.offset));
    Chunk chunk;
    chunk.buffer = std::move(*buffer);
    chunk.bytes = piece.bytes;
    chunk.epoch = epoch;
    chunk.file = position;
    chunk.file_bytes = stream->file_bytes();
    chunk.ends_file = ends_file;
    TERRACE_RETURN_IF_ERROR(full_.Send(std::move(chunk)));
    if (ends_file) return OkStatus();
  }
}

}  // namespace terrace
