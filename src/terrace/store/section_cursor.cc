#include "terrace/store/section_cursor.h"

#include <algorithm>

#include "terrace/base/check.h"

namespace terrace {

SectionReads::~SectionReads() { TERRACE_CHECK(in_flight_.empty()); }

void SectionReads::Start(ReadRequest* request) {
  in_flight_.push_back(request);
  queue_->Start({request, 1});
}

Status SectionReads::Await(ReadRequest* request) {
  // Each one is a group of the queue, which are waited for in their order. The others have their
  // status themselves.
  while (std::find(in_flight_.begin(), in_flight_.end(), request) != in_flight_.end()) {
    in_flight_.pop_front();
    (void)queue_->Wait();
  }
  return request->status;
}

SectionCursor::SectionCursor(File* file, std::uint64_t offset, std::uint64_t entry_bytes,
                             std::uint64_t entries, std::span<std::byte> buffer,
                             SectionReads* reads)
    : file_(file), offset_(offset), entry_bytes_(entry_bytes), entries_(entries), reads_(reads) {
  const std::uint64_t least = LeastBuffer(entry_bytes);
  TERRACE_CHECK(buffer.size() >= least && buffer.size() % kBlockBytes == 0);
  if (reads != nullptr) {
    parts_count_ = std::min(buffer.size() / least, kParts);
  }
  const std::uint64_t bytes = buffer.size() / parts_count_ / kBlockBytes * kBlockBytes;
  for (std::size_t p = 0; p < parts_count_; ++p) {
    parts_[p].buffer = buffer.subspan(p * bytes, bytes);
  }
  if (reads != nullptr && entries > 0) Start(&parts_[0], 0);
}

SectionCursor::~SectionCursor() {
  // Whoever gives up has an error of his own.
  for (Part& part : parts_) {
    if (part.started) (void)Await(&part);
  }
}

void SectionCursor::Start(Part* part, std::uint64_t entry) {
  const std::uint64_t end = AlignUp(offset_ + entries_ * entry_bytes_, kBlockBytes);
  part->read.file = file_;
  part->read.offset = (offset_ + entry * entry_bytes_) / kBlockBytes * kBlockBytes;
  part->read.buffer =
      part->buffer.first(std::min<std::uint64_t>(part->buffer.size(), end - part->read.offset));
  part->end =
      std::min(entries_, (part->read.offset + part->read.buffer.size() - offset_) / entry_bytes_);
  part->started = true;
  if (reads_ != nullptr) reads_->Start(&part->read);
}

Status SectionCursor::Await(Part* part) {
  part->started = false;
  if (reads_ == nullptr) return ReadFully(file_, part->read.offset, part->read.buffer);
  TERRACE_RETURN_IF_ERROR(reads_->Await(&part->read));
  return CheckWhole(part->read);
}

Status SectionCursor::Fill() {
  if (!needs_fill() || done()) return OkStatus();
  Part& part = parts_[part_];
  if (!part.started) Start(&part, next_);
  TERRACE_RETURN_IF_ERROR(Await(&part));
  data_ = part.read.buffer.data();
  data_offset_ = part.read.offset;
  buffered_end_ = part.end;
  bytes_read_ += part.read.buffer.size();
  if (checksum_ != nullptr) checksum_->Update(part.read.buffer);
  part_ = (part_ + 1) % parts_count_;
  if (parts_count_ > 1 && buffered_end_ < entries_) Start(&parts_[part_], buffered_end_);
  return OkStatus();
}

}  // namespace terrace
