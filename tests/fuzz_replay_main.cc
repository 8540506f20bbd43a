// Runs a fuzz target over a kept corpus, with any compiler: every file of the folders given, and
// files given one by one.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

namespace fs = std::filesystem;

// False: the path cannot be read.
bool Collect(const fs::path& path, std::vector<fs::path>* inputs) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    inputs->push_back(path);
    return fs::is_regular_file(path, error);
  }
  fs::recursive_directory_iterator it(path, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    if (it->is_regular_file(error)) inputs->push_back(it->path());
  }
  return !error;
}

bool Replay(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad()) return false;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<fs::path> inputs;
  for (int i = 1; i < argc; ++i) {
    if (!Collect(argv[i], &inputs)) {
      std::fprintf(stderr, "%s: cannot be read\n", argv[i]);
      return 1;
    }
  }
  std::sort(inputs.begin(), inputs.end());
  for (const fs::path& input : inputs) {
    // Told before, so that a crash names its input.
    std::printf("%s\n", input.c_str());
    std::fflush(stdout);
    if (!Replay(input)) {
      std::fprintf(stderr, "%s: cannot be read\n", input.c_str());
      return 1;
    }
  }
  if (inputs.empty()) {
    std::fprintf(stderr, "no input in the folders given: the corpus is missing\n");
    return 1;
  }
  std::printf("%zu inputs replayed\n", inputs.size());
  return 0;
}
