// Scrub: reads every byte of parameter files against its checks, however damaged they are, and says
// what of a damaged file can still be told: which records are whole, which are lost, and of which
// keys those were. Threads: a call uses nothing but its arguments.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/base/memory.h"
#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/store/manifest.h"
#include "terrace/store/parameter_file.h"
#include "terrace/store/store.h"

namespace terrace {

// Where the files of one store lie, and how they are read.
struct ScrubOptions {
  std::string directory;
  RecordLayout layout;
  bool direct_io = true;
};

// Records of which nothing tells the keys. By the order of the key section, MixKey of each of them
// lies in [least_hash, most_hash].
struct UnknownRecords {
  std::uint64_t rows = 0;
  std::uint64_t least_hash = 0;
  std::uint64_t most_hash = ~std::uint64_t{0};
  bool operator==(const UnknownRecords&) const = default;
};

// One parameter file, read whole.
struct FileScrub {
  Manifest::File file;
  std::string path;
  std::vector<Finding> findings;  // Empty: every byte is as it was written.
  // What is wrong is no damage, and nothing of the file may be given up for it: a newer format,
  // another table's file, a file that this user may not open.
  Status refused;
  bool present = false;    // The records are those that the manifest names, damaged or not.
  bool keys_hold = false;  // The key section is as it was written.
  // It holds what another file had, as where a disk lost writes over one that was used anew:
  // nothing but its whole records, and a key section that holds, tells what it had.
  bool mixed = false;
  std::uint32_t version = kParameterFileVersion;  // Of the file's format.
  std::uint64_t most_sequence = kMaxSequence;     // No record of the file is newer.
  std::uint64_t whole = 0;                        // Records that can be copied.
  // Records that fail their check and whose key and version the file still tells, in its order. A
  // deletion is whole when those are known.
  std::vector<KeyEntry> lost;
  std::vector<UnknownRecords> unknown;
  std::uint64_t told = 0;  // Checksum of state, key and version of each record, in its order.

  bool sound() const { return findings.empty(); }
  std::uint64_t unknown_rows() const {
    std::uint64_t rows = 0;
    for (const UnknownRecords& records : unknown) rows += records.rows;
    return rows;
  }
};

// The two buffers that scrubbing takes: one for records, one for keys. A walk also takes 40 bytes
// for each record of its file at most.
class ScrubBuffers {
 public:
  static Result<ScrubBuffers> Allocate(const RecordLayout& layout);
  std::span<std::byte> records() { return buffer_.span().first(record_bytes_); }
  std::span<std::byte> keys() { return buffer_.span().subspan(record_bytes_, key_bytes_); }

 private:
  HugeBuffer buffer_;
  std::uint64_t record_bytes_ = 0, key_bytes_ = 0;
};

// Reads the whole of a file that a manifest names. Damage is what it returns, not an error.
FileScrub ScrubFile(FileSystem* fs, const ScrubOptions& options, const Manifest::File& file,
                    ScrubBuffers* buffers);

// One record as far as it can be told.
struct SalvagedRecord {
  enum class State : std::uint8_t { kWhole, kLost, kUnknown };
  State state = State::kUnknown;
  Key key = 0;  // Not of an unknown one; nor are the others.
  std::uint64_t version = 0;
  std::span<const std::byte> payload;  // Of a whole row; empty for a deletion.
};

// Walks the records of a file in its order, as ScrubFile judged them. kUnavailable: one of them
// reads otherwise than it did then; what was visited is to be thrown away.
Status WalkSalvaged(FileSystem* fs, const ScrubOptions& options, const FileScrub& scrub,
                    ScrubBuffers* buffers,
                    const std::function<Status(const SalvagedRecord&)>& visit);

// Everything wrong with a manifest and the files that it names.
Status ScrubManifest(FileSystem* fs, const ScrubOptions& options,
                     const ManifestReference& reference, std::vector<Finding>* findings);

}  // namespace terrace
