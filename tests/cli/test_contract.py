"""What people script against: commands, files, exit statuses."""
import json
import math
import re
import shlex
import signal
import subprocess
import time

import pytest

import harness
import jobs


@pytest.fixture(scope="module")
def log(logs):
    return logs.criteo(2000, seed=8, cardinality=1000, zipf=1.05)


@pytest.fixture(scope="module")
def finished(terrace, log, tmp_path_factory):
    run = harness.Run(terrace, tmp_path_factory.mktemp("finished"), jobs.tiny([log], [log]))
    run.train().expect(0)
    return run


def interrupted(terrace, workspace, log, **changes):
    """A run that a signal ended amid many epochs."""
    run = harness.Run(terrace, workspace, jobs.tiny([log], data={"format": "criteo", "train": [str(log)], "epochs": 200}), **changes)
    process = run.start()
    run.wait_for_metrics(process, 3)
    process.signal(signal.SIGINT)
    process.wait().expect(130)
    return run


def test_the_environment_chooses_no_kernels(terrace, workspace, log, monkeypatch):
    job = jobs.tiny([log], network={"type": "dnn", "hidden": [64, 32]}, training={"batch": 512, "minibatch": 256, "threads": 1})
    digests = []
    for name, value in ((None, None), ("DNNL_MAX_CPU_ISA", "AVX2"), ("DNNL_CPU_ISA_HINTS", "PREFER_YMM"),
                        ("DNNL_DEFAULT_FPMATH_MODE", "BF16"), ("DNNL_MAX_CPU_ISA", "SSE41")):
        with monkeypatch.context() as context:
            if name:
                context.setenv(name, value)
                context.setenv("ONE" + name, value)
            run = harness.Run(terrace, workspace, job, f"run{len(digests)}")
            run.train().expect(0)
            digests.append(run.digest())
    assert len(set(digests)) == 1, digests


def test_a_table_without_places_for_its_keys_is_refused_at_the_start(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"table.index": "key", "table.expected_keys": 10**11})
    refused = run.train().expect(2)
    assert re.search(r"table 'default' is to have 100,000,000,000 keys \(table\.expected_keys\), but an index by key has places for "
                     r"[0-9,]+ in a shard, and ssd\.shards is 1: choose ssd\.shards: \d+ or more, or table\.index: group",
                     refused.output), refused.output
    assert not run.path.exists()
    # Who goes on with a run has them already, or not.
    run = harness.Run(terrace, workspace, jobs.tiny([log]), "goes_on", **{"table.index": "key", "training.max_examples": 1024})
    run.train().expect(0)
    run.train("--resume", "--set", "training.max_examples=2000", "--set", "table.expected_keys=100000000000").expect(0)


def test_the_first_rate_after_a_resume_is_of_this_process(terrace, workspace, log):
    run = interrupted(terrace, workspace, log, **{"metrics.every_examples": 3000})
    before, lines = run.summary()["examples"], len(run.metrics())
    run.train("--resume", "--set", f"training.max_examples={before + 20_000}").expect(0)
    first = next(line for line in run.metrics()[lines:] if line["kind"] == "interval")
    performance = first["performance"]
    examples = performance["examples_per_second"] * performance["interval_seconds"]
    assert examples <= (first["examples"] - before) * 1.001, (examples, first["examples"], before)


def test_results_as_json_carry_a_version(terrace, finished, log, workspace):
    evaluated = json.loads(terrace.text("evaluate", finished.path, "--data", log, "--json"))
    assert list(evaluated)[0] == "format_version" and evaluated["format_version"] == 1
    assert {"examples", "auc", "logloss", "ne", "calibration", "bad_lines"} <= set(evaluated)
    generated = json.loads(terrace.text("generate", "--rows", 10, "--output", workspace / "x.tsv", "--json"))
    assert generated["format_version"] == 1
    parts = {(): "tables", ("--digest",): "digest", ("--dense",): "dense", ("--key", "C1=1"): "rows",
             ("--verify",): "findings", ("--dense", "--digest"): "dense", ("--repair",): "findings"}
    for arguments, member in parts.items():
        shown = json.loads(terrace.text("inspect", finished.path, *arguments, "--json"))
        assert list(shown)[0] == "format_version" and shown["format_version"] == 1, arguments
        assert member in shown and ("--digest" not in arguments or shown["digest"] == finished.digest())


def test_help(terrace):
    for command in ((), ("train",), ("evaluate",), ("predict",), ("inspect",), ("generate",)):
        assert "--help" in terrace.text(*command, "--help")
    words = " ".join(terrace.text("--help").split())
    assert ("130 interrupted (train: after a checkpoint, or before the run began; another signal at least a second later "
            "ends it at once, with 1)") in words, words


def test_wrong_arguments(terrace, workspace):
    for arguments in (["nonsense"], ["train"], ["train", workspace / "none.yaml"], ["evaluate"],
                      ["train", workspace / "none.yaml", "--nonsense"]):
        terrace(*arguments, log=workspace / "log").expect(2)


