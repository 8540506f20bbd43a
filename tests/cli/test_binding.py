"""Where the threads of a run are bound: said at its start, kept to while it trains, and without any effect on its result."""
import os
import pathlib
import re
import signal

import pytest

import harness
import jobs


@pytest.fixture(scope="module")
def log(logs):
    return logs.criteo(2000, seed=8, cardinality=1000, zipf=1.05)


def said(outcome):
    return re.search(r"binding: (.*)", outcome.output).group(1)


def test_too_few_cores_and_off_change_nothing(terrace, workspace, log):
    results = {}
    for name, settings, prefix, text in (
            ("one", {}, ("taskset", "-c", min(os.sched_getaffinity(0))), "none: 1 cpu for "),
            ("off", {"binding": "off"}, (), "none: binding is off"),
            ("depth0", {"pipeline.depth": 0}, (), "none: with pipeline.depth 0"),
            ("auto", {}, (), "")):
        run = harness.Run(terrace, workspace, jobs.tiny([log]), name, **settings)
        outcome = run.train(prefix=[str(part) for part in prefix]).expect(0)
        assert said(outcome).startswith(text)
        assert run.summary()["binding"] == said(outcome)
        results[name] = run.result()
        harness.assert_same(results["one"], results[name], name)


def test_a_resume_may_bind_otherwise(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    run.train("--test-kill-at", "checkpoint.after_publish:1").expect(-signal.SIGKILL)
    whole = harness.Run(terrace, workspace, jobs.tiny([log]), "whole")
    whole.train().expect(0)
    run.train("--resume", "--set", "binding=off").expect(0)
    assert run.summary()["binding"] == "none: binding is off"
    harness.assert_same(whole.result(), run.result(), "resumed with binding: off")


def cpus(text):
    numbers = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def test_threads_run_where_it_is_said(terrace, workspace, log):
    job = harness.merge(jobs.tiny([log]), {"data.epochs": 500})
    run = harness.Run(terrace, workspace, job)
    process = run.start()
    run.wait_for_metrics(process, 4)
    text = said(harness.Outcome(None, 0, process.log.read_text(), 0))
    threads = {}
    for task in pathlib.Path(f"/proc/{process.popen.pid}/task").iterdir():
        try:
            status, name = (task / "status").read_text(), (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # Each log is read by a thread of its own, which has ended with it.
        threads[name] = cpus(re.search(r"Cpus_allowed_list:\s*(\S+)", status).group(1))
    process.signal(signal.SIGINT)
    process.wait().expect(130)
    everywhere = os.sched_getaffinity(0)
    assert {"terrace", "compute1", "read", "pull", "stage", "compact", "cache-read"} <= set(threads), threads
    if text.startswith("none"):
        assert all(allowed == everywhere for allowed in threads.values()), threads
        return
    parts = re.match(r"I/O on cpus (\S+), reading on (\S+), pulling on (\S+), training on ([^;\s]+)", text).groups()
    io, reading, pulling, training = map(cpus, parts)
    assert io | reading | pulling | training == everywhere
    of = {"terrace": training, "read": reading, "data-read": reading, "pull": pulling, "stage": pulling}
    for name, allowed in threads.items():
        assert allowed == of.get(name, training if name.startswith("compute") else io), name
