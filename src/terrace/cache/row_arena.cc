#include "terrace/cache/row_arena.h"

#include <bit>
#include <utility>

namespace terrace {
namespace {
constexpr std::uint64_t kLineBytes = 64;

// Rows start at a cache line, so that rows of whole lines touch no line more than they need.
std::uint64_t RowsOffset(std::uint64_t rows) { return AlignUp(rows * sizeof(Entry), kLineBytes); }
}  // namespace

std::uint32_t RowArena::RowsPerChunk(std::uint32_t row_bytes, std::uint64_t chunk_bytes) {
  const std::uint64_t stride = AlignUp(row_bytes, 8);
  std::uint64_t rows = chunk_bytes / (stride + sizeof(Entry));
  while (rows > 0 && RowsOffset(rows) + rows * stride > chunk_bytes) --rows;
  return static_cast<std::uint32_t>(rows);
}

RowArena::RowArena(std::uint32_t row_bytes, std::uint64_t chunk_bytes)
    : chunk_bytes_(chunk_bytes),
      stride_(AlignUp(row_bytes, 8)),
      rows_per_chunk_(RowsPerChunk(row_bytes, chunk_bytes)),
      slot_bits_(static_cast<int>(std::bit_width(rows_per_chunk_ - 1))),
      slot_mask_((std::uint32_t{1} << slot_bits_) - 1),
      rows_offset_(RowsOffset(rows_per_chunk_)),
      bases_(std::make_unique_for_overwrite<std::byte*[]>(kMaxChunks)) {
  TERRACE_CHECK(rows_per_chunk_ > 0 && slot_bits_ < 32);
}

void RowArena::AddChunk(HugeBuffer memory) {
  TERRACE_CHECK(present_chunks_ < max_chunks() && memory.size() >= chunk_bytes_);
  std::uint32_t chunk = 0;
  while (chunk < chunks_.size() && bases_[chunk] != nullptr) ++chunk;
  if (chunk == chunks_.size()) {
    held_.push_back(0);
    chunks_.emplace_back();
  }
  const bool listed = chunks_[chunk].listed;
  bases_[chunk] = memory.data();
  chunks_[chunk] = Chunk{.buffer = std::move(memory), .listed = listed};
  ++present_chunks_;
  List(chunk);
}

EntryId RowArena::Allocate() {
  while (!open_.empty()) {
    const std::uint32_t number = open_.back();
    Chunk& chunk = chunks_[number];
    if (bases_[number] == nullptr || !HasSlot(chunk)) {
      chunk.listed = false;
      open_.pop_back();
      continue;
    }
    std::uint32_t slot = chunk.free_head;
    if (slot != kNoSlot) {
      chunk.free_head = entry(id(number, slot)).position;
    } else {
      slot = chunk.fresh++;
    }
    ++chunk.used;
    ++used_rows_;
    ++held_[number];
    const EntryId taken = id(number, slot);
    entry(taken).place = kTaken;
    return taken;
  }
  return kNoEntry;
}

void RowArena::Free(EntryId freed) {
  const std::uint32_t number = freed >> slot_bits_;
  Chunk& chunk = chunks_[number];
  entry(freed) = Entry{
      .key = 0, .position = chunk.free_head, .pins = 0, .place = kFree, .frequency = 0, .flags = 0};
  chunk.free_head = freed & slot_mask_;
  --chunk.used;
  --used_rows_;
  if (!chunk.closed) List(number);
}

void RowArena::List(std::uint32_t number) {
  if (chunks_[number].listed) return;
  chunks_[number].listed = true;
  open_.push_back(number);
}

void RowArena::Close(std::uint32_t chunk) {
  TERRACE_CHECK(present(chunk) && !chunks_[chunk].closed);
  chunks_[chunk].closed = true;
  ++closed_chunks_;
}

void RowArena::Reopen(std::uint32_t chunk) {
  TERRACE_CHECK(present(chunk) && chunks_[chunk].closed);
  chunks_[chunk].closed = false;
  --closed_chunks_;
  List(chunk);
}

void RowArena::Release(std::uint32_t chunk) {
  TERRACE_CHECK(present(chunk) && chunks_[chunk].used == 0 && held_[chunk] == 0);
  if (chunks_[chunk].closed) --closed_chunks_;
  const bool listed = chunks_[chunk].listed;
  bases_[chunk] = nullptr;
  chunks_[chunk] = Chunk{.buffer = {}, .listed = listed};
  --present_chunks_;
}

}  // namespace terrace
