// Manifest: the parameter files that one commit point of a store consists of
// (docs/formats/manifest.md), a framed file. Threads: a value.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/io/framed_file.h"
#include "terrace/store/parameter_file.h"

namespace terrace {

inline constexpr std::string_view kManifestMagic = "TERRMANI";
inline constexpr std::uint32_t kManifestVersion = 1;

struct Manifest {
  struct File {
    std::uint64_t id = 0;
    std::uint64_t bytes = 0;
    std::uint64_t rows = 0;
    std::uint64_t footer_checksum = 0;
  };
  std::uint64_t id = 0;
  std::string table;
  std::uint32_t shard = 0;
  std::uint32_t row_bytes = 0;
  std::uint64_t sequence = 0;      // Greatest that was given out.
  std::uint64_t next_file_id = 1;  // Greater than any that was given out.
  std::vector<File> files;         // By id, ascending.
};

std::string ManifestFileName(std::uint64_t id);
std::string EncodeManifest(const Manifest& manifest);
// kCorruption when the bytes are no manifest; `path` is for messages.
Result<Manifest> DecodeManifest(std::string_view payload, const std::string& path);
// Reads manifest-<id> and checks that it is `reference` and belongs to the layout's store.
Result<Manifest> ReadManifest(FileSystem* fs, const std::string& directory, std::uint64_t id,
                              const FileDigest& digest, const RecordLayout& layout);

}  // namespace terrace
