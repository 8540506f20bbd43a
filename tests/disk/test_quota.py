"""All that a run holds on disk stays within ssd.quota."""
import os
import re
import time

import pytest

import harness
import jobs


def held(*folders):
    """Bytes of the blocks of all files and folders below, as du counts them."""
    blocks = 0
    for folder in folders:
        for path, _, names in os.walk(folder):
            for name in [".", *names]:
                try:
                    blocks += os.lstat(os.path.join(path, name)).st_blocks
                except FileNotFoundError:  # Removed meanwhile.
                    pass
    return 512 * blocks


EXAMPLES = 240_000


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
        most = max(most, held(*folders))
        time.sleep(0.002)
    most = max(most, held(*folders))
    assert most <= quota_mib * jobs.MIB, f"{most} bytes are held of {quota_mib} MiB\n{process.outcome.output[-4000:]}"
    return process.outcome, most


@pytest.mark.parametrize("index", ["key", "group"])
def test_nothing_passes_the_quota(terrace, workspace, index):
    settings = {"table.index": index, "table.expected_keys": 20_000} if index == "group" else {}
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
