// The index by key while it grows by a factor of ten: bytes a key (mean and most), the rate of
// inserts and the longest of their batches, then look-ups of random keys, present and absent, as a
// share of the rate at which a thread can ask memory for random cache lines.
//
//   key_index_bench [--tiny] [--keys N] [--batch N] [--rounds N] [--seed S]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/testing/bench_keys.h"
#include "terrace/base/testing/bench_spread.h"
#include "terrace/store/key_index.h"

namespace terrace {
namespace {

constexpr int kRowBits = 19;
constexpr std::uint64_t kLineBytes = 64;

struct Settings {
  std::uint64_t keys = 20'000'000;
  std::uint64_t batch = 100'000;
  int rounds = 9;
  std::uint64_t seed = 0;
};

double Now() { return Clock::Real()->MonotonicSeconds(); }

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "key_index_bench: %s\n", what);
  std::exit(1);
}

// Of the key with that number.
Place PlaceOf(std::uint64_t number) {
  return MakePlace(static_cast<std::uint32_t>(number >> kRowBits),
                   number & ((std::uint64_t{1} << kRowBits) - 1));
}

void Grow(const Settings& settings, KeyIndex* index) {
  const BenchKeys all(settings.seed);
  std::vector<std::uint64_t> hashes;
  std::vector<Place> places;
  std::vector<double> seconds;
  double bytes_sum = 0, bytes_most = 0;
  int points = 0;
  for (std::uint64_t key = 0; key < settings.keys;) {
    hashes.clear();
    places.clear();
    for (; hashes.size() < settings.batch && key < settings.keys; ++key) {
      hashes.push_back(MixKey(all.At(key)));
    }
    // As a store has the keys of a file.
    std::sort(hashes.begin(), hashes.end());
    for (const std::uint64_t hash : hashes) places.push_back(PlaceOf(all.NumberOf(UnmixKey(hash))));
    const double begin = Now();
    Require(index->Reserve(hashes, /*expected=*/0).ok(), "no memory");
    index->Insert(hashes, places.data());
    if (key < settings.keys / 10) continue;
    seconds.push_back(Now() - begin);
    const double bytes = static_cast<double>(index->bytes()) / static_cast<double>(index->size());
    bytes_sum += bytes;
    bytes_most = std::max(bytes_most, bytes);
    ++points;
  }
  const Spread batch = SpreadOf(seconds);
  const auto keys = static_cast<double>(settings.batch);
  std::printf("from %.1fM to %.1fM keys: %.2f bytes a key on average, %.2f at most\n",
              static_cast<double>(settings.keys) / 1e7, static_cast<double>(settings.keys) / 1e6,
              bytes_sum / points, bytes_most);
  std::printf(
      "inserts: %.2f M/s (%.2f..%.2f); of batches of %llu the median takes %.1f ms, the longest "
      "%.1f; n %zu\n",
      keys / batch.median / 1e6, keys / batch.most / 1e6, keys / batch.least / 1e6,
      static_cast<unsigned long long>(settings.batch), batch.median * 1e3, batch.most * 1e3,
      batch.samples);
}

// Lines a second, the addresses known ahead.
Spread RandomLines(const Settings& settings, std::uint64_t bytes, Rng* rng) {
  auto memory = HugeBuffer::Allocate(bytes);
  Require(memory.ok(), "no memory");
  for (std::uint64_t at = 0; at < memory->size(); at += kLineBytes)
    memory->data()[at] = std::byte{1};
  std::vector<const std::byte*> lines(settings.batch);
  std::vector<double> rates;
  std::uint64_t sum = 0;
  for (int round = 0; round < settings.rounds; ++round) {
    for (auto& line : lines) line = memory->data() + rng->Below(bytes / kLineBytes) * kLineBytes;
    const double begin = Now();
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (i + 16 < lines.size()) __builtin_prefetch(lines[i + 16]);
      sum += static_cast<std::uint64_t>(*lines[i]);
    }
    rates.push_back(static_cast<double>(lines.size()) / (Now() - begin));
  }
  Require(sum == settings.batch * static_cast<std::uint64_t>(settings.rounds), "lost a line");
  return SpreadOf(rates);
}

Spread Lookups(const Settings& settings, const KeyIndex& index, bool present, Rng* rng) {
  const BenchKeys all(settings.seed);
  std::vector<std::uint64_t> numbers(settings.batch), hashes(settings.batch);
  std::vector<Place> places(settings.batch);
  std::vector<double> rates;
  std::uint64_t mistaken = 0;
  for (int round = 0; round < settings.rounds; ++round) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = rng->Below(settings.keys) + (present ? 0 : settings.keys);
      hashes[i] = MixKey(all.At(numbers[i]));
    }
    const double begin = Now();
    index.Lookup(hashes, places.data());
    rates.push_back(static_cast<double>(numbers.size()) / (Now() - begin));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (present) Require(places[i] == PlaceOf(numbers[i]), "a wrong place");
      if (!present) mistaken += places[i] != kNoPlace ? 1 : 0;
    }
  }
  if (!present) {
    std::printf(
        "absent keys taken for another: %.2e\n",
        static_cast<double>(mistaken) /
            static_cast<double>(settings.batch * static_cast<std::uint64_t>(settings.rounds)));
  }
  return SpreadOf(rates);
}

int Main(int argc, char** argv) {
  Settings settings;
  BenchFlags flags([&] {
    settings.keys = 200'000;
    settings.batch = 10'000;
    settings.rounds = 3;
  });
  flags.Add("keys", &settings.keys);
  flags.Add("batch", &settings.batch);
  flags.Add("rounds", &settings.rounds);
  flags.AddSeed(&settings.seed);
  if (!flags.Parse(argc, argv)) return 2;
  Require(settings.keys >= 10 && settings.batch > 0 && settings.rounds > 0, "numbers above 0");
  KeyIndex index(kRowBits);
  Grow(settings, &index);
  Rng rng(settings.seed);
  const Spread lines = RandomLines(settings, index.bytes(), &rng);
  std::printf("random lines of as much memory: %s M/s; n %zu\n", lines.Text(1, 1e-6).c_str(),
              lines.samples);
  for (const bool present : {true, false}) {
    const Spread rate = Lookups(settings, index, present, &rng);
    std::printf("look-ups of %s keys: %s M/s, %.0f %% of it; n %zu\n",
                present ? "present" : "absent", rate.Text(1, 1e-6).c_str(),
                100 * rate.median / lines.median, rate.samples);
  }
  return 0;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) { return terrace::Main(argc, argv); }
