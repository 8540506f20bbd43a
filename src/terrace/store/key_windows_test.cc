#include "terrace/store/key_windows.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/io/testing/memory_file_system.h"

namespace terrace {
namespace {

constexpr std::uint64_t kBufferBytes = 2 * kBlockBytes;

// Key sections in files of their own, read through small buffers.
class Sections {
 public:
  // hashes: of one section, in its order; version i of it is `i + 1`.
  void Add(const std::vector<std::uint64_t>& hashes) {
    std::vector<KeyEntry> entries;
    for (const std::uint64_t hash : hashes) {
      entries.push_back({UnmixKey(hash), entries.size() + 1});
    }
    entries_ += entries.size();
    std::vector<std::byte> bytes(AlignUp(entries.size() * sizeof(KeyEntry), kBlockBytes));
    std::memcpy(bytes.data(), entries.data(), entries.size() * sizeof(KeyEntry));
    const std::string path = "/section" + std::to_string(files_.size());
    auto file = fs_.Open(path, OpenMode::kCreate);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    ASSERT_TRUE((*file)->WriteAt(0, bytes).ok());
    files_.push_back(std::move(file).value());
    buffers_.push_back(HugeBuffer::Allocate(kBufferBytes).value());
    cursors_.emplace_back(files_.back().get(), 0, sizeof(KeyEntry), entries.size(),
                          buffers_.back().span());
  }

  // All that comes out, windows put together; the failure, if any, is in *status.
  std::vector<KeyVersion> Walk(Status* status) {
    std::vector<KeyVersion> all;
    KeyWindows windows(cursors_, entries_);
    while (true) {
      const Result<std::span<const KeyVersion>> window = windows.Next();
      *status = window.status();
      if (!window.ok() || window->empty()) return all;
      EXPECT_TRUE(all.empty() || all.back().hash < window->front().hash) << "split from its like";
      all.insert(all.end(), window->begin(), window->end());
    }
  }

 private:
  MemoryFileSystem fs_;
  std::uint64_t entries_ = 0;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<HugeBuffer> buffers_;
  std::vector<SectionCursor> cursors_;
};

using Version = std::tuple<std::uint64_t, std::uint32_t, std::uint64_t, std::uint32_t>;

std::vector<Version> VersionsOf(const std::vector<KeyVersion>& versions) {
  std::vector<Version> all;
  for (const KeyVersion& v : versions) all.push_back({v.hash, v.source, v.version, v.row});
  return all;
}

// Sections of random lengths whose hashes are the low `bits` bits of random numbers above `base`
// come out whole and in order.
testing::AssertionResult MergesRight(std::uint64_t seed, std::uint64_t base, int bits,
                                     std::uint64_t most) {
  Rng rng(seed);
  Sections sections;
  std::vector<Version> expected;
  for (std::uint32_t source = 0; source < 7; ++source) {
    std::vector<std::uint64_t> hashes(rng.Below(most) + 1);
    for (std::uint64_t& hash : hashes) hash = base + (rng.Next() >> (64 - bits));
    std::sort(hashes.begin(), hashes.end());
    hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
    sections.Add(hashes);
    for (std::uint32_t row = 0; row < hashes.size(); ++row) {
      expected.push_back({hashes[row], source, row + 1, row});
    }
  }
  std::sort(expected.begin(), expected.end());
  Status status;
  const std::vector<Version> merged = VersionsOf(sections.Walk(&status));
  if (!status.ok()) return testing::AssertionFailure() << status.ToString();
  if (merged == expected) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "seed " << seed << ": " << merged.size() << " versions of "
                                     << expected.size() << ", or another order";
}

TEST(KeyWindows, UniformHashes) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) EXPECT_TRUE(MergesRight(seed, 0, 64, 40'000));
}
TEST(KeyWindows, FewHashes) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) EXPECT_TRUE(MergesRight(seed, 0, 64, 5));
}
TEST(KeyWindows, HashesInEverySection) { EXPECT_TRUE(MergesRight(1, 0, 12, 6'000)); }
TEST(KeyWindows, HashesThatLieTogether) {
  EXPECT_TRUE(MergesRight(1, std::uint64_t{0x123456789} << 28, 18, 20'000));
  EXPECT_TRUE(MergesRight(2, 0 - (std::uint64_t{1} << 18), 18, 20'000));  // Up to the last one.
}

TEST(KeyWindows, SectionsThatAreNotSorted) {
  constexpr std::uint64_t kCount = 3'000;  // Several buffers.
  for (const std::uint64_t bad : {std::uint64_t{1}, std::uint64_t{511}, std::uint64_t{512},
                                  std::uint64_t{1'500}, kCount - 1}) {
    for (const std::uint64_t wrong : {std::uint64_t{0}, bad - 1}) {
      SCOPED_TRACE(std::to_string(bad) + " is as " + std::to_string(wrong));
      std::vector<std::uint64_t> hashes, others;
      for (std::uint64_t i = 0; i < kCount; ++i) hashes.push_back((i + 1) << 50);
      for (std::uint64_t i = 0; i < kCount; ++i) others.push_back((i + 1) << 49);
      hashes[bad] = hashes[wrong];
      Sections sections;
      sections.Add(others);
      sections.Add(hashes);
      Status status;
      sections.Walk(&status);
      EXPECT_EQ(status.code(), StatusCode::kCorruption);
      EXPECT_NE(status.message().find("/section1: the keys at offset"), std::string::npos)
          << status.ToString();
    }
  }
}

}  // namespace
}  // namespace terrace