def amplification(terrace, run):
    """Of bytes: what was written over the records, with their key entries, that were to be."""
    row_bytes = json.loads(terrace.text("inspect", run.path, "--json"))["tables"][0]["row_bytes"]
    wear = run.summary()["ssd"]["run"]
    return wear["write_bytes"] / (wear["rows_written"] * ((row_bytes + 7) // 8 * 8 + 24 + 16))


def test_write_amplification_by_group_is_of_bytes(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"table.index": "group", "table.expected_keys": 20_000})
    run.train().expect(0)
    told = run.summary()["ssd"]["run"]["write_amplification"]
    assert told == pytest.approx(amplification(terrace, run))
    lines = [line["performance"]["ssd"]["run"] for line in run.metrics()]
    assert lines[-1]["write_amplification"] > 1
    inspected = json.loads(terrace.text("inspect", run.path, "--json"))["ssd"]["run"]
    # The manifests of a checkpoint are written after its count.
    assert inspected["write_amplification"] == pytest.approx(told, rel=0.1)
    text = terrace.text("inspect", run.path)
    assert f"write amplification {inspected['write_amplification']:.2f}" in text, text


def test_summary(terrace, finished):
    summary = finished.summary()
    assert summary["format_version"] == 2
    assert summary["examples"] == 2000
    for name in ("seconds", "cpu_seconds", "examples_per_second", "rows", "model_bytes"):
        assert summary[name] > 0
    for name in ("progressive", "validation"):
        assert {"auc", "logloss", "ne", "calibration"} <= set(summary[name])
    assert {"budget_bytes", "peak_bytes", "index_bytes_per_key"} <= set(summary["memory"])
    assert {"hits", "misses", "evictions"} <= set(summary["cache"])
    assert {"read_bytes", "write_bytes", "live_bytes", "disk_bytes", "checkpoint_only_bytes", "stale_bytes"} <= set(summary["ssd"])
    run = summary["ssd"]["run"]
    assert run["write_bytes"] == summary["ssd"]["write_bytes"] > 0
    assert run["write_amplification"] == pytest.approx(amplification(terrace, finished))
    assert set(summary["stages"]) == {"read", "pull", "stage", "train", "write_back"}
    for stage in summary["stages"].values():
        assert {"busy_seconds", "waited_for_input_seconds", "waited_for_output_seconds", "cpu_seconds"} <= set(stage)
        assert stage["busy_seconds"] > 0 and stage["cpu_seconds"] > 0


def test_metrics_lines(finished):
    lines = finished.metrics()
    assert lines and all(line["format_version"] == 2 for line in lines)


def test_epochs_of_metrics(terrace, workspace, log):
    """Of the example that comes next, as docs/formats/metrics.md says."""
    job = jobs.tiny([log], [log], data={"format": "criteo", "train": [str(log)], "validation": [str(log)], "epochs": 2})
    run = harness.Run(terrace, workspace, job, **{"metrics.every_examples": 1000})
    run.train().expect(0)
    assert [(line["kind"], line["examples"], line["epoch"]) for line in run.metrics()] == [
        ("interval", 1024, 0), ("interval", 2000, 1), ("validation", 2000, 1),
        ("interval", 3024, 1), ("interval", 4000, 2), ("validation", 4000, 2)]


def test_the_last_interval_tells_as_much_as_any(terrace, workspace, log):
    """It is shorter than the others, and its rows are written by the final checkpoint."""
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"metrics.every_examples": 1500})
    run.train().expect(0)
    lines = run.metrics()
    assert [line["examples"] for line in lines] == [1536, 2000] and lines[-1]["window"]["examples"] == 464
    for line in lines:
        channels = line["performance"]["channels"]
        assert [channel["name"] for channel in channels] == ["read", "pull", "stage"]
        assert all(channel["capacity"] > 0 for channel in channels), channels
    stages, whole = [line["performance"]["stages"] for line in lines], run.summary()["stages"]
    assert stages[-1]["write_back"]["busy_seconds"] > 0
    for name, stage in whole.items():
        assert math.isclose(sum(part[name]["busy_seconds"] for part in stages), stage["busy_seconds"], rel_tol=1e-3), name


def test_job_of_ten_lines(terrace, workspace, log):
    job = workspace / "job.yaml"
    job.write_text(f"output: {workspace}/run\ndata: {{train: [{log}]}}\nmemory: {{budget: 512MiB}}\n")
    terrace("train", job, log=workspace / "log").expect(0)


def test_set_overrides(terrace, finished, workspace, log):
    outcome = terrace("train", finished.job_path, "--set", f"output={workspace}/run", "--set", "training.max_examples=512",
                      log=workspace / "log").expect(0)
    summary = json.loads((workspace / "run/summary.json").read_text())
    assert summary["examples"] == 512, outcome.output


@pytest.mark.parametrize("text, words", [
    ("trainning: {batch: 512}\n", ["2", "trainning", "training"]),
    ("training: {batchsize: 512}\n", ["2", "batchsize", "batch"]),
    ("training: {batch: many}\n", ["2", "training.batch"]),
    ("training: {batch: 1000, minibatch: 512}\n", ["minibatch"]),
    ("training: {threads: 0}\nnetwork: {hidden: [0]}\n", ["training.threads", "network.hidden"]),
])
def test_wrong_job(terrace, workspace, log, text, words):
    job = workspace / "job.yaml"
    job.write_text(f"data: {{train: [{log}]}}\n{text}output: {workspace}/run\n")
    outcome = terrace("train", job, log=workspace / "log").expect(2)
    for word in words:
        assert word in outcome.output, outcome.output
    assert not (workspace / "run").exists(), "refused before anything is made"


