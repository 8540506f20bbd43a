// eviction_bench: how many rows of a batch each eviction policy finds in memory. The cache's own
// policies run over the distinct keys of batches, which are pinned as the pipeline pins them and
// released `sets` batches later; beside them the optimum that knows the future and may evict at any
// time (Belady 1966), LRU alone, and the structure that AIBox describes. Traces: generated click
// logs, one whose popularity drifts, and real clicks where they lie. Axes: trace, policy, rows in
// memory as a share of the distinct ones. Of the policy that looks ahead also: of the evicted rows
// that come again, the percentage of which it was known when, and of those that do not, the
// percentage that was taken for others. --tiny checks the results on short traces.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/cache/eviction_policy.h"
#include "terrace/data/click_log_generator.h"
#include "terrace/data/example_source.h"
#include "terrace/io/file_system.h"
#include "terrace/pipeline/look_ahead.h"
#include "terrace/pipeline/testing/aibox_cache.h"
#include "terrace/pipeline/testing/eviction_trace.h"
#include "terrace/pipeline/testing/optimal_cache.h"

namespace terrace {
namespace {

constexpr std::uint32_t kNever = ~std::uint32_t{0};
constexpr std::array<std::uint64_t, 4> kParts = {16, 8, 4, 2};  // Rows in memory: one of so many.
constexpr std::uint32_t kSlots = 26;

struct Settings {
  std::uint64_t examples = 800'000;
  std::uint64_t cardinality = 1'000'000;
  std::uint32_t batch = 8192;      // Examples.
  std::uint32_t minibatch = 2048;  // A batch is cut between mini-batches.
  std::uint64_t sets = 3;          // Working sets pinned at a time: depth 2.
  std::string only;                // A trace's name; empty: all.
  std::uint64_t seed = 0;          // Of the generated logs.
  std::string real_folder = TERRACE_REAL_DATA_DIR;
};

// Distinct keys of each mini-batch, as numbers from 0 in the order of their first occurrence.
struct Log {
  std::vector<std::vector<std::uint32_t>> minibatches;
  std::uint32_t keys = 0;
};

class LogBuilder {
 public:
  void Add(Key key) {
    const auto [entry, is_new] = numbers_.try_emplace(key, log_.keys);
    if (is_new) {
      ++log_.keys;
      last_.push_back(kNever);
    }
    std::uint32_t& last = last_[entry->second];
    const auto now = static_cast<std::uint32_t>(log_.minibatches.size());
    if (last != now) minibatch_.push_back(entry->second);
    last = now;
  }
  void EndMinibatch() { log_.minibatches.push_back(std::exchange(minibatch_, {})); }
  Log Take() { return std::move(log_); }

