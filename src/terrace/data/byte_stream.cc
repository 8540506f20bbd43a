#include "terrace/data/byte_stream.h"

#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "terrace/base/memory.h"

namespace terrace {
namespace {

// Enough for a disk's best sequential rate, little against any memory budget.
constexpr std::size_t kInputBytes = std::size_t{256} << 10;
// What RFC 8878 asks every reader to support; a file whose first frame asks for more gets it.
constexpr int kUsualWindowLog = 23;
// zstd's own limit for readers that were not told otherwise.
constexpr int kLargestWindowLog = 27;

Status Shrunk(const InputFile& file, std::uint64_t at) {
  return CorruptionError(file.path + ": ends at byte " + std::to_string(at) + " but had " +
                         std::to_string(file.size) +
                         " bytes when the run was opened; input files must not change meanwhile");
}

// Sequential reads of the frozen part of a file.
class Input {
 public:
  Input(std::unique_ptr<File> file, InputFile info)
      : file_(std::move(file)), info_(std::move(info)) {}

  const InputFile& info() const { return info_; }
  std::uint64_t position() const { return position_; }
  // REQUIRES: aligned to kDirectIoAlignment.
  void set_position(std::uint64_t position) { position_ = position; }

  // Fills `buffer` but for the end of the file. 0: the end.
  Result<std::size_t> Read(std::span<std::byte> buffer) {
    if (position_ >= info_.size) return std::size_t{0};
    TERRACE_ASSIGN_OR_RETURN(std::size_t size, file_->ReadAt(position_, buffer));
    const std::uint64_t left = info_.size - position_;
    if (size < std::min<std::uint64_t>(buffer.size(), left)) return Shrunk(info_, position_ + size);
    size = static_cast<std::size_t>(std::min<std::uint64_t>(size, left));
    position_ += size;
    return size;
  }

 private:
  std::unique_ptr<File> file_;
  InputFile info_;
  std::uint64_t position_ = 0;
};

class PlainStream final : public ByteStream {
 public:
  PlainStream(Input input, std::uint64_t start) : input_(std::move(input)) {
    input_.set_position(start / kDirectIoAlignment * kDirectIoAlignment);
  }
  Result<Piece> Read(std::span<std::byte> buffer) override {
    const std::uint64_t offset = std::min(input_.position(), input_.info().size);
    TERRACE_ASSIGN_OR_RETURN(const std::size_t size, input_.Read(buffer));
    return Piece{offset, buffer.first(size)};
  }
  std::uint64_t file_bytes() const override { return input_.position(); }
  Compression compression() const override { return Compression::kNone; }
  std::uint64_t MemoryBytes() const override { return sizeof(*this); }

 private:
  Input input_;
};

// What gzip and zstd share: compressed bytes come through a buffer of kInputBytes.
class ArchiveStream : public ByteStream {
 public:
  ArchiveStream(Input input, HugeBuffer buffer)
      : input_(std::move(input)), buffer_(std::move(buffer)) {}

  Result<Piece> Read(std::span<std::byte> buffer) override {
    std::size_t filled = 0;
    while (filled < buffer.size() && !ended_) {
      if (at_ == end_) {
        TERRACE_ASSIGN_OR_RETURN(end_, input_.Read(buffer_.span()));
        at_ = 0;
        at_end_of_file_ = end_ == 0;
      }
      TERRACE_ASSIGN_OR_RETURN(const std::size_t made, Decompress(buffer.subspan(filled)));
      filled += made;
    }
    const Piece piece{offset_, buffer.first(filled)};
    offset_ += filled;
    return piece;
  }
  std::uint64_t file_bytes() const override { return input_.position() - (end_ - at_); }

 protected:
  // Takes from pending() with Take(), gives bytes to `out`, returns how many. Called with nothing
  // pending only at the end of the file; says End() when that is a legal place to end.
  virtual Result<std::size_t> Decompress(std::span<std::byte> out) = 0;

