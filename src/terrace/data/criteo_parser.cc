#include "terrace/data/criteo_parser.h"

#if defined(__SSSE3__) && defined(__SSE4_1__)
#include <smmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstring>
#include <utility>

#include "terrace/base/ids.h"
#include "terrace/base/portable_math.h"
#include "terrace/base/rng.h"

namespace terrace {
namespace {

constexpr std::uint8_t kNoHexDigit = 0xff;

constexpr std::array<std::uint8_t, 256> MakeHexTable() {
  std::array<std::uint8_t, 256> table{};
  for (auto& entry : table) entry = kNoHexDigit;
  for (std::uint8_t i = 0; i < 10; ++i) table[std::size_t{'0'} + i] = i;
  for (std::uint8_t i = 0; i < 6; ++i) {
    table[std::size_t{'a'} + i] = static_cast<std::uint8_t>(10 + i);
    table[std::size_t{'A'} + i] = static_cast<std::uint8_t>(10 + i);
  }
  return table;
}
constexpr std::array<std::uint8_t, 256> kHex = MakeHexTable();

std::uint8_t HexDigit(char c) { return kHex[static_cast<unsigned char>(c)]; }

// Up to 12 digits, each checked: false when one is no digit.
bool ParseHex(const char* begin, std::size_t digits, std::uint64_t* value) {
  std::uint64_t v = 0;
  std::uint8_t bad = 0;
  for (std::size_t i = 0; i < digits; ++i) {
    const std::uint8_t digit = HexDigit(begin[i]);
    bad |= digit;
    v = v << 4 | (digit & 15u);
  }
  *value = v;
  return (bad & 0xf0) == 0;
}

static_assert(std::endian::native == std::endian::little);

std::uint64_t LoadEight(const char* p) {
  std::uint64_t bytes;
  std::memcpy(&bytes, p, 8);
  return bytes;
}

// The usual category: exactly eight digits. False when one is no digit.
#if defined(__SSSE3__) && defined(__SSE4_1__)
bool ParseEightHex(const char* p, std::uint64_t* value) {
  const __m128i text = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i number = _mm_sub_epi8(text, _mm_set1_epi8('0'));
  const __m128i letter = _mm_sub_epi8(_mm_or_si128(text, _mm_set1_epi8(0x20)), _mm_set1_epi8('a'));
  const __m128i is_number = _mm_cmpeq_epi8(_mm_min_epu8(number, _mm_set1_epi8(9)), number);
  const __m128i is_letter = _mm_cmpeq_epi8(_mm_min_epu8(letter, _mm_set1_epi8(5)), letter);
  const __m128i digits =
      _mm_blendv_epi8(_mm_add_epi8(letter, _mm_set1_epi8(10)), number, is_number);
  // Two digits to a byte, in 16-bit lanes, then the four bytes together, the first on top.
  const __m128i bytes = _mm_maddubs_epi16(digits, _mm_set1_epi16(0x0110));
  const __m128i packed = _mm_packus_epi16(bytes, bytes);
  *value = __builtin_bswap32(static_cast<std::uint32_t>(_mm_cvtsi128_si32(packed)));
  return (_mm_movemask_epi8(_mm_or_si128(is_number, is_letter)) & 0xff) == 0xff;
}
#else
bool ParseEightHex(const char* p, std::uint64_t* value) { return ParseHex(p, 8, value); }
#endif

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// [-]digits[.0*] up to `end` or the delimiter; leaves `*at` there. nullptr, or why it is none.
const char* ParseInteger(const char** at, const char* end, char delimiter, std::int64_t* value) {
  const char* p = *at;
  const bool negative = p < end && *p == '-';
  if (negative) ++p;
  const char* const digits = p;
  std::int64_t v = 0;
  while (p < end && IsDigit(*p)) {
    if (p - digits == kLargestIntegerDigits) return "has more than 18 digits";
    v = v * 10 + (*p - '0');
    ++p;
  }
  if (p == digits) return "is no integer";
  if (p < end && *p == '.') {
    ++p;
    while (p < end && *p == '0') ++p;
    if (p < end && IsDigit(*p)) return "has a fraction";
  }
  if (p < end && *p != delimiter) return "is no integer";
  *value = negative ? -v : v;
  *at = p;
  return nullptr;
}

// The usual integer: up to seven digits before a delimiter, or nothing (missing). Without branches
// on its length, which no processor could predict. False: something else; the slow way decides.
// REQUIRES: eight bytes are readable from *at on. On success *at is the delimiter.
bool ParseShortInteger(const char** at, std::uint64_t delimiters, std::int64_t* value) {
  constexpr std::uint64_t kOnes = 0x0101010101010101;
  const std::uint64_t text = LoadEight(*at);
  const std::uint64_t other = text ^ delimiters;
  // The lowest set bit is the top one of the first delimiter's byte.
  const std::uint64_t found = (other - kOnes) & ~other & (kOnes * 0x80);
  if (found == 0) return false;
  const int length = std::countr_zero(found) >> 3;  // 0 to 7
  // The digits move to the top bytes; zeros stand below them.
  const std::uint64_t zeros = (kOnes * '0') >> (8 * length);
  std::uint64_t digits = (text << (8 * (7 - length)) << 8) | zeros;
  const bool valid = ((digits & (kOnes * 0xf0)) |
                      (((digits + kOnes * 0x06) & (kOnes * 0xf0)) >> 4)) == kOnes * 0x33;
  digits &= kOnes * 0x0f;
  // Pairs, then fours, then all eight.
  digits = (digits * 10 + (digits >> 8)) & 0x00ff00ff00ff00ff;
  digits = (digits * 100 + (digits >> 16)) & 0x0000ffff0000ffff;
  digits = (digits * 10000 + (digits >> 32)) & 0x00000000ffffffff;
  *value = length == 0 ? kMissingInteger : static_cast<std::int64_t>(digits);
  *at += length;
  return valid;
}

bool EqualIgnoringCase(std::string_view a, std::string_view b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) {
           return std::tolower(static_cast<unsigned char>(x)) ==
                  std::tolower(static_cast<unsigned char>(y));
         });
}