 private:
  std::unordered_map<Key, std::uint32_t> numbers_;
  std::vector<std::uint32_t> last_;  // (keys) The last mini-batch with it.
  std::vector<std::uint32_t> minibatch_;
  Log log_;
};

Log ReadLog(const DataOptions& options, std::uint64_t examples, std::uint32_t minibatch) {
  auto source = OpenSource(FileSystem::Posix(), options);
  Require(source.ok(), source.status().ToString());
  LogBuilder log;
  for (std::uint64_t done = 0; done < examples;) {
    auto batch = (*source)->Next(minibatch, minibatch);
    Require(batch.ok(), batch.status().ToString());
    if (!batch->has_value()) break;
    if ((*batch)->examples == 0) continue;
    for (const Key key : (*batch)->keys) log.Add(key);
    log.EndMinibatch();
    done += (*batch)->examples;
  }
  return log.Take();
}

// The power law of the generator, but each category keeps its rank for `life` examples only, then
// another takes it: not all at the same moment.
Log MakeDriftingLog(const Settings& settings, double zipf, std::uint64_t life) {
  const ZipfSampler sampler(settings.cardinality, zipf);
  std::vector<std::uint64_t> hashes(settings.minibatch), ranks(settings.minibatch);
  LogBuilder log;
  for (std::uint64_t first = 0; first < settings.examples; first += settings.minibatch) {
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      const std::uint64_t of_slot = HashCombine(settings.seed, slot);
      for (std::uint64_t i = 0; i < hashes.size(); ++i) {
        hashes[i] = HashCombine(of_slot, first + i);
      }
      sampler.Sample(hashes.data(), hashes.size(), ranks.data());
      for (std::uint64_t i = 0; i < hashes.size(); ++i) {
        const std::uint64_t place = HashCombine(of_slot, ranks[i]);
        const std::uint64_t generation = (first + i + place % life) / life;
        log.Add(HashCombine(place, generation));
      }
    }
    log.EndMinibatch();
  }
  return log.Take();
}

// Mini-batches together, up to `most` of them; a batch ends before it has more than `rows` keys.
Trace MakeTrace(const Log& log, std::size_t most, std::uint64_t rows) {
  Trace trace;
  trace.keys = log.keys;
  std::vector<std::uint32_t> last(log.keys, kNever);
  std::size_t minibatches = most;
  for (const auto& minibatch : log.minibatches) {
    const auto current = static_cast<std::uint32_t>(trace.batches.size()) - 1;
    const auto fresh = static_cast<std::uint64_t>(
        std::count_if(minibatch.begin(), minibatch.end(),
                      [&](std::uint32_t key) { return last[key] != current; }));
    if (minibatches == most || trace.batches.back().size() + fresh > rows) {
      trace.batches.emplace_back();
      minibatches = 0;
    }
    ++minibatches;
    const auto now = static_cast<std::uint32_t>(trace.batches.size()) - 1;
    for (const std::uint32_t key : minibatch) {
      if (last[key] != now) trace.batches.back().push_back(key);
      last[key] = now;
    }
  }
  return trace;
}

// What RowCache does with its policy, without rows, stores and threads.
class PolicyRun {
 public:
  // looks_ahead: at the batches to come, as LookAhead does, each of which has a time of its own.
  PolicyRun(const EvictionOptions& options, std::uint64_t rows, bool looks_ahead)
      : arena_(kRowBytes, kChunkBytes), rows_(rows) {
    if (looks_ahead) {
      auto future = FutureKeys::Create(rows * FutureKeys::kBytesPerCachedRow);
      Require(future.ok(), future.status().ToString());
      future_ = std::move(future).value();
    }
    auto policy = MakeEvictionPolicy(options, &arena_, future_.get());
    Require(policy.ok(), policy.status().ToString());
    policy_ = std::move(policy).value();
    const std::uint64_t chunks = rows / arena_.rows_per_chunk() + 1;
    for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
      auto memory = HugeBuffer::Allocate(kChunkBytes);
      Require(memory.ok(), memory.status().ToString());
      arena_.AddChunk(std::move(memory).value());
    }
    const Status reserved = policy_->Reserve(chunks * arena_.rows_per_chunk());
    Require(reserved.ok(), reserved.ToString());
    policy_->SetLimit(rows);
  }

  Score Run(const Trace& trace, std::uint64_t sets) {
    Scorer scorer(trace);
    places_.assign(trace.keys, kNoEntry);
    left_.assign(trace.keys, Left::kNot);
    std::deque<std::vector<EntryId>> pinned;
    for (std::size_t b = 0; b < trace.batches.size(); ++b) {
      if (pinned.size() == sets) {
        Release(pinned.front());
        pinned.pop_front();
      }
      pinned.push_back(Pin(trace.batches[b], b, &scorer));
      if (future_ != nullptr) LookAheadFrom(b + 1, trace);
    }
    return scorer.score(watch_.seconds());
  }

  // Of the evicted rows that came again, the percentage of which it was known when; of those that
  // did not, the percentage that was taken for others.
  double KnownNext() const { return Percent(came_known_, came_); }
  double WrongNext() const {
    const auto count = [this](Left left) {
      return static_cast<std::uint64_t>(std::count(left_.begin(), left_.end(), left));
    };
    return Percent(count(Left::kKnown), count(Left::kKnown) + count(Left::kUnknown));
  }

 private:
  enum class Left : std::uint8_t { kNot, kUnknown, kKnown };  // Whether it was known to come.
  static double Percent(std::uint64_t part, std::uint64_t all) {
    return 100.0 * static_cast<double>(part) / static_cast<double>(std::max<std::uint64_t>(1, all));
  }

