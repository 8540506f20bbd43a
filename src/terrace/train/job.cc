#include "terrace/train/job.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <set>

#include <fmt/format.h>

#include "terrace/base/memory.h"
#include "terrace/base/portable_math.h"
#include "terrace/base/units.h"
#include "terrace/io/pipe.h"
#include "terrace/store/read_cost.h"
#include "terrace/train/job_keys.h"
#include "terrace/train/job_tree.h"
#include "terrace/train/run_marker.h"

namespace terrace {
namespace {

using Path = std::vector<std::string>;

// What has more is a log, or a pipe that never ends.
constexpr std::uint64_t kMostJobBytes = std::uint64_t{64} << 20;

Path SplitPath(const std::string& path) {
  Path parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t dot = path.find('.', begin);
    parts.push_back(path.substr(begin, dot - begin));
    if (dot == std::string::npos) return parts;
    begin = dot + 1;
  }
}

std::string JoinParts(const Path& path) { return fmt::format("{}", fmt::join(path, ".")); }

// The paths of JobKeys(), split, in its order.
const std::vector<Path>& KeyPaths() {
  static const std::vector<Path> paths = [] {
    std::vector<Path> result;
    for (const JobKey& key : JobKeys()) result.push_back(SplitPath(key.path));
    return result;
  }();
  return paths;
}

bool StartsWith(const Path& pattern, const Path& path) {
  if (pattern.size() < path.size()) return false;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (pattern[i] != "*" && pattern[i] != path[i]) return false;
  }
  return true;
}

