#include "terrace/store/store_repair.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "terrace/base/check.h"
#include "terrace/base/clock.h"
#include "terrace/base/sync_point.h"
#include "terrace/store/index.h"
#include "terrace/store/section_cursor.h"

namespace terrace {
namespace {

// A lost record, and whether another one makes up for it.
struct Lost {
  std::uint64_t hash = 0;
  Key key = 0;
  std::uint64_t sequence = 0;
  std::uint64_t file_id = 0;
  bool replaced = false;
};

// A record that may be older than one whose key is unknown.
struct Suspect {
  std::uint64_t hash = 0;
  Key key = 0;
  std::uint64_t version = 0;
  std::uint64_t file_id = 0;
  const FileScrub* scrub = nullptr;  // Of the lost ones that it may be older than.
  bool whole = false;
};

// keys: in the order of MixKey.
bool IsAmong(const std::vector<Key>& keys, Key key) {
  const std::uint64_t hash = MixKey(key);
  const auto at =
      std::lower_bound(keys.begin(), keys.end(), hash,
                       [](Key other, std::uint64_t wanted) { return MixKey(other) < wanted; });
  return at != keys.end() && *at == key;
}

bool IsGivenUp(const StoreLosses& losses, Key key) {
  return IsAmong(losses.dropped, key) || IsAmong(losses.outdated, key);
}

class LossFinder {
 public:
  LossFinder(std::span<const FileScrub* const> damaged, bool rows_expire,
             std::uint64_t memory_bytes)
      : damaged_(damaged),
        rows_expire_(rows_expire),
        most_suspects_(memory_bytes / (sizeof(Suspect) + sizeof own_[0])) {
    for (const FileScrub* scrub : damaged) {
      for (const KeyEntry& entry : scrub->lost) {
        lost_.push_back({MixKey(entry.key), entry.key, SequenceOf(entry.version), scrub->file.id});
      }
    }
    std::sort(lost_.begin(), lost_.end(),
              [](const Lost& a, const Lost& b) { return a.hash < b.hash; });
  }

  // One record whose key is known, of any file.
  Status See(std::uint64_t file_id, Key key, std::uint64_t version, bool whole) {
    const std::uint64_t hash = MixKey(key);
    const std::uint64_t sequence = SequenceOf(version);
    auto at = std::lower_bound(lost_.begin(), lost_.end(), hash,
                               [](const Lost& lost, std::uint64_t h) { return lost.hash < h; });
    for (; at != lost_.end() && at->hash == hash; ++at) {
      if (at->file_id == file_id) continue;
      // Of equal age are a record and its compacted copy: one of them is enough.
      at->replaced |=
          sequence > at->sequence || (sequence == at->sequence && (whole || file_id > at->file_id));
      if (rows_expire_)
        TERRACE_RETURN_IF_ERROR(AddSuspect(nullptr, hash, key, version, file_id, whole));
    }
    for (const FileScrub* scrub : damaged_) {
      if (!InUnknown(*scrub, hash)) continue;
      if (scrub->file.id == file_id) {
        // A file has a key once: none of its unknown records is of this one.
        if (own_.size() == most_suspects_) return TooMany(*scrub);
        own_.emplace_back(hash, scrub);
        continue;
      }
      TERRACE_RETURN_IF_ERROR(AddSuspect(scrub, hash, key, version, file_id, whole));
    }
    return OkStatus();
  }

