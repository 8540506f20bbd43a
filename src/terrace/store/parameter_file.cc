#include "terrace/store/parameter_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include "terrace/base/check.h"
#include "terrace/base/rng.h"
#include "terrace/io/framed_file.h"
#include "terrace/store/radix_sort.h"

namespace terrace {
namespace {

constexpr char kHeaderMagic[8] = {'T', 'E', 'R', 'R', 'R', 'O', 'W', 'S'};
constexpr char kFooterMagic[8] = {'T', 'E', 'R', 'R', 'R', 'O', 'W', 'E'};
constexpr std::size_t kTableNameBytes = 64;
// Every version keeps magic, version and this place of the block's checksum.
constexpr std::size_t kBlockChecksumOffset = kBlockBytes - 8;

struct HeaderBlock {
  char magic[8];
  std::uint32_t version;
  std::uint32_t shard;
  std::uint64_t file_id;
  std::uint64_t table_hash;
  std::uint32_t row_bytes;
  std::uint32_t record_bytes;
  char table[kTableNameBytes];  // Its first bytes, for a person; zeros behind.
};
static_assert(sizeof(HeaderBlock) == 104 && offsetof(HeaderBlock, table) == 40);

struct FooterBlock {
  char magic[8];
  std::uint32_t version;
  std::uint32_t shard;
  std::uint64_t file_id;
  std::uint64_t table_hash;
  std::uint32_t row_bytes;
  std::uint32_t record_bytes;
  std::uint64_t rows;
  std::uint64_t deletions;
  std::uint64_t min_sequence;
  std::uint64_t max_sequence;
  std::uint64_t keys_offset;
  std::uint64_t file_bytes;
  std::uint64_t records_checksum;
  std::uint64_t keys_checksum;
  std::uint64_t header_checksum;
};
static_assert(sizeof(FooterBlock) == 112 && offsetof(FooterBlock, rows) == 40);

std::uint64_t SealBlock(std::byte* block) {
  const std::uint64_t checksum = Checksum64({block, kBlockChecksumOffset});
  std::memcpy(block + kBlockChecksumOffset, &checksum, 8);
  return checksum;
}

// Checks what all versions of a block share; `offset` is the block's in its file.
Result<std::uint64_t> CheckBlock(std::span<const std::byte> block, const char* magic,
                                 std::string_view what, const std::string& path,
                                 std::uint64_t offset) {
  std::uint64_t checksum;
  std::memcpy(&checksum, block.data() + kBlockChecksumOffset, 8);
  if (std::memcmp(block.data(), magic, 8) != 0) {
    return CorruptionError(
        fmt::format("{}: no {} of a parameter file at offset {}", path, what, offset));
  }
  if (Checksum64(block.first(kBlockChecksumOffset)) != checksum) {
    return CorruptionError(
        fmt::format("{}: the {} at offset {} fails its checksum", path, what, offset));
  }
  std::uint32_t version;
  std::memcpy(&version, block.data() + 8, 4);
  if (version > kParameterFileVersion) {
    return InvalidArgumentError(
        fmt::format("{}: format version {} was written by a newer version of the program, which "
                    "must be used to read it (this one reads up to {})",
                    path, version, kParameterFileVersion));
  }
  if (version == 0) {
    return CorruptionError(fmt::format("{}: the {} has format version 0", path, what));
  }
  return checksum;
}

template <typename Block>
Status CheckIdentity(const Block& block, std::uint64_t id, const RecordLayout& layout,
                     const std::string& path) {
  if (block.table_hash != layout.table_hash || block.shard != layout.shard) {
    return InvalidArgumentError(
        fmt::format("{}: belongs to another table or shard than '{}', shard {}", path, layout.table,
                    layout.shard));
  }
  if (block.row_bytes != layout.row_bytes || block.record_bytes != layout.record_bytes) {
    return InvalidArgumentError(fmt::format(
        "{}: has rows of {} bytes (records of {}), table '{}' of {} ({})", path, block.row_bytes,
        block.record_bytes, layout.table, layout.row_bytes, layout.record_bytes));
  }
  if (block.file_id != id) {
    return CorruptionError(
        fmt::format("{}: says that it is file {}, not {}", path, block.file_id, id));
  }
  return OkStatus();
}

}  // namespace

RecordLayout RecordLayout::Of(std::string_view table, std::uint32_t shard,
                              std::uint32_t row_bytes) {
  RecordLayout layout;
  layout.table = std::string(table);
  layout.table_hash = HashName(table);
  layout.shard = shard;
  layout.row_bytes = row_bytes;
  layout.record_bytes = static_cast<std::uint32_t>(kRecordHeadBytes + AlignUp(row_bytes, 8));
  return layout;
}

std::uint64_t RecordLayout::CheckSeed(std::uint64_t file_id) const {
  return HashCombine(HashCombine(table_hash, shard), file_id);
}

std::string ParameterFileName(std::uint64_t id) { return fmt::format("rows-{:010}", id); }

std::uint64_t RecordCheck(const std::byte* record, std::uint32_t record_bytes, std::uint64_t seed) {
  return XXH3_64bits(record + 8, record_bytes - 8) ^ seed;
}

Status CheckRecord(const std::byte* record, const RecordLayout& layout, std::uint64_t seed,
                   const std::string& path, std::uint64_t offset, const Key* wanted) {
  if (HeadOf(record).check == RecordCheck(record, layout.record_bytes, seed)) [[likely]] {
    return OkStatus();
  }
  return CorruptionError(fmt::format("{}: the record at offset {}{} fails its check", path, offset,
                                     wanted ? fmt::format(" (key {:#x})", *wanted) : ""));
}

struct RunningChecksum::State {
  XXH3_state_t xxh;
};

RunningChecksum::RunningChecksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh);
}
RunningChecksum::~RunningChecksum() = default;
void RunningChecksum::Update(std::span<const std::byte> data) {
  XXH3_64bits_update(&state_->xxh, data.data(), data.size());
}
std::uint64_t RunningChecksum::Digest() const { return XXH3_64bits_digest(&state_->xxh); }

