// WriteClickLog: rows as text, through gzip or zstd, to a file that appears whole.
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include "terrace/data/click_log_generator.h"

namespace terrace {
namespace {

constexpr std::size_t kBlockRows = 4096;
// Of one write.
constexpr std::size_t kOutputBytes = std::size_t{1} << 20;

// Where text goes: to the file as it is, or through a compressor.
class Output {
 public:
  explicit Output(File* file) : file_(file) {}
  virtual ~Output() = default;
  virtual Status Append(std::string_view text) = 0;
  virtual Status Finish() = 0;

 protected:
  Status Write(const void* data, std::size_t size) {
    TERRACE_RETURN_IF_ERROR(file_->WriteAt(offset_, {static_cast<const std::byte*>(data), size}));
    offset_ += size;
    return OkStatus();
  }

 private:
  File* const file_;
  std::uint64_t offset_ = 0;
};

class PlainOutput final : public Output {
 public:
  using Output::Output;
  Status Append(std::string_view text) override { return Write(text.data(), text.size()); }
  Status Finish() override { return OkStatus(); }
};

class GzipOutput final : public Output {
 public:
  explicit GzipOutput(File* file) : Output(file), buffer_(kOutputBytes) {}
  ~GzipOutput() override {
    if (open_) deflateEnd(&z_);
  }
  Status Start() {
    // Level 1: made-up rows hardly shrink further, and writing stays fast. 15 + 16: gzip's header.
    if (deflateInit2(&z_, 1, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK)
      return OutOfMemoryError("zlib found no memory");
    open_ = true;
    return OkStatus();
  }
  Status Append(std::string_view text) override { return Deflate(text, Z_NO_FLUSH); }
  Status Finish() override { return Deflate({}, Z_FINISH); }

 private:
  Status Deflate(std::string_view text, int flush) {
    z_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
    z_.avail_in = static_cast<uInt>(text.size());
    int code = Z_OK;
    do {
      z_.next_out = buffer_.data();
      z_.avail_out = static_cast<uInt>(buffer_.size());
      code = deflate(&z_, flush);
      TERRACE_RETURN_IF_ERROR(Write(buffer_.data(), buffer_.size() - z_.avail_out));
    } while (z_.avail_out == 0 || (flush == Z_FINISH && code != Z_STREAM_END));
    return OkStatus();
  }
  z_stream z_ = {};
  bool open_ = false;
  std::vector<Bytef> buffer_;
};

class ZstdOutput final : public Output {
 public:
  explicit ZstdOutput(File* file) : Output(file), buffer_(kOutputBytes) {}
  ~ZstdOutput() override { ZSTD_freeCStream(z_); }
  Status Start() {
    z_ = ZSTD_createCStream();
    if (z_ == nullptr) return OutOfMemoryError("zstd found no memory");
    const std::size_t code = ZSTD_CCtx_setParameter(z_, ZSTD_c_checksumFlag, 1);
    if (ZSTD_isError(code)) return InternalError(std::string("zstd: ") + ZSTD_getErrorName(code));
    return OkStatus();
  }
  Status Append(std::string_view text) override { return Compress(text, ZSTD_e_continue); }
  Status Finish() override { return Compress({}, ZSTD_e_end); }

 private:
  Status Compress(std::string_view text, ZSTD_EndDirective end) {
    ZSTD_inBuffer input{text.data(), text.size(), 0};
    std::size_t left = 0;
    do {
      ZSTD_outBuffer output{buffer_.data(), buffer_.size(), 0};
      left = ZSTD_compressStream2(z_, &output, &input, end);
      if (ZSTD_isError(left)) return InternalError(std::string("zstd: ") + ZSTD_getErrorName(left));
      TERRACE_RETURN_IF_ERROR(Write(buffer_.data(), output.pos));
    } while (end == ZSTD_e_end ? left > 0 : input.pos < input.size);
    return OkStatus();
  }
  ZSTD_CStream* z_ = nullptr;
  std::vector<char> buffer_;
};

Result<std::unique_ptr<Output>> NewOutput(File* file, const std::string& path) {
  if (path.ends_with(".gz")) {
    auto output = std::make_unique<GzipOutput>(file);
    TERRACE_RETURN_IF_ERROR(output->Start());
    return std::unique_ptr<Output>(std::move(output));
  }
  if (path.ends_with(".zst")) {
    auto output = std::make_unique<ZstdOutput>(file);
    TERRACE_RETURN_IF_ERROR(output->Start());
    return std::unique_ptr<Output>(std::move(output));
  }
  return std::unique_ptr<Output>(std::make_unique<PlainOutput>(file));
}

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
                 const WriteClickLogOptions& options, Output* output) {
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
  return output->Finish();
}

}  // namespace

Status WriteClickLog(FileSystem* fs, const ClickLogSpec& spec, std::uint64_t rows,
                     const std::string& path, const WriteClickLogOptions& options) {
  if (spec.categorical_slots > kCriteoCategories)
    return InvalidArgumentError("Criteo text has 26 categories, not " +
                                std::to_string(spec.categorical_slots));
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<ClickLogGenerator> generator,
                           ClickLogGenerator::Create(spec));
  const std::string partial = path + ".partial";
  // Left by a run that was killed.
  if (Status removed = fs->Remove(partial);
      !removed.ok() && removed.code() != StatusCode::kNotFound)
    return removed;
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs->Open(partial, OpenMode::kCreate));
  Status status;
  {
    Result<std::unique_ptr<Output>> output = NewOutput(file.get(), path);
    status = output.ok() ? WriteRows(*generator, rows, options, output->get()) : output.status();
  }
  if (status.ok()) status = file->Sync();
  file.reset();
  if (status.ok()) status = fs->Rename(partial, path);
  if (!status.ok()) {
    // The cause is what matters; a partial file that stays is removed by the next attempt.
    Status removed = fs->Remove(partial);
    return status.WithContext("writing " + path +
                              (removed.ok() ? "" : " (" + partial + " is left)"));
  }
  const std::size_t slash = path.rfind('/');
  return fs->SyncDirectory(slash == std::string::npos ? "." : path.substr(0, slash + 1));
}

}  // namespace terrace
