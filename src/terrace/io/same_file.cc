#include "terrace/io/same_file.h"

#include <sys/stat.h>

namespace terrace {

bool IsSameFile(const std::string& a, const std::string& b) {
  struct stat info_a = {}, info_b = {};
  if (stat(a.c_str(), &info_a) != 0 || stat(b.c_str(), &info_b) != 0) return false;
  return info_a.st_dev == info_b.st_dev && info_a.st_ino == info_b.st_ino;
}

}  // namespace terrace
