// Parameter file: the immutable file of rows (docs/formats/parameter_file.md): a header block,
// records in any order, their keys alone in the order of MixKey(key), a footer block. Threads: a
// writer is one thread's; an open file is read by any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/io/write_queue.h"
#include "terrace/store/index.h"

namespace terrace {

inline constexpr std::uint32_t kParameterFileVersion = 2;
inline constexpr std::uint64_t kBlockBytes = kDirectIoAlignment;
inline constexpr std::uint64_t kRecordHeadBytes = 24;  // Check, key, version.
inline constexpr std::uint64_t kKeyEntryBytes = 16;
// A row longer than this is no embedding; it bounds the least buffer.
inline constexpr std::uint32_t kMaxRowBytes = 256 << 10;

// Age and kind of a record in one word: the sequence in 36 bits, a deletion in bit 63. In an entry
// of the key section the record's number stands between them, except in files of version 1.
inline constexpr std::uint64_t kDeletionBit = std::uint64_t{1} << 63;
inline constexpr int kSequenceBits = 36;
inline constexpr std::uint64_t kMaxSequence = (std::uint64_t{1} << kSequenceBits) - 1;
inline constexpr std::uint64_t kEntryRowMask = (kMaxRowsPerFile - 1) << kSequenceBits;
constexpr std::uint64_t SequenceOf(std::uint64_t version) { return version & kMaxSequence; }
constexpr bool IsDeletion(std::uint64_t version) { return (version & kDeletionBit) != 0; }

// What all files of one store share.
struct RecordLayout {
  std::string table;
  std::uint64_t table_hash = 0;
  std::uint32_t shard = 0;
  std::uint32_t row_bytes = 0;
  std::uint32_t record_bytes = 0;

  static RecordLayout Of(std::string_view table, std::uint32_t shard, std::uint32_t row_bytes);
  // XORed into the check of every record of this file, so that a record of another one fails it.
  std::uint64_t CheckSeed(std::uint64_t file_id) const;
  std::uint64_t RecordOffset(std::uint64_t row) const { return kBlockBytes + row * record_bytes; }
  std::uint64_t KeysOffset(std::uint64_t rows) const {
    return kBlockBytes + AlignUp(rows * record_bytes, kBlockBytes);
  }
  std::uint64_t FileBytes(std::uint64_t rows) const {
    return KeysOffset(rows) + AlignUp(rows * kKeyEntryBytes, kBlockBytes) + kBlockBytes;
  }
};

struct RecordHead {
  std::uint64_t check = 0;  // Of all that follows, to the end of the record.
  Key key = 0;
  std::uint64_t version = 0;
};
static_assert(sizeof(RecordHead) == kRecordHeadBytes && alignof(RecordHead) == 8);

struct KeyEntry {
  Key key = 0;
  std::uint64_t version = 0;
};
static_assert(sizeof(KeyEntry) == kKeyEntryBytes);

// In a file of version 1 entry i is that of record i.
constexpr bool EntriesHaveRows(std::uint32_t file_version) { return file_version > 1; }
// Which record entry `i` of a file of such a version is of, and that record's version.
constexpr std::uint64_t RowOfEntry(std::uint32_t file_version, std::uint64_t i,
                                   std::uint64_t entry_version) {
  return EntriesHaveRows(file_version) ? (entry_version & kEntryRowMask) >> kSequenceBits : i;
}
constexpr std::uint64_t VersionOfEntry(std::uint32_t file_version, std::uint64_t entry_version) {
  return EntriesHaveRows(file_version) ? entry_version & ~kEntryRowMask : entry_version;
}

// What a file is, as its footer says.
struct ParameterFileInfo {
  std::uint64_t id = 0;
  std::uint32_t version = kParameterFileVersion;
  std::uint64_t bytes = 0;
  std::uint64_t rows = 0;
  std::uint64_t deletions = 0;
  std::uint64_t min_sequence = 0;
  std::uint64_t max_sequence = 0;
  std::uint64_t keys_offset = 0;
  std::uint64_t records_checksum = 0;
  std::uint64_t keys_checksum = 0;
  std::uint64_t header_checksum = 0;
  std::uint64_t footer_checksum = 0;
};

std::string ParameterFileName(std::uint64_t id);

// The check of a record as it stands in a file of this seed.
std::uint64_t RecordCheck(const std::byte* record, std::uint32_t record_bytes, std::uint64_t seed);
// Head and payload of a record. The payload lies behind the head.
inline RecordHead HeadOf(const std::byte* record) {
  RecordHead head;
  __builtin_memcpy(&head, record, sizeof head);
  return head;
}
// OK, or kCorruption naming file, offset and, if given, the key that is wanted of it. Of which key
// the record is, its head says.
Status CheckRecord(const std::byte* record, const RecordLayout& layout, std::uint64_t seed,
                   const std::string& path, std::uint64_t offset, const Key* wanted);

// Streaming XXH3-64.
class RunningChecksum {
 public:
  RunningChecksum();
  ~RunningChecksum();
  RunningChecksum(const RunningChecksum&) = delete;
  RunningChecksum& operator=(const RunningChecksum&) = delete;
  void Update(std::span<const std::byte> data);
  std::uint64_t Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The entries of a file in the making, and what sorts them.
struct KeyEntries {
  std::vector<KeyEntry> entries, spare;
};

// Writes one file in one sequential pass of whole buffers. Add and Finish return the first failure
// that is known by then.
class ParameterFileWriter {
 public:
  // `file`: empty, or to be overwritten. `keys`: gathers the key section; what it held goes, and
  // its memory serves the next file. `ring`: aligned, its grain a block. Both are borrowed until
  // destruction.
  ParameterFileWriter(std::unique_ptr<File> file, const RecordLayout& layout, std::uint64_t file_id,
                      KeyEntries* keys, WriteRing* ring);
  ~ParameterFileWriter();  // Of a file that was not taken: waits for what is being written.
  // Its row is rows(). REQUIRES: no two of a key, at most kMaxRowsPerFile; payload of row_bytes, or
  // empty for a deletion.
  Status Add(Key key, std::uint64_t version, std::span<const std::byte> payload);
  // Adds a record of another file, of this seed, as it stands there. REQUIRES: as Add, and that its
  // check holds.
  Status Copy(const std::byte* record, std::uint64_t seed);
  std::uint64_t rows() const { return keys_.entries.size(); }
  // Writes what is left, key section and footer, and cuts off what an overwritten file had behind
  // them. The file is whole once the ring has been awaited, not yet durable.
  Result<ParameterFileInfo> Finish();
  // It stays open until the ring has been awaited. REQUIRES: after Finish.
  std::unique_ptr<File> TakeFile() { return std::move(file_); }