ParameterFileWriter::ParameterFileWriter(std::unique_ptr<File> file, const RecordLayout& layout,
                                         std::uint64_t file_id, KeyEntries* keys, WriteRing* ring)
    : file_(std::move(file)),
      layout_(layout),
      seed_(layout.CheckSeed(file_id)),
      ring_(ring),
      buffer_(ring->part()),
      keys_(*keys),
      record_(layout.record_bytes),
      section_(std::make_unique<RunningChecksum>()) {
  TERRACE_CHECK(buffer_.size() >= kBlockBytes && buffer_.size() % kBlockBytes == 0);
  keys_.entries.clear();
  info_.id = file_id;
  HeaderBlock header{};
  std::memcpy(header.magic, kHeaderMagic, 8);
  header.version = kParameterFileVersion;
  header.shard = layout.shard;
  header.file_id = file_id;
  header.table_hash = layout.table_hash;
  header.row_bytes = layout.row_bytes;
  header.record_bytes = layout.record_bytes;
  std::memcpy(header.table, layout.table.data(), std::min(layout.table.size(), kTableNameBytes));
  std::memset(buffer_.data(), 0, kBlockBytes);
  std::memcpy(buffer_.data(), &header, sizeof header);
  info_.header_checksum = SealBlock(buffer_.data());
  fill_ = hashed_ = kBlockBytes;
}

ParameterFileWriter::~ParameterFileWriter() {
  // A failure here is one of a file that its owner gives up.
  if (file_ != nullptr) (void)ring_->Await();
}

void ParameterFileWriter::HashPending() {
  section_->Update(buffer_.subspan(hashed_, fill_ - hashed_));
  hashed_ = fill_;
}

Status ParameterFileWriter::Flush() {
  if (fill_ == 0) return OkStatus();
  HashPending();
  const std::uint64_t bytes = std::exchange(fill_, 0);
  hashed_ = 0;
  const Status status = ring_->Write(file_.get(), std::exchange(offset_, offset_ + bytes), bytes);
  buffer_ = ring_->part();
  return status;
}

