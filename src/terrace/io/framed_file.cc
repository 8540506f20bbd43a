#include "terrace/io/framed_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "terrace/base/check.h"
#include "terrace/base/log.h"
#include "terrace/base/memory.h"

namespace terrace {
namespace {

static_assert(std::endian::native == std::endian::little,
              "formats are little-endian and structs are written as they lie in memory");

struct FrameHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint64_t payload_bytes;
  std::uint64_t payload_checksum;
  std::uint8_t reserved[24];
  std::uint64_t header_checksum;  // Of the bytes before it.
};
static_assert(sizeof(FrameHeader) == 64);
static_assert(offsetof(FrameHeader, version) == 8);
static_assert(offsetof(FrameHeader, header_bytes) == 12);
static_assert(offsetof(FrameHeader, payload_bytes) == 16);
static_assert(offsetof(FrameHeader, payload_checksum) == 24);
static_assert(offsetof(FrameHeader, reserved) == 32);
static_assert(offsetof(FrameHeader, header_checksum) == 56);
static_assert(std::has_unique_object_representations_v<FrameHeader>);

std::uint64_t HeaderChecksum(const FrameHeader& header) {
  return Checksum64(
      std::as_bytes(std::span(&header, 1)).first(offsetof(FrameHeader, header_checksum)));
}

// What the file holds, fit for a message whatever bytes it has.
std::string Printable(std::string_view text) {
  std::string result;
  for (char c : text) result += c >= ' ' && c <= '~' ? c : '?';
  return result;
}

Status CheckHeader(const FrameHeader& header, std::uint64_t file_bytes, const std::string& path,
                   std::string_view magic, std::uint32_t newest_version) {
  std::string_view found(header.magic, sizeof(header.magic));
  if (found != magic) {
    return CorruptionError(fmt::format("'{}' is no {} file: it starts with '{}' at byte 0", path,
                                       magic, Printable(found)));
  }
  if (HeaderChecksum(header) != header.header_checksum) {
    return CorruptionError(
        fmt::format("'{}': the header (bytes 0 to 63) fails its checksum", path));
  }
  if (header.version > newest_version) {
    return InvalidArgumentError(fmt::format(
        "'{}' has format version {}, written by a newer terrace; this one reads up to version {}: "
        "use the newer program",
        path, header.version, newest_version));
  }
  const std::uint8_t zero[sizeof(header.reserved)] = {};
  if (header.version == 0 || header.header_bytes != sizeof(FrameHeader) ||
      std::memcmp(header.reserved, zero, sizeof(zero)) != 0) {
    return CorruptionError(fmt::format(
        "'{}': the header has version {}, length {} or reserved bytes that no terrace writes", path,
        header.version, header.header_bytes));
  }
  if (header.payload_bytes != file_bytes - sizeof(FrameHeader)) {
    return CorruptionError(fmt::format("'{}' has {} bytes and should have {} + {}: it was torn",
                                       path, file_bytes, sizeof(FrameHeader),
                                       header.payload_bytes));
  }
  return OkStatus();
}

FrameHeader MakeHeader(std::string_view magic, std::uint32_t version,
                       std::span<const std::byte> payload) {
  FrameHeader header = {};
  TERRACE_CHECK(magic.size() == sizeof(header.magic));
  TERRACE_CHECK(version >= 1);
  std::memcpy(header.magic, magic.data(), sizeof(header.magic));
  header.version = version;
  header.header_bytes = sizeof(header);
  header.payload_bytes = payload.size();
  header.payload_checksum = Checksum64(payload);
  header.header_checksum = HeaderChecksum(header);
  return header;
}

// A sound file against what names it.
Status CheckDigest(std::span<const std::byte> file, const std::string& path,
                   const FileDigest& expected) {
  const std::uint64_t checksum = Checksum64(file);
  if (file.size() == expected.size && checksum == expected.checksum) return OkStatus();
  return CorruptionError(fmt::format(
      "'{}' is sound but another file than the one named: {} bytes with checksum {:016x}, "
      "expected {} bytes with {:016x}",
      path, file.size(), checksum, expected.size, expected.checksum));
}

// As ReadFully from the start of the file, which may be a direct one.
Status ReadFromStart(File* file, OpenMode mode, std::span<std::byte> target) {
  if (!IsDirect(mode)) return ReadFully(file, 0, target);
  constexpr std::size_t kChunkBytes = std::size_t{1} << 20;
  TERRACE_ASSIGN_OR_RETURN(const HugeBuffer buffer,
                           HugeBuffer::Allocate(std::clamp(
                               AlignUp(target.size(), kDirectIoAlignment),
                               std::uint64_t{kDirectIoAlignment}, std::uint64_t{kChunkBytes})));
  for (std::size_t done = 0; done < target.size();) {
    ReadRequest request;  // What is asked for; the buffer takes whole blocks.
    request.file = file;
    request.offset = done;
    request.buffer = target.subspan(done, std::min(buffer.size(), target.size() - done));
    TERRACE_ASSIGN_OR_RETURN(const std::size_t read, file->ReadAt(done, buffer.span()));
    request.bytes_read = std::min(read, request.buffer.size());
    TERRACE_RETURN_IF_ERROR(CheckWhole(request));
    std::memcpy(request.buffer.data(), buffer.data(), request.bytes_read);
    done += request.bytes_read;
  }
  return OkStatus();
}

Result<std::string> ReadToString(FileSystem* fs, const std::string& path, OpenMode mode) {
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs->Open(path, mode));
  TERRACE_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
  std::string text(size, '\0');
  TERRACE_RETURN_IF_ERROR(ReadFromStart(file.get(), mode, std::as_writable_bytes(std::span(text))));
  return text;
}