std::string ColumnName(int column) {
  if (column == 0) return "Label";
  std::string name(1, column <= kCriteoIntegers ? 'I' : 'C');
  return name.append(std::to_string(column <= kCriteoIntegers ? column : column - kCriteoIntegers));
}

// "I7" or "C12": a name that says where it belongs.
bool IsNumberedName(std::string_view name) {
  if (name.size() < 2 || name.size() > 3) return false;
  const int kind = std::tolower(static_cast<unsigned char>(name[0]));
  return (kind == 'i' || kind == 'c') &&
         std::all_of(name.begin() + 1, name.end(), [](char c) { return IsDigit(c); });
}

std::vector<std::string_view> Split(std::string_view line, char delimiter) {
  std::vector<std::string_view> fields;
  for (;;) {
    const std::size_t at = line.find(delimiter);
    fields.push_back(line.substr(0, at));
    if (at == std::string_view::npos) return fields;
    line.remove_prefix(at + 1);
  }
}

// Values of LogOfInteger that come up again and again.
constexpr std::size_t kSmallIntegers = 1024;
double ExactLog(std::uint64_t magnitude) {
  return PortableLog(static_cast<double>(magnitude) + 1.0);
}
const std::array<float, kSmallIntegers>& SmallLogs() {
  static const std::array<float, kSmallIntegers> table = [] {
    std::array<float, kSmallIntegers> values{};
    for (std::size_t i = 0; i < kSmallIntegers; ++i) values[i] = static_cast<float>(ExactLog(i));
    return values;
  }();
  return table;
}

}  // namespace

std::string BadLine::ToString() const {
  if (column == 0) return reason;
  return "column " + std::to_string(column) + " (" + ColumnName(column - 1) + ") " + reason;
}

Result<CriteoLayout> DetectCriteoLayout(std::string_view first_line) {
  CriteoLayout layout;
  if (first_line.find('\t') == std::string_view::npos &&
      first_line.find(',') != std::string_view::npos)
    layout.delimiter = ',';
  if (!first_line.empty() && first_line.back() == '\r') first_line.remove_suffix(1);
  const std::vector<std::string_view> names = Split(first_line, layout.delimiter);
  std::size_t label = 0;
  while (label < names.size() && !EqualIgnoringCase(names[label], "label")) ++label;
  if (label == names.size()) return layout;
  const std::string wanted =
      "; the columns are Label, I1 to I13, C1 to C26, after an Id column or none";
  if (label > 1)
    return InvalidArgumentError("the header has the label in column " + std::to_string(label + 1) +
                                wanted);
  if (names.size() - label != static_cast<std::size_t>(kCriteoColumns))
    return InvalidArgumentError("the header has " + std::to_string(names.size()) + " columns" +
                                wanted);
  for (std::size_t i = label + 1; i < names.size(); ++i) {
    const std::string expected = ColumnName(static_cast<int>(i - label));
    if (IsNumberedName(names[i]) && !EqualIgnoringCase(names[i], expected))
      return InvalidArgumentError("the header has " + std::string(names[i]) + " in column " +
                                  std::to_string(i + 1) + " where " + expected + " belongs" +
                                  wanted);
  }
  layout.has_header = true;
  layout.has_id = label == 1;
  return layout;
}

std::uint64_t HashCategory(std::string_view text) {
  std::uint64_t value = 0;
  if (text.size() <= 12 && ParseHex(text.data(), text.size(), &value) && value != kMissingCategory)
    return value;
  const std::uint64_t hash = MixKey(HashName(text)) >> 16;
  return hash == kMissingCategory ? 0 : hash;
}

