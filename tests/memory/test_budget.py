"""The whole process stays within memory.budget."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import harness
import jobs

BUDGET = 320 * jobs.MIB
SMALL = 128 * jobs.MIB
EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "examples"
CGROUPS = pathlib.Path("/sys/fs/cgroup")


class Peak:
    """What a command takes at most, as the kernel counts it."""

    def __init__(self, workspace):
        self.file = workspace / "peak"
        self.prefix = [sys.executable, "-I", "-S", str(pathlib.Path(__file__).with_name("peak.py")), str(self.file)]

    def read(self):
        return int(self.file.read_text())


@pytest.fixture
def peak(workspace):
    return Peak(workspace)


@pytest.fixture(scope="module")
def train_log(logs):
    return logs.criteo(8000, **jobs.EVICTING_LOG)


def large_job(train_log):
    """Rows that do not fit into BUDGET."""
    job = jobs.evicting([train_log], memory={"budget": BUDGET})
    job["table"]["dim"] = 192
    return job


@pytest.mark.parametrize("changes", [
    {},
    {"memory.budget": SMALL},
    {"memory.budget": SMALL, "table.dim": 64, "pipeline.depth": 4},
    {"pipeline.depth": 4},
    {"training.batch": 65536},
    {"ssd.shards": 4, "ssd.io_threads": 4, "ssd.backend": "threads"},
    {"ssd.shards": 4, "pipeline.pull_threads": 4},
    {"ssd.shards": 8, "pipeline.pull_threads": 8, "pipeline.depth": 4},
    {"table.dim": 8, "data.epochs": 1},
    {"network.hidden": [256, 128]},
    {"memory.budget": 144 * jobs.MIB, "table.admit_after": 2, "table.admit_filter": "2MiB"},
], ids=str)
def test_peak(terrace, workspace, train_log, peak, changes):
    run = harness.Run(terrace, workspace, large_job(train_log), **changes)
    run.train(prefix=peak.prefix).expect(0)
    summary = run.summary()
    memory = summary["memory"]
    assert memory["budget_bytes"] == changes.get("memory.budget", BUDGET)
    assert memory["peak_bytes"] <= memory["budget_bytes"]
    # What summary.json says is not to be less than what was.
    assert peak.read() <= memory["budget_bytes"]
    assert memory["peak_bytes"] >= peak.read() * 0.9
    if changes.get("table.dim") != 8:
        assert summary["cache"]["evictions"] > 0 and summary["ssd"]["read_bytes"] > 0, "the job is to be larger"


def test_files_of_many_short_rows(terrace, workspace, peak):
    """Of which several stores write and rewrite some at a time: their entries are memory, too."""
    job = jobs.tiny([], data={"format": "synthetic", "rows": 700_000, "cardinality": 400_000, "zipf": 1.05},
                    training={"batch": 16384, "minibatch": 512, "threads": 2}, ssd={"shards": 4}, memory={"budget": BUDGET},
                    checkpoint={"every_batches": 0, "keep": 1})
    run = harness.Run(terrace, workspace, job, **{"table.dim": 8})
    run.train(prefix=peak.prefix).expect(0)
    assert run.summary()["cache"]["evictions"] > 0 and run.summary()["ssd"]["read_bytes"] > 0
    assert peak.read() <= BUDGET, f"{peak.read() / jobs.MIB:.0f} MiB"


def many_keys(rows, budget):
    """A job of short rows nearly all of whose keys are new: their index is much of its memory."""
    return jobs.tiny([], data={"format": "synthetic", "rows": rows, "slots": 100, "cardinality": 1_000_000_000, "zipf": 0},
                     table={"dim": 1, "optimizer": {"type": "sgd", "learning_rate": 0.1}}, network={"type": "dnn", "hidden": [4]},
                     training={"batch": 1024, "minibatch": 16, "threads": 1}, memory={"budget": budget}, cache={"look_ahead": "off"},
                     checkpoint={"every_batches": 0, "keep": 1}, metrics={"every_examples": 1024})


def test_an_index_takes_what_write_buffers_leave(terrace, workspace, peak):
    """The run stops after a checkpoint, and says with which budget it goes on."""
    run = harness.Run(terrace, workspace, many_keys(120_000, 150 * jobs.MIB))
    outcome = run.train(prefix=peak.prefix).expect(1)
    assert "the cache can give way no more. The run has stopped after a checkpoint" in outcome.output, outcome.output
    assert peak.read() <= 150 * jobs.MIB and run.checkpoints()
    enough = int(re.search(r"--set memory.budget=(\d+)MiB", outcome.output).group(1))
    examples = int(re.search(r"training stopped at example (\d+)", outcome.output).group(1))
    run.train("--resume", "--set", f"memory.budget={enough}MiB", "--set", f"training.max_examples={examples + 4096}").expect(0)


def test_rows_of_a_checkpoint_have_room_in_the_index(terrace, workspace, peak):
    """All of them are new to the disk, and memory is full of them."""
    run = harness.Run(terrace, workspace, many_keys(60_000, BUDGET))
    outcome = run.train(prefix=peak.prefix).expect(0)
    planned = float(re.search(r"= ([\d.]+) MiB rows and index", outcome.output).group(1)) * jobs.MIB
    last = [line for line in run.metrics() if line["kind"] == "interval"][-1]["performance"]
    assert last["index_bytes"] > 24 * jobs.MIB
    assert last["cache"]["capacity_bytes"] + last["index_bytes"] <= planned + jobs.MIB
    assert peak.read() <= BUDGET


def test_a_large_network(terrace, workspace, train_log, peak):
    """Whose dense state is most of the budget, the least that would do: checkpoints hold copies of it."""
    job = jobs.evicting([train_log], training={"batch": 2048, "minibatch": 256, "threads": 2, "max_examples": 4096})
    settings = {"table.dim": 8, "network.hidden": [1024] * 4, "checkpoint.every_batches": 1}
    run = harness.Run(terrace, workspace, job, **settings)
    least = run.least_budget(below="64MiB")
    run.train("--set", f"memory.budget={least}MiB", prefix=peak.prefix).expect(0)
    assert peak.read() <= least * jobs.MIB, f"{peak.read() / jobs.MIB:.0f} of {least} MiB"
    terrace("evaluate", run.path, "--data", train_log, log=workspace / "log", prefix=peak.prefix).expect(0)
    assert peak.read() <= least * jobs.MIB, f"evaluate took {peak.read() / jobs.MIB:.0f} of {least} MiB"
    for options in ([], ["--json"], ["--initial"]):
        subprocess.run([*peak.prefix, terrace.binary, "inspect", run.path, "--dense", *options], check=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=harness.PATIENCE_SECONDS)
        assert peak.read() <= least * jobs.MIB, f"inspect --dense {options} took {peak.read() / jobs.MIB:.0f} of {least} MiB"


def test_wide_rows_by_many_threads(terrace, workspace, logs, peak):
    """Each thread takes memory for the first layer when it first goes by distinct rows."""
    log = logs.criteo(4000, seed=9, cardinality=20, zipf=1.05)
    job = jobs.evicting([log], training={"batch": 512, "minibatch": 256, "threads": 8})
    run = harness.Run(terrace, workspace, job, **{"table.dim": 1024, "network.hidden": [256], "checkpoint.every_batches": 8})
    least = run.least_budget(below="160MiB")
    run.train("--set", f"memory.budget={least}MiB", prefix=peak.prefix).expect(0)
    if run.summary()["steps_by_rows"] == 0:
        pytest.skip("this processor's kernels take the first layer by examples")
    assert peak.read() <= least * jobs.MIB, f"{peak.read() / jobs.MIB:.0f} of {least} MiB"


@pytest.mark.parametrize("changes", [
    {"table.dim": 256},
    {"table.dim": 128, "table.optimizer": {"type": "adam", "learning_rate": 0.01}, "training.minibatch": 2048},
    {"table.dim": 8, "training.minibatch": 4096, "training.batch": 4096},
], ids=str)
def test_validation(terrace, workspace, train_log, peak, changes):
    """Which copies the rows of whole mini-batches, in the least budget that would do."""
    job = jobs.evicting([train_log], [train_log], training={"batch": 2048, "minibatch": 512, "threads": 2, "max_examples": 4096})
    run = harness.Run(terrace, workspace, job, **{"validation.every_examples": 2048, **changes})
    least = run.least_budget()
    run.train("--set", f"memory.budget={least}MiB", prefix=peak.prefix).expect(0)
    assert run.summary()["validation"]["examples"] > 0
    assert peak.read() <= least * jobs.MIB, f"{peak.read() / jobs.MIB:.0f} of {least} MiB"


def test_large_blocks(terrace, workspace, train_log, peak):
    """Whose buffers are most of the least budget that would do. How many of them are touched is a matter of time."""
    job = jobs.tiny([train_log])
    job["ssd"]["shards"] = 16
    by_group = {"table.index": "group", "table.expected_keys": 400_000}
    without = harness.Run(terrace, workspace, job, name="without", **by_group).least_budget()
    run = harness.Run(terrace, workspace, job, **by_group, **{"table.group_block": "256KiB"})
    least = run.least_budget()
    assert least > 2 * without, f"{least} MiB for {without} without them"
    run.train("--set", f"memory.budget={least}MiB", prefix=peak.prefix).expect(0)
    assert peak.read() <= least * jobs.MIB, f"{peak.read() / jobs.MIB:.0f} of {least} MiB"


@pytest.mark.parametrize("name", ["train", "validation"])
def test_an_archive_with_a_long_window(terrace, workspace, logs, train_log, peak, name):
    """Whose decompressor takes more memory than all else."""
    log = logs.criteo(50_000, seed=9)
    text = log.read_bytes()
    archive = workspace / "long.tsv.zst"
    subprocess.run(["zstd", "-q", "-1", "--long=26", "-o", archive], input=text * (1 + (70 << 20) // len(text)), check=True)
    data = {"format": "criteo", "train": [str(train_log)], "validation": [str(train_log)], name: [str(archive)]}
    job = jobs.tiny([], data=data, training={"batch": 512, "minibatch": 512, "threads": 2, "max_examples": 2048})
    run = harness.Run(terrace, workspace, job)
    least = run.least_budget()
    assert least > 64 + 40, "the window is to be the most of it"
    run.train("--set", f"memory.budget={least}MiB", prefix=peak.prefix).expect(0)
    assert peak.read() <= least * jobs.MIB, f"{peak.read() / jobs.MIB:.0f} of {least} MiB"
    assert peak.read() > 48 * jobs.MIB


def test_the_least_budget_has_room_for_an_index(terrace, workspace, train_log):
    """Or a run of wide rows would stop before its first checkpoint."""
    job = jobs.evicting([train_log], training={"batch": 2048, "minibatch": 256, "threads": 2, "max_examples": 4096})
    refused = harness.Run(terrace, workspace, job, **{"table.dim": 1024, "memory.budget": "64MiB"}).train().expect(2)
    assert "room for 250,000 rows" in refused.output, refused.output
    least = re.search(r"needs at least (\d+) MiB", refused.output).group(1)
    run = harness.Run(terrace, workspace, job, **{"table.dim": 1024, "memory.budget": f"{least}MiB"})
    run.train().expect(0)
    assert run.summary()["examples"] == 4096


def test_readers_keep_the_budget(terrace, workspace, train_log, peak):
    run = harness.Run(terrace, workspace, large_job(train_log), **{"data.epochs": 1})
    run.train().expect(0)
    for command in (["evaluate", run.path, "--data", train_log],
                    ["predict", run.path, "--data", train_log, "--output", workspace / "p.txt"],
                    ["inspect", run.path, "--digest"], ["inspect", run.path, "--verify"]):
        terrace(*command, log=workspace / "log", prefix=peak.prefix).expect(0)
        assert peak.read() <= BUDGET, f"{command[0]} took {peak.read() / jobs.MIB:.0f} MiB"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples(terrace, workspace, logs, peak, example):
    """The shipped jobs, on a few thousand lines."""
    log = logs.criteo(4000, seed=8, cardinality=100_000)
    data = (["data.rows=20000", "data.validation_rows=2000"] if example.stem == "synthetic" else
            [f"data.train=[{log}]", f"data.validation=[{log}]"])
    settings = [part for setting in [*data, f"output={workspace}/run", f"memory.budget={BUDGET}"] for part in ("--set", setting)]
    terrace("train", example, *settings, log=workspace / "log", prefix=peak.prefix).expect(0)
    assert json.loads((workspace / "run/summary.json").read_text())["validation"]["examples"] > 0
    assert peak.read() <= BUDGET, f"{peak.read() / jobs.MIB:.0f} MiB"


@pytest.fixture
def control_group():
    """A control group of BUDGET bytes of memory, of version 1 or 2."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a control group")
    first = (CGROUPS / "memory" / "cgroup.procs").exists()
    if not first and not (CGROUPS / "cgroup.controllers").exists():
        pytest.skip(f"no memory control groups of version 1 or 2 at {CGROUPS}")
    group = CGROUPS / ("memory" if first else ".") / f"terrace-test-{os.getpid()}"
    try:
        if not first:
            # Where the root has not given its groups the control of memory yet.
            (CGROUPS / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(BUDGET))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"can't make a memory control group of version 1 or 2 here: {error}")
    yield group
    group.rmdir()


