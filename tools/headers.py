#!/usr/bin/env python3
"""Compiles each header alone (syntax only), so that none leans on what another includes.

Not those that a source of the same name includes before all else: that source shows it. Headers that need
PyTorch are left out: a minute each would buy little, since few files include them.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCH = ("<torch/", "<ATen/", "<c10/")


def needs_torch(header, seen=None):
    """Whether `header` includes PyTorch, itself or through our headers."""
    seen = set() if seen is None else seen
    if header in seen or not header.exists():
        return False
    seen.add(header)
    for line in header.read_text().splitlines():
        if not line.startswith("#include "):
            continue
        target = line[len("#include "):].strip()
        if target.startswith(TORCH):
            return True
        if target.startswith('"terrace/') and needs_torch(ROOT / "src" / target.strip('"'), seen):
            return True
    return False


def comes_first(header):
    """Whether a source of the same name includes `header` before anything else."""
    source = header.with_suffix(".cc")
    if not source.exists():
        return False
    first = re.search(r"^#include (\S+)", source.read_text(), re.MULTILINE)
    return first is not None and first.group(1) == f'"{header.relative_to(ROOT / "src")}"'


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", default="clang++-14")
    arguments = parser.parse_args()
    names = subprocess.run(["git", "ls-files", "src/**/*.h", "src/*.h"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split()
    headers = [ROOT / name for name in sorted(set(names))]
    without_torch = [h for h in headers if not needs_torch(h)]
    alone = [h for h in without_torch if not comes_first(h)]

    def check(header):
        relative = header.relative_to(ROOT / "src")
        command = [arguments.compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow",
                   "-Wthread-safety", "-Werror", "-march=native", "-I", str(ROOT / "src"), "-x", "c++", "-"]
        result = subprocess.run(command, input=f'#include "{relative}"\n', text=True,
                                capture_output=True, cwd=ROOT)
        return relative, result

    failures = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for relative, result in pool.map(check, alone):
            if result.returncode != 0:
                failures += 1
                print(f"src/{relative}: does not compile alone\n{result.stderr}")
    print(f"headers: {len(alone)} compiled alone, {failures} failed, {len(without_torch) - len(alone)} come first "
          f"in a source, {len(headers) - len(without_torch)} with PyTorch left out")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
