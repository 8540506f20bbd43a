#!/usr/bin/env python3
"""Checks the rules of the project that a compiler does not: layers, banned calls, lengths, documents.

Findings are errors, a line each (`path:line: what to do`), and make the exit status 1; lengths that
are allowed but too long for a reader are warnings. Needs nothing but Python and git.
"""
import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

Finding = collections.namedtuple("Finding", "path line message")

# A layer includes only layers above it in this list.
LAYERS = ["base", "io", "store", "cache", "device", "table", "comm", "data", "model", "ps",
          "pipeline", "train", "cli"]
TORCH_LAYERS = {"comm", "model", "train"}
TORCH_INCLUDE = re.compile(r"<(torch|ATen|c10|caffe2)/")

MAX_FILE_LINES = 1000
LONG_FILE_LINES = 600
LONG_FUNCTION_LINES = 70
MAX_README_LINES = 40

# A call that the code does not use: pattern, what to use, and where it is at home. `tests` says
# whether tests, benchmarks and fuzzers may use it.
Ban = collections.namedtuple("Ban", "pattern instead home tests")
BANS = [
    Ban(r"\bstd::(jthread|thread|async)\b|\bpthread_create\b", "Thread of base/thread.h",
        ("src/terrace/base/",), False),
    Ban(r"\bsleep_for\b|\bsleep_until\b|\b(usleep|nanosleep)\s*\(",
        "a condition to wait for, or Clock of base/clock.h", ("src/terrace/base/clock",), False),
    Ban(r"(?<!_)\bassert\s*\(|#include <cassert>", "TERRACE_CHECK or TERRACE_DCHECK", (), False),
    Ban(r"\busing namespace\b", "the names, one by one", (), False),
    Ban(r"\bthrow\b", "a Status", (), False),
    Ban(r"(?<!operator )\bdelete\s*(\[\s*\])?\s*[\w(*]", "std::unique_ptr", (), False),
    Ban(r"\bstd::(cout|cerr|clog)\b|(?<![\w.>:])(std::)?(printf|puts)\s*\(|\bfprintf\s*\(\s*std(out|err)",
        "the log of base/log.h", ("src/terrace/base/", "src/terrace/cli/"), True),
    Ban(r"\bstd::(recursive_|shared_|timed_)?mutex\b|\bstd::condition_variable\b"
        r"|\bstd::(lock_guard|unique_lock|scoped_lock)\b",
        "Mutex of base/mutex.h, which clang checks", ("src/terrace/base/",), False),
    Ban(r"\bstd::(random_device|mt19937(_64)?|default_random_engine)\b|(?<![\w:.])s?rand\s*\(",
        "the generators of base/rng.h", ("src/terrace/base/",), False),
    Ban(r"\b(steady|system|high_resolution)_clock\b|\b(clock_gettime|gettimeofday)\s*\(",
        "Clock of base/clock.h", ("src/terrace/base/",), True),
    Ban(r"\bstd::(i|o)?fstream\b|\bstd::filesystem::(?!path\b|absolute\b)|(?<![\w.>:])f?open\s*\(\s*[\w\"]|::open\s*\(",
        "FileSystem of io/file_system.h", ("src/terrace/base/", "src/terrace/io/"), True),
    Ban(r"(?<![\w.>:])(std::)?(exit|_exit|abort|quick_exit)\s*\(", "a Status, or TERRACE_CHECK",
        ("src/terrace/base/", "src/terrace/cli/"), True),
    Ban(r"\bDISABLED_\w+", "a test that runs, or none", (), False),
    Ban(r"\bGTEST_SKIP\(\)\s*;", "GTEST_SKIP() << \"the reason\"", (), False),
]
NEW = re.compile(r"(?<![\w])new\s+[\w(]")

# Words that no file may hold. Split, so that this list does not hold them itself.
MARKS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
PLACES = re.compile(
    r"(?<![\w.])/(wor" + r"k|roo" + r"t|hom" + r"e)/|\b(py" + r"pi\.org|python" + r"hosted\.org"
    r"|download\.py" + r"torch\.org|deb\.deb" + r"ian\.org|proxy\.gol" + r"ang\.org)")


