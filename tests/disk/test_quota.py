"""All that a run holds on disk stays within ssd.quota."""
import fcntl
import os
import pathlib
import re
import signal
import sys
import time

import pytest

import harness
import jobs


def held(*folders):
    """Bytes of the blocks of all files and folders below, as du counts them. Nobody changes any of them meanwhile."""
    return 512 * sum(os.lstat(os.path.join(path, name)).st_blocks
                     for folder in folders for path, _, names in os.walk(folder) for name in [".", *names])


def is_stopped(process):
    """Whether none of its threads runs, nor waits for a disk in the midst of a change."""
    states = set()
    for task in pathlib.Path(f"/proc/{process.popen.pid}/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().rpartition(")")
            if "(iou-" not in name:  # The kernel's own threads, which no signal stops.
                states.add(rest.split()[0])
        except (FileNotFoundError, ProcessLookupError):  # A thread that has ended meanwhile.
            pass
    return states <= {"T", "t", "X", "Z"}


def held_now(process, *folders):
    """What is held at one moment: while files come and go, the sum over a walk is of no moment at all."""
    process.signal(signal.SIGSTOP)
    try:
        deadline = time.monotonic() + harness.PATIENCE_SECONDS
        while process.poll() is None and not is_stopped(process):
            assert time.monotonic() < deadline, "a thread does not stop"
            time.sleep(0.0002)
        return held(*folders)
    finally:
        process.signal(signal.SIGCONT)


EXAMPLES = 280_000


def talkative(workspace, **changes):
    """A job with more to tell in metrics.jsonl than rows to store."""
    job = jobs.tiny([])
    job["data"] = {"format": "synthetic", "rows": EXAMPLES, "slots": 4, "cardinality": 2000}
    job["training"] = {"batch": 512, "minibatch": 16, "threads": 1}
    job["metrics"] = {"every_examples": 16}
    job["checkpoint"] = {"every_batches": 32, "keep": 3}
    job["ssd"] = {"file_size": "1MiB", "paths": [str(workspace / "a"), str(workspace / "b")], "shards": 2}
    return harness.merge(job, changes)


def train(run, folders, quota_mib, *flags):
    """Trains with that quota, and looks all the time at what is held."""
    process = run.start("--set", f"ssd.quota={quota_mib}MiB", *flags)
    most = 0
    while process.poll() is None:
        most = max(most, held_now(process, *folders))
        time.sleep(0.002)
    most = max(most, held(*folders))
    assert most <= quota_mib * jobs.MIB, f"{most} bytes are held of {quota_mib} MiB\n{process.outcome.output[-4000:]}"
    return process.outcome, most


@pytest.mark.parametrize("settings", [{}, {"pipeline.pull_threads": 2}, {"table.index": "group", "table.expected_keys": 20_000}],
                         ids=["key", "parts", "group"])
def test_nothing_passes_the_quota(terrace, workspace, settings):
    run = harness.Run(terrace, workspace, talkative(workspace, **settings))
    folders = [run.path, workspace / "a", workspace / "b"]
    refused = run.train("--set", "ssd.quota=2MiB").expect(2)
    assert not run.path.exists() and held(*folders[1:]) == 0
    least = int(re.search(r"ssd\.quota of .* at least (\d+) MiB", refused.output).group(1))
    run.train("--set", f"ssd.quota={least - 1}MiB").expect(2)
    outcome, most = train(run, folders, least)
    if outcome.code == 0:
        lines = (run.path / "metrics.jsonl").stat().st_size
        pytest.fail(f"the job is to hold more than {least} MiB: {lines} bytes of metrics, {most} in all")
    outcome.expect(1)
    assert "ssd.quota" in outcome.output and "go on with --resume" in outcome.output, outcome.output
    assert run.checkpoints()
    examples = run.metrics()[-1]["examples"]
    # What is there counts from the start.
    outcome, _ = train(run, folders, least + 1, "--resume")
    assert outcome.code == 1, outcome.output
    assert run.metrics()[-1]["examples"] > examples, outcome.output
    outcome, _ = train(run, folders, least + 64, "--resume")
    outcome.expect(0)
    assert run.summary()["examples"] == EXAMPLES
    assert run.verify()


def evicting(workspace, **changes):
    """A job that writes some 70 MiB of rows."""
    job = jobs.tiny([])
    job["data"] = {"format": "synthetic", "rows": 60_000, "cardinality": 100_000, "zipf": 0.8}
    job["training"] = {"batch": 2048, "minibatch": 512, "threads": 2}
    job["memory"] = {"budget": "100MiB"}
    return harness.merge(job, {"table.dim": 8, **changes})


def test_a_resume_with_less_than_is_held_is_refused(terrace, workspace):
    run = harness.Run(terrace, workspace, evicting(workspace, **{"training.max_examples": 20_480}))
    run.train().expect(0)
    more = ("--resume", "--set", "training.max_examples=40960")
    before = run.result()
    refused = run.train(*more, "--set", "ssd.quota=8MiB").expect(2)
    least = int(re.search(r"ssd\.quota of 8\.00 MiB is too small: the run's checkpoints hold .* at least (\d+) MiB",
                          refused.output).group(1))
    assert run.result() == before
    outcome = run.train(*more, "--set", f"ssd.quota={least}MiB")
    assert outcome.code == 0 or "--resume --set ssd.quota=" in outcome.output, outcome.output
    assert run.summary()["examples"] > 20_480