// The names that may stand below `path`; {"*"}: any.
std::vector<std::string> LegalBelow(const Path& path) {
  std::vector<std::string> names;
  for (const Path& key : KeyPaths()) {
    if (key.size() <= path.size() || !StartsWith(key, path)) continue;
    const std::string& name = key[path.size()];
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

// How a job file is read: the tree against the table of keys.
class Reader {
 public:
  Reader(const JobNode& tree, JobProblems* problems) : tree_(tree), problems_(problems) {}

  Job Read();

 private:
  void Walk(const JobNode& node, const Path& path);
  void ReportUnknown(const JobNode& node, const Path& path, const std::string& name);
  void SetKey(const JobKey& key, const Path& pattern);
  void CheckApplies(const JobKey& key, const Path& pattern);
  // The initializer's type of tables that leave it to their optimizer.
  void FinishInitializers();
  void Finish();
  void FinishTable(const std::string& path, TableJob* table);
  void CheckTableExpiry(const std::string& path, const ExpirySpec& spec);
  void FinishWide();
  void FinishData();
  void FinishLearningRate(const std::string& path, const LearningRate& rate);
  void CheckTogether();
  void CheckSlots();
  // The names of the user that stand for a pattern's "*"; {""} without one.
  Path NamesOf(const Path& pattern) const;
  const JobNode* Find(const Path& path) const;
  bool Given(const std::string& path) const { return Find(SplitPath(path)) != nullptr; }
  // Adds a problem at the line of `path`, or of its nearest written parent.
  void Add(const std::string& path, const std::string& message);

  const JobNode& tree_;
  JobProblems* const problems_;
  Job job_;
};

const JobNode* Reader::Find(const Path& path) const {
  const JobNode* node = &tree_;
  for (const std::string& part : path) {
    node = node->Find(part);
    if (node == nullptr) return nullptr;
  }
  return node;
}

void Reader::Add(const std::string& path, const std::string& message) {
  const JobNode* node = &tree_;
  for (const std::string& part : SplitPath(path)) {
    const JobNode* next = node->Find(part);
    if (next == nullptr) break;
    node = next;
  }
  problems_->Add(node->origin, fmt::format("{} {}", path, message));
}

void Reader::ReportUnknown(const JobNode& node, const Path& path, const std::string& name) {
  const std::vector<std::string> legal = LegalBelow(path);
  const std::string place = path.empty() ? "" : fmt::format(" in {}", JoinParts(path));
  std::string hint = NearestName(name, legal);
  // A key that is right, but stands at the wrong place, is worth more than a similar name here.
  std::string elsewhere;
  for (const JobKey& key : JobKeys()) {
    if (SplitPath(key.path).back() == name) {
      elsewhere = key.path;
      break;
    }
  }
  if (!elsewhere.empty()) {
    hint = fmt::format("; '{}' is a key of its own", elsewhere);
    if (elsewhere.find('*') == std::string::npos)
      hint = fmt::format("; did you mean '{}'?", elsewhere);
    if (legal.size() <= 3) hint += fmt::format(" (legal here: {})", fmt::join(legal, ", "));
  } else if (!hint.empty()) {
    hint = fmt::format("; did you mean '{}'?", hint);
  } else {
    hint = fmt::format("; legal here: {}", fmt::join(legal, ", "));
  }
  problems_->Add(node.origin, fmt::format("unknown key '{}'{}{}", name, place, hint));
}

void Reader::Walk(const JobNode& node, const Path& path) {
  const std::vector<std::string> legal = LegalBelow(path);
  if (legal.empty()) return;
  const bool leaf_too = std::any_of(KeyPaths().begin(), KeyPaths().end(), [&path](const Path& key) {
    return key.size() == path.size() && StartsWith(key, path);
  });
  if (node.kind != JobNode::Kind::kMap) {
    if (!leaf_too && node.kind != JobNode::Kind::kNull) {
      problems_->Add(node.origin,
                     fmt::format("{} holds settings by name, such as {{{}: ...}}", JoinParts(path),
                                 legal[0] == "*" ? "name" : legal[0]));
    }
    return;
  }
  for (const JobNode& child : node.entries) {
    const std::string& name = child.name;
    if (legal[0] != "*" && std::find(legal.begin(), legal.end(), name) == legal.end()) {
      ReportUnknown(child, path, name);
      continue;
    }
    Path below = path;
    below.push_back(name);
    Walk(child, below);
  }
}

Path Reader::NamesOf(const Path& pattern) const {
  if (pattern.size() < 2 || pattern[1] != "*") return {""};
  Path names;
  if (pattern[0] == "tables") {
    for (const auto& [name, table] : job_.tables) names.push_back(name);
  } else {
    for (const auto& [name, slot] : job_.slots) names.push_back(name);
  }
  return names;
}

Path Concrete(const Path& pattern, const std::string& name) {
  Path path = pattern;
  if (!name.empty()) path[1] = name;
  return path;
}

void Reader::SetKey(const JobKey& key, const Path& pattern) {
  for (const std::string& name : NamesOf(pattern)) {
    const Path path = Concrete(pattern, name);
    const JobNode* node = Find(path);
    if (node == nullptr) continue;
    const std::string problem = key.set(*node, &job_, name);
    if (problem.empty()) continue;
    // "training.batch: expected ..." but "training.batch is 0; ...".
    const bool sentence = problem.starts_with("is ") || problem.starts_with("has ");
    problems_->Add(node->origin, JoinParts(path) + (sentence ? " " : ": ") + problem);
  }
}

void Reader::CheckApplies(const JobKey& key, const Path& pattern) {
  if (!key.applies) return;
  for (const std::string& name : NamesOf(pattern)) {
    const Path path = Concrete(pattern, name);
    const JobNode* node = Find(path);
    if (node == nullptr || key.applies(job_, name)) continue;
    problems_->Add(node->origin, fmt::format("{} has no meaning here: it is for {}",
                                             JoinParts(path), key.applies_text));
  }
}

bool LegalName(const std::string& name) {
  // The name of a table is the name of a folder too.
  return !name.empty() && name.size() <= 64 && name[0] != '-' &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '_' || c == '-';
         });
}

// What is wrong with the name of a further table; empty: nothing.
std::string TableNameProblem(const std::string& name) {
  if (name == "default") {
    return "tables.default: 'table' is the default table; name this one otherwise";
  }
  if (name == kRunMarkerName || name == kReadCostName) {
    return fmt::format(
        "tables.{}: a file of the program has this name beside the folders of the tables; name "
        "this one otherwise",
        name);
  }
  if (LegalName(name)) return "";
  return fmt::format("tables: '{}' is no name: letters, digits, _ and -, at most 64", name);
}

