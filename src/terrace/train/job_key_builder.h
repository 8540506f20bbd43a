// Builds the table of keys: one function per type of value, each from a getter that refers to a
// field of a Job. Only job_keys.cc includes it. Threads: values.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "terrace/base/units.h"
#include "terrace/train/job_keys.h"

namespace terrace::job_keys {

inline std::string Shown(const JobNode& node) {
  switch (node.kind) {
    case JobNode::Kind::kNull:
      return "nothing";
    case JobNode::Kind::kScalar:
      return fmt::format("'{}'", node.scalar);
    case JobNode::Kind::kList:
      return "a list";
    case JobNode::Kind::kMap:
      return "settings by name";
  }
  return "";
}

inline std::string Expected(std::string_view what, const JobNode& node) {
  return fmt::format("expected {}, got {}", what, Shown(node));
}

template <typename T>
std::optional<T> ParseNumber(const std::string& text) {
  T value = 0;
  const char* end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

inline std::optional<bool> ParseBool(const std::string& text) {
  if (text == "true" || text == "yes" || text == "on" || text == "True") return true;
  if (text == "false" || text == "no" || text == "off" || text == "False") return false;
  return std::nullopt;
}

inline std::string ExactBytes(std::uint64_t bytes) {
  static constexpr std::pair<int, const char*> kUnits[] = {
      {40, "TiB"}, {30, "GiB"}, {20, "MiB"}, {10, "KiB"}};
  for (const auto& [shift, unit] : kUnits) {
    if (bytes != 0 && bytes % (std::uint64_t{1} << shift) == 0) {
      return fmt::format("{}{}", bytes >> shift, unit);
    }
  }
  return std::to_string(bytes);
}

// Bounds of a number; `above`: the lower one itself is not allowed.
struct Range {
  double low = 0;
  double high = 0;
  bool above = false;
  std::string Text() const { return fmt::format("{}{} to {}", above ? "above " : "", low, high); }
  bool Holds(double value) const { return (above ? value > low : value >= low) && value <= high; }
};
inline constexpr double kMostNumber = 1e30;
inline constexpr std::uint64_t kMax64 = std::numeric_limits<std::uint64_t>::max();

// Builds the table. Getters refer to a field of a Job: [](Job& job, const std::string& name) -> T&.
class Builder {
 public:
  std::vector<JobKey> Take() { return std::move(keys_); }

  JobKey& Custom(std::string path, std::string type, std::string limits, std::string doc) {
    JobKey key;
    key.path = std::move(path);
    key.type = std::move(type);
    key.limits = std::move(limits);
    key.doc = std::move(doc);
    keys_.push_back(std::move(key));
    return keys_.back();
  }

  template <typename Get>
  JobKey& Whole(std::string path, Get get, std::uint64_t low, std::uint64_t high, std::string doc) {
    using T = std::remove_reference_t<decltype(get(std::declval<Job&>(), std::string()))>;
    std::string limits = high == kMax64 ? (low == 0 ? "" : fmt::format("{} or more", low))
                                        : fmt::format("{} to {}", low, FormatCount(high));
    JobKey& key = Custom(std::move(path), "whole number", limits, std::move(doc));
    key.set = [get, low, high, limits](const JobNode& node, Job* job, const std::string& name) {
      if (node.kind != JobNode::Kind::kScalar) return Expected("a whole number", node);
      const std::optional<std::uint64_t> value = ParseWhole(node.scalar);
      if (!value) return Expected("a whole number", node);
      if (*value < low || *value > high) return fmt::format("is {}; legal: {}", *value, limits);
      get(*job, name) = static_cast<T>(*value);
      return std::string();
    };
    key.print = [get](const Job& job, const std::string& name) {
      return std::optional<std::string>(std::to_string(get(Mutable(job), name)));
    };
    return key;
  }

  template <typename Get>
  JobKey& Number(std::string path, Get get, Range range, std::string doc) {
    using T = std::remove_reference_t<decltype(get(std::declval<Job&>(), std::string()))>;
    JobKey& key = Custom(std::move(path), "number", range.Text(), std::move(doc));
    key.set = [get, range](const JobNode& node, Job* job, const std::string& name) {
      if (node.kind != JobNode::Kind::kScalar) return Expected("a number", node);
      const std::optional<double> value = ParseNumber<double>(node.scalar);
      if (!value) return Expected("a number", node);
      if (!range.Holds(*value)) return fmt::format("is {}; legal: {}", *value, range.Text());
      if (range.above && static_cast<float>(*value) <= range.low) {
        return fmt::format("is {}, which in 32 bits is {}; legal: {}", *value, range.low,
                           range.Text());
      }
      get(*job, name) = ParseNumber<T>(node.scalar).value_or(static_cast<T>(*value));
      return std::string();
    };
    key.print = [get](const Job& job, const std::string& name) {
      return std::optional<std::string>(fmt::format("{}", get(Mutable(job), name)));
    };
    return key;
  }

  template <typename Get>
  JobKey& Bool(std::string path, Get get, std::string doc) {
    JobKey& key = Custom(std::move(path), "true or false", "", std::move(doc));
    key.set = [get](const JobNode& node, Job* job, const std::string& name) {
      const std::optional<bool> value =
          node.kind == JobNode::Kind::kScalar ? ParseBool(node.scalar) : std::nullopt;
      if (!value) return Expected("true or false", node);
      get(*job, name) = *value;
      return std::string();
    };
    key.print = [get](const Job& job, const std::string& name) {
      return std::optional<std::string>(get(Mutable(job), name) ? "true" : "false");
    };
    return key;
  }

  template <typename Get>
  JobKey& Bytes(std::string path, Get get, std::uint64_t low, std::uint64_t high, std::string doc) {
    const std::string limits = high == kMax64
                                   ? fmt::format("{} or more", ExactBytes(low))
                                   : fmt::format("{} to {}", ExactBytes(low), ExactBytes(high));
    JobKey& key = Custom(std::move(path), "size", limits, std::move(doc));
    key.set = [get, low, high, limits](const JobNode& node, Job* job, const std::string& name) {
      const std::optional<std::uint64_t> value =
          node.kind == JobNode::Kind::kScalar ? ParseBytes(node.scalar) : std::nullopt;
      if (!value) return Expected("a size such as 2GiB or 500MB", node);
      if (*value < low || *value > high) {
        return fmt::format("is {}; legal: {}", ExactBytes(*value), limits);
      }
      get(*job, name) = *value;
      return std::string();
    };
    key.print = [get](const Job& job, const std::string& name) {
      return std::optional<std::string>(ExactBytes(get(Mutable(job), name)));
    };
    return key;
  }

  // Nothing: auto. set: takes a value and says what is wrong with it.
  using SetBytes =
      std::function<std::string(Job*, const std::string&, std::optional<std::uint64_t>)>;
  using GetBytes = std::function<std::optional<std::uint64_t>(const Job&, const std::string&)>;
  JobKey& BytesOrAuto(std::string path, std::string limits, std::string example, SetBytes set,
                      GetBytes get, std::string doc) {
    JobKey& key = Custom(std::move(path), "size or auto", std::move(limits), std::move(doc));
    key.set = [set, example](const JobNode& node, Job* job, const std::string& name) {
      const bool is_scalar = node.kind == JobNode::Kind::kScalar;
      if (is_scalar && node.scalar == "auto") return set(job, name, std::nullopt);
      const std::optional<std::uint64_t> value = is_scalar ? ParseBytes(node.scalar) : std::nullopt;
      return value ? set(job, name, value) : Expected("auto or a size such as " + example, node);
    };
    key.print = [get](const Job& job, const std::string& name) {
      const std::optional<std::uint64_t> value = get(job, name);
      return std::optional<std::string>(value ? ExactBytes(*value) : "auto");
    };
    return key;
  }

  // Nothing: auto.
  using SetWhole = std::function<void(Job*, std::optional<std::uint64_t>)>;
  using GetWhole = std::function<std::optional<std::uint64_t>(const Job&)>;
  JobKey& WholeOrAuto(std::string path, std::uint64_t low, std::uint64_t high, SetWhole set,
                      GetWhole get, std::string doc) {
    std::string limits = fmt::format("{} to {}", low, FormatCount(high));
    JobKey& key = Custom(std::move(path), "whole number or auto", limits, std::move(doc));
    key.set = [set, low, high, limits](const JobNode& node, Job* job, const std::string&) {
      const bool is_scalar = node.kind == JobNode::Kind::kScalar;
      if (is_scalar && node.scalar == "auto") {
        set(job, std::nullopt);
        return std::string();
      }
      const std::optional<std::uint64_t> value = is_scalar ? ParseWhole(node.scalar) : std::nullopt;
      if (!value) return Expected("auto or a whole number", node);
      if (*value < low || *value > high)
        return fmt::format("is {}; legal: auto or {}", *value, limits);
      set(job, value);
      return std::string();
    };
    key.print = [get](const Job& job, const std::string&) {
      const std::optional<std::uint64_t> value = get(job);
      return std::optional<std::string>(value ? std::to_string(*value) : "auto");
    };
    return key;
  }

  template <typename Get>
  JobKey& Text(std::string path, Get get, std::string doc) {
    JobKey& key = Custom(std::move(path), "text", "", std::move(doc));
    key.set = [get](const JobNode& node, Job* job, const std::string& name) {
      if (node.kind != JobNode::Kind::kScalar || node.scalar.empty()) return Expected("text", node);
      get(*job, name) = node.scalar;
      return std::string();
    };
    key.print = [get](const Job& job, const std::string& name) -> std::optional<std::string> {
      const std::string& value = get(Mutable(job), name);
      if (value.empty()) return std::nullopt;
      return YamlText(value);
    };
    return key;
  }

  // A list of text, or one text for a list of one. `choices` empty: any.
  template <typename Get>
  JobKey& TextList(std::string path, Get get, std::vector<std::string> choices, std::string doc) {
    JobKey& key = Custom(std::move(path), "list of text", Join(choices), std::move(doc));
    key.set = [get, choices](const JobNode& node, Job* job, const std::string& name) {
      std::vector<JobNode> items = node.items;
      if (node.kind == JobNode::Kind::kScalar) items.push_back(node);
      if (node.kind == JobNode::Kind::kMap) return Expected("a list of text", node);
      std::vector<std::string> values;
      for (const JobNode& item : items) {
        if (item.kind != JobNode::Kind::kScalar || item.scalar.empty()) {
          return Expected("a list of text", item);
        }
        if (!choices.empty() &&
            std::find(choices.begin(), choices.end(), item.scalar) == choices.end()) {
          return fmt::format("has {}; legal: {}", Shown(item), Join(choices));
        }
        values.push_back(item.scalar);
      }
      get(*job, name) = std::move(values);
      return std::string();
    };
    key.print = [get](const Job& job, const std::string& name) {
      std::string text;
      for (const std::string& value : get(Mutable(job), name)) {
        text += (text.empty() ? "" : ", ") + YamlText(value);
      }
      return std::optional<std::string>("[" + text + "]");
    };
    return key;
  }

  template <typename Get, typename T>
  JobKey& Choice(std::string path, Get get, std::vector<std::pair<std::string, T>> choices,
                 std::string doc) {
    std::vector<std::string> names;
    for (const auto& choice : choices) names.push_back(choice.first);
    JobKey& key = Custom(std::move(path), "word", Join(names), std::move(doc));
    key.set = [get, choices, names](const JobNode& node, Job* job, const std::string& name) {
      for (const auto& [text, value] : choices) {
        if (node.kind == JobNode::Kind::kScalar && node.scalar == text) {
          get(*job, name) = value;
          return std::string();
        }
      }
      const std::string nearest =
          node.kind == JobNode::Kind::kScalar ? NearestName(node.scalar, names) : "";
      return fmt::format("is {}; legal: {}{}", Shown(node), Join(names),
                         nearest.empty() ? "" : fmt::format("; did you mean '{}'?", nearest));
    };
    key.print = [get, choices](const Job& job, const std::string& name) {
      std::optional<std::string> text;
      for (const auto& choice : choices) {
        if (choice.second == get(Mutable(job), name)) text = choice.first;
      }
      return text;
    };
    return key;
  }

  template <typename Get>
  JobKey& Word(std::string path, Get get, const std::vector<std::string>& words, std::string doc) {
    std::vector<std::pair<std::string, std::string>> choices;
    for (const std::string& word : words) choices.emplace_back(word, word);
    return Choice(std::move(path), get, std::move(choices), std::move(doc));
  }

  std::size_t size() const { return keys_.size(); }
  // The keys from `first` on are left out of a complete job unless `wanted`.
  template <typename Wanted>
  void OnlyPrintFrom(std::size_t first, Wanted wanted, const std::string& default_note) {
    for (std::size_t i = first; i < keys_.size(); ++i) {
      keys_[i].print = [print = keys_[i].print, wanted](const Job& job, const std::string& name) {
        return wanted(job) ? print(job, name) : std::nullopt;
      };
      keys_[i].default_note = default_note;
    }
  }

  // The getters only refer to a field; printing changes nothing.
  static Job& Mutable(const Job& job) { return const_cast<Job&>(job); }

  static std::string Join(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : " | ") + word;
    return text;
  }

 private:
  std::vector<JobKey> keys_;
};

// null (or nothing) stands for 0.
inline JobKey& OrNull(JobKey& key) {
  key.type += " or null";
  auto set = key.set;
  key.set = [set](const JobNode& node, Job* job, const std::string& name) {
    if (node.kind != JobNode::Kind::kNull) return set(node, job, name);
    JobNode zero = node;
    zero.kind = JobNode::Kind::kScalar;
    zero.scalar = "0";
    return set(zero, job, name);
  };
  auto print = key.print;
  key.print = [print](const Job& job, const std::string& name) {
    std::optional<std::string> text = print(job, name);
    if (text == "0") text = "null";
    return text;
  };
  return key;
}

inline JobKey& Identifies(JobKey& key) {
  key.identifies = true;
  return key;
}

template <typename Applies>
JobKey& OnlyFor(JobKey& key, std::string text, Applies applies) {
  key.applies = applies;
  key.applies_text = std::move(text);
  return key;
}

// Runs `then` after the key was set.
template <typename Then>
JobKey& AndThen(JobKey& key, Then then) {
  auto set = key.set;
  key.set = [set, then](const JobNode& node, Job* job, const std::string& name) {
    std::string problem = set(node, job, name);
    if (problem.empty()) then(*job, name);
    return problem;
  };
  return key;
}

}  // namespace terrace::job_keys
