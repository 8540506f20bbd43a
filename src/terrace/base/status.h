// Status, Result<T>: what an operation that the world can fail returns. Our code throws nothing.
// Threads: values; a Status is copied and moved freely.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "terrace/base/check.h"

namespace terrace {

enum class StatusCode {
  kOk = 0,
  kNotFound,         // A file or key that is not there.
  kInvalidArgument,  // The user's job file, arguments or data: exit code 2 when seen before the
                     // run.
  kCorruption,       // Bytes that fail their check.
  kIo,               // The disk or the file system failed, ENOSPC included.
  kUnavailable,      // Try again: a lock that another process holds.
  kDeadline,
  kAborted,      // We are stopping: another failure or a signal is the cause.
  kInternal,     // A limit of this program, or a defect that it noticed without harm.
  kOutOfMemory,  // The memory budget, or the machine's memory.
  kOutOfRoom,    // A limit of the quota, of open files or of an index; no disk failed.
};

std::string_view StatusCodeName(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {
    TERRACE_CHECK(code != StatusCode::kOk);
  }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  std::string ToString() const;

  // Adds what the caller was doing in front of the cause: "compacting file 12: read: ...". Keeps
  // the code.
  Status WithContext(std::string_view what) const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status OkStatus() { return Status(); }
Status NotFoundError(std::string message);
Status InvalidArgumentError(std::string message);
Status CorruptionError(std::string message);
Status IoError(std::string message);
Status UnavailableError(std::string message);
Status AbortedError(std::string message);
Status InternalError(std::string message);
Status OutOfMemoryError(std::string message);
Status OutOfRoomError(std::string message);
// The one place that maps errno: ENOENT is kNotFound, EINVAL from open is kIo, ENOMEM is
// kOutOfMemory, EMFILE is kOutOfRoom, ...
Status ErrnoError(int error_number, std::string_view what, std::string_view path);

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT: implicit by design.
  Result(Status status) : status_(std::move(status)) {  // NOLINT: implicit by design.
    TERRACE_CHECK(!status_.ok());
  }
  bool ok() const { return status_.ok(); }
  const Status& status() const& { return status_; }
  Status status() && { return std::move(status_); }  // A reference would outlive the result.
  T& value() & {
    TERRACE_CHECK(ok());
    return *value_;
  }
  const T& value() const& {
    TERRACE_CHECK(ok());
    return *value_;
  }
  T&& value() && {
    TERRACE_CHECK(ok());
    return std::move(*value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  Status status_;
  std::optional<T> value_;
};

#define TERRACE_RETURN_IF_ERROR(expr)                  \
  do {                                                 \
    ::terrace::Status terrace_status_ = (expr);        \
    if (!terrace_status_.ok()) return terrace_status_; \
  } while (false)

#define TERRACE_CONCAT_INNER_(a, b) a##b
#define TERRACE_CONCAT_(a, b) TERRACE_CONCAT_INNER_(a, b)
// TERRACE_ASSIGN_OR_RETURN(auto file, fs->Open(path));
#define TERRACE_ASSIGN_OR_RETURN(lhs, expr) \
  TERRACE_ASSIGN_OR_RETURN_(TERRACE_CONCAT_(terrace_result_, __LINE__), lhs, expr)
#define TERRACE_ASSIGN_OR_RETURN_(result, lhs, expr) \
  auto result = (expr);                              \
  if (!result.ok()) return result.status();          \
  lhs = std::move(result).value()

}  // namespace terrace
