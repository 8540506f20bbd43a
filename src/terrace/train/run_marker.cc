#include "terrace/train/run_marker.h"

#include <array>
#include <charconv>
#include <filesystem>
#include <memory>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/rng.h"
#include "terrace/io/framed_file.h"
#include "terrace/io/same_file.h"
#include "terrace/train/json_fields.h"

namespace terrace {
namespace {

constexpr std::string_view kMarkerMagic = "TERRMARK";
constexpr std::uint32_t kMarkerVersion = 2;
constexpr int kMostPid = 1 << 22;  // Of Linux.

std::uint32_t VersionOf(const RunMarker& marker) { return marker.run_folder.empty() ? 1 : 2; }

std::string Encode(const RunMarker& marker) {
  nlohmann::json object = {
      {"format_version", VersionOf(marker)},     {"id", marker.id},
      {"created_micros", marker.created_micros}, {"shards", marker.shards},
      {"ssd_paths", marker.ssd_paths},           {"ssd_folders", marker.ssd_folders}};
  if (!marker.run_folder.empty()) object["run_folder"] = marker.run_folder;
  // Bytes that are no UTF-8 can only come from a working directory's name; what replaces them
  // makes the folder unfindable, which its reader reports.
  return object.dump(1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Whether a file RUN of ours is there, whole or damaged.
bool HasMarker(FileSystem* fs, const std::string& folder) {
  const std::string path = JoinPath(folder, kRunMarkerName);
  const Result<FileInfo> info = fs->Stat(path);
  if (!info.ok() || info->is_directory || info->is_special) return false;
  Result<std::unique_ptr<File>> file = fs->Open(path, OpenMode::kRead);
  if (!file.ok()) return false;
  std::array<char, kMarkerMagic.size()> magic = {};
  return ReadFully(file->get(), 0, std::as_writable_bytes(std::span(magic))).ok() &&
         std::string_view(magic.data(), magic.size()) == kMarkerMagic;
}

}  // namespace

Result<RunMarker> ReadRunMarker(FileSystem* fs, const std::string& folder) {
  const std::string path = JoinPath(folder, kRunMarkerName);
  TERRACE_ASSIGN_OR_RETURN(const std::string payload,
                           ReadFramedFile(fs, path, kMarkerMagic, kMarkerVersion));
  const nlohmann::json object = nlohmann::json::parse(payload, nullptr, false);
  JsonFields fields(object);
  RunMarker marker;
  fields.Read("id", &marker.id);
  fields.Read("created_micros", &marker.created_micros);
  fields.Read("shards", &marker.shards);
  for (const nlohmann::json& item : fields.Array("ssd_paths")) {
    if (!item.is_string()) return CorruptionError(path + ": field 'ssd_paths' is not text");
    marker.ssd_paths.push_back(item.get<std::string>());
  }
  for (const nlohmann::json& item : fields.Array("ssd_folders")) {
    if (!item.is_string()) return CorruptionError(path + ": field 'ssd_folders' is not text");
    marker.ssd_folders.push_back(item.get<std::string>());
  }
  if (object.contains("run_folder")) fields.Read("run_folder", &marker.run_folder);
  if (!fields.status().ok()) return fields.status().WithContext(path);
  if (marker.ssd_folders.size() != marker.ssd_paths.size()) {
    return CorruptionError(path + ": field 'ssd_folders' has another length than 'ssd_paths'");
  }
  return marker;
}

Status WriteRunMarker(FileSystem* fs, const std::string& folder, const RunMarker& marker) {
  const std::string payload = Encode(marker);
  return WriteFramedFile(fs, JoinPath(folder, kRunMarkerName), kMarkerMagic, VersionOf(marker),
                         std::as_bytes(std::span(payload)))
      .status();
}

Status RefuseInsideRun(FileSystem* fs, const std::string& path) {
  std::error_code error;
  std::filesystem::path absolute = std::filesystem::absolute(path, error);
  if (error) absolute = path;
  std::filesystem::path folder = RealPath(absolute.parent_path().string());
  for (;; folder = folder.parent_path()) {
    if (HasMarker(fs, folder.string())) {
      const Result<RunMarker> marker = ReadRunMarker(fs, folder.string());
      bool has_rows = false;
      for (std::size_t i = 0; marker.ok() && i < marker->ssd_folders.size(); ++i) {
        has_rows |= RealPath(marker->ssd_folders[i]) == folder.string();
      }
      return InvalidArgumentError(
          has_rows
              ? fmt::format("'{}' would lie in '{}' among the rows of the run '{}', and could "
                            "replace a file of it; name a file outside",
                            path, folder.string(),
                            marker->run_folder.empty() ? marker->id : marker->run_folder)
              : fmt::format("'{}' would lie in the folder of the run '{}', and could replace a "
                            "file of it; name a file outside",
                            path, folder.string()));
    }
    if (!folder.has_relative_path()) return OkStatus();
  }
}

std::string NewRunId(const std::string& run_folder, std::uint64_t created_micros, int pid) {
  const std::uint64_t begin = HashCombine(HashName(run_folder), created_micros);
  return fmt::format("{:016x}", HashCombine(begin, static_cast<std::uint64_t>(pid)));
}

bool BeganIn(const RunMarker& marker, const std::string& run_folder) {
  std::uint64_t id = 0;
  const char* const end = marker.id.data() + marker.id.size();
  const auto [rest, error] = std::from_chars(marker.id.data(), end, id, 16);
  if (error != std::errc() || rest != end) return false;
  const std::uint64_t begin = HashCombine(HashName(run_folder), marker.created_micros);
  // The process that began it is not known: a few milliseconds for all that there can be.
  for (std::uint64_t pid = 1; pid <= kMostPid; ++pid) {
    if (HashCombine(begin, pid) == id) return true;
  }
  return false;
}

}  // namespace terrace
