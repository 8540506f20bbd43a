// crash_harness: random work on a run (row cache, stores, checkpoints) in a process that is killed
// with SIGKILL at a random moment or at a named sync point, again and again; after each death
// another process compares what lies on the disk with the expected state, a file outside the run.
//
//   crash_harness --folder EMPTY --points FILE [--rounds N] [--seed S] [--index key|group]
//
// A worker resumes the run, checks, changes and erases rows, of which some expire, flushes, takes
// checkpoints, drops old ones, compacts, opens the run again and at times deletes it. What it is
// about to commit, it writes to the expected state first; what it has committed, afterwards. The
// checker allows what lies between the two and nothing else: every checkpoint that was committed
// and not dropped is there, each that is there has exactly the rows that it should have, and every
// byte of it is as it was written. Every sync point in FILE (a name a line) must have killed a
// worker at least once, or the harness fails. Each round draws from its seed how the tiers work
// (WorkerTiers), whatever the rounds before it drew; a round that fails says it.
//
// The parent has one thread and does nothing but fork, wait and kill.
#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "crash/crash_work.h"
#include "terrace/base/clock.h"
#include "terrace/base/log.h"
#include "terrace/base/memory.h"
#include "terrace/base/sync_point.h"

namespace terrace {
namespace {

// Rounds in which a sync point may be tried before it counts as never met. The rarest, an eviction
// of dirty rows, is met by one worker in fourteen.
constexpr int kTries = 300;

// The expected state as a file of notes. The last may have been cut off by the death of its writer:
// what it announces had not begun.
class ExpectedFile final : public ExpectedState {
 public:
  explicit ExpectedFile(std::string path) : path_(std::move(path)) {}

  // Appends a note; a plain write survives the death of its process.
  Status Add(Note note, const Snapshot& snapshot) override {
    std::vector<std::uint64_t> words = {static_cast<std::uint64_t>(note), snapshot.id,
                                        snapshot.examples, snapshot.rows.size()};
    for (const auto& [key, generation] : snapshot.rows) {
      words.push_back(key);
      words.push_back(generation);
    }
    std::ofstream out(path_, std::ios::binary | std::ios::app);
    out.write(reinterpret_cast<const char*>(words.data()),
              static_cast<std::streamsize>(words.size() * sizeof(words[0])));
    out.flush();
    return out ? OkStatus() : IoError(path_ + " can't be written");
  }