  // Batches before `batch` are pinned or gone.
  void LookAheadFrom(std::size_t batch, const Trace& trace) {
    constexpr std::uint64_t kTick = FutureKeys::kTickExamples;
    looks_ahead_ = looks_ahead_ || LookAhead::Fills(arena_.used_rows(), rows_);
    if (!looks_ahead_) return;
    front_ = std::max(front_, batch);
    future_->SetNow(batch * kTick);
    for (; front_ < trace.batches.size() && future_->CanAdd(front_ * kTick); ++front_) {
      const std::vector<std::uint32_t>& keys = trace.batches[front_];
      future_->Add(std::vector<Key>(keys.begin(), keys.end()), front_ * kTick);
    }
  }

  static constexpr std::uint32_t kRowBytes = 8;
  static constexpr std::uint64_t kChunkBytes = std::uint64_t{256} << 10;
  static constexpr std::size_t kGroup = 64, kVictims = 32;  // As RowCache asks.

  std::vector<EntryId> Pin(const std::vector<std::uint32_t>& keys, std::size_t batch,
                           Scorer* scorer) {
    std::vector<EntryId> entries;
    std::vector<std::uint32_t> missing;
    for (const std::uint32_t key : keys) {
      const bool hit = places_[key] != kNoEntry;
      scorer->Visit(batch, key, hit);
      if (hit) {
        entries.push_back(places_[key]);
      } else {
        missing.push_back(key);
        came_ += left_[key] != Left::kNot ? 1 : 0;
        came_known_ += left_[key] == Left::kKnown ? 1 : 0;
        left_[key] = Left::kNot;
      }
    }
    watch_.Start();
    ForGroups(entries, [&](std::span<const EntryId> group) { policy_->Visit(group); });
    watch_.Stop();
    for (const EntryId id : entries) ++arena_.entry(id).pins;
    std::vector<EntryId> fresh = Allocate(missing);
    watch_.Start();
    ForGroups(fresh, [&](std::span<const EntryId> group) { policy_->Admit(group); });
    watch_.Stop();
    for (const EntryId id : fresh) arena_.entry(id).pins = 1;
    entries.insert(entries.end(), fresh.begin(), fresh.end());
    return entries;
  }

  std::vector<EntryId> Allocate(const std::vector<std::uint32_t>& keys) {
    std::vector<EntryId> fresh;
    std::array<EntryId, kVictims> victims;
    while (fresh.size() < keys.size()) {
      if (arena_.used_rows() == rows_) {
        watch_.Start();
        const std::size_t count =
            policy_->TakeVictims(std::min(kVictims, keys.size() - fresh.size()), victims.data());
        policy_->Leave({victims.data(), count});
        watch_.Stop();
        Require(count > 0, "no victim, though not every row is pinned");
        for (std::size_t i = 0; i < count; ++i) {
          const Entry& entry = arena_.entry(victims[i]);
          Require(entry.pins == 0, "a pinned row was evicted");
          places_[entry.key] = kNoEntry;
          if (looks_ahead_) {
            const bool known = future_->TicksUntilNext(MixKey(entry.key)) != FutureKeys::kNever;
            left_[entry.key] = known ? Left::kKnown : Left::kUnknown;
          }
          arena_.Free(victims[i]);
        }
      }
      const EntryId id = arena_.Allocate();
      arena_.entry(id).key = keys[fresh.size()];
      places_[keys[fresh.size()]] = id;
      fresh.push_back(id);
    }
    return fresh;
  }

  void Release(const std::vector<EntryId>& entries) {
    std::vector<EntryId> released;
    for (const EntryId id : entries) {
      Entry& entry = arena_.entry(id);
      if (--entry.pins == 0 && entry.place == kHeld) released.push_back(id);
    }
    watch_.Start();
    ForGroups(released, [&](std::span<const EntryId> group) { policy_->Release(group); });
    watch_.Stop();
  }

  template <typename Body>
  static void ForGroups(std::span<const EntryId> entries, const Body& body) {
    for (std::size_t begin = 0; begin < entries.size(); begin += kGroup) {
      body(entries.subspan(begin, std::min(kGroup, entries.size() - begin)));
    }
  }

