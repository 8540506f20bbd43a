// Any bytes as a line of Criteo text: the parser agrees with a slow one that is written by the
// rules of docs/data.md, and reads nothing beyond the line.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/data/criteo_parser.h"

namespace terrace {
namespace {

std::optional<std::int64_t> SlowInteger(const std::string& text) {
  std::size_t i = 0;
  const bool negative = !text.empty() && text[0] == '-';
  if (negative) ++i;
  std::string digits;
  while (i < text.size() && text[i] >= '0' && text[i] <= '9') digits += text[i++];
  if (digits.empty() || digits.size() > 18) return std::nullopt;
  if (i < text.size()) {
    if (text[i++] != '.') return std::nullopt;
    for (; i < text.size(); ++i)
      if (text[i] != '0') return std::nullopt;
  }
  std::int64_t value = 0;
  for (const char c : digits) value = value * 10 + (c - '0');
  return negative ? -value : value;
}

std::optional<CriteoRow> SlowParse(std::string line, const CriteoLayout& layout) {
  if (!line.empty() && line.back() == '\r') line.pop_back();
  std::vector<std::string> fields(1);
  for (const char c : line) {
    if (c == layout.delimiter)
      fields.emplace_back();
    else
      fields.back() += c;
  }
  const std::size_t first = layout.has_id ? 1 : 0;
  if (fields.size() != first + kCriteoColumns) return std::nullopt;
  CriteoRow row;
  const std::optional<std::int64_t> label = SlowInteger(fields[first]);
  if (!label.has_value() || *label < 0 || *label > 1) return std::nullopt;
  row.label = static_cast<float>(*label);
  for (std::size_t i = 0; i < kCriteoIntegers; ++i) {
    const std::string& field = fields[first + 1 + i];
    row.integers[i] = kMissingInteger;
    if (field.empty()) continue;
    const std::optional<std::int64_t> value = SlowInteger(field);
    if (!value.has_value()) return std::nullopt;
    row.integers[i] = *value;
  }
  for (std::size_t i = 0; i < kCriteoCategories; ++i) {
    const std::string& field = fields[first + 1 + kCriteoIntegers + i];
    for (const char c : field)
      if (static_cast<unsigned char>(c) < 0x20) return std::nullopt;
    row.categories[i] = field.empty() ? kMissingCategory : HashCategory(field);
  }
  return row;
}

}  // namespace
}  // namespace terrace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  terrace::CriteoLayout layout;
  layout.delimiter = (data[0] & 1) != 0 ? ',' : '\t';
  layout.has_id = (data[0] & 2) != 0;
  // A block of its own, so that AddressSanitizer sees a read beyond the line.
  const std::size_t length = size - 1;
  const std::unique_ptr<char[]> line(new char[length]);
  for (std::size_t i = 0; i < length; ++i) line[i] = static_cast<char>(data[i + 1]);
  const std::string_view text(line.get(), length);
  if (text.find('\n') != std::string_view::npos) return 0;
  terrace::CriteoRow row;
  terrace::BadLine bad;
  const bool good = terrace::ParseCriteoLine(text, layout, &row, &bad);
  const auto slow = terrace::SlowParse(std::string(text), layout);
  TERRACE_CHECK(good == slow.has_value());
  if (good) {
    TERRACE_CHECK(row.label == slow->label);
    TERRACE_CHECK(row.integers == slow->integers);
    TERRACE_CHECK(row.categories == slow->categories);
  } else {
    TERRACE_CHECK(!bad.ToString().empty());
  }
  const auto detected = terrace::DetectCriteoLayout(text);
  TERRACE_CHECK(detected.ok() || !detected.status().message().empty());
  return 0;
}
