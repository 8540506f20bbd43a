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
inline constexpr std::uint32_t kManifestVersion = 2;  // 1: of a store with an index by key.

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
  // Of a store with an index by group, whose row_bytes is that of a block: how many groups, the
  // rows in all blocks, and the length of one. 0 groups: an index by key.
  std::uint64_t groups = 0;
  std::uint64_t rows_in_blocks = 0;
  std::uint32_t block_row_bytes = 0;

  std::uint32_t version() const { return groups > 0 ? 2 : 1; }
};

std::string ManifestFileName(std::uint64_t id);
// Whether a store gives its files such names: a parameter file, a manifest, one in the making.
bool IsStoreFileName(std::string_view name);
std::string EncodeManifest(const Manifest& manifest);
// kCorruption when the bytes are no manifest; `path` is for messages.
Result<Manifest> DecodeManifest(std::string_view payload, const std::string& path);
// Manifest-<id> as `reference` names it, of whatever store.
Result<Manifest> ReadManifest(FileSystem* fs, const std::string& directory, std::uint64_t id,
                              const FileDigest& digest);
// Reads manifest-<id> and checks that it is `reference` and belongs to the layout's store.
Result<Manifest> ReadManifest(FileSystem* fs, const std::string& directory, std::uint64_t id,
                              const FileDigest& digest, const RecordLayout& layout);

}  // namespace terrace
