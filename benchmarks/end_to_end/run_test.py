"""The benchmarks still run, and what they print follows from what was measured."""
import json
import os
import pathlib
import subprocess
import sys
import time

import run

FOLDER = pathlib.Path(__file__).resolve().parent


def test_overlap(tmp_path):
    output = tmp_path / "figures.json"
    subprocess.run([sys.executable, FOLDER / "run.py", "overlap", "--rows", "65536", "--cardinality", "1000", "--batch", "8192",
                    "--budget", "448MiB", "--repeats", "1", "--threads", "1", "--scratch", tmp_path, "--output", output],
                   check=True, stdin=subprocess.DEVNULL)
    figures = json.loads(output.read_text())["figures"]
    (turn,) = figures["turns"]
    stage, cpu = turn["longest_stage_seconds"], turn["cpu_seconds_per_core"]
    # More threads than the one that is asked for may work at a time, on all the cores that there are.
    assert 0 < stage <= turn["wall_depth_0"] and 0 < cpu <= turn["wall_depth_0"] * os.cpu_count()
    assert figures["ratio"] == turn["ratio"] == turn["wall_depth_2"] / max(stage, cpu)


def test_watch(tmp_path):
    with run.Watch(1, tmp_path) as watch:
        while not watch.seconds:
            time.sleep(0.1)
    assert all(0 <= second["cores_idle"] <= 1 for second in watch.seconds)
    assert all(second["disk_busy"] is None or 0 <= second["disk_busy"] <= 1 for second in watch.seconds)


def curve(tmp_path, *options):
    output = tmp_path / "figures.json"
    printed = subprocess.run([sys.executable, FOLDER / "run.py", "curve", "--batch", "8192", "--dims", "32", "--threads", "1",
                              "--least-budget-gib", "0.1", *options, "--scratch", tmp_path, "--output", output],
                             check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    told = json.loads(output.read_text())
    assert f"--seed {told['seed']}" in printed
    return told["figures"]


def test_curve(tmp_path):
    figures = curve(tmp_path, "--rows", "262144", "--cardinality", "100000", "--ratios", "0.5", "1", "--model-gib", "0.4",
                    "--repeats", "1")
    assert [f["asked_ratio"] for f in figures] == [0.5, 1]
    assert figures[0]["share"] == 1 and all(f["rate"] > 0 and 0 <= f["hit_rate"] <= 1 for f in figures)
    assert figures[0]["model_bytes"] == figures[1]["model_bytes"]
    assert [round(f["ratio"], 2) for f in figures] == [0.5, 1]
    assert all(f["peak_bytes"] <= f["budget_bytes"] for f in figures)


def test_curve_by_group(tmp_path):
    (point,) = curve(tmp_path, "--rows", "131072", "--cardinality", "100000", "--ratios", "0.5", "--model-gib", "0.3",
                     "--index", "group", "--repeats", "2", "--seed", "5")
    assert point["index"] == "group" and point["index_bytes_per_key"] < 7, "by key it takes more"
    least, most = point["rates"]
    assert 0 < least < most and point["rate"] == (least + most) / 2


def test_interrupt(tmp_path):
    output = tmp_path / "figures.json"
    subprocess.run([sys.executable, FOLDER / "run.py", "interrupt", "--rows", "1000000000", "--cardinality", "1000", "--batch", "8192",
                    "--budget", "448MiB", "--after", "1", "--threads", "1", "--set", "metrics.every_examples=8192", "--set", "table.index=group", "--set", "table.expected_keys=26000",
                    "--scratch", tmp_path, "--output", output], check=True, stdin=subprocess.DEVNULL)
    (interrupted,) = json.loads(output.read_text())["figures"]["runs"]
    assert interrupted["seconds"] > 0 and interrupted["examples"] > 0 and interrupted["rows"] > 0
    assert not list(tmp_path.glob("terrace-bench-*"))
