#include "terrace/io/pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include <fmt/format.h>

#include "terrace/base/units.h"

namespace terrace {
namespace {

Result<std::string> ReadToEnd(int fd, const std::string& path, std::uint64_t most_bytes) {
  constexpr std::size_t kPieceBytes = std::size_t{1} << 16;
  std::string text;
  for (;;) {
    const std::size_t before = text.size();
    // One byte more than there may be tells that there is more.
    text.resize(before + std::min<std::uint64_t>(kPieceBytes, most_bytes + 1 - before));
    ssize_t n = 0;
    do {
      n = read(fd, text.data() + before, text.size() - before);
    } while (n < 0 && errno == EINTR);
    if (n < 0) return ErrnoError(errno, "reading", path);
    text.resize(before + static_cast<std::size_t>(n));
    if (n == 0) return text;
    if (text.size() > most_bytes) {
      return InvalidArgumentError(
          fmt::format("'{}' gives more than {}", path, FormatBytes(most_bytes)));
    }
  }
}

}  // namespace

Result<std::string> ReadPipe(const std::string& path, std::uint64_t most_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoError(errno, "opening", path);
  Result<std::string> text = ReadToEnd(fd, path, most_bytes);
  close(fd);
  return text;
}

}  // namespace terrace
