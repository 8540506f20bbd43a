// TERRACE_CHECK: our own mistakes stop the process, in release too. Never used on what a file, a
// peer or a user can do.
#pragma once

namespace terrace {
[[noreturn]] void CheckFailed(const char* expression, const char* file, int line);
}

#define TERRACE_CHECK(condition)                              \
  do {                                                        \
    if (!(condition)) [[unlikely]]                            \
      ::terrace::CheckFailed(#condition, __FILE__, __LINE__); \
  } while (false)

// Inside loops over elements only; compiled out of release builds.
#ifdef NDEBUG
#define TERRACE_DCHECK(condition) \
  do {                            \
  } while (false && (condition))
#else
#define TERRACE_DCHECK(condition) TERRACE_CHECK(condition)
#endif
