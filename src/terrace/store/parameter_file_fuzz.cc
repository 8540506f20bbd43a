// Any header and footer blocks: refused, or a file whose numbers agree with each other and with its
// length.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/io/framed_file.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/store/parameter_file.h"

namespace terrace {
namespace {

constexpr std::uint64_t kId = 7;
constexpr std::uint64_t kMostBlocks = 16;

// No fuzzer guesses a checksum.
std::uint64_t PutChecksum(std::span<std::byte> block) {
  const std::span<std::byte> head = block.first(block.size() - sizeof(std::uint64_t));
  const std::uint64_t checksum = Checksum64(head);
  std::memcpy(block.data() + head.size(), &checksum, sizeof(checksum));
  return checksum;
}

// A byte of switches, a byte of length in blocks, then the beginnings of footer and header, half
// of the rest each.
int Fuzz(std::span<const std::byte> data) {
  if (data.size() < 2) return 0;
  const unsigned switches = std::to_integer<unsigned>(data[0]);
  const std::uint64_t blocks = std::to_integer<std::uint64_t>(data[1]) % kMostBlocks;
  data = data.subspan(2);
  std::vector<std::byte> bytes((blocks + 1) * kBlockBytes);
  const std::span<std::byte> file_bytes(bytes);
  const std::span<std::byte> header = file_bytes.first(kBlockBytes);
  const std::span<std::byte> footer = file_bytes.last(kBlockBytes);
  const std::size_t half = std::min<std::size_t>(data.size() / 2, kBlockBytes);
  std::copy_n(data.begin() + static_cast<std::ptrdiff_t>(data.size() / 2), half, header.begin());
  if ((switches & 1) != 0) PutChecksum(header);
  std::copy_n(data.begin(), half, footer.begin());
  if ((switches & 2) != 0) {
    // Names the header at offset 104.
    std::memcpy(footer.data() + 104, header.data() + kBlockBytes - 8, 8);
    PutChecksum(footer);
  }
  MemoryFileSystem fs;
  Result<std::unique_ptr<File>> file = fs.Open("/rows", OpenMode::kCreate);
  TERRACE_CHECK(file.ok());
  TERRACE_CHECK((*file)->WriteAt(0, bytes).ok());
  const RecordLayout layout = RecordLayout::Of("t", 1, 8);
  const auto refused = [](const Status& status) {
    TERRACE_CHECK(status.code() == StatusCode::kCorruption ||
                  status.code() == StatusCode::kInvalidArgument);
    TERRACE_CHECK(!status.message().empty());
    return 0;
  };
  const Result<ParameterFileInfo> info = ReadFooter(file->get(), bytes.size(), kId, layout);
  if (!info.ok()) return refused(info.status());
  TERRACE_CHECK(info->rows > 0 && info->deletions <= info->rows);
  TERRACE_CHECK(info->bytes == bytes.size() && layout.FileBytes(info->rows) == bytes.size());
  TERRACE_CHECK(info->keys_offset + info->rows * kKeyEntryBytes <= bytes.size() - kBlockBytes);
  TERRACE_CHECK(info->min_sequence <= info->max_sequence && info->max_sequence <= kMaxSequence);
  const Status checked = CheckHeader(header, "/rows", *info, layout);
  return checked.ok() ? 0 : refused(checked);
}

}  // namespace
}  // namespace terrace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return terrace::Fuzz(std::as_bytes(std::span(data, size)));
}