  std::span<const std::byte> pending() const { return buffer_.span().subspan(at_, end_ - at_); }
  void Take(std::size_t bytes) { at_ += bytes; }
  void End() { ended_ = true; }
  bool at_end_of_file() const { return at_end_of_file_; }
  std::uint64_t input_buffer_bytes() const { return buffer_.size(); }
  Status Damaged(const std::string& what) const {
    return CorruptionError(input_.info().path + ": byte " + std::to_string(file_bytes()) +
                           " of the archive (byte " + std::to_string(offset_) +
                           " or later of its contents): " + what);
  }
  Status Truncated() const {
    return Damaged("the archive ends too early; it was not written or copied whole");
  }

 private:
  Input input_;
  const HugeBuffer buffer_;
  std::size_t at_ = 0;
  std::size_t end_ = 0;
  std::uint64_t offset_ = 0;
  bool at_end_of_file_ = false;
  bool ended_ = false;
};

class GzipStream final : public ArchiveStream {
 public:
  using ArchiveStream::ArchiveStream;
  ~GzipStream() override {
    if (open_) inflateEnd(&z_);
  }
  Status Start() {
    // 15: the largest window; 16: gzip's header and checksum.
    if (inflateInit2(&z_, 15 + 16) != Z_OK) return OutOfMemoryError("zlib found no memory");
    open_ = true;
    return OkStatus();
  }
  Compression compression() const override { return Compression::kGzip; }
  // 40 KiB is what zlib documents for inflate.
  std::uint64_t MemoryBytes() const override { return input_buffer_bytes() + (40 << 10); }

 protected:
  Result<std::size_t> Decompress(std::span<std::byte> out) override {
    const std::span<const std::byte> in = pending();
    if (between_members_) {
      if (in.empty()) {
        End();
        return std::size_t{0};
      }
      // Tapes and block copies pad archives with zeros; gzip accepts them too.
      if (in[0] == std::byte{0}) {
        std::size_t zeros = 0;
        while (zeros < in.size() && in[zeros] == std::byte{0}) ++zeros;
        Take(zeros);
        padded_ = true;
        return std::size_t{0};
      }
      if (padded_ || in[0] != std::byte{0x1f})
        return Damaged("bytes that are no gzip member follow the end of one");
      inflateReset(&z_);
      between_members_ = false;
    } else if (in.empty()) {
      return Truncated();
    }
    z_.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(in.data()));
    z_.avail_in = static_cast<uInt>(in.size());
    z_.next_out = reinterpret_cast<Bytef*>(out.data());
    z_.avail_out = static_cast<uInt>(out.size());
    const int code = inflate(&z_, Z_NO_FLUSH);
    Take(in.size() - z_.avail_in);
    if (code == Z_STREAM_END) {
      between_members_ = true;
    } else if (code == Z_MEM_ERROR) {
      return OutOfMemoryError("zlib found no memory");
    } else if (code != Z_OK && code != Z_BUF_ERROR) {
      return Damaged(std::string("gzip: ") + (z_.msg != nullptr ? z_.msg : "damaged data"));
    }
    return out.size() - z_.avail_out;
  }

 private:
  z_stream z_ = {};
  bool open_ = false;
  bool between_members_ = false;
  bool padded_ = false;
};

class ZstdStream final : public ArchiveStream {
 public:
  using ArchiveStream::ArchiveStream;
  ~ZstdStream() override { ZSTD_freeDStream(z_); }
  // `head`: the first bytes of the file, from which the window of its first frame is read.
  Status Start(std::span<const std::byte> head) {
    z_ = ZSTD_createDStream();
    if (z_ == nullptr) return OutOfMemoryError("zstd found no memory");
    window_log_ = std::clamp(WindowLog(head), kUsualWindowLog, kLargestWindowLog);
    const std::size_t code = ZSTD_DCtx_setParameter(z_, ZSTD_d_windowLogMax, window_log_);
    if (ZSTD_isError(code)) return InternalError(std::string("zstd: ") + ZSTD_getErrorName(code));
    return OkStatus();
  }
  Compression compression() const override { return Compression::kZstd; }
  std::uint64_t MemoryBytes() const override {
    // The window, two blocks of at most 128 KiB, and the decoder's tables.
    return input_buffer_bytes() + (std::uint64_t{1} << window_log_) + (512 << 10);
  }

