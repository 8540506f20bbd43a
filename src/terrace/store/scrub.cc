#include "terrace/store/scrub.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/store/index.h"
#include "terrace/store/section_cursor.h"

namespace terrace {
namespace {

// Of the two buffers; more gains nothing on a disk that is read from front to end.
constexpr std::uint64_t kRecordBufferBytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kKeyBufferBytes = std::uint64_t{128} << 10;

// Takes findings, or nothing.
class Findings {
 public:
  Findings(std::vector<Finding>* list, const std::string& path) : list_(list), path_(path) {}
  void Add(std::uint64_t offset, std::string what) {
    if (list_ != nullptr) list_->push_back({path_, offset, std::move(what)});
  }

 private:
  std::vector<Finding>* const list_;
  const std::string& path_;
};

// Walks the entries of one section. Bytes that the disk does not give are zeros, block by block,
// and told; what lies beyond the end of the file is zeros too.
class SalvageSection {
 public:
  SalvageSection(File* file, std::uint64_t offset, std::uint64_t entry_bytes, std::uint64_t entries,
                 std::span<std::byte> buffer, Findings* findings)
      : file_(file),
        entry_bytes_(entry_bytes),
        end_(offset + AlignUp(entries * entry_bytes, kBlockBytes)),
        buffer_(buffer),
        findings_(findings),
        next_read_(offset),
        entry_(entry_bytes) {}

  // The next entry, valid until the call after. REQUIRES: fewer than `entries` calls before.
  const std::byte* Next() {
    if (fill_ - at_ >= entry_bytes_) {
      const std::byte* entry = buffer_.data() + at_;
      at_ += entry_bytes_;
      return entry;
    }
    for (std::uint64_t done = 0; done < entry_bytes_;) {
      if (at_ == fill_) Read();
      const std::uint64_t part = std::min(fill_ - at_, entry_bytes_ - done);
      std::memcpy(entry_.data() + done, buffer_.data() + at_, part);
      at_ += part;
      done += part;
    }
    return entry_.data();
  }

  // Reads what is left, padding included, and gives the checksum of the whole section.
  std::uint64_t Finish() {
    while (next_read_ < end_) Read();
    EndUnreadable();
    return checksum_.Digest();
  }

 private:
  void Read() {
    const std::uint64_t bytes = std::min<std::uint64_t>(buffer_.size(), end_ - next_read_);
    const std::span<std::byte> part = buffer_.first(bytes);
    const Result<std::size_t> got = file_->ReadAt(next_read_, part);
    if (got.ok()) {
      EndUnreadable();
      std::memset(part.data() + *got, 0, bytes - *got);
    } else {
      ReadBlocks(part);
    }
    checksum_.Update(part);
    next_read_ += bytes;
    at_ = 0;
    fill_ = bytes;
  }

  void ReadBlocks(std::span<std::byte> part) {
    for (std::uint64_t at = 0; at < part.size(); at += kBlockBytes) {
      const std::span<std::byte> block = part.subspan(at, kBlockBytes);
      const Result<std::size_t> got = file_->ReadAt(next_read_ + at, block);
      if (got.ok()) {
        EndUnreadable();
        std::memset(block.data() + *got, 0, block.size() - *got);
        continue;
      }
      std::memset(block.data(), 0, block.size());
      if (unreadable_bytes_ == 0) {
        unreadable_at_ = next_read_ + at;
        unreadable_why_ = got.status().message();
      }
      unreadable_bytes_ += block.size();
    }
  }

  void EndUnreadable() {
    if (unreadable_bytes_ == 0) return;
    findings_->Add(unreadable_at_,
                   fmt::format("{} bytes can't be read: {}", unreadable_bytes_, unreadable_why_));
    unreadable_bytes_ = 0;
  }

