"""A damaged run: --verify names all that is wrong, --repair says what it costs, asks, and leaves a run that goes on."""
import bisect
import errno
import fcntl
import json
import os
import pty
import random
import re
import shlex
import signal
import subprocess

import pytest

import harness
import jobs
import run_files
import sync_points


@pytest.fixture(scope="module")
def log(logs):
    return logs.criteo(6000, seed=8, cardinality=1000, zipf=1.05)


@pytest.fixture(scope="module")
def job(log):
    job = jobs.tiny([log], [log], metrics={"every_examples": 256}, checkpoint={"every_batches": 2, "keep": 3})
    # Small files: rows are overwritten, compacted, and lie in many of them.
    job["ssd"].update({"file_size": "64KiB", "shards": 2})
    return job


@pytest.fixture(scope="module")
def killed(terrace, job, tmp_path_factory):
    """A run that was killed with three checkpoints and left-over files."""
    run = harness.Run(terrace, tmp_path_factory.mktemp("killed"), job)
    run.train("--test-kill-at", "checkpoint.before_publish:5").expect(-signal.SIGKILL)
    assert len(run.checkpoints()) == 3
    return run


@pytest.fixture
def run(terrace, job, killed, workspace):
    run = harness.Run(terrace, workspace, job)
    harness.copy_run(killed.path, run.path)
    return run


def inspect(run, *arguments):
    return subprocess.run([str(run.terrace.binary), "inspect", str(run.path), *map(str, arguments)],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS)


def findings(run):
    result = inspect(run, "--verify", "--json")
    assert result.returncode in (0, 1), result.stderr
    found = json.loads(result.stdout)["findings"]
    assert (result.returncode == 1) == bool(found)
    return found


def assert_names(found, path, offset=None):
    places = [(f["file"], f["offset"]) for f in found]
    assert any(file == str(path) and offset in (None, at) for file, at in places), f"{path} at {offset} is not in {places}"


