"""The tiers are invisible to the mathematics: digest and metrics are the same whatever the memory
budget, depth, batch size, index, shards, disks, I/O, eviction, compaction, binding, compression, checkpoints, interruption."""
import json
import random
import re
import signal

import pytest

import harness
import jobs
import pairwise

# Examples of the job whose settings are combined, with rows so wide that they do not fit. An index by group reads and
# writes a block for nearly each of them: with all of jobs.EVICTING_ROWS a combination would take half a minute.
COMBINED_ROWS, COMBINED_DIM, COMBINED_MINIBATCH = 1500, 128, 128
INDEX_READ = ("table.index", "ssd.read")
SHARDS_DISKS = ("ssd.shards", "disks")  # Folders in ssd.paths; 0: the rows lie in the run's folder.
AXES = {
    "memory.budget": ("least", jobs.SMALL_BUDGET, jobs.LARGE_BUDGET),
    "pipeline.depth": (0, 1, 2, 4),
    "pipeline.pull_threads": (1, 2, 4),
    "training.batch": (256, 1024, 4096, 65536),
    # A flush by group would read every file whole for each part of it: see test_whole_files_by_group.
    INDEX_READ: (("key", "planned"), ("key", "whole_file"), ("group", "planned")),
    "table.expected_keys": (7000, 35_000),  # Of 34,000.
    "binding": ("auto", "off"),
    SHARDS_DISKS: ((1, 0), (2, 2), (4, 0), (4, 2)),
    "ssd.backend": ("io_uring", "threads"),
    "ssd.io_threads": (1, 4),
    "ssd.merge_gap": ("auto", "0", "1MiB"),
    "ssd.compaction": ("gain", "stale_share", "model_size"),
    "ssd.stale_share": (0.3333, 0.2),
    "ssd.file_size": ("1MiB", "32MiB"),
    "cache.policy": ("s3_fifo", "lru_lfu", "pass_lfu"),
    "checkpoint.every_batches": (0, 1, 5),
    "suffix": (".tsv", ".tsv.zst", ".tsv.gz"),
    "interrupt": (False, True),
}
BEYOND_LEAST_MIB = 30  # So that memory holds batches of some mini-batches.
PRINCIPAL = ("memory.budget", "pipeline.depth", "training.batch", SHARDS_DISKS, INDEX_READ)


@pytest.fixture(scope="module")
def interruptions():
    """Of all tests of this module together."""
    counted = harness.Interruptions()
    yield counted
    counted.check()


@pytest.fixture(scope="module")
def job_of(logs):
    """suffix -> the job over that input."""
    validation = logs.criteo(2000, seed=4, cardinality=40_000, zipf=0.6)

    def make(suffix):
        train = logs.criteo(jobs.EVICTING_ROWS, suffix, **jobs.EVICTING_LOG)
        return jobs.evicting([train], [validation], validation={"every_examples": 8192})
    return make


def train_reference(terrace, folder, job, examples):
    """Everything in memory, one stage after another, one batch at a time."""
    run = harness.Run(terrace, folder, job,
                      **{"memory.budget": jobs.LARGE_BUDGET, "pipeline.depth": 0, "ssd.shards": 1})
    run.train().expect(0)
    summary = run.summary()
    assert summary["cache"]["evictions"] == 0, "the reference is to run in memory"
    assert summary["examples"] == examples
    return run.result()


@pytest.fixture(scope="module")
def reference(terrace, job_of, tmp_path_factory):
    return train_reference(terrace, tmp_path_factory.mktemp("reference"), job_of(".tsv"), 2 * jobs.EVICTING_ROWS)


@pytest.fixture(scope="module")
def combined_job_of(logs):
    """As job_of, smaller."""
    validation = logs.criteo(500, seed=4, cardinality=40_000, zipf=0.6)

    def make(suffix):
        train = logs.criteo(COMBINED_ROWS, suffix, **jobs.EVICTING_LOG)
        job = jobs.evicting([train], [validation], validation={"every_examples": 1024}, metrics={"every_examples": 256})
        job["table"]["dim"] = COMBINED_DIM
        job["training"]["minibatch"] = COMBINED_MINIBATCH
        return job
    return make


@pytest.fixture(scope="module")
def combined_reference(terrace, combined_job_of, tmp_path_factory):
    return train_reference(terrace, tmp_path_factory.mktemp("combined"), combined_job_of(".tsv"), 2 * COMBINED_ROWS)


