# terrace_library/_test/_bench/_fuzz: one library per layer, explicit sources, one CMakeLists.txt a folder.

add_library(terrace_flags INTERFACE)
target_include_directories(terrace_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_options(terrace_flags INTERFACE
  -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Werror=return-type -Werror=unused-result -fno-omit-frame-pointer
  # Two compilers' choice of fused multiply-add must not decide a trained bit.
  -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  target_compile_options(terrace_flags INTERFACE -Wthread-safety -Werror=thread-safety)
endif()
if(TERRACE_NATIVE)
  target_compile_options(terrace_flags INTERFACE -march=native)
endif()
if(TERRACE_SANITIZE)
  target_compile_options(terrace_flags INTERFACE -fsanitize=${TERRACE_SANITIZE} -fno-sanitize-recover=all -g1)
  target_link_options(terrace_flags INTERFACE -fsanitize=${TERRACE_SANITIZE})
endif()
# A test's own sources, which take most of a sanitizer build, are without those checks that instrument every access:
# AddressSanitizer meets null pointers and what passes an object's end as well, and alignment and types are looked at in
# the program's sources, which have all checks. Linked after terrace_flags, which turns them on.
add_library(terrace_test_flags INTERFACE)
if(TERRACE_SANITIZE STREQUAL "address,undefined")
  target_compile_options(terrace_test_flags INTERFACE -fno-sanitize=null,alignment,object-size,vptr)
endif()
if(TERRACE_FUZZ)
  # All of our code is instrumented, so that the fuzzer sees which of it an input reaches.
  target_compile_options(terrace_flags INTERFACE
    -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -g1)
  target_link_options(terrace_flags INTERFACE -fsanitize=address,undefined)
endif()

# What the sanitizer builds build: all that `ctest -L unit` runs; of that what has threads; all fuzzers.
add_custom_target(terrace_tests)
add_custom_target(terrace_threaded_tests)
add_custom_target(terrace_fuzzers)

# terrace_library(base SOURCES a.cc b.cc DEPS terrace::x PRIVATE_DEPS y)
function(terrace_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(terrace_${name} STATIC ${ARG_SOURCES})
  add_library(terrace::${name} ALIAS terrace_${name})
  target_link_libraries(terrace_${name} PUBLIC ${ARG_DEPS} PRIVATE terrace_flags ${ARG_PRIVATE_DEPS})
  target_include_directories(terrace_${name} PUBLIC ${CMAKE_SOURCE_DIR}/src)
endfunction()

# terrace_test(base_channel_test SOURCES channel_test.cc DEPS terrace::base). SHARDS n: its cases in so many parts, which
# ctest runs side by side. ONE_THREAD: it starts no thread, which it checks, so that ThreadSanitizer has nothing to find in it;
# ONE_THREAD_CASES "A.*:B.c": such cases, by gtest's patterns, of one that has others.
function(terrace_test name)
  cmake_parse_arguments(ARG "ONE_THREAD" "TIMEOUT;SHARDS;ONE_THREAD_CASES" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} terrace_flags terrace_test_flags GTest::gtest GTest::gmock GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  # Half of what a build compiles is tests, which spend their time in the program's own code.
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  add_dependencies(terrace_tests ${name})
  if(ARG_ONE_THREAD)
    set(labels unit one_thread)
    target_link_libraries(${name} PRIVATE terrace_one_thread)
  else()
    set(labels unit)
    add_dependencies(terrace_threaded_tests ${name})
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(NOT ARG_SHARDS)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${ARG_TIMEOUT})
    if(ARG_ONE_THREAD_CASES AND TERRACE_SANITIZE STREQUAL "thread")
      set_tests_properties(${name} PROPERTIES ENVIRONMENT "GTEST_FILTER=-${ARG_ONE_THREAD_CASES}")
    endif()
    return()
  endif()
  math(EXPR last "${ARG_SHARDS} - 1")
  foreach(shard RANGE ${last})
    add_test(NAME ${name}_${shard} COMMAND ${name})
    set_tests_properties(${name}_${shard} PROPERTIES LABELS "${labels}" TIMEOUT ${ARG_TIMEOUT}
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${shard}")
  endforeach()
endfunction()

# terrace_bench(hash_bench SOURCES hash_bench.cc DEPS ...): also runs tiny in the test run, as a check of its result.
function(terrace_bench name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  if(NOT TERRACE_BENCHMARKS)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} terrace_flags)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/benchmarks)
  # Each in a folder of its own: benchmarks run side by side, and leave files where they run.
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${name}_tiny)
  file(MAKE_DIRECTORY ${folder})
  add_test(NAME ${name}_tiny COMMAND ${name} --tiny WORKING_DIRECTORY ${folder})
  set_tests_properties(${name}_tiny PROPERTIES LABELS unit TIMEOUT 120)
endfunction()

# terrace_fuzz(criteo_fuzz SOURCES criteo_fuzz.cc DEPS ... CORPUS dir): a libFuzzer target with clang; with
# any compiler its kept corpus is replayed as a test.
function(terrace_fuzz name)
  cmake_parse_arguments(ARG "" "CORPUS" "SOURCES;DEPS" ${ARGN})
  if(TERRACE_FUZZ)
    add_executable(${name} ${ARG_SOURCES})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    add_dependencies(terrace_fuzzers ${name})
  else()
    add_executable(${name} ${ARG_SOURCES} ${CMAKE_SOURCE_DIR}/tests/fuzz_replay_main.cc)
    add_dependencies(terrace_tests ${name})
    add_test(NAME ${name}_corpus COMMAND ${name} ${CMAKE_CURRENT_SOURCE_DIR}/${ARG_CORPUS})
    set_tests_properties(${name}_corpus PROPERTIES LABELS "unit;one_thread" TIMEOUT 120)
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} terrace_flags)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
endfunction()