float LogOfInteger(std::int64_t x) {
  const std::uint64_t magnitude =
      x < 0 ? std::uint64_t{0} - static_cast<std::uint64_t>(x) : static_cast<std::uint64_t>(x);
  static const std::array<float, kSmallIntegers>& small = SmallLogs();
  const float log =
      magnitude < kSmallIntegers ? small[magnitude] : static_cast<float>(ExactLog(magnitude));
  return x < 0 ? -log : log;
}

std::uint64_t BucketOfInteger(std::int64_t x) {
  if (x > 2) {
    const double log = PortableLog(static_cast<double>(x));
    return static_cast<std::uint64_t>(log * log);
  }
  // 2 -> 2^40, 1 -> 2^40 + 1, 0 -> 2^40 + 2, -1 -> 2^40 + 3, ...; far below zero all share the
  // last.
  constexpr std::int64_t kLargest = (std::int64_t{1} << 40) - 1;
  const std::int64_t below = x < 2 - kLargest ? kLargest : 2 - x;
  return (std::uint64_t{1} << 40) + static_cast<std::uint64_t>(below);
}

namespace {

bool Fail(BadLine* bad, int column, const char* reason) {
  bad->column = column + 1;
  bad->reason = reason;
  return false;
}

bool FailLine(BadLine* bad, const char* reason) {
  bad->column = 0;
  bad->reason = reason;
  return false;
}

// A category that is not eight hexadecimal digits. False: it holds a control character.
bool ParseCategoryText(std::string_view text, std::uint64_t* value) {
  if (text.empty()) {
    *value = kMissingCategory;
    return true;
  }
  *value = HashCategory(text);
  return std::none_of(text.begin(), text.end(),
                      [](char c) { return static_cast<unsigned char>(c) < 0x20; });
}

}  // namespace

bool ParseCriteoLine(std::string_view line, const CriteoLayout& layout, CriteoRow* row,
                     BadLine* bad) {
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  if (line.empty()) return FailLine(bad, "the line is blank");
  const char delimiter = layout.delimiter;
  const char* p = line.data();
  const char* const end = p + line.size();
  if (layout.has_id) {
    p = static_cast<const char*>(std::memchr(p, delimiter, static_cast<std::size_t>(end - p)));
    if (p == nullptr) return FailLine(bad, "the line has only one column");
    ++p;
  }
  std::int64_t label = 0;
  if (const char* reason = ParseInteger(&p, end, delimiter, &label); reason != nullptr)
    return Fail(bad, 0, "is not 0 or 1");
  if (label != 0 && label != 1) return Fail(bad, 0, "is not 0 or 1");
  row->label = static_cast<float>(label);
  const std::uint64_t delimiters =
      std::uint64_t{0x0101010101010101} * static_cast<unsigned char>(delimiter);
  // From here on p stands on the delimiter before the next column, or at the end.
  for (std::size_t i = 0; i < kCriteoIntegers; ++i) {
    if (p == end) return FailLine(bad, "the line has too few columns");
    const char* q = p + 1;
    if (end - q >= 8 && ParseShortInteger(&q, delimiters, &row->integers[i])) {
      p = q;
      continue;
    }
    ++p;
    if (p == end || *p == delimiter) {
      row->integers[i] = kMissingInteger;
    } else if (const char* reason = ParseInteger(&p, end, delimiter, &row->integers[i]);
               reason != nullptr) {
      return Fail(bad, 1 + static_cast<int>(i), reason);
    }
  }
  for (std::size_t i = 0; i < kCriteoCategories; ++i) {
    if (p == end) return FailLine(bad, "the line has too few columns");
    ++p;
    if (end - p >= 8 && (end - p == 8 || p[8] == delimiter) &&
        ParseEightHex(p, &row->categories[i])) {
      p += 8;
      continue;
    }
    const void* found =
        p == end ? nullptr : std::memchr(p, delimiter, static_cast<std::size_t>(end - p));
    const char* const stop = found == nullptr ? end : static_cast<const char*>(found);
    if (!ParseCategoryText({p, static_cast<std::size_t>(stop - p)}, &row->categories[i]))
      return Fail(bad, 1 + kCriteoIntegers + static_cast<int>(i), "holds a control character");
    p = stop;
  }
  if (p != end) return FailLine(bad, "the line has too many columns");
  return true;
}

Result<IntegerEncoding> ParseIntegerEncoding(std::string_view text) {
  if (text == "dense") return IntegerEncoding::kDense;
  if (text == "bucket") return IntegerEncoding::kBucket;
  if (text == "both") return IntegerEncoding::kBoth;
  return InvalidArgumentError("data.integers is '" + std::string(text) +
                              "'; it is dense, bucket or both");
}