def test_within_a_control_group_of_that_size(terrace, workspace, train_log, control_group):
    """Page cache counts too, and who goes beyond is killed."""
    run = harness.Run(terrace, workspace, large_job(train_log))
    enter = ["sh", "-c", f'echo $$ > {control_group}/cgroup.procs && exec "$@"', "enter"]
    run.train(prefix=enter).expect(0)
    assert run.summary()["cache"]["evictions"] > 0


def test_too_small_a_budget_says_what_would_do(terrace, workspace, train_log):
    run = harness.Run(terrace, workspace, jobs.evicting([train_log]), **{"memory.budget": "48MiB"})
    outcome = run.train().expect(2)
    assert "memory.budget" in outcome.output and "MiB" in outcome.output.replace("48.00 MiB", "")
    assert not run.path.exists() or not list(run.path.glob("rows*")), "refused before the store is made"


def test_a_resume_whose_index_does_not_fit_is_refused(terrace, workspace, peak):
    """The job is what is wrong, and the message says which budget would do."""
    job = jobs.tiny([], data={"format": "synthetic", "rows": 32768, "cardinality": 10**9, "zipf": 0.5},
                    training={"batch": 4096, "minibatch": 512, "threads": 2}, **{"checkpoint": {"every_batches": 7}})
    run = harness.Run(terrace, workspace, job, **{"table.dim": 1, "table.index": "key", "memory.budget": "256MiB"})
    run.train("--test-kill-at", "checkpoint.after_publish").expect(-signal.SIGKILL)
    least = run.least_budget("--set", f"output={workspace}/other")
    before = run.digest()
    refused = run.train("--resume", "--set", f"memory.budget={least}MiB").expect(2)
    needed = re.search(r"the index of the run's rows takes .* memory.budget must be at least (\d+) MiB", refused.output).group(1)
    assert run.digest() == before
    run.train("--resume", "--set", f"memory.budget={needed}MiB", prefix=peak.prefix).expect(0)
    assert peak.read() <= int(needed) * jobs.MIB, f"{peak.read() / jobs.MIB:.0f} of {needed} MiB"