def train(run, interrupt, rng, interruptions):
    """To the end, in one process or with SIGINT on the way."""
    process = run.start()
    if interrupt:
        run.wait_for_metrics(process, rng.randrange(2, 12))
        process.signal(signal.SIGINT)
    outcome = process.wait()
    # A run whose index outgrew its budget, or that was faster than the signal, was not ended by it.
    if interrupt and outcome.code != 1:
        interruptions.add(outcome, 130)
    if outcome.code == 130:
        assert interrupt and run.checkpoints(), "an interrupted run leaves a checkpoint"
        # Another eviction policy may go on.
        outcome = run.train("--resume", "--set", f"cache.policy={rng.choice(AXES['cache.policy'])}")
    run.resume_as_advised(outcome)


def check(terrace, workspace, job_of, reference, settings, rng, interruptions):
    settings = dict(settings)
    suffix, interrupt = settings.pop("suffix"), settings.pop("interrupt")
    settings.update(zip(INDEX_READ, settings.pop(INDEX_READ)))
    settings.update(zip(SHARDS_DISKS, settings.pop(SHARDS_DISKS)))
    disks = [workspace / f"disk{number}" for number in range(settings.pop("disks"))]
    if disks:
        settings["ssd.paths"] = [str(disk) for disk in disks]
    least = settings["memory.budget"] == "least"
    if least:
        refused = harness.Run(terrace, workspace, job_of(suffix), name="refused", **settings)
        settings["memory.budget"] = f"{refused.least_budget()}MiB"
    run = harness.Run(terrace, workspace, job_of(suffix), **settings)
    train(run, interrupt, rng, interruptions)
    summary = run.summary()
    if least:
        # Else the comparison proves nothing. The summary would be of the last process alone.
        intervals = [line["performance"] for line in run.metrics() if line["kind"] == "interval"]
        assert sum(line["cache"]["evictions"] for line in intervals) > 0, "nothing was evicted: the budget is not small"
        assert sum(line["ssd"]["rows_read"] for line in intervals) > 0, "nothing was read back"
    assert summary["memory"]["peak_bytes"] <= summary["memory"]["budget_bytes"]
    assert all(any(disk.rglob("rows-*")) for disk in disks)
    harness.assert_same(reference, run.result(), f"with {settings}, {suffix}, interrupt={interrupt}")


@pytest.mark.parametrize("depth", [0, 2])
def test_checkpoints_amid_working_sets(terrace, workspace, job_of, reference, depth):
    """The rows that a set has trained are clean after such a checkpoint, and dirty again by its later mini-batches."""
    batch = 31 * 256  # A prime number of mini-batches.
    run = harness.Run(terrace, workspace, job_of(".tsv"), **{
        "pipeline.depth": depth, "training.batch": batch, "checkpoint.every_batches": 1})
    # What a process takes of a budget by itself differs by machine; what is beyond decides how large batches are.
    output = run.train("--set", f"memory.budget={run.least_budget() + BEYOND_LEAST_MIB}MiB").expect(0).output
    adapted = int(re.search(r"batches in flight \(([\d,]+) examples each", output).group(1).replace(",", ""))
    assert batch % adapted != 0, "checkpoints are to fall amid working sets"
    harness.assert_same(reference, run.result(), f"with batches of {adapted} at depth {depth}")


def test_sample(terrace, workspace, combined_job_of, combined_reference, sample_seed, interruptions):
    """Every pair of values of any two settings."""
    rows = pairwise.pairwise(AXES, sample_seed)
    rng = random.Random(sample_seed)
    print(f"--sample-seed {sample_seed}: {len(rows)} combinations")
    for number, settings in enumerate(rows):
        folder = workspace / str(number)
        folder.mkdir()
        print(settings)
        check(terrace, folder, combined_job_of, combined_reference, settings, rng, interruptions)
        harness.remove(folder)


def test_all(terrace, workspace, combined_job_of, combined_reference, sample_seed, full, interruptions):
    """Every combination of the settings that matter most; the others are drawn."""
    if not full:
        pytest.skip("hours: runs with --full")
    rng = random.Random(sample_seed)
    print(f"--sample-seed {sample_seed}")
    for number, settings in enumerate(pairwise.product(AXES, PRINCIPAL, sample_seed)):
        folder = workspace / str(number)
        folder.mkdir()
        print(settings)
        check(terrace, folder, combined_job_of, combined_reference, settings, rng, interruptions)
        harness.remove(folder)


