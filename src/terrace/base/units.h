// Sizes and durations as people write and read them: "2GiB", "1.5 GB", "320MiB"; 1234567 -> "1.18
// MiB".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace terrace {

// Bytes. Units B, KB, MB, GB, TB (powers of 1000), KiB.. TiB (powers of 1024), any case, a fraction
// allowed; a bare number is bytes. nullopt: no such size, negative, or beyond 2^63.
std::optional<std::uint64_t> ParseBytes(std::string_view text);
std::string FormatBytes(std::uint64_t bytes);  // "2.00 GiB"
std::string FormatCount(std::uint64_t count);  // "1,234,567"

}  // namespace terrace
