#include "terrace/data/file_list.h"

#include <fnmatch.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "terrace/base/rng.h"

namespace terrace {
namespace {

bool IsGlob(std::string_view text) { return text.find_first_of("*?[") != std::string_view::npos; }

std::vector<std::string> SplitPath(std::string_view path) {
  std::vector<std::string> parts;
  while (!path.empty()) {
    const std::size_t at = path.find('/');
    const std::string_view part = path.substr(0, at);
    if (!part.empty()) parts.emplace_back(part);
    if (at == std::string_view::npos) break;
    path.remove_prefix(at + 1);
  }
  return parts;
}

std::string Extend(const std::string& folder, const std::string& name) {
  return folder.empty() || folder == "/" ? folder + name : folder + "/" + name;
}

// What Stat says of `path`, as an input.
Result<InputFile> InputOf(const std::string& path, const Result<FileInfo>& info) {
  if (info.status().code() == StatusCode::kNotFound) {
    return NotFoundError(path + ": no such file; correct the path");
  }
  TERRACE_RETURN_IF_ERROR(info.status());
  if (info->is_directory) {
    return InvalidArgumentError(path + " is a folder; for the files in it say " +
                                JoinPath(path, "*"));
  }
  if (info->is_special) {
    return InvalidArgumentError(path +
                                " is a device or a pipe, which cannot be read twice; give a file");
  }
  return InputFile{path, info->size};
}

// Appends the files that match parts[at..] inside `folder` ("" is the current one).
Status Match(FileSystem* fs, const std::string& folder, const std::vector<std::string>& parts,
             std::size_t at, std::vector<InputFile>* files) {
  const bool last = at + 1 == parts.size();
  if (!IsGlob(parts[at]) && !last)
    return Match(fs, Extend(folder, parts[at]), parts, at + 1, files);
  // No match where another part of the pattern supposed a folder.
  const std::string there = folder.empty() ? "." : folder;
  const Result<FileInfo> supposed = fs->Stat(there);
  if (supposed.status().code() == StatusCode::kNotFound) return OkStatus();
  if (supposed.ok() && !supposed->is_directory) return OkStatus();
  Result<std::vector<FileInfo>> listed = fs->List(there);
  if (listed.status().code() == StatusCode::kNotFound) return OkStatus();
  TERRACE_RETURN_IF_ERROR(listed.status());
  for (const FileInfo& info : *listed) {
    // As in a shell, a leading dot is matched only by a dot.
    if (fnmatch(parts[at].c_str(), info.name.c_str(), FNM_PERIOD) != 0) continue;
    const std::string path = Extend(folder, info.name);
    // Links are followed, as a shell does; List does not say where they lead.
    const Result<FileInfo> named = fs->Stat(path);
    if (!named.ok() && named.status().code() != StatusCode::kNotFound) return named.status();
    const bool is_folder = named.ok() && named->is_directory;
    if (last && !is_folder) {
      TERRACE_ASSIGN_OR_RETURN(InputFile file, InputOf(path, named));
      files->push_back(std::move(file));
    } else if (!last && is_folder) {
      TERRACE_RETURN_IF_ERROR(Match(fs, path, parts, at + 1, files));
    }
  }
  return OkStatus();
}

}  // namespace

Result<std::vector<InputFile>> ExpandFiles(FileSystem* fs,
                                           const std::vector<std::string>& patterns) {
  if (patterns.empty())
    return InvalidArgumentError("no input files are given; name files or globs such as logs/*.tsv");
  std::vector<InputFile> files;
  for (const std::string& pattern : patterns) {
    const Result<FileInfo> info = fs->Stat(pattern);
    if (info.ok() || !IsGlob(pattern)) {
      TERRACE_ASSIGN_OR_RETURN(InputFile file, InputOf(pattern, info));
      files.push_back(std::move(file));
      continue;
    }
    std::vector<InputFile> matched;
    TERRACE_RETURN_IF_ERROR(
        Match(fs, pattern.starts_with('/') ? "/" : "", SplitPath(pattern), 0, &matched));
    if (matched.empty()) return NotFoundError("no file matches " + pattern + "; correct the glob");
    std::sort(matched.begin(), matched.end(),
              [](const InputFile& a, const InputFile& b) { return a.path < b.path; });
    files.insert(files.end(), std::make_move_iterator(matched.begin()),
                 std::make_move_iterator(matched.end()));
  }
  return files;
}

std::vector<std::uint32_t> EpochOrder(std::uint32_t count, bool shuffle, std::uint64_t seed,
                                      std::uint64_t epoch, std::uint64_t window) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (!shuffle) return order;
  // Fisher and Yates.
  Rng rng(HashCombine(HashCombine(seed, epoch), window));
  for (std::uint32_t i = count; i > 1; --i)
    std::swap(order[i - 1], order[static_cast<std::size_t>(rng.Below(i))]);
  return order;
}

}  // namespace terrace