Status ParameterFileWriter::Append(std::span<const std::byte> data) {
  while (!data.empty()) {
    const std::size_t part = std::min(data.size(), buffer_.size() - fill_);
    std::memcpy(buffer_.data() + fill_, data.data(), part);
    fill_ += part;
    data = data.subspan(part);
    if (fill_ == buffer_.size()) TERRACE_RETURN_IF_ERROR(Flush());
  }
  return OkStatus();
}

Status ParameterFileWriter::AppendZeros(std::uint64_t bytes) {
  // Less than a block: the end of a section.
  const std::vector<std::byte> zeros(bytes);
  return Append(zeros);
}

void ParameterFileWriter::Enter(Key key, std::uint64_t version) {
  const std::uint64_t row = rows();
  TERRACE_DCHECK(row < kMaxRowsPerFile);
  const std::uint64_t hash = MixKey(key);
  sorted_ &= row == 0 || last_hash_ < hash;
  last_hash_ = hash;
  const std::uint64_t sequence = SequenceOf(version);
  if (row == 0) info_.min_sequence = info_.max_sequence = sequence;
  info_.min_sequence = std::min(info_.min_sequence, sequence);
  info_.max_sequence = std::max(info_.max_sequence, sequence);
  if (IsDeletion(version)) ++info_.deletions;
  keys_.entries.push_back({key, version | row << kSequenceBits});
}

Status ParameterFileWriter::TakeRecord(const std::byte* record) {
  if (record == record_.data()) return Append(record_);
  fill_ += layout_.record_bytes;
  return OkStatus();
}

Status ParameterFileWriter::Add(Key key, std::uint64_t version,
                                std::span<const std::byte> payload) {
  Enter(key, version);
  std::byte* const record = NextRecord();
  RecordHead head;
  head.key = key;
  head.version = version;
  std::memcpy(record, &head, sizeof head);
  std::byte* rest = record + sizeof head;
  if (!payload.empty()) std::memcpy(rest, payload.data(), payload.size());
  std::memset(rest + payload.size(), 0, layout_.record_bytes - sizeof head - payload.size());
  head.check = RecordCheck(record, layout_.record_bytes, seed_);
  std::memcpy(record, &head.check, 8);
  return TakeRecord(record);
}

Status ParameterFileWriter::Copy(const std::byte* record, std::uint64_t seed) {
  const RecordHead head = HeadOf(record);
  Enter(head.key, head.version);
  std::byte* const copy = NextRecord();
  std::memcpy(copy, record, layout_.record_bytes);
  const std::uint64_t check = head.check ^ seed ^ seed_;
  std::memcpy(copy, &check, 8);
  return TakeRecord(copy);
}

Result<ParameterFileInfo> ParameterFileWriter::Finish() {
  info_.rows = rows();
  if (!sorted_) {
    SortSpread(&keys_.entries, &keys_.spare, 64,
               [](const KeyEntry& entry) { return MixKey(entry.key); });
  }
  info_.keys_offset = layout_.KeysOffset(info_.rows);
  info_.bytes = layout_.FileBytes(info_.rows);
  TERRACE_RETURN_IF_ERROR(AppendZeros(info_.keys_offset - (offset_ + fill_)));
  HashPending();
  info_.records_checksum = section_->Digest();
  section_ = std::make_unique<RunningChecksum>();
  TERRACE_RETURN_IF_ERROR(Append(std::as_bytes(std::span(keys_.entries))));
  TERRACE_RETURN_IF_ERROR(AppendZeros(info_.bytes - kBlockBytes - (offset_ + fill_)));
  HashPending();
  info_.keys_checksum = section_->Digest();

  FooterBlock footer{};
  std::memcpy(footer.magic, kFooterMagic, 8);
  footer.version = kParameterFileVersion;
  footer.shard = layout_.shard;
  footer.file_id = info_.id;
  footer.table_hash = layout_.table_hash;
  footer.row_bytes = layout_.row_bytes;
  footer.record_bytes = layout_.record_bytes;
  footer.rows = info_.rows;
  footer.deletions = info_.deletions;
  footer.min_sequence = info_.min_sequence;
  footer.max_sequence = info_.max_sequence;
  footer.keys_offset = info_.keys_offset;
  footer.file_bytes = info_.bytes;
  footer.records_checksum = info_.records_checksum;
  footer.keys_checksum = info_.keys_checksum;
  footer.header_checksum = info_.header_checksum;
  std::vector<std::byte> block(kBlockBytes);
  std::memcpy(block.data(), &footer, sizeof footer);
  info_.footer_checksum = SealBlock(block.data());
  TERRACE_RETURN_IF_ERROR(Append(block));
  TERRACE_RETURN_IF_ERROR(Flush());
  TERRACE_ASSIGN_OR_RETURN(const std::uint64_t length, file_->Size());
  if (length > info_.bytes) TERRACE_RETURN_IF_ERROR(file_->Truncate(info_.bytes));
  return info_;
}

