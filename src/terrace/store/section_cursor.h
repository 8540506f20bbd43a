// SectionCursor: walks the entries of one section of a parameter file in order, through a buffer of
// its own. With a SectionReads one part of the buffer is walked while the disk fills another.
// Threads: a SectionReads and its cursors are one thread's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>

#include "terrace/base/status.h"
#include "terrace/io/file_system.h"
#include "terrace/store/parameter_file.h"

namespace terrace {

// What several cursors have in flight. Borrows the queue, which nobody else uses meanwhile.
class SectionReads {
 public:
  explicit SectionReads(ReadQueue* queue) : queue_(queue) {}
  ~SectionReads();  // REQUIRES: all that was started has been awaited.
  SectionReads(const SectionReads&) = delete;
  SectionReads& operator=(const SectionReads&) = delete;

  // The request and its bytes are the disk's until Await has returned.
  void Start(ReadRequest* request);
  // Blocks: until it is read, and what was started before it. Its status. REQUIRES: started.
  Status Await(ReadRequest* request);

 private:
  ReadQueue* const queue_;
  std::deque<ReadRequest*> in_flight_;  // In the order of Start.
};

class SectionCursor {
 public:
  // `buffer`: aligned, of whole blocks, at least LeastBuffer(entry_bytes). `reads`: begins with the
  // first entries at once; null where Fill reads by itself, into one part. All are borrowed.
  SectionCursor(File* file, std::uint64_t offset, std::uint64_t entry_bytes, std::uint64_t entries,
                std::span<std::byte> buffer, SectionReads* reads = nullptr);
  ~SectionCursor();  // Waits for what is being read.
  SectionCursor(const SectionCursor&) = delete;
  SectionCursor& operator=(const SectionCursor&) = delete;
  static std::uint64_t LeastBuffer(std::uint64_t entry_bytes) {
    return AlignUp(entry_bytes, kBlockBytes) + kBlockBytes;
  }
  // Brings the next entries when there are none left in memory. Call before entry(), while !done().
  Status Fill();
  bool needs_fill() const { return next_ >= buffered_end_; }
  bool done() const { return next_ >= entries_; }
  void Advance() { ++next_; }
  // To the end of what is in memory.
  void AdvanceToFill() { next_ = buffered_end_; }
  std::uint64_t index() const { return next_; }
  std::uint64_t entries() const { return entries_; }
  std::uint64_t buffered_end() const { return buffered_end_; }  // Entries before it are in memory.
  // REQUIRES: since the last Fill index() <= i < buffered_end().
  const std::byte* entry(std::uint64_t i) const {
    return data_ + (offset_ + i * entry_bytes_ - data_offset_);
  }
  std::uint64_t entry_offset(std::uint64_t i) const { return offset_ + i * entry_bytes_; }
  const std::string& path() const { return file_->path(); }
  std::uint64_t bytes_read() const { return bytes_read_; }
  // Sums all blocks of the section; for entries that divide a block only.
  void set_checksum(RunningChecksum* checksum) { checksum_ = checksum; }

 private:
  static constexpr std::size_t kParts = 2;  // One where they would be smaller than LeastBuffer.
  // Of the buffer, and what is or comes there.
  struct Part {
    std::span<std::byte> buffer;
    ReadRequest read;
    bool started = false;   // And not awaited.
    std::uint64_t end = 0;  // Entries before it are whole there.
  };
  // Begins to read from an entry on.
  void Start(Part* part, std::uint64_t entry);
  Status Await(Part* part);

  File* const file_;
  const std::uint64_t offset_;
  const std::uint64_t entry_bytes_;
  const std::uint64_t entries_;
  SectionReads* const reads_;
  std::size_t parts_count_ = 1;
  Part parts_[kParts];
  std::size_t part_ = 0;  // The one that Fill brings next.
  RunningChecksum* checksum_ = nullptr;
  const std::byte* data_ = nullptr;
  std::uint64_t data_offset_ = 0;  // In the file.
  std::uint64_t next_ = 0;
  std::uint64_t buffered_end_ = 0;
  std::uint64_t bytes_read_ = 0;
};

}  // namespace terrace
