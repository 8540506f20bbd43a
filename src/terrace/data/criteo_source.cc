#include "terrace/data/criteo_source.h"

#include <algorithm>
#include <utility>

#include "terrace/base/log.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/units.h"
#include "terrace/data/byte_stream.h"
#include "terrace/data/file_list.h"

namespace terrace {
namespace {

constexpr std::uint64_t kLoggedBadLines = 5;
// Before that many lines a few bad ones say nothing about the rest.
constexpr std::uint64_t kLinesBeforeCheck = 1000;
// Of a file's start, looked at before the run.
constexpr std::uint64_t kHeadBytes = std::uint64_t{256} << 10;
constexpr int kHeadLines = 100;

std::string_view WithoutByteOrderMark(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  return text;
}

struct Head {
  CriteoLayout layout;
  bool has_rows = false;
  std::uint64_t stream_bytes = 0;
};

bool Parses(std::string_view line, const CriteoLayout& layout, BadLine* bad) {
  CriteoRow row;
  return ParseCriteoLine(line, layout, &row, bad);
}

// Reads the layout of `file` and looks at its first lines. Without a header the first line that is
// good with tabs or with commas decides between them.
Result<Head> ReadHead(FileSystem* fs, const InputFile& file, const DataOptions& options) {
  Head head;
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<ByteStream> stream, OpenByteStream(fs, file, 0));
  head.stream_bytes = stream->MemoryBytes();
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(kHeadBytes));
  TERRACE_ASSIGN_OR_RETURN(const ByteStream::Piece piece, stream->Read(buffer.span()));
  const bool whole = piece.bytes.size() < buffer.size();
  std::string_view text =
      WithoutByteOrderMark({reinterpret_cast<const char*>(piece.bytes.data()), piece.bytes.size()});
  Result<CriteoLayout> layout = DetectCriteoLayout(text.substr(0, text.find('\n')));
  if (!layout.ok()) return layout.status().WithContext(file.path + ":1");
  head.layout = *layout;
  std::string first_bad;
  for (int number = 1; number <= kHeadLines && !text.empty(); ++number) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos && !whole) {
      head.has_rows = true;
      break;
    }
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (number == 1 && head.layout.has_header) continue;
    head.has_rows = true;
    BadLine bad;
    if (Parses(line, head.layout, &bad)) return head;
    CriteoLayout other = head.layout;
    other.delimiter = other.delimiter == ',' ? '\t' : ',';
    BadLine unused;
    if (!other.has_header && Parses(line, other, &unused)) {
      head.layout = other;
      return head;
    }
    if (first_bad.empty())
      first_bad = file.path + ":" + std::to_string(number) + ": " + bad.ToString();
  }
  const bool any_line_may_be_bad = options.max_bad_fraction >= 1 && !options.for_scoring;
  if (first_bad.empty() || any_line_may_be_bad) return head;
  return InvalidArgumentError(
      first_bad +
      ", and no line among the first ones is better. Criteo text has 40 columns: label, "
      "13 integers, 26 categories, separated by tabs or commas" +
      (options.for_scoring
           ? ". A log that is to be scored needs the label column too: any 0 or 1 will do"
           : ""));
}

}  // namespace

Result<std::unique_ptr<ExampleSource>> CriteoSource::Open(FileSystem* fs,
                                                          const DataOptions& options) {
  TERRACE_ASSIGN_OR_RETURN(const IntegerEncoding integers, ParseIntegerEncoding(options.integers));
  std::vector<InputFile> files = options.frozen;
  if (files.empty()) {
    TERRACE_ASSIGN_OR_RETURN(files, ExpandFiles(fs, options.files));
  }
  std::vector<CriteoLayout> layouts;
  std::uint64_t stream_bytes = 0;
  bool has_rows = false;
  for (const InputFile& file : files) {
    TERRACE_ASSIGN_OR_RETURN(const Head head, ReadHead(fs, file, options));
    if (!head.has_rows && options.warns) {
      LogText(LogLevel::kWarning, file.path + ": holds no example");
    }
    layouts.push_back(head.layout);
    stream_bytes = std::max(stream_bytes, head.stream_bytes);
    has_rows |= head.has_rows;
  }
  if (!has_rows)
    return InvalidArgumentError(
        files.front().path +
        (files.size() > 1 ? " and the other files: no example in them" : ": no example in it") +
        "; give files with lines of data");
  return std::unique_ptr<ExampleSource>(
      new CriteoSource(fs, options, integers, std::move(files), std::move(layouts), stream_bytes));
}