@pytest.mark.parametrize("wrong, word", [("ssd.quota=10MiB", "ssd.quota"), ("memory.budget=24MiB", "memory.budget")])
def test_a_rejected_job_leaves_nothing(terrace, workspace, log, wrong, word):
    job = jobs.tiny([log])
    job["ssd"] = {"paths": [str(workspace / "disks" / "a")]}
    run = harness.Run(terrace, workspace, job, output=str(workspace / "runs" / "run"))
    run.path = workspace / "runs" / "run"
    for flag in ("--log-level=info", "--overwrite", "--resume"):
        outcome = run.train(flag, "--set", wrong).expect(2)
        assert word in outcome.output, outcome.output
        assert not (workspace / "runs").exists() and not (workspace / "disks").exists()
    run.path.mkdir(parents=True)
    run.train("--set", wrong)
    assert list(run.path.iterdir()) == []
    run.train("--test-faults", "write:1:enospc:job.yaml").expect(1)
    assert list(run.path.iterdir()) == []
    run.train().expect(0)
    digest = run.digest()
    run.train("--overwrite", "--set", wrong)
    assert run.digest() == digest, "a job that is rejected deletes no run"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("which", ["train", "validation"])
@pytest.mark.parametrize("shuffle", ["none", "examples"])
def test_an_archive_that_is_damaged_deletes_no_run(terrace, workspace, log, suffix, which, shuffle):
    """What is looked at of each file is whole; the first piece that is read for training is not."""
    text = workspace / "log.tsv"
    text.write_bytes(log.read_bytes())
    archive = harness.compress(text, suffix)
    whole = archive.read_bytes()
    job = jobs.tiny(*(([archive], [log]) if which == "train" else ([log], [archive])), memory={"budget": "1GiB"})
    run = harness.Run(terrace, workspace, job, **{"data.shuffle": shuffle})
    run.train().expect(0)
    digest = run.digest()
    archive.write_bytes(whole[:len(whole) * 9 // 10])
    outcome = run.train("--overwrite").expect(1)
    assert f"{archive}: byte" in outcome.output and "before anything is deleted" in outcome.output, outcome.output
    assert run.verify() and run.digest() == digest
    archive.write_bytes(whole)
    run.train("--overwrite").expect(0)
    assert run.digest() == digest


def test_a_copy_touches_no_rows_of_the_run(terrace, workspace, log):
    """Rows on ssd.paths belong to one run folder: not to what cp -r makes of it, but to what mv makes."""
    job = jobs.tiny([log])
    job["ssd"] = {"paths": [str(workspace / "disk")]}
    run = harness.Run(terrace, workspace, job, name="a")
    run.train("--test-kill-at", "checkpoint.before_publish:2").expect(-signal.SIGKILL)
    digest = run.digest()
    copy = harness.Run(terrace, workspace, job, name="b")
    harness.copy_run(run.path, copy.path)
    for flag in ("--overwrite", "--resume"):
        outcome = copy.train(flag).expect(2)
        assert f"'{copy.path}' is a copy of the run folder '{run.path}'" in outcome.output, outcome.output
    terrace("inspect", copy.path, "--repair", "--yes", log=workspace / "log").expect(2)
    assert run.verify() and run.digest() == digest == copy.digest()
    # Moved, it goes on with its rows, and the copy is one of it.
    moved = harness.Run(terrace, workspace, job, name="c")
    run.path.rename(moved.path)
    moved.train("--resume").expect(0)
    assert moved.verify() and moved.digest() != digest
    outcome = copy.train("--overwrite").expect(2)
    assert f"a copy of the run folder '{moved.path}'" in outcome.output, outcome.output
    moved.train("--overwrite").expect(0)
    assert len(list((workspace / "disk").iterdir())) == 1


@pytest.mark.parametrize("file", ["RUN", "checkpoints/checkpoint-", "dense/dense-", "/manifest-", "metrics.jsonl"])
def test_a_read_that_errs_once_costs_no_checkpoint(terrace, workspace, log, file):
    job = jobs.tiny([log], checkpoint={"every_batches": 1, "keep": 2}, metrics={"every_examples": 256})
    run = harness.Run(terrace, workspace, job)
    run.train("--test-kill-at", "checkpoint.before_publish:3").expect(-signal.SIGKILL)
    newest = int(run.checkpoints()[-1].split("-")[1])
    path = f"{file}{newest:08}" if file.endswith("-") else file
    outcome = run.train("--resume", "--test-faults", f"read:1:flip:{path}").expect(0)
    assert f"resuming from checkpoint {newest} " in outcome.output, outcome.output
    assert "read wrongly once" in outcome.output and "left out" not in outcome.output, outcome.output
    undisturbed = harness.Run(terrace, workspace, job, name="undisturbed")
    undisturbed.train().expect(0)
    harness.assert_same(undisturbed.result(), run.result(), path)


def test_lines_that_are_rejected_leave_nothing(terrace, workspace, log):
    lines = log.read_text().splitlines(True)
    data = workspace / "data.tsv"
    data.write_text("".join(lines[:20]) + "bad\n" * 2000)
    run = harness.Run(terrace, workspace, jobs.tiny([data]))
    outcome = run.train().expect(2)
    assert "lines are bad" in outcome.output, outcome.output
    assert not run.path.exists()


def test_bad_lines_further_on_fail_the_run(terrace, workspace, log):
    """The job was right; what it had trained stays."""
    data = workspace / "data.tsv"
    data.write_text(log.read_text() + "bad\n" * 2000)
    run = harness.Run(terrace, workspace, jobs.tiny([data]), **{"pipeline.depth": 0, "checkpoint.every_batches": 1})
    outcome = run.train().expect(1)
    assert "training stopped at example" in outcome.output and "lines are bad" in outcome.output, outcome.output
    assert run.checkpoints()
    run.train("--resume", "--set", "data.max_bad_fraction=0.6").expect(0)
    assert run.summary()["examples"] == 2000


def stopped_by(run, words, *flags):
    """The examples at which a run has stopped, with a checkpoint of all of them."""
    output = run.train(*flags).expect(1).output
    assert words in output, output
    examples = int(re.search(r"training stopped at example (\d+): ", output).group(1))
    assert f"a checkpoint at example {examples} holds all that was trained" in output, output
    return examples


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("damage", ["cut", "flipped", "bad lines"])
def test_what_came_before_damage_of_the_log_is_kept(terrace, workspace, log, damage, depth):
    """It is trained and saved, and with the log mended the run ends as if nothing had been."""
    suffix = ".tsv" if damage == "bad lines" else ".tsv.zst"
    lines = log.read_text().splitlines(True) * 8
    whole, data = workspace / "whole.tsv", workspace / f"data{suffix}"
    whole.write_text("".join(lines))
    job = jobs.tiny([data], checkpoint={"every_batches": 0, "keep": 2})
    job["pipeline"] = {"depth": depth}
    undisturbed = harness.Run(terrace, workspace, {**job, "data": {**job["data"], "train": [str(whole)]}}, name="undisturbed")
    undisturbed.train().expect(0)
    if damage == "bad lines":
        data.write_text("".join(lines[:7000]) + "bad\n" * 1000 + "".join(lines[7000:]))
        words = "of 7,071 lines are bad"
    else:
        content = bytearray(harness.compress(whole, suffix).read_bytes())
        words = "ends too early"
        if damage == "flipped":
            at = len(content) * 2 // 3
            content[at:at + 64] = bytes(64)
            words = f"{data}: byte "
        data.write_bytes(content[:len(content) * 2 // 3] if damage == "cut" else content)
    run = harness.Run(terrace, workspace, job)
    examples = stopped_by(run, words)
    assert examples == (7000 // 128 * 128 if damage == "bad lines" else examples // 128 * 128) > 2000
    assert len(run.checkpoints()) == 1 and run.verify()
    # What has been saved is not saved again.
    outcome = run.train("--resume").expect(1)
    assert f"training stopped at example {examples}: " in outcome.output and "Checkpoint 1 is intact" in outcome.output, outcome.output
    assert len(run.checkpoints()) == 1
    run.train("--resume", "--accept", "data", "--set", f"data.train=[{whole}]").expect(0)
    harness.assert_same(undisturbed.result(), run.result(), f"{damage}, depth {depth}")


def test_damage_of_the_validation_data_costs_nothing(terrace, workspace, log):
    validation = workspace / "validation.tsv"
    validation.write_text(log.read_text())
    job = jobs.tiny([log], [validation], checkpoint={"every_batches": 0, "keep": 2}, validation={"every_examples": 1024})
    undisturbed = harness.Run(terrace, workspace, job, name="undisturbed")
    undisturbed.train().expect(0)
    validation.write_text(log.read_text() + "bad\n" * 1000)
    run = harness.Run(terrace, workspace, job)
    assert stopped_by(run, "validation: ") == 1024
    validation.write_text(log.read_text())
    run.train("--resume").expect(0)
    harness.assert_same(undisturbed.result(), run.result(), "validation mended")


def test_damage_of_the_validation_data_at_the_last_example(terrace, workspace, log):
    """That a run is to end there is no reason to end it well; a validation that failed may be given up."""
    validation = workspace / "validation.tsv"
    validation.write_text(log.read_text())
    job = jobs.tiny([log], [validation], checkpoint={"every_batches": 0, "keep": 2})
    job["training"]["max_examples"] = 1024
    undisturbed = harness.Run(terrace, workspace, job, name="undisturbed")
    undisturbed.train().expect(0)
    validation.write_text(log.read_text() + "bad\n" * 1000)
    run = harness.Run(terrace, workspace, job)
    assert stopped_by(run, "validation: ") == 1024
    assert "validation: " in run.train("--resume").expect(1).output
    harness.copy_run(run.path, workspace / "given up")
    validation.write_text(log.read_text())
    run.train("--resume").expect(0)
    harness.assert_same(undisturbed.result(), run.result(), "validation mended")
    harness.remove(run.path)
    harness.copy_run(workspace / "given up", run.path)
    run.train("--resume", "--set", "data.validation=[]").expect(0)
    assert run.summary()["finished"] and run.digest() == undisturbed.digest()


@pytest.mark.parametrize("depth", [0, 2])
def test_what_came_before_an_overflow_is_kept(terrace, workspace, log, depth):
    job = jobs.tiny([log], checkpoint={"every_batches": 0, "keep": 2})
    job["network"] = {"type": "dnn", "hidden": [16] * 5, "optimizer": {"type": "sgd", "learning_rate": 1e6}}
    job["table"]["optimizer"] = {"type": "sgd", "learning_rate": 1e6}
    job["pipeline"] = {"depth": depth}
    run = harness.Run(terrace, workspace, job)
    examples = stopped_by(run, "nothing of it was applied")
    assert examples > 0
    ended = harness.Run(terrace, workspace, job, name="ended", **{"training.max_examples": examples})
    ended.train().expect(0)
    assert run.digest() == ended.digest() and run.verify()


def test_damaged_rows_are_not_saved(terrace, workspace, logs):
    """What is wrong with the run's own files is no matter of the log: nothing is written over what was sound."""
    job = jobs.interrupted([logs.criteo(jobs.INTERRUPTED_ROWS, **jobs.EVICTING_LOG)])
    run = harness.Run(terrace, workspace, job)
    run.train("--test-kill-at", "checkpoint.before_publish:4").expect(-signal.SIGKILL)
    before = {name: (run.path / "checkpoints" / name).read_bytes() for name in run.checkpoints()}
    outcome = run.train("--resume", "--set", "checkpoint.every_batches=0", "--test-faults", "read:20+:flip:rows-").expect(1)
    assert "--repair" in outcome.output and "holds all that was trained" not in outcome.output, outcome.output
    assert {name: (run.path / "checkpoints" / name).read_bytes() for name in run.checkpoints()} == before
    run.train("--resume").expect(0)
    run.verify()


def test_missing_input(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log, workspace / "gone.tsv"]))
    outcome = run.train().expect(2)
    assert "gone.tsv" in outcome.output, outcome.output
    assert not list(run.path.glob("rows*")) if run.path.exists() else True


def test_existing_run_is_refused(finished):
    before = finished.digest()
    outcome = finished.train().expect(2)
    assert "--resume" in outcome.output and "--overwrite" in outcome.output, outcome.output
    assert finished.digest() == before


def test_overwrite(terrace, workspace, log, finished):
    run = harness.Run(terrace, workspace, jobs.tiny([log], [log]))
    run.train().expect(0)
    run.train("--overwrite").expect(0)
    assert run.digest() == finished.digest()


def test_overwrite_spares_foreign_folders(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    run.path.mkdir()
    (run.path / "thesis.txt").write_text("mine")
    run.train("--overwrite").expect(2)
    assert (run.path / "thesis.txt").read_text() == "mine"


def test_resume_without_a_run_starts_it(terrace, workspace, log, finished):
    run = harness.Run(terrace, workspace, jobs.tiny([log], [log]))
    assert "no checkpoint to go on from: the run begins" in run.train("--resume").expect(0).output
    assert run.digest() == finished.digest()


@pytest.mark.parametrize("settings, line", [
    ({}, "stale to more than 33 %, when all together are; they take up to 1.50 times the space of the rows, and in each shard two files "),
    ({"ssd.compaction": "stale_share", "ssd.stale_share": 0.5}, "stale to more than 50 %; they take up to 2.00 times"),
    ({"ssd.compaction": "model_size", "ssd.quota": "1GiB"}, "while the run holds more than 942.08 MiB on disk"),
])
def test_compaction_is_told(terrace, workspace, log, settings, line):
    outcome = harness.Run(terrace, workspace, jobs.tiny([log]), **settings).train().expect(0)
    assert "compaction: of files that are " in outcome.output and line in outcome.output, outcome.output


def test_what_was_written_counts_over_resumes(terrace, workspace, log):
    """Each process goes on from what its checkpoint says; inspect tells it too."""
    run = interrupted(terrace, workspace, log, **{"ssd.rated_writes": "1GB"})
    first = run.summary()["ssd"]["run"]
    view = json.loads(terrace.text("inspect", run.path, "--json"))
    assert 0 < view["ssd"]["run"]["write_bytes"] <= first["write_bytes"]
    assert view["tables"][0]["checkpoint_only_bytes"] >= 0 and view["tables"][0]["stale_bytes"] >= 0
    text = terrace.text("inspect", run.path)
    for drive in view["ssd"]["drives"]:  # None where the folder lies in memory.
        assert ("unknown" in drive) != ("percentage_used" in drive)
        assert f"drive {drive['device']}" in text, text
    examples = run.summary()["examples"]
    outcome = run.train("--resume", "--set", f"training.max_examples={examples + 2000}").expect(0)
    ssd = run.summary()["ssd"]
    # The manifests of a checkpoint are written after its count.
    counted = view["ssd"]["run"]["write_bytes"]
    assert ssd["run"]["write_bytes"] == counted + ssd["write_bytes"] > ssd["write_bytes"] > 0
    assert ssd["run"]["rows_written"] > first["rows_written"]
    assert ssd["rated_write_bytes"] == 10**9 and "% of the" in outcome.output, outcome.output


def test_resume_of_a_finished_run(finished):
    before = finished.result()
    outcome = finished.train("--resume").expect(0)
    assert "finished" in outcome.output or "done" in outcome.output, outcome.output
    assert finished.result() == before


def test_a_run_that_ended_at_max_examples_goes_on(terrace, workspace, log):
    whole = harness.Run(terrace, workspace, jobs.tiny([log], [log]), "whole")
    whole.train().expect(0)
    run = harness.Run(terrace, workspace, jobs.tiny([log], [log]))
    run.train("--set", "training.max_examples=1000").expect(0)
    for same in ("1000", "900"):
        assert "is finished" in run.train("--resume", "--set", f"training.max_examples={same}").expect(0).output
    run.train("--resume", "--set", "training.max_examples=1500").expect(0)
    assert 1500 <= run.summary()["examples"] < 1500 + 128
    run.train("--resume").expect(0)
    assert run.digest() == whole.digest()
    assert run.summary()["validation"] == whole.summary()["validation"]
    assert "is finished" in run.train("--resume").expect(0).output


def test_a_batch_that_nobody_set_suits_the_minibatch(terrace, workspace, log):
    job = jobs.tiny([log], training={"minibatch": 100, "threads": 2})
    run = harness.Run(terrace, workspace, job)
    run.train().expect(0)
    assert "batch: 65600" in (run.path / "job.yaml").read_text()


def test_a_finished_run_needs_neither_its_log_nor_its_memory(terrace, workspace, log):
    data = workspace / "log.tsv"
    data.write_bytes(log.read_bytes())
    run = harness.Run(terrace, workspace, jobs.tiny([data]))
    run.train().expect(0)
    small = ("--resume", "--set", "memory.budget=24MiB")
    assert "is finished" in run.train(*small).expect(0).output
    outcome = run.train(*small, "--set", "seed=12").expect(2)
    assert "seed: the run has '11', the job now '12'" in outcome.output and "24.00 MiB" in outcome.output, outcome.output
    data.unlink()
    for flags in (("--resume",), small):
        outcome = run.train(*flags).expect(0)
        assert "is finished" in outcome.output and "was not looked at" in outcome.output, outcome.output
    # Without its summary it is not done yet.
    (run.path / "summary.json").unlink()
    assert str(data) in run.train("--resume").expect(2).output


def test_resume_of_a_finished_run_with_another_seed_is_refused(finished):
    outcome = finished.train("--resume", "--set", "seed=12").expect(2)
    assert "seed" in outcome.output and "11" in outcome.output and "12" in outcome.output, outcome.output


@pytest.mark.parametrize("shuffle", ["none", "files", "examples"])
@pytest.mark.parametrize("change", ["moved", "compressed", "mended"])
def test_resume_with_a_log_that_was(terrace, workspace, log, change, shuffle):
    """Accepted once, the new files are the run's, and its bits those of a run that had them from the start."""
    parts = [workspace / f"part{number}.tsv" for number in range(3)]
    lines = log.read_text().splitlines(True)
    for number, part in enumerate(parts):
        part.write_text("".join(lines[number * 600:(number + 1) * 600]))
    job = jobs.tiny(parts, checkpoint={"every_batches": 1, "keep": 2})
    job["data"].update(epochs=3, shuffle=shuffle, shuffle_window=200)
    undisturbed = harness.Run(terrace, workspace, job, name="undisturbed")
    undisturbed.train().expect(0)
    run = harness.Run(terrace, workspace, job)
    run.train("--test-kill-at", "checkpoint.before_publish:5").expect(-signal.SIGKILL)
    (workspace / "moved").mkdir()
    files = [workspace / "moved" / part.name for part in parts]
    if change == "compressed":
        files = [harness.compress(part, ".tsv.zst") for part in parts]
    for part, file in zip(parts, files):
        if change != "compressed":
            # Examples are counted without bad lines, behind which bytes lie elsewhere.
            file.write_text(("bad\n" * 3 if change == "mended" else "") + part.read_text())
        part.unlink()
    new = ("--resume", "--set", f"data.train=[{','.join(map(str, files))}]")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "LOCK"}
    refused = run.train(*new).expect(2).output
    assert f"data files: the run has '{parts[0]}:" in refused and "--accept data" in refused, refused
    run.train(*new, "--accept", "threads").expect(2)
    assert {path: path.read_bytes() for path in before} == before
    outcome = run.train(*new, "--accept", "data", "--test-kill-at", "checkpoint.before_publish:2").expect(-signal.SIGKILL)
    assert "accepted: what the run has read" in outcome.output and "resuming from checkpoint 4" in outcome.output, outcome.output
    # The checkpoint since then has the new list.
    run.train(*new).expect(0)
    results = [undisturbed.result(), run.result()]
    for result in results:
        bad = [line.pop("bad_lines", 0) for line in result["metrics"]]
        assert any(bad) == (change == "mended" and result is results[1])
    harness.assert_same(*results, f"{change}, {shuffle}")
    run.verify()


def test_accepted_files_must_have_the_position(terrace, workspace, log):
    lines = log.read_text().splitlines(True)
    data, short, split = workspace / "data.tsv", workspace / "short.tsv", [workspace / "a.tsv", workspace / "b.tsv"]
    data.write_bytes(log.read_bytes())
    short.write_text("".join(lines[:1500]))
    split[0].write_text("".join(lines[:700]))
    split[1].write_text("".join(lines[700:]))
    job = jobs.tiny([data], checkpoint={"every_batches": 1, "keep": 2})
    undisturbed = harness.Run(terrace, workspace, job, name="undisturbed")
    undisturbed.train().expect(0)
    run = harness.Run(terrace, workspace, job)
    run.train("--test-kill-at", "checkpoint.before_publish:4").expect(-signal.SIGKILL)
    digest = run.digest()
    accept = ("--resume", "--accept", "data", "--set")
    outcome = run.train(*accept, f"data.train=[{short}]").expect(2)
    assert "--accept data: the data has only 1,500 examples in an epoch, fewer than the 1,536" in outcome.output, outcome.output
    assert "data: the run has" in run.train(*accept, f"data.train=[{short}]", "--set", "data.epochs=2").expect(2).output
    assert run.digest() == digest and run.verify()
    killed = workspace / "killed"
    harness.copy_run(run.path, killed)
    parts = f"data.train=[{split[0]},{split[1]}]"
    run.train(*accept, parts).expect(0)
    harness.assert_same(undisturbed.result(), run.result(), "split")
    # A checkpoint of the new files before one of their examples is trained.
    harness.remove(run.path)
    harness.copy_run(killed, run.path)
    run.train(*accept, parts, "--set", "training.max_examples=1536").expect(0)
    run.train("--resume", "--set", parts).expect(0)
    assert run.digest() == undisturbed.digest(), "split, with a checkpoint at once"
    shuffled = harness.Run(terrace, workspace, job, name="shuffled", **{"data.shuffle": "files"})
    shuffled.train("--test-kill-at", "checkpoint.before_publish:4").expect(-signal.SIGKILL)
    outcome = shuffled.train(*accept, f"data.train=[{split[0]},{split[1]}]").expect(2)
    assert "the run has 1 files and the job now 2" in outcome.output, outcome.output


def test_resume_with_another_seed_is_refused(terrace, workspace, log):
    run = interrupted(terrace, workspace, log)
    outcome = run.train("--resume", "--set", "seed=12").expect(2)
    assert "seed" in outcome.output and "11" in outcome.output and "12" in outcome.output, outcome.output


def test_evaluate(terrace, finished, log):
    result = json.loads(terrace.text("evaluate", finished.path, "--data", log, "--json"))
    assert result["examples"] == 2000
    validation = finished.summary()["validation"]
    for name in ("auc", "logloss", "ne", "calibration"):
        assert result[name] == validation[name], f"{name}: evaluate differs from the run's own validation"


def test_predict(terrace, finished, log, workspace):
    lines = log.read_text().splitlines(True)
    lines[3] = "not a click\n"
    data, output = workspace / "data.tsv", workspace / "predictions.txt"
    data.write_text("".join(lines))
    outcome = terrace("predict", finished.path, "--data", data, "--output", output, log=workspace / "log").expect(0)
    assert "bad lines that got nan: 1\n" in outcome.output, outcome.output
    assert json.loads(terrace.text("evaluate", finished.path, "--data", data, "--json"))["bad_lines"] == 1
    assert "bad lines       1\n" in terrace.text("evaluate", finished.path, "--data", data)
    predictions = [float(p) for p in output.read_text().split()]
    assert len(predictions) == len(lines)
    assert [i for i, p in enumerate(predictions) if math.isnan(p)] == [3]
    assert all(0 < p < 1 for i, p in enumerate(predictions) if i != 3)
    for suffix, decompress in ((".gz", ["gzip", "-dc"]), (".zst", ["zstd", "-dcq"])):
        archive = workspace / f"predictions.txt{suffix}"
        terrace("predict", finished.path, "--data", data, "--output", archive, log=workspace / "log").expect(0)
        assert subprocess.run([*decompress, archive], check=True, capture_output=True).stdout == output.read_bytes()
    labels = [int(line[0]) for i, line in enumerate(lines) if i != 3]
    logloss = -sum(math.log(p if y else 1 - p) for p, y in
                   zip((p for p in predictions if not math.isnan(p)), labels)) / len(labels)
    assert abs(logloss - finished.summary()["validation"]["logloss"]) < 1e-3


def test_predict_writes_no_line_for_a_header(terrace, finished, log, workspace):
    """A probability for each line of data; files follow each other."""
    lines = log.read_text().splitlines(True)[:50]
    header = "\t".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]) + "\n"
    plain, headed, output = workspace / "plain.tsv", workspace / "headed.tsv", workspace / "p.txt"
    plain.write_text("".join(lines))
    headed.write_text(header + "".join(lines[:20]) + "not a click\n" + "".join(lines[20:]))

    def predictions(*data):
        terrace.text("predict", finished.path, "--data", *data, "--output", output)
        return output.read_text().splitlines()
    expected = predictions(plain)
    assert len(expected) == 50
    of_headed = expected[:20] + ["nan"] + expected[20:]
    assert predictions(headed) == of_headed
    assert predictions(headed, plain, headed) == of_headed + expected + of_headed


def test_predict_needs_a_label_column(terrace, finished, log, workspace):
    unlabelled, prose = workspace / "unlabelled.tsv", workspace / "prose.txt"
    unlabelled.write_text("".join(line.split("\t", 1)[1] for line in log.read_text().splitlines(True)))
    prose.write_text("no click log\nat all\n")
    for data in (unlabelled, prose):
        outcome = terrace("predict", finished.path, "--data", data, "--output", workspace / "p.txt",
                          log=workspace / "log").expect(2)
        assert f"{data}:1" in outcome.output and "any 0 or 1 will do" in outcome.output, outcome.output
        assert not (workspace / "p.txt").exists()


def test_readers_write_nothing(terrace, finished, log, workspace):
    def state():
        return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in finished.path.rglob("*"))
    before = state()
    terrace.text("evaluate", finished.path, "--data", log)
    terrace.text("predict", finished.path, "--data", log, "--output", workspace / "p.txt")
    terrace.text("inspect", finished.path, "--digest")
    terrace.text("inspect", finished.path, "--verify")
    assert state() == before


