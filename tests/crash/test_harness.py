"""Random work on stores, cache and checkpoints, killed again and again (crash_harness.cc)."""
import re

import pytest

import harness
import sync_points

# A slow disk needs 1.5 seconds a round.
FULL_PATIENCE_SECONDS = 4 * 3600
PATIENCE_SECONDS_A_ROUND = 10
# Of each index, with eight losses each.
FULL_POWER_LOSS_DISKS = 5_000


def test_every_point_has_its_test():
    assert sync_points.ROW_LIFE | sync_points.UNIT <= sync_points.STORAGE
    assert sync_points.HARNESS | sync_points.ROW_LIFE | sync_points.UNIT | sync_points.TRAINER | sync_points.REPAIR == sync_points.ALL
    assert len(sync_points.HARNESS) > 30 and sync_points.BY_KEY < sync_points.HARNESS


def test_kills(terrace, workspace, sample_seed, full):
    """Over both indexes at once: most of the time goes into waiting for the disk."""
    rounds = 10_000 if full else 100
    print(f"--sample-seed {sample_seed}: {rounds} rounds")
    program = terrace.binary.parent.parent / "tests" / "crash_harness"
    processes = []
    for index, passed in (("key", sync_points.HARNESS), ("group", sync_points.HARNESS - sync_points.BY_KEY)):
        folder, points = workspace / index, workspace / f"{index}.points"
        folder.mkdir()
        points.write_text("\n".join(sorted(passed)) + "\n")
        processes.append(harness.Process([program, "--folder", folder, "--points", points, "--rounds", rounds,
                                          "--seed", sample_seed, "--index", index], workspace / f"{index}.log"))
    for process in processes:
        output = process.wait(min(PATIENCE_SECONDS_A_ROUND * rounds, FULL_PATIENCE_SECONDS)).expect(0).output
        print(output)
        ways = int(re.search(r"their tiers in (\d+) ways", output).group(1))
        assert ways > 27, "each round draws its own of 54 ways"


def test_power_losses(terrace, workspace, sample_seed, full):
    """What ctest takes some disks of."""
    if not full:
        pytest.skip("a quarter of an hour: runs with --full")
    print(f"--sample-seed {sample_seed}: {FULL_POWER_LOSS_DISKS} disks")
    program = terrace.binary.parent.parent / "tests" / "power_loss_test"
    environment = {"TERRACE_POWER_LOSS_DISKS": str(FULL_POWER_LOSS_DISKS), "GTEST_RANDOM_SEED": str(sample_seed)}
    harness.Process([program, "--gtest_filter=*AtRandomMoments*"], workspace / "log",
                    prefix=["env", *(f"{name}={value}" for name, value in environment.items())]
                    ).wait(FULL_PATIENCE_SECONDS).expect(0)