  RowArena arena_;
  const std::uint64_t rows_;
  std::unique_ptr<FutureKeys> future_;  // Null: nobody looks ahead.
  bool looks_ahead_ = false;
  std::size_t front_ = 0;  // The first batch that was not looked at.
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<EntryId> places_;  // (keys) kNoEntry: not in memory.
  std::vector<Left> left_;       // (keys) When their row was evicted, while it is not back.
  std::uint64_t came_ = 0, came_known_ = 0;  // Evicted rows that came again.
  Stopwatch watch_;
};

// The most distinct keys of so many batches one after another.
std::uint64_t MostHeld(const Trace& trace, std::uint64_t sets) {
  std::vector<std::uint32_t> batches_with(trace.keys);  // Of the last `sets`.
  std::uint64_t held = 0, most = 0;
  for (std::size_t b = 0; b < trace.batches.size(); ++b) {
    for (const std::uint32_t key : trace.batches[b]) held += batches_with[key]++ == 0 ? 1 : 0;
    if (b >= sets) {
      for (const std::uint32_t key : trace.batches[b - sets]) {
        held -= --batches_with[key] == 0 ? 1 : 0;
      }
    }
    most = std::max(most, held);
  }
  return most;
}

void PrintLine(const char* name, const std::vector<Score>& scores) {
  std::printf("  %-28s", name);
  for (const Score& score : scores) {
    std::printf("  %5.1f %5.1f", score.Hits(), score.KnownHits());
    if (score.seconds > 0) {
      std::printf(" %4.0f", score.Nanos());
    } else {
      std::printf("    -");
    }
  }
  std::printf("\n");
}

struct NamedPolicy {
  const char* name;
  EvictionOptions options;
  bool looks_ahead = false;
};
const NamedPolicy kPolicies[] = {
    {"s3_fifo, looking ahead", {.type = EvictionType::kS3Fifo}, true},
    {"s3_fifo", {.type = EvictionType::kS3Fifo}},
    {"lru_lfu", {.type = EvictionType::kLruLfu}},
    {"lru_lfu, share 0.25", {.type = EvictionType::kLruLfu, .lru_share = 0.25}},
    {"lru_lfu, half-life 3", {.type = EvictionType::kLruLfu, .half_life = 3}},
    {"lru_lfu, never halved", {.type = EvictionType::kLruLfu, .half_life = 0}},
    {"pass_lfu", {.type = EvictionType::kPassLfu}},
    {"pass_lfu, never halved", {.type = EvictionType::kPassLfu, .half_life = 0}},
    {"LRU alone", {.type = EvictionType::kLruLfu, .lru_share = 1}},
};

void CompareOn(const char* name, const Log& log, const Settings& settings,
               std::uint32_t minibatch) {
  std::array<Trace, kParts.size()> traces;
  std::array<std::uint64_t, kParts.size()> rows;
  std::vector<Score> optimum;
  for (std::size_t p = 0; p < kParts.size(); ++p) {
    rows[p] = log.keys / kParts[p];
    traces[p] = MakeTrace(log, std::max<std::size_t>(1, settings.batch / minibatch),
                          rows[p] / settings.sets);
    for (const auto& batch : traces[p].batches) {
      Require(batch.size() * settings.sets <= rows[p],
              std::string(name) + ": a mini-batch alone is too large for the least memory");
    }
    optimum.push_back(RunOptimum(traces[p], rows[p]));
  }
  std::printf("%s: %u distinct rows, %zu mini-batches of %u; batches of %zu, %zu, %zu, %zu rows\n",
              name, log.keys, log.minibatches.size(), minibatch, traces[0].batches[0].size(),
              traces[1].batches[0].size(), traces[2].batches[0].size(),
              traces[3].batches[0].size());
  std::printf("  %-28s", "rows in memory");
  for (const std::uint64_t part : kParts)
    std::printf("  1/%-15llu", static_cast<unsigned long long>(part));
  std::printf("\n  %-28s", "");
  for (std::size_t p = 0; p < kParts.size(); ++p) std::printf("   hits known   ns");
  std::printf("\n");
  PrintLine("optimum", optimum);
  for (const NamedPolicy& policy : kPolicies) {
    std::vector<Score> scores;
    std::string known;
    for (std::size_t p = 0; p < kParts.size(); ++p) {
      PolicyRun run(policy.options, rows[p], policy.looks_ahead);
      scores.push_back(run.Run(traces[p], settings.sets));
      if (policy.looks_ahead) {
        known += fmt::format("  {:5.1f} {:5.1f}     ", run.KnownNext(), run.WrongNext());
      }
      Require(scores[p].visits == optimum[p].visits && scores[p].hits <= optimum[p].hits,
              std::string(policy.name) + " is better than the optimum");
      Require(scores[p].hits > 0, std::string(policy.name) + " never hits");
    }
    PrintLine(policy.name, scores);
    if (policy.looks_ahead) {
      std::printf("  %-28s%s\n", "  next use known, mistaken", known.c_str());
    }
  }
  std::vector<Score> aibox;
  for (std::size_t p = 0; p < kParts.size(); ++p) {
    AiboxCache run(rows[p], MostHeld(traces[p], settings.sets));
    aibox.push_back(run.Run(traces[p], settings.sets));
    Require(run.most_rows() <= rows[p] + rows[p] / 8, "AIBox's structure holds far too many rows");
  }
  PrintLine("AIBox's structure", aibox);
}