ExampleEncoder::ExampleEncoder(IntegerEncoding integers, bool missing_has_key,
                               std::uint32_t categories)
    : integers_(integers), missing_has_key_(missing_has_key), categories_(categories) {
  if (integers_ != IntegerEncoding::kDense) {
    for (int i = 0; i < kCriteoIntegers; ++i)
      schema_.slots.push_back(
          {ColumnName(1 + i), static_cast<std::uint16_t>(kFirstIntegerSlot + i)});
  }
  for (std::uint32_t i = 0; i < categories_; ++i) {
    const auto slot = static_cast<std::uint16_t>(kFirstCategorySlot + i);
    schema_.slots.push_back({ColumnName(1 + kCriteoIntegers + static_cast<int>(i)), slot});
    category_slot_bits_.push_back(std::uint64_t{slot} << 48);
  }
  if (integers_ != IntegerEncoding::kBucket)
    schema_.dense.push_back({"integers", 2 * kCriteoIntegers});
}

Batch ExampleEncoder::NewBatch(std::uint32_t examples, Batch old) const {
  Batch batch = std::move(old);
  batch.Clear();
  batch.slots = static_cast<std::uint32_t>(schema_.slots.size());
  batch.label.reserve(examples);
  batch.dense.reserve(std::size_t{examples} * schema_.dense_width());
  batch.key_begin.reserve(std::size_t{examples} * batch.slots + 1);
  batch.key_begin.push_back(0);
  batch.keys.reserve(std::size_t{examples} * batch.slots);
  batch.origin_file.reserve(examples);
  batch.origin_line.reserve(examples);
  return batch;
}

void ExampleEncoder::Append(float label, const std::int64_t* integers,
                            const std::uint64_t* categories, Batch* batch) const {
  ++batch->examples;
  batch->label.push_back(label);
  if (integers_ != IntegerEncoding::kBucket) {
    float dense[2 * kCriteoIntegers];
    for (int i = 0; i < kCriteoIntegers; ++i) {
      const bool missing = integers[i] == kMissingInteger;
      dense[i] = missing ? 0.0f : LogOfInteger(integers[i]);
      dense[kCriteoIntegers + i] = missing ? 1.0f : 0.0f;
    }
    batch->dense.insert(batch->dense.end(), dense, dense + 2 * kCriteoIntegers);
  }
  const std::size_t old_keys = batch->keys.size();
  const std::size_t old_begins = batch->key_begin.size();
  // Room for a key in every slot; what stays unused is cut off at the end.
  batch->keys.resize(old_keys + batch->slots);
  batch->key_begin.resize(old_begins + batch->slots);
  Key* key = batch->keys.data() + old_keys;
  std::uint32_t* begin = batch->key_begin.data() + old_begins;
  const Key* const first = batch->keys.data();
  if (integers_ != IntegerEncoding::kDense) {
    for (int i = 0; i < kCriteoIntegers; ++i) {
      const bool missing = integers[i] == kMissingInteger;
      *key = std::uint64_t{static_cast<std::uint16_t>(kFirstIntegerSlot + i)} << 48 |
             (missing ? kMissingCategory : BucketOfInteger(integers[i]));
      key += !missing || missing_has_key_ ? 1 : 0;
      *begin++ = static_cast<std::uint32_t>(key - first);
    }
  }
  for (std::uint32_t i = 0; i < categories_; ++i) {
    *key = category_slot_bits_[i] | categories[i];
    key += categories[i] != kMissingCategory || missing_has_key_ ? 1 : 0;
    *begin++ = static_cast<std::uint32_t>(key - first);
  }
  batch->keys.resize(static_cast<std::size_t>(key - first));
}

void CopyExample(const Batch& from, std::uint32_t example, Batch* to) {
  const std::size_t e = example;
  const std::size_t width = from.dense.size() / from.examples;
  to->label.push_back(from.label[e]);
  const auto dense = from.dense.begin() + static_cast<std::ptrdiff_t>(e * width);
  to->dense.insert(to->dense.end(), dense, dense + static_cast<std::ptrdiff_t>(width));
  const std::size_t slots = from.slots;
  const std::uint32_t* begin = from.key_begin.data() + e * slots;
  // Wraps when the keys move forward; the sum below wraps back.
  const std::uint32_t shift = static_cast<std::uint32_t>(to->keys.size()) - begin[0];
  for (std::size_t s = 1; s <= slots; ++s) to->key_begin.push_back(begin[s] + shift);
  to->keys.insert(to->keys.end(), from.keys.begin() + begin[0], from.keys.begin() + begin[slots]);
  to->origin_file.push_back(from.origin_file[e]);
  to->origin_line.push_back(from.origin_line[e]);
  ++to->examples;
}

}  // namespace terrace
