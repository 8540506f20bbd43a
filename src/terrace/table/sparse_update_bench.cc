// How fast mini-batches read and train rows that lie at random in a 1 GiB arena, in rows a second
// and as a share of a raw pass over the same rows: the same addresses in the same order, prefetched
// as far ahead, copied to where the gather puts them, or every line changed in place. With several
// threads each has its part of the examples or rows of every mini-batch, as in training, in the raw
// passes too, and what they reach is put beside one thread's. Prints the median of the rounds and
// their spread. The sums are compared with a plain loop before anything is timed.
//
//   table_sparse_update_bench [--tiny] [--rounds N] [--threads N] [--seed N]
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/prefetch.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/base/testing/bench_keys.h"
#include "terrace/base/thread.h"
#include "terrace/table/gather.h"
#include "terrace/table/sparse_update.h"
#include "terrace/table/testing/random_minibatch.h"

namespace terrace {
namespace {

constexpr std::uint32_t kSlots = 26;
constexpr std::size_t kRowsOfOneApply = 256;

struct Settings {
  std::uint64_t arena_bytes = std::uint64_t{1} << 30;
  std::size_t examples = 40960;  // Of a round, all distinct: most rows come from memory.
  int rounds = 7;
  int threads = 1;
  std::uint64_t seed = 0;
};

// One mini-batch with its rows in the arena.
struct Work {
  RandomMiniBatch batch;
  std::vector<std::byte*> rows;
  std::vector<const std::byte*> const_rows;
};

// Zipf-like keys: the number of a row is a power of a uniform draw; rows are spread by the mixed
// hash.
Work MakeWork(const RowSchema& schema, const HugeBuffer& arena, std::uint32_t examples,
              std::uint64_t key_seed, std::uint64_t seed, std::uint32_t dim) {
  const std::uint64_t places = arena.size() / schema.row_bytes();
  RandomMiniBatchOptions options;
  options.seed = seed;
  options.examples = examples;
  options.slots = kSlots;
  options.keys_per_slot = 1;
  options.exactly = true;
  options.rows = static_cast<std::uint32_t>(std::min<std::uint64_t>(places, 1u << 20));
  options.skew = 4.0;
  options.dim = dim;
  const BenchKeys keys(key_seed);
  Work work{RandomMiniBatch(options), {}, {}};
  std::vector<bool> taken(places);
  for (const std::uint32_t number : work.batch.row_number) {
    std::uint64_t place = keys.At(number) % places;
    while (taken[place]) place = (place + 1) % places;
    taken[place] = true;
    work.rows.push_back(arena.data() + place * schema.row_bytes());
    work.const_rows.push_back(work.rows.back());
  }
  return work;
}

PooledLookup LookupOf(const Work& work, std::span<const PooledSlot> slots) {
  PooledLookup lookup;
  lookup.row = work.const_rows;
  lookup.slots = slots;
  lookup.key_begin = work.batch.key_begin;
  lookup.data_slots = kSlots;
  lookup.row_index = work.batch.row_index;
  return lookup;
}

// A thread's share of what is numbered from 0.
struct Part {
  std::size_t begin, end;
};
Part PartOf(std::size_t count, std::size_t thread, std::size_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

// Copies the weights of some occurrences side by side, in the order of the gather.
void RawGather(const Work& work, Part part, std::size_t weight_bytes, float* block) {
  constexpr std::size_t kAhead = 24;
  const std::vector<std::uint32_t>& index = work.batch.row_index;
  std::byte* out = reinterpret_cast<std::byte*>(block);
  for (std::size_t o = part.begin; o < part.end; ++o, out += weight_bytes) {
    if (o + kAhead < part.end) PrefetchRead(work.rows[index[o + kAhead]], weight_bytes);
    std::memcpy(out, work.rows[index[o]], weight_bytes);
  }
}

// Changes one float of every line of the rows, in the order of the update.
void RawUpdate(const Work& work, Part part, std::size_t row_bytes) {
  const std::size_t ahead = std::clamp<std::size_t>(4096 / row_bytes, 4, 32);
  for (std::size_t r = part.begin; r < part.end; ++r) {
    if (r + ahead < part.end) PrefetchWrite(work.rows[r + ahead], row_bytes);
    for (std::size_t at = 0; at < row_bytes; at += kCacheLineBytes) {
      *reinterpret_cast<float*>(work.rows[r] + at) *= 0.999f;
    }
  }
}

void Train(const RowSchema& schema, const Work& work, Part part, std::vector<float>* sum,
           std::vector<StatisticsDelta>* delta) {
  const MiniBatchRows rows = work.batch.Rows(work.rows);
  const SparseGradients gradients = work.batch.Gradients();
  const float rate = 0.01f;
  const std::span<std::byte* const> all(work.rows);
  for (std::size_t first = part.begin; first < part.end; first += kRowsOfOneApply) {
    const std::size_t last = std::min(part.end, first + kRowsOfOneApply);
    Accumulate(schema, rows, gradients, first, last, sum->data(), delta->data());
    Apply(schema, {{&rate, 1}, 1}, all.subspan(first, last - first), sum->data(), delta->data());
  }
}

bool CheckGather(const RowSchema& schema, const Work& work, std::span<const PooledSlot> slots,
                 std::uint32_t dim) {
  const std::uint32_t examples = work.batch.options.examples;
  std::vector<float> block(examples * work.batch.stride());
  GatherPooled(schema, LookupOf(work, slots), 0, examples, block.data(), work.batch.stride(),
               nullptr);
  for (std::uint32_t e = 0; e < examples; ++e) {
    for (std::uint32_t s = 0; s < kSlots; ++s) {
      const std::byte* row = work.rows[work.batch.row_index[e * kSlots + s]];
      if (std::memcmp(row, &block[e * work.batch.stride() + s * dim], dim * 4) != 0) return false;
    }
  }
  return true;
}

bool CheckTrain(const RowSchema& schema, const Work& work, std::uint32_t dim) {
  std::vector<float> all(work.rows.size() * dim);
  std::vector<StatisticsDelta> delta(work.rows.size());
  Accumulate(schema, work.batch.Rows(work.rows), work.batch.Gradients(), 0, work.rows.size(),
             all.data(), delta.data());
  std::vector<float> expected(all.size());
  for (std::uint32_t e = 0; e < work.batch.options.examples; ++e) {
    for (std::uint32_t s = 0; s < kSlots; ++s) {
      const std::size_t row = work.batch.row_index[e * kSlots + s];
      for (std::uint32_t i = 0; i < dim; ++i) {
        expected[row * dim + i] += work.batch.gradient[e * work.batch.stride() + s * dim + i];
      }
    }
  }
  if (all != expected) return false;
  std::vector<float> sum(kRowsOfOneApply * dim);
  const float before = *reinterpret_cast<const float*>(work.rows[0]);
  Train(schema, work, {0, work.rows.size()}, &sum, &delta);
  return *reinterpret_cast<const float*>(work.rows[0]) != before;
}

struct Timing {
  double median = 0, spread = 0;  // Rows a second; (largest - smallest) / median.
};

Timing Summarise(std::vector<double> rates) {
  std::sort(rates.begin(), rates.end());
  const double median = rates[rates.size() / 2];
  return {median, (rates.back() - rates.front()) / median};
}

// What a thread works with.
struct Scratch {
  std::vector<float> block, sum;
  std::vector<StatisticsDelta> delta;
};

// Units a second of all threads, by the one that takes longest.
template <typename Body>
double RateOf(const std::vector<Work>& works, std::vector<Scratch>* scratch, std::size_t units,
              Body body) {
  std::vector<double> seconds(scratch->size());
  const auto run = [&](std::size_t thread) {
    const double start = ThreadCpuSeconds();  // Others on the machine do not count.
    for (const Work& work : works) body(work, thread, &(*scratch)[thread]);
    seconds[thread] = ThreadCpuSeconds() - start;
  };
  std::vector<Thread> threads;
  for (std::size_t t = 1; t < scratch->size(); ++t) {
    threads.emplace_back("bench", ThreadPriority::kNormal, [&run, t] { run(t); });
  }
  run(0);
  for (Thread& thread : threads) thread.Join();
  return static_cast<double>(units) / *std::max_element(seconds.begin(), seconds.end());
}

struct Rates {
  Timing ours, raw;
};

void Print(const char* what, std::uint32_t dim, std::uint32_t examples, const char* unit,
           const Rates& rates, std::size_t bytes) {
  std::printf(
      "%-16s dim %2u  mini-batch %4u  %6.1f M %s/s +-%2.0f %%  %5.1f GB/s  %3.0f %% of raw (%6.1f "
      "M)",
      what, dim, examples, rates.ours.median / 1e6, unit, 50 * rates.ours.spread,
      rates.ours.median * static_cast<double>(bytes) / 1e9,
      100 * rates.ours.median / rates.raw.median, rates.raw.median / 1e6);
}

// Behind what Print printed: how much more than one thread these reach, and the raw passes do.
void PrintScaling(const Rates& one, const Rates& all) {
  const double ours = all.ours.median / one.ours.median, raw = all.raw.median / one.raw.median;
  std::printf("  %4.2f x one thread's, raw %4.2f x: %3.0f %%", ours, raw, 100 * ours / raw);
}

bool RunOne(const Settings& settings, const HugeBuffer& arena, std::uint32_t dim,
            std::uint32_t examples) {
  SegmentSpec segment;
  segment.name = "embedding";
  segment.dim = dim;
  Result<RowSchema> created = RowSchema::Create("main", {segment});
  TERRACE_CHECK(created.ok());
  const RowSchema& schema = *created;
  std::vector<PooledSlot> slots;
  for (std::uint32_t s = 0; s < kSlots; ++s) slots.push_back({s, s * dim, false});
  std::vector<Work> works;
  std::size_t rows = 0, occurrences = 0;
  for (std::size_t b = 0; b < std::max<std::size_t>(1, settings.examples / examples); ++b) {
    works.push_back(
        MakeWork(schema, arena, examples, settings.seed, HashCombine(settings.seed, b), dim));
    rows += works.back().rows.size();
    occurrences += works.back().batch.row_index.size();
    for (std::size_t r = 0; r < works.back().rows.size(); ++r) {
      schema.InitializeRow(1, works.back().batch.row_number[r], works.back().rows[r]);
    }
  }
  if (!CheckGather(schema, works[0], slots, dim) || !CheckTrain(schema, works[0], dim)) {
    std::fprintf(stderr, "dim %u mini-batch %u: differs from the plain loop\n", dim, examples);
    return false;
  }
  std::vector<std::size_t> thread_counts = {1};
  if (settings.threads > 1) thread_counts.push_back(static_cast<std::size_t>(settings.threads));
  std::vector<Rates> gathers, updates;  // (thread_counts)
  for (const std::size_t threads : thread_counts) {
    std::vector<Scratch> scratch(threads);
    for (Scratch& of_thread : scratch) {
      of_thread.block.resize(examples * works[0].batch.stride());
      of_thread.sum.resize(kRowsOfOneApply * dim);
      of_thread.delta.resize(kRowsOfOneApply);
    }
    std::vector<double> gather, raw_gather, train, raw_update;
    for (int round = 0; round < settings.rounds; ++round) {
      const auto rate_of = [&](std::size_t units, const auto& body) {
        return RateOf(works, &scratch, units, body);
      };
      raw_gather.push_back(rate_of(occurrences, [&](const Work& w, std::size_t t, Scratch* s) {
        RawGather(w, PartOf(w.batch.row_index.size(), t, threads), dim * 4, s->block.data());
      }));
      gather.push_back(rate_of(occurrences, [&](const Work& w, std::size_t t, Scratch* s) {
        const Part part = PartOf(examples, t, threads);
        GatherPooled(schema, LookupOf(w, slots), part.begin, part.end, s->block.data(),
                     w.batch.stride(), nullptr);
      }));
      raw_update.push_back(rate_of(rows, [&](const Work& w, std::size_t t, Scratch*) {
        RawUpdate(w, PartOf(w.rows.size(), t, threads), schema.row_bytes());
      }));
      train.push_back(rate_of(rows, [&](const Work& w, std::size_t t, Scratch* s) {
        Train(schema, w, PartOf(w.rows.size(), t, threads), &s->sum, &s->delta);
      }));
    }
    gathers.push_back({Summarise(gather), Summarise(raw_gather)});
    updates.push_back({Summarise(train), Summarise(raw_update)});
  }
  Print("gather", dim, examples, "keys", gathers.back(), dim * 4);
  if (settings.threads > 1) PrintScaling(gathers[0], gathers[1]);
  std::printf("\n");
  Print("accumulate+apply", dim, examples, "rows", updates.back(), schema.row_bytes());
  if (settings.threads > 1) PrintScaling(updates[0], updates[1]);
  std::printf("\n");
  return true;
}

int Main(int argc, char** argv) {
  Settings settings;
  BenchFlags flags([&] {
    settings.arena_bytes = std::uint64_t{4} << 20;
    settings.examples = 4096;
    settings.rounds = 1;
    settings.threads = 2;
  });
  flags.Add("rounds", &settings.rounds);
  flags.Add("threads", &settings.threads);
  flags.AddSeed(&settings.seed);
  if (!flags.Parse(argc, argv)) return 2;
  if (settings.rounds < 1 || settings.threads < 1) {
    std::fprintf(stderr, "table_sparse_update_bench: a round and a thread at least\n");
    return 2;
  }
  Result<HugeBuffer> arena = HugeBuffer::Allocate(settings.arena_bytes);
  if (!arena.ok()) {
    std::fprintf(stderr, "%s\n", arena.status().ToString().c_str());
    return 1;
  }
  std::printf("threads: %d, adagrad, %u slots with one key each, rows of an arena of %llu MiB\n",
              settings.threads, kSlots,
              static_cast<unsigned long long>(settings.arena_bytes >> 20));
  for (std::uint32_t dim : {8u, 16u, 32u, 64u}) {
    for (std::uint32_t examples : {512u, 2048u}) {
      if (!RunOne(settings, *arena, dim, examples)) return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) { return terrace::Main(argc, argv); }