CriteoSource::CriteoSource(FileSystem* fs, const DataOptions& options, IntegerEncoding integers,
                           std::vector<InputFile> files, std::vector<CriteoLayout> layouts,
                           std::uint64_t stream_bytes)
    : options_(options),
      encoder_(integers, options.missing == "key", kCriteoCategories),
      files_(std::move(files)),
      layouts_(std::move(layouts)),
      stream_bytes_(stream_bytes),
      reader_(
          fs, files_,
          [count = static_cast<std::uint32_t>(files_.size()), shuffle = options.shuffle != "none",
           seed = HashCombine(options.seed, HashName("files"))](std::uint64_t epoch) {
            return EpochOrder(count, shuffle, seed, epoch, 0);
          },
          options.epochs, options.read_ahead_bytes) {
  for (const InputFile& file : files_) epoch_bytes_ += file.size;
}

Status CriteoSource::Seek(const DataCursor& cursor) {
  TERRACE_CHECK(!started_);
  if (cursor.epoch < options_.epochs && cursor.file >= files_.size())
    return InvalidArgumentError("the position to go on from names file " +
                                std::to_string(cursor.file) + " of " +
                                std::to_string(files_.size()));
  epoch_ = cursor.epoch;
  example_in_epoch_ = cursor.example_in_epoch;
  examples_ = cursor.examples;
  // With windows only the start of one is a place to begin: its examples change places.
  const bool usable = cursor.hint_example <= cursor.example_in_epoch &&
                      (!windowed() || cursor.hint_example % options_.shuffle_window == 0);
  rows_in_epoch_ = usable ? cursor.hint_example : 0;
  bad_in_epoch_ = usable ? cursor.bad_lines : 0;
  bad_before_ = bad_in_epoch_ > 0;
  reader_.set_position(usable ? LinePosition{epoch_, cursor.file, cursor.offset, cursor.line}
                              : LinePosition{epoch_, 0, 0, 0});
  to_skip_ = example_in_epoch_ - rows_in_epoch_;
  return OkStatus();
}

Status CriteoSource::ReadToPosition(const std::function<bool()>& stopped) {
  stopped_ = stopped;
  if (error_.ok() && !started_ && epoch_ < options_.epochs) {
    error_ = reader_.Reach(stopped);
    if (error_.ok()) error_ = FinishSeek();
  }
  stopped_ = nullptr;
  return error_;
}

Result<std::optional<Batch>> CriteoSource::NextIn(std::uint32_t examples, std::uint32_t minibatch,
                                                  Batch old) {
  TERRACE_CHECK(minibatch > 0 && examples >= minibatch && examples % minibatch == 0);
  if (!error_.ok()) return error_;
  if (epoch_ >= options_.epochs) return std::optional<Batch>();
  if (!started_) error_ = FinishSeek();
  if (!error_.ok()) {
    UpdateStats();
    return error_;
  }
  Batch batch = encoder_.NewBatch(examples, std::move(old));
  batch.cursors.reserve(examples / minibatch + 1);  // One more where an epoch ends.
  batch.first_example = examples_;
  const auto in_minibatch = static_cast<std::uint32_t>(example_in_epoch_ % minibatch);
  error_ = FillBatch(examples - in_minibatch, minibatch, &batch);
  const std::size_t whole = batch.cursors.size();
  if (!error_.ok() && whole > 0) {
    batch.Truncate(static_cast<std::uint32_t>(whole) * minibatch - in_minibatch, whole);
  }
  const bool given = error_.ok() || (whole > 0 && error_.code() != StatusCode::kAborted);
  if (given) rows_given_ += batch.examples;
  UpdateStats();
  if (!given) return error_;
  return std::optional<Batch>(std::move(batch));
}

// On an error the batch holds what was read before, and its last cursor may lie before its end.
Status CriteoSource::FillBatch(std::uint64_t wanted, std::uint32_t minibatch, Batch* batch) {
  bool more = true;
  bool at_boundary = false;
  while (batch->examples < wanted) {
    TERRACE_ASSIGN_OR_RETURN(more, AppendNext(batch));
    if (!more) break;
    ++example_in_epoch_;
    ++examples_;
    at_boundary = example_in_epoch_ % minibatch == 0;
    if (at_boundary) batch->cursors.push_back(Cursor());
  }
  if (more) {
    TERRACE_ASSIGN_OR_RETURN(more, HasNext());
  }
  if (!more) {
    TERRACE_RETURN_IF_ERROR(CheckBadFraction());
    FinishEpoch(at_boundary, batch);
  } else if (!batch->bad_lines_before.empty()) {
    batch->bad_lines_before.push_back(0);
  }
  return OkStatus();
}

