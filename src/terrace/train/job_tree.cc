#include "terrace/train/job_tree.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <optional>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

namespace terrace {
namespace {

// Beyond these a file is no job but an attack, or aliases that contain themselves.
constexpr int kMaxDepth = 16;
constexpr std::size_t kMaxNodes = 200'000;

constexpr std::size_t kOverrideOrder = std::size_t{1} << 40;

struct Converter {
  std::string base_name;      // Empty: an override.
  JobOrigin override_origin;  // Of everything in an override.
  JobProblems* problems;
  std::size_t nodes = 0;
  bool overflow = false;

  JobOrigin OriginOf(const YAML::Mark& mark) const {
    if (base_name.empty()) return override_origin;
    const std::size_t line = mark.is_null() ? 1 : static_cast<std::size_t>(mark.line) + 1;
    return {fmt::format("{}:{}", base_name, line), line};
  }

  JobNode Convert(const YAML::Node& node, const JobOrigin& origin, int depth) {
    JobNode result;
    result.origin = origin;
    if (depth > kMaxDepth || ++nodes > kMaxNodes) {
      overflow = true;
      return result;
    }
    switch (node.Type()) {
      case YAML::NodeType::Undefined:
      case YAML::NodeType::Null:
        break;
      case YAML::NodeType::Scalar:
        result.kind = JobNode::Kind::kScalar;
        result.scalar = node.Scalar();
        break;
      case YAML::NodeType::Sequence:
        result.kind = JobNode::Kind::kList;
        for (const YAML::Node& item : node) {
          if (overflow) break;
          result.items.push_back(Convert(item, OriginOf(item.Mark()), depth + 1));
        }
        break;
      case YAML::NodeType::Map:
        result.kind = JobNode::Kind::kMap;
        ConvertMap(node, depth, &result);
        break;
    }
    return result;
  }

  void ConvertMap(const YAML::Node& node, int depth, JobNode* result) {
    std::set<std::string> names;
    for (const auto& entry : node) {
      if (overflow) return;
      const JobOrigin origin = OriginOf(entry.first.Mark());
      if (!entry.first.IsScalar()) {
        problems->Add(origin, "a name must be plain text");
        continue;
      }
      const std::string& name = entry.first.Scalar();
      if (!names.insert(name).second) {
        problems->Add(origin, fmt::format("'{}' is given twice", name));
        continue;
      }
      result->entries.push_back(Convert(entry.second, origin, depth + 1));
      result->entries.back().name = name;
    }
  }
};

// Notes where documents begin.
class DocumentStarts final : public YAML::EventHandler {
 public:
  const std::vector<YAML::Mark>& marks() const { return marks_; }
  void OnDocumentStart(const YAML::Mark& mark) override { marks_.push_back(mark); }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

 private:
  std::vector<YAML::Mark> marks_;
};

// Where a second document begins, if one does. YAML::LoadAll would never end on text such as ",a:
// }", which yaml-cpp takes for empty documents without end.
std::optional<YAML::Mark> SecondDocument(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  DocumentStarts starts;
  if (!parser.HandleNextDocument(starts) || !parser.HandleNextDocument(starts)) return std::nullopt;
  return starts.marks().back();
}

// Exceptions of yaml-cpp stop here.
JobNode ParseYaml(const std::string& text, Converter* converter) {
  JobNode tree;
  tree.origin = converter->base_name.empty() ? converter->override_origin
                                             : JobOrigin{converter->base_name, 0};
  try {
    const YAML::Node document = YAML::Load(text);
    if (const std::optional<YAML::Mark> second = SecondDocument(text)) {
      converter->problems->Add(converter->OriginOf(*second),
                               "a second document begins here; a job is one");
    }
    tree = converter->Convert(document, tree.origin, 0);
    if (converter->overflow) {
      converter->problems->Add(tree.origin, "this is nested too deeply, or too large, for a job");
    }
  } catch (const YAML::Exception& error) {
    converter->problems->Add(converter->OriginOf(error.mark), "not YAML: " + error.msg);
  }
  return tree;
}

std::vector<std::string> SplitPath(std::string_view path) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t dot = path.find('.', begin);
    parts.emplace_back(path.substr(begin, dot - begin));
    if (dot == std::string_view::npos) return parts;
    begin = dot + 1;
  }
}

// Makes `node` a map that a further part of an override's path can enter.
bool EnterMap(const std::string& name, const JobOrigin& origin, JobNode* node) {
  if (node->kind == JobNode::Kind::kMap) return true;
  if (node->kind == JobNode::Kind::kNull) {
    node->kind = JobNode::Kind::kMap;
    return true;
  }
  if (node->kind != JobNode::Kind::kScalar || name != "learning_rate") return false;
  JobNode base;
  base.kind = JobNode::Kind::kScalar;
  base.scalar = std::move(node->scalar);
  base.origin = node->origin;
  base.name = "base";
  *node = JobNode();
  node->kind = JobNode::Kind::kMap;
  node->name = name;
  node->origin = origin;
  node->entries.push_back(std::move(base));
  return true;
}

