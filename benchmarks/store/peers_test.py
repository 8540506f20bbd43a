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
                          "--update-seconds", "0.1", "--scratch", tmp_path, "--output", output],
                         check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    figures = json.loads(output.read_text())["figures"]
    for system in ("terrace", "rocksdb"):
        assert len(figures[system]["read"]["2000"]["keys_per_second"]) == 4
        for work in ("load", "burst", "sustained"):
            assert len(set(figures[system][work]["keys_per_second"])) == 2, f"{work} is to be measured in each run"
        assert min(figures[system]["sustained"]["space"]) > 1, "every row is on disk"
    ours, theirs = (statistics.median(figures[system]["load"]["keys_per_second"]) for system in ("terrace", "rocksdb"))
    line = next(line for line in run.stdout.splitlines() if "first load" in line)
    assert float(line.split()[-2]) == round(ours / theirs, 2)


def stand_in(rate):
    """What the program prints, of that rate throughout."""
    write = {"keys_per_second": rate, "write_amplification": 1.5, "space": 1.2, "longest_write_seconds": 0.1,
             "median_write_seconds": 0.01}
    read = {"keys_per_second": [rate, rate + 1], "cpu_seconds_per_key": [1e-6, 2e-6], "read_bytes_per_key": [100, 200]}
    return {"load": {"keys_per_second": rate, "write_amplification": 1.1}, "read": {"20000": read}, "burst": write,
            "sustained": write, "peak_memory_bytes": 1e8}


@pytest.fixture
def compare():
    spec = importlib.util.spec_from_file_location("store_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_limit_is_claimed_only_where_there_is_one(compare, monkeypatch, capsys, tmp_path):
    """Version 1 and 2 of control groups, as folders that make no limits."""
    limits = []
    monkeypatch.setattr(compare, "measure", lambda system, options, limited, seed: limits.append(limited) or stand_in(1))
    monkeypatch.setattr(compare, "PROGRAM", FOLDER / "run.py")
    monkeypatch.setattr(compare, "GROUPS", tmp_path)
    monkeypatch.setattr(compare, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(sys, "argv", ["run.py", "--runs", "1", "--limit-mib", "77"])
    (tmp_path / "memory").mkdir()
    (tmp_path / "own").write_text("2:cpu:/x\n0::/user/session\n")
    (tmp_path / "user/session").mkdir(parents=True)
    for _ in range(2):
        compare.main()
        printed = capsys.readouterr().out
        assert "no limit of memory (" in printed and "77 MiB" not in printed
        assert limits.pop() is limits.pop() is False
        (tmp_path / "cgroup.controllers").write_text("memory\n")
    assert compare.places_of_groups() == [(tmp_path / "user/session", "memory.max"), (tmp_path / "user", "memory.max")]
    assert not list(tmp_path.rglob("terrace-bench-*")), "none is left"
    monkeypatch.setattr(compare, "why_unlimited", lambda mib: None)
    compare.main()
    assert "a limit of 77 MiB each" in capsys.readouterr().out
    assert limits == [True, True]


def test_figures_have_a_real_spread(compare, monkeypatch, capsys):
    """Without RocksDB too: what is printed of each work is the median, the least and the most of its runs."""
    seeds = []

    def measure(system, options, limited, seed):
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
        assert "12 (8..16)" in line and "3 (2..4)" in line and "4.00" in line, line
    monkeypatch.setattr(compare.time, "time_ns", lambda: 123_456_789_000)
    compare.main()
    assert "--seed 123456789" in capsys.readouterr().out, "another one each time"
