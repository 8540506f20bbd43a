"""Each check of tidy.py finds what it is for and leaves alone what is fine."""
import pytest

import tidy


def messages(findings):
    return [f"{f.path}:{f.line}: {f.message}" for f in findings]


def code(check, path, text):
    return [f.line for f in check(path, text)]


def test_layers():
    text = '#include "terrace/base/status.h"\n#include "terrace/store/store.h"\n#include "terrace/cache/x.h"\n'
    assert code(tidy.check_layers, "src/terrace/store/a.cc", text) == [3]
    assert code(tidy.check_layers, "src/terrace/cli/a.cc", text) == []
    assert code(tidy.check_layers, "src/terrace/base/a.h", text) == [2, 3]
    assert code(tidy.check_layers, "src/terrace/util/a.h", "") == [1]
    assert code(tidy.check_layers, "src/terrace/io/a.cc", '#include "file_system.h"\n') == [1]
    assert code(tidy.check_layers, "tests/a.cc", text) == []


def test_torch_headers():
    text = "#include <vector>\n#include <ATen/ATen.h>\n#include <torch/torch.h>\n"
    assert code(tidy.check_layers, "src/terrace/model/a.cc", text) == []
    assert code(tidy.check_layers, "src/terrace/pipeline/a.h", text) == [2, 3]


@pytest.mark.parametrize("line", [
    "std::thread t(f);",
    "std::this_thread::sleep_for(x);",
    "assert(x == 1);",
    "#include <cassert>",
    "using namespace std;",
    "throw 1;",
    "delete p;",
    "delete[] p;",
    "auto* p = new Foo(1);",
    "std::cout << 1;",
    'printf("x");',
    'std::fprintf(stderr, "x");',
    "std::mutex mu;",
    "std::lock_guard<Mutex> lock(mu);",
    "std::mt19937 rng;",
    "rand();",
    "auto t = std::chrono::steady_clock::now();",
    "std::ifstream in(path);",
    "std::filesystem::exists(p);",
    "int fd = open(path, O_RDONLY);",
    "exit(1);",
    "std::abort();",
    "TEST(Foo, DISABLED_Bar) {",
    "GTEST_SKIP();",
])
def test_banned(line):
    assert code(tidy.check_bans, "src/terrace/store/a.cc", "int x;\n" + line + "\n") == [2]


@pytest.mark.parametrize("line", [
    "static_assert(sizeof(int) == 4);",
    "Foo(const Foo&) = delete;",
    "void operator delete(void* memory) noexcept;",
    "std::unique_ptr<Foo> p(new Foo(1));",
    "static FileSystem* fs = new PosixFileSystem();",
    "// throw, assert(x), std::thread: never.",
    'Log("throw new delete std::cout");',
    "Terrace::Open(fs, path);",
    "file_system->Open(path, mode);",
    "std::snprintf(buffer, sizeof buffer, x);",
    "newer = a_new_one(x);",
    "TERRACE_CHECK(x) << 1;",
    "const std::uint64_t n = 1'000'000;  // throw",
    'GTEST_SKIP() << "no GPU here";',
    "on_exit(1);",
    "std::filesystem::path p = std::filesystem::absolute(q);",
])
def test_not_banned(line):
    assert code(tidy.check_bans, "src/terrace/store/a.cc", line + "\n") == []


def test_bans_know_their_home():
    assert code(tidy.check_bans, "src/terrace/base/thread.cc", "std::thread t;\n") == []
    assert code(tidy.check_bans, "src/terrace/io/posix.cc", "int fd = ::open(path, 0);\n") == []
    assert code(tidy.check_bans, "src/terrace/store/store_test.cc", "std::filesystem::path p;\n") == []
    assert code(tidy.check_bans, "src/terrace/store/store_test.cc", "std::thread t;\n") == [1]


def test_strip_code_keeps_lines():
    text = 'a; // x\n/* b\nc */ d("throw\\"") e;\nR"(throw\n)" f\n'
    stripped = tidy.strip_code(text)
    assert stripped.count("\n") == text.count("\n")
    assert "throw" not in stripped and "d(" in stripped and "f" in stripped and "x" not in stripped