def test_inspect(terrace, finished):
    assert len(finished.digest()) >= 16
    finished.verify()
    overview = json.loads(terrace.text("inspect", finished.path, "--json"))
    assert overview["checkpoint"] == overview["checkpoints"][-1] and overview["finished"]


def test_verify_finds_a_flipped_bit(terrace, finished, workspace):
    copy = workspace / "run"
    harness.copy_run(finished.path, copy)
    rows = max((p for p in copy.rglob("*") if p.is_file() and "shard" in str(p)), key=lambda p: p.stat().st_size)
    data = bytearray(rows.read_bytes())
    data[len(data) // 2] ^= 0x10
    rows.write_bytes(data)
    outcome = terrace("inspect", copy, "--verify", log=workspace / "log").expect(1)
    assert rows.name in outcome.output, outcome.output


def test_another_figure_in_the_metrics_is_found(terrace, workspace, log):
    """A line that is still a line: by the checkpoint's checksum, when verified and before a resume appends to it."""
    run = interrupted(terrace, workspace, log)
    run.verify()
    path = run.path / "metrics.jsonl"
    lines = run.metrics()
    path.write_text(path.read_text().replace(f'"examples":{lines[1]["examples"]},', f'"examples":{lines[1]["examples"] + 1},', 1))
    changed = path.read_bytes()
    outcome = terrace("inspect", run.path, "--verify", log=workspace / "log").expect(1)
    assert "metrics.jsonl" in outcome.output and "checksum" in outcome.output, outcome.output
    further = ("--resume", "--set", f"training.max_examples={run.summary()['examples'] + 3000}")
    outcome = run.train(*further).expect(1)
    assert "metrics.jsonl" in outcome.output and "--repair" in outcome.output, outcome.output
    assert path.read_bytes() == changed
    outcome = terrace("inspect", run.path, "--repair", "--yes", log=workspace / "log").expect(0)
    assert "takes metrics.jsonl as it is" in outcome.output, outcome.output
    run.verify()
    run.train(*further).expect(0)
    run.verify()
    assert path.read_bytes().startswith(changed)


def test_checkpoints_farther_apart_than_all_examples_are_one_at_the_end(terrace, workspace, log):
    """512 times this is 512 once more in 64 bits."""
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"training.batch": 512, "checkpoint.every_batches": 2**55 + 1})
    run.train().expect(0)
    assert run.summary()["checkpoint"] == 1