Result<std::string> CheckedPayload(std::string bytes, const std::string& path,
                                   std::string_view magic, std::uint32_t newest_version,
                                   const FileDigest* expected) {
  // First, so that the file's own faults get the clearer message.
  TERRACE_ASSIGN_OR_RETURN(std::string_view payload,
                           DecodeFramed(bytes, path, magic, newest_version));
  if (expected != nullptr) {
    TERRACE_RETURN_IF_ERROR(CheckDigest(std::as_bytes(std::span(bytes)), path, *expected));
  }
  bytes.erase(0, bytes.size() - payload.size());
  return bytes;
}

void WarnOfWrongRead(const std::string& path, const Status& first) {
  LogText(LogLevel::kWarning,
          fmt::format("'{}' was read wrongly once and is whole when read again: its disk or the "
                      "way there errs now and then, and should be looked at ({})",
                      path, first.message()));
}

}  // namespace

std::string EncodeFramed(std::string_view magic, std::uint32_t version,
                         std::span<const std::byte> payload) {
  const FrameHeader header = MakeHeader(magic, version, payload);
  std::string bytes;
  bytes.reserve(sizeof(header) + payload.size());
  bytes.append(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(reinterpret_cast<const char*>(payload.data()), payload.size());
  return bytes;
}

Result<std::string_view> DecodeFramed(std::string_view bytes, const std::string& path,
                                      std::string_view magic, std::uint32_t newest_version) {
  TERRACE_CHECK(magic.size() == sizeof(FrameHeader::magic));
  FrameHeader header;
  if (bytes.size() < sizeof(header)) {
    return CorruptionError(fmt::format("'{}' ends at byte {}, inside the header of {} bytes", path,
                                       bytes.size(), sizeof(header)));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  TERRACE_RETURN_IF_ERROR(CheckHeader(header, bytes.size(), path, magic, newest_version));
  std::string_view payload = bytes.substr(sizeof(header));
  if (Checksum64(std::as_bytes(std::span(payload))) != header.payload_checksum) {
    return CorruptionError(fmt::format("'{}': the payload (bytes {} to {}) fails its checksum",
                                       path, sizeof(header), bytes.size() - 1));
  }
  return payload;
}

Result<FileDigest> WriteFramedFile(FileSystem* fs, const std::string& path, std::string_view magic,
                                   std::uint32_t version, std::span<const std::byte> payload) {
  const std::string bytes = EncodeFramed(magic, version, payload);
  const std::span<const std::byte> view = std::as_bytes(std::span(bytes));
  TERRACE_RETURN_IF_ERROR(WriteFileAtomically(fs, path, view));
  return FileDigest{bytes.size(), Checksum64(view)};
}

Result<std::string> ReadFramedFile(FileSystem* fs, const std::string& path, std::string_view magic,
                                   std::uint32_t newest_version, const FileDigest* expected) {
  const auto checked = [&](Result<std::string> bytes) -> Result<std::string> {
    if (!bytes.ok()) return bytes;
    return CheckedPayload(std::move(bytes).value(), path, magic, newest_version, expected);
  };
  Result<std::string> payload = checked(ReadToString(fs, path, OpenMode::kRead));
  if (payload.status().code() != StatusCode::kCorruption) return payload;
  Result<std::string> again = checked(ReadToString(fs, path, OpenMode::kReadDirect));
  if (again.ok()) WarnOfWrongRead(path, payload.status());
  return again;
}

void FrameInPlace(std::string_view magic, std::uint32_t version, std::span<std::byte> file) {
  static_assert(sizeof(FrameHeader) == kFrameHeaderBytes);
  TERRACE_CHECK(file.size() >= kFrameHeaderBytes);
  const FrameHeader header = MakeHeader(magic, version, file.subspan(kFrameHeaderBytes));
  std::memcpy(file.data(), &header, sizeof(header));
}

namespace {

Status ReadIntoOnce(FileSystem* fs, const std::string& path, std::string_view magic,
                    std::uint32_t newest_version, const FileDigest& expected,
                    std::span<std::byte> file, OpenMode mode) {
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> opened, fs->Open(path, mode));
  TERRACE_ASSIGN_OR_RETURN(const std::uint64_t size, opened->Size());
  FrameHeader header;
  if (size >= sizeof(header)) {  // First, so that a newer version is told from a broken file.
    TERRACE_RETURN_IF_ERROR(
        ReadFromStart(opened.get(), mode, std::as_writable_bytes(std::span(&header, 1))));
    TERRACE_RETURN_IF_ERROR(CheckHeader(header, size, path, magic, newest_version));
  }
  if (size != file.size()) {
    return CorruptionError(
        fmt::format("'{}' has {} bytes and should have {}: it was torn, or is "
                    "another file",
                    path, size, file.size()));
  }
  TERRACE_RETURN_IF_ERROR(ReadFromStart(opened.get(), mode, file));
  const std::string_view bytes(reinterpret_cast<const char*>(file.data()), file.size());
  TERRACE_RETURN_IF_ERROR(DecodeFramed(bytes, path, magic, newest_version).status());
  return CheckDigest(file, path, expected);
}

}  // namespace

Status ReadFramedFileInto(FileSystem* fs, const std::string& path, std::string_view magic,
                          std::uint32_t newest_version, const FileDigest& expected,
                          std::span<std::byte> file) {
  const auto read = [&](OpenMode mode) {
    return ReadIntoOnce(fs, path, magic, newest_version, expected, file, mode);
  };
  const Status first = read(OpenMode::kRead);
  if (first.code() != StatusCode::kCorruption) return first;
  const Status again = read(OpenMode::kReadDirect);
  if (again.ok()) WarnOfWrongRead(path, first);
  return again;
}

}  // namespace terrace
