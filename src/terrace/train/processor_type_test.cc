// The text of a processor's type: of builds for any of its instruction sets.
#include "terrace/train/processor_type.h"

#include <gtest/gtest.h>

#include <string>

namespace terrace {
namespace {

TEST(ProcessorType, NamesWhatTheProgramWasNotBuiltFor) {
  const InstructionSets none, all = {.avx = true, .fma = true, .avx512f = true};
  const InstructionSets avx2 = {.avx = true, .fma = true, .avx512f = false};
  EXPECT_EQ(WithoutText(all, all), "");
  EXPECT_EQ(WithoutText(all, avx2), " without avx512f");
  EXPECT_EQ(WithoutText(all, none), " without avx512f without avx without fma");
  EXPECT_EQ(WithoutText(avx2, none), " without avx without fma");
  EXPECT_EQ(WithoutText(avx2, {.avx = true, .fma = false, .avx512f = false}), " without fma");
  EXPECT_EQ(WithoutText(avx2, {.avx = false, .fma = true, .avx512f = false}), " without avx");
  // What the processor has not is not missed.
  EXPECT_EQ(WithoutText(avx2, all), "");
  EXPECT_EQ(WithoutText(none, none), "");
}

TEST(ProcessorType, SaysItOfThisMachine) {
  const std::string text = ProcessorType();
  EXPECT_FALSE(text.empty());
  EXPECT_EQ(ProcessorType(), text);
#if defined(__x86_64__)
  __builtin_cpu_init();
  const InstructionSets processor = {.avx = __builtin_cpu_supports("avx") != 0,
                                     .fma = __builtin_cpu_supports("fma") != 0,
                                     .avx512f = __builtin_cpu_supports("avx512f") != 0};
  EXPECT_TRUE(text.ends_with(WithoutText(processor, BuiltInstructionSets()))) << text;
  // The same words tell what the processor has and what the program does without.
  EXPECT_EQ(text.find(" without avx512f") != std::string::npos,
            processor.avx512f && !BuiltInstructionSets().avx512f)
      << text;
#endif
}

}  // namespace
}  // namespace terrace
