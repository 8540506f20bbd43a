#!/usr/bin/env python3
"""Prints the folder of the kept corpus of a fuzzer, as its CMakeLists.txt names it."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    name = sys.argv[1]
    for file in (ROOT / "src").rglob("CMakeLists.txt"):
        match = re.search(r"terrace_fuzz\(\s*" + re.escape(name) + r"\b[^)]*?CORPUS\s+([^\s)]+)",
                          file.read_text())
        if match:
            print(file.parent / match.group(1))
            return 0
    print(f"fuzz_corpus: no terrace_fuzz({name} ... CORPUS ...) in src/", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
