#include "terrace/train/parts_plan.h"

#include <algorithm>
#include <vector>

#include "terrace/base/core_binding.h"
#include "terrace/base/topology.h"
#include "terrace/cache/parted_row_cache.h"
#include "terrace/train/binding_plan.h"
#include "terrace/train/run_marker.h"

namespace terrace {
namespace {

constexpr int kCoresOfPullThread = 4, kMostPullThreads = 8;
// What a shard has a share in at least, so that its buffers, its threads and the files that it
// keeps open are little of that; and stores of all tables together, each of which has threads of
// its own.
constexpr std::uint64_t kBudgetOfShard = std::uint64_t{256} << 20;
constexpr std::uint64_t kQuotaOfShard = std::uint64_t{2} << 30;
constexpr std::uint64_t kMostStores = 16;

// That this process may use. Of few units none are worth a look at the topology, which takes
// memory.
int CoresHere() {
  const Result<std::vector<int>> units = CurrentUnits();
  if (!units.ok()) return 1;
  const auto count = static_cast<int>(units->size());
  if (count < 2 * kCoresOfPullThread) return count;
  const Result<Topology> topology = ReadTopology();
  return topology.ok() ? static_cast<int>(topology->cores.size()) : count;
}

std::uint32_t PartsOf(const Job& job, int pulling, int shards) {
  RowCacheOptions options;
  options.background = job.pipeline.depth > 0;
  options.parts = static_cast<std::uint32_t>(pulling);
  return PartedRowCache::PartsFor(options, static_cast<std::size_t>(shards));
}

}  // namespace

int PullThreads(const Job& job, int cores) {
  if (job.pipeline.depth == 0) return 1;
  if (job.pipeline.pull_threads > 0) return job.pipeline.pull_threads;
  Job with_one = job;
  with_one.pipeline.pulling = 1;
  const int left = cores - ThreadsOf(with_one).all();
  int threads = std::min(cores / kCoresOfPullThread, kMostPullThreads);
  if (left >= 0) threads = std::min(threads, left + 1);
  return static_cast<int>(std::clamp<std::uint64_t>(
      static_cast<std::uint64_t>(std::max(threads, 1)), 1,
      std::max<std::uint64_t>(1, job.memory.budget_bytes / kBudgetOfShard)));
}

int ShardsOfNewRun(const Job& job, int pulling) {
  const int disks = std::max(1, static_cast<int>(job.ssd.paths.size()));
  const int most = static_cast<int>(
      std::min({job.memory.budget_bytes / kBudgetOfShard, job.ssd.quota_bytes / kQuotaOfShard,
                kMostStores / (1 + job.tables.size())}));
  int shards = disks;
  for (int more = 2 * disks; more <= most; more += disks) {
    if (PartsOf(job, pulling, more) > PartsOf(job, pulling, shards)) shards = more;
  }
  return shards;
}

Job WithParts(FileSystem* fs, const Job& job, RunMode mode) {
  Job result = job;
  result.pipeline.pulling = PullThreads(job, CoresHere());
  if (!job.ssd.shards_auto) return result;
  result.ssd.shards_auto = false;
  result.ssd.shards = ShardsOfNewRun(job, result.pipeline.pulling);
  if (mode != RunMode::kResume) return result;
  // What is wrong with the run's marker is told when the run is opened.
  const Result<RunMarker> marker = ReadRunMarker(fs, job.output);
  if (marker.ok()) result.ssd.shards = static_cast<int>(marker->shards);
  return result;
}

std::uint32_t CacheParts(const Job& job) {
  return PartsOf(job, job.pipeline.pulling, job.ssd.shards);
}

}  // namespace terrace
