#include "terrace/pipeline/testing/optimal_cache.h"

#include <vector>

namespace terrace {

Score RunOptimum(const Trace& trace, std::uint64_t rows) {
  const auto batches = static_cast<std::uint32_t>(trace.batches.size());
  std::vector<std::vector<std::uint32_t>> next(batches);  // (batches, keys of it) The next with it.
  std::vector<std::uint32_t> wanted(trace.keys, batches);
  for (std::uint32_t b = batches; b-- > 0;) {
    for (const std::uint32_t key : trace.batches[b]) {
      next[b].push_back(wanted[key]);
      wanted[key] = b;
    }
  }
  Scorer scorer(trace);
  std::vector<bool> cached(trace.keys);
  // Keys by the batch that wants them next; an entry that is no longer true is skipped.
  std::vector<std::vector<std::uint32_t>> by_next(batches + 1);
  std::uint64_t used = 0;
  for (std::uint32_t b = 0; b < batches; ++b) {
    std::uint64_t missing = 0;
    for (const std::uint32_t key : trace.batches[b]) {
      scorer.Visit(b, key, cached[key]);
      missing += cached[key] ? 0 : 1;
      wanted[key] = b;
    }
    for (std::uint32_t last = batches; used + missing > rows;) {
      Require(last > b, "the batch does not fit");
      if (by_next[last].empty()) {
        --last;
        continue;
      }
      const std::uint32_t key = by_next[last].back();
      by_next[last].pop_back();
      if (!cached[key] || wanted[key] != last) continue;
      cached[key] = false;
      --used;
    }
    used += missing;
    for (std::size_t i = 0; i < trace.batches[b].size(); ++i) {
      const std::uint32_t key = trace.batches[b][i];
      cached[key] = true;
      wanted[key] = next[b][i];
      by_next[next[b][i]].push_back(key);
    }
  }
  return scorer.score(0);
}

}  // namespace terrace
