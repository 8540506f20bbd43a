"""Which keys have rows, and for how long, is part of the mathematics: the tiers are invisible to it, and so are kills."""
import json
import random
import signal
import time

import pytest

import harness
import jobs
import pairwise

AXES = {
    "memory.budget": ("least", "192MiB", jobs.LARGE_BUDGET),
    "pipeline.depth": (0, 1, 2, 4),
    "training.batch": (256, 1024, 4096),
    "ssd.shards": (1, 2, 4),
    "pipeline.pull_threads": (1, 2),
    "ssd.stale_share": (0.5, 0.1),
    "ssd.file_size": ("1MiB", "32MiB"),
    "checkpoint.every_batches": (0, 1, 5),
    "checkpoint.final_seconds": (0, 10),
    "interrupt": (None, signal.SIGINT, signal.SIGKILL),
}
TABLES = {
    "admission": {"admit_after": 3, "admit_filter": "128KiB"},
    "expiry": {"expire_every_examples": 500, "expire_after": 2000, "expire_below": 0.09, "expire_decay": 0.8},
    "both": {"admit_after": 2, "admit_filter": "128KiB", "expire_every_examples": 250, "expire_after": 2200,
             "expire_below": 0.15, "expire_decay": 0.95},
}


@pytest.fixture(scope="module")
def interruptions():
    """Of all tests of this module together."""
    counted = harness.Interruptions()
    yield counted
    counted.check()


@pytest.fixture(scope="module", params=TABLES)
def job(request, logs):
    # Keys that are shown a few times each.
    train = logs.criteo(4000, seed=3, cardinality=2500, zipf=0)
    validation = logs.criteo(1000, seed=4, cardinality=2500, zipf=0)
    job = jobs.evicting([train], [validation], validation={"every_examples": 2048}, metrics={"every_examples": 512},
                       memory={"budget": "144MiB"})
    job["table"].update({"dim": 136, **TABLES[request.param]})
    return job


@pytest.fixture(scope="module")
def reference(terrace, job, tmp_path_factory):
    """Everything in memory, one stage after another."""
    run = harness.Run(terrace, tmp_path_factory.mktemp("reference"), job,
                      **{"memory.budget": jobs.LARGE_BUDGET, "pipeline.depth": 0})
    run.train().expect(0)
    assert run.summary()["cache"]["evictions"] == 0, "the reference is to run in memory"
    if "admit_after" in job["table"]:
        assert run.summary()["admission"]["unadmitted_shows"] > 50_000, "nearly every key was admitted"
    if "expire_every_examples" in job["table"]:
        assert run.summary()["expiry"]["renewed"] > 1000, "nearly no row has expired"
    return run.result()


def train(run, interrupt, rng, interruptions):
    """To the end, with a signal on the way; a killed run resumes more than once."""
    signals = {None: 0, signal.SIGINT: 1, signal.SIGKILL: 2}[interrupt]
    for number in range(signals):
        process = run.start(*(["--resume"] if number else []))
        run.wait_for_metrics(process, rng.randrange(2, 12) + 6 * number)
        time.sleep(0.05 * rng.random())
        process.signal(interrupt)
        outcome = process.wait()
        if outcome.code == 1:  # Its index outgrew the budget.
            break
        interruptions.add(outcome, 130 if interrupt == signal.SIGINT else -interrupt)
        if outcome.code == 0:
            break
    else:
        outcome = run.train(*(["--resume"] if signals else []))
    run.resume_as_advised(outcome)