Job Reader::Read() {
  Walk(tree_, {});
  job_.seed = 0;
  job_.table.name = "default";
  job_.table.learning_rate.base = 0.05;
  job_.network_learning_rate.base = 0.001;
  const std::vector<JobKey>& keys = JobKeys();
  const auto set_all = [&](auto wanted) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (wanted(keys[i].path)) SetKey(keys[i], KeyPaths()[i]);
    }
  };
  // What others take their defaults from comes first.
  set_all([](const std::string& path) { return path.starts_with("table."); });
  if (const JobNode* tables = tree_.Find("tables")) {
    for (const JobNode& node : tables->entries) {
      const std::string& name = node.name;
      if (const std::string problem = TableNameProblem(name); !problem.empty()) {
        problems_->Add(node.origin, problem);
        continue;
      }
      job_.tables[name] = job_.table;
      job_.tables[name].name = name;
    }
  }
  if (const JobNode* slots = tree_.Find("slots")) {
    for (const JobNode& node : slots->entries) {
      const std::string& name = node.name;
      if (name.empty()) {
        problems_->Add(node.origin, "slots: a name is empty");
      } else {
        job_.slots[name] = SlotJob();
      }
    }
  }
  job_.wide_optimizer = job_.table.optimizer;
  job_.wide_learning_rate = job_.table.learning_rate;
  job_.wide_optimizer_given = Given("network.wide_optimizer");
  set_all([](const std::string& path) { return !path.starts_with("table."); });
  FinishInitializers();
  for (std::size_t i = 0; i < keys.size(); ++i) CheckApplies(keys[i], KeyPaths()[i]);
  Finish();
  CheckTogether();
  return std::move(job_);
}

void Reader::FinishLearningRate(const std::string& path, const LearningRate& rate) {
  if (rate.decay != LearningRate::Decay::kNone && rate.decay_steps == 0) {
    Add(path + ".decay_steps", "is missing: a decay takes a number of mini-batches");
  }
  if (rate.decay == LearningRate::Decay::kNone && (rate.decay_steps != 0 || rate.final != 0)) {
    Add(path + ".decay", "is none, but decay_steps or final is given; set it to linear or cosine");
  }
}

void FinishFtrl(const LearningRate& rate, SparseOptimizerSpec* spec) {
  if (spec->type == SparseOptimizerSpec::Type::kFtrl) spec->alpha = static_cast<float>(rate.base);
}

bool HasSchedule(const LearningRate& rate) {
  return rate.warmup_steps != 0 || rate.decay != LearningRate::Decay::kNone;
}

void Reader::CheckTableExpiry(const std::string& path, const ExpirySpec& spec) {
  if (!spec.on()) return;
  if (spec.after == 0 && spec.below == 0) {
    Add(path + ".expire_every_examples",
        "is given, but neither expire_after nor expire_below: no row would ever expire");
  }
  if (spec.below > 0 && spec.below < kLeastExpireBelow) {
    Add(path + ".expire_below",
        fmt::format("is {}; legal: 0, or {} or more", spec.below, kLeastExpireBelow));
  }
  if (spec.below > 0 && spec.click_weight < spec.show_weight) {
    Add(path + ".expire_click_weight",
        fmt::format("is {}, below expire_show_weight ({}): a click would lower a score",
                    spec.click_weight, spec.show_weight));
  }
}

void Reader::FinishInitializers() {
  const auto finish = [this](const std::string& path, TableJob* table) {
    if (table->optimizer.type != SparseOptimizerSpec::Type::kFtrl) return;
    if (Given(path + ".initializer.type")) return;
    table->initializer.type = InitializerSpec::Type::kZeros;
  };
  for (auto& [name, table] : job_.tables) finish("tables." + name, &table);
  finish("table", &job_.table);
}

