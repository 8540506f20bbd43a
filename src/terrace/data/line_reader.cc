#include "terrace/data/line_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "terrace/data/criteo_parser.h"

namespace terrace {
namespace {
// Programs of one operating system put it in front of UTF-8 text.
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
}  // namespace

LineReader::LineReader(FileSystem* fs, std::span<const InputFile> files, ReadAhead::Order order,
                       std::uint64_t epochs, std::uint64_t read_ahead_bytes)
    : fs_(fs),
      files_(files),
      order_(std::move(order)),
      epochs_(epochs),
      read_ahead_bytes_(read_ahead_bytes) {}

void LineReader::Cancel() {
  MutexLock lock(&mu_);
  cancelled_ = true;
  if (read_ahead_ != nullptr) read_ahead_->Cancel();
}

Status LineReader::Reach(const std::function<bool()>& stopped) {
  TERRACE_RETURN_IF_ERROR(Start(stopped));
  return position_.file < epoch_order_.size() ? NextChunk() : OkStatus();
}

Status LineReader::Start(const std::function<bool()>& stopped) {
  EnterEpoch();
  ReadAheadOptions options;
  options.bytes = read_ahead_bytes_;
  options.epochs = epochs_;
  options.epoch = position_.epoch;
  options.file = position_.file;
  options.offset = position_.offset;
  options.stopped = stopped;
  TERRACE_ASSIGN_OR_RETURN(std::unique_ptr<ReadAhead> started,
                           ReadAhead::Start(fs_, files_, order_, options));
  MutexLock lock(&mu_);
  read_ahead_ = std::move(started);
  chunks_ = read_ahead_.get();
  if (cancelled_) read_ahead_->Cancel();
  return OkStatus();
}

void LineReader::EnterEpoch() {
  epoch_order_ = order_(position_.epoch);
  earlier_files_bytes_ = 0;
  for (std::uint64_t i = 0; i < position_.file && i < epoch_order_.size(); ++i)
    earlier_files_bytes_ += files_[epoch_order_[i]].size;
  file_bytes_ = 0;
}

Status LineReader::NextChunk() {
  RecycleChunk();
  TERRACE_ASSIGN_OR_RETURN(chunk_, chunks_->Next());
  if (!chunk_.has_value()) return InternalError("the reading thread ended before the last epoch");
  TERRACE_CHECK(chunk_->epoch == position_.epoch && chunk_->file == position_.file);
  chunk_at_ = 0;
  bytes_read_ += chunk_->file_bytes - file_bytes_;
  file_bytes_ = chunk_->file_bytes;
  return OkStatus();
}

void LineReader::RecycleChunk() {
  if (chunk_.has_value()) chunks_->Recycle(std::move(*chunk_));
  chunk_.reset();
}

void LineReader::FinishFile() {
  RecycleChunk();
  earlier_files_bytes_ += files_[epoch_order_[position_.file]].size;
  file_bytes_ = 0;
  position_ = LinePosition{position_.epoch, position_.file + 1, 0, 0};
}

void LineReader::Deliver(std::string_view text, std::uint64_t length, std::uint64_t consumed,
                         Line* line) {
  line->overlong = length > kLargestLineBytes;
  if (line->overlong) text = {};
  if (position_.line == 0 && text.starts_with(kByteOrderMark))
    text.remove_prefix(kByteOrderMark.size());
  position_.offset += consumed;
  ++position_.line;
  line->text = text;
  line->file = epoch_order_[position_.file];
  line->number = position_.line;
}

void LineReader::Carry(std::string_view part) {
  carry_bytes_ += part.size();
  // Of an overlong line only the length is kept.
  if (carry_bytes_ > kLargestLineBytes)
    carry_.clear();
  else
    carry_.append(part);
}

Result<bool> LineReader::Next(Line* line) {
  if (chunks_ == nullptr) TERRACE_RETURN_IF_ERROR(Start(/*stopped=*/nullptr));
  if (carry_delivered_) {
    carry_.clear();
    carry_bytes_ = 0;
    carry_delivered_ = false;
  }
  for (;;) {
    if (chunk_.has_value() && chunk_->ends_file) {
      if (position_.line == 0 && carry_ == kByteOrderMark) {  // It is no line by itself.
        carry_.clear();
        carry_bytes_ = 0;
      }
      if (carry_bytes_ > 0) {  // The last line has no newline.
        Deliver(carry_, carry_bytes_, carry_bytes_, line);
        carry_delivered_ = true;
        return true;
      }
      FinishFile();
    }
    if (position_.file == epoch_order_.size()) {
      position_ = LinePosition{position_.epoch + 1, 0, 0, 0};
      if (position_.epoch < epochs_) EnterEpoch();
      return false;
    }
    if (!chunk_.has_value() || chunk_at_ == chunk_->bytes.size()) {
      TERRACE_RETURN_IF_ERROR(NextChunk());
      continue;
    }
    const char* const begin = reinterpret_cast<const char*>(chunk_->bytes.data()) + chunk_at_;
    const std::size_t left = chunk_->bytes.size() - chunk_at_;
    const void* const newline = std::memchr(begin, '\n', left);
    if (newline == nullptr) {
      Carry({begin, left});
      chunk_at_ += left;
      continue;
    }
    const auto length = static_cast<std::size_t>(static_cast<const char*>(newline) - begin);
    chunk_at_ += length + 1;
    if (carry_bytes_ == 0) {
      Deliver({begin, length}, length, length + 1, line);
    } else {
      Carry({begin, length});
      Deliver(carry_, carry_bytes_, carry_bytes_ + 1, line);
      carry_delivered_ = true;
    }
    return true;
  }
}

}  // namespace terrace