def strip_code(text):
    """The text with comments and the inside of strings blanked; lines stay where they are."""
    pattern = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/',
                         re.DOTALL)

    def blank(match):
        found = match.group(0)
        # C++14 digit separators look like the start of a character.
        if found.startswith("'") and re.search(r"\w$", text[:match.start()][-1:]):
            return found
        quote = found[0] if found[0] in "\"'" else ""
        return quote + re.sub(r"[^\n]", " ", found[1:-1] if quote else found) + quote

    return pattern.sub(blank, text)


def is_test(path):
    return bool(re.search(r"_(test|bench|fuzz)\.(cc|cu|h)$", path)) or "/testing/" in path \
        or path.startswith("tests/")


def layer_of(path):
    parts = path.split("/")
    return parts[2] if parts[:2] == ["src", "terrace"] and len(parts) > 3 else None


def check_layers(path, text):
    layer = layer_of(path)
    if layer is None:
        return
    if layer not in LAYERS:
        yield Finding(path, 1, f"folder '{layer}' is no layer; the layers are {', '.join(LAYERS)}")
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if match:
            included = match.group(1).split("/")
            if included[0] != "terrace" or len(included) < 3:
                yield Finding(path, number, f'include "{match.group(1)}" by its path, "terrace/<layer>/..."')
            elif included[1] not in LAYERS:
                yield Finding(path, number, f"'{included[1]}' is no layer")
            elif LAYERS.index(included[1]) > LAYERS.index(layer):
                yield Finding(path, number, f"{layer}/ may not include {included[1]}/, which stands below it")
        elif re.match(r"\s*#\s*include", line) and TORCH_INCLUDE.search(line) and layer not in TORCH_LAYERS:
            yield Finding(path, number, f"PyTorch's headers are included only in {', '.join(sorted(TORCH_LAYERS))}")


def check_bans(path, text):
    code = strip_code(text)
    lines = code.splitlines()
    for number, line in enumerate(lines, 1):
        for ban in BANS:
            if path.startswith(ban.home) or (ban.tests and is_test(path)):
                continue
            match = re.search(ban.pattern, line)
            if match:
                yield Finding(path, number, f"'{match.group(0).strip()}': use {ban.instead}")
        # A private constructor needs new inside unique_ptr; what lives for ever is a static.
        context = (lines[number - 2] if number > 1 else "") + line
        if NEW.search(line) and not re.search(r"unique_ptr|\bstatic\b", context):
            yield Finding(path, number, "'new': use std::make_unique")


def check_header(path, text):
    if path.endswith(".h") and "#pragma once" not in text:
        yield Finding(path, 1, "a header begins with what it is, then #pragma once")


def check_marks(path, text):
    for number, line in enumerate(text.splitlines(), 1):
        match = MARKS.search(line)
        if match:
            yield Finding(path, number, f"'{match.group(0)}': do it, or say plainly what is missing")
        match = PLACES.search(line)
        if match:
            yield Finding(path, number, f"'{match.group(0)}' names one machine or one registry")


def check_length(path, text):
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield Finding(path, lines, f"{lines} lines; a file has at most {MAX_FILE_LINES}")


def long_functions(path, text):
    """(line, lines) of each function body that is longer than a function should be."""
    code = strip_code(text).splitlines()
    start = None
    for number, line in enumerate(code, 1):
        # By clang-format, what stands in the first column and ends in { opens a function (or a type,
        # whose length is no matter); its } stands in the first column again.
        if start is None and re.match(r"[A-Za-z~].*\{$", line) and "(" in line \
                and not re.match(r"(class|struct|enum|namespace|union)\b", line):
            start = number
        elif start is None and re.match(r"\s+.*\)\s*(const)?\s*(noexcept)?\s*\{$", line) \
                and re.match(r"[A-Za-z~][^;{}]*\($|[A-Za-z~][^;{}]*,$", code[number - 2] if number > 1 else ""):
            start = number - 1
        elif start is not None and line.startswith("}"):
            if number - start + 1 > LONG_FUNCTION_LINES:
                yield Finding(path, start, f"a function of {number - start + 1} lines; "
                                           f"{LONG_FUNCTION_LINES} is what a reader takes in")
            start = None


