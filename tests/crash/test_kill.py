"""kill -9 at any moment loses at most what came after the last checkpoint, and never damages one."""
import random
import signal
import time

import pytest

import harness
import jobs
import sync_points


@pytest.fixture(scope="module")
def job(logs):
    train = logs.criteo(jobs.INTERRUPTED_ROWS, **jobs.EVICTING_LOG)
    validation = logs.criteo(500, seed=4, cardinality=40_000, zipf=0.6)
    return jobs.interrupted([train], [validation], validation={"every_examples": 2048})


@pytest.fixture(scope="module")
def undisturbed(terrace, job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run = harness.Run(terrace, folder, job)
    outcome = run.train("--test-record-sync-points", folder / "points").expect(0)
    summary = run.summary()
    assert summary["cache"]["evictions"] > 0 and summary["ssd"]["read_bytes"] > 0
    return run.result(), outcome.seconds, sorted(set((folder / "points").read_text().split())), newest(run)


def newest(run):
    """The number of the newest checkpoint; 0: none."""
    return max((int(name.split("-")[1]) for name in run.checkpoints()), default=0)


def resume_and_compare(run, expected, what):
    run.train("--resume").expect(0)
    harness.assert_same(expected, run.result(), what)
    run.verify()


def kill_after(run, lines, seconds, *flags):
    """What came of a process that was killed so long after it had so many lines of metrics, if it was still running.
    Lines are the clock of a run, however busy the machine is."""
    process = run.start(*flags)
    run.wait_for_metrics(process, lines)
    since = time.monotonic()
    while process.poll() is None and time.monotonic() - since < seconds:
        time.sleep(0.001)
    process.signal(signal.SIGKILL)
    outcome = process.wait()
    assert outcome.code in (-signal.SIGKILL, 0), outcome.output[-4000:]
    return outcome


def test_moments(terrace, workspace, job, undisturbed, sample_seed, full):
    """At moments uniform over the lines of a run, its start and its end; every third is killed again while it resumes."""
    expected, seconds, _, last = undisturbed
    count = 1000 if full else 50
    rng = random.Random(sample_seed)
    lines = len(expected["metrics"])
    print(f"--sample-seed {sample_seed}: {count} moments over {lines} lines, {seconds:.2f} s")
    shares = [(i + rng.random()) / count for i in range(count)]
    rng.shuffle(shares)
    killed = between = 0
    for number, share in enumerate(shares):
        # As many moments lie before the first line as in two intervals, and as many after the last one.
        place = share * (lines + 3) - 1
        after = min(max(int(place), 0), lines)
        folder = workspace / str(number)
        folder.mkdir()
        run = harness.Run(terrace, folder, job)
        outcome = kill_after(run, after, (seconds / 5 if place < 1 else seconds / lines) * rng.random())
        if outcome.code == -signal.SIGKILL:
            killed += 1
            between += 0 < newest(run) < last
        if number % 3 == 2:
            # The lines since the last checkpoint are gone once it trains.
            kill_after(run, 0, seconds * rng.random(), "--resume")
        resume_and_compare(run, expected, f"killed after {after} lines")
        harness.remove(folder)
    print(f"{killed} killed, {between} between the first and the last checkpoint")
    assert killed >= count // 2, "the kills came too late"
    assert between >= count * 6 // 10, "too few kills between the first and the last checkpoint"


@pytest.mark.parametrize("index", ["key", "group"])
def test_settings(terrace, workspace, logs, sample_seed, full, index):
    """Killed on the way and while it resumes, whatever index, policies and way to read the job has."""
    # By group each write reads the blocks that it changes: fewer rows take as long.
    job = jobs.interrupted([logs.criteo({"key": 4000, "group": 1500}[index], **jobs.EVICTING_LOG)])
    undisturbed = harness.Run(terrace, workspace, job, "undisturbed", **{"memory.budget": jobs.LARGE_BUDGET})
    undisturbed.train().expect(0)
    rng = random.Random(sample_seed)
    for number, settings in enumerate(jobs.tiers(index, sample_seed, None if full else 2)):
        print(f"--sample-seed {sample_seed}: {settings}")
        folder = workspace / str(number)
        folder.mkdir()
        run = harness.Run(terrace, folder, job, **settings)
        lines = rng.randrange(1, len(undisturbed.metrics()) - 2)
        # Sooner, should the run have ended before the signal came.
        while kill_after(run, lines, 0).code == 0:
            harness.remove(run.path)
            lines //= 2
        killed = kill_after(run, lines + 2, 0, "--resume").code
        print(f"killed after {lines} lines, {'and while it resumed' if killed else 'and ended'}")
        resume_and_compare(run, undisturbed.result(), f"killed with {settings}")
        harness.remove(folder)


def rate(base, decay):
    """A schedule that changes at each step of an interrupted job."""
    return {"base": base, "warmup_steps": 7, "decay": decay, "decay_steps": 20, "final": base / 10}


RICH = {
    "data.shuffle": "examples",
    "data.shuffle_window": 700,
    "table.optimizer": {"type": "adam", "learning_rate": rate(0.01, "cosine")},
    "tables": {"ads": {"dim": 4, "optimizer": {"type": "ftrl", "learning_rate": 0.1, "l1": 0.01}},
               "words": {"dim": 16, "optimizer": {"type": "adagrad_row", "learning_rate": rate(0.05, "linear")}}},
    "slots": {"C1": {"table": "ads", "pooling": "mean"}, "C2": {"table": "ads"}, "C3": {"table": "words"}, "C9": {"table": "words"}},
    "network": {"type": "dnn", "hidden": [32, 16], "wide": True,
                "wide_optimizer": {"type": "ftrl", "learning_rate": 0.1, "l1": 0.001},
                "optimizer": {"type": "sgd", "learning_rate": rate(0.02, "cosine"), "momentum": 0.9, "clip_norm": 0.5}},
}


def test_rich_mathematics(terrace, workspace, job, sample_seed):
    """Steps of schedules, momentum, clipping and several optimizers go on over kills, signals, depths and budgets as if nothing
    had been."""
    undisturbed = harness.Run(terrace, workspace, job, "undisturbed", **RICH, **{"memory.budget": jobs.LARGE_BUDGET})
    undisturbed.train().expect(0)
    expected = undisturbed.result()
    rng = random.Random(sample_seed)
    run = harness.Run(terrace, workspace, job, **RICH, **{"memory.budget": "144MiB"})
    ended = 0
    for part in range(1, 5):
        changes = ("--resume", "--set", f"pipeline.depth={rng.choice((0, 1, 2, 4))}",
                   "--set", f"memory.budget={rng.choice(('144MiB', '256MiB', '2GiB'))}")
        process = run.start(*changes)
        run.wait_for_metrics(process, rng.randrange(len(expected["metrics"]) * part // 5))
        process.signal(rng.choice((signal.SIGINT, signal.SIGKILL)))
        # SIGINT, too, before the program has taken it over.
        ended += process.wait().code in (130, -signal.SIGKILL, -signal.SIGINT)
    assert ended >= 2, "the signals came too late"
    resume_and_compare(run, expected, f"--sample-seed {sample_seed}")


def test_every_sync_point(terrace, workspace, job, undisturbed, sample_seed, full):
    """At the first hit of each named point, and of some that the seed draws at a later one."""
    expected, _, points, _ = undisturbed
    # All but those of a resume, of --overwrite and of rows that expire: they are killed at elsewhere.
    elsewhere = {name for name in sync_points.HARNESS if name.startswith(("store.open.", "run.remove.", "store.sweep."))}
    missed = (sync_points.TRAINER | sync_points.HARNESS) - elsewhere - set(points)
    assert not missed, f"the run does not pass {missed}"
    rng = random.Random(sample_seed)
    later = points if full else rng.sample(points, 8)
    print(f"--sample-seed {sample_seed}: {len(points)} points")
    for point, hit in [(point, 1) for point in points] + [(point, rng.randrange(2, 6)) for point in later]:
        folder = workspace / f"{point}-{hit}"
        folder.mkdir()
        run = harness.Run(terrace, folder, job)
        outcome = run.train("--test-kill-at", f"{point}:{hit}")
        # A point that is hit less often than that lets the run end.
        assert outcome.code in (-signal.SIGKILL, 0), outcome.output[-4000:]
        assert hit > 1 or outcome.code != 0, f"{point} was recorded, but not hit"
        print(f"{point}:{hit}: {'killed' if outcome.code else 'not hit so often'}")
        resume_and_compare(run, expected, f"killed at {point}:{hit}")
        harness.remove(folder)


def test_every_sync_point_of_a_resume(terrace, workspace, job, undisturbed, sample_seed):
    """What a resume passes before it trains: recovery, removal of what came later."""
    expected, *_ = undisturbed
    record = workspace / "points"
    run = harness.Run(terrace, workspace, job)
    run.train("--test-kill-at", "checkpoint.before_publish:4").expect(-signal.SIGKILL)
    harness.copy_run(run.path, workspace / "killed")
    run.train("--resume", "--test-record-sync-points", record).expect(0)
    harness.assert_same(expected, run.result(), "resumed while points were recorded")
    points = list(dict.fromkeys(record.read_text().split()))
    # Once it trains, what compaction does is a matter of time.
    recovery = points[:points.index("cache.pin.before_read") + 1]
    assert "store.open.before_remove" in recovery, points
    rng = random.Random(sample_seed)
    for point in recovery + rng.sample(sorted(set(points) - set(recovery)), 2):
        harness.remove(run.path)
        harness.copy_run(workspace / "killed", run.path)
        outcome = run.train("--resume", "--test-kill-at", point)
        assert outcome.code in (-signal.SIGKILL, 0), outcome.output[-4000:]
        assert outcome.code != 0 or point not in recovery, f"{point} was recorded, but not hit"
        resume_and_compare(run, expected, f"killed at {point} of the resume")


def test_every_sync_point_of_an_overwrite(terrace, workspace, logs):
    """What is left of the old run is taken for a run still, by the marker that goes last."""
    run = harness.Run(terrace, workspace, jobs.tiny([logs.criteo(1000, **jobs.EVICTING_LOG)]))
    run.train().expect(0)
    digest = run.digest()
    points = sorted(point for point in sync_points.STORAGE if point.startswith("run.remove."))
    assert points
    for point in points:
        run.train("--overwrite", "--test-kill-at", point).expect(-signal.SIGKILL)
        run.train("--overwrite").expect(0)
        assert run.digest() == digest
        run.verify()


def test_every_sync_point_of_compaction(terrace, workspace, job, undisturbed, sample_seed):
    """In a run that must rewrite files all the time to stay within its bound of stale rows."""
    expected, *_ = undisturbed
    points = sorted(point for point in sync_points.STORAGE if point.startswith("store.compact."))
    assert points
    rng = random.Random(sample_seed)
    for point in points:
        hit = rng.randrange(1, 6)
        print(f"--sample-seed {sample_seed}: {point}:{hit}")
        folder = workspace / point
        folder.mkdir()
        run = harness.Run(terrace, folder, job, **{"ssd.compaction": "stale_share", "ssd.stale_share": 0.05})
        run.train("--test-kill-at", f"{point}:{hit}").expect(-signal.SIGKILL)
        resume_and_compare(run, expected, f"killed at {point}:{hit}")
        harness.remove(folder)


def test_killed_between_the_last_checkpoint_and_the_summary(terrace, workspace, job, undisturbed):
    expected, *_ = undisturbed
    run = harness.Run(terrace, workspace, job)
    run.train().expect(0)
    (run.path / "summary.json").unlink()
    resume_and_compare(run, expected, "without its summary")
    assert run.summary()["finished"]


def test_signals_of_one_stop(terrace, workspace, job, undisturbed):
    expected, *_ = undisturbed
    run = harness.Run(terrace, workspace, job)
    process = run.start()
    run.wait_for_metrics(process, 3)
    # Both are waiting when it goes on: two that are alike, or that come while it is fast, would be one.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        process.signal(number)
    outcome = process.wait().expect(130)
    assert "interrupted after a checkpoint" in outcome.output, outcome.output
    resume_and_compare(run, expected, "after two signals at once")


def test_one_trainer_a_run(terrace, workspace, job):
    run = harness.Run(terrace, workspace, job, **{"data.epochs": 500})
    process = run.start()
    run.wait_for_metrics(process, 2)
    outcome = run.train("--resume").expect(1)
    assert str(process.popen.pid) in outcome.output, f"the holder is not named:\n{outcome.output}"
    process.signal(signal.SIGTERM)
    process.wait().expect(130)
    run.verify()
