#include "terrace/store/key_windows.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/io/testing/memory_file_system.h"
#include "terrace/io/testing/test_data.h"

namespace terrace {
namespace {

// Key sections in files of their own, read through small buffers.
class Sections {
 public:
  // Of entry i of a section; sections have equal ones.
  static std::uint64_t SequenceAt(std::size_t i) { return 1 + i / 16; }
  static bool IsDeletionAt(std::size_t i) { return i % 7 == 6; }
  // hashes: of one section, in its order.
  void Add(const std::vector<std::uint64_t>& hashes) {
    std::vector<KeyEntry> entries;
    for (const std::uint64_t hash : hashes) {
      const std::uint64_t version = SequenceAt(entries.size());
      entries.push_back(
          {UnmixKey(hash), IsDeletionAt(entries.size()) ? version | kDeletionBit : version});
    }
    // Sections of files of version 1 among them, whose entries do not say of which record they are.
    const std::uint32_t format = sections_.size() % 3 == 2 ? 1 : kParameterFileVersion;
    std::vector<std::uint32_t> rows(entries.size());
    std::iota(rows.begin(), rows.end(), 0);
    if (format > 1) {
      for (std::size_t i = rows.size(); i > 1; --i) std::swap(rows[i - 1], rows[rng_.Below(i)]);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        entries[i].version |= std::uint64_t{rows[i]} << kSequenceBits;
      }
    }
    rows_.push_back(std::move(rows));
    std::vector<std::byte> bytes(AlignUp(entries.size() * sizeof(KeyEntry), kBlockBytes));
    std::memcpy(bytes.data(), entries.data(), entries.size() * sizeof(KeyEntry));
    const std::string path = "/section" + std::to_string(sections_.size());
    auto file = fs_.Open(path, OpenMode::kCreate);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    ASSERT_TRUE((*file)->WriteAt(0, bytes).ok());
    files_.push_back(std::move(file).value());
    sections_.push_back({files_.back().get(), 0, entries.size(), format});
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }

