#!/usr/bin/env python3
"""Has clang read every source that a configured build folder names, several at a time; nothing is built.

The program's own sources get clang-tidy, which passes on what the compiler finds (thread-safety analysis
above all). Tests, benchmarks and what includes PyTorch's headers, where clang-tidy needs minutes a file,
get the compiler alone, unless --tidy-all is given.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

from headers import ROOT, needs_torch


def is_for_tidy(path):
    if ROOT / "src" not in path.parents or re.search(r"_(test|bench|fuzz)\.cc$", path.name):
        return False
    return "testing" not in path.parts and not needs_torch(path)


def syntax_command(entry):
    """The compiler's command of `entry`, to check only; gcc's names of warnings are none of clang's."""
    words = shlex.split(entry["command"])
    output = words.index("-o")
    del words[output:output + 2]
    return [word for word in words if word != "-c"] + ["-fsyntax-only", "-Werror", "-Wno-unknown-warning-option"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default="build/clang")
    parser.add_argument("--tidy-all", action="store_true")
    parser.add_argument("--clang-tidy", default="clang-tidy-14")
    parser.add_argument("files", nargs="*", help="only these")
    arguments = parser.parse_args()
    build = ROOT / arguments.build
    entries = {pathlib.Path(e["file"]): e for e in json.loads((build / "compile_commands.json").read_text())}
    only = {pathlib.Path(f).resolve() for f in arguments.files}
    paths = [p for p in sorted(entries) if not only or p in only]

    def check(path):
        if arguments.tidy_all or is_for_tidy(path):
            command = [arguments.clang_tidy, "--quiet", "-p", str(build), str(path)]
        else:
            command = syntax_command(entries[path])
        result = subprocess.run(command, capture_output=True, text=True, cwd=entries[path]["directory"])
        return path, command[0] == arguments.clang_tidy, result

    failures = tidied = 0
    # The longest last would leave the other processors idle.
    paths.sort(key=lambda p: not needs_torch(p))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, tidy, result in pool.map(check, paths):
            tidied += tidy
            if result.returncode != 0:
                failures += 1
                print(f"{path.relative_to(ROOT)}:\n{result.stdout}{result.stderr}")
    print(f"clang: {len(paths)} sources, {tidied} of them with clang-tidy, {failures} with findings")
    if not paths:
        print("clang: nothing to check is a fault of this tool or of the build folder")
    return 1 if failures or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