def test_interrupt(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log], data={"format": "criteo", "train": [str(log)], "epochs": 200}))
    settings = ["--set", "table.initializer={type: uniform, scale: 0.02}", "--set", "checkpoint.keep=3"]
    process = run.start(*settings)
    run.wait_for_metrics(process, 3)
    process.signal(signal.SIGTERM)
    outcome = process.wait().expect(130)
    assert run.checkpoints()
    advice = next(line for line in outcome.output.splitlines() if "go on with: " in line).split("go on with: ")[1]
    assert shlex.split(advice) == [str(terrace.binary), "train", str(run.job_path), *settings, "--resume"]


@pytest.mark.parametrize("stdin", ["pipe", "file"])
def test_what_goes_on_with_a_job_that_came_from_a_pipe(terrace, workspace, log, stdin):
    """What the pipe said comes no second time; what else is given is not forgotten."""
    run = harness.Run(terrace, workspace, jobs.tiny([log], data={"format": "criteo", "train": [str(log)], "epochs": 200}), "the run")
    command = [str(terrace.binary), "train", "/dev/stdin", "--set", "seed=5"]
    with open(run.job_path, "rb") as file, open(workspace / "log", "wb") as output:
        process = subprocess.Popen(command, stdin=file if stdin == "file" else subprocess.PIPE, stdout=output, stderr=output)
        if stdin == "pipe":
            process.stdin.write(run.job_path.read_bytes())
            process.stdin.close()
        deadline = time.monotonic() + harness.PATIENCE_SECONDS
        while process.poll() is None and len(run.metrics()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.wait(harness.PATIENCE_SECONDS) == 130
    told = next(line for line in (workspace / "log").read_text().splitlines() if "go on with: " in line)
    advised = shlex.split(told.split("go on with: ")[1])
    assert advised == [str(terrace.binary), "train", str(run.path / "job.yaml"), "--resume"]
    lines = len(run.metrics())
    process = terrace.start(*advised[1:], log=workspace / "log2")
    run.wait_for_metrics(process, lines + 2)
    process.signal(signal.SIGINT)
    assert "resuming from checkpoint" in process.wait().expect(130).output


def test_the_disk_is_measured_once_and_remembered(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log], data={"format": "criteo", "train": [str(log)], "epochs": 2000}),
                      **{"ssd.merge_gap": "auto"})
    remembered, scratch = run.path / "rows/read-cost", run.path / "rows/read-cost.scratch"

    def interrupted(*flags):
        lines = len(run.metrics())
        process = run.start(*flags)
        run.wait_for_metrics(process, lines + 2)
        process.signal(signal.SIGINT)
        return [line for line in process.wait().expect(130).output.splitlines() if "reads:" in line]

    lines = interrupted()
    assert len(lines) == 1 and "us a request + bytes / " in lines[0], lines
    if "(by default)" in lines[0]:
        pytest.skip(f"what reads cost can't be measured on this disk, or it can't be told from others: {lines[0]}")
    assert "GB/s (measured)" in lines[0] and remembered.exists(), lines
    measured = remembered.read_bytes()
    assert not scratch.exists()
    scratch.write_bytes(b"of a process that was killed")
    assert "(remembered)" in interrupted("--resume")[0]
    assert remembered.read_bytes() == measured and not scratch.exists()
    remembered.write_bytes(measured[:-1])
    assert "(measured)" in interrupted("--resume")[0]
    remembered.unlink()
    scratch.write_bytes(b"again")
    assert "(ssd.merge_gap)" in interrupted("--resume", "--set", "ssd.merge_gap=8KiB")[0]
    assert not remembered.exists() and not scratch.exists()
    # A reader writes nothing into a run.
    terrace.text("evaluate", run.path, "--data", log, "--json")
    assert not remembered.exists() and not scratch.exists()


