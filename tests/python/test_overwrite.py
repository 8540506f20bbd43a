"""What --overwrite deletes, and when it does not."""
import resource
import subprocess

import pytest

import harness
import jobs


@pytest.fixture(scope="module")
def log(logs):
    return logs.criteo(2000, seed=8, cardinality=1000, zipf=1.05)


@pytest.mark.parametrize("ssd", [False, True], ids=["rows", "ssd.paths"])
def test_overwrite_deletes_what_the_run_made_and_nothing_else(terrace, workspace, log, ssd):
    settings = {"ssd.paths": [str(workspace / "disk")]} if ssd else {}
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **settings,
                      **{"table.admit_after": 2, "memory.budget": "256MiB"})
    run.train().expect(0)
    digest = run.digest()
    (rows,) = (workspace / "disk").iterdir() if ssd else (run.path / "rows",)
    made = [path for folder in {run.path, rows} for path in folder.rglob("*")]
    folders = {path for path in made if path.is_dir()} | {run.path, rows}
    assert {"shard-0", "default", "dense", "admission", "checkpoints"} <= {path.name for path in folders}
    # Names as a person gives them, the nearest to the run's own, and folders of one's own.
    mine = [folder / name for folder in sorted(folders) for name in ("notes.txt", "mine/notes.txt", "checkpoint-best", "RUNNING.tmp", "rows-notes.txt", "dense-mine.tmp",
                                                                  "manifest-1-of-mine", "read-cost.txt", "rows-1/mine")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    for time_of_all in (1, 2):
        outcome = run.train("--overwrite").expect(0)
        for path in mine:
            assert path.read_text() == "mine"
            # Once only of the folder of a run that is no more.
            if time_of_all == 1 or run.path in path.parents:
                told = [f"'{name}' is not of the run and stays" for name in (path, path.parent)]
                assert any(words in outcome.output for words in told), (told, outcome.output)
        assert run.digest() == digest and run.verify()
        run.train("--resume").expect(0)
    for path in mine:
        path.unlink()
        if path.parent.name in ("mine", "rows-1"):
            path.parent.rmdir()
    assert "is not of the run" not in run.train("--overwrite").expect(0).output
    if not ssd:
        # What compaction has made and removed is a matter of time.
        left, names = ({path.name for path in paths if not path.name.startswith("rows-")} for paths in (run.path.rglob("*"), made))
        assert left == names


def test_overwrite_deletes_nothing_for_a_run_that_the_system_refuses(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    run.train().expect(0)
    digest = run.digest()
    outcome = run.train("--overwrite", "--test-faults", "new_read_queue:1:error").expect(1)
    assert "before anything is deleted" in outcome.output and run.digest() == digest, outcome.output
    # Enough for the program, whatever it reserves at its start, and for the job's own budget.
    most = 64 << 30

    def overwrite(*flags):
        return subprocess.run([str(terrace.binary), "train", str(run.job_path), "--overwrite", *flags], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)))
    limited = overwrite("--set", "memory.budget=128GiB")
    assert limited.returncode == 1 and "Nothing was deleted" in limited.stderr and "ulimit -v" in limited.stderr, limited
    assert run.digest() == digest and run.verify()
    assert overwrite().returncode == 0


def test_overwrite_goes_through_no_link(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    run.train().expect(0)
    digest = run.digest()
    elsewhere = workspace / "elsewhere"
    (run.path / "rows").rename(elsewhere)
    (run.path / "rows").symlink_to(elsewhere)
    assert run.digest() == digest
    outcome = run.train("--overwrite").expect(2)
    assert f"'{run.path}/rows' is a link to a folder" in outcome.output, outcome.output
    assert run.digest() == digest
    (run.path / "rows").unlink()
    elsewhere.rename(run.path / "rows")
    run.train("--overwrite").expect(0)


@pytest.mark.parametrize("name", ["rows/default/shard-0", "rows/default", "rows", "dense"])
def test_overwrite_of_a_run_with_a_link_that_leads_nowhere(terrace, workspace, log, name):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    run.train().expect(0)
    digest = run.digest()
    (run.path / name).rename(workspace / "elsewhere")
    (run.path / name).symlink_to(workspace / "not-mounted")
    run.train("--overwrite").expect(0)
    assert run.digest() == digest and run.verify() and not (run.path / name).is_symlink()
    assert any((workspace / "elsewhere").iterdir())


def test_a_run_that_is_given_up_beside_other_files_can_be_overwritten(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    run.train().expect(0)
    digest = run.digest()
    mine = run.path / "dense" / "notes.txt"
    mine.write_text("mine")
    failed = run.train("--overwrite", "--test-faults", "write:1:enospc:job.yaml").expect(1)
    assert "job.yaml" in failed.output and mine.read_text() == "mine", failed.output
    run.train("--overwrite").expect(0)
    assert run.digest() == digest and mine.read_text() == "mine"