def plan(run, *arguments):
    """What --repair would do; it does nothing."""
    before = run_files.contents(run.path)
    result = inspect(run, "--repair", "--json", *arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "--yes" in result.stderr
    assert run_files.contents(run.path) == before, "a plan changed something"
    return json.loads(result.stdout)


def repair(run, *arguments):
    result = inspect(run, "--repair", "--yes", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert findings(run) == []
    assert inspect(run, "--repair").stdout == "nothing is damaged, and nothing is left over\n"
    return result.stdout


def assert_goes_on(run, log):
    """Evaluates, trains to the end, and is whole."""
    result = subprocess.run([str(run.terrace.binary), "evaluate", str(run.path), "--data", str(log), "--json"],
                            capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    run.train("--resume").expect(0)
    assert run.summary()["finished"] and run.summary()["examples"] == 6000
    run.verify()


def assert_same_as_undisturbed(run, log, expected, but=()):
    assert_goes_on(run, log)
    harness.assert_same({k: v for k, v in expected.items() if k not in but}, run.result(), "repaired")


def held_keys(run, keys):
    """Which of the keys have a row."""
    report = inspect(run, *(part for key in keys for part in ("--key", key)), "--json")
    assert report.returncode == 0, report.stderr
    return {row["key"]: row["fields"] for row in json.loads(report.stdout)["rows"]}


def test_left_over_files_alone(run, log, expected):
    assert findings(run) == []
    planned = plan(run)
    assert planned["leftovers"] and not planned["findings"] and planned["successor"] is None
    repair(run)
    assert_same_as_undisturbed(run, log, expected)


def test_asks_at_a_terminal(run):
    (run.path / "summary.json.tmp").write_text("half")
    for answer, code in ((b"n\n", 1), (b"y\n", 0)):
        parent, child = pty.openpty()
        process = subprocess.Popen([str(run.terrace.binary), "inspect", str(run.path), "--repair"],
                                   stdin=child, stdout=subprocess.DEVNULL, stderr=child)
        os.close(child)
        os.write(parent, answer)
        assert process.wait(harness.PATIENCE_SECONDS) == code
        os.close(parent)
        assert (run.path / "summary.json.tmp").exists() == (code == 1)


@pytest.mark.parametrize("what", ["checkpoint", "dense", "manifest"])
@pytest.mark.parametrize("newest", [True, False], ids=["newest", "older"])
def test_a_damaged_checkpoint(run, log, expected, what, newest):
    """Back to an older one, from which training comes to the same bits; or without an older one."""
    numbers = [int(name.split("-")[1]) for name in run.checkpoints()]
    number = numbers[-1] if newest else numbers[0]
    path = {"checkpoint": run.path / f"checkpoints/checkpoint-{number:08}", "dense": run.path / f"dense/dense-{number:08}",
            "manifest": run_files.store_folder(run, 1) / f"manifest-{number:08}"}[what]
    run_files.overwrite(path, path.stat().st_size // 2)
    assert_names(findings(run), path)
    planned = plan(run)
    assert planned["dropped_checkpoints"] == [number] and planned["successor"] is None
    assert planned["checkpoint"] == (numbers[-2] if newest else numbers[-1])
    if newest:
        assert planned["examples"] == 1024 * numbers[-2]
        assert planned["newest_examples"] == (None if what == "checkpoint" else 1024 * number)
    repair(run)
    assert [int(name.split("-")[1]) for name in run.checkpoints()] == [n for n in numbers if n != number]
    assert_same_as_undisturbed(run, log, expected)


def test_every_checkpoint_damaged(run, log):
    for name in run.checkpoints():
        run_files.overwrite(run.path / "checkpoints" / name, 100)
    before = run_files.contents(run.path)
    result = inspect(run, "--repair", "--yes")
    assert result.returncode == 1 and "--overwrite" in result.stderr, result.stderr
    assert run_files.contents(run.path) == before
    result = subprocess.run([str(run.terrace.binary), "evaluate", str(run.path), "--data", str(log)],
                            capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 1, result.stderr
    assert "no checkpoint of the run" in result.stderr and "--verify" in result.stderr, result.stderr


def damage_newest_rows(run, count, seed):
    """Damages records that are the newest of their key, and half as many that are not.

    The keys of the first, the places that findings name for them, and the newest versions as they were.
    """
    files = run_files.row_files(run)
    newest = run_files.newest_versions(files)
    older = {key for file in files for key, version in file.entries
             if key in newest and version != newest[key][0]}
    rng = random.Random(seed)
    # Of some of them an older record is there, which must not come back.
    lost = rng.sample(sorted(older), count) + rng.sample(sorted(set(newest) - older), count)
    for key in lost:
        _, file, row = newest[key]
        run_files.overwrite(file.path, file.record_offset(row) + run_files.HEAD + 8 * rng.randrange(4))
    stale = [(file, row) for file in files for row, (key, version) in enumerate(file.entries)
             if key in newest and version != newest[key][0] and key not in lost]
    damaged = {newest[key][1:] for key in lost}
    for file, row in rng.sample(stale, count):
        run_files.overwrite(file.path, file.record_offset(row) + 40)
        damaged.add((file, row))
    return set(lost), {start_of_stretch(damaged, *newest[key][1:]) for key in lost}, newest


def start_of_stretch(damaged, file, row):
    """Path and offset of the finding that has this record: damaged ones side by side make one."""
    while (file, row - 1) in damaged:
        row -= 1
    return file.path, file.record_offset(row)


def test_damaged_rows(run, log, expected, sample_seed):
    """The rows are dropped by name, older records of them stay dropped, and all others are what they were."""
    print(f"--sample-seed {sample_seed}")
    lost, places, newest = damage_newest_rows(run, 3, sample_seed)
    others = random.Random(sample_seed).sample(sorted(set(newest) - lost), 20)
    before = held_keys(run, others)
    assert len(before) == len(others)
    found = findings(run)
    for path, offset in places:
        assert_names(found, path, offset)
    planned = plan(run)
    (store,) = planned["stores"]
    assert set(store["dropped_keys"]) == lost and store["replaced_rows"] == 3
    assert not store["outdated_keys"] and store["unknown_rows"] == 0
    number = run_files.newest_number(run)
    assert planned["checkpoint"] == number and planned["successor"] == number + 1
    rows = json.loads(inspect(run, "--json").stdout)["tables"][0]["rows"]
    said = repair(run)
    for key in lost:
        assert hex(key) in said
    assert held_keys(run, lost) == {}, "an older record came back"
    assert held_keys(run, others) == before
    assert json.loads(inspect(run, "--json").stdout)["tables"][0]["rows"] == rows - len(lost)
    assert_goes_on(run, log)
    # What lies in the log after the cut is made anew; every row is there again or was not met.
    assert run.summary()["rows"] <= expected["rows"]


def test_damaged_rows_of_a_table_that_expires(terrace, job, workspace, sample_seed):
    """No record of a dropped row is left, which could outlive the deletion that stands against it and the row made anew."""
    print(f"--sample-seed {sample_seed}")
    run = harness.Run(terrace, workspace, job, **{"table.expire_every_examples": 512, "table.expire_after": 3000})
    run.train("--test-kill-at", "checkpoint.before_publish:5").expect(-signal.SIGKILL)
    lost, _, _ = damage_newest_rows(run, 3, sample_seed)
    repair(run)
    assert held_keys(run, lost) == {}
    assert not lost & {key for shard in (0, 1) for file in run_files.row_files(run, shard) for key, _ in file.entries}
    run.train("--resume").expect(0)
    run.verify()


def test_back_to_a_checkpoint_without_the_damage(run, log, expected):
    """Only the newest names the file: going back loses no row."""
    numbers = [int(name.split("-")[1]) for name in run.checkpoints()]
    kept = {file.path for number in numbers[:-1] for file in run_files.row_files(run, number=number)}
    files = run_files.row_files(run)
    newest = run_files.newest_versions(files)
    key = next(key for key, (_, file, _) in sorted(newest.items()) if file.path not in kept)
    _, file, row = newest[key]
    run_files.overwrite(file.path, file.record_offset(row) + 30)
    planned = plan(run)
    assert planned["stores"][0]["dropped_keys"] == [key] and planned["undamaged_checkpoint"] == numbers[-2]
    back = plan(run, "--back-to", numbers[-2])
    assert back["stores"] == [] and back["dropped_checkpoints"] == [numbers[-1]] and back["successor"] is None
    assert inspect(run, "--repair", "--yes", "--back-to", 77).returncode == 2
    repair(run, "--back-to", numbers[-2])
    assert_same_as_undisturbed(run, log, expected)


def test_commands_to_paste_say_the_runs_name_as_a_shell_wants_it(terrace, job, killed, workspace, log):
    run = harness.Run(terrace, workspace, job, "the 2nd run's")
    harness.copy_run(killed.path, run.path)
    numbers = [int(name.split("-")[1]) for name in run.checkpoints()]
    kept = {file.path for number in numbers[:-1] for file in run_files.row_files(run, number=number)}
    newest = run_files.newest_versions(run_files.row_files(run))
    _, file, row = next(newest[key] for key in sorted(newest) if newest[key][1].path not in kept)
    run_files.overwrite(file.path, file.record_offset(row) + 30)
    told = inspect(run, "--verify").stdout.split("what can be done: ")[1]
    assert shlex.split(told) == ["terrace", "inspect", str(run.path), "--repair"], told
    told = inspect(run, "--repair").stdout.split("the same bits again: ")[1]
    assert shlex.split(told) == ["terrace", "inspect", str(run.path), "--repair", "--back-to", str(numbers[-2])], told
    file.path.unlink()
    failed = subprocess.run([str(terrace.binary), "evaluate", str(run.path), "--data", str(log)], stdin=subprocess.DEVNULL,
                            capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS)
    told = next(line for line in failed.stderr.splitlines() if "names all that is damaged" in line)
    words = shlex.split(told)
    assert words[:4] == ["terrace", "inspect", str(run.path), "--verify"] and words.count(str(run.path)) == 2, told


@pytest.mark.parametrize("section", ["keys", "header", "footer", "padding", "longer"])
def test_whole_records_in_a_damaged_file(run, log, expected, section):
    """The file is written anew, and no row is lost."""
    file = max((f for f in run_files.row_files(run) if f.padding_bytes), key=lambda f: f.rows)
    size = file.path.stat().st_size
    if section == "longer":
        with open(file.path, "ab") as out:
            out.write(b"more")
    else:
        run_files.overwrite(file.path, {"keys": file.keys_offset + 16 * (file.rows // 2), "header": 16, "footer": size - 4040,
                                        "padding": file.keys_offset - 1}[section], 1 if section == "padding" else 16)
    assert_names(findings(run), file.path)
    planned = plan(run)
    (store,) = planned["stores"]
    assert store["files"] == [str(file.path)]
    assert not store["dropped_keys"] and not store["outdated_keys"] and not store["unknown_rows"]
    digest_before = None if section == "keys" else inspect(run, "--digest").stdout
    repair(run)
    if digest_before:
        assert inspect(run, "--digest").stdout == digest_before
    assert_same_as_undisturbed(run, log, expected)


def on_a_terminal(run, *arguments):
    """What `inspect` writes to one as its results."""
    parent, child = pty.openpty()
    process = subprocess.Popen([str(run.terrace.binary), "inspect", str(run.path), *map(str, arguments)],
                               stdin=subprocess.DEVNULL, stdout=child, stderr=subprocess.DEVNULL)
    os.close(child)
    said = b""
    try:
        while some := os.read(parent, 1 << 16):
            said += some
    except OSError as error:  # As Linux tells the end.
        assert error.errno == errno.EIO
    os.close(parent)
    assert process.wait(harness.PATIENCE_SECONDS) == 1
    return said.decode()


@pytest.mark.parametrize("how", ["both", "cut", "gone"])
def test_rows_whose_keys_nothing_tells(run, log, expected, how):
    """What may be older than a nameless lost record is dropped by name too: no older row comes back."""
    files = run_files.row_files(run)
    newest = run_files.newest_versions(files)
    # One that overwrote rows of others, so that there is something that could come back.
    file = max(files, key=lambda f: sum(newest.get(key, (0, None, 0))[1] is f for key, _ in f.entries))
    lost = range(file.rows)
    if how == "both":
        lost = range(file.rows // 2, file.rows // 2 + 2)
        for row in lost:
            run_files.overwrite(file.path, file.record_offset(row) + 8)
            run_files.overwrite(file.path, file.keys_offset + 16 * file.listed_at[row])
    elif how == "cut":
        whole = file.rows // 3
        lost = range(whole, file.rows)
        run_files.cut(file.path, file.record_offset(whole) + 10)
    else:
        file.path.unlink()
    assert_names(findings(run), file.path)
    # Where the run is to stay, whatever it costs.
    stay = ("--back-to", int(run.checkpoints()[-1].split("-")[1]))
    (store,) = plan(run, *stay)["stores"]
    assert store["unknown_rows"] == len(lost) and not store["dropped_keys"]
    gone = {file.entries[row][0] for row in lost if newest.get(file.entries[row][0], (0, None, 0))[1] is file}
    for key in store["outdated_keys"]:
        if how == "both":
            # Between the neighbours of one of the damaged entries.
            hashes = sorted(run_files.mix_key(entry[0]) for entry in file.entries)
            places = {file.listed_at[row] for row in lost}
            at = bisect.bisect_left(hashes, run_files.mix_key(key))
            assert any(abs(at - place) <= 2 for place in places)
    said = on_a_terminal(run, "--repair", *stay)
    outdated = len(store["outdated_keys"])
    assert sum(line.count("0x") for line in said.splitlines() if line.startswith("      0x")) == min(outdated, 100)
    assert (f"and {outdated - 100:,} more, which are named" in said) == (outdated > 100)
    assert outdated > 100 or how == "both"
    said = repair(run, *stay)
    assert all(hex(key) in said for key in store["outdated_keys"])
    for keys in (sorted(gone)[i:i + 40] for i in range(0, len(gone), 40)):
        assert held_keys(run, keys) == {}, "an older record came back"
    assert_goes_on(run, log)


def test_a_lost_file_that_an_older_checkpoint_does_not_need(run, log, expected):
    """Nearly all rows would be dropped with it, which may be older than those that nothing names: the run goes back."""
    numbers = [int(name.split("-")[1]) for name in run.checkpoints()]
    kept = {file.path for number in numbers[:-1] for file in run_files.row_files(run, number=number)}
    next(file for file in run_files.row_files(run) if file.path not in kept).path.unlink()
    planned = plan(run)
    assert planned["checkpoint"] == numbers[-2] and planned["stores"] == [] and planned["successor"] is None
    repair(run)
    assert_same_as_undisturbed(run, log, expected)


@pytest.fixture(scope="module")
def counting(terrace, job, tmp_path_factory):
    """A job whose keys get rows after three shows: its killed run with three checkpoints, and one that ended undisturbed."""
    # So few rows are soon rewritten by compaction, when it gets to it; with this share none is, and those that were
    # written twice have an older record.
    job = harness.merge(job, {"table.admit_after": 3, "table.admit_filter": "64KiB", "ssd.stale_share": 0.95})
    folder = tmp_path_factory.mktemp("counting")
    undisturbed = harness.Run(terrace, folder, job, "undisturbed")
    undisturbed.train().expect(0)
    assert undisturbed.summary()["admission"]["unadmitted_shows"] > 10_000, "nearly every key was admitted"
    killed = harness.Run(terrace, folder, job)
    killed.train("--test-kill-at", "checkpoint.before_publish:5").expect(-signal.SIGKILL)
    return killed, undisturbed


@pytest.fixture
def counting_run(terrace, counting, workspace):
    run = harness.Run(terrace, workspace, counting[0].job)
    harness.copy_run(counting[0].path, run.path)
    return run


def filter_of(run, number):
    return run.path / f"admission/filter-{number:08}-default"


@pytest.mark.parametrize("part", ["frame", "header", "cells", "end", "gone"])
@pytest.mark.parametrize("newest", [True, False], ids=["newest", "older"])
def test_a_damaged_filter(counting_run, log, counting, newest, part):
    """As any other damaged checkpoint: one flipped bit, and training goes on from a whole one to the same bits."""
    run, (_, undisturbed) = counting_run, counting
    numbers = [int(name.split("-")[1]) for name in run.checkpoints()]
    number = numbers[-1] if newest else numbers[0]
    path = filter_of(run, number)
    if part == "gone":
        path.unlink()
    else:
        whole = path.read_bytes()
        at = {"frame": 20, "header": run_files.FRAME + 8, "cells": len(whole) // 2, "end": len(whole) - 1}[part]
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    assert_names(findings(run), path, 0)
    if newest:
        outcome = run.train("--resume").expect(1)
        assert str(path) in outcome.output, outcome.output
    planned = plan(run)
    assert planned["dropped_checkpoints"] == [number] and planned["successor"] is None and planned["stores"] == []
    repair(run)
    assert not path.exists()
    assert_same_as_undisturbed(run, log, undisturbed.result())
    last = run_files.newest_number(undisturbed)
    assert filter_of(run, last).read_bytes() == filter_of(undisturbed, last).read_bytes()


def test_every_filter_damaged(counting_run):
    """Counts that are lost can't be made again, and without them another model would be trained: nothing is changed."""
    for path in (counting_run.path / "admission").iterdir():
        run_files.overwrite(path, path.stat().st_size // 2)
    before = run_files.contents(counting_run.path)
    result = inspect(counting_run, "--repair", "--yes")
    assert result.returncode == 1 and "--overwrite" in result.stderr, result.stderr
    assert run_files.contents(counting_run.path) == before


def test_filters_of_a_checkpoint_whose_rows_are_damaged(counting_run, log, counting):
    """The successor has the counts of the checkpoint that it replaces, and training counts on from there."""
    run, (_, undisturbed) = counting_run, counting
    lost, places, _ = damage_newest_rows(run, 2, 7)
    number = run_files.newest_number(run)
    counts = filter_of(run, number).read_bytes()
    found = findings(run)
    for path, offset in places:
        assert_names(found, path, offset)
    repair(run)
    assert run_files.newest_number(run) == number + 1
    assert filter_of(run, number + 1).read_bytes() == counts
    assert held_keys(run, lost) == {}
    assert_goes_on(run, log)
    # Counts are of the stream, which no lost row changes.
    last, undisturbed_last = run_files.newest_number(run), run_files.newest_number(undisturbed)
    assert filter_of(run, last).read_bytes() == filter_of(undisturbed, undisturbed_last).read_bytes()


def test_metrics(run, log, expected):
    """Damaged lines are marked as lost; all others stay, and training appends to them."""
    path = run.path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    offset = len(b"".join(lines[:2]))
    run_files.overwrite(path, offset, 20)
    assert_names(findings(run), path, offset)
    assert plan(run)["lost_metrics_bytes"] == len(lines[2])
    repair(run)
    after = path.read_bytes().splitlines(keepends=True)
    assert json.loads(after[2]) == {"format_version": 2, "kind": "lost"} and len(after[2]) == len(lines[2])
    assert_same_as_undisturbed(run, log, expected, but=("metrics",))
    result = run.result()["metrics"]
    assert [line for line in result if line["kind"] != "lost"] == expected["metrics"][:2] + expected["metrics"][3:]


def test_metrics_that_the_disk_does_not_read(run, log, expected):
    """A block that gives an error, of a log: what can be read of it stays."""
    path = run.path / "metrics.jsonl"
    # The file as a whole, then its first block.
    fault = ("--test-faults", "read:1:error:metrics.jsonl;read:2:error:metrics.jsonl")
    result = inspect(run, "--verify", "--json", *fault)
    assert result.returncode == 1
    assert_names(json.loads(result.stdout)["findings"], path, 0)
    before = path.read_bytes().splitlines(keepends=True)
    repair(run, *fault)
    after = path.read_bytes().splitlines(keepends=True)
    lost = before.index(after[1])  # Lines; those beyond the checkpoint are cut off, as ever.
    assert json.loads(after[0])["kind"] == "lost" and len(after[0]) == len(b"".join(before[:lost])) >= 4096
    assert after[1:] == before[lost:lost + len(after) - 1]
    assert_same_as_undisturbed(run, log, expected, but=("metrics",))


@pytest.mark.parametrize("size", [0, 5000])
def test_metrics_that_were_cut(run, log, expected, size):
    path = run.path / "metrics.jsonl"
    run_files.cut(path, size)
    assert "metrics.jsonl" in run.train("--resume").expect(1).output
    assert_names(findings(run), path)
    repair(run)
    assert_same_as_undisturbed(run, log, expected, but=("metrics",))


def test_summary(terrace, job, workspace, log, expected):
    """The summary of a finished run is made again by the next resume."""
    run = harness.Run(terrace, workspace, job)
    run.train().expect(0)
    path = run.path / "summary.json"
    run_files.overwrite(path, 0)
    assert_names(findings(run), path)
    assert plan(run)["summary_json"]
    repair(run)
    assert_same_as_undisturbed(run, log, expected)


def test_a_finished_run_without_some_rows(terrace, job, workspace, log):
    run = harness.Run(terrace, workspace, job)
    run.train().expect(0)
    damage_newest_rows(run, 2, 1)
    repair(run)
    assert not (run.path / "summary.json").exists()
    assert_goes_on(run, log)


def test_a_run_that_is_finished_no_longer(terrace, job, workspace, log, expected):
    """What its summary tells is of a checkpoint that is gone."""
    run = harness.Run(terrace, workspace, job)
    run.train().expect(0)
    newest = run.path / "dense" / run.checkpoints()[-1].replace("checkpoint", "dense")
    run_files.overwrite(newest, newest.stat().st_size // 2)
    assert plan(run)["summary_json"]
    repair(run)
    assert not (run.path / "summary.json").exists()
    assert_same_as_undisturbed(run, log, expected)


def test_a_newest_checkpoint_that_was_taken_away(terrace, job, workspace, log, expected):
    """An older one is used with a warning, and makes the same run again."""
    run = harness.Run(terrace, workspace, job)
    run.train().expect(0)
    number = int(run.checkpoints()[-1].split("-")[1])
    (run.path / "checkpoints" / run.checkpoints()[-1]).unlink()
    told = f"tells of checkpoint {number}, which is not there"
    assert told in terrace("evaluate", run.path, "--data", log, log=workspace / "evaluated").expect(0).output
    assert_names(findings(run), run.path / "summary.json")
    resumed = harness.Run(terrace, workspace, job, "resumed")
    harness.copy_run(run.path, resumed.path)
    refused = resumed.train("--resume", "--set", "ssd.quota=1MiB").expect(2).output
    assert "ssd.quota of 1.00 MiB is too small" in refused and (resumed.path / "summary.json").exists()
    first = resumed.train("--resume", "--test-kill-at", "checkpoint.before_publish").expect(-signal.SIGKILL).output
    assert told in first and findings(resumed) == [], "it makes that checkpoint anew"
    assert told not in resumed.train("--resume").expect(0).output
    assert findings(resumed) == []
    repair(run)
    assert not (run.path / "summary.json").exists() and findings(run) == []
    assert_same_as_undisturbed(run, log, expected)


def test_job_yaml(run, log, expected):
    path = run.path / "job.yaml"
    text = path.read_text()
    path.write_text("\x00" + text)
    assert_names(findings(run), path)
    repair(run)
    assert path.read_text() == text
    assert_same_as_undisturbed(run, log, expected)


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_marker(run, log, expected, how):
    path = run.path / "RUN"
    path.unlink() if how == "gone" else run_files.overwrite(path, 70)
    before = run_files.contents(run.path)
    for told in (run.train("--resume").expect(1).output, run.train("--overwrite").expect(1).output, inspect(run).stderr):
        assert f"terrace inspect {run.path} --repair what can be done" in told, told
    assert run_files.contents(run.path) == before
    assert_names(findings(run), path)
    repair(run)
    assert_same_as_undisturbed(run, log, expected)


@pytest.mark.parametrize("which", ["run", "disk", "all"])
def test_markers_of_ssd_paths(terrace, job, workspace, log, expected, which):
    paths = [workspace / "a", workspace / "b"]
    run = harness.Run(terrace, workspace, job, **{"ssd.paths": [str(p) for p in paths]})
    run.train("--test-kill-at", "checkpoint.before_publish:5").expect(-signal.SIGKILL)
    disks = [next(p.iterdir()) / "RUN" for p in paths]
    damaged = {"run": [run.path / "RUN"], "disk": disks[1:], "all": [run.path / "RUN", *disks]}[which]
    before = {path: path.read_bytes() for path in damaged}
    for path in damaged:
        run_files.overwrite(path, 70)
    assert_names(findings(run), damaged[0])
    repair(run)
    if which != "all":
        assert all(path.read_bytes() == data for path, data in before.items())
    assert_same_as_undisturbed(run, log, expected)
    assert run.train("--overwrite").code == 0, "the markers let it be deleted"


def test_read_cost(terrace, job, workspace, log, expected):
    run = harness.Run(terrace, workspace, job, **{"ssd.merge_gap": "auto"})
    run.train("--test-kill-at", "checkpoint.before_publish:5").expect(-signal.SIGKILL)
    path = run.path / "rows" / "read-cost"
    if not path.exists():
        pytest.skip("this disk can't be told from others, so nothing is remembered of it")
    run_files.overwrite(path, 70)
    assert_names(findings(run), path)
    assert plan(run)["read_costs"] == [str(path)]
    repair(run)
    assert_same_as_undisturbed(run, log, expected)


def test_all_is_named_at_once(run):
    """One damage hides no other."""
    first, second, third = (int(name.split("-")[1]) for name in run.checkpoints())
    damaged = [run.path / "RUN", run.path / "metrics.jsonl", run.path / "job.yaml",
               run.path / f"checkpoints/checkpoint-{first:08}", run.path / f"dense/dense-{second:08}",
               run_files.store_folder(run, 1) / f"manifest-{third:08}"]
    # A checkpoint that can't be read names nothing.
    files = {file.path for number in (second, third) for file in run_files.row_files(run, number=number)}
    damaged += sorted(files)[:2] + sorted(files)[-2:]
    for path in damaged:
        run_files.overwrite(path, 0, 1)
    found = findings(run)
    for path in damaged:
        assert_names(found, path)


def test_a_disk_that_does_not_read(run):
    """A block that gives an error is damage like any other; the rest of the file is told."""
    file = max(run_files.row_files(run), key=lambda f: f.rows)
    result = inspect(run, "--verify", "--json", "--test-faults", f"read:3+:error:{file.path.name}")
    assert result.returncode == 1
    assert_names(json.loads(result.stdout)["findings"], file.path)


@pytest.mark.parametrize("what", ["checkpoints/checkpoint", "dense/dense", "job.yaml"])
def test_a_small_file_that_the_disk_does_not_read(run, log, expected, what):
    path = run.path / (what if "." in what else f"{what}-{run.checkpoints()[-1].split('-')[1]}")
    fault = ("--test-faults", f"read:1+:error:{path.name}")
    result = inspect(run, "--verify", "--json", *fault)
    assert result.returncode == 1
    assert_names(json.loads(result.stdout)["findings"], path)
    repair(run, *fault)
    assert_same_as_undisturbed(run, log, expected)


def test_a_checkpoint_that_nobody_lets_go(terrace, job, workspace):
    """Nothing is called sound that was not looked at."""
    run = harness.Run(terrace, workspace, harness.merge(job, {"checkpoint.keep": 1}))
    run.train().expect(0)
    checkpoint = run.path / "checkpoints" / run.checkpoints()[-1]
    with checkpoint.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = inspect(run, "--verify")
        assert result.returncode == 1 and "no checkpoint of" in result.stderr and not result.stdout, result.stdout + result.stderr
    assert findings(run) == []
    # One of another name is none.
    number = checkpoint.name.split("-")[1]
    checkpoint.rename(checkpoint.with_name(f"checkpoint-0{number}"))
    for command in (("--verify",), ("--repair", "--yes")):
        result = inspect(run, *command)
        assert result.returncode == 1 and "has lost its checkpoints: summary.json" in result.stderr, result.stdout + result.stderr
        assert "--verify" not in result.stderr, result.stderr  # It would say this again.


def test_what_was_found_is_told_whatever_follows(run):
    number = run.checkpoints()[-1].split("-")[1]
    dense = run.path / f"dense/dense-{number}"
    run_files.overwrite(dense, dense.stat().st_size // 2)
    file = max(run_files.row_files(run), key=lambda f: f.rows)
    run_files.overwrite(file.path, file.path.stat().st_size - 4096)  # Its footer.
    result = inspect(run, "--verify", "--digest", "--json")
    assert result.returncode == 1
    found = json.loads(result.stdout)["findings"]
    assert_names(found, dense)
    assert_names(found, file.path)


def test_refused_beside_a_trainer(terrace, job, workspace, log):
    job = harness.merge(job, {"data.epochs": 500})
    run = harness.Run(terrace, workspace, job)
    process = run.start()
    run.wait_for_metrics(process, 8)
    for flags in (("--repair",), ("--repair", "--yes")):
        result = inspect(run, *flags)
        assert result.returncode == 1 and f"process {process.popen.pid} holds the run" in result.stderr, result.stderr
    # Verification works beside it, whatever the trainer writes and drops meanwhile.
    assert findings(run) == []
    process.signal(signal.SIGTERM)
    process.wait().expect(130)


def test_quota(terrace, job, killed, workspace, log):
    run = harness.Run(terrace, workspace, job)
    harness.copy_run(killed.path, run.path)
    damage_newest_rows(run, 2, 3)
    before = run_files.contents(run.path)
    result = inspect(run, "--repair", "--yes", "--quota", "1MiB")
    assert result.returncode == 1 and "quota" in result.stderr, result.stderr
    assert run_files.contents(run.path) == before
    advised = result.stderr.split("--quota ")[1].split()[0]
    repair(run, "--quota", advised)
    assert_goes_on(run, log)


def test_wrong_arguments(run):
    for arguments in (("--yes",), ("--back-to", 3), ("--repair", "--verify"), ("--repair", "--quota", "much"),
                      ("--repair", "--digest")):
        assert inspect(run, *arguments).returncode == 2, arguments


def test_killed_at_every_point(terrace, job, killed, workspace, log):
    """A repair that is killed is begun again and comes to the same end."""
    def damaged_run(name):
        folder = workspace / name
        folder.mkdir()
        run = harness.Run(terrace, folder, job)
        harness.copy_run(killed.path, run.path)
        damage_newest_rows(run, 2, 5)
        run_files.overwrite(run.path / "metrics.jsonl", 10)
        run_files.overwrite(run.path / "RUN", 70)
        run_files.overwrite(run.path / "job.yaml", 0)
        return run

    points = workspace / "points"
    undisturbed = damaged_run("undisturbed")
    repair(undisturbed, "--test-record-sync-points", points)
    digest = inspect(undisturbed, "--digest").stdout
    names = points.read_text().split()
    assert sync_points.REPAIR <= set(names) and "io.write_atomically.before_rename" in names
    for name in names:
        for hit in (1, 2, 3) if name.startswith("io.") else (1,):
            run = damaged_run(f"{name}-{hit}")
            result = inspect(run, "--repair", "--yes", "--test-kill-at", f"{name}:{hit}")
            assert result.returncode == -signal.SIGKILL, f"{name}:{hit}\n{result.stdout}{result.stderr}"
            result = inspect(run, "--repair", "--yes")
            assert result.returncode == 0, f"{name}:{hit}\n{result.stdout}{result.stderr}"
            assert findings(run) == [], f"{name}:{hit}"
            assert inspect(run, "--digest").stdout == digest, f"{name}:{hit}"
            harness.remove(run.folder)


@pytest.fixture(scope="module")
def killed_by_group(terrace, job, tmp_path_factory):
    # As many groups as make later checkpoints leave blocks of earlier ones as they were.
    run = harness.Run(terrace, tmp_path_factory.mktemp("groups"), job,
                      **{"table.index": "group", "table.expected_keys": 200_000})
    run.train("--test-kill-at", "checkpoint.before_publish:5").expect(-signal.SIGKILL)
    assert len(run.checkpoints()) == 3
    return run


@pytest.fixture
def group_run(terrace, workspace, killed_by_group):
    run = harness.Run(terrace, workspace, killed_by_group.job, **{"output": str(workspace / "run")})
    harness.copy_run(killed_by_group.path, run.path)
    return run


def files_of(run, number):
    """Row files that the manifest of shard 0 names at a checkpoint."""
    _, files = run_files.read_manifest(run_files.store_folder(run) / f"manifest-{number:08}")
    return {file for file, _ in files}


def test_a_lost_block_goes_back(group_run, log, expected):
    """Nothing tells the keys of its rows: the run goes on from a checkpoint that does not name it, if there is one."""
    run = group_run
    numbers = [int(name.split("-")[1]) for name in run.checkpoints()]
    newest = run_files.newest_versions(run_files.row_files(run))
    late = files_of(run, numbers[-1]) - files_of(run, numbers[-2])
    file, row = next((file, row) for _, file, row in newest.values() if int(file.path.name.split("-")[1]) in late)
    run_files.overwrite(file.path, file.record_offset(row) + 100)
    assert_names(findings(run), file.path, file.record_offset(row))
    planned = plan(run)
    assert planned["checkpoint"] == numbers[-2] and planned["dropped_checkpoints"] == [numbers[-1]]
    repair(run)
    assert_same_as_undisturbed(run, log, expected)


def test_a_lost_block_of_every_checkpoint_is_dropped(group_run):
    """Its rows are told by the hashes of their keys; training makes them anew."""
    run = group_run
    rows = json.loads(inspect(run, "--json").stdout)["tables"][0]["rows"]
    blocks = set()
    for name in run.checkpoints():
        newest = run_files.newest_versions(run_files.row_files(run, number=int(name.split("-")[1])))
        _, file, row = next(iter(newest.values()))
        blocks.add((file.path, file.record_offset(row)))  # Two checkpoints may have the same one.
    for path, offset in blocks:
        run_files.overwrite(path, offset + 100)
    text = inspect(run, "--repair").stdout
    assert "blocks of up to" in text and re.search(r"\n      0x[0-9a-f]{16} to 0x[0-9a-f]{16}\n", text), text
    planned = plan(run)
    hashes = [range for store in planned["stores"] for range in store["dropped_hashes"]]
    assert hashes and all(first <= last for first, last in hashes), planned
    assert planned["successor"] == planned["newest_checkpoint"] + 1 and planned["undamaged_checkpoint"] is None
    repair(run)
    assert findings(run) == []
    assert 0 < rows - json.loads(inspect(run, "--json").stdout)["tables"][0]["rows"] <= 100 * len(hashes)
    run.train("--resume").expect(0)
    run.verify()


def test_a_damaged_key_section_of_blocks(group_run, log, expected):
    """Nothing is lost, and a block that a newer one has replaced is none."""
    run = group_run
    files = run_files.row_files(run)
    newest = run_files.newest_versions(files)
    file = next(file for file in files)
    run_files.overwrite(file.path, file.keys_offset + 3)
    for other in files:
        stale = [row for row, (key, version) in enumerate(other.entries) if newest[key][0] != version]
        if other is not file and stale:
            run_files.overwrite(other.path, other.record_offset(stale[0]) + 40)
            break
    planned = plan(run)
    assert planned["successor"] and not any(store["dropped_hashes"] for store in planned["stores"])
    repair(run)
    assert_same_as_undisturbed(run, log, expected)
