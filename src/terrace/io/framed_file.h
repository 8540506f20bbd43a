// Framed file: a small file with magic, format version, length and checksum around one payload
// (docs/formats/framed.md). Run markers, manifests, checkpoints and dense state are framed files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"

namespace terrace {

// What one file names another by.
struct FileDigest {
  std::uint64_t size = 0;      // Bytes.
  std::uint64_t checksum = 0;  // XXH3-64 of the whole file.
};

// Temporary file, sync, rename, sync of the folder. `magic` is 8 characters, `version` starts at 1.
// The state after an error: as WriteFileAtomically.
Result<FileDigest> WriteFramedFile(FileSystem* fs, const std::string& path, std::string_view magic,
                                   std::uint32_t version, std::span<const std::byte> payload);
// The payload. kNotFound; kCorruption: not this kind of file, torn, or a flipped bit, with path and
// offset; kInvalidArgument: written by a newer version of the program. `expected`, if given, is
// compared as well. What seems corrupt is read once more, past the page cache, before it is judged:
// a read may err where the disk does not. A warning tells of one that did.
Result<std::string> ReadFramedFile(FileSystem* fs, const std::string& path, std::string_view magic,
                                   std::uint32_t newest_version,
                                   const FileDigest* expected = nullptr);

// The same without a file system, for what carries frames in another way. Decode: a view into
// `bytes`; `path` is for the message.
std::string EncodeFramed(std::string_view magic, std::uint32_t version,
                         std::span<const std::byte> payload);
Result<std::string_view> DecodeFramed(std::string_view bytes, const std::string& path,
                                      std::string_view magic, std::uint32_t newest_version);

// For a payload that is too large to be held twice: `file` has kFrameHeaderBytes of room for the
// header and then the payload.
inline constexpr std::size_t kFrameHeaderBytes = 64;
// Fills the header in, so that `file` is the whole file.
void FrameInPlace(std::string_view magic, std::uint32_t version, std::span<std::byte> file);
// Reads a file of just file.size() bytes and checks it as ReadFramedFile does, with its errors.
Status ReadFramedFileInto(FileSystem* fs, const std::string& path, std::string_view magic,
                          std::uint32_t newest_version, const FileDigest& expected,
                          std::span<std::byte> file);

std::uint64_t Checksum64(std::span<const std::byte> data);  // XXH3-64.

}  // namespace terrace