@pytest.mark.parametrize("depth", [0, 2])
def test_an_index_that_outgrows_the_budget(terrace, workspace, depth):
    """The run stops after a checkpoint and says which budget would do; with that it goes on as if it had had it from the start."""
    job = jobs.tiny([], data={"format": "synthetic", "rows": 32768, "cardinality": 10**9, "zipf": 0.5},
                    training={"batch": 4096, "minibatch": 512, "threads": 2}, checkpoint={"every_batches": 0, "keep": 2})
    settings = {"table.dim": 1, "table.index": "key", "pipeline.depth": depth}
    undisturbed = harness.Run(terrace, workspace, job, "undisturbed", **settings, **{"memory.budget": "512MiB"})
    undisturbed.train().expect(0)
    assert undisturbed.summary()["rows"] > 800_000
    run = harness.Run(terrace, workspace, job, **settings)
    budget = run.least_budget()
    trained = stops = 0
    outcome = run.train("--set", f"memory.budget={budget}MiB")
    while outcome.code == 1:
        assert "the index of the rows on disk has grown to" in outcome.output, outcome.output
        advised = int(re.search(r"go on with --resume --set memory\.budget=(\d+)MiB", outcome.output).group(1))
        examples = int(re.search(r"training stopped at example (\d+): ", outcome.output).group(1))
        assert advised > budget and trained < examples < 32768
        assert f"a checkpoint at example {examples} holds all that was trained" in outcome.output, outcome.output
        assert json.loads(terrace.text("inspect", run.path, "--json"))["examples"] == examples
        budget, trained, stops = advised, examples, stops + 1
        outcome = run.train("--resume", "--set", f"memory.budget={budget}MiB")
    outcome.expect(0)
    assert stops > 0, "the index did not outgrow the budget"
    assert run.summary()["memory"]["peak_bytes"] <= budget * jobs.MIB
    harness.assert_same(undisturbed.result(), run.result(), f"stopped {stops} times")


def test_no_memory_left(terrace, workspace, logs):
    """A limit of the address space, wherever it strikes: a message, and the run goes on from its last checkpoint."""
    job = large_job(logs.criteo(4000, **jobs.EVICTING_LOG))
    job["memory"]["budget"] = 192 * jobs.MIB
    expected = harness.Run(terrace, workspace, job, name="expected")
    expected.train().expect(0)
    assert expected.summary()["cache"]["evictions"] > 0
    refused = 0
    for limit in range(96, 500, 50):
        run = harness.Run(terrace, workspace, job)
        outcome = run.train(prefix=["prlimit", f"--as={limit * jobs.MIB}"])
        assert outcome.code in (0, 1, 2), f"{limit} MiB: exit {outcome.code}\n{outcome.output[-4000:]}"
        if outcome.code != 0:
            refused += 1
            assert ("asked the system for" in outcome.output or "Cannot allocate memory" in outcome.output), \
                outcome.output[-4000:]
        run.train("--resume").expect(0)
        harness.assert_same(expected.result(), run.result(), f"{limit} MiB of address space")
        harness.remove(run.path)
    assert 2 <= refused, "no limit was reached"
