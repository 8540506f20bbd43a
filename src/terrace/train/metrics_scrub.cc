#include "terrace/train/metrics_scrub.h"

#include <algorithm>
#include <memory>
#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terrace/train/summary.h"

namespace terrace {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;
// Of a stretch that the disk does not read as a whole: what a disk gives up at a time, at most.
constexpr std::size_t kLeastReadBytes = 4096;
// A line is a few kilobytes; what is longer lost its end.
constexpr std::size_t kMostLineBytes = std::size_t{1} << 20;

// Why the text is no line of metrics; OK: it is one.
Status CheckLine(std::string_view text) {
  const nlohmann::json line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object()) return CorruptionError("the line is no JSON object");
  const auto kind = line.find("kind");
  if (kind == line.end() || !kind->is_string()) return CorruptionError("the line has no 'kind'");
  if (*kind == "lost") return OkStatus();  // A repair put it there.
  const auto version = line.find("format_version");
  if (version == line.end() || !version->is_number_unsigned()) {
    return CorruptionError("the line has no 'format_version'");
  }
  if (version->get<std::uint64_t>() > kMetricsVersion) {
    return InvalidArgumentError(
        fmt::format("the line has format version {}, written by a newer terrace; this one reads {}",
                    version->get<std::uint64_t>(), kMetricsVersion));
  }
  return OkStatus();
}

class LineScrub {
 public:
  LineScrub(const std::string& path, NewerLines newer) : path_(path), newer_(newer) {}

  // Bytes of the file, one after another.
  Status Take(std::string_view text) {
    while (!text.empty()) {
      const std::size_t end = text.find('\n');
      const std::string_view part = text.substr(0, end);
      if (line_.size() < kMostLineBytes) line_.append(part);
      line_bytes_ += part.size();
      if (end == std::string_view::npos) return OkStatus();
      text.remove_prefix(end + 1);
      ++line_bytes_;
      TERRACE_RETURN_IF_ERROR(End(StatusOfLine()));
    }
    return OkStatus();
  }
  // Bytes that the disk does not give: the lines that they belong to, and those within, are one.
  void TakeUnreadable(std::uint64_t bytes, const Status& why) {
    line_bytes_ += bytes;
    if (unreadable_.ok()) unreadable_ = CorruptionError(why.message());
  }
  // The file ends here, and should have `missing` bytes more.
  Status Finish(std::uint64_t missing) {
    line_bytes_ += missing;
    if (line_bytes_ == 0) return OkStatus();
    if (!unreadable_.ok()) return End(unreadable_);
    return End(CorruptionError(missing > 0 ? fmt::format("{} bytes are missing at the end", missing)
                                           : std::string("the last line has no end")));
  }
  std::vector<DamagedMetrics> TakeDamage() { return std::move(damage_); }

 private:
  Status StatusOfLine() const {
    if (!unreadable_.ok()) return unreadable_;
    return line_.size() < kMostLineBytes ? CheckLine(line_)
                                         : CorruptionError("the line has no end");
  }
  Status End(Status status) {
    const std::uint64_t offset = offset_;
    offset_ += line_bytes_;
    const std::uint64_t bytes = line_bytes_;
    line_.clear();
    line_bytes_ = 0;
    unreadable_ = OkStatus();
    if (status.ok()) return status;
    if (status.code() == StatusCode::kInvalidArgument) {
      if (newer_ == NewerLines::kRefused) {
        return status.WithContext(fmt::format("'{}' at byte {}", path_, offset));
      }
      status = CorruptionError(status.message() + ", but the file is not as it was written");
    }
    if (!damage_.empty() && damage_.back().offset + damage_.back().bytes == offset) {
      damage_.back().bytes += bytes;
    } else {
      damage_.push_back({offset, bytes, status.message()});
    }
    return OkStatus();
  }

  const std::string& path_;
  const NewerLines newer_;
  std::string line_;              // Its first bytes, without the end.
  std::uint64_t line_bytes_ = 0;  // All of them, and the end.
  Status unreadable_;             // Why some of them can't be read.
  std::uint64_t offset_ = 0;      // Of the line in the file.
  std::vector<DamagedMetrics> damage_;
};

