// SectionCursor: every entry once and in order, with and without reading ahead.
#include "terrace/store/section_cursor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <utility>

#include "terrace/base/rng.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

constexpr std::uint64_t kOffset = 2 * kBlockBytes;

class SectionCursorTest : public testing::Test {
 protected:
  void SetUp() override {
    auto buffer = HugeBuffer::Allocate(64 * kBlockBytes);
    TERRACE_ASSERT_OK(buffer);
    buffer_ = std::move(buffer).value();
    auto queue = fs_.NewReadQueue({});
    TERRACE_ASSERT_OK(queue);
    queue_ = std::move(queue).value();
  }
  // A section of so many entries, behind and before something else.
  void MakeFile(std::uint64_t entries, std::uint64_t entry_bytes) {
    auto bytes =
        HugeBuffer::Allocate(AlignUp(kOffset + entries * entry_bytes, kBlockBytes) + kBlockBytes);
    TERRACE_ASSERT_OK(bytes);
    bytes_ = std::move(bytes).value();
    io_testing::Fill(entries, 0, bytes_.span());
    if (file_ != nullptr) TERRACE_ASSERT_OK(fs_.Remove("/file"));
    auto written = fs_.Open("/file", OpenMode::kCreateDirect);
    TERRACE_ASSERT_OK(written);
    TERRACE_ASSERT_OK((*written)->WriteAt(0, bytes_.span()));
    auto file = fs_.Open("/file", OpenMode::kReadDirect);
    TERRACE_ASSERT_OK(file);
    file_ = std::move(file).value();
  }

  MemoryFileSystem fs_;
  HugeBuffer buffer_;
  std::unique_ptr<ReadQueue> queue_;
  HugeBuffer bytes_;
  std::unique_ptr<File> file_;
};

TEST_F(SectionCursorTest, GivesEveryEntry) {
  Rng rng(1);
  int fills[2] = {0, 0};  // Without, with reading ahead.
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t entry_bytes = 8 * (1 + rng.Below(rng.Below(4) == 0 ? 1000 : 40));
    const std::uint64_t entries = rng.Below(20) == 0 ? 0 : 1 + rng.Below(2000);
    MakeFile(entries, entry_bytes);
    if (HasFatalFailure()) return;
    const std::uint64_t least = SectionCursor::LeastBuffer(entry_bytes);
    const std::uint64_t blocks =
        least / kBlockBytes + rng.Below(buffer_.size() / kBlockBytes - least / kBlockBytes + 1);
    SectionReads reads(queue_.get());
    const bool ahead = rng.Below(3) != 0;
    SectionCursor cursor(file_.get(), kOffset, entry_bytes, entries,
                         buffer_.span().first(blocks * kBlockBytes), ahead ? &reads : nullptr);
    const auto holds = [&](const std::byte* entry, std::uint64_t i) {
      return std::memcmp(entry, bytes_.data() + kOffset + i * entry_bytes, entry_bytes) == 0;
    };
    std::uint64_t next = 0;
    while (!cursor.done()) {
      ASSERT_EQ(cursor.index(), next);
      TERRACE_ASSERT_OK(cursor.Fill());
      ++fills[ahead ? 1 : 0];
      ASSERT_GT(cursor.buffered_end(), next);
      for (; next < cursor.buffered_end(); ++next) ASSERT_TRUE(holds(cursor.entry(next), next));
      if (rng.Below(2) == 0) {
        cursor.AdvanceToFill();
      } else {
        while (!cursor.needs_fill()) cursor.Advance();
      }
    }
    ASSERT_EQ(next, entries);
  }
  EXPECT_GT(fills[0], 300);
  EXPECT_GT(fills[1], 1000);
}

}  // namespace
}  // namespace terrace
