// CriteoParser: one line of Criteo text (label, 13 integers, 26 categories) to a CriteoRow.
// ExampleEncoder: such a row to an example of a Batch. docs/data.md has every rule. Threads: const
// functions, any thread.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/base/status.h"
#include "terrace/data/batch.h"

namespace terrace {

inline constexpr int kCriteoIntegers = 13;
inline constexpr int kCriteoCategories = 26;
inline constexpr int kCriteoColumns = 1 + kCriteoIntegers + kCriteoCategories;
// Slot ids: I1..I13 are 1..13, C1 is 14.
inline constexpr std::uint16_t kFirstIntegerSlot = 1;
inline constexpr std::uint16_t kFirstCategorySlot = 14;
inline constexpr std::uint64_t kCategoryMask = (std::uint64_t{1} << 48) - 1;
// A category is below this; this one value stands for "no category" and is the category of the key
// that data.missing: key gives it.
inline constexpr std::uint64_t kMissingCategory = kCategoryMask;
inline constexpr std::int64_t kMissingInteger = std::numeric_limits<std::int64_t>::min();
// Integer columns have at most this many digits.
inline constexpr int kLargestIntegerDigits = 18;
inline constexpr std::size_t kLargestLineBytes = std::size_t{1} << 20;

struct CriteoRow {
  float label = 0;
  std::array<std::int64_t, kCriteoIntegers> integers;       // Or kMissingInteger.
  std::array<std::uint64_t, kCriteoCategories> categories;  // Or kMissingCategory.
};

// How the columns of a file lie, from its first line.
struct CriteoLayout {
  char delimiter = '\t';
  bool has_header = false;
  bool has_id = false;  // A column before the label, which is not read.
};

// Why a line is bad: the column (from 1; 0: the line as a whole) and a sentence about it.
struct BadLine {
  int column = 0;
  const char* reason = "";
  std::string ToString() const;  // "column 3 (I2) is no integer"
};

// The layout that the first line of a file tells. kInvalidArgument: a header whose columns are not
// [Id,] Label, I1..I13, C1..C26.
Result<CriteoLayout> DetectCriteoLayout(std::string_view first_line);

// `line` has no newline; one carriage return at its end does not count. False: `bad` says why, and
// `row` is undefined.
bool ParseCriteoLine(std::string_view line, const CriteoLayout& layout, CriteoRow* row,
                     BadLine* bad);

// The 48 bits of a category's text: its value when it is a hexadecimal number of at most 12 digits
// below kMissingCategory, else a hash of its bytes.
std::uint64_t HashCategory(std::string_view text);

// sign(x) ln(1 + |x|).
float LogOfInteger(std::int64_t x);
// The category of a bucketed integer: floor(ln(x)^2) for x > 2; each smaller x has its own.
std::uint64_t BucketOfInteger(std::int64_t x);

enum class IntegerEncoding : std::uint8_t { kDense, kBucket, kBoth };

// Appends rows to batches, with the slots and dense columns of its schema.
class ExampleEncoder {
 public:
  // Slots C1..C<categories>, I1..I13 before them when the integers are bucketed.
  ExampleEncoder(IntegerEncoding integers, bool missing_has_key, std::uint32_t categories);

  const DataSchema& schema() const { return schema_; }
  // Label, dense columns and keys of one example; origin and the rest are the caller's. integers:
  // (13), categories: (categories).
  void Append(float label, const std::int64_t* integers, const std::uint64_t* categories,
              Batch* batch) const;
  // An empty batch with room for `examples`, in the memory of `old`.
  Batch NewBatch(std::uint32_t examples, Batch old = {}) const;

 private:
  IntegerEncoding integers_;
  bool missing_has_key_;
  std::uint32_t categories_;
  DataSchema schema_;
  std::vector<std::uint64_t> category_slot_bits_;  // (categories) slot id in the top 16 bits.
};

Result<IntegerEncoding> ParseIntegerEncoding(std::string_view text);

// Appends example `example` of `from` to `to`: label, dense, keys and origin. REQUIRES: of one
// schema; weight, values, time and group are empty.
void CopyExample(const Batch& from, std::uint32_t example, Batch* to);

}  // namespace terrace