@pytest.mark.parametrize("number", range(6))
def test_repeating_keys(terrace, workspace, logs, number, sample_seed, interruptions):
    """Where keys repeat, the first layer goes by the distinct rows of a mini-batch."""
    rng = random.Random(f"{sample_seed}-{number}")
    validation = logs.criteo(1000, seed=4, cardinality=40_000, zipf=1.1)

    def make(suffix):
        job = jobs.evicting([logs.criteo(8192, suffix, seed=3, cardinality=40_000, zipf=1.1)], [validation],
                            validation={"every_examples": 8192})
        job["network"]["hidden"] = [64, 16]
        return job
    folders = [workspace / name for name in ("reference", "other")]
    for folder in folders:
        folder.mkdir()
    expected = train_reference(terrace, folders[0], make(".tsv"), 2 * 8192)
    settings = {name: rng.choice(values) for name, values in AXES.items()}
    settings.update({"memory.budget": "least", INDEX_READ: (("key", "group")[number % 2], "planned"),
                     "table.expected_keys": 120_000, "interrupt": number < 2})
    print(settings)
    check(terrace, folders[1], make, expected, settings, rng, interruptions)
    for folder in folders:
        summary = json.loads((folder / "run/summary.json").read_text())
        assert summary["steps_by_rows"] * 256 == summary["process_examples"] > 0


def test_whole_files_by_group(terrace, workspace, logs):
    """Blocks are read by a resume, and by the flushes that merge into them."""
    job = jobs.evicting([logs.criteo(600, **jobs.EVICTING_LOG)], training={"batch": 256, "minibatch": 128, "threads": 2})
    reference = harness.Run(terrace, workspace, job, "reference", **{"memory.budget": jobs.LARGE_BUDGET})
    reference.train().expect(0)
    run = harness.Run(terrace, workspace, job, **{"table.index": "group", "table.expected_keys": 15_000,
                                                  "ssd.read": "whole_file", "ssd.file_size": "1MiB"})
    run.train("--test-kill-at", "checkpoint.before_publish:2").expect(-signal.SIGKILL)
    run.train("--resume").expect(0)
    assert run.summary()["ssd"]["read_bytes"] > 0
    harness.assert_same(reference.result(), run.result(), "by group, reading whole files")


@pytest.mark.parametrize("compaction", [
    {"ssd.compaction": "gain"},
    {"ssd.compaction": "stale_share"},
    # The quota is what it waits for.
    {"ssd.compaction": "model_size", "ssd.quota": "220MiB", "ssd.over_provisioning": 0,
     "checkpoint.every_batches": 0},
    # Rows and the last checkpoint fit in; what is stale beside them has to go in time.
    {"ssd.compaction": "model_size", "ssd.quota": "185MiB", "ssd.over_provisioning": 0.15,
     "checkpoint.every_batches": 0},
    {"ssd.compaction": "model_size", "ssd.quota": "200MiB", "ssd.over_provisioning": 0.15,
     "checkpoint.every_batches": 0, "pipeline.pull_threads": 2},
], ids=["gain", "stale_share", "model_size", "tight_quota", "tight_quota_in_parts"])
def test_compaction_changes_nothing(terrace, workspace, job_of, reference, compaction):
    """Small files and a low stale share: rows move through compaction many times."""
    run = harness.Run(terrace, workspace, job_of(".tsv"),
                      **{"ssd.file_size": "1MiB", "ssd.stale_share": 0.05, "ssd.shards": 2, **compaction})
    run.train().expect(0)
    compacted = sum(line["performance"]["ssd"]["rows_compacted"] for line in run.metrics() if line["kind"] == "interval")
    assert compacted > 0, "nothing was compacted: the settings do not do what the test is for"
    # Files that were kept for the next ones are given back: beside the records of 0.5 KiB are their keys and the ends
    # of blocks alone.
    ssd = run.summary()["ssd"]
    beside = ssd["disk_bytes"] - ssd["live_bytes"] - ssd["stale_bytes"] - ssd["checkpoint_only_bytes"]
    assert 0 <= beside < 0.06 * (ssd["live_bytes"] + ssd["stale_bytes"]), ssd
    harness.assert_same(reference, run.result(), "with compaction")
    run.verify()


