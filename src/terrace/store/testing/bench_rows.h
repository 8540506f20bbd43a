// BenchRows: the keys and rows of a benchmark of stores. Rows are incompressible and say their key
// and how often they were written, so that every row that is read can be checked. They lie in huge
// pages, as those of a cache do. Threads: one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "terrace/base/check.h"
#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_keys.h"

namespace terrace {

class BenchRows {
 public:
  // keys: of the store, which `key_seed` chooses; row_bytes: 8 at least; seed: of what is drawn.
  BenchRows(std::uint64_t keys, std::size_t row_bytes, std::uint64_t key_seed, std::uint64_t seed)
      : store_keys_(key_seed), key_count_(keys), row_bytes_(row_bytes), rng_(seed) {}

  // Chooses keys [begin, begin + n) of the store, for its first load.
  void ChooseRange(std::uint64_t begin, std::uint64_t n) {
    Resize(n);
    for (std::uint64_t i = 0; i < n; ++i) keys_[i] = store_keys_.At(begin + i);
  }
  // Chooses these, which are keys of the store.
  void ChooseThese(std::span<const Key> keys) {
    Resize(keys.size());
    std::copy(keys.begin(), keys.end(), keys_.begin());
  }
  // Chooses n distinct keys in random order, each as likely as any. Memory: a bit for each key of
  // the store. REQUIRES: n at most half of keys.
  void ChooseUniform(std::uint64_t n) {
    Choose(n, [&] { return rng_.Below(key_count_); });
  }

  // Likewise, by Zipf's law of exponent 1, hot ones first.
  void ChooseZipf(std::uint64_t n) {
    Choose(n, [&] {
      // Log-uniform: rank r comes as often as 1 / r says.
      const double one_and_rank =
          std::exp2(std::log2(static_cast<double>(key_count_)) * rng_.Unit());
      return std::min(static_cast<std::uint64_t>(one_and_rank), key_count_) - 1;
    });
  }

  // Makes the chosen keys' rows, as written for the generation-th time.
  void Make(std::uint64_t generation) {
    for (std::size_t k = 0; k < keys_.size(); ++k) {
      std::byte* row = bytes_.data() + k * row_bytes_;
      for (std::size_t at = 0; at < row_bytes_; at += 8) {
        const std::uint64_t word = at == 0 ? generation : HashCombine(keys_[k], generation + at);
        std::memcpy(row + at, &word, std::min<std::size_t>(8, row_bytes_ - at));
      }
    }
  }
  // Whether each of the chosen keys was found, with a row of some generation.
  bool AllRight() const {
    for (std::size_t k = 0; k < keys_.size(); ++k) {
      if (found_[k] == 0) return false;
      const std::byte* row = bytes_.data() + k * row_bytes_;
      std::uint64_t generation, word;
      std::memcpy(&generation, row, 8);
      for (std::size_t at = 8; at + 8 <= row_bytes_; at += 8) {
        std::memcpy(&word, row + at, 8);
        if (word != HashCombine(keys_[k], generation + at)) return false;
      }
    }
    return true;
  }

  std::span<const Key> keys() const { return keys_; }
  // (keys, row_bytes)
  std::span<std::byte> bytes() { return bytes_.span().first(keys_.size() * row_bytes_); }
  std::span<std::uint8_t> found() { return found_; }
  Rng* rng() { return &rng_; }

 private:
  // draw(): the number of a key; what was drawn before is drawn again.
  template <typename Draw>
  void Choose(std::uint64_t n, const Draw& draw) {
    TERRACE_CHECK(n <= key_count_ / 2);
    Resize(n);
    chosen_.resize(key_count_);
    numbers_.clear();
    while (numbers_.size() < n) {
      const std::uint64_t number = draw();
      if (chosen_[number]) continue;
      chosen_[number] = true;
      keys_[numbers_.size()] = store_keys_.At(number);
      numbers_.push_back(number);
    }
    for (const std::uint64_t number : numbers_) chosen_[number] = false;
  }
  void Resize(std::uint64_t n) {
    keys_.resize(n);
    if (bytes_.size() < n * row_bytes_) {
      Result<HugeBuffer> bytes = HugeBuffer::Allocate(n * row_bytes_);
      if (!bytes.ok()) EndForLackOfMemory(n * row_bytes_);
      bytes_ = *std::move(bytes);
    }
    found_.assign(n, 0);
  }

  const BenchKeys store_keys_;
  const std::uint64_t key_count_;
  const std::size_t row_bytes_;
  Rng rng_;
  std::vector<Key> keys_;
  std::vector<bool> chosen_;  // (keys of the store) While some are chosen.
  std::vector<std::uint64_t> numbers_;
  HugeBuffer bytes_;
  std::vector<std::uint8_t> found_;
};

}  // namespace terrace