  File* const file_;
  const std::uint64_t entry_bytes_;
  const std::uint64_t end_;
  const std::span<std::byte> buffer_;
  Findings* const findings_;
  std::uint64_t next_read_;          // In the file.
  std::uint64_t at_ = 0, fill_ = 0;  // In the buffer.
  std::vector<std::byte> entry_;     // One that lies across two buffers.
  RunningChecksum checksum_;
  std::uint64_t unreadable_at_ = 0, unreadable_bytes_ = 0;  // The blocks being counted.
  std::string unreadable_why_;
};

// The entries of a key section, all of them, and which record each is of.
class KeyTable {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  // version: of the format; nothing where the file no longer tells.
  KeyTable(File* disk, std::uint64_t offset, std::uint64_t rows,
           std::optional<std::uint32_t> version, std::span<std::byte> buffer, Findings* findings)
      : entries_(rows), of_row_(rows, kNone) {
    SalvageSection section(disk, offset, kKeyEntryBytes, rows, buffer, findings);
    std::uint64_t row_bits = 0;
    for (KeyEntry& entry : entries_) {
      std::memcpy(&entry, section.Next(), sizeof entry);
      row_bits |= entry.version & kEntryRowMask;
    }
    checksum_ = section.Finish();
    version_ = version.value_or(row_bits != 0 ? kParameterFileVersion : 1);
    std::vector<bool> claimed(rows);
    for (std::uint32_t i = 0; i < rows; ++i) {
      const std::uint64_t row = RowOfEntry(version_, i, entries_[i].version);
      if (row >= rows) continue;
      // Of two that say so at least one is damaged.
      of_row_[row] = claimed[row] ? kNone : i;
      claimed[row] = true;
    }
  }

  std::uint64_t checksum() const { return checksum_; }
  std::uint32_t version() const { return version_; }
  std::uint64_t size() const { return entries_.size(); }
  // kNone: none that says so.
  std::uint32_t EntryOf(std::uint64_t row) const { return of_row_[row]; }
  Key key(std::uint32_t i) const { return entries_[i].key; }
  // Of which record it says that it is; any number where it is damaged.
  std::uint64_t row(std::uint32_t i) const { return RowOfEntry(version_, i, entries_[i].version); }
  // Of the record.
  std::uint64_t record_version(std::uint32_t i) const {
    return VersionOfEntry(version_, entries_[i].version);
  }

 private:
  std::vector<KeyEntry> entries_;
  std::vector<std::uint32_t> of_row_;
  std::uint64_t checksum_ = 0;
  std::uint32_t version_ = 0;
};

bool IsPossible(std::uint64_t version, std::uint64_t most_sequence) {
  return (version & ~(kDeletionBit | kMaxSequence)) == 0 && SequenceOf(version) > 0 &&
         SequenceOf(version) <= most_sequence;
}

// Damaged records side by side make one finding.
class DamagedStretch {
 public:
  explicit DamagedStretch(Findings* findings) : findings_(findings) {}
  void Add(std::uint64_t offset) {
    if (records_ == 0) offset_ = offset;
    ++records_;
  }
  void End() {
    if (records_ == 1) {
      findings_->Add(offset_, fmt::format("the record at offset {} fails its check", offset_));
    } else if (records_ > 1) {
      findings_->Add(offset_, fmt::format("{} records from offset {} on fail their checks",
                                          records_, offset_));
    }
    records_ = 0;
  }