def test_training_on_a_generated_log_says_what_could_be_reached(terrace, workspace):
    """The oracle of the log that the reader was fed is that of the log as a file."""
    rows = 3000
    job = jobs.tiny([])
    job["data"] = {"format": "synthetic", "rows": rows, "cardinality": 1000, "zipf": 1.05, "log_seed": 5}
    run = harness.Run(terrace, workspace, job)
    output = run.train().expect(0).output
    assert f"An oracle that knows the true probabilities scores on the {rows:,} rows of the log" in output
    oracle = json.loads(terrace.text("generate", "--rows", rows, "--cardinality", 1000, "--zipf", 1.05, "--seed", 5,
                                     "--output", workspace / "x.tsv", "--json"))["oracle"]
    assert f"{oracle['auc']:.5f}" in output and f"{oracle['logloss']:.5f}" in output
    assert "oracle" not in run.train("--overwrite", "--quiet").expect(0).output


def test_generate_is_a_function_of_its_seed(terrace, workspace):
    files = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = workspace / f"{name}.tsv"
        terrace.text("generate", "--rows", 200, "--output", path, "--seed", seed)
        files.append(path.read_bytes())
    assert files[0] == files[1] != files[2]
    lines = files[0].splitlines()
    assert len(lines) == 200 and all(line.count(b"\t") == 39 for line in lines)