def test_writing_ahead_changes_nothing(terrace, workspace, job_of, reference):
    """Rows go to disk long before a checkpoint asks for them, and are trained and written again."""
    written = {}
    for seconds in (0, 1000):
        run = harness.Run(terrace, workspace, job_of(".tsv"), f"seconds{seconds}",
                          **{"memory.budget": jobs.LARGE_BUDGET, "training.batch": 1024, "checkpoint.every_batches": 0,
                             "checkpoint.final_seconds": seconds})
        run.train().expect(0)
        harness.assert_same(reference, run.result(), f"with checkpoint.final_seconds {seconds}")
        intervals = [line for line in run.metrics() if line["kind"] == "interval"]
        # At the end, when the last working sets are trained, the others' rows are written in any case.
        before = intervals[-1]["examples"] - 4 * 1024
        written[seconds] = sum(line["performance"]["ssd"]["rows_written"] for line in intervals if line["examples"] <= before)
        assert sum(line["performance"]["ssd"]["rows_written"] for line in intervals) > written[seconds]
    assert written[0] > 0 and written[1000] == 0, written


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_readers_beside_the_run_change_nothing(terrace, workspace, job_of, reference, logs, command):
    data = logs.criteo(2000, seed=5, cardinality=40_000, zipf=0.6)
    output = ["--output", workspace / "predictions.txt"] if command == "predict" else []
    run = harness.Run(terrace, workspace, job_of(".tsv"))
    process = run.start()
    beside = 0
    while process.poll() is None:
        if run.checkpoints():
            terrace(command, run.path, "--data", data, *output, log=workspace / "reader.log").expect(0)
            beside += 1
        else:
            run.wait_for_metrics(process, len(run.metrics()) + 1)
    process.wait().expect(0)
    assert beside > 0, f"no {command} ran beside the trainer"
    harness.assert_same(reference, run.result(), f"with {command} beside it")


@pytest.mark.parametrize("every, times", [(None, 0), (128, 24), (3000, 2)])
def test_validation_changes_nothing(terrace, workspace, combined_job_of, combined_reference, every, times):
    """Nor that there is none."""
    job = combined_job_of(".tsv")
    job["validation"]["every_examples"] = every
    if every is None:
        job["data"]["validation"] = []
    run = harness.Run(terrace, workspace, job, **{"memory.budget": "100MiB"})
    run.train().expect(0)
    assert run.summary()["cache"]["evictions"] > 0 and run.summary()["ssd"]["read_bytes"] > 0
    actual = run.result()
    assert sum(line["kind"] == "validation" for line in actual["metrics"]) == times
    def but_validation(result):
        intervals = [line for line in result["metrics"] if line["kind"] == "interval"]
        return {**{name: result[name] for name in ("digest", "progressive", "examples", "rows")}, "metrics": intervals}
    harness.assert_same(but_validation(combined_reference), but_validation(actual), f"validated every {every} examples")


def test_another_seed_is_another_model(terrace, workspace, job_of, reference):
    """The comparison would see a difference."""
    run = harness.Run(terrace, workspace, job_of(".tsv"), seed=12)
    run.train().expect(0)
    result = run.result()
    assert result["digest"] != reference["digest"]
    assert result["progressive"] != reference["progressive"]


def test_looking_ahead_changes_nothing(terrace, workspace, job_of, reference):
    """Which rows stay in memory goes by what the log will ask for, or by what it has asked for."""
    ahead = {}
    for word in ("auto", "off"):
        run = harness.Run(terrace, workspace, job_of(".tsv"), word, **{"training.batch": 1024, "cache.look_ahead": word})
        run.train().expect(0)
        harness.assert_same(reference, run.result(), f"with cache.look_ahead {word}")
        memory = run.summary()["memory"]
        assert memory["peak_bytes"] <= memory["budget_bytes"]
        intervals = [line["performance"] for line in run.metrics() if line["kind"] == "interval"]
        ahead[word] = [line["look_ahead"] for line in intervals if "look_ahead" in line]
    assert max(line["rows"] for line in ahead["auto"]) > 0 and not ahead["off"]
    assert max(line["examples"] for line in ahead["auto"]) > 1024


def test_looking_ahead_warns_of_nothing_twice(terrace, workspace, logs):
    lines = logs.criteo(jobs.EVICTING_ROWS, **jobs.EVICTING_LOG).read_text().splitlines(True)
    lines[9000] = "no click\n"
    log = workspace / "bad.tsv"
    log.write_text("".join(lines))
    run = harness.Run(terrace, workspace, jobs.evicting([log]), **{"training.batch": 1024, "data.epochs": 1})
    output = run.train().expect(0).output
    assert output.index("looking ahead") < output.index("bad line"), "it is to begin before it comes there"
    assert output.count(f"bad line {log}:9001") == 1, output
