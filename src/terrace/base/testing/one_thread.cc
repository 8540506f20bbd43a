// Linked into tests that ThreadSanitizer does not run because they start no thread (ONE_THREAD of
// cmake/terrace_targets.cmake): fails when they have started one.
#include <gtest/gtest.h>
#include <sys/single_threaded.h>

#include <memory>

namespace terrace {
namespace {

class OneThread final : public testing::Environment {
 public:
  // The C library takes it back when the first thread is made, for good.
  void TearDown() override {
    EXPECT_TRUE(__libc_single_threaded) << "this test has threads by now: take ONE_THREAD from its "
                                           "CMakeLists.txt, so that ThreadSanitizer runs it";
  }
};

// gtest deletes it.
const testing::Environment* const kOneThread =
    testing::AddGlobalTestEnvironment(std::make_unique<OneThread>().release());

}  // namespace
}  // namespace terrace
