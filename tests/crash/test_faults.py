"""Failing disks: a clear error, no wrong row, and the last checkpoint still resumes."""
import os
import random
import signal
import subprocess

import pytest

import harness
import jobs


@pytest.fixture(scope="module")
def job(logs):
    job = jobs.interrupted([logs.criteo(jobs.INTERRUPTED_ROWS, **jobs.EVICTING_LOG)])
    # The disk is measured too, which must not hide a fault.
    job["ssd"]["merge_gap"] = "auto"
    return job


def test_a_full_disk(terrace, workspace, job, expected):
    """A real file system with no room left: the run stops, and goes on when there is room."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("can't make a mount namespace here")
    disk = workspace / "disk"
    disk.mkdir()
    run = harness.Run(terrace, disk, job)
    # The job file lies on the small disk too; it is written again once that is mounted.
    text = run.job_path.read_text()
    script = f"""
set -u
mount -t tmpfs -o size=4g tmpfs {disk} || exit 99
cat > {run.job_path} <<'JOB'
{text}
JOB
{terrace.binary} train {run.job_path} --test-kill-at checkpoint.after_publish:2 > {workspace}/first.log 2>&1
echo "first $?"
mount -o remount,size=$(( $(df --output=used -B1 {disk} | tail -n 1) + 20000000 )) {disk}
{terrace.binary} train {run.job_path} --resume > {workspace}/full.log 2>&1
echo "full $?"
mount -o remount,size=4g {disk}
{terrace.binary} train {run.job_path} --resume > {workspace}/resumed.log 2>&1
echo "resumed $?"
echo "digest $({terrace.binary} inspect {run.path} --digest)"
"""
    result = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True,
                            stdin=subprocess.DEVNULL, timeout=harness.PATIENCE_SECONDS)
    said = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    full = (workspace / "full.log").read_text()
    assert said["first"] == "137", f"{said}\n{(workspace / 'first.log').read_text()}"
    assert said["full"] == "1", f"{said}\n{full}"
    assert "space" in full.lower() or "quota" in full.lower(), full
    assert str(disk) in full, f"the message names no file:\n{full}"
    assert said["resumed"] == "0", (workspace / "resumed.log").read_text()
    assert said["digest"] == expected["digest"]


# operation, fault, up to which call one is made to fail; and a part of paths, with how many calls there every run of the
# module's job makes, none of which is mended. Elsewhere some are, as the reads that measure the disk.
FAULTS = [
    ("write", "error", 150, "/shard-", 100), ("write", "short_write", 150, "/shard-", 100),
    ("write", "enospc", 150, "/shard-", 100), ("sync", "sync_error", 100, "/shard-", 100),
    ("sync_directory", "sync_error", 40, "/shard-", 12), ("rename", "error", 30, "/manifest-", 12),
    ("rename", "enospc", 30, "/checkpoint-", 6), ("open", "error", 100, "/shard-", 60), ("open", "enospc", 100, "/shard-", 60),
    ("truncate", "error", 10, "/", 1), ("remove", "error", 40, "/shard-", 12),
    ("read", "error", 400, "/shard-", 100), ("read", "short_read", 400, "/shard-", 100), ("read", "flip", 400, "/shard-", 100),
    ("list", "error", 20, "/shard-", 2), ("make_directories", "error", 10, "/shard-", 2), ("lock", "error", 1, "/", 1),
]


def check_fault(terrace, folder, job, expected, spec):
    """Whether the fault was met: the run then ended with a message; either way it resumes to the same bits."""
    run = harness.Run(terrace, folder, job)
    # A click log as text carries no checks: a bit that flips there is another log.
    outcome = run.train("--test-faults", f"{spec}:{run.path}/" if spec.endswith(":flip") else spec)
    unread_job = outcome.code == 2 and "reading the job file" in outcome.output
    assert outcome.code in (0, 1) or unread_job, f"{spec}: exit {outcome.code}\n{outcome.output[-4000:]}"
    if outcome.code != 0:
        errors = [line for line in outcome.output.splitlines() if "error" in line.lower()]
        assert errors, f"{spec}: no message\n{outcome.output[-4000:]}"
        assert any("/" in line for line in errors), f"{spec}: the message names no file\n{outcome.output[-4000:]}"
    run.train("--resume").expect(0)
    harness.assert_same(expected, run.result(), spec)
    run.verify()
    return outcome.code != 0


def test_faults(terrace, workspace, job, expected, sample_seed, full):
    """One call of the disk fails, gives too little, or lies."""
    rng = random.Random(sample_seed)
    faults = FAULTS * (8 if full else 1)
    print(f"--sample-seed {sample_seed}: {len(faults)} faults")
    for number, (operation, fault, last, place, calls) in enumerate(faults):
        # Every other one where none is mended, those of the other parity with the next seed.
        surely = (number + sample_seed) % 2 == 0
        spec = (f"{operation}:{rng.randrange(1, calls + 1)}:{fault}:{place}" if surely else
                f"{operation}:{rng.randrange(1, last + 1)}:{fault}")
        folder = workspace / str(number)
        folder.mkdir()
        met = check_fault(terrace, folder, job, expected, spec)
        print(f"{spec}: {'ended the run' if met else 'did not end it'}")
        # A bit may flip in what no row needs.
        assert met or not surely or fault == "flip", f"{spec} did not end the run"
        harness.remove(folder)


@pytest.mark.parametrize("file", ["dense-", "checkpoint-"])
def test_a_checkpoint_that_fails_is_made_once_more(terrace, workspace, job, expected, file):
    """After an error that passes, what was trained is saved under another number."""
    run = harness.Run(terrace, workspace, job)
    outcome = run.train("--test-faults", f"write:3:error:{file}").expect(1)
    assert "holds all that was trained" in outcome.output and "is not newer" not in outcome.output, outcome.output
    # Of the checkpoint that was not made nothing is left.
    kept = {int(name.split("-")[1]) for name in run.checkpoints()}
    for pattern in ("rows/*/*/manifest-*", "dense/dense-*"):
        named = {int(path.name.split("-")[1]) for path in run.path.glob(pattern)}
        assert named and named <= kept, (pattern, named, kept)
    run.train("--resume").expect(0)
    harness.assert_same(expected, run.result(), f"a write of {file} failed")
    run.verify()
    # Also where the run is to end with it.
    settings = {"training.max_examples": 1024, "checkpoint.every_batches": 2}
    ended = harness.Run(terrace, workspace, job, "ended", **settings)
    outcome = ended.train("--test-faults", f"write:1:error:{file}").expect(1)
    assert "is not newer" not in outcome.output and "training stopped at example 1024" in outcome.output, outcome.output
    ended.train("--resume").expect(0)


def test_a_line_of_metrics_that_fails_takes_no_checkpoint_along(terrace, workspace, job, expected):
    run = harness.Run(terrace, workspace, job)
    outcome = run.train("--test-faults", "write:2:short_write:metrics.jsonl").expect(1)
    assert "holds all that was trained" in outcome.output, outcome.output
    run.train("--resume").expect(0)
    # The interval whose line failed is told with the next one.
    without_lines = {name: value for name, value in expected.items() if name != "metrics"}
    harness.assert_same(without_lines, run.result(), "a write of metrics.jsonl failed")
    run.verify()
    # Nor the last one, after which no other follows.
    run = harness.Run(terrace, workspace, job, "last")
    outcome = run.train("--test-faults", f"write:{len(expected['metrics'])}:enospc:metrics.jsonl").expect(1)
    assert "holds all that was trained" in outcome.output, outcome.output
    run.train("--resume").expect(0)
    harness.assert_same(expected, run.result(), "the last write of metrics.jsonl failed")
    run.verify()


def test_a_validation_whose_interval_fails_is_made_up_for(terrace, workspace, logs):
    """Amid an epoch, at its end, and at that of the run."""
    job = jobs.interrupted([logs.criteo(1536, **jobs.EVICTING_LOG)], [logs.criteo(300, seed=4)], validation={"every_examples": 1024})
    undisturbed = harness.Run(terrace, workspace, job, "undisturbed")
    undisturbed.train().expect(0)
    kinds = [line["kind"] for line in undisturbed.metrics()]
    failing = [number for number, pair in enumerate(zip(kinds, kinds[1:]), 1) if pair == ("interval", "validation")]
    assert len(failing) == 4, kinds

    def validations(run):
        return [harness.without_measurements(line) for line in run.metrics() if line["kind"] == "validation"]
    for number in failing:
        run = harness.Run(terrace, workspace, job, f"run{number}")
        outcome = run.train("--test-faults", f"write:{number}:short_write:metrics.jsonl").expect(1)
        assert "holds all that was trained" in outcome.output, outcome.output
        run.train("--resume").expect(0)
        assert validations(run) == validations(undisturbed)
        assert run.summary()["validation"] == undisturbed.summary()["validation"]


def test_faults_at_a_rate(terrace, workspace, job, expected, sample_seed, full):
    """Any call may fail, more than one of them too."""
    failed = 0
    for number in range(60 if full else 6):
        folder = workspace / str(number)
        folder.mkdir()
        # Files of the run alone: a bit that flips in a click log, which carries no checks, makes another log.
        spec = f"seed={sample_seed + number},rate={(0.0002, 0.001, 0.01)[number % 3]},path={folder}/run/"
        met = check_fault(terrace, folder, job, expected, spec)
        print(f"{spec}: {'ended the run' if met else 'did not end it'}")
        failed += met
        harness.remove(folder)
    assert failed > 0, "no rate was high enough"


@pytest.mark.parametrize("line", [1, 2, -1])
def test_a_line_of_metrics_that_fails(terrace, workspace, job, expected, line):
    """The run that goes on writes it, where it was due."""
    number = line if line > 0 else len(expected["metrics"])
    assert check_fault(terrace, workspace, job, expected, f"write:{number}:enospc:/metrics.jsonl"), "no such line was written"


@pytest.mark.parametrize("index", ["key", "group"])
def test_settings(terrace, workspace, logs, job, sample_seed, full, index):
    """Files of rows fail whatever index, policies and way to read the job has."""
    # By key few files are read unless rows are evicted; by group each write reads the blocks that it changes.
    job = harness.merge(job, {"data.train": [str(logs.criteo({"key": 4000, "group": 1500}[index], **jobs.EVICTING_LOG))]})
    undisturbed = harness.Run(terrace, workspace, job, "undisturbed", **{"memory.budget": jobs.LARGE_BUDGET})
    undisturbed.train().expect(0)
    rng = random.Random(sample_seed)
    for number, settings in enumerate(jobs.tiers(index, sample_seed, None if full else 3)):
        operation, fault, *_ = rng.choice([one for one in FAULTS if one[0] in ("read", "write", "sync")])
        # Elsewhere a fault may be mended by what meets it: reads that measure the disk, for one.
        spec = f"{operation}:{rng.randrange(1, 13)}:{fault}:/shard-"
        print(f"--sample-seed {sample_seed}: {spec} with {settings}")
        folder = workspace / str(number)
        folder.mkdir()
        met = check_fault(terrace, folder, harness.merge(job, settings), undisturbed.result(), spec)
        # A bit may flip in what no row needs.
        assert met or fault == "flip", f"{spec} did not end the run"
        harness.remove(folder)


def test_faults_of_a_resume(terrace, workspace, job, expected, sample_seed, full):
    """Recovery meets a failing disk: it says so, and changes nothing that the next one needs."""
    rng = random.Random(sample_seed + 1)
    run = harness.Run(terrace, workspace, job)
    run.train("--test-kill-at", "checkpoint.before_publish:4").expect(-signal.SIGKILL)
    assert run.checkpoints()
    harness.copy_run(run.path, workspace / "killed")
    # Only files of the run: an unreadable job file is another matter.
    specs = [f"{operation}:{rng.randrange(1, 12)}:{fault}:{run.path}/"
             for operation, fault, *_ in FAULTS for _ in range(4 if full else 1)]
    for spec in specs if full else rng.sample(specs, 8):
        harness.remove(run.path)
        harness.copy_run(workspace / "killed", run.path)
        outcome = run.train("--resume", "--test-faults", spec)
        assert outcome.code in (0, 1), f"{spec}: exit {outcome.code}\n{outcome.output[-4000:]}"
        run.train("--resume").expect(0)
        result, same = run.result(), dict(expected)
        if f"{run.path}/metrics.jsonl'" in outcome.output:
            # An interval whose line can't be written is told with the next: as many examples in fewer lines.
            told, wanted = (sum(line["window"]["examples"] for line in lines if line["kind"] == "interval")
                            for lines in (result["metrics"], same.pop("metrics")))
            assert told == wanted, f"{spec} at the resume: {told:,} examples told of {wanted:,}"
        harness.assert_same(same, result, f"{spec} at the resume")