 private:
  Findings* const findings_;
  std::uint64_t offset_ = 0, records_ = 0;
};

struct WalkResult {
  std::uint64_t records_checksum = 0;
  std::vector<UnknownRecords> unknown;
};

// Where the records that nothing tells the keys of lie. known: by entry, whether it is of a record
// whose key is known; strays: the hashes of records whose entries are damaged, sorted. kCorruption:
// entries out of order, which no damage explains.
Result<std::vector<UnknownRecords>> FindUnknown(const KeyTable& table,
                                                const std::vector<bool>& known,
                                                const std::vector<std::uint64_t>& strays,
                                                const std::string& path,
                                                std::uint64_t keys_offset) {
  std::vector<UnknownRecords> unknown;
  std::uint64_t open = 0, least = 0;
  bool first = true;
  const auto close = [&](std::uint64_t most) {
    const auto begin = std::lower_bound(strays.begin(), strays.end(), least);
    const auto end = std::upper_bound(strays.begin(), strays.end(), most);
    const auto here = static_cast<std::uint64_t>(std::max<std::ptrdiff_t>(0, end - begin));
    if (open > here) unknown.push_back({open - here, least, most});
    open = 0;
  };
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (!known[i]) {
      ++open;
      continue;
    }
    const std::uint64_t hash = MixKey(table.key(i));
    if (!first && hash < least) {
      return CorruptionError(fmt::format("{}: the keys at offset {} are out of order", path,
                                         keys_offset + i * kKeyEntryBytes));
    }
    if (open > 0) close(hash - 1);
    least = hash + 1;
    first = false;
  }
  if (open > 0) close(~std::uint64_t{0});
  return unknown;
}

// Whether there are records or keys of another file. As the check of a record has the number of its
// file in it, that tells two of them: of damaged ones it would be as many numbers. Two entries tell
// that could be some file's and say another key and another age than the whole record does whose
// they are: damage changes one of the two, or whose they are, or makes of both what no file has.
bool HasPartsOfAnother(File* disk, const RecordLayout& layout, const Manifest::File& file,
                       const KeyTable& table, std::uint64_t most_sequence, ScrubBuffers* buffers) {
  Findings nowhere(nullptr, "");
  SalvageSection records(disk, kBlockBytes, layout.record_bytes, file.rows, buffers->records(),
                         &nowhere);
  const std::uint64_t seed = layout.CheckSeed(file.id);
  // Of a whole record key and version, of another one its seed and sum.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> of_rows(file.rows);
  std::vector<bool> whole(file.rows);
  for (std::uint64_t row = 0; row < file.rows; ++row) {
    const std::byte* record = records.Next();
    const RecordHead head = HeadOf(record);
    const std::uint64_t sum = RecordCheck(record, layout.record_bytes, /*seed=*/0);
    whole[row] = (head.check ^ sum) == seed;
    of_rows[row] =
        whole[row] ? std::pair(head.key, head.version) : std::pair(head.check ^ sum, sum);
  }
  const auto is_here = [&](Key key, std::uint64_t version) {
    for (std::uint64_t row = 0; row < file.rows; ++row) {
      if (whole[row] && of_rows[row] == std::pair(key, version)) return true;
    }
    return false;
  };
  constexpr int kMostSought = 1000;  // Each of which is looked for among all records.
  int strange = 0, sought = 0;
  for (std::uint32_t i = 0; i < table.size() && strange < 2; ++i) {
    const std::uint64_t row = table.row(i), version = table.record_version(i);
    if (row >= file.rows || !whole[row] || !IsPossible(version, most_sequence)) continue;
    if (of_rows[row].first == table.key(i) || of_rows[row].second == version) continue;
    strange += ++sought <= kMostSought && is_here(table.key(i), version) ? 0 : 1;
  }
  if (strange > 1) return true;
  std::uint64_t others = 0;
  for (std::uint64_t row = 0; row < file.rows; ++row) {
    if (!whole[row]) of_rows[others++] = of_rows[row];
  }
  const std::span of_others = std::span(of_rows).first(others);
  std::sort(of_others.begin(), of_others.end());
  for (std::size_t i = 1; i < of_others.size(); ++i) {
    // Equal ones, such as zeros, tell nothing.
    if (of_others[i - 1].first == of_others[i].first && of_others[i - 1] != of_others[i])
      return true;
  }
  return false;
}

// Tells each record apart.
Result<WalkResult> Walk(File* disk, const ScrubOptions& options, const FileScrub& scrub,
                        const KeyTable& table, ScrubBuffers* buffers, Findings* findings,
                        const std::function<Status(const SalvagedRecord&)>& visit) {
  const RecordLayout& layout = options.layout;
  const std::uint64_t seed = layout.CheckSeed(scrub.file.id);
  const std::uint64_t keys_offset = layout.KeysOffset(scrub.file.rows);
  SalvageSection records(disk, kBlockBytes, layout.record_bytes, scrub.file.rows,
                         buffers->records(), findings);
  DamagedStretch stretch(findings);
  std::vector<bool> known(table.size());
  std::vector<std::uint64_t> strays;
  for (std::uint64_t row = 0; row < scrub.file.rows; ++row) {
    const std::byte* record = records.Next();
    const RecordHead head = HeadOf(record);
    const std::uint64_t offset = layout.RecordOffset(row);
    const std::uint32_t entry = table.EntryOf(row);
    const bool agree = entry != KeyTable::kNone && head.key == table.key(entry) &&
                       head.version == table.record_version(entry);
    SalvagedRecord salvaged;
    if (head.check == RecordCheck(record, layout.record_bytes, seed)) {
      stretch.End();
      salvaged.state = SalvagedRecord::State::kWhole;
      salvaged.key = head.key;
      salvaged.version = head.version;
      if (!IsDeletion(head.version)) {
        salvaged.payload = std::span(record + kRecordHeadBytes, layout.row_bytes);
      }
      if (agree) {
        known[entry] = true;
      } else {
        strays.push_back(MixKey(head.key));
        findings->Add(keys_offset + (entry == KeyTable::kNone ? 0 : entry * kKeyEntryBytes),
                      entry == KeyTable::kNone
                          ? fmt::format("the key section does not say where key {:#x} is, which "
                                        "the record at offset {} has",
                                        head.key, offset)
                          : fmt::format("the key section says key {:#x}, version {:#x}; the record "
                                        "at offset {} says key {:#x}, version {:#x}",
                                        table.key(entry), table.record_version(entry), offset,
                                        head.key, head.version));
      }
    } else {
      stretch.Add(offset);
      // Two copies that were damaged and agree all the same do not exist, unless both are another
      // file's.
      if (entry != KeyTable::kNone && (scrub.keys_hold || (agree && !scrub.mixed)) &&
          IsPossible(table.record_version(entry), scrub.most_sequence)) {
        salvaged.key = table.key(entry);
        salvaged.version = table.record_version(entry);
        salvaged.state = IsDeletion(salvaged.version) ? SalvagedRecord::State::kWhole
                                                      : SalvagedRecord::State::kLost;
        known[entry] = true;
      }
    }
    TERRACE_RETURN_IF_ERROR(visit(salvaged));
  }
  stretch.End();
  WalkResult result;
  result.records_checksum = records.Finish();
  std::sort(strays.begin(), strays.end());
  TERRACE_ASSIGN_OR_RETURN(result.unknown,
                           FindUnknown(table, known, strays, scrub.path, keys_offset));
  return result;
}

// Header and footer. Fills what of the scrub follows from them.
struct Frame {
  bool footer_holds = false;
  ParameterFileInfo footer;
  std::optional<std::uint32_t> version;  // Of the format, where one of them tells.
};

Frame ScrubFrame(File* disk, const ScrubOptions& options, FileScrub* scrub, ScrubBuffers* buffers,
                 Findings* findings) {
  Frame frame;
  const Manifest::File& file = scrub->file;
  const std::uint64_t footer_at = file.bytes - kBlockBytes;
  Result<ParameterFileInfo> footer = ReadFooter(disk, file.bytes, file.id, options.layout);
  const std::span<std::byte> block = buffers->records().first(kBlockBytes);
  if (!footer.ok()) {
    findings->Add(footer_at, footer.status().message());
    if (footer.status().code() == StatusCode::kInvalidArgument) scrub->refused = footer.status();
    scrub->mixed |= ReadFully(disk, footer_at, block).ok() && IsFooter(block);
  } else if (footer->footer_checksum != file.footer_checksum || footer->rows != file.rows) {
    findings->Add(footer_at, "the footer is not the one that the manifest names");
    scrub->present = false;  // A sound file, but another one: nothing in it is what is looked for.
  } else {
    frame.footer_holds = true;
    frame.footer = *footer;
    frame.version = footer->version;
    scrub->most_sequence = footer->max_sequence;
  }
  if (const Status status = ReadFully(disk, 0, block); !status.ok()) {
    findings->Add(0, status.message());
    return frame;
  }
  ParameterFileInfo info = frame.footer;
  info.id = file.id;
  if (!frame.footer_holds) {
    // Nothing else says which header it was.
    std::memcpy(&info.header_checksum, block.data() + kBlockBytes - 8, 8);
  }
  if (const Status status = CheckHeader(block, scrub->path, info, options.layout); !status.ok()) {
    findings->Add(0, status.message());
    if (status.code() == StatusCode::kInvalidArgument) scrub->refused = status;
    scrub->mixed |= IsHeader(block);
  } else if (!frame.footer_holds) {
    frame.version = HeaderVersion(block);
  }
  return frame;
}

void Count(const SalvagedRecord& record, FileScrub* scrub, RunningChecksum* told) {
  const std::uint64_t words[] = {static_cast<std::uint64_t>(record.state), record.key,
                                 record.version};
  told->Update(std::as_bytes(std::span(words)));
  if (record.state == SalvagedRecord::State::kWhole) ++scrub->whole;
  if (record.state == SalvagedRecord::State::kLost) {
    scrub->lost.push_back({record.key, record.version});
  }
}

Result<std::unique_ptr<File>> OpenForScrub(FileSystem* fs, const ScrubOptions& options,
                                           const std::string& path) {
  return fs->Open(path, options.direct_io ? OpenMode::kReadDirect : OpenMode::kRead);
}

}  // namespace