void Reader::FinishTable(const std::string& path, TableJob* table) {
  const bool ftrl = table->optimizer.type == SparseOptimizerSpec::Type::kFtrl;
  FinishFtrl(table->learning_rate, &table->optimizer);
  FinishLearningRate(path + ".optimizer.learning_rate", table->learning_rate);
  CheckTableExpiry(path, table->expiry);
  if (table->index == IndexChoice::kGroup && table->expected_keys == 0) {
    Add(path + ".index", "is group, which needs expected_keys: how many keys the table will have");
  }
  if (!ftrl) return;
  if (table->initializer.type != InitializerSpec::Type::kZeros) {
    Add(path + ".initializer.type", "must be zeros: ftrl starts at z = n = 0, which is weight 0");
  }
  if (HasSchedule(table->learning_rate)) {
    Add(path + ".optimizer.learning_rate", "is a schedule, but ftrl takes a number, its alpha");
  }
  if (table->l2 == 0) return;
  Add(path + ".l2",
      Given(path + ".l2")
          ? std::string("is not for ftrl; it has its own, optimizer.l2")
          : fmt::format("is not for ftrl; the table takes the {} of table.l2: set {}.l2 to 0 (ftrl "
                        "has its own, optimizer.l2)",
                        table->l2, path));
}

void Reader::FinishWide() {
  FinishFtrl(job_.wide_learning_rate, &job_.wide_optimizer);
  if (!job_.wide_optimizer_given) return;
  const std::string path = "network.wide_optimizer";
  FinishLearningRate(path + ".learning_rate", job_.wide_learning_rate);
  if (!job_.network.wide) Add(path, "has no meaning here: it is for wide: true");
  if (job_.wide_optimizer.type != SparseOptimizerSpec::Type::kFtrl) return;
  if (HasSchedule(job_.wide_learning_rate)) {
    Add(path + ".learning_rate", "is a schedule, but ftrl takes a number, its alpha");
  }
  if (job_.wide_l2 != 0) Add("network.wide_l2", "is not for ftrl; it has its own, optimizer.l2");
}

void Reader::FinishData() {
  DataOptions& train = job_.train_data;
  if (!Given("data.seed")) train.seed = job_.seed;
  const std::vector<std::string> files = job_.validation_data.files;
  const std::uint64_t rows = job_.validation_data.rows;
  job_.validation_data = train;
  job_.validation_data.files = files;
  job_.validation_data.rows = rows;
  job_.validation_data.epochs = 1;
  job_.validation_data.shuffle = "none";
  if (train.format == "synthetic") {
    job_.has_validation = rows > 0;
    job_.validation_data.first_row = train.first_row + train.rows;
    if (train.rows == 0 && !Given("data.rows")) {
      Add("data.rows", "is missing: the examples of an epoch");
    }
  } else {
    job_.has_validation = !files.empty();
    if (train.files.empty()) {
      Add("data.train", "is missing: the files to train on, such as [logs/*.tsv]");
    }
  }
}

void Reader::Finish() {
  Job::Training& training = job_.training;
  if (!Given("training.batch") && training.minibatch > 0) {
    training.batch = static_cast<std::uint32_t>(AlignUp(training.batch, training.minibatch));
  }
  for (auto& [name, table] : job_.tables) FinishTable("tables." + name, &table);
  FinishTable("table", &job_.table);
  FinishWide();
  FinishLearningRate("network.optimizer.learning_rate", job_.network_learning_rate);
  FinishData();
}

void Reader::CheckTogether() {
  if (job_.output.empty() && !Given("output")) {
    Add("output", "is missing: the folder of the run, such as runs/first");
  }
  if (job_.device == "cuda") {
    Add("device", "is cuda, which this version cannot do yet; use cpu (or auto)");
  }
  const Job::Training& training = job_.training;
  if (training.batch % training.minibatch != 0) {
    Add("training.batch", fmt::format("is {}, which is no multiple of training.minibatch ({})",
                                      training.batch, training.minibatch));
  }
  const std::set<std::string> paths(job_.ssd.paths.begin(), job_.ssd.paths.end());
  if (paths.size() != job_.ssd.paths.size()) Add("ssd.paths", "names a folder twice");
  if (job_.ssd.shards_auto) {
    job_.ssd.shards = static_cast<int>(std::max<std::size_t>(1, paths.size()));
  } else if (paths.size() > static_cast<std::size_t>(job_.ssd.shards)) {
    Add("ssd.shards", fmt::format("is {}, but ssd.paths names {} folders: a shard lies on one of "
                                  "them, so some would stay empty; raise it to {} or more",
                                  job_.ssd.shards, paths.size(), paths.size()));
  }
  CheckSlots();
}

