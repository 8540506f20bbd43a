"""The comparison of stores still runs, and what it prints follows from what was measured."""
import json
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent
PROGRAM = FOLDER.parent.parent / "build/benchmarks/peers_bench"


def test_both_systems(tmp_path):
    if not PROGRAM.exists():
        pytest.skip("RocksDB is not installed: scripts/setup-peers, then scripts/build")
    output = tmp_path / "figures.json"
    run = subprocess.run([sys.executable, FOLDER / "run.py", "--keys", "20000", "--batch", "2000", "--repeats", "2",
                          "--update-seconds", "0.1", "--scratch", tmp_path, "--output", output],
                         check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    figures = json.loads(output.read_text())["figures"]
    for system in ("terrace", "rocksdb"):
        assert len(figures[system]["read"]["2000"]["keys_per_second"]) == 2
        assert figures[system]["sustained"]["space"] > 1, "every row is on disk"
    ratio = figures["terrace"]["load"]["keys_per_second"] / figures["rocksdb"]["load"]["keys_per_second"]
    line = next(line for line in run.stdout.splitlines() if "first load" in line)
    assert float(line.split()[-2]) == round(ratio, 2)
