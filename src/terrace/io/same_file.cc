#include "terrace/io/same_file.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <memory>

namespace terrace {
namespace {

// Empty: errno says why.
std::string Resolve(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> place(realpath(path.c_str(), nullptr),
                                                          &std::free);
  return place == nullptr ? std::string() : std::string(place.get());
}

}  // namespace

Result<std::string> FollowLinks(const std::string& path) {
  struct stat info = {};
  if (lstat(path.c_str(), &info) != 0 || !S_ISLNK(info.st_mode)) return path;
  std::string place = Resolve(path);
  if (place.empty()) return ErrnoError(errno, "following the link", path);
  return place;
}

std::string RealPath(const std::string& path) {
  std::string place = Resolve(path);
  return place.empty() ? path : place;
}

bool IsSameFile(const std::string& a, const std::string& b) {
  struct stat info_a = {}, info_b = {};
  if (stat(a.c_str(), &info_a) != 0 || stat(b.c_str(), &info_b) != 0) return false;
  return info_a.st_dev == info_b.st_dev && info_a.st_ino == info_b.st_ino;
}

}  // namespace terrace