  struct Walked {
    Status status;
    // All that come out, windows put together.
    RawVector<KeyPlace> rows;
    std::vector<KeyPlace> deletions;
    std::vector<std::uint64_t> newest;           // (sections)
    std::uint64_t rounds = 0, split_rounds = 0;  // That end within a grain.
    std::vector<std::byte> bytes;                // Section by section.
  };
  // Each round in `parts` parts, at borders of grains.
  Walked Walk(std::uint64_t buffer_bytes, std::uint64_t grain, std::uint64_t parts) {
    Walked walked;
    auto queue = fs_.NewReadQueue({});
    EXPECT_TRUE(queue.ok());
    auto rounds = KeyRounds::Create(queue->get(), sections_, buffer_bytes, grain);
    EXPECT_TRUE(rounds.ok());
    std::vector<std::vector<std::byte>> fresh(sections_.size());
    walked.status = WalkRounds(rounds->get(), grain, parts, &fresh, &walked);
    for (const std::vector<std::byte>& bytes : fresh) {
      walked.bytes.insert(walked.bytes.end(), bytes.begin(), bytes.end());
    }
    return walked;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::size_t size() const { return sections_.size(); }
  // The records that a section's entries are of.
  const std::vector<std::uint32_t>& rows(std::size_t section) const { return rows_[section]; }

 private:
  Status WalkRounds(KeyRounds* rounds, std::uint64_t grain, std::uint64_t parts,
                    std::vector<std::vector<std::byte>>* fresh, Walked* walked) {
    KeyWindows windows(rounds);
    std::uint64_t next = 0;
    while (true) {
      TERRACE_ASSIGN_OR_RETURN(const bool more, rounds->Next());
      if (!more) break;
      EXPECT_EQ(rounds->first(), next);
      next = rounds->last() + 1;
      ++walked->rounds;
      if (next % grain != 0) ++walked->split_rounds;
      for (std::size_t s = 0; s < sections_.size(); ++s) {
        const auto brought = rounds->fresh(s);
        (*fresh)[s].insert((*fresh)[s].end(), brought.begin(), brought.end());
      }
      const std::uint64_t grains = rounds->last() / grain - rounds->first() / grain + 1;
      for (std::uint64_t part = 0; part < parts; ++part) {
        const std::uint64_t begin = rounds->first() / grain + grains * part / parts;
        const std::uint64_t end = rounds->first() / grain + grains * (part + 1) / parts;
        if (begin == end) continue;
        windows.Start(std::max(rounds->first(), begin * grain),
                      std::min(rounds->last(), end * grain - 1));
        while (!windows.done()) {
          TERRACE_RETURN_IF_ERROR(windows.Next(&walked->rows, &walked->deletions));
        }
      }
    }
    for (std::size_t s = 0; s < size(); ++s) walked->newest.push_back(windows.newest(s));
    return OkStatus();
  }

  MemoryFileSystem fs_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<KeySection> sections_;
  std::vector<std::byte> bytes_;
  std::vector<std::vector<std::uint32_t>> rows_;
  Rng rng_{99};
};

using Places = std::vector<std::tuple<std::uint64_t, Place>>;

Places PlacesOf(std::span<const KeyPlace> keys) {
  Places places;
  for (const KeyPlace& key : keys) places.emplace_back(key.hash, key.place);
  return places;
}

constexpr std::uint64_t kGrain = std::uint64_t{1} << 52;

// Sections of random lengths whose hashes are the low `bits` bits of random numbers above `base`
// give the newest version of each key, in order, whatever the buffers hold and however a round is
// divided.
testing::AssertionResult MergesRight(std::uint64_t seed, std::uint64_t base, int bits,
                                     std::uint64_t most, std::uint64_t grain = kGrain) {
  Rng rng(seed);
  Sections sections;
  // Hash, sequence, section, and entry of it: the last one of a hash is its newest.
  std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint32_t, std::size_t>> versions;
  for (std::uint32_t source = 0; source < 7; ++source) {
    std::vector<std::uint64_t> hashes(rng.Below(most) + 1);
    for (std::uint64_t& hash : hashes) hash = base + (rng.Next() >> (64 - bits));
    std::sort(hashes.begin(), hashes.end());
    hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
    sections.Add(hashes);
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      versions.emplace_back(hashes[i], Sections::SequenceAt(i), source, i);
    }
  }
  std::sort(versions.begin(), versions.end());
  Places rows, deletions;
  std::vector<std::uint64_t> newest(sections.size());
  for (std::size_t v = 0; v < versions.size(); ++v) {
    const auto& [hash, sequence, source, i] = versions[v];
    if (v + 1 < versions.size() && std::get<0>(versions[v + 1]) == hash) continue;
    ++newest[source];
    (Sections::IsDeletionAt(i) ? deletions : rows)
        .emplace_back(hash, MakePlace(source, sections.rows(source)[i]));
  }
  // The least, some, and more than all.
  for (const std::uint64_t blocks :
       {std::uint64_t{0}, std::uint64_t{100}, std::uint64_t{1} << 20}) {
    for (const std::uint64_t parts : {1, 5}) {
      const Sections::Walked walked = sections.Walk(blocks * kBlockBytes, grain, parts);
      if (!walked.status.ok()) return testing::AssertionFailure() << walked.status.ToString();
      if (walked.bytes != sections.bytes()) {
        return testing::AssertionFailure() << "seed " << seed << ": bytes read are other ones";
      }
      if (PlacesOf(walked.rows) != rows || PlacesOf(walked.deletions) != deletions) {
        return testing::AssertionFailure()
               << "seed " << seed << ": " << walked.rows.size() << " rows and "
               << walked.deletions.size() << " deletions of " << rows.size() << " and "
               << deletions.size() << ", or other ones";
      }
      if (walked.newest != newest) {
        return testing::AssertionFailure() << "seed " << seed << ": other versions are newest";
      }
      if (blocks == 1 << 20 && walked.rounds != 1) {
        return testing::AssertionFailure() << walked.rounds << " rounds of what one would hold";
      }
    }
  }
  return testing::AssertionSuccess();
}

TEST(KeyWindows, UniformHashes) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) EXPECT_TRUE(MergesRight(seed, 0, 64, 40'000));
}
TEST(KeyWindows, FewHashes) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) EXPECT_TRUE(MergesRight(seed, 0, 64, 5));
}
TEST(KeyWindows, HashesInEverySection) { EXPECT_TRUE(MergesRight(1, 0, 12, 6'000, 1 << 8)); }
TEST(KeyWindows, HashesThatLieTogether) {
  EXPECT_TRUE(MergesRight(1, std::uint64_t{0x123456789} << 28, 18, 20'000));
  EXPECT_TRUE(MergesRight(2, 0 - (std::uint64_t{1} << 18), 18, 20'000));  // Up to the last one.
}
// Keys that somebody chose: many more in a bucket than it has room for, and the greatest hash.
TEST(KeyWindows, HashesOfOneBucket) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    EXPECT_TRUE(MergesRight(seed, 0 - (std::uint64_t{1} << 5), 5, 200));
    EXPECT_TRUE(MergesRight(seed, std::uint64_t{seed} << 60, 6, 200));
  }
}
TEST(KeyWindows, GrainsOfSomeHashes) { EXPECT_TRUE(MergesRight(3, 0, 14, 6'000, 16)); }

// Sections that hold ranges of their own, so that what is read of one waits for the others.
void WalkOneAfterAnother(std::uint64_t count_of_sections, std::uint64_t count, int bits) {
  for (const bool downwards : {false, true}) {
    Sections sections;
    for (std::uint64_t s = 0; s < count_of_sections; ++s) {
      const std::uint64_t base = (downwards ? count_of_sections - 1 - s : s) << bits;
      std::vector<std::uint64_t> hashes(count);
      for (std::uint64_t i = 0; i < count; ++i) hashes[i] = base + (i << 40);
      sections.Add(hashes);
    }
    const Sections::Walked walked = sections.Walk(0, kGrain, 3);
    ASSERT_TRUE(walked.status.ok()) << walked.status.ToString();
    ASSERT_EQ(walked.rows.size() + walked.deletions.size(), count_of_sections * count);
    EXPECT_EQ(walked.bytes, sections.bytes());
  }
}
TEST(KeyWindows, SectionsOneAfterAnother) { WalkOneAfterAnother(5, 3'000, 60); }
TEST(KeyWindows, HundredsOfSectionsOneAfterAnother) { WalkOneAfterAnother(500, 700, 55); }

// Where buffers hold grains, rounds end with one; and no more rounds are made than that takes.
TEST(KeyWindows, RoundsEndWithGrains) {
  Rng rng(1);
  Sections sections;
  std::uint64_t blocks = 0;
  for (int s = 0; s < 10; ++s) {
    std::vector<std::uint64_t> hashes(50'000);
    for (std::uint64_t& hash : hashes) hash = rng.Next();
    std::sort(hashes.begin(), hashes.end());
    sections.Add(hashes);
    blocks += AlignUp(hashes.size() * sizeof(KeyEntry), kBlockBytes) / kBlockBytes;
  }
  constexpr std::uint64_t kBuffer = 200;  // Blocks, of two.
  const Sections::Walked walked = sections.Walk(2 * kBuffer * kBlockBytes, kGrain, 2);
  ASSERT_TRUE(walked.status.ok()) << walked.status.ToString();
  EXPECT_EQ(walked.split_rounds, 0u);
  EXPECT_LE(walked.rounds, blocks / (kBuffer - 2 * sections.size()) + 2);
}

// Hundreds of sections and buffers of two blocks for each: a round brings some of all.
TEST(KeyWindows, ManySectionsInSmallBuffers) {
  constexpr std::uint64_t kSections = 300, kCount = 5'000;
  Rng rng(1);
  Sections sections;
  for (std::uint64_t s = 0; s < kSections; ++s) {
    std::vector<std::uint64_t> hashes(kCount);
    for (std::uint64_t& hash : hashes) hash = rng.Next();
    std::sort(hashes.begin(), hashes.end());
    sections.Add(hashes);
  }
  const Sections::Walked walked = sections.Walk(0, kGrain, 1);
  ASSERT_TRUE(walked.status.ok()) << walked.status.ToString();
  EXPECT_EQ(walked.rows.size() + walked.deletions.size(), kSections * kCount);
  EXPECT_EQ(walked.bytes, sections.bytes());
  EXPECT_LE(walked.rounds, 2 * kCount * sizeof(KeyEntry) / kBlockBytes);
}

TEST(KeyWindows, AnEntryOfARecordThatIsNotThere) {
  for (const std::uint64_t row : {std::uint64_t{9}, std::uint64_t{10}, kMaxRowsPerFile - 1}) {
    MemoryFileSystem fs;
    std::vector<KeyEntry> entries(kBlockBytes / sizeof(KeyEntry));
    for (std::uint64_t i = 0; i < 10; ++i) entries[i] = {UnmixKey(i + 1), 1 | i << kSequenceBits};
    entries[4].version = 1 | row << kSequenceBits;
    auto file = fs.Open("/section", OpenMode::kCreate);
    TERRACE_ASSERT_OK(file);
    TERRACE_ASSERT_OK((*file)->WriteAt(0, std::as_bytes(std::span(entries))));
    auto queue = fs.NewReadQueue({});
    TERRACE_ASSERT_OK(queue);
    const KeySection section{file->get(), 0, 10};
    auto rounds = KeyRounds::Create(queue->get(), {&section, 1}, 0, kGrain);
    TERRACE_ASSERT_OK(rounds);
    TERRACE_ASSERT_OK((*rounds)->Next());
    KeyWindows windows(rounds->get());
    windows.Start((*rounds)->first(), (*rounds)->last());
    RawVector<KeyPlace> rows;
    std::vector<KeyPlace> deletions;
    Status status;
    while (!windows.done() && status.ok()) status = windows.Next(&rows, &deletions);
    EXPECT_EQ(status.code(), row < 10 ? StatusCode::kOk : StatusCode::kCorruption)
        << status.ToString();
    EXPECT_EQ(status.message().find("offset 64") != std::string::npos, row >= 10);
  }
}

TEST(KeyWindows, SectionsThatAreNotSorted) {
  constexpr std::uint64_t kCount = 3'000;  // Several buffers.
  for (std::uint64_t bad = 1; bad < kCount; bad += bad < 600 ? 1 : 101) {
    for (const std::uint64_t wrong : {std::uint64_t{0}, bad - 1}) {
      std::vector<std::uint64_t> hashes, others;
      for (std::uint64_t i = 0; i < kCount; ++i) hashes.push_back((i + 1) << 50);
      for (std::uint64_t i = 0; i < kCount; ++i) others.push_back((i + 1) << 49);
      hashes[bad] = hashes[wrong];
      Sections sections;
      sections.Add(others);
      sections.Add(hashes);
      for (const std::uint64_t blocks : {0, 10, 1000}) {
        for (const std::uint64_t parts : {1, 3}) {
          SCOPED_TRACE(std::to_string(bad) + " is as " + std::to_string(wrong) + ", " +
                       std::to_string(blocks) + " blocks, " + std::to_string(parts) + " parts");
          const Status status = sections.Walk(blocks * kBlockBytes, kGrain, parts).status;
          ASSERT_EQ(status.code(), StatusCode::kCorruption);
          ASSERT_NE(status.message().find("/section1: the keys at offset"), std::string::npos)
              << status.ToString();
        }
      }
    }
  }
}

// The greatest hash, and something behind it.
TEST(KeyWindows, BehindTheLastHash) {
  constexpr std::uint64_t kCount = 700;
  for (const std::uint64_t last : {std::uint64_t{255}, std::uint64_t{300}, kCount - 2}) {
    std::vector<std::uint64_t> hashes;
    for (std::uint64_t i = 0; i < kCount; ++i) hashes.push_back((i + 1) << 50);
    hashes[last] = ~std::uint64_t{0};
    Sections sections;
    sections.Add(hashes);
    for (const std::uint64_t blocks : {0, 1000}) {
      const Status status = sections.Walk(blocks * kBlockBytes, kGrain, 2).status;
      EXPECT_EQ(status.code(), StatusCode::kCorruption) << last;
    }
  }
}

TEST(KeyWindows, FileThatEndsEarly) {
  MemoryFileSystem fs;
  auto file = fs.Open("/short", OpenMode::kCreate);
  ASSERT_TRUE(file.ok() && (*file)->WriteAt(0, std::vector<std::byte>(kBlockBytes)).ok());
  auto queue = fs.NewReadQueue({});
  ASSERT_TRUE(queue.ok());
  const KeySection section = {file->get(), 0, 2 * kBlockBytes / kKeyEntryBytes};
  auto rounds = KeyRounds::Create(queue->get(), {&section, 1}, 1 << 20, kGrain);
  ASSERT_TRUE(rounds.ok());
  const Status status = (*rounds)->Next().status();
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_EQ(status.message(), "'/short' ends at byte 4096, 4096 bytes before it should");
}

}  // namespace
}  // namespace terrace