DataOptions Generated(const Settings& settings, double zipf) {
  DataOptions options;
  options.format = "synthetic";
  options.rows = settings.examples;
  options.cardinality = settings.cardinality;
  options.zipf = zipf;
  options.log_seed = settings.seed;
  return options;
}

// Where the real logs do not lie, a line says so.
void CompareOnFile(const char* name, const std::string& path, const Settings& settings) {
  const std::string full = settings.real_folder + "/" + path;
  if (!FileSystem::Posix()->Stat(full).ok()) {
    std::printf("%s: skipped, %s is not there\n", name, full.c_str());
    return;
  }
  DataOptions options;
  options.files = {full};
  options.integers = "bucket";
  constexpr std::uint32_t kMinibatch = 16;  // The logs are short.
  Settings small = settings;
  small.batch = 128;
  CompareOn(name, ReadLog(options, settings.examples, kMinibatch), small, kMinibatch);
}

void Run(const Settings& settings) {
  const std::uint32_t minibatch = settings.minibatch;
  const std::pair<const char*, std::function<void(const char*)>> traces[] = {
      {"zipf1.05",
       [&](const char* name) {
         CompareOn(name, ReadLog(Generated(settings, 1.05), settings.examples, minibatch), settings,
                   minibatch);
       }},
      {"zipf0.8",
       [&](const char* name) {
         CompareOn(name, ReadLog(Generated(settings, 0.8), settings.examples, minibatch), settings,
                   minibatch);
       }},
      {"slow-drift",
       [&](const char* name) {
         CompareOn(name, MakeDriftingLog(settings, 1.05, settings.examples / 2), settings,
                   minibatch);
       }},
      {"fast-drift",
       [&](const char* name) {
         CompareOn(name, MakeDriftingLog(settings, 1.05, settings.examples / 8), settings,
                   minibatch);
       }},
      {"criteo-kaggle",
       [&](const char* name) {
         CompareOnFile(name, "criteo-kaggle-head10k/train-10k.txt", settings);
       }},
      {"criteo-1tb",
       [&](const char* name) {
         CompareOnFile(name, "criteo-1tb-day0-10k/day_0.part.txt", settings);
       }},
  };
  bool any = false;
  for (const auto& [name, compare] : traces) {
    if (!settings.only.empty() && settings.only != name) continue;
    compare(name);
    any = true;
  }
  Require(any, "no trace is called " + settings.only);
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  terrace::Settings settings;
  terrace::BenchFlags flags([&] {
    settings.examples = 8192;
    settings.cardinality = 20'000;
    settings.batch = 256;
    settings.minibatch = 64;
  });
  flags.Add("examples", &settings.examples);
  flags.Add("batch", &settings.batch);
  flags.Add("minibatch", &settings.minibatch);
  flags.Add("sets", &settings.sets);
  flags.Add("trace", &settings.only);
  flags.AddSeed(&settings.seed);
  if (!flags.Parse(argc, argv)) return 2;
  if (settings.examples < 1024 || settings.minibatch == 0 || settings.sets == 0 ||
      settings.batch < settings.minibatch) {
    std::fprintf(stderr,
                 "eviction_bench: at least 1024 examples; a batch holds a mini-batch or more\n");
    return 2;
  }
  terrace::Run(settings);
  return 0;
}
