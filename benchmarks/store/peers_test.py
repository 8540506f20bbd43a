"""The comparison of stores still runs, and what it prints follows from what was measured."""
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent
PROGRAM = FOLDER.parent.parent / "build/benchmarks/peers_bench"


def test_both_systems(tmp_path):
    if not PROGRAM.exists():
        pytest.skip("RocksDB is not installed: scripts/setup-peers, then scripts/build")
    output = tmp_path / "figures.json"
    run = subprocess.run([sys.executable, FOLDER / "run.py", "--keys", "20000", "--batch", "2000", "--repeats", "2", "--runs", "2",
                          "--rounds", "2", "--update-seconds", "0.1", "--read-threads", "2", "8", "--scratch", tmp_path,
                          "--output", output],
                         check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    figures = json.loads(output.read_text())["figures"]
    for system in ("terrace", "rocksdb"):
        assert len(figures[system]["read"]["2000"]["keys_per_second"]) == 4
        assert len(set(figures[system]["load"]["keys_per_second"])) == 2, "a load in each run"
        for work in ("burst", "sustained"):
            assert len(set(figures[system][work]["keys_per_second"])) == 4, f"{work} is to be measured in each round"
        assert min(figures[system]["sustained"]["space"]) > 1, "every row is on disk"
    read = figures["rocksdb"]["read"]["2000"]
    assert len(read["threads"]) == 2 and {threads for threads, _ in read["tried_threads"]} == {2, 8}
    assert "threads" not in figures["terrace"]["read"]["2000"]
    ours, theirs = (statistics.median(figures[system]["load"]["keys_per_second"]) for system in ("terrace", "rocksdb"))
    line = next(line for line in run.stdout.splitlines() if "first load" in line)
    assert float(line.split()[-3]) == round(ours / theirs, 2)


def stand_in(rate):
    """What the program prints, of that rate throughout."""
    write = {"keys_per_second": [rate], "write_amplification": [1.5], "space": 1.2, "longest_write_seconds": [0.1],
             "median_write_seconds": [0.01]}
    read = {"keys_per_second": [rate, rate + 1], "cpu_seconds_per_key": [1e-6, 2e-6], "read_bytes_per_key": [100, 200],
            "threads": [8], "tried_threads": [[64, rate / 2], [8, rate]]}
    load = {"keys_per_second": rate, "part_keys_per_second": [rate], "write_amplification": 1.1}
    return {"load": load, "read": {"20000": read}, "burst": write, "sustained": write, "peak_memory_bytes": 1e8}


@pytest.fixture
def compare():
    spec = importlib.util.spec_from_file_location("store_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_have_a_real_spread(compare, monkeypatch, capsys):
    """Without RocksDB too: what is printed of each work is the median, the least and the most of its runs."""
    seeds = []

    def measure(system, options, limit, seed):
        seeds.append(seed)
        return stand_in((4000 if system == "terrace" else 1000) * (1 + len(set(seeds))))

    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "PROGRAM", FOLDER / "run.py")
    monkeypatch.setattr(sys, "argv", ["run.py", "--runs", "3"])
    compare.main()
    printed = capsys.readouterr().out
    assert len(set(seeds)) == 3 and f"--seed {seeds[0]}" in printed
    for work in ("first load", "writes, burst", "writes, compaction"):
        line = next(line for line in printed.splitlines() if work in line)
        assert "12 (8..16)" in line and "3 (2..4)" in line and "4.00" in line and line.split()[-1] == "3", line
    assert "run by run 8, 8, 8 (of 8, 64); n 6" in printed
    monkeypatch.setattr(compare.time, "time_ns", lambda: 123_456_789_000)
    compare.main()
    assert "--seed 123456789" in capsys.readouterr().out, "another one each time"
