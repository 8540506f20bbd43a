// The program's log: one line per event on stderr. Messages are sentences for the user; fmt syntax
// through base/log.h only. Torch's headers carry another fmt: translation units that include torch
// call LogText().
#pragma once

#include <string_view>

namespace terrace {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

void SetLogLevel(LogLevel level);
LogLevel GetLogLevel();
// Thread-safe. Clears a progress line that stands on the terminal first.
void LogText(LogLevel level, std::string_view message);
// The line that is rewritten in place on a terminal; plain lines otherwise. Empty: takes it away.
void SetProgressLine(std::string_view line);
// Seconds between two of them: a log need not be as lively as a terminal.
double ProgressIntervalSeconds();

}  // namespace terrace