// Reads the good lines between the hint and the position, and the window that the position is in.
Status CriteoSource::FinishSeek() {
  started_ = true;
  const std::uint64_t in_window = windowed() ? example_in_epoch_ % options_.shuffle_window : 0;
  LineReader::Line line;
  CriteoRow row;
  for (std::uint64_t left = to_skip_ - in_window; left > 0; --left) {
    TERRACE_ASSIGN_OR_RETURN(const bool more, NextRow(&line, &row));
    if (!more) break;
    bad_run_ = 0;
  }
  if (in_window > 0 && !epoch_read_) {
    TERRACE_RETURN_IF_ERROR(FillWindow());
    window_at_ = static_cast<std::uint32_t>(std::min<std::uint64_t>(in_window, window_.examples));
  }
  if (rows_in_epoch_ < example_in_epoch_)
    return CorruptionError("the data has only " + FormatCount(rows_in_epoch_) +
                           " examples in an epoch, fewer than the " +
                           FormatCount(example_in_epoch_) +
                           " that were read before; the files are not the same");
  return OkStatus();
}

// The epoch is over after what `batch` holds.
void CriteoSource::FinishEpoch(bool at_boundary, Batch* batch) {
  batch->ends_epoch = true;
  if (!windowed() && (bad_run_ > 0 || !batch->bad_lines_before.empty())) {
    batch->bad_lines_before.resize(batch->examples);
    batch->bad_lines_before.push_back(bad_run_);
  }
  bad_run_ = 0;
  ++epoch_;
  example_in_epoch_ = 0;
  rows_in_epoch_ = 0;
  bad_in_epoch_ = 0;
  epoch_read_ = false;
  DataCursor cursor;
  cursor.epoch = epoch_;
  cursor.examples = examples_;
  if (at_boundary) batch->cursors.pop_back();
  batch->cursors.push_back(cursor);
}

DataCursor CriteoSource::Cursor() const {
  DataCursor cursor;
  if (windowed() && window_at_ < window_.examples) {
    cursor = window_start_;
  } else {
    const LinePosition& position = reader_.position();
    cursor.hint_example = rows_in_epoch_;
    cursor.file = position.file;
    cursor.offset = position.offset;
    cursor.line = position.line;
    cursor.bad_lines = bad_in_epoch_;
  }
  cursor.epoch = epoch_;
  cursor.example_in_epoch = example_in_epoch_;
  cursor.examples = examples_;
  return cursor;
}

// False: the epoch has no further example.
Result<bool> CriteoSource::AppendNext(Batch* batch) {
  if (windowed()) {
    TERRACE_ASSIGN_OR_RETURN(const bool more, HasNext());
    if (more) CopyExample(window_, window_order_[window_at_++], batch);
    return more;
  }
  std::uint32_t bad_before = pending_bad_run_;
  if (pending_.examples > 0) {
    CopyExample(pending_, 0, batch);
    pending_.examples = 0;
  } else {
    LineReader::Line line;
    CriteoRow row;
    TERRACE_ASSIGN_OR_RETURN(const bool more, NextRow(&line, &row));
    if (!more) return false;
    AppendRow(line, row, batch);
    bad_before = std::exchange(bad_run_, 0);
  }
  if (bad_before > 0 || !batch->bad_lines_before.empty()) {
    batch->bad_lines_before.resize(batch->examples);
    batch->bad_lines_before.back() = bad_before;
  }
  return true;
}

// Whether the epoch goes on after what was given out; reads ahead to know.
Result<bool> CriteoSource::HasNext() {
  if (windowed()) {
    if (window_at_ == window_.examples && !epoch_read_) TERRACE_RETURN_IF_ERROR(FillWindow());
    return window_at_ < window_.examples;
  }
  if (pending_.examples > 0) return true;
  LineReader::Line line;
  CriteoRow row;
  TERRACE_ASSIGN_OR_RETURN(const bool more, NextRow(&line, &row));
  if (!more) return false;
  pending_ = encoder_.NewBatch(1);
  AppendRow(line, row, &pending_);
  pending_bad_run_ = std::exchange(bad_run_, 0);
  return true;
}

Status CriteoSource::FillWindow() {
  window_start_ = Cursor();
  const std::uint64_t number = rows_in_epoch_ / options_.shuffle_window;
  window_ = encoder_.NewBatch(0);
  window_at_ = 0;
  LineReader::Line line;
  CriteoRow row;
  while (window_.examples < options_.shuffle_window) {
    TERRACE_ASSIGN_OR_RETURN(const bool more, NextRow(&line, &row));
    if (!more) break;
    AppendRow(line, row, &window_);
  }
  window_order_ = EpochOrder(window_.examples, true,
                             HashCombine(options_.seed, HashName("examples")), epoch_, number);
  return OkStatus();
}

void CriteoSource::AppendRow(const LineReader::Line& line, const CriteoRow& row,
                             Batch* batch) const {
  encoder_.Append(row.label, row.integers.data(), row.categories.data(), batch);
  batch->origin_file.push_back(line.file);
  batch->origin_line.push_back(line.number);
}

