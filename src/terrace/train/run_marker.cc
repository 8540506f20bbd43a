#include "terrace/train/run_marker.h"

#include <span>

#include "terrace/io/framed_file.h"
#include "terrace/train/json_fields.h"

namespace terrace {
namespace {

constexpr std::string_view kMarkerMagic = "TERRMARK";
constexpr std::uint32_t kMarkerVersion = 1;

std::string Encode(const RunMarker& marker) {
  const nlohmann::json object = {
      {"format_version", kMarkerVersion},        {"id", marker.id},
      {"created_micros", marker.created_micros}, {"shards", marker.shards},
      {"ssd_paths", marker.ssd_paths},           {"ssd_folders", marker.ssd_folders}};
  // Bytes that are no UTF-8 can only come from a working directory's name; what replaces them
  // makes the folder unfindable, which its reader reports.
  return object.dump(1, ' ', false, nlohmann::json::error_handler_t::replace);
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
  if (!fields.status().ok()) return fields.status().WithContext(path);
  if (marker.ssd_folders.size() != marker.ssd_paths.size()) {
    return CorruptionError(path + ": field 'ssd_folders' has another length than 'ssd_paths'");
  }
  return marker;
}

Status WriteRunMarker(FileSystem* fs, const std::string& folder, const RunMarker& marker) {
  const std::string payload = Encode(marker);
  return WriteFramedFile(fs, JoinPath(folder, kRunMarkerName), kMarkerMagic, kMarkerVersion,
                         std::as_bytes(std::span(payload)))
      .status();
}

}  // namespace terrace