 private:
  // The key section's entry of the next record.
  void Enter(Key key, std::uint64_t version);
  // Where the next record is to be made, and that it is.
  std::byte* NextRecord() {
    return buffer_.size() - fill_ > layout_.record_bytes ? buffer_.data() + fill_ : record_.data();
  }
  Status TakeRecord(const std::byte* record);
  Status Append(std::span<const std::byte> data);
  Status AppendZeros(std::uint64_t bytes);
  Status Flush();
  // Takes what the buffer holds since the last call into the section's checksum.
  void HashPending();

  std::unique_ptr<File> file_;
  const RecordLayout layout_;
  const std::uint64_t seed_;
  WriteRing* const ring_;
  std::span<std::byte> buffer_;  // The part that is filled.
  ParameterFileInfo info_;
  KeyEntries& keys_;
  std::uint64_t last_hash_ = 0;
  bool sorted_ = true;  // So far the keys came in their order.
  std::vector<std::byte> record_;
  std::unique_ptr<RunningChecksum> section_;
  std::uint64_t offset_ = 0;  // In the file, of the buffer's first byte.
  std::size_t fill_ = 0;
  std::size_t hashed_ = 0;  // Up to here the buffer is in the section's checksum.
};

// Reads and checks the footer of an open file of `bytes` bytes. kCorruption names file and offset;
// kInvalidArgument: a newer format, another table, shard or row length.
Result<ParameterFileInfo> ReadFooter(File* file, std::uint64_t bytes, std::uint64_t id,
                                     const RecordLayout& layout);
// Whether a block is as some file's header or footer was written.
bool IsHeader(std::span<const std::byte> block);
bool IsFooter(std::span<const std::byte> block);
// Of a header block that holds.
std::uint32_t HeaderVersion(std::span<const std::byte> block);
// Checks the header block, likewise.
Status CheckHeader(std::span<const std::byte> block, const std::string& path,
                   const ParameterFileInfo& info, const RecordLayout& layout);

}  // namespace terrace
