#include "terrace/base/units.h"

#include <cctype>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

namespace terrace {

std::optional<std::uint64_t> ParseBytes(std::string_view text) {
  double number = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  std::string unit;
  for (const char* c = end; c != text.data() + text.size(); ++c) {
    if (*c != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  }
  double scale = 0;
  if (unit.empty() || unit == "b") {
    scale = 1;
  } else {
    const std::size_t power = std::string_view("kmgt").find(unit[0]) + 1;
    if (power == 0) return std::nullopt;
    const std::string_view rest = std::string_view(unit).substr(1);
    if (rest == "ib") {
      scale = std::pow(1024.0, static_cast<double>(power));
    } else if (rest == "b") {
      scale = std::pow(1000.0, static_cast<double>(power));
    } else {
      return std::nullopt;
    }
  }
  const double bytes = number * scale;
  if (!(bytes >= 0) || bytes >= 0x1p63) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

std::string FormatBytes(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 5) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string FormatCount(std::uint64_t count) {
  const std::string digits = std::to_string(count);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

}  // namespace terrace
