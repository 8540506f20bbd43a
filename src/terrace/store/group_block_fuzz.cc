// Bytes that are no block are refused; of those that are one, every key is found at its place.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/store/group_block.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using terrace::BlockView;
  using terrace::GroupLayout;
  for (const std::uint32_t row_bytes : {1u, 300u}) {
    const GroupLayout layout = GroupLayout::Of(row_bytes);
    // A short input is the beginning of a block.
    std::vector<std::byte> bytes(layout.block_bytes);
    for (std::size_t i = 0; i < std::min<std::size_t>(size, bytes.size()); ++i) {
      bytes[i] = static_cast<std::byte>(data[i]);
    }
    const terrace::Result<BlockView> block = BlockView::Parse(layout, bytes, 0);
    if (!block.ok()) continue;
    for (std::uint32_t i = 0; i < block->size(); ++i) {
      TERRACE_CHECK(block->Find(block->hash(i)) == i);
    }
  }
  return 0;
}
