"""Random work on stores, cache and checkpoints, killed again and again (crash_harness.cc)."""
import subprocess

import pytest

import sync_points

# Seconds for ten thousand rounds on a slow disk.
FULL_PATIENCE_SECONDS = 4 * 3600
PATIENCE_SECONDS = 300


def test_every_point_has_its_test():
    assert sync_points.ROW_LIFE <= sync_points.STORAGE
    assert sync_points.HARNESS | sync_points.ROW_LIFE | sync_points.TRAINER | sync_points.REPAIR == sync_points.ALL
    assert len(sync_points.HARNESS) > 30 and sync_points.BY_KEY < sync_points.HARNESS


@pytest.mark.parametrize("index", ["key", "group"])
def test_kills(terrace, workspace, sample_seed, full, index):
    rounds = 10_000 if full else 100
    points = workspace / "points"
    passed = sync_points.HARNESS - (set() if index == "key" else sync_points.BY_KEY)
    points.write_text("\n".join(sorted(passed)) + "\n")
    folder = workspace / "work"
    folder.mkdir()
    print(f"--sample-seed {sample_seed}: {rounds} rounds")
    result = subprocess.run([str(terrace.binary.parent.parent / "tests" / "crash_harness"), "--folder", str(folder),
                             "--points", str(points), "--rounds", str(rounds), "--seed", str(sample_seed),
                             "--index", index],
                            stdin=subprocess.DEVNULL, capture_output=True, text=True,
                            timeout=FULL_PATIENCE_SECONDS if full else PATIENCE_SECONDS)
    print(result.stdout)
    assert f"--seed {sample_seed}: index {index}, cache.policy " in result.stdout, result.stdout
    assert result.returncode == 0, result.stdout + result.stderr