Result<ScrubBuffers> ScrubBuffers::Allocate(const RecordLayout& layout) {
  ScrubBuffers buffers;
  buffers.record_bytes_ =
      std::max(kRecordBufferBytes, SectionCursor::LeastBuffer(layout.record_bytes));
  buffers.key_bytes_ = kKeyBufferBytes;
  TERRACE_ASSIGN_OR_RETURN(buffers.buffer_,
                           HugeBuffer::Allocate(buffers.record_bytes_ + buffers.key_bytes_));
  return buffers;
}

FileScrub ScrubFile(FileSystem* fs, const ScrubOptions& options, const Manifest::File& file,
                    ScrubBuffers* buffers) {
  FileScrub scrub;
  scrub.file = file;
  scrub.path = JoinPath(options.directory, ParameterFileName(file.id));
  Findings findings(&scrub.findings, scrub.path);
  if (file.rows == 0 || file.rows > kMaxRowsPerFile ||
      file.bytes != options.layout.FileBytes(file.rows)) {
    findings.Add(0, "the manifest's length and number of records contradict each other");
    scrub.refused = CorruptionError(scrub.path + ": " + scrub.findings.back().what);
    return scrub;
  }
  Result<std::unique_ptr<File>> disk = OpenForScrub(fs, options, scrub.path);
  Result<std::uint64_t> size = disk.ok() ? (*disk)->Size() : disk.status();
  if (!size.ok()) {
    findings.Add(0, size.status().message());
    if (size.status().code() != StatusCode::kNotFound) scrub.refused = size.status();
    scrub.unknown.push_back({file.rows});
    return scrub;
  }
  scrub.present = true;
  const Frame frame = ScrubFrame(disk->get(), options, &scrub, buffers, &findings);
  if (!scrub.refused.ok()) return scrub;
  if (!scrub.present) {
    scrub.unknown.push_back({file.rows});
    return scrub;
  }
  const std::uint64_t keys_offset = options.layout.KeysOffset(file.rows);
  const KeyTable table(disk->get(), keys_offset, file.rows, frame.version, buffers->keys(),
                       &findings);
  scrub.version = table.version();
  scrub.keys_hold = frame.footer_holds && table.checksum() == frame.footer.keys_checksum;
  if (frame.footer_holds && !scrub.keys_hold) {
    findings.Add(keys_offset, "the key section fails its checksum");
  }
  if (!scrub.keys_hold && !scrub.mixed) {
    scrub.mixed =
        HasPartsOfAnother(disk->get(), options.layout, file, table, scrub.most_sequence, buffers);
  }
  RunningChecksum told;
  Result<WalkResult> walk = Walk(disk->get(), options, scrub, table, buffers, &findings,
                                 [&](const SalvagedRecord& record) {
                                   Count(record, &scrub, &told);
                                   return OkStatus();
                                 });
  if (!walk.ok()) {
    findings.Add(keys_offset, walk.status().message());
    scrub.refused = walk.status();
    return scrub;
  }
  scrub.unknown = std::move(walk->unknown);
  scrub.told = told.Digest();
  if (frame.footer_holds && walk->records_checksum != frame.footer.records_checksum) {
    findings.Add(kBlockBytes, "the records fail their common checksum");
  }
  return scrub;
}