  Expected Read() const override {
    std::ifstream in(path_, std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    std::vector<std::uint64_t> words(bytes.size() / sizeof(std::uint64_t));
    if (!words.empty()) std::memcpy(words.data(), bytes.data(), words.size() * sizeof(words[0]));
    Expected expected;
    for (std::size_t at = 0; at + 4 <= words.size();) {
      const auto note = static_cast<Note>(words[at]);
      Snapshot snapshot;
      snapshot.id = words[at + 1];
      snapshot.examples = words[at + 2];
      const std::uint64_t rows = words[at + 3];
      at += 4;
      if (words.size() - at < 2 * rows) break;
      for (std::uint64_t i = 0; i < rows; ++i, at += 2) snapshot.rows[words[at]] = words[at + 1];
      expected.Apply(note, std::move(snapshot));
    }
    return expected;
  }

  Status Restart(const std::vector<Snapshot>& kept) override {
    if (std::rename(path_.c_str(), (path_ + ".before").c_str()) != 0 && !kept.empty()) {
      return IoError(path_ + " can't be renamed");
    }
    for (const Snapshot& snapshot : kept) {
      if (Status status = Add(Note::kPending, snapshot); !status.ok()) return status;
      if (Status status = Add(Note::kDone, {snapshot.id, 0, {}}); !status.ok()) return status;
    }
    return OkStatus();
  }

 private:
  const std::string path_;
};

struct Arguments {
  std::string folder, points;
  std::uint64_t rounds = 100, seed = 1;
  IndexKind index = IndexKind::kKey;
};

// Ends the process with what it has found.
[[noreturn]] void EndChild(const Status& status) {
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::fflush(nullptr);
  _exit(status.ok() ? 0 : 1);
}

// How a worker ended, after at most so many microseconds.
int WaitOrKill(pid_t pid, int pipe_end, std::optional<std::uint64_t> micros) {
  if (micros) {
    pollfd closed{pipe_end, POLLIN, 0};
    timespec wait{static_cast<time_t>(*micros / 1'000'000),
                  static_cast<long>(*micros % 1'000'000 * 1000)};
    // The worker's end of the pipe closes with it.
    if (ppoll(&closed, 1, &wait, nullptr) == 0) kill(pid, SIGKILL);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

class Harness {
 public:
  Harness(Arguments arguments, std::vector<std::string> points)
      : arguments_(std::move(arguments)), points_(std::move(points)), rng_(arguments_.seed) {}

  // False: something is wrong, and was said.
  bool Run() {
    for (const std::string& point : points_) {
      for (int attempt = 0; attempt < kTries && kills_[point] == 0; ++attempt) {
        if (!Round(point + ":1")) return false;
      }
    }
    while (round_ < arguments_.rounds) {
      // Half at a moment, half at a point's n-th passing.
      const bool at_point = rng_.Below(2) == 0;
      const std::string point =
          at_point ? points_[rng_.Below(points_.size())] + fmt::format(":{}", 1 + rng_.Below(4))
                   : std::string();
      if (!Round(point)) return false;
    }
    return Report();
  }

 private:
  std::string RunPath() const { return arguments_.folder + "/run"; }
  std::string ExpectedPath() const { return arguments_.folder + "/expected"; }

  Status Work(const WorkerTiers& tiers, std::uint64_t seed, bool anew) const {
    TERRACE_ASSIGN_OR_RETURN(Job job, MakeWorkerJob(RunPath(), tiers));
    TERRACE_ASSIGN_OR_RETURN(ModelPlan plan, MakeWorkerPlan(FileSystem::Posix(), job));
    ExpectedFile file(ExpectedPath());
    Worker::Options options;
    options.round = round_;
    options.seed = seed;
    Worker worker(FileSystem::Posix(), std::move(job), std::move(plan), &file, options);
    return worker.Work(anew);
  }

  bool Round(const std::string& point) {
    ++round_;
    const std::uint64_t seed = HashCombine(arguments_.seed, round_);
    const WorkerTiers tiers = WorkerTiers::Draw(arguments_.index, seed);
    drawn_.insert(tiers.ToText());
    std::optional<std::uint64_t> micros;
    if (point.empty()) micros = rng_.Below(longest_micros_ + 1000);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return Fail("no pipe", seed, point);
    const std::int64_t start = Clock::Real()->MonotonicNanos();
    const pid_t worker_pid = fork();
    if (worker_pid == 0) {
      close(ends[0]);
      if (!point.empty()) SyncPoint::ArmKill(point);
      EndChild(Work(tiers, seed, /*anew=*/point.starts_with("run.")));
    }
    close(ends[1]);
    const int status = WaitOrKill(worker_pid, ends[0], micros);
    close(ends[0]);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (!killed && status != 0) return Fail("the worker failed", seed, point);
    if (!killed) {
      ++finished_;
      longest_micros_ = static_cast<std::uint64_t>(Clock::Real()->MonotonicNanos() - start) / 1000;
    } else if (point.empty()) {
      ++moments_;
    } else {
      ++kills_[point.substr(0, point.rfind(':'))];
    }
    const pid_t checker = fork();
    if (checker == 0) {
      ExpectedFile file(ExpectedPath());
      EndChild(CheckRun(FileSystem::Posix(), RunPath(), &file));
    }
    if (WaitOrKill(checker, -1, std::nullopt) != 0) return Fail("the check failed", seed, point);
    return true;
  }

  bool Fail(const char* what, std::uint64_t seed, const std::string& point) const {
    std::fprintf(
        stderr, "%s in round %lu of --seed %lu (its own seed %lu, %s; %s); %s is left as it is\n",
        what, round_, arguments_.seed, seed, point.empty() ? "killed at a moment" : point.c_str(),
        WorkerTiers::Draw(arguments_.index, seed).ToText().c_str(), arguments_.folder.c_str());
    return false;
  }

  bool Report() const {
    std::uint64_t at_points = 0;
    for (const auto& [point, kills] : kills_) at_points += kills;
    std::printf(
        "%lu rounds, their tiers in %zu ways: %lu killed at %zu sync points, %lu at a random "
        "moment, %lu ended by themselves\n",
        round_, drawn_.size(), at_points, kills_.size(), moments_, finished_);
    bool all = true;
    for (const std::string& point : points_) {
      const auto found = kills_.find(point);
      if (found != kills_.end() && found->second > 0) continue;
      std::fprintf(stderr, "sync point %s was never met\n", point.c_str());
      all = false;
    }
    return all;
  }

  const Arguments arguments_;
  const std::vector<std::string> points_;
  Rng rng_;
  std::uint64_t round_ = 0, moments_ = 0, finished_ = 0;
  std::uint64_t longest_micros_ = 100'000;  // Of the last worker that ended by itself.
  std::map<std::string, std::uint64_t> kills_;
  std::set<std::string> drawn_;  // WorkerTiers.
};

bool Parse(int argc, char** argv, Arguments* arguments) {
  const auto number = [](const char* text, std::uint64_t* value) {
    const char* end = text + std::strlen(text);
    return std::from_chars(text, end, *value).ptr == end;
  };
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--folder") {
      arguments->folder = argv[i + 1];
    } else if (name == "--points") {
      arguments->points = argv[i + 1];
    } else if (name == "--rounds") {
      if (!number(argv[i + 1], &arguments->rounds)) return false;
    } else if (name == "--index") {
      arguments->index = std::string(argv[i + 1]) == "group" ? IndexKind::kGroup : IndexKind::kKey;
    } else if (name != "--seed" || !number(argv[i + 1], &arguments->seed)) {
      return false;
    }
  }
  return argc % 2 == 1 && !arguments->folder.empty() && !arguments->points.empty();
}

int Main(int argc, char** argv) {
  Arguments arguments;
  if (!Parse(argc, argv, &arguments)) {
    std::fputs(
        "crash_harness --folder EMPTY --points FILE [--rounds N] [--seed S] "
        "[--index key|group]\n",
        stderr);
    return 2;
  }
  ConfigureAllocator();
  SetLogLevel(LogLevel::kError);
  std::vector<std::string> points;
  std::ifstream in(arguments.points);
  for (std::string line; std::getline(in, line);) {
    if (!line.empty()) points.push_back(line);
  }
  if (points.empty()) {
    std::fputs("no sync points\n", stderr);
    return 2;
  }
  Harness harness(std::move(arguments), std::move(points));
  return harness.Run() ? 0 : 1;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) { return terrace::Main(argc, argv); }