// Reads what can be read of [offset, offset + buffer), and returns how far it came: less than all
// of it at the end of the file.
Result<std::size_t> TakeReadable(File* file, std::uint64_t offset, std::span<std::byte> buffer,
                                 LineScrub* scrub) {
  const auto take = [scrub](std::span<const std::byte> bytes) {
    return scrub->Take({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  };
  const Result<std::size_t> whole = file->ReadAt(offset, buffer);
  if (whole.ok()) {
    TERRACE_RETURN_IF_ERROR(take(buffer.first(*whole)));
    return *whole;
  }
  if (whole.status().code() != StatusCode::kIo) return whole.status();
  TERRACE_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
  std::size_t done = 0;
  while (done < buffer.size() && offset + done < size) {
    const std::uint64_t to_border = kLeastReadBytes - (offset + done) % kLeastReadBytes;
    const std::span<std::byte> part = buffer.subspan(
        done, std::min<std::uint64_t>({to_border, buffer.size() - done, size - offset - done}));
    const Result<std::size_t> got = file->ReadAt(offset + done, part);
    if (got.ok()) {
      TERRACE_RETURN_IF_ERROR(take(part.first(*got)));
    } else {
      scrub->TakeUnreadable(part.size(), got.status());
    }
    done += got.ok() ? *got : part.size();
    if (got.ok() && *got < part.size()) break;
  }
  return done;
}

Status CopyBytes(File* from, File* to, std::uint64_t begin, std::uint64_t end,
                 std::span<std::byte> buffer) {
  while (begin < end) {
    const std::span<std::byte> part =
        buffer.first(std::min<std::uint64_t>(buffer.size(), end - begin));
    TERRACE_RETURN_IF_ERROR(ReadFully(from, begin, part));
    TERRACE_RETURN_IF_ERROR(to->WriteAt(begin, part));
    begin += part.size();
  }
  return OkStatus();
}

// A line of so many bytes. One that is too short for words is blank: blanks may stand before the
// next line.
std::string LostLine(std::uint64_t bytes) {
  const std::string words =
      fmt::format(R"({{"format_version":{},"kind":"lost"}})", kMetricsVersion);
  if (bytes < words.size() + 1) return std::string(bytes, ' ');
  return words + std::string(bytes - words.size() - 1, ' ') + "\n";
}

}  // namespace

Result<std::vector<DamagedMetrics>> ScrubMetrics(FileSystem* fs, const std::string& path,
                                                 std::uint64_t bytes, NewerLines newer) {
  LineScrub scrub(path, newer);
  std::uint64_t offset = 0;
  Result<std::unique_ptr<File>> file = fs->Open(path, OpenMode::kRead);
  if (!file.ok() && file.status().code() != StatusCode::kNotFound) return file.status();
  std::vector<std::byte> buffer(file.ok() ? std::min<std::uint64_t>(kBufferBytes, bytes) : 0);
  while (file.ok() && offset < bytes) {
    const std::span<std::byte> part =
        std::span(buffer).first(std::min<std::uint64_t>(buffer.size(), bytes - offset));
    TERRACE_ASSIGN_OR_RETURN(const std::size_t got,
                             TakeReadable(file->get(), offset, part, &scrub));
    offset += got;
    if (got < part.size()) break;
  }
  TERRACE_RETURN_IF_ERROR(scrub.Finish(bytes - offset));
  return scrub.TakeDamage();
}

Status MendMetrics(FileSystem* fs, const std::string& path, std::uint64_t bytes,
                   const std::vector<DamagedMetrics>& damage) {
  const std::string temporary = path + ".tmp";
  const Status removed = fs->Remove(temporary);
  if (!removed.ok() && removed.code() != StatusCode::kNotFound) return removed;
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<File> to, fs->Open(temporary, OpenMode::kCreate));
  Result<std::unique_ptr<File>> from = fs->Open(path, OpenMode::kRead);
  if (!from.ok() && from.status().code() != StatusCode::kNotFound) return from.status();
  std::vector<std::byte> buffer(kBufferBytes);
  std::uint64_t at = 0;
  const auto copy_to = [&](std::uint64_t end) -> Status {
    if (at == end) return OkStatus();
    TERRACE_RETURN_IF_ERROR(from.status());
    TERRACE_RETURN_IF_ERROR(CopyBytes(from->get(), to.get(), at, end, buffer));
    at = end;
    return OkStatus();
  };
  for (const DamagedMetrics& stretch : damage) {
    TERRACE_RETURN_IF_ERROR(copy_to(stretch.offset));
    const std::string line = LostLine(stretch.bytes);
    TERRACE_RETURN_IF_ERROR(to->WriteAt(at, std::as_bytes(std::span(line))));
    at += line.size();
  }
  TERRACE_RETURN_IF_ERROR(copy_to(bytes));
  TERRACE_RETURN_IF_ERROR(to->Sync());
  TERRACE_RETURN_IF_ERROR(fs->Rename(temporary, path));
  return fs->SyncDirectory(FolderOf(path));
}

}  // namespace terrace