def test_a_checkpoint_that_is_read_does_not_keep_the_next_one(terrace, workspace):
    """Of old checkpoints, which go when the quota is short, the oldest that nobody reads."""
    job = evicting(workspace, **{"checkpoint": {"every_batches": 2, "keep": 4}})
    free = harness.Run(terrace, workspace, job, "free")
    outcome, most = train(free, [free.path], 8192)
    outcome.expect(0)

    def drops(mib, attempt):
        run = harness.Run(terrace, workspace, job, f"q{mib}-{attempt}", **{"ssd.quota": f"{mib}MiB"})
        outcome = run.train()
        return outcome.code == 0 and "was dropped" in outcome.output

    # How much compaction has freed when the quota is short is a matter of time: few quotas do it, and not each time.
    quota = next((mib for mib in range(most // jobs.MIB - 25, most // jobs.MIB + 20, 5) for attempt in range(3)
                  if drops(mib, attempt)), None)
    assert quota, "no quota makes a run drop a checkpoint and end"
    held = []
    for number in range(5):
        run = harness.Run(terrace, workspace, job, f"run{number}", **{"ssd.quota": f"{quota}MiB"})
        process = run.start()
        while process.poll() is None and not run.checkpoints():
            time.sleep(0.001)
        try:
            held_file = open(run.path / "checkpoints" / run.checkpoints()[0], "rb")
        except (FileNotFoundError, IndexError):  # It has gone by now, on a busy machine.
            ended = process.wait()  # With nothing left to drop where the quota is short once more.
            assert ended.code == 0 or "ssd.quota" in ended.output, ended.output
            continue
        with held_file:
            fcntl.flock(held_file, fcntl.LOCK_SH)
            held.append(process.wait().output)
        if "was dropped" in held[-1]:
            return
    if not held:
        pytest.skip("the oldest checkpoint went each time before it could be held")
    pytest.fail(f"none was dropped of {len(held)} runs whose oldest was held:\n{held[-1]}")


@pytest.mark.parametrize("index", ["key", "group"])
def test_open_files_run_out(terrace, workspace, index):
    """A checkpoint is taken before there are too few, and larger files go on from there to the same model."""
    settings = {"table.index": index, "table.expected_keys": 200_000} if index == "group" else {}
    job = evicting(workspace, **settings)
    whole = harness.Run(terrace, workspace, job, "whole")
    whole.train().expect(0)

    def limit(files):
        return [sys.executable, "-I", "-S", "-c", "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, "
                f"({files}, {files})); os.execv(sys.argv[1], sys.argv[1:])"]

    run = harness.Run(terrace, workspace, job)
    outcome = run.train("--set", "ssd.file_size=256KiB", prefix=limit(400)).expect(1)
    stopped = re.search(r"the run has (\d+) parameter files open, the system lets it open (\d+), and (\d+) more are kept for .*ulimit -n.*"
                        "go on with --resume", outcome.output)
    assert stopped, outcome.output
    is_open, may_be, are_kept = map(int, stopped.groups())
    assert is_open > 100 and is_open + are_kept > may_be
    assert "holds all that was trained" in outcome.output, outcome.output
    run.train("--resume", prefix=limit(400)).expect(0)
    assert run.digest() == whole.digest()
    too_few = harness.Run(terrace, workspace, job, "few", **{"ssd.shards": 16}).train(prefix=limit(200)).expect(2)
    wanted = re.search(r"raise that limit \(ulimit -n\) to at least (\d+),", too_few.output)
    assert wanted, too_few.output
    least = int(wanted.group(1))
    few = harness.Run(terrace, workspace, job, "few", **{"ssd.shards": 16, "memory.budget": "256MiB"})
    for nofile in (20, least - 1):  # The advice does not depend on how far the limit is off.
        assert f"to at least {least}," in few.train(prefix=limit(nofile)).expect(2).output
    few.train("--set", "training.max_examples=64", prefix=limit(least)).expect(0)


def test_a_start_by_group_knows_of_blocks(terrace, workspace):
    """A write of few rows is one of many blocks: a quota that holds rows by key may be too small for it."""
    job = evicting(workspace, **{"table.expected_keys": 400_000, "training.max_examples": 2048, "training.batch": 512})
    run = harness.Run(terrace, workspace, job, "key", **{"ssd.quota": "120MiB"})
    run.train().expect(0)
    run = harness.Run(terrace, workspace, job, "group", **{"ssd.quota": "120MiB", "table.index": "group"})
    refused = run.train().expect(2)
    assert re.search(r"ssd\.quota of 120\.00 MiB is too small: .* at least \d+ MiB", refused.output), refused.output
    assert not run.path.exists()
