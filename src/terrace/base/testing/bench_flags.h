// BenchFlags: the command line of a benchmark: `--tiny`, and `--name value` for numbers and texts.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "terrace/base/clock.h"

namespace terrace {

class BenchFlags {
 public:
  explicit BenchFlags(std::function<void()> tiny) : tiny_(std::move(tiny)) {}

  // What is borrowed is set by Parse. A number must fit its type.
  template <std::integral Number>
  void Add(const std::string& name, Number* value) {
    values_["--" + name] = [value](const std::string& text) {
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
      return error == std::errc() && end == text.data() + text.size();
    };
  }
  // Each time it is given, one more.
  template <std::integral Number>
  void Add(const std::string& name, std::vector<Number>* values) {
    values_["--" + name] = [values](const std::string& text) {
      const auto [end, error] =
          std::from_chars(text.data(), text.data() + text.size(), values->emplace_back());
      return error == std::errc() && end == text.data() + text.size();
    };
  }
  void Add(const std::string& name, std::string* value) {
    values_["--" + name] = [value](const std::string& text) {
      *value = text;
      return true;
    };
  }

  // `--seed`; by default another one each time. Parse prints it, so that a run can be had again.
  void AddSeed(std::uint64_t* seed) {
    *seed = FreshSeed();
    seed_ = seed;
    Add("seed", seed);
  }
  static std::uint64_t FreshSeed() {
    return static_cast<std::uint64_t>(Clock::Real()->WallMicros()) % 1'000'000'000;
  }

  // False: an argument is none of these; standard error has been told which there are.
  bool Parse(int argc, char** argv) const {
    for (int i = 1; i < argc; ++i) {
      const std::string name = argv[i];
      if (name == "--tiny") {
        tiny_();
        continue;
      }
      const auto flag = values_.find(name);
      if (flag != values_.end() && i + 1 < argc && flag->second(argv[++i])) continue;
      std::string usage = std::string("usage: ") + argv[0] + " [--tiny]";
      for (const auto& [known, set] : values_) usage += " [" + known + " VALUE]";
      std::fprintf(stderr, "%s\n", usage.c_str());
      return false;
    }
    if (seed_ != nullptr) std::printf("--seed %llu\n", static_cast<unsigned long long>(*seed_));
    return true;
  }

 private:
  const std::function<void()> tiny_;
  std::map<std::string, std::function<bool(const std::string&)>> values_;
  const std::uint64_t* seed_ = nullptr;
};

}  // namespace terrace
