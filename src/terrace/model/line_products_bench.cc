// Forward, input and weight gradient of a first layer by its distinct lines, against the same by
// examples (oneDNN and GemmTransposedA over a pooled block): 26 slots, keys by Zipf 1.05 as in
// benchmarks/end_to_end. CPU time of the thread; median and quartiles of the repetitions.
//
//   model_line_products_bench [--tiny] [--seed S]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/base/testing/bench_flags.h"
#include "terrace/model/gemm.h"
#include "terrace/model/line_products.h"
#include "terrace/model/network.h"

namespace terrace {
namespace {

constexpr std::size_t kSlots = 26, kDense = 26;

struct Floats {
  explicit Floats(std::size_t count) {
    auto allocated = HugeBuffer::Allocate(count * sizeof(float));
    if (!allocated.ok()) {
      std::fprintf(stderr, "%s\n", allocated.status().ToString().c_str());
      std::exit(1);
    }
    memory = std::move(allocated).value();
    for (std::size_t i = 0; i < count; ++i) data()[i] = UnitFloat(MixKey(i)) - 0.5f;
  }
  float* data() { return reinterpret_cast<float*>(memory.data()); }
  HugeBuffer memory;
};

struct Slot {
  std::vector<std::uint32_t> begin, line, example;
};

// The slot's keys of a mini-batch, by power law over `categories`.
Slot DrawSlot(const std::vector<double>& cumulative, std::uint32_t examples, Rng* rng) {
  std::map<std::size_t, std::vector<std::uint32_t>> by_key;
  for (std::uint32_t e = 0; e < examples; ++e) {
    const double at = rng->Unit() * cumulative.back();
    by_key[static_cast<std::size_t>(std::lower_bound(cumulative.begin(), cumulative.end(), at) -
                                    cumulative.begin())]
        .push_back(e);
  }
  Slot slot;
  slot.begin.push_back(0);
  for (const auto& [key, held] : by_key) {
    slot.line.insert(slot.line.end(), held.size(),
                     static_cast<std::uint32_t>(slot.begin.size() - 1));
    slot.example.insert(slot.example.end(), held.begin(), held.end());
    slot.begin.push_back(static_cast<std::uint32_t>(slot.example.size()));
  }
  return slot;
}

template <class Work>
double Median(bool tiny, const char* what, std::size_t examples, Work work) {
  std::vector<double> seconds;
  work();
  for (int i = 0; i < (tiny ? 2 : 25); ++i) {
    const double start = ThreadCpuSeconds();
    work();
    seconds.push_back(ThreadCpuSeconds() - start);
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  std::printf("  %-28s %8.0f ns an example (%.0f-%.0f)\n", what, median / examples * 1e9,
              seconds[seconds.size() / 4] / examples * 1e9,
              seconds[seconds.size() * 3 / 4] / examples * 1e9);
  return median;
}

bool Run(bool tiny, std::uint64_t seed, std::uint32_t examples, std::size_t dim,
         std::size_t width) {
  Rng rng(seed);
  std::vector<double> cumulative;
  for (std::size_t k = 1; k <= 100'000; ++k) {
    cumulative.push_back((cumulative.empty() ? 0 : cumulative.back()) +
                         std::pow(static_cast<double>(k), -1.05));
  }
  const std::size_t inputs = kSlots * dim + kDense;
  const std::size_t stride = ProductStride(width);
  Floats weight(inputs * width), d_weight(inputs * width), d_weight2(inputs * width);
  Floats rows(examples * kSlots * dim), dense(examples * kDense), gradient(examples * kSlots * dim);
  Floats y(examples * stride), block(examples * inputs), d_block(examples * inputs),
      y2(examples * width);
  std::vector<Slot> slots;
  std::vector<LineGroup> groups;
  std::size_t distinct = 0;
  groups.push_back({kSlots * dim, kDense, examples, dense.data()});
  for (std::size_t e = 0; e < examples; ++e) {
    std::memcpy(block.data() + e * inputs + kSlots * dim, dense.data() + e * kDense,
                kDense * sizeof(float));
  }
  for (std::size_t s = 0; s < kSlots; ++s) slots.push_back(DrawSlot(cumulative, examples, &rng));
  for (std::size_t s = 0; s < kSlots; ++s) {
    const Slot& slot = slots[s];
    const std::size_t count = slot.begin.size() - 1;
    const float* const data = rows.data() + s * examples * dim;
    groups.push_back({s * dim, dim, count, data, gradient.data() + s * examples * dim,
                      slot.begin.data(), slot.line.data(), slot.example.data()});
    for (std::size_t o = 0; o < slot.example.size(); ++o) {
      std::memcpy(block.data() + slot.example[o] * inputs + s * dim, data + slot.line[o] * dim,
                  dim * sizeof(float));
    }
    distinct += count;
  }
  std::printf("%u examples, dim %zu, %zu columns: %.0f %% of the keys distinct\n", examples, dim,
              width, 100.0 * static_cast<double>(distinct) / (kSlots * examples));
  double by_lines = Median(tiny, "lines: forward", examples, [&] {
    for (std::size_t c = 0; c < width; c += kProductColumns) {
      MultiplyLines(groups, weight.data(), inputs, width, c, examples, y.data(), stride);
    }
  });
  Floats first(examples * width);
  for (std::size_t e = 0; e < examples; ++e) {
    std::memcpy(first.data() + e * width, y.data() + e * stride, width * sizeof(float));
  }
  by_lines += Median(tiny, "lines: gradients", examples, [&] {
    for (const LineGroup& group : groups) {
      DifferentiateLines(group, weight.data(), width, y.data(), stride, d_weight.data());
    }
  });
  double by_examples = Median(tiny, "examples: forward", examples, [&] {
    for (std::size_t e = 0, n = 0; e < examples; e += n) {
      n = GemmBlock(examples - e);
      Gemm(Transpose::kNo, Transpose::kNo, n, width, inputs, block.data() + e * inputs, inputs,
           weight.data(), width, false, y2.data() + e * width, width);
    }
  });
  for (std::size_t i = 0; i < examples * width; ++i) {
    if (!(std::fabs(first.data()[i] - y2.data()[i]) < 1e-3f)) {
      std::fprintf(stderr, "products differ: %g and %g\n", static_cast<double>(first.data()[i]),
                   static_cast<double>(y2.data()[i]));
      return false;
    }
  }
  by_examples += Median(tiny, "examples: gradients", examples, [&] {
    for (std::size_t e = 0, n = 0; e < examples; e += n) {
      n = GemmBlock(examples - e);
      Gemm(Transpose::kYes, Transpose::kNo, inputs, width, n, block.data() + e * inputs, inputs,
           y2.data() + e * width, width, e > 0, d_weight2.data(), width);
      Gemm(Transpose::kNo, Transpose::kYes, n, kSlots * dim, width, y2.data() + e * width, width,
           weight.data(), width, false, d_block.data() + e * inputs, inputs);
    }
  });
  std::printf("  lines take %.0f %% of the time of examples\n", 100 * by_lines / by_examples);
  return true;
}

int Main(int argc, char** argv) {
  bool tiny = false;
  std::uint64_t seed = 0;
  BenchFlags flags([&] { tiny = true; });
  flags.AddSeed(&seed);
  if (!flags.Parse(argc, argv)) return 2;
  PrepareComputeThread();
  if (tiny) return Run(true, seed, 128, 8, 48) ? 0 : 1;
  for (const std::size_t width : {64, 256, 1024}) {
    for (const std::uint32_t examples : {512u, 2048u}) {
      if (!Run(false, seed, examples, 16, width)) return 1;
    }
  }
  return Run(false, seed, 2048, 32, 256) ? 0 : 1;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) { return terrace::Main(argc, argv); }
