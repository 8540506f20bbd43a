#include "terrace/train/processor_type.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <array>
#include <cstring>

#include <fmt/format.h>
#else
#include <sys/utsname.h>
#endif

namespace terrace {

std::string WithoutText(const InstructionSets& processor, const InstructionSets& built) {
  std::string text;
  if (processor.avx512f && !built.avx512f) text += " without avx512f";
  if (processor.avx && !built.avx) text += " without avx";
  if (processor.fma && !built.fma) text += " without fma";
  return text;
}

InstructionSets BuiltInstructionSets() {
  InstructionSets built;
#if defined(__AVX__)
  built.avx = true;
#endif
#if defined(__FMA__)
  built.fma = true;
#endif
#if defined(__AVX512F__)
  built.avx512f = true;
#endif
  return built;
}

std::string ProcessorType() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  std::array<char, 13> vendor{};
  if (__get_cpuid(0, &a, &b, &c, &d) != 0) {
    std::memcpy(vendor.data(), &b, 4);
    std::memcpy(vendor.data() + 4, &d, 4);
    std::memcpy(vendor.data() + 8, &c, 4);
  }
  // Family and model tell the generation; libraries choose kernels by them and by the features.
  unsigned family = 0, model = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) != 0) {
    family = ((a >> 8) & 0xf) + ((a >> 20) & 0xff);
    model = ((a >> 4) & 0xf) | ((a >> 12) & 0xf0);
  }
  std::string text = fmt::format("x86-64 {} family {} model {}", vendor.data(), family, model);
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") != 0) text += " avx2";
  if (__builtin_cpu_supports("fma") != 0) text += " fma";
  if (__builtin_cpu_supports("avx512f") != 0) text += " avx512f";
  if (__builtin_cpu_supports("avx512vl") != 0) text += " avx512vl";
  if (__builtin_cpu_supports("avx512bw") != 0) text += " avx512bw";
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && ((d >> 24) & 1) != 0) text += " amx";
  const InstructionSets processor = {.avx = __builtin_cpu_supports("avx") != 0,
                                     .fma = __builtin_cpu_supports("fma") != 0,
                                     .avx512f = __builtin_cpu_supports("avx512f") != 0};
  return text + WithoutText(processor, BuiltInstructionSets());
#else
  utsname name{};
  return uname(&name) == 0 ? std::string(name.machine) : std::string("unknown");
#endif
}

}  // namespace terrace
