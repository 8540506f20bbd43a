// The program's operator new: where malloc has nothing left for a small object, the process says
// what was asked and ends. Large memory is asked for where its lack is returned as a Status.
#include <cstddef>
#include <cstdlib>
#include <new>

#include "terrace/base/memory.h"

// The other forms come down to these.
void* operator new(std::size_t bytes) {
  void* memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) terrace::EndForLackOfMemory(bytes);
  return memory;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes > 0 ? bytes : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
