#!/usr/bin/env python3
"""Runs clang-tidy over the sources that a build folder compiles, several at a time.

Sources with PyTorch's headers, tests and benchmarks are left out unless --all is given: clang-tidy
needs minutes for each of the former.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

from headers import ROOT, needs_torch


def chosen(path, everything):
    if ROOT / "src" not in path.parents:
        return False
    if everything:
        return True
    if re.search(r"_(test|bench|fuzz)\.cc$", path.name) or "testing" in path.parts:
        return False
    return not needs_torch(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default="build/clang")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--clang-tidy", default="clang-tidy-14")
    parser.add_argument("files", nargs="*", help="only these")
    arguments = parser.parse_args()
    build = ROOT / arguments.build
    commands = json.loads((build / "compile_commands.json").read_text())
    only = {pathlib.Path(f).resolve() for f in arguments.files}
    paths = sorted({pathlib.Path(c["file"]) for c in commands})
    paths = [p for p in paths if (p in only if only else chosen(p, arguments.all))]

    def check(path):
        command = [arguments.clang_tidy, "--quiet", "-p", str(build), str(path)]
        return path, subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    failures = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, result in pool.map(check, paths):
            if result.returncode != 0:
                failures += 1
                print(f"{path.relative_to(ROOT)}:\n{result.stdout}{result.stderr}")
    print(f"clang-tidy: {len(paths)} sources, {failures} with findings")
    if not paths:
        print("clang-tidy: nothing to check is a fault of this tool or of the build folder")
    return 1 if failures or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
