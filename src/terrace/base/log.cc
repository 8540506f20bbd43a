#include "terrace/base/log.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <string>

#include "terrace/base/mutex.h"

namespace terrace {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};
Mutex g_mu;
bool g_progress_stands TERRACE_GUARDED_BY(g_mu) = false;

const char* Prefix(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug: ";
    case LogLevel::kInfo:
      return "";
    case LogLevel::kWarning:
      return "warning: ";
    case LogLevel::kError:
      return "error: ";
  }
  return "";
}

bool OnTerminal() {
  static const bool terminal = isatty(STDERR_FILENO) == 1;
  return terminal;
}

// Of a terminal; 80 where it says nothing. Asked each time: windows change.
std::size_t TerminalColumns() {
  winsize size = {};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

}  // namespace

void SetLogLevel(LogLevel level) { g_level.store(level, std::memory_order_relaxed); }
LogLevel GetLogLevel() { return g_level.load(std::memory_order_relaxed); }

void LogText(LogLevel level, std::string_view message) {
  if (level < GetLogLevel()) return;
  MutexLock lock(&g_mu);
  std::string text = g_progress_stands ? "\r\x1b[K" : "";
  g_progress_stands = false;
  text += Prefix(level);
  text += message;
  text += '\n';
  std::fwrite(text.data(), 1, text.size(), stderr);
}

double ProgressIntervalSeconds() { return OnTerminal() ? 1.0 : 10.0; }

void SetProgressLine(std::string_view line) {
  const bool terminal = OnTerminal();
  if (GetLogLevel() > LogLevel::kInfo) return;
  MutexLock lock(&g_mu);
  if (!terminal && line.empty()) return;
  std::string text = terminal && g_progress_stands ? "\r\x1b[K" : "";
  // A line that wraps could not be taken away again; the last column may wrap, too.
  text += terminal ? line.substr(0, TerminalColumns() - 1) : line;
  if (!terminal) text += '\n';
  g_progress_stands = terminal && !line.empty();
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace terrace