  StoreLosses Take() {
    StoreLosses losses;
    losses.leaves_no_older = rows_expire_;
    std::sort(own_.begin(), own_.end());
    std::erase_if(suspects_, [this](const Suspect& suspect) {
      return std::binary_search(own_.begin(), own_.end(), std::pair(suspect.hash, suspect.scrub));
    });
    std::sort(suspects_.begin(), suspects_.end(), [](const Suspect& a, const Suspect& b) {
      if (a.hash != b.hash) return a.hash < b.hash;
      const std::uint64_t x = SequenceOf(a.version), y = SequenceOf(b.version);
      if (x != y) return x < y;
      // Of two copies a whole one counts.
      return a.whole != b.whole ? b.whole : a.file_id < b.file_id;
    });
    for (std::size_t begin = 0, end = 0; begin < suspects_.size(); begin = end) {
      std::uint64_t most_sequence = 0;
      for (; end < suspects_.size() && suspects_[end].hash == suspects_[begin].hash; ++end) {
        const FileScrub* scrub = suspects_[end].scrub;
        if (scrub != nullptr) most_sequence = std::max(most_sequence, scrub->most_sequence);
      }
      const Suspect& newest = suspects_[end - 1];
      // One that is lost itself is dropped already; a deletion brings nothing back.
      if (newest.whole && !IsDeletion(newest.version) &&
          SequenceOf(newest.version) <= most_sequence) {
        losses.outdated.push_back(newest.key);
      }
    }
    for (const Lost& lost : lost_) {
      if (lost.replaced) {
        ++losses.replaced_rows;
      } else {
        losses.dropped.push_back(lost.key);
      }
    }
    for (const FileScrub* scrub : damaged_) losses.unknown_rows += scrub->unknown_rows();
    return losses;
  }

  // Of the keys that are given up, the files with older records that were seen.
  std::set<std::uint64_t> OlderFiles(const StoreLosses& losses) const {
    std::set<std::uint64_t> files;
    for (const Suspect& suspect : suspects_) {
      if (IsGivenUp(losses, suspect.key)) files.insert(suspect.file_id);
    }
    return files;
  }

 private:
  static Status TooMany(const FileScrub& scrub) {
    return OutOfMemoryError(
        fmt::format("{}: so much of it is unreadable that too many rows may be older than what it "
                    "held to be looked at in this budget",
                    scrub.path));
  }
  // scrub: null for one of a key of which a record is known to be lost.
  Status AddSuspect(const FileScrub* scrub, std::uint64_t hash, Key key, std::uint64_t version,
                    std::uint64_t file_id, bool whole) {
    if (suspects_.size() == most_suspects_)
      return TooMany(scrub == nullptr ? *damaged_[0] : *scrub);
    suspects_.push_back({hash, key, version, file_id, scrub, whole});
    return OkStatus();
  }
  static bool InUnknown(const FileScrub& scrub, std::uint64_t hash) {
    const auto after = std::upper_bound(
        scrub.unknown.begin(), scrub.unknown.end(), hash,
        [](std::uint64_t h, const UnknownRecords& unknown) { return h < unknown.least_hash; });
    return after != scrub.unknown.begin() && hash <= std::prev(after)->most_hash;
  }

  const std::span<const FileScrub* const> damaged_;
  const bool rows_expire_;
  const std::uint64_t most_suspects_;
  std::vector<Lost> lost_;  // By hash.
  std::vector<Suspect> suspects_;
  // Known keys of a damaged file that lie where unknown ones of it do.
  std::vector<std::pair<std::uint64_t, const FileScrub*>> own_;
};

// The keys of a file that was found sound. kUnavailable: it is no longer.
Status WalkSoundKeys(FileSystem* fs, const ScrubOptions& options, const Manifest::File& file,
                     ScrubBuffers* buffers, LossFinder* finder) {
  const std::string path = JoinPath(options.directory, ParameterFileName(file.id));
  TERRACE_ASSIGN_OR_RETURN(
      const std::unique_ptr<File> disk,
      fs->Open(path, options.direct_io ? OpenMode::kReadDirect : OpenMode::kRead));
  const auto otherwise = [](const Status& status) {
    return UnavailableError(status.message() + ": it was sound a moment ago: is the disk failing?");
  };
  const Result<ParameterFileInfo> footer =
      ReadFooter(disk.get(), file.bytes, file.id, options.layout);
  if (!footer.ok()) return otherwise(footer.status());
  const ParameterFileInfo& info = *footer;
  SectionCursor keys(disk.get(), options.layout.KeysOffset(file.rows), kKeyEntryBytes, file.rows,
                     buffers->keys());
  RunningChecksum checksum;
  keys.set_checksum(&checksum);
  for (; !keys.done(); keys.Advance()) {
    if (const Status filled = keys.Fill(); !filled.ok()) return otherwise(filled);
    KeyEntry entry;
    std::memcpy(&entry, keys.entry(keys.index()), sizeof entry);
    TERRACE_RETURN_IF_ERROR(finder->See(file.id, entry.key, entry.version, /*whole=*/true));
  }
  if (info.footer_checksum == file.footer_checksum && checksum.Digest() == info.keys_checksum) {
    return OkStatus();
  }
  return UnavailableError(
      fmt::format("{}: its keys read otherwise than a moment ago: is the disk failing?", path));
}

const FileScrub* FindScrub(std::span<const FileScrub* const> damaged, std::uint64_t file_id) {
  for (const FileScrub* scrub : damaged) {
    if (scrub->file.id == file_id) return scrub;
  }
  return nullptr;
}

// No file gets longer than those that are there: by the longest one the store's places are divided
// into files and rows.
std::uint64_t MostFileRows(const Manifest& manifest) {
  std::uint64_t most = 1;
  for (const Manifest::File& file : manifest.files) most = std::max(most, file.rows);
  return most;
}

// Writes files of at most `most_rows`, one after another.
class FileRewriter {
 public:
  FileRewriter(FileSystem* fs, const ScrubOptions& options, std::uint64_t first_id,
               std::uint64_t most_rows, ScrubBuffers* buffers)
      : fs_(fs),
        options_(options),
        most_rows_(most_rows),
        next_id_(first_id),
        ring_(buffers->records(), kBlockBytes, /*queue=*/nullptr) {}