def test_sample(terrace, workspace, job, reference, sample_seed, interruptions):
    """Every pair of values of any two settings; index and policies are drawn."""
    rng = random.Random(sample_seed)
    rows = pairwise.pairwise(AXES, sample_seed)
    print(f"--sample-seed {sample_seed}: {len(rows)} combinations")
    evictions = 0  # Of runs with the least budget: large sets in flight are all its rows.
    for number, settings in enumerate(rows):
        (tiers,) = jobs.tiers(rng.choice(("key", "key", "group")), rng.randrange(10**6), 1)
        settings |= tiers
        print(settings)
        folder = workspace / str(number)
        folder.mkdir()
        interrupt = settings.pop("interrupt")
        least = settings["memory.budget"] == "least"
        if least:
            refused = harness.Run(terrace, folder, job, "refused", **settings)
            settings["memory.budget"] = f"{refused.least_budget()}MiB"
        run = harness.Run(terrace, folder, job, **settings)
        train(run, interrupt, rng, interruptions)
        if least:
            # Over all processes of the run.
            evictions += sum(line["performance"]["cache"]["evictions"] for line in run.metrics() if line["kind"] == "interval")
        harness.assert_same(reference, run.result(), f"with {settings}, interrupt={interrupt}")
        run.verify()
        harness.remove(folder)
    assert evictions > 0, "nothing was evicted: the budget is not small"


def test_a_resume_with_another_life_of_rows_is_refused(terrace, workspace, job):
    run = harness.Run(terrace, workspace, job, **{"training.max_examples": 2048})
    run.train().expect(0)
    for setting, value in TABLES_CHANGED.items():
        if setting in job["table"]:
            outcome = run.train("--resume", "--set", f"table.{setting}={value}").expect(2)
            assert "identify another model" in outcome.output and str(value) in outcome.output, outcome.output


TABLES_CHANGED = {"admit_after": 4, "admit_filter": 524288, "expire_every_examples": 4321, "expire_after": 4321,
                  "expire_below": 0.4321, "expire_decay": 0.4321}


def test_a_damaged_filter_is_found(terrace, workspace, job):
    if "admit_after" not in job["table"]:
        pytest.skip("a test of admission")
    run = harness.Run(terrace, workspace, job, **{"training.max_examples": 2048})
    run.train().expect(0)
    newest = sorted((run.path / "admission").iterdir())[-1]
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    newest.write_bytes(damaged)
    shown = json.loads(terrace.text("inspect", run.path, "--verify", "--json", code=1))
    assert any(newest.name in finding["file"] for finding in shown["findings"]), shown
    assert newest.name in terrace("inspect", run.path, "--digest", log=workspace / "digest.log").expect(1).output


def test_admission_leaves_out_what_it_says(terrace, workspace, job, logs):
    """A key has a row if and only if it was seen in a mini-batch before which it was shown often enough."""
    if "admit_after" not in job["table"] or "expire_every_examples" in job["table"]:
        pytest.skip("a test of admission alone")
    minibatch, after = job["training"]["minibatch"], job["table"]["admit_after"]
    run = harness.Run(terrace, workspace, job, **{"table.admit_filter": "16MiB", "data.epochs": 1,
                                                  "memory.budget": "256MiB"})
    run.train().expect(0)
    lines = [line.rstrip("\n").split("\t")[14:] for line in open(job["data"]["train"][0])]
    shows, rows = {}, set()
    for start in range(0, len(lines), minibatch):
        keys = [(14 + slot) << 48 | int(text, 16) for line in lines[start:start + minibatch]
                for slot, text in enumerate(line) if text]
        rows |= {key for key in keys if shows.get(key, 0) >= after}
        for key in keys:
            shows[key] = shows.get(key, 0) + 1
    assert run.summary()["rows"] == len(rows) > 1000
    sample = random.Random(1).sample(sorted(shows), 500)
    options = [part for key in sample for part in ("--key", key)]
    shown = json.loads(terrace.text("inspect", run.path, "--json", *options))["rows"]
    assert {row["key"] for row in shown} == rows & set(sample)


def test_readers_see_what_training_sees(terrace, workspace, job, logs):
    """`evaluate` of the last checkpoint and the validation at that moment are the same, on rows that have partly expired."""
    run = harness.Run(terrace, workspace, job)
    run.train().expect(0)
    validation = run.summary()["validation"]
    shown = json.loads(terrace.text("evaluate", run.path, "--data", *job["data"]["validation"], "--json"))
    assert shown["logloss"] == validation["logloss"] and shown["auc"] == validation["auc"]
    assert json.loads(terrace.text("inspect", run.path, "--json"))["tables"][0]["rows"] == run.summary()["rows"]


