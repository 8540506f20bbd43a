#include "terrace/base/status.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

namespace terrace {

void CheckFailed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "terrace: internal error: %s is false at %s:%d. Please report this line.\n",
               expression, file, line);
  std::fflush(stderr);
  std::abort();
}

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kNotFound:
      return "not found";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kCorruption:
      return "corruption";
    case StatusCode::kIo:
      return "I/O error";
    case StatusCode::kUnavailable:
      return "unavailable";
    case StatusCode::kDeadline:
      return "deadline";
    case StatusCode::kAborted:
      return "aborted";
    case StatusCode::kInternal:
      return "internal error";
    case StatusCode::kOutOfMemory:
      return "out of memory";
    case StatusCode::kOutOfRoom:
      return "out of room";
  }
  return "unknown";
}

std::string Status::ToString() const {
  return ok() ? "ok" : fmt::format("{}: {}", StatusCodeName(code_), message_);
}

Status Status::WithContext(std::string_view what) const {
  if (ok()) return *this;
  return Status(code_, fmt::format("{}: {}", what, message_));
}

Status NotFoundError(std::string message) { return {StatusCode::kNotFound, std::move(message)}; }
Status InvalidArgumentError(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}
Status CorruptionError(std::string message) {
  return {StatusCode::kCorruption, std::move(message)};
}
Status IoError(std::string message) { return {StatusCode::kIo, std::move(message)}; }
Status UnavailableError(std::string message) {
  return {StatusCode::kUnavailable, std::move(message)};
}
Status AbortedError(std::string message) { return {StatusCode::kAborted, std::move(message)}; }
Status InternalError(std::string message) { return {StatusCode::kInternal, std::move(message)}; }
Status OutOfMemoryError(std::string message) {
  return {StatusCode::kOutOfMemory, std::move(message)};
}
Status OutOfRoomError(std::string message) { return {StatusCode::kOutOfRoom, std::move(message)}; }

Status ErrnoError(int error_number, std::string_view what, std::string_view path) {
  std::string message = fmt::format("{} '{}': {}", what, path, std::strerror(error_number));
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:  // A file where the path wants a folder: nothing can be there.
      return NotFoundError(std::move(message));
    case ELOOP:
    case ENAMETOOLONG:
      return InvalidArgumentError(std::move(message));
    case ENOSPC:
    case EDQUOT:
      return IoError(message + " (free space there)");
    case EMFILE:
    case ENFILE:
      return OutOfRoomError(message + " (raise that limit: ulimit -n)");
    case ENOMEM:
      return OutOfMemoryError(std::move(message));
    case EWOULDBLOCK:
      return UnavailableError(std::move(message));
    default:
      return IoError(std::move(message));
  }
}

}  // namespace terrace