Result<ParameterFileInfo> ReadFooter(File* file, std::uint64_t bytes, std::uint64_t id,
                                     const RecordLayout& layout) {
  const std::string& path = file->path();
  TERRACE_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
  if (size != bytes || size < 2 * kBlockBytes || size % kBlockBytes != 0) {
    return CorruptionError(
        fmt::format("{}: has {} bytes where the manifest says {}", path, size, bytes));
  }
  TERRACE_ASSIGN_OR_RETURN(HugeBuffer buffer, HugeBuffer::Allocate(kBlockBytes));
  const std::span<std::byte> block = buffer.span().first(kBlockBytes);
  const std::uint64_t offset = size - kBlockBytes;
  TERRACE_RETURN_IF_ERROR(ReadFully(file, offset, block));
  ParameterFileInfo info;
  TERRACE_ASSIGN_OR_RETURN(info.footer_checksum,
                           CheckBlock(block, kFooterMagic, "footer", path, offset));
  FooterBlock footer;
  std::memcpy(&footer, block.data(), sizeof footer);
  TERRACE_RETURN_IF_ERROR(CheckIdentity(footer, id, layout, path));
  info.id = id;
  info.version = footer.version;
  info.bytes = size;
  info.rows = footer.rows;
  info.deletions = footer.deletions;
  info.min_sequence = footer.min_sequence;
  info.max_sequence = footer.max_sequence;
  info.keys_offset = footer.keys_offset;
  info.records_checksum = footer.records_checksum;
  info.keys_checksum = footer.keys_checksum;
  info.header_checksum = footer.header_checksum;
  if (info.rows == 0 || info.rows > kMaxRowsPerFile || info.deletions > info.rows ||
      info.min_sequence > info.max_sequence || info.max_sequence > kMaxSequence ||
      info.keys_offset != layout.KeysOffset(info.rows) || size != layout.FileBytes(info.rows) ||
      footer.file_bytes != size) {
    return CorruptionError(
        fmt::format("{}: the footer at offset {} contradicts itself", path, offset));
  }
  return info;
}

bool IsHeader(std::span<const std::byte> block) {
  return CheckBlock(block, kHeaderMagic, "header", "", 0).ok();
}

bool IsFooter(std::span<const std::byte> block) {
  return CheckBlock(block, kFooterMagic, "footer", "", 0).ok();
}

std::uint32_t HeaderVersion(std::span<const std::byte> block) {
  std::uint32_t version;
  std::memcpy(&version, block.data() + offsetof(HeaderBlock, version), sizeof version);
  return version;
}

Status CheckHeader(std::span<const std::byte> block, const std::string& path,
                   const ParameterFileInfo& info, const RecordLayout& layout) {
  TERRACE_ASSIGN_OR_RETURN(const std::uint64_t checksum,
                           CheckBlock(block, kHeaderMagic, "header", path, 0));
  HeaderBlock header;
  std::memcpy(&header, block.data(), sizeof header);
  TERRACE_RETURN_IF_ERROR(CheckIdentity(header, info.id, layout, path));
  if (checksum != info.header_checksum) {
    return CorruptionError(
        fmt::format("{}: the header at offset 0 is not the one that the footer names", path));
  }
  return OkStatus();
}

}  // namespace terrace
