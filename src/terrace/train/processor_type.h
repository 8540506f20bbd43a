// ProcessorType: what of a machine's processor decides which kernels are taken, as text. Part of
// what identifies a run, so that a text means the same for ever. Threads: pure functions.
#pragma once

#include <string>

namespace terrace {

// Instruction sets that kernels of ours are written for: those of a processor, or those that a
// program was built for.
struct InstructionSets {
  bool avx = false, fma = false, avx512f = false;
};

// " without avx512f", and so on: what the processor has and the program was not built for, whose
// kernels are then others than the processor could run. Empty: nothing.
std::string WithoutText(const InstructionSets& processor, const InstructionSets& built);

// What this program was built for.
InstructionSets BuiltInstructionSets();

// The type of this machine's processor, and what of it this program was not built for.
std::string ProcessorType();

}  // namespace terrace
