// This file never sees torch's include folder, which carries headers of another oneDNN.
#include <array>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>
#include <utility>

#include "terrace/base/check.h"
#include "terrace/base/ids.h"
#include "terrace/base/memory.h"
#include "terrace/base/mutex.h"
#include "terrace/model/gemm.h"

namespace terrace {
namespace {

// What decides the kernel.
struct Shape {
  std::array<std::size_t, 9> numbers;  // ta, tb, m, n, k, lda, ldb, ldc, add
  bool operator==(const Shape& other) const { return numbers == other.numbers; }
};

struct ShapeHash {
  std::size_t operator()(const Shape& shape) const {
    std::uint64_t hash = 0;
    for (const std::size_t number : shape.numbers) hash = MixKey(hash ^ number);
    return hash;
  }
};

struct Kernel {
  dnnl::matmul matmul;
  dnnl::memory a, b, c, scratchpad;
  std::unordered_map<int, dnnl::memory> arguments;
  std::size_t scratchpad_bytes = 0;
};

// Shapes are few: two a layer and product. More than these come from a caller that changes its
// slices for ever, which must not fill the memory.
constexpr std::size_t kMaxKernels = 256;

// oneDNN writes the code of a kernel without looking whether it got memory for it. A kernel was
// seen to take 0.5 to 1.3 MiB; the rest is for what other threads take meanwhile.
constexpr std::uint64_t kKernelBytes = std::uint64_t{16} << 20;

// The processor and the shape alone choose a kernel, and so the bits of a model: not the
// environment (DNNL_MAX_CPU_ISA, DNNL_CPU_ISA_HINTS, DNNL_DEFAULT_FPMATH_MODE).
bool FixChoice() {
  const auto holds = [](dnnl::status status) {
    return status == dnnl::status::success || status == dnnl::status::unimplemented;
  };
  TERRACE_CHECK(holds(dnnl::set_max_cpu_isa(dnnl::cpu_isa::all)));  // Before the first kernel.
  TERRACE_CHECK(holds(dnnl::set_cpu_isa_hints(dnnl::cpu_isa_hints::no_hints)));
  TERRACE_CHECK(holds(dnnl::set_default_fpmath_mode(dnnl::fpmath_mode::strict)));
  return true;
}

class Kernels {
 public:
  Kernels() : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {}

  void Run(const Shape& shape, const float* a, const float* b, float* c) {
    auto found = kernels_.find(shape);
    if (found == kernels_.end()) {
      if (kernels_.size() >= kMaxKernels) kernels_.clear();
      found = kernels_.emplace(shape, Build(shape)).first;
    }
    Kernel& kernel = *found->second;
    if (kernel.scratchpad_bytes > scratchpad_.size()) {
      Result<HugeBuffer> buffer = HugeBuffer::Allocate(kernel.scratchpad_bytes);
      if (!buffer.ok()) EndForLackOfMemory(kernel.scratchpad_bytes);
      scratchpad_ = std::move(buffer).value();
    }
    kernel.a.set_data_handle(const_cast<float*>(a));  // Only read: the interface has one kind.
    kernel.b.set_data_handle(const_cast<float*>(b));
    kernel.c.set_data_handle(c);
    kernel.scratchpad.set_data_handle(scratchpad_.data());
    kernel.matmul.execute(stream_, kernel.arguments);
  }

 private:
  std::unique_ptr<Kernel> Build(const Shape& shape) {
    const auto& [ta, tb, m, n, k, lda, ldb, ldc, add] = shape.numbers;
    const auto layout = [](std::size_t rows, std::size_t columns, bool transposed, std::size_t ld) {
      const auto size = [](std::size_t value) { return static_cast<dnnl::memory::dim>(value); };
      const dnnl::memory::dims strides =
          transposed ? dnnl::memory::dims{1, size(ld)} : dnnl::memory::dims{size(ld), 1};
      return dnnl::memory::desc({size(rows), size(columns)}, dnnl::memory::data_type::f32, strides);
    };
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (add != 0) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
    const dnnl::matmul::primitive_desc description(
        dnnl::matmul::desc(layout(m, k, ta != 0, lda), layout(k, n, tb != 0, ldb),
                           layout(m, n, false, ldc)),
        attributes, engine_);
    auto kernel = std::make_unique<Kernel>();
    {
      static Mutex one_at_a_time;
      MutexLock lock(&one_at_a_time);
      EndUnlessMemoryLeft(kKernelBytes);
      kernel->matmul = dnnl::matmul(description);
    }
    kernel->a = dnnl::memory(description.src_desc(), engine_, DNNL_MEMORY_NONE);
    kernel->b = dnnl::memory(description.weights_desc(), engine_, DNNL_MEMORY_NONE);
    kernel->c = dnnl::memory(description.dst_desc(), engine_, DNNL_MEMORY_NONE);
    kernel->scratchpad = dnnl::memory(description.scratchpad_desc(), engine_, DNNL_MEMORY_NONE);
    kernel->scratchpad_bytes = description.scratchpad_desc().get_size();
    kernel->arguments = {{DNNL_ARG_SRC, kernel->a},
                         {DNNL_ARG_WEIGHTS, kernel->b},
                         {DNNL_ARG_DST, kernel->c},
                         {DNNL_ARG_SCRATCHPAD, kernel->scratchpad}};
    return kernel;
  }

  static inline const bool fixed_ = FixChoice();  // Before any engine.
  dnnl::engine engine_;
  dnnl::stream stream_;
  std::unordered_map<Shape, std::unique_ptr<Kernel>, ShapeHash> kernels_;
  HugeBuffer scratchpad_;
};

}  // namespace

void Gemm(Transpose transpose_a, Transpose transpose_b, std::size_t m, std::size_t n, std::size_t k,
          const float* a, std::size_t lda, const float* b, std::size_t ldb, bool add, float* c,
          std::size_t ldc) {
  if (transpose_a == Transpose::kYes && transpose_b == Transpose::kNo) {
    GemmTransposedA(m, n, k, a, lda, b, ldb, add, c, ldc);
    return;
  }
  const Shape shape{{transpose_a == Transpose::kYes, transpose_b == Transpose::kYes, m, n, k, lda,
                     ldb, ldc, add}};
  try {
    thread_local Kernels kernels;
    kernels.Run(shape, a, b, c);
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_out_of_memory) EndForLackOfMemory("memory for a product of matrices");
    TERRACE_CHECK(!"oneDNN could not multiply");  // Every shape is legal.
  }
}

}  // namespace terrace