void Reader::CheckSlots() {
  std::vector<std::string> tables = {"default"};
  for (const auto& [name, table] : job_.tables) tables.push_back(name);
  for (const auto& [name, slot] : job_.slots) {
    if (slot.table.empty() || std::find(tables.begin(), tables.end(), slot.table) != tables.end()) {
      continue;
    }
    const std::string nearest = NearestName(slot.table, tables);
    Add(fmt::format("slots.{}.table", name),
        fmt::format("is '{}', which is no table; {}", slot.table,
                    nearest.empty() ? fmt::format("there are: {}", fmt::join(tables, ", "))
                                    : fmt::format("did you mean '{}'?", nearest)));
  }
}

// A job in which every "*" has the name `name`.
Job Sample(const std::string& name) {
  Job job;
  job.table.name = "default";
  job.table.learning_rate.base = 0.05;
  job.network_learning_rate.base = 0.001;
  job.tables[name] = job.table;
  job.slots[name] = SlotJob();
  return job;
}

// What the reference says of a key beside its meaning.
struct KeyRow {
  std::string path, type, value, doc;
};

std::vector<KeyRow> ReferenceRows() {
  const std::string name = "NAME";
  const Job sample = Sample(name);
  std::vector<KeyRow> rows;
  for (const JobKey& key : JobKeys()) {
    KeyRow row;
    row.path = key.path;
    if (const std::size_t star = row.path.find('*'); star != std::string::npos) {
      row.path.replace(star, 1, name);
    }
    row.type = key.type + (key.limits.empty() ? "" : ": " + key.limits);
    row.value = key.default_note;
    if (row.value.empty() && key.path.starts_with("tables.")) row.value = "as in table";
    if (row.value.empty()) row.value = key.print(sample, name).value_or("");
    row.doc = key.doc;
    if (!key.applies_text.empty()) row.doc += " For " + key.applies_text + ".";
    rows.push_back(std::move(row));
  }
  return rows;
}

// Whether it is there for others only. Asks the kernel, past every FileSystem, whose errors do not
// tell it from a disk that fails.
bool IsDenied(const std::string& path) {
  return faccessat(AT_FDCWD, path.c_str(), R_OK, AT_EACCESS) != 0 && errno == EACCES;
}

}  // namespace

float LearningRate::At(std::uint64_t step) const {
  if (step < warmup_steps) {
    return static_cast<float>(base * static_cast<double>(step + 1) /
                              static_cast<double>(warmup_steps));
  }
  if (decay == Decay::kNone) return static_cast<float>(base);
  const std::uint64_t after = step - warmup_steps;
  if (after >= decay_steps) return static_cast<float>(final);
  const double share = static_cast<double>(after) / static_cast<double>(decay_steps);
  if (decay == Decay::kLinear) return static_cast<float>(base + (final - base) * share);
  return static_cast<float>(final + (base - final) * 0.5 * (1 + PortableCosPi(share)));
}

Result<Job> ParseJob(std::string_view yaml, const std::string& base_name,
                     const std::vector<std::string>& overrides) {
  JobProblems problems;
  JobNode tree = ParseJobTree(yaml, base_name, &problems);
  for (std::size_t i = 0; i < overrides.size(); ++i) {
    ApplyOverride(overrides[i], i, &tree, &problems);
  }
  // A file that is no YAML would bring a flood of missing keys.
  if (!problems.empty() && tree.entries.empty()) return problems.ToStatus();
  Job job = Reader(tree, &problems).Read();
  if (!problems.empty()) return problems.ToStatus();
  return job;
}