def test_expired_rows_leave_the_disk(terrace, workspace, job):
    """A run whose rows expire ends with no more on disk than it needs; one without expiry with several times that."""
    if "expire_every_examples" not in job["table"]:
        pytest.skip("a test of expiry")
    sizes = {}
    for name in ("with", "without"):
        table = dict(job["table"])
        if name == "without":
            for setting in [setting for setting in table if setting.startswith("expire_")]:
                del table[setting]
        # Files small enough that compaction can follow.
        run = harness.Run(terrace, workspace, {**job, "table": table}, name,
                          **{"checkpoint.keep": 1, "ssd.file_size": "256KiB", "pipeline.depth": 0})
        run.train().expect(0)
        summary = run.summary()
        sizes[name] = sum(path.stat().st_blocks * 512 for path in (run.path / "rows").rglob("rows-*"))
        if name == "with":
            assert summary["expiry"]["dropped"] + summary["expiry"]["unwritten"] > 1000
            rows = summary["rows"]
        else:
            assert rows < 0.9 * summary["rows"]
    assert sizes["with"] < 0.9 * sizes["without"], sizes


@pytest.mark.parametrize("point", ("store.sweep.before_read", "store.sweep.after_index", "checkpoint.before_filter"))
def test_killed_within(terrace, workspace, job, reference, point):
    if ("expire_every_examples" if "sweep" in point else "admit_after") not in job["table"]:
        pytest.skip("the run does not pass it")
    for hit in (1, 2, 7):
        run = harness.Run(terrace, workspace, job, f"run{hit}", **{"ssd.file_size": "1MiB", "ssd.shards": 2})
        outcome = run.train("--test-kill-at", f"{point}:{hit}")
        assert outcome.code in (-signal.SIGKILL, 0), outcome.output[-4000:]
        assert hit > 1 or outcome.code != 0, f"{point} was not hit"
        run.train("--resume").expect(0)
        harness.assert_same(reference, run.result(), f"killed at {point}:{hit}")
        run.verify()
        harness.remove(run.path)


def test_tables_of_their_own(terrace, workspace, logs, sample_seed, interruptions):
    """Each table counts and forgets by its own settings, one with a filter that is half full."""
    rng = random.Random(sample_seed)
    job = jobs.evicting([logs.criteo(jobs.EVICTING_ROWS, **jobs.EVICTING_LOG)],
                        [logs.criteo(2000, seed=4, cardinality=40_000, zipf=0.6)], validation={"every_examples": 8192})
    job["network"]["wide"] = True
    job["tables"] = {
        "ads": {"dim": 16, "admit_after": 2, "admit_filter": "64KiB", "optimizer": {"type": "adam"}},
        "users": {"dim": 32, "expire_every_examples": 900, "expire_below": 0.12, "expire_decay": 0.9,
                  "optimizer": {"type": "ftrl"}},
    }
    job["slots"] = {f"C{i}": {"table": "ads"} for i in range(1, 6)}
    job["slots"] |= {f"C{i}": {"table": "users", "pooling": "mean"} for i in range(6, 16)} | {"C20": {"table": "ads", "dim": 3}}
    results = {}
    for name, changes, interrupt in (
            ("memory", {"memory.budget": jobs.LARGE_BUDGET, "pipeline.depth": 0}, None),
            ("small", {"memory.budget": "192MiB"}, None),
            ("killed", {"memory.budget": "192MiB", "pipeline.depth": 3, "training.batch": 512, "ssd.shards": 2,
                        "checkpoint.every_batches": 1, "ssd.file_size": "1MiB"}, signal.SIGKILL)):
        run = harness.Run(terrace, workspace, job, name, **changes)
        train(run, interrupt, rng, interruptions)
        results[name] = run.result()
        harness.assert_same(results["memory"], results[name], name)
        run.verify()
        # The summary would be of the last process alone.
        evictions = sum(line["performance"]["cache"]["evictions"] for line in run.metrics() if line["kind"] == "interval")
        assert (evictions > 0) == (name != "memory"), name
    assert run.summary()["admission"]["full_cells"] > 0.2
    assert {path.name.split("-", 2)[2] for path in (run.path / "admission").iterdir()} == {"ads", "ads.dim3"}