// The next good line; counts bad ones on the way. False: the epoch has no further line.
Result<bool> CriteoSource::NextRow(LineReader::Line* line, CriteoRow* row) {
  if (epoch_read_) return false;
  for (;;) {
    if (stopped_ && stopped_()) return AbortedError("reading was stopped");
    TERRACE_ASSIGN_OR_RETURN(const bool more, reader_.Next(line));
    if (!more) {
      epoch_read_ = true;
      return false;
    }
    const CriteoLayout& layout = layouts_[line->file];
    if (line->number == 1 && layout.has_header) continue;
    ++lines_;
    BadLine bad;
    if (line->overlong) {
      bad.reason = "the line is longer than 1 MiB";
    } else if (ParseCriteoLine(line->text, layout, row, &bad)) {
      ++rows_in_epoch_;
      if (rows_in_epoch_ + bad_in_epoch_ == kLinesBeforeCheck)
        TERRACE_RETURN_IF_ERROR(CheckBadFraction());
      return true;
    }
    TERRACE_RETURN_IF_ERROR(CountBadLine(*line, bad));
  }
}

Status CriteoSource::CountBadLine(const LineReader::Line& line, const BadLine& bad) {
  ++bad_lines_;
  ++bad_in_epoch_;
  ++bad_run_;
  if (bad_logged_ < kLoggedBadLines || first_bad_.empty()) {
    const std::string text =
        files_[line.file].path + ":" + std::to_string(line.number) + ": " + bad.ToString();
    if (first_bad_.empty()) first_bad_ = text;
    ++bad_logged_;
    if (options_.warns) {
      LogText(LogLevel::kWarning,
              "bad line " + text +
                  (bad_logged_ == kLoggedBadLines ? "; further ones are only counted" : ""));
    }
  }
  if (rows_in_epoch_ + bad_in_epoch_ >= kLinesBeforeCheck) return CheckBadFraction();
  return OkStatus();
}

Status CriteoSource::CheckBadFraction() const {
  if (options_.for_scoring) return OkStatus();
  const std::uint64_t lines = rows_in_epoch_ + bad_in_epoch_;
  if (static_cast<double>(bad_in_epoch_) <= options_.max_bad_fraction * static_cast<double>(lines))
    return OkStatus();
  const std::string where = first_bad_.empty() ? "all of them lie before the place of the resume"
                            : bad_before_      ? "the first since the resume: " + first_bad_
                                               : "the first: " + first_bad_;
  return InvalidArgumentError(FormatCount(bad_in_epoch_) + " of " + FormatCount(lines) +
                              " lines are bad, more than data.max_bad_fraction (" +
                              std::to_string(options_.max_bad_fraction) + ") allows; " + where +
                              ". Correct the files, or raise the fraction");
}

std::uint64_t CriteoSource::MemoryBytes() const {
  return BytesOf(options_, encoder_.schema(), stream_bytes_);
}

std::uint64_t CriteoSource::BytesOf(const DataOptions& options, const DataSchema& schema,
                                    std::uint64_t stream_bytes) {
  // Besides the chunks: the decompressor, its input, and one line.
  std::uint64_t bytes = std::max<std::uint64_t>(options.read_ahead_bytes, 128 << 10) +
                        stream_bytes + 2 * kLargestLineBytes;
  if (options.shuffle == "examples") {
    // Label, origin, dense, keys and their ends; vectors that grow hold up to twice as much.
    const std::uint64_t example = 4 + 4 + 8 + 4 + 4 * std::uint64_t{schema.dense_width()} +
                                  12 * std::uint64_t{schema.slots.size()};
    bytes += 2 * example * options.shuffle_window;
  }
  return bytes;
}

void CriteoSource::UpdateStats() {
  const double total = static_cast<double>(epoch_bytes_) * static_cast<double>(options_.epochs);
  const double done = static_cast<double>(epoch_bytes_) * static_cast<double>(epoch_) +
                      static_cast<double>(epoch_ < options_.epochs ? reader_.epoch_bytes() : 0);
  MutexLock lock(&mu_);
  stats_.examples = rows_given_;
  stats_.lines = lines_;
  stats_.bad_lines = bad_lines_;
  stats_.bytes_read = reader_.bytes_read();
  stats_.progress = total > 0 ? std::min(done / total, 1.0) : 0;
}

SourceStats CriteoSource::stats() const {
  MutexLock lock(&mu_);
  return stats_;
}

std::string CriteoSource::IdentityText() const {
  std::string text =
      "format criteo; epochs " + std::to_string(options_.epochs) + "; shuffle " + options_.shuffle;
  if (options_.shuffle != "none") text += "; seed " + std::to_string(options_.seed);
  if (windowed()) text += "; window " + std::to_string(options_.shuffle_window);
  text += "; integers " + options_.integers + "; missing " + options_.missing;
  text += kFilesInIdentity;
  for (const InputFile& file : files_) text += " " + file.path + ":" + std::to_string(file.size);
  return text;
}

}  // namespace terrace