  Status Add(Key key, std::uint64_t version, std::span<const std::byte> payload) {
    if (writer_ != nullptr && writer_->rows() == most_rows_) TERRACE_RETURN_IF_ERROR(End());
    if (writer_ == nullptr) {
      const std::string path = JoinPath(options_.directory, ParameterFileName(next_id_));
      TERRACE_ASSIGN_OR_RETURN(
          std::unique_ptr<File> file,
          fs_->Open(path, options_.direct_io ? OpenMode::kCreateDirect : OpenMode::kCreate));
      writer_ = std::make_unique<ParameterFileWriter>(std::move(file), options_.layout, next_id_++,
                                                      &keys_, &ring_);
    }
    return writer_->Add(key, version, payload);
  }
  // Makes the file durable; its name is, once the folder is synced.
  Status End() {
    if (writer_ == nullptr) return OkStatus();
    TERRACE_ASSIGN_OR_RETURN(const ParameterFileInfo info, writer_->Finish());
    TERRACE_RETURN_IF_ERROR(ring_.Await());
    TERRACE_RETURN_IF_ERROR(writer_->TakeFile()->Sync());
    writer_.reset();
    files_.push_back({info.id, info.bytes, info.rows, info.footer_checksum});
    return OkStatus();
  }
  std::uint64_t next_id() const { return next_id_; }
  const std::vector<Manifest::File>& files() const { return files_; }

