#include "terrace/data/text_file.h"

#include <zlib.h>
#include <zstd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "terrace/base/mutex.h"

namespace terrace {

// Text to an empty file, which is borrowed.
class TextOutput {
 public:
  virtual ~TextOutput() = default;
  virtual Status Append(std::string_view text) = 0;
  // Once, after all text. The file is not synced.
  virtual Status Finish() = 0;

 protected:
  explicit TextOutput(File* file) : file_(file) {}
  Status Write(const void* data, std::size_t size) {
    TERRACE_RETURN_IF_ERROR(file_->WriteAt(offset_, {static_cast<const std::byte*>(data), size}));
    offset_ += size;
    return OkStatus();
  }

 private:
  File* const file_;
  std::uint64_t offset_ = 0;
};

namespace {

// Of one write.
constexpr std::size_t kOutputBytes = std::size_t{1} << 20;

class PlainOutput final : public TextOutput {
 public:
  explicit PlainOutput(File* file) : TextOutput(file) {}
  Status Append(std::string_view text) override { return Write(text.data(), text.size()); }
  Status Finish() override { return OkStatus(); }
};

class GzipOutput final : public TextOutput {
 public:
  explicit GzipOutput(File* file) : TextOutput(file), buffer_(kOutputBytes) {}
  ~GzipOutput() override {
    if (open_) deflateEnd(&z_);
  }
  Status Start() {
    // Level 1: numbers hardly shrink further, and writing stays fast. 15 + 16: gzip's header.
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

class ZstdOutput final : public TextOutput {
 public:
  explicit ZstdOutput(File* file) : TextOutput(file), buffer_(kOutputBytes) {}
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

// `path`: its name in the end.
Result<std::unique_ptr<TextOutput>> NewTextOutput(File* file, const std::string& path) {
  if (path.ends_with(".gz")) {
    auto output = std::make_unique<GzipOutput>(file);
    TERRACE_RETURN_IF_ERROR(output->Start());
    return std::unique_ptr<TextOutput>(std::move(output));
  }
  if (path.ends_with(".zst")) {
    auto output = std::make_unique<ZstdOutput>(file);
    TERRACE_RETURN_IF_ERROR(output->Start());
    return std::unique_ptr<TextOutput>(std::move(output));
  }
  return std::unique_ptr<TextOutput>(std::make_unique<PlainOutput>(file));
}

// Null: the file system has no locks.
Result<std::unique_ptr<FileLock>> LockPartial(FileSystem* fs, const std::string& path) {
  Result<std::unique_ptr<FileLock>> lock = fs->Lock(PartialOf(path), /*exclusive=*/true);
  if (lock.ok() || lock.status().code() == StatusCode::kNotFound) return lock;
  if (lock.status().code() != StatusCode::kUnavailable) return std::unique_ptr<FileLock>();
  return UnavailableError("'" + path +
                          "' is being written by another process: wait for its end, "
                          "or name another file");
}

// Between making a file and locking it nobody else looks for one. Null: the file system has no
// locks.
Result<std::unique_ptr<FileLock>> LockFolder(FileSystem* fs, const std::string& folder) {
  constexpr int kTries = 2000;
  Mutex mu;
  CondVar never;  // Another process tells nobody.
  for (int i = 0; i < kTries; ++i) {
    Result<std::unique_ptr<FileLock>> lock = fs->Lock(folder, /*exclusive=*/true);
    if (lock.ok()) return lock;
    if (lock.status().code() != StatusCode::kUnavailable) return std::unique_ptr<FileLock>();
    MutexLock waiting(&mu);
    never.WaitFor(&mu, std::chrono::milliseconds(1));
  }
  return UnavailableError("'" + folder +
                          "' is locked by another process: wait for its end, or name "
                          "a file in another folder");
}

}  // namespace

std::string PartialOf(const std::string& path) { return path + ".partial"; }

TextFile::TextFile(FileSystem* fs, const std::string& path) : fs_(fs), path_(path) {}

TextFile::~TextFile() = default;

Status TextFile::Append(std::string_view text) { return output_->Append(text); }

Result<std::unique_ptr<TextFile>> TextFile::Create(FileSystem* fs, const std::string& path) {
  std::unique_ptr<TextFile> text(new TextFile(fs, path));
  const std::string partial = PartialOf(path);
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<FileLock> folder, LockFolder(fs, FolderOf(path)));
  {
    const Result<std::unique_ptr<FileLock>> left = LockPartial(fs, path);
    if (left.status().code() == StatusCode::kUnavailable) return left.status();
    const Status removed = fs->Remove(partial);
    if (!removed.ok() && removed.code() != StatusCode::kNotFound) return removed;
  }
  TERRACE_ASSIGN_OR_RETURN(text->file_, fs->Open(partial, OpenMode::kCreate));
  TERRACE_ASSIGN_OR_RETURN(text->lock_, LockPartial(fs, path));
  Result<std::unique_ptr<TextOutput>> output = NewTextOutput(text->file_.get(), path);
  if (!output.ok()) return text->GiveUp(output.status());
  text->output_ = std::move(*output);
  return text;
}

Status TextFile::Publish() {
  TERRACE_RETURN_IF_ERROR(output_->Finish());
  TERRACE_RETURN_IF_ERROR(file_->Sync());
  TERRACE_RETURN_IF_ERROR(fs_->Rename(PartialOf(path_), path_));
  renamed_ = true;
  return fs_->SyncDirectory(FolderOf(path_));
}

Status TextFile::GiveUp(const Status& cause) {
  output_.reset();
  file_.reset();
  if (renamed_) return cause;  // A partial file is somebody else's by now.
  // The cause is what matters; a partial file that stays is removed by the next attempt.
  const Status removed = fs_->Remove(PartialOf(path_));
  const bool gone = removed.ok() || removed.code() == StatusCode::kNotFound;
  return gone ? cause : cause.WithContext(PartialOf(path_) + " is left");
}

}  // namespace terrace