Status WalkSalvaged(FileSystem* fs, const ScrubOptions& options, const FileScrub& scrub,
                    ScrubBuffers* buffers,
                    const std::function<Status(const SalvagedRecord&)>& visit) {
  TERRACE_CHECK(scrub.refused.ok());
  if (!scrub.present) return OkStatus();
  TERRACE_ASSIGN_OR_RETURN(const std::unique_ptr<File> disk, OpenForScrub(fs, options, scrub.path));
  FileScrub again;
  RunningChecksum told;
  Findings nowhere(nullptr, scrub.path);
  const KeyTable table(disk.get(), options.layout.KeysOffset(scrub.file.rows), scrub.file.rows,
                       scrub.version, buffers->keys(), &nowhere);
  TERRACE_ASSIGN_OR_RETURN(WalkResult walk, Walk(disk.get(), options, scrub, table, buffers,
                                                 &nowhere, [&](const SalvagedRecord& record) {
                                                   Count(record, &again, &told);
                                                   return visit(record);
                                                 }));
  // As many may be lost as then, and be others.
  if (told.Digest() == scrub.told && walk.unknown == scrub.unknown) return OkStatus();
  return UnavailableError(fmt::format(
      "{}: reads otherwise than a moment ago ({} records whole, now {}): is the disk failing?",
      scrub.path, scrub.whole, again.whole));
}

Status ScrubManifest(FileSystem* fs, const ScrubOptions& options,
                     const ManifestReference& reference, std::vector<Finding>* findings) {
  const Result<Manifest> manifest =
      ReadManifest(fs, options.directory, reference.id, reference.digest, options.layout);
  if (!manifest.ok()) {
    findings->push_back({JoinPath(options.directory, ManifestFileName(reference.id)), 0,
                         manifest.status().message()});
    return OkStatus();
  }
  TERRACE_ASSIGN_OR_RETURN(ScrubBuffers buffers, ScrubBuffers::Allocate(options.layout));
  for (const Manifest::File& file : manifest->files) {
    FileScrub scrub = ScrubFile(fs, options, file, &buffers);
    findings->insert(findings->end(), scrub.findings.begin(), scrub.findings.end());
  }
  return OkStatus();
}

}  // namespace terrace