 private:
  FileSystem* const fs_;
  const ScrubOptions& options_;
  const std::uint64_t most_rows_;
  std::uint64_t next_id_;
  WriteRing ring_;
  KeyEntries keys_;
  std::unique_ptr<ParameterFileWriter> writer_;
  std::vector<Manifest::File> files_;
};

constexpr std::string_view kRowsPrefix = "rows-";

// Greater than the id of any file that lies there.
Result<std::uint64_t> NextFileId(FileSystem* fs, const std::string& directory,
                                 std::uint64_t least) {
  TERRACE_ASSIGN_OR_RETURN(const std::vector<FileInfo> entries, fs->List(directory));
  for (const FileInfo& entry : entries) {
    if (!entry.name.starts_with(kRowsPrefix)) continue;
    std::uint64_t id = 0;
    const char* end = entry.name.data() + entry.name.size();
    std::from_chars(entry.name.data() + kRowsPrefix.size(), end, id);
    least = std::max(least, id + 1);
  }
  return least;
}

// The records of a file that go on, and deletions in place of dropped rows where older records of
// them stay.
Status CopyWhole(FileSystem* fs, const ScrubOptions& options, const FileScrub& scrub,
                 const StoreLosses& losses, ScrubBuffers* buffers, FileRewriter* out) {
  return WalkSalvaged(fs, options, scrub, buffers, [&](const SalvagedRecord& record) -> Status {
    if (record.state == SalvagedRecord::State::kUnknown) return OkStatus();
    if (losses.leaves_no_older && IsGivenUp(losses, record.key)) return OkStatus();
    if (record.state == SalvagedRecord::State::kWhole) {
      return out->Add(record.key, record.version, record.payload);
    }
    // As old as what it stands for: an older record stays stale, a newer one stays the newest.
    return IsAmong(losses.dropped, record.key)
               ? out->Add(record.key, record.version | kDeletionBit, {})
               : OkStatus();
  });
}

// Sound a moment ago.
Status CopyOlder(FileSystem* fs, const ScrubOptions& options, const Manifest::File& file,
                 const StoreLosses& losses, ScrubBuffers* buffers, FileRewriter* out) {
  const FileScrub scrub = ScrubFile(fs, options, file, buffers);
  TERRACE_RETURN_IF_ERROR(scrub.refused);
  if (!scrub.sound()) {
    return UnavailableError(
        fmt::format("{}: {}: is the disk failing?", scrub.path, scrub.findings[0].what));
  }
  return CopyWhole(fs, options, scrub, losses, buffers, out);
}

Result<ManifestReference> Commit(FileSystem* fs, const ScrubOptions& options,
                                 const Manifest& manifest) {
  const std::string payload = EncodeManifest(manifest);
  TERRACE_ASSIGN_OR_RETURN(
      const FileDigest digest,
      WriteFramedFile(fs, JoinPath(options.directory, ManifestFileName(manifest.id)),
                      kManifestMagic, manifest.version(), std::as_bytes(std::span(payload))));
  return ManifestReference{manifest.id, digest};
}

// Of a store with an index by group, which a reader opens.
Result<std::uint64_t> CountRows(FileSystem* fs, const ScrubOptions& options,
                                const Manifest& manifest, const ManifestReference& reference) {
  StoreOptions opened;
  opened.directory = options.directory;
  opened.table = manifest.table;
  opened.shard = manifest.shard;
  opened.row_bytes = manifest.block_row_bytes;
  opened.index = IndexKind::kGroup;
  opened.group.filter_bits = 0;
  opened.direct_io = options.direct_io;
  opened.background_compaction = false;
  opened.read_only = true;
  TERRACE_ASSIGN_OR_RETURN(
      const std::unique_ptr<Store> store,
      Store::Open(fs, Clock::Real(), nullptr, opened, reference, {&reference, 1}));
  std::uint64_t rows = 0;
  TERRACE_RETURN_IF_ERROR(store->ForEachRow(opened.io_buffer_bytes, [&rows](const RowView&) {
    ++rows;
    return OkStatus();
  }));
  return rows;
}

}  // namespace

Result<StoreLosses> FindLosses(FileSystem* fs, const ScrubOptions& options,
                               const Manifest& manifest, std::span<const FileScrub* const> damaged,
                               bool rows_expire, std::uint64_t memory_bytes) {
  LossFinder finder(damaged, rows_expire, memory_bytes);
  TERRACE_ASSIGN_OR_RETURN(ScrubBuffers buffers, ScrubBuffers::Allocate(options.layout));
  for (const Manifest::File& file : manifest.files) {
    const FileScrub* scrub = FindScrub(damaged, file.id);
    if (scrub == nullptr) {
      TERRACE_RETURN_IF_ERROR(WalkSoundKeys(fs, options, file, &buffers, &finder));
      continue;
    }
    TERRACE_RETURN_IF_ERROR(
        WalkSalvaged(fs, options, *scrub, &buffers, [&](const SalvagedRecord& record) -> Status {
          if (record.state == SalvagedRecord::State::kUnknown) return OkStatus();
          return finder.See(file.id, record.key, record.version,
                            record.state == SalvagedRecord::State::kWhole);
        }));
  }
  StoreLosses losses = finder.Take();
  if (!losses.leaves_no_older) return losses;
  const std::set<std::uint64_t> older = finder.OlderFiles(losses);
  for (const Manifest::File& file : manifest.files) {
    if (older.contains(file.id) && FindScrub(damaged, file.id) == nullptr) {
      losses.older_files.push_back(file);
    }
  }
  return losses;
}

std::uint64_t RewriteBytes(const ScrubOptions& options, const Manifest& manifest,
                           std::span<const FileScrub* const> damaged, const StoreLosses& losses) {
  std::uint64_t bytes = AlignUp(EncodeManifest(manifest).size() + 2 * kBlockBytes, kBlockBytes);
  for (const FileScrub* scrub : damaged) bytes += scrub->file.bytes;
  for (const Manifest::File& file : losses.older_files) bytes += file.bytes;
  if (losses.leaves_no_older) return bytes;
  for (std::uint64_t left = losses.outdated.size(); left > 0;) {
    const std::uint64_t rows = std::min(left, MostFileRows(manifest));
    bytes += options.layout.FileBytes(rows);
    left -= rows;
  }
  return bytes;
}

Result<ManifestReference> RewriteStore(FileSystem* fs, const ScrubOptions& options,
                                       const Manifest& manifest,
                                       std::span<const FileScrub* const> damaged,
                                       const StoreLosses& losses, std::uint64_t id) {
  Manifest next = manifest;
  next.id = id;
  if (!damaged.empty()) {
    // Walking and writing at once: a pair of buffers for each.
    TERRACE_ASSIGN_OR_RETURN(ScrubBuffers walking, ScrubBuffers::Allocate(options.layout));
    TERRACE_ASSIGN_OR_RETURN(ScrubBuffers writing, ScrubBuffers::Allocate(options.layout));
    TERRACE_ASSIGN_OR_RETURN(const std::uint64_t first_id,
                             NextFileId(fs, options.directory, manifest.next_file_id));
    SyncPoint::Hit("repair.before_rows");
    FileRewriter out(fs, options, first_id, MostFileRows(manifest), &writing);
    std::set<std::uint64_t> rewritten;
    for (const FileScrub* scrub : damaged) {
      TERRACE_RETURN_IF_ERROR(CopyWhole(fs, options, *scrub, losses, &walking, &out));
      TERRACE_RETURN_IF_ERROR(out.End());
      rewritten.insert(scrub->file.id);
    }
    for (const Manifest::File& file : losses.older_files) {
      TERRACE_RETURN_IF_ERROR(CopyOlder(fs, options, file, losses, &walking, &out));
      TERRACE_RETURN_IF_ERROR(out.End());
      rewritten.insert(file.id);
    }
    if (!losses.leaves_no_older) {
      // Erased now: newer than whatever they are.
      next.sequence += losses.outdated.empty() ? 0 : 1;
      if (next.sequence > kMaxSequence) return InternalError("the sequence of writes is used up");
      for (const Key key : losses.outdated) {
        TERRACE_RETURN_IF_ERROR(out.Add(key, next.sequence | kDeletionBit, {}));
      }
      TERRACE_RETURN_IF_ERROR(out.End());
    }
    next.next_file_id = out.next_id();
    std::erase_if(next.files,
                  [&](const Manifest::File& file) { return rewritten.contains(file.id); });
    next.files.insert(next.files.end(), out.files().begin(), out.files().end());
  }
  TERRACE_RETURN_IF_ERROR(fs->SyncDirectory(options.directory));
  SyncPoint::Hit("repair.before_manifest");
  TERRACE_ASSIGN_OR_RETURN(const ManifestReference reference, Commit(fs, options, next));
  const bool loses = !losses.dropped.empty() || !losses.outdated.empty() || losses.unknown_rows > 0;
  if (next.groups == 0 || !loses) return reference;
  // How many rows a lost block had is told nowhere.
  TERRACE_ASSIGN_OR_RETURN(next.rows_in_blocks, CountRows(fs, options, next, reference));
  return Commit(fs, options, next);
}

Result<std::vector<FileInfo>> StoreStrays(FileSystem* fs, const std::string& directory,
                                          std::span<const Manifest> kept) {
  std::vector<FileInfo> strays;
  std::set<std::string> wanted;
  for (const Manifest& manifest : kept) {
    wanted.insert(ManifestFileName(manifest.id));
    for (const Manifest::File& file : manifest.files) wanted.insert(ParameterFileName(file.id));
  }
  const Result<std::vector<FileInfo>> entries = fs->List(directory);
  if (!entries.ok()) {
    if (entries.status().code() == StatusCode::kNotFound) return strays;
    return entries.status();
  }
  for (const FileInfo& entry : *entries) {
    if (IsStoreFileName(entry.name) && !entry.is_directory && !wanted.contains(entry.name))
      strays.push_back(entry);
  }
  return strays;
}

}  // namespace terrace
