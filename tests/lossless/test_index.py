"""Either index of a store leads to the same rows: the digest and the metrics are the same by key and by
group, killed and resumed or not, and a run keeps the index that it was made with."""
import json
import random
import signal

import pytest

import harness
import jobs

KEYS = 90_000  # Of the log.
LINE = {"key": "index: table default, by key", "group": "index: table default, by group, about"}


@pytest.fixture(scope="module")
def job(logs):
    return jobs.evicting([logs.criteo(4000, **jobs.EVICTING_LOG)], metrics={"every_examples": 512})


@pytest.fixture(scope="module")
def reference(terrace, job, tmp_path_factory):
    run = harness.Run(terrace, tmp_path_factory.mktemp("reference"), job,
                      **{"memory.budget": jobs.LARGE_BUDGET, "pipeline.depth": 0})
    run.train().expect(0)
    assert run.summary()["cache"]["evictions"] == 0
    return run.result()


def by_group(expected=KEYS, **settings):
    return {"table.index": "group", "table.expected_keys": expected, **settings}


@pytest.mark.parametrize("expected,settings", [(KEYS // 20, {}), (KEYS, {}), (4 * KEYS, {}),
                                               (KEYS, {"table.group_block": "12KiB", "table.group_filter_bits": 0})])
def test_groups_change_nothing(terrace, workspace, job, reference, expected, settings):
    """Also where the table outgrows what was expected, and where most groups are empty."""
    run = harness.Run(terrace, workspace, job, **by_group(expected, **{"ssd.shards": 2, **settings}))
    outcome = run.train().expect(0)
    assert LINE["group"] in outcome.output
    assert ("more than its" in outcome.output) == (expected < KEYS)
    summary = run.summary()
    assert summary["cache"]["evictions"] > 0 and summary["ssd"]["read_bytes"] > 0
    assert summary["memory"]["peak_bytes"] <= summary["memory"]["budget_bytes"]
    harness.assert_same(reference, run.result(), f"by group, {expected} expected keys, {settings}")
    run.verify()
    tables = json.loads(terrace.text("inspect", run.path, "--json"))["tables"]
    assert sum(table["rows"] for table in tables) == summary["rows"]
    # The summary counts a file that the last checkpoint names too if the store compacted it since.
    older = sum(table["checkpoint_only_bytes"] for table in tables)
    assert 0 < older <= summary["ssd"]["checkpoint_only_bytes"]


@pytest.mark.parametrize("seconds", [0, 3600])
def test_a_checkpoint_writes_each_block_once(terrace, workspace, job, reference, seconds):
    """With memory for all rows, at the end or also ahead of it: their blocks, not a block for each row."""
    run = harness.Run(terrace, workspace, job, **by_group(**{"memory.budget": jobs.LARGE_BUDGET, "checkpoint.every_batches": 0,
                                                             "pipeline.depth": 0, "training.batch": 256,
                                                             "checkpoint.final_seconds": seconds}))
    run.train().expect(0)
    summary = run.summary()
    assert summary["cache"]["evictions"] == 0
    harness.assert_same(reference, run.result(), f"by group, checkpoint.final_seconds {seconds}")
    if seconds > 0:
        assert summary["ssd"]["write_bytes"] < 1.2 * summary["ssd"]["live_bytes"]
    else:
        assert summary["ssd"]["write_bytes"] > 1.2 * summary["ssd"]["live_bytes"], "rows are to be written ahead"


def test_killed_by_group(terrace, workspace, job, reference, sample_seed):
    rng = random.Random(sample_seed)
    print(f"--sample-seed {sample_seed}")
    run = harness.Run(terrace, workspace, job, **by_group(**{"checkpoint.every_batches": 1, "table.group_block": rng.choice(["auto", "8KiB"])}))
    process = run.start()
    killed = 0
    for _ in range(4):
        run.wait_for_metrics(process, rng.randrange(4, 12))
        process.signal(signal.SIGKILL)
        killed += process.wait().code == -signal.SIGKILL
        if process.outcome.code == 0:
            break
        # What the job says of the index a run knows itself; its filters are made anew.
        process = run.start("--resume", "--set", f"table.index={rng.choice(['auto', 'group'])}", "--set", "table.group_block=auto",
                            "--set", f"table.group_filter_bits={rng.choice([0, 6, 10])}")
    process.wait().expect(0)
    assert killed > 0
    harness.assert_same(reference, run.result(), "by group, killed")
    run.verify()


@pytest.mark.parametrize("budget,index", [(jobs.SMALL_BUDGET, "group"), (jobs.LARGE_BUDGET, "key")])
def test_auto_goes_by_the_budget(terrace, workspace, logs, budget, index):
    job = jobs.tiny([logs.criteo(2000)])
    job["table"]["expected_keys"] = 10_000_000
    run = harness.Run(terrace, workspace, job, **{"memory.budget": budget})
    outcome = run.train().expect(0)
    assert LINE[index] in outcome.output


def test_an_index_is_for_life(terrace, workspace, logs):
    job = jobs.tiny([logs.criteo(2000)])
    run = harness.Run(terrace, workspace, job, **by_group(50_000, **{"checkpoint.every_batches": 1}))
    run.train("--test-kill-at", "checkpoint.before_publish:3").expect(-signal.SIGKILL)
    refused = run.train("--resume", "--set", "table.index=key").expect(2)
    assert "has an index by group, which is fixed for the life of a run" in refused.output
    refused = run.train("--resume", "--set", "table.group_block=16KiB").expect(2)
    assert "has blocks of 4KiB, which is fixed for the life of a run" in refused.output
    # By its name or not, it is the same.
    run.train("--resume", "--set", "table.group_block=4KiB", "--test-kill-at", "checkpoint.before_publish:1").expect(-signal.SIGKILL)
    run.train("--resume", "--set", "table.index=auto", "--set", "table.expected_keys=9").expect(0)
    assert run.summary()["finished"]


@pytest.mark.parametrize("left", ["table.group_block=auto", "table.index=auto"])
def test_blocks_that_were_not_planned_for(terrace, workspace, logs, left):
    """A job that leaves the blocks to the run, or whose budget would choose the other index, plans for less than they take."""
    run = harness.Run(terrace, workspace, jobs.tiny([logs.criteo(2000)]),
                      **by_group(50_000, **{"checkpoint.every_batches": 1, "table.group_block": "256KiB", "ssd.shards": 8, "memory.budget": "240MiB"}))
    run.train("--test-kill-at", "checkpoint.before_publish:3").expect(-signal.SIGKILL)
    refused = run.train("--resume", "--set", left).expect(2)
    assert "has blocks of 256KiB, whose buffers take more memory than was planned for" in refused.output, refused.output
    assert "set table.index to group and table.group_block to 256KiB" in refused.output
    terrace("evaluate", run.path, "--data", logs.criteo(2000), log=workspace / "log").expect(0)
    run.train("--resume").expect(0)
    assert run.summary()["memory"]["peak_bytes"] <= run.summary()["memory"]["budget_bytes"]


def test_rows_expire_by_group(terrace, workspace, job):
    """What rows expire is a matter of job and data; that they leave their blocks is told by the counts."""
    job = harness.merge(job, {"table.expire_every_examples": 500, "table.expire_after": 1400, "table.admit_after": 2,
                              "table.admit_filter": "1MiB"})
    reference = harness.Run(terrace, workspace, job, name="reference",
                            **{"memory.budget": jobs.LARGE_BUDGET, "pipeline.depth": 0})
    reference.train().expect(0)
    run = harness.Run(terrace, workspace, job, **by_group(20_000))
    run.train().expect(0)
    assert run.summary()["ssd"]["read_bytes"] > 0
    assert run.summary()["expiry"]["dropped"] > 100, run.summary()["expiry"]
    harness.assert_same(reference.result(), run.result(), "rows that expire, by group")
    run.verify()