 protected:
  Result<std::size_t> Decompress(std::span<std::byte> out) override {
    const std::span<const std::byte> in = pending();
    if (in.empty() && between_frames_ && at_end_of_file()) {
      End();
      return std::size_t{0};
    }
    ZSTD_inBuffer input{in.data(), in.size(), 0};
    ZSTD_outBuffer output{out.data(), out.size(), 0};
    const std::size_t code = ZSTD_decompressStream(z_, &output, &input);
    Take(input.pos);
    if (ZSTD_isError(code)) {
      std::string what = std::string("zstd: ") + ZSTD_getErrorName(code);
      if (ZSTD_getErrorCode(code) == ZSTD_error_frameParameter_windowTooLarge)
        what += "; compress it again without --long or --ultra";
      return Damaged(what);
    }
    between_frames_ = code == 0;
    // With no input left the decoder may still hold bytes that did not fit before.
    if (in.empty() && output.pos == 0 && !between_frames_) return Truncated();
    return output.pos;
  }

 private:
  // Of the first frame with data (RFC 8878, 3.1.1.1): its window descriptor's, or that of its
  // content, which is the window of a single segment. 0: `head` does not say.
  static int WindowLog(std::span<const std::byte> head) {
    constexpr std::size_t kSkippableHead = 8;  // Magic number and length of the rest.
    while (head.size() >= kSkippableHead && head[0] != std::byte{0x28}) {
      std::uint32_t rest;
      std::memcpy(&rest, head.data() + 4, sizeof rest);
      if (rest > head.size() - kSkippableHead) return 0;
      head = head.subspan(kSkippableHead + rest);
    }
    if (head.size() < 6) return 0;
    const unsigned descriptor = std::to_integer<unsigned>(head[4]);
    if ((descriptor & 0x20) == 0) {
      const unsigned window = std::to_integer<unsigned>(head[5]);
      return static_cast<int>((window >> 3) + 10 + ((window & 7) != 0 ? 1 : 0));
    }
    const unsigned long long content = ZSTD_getFrameContentSize(head.data(), head.size());
    if (content == ZSTD_CONTENTSIZE_ERROR || content == ZSTD_CONTENTSIZE_UNKNOWN) return 0;
    return content <= 1 ? 0 : std::bit_width(content - 1);
  }

  ZSTD_DStream* z_ = nullptr;
  int window_log_ = kUsualWindowLog;
  bool between_frames_ = true;
};

Compression CompressionOf(std::span<const std::byte> head) {
  const auto at = [&](std::size_t i) { return std::to_integer<unsigned>(head[i]); };
  if (head.size() >= 2 && at(0) == 0x1f && at(1) == 0x8b) return Compression::kGzip;
  if (head.size() >= 4 && at(1) == 0xb5 && at(2) == 0x2f && at(3) == 0xfd && at(0) == 0x28)
    return Compression::kZstd;
  // A skippable frame of zstd (pzstd and seekable archives begin with one).
  if (head.size() >= 4 && (at(0) & 0xf0) == 0x50 && at(1) == 0x2a && at(2) == 0x4d && at(3) == 0x18)
    return Compression::kZstd;
  return Compression::kNone;
}

}  // namespace

Result<std::unique_ptr<ByteStream>> OpenByteStream(FileSystem* fs, const InputFile& file,
                                                   std::uint64_t start) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> opened,
                           fs->Open(file.path, OpenMode::kReadDirect));
  Input input(std::move(opened), file);
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(kDirectIoAlignment));
  TERRACE_ASSIGN_OR_RETURN(const std::size_t head_size, input.Read(buffer.span()));
  const std::span<const std::byte> head = buffer.span().first(head_size);
  input.set_position(0);
  const Compression compression = CompressionOf(head);
  if (compression == Compression::kNone)
    return std::unique_ptr<ByteStream>(std::make_unique<PlainStream>(std::move(input), start));
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer input_buffer, HugeBuffer::Allocate(kInputBytes));
  if (compression == Compression::kGzip) {
    auto stream = std::make_unique<GzipStream>(std::move(input), std::move(input_buffer));
    TERRACE_RETURN_IF_ERROR(stream->Start());
    return std::unique_ptr<ByteStream>(std::move(stream));
  }
  auto stream = std::make_unique<ZstdStream>(std::move(input), std::move(input_buffer));
  TERRACE_RETURN_IF_ERROR(stream->Start(head));
  return std::unique_ptr<ByteStream>(std::move(stream));
}

}  // namespace terrace
