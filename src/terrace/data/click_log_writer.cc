// WriteClickLog: rows as text, through gzip or zstd, to a file that appears whole.
#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "terrace/data/click_log_generator.h"
#include "terrace/data/text_file.h"

namespace terrace {
namespace {

constexpr std::size_t kBlockRows = 4096;
void AppendHex(std::uint64_t value, int digits, std::string* text) {
  char buffer[16];
  for (int i = digits - 1; i >= 0; --i) {
    buffer[i] = "0123456789abcdef"[value & 15];
    value >>= 4;
  }
  text->append(buffer, static_cast<std::size_t>(digits));
}

void AppendLine(const ClickLogRow& row, int digits, std::string* text) {
  text->push_back(row.label > 0 ? '1' : '0');
  for (const std::int64_t x : row.integers) {
    text->push_back('\t');
    if (x == kMissingInteger) continue;
    char buffer[24];
    const auto end = std::to_chars(buffer, buffer + sizeof(buffer), x).ptr;
    text->append(buffer, static_cast<std::size_t>(end - buffer));
  }
  for (const std::uint64_t category : row.categories) {
    text->push_back('\t');
    AppendHex(category, digits, text);
  }
  text->append(kCriteoCategories - row.categories.size(), '\t');
  text->push_back('\n');
}

Status WriteRows(const ClickLogGenerator& generator, std::uint64_t rows,
                 const WriteClickLogOptions& options, TextFile* output) {
  std::string text;
  std::vector<double> probability;
  std::vector<float> label;
  ClickLogRow row;
  for (std::uint64_t done = 0; done < rows;) {
    text.clear();
    probability.clear();
    label.clear();
    const std::uint64_t end = std::min<std::uint64_t>(rows, done + kBlockRows);
    for (; done < end; ++done) {
      generator.MakeRow(options.first_row + done, &row);
      AppendLine(row, generator.category_digits(), &text);
      probability.push_back(row.probability);
      label.push_back(row.label);
    }
    TERRACE_RETURN_IF_ERROR(output->Append(text));
    if (options.oracle) options.oracle(probability, label);
    if (options.keep_going && !options.keep_going(done))
      return AbortedError("writing the click log was stopped");
  }
  return OkStatus();
}

}  // namespace

Status WriteClickLog(FileSystem* fs, const ClickLogSpec& spec, std::uint64_t rows,
                     const std::string& path, const WriteClickLogOptions& options) {
  if (spec.categorical_slots > kCriteoCategories)
    return InvalidArgumentError("Criteo text has 26 categories, not " +
                                std::to_string(spec.categorical_slots));
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<ClickLogGenerator> generator,
                           ClickLogGenerator::Create(spec));
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<TextFile> file, TextFile::Create(fs, path));
  Status status = WriteRows(*generator, rows, options, file.get());
  if (status.ok()) status = file->Publish();
  return status.ok() ? status : file->GiveUp(status).WithContext("writing " + path);
}

}  // namespace terrace