def check_readmes(files, read):
    """A layer with code has a README.md that a reader finishes."""
    for layer in LAYERS:
        folder = f"src/terrace/{layer}/"
        if not any(f.startswith(folder) and f.endswith((".cc", ".cu")) for f in files):
            continue
        readme = folder + "README.md"
        if readme not in files:
            yield Finding(readme, 1, "missing: purpose, main types, threads, what the layer borrows; "
                                     f"at most {MAX_README_LINES} lines")
        elif read(readme).count("\n") > MAX_README_LINES:
            yield Finding(readme, 1, f"longer than {MAX_README_LINES} lines")


def check_sources_are_built(files, read):
    """Each source stands in its folder's CMakeLists.txt: a test that nobody builds can't fail."""
    listed = {}
    for path in files:
        if not path.startswith("src/") or not path.endswith((".cc", ".cu")):
            continue
        folder, name = path.rsplit("/", 1)
        found = False
        while folder and not found:
            if folder not in listed:
                lists = [f for f in files if f == folder + "/CMakeLists.txt"
                         or f.endswith(".cmake") and f.rpartition("/")[0] == folder]
                listed[folder] = re.sub(r"#.*", "", "\n".join(map(read, lists)))
            relative = path[len(folder) + 1:]
            found = re.search(r"(?<![\w/.])" + re.escape(relative) + r"(?![\w.])", listed[folder]) is not None
            folder = folder.rpartition("/")[0]
        if not found:
            yield Finding(path, 1, "no CMakeLists.txt names it, so it is never built")


MENTION = re.compile(r"(?<![\w/.-])((?:src|docs|tests|tools|scripts|benchmarks|examples|cmake)/[\w./-]*)")


def check_mentions(path, text, exists):
    """What a document says of our folders and files is there."""
    for number, line in enumerate(text.splitlines(), 1):
        for span in re.findall(r"`([^`]+)`|\]\(([^)#]+)", line):
            for mention in MENTION.findall(span[0] or span[1]):
                target = mention.rstrip(".")
                if target and not exists(target):
                    yield Finding(path, number, f"'{target}' does not exist")


def check_links(path, text, exists):
    """Relative links of a document lead somewhere."""
    folder = os.path.dirname(path)
    for number, line in enumerate(text.splitlines(), 1):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", line):
            if re.match(r"[a-z]+:", target):
                continue
            if not exists(os.path.normpath(os.path.join(folder, target))):
                yield Finding(path, number, f"link to '{target}', which does not exist")


CODE = (".h", ".cc", ".cuh", ".cu")
TEXT = CODE + (".py", ".md", ".txt", ".cmake", ".yaml", ".json", ".ini", ".sh", ".toml")


def tidy(files, read, exists):
    """All errors and all warnings over `files` (paths from the root)."""
    errors, warnings = [], []
    for path in files:
        scripts = path.startswith(("scripts/", ".ci/"))
        if not path.endswith(TEXT) and not scripts or "/testdata/" in path:
            continue
        text = read(path)
        errors += check_marks(path, text)
        if path.endswith(CODE) or path.endswith(".py") or scripts:
            errors += check_length(path, text)
        if path.endswith(CODE):
            errors += check_layers(path, text)
            errors += check_bans(path, text)
            errors += check_header(path, text)
            warnings += long_functions(path, text)
            if LONG_FILE_LINES < text.count("\n") <= MAX_FILE_LINES:
                warnings.append(Finding(path, 1, f"{text.count(chr(10))} lines; {LONG_FILE_LINES} is the rule"))
        if path.endswith(".md"):
            errors += check_mentions(path, text, exists)
            errors += check_links(path, text, exists)
    errors += check_readmes(files, read)
    errors += check_sources_are_built(files, read)
    return errors, warnings


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-warnings", action="store_true")
    arguments = parser.parse_args()
    listing = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                             check=True, capture_output=True, text=True).stdout.split("\n")
    files = sorted({f for f in listing if f and (ROOT / f).is_file()})

    def read(path):
        return (ROOT / path).read_text(encoding="utf-8", errors="replace")

    errors, warnings = tidy(files, read, lambda path: (ROOT / path).exists())
    if not arguments.no_warnings:
        for finding in warnings:
            print(f"{finding.path}:{finding.line}: warning: {finding.message}")
    for finding in errors:
        print(f"{finding.path}:{finding.line}: {finding.message}")
    print(f"tidy: {len(files)} files, {len(errors)} errors, {len(warnings)} warnings")
    return 1 if errors or not files else 0


if __name__ == "__main__":
    sys.exit(main())
