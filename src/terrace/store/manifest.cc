#include "terrace/store/manifest.h"

#include <cstring>

#include <fmt/format.h>

#include "terrace/store/group_directory.h"

namespace terrace {
namespace {

// Longer names are refused by the job file; a manifest that says more is no manifest.
constexpr std::uint32_t kMaxTableNameBytes = 4096;

class Encoder {
 public:
  template <typename T>
  void Number(T value) {
    static_assert(std::is_unsigned_v<T>);
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out_.append(bytes, sizeof value);
  }
  void Text(std::string_view text) {
    Number(static_cast<std::uint32_t>(text.size()));
    out_.append(text);
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

class Decoder {
 public:
  explicit Decoder(std::string_view data) : data_(data) {}
  template <typename T>
  bool Number(T* value) {
    if (data_.size() < sizeof *value) return false;
    std::memcpy(value, data_.data(), sizeof *value);
    data_.remove_prefix(sizeof *value);
    return true;
  }
  bool Text(std::string* text, std::uint32_t most) {
    std::uint32_t size;
    if (!Number(&size) || size > most || size > data_.size()) return false;
    text->assign(data_.substr(0, size));
    data_.remove_prefix(size);
    return true;
  }
  std::size_t left() const { return data_.size(); }

 private:
  std::string_view data_;
};

constexpr std::size_t kFileEntryBytes = 32;
constexpr std::size_t kGroupsBytes = 20;  // Behind the files, from version 2 on.

}  // namespace

std::string ManifestFileName(std::uint64_t id) { return fmt::format("manifest-{:08}", id); }

bool IsStoreFileName(std::string_view name) {
  if (name.ends_with(".tmp")) name.remove_suffix(4);
  for (const std::string_view prefix : {"rows-", "manifest-"}) {
    if (!name.starts_with(prefix)) continue;
    const std::string_view id = name.substr(prefix.size());
    return !id.empty() && id.find_first_not_of("0123456789") == std::string_view::npos;
  }
  return false;
}

std::string EncodeManifest(const Manifest& manifest) {
  Encoder out;
  out.Number(manifest.id);
  out.Text(manifest.table);
  out.Number(manifest.shard);
  out.Number(manifest.row_bytes);
  out.Number(manifest.sequence);
  out.Number(manifest.next_file_id);
  out.Number(static_cast<std::uint64_t>(manifest.files.size()));
  for (const Manifest::File& file : manifest.files) {
    out.Number(file.id);
    out.Number(file.bytes);
    out.Number(file.rows);
    out.Number(file.footer_checksum);
  }
  if (manifest.groups > 0) {
    out.Number(manifest.groups);
    out.Number(manifest.rows_in_blocks);
    out.Number(manifest.block_row_bytes);
  }
  return out.Take();
}

Result<Manifest> DecodeManifest(std::string_view payload, const std::string& path) {
  Manifest manifest;
  Decoder in(payload);
  std::uint64_t files;
  const auto has_files = [&](std::size_t behind) {
    return in.left() >= behind && (in.left() - behind) % kFileEntryBytes == 0 &&
           (in.left() - behind) / kFileEntryBytes == files;
  };
  if (!in.Number(&manifest.id) || !in.Text(&manifest.table, kMaxTableNameBytes) ||
      !in.Number(&manifest.shard) || !in.Number(&manifest.row_bytes) ||
      !in.Number(&manifest.sequence) || !in.Number(&manifest.next_file_id) || !in.Number(&files) ||
      !(has_files(0) || has_files(kGroupsBytes)) || manifest.row_bytes == 0 ||
      manifest.row_bytes > kMaxRowBytes || manifest.sequence > kMaxSequence) {
    return CorruptionError(fmt::format("{}: is not a manifest", path));
  }
  manifest.files.resize(files);
  std::uint64_t least_id = 0;
  for (Manifest::File& file : manifest.files) {
    const bool whole = in.Number(&file.id) && in.Number(&file.bytes) && in.Number(&file.rows) &&
                       in.Number(&file.footer_checksum);
    if (!whole || file.id < least_id || file.id >= manifest.next_file_id) {
      return CorruptionError(fmt::format("{}: the files of the manifest are out of order", path));
    }
    least_id = file.id + 1;
  }
  if (in.left() == 0) return manifest;
  if (!in.Number(&manifest.groups) || !in.Number(&manifest.rows_in_blocks) ||
      !in.Number(&manifest.block_row_bytes) || manifest.groups == 0 ||
      manifest.groups > GroupDirectory::kMostGroups) {
    return CorruptionError(fmt::format("{}: the manifest has no number of groups", path));
  }
  return manifest;
}

Result<Manifest> ReadManifest(FileSystem* fs, const std::string& directory, std::uint64_t id,
                              const FileDigest& digest) {
  const std::string path = JoinPath(directory, ManifestFileName(id));
  TERRACE_ASSIGN_OR_RETURN(const std::string payload,
                           ReadFramedFile(fs, path, kManifestMagic, kManifestVersion, &digest));
  TERRACE_ASSIGN_OR_RETURN(Manifest manifest, DecodeManifest(payload, path));
  if (manifest.id != id) {
    return CorruptionError(
        fmt::format("{}: says that it is manifest {}, not {}", path, manifest.id, id));
  }
  return manifest;
}

Result<Manifest> ReadManifest(FileSystem* fs, const std::string& directory, std::uint64_t id,
                              const FileDigest& digest, const RecordLayout& layout) {
  TERRACE_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(fs, directory, id, digest));
  if (manifest.table != layout.table || manifest.shard != layout.shard ||
      manifest.row_bytes != layout.row_bytes) {
    return InvalidArgumentError(fmt::format(
        "{}: is of table '{}', shard {}, rows of {} bytes; table '{}', shard {}, rows of {} bytes "
        "was asked for",
        JoinPath(directory, ManifestFileName(id)), manifest.table, manifest.shard,
        manifest.row_bytes, layout.table, layout.shard, layout.row_bytes));
  }
  return manifest;
}

}  // namespace terrace
