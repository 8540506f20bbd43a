// Speed of the matrix products and of whole steps of a dense network on one thread, as share of the
// peak of fused multiply-adds that this process measures for itself just before and after. CPU time
// of the thread, so that a busy machine disturbs little; median and quartiles of the repetitions.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "terrace/base/clock.h"
#include "terrace/base/memory.h"
#include "terrace/base/rng.h"
#include "terrace/model/gemm.h"
#include "terrace/model/network.h"

namespace terrace {
namespace {

#if defined(__AVX512F__)
using Vector = __m512;
Vector MultiplyAdd(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__FMA__)
using Vector = __m256;
Vector MultiplyAdd(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#else
using Vector = float __attribute__((vector_size(16)));
Vector MultiplyAdd(Vector a, Vector b, Vector c) { return a * b + c; }
#endif
constexpr std::size_t kLanes = sizeof(Vector) / sizeof(float);

// Twelve chains hide the latency of any processor's multiply-add and fit the registers of all.
template <std::size_t... chain>
double RunMultiplyAdds(int rounds, std::index_sequence<chain...>) {
  Vector a[] = {(Vector{} + static_cast<float>(chain))...};
  const Vector b = Vector{} + 0.999f, c = Vector{} + 1e-3f;
  const double start = ThreadCpuSeconds();
  for (int i = 0; i < rounds; ++i) {
    const auto step = [&](Vector& x) {
      x = MultiplyAdd(x, b, c);
      asm volatile("" : "+v"(x));
    };
    (step(a[chain]), ...);
  }
  return ThreadCpuSeconds() - start;
}

double PeakFlops(bool tiny) {
  constexpr std::size_t kChains = 12;
  const int rounds = tiny ? 1000 : 1000000;
  double best = 0;
  for (int repeat = 0; repeat < 10; ++repeat) {
    const double seconds = RunMultiplyAdds(rounds, std::make_index_sequence<kChains>());
    best = std::max(best, 2.0 * kLanes * kChains * rounds / seconds);
  }
  return best;
}

struct Time {
  double median = 0, low = 0, high = 0;  // Seconds; low and high: the quartiles.
};

Time Measure(bool tiny, double flops, const std::function<void()>& work) {
  work();
  const int repeats = tiny ? 2 : std::clamp(static_cast<int>(3e10 / flops), 11, 500);
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const double start = ThreadCpuSeconds();
    work();
    seconds.push_back(ThreadCpuSeconds() - start);
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds[seconds.size() / 4],
          seconds[seconds.size() * 3 / 4]};
}

void Print(const std::string& what, double flops, const Time& time, double peak) {
  std::printf("%-46s %9.1f us (%.1f-%.1f) %7.1f GFLOP/s %5.1f %% of peak (first quartile %.1f)\n",
              what.c_str(), time.median * 1e6, time.low * 1e6, time.high * 1e6,
              flops / time.median * 1e-9, 100 * flops / time.median / peak,
              100 * flops / time.low / peak);
}

struct Buffer {
  explicit Buffer(std::size_t floats, std::uint64_t seed) {
    auto allocated = HugeBuffer::Allocate(floats * sizeof(float));
    if (!allocated.ok()) {
      std::fprintf(stderr, "%s\n", allocated.status().ToString().c_str());
      std::exit(1);
    }
    memory = std::move(allocated).value();
    for (std::size_t i = 0; i < floats; ++i) data()[i] = UnitFloat(HashCombine(seed, i)) - 0.5f;
  }
  float* data() { return reinterpret_cast<float*>(memory.data()); }
  HugeBuffer memory;
};

bool CheckProduct(Transpose ta, Transpose tb, std::size_t m, std::size_t n, std::size_t k,
                  const float* a, std::size_t lda, const float* b, std::size_t ldb, const float* c,
                  std::size_t ldc) {
  for (std::size_t i = 0; i < m; i += m / 3 + 1) {
    for (std::size_t j = 0; j < n; j += n / 3 + 1) {
      double sum = 0;
      for (std::size_t l = 0; l < k; ++l) {
        const double x = ta == Transpose::kYes ? a[l * lda + i] : a[i * lda + l];
        const double y = tb == Transpose::kYes ? b[j * ldb + l] : b[l * ldb + j];
        sum += x * y;
      }
      if (!(std::fabs(sum - c[i * ldc + j]) < 1e-4 * (1 + std::sqrt(static_cast<double>(k))))) {
        std::fprintf(stderr, "wrong product at (%zu, %zu): %g, not %g\n", i, j,
                     static_cast<double>(c[i * ldc + j]), sum);
        return false;
      }
    }
  }
  return true;
}

// The three products of a layer: forward, input gradient, weight gradient.
bool BenchLayer(bool tiny, std::size_t examples, std::size_t in, std::size_t out, double peak) {
  const std::size_t stride = in;
  Buffer x(examples * stride, 1), weight(in * out, 2), y(examples * out, 3);
  const double flops = 2.0 * static_cast<double>(examples * in * out);
  std::string name = "  ";
  for (const std::size_t size : {examples, in, out})
    name.append(std::to_string(size)).append(" x ");
  name.replace(name.size() - 2, 2, "");
  bool right = true;
  const auto run = [&](const char* what, Transpose ta, Transpose tb, std::size_t m, std::size_t n,
                       std::size_t k, Buffer& a, std::size_t lda, Buffer& b, std::size_t ldb,
                       std::size_t c_floats, std::size_t ldc) {
    Buffer c(c_floats, 4);
    const Time time = Measure(tiny, flops, [&] {
      Gemm(ta, tb, m, n, k, a.data(), lda, b.data(), ldb, false, c.data(), ldc);
    });
    Print(name + what, flops, time, peak);
    right &= CheckProduct(ta, tb, m, n, k, a.data(), lda, b.data(), ldb, c.data(), ldc);
  };
  run("forward", Transpose::kNo, Transpose::kNo, examples, out, in, x, stride, weight, out,
      examples * out, out);
  run("input gradient", Transpose::kNo, Transpose::kYes, examples, in, out, y, out, weight, out,
      examples * stride, stride);
  run("weight gradient", Transpose::kYes, Transpose::kNo, in, out, examples, x, stride, y, out,
      in * out, out);
  return right;
}

bool BenchStep(bool tiny, std::uint32_t examples, const NetworkInputSpec& inputs,
               std::vector<std::uint32_t> hidden, double peak) {
  NetworkSpec spec;
  spec.hidden = std::move(hidden);
  auto network = CreateNetwork(spec, inputs, 1);
  if (!network.ok()) return false;
  auto context = (*network)->NewContext(examples);
  if (!context.ok()) return false;
  const NetworkInput input = (*context)->input();
  for (std::uint32_t e = 0; e < examples; ++e) {
    for (std::uint32_t j = 0; j < inputs.width(); ++j) {
      input.block[e * input.stride + j] = UnitFloat(HashCombine(e, j)) - 0.5f;
    }
    input.label[e] = static_cast<float>(e % 2);
    input.weight[e] = 1;
  }
  double width = inputs.width(), flops = 0;
  std::string name = "step ";
  name.append(std::to_string(examples)).append(": ").append(std::to_string(inputs.width()));
  for (std::size_t i = 0; i < spec.hidden.size(); ++i) {
    // The first layer gives no gradient to the dense features.
    flops +=
        2.0 * examples * spec.hidden[i] * (2 * width + (i == 0 ? inputs.embedding_width : width));
    width = spec.hidden[i];
    name.append("-").append(std::to_string(spec.hidden[i]));
  }
  bool right = true;
  NetworkContext* contexts[] = {context->get()};
  const Time passes = Measure(tiny, flops, [&] {
    const auto loss = (*network)->Forward(context->get(), examples);
    right &= loss.ok() && std::isfinite(*loss);
    right &= (*network)
                 ->Backward(context->get(), examples, 1.0f / static_cast<float>(examples), false)
                 .ok();
  });
  Print(name + " forward, backward", flops, passes, peak);
  const Time optimizer = Measure(tiny, flops, [&] {
    (*network)->ReduceGradients(contexts, 0, 1);
    right &= std::isfinite((*network)->GradientSquareSum());
    (*network)->ApplyGradients({1e-6f}, 0, 1);
    (*network)->Advance();
  });
  std::printf("%-46s %9.1f us (%.1f-%.1f)\n", "  reduce, Adam", optimizer.median * 1e6,
              optimizer.low * 1e6, optimizer.high * 1e6);
  return right;
}

int Run(bool tiny) {
  PrepareComputeThread();
  ConfigureAllocator();
  const double peak = PeakFlops(tiny);
  std::printf("peak of fused multiply-adds, one thread: %.1f GFLOP/s\n", peak * 1e-9);
  bool right = true;
  if (tiny) {
    right &= BenchLayer(tiny, 33, 45, 17, peak);
    right &= BenchStep(tiny, 33, {32, 13, false}, {17, 5}, peak);
    return right ? 0 : 1;
  }
  right &= BenchStep(tiny, 2048, {416, 13, false}, {1024, 512, 256}, peak);
  right &= BenchStep(tiny, 1024, {416, 13, false}, {1024, 512, 256}, peak);
  right &= BenchStep(tiny, 1024, {416, 13, false}, {256, 128}, peak);
  right &= BenchStep(tiny, 256, {416, 13, false}, {256, 128}, peak);
  right &= BenchStep(tiny, 256, {416, 0, false}, {64, 32}, peak);
  const std::size_t layers[][3] = {{2048, 429, 1024}, {2048, 1024, 512}, {2048, 512, 256},
                                   {1024, 429, 256},  {1024, 256, 128},  {256, 429, 256},
                                   {256, 256, 128},   {256, 416, 64},    {256, 64, 32}};
  for (const auto& [examples, in, out] : layers) right &= BenchLayer(tiny, examples, in, out, peak);
  std::printf("peak once more: %.1f GFLOP/s\n", PeakFlops(tiny) * 1e-9);
  return right ? 0 : 1;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  return terrace::Run(argc > 1 && std::strcmp(argv[1], "--tiny") == 0);
}