Result<Job> ReadJob(FileSystem* fs, const std::string& path,
                    const std::vector<std::string>& overrides) {
  const Result<FileInfo> info = fs->Stat(path);
  if (info.ok() && info->is_directory) {
    return InvalidArgumentError(fmt::format("the job file '{}' is a folder", path));
  }
  if (info.ok() && info->size > kMostJobBytes) {
    return InvalidArgumentError(fmt::format("the job file '{}' has {}; a job has at most {}", path,
                                            FormatBytes(info->size), FormatBytes(kMostJobBytes)));
  }
  const bool has_length = !info.ok() || !info->is_special;
  Result<std::string> text =
      has_length ? ReadFileToString(fs, path) : ReadPipe(path, kMostJobBytes);
  if (text.status().code() == StatusCode::kIo && IsDenied(path)) {
    text = InvalidArgumentError(text.status().message());
  }
  if (!text.ok()) return text.status().WithContext("reading the job file");
  return ParseJob(*text, path, overrides);
}

std::string JobToYaml(const Job& job) {
  std::string yaml;
  Path open;  // The maps that the lines so far have opened.
  const auto emit = [&](const Path& path, const std::string& value) {
    std::size_t shared = 0;
    while (shared < open.size() && shared + 1 < path.size() && open[shared] == path[shared]) {
      ++shared;
    }
    open.resize(shared);
    for (std::size_t i = shared; i < path.size(); ++i) {
      const bool last = i + 1 == path.size();
      yaml += std::string(2 * i, ' ') + YamlText(path[i]) + ":" + (last ? " " + value : "") + "\n";
      if (!last) open.push_back(path[i]);
    }
  };
  const auto emit_named = [&](const std::string& section, const std::string& name) {
    bool any = false;
    for (std::size_t i = 0; i < JobKeys().size(); ++i) {
      const Path& pattern = KeyPaths()[i];
      if (pattern[0] != section) continue;
      const JobKey& key = JobKeys()[i];
      if (key.applies && !key.applies(job, name)) continue;
      if (const std::optional<std::string> value = key.print(job, name)) {
        emit(Concrete(pattern, name), *value);
        any = true;
      }
    }
    TERRACE_CHECK(any);
  };
  std::set<std::string> named;
  for (std::size_t i = 0; i < JobKeys().size(); ++i) {
    const Path& pattern = KeyPaths()[i];
    const JobKey& key = JobKeys()[i];
    if (pattern.size() > 1 && pattern[1] == "*") {
      if (!named.insert(pattern[0]).second) continue;
      for (const auto& [name, table] : job.tables) {
        if (pattern[0] == "tables") emit_named("tables", name);
      }
      for (const auto& [name, slot] : job.slots) {
        if (pattern[0] == "slots") emit_named("slots", name);
      }
      continue;
    }
    if (key.applies && !key.applies(job, "")) continue;
    if (const std::optional<std::string> value = key.print(job, "")) emit(pattern, *value);
  }
  return yaml;
}

std::string JobReferenceText() {
  std::string text = "Keys of a job file (docs/job-file.md says more):\n\n";
  for (const KeyRow& row : ReferenceRows()) {
    text += fmt::format("{}\n    {}{}\n    {}\n", row.path, row.type,
                        row.value.empty()         ? ""
                        : row.value == "required" ? "; required"
                                                  : fmt::format("; default {}", row.value),
                        row.doc);
  }
  return text;
}

std::string JobReferenceMarkdown() {
  std::string text;
  std::string section = "?";
  const auto cell = [](std::string value) {
    std::string escaped;
    for (char c : value) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
    return escaped;
  };
  for (const KeyRow& row : ReferenceRows()) {
    const std::size_t dot = row.path.find('.');
    const std::string now = dot == std::string::npos ? "" : row.path.substr(0, dot);
    if (now != section) {
      section = now;
      text += fmt::format("\n### {}\n\n| key | type | default | meaning |\n|---|---|---|---|\n",
                          section.empty() ? "The run" : section);
    }
    text += fmt::format(
        "| `{}` | {} | {} | {} |\n", row.path, cell(row.type),
        row.value.empty() || row.value.find(' ') != std::string::npos || row.value == "required"
            ? row.value
            : fmt::format("`{}`", cell(row.value)),
        cell(row.doc));
  }
  return text;
}

}  // namespace terrace