def test_header():
    assert code(tidy.check_header, "src/terrace/io/a.h", "int x;\n") == [1]
    assert code(tidy.check_header, "src/terrace/io/a.h", "// A.\n#pragma once\n") == []


def test_marks():
    assert code(tidy.check_marks, "a.cc", "x\n// TO" + "DO: y\n") == [2]
    assert code(tidy.check_marks, "a.md", "see /wor" + "k/main\n") == [1]
    assert code(tidy.check_marks, "a.md", "from py" + "pi.org\n") == [1]
    assert code(tidy.check_marks, "a.md", "the work/main folder; /proc/self\n") == []


def test_length():
    assert code(tidy.check_length, "a.cc", "x\n" * 1000) == []
    assert code(tidy.check_length, "a.cc", "x\n" * 1001) == [1001]


def test_long_functions():
    short = "int F(int a) {\n" + "  x();\n" * 68 + "}\n"
    long = "int G(int a) {\n" + "  x();\n" * 69 + "}\n"
    wrapped = "Status Foo::H(int a,\n              int b) {\n" + "  x();\n" * 69 + "}\n"
    assert code(tidy.long_functions, "a.cc", short) == []
    assert code(tidy.long_functions, "a.cc", short + long) == [71]
    assert code(tidy.long_functions, "a.cc", wrapped) == [1]
    assert code(tidy.long_functions, "a.cc", "namespace a {\n" + "int x;\n" * 100 + "}\n") == []


def test_readmes():
    texts = {"src/terrace/io/README.md": "x\n" * 41, "src/terrace/io/a.cc": "", "src/terrace/store/a.h": "",
             "src/terrace/data/a.cc": ""}
    found = messages(tidy.check_readmes(list(texts), texts.get))
    assert len(found) == 2
    assert found[0].startswith("src/terrace/io/README.md:1: longer")
    assert found[1].startswith("src/terrace/data/README.md:1: missing")


def test_sources_are_built():
    texts = {"src/terrace/io/CMakeLists.txt": "terrace_library(io SOURCES a.cc sub/d.cc)\n# b_test.cc\n",
             "src/terrace/io/a.cc": "", "src/terrace/io/b_test.cc": "", "src/terrace/io/xa.cc": "",
             "src/terrace/io/sub/d.cc": ""}
    found = [f.path for f in tidy.check_sources_are_built(list(texts), texts.get)]
    assert found == ["src/terrace/io/b_test.cc", "src/terrace/io/xa.cc"]


def test_mentions():
    there = {"scripts/test", "docs/formats/", "docs/a.md"}.__contains__
    text = "Run `scripts/test --full`, then `scripts/gone`.\n`build/bin/x src/no/` and docs/plain.md\n"
    assert [f.line for f in tidy.check_mentions("README.md", text, there)] == [1, 2]
    assert [f.line for f in tidy.check_mentions("README.md", "see `docs/formats/`.\n", there)] == []


def test_links():
    there = {"docs/a.md"}.__contains__
    text = "[a](a.md) [b](b.md#x) [c](http://x.y) [d](#e)\n"
    assert [f.message for f in tidy.check_links("docs/x.md", text, there)] == ["link to 'b.md', which does not exist"]


def test_tidy_sees_all():
    texts = {"src/terrace/io/a.cc": "throw 1;\n", "src/terrace/io/b.h": "int x;\n",
             "src/terrace/io/testdata/x.txt": "TO" + "DO\n", "docs/x.md": "`src/none.h`\n",
             "scripts/x": "cd /wor" + "k/y\n"}
    errors, _ = tidy.tidy(list(texts), texts.get, texts.__contains__)
    assert sorted({e.path for e in errors}) == ["docs/x.md", "scripts/x", "src/terrace/io/README.md",
                                                "src/terrace/io/a.cc", "src/terrace/io/b.h"]
