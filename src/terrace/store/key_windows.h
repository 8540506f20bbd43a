// The key sections of many files, merged by hash. KeyRounds reads them side by side, a range of
// hashes at a time: of one round all versions are in memory while the disk brings the next.
// KeyWindows sorts what a piece of a round holds, window by window, in the second cache, and finds
// the newest version of each key: a heap over as many sections would mispredict at every level for
// every key. Threads: KeyRounds is one thread's, and between two calls of Next any thread reads the
// round; a KeyWindows is one thread's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/raw_vector.h"
#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/store/index.h"
#include "terrace/store/parameter_file.h"

namespace terrace {

// Sorted entries from `offset` on, a multiple of a block, to the end of their last block.
struct KeySection {
  File* file = nullptr;  // Borrowed.
  std::uint64_t offset = 0;
  std::uint64_t entries = 0;  // 1 to kMaxRowsPerFile.
  std::uint32_t version = kParameterFileVersion;
};

class KeyRounds {
 public:
  // `bytes`: of both buffers together; four blocks a section where that is more. A round ends where
  // a multiple of `grain` hashes does, a power of two, unless less than that is in memory. Borrows
  // the queue, which nobody else uses meanwhile.
  static Result<std::unique_ptr<KeyRounds>> Create(ReadQueue* queue,
                                                   std::span<const KeySection> sections,
                                                   std::uint64_t bytes, std::uint64_t grain);
  ~KeyRounds();  // Waits for what is being read.

  // Goes on to the next round; false: there is none. Blocks: on reads. kCorruption: a section is
  // not sorted, or its file too short.
  Result<bool> Next();
  // Begins to read what follows the round, which else the next call of Next does first. Other
  // threads may read the round meanwhile.
  void ReadAhead();

  // Of the round: its hashes, first and last, and the blocks of a section that it brought.
  std::uint64_t first() const { return first_; }
  std::uint64_t last() const { return last_; }
  std::span<const std::byte> fresh(std::size_t source) const { return now_->pieces[source].fresh; }

  std::size_t sources() const { return sections_.size(); }
  std::uint64_t entries() const { return entries_; }  // Of all sections.
  std::uint64_t bytes_read() const { return bytes_read_; }

 private:
  friend class KeyWindows;
  // What is in memory of one section.
  struct Piece {
    std::uint64_t begin = 0, end = 0;    // Entries.
    std::uint64_t cut = 0;               // Where the round ends.
    const std::byte* entries = nullptr;  // Entry `begin`.
    std::span<const std::byte> fresh;

    KeyEntry At(std::uint64_t i) const {
      KeyEntry entry;
      std::memcpy(&entry, entries + (i - begin) * sizeof entry, sizeof entry);
      return entry;
    }
    std::uint64_t HashAt(std::uint64_t i) const { return MixKey(At(i).key); }
    // The first entry before `cut` whose hash is not below `hash`, by steps from `guess`.
    std::uint64_t Find(std::uint64_t hash, std::uint64_t guess) const;
  };
  // Rounds alternate between two.
  struct Buffer {
    HugeBuffer memory;
    std::vector<Piece> pieces;  // (sources)
    std::vector<ReadRequest> requests;
  };

  KeyRounds(ReadQueue* queue, std::span<const KeySection> sections, std::uint64_t grain);
  // Starts to read what follows a round's end, behind what was read too far.
  void StartNext();
  // Blocks that the next round is to bring of each section, so that all of them come as far.
  std::vector<std::uint64_t> PlanBlocks(const std::vector<std::uint64_t>& kept_blocks) const;
  Status Await();
  Result<std::uint64_t> FindLast() const;
  Status OutOfOrder(std::size_t source, std::uint64_t i) const;

  ReadQueue* const queue_;
  const std::vector<KeySection> sections_;
  const std::uint64_t grain_;
  std::uint64_t entries_ = 0;
  Buffer buffers_[2];
  Buffer* now_ = &buffers_[0];   // The round.
  Buffer* next_ = &buffers_[1];  // Being read.
  bool reading_ = false;
  bool begun_ = false;  // There is a round.
  bool ended_ = false;  // It is the last one.
  std::uint64_t first_ = 0, last_ = 0;
  std::vector<double> first_hashes_;  // (sources) Of those that were begun, as parts of all.
  std::uint64_t bytes_read_ = 0;
};

class KeyWindows {
 public:
  // Memory: 36 bytes for every entry of a round at the very most, twice as many where it grows; for
  // hashes as MixKey makes them some 500 KiB, with thousands of sections several times as much.
  explicit KeyWindows(const KeyRounds* rounds);

  // Goes to the hashes [first, last] of the round, which are not empty.
  void Start(std::uint64_t first, std::uint64_t last);
  bool done() const { return done_; }
  // Adds where the newest version of each key in the next window lies, by hash, if sections have
  // the numbers of their files' slots: to `deletions` where it is one, else to `rows`. The newest
  // has the greatest sequence; of two copies it is the one in the later section. kCorruption: a
  // section is not sorted, or has an entry of a record that is not there.
  // REQUIRES: !done().
  Status Next(RawVector<KeyPlace>* rows, std::vector<KeyPlace>* deletions);
  // The last hash of that window.
  std::uint64_t end() const { return end_; }
  // Versions of a section, in all windows so far, that are the newest of their keys.
  std::uint64_t newest(std::size_t source) const { return newest_of_[source]; }

 private:
  // The next entries of a section, up to `end`.
  struct Run {
    std::uint64_t next = 0, end = 0;
  };
  // One entry of one section.
  struct Version {
    std::uint64_t hash;
    Place place;
    std::uint64_t version;  // As its entry has it.
  };
  Status Take(std::uint32_t source, std::uint64_t limit);
  void Sort();
  // Of each key in the window, if words_ are sorted by hash; else false.
  bool FindNewest();
  void Tell(RawVector<KeyPlace>* rows, std::vector<KeyPlace>* deletions);

  const KeyRounds* const rounds_;
  const int bucket_bits_;
  const int window_bits_;   // Hashes of a window are 2^these.
  std::vector<Run> runs_;   // (sources)
  std::uint64_t base_ = 0;  // The first hash that is not behind.
  std::uint64_t end_ = 0, last_ = 0;
  bool done_ = true;
  std::size_t count_ = 0;    // Versions of the window, the first ones of each.
  std::uint64_t ahead_ = 0;  // Bytes of a section in a window, as the last one had.
  RawVector<Version> taken_;
  RawVector<std::uint64_t> words_;  // One for each, by hash, with its number in numbers_.
  std::uint64_t numbers_ = 0;
  std::vector<std::uint32_t> places_;  // (buckets)
  RawVector<std::uint32_t> newest_;    // (keys) In the low bits, in taken_.
  std::size_t keys_ = 0;
  std::vector<std::uint64_t> newest_of_;  // (sources)
};

}  // namespace terrace