std::size_t EditDistance(std::string_view a, std::string_view b) {
  // Letters that changed places count once (optimal string alignment): the commonest slip of all.
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      const bool same = a[i - 1] == b[j - 1];
      cost[i][j] =
          std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

}  // namespace

const JobNode* JobNode::Find(std::string_view entry_name) const {
  for (const JobNode& entry : entries) {
    if (entry.name == entry_name) return &entry;
  }
  return nullptr;
}

void JobProblems::Add(const JobOrigin& origin, std::string message) {
  problems_.push_back({origin, std::move(message)});
}

Status JobProblems::ToStatus() const {
  if (problems_.empty()) return OkStatus();
  std::vector<const Problem*> sorted;
  for (const Problem& problem : problems_) sorted.push_back(&problem);
  std::stable_sort(sorted.begin(), sorted.end(), [](const Problem* a, const Problem* b) {
    return a->origin.order < b->origin.order;
  });
  std::string text;
  for (const Problem* problem : sorted) {
    if (!text.empty()) text += '\n';
    text += problem->origin.text + ": " + problem->message;
  }
  return InvalidArgumentError(text);
}

JobNode ParseJobTree(std::string_view yaml, const std::string& base_name, JobProblems* problems) {
  Converter converter{base_name, {}, problems};
  JobNode tree = ParseYaml(std::string(yaml), &converter);
  if (tree.kind != JobNode::Kind::kMap) {
    if (tree.kind != JobNode::Kind::kNull) {
      problems->Add(tree.origin, "a job is a map of settings (see examples/criteo.yaml)");
    }
    tree.kind = JobNode::Kind::kMap;
    tree.items.clear();
  }
  return tree;
}

void ApplyOverride(const std::string& override_text, std::size_t index, JobNode* tree,
                   JobProblems* problems) {
  const std::size_t equals = override_text.find('=');
  const std::string path = override_text.substr(0, equals);
  const JobOrigin origin{"--set " + path, kOverrideOrder + index};
  if (equals == std::string::npos || path.empty()) {
    problems->Add({"--set " + override_text, origin.order},
                  "expected path=value, as in training.batch=65536");
    return;
  }
  const std::vector<std::string> parts = SplitPath(path);
  if (std::find(parts.begin(), parts.end(), "") != parts.end()) {
    problems->Add(origin, "the path has an empty part");
    return;
  }
  Converter converter{"", origin, problems};
  JobNode value = ParseYaml(override_text.substr(equals + 1), &converter);
  JobNode* node = tree;
  std::string entered;
  for (const std::string& part : parts) {
    if (!EnterMap(entered, origin, node)) {
      problems->Add(origin, fmt::format("'{}' holds a value, not settings by name", entered));
      return;
    }
    auto found = std::find_if(node->entries.begin(), node->entries.end(),
                              [&part](const JobNode& entry) { return entry.name == part; });
    if (found == node->entries.end()) {
      found = node->entries.insert(node->entries.end(), JobNode());
      found->name = part;
      found->origin = origin;
    }
    node = &*found;
    entered = part;
  }
  value.name = node->name;
  *node = std::move(value);
}

std::string NearestName(std::string_view name, const std::vector<std::string>& candidates) {
  std::string nearest;
  std::size_t best = (name.size() + 1) / 2 + 1;  // From here on a guess would mislead.
  for (const std::string& candidate : candidates) {
    std::size_t distance = EditDistance(name, candidate);
    // A name that goes on where another ends is near whatever its length: "lr_rate", "batchsize".
    const std::size_t shared = std::min(name.size(), candidate.size());
    if (shared >= 3 && name.substr(0, shared) == std::string_view(candidate).substr(0, shared)) {
      distance = std::min<std::size_t>(distance, 2);
    }
    if (distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::optional<std::uint64_t> ParseWhole(std::string text) {
  std::erase(text, '_');
  std::uint64_t value = 0;
  const char* end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && rest == end) return value;
  if (error == std::errc::result_out_of_range) return std::nullopt;
  double number = 0;
  auto [rest2, error2] = std::from_chars(text.data(), end, number);
  if (error2 != std::errc() || rest2 != end) return std::nullopt;
  if (!(number >= 0) || number > 0x1p53 || number != std::floor(number)) return std::nullopt;
  return static_cast<std::uint64_t>(number);
}

std::string YamlText(std::string_view text) {
  bool plain = !text.empty() && std::isalpha(static_cast<unsigned char>(text[0])) != 0;
  for (char c : text) {
    plain = plain && (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '/' ||
                      c == '.' || c == '-');
  }
  static const std::set<std::string, std::less<>> kWords = {"null", "true", "false", "yes", "no",
                                                            "on",   "off",  "y",     "n",   "nan"};
  std::string lower;
  for (char c : text) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (plain && !kWords.contains(lower)) return std::string(text);
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      quoted += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

}  // namespace terrace
